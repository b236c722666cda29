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
from jaxguard.writing import replacing

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
    _check(record, _TRAJECTORY_TYPES)
    for name in ("id", "instruction", "steps"):
        if name not in record:
            expected = "a non-empty string" if name == "id" else _EXPECTED[_TRAJECTORY_TYPES[name]]
            raise _error(name, _MISSING, expected)
    steps = record["steps"]
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
            **{"steps": tuple(made)}
            | {name: value for name, value in record.items() if name not in ("jaxguard", "steps")}
        )
    except JaxguardError as error:
        raise SchemaError(str(error)) from error


def _step_from_json(record: Any, index: int, observation_before: str) -> Step:
    if not isinstance(record, dict):
        raise _error(f"steps[{index}]", record, "an object")
    _check(record, _STEP_TYPES, f"steps[{index}].")
    get = record.get
    raw = get("raw_arguments")
    arguments = get("arguments", _MISSING)
    if arguments is _MISSING:
        arguments = {} if raw is None else None
    if raw is None and arguments is None:
        raise _error(f"steps[{index}].arguments", arguments, "an object")
    if raw is not None and arguments is not None:
        raise _error(f"steps[{index}].arguments", arguments, "null, because raw_arguments is given")
    if not (tool := get("tool", _MISSING)) or tool is _MISSING:
        raise _error(f"steps[{index}].tool", tool, "a non-empty string")
    parallel = get("parallel", False)
    return Step(
        tool,
        arguments,
        get("call_id", f"call_{index}"),
        get("observation", observation_before if parallel else ""),
        raw,
        get("hazard"),
        get("thought", ""),
        parallel,
        get("unobserved", False),
    )


_EXPECTED = {
    (str,): "a string",
    (str, type(None)): "a string or null",
    (bool,): "true or false",
    (bool, type(None)): "true, false or null",
    (int, type(None)): "a step index or null",
    (dict,): "an object",
    (dict, type(None)): "an object",
    (list,): "a list of steps",
}
# Exact types, because bool is an int in Python, but not in JSON.
_STEP_TYPES: dict[str, tuple[type, ...]] = {
    "tool": (str,),
    "arguments": (dict, type(None)),
    "call_id": (str,),
    "observation": (str,),
    "raw_arguments": (str, type(None)),
    "hazard": (bool, type(None)),
    "thought": (str,),
    "parallel": (bool,),
    "unobserved": (bool,),
}
_TRAJECTORY_TYPES: dict[str, tuple[type, ...]] = {
    "jaxguard": (int,),
    "id": (str,),
    "instruction": (str,),
    "steps": (list,),
    "unsafe": (bool, type(None)),
    "first_hazard": (int, type(None)),
    "timing": (bool,),
    "group": (str,),
    "final_observation": (str,),
    "source": (str,),
    "metadata": (dict,),
}


def _check(record: Mapping[str, Any], types: Mapping[str, tuple[type, ...]], where: str = "") -> None:
    """Refuses fields that are unknown or of another type; what is not there is not looked at."""
    for name, value in record.items():
        known = types.get(name)
        if known is None:
            raise SchemaError(f"{where}{name}: unknown field, expected one of {', '.join(sorted(types))}")
        if type(value) not in known:
            raise _error(where + name, value, "a non-empty string" if name in ("tool", "id") else _EXPECTED[known])


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
    count = 0
    with replacing(path) as (place,), place.open("wb") as raw:
        out: IO[bytes] | gzip.GzipFile = open_output(raw) if path.name.endswith(".gz") else raw
        for trajectory in trajectories:
            out.write(encode_line(trajectory)[0])
            count += 1
        if out is not raw:
            out.close()
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
