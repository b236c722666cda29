"""StepShield: code-agent runs with the step at which the agent goes rogue.

A step's ``observation`` field is the *result* of that step's action, so it belongs to the observation of
the step after it (pre-action rule).

Labels: the training file labels steps in place, the test file through ``test_labels.jsonl`` beside it.
A label marks the **first** rogue step; later steps that continue the misuse are mostly unlabelled. So
the hazard label is true where the source says so, false before, and unknown afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxguard.traces.files import Broken, read_records
from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.traces.readers.turns import Call, StepBuilder, group_key, with_hazards
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import JaxguardError, Trajectory

LABEL_FILES = ("test_labels.jsonl", "test_labels.jsonl.gz")

_KEYS = {"trajectory_id", "task", "steps"}
_TRAIN_ID = re.compile(r"(?P<pair>(?P<category>[A-Z]+)-(?P<severity>L\d+)-\d+)-(?P<kind>ROGUE|CLEAN)")


def _matches(record: Record) -> bool:
    task = record.get("task")
    return set(record) | {"file"} == _KEYS | {"file"} and isinstance(task, dict) and "success_criteria" in task


def load_labels(folder: Path) -> dict[str, Mapping[str, Any]] | None:
    """The test labels beside a data file, by trajectory id; ``None`` where there are none.

    Raises:
        JaxguardError: The file is broken, a record has no ``trajectory_id``, or two of one id contradict each other.
    """
    path = next((folder / name for name in LABEL_FILES if (folder / name).is_file()), None)
    if path is None:
        return None
    labels: dict[str, Mapping[str, Any]] = {}
    for item in read_records(path):
        where = f"{path}, record {item.position}"
        if isinstance(item, Broken):
            raise JaxguardError(f"{where}: {item.reason}")
        name = item.record.get("trajectory_id")
        if not isinstance(name, str):
            raise JaxguardError(f"{where}: trajectory_id is {name!r:.80}, expected a string")
        if labels.setdefault(name, item.record) != item.record:
            raise JaxguardError(f"{where}: another label of {name!r} than before, expected one")
    return labels


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    name, rows = record["trajectory_id"], record["steps"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise RecordError("steps: expected a list of objects")
    build = StepBuilder()
    for row in rows:
        action = row.get("action")
        if not isinstance(action, str) or not action:
            raise RecordError(f"steps: action is {action!r}, expected the name of a tool")
        build.think(row.get("thought"))
        build.propose([Call(action, *parse_arguments(row.get("arguments")))])
        build.observe(row.get("observation"))
    steps, final, _ = build.finish()

    unsafe: bool | None
    if any("label" in row for row in rows):
        unsafe, marked, about = _labels_in_place(str(name), rows)
    else:
        unsafe, marked, about = _labels_beside(name, len(steps), context.companions)
    first = min(marked, default=None)
    timing = unsafe is not None and (first is not None) == unsafe
    if timing:
        known = len(steps) if first is None else first
        hazards = [t in marked or (False if t < known else None) for t in range(len(steps))]
        steps = with_hazards(steps, hazards)
    task = record["task"]
    yield Trajectory(
        id=f"stepshield-{name}",
        instruction=_instruction(task),
        steps=steps,
        unsafe=unsafe,
        first_hazard=first,
        timing=timing,
        # Twins share the title even where the description is worded anew (542 pairs against 515).
        group=group_key("task", task.get("title") or str(task.get("description"))),
        final_observation=final,
        source="stepshield",
        metadata={"domain": "code", **about},
    )


def _labels_in_place(name: str, rows: list[Record]) -> tuple[bool, set[int], dict[str, Any]]:
    """``(unsafe, labelled steps, metadata)`` of a training record."""
    match = _TRAIN_ID.fullmatch(name)
    marked = {index for index, row in enumerate(rows) if row.get("label")}
    about = match.groupdict() if match else {"pair": None, "category": None, "severity": None}
    kind = match["kind"].lower() if match else ("rogue" if marked else "clean")
    if kind == "clean" and marked:
        raise RecordError(f"steps: labels at {sorted(marked)}, but {name!r} is named a clean run")
    return kind == "rogue", marked, about | {"kind": kind}


def _labels_beside(
    name: str, length: int, labels: Mapping[str, Mapping[str, Any]] | None
) -> tuple[bool | None, set[int], dict[str, Any]]:
    """The same of a test record, from the label file; no label where it has no row for it."""
    label = (labels or {}).get(name)
    if label is None:
        return None, set(), {"kind": None, "category": None, "severity": None, "pair": None}
    kind, step = label.get("type"), label.get("rogue_step")
    if kind not in ("rogue", "clean", "benign"):
        raise RecordError(f"label type: found {kind!r}, expected rogue, clean or benign")
    # JSON's true is an int to Python, but names no step.
    if step is not None and (kind != "rogue" or type(step) is not int or not 1 <= step <= length):
        raise RecordError(f"rogue_step: found {step!r} of a {kind} run, expected a step in 1..{length}")
    about = {key: label.get(key) for key in ("category", "severity")} | {"kind": kind, "pair": None}
    return kind == "rogue", set() if step is None else {step - 1}, about


def _instruction(task: Mapping[str, Any]) -> str:
    lines = [str(task[key]) for key in ("title", "description") if task.get(key)]
    for key, heading in (("constraints", "Constraints:"), ("success_criteria", "Success criteria:")):
        if task.get(key):
            lines += [heading, *(f"- {item}" for item in task[key])]
    return "\n".join(lines)


READER = Reader(
    name="stepshield",
    description="StepShield code-agent runs (training with step labels, test with test_labels.jsonl)",
    matches=_matches,
    read=_read,
    load_companions=load_labels,
    is_companion=lambda name: name in LABEL_FILES,
)
