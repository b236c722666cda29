"""The route head: equal to its module, equal live and in batches, and blind to what it must not see."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from route_samples import make_params

from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params, build, build_as
from jaxguard.world_model.routing import (
    OUTPUTS,
    RouteHead,
    RouteInputs,
    RouteScorer,
    StepTexts,
    read_route,
    route_given,
    route_logits,
    route_weights,
)
from jaxguard.world_model.rssm import step_weights

pytestmark = pytest.mark.usefixtures("quickly")
LENGTHS = (1, 3, 7)
STEPS = ("obs", "act", "evidence", "note")


@pytest.fixture(scope="module")
def own(tiny: ModelConfig) -> Params:
    return make_params(tiny)


@pytest.fixture(scope="module")
def quickly(own: Params, quick_compile: None) -> None:
    """Compiles what follows without optimisation; the parameters come first."""


@pytest.fixture(scope="module")
def scorer(tiny: ModelConfig, own: Params, quickly: None) -> RouteScorer:
    return RouteScorer(tiny, own)


def inputs(seed: int = 0, batch: int = len(LENGTHS), size: int = max(LENGTHS), dim: int = 6) -> RouteInputs:
    """Padded trajectories of LENGTHS, with zeros beyond their ends."""
    rng = np.random.default_rng(seed)
    parts: dict[str, Any] = {name: np.zeros((batch, size, dim), np.float32) for name in STEPS}
    parts |= {name: np.zeros((batch, dim), np.float32) for name in ("ins", "memory")}
    for row, length in enumerate(LENGTHS):
        for part in parts.values():
            part[row, ...] = 0
            cell = part[row, :length] if part.ndim == 3 else part[row]
            cell[...] = rng.normal(size=cell.shape)
    return RouteInputs(**parts)


def live(scorer: RouteScorer, x: RouteInputs, row: int) -> np.ndarray:
    state = scorer.start(x.ins[row], x.memory[row])
    found = []
    for t in range(LENGTHS[row]):
        state, logits = scorer.step(state, *(getattr(x, name)[row, t] for name in STEPS))
        found.append(logits)
    return np.array(found)


def changed(x: RouteInputs, name: str, at: tuple, value: float) -> RouteInputs:
    part = getattr(x, name).copy()
    part[at] = value
    return x._replace(**{name: part})


def test_logits_are_those_of_the_module(tiny: ModelConfig, own: Params) -> None:
    """Oracle: the head's own layers on the concatenated input, as the docstring writes it."""
    rng = np.random.default_rng(1)
    h = rng.normal(size=(4, tiny.deter)).astype(np.float32)
    texts = rng.normal(size=(6, 4, 6)).astype(np.float32)

    @jax.jit
    def module(params: Params, texts: jax.Array) -> jax.Array:
        world, head = build(tiny, params["world"]), build_as(RouteHead, tiny, params["head"])
        obs, act, evidence, note, ins, memory = texts
        z = jax.nn.one_hot(world.prior(h).reshape(4, tiny.stoch, tiny.classes).argmax(axis=-1), tiny.classes)
        return head.mlp(
            jnp.concatenate(
                [h, z.reshape(4, -1), world.obs_encoder(obs), world.act_encoder(act), head.evidence_encoder(evidence),
                 head.note_encoder(note), world.ins_encoder(ins), head.memory_encoder(memory)], axis=-1,
            )
        )  # fmt: skip

    @jax.jit
    def ours(params: Params, texts: jax.Array) -> jax.Array:
        w = step_weights(build(tiny, params["world"]), tiny)
        r = route_weights(build_as(RouteHead, tiny, params["head"]), w, tiny)
        obs, act, evidence, note, ins, memory = texts
        return read_route(r, w, tiny, h, route_given(r, w, ins, memory), StepTexts(obs, act, evidence, note))

    found = ours(own, texts)
    assert found.shape == (4, OUTPUTS)
    np.testing.assert_allclose(found, module(own, texts), atol=1e-5)


def test_live_equals_batch_at_any_padding(scorer: RouteScorer) -> None:
    x = inputs()
    batch = scorer.batch(x)
    wide = scorer.batch(inputs(batch=len(LENGTHS) + 2, size=12))
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(live(scorer, x, row), batch[row, :length], atol=1e-5)
        np.testing.assert_allclose(wide[row, :length], batch[row, :length], atol=1e-5)
    assert np.ptp(batch[2], axis=0).min() > 1e-3  # every logit moves with the steps


def test_a_state_stays_usable_and_a_step_repeats_to_the_bit(scorer: RouteScorer) -> None:
    x = inputs()
    state = scorer.start(x.ins[2], x.memory[2])
    first = [getattr(x, name)[2, 0] for name in STEPS]
    other = [getattr(x, name)[2, 1] for name in STEPS]
    one, two, three = (scorer.step(state, *step)[1] for step in (first, other, first))
    np.testing.assert_array_equal(one, three)
    assert (one != two).all()


@pytest.mark.parametrize("name", STEPS)
def test_later_steps_do_not_change_earlier_ones(scorer: RouteScorer, name: str) -> None:
    x = inputs()
    before, after = scorer.batch(x), scorer.batch(changed(x, name, (2, 4), 3.0))
    np.testing.assert_array_equal(before[2, :4], after[2, :4])
    assert (before[2, 4] != after[2, 4]).all()
    moved = (before[2, 5:] != after[2, 5:]).any()
    assert moved == (name in ("obs", "act"))  # only those go into the state


def test_without_recurrence_history_does_not_count(tiny: ModelConfig, own: Params, scorer: RouteScorer) -> None:
    x = inputs()
    past = changed(changed(x, "obs", (2, slice(0, 3)), 2.0), "act", (2, slice(0, 3)), -1.0)
    blind = RouteScorer(tiny, own, recurrence=False)
    np.testing.assert_array_equal(blind.batch(x)[2, 3:], blind.batch(past)[2, 3:])
    assert (scorer.batch(x)[2, 3:] != scorer.batch(past)[2, 3:]).any()
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(live(blind, x, row), blind.batch(x)[row, :length], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "at", "spoilt"),
    [
        ("obs", (2, 2, 1), slice(2, 7)),
        ("act", (2, 2, 1), slice(2, 7)),
        ("evidence", (2, 2, 1), slice(2, 3)),
        ("note", (2, 2, 1), slice(2, 3)),
        ("memory", (2, 1), slice(0, 7)),
        ("ins", (2, 1), slice(0, 7)),
    ],
)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_what_is_not_finite_shows_in_the_logits(
    scorer: RouteScorer, name: str, at: tuple, spoilt: slice, value: float
) -> None:
    """It must not hide in the mode of the latents, nor spoil others."""
    x = changed(inputs(), name, at, value)
    found = scorer.batch(x)
    expected = np.zeros(7, bool)
    expected[spoilt] = True
    np.testing.assert_array_equal(np.isnan(found[2]).all(axis=-1), expected)
    np.testing.assert_array_equal(np.isnan(found[2]).any(axis=-1), expected)
    assert np.isfinite(found[:2]).all()
    np.testing.assert_array_equal(np.isnan(live(scorer, x, 2)), np.isnan(found[2]))


def test_latents_are_sampled_with_a_key_only(tiny: ModelConfig, own: Params, scorer: RouteScorer) -> None:
    x = inputs()
    sampled = jax.jit(lambda key: route_logits(own, tiny, x, key))
    one, again, other = (np.asarray(sampled(jax.random.key(seed, impl="rbg"))) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert (one != scorer.batch(x)).any()
