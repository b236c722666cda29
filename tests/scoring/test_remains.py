"""Some files of a shard were edited, others are gone: no row of theirs is lost or doubled, wherever a run is killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from small_run import SmallRun, chat, lines, native

from jaxguard.guard import Guard
from jaxguard.results import KINDS, PARTS
from jaxguard.scoring.archive import score_archive
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.types import JaxguardError

pytestmark = pytest.mark.usefixtures("toy_size")


@pytest.fixture(scope="module")
def guard(small_run: SmallRun, compiled: Path) -> Guard:
    from small_run import at_toy_size

    with at_toy_size(compiled):
        return Guard.load(small_run.guard)


def contents(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for kind in (PARTS, *KINDS) for p in (out / kind).iterdir()}


def ids(out: Path) -> list[str]:
    return sorted(pq.read_table(out / "trajectories")["trajectory_id"].to_pylist())


def score(archive: Path, guard: Guard, out: Path) -> Any:
    return score_archive(archive, guard, out, progress=False)


def shared(archive: Path, guard: Guard, out: Path) -> None:
    """Scores four files, of records that are broken, alike in their ids and without a step too, into one shard."""
    for i in range(4):
        lines(
            archive / f"{i}.jsonl", native(f"run {i}", *["look"] * (i + 1)), "{]", native("same", "send"), native("x")
        )
    lines(archive / "2.jsonl", native("run 2", "look"), {"odd": 1}, chat("c", "look"))
    lines(archive / "odd.jsonl", {"a": 1})
    score(archive, guard, out)
    assert len(list((out / "parts").iterdir())) == 1


def table(out: Path, name: str) -> Any:
    return pq.read_table(out / name).to_pandas().drop(columns="shard")


def of(outcomes: Any, steps: Any, *files: str) -> tuple[Any, Any]:
    """Rows of some files."""
    outcomes = outcomes[outcomes.file.isin(files)].sort_values(["file", "record"])
    steps = steps[steps.trajectory_id.isin(outcomes.trajectory_id)].sort_values(["trajectory_id", "step"])
    return outcomes.reset_index(drop=True), steps.reset_index(drop=True)


def rejected(out: Path) -> set[str]:
    return {line for path in (out / "rejects").iterdir() for line in path.read_text().splitlines()}


def test_an_edit_takes_no_row_of_others_in_its_shard(guard: Guard, tmp_path: Path) -> None:
    archive, out = tmp_path / "archive", tmp_path / "out"
    shared(archive, guard, out)
    before, old = (table(out, "trajectories"), table(out, "steps")), contents(out)
    old_rejects = rejected(out)
    others = ("0.jsonl", "2.jsonl", "3.jsonl")
    lines(archive / "1.jsonl", native("edited", "look"))
    (archive / "3.jsonl").unlink()
    report = score(archive, guard, out)
    assert (report.run["superseded"], report.run["kept"], report.run["steps"]) == (1, 1, 1)
    after = table(out, "trajectories"), table(out, "steps")
    for theirs, ours in zip(of(*before, *others), of(*after, *others), strict=True):
        assert len(theirs)
        pd.testing.assert_frame_equal(theirs, ours)
    assert set(after[0].file) == {*others, "1.jsonl"}
    assert after[0][after[0].file == "1.jsonl"].trajectory_id.tolist() == ["edited"]
    assert len(after[0]) == 3 + 2 + 3 + 1
    assert rejected(out) == {line for line in old_rejects if '"1.jsonl"' not in line}
    tops = [t.id for path in (out / "top").iterdir() for t in read_trajectories(path)]
    assert sorted(tops) == sorted(after[0][after[0].steps > 0].trajectory_id)
    aside = {str(p.relative_to(out / "superseded")): p.read_bytes() for p in (out / "superseded").glob("*/*")}
    assert aside == old
    again = contents(out)
    assert score(archive, guard, out).run["steps"] == 0
    assert contents(out) == again


def test_what_stays_counts_as_if_it_had_been_scored_alone(guard: Guard, tmp_path: Path) -> None:
    archive, out = tmp_path / "archive", tmp_path / "out"
    shared(archive, guard, out)
    (archive / "0.jsonl").unlink()
    lines(archive / "1.jsonl", native("edited", "look"))
    report = score(archive, guard, out)
    again = tmp_path / "again"
    lines(archive / "0.jsonl", native("run 0", "look"), "{]", native("same", "send"), native("x"))
    fresh = score(archive, guard, again)
    assert report.counts["renamed_ids"] == 2
    assert report.counts == fresh.counts
    assert report.decisions == fresh.decisions
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (out, again)]
    assert manifests[0]["formats"] == manifests[1]["formats"] == {"jaxguard": 8, "openai_chat": 1}
    lines(archive / "2.jsonl", native("edited too", "look"))  # what was taken over is taken over again
    lines(archive / "3.jsonl", native("edited as well", "look"))
    score(archive, guard, out)
    assert ids(out) == sorted(["run 0", "same", "x", "edited", "edited too", "edited as well"])


class Killed(BaseException):
    """In place of a kill."""


@pytest.mark.parametrize(
    "then",
    ["goes on", *(pytest.param(then, marks=pytest.mark.slow) for then in ("edit is taken back", "file comes back"))],
)
def test_killed_while_rows_are_taken_over(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    archive, first = tmp_path / "archive", tmp_path / "first"
    shared(archive, guard, first)
    old, gone = (archive / "1.jsonl").read_text(), (archive / "3.jsonl").read_text()
    (archive / "3.jsonl").unlink()
    lines(archive / "1.jsonl", native("edited", "look"))
    whole = tmp_path / "whole"
    shutil.copytree(first, whole)
    score(archive, guard, whole)
    replace, kills, finished = Path.replace, 0, False
    while not finished:
        out, left = tmp_path / f"out {kills}", [kills]
        shutil.copytree(first, out)

        def until_killed(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", until_killed)
            try:
                score(archive, guard, out)
                finished = True
            except Killed:
                kills += 1
        if then == "edit is taken back":
            lines(archive / "1.jsonl", old)
        elif then == "file comes back":
            lines(archive / "3.jsonl", gone)
        score(archive, guard, out)
        found = pq.read_table(out / "trajectories").to_pandas()
        places = [*zip(found.file, found.record, strict=True)]
        assert len(places) == len(set(places))
        expected = {"0.jsonl": 3, "1.jsonl": 1, "2.jsonl": 2, "3.jsonl": 3}
        if then == "edit is taken back":
            assert found.file.value_counts().to_dict() == {**expected, "1.jsonl": 3}
        else:
            assert found.file.value_counts().to_dict() == expected
            assert contents(out) == contents(whole)
            aside = [{str(p.relative_to(f)): p.read_bytes() for p in f.glob("superseded/*/*")} for f in (out, whole)]
            assert aside[0] == aside[1]
        lines(archive / "1.jsonl", native("edited", "look"))
        (archive / "3.jsonl").unlink(missing_ok=True)
        shutil.rmtree(out)
    assert kills > 12


def test_damaged_counts_are_named_and_nothing_is_moved(guard: Guard, tmp_path: Path) -> None:
    archive, out = tmp_path / "archive", tmp_path / "out"
    shared(archive, guard, out)
    (part,) = (out / "parts").iterdir()
    record = json.loads(part.read_text())
    record["counts"]["timing"] += 1
    part.write_text(json.dumps(record))
    before = contents(out)
    lines(archive / "1.jsonl", native("edited", "look"))
    with pytest.raises(JaxguardError, match=r"files/.*\.jsonl: the counts are not those of"):
        score(archive, guard, out)
    assert before.items() <= contents(out).items()
