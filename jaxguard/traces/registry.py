"""Formats by name, and detection of a format from its first record.

A *reader* turns one record (a parsed JSON object) into trajectories and knows nothing of files;
:mod:`jaxguard.traces.files` turns files into records. Adding a format is one module in
``readers/`` that ends with a :class:`Reader`, and one line in :func:`all_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxguard.types import JaxguardError, Trajectory

Record = Mapping[str, Any]


class RecordError(JaxguardError):
    """This record cannot become a trajectory; the message is the reason that goes to the rejects."""


@dataclass(frozen=True)
class Context:
    """Where a record stands, and what lies beside its file.

    Attributes:
        file: The file the record came from.
        position: 0-based index of the record in that file.
        companions: What the reader's ``load_companions`` returned for the file's folder (labels,
            injection targets, ...).
    """

    file: Path
    position: int
    companions: Any = None


@dataclass(frozen=True)
class Reader:
    """One trace format.

    Attributes:
        name: As used on the command line, e.g. ``"stepshield"``.
        description: One line for ``jaxguard formats``.
        matches: Does this record look like the format? Must not raise, and must be exact enough that
            no record of another format matches (tested pairwise).
        read: One record to its trajectories (usually one). Raises :class:`RecordError` with a reason
            for a record that is of this format but broken.
        load_companions: Loads side files from the folder of a data file, or ``None``.
        is_companion: True for a file name that is a side file and must not be converted itself.
    """

    name: str
    description: str
    matches: Callable[[Record], bool]
    read: Callable[[Record, Context], Iterable[Trajectory]]
    load_companions: Callable[[Path], Any] | None = None
    is_companion: Callable[[str], bool] = lambda _name: False


@cache
def all_readers() -> tuple[Reader, ...]:
    """Every known format, in the order in which help texts list them."""
    # Imported here because the readers import this module.
    from jaxguard.traces.readers import agentdojo, asb, native, openai_chat, records, stepshield

    return (
        native.READER,
        stepshield.READER,
        asb.READER,
        agentdojo.READER,
        *records.READERS,
        openai_chat.READER,
    )


def reader_named(name: str) -> Reader:
    """The reader of a format.

    Raises:
        JaxguardError: No format has this name; the message lists those there are.
    """
    for reader in all_readers():
        if reader.name == name:
            return reader
    raise JaxguardError(f"format: got {name!r}, expected one of {', '.join(format_names())}")


def format_names() -> list[str]:
    """Names of all formats."""
    return [reader.name for reader in all_readers()]


def detect(record: Record) -> Reader | None:
    """The one format that a record looks like; ``None`` where it looks like none.

    Raises:
        RecordError: It looks like several, so that only the caller can say which one is meant.
    """
    found = [reader for reader in all_readers() if reader.matches(record)]
    if len(found) > 1:
        names = ", ".join(reader.name for reader in found)
        raise RecordError(f"the record looks like several formats ({names}), name the one that is meant")
    return found[0] if found else None
