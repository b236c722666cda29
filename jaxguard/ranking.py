"""How well a score ranks: what training, fusion and probes choose by."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata


def auroc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Area under the ROC curve of scores ``[n]`` with ties counted half; NaN where a class is absent.

    ``labels`` ``[n]`` are booleans, or numbers of which those above 0.5 are positive.
    """
    positive = np.asarray(labels, np.float64) > 0.5
    n_pos, n_neg = int(positive.sum()), int((~positive).sum())
    if not n_pos or not n_neg:
        return math.nan
    ranks = rankdata(np.asarray(scores, np.float64))
    return float((ranks[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))
