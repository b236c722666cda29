"""Verdicts: the more severe of guard and router counts, and words go with it."""

from __future__ import annotations

import itertools
import math

import pytest

from jaxguard.types import Decision, JaxguardError, JointVerdict, Route, RouteVerdict, Step, Trajectory, Verdict


def guard(decision: Decision, *, observed_only: bool = False, error: str = "") -> Verdict:
    return Verdict(0, decision, 0.9, 0.5, 0.4, 0.3, 0.81, 0.1, observed_only, error)


def router(route: Route, *, observed_only: bool = False, error: str = "", reason: str = "") -> RouteVerdict:
    stopped = route is not Route.EXECUTE
    return RouteVerdict(
        0,
        route,
        (0.2, 0.5, 0.3),
        0.29,
        0.5,
        trigger="h" if stopped else "",
        reason=reason or ("Not unique." if stopped else ""),
        question="Which one?" if route is Route.ASK else "",
        observed_only=observed_only,
        error=error,
    )


@pytest.mark.parametrize(("decision", "route"), list(itertools.product(Decision, Route)))
def test_the_more_severe_wins(decision: Decision, route: Route) -> None:
    joint = JointVerdict(guard(decision), router(route))
    severity = {"PASS": 0, "EXECUTE": 0, "HOLD": 1, "ASK": 1, "BLOCK": 2, "REFUSE": 2}
    assert joint.decision == max(severity[decision.name], severity[route.name])
    assert isinstance(joint.decision, Decision)
    assert joint.allowed is (decision is Decision.PASS and route is Route.EXECUTE)
    assert bool(joint.question) is (joint.decision is Decision.HOLD)
    assert bool(joint.reason) is not joint.allowed
    assert joint.error == ""


def test_what_both_say_is_said_the_guard_first() -> None:
    assert JointVerdict(guard(Decision.BLOCK), router(Route.ASK)).reason == (
        "The call itself is hazardous (hazard risk 0.90). Not unique."
    )
    assert JointVerdict(guard(Decision.HOLD), router(Route.EXECUTE)).reason == (
        "The run so far is risky (fused risk 0.81)."
    )
    assert JointVerdict(guard(Decision.PASS), router(Route.REFUSE)).reason == "Not unique."
    assert JointVerdict(guard(Decision.PASS), router(Route.EXECUTE)).reason == ""


def test_the_question_is_the_routers_where_it_has_one() -> None:
    assert JointVerdict(guard(Decision.HOLD), router(Route.ASK)).question == "Which one?"
    assert JointVerdict(guard(Decision.PASS), router(Route.ASK)).question == "Which one?"
    assert JointVerdict(guard(Decision.HOLD), router(Route.EXECUTE)).question == (
        "The run so far is risky. May it run?"
    )


def test_what_could_not_be_scored_is_not_called_risky() -> None:
    failed = guard(Decision.HOLD, error="no vector")
    joint = JointVerdict(failed, router(Route.EXECUTE))
    assert (joint.decision, joint.allowed, joint.error) == (Decision.HOLD, False, "no vector")
    assert joint.reason == "Could not be scored: no vector"
    assert joint.question == "This call could not be checked. May it run?"
    same = router(Route.ASK, error="no vector", reason="Could not be scored: no vector")
    assert JointVerdict(failed, same).reason == "Could not be scored: no vector"  # once, not twice
    assert JointVerdict(guard(Decision.PASS), same).error == "no vector"


@pytest.mark.parametrize("route", list(Route))
def test_a_router_lets_run_what_it_executes_or_only_observes(route: Route) -> None:
    assert router(route).allowed is (route is Route.EXECUTE)
    assert router(route, observed_only=True).allowed


def test_observing_lets_a_call_run_only_where_both_observe() -> None:
    watching = router(Route.REFUSE, observed_only=True)
    assert JointVerdict(guard(Decision.BLOCK, observed_only=True), watching).allowed
    assert JointVerdict(guard(Decision.BLOCK, observed_only=True), watching).decision is Decision.BLOCK
    assert not JointVerdict(guard(Decision.BLOCK), watching).allowed
    assert not JointVerdict(guard(Decision.PASS, observed_only=True), router(Route.ASK)).allowed


def test_a_route_is_as_severe_as_the_decision_of_its_value() -> None:
    assert [(route.name, Decision(route).name) for route in Route] == [
        ("EXECUTE", "PASS"),
        ("ASK", "HOLD"),
        ("REFUSE", "BLOCK"),
    ]


def test_marks_change_nothing_else() -> None:
    step = Step("a", {"x": 1}, "c", "seen", None, None, "hm", True, False)
    assert step.marked(True, True) == Step("a", {"x": 1}, "c", "seen", None, True, "hm", True, True)
    assert step.marked(None, False) == step


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": ""}, "trajectory id: got an empty string"),
        ({"first_hazard": 1}, r"first_hazard is 1, expected a step index in 0\.\.0"),
        ({"first_hazard": -1}, "first_hazard is -1"),
        ({"first_hazard": 0, "unsafe": False}, "first_hazard is 0 but unsafe is False"),
    ],
)
def test_impossible_trajectories_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(JaxguardError, match=message):
        Trajectory(**{"id": "t", "instruction": "go", "steps": (Step("a", {}, "c"),), **changes})  # type: ignore[arg-type]


def test_a_verdict_without_a_score_does_not_pass() -> None:
    nothing = Verdict(0, Decision.HOLD, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, error="x")
    assert not nothing.allowed
    assert JointVerdict(nothing, router(Route.REFUSE)).decision is Decision.BLOCK
