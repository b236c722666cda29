"""From the model's two risks to scored trajectories, equal to a live replay."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxguard.decision.calibration import calibrate
from jaxguard.decision.evidence import EvidenceError, EvidenceState, FusionParams, advance
from jaxguard.decision.policy import decide_step
from jaxguard.decision.scored import judge
from jaxguard.types import Decision, Step, Trajectory

RNG = np.random.default_rng(2)
LENGTHS = [3, 0, 5, 1]
TRAJECTORIES = [
    Trajectory(
        f"t{i}", "do it", tuple(Step("tool", {}, str(j)) for j in range(n)), unsafe=False,
        metadata={"domain": "bank" if i % 2 else "mail"},
    )
    for i, n in enumerate(LENGTHS)
]  # fmt: skip
CALIBRATION = calibrate(
    RNG.random(100) * 0.8,
    np.concatenate([RNG.random(50) * 0.4, RNG.random(50)]),
    alpha_hold=0.2,
    alpha_block=0.1,
    fusion=FusionParams(),
    encoder="e",
    weights="w",
    groups=["mail"] * 50 + ["bank"] * 50,
    group_key="domain",
)


def test_equals_a_live_replay() -> None:
    hazard, prefix = RNG.random((2, sum(LENGTHS)))
    scored = judge(TRAJECTORIES, hazard, prefix, CALIBRATION)
    assert [len(s) for s in scored] == LENGTHS
    at = 0
    for trajectory, record in zip(TRAJECTORIES, scored, strict=True):
        cut = CALIBRATION.for_metadata(trajectory.metadata)
        assert (record.lambda_block, record.lambda_hold) == (cut.block, cut.hold)
        state = EvidenceState()
        for t in range(len(trajectory)):
            state, step = advance(state, hazard[at], prefix[at], CALIBRATION.fusion)
            decision, margin = decide_step(step.hazard, step.fused, cut)
            v = record.verdict(t)
            assert (v.step, v.decision, v.fused, v.ema, v.win, v.margin) == (
                t, decision, step.fused, step.ema, step.win, margin,
            )  # fmt: skip
            at += 1
    empty = scored[1]
    assert (empty.max_fused, empty.max_hazard, empty.first_alert, empty.first_block) == (0.0, 0.0, None, None)


def test_firsts_and_maxima() -> None:
    hazard = [0.0, 0.5, 1.0, 0.1, math.nan, 0.1, 0.1, 0.1, 0.0]
    scored = judge(TRAJECTORIES, hazard, [0.0, 1.0, 1.0] + [0.0] * 6, CALIBRATION)
    assert (scored[0].first_alert, scored[0].first_block, scored[0].max_hazard) == (1, 2, 1.0)
    assert scored[2].decision.tolist() == [0, Decision.HOLD, 0, 0, 0]
    assert (scored[2].max_hazard, scored[2].max_fused) == (math.inf, math.inf)
    assert math.isnan(scored[2].verdict(1).margin)
    assert scored[3].first_alert is None


def test_wrong_count_is_refused() -> None:
    with pytest.raises(EvidenceError, match="sum to 8 steps"):
        judge(TRAJECTORIES, np.zeros(8), np.zeros(8), CALIBRATION)
