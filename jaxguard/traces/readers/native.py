"""jaxguard's own JSON lines (:mod:`jaxguard.traces.jsonl`) as a format like any other."""

from __future__ import annotations

from collections.abc import Iterable

from jaxguard.traces.jsonl import SchemaError, from_json
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory


def _matches(record: Record) -> bool:
    return "jaxguard" in record and "steps" in record


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    try:
        return [from_json(record)]
    except SchemaError as error:
        raise RecordError(str(error)) from error


READER = Reader(
    name="jaxguard",
    description="jaxguard's own JSON lines, one trajectory a line",
    matches=_matches,
    read=_read,
    is_companion=lambda name: name == "rejects.jsonl" or name == "manifest.json",
)
