"""Sweeping the threshold of a router: 10,000 taus over 100,000 rows, from host arrays to host arrays."""

from __future__ import annotations

import os

import numpy as np

from bench.measure import Unavailable, Variant, describe, lines, make, take_turns
from jaxguard.decision.routing import shares
from jaxguard.decision.routing_sweep import sweep
from jaxguard.types import Route


def numpy_sweep(logits: np.ndarray, labels: np.ndarray, taus: np.ndarray) -> np.ndarray:
    """The same counts with a sort and a search for each label."""
    found = shares(logits)
    out = np.zeros((len(taus), 3, 3), np.int64)
    for label in Route:
        own = labels == label
        q = np.sort(found.q[own & found.movable])
        out[:, label, Route.EXECUTE] = len(q) - np.searchsorted(q, taus, side="left")
        out[:, label, Route.REFUSE] = (own & found.refused).sum()
        out[:, label, Route.ASK] = own.sum() - out[:, label].sum(axis=1)
    return out


def test_sweep(benchmark, smoke: bool, say) -> None:
    """Rows times taus per second; the first call, compilation in it, is timed apart."""
    n, count = (1_000, 100) if smoke else (100_000, 10_000)
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(n, 3))).astype(np.float32)
    labels, taus = rng.integers(0, 3, n), rng.random(count)
    variants: dict[str, Variant | Unavailable] = {
        "jax product": make("jax", lambda: lambda _: sweep(logits, labels, taus)),
        "numpy": make("numpy", lambda: lambda _: numpy_sweep(logits, labels, taus)),
    }
    product, rival = variants["jax product"], variants["numpy"]
    assert isinstance(product, Variant)
    assert isinstance(rival, Variant)
    np.testing.assert_array_equal(product.run(0), rival.run(0))
    take_turns(variants, 3 if smoke else 20, turn=5, warm_up=1)
    cores = len(os.sched_getaffinity(0))
    benchmark.group = "Routing"
    case = {"rows": n, "taus": count}
    benchmark.extra_info.update(describe(variants, "Offline", case, items=n, threads=cores, turn=5))
    for line in lines(variants, f"Routing, {count:,} taus over {n:,} rows:"):
        say(line)
    say(f"Routing, first call of the sweep with its compilation: {product.compile_s:.2f} s")
    benchmark.pedantic(product.run, (0,), rounds=3)
