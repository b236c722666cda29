"""Routes from plain text: what a router must beat. TF-IDF and logistic regression over three classes (scikit-learn)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from jaxguard.features.texts import action_text
from jaxguard.traces.snapshots import snapshot
from jaxguard.types import Trajectory

Step = tuple[Trajectory, int]

_TOKENS = r"[\w.@/-]+"


def _bag(step: Step) -> str:
    return snapshot(*step).to_json()


def _call(step: Step) -> str:
    trajectory, index = step
    return action_text(trajectory.steps[index])


def _latest(step: Step) -> str:
    trajectory, index = step
    return f"{_call(step)} {trajectory.steps[index].observation}"


KINDS = {"bag of words": _bag, "current call": _call, "call and latest observation": _latest}
"""What each reads: the whole snapshot, memory included; the proposed call; the call and what was seen last."""


def text_routes(train: Sequence[Step], labels: np.ndarray, asked: Sequence[Step]) -> Mapping[str, np.ndarray]:
    """Routes ``[N]`` of the asked steps by each kind, fitted on steps with labels; empty where
    those have one class only, or nothing is asked. A kind without a single word to learn from is left out.

    Args:
        train: Trajectories and the index of a step.
        labels: Values of :class:`~jaxguard.types.Route` of those.
        asked: Steps to route.
    """
    if len(np.unique(labels)) < 2 or not asked:
        return {}
    found = {}
    for name, text in KINDS.items():
        learned = [text(step) for step in train]
        if not any(re.search(_TOKENS, one) for one in learned):
            continue
        model = make_pipeline(
            TfidfVectorizer(token_pattern=_TOKENS, sublinear_tf=True), LogisticRegression(C=3.0, max_iter=2_000)
        )
        model.fit(learned, labels)
        found[name] = model.predict([text(step) for step in asked]).astype(np.int64)
    return found
