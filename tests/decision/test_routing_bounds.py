"""Exact bounds against their definition, and the certified tau against its promise."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from jaxguard.decision.routing import RoutingError, shares
from jaxguard.decision.routing_bounds import CannotCertify, certified_tau, lower_bound, needed_rows, upper_bound
from jaxguard.types import Route


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 59), (3, 100), (50, 100), (99, 100), (100, 100)])
@pytest.mark.parametrize("delta", [0.01, 0.05, 0.2])
def test_bounds_are_where_the_binomial_tail_is_delta(k: int, n: int, delta: float) -> None:
    high, low = upper_bound(k, n, delta), lower_bound(k, n, delta)
    assert low <= k / n <= high
    assert high == 1.0 if k == n else stats.binom.cdf(k, n, high) == pytest.approx(delta)
    assert low == 0.0 if k == 0 else stats.binom.sf(k - 1, n, low) == pytest.approx(delta)
    if 0 < k < n:
        assert high == pytest.approx(stats.beta.ppf(1 - delta, k + 1, n - k))
        assert low == pytest.approx(stats.beta.ppf(delta, k, n - k + 1))


@pytest.mark.parametrize(("k", "n"), [(0, 0), (-1, 5), (6, 5)])
def test_impossible_counts_are_refused(k: int, n: int) -> None:
    with pytest.raises(RoutingError, match="count: got"):
        upper_bound(k, n)


@pytest.mark.parametrize(
    ("limit", "delta", "n"), [(0.05, 0.05, 59), (0.01, 0.05, 299), (0.1, 0.1, 22), (0.05, 0.01, 90), (0.5, 0.5, 1)]
)
def test_needed_rows(limit: float, delta: float, n: int) -> None:
    assert needed_rows(limit, delta) == n
    assert (1 - limit) ** n <= delta * (1 + 1e-12)
    assert n == 1 or (1 - limit) ** (n - 1) > delta


def test_a_tiny_limit_needs_many_rows_and_no_memory() -> None:
    assert needed_rows(1e-9, 0.05) == pytest.approx(-np.log(0.05) * 1e9, rel=1e-6)


def ask_rows(margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits = np.c_[margins, np.zeros(len(margins)), np.full(len(margins), -99.0)]
    return logits, np.full(len(margins), Route.ASK)


def test_certified_tau_allows_as_many_errors_as_the_binomial_does() -> None:
    logits, labels = ask_rows(np.random.default_rng(0).normal(size=500))
    found = certified_tau(logits, labels, limit=0.1, delta=0.05)
    errors = int((shares(logits).routes(found.tau) == Route.EXECUTE).sum())
    assert errors == found.errors == found.allowed
    assert stats.binom.cdf(errors, 500, 0.1) <= 0.05 < stats.binom.cdf(errors + 1, 500, 0.1)
    assert upper_bound(errors, 500) <= 0.1 < upper_bound(errors + 1, 500)
    assert int((shares(logits).routes(found.low) == Route.EXECUTE).sum()) == errors + 1


def test_refused_rows_count_as_no_error() -> None:
    logits, labels = ask_rows(np.full(60, 3.0))
    with pytest.raises(CannotCertify):
        certified_tau(np.where(logits == 3.0, 90.0, logits), labels)
    logits[:, 2] = 99.0
    assert certified_tau(logits, labels).errors == 0


def test_too_few_rows_name_how_many_it_takes() -> None:
    with pytest.raises(CannotCertify, match=r"got 58 ASK rows, expected at least 59 for UAR <= 0.05 with .* 0.95"):
        certified_tau(*ask_rows(np.full(58, -3.0)))
    assert certified_tau(*ask_rows(np.full(59, -3.0))).errors == 0


def test_rows_that_always_execute_are_named() -> None:
    with pytest.raises(CannotCertify, match="50 of 100 ASK rows execute at every tau, expected at most 1"):
        certified_tau(*ask_rows(np.r_[np.full(50, 90.0), np.full(50, -3.0)]))


@pytest.mark.parametrize("name", ["limit", "delta"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, np.nan])
def test_levels_outside_are_refused(name: str, value: float) -> None:
    with pytest.raises(RoutingError, match=f"{name}: got"):
        certified_tau(*ask_rows(np.zeros(100)), **{name: value})


@pytest.mark.parametrize(
    ("n", "limit", "delta", "digits"), [(150, 0.1, 0.1, 9), (300, 0.05, 0.05, 9), (150, 0.1, 0.1, 1)]
)
def test_the_limit_is_violated_no_more_often_than_promised(n: int, limit: float, delta: float, digits: int) -> None:
    """Margins of ASK rows are normal, so that UAR at a tau is known; with one digit many rows share a q."""
    rng, runs, violated = np.random.default_rng(7), 800, 0
    for _ in range(runs):
        tau = certified_tau(*ask_rows(rng.normal(size=n).round(digits)), limit=limit, delta=delta).tau
        edge = np.log(tau / (1 - tau))
        # A rounded margin of m or more is an unrounded one of m - half a digit or more.
        step = 10.0**-digits
        violated += stats.norm.sf(np.ceil(edge / step) * step - step / 2) > limit
    allowed = delta + 3 * np.sqrt(delta * (1 - delta) / runs)
    assert violated / runs <= allowed
    assert violated > 0  # a rule that never errs would be needlessly strict
