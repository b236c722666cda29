"""What all live sessions share: moved by commits alone, idempotent by call id, and nothing passes by accident."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from guard_samples import TRAJECTORIES, fail, fresh_guard, replay
from route_samples import both, fresh_router

from jaxguard.guard import GuardError
from jaxguard.types import JointVerdict, RouteVerdict


@pytest.fixture(params=["guard", "router", "joint"])
def agent(request: pytest.FixtureRequest) -> Any:
    """Something with sessions, and an encoder that may be spoilt."""
    return {"guard": fresh_guard, "router": fresh_router, "joint": both}[request.param]()


def assert_held(verdict: Any) -> None:
    """A call that could not be scored: held, with no number that could be taken for a score."""
    if isinstance(verdict, JointVerdict):  # at least one half; the other may have found something worse
        assert verdict.decision.name in ("HOLD", "BLOCK")
        for half in (verdict.guard, verdict.router):
            if half.error:
                assert_held(half)
    elif isinstance(verdict, RouteVerdict):
        assert verdict.route.name == "ASK"
        assert all(math.isnan(value) for value in (*verdict.probabilities, verdict.execute_share))
        assert verdict.error in verdict.reason
        assert verdict.question
    else:
        assert verdict.decision.name == "HOLD"
        assert math.isnan(verdict.margin)
        assert math.isnan(verdict.fused)
    assert verdict.error
    assert not verdict.allowed


def test_checking_changes_nothing_and_only_a_commit_moves_the_state(agent: Any) -> None:
    steps = TRAJECTORIES[2].steps
    plain = replay(agent.session("task 2", TRAJECTORIES[2].metadata), steps)
    session = agent.session("task 2", TRAJECTORIES[2].metadata)
    for t, step in enumerate(steps):
        for _ in range(2):
            session.check("something else", "another tool", {"x": t}, call_id=f"other {t}")
            assert session.check(step.observation, step.tool, step.arguments, call_id=step.call_id) == plain[t]
            assert session.steps == t
        session.commit(step.call_id)
        assert session.steps == t + 1


def test_idempotent_by_call_id(agent: Any) -> None:
    session = agent.session("task")
    first = session.check("", "read", {"a": 1}, call_id="one")
    seen = len(agent.encoder.seen)
    assert session.check("", "read", {"a": 1}, call_id="one") is first
    assert len(agent.encoder.seen) == seen
    session.commit("one")
    session.commit("one")
    assert session.steps == 1
    second = session.check("text", "send", {}, call_id="two")
    assert session.check("", "read", {"a": 1}, call_id="one") is first  # a late retry
    session.commit("one")
    assert session.steps == 1
    session.commit("two")
    assert session.check("text", "send", {}, call_id="two") is second


@pytest.mark.parametrize(
    "call", [("x", "read", {"a": 1}), ("", "reads", {"a": 1}), ("", "read", {"a": 2}), ("", "read", {"a": object()})]
)
def test_another_call_under_a_committed_id_is_refused(agent: Any, call: tuple) -> None:
    session = agent.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    session.commit("one")
    with pytest.raises(GuardError, match="call id 'one': was committed with another call"):
        session.check(*call, call_id="one")


def test_a_changed_proposal_under_an_open_id_is_scored_anew(agent: Any) -> None:
    session, fresh = agent.session("task"), agent.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    changed = session.check("", "delete", {"a": 1}, call_id="one")
    assert changed == fresh.check("", "delete", {"a": 1}, call_id="one")
    session.commit("one")
    fresh.commit("one")
    assert session.check("x", "read", {}) == fresh.check("x", "read", {})


def test_a_proposal_may_be_replaced_by_another_before_the_commit(agent: Any) -> None:
    session, fresh = agent.session("task"), agent.session("task")
    session.check("", "delete", {"all": True}, call_id="one")
    session.check("", "read", {"a": 1}, call_id="two")
    session.commit("two")
    with pytest.raises(GuardError, match="call id 'one': was not checked since the last commit"):
        session.commit("one")
    fresh.check("", "read", {"a": 1})
    fresh.commit()
    assert session.check("x", "send", {}) == fresh.check("x", "send", {})


def test_committing_needs_a_check(agent: Any) -> None:
    session = agent.session("task")
    with pytest.raises(GuardError, match="call id 0: was not checked"):
        session.commit()
    session.check("", "read")
    with pytest.raises(GuardError, match="call id 'other': was not checked"):
        session.commit("other")
    session.commit()
    with pytest.raises(GuardError, match="call id 1: was not checked"):
        session.commit()
    assert session.steps == 1


def test_ids_that_look_like_positions_are_ids(agent: Any) -> None:
    session = agent.session("task")
    session.check("", "read", {}, call_id="1")
    session.commit("1")
    assert session.check("x", "send", {}).step == 1  # position 1, not the call "1"
    session.commit()
    assert session.steps == 2


def test_a_call_of_no_tool_is_held(agent: Any) -> None:
    session = agent.session("task")
    verdict = session.check("", " ")
    assert_held(verdict)
    assert verdict.error == "tool: got an empty name, expected that of a tool"
    with pytest.raises(GuardError, match="could not be scored"):
        session.commit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "read", {}), "observation: got NoneType, expected text"),
        (("", 3, {}), "tool: got int, expected text"),
        (("", "read", [1]), "arguments: got list, expected a mapping, text or None"),
    ],
)
def test_misuse_is_an_error(agent: Any, arguments: tuple, message: str) -> None:
    with pytest.raises(GuardError, match=message):
        agent.session("task").check(*arguments)
    with pytest.raises(GuardError, match="instruction: got NoneType"):
        agent.session(None)


@pytest.mark.parametrize("call_id", [1, 0, True, 1.0, b"1", ["1"], {}])
def test_call_ids_are_text(agent: Any, call_id: Any) -> None:
    """The number 0 as an id would be taken for the first step, and answer for it."""
    session = agent.session("task")
    with pytest.raises(GuardError, match=rf"call_id: got {type(call_id).__name__}, expected text or None"):
        session.check("", "read", {}, call_id=call_id)
    session.check("", "read", {})
    with pytest.raises(GuardError, match="call_id: got "):
        session.commit(call_id)
    assert session.steps == 0
    session.commit()
    assert session.check("x", "delete", {}).step == 1


class Raising(Mapping):
    """A host's own mapping whose items cannot be had."""

    def __getitem__(self, key: str) -> Any:
        raise RuntimeError("lost the connection")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class RaisingDict(dict):
    def items(self) -> Any:
        raise RuntimeError("lost the connection")


