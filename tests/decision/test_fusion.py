"""Fusion is fitted where there is something to learn, left alone where there is not, and never on calibration data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from jaxguard.decision.evidence import EvidenceError, FusionParams, evidence, trajectory_max
from jaxguard.decision.fusion import DEFAULT_FUSION, fit_fusion


def make(n: int, hazard_signal: float, prefix_signal: float, seed: int = 0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 15, n)
    unsafe = np.arange(n) % 2 == 0
    label = np.repeat(unsafe, lengths)
    hazard = np.clip(rng.random(lengths.sum()) * 0.5 + hazard_signal * label, 0, 1)
    prefix = np.clip(rng.random(lengths.sum()) * 0.5 + prefix_signal * label, 0, 1)
    return hazard, prefix, lengths, unsafe


def fit(data, **settings):
    ids = [f"f{i}" for i in range(len(data[3]))]
    return fit_fusion(*data, ids=ids, calibration_ids=["c1", "c2"], **settings)


def test_finds_the_head_that_carries_the_signal() -> None:
    prefix_only = fit(make(400, 0.0, 0.1))
    assert prefix_only.fitted
    assert prefix_only.params.w_hazard < max(prefix_only.params.w_ema, prefix_only.params.w_win)
    assert prefix_only.value > prefix_only.default_value + 0.03
    hazard_only = fit(make(400, 0.15, 0.0))
    assert hazard_only.params.w_hazard == 1.0
    assert hazard_only.params.w_ema + hazard_only.params.w_win < 1.0


def test_reported_value_is_what_an_independent_auroc_says() -> None:
    data = make(300, 0.05, 0.05)
    result = fit(data)
    maxima = trajectory_max(evidence(*data[:3], result.params).fused, data[2])
    assert result.value == pytest.approx(roc_auc_score(data[3], maxima), abs=1e-12)
    assert result.best_value - 1e-3 <= result.value <= result.best_value
    assert (result.safe, result.unsafe) == (150, 150)


def test_ties_go_to_the_defaults() -> None:
    separable = make(200, 0.5, 0.5)
    result = fit(separable)
    assert result.value == 1.0
    assert result.params == DEFAULT_FUSION
    nothing = (np.full(90, 0.5), np.full(90, 0.5), np.full(90, 1), np.arange(90) % 2 == 0)
    assert fit(nothing).params == DEFAULT_FUSION
    assert fit(nothing).value == 0.5


def test_small_sets_keep_the_defaults_and_say_so() -> None:
    for data in (make(14, 0.0, 0.3), make(18, 0.0, 0.3)):
        result = fit(data)
        assert not result.fitted
        assert result.params == DEFAULT_FUSION
        assert result.value == result.default_value
    one_class = make(60, 0.1, 0.1)
    result = fit((*one_class[:3], np.zeros(60, dtype=bool)))
    assert not result.fitted
    assert math.isnan(result.value)


def test_deterministic() -> None:
    data = make(120, 0.02, 0.03, seed=9)
    assert fit(data) == fit(data)


def test_splits_must_be_disjoint() -> None:
    data = make(40, 0.1, 0.1)
    ids = [f"f{i}" for i in range(40)]
    with pytest.raises(EvidenceError, match=r"1 trajectories .*'f3'.*disjoint"):
        fit_fusion(*data, ids=ids, calibration_ids={"f3"})
    with pytest.raises(EvidenceError, match="1 repeat"):
        fit_fusion(*data, ids=[*ids[:-1], "f0"], calibration_ids=())
    with pytest.raises(EvidenceError, match="got 39, 40, 40"):
        fit_fusion(*data, ids=ids[:-1], calibration_ids=())


def test_zero_step_trajectories_take_part_with_score_zero() -> None:
    hazard, prefix, lengths, unsafe = make(100, 0.2, 0.2)
    lengths = np.concatenate([lengths, np.zeros(5, dtype=int)])
    unsafe = np.concatenate([unsafe, np.zeros(5, dtype=bool)])
    result = fit((hazard, prefix, lengths, unsafe))
    assert result.safe == 55
    assert isinstance(result.params, FusionParams)


def test_ties_are_broken_by_what_is_known_before_the_hazard() -> None:
    """The hazard head is perfect, and the prefix head warns two steps ahead: the fusion must let it speak."""
    rng = np.random.default_rng(0)
    lengths, unsafe = np.full(200, 8), np.arange(200) % 2 == 0
    first = np.where(unsafe, 6, -1)
    hazard, prefix = rng.random(1600) * 0.3, rng.random(1600) * 0.3
    at = np.flatnonzero(unsafe) * 8
    hazard[at + 6] = 0.95
    for ahead in (1, 2):
        prefix[at + 6 - ahead] = 0.9
    blind, timely = fit((hazard, prefix, lengths, unsafe)), fit((hazard, prefix, lengths, unsafe), first_hazard=first)
    assert blind.value == timely.value == 1.0
    assert blind.timeliness is None
    fused = evidence(hazard, prefix, lengths, timely.params).fused.reshape(200, 8)
    scores = np.r_[fused[~unsafe].max(axis=1), fused[unsafe, :6].max(axis=1)]
    assert timely.timeliness == pytest.approx(roc_auc_score(np.arange(200) >= 100, scores), abs=1e-12)
    before = evidence(hazard, prefix, lengths, blind.params).fused.reshape(200, 8)
    blindly = roc_auc_score(np.arange(200) >= 100, np.r_[before[~unsafe].max(axis=1), before[unsafe, :6].max(axis=1)])
    assert timely.timeliness > 0.99
    assert timely.timeliness >= blindly
    assert fit((hazard, prefix, lengths, unsafe), first_hazard=np.where(unsafe, 0, -1)).timeliness is None


def test_a_tolerance_trades_ranking_for_warnings() -> None:
    """The prefix head warns early and takes some safe runs for unsafe, which the hazard head never does."""
    lengths, unsafe = np.full(200, 8), np.arange(200) % 2 == 0
    first = np.where(unsafe, 6, -1)
    rng = np.random.default_rng(0)
    hazard, prefix = rng.random(1600) * 0.7, rng.random(1600) * 0.1
    at = np.flatnonzero(unsafe) * 8
    hazard[at + 6] = 0.9
    prefix[at + 4] = prefix[at + 5] = 0.8
    for run in np.flatnonzero(~unsafe)[:4]:
        prefix[run * 8 : run * 8 + 8] = 0.99
    strict, loose = (fit((hazard, prefix, lengths, unsafe), first_hazard=first, tolerance=t) for t in (0.001, 0.05))
    assert strict.best_value == loose.best_value
    assert strict.best_value - 0.001 <= strict.value
    assert strict.best_value - 0.05 <= loose.value < strict.value
    assert loose.timeliness > strict.timeliness + 0.05
