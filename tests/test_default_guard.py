"""The guard that comes with the package: small, whole, of no machine's paths, and awake."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import jaxguard
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard
from jaxguard.ranking import auroc
from jaxguard.shipping import CARD
from jaxguard.traces.drift import generate
from jaxguard.traces.reading import ArchiveReader
from jaxguard.types import Trajectory

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


def agreement(guard: Guard, runs: Iterable[Trajectory], path: Path) -> tuple[float, int]:
    """Share of steps on which bfloat16 and float32 decide alike, and the number of steps with an alert."""
    runs = list(runs)
    texts = list(dict.fromkeys(text for run in runs for text in trajectory_texts(run, grounded=True).unique()))
    store = FeatureStore.create_or_open(path, guard.encoder.fingerprint, guard.encoder.dim)
    store.add(texts, guard.encoder.encode(texts))
    one, other = (
        np.concatenate([s.decision for s in dataclasses.replace(guard, precision=precision).score(runs, store)])
        for precision in ("float32", "bfloat16")
    )
    return float((one == other).mean()), int((one > 0).sum())


def test_bfloat16_decides_as_float32_does_on_drift(guard: Guard, tmp_path: Path) -> None:
    share, alerts = agreement(guard, generate(80, seed=12), tmp_path / "features")
    assert alerts >= 20
    assert share >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("files", "stride"), [("agentdyn/*.jsonl.gz", 2), ("stepshield/test.jsonl.gz", 10)])
def test_bfloat16_decides_as_float32_does_on_real_steps(
    guard: Guard, data_dir: Path, tmp_path: Path, files: str, stride: int
) -> None:
    """On some ten thousand steps of AgentDyn and seven thousand of StepShield; one in a thousand needs as many."""
    outcomes = (outcome for path in sorted(data_dir.glob(files)) for outcome in ArchiveReader().read_local(path))
    runs = (run for outcome in outcomes for run in outcome.trajectories)
    share, alerts = agreement(guard, itertools.islice(runs, 0, None, stride), tmp_path / "features")
    assert alerts >= 20
    assert share >= 0.999
