"""Archive, results, store and guard that are in one another's places, and another archive: refused, nothing written."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pyarrow.parquet as pq
import pytest
from small_run import SmallRun, lines, native, refused

from jaxguard.guard import Guard
from jaxguard.scoring.archive import score_archive
from jaxguard.scoring.places import PlaceError, require_apart
from jaxguard.types import JaxguardError

pytestmark = pytest.mark.usefixtures("toy_size")


@pytest.fixture(scope="module")
def guard(small_run: SmallRun, compiled: Path) -> Guard:
    from small_run import at_toy_size

    with at_toy_size(compiled):
        return Guard.load(small_run.guard)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    lines(tmp_path / "runs" / "a.jsonl", native("one", "look"))
    lines(tmp_path / "runs" / "deep" / "b.jsonl", native("two", "look"))
    return tmp_path / "runs"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def score(archive: Path | str, guard: Guard, out: Path) -> Any:
    return score_archive(archive, guard, out, progress=False)


def ids(out: Path) -> list[str]:
    return sorted(pq.read_table(out / "trajectories")["trajectory_id"].to_pylist())


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--out", "--store"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("runs/scores", r"is inside of the archive .*runs, which is only read; expected a folder outside of it"),
        ("runs/deep/x/y", "is inside of the archive"),
        ("runs", "is inside of the archive"),
        ("link/scores", "is inside of the archive"),
        (".", "the archive .*runs is inside of it, expected a folder of its own"),
        ("GUARD", r"is inside of the guard bundle .*guard, expected a folder outside of it"),
        ("GUARD/scores", "is inside of the guard bundle"),
    ],
)
def test_what_is_in_anothers_place_is_refused(
    small_run: SmallRun, archive: Path, tmp_path: Path, option: str, place: str, message: str
) -> None:
    (tmp_path / "link").symlink_to(archive, target_is_directory=True)
    bundle = shutil.copytree(small_run.guard, tmp_path / "guard")
    before = everything(tmp_path)
    path = tmp_path / place.replace("GUARD", "guard")
    others = ["--out", tmp_path / "out"] if option == "--store" else []
    said = refused("score", archive, "--guard", bundle, option, path, *others, "--quiet")
    assert f"{option} {path}: " in said
    assert re.search(message, said)
    assert everything(tmp_path) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("pattern", "out", "store", "message"),
    [
        ("runs/*", "runs/scores", None, "--out .*is inside of the archive"),
        ("runs/*", "runs/deep/scores", None, "--out .*is inside of the archive"),
        ("runs/**", "runs/x/scores", None, "--out .*is inside of the archive"),
        ("runs/*.jsonl", "runs", None, "--out .*the archive .* is inside of it"),
        ("runs/*/*.jsonl", ".", None, "--out .*the archive .* is inside of it"),
        ("runs/*", "scores", "runs/store", "--store .*is inside of the archive"),
        ("runs/**/*.jsonl", "scores", "runs/deep", "--store .*the archive .* is inside of it"),
        ("runs/*.jsonl", "runs/scores", "runs/store", ""),
        ("runs/**/*.jsonl", "runs/scores", "runs/scores/features", ""),
        ("runs/a.jsonl", "runs/scores", None, ""),
        ("runs/a.jsonl", "runs", None, "--out .*the archive .* is inside of it"),
        ("memory://runs", "runs", "store", ""),
    ],
)
def test_patterns_and_files(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, out: str, store: str | None,
    message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    places = Path(out), None if store is None else Path(store), None
    for prefix in ("", f"{tmp_path}/"):
        name = pattern if "://" in pattern else f"{prefix}{pattern}"
        if message:
            with pytest.raises(PlaceError, match=message):
                require_apart(name, *places)
        else:
            require_apart(name, *places)


def test_results_among_the_files_of_a_pattern_are_left_out(guard: Guard, archive: Path) -> None:
    pattern = f"{archive}/**/*.jsonl"
    for _ in range(2):
        report = score(pattern, guard, archive / "scores")
        assert (report.counts["files"], ids(archive / "scores")) == (2, ["one", "two"])


# -- another archive ---------------------------------------------------------------------------------------------------


def test_another_archive_is_refused_before_a_row_moves(guard: Guard, archive: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    score(archive, guard, out)
    assert json.loads((out / "job.json").read_text())["archive"] == str(archive)
    before = everything(out)
    lines(other / "a.jsonl", native("three", "look"))
    lines(other / "empty.jsonl", "")
    with pytest.raises(JaxguardError, match=rf"results of the archive {archive}, and none of 1 files of {other}"):
        score(other, guard, out)
    assert everything(out) == before


def test_an_archive_that_was_moved_goes_on(guard: Guard, archive: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "out", tmp_path / "moved"
    score(archive, guard, out)
    archive.rename(moved)
    lines(moved / "a.jsonl", native("edited", "look"))
    report = score(moved, guard, out)
    assert (report.run["steps"], ids(out)) == (1, ["edited", "two"])
    lines(moved / "deep" / "b.jsonl", native("edited too", "look"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(moved)
        assert score(".", guard, out).run["steps"] == 1
    assert ids(out) == ["edited", "edited too"]


def test_one_archive_under_several_names(
    guard: Guard, archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (tmp_path / "link").symlink_to(archive, target_is_directory=True)
    score(archive, guard, out)
    for name in ("a.jsonl", "deep/b.jsonl"):
        lines(archive / name, native(f"edited {name}", "look"))  # nothing in it was scored
    monkeypatch.chdir(tmp_path)
    assert score("link", guard, out).run["superseded"] == 2
    assert score("runs/../runs", guard, out).run["steps"] == 0
    memory = fsspec.filesystem("memory")
    for path in archive.rglob("*.jsonl"):
        memory.pipe(f"/copy/{path.relative_to(archive)}", path.read_bytes())
    try:
        assert score("memory://copy", guard, out).run["steps"] == 0
    finally:
        memory.rm("/copy", recursive=True)


# -- counting ----------------------------------------------------------------------------------------------------------


def test_programs_that_two_threads_compile_at_once_are_both_counted() -> None:
    from jaxguard.scoring.pipeline import Run

    class Slow(Counter[str]):
        """Gives way to the other thread between reading and writing."""

        def __getitem__(self, name: str) -> int:
            value = super().__getitem__(name)
            time.sleep(0.05)
            return value

    run = Run([], None, None, None)  # type: ignore[arg-type]
    run.done.counts = Slow()
    event = "/jax/core/compile/backend_compile_duration"
    threads = [threading.Thread(target=run._count_compiled, args=(event, 0.1)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.done.counts["compiled"] == 4
