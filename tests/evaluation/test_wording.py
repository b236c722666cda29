"""Numbers and foreign text."""

from __future__ import annotations

import math

import pytest

from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.wording import arguments, clip, number, risk, span, told_apart, visible, visible_lines


@pytest.mark.parametrize(
    ("value", "metric", "text"),
    [(0.12345, "sr", "0.123"), (1.0, "f1", "1.000"), (2.345, "mas", "2.35"), (-0.05, "", "−0.050"),
     (-0.0001, "", "0.000"), (math.nan, "sr", "–"), (math.inf, "", "–")],
)  # fmt: skip
def test_number(value: float, metric: str, text: str) -> None:
    assert number(value, metric) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.00"), (0.00004, "<0.0001"), (0.0007, "0.0007"), (0.0049, "0.0049"), (0.005, "0.01"),
     (0.9949, "0.99"), (0.996, "0.9960"), (0.99994, "0.9999"), (0.99996, ">0.9999"), (1.0, "1.00"),
     (math.nan, "–")],
)  # fmt: skip
def test_risk_shows_that_it_is_above_nothing_and_below_one(value: float, text: str) -> None:
    assert risk(value) == text


def test_span() -> None:
    assert span(Interval(0.5, 0.411, 1.0, 9)) == ".41–1"
    assert span(Interval(0.0, -0.06, 0.2, 9)) == "−.06–.20"
    assert span(Interval(2, 1.04, 10.26, 9), "mas") == "1.0–10.3"
    assert span(Interval(0.5, math.nan, math.nan, 0)) == ""


def test_visible_hides_nothing() -> None:
    assert visible("a\u202eb\x1b[2Jc\nd\te\ud800") == "a\ufffdb\ufffd[2Jc d e\ufffd"
    assert visible("ünï 漢字 👍🏽") == "ünï 漢字 👍🏽"


def test_clip_cuts_with_a_mark() -> None:
    assert clip("short", 10) == "short"
    assert clip("x" * 11, 10) == "x" * 9 + "…"
    assert clip("y" * 10_000_000, 5) == "yyyy…"


def test_arguments() -> None:
    assert arguments({"to": "a@b.c", "n": 3, "deep": {"k": [1, None]}}, None, 80) == (
        'to=a@b.c, n=3, deep={"k": [1, null]}'
    )
    assert arguments(None, '{"broken', 80) == '{"broken'
    assert arguments({}, None, 80) == ""
    assert len(arguments({"text": "z" * 10**6}, None, 40)) == 40


def test_lines_are_kept_and_nothing_else_that_moves_a_cursor() -> None:
    assert visible_lines("a\r\nb\n\tc\x1b[2J\u202ed\re\u2028f") == "a\nb\n c\ufffd[2J\ufffdd e f"


def test_shares_that_three_digits_do_not_tell_apart_get_more() -> None:
    assert [told_apart(t, [0.25, 0.5]) for t in (0.25, 0.5)] == ["0.250", "0.500"]
    close = [0.49991, 0.50003, 0.99996]
    assert [told_apart(t, close) for t in close] == ["0.49991", "0.50003", "0.99996"]
    assert told_apart(0.42, [0.42], 2) == "0.42"
    assert told_apart(1.0, [1.0]) == "1.000"
