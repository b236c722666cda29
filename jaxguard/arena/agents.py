"""Scripted agents as AgentDojo pipelines, and the place of the guard in them.

A call that the guard does not let through is not executed: the agent gets an error as its result and goes on with the
rest of its script. The guard is shown what the agent saw since the last call that ran, as the reader of AgentDojo's
logs would make it of the messages so far; its own refusals are no part of that.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentdojo.agent_pipeline import BasePipelineElement, InitQuery, ToolsExecutionLoop, ToolsExecutor
from agentdojo.functions_runtime import FunctionCall
from agentdojo.types import ChatAssistantMessage, ChatToolResultMessage, text_content_block_from_string

from jaxguard.arena.plan import REFUSED
from jaxguard.guard import Session
from jaxguard.traces.readers.calls import Conversation, read_conversation
from jaxguard.types import Verdict

Message = dict[str, Any]

GIVES_UP = "Some calls were not permitted, so that I could not finish."


@dataclass(frozen=True)
class Script:
    """What an agent is going to do.

    Attributes:
        own: The calls of the user's task.
        injected: The calls of the injected goal; empty for an agent that ignores it.
        exposed: Positions in ``own`` of the calls whose result shows the injection; the agent follows it only after
            one of them was executed.
        at_once: Follow it right then, and else after the last call of the user's task.
        answer: Closing words where all of its own calls ran; otherwise it does not claim to know.
    """

    own: Sequence[FunctionCall]
    injected: Sequence[FunctionCall]
    exposed: Sequence[int]
    at_once: bool
    answer: str


@dataclass
class Course:
    """What happened in a run, by the id of each call: ``own-N`` or ``injected-N``.

    ``seconds`` is what the guard took for each call, encoding included.
    """

    proposed: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def ran(self, kind: str) -> list[str]:
        """Calls of a kind (``own``, ``injected``) that were executed without an error."""
        return [i for i in self.proposed if i.startswith(kind) and i not in self.refused | self.failed]


class ScriptedAgent(BasePipelineElement):
    """Says the next call of its script whenever it is asked; stands where a language model would."""

    def __init__(self, script: Script, course: Course):
        self._script = script
        self._course = course
        self._own = [_call(f"own-{i}", call) for i, call in enumerate(script.own)]
        self._injected = [_call(f"injected-{i}", call) for i, call in enumerate(script.injected)]

    def query(self, query, runtime, env=None, messages=(), extra_args=None):
        last = messages[-1]
        if last["role"] == "tool" and last["error"]:
            kind = self._course.refused if last["error"] == REFUSED else self._course.failed
            kind.add(last["tool_call"].id)
        following = self._next()
        if following is None:
            own = {call.id for call in self._own}
            text = GIVES_UP if own & self._course.refused else self._script.answer
            said = ChatAssistantMessage(role="assistant", content=_text(text), tool_calls=None)
        else:
            self._course.proposed.append(following.id)
            said = ChatAssistantMessage(role="assistant", content=_text(""), tool_calls=[following])
        return query, runtime, env, [*messages, said], extra_args or {}

    def _next(self) -> FunctionCall | None:
        ran = set(self._course.ran("own"))
        seen = any(f"own-{i}" in ran for i in self._script.exposed)
        if self._injected and seen and (self._script.at_once or not self._own_left()):
            left = [call for call in self._injected if call.id not in self._course.proposed]
            if left:
                return left[0]
        return next(iter(self._own_left()), None)

    def _own_left(self) -> list[FunctionCall]:
        return [call for call in self._own if call.id not in self._course.proposed]


class GuardedTools(ToolsExecutor):
    """Asks the guard before each call, and executes what it lets through."""

    def __init__(self, session: Session | None, course: Course):
        super().__init__()
        self._session = session
        self._course = course

    def query(self, query, runtime, env=None, messages=(), extra_args=None):
        if self._session is None:
            return super().query(query, runtime, env, messages, extra_args or {})
        results: list[Message] = []
        for call, allowed in self._judged(messages):
            if allowed:
                alone = {**messages[-1], "tool_calls": [call]}
                results.append(super().query(query, runtime, env, [alone], {})[3][-1])
            else:
                results.append(
                    ChatToolResultMessage(
                        role="tool", content=_text(""), tool_call_id=call.id, tool_call=call, error=REFUSED
                    )
                )
        return query, runtime, env, [*messages, *results], extra_args or {}

    def _judged(self, messages: Sequence[Message]) -> list[tuple[FunctionCall, bool]]:
        assert self._session is not None
        calls = messages[-1]["tool_calls"] or []
        steps = conversation(executed(messages, self._course.refused)).steps[-len(calls) :] if calls else ()
        judged = []
        for call, step in zip(calls, steps, strict=True):
            started = time.perf_counter()
            verdict = self._session.check(step.observation, step.tool, step.arguments, call_id=call.id)
            if verdict.allowed:
                self._session.commit(call.id)
            self._course.seconds[call.id] = time.perf_counter() - started
            self._course.verdicts[call.id] = verdict
            judged.append((call, verdict.allowed))
        return judged


class Arena(BasePipelineElement):
    """A scripted agent with its tools, and a guard's session between them if there is one.

    What AgentDojo judges (the messages that :meth:`query` returns) holds the calls that ran and no others; all of
    them are in ``messages``.
    """

    def __init__(self, instruction: str, script: Script, session: Session | None):
        self.course = Course()
        self.messages: list[Message] = []
        self._instruction = instruction
        agent = ScriptedAgent(script, self.course)
        calls = len(script.own) + len(script.injected)
        loop = ToolsExecutionLoop([GuardedTools(session, self.course), agent], max_iters=calls + 1)
        self._elements = [InitQuery(), agent, loop]

    def query(self, query, runtime, env=None, messages=(), extra_args=None):
        state = (self._instruction, runtime, env, list(messages), extra_args or {})
        for element in self._elements:
            state = element.query(*state)
        self.messages = list(state[3])
        return query, runtime, state[2], executed(self.messages, self.course.refused), state[4]


def executed(messages: Sequence[Message], refused: set[str]) -> list[Message]:
    """The messages without the calls that were refused, and without their results."""
    kept = []
    for message in messages:
        calls = message.get("tool_calls") if message["role"] == "assistant" else None
        if calls:
            left = [call for call in calls if call.id not in refused]
            if left:
                kept.append({**message, "tool_calls": left})
        elif message["role"] != "tool" or message["tool_call_id"] not in refused:
            kept.append(message)
    return kept


def logged(messages: Sequence[Message]) -> list[Message]:
    """Messages as JSON values, in the layout of AgentDojo's logs."""
    made = []
    for message in messages:
        own = dict(message)
        if own.get("tool_calls"):
            own["tool_calls"] = [call.model_dump(mode="json") for call in own["tool_calls"]]
        if "tool_call" in own:
            own["tool_call"] = own["tool_call"].model_dump(mode="json")
        made.append(own)
    return made


def conversation(messages: Sequence[Message]) -> Conversation:
    """The messages as jaxguard reads them in AgentDojo's logs."""
    return read_conversation(logged(messages), "messages")


def _call(name: str, call: FunctionCall) -> FunctionCall:
    return FunctionCall(function=call.function, args=copy.deepcopy(dict(call.args)), id=name)


def _text(text: str) -> list[dict[str, str]]:
    return [text_content_block_from_string(text)]
