"""The model as a pure function of a plain pytree, and its flat form for files.

NNX modules are split once: everything outside of this file holds parameters as nested dicts of arrays and
rebuilds the module inside a traced function, where that costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxguard.config import ModelConfig
from jaxguard.types import JaxguardError
from jaxguard.world_model.rssm import RSSM

Params = dict[str, Any]
M = TypeVar("M", bound=nnx.Module)

# Module names by the part they play in training (design: "The house", "World model").
HEADS = ("adapter", "hazard_head", "prefix_head")
CORE = ("core",)
PREDICTOR = ("predictor",)
POOLED = ("pooled_head",)


class ParamsError(JaxguardError):
    """Parameters do not fit the model: a missing or unknown name, or another shape."""


def init_params(config: ModelConfig, seed: int, kind: Callable[..., nnx.Module] = RSSM) -> Params:
    """Fresh parameters of a module for ``seed``, drawn on the host's CPU: the same for every kind of device."""
    with jax.default_device(jax.devices("cpu")[0]):
        # The "rbg" generator compiles ten times faster than the default one.
        return _initialiser(config, kind)(jax.random.key(seed, impl="rbg"))


@functools.lru_cache(maxsize=16)
def _initialiser(config: ModelConfig, kind: Callable[..., nnx.Module]) -> Callable[[jax.Array], Params]:
    """Compiled once per size: that takes seconds, drawing takes none."""
    return jax.jit(lambda key: _to_dict(nnx.state(kind(config, rngs=nnx.Rngs(key)), nnx.Param)))


def build(config: ModelConfig, params: Params) -> RSSM:
    """The world model over ``params`` (numpy, device or traced arrays); call it inside the traced function."""
    return build_as(RSSM, config, params)


def build_as(kind: Callable[..., M], config: ModelConfig, params: Params) -> M:
    """A module made from a configuration alone, over ``params``; as :func:`build`."""
    graphdef, state = _skeleton(config, kind)
    flat = dict(nnx.to_flat_state(state))
    values = {tuple(map(str, path)): leaf for path, leaf in _leaves(params)}
    rebuilt = [(path, flat[path].replace(values[tuple(map(str, path))])) for path in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(rebuilt))


@functools.lru_cache(maxsize=16)
def _skeleton(config: ModelConfig, kind: Callable[..., nnx.Module]) -> tuple[Any, Any]:
    """Structure and shapes without arrays."""
    abstract = nnx.eval_shape(lambda: kind(config, rngs=nnx.Rngs(0)))
    return nnx.split(abstract)


def _to_dict(state: Any) -> Params:
    result: Params = {}
    for path, variable in nnx.to_flat_state(state):
        node = result
        for part in path[:-1]:
            node = node.setdefault(str(part), {})
        node[str(path[-1])] = variable[...]
    return result


def _leaves(params: Mapping[str, Any], path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    for name, value in params.items():
        if isinstance(value, Mapping):
            found += _leaves(value, (*path, name))
        else:
            found.append(((*path, name), value))
    return found


def flatten(params: Params) -> dict[str, np.ndarray]:
    """``{"core.inputs.kernel": array, ...}`` sorted by name, on the host."""
    return {".".join(path): np.asarray(leaf) for path, leaf in sorted(_leaves(params), key=lambda item: item[0])}


def unflatten(arrays: Mapping[str, np.ndarray], config: ModelConfig, kind: Callable[..., nnx.Module] = RSSM) -> Params:
    """The inverse of :func:`flatten`, checked against the module that ``config`` describes.

    Raises:
        ParamsError: names or shapes differ, or a value is not finite.
    """
    _, state = _skeleton(config, kind)
    expected = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    if missing := sorted(set(expected) - set(arrays)):
        raise ParamsError(f"weights: {len(missing)} missing, first {missing[0]!r}")
    if unknown := sorted(set(arrays) - set(expected)):
        raise ParamsError(f"weights: {len(unknown)} unknown, first {unknown[0]!r}")
    result: Params = {}
    for name, variable in expected.items():
        array = np.asarray(arrays[name])
        if array.shape != variable.shape:
            raise ParamsError(f"weights {name!r}: got shape {array.shape}, expected {variable.shape}")
        if not np.isfinite(array).all():
            raise ParamsError(f"weights {name!r}: {int((~np.isfinite(array)).sum())} values are not finite")
        *parents, leaf = name.split(".")
        node = result
        for part in parents:
            node = node.setdefault(part, {})
        node[leaf] = array.astype(np.float32)
    return result


def weights_hash(params: Params) -> str:
    """A 16-digit hash of names, shapes and bytes; part of what a calibration is bound to."""
    digest = hashlib.sha256()
    for name, array in flatten(params).items():
        digest.update(f"{name}{array.shape}{array.dtype}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def model_hash(params: Params, config: ModelConfig, *use: Any) -> str:
    """A 16-digit hash of everything that moves a score: the weights, and how they are used and on what (JSON-like)."""
    model = dataclasses.asdict(config)
    if not config.grounded:
        del model["grounded"]  # younger than models that were saved without it
    return hashlib.sha256(f"{weights_hash(params)} {json.dumps((model, *use), sort_keys=True)}".encode()).hexdigest()[
        :16
    ]


def count(params: Params) -> int:
    """Number of scalar parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
