"""Layers against plain NumPy and, where it is installed, PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxguard.world_model.layers import EPSILON, MLP, Block, GRUCore, gru, normalise

RNG = np.random.default_rng(2)


def f32(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_normalise_against_numpy() -> None:
    x, scale, bias = f32(3, 7) * 5 + 2, f32(7), f32(7)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5) * scale + bias
    np.testing.assert_allclose(normalise(x, scale, bias), expected, atol=1e-5)
    assert EPSILON == 1e-5


def test_normalise_keeps_precision_far_from_zero() -> None:
    """E[x^2] - E[x]^2 would lose all digits here; the two-pass variance does not."""
    x = np.array([[4096.0, 4097.0, 4098.0, 4099.0]], np.float32)
    np.testing.assert_allclose(
        normalise(x, np.ones(4), np.zeros(4)), [[-1.34163, -0.44721, 0.44721, 1.34163]], atol=1e-4
    )


@pytest.mark.parametrize("x", [np.zeros((1, 4)), np.full((1, 4), 7.0)])
def test_normalise_of_constant_vectors_is_the_bias_with_a_finite_gradient(x: np.ndarray) -> None:
    bias = jnp.arange(4.0)
    np.testing.assert_allclose(normalise(jnp.asarray(x), jnp.ones(4), bias), bias[None], atol=1e-6)
    gradient = jax.grad(lambda v: (normalise(v, jnp.ones(4), bias) ** 2).sum())(jnp.asarray(x))
    assert np.isfinite(gradient).all()


def test_normalise_equals_flax_and_block_equals_its_parts() -> None:
    block = Block(4, 6, rngs=nnx.Rngs(0))
    x = f32(3, 4)
    np.testing.assert_allclose(block(x), nnx.silu(block.norm(block.linear(x))), atol=1e-6)


def test_mlp_is_a_block_and_a_linear_layer() -> None:
    mlp = MLP(4, 6, 2, rngs=nnx.Rngs(0))
    x = f32(3, 4)
    np.testing.assert_allclose(mlp(x), mlp.block(x) @ mlp.out.kernel[...] + mlp.out.bias[...], atol=1e-6)
    assert mlp(x).shape == (3, 2)


def test_gru_core_starts_orthogonal_and_remembering() -> None:
    core = GRUCore(6, 5, 8, rngs=nnx.Rngs(0))
    for gate in np.split(np.asarray(core.recurrent.kernel[...]), 3, axis=1):
        np.testing.assert_allclose(gate @ gate.T, np.eye(8), atol=1e-5)
    np.testing.assert_array_equal(core.inputs.bias[...], np.repeat([0.0, 1.0, 0.0], 8))


def test_gru_by_hand() -> None:
    """D = 1: r = sigmoid(0.5 + 0.5), u = sigmoid(1 - 2), n = tanh(0.25 + r * -1), h' = (1 - u) n + u h."""
    r, u = 1 / (1 + np.exp(-1.0)), 1 / (1 + np.exp(1.0))
    n = np.tanh(0.25 - r)
    got = gru(jnp.array([[0.7]]), jnp.array([[0.5, 1.0, 0.25]]), jnp.array([[0.5, -2.0, -1.0]]))
    np.testing.assert_allclose(got, [[(1 - u) * n + u * 0.7]], rtol=1e-6)


def test_gru_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    cell = torch.nn.GRUCell(5, 8)
    x, h = f32(4, 5), f32(4, 8)
    weights = {name: p.detach().numpy() for name, p in cell.named_parameters()}
    got = gru(
        jnp.asarray(h),
        x @ weights["weight_ih"].T + weights["bias_ih"],
        h @ weights["weight_hh"].T + weights["bias_hh"],
    )
    with torch.no_grad():
        expected = cell(torch.from_numpy(x), torch.from_numpy(h)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_block_equals_torch() -> None:
    torch = pytest.importorskip("torch")
    block = Block(4, 6, rngs=nnx.Rngs(1))
    block.norm.scale, block.norm.bias = nnx.Param(jnp.asarray(f32(6))), nnx.Param(jnp.asarray(f32(6)))
    twin = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.SiLU())
    with torch.no_grad():
        twin[0].weight.copy_(torch.tensor(np.asarray(block.linear.kernel[...]).T.copy()))
        twin[0].bias.copy_(torch.tensor(np.asarray(block.linear.bias[...]).copy()))
        twin[1].weight.copy_(torch.tensor(np.asarray(block.norm.scale[...]).copy()))
        twin[1].bias.copy_(torch.tensor(np.asarray(block.norm.bias[...]).copy()))
        # Nearly constant vectors are where the two libraries' default epsilons differ.
        x = np.concatenate([f32(3, 4), np.full((1, 4), 0.5, np.float32), f32(2, 4) * 1e-3])
        expected = twin(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(block(x), expected, atol=2e-6)
