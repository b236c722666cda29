"""Learnt rivals: networks on the guard's own vectors, trained by the guard's own loop on the same parts.

They take the settings of stage 2 (targets, mask, rate, schedule, dropout, balance) and as many optimiser steps as both
stages of the guard together; validation chooses the parameters, as it does there. Checkpoints make a second call read
instead of train; those of other data or settings are refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.special import expit

from jaxguard.baselines.networks import StepMLP, TraceGRU, Transformer
from jaxguard.baselines.rival import PrefixRival, RivalError, StepReader
from jaxguard.config import Config
from jaxguard.decision.evidence import FusionParams, noisy_or
from jaxguard.decision.fusion import FusionGrid, fit_fusion
from jaxguard.settings import to_dict
from jaxguard.training.episodes import Episodes, bucket, epoch_batches, make_batch
from jaxguard.training.loop import Stage, require_supervision, run_stage
from jaxguard.training.state import partitioned, step_function
from jaxguard.types import Trajectory
from jaxguard.world_model.losses import Batch, drop_inputs, reduce, risk_terms
from jaxguard.world_model.params import Params, build_as, init_params

# Late prefixes of a run say more about how it ends.
DISCOUNT = 0.9
# Both risks as they are; the other points weigh the one less than the other. Smoothing over steps is not for rivals.
PLAIN = FusionParams(beta=0.0, window=1, w_hazard=1.0, w_ema=1.0, w_win=0.0)
GRID = FusionGrid(beta=(0.0,), window=(1,), w_hazard=(0.0, 0.5, 1.0), w_win=(0.0,))


class Network(NamedTuple):
    """What kind of network a rival is, and what it learns from."""

    module: Callable[..., nnx.Module]
    step_labels: bool


NETWORKS = {
    "step-mlp": Network(StepMLP, step_labels=True),
    "transformer": Network(Transformer, step_labels=True),
    "trace-gru": Network(TraceGRU, step_labels=False),
}
"""``step-mlp``: the current step alone. ``transformer``: attention over all steps so far. ``trace-gru``: after TRACES,
a state of the run and the risk of a prefix, learnt from trajectory labels alone; only this much is taken from there.
Every prefix t of a run of T steps has the run's label, with weight ``DISCOUNT ** (T - 1 - t)``: the risk says how
likely a run that began like this one is to be unsafe."""


class NeuralRival(PrefixRival):
    """A trained network of :data:`NETWORKS`, asked window by window.

    The risk of step t is read from a window whose start and size follow from t alone, so that it is the same, bit for
    bit, however long the run is. Runs longer than ``train.max_steps`` are read in windows of that size which overlap by
    half.
    """

    def __init__(self, name: str, config: Config, params: Params, reader: StepReader):
        self.name = name
        self._tolerance = config.decision.fusion_tolerance
        self._limit, self._reader, self._step_labels = config.train.max_steps, reader, NETWORKS[name].step_labels
        self.fusion = PLAIN
        module = NETWORKS[name].module

        def logits(params: Params, obs: jax.Array, act: jax.Array, ins: jax.Array) -> jax.Array:
            return build_as(module, config.model, params)(obs[None], act[None], ins[None])[0]

        self._params, self._logits = jax.tree.map(jnp.asarray, params), jax.jit(logits)

    def heads(self, trajectory: Trajectory) -> np.ndarray:
        """Hazard and prefix risks ``[T, 2]``."""
        obs, act, ins = self._reader(trajectory)
        risks = np.empty((len(act), 2))
        for start, size, first, end in windows(len(act), self._limit):
            padded = [np.zeros((size, part.shape[1]), np.float32) for part in (obs, act)]
            for place, part in zip(padded, (obs, act), strict=True):
                own = part[start : start + size]
                place[: len(own)] = own
            found = np.asarray(self._logits(self._params, *padded, ins), np.float64)
            risks[first:end] = expit(found[first - start : end - start])
        return risks

    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks: the noisy-or of both where there were step labels, else the prefix risk."""
        hazard, prefix = self.heads(trajectory).T
        return noisy_or(hazard, prefix, prefix, self.fusion.weights) if self._step_labels else prefix

    def choose_fusion(self, validation: Sequence[Trajectory], calibration_ids: Collection[str]) -> None:
        """Weighs both risks as the guard's fusion does, on validation runs; the weights stay 1 where those are few."""
        labelled = [t for t in validation if t.unsafe is not None and t.steps]
        if not labelled or not self._step_labels:
            return
        hazard, prefix = np.concatenate([self.heads(t) for t in labelled]).T
        self.fusion = fit_fusion(
            hazard,
            prefix,
            [len(t) for t in labelled],
            [bool(t.unsafe) for t in labelled],
            first_hazard=[-1 if t.first_hazard is None else t.first_hazard for t in labelled],
            ids=[t.id for t in labelled],
            calibration_ids=calibration_ids,
            grid=GRID,
            default=PLAIN,
            tolerance=self._tolerance,
        ).params


