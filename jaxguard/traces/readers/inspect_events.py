"""Conversations from the events of an Inspect sample: the model's inputs and outputs, in the order of time.

Every model event repeats the history that its agent had. The events of one agent are told by the calls in that history;
a message belongs to the conversation from the event on in which it first stands, so that nothing is seen too early and
no call is told twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jaxguard.traces.registry import RecordError

if TYPE_CHECKING:
    from inspect_ai.event import ModelEvent, ToolEvent
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessage

Call = tuple[str, str]


def calls_of(message: ChatMessage) -> list[Call]:
    """Id and tool of every call in a message, those of the provider's own tools included."""
    if message.role != "assistant":
        return []
    own = [(part.id, part.name) for part in message.content_list if part.type == "tool_use"]
    return own + [(call.id, call.function) for call in message.tool_calls or []]


def told_elsewhere(sample: EvalSample) -> bool:
    """Are there calls that the sample's messages do not tell of?

    Raises:
        RecordError: There are, and no event of the model tells of them either.
    """
    told = Counter(call for message in sample.messages for call in calls_of(message))
    proposed: Counter[Call] = Counter()
    run: list[ToolEvent] = []
    for event in _flat(sample.events):
        if event.event == "model":
            proposed.update(call for message in _output(event) for call in calls_of(message))
        elif event.event == "tool":
            run.append(event)
    ids = {given for given, _ in (*told, *proposed)}
    for event in run:
        bridge = (event.metadata or {}).get("bridge")
        behind = bridge.get("proposal_id") if isinstance(bridge, dict) else None
        if event.id not in ids and behind not in ids:
            raise RecordError(f"events: the tool {event.function!r:.60} was run without a call in any message")
    elsewhere = proposed - told
    unknown = [tool for given, tool in _outside(sample) - told if (given, tool) not in proposed]
    if unknown and not elsewhere:
        raise RecordError(f"input or output: a call of {unknown[0]!r:.60} that no message and no event tells of")
    return bool(elsewhere)


def conversations(events: Iterable[Any], sample: EvalSample | None) -> list[list[ChatMessage]]:
    """The conversations of all agents that made calls, in the order of their first event.

    Args:
        events: Of a sample, or of an attempt at it.
        sample: Calls in its messages must be among those told.

    Raises:
        RecordError: The histories contradict each other, so that a call would be lost or told twice.
    """
    from inspect_ai.model import ChatMessageTool

    threads: list[_Thread] = []
    thread_of: dict[Call, _Thread] = {}
    keys = _Keys()
    proposed: Counter[Call] = Counter()
    run: list[ToolEvent] = []
    for event in _flat(events):
        if event.event == "tool":
            run.append(event)
        if event.event != "model":
            continue
        known = [thread_of[call] for message in event.input for call in calls_of(message) if call in thread_of]
        thread = known[-1] if known else _Thread()
        if not known:
            threads.append(thread)
        output = _output(event)
        thread.add([*event.input, *output], keys)
        for message in (*event.input, *output):
            thread_of.update((call, thread) for call in calls_of(message))
        proposed.update(call for message in output for call in calls_of(message))
    for event in run:  # results that no later history shows
        owner = thread_of.get((event.id, event.function))
        key = ("tool", event.id, event.function)
        if owner is not None and not owner.seen[key] and (event.completed or event.error):
            content: Any = event.result if isinstance(event.result, str | list) else str(event.result)
            owner.seen[key] += 1
            owner.messages.append(
                ChatMessageTool(content=content, tool_call_id=event.id, function=event.function, error=event.error)
            )
    told = Counter(call for thread in threads for message in thread.messages for call in calls_of(message))
    final: Counter[Call] = Counter()
    if sample is not None:
        final = Counter(call for message in sample.messages for call in calls_of(message)) | _outside(sample)
    for call in told.keys() | final.keys():
        if told[call] > max(proposed[call], final[call], 1) or told[call] < final[call]:
            raise RecordError(f"events: the histories disagree about the call {call[0]!r:.40} of {call[1]!r:.60}")
    return [thread.messages for thread in threads if any(calls_of(message) for message in thread.messages)]


def _outside(sample: EvalSample) -> Counter[Call]:
    """Calls in the sample's input and in its output, which mostly stand among its messages as well."""
    given = [] if isinstance(sample.input, str) else sample.input
    last = [choice.message for choice in sample.output.choices[:1]]
    return Counter(call for message in given for call in calls_of(message)) | Counter(
        call for message in last for call in calls_of(message)
    )


class _Thread:
    """One agent's messages, each once."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []
        self.seen: Counter[Hashable] = Counter()

    def add(self, history: list[ChatMessage], keys: _Keys) -> None:
        """What ``history`` shows that is new; equal messages count as often as they stand in one history."""
        here: Counter[Hashable] = Counter()
        for message in history:
            key = keys.of(message)
            here[key] += 1
            if here[key] > self.seen[key]:
                self.seen[key] = here[key]
                self.messages.append(message)


class _Keys:
    """What tells messages apart: their calls, the call they answer, or their content. Made once for each object."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[ChatMessage, Hashable]] = {}  # with the message, so that its address stays its own

    def of(self, message: ChatMessage) -> Hashable:
        found = self._made.get(id(message))
        if found is None:
            found = self._made[id(message)] = (message, self._key(message))
        return found[1]

    @staticmethod
    def _key(message: ChatMessage) -> Hashable:
        calls = calls_of(message)
        if calls:
            return ("calls", *calls)
        if message.role == "tool" and message.tool_call_id is not None:
            return ("tool", message.tool_call_id, message.function)
        return (message.role, message.model_dump_json(include={"content"}))


def _flat(events: Iterable[Any]) -> Iterator[Any]:
    """All events in order; older logs hold those of a tool or a subtask inside of it."""
    from inspect_ai.event import Event
    from pydantic import TypeAdapter

    for event in events:
        inner = event.events if event.event in ("tool", "subtask") else []
        yield event
        if inner:
            yield from _flat(TypeAdapter(list[Event]).validate_python(inner))


def _output(event: ModelEvent) -> list[ChatMessage]:
    return [choice.message for choice in event.output.choices[:1]]
