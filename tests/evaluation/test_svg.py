"""Scales, ticks, and that nothing escapes from a text."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from jaxguard.evaluation.svg import Canvas, Scale, plot, tick_text, ticks


def test_scale_maps_clamps_and_may_be_reversed() -> None:
    scale = Scale(0, 2, 100, 300)
    assert [scale(v) for v in (0, 1, 2, -5, 9)] == [100, 200, 300, 100, 300]
    down = Scale(4, 0, 0, 100)
    assert [down(v) for v in (4, 1, 0, -1)] == [0, 75, 100, 100]


@pytest.mark.parametrize("high", [0.013, 0.3, 1.0, 7, 43, 1234])
def test_ticks_are_round_few_and_reach_the_top(high: float) -> None:
    got = ticks(high)
    assert got[0] == 0
    assert got[-1] >= high - 1e-9
    assert 3 <= len(got) <= 7
    assert len({tick_text(t, got) for t in got}) == len(got)


def test_text_attributes_and_titles_are_escaped() -> None:
    evil = "</text><script>alert('1')</script>\"&\x00\u202e"
    canvas = Canvas(10, 10, evil)
    canvas.text(1, 1, evil)
    canvas.dot(1, 1, 2, "#000", title=evil)
    root = ET.fromstring(canvas.render())
    texts = [element.text for element in root.iter() if element.text]
    assert texts == ["</text><script>alert('1')</script>\"&\ufffd\ufffd"] * 2
    assert not any("script" in element.tag for element in root.iter())


def test_paths_break_at_nan() -> None:
    canvas = Canvas(10, 10, "c")
    canvas.path([(0, 1), (1, math.nan), (2, 3), (3, 4)], "#000")
    assert 'd="M0.0 1.0 M2.0 3.0 L3.0 4.0"' in canvas.render()


def test_plot_is_valid_xml() -> None:
    area = plot("p", size=(200, 100), x=(0, 1), y=(0, 1), x_ticks=(0, 1), y_ticks=(0, 0.5, 1), x_label="a", y_label="b")
    root = ET.fromstring(area.canvas.render())
    assert [e.text for e in root.iter("{http://www.w3.org/2000/svg}text")] == ["0.0", "0.5", "1.0", "0", "1", "a", "b"]
