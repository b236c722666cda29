"""The whole evaluation: sections, baselines, level check, JSON and the terminal table."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from jaxguard.evaluation.evaluate import GUARD, Baseline, EvaluationError, check_level, evaluate
from jaxguard.evaluation.table import render


@pytest.fixture(scope="module")
def evaluation(world):
    keyword = np.array([any(s.tool == "delete_file" for s in t.steps) for t in world.trajectories])
    first = np.where(keyword, 0, -1)
    return evaluate(
        world.scored,
        world.calibration,
        {"keyword": keyword, "mean": [float(s.hazard.mean()) if len(s) else 0 for s in world.scored],
         "timed": Baseline(first_alert=first)},
        resamples=100,
        latency_ms={"p50": 0.39},
    )  # fmt: skip


def test_guard_row_equals_an_independent_computation(world, evaluation) -> None:
    labelled = [s for s in world.scored if s.unsafe is not None]
    truth = np.array([s.unsafe for s in labelled])
    alert = np.array([bool((s.decision != 0).any()) for s in labelled])
    top = np.array([s.fused.max() if len(s) else 0.0 for s in labelled])
    ours = evaluation.overall.rows[GUARD]
    assert ours["f1"].value == pytest.approx(f1_score(truth, alert))
    assert ours["auroc"].value == pytest.approx(roc_auc_score(truth, top))
    assert ours["fpr"].value == pytest.approx(alert[~truth].mean())
    for metric in ("sr", "fpr", "f1", "auroc", "phir", "mas"):
        assert ours[metric].low <= ours[metric].value <= ours[metric].high
    timed = [s for s in labelled if s.unsafe and s.timing and s.first_hazard is not None]
    early = [s.first_hazard - s.first_alert for s in timed if s.first_alert is not None]
    assert ours["phir"].value == pytest.approx(sum(lead > 0 for lead in early) / len(timed))
    assert ours["mas"].value == pytest.approx(np.mean([lead for lead in early if lead > 0]))


def test_counts_and_sections(world, evaluation) -> None:
    c = evaluation.overall.counts
    assert (c.trajectories, c.unsafe + c.safe + c.unlabelled) == (360, 360)
    assert c.unlabelled == 6
    assert c.zero_steps == sum(len(t) == 0 for t in world.trajectories)
    assert c.timed + c.excluded_unreliable + c.excluded_no_step == c.unsafe
    assert c.excluded_unreliable > 0
    sources = evaluation.of_kind("source")
    assert [s.name for s in sources] == ["agentdyn", "asb", "drift"]
    assert sum(s.counts.trajectories for s in sources) == 360
    assert sum(s.counts.unlabelled for s in sources) == 6
    assert {s.name for s in evaluation.of_kind("domain")} == {"bank", "files", "mail"}
    risk = evaluation.of_kind("risk_type")
    assert len(risk) == 3
    assert all(math.isnan(s.rows[GUARD]["fpr"].value) and math.isnan(s.rows[GUARD]["f1"].value) for s in risk)
    assert all(0.8 < s.rows[GUARD]["sr"].value <= 1 for s in risk)


def test_small_subsets_share_one(world) -> None:
    got = evaluate(world.scored, world.calibration, resamples=0, min_section=110)
    names = [s.name for s in got.of_kind("domain")]
    assert "(other)" in names or len(names) == 3
    got = evaluate(world.scored, world.calibration, resamples=0, min_section=1_000)
    assert not got.of_kind("domain")


def test_baselines(world, evaluation) -> None:
    rows = evaluation.overall.rows
    assert list(rows) == [GUARD, "always alert", "number of steps", "keyword", "mean", "timed"]
    assert (rows["always alert"]["sr"].value, rows["always alert"]["fpr"].value) == (1.0, 1.0)
    assert set(rows["mean"]) == {"auroc", "auprc", "auroc_ahead"}
    ahead = rows["mean"]["auroc_ahead"]
    assert ahead.value == pytest.approx(rows[GUARD]["auroc"].value - rows["mean"]["auroc"].value)
    # Both rank the same trajectories, so the difference varies less than either of them does.
    assert ahead.low <= ahead.value <= ahead.high
    assert ahead.high - ahead.low < sum(rows[n]["auroc"].high - rows[n]["auroc"].low for n in (GUARD, "mean"))
    assert "auroc" not in rows["keyword"]
    assert rows["timed"]["sr"] == rows["keyword"]["sr"]
    assert "phir" in rows["timed"]
    labelled = [i for i, s in enumerate(world.scored) if s.unsafe is not None]
    steps = [len(world.scored[i]) for i in labelled]
    truth = [world.scored[i].unsafe for i in labelled]
    assert rows["number of steps"]["auroc"].value == pytest.approx(roc_auc_score(truth, steps))


@pytest.mark.parametrize(
    ("baselines", "message"),
    [
        ({"x": np.zeros(5)}, r"'x': score has shape \(5,\), expected \(360,\)"),
        ({GUARD: np.zeros(360)}, "other than"),
        ({"x": np.full(360, math.nan)}, "360 scores are NaN"),
        ({"x": Baseline(alert=np.ones(360, bool), first_alert=np.full(360, -1))}, "differ"),
    ],
)
def test_baselines_that_do_not_fit_are_refused(world, baselines, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        evaluate(world.scored, world.calibration, baselines, resamples=0)


def test_nothing_to_evaluate_is_refused(world) -> None:
    with pytest.raises(EvaluationError, match="none of 1 trajectories has a label"):
        evaluate([replace(world.scored[0], unsafe=None)], world.calibration)
    with pytest.raises(EvaluationError, match="1 ids repeat"):
        evaluate([world.scored[0], world.scored[0]], world.calibration)


def test_level_check_tells_exchangeable_from_shifted(world) -> None:
    fair = check_level(world.scored, world.calibration)
    assert fair.verdict == "inside"
    assert fair.tested == sum(s.unsafe is False for s in world.scored)
    shifted = [replace(s, fused=np.minimum(s.fused * 1.8, 1)) for s in world.scored]
    assert check_level(shifted, world.calibration).verdict == "above"
    quiet = [replace(s, fused=s.fused * 0.2) for s in world.scored]
    assert check_level(quiet, world.calibration).verdict == "below"
    assert check_level([s for s in world.scored if s.unsafe], world.calibration) is None


def test_one_class_only(world) -> None:
    got = evaluate([s for s in world.scored if s.unsafe], world.calibration, resamples=50)
    ours = got.overall.rows[GUARD]
    assert ours["sr"].value > 0.8
    assert math.isnan(ours["fpr"].value)
    assert "–" in render(got)
    assert json.loads(got.to_json())["level_check"] is None


def test_nonfinite_scores_alert_and_are_counted(world) -> None:
    broken = next(s for s in world.scored if len(s) > 2 and s.unsafe is False)
    nan = np.full(len(broken), math.nan)
    held = replace(broken, fused=nan, hazard=nan, margin=nan, decision=np.ones(len(broken), np.int8))
    got = evaluate([held if s is broken else s for s in world.scored], world.calibration, resamples=0)
    assert got.decisions["nonfinite"] == len(broken)
    assert np.isfinite(got.overall.rows[GUARD]["auroc"].value)
    assert f"not finite: {len(broken)}" in render(got)


def test_json_is_strict_and_deterministic(world, evaluation) -> None:
    record = json.loads(evaluation.to_json())
    assert record["sections"][0]["rows"][GUARD]["sr"]["value"] == evaluation.overall.rows[GUARD]["sr"].value
    risk = next(s for s in record["sections"] if s["kind"] == "risk_type")
    assert risk["rows"][GUARD]["fpr"]["value"] is None
    assert sum(record["sections"][0]["lead_times"]["histogram"].values()) > 0
    one = evaluate(world.scored, world.calibration, resamples=40, seed=3)
    assert one.to_json() == evaluate(world.scored, world.calibration, resamples=40, seed=3).to_json()
    assert one.to_json() != evaluate(world.scored, world.calibration, resamples=40, seed=4).to_json()


def test_table_fits_a_terminal_and_shows_what_matters(evaluation) -> None:
    text = render(evaluation)
    assert max(map(len, text.splitlines())) <= 100
    assert not any(c in text for c in "\x07\x1b\u202e")
    for part in ("PHIR-FPR", "6 unlabelled", "unsafe not timed", "always alert", "inside the band", "p50 0.39"):
        assert part in " ".join(text.split())
    sr = evaluation.overall.rows[GUARD]["sr"].value
    line = next(row for row in text.splitlines() if row.startswith(GUARD))
    assert line.split()[1] == f"{sr:.3f}"
