"""Metrics of guards from their outcomes, with intervals, and paired differences between two of them.

Both sides of a difference saw the same trajectories: intervals resample groups of them (cluster bootstrap), and the
Wilcoxon signed-rank test is on trajectories, as in the paper's table 14: on whether each was judged rightly, and, for
timing, on whether each timed unsafe one was stopped before its hazard. On such 0/1 outcomes it is the sign test, of
which there is an exact form. It takes trajectories as independent; where groups are large, believe the interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import binomtest

from jaxguard.evaluation.bootstrap import Interval, bootstrap
from jaxguard.evaluation.metrics import Bools, EvaluationError, Floats, detection, ranking
from jaxguard.evaluation.outcomes import GuardOutcome, Outcomes
from jaxguard.evaluation.timing import warned, warnings_ahead

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


def values(weights: Floats, found: Outcomes, own: GuardOutcome) -> dict[str, Floats]:
    """A guard's metrics ``[R]`` for multiplicities ``[R, N]``; NaN where the guard does not give what one needs."""
    out = detection(weights, found.unsafe, own.alert)
    del out["precision"]
    undefined = np.full(len(weights), np.nan)
    out["auroc"] = (
        undefined if own.score is None else ranking(weights, found.unsafe, own.score, auroc_only=True)["auroc"]
    )
    if own.first_alert is None:
        return out | dict.fromkeys(("phir", "phir_minus_fpr", "mas"), undefined)
    return out | warnings_ahead(weights, found.timed, found.first_hazard, own.first_alert, out["fpr"])


def measured(found: Outcomes, guard: str, *, seed: int, resamples: int = RESAMPLES) -> dict[str, Interval]:
    """All :data:`METRICS` of a guard."""
    own = found.guards[guard]
    return bootstrap(lambda w: values(w, found, own), found.clusters, resamples=resamples, seed=seed)


def differences(
    found: Outcomes, one: GuardOutcome, other: GuardOutcome, *, seed: int, resamples: int = RESAMPLES
) -> dict[str, Difference]:
    """``one`` minus ``other`` on the same trajectories."""

    def statistic(weights: Floats) -> dict[str, Floats]:
        a, b = values(weights, found, one), values(weights, found, other)
        return {name: a[name] - b[name] for name in METRICS}

    right = _p(one.alert == found.unsafe, other.alert == found.unsafe)
    tests = {"f1": right, "sr": _p(one.alert[found.unsafe], other.alert[found.unsafe])}
    tests["fpr"] = _p(one.alert[~found.unsafe], other.alert[~found.unsafe])
    if one.first_alert is not None and other.first_alert is not None:
        firsts = (one.first_alert, other.first_alert)
        tests["phir"] = _p(*(warned(found.timed, found.first_hazard, first)[found.timed] for first in firsts))
    intervals = bootstrap(statistic, found.clusters, resamples=resamples, seed=seed)
    return {name: Difference(own, tests.get(name, float("nan"))) for name, own in intervals.items()}


def require_same(one: Outcomes, other: Outcomes, names: str) -> None:
    """Refuses outcomes on other trajectories.

    Raises:
        EvaluationError: says which runs.
    """
    if one.ids != other.ids:
        raise EvaluationError(f"{names}: tested on other trajectories, expected the same split")


def _p(one: Bools, other: Bools) -> float:
    """Exact two-sided signed-rank test of paired 0/1 outcomes; 1 where no pair differs, NaN without pairs."""
    steps = one.astype(np.float64) - other.astype(np.float64)
    if not len(steps):
        return float("nan")
    if not steps.any():
        return 1.0
    return float(binomtest(int((steps > 0).sum()), int((steps != 0).sum())).pvalue)
