"""What one span says, as chat messages: OpenTelemetry's GenAI conventions (old and new) and OpenInference's.

A span of a model's call repeats what the model was given and what it answered, in one or several notations:
``gen_ai.input.messages`` (JSON with parts), ``llm.input_messages.0.message.role`` (OpenInference, an attribute for each
leaf), ``gen_ai.prompt.0.role`` (OpenLLMetry), events (``gen_ai.user.message``, ``gen_ai.choice``), Google ADK's
``gcp.vertex.agent.llm_request`` and Vercel's ``ai.prompt.messages``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces.readers.span_parts import READ_FIELDS, Message, chat, parsed
from jaxguard.traces.readers.spans import Span
from jaxguard.traces.registry import RecordError

_MAX_KEY_LEVELS = 16
_EVENT_ROLE = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_CALL_IN_A_TEXT = re.compile(r'"(?:tool_calls|function_call|functionCall)"\s*:\s*(?:\[\s*)?\{|"tool_use"')
_DETAILS = "gen_ai.client.inference.operation.details"


@dataclass
class Said:
    """Messages that a span holds: what was given to the model, and what it answered.

    ``repeats`` are those of further notations on the same span, to be compared only.
    """

    given: list[Message] = field(default_factory=list)
    answered: list[Message] = field(default_factory=list)
    repeats: list[Message] = field(default_factory=list)


def said_in(span: Span) -> Said:
    """The messages of a span; each side in the first notation that has it.

    Raises:
        RecordError: They are there, but not of the notation's shape.
    """
    said = Said()
    attributes = dict(span.attributes)
    for name, fields in span.events:
        if name == _DETAILS:
            attributes = {**fields, **attributes}
    for given, answered in _notations(attributes, span):
        sides = (list(given), list(answered))
        for own, side in zip((said.given, said.answered), sides, strict=True):
            (said.repeats if own else own).extend(side)
    return said


def _notations(attributes: Mapping[str, Any], span: Span) -> Iterator[tuple[Iterable[Message], Iterable[Message]]]:
    at = f"span {span.id}"
    system = parsed(attributes.get("gen_ai.system_instructions"))
    first = [{"role": "system", "parts": system if isinstance(system, list) else [str(system)]}] if system else []
    yield (
        chat([*first, *_messages(attributes, "gen_ai.input.messages", at)], "user", f"{at}: gen_ai.input.messages"),
        chat(_messages(attributes, "gen_ai.output.messages", at), "assistant", f"{at}: gen_ai.output.messages"),
    )
    for prompt, completion in (("llm.input_messages", "llm.output_messages"), ("gen_ai.prompt", "gen_ai.completion")):
        yield (
            chat(_flat(attributes, prompt, at), "user", f"{at}: {prompt}"),
            chat(_flat(attributes, completion, at), "assistant", f"{at}: {completion}"),
        )
    yield from _events(span, attributes, at)
    request, response = (_json(attributes, f"gcp.vertex.agent.llm_{side}", at) for side in ("request", "response"))
    config = request.get("config") if isinstance(request, dict) else None
    told = config.get("system_instruction") if isinstance(config, dict) else None
    contents = (request.get("contents") or []) if isinstance(request, dict) else []
    first = [_adk_content(told, "system")] if told else []
    answer = response.get("content") if isinstance(response, dict) else None
    yield (
        chat([*first, *_listed(contents)], "user", f"{at}: llm_request.contents"),
        chat([answer] if answer else [], "assistant", f"{at}: llm_response.content"),
    )
    yield chat(_messages(attributes, "pydantic_ai.all_messages", at), "user", f"{at}: pydantic_ai.all_messages"), ()
    yield from _vercel(attributes, at)
    yield from _plain(attributes, at)


def _vercel(attributes: Mapping[str, Any], at: str) -> Iterator[tuple[Iterable[Message], Iterable[Message]]]:
    text, calls = attributes.get("ai.response.text"), _json(attributes, "ai.response.toolCalls", at)
    answer = [{"role": "assistant", "content": text, "tool_calls": calls}] if text or calls else []
    given = _messages(attributes, "ai.prompt.messages", at)
    yield chat(given, "user", f"{at}: ai.prompt.messages"), chat(answer, "assistant", f"{at}: ai.response")


def _plain(attributes: Mapping[str, Any], at: str) -> Iterator[tuple[Iterable[Message], Iterable[Message]]]:
    """OpenInference's span of a model that was given a text and no messages."""
    if str(attributes.get("openinference.span.kind")).upper() != "LLM":
        return
    given, answered = (attributes.get(f"{side}.value") for side in ("input", "output"))
    answers = [name for name in attributes if name.startswith("llm.output_messages")]
    if not any("call" in name or "contents" in name for name in answers) and _CALL_IN_A_TEXT.search(str(answered)):
        raise RecordError(f"{at}: a call in output.value and none in llm.output_messages, where calls are read")
    if answers:
        return
    sides = [
        [value] if isinstance(value, str) and value and parsed(value) is value else [] for value in (given, answered)
    ]
    if any(name.startswith("llm.input_messages") for name in attributes):
        sides[0] = []
    yield chat(sides[0], "user", f"{at}: input.value"), chat(sides[1], "assistant", f"{at}: output.value")


