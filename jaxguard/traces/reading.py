"""A file of any known format to its trajectories and rejects, record by record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.traces.files import MAX_RECORD_BYTES, Broken, Parsed, read_records
from jaxguard.traces.registry import CannotRead, Context, Reader, Record, RecordError, detect, format_names
from jaxguard.traces.sources import Source
from jaxguard.types import JaxguardError, Trajectory

TALLIED = (
    *("trajectories", "steps", "without_steps", "unsafe", "safe", "unlabelled", "timing", "first_hazards"),
    *("parallel_calls", "unobserved_calls", "unparsable_arguments"),
)
"""What :func:`tally` counts."""

DETECTION_WINDOW = 100
"""A file is given up as of no known format when none of its first so many records is recognised."""

# What a reader may raise over a record that has its format's fields, but not their shape.
_SHAPE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one record: its trajectories, or the reason why there are none.

    Attributes:
        position: Of the record in its file; ``None`` where the file as a whole is rejected (then it is the only one).
            For what ``Reader.split`` made of a file, its place in that, after the lines that stand for themselves.
        trajectories: At least one, unless there is a reason.
        reason: Why the record is rejected, else ``""``.
        format: Name of the format it was recognised as, ``""`` where it was not.
        surrogates: Lone surrogates that were replaced in it.
        nonfinite: Numbers that are not finite and were replaced in it.
        unread: Could the file not be read, or not from here on? It may be another time.
    """

    position: int | None
    trajectories: tuple[Trajectory, ...] = ()
    reason: str = ""
    format: str = ""
    surrogates: int = 0
    nonfinite: int = 0
    unread: bool = False


def tally(trajectory: Trajectory) -> dict[str, int]:
    """What a trajectory adds to the counts of a conversion or a scoring."""
    steps = trajectory.steps
    return {
        "trajectories": 1,
        {True: "unsafe", False: "safe", None: "unlabelled"}[trajectory.unsafe]: 1,
        "steps": len(steps),
        "without_steps": int(not steps),
        "timing": int(trajectory.timing),
        "first_hazards": int(trajectory.first_hazard is not None),
        "parallel_calls": sum(step.parallel for step in steps),
        "unobserved_calls": sum(step.unobserved for step in steps),
        "unparsable_arguments": sum(step.raw_arguments is not None for step in steps),
    }


