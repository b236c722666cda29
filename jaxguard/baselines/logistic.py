"""Logistic regression on the guard's own features, with and without a view of the past.

``step``: each step alone, ``[observation, action, instruction]``, trained on step labels; the trajectory
score is the maximum. It has no memory, so what it reaches is what the current step gives away.
``bag``: mean and maximum over the steps of the whole trajectory, trained on trajectory labels; it sees
everything except the order, and, unlike a guard, also the steps after the hazard (not the last call's result).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from jaxguard.training.episodes import Episodes

REGULARISATION = 0.01


@dataclass(frozen=True)
class StepScores:
    """Risks of all steps, trajectory after trajectory, and the maximum of each trajectory ``[n]``."""

    steps: list[np.ndarray]
    maxima: np.ndarray


def fit(features: np.ndarray, labels: np.ndarray) -> Pipeline | None:
    """The regression of ``labels`` ``[N]`` on ``features`` ``[N, F]``, classes weighted alike; None for one class."""
    if len(np.unique(labels)) < 2:
        return None
    model = LogisticRegression(C=REGULARISATION, max_iter=500, class_weight="balanced")
    return make_pipeline(StandardScaler(), model).fit(features, labels)


def _steps(episodes: Episodes, index: int) -> np.ndarray:
    observations, actions, instruction = episodes.rows[index]
    table = episodes.table
    own = np.repeat(table[instruction][None], len(actions), axis=0)
    return np.concatenate([table[observations[:-1]], table[actions], own], axis=1)


def _bag(episodes: Episodes, index: int) -> np.ndarray:
    observations, actions, instruction = episodes.rows[index]
    parts = [episodes.table[observations[:-1]], episodes.table[actions]]
    pooled = [f for part in parts for f in (part.mean(axis=0), part.max(axis=0))]
    return np.concatenate([*pooled, episodes.table[instruction]])


def step_scores(train: Episodes, test: Episodes) -> StepScores | None:
    """Fits the memoryless scorer on supervised steps; None where only one class is supervised."""
    features, labels = [], []
    for i, hazard in enumerate(train.hazard_step):
        if hazard == -2:
            continue
        own = _steps(train, i)
        end = len(own) if hazard < 0 else hazard + 1
        features.append(own[:end])
        labels.append(np.arange(end) == hazard)
    model = fit(np.concatenate(features), np.concatenate(labels)) if features else None
    if model is None:
        return None
    steps = [model.predict_proba(_steps(test, i))[:, 1] for i in range(len(test))]
    return StepScores(steps, np.array([s.max() for s in steps]))


def bag_scores(train: Episodes, test: Episodes) -> np.ndarray | None:
    """Fits the order-blind scorer on labelled trajectories and scores ``test`` ``[n]``; None for one class."""
    labelled = [i for i, label in enumerate(train.unsafe) if label is not None]
    labels = np.array([bool(train.unsafe[i]) for i in labelled])
    model = fit(np.stack([_bag(train, i) for i in labelled]), labels) if labelled else None
    if model is None:
        return None
    return model.predict_proba(np.stack([_bag(test, i) for i in range(len(test))]))[:, 1]
