"""Fits the pooled head: a logistic regression on what runs have shown so far, and its share of the hazard logit.

Fitted apart from the world model and by a convex problem, it has no training curve to stop: the recurrent heads learn
from the same steps, and where labels are few they memorise them long before this does. The share is chosen on
validation trajectories and may be 0 or 1; the shares of both parts then go into the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from jaxguard.config import ModelConfig
from jaxguard.ranking import auroc
from jaxguard.training.episodes import Episodes
from jaxguard.world_model.packing import Sequence, beside
from jaxguard.world_model.params import Params
from jaxguard.world_model.pooling import pooled_size
from jaxguard.world_model.scorer import Scorer

REGULARISATION = 0.01
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# AUROC differences up to this are ties; the smaller share wins them.
TOLERANCE = 1e-3
# Of features in memory; beyond it a random part of the steps without a hazard is left out.
LARGEST_BYTES = 2**31

logger = logging.getLogger(__name__)

Features = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""``(obs [T, E], act [T, A], ins [E]) -> [T, F]``; row t depends on steps 0..t alone."""


class Linear(NamedTuple):
    """``x @ kernel + bias``, the logit of a risk."""

    kernel: np.ndarray  # [F]
    bias: float

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Logits ``[N]`` of features ``[N, F]``."""
        return x @ self.kernel + self.bias

    def risk(self, x: np.ndarray) -> np.ndarray:
        """Risks ``[N]`` of features ``[N, F]``, in [0, 1]."""
        return expit(self(x))


class PooledFit(NamedTuple):
    """The parameters with the pooled head, and its share."""

    params: Params
    share: float


def logistic(features: np.ndarray, labels: np.ndarray) -> Linear | None:
    """L2-regularised logistic regression on standardised features, classes weighted alike; None for one class.

    Args:
        features: ``[N, F]`` float32; changed in place, because a copy of it may not fit into memory.
        labels: ``[N]`` bool.
    """
    if len(np.unique(labels)) < 2:
        return None
    mean = features.mean(axis=0, dtype=np.float64)
    features -= mean.astype(features.dtype)
    scale = np.sqrt(np.einsum("nf,nf->f", features, features, dtype=np.float64) / len(features))
    # A constant feature varies by rounding alone, which must not be scaled up.
    scale[scale <= 1e-5 * np.abs(mean) + 1e-12] = 1.0
    features /= scale.astype(features.dtype)
    fitted = LogisticRegression(C=REGULARISATION, max_iter=500, class_weight="balanced").fit(features, labels)
    kernel = fitted.coef_[0].astype(np.float64) / scale
    return Linear(kernel, float(fitted.intercept_[0] - mean @ kernel))


def pooled_features(obs: np.ndarray, act: np.ndarray, ins: np.ndarray) -> np.ndarray:
    """Features ``[T, 5 (E + A)]`` of a trajectory's steps (:func:`~jaxguard.world_model.pooling.pooled_size`)."""
    count = np.arange(1, len(act) + 1, dtype=np.float32)[:, None]
    parts = [obs, act, *(np.cumsum(x, axis=0) / count for x in (obs, act))]
    parts += [np.maximum.accumulate(x, axis=0) for x in (obs, act)]
    times = act.shape[1] // obs.shape[1]  # an action may have several vectors
    parts += [np.tile(obs, times) * act, obs * ins, act * np.tile(ins, times), np.broadcast_to(ins, obs.shape)]
    return np.concatenate(parts, axis=1)


