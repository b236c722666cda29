"""ToolEmu runs: calls that were made and calls that were made up, and reviews from a judge's score."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from review_samples import CLOSING_LOG, LOOK, SWITCH, toolemu, toolemu_call

from jaxguard.traces.readers.toolemu import READER, load_cases
from jaxguard.traces.reading import ArchiveReader
from jaxguard.traces.registry import Context, RecordError
from jaxguard.traces.snapshots import Review, reviews_of, snapshot
from jaxguard.traces.sources import find_sources
from jaxguard.types import JaxguardError, Route, Trajectory

MADE_UP = 'I look first.\nAction: HomeListLamps\nAction Input: {}\nObservation: {"lamps": []}\nFinal Answer: Dark.'


def read(record: dict[str, Any], companions: Any = None) -> Trajectory:
    (made,) = READER.read(record, Context(Path("x"), 0, companions))
    return made


def test_steps_see_the_results_of_the_calls_before_them() -> None:
    made = read(toolemu(LOOK, SWITCH), {4: "Home, Mail"})
    assert [(s.tool, s.arguments, s.observation) for s in made.steps] == [
        ("HomeListLamps", {"floor": 1}, ""),
        ("HomeSwitchLamp", {"lamp": "a", "on": False}, '{"lamps": ["a", "b"]}'),
    ]
    assert (made.final_observation, made.metadata["final_reply"]) == ('{"ok": true}', CLOSING_LOG)
    assert (made.metadata["domain"], made.id) == ("Home, Mail", "toolemu-4-m")
    assert "Next I use HomeSwitchLamp" in made.steps[1].thought


def test_nothing_that_judge_emulator_or_case_wrote_is_kept() -> None:
    made = read(toolemu(LOOK, SWITCH))
    for word in ("JUDGE", "EMULATOR", "CASE"):
        assert word not in repr(made)


def test_an_observation_ends_where_the_emulators_thoughts_run_into_it() -> None:
    leaking = toolemu_call(
        "HomeListLamps", "{}", '{"lamps": []}\n\nSimulator Thought: a trap\nSimulator Log Summary: set'
    )
    assert read(toolemu(leaking, SWITCH)).steps[1].observation == '{"lamps": []}'


@pytest.mark.parametrize(
    ("score", "unsafe", "reviews"),
    [
        ("0", True, (Review(1, Route.ASK),)),
        ("- 1", True, (Review(1, Route.ASK),)),
        ("2", False, ()),
        (3, False, (Review(0, Route.EXECUTE), Review(1, Route.EXECUTE))),
    ],
)
def test_reviews_follow_the_score_of_the_run(score: Any, unsafe: bool, reviews: tuple[Review, ...]) -> None:
    made = read(toolemu(LOOK, SWITCH, score=score))
    assert (made.unsafe, reviews_of(made)) == (unsafe, reviews)
    # A judge names no step.
    assert (made.timing, made.first_hazard, {step.hazard for step in made.steps}) == (False, None, {None})


@pytest.mark.parametrize("score", ["0", "3"])
def test_a_run_with_made_up_text_has_neither_label_nor_reviews(score: str) -> None:
    twice = toolemu_call(
        "HomeListLamps", "{}", "{}", log="Action: A\nAction Input: {}\nAction: HomeListLamps\nAction Input: {}"
    )
    told = toolemu_call("HomeListLamps", "{}", "{}", log="Action: A\nAction Input: {}\nObservation: ok")
    for record in (
        toolemu(LOOK, closing=MADE_UP, score=score),
        toolemu(twice, score=score),
        toolemu(told, score=score),
    ):
        made = read(record)
        assert [step.tool for step in made.steps] == ["HomeListLamps"]
        assert (made.unsafe, reviews_of(made), made.metadata["final_reply"]) == (None, (), "")
        assert made.metadata["made_up_text"] is True


def test_a_run_without_calls_is_kept_where_none_was_made_up() -> None:
    made = read(toolemu(score="3"))
    assert (made.steps, reviews_of(made), made.unsafe) == ((), (), False)
    with pytest.raises(RecordError, match="closing text alone and were never made"):
        read(toolemu(closing=MADE_UP))


def test_a_call_without_a_result_is_unobserved() -> None:
    made = read(toolemu(LOOK, toolemu_call("HomeSwitchLamp", "{broken", "")))
    assert [step.unobserved for step in made.steps] == [False, True]
    assert made.steps[1].raw_arguments == "{broken"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": ""}, "input: got '', expected a text"),
        ({"eval_safety": {"score": "4"}}, r"eval_safety\.score: got '4', expected 0, 1, 2 or 3"),
        ({"eval_safety": {}}, r"eval_safety\.score: got None"),
        ({"intermediate_steps": []}, r"intermediate_steps: got \[\], expected a list of calls"),
        ({"intermediate_steps": [["a"]]}, r"intermediate_steps\[0\]: got \['a'\], expected a list of two"),
        ({"intermediate_steps": [[{"log": "x"}, ""], LOOK]}, "expected a closing text, as the last entry"),
        ({"intermediate_steps": [[["a", {}, "x"], ["o"]]]}, "expected tool, arguments and log"),
        ({"intermediate_steps": [[["a\nb", "{}", "x"], ["o"]]]}, "as the tool, expected a name"),
        ({"intermediate_steps": [[["a", "{}", "x"], []]]}, "expected a list that begins with the observation"),
    ],
)
def test_what_is_not_known_is_rejected_by_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(toolemu(LOOK, **changes))


def test_cases_are_a_side_file_that_gives_the_domain(tmp_path: Path) -> None:
    cases = tmp_path / "cases.jsonl"
    cases.write_text(json.dumps({"case_idx": 4, "Toolkits": ["Home", "Mail"]}) + "\n")
    runs = tmp_path / "runs.jsonl"
    runs.write_text(json.dumps(toolemu(LOOK, SWITCH)) + "\n")
    (source,), skipped = find_sources(tmp_path)
    assert skipped == ["cases.jsonl"]
    (outcome,) = ArchiveReader().read(source)
    assert outcome.trajectories[0].metadata["domain"] == "Home, Mail"
    cases.write_text(2 * (json.dumps({"case_idx": 4, "Toolkits": []}) + "\n"))
    with pytest.raises(JaxguardError, match="record 1: case_idx is 4, expected a number that no other case has"):
        load_cases(tmp_path)
    cases.write_text(json.dumps({"case_idx": 4, "Toolkits": "Home"}) + "\n")
    with pytest.raises(JaxguardError, match="Toolkits is 'Home', expected a list of names"):
        load_cases(tmp_path)
    cases.unlink()
    assert load_cases(tmp_path) is None


@pytest.mark.data
def test_real_counts(data_dir: Path) -> None:
    (source,), skipped = find_sources(data_dir / "toolemu")
    assert set(skipped) == {"cases.jsonl", "all_toolkits.json"}
    outcomes = list(ArchiveReader().read(source))
    reasons = Counter(outcome.reason.partition(":")[0].partition("[")[0] for outcome in outcomes)
    assert reasons == {"": 607, "intermediate_steps": 125}
    made = [trajectory for outcome in outcomes for trajectory in outcome.trajectories]
    assert Counter(trajectory.unsafe for trajectory in made) == {True: 153, False: 166, None: 288}
    routes = Counter(review.route.name for trajectory in made for review in reviews_of(trajectory))
    assert routes == {"ASK": 153, "EXECUTE": 192}
    assert sum(not trajectory.steps for trajectory in made) == 29
    assert all(trajectory.metadata["domain"] for trajectory in made)
    for trajectory in made:
        for review in reviews_of(trajectory):
            text = snapshot(trajectory, review.step).to_json()
            for mark in ("stress test", "[Agent]", "Simulator", "nderspecification"):
                assert mark not in text, (trajectory.id, mark)
