"""Snapshots, their canonical JSON, and reviews."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxguard.traces.snapshots import (
    TRIGGERS,
    Call,
    Outcome,
    Review,
    Snapshot,
    SnapshotError,
    review_record,
    reviews_of,
    snapshot,
)
from jaxguard.types import Decision, Route, Step, Trajectory


def trajectory(**metadata: Any) -> Trajectory:
    steps = (
        Step("find", {"b": 1, "a": [{"d": 2, "c": None}]}, "1", observation="before"),
        Step("read", None, "2", observation="found two", raw_arguments="{broken"),
        Step("read", {}, "3", observation="found two", parallel=True),
        Step("send", {"to": "é"}, "4", observation="texts"),
    )
    return Trajectory("run", "task", steps, metadata=metadata, final_observation="sent")


def test_a_snapshot_shows_memory_task_domain_and_what_was_seen_before_the_proposal() -> None:
    shown = snapshot(trajectory(memory="I like care.", domain="mail", service="mailer"), 3)
    assert (shown.memory, shown.task, shown.domain, shown.context) == ("I like care.", "task", "mail", "before")
    assert shown.action == Call("send", {"to": "é"})
    # Parallel calls share what came before both: it stands once, and their results come after the second.
    assert [entry.observation for entry in shown.trace] == ["found two", "", "texts"]
    assert shown.trace[1] == Outcome(Call("read", "{broken"), "")
    assert snapshot(trajectory(service="mailer"), 0).domain == "mailer"


def test_a_snapshot_depends_on_nothing_after_the_proposal() -> None:
    whole = trajectory()
    for t in range(4):
        later = [dataclasses.replace(s, tool="other", observation="changed") for s in whole.steps[t + 1 :]]
        other = dataclasses.replace(whole, steps=(*whole.steps[: t + 1], *later), final_observation="changed")
        assert snapshot(other, t).to_json() == snapshot(whole, t).to_json()


def test_canonical_json_is_one_text() -> None:
    assert snapshot(trajectory(), 1).to_json() == (
        '{"memory":"","task":"task","domain":"","context":"before","trace":[{"tool":"find","arguments":{"a":[{"c":null,'
        '"d":2}],"b":1},"observation":"found two"}],"action":{"tool":"read","arguments":"{broken"}}'
    )
    assert "é" in snapshot(trajectory(), 3).to_json()


def test_surrogates_become_the_replacement_character() -> None:
    lone = dataclasses.replace(trajectory(), instruction="a\ud800b")
    assert json.loads(snapshot(lone, 0).to_json())["task"] == "a�b"


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1: 2}, object(), nested(5_000)], ids=lambda v: type(v))
def test_arguments_that_json_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(SnapshotError):
        Snapshot("", "", "", "", (), Call("t", {"x": value})).to_json()


def test_no_such_step_and_memory_of_another_kind() -> None:
    with pytest.raises(SnapshotError, match="step is 4, expected 0 to 3"):
        snapshot(trajectory(), 4)
    with pytest.raises(SnapshotError, match="memory is 3, expected a text"):
        snapshot(trajectory(memory=3), 0)


def test_reviews_come_back_from_metadata() -> None:
    reviews = [Review(0, Route.EXECUTE), Review(3, Route.ASK, "h")]
    records = [review_record(review) for review in reviews]
    assert records == [{"step": 0, "route": "EXECUTE"}, {"step": 3, "route": "ASK", "trigger": "h"}]
    assert list(reviews_of(trajectory(reviews=records))) == reviews
    assert reviews_of(trajectory()) == ()


@pytest.mark.parametrize(
    "reviews",
    [
        {"step": 0},
        ["ASK"],
        [{"step": 4, "route": "ASK"}],
        [{"step": True, "route": "ASK"}],
        [{"step": 0, "route": "HOLD"}],
        [{"step": 0, "route": ["ASK"]}],
        [{"step": 0, "route": "ASK", "trigger": ["h"]}],
        [{"step": 0, "route": "ASK", "trigger": {}}],
        [{"step": 0, "route": "ASK", "trigger": "z"}],
        [{"step": 0, "route": "ASK", "why": "x"}],
        [{"step": 1, "route": "ASK"}, {"step": 1, "route": "ASK"}],
    ],
)
def test_broken_reviews_are_refused(reviews: Any) -> None:
    with pytest.raises(SnapshotError, match="trajectory 'run': reviews"):
        reviews_of(trajectory(reviews=reviews))


def test_routes_are_as_severe_as_decisions_and_triggers_have_one() -> None:
    assert [Decision(route).name for route in Route] == ["PASS", "HOLD", "BLOCK"]
    assert [list(TRIGGERS.values()).count(route) for route in Route] == [4, 5, 5]
