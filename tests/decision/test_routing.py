"""Routes at a tau: the share, REFUSE, rows that are not finite, and a routing on disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import softmax

from jaxguard.decision.routing import Routing, RoutingError, route_step, shares
from jaxguard.types import Route

EXECUTE, ASK, REFUSE = Route
ROUTING = Routing(
    taus={"autonomous": 0.2, "balanced": 0.5},
    active="balanced",
    source="abc",
    services={"balanced": {"mail": 0.9}, "autonomous": {}},
    fell_back={"balanced": {"chat": "3 EXECUTE and 0 ASK rows, expected at least 30 of each"}},
    impossible={"conservative": "no tau reaches UAR <= 0.05"},
    provenance={"rows": 120},
)
finite = hnp.arrays(np.float32, st.tuples(st.integers(1, 30), st.just(3)), elements=st.floats(-60, 60, width=32))


def logits_of(*qs: float) -> np.ndarray:
    """Logits whose REFUSE is far below the others and whose q is about what is asked for."""
    q = np.asarray(qs)
    return np.c_[np.log(q), np.log1p(-q), np.full(len(q), -50.0)].astype(np.float32)


@given(finite)
def test_q_is_the_share_of_execute_in_execute_and_ask(logits: np.ndarray) -> None:
    p = softmax(logits.astype(np.float64), axis=1)
    with np.errstate(invalid="ignore"):
        share = p[:, 0] / (p[:, 0] + p[:, 1])
    share = np.where(p[:, 0] + p[:, 1] > 0, share, 1 / (1 + np.exp(logits[:, 1].astype(float) - logits[:, 0])))
    np.testing.assert_allclose(shares(logits).q, share, rtol=1e-9)


@given(finite, st.floats(0, 1), st.floats(0, 1))
def test_refuse_never_moves_and_a_higher_tau_only_asks_more(logits: np.ndarray, a: float, b: float) -> None:
    low, high = (shares(logits).routes(tau) for tau in sorted((a, b)))
    assert ((low == REFUSE) == (high == REFUSE)).all()
    assert ((low == REFUSE) == (logits[:, 2] >= logits[:, :2].max(axis=1))).all()
    assert not ((low == ASK) & (high == EXECUTE)).any()


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0, 0, 0], REFUSE),
        ([5, 0, 5], REFUSE),
        ([0, 5, 5], REFUSE),
        ([5, 0, 4.999], EXECUTE),
        ([0, 5, 4.999], ASK),
        ([0, 0, -1], EXECUTE),  # q is exactly 0.5
        ([-3e38, 3e38, 0], ASK),
        ([3e38, -3e38, 0], EXECUTE),
    ],
)
def test_known_rows_at_one_half(row: list[float], expected: Route) -> None:
    assert shares(np.array([row], np.float32)).routes(0.5).tolist() == [expected]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_row_that_is_not_finite_is_asked_about_at_every_tau_and_counted(bad: float, column: int) -> None:
    logits = np.array([[9.0, 0, 0], [0, 0, 9], [9, 0, 0]])
    logits[0, column] = bad
    found = shares(logits)
    assert found.unscored == 1
    assert math.isnan(found.q[0])
    for tau in (0.0, 0.5, 1.0):
        assert found.routes(tau).tolist() == [ASK, REFUSE, EXECUTE if tau < 1 else ASK]


def test_confident_rows_keep_their_order() -> None:
    """A float32 q would be 1 for all of these."""
    q = shares(np.array([[18, 0, -9], [24, 0, -9], [30, 0, -9], [36, 0, -9]], np.float32)).q
    assert (np.diff(q) > 0).all()
    assert q[-1] < 1


def test_all_execute_at_0_and_only_a_q_of_1_at_1() -> None:
    logits = np.array([[-90, 0, -95], [0, 0, -9], [90, 0, -9]], np.float32)
    assert shares(logits).routes(0).tolist() == [EXECUTE] * 3
    assert shares(logits).routes(1).tolist() == [ASK, ASK, EXECUTE]


@pytest.mark.parametrize("tau", [-1e-9, 1.0000001, math.nan, math.inf, [0.5, 2.0]])
def test_tau_outside_is_refused(tau: float) -> None:
    with pytest.raises(RoutingError, match=r"tau: got .*expected a number in \[0, 1\]"):
        shares(logits_of(0.5, 0.6)).routes(tau)


@pytest.mark.parametrize(
    "logits", [np.zeros(3), np.zeros((2, 2)), np.zeros((1, 3, 1)), [["a", "b", "c"]], [[1, 2], [3]]]
)
def test_logits_of_another_form_are_refused(logits) -> None:
    with pytest.raises(RoutingError, match="logits"):
        shares(logits)


def test_no_rows_are_no_error() -> None:
    assert len(shares(np.empty((0, 3))).routes(0.5)) == 0


def test_a_service_has_its_own_tau_and_others_the_common_one() -> None:
    logits = logits_of(0.3, 0.7, 0.7, 0.7, 0.95)
    assert ROUTING.route(logits).tolist() == [ASK, EXECUTE, EXECUTE, EXECUTE, EXECUTE]
    services = ["chat", "chat", "mail", None, "mail"]
    assert ROUTING.route(logits, services).tolist() == [ASK, EXECUTE, ASK, EXECUTE, EXECUTE]
    assert ROUTING.route(logits, services, point="autonomous").tolist() == [EXECUTE] * 5
    assert ROUTING.taus_for(["mail", "", "new"]).tolist() == [0.9, 0.5, 0.5]


def test_an_impossible_point_says_why_and_an_unknown_one_what_there_is() -> None:
    with pytest.raises(RoutingError, match=r"'conservative' \(no tau reaches UAR <= 0.05\), expected one of autonom"):
        ROUTING.route(logits_of(0.5), point="conservative")
    with pytest.raises(RoutingError, match="'fast', expected one of autonomous, balanced"):
        ROUTING.tau_for("mail", "fast")
    with pytest.raises(RoutingError, match="services: got 1, expected one for each of 2 rows"):
        ROUTING.route(logits_of(0.5, 0.5), ["mail"])


def test_another_source_is_refused() -> None:
    ROUTING.check("abc")
    with pytest.raises(RoutingError, match="'xyz', expected 'abc'"):
        ROUTING.check("xyz")


def test_json_comes_back_equal() -> None:
    assert Routing.from_json(ROUTING.to_json()) == ROUTING
    exact = replace(ROUTING, taus={"balanced": math.nextafter(1 / 3, 1)}, services={}, fell_back={})
    assert Routing.from_json(exact.to_json()).taus == exact.taus


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "version is 9, expected 1"),
        ({"taus": {"balanced": 1.5}}, r"taus\['balanced'\]: got 1.5"),
        ({"taus": {"balanced": True}}, r"taus\['balanced'\]: got True"),
        ({"taus": {"balanced": "0.5"}}, "expected a number"),
        ({"taus": [0.5]}, "routing taus: got"),
        ({"active": "conservative"}, "no tau reaches"),
        ({"active": ""}, "active"),
        ({"source": 3}, "source"),
        ({"services": {"fast": {}}}, "services: got point 'fast'"),
        ({"services": {"balanced": {"mail": -1}}}, "mail"),
        ({"fell_back": {"balanced": {"mail": ""}}}, "expected a reason"),
        ({"impossible": {"x": 1}}, "expected a reason"),
        ({"provenance": []}, "provenance"),
        ({"more": 1}, r"unknown fields \['more'\]"),
    ],
)
def test_damaged_json_is_refused(change: dict, message: str) -> None:
    with pytest.raises(RoutingError, match=message):
        Routing.from_json(json.dumps(json.loads(ROUTING.to_json()) | change))


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense", '{"version": NaN}', "[" * 100_000])
def test_what_is_no_routing_is_refused(text: str) -> None:
    with pytest.raises(RoutingError, match="routing"):
        Routing.from_json(text)


def test_provenance_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(RoutingError, match="provenance"):
        replace(ROUTING, provenance={"x": math.nan}).to_json()


def test_one_step_routes_as_arrays_do() -> None:
    rng = np.random.default_rng(3)
    logits = (4 * rng.normal(size=(500, 3))).astype(np.float32)
    logits[::50, 1] = np.nan
    logits[7] = (1.0, 0.0, 1.0)  # a tie goes to REFUSE
    logits[8] = (np.finfo(np.float32).max, -np.finfo(np.float32).max, 0.0)
    found = shares(logits)
    for tau in (0.0, float(found.q[1]), 0.5, 1.0):
        one = [route_step(row.tolist(), tau) for row in logits]
        np.testing.assert_array_equal([route for route, _ in one], found.routes(tau))
        np.testing.assert_array_equal([q for _, q in one], found.q)
