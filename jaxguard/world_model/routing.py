"""Routing on the world model's features: a head with three logits (EXECUTE, ASK, REFUSE), and what explains them.

It reads the predicted successor state like the risk heads, and beside it what is known before the call: the
instruction, the user's memory, the observation, the action, and what trace and memory say of the things that the
action names (:mod:`jaxguard.features.grounding`)::

    logits_t = MLP(h_{t+1}, zhat_{t+1}, o_t, a_t, e, memory, evidence_t, note_t)

Fourteen more logits say which trigger of Safety Sentry's table 4 the step looks like; they explain a route and decide
nothing. Logits are those of Safety Sentry's decision tokens in meaning; how they become a route is the matter of
:mod:`jaxguard.decision.routing`. :func:`read_route` is the only place where they are read off a state: training and
archives call it on batches, live sessions on one step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxguard.config import ModelConfig
from jaxguard.traces.snapshots import TRIGGERS
from jaxguard.types import Route
from jaxguard.world_model import latents
from jaxguard.world_model.layers import MLP, Block, normalise, value
from jaxguard.world_model.params import Params, build, build_as
from jaxguard.world_model.rollout import observe
from jaxguard.world_model.rssm import (
    Dense,
    Norm,
    StepWeights,
    dense,
    encode_instruction,
    encode_steps,
    observe_step,
    prior_from,
    step_weights,
)

ROUTES = len(Route)
LETTERS = tuple(TRIGGERS)
"""Triggers in the order of their logits."""
OUTPUTS = ROUTES + len(LETTERS)


class RouteHead(nnx.Module):
    """Parameters of the head; the encoders of observation, action and instruction are the world model's.

    Args:
        config: Sizes.
        rngs: Initialisation only.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width = config.hidden
        self.memory_encoder = Block(config.embed_dim, width, rngs=rngs)
        self.evidence_encoder = Block(config.embed_dim, width, rngs=rngs)
        self.note_encoder = Block(config.embed_dim, width, rngs=rngs)
        self.mlp = MLP(config.deter + config.stoch * config.classes + 6 * width, width, OUTPUTS, rngs=rngs)


class RouteWeights(NamedTuple):
    """What :func:`read_route` reads; the first layer of the head in parts, R wide."""

    memory: Dense  # [E, H]
    evidence: Dense  # [E, H]
    note: Dense  # [E, H]
    read_h: jax.Array  # [D, H + R], h_{t+1}'s part of: prior, head
    from_z: jax.Array  # [S*C, R]
    from_known: jax.Array  # [4H, R], of: observation, action, evidence, note
    from_ins: jax.Array  # [H, R]
    from_memory: jax.Array  # [H, R]
    bias: jax.Array  # [R]
    norm: Norm  # [R]
    out: jax.Array  # [R, 17]
    out_bias: jax.Array  # [17]


class StepTexts(NamedTuple):
    """Vectors of what is read of a step; leading axes ``[...]`` as given."""

    obs: jax.Array  # [..., E]
    act: jax.Array  # [..., E]
    evidence: jax.Array  # [..., E]
    note: jax.Array  # [..., E]


class RouteInputs(NamedTuple):
    """Trajectories as a router sees them, padded."""

    obs: jax.Array  # [B, T, E]
    act: jax.Array  # [B, T, E]
    ins: jax.Array  # [B, E]
    memory: jax.Array  # [B, E]
    evidence: jax.Array  # [B, T, E]
    note: jax.Array  # [B, T, E]


def route_weights(head: RouteHead, w: StepWeights, config: ModelConfig, recurrence: bool = True) -> RouteWeights:
    """Brings the head's parameters into the form that is read; without ``recurrence`` it sees nothing of the state."""
    deter, flat, width = config.deter, config.stoch * config.classes, config.hidden
    ends = np.cumsum([deter, flat, 4 * width, width])
    from_h, from_z, from_known, from_ins, from_memory = jnp.split(head.mlp.block.linear.kernel[...], ends)
    if not recurrence:
        from_h, from_z = jnp.zeros_like(from_h), jnp.zeros_like(from_z)
    norm = head.mlp.block.norm
    return RouteWeights(
        memory=dense(head.memory_encoder),
        evidence=dense(head.evidence_encoder),
        note=dense(head.note_encoder),
        read_h=jnp.concatenate([w.read_h[:, :width], from_h], axis=1),
        from_z=from_z,
        from_known=from_known,
        from_ins=from_ins,
        from_memory=from_memory,
        bias=value(head.mlp.block.linear.bias),
        norm=Norm(value(norm.scale), value(norm.bias)),
        out=head.mlp.out.kernel[...],
        out_bias=value(head.mlp.out.bias),
    )


def route_given(r: RouteWeights, w: StepWeights, ins: jax.Array, memory: jax.Array) -> jax.Array:
    """What instruction and memory ``[..., E]`` are to the head for a whole trajectory: ``[..., R]``."""
    return w.ins(ins) @ r.from_ins + r.memory(memory) @ r.from_memory + r.bias


