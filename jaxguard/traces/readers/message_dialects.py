"""Messages of many frameworks to chat messages, for logs that keep a payload as its framework wrote it.

Known are OpenAI (chat and responses), Anthropic, Gemini (``parts`` with ``functionCall``), LangChain (``type: human``,
``kwargs``), the Vercel AI SDK (``tool-call`` parts, ``toolCalls``), Bedrock (``toolUse``), pydantic-ai and
OpenTelemetry (``parts`` with ``tool_call``), Koog (calls as the JSON text of a message) and Agno (Python's ``repr``).
What comes out has ``role`` (user, system, assistant, tool), ``content``, and ``tool_calls`` or ``tool_call_id``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxguard.traces.files import is_deep
from jaxguard.traces.readers.calls import MAX_ARGUMENT_DEPTH, refuse_unread
from jaxguard.traces.readers.literals import literal
from jaxguard.traces.registry import RecordError

Message = dict[str, Any]

_ROLES = {
    "user": "user",
    "human": "user",
    "humanmessage": "user",
    "humanmessagechunk": "user",
    "request": "user",
    "system": "system",
    "developer": "system",
    "systemmessage": "system",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "aimessage": "assistant",
    "aimessagechunk": "assistant",
    "response": "assistant",
    "tool": "tool",
    "function": "tool",
    "toolmessage": "tool",
    "functionmessage": "tool",
}
_CALLS = {"tooluse", "toolcall", "functioncall", "function"}
_RESULTS = {"toolresult", "toolcallresponse", "functionresponse", "functioncalloutput", "toolreturn"}
# Gemini runs code on its own side.
_CODE = {"executablecode": "functioncall", "codeexecutionresult": "functionresponse"}
_PROMPTS = {"userprompt": "user", "systemprompt": "system", "retryprompt": "user"}
_ARGUMENTS = ("arguments", "args", "input", "parameters")
_OUTPUTS = ("content", "output", "result", "response")
_TEXT = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None"
_AGNO = re.compile(
    rf"role=({_TEXT}) content=({_TEXT}) name=(?:{_TEXT}) tool_call_id=({_TEXT}) tool_calls=(None|\[.*?\]) audio=", re.S
)
_ASKED = ("question", "query", "task", "user_input", "user_query", "user_message", "request", "topic")
_NAMES_CALLS = re.compile(r'"(?:tool_?calls?|function_?call|tool_use|tool-call|toolUse|toolCallId)\\*"', re.IGNORECASE)
_MAX_ENCODINGS = 3


class _Unknown(list[Any]):
    """The content of a message that was made of an object of no known shape."""


def unwrap(value: Any) -> Any:
    """A payload out of the JSON text (of a JSON text) that a log may keep it in; other text stays.

    So does JSON that is too deep to be carried on, or has a key twice.
    """
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", '"'):
            break
        try:
            opened = json.loads(value, strict=False, parse_constant=str, object_pairs_hook=_object)
        except (ValueError, RecursionError):
            break
        if is_deep(opened, value, MAX_ARGUMENT_DEPTH):
            break
        value = opened
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice")
    return found


def messages_in(payload: Any, role: str, at: str, known_only: bool = False) -> list[Message]:
    """The messages of a model's request (``role="user"``) or response (``"assistant"``); ``[]`` where it holds none.

    Args:
        payload: What stands there, without the encodings that :func:`unwrap` takes off.
        role: Of what says no role itself.
        at: Where it stands, for error messages.
        known_only: An object that is of no known shape is no message; else it is one, with its JSON as text.

    Raises:
        RecordError: It holds calls in a notation that is not read, or several answers of which one was followed.
    """
    if isinstance(payload, str) and payload.lstrip()[:1] in ("{", "[") and _NAMES_CALLS.search(payload):
        raise RecordError(
            f"{at}: text that names calls, but is cut off, too deep or otherwise no JSON that can be read"
        )
    made: list[Message] = []
    for number, raw in enumerate(_raw_messages(payload, role, at)):
        if not known_only or not (isinstance(raw, dict) and isinstance(raw.get("content"), _Unknown)):
            made += _chat(raw, role, f"{at}, message {number}")
    return made


def is_structured(payload: Any) -> bool:
    """Is a payload more than a text, so that speakers are told apart?"""
    return isinstance(payload, list | dict)


def _raw_messages(payload: Any, role: str, at: str) -> Iterator[Any]:
    """The messages of a container, as they stand there."""
    if payload is None or payload == "":
        return
    if isinstance(payload, list):
        if payload and all(_is_pair(item) for item in payload):
            yield from ({"role": role, "content": text} for role, text in payload)
        elif payload and all(isinstance(item, list) for item in payload):
            yield from _raw_messages(_only(payload, at), role, at)
        else:
            yield from payload
        return
    if not isinstance(payload, dict):
        yield payload
        return
    for name in ("system", "system_prompt", "systemInstruction", "system_instruction", "instructions"):
        if role == "user" and payload.get(name) and "role" not in payload:
            yield from _instruction(payload[name])
    config = payload.get("config")
    if role == "user" and isinstance(config, dict) and config.get("system_instruction"):
        yield from _instruction(config["system_instruction"])
    if isinstance(payload.get("choices"), list):
        choice = _only(payload["choices"], at)
        if isinstance(choice, dict):
            yield choice.get("message") or choice.get("delta") or {"role": "assistant", "content": choice.get("text")}
    elif isinstance(payload.get("candidates"), list):
        yield from payload.get("automatic_function_calling_history") or ()
        candidate = _only(payload["candidates"], at)
        if isinstance(candidate, dict):
            yield candidate.get("content")
    elif isinstance(payload.get("generations"), list):
        one = _only(_only(payload["generations"], at), at)
        if isinstance(one, dict):
            yield one.get("message") or {"role": "assistant", "content": one.get("text")}
    elif "contents" in payload:
        contents = payload["contents"]
        yield from contents if isinstance(contents, list) else [contents]
    elif not payload.get("messages") and _is_message(payload):
        yield payload
    else:
        for name in ("messages", "message", "prompt", "prompts", "input", "output", "outputs", "input_messages"):
            inner = unwrap(payload.get(name))
            if inner not in (None, "", [], {}):
                yield from _raw_messages(inner, role, at)
                return
        if not _is_nameless(payload):
            yield {"role": role, "content": _told(payload)}


def _is_pair(item: Any) -> bool:
    """LangChain's short way of writing a message."""
    return isinstance(item, list) and len(item) == 2 and _letters(item[0]) in _ROLES and isinstance(item[1], str)


