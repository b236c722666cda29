"""What is left of a model whose parts were taken away, wherever it is read: training, live steps, lanes."""

from __future__ import annotations

import copy
import dataclasses

import jax
import numpy as np
import pytest

from jaxguard.config import Config, ModelConfig
from jaxguard.settings import ConfigError
from jaxguard.training.state import loss_function
from jaxguard.world_model.losses import Batch, risk_logits
from jaxguard.world_model.packing import Sequence
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.scorer import Scorer

pytestmark = pytest.mark.usefixtures("quick_compile")

RNG = np.random.default_rng(7)
B, T = 3, 5
WITHOUT = {
    "recurrent": {"recurrent": False},
    "successor": {"successor": False},
    "both of them": {"recurrent": False, "successor": False},
    "hazard": {"heads": "prefix"},
    "prefix": {"heads": "hazard"},
}


@pytest.fixture(scope="module")
def steps(tiny: ModelConfig) -> tuple[np.ndarray, ...]:
    """Observations, actions ``[B, T, E]`` and instructions ``[B, E]``."""
    shapes = (B, T, tiny.embed_dim), (B, T, tiny.embed_dim), (B, tiny.embed_dim)
    return tuple(RNG.normal(size=shape).astype(np.float32) for shape in shapes)


def live(scorer: Scorer, obs: np.ndarray, act: np.ndarray, ins: np.ndarray) -> np.ndarray:
    """Risks ``[T, 2]`` of one trajectory, step after step."""
    state, risks = scorer.start(ins), []
    for o, a in zip(obs, act, strict=True):
        state, *own = scorer.step(state, o, a)
        risks.append(own)
    return np.array(risks)


def every(scorer: Scorer, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    return np.stack([live(scorer, *(part[i] for part in steps)) for i in range(B)])


@pytest.fixture(scope="module")
def full(tiny: ModelConfig, params: Params, steps: tuple[np.ndarray, ...]) -> np.ndarray:
    """Risks ``[B, T, 2]`` of the model from which nothing was taken."""
    return every(Scorer(tiny, params), steps)


def batch(steps: tuple[np.ndarray, ...]) -> Batch:
    obs, act, ins = (np.pad(x, ((0, 0), (0, 1), (0, 0))) if x.ndim == 3 else x for x in steps)
    marks = [np.ones((B, T), np.float32) for _ in range(5)]
    return Batch(obs, act, ins, *marks)  # type: ignore[arg-type]


QUICK = ("recurrent", "successor")


@pytest.fixture(scope="module", params=[w if w in QUICK else pytest.param(w, marks=pytest.mark.slow) for w in WITHOUT])
def ablated(request: pytest.FixtureRequest, tiny: ModelConfig) -> ModelConfig:
    return dataclasses.replace(tiny, **WITHOUT[request.param])


def test_training_live_steps_and_lanes_read_the_same(
    ablated: ModelConfig, params: Params, steps: tuple[np.ndarray, ...]
) -> None:
    plain = copy.deepcopy(params)
    plain["pooled_head"] = jax.tree.map(np.zeros_like, plain["pooled_head"])  # training of the world model has none
    scorer = Scorer(ablated, plain)
    found = every(scorer, steps)
    logits = np.asarray(jax.jit(lambda p, b: risk_logits(build(ablated, p), ablated, b, None))(plain, batch(steps)))
    np.testing.assert_allclose(found, np.array(ablated.kept) / (1 + np.exp(-logits)), atol=1e-6)
    obs, act, ins = steps
    table = np.concatenate([obs.reshape(B * T, -1), act.reshape(B * T, -1), ins])
    rows = np.arange(B * T).reshape(B, T)
    packed = [Sequence(own, own + B * T, 2 * B * T + i) for i, own in enumerate(rows)]
    in_lanes = dict(scorer.score(packed, lambda ids: table[ids]))
    for i in range(B):
        np.testing.assert_allclose(in_lanes[i], found[i], atol=1e-6)


def test_every_part_that_is_taken_away_moves_the_risks(
    ablated: ModelConfig, params: Params, steps: tuple[np.ndarray, ...], full: np.ndarray
) -> None:
    assert np.abs(every(Scorer(ablated, params), steps) - full).max() > 1e-3


def test_without_recurrence_a_step_knows_nothing_of_the_steps_before(
    tiny: ModelConfig, params: Params, steps: tuple[np.ndarray, ...]
) -> None:
    plain = copy.deepcopy(params)
    plain["pooled_head"] = jax.tree.map(np.zeros_like, plain["pooled_head"])  # it remembers by itself
    obs, act, ins = (part[0] for part in steps)
    for recurrent in (True, False):
        scorer = Scorer(dataclasses.replace(tiny, recurrent=recurrent), plain)
        alone = np.concatenate([live(scorer, obs[t : t + 1], act[t : t + 1], ins) for t in range(T)])
        same = np.allclose(alone, live(scorer, obs, act, ins), atol=1e-6)
        assert same is not recurrent


def test_without_successor_the_core_has_no_say_in_the_first_step(
    tiny: ModelConfig, params: Params, steps: tuple[np.ndarray, ...]
) -> None:
    other = copy.deepcopy(params)
    other["core"] = jax.tree.map(lambda x: x + 0.5, other["core"])
    for successor in (True, False):
        own = dataclasses.replace(tiny, successor=successor)
        one, two = (every(Scorer(own, p), steps) for p in (params, other))
        assert np.allclose(one[:, 0], two[:, 0], atol=1e-6) is not successor
        assert not np.allclose(one[:, 1], two[:, 1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kept"), [("hazard", 0), ("prefix", 1)])
def test_one_head_is_left_as_it_was_and_the_other_is_zero_and_learns_nothing(
    tiny: ModelConfig, params: Params, steps: tuple[np.ndarray, ...], full: np.ndarray, heads: str, kept: int
) -> None:
    own = dataclasses.replace(tiny, heads=heads)
    found = every(Scorer(own, params), steps)
    np.testing.assert_array_equal(found[..., kept], full[..., kept])
    assert not found[..., 1 - kept].any()
    loss = loss_function(Config(model=own), 2)
    grads = jax.jit(jax.grad(lambda p: loss(p, batch(steps), jax.random.key(0))[0]))(params)
    moved = {
        n: any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads[n])) for n in ("hazard_head", "prefix_head")
    }
    assert moved == {"hazard_head": heads == "hazard", "prefix_head": heads == "prefix"}


def test_another_name_of_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.heads: got 'none', expected 'both', 'hazard'"):
        ModelConfig(heads="none")
