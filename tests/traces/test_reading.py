"""Files whose records are trajectories only together (readers with ``split``)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from jaxguard.traces import reading, registry
from jaxguard.traces.files import Parsed
from jaxguard.traces.reading import ArchiveReader, Companions, Outcome, read_file
from jaxguard.traces.registry import CannotRead, Context, Reader, Record, RecordError
from jaxguard.traces.sources import Source
from jaxguard.types import Step, Trajectory

NATIVE = {"jaxguard": 1, "id": "own", "instruction": "do it", "steps": []}


def _split(records: Sequence[Record]) -> Iterable[Record]:
    sessions = {record["session"] for record in records if "session" in record}
    if "lost" in sessions:
        raise RecordError("a session is lost")
    for name in sorted(sessions):
        yield {"session": name, "tools": [r["tool"] for r in records if r.get("session") == name and "tool" in r]}


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    if not record["tools"]:
        raise RecordError("no calls")
    steps = tuple(Step(tool, {}, f"c{i}") for i, tool in enumerate(record["tools"]))
    yield Trajectory(id=f"{record['session']}@{context.position}", instruction="do", steps=steps)


EVENTS = Reader("events", "one event a line", lambda record: "session" in record, _read, split=_split)


@pytest.fixture(autouse=True)
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    known = (*registry.all_readers(), EVENTS)
    monkeypatch.setattr(registry, "all_readers", lambda: known)


def outcomes(path: Path, lines: Sequence[object], forced: Reader | None = None) -> list[Outcome]:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (path / "log.jsonl").write_text(text)
    return list(read_file(path / "log.jsonl", Companions(path), forced))


def test_a_session_is_read_from_all_its_lines(tmp_path: Path) -> None:
    lines = [{"meta": 1}, {"session": "b", "tool": "x"}, {"session": "a", "tool": "y"}, {"session": "b", "tool": "z"}]
    made = outcomes(tmp_path, lines)
    assert [(o.position, o.trajectories[0].id, len(o.trajectories[0])) for o in made] == [(0, "a@0", 1), (1, "b@1", 2)]
    assert {o.format for o in made} == {"events"}


def test_a_broken_line_and_a_record_of_another_format_stand_apart(tmp_path: Path) -> None:
    made = outcomes(tmp_path, ["{]", {"session": "a", "tool": "y"}, "}", NATIVE, {"session": "c"}])
    assert [o.position for o in made if "line" in o.reason] == [0, 2]
    assert [o.trajectories[0].id for o in made if o.trajectories] == ["own", "a@4"]
    assert [(o.position, o.reason) for o in made if "line" not in o.reason] == [(3, ""), (4, ""), (5, "no calls")]
    assert len({o.position for o in made}) == len(made) == 5


def test_what_stands_beside_a_session_that_cannot_be_split_is_read(tmp_path: Path) -> None:
    made = outcomes(tmp_path, [{"session": "lost"}, NATIVE])
    assert [(o.position, o.reason) for o in made] == [(1, ""), (2, "events: a session is lost")]


def test_a_file_that_cannot_be_split_is_one_reject(tmp_path: Path) -> None:
    made = outcomes(tmp_path, [{"session": "lost"}])
    assert [(o.position, o.reason) for o in made] == [(None, "events: a session is lost")]


def test_a_file_that_cannot_be_read_on_ends_with_a_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(file: Path, at: object) -> Iterable[Parsed]:
        yield Parsed(0, NATIVE)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reading, "read_records", failing)
    path = tmp_path / "a.jsonl"
    path.touch()
    with pytest.raises(CannotRead, match="the file cannot be read: Input/output error"):
        list(read_file(path, Companions(tmp_path)))
    made = list(ArchiveReader().read(Source("a", str(path))))
    assert [(o.position, o.reason) for o in made] == [(0, ""), (1, "the file cannot be read: Input/output error")]


def test_a_named_format_splits_what_it_would_not_have_recognised(tmp_path: Path) -> None:
    made = outcomes(tmp_path, [{"meta": 1}], forced=EVENTS)
    assert [(o.position, o.reason) for o in made] == [(None, "events: it holds no trajectory")]


def test_records_that_belong_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_RECORD_BYTES", 60)
    made = outcomes(tmp_path, [{"session": "a", "tool": "y" * 20}] * 3)
    assert [o.position for o in made] == [None]
    assert "events: more than 60 characters of records" in made[0].reason
