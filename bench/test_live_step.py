"""One live step at batch 1: host arrays in, Python numbers out. Encoding is not part of it.

Variants take turns within each round, so that their ratio does not depend on what else the machine does.
Compilation happens before the first round.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
from flax import nnx

from bench.conftest import percentiles
from jaxguard.config import MODEL_PRESETS, ModelConfig
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.world_model.params import build, init_params
from jaxguard.world_model.rssm import RSSM, encode_instruction, encode_steps, score_step, step_weights
from jaxguard.world_model.scorer import Scorer

Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


def product(config: ModelConfig) -> Step:
    """What a live session runs."""
    scorer = Scorer(config, init_params(config, 0))
    state = scorer.start(np.zeros(config.embed_dim, np.float32))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        _, hazard, prefix = scorer.step(state, obs, act)
        return hazard, prefix

    return step


def _plain(model: RSSM, config: ModelConfig, h: jax.Array, heads_e: jax.Array, obs: jax.Array, act: jax.Array):
    w = step_weights(model, config)
    return score_step(w, config, h, encode_steps(model, config, obs[None], act[None]), heads_e)


def nnx_jit(config: ModelConfig) -> Step:
    """The obvious way in NNX: the module is an argument."""
    model = build(config, init_params(config, 0))
    state = encode_instruction(model, config, np.zeros((1, config.embed_dim), np.float32))

    @nnx.jit
    def run(model: RSSM, h: jax.Array, heads_e: jax.Array, obs: jax.Array, act: jax.Array):
        return _plain(model, config, h, heads_e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(model, state.h0, state.heads_e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


def split_jit(config: ModelConfig) -> Step:
    """Split once, `jax.jit` over the plain pytree."""
    params = init_params(config, 0)
    state = encode_instruction(build(config, params), config, np.zeros((1, config.embed_dim), np.float32))

    @jax.jit
    def run(params, h: jax.Array, heads_e: jax.Array, obs: jax.Array, act: jax.Array):
        return _plain(build(config, params), config, h, heads_e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(params, state.h0, state.heads_e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


VARIANTS: dict[str, Callable[[ModelConfig], Step]] = {
    "product": product,
    "nnx.jit": nnx_jit,
    "split jax.jit": split_jit,
}


@pytest.mark.parametrize("size", ["small", "paper"])
def test_live_step(benchmark, smoke: bool, say, size: str) -> None:
    config = MODEL_PRESETS[size]
    benchmark.group = f"live step, {size} (E {config.embed_dim}, D {config.deter})"
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(16, config.embed_dim)).astype(np.float32)
    fusion, cutoffs = FusionParams(), Cutoffs(0.9, 0.8)

    def decide(step: Step, i: int) -> int:
        hazard, prefix = step(vectors[i % 16], vectors[(i + 5) % 16])
        _, evidence = advance(EvidenceState(), hazard, prefix, fusion)
        return decide_step(evidence.hazard, evidence.fused, cutoffs)[0]

    rounds = 20 if smoke else 2000
    steps = {name: make(config) for name, make in VARIANTS.items()}
    answers = {name: step(vectors[0], vectors[1]) for name, step in steps.items()}
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, answers["product"], atol=2e-6, err_msg=name)
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for i in range(rounds):
        for name, step in steps.items():
            if name == "nnx.jit" and i % 10:
                continue  # an order of magnitude slower; its median needs fewer rounds
            begin = time.perf_counter()
            decide(step, i)
            times[name].append(time.perf_counter() - begin)
    found = {name: percentiles(values) for name, values in times.items()}
    benchmark.extra_info.update(found)
    base = found["product"]["p50_us"]
    for name, values in found.items():
        say(f"live step {size:6} {name:14} p50 {values['p50_us']:8.0f} us, p99 {values['p99_us']:8.0f} us, "
            f"{values['p50_us'] / base:5.1f} x product")  # fmt: skip
    benchmark.pedantic(decide, (steps["product"], 3), rounds=rounds, warmup_rounds=5)
