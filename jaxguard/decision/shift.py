"""Does a stream of trajectories still look like the calibration set?

A threshold's false-alert level holds for trajectories exchangeable with those it was set on. A conformal test
martingale watches that (Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", ch. 8): each new score
gets a p-value among the calibration scores and the earlier ones of the stream, which are independent and uniform as
long as all of them are exchangeable, and a gambler bets against their uniformity. Starting from 1, the capital
exceeds 1/delta with probability at most delta, however long the stream (Ville); a large one is evidence of a shift.
An attack wave is a shift too: the calibration set is safe.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxguard.types import JaxguardError

# Bets on high p-values, none, and low ones; a share JUMP of the capital changes sides at every step.
_BETS = np.array([-1.0, 0.0, 1.0])
_JUMP = 0.01

BLOCK = 10_000
"""Scores that one detector of a :class:`ShiftWatch` sees."""


class ShiftError(JaxguardError):
    """No calibration score to compare with, or a level that is none."""


class ShiftDetector:
    """Watches trajectory maxima of a risk, one after the other.

    Args:
        calibration: Maxima of the safe calibration trajectories, e.g. ``Calibration.hold_maxima``.
        delta: Probability of ever raising an alarm where nothing shifted, in (0, 1).
        seed: Of the numbers that break ties.

    Raises:
        ShiftError: ``calibration`` is empty or ``delta`` is not in (0, 1).
    """

    def __init__(self, calibration: Iterable[float], delta: float = 0.01, seed: int = 0):
        self._scores = sorted(float(score) for score in calibration)
        if not self._scores:
            raise ShiftError("calibration: got no score, expected at least one")
        if not 0 < delta < 1:
            raise ShiftError(f"delta: got {delta!r}, expected a level strictly between 0 and 1")
        self._alarm = -math.log10(delta)
        self._rng = np.random.default_rng(seed)
        self._shares = np.full(3, 1 / 3)
        self._log_capital = 0.0
        self.seen = 0
        self.alarm_at: int | None = None
        """Position in the stream at which the capital first exceeded 1/delta."""

    @property
    def evidence(self) -> float:
        """log10 of the gambler's capital now: 0 at the start, 2 is a hundredfold."""
        return self._log_capital

    def update(self, score: float) -> float:
        """Takes the next maximum (a NaN counts as larger than all); returns :attr:`evidence`."""
        value = math.inf if math.isnan(score) else float(score)
        above = len(self._scores) - bisect.bisect_right(self._scores, value)
        equal = len(self._scores) - bisect.bisect_left(self._scores, value) - above + 1
        p = (above + self._rng.random() * equal) / (len(self._scores) + 1)
        bisect.insort(self._scores, value)
        moved = (1 - _JUMP) * self._shares + _JUMP * self._shares.sum() / 3
        won = moved * (1 + _BETS * (p - 0.5))
        total = float(won.sum())
        self._shares = won / total
        self._log_capital += math.log10(total)
        if self.alarm_at is None and self._log_capital > self._alarm:
            self.alarm_at = self.seen
        self.seen += 1
        return self._log_capital


class ShiftWatch:
    """A :class:`ShiftDetector` for each :data:`BLOCK` trajectories of a long stream: what one keeps grows with it."""

    def __init__(self, maxima: Sequence[float]):
        self._maxima, self._blocks = maxima, 0
        self._detector = ShiftDetector(maxima)
        self.evidence = 0.0
        """The largest log10 of the capital at the end of any update."""
        self.alarm_at: int | None = None
        """Position in the stream of the first alarm."""

    def __call__(self, score: float) -> None:
        """Takes the next maximum."""
        if self._detector.seen == BLOCK:
            self._blocks += 1
            self._detector = ShiftDetector(self._maxima, seed=self._blocks)
        self.evidence = max(self.evidence, self._detector.update(score))
        if self.alarm_at is None and self._detector.alarm_at is not None:
            self.alarm_at = self._blocks * BLOCK + self._detector.alarm_at
