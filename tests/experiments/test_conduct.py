"""Experiments from plan to page at toy size: what is done once, what is done again, what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_run import SIZES, SmallRun, at_toy_size, command, done, refused

from jaxguard.evaluation.outcomes import read_outcomes
from jaxguard.experiments import runs
from jaxguard.experiments.summary import read_summary
from jaxguard.guard import Guard
from jaxguard.rivals import NAMES
from jaxguard.run import calibrate_run, evaluate_run
from jaxguard.shipping import CARD

pytestmark = pytest.mark.usefixtures("toy_size")

ABLATIONS = [
    "no prefix-risk predictor: model.heads=hazard",
    "no temporal aggregation: decision.temporal=false",
    "no world-model pretraining: stage1.steps=0",
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "drift.yaml").write_text("data: {trajectories: [data/drift], store: data/features}\n")
    (folder / "other.yaml").write_text("data: {trajectories: [nowhere/other], store: nowhere/features}\n")
    (folder / "plan.yaml").write_text(
        json.dumps(
            {
                "configs": str(folder),
                "generated": ["drift"],
                "sets": ["drift", "other"],
                "seeds": ["1"],
                "ablated": ["drift"],
                "ablation_seeds": ["1"],
                "base": ["stage2.pooled=false"],
                "ablations": ABLATIONS,
                "transfer": ["drift -> other"],
                "settings": list(SIZES),
            }
        )
    )
    return folder / "plan.yaml"


@pytest.fixture(scope="module")
def ablated(plan: Path, tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("out")
    with at_toy_size(compiled):
        return out, done("experiment", "ablations", "--plan", plan, "--out", out, "--quiet").out


@pytest.mark.slow
def test_ablations_from_plan_to_page(ablated: tuple[Path, str]) -> None:
    out, said = ablated
    found = read_summary(out / "summary.json")
    names = ["full", *(entry.partition(": ")[0] for entry in ABLATIONS)]
    assert list(dict.fromkeys(f.guard for f in found.figures)) == names
    assert {(p.guard, p.other) for p in found.paired} == {(name, "full") for name in names[1:]}
    assert all(name in said for name in names)
    assert "what the paper says of each part" in said
    page = (out / "report.html").read_text()
    assert all(name in page for name in names)


@pytest.mark.slow
def test_figures_are_those_of_the_runs_outcomes(ablated: tuple[Path, str]) -> None:
    out, _ = ablated
    outcomes = read_outcomes(out / "runs" / "drift" / "full" / "seed_1" / "report" / "outcomes.json")
    alert = outcomes.guards["jaxguard"].alert
    sr = float(alert[outcomes.unsafe].mean())
    (figure,) = [f for f in read_summary(out / "summary.json").figures if (f.guard, f.metric) == ("full", "sr")]
    assert figure.value == pytest.approx(sr)


@pytest.mark.slow
def test_stages_that_a_variant_does_not_touch_are_taken_over(ablated: tuple[Path, str]) -> None:
    folder = ablated[0] / "runs" / "drift"
    full = {stage: (folder / "full" / "seed_1" / stage / "curves.csv").read_bytes() for stage in ("stage1", "stage2")}
    for variant, same in (("no_prefix-risk_predictor", {"stage1"}), ("no_temporal_aggregation", {"stage1", "stage2"})):
        own = folder / variant / "seed_1"
        assert {stage for stage in full if (own / stage / "curves.csv").read_bytes() == full[stage]} == same
    assert not (folder / "no_world-model_pretraining" / "seed_1" / "stage1").exists()


@pytest.mark.slow
def test_what_is_finished_is_not_trained_again(
    ablated: tuple[Path, str], plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = ablated
    monkeypatch.setattr(runs, "train", lambda *_, **__: pytest.fail("trained again"))
    assert done("experiment", "ablations", "--plan", plan, "--out", out, "--quiet").out == said


@pytest.mark.slow
def test_a_run_that_was_calibrated_anew_is_evaluated_again(ablated: tuple[Path, str], plan: Path) -> None:
    out, _ = ablated
    run = out / "runs" / "drift" / "full" / "seed_1"

    def after(*overrides: str) -> tuple[dict, float]:
        guard = calibrate_run(run, overrides)
        done("experiment", "ablations", "--plan", plan, "--out", out, "--quiet")
        assert guard.calibration is not None
        return dict(read_outcomes(run / "report" / "outcomes.json").made), guard.calibration.lambda_hold

    before = dict(read_outcomes(run / "report" / "outcomes.json").made)
    found, hold = after("decision.alpha_hold=0.5", "decision.max_lost=0")
    assert found["hold"] == hold != before["hold"]
    assert after()[0] == before


@pytest.mark.slow
def test_a_run_with_other_settings_is_left_alone(ablated: tuple[Path, str], plan: Path) -> None:
    settings = json.dumps([*SIZES, "stage2.steps=4"])
    said = refused(
        "experiment", "ablations", "--plan", plan, "--out", ablated[0], "--quiet", "--set", f"settings={settings}"
    )
    assert "holds a finished run with other settings than the plan's" in said


@pytest.mark.slow
def test_rivals_meet_the_guard_and_absent_sets_are_named(plan: Path, tmp_path: Path) -> None:
    said = done("experiment", "rivals", "--plan", plan, "--out", tmp_path, "--quiet").out
    found = read_summary(tmp_path / "summary.json")
    assert {f.guard for f in found.figures} >= {"jaxguard", *NAMES}
    assert found.left_out == ("rivals: other: nowhere/other, nowhere/features is not there",)
    assert "left out: rivals: other" in said


def test_all_goes_on_to_the_cases_past_what_is_not_named_or_not_there(
    plan: Path, small_run: SmallRun, tmp_path: Path
) -> None:
    some = ("--set", "sets=[other]", "--set", "ablated=[]", "--guard", small_run.run / "guard")
    said = done("experiment", "all", "--plan", plan, "--out", tmp_path, "--quiet", *some).out
    assert "left out: experiment rivals: nothing to run; rivals: other:" in said
    assert "left out: experiment ablations: nothing to run; the plan names nothing" in said
    assert "left out: experiment transfer: nothing to run; transfer: other:" in said
    assert (tmp_path / "cases.html").is_file()


def test_a_plan_that_can_run_nothing_is_refused(plan: Path, tmp_path: Path) -> None:
    said = refused("experiment", "transfer", "--plan", plan, "--out", tmp_path, "--quiet")
    assert "experiment transfer: nothing to run; transfer: other:" in said
    assert "NAME: got 'everything', expected rivals, ablations, transfer, cases or all" in refused(
        "experiment", "everything", "--plan", plan, "--out", tmp_path
    )


def test_cases_show_every_step_of_a_guard(small_run: SmallRun, tmp_path: Path) -> None:
    said = done("experiment", "cases", "--guard", small_run.guard, "--out", tmp_path).out
    page = (tmp_path / "cases.html").read_text()
    for name in ("what builds up", "an injected instruction"):
        assert name in said
        assert f"{name}: harmless twin" in said
        assert name in page
    assert page.count("<svg") == 4
    said_so = next(line for line in said.splitlines() if "unsafe runs were alerted on" in line)
    assert said_so in page
    assert "&lt;INFORMATION&gt;" in page
    assert "<INFORMATION>" not in page


def test_a_shipped_bundle_is_the_guard_with_a_card(small_run: SmallRun, tmp_path: Path) -> None:
    about = tmp_path / "about.md"
    about.write_text("Made for a test.\n")
    for name in ("one", "two"):
        done("ship", small_run.run, "--about", about, "--out", tmp_path / name)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two
    assert Guard.load(tmp_path / "one").weights == Guard.load(small_run.guard).weights
    card = one[CARD].decode()
    evaluation = json.loads((small_run.run / "report" / "evaluation.json").read_text())
    counts = evaluation["sections"][0]["counts"]
    assert "Made for a test." in card
    assert f"| all | {counts['trajectories']} ({counts['unsafe']}) |" in card
    assert f"{evaluation['lambda_hold']:.4f}" in card


def test_a_card_needs_a_report_of_these_thresholds(small_run: SmallRun, tmp_path: Path) -> None:
    run = Path(shutil.copytree(small_run.run, tmp_path / "run"))
    calibrate_run(run, ["decision.alpha_hold=0.5", "decision.max_lost=0"])
    assert "is of other thresholds than the bundle's" in refused("ship", run, "--out", tmp_path / "bundle")
    evaluate_run(run)
    done("ship", run, "--out", tmp_path / "bundle")
    shutil.rmtree(run / "report")
    assert "has no report yet" in refused("ship", run, "--out", tmp_path / "bundle")
    assert command("ship", tmp_path, "--out", tmp_path / "bundle").status == 1
