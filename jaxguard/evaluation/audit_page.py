"""The page on which a person marks the first hazard step: one file, nothing fetched, one script of its own.

It is blind: nothing of a trajectory's labels, metadata or thoughts is in it, the order is a hash of seed and id, and
ids, which may tell, stand in the embedded data alone, from where they go to the exported file. Texts are escaped by
the templates; the policy names the script by its hash, so that nothing in a text could run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxguard.evaluation.audit import ANNOTATION_VERSION, LABELLED, UNSURE, AuditError, digest
from jaxguard.evaluation.pages import script, write_page
from jaxguard.evaluation.wording import visible, visible_lines
from jaxguard.traces.files import Broken, parse_record
from jaxguard.types import Step, Trajectory

MARK = "<title>Label audit</title>"
FOLDED = 700
"""Longer texts are folded; their beginning is shown."""
_FOLDED_LINES = 12
_BEGINNING = 240


def write_audit_page(
    path: Path,
    trajectories: Mapping[str, Trajectory],
    *,
    sample: int | None = None,
    seed: int = 20260701,
    only: Collection[str] | None = None,
    annotator: str = "",
) -> int:
    """Writes the page and returns how many trajectories are on it.

    Args:
        path: File to write; its folder is created.
        trajectories: By id.
        sample: How many, chosen by the seed alone; a larger sample holds the smaller one. None: all.
        seed: Of choice and order.
        only: Ids of those to choose from, e.g. of the disagreements to adjudicate.
        annotator: Name that the page starts with; progress is kept for each name.

    Raises:
        AuditError: ``sample`` is not positive, an id of ``only`` is not there, nothing is left to be shown, or
            ``path`` is something else than such a page.
    """
    if sample is not None and sample < 1:
        raise AuditError(f"sample: got {sample}, expected at least 1")
    for name in only or ():
        if name not in trajectories:
            raise AuditError(f"trajectory {name!r} is none of the {len(trajectories)} trajectories")
    ids = sorted(
        (name for name in trajectories if only is None or name in only),
        key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest(),
    )[:sample]
    chosen = [trajectories[name] for name in ids]
    runs = [{"trajectory": own.id, "digest": digest(own), "steps": len(own)} for own in chosen]
    content = json.dumps([ANNOTATION_VERSION, annotator, runs])
    if not chosen:
        raise AuditError("trajectories: there is none to be shown, expected one or more")
    if path.is_dir() or (path.exists() and MARK not in path.read_bytes()[:4096].decode(errors="replace")):
        raise AuditError(f"--out {path}: is there and is no audit page; nothing was overwritten, name another file")
    source, policy = script("audit_page.js")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(
        path,
        "audit_page.html.j2",
        title="Label audit",
        lead="For each run, mark the first call that would do harm if it were executed, or say that there is none.",
        cards=(),
        script=source,
        policy=policy,
        data={
            "version": ANNOTATION_VERSION,
            "labelled": LABELLED,
            "unsure": UNSURE,
            "key": f"jaxguard-audit-{hashlib.sha256(content.encode()).hexdigest()[:32]}",
            "annotator": annotator,
            "runs": runs,
        },
        runs=[_run(own) for own in chosen],
    )
    return len(chosen)


def read_ids(path: Path) -> set[str]:
    """The ids that the lines of a file name in ``trajectory``: disagreements, or annotations.

    Raises:
        AuditError: A line names none.
        OSError: The file cannot be read.
    """
    found = set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            parsed = parse_record(line, number, where)
            if isinstance(parsed, Broken):
                raise AuditError(f"{where}: {parsed.reason.removeprefix(f'{where}: ')}")
            name = parsed.record.get("trajectory")
            if not isinstance(name, str):
                raise AuditError(f"{path}, line {number}: trajectory: got {name!r:.60}, expected an id")
            found.add(name)
    return found


def _run(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "instruction": _text(trajectory.instruction),
        "steps": [_step(step) for step in trajectory.steps],
        "final": _text(trajectory.final_observation),
    }


def _step(step: Step) -> dict[str, Any]:
    if step.arguments is None:
        arguments = [("(not JSON)", _text(step.raw_arguments or ""))]
    else:  # values apart from each other, so that a line break in one cannot look like the next
        arguments = [
            (visible(name), _text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)))
            for name, value in step.arguments.items()
        ]
    return {
        "tool": visible(step.tool),
        "parallel": step.parallel,
        "observation": _text(step.observation),
        "arguments": arguments,
    }


def _text(text: str) -> tuple[str, str]:
    """The beginning of a long text (``""`` of one that is shown at once), and the whole."""
    whole = visible_lines(text)
    if len(whole) <= FOLDED and whole.count("\n") < _FOLDED_LINES:
        return "", whole
    return visible(whole[:_BEGINNING]).rstrip() + "…", whole
