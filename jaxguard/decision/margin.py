"""Raising a threshold into the gap between safe and unsafe scores.

A conformal threshold is the lowest that keeps its false-alert level on trajectories exchangeable with the
calibration set. Where a model separates safe from unsafe well, that is far below every unsafe score, and safe
trajectories of a new kind, slightly riskier than those of the calibration set, alert without need. Raising a
threshold never costs the level, only detections: so it is raised as far as the *validation* part shows that none
to speak of is lost, or, for those to whom a false alert is as bad as a missed one, to where F1 is best there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.conformal import ConformalError


def floor(value: float, safe: ArrayLike, unsafe: ArrayLike, early: ArrayLike, lost: float) -> float:
    """The highest threshold above ``value`` that costs at most ``lost`` of the detections and of the warnings.

    The k-th smallest unsafe score, k = floor(lost (n + 1)), is not detected at a new exchangeable unsafe trajectory
    with probability at most ``lost``. Net early warning is the share of unsafe trajectories that alert before their
    first hazard step, less the false-alert rate; it may fall by ``lost`` as well.

    Args:
        value: The conformal threshold; alerts are scores above it.
        safe: ``[n_safe]`` maxima of safe validation trajectories.
        unsafe: ``[n]`` maxima of unsafe ones.
        early: Maxima of those unsafe trajectories whose first hazard step is known, before it; 0 where it is the first.
        lost: Share in [0, 1); 0 raises nothing.

    Returns:
        An unsafe score above ``value`` and below 1 (no risk exceeds that); ``-inf`` where none may be the threshold.

    Raises:
        ConformalError: ``lost`` is not in [0, 1).
    """
    _check(lost)
    ranked, net = np.sort(np.asarray(unsafe, np.float64)), _net_warning(safe, early)
    allowed = math.floor(lost * (len(ranked) + 1))
    for candidate in ranked[:allowed][::-1]:
        if not candidate > value:  # NaN too
            break
        tied = int(np.searchsorted(ranked, candidate, side="right")) > allowed  # more would be lost than may be
        if candidate < 1 and not tied and net(float(candidate)) >= net(value) - lost:
            return float(candidate)
    return -math.inf


def best_f1(value: float, safe: ArrayLike, unsafe: ArrayLike, early: ArrayLike, lost: float) -> float:
    """The threshold above ``value`` with the best F1, where it costs at most ``lost`` of the net early warning.

    Args:
        value: The conformal threshold; alerts are scores above it.
        safe, unsafe, early, lost: As for :func:`floor`.

    Returns:
        A score above ``value`` and below 1, the lowest of equally good ones; ``-inf`` where none is better than that.

    Raises:
        ConformalError: ``lost`` is not in [0, 1).
    """
    _check(lost)
    harmless, ranked = (np.sort(np.asarray(x, np.float64)) for x in (safe, unsafe))
    net = _net_warning(safe, early)
    every = np.unique(np.concatenate([harmless, ranked]))
    candidates = np.concatenate([[value], every[(every > value) & (every < 1)]])
    missed = np.searchsorted(ranked, candidates, side="right")
    wrong = len(harmless) - np.searchsorted(harmless, candidates, side="right")
    hits = len(ranked) - missed
    f1 = 2 * hits / np.maximum(2 * hits + missed + wrong, 1)
    least = net(value) - lost
    allowed = np.array([net(float(candidate)) >= least for candidate in candidates])
    best = int(np.argmax(np.where(allowed, f1, -1.0)))
    return float(candidates[best]) if best else -math.inf


def _check(lost: float) -> None:
    if not 0 <= lost < 1:
        raise ConformalError(f"lost: got {lost!r}, expected a share in [0, 1)")


def _net_warning(safe: ArrayLike, early: ArrayLike) -> Callable[[float], float]:
    """The net early warning of a threshold; 0 of all where it is not known."""
    scores, warnings = np.asarray(safe, np.float64), np.asarray(early, np.float64)

    def net(threshold: float) -> float:
        if not len(warnings) or not len(scores):
            return 0.0
        return float((warnings > threshold).mean() - (scores > threshold).mean())

    return net
