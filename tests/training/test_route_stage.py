"""The routing stage: reviewed steps as rows and batches, what is frozen, resuming bit for bit, and learning."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from guard_samples import DIM, FakeEncoder
from route_samples import CONFIG as SAMPLE
from route_samples import TRAJECTORIES, make_params, trajectory

from jaxguard.config import TrainConfig
from jaxguard.features.embed import embed
from jaxguard.features.grounding import route_texts
from jaxguard.features.store import FeatureStore
from jaxguard.route_config import RouteConfig, RouteStageConfig
from jaxguard.training.episodes import TrainingError
from jaxguard.training.loop import StageResult, run_stage
from jaxguard.training.routing import (
    RouteEpisodes,
    drop_route_inputs,
    make_route_batch,
    make_route_episodes,
    route_stage,
)
from jaxguard.types import Trajectory
from jaxguard.world_model.params import CORE, HEADS, POOLED, PREDICTOR, Params, flatten
from jaxguard.world_model.routing import LETTERS, RouteInputs, RouteScorer

STAGE = RouteStageConfig(steps=12, batch_size=4, learning_rate=3e-3)
CONFIG = dataclasses.replace(SAMPLE, route=STAGE, train=TrainConfig(max_steps=16, validate_every=5, checkpoint_every=4))
START = make_params()  # before the module's compiler options
SHORT = [trajectory(i, 3 + i % 2) for i in range(8)]  # one bucket: one compilation
compiled_stage = functools.cache(route_stage)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    encoder = FakeEncoder()
    opened = FeatureStore.create_or_open(tmp_path_factory.mktemp("store"), encoder.fingerprint, DIM)
    embed([*TRAJECTORIES, *SHORT], opened, encoder)
    return opened


def episodes(
    store: FeatureStore, trajectories: Sequence[Trajectory] = SHORT, config: RouteConfig = CONFIG
) -> RouteEpisodes:
    return make_route_episodes(trajectories, store, config)


def run(folder: Path, train: RouteEpisodes, config: RouteConfig = CONFIG, **options: Any) -> StageResult:
    return run_stage(compiled_stage(config), config.train, START, train, train, folder, progress=False, **options)


def differing(after: Params) -> set[str]:
    """Modules whose bytes changed, as ``world.core`` or ``head.mlp``."""
    before, now = flatten(START), flatten(after)
    return {".".join(name.split(".")[:2]) for name in now if now[name].tobytes() != before[name].tobytes()}


# Rows and batches


def test_reviews_become_labels_and_what_lies_after_the_last_is_cut(store: FeatureStore) -> None:
    found = episodes(store, TRAJECTORIES)
    reviewed = [t for t in TRAJECTORIES if any(r["step"] < 16 for r in t.metadata["reviews"])]
    assert found.ids == tuple(t.id for t in reviewed)
    assert found.unreviewed == len(TRAJECTORIES) - len(reviewed) > 0
    for t, labels, triggers, length in zip(reviewed, found.labels, found.triggers, found.lengths, strict=True):
        known = {r["step"]: r for r in t.metadata["reviews"] if r["step"] < 16}
        assert length == len(labels) == max(known) + 1
        routes = ["EXECUTE", "ASK", "REFUSE"]
        assert labels.tolist() == [routes.index(known[s]["route"]) if s in known else -1 for s in range(length)]
        assert triggers.tolist() == [LETTERS.index(known[s]["trigger"]) if s in known else -1 for s in range(length)]


def test_rows_hold_the_vectors_of_their_texts(store: FeatureStore) -> None:
    chosen = SHORT[4]
    found, encoder = episodes(store, [chosen]), FakeEncoder()
    (rows,), texts = found.rows, route_texts(chosen)
    length = len(rows.act)
    assert any(texts.evidence)
    assert any(texts.notes)
    for places, expected in (
        (rows.evidence, texts.evidence[:length]),
        (rows.note, texts.notes[:length]),
        (rows.obs, [step.observation for step in chosen.steps[:length]]),
        ([rows.memory, rows.ins], [texts.memory, chosen.instruction]),
    ):
        np.testing.assert_allclose(found.table[places], encoder.encode(expected), atol=1e-3)


@pytest.mark.parametrize(
    ("off", "empty"), [("memory", {"memory", "note"}), ("grounding", {"evidence", "note"}), ("recurrence", set())]
)
def test_what_is_switched_off_is_not_there(store: FeatureStore, off: str, empty: set[str]) -> None:
    config = dataclasses.replace(CONFIG, route=dataclasses.replace(STAGE, **{off: False}))
    full, less = (make_route_batch(episodes(store, config=c), np.arange(4), 4).x for c in (CONFIG, config))
    for name in full._fields:
        assert np.any(getattr(full, name))
        assert np.any(getattr(less, name)) == (name not in empty)
        if name not in empty:
            np.testing.assert_array_equal(getattr(less, name), getattr(full, name))


def test_batches_are_padded_with_zeros_and_no_labels(store: FeatureStore) -> None:
    found = episodes(store)
    batch = make_route_batch(found, np.array([3, 0]), 3)
    assert batch.x.obs.shape == (3, 4, DIM)
    assert batch.x.ins.shape == (3, DIM)
    for row, index in enumerate((3, 0)):
        length = len(found.labels[index])
        np.testing.assert_array_equal(batch.x.act[row, :length], found.table[found.rows[index].act])
        assert not np.any(batch.x.act[row, length:])
        assert batch.route[row].tolist() == [*found.labels[index], *[-1] * (4 - length)]
    assert not any(np.any(part[2]) for part in batch.x)
    assert (np.asarray(batch.route[2]) == -1).all()
    assert (np.asarray(batch.trigger[2]) == -1).all()


def test_what_cannot_be_trained_on_is_named(store: FeatureStore) -> None:
    silent = dataclasses.replace(SHORT[0], metadata={})
    with pytest.raises(TrainingError, match="train part: got 1 trajectories, none with a reviewed step among its "):
        episodes(store, [silent])
    with pytest.raises(TrainingError, match=r"of the train part have no vector.*`jaxguard embed --router"):
        episodes(store, [trajectory(77, 3)])


def test_the_digest_follows_texts_and_labels(store: FeatureStore) -> None:
    base = episodes(store)
    other = [
        dataclasses.replace(base, labels=(base.labels[0] * 0, *base.labels[1:])),
        dataclasses.replace(base, table=base.table + np.float32(1)),
        dataclasses.replace(base, rows=(base.rows[0]._replace(memory=base.rows[0].memory + 1), *base.rows[1:])),
    ]
    digests = {base.digest, *(changed.digest for changed in other)}
    assert len(digests) == 4
    assert base.digest == episodes(store).digest


def test_dropping_inputs_keeps_their_mean() -> None:
    x = RouteInputs(*(np.ones((50, 40), np.float32) for _ in range(6)))
    for part in drop_route_inputs(x, jax.random.key(0, impl="rbg"), 0.25):
        values = np.unique(np.asarray(part))
        np.testing.assert_allclose(values, [0, 4 / 3], rtol=1e-6)
        assert np.mean(np.asarray(part)) == pytest.approx(1.0, abs=0.06)


# Training


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, store: FeatureStore, compile_cache: Path) -> tuple:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, episodes(store))


def test_frozen_modules_keep_their_bytes_and_the_others_move(whole: tuple) -> None:
    frozen = {f"world.{name}" for name in (*HEADS, *POOLED, *PREDICTOR)}
    everything = {f"{part}.{name}" for part in START for name in START[part]}
    assert differing(whole[1].params) == everything - frozen


@pytest.mark.slow
def test_stopping_and_resuming_changes_nothing(whole: tuple, store: FeatureStore, tmp_path: Path) -> None:
    folder, expected = whole
    assert run(tmp_path, episodes(store), stop_after=7).steps == 7  # within an epoch, and no regular checkpoint
    result = run(tmp_path, episodes(store))
    assert (result.steps, result.validation_loss) == (expected.steps, expected.validation_loss)
    mine, theirs = flatten(result.params), flatten(expected.params)
    assert all(mine[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert (tmp_path / "curves.csv").read_bytes() == (folder / "curves.csv").read_bytes()


def test_a_checkpoint_of_other_labels_is_refused(whole: tuple, store: FeatureStore) -> None:
    relabelled = [trajectory(i, 3 + i % 2, reviews=[{"step": 0, "route": "ASK"}]) for i in range(8)]
    with pytest.raises(TrainingError, match="training data"):
        run(whole[0], episodes(store, relabelled))


def test_validation_is_the_mean_over_reviewed_steps(store: FeatureStore, compile_cache: Path) -> None:
    """Oracle: softmax and means in NumPy, over batches of unequal numbers of labels."""
    some = [*SHORT[:5], trajectory(5, 4, reviews=[{"step": 3, "route": "REFUSE"}])]  # a review without a trigger
    found = episodes(store, some)
    batch = make_route_batch(found, np.arange(6), 8)
    logits = RouteScorer(CONFIG.model, START).batch(batch.x).astype(np.float64)

    def entropies(own: np.ndarray, labels: np.ndarray) -> np.ndarray:
        kept = labels >= 0
        shares = np.exp(own[kept]) / np.exp(own[kept]).sum(axis=-1, keepdims=True)
        return -np.log(shares[np.arange(kept.sum()), labels[kept]])

    routes, triggers = np.asarray(batch.route), np.asarray(batch.trigger)
    expected = entropies(logits[..., :3], routes).mean() + 0.3 * entropies(logits[..., 3:], triggers).mean()
    result = compiled_stage(CONFIG).validate(START, found)
    assert result["loss"] == pytest.approx(expected, rel=1e-5)
    right = (logits[..., :3].argmax(-1) == routes).sum()
    assert result["accuracy"] == pytest.approx(right / (routes >= 0).sum())


@pytest.mark.slow
def test_a_small_corpus_is_learned_by_heart_without_the_core(
    store: FeatureStore, tmp_path: Path, compile_cache: Path
) -> None:
    settings = dataclasses.replace(
        STAGE, steps=150, batch_size=8, learning_rate=2e-2, input_dropout=0.0, train_core=False
    )
    config = dataclasses.replace(
        CONFIG, route=settings, train=dataclasses.replace(CONFIG.train, validate_every=150, checkpoint_every=150)
    )
    train, stage = episodes(store), compiled_stage(config)
    result = run(tmp_path, train, config)
    before, after = (stage.validate(params, train) for params in (START, result.params))
    assert before["accuracy"] < 0.7
    assert after["accuracy"] == 1.0
    assert after["loss"] < 0.1 * before["loss"]
    moved = differing(result.params)
    assert not moved & {f"world.{name}" for name in CORE}
    assert {"world.obs_encoder", "head.mlp"} <= moved
