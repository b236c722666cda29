"""Several evaluated runs side by side: seeds of one experiment, or experiments on one set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxguard.decision.calibration import Calibration
from jaxguard.evaluation.evaluate import GUARD
from jaxguard.evaluation.table import COLUMNS
from jaxguard.evaluation.wording import number, visible
from jaxguard.results import CALIBRATION
from jaxguard.traces.files import load_json
from jaxguard.types import JaxguardError

FIGURES = Path("report", "evaluation.json")
METRICS = {**COLUMNS, "timeliness": "Timely"}
RIVALS = {"logistic (step)": "Step", "logistic (pooled)": "Pooled", "logistic (bag)": "Bag"}
COMPARED = METRICS | RIVALS


class CompareError(JaxguardError):
    """A folder that holds no evaluation."""


@dataclass(frozen=True)
class Outcome:
    """What an evaluated run says on all its trajectories; NaN where undefined.

    Attributes:
        metrics: The guard's, and its rivals' AUROC; keys of :data:`COMPARED`.
        ahead: By rival, how much higher the guard's AUROC is, and the ends of the difference's interval.
    """

    metrics: dict[str, float]
    ahead: dict[str, tuple[float, float, float]]


def read_outcome(run: Path) -> Outcome:
    """Reads a run's evaluation.

    Raises:
        CompareError: ``run`` was not evaluated, or its evaluation cannot be read.
    """
    path, again = run / FIGURES, f"run `jaxguard evaluate {run}`"
    if (run / "router").exists():
        raise CompareError(f"run folder {run}: is a router's, expected guards' runs; its report has its own figures")
    try:
        found = load_json(path)
        now = _thresholds(run)
        if now is not None and now != (found["lambda_block"], found["lambda_hold"]):
            raise CompareError(f"{path}: is of other thresholds than the bundle's; {again} again")
        rows = found["sections"][0]["rows"]
        metrics = {name: _number(rows[GUARD][name]["value"]) for name in METRICS}
        metrics |= {name: _number(rows[name]["auroc"]["value"] if name in rows else None) for name in RIVALS}
        ahead = {name: rows[name]["auroc_ahead"] for name in RIVALS if name in rows}
        return Outcome(
            metrics, {name: (_number(d["value"]), _number(d["low"]), _number(d["high"])) for name, d in ahead.items()}
        )
    except FileNotFoundError:
        raise CompareError(
            f"run folder {run}: no report/evaluation.json there; run `jaxguard evaluate {run}`"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise CompareError(f"{path}: {error!r}, expected what `jaxguard evaluate` wrote; {again}") from error


def _thresholds(run: Path) -> tuple[float, float] | None:
    """Of the run's bundle as it is now; None where there is none."""
    file = run / "guard" / CALIBRATION
    if not file.exists():
        return None
    calibration = Calibration.from_json(file.read_text(encoding="utf-8"))
    return calibration.lambda_block, calibration.lambda_hold


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def render_comparison(runs: Sequence[Path]) -> str:
    """A table with a row per run, then mean, lowest and highest of every metric over the runs that define it.

    The last columns are the AUROC of the learnt rivals (:mod:`jaxguard.baselines.logistic`), the last lines say by how
    much the guard's is higher and in how many runs that exceeds the interval of the difference.

    Raises:
        CompareError: as :func:`read_outcome`, or a run is named twice.
    """
    if twice := [run for i, run in enumerate(runs) if run.resolve() in {other.resolve() for other in runs[:i]}]:
        raise CompareError(f"run folder {twice[0]}: named twice, expected each run once")
    outcomes = [read_outcome(run) for run in runs]
    rows = [(visible(str(run)), outcome.metrics) for run, outcome in zip(runs, outcomes, strict=True)]
    summary = []
    for name, pick in (("mean", lambda v: sum(v) / len(v)), ("lowest", min), ("highest", max)):
        defined = {m: [values[m] for _, values in rows if math.isfinite(values[m])] for m in COMPARED}
        summary.append((name, {metric: pick(v) if v else math.nan for metric, v in defined.items()}))
    width = max(len(name) for name, _ in rows + summary) + 2
    lines = [" " * width + "".join(f"{head:>9}" for head in COMPARED.values())]
    for name, values in rows + summary:
        lines.append(f"{name:{width}}" + "".join(f"{number(values[metric], metric):>9}" for metric in COMPARED))
    for rival, head in RIVALS.items():
        found = [o.ahead[rival] for o in outcomes if rival in o.ahead and math.isfinite(o.ahead[rival][0])]
        if found:
            lines.append(
                f"AUROC ahead of {head} by {number(sum(value for value, _, _ in found) / len(found))} on average; "
                f"beyond the interval in {sum(low > 0 for _, low, _ in found)} of {len(found)} runs, "
                f"behind beyond it in {sum(high < 0 for _, _, high in found)}"
            )
    return "\n".join(lines) + "\n"
