"""Rows of Parquet files as records: nulls that Arrow added, JSON text, odd types, damage, memory."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxguard.traces import files
from jaxguard.traces.convert import convert
from jaxguard.traces.files import Broken, Parsed, read_records
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.types import JaxguardError


def write(folder, columns, name="chats.parquet", **options):
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    path = folder / name
    pq.write_table(table, path, **options)
    return path


def records(path):
    return [item.record if isinstance(item, Parsed) else item.reason for item in read_records(path)]


def call(call_id, name, arguments):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


CHATS = [
    [
        {"role": "user", "content": "Water the roses."},
        {"role": "assistant", "content": None, "tool_calls": [call("a", "look", {"at": "roses"})]},
        {"role": "tool", "tool_call_id": "a", "content": "dry"},
        {"role": "assistant", "tool_calls": [call("b", "pour", {"litres": 2}), call("c", "wait", {})]},
    ],
    [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}],
]
STEPS = [[("look", {"at": "roses"}, ""), ("pour", {"litres": 2}, "dry"), ("wait", {}, "dry")], []]


def converted(folder, path):
    report = convert(path, folder / "out")
    made = sorted(read_trajectories(folder / "out"), key=lambda t: t.id)
    assert report.counts["rejected"] == 0
    return [[(s.tool, s.arguments, s.observation) for s in t.steps] for t in made]


def as_text(chats):
    return [json.dumps(chat) for chat in chats]


def inner_text(chats):
    return [[m | {"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in c] for c in chats]


def of_lists(chats):
    keys = ("role", "content", "tool_calls", "tool_call_id")
    return [{key: [m.get(key) for m in chat] for key in keys} for chat in chats]


@pytest.mark.parametrize(
    "shape", [list, as_text, inner_text, of_lists, lambda chats: [[json.dumps(m) for m in c] for c in chats]]
)
def test_chats_in_every_shape_that_hubs_have(tmp_path, shape):
    """Arrow pads every struct with the keys of the others, arguments too."""
    path = write(tmp_path, {"id": ["x", "y"], "messages": shape(CHATS), "reward": [0.5, None]})
    assert converted(tmp_path, path) == STEPS
    first, second = records(path)
    assert first["reward"] == 0.5
    assert second["reward"] is None


def test_nulls_that_arrow_adds_are_left_out_and_others_stay(tmp_path):
    rows = [{"a": 1, "s": {"x": 1, "deep": {"z": 2}}}, {"s": {"y": [None, 2]}}, {"a": None, "s": None}]
    kind = pa.map_(pa.string(), pa.int64())
    table = pa.Table.from_pylist(rows).append_column("m", pa.array([[("k", 1), ("n", None)], [], None], kind))
    assert records(write(tmp_path, table)) == [
        {"a": 1, "s": {"x": 1, "deep": {"z": 2}}, "m": {"k": 1, "n": None}},
        {"a": None, "s": {"y": [None, 2]}, "m": {}},
        {"a": None, "s": None, "m": None},
    ]


def test_types_that_json_has_not(tmp_path):
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "moment": pa.array([moment], pa.timestamp("us", "UTC")),
        "nanos": pa.array([moment], pa.timestamp("ns")),
        "day": [moment.date()],
        "hour": [moment.time()],
        "price": [decimal.Decimal("1.50")],
        "bytes": [b"ok \xff"],
        "word": pa.array(["w"]).dictionary_encode(),
        "big": pa.array(["l"], pa.large_string()),
        "pair": pa.array([[1.0, float("nan")]], pa.list_(pa.float64(), 2)),
    }
    (item,) = read_records(write(tmp_path, columns))
    assert item.record == {
        "moment": "2026-01-02T03:04:05+00:00",
        "nanos": "2026-01-02T03:04:05",
        "day": "2026-01-02",
        "hour": "03:04:05",
        "price": "1.50",
        "bytes": "ok \ufffd",
        "word": "w",
        "big": "l",
        "pair": [1.0, "NaN"],
    }
    assert (item.surrogates, item.nonfinite) == (1, 1)
    assert item.size > 0


def test_broken_text_does_not_lose_the_other_rows(tmp_path):
    bad = pa.array([b"fine", b"b\xffd", b"fine"]).view(pa.string())
    assert records(write(tmp_path, {"text": bad})) == [{"text": "fine"}, {"text": "b\ufffdd"}, {"text": "fine"}]
    texts = [json.dumps(CHATS[1]), '[{"role": ', '[{"role": "user", "role": "user"}]', "", None, '{"a": NaN}']
    found = list(read_records(write(tmp_path, {"messages": texts, "output": ["[ plain"] * 6})))
    assert [type(item) for item in found] == [Parsed, Broken, Broken, Parsed, Parsed, Parsed]
    assert found[1].reason.startswith("row 1, column 'messages': text that is not JSON: Expecting value")
    assert "key 'role' stands twice" in found[2].reason
    assert found[0].record["output"] == "[ plain"
    assert [item.record["messages"] for item in found[3:]] == [None, None, {"a": "NaN"}]
    assert found[5].nonfinite == 1


def test_calls_in_texts_of_messages_and_in_columns_beside_are_not_lost(tmp_path):
    parts = [{"type": "tool_use", "id": "a", "name": "look", "input": {"at": "roses"}}]
    answer = [{"type": "tool_result", "tool_use_id": "a", "content": "dry"}]
    chat = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": json.dumps(parts)},
        {"role": "user", "content": json.dumps(answer)},
    ]
    assert converted(tmp_path, write(tmp_path, {"messages": [chat]})) == [[("look", {"at": "roses"}, "")]]
    beside = write(tmp_path, {"messages": [CHATS[1]], "tool_calls": [json.dumps([call("z", "dig", {})])]})
    with pytest.raises(JaxguardError, match="a call that is not among the messages of 'messages'"):
        convert(beside, tmp_path / "beside")
    none = write(tmp_path, {"messages": [CHATS[1]], "tool_calls": ["[]"]}, "none.parquet")
    assert converted(tmp_path / "none", none) == [[]]


def test_sharegpt_turns(tmp_path):
    made = {"name": "look", "arguments": {}}
    turns = [{"from": "human", "value": "go"}, {"from": "function_call", "value": json.dumps(made)}]
    words = [{"from": "human", "value": "go"}, {"from": "gpt", "value": "Action: look"}]
    report = convert(write(tmp_path, {"conversations": [turns, words]}), tmp_path / "out")
    assert (report.counts["steps"], report.counts["rejected"]) == (1, 1)


def test_columns_of_one_name(tmp_path):
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    assert records(write(tmp_path, table)) == ["column 'a' stands twice in the Parquet file"]
    twice = pa.array([[("k", 1), ("k", 2)]], pa.map_(pa.string(), pa.int64()))
    assert records(write(tmp_path, {"m": twice})) == ["row 0, column 'm': a key stands twice in one map"]


def test_damage_ends_the_file_with_one_reject(tmp_path):
    path = write(
        tmp_path,
        {"text": [f"{i}" * 50 for i in range(100)]},
        row_group_size=30,
        compression="zstd",
        use_dictionary=False,
    )
    whole = path.read_bytes()
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    path.write_bytes(whole[:start] + b"\xff" * 60 + whole[start + 60 :])
    *good, last = read_records(path)
    assert [item.record["text"] for item in good] == [f"{i}" * 50 for i in range(60)]
    assert isinstance(last, Broken)
    assert last.position == 60
    assert last.reason.startswith("the Parquet file breaks after 60 rows (")
    for cut in (whole[: len(whole) // 2], whole[:4], b"PAR1" * 5, b"PARE" + whole[4:-4] + b"PARE"):
        path.write_bytes(cut)
        (only,) = read_records(path)
        assert only.reason.startswith("the Parquet file breaks after 0 rows (")


def test_long_rows_and_empty_files(tmp_path, monkeypatch):
    path = write(tmp_path, {"text": ["a", "b" * 5000, "c"]})
    assert len(records(path)) == 3
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 1000)
    assert records(path) == [{"text": "a"}, "row 1: longer than 1000 bytes", {"text": "c"}]
    assert records(write(tmp_path, {"text": pa.array([], pa.string())})) == []


def test_memory_does_not_grow_with_a_row_group(tmp_path):
    def peak(rows):
        chats = [[{"role": "user", "content": str(i) * (20_000 // len(str(i)))}] for i in range(rows)]
        path = write(tmp_path, {"messages": chats}, row_group_size=rows, use_dictionary=False)
        before = pa.total_allocated_bytes()
        return max(pa.total_allocated_bytes() - before for _ in read_records(path))

    assert peak(3_000) < 1.2 * peak(1_000)
