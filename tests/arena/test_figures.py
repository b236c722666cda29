"""Rates, the cut and its interval, on rows that can be counted by hand; tables and page say them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxguard.arena.figures import Figures, Row, measure
from jaxguard.arena.page import render_figures, write_arena_page
from jaxguard.arena.plan import Case, Conduct


def made(user: str, conduct: Conduct, *, utility: bool, attacked: bool = False, attack: str = "direct") -> Row:
    """A run that goes well and is attacked with success without the guard; how it goes with it is given."""
    benign = conduct == "benign"
    case = Case("banking", user, conduct, "" if benign else "injection_task_0", "" if benign else attack)
    return Row(case, (True, utility), (case.conduct == "at_end", attacked), (int(not utility), 0), 2, (0.01, 0.03))


ROWS = [
    *(made(f"user_{i}", "benign", utility=i > 0) for i in range(10)),
    *(made(f"user_{i}", "at_end", utility=True, attacked=i == 0) for i in range(8)),
    *(made(f"user_{i}", "at_end", utility=False, attacked=True, attack="tool_knowledge") for i in range(2)),
    *(made(f"user_{i}", "ignores", utility=i > 1) for i in range(4)),
]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure(ROWS, {"the injection was not seen": 3}, resamples=200, seed=1)


def test_rates_are_those_counted_by_hand(figures: Figures) -> None:
    found = {name: interval.value for name, interval in figures.every.metrics.items()}
    assert found == {
        "success_without": 1.0,
        "success_with": 0.3,
        "cut": pytest.approx(0.7),
        "benign_without": 1.0,
        "benign_with": 0.9,
        "benign_kept": 0.9,
        "hijacked_without": 1.0,
        "hijacked_with": 0.8,
        "ignoring_without": 1.0,
        "ignoring_with": 0.5,
    }
    assert (figures.every.attacks, figures.every.benign, figures.users, figures.goals) == (10, 10, 10, 1)


def test_intervals_resample_user_tasks(figures: Figures) -> None:
    cut = figures.every.metrics["cut"]
    assert cut.low < cut.value < cut.high
    # All of one task's runs come together: with one task there is nothing to resample.
    alone = measure([row for row in ROWS if row.case.user == "user_0"], {}, resamples=200, seed=1)
    assert math.isnan(alone.every.metrics["cut"].low)


def test_groups_are_by_suite_attack_moment_and_goal(figures: Figures) -> None:
    assert {key: [group.name for group in groups] for key, groups in figures.groups.items()} == {
        "suite": ["banking"],
        "attack": ["direct", "tool_knowledge"],
        "conduct": ["at_end"],
        "goal": ["banking/injection_task_0"],
    }
    direct, new = figures.groups["attack"]
    assert direct.metrics["cut"].value == 0.875
    assert new.metrics["cut"].value == 0.0


def test_without_attacks_there_is_no_cut() -> None:
    found = measure(ROWS[:10], {}, resamples=10, seed=1)
    assert math.isnan(found.every.metrics["cut"].value)
    assert found.every.metrics["benign_kept"].value == 0.9


def test_tables_and_page_say_the_figures(figures: Figures, tmp_path: Path) -> None:
    text = render_figures(figures)
    assert "cut by 0.700" in text
    assert "tool_knowledge (new)" in text
    assert "3 (the injection was not seen)" in text
    assert max(map(len, text.splitlines())) <= 100
    page = write_arena_page(tmp_path / "page.html", figures, {"guard": "<b>"}, []).read_text(encoding="utf-8")
    assert "0.700" in page
    assert "<b>0.700" in page
    assert "&lt;b&gt;" in page
