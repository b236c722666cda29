"""Training: a step of both stages, batch 8, 16 steps; batches are in memory, compilation apart."""

from __future__ import annotations

import os
from collections.abc import Callable

import jax
import numpy as np
import pytest

from bench.measure import Unavailable, Variant, describe, lines, make, take_turns
from jaxguard.config import MODEL_PRESETS, Config
from jaxguard.training.episodes import Episodes, make_batch
from jaxguard.training.state import TrainState, make_step
from jaxguard.world_model.losses import Batch
from jaxguard.world_model.params import init_params


def product(config: Config, stage: int, batch: Batch) -> Callable[[int], float]:
    transform, step = make_step(config, stage)
    params = init_params(config.model, 0)
    state = TrainState(params, transform.init(params), jax.numpy.zeros((), jax.numpy.int32))

    def run(_: int) -> float:
        nonlocal state
        state, metrics = jax.block_until_ready(step(state, batch))
        return float(metrics["loss"])

    return run


def torch_twin(config: Config, stage: int, batch: Batch, compile: bool = False) -> Callable[[int], float]:
    import torch

    from bench.torch_twin import losses
    from bench.torch_twin.weights import twin
    from bench.torch_variants import device

    place = device()
    model = twin(config.model, init_params(config.model, 0)).train().to(place)
    given = losses.Batch(*(torch.tensor(np.asarray(x), device=place) for x in batch))
    step = losses.make_step(model, config, stage, compile)
    return lambda _: step(given).item()


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("size", ["small", "paper"])
def test_training_step(benchmark, smoke: bool, say, size: str, stage: int) -> None:
    if smoke and size != "small":
        pytest.skip("left out of the smoke run")
    config = Config(model=MODEL_PRESETS[size])
    rng = np.random.default_rng(0)
    rows = 64
    table = rng.normal(size=(rows, config.model.embed_dim)).astype(np.float32)
    trajectories = tuple((rng.integers(0, rows, 17), rng.integers(0, rows, 16), 0) for _ in range(8))
    known, hazards = (np.ones(16, bool),) * 8, np.array([15, -1] * 4)
    episodes = Episodes(table, tuple(map(str, range(8))), trajectories, known, hazards, (None,) * 8, 0)
    batch = make_batch(episodes, np.arange(8), 8, config.stage2)
    variants: dict[str, Variant | Unavailable] = {"jax product": make("jax", lambda: product(config, stage, batch))}
    if not smoke:
        variants["torch eager"] = make("torch", lambda: torch_twin(config, stage, batch))
        if size == "paper":  # compiling the unrolled loop takes minutes, whatever the size
            variants["torch compile"] = make("torch", lambda: torch_twin(config, stage, batch, compile=True))
    rounds = 3 if smoke else 40
    take_turns(variants, rounds, turn=5)
    benchmark.group = f"Training, {size}"
    case = {"size": size, "stage": stage, "batch": 8, "steps": 16}
    cores = len(os.sched_getaffinity(0))
    benchmark.extra_info.update(describe(variants, "Training", case, items=8 * 16, threads=cores, turn=5))
    for line in lines(variants, f"Training {size}, stage {stage}"):
        say(line)
    benchmark.pedantic(variants["jax product"].run, (0,), rounds=rounds)
