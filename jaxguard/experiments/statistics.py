"""Metrics of guards from their outcomes, with intervals, and paired differences between two of them.

Both sides of a difference saw the same trajectories: intervals resample groups of them (cluster bootstrap), and the
Wilcoxon signed-rank test is on trajectories, as in the paper's table 14: on whether each was judged rightly, and, for
timing, on whether each timed unsafe one was stopped before its hazard. The test takes trajectories as independent;
where groups are large, believe the interval.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.stats import wilcoxon

from jaxguard.evaluation.bootstrap import Interval, bootstrap
from jaxguard.evaluation.metrics import Bools, EvaluationError, Floats, detection, ranking, ratio
from jaxguard.evaluation.outcomes import Guarded, Outcomes

METRICS = {
    "f1": "F1",
    "auroc": "AUROC",
    "sr": "SR",
    "fpr": "FPR",
    "phir": "PHIR",
    "phir_minus_fpr": "PHIR−FPR",
    "mas": "MAS",
}
"""Metrics in the order of tables, with their headings."""
RESAMPLES = 1_000


@dataclass(frozen=True)
class Difference:
    """How much higher a metric is for one guard than for another.

    Attributes:
        interval: Of the difference.
        p: Of the two-sided Wilcoxon test on the paired outcomes behind the metric; NaN where it has none.
    """

    interval: Interval
    p: float


def values(weights: Floats, found: Outcomes, own: Guarded) -> dict[str, Floats]:
    """A guard's metrics ``[R]`` for multiplicities ``[R, N]``; NaN where the guard does not give what one needs."""
    out = detection(weights, found.unsafe, own.alert)
    del out["precision"]
    undefined = np.full(len(weights), np.nan)
    out["auroc"] = (
        undefined if own.score is None else ranking(weights, found.unsafe, own.score, auroc_only=True)["auroc"]
    )
    if own.first_alert is None:
        return out | dict.fromkeys(("phir", "phir_minus_fpr", "mas"), undefined)
    early = _early(found, own.first_alert)
    before = weights @ early
    out["phir"] = ratio(before, weights @ found.timed)
    out["phir_minus_fpr"] = out["phir"] - out["fpr"]
    out["mas"] = ratio(weights @ np.where(early, found.first_hazard - own.first_alert, 0), before)
    return out


def measured(found: Outcomes, guard: str, *, seed: int, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """All :data:`METRICS` of a guard."""
    own = found.guards[guard]
    return bootstrap(lambda w: values(w, found, own), found.clusters, resamples=resamples, seed=seed)


def differences(
    found: Outcomes, one: Guarded, other: Guarded, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Difference]:
    """``one`` minus ``other`` on the same trajectories."""

    def statistic(weights: Floats) -> dict[str, Floats]:
        a, b = values(weights, found, one), values(weights, found, other)
        return {name: a[name] - b[name] for name in METRICS}

    right = _p(one.alert == found.unsafe, other.alert == found.unsafe)
    tests = {"f1": right, "sr": _p(one.alert[found.unsafe], other.alert[found.unsafe])}
    tests["fpr"] = _p(one.alert[~found.unsafe], other.alert[~found.unsafe])
    if one.first_alert is not None and other.first_alert is not None:
        early = [_early(found, first)[found.timed] for first in (one.first_alert, other.first_alert)]
        tests["phir"] = _p(*early)
    intervals = bootstrap(statistic, found.clusters, resamples=resamples, seed=seed)
    return {name: Difference(own, tests.get(name, float("nan"))) for name, own in intervals.items()}


def require_same(one: Outcomes, other: Outcomes, names: str) -> None:
    """Refuses outcomes on other trajectories.

    Raises:
        EvaluationError: says which runs.
    """
    if one.ids != other.ids:
        raise EvaluationError(f"{names}: tested on other trajectories, expected the same split")


def _early(found: Outcomes, first_alert: np.ndarray) -> Bools:
    early: Bools = found.timed & (first_alert >= 0) & (first_alert < found.first_hazard)
    return early


def _p(one: Bools, other: Bools) -> float:
    """Two-sided Wilcoxon signed-rank test of paired 0/1 outcomes; 1 where no pair differs, NaN without pairs."""
    steps = one.astype(np.float64) - other.astype(np.float64)
    if not len(steps):
        return float("nan")
    if not steps.any():
        return 1.0
    with warnings.catch_warnings():  # ties are the rule here, and the normal approximation the intended one
        warnings.simplefilter("ignore", UserWarning)
        return float(wilcoxon(steps, zero_method="wilcox", method="approx").pvalue)
