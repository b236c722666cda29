"""How a calibrated guard does on trajectories of another place, and what a few safe ones from there change.

Ways to a HOLD threshold are compared on the same trajectory maxima: the guard's own, for all groups; *weighted*
conformal thresholds (Tibshirani et al., "Conformal prediction under covariate shift", 2019), in which a density ratio
makes the calibration trajectories stand for the new place without any label from there; and conformal thresholds of 25,
50 and 100 local safe trajectories, drawn many times over: at random, as one who samples all that goes on there, and
group by group, as one who knows a few tasks and will meet others. BLOCK, thresholds of groups and the paper's rule are
left out.

The ratio comes from a classifier that tells the two places apart. Where it does so too well, a trajectory outweighs all
of the calibration set and has no weighted threshold; it is then held. The classifier cannot know which trajectories of
the new place are safe, so weighted thresholds keep the level only as far as unsafe ones are few or look alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from jaxguard.decision.conformal import conformal_threshold, false_alert_band, needed, rank
from jaxguard.decision.shift import ShiftDetector
from jaxguard.evaluation.metrics import detection
from jaxguard.evaluation.wording import number
from jaxguard.ranking import auroc
from jaxguard.types import JaxguardError

LOCAL = (25, 50, 100)
# Principal components that the density ratio is estimated on.
COMPONENTS = 16

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class TransferError(JaxguardError):
    """Trajectories from which no transfer can be measured."""


@dataclass(frozen=True)
class Place:
    """Scored trajectories of one place: fused maxima ``[n]``, labels ``[n]``, groups, and features ``[n, F]``."""

    maxima: Floats
    unsafe: Bools
    groups: Sequence[str]
    features: Floats


@dataclass(frozen=True)
class Row:
    """One way to a threshold: rates at it, as a mean over draws and their central 90 % where there are several.

    ``band`` is the exact 95 % band of the true false-alert level, ``None`` where nothing is guaranteed: trajectories of
    a few groups are not exchangeable with those of others.
    """

    name: str
    fpr: float
    sr: float
    f1: float
    fpr_range: tuple[float, float] | None = None
    band: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Transfer:
    """What :func:`transfer` found.

    Attributes:
        auroc: Of the fused maxima in the new place.
        safe: Safe trajectories there.
        unsafe: Unsafe ones.
        alarm: Median number of local safe trajectories after which the shift detector raised an alarm, over orders;
            infinite where it mostly did not.
        rows: One for each way to a threshold.
    """

    auroc: float
    safe: int
    unsafe: int
    alpha: float
    alarm: float
    rows: list[Row] = field(default_factory=list)


def transfer(
    calibration: Place, there: Place, own: float | None, alpha: float, *, seed: int, draws: int = 50
) -> Transfer:
    """Measures a guard in another place.

    Args:
        calibration: Safe calibration trajectories of the guard.
        there: Labelled trajectories of the other place.
        own: What the guard's HOLD threshold was raised to, if it was.
        alpha: Nominal false-alert level of all thresholds.
        seed: Of draws and orders.
        draws: Draws of local trajectories, and orders of the stream.

    Raises:
        TransferError: no safe or no unsafe trajectory there.
    """
    safe, unsafe = int((~there.unsafe).sum()), int(there.unsafe.sum())
    if not safe or not unsafe:
        raise TransferError(f"trajectories: got {safe} safe and {unsafe} unsafe ones, expected some of each")
    rng = np.random.default_rng(seed)
    conformal = conformal_threshold(calibration.maxima, alpha)
    rows = [_row("own", there.maxima > conformal.value, there.unsafe)]
    if own is not None:
        rows.append(_row("own, raised", there.maxima > own, there.unsafe))
    ratios = density_ratio(calibration.features, there.features, seed)
    limits = weighted_thresholds(calibration.maxima, *ratios, alpha)
    outweighs = np.isinf(limits)
    note = f"{outweighs.mean():.0%} have no threshold" if outweighs.any() else ""
    rows.append(_row("weighted", (there.maxima > limits) | outweighs, there.unsafe, note))
    rows += [_local(there, n, alpha, draws, rng, by_group) for by_group in (False, True) for n in LOCAL]
    alarms = [_alarm(calibration.maxima, rng.permutation(there.maxima[~there.unsafe]), i) for i in range(draws)]
    return Transfer(auroc(there.maxima, there.unsafe), safe, unsafe, alpha, float(np.median(alarms)), rows)


def _row(name: str, alert: Bools, unsafe: Bools, note: str = "") -> Row:
    return Row(name, *rates(alert, unsafe), note=note)


def rates(alert: Bools, unsafe: Bools) -> tuple[float, float, float]:
    """``(FPR, SR, F1)`` of alerts; NaN where there is no safe or unsafe trajectory."""
    found = detection(np.ones((1, len(alert))), unsafe, alert)
    fpr, sr, f1 = (float(found[name][0]) for name in ("fpr", "sr", "f1"))
    return fpr, sr, f1 if unsafe.any() else math.nan


def density_ratio(source: Floats, target: Floats, seed: int) -> tuple[Floats, Floats]:
    """How much likelier each trajectory is in the target than in the source, for ``source`` and for ``target``.

    Args:
        source: ``[n, F]`` features.
        target: ``[m, F]``.
        seed: Of the principal components.
    """
    both = np.concatenate([source, target])
    components = min(COMPONENTS, *both.shape)
    regression = LogisticRegression(C=1.0, max_iter=500, class_weight="balanced")
    model = make_pipeline(StandardScaler(), PCA(components, random_state=seed), regression)
    odds = np.exp(model.fit(both, np.arange(len(both)) >= len(source)).decision_function(both))
    return odds[: len(source)], odds[len(source) :]


def weighted_thresholds(maxima: Floats, weights: Floats, own: Floats, alpha: float) -> Floats:
    """Weighted conformal thresholds ``[m]``, one for each trajectory because its own weight counts.

    Args:
        maxima: ``[n]`` of the calibration trajectories.
        weights: ``[n]`` their density ratios.
        own: ``[m]`` density ratios of the trajectories to be judged.
        alpha: Level; a threshold is infinite where the calibration trajectories carry less than ``1 - alpha``.
    """
    order = np.argsort(maxima, kind="stable")
    carried = np.cumsum(weights[order])
    # The smallest maximum up to which the weights reach 1 - alpha of all, the trajectory's own included.
    wanted = (1.0 - alpha) * (carried[-1] + own)
    at = np.searchsorted(carried, wanted * (1 - 1e-12), side="left")
    return np.where(at < len(maxima), maxima[order][np.minimum(at, len(maxima) - 1)], math.inf)


def _local(there: Place, n: int, alpha: float, draws: int, rng: np.random.Generator, by_group: bool) -> Row:
    name = f"{n} of few groups" if by_group else f"{n} local safe"
    if n < needed(alpha):
        return Row(name, math.nan, math.nan, math.nan, note=f"too few: {needed(alpha)} needed")
    keys = there.groups if by_group else [str(i) for i in range(len(there.maxima))]
    groups, number_of = np.unique(np.asarray(keys, dtype=object).astype(str), return_inverse=True)
    found = []
    for _ in range(draws):
        turn = rng.permutation(len(groups))[number_of]  # groups in random order
        order = np.argsort(turn, kind="stable")
        safe = order[~there.unsafe[order]]
        if len(safe) <= n:
            return Row(name, math.nan, math.nan, math.nan, note=f"too few: {len(safe)} are safe")
        rest = turn > turn[safe[n - 1]]
        if not (rest & ~there.unsafe).any() or not (rest & there.unsafe).any():
            continue
        threshold = conformal_threshold(there.maxima[safe[:n]], alpha).value
        found.append(rates(there.maxima[rest] > threshold, there.unsafe[rest]))
    if not found:
        return Row(name, math.nan, math.nan, math.nan, note="no group is left to test on")
    values = np.array(found)
    low, high = np.percentile(values[:, 0], [5, 95])
    band = false_alert_band(n, rank(n, alpha))
    fpr, sr, f1 = values.mean(axis=0).tolist()
    exact = None if by_group else (band.low, band.high)
    return Row(name, fpr, sr, f1, fpr_range=(float(low), float(high)), band=exact)


def _alarm(calibration: Floats, stream: Floats, seed: int) -> float:
    detector = ShiftDetector(calibration.tolist(), seed=seed)
    for score in stream:
        detector.update(float(score))
        if detector.alarm_at is not None:
            return detector.alarm_at + 1
    return math.inf


def render_transfer(found: Transfer) -> str:
    """The table as text, at most 100 columns wide."""
    alarm = f"after {found.alarm:.0f} safe trajectories" if math.isfinite(found.alarm) else "none"
    lines = [
        f"{found.safe:,} safe and {found.unsafe:,} unsafe trajectories, AUROC {number(found.auroc)}.",
        f"Alarm that safe ones do not look like the calibration set: {alarm} (median).",
        f"Thresholds at alpha {found.alpha:g}:",
        "",
        f"{'threshold':18}{'FPR':>8}{'5-95 % of draws':>18}{'exact band':>14}{'SR':>8}{'F1':>8}",
    ]
    for row in found.rows:
        draws, band = (
            "" if r is None else f"{number(r[0], digits=2)}-{number(r[1], digits=2)}" for r in (row.fpr_range, row.band)
        )
        figures = f"{number(row.fpr):>8}{draws:>18}{band:>14}{number(row.sr):>8}{number(row.f1):>8}"
        lines.append(f"{row.name:18}{figures}  {row.note}".rstrip())
    return "\n".join(lines) + "\n"
