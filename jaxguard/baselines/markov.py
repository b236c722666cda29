"""A discrete-time Markov chain over abstract states of runs, with two absorbing ones: violated, and ended.

A state is given as *keys* from the most specific to the most general one, e.g. ``(tool, flags)`` and ``(kind, flags)``.
The successors of a key are estimated from its counts, shrunk toward those of the next key, and at last toward the
uniform distribution (additive smoothing): a state that training did not show has a defined row, that of the first of
its keys which training did show.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
from scipy.sparse import csr_array

Keys = tuple[Hashable, ...]


class MarkovChain:
    """Estimated transitions, and the probability of reaching the violation within some steps.

    Args:
        runs: For each run the keys of its states in order, and whether the last of them led to the violation.
        horizon: Transitions within which the violation counts; 1 or more.
        smoothing: Weight of the more general key, in observed transitions.

    Attributes:
        states: The most specific keys, in the order of the transition matrix.
    """

    def __init__(self, runs: Iterable[tuple[Sequence[Keys], bool]], horizon: int, smoothing: float = 1.0):
        self.smoothing = smoothing
        index: dict[Hashable, int] = {}
        moves: list[tuple[Keys, Hashable | None, bool]] = []
        for keys, violated in runs:
            for at, own in enumerate(keys):
                index.setdefault(own[0], len(index))
                following = keys[at + 1][0] if at + 1 < len(keys) else None
                moves.append((own, following, violated and following is None))
        self.states = tuple(index)
        size = len(self.states)
        targets = [size + (not bad) if to is None else index[to] for _, to, bad in moves]
        depth = len(moves[0][0]) if moves else 0
        self._levels: list[dict[Hashable, int]] = []
        self._counts: list[csr_array] = []
        for level in range(depth):
            # The first level keeps the order of the states, which is that of first appearance, too.
            rows: dict[Hashable, int] = {}
            at_row = [rows.setdefault(keys[level], len(rows)) for keys, _, _ in moves]
            shape = (len(rows), size + 2)
            self._counts.append(csr_array((np.ones(len(moves)), (at_row, targets)), shape=shape))
            self._levels.append(rows)
        parents = [{keys[level]: keys[level + 1] for keys, _, _ in moves} for level in range(depth - 1)]
        self._parents = [
            np.array([self._levels[level + 1][found[key]] for key in self._levels[level]], np.int64)
            for level, found in enumerate(parents)
        ]
        self.values = self.reach(horizon)

    def expected(self, x: np.ndarray) -> list[np.ndarray]:
        """The mean of ``x`` over the successor, for the keys of each level, and of a state without any known key.

        Args:
            x: ``[S + 2]`` values of the states, of the violation and of the end.
        """
        means = [np.array([x.mean()])]
        for level in reversed(range(len(self._levels))):
            counts = self._counts[level]
            general = means[-1][self._parents[level]] if level < len(self._parents) else means[-1][0]
            total = np.asarray(counts.sum(axis=1)).ravel()
            means.append((counts @ x + self.smoothing * general) / (total + self.smoothing))
        return means[::-1]

    def matrix(self) -> np.ndarray:
        """``[S, S + 2]`` transition probabilities of the states."""
        return np.stack([self.expected(unit)[0] for unit in np.eye(len(self.states) + 2)], axis=1)

    def reach(self, horizon: int) -> list[np.ndarray]:
        """Probabilities of the violation within ``horizon`` transitions, in the order of :meth:`expected`.

        The bounded reachability of probabilistic temporal logic: r_0 = 0 for every state and 1 for the violation,
        r_k = the expected r_{k-1} of the successor. For a growing horizon it becomes the probability of absorption.
        """
        x = np.zeros(len(self.states) + 2)
        x[-2] = 1.0
        means = self.expected(x)
        for _ in range(horizon - 1):
            x[:-2] = means[0]
            means = self.expected(x)
        return means

    def risk(self, keys: Keys) -> float:
        """The probability of the violation within the horizon from a state, by the most specific key that is known."""
        for level, key in enumerate(keys):
            at = self._levels[level].get(key)
            if at is not None:
                return float(np.clip(self.values[level][at], 0.0, 1.0))
        return float(self.values[-1][0])
