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

Texts = tuple[abc.Sequence[str], abc.Sequence[str], str]
"""Observations, actions and instruction of a trajectory."""


@dataclass(frozen=True)
class Sequence:
    """One trajectory to score, as row ids of a vector table: ``[T]``, ``[T]`` and one."""

    obs: np.ndarray
    act: np.ndarray
    ins: int


def sequences(texts: Iterable[Texts], rows: Callable[[list[str]], np.ndarray]) -> Iterator[Sequence]:
    """Trajectories given by their texts as sequences of row ids.

    Args:
        texts: Observations, actions and instruction of each; read lazily, a few at once.
        rows: Row ids ``[N]`` of N texts, e.g. ``FeatureStore.rows``.
    """
    stream = iter(texts)
    # Looking up the texts of one trajectory costs as much for the call as for the texts.
    while group := list(itertools.islice(stream, LOOKED_UP)):
        ids = rows([text for obs, act, ins in group for text in (*obs, *act, ins)])
        at = 0
        for obs, act, _ in group:
            middle, end = at + len(obs), at + len(obs) + len(act)
            yield Sequence(ids[at:middle], ids[middle:end], int(ids[end]))
            at = end + 1


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
