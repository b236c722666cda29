"""Formats by name, and detection of a format from its first record.

A *reader* turns one record (a parsed JSON object) into trajectories and knows nothing of files;
:mod:`jaxguard.traces.files` turns files into records, :mod:`jaxguard.traces.reading` brings both together.

To add a format:

1. Write ``readers/NAME.py`` that ends with ``READER = Reader(...)``, and name it in :func:`all_readers`.
2. ``matches``: the fewest fields that tell the format from all others (``tests/traces/test_registry.py`` compares).
3. ``read``: one record to its trajectories. Give chat-shaped messages to ``readers.calls.read_conversation``: it keeps
   the rule that a step shows nothing of what came after its call. Raise :class:`RecordError` for what is not known.
4. Where a record is not a trajectory (a session of one event a line, spans of many traces), ``split``: all records of
   a file to the records that ``read`` gets.
5. Test it on a real file with the steps counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxguard.types import JaxguardError, Trajectory

Record = Mapping[str, Any]


class RecordError(JaxguardError):
    """This record cannot become a trajectory; the message is the reason that goes to the rejects."""


class CannotRead(JaxguardError):
    """This machine cannot read a file now: a disk error, a package that is not installed. Another run may."""


@dataclass(frozen=True)
class Context:
    """Where a record stands, and what lies beside its file.

    Attributes:
        file: The file the record came from.
        position: 0-based index of the record in that file (of what ``split`` made of it, where there is one).
        companions: What the reader's ``load_companions`` returned for the file's folder (labels,
            injection targets, ...).
    """

    file: Path
    position: int
    companions: Any = None

    @property
    def stem(self) -> str:
        """Name of the file without ``.gz`` and its ending."""
        return self.file.name.removesuffix(".gz").rsplit(".", 1)[0] or self.file.name


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
        split: For a format whose records are not trajectories: all records of a file, in order, to the records
            that ``read`` gets. ``matches`` is asked about the former and need not know every one of them: a file
            is of the format once one of its records matches, and its others come along unless they match another
            format. May raise :class:`RecordError`: then the file is rejected as a whole.
        load_companions: Loads side files from the folder of a data file, or ``None``.
        is_companion: True for a file name that is a side file and must not be converted itself.
    """

    name: str
    description: str
    matches: Callable[[Record], bool]
    read: Callable[[Record, Context], Iterable[Trajectory]]
    split: Callable[[Sequence[Record]], Iterable[Record]] | None = None
    load_companions: Callable[[Path], Any] | None = None
    is_companion: Callable[[str], bool] = lambda _name: False


@cache
def all_readers() -> tuple[Reader, ...]:
    """Every known format, in the order in which help texts list them."""
    # Imported here because the readers import this module.
    from jaxguard.traces.readers import (
        agentdojo,
        agentharm,
        asb,
        atif,
        claude_code,
        codex,
        inspect_ai,
        langfuse,
        langsmith,
        managed_agents,
        mcp,
        native,
        openai_chat,
        openai_responses,
        otel,
        records,
        sharegpt,
        stepshield,
        toolemu,
        when2call,
    )

    return (
        native.READER,
        stepshield.READER,
        asb.READER,
        agentdojo.READER,
        atif.READER,
        *inspect_ai.READERS,
        *records.READERS,
        when2call.READER,
        toolemu.READER,
        agentharm.READER,
        langfuse.READER,
        langsmith.READER,
        openai_chat.READER,
        sharegpt.READER,
        otel.READER,
        openai_responses.READER,
        claude_code.READER,
        codex.READER,
        managed_agents.READER,
        mcp.READER,
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
