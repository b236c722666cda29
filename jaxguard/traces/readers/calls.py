"""Shared by the chat-shaped readers: tool arguments as logs write them, and steps from chat messages.

The pre-action rule lives in :func:`read_conversation`: messages are walked once, in log order, and a step
is made from what has been walked so far. A later message can only mark an earlier step as observed.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jaxguard.traces.files import MAX_DEPTH, is_deep, repeated_key
from jaxguard.traces.registry import RecordError
from jaxguard.types import Step, Trajectory

MAX_ARGUMENT_DEPTH = MAX_DEPTH // 2
"""Deeper arguments stay text: a JSON text inside a record escapes the limit that the record itself is held to."""

_PRIVATE = re.compile(r"<(think|thinking|function_thought)>")
_TAG = re.compile(r"^\[(user|assistant|system)\]", re.MULTILINE)
_PRIVATE_PARTS = ("thinking", "reasoning", "redacted_thinking")
# Anthropic's notation: calls and results are parts of a message's content.
_CALL_PART, _RESULT_PART = "tool_use", "tool_result"
_ARGUMENTS = ("arguments", "args", "input", "parameters", "params", "kwargs")
# Other notations that are met for a call, letters alone. They are refused: what holds a call must not pass as a text.
_CALLED = r"(?:tool|function|mcp|computer|shell|code|search|patch|interpreter|execution)"
_OTHER_CALLS = re.compile(rf"[a-z]*{_CALLED}(?:calls?|uses?|invocations?|requests?)(?:blocks?)?")
_OTHER_RESULTS = re.compile(r"[a-z]*(?:tool|function)(?:calls?)?(?:results?|outputs?|responses?)")
_WRITTEN_CALL = re.compile(r"<(?:tool_call|function_calls?|invoke)\b")


def parse_arguments(value: object) -> tuple[dict[str, Any] | None, str | None]:
    """Arguments of a call as ``(arguments, raw_arguments)``; exactly one of the two is ``None``.

    Logs hold an object, a JSON text of an object, or nothing (``""``, blanks, ``None``, ``"null"``: a call
    without arguments, ``{}``). Everything else (broken JSON, a JSON list or number, an object with a key that stands
    twice, or too deep to be carried on) is kept as raw text. NaN and Infinity become strings, as in
    :mod:`jaxguard.traces.files`.
    """
    if value is None:
        return {}, None
    if isinstance(value, dict):
        return dict(value), None
    if not isinstance(value, str):
        return None, json.dumps(value, ensure_ascii=False)
    if not value.strip():
        return {}, None
    try:
        parsed = json.loads(value, strict=False, parse_constant=str, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return None, value
    if parsed is None:
        return {}, None
    if isinstance(parsed, dict) and not is_deep(parsed, value, MAX_ARGUMENT_DEPTH):
        return parsed, None
    return None, value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"key {repeated_key(pairs)!r} stands twice")
    return found


@dataclass(frozen=True)
class Conversation:
    """What :func:`read_conversation` makes of a list of chat messages.

    Attributes:
        instruction: Text of the first user message, or of the system messages where no user speaks
            before the first call.
        steps: One per tool call, in log order.
        final_observation: What became visible after the last call, without ``final_reply``.
        final_reply: The agent's closing words to the user; ``""`` where the log ends otherwise.
        notes: Oddities that were met, each with its count: ``unmatched_results`` (a result whose call id no
            open call has; its text is kept in the next observation) and ``repeated_call_ids``.
    """

    instruction: str
    steps: tuple[Step, ...]
    final_observation: str
    final_reply: str
    notes: Mapping[str, int]

    def trajectory(
        self, metadata: Mapping[str, Any], notes: Mapping[str, int] | None = None, **facts: Any
    ) -> Trajectory:
        """The trajectory of this conversation alone.

        Args:
            metadata: Joined by what the conversation says: ``final_reply`` and ``notes``, where there are any.
            notes: More of them.
            facts: Other fields of the trajectory, ``id`` and ``source`` among them.
        """
        said = {"final_reply": self.final_reply, "notes": {**self.notes, **(notes or {})}}
        return Trajectory(
            instruction=self.instruction,
            steps=self.steps,
            final_observation=self.final_observation,
            metadata={**metadata, **{name: value for name, value in said.items() if value}},
            **facts,
        )


def read_conversation(messages: object, where: str = "messages") -> Conversation:
    """Chat messages (OpenAI's shape, Anthropic's, or AgentDojo's) to steps.

    A tool result stands in the next observation as it is; other speakers' texts are tagged with ``[user]``,
    ``[assistant]`` or ``[system]``, which a result cannot forge (its own become ``(user)``, ...). Text that the
    agent writes into the message of a call, or between ``<think>`` tags, is its ``thought``.

    Args:
        messages: The list of messages.
        where: Name of the field that held them, for error messages.

    Raises:
        RecordError: A message has not the shape of one, or holds calls in a notation that is not read; the
            reason names it. Also where there are results, or calls written out in a text, and no call.
    """
    if not isinstance(messages, list) or not messages:
        raise RecordError(f"{where}: got {_shown(messages)}, expected a list of messages")
    state = _State()
    for index, message in enumerate(messages):
        at = f"{where}[{index}]"
        if not isinstance(message, dict):
            raise RecordError(f"{at}: got {_shown(message)}, expected an object")
        role = message.get("role")
        if isinstance(message.get("content"), dict):
            message = {**message, "content": [message["content"]]}
        if role == "assistant":
            state.assistant(message, at)
        elif role in ("tool", "function", "user"):
            results = _parts(message.get("content"), _RESULT_PART)
            for part in results:
                content = next((part[key] for key in ("content", "output", "text") if part.get(key)), None)
                state.result({"tool_call_id": part.get("tool_use_id"), "content": content})
            if role == "user":
                _refuse_other_notations(message, at, _OTHER_CALLS, _OTHER_RESULTS)
                state.user(visible_text(_without(message.get("content"), _RESULT_PART)))
            elif results:
                state.tool_says(visible_text(_without(message.get("content"), _RESULT_PART)))
            else:
                state.result(message)
        elif role in ("system", "developer"):
            _refuse_other_notations(message, at, _OTHER_CALLS)
            state.system(visible_text(message.get("content")))
        else:
            raise RecordError(f"{at}.role: got {_shown(role)}, expected system, user, assistant or tool")
    return state.finish(where)


class _OpenCalls:
    """Calls that have no result yet, found by id, tool or age; a search costs constant time on average."""

    def __init__(self) -> None:
        self.open: set[int] = set()
        self._waiting: dict[tuple[str, object], deque[int]] = {}  # closed ones are dropped when they are met

    def add(self, index: int, given_id: str, tool: str) -> None:
        self.open.add(index)
        for key in (("id", given_id), ("tool", tool), ("any", None)):
            self._waiting.setdefault(key, deque()).append(index)

    def close(self, given_id: object, tool: object) -> bool:
        """Close the call that a result answers: the oldest of its id, or without an id of its tool, or of all."""
        keys = [("id", given_id)] if isinstance(given_id, str) else [("tool", str(tool)), ("any", None)]
        for key in keys:
            waiting = self._waiting.get(key, ())
            while waiting:
                index = waiting.popleft()
                if index in self.open:
                    self.open.remove(index)
                    return True
        return False


@dataclass
class _State:
    """What has been walked so far; ``pending`` becomes the next step's observation."""

    instruction: str | None = None
    system_texts: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    id_uses: dict[str, int] = field(default_factory=dict)
    open_calls: _OpenCalls = field(default_factory=_OpenCalls)
    results: int = 0
    written_call: str = ""
    notes: dict[str, int] = field(default_factory=dict)

    def user(self, text: str) -> None:
        self._flush_said()
        if self.instruction is None and not self.steps and text.strip():
            self.instruction = text
        else:
            self._show("user", text)

    def system(self, text: str) -> None:
        self._flush_said()
        if self.instruction is None and not self.steps:
            self.system_texts.append(text)
        else:
            self._show("system", text)

    def assistant(self, message: Mapping[str, Any], at: str) -> None:
        calls = _proposed(message, at)
        spoken, thought = split_private(message)
        if thought:
            self.thoughts.append(thought)
        if not calls:
            written = _WRITTEN_CALL.search(spoken)
            self.written_call = self.written_call or (f"{at}: {written[0]}" if written else "")
            if spoken.strip():
                self.said.append(spoken)
            return
        # Words that no other speaker answered before the call came belong to the call.
        self.thoughts += [*self.said, *([spoken] if spoken.strip() else [])]
        self.said = []
        observation = "\n".join(self.pending)
        self.pending = []
        for number, (call, place) in enumerate(calls):
            self._propose(call, place, observation, parallel=number > 0)

    def _propose(self, call: Any, at: str, observation: str, parallel: bool) -> None:
        tool, arguments, given_id = _call_parts(call, at)
        parsed, raw = parse_arguments(arguments)
        step = Step(
            tool=tool,
            arguments=parsed,
            raw_arguments=raw,
            call_id=self._unique_id(given_id),
            observation=observation,
            thought="\n".join(self.thoughts),
            parallel=parallel,
        )
        self.thoughts = []
        self.open_calls.add(len(self.steps), given_id, tool)
        self.steps.append(step)

    def _unique_id(self, given: str) -> str:
        name = unique = given or f"call_{len(self.steps)}"
        if name in self.id_uses:
            self._note("repeated_call_ids")
        while unique in self.id_uses:
            self.id_uses[name] += 1
            unique = f"{name}#{self.id_uses[name]}"
        self.id_uses[unique] = 1
        return unique

    def result(self, message: Mapping[str, Any]) -> None:
        self.results += 1
        given_id, name = message.get("tool_call_id"), message.get("name")
        if not self.open_calls.close(given_id, name):
            self._note("unmatched_results")
        self._flush_said()
        text = visible_text(message.get("content"))
        error = message.get("error")
        if error:
            # AgentDojo shows the agent the error in place of an empty result.
            text = f"{text}\n{error}" if text.strip() else str(error)
        self.tool_says(text)

    def tool_says(self, text: str) -> None:
        if text.strip():
            self.pending.append(_untagged(text))

    def _show(self, speaker: str, text: str) -> None:
        if text.strip():
            self.pending.append(f"[{speaker}] {_untagged(text)}")

    def _flush_said(self) -> None:
        self._show("assistant", "\n".join(self.said))
        self.said = []

    def _note(self, name: str) -> None:
        self.notes[name] = self.notes.get(name, 0) + 1

    def finish(self, where: str) -> Conversation:
        instruction = self.instruction
        if instruction is None:
            instruction = "\n".join(text for text in self.system_texts if text.strip())
        if not instruction:
            raise RecordError(f"{where}: no user or system text before the first call, expected an instruction")
        if not self.steps and (self.results or self.written_call):
            found = self.written_call or f"{where}: {self.results} tool results"
            raise RecordError(f"{found}, but no call in tool_calls, function_call or a {_CALL_PART} part")
        for index in self.open_calls.open:
            self.steps[index] = self.steps[index].marked(None, True)
        return Conversation(
            instruction=instruction,
            steps=tuple(self.steps),
            final_observation="\n".join(self.pending),
            final_reply="\n".join(self.said),
            notes=self.notes,
        )


def _proposed(message: Mapping[str, Any], at: str) -> list[tuple[Any, str]]:
    """The calls of an assistant's message in the shape that ``_call_parts`` reads, each with its place."""
    given = message.get("tool_calls") or []
    if not isinstance(given, list):
        raise RecordError(f"{at}.tool_calls: got {_shown(given)}, expected a list")
    calls = [(call, f"{at}.tool_calls[{number}]") for number, call in enumerate(given)]
    single = message.get("function_call")
    if single not in (None, ""):
        if not isinstance(single, dict):
            raise RecordError(f"{at}.function_call: got {_shown(single)}, expected an object")
        calls.append(({"function": single}, f"{at}.function_call"))
    parts = _parts(message.get("content"), _CALL_PART)
    # Some logs repeat the calls of tool_calls as parts.
    named = {(own, tool) for tool, _, own in (_call_parts(*call) for call in calls) if own} if parts else set()
    for number, part in enumerate(parts):
        own, tool = part.get("id"), part.get("name")
        if not (isinstance(own, str) and isinstance(tool, str) and (own, tool) in named):
            function = {name: part[name] for name in ("name", *_ARGUMENTS) if name in part}
            calls.append(({"id": part.get("id"), "function": function}, f"{at}.content, {_CALL_PART} {number}"))
    _refuse_other_notations(message, at, _OTHER_CALLS, _OTHER_RESULTS)
    return calls


def _refuse_other_notations(message: Mapping[str, Any], at: str, *notations: re.Pattern[str]) -> None:
    """Calls or results that the readers do not know must not vanish.

    They stand in a field of the message, or in a part of its content: under the part's type, or as its one key.
    """
    speaks = message["role"] == "assistant"
    known_fields = ("tool_calls", "function_call") if speaks else ()
    known_kinds = (_CALL_PART,) if speaks else (_RESULT_PART,)
    names = [
        (f"{at}.{name}", name)
        for name, value in message.items()
        if name not in known_fields and value and isinstance(value, dict | list | str)
    ]
    content = message.get("content")
    for number, part in enumerate(content if isinstance(content, list) else ()):
        kinds = [_part_kind(part)] if _part_kind(part) is not None else list(part) if isinstance(part, dict) else []
        names += [
            (f"{at}.content[{number}]", kind) for kind in kinds if isinstance(kind, str) and kind not in known_kinds
        ]
    for place, name in names:
        if any(_is_written(name, notation) for notation in notations):
            raise RecordError(
                f"{place}: {name!r} is not read, expected tool_calls or {_CALL_PART} and {_RESULT_PART} parts"
            )


def refuse_unread(message: Mapping[str, Any], at: str) -> None:
    """Raises :class:`RecordError` where a message holds calls or results in a notation that is not read."""
    _refuse_other_notations(message, at, _OTHER_CALLS, _OTHER_RESULTS)


@lru_cache(maxsize=4_096)
def _is_written(name: str, notation: re.Pattern[str]) -> bool:
    return notation.fullmatch(name.lower().replace("_", "").replace("-", "")) is not None


def refuse_calls_beside(record: Mapping[str, Any], name: str) -> None:
    """Calls in other fields than the list of messages that is read must not vanish; copies of its own may stand there.

    Raises:
        RecordError: Names the place of the first.
    """
    known: set[str] | None = None
    for place, call in _calls_in({key: value for key, value in record.items() if key != name}):
        known = {own for _, own in _calls_in(record[name])} if known is None else known
        if call not in known:
            raise RecordError(f"{place}: a call that is not among the messages of {name!r}, where calls are read")


def _calls_in(value: Any) -> Iterator[tuple[str, str]]:
    """Place and JSON of everything that holds calls in a notation that is read, wherever it stands."""
    waiting: list[tuple[str, Any]] = [("", value)]
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, list):
            children = [(f"{place}[{i}]", child) for i, child in enumerate(node)]
        else:
            children = [(f"{place}.{key}".lstrip("."), child) for key, child in node.items()]
            held = [node.get("tool_calls"), node.get("function_call"), node if node.get("type") == _CALL_PART else None]
            yield from ((place or "record", json.dumps(own, sort_keys=True)) for own in held if own)
        waiting += [(where, child) for where, child in children if isinstance(child, dict | list)]


