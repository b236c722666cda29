"""Packing trajectories of all lengths into lanes.

Archives hold trajectories of all lengths. Instead of padding them into batches, L *lanes* run side by side, K steps
per call; a lane takes up the next trajectory where the previous one ends (``is_first`` resets its state), so that
nearly every step computed is a step wanted, a trajectory may be longer than any buffer, and there is one compiled
shape whatever the archive holds.
"""

from __future__ import annotations

import itertools
from collections import abc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxguard.types import JaxguardError

LANES = 128
CHUNK = 16
LOOKED_UP = 32
"""Trajectories whose texts are looked up in one call."""


@dataclass(frozen=True)
class Sequence:
    """One trajectory to score, as row ids of a vector table: ``[T]``, ``[T]`` and one.

    An action that has two vectors is given by both rows in one number (:func:`beside`).
    """

    obs: np.ndarray
    act: np.ndarray
    ins: int


class Texts(NamedTuple):
    """Texts of T steps: observations, actions, what was said of each action (or nothing), and the instruction."""

    obs: abc.Sequence[str]
    act: abc.Sequence[str]
    said: abc.Sequence[str]
    ins: str

    def every(self) -> list[str]:
        """All of them, in the order in which :meth:`sequence` takes their rows."""
        return [*self.obs, *self.act, *self.said, self.ins]

    def sequence(self, rows: np.ndarray) -> Sequence:
        """The trajectory by the rows ``[N]`` of :meth:`every`."""
        ends = np.cumsum([len(self.obs), len(self.act), len(self.said)])
        obs, act, said, ins = np.split(rows, ends)
        return Sequence(obs, beside(act, said) if len(said) else act, int(ins[0]))


def beside(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two row ids ``[...]`` in one int64."""
    return first.astype(np.int64) << 32 | second.astype(np.int64)


def gather_pairs(gather: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """The function of pairs from :func:`beside` that gives the vectors ``[..., 2E]`` of both rows."""

    def both(pairs: np.ndarray) -> np.ndarray:
        return np.concatenate([gather(pairs >> 32), gather(pairs & 0xFFFF_FFFF)], axis=-1)

    return both


def sequences(texts: Iterable[Texts], rows: Callable[[list[str]], np.ndarray]) -> Iterator[Sequence]:
    """Trajectories given by their texts as sequences of row ids.

    Args:
        texts: Of each trajectory; read lazily, a few at once.
        rows: Row ids ``[N]`` of N texts, e.g. ``FeatureStore.rows``.
    """
    stream = iter(texts)
    # Looking up the texts of one trajectory costs as much for the call as for the texts.
    while group := list(itertools.islice(stream, LOOKED_UP)):
        every = [own.every() for own in group]
        ids = rows([text for own in every for text in own])
        at = 0
        for own, known in zip(group, every, strict=True):
            yield own.sequence(ids[at : at + len(known)])
            at += len(known)


@dataclass
class Running:
    """A trajectory in a lane: how far it was packed and collected."""

    position: int
    sequence: Sequence
    packed: int
    collected: int
    risks: np.ndarray


class Piece(NamedTuple):
    """Steps ``start .. start + size`` of a block's lane belong to ``run``."""

    run: Running
    lane: int
    start: int
    size: int


class Block(NamedTuple):
    obs: np.ndarray  # [CHUNK, lanes] row ids
    act: np.ndarray  # [CHUNK, lanes]
    ins: np.ndarray  # [CHUNK, lanes]
    is_first: np.ndarray  # [CHUNK, lanes] bool
    pieces: list[Piece]


class Packer:
    """Fills lanes from a stream of sequences, block after block."""

    def __init__(self, sequences: Iterable[Sequence], lanes: int):
        self._stream = enumerate(sequences)
        self._lanes: list[Running | None] = [None] * lanes
        self.empty: list[tuple[int, np.ndarray]] = []  # trajectories without steps

    def _take(self) -> Running | None:
        for position, sequence in self._stream:
            if len(sequence.obs) != len(sequence.act):
                raise JaxguardError(
                    f"trajectory {position}: got {len(sequence.obs)} observations and {len(sequence.act)} actions, "
                    "expected one of each for every step"
                )
            if len(sequence.act):
                return Running(position, sequence, 0, 0, np.empty((len(sequence.act), 2), np.float32))
            self.empty.append((position, np.empty((0, 2), np.float32)))
        return None

    def next_block(self) -> Block | None:
        """The next steps of all lanes; None when nothing is left."""
        shape = (CHUNK, len(self._lanes))
        obs, act, ins = (np.zeros(shape, np.int64) for _ in range(3))
        is_first = np.zeros(shape, bool)
        pieces: list[Piece] = []
        for lane in range(len(self._lanes)):
            at = 0
            while at < CHUNK:
                run = self._lanes[lane] or self._take()
                if run is None:
                    break
                size = min(CHUNK - at, len(run.sequence.act) - run.packed)
                part = slice(run.packed, run.packed + size)
                obs[at : at + size, lane] = run.sequence.obs[part]
                act[at : at + size, lane] = run.sequence.act[part]
                ins[at : at + size, lane] = run.sequence.ins
                is_first[at, lane] = run.packed == 0
                pieces.append(Piece(run, lane, at, size))
                run.packed += size
                at += size
                self._lanes[lane] = run if run.packed < len(run.sequence.act) else None
        return Block(obs, act, ins, is_first, pieces) if pieces else None

    def collect(self, pieces: list[Piece], risks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Stores a block's risks ``[CHUNK, lanes, 2]`` and yields the trajectories it completed."""
        for run, lane, start, size in pieces:
            run.risks[run.collected : run.collected + size] = risks[start : start + size, lane]
            run.collected += size
            if run.collected == len(run.risks):
                yield run.position, run.risks
        yield from self.empty
        self.empty = []
