"""What a trace has told so far, so that what it repeats is told once."""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from jaxguard.traces.readers.calls import parse_arguments, visible_text
from jaxguard.traces.readers.literals import literal
from jaxguard.traces.readers.message_dialects import Message, unwrap

_MAX_LOOKED_AT = 64
_NEVER = float("inf")


@dataclass(eq=False)
class _Call:
    """A call that was told: ``id`` as logged (``""`` for none), ``shown`` as told, ``key`` of tool and arguments."""

    id: str
    shown: str
    tool: str
    key: str
    proposed: Any  # the arguments, or their text
    by_span: bool = False
    has_span: bool = False
    answered: float = _NEVER  # when its result was told

    @property
    def is_open(self) -> bool:
        return self.answered == _NEVER


class Told:
    """Chat messages in the order in which they are told.

    Attributes:
        messages: What was new in them.
        now: The time at which something is told, to be set by the teller.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.now = -_NEVER
        self._texts: Counter[tuple[str, str]] = Counter()
        self._texts_before: dict[str, list[int]] = {}  # of what a model is about to answer
        self._shown: set[str] = set()
        self._by_id: dict[tuple[str, str], list[_Call]] = defaultdict(list)
        self._by_plain_id: dict[str, list[_Call]] = defaultdict(list)
        self._by_key: dict[str, list[_Call]] = defaultdict(list)
        self._without_id: dict[str, deque[_Call]] = defaultdict(deque)
        self._without_span: dict[str, deque[_Call]] = defaultdict(deque)
        self._by_key_without_span: dict[str, deque[_Call]] = defaultdict(deque)
        self._open_of_tool: dict[str, deque[_Call]] = defaultdict(deque)
        self._of_span: dict[str, _Call] = {}
        self._running_until = -_NEVER  # of the tool whose call was told last, where only its span told it

    def history(self, messages: Sequence[Message], texts: bool = True) -> None:
        """Messages as a request lists them: what is not told yet is new.

        Args:
            messages: In their order.
            texts: Tell the texts as well; else calls and their results only.
        """
        heard: Counter[tuple[str, str]] = Counter()
        uses: Counter[tuple[str, str]] = Counter()
        here: dict[str, _Call] = {}
        waiting: dict[str, deque[_Call]] = defaultdict(deque)
        for message in messages:
            if message["role"] == "tool":
                self._result(message, here, waiting, heard, texts)
                continue
            calls = []
            for given in message.get("tool_calls", ()):
                call, is_new = self._known(given, uses)
                here[call.id] = call
                for name in (call.tool, ""):
                    waiting[name].append(call)
                if is_new:
                    calls.append(_shown(given, call))
            is_new = texts and self._is_new_text(message, heard)
            if calls or (
                is_new and not message.get("tool_calls")
            ):  # words beside a call are told with it or not at all
                self._tell(message if is_new else {"role": "assistant", "content": None}, calls)

    def response(self, span: str, messages: Sequence[Message], is_end: bool) -> None:
        """What a model answered, all of it new but for calls that it repeats before they have a result.

        To be told twice: at the start of the model's call, for the calls in it, and at the end, for an answer without.
        """
        if not is_end:
            self._texts_before[span] = [self._texts[_text(message)] for message in messages]
        if is_end == any(message.get("tool_calls") for message in messages):
            return
        if any(message["role"] != "assistant" for message in messages):
            self.history(messages)
            return
        if is_end:  # a request may have told it before, where the end was logged late
            before = self._texts_before[span]
            messages = [one for one, count in zip(messages, before, strict=True) if self._texts[_text(one)] == count]
        told: list[Any] = []
        calls: list[Message] = []
        private: dict[str, str] = {}
        for message in messages:
            content = message.get("content")
            self._texts[_text(message)] += 1
            told += content if isinstance(content, list) else [content] if content else []
            private |= {name: message[name] for name in ("reasoning", "reasoning_content") if name in message}
            for given in message.get("tool_calls", ()):
                tool, own, key = _identity(given)
                earlier = self._by_id.get((own, tool), ()) if own else ()
                if not any(call.key == key and (call.is_open or call.by_span) for call in earlier[-1:]):
                    calls.append(_shown(given, self._add(tool, own, key)))
        last = self.messages[-1] if self.messages else {}
        if calls and last.get("tool_calls"):
            # Nothing became visible since the calls before: they were proposed side by side.
            words = last["content"]
            last["content"] = [*(words if isinstance(words, list) else [words] if words else []), *told]
            last["tool_calls"] += calls
        elif told or calls or private:
            one = told[0] if len(told) == 1 and isinstance(told[0], str) else told
            self._tell({"role": "assistant", "content": one, **private}, calls)

    def tool_started(self, span: str, tool: str, own: str, inputs: Any, until: float) -> None:
        """A tool runs: for a call that was told, or for one that nothing else tells."""
        arguments, is_object = _span_arguments(inputs)
        call = self._waiting_for_span(tool, own, inputs, arguments, is_object)
        if call is None:
            given = {"id": own, "type": "function", "function": {"name": tool, "arguments": arguments}}
            call = self._add(*_identity(given))
            call.by_span = True
            if self._running_until > self.now:
                self.messages[-1]["tool_calls"].append(_shown(given, call))
            else:
                self._tell({"role": "assistant", "content": None}, [_shown(given, call)])
            self._running_until = max(until, self._running_until)
        call.has_span = True
        self._of_span[span] = call

    def tool_ended(self, span: str, returned: bool, text: str) -> None:
        """A tool's result, unless a request told it before."""
        call = self._of_span[span]
        if returned and call.is_open:
            self._answer(call, text)

    def _waiting_for_span(
        self, tool: str, own: str, inputs: Any, arguments: Mapping[str, Any], is_object: bool
    ) -> _Call | None:
        """The call that a tool's span runs."""
        keys = (_key(tool, arguments), _key(tool, unwrap(inputs)))
        if own:
            free = [call for call in self._by_plain_id.get(own, [])[-_MAX_LOOKED_AT:] if not call.has_span]
            if free:
                return next((call for call in reversed(free) if call.key in keys), free[-1])
        for name in keys:
            if call := next(self._free(self._by_key_without_span[name], own), None):
                return call
        for call in self._free(self._without_span[tool], own):
            if not is_object or _fits(call.proposed, arguments):
                return call
        return None

    def _free(self, calls: deque[_Call], own: str) -> Iterator[_Call]:
        """Calls that a tool's span may run, the latest first, then the oldest (of many side by side)."""
        for end, drop in ((-1, calls.pop), (0, calls.popleft)):
            while calls and (calls[end].has_span or calls[end].answered < self.now):
                drop()
        latest = list(islice(reversed(calls), _MAX_LOOKED_AT))
        oldest = islice(calls, min(_MAX_LOOKED_AT, len(calls) - len(latest)))
        for call in chain(latest, oldest):
            if not (call.has_span or call.answered < self.now or (own and call.id)):
                yield call

    def _known(self, given: Message, uses: Counter[tuple[str, str]]) -> tuple[_Call, bool]:
        tool, own, key = _identity(given)
        name = (own, tool) if own else ("", key)
        nth = uses[name]
        uses[name] += 1
        told = self._by_id.get(name, []) if own else self._by_key.get(key, [])
        if nth < len(told):
            return told[nth], False
        nameless = self._without_id.get(key) if own else None
        if nameless:
            call = nameless.popleft()
            call.id = own
            self._by_id[own, tool].append(call)
            self._by_plain_id[own].append(call)
            return call, False
        return self._add(tool, own, key), True

    def _add(self, tool: str, own: str, key: str) -> _Call:
        number = len(self._shown)
        shown = own or f"call_{number}"
        while not own and shown in self._shown:
            number += 1
            shown = f"call_{number}"
        self._shown.add(shown)
        call = _Call(own, shown, tool, key, json.loads(key)[1])
        if own:
            self._by_id[own, tool].append(call)
            self._by_plain_id[own].append(call)
        else:
            self._without_id[key].append(call)
        self._by_key[key].append(call)
        self._without_span[tool].append(call)
        self._by_key_without_span[key].append(call)
        self._open_of_tool[tool].append(call)
        return call

    def _result(
        self,
        message: Message,
        here: Mapping[str, _Call],
        waiting: Mapping[str, deque[_Call]],
        heard: Counter[tuple[str, str]],
        texts: bool,
    ) -> None:
        """A result in a list of messages: of a call in the same list, else of one that was told before."""
        own, tool = message["tool_call_id"], message["name"]
        call = here.get(own) if own else None
        if call is None and own and own in self._by_plain_id:
            call = self._by_plain_id[own][-1]
        if call is None:
            queue = waiting.get(tool) or (waiting.get("") if not own and not tool else None)
            while queue and call is None:
                call = queue.popleft()
            queue = self._open_of_tool.get(tool)
            while queue and call is None:
                first = queue.popleft()
                call = first if first.is_open else None
        if call is not None:
            for name in (call.tool, ""):
                if waiting.get(name) and waiting[name][0] is call:
                    waiting[name].popleft()
            if call.is_open:
                self._answer(call, message["content"])
        elif texts and self._is_new_text(message, heard):
            self._tell({**message, "tool_call_id": own or "unmatched"}, [])

    def _answer(self, call: _Call, text: str) -> None:
        call.answered = self.now
        self._tell({"role": "tool", "tool_call_id": call.shown, "content": text}, [])

    def _is_new_text(self, message: Message, heard: Counter[tuple[str, str]]) -> bool:
        name = _text(message)
        heard[name] += 1
        if heard[name] <= self._texts[name] or not name[1]:
            return False
        self._texts[name] += 1
        return True

    def _tell(self, message: Message, calls: list[Message]) -> None:
        self._running_until = -_NEVER
        plain = {name: value for name, value in message.items() if name != "tool_calls"}
        self.messages.append({**plain, "tool_calls": calls} if calls else plain)


