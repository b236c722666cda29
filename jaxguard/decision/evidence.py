"""Temporal evidence over prefix risks, and the noisy-or that fuses it with the hazard risk.

Equations 11 to 13 of the DreamGuard paper::

    ema_t = beta * ema_{t-1} + (1 - beta) * prefix_t,   ema_{-1} = 0
    win_t = mean of the last at most W prefix risks
    S_t   = 1 - (1 - [w_h haz_t]) (1 - [w_e ema_t]) (1 - [w_w win_t]),   [x] = clip(x, 0, 1)

The same arithmetic, in the same order of operations, exists twice: :func:`advance` for one step of a
live session and :func:`evidence` for whole archives. Both work in float64 and agree bit for bit.

Archives are *flat*: the steps of all trajectories one after another (``[N]``), with ``lengths`` (``[B]``)
saying where each ends. One trajectory of 10,000 steps among short ones then costs no padding.

A non-finite risk makes ``S_t`` NaN from that step to the end of its trajectory, because the moving
average cannot forget it; the policy turns NaN into HOLD, never into PASS.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.config import LARGEST_WINDOW
from jaxguard.types import JaxguardError

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class EvidenceError(JaxguardError):
    """A risk, a parameter or the shape of an array is not what the equations allow."""


@dataclass(frozen=True, slots=True)
class FusionParams:
    """Parameters of the temporal evidence and of the noisy-or.

    The default weights give the hazard head one unit and the prefix head one unit, shared by its two
    readings ``ema`` and ``win``.

    Attributes:
        beta: Retention of the moving average, in [0, 1).
        window: W, the most recent prefix risks that ``win`` averages; 1 to 10,000.
        w_hazard: Weight of the hazard risk; finite and not negative, as the other two.
        w_ema: Weight of the moving average.
        w_win: Weight of the window mean.
    """

    beta: float = 0.7
    window: int = 3
    w_hazard: float = 1.0
    w_ema: float = 0.5
    w_win: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.beta < 1.0:
            raise EvidenceError(f"beta: got {self.beta!r}, expected a number in [0, 1)")
        if type(self.window) is not int or not 1 <= self.window <= LARGEST_WINDOW:
            raise EvidenceError(f"window: got {self.window!r}, expected an integer in 1..{LARGEST_WINDOW:,}")
        for name in ("w_hazard", "w_ema", "w_win"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise EvidenceError(f"{name}: got {value!r}, expected a finite number >= 0")
        if self.w_hazard == self.w_ema == self.w_win == 0.0:
            raise EvidenceError("w_hazard, w_ema, w_win: all are 0, expected at least one positive weight")

    @property
    def weights(self) -> tuple[float, float, float]:
        """``(w_hazard, w_ema, w_win)``."""
        return self.w_hazard, self.w_ema, self.w_win

    @property
    def fingerprint(self) -> str:
        """Names these parameters; part of what a calibration is valid for."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class EvidenceState(NamedTuple):
    """What a session remembers of past prefix risks: the moving average and the last at most W of them.

    A plain immutable value: a check that is not committed keeps the old one.
    """

    ema: float = 0.0
    recent: tuple[float, ...] = ()


