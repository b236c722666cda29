"""Event streams of Anthropic's hosted agent sessions.

A line is a recorded call of the client, ``["client.beta.sessions...", ...]`` (a session that was created, events that
were sent, an event or a page of events that was received), or an event itself. A sent event that the stream gives back
is read there. Between the start and the end of a model request only the model speaks: what else arrives then (results
of calls that it has just proposed) it sees afterwards. A call that the user denies is a proposed call, too; the denial
is seen after it. Threads of sub-agents are trajectories of their own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces.readers.calls import read_conversation, visible_text
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_CLIENT = "client.beta.sessions."
_EVENT = re.compile(r"agent\.\w+|user\.\w+|session\.(?:status|thread|error|delet|updat)\w*|span\.\w+")
_CALLS = ("agent.tool_use", "agent.mcp_tool_use", "agent.custom_tool_use")
_ANSWERED = ("tool_use_id", "mcp_tool_use_id", "custom_tool_use_id")
_RESULTS = ("agent.tool_result", "agent.mcp_tool_result", "user.custom_tool_result", "user.tool_result")
_QUIET = ("agent.thread_context_compacted", "agent.thread_created")
_FRAMES = ("session", "event_start", "event_delta", "ping")  # of the stream; the event itself follows
_UNCOUNTED = ("id", "processed_at", "created_at", "is_error", "session_id", "session_thread_id")


def _is_event(value: object) -> bool:
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and _EVENT.fullmatch(kind) is not None and "data" not in value  # type: ignore[operator]


def _page_of(record: Mapping[str, Any]) -> list[Any] | None:
    for name in ("data", "events"):
        held = record.get(name)
        if isinstance(held, list) and held and _is_event(held[0]):
            return held
    return None


def _matches(record: Record) -> bool:
    array = record.get("array")
    if isinstance(array, list):
        return len(array) > 1 and isinstance(array[0], str) and array[0].startswith(_CLIENT)
    return _is_event(record) or _page_of(record) is not None


@dataclass
class _Session:
    """What a file holds of one session; ``events`` come with whether they were only sent."""

    name: str
    about: Mapping[str, Any] = field(default_factory=dict)
    events: list[tuple[Mapping[str, Any], bool]] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def add(self, event: object, sent: bool) -> None:
        if not isinstance(event, dict) or not isinstance(event.get("type"), str):
            raise RecordError(f"session {self.name!r}: got {event!r:.60}, expected an event with a type")
        own = event.get("id")
        if isinstance(own, str) and own:
            if own in self.seen:
                return  # a stream that was opened again
            self.seen.add(own)
        self.events.append((event, sent))


def _split(records: Sequence[Record]) -> Iterable[Record]:
    sessions: dict[str, _Session] = {}
    current = ""
    for record in records:
        array = record.get("array")
        call, payload = (array[0], array[1:]) if isinstance(array, list) and len(array) > 1 else ("", [record])
        flat = [part for held in payload for part in (held if isinstance(held, list) else [held])]
        current = next((part for part in flat if isinstance(part, str) and call.startswith(_CLIENT)), current)
        for part in flat:
            if not isinstance(part, dict):
                continue
            about = part if part.get("type") == "session" else None
            own = about.get("id") if about else part.get("session_id")
            current = own if isinstance(own, str) else current
            page = _page_of(part)
            if about is None and page is None and not _is_event(part):
                continue  # an answer of the client that is no event
            session = sessions.setdefault(current, _Session(current))
            if about is not None:
                session.about = about
            for event in _in_order(page) if page is not None else [] if about else [part]:
                session.add(event, call.endswith(".send"))
    return [{"id": s.name, "about": s.about, **part} for s in sessions.values() for part in _threads(s)]


def _in_order(page: list[Any]) -> list[Any]:
    """A page that lists the newest first is turned round."""
    times = [event["processed_at"] for event in page if isinstance(event, dict) and event.get("processed_at")]
    return page[::-1] if times and all(isinstance(t, str) for t in times) and times[0] > times[-1] else page


def _threads(session: _Session) -> Iterator[dict[str, Any]]:
    """Events by thread; the main one is ``""``."""
    received = Counter(_content(event) for event, sent in session.events if not sent)
    threads: dict[str, list[Mapping[str, Any]]] = {}
    of_call: dict[object, str] = {}
    tasks: dict[object, str] = {}
    first = ""
    for event, sent in session.events:
        kind = event["type"]
        if sent and received[_content(event)] > 0:
            received[_content(event)] -= 1
            continue
        if kind.startswith("session.") or kind in _FRAMES:
            continue
        own = event.get("session_thread_id")
        thread = of_call.get(_answered(event), own if isinstance(own, str) else "")
        if kind in _CALLS:
            of_call[event.get("id")] = thread
        elif kind == "agent.thread_message_sent":
            tasks.setdefault(event.get("to_session_thread_id"), visible_text(event.get("content")))
        elif kind == "user.message":
            first = first or visible_text(event.get("content"))
        threads.setdefault(thread, []).append(event)
    for thread, events in threads.items():
        yield {"thread": thread, "events": events, "task": (tasks.get(thread) or first) if thread else ""}


def _content(event: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in event.items() if k not in _UNCOUNTED and v is not None}, sort_keys=True)


def _answered(event: Mapping[str, Any]) -> str | None:
    return next((event[name] for name in _ANSWERED if isinstance(event.get(name), str)), None)


def _messages(events: Sequence[Mapping[str, Any]], task: str) -> Iterator[dict[str, Any]]:
    answered = {_answered(event) for event in events if event["type"] in _RESULTS}
    held: list[dict[str, Any]] = []  # what arrives while the model speaks
    answer: dict[str, Any] | None = None
    speaking = False
    if task and not any(event["type"] == "user.message" for event in events):
        yield {"role": "user", "content": task}
    for event in events:
        kind = event["type"]
        if kind.startswith("span."):
            if kind.startswith("span.model_request_"):
                yield from ([answer] if answer else [])
                yield from held
                answer, held, speaking = None, [], kind == "span.model_request_start"
            continue
        spoken = _spoken(event)
        if spoken is not None:
            words_after_call = answer is not None and answer["tool_calls"] and not spoken["tool_calls"]
            if answer is not None and words_after_call:
                yield answer
            if answer is None or words_after_call:
                answer = spoken
            else:
                answer["content"] += spoken["content"]
                answer["tool_calls"] += spoken["tool_calls"]
        elif (message := _heard(event, answered)) is not None:
            if speaking:
                held.append(message)
                continue
            yield from ([answer] if answer else [])
            answer = None
            yield message
    yield from ([answer] if answer else [])
    yield from held


def _spoken(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the model says with an event."""
    kind = event["type"]
    content: list[Any] = []
    calls: list[Any] = []
    if kind in _CALLS:
        function = {"name": event.get("name"), "arguments": event.get("input")}
        calls.append({"id": event.get("id"), "function": function})
    elif kind in ("agent.message", "agent.thread_message_sent"):
        content = [{"type": "text", "text": visible_text(_shown(event.get("content")))}]
    elif kind == "agent.thinking":
        content = [{"type": "thinking", "thinking": visible_text(event.get("content"))}]
    else:
        return None
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _heard(event: Mapping[str, Any], answered: set[str | None]) -> dict[str, Any] | None:
    """What the model is told with an event."""
    kind, call = event["type"], _answered(event)
    if kind in _RESULTS:
        content = _shown(event.get("content"))
        return {"role": "tool", "content": content, **({"tool_call_id": call} if call is not None else {})}
    if kind == "user.tool_confirmation":
        if event.get("result") != "deny":
            return None
        text = f"denied: {event.get('deny_message') or 'no reason given'}"
        # Most often the denial is told once more as the call's result.
        return {"role": "user", "content": text} if call in answered else {
            "role": "tool", "tool_call_id": call, "content": text
        }  # fmt: skip
    if kind == "user.interrupt":
        return {"role": "user", "content": "[interrupt]"}
    if kind in ("user.message", "user.define_outcome", "agent.thread_message_received"):
        return {"role": "user", "content": _shown(event.get("content")) or event.get("description")}
    if kind == "system.message":
        return {"role": "system", "content": _shown(event.get("content"))}
    if kind in _QUIET:
        return None
    raise RecordError(f"an event {kind!r} is not read, expected a message, call, result or confirmation")


