"""Objects of OpenAI's Responses API: responses, stored requests with their responses, and lists of items.

A record is a response (``object`` is ``"response"``), an object that holds one under ``response`` with its request
beside it or under ``request``, an object with items under ``input`` and ``output``, or a list of items. The responses
of one conversation are one trajectory: ``previous_response_id`` and ``conversation`` say so, or an input that repeats
all that was said before. One that goes back to an earlier point of a conversation is a trajectory of its own, which
shows the words said so far and holds none of the calls that another one has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces.readers.calls import read_conversation, visible_text
from jaxguard.traces.readers.response_items import BOUNDARY, call_of, calls_in, is_item, item_messages, output_of
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_LISTS = ("messages", "items", "array", "data")


def _response_of(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for held in (record, record.get("response"), record.get("body")):
        if isinstance(held, dict) and held.get("object") == "response":
            return held
        if isinstance(held, dict) and held is not record and isinstance(held.get("body"), dict):
            inner: Mapping[str, Any] = held["body"]  # results of a batch
            if inner.get("object") == "response":
                return inner
    return None


def _list_of(record: Mapping[str, Any]) -> list[Any] | None:
    for name in _LISTS:
        held = record.get(name)
        if isinstance(held, list) and any(is_item(item) for item in held):
            return held
    return None


def _matches(record: Record) -> bool:
    if "session" in record and "items" in record:
        return False
    if _response_of(record) is not None or _list_of(record) is not None:
        return True
    output = record.get("output")
    return isinstance(output, list) and any(is_item(item) for item in output)


@dataclass
class _Thread:
    """One conversation: its items so far, and by what its next response is known."""

    name: str
    meta: dict[str, Any]
    items: list[Any] = field(default_factory=list)
    known: set[object] = field(default_factory=set)
    newest: set[str] = field(default_factory=set)  # calls of the latest response
    end: int = 0  # hash of the keys of all items
    last: str = ""  # id of the latest response
    marks: dict[str, int] = field(default_factory=dict)  # number of items at the end of each response


def _split(records: Sequence[Record]) -> Iterable[Record]:
    threads = _Threads()
    unread: list[Record] = []
    parts: list[Record] = []
    for record in records:
        if not _matches(record):
            unread.append(record)
            continue
        try:
            threads.add(record)
        except RecordError as error:
            parts.append({"error": str(error)})
    for record in unread:
        for kind, own in calls_in(record):
            if (kind, own) not in threads.called:
                parts.append({"error": f"a {kind} of the id {own!r} stands in a record that is no response"})
    return [*({"id": t.name, "meta": t.meta, "items": t.items} for t in threads.all), *parts]


class _Threads:
    """The conversations of a file."""

    def __init__(self) -> None:
        self.all: list[_Thread] = []
        self.called: set[tuple[str, str]] = set()
        self._holding: dict[str, _Thread] = {}  # by call
        self._of: dict[tuple[str, str], _Thread] = {}  # by response and by conversation
        self._ends: dict[int, _Thread] = {}

    def add(self, record: Record) -> None:
        response = _response_of(record) or {}
        request = record.get("request")
        body = request.get("body") if isinstance(request, dict) else None
        places = [place for place in (response, request, body, record) if isinstance(place, dict)]
        own, before = _name(response.get("id")), _name(_first(places, "previous_response_id"))
        talk = _first(places, "conversation")
        talk = _name(talk.get("id") if isinstance(talk, dict) else talk)
        listed = None if response else _list_of(record)
        given = _as_items(_first(places, "input") if listed is None else listed, "input")
        output = _as_items(_first(places, "output"), "output")
        thread = self._of.get(("response", own)) if own else None
        again = thread is not None
        if thread is None:
            thread, given = self._continued(before, talk, given)
        if thread is None:
            words = _as_items(_first(places, "instructions"), "instructions", "system")
            earlier = self._of.get(("response", before))
            so_far = earlier.items[: earlier.marks[before]] if earlier else []
            given = [*words, *(item for item in so_far if _key(item, "message")), *given]
            thread = _Thread(own or _name(record.get("id")), _meta(places, talk))
            self.all.append(thread)
        thread.newest = set()
        for items in (given, output):
            self._extend(thread, items, again)
            thread.items.append(BOUNDARY)
        thread.last = own
        thread.marks[own] = len(thread.items)
        self._ends[thread.end] = thread
        self._of |= {key: thread for key in (("response", own), ("conversation", talk)) if key[1]}
        for kind, call in calls_in(record):
            if call and (kind, call) not in self.called:
                raise RecordError(f"a {kind} of the id {call!r} stands beside the items of input and output")

    def _continued(self, before: str, talk: str, given: list[Any]) -> tuple[_Thread | None, list[Any]]:
        """The conversation that goes on, and what the input adds to it."""
        if before:
            thread = self._of.get(("response", before))
            return (thread, given) if thread is not None and thread.last == before else (None, given)
        if ("conversation", talk) in self._of:
            return self._of["conversation", talk], given
        found: tuple[_Thread | None, list[Any]] = (None, given)
        end = 0
        for index, item in enumerate(given):
            key = _key(item)
            if key is not None:
                end = hash((end, key))
                if end in self._ends:
                    found = (self._ends[end], given[index + 1 :])
        if found[0] is not None:
            return found
        # A history that was shortened still shows the latest calls.
        for item in reversed(given):
            call = call_of(item) or output_of(item) if isinstance(item, dict) else None
            if call:
                thread = self._holding.get(call)
                if thread is not None and call in thread.newest:
                    return thread, [item for item in given if _key(item) not in thread.known]
                break
        return None, given

    def _extend(self, thread: _Thread, items: Sequence[Any], again: bool) -> None:
        for item in items:
            key = _key(item)
            call, answers = (call_of(item), output_of(item)) if isinstance(item, dict) else (None, None)
            if call and (item["type"], call) in self.called:
                continue
            if answers and (key in thread.known or self._holding.get(answers, thread) is not thread):
                continue  # a result that stands here already, or with its call in another conversation
            if again and key in thread.known:
                continue
            if call:
                self.called.add((item["type"], call))
                self._holding.setdefault(call, thread)
                thread.newest.add(call)
            thread.items.append(item)
            if key is not None:
                thread.known.add(key)
                thread.end = hash((thread.end, key))


def _key(item: object, only: str = "") -> tuple[str, str, str] | None:
    """What is the same of an item wherever it is repeated; ``None`` for reasoning, which histories leave out."""
    if not isinstance(item, dict):
        return None
    call, answers = call_of(item), output_of(item)
    found = None
    if call is not None:
        found = ("call", call, "" if call else json.dumps(item, sort_keys=True))
    elif answers is not None:
        found = ("output", answers, json.dumps(item.get("output"), sort_keys=True))
    elif item.get("type", "message") == "message":
        found = ("message", str(item.get("role")), visible_text(item.get("content")))
    return found if found is not None and only in ("", found[0]) else None


def _first(places: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((place[name] for place in places if place.get(name) not in (None, "", [])), None)


def _name(value: object) -> str:
    return value if isinstance(value, str) else ""


def _as_items(value: object, name: str, role: str = "user") -> list[Any]:
    if value is None:
        return []
    if isinstance(value, str):
        return [{"type": "message", "role": role, "content": value}]
    if not isinstance(value, list):
        raise RecordError(f"{name}: got {value!r:.60}, expected a text or a list of items")
    return value


def _meta(places: Sequence[Mapping[str, Any]], talk: str) -> dict[str, Any]:
    return {"model": _name(_first(places, "model")), "session_id": talk}


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    if "error" in record:
        raise RecordError(record["error"])
    conversation = read_conversation(item_messages(record["items"], "items"), "items")
    metadata = {key: value for key, value in record["meta"].items() if value}
    own = record["id"] or f"{context.stem}:{context.position}"
    yield conversation.trajectory(metadata, id=own, source=READER.name)


READER = Reader(
    name="openai_responses",
    description="OpenAI Responses: responses, requests with their responses, lists of items",
    matches=_matches,
    read=_read,
    split=_split,
)
