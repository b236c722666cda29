"""Session logs of Claude Code: one event a line, in the order in which they were written.

``user`` and ``assistant`` lines hold a ``message``. One answer of the model is several lines of one ``message.id``,
also with results of its first calls in between, which it had not seen: its lines become one message in the place of
the first (:mod:`jaxguard.traces.readers.claude_lines`). Lines of sub-agents (``isSidechain``, ``agentId``,
``agent_progress``) are trajectories of their own, and so is what follows a prompt that the user later took back (a
second prompt with the same ``parentUuid``).

A file may hold several sessions; one that goes on under a new ``sessionId`` stays one where ``parentUuid`` says so.
Of the other lines, attachments that carry a text to the agent are read; reminders, hooks and progress are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.readers.claude_lines import calls_in, chat_messages, is_shown, text_of
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_SPEAKERS = ("user", "assistant")


def _matches(record: Record) -> bool:
    message = record.get("message")
    return (
        record.get("type") in _SPEAKERS
        and isinstance(message, dict)
        and message.get("role") == record["type"]
        and bool({"sessionId", "session_id", "parentUuid"} & record.keys())
    )


def _split(records: Sequence[Record]) -> Iterable[Record]:
    parts: dict[tuple[str, str], dict[str, Any]] = {}
    keys: dict[str, tuple[bool, str, str]] = {}  # by uuid: side, session, agent
    seen: dict[str, object] = {}
    unread: list[Record] = []
    called: set[str] = set()
    tasks: dict[str, str] = {}  # what a call gave a sub-agent to do
    for line in _with_progress(records):
        own, parent = text_of(line.get("uuid")), text_of(line.get("parentUuid"))
        session = text_of(line.get("sessionId") or line.get("session_id"))
        agent = text_of(line.get("agentId") or line.get("parent_tool_use_id"))
        side = bool(line.get("isSidechain")) or bool(text_of(line.get("parent_tool_use_id")))
        key = (side, session, (agent or own or "sidechain") if side else "")
        above = keys.get(parent)
        if above is not None and above[0] == side and not (side and agent):
            key = above
        if own and own not in keys:
            keys[own] = key
        kind = line.get("type")
        if kind not in _SPEAKERS and not is_shown(line):
            unread.append(line)
            continue
        if own and own in seen and seen[own] == line.get("message"):
            continue  # a resumed session repeats its history
        seen[own] = line.get("message")
        for call, _, given in calls_in(line.get("message")):
            called.add(call)
            tasks[call] = text_of(given.get("prompt")) if isinstance(given, dict) else ""
        part = parts.setdefault(key[1:], {"session": key[1], "agent": key[2]})
        part.setdefault("lines", []).append(line)
    for line in unread:
        for call, tool, _ in calls_in(line):
            if not call or call not in called:
                raise RecordError(f"a {line.get('type')!r} line holds a call of {tool!r} that no message has")
    return [{**part, "task": tasks.get(part["agent"], "")} for part in parts.values()]


def _with_progress(records: Sequence[Record]) -> Iterator[Record]:
    """All lines; after the progress of a sub-agent also the message that it reports."""
    for line in records:
        yield line
        data = line.get("data")
        inner = data.get("message") if isinstance(data, dict) and line.get("type") == "progress" else None
        if isinstance(data, dict) and isinstance(inner, dict) and inner.get("type") in _SPEAKERS:
            agent = data.get("agentId") or line.get("parentToolUseID")
            own = {"isSidechain": True, "agentId": agent, "parentUuid": None}
            yield {"sessionId": line.get("sessionId"), **inner, **own}


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    lines = record["lines"]
    conversation = read_conversation(chat_messages(lines, record["task"]), "lines")
    name = "/".join(part for part in (record["session"], record["agent"]) if part)
    name = name or context.stem
    models = [text_of(line["message"].get("model")) for line in lines if line["type"] == "assistant"]
    metadata: dict[str, Any] = {
        "agent": "claude_code",
        "session_id": record["session"],
        "agent_id": record["agent"],
        "model": next((model for model in models if model and model != "<synthetic>"), ""),
        "version": next((line["version"] for line in lines if text_of(line.get("version"))), ""),
    }
    found = {key: value for key, value in metadata.items() if value}
    yield conversation.trajectory(found, id=name, group=record["session"], source=READER.name)


READER = Reader(
    name="claude_code",
    description="session logs of Claude Code (JSON lines of events), its sub-agents as trajectories of their own",
    matches=_matches,
    read=_read,
    split=_split,
)
