"""Records out of files: every shape, every kind of damage, and memory that does not grow."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxguard.traces import files
from jaxguard.traces.files import Broken, Parsed, clean_json, has_trace_name, read_records


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def records(path: Path) -> list:
    """Records as they are, rejects as text."""
    return [item.record if isinstance(item, Parsed) else item.reason for item in read_records(path)]


THREE = [{"a": 1}, {"b": [1, {"c": "x\ny"}]}, {"d": "é"}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.jsonl", "\n".join(json.dumps(r) for r in THREE)),
        ("x.ndjson", "\r\n\r\n".join(json.dumps(r) for r in THREE) + "\r\n  \r\n"),
        ("x.jsonl", "\ufeff" + "\n".join(json.dumps(r, ensure_ascii=False) for r in THREE)),
        ("x.json", json.dumps(THREE)),
        ("x.json", json.dumps(THREE, indent=2, ensure_ascii=False)),
        ("x.json", "\ufeff" + json.dumps(THREE, indent=2)),
        ("x.json", "\n".join(json.dumps(r) for r in THREE)),
        ("x.json", "\n".join(json.dumps(r, indent=4) for r in THREE)),
        ("x.jsonl", json.dumps(THREE, indent=2)),
        ("no_suffix", "\n".join(json.dumps(r) for r in THREE)),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_shape_gives_the_same_records(tmp_path, name, content, zipped):
    data = content.encode()
    # Compressed data is recognised by its bytes: the name stays as it is.
    path = write(tmp_path, name, gzip.compress(data) if zipped else data)
    found = list(read_records(path))
    assert [item.record for item in found] == THREE
    assert [item.position for item in found] == [0, 1, 2]


def test_one_object_and_empty_files(tmp_path):
    assert records(write(tmp_path, "one.json", '{"a": {"b": 1}}')) == [{"a": {"b": 1}}]
    assert records(write(tmp_path, "pretty.json", '{\n "a": 1\n}\n')) == [{"a": 1}]
    assert records(write(tmp_path, "empty.jsonl", "")) == []
    assert records(write(tmp_path, "blank.json", " \n\n ")) == []
    assert records(write(tmp_path, "none.json", "[]")) == []
    assert records(write(tmp_path, "empty.jsonl.gz", gzip.compress(b""))) == []


def test_a_bare_list_of_messages_is_one_record(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    expected = [{"messages": chat}]
    assert records(write(tmp_path, "chat.json", json.dumps(chat, indent=1))) == expected
    assert records(write(tmp_path, "chat.jsonl", json.dumps(chat) + "\n" + json.dumps(chat))) == expected * 2


def test_bad_lines_do_not_lose_the_others(tmp_path):
    lines = ['{"a": 1}', '{"a": ', "", "17", '"text"', '{"b": 2} trailing', '{"c": 3}']
    found = list(read_records(write(tmp_path, "x.jsonl", "\n".join(lines))))
    assert [item.position for item in found] == [0, 1, 2, 3, 4, 5]
    assert [item.record for item in found if isinstance(item, Parsed)] == [{"a": 1}, {"c": 3}]
    reasons = [item.reason for item in found if isinstance(item, Broken)]
    assert reasons[0].startswith("line 2: not JSON: Expecting value at character 7")
    assert reasons[1] == "the record is a int, expected a JSON object"
    assert reasons[2] == "the record is a str, expected a JSON object"
    assert reasons[3].startswith("line 6: not JSON: Extra data")


def test_binary_garbage_is_rejected(tmp_path):
    garbage = bytes(range(256)) * 20
    assert all(isinstance(item, Broken) for item in read_records(write(tmp_path, "x.jsonl", garbage)))


@pytest.mark.parametrize(
    ("text", "good", "reason"),
    [
        ('[{"a": 1}, {"b": 2}', 2, "the array is cut off"),
        ('[{"a": 1}, {"b": 2}, {"c": "cut', 2, "not JSON: Unterminated string"),
        ('[{"a": 1} {"b": 2}]', 1, "expected ',' or ']'"),
        ('[{"a": 1}, nonsense, {"b": 2}]', 1, "not JSON: Expecting value at character 11"),
        ('[{"a": 1}] {"b": 2}', 1, "text after the end of the array"),
        ('{\n"a": 1\n}\n{\n"b": ', 1, "not JSON: Expecting value"),
    ],
)
def test_a_broken_document_gives_what_came_before_and_one_reject(tmp_path, text, good, reason):
    *parsed, last = read_records(write(tmp_path, "x.json", text))
    assert [isinstance(item, Parsed) for item in parsed] == [True] * good
    assert isinstance(last, Broken)
    assert last.position == good
    assert reason in last.reason


def test_arrays_larger_than_the_window(tmp_path, monkeypatch):
    """Elements, strings, escapes and literals are cut at every possible place of the window's edge."""
    monkeypatch.setattr(files, "_BUFFER", 7)
    value = [{"k": 'a"\\\u00e9\u4e2d' * 5, "n": -12.5e-3, "t": [True, None, {"x": []}]}, {"e": ""}] * 4
    for ascii_only in (True, False):
        path = write(tmp_path, "x.json", json.dumps(value, ensure_ascii=ascii_only, indent=1))
        assert records(path) == value


