"""Losses against NumPy, their masks, their gradients, and what padding must not change."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxguard.config import ModelConfig, Stage1Config
from jaxguard.world_model import latents
from jaxguard.world_model.losses import (
    Batch,
    Terms,
    centred_cosine,
    reduce,
    risk_logits,
    risk_losses,
    stage1_scales,
    world_model_losses,
)
from jaxguard.world_model.params import CORE, HEADS, Params, build
from jaxguard.world_model.rssm import (
    StepInputs,
    encode_instruction,
    encode_steps,
    observe_step,
    prior_logits,
    step_weights,
)

pytestmark = pytest.mark.usefixtures("quick_compile")
STAGE1 = Stage1Config(free_nats=0.2)
RISKS = {"hazard": 1.0, "prefix": 1.0}
LENGTHS = (4, 2, 3)


def make_batch(tiny: ModelConfig, rows: int = 3, steps: int = 4) -> Batch:
    """Three trajectories of 4, 2 and 3 steps in ``rows`` x ``steps``; the padding is zero, as in training."""
    rng = np.random.default_rng(4)
    obs, act = np.zeros((2, rows, steps + 1, tiny.embed_dim), np.float32)
    ins = np.zeros((rows, tiny.embed_dim), np.float32)
    valid, target, hazard, prefix, supervised = np.zeros((5, rows, steps), np.float32)
    for row, length in enumerate(LENGTHS):
        obs[row, : length + 1] = rng.normal(size=(length + 1, tiny.embed_dim))
        act[row, :length] = rng.normal(size=(length, tiny.embed_dim))
        ins[row] = rng.normal(size=tiny.embed_dim)
        valid[row, :length] = 1
        target[row, : length - (row == 0)] = 1
        supervised[row, :length] = 1
    hazard[0, 2], prefix[0, 1:3], supervised[0, 3] = 1, 1, 0
    return Batch(obs, act, ins, valid, target, hazard, prefix, supervised)


@pytest.fixture(scope="module")
def stage1(tiny: ModelConfig, quick_compile: None) -> Any:
    """Jitted ``(params, batch) -> ((loss, (means, terms, extra)), gradient)`` of stage 1.

    Latents are probabilities instead of samples: noise has the shape of what it is drawn for, so that padding
    would change it.
    """

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, tuple]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latents, "sample", lambda _key, logp: jnp.exp(logp))
            terms, extra = world_model_losses(build(tiny, params), tiny, STAGE1, batch, jax.random.key(0))
        total, means = reduce(terms, stage1_scales(STAGE1))
        return total, (means, terms, extra)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


@pytest.fixture(scope="module")
def stage2(tiny: ModelConfig, quick_compile: None) -> Any:
    """Jitted ``(params, batch) -> ((loss, (means, terms, logits)), gradient)`` of stage 2, modes of latents."""

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, tuple]:
        model = build(tiny, params)
        terms = risk_losses(model, tiny, batch, None)
        total, means = reduce(terms, RISKS)
        return total, (means, terms, risk_logits(model, tiny, batch, None))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def assert_close(mine: Any, theirs: Any, atol: float) -> None:
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=atol)


def test_centred_cosine_against_numpy() -> None:
    rng = np.random.default_rng(5)
    p, o = rng.normal(size=(2, 3, 4, 6)) + 2.0
    mask = np.array([[1, 1, 1, 0], [1, 0, 1, 1], [0, 0, 1, 1]], np.float32)
    keep = mask > 0
    pc, oc = p - p[keep].mean(axis=0), o - o[keep].mean(axis=0)
    expected = 1 - (pc * oc).sum(-1) / np.linalg.norm(pc, axis=-1) / np.linalg.norm(oc, axis=-1)
    got = np.asarray(centred_cosine(p.astype(np.float32), o.astype(np.float32), mask))
    np.testing.assert_allclose(got[keep], expected[keep], atol=1e-5)
    np.testing.assert_allclose(
        centred_cosine(p.astype(np.float32), p.astype(np.float32), mask)[keep], np.zeros(int(mask.sum())), atol=1e-5
    )


@pytest.mark.parametrize("mask", [np.ones((2, 3)), np.zeros((2, 3)), np.eye(3)[:2]])
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_centred_cosine_of_equal_vectors_is_finite(mask: np.ndarray, value: float) -> None:
    def loss(p: jax.Array, o: jax.Array) -> jax.Array:
        return (centred_cosine(p, o, mask) * mask).sum()

    p, o = jnp.full((2, 3, 4), value), jnp.full((2, 3, 4), 2.0)
    np.testing.assert_allclose(loss(p, o), mask.sum())  # no direction: cosine 0
    for gradient in jax.grad(loss, argnums=(0, 1))(p, o):
        np.testing.assert_array_equal(gradient, 0.0)


def test_reduce_is_a_masked_mean_and_empty_masks_give_zero() -> None:
    mask = jnp.array([[1.0, 1.0], [1.0, 0.0]])
    terms = Terms({"a": jnp.array([[1.0, 2.0], [6.0, 100.0]]), "b": jnp.ones((2, 2))}, mask)
    total, means = reduce(terms, {"a": 2.0, "b": 0.5})
    np.testing.assert_allclose(means["a"], 3.0)
    np.testing.assert_allclose(total, 6.5)
    np.testing.assert_allclose(reduce(terms._replace(mask=mask * 0), {"a": 2.0, "b": 0.5})[0], 0.0)


def test_stage1_terms_by_hand(tiny: ModelConfig, params: Params, stage1: Any) -> None:
    """Entry t concerns o_{t+1}: its posterior against the prior at the same state, and its two predictions."""
    batch = make_batch(tiny)
    (_, (_, terms, extra)), _ = stage1(params, batch)
    model = build(tiny, params)
    w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, batch.obs, batch.act)
    h = encode_instruction(step_weights(model, tiny), batch.ins).h0

    @jax.jit
    def step(h: jax.Array, x: StepInputs) -> tuple[jax.Array, tuple]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(latents, "sample", lambda _gumbel, logp: jnp.exp(logp))
            return observe_step(w, tiny, h, x, jnp.zeros(()))

    states, posts = [], []
    for t in range(5):
        h_next, (logits, _) = step(h, jax.tree.map(lambda v, t=t: v[:, t], x))
        states.append(np.asarray(h))
        posts.append(np.asarray(latents.log_probs(logits, tiny.unimix)))
        h = h_next
    h, post = np.stack(states[1:], 1), np.stack(posts[1:], 1)
    prior = np.asarray(latents.log_probs(prior_logits(w, tiny, jnp.asarray(h)), tiny.unimix))
    kl = (np.exp(post) * (post - prior)).sum((-1, -2))
    floor = STAGE1.free_nats
    assert ((kl > floor) & (batch.target > 0)).any()
    assert ((kl < floor) & (batch.target > 0)).any()
    np.testing.assert_allclose(extra["kl"], kl, atol=1e-5)
    np.testing.assert_allclose(terms.losses["dyn"], np.maximum(kl, floor), atol=1e-5)
    np.testing.assert_allclose(terms.losses["rep"], np.maximum(kl, floor), atol=1e-5)
    for name, logp in (("prior_pred", prior), ("post_pred", post)):
        predicted = model.predictor(jnp.asarray(np.concatenate([h, np.exp(logp).reshape(3, 4, -1)], -1)))
        expected = centred_cosine(predicted, batch.obs[:, 1:], batch.target)
        np.testing.assert_allclose(terms.losses[name], expected, atol=1e-4)
    np.testing.assert_array_equal(terms.mask, batch.target)
    assert stage1_scales(Stage1Config()) == {"prior_pred": 1.25, "post_pred": 1.25, "dyn": 0.03, "rep": 0.03}


def test_which_parameters_learn_from_which_term(tiny: ModelConfig, params: Params) -> None:
    """``dyn`` moves the prior towards the posterior, ``rep`` the reverse; risk heads learn nothing in stage 1."""
    batch = make_batch(tiny)

    @jax.jit
    @jax.jacrev
    def gradients(params: Params) -> jax.Array:
        terms, _ = world_model_losses(build(tiny, params), tiny, Stage1Config(free_nats=0.0), batch, jax.random.key(1))
        return jnp.stack([(terms.losses[n] * terms.mask).sum() for n in ("dyn", "rep", "prior_pred", "post_pred")])

    by_module = gradients(params)

    def learns(module: str, term: int) -> bool:
        return any(np.abs(leaf[term]).max() > 1e-7 for leaf in jax.tree.leaves(by_module[module]))

    dyn, rep, prior_pred, post_pred = range(4)
    assert learns("prior", dyn)
    assert not learns("prior", rep)
    assert learns("prior", prior_pred)
    assert not learns("prior", post_pred)
    assert learns("posterior", rep)
    assert learns("posterior", post_pred)
    assert learns("core", dyn)
    assert learns("core", rep)
    for term in (dyn, rep):
        assert not learns("predictor", term)
    for term in range(4):
        for head in HEADS:
            assert not learns(head, term)


def test_risk_losses_are_cross_entropies_of_the_two_heads(tiny: ModelConfig, params: Params, stage2: Any) -> None:
    batch = make_batch(tiny)
    (_, (_, terms, logits)), _ = stage2(params, batch)
    risks = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    for i, (name, target) in enumerate((("hazard", batch.hazard), ("prefix", batch.prefix))):
        expected = -target * np.log(risks[..., i]) - (1 - target) * np.log(1 - risks[..., i])
        np.testing.assert_allclose(terms.losses[name], expected, atol=1e-5)
    np.testing.assert_array_equal(terms.mask, batch.supervised)


def test_steps_after_the_first_hazard_teach_nothing(tiny: ModelConfig, params: Params, stage2: Any) -> None:
    batch = make_batch(tiny)
    changed = batch._replace(act=batch.act.copy(), hazard=batch.hazard.copy())
    changed.act[0, 3] += 5.0
    changed.hazard[0, 3] = 1.0
    ((loss, (means, _, _)), gradient), ((other, (others, _, _)), changed_gradient) = (
        stage2(params, b) for b in (batch, changed)
    )
    assert_close((loss, means, gradient), (other, others, changed_gradient), atol=0)


def test_padding_changes_neither_losses_nor_gradients(
    tiny: ModelConfig, params: Params, stage1: Any, stage2: Any
) -> None:
    for function in (stage1, stage2):
        (loss, (means, *_)), gradient = function(params, make_batch(tiny))
        assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradient)) > 1e-2
        (padded_loss, (padded_means, *_)), padded_gradient = function(params, make_batch(tiny, rows=5, steps=6))
        assert_close((padded_loss, padded_means, padded_gradient), (loss, means, gradient), atol=1e-6)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_empty_mask_gives_zero_loss_and_zero_gradient(
    tiny: ModelConfig, params: Params, stage1: Any, stage2: Any, stage: int
) -> None:
    batch = make_batch(tiny)
    empty = batch._replace(target=batch.target * 0, supervised=batch.supervised * 0)
    (value, _), gradient = (stage1 if stage == 1 else stage2)(params, empty)
    np.testing.assert_array_equal(value, 0.0)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constant_vectors_give_finite_losses_and_gradients(
    tiny: ModelConfig, params: Params, stage1: Any, stage2: Any, constant: float
) -> None:
    batch = make_batch(tiny)
    flat = batch._replace(**{name: np.full_like(getattr(batch, name), constant) for name in ("obs", "act", "ins")})
    for function in (stage1, stage2):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(function(params, flat)))


def test_the_risk_path_reaches_every_module_but_the_predictor(tiny: ModelConfig, params: Params, stage2: Any) -> None:
    _, gradient = stage2(params, make_batch(tiny))
    reached = {m for m, leaves in gradient.items() if any(np.abs(v).max() > 1e-7 for v in jax.tree.leaves(leaves))}
    # Modes have no gradient; with samples the posterior and the prior learn as well.
    assert reached == {*HEADS, *CORE, "act_encoder", "ins_encoder", "init"}
    sampled = jax.jit(jax.grad(lambda p, b: reduce(risk_losses(build(tiny, p), tiny, b, jax.random.key(0)), RISKS)[0]))(
        params, make_batch(tiny)
    )
    reached = {m for m, leaves in sampled.items() if any(np.abs(v).max() > 1e-7 for v in jax.tree.leaves(leaves))}
    assert reached == set(params) - {"predictor", "pooled_head"}
