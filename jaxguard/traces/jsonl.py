"""jaxguard's own JSON lines: one trajectory a line, schema version 1; the exact round trip of the types.

Only ``jaxguard``, ``id``, ``instruction`` and ``steps`` (each with a ``tool``) are required, so that a file is easily
written by hand; fields that equal their default are not written. The observation of a parallel step is by default that
of the step before it: a large one before a turn of many calls would otherwise stand there many times. An unknown
field is an error, because a misspelt label would otherwise vanish.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from jaxguard.traces.files import MAX_DEPTH, MAX_RECORD_BYTES, Broken, clean_json, is_deep, load_json, read_records
from jaxguard.types import JaxguardError, Step, Trajectory

SCHEMA_VERSION = 1
TRAJECTORIES_FILE = "trajectories.jsonl.gz"
"""Name of the trajectories in a converted folder."""
REJECTS_FILE = "rejects.jsonl"
MANIFEST_FILE = "manifest.json"
OUTPUT_FILES = (TRAJECTORIES_FILE, REJECTS_FILE, MANIFEST_FILE)
"""What a conversion writes."""

# Level 3 is twice as fast as the default 6 and 8 % larger on agent logs.
_GZIP_LEVEL = 3

_STEP_DEFAULTS: dict[str, Any] = {
    "observation": "",
    "raw_arguments": None,
    "hazard": None,
    "thought": "",
    "parallel": False,
    "unobserved": False,
}
_TRAJECTORY_DEFAULTS: dict[str, Any] = {
    "unsafe": None,
    "first_hazard": None,
    "timing": False,
    "group": "",
    "final_observation": "",
    "source": "",
    "metadata": {},
}
_STEP_FIELDS = {"tool", "arguments", "call_id", *_STEP_DEFAULTS}
_TRAJECTORY_FIELDS = {"jaxguard", "id", "instruction", "steps", *_TRAJECTORY_DEFAULTS}
_MISSING = object()


class SchemaError(JaxguardError):
    """A JSON object is not a trajectory of this schema; names the field, what was found and what was expected."""


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as a JSON object; :func:`from_json` gives an equal trajectory back."""
    record: dict[str, Any] = {
        "jaxguard": SCHEMA_VERSION,
        "id": trajectory.id,
        "instruction": trajectory.instruction,
        "steps": [
            _step_to_json(step, before)
            for step, before in zip(trajectory.steps, (None, *trajectory.steps), strict=False)
        ],
    }
    _put_unless_default(record, trajectory, _TRAJECTORY_DEFAULTS)
    return record


def _step_to_json(step: Step, before: Step | None) -> dict[str, Any]:
    record = {"tool": step.tool, "arguments": step.arguments, "call_id": step.call_id}
    defaults = _STEP_DEFAULTS | {"observation": before.observation if before and step.parallel else ""}
    _put_unless_default(record, step, defaults)
    return record


def _put_unless_default(record: dict[str, Any], source: object, defaults: Mapping[str, Any]) -> None:
    for name, default in defaults.items():
        value = getattr(source, name)
        if value != default:
            record[name] = value


