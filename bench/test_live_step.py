"""One live step at batch 1: host arrays in, Python numbers out. Encoding is not part of it.

Variants take turns in blocks of calls, so that their ratio does not depend on what else the machine does and
each finds its own weights in the caches. Compilation happens before the first round. At batch 1 a second thread
costs more in hand-overs than it computes, so everything runs on one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.conftest import percentiles
from jaxguard.config import MODEL_PRESETS, ModelConfig
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.world_model.layers import gru
from jaxguard.world_model.params import build, init_params
from jaxguard.world_model.rssm import RSSM
from jaxguard.world_model.scorer import Scorer

# Calls of one variant before the next has its turn.
BLOCK = 20

Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


def product(config: ModelConfig) -> Step:
    """What a live session runs."""
    scorer = Scorer(config, init_params(config, 0))
    state = scorer.start(np.zeros(config.embed_dim, np.float32))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        _, hazard, prefix = scorer.step(state, obs, act)
        return hazard, prefix

    return step


def plain_step(model: RSSM, config: ModelConfig, h: jax.Array, e: jax.Array, obs: jax.Array, act: jax.Array):
    """A step as one writes it first, module by module: no folded norms, no fused heads, nothing cached."""
    o, a = model.obs_encoder(obs[None]), model.act_encoder(act[None])
    logits = model.posterior(jnp.concatenate([h, o], axis=-1))
    z = jax.nn.one_hot(logits.reshape(1, config.stoch, config.classes).argmax(-1), config.classes).reshape(1, -1)
    inputs = model.core.inputs(model.core.norm(jnp.concatenate([z, a], axis=-1)))
    h = gru(h, inputs, model.core.recurrent(h))
    prior = model.prior(h).reshape(1, config.stoch, config.classes)
    feat = jnp.concatenate([h, jax.nn.one_hot(prior.argmax(-1), config.classes).reshape(1, -1)], axis=-1)
    feat = feat + config.adapter_scale * model.adapter(feat)
    x = jnp.concatenate([feat, a, model.ins_encoder(e)], axis=-1)
    risks = jax.nn.sigmoid(jnp.concatenate([model.hazard_head(x), model.prefix_head(x)], axis=-1))
    return h, risks


def _start(model: RSSM, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    e = jnp.zeros((1, config.embed_dim))
    return jnp.tanh(model.init(model.ins_encoder(e))), e


def nnx_jit(config: ModelConfig) -> Step:
    """The obvious way in NNX: the module is an argument."""
    model = build(config, init_params(config, 0))
    h, e = _start(model, config)

    @nnx.jit
    def run(model: RSSM, h: jax.Array, e: jax.Array, obs: jax.Array, act: jax.Array):
        return plain_step(model, config, h, e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(model, h, e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


def split_jit(config: ModelConfig) -> Step:
    """Split once, `jax.jit` over the plain pytree."""
    params = init_params(config, 0)
    h, e = _start(build(config, params), config)

    @jax.jit
    def run(params, h: jax.Array, e: jax.Array, obs: jax.Array, act: jax.Array):
        return plain_step(build(config, params), config, h, e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(params, h, e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


VARIANTS: dict[str, Callable[[ModelConfig], Step]] = {
    "product": product,
    "nnx.jit": nnx_jit,
    "split jax.jit": split_jit,
}


@pytest.mark.parametrize("size", ["small", "paper"])
def test_live_step(benchmark, smoke: bool, say, one_core: str, size: str) -> None:
    if smoke and size != "small":
        pytest.skip("left out of the smoke run")
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
    for i in range(rounds // BLOCK):
        for name, step in steps.items():
            if name == "nnx.jit" and i % 10:
                continue  # an order of magnitude slower; its median needs fewer rounds
            decide(step, i)  # the caches now hold this variant's weights
            for _ in range(BLOCK):
                begin = time.perf_counter()
                decide(step, i)
                times[name].append(time.perf_counter() - begin)
    found = {name: percentiles(values) for name, values in times.items()}
    benchmark.extra_info.update(found, cores=one_core)
    base = found["product"]["p50_us"]
    for name, values in found.items():
        p50, p99 = values["p50_us"], values["p99_us"]
        ratio = f"{p50 / base:5.1f} x product"
        say(f"live step ({one_core}) {size:6} {name:14} p50 {p50:7.0f} us, p99 {p99:7.0f} us, {ratio}")
    benchmark.pedantic(decide, (steps["product"], 3), rounds=rounds, warmup_rounds=5)
