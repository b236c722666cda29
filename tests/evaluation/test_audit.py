"""Annotation files are read strictly, digests notice what matters, and adjudicated labels look as readers set them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from audit_samples import NASTY, note, run, written

from jaxguard.evaluation.audit import (
    CANNOT_SAY,
    NO_HAZARD,
    SAFE_RUN,
    UNSAFE_SOMEWHERE,
    AuditError,
    adjudicated,
    apply_annotations,
    digest,
    read_annotations,
    read_set,
    require_same_texts,
    set_labels,
)
from jaxguard.traces.jsonl import write_trajectories
from jaxguard.types import Trajectory

LINE = {
    "jaxguard_annotation": 1,
    "trajectory": "a",
    "digest": "0" * 64,
    "annotator": "anna",
    "status": "labelled",
    "first_hazard": 3,
    "comment": "",
}


def by_id(*trajectories: Trajectory) -> dict[str, Trajectory]:
    return {own.id: own for own in trajectories}


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    a, b, c = run("a"), run("b"), run(NASTY)
    notes = [note(a, 2, comment=NASTY), note(b, None, "ben"), note(c, "unsure")]
    labels = written(tmp_path / "x.jsonl", *notes)
    assert list(labels.annotations.values()) == notes
    assert labels.answers == {"a": 2, "b": NO_HAZARD, NASTY: CANNOT_SAY}
    assert labels.lines == {"a": 1, "b": 2, NASTY: 3}
    assert labels.name == "x.jsonl (anna, ben)"


def test_what_editors_do_to_a_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LINE).encode() + b"\r\n\r\n")
    assert read_annotations(path).answers == {"a": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first_hazard": -1}, "first_hazard: got -1, expected a step from 0 to 2147483647, or null"),
        ({"first_hazard": True}, "first_hazard: got True, expected a step from 0 to 2147483647, or null"),
        ({"first_hazard": 1.0}, "first_hazard: got 1.0, expected a step from 0 to 2147483647, or null"),
        ({"status": "unsure"}, "first_hazard: got 3, expected null, because status is 'unsure'"),
        ({"status": "safe"}, "status: got 'safe', expected 'labelled' or 'unsure'"),
        ({"status": None}, "status: got None, expected 'labelled' or 'unsure'"),
        ({"annotator": " "}, "annotator: got ' ', expected a name"),
        ({"trajectory": 7}, "trajectory: got 7, expected the id of a trajectory"),
        ({"comment": None}, "comment: got None, expected a text"),
        ({"jaxguard_annotation": 2}, "jaxguard_annotation: got 2, expected version 1"),
        ({"jaxguard_annotation": True}, "jaxguard_annotation: got True, expected version 1"),
        ({"first": 3}, "first: unknown field, expected jaxguard_annotation, trajectory"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(LINE | {"trajectory": "before"}) + "\n\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(AuditError) as caught:
        read_annotations(path)
    assert str(caught.value).startswith(f"{path}, line 3: {message}")


@pytest.mark.parametrize("name", LINE)
def test_every_field_is_needed(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({key: value for key, value in LINE.items() if key != name}))
    with pytest.raises(AuditError, match=f"line 1: {name}: missing, expected "):
        read_annotations(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no annotation"),
        (json.dumps(LINE) + "\n" + json.dumps(LINE), "line 2: trajectory: 'a' stands in line 1 already"),
        ("{oops", "line 1: not JSON"),
        ("[1]", "expected a JSON object"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(AuditError, match=message):
        read_annotations(path)


def test_the_digest_is_of_what_is_read_and_of_nothing_else() -> None:
    own = run("a")
    step = own.steps[1]
    marked = [
        dataclasses.replace(s, hazard=True, thought="hm", call_id=f"z{i}", unobserved=True)
        for i, s in enumerate(own.steps)
    ]
    labels = {"id": "z", "group": "z", "unsafe": True, "first_hazard": 1, "timing": False, "metadata": {"k": 1}}
    for change in (labels, {"steps": tuple(marked)}):
        assert digest(dataclasses.replace(own, **change)) == digest(own)
    changed = [
        dataclasses.replace(own, instruction="else"),
        dataclasses.replace(own, final_observation="else"),
        dataclasses.replace(own, steps=own.steps[:-1]),
    ]
    for change in ({"tool": "z"}, {"arguments": {}}, {"observation": ""}, {"parallel": True}):
        other = dataclasses.replace(step, **change)
        changed.append(dataclasses.replace(own, steps=(own.steps[0], other, *own.steps[2:])))
    assert len({digest(other) for other in (own, *changed)}) == 1 + len(changed)


def test_what_a_set_says() -> None:
    found = set_labels(
        by_id(
            run("a", first=2),
            run("b"),
            run("c", unsafe=True, timing=False),
            run("d", timing=False),
            dataclasses.replace(run("e"), unsafe=None),
        )
    )
    assert found.answers == {"a": 2, "b": NO_HAZARD, "c": UNSAFE_SOMEWHERE, "d": SAFE_RUN}


def test_adjudicated_labels() -> None:
    own = run("a", first=3)
    moved = adjudicated(own, note(own, 1, "carla", "earlier"))
    assert [s.hazard for s in moved.steps] == [False, True, None, None]
    assert (moved.unsafe, moved.first_hazard, moved.timing) == (True, 1, True)
    record = {"annotator": "carla", "status": "labelled", "comment": "earlier"}
    before = {"unsafe": True, "first_hazard": 3, "timing": True}
    assert moved.metadata["audit"] == [record | {"before": before}]
    assert digest(moved) == digest(own)

    safe = adjudicated(moved, note(own, None))
    assert [s.hazard for s in safe.steps] == [False] * 4
    assert (safe.unsafe, safe.first_hazard, safe.timing) == (False, None, True)
    assert [r["before"]["first_hazard"] for r in safe.metadata["audit"]] == [3, 1]

    unknown = adjudicated(own, note(own, "unsure"))
    assert [s.hazard for s in unknown.steps] == [None] * 4
    assert (unknown.unsafe, unknown.first_hazard, unknown.timing) == (None, None, False)

    last = adjudicated(own, note(own, 3))
    assert [s.hazard for s in last.steps] == [False, False, False, True]


def test_only_annotated_trajectories_change(tmp_path: Path) -> None:
    runs = by_id(run("a", first=1), run("b", first=2))
    labels = written(tmp_path / "x.jsonl", note(runs["b"], None))
    made = apply_annotations(runs, labels, tmp_path / "in", tmp_path / "out")
    assert made[0] is runs["a"]
    assert made[1].unsafe is False
    for out in (tmp_path / "in", tmp_path):
        with pytest.raises(AuditError, match="holds the trajectories themselves"):
            apply_annotations(runs, labels, tmp_path / "in", out)


def test_other_trajectories_are_refused(tmp_path: Path) -> None:
    own = run("a")
    labels = written(tmp_path / "x.jsonl", note(run("b"), None), note(own, 3))
    where = f"{tmp_path / 'x.jsonl'}, line"
    require_same_texts(labels, by_id(own, run("b")))
    with pytest.raises(AuditError) as caught:
        require_same_texts(labels, by_id(own))
    assert str(caught.value).startswith(f"{where} 1: trajectory: 'b' is none of the 1 trajectories")
    with pytest.raises(AuditError) as caught:
        require_same_texts(labels, by_id(run("b"), dataclasses.replace(own, instruction="else")))
    assert str(caught.value).startswith(f"{where} 2: digest: got ")
    far = written(tmp_path / "y.jsonl", note(own, 4))
    with pytest.raises(AuditError, match=r"line 1: first_hazard: got 4, expected a step below 4"):
        require_same_texts(far, by_id(own))


def test_a_set_has_each_id_once_and_is_not_empty(tmp_path: Path) -> None:
    write_trajectories([run("a"), run("a")], tmp_path / "twice.jsonl")
    with pytest.raises(AuditError, match="two trajectories have the id 'a'"):
        read_set(tmp_path / "twice.jsonl")
    write_trajectories([], tmp_path / "none.jsonl")
    with pytest.raises(AuditError, match="holds no trajectory"):
        read_set(tmp_path / "none.jsonl")


def test_what_stands_in_the_place_of_earlier_labels_is_not_overwritten() -> None:
    own = run("a", first=3)
    for other in ("a text", 3, {"of": "another tool"}):
        with pytest.raises(AuditError, match=r"trajectory 'a': metadata\.audit: got .*, expected a list"):
            adjudicated(dataclasses.replace(own, metadata={"audit": other}), note(own, 1))
