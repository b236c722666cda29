"""What was said of the things that a call acts on: the texts that a router reads beside those of a guard.

A call names things by the values of its arguments (a file, a ticket, an address). The *evidence* of a step is, for
each such value, the sentences that mention it in the latest observation that does, in the order in which they were
seen; its *note* is the sentences of the user's memory that mention one. Case does not matter, and a value is mentioned
only where it stands as a whole: ``plan`` is not mentioned by ``plan.q1``, ``plan-b``, ``plan@hq`` or ``plan_b``, but by
``plan.`` and ``/plan/``.
A pooled vector of a whole observation or memory mixes what is said of several things; these do not.

A guard reads an *excerpt* instead: no more than a few lines, cut around the values, with the line breaks of JSON taken
for breaks. An instruction that came with a tool's result then stands beside the call that follows it.

None looks at anything after the step's proposal (pre-action rule). Any change of what is written here raises
:data:`GROUNDING_VERSION`, which routers carry, or :data:`EXCERPT_VERSION`, which guards do.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxguard.features.characters import well_formed
from jaxguard.traces.snapshots import memory_of
from jaxguard.types import Step, Trajectory

GROUNDING_VERSION = 3
EXCERPT_VERSION = 1

# Shorter values ("on", "7") are found everywhere, longer ones are contents rather than names.
SHORTEST, LONGEST = 3, 120
# Of an excerpt: characters in all, of a line left whole, of a cut one before and after the value; lines of a value.
EXCERPT, LINE, BEFORE, AFTER, LINES = 300, 300, 150, 100, 2

_SENTENCE = re.compile(r"\n+|(?<=[.!?])\s+")
_WORD = re.compile(r"\w+")
# What could not be parsed: a quote, or a word between marks; a quoted text, by its quote; what ends a key.
_PIECE, _KEY_ENDS = re.compile(r"""["']|[^\s"'{}\[\](),;=]+"""), re.compile(r"\s*[:=]")
_QUOTED = {quote: re.compile(rf"([^{quote}\\]*(?:\\.[^{quote}\\]*)*){quote}", re.DOTALL) for quote in "\"'"}
# A name goes on over these: "plan.q1" is not named by "plan", nor "web-api" by "api".
_GOES_ON, _GOES_ON_BEFORE = re.compile(r"[-.@]?\w"), re.compile(r"\w[-.@]?$")


@dataclass(frozen=True, slots=True)
class RouteTexts:
    """Texts of a trajectory of T steps that a router reads beside those of :mod:`jaxguard.features.texts`.

    Attributes:
        memory: The user's memory, ``""`` where there is none.
        evidence: T texts: what the trace last said of what the call acts on; ``""`` where it said nothing.
        notes: T texts: what the memory says of it.
    """

    memory: str
    evidence: tuple[str, ...]
    notes: tuple[str, ...]


def route_texts(trajectory: Trajectory) -> RouteTexts:
    """The texts of ``trajectory``; those of step t depend on memory and on o_0..o_t, a_t.

    Raises:
        SnapshotError: The memory is not a text.
    """
    grounding = Grounding(memory_of(trajectory))
    texts = []
    for step in trajectory.steps:
        texts.append(grounding.read(step))
        grounding.add(step.observation)
    return RouteTexts(grounding.memory, tuple(e for e, _ in texts), tuple(n for _, n in texts))


class Grounding:
    """What was seen so far, and what the user noted down, to be searched for what a call names.

    Args:
        memory: The user's memory.
        escaped: The two characters of a line break in JSON end a line as well.
    """

    def __init__(self, memory: str = "", *, escaped: bool = False) -> None:
        self._escaped = escaped
        self._memory = _Sentences(well_formed(memory))
        self._seen: list[_Sentences] = []
        self._latest = self._memory  # what was taken apart last: a step that runs was read before
        self._places: dict[str, list[int]] = {}  # observations by word, in order

    @property
    def memory(self) -> str:
        """The user's memory as a text that can be encoded."""
        return self._memory.text

    def read(self, step: Step) -> tuple[str, str]:
        """Evidence and note of a proposed step, whose observation is the latest; changes nothing."""
        values = named(step)
        now = self._apart(step.observation)
        found: dict[int, set[int]] = {}
        for value in values:
            place, lines = self._last(value, now)
            if lines:
                found.setdefault(place, set()).update(lines)
        places = [(self._seen[place] if place < len(self._seen) else now, found[place]) for place in sorted(found)]
        evidence = " ".join(seen.lines[i] for seen, own in places for i in sorted(own))
        noted = sorted({i for value in values for i in self._memory.mentioning(value)})
        return evidence, " ".join(self._memory.lines[i] for i in noted)

    def excerpt(self, step: Step) -> str:
        """What the trace last said of the things that a proposed step names, at most 300 characters.

        Of each value the first two lines of the latest observation that mentions it; changes nothing.
        """
        now = self._apart(step.observation)
        found: dict[str, None] = {}
        for value in named(step):
            place, lines = self._last(value, now)
            seen = self._seen[place] if place < len(self._seen) else now
            found.update(dict.fromkeys(_around(seen.lines[at], value) for at in lines[:LINES]))
        return " ".join(found)[:EXCERPT]

    def _last(self, value: str, now: _Sentences) -> tuple[int, list[int]]:
        """The number of the latest observation that mentions a value, and the lines that do; no lines if none does."""
        if lines := now.mentioning(value):
            return len(self._seen), lines
        for place in reversed(_rarest(self._places, value)):
            if lines := self._seen[place].mentioning(value):
                return place, lines
        return 0, []

    def add(self, observation: str) -> None:
        """Takes up what a step that ran had before it."""
        self._seen.append(self._apart(observation))
        for word in self._seen[-1].vocabulary:
            self._places.setdefault(word, []).append(len(self._seen) - 1)

    def _apart(self, observation: str) -> _Sentences:
        text = well_formed(observation)
        if self._escaped:
            text = text.replace("\\n", "\n")
        if text != self._latest.text:
            self._latest = _Sentences(text)
        return self._latest


def named(step: Step) -> tuple[str, ...]:
    """What a call names: the values in its arguments, lower-case, each once.

    Of arguments that could not be parsed, what stands in quotes and the other words, but for keys.
    """
    found: dict[str, None] = {}
    # Not by recursion: arguments may be nested deeper than Python's stack.
    left: list[Any] = [(step.arguments or {}) if step.raw_arguments is None else _unparsed(step.raw_arguments)]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            left += reversed(list(value.values()))
        elif isinstance(value, list | tuple):
            left += reversed(value)
        elif isinstance(value, str | int | float) and not isinstance(value, bool):
            text = well_formed(str(value)).strip().lower()
            if SHORTEST <= len(text) <= LONGEST and _WORD.search(text):
                found[text] = None
    return tuple(found)


def _unparsed(raw: str) -> list[str]:
    """Values in a text that should have been a JSON object, in time proportional to its length."""
    found: list[str] = []
    at, unended = 0, set()
    while match := _PIECE.search(raw, at):
        piece, at = match[0], match.end()
        if piece in _QUOTED:
            quoted = None if piece in unended else _QUOTED[piece].match(raw, at)
            if quoted is None:
                unended.add(piece)
                continue
            piece, at = _unescaped(quoted[1]), quoted.end()
        elif piece.endswith(":"):
            continue
        if not _KEY_ENDS.match(raw, at):
            found.append(piece)
            found += filter(None, [piece.partition(":")[2]])  # {file:plan}, or a clock or port, which is named as well
    return found


def _unescaped(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text


class _Sentences:
    """A text in sentences and lines, to be searched many times; taken apart when first something is found in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._whole = text.lower()

    @functools.cached_property
    def vocabulary(self) -> frozenset[str]:
        """Its words."""
        return frozenset(_WORD.findall(self._whole))

    @functools.cached_property
    def lines(self) -> list[str]:
        """As they stand."""
        return [line for line in _SENTENCE.split(self.text) if line.strip()]

    @functools.cached_property
    def _searched(self) -> tuple[list[str], str, list[int]]:
        """The lines in lower case, the same in one text, and where each begins there, and the end."""
        lower = [line.lower() for line in self.lines]
        return lower, "\n".join(lower), [0, *itertools.accumulate(len(line) + 1 for line in lower)]

    def mentioning(self, value: str) -> list[int]:
        """Lines in which a value stands as a whole, not as a part of a longer name."""
        if value not in self._whole:
            return []
        lower, joined, starts = self._searched
        found, at = [], joined.find(value)
        while at >= 0:
            line = bisect.bisect_right(starts, at) - 1
            if _mentions(lower[line], value):
                found.append(line)
            at = joined.find(value, starts[line + 1])
        return found


def _around(line: str, value: str) -> str:
    """The line, or where it is long the part around the value."""
    at = line.lower().find(value)
    return (line if len(line) <= LINE else line[max(0, at - BEFORE) : at + len(value) + AFTER]).strip()


def _rarest(places: Mapping[str, list[int]], value: str) -> list[int]:
    """Where that word of ``value`` stands which stands in the fewest places; the value cannot stand elsewhere."""
    return min((places.get(word, []) for word in _WORD.findall(value)), key=len, default=[])


def _mentions(line: str, value: str) -> bool:
    at = line.find(value)
    while at >= 0:
        if not _GOES_ON_BEFORE.search(line[max(at - 2, 0) : at]) and not _GOES_ON.match(line, at + len(value)):
            return True
        at = line.find(value, at + 1)
    return False
