"""Labels by hand: the annotation file, what a set's own labels say, and trajectories with adjudicated labels.

An annotation file is JSON lines, one trajectory a line, each trajectory once; all fields are required::

    {"jaxguard_annotation": 1, "trajectory": "run-7", "digest": "9f...", "annotator": "anna",
     "status": "labelled", "first_hazard": 3, "comment": ""}

``status`` is ``"labelled"`` or ``"unsure"`` ("cannot say"); ``first_hazard`` is the step (from 0) of the first call
whose execution would do harm, null where there is none, and null where the status is ``"unsure"``. ``digest`` is
:func:`digest` of what the annotator read, so that a trajectory that was changed since is noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxguard.traces.files import Broken, parse_record
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.readers.turns import with_hazards
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.writing import write_whole

ANNOTATION_VERSION = 1
LABELLED = "labelled"
UNSURE = "unsure"
# What an answer is where it names no step; a step is its own number.
NO_HAZARD = -1
UNSAFE_SOMEWHERE = -2
"""A set's label: unsafe, at a step that it does not name."""
SAFE_RUN = -3
"""A set's label: safe, but not reliable by step (say, a hazardous proposal failed)."""
CANNOT_SAY = -4

LARGEST_STEP = 2**31
_EXPECTED: Mapping[str, tuple[tuple[type, ...], str]] = {
    "jaxguard_annotation": ((int,), f"version {ANNOTATION_VERSION}"),
    "trajectory": ((str,), "the id of a trajectory"),
    "digest": ((str,), "the digest of the trajectory's content"),
    "annotator": ((str,), "a name"),
    "status": ((str,), f"{LABELLED!r} or {UNSURE!r}"),
    "first_hazard": ((int, type(None)), f"a step from 0 to {LARGEST_STEP - 1}, or null"),
    "comment": ((str,), "a text"),
}


class AuditError(JaxguardError):
    """An annotation file is broken, or does not belong to the trajectories at hand."""