def read_route(
    r: RouteWeights,
    w: StepWeights,
    config: ModelConfig,
    h: jax.Array,
    given: jax.Array,
    x: StepTexts,
    gumbel: jax.Array | None = None,
) -> jax.Array:
    """Logits ``[..., 17]``: EXECUTE, ASK, REFUSE, and of each trigger.

    Args:
        r: From :func:`route_weights`.
        w: From :func:`~jaxguard.world_model.rssm.step_weights`.
        config: Sizes (static).
        h: ``h_{t+1}`` ``[..., D]``.
        given: From :func:`route_given`, broadcastable to ``[..., R]``.
        x: The step's vectors.
        gumbel: Noise ``[..., S, C]`` that samples the prior's latent there; ``None`` takes its mode.
    """
    read = h @ r.read_h
    prior = prior_from(w, config, read[..., : config.hidden])
    zhat = latents.mode(prior) if gumbel is None else latents.sample(gumbel, latents.log_probs(prior, config.unimix))
    known = jnp.concatenate([w.obs(x.obs), w.act(x.act), r.evidence(x.evidence), r.note(x.note)], axis=-1)
    out = read[..., config.hidden :] + latents.product(zhat, r.from_z) + given + known @ r.from_known
    return jax.nn.silu(normalise(out, *r.norm)) @ r.out + r.out_bias


def route_logits(
    params: Params, config: ModelConfig, x: RouteInputs, key: jax.Array | None, recurrence: bool = True
) -> jax.Array:
    """Logits ``[B, T, 17]`` of every step, as :func:`read_route`.

    Args:
        params: ``{"world": ..., "head": ...}``.
        config: Sizes (static).
        x: Trajectories.
        key: Samples the latents; ``None`` takes their mode (scoring is deterministic).
        recurrence: Whether the head sees the recurrent state (static).
    """
    w = step_weights(build(config, params["world"]), config)
    r = route_weights(build_as(RouteHead, config, params["head"]), w, config, recurrence)
    return roll_out(r, w, config, x, key)


def roll_out(r: RouteWeights, w: StepWeights, config: ModelConfig, x: RouteInputs, key: jax.Array | None) -> jax.Array:
    """:func:`route_logits` from prepared weights."""
    scan_key, prior_key = (None, None) if key is None else jax.random.split(key)
    h = observe(w, config, encode_instruction(w, x.ins).h0, encode_steps(w, config, x.obs, x.act), scan_key).h[:, 1:]
    gumbel = None if prior_key is None else latents.noise(prior_key, (*h.shape[:2], config.stoch, config.classes))
    texts = StepTexts(x.obs, x.act, x.evidence, x.note)
    return read_route(r, w, config, h, route_given(r, w, x.ins, x.memory)[:, None], texts, gumbel)


class RouteState(NamedTuple):
    """What a live session carries between steps, on the device."""

    h: jax.Array  # [1, D]
    given: jax.Array  # [1, R]


class RouteScorer:
    """Logits with fixed weights, of one live step and of padded batches; compiled functions are made once.

    Args:
        config: Sizes.
        params: ``{"world": ..., "head": ...}``.
        recurrence: Whether the head sees the recurrent state.
    """

    def __init__(self, config: ModelConfig, params: Params, recurrence: bool = True):
        self.config = config

        def prepared(p: Params) -> tuple[StepWeights, RouteWeights]:
            w = step_weights(build(config, p["world"]), config)
            # Without the columns of the risk heads, which are not read.
            w = w._replace(from_a=w.from_a[:, : 3 * config.deter])
            return w, route_weights(build_as(RouteHead, config, p["head"]), w, config, recurrence)

        # Constants of the compiled functions, as in the guard's scorer.
        weights: Any = jax.device_get(jax.jit(prepared)(params))

        @jax.jit
        def start(ins: jax.Array, memory: jax.Array) -> RouteState:
            w, r = jax.tree.map(jnp.asarray, weights)
            return RouteState(encode_instruction(w, ins).h0, route_given(r, w, ins, memory))

        @jax.jit
        def live(state: RouteState, x: jax.Array) -> tuple[RouteState, jax.Array]:
            w, r = jax.tree.map(jnp.asarray, weights)
            texts = StepTexts(*x)
            h, _ = observe_step(w, config, state.h, encode_steps(w, config, texts.obs, texts.act))
            after = state._replace(h=h) if config.recurrent else state
            return after, read_route(r, w, config, h, state.given, texts)

        @jax.jit
        def batch(x: RouteInputs) -> jax.Array:
            w, r = jax.tree.map(jnp.asarray, weights)
            return roll_out(r, w, config, x, None)

        self._start, self._live, self._batch = start, live, batch

    def start(self, instruction: np.ndarray, memory: np.ndarray) -> RouteState:
        """State before the first step, from vectors ``[E]``."""
        return self._start(instruction[None], memory[None])

    def step(
        self, state: RouteState, obs: np.ndarray, act: np.ndarray, evidence: np.ndarray, note: np.ndarray
    ) -> tuple[RouteState, np.ndarray]:
        """The state if the action is executed, and its logits ``[17]``; vectors are ``[E]``, ``state`` stays usable."""
        after, logits = self._live(state, np.stack([obs, act, evidence, note])[:, None])
        return after, np.asarray(logits)[0]

    def batch(self, x: RouteInputs) -> np.ndarray:
        """Logits ``[B, T, 17]`` of padded trajectories; compiled once per shape."""
        return np.asarray(self._batch(x))
