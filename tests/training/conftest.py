"""Training tests need the same few compiled functions again and again: once is enough."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxguard.training import loop
from jaxguard.training.state import make_step, make_validation


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Step functions are shared by runs of one configuration, and by child processes through this folder.

    Nothing is optimised: the code runs for milliseconds.
    """
    folder = tmp_path_factory.mktemp("cache")
    set_compilation(str(folder), 0.2, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_step", functools.cache(make_step))
        patch.setattr(loop, "make_validation", functools.cache(make_validation))
        yield folder
    set_compilation(None, 1.0, False)


def set_compilation(folder: str | None, seconds: float, quick: bool) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    jax.config.update("jax_disable_most_optimizations", quick)
    compilation_cache.reset_cache()
