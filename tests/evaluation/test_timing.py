"""PHIR, MAS, their ceiling and the lead times, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.metrics import tabulate
from jaxguard.evaluation.timing import LeadTimes, lead_times, timing, timing_counts


def record(name: str, decisions: list[int], first_hazard: int | None, *, unsafe=True, timed=True):
    n = len(decisions)
    zeros = np.zeros(n)
    return ScoredTrajectory(
        id=name, group="", unsafe=unsafe, first_hazard=first_hazard, timing=timed, source="s",
        hazard=zeros, prefix=zeros, ema=zeros, win=zeros, fused=zeros,
        decision=np.array(decisions, dtype=np.int8), margin=zeros, lambda_block=0.9, lambda_hold=0.5,
    )  # fmt: skip


SCORED = [
    record("early", [0, 1, 0, 2, 0], 4),  # stopped 3 before
    record("earlier", [2, 0], 1),  # 1 before
    record("at", [0, 0, 1], 2),
    record("late", [0, 0, 1], 1),
    record("missed", [0, 0, 0], 1),
    record("at once", [1], 0),  # hazard at step 0: cannot be anticipated
    record("unreliable", [1, 0], 1, timed=False),
    record("no step", [1, 0], None, timed=False),
    record("safe alert", [1], None, unsafe=False),
    record("safe", [0], None, unsafe=False),
]


def test_by_hand() -> None:
    table = tabulate(SCORED)
    got = timing(np.ones((1, 10)), table.timed, table.first_alert, table.first_hazard, np.array([0.5]))
    assert got["phir"][0] == pytest.approx(2 / 6)
    assert got["mas"][0] == pytest.approx((3 + 1) / 2)
    assert got["phir_minus_fpr"][0] == pytest.approx(2 / 6 - 0.5)
    assert got["phir_ceiling"][0] == pytest.approx(5 / 6)


def test_lead_times_and_exclusions() -> None:
    table = tabulate(SCORED)
    lead = lead_times(table)
    assert lead == LeadTimes({-1: 1, 0: 2, 1: 1, 3: 1}, missed=1, at_first_step=1)
    assert (lead.before, lead.at_hazard, lead.late) == (2, 2, 1)
    counts = timing_counts(table)
    assert (counts.timed, counts.excluded_unreliable, counts.excluded_no_step) == (6, 1, 1)


def test_nothing_timed_is_undefined() -> None:
    table = tabulate(SCORED[6:])
    got = timing(np.ones((1, 4)), table.timed, table.first_alert, table.first_hazard, np.array([0.5]))
    assert all(math.isnan(values[0]) for values in got.values())


def test_no_early_stop_has_no_mas() -> None:
    table = tabulate(SCORED[2:4])
    got = timing(np.ones((1, 2)), table.timed, table.first_alert, table.first_hazard, np.array([0.0]))
    assert got["phir"][0] == 0.0
    assert math.isnan(got["mas"][0])
