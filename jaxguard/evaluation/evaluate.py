"""One evaluation: every metric with its interval, overall and per data set, risk type and domain.

Baselines stand beside the guard in every section. Two trivial ones are always there, because a figure
without them says little: alerting on everything, and scoring a trajectory by its length.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.calibration import Calibration
from jaxguard.decision.conformal import Band, conformal_threshold, observed_rate_band
from jaxguard.decision.evidence import trajectory_max
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.bootstrap import Interval, bootstrap
from jaxguard.evaluation.metrics import (
    Bools,
    EvaluationError,
    Floats,
    Ints,
    Table,
    count_decisions,
    detection,
    ranking,
    tabulate,
)
from jaxguard.evaluation.timing import LeadTimes, Warnings, lead_times, timeliness, timing, timing_counts, warnings_at

GUARD = "jaxguard"
PAIRED = ("auroc", "f1", "phir_minus_fpr")
WARNING_LEVELS = (0.01, 0.02, 0.05, 0.1, 0.2)
Metrics = dict[str, Interval]


@dataclass(frozen=True, eq=False)
class Baseline:
    """Another guard's outcome on the same scored trajectories, aligned with them; any part may be absent.

    Attributes:
        score: ``[N]`` higher is riskier; gives AUROC and AUPRC.
        alert: ``[N]`` did it alert; gives SR, FPR, F1 and precision.
        first_alert: ``[N]`` first alerting step, -1 without one; gives PHIR and MAS too.
    """

    score: Floats | None = None
    alert: Bools | None = None
    first_alert: Ints | None = None


def stepwise_baseline(
    steps: Sequence[Floats], safe: Sequence[Floats], alpha: float, *, paper_rule: bool = False
) -> Baseline:
    """A guard of step risks at a split-conformal threshold on the maxima of safe calibration trajectories.

    A step without a score (NaN) alerts at any threshold, and ranks above all others.

    Args:
        steps: ``[T]`` risks of each scored trajectory.
        safe: Those of each safe calibration trajectory.
        alpha: False-alert level.
        paper_rule: As in :func:`~jaxguard.decision.conformal.conformal_threshold`.

    Raises:
        ConformalError: too few safe trajectories for the level, or too many of them have a step without a score.
    """

    def maxima(risks: Sequence[Floats]) -> Floats:
        return trajectory_max(np.concatenate([np.empty(0), *risks]), np.array([len(r) for r in risks], np.int64))

    limit = conformal_threshold(maxima(safe), alpha, paper_rule=paper_rule)
    crossed = [limit.crossed(risks) for risks in steps]
    first = np.array([int(np.argmax(c)) if c.any() else -1 for c in crossed], np.int64)
    return Baseline(score=maxima(steps), alert=first >= 0, first_alert=first)


@dataclass(frozen=True)
class Counts:
    """What a section consists of."""

    trajectories: int
    unsafe: int
    safe: int
    unlabelled: int
    zero_steps: int
    steps: int
    clusters: int
    timed: int
    excluded_unreliable: int
    excluded_no_step: int
    supervised_steps: int


@dataclass(frozen=True)
class Section:
    """Results of one subset.

    Attributes:
        kind: ``"all"``, ``"source"``, ``"risk_type"`` or ``"domain"``.
        name: The subset's value of it.
        counts: What it consists of.
        rows: Metrics by guard, ``GUARD`` first; every guard has the metrics it gave the material for, and of those in
            :data:`PAIRED` also ``auroc_ahead``, ...: by how much that of ``GUARD`` is higher, resample by resample.
        lead_times: First alerts relative to the first hazard.
    """

    kind: str
    name: str
    counts: Counts
    rows: Mapping[str, Metrics]
    lead_times: LeadTimes


@dataclass(frozen=True)
class LevelCheck:
    """The achieved false-alert rate of HOLD against what its calibration promises.

    Attributes:
        nominal: alpha_hold.
        achieved: Share of the tested safe trajectories whose fused maximum crosses the pooled threshold, before it
            was raised.
        tested: Safe trajectories tested.
        law: Exact law of the true rate given the calibration size.
        observed: Law of the rate observed on ``tested`` exchangeable safe trajectories.
    """

    nominal: float
    achieved: float
    tested: int
    law: Band
    observed: Band

    @property
    def verdict(self) -> str:
        """``"inside"`` the observed band, or ``"above"`` or ``"below"`` it.

        Above means that these safe trajectories do not look like those of the calibration. Below may
        also come from ties.
        """
        if self.achieved > self.observed.high:
            return "above"
        return "below" if self.achieved < self.observed.low else "inside"


@dataclass(frozen=True)
class Evaluation:
    """Everything :func:`evaluate` found; JSON-able, printable, and the input of the report."""

    sections: tuple[Section, ...]
    decisions: Mapping[str, int]
    level_check: LevelCheck | None
    early_warning: tuple[Warnings, ...]
    latency_ms: Mapping[str, float]
    seed: int
    resamples: int
    level: float
    lambda_block: float
    lambda_hold: float
    hold_raised: bool
    alpha_block: float
    alpha_hold: float
    alpha_any: float
    calibration_n: int

    @property
    def overall(self) -> Section:
        """The section of all trajectories."""
        return self.sections[0]

    def of_kind(self, kind: str) -> tuple[Section, ...]:
        """Sections of one kind, in order."""
        return tuple(s for s in self.sections if s.kind == kind)

    def to_json(self) -> str:
        """As text; NaN and infinities become null."""
        return json.dumps(_plain(asdict(self)), indent=2, allow_nan=False)


def evaluate(
    scored: Sequence[ScoredTrajectory],
    calibration: Calibration,
    baselines: Mapping[str, Baseline | ArrayLike] | None = None,
    *,
    seed: int = 20260701,
    resamples: int = 1_000,
    level: float = 0.95,
    latency_ms: Mapping[str, float] | None = None,
    min_section: int = 20,
    shared: Collection[str] = (),
) -> Evaluation:
    """Evaluates scored trajectories.

    Args:
        scored: Any trajectories; those without a label are counted and scored by no metric.
        calibration: The calibration that made their decisions.
        baselines: Other guards by name, aligned with ``scored``. A bare boolean array is alerts, a bare
            float array scores.
        seed: Of the bootstrap.
        resamples: Bootstrap resamples.
        level: Probability of the intervals.
        latency_ms: Milliseconds per step by name (``"p50"``, ``"p99"``, ...), measured by the caller.
        min_section: Risk types and domains with fewer labelled trajectories share one section "(other)".
        shared: Unsafe trajectories that begin like safe ones (:func:`~jaxguard.evaluation.timing.shared_beginnings`).

    Raises:
        EvaluationError: No labelled trajectory, an id that repeats, a baseline that is not aligned.
    """
    if len({s.id for s in scored}) != len(scored):
        raise EvaluationError(f"scored: {len(scored) - len({s.id for s in scored})} ids repeat, expected none")
    labelled = [i for i, s in enumerate(scored) if s.unsafe is not None]
    if not labelled:
        raise EvaluationError(f"scored: none of {len(scored)} trajectories has a label, expected at least one")
    others = {name: _baseline(name, value, len(scored)) for name, value in (baselines or {}).items()}

    def section(kind: str, name: str, members: list[int]) -> Section:
        part = [scored[i] for i in members]
        table = tabulate(part, shared)
        at = np.array([i for i in members if scored[i].unsafe is not None], dtype=np.int64)
        rivals = {"always alert": Baseline(alert=np.ones(len(table), bool)),
                  "number of steps": Baseline(score=table.steps.astype(np.float64))}  # fmt: skip
        rivals |= {n: _take(b, at) for n, b in others.items()}
        rows = _rows(table, rivals, seed=seed, resamples=resamples, level=level)
        return Section(kind, name, _counts(part, table), rows, lead_times(table))

    everything = list(range(len(scored)))
    sections = [section("all", "all", everything)]
    for kind, key in (("source", lambda s: s.source), ("risk_type", _meta("risk_type")), ("domain", _meta("domain"))):
        subsets = _subsets(scored, key, 0 if kind == "source" else min_section)
        if len(subsets) > 1:
            sections += [section(kind, name, members) for name, members in subsets.items()]
    return Evaluation(
        sections=tuple(sections),
        decisions=count_decisions(scored),
        level_check=check_level(scored, calibration, level),
        early_warning=tuple(warnings_at(scored, calibration, WARNING_LEVELS)),
        latency_ms=dict(latency_ms or {}),
        seed=seed,
        resamples=resamples,
        level=level,
        lambda_block=calibration.lambda_block,
        lambda_hold=calibration.lambda_hold,
        hold_raised=calibration.hold.raised_from is not None,
        alpha_block=calibration.block.alpha,
        alpha_hold=calibration.hold.alpha,
        alpha_any=calibration.alpha_any,
        calibration_n=calibration.n,
    )


def check_level(scored: Sequence[ScoredTrajectory], calibration: Calibration, level: float = 0.95) -> LevelCheck | None:
    """Achieved false-alert rate of HOLD against its law; ``None`` without safe trajectories."""
    maxima = np.array([s.max_fused for s in scored if s.unsafe is False])
    if not len(maxima):
        return None
    hold = calibration.hold.conformal
    achieved = float(hold.crossed(maxima).mean())
    observed = observed_rate_band(hold.n, hold.k, len(maxima), level)
    return LevelCheck(hold.alpha, achieved, len(maxima), calibration.band(level)[1], observed)


def _rows(
    table: Table, baselines: Mapping[str, Baseline], *, seed: int, resamples: int, level: float
) -> dict[str, Metrics]:
    """One bootstrap for all guards: the same resamples, so that rows can be compared."""

    def ours(weights: Floats) -> dict[str, Floats]:
        out = detection(weights, table.unsafe, table.alert) | ranking(weights, table.unsafe, table.max_fused)
        out["auroc_hazard"] = ranking(weights, table.unsafe, table.max_hazard, auroc_only=True)["auroc"]
        by_step = weights[:, table.step_owner]
        out["step_auroc"] = ranking(by_step, table.step_label, table.step_hazard, auroc_only=True)["auroc"]
        out["timeliness"] = timeliness(weights, table)
        return out | timing(weights, table, table.first_alert, out["fpr"])

    def theirs(baseline: Baseline, weights: Floats) -> dict[str, Floats]:
        out: dict[str, Floats] = {}
        if baseline.alert is not None:
            out |= detection(weights, table.unsafe, baseline.alert)
        if baseline.score is not None:
            out |= ranking(weights, table.unsafe, baseline.score)
        if baseline.first_alert is not None and baseline.alert is not None:
            out |= timing(weights, table, baseline.first_alert, out["fpr"])
        return out

    def statistic(weights: Floats) -> dict[str, Floats]:
        guard = ours(weights)
        out = {f"{GUARD}\0{metric}": values for metric, values in guard.items()}
        for name, baseline in baselines.items():
            rival = theirs(baseline, weights)
            rival |= {f"{metric}_ahead": guard[metric] - rival[metric] for metric in PAIRED if metric in rival}
            out |= {f"{name}\0{metric}": values for metric, values in rival.items()}
        return out

    found = bootstrap(
        statistic, table.clusters, resamples=resamples, seed=seed, level=level, width=len(table.step_owner)
    )
    rows: dict[str, Metrics] = {GUARD: {}, **{name: {} for name in baselines}}
    for key, interval in found.items():
        name, metric = key.split("\0")
        rows[name][metric] = interval
    return rows


def _counts(part: Sequence[ScoredTrajectory], table: Table) -> Counts:
    when = timing_counts(table)
    return Counts(
        trajectories=len(part),
        unsafe=int(table.unsafe.sum()),
        safe=int((~table.unsafe).sum()),
        unlabelled=len(part) - len(table),
        zero_steps=sum(len(s) == 0 for s in part),
        steps=sum(len(s) for s in part),
        clusters=len(set(table.clusters)),
        timed=when.timed,
        excluded_unreliable=when.excluded_unreliable,
        excluded_no_step=when.excluded_no_step,
        supervised_steps=len(table.step_label),
    )


def _subsets(
    scored: Sequence[ScoredTrajectory], key: Callable[[ScoredTrajectory], str], smallest: int
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, s in enumerate(scored):
        if key(s):
            found.setdefault(key(s), []).append(i)
    kept = {
        name: members
        for name, members in sorted(found.items())
        if sum(scored[i].unsafe is not None for i in members) >= smallest
    }
    rest = sorted(i for name, members in found.items() if name not in kept for i in members)
    return kept | ({"(other)": rest} if rest else {})


def _meta(name: str) -> Callable[[ScoredTrajectory], str]:
    return lambda s: "" if s.metadata.get(name) is None else str(s.metadata[name])


def _baseline(name: str, value: Baseline | ArrayLike, n: int) -> Baseline:
    if name == GUARD or "\0" in name:
        raise EvaluationError(f"baseline name: got {name!r}, expected one other than {GUARD!r}")
    if not isinstance(value, Baseline):
        bare = np.asarray(value)
        value = Baseline(alert=bare) if bare.dtype == bool else Baseline(score=bare.astype(np.float64))
    for part in ("score", "alert", "first_alert"):
        found = getattr(value, part)
        if found is not None and np.shape(found) != (n,):
            raise EvaluationError(f"baseline {name!r}: {part} has shape {np.shape(found)}, expected ({n},) as scored")
    if value.score is not None and np.isnan(value.score).any():
        raise EvaluationError(
            f"baseline {name!r}: {int(np.isnan(value.score).sum())} scores are NaN, expected a number for each"
        )
    if value.first_alert is not None:
        first = np.asarray(value.first_alert, dtype=np.int64)
        if value.alert is not None and not np.array_equal(value.alert, first >= 0):
            raise EvaluationError(f"baseline {name!r}: alert and first_alert >= 0 differ, expected them to agree")
        return replace(value, alert=first >= 0, first_alert=first)
    return value


def _take(baseline: Baseline, at: Ints) -> Baseline:
    return Baseline(
        score=None if baseline.score is None else baseline.score[at],
        alert=None if baseline.alert is None else baseline.alert[at],
        first_alert=None if baseline.first_alert is None else baseline.first_alert[at],
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.generic):
        return value.item()
    return value
