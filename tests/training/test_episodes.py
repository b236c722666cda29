"""Trajectories to batches: labels, masks, targets, order."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from jaxguard.config import Stage2Config
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore, MissingTexts
from jaxguard.features.texts import trajectory_texts
from jaxguard.training.episodes import (
    BUCKETS,
    Episodes,
    TrainingError,
    bucket,
    epoch_batches,
    make_batch,
    make_episodes,
    prefix_targets,
    supervising_step,
)
from jaxguard.types import Step, Trajectory

FINGERPRINT = EncoderFingerprint("fake", "0", 0, "mean", "float32", 16, "windows")
DIM = 4


def steps(*observations: str, parallel: tuple[int, ...] = ()) -> tuple[Step, ...]:
    return tuple(Step("tool", {"n": i}, str(i), o, parallel=i in parallel) for i, o in enumerate(observations))


SAFE = Trajectory("safe", "add it up", steps("", "one", "two"), False, timing=True, final_observation="end")
HAZARD = Trajectory("hazard", "send it", steps("", "a", "a", "b", parallel=(2,)), True, 2, True)
UNTIMED = Trajectory("untimed", "fetch it", steps("", "c"), True, None, False)
PLAIN = Trajectory("plain", "say hello", (), False, timing=True)


def vector(text: str) -> np.ndarray:
    return np.random.default_rng(list(text.encode())).normal(size=DIM).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    store = FeatureStore.create_or_open(tmp_path / "store", FINGERPRINT, DIM)
    texts = sorted({text for t in (SAFE, HAZARD, UNTIMED, PLAIN) for text in trajectory_texts(t).unique()})
    store.add(texts, np.stack([vector(text) for text in texts]))
    return store


@pytest.fixture
def episodes(store: FeatureStore) -> Episodes:
    return make_episodes([SAFE, HAZARD, PLAIN, UNTIMED], store, max_steps=8)


def test_episodes_hold_vectors_labels_and_new_observations(episodes: Episodes) -> None:
    assert episodes.ids == ("safe", "hazard", "untimed")
    assert episodes.lengths.tolist() == [3, 4, 2]
    assert episodes.hazard_step.tolist() == [-1, 2, -2]
    assert episodes.unsafe == (False, True, True)
    assert episodes.cut == 0
    # The observation after step 1 of "hazard" is shared with a parallel call; nothing follows the last steps.
    fresh = [array.tolist() for array in episodes.new_observation]
    assert fresh == [[True, True, True], [True, False, True, False], [True, False]]
    observations, actions, instruction = episodes.rows[0]
    texts = trajectory_texts(SAFE)
    np.testing.assert_array_equal(episodes.table[observations], [vector(t) for t in texts.observations])
    np.testing.assert_array_equal(episodes.table[actions], [vector(t) for t in texts.actions])
    np.testing.assert_array_equal(episodes.table[instruction], vector("add it up"))


@pytest.mark.parametrize(
    ("unsafe", "first", "timing", "skip", "last_step"),
    [
        (False, None, True, -1, -1),
        (False, None, False, -2, -2),
        (None, None, False, -2, -2),
        (True, 1, True, 1, 1),
        (True, 1, False, -2, 3),
        (True, None, True, -2, 3),
    ],
)
def test_supervising_step(unsafe: bool | None, first: int | None, timing: bool, skip: int, last_step: int) -> None:
    trajectory = Trajectory("t", "i", steps("", "", "", ""), unsafe, first, timing)
    assert supervising_step(trajectory, "skip") == skip
    assert supervising_step(trajectory, "last_step") == last_step


def test_long_trajectories_are_cut_and_counted(store: FeatureStore) -> None:
    episodes = make_episodes([SAFE, HAZARD], store, max_steps=2)
    assert episodes.lengths.tolist() == [2, 2]
    assert episodes.cut == 2
    assert episodes.hazard_step.tolist() == [-1, -2]  # the hazard of step 2 is beyond the cut: it teaches nothing
    # The observation after a cut is known and predicted, unless a parallel call shares it.
    assert [array.tolist() for array in episodes.new_observation] == [[True, True], [True, False]]


def test_an_action_may_have_two_vectors(store: FeatureStore) -> None:
    named = Trajectory(
        "named", "send it", tuple(Step("tool", {"n": "box"}, str(i), f"box {i}") for i in range(3)), False
    )
    with pytest.raises(MissingTexts):
        make_episodes([named], store, max_steps=8, grounded=True)
    texts = store.missing(list(trajectory_texts(named, grounded=True).unique()))
    store.add(texts, np.stack([vector(text) for text in texts]))
    made = make_episodes([named, SAFE], store, max_steps=2, grounded=True)
    obs, act, _ = made.vectors(0)
    assert act.shape == (2, 2 * DIM)
    np.testing.assert_array_equal(act[1], np.concatenate([vector('tool {"n":"box"}'), vector("box 1")]))
    np.testing.assert_array_equal(obs[1], vector("box 1"))
    batch = make_batch(made, np.array([0, 1]), 3, Stage2Config())
    np.testing.assert_array_equal(batch.act[0, :2], act)
    assert batch.act.shape[-1] == 2 * DIM
    assert batch.obs.shape[-1] == DIM
    assert made.digest != make_episodes([named, SAFE], store, max_steps=2).digest


def test_what_is_missing_is_named(store: FeatureStore) -> None:
    with pytest.raises(MissingTexts, match="no such text"):
        make_episodes([Trajectory("t", "no such text", steps(""))], store, max_steps=8)
    with pytest.raises(TrainingError, match="validation part: got 1 trajectories, none with a step"):
        make_episodes([PLAIN], store, max_steps=8, part="validation")


def test_digest_depends_on_vectors_labels_and_order(store: FeatureStore, episodes: Episodes) -> None:
    again = make_episodes([SAFE, HAZARD, PLAIN, UNTIMED], store, max_steps=8)
    assert again.digest == episodes.digest
    others = [
        make_episodes([HAZARD, SAFE, UNTIMED], store, max_steps=8),
        make_episodes([SAFE, HAZARD, UNTIMED], store, max_steps=3),
        make_episodes([SAFE, HAZARD, UNTIMED], store, max_steps=8, unlabelled_hazard="last_step"),
    ]
    again.table[0, 0] += 1
    assert len({e.digest for e in (episodes, again, *others)}) == 5


def test_prefix_targets_are_equation_7() -> None:
    """1 at the hazard, exp(-(d - 1) / rho) at 1 <= d <= K steps before it, else 0."""
    expected = [0.0, 0.0, math.exp(-1.0), math.exp(-0.5), 1.0, 1.0, 0.0]
    np.testing.assert_allclose(prefix_targets(7, 5, horizon=3, rho=2.0), expected, rtol=1e-6)
    np.testing.assert_allclose(prefix_targets(3, 2, horizon=1, rho=0.5), [0, 1, 1])
    np.testing.assert_allclose(prefix_targets(3, 2, horizon=0, rho=2.0), [0, 0, 1])
    np.testing.assert_allclose(prefix_targets(2, 0, horizon=3, rho=2.0), [1, 0])
    np.testing.assert_array_equal(prefix_targets(3, -1, horizon=3, rho=2.0), 0)


def test_bucket() -> None:
    assert [bucket(n) for n in (1, 4, 5, 16, 17, 1024, 1025, 2048, 2049)] == [4, 4, 16, 16, 32, 1024, 2048, 2048, 3072]
    assert list(BUCKETS) == sorted(set(BUCKETS))


def test_an_epoch_covers_everything_once_within_buckets() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=203)
    batches = epoch_batches(lengths, 8, seed=1, epoch=0)
    assert sorted(np.concatenate(batches)) == list(range(203))
    assert all(len(batch) <= 8 for batch in batches)
    assert all(len({bucket(int(n)) for n in lengths[batch]}) == 1 for batch in batches)


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=100)

    def order(seed: int, epoch: int) -> list[int]:
        return np.concatenate(epoch_batches(lengths, 8, seed, epoch)).tolist()

    np.random.seed(0)  # noqa: NPY002  global state must not matter
    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6


def test_batch_is_padded_and_masked(episodes: Episodes) -> None:
    batch = make_batch(episodes, np.array([1, 0, 2]), batch_size=5, stage=Stage2Config(horizon=2, rho=2.0))
    assert batch.obs.shape == (5, 5, DIM)
    assert batch.act.shape == (5, 5, DIM)
    np.testing.assert_array_equal(batch.valid.sum(axis=1), [4, 3, 2, 0, 0])
    # Up to and including the first hazard; all of a safe trajectory; nothing of one that teaches nothing.
    np.testing.assert_array_equal(batch.supervised[:3], [[1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.hazard[:3], [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(batch.prefix[0], [math.exp(-0.5), 1, 1, 0], rtol=1e-6)
    np.testing.assert_array_equal(batch.target[:2], [[1, 0, 1, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(batch.obs[1, 3], vector("end"))
    np.testing.assert_array_equal(batch.act[1, 2], vector('tool {"n":2}'))
    np.testing.assert_array_equal(batch.ins[0], vector("send it"))
    for array in (batch.obs[3:], batch.act[3:], batch.ins[3:], batch.act[:, 4:], batch.obs[2, 3:]):
        assert not array.any()
    for array in (batch.target, batch.supervised, batch.hazard, batch.prefix):
        assert not array[batch.valid == 0].any()


def test_balanced_passes_draw_as_many_from_every_source() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, size=110)
    sources = ("large",) * 100 + ("small",) * 10
    drawn = [np.concatenate(epoch_batches(lengths, 8, 1, epoch, sources)) for epoch in range(2)]
    for order in drawn:
        assert len(order) == 110
        small = order[order >= 100]
        assert len(small) == 55
        assert sorted(np.bincount(small)[100:].tolist()) == [5] * 5 + [6] * 5
        assert len(set(order[order < 100].tolist())) == 55
    assert set(drawn[0].tolist()) != set(drawn[1].tolist())
