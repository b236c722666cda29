"""The step against a plain reference, its scan against a loop, and what scores may not depend on."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.world_model import latents
from jaxguard.world_model.params import Params, build
from jaxguard.world_model.rollout import observe
from jaxguard.world_model.rssm import (
    RSSM,
    StepInputs,
    encode_instruction,
    encode_steps,
    observe_step,
    prior_logits,
    read_mode,
    read_risk,
    step_weights,
)

B, T = 3, 7
RNG = np.random.default_rng(3)


def vectors(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def layer_norm(x: np.ndarray, norm: Any) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...]) + np.asarray(
        norm.bias[...]
    )


def linear(x: np.ndarray, layer: Any) -> np.ndarray:
    return x @ np.asarray(layer.kernel[...], np.float64) + np.asarray(layer.bias[...])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def block(x: np.ndarray, module: Any) -> np.ndarray:
    normed = layer_norm(linear(x, module.linear), module.norm)
    return normed * sigmoid(normed)


def mlp(x: np.ndarray, module: Any) -> np.ndarray:
    return linear(block(x, module.block), module.out)


class Reference:
    """The equations of the design in float64 NumPy, unfused, straight from the modules."""

    def __init__(self, model: RSSM, config: ModelConfig):
        self.model, self.config = model, config

    def onehot(self, logits: np.ndarray) -> np.ndarray:
        shaped = logits.reshape(*logits.shape[:-1], self.config.stoch, self.config.classes)
        return np.eye(self.config.classes)[shaped.argmax(-1)].reshape(logits.shape)

    def init(self, ins: np.ndarray) -> np.ndarray:
        return np.tanh(mlp(block(ins, self.model.ins_encoder), self.model.init))

    def posterior(self, h: np.ndarray, obs: np.ndarray) -> np.ndarray:
        return mlp(np.concatenate([h, block(obs, self.model.obs_encoder)], -1), self.model.posterior)

    def core(self, h: np.ndarray, z: np.ndarray, act: np.ndarray) -> np.ndarray:
        core = self.model.core
        x = layer_norm(np.concatenate([z, block(act, self.model.act_encoder)], -1), core.norm)
        xr, xu, xn = np.split(linear(x, core.inputs), 3, -1)
        hr, hu, hn = np.split(linear(h, core.recurrent), 3, -1)
        update = sigmoid(xu + hu)
        return (1 - update) * np.tanh(xn + sigmoid(xr + hr) * hn) + update * h

    def risks(self, h: np.ndarray, act: np.ndarray, ins: np.ndarray) -> np.ndarray:
        feat = np.concatenate([h, self.onehot(mlp(h, self.model.prior))], -1)
        feat = feat + self.config.adapter_scale * mlp(feat, self.model.adapter)
        x = np.concatenate([feat, block(act, self.model.act_encoder), block(ins, self.model.ins_encoder)], -1)
        return np.concatenate([mlp(x, self.model.hazard_head), mlp(x, self.model.prefix_head)], -1)

    def step(self, h: np.ndarray, obs: np.ndarray, act: np.ndarray) -> np.ndarray:
        return self.core(h, self.onehot(self.posterior(h, obs)), act)


@pytest.fixture(scope="module")
def model(tiny: ModelConfig, params: Params) -> RSSM:
    return build(tiny, params)


@pytest.fixture(scope="module")
def data(tiny: ModelConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return vectors(B, T, tiny.embed_dim), vectors(B, T, tiny.embed_dim), vectors(B, tiny.embed_dim)


@pytest.fixture(scope="module")
def rollout(tiny: ModelConfig, params: Params) -> Any:
    """Jitted ``(obs, act, ins, h0=None) -> (h [B, T+1, D], logits of both heads [B, T, 2])``, modes of latents."""

    @jax.jit
    def run(obs: jax.Array, act: jax.Array, ins: jax.Array, h0: jax.Array | None = None) -> tuple:
        model = build(tiny, params)
        w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, obs, act)
        instruction = encode_instruction(step_weights(model, tiny), ins)
        h = observe(w, tiny, instruction.h0 if h0 is None else h0, x, None).h
        zhat = latents.mode(prior_logits(w, tiny, h[:, 1:]))
        return h, read_risk(w, tiny, h[:, 1:], zhat, x.heads_a, instruction.heads_e[:, None])

    return run


def test_rollout_and_risks_equal_the_reference(tiny: ModelConfig, model: RSSM, data: tuple, rollout: Any) -> None:
    obs, act, ins = data
    reference = Reference(model, tiny)
    h, logits = rollout(obs, act, ins)
    state = reference.init(ins)
    np.testing.assert_allclose(h[:, 0], state, atol=1e-5)
    for t in range(T):
        state = reference.step(state, obs[:, t], act[:, t])
        np.testing.assert_allclose(h[:, t + 1], state, atol=1e-5)
        np.testing.assert_allclose(logits[:, t], reference.risks(state, act[:, t], ins), atol=1e-5)
    assert np.ptp(np.asarray(logits)) > 0.1  # the comparison is not one of constants


def test_observe_step_posterior_and_latent_equal_the_reference(tiny: ModelConfig, model: RSSM, data: tuple) -> None:
    obs, act, _ = data
    h = vectors(B, tiny.deter)
    x = encode_steps(step_weights(model, tiny), tiny, obs[:, 0], act[:, 0])
    _, (logits, z) = observe_step(step_weights(model, tiny), tiny, jnp.asarray(h), x)
    expected = Reference(model, tiny).posterior(h, obs[:, 0])
    np.testing.assert_allclose(np.asarray(logits).reshape(B, -1), expected, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(z).reshape(B, -1), Reference(model, tiny).onehot(expected))


def test_sampled_step_normalises_the_latent_it_drew(tiny: ModelConfig, model: RSSM, data: tuple) -> None:
    obs, act, _ = data
    h = vectors(B, tiny.deter)
    x = encode_steps(step_weights(model, tiny), tiny, obs[:, 0], act[:, 0])
    h_next, (_, z) = observe_step(
        step_weights(model, tiny),
        tiny,
        jnp.asarray(h),
        x,
        latents.noise(jax.random.key(5), (len(h), tiny.stoch, tiny.classes)),
    )
    expected = Reference(model, tiny).core(h, np.asarray(z, np.float64).reshape(B, -1), act[:, 0])
    np.testing.assert_allclose(h_next, expected, atol=1e-5)


def test_core_equals_torch_gru_cell(tiny: ModelConfig, model: RSSM, data: tuple) -> None:
    torch = pytest.importorskip("torch")
    obs, act, _ = data
    h = vectors(B, tiny.deter)
    x = encode_steps(step_weights(model, tiny), tiny, obs[:, 0], act[:, 0])
    h_next, (_, z) = observe_step(step_weights(model, tiny), tiny, jnp.asarray(h), x)
    size = tiny.stoch * tiny.classes + tiny.hidden
    norm, cell = torch.nn.LayerNorm(size), torch.nn.GRUCell(size, tiny.deter)
    core = model.core
    pairs = (
        (norm.weight, core.norm.scale), (norm.bias, core.norm.bias),
        (cell.weight_ih, core.inputs.kernel), (cell.bias_ih, core.inputs.bias),
        (cell.weight_hh, core.recurrent.kernel), (cell.bias_hh, core.recurrent.bias),
    )  # fmt: skip
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.copy_(torch.tensor(np.asarray(ours[...]).T.copy()))
        inputs = np.concatenate([np.asarray(z).reshape(B, -1), model.act_encoder(act[:, 0])], -1)
        expected = cell(norm(torch.tensor(inputs)), torch.tensor(h)).numpy()
    np.testing.assert_allclose(h_next, expected, atol=1e-5)


def test_gradients_through_step_weights_equal_those_of_the_plain_form(
    tiny: ModelConfig, params: Params, quick: dict
) -> None:
    """The fused form is differentiable algebra: compared with a plain one written in JAX, in soft latents."""
    obs, act, ins = vectors(B, tiny.embed_dim), vectors(B, tiny.embed_dim), vectors(B, tiny.embed_dim)
    z = jax.nn.softmax(vectors(B, tiny.stoch, tiny.classes))

    def fused(params: Params) -> jax.Array:
        model = build(tiny, params)
        w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, obs, act)
        instruction = encode_instruction(step_weights(model, tiny), ins)
        return read_risk(w, tiny, instruction.h0, z, x.heads_a, instruction.heads_e).sum()

    def plain(params: Params) -> jax.Array:
        model = build(tiny, params)
        e, a = model.ins_encoder(ins), model.act_encoder(act)
        feat = jnp.concatenate([jnp.tanh(model.init(e)), z.reshape(B, -1)], -1)
        feat = feat + tiny.adapter_scale * model.adapter(feat)
        x = jnp.concatenate([feat, a, e], -1)
        return (model.hazard_head(x) + model.prefix_head(x)).sum()

    ours, theirs = (jax.jit(jax.grad(f), compiler_options=quick)(params) for f in (fused, plain))
    for mine, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)
    assert np.abs(ours["adapter"]["out"]["kernel"]).max() > 1e-3


def test_scan_equals_a_python_loop(tiny: ModelConfig, model: RSSM, data: tuple, rollout: Any) -> None:
    obs, act, ins = data
    hs, _ = rollout(obs, act, ins)
    w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, obs, act)
    step = jax.jit(functools.partial(observe_step, w, tiny))
    h = encode_instruction(step_weights(model, tiny), ins).h0
    for t in range(T):
        h, _ = step(h, jax.tree.map(lambda v, t=t: v[:, t], x))
        np.testing.assert_allclose(hs[:, t + 1], h, atol=1e-6)


@pytest.mark.parametrize(
    "split", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(T - 1, marks=pytest.mark.slow)]
)
def test_scan_resumes_from_any_split_point(data: tuple, rollout: Any, split: int) -> None:
    obs, act, ins = data
    whole, logits = rollout(obs, act, ins)
    first, logits_first = rollout(obs[:, :split], act[:, :split], ins)
    second, logits_second = rollout(obs[:, split:], act[:, split:], ins, first[:, -1])
    np.testing.assert_allclose(np.concatenate([first, second[:, 1:]], axis=1), whole, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([logits_first, logits_second], axis=1), logits, atol=1e-5)


def test_scan_draws_what_a_loop_over_its_noise_draws(tiny: ModelConfig, model: RSSM, data: tuple) -> None:
    obs, act, ins = data
    w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, obs, act)
    h = encode_instruction(step_weights(model, tiny), ins).h0
    key = jax.random.key(9)
    scanned = jax.jit(functools.partial(observe, w, tiny))(h, x, key)
    step = jax.jit(functools.partial(observe_step, w, tiny))
    for t, own in enumerate(latents.noise(key, (T, len(h), tiny.stoch, tiny.classes))):
        h, (logits, z) = step(h, jax.tree.map(lambda v, t=t: v[:, t], x), own)
        np.testing.assert_allclose(scanned.h[:, t + 1], h, atol=1e-6)
        np.testing.assert_allclose(scanned.post_logits[:, t], logits, atol=1e-5)
        np.testing.assert_allclose(scanned.z[:, t], z, atol=1e-6)


def test_one_row_by_gathers_equals_the_batch_by_products(data: tuple, rollout: Any) -> None:
    obs, act, ins = data
    h, logits = rollout(obs, act, ins)
    for row in range(B):
        own = slice(row, row + 1)
        h_one, logits_one = rollout(obs[own], act[own], ins[own])
        np.testing.assert_allclose(h_one, h[own], atol=1e-6)
        np.testing.assert_allclose(logits_one, logits[own], atol=1e-5)


@pytest.mark.parametrize("rows", [1, B])
def test_later_inputs_leave_earlier_scores_bit_identical(data: tuple, rollout: Any, rows: int) -> None:
    """The pre-action rule: the score at t depends on e, o_0..o_t, a_0..a_t and nothing else."""
    obs, act, ins = (array[:rows] for array in data)
    before = np.asarray(rollout(obs, act, ins)[1])
    for t in range(T - 1):
        obs_changed, act_changed = obs.copy(), act.copy()
        obs_changed[:, t + 1 :] = vectors(*obs[:, t + 1 :].shape) * 100
        act_changed[:, t + 1 :] = vectors(*act[:, t + 1 :].shape) * 100
        after = np.asarray(rollout(obs_changed, act_changed, ins)[1])
        assert after[:, : t + 1].tobytes() == before[:, : t + 1].tobytes()
        assert (after[:, t + 1] != before[:, t + 1]).all()


def test_a_score_depends_on_everything_it_may_depend_on(data: tuple, rollout: Any) -> None:
    obs, act, ins = data
    before = np.asarray(rollout(obs, act, ins)[1])
    act_changed = act.copy()
    act_changed[:, 2] += 1
    after = np.asarray(rollout(obs, act_changed, ins)[1])
    assert (after[:, 2] != before[:, 2]).all()  # the proposed action itself
    assert (after[:, 4] != before[:, 4]).all()  # carried by the state
    assert (np.asarray(rollout(obs, act, ins + 1)[1]) != before).all()
    obs_changed = obs.copy()
    obs_changed[:, 2] = -20 * obs[:, 2]
    assert (np.asarray(rollout(obs_changed, act, ins)[1])[:, 2] != before[:, 2]).any()


def test_constant_and_zero_vectors_are_finite_with_finite_gradients(
    tiny: ModelConfig, params: Params, quick: dict
) -> None:
    @functools.partial(jax.jit, compiler_options=quick)
    @jax.value_and_grad
    def loss(params: Params, obs: jax.Array) -> jax.Array:
        model = build(tiny, params)
        w, x = step_weights(model, tiny), encode_steps(step_weights(model, tiny), tiny, obs, obs)
        instruction = encode_instruction(step_weights(model, tiny), obs[:, 0])
        h = observe(w, tiny, instruction.h0, x, jax.random.key(0)).h[:, 1:]
        logits = prior_logits(w, tiny, h)
        zhat = latents.sample(latents.noise(jax.random.key(1), logits.shape), latents.log_probs(logits, tiny.unimix))
        return (read_risk(w, tiny, h, zhat, x.heads_a, instruction.heads_e[:, None]) ** 2).sum()

    for constant in (0.0, 1.0, -3.0):
        value, grads = loss(params, np.full((B, 2, tiny.embed_dim), constant, np.float32))
        assert np.isfinite(value)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["observation", "action", "instruction"])
def test_a_vector_that_is_not_finite_gives_no_finite_score_then_or_later(
    tiny: ModelConfig, scoring: Any, rows: int, bad: float, field: str
) -> None:
    """The mode of NaN logits is a class like any other: without a guard such a score would look sound."""
    obs, act, ins = (vectors(rows, tiny.embed_dim) for _ in range(3))
    {"observation": obs, "action": act, "instruction": ins}[field][0, 1] = bad
    h, first = scoring(obs, act, ins, None)
    _, later = scoring(vectors(rows, tiny.embed_dim), vectors(rows, tiny.embed_dim), ins, h)
    assert np.isnan(first[0]).all()
    assert np.isnan(later[0]).all()
    assert np.isfinite(first[1:]).all()
    assert np.isfinite(later[1:]).all()


@pytest.fixture(scope="module")
def scoring(tiny: ModelConfig, params: Params) -> Any:
    @jax.jit
    def run(obs: jax.Array, act: jax.Array, ins: jax.Array, h: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        model = build(tiny, params)
        instruction = encode_instruction(step_weights(model, tiny), ins)
        x: StepInputs = encode_steps(step_weights(model, tiny), tiny, obs, act)
        state = instruction.h0 if h is None else h
        w = step_weights(model, tiny)
        h_next, _ = observe_step(w, tiny, state, x)
        return h_next, read_mode(w, tiny, h_next, None, x.heads_a + instruction.heads_e, jnp.zeros(len(obs)))

    return run


def test_read_mode_gives_the_risks_of_the_rollout(data: tuple, rollout: Any, scoring: Any) -> None:
    obs, act, ins = data
    hs, logits = rollout(obs, act, ins)
    h = None
    for t in range(T):
        h, risks = scoring(obs[:, t], act[:, t], ins, h)
        np.testing.assert_allclose(h, hs[:, t + 1], atol=1e-6)
        np.testing.assert_allclose(risks, sigmoid(np.asarray(logits[:, t])), atol=1e-5)
