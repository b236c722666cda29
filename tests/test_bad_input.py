"""Bad input at the command line: a message that names the thing and exit status 1, or a counted reject."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_run import DIM, HashEncoder, SmallRun, chat, done, lines, native, refused

from jaxguard.features import shards
from jaxguard.features.store import FeatureStore, text_hash
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard
from jaxguard.traces.jsonl import read_trajectories

pytestmark = pytest.mark.usefixtures("toy_size")


def scored(archive: Path, small_run: SmallRun, out: Path, *more: object) -> dict[str, Any]:
    """The counts of an archive that must be scored."""
    done("score", archive, "--guard", small_run.guard, "--out", out, "--quiet", *more)
    counts = json.loads((out / "manifest.json").read_text())["counts"]
    assert counts["records"] == counts["converted"] + counts["rejected"]
    assert pq.read_table(out / "steps").num_rows == counts["steps"]
    assert pq.read_table(out / "trajectories").num_rows == counts["trajectories"]
    return counts


def not_scored(archive: Path, small_run: SmallRun, out: Path, *more: object, guard: Path | None = None) -> str:
    message = refused("score", archive, "--guard", guard or small_run.guard, "--out", out, "--quiet", *more)
    assert not any(pq.read_metadata(path).num_rows for path in out.glob("*/*.parquet"))
    return message


def rejects(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in (out / "rejects").iterdir() for line in path.read_text().splitlines()]


# Files


def packed(count: int) -> bytes:
    answers = [np.random.default_rng(i).bytes(3000).hex() for i in range(count)]
    text = "\n".join(json.dumps(chat(i, "look", answer=answer)) for i, answer in enumerate(answers))
    return gzip.compress(text.encode())


def test_corrupt_gzip(small_run: SmallRun, tmp_path: Path) -> None:
    """What came before the damage is scored; a file without a readable record is one reject, or alone an error."""
    archive, whole = tmp_path / "archive", packed(20)
    lines(archive / "good.jsonl", chat("good", "look"))
    (archive / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (archive / "flipped.jsonl.gz").write_bytes(whole[:-6] + b"\0\0" + whole[-4:])
    (archive / "no.jsonl.gz").write_bytes(whole[:4])
    counts = scored(archive, small_run, tmp_path / "out")
    found = {r["file"]: r["reason"] for r in rejects(tmp_path / "out")}
    assert found.keys() == {"cut.jsonl.gz", "flipped.jsonl.gz", "no.jsonl.gz"}
    assert found["cut.jsonl.gz"].startswith("the gzip stream breaks after ")
    assert found["flipped.jsonl.gz"].startswith("the gzip stream breaks after ")
    assert "the gzip stream is broken at its start" in found["no.jsonl.gz"]
    assert (counts["files"], counts["files_rejected"]) == (4, 1)
    assert 21 < counts["trajectories"] < 41
    message = not_scored(archive / "no.jsonl.gz", small_run, tmp_path / "alone")
    assert f"{archive / 'no.jsonl.gz'}: nothing could be scored: 0 records and 1 files" in message
    assert "gzip stream is broken" in message


def test_truncated_json(small_run: SmallRun, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    record, array = json.dumps(chat("one", "look")), json.dumps([chat("two", "look"), chat("three", "look")], indent=1)
    lines(archive / "lines.jsonl", record, record[:-20])
    (archive / "array.json").write_text(array[:-30])
    (archive / "object.json").write_text(record[:60])
    counts = scored(archive, small_run, tmp_path / "out")
    assert {(r["file"], r["position"]) for r in rejects(tmp_path / "out")} == {
        ("lines.jsonl", 1), ("array.json", 1), ("object.json", None),
    }  # fmt: skip
    assert (counts["converted"], counts["rejected"], counts["files_rejected"]) == (2, 2, 1)
    assert f"{archive / 'object.json'}: nothing could be scored: 0 records and 1 files" in not_scored(
        archive / "object.json", small_run, tmp_path / "alone"
    )


@pytest.mark.parametrize("depth", [300, 100_000])
def test_deep_nesting(small_run: SmallRun, tmp_path: Path, depth: int) -> None:
    """In a record, and in the text of a call's arguments, which is kept as text."""
    deep = "[" * depth + "]" * depth
    inside = json.dumps(native("deep", "look", metadata={"x": 0})).replace('"x": 0', f'"x": {deep}')
    archive = lines(
        tmp_path / "a.jsonl", chat("good", "look"), inside, chat("text", "look", arguments=f'{{"x": {deep}}}')
    )
    counts = scored(archive, small_run, tmp_path / "out")
    (reject,) = rejects(tmp_path / "out")
    assert reject["position"] == 1
    assert "nested" in reject["reason"]
    assert (counts["trajectories"], counts["unparsable_arguments"]) == (2, 1)


