"""What this machine can do at most: reading memory and multiplying matrices, on one core and on all."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxguard.config import ModelConfig
from jaxguard.world_model.params import build, init_params
from jaxguard.world_model.rssm import step_weights

NOT_IN_A_STEP = ("ins", "init", "init_out", "init_bias", "heads_e", "pooled")


class Limits(NamedTuple):
    """Best of several tries, because only other work on the machine makes it slower."""

    read_gb_s: float
    matmul_gflop_s: float

    def floor_us(self, read_bytes: float, flops: float) -> dict[str, float]:
        """Least microseconds for reading and for arithmetic."""
        return {"read": read_bytes / self.read_gb_s / 1e3, "matmul": flops / self.matmul_gflop_s / 1e3}


def measure(read_bytes: float) -> Limits:
    """A matrix of ``read_bytes`` times a vector, and a product of 1024 x 1024 matrices; on the cores allowed now.

    The size matters: what fits into the caches is read faster than memory allows.
    """
    rng = np.random.default_rng(0)
    matrix, vector, square = (
        jax.device_put(rng.normal(size=shape).astype(np.float32))
        for shape in ((int(read_bytes) // 8192, 2048), (2048,), (1024, 1024))
    )
    product = jax.jit(lambda a, b: a @ b)
    reading = _best(lambda: jax.block_until_ready(product(matrix, vector)), 50)
    multiplying = _best(lambda: jax.block_until_ready(product(square, square)), 20)
    return Limits(matrix.nbytes / reading / 1e9, 2 * 1024**3 / multiplying / 1e9)


def step_bytes(config: ModelConfig) -> float:
    """Bytes of weights that a live step of one session reads, in float32."""
    shapes = jax.eval_shape(lambda p: step_weights(build(config, p), config), init_params(config, 0))
    total = 0.0
    for name, value in shapes._asdict().items():
        if name not in NOT_IN_A_STEP:
            size = sum(4 * leaf.size for leaf in jax.tree.leaves(value))
            # Of the latents' matrices a step reads one row in C.
            total += size / config.classes if name in ("core_z", "read_z") else size
    return total


def step_flops(config: ModelConfig) -> float:
    """Floating-point operations of a step in a batch, where the latents are multiplied as one-hot vectors."""
    shapes = jax.eval_shape(lambda p: step_weights(build(config, p), config), init_params(config, 0))
    kernels = [
        leaf
        for name, value in shapes._asdict().items()
        if name not in NOT_IN_A_STEP
        for leaf in jax.tree.leaves(value)
        if leaf.ndim == 2
    ]
    return 2.0 * sum(leaf.size for leaf in kernels)


def _best(run: Callable[[], Any], tries: int) -> float:
    run()
    times = []
    for _ in range(tries):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)
