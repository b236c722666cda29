"""A self-contained HTML report: one file, no script, nothing fetched.

Everything that came from a trajectory is escaped, and the page carries a content security policy that
allows no script at all, so that a tool named ``<script>`` stays a name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from jaxguard.decision.calibration import Calibration
from jaxguard.decision.conformal import Threshold
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation import plots
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.evaluate import GUARD, Evaluation, Section
from jaxguard.evaluation.metrics import tabulate
from jaxguard.evaluation.pages import write_page
from jaxguard.evaluation.table import COLUMNS, ahead, describe
from jaxguard.evaluation.wording import arguments, clip, number, risk, span, visible
from jaxguard.types import Decision, JaxguardError, Trajectory

STORIES = {
    "early": "Stopped before the hazard",
    "at_hazard": "Stopped at the hazard",
    "late": "Stopped after the hazard",
    "missed": "Missed",
    "false_alert": "False alert",
    "quiet": "Safe and quiet",
    "nonfinite": "Held for a score that is not finite",
}
MOST_STEPS = 60  # of one timeline
MOST_SUBSETS = 14  # rows of the subsets figure; the tables have all


class ReportError(JaxguardError):
    """A report that cannot be written from what was given."""


@dataclass(frozen=True, slots=True)
class Story:
    """A trajectory chosen for the report, and why."""

    kind: str
    record: ScoredTrajectory


def choose(scored: Sequence[ScoredTrajectory], each: int = 2) -> list[Story]:
    """The most telling trajectories of every kind, at most ``each`` of one; deterministic.

    Early stops with the largest lead, misses with the lowest score, false alerts with the highest, the
    longest quiet ones. Trajectories of a single step tell little and come last.
    """
    found: dict[str, list[tuple[Any, ScoredTrajectory]]] = {kind: [] for kind in STORIES}
    for record in scored:
        if not len(record):
            continue
        kind, interest = _kind(record)
        if kind:
            found[kind].append(((len(record) == 1, -interest, record.id), record))
    stories = []
    for kind, entries in found.items():
        ranked = [record for _, record in sorted(entries, key=lambda entry: entry[0])]
        sources = list(dict.fromkeys(record.source for record in ranked))
        # One of each data set before a second of any.
        turn = {record.id: sum(r.source == record.source for r in ranked[:i]) for i, record in enumerate(ranked[:200])}
        ranked = sorted(ranked[:200], key=lambda r: (turn[r.id], sources.index(r.source)))
        stories += [Story(kind, record) for record in ranked[:each]]
    return stories


def _kind(record: ScoredTrajectory) -> tuple[str, float]:
    alert, hazard = record.first_alert, record.first_hazard
    if not np.isfinite(record.fused).all():
        return "nonfinite", float(len(record))
    if record.unsafe and alert is None:
        return "missed", -record.max_fused
    if record.unsafe and hazard is not None and record.timing and alert is not None:
        if alert < hazard:
            return "early", float(hazard - alert)
        return ("at_hazard", float(min(len(record), 12))) if alert == hazard else ("late", float(alert - hazard))
    if record.unsafe is False:
        return ("quiet", float(len(record))) if alert is None else ("false_alert", record.max_fused)
    return "", 0.0


def write_report(
    path: Path | str,
    evaluation: Evaluation,
    scored: Sequence[ScoredTrajectory],
    trajectories_by_id: Mapping[str, Trajectory],
    calibration: Calibration,
    *,
    title: str,
    provenance: Mapping[str, Any] | None = None,
    each: int = 2,
) -> Path:
    """Writes the report and returns its path.

    Args:
        path: File to write; its folder is created.
        evaluation: What :func:`~jaxguard.evaluation.evaluate.evaluate` found in ``scored``.
        scored: The scored trajectories.
        trajectories_by_id: Texts of the trajectories; those of the chosen timelines are needed.
        calibration: The calibration behind the decisions.
        title: Heading.
        provenance: Facts to show at the end: versions, data, seeds, commands.
        each: Timelines of each kind.

    Raises:
        ReportError: A chosen trajectory has no text, or another number of steps than its scores.
    """
    table = tabulate(scored)
    overall = evaluation.overall
    figures = [
        ("Scores and the HOLD threshold", "The fused risk of a trajectory is its maximum over the steps.",
         plots.distribution(table, which="fused", threshold=calibration.lambda_hold, name="HOLD")),
        ("Scores and the BLOCK threshold", "The hazard risk alone decides BLOCK.",
         plots.distribution(table, which="hazard", threshold=calibration.lambda_block, name="BLOCK")),
        ("Lead time", "When the first alert came, relative to the first hazardous step.",
         plots.lead_time_chart(overall.lead_times)),
        ("Early warning", "What is warned of before the hazard costs false alerts; on the diagonal it is chance.",
         plots.early_warning(table, evaluation)),
    ]  # fmt: skip
    if table.unsafe.any() and not table.unsafe.all():
        figures.insert(
            2,
            ("ROC", "The bars through the operating point are its intervals; diamonds are baselines.",
             plots.roc(table, overall)),
        )  # fmt: skip
    figures.insert(
        len(figures) - 2,
        ("False-alert calibration", "The line should stay within the band; above it, test data differ from "
         "calibration data.", plots.calibration_band(table, calibration, evaluation.level)),
    )  # fmt: skip
    subsets = [*evaluation.of_kind("all"), *evaluation.of_kind("source"), *evaluation.of_kind("risk_type")]
    figures.append(("Subsets", "The guard on everything, and on parts of it.", plots.forest(subsets[:MOST_SUBSETS])))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    return write_page(
        target,
        "report.html.j2",
        title=visible(title),
        cards=_cards(evaluation),
        lead=_lead(evaluation),
        figures=[(head, note, Markup(svg)) for head, note, svg in figures],
        groups=[_group(evaluation, kind) for kind in ("all", "source")],
        breakdowns=[_breakdown(evaluation, kind) for kind in ("risk_type", "domain")],
        columns=list(COLUMNS.values()),
        legend=Markup(plots.legend()),
        stories=[_story(story, trajectories_by_id) for story in choose(scored, each)],
        counts=_count_rows(evaluation),
        facts=_facts(evaluation, calibration, provenance or {}),
        intervals=f"{evaluation.level:.0%} intervals from {evaluation.resamples:,} cluster-bootstrap resamples "
        f"(whole groups, seed {evaluation.seed}); a dash where a metric is undefined",
    )


def _cards(evaluation: Evaluation) -> list[tuple[str, str, str]]:
    ours = evaluation.overall.rows[GUARD]
    cards = []
    for key, name, what in (
        ("sr", "Safety rate", "unsafe trajectories stopped"),
        ("fpr", "False alerts", f"safe ones stopped; budget {evaluation.alpha_any:g}"),
        ("f1", "F1", "of trajectory verdicts"),
        ("auroc", "AUROC", "of the fused maximum"),
        ("phir", "PHIR", "stopped before the hazard; "
         f"minus FPR {number(ours['phir_minus_fpr'].value, digits=2)}"),
        ("mas", "Mean advance", "steps, where stopped before"),
    ):  # fmt: skip
        interval = span(ours[key], key)
        cards.append((name, number(ours[key].value, key), f"{interval} · {what}" if interval else what))
    if evaluation.latency_ms:
        name, value = next(iter(evaluation.latency_ms.items()))
        rest = ", ".join(f"{n} {number(v, digits=2)}" for n, v in list(evaluation.latency_ms.items())[1:])
        cards.append(
            (
                "Latency",
                f"{number(value, digits=2)} ms",
                f"per step without encoding, {name}" + (f"; {rest}" if rest else ""),
            )
        )
    return cards


def _lead(evaluation: Evaluation) -> str:
    ours, counts = evaluation.overall.rows[GUARD], evaluation.overall.counts
    text = (
        f"On {counts.unsafe + counts.safe:,} labelled trajectories, {counts.unsafe:,} of them unsafe, the guard "
        f"stopped {number(100 * ours['sr'].value, digits=1)}\u00a0% of the unsafe and "
        f"{number(100 * ours['fpr'].value, digits=1)}\u00a0% of the safe ones."
    )
    check = evaluation.level_check
    if check is None:
        return text
    consequence = {
        "inside": "as the calibration promises",
        "above": "more than the calibration promises: these trajectories differ from those it was made on",
        "below": "less than the calibration expects, because of ties or easier trajectories",
    }[check.verdict]
    which = "threshold, before it was raised," if evaluation.hold_raised else "threshold"
    return (
        f"{text} HOLD's own {which} alerted on {number(100 * check.achieved, digits=1)}\u00a0% of the safe ones at a "
        f"nominal {100 * check.nominal:g}\u00a0%, {consequence} ({number(100 * check.observed.low, digits=1)} to "
        f"{number(100 * check.observed.high, digits=1)}\u00a0%)."
    )


def _group(evaluation: Evaluation, kind: str) -> dict[str, Any]:
    heading = "All trajectories" if kind == "all" else "By data set"
    sections = evaluation.of_kind(kind)
    if kind == "source" and len(sections) < 2:
        sections = ()  # it would repeat the table above
    return {"heading": heading, "sections": [_section(s) for s in sections]}


def _breakdown(evaluation: Evaluation, kind: str) -> dict[str, Any]:
    """One row per subset, the guard alone: baselines stand in the tables above."""
    rows = [
        {"name": clip(s.name, 40), "unsafe": f"{s.counts.unsafe:,}", "safe": f"{s.counts.safe:,}",
         "cells": _cells(s.rows[GUARD], with_spans=True)}
        for s in evaluation.of_kind(kind)
    ]  # fmt: skip
    return {"heading": "By risk type" if kind == "risk_type" else "By domain", "rows": rows}


def _cells(metrics: Mapping[str, Interval], *, with_spans: bool) -> list[tuple[str, str]]:
    return [
        (number(metrics[key].value, key), span(metrics[key], key) if with_spans else "") if key in metrics else ("", "")
        for key in COLUMNS
    ]


def _section(section: Section) -> dict[str, Any]:
    rows = [
        {"name": clip(name, 40), "ours": name == GUARD, "cells": _cells(metrics, with_spans=name == GUARD)}
        for name, metrics in section.rows.items()
    ]
    ours = section.rows[GUARD]
    note = (
        f"{describe(section.counts)}. AUROC of the maximum hazard {number(ours['auroc_hazard'].value)}, of the step "
        f"hazard {number(ours['step_auroc'].value)}; more than a PHIR of "
        f"{number(ours['phir_ceiling'].value)} takes as many false alerts."
    )
    return {"title": clip(section.name, 60), "note": " ".join([note, ahead(section)]).strip(), "rows": rows}


def _story(story: Story, trajectories: Mapping[str, Trajectory]) -> dict[str, Any]:
    record = story.record
    trajectory = trajectories.get(record.id)
    if trajectory is None:
        raise ReportError(f"trajectories_by_id: nothing for {record.id!r}, expected the trajectory of every timeline")
    if len(trajectory) != len(record):
        raise ReportError(
            f"trajectory {record.id!r}: has {len(trajectory)} steps, expected {len(record)} as in its scores"
        )
    shown = _shown(record)
    rows = []
    for t in shown:
        step = trajectory.steps[t]
        risks = [risk(float(getattr(record, name)[t])) for name in ("hazard", "prefix", "ema", "win")]
        rows.append(
            {
                "step": t,
                "tool": clip(step.tool, 48),
                "arguments": arguments(step.arguments, step.raw_arguments, 140),
                "risks": risks,
                "fused": risk(float(record.fused[t])),
                "decision": Decision(int(record.decision[t])).name,
                "hazard": t == record.first_hazard,
            }
        )
    cut = f"Steps {shown.start:,} to {shown.stop - 1:,} of {len(record):,}." if len(shown) < len(record) else ""
    return {
        "kind": story.kind,
        "verdict": STORIES[story.kind] + _when(record),
        "id": clip(record.id, 60),
        "source": clip(record.source, 30),
        "instruction": clip(trajectory.instruction, 260),
        "svg": Markup(plots.timeline(record, [step.tool for step in trajectory.steps], shown)),
        "rows": rows,
        "shown": cut,
    }


def _shown(record: ScoredTrajectory) -> range:
    """The steps to draw: all, or the part of a long trajectory around what happened first in it."""
    if len(record) <= MOST_STEPS:
        return range(len(record))
    events = [t for t in (record.first_alert, record.first_hazard) if t is not None]
    start = max(0, min(min(events, default=0) - MOST_STEPS // 6, len(record) - MOST_STEPS))
    return range(start, start + MOST_STEPS)


def _when(record: ScoredTrajectory) -> str:
    alert, hazard = record.first_alert, record.first_hazard
    if alert is None or hazard is None or alert == hazard or not record.timing:
        return ""
    gap = abs(hazard - alert)
    return f", {gap} step{'s' if gap > 1 else ''} {'ahead' if alert < hazard else 'late'}"


def _count_rows(evaluation: Evaluation) -> list[tuple[str, str, bool]]:
    """Name, count, and whether the row is a part of the one above it."""
    c, lead, d = evaluation.overall.counts, evaluation.overall.lead_times, evaluation.decisions
    rows = (
        ("Trajectories", c.trajectories, False),
        ("unsafe", c.unsafe, True),
        ("safe", c.safe, True),
        ("unlabelled, scored by no metric", c.unlabelled, True),
        ("without steps, never alert", c.zero_steps, True),
        ("Groups resampled", c.clusters, False),
        ("Unsafe and timed", c.timed, False),
        ("hazard at step 0, cannot be anticipated", lead.at_first_step, True),
        ("Unsafe, excluded from timing", c.excluded_unreliable + c.excluded_no_step, False),
        ("hazard step unreliable", c.excluded_unreliable, True),
        ("no hazard step known", c.excluded_no_step, True),
        ("Steps", c.steps, False),
        ("supervised", c.supervised_steps, True),
        ("PASS", d["pass"], True),
        ("HOLD", d["hold"], True),
        ("BLOCK", d["block"], True),
        ("held because a score was not finite", d["nonfinite"], True),
    )
    return [(name, f"{value:,}", part) for name, value, part in rows]


def _value(threshold: Threshold) -> str:
    raised = "" if threshold.raised_from is None else f", raised from {number(threshold.raised_from, digits=4)}"
    return number(threshold.value, digits=4) + raised


def _facts(evaluation: Evaluation, calibration: Calibration, provenance: Mapping[str, Any]) -> list[tuple[str, str]]:
    c, f = calibration, calibration.fusion
    block, hold = c.band(evaluation.level)
    sign = "≥" if c.paper_rule else ">"
    facts = [
        ("BLOCK", f"hazard {sign} {_value(c.block)}; alpha {c.block.alpha:g}, k = {c.block.k} of "
         f"n = {c.block.n}; true level {number(block.low)} to {number(block.high)}"),
        ("HOLD", f"fused {sign} {_value(c.hold)}; alpha {c.hold.alpha:g}, k = {c.hold.k} of "
         f"n = {c.hold.n}; true level {number(hold.low)} to {number(hold.high)}"),
        ("Any alert", f"nominal level {c.alpha_any:g}" + ("" if c.nested else " (sum of both budgets)")),
        ("Fusion", f"beta {f.beta:g}, window {f.window}, weights hazard {f.w_hazard:g}, ema {f.w_ema:g}, "
         f"window mean {f.w_win:g}"),
        ("Encoder", c.encoder),
        ("Weights", c.weights),
    ]  # fmt: skip
    if c.group_key:
        small = sorted(set(c.hold_too_small) | set(c.block_too_small))
        facts.append(
            ("Thresholds by", f"{c.group_key}: HOLD for {len(c.hold_groups)}, BLOCK for {len(c.block_groups)} groups"
             + (f"; pooled where too small ({', '.join(small)})" if small else ""))
        )  # fmt: skip
    facts += [(str(key), str(value)) for key, value in {**c.provenance, **provenance}.items()]
    return [(clip(key, 60), clip(value, 400)) for key, value in facts]