def _text(message: Message) -> tuple[str, str]:
    return message["role"], visible_text(message.get("content")).strip()


def _identity(given: Message) -> tuple[str, str, str]:
    """Tool, id, and key of a call."""
    function = given["function"]
    return function["name"], given["id"], _key(function["name"], function["arguments"])


def _key(tool: str, arguments: Any) -> str:
    parsed, raw = parse_arguments(arguments)
    return json.dumps([tool, parsed if raw is None else raw], sort_keys=True)


def _shown(given: Message, call: _Call) -> Message:
    return {**given, "id": call.shown}


def _fits(proposed: Any, arguments: Mapping[str, Any]) -> bool:
    """May a tool have been run with these arguments for that call? Defaults are filled in, and values converted."""
    return not isinstance(proposed, dict) or all(
        name in arguments and _plain(arguments[name]) == _plain(value) for name, value in proposed.items()
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _span_arguments(inputs: Any) -> tuple[dict[str, Any], bool]:
    """Arguments that a tool ran with, and whether its log held an object of them (a lone text becomes ``input``)."""
    value = unwrap(inputs)
    if isinstance(value, dict) and set(value) == {"input"}:
        value = unwrap(value["input"])
    if isinstance(value, str):
        read = literal(value)
        value = read if isinstance(read, dict) else value
    if isinstance(value, dict):
        if isinstance(value.get("args"), dict) and isinstance(value.get("name"), str) and "id" in value:
            return value["args"], True
        if isinstance(value.get("kwargs"), dict) and value.get("args") == [] and len(value) == 2:
            return value["kwargs"], True
        return value, True
    return ({}, True) if value in (None, "") else ({"input": value}, False)
