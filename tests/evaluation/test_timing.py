"""PHIR, MAS, their ceiling and the lead times, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jaxguard.decision.calibration import calibrate
from jaxguard.decision.evidence import FusionParams
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.metrics import tabulate
from jaxguard.evaluation.timing import (
    LeadTimes,
    lead_times,
    shared_beginnings,
    timeliness,
    timing,
    timing_counts,
    warnings_at,
)
from jaxguard.types import Step, Trajectory


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
    got = timing(np.ones((1, 10)), table, table.first_alert, np.array([0.5]))
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
    got = timing(np.ones((1, 4)), table, table.first_alert, np.array([0.5]))
    assert all(math.isnan(values[0]) for values in got.values())


def test_no_early_stop_has_no_mas() -> None:
    table = tabulate(SCORED[2:4])
    got = timing(np.ones((1, 2)), table, table.first_alert, np.array([0.0]))
    assert got["phir"][0] == 0.0
    assert math.isnan(got["mas"][0])


def fused(name: str, values: list[float], first_hazard: int | None, *, unsafe: bool) -> ScoredTrajectory:
    return replace(record(name, [0] * len(values), first_hazard, unsafe=unsafe), fused=np.array(values))


WARNED = [
    fused("far ahead", [0.1, 0.6, 0.2, 0.9], 3, unsafe=True),  # above 0.5 two steps ahead
    fused("just ahead", [0.1, 0.7, 0.9], 2, unsafe=True),  # one step ahead
    fused("only there", [0.1, 0.2, 0.9, 0.95], 2, unsafe=True),  # what follows the hazard does not count
    fused("at once", [0.9, 0.9], 0, unsafe=True),
    fused("quiet", [0.1, 0.3], None, unsafe=False),
    fused("loud", [0.65, 0.3], None, unsafe=False),
]


def test_timeliness_by_hand() -> None:
    # Before the hazard: 0.6, 0.7, 0.2 and nothing; safe: 0.3, 0.65. Of 8 pairs 2 + 1 are in order.
    assert timeliness(np.ones((1, 6)), tabulate(WARNED))[0] == pytest.approx(3 / 8)
    # Twice the first, none of the last: 0.6 twice, 0.7, 0.2 and nothing against 0.3.
    assert timeliness(np.array([[2, 1, 1, 1, 1, 0.0]]), tabulate(WARNED))[0] == pytest.approx(3 / 5)


def test_untimed_trajectories_do_not_count_for_timeliness() -> None:
    untimed = replace(WARNED[0], id="untimed", timing=False)
    assert timeliness(np.ones((1, 7)), tabulate([*WARNED, untimed]))[0] == pytest.approx(3 / 8)


def test_warnings_at_a_level() -> None:
    maxima = np.linspace(0.0, 0.5, 19)  # alpha 0.05 needs 19: its threshold is the largest, 0.5
    calibration = calibrate(
        maxima, maxima, alpha_hold=0.1, alpha_block=0.05, fusion=FusionParams(), encoder="e", weights="w"
    )
    found = warnings_at(WARNED, calibration, (0.01, 0.05))  # 0.01 needs 99
    assert [(w.alpha, w.threshold, w.fpr, w.phir, w.lead) for w in found] == [(0.05, 0.5, 0.5, 0.5, 1.5)]
    assert warnings_at(WARNED[4:], calibration, (0.05,)) == []


def steps(*observed: str) -> tuple[Step, ...]:
    return tuple(Step("tool", {"n": i}, "", text) for i, text in enumerate(observed))


def test_a_beginning_shared_with_a_safe_trajectory_cannot_be_anticipated() -> None:
    safe = Trajectory("safe", "do it", steps("", "a", "b", "c"), unsafe=False)
    same = Trajectory("same", "do it", steps("", "a", "x"), unsafe=True, first_hazard=2, timing=True)
    other = Trajectory("other", "do it", steps("", "x", "b"), unsafe=True, first_hazard=2, timing=True)
    task = Trajectory("task", "do that", steps("", "a", "x"), unsafe=True, first_hazard=2, timing=True)
    first = Trajectory("first", "do it", steps("", "a"), unsafe=True, first_hazard=0, timing=True)
    shared = shared_beginnings([same, other, task, first, safe], thought=False)
    assert shared == {"same"}
    scored = [replace(record(t.id, [0] * len(t), t.first_hazard), id=t.id) for t in (same, other, task, first)]
    table = tabulate(scored, shared)
    got = timing(np.ones((1, 4)), table, table.first_alert, np.array([0.0]))
    assert got["phir_ceiling"][0] == pytest.approx(2 / 4)
