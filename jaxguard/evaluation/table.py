"""The evaluation as plain text, at most 100 columns wide."""

from __future__ import annotations

import math
import textwrap

from jaxguard.evaluation.evaluate import GUARD, PAIRED, Counts, Evaluation, Section
from jaxguard.evaluation.wording import number, span, visible

COLUMNS = {
    "sr": "SR",
    "fpr": "FPR",
    "f1": "F1",
    "precision": "Prec",
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "phir": "PHIR",
    "phir_minus_fpr": "PHIR-FPR",
    "mas": "MAS",
}
WIDTH = 100
TITLES = {"all": "All trajectories", "source": "Data set", "risk_type": "Risk type", "domain": "Domain"}


def render(evaluation: Evaluation) -> str:
    """Tables of all sections, with intervals under the guard's row."""
    e = evaluation
    lines = []
    for section in e.sections:
        lines += [*_section(section), ""]
    notes = [
        f"Under {GUARD}: {e.level:.0%} cluster-bootstrap intervals, {e.resamples:,} resamples, seed {e.seed}.",
        f"Thresholds: BLOCK hazard > {e.lambda_block:.4f} (alpha {e.alpha_block:g}), HOLD fused > "
        f"{e.lambda_hold:.4f} (alpha {e.alpha_hold:g}), {e.calibration_n:,} safe trajectories.",
    ]
    if e.level_check is not None:
        c = e.level_check
        raised = " before it was raised" if e.hold_raised else ""
        notes.append(
            f"False-alert level of HOLD{raised}: nominal {c.nominal:g}, achieved {c.achieved:.3f} on "
            f"{c.tested:,} safe; expected {c.observed.low:.3f}–{c.observed.high:.3f}: {c.verdict} the band."
        )
    if e.latency_ms:
        notes.append(
            "Latency of a step without encoding, ms: "
            + ", ".join(f"{name} {value:.2f}" for name, value in e.latency_ms.items())
            + "."
        )
    for w in e.early_warning:
        lead = f", {w.lead:.1f} steps ahead on average" if w.phir else ""
        notes.append(
            f"Early warning at alpha {w.alpha:g}: {w.phir:.3f} of the timed unsafe trajectories before their "
            f"hazard{lead}; {w.fpr:.3f} of the safe ones."
        )
    decided = ", ".join(f"{name} {count:,}" for name, count in e.decisions.items() if name != "nonfinite")
    notes.append(f"Steps: {decided}; held because a score was not finite: {e.decisions['nonfinite']:,}.")
    return "\n".join(lines + [line for note in notes for line in textwrap.wrap(note, WIDTH)]) + "\n"


def describe(counts: Counts) -> str:
    """Counts in one sentence, the excluded ones included."""
    c = counts
    text = f"{c.trajectories:,} trajectories ({c.unsafe:,} unsafe, {c.safe:,} safe) in {c.clusters:,} groups"
    notes = [
        f"{count:,} {what}"
        for count, what in (
            (c.unlabelled, "unlabelled"),
            (c.zero_steps, "without steps"),
            (c.excluded_unreliable + c.excluded_no_step, "unsafe not timed"),
        )
        if count
    ]
    return text + ("; " + ", ".join(notes) if notes else "")


def ahead(section: Section) -> str:
    """By how much the guard's AUROC is above that of each rival that ranks, with intervals of the difference."""
    told = []
    for name, metrics in section.rows.items():
        found = metrics.get("auroc_ahead")
        if found is not None and math.isfinite(found.value):
            told.append(f"{visible(name)} by {number(found.value)} ({number(found.low)} to {number(found.high)})")
    return f"AUROC ahead of {', '.join(told)}." if told else ""


def differences(section: Section) -> str:
    """A row per rival: by how much the guard is ahead of it, with intervals from the same resamples."""
    titles = [COLUMNS[metric] for metric in PAIRED]
    lines = [f"{'ahead of':18}" + "".join(f"{title:>27}" for title in titles)]
    for name, metrics in section.rows.items():
        found = [metrics.get(f"{metric}_ahead") for metric in PAIRED]
        if any(found):
            cells = ["" if i is None else f"{number(i.value)} ({number(i.low)} to {number(i.high)})" for i in found]
            lines.append(f"{visible(name)[:17]:18}" + "".join(f"{cell:>27}" for cell in cells))
    return "\n".join(lines) + "\n"


def _section(section: Section) -> list[str]:
    title = TITLES[section.kind] if section.kind == "all" else f"{TITLES[section.kind]}: {visible(section.name)}"
    lines = [title[:WIDTH], *_wrap(describe(section.counts))]
    lines.append(f"{'':18}" + "".join(f"{head:>9}" for head in COLUMNS.values()))
    for name, metrics in section.rows.items():
        cells = [number(metrics[key].value, key) if key in metrics else "" for key in COLUMNS]
        lines.append(f"{visible(name)[:17]:18}" + "".join(f"{cell:>9}" for cell in cells))
        if name == GUARD:
            spans = [span(metrics[key], key) if key in metrics else "" for key in COLUMNS]
            if any(spans):
                lines.append(f"{'':18}" + "".join(f"{cell:>9}" for cell in spans))
    ours = section.rows[GUARD]
    lines += _wrap(
        f"max hazard AUROC {number(ours['auroc_hazard'].value)}, step hazard AUROC "
        f"{number(ours['step_auroc'].value)} on {section.counts.supervised_steps:,} steps; "
        f"timeliness {number(ours['timeliness'].value)}; more than a PHIR of "
        f"{number(ours['phir_ceiling'].value)} takes as many false alerts"
    )
    return lines + _wrap(ahead(section))


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
