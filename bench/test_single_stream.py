"""SingleStream: one session, one step, batch 1, host arrays in and a Python decision out; encoding apart.

At batch 1 a second thread costs more in hand-overs than it computes, so everything runs on one core. ``gap_ms`` is the
time that an agent takes between calls; caches are then cold, and a call costs several times as much.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest

from bench import floor, jax_variants, torch_variants
from bench.jax_variants import Step
from bench.measure import Unavailable, Variant, describe, lines, make, take_turns, with_transfers
from jaxguard.config import MODEL_PRESETS, ModelConfig
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.world_model.params import init_params

PACED = ("jax product", "torch eager", "onnxruntime")


def steps(config: ModelConfig, names: tuple[str, ...] | None = None) -> dict[str, Variant | Unavailable]:
    """The variants, compiled; all give the same risks."""
    params = init_params(config, 0)
    vectors = np.random.default_rng(0).normal(size=(16, config.embed_dim)).astype(np.float32)
    fusion, cutoffs = FusionParams(), Cutoffs(0.9, 0.8)
    every = {**jax_variants.VARIANTS, **torch_variants.VARIANTS}
    found: dict[str, Variant | Unavailable] = {}
    answers = {}
    for name in names or every:

        def build(name: str = name) -> Callable[[int], int]:
            step: Step = every[name](config, params)
            answers[name] = step(vectors[0], vectors[5])

            def run(i: int) -> int:
                hazard, prefix = step(vectors[i % 16], vectors[(i + 5) % 16])
                _, evidence = advance(EvidenceState(), hazard, prefix, fusion)
                return decide_step(evidence.hazard, evidence.fused, cutoffs)[0]

            return run

        framework = name.split()[0]
        found[name] = make(framework, build, slow=name in jax_variants.SLOW)
    for name, answer in answers.items():
        np.testing.assert_allclose(answer, answers["jax product"], atol=1e-5, err_msg=name)
    return found


@pytest.mark.parametrize("size", ["small", "paper"])
def test_back_to_back(benchmark, smoke: bool, say, one_core: str, size: str) -> None:
    if smoke and size != "small":
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    variants = steps(config, ("jax product", "jax split, jax.jit") if smoke else None)
    rounds = 20 if smoke else 2000
    take_turns(variants, rounds)
    read = floor.step_bytes(config)
    limits = floor.measure(read)
    # Each weight that is read is used for one multiplication and one addition.
    least = limits.floor_us(read, read / 2)
    product = variants["jax product"]
    assert isinstance(product, Variant)
    split = with_transfers(float(np.median(product.rounds_us)), np.zeros((2, 1, config.embed_dim), np.float32), 2)
    case = {"size": size, "gap_ms": 0}
    benchmark.group = f"SingleStream, {size}"
    benchmark.extra_info.update(
        describe(variants, "SingleStream", case, items=1, threads=1, floor_us=least, cores=one_core, split_us=split)
    )
    for line in lines(variants, f"SingleStream {size} ({one_core})"):
        say(line)
    say(f"SingleStream {size}: {np.median(product.rounds_us) / least['read']:.2f} x the time to read its weights")
    benchmark.pedantic(product.run, (3,), rounds=rounds, warmup_rounds=5)


@pytest.mark.parametrize(("size", "gap_ms"), [("small", 20), ("paper", 20), ("small", 500), ("paper", 500)])
def test_paced(benchmark, smoke: bool, say, one_core: str, size: str, gap_ms: int) -> None:
    if smoke:
        pytest.skip("left out of the smoke run")
    variants = steps(MODEL_PRESETS[size], PACED)
    for _ in range(150 if gap_ms < 100 else 20):
        for variant in variants.values():
            if isinstance(variant, Variant):
                time.sleep(gap_ms / 1e3)
                begin = time.perf_counter()
                variant.run(len(variant.rounds_us))
                variant.rounds_us.append((time.perf_counter() - begin) * 1e6)
    benchmark.group = f"SingleStream, {size}, paced"
    benchmark.extra_info.update(
        describe(variants, "SingleStream", {"size": size, "gap_ms": gap_ms}, items=1, threads=1, turn=1, cores=one_core)
    )
    for line in lines(variants, f"SingleStream {size}, a call every {gap_ms} ms"):
        say(line)
    product = variants["jax product"]
    assert isinstance(product, Variant)
    benchmark.pedantic(product.run, (3,), rounds=20)
