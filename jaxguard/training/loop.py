"""The training loop of one stage: batches, checkpoints, validation, curves, and resuming bit for bit."""

from __future__ import annotations

import contextlib
import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxguard.config import Config
from jaxguard.ranking import auroc
from jaxguard.settings import to_dict
from jaxguard.training.checkpoints import Checkpoints
from jaxguard.training.episodes import Episodes, TrainingError, epoch_batches, make_batch
from jaxguard.training.state import TrainState, make_step, make_validation
from jaxguard.world_model.params import Params, weights_hash


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
    episodes: Episodes, batch_size: int, seed: int, start: Position, balance: bool = False
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


def validate(config: Config, stage: int, function: Any, params: Params, episodes: Episodes) -> dict[str, float]:
    """Mean loss over all valid entries of ``episodes``; in stage 2 also the step-level hazard AUROC."""
    settings = config.stage1 if stage == 1 else config.stage2
    total = weight = 0.0
    scores, labels = [], []
    for indices in epoch_batches(episodes.lengths, settings.batch_size, 0, 0):
        batch = make_batch(episodes, indices, settings.batch_size, config.stage2)
        loss, mass, logits = function(params, batch)
        total, weight = total + float(loss), weight + float(mass)
        if stage == 2:
            keep = np.asarray(batch.supervised) > 0
            scores.append(np.asarray(logits)[keep])
            labels.append(np.asarray(batch.hazard)[keep])
    result = {"loss": total / weight if weight else math.nan}
    if stage == 2:
        result["hazard_auroc"] = auroc(np.concatenate(scores), np.concatenate(labels))
    return result


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
            self._writer = SummaryWriter(str(path.parent / "tensorboard"))

    def add(self, step: int, epoch: int, split: str, values: dict[str, float]) -> None:
        """Adds one row."""
        self._rows.append({"step": step, "epoch": epoch, "split": split, **values})
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{split}/{name}", value, step)

    def write(self) -> None:
        """Writes the CSV anew; a missing value is an empty cell."""
        fields = list(dict.fromkeys([*self.FIELDS, *(name for row in self._rows for name in row)]))
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fields, restval="")
            writer.writeheader()
            writer.writerows(self._rows)
        temporary.replace(self._path)


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
    """Trains one stage from ``params``, or goes on from the newest checkpoint in ``folder``.

    Args:
        config: The experiment; ``config.stage1`` or ``config.stage2`` sets the length and rates.
        stage: 1 (world model) or 2 (risk).
        params: Where the stage starts; must be the same on every resume (it is part of the identity).
        train: Training episodes.
        validation: Episodes that choose the parameters handed on; ``None`` hands on the last ones.
        folder: Holds ``checkpoints/`` and ``curves.csv``.
        stop_after: Ends early after this many steps of this call, with a checkpoint.
        progress: Shows a bar on stderr.

    Raises:
        TrainingError: a loss is not finite (the batch is named), or a checkpoint does not fit.
    """
    settings = config.stage1 if stage == 1 else config.stage2
    folder.mkdir(parents=True, exist_ok=True)
    if stage == 2:
        require_supervision(train)
    relevant = to_dict(config)
    del relevant["stage2"]["pooled"]  # fitted after the stage
    identity = {
        "stage": stage,
        "config": {k: relevant[k] for k in ("model", f"stage{stage}", "train")},
        "training data": train.digest,
        "validation data": None if validation is None else validation.digest,
        "starting weights": weights_hash(params),
    }
    transform, step_function = make_step(config, stage)
    validation_function = make_validation(config, stage)
    own = jax.tree.map(jnp.array, params)
    state = TrainState(own, transform.init(own), jnp.zeros((), jnp.int32))
    best = jax.tree.map(jnp.array, params)  # a copy: the state's buffers are donated
    best_loss, position = math.inf, Position()
    checkpoints = Checkpoints(folder / "checkpoints", identity)
    if checkpoints.latest() is not None:
        state, best, meta = checkpoints.restore(state)
        position = Position(**meta["position"])
        best_loss = math.inf if meta["best_loss"] is None else meta["best_loss"]
    first = int(state.step)
    curves = Curves(folder / "curves.csv", first, config.train.tensorboard)

    def save(done: int) -> None:
        curves.write()
        if checkpoints.latest() != done:
            finite = best_loss if math.isfinite(best_loss) else None
            checkpoints.save(state, best, {"position": vars(position), "best_loss": finite})

    last_wins = config.train.select == "last"
    end = settings.steps if stop_after is None else min(settings.steps, first + stop_after)
    bar = tqdm(
        total=settings.steps, initial=first, desc=f"stage {stage}", unit="step", disable=not progress, mininterval=0.5
    )
    stream = batch_stream(train, settings.batch_size, config.train.seed, position, config.train.balance)
    done = first
    with bar, contextlib.closing(checkpoints):
        for done in range(first + 1, end + 1):
            after, indices = next(stream)
            state, metrics = step_function(state, make_batch(train, indices, settings.batch_size, config.stage2))
            values = {name: float(value) for name, value in metrics.items()}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                names = ", ".join(train.ids[i] for i in indices)
                raise TrainingError(
                    f"stage {stage}, step {done}: loss is {values['loss']}, gradient norm {values['grad_norm']}, "
                    f"expected finite numbers. Batch {position.batch} of epoch {position.epoch}: {names}"
                )
            position = after
            if done % 10 == 0 or done == settings.steps:  # not at `end`: a stop must not show in the curves
                curves.add(done, position.epoch, "train", values)
                bar.set_postfix(loss=f"{values['loss']:.4f}", refresh=False)
            if validation is not None and (done % config.train.validate_every == 0 or done == settings.steps):
                result = validate(config, stage, validation_function, state.params, validation)
                curves.add(done, position.epoch, "validation", result)
                if last_wins or result["loss"] < best_loss:
                    best_loss, best = result["loss"], jax.tree.map(jnp.array, state.params)
            if done % config.train.checkpoint_every == 0 or done == end:
                save(done)
            bar.update()
    if not math.isfinite(best_loss) or (last_wins and done < settings.steps):
        return StageResult(state.params, done, math.nan)
    return StageResult(best, done, best_loss)
