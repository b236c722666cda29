"""Live routes: equal to those of archives, at the tau of the service, with reasons; and guard and router as one."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from guard_samples import CONFIG as GUARD_CONFIG
from guard_samples import TRAJECTORIES as PLAIN
from guard_samples import FakeEncoder, bare_guard, calibrated_guard, fail, replay
from route_samples import TRAJECTORIES, Both, all_logits, bare_router, both, fresh_router, routed_router

from jaxguard.config import DataConfig
from jaxguard.decision.explain import UNPARSED
from jaxguard.decision.policy import Mode
from jaxguard.decision.routing import shares
from jaxguard.guard import Guard, GuardError
from jaxguard.router import JointSession, Router, RouterError
from jaxguard.traces.snapshots import TRIGGERS
from jaxguard.types import Decision, JointVerdict, Route, RouteVerdict
from jaxguard.world_model.routing import LETTERS

LONG = TRAJECTORIES[8]


@pytest.fixture
def router() -> Router:
    return fresh_router()


@pytest.fixture
def pair() -> Both:
    return both()


def live(router: Router, mode: Mode = Mode.FAIL_CLOSED) -> list[RouteVerdict]:
    return replay(router.session(LONG.instruction, LONG.metadata, mode), LONG.steps)


@pytest.mark.parametrize("index", [1, 2, 3, 8])
def test_streaming_equals_batch(router: Router, index: int) -> None:
    chosen = TRAJECTORIES[index]
    logits = all_logits()[chosen.id]
    routing = routed_router().routing
    assert routing is not None
    tau = routing.tau_for(chosen.metadata["service"])
    found = shares(logits[:, :3])
    verdicts = replay(router.session(chosen.instruction, chosen.metadata), chosen.steps)
    for t, verdict in enumerate(verdicts):
        assert (verdict.step, verdict.tau, verdict.error) == (t, tau, "")
        softmax = np.exp(logits[t, :3]) / np.exp(logits[t, :3]).sum()
        np.testing.assert_allclose(verdict.probabilities, softmax, atol=1e-5)
        assert verdict.execute_share == pytest.approx(found.q[t], abs=1e-5)
        assert verdict.route == found.routes(tau)[t]
        assert verdict.allowed == (verdict.route is Route.EXECUTE)


def test_the_trigger_is_the_likeliest_of_the_route_and_is_told(router: Router) -> None:
    verdicts = live(router)
    assert len({verdict.route for verdict in verdicts}) >= 2
    for t, verdict in enumerate(verdicts):
        if verdict.route is Route.EXECUTE:
            assert (verdict.trigger, verdict.reason, verdict.question) == ("", "", "")
            continue
        own = {letter: all_logits()[LONG.id][t, 3 + i] for i, letter in enumerate(LETTERS)}
        fitting = {letter: value for letter, value in own.items() if TRIGGERS[letter] is verdict.route}
        assert fitting[verdict.trigger] == max(fitting.values())
        assert verdict.reason
        assert bool(verdict.question) == (verdict.route is Route.ASK)


def test_tau_is_that_of_the_service(router: Router) -> None:
    routing = routed_router().routing
    assert routing is not None
    own = routing.services["balanced"]
    for metadata, tau in (
        ({"service": "mail"}, own["mail"]),
        ({"service": "files", "domain": "mail"}, own["files"]),
        ({"domain": "mail"}, own["mail"]),  # as the rows that tau was chosen on
        ({"service": "elsewhere"}, routing.taus["balanced"]),
        (None, routing.taus["balanced"]),
    ):
        assert router.session("task", metadata).check("", "read").tau == tau


def test_memory_is_read_and_checked(router: Router) -> None:
    one, two = (router.session("task", {"memory": m}).check("", "read") for m in ("", "Never read anything."))
    assert one.execute_share != two.execute_share
    assert router.session("task", {"memory": None}).check("", "read") == one
    for name in ("memory", "service", "domain"):
        with pytest.raises(RouterError, match=f"metadata {name}: got int, expected text or None"):
            router.session("task", {name: 0})
    with pytest.raises(RouterError, match="metadata: got str, expected a mapping or None"):
        router.session("task", "mail")  # type: ignore[arg-type]
    with pytest.raises(RouterError, match="router: has no thresholds"):
        bare_router().session("task")


def test_observing_lets_calls_run_and_says_so(router: Router) -> None:
    for verdict, strict in zip(live(router, Mode.OBSERVE), live(router), strict=True):
        assert verdict.route is strict.route
        assert verdict.allowed
        assert verdict.observed_only == (strict.route is not Route.EXECUTE)


def test_arguments_that_cannot_be_parsed_execute_nothing(router: Router) -> None:
    session, executed = router.session(LONG.instruction, LONG.metadata, Mode.OBSERVE), 0
    for t, step in enumerate(LONG.steps):
        whole = json.dumps(step.arguments)
        for raw in (whole[:-1], whole[:-1] + ",}", '{"x": 1, "x": 1}'):
            broken = session.check(step.observation, step.tool, raw, call_id=str(t))
            assert broken.route is not Route.EXECUTE
            assert broken.reason.startswith(UNPARSED)
            if broken.execute_share >= broken.tau and broken.route is Route.ASK:
                executed += 1
                assert broken.trigger == ""
                assert broken.question
        session.check(step.observation, step.tool, step.arguments, call_id=str(t))
        session.commit(str(t))
    assert executed


# Guard and router as one


def test_the_more_severe_wins(pair: Both) -> None:
    seen = set()
    for chosen in (*TRAJECTORIES[:9], *PLAIN[:9]):
        joint = replay(pair.session(chosen.instruction, chosen.metadata), chosen.steps)
        guarded = replay(pair.guard.session(chosen.instruction, chosen.metadata), chosen.steps)
        routed = replay(pair.router.session(chosen.instruction, chosen.metadata), chosen.steps)
        for both_, guard, router in zip(joint, guarded, routed, strict=True):
            assert both_ == JointVerdict(guard, router)  # both states moved together
            assert both_.decision == max(int(guard.decision), int(router.route))
            assert both_.allowed == (guard.allowed and router.allowed)
            assert bool(both_.question) == (both_.decision is Decision.HOLD)
            seen.add((int(guard.decision), int(router.route)))
    assert any(guard > router for guard, router in seen)
    assert any(guard < router for guard, router in seen)


def spoil(half: Any, name: str) -> None:
    """Only this half's scorer fails."""

    class Failing:
        def __getattr__(self, _: str) -> Any:
            raise RuntimeError(f"{name} is lost")

    half._scorer = Failing()


