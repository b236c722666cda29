"""Reads the many ways in which record-style sets write an agent's action into calls.

=================  ==========================================================================
dialect            example
=================  ==========================================================================
``final``          ``Final Answer: All done.``, ``Complete{"response": "All done."}``
``json``           ``{"name": "f", "arguments": {...}}``, a list of such, ``{"f": {...}}``,
                   ``"command": {"name": "f", "args": {...}}}}``, ``{"action_type": "click", ...}``
``input``          ``f``, new line, ``Action Input: {...}``; ``f Input: {...}``
``braces``         ``f{'a': 1}`` (Python literals or JSON)
``colon``          ``f: {...}``
``parens``         ``f()``, ``f(a=1)``, ``f(a: 1)``, ``f('a': 1)``, ``f(1, 2)``
``fence``          a code block; of a shell or of Python it is run, of another language it is a reply
``ui``             ``click <OK>``, ``Open <App>``, ``Search 'x'``, ``click <a> | click <b>``
``text``           anything else: what the agent says, or does in plain words
=================  ==========================================================================

``final`` and ``text`` become the tool ``"reply"`` with ``{"text": ...}``. No text makes these functions
raise: arguments that cannot be parsed are kept as raw text. Several calls in one action are several
calls proposed in one turn.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.traces.readers.literals import literal, literal_call
from jaxguard.traces.readers.turns import Call

REPLY = "reply"

# The patterns are anchored and bounded so that no text takes more than linear time.
_NAME = r"[A-Za-z_][\w.\-]{0,199}"
_FINAL = re.compile(r"(?:Final Answer|Final|Answer)\s*:\s*|Final Answer\b\s*", re.IGNORECASE)
_LEAD = re.compile(r"(?:Action\s*:|The action is)\s*(?=\S)", re.IGNORECASE)
_INPUT = re.compile(rf"({_NAME})(?:[ \t\r]*\n\s*Action[ \t]*|[ \t]+)Input[ \t]*:", re.IGNORECASE)
_BRACES = re.compile(rf"({_NAME})(\s*:)?\s*(?=\{{)")
_PARENS = re.compile(rf"({_NAME})\(")
_KEYWORD = re.compile(rf"\s*{_NAME}\s*=")
_COMMAND = re.compile(r'"(?:command|action|tool_call|function_call)"\s*:\s*(?=\{)')
_VERBS = "click|tap|press|open|close|type|input|search|select|choose|scroll|swipe|drag|set|delete|install|visit"
_UI = re.compile(rf"(?:({_VERBS})\s+(?=[<'\"]|https?://)|<({_VERBS})>\s+|(?=<[^<>]+>\s*-))", re.IGNORECASE)
_UI_SPLIT = re.compile(rf"\s*\|\s*(?=<?(?:{_VERBS})\b)|\s+AND\s+(?=(?:{_VERBS})\b)", re.IGNORECASE)
_UI_LIMIT = 4096

_NAME_KEYS = ("name", "tool", "tool_name", "function", "action", "action_type")
_ARGUMENT_KEYS = ("arguments", "args", "parameters", "params", "input", "action_input")
_RUNNERS = {
    **dict.fromkeys(("bash", "sh", "shell", "zsh", "console", "terminal", "powershell", "cmd"), "bash"),
    **dict.fromkeys(("python", "py", "python3"), "python"),
}


def parse_action(text: str | None) -> list[Call]:
    """The calls that an action text proposes; ``[]`` for an empty one. Never raises on any text."""
    text = (text or "").strip()
    if not text:
        return []
    lead = _LEAD.match(text)
    body = text[lead.end() :] if lead else text
    for parse in (_final, _json, _input, _braces, _parens, _fence, _ui):
        calls = parse(body)
        if calls:
            return calls
    return [_reply(text, "text")]


def _reply(text: str, dialect: str) -> Call:
    return Call(REPLY, {"text": text}, dialect=dialect)


def _final(text: str) -> list[Call]:
    match = _FINAL.match(text)
    if match:
        return [_reply(text[match.end() :].strip() or text, "final")]
    if text.startswith("Complete{"):
        arguments, _ = _arguments(text[len("Complete") :])
        if arguments is not None and set(arguments) == {"response"} and isinstance(arguments["response"], str):
            return [_reply(arguments["response"], "final")]
    return []


def _json(text: str) -> list[Call]:
    command = _COMMAND.match(text)
    if command or text[0] in "{[":
        start = command.end() if command else 0
        value, end = _decode(text, start)
        calls = _calls_of(value) if end and not _rest(text, end) else []
        if not calls and text[0] == "{":
            calls = _braces(text[1:].lstrip())
        return [Call(call.tool, call.arguments, call.raw_arguments, "json") for call in calls]
    return []


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start`` and where it ends; ``(None, 0)`` where there is none."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, 0


def _refuse(token: str) -> float:
    raise ValueError(f"{token} is not JSON")


def _finite(token: str) -> float:
    number = float(token)
    if not math.isfinite(number):
        raise ValueError(f"{token} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, strict=False)


def _rest(text: str, end: int) -> str:
    """What follows a value. Closing braces do not count: such an action is the tail of a larger object
    whose head the log has lost."""
    return text[end:].strip(" \t\r\n}")


def _calls_of(value: Any) -> list[Call]:
    """Calls that a JSON value stands for; ``[]`` where it does not look like calls."""
    if isinstance(value, list):
        nested = [_calls_of(item) for item in value if isinstance(item, dict)]
        return [call for calls in nested for call in calls] if all(nested) and len(nested) == len(value) else []
    if not isinstance(value, dict):
        return []
    if isinstance(value.get("function"), dict):  # the shape of OpenAI tool calls
        value = value["function"]
    key = next((key for key in _NAME_KEYS if isinstance(value.get(key), str)), None)
    if key is not None:
        rest = {k: v for k, v in value.items() if k != key}
        inner = next((k for k in _ARGUMENT_KEYS if k in rest), None)
        return [Call(value[key], *parse_arguments(rest if inner is None else rest[inner]))]
    if len(value) == 1:
        name, arguments = next(iter(value.items()))
        if isinstance(arguments, dict) and re.fullmatch(_NAME, name):
            return [Call(name, arguments)]
    return []


def _input(text: str) -> list[Call]:
    match = _INPUT.match(text)
    return [Call(match[1], *_arguments(text[match.end() :]), "input")] if match else []


def _braces(text: str) -> list[Call]:
    """``f{...}`` and ``f: {...}``, also several one after another."""
    calls: list[Call] = []
    position = 0
    while match := _BRACES.match(text, position):
        dialect = "colon" if match[2] else "braces"
        value, end = _decode(text, match.end())
        if isinstance(value, dict) and _BRACES.match(text, _skip(text, end)):
            calls.append(Call(match[1], value, dialect=dialect))
            position = _skip(text, end)
            continue
        calls.append(Call(match[1], *_arguments(text[match.end() :]), dialect))
        break
    return calls


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _parens(text: str) -> list[Call]:
    match = _PARENS.match(text)
    if not match:
        return []
    inner = text[match.end() :].rstrip("; \t\r\n")
    if inner.endswith(")"):
        inner = inner[:-1].strip()
    elif not _KEYWORD.match(inner):  # a named argument tells a call whose end is lost from prose
        return []
    arguments = literal_call(inner)
    return [Call(match[1], arguments, None if arguments is not None else inner, "parens")]


def _fence(text: str) -> list[Call]:
    if not (text.startswith("```") and text.endswith("```")) or text.count("```") != 2:
        return []
    first, newline, code = text[3:-3].partition("\n")
    language = first.strip().lower() if newline else ""
    code = code.strip() if newline else first.strip()
    if language in ("", "json") and code[:1] in ("{", "["):
        return _json(code)
    runner = _RUNNERS.get(language)
    if runner is None:
        return [_reply(text, "fence")]
    return [Call(runner, {"command" if runner == "bash" else "code": code}, dialect="fence")]


def _ui(text: str) -> list[Call]:
    if len(text) > _UI_LIMIT:
        return []
    calls = []
    for part in _UI_SPLIT.split(text):
        match = _UI.match(part)
        if not match:
            return []
        verb = match[1] or match[2] or "ui"
        calls.append(Call(verb.lower(), {"target": part[match.end() :].strip()}, dialect="ui"))
    return calls


def _arguments(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """An argument text in JSON or as a Python literal, else raw."""
    text = text.strip()
    if not text:
        return {}, None
    value, end = _decode(text, 0)
    if isinstance(value, dict) and not _rest(text, end):
        return value, None
    value = literal(text)
    return (value, None) if isinstance(value, dict) else (None, text)