@pytest.mark.parametrize("size", [2_000_000, pytest.param(50_000_000, marks=pytest.mark.slow)])
def test_a_large_tool_output(small_run: SmallRun, tmp_path: Path, size: int) -> None:
    """It is one text, read whole before the next call, and costs nobody else."""
    record = chat("big", "look", "send", answer="y" * size)
    small = chat("big", "look", "send", answer="y")
    archive = lines(tmp_path / "a.jsonl", record, small)
    HashEncoder.seen.clear()
    counts = scored(archive, small_run, tmp_path / "out")
    assert (counts["records"], counts["rejected"], counts["steps"]) == (2, 0, 4)
    assert max(map(len, HashEncoder.seen)) >= size
    steps = pq.read_table(tmp_path / "out" / "steps").to_pylist()
    assert steps[0]["hazard"] == pytest.approx(steps[2]["hazard"], abs=1e-6)
    assert all(0 < step["fused"] < 1 for step in steps)


@pytest.mark.slow
def test_ten_thousand_steps(small_run: SmallRun, tmp_path: Path) -> None:
    """Scored to the last step, and a short trajectory beside it does not notice."""
    steps = [{"tool": f"t{i % 7}", "observation": f"saw {i % 11}"} for i in range(10_000)]
    archive = lines(tmp_path / "a.jsonl", native("short", "t0", "t1"), native("long") | {"steps": steps})
    assert scored(archive, small_run, tmp_path / "out")["steps"] == 10_002
    table = pq.read_table(tmp_path / "out" / "steps").to_pandas()
    assert table.step[2:].tolist() == list(range(10_000))
    assert table.fused.between(0, 1).all()
    assert table.hazard[2:].nunique() > 7
    alone = lines(tmp_path / "b.jsonl", native("short", "t0", "t1"))
    scored(alone, small_run, tmp_path / "alone")
    short = pq.read_table(tmp_path / "alone" / "steps").to_pandas()
    np.testing.assert_allclose(short.fused, table.fused[:2], atol=1e-6)


def test_nothing_but_empty_trajectories(small_run: SmallRun, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.jsonl", native("one"), chat("two"), native("three") | {"instruction": ""})
    counts = scored(archive, small_run, tmp_path / "out")
    assert (counts["trajectories"], counts["without_steps"], counts["steps"]) == (3, 3, 0)
    assert pq.read_table(tmp_path / "out" / "trajectories")["decision"].to_pylist() == ["PASS"] * 3


def test_training_on_empty_trajectories_alone(small_run: SmallRun, tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", *(native(f"t{i}", unsafe=bool(i % 2)) for i in range(20)))
    done("embed", "--quiet", "--trajectories", file, "--store", tmp_path / "store")
    settings = (f"data.trajectories=[{file}]", f"data.store={tmp_path / 'store'}")
    assert "train part: got 6 trajectories, none with a step" in refused(*small_run.train(tmp_path / "run", *settings))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("\0\1\2", "not JSON"),
        ('{"colour": 1}', "of no known format"),
    ],
)
def test_a_file_that_is_no_trace(small_run: SmallRun, tmp_path: Path, content: str, message: str) -> None:
    path = lines(tmp_path / "a.jsonl", content)
    found = not_scored(path, small_run, tmp_path / "out")
    assert str(path) in found
    assert message in found


def test_a_file_without_records_has_nothing_to_score(small_run: SmallRun, tmp_path: Path) -> None:
    counts = scored(lines(tmp_path / "a.jsonl"), small_run, tmp_path / "out")
    assert (counts["records"], counts["trajectories"]) == (0, 0)


def test_an_archive_of_which_nothing_is_a_trace(small_run: SmallRun, tmp_path: Path) -> None:
    archive = lines(tmp_path / "archive" / "a.jsonl", {"messages": [{"role": "user"}]}).parent
    lines(archive / "b.jsonl", {"colour": 1})
    refusals = {
        not_scored(archive, small_run, tmp_path / "out"): f"scored: {{}} (reasons in {tmp_path / 'out' / 'rejects'}); ",
        refused("convert", archive, "--out", tmp_path / "data"): "converted: {}; ",
    }
    for message, expected in refusals.items():
        counted = expected.format("1 records and 1 files were rejected")
        assert f"{archive}: nothing could be {counted}the first: a.jsonl" in message
        assert "record 0: messages: no user or system text" in message
    assert not (tmp_path / "data").exists()