class Companions:
    """Side files of a folder, loaded once per reader whose records are met in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[str, Any] = {}

    def of(self, reader: Reader) -> Any:
        """What ``reader`` wants of them.

        Raises:
            JaxguardError: A side file is broken.
        """
        if reader.name not in self._loaded:
            load = reader.load_companions
            self._loaded[reader.name] = load(self.folder) if load is not None else None
        return self._loaded[reader.name]


class ArchiveReader:
    """Reads the files of an archive, one after the other; side files are loaded once for the files of a folder.

    Args:
        forced: The reader of every record; recognised record by record where it is ``None``.
    """

    def __init__(self, forced: Reader | None = None) -> None:
        self._forced = forced
        self._companions: Companions | None = None

    def read(self, source: Source) -> Iterator[Outcome]:
        """As :func:`read_file`; a file that cannot be read, or not to its end, ends with a reject.

        Raises:
            JaxguardError: A side file is broken.
        """
        following: int | None = None
        try:
            with source.local() as file:
                for outcome in self.read_local(file):
                    yield outcome
                    following = (outcome.position or 0) + 1
        except CannotRead as error:
            yield Outcome(following, reason=str(error), unread=True)

    def read_local(self, file: Path, at: Callable[[int], object] | None = None) -> Iterator[Outcome]:
        """As :meth:`read`, for a file on this machine with its side files beside it; ``at`` as in ``read_records``."""
        if self._companions is None or self._companions.folder != file.parent:
            self._companions = Companions(file.parent)
        yield from read_file(file, self._companions, self._forced, at)


def read_file(
    file: Path, companions: Companions, forced: Reader | None = None, at: Callable[[int], object] | None = None
) -> Iterator[Outcome]:
    """All records of a file, in order, each as trajectories or as a reject.

    Args:
        file: Local.
        companions: Those of the file's folder.
        forced: The reader of every record; recognised record by record where it is ``None``.
        at: Told how many bytes of the file are read.

    Raises:
        CannotRead: The file cannot be opened or read on, or needs a package that is not installed.
        JaxguardError: A side file is broken.
    """
    reader = forced
    known = forced is not None
    held: list[Outcome] = []  # until the file proves to be of a known format
    unknown: list[Parsed] = []  # records among ``held`` that another record's format may explain
    items = _items(file, at)
    for item in items:
        if isinstance(item, Broken):
            held.append(Outcome(item.position, reason=item.reason))
        else:
            try:
                reader = forced or _reader_of(item.record, reader)
            except RecordError as error:
                held.append(Outcome(item.position, reason=str(error)))
                unknown.append(item)
            else:
                if reader.split is not None:
                    others = {other.position for other in unknown}
                    apart = [outcome for outcome in held if outcome.position not in others]
                    yield from _read_whole(file, reader, companions, apart, [*unknown, item], items)
                    return
                known = True
                yield from held
                held.clear()
                unknown.clear()
                yield _read(reader, item, Context(file, item.position, companions.of(reader)))
        if known:
            yield from held
            held.clear()
            unknown.clear()
        elif len(held) == DETECTION_WINDOW:
            break
    if held:
        first = held[0].reason
        yield Outcome(None, reason=f"none of the first {len(held)} records is a trace; the first: {first}")


def _read(reader: Reader, item: Parsed, context: Context) -> Outcome:
    reason = ""
    made: tuple[Trajectory, ...] = ()
    try:
        made = tuple(reader.read(item.record, context))
        if not made:
            reason = "the record holds no trajectory"
    except CannotRead:
        raise
    except JaxguardError as error:
        reason = str(error)
    except _SHAPE_ERRORS as error:
        reason = f"not of the shape of {reader.name}: {type(error).__name__}: {error}"
    return Outcome(item.position, made, reason, reader.name, item.surrogates, item.nonfinite)


def _read_whole(
    file: Path,
    reader: Reader,
    companions: Companions,
    apart: list[Outcome],
    first: Sequence[Parsed],
    rest: Iterator[Parsed | Broken],
) -> Iterator[Outcome]:
    """A file whose records only together are trajectories, in ``reader``'s format from its first records on.

    ``apart`` are outcomes of lines that stand for themselves.
    """
    assert reader.split is not None
    records = [item.record for item in first]
    size = sum(item.size for item in first)
    surrogates, nonfinite = sum(item.surrogates for item in first), sum(item.nonfinite for item in first)
    for item in rest:
        if isinstance(item, Broken):
            apart.append(Outcome(item.position, reason=item.reason))
            continue
        other = None if reader.matches(item.record) else _detect_or_none(item.record)
        if other is not None and other is not reader and other.split is None:
            apart.append(_read(other, item, Context(file, item.position, companions.of(other))))
            continue
        size += item.size
        if size <= MAX_RECORD_BYTES:
            records.append(item.record)
        surrogates, nonfinite = surrogates + item.surrogates, nonfinite + item.nonfinite
    yield from apart
    following = max((outcome.position or 0 for outcome in apart), default=-1) + 1
    reason = ""
    parts: list[Record] = []
    try:
        if size > MAX_RECORD_BYTES:
            raise RecordError(
                f"more than {MAX_RECORD_BYTES} characters of records that belong together, expected a file for each "
                "session or trace"
            )
        parts = list(reader.split(records))
        if not parts:
            raise RecordError("it holds no trajectory")
    except JaxguardError as error:
        reason = f"{reader.name}: {error}"
    except _SHAPE_ERRORS as error:
        reason = f"not of the shape of {reader.name}: {type(error).__name__}: {error}"
    if reason:
        yield Outcome(following if apart else None, reason=reason, format=reader.name if apart else "")
        return
    loaded = companions.of(reader)
    for position, part in enumerate(parts, following):
        # What was replaced is counted once for the file.
        item = Parsed(position, part, surrogates, nonfinite) if part is parts[0] else Parsed(position, part)
        yield _read(reader, item, Context(file, position, loaded))


def _items(file: Path, at: Callable[[int], object] | None) -> Iterator[Parsed | Broken]:
    try:
        yield from read_records(file, at)
    except OSError as error:
        raise CannotRead(f"the file cannot be read: {error.strerror or error}") from error


def _reader_of(record: Record, current: Reader | None) -> Reader:
    """The file's reader so far where it fits, so that detection costs one look per record."""
    if current is not None and current.matches(record):
        return current
    found = detect(record)
    if found is None:
        raise RecordError(f"of no known format (known: {', '.join(format_names())})")
    return found


def _detect_or_none(record: Record) -> Reader | None:
    try:
        return detect(record)
    except RecordError:
        return None
