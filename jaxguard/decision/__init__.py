"""Evidence over time, conformal thresholds, and PASS / HOLD / BLOCK. NumPy and SciPy only."""

from jaxguard.decision.calibration import Calibration, CalibrationError, calibrate
from jaxguard.decision.conformal import ConformalError, Threshold, conformal_threshold, false_alert_band
from jaxguard.decision.evidence import (
    EvidenceState,
    FusionParams,
    advance,
    evidence,
    evidence_padded,
    trajectory_max,
)
from jaxguard.decision.fusion import DEFAULT_FUSION, FusionFit, FusionGrid, fit_fusion
from jaxguard.decision.policy import Cutoffs, Mode, Ruling, decide, decide_step, enforce
from jaxguard.decision.scored import ScoredTrajectory, judge

__all__ = [
    "DEFAULT_FUSION",
    "Calibration",
    "CalibrationError",
    "ConformalError",
    "Cutoffs",
    "EvidenceState",
    "FusionFit",
    "FusionGrid",
    "FusionParams",
    "Mode",
    "Ruling",
    "ScoredTrajectory",
    "Threshold",
    "advance",
    "calibrate",
    "conformal_threshold",
    "decide",
    "decide_step",
    "enforce",
    "evidence",
    "evidence_padded",
    "false_alert_band",
    "fit_fusion",
    "judge",
    "trajectory_max",
]
