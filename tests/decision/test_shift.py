"""The detector stays quiet where nothing shifts, as often as promised, and speaks up where something does."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxguard.decision.shift import ShiftDetector, ShiftError


def watch(calibration: np.ndarray, stream: np.ndarray, delta: float = 0.05, seed: int = 0) -> ShiftDetector:
    detector = ShiftDetector(calibration, delta, seed)
    for score in stream:
        detector.update(score)
    return detector


def test_false_alarms_are_as_rare_as_promised() -> None:
    rng = np.random.default_rng(0)
    alarms = [watch(rng.random(50), rng.random(300), 0.2, seed).alarm_at is not None for seed in range(200)]
    assert np.mean(alarms) <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / 200)


def test_capital_is_a_martingale() -> None:
    """Its mean stays 1: an estimate over many streams, each short so that the mean is not ruled by rare fortunes."""
    rng = np.random.default_rng(1)
    capital = [10 ** watch(rng.random(20), rng.random(10), seed=seed).evidence for seed in range(2000)]
    assert abs(np.mean(capital) - 1) < 4 * np.std(capital) / math.sqrt(len(capital))


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_a_shift_either_way_is_found(direction: float) -> None:
    rng = np.random.default_rng(2)
    stream = np.r_[rng.normal(size=100), rng.normal(size=200) + 1.5 * direction]
    detector = watch(rng.normal(size=200), stream, 0.01)
    assert detector.alarm_at is not None
    assert 100 <= detector.alarm_at < 180
    assert detector.evidence > 2
    assert detector.seen == 300


def test_ties_are_no_shift() -> None:
    assert watch(np.zeros(100), np.zeros(300), 0.01).alarm_at is None


def test_scores_that_are_not_finite_rank_above_all() -> None:
    one, other = watch(np.zeros(10), np.array([np.nan])), watch(np.zeros(10), np.array([np.inf]))
    assert one.evidence == other.evidence == watch(np.zeros(10), np.array([5.0])).evidence


def test_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ShiftError, match="calibration: got no score"):
        ShiftDetector([])
    with pytest.raises(ShiftError, match=r"delta: got 1\.0"):
        ShiftDetector([0.1], 1.0)
