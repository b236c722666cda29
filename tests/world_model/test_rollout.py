"""Gradients of sampled rollouts: one product for all steps against the sum that is taken step by step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.world_model import latents
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.rollout import KERNELS, _scan, observe
from jaxguard.world_model.rssm import StepInputs, StepWeights, encode_instruction, encode_steps, step_weights

B, T = 3, 5


def step_by_step(w: StepWeights, config: ModelConfig, h0: jax.Array, x: StepInputs, key: jax.Array) -> Any:
    gumbel = latents.noise(key, (T, B, config.stoch, config.classes))
    return _scan(config, w, h0, jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), x), gumbel)[0]


def at_once(w: StepWeights, config: ModelConfig, h0: jax.Array, x: StepInputs, key: jax.Array) -> Any:
    found = observe(w, config, h0, x, key)
    return tuple(jnp.moveaxis(v, 0, 1) for v in (found.h[:, 1:], found.post_logits, found.z))


@pytest.mark.parametrize("recurrent", [True, False])
def test_gradients_equal_those_taken_step_by_step(
    tiny: ModelConfig, params: Params, quick: dict, recurrent: bool
) -> None:
    config = dataclasses.replace(tiny, recurrent=recurrent)
    rng = np.random.default_rng(0)
    obs, act = (rng.normal(size=(B, T, config.embed_dim)).astype(np.float32) for _ in range(2))
    ins = rng.normal(size=(B, config.embed_dim)).astype(np.float32)
    weigh = rng.normal(size=(T, B, 64)).astype(np.float32)

    def loss(steps: Any, params: Params) -> jax.Array:
        w = step_weights(build(config, params), config)
        found = steps(w, config, encode_instruction(w, ins).h0, encode_steps(w, config, obs, act), jax.random.key(5))
        return sum((part.reshape(T, B, -1) ** 2 * weigh[..., : part[0, 0].size]).sum() for part in found)

    def of(steps: Any) -> tuple[jax.Array, Params]:
        return jax.jit(jax.value_and_grad(functools.partial(loss, steps)), compiler_options=quick)(params)

    (value, grads), (expected_value, expected) = of(at_once), of(step_by_step)
    np.testing.assert_allclose(value, expected_value, rtol=1e-6)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-5 * max(1.0, float(np.abs(other).max())), err_msg=str(path))
    moved = [name for name in ("core", "posterior") for leaf in jax.tree.leaves(grads[name]) if np.abs(leaf).max() > 0]
    assert {"core", "posterior"} == set(moved)


def test_no_kernel_of_a_step_is_summed_up_in_the_scan(tiny: ModelConfig, params: Params) -> None:
    """The backward scan must not carry a gradient of a kernel's size from step to step: that is what it is for."""

    def carried(steps: Any) -> set[tuple[int, ...]]:
        w = step_weights(build(tiny, params), tiny)
        x = encode_steps(w, tiny, jnp.ones((B, T, tiny.embed_dim)), jnp.ones((B, T, tiny.embed_dim)))

        def loss(w: StepWeights) -> jax.Array:
            return steps(w, tiny, jnp.zeros((B, tiny.deter)), x, jax.random.key(0))[0].sum()

        found: set[tuple[int, ...]] = set()

        def visit(jaxpr: Any) -> None:
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "scan":
                    first, count = eqn.params["num_consts"], eqn.params["num_carry"]
                    found.update(v.aval.shape for v in eqn.invars[first : first + count])
                for inner in jax.tree.leaves(
                    list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
                ):
                    if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                        visit(getattr(inner, "jaxpr", inner))

        visit(jax.make_jaxpr(jax.grad(loss))(w).jaxpr)
        return found

    kernels = {getattr(step_weights(build(tiny, params), tiny), name).shape for name in KERNELS}
    assert kernels <= carried(step_by_step)
    assert not kernels & carried(at_once)
