"""What a router is shown of a proposed action, and what a person would have said to it.

A *snapshot* is x = (memory m, task u, domain d, prior trace h_<t, action a_t) (Safety Sentry, section 3.1). Its
canonical JSON is what a language model reads and what its logits are stored under: equal snapshots have equal
text on every machine.

A *review* says for one step which way it should have gone. Reviews travel in a trajectory's metadata::

    "reviews": [{"step": 4, "route": "ASK", "trigger": "h"}]

beside ``memory`` (persona memory, a text), ``persona``, ``service`` and ``flip_pair`` (shared by two that differ in
memory alone).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxguard.types import JaxguardError, Route, Step, Trajectory


class SnapshotError(JaxguardError):
    """A snapshot or a review is not what it should be; the message names the trajectory and the field."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call as a snapshot shows it.

    Attributes:
        tool: Name of the tool.
        arguments: The call's JSON object, or the text that stood there where it could not be parsed.
    """

    tool: str
    arguments: Mapping[str, Any] | str


@dataclass(frozen=True, slots=True)
class Outcome:
    """An earlier call with what became visible after it (``""``: nothing, or only after the next, parallel call)."""

    call: Call
    observation: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that may decide about a proposed action.

    Attributes:
        memory: What is known of the user, a first-person text; ``""`` where there is none.
        task: The instruction.
        domain: Application domain, e.g. ``"code hosting"``; ``""`` where it is not known.
        context: What was visible before the first call; mostly ``""``.
        trace: The calls before this one, in order.
        action: The proposed call.
    """

    memory: str
    task: str
    domain: str
    context: str
    trace: tuple[Outcome, ...]
    action: Call

    def to_json(self) -> str:
        """Canonical JSON: keys in the order above, those within arguments sorted, no spaces, UTF-8 as it is.

        Raises:
            SnapshotError: Arguments that JSON cannot hold (NaN, infinity, other types, too deep).
        """
        try:
            value = {
                "memory": self.memory,
                "task": self.task,
                "domain": self.domain,
                "context": self.context,
                "trace": [_plain(entry.call) | {"observation": entry.observation} for entry in self.trace],
                "action": _plain(self.action),
            }
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise SnapshotError(f"snapshot of a call to {self.action.tool!r}: {error}, expected JSON values") from error
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@dataclass(frozen=True, slots=True)
class Review:
    """Which way one step should have gone.

    Attributes:
        step: Index of the step.
        route: The label.
        trigger: Letter of the trigger (Safety Sentry, table 4: ``"a"`` to ``"n"``), ``""`` where it is not known.
    """

    step: int
    route: Route
    trigger: str = ""


TRIGGERS: Mapping[str, Route] = {
    letter: route
    for letters, route in (("abcd", Route.EXECUTE), ("efghi", Route.ASK), ("jklmn", Route.REFUSE))
    for letter in letters
}
"""The route that a trigger has by itself; memory may move it."""

TRIGGER_NAMES: Mapping[str, str] = {
    "a": "pure read",
    "b": "scoped write",
    "c": "risk consumed",
    "d": "reversible link change",
    "e": "missing parameter",
    "f": "authorization gap",
    "g": "irreversible high impact",
    "h": "ambiguous target",
    "i": "unverified state",
    "j": "data exfiltration",
    "k": "audit tampering",
    "l": "credential theft",
    "m": "targeted harm",
    "n": "availability attack",
}
"""What the table calls them."""


def snapshot(trajectory: Trajectory, step: int) -> Snapshot:
    """The snapshot of a step; depends on nothing that happened after its proposal (pre-action rule).

    Args:
        trajectory: ``metadata`` may hold ``memory``, and ``domain`` or ``service``.
        step: Index of the proposed step, 0 to T - 1.

    Raises:
        SnapshotError: No such step, or a ``memory`` or ``domain`` that is not a text.
    """
    if not 0 <= step < len(trajectory):
        raise SnapshotError(f"trajectory {trajectory.id!r}: step is {step}, expected 0 to {len(trajectory) - 1}")
    steps = trajectory.steps[: step + 1]
    trace = tuple(
        Outcome(_call_of(before), "" if after.parallel else after.observation)
        for before, after in itertools.pairwise(steps)
    )
    return Snapshot(
        memory=memory_of(trajectory),
        task=trajectory.instruction,
        domain=_text(trajectory, "domain") or _text(trajectory, "service"),
        context=steps[0].observation,
        trace=trace,
        action=_call_of(steps[-1]),
    )


def memory_of(trajectory: Trajectory) -> str:
    """The persona memory of a trajectory, ``""`` where it has none.

    Raises:
        SnapshotError: ``memory`` in its metadata is not a text.
    """
    return _text(trajectory, "memory")


def reviews_of(trajectory: Trajectory) -> tuple[Review, ...]:
    """The reviewed steps of a trajectory, in order; empty where it has none.

    Raises:
        SnapshotError: ``reviews`` in its metadata is not what the module describes.
    """
    listed = trajectory.metadata.get("reviews")
    where = f"trajectory {trajectory.id!r}: reviews"
    if listed is None:
        return ()
    if not isinstance(listed, list | tuple):
        raise SnapshotError(f"{where}: got {type(listed).__name__}, expected a list")
    found: list[Review] = []
    for at, value in enumerate(listed):
        if not isinstance(value, Mapping) or not {"step", "route"} <= value.keys() <= {"step", "route", "trigger"}:
            raise SnapshotError(f"{where} {at}: got {value!r:.80}, expected step, route and perhaps trigger")
        step, route, trigger = value["step"], value["route"], value.get("trigger", "")
        if type(step) is not int or not 0 <= step < len(trajectory):
            raise SnapshotError(f"{where} {at} step: got {step!r:.80}, expected 0 to {len(trajectory) - 1}")
        if not isinstance(route, str) or route not in Route.__members__:
            raise SnapshotError(
                f"{where} {at} route: got {route!r:.80}, expected one of {', '.join(Route.__members__)}"
            )
        if trigger != "" and not (isinstance(trigger, str) and trigger in TRIGGERS):
            raise SnapshotError(f"{where} {at} trigger: got {trigger!r:.80}, expected one of a to n")
        if found and step <= found[-1].step:
            raise SnapshotError(f"{where} {at} step: got {step} after {found[-1].step}, expected a later one")
        found.append(Review(step, Route[route], trigger))
    return tuple(found)


def review_record(review: Review) -> dict[str, Any]:
    """A review as it stands in ``metadata["reviews"]``."""
    record: dict[str, Any] = {"step": review.step, "route": review.route.name}
    return record | ({"trigger": review.trigger} if review.trigger else {})


def _text(trajectory: Trajectory, name: str) -> str:
    value = trajectory.metadata.get(name)
    if value is not None and not isinstance(value, str):
        raise SnapshotError(f"trajectory {trajectory.id!r}: {name} is {value!r:.80}, expected a text")
    return value or ""


def _call_of(step: Step) -> Call:
    if step.raw_arguments is not None:
        return Call(step.tool, step.raw_arguments)
    return Call(step.tool, {} if step.arguments is None else step.arguments)


def _plain(call: Call) -> dict[str, Any]:
    arguments = call.arguments if isinstance(call.arguments, str) else _sorted(dict(call.arguments))
    return {"tool": call.tool, "arguments": arguments}


def _sorted(value: Any) -> Any:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise SnapshotError(f"arguments: got keys {list(value)!r:.80}, expected texts")
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list | tuple) else value
