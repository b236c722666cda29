"""The pre-action rule, and one answer for both ways to ask, for every local rival."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from rival_samples import READER, run, runs
from test_neural import CONFIG, TINY, episodes

from jaxguard.baselines.chains import AbsorbingChain, Lesson, ToolChain
from jaxguard.baselines.keywords import KeywordRival
from jaxguard.baselines.logistic import LogisticRival
from jaxguard.baselines.neural import NETWORKS, NeuralRival
from jaxguard.baselines.rival import PrefixRival, blind, score
from jaxguard.types import Step, Trajectory
from jaxguard.world_model.params import init_params

pytestmark = pytest.mark.usefixtures("toy_size")
LESSON = Lesson(runs(40), runs(20, seed=500))


def logistic(name: str) -> PrefixRival:
    found = LogisticRival.fit(episodes(runs(24)), name, READER)
    assert found is not None
    return found


def network(name: str) -> PrefixRival:
    return NeuralRival(name, CONFIG, init_params(TINY, 3, NETWORKS[name].module), READER)


MAKERS: dict[str, Callable[[], PrefixRival]] = {
    "keywords": KeywordRival,
    "tool-chain": lambda: ToolChain(LESSON),
    "absorbing-chain": lambda: AbsorbingChain(LESSON, READER),
    "logistic-step": lambda: logistic("step"),
    "logistic-pooled": lambda: logistic("pooled"),
    **{name: lambda name=name: network(name) for name in NETWORKS},
}
MEMORYLESS = {"keywords", "logistic-step", "step-mlp"}
LONG = run(41, True, 21)  # longer than two windows of CONFIG.train.max_steps


@pytest.fixture(scope="module", params=MAKERS)
def rival(request: pytest.FixtureRequest) -> PrefixRival:
    return MAKERS[request.param]()


def with_other_end(trajectory: Trajectory, after: int) -> Trajectory:
    """Everything after action ``after`` is something else, and so are the labels."""
    other = tuple(Step("wipe_all", {"x": i}, f"z{i}", observation=f"confidential {i}", hazard=True) for i in range(3))
    return dataclasses.replace(
        trajectory,
        steps=(*trajectory.steps[: after + 1], *other),
        unsafe=False,
        first_hazard=None,
        final_observation="leaked",
        metadata={"risk_type": "none"},
    )


def test_nothing_after_the_action_moves_its_risk(rival: PrefixRival) -> None:
    (base,) = score(rival, [LONG])
    assert base.shape == (21,)
    assert ((base >= 0) & (base <= 1)).all()
    for t in (0, 1, 3, 4, 7, 8, 12, 19):
        (found,) = score(rival, [with_other_end(LONG, t)])
        np.testing.assert_array_equal(found[: t + 1], base[: t + 1])


def test_asking_step_by_step_gives_the_same_risks(rival: PrefixRival) -> None:
    (base,) = score(rival, [LONG])
    seen = blind(LONG)
    asked = [rival.observe(dataclasses.replace(seen, steps=seen.steps[:t]), step) for t, step in enumerate(LONG.steps)]
    np.testing.assert_array_equal(asked, base)


def test_company_moves_no_risk(rival: PrefixRival) -> None:
    (alone,) = score(rival, [LONG])
    np.testing.assert_array_equal(score(rival, [*runs(4), LONG, *runs(2)])[4], alone)


def test_who_remembers_and_who_does_not(rival: PrefixRival) -> None:
    """Other calls before, in the other order; the last step and its observation stay."""
    other = (Step("drop_copy", {"n": 1}, "a"), Step("make_copy", {"n": 2}, "b", observation="confidential"))
    (base,) = score(rival, [LONG])
    (found,) = score(rival, [dataclasses.replace(LONG, steps=(*other, LONG.steps[-1]), first_hazard=2)])
    # The step stands elsewhere, in a window of another size, whose rounding is another.
    assert bool(np.isclose(found[-1], base[-1], rtol=1e-6)) == (rival.name in MEMORYLESS)


def test_equal_seeds_give_equal_rivals(rival: PrefixRival) -> None:
    again = MAKERS[rival.name]()
    for one, two in zip(score(rival, runs(6, seed=900)), score(again, runs(6, seed=900)), strict=True):
        np.testing.assert_array_equal(one, two)
