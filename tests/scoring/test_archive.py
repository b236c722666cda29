"""Archives to Parquet: nothing is lost, nothing is encoded twice, and the rows are what the guard says."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import HashEncoder, SmallRun, chat, lines, native

from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard
from jaxguard.scoring.archive import STEPS, TRAJECTORIES, score_archive
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
    return pq.read_table(out / f"{name}.parquet").to_pylist()


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
    counts = manifest(out)["counts"]
    assert counts == report.counts
    assert (counts["records"], counts["converted"], counts["rejected"]) == (8, 6, 2)
    assert counts["trajectories"] == counts["scored"] == 6
    assert counts["steps"] == counts["steps_scored"] == 8
    assert counts["nonfinite_steps"] == 0
    rejected = [json.loads(line) for line in (out / "traces" / "rejects.jsonl").read_text().splitlines()]
    assert [(r["file"], r["position"]) for r in rejected] == [("a.jsonl", 1), ("b.jsonl", 1)]
    assert sorted(p.name for p in out.iterdir()) == [
        "features", "manifest.json", "steps.parquet", "traces", "trajectories.parquet",
    ]  # fmt: skip
    assert pq.read_schema(out / "steps.parquet").equals(STEPS)
    assert pq.read_schema(out / "trajectories.parquet").equals(TRAJECTORIES)
    outcomes = rows(out, "trajectories")
    assert [r["trajectory_id"] for r in outcomes] == [t.id for t in read_trajectories(out / "traces")]
    assert [r["steps"] for r in outcomes] == [2, 3, 0, 1, 1, 1]
    assert [r["source"] for r in outcomes] == ["openai_chat", "", "", "mine", "openai_chat", "openai_chat"]
    assert sum(manifest(out)["decisions"].values()) == 6
    owners = [r["trajectory_id"] for r in rows(out, "steps")]
    assert {o: owners.count(o) for o in owners} == {r["trajectory_id"]: r["steps"] for r in outcomes if r["steps"]}
    assert json.loads(outcomes[3]["metadata"]) == {"n": 2}


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
        theirs = np.concatenate([getattr(s, column) for s in scored])
        np.testing.assert_allclose([r[column] for r in steps], theirs, atol=1e-6, err_msg=column)
    decisions = np.concatenate([s.decision for s in scored])
    assert [r["decision"] for r in steps] == [Decision(int(d)).name for d in decisions]
    assert set(decisions.tolist()) == {0, 1, 2}
    outcomes = rows(out, "trajectories")
    assert [(r["first_alert"], r["first_block"]) for r in outcomes] == [(s.first_alert, s.first_block) for s in scored]
    assert [r["decision"] for r in outcomes] == [Decision(int(s.decision.max())).name for s in scored]
    assert [(r["unsafe"], r["first_hazard"]) for r in outcomes] == [(t.unsafe, t.first_hazard) for t in trajectories]
    np.testing.assert_allclose([r["max_fused"] for r in outcomes], [s.max_fused for s in scored], atol=1e-6)
    assert manifest(out)["guard"]["weights"] == guard.weights
    assert manifest(out)["guard"]["lambda_hold"] == guard.calibration.lambda_hold  # type: ignore[union-attr]


def test_two_runs_give_equal_tables(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        score_archive(mixed, guard, tmp_path / name, progress=False)
    for table in ("steps", "trajectories"):
        assert rows(tmp_path / "one", table) == rows(tmp_path / "two", table)


def test_nothing_is_encoded_twice(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    HashEncoder.seen.clear()
    score_archive(mixed, guard, tmp_path / "one", store=tmp_path / "store", progress=False)
    distinct = {text for t in read_trajectories(tmp_path / "one" / "traces") for text in trajectory_texts(t).unique()}
    assert sorted(HashEncoder.seen) == sorted(distinct)
    assert manifest(tmp_path / "one")["counts"]["texts_embedded"] == len(distinct)
    HashEncoder.seen.clear()
    score_archive(mixed, guard, tmp_path / "two", store=tmp_path / "store", progress=False)
    assert HashEncoder.seen == []
    counts = manifest(tmp_path / "two")["counts"]
    assert (counts["texts"], counts["texts_embedded"]) == (len(distinct), 0)
    assert not (tmp_path / "two" / "features").exists()


def test_converted_traces_are_not_converted_again(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    score_archive(mixed, guard, tmp_path / "one", progress=False)
    score_archive(tmp_path / "one" / "traces", guard, tmp_path / "two", progress=False)
    assert not (tmp_path / "two" / "traces").exists()
    assert rows(tmp_path / "two", "steps") == rows(tmp_path / "one", "steps")
    assert manifest(tmp_path / "two")["counts"]["rejected"] == 2


def test_more_rows_than_a_row_group(
    guard: Guard, small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score_archive(small_run.data, guard, tmp_path / "one", store=small_run.store, progress=False)
    monkeypatch.setattr("jaxguard.scoring.archive.ROWS_PER_GROUP", 100)
    score_archive(small_run.data, guard, tmp_path / "many", store=small_run.store, progress=False)
    assert pq.ParquetFile(tmp_path / "many" / "steps.parquet").num_row_groups > 3
    assert rows(tmp_path / "many", "steps") == rows(tmp_path / "one", "steps")


def test_results_are_not_overwritten(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    score_archive(mixed, guard, tmp_path / "out", progress=False)
    before = (tmp_path / "out" / "steps.parquet").read_bytes()
    with pytest.raises(JaxguardError, match=r"--out .*out: holds results already; nothing was overwritten"):
        score_archive(mixed, guard, tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "steps.parquet").read_bytes() == before


def test_a_broken_run_leaves_no_result_and_can_be_repeated(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    """The manifest of the traces counts one more than there is: found when all are scored."""
    traces = tmp_path / "traces"
    score_archive(mixed, guard, tmp_path / "first", progress=False)
    shutil.copytree(tmp_path / "first" / "traces", traces)
    right = (traces / "manifest.json").read_text()
    wrong = json.loads(right)
    for name in ("trajectories", "unlabelled"):
        wrong["counts"][name] += 1
    (traces / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(JaxguardError, match="manifest counts 7 trajectories, 6 were read and scored"):
        score_archive(traces, guard, tmp_path / "out", progress=False)
    assert not [p for p in (tmp_path / "out").iterdir() if p.suffix in (".parquet", ".json")]
    wrong = json.loads(right)
    wrong["counts"]["steps"] -= 1
    (traces / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(JaxguardError, match="manifest counts 7 steps, 8 were read and scored"):
        score_archive(traces, guard, tmp_path / "out", progress=False)
    (traces / "manifest.json").write_text(right)
    score_archive(traces, guard, tmp_path / "out", progress=False)
    assert rows(tmp_path / "out", "steps") == rows(tmp_path / "first", "steps")
    assert not list((tmp_path / "out").glob("*.partial"))


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"counts": {"trajectories": "many"}}', '{"jaxguard": 1, "counts": 3}', "[" * 100_000]
)
def test_a_damaged_manifest_of_traces_is_named(guard: Guard, small_run: SmallRun, tmp_path: Path, content: str) -> None:
    traces = shutil.copytree(small_run.data, tmp_path / "traces")
    (traces / "manifest.json").write_text(content)
    with pytest.raises(JaxguardError, match=r"traces/manifest\.json: .*expected the manifest that `jaxguard convert`"):
        score_archive(traces, guard, tmp_path / "out", progress=False)


def test_a_guard_without_thresholds_is_refused_before_any_work(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    bare = Guard(guard.config, guard.params, guard.encoder)
    with pytest.raises(JaxguardError, match="no thresholds; run `jaxguard calibrate` first"):
        score_archive(mixed, bare, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_counts_that_do_not_add_up_are_refused_before_any_work(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    score_archive(mixed, guard, tmp_path / "first", progress=False)
    path = tmp_path / "first" / "traces" / "manifest.json"
    wrong = json.loads(path.read_text())
    wrong["counts"]["rejected"] = 0
    path.write_text(json.dumps(wrong))
    with pytest.raises(JaxguardError, match=r"counts.records is 8, expected converted \+ rejected"):
        score_archive(path.parent, guard, tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_what_was_not_read_is_reported(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    (mixed / "link").symlink_to(tmp_path)
    lines(mixed / "odd.jsonl", {"a": 1})
    expected = ["link (a link to a folder, not followed)"]
    report = score_archive(mixed, guard, tmp_path / "one", progress=False)
    assert report.skipped_files == manifest(tmp_path / "one")["skipped_files"] == expected
    assert report.counts["files_rejected"] == 1
    again = score_archive(tmp_path / "one" / "traces", guard, tmp_path / "two", progress=False)
    assert again.skipped_files == expected
    assert again.counts["files_rejected"] == 1


def test_converted_traces_of_which_none_is_left_are_refused(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    """As an earlier version wrote them."""
    score_archive(mixed, guard, tmp_path / "first", progress=False)
    traces = tmp_path / "first" / "traces"
    empty = json.loads((traces / "manifest.json").read_text())
    empty["counts"] = dict.fromkeys(empty["counts"], 0) | {"records": 2, "rejected": 2}
    (traces / "manifest.json").write_text(json.dumps(empty))
    with pytest.raises(
        JaxguardError, match=r"traces: holds no trajectory: 2 records and 0 files were rejected, see rej"
    ):
        score_archive(traces, guard, tmp_path / "out", progress=False)


@pytest.mark.parametrize("name", [".", "traces"])
def test_a_store_where_the_results_go_is_refused(guard: Guard, mixed: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(JaxguardError, match=r"--store .*out.*: is where the results go, expected a folder of its own"):
        score_archive(mixed, guard, out, store=out / name, progress=False)
    assert not out.exists()


def test_two_at_once_in_one_folder(guard: Guard, mixed: Path, tmp_path: Path) -> None:
    with locked(tmp_path / "out"), pytest.raises(JaxguardError, match="out: another process is writing there"):
        score_archive(mixed, guard, tmp_path / "out", progress=False)


def test_a_missing_archive_leaves_nothing(guard: Guard, tmp_path: Path) -> None:
    with pytest.raises(JaxguardError, match="nowhere: there is no such file or folder"):
        score_archive(tmp_path / "nowhere", guard, tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == []
