"""Training tests need the same few compiled functions again and again: once is enough."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from training_samples import QUICK

from jaxguard.training import loop
from jaxguard.training.state import make_step, make_validation


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Step functions are shared by runs of one configuration, and by child processes through this folder.

    Nothing is optimised: the code runs for milliseconds.
    """
    folder = tmp_path_factory.mktemp("cache")
    share_compilations(str(folder), 0.2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=QUICK))
        patch.setattr(loop, "make_step", functools.cache(make_step))
        patch.setattr(loop, "make_validation", functools.cache(make_validation))
        yield folder
    share_compilations(None, 1.0)


def share_compilations(folder: str | None, seconds: float) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    compilation_cache.reset_cache()
