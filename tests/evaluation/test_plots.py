"""Charts draw the right values and stay valid XML whatever the tool names are."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from jaxguard.evaluation import plots
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.evaluate import evaluate
from jaxguard.evaluation.metrics import tabulate
from jaxguard.evaluation.svg import COLORS, Box, text_width
from jaxguard.evaluation.timing import LeadTimes, Warnings

NS = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def evaluation(world):
    return evaluate(world.scored, world.calibration, {"rule": np.ones(360, bool)}, resamples=30)


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ET.fromstring(svg).iter(f"{NS}text")]


def boxes(svg: str) -> dict[str, Box]:
    """Where the texts that are not turned stand."""
    found = {}
    for e in ET.fromstring(svg).iter(f"{NS}text"):
        if e.get("transform") is None:
            size, x, y = float(e.get("font-size")), float(e.get("x")), float(e.get("y"))
            width = text_width(e.text, size, bold=e.get("font-weight") is not None)
            left = x - width * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor")]
            found[e.text] = Box(left, y - 0.8 * size, left + width, y + 0.2 * size)
    return found


def overlapping(svg: str, names: list[str]) -> list[tuple[str, str]]:
    found = boxes(svg)
    return [(a, b) for a in names for b in found if a != b and found[a].meets(found[b])]


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
    assert float(dot.get("cy")) == pytest.approx(376 - ours["sr"].value * 320, abs=0.1)
    assert "rule" in texts(svg)


@pytest.mark.parametrize("corner", [(0.0, 0.0), (1.0, 1.0), (0.1, 1.0), (0.5, 0.5)])
def test_roc_labels_every_baseline_readably(world, evaluation, corner) -> None:
    names = [f"logistic (kind {i})" for i in range(7)]
    places = [np.clip(np.asarray(corner) + 0.03 * (i // 3), 0, 1).tolist() for i in range(7)]
    rivals = {
        name: {"fpr": Interval(fpr, fpr, fpr, 1), "sr": Interval(sr, sr, sr, 1)}
        for name, (fpr, sr) in zip(names, places, strict=True)
    }
    section = replace(evaluation.overall, rows={"jaxguard": evaluation.overall.rows["jaxguard"], **rivals})
    svg = plots.roc(tabulate(world.scored), section)
    operating = next(text for text in texts(svg) if text.startswith("operating point"))
    assert set(names) <= set(texts(svg))
    assert overlapping(svg, [*names, operating]) == []


def test_roc_shows_both_curves_where_they_are_equal(world, evaluation) -> None:
    table = tabulate(world.scored)
    svg = plots.roc(replace(table, max_hazard=table.max_fused), evaluation.overall)
    fused, hazard = list(ET.fromstring(svg).iter(f"{NS}path"))[1:]
    assert fused.get("d") == hazard.get("d")
    assert fused.get("stroke-dasharray") is None
    assert hazard.get("stroke-dasharray")
    assert float(hazard.get("stroke-width")) < float(fused.get("stroke-width"))


def test_calibration_band_shows_the_achieved_level(world) -> None:
    table = tabulate(world.scored)
    achieved = (table.max_fused[~table.unsafe] > world.calibration.lambda_hold).mean()
    assert f"alpha 0.1: achieved {achieved:.3f}" in texts(plots.calibration_band(table, world.calibration))
    only_unsafe = tabulate([s for s in world.scored if s.unsafe])
    assert "no safe trajectories to compare" in texts(plots.calibration_band(only_unsafe, world.calibration))


def test_calibration_axis_holds_all_values(world) -> None:
    table = tabulate(world.scored)
    shifted = replace(table, max_fused=np.where(table.unsafe, table.max_fused, table.max_fused**0.2))
    svg = plots.calibration_band(shifted, world.calibration)
    curve = list(ET.fromstring(svg).iter(f"{NS}path"))[-1]
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", curve.get("d"))]
    achieved = (shifted.max_fused[~table.unsafe] > world.calibration.hold_at(0.5).value).mean()
    assert achieved > 0.7
    assert min(heights) == pytest.approx(376 - 320 * achieved, abs=0.1)
    legend = boxes(svg)["95% band if exchangeable"]
    assert legend.bottom < 56


def warned(alpha: float, fpr: float, phir: float, lead: float = 2.0) -> Warnings:
    return Warnings(alpha, 0.5, fpr, phir, lead if phir else float("nan"))


def test_early_warning_labels_points_where_they_are(world, evaluation) -> None:
    warnings = (warned(0.05, 0, 0), warned(0.1, 0, 0), warned(0.2, 0.1, 0.9, 2.6))
    svg = plots.early_warning(tabulate(world.scored), replace(evaluation, early_warning=warnings))
    found, label = boxes(svg), "alpha 0.2, 2.6 steps ahead"
    assert {"alpha 0.05, 0.1", label} <= set(found)
    assert overlapping(svg, ["alpha 0.05, 0.1", label]) == []
    for text, (x, y) in {"alpha 0.05, 0.1": (58, 276), label: (58 + 0.2 * 466, 276 - 0.9 * 236)}.items():
        box = found[text]
        assert max(box.left - x, x - box.right, box.top - y, y - box.bottom, 0) < 30
    ours = [e for e in ET.fromstring(svg).iter(f"{NS}circle") if e.get("fill") == COLORS["unsafe"]]
    assert [(e.get("cx"), e.get("cy")) for e in ours] == [("58.0", "276.0")]


def test_early_warning_labels_what_was_configured_or_the_last(world, evaluation) -> None:
    table = tabulate(world.scored)
    crowd = tuple(warned(a, 0.1 + a / 1000, 0.5) for a in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4))
    for alpha, expected in ((0.05, "alpha 0.01"), (0.07, "alpha 0.01")):
        svg = plots.early_warning(table, replace(evaluation, early_warning=crowd, alpha_hold=alpha))
        labels = [text for text in texts(svg) if text.startswith("alpha")]
        assert any(text.startswith(expected) for text in labels)
        assert overlapping(svg, labels) == []
    far = (warned(0.1, 0.8, 0.9), warned(0.2, 0.9, 0.9))
    svg = plots.early_warning(table, replace(evaluation, early_warning=far))
    assert "alpha 0.1, 2.0 steps ahead" in texts(svg)


def test_early_warning_says_what_its_ceiling_means(world, evaluation) -> None:
    table = tabulate(world.scored)
    ours = evaluation.overall.rows["jaxguard"]

    def drawn(ceiling: float) -> list[str]:
        rows = {"jaxguard": {**ours, "phir_ceiling": Interval(ceiling, ceiling, ceiling, 1)}}
        overall = replace(evaluation.overall, rows=rows)
        return texts(plots.early_warning(table, replace(evaluation, sections=(overall,))))

    assert "0.64: more only with as many false alerts" in drawn(0.64)
    assert not any("more only" in text for text in drawn(1.0))


def test_untimed_runs_get_a_reason_instead_of_an_empty_chart(world, evaluation) -> None:
    reason = ["no unsafe trajectory has a known hazard step"]
    assert texts(plots.lead_time_chart(LeadTimes({}, 0, 0))) == reason
    untimed = tabulate([replace(s, timing=False) for s in world.scored])
    assert texts(plots.early_warning(untimed, evaluation)) == reason
    only_unsafe = tabulate([s for s in world.scored if s.unsafe])
    assert texts(plots.early_warning(only_unsafe, evaluation)) == ["no safe trajectories to compare"]


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


def test_forest_gives_long_names_room(evaluation) -> None:
    long = "Data Exfiltration & Leakage of Credentials"
    svg = plots.forest([evaluation.overall, replace(evaluation.overall, kind="risk_type", name=long)])
    assert long in texts(svg)
    endless = plots.forest([replace(evaluation.overall, kind="risk_type", name="W" * 300)])
    assert min(box.left for box in boxes(endless).values()) >= 0
    assert any(text.endswith("…") for text in texts(endless))


@pytest.mark.parametrize("steps", [1, 2, 4, 12, 30])
def test_timeline_shows_long_tool_names_within_the_picture(world, steps: int) -> None:
    record = next(s for s in world.scored if len(s) == 60)
    tool = "TrafficControlGivePriority"
    svg = plots.timeline(record, [tool] * 60, range(steps))
    root = ET.fromstring(svg)
    names = [e for e in root.iter(f"{NS}text") if e.text == tool]
    assert len(names) == steps
    for e in names:
        size, x, y = float(e.get("font-size")), float(e.get("x")), float(e.get("y"))
        turn = float(re.findall(r"rotate\(([-\d.]+)", e.get("transform") or "rotate(0")[0])
        width = text_width(tool, size) * (1 if turn else 0.5)
        assert x - width * np.cos(np.radians(turn)) >= 0
        assert y - width * np.sin(np.radians(turn)) <= float(root.get("height"))


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
