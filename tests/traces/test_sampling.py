"""Samples keep the shares of their strata and depend on seed and ids alone."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxguard.traces.sampling import risk_type_and_label, stratified
from jaxguard.types import JaxguardError, Trajectory


def population() -> list[Trajectory]:
    kinds = [("leak", True)] * 50 + [("leak", False)] * 30 + [("fraud", True)] * 15 + [("", None)] * 5
    return [
        Trajectory(f"t{i}", "go", (), unsafe=unsafe, metadata={"risk_type": kind} if kind else {})
        for i, (kind, unsafe) in enumerate(kinds)
    ]


@pytest.mark.parametrize(("count", "shares"), [(20, [10, 6, 3, 1]), (10, [5, 3, 1, 1]), (1, [1]), (0, [])])
def test_strata_get_their_share(count: int, shares: list[int]) -> None:
    found = Counter(risk_type_and_label(t) for t in stratified(population(), count, 7))
    assert sorted(found.values(), reverse=True) == shares


def test_seed_and_ids_decide_and_not_the_order() -> None:
    every = population()
    one, other = stratified(every, 20, 7), stratified(every[::-1], 20, 7)
    assert {t.id for t in one} == {t.id for t in other}
    assert one == [t for t in every if t in one]
    assert {t.id for t in stratified(every, 20, 8)} != {t.id for t in one}


def test_all_where_there_are_no_more() -> None:
    every = population()
    assert stratified(every, 1_000, 7) == every
    with pytest.raises(JaxguardError, match="-1"):
        stratified(every, -1, 7)
