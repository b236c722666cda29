"""Live runs of held-out tasks, without and with a guard, and what they are summed up to."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxguard.arena.figures import Figures, Row, measure, row
from jaxguard.arena.page import transcript, write_arena_page
from jaxguard.arena.plan import PARTS, ArenaError, Plan, cases
from jaxguard.arena.play import Play, play
from jaxguard.arena.recording import PLAN_FILE, flaw, read_plan
from jaxguard.arena.stage import BENCHMARK, agentdojo_version, load_stages
from jaxguard.guard import Guard
from jaxguard.inputs import SPLITS_FILE, digests_of
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.splits import load_splits
from jaxguard.types import Trajectory
from jaxguard.writing import write_whole

LIVE_PARTS = ("test", "validation")
"""Parts that a guard may be tried on; validation is for choosing settings, and its fusion was fitted there."""
TRANSCRIPTS = 20
RUNS_FILE, FIGURES_FILE, PAGE_FILE, TRANSCRIPTS_FOLDER = "runs.jsonl", "figures.json", "arena.html", "transcripts"


def run_live(
    bundle: Path,
    out: Path,
    recording: Path | None = None,
    *,
    part: str = "test",
    resamples: int = 1_000,
    progress: Callable[[int], None] | None = None,
) -> Figures:
    """Plays every case of a held-out part twice, and writes figures, page and transcripts.

    Args:
        bundle: A calibrated guard that was trained on a recording.
        out: Folder for the results.
        recording: Folder that ``record`` wrote; by default the one that the guard says it was trained on.
        part: ``"test"``, or ``"validation"`` while settings are chosen.
        resamples: Of the bootstrap.
        progress: Called with the number of cases done.

    Raises:
        ArenaError: the tasks of that part may have trained or calibrated the guard.
        JaxguardError: no recording or no calibrated guard there, or AgentDojo is not installed.
    """
    if part not in LIVE_PARTS:
        raise ArenaError(f"part: got {part!r}, expected one of {', '.join(LIVE_PARTS)}: the guard knows the others")
    guard = Guard.load(bundle)
    folder = _recording_of(guard) if recording is None else recording
    plan = held_out_plan(guard, folder)
    stages = load_stages(tuple(plan.users))
    rows: list[Row] = []
    told: list[tuple[Row, Play]] = []
    dropped: Counter[str] = Counter()
    for case in cases(plan, part):
        plain = play(stages[case.suite], case)
        if reason := flaw(case, plain):
            dropped[reason] += 1
            continue
        if not rows:
            play(stages[case.suite], case, guard)  # compiles what the first answers would wait for
        guarded = play(stages[case.suite], case, guard)
        rows.append(row(plain, guarded))
        told.append((rows[-1], guarded))
        if progress is not None:
            progress(len(rows))
    if not rows:
        raise ArenaError(
            f"recording {folder}: its {part} part has no run that can be played ({sum(dropped.values())} dropped), "
            "expected one or more"
        )
    figures = measure(rows, dropped, resamples=resamples, seed=plan.seed)
    _write(out, guard, plan, part, figures, told, bundle)
    return figures


def _recording_of(guard: Guard) -> Path:
    named = [Path(path) for path in guard.provenance.get("data", ()) if (Path(path) / PLAN_FILE).exists()]
    if len(named) != 1:
        raise ArenaError(
            "recording: the guard names no folder that `jaxguard arena record` wrote and that is still there; "
            "name it with --recording"
        )
    return named[0]


def held_out_plan(guard: Guard, recording: Path) -> Plan:
    """The plan of a recording, if the guard was trained on its training part, and beside it on other suites at most.

    Raises:
        ArenaError: it was not, so that nobody knows which tasks it has seen.
    """
    trained, plan = guard.provenance.get("inputs"), read_plan(recording)
    more = {path: _of_other_suites(Path(path), plan) for path in guard.config.data.train_only}
    splits = load_splits(recording / SPLITS_FILE)
    found = digests_of(splits, {"recording": read_trajectories(recording), **more})
    if not isinstance(trained, dict) or sorted(trained.values()) != sorted(found.values()):
        raise ArenaError(
            f"guard: was not trained on {recording} with its {SPLITS_FILE} (and on what data.train_only names as it is "
            "now), so that it may know the tasks held out there; train it with data.trajectories and data.split.file "
            "of that folder"
        )
    for part in PARTS:
        known = {case.id for case in cases(plan, part)}
        if strange := [own for own in splits.get(part, []) if own not in known]:
            raise ArenaError(
                f"{recording / PLAN_FILE}: its {part} part has no run {strange[0]!r}, which {SPLITS_FILE} has there; "
                "record it anew"
            )
    calibration = guard.calibration
    if calibration is None:
        raise ArenaError("guard: has no thresholds; run `jaxguard calibrate` first")
    if "run" not in calibration.provenance:
        raise ArenaError(
            "guard: was calibrated on other trajectories than its run's, which may be of the tasks held out; run "
            "`jaxguard calibrate` on its run"
        )
    return plan


def _of_other_suites(path: Path, plan: Plan) -> list[Trajectory]:
    """What a guard learnt from beside a recording; none may be of the recording's suites, whose goals are held out."""
    if not path.exists():
        raise ArenaError(f"data.train_only: {path}, which the guard was trained on, is not there; play where it is")
    found = list(read_trajectories(path))
    if known := [t for t in found if t.metadata.get("domain") in plan.users]:
        raise ArenaError(
            f"data.train_only {path}: {known[0].id!r} is of {known[0].metadata['domain']}, whose tasks and goals are "
            "held out; expected other suites"
        )
    return found


