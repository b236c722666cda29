"""Split-conformal thresholds on trajectory maxima, and what they are worth at a finite sample size.

Let M_(1) <= ... <= M_(n) be the sorted maxima over steps of n safe calibration trajectories. With
k = ceil((n + 1)(1 - alpha)) and an alert iff a new maximum is *strictly greater* than M_(k), an
exchangeable safe trajectory alerts with probability at most alpha (appendix A.3 of the DreamGuard
paper, whose own rule clips k to n and alerts on >=, which voids that for n < 1/alpha - 1 and on ties).

That probability is an average over calibration sets. Given one calibration set with continuous scores,
the false-alert rate is itself random: Beta(n + 1 - k, k).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.types import JaxguardError


class ConformalError(JaxguardError):
    """A level, a sample size or a score from which no threshold can be had."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """A score above which (or, under the paper's rule, from which on) a trajectory alerts.

    Attributes:
        value: M_(k), finite, or a larger score that it was raised to.
        alpha: Nominal false-alert level, in (0, 1).
        n: Safe calibration trajectories behind it.
        k: Rank of the chosen order statistic, 1..n.
        strict: True: alert iff score > value. False (the paper's rule): iff score >= value.
        raised_from: M_(k) where ``value`` is larger (:mod:`jaxguard.decision.margin`), else None.
    """

    value: float
    alpha: float
    n: int
    k: int
    strict: bool = True
    raised_from: float | None = None

    def __post_init__(self) -> None:
        exact_level(self.alpha)
        if not math.isfinite(self.value):
            raise ConformalError(f"threshold: got {self.value!r}, expected a finite score")
        if not 1 <= self.k <= self.n:
            raise ConformalError(f"threshold: got rank k = {self.k} of n = {self.n}, expected 1 <= k <= n")
        expected = rank(self.n, self.alpha) if self.strict else min(rank(self.n, self.alpha), self.n)
        if self.k != expected:
            raise ConformalError(
                f"threshold: got rank k = {self.k} of n = {self.n}, expected {expected} for alpha = {self.alpha:g}"
            )
        if self.raised_from is not None and not self.raised_from < self.value:
            raise ConformalError(f"threshold: got {self.value!r}, expected more than {self.raised_from!r}")

    @property
    def conformal(self) -> Threshold:
        """This threshold before it was raised."""
        return self if self.raised_from is None else replace(self, value=self.raised_from, raised_from=None)

    def at_least(self, floor: float) -> Threshold:
        """This threshold, or the same raised to ``floor``; a higher threshold keeps the false-alert level."""
        return replace(self, value=floor, raised_from=self.value) if floor > self.value else self

    def crossed(self, scores: ArrayLike) -> NDArray[np.bool_]:
        """Which of the scores (any shape) alert; a NaN always does."""
        values = np.asarray(scores, dtype=np.float64)
        above = values > self.value if self.strict else values >= self.value
        return above | np.isnan(values)


@dataclass(frozen=True, slots=True)
class Band:
    """Distribution of the false-alert rate that a threshold achieves: its mean and a central interval."""

    mean: float
    low: float
    high: float
    level: float


def exact_level(alpha: float) -> Fraction:
    """``alpha`` as the fraction that was meant (0.1 is 1/10), so that ranks come out exactly.

    Raises:
        ConformalError: alpha is not from 1e-9 to 1 - 1e-9.
    """
    number = float(alpha)
    level = Fraction(number).limit_denominator(10**9) if math.isfinite(number) else Fraction(0)
    if not 0 < level < 1:
        raise ConformalError(f"alpha: got {alpha!r}, expected a level strictly between 0 and 1, by 1e-9 at least")
    return level


def rank(n: int, alpha: float) -> int:
    """k = ceil((n + 1)(1 - alpha)) in exact arithmetic; may exceed n."""
    return math.ceil((n + 1) * (1 - exact_level(alpha)))


def needed(alpha: float) -> int:
    """The smallest n whose rank exists: ceil(1 / alpha) - 1."""
    return math.ceil(1 / exact_level(alpha)) - 1


def conformal_threshold(maxima: ArrayLike, alpha: float, *, paper_rule: bool = False) -> Threshold:
    """Threshold from the maxima ``[n]`` of safe calibration trajectories.

    A maximum that is not finite counts as larger than every score: such a trajectory is held whatever
    the threshold, and must use up its share of the budget.

    Raises:
        ConformalError: alpha is not in (0, 1); n is too small for it (without ``paper_rule``); or so many
            maxima are not finite that the threshold would not be.
    """
    scores = np.asarray(maxima, dtype=np.float64)
    if scores.ndim != 1:
        raise ConformalError(f"maxima: got shape {scores.shape}, expected [n]")
    n = len(scores)
    k = rank(n, alpha)
    if paper_rule:
        k = min(k, n)
    if k > n or n == 0:
        raise ConformalError(
            f"calibration: got {n} safe trajectories, expected at least {needed(alpha)} for "
            f"alpha = {alpha:g}; add safe trajectories or raise alpha"
        )
    ranked = np.sort(np.where(np.isfinite(scores), scores, np.inf))
    value = float(ranked[k - 1])
    if not math.isfinite(value):
        raise ConformalError(
            f"calibration: {int(np.isinf(ranked).sum())} of {n} safe trajectories have a score that is not "
            f"finite, expected at most {n - k} for alpha = {alpha:g}"
        )
    return Threshold(value, float(alpha), n, k, strict=not paper_rule)


def false_alert_band(n: int, k: int, level: float = 0.95) -> Band:
    """Exact law of the false-alert rate given the calibration set: Beta(n + 1 - k, k).

    Holds for continuous scores; ties make a strict rule more conservative. ``level`` is the probability of
    the central interval.
    """
    from scipy import stats  # takes longer to import than all that a live guard needs

    law = stats.beta(n + 1 - k, k)
    tail = (1.0 - level) / 2.0
    return Band(float(law.mean()), float(law.ppf(tail)), float(law.ppf(1.0 - tail)), level)


def observed_rate_band(n: int, k: int, tested: int, level: float = 0.95) -> Band:
    """As :func:`false_alert_band`, for the rate *observed* on ``tested`` fresh safe trajectories.

    The number of alerts is beta-binomial, so the band is wider than that of the true rate.
    """
    if tested < 1:
        raise ConformalError(f"tested: got {tested}, expected at least one safe trajectory")
    from scipy import stats

    law = stats.betabinom(tested, n + 1 - k, k)
    tail = (1.0 - level) / 2.0
    low, high = float(law.ppf(tail)) / tested, float(law.ppf(1.0 - tail)) / tested
    return Band(float(law.mean()) / tested, low, high, level)


def group_thresholds(
    maxima: ArrayLike,
    groups: Sequence[Hashable],
    alpha: float,
    *,
    min_size: int = 1,
    paper_rule: bool = False,
) -> tuple[dict[str, Threshold], dict[str, int]]:
    """Mondrian thresholds: one per group that is large enough, so that the level holds within the group.

    Args:
        maxima: ``[n]`` maxima of safe calibration trajectories.
        groups: ``[n]`` group key of each; compared as text.
        alpha: Level within each group.
        min_size: Groups smaller than this fall back too, even where a rank exists.
        paper_rule: See :func:`conformal_threshold`; a group must still be large enough for a rank.

    Returns:
        The thresholds by group, and the sizes of the groups that are too small and must use the pooled one.
    """
    scores = np.asarray(maxima, dtype=np.float64)
    keys = np.asarray([str(key) for key in groups], dtype=object)
    if keys.shape != scores.shape:
        raise ConformalError(f"groups: got {len(keys)} keys, expected one for each of {len(scores)} maxima")
    smallest = max(needed(alpha), min_size)
    table: dict[str, Threshold] = {}
    too_small: dict[str, int] = {}
    for key in sorted(set(keys)):
        members = scores[keys == key]
        usable = int(np.isfinite(members).sum())
        if len(members) < smallest or usable < rank(len(members), alpha):
            too_small[key] = len(members)
        else:
            table[key] = conformal_threshold(members, alpha, paper_rule=paper_rule)
    return table, too_small


def threshold_for(group: str | None, table: Mapping[str, Threshold], pooled: Threshold) -> Threshold:
    """The threshold of a group, or the pooled one where the group has none."""
    return pooled if group is None else table.get(group, pooled)
