"""Trajectories as rows of a feature table, and padded batches made from them (NumPy).

A batch is cut to a few fixed lengths (*buckets*) and a fixed number of rows, so that a training step
compiles once per bucket. The order of batches follows from the seed and the epoch alone: a resumed run
continues at the batch where it stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxguard.config import Stage2Config
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.world_model.losses import Batch

# Few, because a training step compiles for about 10 s on a CPU for each.
BUCKETS = (4, 16, 32, 64, 128, 256, 512, 1024)


class TrainingError(JaxguardError):
    """Training cannot start or go on; the message says at which batch and why."""


@dataclass(frozen=True)
class Episodes:
    """Trajectories with at least one step, ready to be batched.

    Attributes:
        table: ``[N, E]`` float32, the vector of every distinct text.
        ids: One per trajectory.
        rows: Per trajectory the table rows of observations ``[T+1]``, actions ``[T]`` (or ``[T, 2]``, of two vectors
            each) and instruction.
        new_observation: Per trajectory ``[T]`` bool: the observation after step t exists and is not
            shared with a parallel call (stage 1 predicts only these).
        hazard_step: First hazard step that supervises; -1 for a safe trajectory, -2 where nothing does.
        unsafe: Trajectory label; None where there is none.
        cut: How many trajectories were longer than the training limit.
        source: The set that each trajectory comes from.
    """

    table: np.ndarray
    ids: tuple[str, ...]
    rows: tuple[tuple[np.ndarray, np.ndarray, int], ...]
    new_observation: tuple[np.ndarray, ...]
    hazard_step: np.ndarray
    unsafe: tuple[bool | None, ...]
    cut: int
    source: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> np.ndarray:
        """Steps of each trajectory, ``[n]``."""
        return np.array([len(actions) for _, actions, _ in self.rows], np.int64)

    def vectors(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Observations ``[T, E]``, actions ``[T, A]`` and instruction ``[E]`` of a trajectory's steps."""
        observations, actions, instruction = self.rows[index]
        return self.table[observations[:-1]], flat(self.table[actions]), self.table[instruction]

    @property
    def digest(self) -> str:
        """A 16-digit hash of vectors, texts' places and labels: what a checkpoint is bound to."""
        digest = hashlib.sha256(repr((self.ids, self.table.shape, self.hazard_step.tolist())).encode())
        digest.update(np.ascontiguousarray(self.table).tobytes())
        for (observations, actions, instruction), fresh in zip(self.rows, self.new_observation, strict=True):
            digest.update(repr((observations.tolist(), actions.tolist(), instruction, fresh.tolist())).encode())
        return digest.hexdigest()[:16]


def flat(actions: np.ndarray) -> np.ndarray:
    """Vectors of actions, ``[T, E]`` or ``[T, 2, E]``, as ``[T, A]``."""
    return actions.reshape(len(actions), -1)


def supervising_step(trajectory: Trajectory, unlabelled: str) -> int:
    """The first hazard step that stage 2 learns from; -1 if safe, -2 if the trajectory teaches nothing.

    Args:
        trajectory: Any trajectory.
        unlabelled: ``Stage2Config.unlabelled_hazard``.
    """
    if trajectory.unsafe is False:
        # A safe trajectory whose hazardous proposal failed or was stopped must not teach that it is harmless.
        return -1 if trajectory.timing else -2
    if trajectory.unsafe is None:
        return -2
    if trajectory.first_hazard is not None and trajectory.timing:
        return trajectory.first_hazard
    return len(trajectory) - 1 if unlabelled == "last_step" else -2


