"""The guard that comes with the package: small, whole, of no machine's paths, and awake."""

from __future__ import annotations

import json

import numpy as np
import pytest

import jaxguard
from jaxguard.guard import Guard
from jaxguard.ranking import auroc
from jaxguard.shipping import CARD
from jaxguard.traces.drift import generate

MEGABYTES = 8


@pytest.fixture(scope="module")
def guard() -> Guard:
    return jaxguard.load_default()


def test_it_is_small_and_says_what_it_is() -> None:
    assert sum(path.stat().st_size for path in jaxguard.DEFAULT_GUARD.iterdir()) <= MEGABYTES * 1_000_000
    card = (jaxguard.DEFAULT_GUARD / CARD).read_text(encoding="utf-8")
    for name in ("StepShield", "AgentDyn", "drift", "CC BY 4.0", "MIT"):
        assert name in card


def test_it_holds_no_paths_of_the_machine_that_made_it() -> None:
    description = json.loads((jaxguard.DEFAULT_GUARD / "guard.json").read_text(encoding="utf-8"))
    names = [*description["provenance"]["data"], *description["provenance"]["inputs"]]
    assert names
    assert not [name for name in names if name.startswith("/")]


def test_it_tells_drift_runs_apart_that_it_has_not_seen(guard: Guard) -> None:
    runs = list(generate(20, seed=11))
    scored = guard.score(runs)
    risks = np.array([s.fused.max() for s in scored])
    unsafe = np.array([run.unsafe for run in runs])
    assert auroc(risks, unsafe) >= 0.8
