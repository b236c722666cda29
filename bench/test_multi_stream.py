"""MultiStream: a step of many live sessions in one call, host arrays in and decisions out, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from bench import floor
from bench.measure import Unavailable, Variant, describe, lines, make, take_turns, with_transfers
from jaxguard.config import MODEL_PRESETS, ModelConfig
from jaxguard.decision.evidence import FusionParams, noisy_or
from jaxguard.decision.policy import Cutoffs, decide
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.scorer import Scorer

FUSION, CUTOFFS = FusionParams(), Cutoffs(0.9, 0.8)
Run = Callable[[int], np.ndarray]


def product(config: ModelConfig, params: Params, x: np.ndarray, precision: str = "float32") -> Run:
    scorer = Scorer(config, params, precision=precision)
    state = scorer.start_many(np.zeros((x.shape[2], config.embed_dim), np.float32))
    return lambda i: scorer.step_many(state, *x[i % len(x)])[1]


def torch_twin(config: ModelConfig, params: Params, x: np.ndarray, compile: bool = False, half: bool = False) -> Run:
    import torch

    from bench.torch_twin.weights import twin
    from bench.torch_variants import device

    place = device()
    model = twin(config, params).to(place)
    call = torch.compile(model, fullgraph=True, options={"freezing": True}) if compile else model
    with torch.inference_mode():
        state = model.start(torch.zeros(x.shape[2], config.embed_dim, device=place))

    def run(i: int) -> np.ndarray:
        with torch.inference_mode(), torch.autocast(place.type, torch.bfloat16, enabled=half):
            return call(state, *torch.from_numpy(x[i % len(x)]).to(place))[1].float().cpu().numpy()

    return run


def onnx_runtime(config: ModelConfig, params: Params, x: np.ndarray) -> Run:
    from bench.torch_variants import export_session

    session, fixed = export_session(config, params, x.shape[2])
    return lambda i: session.run(None, {**fixed, **dict(zip(("obs", "act"), x[i % len(x)], strict=True))})[1]


def deciding(scored: Callable[[], Run], sessions: int) -> Callable[[], Run]:
    """Adds to risks ``[B, 2]`` what follows from them, the same for all variants."""
    ema, window = np.full(sessions, 0.2), np.full((FUSION.window - 1, sessions), 0.2)

    def build() -> Run:
        risks_of = scored()

        def run(i: int) -> np.ndarray:
            risks = risks_of(i)
            hazard, prefix = risks.T.astype(np.float64)
            own = FUSION.beta * ema + (1 - FUSION.beta) * prefix
            win = (window.sum(axis=0) + prefix) / FUSION.window
            decide(hazard, noisy_or(hazard, own, win, FUSION.weights), CUTOFFS.block, CUTOFFS.hold)
            return risks

        return run

    return build


@pytest.mark.parametrize("sessions", [8, 64, 256])
@pytest.mark.parametrize("size", ["small", "paper"])
def test_sessions_at_once(benchmark, smoke: bool, say, size: str, sessions: int) -> None:
    if smoke and (size, sessions) != ("small", 8):
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    params = init_params(config, 0)
    x = np.random.default_rng(0).normal(size=(4, 2, sessions, config.embed_dim)).astype(np.float32)
    variants: dict[str, Variant | Unavailable] = {
        "jax product": make("jax", deciding(lambda: product(config, params, x), sessions))
    }
    if not smoke:
        variants["torch eager"] = make("torch", deciding(lambda: torch_twin(config, params, x), sessions))
        variants["torch compile"] = make("torch", deciding(lambda: torch_twin(config, params, x, True), sessions))
        variants["onnxruntime"] = make("onnxruntime", deciding(lambda: onnx_runtime(config, params, x), sessions))
        half: dict[str, tuple[str, Callable[[], Run]]] = {
            "jax product, bfloat16": ("jax", lambda: product(config, params, x, "bfloat16")),
            "torch eager, bfloat16": ("torch", lambda: torch_twin(config, params, x, half=True)),
        }
        for name, (framework, build) in half.items():
            variants[name] = make(framework, deciding(build, sessions), dtype="bfloat16")
    expected = variants["jax product"].run(1)
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            atol = (
                1e-5 if variant.dtype == "float32" else 0.2
            )  # random weights; tests/test_default_guard.py has trained ones
            np.testing.assert_allclose(variant.run(1), expected, atol=atol, err_msg=name)
    rounds = 10 if smoke else 200
    take_turns(variants, rounds, turn=10)
    read = floor.step_bytes(config)
    least = floor.measure(read).floor_us(read, sessions * floor.step_flops(config))
    benchmark.group = f"MultiStream, {size}"
    cores = len(os.sched_getaffinity(0))
    case = {"size": size, "batch": sessions}
    ours = variants["jax product"]
    assert isinstance(ours, Variant)
    split = with_transfers(float(np.median(ours.rounds_us)), x[0], 2 * sessions)
    benchmark.extra_info.update(
        describe(variants, "MultiStream", case, items=sessions, threads=cores, turn=10, floor_us=least, split_us=split)
    )
    for line in lines(variants, f"MultiStream {size}, {sessions} sessions"):
        say(line)
    benchmark.pedantic(ours.run, (3,), rounds=rounds)
