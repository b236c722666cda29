"""Traces of any known format to jaxguard's own: a folder of trajectories, rejects and a manifest.

Nothing is dropped in silence: every record of a file that is read becomes trajectories or a line of the
rejects, and a file that cannot be read at all is one line there. Memory does not grow with the input: records
stream, and the ids already given out live in a temporary database on disk.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from gzip import GzipFile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from jaxguard.traces.files import load_json
from jaxguard.traces.jsonl import (
    MANIFEST_FILE,
    OUTPUT_FILES,
    REJECTS_FILE,
    SCHEMA_VERSION,
    TRAJECTORIES_FILE,
    encode_line,
    is_conversion,
    is_converted,
    open_output,
    write_trajectories,
)
from jaxguard.traces.lock import locked
from jaxguard.traces.reading import TALLIED, ArchiveReader, tally
from jaxguard.traces.registry import reader_named
from jaxguard.traces.sources import Source, find_sources
from jaxguard.types import JaxguardError, Trajectory

_SCRATCH = ".convert-"


class ConvertError(JaxguardError):
    """The conversion as a whole cannot be done."""


class _ScratchError(ConvertError):
    """No fault of the record at hand: it must end the conversion."""


@dataclass
class FileReport:
    """One input file: ``formats`` counts the recognised records by format, ``error`` says why none was read, ``unread``
    whether it could not be read, or not to its end."""

    file: str
    formats: dict[str, int] = field(default_factory=dict)
    records: int = 0
    converted: int = 0
    rejected: int = 0
    trajectories: int = 0
    error: str | None = None
    unread: bool = False


@dataclass
class ConvertReport:
    """What a conversion did; ``records == converted + rejected`` over all files that were read.

    Attributes:
        files: One entry per input file, in order.
        skipped_files: What a folder holds and was not looked into: side files and files of other types by name, and
            hidden folders, earlier output, links that are not followed, pipes and the like with the reason. The
            output folder itself is not listed.
        counts: Totals over all files: ``files``, ``files_rejected``, ``records``, ``converted``, ``rejected``,
            ``trajectories``, ``steps``, ``without_steps``, ``unsafe``, ``safe``, ``unlabelled``, ``timing``,
            ``first_hazards``, ``parallel_calls``, ``unobserved_calls``, ``unparsable_arguments``,
            ``renamed_ids``, ``surrogates_replaced``, ``nonfinite_replaced``.
    """

    files: list[FileReport] = field(default_factory=list)
    skipped_files: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The content of the manifest."""
        formats: Counter[str] = Counter()
        for file in self.files:
            formats.update(file.formats)
        return {
            "jaxguard": SCHEMA_VERSION,
            "counts": self.counts,
            "formats": dict(sorted(formats.items())),
            "files": [dataclasses.asdict(file) for file in self.files],
            "skipped_files": self.skipped_files,
        }


_COUNTS = (
    *("files", "files_rejected", "records", "converted", "rejected"),
    *TALLIED,
    *("renamed_ids", "surrogates_replaced", "nonfinite_replaced"),
)


