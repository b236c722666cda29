"""Many processes make the files that one makes, also where one of them is killed; and errors come as one line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_child import STEPS_PER_BLOCK
from small_run import SmallRun, chat, lines, native, refused
from small_run import command as run

from jaxguard.guard import Guard
from jaxguard.scoring.archive import score_archive
from jaxguard.scoring.job import Job, JobError, JobOfWorker, identity
from jaxguard.scoring.pipeline import CHANGED, Done
from jaxguard.traces.sources import Source, content_key

pytestmark = pytest.mark.usefixtures("toy_size")

ray = pytest.importorskip("ray")
from jaxguard.scoring import ray_engine  # noqa: E402
from jaxguard.scoring.ray_engine import Item, RayEngine, make_items, without_copies  # noqa: E402

HERE = Path(__file__).parent
BATCH_BYTES = 100_000  # two or three of the files


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files there make Ray's processes fail, see ``ray_child.py``."""
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def cluster(faults: Path, compiled: Path) -> Iterator[None]:
    """Ray with two processors, whose processes are of toy size too."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), str(HERE)])
    variables = {"PYTHONPATH": path, "TOY_CACHE": str(compiled), "TOY_FAULTS": str(faults)}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": variables, "worker_process_setup_hook": "ray_child.prepare"},
    )
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxguard.scoring.blocks.STEPS_PER_BLOCK", STEPS_PER_BLOCK)
    monkeypatch.setattr("jaxguard.scoring.pipeline.BATCH_BYTES", BATCH_BYTES)


@pytest.fixture(scope="module")
def guard(small_run: SmallRun, compiled: Path) -> Guard:
    from small_run import at_toy_size

    with at_toy_size(compiled):
        return Guard.load(small_run.guard)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten files of several blocks, one large, some equal ones and some broken."""
    folder = tmp_path_factory.mktemp("many") / "archive"
    for i in range(8):
        records = [chat(f"{i}.{j}", *("look", "send", "drop")[: 1 + (i + j) % 3]) for j in range(90 + i)]
        lines(folder / f"f{i}.jsonl", *records, '{"id": "cut')
    lines(folder / "large.jsonl", *(native(f"n{j}", *["step"] * (j % 7)) for j in range(400)))
    for name in ("a_copy.jsonl", "z/copy.jsonl"):
        lines(folder / name, (folder / "f3.jsonl").read_text())
    size = (folder / "f3.jsonl").stat().st_size
    lines(folder / "same_size.jsonl", json.dumps(native("other", "x")).ljust(size))
    (folder / "broken.zip").write_bytes(b"PK")
    return folder


