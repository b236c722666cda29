"""Unguarded runs as trajectories to train a guard on, with the plan that says which tasks are held out."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.arena.plan import HIJACKED, ArenaError, Case, Plan, cases, make_plan
from jaxguard.arena.play import Play, play, trajectory
from jaxguard.arena.stage import BENCHMARK, agentdojo_version, load_stages
from jaxguard.inputs import PARTS, SPLITS_FILE
from jaxguard.traces.convert import write_made
from jaxguard.traces.files import load_json
from jaxguard.traces.splits import save_splits
from jaxguard.types import Trajectory
from jaxguard.writing import write_whole

PLAN_FILE = "arena.json"
RECORDING_VERSION = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recording:
    """What :func:`record` wrote, in short.

    Attributes:
        plan: How tasks are divided.
        runs: Trajectories by ``part/conduct``.
        dropped: Runs left out, by reason.
        unsolved: User tasks that the ground-truth agent does not solve by itself.
    """

    plan: Plan
    runs: dict[str, int]
    dropped: dict[str, int]
    unsolved: Sequence[str]


def flaw(case: Case, done: Play) -> str:
    """Why an unguarded run is none to learn or to measure from; ``""`` where it is one."""
    if case.conduct in HIJACKED:
        if not any(i.startswith("injected") for i in done.course.proposed):
            return "the injection was not seen"
        return "" if done.attacked else "the attack does not work"
    if case.conduct == "ignores":
        return "the goal is reached without being followed" if done.attacked else ""
    return ""


def record(suites: Sequence[str], seed: int, out: Path, *, progress: Callable[[int], None] | None = None) -> Recording:
    """Makes the runs of all parts and writes them to a folder: trajectories, split and plan.

    Args:
        suites: Names of AgentDojo's suites.
        seed: Of the split and of what is drawn.
        out: Folder; an earlier recording in it is replaced.
        progress: Called with the number of runs made.

    Raises:
        JaxguardError: AgentDojo is not installed, or ``out`` holds something else.
    """
    stages = load_stages(suites)
    plan = make_plan(stages, seed)
    made: list[Trajectory] = []
    splits: dict[str, list[str]] = {part: [] for part in PARTS}
    runs: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    unsolved = []
    for part in PARTS:
        for case in cases(plan, part):
            done = play(stages[case.suite], case)
            if case.conduct == "benign" and not done.utility:
                unsolved.append(f"{case.suite}/{case.user}")
            if reason := flaw(case, done):
                dropped[reason] += 1
                continue
            made.append(trajectory(stages[case.suite], done, part))
            splits[part].append(case.id)
            runs[f"{part}/{case.conduct}"] += 1
            if progress is not None:
                progress(len(made))
    write_made(made, out)
    save_splits(out / SPLITS_FILE, {part: sorted(ids) for part, ids in splits.items()}, seed=seed)
    about = {
        "jaxguard_arena": RECORDING_VERSION,
        "agentdojo": agentdojo_version(),
        "benchmark": BENCHMARK,
        "plan": plan.to_json(),
        "runs": dict(runs),
        "dropped": dict(dropped),
        "unsolved": unsolved,
    }
    write_whole(out / PLAN_FILE, json.dumps(about, indent=1) + "\n")
    return Recording(plan, dict(runs), dict(dropped), unsolved)


def read_plan(recording: Path) -> Plan:
    """The plan of a recording.

    Raises:
        ArenaError: the folder holds none, or one of another version of this format or of AgentDojo's tasks.
    """
    file = recording / PLAN_FILE
    try:
        about: Any = load_json(file)
    except (OSError, ValueError) as error:
        raise ArenaError(f"{file}: {error}, expected what `jaxguard arena record` wrote") from error
    found = (about.get("jaxguard_arena"), about.get("benchmark")) if isinstance(about, dict) else None
    if found != (RECORDING_VERSION, BENCHMARK):
        raise ArenaError(
            f"{file}: version and benchmark are {found}, expected {RECORDING_VERSION} and {BENCHMARK}; record it anew"
        )
    try:
        return Plan.from_json(about.get("plan"))
    except ArenaError as error:
        raise ArenaError(f"{file}: {error}") from error
