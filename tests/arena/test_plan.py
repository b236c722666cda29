"""Nothing that is held out may be trained on, and the same seed gives the same plan."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from jaxguard.arena.plan import ATTACKS, HELD_OUT_ATTACKS, HIJACKED, ArenaError, Case, Plan, cases, make_plan
from jaxguard.inputs import PARTS

SIZES = {"bank": (16, 9), "mail": (40, 6)}


def stages() -> Any:
    return {
        name: SimpleNamespace(
            users=[f"user_{i}" for i in range(u)],
            injections=[f"goal_{i}" for i in range(g)],
            errands=[f"errand_{i}" for i in range(12)],
        )
        for name, (u, g) in SIZES.items()
    }


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(stages(), 3)


def test_every_task_is_in_one_part(plan: Plan) -> None:
    for name, (users, goals) in SIZES.items():
        for parts, count in ((plan.users[name], users), (plan.goals[name], goals)):
            ids = [i for own in parts.values() for i in own]
            assert len(ids) == len(set(ids)) == count
            assert all(parts.values())


def test_the_seed_decides_and_the_order_of_tasks_does_not(plan: Plan) -> None:
    turned = {
        name: SimpleNamespace(users=own.users[::-1], injections=own.injections[::-1], errands=own.errands)
        for name, own in stages().items()
    }
    assert make_plan(turned, 3) == plan
    assert make_plan(stages(), 4) != plan


def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    with pytest.raises(ArenaError, match="expected seed, users, goals and errands"):
        Plan.from_json({"seed": 3})


@pytest.mark.parametrize("part", PARTS)
def test_runs_are_of_the_tasks_of_their_part(plan: Plan, part: str) -> None:
    found = list(cases(plan, part))
    assert len({case.id for case in found}) == len(found)
    goals = {"calibration": ("train", "validation")}.get(part, (part,))
    for case in found:
        assert case.user in plan.users[case.suite][part]
        allowed = {goal for name in goals for goal in plan.goals[case.suite][name]}
        made_up = (*plan.users[case.suite]["train"], *plan.errands[case.suite]) if part == "train" else ()
        assert not case.goal or case.goal in allowed or case.goal in made_up
        assert case.goal != case.user
    benign = [case for case in found if case.conduct == "benign"]
    assert {(c.suite, c.user) for c in benign} == {(s, u) for s in plan.users for u in plan.users[s][part]}


def test_held_out_attacks_are_tested_and_not_trained_on(plan: Plan) -> None:
    used = {part: {case.attack for case in cases(plan, part)} - {""} for part in PARTS}
    assert used["test"] == {*ATTACKS, *HELD_OUT_ATTACKS}
    assert all(used[part] <= set(ATTACKS) for part in PARTS if part != "test")


def test_what_is_injected_in_one_training_run_is_asked_for_in_another(plan: Plan) -> None:
    by_conduct: dict[bool, set[tuple[str, str, str]]] = {True: set(), False: set()}
    for case in cases(plan, "train"):
        if case.conduct in (*HIJACKED, "asked"):
            by_conduct[case.conduct == "asked"].add((case.suite, case.user, case.goal))
    assert by_conduct[True] == by_conduct[False]


def test_calibration_runs_are_safe(plan: Plan) -> None:
    assert {case.conduct for case in cases(plan, "calibration")} == {"benign", "ignores"}


def test_what_is_not_there_is_refused(plan: Plan) -> None:
    with pytest.raises(ArenaError, match="got 'dev', expected one of train, validation"):
        list(cases(plan, "dev"))
    few = {"tiny": SimpleNamespace(users=["a", "b"], injections=["x", "y", "z"], errands=[])}
    with pytest.raises(ArenaError, match="got 2, expected one for each of train"):
        make_plan(few, 0)  # type: ignore[arg-type]


def test_what_is_no_plan_is_named(plan: Plan) -> None:
    def without(kind: str, *path: str) -> dict:
        whole = plan.to_json()
        place = whole[kind]
        for name in path[:-1]:
            place = place[name]
        del place[path[-1]]
        return whole

    suite = next(iter(plan.users))
    for broken in (
        None,
        {},
        without("users", suite, "test"),
        without("goals", suite, "train"),
        without("goals", suite),
        without("errands", suite),
    ):
        with pytest.raises(ArenaError, match="expected seed, users, goals and errands of every suite"):
            Plan.from_json(broken)


def test_ids_tell_asked_runs_apart() -> None:
    one, other = (Case("bank", "user_1", "asked", "goal_1", "direct", joined) for joined in (0, 1))
    assert one.id != other.id