def _told(payload: Mapping[str, Any]) -> Any:
    """An object that is no message as a content: the one text of it, or itself."""
    text = payload.get("text", payload.get("content"))
    if text is not None:
        return text
    asked = [payload[name] for name in _ASKED if isinstance(payload.get(name), str)]
    return asked[0] if asked else _Unknown([payload])


def _only(items: Any, at: str) -> Any:
    if not isinstance(items, list):
        return items
    if len(items) > 1:
        raise RecordError(f"{at}: {len(items)} alternatives, expected one that the agent went on with")
    return items[0] if items else None


def _instruction(value: Any) -> Iterator[Message]:
    value = unwrap(value)
    parts = value.get("parts", value.get("content")) if isinstance(value, dict) else value
    if parts:
        yield {"role": "system", "content": parts}


def _is_message(payload: Mapping[str, Any]) -> bool:
    names = ("role", "type", "lc", "parts", "toolCallId", "toolCalls", "tool_calls")
    return any(payload.get(name) for name in names)


def _is_nameless(payload: Mapping[str, Any]) -> bool:
    """An exporter that loses the messages leaves ``{"content": "role"}``, the name of a field of theirs."""
    return not payload or dict(payload) == {"content": "role"}


def _chat(raw: Any, default: str, at: str) -> Iterator[Message]:
    """One message as a chat message, and a message of its own for each result in it."""
    raw = _opened(raw, default, at)
    if raw is None:
        return
    kind = _letters(raw.get("type") or raw.get("kind"))
    if kind == "reasoning":
        raw = {"role": "assistant", "content": [{"type": "reasoning", "content": _summary(raw)}]}
    elif "role" not in raw and (kind not in {"", "message", *_ROLES} or "toolCallId" in raw):
        raw = {"role": default, "content": [raw]}  # a part without its message
    role = _ROLES.get(_letters(raw.get("role") or raw.get("type") or raw.get("kind")), "")
    if not role:
        if "role" in raw:
            raise RecordError(f"{at}: got role {raw['role']!r}, expected one of {', '.join(_ROLES)}")
        role = default
    content = raw.get("parts") if raw.get("parts") else raw.get("content")
    if content is None:
        content = raw.get("text")
    calls: list[Message] = []
    kept: list[Any] = []
    results: list[Message] = []
    said: list[Message] = []
    encoded = _encoded_calls(content) if role in ("assistant", "tool") else None
    if encoded is not None and not raw.get("tool_call_id"):
        role, content = "assistant", encoded
    elif role == "tool":
        if not _is_definition(content):
            yield from _tool_message(raw, content, at)
        return
    for part in content if isinstance(content, list) else [content]:
        _sort_part(part, at, calls, kept, results, said)
    calls += _field_calls(raw, calls, at)
    yield from said
    yield from results
    consumed = {"parts", "content", "type", "kind", "role", "toolCalls", "tool_calls", "invalid_tool_calls", "text"}
    rest = {name: value for name, value in raw.items() if name not in consumed and name != "function_call"}
    text = kept[0] if len(kept) == 1 and isinstance(kept[0], str) else kept or None
    message = {**rest, "role": role, "content": text}
    refuse_unread(message, at)
    private = {name: rest[name] for name in ("reasoning_content", "reasoning") if isinstance(rest.get(name), str)}
    if calls or kept or private:
        made = {"role": "assistant" if calls else role, "content": message["content"], **private}
        yield made | ({"tool_calls": calls} if calls else {})


