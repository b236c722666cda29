"""The optimiser's partition and one step: what moves, what is frozen, what a bad batch leaves alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_samples import CONFIG, make, start

from jaxguard.training.episodes import make_batch
from jaxguard.training.state import (
    StepFunction,
    TrainState,
    loss_function,
    make_step,
    make_validation,
    optimiser,
    partition,
)
from jaxguard.world_model.losses import Batch
from jaxguard.world_model.params import CORE, HEADS, POOLED, PREDICTOR, Params, flatten

pytestmark = pytest.mark.usefixtures("compile_cache")
BEGIN = start()
EPISODES = make(8, seed=1)


def batch() -> Batch:
    return make_batch(EPISODES, np.arange(4), 4, CONFIG.stage2)


def fresh(stage: int) -> TrainState:
    params = jax.tree.map(jnp.array, BEGIN)
    return TrainState(params, optimiser(CONFIG, stage).init(params), jnp.zeros((), jnp.int32))


@pytest.fixture(scope="module")
def step1() -> StepFunction:
    return make_step(CONFIG, 1)[1]


@pytest.fixture(scope="module")
def step2() -> StepFunction:
    return make_step(CONFIG, 2)[1]


def changed(params: Params) -> set[str]:
    """Modules of which any byte differs from the start."""
    before = flatten(BEGIN)
    return {
        name.partition(".")[0] for name, array in flatten(params).items() if array.tobytes() != before[name].tobytes()
    }


def test_partition_names_every_module() -> None:
    first, second = partition(1)(BEGIN), partition(2)(BEGIN)
    assert set(first) == set(second) == set(BEGIN)
    assert {m for m, label in first.items() if label == "frozen"} == {*HEADS, *POOLED}
    assert {m for m, label in second.items() if label == "frozen"} == {*CORE, *PREDICTOR, *POOLED}
    assert {m for m, label in second.items() if label == "full"} == set(HEADS)
    assert {m for m, label in second.items() if label == "scaled"} == set(BEGIN) - {*HEADS, *CORE, *PREDICTOR, *POOLED}


def test_stage_1_moves_the_world_model_and_leaves_the_heads(step1: StepFunction) -> None:
    state = fresh(1)
    for _ in range(2):
        state, _ = step1(state, batch())
    assert changed(state.params) == set(BEGIN) - {*HEADS, *POOLED}


def test_stage_2_moves_heads_and_path_and_leaves_core_and_predictor(step2: StepFunction) -> None:
    state = fresh(2)
    for _ in range(2):
        state, metrics = step2(state, batch())
    assert changed(state.params) == set(BEGIN) - {*CORE, *PREDICTOR, *POOLED}
    assert set(metrics) == {"loss", "grad_norm", "hazard", "prefix"}
    np.testing.assert_allclose(metrics["loss"], metrics["hazard"] + metrics["prefix"], rtol=1e-6)


def test_the_gradient_norm_is_that_of_what_is_trained(step2: StepFunction) -> None:
    key = jax.random.fold_in(jax.random.key(CONFIG.train.seed * 2 + 2, impl="rbg"), 0)
    grads, _ = jax.jit(jax.grad(loss_function(CONFIG, 2), has_aux=True))(BEGIN, batch(), key)
    labels = partition(2)(BEGIN)
    trained = {name: own for name, own in grads.items() if labels[name] != "frozen"}
    _, metrics = step2(fresh(2), batch())
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(trained), rtol=1e-5)
    assert optax.tree.norm(grads) > 1.01 * optax.tree.norm(trained)  # the core has a gradient, too


def test_the_world_model_moves_at_a_quarter_of_the_rate(step2: StepFunction) -> None:
    """Adam's first step is the learning rate times the sign of the gradient."""
    state, _ = step2(fresh(2), batch())
    rate = CONFIG.stage2.learning_rate

    def largest(module: str) -> float:
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params[module], BEGIN[module])
        return float(max(jax.tree.leaves(moved)))

    np.testing.assert_allclose([largest(m) for m in HEADS], rate, rtol=1e-2)
    np.testing.assert_allclose([largest(m) for m in ("act_encoder", "prior", "init")], rate / 4, rtol=1e-2)


def test_gradients_are_clipped() -> None:
    params = {name: {"w": jnp.zeros(2)} for name in BEGIN}
    settings = dataclasses.replace(CONFIG.stage1, clip_norm=1e-12)
    transform = optimiser(dataclasses.replace(CONFIG, stage1=settings), 1)
    updates, _ = transform.update(jax.tree.map(jnp.ones_like, params), transform.init(params), params)
    # Adam divides by the root of the second moment plus 1e-8: clipped far below that, hardly anything is left.
    assert 0 < np.abs(updates["core"]["w"]).max() < 1e-3 * settings.learning_rate


def test_a_step_is_deterministic_and_draws_anew_each_time(step1: StepFunction) -> None:
    (one, first), (two, second) = step1(fresh(1), batch()), step1(fresh(1), batch())
    assert float(first["loss"]) == float(second["loss"])
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True):
        np.testing.assert_array_equal(a, b)
    _, later = step1(fresh(1)._replace(step=jnp.ones((), jnp.int32)), batch())
    assert float(later["loss"]) != float(first["loss"])


def test_a_batch_that_is_not_finite_changes_nothing_but_the_counter(step1: StepFunction, step2: StepFunction) -> None:
    bad = batch()
    bad.obs[1, 1, 0] = np.nan
    for stage, step in ((1, step1), (2, step2)):
        state, metrics = step(fresh(stage), bad)
        assert not np.isfinite(metrics["loss"])
        assert changed(state.params) == set()
        for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(fresh(stage).opt_state), strict=True):
            np.testing.assert_array_equal(a, b)


def test_one_compilation_per_bucket(step2: StepFunction) -> None:
    state = fresh(2)
    episodes = make(40, seed=3, longest=8)
    for length in (2, 3, 4, 5, 8, 3, 7):
        indices = np.flatnonzero(episodes.lengths == length)[:3]
        state, _ = step2(state, make_batch(episodes, indices, 4, CONFIG.stage2))
    assert step2._cache_size() == 2  # buckets 4 and 16


def test_validation_weighs_every_entry_alike() -> None:
    """Sums over two batches, divided once, equal the mean over one batch of all."""
    validation = make_validation(CONFIG, 2)
    parts = [make_batch(EPISODES, np.array(indices), 8, CONFIG.stage2) for indices in ([0, 1, 2], [3, 4, 5, 6, 7])]
    whole = make_batch(EPISODES, np.arange(8), 8, CONFIG.stage2)
    totals = np.array([[float(v) for v in validation(BEGIN, part)[:2]] for part in parts]).sum(axis=0)
    expected = [float(v) for v in validation(BEGIN, whole)[:2]]
    np.testing.assert_allclose(totals, expected, rtol=1e-5)
    assert expected[1] == whole.supervised.sum()