class StepEvidence(NamedTuple):
    """Evidence of one step, each value in [0, 1] or NaN."""

    hazard: float
    prefix: float
    ema: float
    win: float
    fused: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of many trajectories; all arrays float64 ``[N]``."""

    hazard: Floats
    prefix: Floats
    ema: Floats
    win: Floats
    fused: Floats


def advance(
    state: EvidenceState, hazard: float, prefix: float, params: FusionParams
) -> tuple[EvidenceState, StepEvidence]:
    """One live step: the evidence for the proposed action, and the state if it is committed.

    Args:
        state: ``EvidenceState()`` before the first step.
        hazard: Hazard risk of the proposed action, in [0, 1]; non-finite counts as NaN.
        prefix: Prefix risk, in [0, 1]; non-finite counts as NaN.
        params: Fusion parameters.

    Raises:
        EvidenceError: A finite risk lies outside [0, 1].
    """
    hazard, prefix = _risk("hazard", float(hazard)), _risk("prefix", float(prefix))
    ema = params.beta * state.ema + (1.0 - params.beta) * prefix
    recent = (*state.recent, prefix)[-params.window :]
    # Not sum(): from Python 3.12 on it compensates rounding, which the array form does not.
    total = 0.0
    for value in recent:
        total += value
    win = total / len(recent)
    fused = 1.0 - (
        (1.0 - _clip(params.w_hazard * hazard)) * (1.0 - _clip(params.w_ema * ema)) * (1.0 - _clip(params.w_win * win))
    )
    return EvidenceState(ema, recent), StepEvidence(hazard, prefix, ema, win, fused)


def evidence(hazard: ArrayLike, prefix: ArrayLike, lengths: ArrayLike, params: FusionParams) -> Evidence:
    """Evidence of flat trajectories.

    Args:
        hazard: ``[N]`` hazard risks, trajectory after trajectory.
        prefix: ``[N]`` prefix risks.
        lengths: ``[B]`` steps per trajectory, 0 allowed, summing to N.
        params: Fusion parameters.

    Raises:
        EvidenceError: Shapes disagree, or a finite risk lies outside [0, 1].
    """
    haz, pre = _risks("hazard", hazard), _risks("prefix", prefix)
    sizes = check_lengths(lengths, len(haz))
    if haz.shape != pre.shape:
        raise EvidenceError(f"prefix: got shape {pre.shape}, expected that of hazard, {haz.shape}")
    ema, win = smooth(pre, sizes, params.beta, params.window)
    return Evidence(haz, pre, ema, win, noisy_or(haz, ema, win, params.weights))


def smooth(prefix: Floats, lengths: NDArray[np.int64], beta: float, window: int) -> tuple[Floats, Floats]:
    """``ema`` and ``win`` (both ``[N]``) of flat prefix risks; equations 11 and 12.

    Trajectories are walked side by side, longest first, so that step t of all that still run is one
    array operation and the total work is N.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    order = np.argsort(-lengths, kind="stable")
    running = np.searchsorted(-lengths[order], -np.arange(int(lengths.max(initial=0))), side="left")
    ema = np.empty_like(prefix)
    last = np.zeros(len(lengths))
    first = starts[order]
    for t, count in enumerate(running):
        at = first[:count] + t
        last = beta * last[:count] + (1.0 - beta) * prefix[at]
        ema[at] = last

    position = np.arange(len(prefix)) - np.repeat(starts, lengths)
    total = np.zeros_like(prefix)
    for lag in range(min(window, int(lengths.max(initial=0))) - 1, -1, -1):  # oldest first, as `advance` does
        at = np.flatnonzero(position >= lag)
        total[at] += prefix[at - lag]
    return ema, total / np.minimum(position + 1, window)


def noisy_or(hazard: Floats, ema: Floats, win: Floats, weights: tuple[float, float, float]) -> Floats:
    """Fused risk S of any equal shapes; equation 13. NaN in, NaN out."""
    w_hazard, w_ema, w_win = weights
    return 1.0 - (
        (1.0 - np.clip(w_hazard * hazard, 0.0, 1.0))
        * (1.0 - np.clip(w_ema * ema, 0.0, 1.0))
        * (1.0 - np.clip(w_win * win, 0.0, 1.0))
    )


def trajectory_max(values: ArrayLike, lengths: ArrayLike) -> Floats:
    """Maximum over the steps of each flat trajectory, ``[B]``.

    A trajectory without steps has 0: it proposes nothing and cannot alert. One with a non-finite value
    has infinity: the policy holds it whatever the thresholds, so it ranks above every score.
    """
    flat = np.asarray(values, dtype=np.float64)
    sizes = check_lengths(lengths, len(flat))
    out = np.zeros(len(sizes))
    some = np.flatnonzero(sizes)
    if len(some):
        starts = (np.cumsum(sizes) - sizes)[some]
        out[some] = np.maximum.reduceat(np.where(np.isfinite(flat), flat, np.inf), starts)
    return out


def check_lengths(lengths: ArrayLike, total: int) -> NDArray[np.int64]:
    """``lengths`` as int64 ``[B]``; raises EvidenceError where they are not steps that sum to ``total``."""
    sizes = np.asarray(lengths)
    if sizes.ndim != 1 or (sizes.size and not np.issubdtype(sizes.dtype, np.integer)):
        raise EvidenceError(f"lengths: got {sizes.dtype} of shape {sizes.shape}, expected integers [B]")
    if (sizes < 0).any() or int(sizes.sum()) != total:
        raise EvidenceError(
            f"lengths: got a sum of {int(sizes.sum())} with a minimum of {sizes.min(initial=0)}, "
            f"expected non-negative lengths that sum to {total} steps"
        )
    return sizes.astype(np.int64)


def _clip(value: float) -> float:
    """Clip to [0, 1] that keeps NaN, which min and max lose or keep depending on argument order."""
    return value if math.isnan(value) else min(max(value, 0.0), 1.0)


def _risk(name: str, value: float) -> float:
    if not math.isfinite(value):
        return math.nan
    if not 0.0 <= value <= 1.0:
        raise EvidenceError(f"{name}: got {value!r}, expected a risk in [0, 1]")
    return value


def _risks(name: str, values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise EvidenceError(f"{name}: got shape {array.shape}, expected [N]")
    finite = np.isfinite(array)
    outside = np.flatnonzero(finite & ((array < 0.0) | (array > 1.0)))
    if len(outside):
        raise EvidenceError(
            f"{name}: got {array[outside[0]]!r} at position {outside[0]} ({len(outside)} such values), "
            "expected risks in [0, 1]"
        )
    return np.where(finite, array, np.nan)
