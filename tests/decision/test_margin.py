"""Raising a threshold into the gap: what it may cost, on numbers small enough to check by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxguard.decision.conformal import ConformalError, Threshold
from jaxguard.decision.margin import best_f1, floor

SAFE = np.linspace(0.0, 0.2, 50)
UNSAFE = np.linspace(0.6, 0.99, 99)


def test_a_wide_gap_is_used_up_to_the_share_of_detections_that_may_be_lost() -> None:
    # k = 2 of 99: the second smallest unsafe score, itself no longer detected.
    assert floor(0.1, SAFE, UNSAFE, [], 0.02) == np.sort(UNSAFE)[1]
    assert floor(0.1, SAFE, UNSAFE, [], 0.0) == -np.inf


def test_too_few_unsafe_trajectories_show_nothing() -> None:
    assert floor(0.1, SAFE, UNSAFE[:48], [], 0.02) == -np.inf  # k = 0
    assert floor(0.1, SAFE, UNSAFE[:49], [], 0.02) == UNSAFE[0]
    assert floor(0.1, SAFE, [], [], 0.5) == -np.inf


def test_equal_scores_are_lost_together() -> None:
    tied = np.repeat([0.6, 0.9], [3, 96])
    assert floor(0.1, SAFE, tied, [], 0.02) == -np.inf  # two may be lost, three score 0.6
    assert floor(0.1, SAFE, tied, [], 0.03) == 0.6
    assert floor(0.1, SAFE, tied, [], 0.5) == 0.6


def test_nothing_is_raised_to_what_no_risk_exceeds() -> None:
    assert floor(0.1, SAFE, [1.0], [], 0.5) == -np.inf
    assert floor(0.1, SAFE, [0.5, 1.0, np.inf], [], 0.75) == 0.5


def test_never_lowers() -> None:
    assert floor(0.995, SAFE, UNSAFE, [], 0.5) == -np.inf
    assert floor(0.9, SAFE, [*UNSAFE, np.nan, np.inf], [], 0.02) == -np.inf


def test_early_warnings_are_not_given_up() -> None:
    # Every unsafe trajectory warns at 0.4 before its hazard, and no safe one does: raising would silence them all.
    assert floor(0.3, SAFE, UNSAFE, np.full(99, 0.4), 0.02) == -np.inf
    # As many safe trajectories score 0.4 as unsafe ones warn: those are no warnings but false alerts.
    safe = np.full(50, 0.4)
    assert floor(0.3, safe, UNSAFE, np.full(99, 0.4), 0.02) == np.sort(UNSAFE)[1]


def test_the_highest_candidate_that_keeps_the_warnings_wins() -> None:
    warnings = np.full(99, 0.605)  # between the first two unsafe scores and the rest of them
    assert UNSAFE[1] < 0.605 < UNSAFE[2]
    assert floor(0.1, SAFE * 0, UNSAFE, warnings, 0.10) == UNSAFE[1]


def f1(threshold: float, safe: np.ndarray, unsafe: np.ndarray) -> float:
    hits, wrong = int((unsafe > threshold).sum()), int((safe > threshold).sum())
    return 2 * hits / (hits + len(unsafe) + wrong)


def test_best_f1_is_the_best_of_all_thresholds_above_the_conformal_one() -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        safe, unsafe = rng.normal(0.3, 0.15, 60).clip(0, 1), rng.normal(0.6, 0.15, 20).clip(0, 1)
        value = float(np.quantile(safe, 0.9))
        found = max(value, best_f1(value, safe, unsafe, [], 0.0))
        every = [t for t in np.linspace(0, 1, 2001) if t >= value]
        assert f1(found, safe, unsafe) >= max(f1(t, safe, unsafe) for t in every)


def test_best_f1_by_hand() -> None:
    # Above 0.5 there are three false alerts and four hits; above 0.7 none and three.
    safe, unsafe = np.array([0.1, 0.2, 0.6, 0.65, 0.7]), np.array([0.55, 0.8, 0.9, 0.95])
    assert best_f1(0.5, safe, unsafe, [], 0.0) == 0.7
    assert best_f1(0.7, safe, unsafe, [], 0.0) == -np.inf  # it is the best already
    assert best_f1(0.75, safe, unsafe, [], 0.0) == -np.inf  # never lowers
    assert best_f1(0.5, safe, [0.55, 1.0, np.inf], [], 0.0) == 0.7
    assert best_f1(0.5, [*safe, np.nan], unsafe, [], 0.0) == 0.7  # one that is held whatever the threshold
    assert best_f1(0.5, safe, [], [], 0.0) == -np.inf
    assert best_f1(0.5, [], unsafe, [], 0.0) == -np.inf


def test_best_f1_gives_up_no_more_early_warning_than_it_may() -> None:
    safe, unsafe = np.array([0.1, 0.2, 0.6, 0.65, 0.7]), np.array([0.8, 0.9, 0.95, 0.97])
    early = np.array([0.0, 0.62, 0.62, 0.62])  # net 0.75 - 0.6 above 0.5, 0.75 - 0.4 above 0.6, and 0 from 0.7 on
    assert best_f1(0.5, safe, unsafe, early, 0.0) == 0.6
    assert best_f1(0.5, safe, unsafe, early, 0.16) == 0.7


@pytest.mark.parametrize("lost", [-0.1, 1.0, np.nan])
def test_refuses_a_share_outside_its_range(lost: float) -> None:
    with pytest.raises(ConformalError, match=r"lost: got .*expected a share in \[0, 1\)"):
        floor(0.1, SAFE, UNSAFE, [], lost)
    with pytest.raises(ConformalError, match=r"lost: got .*expected a share in \[0, 1\)"):
        best_f1(0.1, SAFE, UNSAFE, [], lost)


def test_share_lost_holds_for_exchangeable_trajectories() -> None:
    rng = np.random.default_rng(0)
    lost = []
    for _ in range(400):
        unsafe, new = rng.normal(size=60), rng.normal(size=200)
        threshold = floor(-9.0, [], unsafe, [], 0.05)  # k = 3 of 60: 3 / 61 of new ones at or below, on average
        lost.append((new <= threshold).mean())
    assert abs(np.mean(lost) - 3 / 61) < 4 * np.std(lost) / np.sqrt(len(lost))


def test_a_raised_threshold_remembers_where_it_comes_from() -> None:
    threshold = Threshold(0.1, 0.1, 99, 90)
    higher = threshold.at_least(0.6)
    assert (higher.value, higher.raised_from, higher.k) == (0.6, 0.1, 90)
    assert threshold.at_least(0.05) is threshold
    with pytest.raises(ConformalError, match="expected more than"):
        Threshold(0.1, 0.1, 99, 90, raised_from=0.1)