def _adk_content(given: Any, role: str) -> Any:
    if isinstance(given, dict):
        return {**given, "role": role}
    return {"role": role, "content": given if isinstance(given, str) else None, "parts": _listed(given)}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _events(span: Span, attributes: Mapping[str, Any], at: str) -> Iterator[tuple[list[Message], list[Message]]]:
    own_events = _json(attributes, "events", at) if "event.name" in str(attributes.get("events", "")) else None
    logged = [own for own in _listed(own_events) if isinstance(own, dict)]
    events = [*span.events, *((str(own.get("event.name")), own) for own in logged)]
    given: list[Any] = []
    answered: list[Any] = []
    for name, fields in events:
        role = _EVENT_ROLE.fullmatch(name)
        if role:
            message = {key: parsed(value) if key == "tool_calls" else value for key, value in fields.items()}
            given.append({"role": role[1], **_named(message)})
        elif name == "gen_ai.choice":
            inner = parsed(fields.get("message"))
            body = inner if isinstance(inner, dict) else {**_named(fields), "content": fields.get("content", inner)}
            answered.append({**body, "role": "assistant", "tool_calls": parsed(body.get("tool_calls"))})
            result = parsed(fields.get("tool.result"))
            if result:
                # Strands puts the results into the choice that they follow.
                answered.append({"role": "user", "parts": _listed(result)})
        elif name == "gen_ai.content.prompt":
            given += _listed(parsed(fields.get("gen_ai.prompt")))
        elif name == "gen_ai.content.completion":
            answered += _listed(parsed(fields.get("gen_ai.completion")))
    yield list(chat(given, "user", f"{at}: events")), list(chat(answered, "assistant", f"{at}: events"))


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The event's body; what else a log keeps at an event is no part of a message."""
    return {key: value for key, value in fields.items() if key in READ_FIELDS}


def _messages(attributes: Mapping[str, Any], name: str, at: str) -> list[Any]:
    value = _json(attributes, name, at)
    if isinstance(value, str):
        raise RecordError(f"{at}: {name} is no JSON (cut off?), expected a list of messages")
    return _listed(value)


def _json(attributes: Mapping[str, Any], name: str, at: str) -> Any:
    value = parsed(attributes.get(name))
    if isinstance(value, str) and value[:1] in ("[", "{"):
        raise RecordError(f"{at}: {name} is broken JSON (cut off?): {value[:40]!r}...")
    return value


def _flat(attributes: Mapping[str, Any], prefix: str, at: str) -> list[Any]:
    """``prefix.0.role`` and the like to messages; a list or JSON under ``prefix`` itself is one, too."""
    whole = parsed(attributes.get(prefix))
    if whole:
        return _listed(whole)
    tree: dict[str, Any] = {}
    for key, value in attributes.items():
        if not key.startswith(f"{prefix}."):
            continue
        levels = key[len(prefix) + 1 :].split(".")
        if len(levels) > _MAX_KEY_LEVELS:
            raise RecordError(f"{at}: an attribute {prefix}... of {len(levels)} levels, expected {_MAX_KEY_LEVELS}")
        node = tree
        for level in levels[:-1]:
            node = node.setdefault(level, {})
            if not isinstance(node, dict):
                raise RecordError(f"{at}: {key} stands below an attribute that has a value")
        if isinstance(node.get(levels[-1]), dict):
            raise RecordError(f"{at}: {key} has a value and attributes below it")
        node[levels[-1]] = value
    return _as_list(tree) if tree else []


def _as_list(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    if node and all(key.isdecimal() for key in node):
        return [_as_list(node[key]) for key in sorted(node, key=int)]
    return {key: _as_list(value) for key, value in node.items()}
