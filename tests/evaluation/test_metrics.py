"""Metrics against scikit-learn and by hand; weights mean repetition; undefined is NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn import metrics as oracle

from jaxguard.evaluation.metrics import count_decisions, detection, ranking, roc_curve, tabulate

ONE = np.ones((1, 1))


def ones(n: int) -> np.ndarray:
    return np.ones((1, n))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("levels", [3, 17, 10**6])
def test_oracle(seed: int, levels: int) -> None:
    rng = np.random.default_rng(seed)
    n = 200
    unsafe = rng.random(n) < 0.3
    score = np.round((rng.random(n) + unsafe * 0.3) * levels) / levels
    alert = score > 0.6
    got = {k: float(v[0]) for k, v in (detection(ones(n), unsafe, alert) | ranking(ones(n), unsafe, score)).items()}
    assert got["f1"] == pytest.approx(oracle.f1_score(unsafe, alert), abs=1e-12)
    assert got["precision"] == pytest.approx(oracle.precision_score(unsafe, alert), abs=1e-12)
    assert got["sr"] == pytest.approx(oracle.recall_score(unsafe, alert), abs=1e-12)
    assert got["fpr"] == pytest.approx(oracle.recall_score(~unsafe, alert), abs=1e-12)
    assert got["auroc"] == pytest.approx(oracle.roc_auc_score(unsafe, score), abs=1e-12)
    assert got["auprc"] == pytest.approx(oracle.average_precision_score(unsafe, score), abs=1e-12)
    fpr, tpr = roc_curve(unsafe, score)
    assert np.trapezoid(tpr, fpr) == pytest.approx(got["auroc"], abs=1e-12)


def test_weights_mean_repetition() -> None:
    rng = np.random.default_rng(3)
    unsafe, score = rng.random(40) < 0.5, np.round(rng.random(40), 1)
    alert = score > 0.4
    weights = rng.integers(0, 4, size=(5, 40)).astype(float)
    many = detection(weights, unsafe, alert) | ranking(weights, unsafe, score)
    for row, counts in enumerate(weights.astype(int)):
        u, s, a = np.repeat(unsafe, counts), np.repeat(score, counts), np.repeat(alert, counts)
        one = detection(ones(len(u)), u, a) | ranking(ones(len(u)), u, s)
        for name, values in many.items():
            assert values[row] == pytest.approx(one[name][0], abs=1e-12), name


def test_undefined_is_nan() -> None:
    safe = np.array([False, False])
    none = np.array([False, False])
    got = detection(ones(2), safe, none) | ranking(ones(2), safe, np.array([0.1, 0.2]))
    assert got["fpr"][0] == 0.0
    assert all(math.isnan(got[k][0]) for k in ("sr", "f1", "precision", "auroc", "auprc"))
    alerted = detection(ones(2), safe, np.array([True, False]))
    assert alerted["fpr"][0] == 0.5
    assert all(math.isnan(alerted[k][0]) for k in ("sr", "f1", "precision"))
    unsafe_missed = detection(ones(2), np.array([True, False]), none)
    assert unsafe_missed["f1"][0] == 0.0
    assert unsafe_missed["sr"][0] == 0.0
    assert math.isnan(unsafe_missed["precision"][0])
    no_safe = detection(ones(1), np.array([True]), np.array([True]))
    assert no_safe["sr"][0] == 1.0
    assert math.isnan(no_safe["f1"][0])
    assert math.isnan(no_safe["precision"][0])
    empty = np.empty(0)
    assert math.isnan(ranking(np.ones((1, 0)), empty.astype(bool), empty)["auroc"][0])


def test_infinite_scores_rank_on_top() -> None:
    unsafe = np.array([True, False, False])
    assert ranking(ones(3), unsafe, np.array([math.inf, 0.9, 0.1]))["auroc"][0] == 1.0
    assert ranking(ones(3), unsafe, np.array([math.inf, math.inf, 0.1]))["auroc"][0] == 0.75


def test_table_leaves_unlabelled_out_and_supervises_the_right_steps(world) -> None:
    table = tabulate(world.scored)
    assert len(table) == sum(s.unsafe is not None for s in world.scored) < len(world.scored)
    by_id = {s.id: s for s in world.scored}
    expected_steps = 0
    for trajectory in world.trajectories:
        if trajectory.unsafe is None or not trajectory.timing:
            continue
        expected_steps += len(trajectory) if trajectory.first_hazard is None else trajectory.first_hazard + 1
    assert len(table.step_hazard) == expected_steps
    assert table.step_label.sum() == table.timed.sum()
    for i in (0, 5, 100):
        record = by_id[table.ids[i]]
        own = table.step_hazard[table.step_owner == i]
        assert own.tolist() == record.hazard[: len(own)].tolist()
        assert table.max_fused[i] == (record.fused.max() if len(record) else 0.0)
    empty = table.steps == 0
    assert empty.any()
    assert not table.alert[empty].any()
    assert (table.max_fused[empty] == 0).all()


def test_decision_counts(world) -> None:
    counts = count_decisions(world.scored)
    assert counts["pass"] + counts["hold"] + counts["block"] == sum(len(s) for s in world.scored)
    assert counts["block"] > 0
    assert counts["nonfinite"] == 0
