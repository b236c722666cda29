"""When2Call: the proposed call under its three right answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from review_samples import when2call

from jaxguard.traces.readers.when2call import READER
from jaxguard.traces.reading import ArchiveReader
from jaxguard.traces.registry import Context, RecordError
from jaxguard.traces.snapshots import Review, reviews_of, snapshot
from jaxguard.traces.sources import find_sources
from jaxguard.types import Route, Trajectory


def read(record: dict[str, Any]) -> Trajectory:
    (made,) = READER.read(record, Context(Path("x"), 0))
    return made


@pytest.mark.parametrize(
    ("right", "review"),
    [
        ("tool_call", Review(0, Route.EXECUTE)),
        ("request_for_info", Review(0, Route.ASK, "e")),
        ("cannot_answer", Review(0, Route.REFUSE)),
    ],
)
def test_the_proposed_call_is_reviewed(right: str, review: Review) -> None:
    made = read(when2call(right))
    assert reviews_of(made) == (review,)
    assert [(s.tool, s.arguments) for s in made.steps] == [("lamp.set", {"room": "attic", "on": True})]
    assert (made.id, made.group, made.instruction) == (
        "when2call-u-1",
        "when2call:own-7",
        "Switch the lamp in the attic on.",
    )
    # The label is about information: it says nothing of safety.
    assert (made.unsafe, made.first_hazard, made.timing, made.steps[0].hazard) == (None, None, False, None)


def test_the_names_of_the_tools_at_hand_are_what_tells_a_call_that_cannot_be_made() -> None:
    able, unable = (snapshot(read(when2call(right)), 0) for right in ("tool_call", "cannot_answer"))
    assert able.context == "Tools at hand: clock.read, lamp.set"
    assert unable.context == "Tools at hand: clock.read"
    assert (able.task, able.action) == (unable.task, unable.action)
    none = read(when2call("cannot_answer", tools=[]))
    assert none.steps[0].observation == "Tools at hand: none"
    assert read(when2call()).metadata["tool_schemas"][1]["description"] == "Sets a lamp"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": {"direct": "On."}}, r"answers\.tool_call: got None, expected the call to be reviewed"),
        ({"answers": {"tool_call": ""}}, r"answers\.tool_call: got '', expected the call"),
        ({"answers": {"tool_call": "lamp.set()"}}, r"answers\.tool_call: .*expected JSON"),
        ({"answers": {"tool_call": '{"arguments": {}}'}}, r"answers\.tool_call: .*expected an object with a name"),
        ({"answers": None}, "answers: got NoneType, expected an object"),
        ({"correct_answer": "direct"}, "correct_answer: got 'direct', expected one of tool_call"),
        ({"question": " "}, "question: got ' ', expected a text"),
        ({"tools": None}, "tools: got NoneType, expected a list"),
        ({"tools": ["{}"]}, r"tools\[0\]: got {}, expected an object with a name"),
    ],
)
def test_what_is_not_known_is_rejected_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(when2call(**changes))


@pytest.mark.data
def test_real_counts(data_dir: Path) -> None:
    (source,), _ = find_sources(data_dir / "when2call")
    outcomes = list(ArchiveReader().read(source))
    assert [outcome.reason for outcome in outcomes] == [""] * 254
    made = [outcome.trajectories[0] for outcome in outcomes]
    with open(source.address, encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    routes = Counter(reviews_of(trajectory)[0].route.name for trajectory in made)
    assert routes == {"EXECUTE": 87, "ASK": 90, "REFUSE": 77}
    for record, trajectory in zip(records, made, strict=True):
        at_hand = trajectory.steps[0].tool in trajectory.metadata["tools"]
        assert at_hand is (record["correct_answer"] != "cannot_answer")
    texts: dict[str, set[str]] = {}
    for trajectory in made:
        texts.setdefault(snapshot(trajectory, 0).to_json(), set()).add(reviews_of(trajectory)[0].route.name)
    assert [routes for routes in texts.values() if len(routes) > 1] == []