def make_episodes(
    trajectories: Sequence[Trajectory],
    store: FeatureStore,
    *,
    max_steps: int,
    unlabelled_hazard: str = "skip",
    thought: bool = False,
    grounded: bool = False,
    part: str = "train",
) -> Episodes:
    """Looks every text up in the store; trajectories without steps are left out.

    ``part`` is the part of the split that they are, for messages.

    Raises:
        TrainingError: no trajectory has a step.
        MissingTexts: a text is not in the store (``jaxguard embed`` adds it).
    """
    index: dict[str, int] = {}
    ids, rows, fresh, hazards, unsafe, sources = [], [], [], [], [], []
    cut = 0
    for trajectory in trajectories:
        if not trajectory.steps:
            continue
        texts = trajectory_texts(trajectory, thought=thought, grounded=grounded)
        length = min(len(trajectory), max_steps)
        cut += length < len(trajectory)
        observations = texts.observations[: length + 1]
        parts = (observations, texts.actions[:length], texts.said[:length], (texts.instruction,))
        numbers = [np.array([index.setdefault(text, len(index)) for text in part], np.int64) for part in parts]
        actions = np.stack(numbers[1:3], axis=1) if grounded else numbers[1]
        parallel = [step.parallel for step in trajectory.steps[1 : length + 1]]
        parallel += [False] * (length - len(parallel))
        ids.append(trajectory.id)
        rows.append((numbers[0], actions, int(numbers[3][0])))
        fresh.append(np.array([bool(o) and not p for o, p in zip(observations[1:], parallel, strict=True)]))
        hazard = supervising_step(trajectory, unlabelled_hazard)
        hazards.append(hazard if hazard < length else -2)
        unsafe.append(trajectory.unsafe)
        sources.append(trajectory.source)
    if not ids:
        raise TrainingError(f"{part} part: got {len(trajectories)} trajectories, none with a step, expected one")
    return Episodes(
        table=store.get(list(index)),
        ids=tuple(ids),
        rows=tuple(rows),
        new_observation=tuple(fresh),
        hazard_step=np.array(hazards),
        unsafe=tuple(unsafe),
        cut=cut,
        source=tuple(sources),
    )


def prefix_targets(length: int, hazard: int, horizon: int, rho: float) -> np.ndarray:
    """Soft prefix labels ``[length]`` (paper, eq. 7) for the first hazard step ``hazard`` (negative: none)."""
    target = np.zeros(length, np.float32)
    if hazard >= 0:
        ahead = hazard - np.arange(length)
        near = (ahead >= 1) & (ahead <= horizon)
        target[near] = np.exp(-(ahead[near] - 1) / rho)
        target[hazard] = 1.0
    return target


def bucket(length: int) -> int:
    """The padded length for ``length`` steps: one of :data:`BUCKETS`, or a multiple of the largest."""
    for size in BUCKETS:
        if length <= size:
            return size
    return -(-length // BUCKETS[-1]) * BUCKETS[-1]


def epoch_batches(
    lengths: np.ndarray, batch_size: int, seed: int, epoch: int, balance: Sequence[str] = ()
) -> list[np.ndarray]:
    """Index arrays of one pass over the data, shuffled; each batch stays within one bucket.

    ``balance`` names the source of each trajectory: every source then gives the same number of them to a pass, small
    ones by repeating, large ones a part that changes from pass to pass.
    """
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(lengths))
    if balance:
        sources = np.array(balance)[order]
        names = np.unique(sources)
        each = -(-len(order) // len(names))
        order = rng.permutation(np.concatenate([np.resize(order[sources == name], each) for name in names]))
    buckets = np.array([bucket(int(n)) for n in lengths])[order]
    batches = []
    for size in np.unique(buckets):
        members = order[buckets == size]
        batches += [members[i : i + batch_size] for i in range(0, len(members), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def make_batch(episodes: Episodes, indices: np.ndarray, batch_size: int, stage: Stage2Config) -> Batch:
    """Pads the named trajectories to their bucket and to ``batch_size`` rows (NumPy arrays).

    Padding rows and steps carry zeros and are masked out everywhere.
    """
    size = bucket(max(len(episodes.rows[i][1]) for i in indices))
    dim = episodes.table.shape[1]
    obs = np.zeros((batch_size, size + 1, dim), np.float32)
    act = np.zeros((batch_size, size + 1, dim * (episodes.rows[0][1].ndim)), np.float32)
    ins = np.zeros((batch_size, dim), np.float32)
    valid, target, hazard, prefix, supervised = (np.zeros((batch_size, size), np.float32) for _ in range(5))
    for row, index in enumerate(indices):
        observations, actions, instruction = episodes.rows[index]
        length, first = len(actions), int(episodes.hazard_step[index])
        obs[row, : length + 1] = episodes.table[observations]
        act[row, :length] = flat(episodes.table[actions])
        ins[row] = episodes.table[instruction]
        valid[row, :length] = 1.0
        target[row, :length] = episodes.new_observation[index]
        if first >= 0:
            hazard[row, first] = 1.0
            prefix[row, :length] = prefix_targets(length, first, stage.horizon, stage.rho)
            supervised[row, : first + 1] = 1.0
        elif first == -1:
            supervised[row, :length] = 1.0
    return Batch(obs, act, ins, valid, target, hazard, prefix, supervised)  # type: ignore[arg-type]
