"""From scores to PASS, HOLD or BLOCK, and what a guard does with that.

Equation 14 of the DreamGuard paper: BLOCK if the hazard risk crosses ``lambda_block``, else HOLD if the
fused risk crosses ``lambda_hold``, else PASS. To cross is to be strictly greater, or, under the paper's
own rule, greater or equal. A score that is not finite never passes: it is HOLD, whatever the other says.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.types import Decision


class Mode(enum.StrEnum):
    """What the guard does with its own decision.

    ``FAIL_CLOSED`` enforces it, and whoever cannot obtain one must treat that as HOLD. ``OBSERVE`` lets
    every call through and only records what would have happened.
    """

    FAIL_CLOSED = "fail_closed"
    OBSERVE = "observe"


@dataclass(frozen=True, slots=True)
class Cutoffs:
    """The two thresholds that apply to one trajectory (group thresholds already resolved)."""

    block: float
    hold: float
    strict: bool = True


@dataclass(frozen=True, slots=True)
class Decisions:
    """Vectorised outcome, each array of the shape of the scores.

    Attributes:
        decision: int8 values of :class:`~jaxguard.types.Decision`.
        margin: Distance to the threshold that decides: positive where crossed, at most 0 below both (of
            the nearer one), NaN where a score was not finite.
        finite: False where a score was not finite.
    """

    decision: NDArray[np.int8]
    margin: NDArray[np.float64]
    finite: NDArray[np.bool_]


def decide(hazard: ArrayLike, fused: ArrayLike, block: ArrayLike, hold: ArrayLike, *, strict: bool = True) -> Decisions:
    """Decisions for arrays of scores; thresholds are numbers or arrays that broadcast against them.

    Args:
        hazard: Hazard risks, any shape.
        fused: Fused risks S, same shape.
        block: ``lambda_block``.
        hold: ``lambda_hold``.
        strict: Cross means ``>``; else ``>=``.
    """
    haz, fus, blk, hld = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (hazard, fused, block, hold)))
    over_block, over_hold = haz - blk, fus - hld
    finite = np.isfinite(haz) & np.isfinite(fus)
    # Compared directly, not by the sign of the difference: as the scalar form and the calibration do.
    blocks = (haz > blk if strict else haz >= blk) & finite
    holds = (fus > hld if strict else fus >= hld) | ~finite
    decision = np.where(blocks, Decision.BLOCK, np.where(holds, Decision.HOLD, Decision.PASS)).astype(np.int8)
    margin = np.where(blocks, over_block, np.where(holds, over_hold, np.maximum(over_block, over_hold)))
    return Decisions(decision, np.where(finite, margin, np.nan), finite)


def decide_step(hazard: float, fused: float, cutoffs: Cutoffs) -> tuple[Decision, float]:
    """Decision and margin of one step; the same as :func:`decide` without the cost of arrays."""
    if not (math.isfinite(hazard) and math.isfinite(fused)):
        return Decision.HOLD, math.nan
    over_block, over_hold = hazard - cutoffs.block, fused - cutoffs.hold
    if hazard > cutoffs.block or (not cutoffs.strict and hazard == cutoffs.block):
        return Decision.BLOCK, over_block
    if fused > cutoffs.hold or (not cutoffs.strict and fused == cutoffs.hold):
        return Decision.HOLD, over_hold
    return Decision.PASS, max(over_block, over_hold)
