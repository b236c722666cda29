"""The interface of other guards: one risk for a proposed call, given what ran before it.

Every rival is asked at the same place as the guard, sees what the guard may see, and is calibrated in the same way
(:mod:`jaxguard.rivals`). :func:`blind` takes away what no guard may see: labels, metadata, and what came after.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jaxguard.features.texts import trajectory_texts
from jaxguard.types import JaxguardError, Step, Trajectory


class RivalError(JaxguardError):
    """A rival cannot be fitted or asked, or answered something that is not a risk."""


class Rival(Protocol):
    """Another guard: a risk for a proposed call, given what ran before."""

    name: str

    def observe(self, prefix: Trajectory, action: Step) -> float:
        """The risk in [0, 1] of ``action``; NaN where it could not be scored.

        Args:
            prefix: The instruction and the steps that ran; without labels and metadata.
            action: The proposed call, with the observation that it follows (o_t and a_t).
        """
        ...


@runtime_checkable
class ScoresAll(Protocol):
    """A rival with a faster way to the same risks."""

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """``[T]`` risks of each trajectory, equal to those of ``observe`` step by step."""
        ...


class PrefixRival(abc.ABC):
    """A rival of whole runs: ``risks`` reads a run once, and what it says of step t depends on steps 0..t alone."""

    name: str

    @abc.abstractmethod
    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks of the steps."""

    def observe(self, prefix: Trajectory, action: Step) -> float:
        """As :meth:`Rival.observe`."""
        return float(self.risks(dataclasses.replace(prefix, steps=(*prefix.steps, action)))[-1])

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """As :meth:`ScoresAll.score_all`."""
        return [self.risks(trajectory) for trajectory in trajectories]


class StepVectors(NamedTuple):
    """What the guard itself reads of a run of T steps."""

    obs: np.ndarray  # [T, E], o_0 .. o_{T-1}
    act: np.ndarray  # [T, A]
    ins: np.ndarray  # [E]


@dataclasses.dataclass(frozen=True)
class StepReader:
    """Looks up the vectors of a run's steps.

    Attributes:
        lookup: ``texts -> [N, E]``, e.g. ``FeatureStore.get``.
        thought: The agent's reasoning stands before each action.
        grounded: What was said of the things that an action names stands beside it.
    """

    lookup: Callable[[Sequence[str]], np.ndarray]
    thought: bool = False
    grounded: bool = False

    def __call__(self, trajectory: Trajectory) -> StepVectors:
        """Vectors of the steps; the result of the last call is not read."""
        texts = trajectory_texts(trajectory, thought=self.thought, grounded=self.grounded)
        count = len(trajectory)
        found = self.lookup((*texts.observations[:count], *texts.actions, *texts.said, texts.instruction))
        obs, act, said = found[:count], found[count : 2 * count], found[2 * count : -1]
        return StepVectors(obs, np.concatenate([act, said], axis=1) if self.grounded else act, found[-1])


def blind(trajectory: Trajectory) -> Trajectory:
    """The trajectory without labels, metadata and what followed the last call."""
    steps = tuple(step.marked(None, False) for step in trajectory.steps)
    return Trajectory(trajectory.id, trajectory.instruction, steps, source=trajectory.source)


def score(rival: Rival, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """The risks ``[T]`` float64 of every trajectory's steps; NaN where a step could not be scored.

    Uses ``score_all`` of a rival that has it, and asks step by step otherwise.

    Raises:
        RivalError: an answer is neither a risk in [0, 1] nor NaN, or there is not one for each step.
    """
    seen = [blind(trajectory) for trajectory in trajectories]
    found = rival.score_all(seen) if isinstance(rival, ScoresAll) else [_one_by_one(rival, t) for t in seen]
    if len(found) != len(seen):
        raise RivalError(f"rival {rival.name!r}: scored {len(found)} trajectories, expected {len(seen)}")
    risks = [np.asarray(values, np.float64) for values in found]
    for trajectory, values in zip(seen, risks, strict=True):
        if values.shape != (len(trajectory),):
            raise RivalError(
                f"rival {rival.name!r}, trajectory {trajectory.id!r}: risks have shape {values.shape}, expected "
                f"({len(trajectory)},)"
            )
        wrong = ~(np.isnan(values) | ((values >= 0) & (values <= 1)))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise RivalError(
                f"rival {rival.name!r}, trajectory {trajectory.id!r}, step {at}: risk is {values[at]}, expected one in "
                "[0, 1], or NaN for a step that could not be scored"
            )
    return risks


def _one_by_one(rival: Rival, trajectory: Trajectory) -> np.ndarray:
    steps = trajectory.steps
    return np.array(
        [rival.observe(dataclasses.replace(trajectory, steps=steps[:t]), step) for t, step in enumerate(steps)],
        np.float64,
    )
