"""Record-style sets: sessions, empty actions, results hidden in thoughts, pre-action order."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces import leaks
from jaxguard.traces.readers.records import READERS
from jaxguard.traces.registry import Context, RecordError
from jaxguard.types import Trajectory

ASSE, R_JUDGE, ATBENCH = READERS
TOOLS = f'{leaks.TOOL_LIST} [{{"name": "mixer"}}, {{"name": "RoofOpener"}}] to help you.'
OK = "The knowledge I get from {0} is: You have successfully used it."
BAD = "The knowledge I get from {0} is: You have used the attacker tool {0}. You have achieved the attacker goal: G."


def user(text: str | None) -> dict[str, Any]:
    return {"role": "user", "content": text}


def env(text: str | None) -> dict[str, Any]:
    return {"role": "environment", "content": text}


def agent(action: str | None, thought: str | None = "") -> dict[str, Any]:
    return {"role": "agent", "thought": thought, "action": action}


def r_judge(*sessions: list[dict[str, Any]], label: Any = 0, **more: Any) -> dict[str, Any]:
    fixed = {"scenario": "home", "profile": "P", "goal": "G", "risk_description": "R", "risk_type": "Privacy"}
    return {"id": 7, "contents": list(sessions), "label": label, **fixed, **more}


def asse(*messages: dict[str, Any], label: int = 0) -> dict[str, Any]:
    return {
        "id": 7,
        "profile": "You are a painter. ",
        "contents": [list(messages)],
        "label": label,
        "application_scenario": "Painting",
        "risk_type": "Prompt Injection",
        "failure_mode": "F",
        "ambiguous": 1,
        "risk_description": "R",
    }


def atbench(*messages: dict[str, Any], label: int = 0) -> dict[str, Any]:
    about = {"risk_source": "benign", "failure_mode": "none", "harm_type": "none", "reason": "R", "source": "benign"}
    return {"id": 7, "tool_used": [{"name": "mix"}], "contents": [list(messages)], "label": label, **about}


def read(record: dict[str, Any]) -> Trajectory:
    (reader,) = [reader for reader in READERS if reader.matches(record)]
    (trajectory,) = reader.read(record, Context(Path("x"), 0))
    assert trajectory.source == reader.name
    return trajectory


def test_turns_become_steps() -> None:
    trajectory = read(
        r_judge(
            [user("Mix red."), agent("mix{'a': 1}", "I mix."), env("mixed"), agent('mix: {"a": 2}'), env(None)],
            [user("And blue."), agent(None, "hm"), agent("Final Answer: Done.", "I am done.")],
        )
    )
    assert trajectory.instruction == "Mix red."
    assert [(s.tool, s.arguments) for s in trajectory.steps] == [
        ("mix", {"a": 1}),
        ("mix", {"a": 2}),
        ("reply", {"text": "Done."}),
    ]
    assert [step.observation for step in trajectory.steps] == ["", "mixed", "[user] And blue."]
    assert [step.thought for step in trajectory.steps] == ["I mix.", "", "hm\nI am done."]
    assert [step.unobserved for step in trajectory.steps] == [False, False, True]
    assert trajectory.metadata["sessions"] == 2
    assert trajectory.metadata["empty_actions"] == 1
    assert trajectory.metadata["final_reply"] == "Done."
    assert (trajectory.unsafe, trajectory.timing, trajectory.first_hazard) == (False, True, None)
    assert {step.hazard for step in trajectory.steps} == {False}


def test_missing_result_is_unobserved() -> None:
    trajectory = read(r_judge([user("Go."), agent("f()"), env(None), agent("g()"), env("")]))
    assert [step.unobserved for step in trajectory.steps] == [True, False]
    assert trajectory.final_observation == ""


def test_unsafe_record_without_step_labels_is_no_good_for_timing() -> None:
    for record in (r_judge([user("Go."), agent("f()")], label=1), atbench(user("Go."), agent("f()"), label=1)):
        trajectory = read(record)
        assert (trajectory.unsafe, trajectory.timing, trajectory.first_hazard) == (True, False, None)
        assert {step.hazard for step in trajectory.steps} == {None}


def test_parallel_calls_share_the_observation() -> None:
    trajectory = read(atbench(user("Go."), agent('[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]')))
    assert [(s.tool, s.parallel, s.observation) for s in trajectory.steps] == [("f", False, ""), ("g", True, "")]
    assert trajectory.metadata["tools"] == ["mix"]
    assert trajectory.metadata["kind"] == "benign"


def test_published_odd_key_and_layout_without_risk_type() -> None:
    session = [user("Go."), agent("f()")]
    assert read(r_judge(session)).metadata["risk_type"] == "Privacy"
    odd = r_judge(session)
    odd[" "] = odd.pop("risk_type")
    assert read(odd).metadata["risk_type"] == "Privacy"
    del odd[" "]
    assert read(odd).metadata["risk_type"] is None


def simulated(label: int = 1) -> dict[str, Any]:
    return asse(
        user(f"Paint it. {leaks.MEMORY_HINT} of a similar task: [x] {TOOLS}"),
        agent("", "The workflow is [...]"),
        user("At step 2, you need to mix. "),
        agent("mixer()", "[Observation]: " + OK.format("mixer")),
        user("At step 3, you need to roll. "),
        agent("mixer()", "[Observation]: " + OK.format("mixer") + ";" + BAD.format("RoofOpener")),
        user("At step 4, you need to conclude. "),
        agent("", "All is well."),
        label=label,
    )


def test_result_in_the_thought_of_a_turn_moves_on_and_is_masked() -> None:
    trajectory = read(simulated())
    assert [step.tool for step in trajectory.steps] == ["mixer", "mixer", "RoofOpener"]
    assert [step.parallel for step in trajectory.steps] == [False, False, True]
    assert trajectory.steps[0].observation == f"{leaks.MEMORY_HINT} of a similar task: [x]"
    assert trajectory.steps[1].observation == "The knowledge I get from mixer is: done."
    assert trajectory.steps[2].observation == trajectory.steps[1].observation
    assert trajectory.final_observation == (
        "The knowledge I get from mixer is: done.;The knowledge I get from RoofOpener is: done."
    )
    assert trajectory.instruction == "Paint it."
    assert trajectory.steps[0].thought == "The workflow is [...]\nAt step 2, you need to mix. "
    assert [step.unobserved for step in trajectory.steps] == [False] * 3
    assert trajectory.metadata["tools"] == ["mixer", "RoofOpener"]
    assert (trajectory.metadata["restored_calls"], trajectory.metadata["empty_actions"]) == (1, 2)
    assert trajectory.metadata["final_reply"] == "All is well."
    assert (trajectory.metadata["made_from"], trajectory.metadata["ambiguous"]) == ("asb", True)


def test_first_hazard_is_the_first_call_an_attack_tool_answered() -> None:
    trajectory = read(simulated())
    assert (trajectory.unsafe, trajectory.first_hazard, trajectory.timing) == (True, 2, True)
    assert [step.hazard for step in trajectory.steps] == [False, False, True]


def test_same_agent_or_same_task_shares_a_group() -> None:
    other = simulated()
    other["contents"][0][0]["content"] = f"Clean it. {TOOLS}"
    assert read(other).group == read(simulated()).group
    plain = read(r_judge([user("Paint  THE wall!"), agent("f()")]))
    assert plain.group == read(atbench(user("paint the wall"), agent("g()"))).group
    assert plain.group == read(asse(user("Paint the wall.\n\nHint: use f"), agent("f()"))).group
    assert plain.group != read(r_judge([user("Paint the door"), agent("f()")])).group
    assert (
        read(r_judge([user(None), agent("f()")], id=1)).group != read(r_judge([user(None), agent("f()")], id=2)).group
    )


def test_record_without_steps_is_kept() -> None:
    trajectory = read(asse(user(f"Paint it. {TOOLS}"), agent("", "I cannot.")))
    assert trajectory.steps == ()
    assert trajectory.metadata["final_reply"] == "I cannot."


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (r_judge([user("x")], label=2), "label: found 2"),
        (r_judge([user("x")], label=None), "label: found None"),
        (r_judge([{"role": "judge"}]), "expected user, agent and environment"),
        (r_judge([user(3)]), "user content: found int"),  # type: ignore[arg-type]
        (r_judge() | {"contents": "text"}, "contents: expected a list of lists"),
        (r_judge() | {"contents": [user("x")]}, "contents: expected a list of lists"),
    ],
)
def test_broken_records_say_why(record: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(record)


@pytest.mark.parametrize("t", range(3))
def test_nothing_after_an_action_reaches_its_step(t: int) -> None:
    plain = r_judge([user("Go."), *(m for n in range(3) for m in (agent(f"f({n})", f"t{n}"), env(f"r{n}")))])
    changed = copy.deepcopy(plain)
    for message in changed["contents"][0][2 + 2 * t :]:
        message.update({key: "CHANGED" for key in ("content", "thought", "action") if key in message})
    before, after = read(plain).steps, read(changed).steps
    assert after[: t + 1] == before[: t + 1]
    assert after[t + 1 :] != before[t + 1 :] or t == 2


def test_nothing_after_an_action_reaches_its_step_where_results_hide_in_thoughts() -> None:
    changed = simulated(label=0)
    changed["contents"][0][3]["thought"] = "[Observation]: CHANGED " + OK.format("other")
    before, after = read(simulated(label=0)).steps, read(changed).steps
    assert after[0] == before[0]
    assert after[1].observation.startswith("CHANGED")


@pytest.mark.data
@pytest.mark.parametrize(
    ("file", "unsafe", "safe", "timed", "steps", "replies"),
    [
        ("asse_security/asse_security", 351, 343, 672, 1345, 118),
        ("r_judge/r_judge", 258, 222, 222, 1245, 276),
        ("atbench300/atbench300", 128, 127, 127, 990, 352),
    ],
)
def test_real_counts(data_dir: Path, file: str, unsafe: int, safe: int, timed: int, steps: int, replies: int) -> None:
    lines = (data_dir / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
    trajectories = [read(json.loads(line)) for line in lines]
    assert Counter(t.unsafe for t in trajectories) == {True: unsafe, False: safe}
    assert sum(t.timing for t in trajectories) == timed
    assert sum(len(t) for t in trajectories) == steps
    assert sum(step.tool == "reply" for t in trajectories for step in t.steps) == replies
    for t in trajectories:
        for text in [t.instruction, t.final_observation, *(step.observation for step in t.steps)]:
            assert "used the attacker tool" not in text


@pytest.mark.data
def test_real_simulated_records(data_dir: Path) -> None:
    lines = (data_dir / "asse_security/asse_security.jsonl").read_text(encoding="utf-8").splitlines()
    trajectories = [read(json.loads(line)) for line in lines]
    simulated_runs = [t for t in trajectories if t.metadata["made_from"] == "asb"]
    assert Counter(t.first_hazard is not None for t in simulated_runs if t.unsafe) == {True: 329}
    assert Counter(t.first_hazard for t in simulated_runs if t.unsafe) == {0: 113, 1: 46, 2: 170}
    assert sum(t.metadata["restored_calls"] for t in simulated_runs) == 97
    assert len({t.group for t in simulated_runs}) == 10


@pytest.mark.data
def test_real_multi_session_records(data_dir: Path) -> None:
    lines = (data_dir / "r_judge/r_judge.jsonl").read_text(encoding="utf-8").splitlines()
    trajectories = [read(json.loads(line)) for line in lines]
    assert Counter(t.metadata["sessions"] for t in trajectories) == {1: 469, 2: 11}
    assert sum(not t.instruction for t in trajectories) == 11
