"""Thresholds elsewhere: rates, density ratios, weighted thresholds, local draws, and the alarm."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxguard.decision.conformal import conformal_threshold
from jaxguard.evaluation.transfer import (
    Place,
    TransferError,
    density_ratio,
    rates,
    render_transfer,
    transfer,
    weighted_thresholds,
)


def place(n: int, seed: int, shift: float, unsafe: float = 0.3, features: float = 0.0) -> Place:
    """Safe maxima around 0.3 + shift, unsafe ones 0.4 higher; features move by ``features``."""
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < unsafe
    maxima = np.clip(0.3 + shift + 0.4 * labels + 0.08 * rng.normal(size=n), 0, 1)
    return Place(maxima, labels, [f"g{i // 2}" for i in range(n)], rng.normal(size=(n, 5)) + features)


SAFE = place(400, 0, 0.0, unsafe=0.0)


def test_rates() -> None:
    alert, unsafe = np.array([1, 1, 0, 0, 1], bool), np.array([1, 0, 1, 0, 1], bool)
    assert rates(alert, unsafe) == (0.5, 2 / 3, 2 * 2 / (2 + 1 + 3))
    assert math.isnan(rates(alert, ~np.zeros(5, bool))[0])
    assert all(math.isnan(v) for v in rates(alert, np.zeros(5, bool))[1:])


def test_equal_weights_give_the_conformal_threshold() -> None:
    for n in (19, 20, 57, 400):
        for alpha in (0.05, 0.1, 0.3):
            maxima = SAFE.maxima[:n]
            found = weighted_thresholds(maxima, np.ones(n), np.ones(3), alpha)
            np.testing.assert_array_equal(found, conformal_threshold(maxima, alpha).value)
    assert (weighted_thresholds(SAFE.maxima[:18], np.ones(18), np.ones(1), 0.05) == math.inf).all()


def test_weights_move_the_threshold_to_where_they_are() -> None:
    maxima = np.arange(100) / 100
    high = weighted_thresholds(maxima, np.where(maxima > 0.5, 10.0, 0.1), np.ones(1), 0.1)[0]
    low = weighted_thresholds(maxima, np.where(maxima > 0.5, 0.1, 10.0), np.ones(1), 0.1)[0]
    assert low < 0.5 < 0.9 < high
    heavy = weighted_thresholds(maxima, np.ones(100), np.array([1.0, 50.0]), 0.1)
    assert heavy.tolist() == [0.9, math.inf]  # it alone carries more than alpha


def test_weighted_thresholds_hold_their_level_under_a_known_shift() -> None:
    """Scores depend on one feature, whose distribution shifts: unweighted thresholds alert too often."""
    rng = np.random.default_rng(5)
    plain, weighted = [], []
    for _ in range(60):
        x, there = rng.normal(size=300), rng.normal(size=300) + 1.0
        score, score_there = (x + 0.3 * rng.normal(size=300), there + 0.3 * rng.normal(size=300))
        ratio = [np.exp(v - 0.5) for v in (x, there)]  # of N(1, 1) to N(0, 1)
        plain.append((score_there > conformal_threshold(score, 0.1).value).mean())
        weighted.append((score_there > weighted_thresholds(score, *ratio, 0.1)).mean())
    assert np.mean(plain) > 0.3
    assert np.mean(weighted) == pytest.approx(0.1, abs=0.03)


def test_density_ratio_is_higher_where_the_target_is() -> None:
    rng = np.random.default_rng(1)
    source, target = rng.normal(size=(800, 3)), rng.normal((1.0, 0.0, 0.0), size=(600, 3))
    of_source, of_target = density_ratio(source, target, 0)
    assert np.corrcoef(np.log(of_source), source[:, 0])[0, 1] > 0.9
    assert np.median(of_target) > 1.3 * np.median(of_source)
    assert (of_source > 0).all()


def test_where_nothing_shifts_every_threshold_keeps_its_level() -> None:
    found = transfer(SAFE, place(800, 1, 0.0), own=None, alpha=0.1, seed=3)
    assert [row.name for row in found.rows] == [
        "own", "weighted", "25 local safe", "50 local safe", "100 local safe",
        "25 of few groups", "50 of few groups", "100 of few groups",
    ]  # fmt: skip
    for row in found.rows:
        assert row.fpr == pytest.approx(0.1, abs=0.04)
        assert row.sr > 0.95
    assert found.alarm == math.inf
    assert found.auroc > 0.99
    labels = place(800, 1, 0.0).unsafe
    assert (found.safe, found.unsafe) == ((~labels).sum(), labels.sum())


def test_a_shift_voids_the_own_threshold_and_not_the_local_ones() -> None:
    found = transfer(SAFE, place(800, 1, 0.2, features=9.0), own=None, alpha=0.1, seed=3)
    rows = {row.name: row for row in found.rows}
    assert rows["own"].fpr > 0.8
    assert rows["weighted"].fpr == 1.0  # held: nothing in the calibration set is like them
    assert rows["weighted"].note == "100% have no threshold"
    for n in (25, 50, 100):
        row = rows[f"{n} local safe"]
        assert row.fpr == pytest.approx(0.1, abs=0.03)
        assert row.fpr_range is not None
        assert row.band is not None
        assert row.band[0] < row.fpr_range[0] < row.fpr < row.fpr_range[1] < row.band[1] + 0.03
    assert found.alarm < 60
    text = render_transfer(found)
    assert "own" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_few_groups_say_little_about_others() -> None:
    """Scores that depend on the group: a random sample keeps the level, groups as a whole do not show all there is."""
    rng = np.random.default_rng(2)
    group = np.repeat(np.arange(20), 40)
    unsafe = rng.random(800) < 0.2
    maxima = 0.3 + 0.2 * rng.random(20)[group] + 0.02 * rng.normal(size=800) + 0.4 * unsafe
    there = Place(maxima, unsafe, [f"g{i}" for i in group], rng.normal(size=(800, 5)))
    rows = {row.name: row for row in transfer(SAFE, there, own=None, alpha=0.1, seed=3).rows}
    sampled, known = rows["50 local safe"], rows["50 of few groups"]
    assert sampled.fpr == pytest.approx(0.1, abs=0.02)
    assert known.fpr > 0.2
    assert known.band is None
    assert sampled.band is not None


def test_a_raised_threshold_has_a_row_of_its_own() -> None:
    found = transfer(SAFE, place(800, 1, 0.1), own=0.55, alpha=0.1, seed=3)
    own, raised = found.rows[:2]
    assert raised.name == "own, raised"
    assert raised.fpr < own.fpr


def test_too_few_trajectories() -> None:
    with pytest.raises(TransferError, match="got 30 safe and 0 unsafe"):
        transfer(SAFE, place(30, 1, 0.0, unsafe=0.0), own=None, alpha=0.1, seed=3)
    notes = {row.name: row.note for row in transfer(SAFE, place(60, 1, 0.0), own=None, alpha=0.02, seed=3).rows}
    assert notes["25 local safe"] == "too few: 49 needed"
    assert notes["100 local safe"].startswith("too few: ")
    assert notes["own"] == ""
