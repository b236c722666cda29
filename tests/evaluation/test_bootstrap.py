"""Intervals: right width for independent and for clustered data, seeded, honest about undefined resamples."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from jaxguard.evaluation.bootstrap import bootstrap
from jaxguard.evaluation.metrics import EvaluationError, detection, ranking


def mean_of(values: np.ndarray):
    return lambda w: {"mean": (w @ values) / w.sum(axis=1)}


def test_width_matches_theory_for_independent_data() -> None:
    values = np.random.default_rng(0).normal(size=900)
    got = bootstrap(mean_of(values), [str(i) for i in range(900)], resamples=2_000)["mean"]
    half = 1.96 * values.std() / 30
    assert got.value == pytest.approx(values.mean())
    assert (got.low, got.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.012)
    assert got.defined == 2_000


def test_clusters_widen_the_interval() -> None:
    values = np.repeat(np.random.default_rng(1).normal(size=90), 10)
    alone = bootstrap(mean_of(values), [str(i) for i in range(900)])["mean"]
    together = bootstrap(mean_of(values), [str(i // 10) for i in range(900)])["mean"]
    assert (together.high - together.low) / (alone.high - alone.low) == pytest.approx(math.sqrt(10), rel=0.15)


def test_intervals_cover() -> None:
    rng = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        effects = np.repeat(rng.normal(size=60), 4)
        values = effects + rng.normal(size=240)
        got = bootstrap(mean_of(values), [str(i // 4) for i in range(240)], resamples=300, seed=trial)["mean"]
        hits += got.low <= 0.0 <= got.high
    assert 178 <= hits <= 199  # 95 % of 200 is 190; four standard deviations either way


def test_seed_decides_and_chunks_do_not() -> None:
    values = np.random.default_rng(3).normal(size=50)
    keys = [str(i) for i in range(50)]
    a, b = bootstrap(mean_of(values), keys), bootstrap(mean_of(values), keys)
    assert a == b
    assert a != bootstrap(mean_of(values), keys, seed=1)
    chunked = bootstrap(mean_of(values), keys, width=400_000)  # ten rows at a time
    assert (chunked["mean"].low, chunked["mean"].high) == pytest.approx((a["mean"].low, a["mean"].high), abs=1e-12)


def test_undefined_resamples_are_left_out_and_counted() -> None:
    unsafe = np.array([True, *[False] * 3])
    alert = np.array([True, False, False, False])
    got = bootstrap(lambda w: detection(w, unsafe, alert), list("abcd"))
    # P(the one unsafe trajectory is drawn) = 1 - (3/4)^4 = 0.684
    assert got["sr"].defined == pytest.approx(684, abs=60)
    assert (got["sr"].low, got["sr"].high) == (1.0, 1.0)
    all_unsafe = bootstrap(lambda w: detection(w, np.ones(4, bool), alert), list("abcd"))
    assert math.isnan(all_unsafe["fpr"].value)
    assert math.isnan(all_unsafe["fpr"].low)
    assert all_unsafe["fpr"].defined == 0


def test_one_group_or_no_resamples_has_no_interval() -> None:
    values = np.arange(5.0)
    for got in (
        bootstrap(mean_of(values), ["same"] * 5),
        bootstrap(mean_of(values), list("abcde"), resamples=0),
    ):
        assert got["mean"].value == 2.0
        assert math.isnan(got["mean"].low)
    with pytest.raises(EvaluationError, match="level"):
        bootstrap(mean_of(values), list("abcde"), level=1.0)


def test_thousand_resamples_of_five_thousand_take_seconds() -> None:
    rng = np.random.default_rng(4)
    unsafe, score = rng.random(5_000) < 0.4, rng.random(5_000)
    start = time.process_time()
    bootstrap(
        lambda w: detection(w, unsafe, score > 0.9) | ranking(w, unsafe, score), [str(i // 3) for i in range(5_000)]
    )
    assert time.process_time() - start < 8.0
