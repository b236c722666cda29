"""Messages and parts of the notations that spans use, in the one that ``read_conversation`` reads.

Parts are those of OpenTelemetry's conventions, OpenInference, OpenAI, Gemini, Bedrock, Anthropic and Vercel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxguard.traces.files import MAX_DEPTH, is_deep
from jaxguard.traces.readers.calls import visible_text
from jaxguard.traces.registry import RecordError

Message = dict[str, Any]

_ROLES = {"model": "assistant", "ai": "assistant", "human": "user", "function": "tool", "developer": "system"}
_TEXT_KINDS = {"text", "input_text", "output_text"}
_THOUGHT_KINDS = {"thinking", "reasoning", "redacted_thinking"}
_CALL_KINDS = {"tool_call", "tool_use", "function_call"}
_RESULT_KINDS = {"tool_call_response", "tool_result", "tool_response", "function_response", "function_call_output"}
_KEYED = {
    "function_call": "tool_call", "functionCall": "tool_call", "toolUse": "tool_call",
    "function_response": "tool_result", "functionResponse": "tool_result", "toolResult": "tool_result",
    "reasoningContent": "reasoning", "text": "text",
}  # fmt: skip
_MCP_RESULT = {"content", "isError", "is_error", "structuredContent", "_meta", "meta"}
_REFUSED_PARTS = {"executable_code", "executableCode", "code_execution_result", "codeExecutionResult"}
_IDS = ("id", "tool_call_id", "toolUseId", "tool_use_id", "toolCallId", "call_id")
_ARGUMENTS = ("arguments", "args", "input")
_RESULTS = ("response", "result", "content", "output", "text")
READ_FIELDS = {
    "role", "content", "contents", "parts", "tool_calls", "tool_call_id", "name", "id", "finish_reason",
    "function_call", "function_call_name", "function_call_arguments_json", "index",
}  # fmt: skip


def parsed(value: Any) -> Any:
    """The value of a JSON text of an object or a list; everything else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        found = json.loads(value, strict=False, parse_constant=str)
    except (ValueError, RecursionError):
        return value
    return value if is_deep(found, value, MAX_DEPTH) else found


def chat(raw: Iterable[Any], role: str, at: str) -> Iterator[Message]:
    """Messages of any of the notations in the one that ``read_conversation`` reads."""
    for index, message in enumerate(raw):
        place = f"{at}[{index}]"
        if isinstance(message, str):
            message = {"content": message}
        if not isinstance(message, dict):
            raise RecordError(f"{place}: got {type(message).__name__}, expected a message")
        inner = message.get("message")
        yield from _chat(inner if isinstance(inner, dict) else message, role, place)


def _chat(raw: Mapping[str, Any], default: str, at: str) -> Iterator[Message]:
    given = raw.get("role") or default
    if not isinstance(given, str):
        raise RecordError(f"{at}.role: got {given!r}, expected a string")
    role = _ROLES.get(given.lower(), given.lower())
    rest = {key: value for key, value in raw.items() if key not in READ_FIELDS}
    texts: list[Any] = []
    calls: list[Message] = []
    emitted = False
    for kind, value in _parts(raw, at):
        if kind == "call":
            calls.append(value)
        elif kind == "result":
            if texts or calls:
                yield _message(rest, "assistant" if calls else role, texts, calls)
                texts, calls, rest = [], [], {}
            yield value
            emitted = True
        else:
            texts.append(value)
    calls += [_call(call, at) for call in _own_calls(raw, at)]
    if role == "tool" and not emitted and not calls:
        own = next((raw[key] for key in ("tool_call_id", "id") if raw.get(key)), None)
        yield _result(own, raw.get("name"), texts[0]["text"] if len(texts) == 1 and "text" in texts[0] else texts)
    elif texts or calls or rest or not emitted:
        yield _message(rest, "assistant" if calls else role, texts, calls)


