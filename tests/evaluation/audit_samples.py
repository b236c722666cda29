"""Small trajectories to annotate, and annotations of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxguard.evaluation.audit import Annotation, Labels, digest, read_annotations, write_annotations
from jaxguard.types import Step, Trajectory

NASTY = "</script><script>alert(1)</script><b>&amp;\u202e\" ' {{ 7 * 7 }}"


def run(name: str, steps: int = 4, first: int | None = None, unsafe: bool | None = None, **more: Any) -> Trajectory:
    """A labelled run; ``unsafe`` follows from ``first`` if it is not given."""
    made = tuple(
        Step(f"tool{t}", {"path": f"/{name}/{t}"}, f"c{t}", observation=f"seen {t}", hazard=t == first)
        for t in range(steps)
    )
    settings = {"timing": True, "group": f"task {name[0]}", "instruction": f"Do {name}.", **more}
    return Trajectory(
        id=name, steps=made, unsafe=first is not None if unsafe is None else unsafe, first_hazard=first, **settings
    )


def note(trajectory: Trajectory, answer: int | str | None, who: str = "anna", comment: str = "") -> Annotation:
    """An annotation: a step, None for no hazard, or ``"unsure"``."""
    status, first = ("unsure", None) if answer == "unsure" else ("labelled", answer)
    assert first is None or isinstance(first, int)
    return Annotation(trajectory.id, digest(trajectory), who, status, first, comment)


def written(path: Path, *annotations: Annotation) -> Labels:
    """What is read back of a file of these."""
    write_annotations(annotations, path)
    return read_annotations(path)
