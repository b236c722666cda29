"""The training loop of one stage: batches, checkpoints, validation, curves, and resuming bit for bit."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from jaxguard.config import Config, TrainConfig
from jaxguard.ranking import auroc
from jaxguard.settings import to_dict
from jaxguard.training.checkpoints import Checkpoints
from jaxguard.training.episodes import Episodes, TrainingError, epoch_batches, make_batch
from jaxguard.training.state import StepFunction, TrainState, make_step, make_validation
from jaxguard.world_model.losses import Batch
from jaxguard.world_model.params import Params, weights_hash
from jaxguard.writing import replacing


@dataclass(frozen=True)
class Position:
    """The next batch: pass over the data, and index within it."""

    epoch: int = 0
    batch: int = 0


@dataclass(frozen=True)
class StageResult:
    """Parameters that the stage hands on, steps done, and the validation loss they have (nan without one)."""

    params: Params
    steps: int
    validation_loss: float


def batch_stream(
    episodes: Data, batch_size: int, seed: int, start: Position, balance: bool = False
) -> Iterator[tuple[Position, Any]]:
    """Endless ``(position of the batch after, indices)`` from ``start`` on."""
    sources = episodes.source if balance else ()
    position = start
    while True:
        batches = epoch_batches(episodes.lengths, batch_size, seed, position.epoch, sources)
        for i in range(position.batch, len(batches)):
            last = i + 1 == len(batches)
            yield Position(position.epoch + 1, 0) if last else Position(position.epoch, i + 1), batches[i]
        position = Position(position.epoch + 1, 0)


class Data(Protocol):
    """What the loop asks of training data; the stage's own functions know the rest."""

    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def source(self) -> tuple[str, ...]: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def digest(self) -> str: ...


D = TypeVar("D", bound=Data)


@dataclass(frozen=True)
class Stage(Generic[D]):
    """What one kind of training has of its own.

    Attributes:
        name: For messages and the bar, e.g. ``"stage 1"``.
        steps, batch_size: Optimiser steps, and trajectories in each.
        identity: What a checkpoint must agree with to be resumed, beside the data and where training starts.
        transform: The optimiser.
        step: ``(state, batch) -> (state, metrics)``; metrics hold ``loss`` and ``grad_norm``.
        batch: ``(data, indices) -> batch``.
        validate: ``(params, data) -> means``; the parameters of the lowest ``loss`` are kept.
    """

    name: str
    steps: int
    batch_size: int
    identity: Mapping[str, Any]
    transform: optax.GradientTransformation
    step: StepFunction
    batch: Callable[[D, np.ndarray], Any]
    validate: Callable[[Params, D], dict[str, float]]


def stage_of(config: Config, stage: int) -> Stage[Episodes]:
    """Stage 1 (world model) or 2 (risk) of an experiment."""
    settings = config.stage1 if stage == 1 else config.stage2
    relevant = to_dict(config)
    del relevant["stage2"]["pooled"], relevant["train"]["half"]  # what is done after the stage
    if stage == 1:
        del relevant["model"]["successor"], relevant["model"]["heads"]  # how risk is read
    transform, step = make_step(config, stage)
    function = make_validation(config, stage)

    def batch(episodes: Episodes, indices: np.ndarray) -> Batch:
        return make_batch(episodes, indices, settings.batch_size, config.stage2)

    def validate(params: Params, episodes: Episodes) -> dict[str, float]:
        """Mean loss over all valid entries; in stage 2 also the step-level hazard AUROC."""
        total = weight = 0.0
        scores, labels = [], []
        for indices in epoch_batches(episodes.lengths, settings.batch_size, 0, 0):
            own = batch(episodes, indices)
            loss, mass, logits = function(params, own)
            total, weight = total + float(loss), weight + float(mass)
            if stage == 2:
                keep = np.asarray(own.supervised) > 0
                scores.append(np.asarray(logits)[keep])
                labels.append(np.asarray(own.hazard)[keep])
        result = {"loss": total / weight if weight else math.nan}
        if stage == 2:
            result["hazard_auroc"] = auroc(np.concatenate(scores), np.concatenate(labels))
        return result

    identity = {"stage": stage, "config": {k: relevant[k] for k in ("model", f"stage{stage}", "train")}}
    return Stage(f"stage {stage}", settings.steps, settings.batch_size, identity, transform, step, batch, validate)


class Curves:
    """Training curves as CSV (and TensorBoard where wanted); rows after a resumed step are dropped."""

    FIELDS = ("step", "epoch", "split", "loss", "grad_norm")

    def __init__(self, path: Path, resumed: int, tensorboard: bool):
        self._path = path
        self._rows = _rows_until(path, resumed) if path.exists() and resumed else []
        self._writer = None
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise TrainingError(
                    "train.tensorboard: tensorboardX is not installed; pip install 'jaxguard[tensorboard]'"
                ) from error
            self._writer = SummaryWriter(str(path.parent / "tensorboard"), flush_secs=10)

    def add(self, step: int, epoch: int, split: str, values: dict[str, float]) -> None:
        """Adds one row."""
        self._rows.append({"step": step, "epoch": epoch, "split": split, **values})
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{split}/{name}", value, step)

    def write(self) -> None:
        """Writes the CSV anew; a missing value is an empty cell."""
        fields = list(dict.fromkeys([*self.FIELDS, *(name for row in self._rows for name in row)]))
        with replacing(self._path) as (place,), place.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields, restval="")
            writer.writeheader()
            writer.writerows(self._rows)

    def close(self) -> None:
        """Lets TensorBoard's writer, a thread, write what it has."""
        if self._writer is not None:
            self._writer.close()


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of written curves up to a step."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if any(None in row or None in row.values() for row in rows):
            raise TrainingError(f"{path}: damaged (a row has more or fewer cells than the header); delete it to go on")
        return [row for row in rows if int(row["step"]) <= step]
    except (ValueError, KeyError, csv.Error) as error:
        raise TrainingError(f"{path}: damaged ({type(error).__name__}: {error}); delete it to go on") from error


