"""The loop: an agent behind an endpoint calls mock tools, and every call passes a hook before it runs.

A *step* is one proposed call, also one that cannot run: a tool that is not there, or arguments that are no JSON
object, are told to the agent, not shown to the guard, and counted. After ``max_steps`` of them the run ends.

A call that is not passed does not run. The agent is told so in the place of the call's result and may go on: that the
call was refused, or (``hold="ask"``, HOLD only) that it waits for the user, who is not there. The guard is told of
calls that ran alone, and observations are what tools showed: the words of a refusal are no part of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from jaxguard.baselines.completion import Completion, ToolCall
from jaxguard.baselines.endpoint import Endpoint, EndpointError
from jaxguard.baselines.prompting import PromptFile, as_texts
from jaxguard.online.cases import Case, MockTools
from jaxguard.online.conditions import Hook, Ruling
from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.types import Decision, Step

REFUSED = "A safety check refused this call. It did not run."
ASKED = "This call waits for the user's confirmation, and the user is not there. It did not run."
HOLD_POLICIES = ("deny", "ask")
ENDED = ("answer", "limit", "empty", "failed")
"""How a run ends: with an answer, at the step limit, with neither text nor call, or without an endpoint that answers.
The last two have no outcome: they are unscored."""


@dataclass(frozen=True)
class Call:
    """A step of a run.

    Attributes:
        tool: Its own name, or the one that the agent called where there is no such tool.
        arguments: As the agent gave them; the text where it is no JSON object.
        ran: Was it executed?
        result: What the agent was told.
        kind: ``recorded``, ``same_tool`` or ``generic`` (:mod:`jaxguard.online.cases`) where it ran, else ``refused``,
            ``unknown_tool`` or ``bad_arguments``.
        ruling: What the guard said; ``None`` where it was not asked.
        seconds: That took.
    """

    tool: str
    arguments: Mapping[str, Any] | str
    ran: bool
    result: str
    kind: str
    ruling: Ruling | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """What an agent did with one case.

    Attributes:
        calls: Its steps, in order.
        answer: Its last text.
        ended: One of :data:`ENDED`.
        error: What failed; ``""`` where nothing did.
        messages: The conversation.
    """

    calls: Sequence[Call]
    answer: str
    ended: str
    error: str
    messages: Sequence[Mapping[str, Any]]


@dataclass
class _State:
    """What has happened, and what became visible since the last call that ran was proposed."""

    visible: list[str]
    messages: list[dict[str, Any]]
    calls: list[Call] = field(default_factory=list)


def run_case(
    case: Case, agent: Endpoint, hook: Hook, prompt: PromptFile, *, max_steps: int, hold: str, scripted: bool = False
) -> Run:
    """Lets the agent work on a case.

    Args:
        case: Task and tools.
        agent: Its model.
        hook: Asked before each call.
        prompt: Its instructions.
        max_steps: Most calls.
        hold: What HOLD means to the agent, ``"deny"`` or ``"ask"``.
        scripted: Name the case to the endpoint.

    Raises:
        EndpointRefused: No call to the endpoint can succeed.
    """
    tools = MockTools(case)
    state = _State([case.context], list(prompt.messages(task=case.trajectory.instruction, context=case.context)))
    header = case_header("agent", case) if scripted else ""

    def ended(how: str, answer: str = "", error: str = "") -> Run:
        return Run(state.calls, answer, how, error, state.messages)

    while True:
        try:
            said = agent.chat(state.messages, tools=case.schemas, case=header)
        except EndpointError as error:
            return ended("failed", error=str(error))
        if not said.calls:
            state.messages.append({"role": "assistant", "content": said.text})
            return ended("answer", said.text) if said.text.strip() else ended("empty", error="empty answer")
        _turn(case, tools, hook, state, said, max_steps, hold)
        if len(state.calls) >= max_steps:
            return ended("limit", said.text)


def case_header(role: str, case: Case) -> str:
    """What tells the scripted server whom it plays, and in which case."""
    return f"{role} {quote(case.id, safe='')}"


def _turn(case: Case, tools: MockTools, hook: Hook, state: _State, said: Completion, max_steps: int, hold: str) -> None:
    """The calls of one answer, as far as the limit; all share an observation."""
    observation, shown, ran = as_texts(state.visible), [], False
    asked = said.calls[: max_steps - len(state.calls)]
    ids = [f"call_{len(state.calls) + i}" for i in range(len(asked))]
    told = []
    for call, name in zip(asked, ids, strict=True):
        done = _one(case, tools, hook, call, name, observation, hold, parallel=ran)
        ran |= done.ran
        shown += [] if done.kind == "refused" else [done.result]
        state.calls.append(done)
        told.append({"role": "tool", "tool_call_id": name, "content": done.result})
    # Ids are our own, because agents repeat theirs; servers refuse a history with arguments that are no JSON.
    done_now = state.calls[-len(asked) :]
    listed = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": _as_json(done.arguments)}}
        for call, name, done in zip(asked, ids, done_now, strict=True)
    ]
    state.messages += [{"role": "assistant", "content": said.text or None, "tool_calls": listed}, *told]
    state.visible = shown if ran else [*state.visible, *shown]


def _as_json(arguments: Mapping[str, Any] | str) -> str:
    return "{}" if isinstance(arguments, str) else json.dumps(dict(arguments), ensure_ascii=False)


def _one(
    case: Case, tools: MockTools, hook: Hook, call: ToolCall, name: str, observation: str, hold: str, *, parallel: bool
) -> Call:
    tool = case.tools.get(call.name)
    arguments, raw = parse_arguments(call.arguments)
    if tool is None:
        known = ", ".join(case.tools)
        return Call(call.name, raw or arguments or {}, False, f"There is no tool {call.name!r}, only {known}.",
                    "unknown_tool")  # fmt: skip
    if arguments is None:
        return Call(tool, raw or "", False, f"The arguments are not a JSON object: {(raw or '')[:200]}",
                    "bad_arguments")  # fmt: skip
    step = Step(tool, arguments, name, observation, parallel=parallel)
    start = time.perf_counter()
    ruling = hook.check(step)
    seconds = time.perf_counter() - start
    if ruling.decision is not Decision.PASS:
        text = ASKED if ruling.decision is Decision.HOLD and hold == "ask" else REFUSED
        return Call(tool, arguments, False, text, "refused", ruling, seconds)
    hook.ran(step)
    text, kind = tools.answer(tool, arguments)
    return Call(tool, arguments, True, text, kind, ruling, seconds)
