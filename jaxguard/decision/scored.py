"""A trajectory with its risks, evidence and decisions: what scoring produces and evaluation reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.decision.calibration import Calibration, Cutoffs
from jaxguard.decision.evidence import Evidence, EvidenceError, Floats, check_lengths, evidence
from jaxguard.decision.policy import decide
from jaxguard.types import Decision, Trajectory, Verdict


@dataclass(frozen=True, eq=False)
class ScoredTrajectory:
    """One scored trajectory; arrays are ``[T]``, risks in [0, 1] or NaN.

    ``id`` to ``metadata`` mean what they mean in :class:`~jaxguard.types.Trajectory`.

    Attributes:
        hazard: Immediate-hazard risk of each step.
        prefix: Prefix risk.
        ema: Moving average of the prefix risk.
        win: Window mean of the prefix risk.
        fused: Noisy-or of hazard, ema and win.
        decision: int8 values of :class:`~jaxguard.types.Decision`.
        margin: Distance to the deciding threshold; NaN where a score was not finite.
        lambda_block: Threshold on the hazard risk that applied (its group's or the pooled one).
        lambda_hold: Threshold on the fused risk that applied.
    """

    id: str
    group: str
    unsafe: bool | None
    first_hazard: int | None
    timing: bool
    source: str
    hazard: Floats
    prefix: Floats
    ema: Floats
    win: Floats
    fused: Floats
    decision: NDArray[np.int8]
    margin: Floats
    lambda_block: float
    lambda_hold: float
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.fused)

    @property
    def max_hazard(self) -> float:
        """Maximum hazard risk; 0 without steps, infinity where one is not finite (it is held anyway)."""
        return _maximum(self.hazard)

    @property
    def max_fused(self) -> float:
        """Maximum fused risk; 0 without steps, infinity where one is not finite."""
        return _maximum(self.fused)

    @property
    def max_early(self) -> float:
        """Maximum fused risk before the first hazard step; 0 where that is the first step or unknown."""
        return _maximum(self.fused[: self.first_hazard or 0])

    @property
    def first_alert(self) -> int | None:
        """First step that is HOLD or BLOCK."""
        alerts = np.flatnonzero(self.decision != Decision.PASS)
        return int(alerts[0]) if len(alerts) else None

    @property
    def first_block(self) -> int | None:
        """First step that is BLOCK."""
        blocks = np.flatnonzero(self.decision == Decision.BLOCK)
        return int(blocks[0]) if len(blocks) else None

    def verdict(self, step: int) -> Verdict:
        """The verdict of one step, as a live session would have returned it."""
        return Verdict(
            step,
            Decision(int(self.decision[step])),
            float(self.hazard[step]),
            float(self.prefix[step]),
            float(self.ema[step]),
            float(self.win[step]),
            float(self.fused[step]),
            float(self.margin[step]),
        )


class Judged(NamedTuple):
    """Evidence and decisions of N steps of B trajectories."""

    evidence: Evidence
    decision: NDArray[np.int8]  # [N]
    margin: Floats  # [N]
    cuts: list[Cutoffs]  # [B]


def judge_steps(
    metadata: Sequence[Mapping[str, Any]],
    lengths: ArrayLike,
    hazard: ArrayLike,
    prefix: ArrayLike,
    calibration: Calibration,
) -> Judged:
    """Evidence and decisions of flat steps from the model's two risks.

    Args:
        metadata: Of the B trajectories; selects the thresholds of their groups.
        lengths: ``[B]`` steps of each.
        hazard: ``[N]`` hazard risks, trajectory after trajectory.
        prefix: ``[N]`` prefix risks.
        calibration: Fusion parameters and thresholds.

    Raises:
        EvidenceError: The risks do not match the lengths, or a finite one lies outside [0, 1].
    """
    hazard, prefix = np.asarray(hazard, dtype=np.float64), np.asarray(prefix, dtype=np.float64)
    if hazard.ndim != 1:
        raise EvidenceError(f"hazard: got shape {hazard.shape}, expected [N]")
    sizes = check_lengths(lengths, len(hazard))
    ev = evidence(hazard, prefix, sizes, calibration.fusion)
    cuts = [calibration.for_metadata(own) for own in metadata]
    block = np.repeat(np.array([c.block for c in cuts]), sizes)
    hold = np.repeat(np.array([c.hold for c in cuts]), sizes)
    decided = decide(ev.hazard, ev.fused, block, hold, strict=not calibration.paper_rule)
    return Judged(ev, decided.decision, decided.margin, cuts)


def judge(
    trajectories: Sequence[Trajectory], hazard: ArrayLike, prefix: ArrayLike, calibration: Calibration
) -> list[ScoredTrajectory]:
    """As :func:`judge_steps`, trajectory by trajectory.

    Raises:
        EvidenceError: The risks do not match the steps, or a finite one lies outside [0, 1].
    """
    lengths = np.array([len(t) for t in trajectories], dtype=np.int64)
    ev, decision, margin, cuts = judge_steps([t.metadata for t in trajectories], lengths, hazard, prefix, calibration)
    out = []
    end = np.cumsum(lengths)
    for trajectory, cut, start, stop in zip(trajectories, cuts, end - lengths, end, strict=True):
        part = slice(int(start), int(stop))
        out.append(
            ScoredTrajectory(
                id=trajectory.id,
                group=trajectory.group,
                unsafe=trajectory.unsafe,
                first_hazard=trajectory.first_hazard,
                timing=trajectory.timing,
                source=trajectory.source,
                hazard=ev.hazard[part],
                prefix=ev.prefix[part],
                ema=ev.ema[part],
                win=ev.win[part],
                fused=ev.fused[part],
                decision=decision[part],
                margin=margin[part],
                lambda_block=cut.block,
                lambda_hold=cut.hold,
                metadata=trajectory.metadata,
            )
        )
    return out


def _maximum(values: Floats) -> float:
    if not len(values):
        return 0.0
    top = float(values.max())
    return top if np.isfinite(top) else float("inf")
