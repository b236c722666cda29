"""Server: calls arrive at random (Poisson) at a given rate and wait for each other; latency counts from arrival.

One server process, one core. A latency is the call's own time and what it waited for calls before it.
"""

from __future__ import annotations

import functools
import time

import numpy as np
import pytest

from bench.measure import PAUSE_S, Unavailable, Variant, describe
from bench.test_single_stream import steps
from jaxguard.config import MODEL_PRESETS

NAMES = ("jax product", "torch eager", "onnxruntime")
RATES = (20, 100, 400, 1600)
TURNS = 5
BOUND_MS = 10.0
"""The p99 that counts as holding a rate."""


def serve(variant: Variant, rate: float, calls: int, seed: int) -> list[float]:
    """Latencies of ``calls`` calls, in microseconds."""
    arrivals = np.random.default_rng(seed).exponential(1 / rate, calls).cumsum()
    latencies = []
    time.sleep(PAUSE_S)
    variant.run(0)
    begin = time.perf_counter()
    for i, arrival in enumerate(arrivals):
        while (left := arrival - (time.perf_counter() - begin)) > 0:
            if left > 2e-3:  # sleeping is late by up to a millisecond
                time.sleep(left - 2e-3)
        variant.run(i)
        latencies.append((time.perf_counter() - begin - arrival) * 1e6)
    return latencies


def holds(variant: Variant, rate: float) -> bool:
    """Whether the p99 over two seconds and more of calls stays within the bound."""
    latencies = serve(variant, rate, max(200, int(2 * rate)), seed=1)
    return float(np.percentile(latencies, 99)) <= BOUND_MS * 1e3


def highest_rate(variant: Variant) -> float:
    """The highest rate held, in steps of a tenth, by bisection; 0 where not even 20 calls/s are."""
    rates = 20 * 1.1 ** np.arange(63)
    low, high = -1, len(rates)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(variant, float(rates[middle])) else (low, middle)
    return float(rates[low]) if low >= 0 else 0.0


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
    runnable = {name: variant for name, variant in variants.items() if isinstance(variant, Variant)}
    calls = 20 if smoke else max(200, min(1000, 5 * rate)) // TURNS
    order = np.random.default_rng(0)
    for variant in runnable.values():
        variant.rounds_us.clear()
    for turn in range(1 if smoke else TURNS):
        for name in order.permutation(list(runnable)):
            runnable[name].rounds_us += serve(runnable[name], rate, calls, seed=turn)
    for name, variant in runnable.items():
        p50, p99 = np.percentile(variant.rounds_us, [50, 99]) / 1e3
        say(f"Server {size}, {rate} calls/s: {name} p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    benchmark.group = f"Server, {size}"
    # Latencies of one busy period depend on each other: a turn here is such a period.
    case = {"size": size, "rate_per_s": rate}
    benchmark.extra_info.update(describe(variants, "Server", case, items=1, threads=1, turn=calls, cores=one_core))
    benchmark.pedantic(variants["jax product"].run, (3,), rounds=10)


@pytest.mark.parametrize("size", ["small", "paper"])
def test_highest_rate(benchmark, smoke: bool, say, one_core: str, size: str) -> None:
    """Which rate each framework holds; the rounds are latencies at three quarters of it."""
    if smoke:
        pytest.skip("left out of the smoke run")
    variants = compiled(size, NAMES)
    found = {}
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            found[name] = highest_rate(variant)
            rate = 0.75 * found[name] or 10.0
            variant.rounds_us = serve(variant, rate, max(200, min(1000, int(5 * rate))), seed=2)
            say(f"Server {size}: {name} holds {found[name]:,.0f} calls/s with p99 <= {BOUND_MS:g} ms")
    benchmark.group = f"Server, {size}"
    case = {"size": size, "load": "three quarters of the highest rate", "p99_bound_ms": BOUND_MS}
    benchmark.extra_info.update(
        describe(variants, "Server", case, items=1, threads=1, turn=200, cores=one_core, holds_per_s=found)
    )
    benchmark.pedantic(variants["jax product"].run, (3,), rounds=10)