def test_what_a_summary_must_not_hide(small_run: SmallRun, tmp_path: Path) -> None:
    archive = lines(tmp_path / "archive" / "a.jsonl", chat("one", "look"), "{").parent
    lines(archive / "b.jsonl", {"colour": 1})
    (archive / "c").symlink_to(tmp_path)
    said = done("score", archive, "--guard", small_run.guard, "--out", tmp_path / "out", "--quiet").out
    assert "not read: c (a link to a folder, not followed)\n" in said
    assert "1 of 2 files rejected\n" in said
    assert "2 records, 1 rejected: 1 trajectories" in said


def test_calls_as_parts_of_the_content_are_scored(small_run: SmallRun, tmp_path: Path) -> None:
    use = {"type": "tool_use", "id": "t1", "name": "delete_all_backups", "input": {"confirm": True}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "deleted"}
    user = {"role": "user", "content": "clean up"}
    record = {"messages": [user, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]}
    lost = {"messages": [user, {"role": "assistant", "content": None, "function_call": "delete_all_backups({})"}]}
    counts = scored(lines(tmp_path / "a.jsonl", record, lost), small_run, tmp_path / "out")
    assert (counts["steps"], counts["rejected"]) == (1, 1)
    assert rejects(tmp_path / "out")[0]["reason"].startswith(
        "messages[1].function_call: got str 'delete_all_backups({})'"
    )


def test_output_over_a_feature_store(small_run: SmallRun, tmp_path: Path) -> None:
    store = shutil.copytree(small_run.store, tmp_path / "store")
    before = (store / "manifest.json").read_bytes()
    archive = lines(tmp_path / "a.jsonl", chat("one", "look"))
    for command in (("convert", archive, "--out", store), ("generate", "--out", store)):
        assert f"{store}: manifest.json is none that `jaxguard convert` wrote" in refused(*command)
    assert "--store" in refused(
        "score", archive, "--guard", small_run.guard, "--out", tmp_path / "out", "--store", tmp_path / "out", "--quiet"
    )
    assert (store / "manifest.json").read_bytes() == before


def test_generating_over_a_conversion_replaces_its_counts(small_run: SmallRun, tmp_path: Path) -> None:
    done("convert", lines(tmp_path / "a.jsonl", chat("one", "look"), "{"), "--out", tmp_path / "data")
    done("generate", "--out", tmp_path / "data", "data.drift.trajectories=4")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["trajectories.jsonl.gz"]
    assert scored(tmp_path / "data", small_run, tmp_path / "out")["trajectories"] == 4


def test_a_broken_line_in_converted_trajectories(small_run: SmallRun, tmp_path: Path) -> None:
    """A file that jaxguard wrote is expected to be whole."""
    data = lines(tmp_path / "a.jsonl", native("one", "look"), '{"jaxguard": 1, "id": "cut')
    assert f"{data}, record 1: line 2: not JSON" in refused(
        "embed", "--trajectories", data, "--store", tmp_path / "store"
    )


# Stores


