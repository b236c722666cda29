"""On a GPU: the product's risks are those of the CPU, live and from archives, and every rival there agrees."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxguard.config import MODEL_PRESETS
from jaxguard.world_model.packing import Sequence
from jaxguard.world_model.params import init_params
from jaxguard.world_model.scorer import Scorer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() == "cpu", reason="jax sees no GPU"),
]
CONFIG = MODEL_PRESETS["small"]


def risks(device: jax.Device) -> tuple[np.ndarray, np.ndarray]:
    """Of one session's steps, and of an archive."""
    rng = np.random.default_rng(3)
    table = rng.normal(size=(50, CONFIG.embed_dim)).astype(np.float32)
    ids = rng.integers(0, 50, size=(20, 2, 12))
    # Otherwise a GPU may multiply with fewer bits than float32 has.
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        scorer = Scorer(CONFIG, init_params(CONFIG, 0))
        state, live = scorer.start(table[0]), []
        for obs, act in ids[0].T:
            state, *found = scorer.step(state, table[obs], table[act])
            live.append(found)
        stored = dict(scorer.score([Sequence(*own, 0) for own in ids], lambda rows: table[rows]))
    return np.array(live), np.stack([stored[i] for i in range(len(ids))])


def test_risks_are_those_of_the_cpu() -> None:
    cpu, gpu = risks(jax.devices("cpu")[0]), risks(jax.devices()[0])
    for expected, found in zip(cpu, gpu, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(gpu[1][0], gpu[0], atol=1e-5)


def test_rivals_agree_there() -> None:
    pytest.importorskip("torch")
    from bench.test_single_stream import steps

    with jax.default_matmul_precision("highest"):
        found = steps(CONFIG, ("jax product", "torch eager", "torch folded", "torch CUDA graph"))
    missing = {name: variant for name, variant in found.items() if not hasattr(variant, "run")}
    assert not missing
