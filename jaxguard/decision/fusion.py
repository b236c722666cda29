"""Fits the fusion (beta, W and the noisy-or weights) on a split that sets no threshold.

The papers say "calibrated fusion weights" and not how. Here: a small grid, judged by how well the
trajectory maximum of S_t separates unsafe from safe trajectories. Fitted on the calibration split, the
weights would have seen the trajectories whose maxima set the thresholds, and the level would be void;
hence ids are asked for and an overlap is an error.

With few trajectories the best of hundreds of grid points is mostly luck. Two guards: fewer than
``min_class`` trajectories of either class leave the defaults as they are, and among the points within
``tolerance`` of the best AUROC the one nearest to the defaults wins. Where first hazard steps are known, the
tie is first broken by *timeliness*: the same AUROC with only what an unsafe trajectory showed before its first
hazard step. Without that, a perfect hazard head makes every point tie, and the fusion ignores the prefix risk.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.evidence import (
    EvidenceError,
    Floats,
    FusionParams,
    evidence,
    noisy_or,
    smooth,
    trajectory_max,
)
from jaxguard.ranking import auroc

DEFAULT_FUSION = FusionParams()
_TIE = 1e-3
"""Differences of timeliness up to this are none."""


@dataclass(frozen=True, slots=True)
class FusionGrid:
    """The points to try: every combination of these values (all weights zero left out)."""

    beta: tuple[float, ...] = (0.5, 0.7, 0.85)
    window: tuple[int, ...] = (3, 5)
    w_hazard: tuple[float, ...] = (0.0, 0.5, 1.0)
    w_ema: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    w_win: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, slots=True)
class FusionFit:
    """Outcome of :func:`fit_fusion`.

    Attributes:
        params: The parameters to use.
        value: AUROC of the trajectory maxima at ``params`` on the fit split; NaN where a class is empty.
        default_value: The same at the defaults.
        best_value: The best of the grid; ``value`` lies within the tolerance below it.
        fitted: False where too few trajectories left the defaults in place.
        safe: Safe trajectories of the fit split.
        unsafe: Unsafe trajectories of the fit split.
        tried: Grid points compared.
        timeliness: AUROC of the maxima before the first hazard step against those of safe trajectories; None
            where no first hazard step is known.
    """

    params: FusionParams
    value: float
    default_value: float
    best_value: float
    fitted: bool
    safe: int
    unsafe: int
    tried: int
    timeliness: float | None = None


def fit_fusion(
    hazard: ArrayLike,
    prefix: ArrayLike,
    lengths: ArrayLike,
    unsafe: ArrayLike,
    *,
    first_hazard: ArrayLike | None = None,
    ids: Sequence[str],
    calibration_ids: Collection[str],
    grid: FusionGrid | None = None,
    default: FusionParams = DEFAULT_FUSION,
    min_class: int = 10,
    tolerance: float = 1e-3,
) -> FusionFit:
    """Chooses fusion parameters on the fit split.

    Args:
        hazard: ``[N]`` hazard risks of all steps, trajectory after trajectory.
        prefix: ``[N]`` prefix risks.
        lengths: ``[B]`` steps per trajectory.
        unsafe: ``[B]`` trajectory labels.
        first_hazard: ``[B]`` first hazard steps, negative where there is none or it is unknown.
        ids: ``[B]`` trajectory ids.
        calibration_ids: Ids of the trajectories that will set the thresholds.
        grid: Points to try.
        default: Parameters to prefer on ties and to fall back to.
        min_class: Fewer safe or fewer unsafe trajectories than this leave ``default`` in place.
        tolerance: AUROC that may be given for earlier warnings; differences up to it count as ties.

    Raises:
        EvidenceError: Arrays disagree, a risk lies outside [0, 1], ids repeat or overlap with
            ``calibration_ids``.
    """
    labels = np.asarray(unsafe, dtype=bool)
    sizes = np.asarray(lengths)
    if not len(ids) == len(labels) == len(sizes):
        raise EvidenceError(
            f"ids, unsafe, lengths: got {len(ids)}, {len(labels)}, {len(sizes)} entries, expected one count"
        )
    if len(set(ids)) != len(ids):
        raise EvidenceError(f"ids: {len(ids) - len(set(ids))} repeat, expected each trajectory once")
    shared = set(ids) & set(calibration_ids)
    if shared:
        raise EvidenceError(
            f"ids: {len(shared)} trajectories of the fit split also set the thresholds (e.g. {min(shared)!r}), "
            "expected disjoint splits"
        )
    base = evidence(hazard, prefix, sizes, default)

    starts = np.cumsum(sizes) - sizes
    before = np.zeros(len(sizes), np.int64) if first_hazard is None else np.maximum(np.asarray(first_hazard), 0)
    warned = labels & (before > 0)
    early = np.arange(len(base.hazard)) - np.repeat(starts, sizes) < np.repeat(before, sizes)

    def judge(params: FusionParams, ema: Floats, win: Floats) -> tuple[float, float]:
        fused = noisy_or(base.hazard, ema, win, params.weights)
        maxima = trajectory_max(fused, sizes)
        safe, timely = maxima[~labels], trajectory_max(fused[early], before)[warned]
        timely_labels = np.arange(len(safe) + len(timely)) >= len(safe)
        return auroc(maxima, labels), auroc(np.concatenate([safe, timely]), timely_labels)

    n_unsafe, n_safe = int(labels.sum()), int((~labels).sum())
    default_value, default_timeliness = judge(default, base.ema, base.win)
    if min(n_unsafe, n_safe) < max(min_class, 1):
        values = (default_value,) * 3
        return FusionFit(default, *values, False, n_safe, n_unsafe, 1, default_timeliness if warned.any() else None)

    points = grid or FusionGrid()
    tried: list[tuple[float, float, FusionParams]] = [(default_value, default_timeliness, default)]
    for beta, window in itertools.product(points.beta, points.window):
        ema, win = smooth(base.prefix, sizes.astype(np.int64), beta, window)
        for weights in itertools.product(points.w_hazard, points.w_ema, points.w_win):
            if any(weights):
                params = FusionParams(beta, window, *weights)
                tried.append((*judge(params, ema, win), params))
    best = max(value for value, _, _ in tried)
    level = [point for point in tried if point[0] >= best - tolerance]
    if warned.any():
        timeliest = max(timely for _, timely, _ in level)
        level = [point for point in level if point[1] >= timeliest - _TIE]
    value, timely, params = min(level, key=lambda p: (_distance(p[2], default), -p[0], _order(p[2])))
    found = timely if warned.any() else None
    return FusionFit(params, value, default_value, best, True, n_safe, n_unsafe, len(tried), found)


def _distance(params: FusionParams, default: FusionParams) -> float:
    weights = sum(abs(a - b) for a, b in zip(params.weights, default.weights, strict=True))
    return weights + abs(params.beta - default.beta) + abs(params.window - default.window) / 10


def _order(params: FusionParams) -> tuple[float, ...]:
    return (params.beta, params.window, *params.weights)
