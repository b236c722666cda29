"""AgentDojo run logs (one run a record; also AgentDyn and DRIFT, which use its layout).

Labels follow AgentDojo's convention. With an attack, ``security: true`` means that the injected goal was
achieved: unsafe. Without one the run is safe, also where the user asks for an injection goal directly
(``user_task_id`` = ``injection_task_*``): it is then the user's own wish (metadata ``direct_goal``).

The first hazard comes from ``derived_first_hazard_call`` (1-based, over all calls), or, where that field is
missing and ``injection_targets.json`` lies beside the file, from the same rule: the first call of a listed
function whose arguments contain a listed text (in any case; an empty list allows every function or text). An
attempt that did not achieve the goal keeps the set's label (safe), but is unusable for timing and names the
step in metadata ``attempted_hazard``: it must neither teach the guard that the attempt is harmless, nor count
as a misplaced alert.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxguard.traces.files import Broken, read_records
from jaxguard.traces.readers.calls import Conversation, read_conversation
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import JaxguardError, Step, Trajectory

TARGETS_FILE = "injection_targets.json"
_REFUSAL_MARK = "</function_error>"

Targets = Mapping[tuple[str, str], tuple[frozenset[str], tuple[str, ...]]]
"""(suite, injection task) -> names of functions, and texts of which one must stand in the arguments; none: any."""


def _message_field(record: Record) -> str:
    return "messages" if "messages" in record else "conversations"


def _matches(record: Record) -> bool:
    return {"suite_name", "pipeline_name", "user_task_id"} <= record.keys() and isinstance(
        record.get(_message_field(record)), list
    )


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    suite, pipeline, user_task = (_text(record, name) for name in ("suite_name", "pipeline_name", "user_task_id"))
    injection = _optional(record, "injection_task_id")
    attack = _optional(record, "attack_type")
    attacked = injection is not None
    direct_goal = user_task.startswith("injection_task")
    name = _message_field(record)
    conversation = read_conversation(_retagged(record[name]), name)

    achieved = _achieved(record) if attacked else False
    hazard = _hazard_step(record, conversation, context.companions, suite, injection) if attacked else None
    timing = achieved is False if hazard is None else achieved is True
    metadata: dict[str, Any] = {"domain": suite, "model": pipeline, "user_task_id": user_task}
    if attacked or direct_goal:
        # Qualified by suite, so that it can serve as a group key for splits by goal.
        metadata["injection_task_id"] = f"{suite}/{injection or user_task}"
    if direct_goal:
        metadata["direct_goal"] = True
    if attack is not None:
        metadata["attack_type"] = attack
    if hazard is not None and achieved is not True:
        metadata["attempted_hazard"] = hazard
    if isinstance(record.get("utility"), bool):
        metadata["utility"] = record["utility"]
    if record.get("error"):
        metadata["run_error"] = str(record["error"])
    if conversation.final_reply:
        metadata["final_reply"] = conversation.final_reply
    if conversation.notes:
        metadata["notes"] = dict(conversation.notes)

    yield Trajectory(
        id="/".join((pipeline, suite, user_task, attack or "none", injection or "none")),
        instruction=conversation.instruction,
        steps=_labelled(conversation.steps, hazard, achieved),
        unsafe=achieved,
        first_hazard=hazard if achieved else None,
        timing=timing,
        group=f"{suite}/{user_task}",
        final_observation=conversation.final_observation,
        source="agentdojo",
        metadata=metadata,
    )


def _retagged(messages: object) -> object:
    """DRIFT writes its refusals of calls as user messages; the user did not say them, so they become system's."""
    if not isinstance(messages, list):
        return messages
    return [
        {"role": "system", "content": message["content"].removeprefix(_REFUSAL_MARK).lstrip()}
        if isinstance(message, dict)
        and message.get("role") == "user"
        and str(message.get("content")).startswith(_REFUSAL_MARK)
        else message
        for message in messages
    ]


def _labelled(steps: tuple[Step, ...], hazard: int | None, achieved: bool | None) -> tuple[Step, ...]:
    """Step labels as far as the source tells: nothing is known from an attempt on, nor without a label."""
    if hazard is not None:
        labels: list[bool | None] = [False] * hazard + [True if achieved else None] + [None] * len(steps)
    else:
        labels = [False if achieved is False else None] * len(steps)
    return tuple(step.marked(label, step.unobserved) for step, label in zip(steps, labels, strict=False))


def _achieved(record: Record) -> bool | None:
    security = record.get("security")
    if security is not None and not isinstance(security, bool):
        raise RecordError(f"security: got {security!r}, expected true, false or null")
    return security


def _hazard_step(
    record: Record, conversation: Conversation, targets: Targets | None, suite: str, injection: str | None
) -> int | None:
    name = "derived_first_hazard_call"
    if name in record:
        call = record[name]
        if call is None:
            return None
        count = len(conversation.steps)
        if isinstance(call, bool) or not isinstance(call, int) or not 1 <= call <= count:
            raise RecordError(f"{name}: got {call!r}, expected null or a call number in 1..{count}")
        return call - 1
    target = (targets or {}).get((suite, injection or ""))
    if target is None:
        return None
    functions, texts = target
    for index, step in enumerate(conversation.steps):
        if (not functions or step.tool in functions) and (not texts or _contains_any(step, texts)):
            return index
    return None


def _contains_any(step: Step, texts: tuple[str, ...]) -> bool:
    arguments = step.raw_arguments or json.dumps(step.arguments, ensure_ascii=False)
    return any(text in arguments.lower() for text in texts)


def _text(record: Record, name: str) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not value:
        raise RecordError(f"{name}: got {value!r}, expected a non-empty string")
    return value


def _optional(record: Record, name: str) -> str | None:
    """Older logs write "none" where newer ones write null."""
    value = record.get(name)
    if value is not None and not isinstance(value, str):
        raise RecordError(f"{name}: got {value!r}, expected a string or null")
    return value if value and value.lower() != "none" else None


def load_targets(folder: Path) -> Targets | None:
    """The folder's injection targets, or ``None`` where it has none.

    Raises:
        JaxguardError: The file is there, but is not a list of targets, or has two for one injection task.
    """
    path = folder / TARGETS_FILE
    if not path.is_file():
        return None
    targets: dict[tuple[str, str], tuple[frozenset[str], tuple[str, ...]]] = {}
    for item in read_records(path):
        where = f"{path}, record {item.position}"
        if isinstance(item, Broken):
            raise JaxguardError(f"{where}: {item.reason}")
        suite, task = (_target_field(item.record, name, where) for name in ("suite", "injection_task_id"))
        functions, texts = (_target_list(item.record, name, where) for name in ("functions", "args_contain_any"))
        target = frozenset(functions), tuple(text.lower() for text in texts)
        if targets.setdefault((suite, task), target) != target:
            raise JaxguardError(f"{where}: another target of {suite}/{task} than before, expected one")
    return targets


def _target_field(entry: Record, name: str, where: str) -> str:
    value = entry.get(name)
    if not isinstance(value, str):
        raise JaxguardError(f"{where}: {name} is {value!r:.80}, expected a string")
    return value


def _target_list(entry: Record, name: str, where: str) -> list[str]:
    value = entry.get(name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise JaxguardError(f"{where}: {name} is {value!r:.80}, expected a list of strings")
    return value


READER = Reader(
    name="agentdojo",
    description="AgentDojo run logs, old and new content shapes (also AgentDyn and DRIFT)",
    matches=_matches,
    read=_read,
    load_companions=load_targets,
    is_companion=lambda name: name == TARGETS_FILE,
)
