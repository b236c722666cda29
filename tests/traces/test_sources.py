"""What an archive's files are: folders, globs, zip files and addresses."""

from __future__ import annotations

import errno
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.files import read_records
from jaxguard.traces.reading import ArchiveReader
from jaxguard.traces.sources import Source, SourceError, content_key, find_sources

NATIVE = json.dumps({"jaxguard": 1, "id": "a", "instruction": "do", "steps": [{"tool": "look"}]})


RESULTS = '{"jaxguard_scores": 1}'


def native(name: str) -> str:
    return NATIVE.replace('"a"', json.dumps(name))


def write(path: Path, content: str | bytes = NATIVE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def zipped(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def ids(sources: list[Source]) -> list[str]:
    reader = ArchiveReader()
    return [t.id for source in sources for outcome in reader.read(source) for t in outcome.trajectories]


def test_a_folder_and_a_glob(tmp_path: Path) -> None:
    for name in ("a.jsonl", "deep/b.jsonl", "deep/notes.txt"):
        write(tmp_path / name, native(name))
    sources, skipped = find_sources(tmp_path)
    assert ([s.name for s in sources], skipped) == (["a.jsonl", "deep/b.jsonl"], ["deep/notes.txt"])
    sources, _ = find_sources(f"{tmp_path}/**/*.jsonl")
    assert [s.name for s in sources] == ["a.jsonl", "deep/b.jsonl"]
    sources, _ = find_sources(f"{tmp_path}/d*")
    assert [(s.name, s.size) for s in sources] == [("deep/b.jsonl", len(native("deep/b.jsonl")))]
    with pytest.raises(SourceError, match=r"\*\.nothing: no file or folder matches"):
        find_sources(f"{tmp_path}/*.nothing")


def test_a_name_with_glob_characters_is_a_name_first(tmp_path: Path) -> None:
    write(tmp_path / "a[1].jsonl")
    assert [s.name for s in find_sources(tmp_path / "a[1].jsonl")[0]] == ["a[1].jsonl"]


def test_a_zip_file_is_looked_into(tmp_path: Path) -> None:
    write(tmp_path / "x" / "c.jsonl", native("c"))
    zipped(tmp_path / "x" / "z.zip", {"b/a.jsonl": native("in zip"), "b/readme.md": "x", "more.zip": "", "d/": ""})
    sources, skipped = find_sources(tmp_path / "x")
    assert [s.name for s in sources] == ["c.jsonl", "z.zip!b/a.jsonl"]
    assert skipped == ["z.zip!b/readme.md", "z.zip!more.zip (a zip archive inside of another)"]
    assert ids(sources) == ["c", "in zip"]


def test_a_broken_zip_file_is_one_reject(tmp_path: Path) -> None:
    write(tmp_path / "x" / "c.jsonl", native("c"))
    write(tmp_path / "x" / "z.zip", b"PK\x03\x04 broken")
    report = convert(tmp_path / "x", tmp_path / "out")
    assert [file.error for file in report.files] == [None, "the zip archive cannot be read (File is not a zip file)"]
    assert report.counts["files_rejected"] == 1


def test_a_file_that_fails_midway_is_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "x" / "a.jsonl", f"{native('a')}\n{native('b')}")
    write(tmp_path / "x" / "c.jsonl", native("c"))

    def failing(file: Path, *more: Any) -> Iterator[Any]:
        yield next(iter(read_records(file, *more)))
        if file.name == "a.jsonl":
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("jaxguard.traces.reading.read_records", failing)
    report = convert(tmp_path / "x", tmp_path / "out")
    assert [(file.file, file.unread, file.converted) for file in report.files] == [
        ("a.jsonl", True, 1),
        ("c.jsonl", False, 1),
    ]


def test_a_broken_member_does_not_lose_the_others(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z.zip", {"a.jsonl": native("first"), "b.jsonl": native("second")})
    content = bytearray(path.read_bytes())
    at = content.index(b"first")
    content[at : at + 5] = b"worst"
    path.write_bytes(content)
    report = convert(path, tmp_path / "out")
    assert [(file.file, file.error) for file in report.files] == [
        ("z.zip!a.jsonl", "the file cannot be fetched (Bad CRC-32 for file 'a.jsonl')"),
        ("z.zip!b.jsonl", None),
    ]


@pytest.mark.parametrize("name", ["./a.jsonl", "x//b.jsonl", "/c.jsonl"])
def test_odd_names_of_members(tmp_path: Path, name: str) -> None:
    (source,), _ = find_sources(zipped(tmp_path / "z.zip", {name: native("odd")}))
    assert ids([source]) == ["odd"]


def test_a_member_whose_compression_is_broken(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        with zipfile.ZipFile(tmp_path / "z.zip", "w", method) as file:
            file.writestr("a.jsonl", native("x" * 1000))
        content = bytearray((tmp_path / "z.zip").read_bytes())
        content[44:60] = b"\xff" * 16
        (tmp_path / "z.zip").write_bytes(content)
        (source,), _ = find_sources(tmp_path / "z.zip")
        (outcome,) = ArchiveReader().read(source)
        assert outcome.position is None
        assert "the file cannot be fetched" in outcome.reason


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_stands_twice(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as file:
        for name in ("first", "second"):
            file.writestr("a.jsonl", native(name))
    sources, skipped = find_sources(tmp_path / "z.zip")
    assert len(ids(sources)) == len(skipped) == 1
    assert skipped == ["z.zip!a.jsonl (another member of the same name is read)"]


def test_a_member_and_a_file_of_the_same_name(tmp_path: Path) -> None:
    zipped(tmp_path / "x.zip", {"a.jsonl": native("in zip")})
    write(tmp_path / "x.zip!a.jsonl")
    with pytest.raises(SourceError, match=r"x\.zip!a\.jsonl is the name of two files, .*rename one"):
        find_sources(tmp_path)
    assert ids(find_sources(tmp_path / "x.zip")[0]) == ["in zip"]


def test_a_link_that_leads_nowhere_in_a_glob(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "none")
    sources, skipped = find_sources(f"{tmp_path}/*.jsonl")
    assert ([s.name for s in sources], skipped) == (["a.jsonl"], ["b.jsonl (a link that leads nowhere)"])


def test_side_files_come_along(tmp_path: Path) -> None:
    labels = {"trajectory_id": "t", "type": "rogue", "category": "SEC", "severity": "L1", "rogue_step": 1}
    run = {
        "trajectory_id": "t",
        "task": {"description": "do", "success_criteria": []},
        "steps": [{"step": 1, "thought": "", "action": "a", "arguments": {}, "observation": ""}],
    }
    members = {"s/test.jsonl": json.dumps(run), "s/test_labels.jsonl": json.dumps(labels | {"total_steps": 1})}
    plain = tmp_path / "plain"
    for name, content in members.items():
        write(plain / name, content)
    zipped(tmp_path / "z.zip", members)
    for archive in (plain, tmp_path / "z.zip", plain / "s" / "test.jsonl"):
        sources, _ = find_sources(archive)
        assert [source.beside for source in sources] == [("test_labels.jsonl",)]
        (outcome,) = ArchiveReader().read(sources[0])
        assert outcome.reason == ""
        assert outcome.trajectories[0].unsafe is True


def test_an_address(memory: Any, tmp_path: Path) -> None:
    for name in ("/box/a.jsonl", "/box/deep/b.jsonl", "/box/deep/x.txt"):
        memory.pipe(name, native(name).encode())
    memory.pipe("/box/z.zip", zipped(tmp_path / "z.zip", {"c.jsonl": native("c")}).read_bytes())
    sources, skipped = find_sources("memory://box")
    assert [s.name for s in sources] == ["a.jsonl", "deep/b.jsonl", "z.zip!c.jsonl"]
    assert skipped == ["deep/x.txt"]
    assert ids(sources) == ["/box/a.jsonl", "/box/deep/b.jsonl", "c"]
    assert ids(find_sources("memory://box/a.jsonl")[0]) == ["/box/a.jsonl"]
    assert ids(find_sources("memory://box/*/*.jsonl")[0]) == ["/box/deep/b.jsonl"]
    for address, message in (
        ("memory://none", "there is no such file or folder"),
        ("memory://box/*.none", "no file or folder matches"),
        ("nothing://x", "nothing"),
    ):
        with pytest.raises(SourceError, match=message):
            find_sources(address)


@pytest.mark.parametrize("cache", ["simplecache", "filecache", "blockcache"])
def test_an_address_behind_a_cache(memory: Any, tmp_path: Path, cache: str) -> None:
    memory.pipe("/box/deep/b.jsonl", native("b").encode())
    memory.pipe("/box/z.zip", zipped(tmp_path / "z.zip", {"c.jsonl": native("c")}).read_bytes())
    for address, expected in (
        ("memory://box", ["deep/b.jsonl", "z.zip!c.jsonl"]),
        ("memory://box/deep/*.jsonl", ["b.jsonl"]),
        ("memory://box/deep/b.jsonl", ["b.jsonl"]),
    ):
        sources, _ = find_sources(f"{cache}::{address}")
        assert [s.name for s in sources] == expected
        assert ids(sources) == [name[-7:-6] for name in expected]


@pytest.mark.parametrize(
    "address",
    ["zip://deep::{}", "zip::{}", "simplecache::zip://*.jsonl::{}", "tar://x::{}", "simplecache::filecache::{}"],
)
def test_an_address_within_another_is_refused(tmp_path: Path, address: str) -> None:
    path = zipped(tmp_path / "z.zip", {"deep/a.jsonl": NATIVE})
    with pytest.raises(SourceError, match=r"is an address within another, .*\(a zip file is looked into\)"):
        find_sources(address.format(f"file://{path}"))
    assert len(find_sources(f"file://{path}")[0]) == 1


def test_results_and_hidden_folders_are_not_read_anywhere(memory: Any, tmp_path: Path) -> None:
    names = ["a.jsonl", "out/job.json", "out/top/x.jsonl", "out/steps/y.parquet", ".hidden/b.jsonl"]
    for name in names:
        memory.pipe(f"/box/{name}", NATIVE.encode())
        write(tmp_path / "box" / name, RESULTS if name.endswith("job.json") else NATIVE)
    zipped(tmp_path / "z.zip", dict.fromkeys(names, NATIVE))
    for archive in ("memory://box", str(tmp_path / "box"), str(tmp_path / "z.zip")):
        sources, skipped = find_sources(archive)
        assert [s.name.removeprefix("z.zip!") for s in sources] == ["a.jsonl"]
        assert any("results of an earlier scoring" in line for line in skipped)
        assert any("hidden folder" in line for line in skipped)


def test_a_file_that_vanished_is_a_reject(memory: Any) -> None:
    memory.pipe("/box/a.jsonl", NATIVE.encode())
    sources, _ = find_sources("memory://box")
    memory.rm("/box/a.jsonl")
    (outcome,) = ArchiveReader().read(sources[0])
    assert outcome.position is None
    assert "the file cannot be fetched" in outcome.reason


def test_results_of_scoring_are_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "scores" / "job.json", RESULTS)
    write(tmp_path / "jobs" / "job.json", '{"id": 1}')
    write(tmp_path / "jobs" / "b.jsonl")
    write(tmp_path / "scores" / "top" / "x.jsonl")
    sources, skipped = find_sources(tmp_path)
    assert [s.name for s in sources] == ["a.jsonl", "jobs/b.jsonl", "jobs/job.json"]
    assert skipped == ["scores (results of an earlier scoring)"]
    sources, _ = find_sources(f"{tmp_path}/**", tmp_path / "out")
    assert [s.name for s in sources] == ["a.jsonl", "jobs/b.jsonl", "jobs/job.json"]
    write(tmp_path / "out" / "top" / "x.jsonl")
    assert len(find_sources(f"{tmp_path}/**", tmp_path / "out")[0]) == 3


def test_a_key_is_of_content_and_side_files(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one.jsonl"), write(tmp_path / "x" / "other.jsonl")
    side = write(tmp_path / "labels.json", "1")
    assert content_key(one) == content_key(other)
    assert len(content_key(one)) == 32
    write(tmp_path / "y" / "labels.json", "2")
    write(tmp_path / "y" / "one.jsonl")
    keys = {
        content_key(one),
        content_key(one, [side.name]),
        content_key(tmp_path / "y" / "one.jsonl", ["labels.json"]),
        content_key(write(tmp_path / "one.json")),
        content_key(write(tmp_path / "z.jsonl", NATIVE + "\n")),
    }
    assert len(keys) == 5


@pytest.mark.parametrize("name", ["run.1.jsonl", "2026-01-02.log.jsonl", "x.JSONL"])
def test_only_what_tells_how_to_read_a_name_is_part_of_the_key(tmp_path: Path, name: str) -> None:
    assert content_key(write(tmp_path / name)) == content_key(write(tmp_path / "run.jsonl"))
    assert content_key(write(tmp_path / f"{name}.gz")) != content_key(write(tmp_path / "run.jsonl"))


def test_local_names_that_look_like_addresses(tmp_path: Path) -> None:
    path = write(tmp_path / "test_a.py::test_b.jsonl")
    for archive in (tmp_path, path):
        sources, _ = find_sources(archive)
        assert ids(sources) == ["a"]


def test_what_is_no_file_at_an_address_is_not_waited_for(tmp_path: Path) -> None:
    write(tmp_path / "box" / "a.jsonl")
    os.mkfifo(tmp_path / "box" / "pipe.jsonl")
    sources, skipped = find_sources(f"file://{tmp_path}/box")
    assert ([s.name for s in sources], skipped) == (["a.jsonl"], ["pipe.jsonl (no regular file)"])


def test_errors_of_a_file_system_are_one_line(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentials(Exception):
        pass

    def refuse(*_: object, **__: object) -> None:
        raise NoCredentials("unable to locate credentials")

    monkeypatch.setattr(type(memory), "find", refuse)
    with pytest.raises(SourceError, match=r"memory://box: cannot be listed \(unable to locate credentials\)"):
        find_sources("memory://box")


def test_an_encrypted_member_is_a_reject(tmp_path: Path) -> None:
    path = zipped(tmp_path / "z.zip", {"a.jsonl": NATIVE})
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the flags of both headers
        content[content.index(mark) + offset] |= 1
    path.write_bytes(content)
    (source,), _ = find_sources(path)
    (outcome,) = ArchiveReader().read(source)
    assert (outcome.position, outcome.reason) == (None, "it is encrypted")


def test_an_unreadable_local_file_is_a_reject(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    (source,), _ = find_sources(tmp_path)
    os.remove(tmp_path / "a.jsonl")
    (outcome,) = ArchiveReader().read(source)
    assert "the file cannot be read: No such file" in outcome.reason
