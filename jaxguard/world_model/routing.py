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
from jaxguard.world_model.rssm import (
    Dense,
    Norm,
    StepWeights,
    dense,
    encode_instruction,
    encode_steps,
    observe,
    observe_step,
    prior_logits,
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
    from_h: jax.Array  # [D, R]
    from_z: jax.Array  # [S*C, R]
    from_obs: jax.Array  # [H, R]
    from_act: jax.Array  # [H, R]
    from_evidence: jax.Array  # [H, R]
    from_note: jax.Array  # [H, R]
    from_ins: jax.Array  # [H, R]
    from_memory: jax.Array  # [H, R]
    bias: jax.Array  # [R]
    norm: Norm  # [R]
    out: jax.Array  # [R, 17]
    out_bias: jax.Array  # [17]


class RouteInputs(NamedTuple):
    """Trajectories as a router sees them, padded."""

    obs: jax.Array  # [B, T, E]
    act: jax.Array  # [B, T, E]
    ins: jax.Array  # [B, E]
    memory: jax.Array  # [B, E]
    evidence: jax.Array  # [B, T, E]
    note: jax.Array  # [B, T, E]


def route_weights(head: RouteHead, config: ModelConfig, recurrence: bool = True) -> RouteWeights:
    """Brings the head's parameters into the form that is read; without ``recurrence`` it sees nothing of the state."""
    deter, flat, width = config.deter, config.stoch * config.classes, config.hidden
    ends = np.cumsum([deter, flat, *[width] * 5])
    parts = jnp.split(head.mlp.block.linear.kernel[...], ends)
    from_h, from_z, from_obs, from_act, from_evidence, from_note, from_ins, from_memory = parts
    if not recurrence:
        from_h, from_z = jnp.zeros_like(from_h), jnp.zeros_like(from_z)
    norm = head.mlp.block.norm
    return RouteWeights(
        memory=dense(head.memory_encoder),
        evidence=dense(head.evidence_encoder),
        note=dense(head.note_encoder),
        from_h=from_h,
        from_z=from_z,
        from_obs=from_obs,
        from_act=from_act,
        from_evidence=from_evidence,
        from_note=from_note,
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
    h: jax.Array,
    zhat: jax.Array,
    given: jax.Array,
    obs: jax.Array,
    act: jax.Array,
    evidence: jax.Array,
    note: jax.Array,
) -> jax.Array:
    """Logits ``[..., 17]``: EXECUTE, ASK, REFUSE, and of each trigger.

    Args:
        r: From :func:`route_weights`.
        w: From :func:`~jaxguard.world_model.rssm.step_weights`.
        h: ``h_{t+1}`` ``[..., D]``.
        zhat: Latent of the prior there, one-hot ``[..., S, C]`` or indices ``[..., S]``.
        given: From :func:`route_given`, broadcastable to ``[..., R]``.
        obs, act, evidence, note: ``[..., E]`` of step t.
    """
    x = h @ r.from_h + latents.product(zhat, r.from_z) + given + w.obs(obs) @ r.from_obs + w.act(act) @ r.from_act
    x = x + r.evidence(evidence) @ r.from_evidence + r.note(note) @ r.from_note
    return jax.nn.silu(normalise(x, *r.norm)) @ r.out + r.out_bias


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
    scan_key, prior_key = (None, None) if key is None else jax.random.split(key)
    w = step_weights(build(config, params["world"]), config)
    r = route_weights(build_as(RouteHead, config, params["head"]), config, recurrence)
    h = observe(w, config, encode_instruction(w, x.ins).h0, encode_steps(w, config, x.obs, x.act), scan_key).h[:, 1:]
    logits = prior_logits(w, config, h)
    if prior_key is None:
        zhat = latents.mode(logits)
    else:
        zhat = latents.sample(latents.noise(prior_key, logits.shape), latents.log_probs(logits, config.unimix))
    given = route_given(r, w, x.ins, x.memory)[:, None]
    return read_route(r, w, h, zhat, given, x.obs, x.act, x.evidence, x.note)


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
            return w, route_weights(build_as(RouteHead, config, p["head"]), config, recurrence)

        # Constants of the compiled functions, as in the guard's scorer; unused risk heads are left out by the compiler.
        weights: Any = jax.device_get(jax.jit(prepared)(params))

        @jax.jit
        def start(ins: jax.Array, memory: jax.Array) -> RouteState:
            w, r = jax.tree.map(jnp.asarray, weights)
            return RouteState(encode_instruction(w, ins).h0, route_given(r, w, ins, memory))

        @jax.jit
        def live(state: RouteState, x: jax.Array) -> tuple[RouteState, jax.Array]:
            w, r = jax.tree.map(jnp.asarray, weights)
            obs, act, evidence, note = x
            h, _ = observe_step(w, config, state.h, encode_steps(w, config, obs, act))
            zhat = latents.mode(prior_logits(w, config, h))
            return state._replace(h=h), read_route(r, w, h, zhat, state.given, obs, act, evidence, note)

        self._start, self._live = start, live
        self._batch = jax.jit(lambda x: route_logits(params, config, x, None, recurrence))

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
