"""Networks of the learnt rivals: ``(obs [B, T, E], act [B, T, E], ins [B, E]) -> [B, T, 2]`` hazard and prefix logits.

Each is made from the guard's own sizes (:class:`~jaxguard.config.ModelConfig`). Entry t depends on steps 0..t alone.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxguard.config import ModelConfig
from jaxguard.world_model.layers import EPSILON, MLP, Block, GRUCore, gru, normalise, value
from jaxguard.world_model.rssm import RSSM

RISKS = 2
HEADS, LAYERS = 4, 2


def _beside(x: jax.Array, ins: jax.Array) -> jax.Array:
    """``[B, T, F]`` and ``[B, E]`` -> ``[B, T, F + E]``."""
    return jnp.concatenate([x, jnp.broadcast_to(ins[:, None], (*x.shape[:2], ins.shape[-1]))], axis=-1)


class StepMLP(nnx.Module):
    """The current step alone: two hidden layers over ``[o_t, a_t, e]``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.block = Block(2 * config.embed_dim + config.act_dim, config.hidden, rngs=rngs)
        self.mlp = MLP(config.hidden, config.hidden, RISKS, rngs=rngs)

    def __call__(self, obs: jax.Array, act: jax.Array, ins: jax.Array) -> jax.Array:
        return self.mlp(self.block(_beside(jnp.concatenate([obs, act], axis=-1), ins)))


class TraceGRU(nnx.Module):
    """A recurrent summary of the run so far: the guard's kind of core over ``[o_t, a_t]``, without latents."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        e, a, d = config.embed_dim, config.act_dim, config.deter
        self.start = nnx.Linear(e, d, rngs=rngs)
        self.core = GRUCore(e, a, d, rngs=rngs)
        self.head = MLP(d + e, config.hidden, RISKS, rngs=rngs)

    def __call__(self, obs: jax.Array, act: jax.Array, ins: jax.Array) -> jax.Array:
        norm = self.core.norm
        x = normalise(jnp.concatenate([obs, act], axis=-1), value(norm.scale), value(norm.bias))
        products = self.core.inputs(x)

        def step(h: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = gru(h, own, self.core.recurrent(h))
            return h, h

        _, states = jax.lax.scan(step, jnp.tanh(self.start(ins)), products.swapaxes(0, 1))
        return self.head(_beside(states.swapaxes(0, 1), ins))


class Layer(nnx.Module):
    """Causal self-attention and a feed-forward part, each behind a LayerNorm and added to what it read."""

    def __init__(self, width: int, hidden: int, *, rngs: nnx.Rngs):
        self.norms = nnx.List(
            [nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs) for _ in range(2)]
        )
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.mix = nnx.Linear(width, width, rngs=rngs)
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = (*x.shape[:2], HEADS, x.shape[-1] // HEADS)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1))
        x = x + self.mix(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Causal attention over one token per step, behind a token of the instruction; as large as the guard."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, hidden = transformer_sizes(config)
        self.instruction = nnx.Linear(config.embed_dim, width, rngs=rngs)
        self.step = nnx.Linear(config.embed_dim + config.act_dim, width, rngs=rngs)
        self.layers = nnx.List([Layer(width, hidden, rngs=rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(width, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
        self.out = nnx.Linear(width, RISKS, rngs=rngs)

    def __call__(self, obs: jax.Array, act: jax.Array, ins: jax.Array) -> jax.Array:
        steps = self.step(jnp.concatenate([obs, act], axis=-1))
        x = jnp.concatenate([self.instruction(ins)[:, None], steps], axis=1)
        x = x + _positions(x.shape[1], x.shape[2])
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x[:, 1:]))


def _positions(length: int, width: int) -> np.ndarray:
    """``[length, width]`` sines and cosines of the place, with wavelengths from 2 pi to 10,000 times that."""
    rates = 10_000.0 ** -(np.arange(width // 2) / max(width // 2, 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


@functools.cache
def transformer_sizes(config: ModelConfig) -> tuple[int, int]:
    """Width and feed-forward size with which a :class:`Transformer` has as many parameters as the guard.

    The width is the largest that leaves the feed-forward part at least twice as wide, the usual proportion being two to
    four; the feed-forward size then takes up the rest.
    """
    guard = parameters_of(RSSM, config)
    width = HEADS
    while (found := _feed_forward(config, width + HEADS, guard)) >= 2 * (width + HEADS):
        width += HEADS
    found = _feed_forward(config, width, guard)
    return width, max(found, 1)


def _feed_forward(config: ModelConfig, width: int, parameters: int) -> int:
    """The feed-forward size with which the whole has so many parameters; may be negative."""
    ends = (
        (config.embed_dim + 1) * width
        + (config.embed_dim + config.act_dim + 1) * width
        + 2 * width
        + (width + 1) * RISKS
    )
    layer = 4 * width + 4 * width * (width + 1) + width  # norms, attention, bias of the way down
    return round((parameters - ends - LAYERS * layer) / (LAYERS * (2 * width + 1)))


def parameters_of(kind: type[nnx.Module], config: ModelConfig) -> int:
    """Number of scalar parameters of a module that a configuration describes; nothing is computed for it."""
    state = nnx.state(nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0))), nnx.Param)  # type: ignore[call-arg]
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(state))
