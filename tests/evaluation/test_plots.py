"""Charts draw the right values and stay valid XML whatever the tool names are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from jaxguard.evaluation import plots
from jaxguard.evaluation.evaluate import evaluate
from jaxguard.evaluation.metrics import tabulate
from jaxguard.evaluation.svg import COLORS

NS = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def evaluation(world):
    return evaluate(world.scored, world.calibration, {"rule": np.ones(360, bool)}, resamples=30)


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter(f"{NS}text")]


def test_distribution_states_counts_and_threshold(world) -> None:
    table = tabulate(world.scored)
    svg = plots.distribution(table, which="fused", threshold=0.25, name="HOLD")
    assert {f"safe ({(~table.unsafe).sum()})", f"unsafe ({table.unsafe.sum()})", "HOLD 0.250"} <= set(texts(svg))
    line = next(e for e in ET.fromstring(svg).iter(f"{NS}line") if e.get("stroke-dasharray") == "5 4")
    assert float(line.get("x1")) == pytest.approx(58 + 0.25 * (540 - 16 - 58), abs=0.1)


def test_roc_marks_the_operating_point(world, evaluation) -> None:
    svg = plots.roc(tabulate(world.scored), evaluation.overall)
    ours = evaluation.overall.rows["jaxguard"]
    assert f"fused, AUROC {ours['auroc'].value:.3f}" in texts(svg)
    dot = next(e for e in ET.fromstring(svg).iter(f"{NS}circle") if e.get("fill") == COLORS["unsafe"])
    assert float(dot.get("cx")) == pytest.approx(58 + ours["fpr"].value * 466, abs=0.1)
    assert float(dot.get("cy")) == pytest.approx(336 - ours["sr"].value * 320, abs=0.1)
    assert "rule" in texts(svg)


def test_calibration_band_shows_the_achieved_level(world) -> None:
    table = tabulate(world.scored)
    achieved = (table.max_fused[~table.unsafe] > world.calibration.lambda_hold).mean()
    assert f"alpha 0.1: achieved {achieved:.3f}" in texts(plots.calibration_band(table, world.calibration))
    only_unsafe = tabulate([s for s in world.scored if s.unsafe])
    assert "no safe trajectories to compare" in texts(plots.calibration_band(only_unsafe, world.calibration))


def test_lead_times_add_up_and_far_ones_share_a_bar(evaluation) -> None:
    lead = replace(evaluation.overall.lead_times, histogram={49: 2, 9: 1, 0: 5, -1: 3}, missed=4)
    svg = plots.lead_time_chart(lead)
    assert {"before 3", "at the hazard 5", "after 3", "never 4"} <= set(texts(svg))
    bars = [int(t.text) for t in ET.fromstring(svg).iter(f"{NS}title")]
    assert bars[0] == 3
    assert sum(bars) == 15


def test_forest_has_a_row_for_every_subset(evaluation) -> None:
    sections = [*evaluation.of_kind("all"), *evaluation.of_kind("domain")]
    svg = plots.forest(sections)
    assert {"all", "bank", "files", "mail"} <= set(texts(svg))
    rows = {round(float(e.get("cy"))) for e in ET.fromstring(svg).iter(f"{NS}circle")} - {14}
    assert len(rows) == 4
    assert np.diff(sorted(rows)).tolist() == [24, 24, 24]


def test_timelines_of_every_length_and_name(world) -> None:
    for record in world.scored[:60]:
        trajectory = next(t for t in world.trajectories if t.id == record.id)
        tools = [s.tool for s in trajectory.steps]
        svg = plots.timeline(record, tools, range(len(record)))
        root = ET.fromstring(svg)
        assert not [e for e in root.iter() if "script" in e.tag]
        titles = [e.text for e in root.iter(f"{NS}title")]
        assert len(titles) == len(record)
        for t, title in enumerate(titles):
            assert title.startswith(f"step {t}: ")
            assert title.endswith(["PASS", "HOLD", "BLOCK"][record.decision[t]])
        assert ("first hazard" in texts(svg)) == (record.first_hazard is not None)
        assert not re.search(r"\bnan\b", svg)


def test_timeline_window_and_close_thresholds(world) -> None:
    record = next(s for s in world.scored if len(s) == 60)
    close = replace(record, lambda_block=0.5, lambda_hold=0.5, first_hazard=None)
    svg = plots.timeline(close, ["t"] * 60, range(20, 30))
    titles = [e.text for e in ET.fromstring(svg).iter(f"{NS}title")]
    assert [title.split(":")[0] for title in titles] == [f"step {t}" for t in range(20, 30)]
    labels = {e.text: float(e.get("y")) for e in ET.fromstring(svg).iter(f"{NS}text") if "0.50" in (e.text or "")}
    assert abs(labels["BLOCK 0.50"] - labels["HOLD 0.50"]) >= 12
