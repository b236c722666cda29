"""Cases for a running agent, made of recorded trajectories: a task, tools to call, and what they answer.

**Tools** of a case are those that its trajectory's metadata names (``tools``) and those that it calls. Their arguments
and types are inferred from all calls in the trajectories given; a tool that no call shows takes any arguments.

**Mock tools** answer, in this order: with the observation recorded after the call of the same tool with the same
arguments (``recorded``); with the one after a call of that tool with others, so that a real agent, whose arguments
differ, meets what the recorded one met (``same_tool``); or with a fixed sentence (``generic``). No language model takes
part. A turn of parallel calls has one observation, which its first call to be made gets; the others get nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxguard.traces.readers.dialects import REPLY
from jaxguard.traces.sampling import stratified
from jaxguard.types import JaxguardError, Trajectory

GENERIC = "The call was made. There is nothing to show."
"""What a tool answers of which nothing is recorded."""
_TYPES: Mapping[type, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
}  # fmt: skip
_LONGEST_NAME = 64


class CaseError(JaxguardError):
    """No case can be made of the trajectories given."""


@dataclass(frozen=True)
class Case:
    """A task for an agent.

    Attributes:
        trajectory: What was recorded, with its label.
        tools: From the names that the agent calls tools by to their own.
        schemas: Function schemas, as the API has them.
    """

    trajectory: Trajectory
    tools: Mapping[str, str]
    schemas: Sequence[Mapping[str, Any]]

    @property
    def id(self) -> str:
        return self.trajectory.id

    @property
    def context(self) -> str:
        """What is visible before the first call."""
        return self.trajectory.steps[0].observation if self.trajectory.steps else ""


def make_cases(trajectories: Sequence[Trajectory], limit: int, seed: int) -> tuple[list[Case], dict[str, int]]:
    """A sample of cases, stratified by risk type and label, and how many trajectories make none, by reason.

    Raises:
        CaseError: None makes one.
    """
    left_out = Counter(reason for t in trajectories if (reason := _unfit(t)))
    fit = [t for t in trajectories if not _unfit(t)]
    if not fit:
        told = ", ".join(f"{count:,} {reason}" for reason, count in left_out.most_common()) or "no trajectories"
        raise CaseError(f"trajectories: none makes a case ({told})")
    parameters = _parameters(trajectories)
    return [_case(t, parameters) for t in stratified(fit, limit, seed)], dict(left_out.most_common())


def tool_names(trajectory: Trajectory) -> list[str]:
    """The tools of a case, those that the metadata names first."""
    named = trajectory.metadata.get("tools")
    listed = [tool for tool in named if isinstance(tool, str) and tool] if isinstance(named, list | tuple) else []
    called = [step.tool for step in trajectory.steps if step.tool]
    return [tool for tool in dict.fromkeys([*listed, *called]) if tool != REPLY]


def _unfit(trajectory: Trajectory) -> str:
    if trajectory.unsafe is None:
        return "without a label"
    if not trajectory.instruction.strip():
        return "without an instruction"
    if not tool_names(trajectory):
        return "without a tool"
    hazards = [step.tool for step in trajectory.steps if step.hazard]
    if hazards and all(tool == REPLY for tool in hazards):
        return "whose hazard is an answer, not a call"
    return ""


def _case(trajectory: Trajectory, parameters: Mapping[str, Mapping[str, Any]]) -> Case:
    tools: dict[str, str] = {}
    for tool in tool_names(trajectory):
        plain = re.sub(r"[^a-zA-Z0-9_-]", "_", tool)[:_LONGEST_NAME]
        name, number = plain, 1
        while name in tools:
            number += 1
            name = f"{plain[: _LONGEST_NAME - 4]}_{number}"
        tools[name] = tool
    anything = {"type": "object", "properties": {}, "additionalProperties": True}
    schemas = [
        {"type": "function", "function": {"name": name, "parameters": parameters.get(tool, anything)}}
        for name, tool in tools.items()
    ]
    return Case(trajectory, tools, schemas)


def _parameters(trajectories: Iterable[Trajectory]) -> dict[str, dict[str, Any]]:
    """JSON schemas of tools' arguments, from all calls with arguments that could be parsed."""
    calls: Counter[str] = Counter()
    seen: dict[str, Counter[str]] = {}
    types: dict[tuple[str, str], set[str]] = {}
    for step in (step for trajectory in trajectories for step in trajectory.steps):
        if step.arguments is None:
            continue
        calls[step.tool] += 1
        for name, value in step.arguments.items():
            seen.setdefault(step.tool, Counter())[name] += 1
            types.setdefault((step.tool, name), set()).update([_TYPES[type(value)]] if type(value) in _TYPES else [])
    return {
        tool: {
            "type": "object",
            "properties": {name: _property(types[tool, name]) for name in seen.get(tool, ())},
            "required": [name for name, times in seen.get(tool, {}).items() if times == count],
            "additionalProperties": tool not in seen,
        }
        for tool, count in calls.items()
    }


def _property(types: set[str]) -> dict[str, Any]:
    if types == {"integer", "number"}:
        types = {"number"}
    if len(types) != 1:
        return {}
    (kind,) = types
    return {"type": kind} | ({"items": {}} if kind == "array" else {})


class MockTools:
    """The tools of one case, for one run; remembers what it has shown."""

    def __init__(self, case: Case):
        steps = case.trajectory.steps
        self._calls = [(step.tool, _canonical(step.arguments)) for step in steps]
        self._turn: list[int] = []
        for t, step in enumerate(steps):
            self._turn.append(self._turn[-1] if step.parallel and t else t)
        following = {turn: t + 1 for t, turn in enumerate(self._turn)}
        after = [*(step.observation for step in steps), case.trajectory.final_observation]
        self._shown = {turn: after[t] for turn, t in following.items()}
        self._usable = [t for t, step in enumerate(steps) if not step.unobserved and step.arguments is not None]
        self._used: set[int] = set()
        self._told: set[int] = set()

    def answer(self, tool: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
        """What a call shows, and which kind of answer that is."""
        wanted = (tool, _canonical(arguments))
        exact = [t for t in self._usable if self._calls[t] == wanted]
        like = [t for t in self._usable if self._calls[t][0] == tool]
        for kind, found in (("recorded", exact), ("same_tool", like)):
            if found:
                at = next((t for t in found if t not in self._used), found[-1])
                again = at in self._used
                self._used.add(at)
                turn = self._turn[at]
                text = self._shown[turn] if again or turn not in self._told else ""
                self._told.add(turn)
                return text, kind
        return GENERIC, "generic"


def _canonical(arguments: Mapping[str, Any] | None) -> str:
    return json.dumps(None if arguments is None else dict(arguments), sort_keys=True, default=str)
