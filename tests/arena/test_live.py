"""Record, embed, train, calibrate and run at toy size; guards that may know the held-out tasks are refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("agentdojo", reason="the extra 'arena' is not installed")

from small_run import SIZES, SmallRun, done, refused

from jaxguard.arena.live import FIGURES_FILE, PAGE_FILE, RUNS_FILE, TRANSCRIPTS, TRANSCRIPTS_FOLDER
from jaxguard.arena.plan import Plan
from jaxguard.arena.recording import PLAN_FILE
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.traces.splits import load_splits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Path:
    """A folder with a recording of the smallest suite and a calibrated guard trained on it; not to be changed."""
    from small_run import at_toy_size

    root = tmp_path_factory.mktemp("arena")
    with at_toy_size(compiled):
        done("arena", "record", "--out", root / "data", "--suites", "banking", "--seed", "1")
        done("embed", "--quiet", "--trajectories", root / "data", "--store", root / "store", *SIZES)
        settings = (f"data.trajectories=[{root / 'data'}]", f"data.store={root / 'store'}",
                    f"data.split.file={root / 'data' / 'splits.json'}")  # fmt: skip
        done("train", "--quiet", "--out", root / "run", *SIZES, *settings)
        done("calibrate", root / "run")
    return root


def test_a_recording_keeps_what_is_held_out_apart(arena: Path) -> None:
    recorded = {t.id: t for t in read_trajectories(arena / "data")}
    splits = load_splits(arena / "data" / "splits.json", recorded)
    plan = Plan.from_json(json.loads((arena / "data" / PLAN_FILE).read_text())["plan"])
    held_out = {f"banking/{user}" for user in plan.users["banking"]["test"]}
    goals = {f"banking/{goal}" for goal in plan.goals["banking"]["test"]}
    for part, ids in splits.items():
        for name in ids:
            assert (recorded[name].group in held_out) == (part == "test")
            assert part == "test" or recorded[name].metadata.get("injection_task_id") not in goals
    unsafe = [t for t in recorded.values() if t.unsafe]
    assert unsafe
    assert all(t.steps[t.first_hazard].hazard for t in unsafe if t.first_hazard is not None)
    assert all(t.first_hazard is not None and t.timing for t in unsafe)


def test_a_live_run_writes_figures_page_and_transcripts(arena: Path, toy_size: None, tmp_path: Path) -> None:
    said = done("arena", "run", "--guard", arena / "run" / "guard", "--out", tmp_path / "live")
    assert "Attack success 1.000" in said.out
    out = tmp_path / "live"
    figures = json.loads((out / FIGURES_FILE).read_text())
    rows = [json.loads(line) for line in (out / RUNS_FILE).read_text().splitlines()]
    attacks = [row for row in rows if row["case"]["conduct"] in ("at_once", "at_end")]
    assert figures["every"]["attacks"] == len(attacks) > 0
    with_guard = sum(row["attacked"][1] for row in attacks) / len(attacks)
    assert figures["every"]["metrics"]["success_with"]["value"] == pytest.approx(with_guard)
    assert figures["calls"] == sum(row["calls"] for row in rows)
    assert len(list((out / TRANSCRIPTS_FOLDER).iterdir())) == min(TRANSCRIPTS, len(rows))
    assert "Live arena" in (out / PAGE_FILE).read_text()


def test_parts_that_the_guard_knows_are_refused(arena: Path, toy_size: None, tmp_path: Path) -> None:
    message = refused("arena", "run", "--guard", arena / "run" / "guard", "--out", tmp_path, "--part", "train")
    assert "got 'train', expected one of test, validation" in message


def test_a_guard_of_other_data_or_another_split_is_refused(
    arena: Path, small_run: SmallRun, toy_size: None, tmp_path: Path
) -> None:
    other = ("--out", tmp_path / "out", "--recording", arena / "data")
    assert "was not trained on" in refused("arena", "run", "--guard", small_run.guard, *other)
    assert "names no folder" in refused("arena", "run", "--guard", small_run.guard, "--out", tmp_path / "out")
    moved = tmp_path / "data"
    shutil.copytree(arena / "data", moved)
    found = json.loads((moved / "splits.json").read_text())
    found["splits"]["train"].append(found["splits"]["test"].pop())
    (moved / "splits.json").write_text(json.dumps(found))
    asked = ("arena", "run", "--guard", arena / "run" / "guard", "--out", tmp_path / "out", "--recording", moved)
    assert "was not trained on" in refused(*asked)


def test_a_guard_calibrated_elsewhere_is_refused(arena: Path, toy_size: None, tmp_path: Path) -> None:
    guard = tmp_path / "guard"
    done("recalibrate", "--guard", arena / "run" / "guard", "--trajectories", arena / "data", "--out", guard)
    message = refused("arena", "run", "--guard", guard, "--out", tmp_path / "out")
    assert "calibrated on other trajectories" in message


def test_a_plan_of_another_version_is_refused(arena: Path, toy_size: None, tmp_path: Path) -> None:
    moved = tmp_path / "data"
    shutil.copytree(arena / "data", moved)
    about = json.loads((moved / PLAN_FILE).read_text())
    asked = ("arena", "run", "--guard", arena / "run" / "guard", "--out", tmp_path / "out", "--recording", moved)

    def answer(**changes: object) -> str:
        (moved / PLAN_FILE).write_text(json.dumps({**about, **changes}))
        return refused(*asked)

    assert "record it anew" in answer(benchmark="v0")
    assert f"{moved / PLAN_FILE}: plan: " in answer(plan=None)
    plan = about["plan"]
    users = {"banking": {**plan["users"]["banking"], "test": plan["users"]["banking"]["train"]}}
    assert "has no run 'scripted-" in answer(plan={**plan, "users": users})


def test_beside_a_recording_other_suites_may_be_trained_on_and_no_others(
    arena: Path, toy_size: None, tmp_path: Path
) -> None:
    recorded = list(read_trajectories(arena / "data"))
    more, store = tmp_path / "more.jsonl", shutil.copytree(arena / "store", tmp_path / "store")

    def trained(domain: str) -> tuple[object, ...]:
        own = (
            dataclasses.replace(t, id=f"more {t.id}", group=f"more {t.group}", metadata={"domain": domain})
            for t in recorded[:20]
        )
        write_trajectories(own, more)
        out = tmp_path / domain
        settings = (f"data.trajectories=[{arena / 'data'}]", f"data.store={store}", f"data.train_only=[{more}]",
                    f"data.split.file={arena / 'data' / 'splits.json'}")  # fmt: skip
        done("train", "--quiet", "--out", out, *SIZES, *settings)
        done("calibrate", out)
        return "arena", "run", "--guard", out / "guard", "--out", tmp_path / "live", "--recording", arena / "data"

    assert "is of banking, whose tasks and goals are held out" in refused(*trained("banking"))
    asked = trained("elsewhere")
    done(*asked)
    more.unlink()
    assert f"data.train_only: {more}, which the guard was trained on, is not there" in refused(*asked)
