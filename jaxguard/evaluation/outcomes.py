"""What every guard did with every trajectory of an evaluation: the raw material of comparisons between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.evaluate import GUARD, Baseline
from jaxguard.evaluation.metrics import Bools, EvaluationError, Floats, Ints, tabulate
from jaxguard.guard import Guard

OUTCOMES = "outcomes.json"
VERSION = 1


@dataclass(frozen=True, eq=False)
class GuardOutcome:
    """One guard's part: ``[N]`` each; ``score`` and ``first_alert`` are absent where it gives none.

    Attributes:
        alert: Did it alert?
        score: Higher is riskier.
        first_alert: First alerting step, -1 without one.
    """

    alert: Bools
    score: Floats | None = None
    first_alert: Ints | None = None


@dataclass(frozen=True, eq=False)
class Outcomes:
    """N labelled trajectories.

    Attributes:
        ids: Trajectory ids.
        clusters: Group of each, or itself.
        unsafe: Labels ``[N]``.
        first_hazard: First hazard steps ``[N]``, -1 where there is none.
        timed: Which count for timing ``[N]``.
        guards: By name, :data:`~jaxguard.evaluation.evaluate.GUARD` first.
        made: Weights and thresholds of the guard that they are of, JSON-like.
    """

    ids: tuple[str, ...]
    clusters: tuple[str, ...]
    unsafe: Bools
    first_hazard: Ints
    timed: Bools
    guards: Mapping[str, GuardOutcome]
    made: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """As JSON; a score without a finite value is null."""
        columns = {
            name: {
                "alert": own.alert.tolist(),
                "score": None if own.score is None else [s if np.isfinite(s) else None for s in own.score.tolist()],
                "first_alert": None if own.first_alert is None else own.first_alert.tolist(),
            }
            for name, own in self.guards.items()
        }
        head = {"outcomes": VERSION, "ids": self.ids, "clusters": self.clusters, "guards": columns, "made": self.made}
        arrays = {name: getattr(self, name).tolist() for name in ("unsafe", "first_hazard", "timed")}
        path.write_text(json.dumps(head | arrays, allow_nan=False), encoding="utf-8")


def outcomes(scored: Sequence[ScoredTrajectory], rivals: Mapping[str, Baseline], made: Mapping[str, Any]) -> Outcomes:
    """Of the labelled trajectories among ``scored``; rivals are aligned with it, and those without alerts left out."""
    table = tabulate(scored)
    at = np.array([i for i, s in enumerate(scored) if s.unsafe is not None], np.int64)
    guards = {GUARD: GuardOutcome(table.alert, table.max_fused, table.first_alert)}
    for name, own in rivals.items():
        if own.alert is not None:
            first = None if own.first_alert is None else np.asarray(own.first_alert)[at]
            score = None if own.score is None else np.asarray(own.score)[at]
            guards[name] = GuardOutcome(np.asarray(own.alert)[at], score, first)
    return Outcomes(table.ids, table.clusters, table.unsafe, table.first_hazard, table.timed, guards, made)


def stamp(guard: Guard) -> dict[str, Any]:
    """What outcomes are bound to: the weights of a calibrated guard, and its thresholds."""
    calibration = guard.calibration
    assert calibration is not None
    return {"weights": guard.weights, "block": calibration.lambda_block, "hold": calibration.lambda_hold}


def read_outcomes(path: Path) -> Outcomes:
    """Reads what :meth:`Outcomes.write` wrote.

    Raises:
        EvaluationError: there is nothing, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["outcomes"] != VERSION:
            raise EvaluationError(f"{path}: version {found['outcomes']!r}, expected {VERSION}")
        n = len(found["ids"])
        guards = {
            name: GuardOutcome(
                _column(own["alert"], n, np.bool_),
                None if own["score"] is None else _column([np.inf if s is None else s for s in own["score"]], n, float),
                None if own["first_alert"] is None else _column(own["first_alert"], n, np.int64),
            )
            for name, own in found["guards"].items()
        }
        return Outcomes(
            ids=tuple(found["ids"]),
            clusters=tuple(found["clusters"]),
            unsafe=_column(found["unsafe"], n, np.bool_),
            first_hazard=_column(found["first_hazard"], n, np.int64),
            timed=_column(found["timed"], n, np.bool_),
            guards=guards,
            made=dict(found["made"]),
        )
    except OSError as error:
        raise EvaluationError(f"{path}: {error.strerror or error}; `jaxguard evaluate` writes it") from error
    except (ValueError, LookupError, TypeError) as error:
        raise EvaluationError(f"{path}: {error!r}, expected what `jaxguard evaluate` wrote") from error


def _column(values: Sequence[float], n: int, kind: type) -> np.ndarray:
    column: np.ndarray = np.asarray(values, kind)
    if column.shape != (n,):
        raise ValueError(f"a column has shape {column.shape}, expected ({n},)")
    return column