@pytest.fixture(scope="module")
def alone(
    archive: Path, guard: Guard, small_run: SmallRun, compiled: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Results of the same archive made in this process."""
    from small_run import at_toy_size

    out = tmp_path_factory.mktemp("alone") / "out"
    with at_toy_size(compiled), pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxguard.scoring.blocks.STEPS_PER_BLOCK", STEPS_PER_BLOCK)
        patch.setattr("jaxguard.scoring.pipeline.BATCH_BYTES", BATCH_BYTES)
        score_archive(archive, guard, out, progress=False)
    return out


def files(out: Path) -> dict[str, bytes]:
    """Everything but the vectors, and what differs from run to run."""
    found = {
        str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file() and "features" not in p.parts
    }
    said = json.loads(found.pop("manifest.json"))
    run = said.pop("last_run")
    said["steps, shards"] = [run["steps"], run["shards"]]
    return {**found, "manifest": json.dumps(said).encode()}


def scored(archive: Path, guard: Guard, small_run: SmallRun, out: Path, **more: Any) -> Any:
    return score_archive(archive, guard, out, progress=False, engine=RayEngine(small_run.guard, 2), **more)


def test_every_block_has_one_owner_and_batches_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "LARGE", 1000)
    sizes = [5, 700, 7, 5, 1001, 700, 2500, 0, 7]
    cut = [(Source(f"{i}", f"/{i}", size=size), Source(f"{i} b", f"/{i}b")) for i, size in enumerate(sizes)]
    for workers in (1, 2, 3):
        items = make_items(cut, workers)
        owners: dict[str, list[tuple[int, int]]] = {}
        for item in items:
            assert all(batch in cut for batch in item.batches)
            for source in item.sources:
                owners.setdefault(source.name, []).append((item.share, item.shares))
        assert set(owners) == {source.name for batch in cut for source in batch}
        for shares in owners.values():
            assert shares == [(k, len(shares)) for k in range(len(shares))]
        assert [len(owners[name]) for name in ("6", "4", "1")] == [min(workers, n) for n in (3, 2, 1)]
    assert make_items(cut[:1], 8) == [Item((cut[0],))]
    assert make_items([], 8) == []


def test_copies_are_left_out_before_actors_meet_them(tmp_path: Path) -> None:
    contents = {"a": "one", "b": "two", "c": "one", "d": "longer", "e": "two"}
    for name, content in contents.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    sources = [Source(name, str(tmp_path / f"{name}.jsonl"), size=len(text)) for name, text in contents.items()]
    gone = Source("gone", str(tmp_path / "gone.jsonl"), size=3)
    kept, copies = without_copies([tuple(sources[:3]), tuple(sources[3:]), (gone,)])
    assert [[source.name for source in batch] for batch in kept] == [["a", "b"], ["d"], ["gone"]]
    assert copies == {name: content_key(tmp_path / f"{name}.jsonl") for name in ("c", "e")}


@pytest.mark.slow
def test_two_processes_make_the_same_files_and_go_on(
    cluster: None, archive: Path, alone: Path, guard: Guard, small_run: SmallRun, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(ray_engine, "LARGE", (archive / "large.jsonl").stat().st_size - 1)
    out = tmp_path / "out"
    scored(archive, guard, small_run, out)
    assert files(out) == files(alone)
    assert {"a_copy.jsonl"} == {
        member["file"]
        for part in map(json.loads, map(Path.read_text, (out / "parts").iterdir()))
        for member in part["members"]
        if member["key"] == json.loads((out / "manifest.json").read_text())["files"]["f3.jsonl"]
    }
    lost = sorted((out / "parts").iterdir())[::3]
    for part in lost:
        part.unlink()
    report = scored(archive, guard, small_run, out)
    assert report.run["shards"] == len(lost)
    assert report.run["texts_embedded"] == 0
    assert {**files(out), "manifest": b""} == {**files(alone), "manifest": b""}


@pytest.mark.slow
def test_a_killed_process_is_replaced(
    cluster: None, faults: Path, archive: Path, alone: Path, guard: Guard, small_run: SmallRun, tmp_path: Path
) -> None:
    (faults / "dies_once").touch()
    report = scored(archive, guard, small_run, tmp_path / "out")
    assert not (faults / "dies_once").exists()
    found, expected = files(tmp_path / "out"), files(alone)
    assert (
        json.loads(found.pop("manifest"))["counts"] == json.loads(expected.pop("manifest"))["counts"] == report.counts
    )
    assert found == expected


@pytest.mark.slow
def test_files_that_kill_every_process_are_named(
    cluster: None, faults: Path, archive: Path, guard: Guard, small_run: SmallRun, tmp_path: Path
) -> None:
    (faults / "dies_at").write_text("f5.jsonl")
    try:
        with pytest.raises(ray_engine.RayError, match=r"f5\.jsonl, .*: the process died 4 times while it scored them"):
            scored(archive, guard, small_run, tmp_path / "out")
    finally:
        (faults / "dies_at").unlink()


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    cluster: None, faults: Path, archive: Path, alone: Path, small_run: SmallRun, guard: Guard, tmp_path: Path
) -> None:
    (faults / "disk_full").touch()
    command = (
        "score",
        archive,
        "--guard",
        small_run.guard,
        "--out",
        tmp_path / "out",
        "--engine",
        "ray",
        "--workers",
        2,
    )
    try:
        assert "No space left on device" in refused(*command, "--quiet")
    finally:
        (faults / "disk_full").unlink()
    assert run(*command, "--quiet").status == 3  # broken.zip is unread
    found, expected = files(tmp_path / "out"), files(alone)
    assert {**found, "manifest": b""} == {**expected, "manifest": b""}


@pytest.mark.slow
def test_a_damaged_store_is_one_line(
    cluster: None, archive: Path, small_run: SmallRun, guard: Guard, tmp_path: Path
) -> None:
    score_archive(archive, guard, tmp_path / "first", store=tmp_path / "store", progress=False)
    # Of a small one, half is the footer.
    shard = max((tmp_path / "store").glob("*.parquet"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ray_engine.RayError, match="its checksum differs"):
        scored(archive, guard, small_run, tmp_path / "out", store=tmp_path / "store")


@pytest.mark.slow
def test_actors_end_with_the_run_that_failed(
    cluster: None, faults: Path, archive: Path, guard: Guard, small_run: SmallRun, tmp_path: Path
) -> None:
    (faults / "disk_full").touch()
    try:
        with pytest.raises(ray_engine.RayError, match="No space left"):
            scored(archive, guard, small_run, tmp_path / "out")
        limit = time.monotonic() + 30
        while ray.available_resources().get("CPU") != 2:
            assert time.monotonic() < limit
            time.sleep(0.2)
    finally:
        (faults / "disk_full").unlink()


def test_a_worker_leaves_others_unfinished_files_alone(
    guard: Guard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = identity(guard, None)
    with pytest.raises(JobError, match="is not there on this machine"):
        JobOfWorker(tmp_path / "out", wanted)
    Job(tmp_path / "out", wanted)
    halves = [
        tmp_path / "out" / name
        for name in ("parts/a.json.0.partial", "steps/b.parquet.0.partial", "manifest.json.1.partial")
    ]
    for half in halves:
        half.touch()
    with JobOfWorker(tmp_path / "out", wanted):
        assert all(half.exists() for half in halves)
        with pytest.raises(JobError, match="differs in format"):
            JobOfWorker(tmp_path / "out", identity(guard, "asb"))
        monkeypatch.setattr("jaxguard.scoring.job.ENDING", 0.1)
        with pytest.raises(JobError, match="processes of an earlier run still write there"):
            Job(tmp_path / "out", wanted)
        assert all(half.exists() for half in halves)
    Job(tmp_path / "out", wanted)
    assert not any(half.exists() for half in halves)


def test_what_several_processes_did_is_summed() -> None:
    total = Done()
    total.update(Done({"a": "1", "b": "2"}, {"c": "gone"}, Counter(steps=3)))
    total.update(Done({"a": "1", "b": "3", "c": "4"}, {"d": "gone"}, Counter(steps=4, shards=1)))
    total.update(Done({"b": "2", "d": "5"}))
    assert total.keys == {"a": "1"}
    assert total.unread == {"b": CHANGED, "c": "gone", "d": "gone"}
    assert total.counts == {"steps": 7, "shards": 1}


def test_refusals(small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("score", small_run.data, "--guard", small_run.guard, "--out", tmp_path / "out")
    assert "--workers: got 0, expected at least 1" in refused(*command, "--engine", "ray", "--workers", 0)
    assert "are for --engine ray" in refused(*command, "--workers", 2)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "pip install 'jaxguard[ray]'" in refused(*command, "--engine", "ray")
    assert not (tmp_path / "out").exists()
