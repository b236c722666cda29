"""Recordings of a Model Context Protocol connection: one JSON-RPC message (or batch) a line.

A line is ``{"dir": "c2s" | "s2c", "msg": ...}``, or the message itself. Every ``tools/call`` request is a step, and
what the server answers to it is seen from then on. A recording holds no user: the instruction is a plain sentence that
says so, with the server's name, its ``instructions`` and the descriptions of its tools as far as they were told before
the first call; lists of tools that come later, resources and prompts are seen as ``[system]`` texts. Progress, logging
and other notifications are not shown. A new ``initialize`` request begins a new trajectory.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_WAYS = ("c2s", "s2c")
_CONTEXT = ("resources/read", "prompts/get")
_NO_USER = "No instruction was recorded: tool calls over a Model Context Protocol connection."


def _is_rpc(value: object) -> bool:
    return isinstance(value, dict) and value.get("jsonrpc") == "2.0"


def _matches(record: Record) -> bool:
    if record.get("dir") in _WAYS:
        message = record.get("msg")
        return any(map(_is_rpc, message)) if isinstance(message, list) else _is_rpc(message)
    return _is_rpc(record) and bool({"method", "result", "error"} & record.keys())


def _split(records: Sequence[Record]) -> Iterable[Record]:
    parts: list[dict[str, Any]] = [{"lines": [], "server": None}]
    begun = False
    for record in records:
        server = record.get("server")
        if isinstance(server, dict) and not _matches(record):
            parts[-1]["server"] = server  # the recorder's summary
        held = record.get("msg", record)
        for message in held if isinstance(held, list) else [held]:
            if not isinstance(message, dict) or not ("msg" in record or {"jsonrpc", "method"} & message.keys()):
                continue
            if message.get("method") == "initialize":
                if begun:
                    parts.append({"lines": [], "server": None})
                begun = True
            parts[-1]["lines"].append({"way": record.get("dir"), "seq": record.get("seq"), "message": message})
    return [part for part in parts if part["lines"]]


def _messages(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Chat messages without the instruction: calls, their results, and what else the server told."""
    open_requests: dict[str, deque[str]] = {}
    answer: dict[str, Any] | None = None
    tools = ""
    for line in lines:
        message, way = line["message"], line["way"]
        method, own = message.get("method"), _id(message.get("id"))
        if method == "tools/call":
            if way == "s2c":
                raise RecordError("a tools/call request goes from the server to the client, expected the other way")
            params = message.get("params")
            if not isinstance(params, dict):
                raise RecordError(f"tools/call {own}: params: got {params!r:.60}, expected an object")
            if answer is None:
                answer = {"role": "assistant", "content": None, "tool_calls": []}
            function = {"name": params.get("name"), "arguments": params.get("arguments")}
            answer["tool_calls"].append({"id": own, "function": function})
        if isinstance(method, str):
            if own and way != "s2c":
                open_requests.setdefault(own, deque()).append(method)
            continue
        if way == "c2s":
            _refuse_sampled_calls(message)
            continue
        asked = open_requests.get(own)
        method = asked.popleft() if asked else "tools/call" if _has_content(message) else ""
        told: dict[str, Any] | None = None
        if method == "tools/call":
            told = {"role": "tool", "content": _text(message), **({"tool_call_id": own} if own else {})}
        elif method == "tools/list" and (listed := _tools(message)) and listed != tools:
            tools = listed
            told = {"role": "system", "content": listed}
        elif method == "initialize" and (server := _server(message)):
            told = {"role": "system", "content": server}
        elif method in _CONTEXT:
            told = {"role": "system", "content": _text(message)}
        if told is not None:
            yield from [answer] if answer else []
            answer = None
            yield told
    yield from [answer] if answer else []


def _id(value: object) -> str:
    """A request's id; ``1`` and ``"1"`` are two."""
    if value is None:
        return ""
    if isinstance(value, str) and not value.lstrip("-").isdigit():
        return value
    return json.dumps(value)


def _has_content(message: Mapping[str, Any]) -> bool:
    result = message.get("result")
    return isinstance(result, dict) and "content" in result


def _text(message: Mapping[str, Any]) -> str:
    """What an answer says: the texts of its parts, or its error."""
    error, result = message.get("error"), message.get("result")
    if error is not None:
        return f"error: {json.dumps(error, ensure_ascii=False)}"
    if not isinstance(result, dict):
        return json.dumps(result, ensure_ascii=False)
    parts = next((result[name] for name in ("content", "contents", "messages") if result.get(name)), None)
    if not isinstance(parts, list):
        held = result.get("structuredContent", parts)
        return "" if held is None else held if isinstance(held, str) else json.dumps(held, ensure_ascii=False)
    return "\n".join(_part(part) for part in parts)


def _part(part: object) -> str:
    for held in (part, *((part.get("resource"), part.get("content")) if isinstance(part, dict) else ())):
        if isinstance(held, dict) and isinstance(held.get("text"), str):
            return str(held["text"])
    if isinstance(part, dict) and part.get("type") in ("image", "audio"):
        return f"[{part['type']}]"
    return json.dumps(part, ensure_ascii=False)


def _tools(message: Mapping[str, Any]) -> str:
    result = message.get("result")
    tools = result.get("tools") if isinstance(result, dict) else None
    named = [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return "\n".join(f"Tool {tool.get('name')}: {tool.get('description') or ''}".rstrip(": ") for tool in named)


def _server(message: Mapping[str, Any]) -> str:
    result = message.get("result")
    if not isinstance(result, dict):
        return ""
    info = result.get("serverInfo")
    name = info.get("name") if isinstance(info, dict) else None
    told = [f"Server: {name}" if isinstance(name, str) else "", result.get("instructions")]
    return "\n".join(text for text in told if isinstance(text, str) and text)


def _refuse_sampled_calls(message: Mapping[str, Any]) -> None:
    """A model that answers the server through the client may call tools; nothing here reads those calls."""
    result = message.get("result")
    content = result.get("content") if isinstance(result, dict) else None
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and part.get("type") == "tool_use":
            raise RecordError("a sampled message of the client holds a tool_use part, which is not read")


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    lines = record["lines"]
    if all(type(line["seq"]) is int for line in lines):
        lines = sorted(lines, key=lambda line: line["seq"])
    messages = list(_messages(lines))
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), None)
    if first is None:
        raise RecordError("the recording holds no tools/call request, expected at least one")
    told = [message["content"] for message in messages[:first] if message["role"] == "system"]
    task = {"role": "user", "content": "\n".join([_NO_USER, *told])}
    kept = [task, *(m for m in messages[:first] if m["role"] != "system"), *messages[first:]]
    conversation = read_conversation(kept, "messages")
    servers = [_server(line["message"]) for line in lines if "result" in line["message"]]
    name = next(
        (text.partition("\n")[0].removeprefix("Server: ") for text in servers if text.startswith("Server: ")), ""
    )
    metadata = {key: value for key, value in (("service", name), ("server", record["server"])) if value}
    own = f"{context.stem}:{context.position}" if context.position else context.stem
    yield conversation.trajectory(metadata, id=own, source=READER.name)


READER = Reader(
    name="mcp",
    description="recordings of Model Context Protocol connections (JSON-RPC messages, one a line)",
    matches=_matches,
    read=_read,
    split=_split,
)
