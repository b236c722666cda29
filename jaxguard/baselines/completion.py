"""What an OpenAI-compatible endpoint answered: text, tool calls, log probabilities, tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class Malformed(ValueError):
    """A body is no chat completion; the message says where."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model proposes; ``arguments`` is the text that should be a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """The first choice of an answer.

    Attributes:
        text: What was said; ``""`` where nothing was.
        calls: Proposed tool calls, in order.
        finish: Why it ended, in the endpoint's words.
        alternatives: For each token of the text the log probabilities of likely tokens in its place, where the
            endpoint tells them.
        prompt_tokens: Read, as the endpoint counts; ``None`` where it does not tell.
        completion_tokens: Written, likewise.
        cached: Was it answered before, and not asked again?
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    finish: str = ""
    alternatives: tuple[Mapping[str, float], ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached: bool = False


def read_completion(body: str, *, cached: bool = False) -> Completion:
    """The completion in the body of an answer.

    Raises:
        Malformed: It is no JSON, or not a chat completion.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON ({type(error).__name__})") from error
    choices = _expect(_expect(value, dict, "answer").get("choices"), list, "choices")
    if not choices:
        raise Malformed("choices: got an empty list")
    choice = _expect(choices[0], dict, "choices[0]")
    message = _expect(choice.get("message"), dict, "message")
    usage = value.get("usage") if isinstance(value.get("usage"), dict) else {}
    return Completion(
        text=_text(message.get("content")),
        calls=tuple(_call(call) for call in _expect(message.get("tool_calls") or [], list, "tool_calls")),
        finish=str(choice.get("finish_reason") or ""),
        alternatives=_alternatives(choice.get("logprobs")),
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached=cached,
    )


def _expect(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise Malformed(f"{where}: got {type(value).__name__}, expected {kind.__name__}")
    return value


def _text(content: Any) -> str:
    """Some endpoints answer with a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _expect(content if content is not None else "", str, "content")


def _call(value: Any) -> ToolCall:
    function = _expect(_expect(value, dict, "tool call").get("function"), dict, "tool call's function")
    name = _expect(function.get("name"), str, "tool call's name")
    arguments = function.get("arguments")
    if isinstance(arguments, dict):  # against the specification, but seen
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(str(value.get("id") or ""), name, _expect(arguments or "", str, "tool call's arguments"))


def _alternatives(logprobs: Any) -> tuple[Mapping[str, float], ...]:
    """What is not as specified counts as not told: log probabilities are a refinement."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    found = []
    for token in content if isinstance(content, list) else []:
        listed = [token, *(token.get("top_logprobs") or [])] if isinstance(token, dict) else []
        found.append({
            one["token"]: float(one["logprob"])
            for one in listed
            if isinstance(one, dict) and isinstance(one.get("token"), str) and _is_number(one.get("logprob"))
        })  # fmt: skip
    return tuple(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value  # not NaN


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
