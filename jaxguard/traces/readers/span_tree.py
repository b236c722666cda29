"""One conversation out of the spans of a trace: model calls, tool runs, and the chains around them.

A call shows up in the response of a model call, in the requests of all later ones, in a tool's span and in the
outputs of the chains around these: it is told once. What is told stands in order of time, for all agents of a trace
together (a sub-agent's steps stand between its parent's call and the result of that), under two rules:

* A tool call stands where the model call that proposed it *started*: what ended later cannot have been seen by it.
* What else a model said, what a tool returned, and what a span around others returned, stands where it *ended*.

A request tells what was not told before, counted: its second "yes" is new where one was told. Calls are the same by id
and tool; without an id, the k-th call with the same tool and arguments is the k-th. A tool's span belongs to the call
of its id, else to the latest call of its tool and arguments that has no span; with none, it is a call of its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from jaxguard.traces.readers.calls import read_conversation, visible_text
from jaxguard.traces.readers.message_dialects import Message, is_structured, messages_in, result_text, unwrap
from jaxguard.traces.readers.told import Told
from jaxguard.traces.registry import RecordError
from jaxguard.types import Trajectory

_MAX_METADATA_CHARS = 500
# How agents without a notation of their own for calls (CrewAI's, say) write them; what ran stands in the tools' spans.
_WRITTEN_ACTION = re.compile(r"^[ \t]*Action[ \t]*:[^\n]*\n[ \t]*Action Input[ \t]*:", re.MULTILINE)
_FOREVER = float("inf")


@dataclass(eq=False)
class Span:
    """One model call, tool run, or anything else that was traced.

    Attributes:
        at: Where it stands, for error messages.
        id: Its own.
        parent: Id of the span around it, ``""`` for none.
        kind: ``"llm"``, ``"tool"`` or ``"other"``.
        name: Of the tool, for a tool.
        start: Seconds.
        end: Seconds; ``None`` where it did not end.
        inputs: What went in, as logged.
        outputs: What came out, as logged; ``None`` for nothing.
        call_id: Of the call that a tool ran for, where the log tells.
        error: What went wrong.
    """

    at: str
    id: str
    parent: str
    kind: Literal["llm", "tool", "other"]
    name: str
    start: float
    end: float | None
    inputs: Any
    outputs: Any
    call_id: str = ""
    error: str = ""

    @property
    def until(self) -> float:
        """When its outputs were there; never, where nothing tells."""
        return _FOREVER if self.end is None else max(self.start, self.end)


@dataclass
class _Nesting:
    """How model calls and tools stand within each other.

    Attributes:
        model: The nearest model call around each model call, by id.
        inner: Number of model calls nearest within one.
        holds_tool: Model calls with a tool somewhere within.
        copies: Tools' spans that repeat a span around them.
    """

    model: dict[str, Span | None] = field(default_factory=dict)
    inner: Counter[str] = field(default_factory=Counter)
    holds_tool: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)


def conversation_messages(spans: Sequence[Span]) -> list[Message]:
    """The chat messages that the spans of one trace tell, for ``read_conversation``.

    Raises:
        RecordError: No span is an agent's, or one cannot be read; the message says which.
    """
    nesting = _nesting(spans)
    tellers, silent = _tellers(spans, nesting)
    told = Told()
    ids = {span.id for span in spans}
    outer = [span for span in spans if span.parent not in ids and span.kind == "other"]
    outermost = {span.id for span in outer}
    for span, is_end in _in_time(spans, outermost):
        told.now = span.until if is_end else span.start
        if span.id in tellers:
            if not is_end:
                told.history(messages_in(unwrap(span.inputs), "user", f"{span.at}.input"))
            told.response(span.id, messages_in(unwrap(span.outputs), "assistant", f"{span.at}.output"), is_end)
        elif span.kind == "tool":
            if span.id not in nesting.copies and is_end:
                told.tool_ended(span.id, *_result(span))
            elif span.id not in nesting.copies:
                told.tool_started(span.id, span.name, span.call_id, span.inputs, span.until)
        elif span.id in outermost and not is_end and tellers:
            # What the application was asked, before any template of a prompt; its other inputs tell no one anything.
            asked = messages_in(unwrap(span.inputs), "user", f"{span.at}.input", known_only=True)
            told.history([message for message in asked if message["role"] != "system"])
        else:
            payload, role = (span.outputs, "assistant") if is_end else (span.inputs, "user")
            # Around several model calls stands what an agent was asked and said; a chain's state only repeats them.
            speaks = span.kind == "llm" and span.id not in silent
            if speaks or is_structured(unwrap(payload)):
                place = f"{span.at}.{'output' if is_end else 'input'}"
                messages = messages_in(unwrap(payload), role, place, known_only=not speaks)
                told.history(messages, texts=speaks or not tellers)
    return _with_task(_system_first(told.messages), spans, outer)


def _system_first(messages: list[Message]) -> list[Message]:
    """The system prompt that a model was called with, before the task that the application was asked."""
    first = next((place for place, message in enumerate(messages) if message["role"] not in ("system", "user")), None)
    head = messages[:first]
    return [*sorted(head, key=lambda message: message["role"] != "system"), *messages[len(head) :]]


def _result(span: Span) -> tuple[bool, str]:
    """Did a tool return, and what?"""
    text = result_text(unwrap(span.outputs))
    return span.outputs is not None or bool(span.error), "\n".join(part for part in (text, span.error) if part)


def trajectory_of(
    spans: Sequence[Span], own_id: str, source: str, group: str, metadata: Mapping[str, Any]
) -> Trajectory:
    """The trajectory of a trace.

    Raises:
        RecordError: It is not an agent's, or cannot be read.
    """
    if not any(span.inputs or span.outputs for span in spans):
        raise RecordError(
            f"none of the {len(spans)} spans holds what went in or came out, expected both to be exported"
        )
    messages = conversation_messages(spans)
    conversation = read_conversation(messages, "messages of the trace")
    said = [visible_text(message["content"]) for message in messages if message["role"] == "assistant"]
    if not conversation.steps and any(_WRITTEN_ACTION.search(text) for text in said):
        raise RecordError(
            "a model writes 'Action: ..., Action Input: ...' in its text, but no tool's span tells the call"
        )
    kept: dict[str, Any] = {
        name: value
        for name, value in metadata.items()
        if isinstance(value, str | int | float) and value != "" and len(str(value)) <= _MAX_METADATA_CHARS
    }
    return conversation.trajectory(kept, id=own_id, group=group, source=source)


def seconds(value: Any, at: str) -> float:
    """A time as logs write it: ISO 8601 (UTC where no zone is given) or milliseconds since 1970."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value / 1000
        read = datetime.fromisoformat(value)
        return (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise RecordError(f"{at}: got {value!r:.60}, expected a time") from None


def _with_task(messages: list[Message], spans: Sequence[Span], outer: Sequence[Span]) -> list[Message]:
    """The task from the outermost span, where nothing tells it before the first tool call."""
    for message in messages:
        if message["role"] == "user" and visible_text(message["content"]).strip():
            return messages
        if message.get("tool_calls"):
            break
    first = min(outer, key=lambda span: span.start, default=None)
    asked = messages_in(unwrap(first.inputs), "user", f"{first.at}.input") if first is not None else []
    task = [message for message in asked if message["role"] == "user"][:1]
    if not messages and not (task and any(span.kind != "other" for span in spans)):
        raise RecordError(f"none of the {len(spans)} spans is a model call, a tool run or a chat with anything in it")
    return [*task, *messages]


def _in_time(spans: Sequence[Span], outermost: set[str]) -> Iterator[tuple[Span, bool]]:
    """Starts and ends (True) by time; at one time what had started before ends first, and models start before tools."""
    order = {"llm": 1, "other": 2, "tool": 3}
    events: list[tuple[float, int, int, Span]] = []
    for span in spans:
        events.append((span.start, 1, 0 if span.id in outermost else order[span.kind], span))
        events.append((span.until, 2 if span.until == span.start else 0, 0, span))
    events.sort(key=lambda event: event[:3])
    return ((span, place != 1) for _, place, _, span in events)


def _nesting(spans: Sequence[Span]) -> _Nesting:
    by_id: dict[str, Span] = {}
    for span in spans:
        if span.id in by_id:
            raise RecordError(f"{span.at}.id: {span.id!r} stands twice, expected an id of its own for each span")
        by_id[span.id] = span
    around: dict[str, tuple[Span | None, Span | None]] = {}  # nearest model call and nearest tool
    for span in spans:
        path: list[Span] = []
        on_path: set[str] = set()
        node: Span | None = span
        while node is not None and node.id not in around:
            if node.id in on_path:
                raise RecordError(f"{node.at}: its parents form a circle, expected a tree")
            on_path.add(node.id)
            path.append(node)
            node = by_id.get(node.parent)
        for inner in reversed(path):
            parent = by_id.get(inner.parent)
            model, tool = around[parent.id] if parent is not None else (None, None)
            model = parent if parent is not None and parent.kind == "llm" else model
            tool = parent if parent is not None and parent.kind == "tool" else tool
            around[inner.id] = (model, tool)
    nesting = _Nesting()
    for span in spans:
        model, tool = around[span.id]
        if span.kind == "llm":
            nesting.model[span.id] = model
            nesting.inner[model.id if model is not None else ""] += 1
        elif span.kind == "tool":
            if tool is not None and (tool.name, tool.inputs) == (span.name, span.inputs):
                nesting.copies.add(span.id)
            while model is not None and model.id not in nesting.holds_tool:
                nesting.holds_tool.add(model.id)
                model = around[model.id][0]
    return nesting


def _tellers(spans: Sequence[Span], nesting: _Nesting) -> tuple[set[str], set[str]]:
    """Those that tell of one model call each, and those that repeat one: two instruments may log the same call."""
    tellers: set[str] = set()
    silent: set[str] = set()
    for span in spans:
        if span.kind != "llm" or nesting.inner[span.id] or span.id in nesting.holds_tool:
            continue
        same = [span]
        outer = nesting.model[span.id]
        while outer is not None and nesting.inner[outer.id] == 1 and outer.id not in nesting.holds_tool:
            same.append(outer)
            outer = nesting.model[outer.id]
        teller = max(same, key=_telling) if len(same) > 1 else span
        tellers.add(teller.id)
        silent |= {link.id for link in same} - {teller.id}
    return tellers, silent


def _telling(span: Span) -> tuple[bool, bool]:
    said = messages_in(unwrap(span.outputs), "assistant", f"{span.at}.output")
    return any(message.get("tool_calls") for message in said), is_structured(unwrap(span.inputs))
