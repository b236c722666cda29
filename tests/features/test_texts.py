"""Texts of a trajectory: what is in them, in which order, and what is not."""

from __future__ import annotations

import dataclasses

import pytest

from jaxguard.features.characters import well_formed
from jaxguard.features.texts import action_text, trajectory_texts
from jaxguard.types import JaxguardError, Step, Trajectory


def _trajectory() -> Trajectory:
    return Trajectory(
        id="t1",
        instruction="Tidy the shelf",
        steps=(
            Step(tool="look", arguments={"zone": "b", "area": 2}, call_id="0", thought="first I look"),
            Step(tool="move", arguments={}, call_id="1", observation="two boxes"),
            Step(tool="note", arguments=None, raw_arguments="{broken", call_id="2", observation="done ✓"),
        ),
        final_observation="saved",
        metadata={"domain": "warehouse", "memory": "likes blue"},
    )


def test_lengths_and_contents() -> None:
    texts = trajectory_texts(_trajectory())
    assert texts.instruction == "Tidy the shelf"
    assert texts.observations == ("", "two boxes", "done ✓", "saved")
    assert texts.actions == ('look {"zone":"b","area":2}', "move {}", "note {broken")


def test_no_steps_leaves_the_final_observation() -> None:
    texts = trajectory_texts(Trajectory(id="t", instruction="hi", steps=()))
    assert (texts.observations, texts.actions) == (("",), ())


def test_thought_and_metadata_are_left_out_by_default() -> None:
    joined = "\n".join(trajectory_texts(_trajectory()).unique())
    assert "first I look" not in joined
    assert "warehouse" not in joined
    assert "likes blue" not in joined
    with_thought = trajectory_texts(_trajectory(), thought=True).actions
    assert with_thought[0] == 'first I look\nlook {"zone":"b","area":2}'
    assert with_thought[1] == "move {}"


def test_texts_of_a_step_do_not_depend_on_later_ones() -> None:
    base = _trajectory()
    changed = dataclasses.replace(
        base,
        steps=(*base.steps[:2], dataclasses.replace(base.steps[2], raw_arguments="x", observation="y")),
        final_observation="z",
    )
    one, two = trajectory_texts(base), trajectory_texts(changed)
    assert one.actions[:2] == two.actions[:2]
    assert one.observations[:2] == two.observations[:2]
    assert one.actions[2] != two.actions[2]


def test_unique_keeps_the_order_and_drops_repetitions() -> None:
    step = Step(tool="a", arguments={}, call_id="0", observation="same")
    trajectory = Trajectory(id="t", instruction="same", steps=(step, dataclasses.replace(step, call_id="1")))
    assert trajectory_texts(trajectory).unique() == ("same", "", "a {}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ü 😀", "plain ü 😀"),
        ("a\ud83d\ude00b", "a😀b"),
        ("lone \ud800x", "lone \ufffdx"),
        ("\udc00", "\ufffd"),
    ],
)
def test_surrogates(text: str, expected: str) -> None:
    assert well_formed(text) == expected
    assert action_text(Step(tool="t", arguments={"k": text}, call_id="0")) == f't {{"k":"{expected}"}}'


def test_arguments_that_are_not_json_name_the_trajectory_and_the_call() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    bad = Step(tool="t", arguments=deep, call_id="c7")
    with pytest.raises(JaxguardError, match=r"trajectory 'big': arguments of call 'c7' to 't'"):
        trajectory_texts(Trajectory(id="big", instruction="", steps=(bad,)))
    with pytest.raises(JaxguardError, match="cannot be written as JSON"):
        action_text(Step(tool="t", arguments={"a": object()}, call_id="0"))