def _write(
    out: Path, guard: Guard, plan: Plan, part: str, figures: Figures, told: Sequence[tuple[Row, Play]], bundle: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    records = [json.dumps({"id": one.case.id, **dataclasses.asdict(one)}, ensure_ascii=False) for one, _ in told]
    write_whole(out / RUNS_FILE, "".join(f"{record}\n" for record in records))
    assert guard.calibration is not None  # checked with the plan
    facts: dict[str, Any] = {
        "guard": str(bundle),
        "weights": guard.weights,
        "agentdojo": f"{agentdojo_version()}, tasks {BENCHMARK}",
        "suites": ", ".join(plan.users),
        "part": part,
        "seed": plan.seed,
        "lambda_hold": guard.calibration.hold.value,
        "lambda_block": guard.calibration.block.value,
        "safe calibration runs": guard.calibration.hold.n,
    }
    write_whole(out / FIGURES_FILE, json.dumps({"facts": facts, **dataclasses.asdict(figures)}, indent=1) + "\n")
    shown = _choose([(r, p) for r, p in told])
    shutil.rmtree(out / TRANSCRIPTS_FOLDER, ignore_errors=True)
    (out / TRANSCRIPTS_FOLDER).mkdir()
    for number, (kind, _, done) in enumerate(shown, 1):
        name = f"{number:02}-{kind}-{done.case.id.replace('/', '-')}.txt"
        (out / TRANSCRIPTS_FOLDER / name).write_text(transcript(done), encoding="utf-8")
    write_arena_page(out / PAGE_FILE, figures, facts, [(kind, done) for kind, _, done in shown])


def _choose(told: Sequence[tuple[Row, Play]]) -> list[tuple[str, Row, Play]]:
    """Runs to look at: of each kind in turn, spread over tasks, until there are enough."""
    kinds: dict[str, list[tuple[str, Row, Play]]] = {
        name: [] for name in ("missed-attack", "false-alarm", "stopped-attack", "passed")
    }
    for one, done in told:
        if one.hijacked:
            name = "missed-attack" if one.attacked[1] else "stopped-attack"
        else:
            name = "false-alarm" if any(one.refused) else "passed"
        kinds[name].append((name, one, done))
    spread = [_spread(own) for own in kinds.values()]
    chosen: list[tuple[str, Row, Play]] = []
    for turn in range(max(map(len, spread), default=0)):
        chosen += [own[turn] for own in spread if turn < len(own)]
    return sorted(chosen[:TRANSCRIPTS], key=lambda item: list(kinds).index(item[0]))


def _spread(own: Sequence[tuple[str, Row, Play]]) -> list[tuple[str, Row, Play]]:
    """The first run of each user task before the second of any."""
    seen: Counter[str] = Counter()
    turn = []
    for item in own:
        turn.append(seen[item[1].cluster])
        seen[item[1].cluster] += 1
    return [own[i] for i in sorted(range(len(own)), key=lambda i: (turn[i], i))]
