"""MultiStream: a step of many live sessions in one call, host arrays in and decisions out, on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from bench import floor
from bench.measure import Unavailable, Variant, describe, lines, make, take_turns
from jaxguard.config import MODEL_PRESETS, ModelConfig
from jaxguard.decision.evidence import FusionParams, noisy_or
from jaxguard.decision.policy import Cutoffs, decide
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.scorer import Scorer

FUSION, CUTOFFS = FusionParams(), Cutoffs(0.9, 0.8)
Run = Callable[[int], np.ndarray]


def product(config: ModelConfig, params: Params, x: np.ndarray) -> Run:
    scorer, sessions = Scorer(config, params), x.shape[2]
    state = scorer.start_many(np.zeros((sessions, config.embed_dim), np.float32))
    ema = np.zeros(sessions)

    def run(i: int) -> np.ndarray:
        _, risks = scorer.step_many(state, *x[i % len(x)])
        hazard, prefix = risks.T.astype(np.float64)
        own = FUSION.beta * ema + (1 - FUSION.beta) * prefix
        return decide(hazard, noisy_or(hazard, own, prefix, FUSION.weights), CUTOFFS.block, CUTOFFS.hold).decision

    return run


def torch_twin(config: ModelConfig, params: Params, x: np.ndarray, compile: bool = False) -> Run:
    import torch

    from bench.torch_twin.model import Decider
    from bench.torch_twin.weights import twin
    from bench.torch_variants import use_cores

    use_cores()
    model, decider = twin(config, params), Decider(FUSION, CUTOFFS)

    def step(state, memory, obs, act):
        _, risks = model(state, obs, act)
        return decider(memory, risks)[2]

    call = torch.compile(step, fullgraph=True) if compile else step
    with torch.inference_mode():
        state = model.start(torch.zeros(x.shape[2], config.embed_dim))
        memory = decider.start(torch.zeros(x.shape[2]))

    def run(i: int) -> np.ndarray:
        with torch.inference_mode():
            return call(state, memory, *torch.from_numpy(x[i % len(x)])).numpy()

    return run


def onnx_runtime(config: ModelConfig, params: Params, x: np.ndarray) -> Run:
    from bench.torch_variants import export_session

    session, fixed = export_session(config, params, x.shape[2])
    ema = np.zeros(x.shape[2])

    def run(i: int) -> np.ndarray:
        obs, act = x[i % len(x)]
        hazard, prefix = session.run(None, {**fixed, "obs": obs, "act": act})[1].T.astype(np.float64)
        own = FUSION.beta * ema + (1 - FUSION.beta) * prefix
        return decide(hazard, noisy_or(hazard, own, prefix, FUSION.weights), CUTOFFS.block, CUTOFFS.hold).decision

    return run


@pytest.mark.parametrize("sessions", [8, 64, 256])
@pytest.mark.parametrize("size", ["small", "paper"])
def test_sessions_at_once(benchmark, smoke: bool, say, size: str, sessions: int) -> None:
    if smoke and (size, sessions) != ("small", 8):
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    params = init_params(config, 0)
    x = np.random.default_rng(0).normal(size=(4, 2, sessions, config.embed_dim)).astype(np.float32)
    variants: dict[str, Variant | Unavailable] = {"jax product": make("jax", lambda: product(config, params, x))}
    if not smoke:
        variants["torch eager"] = make("torch", lambda: torch_twin(config, params, x))
        variants["torch compile"] = make("torch", lambda: torch_twin(config, params, x, compile=True))
        variants["onnxruntime"] = make("onnxruntime", lambda: onnx_runtime(config, params, x))
    expected = variants["jax product"].run(1)
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            np.testing.assert_array_equal(variant.run(1), expected, err_msg=name)
    rounds = 10 if smoke else 200
    take_turns(variants, rounds, turn=10)
    read = floor.step_bytes(config)
    least = floor.measure(read).floor_us(read, sessions * floor.step_flops(config))
    benchmark.group = f"MultiStream, {size}"
    cores = len(os.sched_getaffinity(0))
    case = {"size": size, "batch": sessions}
    benchmark.extra_info.update(
        describe(variants, "MultiStream", case, items=sessions, threads=cores, turn=10, floor_us=least)
    )
    for line in lines(variants, f"MultiStream {size}, {sessions} sessions"):
        say(line)
    benchmark.pedantic(variants["jax product"].run, (3,), rounds=rounds)
