"""Categorical latents against a NumPy oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxguard.world_model import latents

RNG = np.random.default_rng(1)
LOGITS = RNG.normal(scale=3.0, size=(4, 2, 3)).astype(np.float32)


def oracle(logits: np.ndarray, unimix: float) -> np.ndarray:
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    probs = shifted / shifted.sum(axis=-1, keepdims=True)
    return np.log((1 - unimix) * probs + unimix / logits.shape[-1])


@pytest.mark.parametrize("unimix", [0.0, 0.01, 0.3])
def test_log_probs_of_the_mixture(unimix: float) -> None:
    np.testing.assert_allclose(latents.log_probs(LOGITS, unimix), oracle(LOGITS, unimix), atol=1e-5)


def test_unimix_bounds_every_probability() -> None:
    logp = latents.log_probs(jnp.array([[[1e4, 0.0, -1e4]]]), 0.01)
    np.testing.assert_allclose(np.exp(logp), [[[0.99 + 0.01 / 3, 0.01 / 3, 0.01 / 3]]], rtol=1e-6)
    assert np.isfinite(latents.kl(logp, logp[..., ::-1])).all()


def test_log_probs_are_float32_of_bfloat16_logits() -> None:
    assert latents.log_probs(jnp.asarray(LOGITS, jnp.bfloat16), 0.01).dtype == jnp.float32


def test_sample_is_one_hot_and_follows_the_probabilities() -> None:
    logp = latents.log_probs(jnp.array([[[2.0, 0.0, -1.0]]]), 0.01)
    drawn = latents.sample(latents.noise(jax.random.key(0), (20_000, *logp.shape)), logp)
    np.testing.assert_allclose(drawn.sum(axis=-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(drawn.max(axis=-1), 1.0, atol=1e-6)
    np.testing.assert_allclose(drawn.mean(axis=0), np.exp(logp), atol=0.015)


def test_straight_through_gradient_is_that_of_the_probabilities() -> None:
    weights = RNG.normal(size=LOGITS.shape).astype(np.float32)

    def sampled(logits: jax.Array) -> jax.Array:
        return (
            weights * latents.sample(latents.noise(jax.random.key(3), logits.shape), latents.log_probs(logits, 0.05))
        ).sum()

    def probabilities(logits: jax.Array) -> jax.Array:
        return (weights * jnp.exp(latents.log_probs(logits, 0.05))).sum()

    expected = jax.grad(probabilities)(LOGITS)
    np.testing.assert_allclose(jax.grad(sampled)(LOGITS), expected, atol=1e-6)
    assert np.abs(expected).max() > 0.05


def test_mode_is_the_largest_logit_one_hot_or_as_index() -> None:
    onehot = latents.mode(jnp.asarray(LOGITS))
    np.testing.assert_array_equal(onehot, np.eye(3, dtype=np.float32)[LOGITS.argmax(-1)])
    index = latents.mode(jnp.asarray(LOGITS[:1]))
    np.testing.assert_array_equal(index, LOGITS[:1].argmax(-1))


@pytest.mark.parametrize("shape", [(1, 2), (1, 5, 2)])
def test_product_of_indices_equals_product_of_one_hot(shape: tuple[int, ...]) -> None:
    index = RNG.integers(0, 3, size=shape)
    kernel = RNG.normal(size=(6, 7)).astype(np.float32)
    flat = np.eye(3, dtype=np.float32)[index]
    expected = flat.reshape(*shape[:-1], 6) @ kernel
    np.testing.assert_allclose(latents.product(jnp.asarray(index), kernel), expected, atol=1e-6)
    np.testing.assert_allclose(latents.product(jnp.asarray(flat), kernel), expected, atol=1e-6)


def test_kl_against_numpy_and_never_negative() -> None:
    p, q = oracle(LOGITS, 0.01), oracle(RNG.normal(size=LOGITS.shape).astype(np.float32), 0.01)
    got = latents.kl(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32))
    np.testing.assert_allclose(got, (np.exp(p) * (p - q)).sum(axis=(-1, -2)), rtol=1e-5)
    assert got.shape == (4,)
    assert (np.asarray(got) > 0.0).all()
    np.testing.assert_allclose(latents.kl(jnp.asarray(p), jnp.asarray(p)), 0.0, atol=1e-7)
