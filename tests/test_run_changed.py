"""Thresholds that are raised, and runs whose split, labels, settings or figures are not those of their guard."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_run import SmallRun, done, lines, native, refused

from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.run import open_run
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.types import Trajectory

pytestmark = pytest.mark.usefixtures("toy_size")


@pytest.fixture
def copy(small_run: SmallRun, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(small_run.run, tmp_path / "run"))


def calibration(run: Path) -> dict:
    return json.loads((run / "guard" / "calibration.json").read_text())


def test_thresholds_are_raised_where_validation_shows_that_nothing_is_lost(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An untrained guard's scores are replaced: 0.9 or more at the first hazard step, 0.1 elsewhere."""
    done(*small_run.train(tmp_path / "run", "decision.fit_fusion=false", "stage1.steps=0", "stage2.steps=0"))

    def risks(_: Guard, trajectories: Sequence[Trajectory], __: FeatureStore) -> tuple[np.ndarray, ...]:
        tops = 0.9 + np.arange(len(trajectories)) / 1e4
        hazard = np.concatenate(
            [np.where(np.arange(len(t)) == t.first_hazard, top, 0.1) for t, top in zip(trajectories, tops, strict=True)]
        )
        return hazard, np.zeros_like(hazard), np.array([len(t) for t in trajectories])

    monkeypatch.setattr("jaxguard.run.all_risks", risks)
    labelled = open_run(tmp_path / "run").part("validation")
    enough = 1 / (sum(t.unsafe is True for t in labelled) + 1)
    said = done("calibrate", tmp_path / "run", f"decision.max_lost={enough}").out
    for name in ("block", "hold"):
        threshold = calibration(tmp_path / "run")[name]
        assert (threshold["raised_from"], threshold["value"]) == pytest.approx((0.1, 0.9), abs=0.002)
        assert f"{name.upper()} above 0.90" in said
        assert "(raised from 0.1000" in said
    done("calibrate", tmp_path / "run", f"decision.max_lost={0.9 * enough}")
    assert calibration(tmp_path / "run")["hold"]["raised_from"] is None
    # As good as any is a threshold on the highest safe score, which is the conformal one here.
    done("calibrate", tmp_path / "run", "decision.raised_for=f1")
    assert calibration(tmp_path / "run")["hold"]["raised_from"] is None


def test_thresholds_are_raised_to_the_best_f1_where_that_is_wanted(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(*small_run.train(tmp_path / "run", "decision.fit_fusion=false", "stage1.steps=0", "stage2.steps=0"))

    def risks(_: Guard, trajectories: Sequence[Trajectory], __: FeatureStore) -> tuple[np.ndarray, ...]:
        """Half of the safe trajectories reach 0.5, unsafe ones 0.9."""
        tops = [0.9 if t.unsafe else 0.5 if i % 2 else 0.1 + i / 1e4 for i, t in enumerate(trajectories)]
        hazard = np.concatenate(
            [np.where(np.arange(len(t)) == 0, top, 0.0) for t, top in zip(trajectories, tops, strict=True)]
        )
        return hazard, np.zeros_like(hazard), np.array([len(t) for t in trajectories])

    monkeypatch.setattr("jaxguard.run.all_risks", risks)
    levels = ("decision.alpha_hold=0.6", "decision.alpha_block=0.55")
    done("calibrate", tmp_path / "run", *levels)
    assert calibration(tmp_path / "run")["hold"]["value"] < 0.2
    done("calibrate", tmp_path / "run", *levels, "decision.raised_for=f1")
    for name in ("block", "hold"):
        assert calibration(tmp_path / "run")[name]["value"] == 0.5
    assert "decision.raised_for: got 'best', expected 'recall' or 'f1'" in refused(
        "calibrate", tmp_path / "run", "decision.raised_for=best"
    )


def test_a_run_whose_settings_changed_is_not_used(small_run: SmallRun, copy: Path) -> None:
    text = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(text[: text.index("\nstage2:") + 1])  # cut where it is still YAML
    for call in (("calibrate", copy), ("evaluate", copy), ("rivals", copy), ("diagnose", copy), ("ship", copy)):
        message = refused(*call, *(("--out", copy / "out") if call[0] == "ship" else ()))
        assert f"{copy / 'config.yaml'}: has other settings than the guard in {copy} was trained with" in message
        assert "stage2.steps" in message


def test_figures_of_other_thresholds_are_neither_compared_nor_shipped(small_run: SmallRun, copy: Path) -> None:
    done("compare", small_run.run, copy)
    assert "named twice" in refused("compare", copy, copy)
    done("calibrate", copy, "decision.alpha_hold=0.4", "decision.alpha_block=0.3")
    for call in (("compare", small_run.run, copy), ("ship", copy, "--out", copy / "out")):
        assert "is of other thresholds than the bundle's; run `jaxguard evaluate" in refused(*call)
    done("evaluate", copy)
    done("compare", small_run.run, copy)
    for damaged in ("{}", "null", "[]", "", '{"lambda_block": 1'):
        (copy / "report" / "evaluation.json").write_text(damaged)
        for call in (("compare", copy), ("ship", copy, "--out", copy / "out")):
            assert "expected what `jaxguard evaluate` wrote" in refused(*call)


def test_a_run_whose_split_changed_is_not_calibrated_or_evaluated(small_run: SmallRun, copy: Path) -> None:
    content = json.loads((copy / "splits.json").read_text())
    parts = content["splits"]
    parts["train"], parts["calibration"] = parts["calibration"], parts["train"]
    (copy / "splits.json").write_text(json.dumps(content))
    for name in ("calibrate", "evaluate"):
        message = refused(name, copy)
        assert f"{copy / 'splits.json'}: not what the guard in {copy} was trained on" in message


def test_a_run_whose_labels_changed_is_not_calibrated_or_evaluated(small_run: SmallRun, tmp_path: Path) -> None:
    data, other = tmp_path / "data.jsonl", lines(tmp_path / "other.jsonl", native("extra", "look", unsafe=False))
    write_trajectories(read_trajectories(small_run.data), data)
    store = shutil.copytree(small_run.store, tmp_path / "store")
    done("embed", "--quiet", "--trajectories", other, "--store", store)
    run, paths = tmp_path / "run", f"data.trajectories=[{data},{other}]"
    call = small_run.train(run, paths, f"data.store={store}", "stage1.steps=0", "stage2.steps=0")
    done(*call)
    done("calibrate", run)
    split = open_run(run).splits["calibration"]
    relabelled = [
        dataclasses.replace(t, unsafe=None, first_hazard=None) if t.id == split[0] else t
        for t in read_trajectories(data)
    ]
    write_trajectories(relabelled, data)
    for name in ("calibrate", "evaluate"):
        message = refused(name, run)
        assert f"{name}: {data}: not what the guard in {run} was trained on (other ids, labels or parts)" in message
        assert str(other) not in message
    done(*call)
    assert Guard.load(run / "guard").calibration is None  # the thresholds were of other labels
    done("calibrate", run)