def _untagged(text: str) -> str:
    """A text cannot speak for another: a tag of ours at the start of one of its lines gets round brackets."""
    return _TAG.sub(r"(\1)", text) if "[" in text else text


def _call_parts(call: Any, at: str) -> tuple[str, object, str]:
    """Tool name, arguments and id (``""`` where there is none) of OpenAI's or AgentDojo's shape of a call."""
    if not isinstance(call, dict):
        raise RecordError(f"{at}: got {_shown(call)}, expected an object")
    function = call.get("function")
    holders = [function, call] if isinstance(function, dict) else [call]
    tool = function.get("name") if isinstance(function, dict) else function
    given = [holder[name] for holder in holders for name in _ARGUMENTS if holder.get(name) not in (None, "", {})]
    if len(given) > 1:
        raise RecordError(f"{at}: {len(given)} of {', '.join(_ARGUMENTS)} are given, expected one")
    arguments = given[0] if given else None
    if not isinstance(tool, str) or not tool:
        raise RecordError(f"{at}: got {_shown(tool)} as the function's name, expected a non-empty string")
    given_id = call.get("id")
    return tool, arguments, given_id if isinstance(given_id, str) else ""


def visible_text(content: object) -> str:
    """Text of a message's content: a string, nothing, or a list of parts (of which private ones are left out).

    A part without text (an image, say) is shown as its type in brackets, so that its presence is not lost.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return "\n".join(_part_text(part) for part in content if _part_kind(part) not in _PRIVATE_PARTS)


def split_private(message: Mapping[str, Any]) -> tuple[str, str]:
    """An assistant message's words to others, and its private reasoning (fields, parts or tags that hold it)."""
    content = message.get("content")
    text = visible_text(_without(content, _CALL_PART))
    spoken, thoughts = _cut_private(text)
    if isinstance(content, list):
        thoughts += [_part_text(part) for part in content if _part_kind(part) in _PRIVATE_PARTS]
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.get(name), str):
            thoughts.append(message[name])
    return spoken.strip() if thoughts else text, "\n".join(thought for thought in thoughts if thought)


