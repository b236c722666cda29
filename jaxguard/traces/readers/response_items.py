"""Items of OpenAI's Responses API to chat messages; shared by the readers of stored responses and of Codex sessions.

What the model gives in one go (reasoning, words, calls) is one message. A tool that the server itself ran stands as one
item with its outcome, which the model saw before it gave the next item: the outcome is a result of its own here. A
request to approve an MCP call is the proposal of that call; a refusal is its result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxguard.traces.registry import RecordError

BOUNDARY: Mapping[str, Any] = {"type": "_boundary"}
"""Put between the items of two responses: calls on both sides of it were not proposed together."""

Item = Mapping[str, Any]

_OUTPUTS = (
    "function_call_output",
    "custom_tool_call_output",
    "computer_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "tool_search_output",
)
_QUIET = (
    "mcp_list_tools",
    "item_reference",
    "compaction",
    "compaction_summary",
    "context_compaction",
    "ghost_snapshot",
)
_PARTS = ("input_text", "output_text", "input_image", "input_file", "refusal")

# Tool, arguments and (for what the server ran) result of each kind of call.
_Told = tuple[Any, Any, Any]
_CALLS: dict[str, Callable[[Item], _Told]] = {
    "function_call": lambda item: (item.get("name"), item.get("arguments"), None),
    # Its input is free text, which must not be taken for broken JSON.
    "custom_tool_call": lambda item: (item.get("name"), {"input": item.get("input")}, None),
    "computer_call": lambda item: ("computer", _fields(item, "action", "actions"), None),
    "local_shell_call": lambda item: ("local_shell", _fields(item, "action"), None),
    "shell_call": lambda item: ("shell", _fields(item, "action"), None),
    "apply_patch_call": lambda item: ("apply_patch", _fields(item, "operation"), None),
    "mcp_approval_request": lambda item: (item.get("name"), item.get("arguments"), None),
    "mcp_call": lambda item: (item.get("name"), item.get("arguments"), item.get("output") or item.get("error")),
    "web_search_call": lambda item: ("web_search", _fields(item, "action"), item.get("results")),
    "file_search_call": lambda item: ("file_search", _fields(item, "queries"), item.get("results")),
    "code_interpreter_call": lambda item: ("code_interpreter", _fields(item, "code"), item.get("outputs")),
    "image_generation_call": lambda item: ("image_generation", _fields(item, "revised_prompt"), _made(item)),
    "tool_search_call": lambda item: ("tool_search", item.get("arguments"), None),
}
_SERVER_RUNS = {
    "mcp_call",
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "tool_search_call",
}


def _fields(item: Item, *names: str) -> Any:
    """One object is the arguments itself; lists, texts and several objects keep their names."""
    found = {name: item[name] for name in names if item.get(name) is not None}
    only = next(iter(found.values())) if len(found) == 1 else None
    return only if isinstance(only, dict) else found


def _made(item: Item) -> Any:
    return [{"type": "image"}] if item.get("result") else None


def is_item(value: object, with_messages: bool = True) -> bool:
    """Is this an item rather than a chat message? Never raises."""
    if not isinstance(value, dict):
        return False
    kind = value.get("type")
    if not isinstance(kind, str):
        return False
    if kind == "message" and with_messages:
        content = value.get("content")
        parts = content if isinstance(content, list) else ()
        return isinstance(value.get("role"), str) and any(
            isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in _PARTS for part in parts
        )
    if kind in ("function_call_output", "custom_tool_call_output", "function_call", "custom_tool_call"):
        return "call_id" in value or "name" in value
    if kind == "reasoning":
        return isinstance(value.get("summary"), list) or "encrypted_content" in value
    return kind in _CALLS or kind in _OUTPUTS


def call_of(item: Item) -> str | None:
    """The id under which a call is known (``""`` where it has none); ``None`` for what is no call."""
    if item.get("type") not in tuple(_CALLS):
        return None
    given = item.get("call_id") or item.get("approval_request_id") or item.get("id")
    return given if isinstance(given, str) else ""


def output_of(item: Item) -> str | None:
    """The id of the call that an output answers; ``None`` for what is no output."""
    if item.get("type") == "mcp_approval_response":
        answered = item.get("approval_request_id")
        return answered if isinstance(answered, str) else ""
    if item.get("type") not in _OUTPUTS:
        return None
    given = item.get("call_id") or item.get("id")
    return given if isinstance(given, str) else ""


def calls_in(value: object) -> Iterator[tuple[str, str]]:
    """Kind and id of every call, wherever it stands."""
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if is_item(node, with_messages=False) and (own := call_of(node)) is not None:
                yield node["type"], own
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def item_messages(items: Sequence[object], where: str) -> list[dict[str, Any]]:
    """The chat messages that items say.

    Raises:
        RecordError: An item is of a kind that is not read.
    """
    made: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # what the model is giving
    asked: set[str] = set()  # approval requests, each of which its call may follow
    for index, item in enumerate(items):
        at = f"{where}[{index}]"
        if not isinstance(item, dict):
            raise RecordError(f"{at}: got {item!r:.60}, expected an object")
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "_boundary":
            answer = None
        elif kind == "message":
            answer = _say(made, answer, item)
        elif kind == "reasoning":
            answer = _before_calls(made, answer)
            thought = "\n".join(_texts(item.get("summary")) + _texts(item.get("content")))
            if thought:
                answer["content"].append({"type": "thinking", "thinking": thought})
        elif isinstance(kind, str) and kind in _OUTPUTS:
            answer = None
            made.append(_result(output_of(item), item.get("output", item.get("tools"))))
        elif kind == "mcp_approval_response":
            answer = None
            if item.get("approve") is False:
                made.append(_result(item.get("approval_request_id"), f"[denied] {item.get('reason') or ''}".strip()))
        elif isinstance(kind, str) and kind in _CALLS:
            own = call_of(item) or ""
            tool, arguments, result = _CALLS[kind](item)
            runs = kind in _SERVER_RUNS
            if kind == "mcp_approval_request":
                asked.add(own)
            if not (runs and own in asked):
                answer = _start(made) if answer is None or runs else answer
                answer["tool_calls"].append({"id": own, "function": {"name": tool, "arguments": arguments}})
            if runs:
                answer = None
                if result not in (None, ""):
                    made.append(_result(own, result))
        elif kind not in _QUIET:
            raise RecordError(f"{at}.type: {kind!r} is not read, expected a message, reasoning, call or its output")
    return [m for m in made if m.get("role") != "assistant" or m.get("tool_calls") or m.get("content")]


def _start(made: list[dict[str, Any]]) -> dict[str, Any]:
    made.append({"role": "assistant", "content": [], "tool_calls": []})
    return made[-1]


def _before_calls(made: list[dict[str, Any]], answer: dict[str, Any] | None) -> dict[str, Any]:
    """Where words belong that are given now: those that come after a call are no part of its message."""
    return _start(made) if answer is None or answer["tool_calls"] else answer


def _say(made: list[dict[str, Any]], answer: dict[str, Any] | None, item: Item) -> dict[str, Any] | None:
    content = item.get("content")
    if isinstance(content, list):
        content = [
            {"type": "text", "text": part["refusal"]} if isinstance(part, dict) and "refusal" in part else part
            for part in content
        ]
    others = {name: value for name, value in item.items() if name not in ("type", "content", "id", "status")}
    if item.get("role") != "assistant" or "tool_calls" in item or "function_call" in item:
        made.append({**others, "content": content})
        return None
    answer = _before_calls(made, answer)
    answer["content"] += content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return answer


def _result(call: object, output: object) -> dict[str, Any]:
    if isinstance(output, dict):
        output = output["content"] if isinstance(output.get("content"), str | list) else [output]
    if isinstance(output, list):
        output = [part if _has_text(part) else json.dumps(part, ensure_ascii=False) for part in output]
    return {"role": "tool", "content": output, **({"tool_call_id": call} if isinstance(call, str) and call else {})}


def _has_text(part: object) -> bool:
    """Is this shown as its text, or as its kind where it is an image or a file?"""
    if not isinstance(part, dict):
        return isinstance(part, str)
    return isinstance(part.get("text"), str) or any(
        name in part for name in ("image_url", "file_id", "url", "file_data")
    )


def _texts(parts: object) -> list[str]:
    if not isinstance(parts, list):
        return []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