@pytest.mark.parametrize("lost", ["guard", "router"])
def test_a_failing_half_holds_and_the_other_still_counts(lost: str) -> None:
    found = set()
    for chosen in TRAJECTORIES[:9]:
        pair, whole = both(), both()
        if not chosen.steps:
            continue
        step = chosen.steps[0]
        call = (step.observation, step.tool, step.arguments)
        expected = whole.session(chosen.instruction, chosen.metadata).check(*call)
        spoil(getattr(pair, lost), lost)
        session = pair.session(chosen.instruction, chosen.metadata)
        verdict = session.check(*call)
        assert not verdict.allowed
        assert f"{lost} is lost" in verdict.error
        kept, held = (verdict.router, verdict.guard) if lost == "guard" else (verdict.guard, verdict.router)
        assert kept == (expected.router if lost == "guard" else expected.guard)
        assert held.error
        severity = int(kept.route if isinstance(kept, RouteVerdict) else kept.decision)
        assert verdict.decision == max(severity, Decision.HOLD)
        found.add(severity)
        with pytest.raises(RouterError, match="could not be scored"):
            session.commit()
        assert session.steps == 0
        getattr(pair, lost)._scorer = getattr(whole, lost).scorer
        assert session.check(*call) == expected  # it has recovered, and neither half had moved
    assert 0 in found  # a call that the other half alone would have let run


def test_both_halves_share_what_is_encoded(pair: Both) -> None:
    session = pair.session(LONG.instruction, LONG.metadata)
    for step in LONG.steps[:4]:
        pair.encoder.seen.clear()
        session.check(step.observation, step.tool, step.arguments, call_id=step.call_id)
        session.commit(step.call_id)
        assert pair.encoder.seen
        assert len(set(pair.encoder.seen)) == len(pair.encoder.seen)


def test_an_encoder_that_fails_holds_both(pair: Both) -> None:
    session = pair.session("task")
    pair.encoder.fault = fail
    verdict = session.check("", "read")
    assert (verdict.guard.decision, verdict.router.route) == (Decision.HOLD, Route.ASK)
    assert math.isnan(verdict.guard.fused)
    assert verdict.question


def test_an_observing_joint_session_goes_on_unscored(pair: Both, caplog: pytest.LogCaptureFixture) -> None:
    session = pair.session("task", mode=Mode.OBSERVE)
    pair.encoder.fault = fail
    assert session.check("", "read", {}, call_id="1").allowed
    session.commit("1")
    assert "ran unscored" in caplog.text
    pair.encoder.fault = lambda vectors: vectors
    verdict = session.check("x", "send", {}, call_id="2")
    assert (verdict.error, verdict.guard.step, verdict.router.step) == ("", 1, 1)


def test_halves_that_do_not_fit_are_refused() -> None:
    reading = dataclasses.replace(GUARD_CONFIG, data=DataConfig(thought=True))
    guard = Guard(reading, calibrated_guard().params, FakeEncoder())
    with pytest.raises(RouterError, match="guard and router: one reads thoughts and one does not, expected the same"):
        JointSession(guard, routed_router(), "task")
    with pytest.raises(GuardError, match="guard: has no thresholds"):
        JointSession(bare_guard(), routed_router(), "task")
    with pytest.raises(RouterError, match="router: has no thresholds"):
        JointSession(calibrated_guard(), bare_router(), "task")
    with pytest.raises(RouterError, match="mode: got 'nonsense'"):
        JointSession(calibrated_guard(), routed_router(), "task", mode="nonsense")  # type: ignore[arg-type]
