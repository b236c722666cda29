"""Lanes shared out to several devices: the same bits as on one, compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import jax, numpy as np
from jaxguard.config import ModelConfig
from jaxguard.world_model.packing import CHUNK, LANES, Sequence
from jaxguard.world_model.params import init_params
from jaxguard.world_model.scorer import Scorer

config = ModelConfig(embed_dim=24, deter=32, stoch=4, classes=4, hidden=32, adapter_dim=8)
rng = np.random.default_rng(1)
params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), init_params(config, 0))
table = rng.normal(size=(3000, 24)).astype(np.float32)
items = [
    Sequence(*rng.integers(0, 3000, size=(2, n)), int(rng.integers(0, 3000)))
    for n in [0, 1, 700, *rng.integers(1, 40, size=700)]
]
assert len(jax.local_devices()) == 4
assert Scorer(config, params)._mesh is None  # CPUs: only when asked
one = Scorer(config, params, jax.local_devices()[:1])
four = Scorer(config, params, jax.local_devices())
chunk, shards = four._chunk, []


def watched(*arguments):
    last, risks = chunk(*arguments)
    shards.extend(shard.data.shape for shard in risks.addressable_shards)
    return last, risks


four._chunk = watched
expected = dict(one.score(items, lambda rows: table[rows]))
for order in (rng.permutation(len(items)), range(40)):
    found = dict(four.score([items[i] for i in order], lambda rows: table[rows]))
    assert len(found) == len(order)
    for position, index in enumerate(order):
        np.testing.assert_array_equal(found[position], expected[index])
assert np.ptp(np.concatenate(list(expected.values()))) > 0.01
assert set(shards) == {(CHUNK, LANES, 2)}
assert [f._cache_size() for f in (chunk, *(kind.write for kind in four._kinds))] == [1, 1, 1, 1]
"""


@pytest.mark.slow
def test_verdicts_on_four_devices_have_the_bits_of_one() -> None:
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, cwd=root, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
