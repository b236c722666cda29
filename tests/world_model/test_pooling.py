"""The pooled head against the plain formula, in a live session and in lanes."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.world_model.packing import CHUNK, Sequence
from jaxguard.world_model.params import Params
from jaxguard.world_model.pooling import (
    empty_pool,
    pool_actions,
    pool_inputs,
    pool_instruction,
    pool_observations,
    pool_step,
    pooled_logit,
    pooled_size,
    pooled_weights,
)
from jaxguard.world_model.scorer import Scorer

E, T, B = 6, 9, 3
RNG = np.random.default_rng(12)
KERNEL = RNG.normal(size=(pooled_size(E, E), 1)).astype(np.float32)
BIAS = np.array([0.7], np.float32)


def plain(obs: np.ndarray, act: np.ndarray, ins: np.ndarray, kernel: np.ndarray = KERNEL) -> np.ndarray:
    """``[T]`` logits of one run, each from its whole past."""
    out = []
    for t in range(len(act)):
        o, a = obs[: t + 1], act[: t + 1]
        by_obs, by_ins = (
            np.concatenate([x * one for one in a[-1].reshape(-1, len(ins))]) for x in (o[-1], ins)
        )  # each vector of the action
        parts = [o[-1], a[-1], o.mean(0), a.mean(0), o.max(0), a.max(0), by_obs, o[-1] * ins, by_ins, ins]
        out.append(np.concatenate(parts).astype(np.float64) @ kernel[:, 0] + BIAS[0])
    return np.array(out)


@pytest.mark.parametrize("vectors", [1, 2])
def test_steps_equal_the_formula(vectors: int) -> None:
    obs = RNG.normal(size=(B, T, E)).astype(np.float32)
    act = RNG.normal(size=(B, T, vectors * E)).astype(np.float32)
    ins = RNG.normal(size=(B, E)).astype(np.float32)
    kernel = RNG.normal(size=(pooled_size(E, vectors * E), 1)).astype(np.float32)
    w = pooled_weights(jax.numpy.asarray(kernel), jax.numpy.asarray(BIAS), E)
    pool, instruction = empty_pool(B, (1 + vectors) * E), pool_instruction(w, ins)
    for t in range(T):
        x = pool_inputs(w, pool_observations(w, obs[:, t]), pool_actions(w, act[:, t]))
        pool, pooled = pool_step(w, pool, x)
        found = pooled_logit(pooled, x, instruction)
        expected = [plain(obs[b], act[b], ins[b], kernel)[t] for b in range(B)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def scorers(tiny: ModelConfig, params: Params) -> tuple[Scorer, Scorer]:
    """Without the pooled head, and with it."""
    without = {**params, "pooled_head": {"kernel": 0 * KERNEL, "bias": 0 * BIAS}}
    return Scorer(tiny, without), Scorer(tiny, {**params, "pooled_head": {"kernel": KERNEL, "bias": BIAS}})


def logit(risk: np.ndarray) -> np.ndarray:
    return np.log(risk) - np.log1p(-risk)


def test_scores_add_it_to_the_hazard_logit_alone(tiny: ModelConfig, scorers: tuple[Scorer, Scorer]) -> None:
    assert tiny.embed_dim == E
    table = (0.3 * RNG.normal(size=(50, E))).astype(np.float32)
    items = [
        Sequence(*RNG.integers(0, 50, size=(2, n)), int(RNG.integers(0, 50))) for n in (1, 3, CHUNK, 2 * CHUNK + 5, 4)
    ] * 40
    without, with_head = (dict(s.score(items, lambda rows: table[rows])) for s in scorers)
    for position, item in enumerate(items):
        added = logit(with_head[position][:, 0].astype(float)) - logit(without[position][:, 0].astype(float))
        np.testing.assert_allclose(added, plain(table[item.obs], table[item.act], table[item.ins]), atol=2e-3)
        np.testing.assert_array_equal(with_head[position][:, 1], without[position][:, 1])
        assert np.abs(added).max() > 0.05
    item = items[3]
    state = scorers[1].start(table[item.ins])
    for t, (o, a) in enumerate(zip(item.obs, item.act, strict=True)):
        state, hazard, prefix = scorers[1].step(state, table[o], table[a])
        np.testing.assert_allclose((hazard, prefix), with_head[3][t], atol=1e-6)
