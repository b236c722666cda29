"""Metrics of routed rows against scikit-learn and by hand; rows that do not fit are refused."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from routed import make_rows
from sklearn.metrics import accuracy_score, f1_score, recall_score

from jaxguard.decision.routing import RoutingError
from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.routing_rows import confusion, defined, routing_metrics
from jaxguard.types import Route

EXECUTE, ASK, REFUSE = Route


def test_metrics_equal_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    labels, routes = rng.integers(0, 3, 400), rng.integers(0, 3, 400)
    found = defined(routing_metrics(confusion(labels, routes)[None]))
    f1 = f1_score(labels, routes, average=None)
    assert found["acc"] == pytest.approx(accuracy_score(labels, routes))
    assert found["macro_f1"] == pytest.approx(f1.mean())
    assert [found[f"f1_{name}"] for name in ("execute", "ask", "refuse")] == pytest.approx(f1.tolist())
    assert found["rr"] == pytest.approx(recall_score(labels, routes, average=None)[2])
    assert found["oar"] == pytest.approx((routes[labels == EXECUTE] == ASK).mean())
    assert found["uar"] == pytest.approx((routes[labels == ASK] == EXECUTE).mean())


def test_what_has_no_row_is_none_and_never_0() -> None:
    found = defined(routing_metrics(confusion(np.array([EXECUTE, EXECUTE]), [EXECUTE, ASK])[None]))
    assert found == {
        "acc": 0.5, "macro_f1": None, "f1_execute": pytest.approx(2 / 3), "f1_ask": None, "f1_refuse": None,
        "rr": None, "oar": 0.5, "uar": None,
    }  # fmt: skip
    assert set(defined(routing_metrics(np.zeros((1, 3, 3)))).values()) == {None}


def test_a_weighted_sample_is_the_sample_with_repeated_rows() -> None:
    rng = np.random.default_rng(1)
    labels, routes, weights = rng.integers(0, 3, 50), rng.integers(0, 3, 50), rng.integers(0, 4, 50)
    repeated = confusion(np.repeat(labels, weights), np.repeat(routes, weights))
    summed = sum(w * confusion(labels[[i]], routes[[i]]) for i, w in enumerate(weights))
    assert (repeated == summed).all()


def test_selected_rows_keep_their_columns() -> None:
    rows = make_rows(60)
    at = rows.of("services", "chat")
    own = rows.select(at)
    assert len(own) == at.sum() > 0
    assert own.ids == tuple(np.array(rows.ids)[at])
    np.testing.assert_array_equal(own.logits, rows.logits[at])
    assert rows.clusters[0] == rows.groups[0]
    assert replace(rows, groups=[""] * len(rows)).clusters[0] != replace(rows, groups=[""] * len(rows)).clusters[1]


@pytest.mark.parametrize("name", [own.name for own in fields(make_rows(1))])
def test_every_column_has_as_many_rows(name: str) -> None:
    rows = make_rows(9)
    with pytest.raises((EvaluationError, RoutingError), match=r"got (\d+|int64 of shape)"):
        replace(rows, **{name: getattr(rows, name)[:-1]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((12, 2))}, "logits: got shape"),
        ({"labels": np.full(12, 7)}, "labels: got 7"),
        ({"services": [None] * 12}, "services: got None, expected texts"),
        ({"ids": ["x"] * 12}, "ids: got 11 twice"),
        ({"sides": ["left"] * 12}, "side 'left'"),
        ({"pairs": [""] * 12}, "expected base or mem with one"),
        ({"pairs": ["p"] * 12, "sides": ["base"] * 12}, "pair 'p': got two base rows"),
    ],
)
def test_rows_that_do_not_fit_are_named(change: dict, message: str) -> None:
    rows = make_rows(9)
    assert len(rows) == 12
    with pytest.raises((EvaluationError, RoutingError), match=message):
        replace(rows, **change)


def test_services_that_differ_in_a_nul_alone_are_two() -> None:
    rows = make_rows(60)
    rows = replace(rows, services=["mail" if i % 3 else "mail\0" for i in range(len(rows))])
    assert rows.of("services", "mail").tolist() == [i % 3 > 0 for i in range(len(rows))]
    assert rows.of("services", "mail\0").tolist() == [i % 3 == 0 for i in range(len(rows))]
