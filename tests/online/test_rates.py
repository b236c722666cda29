"""Rates, their intervals, the frontier and the page, from outcomes made by hand."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from scipy.stats import binomtest

from jaxguard.baselines.endpoint import Usage
from jaxguard.online.agent import Call, Run
from jaxguard.online.cases import Case
from jaxguard.online.conditions import Ruling
from jaxguard.online.judge import Judgement
from jaxguard.online.page import SCRIPTED, pareto, render, write_online_page
from jaxguard.online.rates import ConditionResult, Online, Outcome, Rate, condition_result
from jaxguard.types import Decision, Trajectory

NASTY = '<script>alert("x")</script>\n$x$'


def outcome(number: int, unsafe: bool, judged: bool | None, kind: str | None = "leak", group: str = "") -> Outcome:
    metadata = {"risk_type": kind} if kind else {}
    case = Case(Trajectory(f"t{number}", "go", (), unsafe=unsafe, group=group, metadata=metadata), {}, [])
    calls = [
        Call("read", {}, True, "", "recorded", Ruling(Decision.PASS, 0.1), 0.002),
        Call("send", {}, False, "", "refused", Ruling(Decision.HOLD, math.nan, "no score"), 0.004),
        Call("what", {}, False, "", "unknown_tool"),
    ]
    problems = {} if judged is not None else {"unsafe": "judge: timeout", "helped": "judge: timeout"}
    judgement = Judgement(judged if unsafe else None, None if unsafe else judged, problems)
    return Outcome("ours", case, Run(calls, "", "answer", "", []), judgement)


def result(*outcomes: Outcome) -> ConditionResult:
    return condition_result("ours", outcomes, resamples=200, seed=1)


def test_safety_is_of_unsafe_cases_utility_of_safe_ones_and_unscored_ones_are_in_neither() -> None:
    found = result(
        *(outcome(i, True, i < 2) for i in range(8)),
        *(outcome(10 + i, False, i < 3, "fraud") for i in range(4)),
        outcome(20, True, None),
        outcome(21, False, None, None),
        outcome(22, False, None, None),
    )
    assert (found.safety.value, found.safety.scored, found.safety.unscored) == (0.75, 8, 1)
    assert (found.utility.value, found.utility.scored, found.utility.unscored) == (0.75, 4, 2)
    assert found.unscored == {"judge: timeout": 3}
    assert found.safety.low < 0.75 < found.safety.high
    leak, fraud, none = (found.by_risk_type[kind] for kind in ("leak", "fraud", "none given"))
    assert (leak[0].value, leak[1].scored) == (0.75, 0)
    assert (fraud[0].scored, fraud[1].value) == (0, 0.75)
    assert (none[1].scored, none[1].unscored) == (0, 2)
    assert math.isnan(none[1].value)
    assert found.counts["decisions: HOLD"] == found.counts["guard could not score"] == 15
    assert found.counts["calls: unknown_tool"] == found.counts["ended: answer"] == 15
    assert found.counts["steps"] == 45


def test_intervals_keep_a_width_where_all_agree_and_widen_where_groups_do() -> None:
    agreeing = result(*(outcome(i, True, False) for i in range(10))).safety
    wilson = binomtest(10, 10).proportion_ci(method="wilson")
    assert (agreeing.value, agreeing.high) == (1.0, 1.0)
    assert agreeing.low == pytest.approx(wilson.low)
    alone = result(*(outcome(i, True, i % 2 == 0) for i in range(20))).safety
    grouped = result(*(outcome(i, True, i % 2 == 0, group=f"g{i % 2}") for i in range(20))).safety
    assert alone.value == grouped.value == 0.5
    assert (grouped.low, grouped.high) == (0.0, 1.0)
    assert 0.2 < alone.low < alone.high < 0.8


def rate(value: float) -> Rate:
    return Rate(value, max(value - 0.1, 0), min(value + 0.1, 1), 0 if math.isnan(value) else 10, 0)


def online(**points: tuple[float, float]) -> Online:
    results = [
        ConditionResult(name, rate(s), rate(u), {"leak": (rate(s), rate(u))}, {}, {"steps": 3})
        for name, (s, u) in points.items()
    ]
    return Online(results, {"unsafe": 48, "safe": 52}, {"without a tool": 7}, {"seed": 20260716, "hold": "deny"})


def test_the_frontier_is_what_nothing_beats() -> None:
    found = online(none=(0.2, 0.98), ours=(0.7, 0.9), worse=(0.6, 0.9), other=(0.9, 0.3), blind=(math.nan, 0.99))
    assert found.frontier == ["none", "ours", "other"]
    assert online(one=(0.5, 0.5), twin=(0.5, 0.5)).frontier == ["one", "twin"]


def test_the_picture_has_a_dot_for_each_condition_that_was_scored() -> None:
    found = online(none=(0.0, 1.0), ours=(0.7, 0.9), worse=(0.6, 0.8), blind=(math.nan, 0.99))
    root = ET.fromstring(pareto(found))
    dots = [e for e in root.iter() if e.tag.endswith("circle")]
    places = {e[0].text: (float(e.get("cx") or 0), float(e.get("cy") or 0)) for e in dots}
    assert len(dots) == 3
    (none, ours), path = (
        (next(at for title, at in places.items() if str(title).startswith(name)) for name in ("none", "ours")),
        next(e.get("d") or "" for e in root.iter() if e.tag.endswith("path")),
    )
    assert none[0] > ours[0]
    assert none[1] > ours[1]  # down the page
    ends = [tuple(map(float, at)) for at in re.findall(r"([\d.]+) ([\d.]+)", path)]
    assert ends == [ours, none]


def test_page_and_table_show_the_figures_and_say_what_was_scripted(tmp_path: Path) -> None:
    found = online(none=(0.1, 1.0), **{NASTY: (0.7292, 0.9038)})
    page = write_online_page(tmp_path / "online.html", found, {"agent": Usage(answered=3, cost=None)}).read_text()
    assert "<script>" not in page
    assert "0.729" in page
    assert "0.904" in page
    assert "without a tool (7)" in page
    assert "cost not known" in page
    assert SCRIPTED not in page
    assert "limit of steps" not in page
    cut = replace(found, results=[replace(r, counts={"ended: limit": 4}) for r in found.results])
    assert "8 runs ended at the limit of steps" in " ".join(render(cut).split())
    text = render(found)
    assert "0.729 (0.63–0.83)" in text
    assert max(map(len, text.splitlines())) <= 100
    scripted = replace(found, scripted=True)
    assert SCRIPTED in write_online_page(tmp_path / "s.html", scripted, {}).read_text()
    assert "no language model took part" in " ".join(render(scripted).split())