def convert(path: str | os.PathLike[str], out_dir: Path, *, format: str | None = None) -> ConvertReport:
    """Convert a file, or all trace files of an archive, into ``out_dir``.

    Writes ``trajectories.jsonl.gz`` (equal input gives equal bytes), ``rejects.jsonl`` (file, position, reason)
    and ``manifest.json`` (the report), each whole or not at all, the manifest last. Trajectory ids that occur
    again get ``~2``, ``~3``, ... in reading order and are counted.

    Args:
        path: A file, a folder, a glob or an address, see :func:`jaxguard.traces.sources.find_sources`. What is not
            read is listed in the report.
        out_dir: Made if absent; an earlier conversion in it is replaced.
        format: Name of the format; detected record by record where it is ``None``.

    Raises:
        ConvertError: ``path`` does not exist, cannot be walked or holds no file to read; everything was rejected;
            ``out_dir`` holds something else than a conversion, or the input itself; the disk is full.
        JaxguardError: ``format`` is unknown, a side file (labels, ...) is broken, or another process writes to
            ``out_dir``.
        OSError: A file cannot be read or written.
    """
    out_dir = Path(out_dir)
    forced = reader_named(format) if format is not None else None
    sources, skipped = find_sources(path, out_dir)
    for source in sources:
        if Path(source.address).resolve() in {out_dir.resolve() / name for name in OUTPUT_FILES}:
            raise ConvertError(f"{path}: is the output in {out_dir} itself, expected another output folder")
    report = ConvertReport(skipped_files=skipped, counts=dict.fromkeys(_COUNTS, 0))
    with _output_folder(out_dir), TemporaryDirectory(dir=out_dir, prefix=_SCRATCH) as scratch:
        # Inside out_dir, so that the final renames stay on one file system.
        partial = Path(scratch)
        with (
            (partial / TRAJECTORIES_FILE).open("wb") as raw,
            open_output(raw) as trajectories,
            (partial / REJECTS_FILE).open("w", encoding="utf-8") as rejects,
            _Ids(partial / "ids.sqlite") as ids,
        ):
            writer = _Writer(trajectories, rejects, ids, report)
            reader = ArchiveReader(forced)
            for source in sources:
                _convert_file(source, reader, writer)
        _refuse_nothing(path, report, writer.first_reject)
        manifest = json.dumps(report.to_json(), indent=1) + "\n"
        (partial / MANIFEST_FILE).write_text(manifest, encoding="utf-8")
        for name in OUTPUT_FILES:
            (partial / name).replace(out_dir / name)
    return report


def write_made(trajectories: Iterable[Trajectory], out_dir: Path) -> int:
    """Write trajectories that no file was converted to; an earlier conversion in ``out_dir`` is replaced.

    Returns:
        Their number.

    Raises:
        JaxguardError: ``out_dir`` holds something else than trajectories, or another process writes to it.
    """
    with _output_folder(out_dir):
        count = write_trajectories(trajectories, out_dir / TRAJECTORIES_FILE)
        # Counts and rejects of what was replaced are wrong beside the new trajectories.
        for name in (MANIFEST_FILE, REJECTS_FILE):
            (out_dir / name).unlink(missing_ok=True)
        return count


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a conversion, with counts that add up.

    Raises:
        ConvertError: It is none.
    """
    expected = "expected the manifest that `jaxguard convert` wrote"
    try:
        manifest = load_json(path)
    except ValueError as error:
        raise ConvertError(f"{path}: {error}, {expected}") from error
    counts = manifest.get("counts") if is_conversion(manifest) else None
    if not isinstance(counts, dict) or not isinstance(manifest.get("skipped_files"), list):
        raise ConvertError(f"{path}: has no jaxguard, counts and skipped_files, {expected}")
    for name in _COUNTS:
        if type(counts.get(name)) is not int or counts[name] < 0:
            raise ConvertError(f"{path}: counts.{name} is {counts.get(name)!r:.40}, {expected}")
    for total, parts in (("records", ("converted", "rejected")), ("trajectories", ("unsafe", "safe", "unlabelled"))):
        if counts[total] != sum(counts[part] for part in parts):
            raise ConvertError(f"{path}: counts.{total} is {counts[total]}, expected {' + '.join(parts)}")
    return manifest


@contextmanager
def _output_folder(folder: Path) -> Iterator[None]:
    """The folder for this process alone, free of what a killed one left, and with nothing that is not ours."""
    with locked(folder):
        if (folder / MANIFEST_FILE).exists() and not is_converted(folder):
            raise ConvertError(
                f"{folder}: {MANIFEST_FILE} is none that `jaxguard convert` wrote; nothing was overwritten, name "
                "another folder"
            )
        for scratch in folder.glob(f"{_SCRATCH}*"):
            shutil.rmtree(scratch)
        yield


def _refuse_nothing(path: str | os.PathLike[str], report: ConvertReport, first_reject: str) -> None:
    counts = report.counts
    if len(report.files) == 1 and Path(path).is_file() and report.files[0].error is not None:
        raise ConvertError(f"{path}: {report.files[0].error}")
    if first_reject and not counts["trajectories"]:
        raise ConvertError(
            f"{path}: nothing could be converted: {counts['rejected']} records and {counts['files_rejected']} files "
            f"were rejected; the first: {first_reject}"
        )


class _Ids:
    """Gives every trajectory an id of its own; on disk, because the set of ids grows with the input."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors():
            self._database = sqlite3.connect(path, isolation_level=None)

    def __enter__(self) -> _Ids:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE"):
            self._run(f"PRAGMA {pragma}")
        self._run("CREATE TABLE ids (id TEXT PRIMARY KEY, uses INTEGER) WITHOUT ROWID")
        self._run("BEGIN")
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def claim(self, name: str) -> str:
        """``name``, or ``name~n`` with the smallest n from 2 on that is free."""
        # A file name that is no UTF-8 brings surrogates into an id.
        name = name.encode("utf-8", "replace").decode()
        if self._take(name):
            return name
        ((uses,),) = self._run("SELECT uses FROM ids WHERE id = ?", name)
        while True:
            uses += 1
            if self._take(f"{name}~{uses}"):
                self._run("UPDATE ids SET uses = ? WHERE id = ?", uses, name)
                return f"{name}~{uses}"

    def _take(self, name: str) -> bool:
        return self._run("INSERT OR IGNORE INTO ids VALUES (?, 1)", name).rowcount == 1

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        with self._errors():
            return self._database.execute(statement, values)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _ScratchError(f"{self._path}: {error}, expected room for the ids on this disk") from error


