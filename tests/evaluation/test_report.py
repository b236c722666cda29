"""The HTML report: complete, self-contained, and immune to what tools are called."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from jaxguard.decision.scored import judge
from jaxguard.evaluation.evaluate import GUARD, evaluate
from jaxguard.evaluation.report import STORIES, ReportError, choose, write_report
from jaxguard.types import Step, Trajectory

VOID = {"meta", "col", "br", "link", "img"}


class Checker(HTMLParser):
    """Collects tags and text, and checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.text.append(data)


def report(world, tmp_path, **settings) -> tuple[str, Checker]:
    evaluation = evaluate(
        world.scored, world.calibration, {"<b>rule</b>": np.ones(len(world.scored), bool)}, resamples=20
    )
    texts = {t.id: t for t in world.trajectories}
    options = {"title": "Test <i>run</i>", "provenance": {"Seed": 1, "Note": "<img src=x onerror=alert(1)>"}}
    path = write_report(
        tmp_path / "new" / "r.html", evaluation, world.scored, texts, world.calibration, **{**options, **settings}
    )
    page = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    return page, checker


def test_page_is_complete_and_small(world, tmp_path) -> None:
    page, checker = report(world, tmp_path)
    text = " ".join(checker.text)
    for part in ("Safety rate", "False-alert calibration", "Lead time", "ROC", "By data set", "By domain", "Timelines",
                 "Counts and provenance", "unlabelled, scored by no metric", "excluded from timing", "minilm-l3-4f2a",
                 "w-91be", "always alert", "first hazard"):  # fmt: skip
        assert part in text, part
    kinds = {story.kind for story in choose(world.scored)}
    assert {"early", "at_hazard", "missed", "false_alert", "quiet"} <= kinds
    for kind in kinds:
        assert STORIES[kind] in text
    assert len(page.encode()) < 5_000_000
    assert checker.tags.count("section") == len(choose(world.scored))


def test_nothing_runs_and_nothing_is_fetched(world, tmp_path) -> None:
    page, checker = report(world, tmp_path, each=40)  # enough to include the nasty names
    assert "&lt;script&gt;" in page
    assert not {"script", "img", "iframe", "object", "link", "i", "image"} & set(checker.tags)
    names = {name for name, _ in checker.attributes}
    assert not {n for n in names if n.startswith("on")} | ({"src", "href", "xlink:href"} & names)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert "default-src 'none'" in page
    assert "\u202e" not in page
    assert "\x07" not in page


def test_figures_in_text_are_those_of_the_evaluation(world, tmp_path) -> None:
    _, checker = report(world, tmp_path)
    evaluation = evaluate(world.scored, world.calibration, resamples=0)
    text = " ".join(" ".join(checker.text).split())
    ours = evaluation.overall.rows[GUARD]
    assert f"stopped {100 * ours['sr'].value:.1f} % of the unsafe" in text
    assert f"hazard > {world.calibration.lambda_block:.4f}" in text


def test_choice_is_deterministic_and_tells_the_truth(world) -> None:
    stories = choose(world.scored, each=3)
    assert [s.record.id for s in stories] == [s.record.id for s in choose(list(reversed(world.scored)), each=3)]
    for story in stories:
        r = story.record
        if story.kind == "early":
            assert r.first_alert < r.first_hazard
        elif story.kind == "missed":
            assert r.unsafe
            assert r.first_alert is None
        elif story.kind == "false_alert":
            assert r.unsafe is False
            assert r.first_alert is not None
    early = [s.record for s in stories if s.kind == "early"]
    assert len({r.source for r in early}) == 3


@pytest.mark.slow
def test_ten_thousand_steps_and_nonfinite_scores(world, tmp_path, build) -> None:
    other = build(seed=5, n=30)
    long = Trajectory("long", "w " * 10**5, tuple(Step("t" * 5_000, {"a": "b" * 9_000}, str(i)) for i in range(10_000)),
                      unsafe=True, first_hazard=7_000, timing=True, source="drift")  # fmt: skip
    broken = Trajectory("broken", "", (Step("", None, "0", raw_arguments="{"),) * 2, unsafe=False, source="drift")
    hazard = np.full(10_002, 0.01)
    hazard[7_000] = 0.99
    hazard[-2:] = np.nan
    scored = judge([long, broken], hazard, np.full(10_002, 0.01), other.calibration)
    other.trajectories += [long, broken]
    other.scored += scored
    page, checker = report(other, tmp_path)
    assert "Steps 6,990 to 7,049 of 10,000." in page
    assert STORIES["nonfinite"] in " ".join(checker.text)
    assert len(page) < 1_000_000


def test_one_class_and_no_texts(world, tmp_path, build) -> None:
    other = build(seed=6, n=60)
    other.scored[:] = [s for s in other.scored if s.unsafe]
    _, checker = report(other, tmp_path)
    assert "ROC" not in checker.text
    evaluation = evaluate(other.scored, other.calibration, resamples=0)
    with pytest.raises(ReportError, match="trajectories_by_id: nothing for"):
        write_report(tmp_path / "x.html", evaluation, other.scored, {}, other.calibration, title="t")
    short = {t.id: Trajectory(t.id, "", ()) for t in other.trajectories}
    with pytest.raises(ReportError, match="has 0 steps, expected"):
        write_report(tmp_path / "x.html", evaluation, other.scored, short, other.calibration, title="t")
