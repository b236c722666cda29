"""Operating points against an exhaustive search, and routings with services of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxguard.decision.routing import Routing, RoutingError, shares
from jaxguard.decision.routing_fit import CERTIFIED, fit_routing
from jaxguard.decision.routing_points import POINTS, candidate_taus, choose_points
from jaxguard.types import Route

EXECUTE, ASK, REFUSE = Route


def rows_of(executes: list[float], asks: list[float]) -> tuple[np.ndarray, np.ndarray]:
    q = np.array(executes + asks)
    logits = np.c_[np.log(q), np.log1p(-q), np.full(len(q), -50.0)]
    return logits, np.array([EXECUTE] * len(executes) + [ASK] * len(asks))


def noisy(n: int, seed: int = 0, gap: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, n)
    return (gap * np.eye(3)[labels] + rng.normal(size=(n, 3))).astype(np.float32), labels


def rates(logits: np.ndarray, labels: np.ndarray, tau: float) -> tuple[float, float]:
    routes = shares(logits).routes(tau)
    return float((routes[labels == EXECUTE] == ASK).mean()), float((routes[labels == ASK] == EXECUTE).mean())


def test_known_points() -> None:
    logits, labels = rows_of([0.3, 0.6, 0.7, 0.8], [0.1, 0.2, 0.4, 0.65])
    found = choose_points(logits, labels, oar_limit=0.25, uar_limit=0.1)
    auto, balanced, conservative = (found[name] for name in POINTS)
    assert (auto.oar, auto.uar) == (0.25, 0.25)
    assert (auto.low, auto.high) == pytest.approx((0.4, 0.6))
    assert auto.tau == pytest.approx(0.5)
    # (0.2, 0.3] costs 0 + 0.5, (0.4, 0.6] 0.25 + 0.25, (0.65, 0.7] 0.5 + 0: the widest of the three.
    assert balanced.tau == pytest.approx(0.5)
    assert (conservative.oar, conservative.uar, conservative.reason) == (0.5, 0.0, "")
    assert conservative.tau == pytest.approx(0.675)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.05, 0.2, 0.5]))
def test_points_are_the_best_of_all_taus(seed: int, limit: float) -> None:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, rng.integers(2, 25))
    logits = rng.normal(size=(len(labels), 3)).round(rng.integers(0, 2)).astype(np.float32)
    found = choose_points(logits, labels, oar_limit=limit, uar_limit=limit)
    if not {EXECUTE, ASK} <= set(labels.tolist()):
        assert all(point.tau is None and "EXECUTE and" in point.reason for point in found.values())
        return
    q = shares(logits).q
    every = [rates(logits, labels, tau) for tau in np.unique(np.r_[0.0, q, np.nextafter(q, 1), 1.0])]
    best = {
        "autonomous": min(((uar, oar) for oar, uar in every if oar <= limit), default=None),
        "balanced": min(oar + uar for oar, uar in every),
        "conservative": min(((oar, uar) for oar, uar in every if uar <= limit), default=None),
    }
    for name, point in found.items():
        if point.tau is None:
            assert best[name] is None
            continue
        oar, uar = rates(logits, labels, point.tau)
        assert (oar, uar) == (point.oar, point.uar)
        got = {"autonomous": (uar, oar), "balanced": oar + uar, "conservative": (oar, uar)}[name]
        assert got == pytest.approx(best[name], abs=1e-12)
        assert oar <= limit or name != "autonomous"
        assert uar <= limit or name != "conservative"
        # The whole of (low, high] does the same.
        assert rates(logits, labels, point.high) == (oar, uar)
        assert rates(logits, labels, np.nextafter(point.low, 1)) == (oar, uar)


def test_what_cannot_be_reached_has_no_tau() -> None:
    logits, labels = rows_of([0.4] * 4, [0.2] * 4)
    logits[:2] = np.nan  # EXECUTE rows that are always asked about
    logits[-3:] = [90, 0, -9]  # ASK rows that always execute
    found = choose_points(logits, labels)
    assert found["autonomous"].tau is None
    assert found["autonomous"].reason == ("no tau reaches OAR <= 0.05: the lowest OAR is 2 of 4, the lowest UAR 3 of 4")
    assert found["conservative"].tau is None
    assert "UAR <= 0.05" in found["conservative"].reason
    assert found["balanced"].tau == pytest.approx(0.3)


def test_a_limit_is_exact() -> None:
    """1 of 20 is 5 %, which a float product of 0.05 and 20 may miss."""
    logits, labels = rows_of([0.3] + [0.9] * 19, [0.2] * 10 + [0.5] * 10)
    assert choose_points(logits, labels)["autonomous"].uar == 0.0


def test_candidates_show_every_pair_of_rates() -> None:
    logits, labels = noisy(300)
    every = {rates(logits, labels, tau) for tau in np.r_[0.0, np.nextafter(shares(logits).q, 1).clip(0, 1)]}
    taus = candidate_taus(logits, labels)
    assert {rates(logits, labels, tau) for tau in taus} == every
    few = candidate_taus(logits, labels, 10)
    assert len(few) == 10
    assert set(few) <= set(taus)
    assert (np.diff(taus) > 0).all()


@pytest.mark.parametrize("limit", [0.0, 1.0, -0.1, np.nan, True, "0.1"])
def test_limits_outside_are_refused(limit) -> None:
    with pytest.raises(RoutingError, match="uar_limit: got"):
        choose_points(*noisy(10), uar_limit=limit)


def test_services_have_taus_of_their_own_or_say_why_not() -> None:
    logits, labels = noisy(900)
    logits[600:, 0] += 2.0  # this service looks more executable than it is: its tau must be higher
    services = ["chat"] * 540 + ["rare"] * 60 + ["mail"] * 280 + [""] * 10 + [None] * 10
    routing = fit_routing(logits, labels, services, source="abc", min_rows=30, provenance={"split": "validation"})
    assert routing.active == "balanced"
    assert set(routing.taus) == set(POINTS)
    assert set(routing.services["balanced"]) == {"chat", "mail"}
    assert routing.tau_for("mail") > routing.tau_for("chat") + 0.1
    assert routing.tau_for("rare") == routing.taus["balanced"]
    assert "expected at least 30 of each" in routing.fell_back["balanced"]["rare"]
    assert routing.provenance["split"] == "validation"
    assert routing.provenance["rows"] == 900
    own = np.array([service == "mail" for service in services])
    alone = choose_points(logits[own], labels[own])
    assert routing.services["conservative"]["mail"] == alone["conservative"].tau
    assert routing.route(logits, services)[own].tolist() == shares(logits[own]).routes(alone["balanced"].tau).tolist()
    assert Routing.from_json(routing.to_json()) == routing


def test_services_that_differ_in_a_nul_alone_are_two() -> None:
    logits, labels = noisy(900)
    logits[600:, 0] += 2.0
    both = fit_routing(logits, labels, ["chat"] * 600 + ["chat\0"] * 300, source="abc", min_rows=30)
    assert both.tau_for("chat\0") > both.tau_for("chat") + 0.1


def test_a_point_that_a_service_cannot_reach_falls_back() -> None:
    logits, labels = noisy(900, gap=3.0)
    services = np.array(["chat"] * 840 + ["mail"] * 60, dtype=object)
    logits[840:] = np.where((labels[840:] == ASK)[:, None], [90.0, 0, -9], logits[840:])  # always execute
    routing = fit_routing(logits, labels, services, source="abc", min_rows=5, uar_limit=0.2)
    assert "no tau reaches UAR <= 0.2" in routing.fell_back["conservative"]["mail"]
    assert "mail" in routing.services["balanced"]
    assert routing.tau_for("mail", "conservative") == routing.taus["conservative"]


def test_a_certified_point_is_one_of_all_services() -> None:
    logits, labels = noisy(2_000)
    routing = fit_routing(logits, labels, ["mail"] * 2_000, source="abc", delta=0.05, active=CERTIFIED)
    assert rates(logits, labels, routing.taus[CERTIFIED])[1] < 0.05
    assert routing.tau_for("mail") == routing.taus[CERTIFIED]
    assert routing.taus[CERTIFIED] > routing.taus["conservative"]
    few = fit_routing(logits[:90], labels[:90], ["mail"] * 90, source="abc", delta=0.05)
    assert "expected at least 59" in few.impossible[CERTIFIED]


def test_an_active_point_that_is_impossible_is_refused() -> None:
    logits, labels = noisy(100)
    with pytest.raises(RoutingError, match=r"'balanced' \(.* 0 ASK rows"):
        fit_routing(logits, np.where(labels == ASK, REFUSE, labels), ["mail"] * 100, source="abc")
    with pytest.raises(RoutingError, match="min_rows: got 0"):
        fit_routing(logits, labels, ["mail"] * 100, source="abc", min_rows=0)
    with pytest.raises(RoutingError, match="services: got 2"):
        fit_routing(logits, labels, ["mail"] * 2, source="abc")
