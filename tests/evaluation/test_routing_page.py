"""Charts of a router draw the right values, and page and table show what was found whatever services are called."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from routed import NASTY, SERVICES, make_routing, make_rows

from jaxguard.evaluation import routing_plots as plots
from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.routing import Frontier, PointResult, evaluate_routing, reliability
from jaxguard.evaluation.routing_page import render, write_routing_report
from jaxguard.evaluation.routing_rows import METRICS
from jaxguard.evaluation.svg import COLORS

NS = "{http://www.w3.org/2000/svg}"
ABOUT = "The corpus is generated; always naming the most frequent class reaches 0.34."


@pytest.fixture(scope="module")
def found():
    rows = make_rows(400, 2, services=(*SERVICES, "mail"))
    grid = {"runner A": make_rows(60, 7), "chain B": make_rows(60, 8)}
    routing = make_routing(make_rows(400, 1), min_rows=20, delta=0.2)
    rivals = {NASTY: np.zeros(len(rows), int)}
    return evaluate_routing(
        rows,
        routing,
        source="abc",
        rivals=rivals,
        unseen={"mail": rows.of("services", "mail")},
        grid=grid,
        resamples=50,
    )


def texts(svg: str) -> list[str]:
    return [own.text or "" for own in ET.fromstring(svg).iter(f"{NS}text")]


def point(name: str, oar: float | None, uar: float | None) -> PointResult:
    return PointResult(name, 0.5, {"oar": oar, "uar": uar}, None, None)


CURVE = Frontier("", (0.1, 0.5, 0.9), (0.0, 0.1, 0.8), (0.6, 0.1, 0.0))


def test_pareto_marks_points_and_rivals() -> None:
    points = [point("autonomous", 0.02, 0.3), point("balanced", 0.1, 0.1), point("gone", None, 0.1)]
    svg = plots.pareto(CURVE, points, {"always ASK": (1.0, 0.0)})
    assert {"autonomous, τ 0.50", "balanced, τ 0.50", "always ASK"} <= set(texts(svg))
    assert not any("gone" in text for text in texts(svg))
    stars = [own for own in ET.fromstring(svg).iter(f"{NS}polygon") if own.get("fill") == COLORS["unsafe"]]
    corners = np.array([[float(v) for v in pair.split(",")] for pair in stars[1].get("points").split()])
    middle = corners.mean(axis=0)
    assert middle == pytest.approx([58 + 0.1 * (540 - 16 - 58), 376 - 0.1 * (376 - 40)], abs=0.3)


def test_a_closer_look_leaves_out_what_is_beyond() -> None:
    svg = plots.pareto(CURVE, [point("balanced", 0.1, 0.1), point("far", 0.5, 0.1)], {"always ASK": (1, 0)}, top=0.2)
    assert "balanced, τ 0.50" in texts(svg)
    assert not {"far, τ 0.50", "always ASK"} & set(texts(svg))
    path = next(own for own in ET.fromstring(svg).iter(f"{NS}path"))
    assert path.get("d").count("L") + path.get("d").count("M") == 1  # one of the three taus lies within


def test_service_frontiers_name_at_most_ten() -> None:
    curves = [replace(CURVE, service=f"s{i}") for i in range(12)]
    svg = plots.service_frontiers(curves, {"s0": (0.1, 0.1)})
    assert [text for text in texts(svg) if text.startswith("s")] == [f"s{i}" for i in range(10)]
    drawn = {(own.get("stroke"), own.get("stroke-dasharray")) for own in ET.fromstring(svg).iter(f"{NS}path")}
    assert len(drawn) == 10


def test_reliability_diagram_states_error_and_rows() -> None:
    diagram = reliability(np.array([0.1, 0.9]), np.array([False, True]), bins=5)
    svg = plots.reliability_diagram(diagram, claim="q", outcome="share")
    assert "expected calibration error 0.100, 2 rows" in texts(svg)
    assert len(list(ET.fromstring(svg).iter(f"{NS}circle"))) == 2
    empty = plots.reliability_diagram(reliability(np.empty(0), np.empty(0, bool)), claim="q", outcome="share")
    assert "no rows" in texts(empty)


def test_confusion_chart_shows_counts_and_shares() -> None:
    shown = texts(plots.confusion_chart(((8, 2, 0), (1, 2, 1), (0, 0, 0))))
    assert {"8", "80.0 %", "20.0 %", "25.0 %", "50.0 %"} <= set(shown)
    assert shown.count("–") == 3  # no REFUSE row: no shares


def test_page_shows_what_was_found(found, tmp_path: Path) -> None:
    path = write_routing_report(tmp_path / "routing.html", found, about=ABOUT, facts={"split": "test"})
    page = path.read_text(encoding="utf-8")
    assert page.index(ABOUT) < page.index('class="cards"')
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    ours = found.overall.models["router"]
    for expected in (f"{ours['acc'].value:.3f}", "what it never saw", "certified",
                     "By trigger", "user&#39;s memory", "chain B", "split", "always REFUSE"):  # fmt: skip
        assert expected in page, expected
    for svg in page.split("<svg")[1:]:
        ET.fromstring("<svg" + svg[: svg.index("</svg>") + 6])
    assert page.count("<svg") == 6


def test_a_page_without_a_word_on_the_data_is_refused(found, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="about"):
        write_routing_report(tmp_path / "routing.html", found, about=" ")


def test_page_of_rows_of_one_class(tmp_path: Path) -> None:
    rows = make_rows(200, 2)
    rows = rows.select((rows.labels == 0) & (np.array(rows.sides) == ""))
    routing = make_routing(make_rows(400, 1))
    found = evaluate_routing(rows, routing, source="abc", resamples=20)
    page = write_routing_report(tmp_path / "routing.html", found, about=ABOUT).read_text(encoding="utf-8")
    assert "user&#39;s memory" not in page
    assert found.frontiers == ()
    assert not re.search(r"\bnan\b", page + render(found), re.IGNORECASE)


def test_text_begins_with_the_data_and_fits(found) -> None:
    text = render(found, ABOUT)
    assert text.startswith(ABOUT)
    assert max(map(len, text.splitlines())) <= 100
    ours = found.overall.models["router"]
    line = next(line for line in text.splitlines() if line.startswith("router"))
    assert line.split()[1:] == [f"{ours[key].value:.3f}" for key in METRICS]
    for word in ("Never seen: mail", "Operating points (balanced in use)", "Flip pairs, cautious", "chain B", "σ"):
        assert word in text


def test_impossible_points_are_told(found) -> None:
    told = replace(found, impossible={"conservative": "no tau reaches UAR <= 0.05"})
    assert "conservative: impossible, no tau reaches UAR <= 0.05" in render(told)


def test_names_of_points_that_mislead_are_explained(found) -> None:
    assert "asks less" not in render(found)
    taus = {"autonomous": 0.6, "balanced": 0.4, "conservative": 0.3}
    told = replace(found, points=tuple(replace(point("x", 0.1, 0.1), name=n, tau=t) for n, t in taus.items()))
    told = replace(told, points=tuple(replace(p, values=found.points[0].values) for p in told.points))
    assert "conservative has the lower tau" in " ".join(render(told).split())
