"""Logistic regression on the guard's own features, with and without a view of the past.

``step``: each step alone, ``[observation, action, instruction]``, trained on step labels; the trajectory
score is the maximum. It has no memory, so what it reaches is what the current step gives away.
``pooled``: the same with everything that the run has shown so far, in any order: the features of the guard's own pooled
head, and what a guard without a world model could do.
``bag``: mean and maximum over the steps of the whole trajectory, trained on trajectory labels; it sees
everything except the order, and, unlike a guard, also the steps after the hazard (not the last call's result).
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from jaxguard.baselines.rival import PrefixRival, StepReader
from jaxguard.training.episodes import Episodes
from jaxguard.training.pooled import Features, Linear, fit_steps, logistic, pooled_features
from jaxguard.types import Trajectory


def step_features(obs: np.ndarray, act: np.ndarray, ins: np.ndarray) -> np.ndarray:
    """``[T, 2E + A]``: observation, action and instruction of each step of a trajectory."""
    return np.concatenate([obs, act, np.broadcast_to(ins, obs.shape)], axis=1)


STEPWISE: dict[str, Features] = {"step": step_features, "pooled": pooled_features}


def bag_features(episodes: Episodes, index: int) -> np.ndarray:
    """``[3E + 2A]``: mean and maximum of a trajectory's observations and actions, and the instruction."""
    *parts, instruction = episodes.vectors(index)
    pooled = [f for part in parts for f in (part.mean(axis=0), part.max(axis=0))]
    return np.concatenate([*pooled, instruction])


class LogisticRival(PrefixRival):
    """A scorer of single steps, by the name of its features in :data:`STEPWISE`."""

    def __init__(self, features: str, model: Linear, reader: StepReader):
        self.name = f"logistic-{features}"
        self._features, self._model, self._reader = STEPWISE[features], model, reader

    @classmethod
    def fit(cls, train: Episodes, features: str, reader: StepReader) -> LogisticRival | None:
        """Fitted on the steps that stage 2 learns from; None where only one class is supervised."""
        model = fit_steps(train, STEPWISE[features])
        return None if model is None else cls(features, model, reader)

    def of_steps(self, obs: np.ndarray, act: np.ndarray, ins: np.ndarray) -> np.ndarray:
        """``[T]`` risks of steps given as vectors."""
        # Row by row: a matrix product may round a row differently when there are more rows.
        logits = (self._features(obs, act, ins) * self._model.kernel).sum(axis=1) + self._model.bias
        return expit(logits)

    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks of the steps."""
        return self.of_steps(*self._reader(trajectory))


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
