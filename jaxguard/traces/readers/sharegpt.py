"""ShareGPT conversations, ``[{"from": ..., "value": ...}]``, whose calls can be told from words.

Calls stand in turns from ``function_call`` (JSON of one call or of several), or between ``<tool_call>`` tags in the
agent's own turns. Many such sets write actions as plain words instead: a conversation in which no call is found is
rejected, for nobody could say that there was none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxguard.traces.files import decode_value
from jaxguard.traces.readers.calls import read_conversation, refuse_calls_beside
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_LIST_FIELDS = ("conversations", "conversation", "messages")
_ID_FIELDS = ("id", "conversation_id", "uuid")
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "tool", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    "system": "system",
}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESPONSE = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_MAX_METADATA_CHARS = 500


def _turn_field(record: Record) -> str | None:
    for name in _LIST_FIELDS:
        turns = record.get(name)
        first = turns[0] if isinstance(turns, list) and turns else None
        if isinstance(first, dict) and isinstance(first.get("from"), str) and "value" in first and "role" not in first:
            return name
    return None


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    name = _turn_field(record)
    if name is None:
        raise RecordError(f"no turns with from and value in any of the fields {', '.join(_LIST_FIELDS)}")
    refuse_calls_beside(record, name)
    messages = list(_messages(record[name], name))
    system = record.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    conversation = read_conversation(messages, name)
    if not conversation.steps:
        raise RecordError(
            f"{name}: no call in a turn from function_call or between <tool_call> tags; calls in words are not read"
        )
    stem = context.stem
    own = next((record[key] for key in _ID_FIELDS if isinstance(record.get(key), str | int)), context.position)
    metadata: dict[str, Any] = {
        key: value
        for key, value in record.items()
        if isinstance(value, str | int | float) and len(str(value)) <= _MAX_METADATA_CHARS
    }
    yield conversation.trajectory(metadata, id=f"{stem}:{own}", source="sharegpt")


def _messages(turns: list[Any], name: str) -> Iterator[dict[str, Any]]:
    waiting: list[str] = []  # ids of the last turn's calls
    made = 0
    for index, turn in enumerate(turns):
        at = f"{name}[{index}]"
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise RecordError(f"{at}: got {turn!r:.60}, expected an object with from and value, a text")
        role = _ROLES.get(turn["from"]) if isinstance(turn.get("from"), str) else None
        text = turn["value"]
        if role is None:
            raise RecordError(f"{at}.from: got {turn.get('from')!r:.40}, expected one of {', '.join(_ROLES)}")
        if role == "tool":
            yield from _results(text, waiting)
            waiting = []
            continue
        texts = [text] if role == "call" else _CALL.findall(text) if role == "assistant" else []
        if role == "assistant" and len(texts) != text.count("<tool_call>"):
            raise RecordError(f"{at}: a <tool_call> that does not end")
        calls = [call for part in texts for call in _calls(part, at)]
        if calls:
            waiting = [f"call_{made + number}" for number in range(len(calls))]
            made += len(calls)
        yield {
            "role": "assistant" if role == "call" else role,
            "content": "" if role == "call" else _CALL.sub("", text) if texts else text,
            "tool_calls": [
                {"id": own, "function": call} for own, call in zip(waiting if calls else [], calls, strict=True)
            ],
        }


def _calls(text: str, at: str) -> list[dict[str, Any]]:
    try:
        value, _, _ = decode_value(text)
    except ValueError as error:
        raise RecordError(f"{at}: a call that is not JSON ({error}): {text!r:.60}") from error
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict):
            raise RecordError(f"{at}: got {call!r:.60} as a call, expected an object with name and arguments")
    return calls


def _results(text: str, waiting: list[str]) -> Iterator[dict[str, Any]]:
    """The results in one turn; a single one is what all calls of the turn before gave."""
    texts = [part.strip() for part in _RESPONSE.findall(text)] or [text]
    for number, part in enumerate(texts):
        yield {"role": "tool", "tool_call_id": waiting[number] if number < len(waiting) else "", "content": part}
    yield from ({"role": "tool", "tool_call_id": own, "content": ""} for own in waiting[len(texts) :])


READER = Reader(
    name="sharegpt",
    description="ShareGPT conversations (from, value) with calls in function_call turns or <tool_call> tags",
    matches=lambda record: _turn_field(record) is not None,
    read=_read,
)
