"""The evaluation of a router: sections, points, pairs, frontiers, reliability and grid, each against plain counting."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from routed import SERVICES, make_routing, make_rows

from jaxguard.decision.routing import RoutingError
from jaxguard.decision.routing_bounds import lower_bound, upper_bound
from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.routing import evaluate_routing, frontier, reliability, summarise_grid
from jaxguard.types import Route

EXECUTE, ASK, REFUSE = Route
ROWS = make_rows(600, 2, services=(*SERVICES, "mail"))
ROUTING = make_routing(make_rows(600, 1), min_rows=20, delta=0.05)
ROUTES = ROUTING.route(ROWS.logits, ROWS.services)
MAIL = np.array(ROWS.services) == "mail"


@pytest.fixture(scope="module")
def found():
    rivals = {"coin": np.random.default_rng(0).integers(0, 3, len(ROWS))}
    return evaluate_routing(ROWS, ROUTING, source="abc", rivals=rivals, unseen={"mail": MAIL}, resamples=100)


def section(found, kind: str, name: str = ""):
    return next(own for own in found.sections if (own.kind, own.name) == (kind, name))


def test_unseen_kinds_stand_apart(found) -> None:
    mail = MAIL
    assert found.overall.counts.rows == (~mail).sum()
    unseen = section(found, "unseen", "mail")
    assert unseen.counts.rows == mail.sum()
    assert unseen.models["router"]["acc"].value == pytest.approx((ROWS.labels == ROUTES)[mail].mean())
    assert sum(own.counts.rows for own in found.sections if own.kind == "trigger") == (~mail).sum()
    assert sum(own.counts.rows for own in found.sections if own.kind == "service") == (~mail).sum()


def test_sections_count_what_they_hold(found) -> None:
    chat = section(found, "service", "chat")
    own = np.array(ROWS.services) == "chat"
    labels, routes = ROWS.labels[own], ROUTES[own]
    assert (chat.counts.execute, chat.counts.ask, chat.counts.refuse) == tuple(np.bincount(labels))
    assert chat.counts.unscored == np.isnan(ROWS.logits[own]).any(axis=1).sum() > 0
    assert chat.counts.groups == len({ROWS.groups[i] for i in np.flatnonzero(own)})
    ours = chat.models["router"]
    assert ours["uar"].value == pytest.approx((routes[labels == ASK] == EXECUTE).mean())
    assert ours["uar"].low <= ours["uar"].value <= ours["uar"].high
    assert np.array(chat.confusion).sum() == len(labels)
    assert chat.confusion[ASK][REFUSE] == ((labels == ASK) & (routes == REFUSE)).sum()


def test_rivals_stand_beside(found) -> None:
    for own in found.sections:
        assert list(own.models) == ["router", "coin", "always EXECUTE", "always ASK", "always REFUSE"]
    always = found.overall.models["always ASK"]
    assert (always["oar"].value, always["uar"].value, always["rr"].value) == (1.0, 0.0, 0.0)
    assert always["acc"].value == found.overall.counts.ask / found.overall.counts.rows


def test_a_class_without_rows_is_undefined(found) -> None:
    trigger = section(found, "trigger", "a").models["router"]
    assert trigger["uar"] is None
    assert trigger["rr"] is None
    assert trigger["macro_f1"] is None
    assert trigger["oar"] is not None


def test_points_have_bounds_on_these_rows(found) -> None:
    main = np.array(ROWS.services) != "mail"
    labels = ROWS.labels[main]
    assert [point.name for point in found.points] == list(ROUTING.taus)
    for point in found.points:
        routes = ROUTING.route(ROWS.logits, ROWS.services, point=point.name)[main]
        errors = int((routes[labels == ASK] == EXECUTE).sum())
        kept = int((routes[labels == REFUSE] == REFUSE).sum())
        assert point.uar_upper == upper_bound(errors, int((labels == ASK).sum()), 0.05)
        assert point.rr_lower == lower_bound(kept, int((labels == REFUSE).sum()), 0.05)
        assert point.place == (point.values["oar"], point.values["uar"])
    assert len({point.values["rr"] for point in found.points}) == 1


def test_flip_pairs_are_those_whose_labels_differ(found) -> None:
    places: dict[str, dict[str, int]] = {}
    for i, (pair, side) in enumerate(zip(ROWS.pairs, ROWS.sides, strict=True)):
        if pair and ROWS.services[i] != "mail":
            places.setdefault(pair, {})[side] = i
    flipped = [p for p in places.values() if ROWS.labels[p["base"]] != ROWS.labels[p["mem"]]]
    right = ROWS.labels == ROUTES
    whole = found.pairs[0]
    assert (whole.persona, whole.pairs, found.incomplete_pairs) == ("", len(flipped), 0)
    assert found.unflipped_pairs == len(places) - len(flipped) > 0
    ours = whole.models["router"]
    assert ours["acc_base"].value == pytest.approx(np.mean([right[p["base"]] for p in flipped]))
    assert ours["acc_mem"].value == pytest.approx(np.mean([right[p["mem"]] for p in flipped]))
    assert ours["both"].value == pytest.approx(np.mean([right[p["base"]] and right[p["mem"]] for p in flipped]))
    assert whole.models["always ASK"]["both"].value == 0.0
    assert sorted(own.persona for own in found.pairs[1:]) == ["adversarial", "cautious", "permissive"]
    assert sum(own.pairs for own in found.pairs[1:]) == len(flipped)


def test_half_a_pair_is_counted() -> None:
    rows = ROWS.select(np.array(ROWS.sides) != "mem")
    found = evaluate_routing(rows, ROUTING, source="abc", resamples=0)
    assert found.pairs == ()
    assert found.incomplete_pairs == sum(bool(pair) for pair in rows.pairs)
    assert found.overall.models["router"]["acc"].low != found.overall.models["router"]["acc"].low  # no interval


def test_frontiers_are_what_routing_at_each_tau_gives() -> None:
    curve = frontier(ROWS, "chat", 50)
    own = np.array(ROWS.services) == "chat"
    labels = ROWS.labels[own]
    for tau, oar, uar in zip(curve.taus, curve.oar, curve.uar, strict=True):
        routes = ROWS.shares.routes(tau)[own]
        assert oar == pytest.approx((routes[labels == EXECUTE] == ASK).mean())
        assert uar == pytest.approx((routes[labels == ASK] == EXECUTE).mean())
    assert (np.diff(curve.oar) >= 0).all()
    assert (np.diff(curve.uar) <= 0).all()
    with pytest.raises(EvaluationError, match="'nowhere': got no EXECUTE or no ASK row"):
        frontier(ROWS, "nowhere")


def test_frontiers_are_of_services_that_have_one(found) -> None:
    assert [own.service for own in found.frontiers] == ["", *sorted(SERVICES)]


def test_reliability_by_hand() -> None:
    found = reliability(np.array([0.0, 0.05, 0.95, 1.0]), np.array([False, True, True, True]), bins=10)
    assert found.counts == (2, 0, 0, 0, 0, 0, 0, 0, 0, 2)
    assert found.claimed[0] == pytest.approx(0.025)
    assert found.came_true[0] == 0.5
    assert found.claimed[1] is None
    assert found.ece == pytest.approx((0.475 * 2 + 0.025 * 2) / 4)
    assert reliability(np.empty(0), np.empty(0, bool)).ece is None
    with pytest.raises(EvaluationError, match="outside"):
        reliability(np.array([np.nan]), np.array([True]))


def test_honest_probabilities_have_almost_no_calibration_error() -> None:
    rng = np.random.default_rng(0)
    claimed = rng.random(50_000)
    assert reliability(claimed, rng.random(50_000) < claimed).ece < 0.01
    assert reliability(claimed, rng.random(50_000) < claimed**2).ece > 0.1


def test_grid_of_the_paper() -> None:
    """Table 3: its own mean and population sigma, to the digits printed."""
    table = {"custom GPT": (88.4, 89.7, 4.8, 14.7), "custom Claude": (90.3, 90.0, 7.4, 7.8),
             "LC Claude": (90.5, 89.3, 9.9, 7.7), "LC GPT": (89.5, 92.0, 9.5, 5.5)}  # fmt: skip
    found = summarise_grid(
        {name: dict(zip(("acc", "rr", "oar", "uar"), row, strict=True)) for name, row in table.items()}
    )
    assert [found.mean[key] for key in ("acc", "rr", "oar", "uar")] == pytest.approx([89.7, 90.2, 7.9, 8.9], abs=0.051)
    assert [found.sigma[key] for key in ("acc", "rr", "oar", "uar")] == pytest.approx([0.8, 1.0, 2.0, 3.5], abs=0.051)


def test_a_grid_with_an_undefined_value_has_no_mean_of_it() -> None:
    no_ask = ROWS.select(ROWS.labels != ASK)
    grid = evaluate_routing(ROWS, ROUTING, source="abc", grid={"a": ROWS, "b": no_ask}, resamples=0).grid
    assert grid.configs["b"]["uar"] is None
    assert grid.mean["uar"] is grid.sigma["uar"] is None
    assert grid.mean["oar"] == pytest.approx(grid.configs["a"]["oar"])
    with pytest.raises(EvaluationError, match="no configuration"):
        summarise_grid({})


def test_rows_that_are_not_finite_alone_are_evaluated() -> None:
    rows = replace(ROWS, logits=np.full_like(ROWS.logits, np.nan))
    found = evaluate_routing(rows, ROUTING, source="abc", resamples=0)
    assert found.overall.counts.unscored == len(rows)
    assert found.overall.models["router"]["oar"].value == 1.0
    assert {own.ece for own in found.reliability.values()} == {None}


def test_json_has_null_for_what_is_undefined(found) -> None:
    record = json.loads(found.to_json(), parse_constant=lambda name: pytest.fail(name))
    trigger = next(own for own in record["sections"] if own["kind"] == "trigger")
    assert trigger["models"]["router"]["macro_f1"] is None
    assert record["sections"][0]["models"]["router"]["acc"]["value"] == found.overall.models["router"]["acc"].value


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"source": "xyz"}, RoutingError, "'xyz', expected 'abc'"),
        ({"rivals": {"router": ROUTES}}, EvaluationError, "rivals: got the name 'router'"),
        ({"rivals": {"always ASK": ROUTES}}, EvaluationError, "rivals: got the name 'always ASK'"),
        ({"rivals": {"short": ROUTES[1:]}}, RoutingError, "rivals 'short': got int8 of shape"),
        ({"unseen": {"moon": ~(MAIL | ~MAIL)}}, EvaluationError, "unseen 'moon': got 0 of"),
        ({"unseen": {"all": MAIL | ~MAIL}}, EvaluationError, "none of a kind that was seen"),
        ({"level": 1.0}, EvaluationError, "level: got 1.0"),
    ],
)
def test_what_does_not_fit_is_named(settings: dict, error, message: str) -> None:
    with pytest.raises(error, match=message):
        evaluate_routing(ROWS, ROUTING, **({"source": "abc", "resamples": 0} | settings))


def test_taus_are_told_of_services_that_are_there_in_the_order_of_the_thresholds() -> None:
    rows = make_rows(400)
    routing = make_routing(rows)
    names = [f"service {i}" for i in range(20)]
    taus = {name: 0.1 + i / 100 for i, name in enumerate(names)}
    routing = replace(routing, services={routing.active: taus}, fell_back={routing.active: {"absent": "too few"}})
    present = names[3::2]
    own = replace(rows, services=[present[i % len(present)] for i in range(len(rows))])
    found = evaluate_routing(own, routing, source="abc", resamples=5)
    assert list(found.own_taus.items()) == [(name, taus[name]) for name in present]
    assert found.fell_back == {}
