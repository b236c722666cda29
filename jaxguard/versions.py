"""Versions of what decides numeric results, found without importing it."""

from __future__ import annotations

from importlib.metadata import version

import jaxguard

_LIBRARIES = {"jax": "jax", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint", "numpy": "numpy"}


def versions() -> dict[str, str]:
    """By name, this package's own among them."""
    return {"jaxguard": jaxguard.__version__} | {name: version(package) for name, package in _LIBRARIES.items()}
