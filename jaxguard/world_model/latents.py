"""Factorized categorical latents with uniform mixing and straight-through gradients (float32).

A latent is S independent categoricals of C classes. As an array it is one-hot, ``[..., S, C]``; where only
its mode matters and one row is processed, its class indices ``[..., S]`` (integers) stand for it, and a
product with a weight matrix becomes a sum of S gathered rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxguard.world_model.layers import matmul


def log_probs(logits: jax.Array, unimix: float) -> jax.Array:
    """Log-probabilities of the mixture ``(1 - unimix) softmax(logits) + unimix / C``.

    Args:
        logits: ``[..., S, C]``.
        unimix: Share of the uniform distribution; keeps every class possible and every KL finite.

    Returns:
        ``[..., S, C]`` float32.
    """
    logits = logits.astype(jnp.float32)
    if unimix == 0.0:
        return jax.nn.log_softmax(logits, axis=-1)
    probs = jax.nn.softmax(logits, axis=-1)
    return jnp.log((1.0 - unimix) * probs + unimix / logits.shape[-1])


def noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Gumbel noise for :func:`sample`, drawn for all steps in one call outside of the recurrence."""
    return jax.random.gumbel(key, shape, jnp.float32)


def sample(gumbel: jax.Array, logp: jax.Array) -> jax.Array:
    """One-hot sample ``[..., S, C]`` whose gradient is that of the probabilities (straight-through)."""
    onehot = jax.nn.one_hot(jnp.argmax(logp + gumbel, axis=-1), logp.shape[-1], dtype=logp.dtype)
    probs = jnp.exp(logp)
    return onehot + probs - jax.lax.stop_gradient(probs)


def mode(logits: jax.Array) -> jax.Array:
    """The most probable classes: one-hot ``[B, S, C]``, or indices ``[1, S]`` where B is 1.

    The gather that indices allow reads S of S*C weight rows: it wins for a single live step and loses
    to the matrix product in batches.
    """
    index = jnp.argmax(logits, axis=-1)
    if index.shape[0] == 1:
        return index
    return jax.nn.one_hot(index, logits.shape[-1], dtype=jnp.float32)


def product(z: jax.Array, kernel: jax.Array) -> jax.Array:
    """``flat(z) @ kernel`` for a one-hot ``[B, S, C]`` or its indices ``[B, S]``; kernel ``[S*C, N]``."""
    if jnp.issubdtype(z.dtype, jnp.integer):
        stoch = z.shape[-1]
        rows = z + jnp.arange(stoch) * (kernel.shape[0] // stoch)
        return jnp.asarray(kernel)[rows].sum(axis=-2)
    return matmul(z.reshape(*z.shape[:-2], -1), kernel)


def kl(logp: jax.Array, logq: jax.Array) -> jax.Array:
    """``KL[p || q]`` summed over the S categoricals: ``[..., S, C]`` twice -> ``[...]`` (nats)."""
    return jnp.sum(jnp.exp(logp) * (logp - logq), axis=(-2, -1))
