"""Cluster-bootstrap intervals: whole groups are resampled, because members of a group are not independent.

Resampling G groups with replacement gives each group a multiplicity, and each trajectory that of its
group. A resample is a row of weights, so that a thousand resamples are a few array operations.

A resample in which a metric is undefined (no unsafe trajectory was drawn, nothing alerted) is left out
of that metric's interval; ``defined`` says how many were kept. Where fewer than half are, or where there
is a single group, there is no interval (NaN ends).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxguard.evaluation.metrics import EvaluationError, Floats

Statistic = Callable[[Floats], dict[str, Floats]]

_CHUNK = 2_000_000  # weights held at once: 16 MB


@dataclass(frozen=True, slots=True)
class Interval:
    """A metric with its percentile interval; NaN where undefined.

    Attributes:
        value: On the sample itself.
        low: Lower end.
        high: Upper end.
        defined: Resamples in which the metric was defined.
    """

    value: float
    low: float
    high: float
    defined: int


def bootstrap(
    statistic: Statistic,
    clusters: Sequence[str],
    *,
    resamples: int = 1_000,
    seed: int = 20260701,
    level: float = 0.95,
    width: int = 0,
) -> dict[str, Interval]:
    """Values and intervals of every metric that ``statistic`` returns.

    Args:
        statistic: Maps weights ``[R, N]`` to metrics ``[R]`` by name.
        clusters: ``[N]`` cluster of each trajectory.
        resamples: How many; 0 gives values alone.
        seed: Of the resampling; the same seed gives the same intervals.
        level: Probability between the percentiles.
        width: Largest number of columns that ``statistic`` expands a row of weights to (its steps, say);
            bounds memory.
    """
    if not 0.0 < level < 1.0:
        raise EvaluationError(f"level: got {level!r}, expected a probability strictly between 0 and 1")
    n = len(clusters)
    values = statistic(np.ones((1, n)))
    names, member = np.unique(np.asarray(clusters, dtype=object), return_inverse=True)
    groups = len(names)
    draws: dict[str, list[Floats]] = {name: [] for name in values}
    if groups > 1:
        rng = np.random.default_rng(seed)
        rows = max(1, _CHUNK // max(n, width, 1))
        for start in range(0, resamples, rows):
            count = min(rows, resamples - start)
            picked = rng.integers(0, groups, size=(count, groups))
            picked += np.arange(count)[:, None] * groups
            multiplicity = np.bincount(picked.ravel(), minlength=count * groups).reshape(count, groups)
            for name, drawn in statistic(multiplicity[:, member].astype(np.float64)).items():
                draws[name].append(drawn)
    return {
        name: _interval(float(value[0]), np.concatenate([np.empty(0), *draws[name]]), level)
        for name, value in values.items()
    }


def _interval(value: float, draws: Floats, level: float) -> Interval:
    defined = draws[np.isfinite(draws)]
    if not len(defined) or 2 * len(defined) < len(draws) or not np.isfinite(value):
        return Interval(value, float("nan"), float("nan"), len(defined))
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(defined, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high), len(defined))