def test_truncated_and_corrupt_gzip_keep_what_came_before(tmp_path):
    lines = "".join(json.dumps({"i": i, "pad": str(i * 7919) * 20}) + "\n" for i in range(3000)).encode()
    zipped = gzip.compress(lines)
    *parsed, last = read_records(write(tmp_path, "cut.jsonl.gz", zipped[: len(zipped) // 2]))
    assert len(parsed) > 500
    assert [item.record["i"] for item in parsed] == list(range(len(parsed)))
    assert f"the gzip stream breaks after {len(parsed)} records" in last.reason

    damaged = bytearray(zipped)
    damaged[-6] ^= 0xFF  # the checksum
    *parsed, last = read_records(write(tmp_path, "crc.jsonl.gz", bytes(damaged)))
    assert len(parsed) == 3000
    assert "CRC" in last.reason

    (only,) = read_records(write(tmp_path, "head.jsonl.gz", zipped[:9]))
    assert "broken at its start" in only.reason

    array = gzip.compress(json.dumps([{"i": i, "pad": str(i * 7919) * 20} for i in range(3000)]).encode())
    *parsed, last = read_records(write(tmp_path, "cut.json.gz", array[: len(array) // 2]))
    assert [item.record["i"] for item in parsed] == list(range(len(parsed)))
    assert len(parsed) > 500
    assert f"the gzip stream breaks after {len(parsed)} records" in last.reason


def test_surrogates_become_replacement_characters_and_are_counted(tmp_path):
    escaped = r'{"a\udc01": "x\ud800y", "ok": "\ud83d\ude00", "list": ["\uDFFF\ud800"]}'
    (item,) = read_records(write(tmp_path, "x.jsonl", escaped))
    assert item.record == {"a\ufffd": "x\ufffdy", "ok": "\U0001f600", "list": ["\ufffd\ufffd"]}
    assert item.surrogates == 4

    raw = b'{"a": "x\xff\xfey", "b": "\xed\xa0\x80"}'
    for name in ("x.jsonl", "x.json"):
        (item,) = read_records(write(tmp_path, name, raw))
        assert item.record == {"a": "x\ufffd\ufffdy", "b": "\ufffd\ufffd\ufffd"}
        assert item.surrogates == 5
    (item,) = read_records(write(tmp_path, "array.json", b"[" + raw + b"]"))
    assert item.surrogates == 5


def test_non_finite_numbers_become_strings_and_are_counted(tmp_path):
    (item,) = read_records(write(tmp_path, "x.jsonl", '{"a": NaN, "b": [Infinity, -Infinity, 1.5]}'))
    assert item.record == {"a": "NaN", "b": ["Infinity", "-Infinity", 1.5]}
    assert item.nonfinite == 3


def test_clean_json_counts():
    value, surrogates, nonfinite = clean_json({"a": ("\ud800", 1, float("inf")), "b": {"é": float("nan")}})
    assert value == {"a": ["\ufffd", 1, "Infinity"], "b": {"é": "NaN"}}
    assert (surrogates, nonfinite) == (1, 2)


@pytest.mark.parametrize("depth", [files.MAX_DEPTH + 5, 5_000, 200_000])
def test_deep_nesting_is_rejected(tmp_path, depth):
    deep = '{"a": ' + "[" * depth + "]" * depth + "}"
    path = write(tmp_path, "x.jsonl", '{"a": 1}\n' + deep + '\n{"b": 2}\n')
    first, second, third = records(path)
    assert (first, third) == ({"a": 1}, {"b": 2})
    assert "nested" in second


def test_nesting_up_to_the_limit_is_read(tmp_path):
    depth = files.MAX_DEPTH - 1
    (item,) = read_records(write(tmp_path, "x.jsonl", '{"a": ' + "[" * depth + "]" * depth + "}"))
    assert isinstance(item, Parsed)


def test_a_line_beyond_the_limit_is_skipped_without_being_held(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    path = write(tmp_path, "x.jsonl", '{"a": 1}\n{"b": "' + "x" * 5000 + '"}\n{"c": 3}\n')
    assert records(path) == [{"a": 1}, "line 2: longer than 1000 bytes", {"c": 3}]


def test_a_50_megabyte_line(tmp_path):
    size = 50_000_000
    path = tmp_path / "big.jsonl"
    with path.open("w") as out:
        out.write('{"a": 1}\n{"b": "' + "x" * size + '"}\n{"c": 3}\n')
    tracemalloc.start()
    lengths = [len(item.record.get("b", "")) for item in read_records(path)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths == [0, size, 0]
    assert peak < 6 * size


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.jsonl.gz", "x.json.gz"])
def test_memory_does_not_grow_with_the_file(tmp_path, monkeypatch, name):
    # Small buffers are full in both runs, so that only growth with the file can tell them apart.
    monkeypatch.setattr(files, "_BUFFER", 1 << 15)
    monkeypatch.setattr(files, "_CHUNK", 1 << 14)

    def peak(count: int) -> int:
        rows = [json.dumps({"i": i, "text": str(i) * 300}) for i in range(count)]
        text = "[" + ",\n".join(rows) + "]" if ".json" in name and ".jsonl" not in name else "\n".join(rows)
        path = write(tmp_path, name, gzip.compress(text.encode(), 1) if name.endswith("gz") else text)
        del rows, text
        tracemalloc.start()
        assert sum(1 for _ in read_records(path)) == count
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    small, large = peak(300), peak(3_000)
    assert large < 1.2 * small + 2**15


def test_names_a_folder_walk_looks_at():
    assert [
        name
        for name in ("a.jsonl", "A.JSON.GZ", "b.ndjson.gz", "d.eval", "e.parquet", "c.csv", "README.md")
        if has_trace_name(name)
    ] == [
        "a.jsonl",
        "A.JSON.GZ",
        "b.ndjson.gz",
        "d.eval",
        "e.parquet",
    ]


def test_parquet_is_recognised_by_its_bytes(tmp_path):
    """More of it in test_parquet.py."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"a": [1, None]}), buffer)
    assert records(write(tmp_path, "x.jsonl", buffer.getvalue())) == [{"a": 1}, {"a": None}]
    (only,) = read_records(write(tmp_path, "x.parquet.gz", gzip.compress(buffer.getvalue())))
    assert only.reason.startswith("a Parquet file in gzip")


def test_inspect_archives_are_recognised_by_bytes_and_name(tmp_path):
    """More of it in test_inspect_ai.py."""
    pytest.importorskip("inspect_ai.log")
    path = tmp_path / "x.eval"
    with zipfile.ZipFile(path, "w") as archive:
        for number, text in enumerate(('{"id": 1}', '{"id": ', '{"id": 3, "x": "\\ud800"}'), start=1):
            archive.writestr(f"samples/{number}_epoch_1.json", text)
    first, second, third = read_records(path)
    assert (first.record["inspect_sample"], first.position) == ({"id": 1}, 0)
    assert second.reason.startswith("samples/2_epoch_1.json: not JSON")
    assert (third.record["inspect_sample"]["id"], third.position, third.surrogates) == (3, 2, 1)


def test_a_zip_archive_is_named_as_such(tmp_path):
    """Its bytes are no lines; logs of Inspect AI are tested with their reader."""
    data = b"PK\x03\x04" + bytes(100) + b"\n" * 5
    for name, content in (("x.json", data), ("x.jsonl.gz", gzip.compress(data))):
        (only,) = read_records(write(tmp_path, name, content))
        assert only.reason.startswith("a zip archive, expected a log of Inspect AI named .eval")


def test_a_line_that_holds_an_array_of_records_says_so(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('[{"id": 1}, {"id": 2}]\n[]\n[{"role": "user", "content": "hi"}]\n')
    first, second, third = read_records(path)
    for item in (first, second):
        assert isinstance(item, Broken)
        assert item.reason.startswith(
            "the record is a JSON array, expected a JSON object, or an array of chat messages"
        )
    assert isinstance(third, Parsed)
    assert list(third.record) == ["messages"]


def test_a_key_that_stands_twice_rejects_its_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a": {"unsafe": true, "unsafe": false}}\n{"b": 2}\n')
    found = list(read_records(path))
    assert [type(item).__name__ for item in found] == ["Parsed", "Broken", "Parsed"]
    assert found[1].reason == "line 2: key 'unsafe' stands twice in one object"
