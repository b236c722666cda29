"""The one summary that all tables and pictures come from: every figure of every run, and every paired difference."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.evaluation.bootstrap import Interval
from jaxguard.types import JaxguardError
from jaxguard.writing import write_whole

VERSION = 1


class SummaryError(JaxguardError):
    """A summary that cannot be read."""


@dataclass(frozen=True)
class Figure:
    """A metric of one guard in one run; NaN where undefined.

    Attributes:
        experiment: What the run is part of.
        data: The set; for transfer ``"one -> another"``.
        seed: Of the run.
        guard: A rival's name, a variant of the guard, or a way to a threshold.
        metric: Name of the metric.
        value: On the test part.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    experiment: str
    data: str
    seed: str
    guard: str
    metric: str
    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Paired:
    """How much higher a metric is for ``guard`` than for ``other``, on the same trajectories of one run.

    ``p`` is that of the Wilcoxon test, NaN where there is none; other fields as in :class:`Figure`.
    """

    experiment: str
    data: str
    seed: str
    guard: str
    other: str
    metric: str
    value: float
    low: float
    high: float
    p: float


@dataclass(frozen=True)
class Summary:
    """What the runs of a plan came to.

    Attributes:
        figures: All of them.
        paired: Differences.
        left_out: What the plan names and could not be run, with the reason; begins with the experiment's name.
        plan: Digest of the plan.
    """

    figures: tuple[Figure, ...] = ()
    paired: tuple[Paired, ...] = ()
    left_out: tuple[str, ...] = ()
    plan: str = ""

    def having(self, experiment: str, data: str | None = None) -> Summary:
        """The part of one experiment, and of one set."""

        def kept(rows: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(r for r in rows if r.experiment == experiment and data in (None, r.data))

        return Summary(kept(self.figures), kept(self.paired))

    @property
    def sets(self) -> tuple[str, ...]:
        """Sets in order."""
        return tuple(dict.fromkeys(f.data for f in self.figures))

    def of_plan(self, digest: str) -> Summary:
        """What is here, or nothing where that is of another plan: figures of two are not put side by side."""
        return self if self.plan == digest else Summary()

    def replaced(self, experiment: str, by: Summary, digest: str) -> Summary:
        """With ``by`` in place of what is here of an experiment."""

        def others(rows: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(r for r in rows if r.experiment != experiment)

        left_out = tuple(reason for reason in self.left_out if not reason.startswith(f"{experiment}: "))
        figures, paired = (*others(self.figures), *by.figures), (*others(self.paired), *by.paired)
        return Summary(figures, paired, (*left_out, *by.left_out), digest)

    def write(self, path: Path) -> None:
        """As JSON, NaN as null."""
        rows = {"figures": [_plain(f) for f in self.figures], "paired": [_plain(p) for p in self.paired]}
        text = json.dumps(
            {"summary": VERSION, "plan": self.plan, "left_out": self.left_out, **rows}, indent=1, allow_nan=False
        )
        write_whole(path, text + "\n")


def read_summary(path: Path) -> Summary:
    """Reads what :meth:`Summary.write` wrote; nothing there is an empty one.

    Raises:
        SummaryError: something else is there.
    """
    if not path.exists():
        return Summary()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["summary"] != VERSION:
            raise SummaryError(f"{path}: version {found['summary']!r}, expected {VERSION}")
        figures = tuple(Figure(**_numbers(row)) for row in found["figures"])
        paired = tuple(Paired(**_numbers(row)) for row in found["paired"])
        return Summary(figures, paired, tuple(found["left_out"]), found["plan"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SummaryError(f"{path}: {error!r}, expected what `jaxguard experiment` wrote; delete it") from error


def figures(experiment: str, data: str, seed: str, guard: str, found: Mapping[str, Interval]) -> list[Figure]:
    """A guard's metrics as rows."""
    return [Figure(experiment, data, seed, guard, name, i.value, i.low, i.high) for name, i in found.items()]


def _plain(row: Any) -> dict[str, Any]:
    values = dataclasses.asdict(row).items()
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values}


def _numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: math.nan if v is None else v for k, v in row.items()}