def fit_steps(train: Episodes, features: Features = pooled_features, seed: int = 0) -> Linear | None:
    """The regression of "this step is the hazard" on features, over the steps that stage 2 learns from.

    Every step counts alike, whatever ``train.balance`` says.

    Args:
        train: Trajectories to fit on.
        features: What is read of a trajectory's steps.
        seed: Draws the steps that are left out where there are too many.

    Returns:
        ``None`` where only one class is supervised.
    """
    supervised = np.flatnonzero(train.hazard_step != -2)
    ends = [len(train.rows[i][1]) if (h := train.hazard_step[i]) < 0 else int(h) + 1 for i in supervised]
    hazards = [np.arange(end) == train.hazard_step[i] for i, end in zip(supervised, ends, strict=True)]
    _, actions, instruction = train.vectors(0)
    most = LARGEST_BYTES // (4 * pooled_size(len(instruction), actions.shape[1]))
    rng = np.random.default_rng(seed)
    share = most / max(sum(ends), 1)
    kept = [hazard | (rng.random(len(hazard)) < share) for hazard in hazards]
    if not kept:
        return None
    labels = np.concatenate([hazard[k] for hazard, k in zip(hazards, kept, strict=True)])
    table, at = np.empty((0, 0), np.float32), 0
    for index, k in zip(supervised.tolist(), kept, strict=True):
        own = features(*train.vectors(index))[: len(k)][k]
        if not at:
            table = np.empty((len(labels), own.shape[1]), np.float32)  # filled in place: a copy may not fit
        table[at : at + len(own)] = own
        at += len(own)
    return logistic(table, labels)


def fit_pooled(
    model: ModelConfig, params: Params, train: Episodes, validation: Episodes | None, seed: int
) -> PooledFit:
    """Fits the pooled head of a trained model and gives it the share that ranks validation trajectories best.

    Args:
        model: Sizes.
        params: After stage 2, with a pooled head of zeros.
        train: Trajectories to fit on.
        validation: Trajectories to choose the share on; without some labelled safe and some unsafe the share is 0.
        seed: Draws the steps that are left out where there are too many.
    """
    nothing = PooledFit(params, 0.0)
    judged = [i for i, unsafe in enumerate(validation.unsafe) if unsafe is not None] if validation else []
    labels = np.array([bool(validation.unsafe[i]) for i in judged]) if validation else np.empty(0)
    if validation is None or len(np.unique(labels)) < 2 or (linear := fit_steps(train, seed=seed)) is None:
        return nothing
    pooled = [linear(pooled_features(*validation.vectors(i))) for i in judged]
    every = _recurrent(model, params, validation)
    recurrent = [every[i] for i in judged]
    found = {
        share: auroc(
            np.array([((1 - share) * a + share * b).max() for a, b in zip(recurrent, pooled, strict=True)]), labels
        )
        for share in SHARES
    }
    best = max(found.values())
    share = min(share for share, value in found.items() if value >= best - TOLERANCE)
    logger.info("pooled head: share %g, validation AUROC by share %s", share, found)
    if share == 0.0:
        return nothing  # what was trained stays, byte for byte
    pooled_head = {
        "kernel": (share * linear.kernel[:, None]).astype(np.float32),
        "bias": np.array([share * linear.bias], np.float32),
    }
    return PooledFit({**_scaled(params, 1 - share), "pooled_head": pooled_head}, share)


def _scaled(params: Params, factor: float) -> Params:
    """The parameters with the recurrent hazard logit multiplied by a factor."""
    out = {name: leaf * factor for name, leaf in params["hazard_head"]["out"].items()}
    return {**params, "hazard_head": {**params["hazard_head"], "out": out}}


def _recurrent(model: ModelConfig, params: Params, episodes: Episodes) -> list[np.ndarray]:
    """Hazard logits of the recurrent heads, ``[T]`` each."""
    # Scores are risks, in which large logits are equal; a sixteenth of them are not, and scaling by it is exact.
    scorer = Scorer(model, _scaled(params, 1 / 16))
    sequences = (
        Sequence(observations[:-1], beside(*actions.T) if actions.ndim == 2 else actions, ins)
        for observations, actions, ins in episodes.rows
    )
    risks = dict(scorer.score(sequences, lambda rows: episodes.table[rows]))
    hazard = [risks[i][:, 0].astype(np.float64) for i in range(len(episodes))]
    return [16 * logit(risk) for risk in hazard]