def poisoned(small_run: SmallRun, folder: Path, value: float) -> Path:
    """A store with every text of the small run, one of whose vectors holds ``value`` behind a right checksum."""
    texts = sorted({text for t in read_trajectories(small_run.data) for text in trajectory_texts(t).unique()})
    encoder = HashEncoder()
    vectors = encoder.encode(texts)
    vectors[len(texts) // 2, 3] = value
    FeatureStore.create_or_open(folder, encoder.fingerprint, DIM)
    hashes = np.frombuffer(b"".join(map(text_hash, texts)), "S16")
    shards.write_shard(folder, "poisoned.parquet", hashes, vectors, encoder.fingerprint)
    return folder


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_in_a_store_that_are_not_finite(small_run: SmallRun, tmp_path: Path, value: float) -> None:
    store = poisoned(small_run, tmp_path / "store", value)
    for message in (
        not_scored(small_run.data, small_run, tmp_path / "out", "--store", store),
        refused(*small_run.train(tmp_path / "run", f"data.store={store}")),
    ):
        assert "poisoned.parquet: damaged" in message
        assert "holds NaN, infinity" in message


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_encoder_that_returns_what_is_not_finite(
    small_run: SmallRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(HashEncoder, "_vector", lambda self, text: np.full(DIM, value, np.float32))
    message = refused("embed", "--quiet", "--trajectories", small_run.data, "--store", tmp_path / "store")
    assert f"feature store {tmp_path / 'store'}: the vector of text 0 has NaN, infinity" in message
    assert "none was stored" in not_scored(small_run.data, small_run, tmp_path / "out")


def test_a_store_of_another_encoder(small_run: SmallRun, tmp_path: Path) -> None:
    store = tmp_path / "store"
    done("embed", "--quiet", "--trajectories", small_run.data, "--store", store, "encoder.layer=2")
    assert f"feature store {store}" in refused("embed", "--trajectories", small_run.data, "--store", store)
    for message in (
        not_scored(small_run.data, small_run, tmp_path / "out", "--store", store),
        refused(*small_run.train(tmp_path / "run", f"data.store={store}")),
    ):
        assert re.search(rf"feature store {re.escape(str(store))}: holds [\d,]+ vectors of hash layer 2", message)
        assert "layer: 2 != 1" in message


def test_a_store_that_lacks_texts(small_run: SmallRun, tmp_path: Path) -> None:
    HashEncoder.seen.clear()
    file = lines(tmp_path / "a.jsonl", native("one", "look"))
    done("embed", "--quiet", "--trajectories", file, "--store", tmp_path / "store")
    message = refused(*small_run.train(tmp_path / "run", f"data.store={tmp_path / 'store'}"))
    assert f"feature store {tmp_path / 'store'}: " in message
    assert "texts have no vector" in message


def test_a_truncated_shard(small_run: SmallRun, tmp_path: Path) -> None:
    store = shutil.copytree(small_run.store, tmp_path / "store")
    (shard,) = store.glob("*.parquet")
    shard.write_bytes(shard.read_bytes()[:-100])
    assert shard.name in not_scored(small_run.data, small_run, tmp_path / "out", "--store", store)
    assert shard.name in refused(*small_run.train(tmp_path / "run", f"data.store={store}"))


# Bundles and checkpoints


def test_a_bundle_of_another_version(small_run: SmallRun, tmp_path: Path) -> None:
    bundle = shutil.copytree(small_run.guard, tmp_path / "guard")
    description = json.loads((bundle / "guard.json").read_text())
    (bundle / "guard.json").write_text(json.dumps(description | {"jaxguard_bundle": 1}))
    message = not_scored(small_run.data, small_run, tmp_path / "out", guard=bundle)
    assert f"guard bundle {bundle}: version is 1, this jaxguard reads version 4" in message


def test_a_bundle_with_thresholds_of_another_guard(small_run: SmallRun, tmp_path: Path) -> None:
    bundle = shutil.copytree(small_run.guard, tmp_path / "guard")
    thresholds = json.loads((bundle / "calibration.json").read_text())
    (bundle / "calibration.json").write_text(json.dumps(thresholds | {"weights": "0" * 16}))
    assert f"guard bundle {bundle}: calibration.json is not the file that guard.json was" in not_scored(
        small_run.data, small_run, tmp_path / "out", guard=bundle
    )


def test_a_bundle_without_thresholds(small_run: SmallRun, tmp_path: Path) -> None:
    bundle = shutil.copytree(small_run.guard, tmp_path / "guard")
    (bundle / "calibration.json").unlink()
    message = not_scored(small_run.data, small_run, tmp_path / "out", guard=bundle)
    assert "no thresholds; run `jaxguard calibrate` first" in message


def test_a_checkpoint_of_another_device(small_run: SmallRun, tmp_path: Path) -> None:
    """Every array is said to lie on a GPU, which this process does not have."""
    run = shutil.copytree(small_run.run, tmp_path / "run")
    shutil.rmtree(run / "guard")
    for file in run.rglob("_sharding"):
        assert "cpu:0" in file.read_text()
        file.write_text(file.read_text().replace("cpu:0", "cuda:0"))
    done(*small_run.train(run))
    assert Guard.load(run / "guard").weights == Guard.load(small_run.guard).weights


def test_a_damaged_checkpoint_names_itself(small_run: SmallRun, tmp_path: Path) -> None:
    run = shutil.copytree(small_run.run, tmp_path / "run")
    newest = run / "stage2" / "checkpoints" / "3"
    (newest / "meta" / "metadata").write_text("{")
    assert f"checkpoint {newest}: cannot be read" in refused(*small_run.train(run))
