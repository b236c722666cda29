"""The router: one live decision beside a guard's, and 10,000 taus over 100,000 rows, from and to host arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest

from bench.measure import Unavailable, Variant, describe, lines, make, take_turns
from jaxguard.config import MODEL_PRESETS
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.decision.routing import route_step, shares
from jaxguard.decision.routing_sweep import sweep
from jaxguard.types import Route
from jaxguard.world_model.params import init_params
from jaxguard.world_model.routing import ROUTES, RouteHead, RouteScorer
from jaxguard.world_model.scorer import Scorer


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


@pytest.mark.parametrize("size", ["small", "paper"])
def test_live_decision(benchmark, smoke: bool, say, one_core: str, size: str) -> None:
    """Batch 1, vectors in, a Python decision out: the router's in turns with the guard's; encoding apart."""
    if smoke and size != "small":
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    world = init_params(config, 0)
    vectors = np.random.default_rng(0).normal(size=(16, config.embed_dim)).astype(np.float32)

    def guard():
        scorer = Scorer(config, world)
        state = scorer.start(vectors[0])
        fusion, cutoffs = FusionParams(), Cutoffs(0.9, 0.8)

        def run(i: int) -> int:
            _, hazard, prefix = scorer.step(state, vectors[i % 16], vectors[(i + 5) % 16])
            _, evidence = advance(EvidenceState(), hazard, prefix, fusion)
            return int(decide_step(evidence.hazard, evidence.fused, cutoffs)[0])

        return run

    def router():
        scorer = RouteScorer(config, {"world": world, "head": init_params(config, 1, RouteHead)})
        state = scorer.start(vectors[0], vectors[1])

        def run(i: int) -> int:
            _, logits = scorer.step(state, *(vectors[(i + k) % 16] for k in (0, 5, 7, 11)))
            return int(route_step(logits[:ROUTES].tolist(), 0.5)[0])

        return run

    variants: dict[str, Variant | Unavailable] = {
        "jax product": make("jax", guard),
        "jax router": make("jax", router),
    }
    rounds = 20 if smoke else 2000
    take_turns(variants, rounds)
    benchmark.group = f"Routing, {size}"
    case = {"size": size, "gap_ms": 0}
    benchmark.extra_info.update(describe(variants, "SingleStream", case, items=1, threads=1, cores=one_core))
    for line in lines(variants, f"Routing {size}, live decision ({one_core})"):
        say(line)
    routed = variants["jax router"]
    assert isinstance(routed, Variant)
    benchmark.pedantic(routed.run, (3,), rounds=rounds, warmup_rounds=5)
