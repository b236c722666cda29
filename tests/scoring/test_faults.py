"""A job that was killed, a full disk, damaged results, inputs that change: nothing is lost, doubled or overwritten."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from small_run import SmallRun, lines, native

from jaxguard.guard import Guard
from jaxguard.scoring import blocks
from jaxguard.scoring.archive import score_archive
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.types import JaxguardError

KINDS = ("parts", "steps", "trajectories", "top", "rejects", "files")


@pytest.fixture(scope="module")
def guard(small_run: SmallRun, compiled: Path) -> Guard:
    from small_run import at_toy_size

    with at_toy_size(compiled):
        return Guard.load(small_run.guard)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    folder = tmp_path / "archive"
    lines(folder / "a.jsonl", native("one", "look", "send"), "{]", native("two", "look"))
    lines(folder / "b.jsonl", native("three", "look"))
    return folder


@pytest.fixture
def small(toy_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every record is a shard."""
    monkeypatch.setattr("jaxguard.scoring.blocks.RECORDS_PER_BLOCK", 1)


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for kind in KINDS for p in sorted((out / kind).iterdir())}


def ids(out: Path) -> list[str]:
    return sorted(pq.read_table(out / "trajectories")["trajectory_id"].to_pylist())


def score(archive: Path, guard: Guard, out: Path) -> Any:
    return score_archive(archive, guard, out, progress=False)


# -- inputs that change ------------------------------------------------------------------------------------------------


