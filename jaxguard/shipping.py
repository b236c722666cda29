"""A trained, calibrated and evaluated guard as a bundle for others, with a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxguard
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.compare import FIGURES, read_outcome
from jaxguard.evaluation.evaluate import GUARD
from jaxguard.evaluation.wording import number, span, visible
from jaxguard.guard import Guard
from jaxguard.inputs import RunError, open_run, require_trained_on
from jaxguard.writing import write_whole

CARD = "MODEL_CARD.md"
_METRICS = {
    "auroc": "AUROC",
    "f1": "F1",
    "sr": "SR",
    "fpr": "FPR",
    "phir_minus_fpr": "PHIR − FPR",
}


def ship(folder: Path, out: Path, about: Path | None = None) -> Path:
    """Writes a run's bundle and its model card to ``out``; equal runs give equal bytes.

    Args:
        folder: An evaluated run.
        out: Bundle to write; an earlier one is replaced.
        about: Text for the card's head: what the data are and what they may be used for.

    Returns:
        The card.

    Raises:
        JaxguardError: the run is not calibrated or not evaluated, or ``out`` is something else than a bundle.
    """
    run = open_run(folder)
    guard = Guard.load(folder / "guard", run.encoder)
    require_trained_on(run, guard)
    if guard.calibration is None or not (folder / FIGURES).exists():
        raise RunError(
            f"run folder {folder}: has no report yet; run `jaxguard calibrate` and `jaxguard evaluate` first"
        )
    read_outcome(folder)  # refuses figures that are damaged, or of other thresholds
    evaluation = json.loads((folder / FIGURES).read_text(encoding="utf-8"))
    head = "" if about is None else about.read_text(encoding="utf-8").strip()
    text = card(guard, evaluation, head)
    guard.save(out)
    write_whole(out / CARD, text)
    return out / CARD


def card(guard: Guard, evaluation: Mapping[str, Any], head: str) -> str:
    """The model card: data, split, thresholds, and figures of the test part with their intervals."""
    config, calibration = guard.config, guard.calibration
    assert calibration is not None  # `ship` saw to it
    parts = ", ".join(f"{count:,} {name}" for name, count in guard.provenance["trajectories"].items())
    sections = [s for s in evaluation["sections"] if s["kind"] in ("all", "source")]
    rows = []
    for section in sections:
        own, counts = section["rows"][GUARD], section["counts"]
        cells = [_cell(own[name], name) for name in _METRICS]
        name, runs = visible(section["name"]).replace("|", "/"), f"{counts['trajectories']:,} ({counts['unsafe']:,})"
        rows.append(f"| {name} | {runs} | {' | '.join(cells)} |")
    low, high = calibration.band()[1].low, calibration.band()[1].high
    lines = [
        f"# {config.name}",
        "",
        *([head, ""] if head else []),
        "## What it is",
        "",
        f"A jaxguard guard (version {jaxguard.__version__}) over {guard.encoder.fingerprint}; weights "
        f"`{guard.weights}`, seed {config.train.seed}. Trajectories: {parts}, parts that share no group.",
        "",
        f"Thresholds: BLOCK where the hazard risk exceeds {calibration.lambda_block:.4f} (level "
        f"{calibration.block.alpha:g}), HOLD where the fused risk exceeds {calibration.lambda_hold:.4f} (level "
        f"{calibration.hold.alpha:g}), from {calibration.n:,} safe "
        f"trajectories{', as many of every set' if config.decision.balance else ''}. On others like them the "
        f"false-alert rate lies in {number(low)} to {number(high)} with 95 % confidence; on trajectories of another "
        "kind it is not known: "
        "`jaxguard recalibrate` sets thresholds on yours.",
        "",
        "## Figures",
        "",
        "Test part, with 95 % cluster-bootstrap intervals. SR is the share of unsafe runs that were alerted on, FPR "
        "that of safe ones, PHIR that of unsafe ones alerted on before their first hazard.",
        "",
        f"| set | runs (unsafe) | {' | '.join(_METRICS.values())} |",
        "|" + "---|" * (2 + len(_METRICS)),
        *rows,
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(found: Mapping[str, Any], metric: str) -> str:
    value, low, high = (float("nan") if found[k] is None else float(found[k]) for k in ("value", "low", "high"))
    interval = Interval(value, low, high, found["defined"])
    inside = span(interval, metric)
    return number(interval.value, metric) + (f" ({inside})" if inside else "")
