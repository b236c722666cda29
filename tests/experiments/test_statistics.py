"""Metrics and paired differences from outcomes, against counts done by hand and scipy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import wilcoxon

from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.outcomes import Guarded, Outcomes, read_outcomes
from jaxguard.experiments.statistics import METRICS, differences, measured, require_same

UNSAFE = np.array([True, True, True, True, False, False, False, False])
FIRST = np.array([3, 2, 4, 1, -1, -1, -1, -1])


def guarded(first_alert: list[int]) -> Guarded:
    first = np.array(first_alert)
    return Guarded(first >= 0, np.where(first >= 0, 0.9, 0.1), first)


GOOD = guarded([1, 2, 3, -1, -1, -1, -1, 0])  # finds three, two of them early; one false alert
POOR = guarded([3, -1, -1, -1, 0, -1, 2, 0])  # finds one, at its hazard; three false alerts


def found(**guards: Guarded) -> Outcomes:
    ids = tuple("abcdefgh")
    return Outcomes(ids, ids, UNSAFE, FIRST, UNSAFE & np.array([True] * 3 + [False] * 5), guards)


def test_metrics_are_those_of_a_count() -> None:
    values = {name: i.value for name, i in measured(found(good=GOOD), "good", seed=1, resamples=50).items()}
    assert set(values) == set(METRICS)
    expected = {"sr": 3 / 4, "fpr": 1 / 4, "f1": 6 / 8, "phir": 2 / 3, "phir_minus_fpr": 2 / 3 - 1 / 4, "mas": 1.5}
    assert {k: values[k] for k in expected} == pytest.approx(expected)


def test_ranking_counts_ties_as_half() -> None:
    area = measured(found(good=GOOD), "good", seed=1, resamples=10)["auroc"].value
    scores = GOOD.score
    assert scores is not None
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[UNSAFE] for b in scores[~UNSAFE]]
    assert area == pytest.approx(np.mean(pairs))


def test_a_guard_without_scores_or_times_has_no_figures_of_them() -> None:
    values = measured(found(rule=Guarded(GOOD.alert)), "rule", seed=1, resamples=10)
    assert {name for name, i in values.items() if np.isnan(i.value)} == {"auroc", "phir", "phir_minus_fpr", "mas"}


def test_differences_are_paired_and_their_test_is_the_signed_rank_test() -> None:
    own = differences(found(good=GOOD, poor=POOR), GOOD, POOR, seed=1, resamples=200)
    assert own["f1"].interval.value == pytest.approx(6 / 8 - 2 / 8)
    assert own["phir"].interval.value == pytest.approx(2 / 3)
    right = (GOOD.alert == UNSAFE).astype(float) - (POOR.alert == UNSAFE)
    assert own["f1"].p == pytest.approx(wilcoxon(right, method="approx").pvalue)
    back = differences(found(good=GOOD, poor=POOR), POOR, GOOD, seed=1, resamples=200)
    assert back["f1"].interval.value == -own["f1"].interval.value
    assert back["f1"].interval.low == pytest.approx(-own["f1"].interval.high)


def test_equal_guards_differ_in_nothing() -> None:
    own = differences(found(good=GOOD), GOOD, GOOD, seed=1, resamples=20)
    assert (own["f1"].interval.value, own["f1"].interval.low, own["f1"].interval.high, own["f1"].p) == (0, 0, 0, 1)


def test_outcomes_are_read_as_they_were_written(tmp_path: Path) -> None:
    odd = Guarded(GOOD.alert, np.where(GOOD.alert, np.inf, 0.25), None)
    before = found(good=GOOD, odd=odd, bare=Guarded(POOR.alert))
    before.write(tmp_path / "outcomes.json")
    after = read_outcomes(tmp_path / "outcomes.json")
    assert (after.ids, after.clusters, list(after.guards)) == (before.ids, before.clusters, ["good", "odd", "bare"])
    for name in ("unsafe", "first_hazard", "timed"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    for name, guard in before.guards.items():
        for part in ("alert", "score", "first_alert"):
            one, two = getattr(guard, part), getattr(after.guards[name], part)
            assert (one is None) == (two is None)
            assert one is None or np.array_equal(one, two)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected what `jaxguard evaluate` wrote"),
        ('{"outcomes": 9}', "version 9, expected 1"),
        ('{"outcomes": 1, "ids": ["a"], "clusters": ["a"], "unsafe": [true, false], "first_hazard": [1], '
         '"timed": [true], "guards": {}}', r"shape \(2,\), expected \(1,\)"),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "outcomes.json").write_text(text)
    with pytest.raises(EvaluationError, match=message):
        read_outcomes(tmp_path / "outcomes.json")


def test_missing_outcomes_name_the_command() -> None:
    with pytest.raises(EvaluationError, match="`jaxguard evaluate` writes it"):
        read_outcomes(Path("nowhere") / "outcomes.json")


def test_other_trajectories_cannot_be_paired() -> None:
    one = found(good=GOOD)
    other = Outcomes(tuple("abcdefgx"), one.clusters, one.unsafe, one.first_hazard, one.timed, one.guards)
    with pytest.raises(EvaluationError, match="one and other: tested on other trajectories"):
        require_same(one, other, "one and other")
