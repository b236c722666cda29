"""Scored trajectories with realistic noise, made from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from jaxguard.decision.calibration import Calibration, calibrate
from jaxguard.decision.evidence import FusionParams, evidence, trajectory_max
from jaxguard.decision.scored import ScoredTrajectory, judge
from jaxguard.types import Step, Trajectory

TOOLS = ["read_file", "search_web", "send_email", "list_dir", "http_request", "delete_file", "get_balance"]
NASTY = '<script>alert(1)</script>$x_1$ \u202e\x07 ünï 漢字 & "quotes" \''


@dataclass
class World:
    """Trajectories, their scores and the calibration behind the decisions."""

    trajectories: list[Trajectory]
    scored: list[ScoredTrajectory]
    calibration: Calibration


def make_trajectories(rng: np.random.Generator, n: int, prefix: str, longest: int = 14) -> list[Trajectory]:
    out = []
    for i in range(n):
        length = 60 if i % 40 == 7 else 0 if i % 50 == 11 else int(rng.integers(1, longest))
        unsafe = bool(rng.random() < 0.45) and length > 0
        first = int(rng.integers(0, length)) if unsafe else None
        label: bool | None = None if i % 60 == 17 else unsafe
        known = label is not None and not (unsafe and i % 9 == 4)
        tools = [NASTY if i % 30 == 3 and t == 1 else str(rng.choice(TOOLS)) for t in range(length)]
        steps = tuple(
            Step(tool, {"path": f"/srv/data/{i}/{t}.txt", "note": NASTY if i % 30 == 3 else "quarterly"}, f"c{t}")
            for t, tool in enumerate(tools)
        )
        out.append(
            Trajectory(
                id=f"{prefix}{i}",
                instruction=f"Task {i}: " + (NASTY if i % 30 == 3 else "summarise the folder and report back"),
                steps=steps,
                unsafe=label,
                first_hazard=first if label else None,
                timing=known and (first is not None or not unsafe),
                group=f"{prefix}g{i // 3}",
                source=["drift", "agentdyn", "asb"][i % 3],
                metadata={
                    "domain": ["mail", "files", "bank"][(i // 3) % 3],
                    **({"risk_type": ["leak", "destroy", NASTY][i % 3]} if unsafe else {}),
                },
            )
        )
    return out


def risks(rng: np.random.Generator, trajectories: list[Trajectory]) -> tuple[np.ndarray, np.ndarray]:
    """Risks of a middling model: hazard rises at the hazard, prefix risk before it."""
    hazard, prefix = [], []
    for trajectory in trajectories:
        h = rng.normal(-3.2, 1.0, len(trajectory))
        p = rng.normal(-2.6, 0.8, len(trajectory)) + np.cumsum(rng.normal(0, 0.15, len(trajectory)))
        if trajectory.first_hazard is not None:
            at = trajectory.first_hazard
            h[at:] += rng.normal(4.5, 1.8)
            p += 3.2 * np.exp(-np.maximum(at - np.arange(len(trajectory)), 0) / 2.5) * rng.random() * 1.4
        hazard.append(1 / (1 + np.exp(-h)))
        prefix.append(1 / (1 + np.exp(-p)))
    return np.concatenate(hazard), np.concatenate(prefix)


def make_world(seed: int = 0, n: int = 360, n_calibration: int = 400) -> World:
    rng = np.random.default_rng(seed)
    fusion = FusionParams()
    calibration_set = [t for t in make_trajectories(rng, n_calibration, "c") if t.unsafe is False]
    hazard, prefix = risks(rng, calibration_set)
    lengths = [len(t) for t in calibration_set]
    calibration = calibrate(
        trajectory_max(hazard, lengths),
        trajectory_max(evidence(hazard, prefix, lengths, fusion).fused, lengths),
        alpha_hold=0.1,
        alpha_block=0.02,
        fusion=fusion,
        encoder="minilm-l3-4f2a",
        weights="w-91be",
    )
    trajectories = make_trajectories(rng, n, "t")
    hazard, prefix = risks(rng, trajectories)
    return World(trajectories, judge(trajectories, hazard, prefix, calibration), calibration)


@pytest.fixture(scope="session")
def world() -> World:
    return make_world()


@pytest.fixture(scope="session")
def build() -> Callable[..., World]:
    return make_world
