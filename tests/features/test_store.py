"""The feature store: exact, deduplicated, safe against kills, corruption, and other encoders."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow.parquet as pq
import pytest

from jaxguard.features import shards
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore, FeatureStoreError, MissingTexts, text_hash

FP = EncoderFingerprint("m", "abc", 3, "mean", "float32", 256, "windows")


def _vectors(count: int, dim: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def _filled(path: Path, count: int = 20, dim: int = 5, dtype: str = "float32") -> tuple[list[str], np.ndarray]:
    texts = [f"text {number}" for number in range(count)]
    vectors = _vectors(count, dim)
    FeatureStore.create_or_open(path, FP, dim, dtype).add(texts, vectors)
    return texts, vectors


def _only_shard(path: Path) -> Path:
    (shard,) = path.glob("*.parquet")
    return shard


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [1, 3, 384])
def test_round_trip_through_a_new_object(tmp_path: Path, dtype: str, dim: int) -> None:
    texts, vectors = _filled(tmp_path, 50, dim, dtype)
    store = FeatureStore.open(tmp_path, FP, dim)
    assert len(store) == 50
    order = np.random.default_rng(1).permutation(50)
    got = store.get([texts[index] for index in order])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, vectors[order].astype(dtype).astype(np.float32))


def test_rows_and_gather_take_any_shape(tmp_path: Path) -> None:
    texts, vectors = _filled(tmp_path)
    store = FeatureStore.open(tmp_path)
    rows = store.rows(texts)[:12].reshape(3, 4)
    np.testing.assert_array_equal(store.gather(rows), vectors[:12].reshape(3, 4, 5))
    assert store.gather(np.zeros((0,), np.int64)).shape == (0, 5)
    assert store.get([]).shape == (0, 5)
    with pytest.raises(FeatureStoreError, match=r"row ids 0\.\.20, expected 0\.\.19"):
        store.gather([0, 20])


def test_a_shard_is_ordinary_parquet(tmp_path: Path) -> None:
    texts, vectors = _filled(tmp_path)
    table = pq.read_table(_only_shard(tmp_path))
    assert str(table.schema.field("vector").type).startswith("fixed_size_list<element: float not null>[5]")
    assert not table.schema.field("vector").nullable
    assert not table.schema.field("hash").nullable
    assert table["hash"].to_pylist() == [text_hash(text) for text in texts]
    np.testing.assert_array_equal(np.array(table["vector"].to_pylist(), np.float32), vectors)
    assert json.loads(table.schema.metadata[b"jaxguard"])["fingerprint"] == FP.to_dict()


def test_deduplicates_and_keeps_the_first_vector(tmp_path: Path) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 2)
    assert store.add(["a", "b", "a"], [[1, 2], [3, 4], [5, 6]]) == 2
    assert store.add(["b", "c"], [[7, 8], [9, 10]]) == 1
    assert store.add(["c"], [[0, 0]]) == 0
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    np.testing.assert_array_equal(store.get(["a", "b", "c"]), [[1, 2], [3, 4], [9, 10]])
    assert store.missing(["x", "a", "x", "y"]) == ["x", "y"]
    assert "a" in store
    assert "x" not in store
    np.testing.assert_array_equal(store.find(["x", "c"]), [-1, 2])


def test_empty_text_and_surrogates_are_keys_like_any_other(tmp_path: Path) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 1)
    store.add(["", "\ud800"], [[1], [2]])
    np.testing.assert_array_equal(store.get(["\ud800", ""]), [[2], [1]])


def test_hashes_that_end_in_zero_bytes_stay_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"a": b"x" * 15 + b"\0", "b": b"x" * 14 + b"\0\0", "c": b"\0" * 16}
    monkeypatch.setattr("jaxguard.features.store.text_hash", table.__getitem__)
    store = FeatureStore.create_or_open(tmp_path, FP, 1)
    assert store.add(["a", "b"], [[1], [2]]) == 2
    assert store.missing(["a", "b", "c"]) == ["c"]
    store.add(["c"], [[3]])
    np.testing.assert_array_equal(FeatureStore.open(tmp_path).get(["a", "b", "c"]), [[1], [2], [3]])


def test_large_adds_are_split_into_shards(tmp_path: Path) -> None:
    count = shards.MAX_ROWS + 10
    texts, vectors = _filled(tmp_path, count, 3)
    assert sorted(pq.read_metadata(path).num_rows for path in tmp_path.glob("*.parquet")) == [10, shards.MAX_ROWS]
    np.testing.assert_array_equal(FeatureStore.open(tmp_path).get(texts), vectors)
    assert shards.rows_per_shard(2560 * 4) == shards.MAX_ROWS
    assert shards.rows_per_shard(1 << 20) == 256


@pytest.mark.parametrize(("limit", "value"), [("_OPEN_MAPS", 2), ("_OPEN_BYTES", 8)])
def test_more_shards_than_open_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(f"jaxguard.features.store.{limit}", value)
    store = FeatureStore.create_or_open(tmp_path, FP, 1)
    texts = [str(number) for number in range(6)]
    for number, text in enumerate(texts):
        store.add([text], [[number]])
    for _ in range(2):
        np.testing.assert_array_equal(store.get(texts)[:, 0], np.arange(6))
    assert sum(shard._map is not None for shard in store._shards) == 2


def test_missing_texts_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    _filled(tmp_path)
    store = FeatureStore.open(tmp_path)
    with pytest.raises(MissingTexts, match=r"2 of 3 texts have no vector, the first is number 1: 'nope'") as info:
        store.get(["text 1", "nope", "neither"])
    assert isinstance(info.value, LookupError)


def test_another_encoder_or_size_is_refused(tmp_path: Path) -> None:
    _filled(tmp_path)
    other = dataclasses.replace(FP, layer=6, dtype="bfloat16")
    for call in (
        lambda: FeatureStore.open(tmp_path, other),
        lambda: FeatureStore.create_or_open(tmp_path, other, 5),
    ):
        with pytest.raises(FeatureStoreError, match=r"layer: 3 != 6, dtype: float32 != bfloat16"):
            call()
    with pytest.raises(FeatureStoreError, match=r"dim is 5 .*expected 7"):
        FeatureStore.create_or_open(tmp_path, FP, 7)
    with pytest.raises(FeatureStoreError, match="dtype is float32, expected float16"):
        FeatureStore.create_or_open(tmp_path, FP, 5, "float16")


def test_a_shard_of_another_store_is_refused(tmp_path: Path) -> None:
    _filled(tmp_path / "a")
    FeatureStore.create_or_open(tmp_path / "b", dataclasses.replace(FP, layer=6), 5)
    FeatureStore.create_or_open(tmp_path / "c", FP, 4)
    FeatureStore.create_or_open(tmp_path / "d", FP, 5, "float16")
    for name, message in (("b", "layer: 3 != 6"), ("c", "expected 4 values"), ("d", "values of float16")):
        shutil.copy(_only_shard(tmp_path / "a"), tmp_path / name)
        with pytest.raises(FeatureStoreError, match=message):
            FeatureStore.open(tmp_path / name)


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1, 2], [np.nan, 0]], "vector of text 1 .*1 of 2"),
        ([[np.inf, 2], [np.nan, 0]], "vector of text 0 .*2 of 2"),
        ([[1, 2], [3, -1e30]], "vector of text 1 has NaN, infinity or a value beyond .*1 of 2"),
        ([[1, 2, 3], [4, 5, 6]], r"shape \(2, 3\), expected \(2, 2\)"),
        ([[1, 2]], r"shape \(1, 2\)"),
    ],
)
def test_unusable_vectors_are_refused_and_nothing_is_stored(
    tmp_path: Path, vectors: list[list[float]], message: str
) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 2)
    with pytest.raises(FeatureStoreError, match=message):
        store.add(["a", "b"], vectors)
    assert len(store) == len(list(tmp_path.glob("*.parquet"))) == 0


def test_values_beyond_float16_are_refused(tmp_path: Path) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 1, "float16")
    with pytest.raises(FeatureStoreError, match="beyond float16"):
        store.add(["a"], [[70_000.0]])


def test_every_truncation_of_a_shard_is_noticed(tmp_path: Path) -> None:
    texts, _ = _filled(tmp_path, 3, 2)
    shard = _only_shard(tmp_path)
    whole = shard.read_bytes()
    for size in range(0, len(whole), 7):
        shard.write_bytes(whole[:size])
        with pytest.raises(FeatureStoreError, match=shard.name):
            FeatureStore.open(tmp_path).get(texts)


def test_every_flipped_bit_of_the_data_is_noticed(tmp_path: Path) -> None:
    texts, vectors = _filled(tmp_path, 3, 2)
    shard = _only_shard(tmp_path)
    whole = shard.read_bytes()
    where = [whole.index(vectors.tobytes()) + i for i in range(vectors.nbytes)]
    where += [whole.index(text_hash(texts[0])) + i for i in range(48)]
    for at in where:
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        store = FeatureStore.open(tmp_path)
        with pytest.raises(FeatureStoreError, match=f"{shard.name}: damaged.*checksum"):
            store.gather(np.arange(3))


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e30])
def test_unusable_values_behind_a_right_checksum_are_noticed(tmp_path: Path, value: float) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 2)
    hashes = np.frombuffer(text_hash("a") + text_hash("b"), "S16")
    shards.write_shard(tmp_path, "x.parquet", hashes, np.array([[0, 1], [2, value]], np.float32), FP)
    store.refresh()
    with pytest.raises(FeatureStoreError, match=r"x\.parquet: damaged.*row 1 holds NaN"):
        store.get(["a"])


def test_a_shard_rewritten_by_another_program_is_refused(tmp_path: Path) -> None:
    texts, _ = _filled(tmp_path, 100, 8)
    shard = _only_shard(tmp_path)
    pq.write_table(pq.read_table(shard), shard, compression="snappy")
    with pytest.raises(FeatureStoreError, match=f"{shard.name}.*damaged, or rewritten"):
        FeatureStore.open(tmp_path).get(texts)


@pytest.mark.parametrize("content", ["", "[]", '{"layout": 1}', '{"layout": 9}', "\0", "[" * 100_000])
def test_a_broken_manifest_is_a_clear_error(tmp_path: Path, content: str) -> None:
    _filled(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(FeatureStoreError, match=r"manifest.*not readable"):
        FeatureStore.open(tmp_path)


def test_folders_that_are_not_stores(tmp_path: Path) -> None:
    with pytest.raises(FeatureStoreError, match="not a feature store"):
        FeatureStore.open(tmp_path)
    _filled(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FeatureStoreError, match=r"shards but no manifest\.json"):
        FeatureStore.create_or_open(tmp_path, FP, 5)
    (tmp_path / "file").touch()
    with pytest.raises(FeatureStoreError, match="cannot be made"):
        FeatureStore.create_or_open(tmp_path / "file", FP, 5)
    with pytest.raises(FeatureStoreError, match="dtype: got 'int8'"):
        FeatureStore.create_or_open(tmp_path / "new", FP, 5, "int8")
    with pytest.raises(FeatureStoreError, match="dim: got 0"):
        FeatureStore.create_or_open(tmp_path / "new", FP, 0)


def test_leftovers_of_a_kill_are_ignored_and_cleaned(tmp_path: Path) -> None:
    texts, vectors = _filled(tmp_path)
    leftover = tmp_path / ".tmp-0123.parquet"
    leftover.write_bytes(_only_shard(tmp_path).read_bytes()[:100])
    np.testing.assert_array_equal(FeatureStore.open(tmp_path).get(texts), vectors)
    assert leftover.exists(), "a reader must not delete what a writer may be writing"
    FeatureStore.create_or_open(tmp_path, FP, 5)
    assert not leftover.exists()


def test_a_read_only_store_is_opened_for_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts, vectors = _filled(tmp_path)

    def read_only(path: Path, mode: str = "r") -> IO:
        if mode != "rb":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return open(path, mode)

    monkeypatch.setattr("jaxguard.features.store.open", read_only, raising=False)
    store = FeatureStore.create_or_open(tmp_path, FP, 5)
    np.testing.assert_array_equal(store.get(texts), vectors)
    assert store.missing(texts) == []
    assert store.add(texts, vectors) == 0
    with pytest.raises(FeatureStoreError, match=r"cannot be written \(.*Read-only file system"):
        store.add(["new"], vectors[:1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(FeatureStoreError, match=r"empty: cannot be made \(.*Read-only file system"):
        FeatureStore.create_or_open(tmp_path / "empty", FP, 5)


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FeatureStore.create_or_open(tmp_path, FP, 1)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jaxguard.features.shards.os.fsync", no_space)
    with pytest.raises(FeatureStoreError, match="No space left"):
        store.add(["a"], [[1]])
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".parquet"]
    monkeypatch.undo()
    assert store.add(["a"], [[1]]) == 1


def test_a_shard_deleted_behind_an_open_store_is_named(tmp_path: Path) -> None:
    texts, _ = _filled(tmp_path)
    store = FeatureStore.open(tmp_path)
    shard = _only_shard(tmp_path)
    shard.unlink()
    with pytest.raises(FeatureStoreError, match=f"{shard.name}: cannot be read"):
        store.get(texts)


_WRITER = """
import sys
import numpy as np
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
fp = EncoderFingerprint("m", "abc", 3, "mean", "float32", 256, "windows")
first = int(sys.argv[2])
for block in range(first, first + 400, 20):
    store = FeatureStore.create_or_open(sys.argv[1], fp, 4)
    store.add([str(n) for n in range(block, block + 20)], [[n, n + 1, n + 2, n + 3] for n in range(block, block + 20)])
