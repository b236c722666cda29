"""Live sessions: equal to scores of archives, moved by commits alone, and nothing passes by accident."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from guard_samples import CONFIG, TRAJECTORIES, FakeEncoder, calibrated_guard, fresh_guard

from jaxguard.config import DataConfig
from jaxguard.decision.policy import Mode
from jaxguard.guard import Guard, GuardError, Session
from jaxguard.types import Decision, Step, Trajectory, Verdict


@pytest.fixture
def guard() -> Guard:
    return fresh_guard()


def replay(session: Session, steps: Sequence[Step]) -> list[Verdict]:
    verdicts = []
    for step in steps:
        verdicts.append(session.check(step.observation, step.tool, step.arguments, call_id=step.call_id))
        session.commit(step.call_id)
    return verdicts


def assert_equal(mine: Verdict, theirs: Verdict, atol: float = 1e-6) -> None:
    assert (mine.step, mine.decision, mine.error) == (theirs.step, theirs.decision, theirs.error)
    for name in ("hazard", "prefix", "ema", "win", "fused", "margin"):
        assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=atol), name


@pytest.mark.parametrize("index", [1, 2, 3, 8])
def test_streaming_equals_batch_on_every_field(guard: Guard, index: int) -> None:
    chosen = TRAJECTORIES[index]
    (scored,) = guard.score([chosen])
    verdicts = replay(guard.session(chosen.instruction, chosen.metadata), chosen.steps)
    for t, verdict in enumerate(verdicts):
        assert_equal(verdict, scored.verdict(t))


def test_checking_changes_nothing_and_only_a_commit_moves_the_state(guard: Guard) -> None:
    steps = TRAJECTORIES[2].steps
    plain = replay(guard.session("task 2", TRAJECTORIES[2].metadata), steps)
    session = guard.session("task 2", TRAJECTORIES[2].metadata)
    for t, step in enumerate(steps):
        for _ in range(2):
            session.check("something else", "another tool", {"x": t}, call_id=f"other {t}")
            assert session.check(step.observation, step.tool, step.arguments, call_id=step.call_id) == plain[t]
            assert session.steps == t
        session.commit(step.call_id)
        assert session.steps == t + 1


def test_idempotent_by_call_id(guard: Guard) -> None:
    session = guard.session("task")
    first = session.check("", "read", {"a": 1}, call_id="one")
    seen = len(guard.encoder.seen)  # type: ignore[attr-defined]
    assert session.check("", "read", {"a": 1}, call_id="one") is first
    assert len(guard.encoder.seen) == seen  # type: ignore[attr-defined]
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
def test_another_call_under_a_committed_id_is_refused(guard: Guard, call: tuple) -> None:
    session = guard.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    session.commit("one")
    with pytest.raises(GuardError, match="call id 'one': was committed with another call"):
        session.check(*call, call_id="one")


def test_a_changed_proposal_under_an_open_id_is_scored_anew(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    session.check("", "read", {"a": 1}, call_id="one")
    changed = session.check("", "delete", {"a": 1}, call_id="one")
    assert changed == fresh.check("", "delete", {"a": 1}, call_id="one")
    session.commit("one")
    fresh.commit("one")
    assert session.check("x", "read", {}) == fresh.check("x", "read", {})


def test_a_proposal_may_be_replaced_by_another_before_the_commit(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    session.check("", "delete", {"all": True}, call_id="one")
    session.check("", "read", {"a": 1}, call_id="two")
    session.commit("two")
    with pytest.raises(GuardError, match="call id 'one': was not checked since the last commit"):
        session.commit("one")
    fresh.check("", "read", {"a": 1})
    fresh.commit()
    assert session.check("x", "send", {}) == fresh.check("x", "send", {})


def test_committing_needs_a_check(guard: Guard) -> None:
    session = guard.session("task")
    with pytest.raises(GuardError, match="call id 0: was not checked"):
        session.commit()
    session.check("", "read")
    with pytest.raises(GuardError, match="call id 'other': was not checked"):
        session.commit("other")
    session.commit()
    with pytest.raises(GuardError, match="call id 1: was not checked"):
        session.commit()
    assert session.steps == 1


def test_ids_that_look_like_positions_are_ids(guard: Guard) -> None:
    session = guard.session("task")
    session.check("", "read", {}, call_id="1")
    session.commit("1")
    assert session.check("x", "send", {}).step == 1  # position 1, not the call "1"
    session.commit()
    assert session.steps == 2


def test_arguments_are_read_as_the_readers_of_traces_read_them(guard: Guard) -> None:
    def hazard(arguments: Any) -> float:
        return guard.session("task").check("", "send", arguments).hazard

    assert hazard('{"a": 1, "b": "x"}') == hazard({"a": 1, "b": "x"})
    assert hazard("") == hazard(None) == hazard({})
    broken = guard.session("task").check("", "send", '{"a": ')
    assert not broken.error
    assert guard.encoder.seen[-1] == 'send {"a": '  # type: ignore[attr-defined]
    expected = Trajectory("t", "task", (Step("send", None, "0", raw_arguments='{"a": '),))
    assert_equal(broken, next(guard.score([expected])).verdict(0))


def test_a_call_of_no_tool_is_held(guard: Guard) -> None:
    session = guard.session("task")
    verdict = session.check("", " ")
    assert verdict.decision is Decision.HOLD
    assert verdict.error == "tool: got an empty name, expected that of a tool"
    with pytest.raises(GuardError, match="could not be scored"):
        session.commit()


def test_surrogates_are_replaced_and_do_not_raise(guard: Guard) -> None:
    verdict = guard.session("task \ud800").check("\udfff", "send\ud800", {"k\udc00": "v\ud83d"}, call_id="\ud800")
    assert not verdict.error
    clean = guard.session("task \ufffd").check("\ufffd", "send\ufffd", {"k\ufffd": "v\ufffd"})
    assert_equal(verdict, clean, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, "read", {}), "observation: got NoneType, expected text"),
        (("", 3, {}), "tool: got int, expected text"),
        (("", "read", [1]), "arguments: got list, expected a mapping, text or None"),
    ],
)
def test_misuse_is_an_error(guard: Guard, arguments: tuple, message: str) -> None:
    with pytest.raises(GuardError, match=message):
        guard.session("task").check(*arguments)
    with pytest.raises(GuardError, match="instruction: got NoneType"):
        guard.session(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("call_id", [1, 0, True, 1.0, b"1", ["1"], {}])
def test_call_ids_are_text(guard: Guard, call_id: Any) -> None:
    """The number 0 as an id would be taken for the first step, and answer for it."""
    session = guard.session("task")
    with pytest.raises(GuardError, match=rf"call_id: got {type(call_id).__name__}, expected text or None"):
        session.check("", "read", {}, call_id=call_id)
    session.check("", "read", {})
    with pytest.raises(GuardError, match="call_id: got "):
        session.commit(call_id)
    assert session.steps == 0
    session.commit()
    assert session.check("x", "delete", {}).step == 1


def test_modes_and_metadata_that_are_none(guard: Guard) -> None:
    for mode in ("nonsense", None, []):
        with pytest.raises(GuardError, match=r"mode: got .*, expected one of fail_closed, observe"):
            guard.session("task", mode=mode)  # type: ignore[arg-type]
    with pytest.raises(GuardError, match="metadata: got str, expected a mapping or None"):
        guard.session("task", metadata="domain")  # type: ignore[arg-type]
    observing = guard.session("task", mode="observe")  # type: ignore[arg-type]
    guard.encoder.fault = fail  # type: ignore[attr-defined]
    assert observing.check("", "read").allowed


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
def test_arguments_that_raise_are_held(guard: Guard, arguments: Any) -> None:
    session = guard.session("task")
    verdict = session.check("", "send", arguments, call_id="1")
    assert (verdict.decision, verdict.allowed) == (Decision.HOLD, False)
    assert "lost the connection" in verdict.error or "cannot be written as JSON" in verdict.error
    with pytest.raises(GuardError, match="could not be scored"):
        session.commit("1")
    assert not session.check("", "send", {"a": 1}, call_id="1").error


def fail(_: np.ndarray) -> np.ndarray:
    raise RuntimeError("no connection")


FAULTS = {
    "raises": (fail, "RuntimeError: no connection"),
    "nan": (lambda v: v * np.nan, "returned a vector that is not finite"),
    "inf": (lambda v: v + np.inf, "returned a vector that is not finite"),
    "overflow": (lambda v: v.astype(np.float64) + 1e300, "returned a vector that is not finite"),
    "large": (lambda v: v + np.float32(1e30), "expected finite ones"),
    "shape": (lambda v: v[:, :3], r"expected \(8,\)"),
    "count": (lambda v: v[:1, :], "not enough values|index"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("committed", [0, 2])
def test_an_encoder_that_fails_is_held_and_may_recover(guard: Guard, fault: str, committed: int) -> None:
    spoil, message = FAULTS[fault]
    steps = TRAJECTORIES[2].steps
    session = guard.session("task 2", TRAJECTORIES[2].metadata)
    expected = replay(guard.session("task 2", TRAJECTORIES[2].metadata), steps)
    replay(session, steps[:committed])
    guard.encoder.fault = spoil  # type: ignore[attr-defined]
    step = steps[committed]
    verdict = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert verdict.decision is Decision.HOLD
    assert not verdict.allowed
    assert math.isnan(verdict.margin)
    assert math.isnan(verdict.fused)
    with pytest.raises(GuardError, match=f"could not be scored .*({message})"):
        session.commit("c")
    assert session.steps == committed
    guard.encoder.fault = lambda vectors: vectors  # type: ignore[attr-defined]
    again = session.check(step.observation, step.tool, step.arguments, call_id="c")
    assert again == expected[committed]
    session.commit("c")


def test_arguments_that_are_no_json_are_held(guard: Guard) -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"d": deep}
    for arguments in (deep, {"x": object()}):
        verdict = guard.session("task").check("", "send", arguments)
        assert verdict.decision is Decision.HOLD
        assert "expected a JSON object" in verdict.error
        assert math.isnan(verdict.margin)


def test_observing_lets_calls_pass_and_says_so(guard: Guard) -> None:
    alerted = next(t for t, scored in zip(TRAJECTORIES, guard.score(TRAJECTORIES), strict=True) if scored.first_alert)
    session = guard.session(alerted.instruction, alerted.metadata, mode=Mode.OBSERVE)
    enforced = replay(guard.session(alerted.instruction, alerted.metadata), alerted.steps)
    for verdict, strict in zip(replay(session, alerted.steps), enforced, strict=True):
        assert verdict.decision is strict.decision
        assert verdict.allowed
        assert verdict.observed_only == (strict.decision is not Decision.PASS)
        assert strict.allowed == (strict.decision is Decision.PASS)
    assert {verdict.decision for verdict in enforced} > {Decision.PASS}
    guard.encoder.fault = fail  # type: ignore[attr-defined]
    held = session.check("x", "send", {})
    assert (held.decision, held.observed_only, held.allowed) == (Decision.HOLD, True, True)


def test_metadata_selects_the_thresholds(guard: Guard) -> None:
    calibration = guard.calibration
    assert calibration is not None
    margins = {}
    for domain in ("bank", "mail"):
        verdict = guard.session("task 2", {"domain": domain}).check("", "tool2", {"n": 2, "t": [0]})
        cuts = calibration.for_metadata({"domain": domain})
        margins[domain] = max(verdict.hazard - cuts.block, verdict.fused - cuts.hold)
        if verdict.decision is Decision.PASS:
            assert verdict.margin == pytest.approx(margins[domain], abs=1e-12)
    assert margins["bank"] != margins["mail"]


def test_thoughts_count_only_for_guards_that_read_them() -> None:
    calibrated = calibrated_guard()
    bare = Guard(dataclasses.replace(CONFIG, data=DataConfig(thought=True)), calibrated.params, FakeEncoder())
    assert calibrated.calibration is not None
    reading = bare.calibrated(dataclasses.replace(calibrated.calibration, weights=bare.weights))
    for guard, differs in ((calibrated, False), (reading, True)):
        verdicts = [guard.session("task").check("", "read", {}, thought=thought) for thought in ("", "I want it")]
        assert (verdicts[0].hazard != verdicts[1].hazard) == differs


def test_an_observing_session_goes_on_past_a_call_it_could_not_score(caplog: pytest.LogCaptureFixture) -> None:
    guard = calibrated_guard()
    session = guard.session("task", mode=Mode.OBSERVE)
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    verdict = session.check("", "read", {"nested": deep}, call_id="1")
    assert verdict.error
    assert verdict.allowed
    session.commit("1")
    assert session.steps == 1
    assert "ran unscored" in caplog.text
    assert not session.check("", "read", {}, call_id="2").error


def test_sessions_and_threads_do_not_disturb_each_other(guard: Guard) -> None:
    expected = {i: replay(guard.session(f"task {i}"), TRAJECTORIES[i].steps) for i in (2, 3, 7)}
    found: dict[tuple[int, int], list[Verdict]] = {}
    shared = guard.session("task")
    start = threading.Barrier(7)

    def own(i: int, copy: int) -> None:
        start.wait()
        found[i, copy] = replay(guard.session(f"task {i}"), TRAJECTORIES[i].steps)

    def together() -> None:
        start.wait()
        for t in range(5):
            shared.check("x", "read", {"t": t}, call_id=f"call {t}")
            shared.commit(f"call {t}")

    workers = [threading.Thread(target=own, args=(i, copy)) for i in expected for copy in (0, 1)]
    workers.append(threading.Thread(target=together))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert not any(worker.is_alive() for worker in workers)
    assert len(found) == 6
    for (i, _), verdicts in found.items():
        assert verdicts == expected[i]
    assert shared.steps == 5


def test_one_session_used_by_several_threads_moves_once_per_call(guard: Guard) -> None:
    session, fresh = guard.session("task"), guard.session("task")
    for t in range(4):
        fresh.check("x", "read", {"t": t}, call_id=f"{t}")
        fresh.commit(f"{t}")
    start = threading.Barrier(4)

    def retry() -> None:
        for t in range(4):
            start.wait()
            session.check("x", "read", {"t": t}, call_id=f"{t}")
            session.commit(f"{t}")

    workers = [threading.Thread(target=retry) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert session.steps == 4
    assert session.check("y", "send", {}) == fresh.check("y", "send", {})
