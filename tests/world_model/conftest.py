"""A tiny model whose parameters are all away from their initial zeros and ones."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.world_model.params import Params, init_params


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    return ModelConfig(embed_dim=6, deter=8, stoch=2, classes=3, hidden=5, adapter_dim=4)


@pytest.fixture(scope="session")
def params(tiny: ModelConfig) -> Params:
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: init_params(tiny, seed=0))

    def noise(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        spread = rng.normal(size=leaf.shape) * (0.3 if name != "kernel" else leaf.shape[0] ** -0.5)
        return np.asarray(spread + (name == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(noise, shapes)


@pytest.fixture(scope="session")
def quick() -> dict[str, int | bool]:
    """Compiler options without optimisation: gradients of a tiny model take longer to compile than to run."""
    return {
        "xla_backend_optimization_level": 0,
        "xla_llvm_disable_expensive_passes": True,
        "xla_cpu_use_fusion_emitters": False,
    }


@pytest.fixture(scope="module")
def quick_compile(params: Params, quick: dict) -> Iterator[None]:
    """Makes them the default of a module; ``params`` come first, as they are for outermost functions only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=quick))
        yield
