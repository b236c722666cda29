"""Turns of models and runs of tools, put together to conversations in which everything stands once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces.readers.calls import visible_text
from jaxguard.traces.readers.span_parts import Message
from jaxguard.traces.readers.span_tools import Run, short
from jaxguard.traces.readers.span_trace import Trace, Turn, calls_of, read_trace
from jaxguard.traces.readers.spans import Span

_MODELS = ("gen_ai.request.model", "llm.model_name", "gen_ai.response.model")
_SESSIONS = ("gen_ai.conversation.id", "session.id", "gcp.vertex.agent.session_id")


@dataclass(eq=False)
class Call:
    """A proposed call; ``since`` is when it can have run at the earliest."""

    thread: Thread
    id: str
    tool: str
    key: str
    since: float
    entry: int
    scope: str
    run: Run | None = None
    answered: bool = False


@dataclass(eq=False)
class Thread:
    """One conversation: messages by the start of the turn that showed them, and the runs between."""

    trace: str
    first_span: str
    metadata: dict[str, Any]
    notes: dict[str, int] = field(default_factory=dict)
    _messages: list[Message] = field(default_factory=list)
    _whens: list[int] = field(default_factory=list)
    _held: Counter[Hashable] = field(default_factory=Counter)
    _calls: list[Call] = field(default_factory=list)
    _unproposed: list[Run] = field(default_factory=list)

    def add(self, message: Message, when: int, since: float, scope: str = "") -> list[Call]:
        """A message that is new; the calls in it."""
        own = calls_of(message)
        calls = [Call(self, given, tool, key, since, len(self._messages), scope) for given, tool, key in own]
        self._messages.append(message)
        self._whens.append(max(when, self._whens[-1] if self._whens else when))
        self._held.update(key for call in own for key in _call_keys(*call))
        self._held[_text_key(message)] += 1
        self._calls += calls
        return calls

    def take(self, turn: Turn) -> Iterator[Call]:
        """What a turn adds to the conversation."""
        seen: Counter[Hashable] = Counter()
        when = turn.span.start
        for message in turn.given:
            own = calls_of(message)
            fresh = [call for call, parts in zip(message.get("tool_calls") or (), own, strict=True)
                     if self._is_new(seen, *parts)]  # fmt: skip
            if fresh:
                whole = len(fresh) == len(own)
                shown = {**message, "tool_calls": fresh, **({} if whole else {"content": ""})}
                yield from self.add(shown, when, -math.inf, turn.scope)
            elif not own:
                key = _text_key(message)
                seen[key] += 1
                if seen[key] > self._held[key]:
                    self.add(message, when, when)
            else:
                seen[_text_key(message)] += 1
        for message in turn.answered:
            yield from self.add(message, when, when, turn.scope)

    def _is_new(self, seen: Counter[Hashable], given: str, tool: str, key: str) -> bool:
        by_id, idless, by_key = ("id", given, tool), ("idless", key), ("call", key)
        place = by_id if given and self._held[by_id] else idless if given else by_key
        seen[place] += 1
        return seen[place] > self._held[place]

    def note(self, name: str) -> None:
        """Count an oddity."""
        self.notes[name] = self.notes.get(name, 0) + 1

    def ran_unproposed(self, run: Run) -> None:
        """A run that no message proposes: a call of its own."""
        self._unproposed.append(run)

    def messages(self) -> list[Message]:
        """The conversation in order; what a run answered stands before the first turn that started after it."""
        self._find_answers()
        extra: dict[int, list[tuple[int, int, Message]]] = {}
        for call in self._calls:
            run = call.run
            if run is not None and run.result is not None and not call.answered:
                place = bisect_left(self._whens, run.span.end, lo=call.entry + 1)
                extra.setdefault(place, []).append((run.span.end, 1, _answer(run, call.id)))
        for run in self._unproposed:
            place = bisect_right(self._whens, run.span.start)
            proposed = {"id": run.id or None, "function": {"name": run.tool, "arguments": run.arguments}}
            message = {"role": "assistant", "content": "", "tool_calls": [proposed]}
            extra.setdefault(place, []).append((run.span.start, 0, message))
            if run.result is not None:
                later = bisect_left(self._whens, run.span.end, lo=place)
                extra.setdefault(later, []).append((run.span.end, 1, _answer(run, run.id)))
        made: list[Message] = []
        for place in range(len(self._messages) + 1):
            made += [message for _, _, message in sorted(extra.get(place, ()), key=lambda item: item[:2])]
            made += self._messages[place : place + 1]
        return made

    def _find_answers(self) -> None:
        """Marks the calls that a message answers."""
        by_entry: dict[int, list[Call]] = {}
        for call in self._calls:
            by_entry.setdefault(call.entry, []).append(call)
        waiting: dict[str, deque[Call]] = {}
        oldest: deque[Call] = deque()
        for index, message in enumerate(self._messages):
            for call in by_entry.get(index, ()):
                waiting.setdefault(call.id, deque()).append(call)
                oldest.append(call)
            if message["role"] == "tool":
                given = message.get("tool_call_id")
                queue = waiting.get(given, deque()) if given else oldest
                while queue and queue[0].answered:
                    queue.popleft()
                if queue:
                    queue.popleft().answered = True


def _answer(run: Run, given: str) -> Message:
    return {"role": "tool", "tool_call_id": given or None, "name": run.tool, "content": run.result}


def _call_keys(given: str, tool: str, key: str) -> list[Hashable]:
    return [("call", key), ("id", given, tool) if given else ("idless", key)]


def _text(message: Message) -> str:
    content = message.get("content")
    return visible_text(content).strip() if content else ""


def _text_key(message: Message) -> Hashable:
    given = message.get("tool_call_id")
    return (message["role"], given) if given else (message["role"], "", _text(message))


@dataclass
class Threads:
    """All conversations of a file."""

    all: list[Thread] = field(default_factory=list)
    _index: dict[Hashable, Thread] = field(default_factory=dict)
    _calls: dict[tuple[str, str], Call] = field(default_factory=dict)

    def read(self, trace: str, spans: Iterable[Span]) -> None:
        """Add a trace; where it raises, nothing is added.

        Raises:
            RecordError: See :func:`read_trace`.
        """
        found = read_trace(trace, spans)
        calls: list[Call] = []
        opened: dict[str, list[tuple[int, Thread]]] = {}
        touched: set[int] = set()
        for turn in found.turns:
            thread = self._thread_of(turn, found)
            calls += thread.take(turn)
            self._remember(thread, turn, found)
            opened.setdefault(turn.scope, []).append((turn.span.start, thread))
            touched.add(id(thread))
        left = _match(found.runs, calls, found.scopes)
        for call in calls:
            if call.id:
                self._calls[call.id, call.tool] = call
        nearest: dict[str, str] = {"": ""}
        for name, scope in found.scopes.items():
            nearest[name] = name if name in opened else nearest[scope]
        for run in left:
            known = self._calls.get((run.id, run.tool)) if run.id else None
            if known is not None and id(known.thread) in touched and (known.run is None or _overlap(known.run, run)):
                known.run = known.run or run
                continue
            scope = nearest[found.scopes[run.span.id]] or found.anchors[run.span.id]
            if scope not in opened:
                opened[scope] = [(run.span.start, self._open(run.span, found, []))]
            choices = opened[scope]
            place = bisect_right(choices, run.span.start, key=lambda choice: choice[0])
            choices[max(place - 1, 0)][1].ran_unproposed(run)

    def _thread_of(self, turn: Turn, trace: Trace) -> Thread:
        first, told, session = _opening(turn)
        for message in turn.given:
            for key in _linking(message):
                places: list[Hashable] = [(trace.id, first, key), (trace.id, turn.scope, "any", key)]
                if session or key[0] == "id":
                    places.insert(1, (session, first, key))
                for place in places:
                    if place in self._index:
                        return self._index[place]
        place = (trace.id, turn.scope, "opening", first, told) if first else (trace.id, turn.scope, "last")
        return self._index.get(place) or self._open(turn.span, trace, turn.given)

    def _remember(self, thread: Thread, turn: Turn, trace: Trace) -> None:
        first, told, session = _opening(turn)
        self._index[trace.id, turn.scope, "opening", first, told] = thread
        self._index[trace.id, turn.scope, "last"] = thread
        # What only stands in inputs may be an example that many conversations are given.
        for message in turn.answered or turn.given:
            for key in _linking(message):
                self._index[trace.id, first, key] = thread
                self._index[trace.id, turn.scope, "any", key] = thread
                if session or key[0] == "id":
                    self._index[session, first, key] = thread

    def _open(self, span: Span, trace: Trace, given: Iterable[Message]) -> Thread:
        metadata = {
            "trace_id": trace.id,
            "model": short(span, *_MODELS),
            "agent": trace.agents[span.id],
            "service": span.service,
            "session_id": short(span, *_SESSIONS),
        }
        thread = Thread(trace.id, span.id, {key: value for key, value in metadata.items() if value})
        task = trace.tasks[span.id]
        if task and not any(message["role"] == "user" for message in given):
            thread.add({"role": "user", "content": task}, span.start, span.start)
        self.all.append(thread)
        return thread


def _overlap(one: Run, other: Run) -> bool:
    return one.span.start <= other.span.end and other.span.start <= one.span.end


def _opening(turn: Turn) -> tuple[str, str, str]:
    """First words of the user, the system's with the user's last, and the session: what tells conversations apart."""
    asked = [text for message in turn.given if message["role"] == "user" and (text := _text(message))]
    told = [_text(message) for message in turn.given if message["role"] == "system"]
    return asked[0] if asked else "", "\n".join([*told, *asked[-1:]]), short(turn.span, *_SESSIONS)


def _linking(message: Message) -> list[tuple[str, ...]]:
    """What tells that an input goes on with a conversation: words and calls of the assistant."""
    if message["role"] != "assistant":
        return []
    keys: list[tuple[str, ...]] = [
        ("id", given, key) if given else ("call", key) for given, _, key in calls_of(message)
    ]
    return [*keys, ("said", _text(message))] if _text(message) else keys


# A run may be that of a call of the same id, of the same tool and arguments, or of the same tool; own agent's first.
_LEVELS = ("id", "key in scope", "key", "tool in scope", "tool")


def _match(runs: Iterable[Run], calls: Iterable[Call], scopes: Mapping[str, str]) -> list[Run]:
    """Gives each call its run; the runs that none proposed."""
    waiting: dict[Hashable, deque[Call]] = {}
    for call in calls:
        waiting.setdefault(("id", call.id), deque()).append(call)
        # A run with an id may still be that of a call without one.
        for side in ("",) if call.id else ("", "idless"):
            for level in _LEVELS[1:]:
                waiting.setdefault(_place(level, side, call.scope, call.tool, call.key), deque()).append(call)
    left = list(runs)
    for level in _LEVELS:
        still: list[Run] = []
        for run in left:
            place: Hashable = ("id", run.id or None)
            if level != "id":
                # An id that a call has names that call and no other.
                named = bool(run.id) and ("id", run.id) in waiting
                side = "idless" if run.id else ""
                place = None if named else _place(level, side, scopes[run.span.id], run.tool, run.key)
            queue = waiting.get(place, deque())
            while queue and queue[0].run is not None:
                queue.popleft()
            # The clocks of two services may differ; an id does not.
            if queue and (level == "id" or queue[0].since <= run.span.end):
                call = queue.popleft()
                call.run = run
                if level.startswith("tool") and run.arguments is not None:
                    call.thread.note("runs_with_other_arguments")
            else:
                still.append(run)
        left = still
    return left


def _place(level: str, side: str, scope: str, tool: str, key: str) -> Hashable:
    return (level, side, key if level.startswith("key") else tool, scope if level.endswith("scope") else "")
