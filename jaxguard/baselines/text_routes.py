"""Routes from plain text, and from the tool's name alone: what a router must beat.

On text: TF-IDF and logistic regression over three classes (scikit-learn).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
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


MAJORITY = "majority by tool"
KINDS = {"bag of words": _bag, "current call": _call, "call and latest observation": _latest}
"""What each reads: the whole snapshot, memory included; the proposed call; the call and what was seen last."""


def text_routes(train: Sequence[Step], labels: np.ndarray, asked: Sequence[Step]) -> Mapping[str, np.ndarray]:
    """Routes ``[N]`` of the asked steps by :data:`MAJORITY` and by each kind, fitted on steps with labels.

    Empty where there are no steps or nothing is asked; without the kinds where the labels are of one class. A kind
    without a single word to learn from is left out.

    Args:
        train: Trajectories and the index of a step.
        labels: Values of :class:`~jaxguard.types.Route` of those.
        asked: Steps to route.
    """
    if not train or not asked:
        return {}
    found = {MAJORITY: _majority(train, labels, asked)}
    if len(np.unique(labels)) < 2:
        return found
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


def _majority(train: Sequence[Step], labels: np.ndarray, asked: Sequence[Step]) -> np.ndarray:
    """The most frequent label of the asked step's tool, or of all steps where training did not show that tool.

    Of labels equally frequent the more severe is taken.
    """

    def most(counts: Counter[int]) -> int:
        return max(counts, key=lambda label: (counts[label], label))

    by_tool: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for (trajectory, index), label in zip(train, labels.tolist(), strict=True):
        by_tool[trajectory.steps[index].tool][label] += 1
    usual = Counter(labels.tolist())
    return np.array([most(by_tool.get(t.steps[index].tool, usual)) for t, index in asked], np.int64)
