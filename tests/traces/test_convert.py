"""Conversion of files and folders: every record is accounted for, output is whole and repeatable."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
import tracemalloc
from pathlib import Path

import pytest

from jaxguard.traces import convert as module
from jaxguard.traces import files
from jaxguard.traces.convert import ConvertError, convert, read_manifest, write_made
from jaxguard.traces.jsonl import read_trajectories, write_trajectories
from jaxguard.traces.lock import locked
from jaxguard.traces.readers import openai_chat
from jaxguard.types import JaxguardError, Step, Trajectory


def chat(name: object = None, arguments: str = "{}", answer: str = "ok") -> dict:
    call = {"id": "1", "function": {"name": "look", "arguments": arguments}}
    made = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": answer},
    ]
    return {"messages": made} if name is None else {"id": name, "messages": made}


def dojo(**more) -> dict:
    base = {"suite_name": "s", "pipeline_name": "p", "user_task_id": "user_task_1", "security": True}
    return {**base, "injection_task_id": None, "attack_type": None, "messages": chat()["messages"], **more}


def lines(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def rejects(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]


def check_sums(counts: dict) -> None:
    assert counts["records"] == counts["converted"] + counts["rejected"]
    assert counts["trajectories"] == counts["unsafe"] + counts["safe"] + counts["unlabelled"]


def test_a_file(tmp_path):
    path = lines(
        tmp_path / "x.jsonl", chat("a"), '{"id": "cut', {"other": 1}, {"messages": [{"role": "user"}]}, chat("b")
    )
    report = convert(path, tmp_path / "out")
    assert [t.id for t in read_trajectories(tmp_path / "out")] == ["x:a", "x:b"]
    assert [(r["file"], r["position"]) for r in rejects(tmp_path / "out")] == [("x.jsonl", i) for i in (1, 2, 3)]
    reasons = [r["reason"] for r in rejects(tmp_path / "out")]
    assert reasons[0].startswith("line 2: not JSON")
    assert reasons[1].startswith("of no known format (known: jaxguard, ")
    assert reasons[2].startswith("messages: no user or system text")
    check_sums(report.counts)
    assert report.counts["converted"] == 2
    assert report.counts["rejected"] == 3
    assert report.files[0].formats == {"openai_chat": 3}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == report.to_json()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "rejects.jsonl",
        "trajectories.jsonl.gz",
    ]


def test_counts(tmp_path):
    attacked = {"injection_task_id": "injection_task_1", "attack_type": "a", "derived_first_hazard_call": 1}
    two_calls = chat("two")
    two_calls["messages"][1]["tool_calls"].append({"id": "2", "function": {"name": "jump", "arguments": "{broken"}})
    path = lines(
        tmp_path / "x.jsonl",
        dojo(),
        dojo(**attacked),
        two_calls,
        {"messages": [{"role": "user", "content": "harm"}, {"role": "assistant", "content": "No."}]},
        '{"messages": [{"role": "user", "content": "\\ud800"}], "x": NaN}',
    )
    counts = convert(path, tmp_path / "out").counts
    assert counts == {
        "files": 1,
        "files_rejected": 0,
        "records": 5,
        "converted": 5,
        "rejected": 0,
        "trajectories": 5,
        "steps": 4,
        "without_steps": 2,
        "unsafe": 1,
        "safe": 1,
        "unlabelled": 3,
        "timing": 2,
        "first_hazards": 1,
        "parallel_calls": 1,
        "unobserved_calls": 1,
        "unparsable_arguments": 1,
        "renamed_ids": 0,
        "surrogates_replaced": 1,
        "nonfinite_replaced": 1,
    }


def test_a_folder(tmp_path):
    data = tmp_path / "data"
    lines(data / "b" / "two.jsonl", chat("x"))
    (data / "b" / "three.json.gz").write_bytes(gzip.compress(json.dumps([chat("y"), chat("z")]).encode()))
    lines(data / "a" / "one.jsonl", dojo())
    lines(data / "a" / "injection_targets.json", "[]")
    lines(data / "unknown.jsonl", {"a": 1}, {"b": 2})
    lines(data / "empty.jsonl")
    lines(data / "README.md", "text")
    (data / "cut.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:15])
    out = data / "out"  # inside the input: never read
    for _ in range(2):
        report = convert(data, out)
        assert [f.file for f in report.files] == [
            "a/one.jsonl",
            "b/three.json.gz",
            "b/two.jsonl",
            "cut.jsonl.gz",
            "empty.jsonl",
            "unknown.jsonl",
        ]
        assert report.skipped_files == ["README.md", "a/injection_targets.json"]
        assert [t.source for t in read_trajectories(out)] == ["agentdojo", *["openai_chat"] * 3]
        assert report.to_json()["formats"] == {"agentdojo": 1, "openai_chat": 3}
        assert report.counts["files_rejected"] == 2
        check_sums(report.counts)
        assert report.counts["records"] == 4
        whole_files = {r["file"]: r["reason"] for r in rejects(out) if r["position"] is None}
        assert whole_files.keys() == {"cut.jsonl.gz", "unknown.jsonl"}
        assert "none of the first 2 records is a trace" in whole_files["unknown.jsonl"]
        assert "gzip" in whole_files["cut.jsonl.gz"]


def test_a_single_unknown_file_is_an_error_and_leaves_no_output(tmp_path):
    path = lines(tmp_path / "x.jsonl", *[{"a": i} for i in range(300)])
    with pytest.raises(ConvertError, match=r"none of the first 100 records is a trace.*known: jaxguard, stepshield"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: tmp / "nowhere", "there is no such file or folder"),
        (lambda tmp: lines(tmp / "docs" / "README.md", "x").parent, "no file of traces to read there"),
        (
            lambda tmp: lines(tmp / "docs" / ".git" / "x.jsonl", chat()).parent.parent,
            r"not read: .git \(a hidden folder\)",
        ),
        (lambda tmp: tmp / "out", "the output folder is the input folder"),
        (lambda tmp: lines(tmp / "x" / "a.jsonl", chat(), "[" * 9).parent / "a.jsonl" / "b", "there is no such file"),
        (
            lambda tmp: lines(tmp / "x" / "a.jsonl", {"messages": [{"role": "user"}]}, {"a": 1}).parent,
            "nothing could be converted: 2 records and 0 files were rejected; the first: a.jsonl, record 0: ",
        ),
        (
            lambda tmp: lines(tmp / "x" / "a.jsonl", {"a": 1}).parent,
            "nothing could be converted: 0 records and 1 files were rejected; the first: a.jsonl: none of the first 1",
        ),
    ],
)
def test_what_cannot_be_converted(tmp_path, make, message):
    path = make(tmp_path)
    existed = path == tmp_path / "out"
    if existed:
        path.mkdir()
    with pytest.raises(JaxguardError, match=message):
        convert(path, tmp_path / "out")
    assert (tmp_path / "out").exists() is existed


def test_a_named_format_is_not_detected(tmp_path):
    path = lines(tmp_path / "x.jsonl", *["garbage"] * 150, chat("a"), dojo())
    report = convert(path, tmp_path / "out", format="openai_chat")
    assert [t.source for t in read_trajectories(tmp_path / "out")] == ["openai_chat", "openai_chat"]
    assert (report.counts["rejected"], report.counts["files_rejected"]) == (150, 0)
    with pytest.raises(JaxguardError, match="format: got 'x', expected one of"):
        convert(path, tmp_path / "out", format="x")


def test_mixed_formats_in_one_file(tmp_path):
    path = lines(tmp_path / "x.jsonl", chat("a"), dojo(), chat("b"))
    report = convert(path, tmp_path / "out")
    assert report.files[0].formats == {"openai_chat": 2, "agentdojo": 1}


def test_repeated_ids_are_made_unique(tmp_path):
    names = ["a", "a", "a~2", "a", "b", "a~2"]
    report = convert(lines(tmp_path / "x.jsonl", *map(chat, names)), tmp_path / "out")
    ids = [t.id for t in read_trajectories(tmp_path / "out")]
    assert ids == ["x:a", "x:a~2", "x:a~2~2", "x:a~3", "x:b", "x:a~2~3"]
    assert report.counts["renamed_ids"] == 4


def test_what_is_not_followed_is_listed(tmp_path, monkeypatch):
    data, out = tmp_path / "data", tmp_path / "out"
    lines(data / "a.jsonl", chat("a"))
    lines(data / ".hidden" / "x.jsonl", chat("x"))
    lines(data / "killed" / ".convert-x1" / "trajectories.jsonl.gz", "{")
    lines(tmp_path / "elsewhere" / "b.jsonl", chat("b"))
    convert(data / "a.jsonl", out)
    convert(data / "a.jsonl", data / "earlier")
    (data / "folder").symlink_to(tmp_path / "elsewhere")
    (data / "file.jsonl").symlink_to(tmp_path / "elsewhere" / "b.jsonl")
    (data / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (data / "loop.jsonl").symlink_to(data / "loop.jsonl")
    (data / "own.jsonl.gz").symlink_to(out / "trajectories.jsonl.gz")
    os.mkfifo(data / "pipe.jsonl")
    report = convert(data, out)
    assert [file.file for file in report.files] == ["a.jsonl", "file.jsonl"]
    assert report.skipped_files == [
        ".hidden (a hidden folder)",
        "earlier/manifest.json",
        "earlier/rejects.jsonl",
        "earlier/trajectories.jsonl.gz (made by an earlier conversion)",
        "folder (a link to a folder, not followed)",
        "gone.jsonl (a link that leads nowhere)",
        "killed/.convert-x1 (a hidden folder)",
        "loop.jsonl (a link that leads nowhere)",
        "own.jsonl.gz (a link into the output folder)",
        "pipe.jsonl (no regular file)",
    ]
    assert json.loads((out / "manifest.json").read_text())["skipped_files"] == report.skipped_files


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    lines(tmp_path / "data" / "secret" / "a.jsonl", chat("a"))
    lines(tmp_path / "data" / "b.jsonl", chat("b"))
    listing = Path.iterdir

    def denied(folder):
        if folder.name == "secret":
            raise PermissionError(13, "Permission denied")
        return listing(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(JaxguardError, match=r"data/secret: the folder cannot be read \(Permission denied\)"):
        convert(tmp_path / "data", tmp_path / "out")


def test_the_output_folder_may_hold_the_input(tmp_path):
    lines(tmp_path / "data" / "raw" / "a.jsonl", chat("a"))
    out = tmp_path / "data"
    for _ in range(2):
        assert convert(out / "raw", out).counts["converted"] == 1
        (out / "raw" / "link.jsonl.gz").unlink(missing_ok=True)
        (out / "raw" / "link.jsonl.gz").symlink_to(out / "trajectories.jsonl.gz")
    assert convert(out / "raw", out).skipped_files == ["link.jsonl.gz (a link into the output folder)"]


def test_the_input_is_not_overwritten(tmp_path):
    out = tmp_path / "out"
    convert(lines(tmp_path / "x.jsonl", chat("a")), out)
    before = (out / "trajectories.jsonl.gz").read_bytes()
    with pytest.raises(ConvertError, match=r"trajectories.jsonl.gz: is the output in .*out itself, expected another"):
        convert(out / "trajectories.jsonl.gz", out)
    assert (out / "trajectories.jsonl.gz").read_bytes() == before


@pytest.mark.parametrize("content", ['{"layout": 1}', "{", '{"jaxguard": "0.1"}', "[" * 100_000])
def test_a_manifest_of_something_else_is_not_overwritten(tmp_path, content):
    path, out = lines(tmp_path / "x.jsonl", chat("a")), tmp_path / "store"
    lines(out / "manifest.json", content)
    for write in (lambda: convert(path, out), lambda: write_made([], out)):
        with pytest.raises(
            ConvertError, match=r"store: manifest.json is none that `jaxguard convert` wrote; nothing was"
        ):
            write()
    assert [(file.name, file.read_text()) for file in out.iterdir()] == [("manifest.json", content)]


def test_made_trajectories_replace_a_conversion_with_its_counts(tmp_path):
    convert(lines(tmp_path / "x.jsonl", chat("a"), "bad"), tmp_path / "out")
    assert write_made([Trajectory("t", "do", ())], tmp_path / "out") == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["trajectories.jsonl.gz"]
    assert [t.id for t in read_trajectories(tmp_path / "out")] == ["t"]


def test_what_a_killed_conversion_left_is_removed(tmp_path):
    lines(tmp_path / "out" / ".convert-x1" / "trajectories.jsonl.gz", "{")
    convert(lines(tmp_path / "x.jsonl", chat("a")), tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 3


def test_two_conversions_into_one_folder(tmp_path):
    path = lines(tmp_path / "x.jsonl", chat("a"))
    with locked(tmp_path / "out"), pytest.raises(JaxguardError, match="out: another process is writing there"):
        convert(path, tmp_path / "out")


def test_a_record_that_could_not_be_read_back_is_rejected(tmp_path, monkeypatch):
    """One record per way; none of them may spoil the file for the others."""
    monkeypatch.setattr("jaxguard.traces.jsonl.MAX_RECORD_BYTES", 3000)
    r_judge = {"id": 1, "scenario": "", "profile": "", "goal": "", "risk_description": "", "label": 0}
    nameless = [[{"role": "user", "content": "go"}, {"role": "agent", "action": '{"name": "", "arguments": {}}'}]]
    path = lines(
        tmp_path / "x.jsonl",
        chat("a"),
        r_judge | {"contents": nameless},
        chat("large", answer="y" * 3000),
        '{"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": '
        '[{"id": "a", "function": {"name": "x", "arguments": "{\\"k\\": \\"\\\\ud800\\"}"}}]}]}',
        chat("b"),
    )
    report = convert(path, tmp_path / "out")
    assert [t.id for t in read_trajectories(tmp_path / "out")] == ["x:a", "x:3", "x:b"]
    assert (report.counts["converted"], report.counts["rejected"]) == (3, 2)
    reasons = [r["reason"] for r in rejects(tmp_path / "out")]
    assert reasons[0] == "steps[0].tool: got str '', expected a non-empty string"
    assert reasons[1].startswith("trajectory 'x:large': a line of ")
    check_sums(report.counts)


def test_a_full_disk_ends_the_conversion(tmp_path, monkeypatch):
    """The ids' database meets it first; that is the fault of no record."""

    class Full:
        def execute(self, statement, values=()):
            if statement.startswith("INSERT"):
                raise sqlite3.OperationalError("database or disk is full")

        def close(self):
            pass

    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Full())
    path = lines(tmp_path / "x.jsonl", chat("a"))
    with pytest.raises(ConvertError, match=r"ids.sqlite: database or disk is full, expected room for the ids"):
        convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_manifest_is_read_back(tmp_path):
    report = convert(lines(tmp_path / "x.jsonl", chat("a"), "bad"), tmp_path / "out")
    assert read_manifest(tmp_path / "out" / "manifest.json") == report.to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"records": 5}, "counts.records is 5, expected converted \\+ rejected"),
        ({"unsafe": 1}, "counts.trajectories is 1, expected unsafe \\+ safe \\+ unlabelled"),
        ({"steps": -1}, "counts.steps is -1, expected the manifest"),
        ({"steps": True}, "counts.steps is True"),
        ({"files": "1"}, "counts.files is '1'"),
    ],
)
def test_a_manifest_whose_counts_do_not_fit_is_refused(tmp_path, change, message):
    convert(lines(tmp_path / "x.jsonl", chat("a"), "bad"), tmp_path / "out")
    path = tmp_path / "out" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"counts": manifest["counts"] | change}))
    with pytest.raises(ConvertError, match=f"manifest.json: {message}"):
        read_manifest(path)


