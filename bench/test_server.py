"""Server: calls arrive at random (Poisson) at a given rate and wait for each other; latency counts from arrival.

One server process, one core. A latency is the call's own time and what it waited for calls before it.
"""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest

from bench.measure import Unavailable, Variant, describe
from bench.test_single_stream import steps
from jaxguard.config import MODEL_PRESETS

NAMES = ("jax product", "torch eager", "onnxruntime")
RATES = (20, 100, 400, 1600)
BOUND_MS = 10.0
"""The p99 that counts as holding a rate."""


def serve(variant: Variant, rate: float, calls: int, seed: int) -> None:
    """Fills ``rounds_us`` with latencies of ``calls`` calls."""
    arrivals = np.random.default_rng(seed).exponential(1 / rate, calls).cumsum()
    variant.rounds_us.clear()
    variant.run(0)
    begin = time.perf_counter()
    for i, arrival in enumerate(arrivals):
        while (left := arrival - (time.perf_counter() - begin)) > 0:
            if left > 2e-3:  # sleeping is late by up to a millisecond
                time.sleep(left - 2e-3)
        variant.run(i)
        variant.rounds_us.append((time.perf_counter() - begin - arrival) * 1e6)


@functools.lru_cache
def compiled(size: str, names: tuple[str, ...]) -> dict[str, Variant | Unavailable]:
    """Once for all rates."""
    return steps(MODEL_PRESETS[size], names)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("size", ["small", "paper"])
def test_poisson_arrivals(benchmark, smoke: bool, say, one_core: str, size: str, rate: int) -> None:
    if smoke and (size, rate) != ("small", RATES[-1]):
        pytest.skip("left out of the smoke run")
    variants = compiled(size, NAMES[:1] if smoke else NAMES)
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            serve(variant, rate, 20 if smoke else max(200, min(1000, 5 * rate)), seed=rate)
            p99 = np.percentile(variant.rounds_us, 99) / 1e3
            holds = "holds" if p99 <= BOUND_MS else "does not hold"
            say(f"Server {size}, {rate} calls/s: {name} {holds} p99 <= {BOUND_MS:g} ms ({p99:.1f} ms)")
    case = {"size": size, "rate_per_s": rate}
    benchmark.group = f"Server, {size}"
    # Latencies of one busy period depend on each other: they are no turns to compare runs by.
    benchmark.extra_info.update(
        describe(
            variants, "Server", case, items=1, threads=1, turn=len(variants["jax product"].rounds_us), cores=one_core
        )
    )
    benchmark.pedantic(variants["jax product"].run, (3,), rounds=10)
