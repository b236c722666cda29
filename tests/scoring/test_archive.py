"""Archives to Parquet: nothing is lost, nothing is encoded twice, and the rows are what the guard says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from small_run import HashEncoder, SmallRun, chat, lines, native

from jaxguard.guard import Guard
from jaxguard.scoring import shards
from jaxguard.scoring.archive import score_archive
from jaxguard.scoring.shards import STEPS, TRAJECTORIES
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.lock import locked
from jaxguard.types import Decision, JaxguardError

pytestmark = pytest.mark.usefixtures("toy_size")

COLUMNS = ("hazard", "prefix", "ema", "win", "fused", "margin")


@pytest.fixture(scope="module")
def guard(small_run: SmallRun, compiled: Path) -> Guard:
    from small_run import at_toy_size

    with at_toy_size(compiled):
        return Guard.load(small_run.guard)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    """All rows of a table, in the order of files and records."""
    outcomes = pq.read_table(out / "trajectories").to_pylist()
    order = {(r["shard"], r["trajectory_id"]): (r["file"], r["record"], r["shard"]) for r in outcomes}
    found = pq.read_table(out / name).to_pylist()
    return sorted(found, key=lambda r: order[r["shard"], r["trajectory_id"]])


def without_shard(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in ("shard", "file")} for row in found]


def contents(out: Path) -> dict[str, bytes]:
    """Every file of the results but the manifest, which tells the time."""
    kinds = ("parts", "steps", "trajectories", "top", "rejects", "files")
    return {str(p.relative_to(out)): p.read_bytes() for kind in kinds for p in sorted((out / kind).iterdir())}


def manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two formats and broken records over three files, one of them compressed, and trajectories without a step."""
    archive = tmp_path / "archive"
    lines(archive / "a.jsonl", chat("one", "look", "send"), '{"id": "cut', native("two", "look", "drop", "drop"))
    lines(archive / "b.jsonl", native("three"), {"other": 1}, native("four", "x", source="mine", metadata={"n": 2}))
    text = "\n".join(json.dumps(chat(name, "look")) for name in ("five", "six"))
    (archive / "deep").mkdir()
    (archive / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return archive


def test_everything_is_scored_or_rejected(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = score_archive(mixed, guard, out, progress=False)
    found = manifest(out)
    counts = found["counts"]
    assert counts == report.counts
    assert (counts["files"], counts["records"], counts["converted"], counts["rejected"]) == (3, 8, 6, 2)
    assert (counts["trajectories"], counts["steps"], counts["without_steps"]) == (6, 8, 1)
    assert counts["nonfinite_steps"] == 0
    assert found["formats"] == {"jaxguard": 3, "openai_chat": 3}
    assert set(found["files"]) == {"a.jsonl", "b.jsonl", "deep/c.jsonl.gz"}
    assert report.run["steps"] == 8
    rejected = [json.loads(line) for p in (out / "rejects").iterdir() for line in p.read_text().splitlines()]
    assert sorted((r["file"], r["position"]) for r in rejected) == [("a.jsonl", 1), ("b.jsonl", 1)]
    assert sorted(p.name for p in out.iterdir()) == [
        "calibration.json", "features", "files", "job.json", "manifest.json", "parts", "rejects", "steps", "top",
        "trajectories",
    ]  # fmt: skip
    for name, schema in (("steps", STEPS), ("trajectories", TRAJECTORIES)):
        assert all(pq.read_schema(path).equals(schema) for path in (out / name).iterdir())
    outcomes = rows(out, "trajectories")
    assert [(r["trajectory_id"], r["record"]) for r in outcomes] == [
        ("a:one", 0), ("two", 2), ("three", 0), ("four", 2), ("c:five", 0), ("c:six", 1),
    ]  # fmt: skip
    assert [r["steps"] for r in outcomes] == [2, 3, 0, 1, 1, 1]
    assert [r["source"] for r in outcomes] == ["openai_chat", "", "", "mine", "openai_chat", "openai_chat"]
    assert [json.loads(r["metadata"]).get("n") for r in outcomes] == [None, None, None, 2, None, None]


def test_duckdb_and_pandas_open_it(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    out = tmp_path / "out"
    score_archive(mixed, guard, out, progress=False)
    counted = duckdb.sql(
        f"select t.trajectory_id, count(*) n, max(s.fused) top from '{out}/steps/*.parquet' s "
        f"join '{out}/trajectories/*.parquet' t using (shard, trajectory_id) group by 1 order by 1"
    ).fetchall()
    frame = pd.read_parquet(out / "trajectories").sort_values("trajectory_id")
    some = frame[frame.steps > 0]
    assert [(name, n) for name, n, _ in counted] == list(zip(some.trajectory_id, some.steps, strict=True))
    np.testing.assert_array_equal([top for *_, top in counted], some.max_fused)


def test_a_trajectory_without_steps_passes(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    score_archive(mixed, guard, tmp_path / "out", progress=False)
    (row,) = [r for r in rows(tmp_path / "out", "trajectories") if r["steps"] == 0]
    assert (row["trajectory_id"], row["decision"]) == ("three", "PASS")
    assert row["first_alert"] is row["first_block"] is None
    assert (row["max_hazard"], row["max_fused"]) == (0.0, 0.0)


def test_rows_are_what_the_guard_says(guard: Guard, small_run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    score_archive(small_run.data, guard, out, store=small_run.store, progress=False)
    trajectories = list(read_trajectories(small_run.data))
    scored = list(guard.score(trajectories))
    steps = rows(out, "steps")
    assert [(r["trajectory_id"], r["step"], r["call_id"], r["tool"]) for r in steps] == [
        (t.id, i, step.call_id, step.tool) for t in trajectories for i, step in enumerate(t.steps)
    ]
    for column in COLUMNS:
        theirs = np.concatenate([getattr(s, column) for s in scored]).astype(np.float32)
        np.testing.assert_array_equal(np.array([r[column] for r in steps], np.float32), theirs, err_msg=column)
    decisions = np.concatenate([s.decision for s in scored])
    assert [r["decision"] for r in steps] == [Decision(int(d)).name for d in decisions]
    assert set(decisions.tolist()) == {0, 1, 2}
    outcomes = rows(out, "trajectories")
    assert [(r["first_alert"], r["first_block"]) for r in outcomes] == [(s.first_alert, s.first_block) for s in scored]
    assert [r["decision"] for r in outcomes] == [Decision(int(s.decision.max())).name for s in scored]
    assert [(r["unsafe"], r["first_hazard"]) for r in outcomes] == [(t.unsafe, t.first_hazard) for t in trajectories]
    np.testing.assert_array_equal(
        np.array([(r["max_hazard"], r["max_fused"]) for r in outcomes], np.float32),
        np.array([(s.max_hazard, s.max_fused) for s in scored], np.float32),
    )
    assert manifest(out)["guard"]["weights"] == guard.weights
    assert manifest(out)["guard"]["lambda_hold"] == guard.calibration.lambda_hold  # type: ignore[union-attr]


def test_the_riskiest_are_kept_in_full(guard: Guard, small_run: SmallRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    score_archive(small_run.data, guard, out, store=small_run.store, progress=False)
    severity = {d.name: int(d) for d in Decision}
    order = sorted(rows(out, "trajectories"), key=lambda r: (-severity[r["decision"]], -r["max_fused"]))
    (path,) = (out / "top").iterdir()
    kept = list(read_trajectories(path))
    originals = {t.id: t for t in read_trajectories(small_run.data)}
    assert [t.id for t in kept] == [r["trajectory_id"] for r in order[: shards.TOP_PER_SHARD]]
    assert kept == [originals[t.id] for t in kept]


def test_nothing_is_encoded_twice(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    HashEncoder.seen.clear()
    report = score_archive(mixed, guard, tmp_path / "one", store=tmp_path / "store", progress=False)
    assert len(HashEncoder.seen) == len(set(HashEncoder.seen)) == report.run["texts_embedded"] > 0
    assert "done" not in HashEncoder.seen  # what came after the last call is not read
    HashEncoder.seen.clear()
    again = score_archive(mixed, guard, tmp_path / "two", store=tmp_path / "store", progress=False)
    assert HashEncoder.seen == []
    assert (again.run["steps"], again.run["texts_embedded"]) == (8, 0)
    assert not (tmp_path / "two" / "features").exists()
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_how_an_archive_is_cut_changes_no_row(
    guard: Guard, small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_archive(small_run.data, guard, tmp_path / "one", store=small_run.store, progress=False)
    for name, value in (("STEPS_PER_BLOCK", 100), ("RECORDS_PER_BLOCK", 1), ("CHARS_PER_BLOCK", 2_000)):
        with monkeypatch.context() as patch:
            patch.setattr(f"jaxguard.scoring.blocks.{name}", value)
            out = tmp_path / name
            score_archive(small_run.data, guard, out, store=small_run.store, progress=False)
        assert len(list((out / "steps").iterdir())) > 3
        for table in ("steps", "trajectories"):
            assert without_shard(rows(out, table)) == without_shard(rows(tmp_path / "one", table))


def test_a_longer_archive_compiles_nothing_more(guard: Guard, small_run: SmallRun, tmp_path: Path) -> None:
    fresh = Guard(guard.config, guard.params, guard.encoder, guard.calibration)
    first = score_archive(small_run.data, fresh, tmp_path / "one", store=small_run.store, progress=False)
    assert 0 < first.run["compiled"] < 12
    lines(tmp_path / "x.jsonl", *(native(f"run {i}", *["look"] * (1 + 7 * i % 90)) for i in range(200)))
    second = score_archive(tmp_path / "x.jsonl", fresh, tmp_path / "two", progress=False)
    assert second.run["steps"] > first.run["steps"]
    assert second.run["compiled"] == 0


def test_ids_are_unique_within_a_shard(guard: Guard, tmp_path: Path) -> None:
    lines(tmp_path / "x.jsonl", *(native("same", "look") for _ in range(3)), native("same~2", "look"))
    report = score_archive(tmp_path / "x.jsonl", guard, tmp_path / "out", progress=False)
    assert [r["trajectory_id"] for r in rows(tmp_path / "out", "trajectories")] == [
        "same", "same~2", "same~3", "same~2~2",
    ]  # fmt: skip
    assert report.counts["renamed_ids"] == 3


def test_an_address_gives_the_same_rows(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    for path in mixed.rglob("*.jsonl*"):
        memory.pipe(f"/traces/{path.relative_to(mixed)}", path.read_bytes())
    try:
        score_archive(mixed, guard, tmp_path / "local", progress=False)
        score_archive("memory://traces", guard, tmp_path / "remote", progress=False)
    finally:
        memory.rm("/traces", recursive=True)
    assert contents(tmp_path / "remote") == contents(tmp_path / "local")


def test_a_guard_without_thresholds_is_refused_before_any_work(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    bare = Guard(guard.config, guard.params, guard.encoder)
    with pytest.raises(JaxguardError, match="no thresholds; run `jaxguard calibrate` first"):
        score_archive(mixed, bare, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_what_was_not_read_is_reported(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    (mixed / "link").symlink_to(tmp_path)
    lines(mixed / "odd.jsonl", {"a": 1})
    (mixed / "broken.zip").write_text("no zip")
    report = score_archive(mixed, guard, tmp_path / "one", progress=False)
    found = manifest(tmp_path / "one")
    assert report.skipped_files == found["skipped_files"] == ["link (a link to a folder, not followed)"]
    unread = {"broken.zip": "the zip archive cannot be read (File is not a zip file)"}
    assert report.unread_files == found["unread_files"] == unread
    assert report.counts["files_rejected"] == 2


@pytest.mark.parametrize("records", [[{"a": 1}], [{"messages": [{"role": "user"}]}, {"a": 1}]])
def test_an_archive_of_rejects_is_an_error(guard: Guard, tmp_path: Path, records: list[Any]) -> None:
    lines(tmp_path / "x.jsonl", *records)
    with pytest.raises(JaxguardError, match=r"nothing could be scored: .*; the first: x\.jsonl"):
        score_archive(tmp_path / "x.jsonl", guard, tmp_path / "out", progress=False)
    assert manifest(tmp_path / "out")["counts"]["trajectories"] == 0


def test_a_file_of_refusals_has_no_steps(guard: Guard, tmp_path: Path) -> None:
    lines(tmp_path / "x.jsonl", native("a"), native("b"))
    report = score_archive(tmp_path / "x.jsonl", guard, tmp_path / "out", progress=False)
    assert (report.counts["trajectories"], report.counts["steps"]) == (2, 0)
    assert pq.read_table(tmp_path / "out" / "steps").num_rows == 0


@pytest.mark.parametrize("name", [".", "steps", "parts"])
def test_a_store_where_the_results_go_is_refused(guard: Guard, mixed: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(JaxguardError, match=r"--store .*out.*: is where the results go, expected a folder of its own"):
        score_archive(mixed, guard, out, store=out / name, progress=False)
    assert not out.exists()


def test_two_at_once_in_one_folder(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(JaxguardError, match="out: another process is writing there"):
        score_archive(mixed, guard, tmp_path / "out", progress=False)