def test_equal_input_gives_equal_bytes(tmp_path):
    path = lines(tmp_path / "x.jsonl", chat("a"), chat("a"), "bad", chat())
    convert(path, tmp_path / "one")
    convert(path, tmp_path / "two")
    for name in ("trajectories.jsonl.gz", "rejects.jsonl", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_converting_what_was_converted_changes_nothing(tmp_path):
    convert(lines(tmp_path / "x.jsonl", chat("a"), dojo()), tmp_path / "one")
    report = convert(tmp_path / "one", tmp_path / "two")
    assert report.to_json()["formats"] == {"jaxguard": 2}
    assert report.skipped_files == ["manifest.json", "rejects.jsonl"]
    name = "trajectories.jsonl.gz"
    assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_failed_conversion_leaves_the_earlier_output(tmp_path, monkeypatch):
    path = lines(tmp_path / "x.jsonl", chat("a"))
    convert(path, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}

    def full_disk(*_):
        raise OSError("disk full")

    monkeypatch.setattr(module, "encode_line", full_disk)
    with pytest.raises(OSError, match="disk full"):
        convert(path, tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_a_reader_that_stumbles_rejects_the_record_only(tmp_path, monkeypatch):
    def stumble(text):
        raise KeyError("field")

    path = lines(tmp_path / "x.jsonl", dojo(), chat("a"), dojo(user_task_id="user_task_2"))
    monkeypatch.setattr(openai_chat, "_trajectory_id", lambda *_: stumble("x"))
    report = convert(path, tmp_path / "out")
    assert report.counts["converted"] == 2
    (reject,) = rejects(tmp_path / "out")
    assert reject["reason"] == "not of the shape of openai_chat: KeyError: 'field'"


def test_surrogates_in_a_second_layer_of_json(tmp_path):
    arguments = r'{"a": "\ud800", "b": 1e999}'
    report = convert(lines(tmp_path / "x.jsonl", chat("a", arguments)), tmp_path / "out")
    (made,) = read_trajectories(tmp_path / "out")
    assert made.steps[0].arguments == {"a": "\ufffd", "b": "Infinity"}
    assert (report.counts["surrogates_replaced"], report.counts["nonfinite_replaced"]) == (1, 1)


def test_what_is_nested_deeply_survives_the_round_trip_or_is_rejected(tmp_path):
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    path = tmp_path / "x.jsonl"
    lines(path, chat("a", f'{{"a": {nested(90)}}}'), chat("b", f'{{"a": {nested(900)}}}'), chat("c"))
    convert(path, tmp_path / "out")
    made = {t.id: t.steps[0] for t in read_trajectories(tmp_path / "out")}
    assert json.dumps(made["x:a"].arguments) == f'{{"a": {nested(90)}}}'
    assert made["x:b"].raw_arguments == f'{{"a": {nested(900)}}}'

    deep = {"a": json.loads(nested(199))}
    own = '{"jaxguard": 1, "id": "%s", "instruction": "", "steps": [], "metadata": %s}'
    lines(path, *[own % (name, json.dumps(value)) for name, value in (("x", deep), ("y", {}))])
    report = convert(path, tmp_path / "out")
    assert [t.id for t in read_trajectories(tmp_path / "out")] == ["y"]
    check_sums(report.counts)


@pytest.mark.slow
def test_a_50_megabyte_tool_output(tmp_path):
    size = 50_000_000
    path = lines(tmp_path / "x.jsonl", chat("small"), chat("big", answer="y" * size))
    convert(path, tmp_path / "out")
    assert [len(t.final_observation) for t in read_trajectories(tmp_path / "out")] == [2, size]


def test_memory_does_not_grow_with_the_archive(tmp_path, monkeypatch):
    # Small buffers are full in both runs, so that only growth with the archive can tell them apart.
    monkeypatch.setattr(files, "_BUFFER", 1 << 15)
    monkeypatch.setattr(files, "_CHUNK", 1 << 14)

    def peak(count: int) -> int:
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as out:
            for index in range(count):
                out.write(json.dumps(chat(index % (count // 2), answer=f"{index} " * 1000)) + "\n")
        tracemalloc.start()
        convert(path, tmp_path / "out")
        assert sum(1 for _ in read_trajectories(tmp_path / "out")) == count
        result = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return result

    convert(lines(tmp_path / "warm.jsonl", chat("a")), tmp_path / "out")  # imports are not to be measured
    small, large = peak(150), peak(1_500)
    assert large < 1.1 * small + 2**16


def test_trajectories_made_by_hand_convert(tmp_path):
    made = [Trajectory("t", "do", (Step("a", {"x": 1}, "c"),), unsafe=True, first_hazard=0, timing=True)]
    write_trajectories(made, tmp_path / "mine.jsonl")
    convert(tmp_path / "mine.jsonl", tmp_path / "out")
    assert list(read_trajectories(tmp_path / "out")) == made
