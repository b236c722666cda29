"""Rivals on a run's own parts: one evaluation, one level, weights that are kept."""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from small_run import SmallRun, at_toy_size, command, done, refused

from jaxguard.baselines.neural import NETWORKS
from jaxguard.inputs import open_run
from jaxguard.rivals import Workshop, rivals
from jaxguard.run import judged, safe_calibration
from jaxguard.types import Step, Trajectory

pytestmark = pytest.mark.usefixtures("toy_size")
ALL = {
    *("keywords", "tool-chain", "absorbing-chain", "logistic-step", "logistic-pooled"),
    *("step-mlp", "transformer", "trace-gru"),
}


@pytest.fixture(scope="module")
def compared(small_run: SmallRun, tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> tuple[Path, str]:
    """A copy of the run with all rivals, and what the command said."""
    folder = Path(shutil.copytree(small_run.run, tmp_path_factory.mktemp("rivals") / "run"))
    with at_toy_size(compiled):
        return folder, done("rivals", folder, "--quiet").out


def figures(folder: Path) -> dict:
    return json.loads((folder / "rivals" / "evaluation.json").read_text())["sections"][0]["rows"]


def test_guard_and_rivals_stand_in_one_evaluation(compared: tuple[Path, str], small_run: SmallRun) -> None:
    folder, said = compared
    rows = figures(folder)
    assert set(rows) == {"jaxguard", "always alert", "number of steps", *ALL}
    own = json.loads((small_run.run / "report" / "evaluation.json").read_text())["sections"][0]["rows"]
    assert rows["jaxguard"] == own["jaxguard"]
    assert rows["logistic-step"]["auroc"] == own["logistic (step)"]["auroc"]
    for name in ALL:
        assert {"auroc", "f1", "phir_minus_fpr", "auroc_ahead", "f1_ahead", "phir_minus_fpr_ahead"} <= set(rows[name])
        ahead = rows[name]["f1_ahead"]
        assert ahead["value"] == pytest.approx(rows["jaxguard"]["f1"]["value"] - rows[name]["f1"]["value"])
        assert ahead["low"] <= ahead["high"]
        assert name[:17] in said
    assert "ahead of" in said
    assert (folder / "rivals" / "report.html").stat().st_size > 10_000


@pytest.mark.slow
def test_a_second_call_reads_the_weights_and_says_the_same(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    before = figures(folder)
    kept = {name: sorted(p.name for p in (folder / "rivals" / name / "checkpoints").iterdir()) for name in NETWORKS}
    curves = {name: (folder / "rivals" / name / "curves.csv").stat().st_mtime_ns for name in NETWORKS}
    done("rivals", folder, "--quiet")
    assert figures(folder) == before
    for name in NETWORKS:
        assert sorted(p.name for p in (folder / "rivals" / name / "checkpoints").iterdir()) == kept[name]
    done("rivals", folder, "--quiet", "--only", "step-mlp", "--fresh")
    after = {name: (folder / "rivals" / name / "curves.csv").stat().st_mtime_ns for name in NETWORKS}
    assert after["step-mlp"] > curves["step-mlp"]
    assert figures(folder)["step-mlp"] == before["step-mlp"]
    assert set(figures(folder)) == {"jaxguard", "always alert", "number of steps", "step-mlp"}


def test_thresholds_keep_their_level_on_the_trajectories_that_set_them(small_run: SmallRun) -> None:
    run = open_run(small_run.run)
    safe = safe_calibration(run, run.config.decision)
    for name, found in rivals(run, safe, ["keywords", "tool-chain", "logistic-pooled"]).items():
        assert found.first_alert is not None
        assert (found.first_alert >= 0).sum() <= 0.3 * (len(safe) + 1) - 1, name


class Silent:
    """Cannot score sends."""

    name = "silent"

    def observe(self, prefix: Trajectory, action: Step) -> float:
        return float("nan") if action.tool == "cut" else 0.1


def test_what_could_not_be_scored_alerts_and_is_counted(small_run: SmallRun, caplog: pytest.LogCaptureFixture) -> None:
    run = open_run(small_run.run)
    steps = tuple(Step(tool, {}, tool) for tool in ("open", "cut", "send"))
    test = [Trajectory("a", "i", steps), Trajectory("b", "i", steps[:1]), Trajectory("c", "i", ())]
    with caplog.at_level(logging.WARNING):
        found = judged(Silent(), run, test, run.config.decision)
    assert "rival silent: 1 of 4 steps of the scored trajectories have no score, and alert" in caplog.text
    assert found.first_alert is not None
    assert found.first_alert.tolist() == [1, -1, -1]
    np.testing.assert_array_equal(found.score, [np.inf, 0.1, 0.0])


@dataclasses.dataclass(frozen=True)
class Told:
    """Knows the labels, and is surer of some unsafe runs than of others."""

    unsafe: frozenset[str]
    name: str = "told"

    def observe(self, prefix: Trajectory, action: Step) -> float:
        return 0.5 + zlib.crc32(prefix.id.encode()) % 400 / 1000 if prefix.id in self.unsafe else 0.1


def test_thresholds_of_rivals_are_raised_as_those_of_the_guard_are(small_run: SmallRun) -> None:
    run = open_run(small_run.run)
    told = Told(frozenset(i for i, t in run.trajectories.items() if t.unsafe))
    test = run.part("test")
    unsafe = np.array([bool(t.unsafe) for t in test])
    low, raised = (
        judged(told, run, test, dataclasses.replace(run.config.decision, max_lost=lost)) for lost in (0.0, 0.6)
    )
    np.testing.assert_array_equal(low.alert, unsafe)  # the conformal one lies below every unsafe score
    assert raised.alert is not None
    assert 0 < raised.alert.sum() < unsafe.sum()  # the raised one gives some of them up
    paper = dataclasses.replace(run.config.decision, max_lost=0.6, paper_rule=True)
    assert judged(told, run, test, paper).alert.sum() >= unsafe.sum()  # type: ignore[union-attr]


def test_rules_of_ones_own(compared: tuple[Path, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compared[0], tmp_path / "run"))
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules: [{name: end, where: [tool], words: [purge], risk: 0.9}]")
    done("rivals", folder, "--quiet", "--only", "keywords", "--rules", rules)
    run, purge = open_run(folder), Step("purge_data", {}, "1")
    for own, risk in ((rules, 0.9), (None, 0.5)):
        (rival,) = Workshop(run, rules=own).make(["keywords"])
        assert rival.observe(Trajectory("a", "i", ()), purge) == pytest.approx(risk)
    assert "cannot be read" in refused("rivals", folder, "--only", "keywords", "--rules", tmp_path / "none.yaml")


def test_refusals(small_run: SmallRun, tmp_path: Path) -> None:
    said = refused("rivals", small_run.run, "--only", "keywords,oracle")
    assert "rival: got 'oracle', expected some of keywords, tool-chain," in said
    assert "got ''" in refused("rivals", small_run.run, "--only", "")
    assert "no config.yaml there" in refused("rivals", tmp_path)
    folder = Path(shutil.copytree(small_run.run, tmp_path / "run"))
    (folder / "guard" / "calibration.json").unlink()
    assert command("rivals", folder, "--only", "keywords").status == 1
    assert not (small_run.run / "rivals").exists()


def test_the_names_are_those_of_the_rivals(small_run: SmallRun) -> None:
    workshop = Workshop(open_run(small_run.run))
    assert set(workshop.makers) == ALL
    assert [rival.name for rival in workshop.make(["tool-chain", "keywords"])] == ["tool-chain", "keywords"]


def test_a_fresh_training_takes_the_rivals_away(
    compared: tuple[Path, str], small_run: SmallRun, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(compared[0], tmp_path / "run"))
    assert (folder / "rivals").exists()
    done(*small_run.train(folder, fresh=True))
    assert not (folder / "rivals").exists()
