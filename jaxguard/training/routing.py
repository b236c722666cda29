"""The routing stage: reviewed steps as batches, and cross-entropy on the router's three logits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxguard.features.grounding import route_texts
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.route_config import RouteConfig, RouteStageConfig
from jaxguard.settings import to_dict
from jaxguard.traces.snapshots import reviews_of
from jaxguard.training.episodes import TrainingError, bucket, epoch_batches
from jaxguard.training.loop import Stage
from jaxguard.training.state import partitioned, step_function
from jaxguard.types import Trajectory
from jaxguard.world_model.params import CORE, HEADS, POOLED, PREDICTOR, Params
from jaxguard.world_model.routing import LETTERS, ROUTES, RouteInputs, route_logits


class RouteRows(NamedTuple):
    """A trajectory of T steps as rows of a feature table."""

    obs: np.ndarray  # [T]
    act: np.ndarray  # [T]
    ins: int
    memory: int
    evidence: np.ndarray  # [T]
    note: np.ndarray  # [T]


@dataclass(frozen=True)
class RouteEpisodes:
    """Trajectories with at least one reviewed step, cut after the last one.

    Attributes:
        table: ``[N, E]`` float32, the vector of every distinct text.
        ids: One per trajectory.
        rows: Per trajectory.
        labels: Per trajectory ``[T]`` int: value of the :class:`~jaxguard.types.Route`, -1 for a step without review.
        triggers: The same for the place of the trigger in :data:`~jaxguard.world_model.routing.LETTERS`, -1 where it
            is not known.
        source: The set that each trajectory comes from.
        unreviewed: How many trajectories have no reviewed step within the limit, and were left out.
    """

    table: np.ndarray
    ids: tuple[str, ...]
    rows: tuple[RouteRows, ...]
    labels: tuple[np.ndarray, ...]
    triggers: tuple[np.ndarray, ...]
    source: tuple[str, ...]
    unreviewed: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each trajectory, ``[n]``."""
        return np.array([len(rows.act) for rows in self.rows], np.int64)

    @property
    def digest(self) -> str:
        """A 16-digit hash of vectors, texts' places and labels: what a checkpoint is bound to."""
        digest = hashlib.sha256(repr((self.ids, self.table.shape)).encode())
        digest.update(np.ascontiguousarray(self.table).tobytes())
        for parts in zip(self.rows, self.labels, self.triggers, strict=True):
            digest.update(repr([np.asarray(part).tolist() for part in (*parts[0], *parts[1:])]).encode())
        return digest.hexdigest()[:16]


class RouteBatch(NamedTuple):
    """Padded trajectories with the way their reviewed steps should go."""

    x: RouteInputs
    route: jax.Array  # [B, T] int, -1 where there is no review
    trigger: jax.Array  # [B, T] int, -1 where it is not known


class RouteTextRows:
    """Gives texts their rows: what both training and scoring make of a trajectory.

    Args:
        settings: Says what is taken away; its text is then the empty one, whose vector is zero.
        thought: Put the agent's reasoning before each action.
    """

    def __init__(self, settings: RouteStageConfig, *, thought: bool = False):
        self._settings, self._thought = settings, thought
        self.texts: dict[str, int] = {}

    def rows(self, trajectory: Trajectory, length: int) -> RouteRows:
        """Of the first ``length`` steps."""
        own, known = trajectory_texts(trajectory, thought=self._thought), route_texts(trajectory)
        memory, grounding = self._settings.memory, self._settings.grounding

        def of(texts: Sequence[str], kept: bool = True) -> np.ndarray:
            return np.array(
                [self.texts.setdefault(text if kept else "", len(self.texts)) for text in texts[:length]], np.int64
            )

        return RouteRows(
            of(own.observations),
            of(own.actions),
            self.texts.setdefault(own.instruction, len(self.texts)),
            self.texts.setdefault(known.memory if memory else "", len(self.texts)),
            of(known.evidence, grounding),
            of(known.notes, memory and grounding),
        )


def make_route_episodes(
    trajectories: Sequence[Trajectory], store: FeatureStore, config: RouteConfig, part: str = "train"
) -> RouteEpisodes:
    """Looks every text up in the store; ``part`` names the trajectories in messages.

    Raises:
        TrainingError: no trajectory has a reviewed step.
        JaxguardError: a text is not in the store, or reviews or memory are not what they should be.
    """
    texts = RouteTextRows(config.route, thought=config.data.thought)
    ids, rows, labels, triggers, sources = [], [], [], [], []
    for trajectory in trajectories:
        reviews = [review for review in reviews_of(trajectory) if review.step < config.train.max_steps]
        if not reviews:
            continue
        own, why = (np.full(reviews[-1].step + 1, -1, np.int64) for _ in range(2))
        for review in reviews:
            own[review.step] = review.route
            if review.trigger:
                why[review.step] = LETTERS.index(review.trigger)
        ids.append(trajectory.id)
        rows.append(texts.rows(trajectory, len(own)))
        labels.append(own)
        triggers.append(why)
        sources.append(trajectory.source)
    if not ids:
        raise TrainingError(
            f"{part} part: got {len(trajectories)} trajectories, none with a reviewed step among its first "
            f"{config.train.max_steps}, expected one"
        )
    if missing := store.missing(list(texts.texts)):
        raise TrainingError(
            f"feature store {store.path}: {len(missing):,} of {len(texts.texts):,} texts of the {part} part have no "
            f"vector, the first is {missing[0]!r:.80}; `jaxguard embed --router --store {store.path} --trajectories "
            "DIR` embeds them"
        )
    table = store.get(list(texts.texts))
    return RouteEpisodes(
        table, tuple(ids), tuple(rows), tuple(labels), tuple(triggers), tuple(sources), len(trajectories) - len(ids)
    )