def _opened(raw: Any, default: str, at: str) -> Message | None:
    """The object of a message, out of what LangChain's serialisation and Agno's ``repr`` put around it."""
    if raw is None:
        return None
    if isinstance(raw, str):
        found = _AGNO.match(raw)
        if not found:
            return {"role": default, "content": raw}
        role, content, call_id, calls = (literal(group) for group in found.groups())
        if calls is None and found[4] != "None":
            raise RecordError(f"{at}, tool_calls: got {found[4][:60]!r}, expected the repr of a list")
        return {"role": role, "content": content, "tool_call_id": call_id, "tool_calls": calls}
    if not isinstance(raw, dict):
        return {"role": default, "content": json.dumps(raw, ensure_ascii=False)}
    names = raw.get("id")
    if isinstance(raw.get("kwargs"), dict) and isinstance(names, list) and names:
        return {**raw["kwargs"], "type": str(names[-1])}
    if isinstance(raw.get("data"), dict) and _letters(raw.get("type")) in _ROLES:
        return {**raw["data"], "type": raw["type"]}
    return raw


def _sort_part(
    part: Any, at: str, calls: list[Message], kept: list[Any], results: list[Message], said: list[Message]
) -> None:
    """One part of a content to where it belongs."""
    if part is None or part == "":
        return
    if not isinstance(part, dict):
        kept.append(part)
        return
    kind = _letters(part.get("type") or part.get("part_kind"))
    body = part
    if not kind:  # the key names the kind
        for name, value in part.items():
            if isinstance(value, dict) and _letters(name) in _CALLS | _RESULTS:
                kind, body = _letters(name), value
            elif isinstance(value, dict) and _letters(name) in _CODE:
                kind, body = _CODE[_letters(name)], {"name": "code_execution", "arguments": value, "result": value}
    if not kind and "toolCallId" in part and "toolName" in part:
        kind = "toolresult" if any(name in part for name in ("output", "result")) else "toolcall"
    if kind in _CALLS:
        calls.append(_call(body, at))
    elif kind in _RESULTS:
        content = next((body[name] for name in _OUTPUTS if body.get(name) is not None), None)
        results.append(
            {"role": "tool", "tool_call_id": _id(body) or None, "name": _name(body), "content": result_text(content)}
        )
    elif kind in _PROMPTS:
        said.append({"role": _PROMPTS[kind], "content": part.get("content")})
    elif part.get("thought") is True:
        kept.append({"type": "thinking", "text": part.get("text")})
    elif kind == "text" and isinstance(part.get("content"), str):
        kept.append({"type": "text", "text": part["content"]})
    else:
        kept.append({name: value for name, value in part.items() if value is not None})