@pytest.mark.parametrize("arguments", [Raising(), {"nested": Raising()}, {"nested": RaisingDict(a=1)}])
def test_arguments_that_raise_are_held(agent: Any, arguments: Any) -> None:
    session = agent.session("task")
    verdict = session.check("", "send", arguments, call_id="1")
    assert_held(verdict)
    assert "lost the connection" in verdict.error or "cannot be written as JSON" in verdict.error
    with pytest.raises(GuardError, match="could not be scored"):
        session.commit("1")
    assert not session.check("", "send", {"a": 1}, call_id="1").error


FAULTS = {
    "raises": (fail, "RuntimeError: no connection"),
    "nan": (lambda v: v * np.nan, "returned a vector that is not finite"),
    "inf": (lambda v: v + np.inf, "returned a vector that is not finite"),
    "overflow": (lambda v: v.astype(np.float64) + 1e300, "returned a vector that is not finite"),
    "beyond measure": (lambda v: v + np.float32(1e30), r"returned the value 1e\+30, expected 1e\+09 at most"),
    "shape": (lambda v: v[:, :3], r"returned shape \(\d, 3\), expected \(\d, 8\)"),
    "count": (lambda v: v[:-1], r"returned shape \(\d, 8\), expected \(\d, 8\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("committed", [0, 2])
def test_an_encoder_that_fails_is_held_and_may_recover(agent: Any, fault: str, committed: int) -> None:
    spoil, message = FAULTS[fault]
    steps = TRAJECTORIES[2].steps
    session = agent.session("task 2", TRAJECTORIES[2].metadata)
    expected = replay(agent.session("task 2", TRAJECTORIES[2].metadata), steps)
    replay(session, steps[:committed])
    agent.encoder.fault = spoil
    step = steps[committed]
    verdict = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert_held(verdict)
    with pytest.raises(GuardError, match=f"could not be scored .*({message})"):
        session.commit("c")
    assert session.steps == committed
    agent.encoder.fault = lambda vectors: vectors
    again = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert again == expected[committed]
    session.commit("c")


def test_arguments_that_are_no_json_are_held(agent: Any) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"d": deep}
    for arguments in (deep, {"x": object()}):
        verdict = agent.session("task").check("", "send", arguments)
        assert_held(verdict)
        assert "expected a JSON object" in verdict.error
