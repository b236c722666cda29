"""Scales, ticks, and that nothing escapes from a text."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from jaxguard.evaluation.svg import Box, Canvas, Label, Labels, Scale, fit, plot, text_width, tick_text, ticks


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


def test_text_is_fitted_to_a_width() -> None:
    assert text_width("漢字", 10) == 20
    assert text_width("ab", bold=True) > text_width("ab")
    assert fit("short", 100) == "short"
    cut = fit("a rather long name", 60)
    assert cut.endswith("…")
    assert text_width(cut) <= 60
    assert fit("W" * 1000, 1) == "…"


def test_labels_keep_off_each_other_marks_and_curves() -> None:
    labels = Labels(Canvas(300, 200, "c"), Box(0, 0, 300, 200))
    labels.mark(100, 100, 5)
    labels.trace([(110, 100), (300, 100)])
    wanted = [Label(100, 100, text, reach=80) for text in ("first", "second", "third", "fourth", "fifth")]
    assert labels.beside(wanted) == []
    taken = [*labels.texts, *labels.marks]
    assert not any(a.meets(b) for i, a in enumerate(taken) for b in taken[:i])
    assert all(labels.bounds.holds(box) for box in labels.texts)
    assert not any(box.right > 110 and box.top < 100 < box.bottom for box in labels.texts)


def test_labels_name_the_texts_without_room() -> None:
    labels = Labels(Canvas(60, 30, "c"), Box(0, 0, 60, 30))
    labels.mark(10, 15, 5)
    assert labels.beside([Label(10, 15, "fits"), Label(10, 15, "does not fit at all")]) == ["does not fit at all"]
    assert labels.canvas.render().count("<text") == 1


def test_a_text_without_room_is_placed_before_the_others() -> None:
    labels = Labels(Canvas(200, 20, "c"), Box(0, 0, 200, 20))
    assert labels.beside([Label(100, 10, "free"), Label(190, 10, "left of its mark")]) == []
    assert labels.texts[0].right < 190
    assert labels.texts[1].right < 100
