"""Live sessions: equal to scores of archives, moved by commits alone, and nothing passes by accident."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
from guard_samples import CONFIG, TRAJECTORIES, FakeEncoder, calibrated_guard, fail, fresh_guard, replay

from jaxguard.config import DataConfig
from jaxguard.decision.policy import Mode
from jaxguard.guard import Guard, GuardError
from jaxguard.types import Decision, Step, Trajectory, Verdict


@pytest.fixture
def guard() -> Guard:
    return fresh_guard()


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


def test_surrogates_are_replaced_and_do_not_raise(guard: Guard) -> None:
    verdict = guard.session("task \ud800").check("\udfff", "send\ud800", {"k\udc00": "v\ud83d"}, call_id="\ud800")
    assert not verdict.error
    clean = guard.session("task \ufffd").check("\ufffd", "send\ufffd", {"k\ufffd": "v\ufffd"})
    assert_equal(verdict, clean, atol=0)


def test_modes_and_metadata_that_are_none(guard: Guard) -> None:
    for mode in ("nonsense", None, []):
        with pytest.raises(GuardError, match=r"mode: got .*, expected one of fail_closed, observe"):
            guard.session("task", mode=mode)  # type: ignore[arg-type]
    with pytest.raises(GuardError, match="metadata: got str, expected a mapping or None"):
        guard.session("task", metadata="domain")  # type: ignore[arg-type]
    observing = guard.session("task", mode="observe")  # type: ignore[arg-type]
    guard.encoder.fault = fail  # type: ignore[attr-defined]
    assert observing.check("", "read").allowed


def test_risks_that_are_not_finite_are_held(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxguard.guard.LARGEST_VALUE", math.inf)
    session = guard.session("task")
    guard.encoder.fault = lambda vectors: vectors + np.float32(1e30)  # type: ignore[attr-defined]
    verdict = session.check("", "read", {}, call_id="c")
    assert verdict.decision is Decision.HOLD
    assert math.isnan(verdict.margin)
    with pytest.raises(GuardError, match=r"could not be scored .*expected finite ones"):
        session.commit("c")


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
