"""Building blocks: MLPs of Linear, LayerNorm and SiLU (paper, "Architecture details"), and the GRU core."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

# PyTorch's default. Flax's own (1e-6) moves scores by 0.03 through argmax flips, so the two would not agree.
EPSILON = 1e-5


def normalise(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """LayerNorm over the last axis, two-pass variance: ``[..., N]`` with ``scale`` and ``bias`` ``[..., N]``."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred * centred).mean(axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(variance + EPSILON) * scale + bias


class Tap:
    """A kernel in one product, whose factor it keeps and whose result it adds ``add`` to.

    The gradient of ``add`` and the factor give the kernel's gradient later, for many products at once.
    """

    def __init__(self, kernel: jax.Array, add: jax.Array):
        self.kernel, self.add = kernel, add
        self.factor: jax.Array | None = None

    def product(self, x: jax.Array) -> jax.Array:
        assert self.factor is None, "a kernel is tapped in one product"
        self.factor = x
        return matmul(x, self.kernel) + self.add


def matmul(x: jax.Array, kernel: jax.Array | Tap) -> jax.Array:
    """``x @ kernel``, factors in the kernel's dtype and sums in float32: ``[..., N_in] -> float32 [..., N_out]``."""
    if isinstance(kernel, Tap):
        return kernel.product(x)
    return jnp.matmul(x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)


def value(parameter: nnx.Param | None) -> jax.Array:
    """The array of a parameter that the layer has (Flax types those that can be switched off as optional)."""
    assert parameter is not None
    return parameter[...]


class Block(nnx.Module):
    """Linear, LayerNorm, SiLU: ``[..., N_in] -> [..., N_out]``."""

    def __init__(self, n_in: int, n_out: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(n_in, n_out, rngs=rngs)
        self.norm = nnx.LayerNorm(n_out, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)

    def activate(self, x: jax.Array) -> jax.Array:
        """What follows the linear layer; for callers that computed its product in parts."""
        return jax.nn.silu(normalise(x, value(self.norm.scale), value(self.norm.bias)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.activate(self.linear(x))


class MLP(nnx.Module):
    """A :class:`Block` and an output layer: ``[..., N_in] -> [..., N_out]``."""

    def __init__(self, n_in: int, hidden: int, n_out: int, *, rngs: nnx.Rngs):
        self.block = Block(n_in, hidden, rngs=rngs)
        self.out = nnx.Linear(hidden, n_out, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(self.block(x))


class GRUCore(nnx.Module):
    """Parameters of ``h' = GRU(h, LayerNorm([z, a]))`` with PyTorch's gate convention.

    ``r, u = sigmoid(...)``, ``n = tanh(x_n + r (h_n + b_n))``, ``h' = (1 - u) n + u h``. The kernels
    hold the gates in the order r, u, n. The update gate's bias starts at ``1``, so that an untrained
    core already remembers for a few steps.
    """

    def __init__(self, z_dim: int, a_dim: int, deter: int, *, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(z_dim + a_dim, epsilon=EPSILON, use_fast_variance=False, rngs=rngs)
        self.inputs = nnx.Linear(z_dim + a_dim, 3 * deter, rngs=rngs)
        self.recurrent = nnx.Linear(deter, 3 * deter, kernel_init=_orthogonal_gates, rngs=rngs)
        bias = value(self.inputs.bias).at[deter : 2 * deter].set(1.0)
        self.inputs.bias = nnx.Param(bias)


def _orthogonal_gates(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32, **_: Any) -> jax.Array:
    """One orthogonal ``[D, D]`` matrix for each of the three gates."""
    orthogonal = jax.nn.initializers.orthogonal()
    deter = shape[0]
    return jnp.concatenate([orthogonal(k, (deter, deter), dtype) for k in jax.random.split(key, 3)], axis=1)


def gru(h: jax.Array, x: jax.Array, recurrent: jax.Array) -> jax.Array:
    """One GRU update: state ``[B, D]``, input products ``[B, 3D]``, recurrent products ``[B, 3D]``."""
    xr, xu, xn = jnp.split(x, 3, axis=-1)
    hr, hu, hn = jnp.split(recurrent, 3, axis=-1)
    reset = jax.nn.sigmoid(xr + hr)
    update = jax.nn.sigmoid(xu + hu)
    candidate = jnp.tanh(xn + reset * hn)
    return (1.0 - update) * candidate + update * h
