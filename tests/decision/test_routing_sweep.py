"""The compiled sweep counts what a plain loop counts, to the last row."""

from __future__ import annotations

import numpy as np
import pytest

from jaxguard.decision.routing import RoutingError, shares
from jaxguard.decision.routing_sweep import _confusions, sweep
from jaxguard.types import Route


def rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    logits = (3 * rng.normal(size=(n, 3))).astype(np.float32)
    logits[::7] = logits[::7].round()  # ties of q, and of REFUSE with the others
    logits[::29, rng.integers(3)] = np.nan
    logits[::31, 0] = np.inf
    return logits, rng.integers(0, 3, n)


def by_loop(logits: np.ndarray, labels: np.ndarray, taus: np.ndarray) -> np.ndarray:
    found = shares(logits)
    out = np.zeros((len(taus), 3, 3), np.int64)
    for t, tau in enumerate(taus):
        for q, refused, scored, label in zip(found.q, found.refused, found.scored, labels, strict=True):
            route = Route.ASK if not scored else Route.REFUSE if refused else Route.EXECUTE if q >= tau else Route.ASK
            out[t, label, route] += 1
    return out


@pytest.mark.parametrize("n", [1, 2, 500, 1_024, 1_025])
def test_sweep_equals_a_loop_with_ties_of_q_and_tau(n: int) -> None:
    logits, labels = rows(n)
    q = shares(logits).q[shares(logits).scored]
    ends = np.clip(np.r_[q, np.nextafter(q, 0), np.nextafter(q, 1)], 0, 1)
    taus = np.random.default_rng(1).permutation(np.r_[0.0, 1.0, 0.5, 0.5, ends[:200]])
    confusion = sweep(logits, labels, taus)
    np.testing.assert_array_equal(confusion, by_loop(logits, labels, taus))
    assert (confusion.sum(axis=2) == np.bincount(labels, minlength=3)).all()
    assert (confusion[:, :, Route.REFUSE] == confusion[0, :, Route.REFUSE]).all()


def test_a_higher_tau_never_executes_more() -> None:
    logits, labels = rows(2_000)
    executed = sweep(logits, labels, np.linspace(0, 1, 500))[:, :, Route.EXECUTE]
    assert (np.diff(executed, axis=0) <= 0).all()
    assert (executed[0] > executed[-1]).all()


def test_nothing_to_count() -> None:
    assert sweep(np.empty((0, 3)), np.empty(0, int), [0.5]).sum() == 0
    assert sweep(*rows(10), []).shape == (0, 3, 3)


def test_subsets_of_about_one_size_share_a_compilation() -> None:
    sweep(*rows(1_300), np.linspace(0, 1, 37))
    before = _confusions._cache_size()
    for n, taus in ((1_025, 5), (1_500, 1_000), (2_048, 1_024)):
        sweep(*rows(n), np.linspace(0, 1, taus))
    assert _confusions._cache_size() == before


@pytest.mark.parametrize(
    ("labels", "taus", "message"),
    [
        ([0, 1], [0.5], r"labels: got int64 of shape \(2,\), expected integers of shape \[3\]"),
        ([0, 1, 3], [0.5], "labels: got 3"),
        ([0, 1, -1], [0.5], "labels: got -1"),
        ([0.0, 1.0, 2.0], [0.5], "labels: got float64"),
        ([0, 1, 2], [1.5], "tau: got 1.5"),
        ([0, 1, 2], 0.5, "taus: got shape"),
    ],
)
def test_bad_input_is_named(labels, taus, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        sweep(np.zeros((3, 3)), labels, taus)
