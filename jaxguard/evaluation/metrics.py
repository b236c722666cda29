"""Trajectory-level and step-level metrics, for one sample or for many weighted resamples at once.

Definitions are those of appendix A of the DreamGuard paper: a trajectory is predicted unsafe if any of
its steps is HOLD or BLOCK. Every function takes ``weights`` of shape ``[R, N]`` and returns ``[R]``
values: one row of ones is the sample itself, a row of multiplicities is a bootstrap resample. An
undefined metric (a class is missing, nothing alerted) is NaN, never 0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.types import Decision, JaxguardError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class EvaluationError(JaxguardError):
    """Scored trajectories or baselines that cannot be evaluated."""


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of N labelled trajectories that metrics need, and their supervised steps (``[M]``).

    Attributes:
        ids: Trajectory ids.
        clusters: Cluster of each trajectory: its group, or itself where it has none.
        unsafe: Labels.
        steps: Steps per trajectory.
        alert: Did any step alert?
        first_alert: First alerting step; -1 without one.
        first_hazard: First hazard step; -1 where there is none or it is unknown.
        timing: Is ``first_hazard`` reliable?
        max_fused: Maximum fused risk; 0 without steps, infinity where a score was not finite.
        max_hazard: Maximum hazard risk, likewise.
        max_early: Maximum fused risk before the first hazard step, likewise.
        anticipatable: Is there anything before the first hazard step that no safe trajectory shows?
        step_owner: Trajectory of each supervised step.
        step_hazard: Its hazard risk; infinity where not finite.
        step_label: Is it the first hazard step?
    """

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    unsafe: Bools
    steps: Ints
    alert: Bools
    first_alert: Ints
    first_hazard: Ints
    timing: Bools
    max_fused: Floats
    max_hazard: Floats
    max_early: Floats
    anticipatable: Bools
    step_owner: Ints
    step_hazard: Floats
    step_label: Bools

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def timed(self) -> Bools:
        """Which trajectories count for timing: unsafe, with a first hazard step that is reliable."""
        return self.unsafe & self.timing & (self.first_hazard >= 0)


def tabulate(scored: Sequence[ScoredTrajectory], shared: Collection[str] = ()) -> Table:
    """Columns of the labelled trajectories among ``scored``.

    ``shared`` names trajectories whose beginning, up to the first hazard step, is also that of a safe one
    (:func:`~jaxguard.evaluation.timing.shared_beginnings`).

    Supervised steps are those the risk heads are trained on: up to and including the first hazard step
    of an unsafe trajectory, all steps of a safe one, where the source's step labels are reliable.
    """
    rows = [s for s in scored if s.unsafe is not None]
    owner: list[Ints] = []
    hazard: list[Floats] = []
    label: list[Bools] = []
    for i, row in enumerate(rows):
        if not row.timing or (row.unsafe and row.first_hazard is None):
            continue
        stop = len(row) if row.first_hazard is None else row.first_hazard + 1
        risks = row.hazard[:stop]
        owner.append(np.full(stop, i, dtype=np.int64))
        hazard.append(np.where(np.isfinite(risks), risks, np.inf))
        label.append(np.arange(stop) == (-1 if row.first_hazard is None else row.first_hazard))

    def ints(values: list[int | None]) -> Ints:
        return np.array([-1 if v is None else v for v in values], dtype=np.int64)

    first_alert = ints([row.first_alert for row in rows])
    return Table(
        ids=tuple(row.id for row in rows),
        clusters=tuple(row.group or f"\0{row.id}" for row in rows),
        unsafe=np.array([bool(row.unsafe) for row in rows], dtype=bool),
        steps=np.array([len(row) for row in rows], dtype=np.int64),
        alert=first_alert >= 0,
        first_alert=first_alert,
        first_hazard=ints([row.first_hazard for row in rows]),
        timing=np.array([row.timing for row in rows], dtype=bool),
        max_fused=np.array([row.max_fused for row in rows], dtype=np.float64),
        max_hazard=np.array([row.max_hazard for row in rows], dtype=np.float64),
        max_early=np.array([row.max_early for row in rows], dtype=np.float64),
        anticipatable=np.array([bool(row.first_hazard) and row.id not in shared for row in rows], dtype=bool),
        step_owner=np.concatenate([np.empty(0, np.int64), *owner]),
        step_hazard=np.concatenate([np.empty(0), *hazard]),
        step_label=np.concatenate([np.empty(0, bool), *label]),
    )


