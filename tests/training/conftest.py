"""Training tests compile the same few functions again and again: once is enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A persistent compilation cache, and no optimisation of code that runs for milliseconds."""
    folder = tmp_path_factory.mktemp("cache")
    set_compilation(str(folder), 0.2, True)
    yield folder
    set_compilation(None, 1.0, False)


def set_compilation(folder: str | None, seconds: float, quick: bool) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_disable_most_optimizations", quick)
    compilation_cache.reset_cache()
