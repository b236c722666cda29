"""The pooled head: a linear hazard logit over what a run has shown so far.

Its features at step t are, for observation o and action a, the current vector, the mean and the maximum of each
entry over steps 0..t, and the products o*a, o*e and a*e with each other and with the instruction e; and e itself.
Where an action has several vectors of E entries, A in all, each of them is multiplied.
It needs no memory but a sum and a maximum, does not know the order of steps, and with few labels a linear function
of the whole past is hard to beat (``docs/experiments.md``). Its weights are fitted apart from the world model
(:mod:`jaxguard.training.pooled`).

The sum is kept of the mean's share of the logit, not of vectors, because that share is linear in them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


def pooled_size(embed_dim: int, act_dim: int) -> int:
    """Entries of the features o, a; mean o, mean a; max o, max a; o*a, o*e, a*e; e: 5 (E + A)."""
    return 5 * (embed_dim + act_dim)


class PooledWeights(NamedTuple):
    """The head's kernel, taken apart by what it multiplies."""

    now: jax.Array  # [E + A], o and a
    mean: jax.Array  # [E + A]
    top: jax.Array  # [E + A]
    act_obs: jax.Array  # [A], o*a
    by_ins: jax.Array  # [E + A], o*e and a*e
    ins: jax.Array  # [E]
    bias: jax.Array  # []


class Pool(NamedTuple):
    """What a run has shown before a step."""

    steps: jax.Array  # [B], float32
    total: jax.Array  # [B], sum of ``x @ mean``
    top: jax.Array  # [B, E + A]; -inf before the first step


class PoolInputs(NamedTuple):
    """Of a step: its vectors and what they add on their own."""

    x: jax.Array  # [..., E + A], o and a
    mean: jax.Array  # [...], x @ mean
    alone: jax.Array  # [...], x @ now + (o*a) @ act_obs


class PooledInstruction(NamedTuple):
    """Of an instruction: how it weighs a step's vectors, and what it adds on its own."""

    weigh: jax.Array  # [B, E + A]
    alone: jax.Array  # [B]


def pooled_weights(kernel: jax.Array, bias: jax.Array, embed_dim: int) -> PooledWeights:
    """Takes the kernel ``[5 (E + A), 1]`` and bias ``[1]`` apart; E and A may be 0, for a head that sees nothing."""
    both = len(kernel) // 5
    act = both - embed_dim
    ends = np.cumsum([both, both, both, act, both])
    now, mean, top, act_obs, by_ins, ins = jnp.split(kernel[:, 0], ends.tolist())
    return PooledWeights(now, mean, top, act_obs, by_ins, ins, bias[0])


def alike(vector: jax.Array, act: jax.Array) -> jax.Array:
    """``[..., E]`` repeated to the width of actions ``[..., A]``, to be multiplied with each of their vectors."""
    times = act.shape[-1] // max(vector.shape[-1], 1)
    return vector if times <= 1 else jnp.concatenate([vector] * times, axis=-1)


def empty_pool(batch: int, seen_dim: int) -> Pool:
    """The pool of ``batch`` runs before their first step; ``seen_dim`` is E + A."""
    return Pool(jnp.zeros(batch), jnp.zeros(batch), jnp.full((batch, seen_dim), -jnp.inf, jnp.float32))


def pool_observations(w: PooledWeights, obs: jax.Array) -> jax.Array:
    """What observations ``[..., E]`` are to the pooled head: ``[..., E + 2]``, taken apart by :func:`pool_inputs`."""
    return _vectors(obs, w.now[: obs.shape[-1]], w.mean[: obs.shape[-1]])


def pool_actions(w: PooledWeights, act: jax.Array) -> jax.Array:
    """The same of actions ``[..., A]``."""
    first = len(w.now) - act.shape[-1]
    return _vectors(act, w.now[first:], w.mean[first:])


def _vectors(x: jax.Array, now: jax.Array, mean: jax.Array) -> jax.Array:
    return jnp.concatenate([x, (x @ now)[..., None], (x @ mean)[..., None]], axis=-1)


def pool_inputs(w: PooledWeights, observations: jax.Array, actions: jax.Array) -> PoolInputs:
    """Puts :func:`pool_observations` and :func:`pool_actions` of the same steps together."""
    obs, act = observations[..., :-2], actions[..., :-2]
    alone = observations[..., -2] + actions[..., -2] + (alike(obs, act) * act) @ w.act_obs
    return PoolInputs(jnp.concatenate([obs, act], axis=-1), observations[..., -1] + actions[..., -1], alone)


def pool_instruction(w: PooledWeights, ins: jax.Array) -> PooledInstruction:
    """What instructions ``[B, E]`` are to the pooled head."""
    wide = jnp.concatenate([ins, alike(ins, w.act_obs)], axis=1)
    return PooledInstruction(w.by_ins * wide, ins @ w.ins + w.bias)


def pool_step(w: PooledWeights, pool: Pool, x: PoolInputs) -> tuple[Pool, jax.Array]:
    """The pool after a step, and the part ``[B]`` of the logit that the pool gives there."""
    pool = Pool(pool.steps + 1.0, pool.total + x.mean, jnp.maximum(pool.top, x.x))
    return pool, pool.total / pool.steps + pool.top @ w.top


def pooled_logit(pooled: jax.Array, x: PoolInputs, instruction: PooledInstruction) -> jax.Array:
    """The head's logit ``[...]`` from :func:`pool_step`'s part, the step's own and the instruction's."""
    return pooled + x.alone + (x.x * instruction.weigh).sum(axis=-1) + instruction.alone