def _cut_private(text: str) -> tuple[str, list[str]]:
    """A text without what stands between private tags, and that; one pass, however many tags are never closed."""
    kept: list[str] = []
    private: list[str] = []
    unclosed: set[str] = set()
    position = 0
    for opening in _PRIVATE.finditer(text):
        name = opening[1]
        if opening.start() < position or name in unclosed:
            continue
        end = text.find(f"</{name}>", opening.end())
        if end < 0:
            unclosed.add(name)
            continue
        kept.append(text[position : opening.start()])
        private.append(text[opening.end() : end].strip())
        position = end + len(f"</{name}>")
    kept.append(text[position:])
    return "".join(kept), private


def _parts(content: object, kind: str) -> list[Mapping[str, Any]]:
    """The parts of one kind in a message's content."""
    return [part for part in content if _part_kind(part) == kind] if isinstance(content, list) else []


def _without(content: object, kind: str) -> object:
    return [part for part in content if _part_kind(part) != kind] if isinstance(content, list) else content


def _part_kind(part: object) -> object:
    return part.get("type") if isinstance(part, dict) else None


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for name in ("text", "content", "thinking"):
            if isinstance(part.get(name), str):
                return part[name]
        if "type" in part:
            return f"[{part['type']}]"
    return json.dumps(part, ensure_ascii=False)


def _shown(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