def windows(length: int, limit: int) -> list[tuple[int, int, int, int]]:
    """``(start, size, first, end)``: steps first..end-1 are read from the window of ``size`` steps at ``start``.

    Start and size of the window of step t depend on t and on ``limit`` alone.
    """
    found, done, stride = [], 0, max(limit // 2, 1)
    while done < length:
        start = 0 if done < limit else ((done - limit) // stride + 1) * stride
        size = limit if start else min(bucket(done + 1), limit)
        found.append((start, size, done, min(start + size, length)))
        done = start + size
    return found


def fit_network(
    name: str,
    config: Config,
    train: Episodes,
    validation: Episodes | None,
    folder: Path,
    *,
    progress: bool = True,
) -> Params:
    """Trains a network of :data:`NETWORKS`, goes on where an earlier call stopped, or reads what that one finished.

    Raises:
        RivalError: the training part lacks the labels that it learns from.
        TrainingError: a loss is not finite, or ``folder`` holds checkpoints of other data or settings.
    """
    network, own = NETWORKS[name], config.stage2
    if network.step_labels:
        require_supervision(train)
    elif len({label for label in train.unsafe if label is not None}) < 2:
        raise RivalError(f"rival {name!r}: expected safe and unsafe training trajectories, got those of one label")
    settings = dataclasses.replace(own, steps=config.stage1.steps + own.steps)

    def label(params: Params) -> dict[str, str]:
        return dict.fromkeys(params, "full")

    transform = partitioned(settings, 1.0, label)

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict[str, jax.Array]]:
        if key is not None and own.input_dropout:
            batch = drop_inputs(batch, key, own.input_dropout)
        model = build_as(network.module, config.model, params)
        logits = model(batch.obs[:, :-1], batch.act[:, :-1], batch.ins)
        # Trajectory labels teach no hazard: its logit is left alone.
        scales = {"hazard": float(network.step_labels), "prefix": 1.0}
        return reduce(risk_terms(logits, batch, own.positive_weight), scales)

    @jax.jit
    def summed(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        mass = batch.supervised.sum()
        return loss(params, batch, None)[0] * mass, mass

    def batch(episodes: Episodes, indices: np.ndarray) -> Batch:
        made = make_batch(episodes, indices, own.batch_size, own)
        return made if network.step_labels else label_prefixes(made, [episodes.unsafe[i] for i in indices])

    def validate(params: Params, episodes: Episodes) -> dict[str, float]:
        found = [
            summed(params, batch(episodes, indices))
            for indices in epoch_batches(episodes.lengths, own.batch_size, 0, 0)
        ]
        total, mass = np.asarray(found, np.float64).sum(axis=0)
        return {"loss": total / mass if mass else float("nan")}

    whole = to_dict(config)
    identity = {
        "rival": name,
        "config": {part: whole[part] for part in ("model", "stage2", "train")} | {"steps": settings.steps},
        "discount": DISCOUNT,
        "labels": [hashlib.sha256(repr(e.unsafe).encode()).hexdigest()[:16] for e in (train, validation) if e],
    }
    step = step_function(transform, loss, config.train.seed * 2 + 3, label)
    stage = Stage(name, settings.steps, own.batch_size, identity, transform, step, batch, validate)
    start = init_params(config.model, config.train.seed, network.module)
    return run_stage(stage, config.train, start, train, validation, folder, progress=progress).params


def label_prefixes(batch: Batch, labels: Sequence[bool | None]) -> Batch:
    """Every prefix has its run's label, later ones more weight; runs without a label teach nothing."""
    prefix, weight = np.zeros_like(batch.prefix), np.zeros_like(batch.supervised)
    for row, label in enumerate(labels):
        if label is not None:
            length = int(batch.valid[row].sum())
            prefix[row, :length] = float(label)
            weight[row, :length] = DISCOUNT ** np.arange(length - 1, -1, -1)
    return batch._replace(hazard=np.zeros_like(prefix), prefix=prefix, supervised=weight)  # type: ignore[arg-type]
