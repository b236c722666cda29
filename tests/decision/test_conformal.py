"""Conformal thresholds: ranks, oracle, exact law, coverage, and how coverage fails when it should."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from crepes import ConformalRegressor
from scipy import stats

from jaxguard.decision.conformal import (
    ConformalError,
    Threshold,
    conformal_threshold,
    false_alert_band,
    group_thresholds,
    needed,
    observed_rate_band,
    rank,
    threshold_for,
)


@pytest.mark.parametrize("percent", range(1, 100))
def test_rank_is_exact_for_every_percentage(percent: int) -> None:
    alpha = percent / 100
    for n in [*range(1, 60), 99, 199, 999, 9_999]:
        exact = -((-(n + 1) * (100 - percent)) // 100)  # integer ceiling
        assert rank(n, alpha) == exact
        assert (rank(n, alpha) <= n) == (n >= needed(alpha))


@pytest.mark.parametrize(("n", "k"), [(9, 9), (19, 18), (29, 27), (39, 36), (99, 90), (999, 900)])
def test_rank_at_ten_percent(n: int, k: int) -> None:
    assert rank(n, 0.1) == k
    # A level that went through float arithmetic means the same.
    assert rank(n, 1 - 0.9) == k
    assert rank(n, np.float32(0.1)) in (k, k + 1)


def test_needed() -> None:
    assert [needed(a) for a in (0.5, 0.1, 0.05, 0.02, 0.01, 1 / 3, 0.3)] == [1, 9, 19, 49, 99, 2, 3]


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 1.5, math.nan, math.inf])
def test_levels_outside_are_refused(alpha: float) -> None:
    with pytest.raises(ConformalError, match="alpha"):
        rank(10, alpha)


def test_threshold_is_the_kth_smallest_and_strict() -> None:
    scores = np.random.default_rng(0).permutation(np.arange(1, 20) / 20)
    cut = conformal_threshold(scores, 0.1)
    assert cut == Threshold(18 / 20, 0.1, 19, 18, True)
    assert cut.crossed([0.9, 0.9 + 1e-12, math.nan, math.inf, 0.0]).tolist() == [False, True, True, True, False]


def test_too_few_names_what_it_needs() -> None:
    with pytest.raises(ConformalError, match=r"got 8 safe .*at least 9 for alpha = 0\.1"):
        conformal_threshold(np.linspace(0, 1, 8), 0.1)
    assert conformal_threshold(np.linspace(0, 1, 9), 0.1).k == 9


def test_paper_rule_clips_and_alerts_on_equality() -> None:
    cut = conformal_threshold([0.3, 0.1, 0.2], 0.1, paper_rule=True)
    assert (cut.value, cut.k, cut.strict) == (0.3, 3, False)
    assert cut.crossed([0.3, 0.29]).tolist() == [True, False]
    with pytest.raises(ConformalError, match="got 0 safe"):
        conformal_threshold([], 0.1, paper_rule=True)


@pytest.mark.parametrize("alpha", [0.01, 0.02, 0.05, 0.1, 0.2, 1 / 3, 0.5, 0.9])
@pytest.mark.parametrize("n", [9, 19, 20, 49, 99, 100, 137, 500])
def test_independent_library_agrees(n: int, alpha: float) -> None:
    if n < needed(alpha):
        with pytest.raises(ConformalError):
            conformal_threshold(np.arange(n), alpha)
        return
    scores = np.random.default_rng(n).random(n)
    # crepes' interval half-width at a confidence is the conformal quantile of the absolute residuals. It computes
    # the rank in floating point and lands one too high where (n + 1) alpha is whole; the nudge puts it right.
    confidence = 1 - alpha - 1e-12
    oracle = ConformalRegressor().fit(scores).predict_int(np.zeros(1), confidence=confidence)
    assert conformal_threshold(scores, alpha).value == pytest.approx(oracle[0, 1], abs=0)


def test_independent_p_values_agree() -> None:
    rng = np.random.default_rng(5)
    scores, fresh = rng.random(99), rng.random(2_000)
    p = (1 + (scores[None, :] >= fresh[:, None]).sum(axis=1)) / 100
    for alpha in (0.01, 0.05, 0.1, 0.25):
        assert conformal_threshold(scores, alpha).crossed(fresh).tolist() == (p <= alpha + 1e-12).tolist()


def coverage_holds(alert_counts: np.ndarray, tested: int, n: int, k: int) -> bool:
    """Does the spread of observed false alerts fit the exact beta-binomial law? (one-sided, too many)"""
    total = alert_counts.sum()
    trials = len(alert_counts)
    law = stats.betabinom(tested, n + 1 - k, k)
    # Sum of independent beta-binomials: normal limit with exact moments, at 4.5 standard deviations.
    bound = trials * law.mean() + 4.5 * math.sqrt(trials * law.var())
    return bool(total <= bound)


@pytest.mark.parametrize(("n", "alpha"), [(9, 0.1), (49, 0.05), (100, 0.1), (100, 0.02)])
def test_monte_carlo_coverage_and_negative_control(n: int, alpha: float) -> None:
    rng = np.random.default_rng(20260701)
    trials, tested, k = 1_500, 40, rank(n, alpha)
    scores = rng.beta(2, 5, size=(trials, n + tested))
    cuts = np.array([conformal_threshold(row[:n], alpha).value for row in scores])
    fresh = scores[:, n:]
    counts = (fresh > cuts[:, None]).sum(axis=1)
    assert coverage_holds(counts, tested, n, k)
    # The marginal level, exactly: one fresh trajectory per trial is Bernoulli((n + 1 - k) / (n + 1)).
    first = int((fresh[:, 0] > cuts).sum())
    exact = (n + 1 - k) / (n + 1)
    assert exact <= alpha
    assert stats.binomtest(first, trials, exact).pvalue > 1e-4
    # The whole law, not just its mean.
    observed = np.bincount(counts, minlength=tested + 1)
    expected = trials * stats.betabinom(tested, n + 1 - k, k).pmf(np.arange(tested + 1))
    split = int(np.searchsorted(np.cumsum(expected), trials / 2))
    low = int(observed[: split + 1].sum())
    assert stats.binomtest(low, trials, expected[: split + 1].sum() / trials).pvalue > 1e-4
    # Negative control: the same check must fail when test scores are not exchangeable with calibration.
    shifted = (np.clip(fresh * 1.3, 0, 1) > cuts[:, None]).sum(axis=1)
    assert not coverage_holds(shifted, tested, n, k)


def test_paper_rule_voids_the_guarantee_where_ours_refuses() -> None:
    rng = np.random.default_rng(3)
    draws = rng.random((4_000, 5))
    cuts = [conformal_threshold(row[:4], 0.1, paper_rule=True).value for row in draws]
    rate = float((draws[:, 4] >= cuts).mean())
    assert rate == pytest.approx(0.2, abs=0.03)  # n = 4: one in five, not one in ten


def test_ties_are_conservative_under_the_strict_rule_only() -> None:
    rng = np.random.default_rng(4)
    draws = rng.integers(0, 4, size=(3_000, 50)) / 4
    strict = [conformal_threshold(row[:49], 0.1).crossed(row[49:])[0] for row in draws]
    paper = [conformal_threshold(row[:49], 0.1, paper_rule=True).crossed(row[49:])[0] for row in draws]
    assert np.mean(strict) <= 0.1
    assert np.mean(paper) > 0.2
    same = conformal_threshold(np.full(50, 0.5), 0.1)
    assert not same.crossed([0.5])[0]


def test_nonfinite_maxima_use_up_the_budget() -> None:
    scores = np.arange(19) / 19
    scores[3] = math.nan
    cut = conformal_threshold(scores, 0.1)
    assert cut.value == scores[18]  # one held trajectory, so the k-th moves up by one place
    scores[[4, 5]] = math.inf
    with pytest.raises(ConformalError, match=r"3 of 19 .* at most 1"):
        conformal_threshold(scores, 0.1)


def test_band_is_the_beta_law() -> None:
    n, alpha = 99, 0.1
    band = false_alert_band(n, rank(n, alpha), 0.9)
    assert band.mean == pytest.approx(0.1)
    rates = np.array([1 - np.sort(u)[89] for u in np.random.default_rng(6).random((20_000, 99))])
    assert np.quantile(rates, [0.05, 0.95]) == pytest.approx([band.low, band.high], abs=0.004)
    assert false_alert_band(9, 9).mean == pytest.approx(0.1)


def test_observed_band_is_wider_and_tends_to_the_law() -> None:
    law, few, many = false_alert_band(99, 90), observed_rate_band(99, 90, 50), observed_rate_band(99, 90, 10**6)
    assert few.high > law.high
    assert (many.low, many.high) == pytest.approx((law.low, law.high), abs=1e-3)
    assert few.mean == pytest.approx(law.mean)
    with pytest.raises(ConformalError, match="tested"):
        observed_rate_band(99, 90, 0)


def test_groups_have_their_own_level_or_fall_back() -> None:
    rng = np.random.default_rng(7)
    keys = ["mail"] * 60 + ["files"] * 60 + ["rare"] * 5
    scores = np.concatenate([rng.random(60) * 0.3, 0.5 + rng.random(60) * 0.5, rng.random(5)])
    table, small = group_thresholds(scores, keys, 0.1)
    assert table["mail"] == conformal_threshold(scores[:60], 0.1)
    assert table["files"] == conformal_threshold(scores[60:120], 0.1)
    assert small == {"rare": 5}
    assert group_thresholds(scores, keys, 0.1, min_size=61)[0] == {}
    # Pooled, the group of high scores alerts far above its level; with its own threshold it does not.
    pooled = conformal_threshold(scores, 0.1)
    fresh = 0.5 + rng.random(5_000) * 0.5
    assert pooled.crossed(fresh).mean() > 0.15
    own = threshold_for("files", table, pooled)
    band = false_alert_band(60, rank(60, 0.1), 0.999)
    assert band.low < own.crossed(fresh).mean() < band.high
    assert threshold_for("rare", table, pooled) is pooled
    assert threshold_for(None, table, pooled) is pooled


def test_group_with_too_many_nonfinite_falls_back() -> None:
    scores = np.concatenate([np.arange(20) / 20, np.full(20, np.inf)])
    table, small = group_thresholds(scores, ["ok"] * 20 + ["broken"] * 20, 0.1)
    assert set(table) == {"ok"}
    assert small == {"broken": 20}
    with pytest.raises(ConformalError, match="got 2 keys"):
        group_thresholds(scores, ["a", "b"], 0.1)


def test_threshold_refuses_nonsense() -> None:
    with pytest.raises(ConformalError, match="finite"):
        Threshold(math.nan, 0.1, 9, 9)
    with pytest.raises(ConformalError, match="rank k = 10"):
        Threshold(0.5, 0.1, 9, 10)
    assert Fraction(1, 10) == 1 - Fraction(9, 10)