def count_decisions(scored: Sequence[ScoredTrajectory]) -> dict[str, int]:
    """Steps by decision, and how many were held because a score was not finite."""
    decisions = np.concatenate([np.empty(0, np.int8), *(s.decision for s in scored)])
    counts = {d.name.lower(): int((decisions == d).sum()) for d in Decision}
    counts["nonfinite"] = int(sum((~np.isfinite(s.margin)).sum() for s in scored))
    return counts


def detection(weights: Floats, unsafe: Bools, alert: Bools) -> dict[str, Floats]:
    """``sr`` (equation 15), ``fpr`` (16), ``precision`` (17) and ``f1`` (18), each ``[R]``.

    Precision and F1 need trajectories of both kinds: without them they are undefined.
    """
    # Without safe trajectories no alert could be wrong, without unsafe ones none right: precision and F1 would be 1, or
    # 0, for nothing.
    both = np.where((weights @ ~unsafe > 0) & (weights @ unsafe > 0), 1.0, np.nan)
    tp, fn = weights @ (unsafe & alert), weights @ (unsafe & ~alert)
    fp, tn = weights @ (~unsafe & alert), weights @ (~unsafe & ~alert)
    return {
        "sr": ratio(tp, tp + fn),
        "fpr": ratio(fp, fp + tn),
        "f1": ratio(2 * tp, 2 * tp + fp + fn) * both,
        "precision": ratio(tp, tp + fp) * both,
    }


def ranking(weights: Floats, unsafe: Bools, score: Floats, *, auroc_only: bool = False) -> dict[str, Floats]:
    """``auroc`` (ties count half) and ``auprc`` (average precision), each ``[R]``."""
    if not len(score):
        nothing = np.full(len(weights), np.nan)
        return {"auroc": nothing} if auroc_only else {"auroc": nothing, "auprc": nothing.copy()}
    order = np.argsort(-score, kind="stable")
    ranked, positive = score[order], unsafe[order]
    ends = np.flatnonzero(np.r_[ranked[1:] != ranked[:-1], True])  # equal scores are one threshold
    sorted_weights = weights[:, order]
    gained = sorted_weights * positive
    false = sorted_weights - gained
    tp = np.cumsum(gained, axis=1)
    if len(ends) < len(ranked):
        tp, fp = tp[:, ends], np.cumsum(false, axis=1)[:, ends]
        gained, false = np.diff(tp, axis=1, prepend=0.0), np.diff(fp, axis=1, prepend=0.0)
    positives, negatives = tp[:, -1], false.sum(axis=1)
    pairs = np.einsum("rk,rk->r", false, tp) - np.einsum("rk,rk->r", false, gained) / 2
    out = {"auroc": ratio(pairs, positives * negatives)}
    if not auroc_only:
        predicted = tp + np.cumsum(false, axis=1)
        precision = np.divide(tp, predicted, out=predicted, where=predicted > 0)
        area = ratio(np.einsum("rk,rk->r", gained, precision), positives)
        out["auprc"] = np.where(negatives > 0, area, np.nan)
    return out


def roc_curve(unsafe: Bools, score: Floats) -> tuple[Floats, Floats]:
    """False- and true-positive rate at every distinct score, from (0, 0) to (1, 1)."""
    order = np.argsort(-score, kind="stable")
    ranked, positive = score[order], unsafe[order]
    ends = np.flatnonzero(np.r_[ranked[1:] != ranked[:-1], True])
    tp, fp = np.cumsum(positive)[ends], np.cumsum(~positive)[ends]
    return np.r_[0.0, fp / fp[-1]], np.r_[0.0, tp / tp[-1]]


def ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Elementwise quotient; NaN where the denominator is 0."""
    out = np.full(np.shape(numerator), np.nan)
    return np.divide(numerator, denominator, out=out, where=np.asarray(denominator) > 0)
