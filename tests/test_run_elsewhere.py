"""A run's guard in another place: recalibrated, measured, and calibrated on a set that training never saw."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from small_run import SmallRun, done, refused

from jaxguard.config import DecisionConfig
from jaxguard.evaluation.transfer import render_transfer
from jaxguard.guard import Guard
from jaxguard.ranking import auroc
from jaxguard.run import _floor, load_trajectories, open_run, transfer_run
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.types import Step, Trajectory

pytestmark = pytest.mark.usefixtures("toy_size")


def test_recalibrating_on_safe_trajectories_of_another_place(small_run: SmallRun, tmp_path: Path) -> None:
    other = tmp_path / "other"
    done("generate", "--out", other, "data.drift.trajectories=60", "data.drift.seed=5")
    bundle, out = small_run.run / "guard", tmp_path / "bundle"
    levels = ("decision.alpha_hold=0.2", "decision.alpha_block=0.1")
    said = done("recalibrate", "--guard", bundle, "--trajectories", other, "--out", out, *levels).out
    before, after = Guard.load(bundle), Guard.load(out)
    assert before.calibration is not None
    assert after.calibration is not None
    assert after.weights == before.weights
    assert after.calibration.fusion == before.calibration.fusion
    safe = [t for t in load_trajectories([str(other)]).values() if t.unsafe is False]
    maxima = np.sort([s.max_fused for s in after.score(safe)])
    k = int(np.ceil((len(safe) + 1) * 0.8))
    assert after.calibration.lambda_hold == pytest.approx(maxima[k - 1], abs=1e-6)
    assert after.calibration.hold.raised_from is None
    assert f"alpha 0.2 on {len(safe)} safe" in said
    assert after.calibration.provenance["not safe, left out"] == 60 - len(safe)
    bare = tmp_path / "bare.jsonl"
    write_trajectories((dataclasses.replace(t, unsafe=None) for t in safe), bare)
    call = ("recalibrate", "--guard", bundle, "--trajectories", bare, "--out", tmp_path / "again", *levels)
    assert f"got {len(safe)}, of which {len(safe)} have no label and none is safe" in refused(*call)
    done(*call, "--unlabelled-are-safe")
    again = Guard.load(tmp_path / "again").calibration
    assert again is not None
    assert again.lambda_hold == after.calibration.lambda_hold


def test_recalibrating_with_too_few_or_without_a_calibrated_guard(small_run: SmallRun, tmp_path: Path) -> None:
    other = tmp_path / "other"
    done("generate", "--out", other, "data.drift.trajectories=8", "data.drift.seed=5")
    call = ("recalibrate", "--trajectories", other, "--out", tmp_path / "bundle", "--guard")
    assert "got 4 safe trajectories, expected at least 19" in refused(
        *call, small_run.run / "guard", "decision.alpha_hold=0.1", "decision.alpha_block=0.05"
    )
    assert "expected decision.* here" in refused(*call, small_run.run / "guard", "train.seed=1")
    done(*small_run.train(tmp_path / "run", "stage1.steps=0", "stage2.steps=0"))
    assert "has no thresholds and no fusion" in refused(*call, tmp_path / "run" / "guard")
    assert not (tmp_path / "bundle").exists()


def test_transfer_measures_thresholds_in_another_place_and_writes_nothing(small_run: SmallRun, tmp_path: Path) -> None:
    other, store = tmp_path / "other", shutil.copytree(small_run.store, tmp_path / "store")
    done("generate", "--out", other, "data.drift.trajectories=60", "data.drift.seed=5")
    done("embed", "--quiet", "--trajectories", other, "--store", store)
    before = sorted(path.stat().st_mtime_ns for path in small_run.run.rglob("*"))
    call = ("transfer", small_run.run, "--trajectories", other, "--store", store)
    found = transfer_run(small_run.run, [str(other)], alpha=0.3, store=store)
    said = done(*call, "--alpha", 0.3).out
    assert said == render_transfer(found) + "\n"
    assert sorted(path.stat().st_mtime_ns for path in small_run.run.rglob("*")) == before
    scored = list(Guard.load(small_run.guard).score(load_trajectories([str(other)]).values()))
    assert (found.safe, found.unsafe, found.alpha) == (30, 30, 0.3)
    assert found.auroc == pytest.approx(
        auroc([s.max_fused for s in scored], [bool(s.unsafe) for s in scored]), abs=0.01
    )
    calibration = Guard.load(small_run.guard).calibration
    assert calibration is not None
    limit = calibration.hold_at(0.3).value
    own = np.mean([s.max_fused > limit for s in scored if not s.unsafe])
    assert found.rows[0].fpr == pytest.approx(own, abs=0.04)
    notes = {row.name: row.note for row in found.rows}
    assert notes["50 local safe"] == "too few: 30 are safe"
    assert "alpha: got 1.5, expected a level" in refused(*call, "--alpha", 1.5)


def test_transfer_needs_thresholds_and_labels(small_run: SmallRun, tmp_path: Path) -> None:
    done(*small_run.train(tmp_path / "run", "stage1.steps=0", "stage2.steps=0"))
    assert "has no thresholds yet" in refused("transfer", tmp_path / "run", "--trajectories", small_run.data)
    assert "of them trained or calibrated this guard" in refused(
        "transfer", small_run.run, "--trajectories", small_run.data
    )
    other, safe, store = (
        tmp_path / "other",
        tmp_path / "safe.jsonl",
        shutil.copytree(small_run.store, tmp_path / "store"),
    )
    done("generate", "--out", other, "data.drift.trajectories=60", "data.drift.seed=5")
    write_trajectories((t for t in read_trajectories(other) if t.unsafe is False), safe)
    assert re.search(
        rf"of \S+ texts have no vector; run `jaxguard embed --config {small_run.run}/config.yaml --store {store} "
        rf"--trajectories {safe}` first",
        refused("transfer", small_run.run, "--trajectories", safe, "--store", store),
    )
    done("embed", "--quiet", "--trajectories", safe, "--store", store)
    call = ("transfer", small_run.run, "--trajectories", safe, "--store", store)
    nothing = tmp_path / "unlabelled.jsonl"
    assert "got 30 safe and 0 unsafe ones" in refused(*call)
    write_trajectories((dataclasses.replace(t, unsafe=None) for t in read_trajectories(safe)), nothing)
    assert "got 0 safe and 0 unsafe ones" in refused(*call[:3], nothing, *call[4:])


def test_a_run_on_an_unseen_set_splits_it_for_calibration_and_test(small_run: SmallRun, tmp_path: Path) -> None:
    other, store = tmp_path / "other", shutil.copytree(small_run.store, tmp_path / "store")
    done("generate", "--out", other, "data.drift.trajectories=160", "data.drift.seed=5")
    renamed = tmp_path / "renamed.jsonl"
    write_trajectories((dataclasses.replace(t, id=f"other {t.id}") for t in read_trajectories(other)), renamed)
    done("embed", "--quiet", "--trajectories", renamed, "--store", store)
    done(*small_run.train(
        tmp_path / "run", f"data.unseen=[{renamed}]", f"data.store={store}", "data.split.local=20",
        "stage1.steps=0", "stage2.steps=0",
    ))  # fmt: skip
    run = open_run(tmp_path / "run")
    assert len(run.part("calibration")) == 20
    for name in ("calibration", "test"):
        assert all(t.id.startswith("other ") for t in run.part(name))
    for name in ("train", "validation"):
        assert not any(t.id.startswith("other ") for t in run.part(name))


def test_trajectories_may_be_trained_on_alone(small_run: SmallRun, tmp_path: Path) -> None:
    other, store = tmp_path / "other", shutil.copytree(small_run.store, tmp_path / "store")
    done("generate", "--out", other, "data.drift.trajectories=20", "data.drift.seed=5")
    own = [dataclasses.replace(t, id=f"other {t.id}", group=f"other {t.group}") for t in read_trajectories(other)]
    more = tmp_path / "more.jsonl"
    write_trajectories(own, more)
    done("embed", "--quiet", "--trajectories", more, "--store", store)
    split = small_run.run / "splits.json"
    never = (f"data.store={store}", "stage1.steps=0", "stage2.steps=0", f"data.split.file={split}")
    done(*small_run.train(tmp_path / "run", f"data.train_only=[{more}]", *never))
    run, plain = open_run(tmp_path / "run"), open_run(small_run.run)
    assert run.splits["train"] == [*plain.splits["train"], *sorted(t.id for t in own)]
    for name in ("validation", "calibration", "test"):
        assert run.splits[name] == plain.splits[name]
    assert run.digests["splits.json"] == plain.digests["splits.json"]
    done("calibrate", tmp_path / "run")  # reads the split that the run wrote
    # A split of its own leaves them in training, too; a group that is also elsewhere is refused.
    free = (f"data.store={store}", "stage1.steps=0", "stage2.steps=0", f"data.train_only=[{more}]")
    done(*small_run.train(tmp_path / "free", *free))
    assert open_run(tmp_path / "free").splits == run.splits
    tested = {t.group for t in plain.part("test")}
    shared = [dataclasses.replace(t, id=f"other {t.id}") for t in plain.trajectories.values() if t.group in tested]
    write_trajectories(shared, more)
    message = refused(*small_run.train(tmp_path / "leak", *free))
    assert "data.train_only: its group" in message
    assert "in the test part, expected groups of its own" in message


def test_a_hazard_at_the_first_step_counts_as_not_warned_of() -> None:
    """Half of the unsafe runs warn at 0.4, as often as safe runs are that high: nothing to keep a threshold low for."""

    def trajectory(name: str, first_hazard: int | None) -> Trajectory:
        steps = tuple(Step("tool", {}, str(i)) for i in range(2))
        return Trajectory(name, "", steps, first_hazard is not None, first_hazard, timing=True)

    labelled = [trajectory(f"{h} {i}", h) for h in (None, 0, 1) for i in range(20)]
    rows = {
        None: [[0.4, 0.1]] * 11 + [[0.1, 0.1]] * 9,
        0: [[0.7, 0.1], *[[0.9, 0.1]] * 19],
        1: [[0.4, 0.95]] * 20,
    }
    flat = np.concatenate([np.concatenate(rows[h]) for h in (None, 0, 1)])
    lengths = np.full(60, 2)
    assert _floor(0.3, flat, lengths, labelled, DecisionConfig(max_lost=0.05)) == 0.7


def test_recalibrating_on_sets_of_unequal_size_weighs_them_equally(small_run: SmallRun, tmp_path: Path) -> None:
    runs = [t for t in load_trajectories([str(small_run.data)]).values() if t.unsafe is False]
    many, few = tmp_path / "many.jsonl", tmp_path / "few.jsonl"
    write_trajectories((dataclasses.replace(t, id=f"m{t.id}", source="many") for t in runs), many)
    write_trajectories((dataclasses.replace(t, id=f"f{t.id}", source="few") for t in runs[:7]), few)
    call = ("recalibrate", "--guard", small_run.run / "guard", "--trajectories", many, "--trajectories", few)
    assert f" on {len(runs) + 7} safe" in done(*call, "--out", tmp_path / "all").out
    assert " on 14 safe" in done(*call, "--out", tmp_path / "even", "decision.balance=true").out