"""


def test_processes_may_append_at_the_same_time(tmp_path: Path) -> None:
    # The ranges overlap: half of the texts are written by both.
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path), str(first)]) for first in (0, 200)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    store = FeatureStore.open(tmp_path)
    assert len(store) == 600
    numbers = np.arange(600)
    np.testing.assert_array_equal(store.get([str(n) for n in numbers]), numbers[:, None] + np.arange(4))
    assert not list(tmp_path.glob(".tmp-*"))


def test_an_open_store_sees_what_others_append_and_row_ids_stay(tmp_path: Path) -> None:
    ours = FeatureStore.create_or_open(tmp_path, FP, 1)
    ours.add(["m"], [[1]])
    row = ours.rows(["m"])
    theirs = FeatureStore.create_or_open(tmp_path, FP, 1)
    theirs.add(["a", "z"], [[2], [3]])
    assert ours.missing(["a", "b"]) == ["b"]
    np.testing.assert_array_equal(ours.get(["z", "m", "a"]), [[3], [1], [2]])
    np.testing.assert_array_equal(ours.rows(["m"]), row)


def test_router_logits_are_kept_the_same_way(tmp_path: Path) -> None:
    router = dataclasses.replace(FP, pooling="decision-logits")
    store = FeatureStore.create_or_open(tmp_path, router, 3)
    store.add(["delete the file", "read the file"], [[-1.5, 0.25, 4.0], [9.0, 1.0, -3.0]])
    np.testing.assert_array_equal(FeatureStore.open(tmp_path, router, 3).get(["read the file"]), [[9.0, 1.0, -3.0]])


def test_reading_needs_no_jax() -> None:
    code = "import sys; import jaxguard.features; print(*(name in sys.modules for name in ('jax', 'torch')))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]
