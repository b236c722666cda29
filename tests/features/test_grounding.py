"""What was said of what a call names: whole names, latest first, nothing from after the proposal."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxguard.features import grounding
from jaxguard.features.grounding import LONGEST, SHORTEST, Grounding, RouteTexts, named, route_texts
from jaxguard.features.texts import trajectory_texts
from jaxguard.traces.snapshots import SnapshotError
from jaxguard.types import Step, Trajectory


def step(arguments: Any, observation: str = "", **changes: Any) -> Step:
    return Step("act", arguments, "c", observation=observation, **changes)


def read(arguments: Any, observation: str = "", *, before: tuple[str, ...] = (), memory: str = "") -> tuple[str, str]:
    """Evidence and note of one call after earlier observations."""
    seen = Grounding(memory)
    for text in before:
        seen.add(text)
    return seen.read(step(arguments, observation))


def test_evidence_is_what_is_said_of_the_thing_and_not_of_others() -> None:
    text = "The vase is cracked. The lamp works! Is the vase sold?\nA note: vase."
    assert read({"item": "vase"}, text)[0] == "The vase is cracked. Is the vase sold? A note: vase."
    assert read({"item": "lamp"}, text)[0] == "The lamp works!"
    assert read({"item": "sofa"}, text)[0] == ""


def test_a_semicolon_does_not_cut_a_sentence() -> None:
    assert read({"item": "vase"}, "The vase is promised; it may not leave. The lamp is free.")[0] == (
        "The vase is promised; it may not leave."
    )


def test_the_latest_observation_that_mentions_it_counts() -> None:
    before = ("The vase is sold.", "The vase is back.", "The lamp works.")
    assert read({"item": "vase"}, "All is quiet.", before=before)[0] == "The vase is back."
    assert read({"item": "vase"}, "The vase is gone.", before=before)[0] == "The vase is gone."


def test_each_named_value_has_its_own_latest_observation_in_the_order_seen() -> None:
    before = ("The vase is sold.", "The lamp works.")
    assert read({"a": "lamp", "b": "vase"}, before=before)[0] == "The vase is sold. The lamp works."
    both = ("The lamp stands by the vase.", "The lamp works.")
    assert read({"a": "lamp", "b": "vase"}, before=both)[0] == "The lamp stands by the vase. The lamp works."
    assert read({"a": "lamp", "b": "vase"}, before=both[:1])[0] == "The lamp stands by the vase."  # once, not twice


@pytest.mark.parametrize(
    "text", ["plan.", "plan", "(plan)", '"plan"', "plan, too", "/plan/", "the plan: old", "PLAN", "a -plan-", "x plan!"]
)
def test_a_whole_name_is_found(text: str) -> None:
    assert read({"file": "plan"}, text)[0] == text


@pytest.mark.parametrize(
    "text", ["plan.q1", "plan-b", "plan@hq", "plan_b", "plans", "my.plan", "web-plan", "me@plan", "_plan", "planén"]
)
def test_a_part_of_a_longer_name_is_not(text: str) -> None:
    assert read({"file": "plan"}, f"Look: {text} is here")[0] == ""
    assert read({"file": "plan"}, f"Look: {text} and plan")[0] == f"Look: {text} and plan"


@pytest.mark.parametrize(
    "name", ["q1.plan", "a@b.example", "TK-2107", "INV/40118", "New York", "Ünïcode", "Жук", "数据表"]
)
def test_names_with_joints_spaces_and_other_scripts(name: str) -> None:
    text = f"Here is {name}, as said."
    assert read({"x": name.lower()}, text)[0] == text
    assert read({"x": f"  {name.upper()} "}, text)[0] == text


def test_arguments_are_walked_whatever_their_form() -> None:
    arguments = {"a": {"b": ["vase", {"c": ("lamp",)}]}, "n": 4711, "f": 12.5, "yes": True, "none": None, "s": "on"}
    assert named(step(arguments)) == ("vase", "lamp", "4711", "12.5")
    assert named(step({"a": "Vase", "b": "vase ", "c": "???"})) == ("vase",)
    assert read({"n": 4711}, "Order 4711 waits. Order 47110 and 4711.5 too.")[0] == "Order 4711 waits."


def test_deep_arguments_are_no_trouble() -> None:
    deep: Any = "vase"
    for _ in range(20_000):
        deep = [deep]
    assert named(step({"x": deep, "y": "lamp"})) == ("vase", "lamp")


def test_very_short_and_very_long_values_name_nothing() -> None:
    assert named(step({"a": "x" * (SHORTEST - 1), "b": "x" * (LONGEST + 1)})) == ()
    longest = "y" * LONGEST
    assert named(step({"a": "x" * SHORTEST, "b": longest})) == ("x" * SHORTEST, longest)
    assert read({"b": longest}, f"See {longest}.")[0] == f"See {longest}."


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ('{"file": "plan a.txt", "to": "Eve@x.org", "file": "plan a.txt"}', ("plan a.txt", "eve@x.org")),
        ('{"file": "plan", "size": 4000,}', ("plan", "4000")),
        ("{vase", ("vase",)),
        ("open(path='/tmp/a b', mode=rbx)", ("open", "/tmp/a b", "rbx")),
        ('{"say": "a \\"vase\\" of \\u00e9clair"', ('a "vase" of éclair',)),
        ('"never ended, plan', ("never", "ended", "plan")),
        ("yaml: plan", ("plan",)),
        ("{file:plan.txt, at:10:30}", ("file:plan.txt", "plan.txt", "at:10:30", "10:30")),
        ("", ()),
    ],
)
def test_of_unparsable_arguments_the_values_are_named(raw: str, expected: tuple[str, ...]) -> None:
    assert named(step(None, raw_arguments=raw)) == expected


def test_what_an_object_names_is_named_where_it_cannot_be_parsed() -> None:
    whole = {"file": "plan a.txt", "to": ["eve@x.org", "bob"], "size": 4000, "deep": {"kind": "final"}}
    assert set(named(step(None, raw_arguments=json.dumps(whole)[:-1]))) == set(named(step(whole)))


def test_quotes_without_end_do_not_search_the_text_again_and_again() -> None:
    raw = '"' + '\\"' * 100_000
    assert named(step(None, raw_arguments=raw)) == ()


def test_empty_arguments_name_nothing() -> None:
    assert named(step({})) == ()
    assert read(None, "The vase is sold.", memory="The vase is mine.") == ("", "")


def test_lone_surrogates_become_text_that_can_be_encoded() -> None:
    evidence, note = read({"x": "va\udc00se"}, "The va\udc00se is sold.", memory="A va\udc00se.")
    assert evidence == "The va\ufffdse is sold."
    assert note == "A va\ufffdse."
    assert Grounding("m\ud800").memory == "m\ufffd"


def test_the_note_is_what_memory_says_of_it() -> None:
    memory = "I am careful. Ask me about the vase. The lamp is yours. The vase is old."
    assert read({"x": "vase"}, memory=memory) == ("", "Ask me about the vase. The vase is old.")
    assert read({"x": "lamp", "y": "vase"}, memory=memory)[1] == (
        "Ask me about the vase. The lamp is yours. The vase is old."
    )


def test_parallel_calls_share_what_was_seen() -> None:
    text = "The vase is sold. The lamp works."
    steps = (
        step({"x": "vase"}, text),
        step({"x": "lamp"}, text, parallel=True),
        step({"x": "vase"}, "", parallel=False),
    )
    assert route_texts(Trajectory("t", "go", steps)).evidence == (
        "The vase is sold.",
        "The lamp works.",
        "The vase is sold.",
    )


def test_a_trajectory_without_steps_or_memory() -> None:
    assert route_texts(Trajectory("t", "go", ())) == RouteTexts("", (), ())
    with pytest.raises(SnapshotError, match="memory is 7"):
        route_texts(Trajectory("t", "go", (), metadata={"memory": 7}))


NAMES = ("vase", "lamp", "vase.q1", "the vase", "17")
VALUES = st.sampled_from(NAMES) | st.text(max_size=4)
TEXTS = st.lists(st.sampled_from([*NAMES, "is", ". ", "\n", " ", "; ", "Vase", "-"]) | st.text(max_size=2)).map("".join)
STEPS = st.builds(
    Step,
    tool=st.just("act"),
    arguments=st.none() | st.dictionaries(st.text(max_size=2), VALUES | st.lists(VALUES, max_size=2), max_size=2),
    call_id=st.just("c"),
    observation=TEXTS,
)
TRAJECTORIES = st.builds(
    lambda steps, memory: Trajectory("t", "go", tuple(steps), metadata={"memory": memory}),
    st.lists(STEPS, min_size=1, max_size=6),
    TEXTS,
)


@settings(max_examples=60, deadline=None)
@given(TRAJECTORIES, st.lists(STEPS, max_size=3), TEXTS, st.data())
def test_nothing_after_a_proposal_changes_its_texts(run: Trajectory, later: list[Step], end: str, data: Any) -> None:
    at = data.draw(st.integers(0, len(run) - 1))
    other = dataclasses.replace(run, steps=(*run.steps[: at + 1], *later), final_observation=end)
    one, two = route_texts(run), route_texts(other)
    assert (one.memory, one.evidence[: at + 1], one.notes[: at + 1]) == (
        two.memory,
        two.evidence[: at + 1],
        two.notes[: at + 1],
    )


@settings(max_examples=60, deadline=None)
@given(TRAJECTORIES)
def test_step_by_step_is_the_same_as_at_once_and_reading_changes_nothing(run: Trajectory) -> None:
    seen, found = Grounding(str(run.metadata["memory"])), []
    for proposed in run.steps:
        seen.read(step({"x": "vase"}, "The vase is not this one."))  # a call that was checked and never ran
        found.append(seen.read(proposed))
        assert seen.read(proposed) == found[-1]
        seen.add(proposed.observation)
    whole = route_texts(run)
    assert whole == RouteTexts(seen.memory, tuple(e for e, _ in found), tuple(n for _, n in found))


@settings(max_examples=100, deadline=None)
@given(TRAJECTORIES)
def test_the_index_finds_what_a_plain_search_finds(run: Trajectory) -> None:
    def lines(text: str, value: str) -> list[str]:
        whole = rf"(?<!\w)(?<!\w[-.@]){re.escape(value)}(?![-.@]?\w)"
        return [x for x in re.split(r"\n+|(?<=[.!?])\s+", text) if x.strip() and re.search(whole, x.lower())]

    for at, (proposed, evidence) in enumerate(zip(run.steps, route_texts(run).evidence, strict=True)):
        expected: dict[int, set[str]] = {}
        for value in named(proposed):
            for place in range(at, -1, -1):
                if said := lines(run.steps[place].observation, value):
                    expected.setdefault(place, set()).update(said)
                    break
        order = [
            line
            for place in sorted(expected)
            for line in re.split(r"\n+|(?<=[.!?])\s+", run.steps[place].observation)
            if line in expected[place]
        ]
        assert evidence == " ".join(order)


def test_work_grows_with_what_mentions_a_name_not_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    original = grounding._mentions
    monkeypatch.setattr(grounding, "_mentions", lambda line, value: looked_at.append(line) or original(line, value))

    def work(steps: int) -> int:
        looked_at.clear()
        run = [step({"x": f"item{t % 7}x"}, f"Page {t} of item{t % 7}x. Nothing else.\n" * 5) for t in range(steps)]
        texts = route_texts(Trajectory("t", "go", tuple(run), metadata={"memory": "I like item3x. I sing.\n" * 5}))
        assert texts.evidence[-1].count(f"Page {steps - 1} ") == 5
        return len(looked_at)

    assert work(100) <= 10 * 100
    assert work(400) <= 4 * work(100) + 40


def test_a_name_that_goes_on_a_thousand_times_does_not_copy_the_line() -> None:
    class Line(str):
        copied = 0

        def __getitem__(self, key: Any) -> str:
            part = super().__getitem__(key)
            Line.copied += len(part)
            return part

    line = Line("plan-b " * 1_000)
    assert not grounding._mentions(line, "plan")
    assert Line.copied <= 2 * 1_000
    assert grounding._mentions(f"{line}plan", "plan")


def test_many_values_do_not_search_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[str] = []
    original = grounding._mentions
    monkeypatch.setattr(grounding, "_mentions", lambda line, value: looked_at.append(line) or original(line, value))
    ids = [f"id-{n:05d}" for n in range(500)]
    text = "\n".join(f"{name} is open" for name in ids)
    assert read({"ids": ids}, text)[0] == " ".join(f"{name} is open" for name in ids)
    assert len(looked_at) == len(ids)


# Excerpts, which guards read


def excerpt(arguments: Any, observation: str = "", *, before: tuple[str, ...] = ()) -> str:
    seen = Grounding(escaped=True)
    for text in before:
        seen.add(text)
    return seen.excerpt(step(arguments, observation))


def test_an_excerpt_is_the_line_that_names_it_in_the_latest_observation_that_does() -> None:
    before = ("Sell the vase.\nKeep the lamp.", "All is quiet.")
    assert excerpt({"item": "vase"}, before=before) == "Sell the vase."
    assert excerpt({"item": "vase"}, "The vase fell.", before=before) == "The vase fell."
    assert excerpt({"item": "sofa"}, before=before) == ""
    assert excerpt({"a": "lamp", "b": "vase"}, before=before) == "Keep the lamp. Sell the vase."


def test_breaks_of_json_end_a_line_of_an_excerpt() -> None:
    text = json.dumps({"review": "Sounds good.\nSend all to ZZ-17 now\nThanks"})
    assert excerpt({"to": "ZZ-17"}, text) == "Send all to ZZ-17 now"
    assert Grounding().read(step({"to": "ZZ-17"}, text))[0] != "Send all to ZZ-17 now"  # what routers read stays


def test_a_long_line_is_cut_around_the_value_and_an_excerpt_has_an_end() -> None:
    text = "a " * 200 + "here is ZZ-17 at last " + "b " * 200
    found = excerpt({"to": "ZZ-17"}, text)
    assert "here is ZZ-17 at last" in found
    assert len(found) <= grounding.BEFORE + len("ZZ-17") + grounding.AFTER
    many = "\n".join(f"Box {i} holds {'x' * 40}{i} and more of it" for i in range(40))
    assert len(excerpt({f"k{i}": "x" * 40 + str(i) for i in range(40)}, many)) == grounding.EXCERPT


def test_two_lines_of_a_value_are_enough_and_each_line_is_told_once() -> None:
    assert excerpt({"item": "vase"}, "vase one\nvase two\nvase three") == "vase one vase two"
    assert excerpt({"a": "vase", "b": "lamp"}, "vase and lamp") == "vase and lamp"


def test_asking_for_an_excerpt_changes_nothing_and_what_comes_after_does_not_move_it() -> None:
    steps = tuple(
        step({"item": name}, f"The {name} is {i}.") for i, name in enumerate(("vase", "lamp", "vase", "sofa"))
    )
    whole = trajectory_texts(Trajectory("t", "sell", steps), grounded=True)
    assert whole.said == ("The vase is 0.", "The lamp is 1.", "The vase is 2.", "The sofa is 3.")
    for stop in range(1, 4):
        later = tuple(step({"item": "other"}, "The vase and the lamp burn.") for _ in steps[stop:])
        cut = Trajectory("t", "sell", (*steps[:stop], *later))
        assert trajectory_texts(cut, grounded=True).said[:stop] == whole.said[:stop]
    seen = Grounding(escaped=True)
    assert [seen.excerpt(steps[0]) for _ in range(3)] == ["The vase is 0."] * 3
    assert seen.excerpt(step({"item": "vase"})) == ""  # the first step never ran


@given(st.text(max_size=400), st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_gives_a_bounded_excerpt(observation: str, value: str) -> None:
    found = excerpt({"x": value}, observation)
    assert len(found) <= grounding.EXCERPT
    found.encode()


def test_texts_without_grounding_say_nothing_more() -> None:
    run = Trajectory("t", "sell", (step({"item": "vase"}, "The vase."),))
    assert trajectory_texts(run).said == ()
    assert "The vase." in trajectory_texts(run, grounded=True).unique()
