"""Evidence: step by step, flat, padded and a plain reference agree exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxguard.decision.evidence import (
    EvidenceError,
    EvidenceState,
    FusionParams,
    advance,
    evidence,
    trajectory_max,
)

PARAMS = FusionParams(beta=0.6, window=3, w_hazard=0.9, w_ema=0.7, w_win=0.4)
risks = st.floats(0.0, 1.0, allow_nan=False)
steps = st.lists(st.tuples(risks, risks), max_size=12)
params = st.builds(
    FusionParams,
    beta=st.floats(0.0, 0.999),
    window=st.integers(1, 6),
    w_hazard=st.floats(0.01, 3.0),
    w_ema=st.floats(0.0, 3.0),
    w_win=st.floats(0.0, 3.0),
)


def reference(trajectory: list[tuple[float, float]], p: FusionParams) -> list[tuple[float, float, float]]:
    """The three equations, written as they stand in the paper."""
    out = []
    for t, (hazard, _) in enumerate(trajectory):
        prefixes = [prefix for _, prefix in trajectory[: t + 1]]
        ema = sum((1 - p.beta) * p.beta ** (t - j) * prefixes[j] for j in range(t + 1))
        win = math.fsum(prefixes[-p.window :]) / len(prefixes[-p.window :])
        product = 1.0
        for weight, value in ((p.w_hazard, hazard), (p.w_ema, ema), (p.w_win, win)):
            product *= 1 - min(1.0, max(0.0, weight * value))
        out.append((ema, win, 1 - product))
    return out


def live(trajectory: list[tuple[float, float]], p: FusionParams) -> list[tuple[float, float, float]]:
    state, out = EvidenceState(), []
    for hazard, prefix in trajectory:
        state, step = advance(state, hazard, prefix, p)
        out.append((step.ema, step.win, step.fused))
    return out


def test_by_hand() -> None:
    p = FusionParams(beta=0.5, window=2, w_hazard=1.0, w_ema=0.5, w_win=0.5)
    ev = evidence([0.0, 0.2, 1.0], [0.4, 0.8, 0.0], [3], p)
    np.testing.assert_allclose(ev.ema, [0.2, 0.5, 0.25], rtol=0, atol=1e-15)
    np.testing.assert_allclose(ev.win, [0.4, 0.6, 0.4], rtol=0, atol=1e-15)
    np.testing.assert_allclose(ev.fused, [1 - 0.9 * 0.8, 1 - 0.8 * 0.75 * 0.7, 1.0], rtol=0, atol=1e-15)


def test_weighted_terms_are_clipped_to_one() -> None:
    p = FusionParams(beta=0.0, window=1, w_hazard=5.0, w_ema=0.1, w_win=0.1)
    assert evidence([0.5], [0.0], [1], p).fused[0] == 1.0
    assert advance(EvidenceState(), 0.5, 0.0, p)[1].fused == 1.0


@settings(max_examples=150, deadline=None)
@given(st.lists(steps, max_size=6), params)
def test_live_equals_flat_exactly_and_reference_closely(batch: list, p: FusionParams) -> None:
    flat = [step for trajectory in batch for step in trajectory]
    hazard, prefix = [h for h, _ in flat], [q for _, q in flat]
    ev = evidence(hazard, prefix, np.array([len(t) for t in batch], dtype=int), p)
    rows = list(zip(ev.ema.tolist(), ev.win.tolist(), ev.fused.tolist(), strict=True))
    assert rows == [row for trajectory in batch for row in live(trajectory, p)]
    expected = [row for trajectory in batch for row in reference(trajectory, p)]
    np.testing.assert_allclose(np.reshape(rows, (-1, 3)), np.reshape(expected, (-1, 3)), rtol=0, atol=1e-12)
    assert ((ev.fused >= 0) & (ev.fused <= 1)).all()


def test_long_ragged_batch_and_float32_inputs() -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([0, 1, 700, 3, 0, 25])
    hazard, prefix = rng.random((2, lengths.sum())).astype(np.float32)
    ev = evidence(hazard, prefix, lengths, PARAMS)
    start = 1
    rows = live(list(zip(hazard[start : start + 700], prefix[start : start + 700], strict=True)), PARAMS)
    assert [r[2] for r in rows] == ev.fused[start : start + 700].tolist()


def test_no_step_looks_ahead_or_over_a_boundary() -> None:
    rng = np.random.default_rng(1)
    hazard, prefix = rng.random((2, 20))
    before = evidence(hazard, prefix, [8, 12], PARAMS).fused
    hazard[13:], prefix[13:] = 0.99, 0.99
    after = evidence(hazard, prefix, [8, 12], PARAMS).fused
    assert np.array_equal(before[:13], after[:13])
    assert after[8:13].tolist() == evidence(hazard[8:], prefix[8:], [12], PARAMS).fused[:5].tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_prefix_poisons_the_rest_of_its_trajectory_only(bad: float) -> None:
    prefix = [0.1, bad, 0.1, 0.1, 0.1, 0.1, 0.2, 0.3]
    ev = evidence([0.2] * 8, prefix, [6, 2], PARAMS)
    assert np.isfinite(ev.fused).tolist() == [True] + [False] * 5 + [True] * 2
    state, seen = EvidenceState(), []
    for value in prefix[:6]:
        state, step = advance(state, 0.2, value, PARAMS)
        seen.append(math.isfinite(step.fused))
    assert seen == [True] + [False] * 5


def test_nonfinite_hazard_touches_its_own_step_only() -> None:
    ev = evidence([0.2, math.nan, 0.2], [0.1, 0.1, 0.1], [3], PARAMS)
    assert np.isnan(ev.fused).tolist() == [False, True, False]
    assert math.isnan(advance(EvidenceState(), math.nan, 0.1, PARAMS)[1].fused)


def test_advance_leaves_the_given_state_alone() -> None:
    state, first = advance(EvidenceState(), 0.1, 0.5, PARAMS)
    again = [advance(state, 0.3, 0.9, PARAMS) for _ in range(2)]
    assert again[0] == again[1]
    assert state.recent == (0.5,)
    assert first.win == 0.5


def test_trajectory_max() -> None:
    got = trajectory_max([0.1, 0.7, 0.2, math.nan, 0.9, 0.3], [0, 3, 2, 0, 1, 0])
    assert got.tolist() == [0.0, 0.7, math.inf, 0.0, 0.3, 0.0]
    assert trajectory_max([], np.zeros(2, dtype=int)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: evidence([1.2], [0.1], [1], PARAMS), r"hazard: got .*1\.2.*position 0"),
        (lambda: evidence([0.2], [-0.1], [1], PARAMS), "prefix"),
        (lambda: evidence([0.2], [0.1, 0.2], [1], PARAMS), "prefix: got shape"),
        (lambda: evidence([0.2], [0.1], [2], PARAMS), "sum to 1"),
        (lambda: evidence([0.2], [0.1], [2, -1], PARAMS), "minimum of -1"),
        (lambda: evidence([0.2], [0.1], [1.0], PARAMS), "integers"),
        (lambda: evidence([[0.2]], [[0.1]], [1], PARAMS), r"expected \[N\]"),
        (lambda: advance(EvidenceState(), 0.1, 1.5, PARAMS), r"prefix: got 1\.5"),
        (lambda: FusionParams(beta=1.0), "beta"),
        (lambda: FusionParams(beta=math.nan), "beta"),
        (lambda: FusionParams(window=0), "window"),
        (lambda: FusionParams(w_ema=-1.0), "w_ema"),
        (lambda: FusionParams(w_win=math.inf), "w_win"),
        (lambda: FusionParams(w_hazard=0, w_ema=0, w_win=0), "all are 0"),
    ],
)
def test_bad_inputs_are_named(call, message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        call()


def test_fingerprint_tells_parameters_apart() -> None:
    assert FusionParams().fingerprint == FusionParams().fingerprint
    assert FusionParams().fingerprint != FusionParams(beta=0.71).fingerprint
