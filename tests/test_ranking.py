"""The area under the ROC curve."""

from __future__ import annotations

import numpy as np

from jaxguard.ranking import auroc


def test_auroc() -> None:
    assert auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1])) == 0.75
    assert auroc(np.array([0.5, 0.5]), np.array([0, 1])) == 0.5
    assert np.isnan(auroc(np.array([0.1, 0.2]), np.array([1, 1])))
