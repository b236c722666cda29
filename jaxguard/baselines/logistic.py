"""Logistic regression on the guard's own features, with and without a view of the past.

``step``: each step alone, ``[observation, action, instruction]``, trained on step labels; the trajectory
score is the maximum. It has no memory, so what it reaches is what the current step gives away.
``pooled``: the same with everything that the run has shown so far, in any order: the features of the guard's own pooled
head, and what a guard without a world model could do.
``bag``: mean and maximum over the steps of the whole trajectory, trained on trajectory labels; it sees
everything except the order, and, unlike a guard, also the steps after the hazard (not the last call's result).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxguard.training.episodes import Episodes
from jaxguard.training.pooled import Features, Linear, fit_steps, logistic, pooled_features


@dataclass(frozen=True)
class StepScores:
    """Risks of all steps, trajectory after trajectory, and the maximum of each trajectory ``[n]``."""

    steps: list[np.ndarray]
    maxima: np.ndarray


def step_features(episodes: Episodes, index: int) -> np.ndarray:
    """``[T, 3E]``: observation, action and instruction of each step of a trajectory."""
    observations, actions, instruction = episodes.rows[index]
    table = episodes.table
    own = np.repeat(table[instruction][None], len(actions), axis=0)
    return np.concatenate([table[observations[:-1]], table[actions], own], axis=1)


STEPWISE: dict[str, Features] = {"step": step_features, "pooled": pooled_features}


def bag_features(episodes: Episodes, index: int) -> np.ndarray:
    """``[5E]``: mean and maximum of a trajectory's observations and actions, and the instruction."""
    observations, actions, instruction = episodes.rows[index]
    parts = [episodes.table[observations[:-1]], episodes.table[actions]]
    pooled = [f for part in parts for f in (part.mean(axis=0), part.max(axis=0))]
    return np.concatenate([*pooled, episodes.table[instruction]])


class StepScorer:
    """A scorer of single steps, by the name of its features in :data:`STEPWISE`."""

    def __init__(self, train: Episodes, name: str):
        self._features = STEPWISE[name]
        self.model = fit_steps(train, self._features)

    def __call__(self, episodes: Episodes) -> StepScores | None:
        """Scores trajectories; None where only one class was supervised in training."""
        if self.model is None:
            return None
        steps = [self.model.risk(self._features(episodes, i)) for i in range(len(episodes))]
        return StepScores(steps, np.array([s.max() for s in steps]))


class BagScorer:
    """The order-blind scorer of whole trajectories."""

    def __init__(self, train: Episodes):
        labelled = [i for i, label in enumerate(train.unsafe) if label is not None]
        labels = np.array([bool(train.unsafe[i]) for i in labelled])
        self.model: Linear | None = None
        if labelled:
            self.model = logistic(np.stack([bag_features(train, i) for i in labelled]), labels)

    def __call__(self, episodes: Episodes) -> np.ndarray | None:
        """Scores trajectories ``[n]``; None where only one class was labelled in training."""
        if self.model is None:
            return None
        return self.model.risk(np.stack([bag_features(episodes, i) for i in range(len(episodes))]))
