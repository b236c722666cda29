"""Several evaluated runs side by side: seeds of one experiment, or experiments on one set."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from jaxguard.evaluation.evaluate import GUARD
from jaxguard.evaluation.table import COLUMNS
from jaxguard.evaluation.wording import number, visible
from jaxguard.types import JaxguardError

METRICS = {**COLUMNS, "timeliness": "Timely"}
RIVALS = {"logistic (step)": "Step", "logistic (pooled)": "Pooled", "logistic (bag)": "Bag"}
COMPARED = METRICS | RIVALS


class CompareError(JaxguardError):
    """A folder that holds no evaluation."""


def read_metrics(run: Path) -> dict[str, float]:
    """The guard's metrics on all trajectories of an evaluated run and its rivals' AUROC; NaN where undefined.

    Raises:
        CompareError: ``run`` was not evaluated, or its evaluation cannot be read.
    """
    path, again = run / "report" / "evaluation.json", f"run `jaxguard evaluate {run}`"
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["sections"][0]["rows"]
        values = {name: rows[GUARD][name]["value"] for name in METRICS}
        values |= {name: rows[name]["auroc"]["value"] if name in rows else None for name in RIVALS}
    except FileNotFoundError:
        raise CompareError(
            f"run folder {run}: no report/evaluation.json there; run `jaxguard evaluate {run}`"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CompareError(f"{path}: {error!r}, expected what `jaxguard evaluate` wrote; {again}") from error
    return {name: math.nan if value is None else float(value) for name, value in values.items()}


def render_comparison(runs: Sequence[Path]) -> str:
    """A table with a row per run, then mean, lowest and highest of every metric over the runs that define it.

    The last columns are the AUROC of the learnt rivals (:mod:`jaxguard.baselines.logistic`).
    """
    rows = [(visible(str(run)), read_metrics(run)) for run in runs]
    summary = []
    for name, pick in (("mean", lambda v: sum(v) / len(v)), ("lowest", min), ("highest", max)):
        defined = {m: [values[m] for _, values in rows if math.isfinite(values[m])] for m in COMPARED}
        summary.append((name, {metric: pick(v) if v else math.nan for metric, v in defined.items()}))
    width = max(len(name) for name, _ in rows + summary) + 2
    lines = [" " * width + "".join(f"{head:>9}" for head in COMPARED.values())]
    for name, values in rows + summary:
        lines.append(f"{name:{width}}" + "".join(f"{number(values[metric], metric):>9}" for metric in COMPARED))
    return "\n".join(lines) + "\n"
