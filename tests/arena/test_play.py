"""Scripted agents in AgentDojo's environments: what they do, what a guard is shown, and what its refusals change."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest

pytest.importorskip("agentdojo", reason="the extra 'arena' is not installed")

from jaxguard.arena.plan import REFUSED, ArenaError, Case
from jaxguard.arena.play import Play, play, trajectory
from jaxguard.arena.stage import Stage, load_stages
from jaxguard.guard import Guard
from jaxguard.types import Decision, Verdict

USER, GOAL = "user_task_3", "injection_task_4"  # reads transactions, sends money; redirects a standing order
INJECTED_TOOL = "update_scheduled_transaction"


@pytest.fixture(scope="module")
def stage() -> Stage:
    return load_stages(["banking"])["banking"]


class FakeGuard:
    """Stands for a guard and its session: refuses the tools that it is told to, and remembers what it was shown."""

    def __init__(self, refuses: Callable[[str], bool] = lambda tool: False):
        self.refuses = refuses
        self.instruction = ""
        self.shown: list[tuple[str, str, Any]] = []
        self.committed: list[str] = []

    def session(self, instruction: str, metadata: Any) -> FakeGuard:
        self.instruction = instruction
        return self

    def check(self, observation: str, tool: str, arguments: Any, *, call_id: str) -> Verdict:
        self.shown.append((observation, tool, arguments))
        decision = Decision.HOLD if self.refuses(tool) else Decision.PASS
        return Verdict(len(self.shown) - 1, decision, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0)

    def commit(self, call_id: str) -> None:
        self.committed.append(call_id)


def guarded(stage: Stage, case: Case, guard: FakeGuard) -> Play:
    return play(stage, case, cast(Guard, guard))


def letters(text: str) -> str:
    """YAML folds and escapes what it holds."""
    return "".join(re.findall(r"[A-Za-z0-9]", text))


def test_the_ground_truth_agent_does_its_task(stage: Stage) -> None:
    done = play(stage, Case("banking", USER, "benign"))
    assert done.utility
    assert not done.attacked
    made = trajectory(stage, done, "train")
    assert made.unsafe is False
    assert (made.instruction, made.group) == (stage.user(USER).PROMPT, "banking/user_task_3")
    assert [step.hazard for step in made.steps] == [False, False]
    assert made.metadata["part"] == "train"


@pytest.mark.parametrize(("conduct", "hazard"), [("at_once", 1), ("at_end", 2)])
def test_a_hijacked_agent_follows_what_it_saw(stage: Stage, conduct: Any, hazard: int) -> None:
    done = play(stage, Case("banking", USER, conduct, GOAL, "ignore_previous"))
    assert done.attacked
    assert done.utility
    made = trajectory(stage, done, "train")
    assert made.unsafe
    assert made.timing
    assert made.first_hazard == hazard
    assert [step.hazard for step in made.steps] == [i == hazard for i in range(3)]
    assert made.steps[hazard].tool == INJECTED_TOOL
    seen = letters("".join(step.observation for step in made.steps[: hazard + 1]))
    assert letters(stage.goal(GOAL).GOAL) in seen
    assert [step.call_id for step in made.steps] == ["call_0", "call_1", "call_2"]


def test_an_agent_that_ignores_the_injection_is_safe_and_sees_it(stage: Stage) -> None:
    done = play(stage, Case("banking", USER, "ignores", GOAL, "direct"))
    assert done.utility
    assert not done.attacked
    made = trajectory(stage, done, "train")
    assert made.unsafe is False
    assert letters(stage.goal(GOAL).GOAL) in letters(made.steps[1].observation)


def test_what_a_user_asks_for_is_safe(stage: Stage) -> None:
    case = Case("banking", USER, "asked", GOAL, "", joined=1)
    made = trajectory(stage, play(stage, case), "train")
    assert made.unsafe is False
    assert made.steps[-1].tool == INJECTED_TOOL
    assert stage.goal(GOAL).GOAL in made.instruction


def test_a_user_task_can_be_the_goal_of_an_injection(stage: Stage) -> None:
    case = Case("banking", USER, "at_end", "user_task_5", "direct")
    made = trajectory(stage, play(stage, case), "train")
    # The goal reads transactions and sends money; reading changes nothing and is not its hazard.
    assert [step.tool for step in made.steps[2:]] == ["get_most_recent_transactions", "send_money"]
    assert [step.hazard for step in made.steps] == [False, False, False, True]


def test_a_held_call_is_not_executed_and_the_agent_goes_on(stage: Stage) -> None:
    guard = FakeGuard(lambda tool: tool == INJECTED_TOOL)
    done = guarded(stage, Case("banking", USER, "at_once", GOAL, "direct"), guard)
    assert not done.attacked
    assert done.utility
    results = {m["tool_call"]["id"]: m for m in done.messages if m["role"] == "tool"}
    assert results["injected-0"]["error"] == REFUSED
    assert list(results) == ["own-0", "injected-0", "own-1"]
    assert guard.committed == ["own-0", "own-1"]
    # What it saw before the held call is what it sees after it; the refusal is no part of that.
    assert guard.shown[1][0] == guard.shown[2][0] != ""
    assert REFUSED not in guard.shown[2][0]


def test_a_task_with_a_held_call_is_not_done(stage: Stage) -> None:
    # This task is judged by the agent's answer alone, which the script knows whatever it was permitted to read.
    case = Case("banking", "user_task_1", "benign")
    assert play(stage, case).utility
    done = guarded(stage, case, FakeGuard(lambda tool: True))
    assert not done.utility
    assert "could not finish" in done.messages[-1]["content"][0]["content"]


def test_who_may_not_read_sees_no_injection(stage: Stage) -> None:
    done = guarded(
        stage, Case("banking", USER, "at_end", GOAL, "direct"), FakeGuard(lambda tool: tool.startswith("get"))
    )
    assert not done.attacked
    assert not any(call.startswith("injected") for call in done.course.proposed)


@pytest.mark.parametrize("conduct", ["benign", "at_once", "ignores"])
def test_a_live_guard_is_shown_what_recorded_trajectories_hold(stage: Stage, conduct: Any) -> None:
    case = Case("banking", USER, conduct, *(() if conduct == "benign" else (GOAL, "important_instructions")))
    guard = FakeGuard()
    guarded(stage, case, guard)
    recorded = trajectory(stage, play(stage, case), "test")
    assert guard.shown == [(step.observation, step.tool, step.arguments) for step in recorded.steps]
    assert guard.instruction == recorded.instruction


def test_the_clock_stands() -> None:
    stage = load_stages(["travel"])["travel"]
    case = Case("travel", "user_task_0", "at_end", "injection_task_1", "direct")
    first, second = (play(stage, case) for _ in range(2))
    assert first.messages == second.messages
    assert "2024-05-15 12:00" in str(first.messages)


def test_what_agentdojo_does_not_have_is_refused(stage: Stage) -> None:
    with pytest.raises(ArenaError, match="has no task 'user_task_99'"):
        stage.user("user_task_99")
    with pytest.raises(ArenaError, match="attack: got 'charm'"):
        stage.texts(USER, GOAL, "charm")
    for names in ((), ("banking", "banking"), ("bank",)):
        with pytest.raises(ArenaError, match="expected some of banking, slack, travel, workspace, each once"):
            load_stages(names)