def _call(body: Any, at: str) -> Message:
    if not isinstance(body, dict):
        raise RecordError(f"{at}, a call: got {body!r:.60}, expected an object")
    function = body.get("function")
    holder = {**body, **function} if isinstance(function, dict) else body
    arguments = next((holder[name] for name in _ARGUMENTS if holder.get(name) not in (None, "")), None)
    name = function if isinstance(function, str) else _name(holder)
    if not name:
        raise RecordError(f"{at}: got {holder.get('name')!r:.60} as the function's name, expected a non-empty string")
    return {"id": _id(body), "type": "function", "function": {"name": name, "arguments": arguments}}


def _field_calls(raw: Mapping[str, Any], parts: list[Message], at: str) -> Iterator[Message]:
    """Calls in fields of a message, without those that another field or a part repeats (one without id as a copy)."""
    known = {call["id"] for call in parts}
    names = {call["function"]["name"] for call in parts}
    extra = raw.get("additional_kwargs")
    extra = extra if isinstance(extra, dict) else {}
    for given in (raw.get("tool_calls"), raw.get("toolCalls"), raw.get("invalid_tool_calls"), extra.get("tool_calls")):
        given = unwrap(given) or []
        if not isinstance(given, list):
            raise RecordError(f"{at}, tool_calls: got {given!r:.60}, expected a list")
        made = [call for call in (_call(one, at) for one in given) if call["id"] not in known]
        yield from made
        known |= {call["id"] for call in made}
        names |= {call["function"]["name"] for call in made}
    for single in (raw.get("function_call"), extra.get("function_call")):
        if single and not isinstance(single, dict):
            raise RecordError(f"{at}, function_call: got {single!r:.60}, expected an object")
        if single and single.get("name") not in names:
            names.add(single.get("name"))
            yield _call(single, at)


def _encoded_calls(content: Any) -> list[Any] | None:
    """The calls of a content that is, as a JSON text, a list of calls and nothing else."""
    if not isinstance(content, str) or '"function"' not in content or not content.lstrip().startswith("["):
        return None
    calls = unwrap(content)
    whole = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) and "arguments" in call["function"]
        for call in calls
    )
    return [{"type": "function", **call} for call in calls] if whole else None


def _is_definition(content: Any) -> bool:
    """Some logs list the tools that there are among the messages."""
    function = content.get("function") if isinstance(content, dict) else None
    return isinstance(function, dict) and "parameters" in function and "arguments" not in function


def _tool_message(raw: Mapping[str, Any], content: Any, at: str) -> Iterator[Message]:
    parts = content if isinstance(content, list) else []
    results: list[Message] = []
    kept: list[Any] = []
    for part in parts:
        _sort_part(part, at, [], kept, results, [])
    if results:
        yield from results
        content = kept
    if not results or kept:
        refuse_unread({"role": "tool", "content": content}, at)
        text = result_text(content)
        # The id of a message is not that of the call which it answers.
        own = _id({name: value for name, value in raw.items() if name != "id"})
        yield {"role": "tool", "tool_call_id": own or None, "name": _name(raw), "content": text}


def result_text(value: Any) -> str:
    """What a tool's result says: the text in what frameworks put around it, else its JSON."""
    if value is None:
        return ""
    if isinstance(value, list) and value and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        return "\n".join(part["text"] for part in value)
    if isinstance(value, dict):
        inner = _opened(value, "tool", "a result") or {}
        kind = _letters(inner.get("type"))
        if kind in ("tool", "toolmessage", "text", "json", "functionresult", "errortext", "content"):
            held = [inner[name] for name in ("content", "text", "value", "result") if inner.get(name) is not None]
            if held:
                return result_text(held[0])
        for name in ("output", "content", "result", "return_value"):
            if set(value) == {name}:
                return result_text(value[name])
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _summary(raw: Mapping[str, Any]) -> str:
    parts = raw.get("summary") or raw.get("content")
    return result_text(parts) if parts else ""


def _id(body: Mapping[str, Any]) -> str:
    for name in ("tool_call_id", "toolCallId", "toolUseId", "tool_use_id", "call_id", "id"):
        if isinstance(body.get(name), str):
            return str(body[name])
    return ""


def _name(body: Mapping[str, Any]) -> str:
    for name in ("name", "toolName", "tool_name"):
        if isinstance(body.get(name), str):
            return str(body[name])
    return ""


def _letters(name: object) -> str:
    return name.lower().replace("_", "").replace("-", "") if isinstance(name, str) else ""