@dataclass(frozen=True, slots=True)
class Annotation:
    """What one person says of one trajectory; the fields of a line, see the module's text."""

    trajectory: str
    digest: str
    annotator: str
    status: str
    first_hazard: int | None
    comment: str = ""

    @property
    def answer(self) -> int:
        """The step, :data:`NO_HAZARD` or :data:`CANNOT_SAY`."""
        if self.status == UNSURE:
            return CANNOT_SAY
        return NO_HAZARD if self.first_hazard is None else self.first_hazard

    def to_line(self) -> str:
        """Its line in an annotation file."""
        record = {"jaxguard_annotation": ANNOTATION_VERSION, **{name: getattr(self, name) for name in self.__slots__}}
        return json.dumps(record, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Labels:
    """Answers of one source by trajectory id.

    Attributes:
        name: What it is called in tables: a file with its annotators, or the set.
        answers: A step, or one of the constants above; what is not there was not annotated.
        annotations: The lines behind them; none for a set's own labels.
        lines: Where each stands in its file, from 1.
    """

    name: str
    answers: Mapping[str, int]
    annotations: Mapping[str, Annotation]
    lines: Mapping[str, int]
    path: Path | None = None

    def where(self, name: str) -> str:
        """File and line of a trajectory's annotation."""
        return f"{self.path}, line {self.lines[name]}"


def digest(trajectory: Trajectory) -> str:
    """SHA-256 of what an annotator reads: instruction, observations, calls, what the last call returned.

    Ids, labels, metadata and thoughts are not part of it.
    """
    steps = [[s.observation, s.parallel, s.tool, s.arguments, s.raw_arguments] for s in trajectory.steps]
    content = json.dumps([trajectory.instruction, steps, trajectory.final_observation], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def read_set(path: Path) -> dict[str, Trajectory]:
    """Trajectories by id, in order.

    Raises:
        AuditError: There are none, or an id stands there twice.
        SchemaError: The file cannot be read.
    """
    found: dict[str, Trajectory] = {}
    for trajectory in read_trajectories(path):
        if trajectory.id in found:
            raise AuditError(f"{path}: two trajectories have the id {trajectory.id!r}, expected each once")
        found[trajectory.id] = trajectory
    if not found:
        raise AuditError(f"{path}: holds no trajectory, expected at least one")
    return found


def read_annotations(path: Path) -> Labels:
    """The annotations of a file.

    Raises:
        AuditError: A line is not an annotation, or the file has none, or two of one trajectory; names file, line,
            field, what was found and what was expected.
        OSError: The file cannot be read.
    """
    annotations: dict[str, Annotation] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        parsed = parse_record(line, number, where)
        if isinstance(parsed, Broken):
            raise AuditError(parsed.reason)
        own = _annotation(parsed.record, where)
        if own.trajectory in lines:
            first = lines[own.trajectory]
            raise AuditError(f"{where}: trajectory: {own.trajectory!r} stands in line {first} already, expected once")
        annotations[own.trajectory], lines[own.trajectory] = own, number
    if not annotations:
        raise AuditError(f"{path}: holds no annotation, expected at least one line")
    names = sorted({own.annotator for own in annotations.values()})
    answers = {name: own.answer for name, own in annotations.items()}
    return Labels(f"{path.name} ({', '.join(names)})", answers, annotations, lines, path)


def _annotation(record: Mapping[str, Any], where: str) -> Annotation:
    for name in record:
        if name not in _EXPECTED:
            raise AuditError(f"{where}: {name}: unknown field, expected {', '.join(_EXPECTED)}")
    for name, (types, expected) in _EXPECTED.items():
        if name not in record:
            raise AuditError(f"{where}: {name}: missing, expected {expected}")
        value = record[name]
        fits = type(value) in types  # exact, because true is an int in Python, but not in JSON
        if name == "jaxguard_annotation":
            fits = fits and value == ANNOTATION_VERSION
        elif name == "status":
            fits = value in (LABELLED, UNSURE)
        elif name == "first_hazard":
            fits = fits and (value is None or 0 <= value < LARGEST_STEP)
            if fits and value is not None and record["status"] == UNSURE:
                fits, expected = False, f"null, because status is {UNSURE!r}"
        elif name != "comment":
            fits = fits and bool(value.strip())
        if not fits:
            raise AuditError(f"{where}: {name}: got {value!r:.60}, expected {expected}")
    return Annotation(**{name: record[name] for name in Annotation.__slots__})


def set_labels(trajectories: Mapping[str, Trajectory]) -> Labels:
    """What a set itself says, as one more annotator; trajectories without a label are not annotated."""
    answers: dict[str, int] = {}
    for name, own in trajectories.items():
        if own.first_hazard is not None:
            answers[name] = own.first_hazard
        elif own.unsafe is not None:
            answers[name] = UNSAFE_SOMEWHERE if own.unsafe else NO_HAZARD if own.timing else SAFE_RUN
    return Labels("labels of the set", answers, {}, {})


def require_same_texts(labels: Labels, trajectories: Mapping[str, Trajectory]) -> None:
    """Refuses annotations of other trajectories than those at hand.

    Raises:
        AuditError: An annotated trajectory is not there, has another content, or fewer steps.
    """
    for name, own in labels.annotations.items():
        where = labels.where(name)
        if name not in trajectories:
            raise AuditError(f"{where}: trajectory: {name!r} is none of the {len(trajectories)} trajectories")
        found, count = digest(trajectories[name]), len(trajectories[name])
        if own.digest != found:
            raise AuditError(
                f"{where}: digest: got {own.digest!r:.24}, expected {found[:16]}...: {name!r} is not what was annotated"
            )
        if own.first_hazard is not None and own.first_hazard >= count:
            raise AuditError(f"{where}: first_hazard: got {own.first_hazard}, expected a step below {count}")


def require_same_versions(a: Labels, b: Labels) -> None:
    """Refuses two files of which one annotates another version of a trajectory than the other.

    Raises:
        AuditError: Names the first such trajectory.
    """
    for name in a.annotations.keys() & b.annotations.keys():
        if a.annotations[name].digest != b.annotations[name].digest:
            raise AuditError(f"{b.where(name)}: digest: {name!r} has another content than in {a.where(name)}")


def adjudicated(trajectory: Trajectory, annotation: Annotation) -> Trajectory:
    """The trajectory with the annotation's label in place of its own.

    Steps before the first hazard are labelled safe, those after it are not labelled; without a hazard all steps are
    safe. Of one that the annotator could not judge nothing is known: it becomes unlabelled. What the labels were before
    is added to ``metadata["audit"]``, a list.

    Raises:
        AuditError: There is something else than a list.
    """
    earlier = trajectory.metadata.get("audit", [])
    if not isinstance(earlier, list):
        raise AuditError(f"trajectory {trajectory.id!r}: metadata.audit: got {earlier!r:.60}, expected a list")
    first, steps = annotation.first_hazard, len(trajectory)
    unsafe = None if annotation.status == UNSURE else first is not None
    hazards: list[bool | None] = [None if unsafe is None else False] * steps
    if first is not None:
        hazards[first:] = [True, *[None] * (steps - first - 1)]
    record = {
        "annotator": annotation.annotator,
        "status": annotation.status,
        "comment": annotation.comment,
        "before": {name: getattr(trajectory, name) for name in ("unsafe", "first_hazard", "timing")},
    }
    return replace(
        trajectory,
        steps=with_hazards(trajectory.steps, hazards),
        unsafe=unsafe,
        first_hazard=first,
        timing=unsafe is not None,
        metadata={**trajectory.metadata, "audit": [*earlier, record]},
    )


def apply_annotations(
    trajectories: Mapping[str, Trajectory], labels: Labels, source: Path, out: Path
) -> list[Trajectory]:
    """All trajectories, the annotated ones with their new labels (:func:`adjudicated`), the others as they are.

    Args:
        trajectories: By id, as :func:`read_set` read them from ``source``.
        labels: Adjudicated annotations.
        source: Where the trajectories are.
        out: Folder that they are going to be written to.

    Raises:
        AuditError: As :func:`require_same_texts`; or ``out`` holds the source, which would be replaced.
    """
    if out.resolve() in (source.resolve(), source.resolve().parent):
        raise AuditError(f"{out}: holds the trajectories themselves, expected another folder")
    require_same_texts(labels, trajectories)
    return [
        adjudicated(own, labels.annotations[name]) if name in labels.annotations else own
        for name, own in trajectories.items()
    ]


def write_annotations(annotations: Iterable[Annotation], path: Path) -> None:
    """Writes an annotation file, whole or not at all."""
    write_whole(path, "".join(own.to_line() for own in annotations))
