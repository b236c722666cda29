"""PASS / HOLD / BLOCK: table of cases, scalar equals vectorised, nothing non-finite passes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxguard.decision.policy import Cutoffs, decide, decide_step
from jaxguard.types import Decision

CUT = Cutoffs(block=0.8, hold=0.5)


@pytest.mark.parametrize(
    ("hazard", "fused", "decision", "margin"),
    [
        (0.1, 0.2, Decision.PASS, -0.3),
        (0.7, 0.2, Decision.PASS, -0.1),
        (0.1, 0.6, Decision.HOLD, 0.1),
        (0.9, 0.95, Decision.BLOCK, 0.1),
        (0.9, 0.1, Decision.BLOCK, 0.1),
        (0.8, 0.5, Decision.PASS, 0.0),
    ],
)
def test_cases(hazard: float, fused: float, decision: Decision, margin: float) -> None:
    got, distance = decide_step(hazard, fused, CUT)
    assert got is decision
    assert distance == pytest.approx(margin)
    many = decide([hazard], [fused], CUT.block, CUT.hold)
    assert many.decision.tolist() == [decision]
    assert many.margin[0] == pytest.approx(margin)


def test_paper_rule_alerts_on_equality() -> None:
    loose = Cutoffs(0.8, 0.5, strict=False)
    assert decide_step(0.8, 0.1, loose)[0] is Decision.BLOCK
    assert decide_step(0.1, 0.5, loose)[0] is Decision.HOLD
    assert decide([0.8, 0.1], [0.1, 0.5], 0.8, 0.5, strict=False).decision.tolist() == [2, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("other", [0.0, 0.9, math.nan])
def test_nonfinite_is_held_and_counted(bad: float, other: float) -> None:
    for hazard, fused in ((bad, other), (other, bad)):
        decision, margin = decide_step(hazard, fused, CUT)
        assert decision is Decision.HOLD
        assert math.isnan(margin)
        many = decide([hazard, 0.0], [fused, 0.0], CUT.block, CUT.hold)
        assert many.decision.tolist() == [Decision.HOLD, Decision.PASS]
        assert np.isnan(many.margin).tolist() == [True, False]
        assert many.finite.tolist() == [False, True]


grid = st.one_of(st.sampled_from([0.0, 0.5, 0.8, 1.0, math.nan, math.inf]), st.floats(0, 1))


@given(st.lists(st.tuples(grid, grid), min_size=1, max_size=20), st.booleans())
def test_scalar_equals_vectorised(pairs: list, strict: bool) -> None:
    hazard, fused = np.array(pairs).T
    many = decide(hazard, fused, 0.8, 0.5, strict=strict)
    for i, (h, f) in enumerate(pairs):
        decision, margin = decide_step(h, f, Cutoffs(0.8, 0.5, strict))
        assert many.decision[i] == decision
        np.testing.assert_equal(many.margin[i], margin)


def test_thresholds_broadcast() -> None:
    got = decide(np.full((2, 3), 0.4), np.full((2, 3), 0.4), np.array([[0.3], [0.9]]), np.array([0.1, 0.4, 0.5]))
    assert got.decision.tolist() == [[2, 2, 2], [1, 0, 0]]
