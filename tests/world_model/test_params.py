"""Parameters as a flat file: round trip, what is refused, and the hash that names them."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params, ParamsError, build, count, flatten, init_params, unflatten, weights_hash

NAME = "core.inputs.kernel"


def test_flatten_is_sorted_and_unflatten_gives_it_back(tiny: ModelConfig, params: Params) -> None:
    flat = flatten(params)
    assert list(flat) == sorted(flat)
    assert flat[NAME].shape == (tiny.stoch * tiny.classes + tiny.hidden, 3 * tiny.deter)
    again = unflatten(flat, tiny)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for mine, theirs in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert weights_hash(again) == weights_hash(params)


def test_init_follows_the_seed(tiny: ModelConfig, quick_compile: None) -> None:
    first = init_params(tiny, 1)
    assert weights_hash(init_params(tiny, 1)) == weights_hash(first)
    assert weights_hash(init_params(tiny, 2)) != weights_hash(first)


def test_build_holds_the_values_it_was_given(tiny: ModelConfig, params: Params) -> None:
    model = build(tiny, params)
    np.testing.assert_array_equal(model.core.inputs.kernel[...], params["core"]["inputs"]["kernel"])
    np.testing.assert_array_equal(model.prior.block.norm.scale[...], params["prior"]["block"]["norm"]["scale"])


def test_count(tiny: ModelConfig, params: Params) -> None:
    assert count(params) == sum(array.size for array in flatten(params).values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop(NAME), rf"1 missing, first '{NAME}'"),
        (lambda a: a.update(extra=np.zeros(2, np.float32)), "1 unknown, first 'extra'"),
        (lambda a: a.update({NAME: a[NAME].T}), rf"'{NAME}': got shape \(24, 11\), expected \(11, 24\)"),
        (lambda a: a.update({NAME: np.where(a[NAME] > 0, np.nan, a[NAME])}), rf"'{NAME}': \d+ values are not finite"),
        (lambda a: a.update({NAME: np.full_like(a[NAME], np.inf)}), rf"'{NAME}': 264 values are not finite"),
    ],
)
def test_what_does_not_fit_is_named(tiny: ModelConfig, params: Params, change, message: str) -> None:
    arrays = flatten(params)
    change(arrays)
    with pytest.raises(ParamsError, match=message):
        unflatten(arrays, tiny)


def test_hash_changes_with_every_byte_and_name(tiny: ModelConfig, params: Params) -> None:
    seen = {weights_hash(params)}
    for name, array in flatten(params).items():
        changed = flatten(params) | {name: array.copy()}
        changed[name].reshape(-1).view(np.uint8)[-1] ^= 1
        seen.add(weights_hash(unflatten(changed, tiny)))
    assert len(seen) == 1 + len(flatten(params))
    swapped = {**params, "hazard_head": params["prefix_head"], "prefix_head": params["hazard_head"]}
    assert weights_hash(swapped) not in seen


def test_hash_does_not_depend_on_where_the_arrays_live(params: Params) -> None:
    assert weights_hash(jax.tree.map(jax.numpy.asarray, params)) == weights_hash(params)
