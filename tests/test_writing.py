"""Files are replaced together or stay as they were, and what cannot be written is named."""

from __future__ import annotations

import errno
import gzip
from pathlib import Path

import pytest
from small_run import no_file_beyond

from jaxguard.writing import WritingError, replacing, write_whole


def test_files_take_their_places_together(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with replacing(one, two) as (first, second):
        first.write_text("1")
        second.write_text("2")
        assert not one.exists()
    assert (one.read_text(), two.read_text()) == ("1", "2")
    assert {p.name for p in tmp_path.iterdir()} == {"one", "two"}


def test_a_failure_leaves_all_as_they_were(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for file in (one, two):
        file.write_text("old")

    def fail() -> None:
        with replacing(one, two) as (first, _):
            first.write_text("new")
            raise KeyError("of the block's own")

    with pytest.raises(KeyError):
        fail()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"one": "old", "two": "old"}


def test_a_full_disk_is_named_and_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    write_whole(file, "old")
    with (
        no_file_beyond(10),
        pytest.raises(WritingError, match=rf"{tmp_path}: report.html cannot be written \(File too"),
    ):
        write_whole(file, "x" * 100_000)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"report.html": "old"}


def test_what_the_block_fails_to_read_is_no_fault_of_writing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "a") as (place,):
        place.write_text((tmp_path / "absent").read_text())
    assert caught.value.errno == errno.ENOENT


def test_a_damaged_input_is_no_fault_of_writing(tmp_path: Path) -> None:
    (tmp_path / "in.gz").write_bytes(b"no gzip")
    with pytest.raises(gzip.BadGzipFile), replacing(tmp_path / "a") as (place,):
        place.write_bytes(gzip.decompress((tmp_path / "in.gz").read_bytes()))


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()

    def write() -> None:
        with replacing(tmp_path / "a", tmp_path / "b") as places:
            for place in places:
                place.write_text("new")

    with pytest.raises(WritingError, match="a, b cannot be written"):
        write()
    assert (tmp_path / "a").read_text() == "old"