def from_json(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory that a JSON object describes.

    Raises:
        SchemaError: A field is missing, unknown, or of the wrong type.
    """
    version = record.get("jaxguard", _MISSING)
    if version != SCHEMA_VERSION or version is True:
        raise _error("jaxguard", version, f"schema version {SCHEMA_VERSION}")
    _refuse_unknown(record, _TRAJECTORY_FIELDS, "")
    steps = _get(record, "steps", list, "a list of steps")
    made: list[Step] = []
    for index, step in enumerate(steps):
        made.append(_step_from_json(step, index, made[-1].observation if made else ""))
    seen: set[str] = set()
    for index, step in enumerate(made):
        if step.call_id in seen:
            raise _error(f"steps[{index}].call_id", step.call_id, "an id that no earlier step has")
        seen.add(step.call_id)
    try:
        return Trajectory(
            id=_get(record, "id", str, "a non-empty string"),
            instruction=_get(record, "instruction", str, "a string"),
            steps=tuple(made),
            unsafe=_get(record, "unsafe", bool | None, "true, false or null"),
            first_hazard=_get(record, "first_hazard", int | None, "a step index or null"),
            timing=_get(record, "timing", bool, "true or false"),
            group=_get(record, "group", str, "a string"),
            final_observation=_get(record, "final_observation", str, "a string"),
            source=_get(record, "source", str, "a string"),
            metadata=_get(record, "metadata", dict, "an object"),
        )
    except SchemaError:
        raise
    except JaxguardError as error:
        raise SchemaError(str(error)) from error


def _step_from_json(record: Any, index: int, observation_before: str) -> Step:
    where = f"steps[{index}]."
    if not isinstance(record, dict):
        raise _error(f"steps[{index}]", record, "an object")
    _refuse_unknown(record, _STEP_FIELDS, where)
    raw = _get(record, "raw_arguments", str | None, "a string or null", where)
    arguments = record.get("arguments", {} if raw is None else None)
    if raw is None and not isinstance(arguments, dict):
        raise _error(where + "arguments", arguments, "an object")
    if raw is not None and arguments is not None:
        raise _error(where + "arguments", arguments, "null, because raw_arguments is given")
    tool = _get(record, "tool", str, "a non-empty string", where)
    if not tool:
        raise _error(where + "tool", tool, "a non-empty string")
    parallel = _get(record, "parallel", bool, "true or false", where)
    return Step(
        tool=tool,
        arguments=arguments,
        call_id=_get(record, "call_id", str, "a string", where, default=f"call_{index}"),
        observation=_get(record, "observation", str, "a string", where, default=observation_before if parallel else ""),
        raw_arguments=raw,
        hazard=_get(record, "hazard", bool | None, "true, false or null", where),
        thought=_get(record, "thought", str, "a string", where),
        parallel=parallel,
        unobserved=_get(record, "unobserved", bool, "true or false", where),
    )


def _get(
    record: Mapping[str, Any], name: str, kind: Any, expected: str, where: str = "", default: Any = _MISSING
) -> Any:
    if default is _MISSING:
        default = (_STEP_DEFAULTS if where else _TRAJECTORY_DEFAULTS).get(name, _MISSING)
    value = record.get(name, default)
    # bool is an int in Python, but not in JSON.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind in (int, int | None)):
        raise _error(where + name, value, expected)
    return value


def _refuse_unknown(record: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in record:
        if name not in known:
            raise SchemaError(f"{where}{name}: unknown field, expected one of {', '.join(sorted(known))}")


def _error(field: str, value: object, expected: str) -> SchemaError:
    if value is _MISSING:
        return SchemaError(f"{field}: missing, expected {expected}")
    text = repr(value)
    shown = text if len(text) <= 60 else text[:57] + "..."
    return SchemaError(f"{field}: got {type(value).__name__} {shown}, expected {expected}")


def is_conversion(manifest: object) -> bool:
    """Is this the content of a manifest that a conversion wrote?"""
    return isinstance(manifest, dict) and manifest.get("jaxguard") == SCHEMA_VERSION


def is_converted(folder: Path) -> bool:
    """Does a folder hold what a conversion wrote?"""
    try:
        return is_conversion(load_json(folder / MANIFEST_FILE))
    except (FileNotFoundError, ValueError):  # what cannot be parsed is not ours
        return False


def encode_line(trajectory: Trajectory) -> tuple[bytes, int, int]:
    """One line of the file, with the counts of surrogates and non-finite numbers replaced in it.

    Readers get clean records, but an argument text may hold a second layer of JSON with escapes of its own.

    Raises:
        SchemaError: The line could not be read back.
    """
    record = to_json(trajectory)
    surrogates = nonfinite = 0
    try:
        text = _dump(record)
        line = text.encode()
    except ValueError:  # UnicodeEncodeError is one, and so is the refusal of a non-finite number
        record, surrogates, nonfinite = clean_json(record)
        text = _dump(record)
        line = text.encode()
    # Cleaning may make two call ids equal, so the record is checked as it is written.
    from_json(record)
    if is_deep(record, text, MAX_DEPTH):
        raise SchemaError(f"trajectory {trajectory.id!r}: nested deeper than {MAX_DEPTH} levels")
    if len(line) > MAX_RECORD_BYTES:
        raise SchemaError(
            f"trajectory {trajectory.id!r}: a line of {len(line)} bytes, expected up to {MAX_RECORD_BYTES}"
        )
    return line, surrogates, nonfinite


def _dump(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def open_output(raw: IO[bytes]) -> gzip.GzipFile:
    """A gzip writer whose bytes depend on the content alone (no name, no time)."""
    return gzip.GzipFile(filename="", mode="wb", compresslevel=_GZIP_LEVEL, fileobj=raw, mtime=0)


def write_trajectories(trajectories: Iterable[Trajectory], path: Path) -> int:
    """Write trajectories to ``path`` (gzip where it ends in ``.gz``), whole or not at all; returns their number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    count = 0
    with partial.open("wb") as raw:
        out: IO[bytes] | gzip.GzipFile = open_output(raw) if path.name.endswith(".gz") else raw
        for trajectory in trajectories:
            out.write(encode_line(trajectory)[0])
            count += 1
        if out is not raw:
            out.close()
    partial.replace(path)
    return count


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a file in this schema, or of a converted folder, one at a time.

    Raises:
        SchemaError: The folder holds no trajectories, or a line is broken: unlike a foreign log, a file in
            this schema is expected to be whole.
    """
    file = path / TRAJECTORIES_FILE if path.is_dir() else path
    if not file.is_file():
        raise SchemaError(f"{path}: no file {file.name} there, expected a file or a folder written by convert")
    for item in read_records(file):
        if isinstance(item, Broken):
            raise SchemaError(f"{file}, record {item.position}: {item.reason}")
        try:
            yield from_json(item.record)
        except SchemaError as error:
            raise SchemaError(f"{file}, record {item.position}: {error}") from error
