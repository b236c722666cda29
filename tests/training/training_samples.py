"""A learnable problem of four steps: an action along a hidden direction is the hazard and shapes what follows."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxguard.config import Config, ModelConfig, Stage1Config, Stage2Config, TrainConfig
from jaxguard.training.episodes import Episodes
from jaxguard.world_model.params import Params, init_params

DIM = 8
# Compiler options under which a gradient of the tiny model compiles in a tenth of the time; outermost functions only.
QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
}
CONFIG = Config(
    model=ModelConfig(embed_dim=DIM, deter=8, stoch=2, classes=3, hidden=8, adapter_dim=4),
    stage1=Stage1Config(steps=12, batch_size=4, learning_rate=3e-3),
    stage2=Stage2Config(steps=12, batch_size=4, learning_rate=3e-3),
    train=TrainConfig(validate_every=5, checkpoint_every=4),
)
SHAPES = jax.eval_shape(lambda: init_params(CONFIG.model, 7))


def start() -> Params:
    """Parameters in the shape of fresh ones (making those takes seconds of compilation)."""
    rng = np.random.default_rng(7)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if path[-1].key == "kernel":
            return (rng.normal(size=leaf.shape) * leaf.shape[0] ** -0.5).astype(np.float32)
        return np.full(leaf.shape, path[-1].key == "scale", np.float32)

    return jax.tree_util.tree_map_with_path(draw, SHAPES)


def make(count: int, seed: int, longest: int = 4) -> Episodes:
    """``count`` trajectories of 2 to ``longest`` steps; every second one ends with the hazard."""
    rng = np.random.default_rng(seed)
    hidden = np.random.default_rng(0).normal(size=(2, DIM)).astype(np.float32)
    table, rows, fresh, hazards = [], [], [], []
    for i in range(count):
        length = int(rng.integers(2, longest + 1))
        first = len(table)
        table.append(rng.normal(size=DIM))  # instruction
        act = rng.normal(size=(length, DIM)) * 0.3
        if i % 2:
            act[-1] += hidden[0]
        obs = np.concatenate([rng.normal(size=(1, DIM)) * 0.3, np.tanh(act) + hidden[1] * act[:, :1]])
        table += [*obs, *act]
        rows.append((np.arange(length + 1) + first + 1, np.arange(length) + first + length + 2, first))
        fresh.append(np.ones(length, bool))
        hazards.append(length - 1 if i % 2 else -1)
    return Episodes(
        table=np.asarray(table, np.float32),
        ids=tuple(f"{seed}-{i}" for i in range(count)),
        rows=tuple(rows),
        new_observation=tuple(fresh),
        hazard_step=np.array(hazards),
        unsafe=tuple(bool(i % 2) for i in range(count)),
        cut=0,
    )


def with_steps(config: Config, steps: int) -> Config:
    return dataclasses.replace(
        config,
        stage1=dataclasses.replace(config.stage1, steps=steps),
        stage2=dataclasses.replace(config.stage2, steps=steps),
    )
