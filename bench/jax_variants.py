"""A live step in JAX: what the product runs, and other ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxguard.config import ModelConfig
from jaxguard.world_model.layers import gru
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.rssm import RSSM
from jaxguard.world_model.scorer import LiveState, Scorer

Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]
"""Observation and action ``[E]`` on the host to hazard and prefix risk of a session whose instruction is zeros."""


def product(config: ModelConfig, params: Params) -> Step:
    """What a live session runs: prepared weights closed over as constants, `jax.jit`."""
    scorer = Scorer(config, params)
    state = scorer.start(np.zeros(config.embed_dim, np.float32))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        _, hazard, prefix = scorer.step(state, obs, act)
        return hazard, prefix

    return step


def _of_live(make: Callable[[Any, LiveState, np.ndarray], Callable[..., Any]]) -> Callable[[ModelConfig, Params], Step]:
    """A step from another treatment of the product's compiled function."""

    def variant(config: ModelConfig, params: Params) -> Step:
        scorer = Scorer(config, params)
        state = scorer.start(np.zeros(config.embed_dim, np.float32))
        live = make(scorer._live, state, np.zeros((2, 1, config.embed_dim), np.float32))

        def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
            hazard, prefix = np.asarray(live(state, np.stack([obs, act])[:, None])[1])[0]
            return float(hazard), float(prefix)

        return step

    return variant


aot = _of_live(lambda live, state, x: live.lower(state, x).compile())


def _exported(live: Any, state: LiveState, x: np.ndarray) -> Callable[..., Any]:
    # Only plain containers can be serialised.
    flat = jax.jit(lambda carry, given, x: (*(after := live(LiveState(carry, given), x))[0], after[1]))
    data = jax.export.export(flat)(*state, x).serialize()
    reloaded = jax.jit(jax.export.deserialize(data).call)

    def run(state: LiveState, x: np.ndarray) -> tuple[LiveState, jax.Array]:
        carry, given, risks = reloaded(*state, x)
        return LiveState(carry, given), risks

    return run


exported = _of_live(_exported)


def donated(config: ModelConfig, params: Params) -> Step:
    """The state is given away with every call, so that the new one can take its place."""
    scorer = Scorer(config, params)
    live = jax.jit(lambda carry, given, x: scorer._live(LiveState(carry, given), x), donate_argnums=0)
    state = scorer.start(np.zeros(config.embed_dim, np.float32))

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        nonlocal state
        state, risks = live(*state, np.stack([obs, act])[:, None])
        hazard, prefix = np.asarray(risks)[0]
        return float(hazard), float(prefix)

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


def nnx_jit(config: ModelConfig, params: Params) -> Step:
    """The obvious way in NNX: the module is an argument."""
    model = build(config, params)
    h, e = _start(model, config)

    @nnx.jit
    def run(model: RSSM, h: jax.Array, e: jax.Array, obs: jax.Array, act: jax.Array):
        return plain_step(model, config, h, e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(model, h, e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


def split_jit(config: ModelConfig, params: Params) -> Step:
    """Split once, `jax.jit` over the plain pytree."""
    h, e = _start(build(config, params), config)

    @jax.jit
    def run(params: Params, h: jax.Array, e: jax.Array, obs: jax.Array, act: jax.Array):
        return plain_step(build(config, params), config, h, e, obs, act)

    def step(obs: np.ndarray, act: np.ndarray) -> tuple[float, float]:
        hazard, prefix = np.asarray(run(params, h, e, obs, act)[1][0])
        return float(hazard), float(prefix)

    return step


def _start(model: RSSM, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    e = jnp.zeros((1, config.embed_dim))
    return jnp.tanh(model.init(model.ins_encoder(e))), e


VARIANTS: dict[str, Callable[[ModelConfig, Params], Step]] = {
    "jax product": product,
    "jax aot": aot,
    "jax exported": exported,
    "jax donated carry": donated,
    "jax split, jax.jit": split_jit,
    "jax nnx.jit": nnx_jit,
}
SLOW = {"jax nnx.jit"}