def pad_rows(table: np.ndarray, rows: Sequence[RouteRows], batch_size: int) -> RouteInputs:
    """Rows as vectors, padded with zeros to their bucket and to ``batch_size``."""
    size = bucket(max(len(own.act) for own in rows))

    def steps(name: str) -> np.ndarray:
        out = np.zeros((batch_size, size, table.shape[1]), np.float32)
        for at, own in enumerate(rows):
            places = getattr(own, name)
            out[at, : len(places)] = table[places]
        return out

    def once(name: str) -> np.ndarray:
        out = np.zeros((batch_size, table.shape[1]), np.float32)
        out[: len(rows)] = table[[getattr(own, name) for own in rows]]
        return out

    parts: dict[str, Any] = {name: steps(name) for name in ("obs", "act", "evidence", "note")}
    return RouteInputs(ins=once("ins"), memory=once("memory"), **parts)  # type: ignore[arg-type]


def make_route_batch(episodes: RouteEpisodes, indices: np.ndarray, batch_size: int) -> RouteBatch:
    """The named trajectories as NumPy arrays."""
    x = pad_rows(episodes.table, [episodes.rows[i] for i in indices], batch_size)
    route, trigger = (np.full(x.act.shape[:2], -1, np.int64) for _ in range(2))
    for at, index in enumerate(indices):
        for padded, labels in ((route, episodes.labels[index]), (trigger, episodes.triggers[index])):
            padded[at, : len(labels)] = labels
    return RouteBatch(x, route, trigger)  # type: ignore[arg-type]


def drop_route_inputs(x: RouteInputs, key: jax.Array, share: float) -> RouteInputs:
    """Sets ``share`` of the entries of every input to zero and scales the rest up."""
    kept = [
        part * jax.random.bernoulli(k, 1.0 - share, part.shape) / (1.0 - share)
        for k, part in zip(jax.random.split(key, len(x)), x, strict=True)
    ]
    return RouteInputs(*kept)


def _entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy summed over the entries whose label is not -1, and how many those are: ``[2]``."""
    known = labels >= 0
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(known, labels, 0))
    return jnp.stack([(entropy * known).sum(), known.sum().astype(entropy.dtype)])


def route_stage(config: RouteConfig) -> Stage[RouteEpisodes]:
    """Training of ``{"world": ..., "head": ...}`` on reviewed steps."""
    settings, model = config.route, config.model
    frozen = {*HEADS, *POOLED, *PREDICTOR, *(() if settings.train_core else CORE)}

    def label(params: Params) -> dict[str, Any]:
        return {"world": {n: "frozen" if n in frozen else "scaled" for n in params["world"]}, "head": "full"}

    transform = partitioned(settings, settings.world_model_scale, label)

    def terms(params: Params, batch: RouteBatch, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Entropies and counts ``[2, 2]`` of routes and of triggers, and the routes' logits."""
        x = batch.x
        if key is not None and settings.input_dropout:
            key, own = jax.random.split(key)
            x = drop_route_inputs(x, own, settings.input_dropout)
        found = route_logits(params, model, x, key, settings.recurrence)
        routes, triggers = found[..., :ROUTES], found[..., ROUTES:]
        return jnp.stack([_entropy(routes, batch.route), _entropy(triggers, batch.trigger)]), routes

    def total(sums: Any) -> jax.Array:
        route, trigger = sums[:, 0] / jnp.maximum(sums[:, 1], 1)
        return route + settings.trigger_scale * trigger

    def loss(params: Params, batch: RouteBatch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return total(terms(params, batch, key)[0]), {}

    judge = jax.jit(lambda params, batch: terms(params, batch, None))

    def batch(episodes: RouteEpisodes, indices: np.ndarray) -> RouteBatch:
        return make_route_batch(episodes, indices, settings.batch_size)

    def validate(params: Params, episodes: RouteEpisodes) -> dict[str, float]:
        sums, right = np.zeros((2, 2)), 0
        for indices in epoch_batches(episodes.lengths, settings.batch_size, 0, 0):
            own = batch(episodes, indices)
            found, logits = judge(params, own)
            sums += np.asarray(found)
            right += int((np.asarray(logits).argmax(-1) == own.route).sum())
        return {"loss": float(total(sums)), "accuracy": right / float(sums[0, 1])}

    relevant = to_dict(config)
    identity = {"stage": "route", "config": {k: relevant[k] for k in ("model", "route", "train")}}
    return Stage(
        "routing",
        settings.steps,
        settings.batch_size,
        identity,
        transform,
        step_function(transform, loss, config.train.seed * 2 + 3, label),
        batch,
        validate,
    )