def test_a_second_run_scores_nothing_again(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    first = score(archive, guard, tmp_path / "out")
    before = contents(tmp_path / "out")
    again = score(archive, guard, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert (first.run["shards"], again.run["shards"]) == (4, 0)
    assert again.counts == first.counts


def test_renamed_moved_and_copied_files_are_not_scored_again(
    small: None, guard: Guard, archive: Path, tmp_path: Path
) -> None:
    score(archive, guard, tmp_path / "out")
    before = contents(tmp_path / "out")
    (archive / "deep").mkdir()
    (archive / "a.jsonl").rename(archive / "deep" / "z.jsonl")
    shutil.copy(archive / "b.jsonl", archive / "copy.jsonl")
    report = score(archive, guard, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    assert report.run["shards"] == report.run["kept"] == report.run["superseded"] == 0
    files = json.loads((tmp_path / "out" / "manifest.json").read_text())["files"]
    assert files["copy.jsonl"] == files["b.jsonl"] != files["deep/z.jsonl"]


def test_an_edit_after_a_rename_doubles_no_row(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    (archive / "a.jsonl").rename(archive / "z.jsonl")
    score(archive, guard, out)
    lines(archive / "z.jsonl", native("one", "look", "send"), native("new", "look"))
    report = score(archive, guard, out)
    assert ids(out) == ["new", "one", "three"]
    assert (report.run["superseded"], report.run["kept"]) == (1, 0)


def test_an_edit_of_the_copy_that_is_left_doubles_no_row(
    small: None, guard: Guard, archive: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copy(archive / "a.jsonl", archive / "z.jsonl")
    score(archive, guard, out)
    (archive / "a.jsonl").unlink()
    lines(archive / "z.jsonl", native("new", "look"))
    score(archive, guard, out)
    assert ids(out) == ["new", "three"]


def test_names_that_change_places_move_no_row(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    before = contents(out)
    for old, new in (("a", "x"), ("b", "a"), ("x", "b")):
        (archive / f"{old}.jsonl").rename(archive / f"{new}.jsonl")
    report = score(archive, guard, out)
    assert contents(out) == before
    assert (report.run["steps"], report.run["superseded"], report.run["kept"]) == (0, 0, 0)


def test_what_needs_a_package_is_read_when_it_is_there(
    small: None, guard: Guard, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("atif")
    step = {"step_id": 1, "source": "user", "message": "do it"}
    agent = {"name": "a", "version": "1"}
    lines(archive / "c.json", {"schema_version": "ATIF-v1.4", "session_id": "s", "agent": agent, "steps": [step]})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "atif", None)
        report = score(archive, guard, tmp_path / "out")
        assert list(report.unread_files) == ["c.json"]
        assert "pip install 'jaxguard[formats]'" in report.unread_files["c.json"]
    report = score(archive, guard, tmp_path / "out")
    assert (report.unread_files, report.counts["trajectories"]) == ({}, 4)


def test_a_file_that_vanishes_does_not_lose_the_others(
    small: None, guard: Guard, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxguard.scoring import pipeline

    original = pipeline.content_key

    def vanishes(path: Path, beside: Any) -> str:
        key = original(path, beside)
        if path.name == "a.jsonl":
            path.unlink()
        return key

    monkeypatch.setattr(pipeline, "content_key", vanishes)
    report = score(archive, guard, tmp_path / "out")
    assert list(report.unread_files) == ["a.jsonl"]
    assert ids(tmp_path / "out") == ["three"]


def test_two_files_of_equal_content_are_scored_once(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    shutil.copy(archive / "a.jsonl", archive / "c.jsonl")
    report = score(archive, guard, tmp_path / "out")
    assert (report.counts["files"], report.counts["trajectories"]) == (3, 3)
    assert ids(tmp_path / "out") == ["one", "three", "two"]


def test_an_edited_file_is_scored_again_and_its_old_rows_are_put_aside(
    small: None, guard: Guard, archive: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    before = contents(out)
    lines(archive / "a.jsonl", native("one", "look", "send"), native("new", "look"))
    report = score(archive, guard, out)
    assert ids(out) == ["new", "one", "three"]
    assert (report.run["superseded"], report.run["shards"], report.counts["rejected"]) == (1, 2, 0)
    aside = {str(p.relative_to(out / "superseded")): p.read_bytes() for p in (out / "superseded").glob("*/*")}
    assert aside == {name: content for name, content in before.items() if name not in contents(out)}
    assert len(aside) == 3 * 3 + 2 + 1  # steps, trajectories and records, two tops, one reject


def test_rows_of_a_file_that_is_gone_stay(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    score(archive, guard, tmp_path / "out")
    (archive / "a.jsonl").unlink()
    report = score(archive, guard, tmp_path / "out")
    assert ids(tmp_path / "out") == ["one", "three", "two"]
    assert (report.run["kept"], report.counts["trajectories"], report.counts["files"]) == (1, 3, 2)


def test_a_file_that_changes_while_it_is_read_is_left_for_another_run(
    small: None, guard: Guard, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxguard.scoring import pipeline

    original = pipeline.content_key

    def grows(path: Path, beside: Any) -> str:
        key = original(path, beside)
        if path.name == "a.jsonl":
            with path.open("a") as file:
                file.write("\n" + json.dumps(native("late", "look")))
        return key

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "content_key", grows)
        report = score(archive, guard, tmp_path / "out")
    assert report.unread_files == {"a.jsonl": "the file changed while it was read; run again when it is complete"}
    assert ids(tmp_path / "out") == ["three"]
    assert score(archive, guard, tmp_path / "out").unread_files == {}
    assert ids(tmp_path / "out") == ["late", "one", "three", "two"]


@pytest.mark.usefixtures("toy_size")
def test_small_files_share_a_shard(guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, out = tmp_path / "archive", tmp_path / "out"
    for i in range(10):
        lines(archive / f"{i}.jsonl", native(f"run {i}", *["look"] * (i + 1)), "{]")
    lines(archive / "big.jsonl", *(native(f"big {i}", "look") for i in range(25)))
    monkeypatch.setattr("jaxguard.scoring.blocks.STEPS_PER_BLOCK", 20)
    report = score(archive, guard, out)
    assert (report.counts["trajectories"], report.counts["rejected"]) == (35, 10)
    members = [[m["file"] for m in json.loads(p.read_text())["members"]] for p in (out / "parts").iterdir()]
    # 1 + ... + 6 steps reach 20, 7 + 8 + 9 do, 10 and the rest of big.jsonl do not; big.jsonl's first 20 stand alone.
    assert sorted(members) == [
        ["0.jsonl", "1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl", "5.jsonl"],
        ["6.jsonl", "7.jsonl", "8.jsonl"],
        ["9.jsonl"],
        ["big.jsonl"],
        ["big.jsonl"],
    ]
    outcomes = pq.read_table(out / "trajectories").to_pandas().set_index("trajectory_id")
    assert [(outcomes.file[f"run {i}"], outcomes.record[f"run {i}"]) for i in range(10)] == [
        (f"{i}.jsonl", 0) for i in range(10)
    ]
    tops = {t.id: len(t) for path in (out / "top").iterdir() for t in read_trajectories(path)}
    assert all(tops[f"run {i}"] == i + 1 for i in range(10))
    alone = tmp_path / "alone"
    score(archive / "7.jsonl", guard, alone)
    steps = pq.read_table(out / "steps").to_pandas().query("trajectory_id == 'run 7'")
    assert steps.fused.tolist() == pq.read_table(alone / "steps")["fused"].to_pylist()


# -- another job, damaged results --------------------------------------------------------------------------------------


def test_results_of_another_guard_are_not_mixed(small: None, guard: Guard, archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    before = contents(out)
    calibration = guard.calibration
    assert calibration is not None
    other = guard.calibrated(dataclasses.replace(calibration, provenance={"place": "another"}))
    with pytest.raises(JaxguardError, match=r"out: holds results of another job, which differs in calibration \("):
        score(archive, other, out)
    with pytest.raises(JaxguardError, match=r"differs in format \(None, now openai_chat\); nothing was overwritten"):
        score_archive(archive, guard, out, format="openai_chat", progress=False)
    rounded = dataclasses.replace(guard, precision="bfloat16")
    with pytest.raises(JaxguardError, match=r"differs in precision \(float32, now bfloat16\); nothing was overwritten"):
        score(archive, rounded, out)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("kind", "change"), [("steps", "cut"), ("trajectories", "gone"), ("top", "cut"), ("rejects", "gone")]
)
def test_a_damaged_shard_is_named(
    small: None, guard: Guard, archive: Path, tmp_path: Path, kind: str, change: str
) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    before = contents(out)
    path = sorted((out / kind).iterdir())[0]
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    found = contents(out)
    with pytest.raises(JaxguardError, match=rf"{path.name}: (is not what was written there|is gone); delete parts/"):
        score(archive, guard, out)
    assert contents(out) == found
    (out / "parts" / f"{path.stem}.json").unlink()
    score(archive, guard, out)
    assert contents(out) == before


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"shard": "x"}', '{"shard": 1}'])
def test_a_damaged_record_is_named(small: None, guard: Guard, archive: Path, tmp_path: Path, content: str) -> None:
    out = tmp_path / "out"
    score(archive, guard, out)
    path = sorted((out / "parts").iterdir())[0]
    path.write_text(content)
    with pytest.raises(JaxguardError, match=rf"{path.name}: .*delete it to have the shard scored again"):
        score(archive, guard, out)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("manifest.json", "{}", "holds something else than results"),
        ("job.json", "{", r"job\.json: .*nothing was overwritten"),
        ("job.json", "[]", r"job\.json: was not written by `jaxguard score`"),
        ("steps/mine.parquet", "x", r"mine\.parquet: is no shard"),
    ],
)
def test_a_folder_of_something_else_is_not_touched(
    small: None, guard: Guard, archive: Path, tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(JaxguardError, match=message):
        score(archive, guard, tmp_path / "out")
    assert path.read_text() == content


# -- full disk, kills --------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_what_is_finished(
    small: None, guard: Guard, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score(archive, guard, tmp_path / "whole")
    out, store = tmp_path / "out", tmp_path / "whole" / "features"
    finished = set()
    for room in (0, 1, 7, 11):
        left = [room]

        def fsync(_file: int, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("jaxguard.scoring.job.os.fsync", fsync)
            with pytest.raises(JaxguardError, match=r"cannot be written \(No space left.*finished shards are kept"):
                score_archive(archive, guard, out, store=store, progress=False)
        found = list(out.glob("parts/*.json"))
        if room == 0:  # nothing but the folder is there, and the same command goes on
            score_archive(archive, guard, out, store=store, progress=False)
        for path in found:
            assert path.read_bytes() == (tmp_path / "whole" / "parts" / path.name).read_bytes()
        finished.add(len(found))
        if room < 11:  # the last is gone on from
            shutil.rmtree(out)
    assert finished == {0, 1, 2}
    score_archive(archive, guard, out, store=store, progress=False)
    assert contents(out) == contents(tmp_path / "whole")


def killed_at_random(small_run: SmallRun, guard: Guard, compiled: Path, tmp_path: Path, kills: int, seed: int) -> int:
    """Kills scoring processes at random moments, and goes on in this one; returns how many were killed."""
    archive, out = tmp_path / "archive", tmp_path / "out"
    trajectories = list(read_trajectories(small_run.data))
    for part in range(4):
        write_trajectories(trajectories[part::4], archive / f"{part}.jsonl.gz")
    lines(archive / "z.jsonl", "{]", native("last", "look"))
    command = [sys.executable, str(Path(__file__).with_name("score_child.py")), archive, small_run.guard, out, compiled]

    begin = time.perf_counter()
    score(archive, guard, tmp_path / "whole")
    span = 2 * (time.perf_counter() - begin)  # a new process compiles
    whole = contents(tmp_path / "whole")
    rng = random.Random(seed)
    killed = seen = 0
    while killed < kills:
        child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0, span))
        child.kill()
        killed += child.wait() == -9
        finished = contents(out) if (out / "parts").exists() else {}
        for name, content in finished.items():
            if name.startswith("parts/") and not name.endswith(".partial"):
                assert content == whole[name]
                seen += 1
        if child.returncode == 0:
            shutil.rmtree(out)
    score(archive, guard, out)
    assert contents(out) == whole
    assert seen or kills < 10
    found = ids(out)
    assert found == sorted([*(t.id for t in trajectories), "last"])
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert counts["records"] == counts["converted"] + counts["rejected"] == len(trajectories) + 2
    return killed


@pytest.fixture
def like_the_child(toy_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxguard.scoring.blocks.STEPS_PER_BLOCK", 60)


@pytest.mark.usefixtures("like_the_child")
def test_killed_and_started_again(small_run: SmallRun, guard: Guard, compiled: Path, tmp_path: Path) -> None:
    assert killed_at_random(small_run, guard, compiled, tmp_path, 1, seed=0) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("like_the_child")
def test_killed_a_hundred_times(small_run: SmallRun, guard: Guard, compiled: Path, tmp_path: Path) -> None:
    assert killed_at_random(small_run, guard, compiled, tmp_path, 100, seed=1) == 100


def test_a_full_temporary_folder_is_named(
    guard: Guard, small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blocks, "_spool", full)
    with pytest.raises(JaxguardError, match=r"temporary folder .*: cannot be written \(No space left on device\)"):
        score(small_run.data, guard, tmp_path / "out")