def _shown(content: object) -> object:
    """Blocks with the text of documents and of search results in place of the block."""
    if not isinstance(content, list):
        return content
    shown: list[Any] = []
    for block in content:
        source = block.get("source") if isinstance(block, dict) else None
        if isinstance(source, dict) and isinstance(source.get("data"), str) and source.get("type") == "text":
            shown.append(source["data"])
        elif isinstance(block, dict) and block.get("type") not in ("text", "image", "document"):
            shown.append(json.dumps(block, ensure_ascii=False))
        else:
            shown.append(block)
    return shown


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    conversation = read_conversation(list(_messages(record["events"], record["task"])), "events")
    about = record["about"]
    agent = about.get("agent") if isinstance(about.get("agent"), dict) else {}
    model = agent.get("model")
    name = record["id"] or f"{context.stem}:{context.position}"
    metadata: dict[str, Any] = {
        "session_id": record["id"],
        "thread_id": record["thread"],
        "agent": agent.get("name"),
        "model": model.get("id") if isinstance(model, dict) else model,
    }
    found = {key: value for key, value in metadata.items() if value}
    own = f"{name}/{record['thread']}" if record["thread"] else name
    yield conversation.trajectory(found, id=own, group=record["id"], source=READER.name)


READER = Reader(
    name="managed_agents",
    description="event streams of Anthropic's hosted agent sessions (lines of events or of recorded client calls)",
    matches=_matches,
    read=_read,
    split=_split,
)