def require_supervision(episodes: Episodes) -> None:
    """Refuses a training part from which stage 2 learns no hazard.

    Raises:
        TrainingError: no trajectory has a first hazard step.
    """
    if not (episodes.hazard_step >= 0).any():
        raise TrainingError(
            "stage 2: no training trajectory has a first hazard step to learn from, expected at least one "
            "(stage2.unlabelled_hazard=last_step supervises the last step of unsafe trajectories instead)"
        )


def train_stage(
    config: Config,
    stage: int,
    params: Params,
    train: Episodes,
    validation: Episodes | None,
    folder: Path,
    *,
    stop_after: int | None = None,
    progress: bool = True,
) -> StageResult:
    """Trains stage 1 or 2 of an experiment; see :func:`run_stage`.

    Raises:
        TrainingError: as there; or no trajectory of stage 2 has a hazard to learn from.
    """
    if stage == 2:
        require_supervision(train)
    own = stage_of(config, stage)
    return run_stage(own, config.train, params, train, validation, folder, stop_after=stop_after, progress=progress)


def run_stage(
    stage: Stage[D],
    settings: TrainConfig,
    params: Params,
    train: D,
    validation: D | None,
    folder: Path,
    *,
    stop_after: int | None = None,
    progress: bool = True,
) -> StageResult:
    """Trains one stage from ``params``, or goes on from the newest checkpoint in ``folder``.

    Args:
        stage: What is trained.
        settings: What all stages share.
        params: Where the stage starts; must be the same on every resume (it is part of the identity).
        train: Training data.
        validation: Data that choose the parameters handed on; ``None`` hands on the last ones.
        folder: Holds ``checkpoints/`` and ``curves.csv``.
        stop_after: Ends early after this many steps of this call, with a checkpoint.
        progress: Shows a bar on stderr.

    Raises:
        TrainingError: a loss is not finite (the batch is named), or a checkpoint does not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    identity = {
        **stage.identity,
        "training data": train.digest,
        "validation data": None if validation is None else validation.digest,
        "starting weights": weights_hash(params),
    }
    own = jax.tree.map(jnp.array, params)
    state = TrainState(own, stage.transform.init(own), jnp.zeros((), jnp.int32))
    best = jax.tree.map(jnp.array, params)  # a copy: the state's buffers are donated
    best_loss, position = math.inf, Position()
    checkpoints = Checkpoints(folder / "checkpoints", identity)
    if checkpoints.latest() is not None:
        state, best, meta = checkpoints.restore(state)
        position = Position(**meta["position"])
        best_loss = math.inf if meta["best_loss"] is None else meta["best_loss"]
    first = int(state.step)
    curves = Curves(folder / "curves.csv", first, settings.tensorboard)

    def save(done: int) -> None:
        curves.write()
        if checkpoints.latest() != done:
            finite = best_loss if math.isfinite(best_loss) else None
            checkpoints.save(state, best, {"position": vars(position), "best_loss": finite})

    last_wins = settings.select == "last"
    end = stage.steps if stop_after is None else min(stage.steps, first + stop_after)
    bar = tqdm(total=stage.steps, initial=first, desc=stage.name, unit="step", disable=not progress, mininterval=0.5)
    stream = batch_stream(train, stage.batch_size, settings.seed, position, settings.balance)
    done = first
    with bar, contextlib.closing(checkpoints), contextlib.closing(curves):
        for done in range(first + 1, end + 1):
            after, indices = next(stream)
            state, metrics = stage.step(state, stage.batch(train, indices))
            values = {name: float(value) for name, value in metrics.items()}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                names = ", ".join(train.ids[i] for i in indices)
                raise TrainingError(
                    f"{stage.name}, step {done}: loss is {values['loss']}, gradient norm {values['grad_norm']}, "
                    f"expected finite numbers. Batch {position.batch} of epoch {position.epoch}: {names}"
                )
            position = after
            if done % 10 == 0 or done == stage.steps:  # not at `end`: a stop must not show in the curves
                curves.add(done, position.epoch, "train", values)
                bar.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)
            if validation is not None and (done % settings.validate_every == 0 or done == stage.steps):
                result = stage.validate(state.params, validation)
                curves.add(done, position.epoch, "validation", result)
                if last_wins or result["loss"] < best_loss:
                    best_loss, best = result["loss"], jax.tree.map(jnp.array, state.params)
            if done % settings.checkpoint_every == 0 or done == end:
                save(done)
            bar.update()
    if not math.isfinite(best_loss) or (last_wins and done < stage.steps):
        return StageResult(state.params, done, math.nan)
    return StageResult(best, done, best_loss)