@dataclass
class _Writer:
    trajectories: GzipFile
    rejects: IO[str]
    ids: _Ids
    report: ConvertReport
    first_reject: str = ""

    def count(self, name: str, by: int = 1) -> None:
        self.report.counts[name] += by

    def reject(self, file: str, position: int | None, reason: str) -> None:
        place = file if position is None else f"{file}, record {position}"
        self.first_reject = self.first_reject or f"{place}: {reason}"
        line = {"file": file, "position": position, "reason": reason}
        self.rejects.write(json.dumps(line) + "\n")

    def write(self, made: Sequence[Trajectory]) -> None:
        """All trajectories of a record, or, by an exception before the first byte is written, none."""
        lines = []
        replaced: Counter[str] = Counter()
        for trajectory in made:
            own_id = self.ids.claim(trajectory.id)
            if own_id != trajectory.id:
                trajectory = dataclasses.replace(trajectory, id=own_id)
                replaced["renamed_ids"] += 1
            line, surrogates, nonfinite = encode_line(trajectory)
            replaced["surrogates_replaced"] += surrogates
            replaced["nonfinite_replaced"] += nonfinite
            lines.append(line)
        for name, by in replaced.items():
            self.count(name, by)
        for trajectory, line in zip(made, lines, strict=True):
            self.trajectories.write(line)
            for name, by in tally(trajectory).items():
                self.count(name, by)


def _convert_file(source: Source, reader: ArchiveReader, writer: _Writer) -> None:
    entry = FileReport(file=source.name)
    writer.report.files.append(entry)
    writer.count("files")
    for outcome in reader.read(source):
        reason = outcome.reason
        entry.unread = outcome.unread
        if outcome.position is None:
            entry.error = reason
            writer.reject(source.name, None, reason)
            writer.count("files_rejected")
            break
        entry.records += 1
        writer.count("surrogates_replaced", outcome.surrogates)
        writer.count("nonfinite_replaced", outcome.nonfinite)
        if outcome.format:
            entry.formats[outcome.format] = entry.formats.get(outcome.format, 0) + 1
        if not reason:
            try:
                writer.write(outcome.trajectories)
                entry.trajectories += len(outcome.trajectories)
            except _ScratchError:
                raise
            except JaxguardError as error:
                reason = str(error)
        if reason:
            entry.rejected += 1
            writer.reject(source.name, outcome.position, reason)
    entry.converted = entry.records - entry.rejected
    for name in ("records", "converted", "rejected"):
        writer.count(name, getattr(entry, name))
