"""A run from folder to folder: equal seeds give equal bytes, and every step refuses what does not fit."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file
from small_run import SmallRun, done, lines, native, refused

from jaxguard.config import load_config
from jaxguard.decision.conformal import needed
from jaxguard.guard import Guard
from jaxguard.inputs import run_episodes
from jaxguard.run import (
    PARTS,
    calibrate_run,
    evaluate_run,
    open_run,
    train,
)
from jaxguard.settings import ConfigError
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.world_model.params import flatten

pytestmark = pytest.mark.usefixtures("toy_size")


@pytest.fixture
def copy(small_run: SmallRun, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(small_run.run, tmp_path / "run"))


def calibration(run: Path) -> dict:
    return json.loads((run / "guard" / "calibration.json").read_text())


# The whole path


def test_a_run_folder_holds_everything(small_run: SmallRun) -> None:
    found = sorted(p.name for p in small_run.run.iterdir())
    assert found == ["config.yaml", "guard", "report", "splits.json", "stage1", "stage2"]
    assert sorted(p.name for p in (small_run.run / "report").iterdir()) == [
        "evaluation.json",
        "outcomes.json",
        "report.html",
    ]
    stored = load_config(small_run.run / "config.yaml")
    assert stored == load_config(None, small_run.settings())
    splits = json.loads((small_run.run / "splits.json").read_text())["splits"]
    assert list(splits) == list(PARTS)
    assert sum(map(len, splits.values())) == 60


def test_the_bundle_says_where_it_came_from(small_run: SmallRun) -> None:
    guard = Guard.load(small_run.guard)
    run = open_run(small_run.run)
    assert guard.provenance["trajectories"] == {name: len(run.splits[name]) for name in PARTS}
    assert guard.provenance["data"] == [str(small_run.data)]
    assert guard.provenance["seed"] == run.config.train.seed
    assert guard.calibration is not None
    assert guard.calibration.n == sum(t.unsafe is False for t in run.part("calibration"))
    assert (guard.calibration.hold.alpha, guard.calibration.block.alpha) == (0.3, 0.2)


def test_thresholds_keep_their_level_on_the_trajectories_that_set_them(small_run: SmallRun) -> None:
    """At most alpha (n + 1) - 1 of n calibration maxima may lie above."""
    run, guard = open_run(small_run.run), Guard.load(small_run.guard)
    safe = [t for t in run.part("calibration") if t.unsafe is False]
    scored = list(guard.score(safe, run.store))
    above = sum(s.max_fused > guard.calibration.lambda_hold for s in scored)  # type: ignore[union-attr]
    assert above == len(safe) - int(np.ceil((len(safe) + 1) * 0.7 - 1e-9))
    assert sum(s.max_hazard > guard.calibration.lambda_block for s in scored) < 0.2 * (len(safe) + 1)  # type: ignore[union-attr]


def test_two_runs_of_one_seed_are_equal_and_another_seed_differs(small_run: SmallRun, tmp_path: Path) -> None:
    done(*small_run.train(tmp_path / "again"))
    done("calibrate", tmp_path / "again")
    first, again = Guard.load(small_run.guard), Guard.load(tmp_path / "again" / "guard")
    assert again.weights == first.weights
    assert calibration(tmp_path / "again") == calibration(small_run.run) | {
        "provenance": calibration(small_run.run)["provenance"] | {"run": "again"}
    }
    for file in ("splits.json", "stage1/curves.csv", "stage2/curves.csv"):
        assert (tmp_path / "again" / file).read_bytes() == (small_run.run / file).read_bytes()
    tables = []
    for run in (small_run.run, tmp_path / "again"):
        out = tmp_path / f"scores of {run.name}"
        done("score", small_run.data, "--guard", run / "guard", "--out", out, "--store", small_run.store, "--quiet")
        tables.append([pq.read_table(out / name) for name in ("steps", "trajectories")])
    assert tables[0][0].equals(tables[1][0])
    assert tables[0][1].equals(tables[1][1])
    done(*small_run.train(tmp_path / "other", "train.seed=1", "stage1.steps=0", "stage2.steps=0"))
    assert Guard.load(tmp_path / "other" / "guard").weights != first.weights


def test_evaluating_twice_gives_equal_figures(small_run: SmallRun, copy: Path) -> None:
    done("evaluate", copy)
    one, two = (json.loads((run / "report" / "evaluation.json").read_text()) for run in (small_run.run, copy))
    assert one.pop("latency_ms").keys() == two.pop("latency_ms").keys() == {"p50", "p99"}
    assert one == two


def test_evaluation_compares_with_simple_guards(small_run: SmallRun) -> None:
    result = json.loads((small_run.run / "report" / "evaluation.json").read_text())
    rows = result["sections"][0]["rows"]
    assert list(rows) == [
        "jaxguard", "always alert", "number of steps", "unknown tool", "CamelCase tool", "two calls or more",
        "logistic (bag)", "logistic (step)", "logistic (pooled)",
    ]  # fmt: skip
    assert rows["two calls or more"]["fpr"]["value"] == 1.0
    assert rows["CamelCase tool"]["fpr"]["value"] == 0.0
    assert result["sections"][0]["counts"]["trajectories"] == len(open_run(small_run.run).splits["test"])
    assert "<html" in (small_run.run / "report" / "report.html").read_text(encoding="utf-8")


def test_other_parts_are_evaluated_without_the_trained_rivals(copy: Path) -> None:
    result, scored, _ = evaluate_run(copy, "validation")
    assert list(result.overall.rows) == ["jaxguard", "always alert", "number of steps"]
    assert [s.id for s in scored] == open_run(copy).splits["validation"]


# Resuming, and what training refuses


def test_training_again_changes_nothing(small_run: SmallRun, copy: Path) -> None:
    before = Guard.load(copy / "guard").weights
    done(*small_run.train(copy))
    assert Guard.load(copy / "guard").weights == before


@pytest.mark.slow
def test_an_interrupted_run_resumes_to_the_same_weights(small_run: SmallRun, copy: Path) -> None:
    """Killed in stage 2 after its first checkpoint: stage 1 is not trained anew, stage 2 goes on."""
    shutil.rmtree(copy / "guard")
    shutil.rmtree(copy / "stage2" / "checkpoints" / "3")
    untouched = {p: p.stat().st_mtime_ns for p in (copy / "stage1" / "checkpoints").rglob("*") if p.is_file()}
    done(*small_run.train(copy))
    assert Guard.load(copy / "guard").weights == Guard.load(small_run.guard).weights
    assert untouched == {p: p.stat().st_mtime_ns for p in (copy / "stage1" / "checkpoints").rglob("*") if p.is_file()}


def test_another_configuration_in_the_same_folder_is_refused(small_run: SmallRun, copy: Path) -> None:
    before = (copy / "config.yaml").read_bytes()
    message = refused(*small_run.train(copy, "stage1.steps=4", "decision.window=5"))
    assert f"run folder {copy}: was made with another configuration (stage1.steps, decision.window)" in message
    assert "--fresh" in message
    assert (copy / "config.yaml").read_bytes() == before


def test_fresh_starts_over(small_run: SmallRun, copy: Path) -> None:
    (copy / "mine.txt").write_text("not of any run")
    done(*small_run.train(copy, "stage1.steps=0", "stage2.steps=0", fresh=True))
    assert sorted(p.name for p in copy.iterdir()) == ["config.yaml", "guard", "mine.txt", "splits.json"]
    assert (copy / "mine.txt").read_text() == "not of any run"
    assert Guard.load(copy / "guard").calibration is None


def test_fresh_deletes_nothing_but_a_run(small_run: SmallRun, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    message = refused(*small_run.train(tmp_path / "thesis", fresh=True))
    assert f"--fresh: {tmp_path / 'thesis'} is not a run folder, nothing was deleted" in message
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "years of work"


def test_fresh_takes_a_configuration_alone_for_no_run(small_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "project"
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "thesis.txt").write_text("years of work")
    for content, also, message in (
        ("name: mine", (), "expected config.yaml and splits.json there"),
        ("colour: red", ("splits.json",), "colour: unknown key"),
        ("[", ("stage1",), "config.yaml: not valid YAML"),
    ):
        (folder / "config.yaml").write_text(content)
        for name in also:
            (folder / name).mkdir()
        found = refused(*small_run.train(folder, fresh=True))
        assert f"--fresh: {folder} is not a run folder, nothing was deleted" in found
        assert message in found
    assert (folder / "report" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("key", ["data.trajectories", "data.unseen", "data.store", "data.split.file", "encoder.path"])
def test_fresh_refuses_a_run_that_holds_its_inputs(small_run: SmallRun, copy: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "link").symlink_to(copy)
    inside = tmp_path / "link" / "data"
    shutil.copytree(small_run.store if key == "data.store" else small_run.data, copy / "data")
    value = f"[{inside}]" if key in ("data.trajectories", "data.unseen") else inside
    message = refused(*small_run.train(copy, f"{key}={value}", fresh=True))
    assert f"--fresh: {key} is {inside}, inside of {copy}; nothing was deleted" in message
    assert (copy / "guard" / "guard.json").exists()
    assert (copy / "stage1").exists()
    assert any((copy / "data").iterdir())


def test_fresh_makes_a_split_of_its_own(small_run: SmallRun, copy: Path) -> None:
    before = open_run(copy).splits
    steps = ("stage1.steps=0", "stage2.steps=0")
    done(*small_run.train(copy, "data.split.seed=3", *steps, fresh=True))
    assert open_run(copy).splits != before


def test_what_cannot_be_trained_leaves_no_folder(small_run: SmallRun, tmp_path: Path) -> None:
    """Nor a run that only another --out or --fresh could be trained after."""
    safe = tmp_path / "safe.jsonl"
    write_trajectories((t for t in read_trajectories(small_run.data) if t.unsafe is False), safe)
    for changes, message in (
        ((f"data.trajectories=[{safe}]",), "stage 2: no training trajectory has a first hazard step"),
        (("model=paper",), "model.embed_dim: got 2560, expected 12, the values per text of hash layer 1"),
        (("data.split.train=0", "data.split.test=0.5"), "train part: got 0 trajectories, none with a step"),
    ):
        assert message in refused(*small_run.train(tmp_path / "run", *changes))
        assert not (tmp_path / "run").exists()
    done(*small_run.train(tmp_path / "run", f"data.trajectories=[{safe}]", "stage1.steps=0", "stage2.steps=0"))


def test_training_again_over_a_bundle_that_says_nothing_of_its_origin(small_run: SmallRun, copy: Path) -> None:
    description = json.loads((copy / "guard" / "guard.json").read_text())
    (copy / "guard" / "guard.json").write_text(json.dumps(description | {"provenance": {}}))
    message = refused("calibrate", copy)
    assert f"guard bundle {copy / 'guard'}: does not say what it was trained on; run `jaxguard train`" in message
    done(*small_run.train(copy))
    done("calibrate", copy)


def test_fresh_keeps_the_old_run_where_the_new_one_cannot_start(
    small_run: SmallRun, copy: Path, tmp_path: Path
) -> None:
    message = refused(*small_run.train(copy, f"data.store={tmp_path / 'nowhere'}", fresh=True))
    assert f"feature store {tmp_path / 'nowhere'}: no manifest.json there" in message
    assert (copy / "guard" / "guard.json").exists()


# Calibration


def test_too_few_safe_trajectories_name_the_number_needed(small_run: SmallRun, tmp_path: Path) -> None:
    done(*small_run.train(tmp_path / "run", "decision.alpha_block=0.01", "stage1.steps=0", "stage2.steps=0"))
    run = open_run(tmp_path / "run")
    safe = sum(t.unsafe is False for t in run.part("calibration"))
    message = refused("calibrate", tmp_path / "run")
    assert f"got {safe} safe trajectories, expected at least {needed(0.01)} for alpha = 0.01" in message
    assert not (tmp_path / "run" / "guard" / "calibration.json").exists()


def test_without_calibration_or_test_part(small_run: SmallRun, tmp_path: Path) -> None:
    shares = [f"data.split.{n}={s}" for n, s in zip(PARTS, (0.5, 0, 0, 0.5), strict=True)]
    done(*small_run.train(tmp_path / "one", *shares, "stage1.steps=0", "stage2.steps=0"))
    assert "got 0 safe trajectories, expected at least" in refused("calibrate", tmp_path / "one")
    shares = [f"data.split.{n}={s}" for n, s in zip(PARTS, (0.5, 0, 0.5, 0), strict=True)]
    done(*small_run.train(tmp_path / "two", *shares, "stage1.steps=0", "stage2.steps=0"))
    done("calibrate", tmp_path / "two")
    assert calibration(tmp_path / "two")["provenance"]["fusion"] == {"fitted": False}
    assert "part 'test': has no trajectories" in refused("evaluate", tmp_path / "two")


def test_groups_get_thresholds_of_their_own(small_run: SmallRun, tmp_path: Path) -> None:
    decision = ("decision.mondrian=domain", "decision.alpha_hold=0.5", "decision.max_lost=0")
    changes = (*decision, "stage1.steps=0", "stage2.steps=0")
    done(*small_run.train(tmp_path / "run", *changes))
    said = done("calibrate", tmp_path / "run").out
    guard, run = Guard.load(tmp_path / "run" / "guard"), open_run(tmp_path / "run")
    made = guard.calibration
    assert made is not None
    assert made.group_key == "domain"
    assert made.hold_groups
    assert f"own thresholds for domain: {', '.join(made.hold_groups)}" in said
    name, threshold = next(iter(made.hold_groups.items()))
    members = [t for t in run.part("calibration") if t.unsafe is False and t.metadata["domain"] == name]
    maxima = sorted(s.max_fused for s in guard.score(members, run.store))
    assert threshold.n == len(members)
    assert threshold.value == pytest.approx(maxima[int(np.ceil((len(members) + 1) * 0.5)) - 1], abs=1e-6)
    for scored in guard.score(run.part("test"), run.store):
        assert scored.lambda_hold == made.for_group(scored.metadata["domain"]).hold


def test_zero_step_trajectories_are_split_scored_and_counted(small_run: SmallRun, tmp_path: Path) -> None:
    """Every part has some, also as safe calibration trajectories of guard and rivals."""
    refusals = [native(f"refusal {i}", unsafe=False, timing=True) for i in range(30)]
    (tmp_path / "in").mkdir()
    file = lines(tmp_path / "in" / "refusals.jsonl", *refusals)
    store = shutil.copytree(small_run.store, tmp_path / "store")
    done("embed", "--quiet", "--trajectories", file, "--store", store)
    data = f"data.trajectories=[{small_run.data},{file}]"
    # This level takes 19 safe trajectories: too many without the empty ones.
    changes = ("decision.alpha_hold=0.05", "decision.alpha_block=0.05", "stage1.steps=0", "stage2.steps=0")
    done(*small_run.train(tmp_path / "run", data, f"data.store={store}", *changes))
    done("calibrate", tmp_path / "run")
    done("evaluate", tmp_path / "run")
    run = open_run(tmp_path / "run")
    safe = [t for t in run.part("calibration") if t.unsafe is False]
    assert calibration(tmp_path / "run")["hold"]["n"] == len(safe)
    assert sum(bool(t.steps) for t in safe) < 19 <= len(safe)
    counts = json.loads((tmp_path / "run" / "report" / "evaluation.json").read_text())["sections"][0]["counts"]
    assert counts["zero_steps"] == sum(not t.steps for t in run.part("test")) > 0


def test_groups_by_a_field_that_nothing_has(small_run: SmallRun, copy: Path) -> None:
    message = refused("calibrate", copy, "decision.mondrian=tenant")
    assert "decision.mondrian: got 'tenant', which no safe calibration trajectory has in its metadata" in message
    fields = sorted({name for t in open_run(copy).part("calibration") for name in t.metadata})
    assert message.endswith(f"expected one of {', '.join(fields)}")
    assert "domain" in fields


def test_thresholds_of_heads_that_were_never_trained_are_warned_of(
    small_run: SmallRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done(*small_run.train(tmp_path / "run", "stage1.steps=0", "stage2.steps=0"))
    done("calibrate", tmp_path / "run")
    (warning,) = [
        record for record in caplog.records if record.name == "jaxguard.run" and record.levelno >= logging.WARNING
    ]
    assert warning.getMessage().startswith("stage2.steps is 0: the risk heads were never trained")


def test_a_report_that_cannot_be_made_leaves_the_old_one(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [copy / "report" / name for name in ("evaluation.json", "outcomes.json", "report.html")]
    before = [file.read_bytes() for file in files]

    def fail(path: Path, *_: object, **__: object) -> None:
        path.write_text("half a page")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxguard.run.write_report", fail)
    assert "No space left on device" in refused("evaluate", copy, "--part", "validation")
    assert [file.read_bytes() for file in files] == before


# Order of the steps


def test_steps_out_of_order_say_what_is_missing(small_run: SmallRun, copy: Path, tmp_path: Path) -> None:
    assert f"run folder {tmp_path / 'none'}: no config.yaml there" in refused("calibrate", tmp_path / "none")
    assert f"run folder {tmp_path / 'none'}: no config.yaml there" in refused("evaluate", tmp_path / "none")
    (copy / "guard" / "calibration.json").unlink()
    assert f"has no thresholds yet; run `jaxguard calibrate {copy}` first" in refused("evaluate", copy)
    shutil.rmtree(copy / "guard")
    assert f"guard bundle {copy / 'guard'}: no guard.json there" in refused("calibrate", copy)
    assert f"guard bundle {copy / 'guard'}: no guard.json there" in refused("evaluate", copy)


def test_a_part_that_does_not_exist(small_run: SmallRun) -> None:
    message = refused("evaluate", small_run.run, "--part", "tset")
    assert "part: got 'tset', expected one of train, validation, calibration, test" in message


def test_paper_rule_reaches_guard_and_rivals(small_run: SmallRun, tmp_path: Path) -> None:
    changes = ("decision.paper_rule=true", "decision.alpha_hold=0.001", "decision.alpha_block=0.001")
    done(*small_run.train(tmp_path / "run", *changes, "stage1.steps=0", "stage2.steps=0"))
    done("calibrate", tmp_path / "run")
    result, _, _ = evaluate_run(tmp_path / "run")
    assert calibration(tmp_path / "run")["hold"]["strict"] is False
    assert "fpr" in result.overall.rows["logistic (step)"]


def test_rivals_see_whole_trajectories(small_run: SmallRun, tmp_path: Path) -> None:
    run = open_run(small_run.run)
    short = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, max_steps=2))
    cut = dataclasses.replace(run, config=short)
    lengths = [len(t) for t in run.part("test")]
    assert run_episodes(cut, "test").lengths.tolist() == [2] * len(lengths)
    assert run_episodes(cut, "test", whole=True).lengths.tolist() == lengths


def test_calibrating_at_another_level_needs_no_training(small_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(small_run.run, folder)
    before = Guard.load(folder / "guard")
    guard = calibrate_run(folder, ["decision.alpha_hold=0.4", "decision.alpha_block=0.35"])
    assert guard.weights == before.weights
    assert guard.calibration is not None
    assert (guard.calibration.hold.alpha, guard.calibration.block.alpha) == (0.4, 0.35)
    with pytest.raises(ConfigError, match=r"stage1\.steps=9.*decision"):
        calibrate_run(folder, ["stage1.steps=9"])


@pytest.mark.slow
def test_half_precision_halves_the_bundle_and_loads_as_the_weights_that_were_calibrated(
    small_run: SmallRun, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done(*small_run.train(run, "train.half=true"))
    done("calibrate", run)
    stored = load_file(run / "guard" / "weights.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype(np.float16)}
    guard, full = Guard.load(run / "guard"), load_file(small_run.guard / "weights.safetensors")
    assert guard.calibration is not None  # bound to these very weights
    for name, array in flatten(guard.params).items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, full[name].astype(np.float16))


def test_without_temporal_evidence_the_prefix_risk_is_fused_as_it_stands(small_run: SmallRun, copy: Path) -> None:
    calibrate_run(copy, ["decision.temporal=false", "decision.beta=0.5"])
    fusion = Guard.load(copy / "guard").calibration.fusion  # type: ignore[union-attr]
    assert (fusion.beta, fusion.window) == (0.0, 1)
    assert Guard.load(small_run.guard).calibration.fusion.window > 1  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "gone"), [("prefix", 0), ("hazard", 1)])
def test_a_guard_with_one_head_is_calibrated_and_decides_by_it(
    small_run: SmallRun, tmp_path: Path, heads: str, gone: int
) -> None:
    run = tmp_path / "run"
    done(*small_run.train(run, f"model.heads={heads}"))
    guard = calibrate_run(run)
    _, scored, _ = evaluate_run(run)
    risks = [np.concatenate([getattr(s, name) for s in scored]) for name in ("hazard", "prefix")]
    assert not risks[gone].any()
    assert (risks[1 - gone] > 0).all()
    assert guard.calibration is not None
    if heads == "prefix":
        assert not any(s.first_block is not None for s in scored)  # 0 crosses nothing


def test_training_a_finished_run_keeps_its_thresholds(small_run: SmallRun, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(small_run.run, folder)
    guard = train(load_config(folder / "config.yaml"), folder, progress=False)
    assert guard.calibration is not None
    assert guard.calibration == Guard.load(small_run.guard).calibration