def _message(rest: Mapping[str, Any], role: str, texts: list[Any], calls: list[Message]) -> Message:
    plain = all(part.get("type") == "text" for part in texts)
    content: Any = "\n".join(part["text"] for part in texts) if plain else texts
    return {**rest, "role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def _parts(raw: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """The parts of a message in order: calls, results, and what is text or shown as its type."""
    for name in ("content", "contents", "parts"):
        given = raw.get(name)
        items = _part_list(given)
        if items is None:
            items = [given] if given not in (None, "") else []
        for item in items:
            inner = item.get("message_content") if isinstance(item, dict) else None
            yield _part(inner if isinstance(inner, dict) else item, at)


def _part_list(given: Any) -> list[Any] | None:
    """A list of parts, also one in a JSON text; a text that only happens to be JSON stays one."""
    value = parsed(given)
    if not isinstance(value, list):
        return None
    if isinstance(given, list):
        return value
    known = all(isinstance(item, dict) and (isinstance(item.get("type"), str) or _keyed(item)) for item in value)
    return value if known and value else None


def _keyed(part: Mapping[str, Any]) -> str:
    return next((key for key in _KEYED if isinstance(part.get(key), dict if key != "text" else str)), "")


def _part(part: Any, at: str) -> tuple[str, Any]:
    if isinstance(part, str):
        return "text", {"type": "text", "text": part}
    if not isinstance(part, dict):
        return "text", {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    refused = _REFUSED_PARTS & part.keys()
    if any(part[key] for key in refused):
        raise RecordError(f"{at}: code that the model ran ({min(refused)}) is not read")
    key = "" if isinstance(part.get("type"), str) else _keyed(part)
    kind = _KEYED[key] if key else str(part.get("type")).replace("-", "_")
    body = part[key] if key and key != "text" else part
    if kind in _CALL_KINDS:
        nested = body.get(kind)
        return "call", _call(nested if isinstance(nested, dict) and "name" not in body else body, at)
    if kind in _RESULT_KINDS:
        own = next((body[name] for name in _IDS if body.get(name)), None)
        value = next((body[n] for n in _RESULTS if body.get(n)), None)
        if isinstance(value, dict) and value.keys() == {"type", "value"}:
            value = value["value"]
        return "result", _result(own, body.get("name") or body.get("toolName"), value)
    if kind in _THOUGHT_KINDS or part.get("thought") is True:
        texts = (part.get("content"), part.get("text"), part.get("thinking"), body.get("reasoningText"))
        text = next((text for text in texts if text), "")
        return "text", {"type": "reasoning", "text": visible_text(text if isinstance(text, str) else [text])}
    if kind in _TEXT_KINDS:
        text = next((part[name] for name in ("text", "content") if part.get(name)), "")
        return "text", {"type": "text", "text": text if isinstance(text, str) else visible_text([text])}
    return "text", part


def _own_calls(raw: Mapping[str, Any], at: str) -> Iterator[Any]:
    calls = parsed(raw.get("tool_calls"))
    if calls and not isinstance(calls, list):
        raise RecordError(f"{at}.tool_calls: got {type(calls).__name__}, expected a list")
    yield from calls or []
    if raw.get("function_call"):
        yield parsed(raw["function_call"])
    if raw.get("function_call_name"):
        arguments = raw.get("function_call_arguments_json")
        yield {"name": raw["function_call_name"], "arguments": arguments}


def _call(call: Any, at: str) -> Message:
    inner = call.get("tool_call") if isinstance(call, dict) else None
    body = inner if isinstance(inner, dict) else call
    if not isinstance(body, dict):
        raise RecordError(f"{at}: got {type(body).__name__} as a call, expected an object")
    function = body.get("function")
    held = function if isinstance(function, dict) else body
    name = held.get("name") or body.get("toolName")
    if not isinstance(name, str) or not name:
        raise RecordError(f"{at}: got {name!r} as a call's name, expected a non-empty string")
    arguments = next((held[key] for key in _ARGUMENTS if held.get(key) not in (None, "")), None)
    return {"id": _id(next((body[key] for key in _IDS if body.get(key)), None)),
            "function": {"name": name, "arguments": arguments}}  # fmt: skip


def _result(own: Any, name: Any, value: Any) -> Message:
    return {"role": "tool", "tool_call_id": _id(own), "name": name if isinstance(name, str) else None,
            "content": result_text(value)}  # fmt: skip


def _id(value: Any) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" else None


def result_text(value: Any) -> str:
    """A tool's answer as text; of an answer in MCP's shape only what the agent is shown of it."""
    found = parsed(value)
    shown = found.get("content") if isinstance(found, dict) and found.keys() <= _MCP_RESULT else None
    if shown and isinstance(shown, list):
        return visible_text(shown)
    if isinstance(value, str):
        return value
    if isinstance(found, list) and found and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in found):
        return visible_text(found)
    return "" if found is None else json.dumps(found, ensure_ascii=False)
