"""Versions come from the installed packages, and a live guard starts without what it does not need."""

from __future__ import annotations

import subprocess
import sys

import flax
import jax
import numpy as np
import optax
import orbax.checkpoint

import jaxguard
from jaxguard.versions import versions


def test_versions_are_those_of_the_libraries() -> None:
    modules = {"jax": jax, "flax": flax, "optax": optax, "orbax": orbax.checkpoint, "numpy": np, "jaxguard": jaxguard}
    assert versions() == {name: module.__version__ for name, module in modules.items()}


def test_a_live_guard_starts_without_what_takes_seconds_to_import() -> None:
    code = "import jaxguard.guard, sys; print(*(m for m in sys.argv[1:] if m in sys.modules))"
    slow = ["scipy.stats", "orbax.checkpoint", "pandas", "torch", "transformers"]
    said = subprocess.run([sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True)
    assert said.stdout.split() == []
