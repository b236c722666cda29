"""Session logs (rollouts) of the Codex CLI: one event a line.

``response_item`` lines hold what the model was given and gave, as items of the Responses API; ``event_msg`` lines tell
the same once more for the screen and are read only where a user's prompt stands nowhere else. Older logs have bare
items as lines after a header, the oldest are one object with ``session`` and ``items``; a list of bare items is read
in the same way. What the program says in the user's name (``<environment_context>``, ...) is not the task.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxguard.traces.readers.calls import read_conversation, visible_text
from jaxguard.traces.readers.response_items import BOUNDARY, call_of, calls_in, is_item, item_messages
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_KINDS = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")
_CONTEXT = re.compile(
    r"\s*(?:<(?:user_instructions|environment_context|permissions|collaboration_mode|turn_aborted|skill|apps"
    r"|user_shell_command|subagent_notification|model_switch|INSTRUCTIONS)\b|# AGENTS\.md instructions)"
)
# Events of a call; searches of the web have no id that the call would have, too.
_CALL_EVENT = re.compile(r"(?:exec_command|mcp_tool_call|patch_apply|dynamic_tool_call)_(?:begin|end|request|response)")


def _matches(record: Record) -> bool:
    kind, payload = record.get("type"), record.get("payload")
    if kind in _KINDS and isinstance(payload, dict):
        return True
    if isinstance(record.get("session"), dict) and isinstance(record.get("items"), list):
        return any(is_item(item) for item in record["items"])
    return is_item(record)


def _split(records: Sequence[Record]) -> Iterable[Record]:
    parts: list[dict[str, Any]] = []
    part = _new_part({})
    for line in _lines(records):
        kind, payload = line.get("type"), line.get("payload")
        if kind == "session_meta" and isinstance(payload, dict):
            own = payload.get("id")
            # A session that was forked begins with the header of the one that it goes on from.
            if part["lines"] and (own is None or own != part["meta"].get("id")):
                parts.append(part)
                part = _new_part(payload)
            elif not part["meta"]:
                part["meta"] = payload
        elif kind == "turn_context" and isinstance(payload, dict):
            part["meta"].setdefault("model", payload.get("model"))
        else:
            part["lines"].append(line)
    return [*parts, part]


def _new_part(meta: Record) -> dict[str, Any]:
    return {"meta": dict(meta), "lines": []}


def _lines(records: Sequence[Record]) -> Iterator[Record]:
    """All lines in today's shape."""
    for record in records:
        kind = record.get("type")
        if kind in _KINDS:
            yield record
        elif isinstance(record.get("session"), dict) and isinstance(record.get("items"), list):
            yield {"type": "session_meta", "payload": record["session"]}
            yield from ({"type": "response_item", "payload": item} for item in record["items"])
        elif kind is None and "role" not in record and isinstance(record.get("id"), str):
            yield {"type": "session_meta", "payload": record}
        elif kind is None and "record_type" in record:
            continue  # a state that the program kept
        else:
            yield {"type": "response_item", "payload": record}


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    meta = record["meta"]
    items = list(_items(record["lines"]))
    if not items:
        raise RecordError("the session holds no items, expected messages or calls")
    conversation = read_conversation(item_messages(items, "items"), "items")
    own = meta.get("id") if isinstance(meta.get("id"), str) else ""
    metadata: dict[str, Any] = {"agent": "codex", "session_id": own}
    for name in ("model", "model_provider", "cli_version"):
        metadata[name] = meta[name] if isinstance(meta.get(name), str) else ""
    found = {key: value for key, value in metadata.items() if value}
    name = own or (context.stem if context.position == 0 else f"{context.stem}:{context.position}")
    yield conversation.trajectory(found, id=name, source=READER.name)


def _items(lines: Sequence[Record]) -> Iterator[Record]:
    """The items of a session, each once."""
    held = [line.get("payload") for line in lines if line.get("type") == "response_item"]
    payloads = [item for item in held if isinstance(item, dict)]
    called = {call_of(item) for item in payloads} - {None, ""}
    written = {visible_text(item.get("content")).strip() for item in payloads if _is_users(item)}
    for line in lines:
        kind, payload = line.get("type"), line.get("payload")
        if not isinstance(payload, dict):
            raise RecordError(f"a {kind!r} line: payload: got {payload!r:.60}, expected an object")
        if kind == "response_item":
            text = visible_text(payload.get("content")) if _is_users(payload) else ""
            yield {**payload, "role": "developer"} if _CONTEXT.match(text) else payload
            continue
        for own_kind, own in calls_in(payload):
            if not own or own not in called:
                raise RecordError(f"a {kind!r} line holds a {own_kind} of the id {own!r} that no response_item has")
        told, call = payload.get("type"), payload.get("call_id")
        if kind == "compacted":
            yield BOUNDARY
            yield {"type": "message", "role": "developer", "content": payload.get("message") or "[compacted]"}
        elif told == "user_message":
            words = payload.get("message")
            if isinstance(words, str) and words.strip() and words.strip() not in written:
                yield {"type": "message", "role": "user", "content": words}
        elif isinstance(told, str) and _CALL_EVENT.fullmatch(told) and call not in called and not _by_user(payload):
            raise RecordError(f"an event {told!r} tells of the call {call!r} that no response_item has")


def _by_user(event: Record) -> bool:
    """Did the user run this command, beside the agent?"""
    return event.get("source") == "user_shell"


def _is_users(item: Record) -> bool:
    return item.get("role") == "user" and item.get("type") in (None, "message")


READER = Reader(
    name="codex",
    description="session logs of the Codex CLI (JSON lines of events, or of bare Responses items)",
    matches=_matches,
    read=_read,
    split=_split,
)
