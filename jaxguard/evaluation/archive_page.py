"""A scored archive as a page, in the look of the evaluation report, and as a summary for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from jaxguard.evaluation import plots
from jaxguard.evaluation.archive import KEYS, PLACES, Archive, read_archive
from jaxguard.evaluation.archive_leads import EACH, Lead
from jaxguard.evaluation.lines import Line, line_chart
from jaxguard.evaluation.pages import write_page
from jaxguard.evaluation.svg import COLORS
from jaxguard.evaluation.table import WIDTH
from jaxguard.evaluation.tally import KEPT, Row, Tally, together
from jaxguard.evaluation.wording import clip, number, risk, visible

FOLDER = "report"
MOST_ROWS = 15
"""Rows of a breakdown; the rest are one row."""
MOST_REASONS = 15
SURE = 0.01
"""Level below which a difference from the calibration set is taken as one."""
_HEADINGS = {"source": "Format", "tool": "Tool", "service": "Service", "domain": "Domain"}


@dataclass(frozen=True)
class Warning:
    """What a reader must see before anything else."""

    title: str
    text: str


def report_archive(folder: Path) -> tuple[Archive, Path]:
    """Reads a folder that scoring wrote, and writes the page ``report/report.html`` there.

    Raises:
        ResultsError: It is no such folder, or damaged.
    """
    archive = read_archive(folder)
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    return archive, _write(target / "report.html", archive)


def warnings(archive: Archive) -> list[Warning]:
    """What is not as it should be: an unfinished run, a shift, files that could not be read."""
    found = []
    if archive.results.unfinished:
        parts = f"; {_some(archive.incomplete)} only in part" if archive.incomplete else ""
        found.append(
            Warning("Unfinished", f"{archive.results.unfinished}. The figures are those of the "
                    f"{len(archive.results.shards):,} shards that are finished{parts}. The same `jaxguard score` "
                    "command goes on.")
        )  # fmt: skip
    drift = archive.drift
    if drift.alarm_at is not None:
        place = (
            "" if drift.alarm_place is None else f" ({clip(drift.alarm_place[0], 80)}, record {drift.alarm_place[1]})"
        )
        found.append(
            Warning("Shift alarm", f"From about trajectory {drift.alarm_at:,}{place} on, trajectories no longer look "
                    "like the guard's calibration set of safe ones: attacks, or another kind of traces, on which the "
                    "false-alert level does not hold; see `jaxguard recalibrate`.")
        )  # fmt: skip
    if unread := _unread(archive):
        found.append(
            Warning("Unread files", f"{_some(list(unread))} could not be read; another run tries again.")
        )  # fmt: skip
    return found


def render(archive: Archive) -> str:
    """The summary for a terminal, at most 100 columns wide."""
    lines = [line for own in warnings(archive) for line in _wrap(f"{own.title.upper()}: {own.text}")]
    lines += ["", *_wrap(_scored(archive)), ""] if lines else [*_wrap(_scored(archive)), ""]
    counts = archive.results.counts
    total = archive.breakdowns["source"].total()
    lines.append(f"{'':22}{'count':>14}{'HOLD':>12}{'BLOCK':>12}")
    decided = {name: archive.decisions.get(name, 0) for name in ("HOLD", "BLOCK")}
    for name, size, hold, block in (
        ("trajectories", counts["trajectories"], decided["HOLD"], decided["BLOCK"]),
        ("steps", total.count, total.hold, total.block),
    ):
        lines.append(f"{name:22}{size:>14,}{_percent(hold, size):>12}{_percent(block, size):>12}")
    lines += ["", f"{'Read first':44}{'decision':>10}{'fused':>9}{'step':>8}  file, record"]
    for lead in archive.leads[:10]:
        what = lead.id if lead.instruction is None else lead.instruction
        lines.append(
            f"{clip(what, 43):44}{lead.decision:>10}{_risk(lead.max_fused):>9}{lead.peak:>8,}  "
            f"{clip(lead.file, 25 - len(str(lead.record)))}, {lead.record}"
        )
    for key in ("tool", *KEYS, "source"):
        lines += _table(key, archive.breakdowns[key])
    lines += ["", *_wrap(_drift(archive))]
    if archive.detection is not None:
        lines += _wrap(_detection(archive))
    for reason in list(archive.reasons.values())[:3]:
        lines += _wrap(f"Rejected {reason.count:,} like {clip(reason.places[0], 80)}: {clip(reason.example, 150)}")
    return "\n".join(lines) + "\n"


def _table(key: str, tally: Tally, most: int = 6) -> list[str]:
    rows, rest, _ = _capped(tally, most)
    if not rows or (len(rows) == 1 and key != "tool" and not rest):
        return []  # it would repeat the totals
    lines = ["", f"{_HEADINGS[key]:44}{'steps':>12}{'HOLD':>10}{'BLOCK':>10}{'mean haz':>10}{'max haz':>10}"]
    for name, row in rows + rest:
        cells = (f"{row.count:,}", _percent(row.hold, row.count), _percent(row.block, row.count))
        lines.append(
            f"{clip(name, 43):44}{cells[0]:>12}{cells[1]:>10}{cells[2]:>10}{risk(row.mean):>10}{risk(row.largest):>10}"
        )
    return lines


def _capped(tally: Tally, most: int) -> tuple[list[tuple[str, Row]], list[tuple[str, Row]], int]:
    """The first rows, and those that stand for all others; how many names there are."""
    rows = tally.rows()
    shown = [(row.name or "(no name)", row) for row in rows[:most]]
    rest = []
    if len(rows) > most:
        rest.append((f"{len(rows) - most:,} more", together(rows[most:])))
    if (later := tally.later()) is not None:
        rest.append((f"names beyond the first {KEPT:,}", later))
    return shown, rest, len(rows)


def _write(path: Path, archive: Archive) -> Path:
    return write_page(
        path,
        "archive.html.j2",
        title=f"Archive report: {clip(archive.results.folder.resolve().name, 80)}",
        lead=_scored(archive),
        warnings=warnings(archive),
        cards=_cards(archive),
        leads=[_lead(own) for own in archive.leads],
        leads_note=f"The most severe decision first, then the highest fused risk, at most {EACH} of one instruction "
        "(numbers aside) or, where the folder does not hold it, of one sequence of tools. Arguments and observations "
        "are shown around the riskiest step; a step is judged before it runs.",
        legend=Markup(plots.legend()),
        breakdowns=[made for key in ("tool", *KEYS, "source") if (made := _breakdown(key, archive.breakdowns[key]))],
        figures=_figures(archive),
        drift=_drift(archive),
        files=_breakdown_files(archive),
        detection=None if archive.detection is None else _detection(archive),
        rejects=_rejects(archive),
        unread=[(clip(name, 120), clip(why, 240)) for name, why in list(_unread(archive).items())[:MOST_ROWS]],
        skipped=_skipped(archive),
        counts=_count_rows(archive),
        facts=_facts(archive),
    )


def _scored(archive: Archive) -> str:
    counts = archive.results.counts
    files = len(archive.results.manifest["files"]) if archive.results.manifest else len(
        {member.key for shard in archive.results.shards for member in shard.members}
    )  # fmt: skip
    return (
        f"{counts['records']:,} records of {files:,} {'file' if files == 1 else 'files'} = {counts['converted']:,} "
        f"scored + {counts['rejected']:,} rejected: {counts['trajectories']:,} trajectories, {counts['steps']:,} steps."
    )


def _cards(archive: Archive) -> list[tuple[str, str, str]]:
    counts, drift, total = archive.results.counts, archive.drift, archive.breakdowns["source"].total()
    n = counts["trajectories"]
    cards = [
        (name, _percent(archive.decisions.get(name, 0), n),
         f"{archive.decisions.get(name, 0):,} trajectories; {_percent(getattr(total, name.lower()), total.count)} of "
         "the steps")
        for name in ("BLOCK", "HOLD")
    ]  # fmt: skip
    cards.append(("Steps", f"{counts['steps']:,}", f"of {n:,} trajectories"))
    cards.append(("Rejected", f"{counts['rejected']:,}", f"of {counts['records']:,} records"))
    alarm = "ALARM" if drift.alarm_at is not None else "none" if drift.evidence is not None else "–"
    what = (
        f"log10 evidence {drift.evidence:g}, alarm above 2" if drift.evidence is not None else "known when a run ends"
    )
    cards.append(("Shift", alarm, what))
    cards.append(("Distance", number(drift.distance, digits=2), "from the calibration set, 0 to 1 (KS)"))
    return cards


def _drift(archive: Archive) -> str:
    d, calibration = archive.drift, archive.results.calibration
    if not d.n:
        return "No trajectory to compare with the calibration set."
    text = (
        f"{_percent(round(d.alerts[1] * d.n), d.n)} of the trajectories are HOLD or BLOCK; of safe ones like those of "
        f"the calibration set at most {100 * calibration.alpha_any:g} % are expected. "
    )
    p = "p < 0.0001" if d.p_value < 1e-4 else f"p = {d.p_value:.4f}"
    found = f"KS distance {number(d.distance)}, {p}"
    theirs = f"those of the {d.calibration_n:,} calibration trajectories"
    if d.p_value >= SURE:
        return f"{text}Their maxima of the fused risk are, as far as can be told, distributed like {theirs} ({found})."
    direction = "higher" if d.below[0] < d.below[1] else "lower"
    few = (
        "" if direction == "higher" else " Few alerts are then no sign of safety: thresholds may be out of reach here."
    )
    size = "a little" if d.distance < 0.1 else "clearly" if d.distance < 0.25 else "much"
    return (
        f"{text}Their maxima of the fused risk are {size} {direction} than {theirs} ({found}): "
        f"{100 * d.below[0]:.1f} % of them are at or below {_risk(d.at)}, of the calibration set "
        f"{100 * d.below[1]:.1f} %.{few}"
    )


def _figures(archive: Archive) -> list[tuple[str, str, Markup]]:
    d, calibration = archive.drift, archive.results.calibration
    if not d.n:
        return []
    ours, theirs = d.bins
    alpha = calibration.alpha_any
    found = [
        ("Maximum fused risk", "Of trajectories of the archive and of the safe ones of the calibration set.",
         Markup(plots.histogram("Distribution of the maximum fused risk of archive and calibration set",
                                {"calibration": theirs, "archive": ours}, x_label="maximum fused risk over the steps",
                                y_label="share of trajectories", threshold=calibration.lambda_hold, name="HOLD"))),
    ]  # fmt: skip
    diagonal = Line("no difference", [(0, 0), (1, 1)], COLORS["axis"], "3 4")
    points = [(0.0, 0.0), *((float(x), float(y)) for x, y in _thinned(d.curve))]
    cut = 1 - calibration.hold.k / calibration.n if calibration.hold.raised_from is None else math.nan
    lines = [diagonal, Line("archive", points, COLORS["unsafe"])]
    if math.isfinite(cut):
        lines.append(Line("HOLD threshold", [(1 - cut, 0), (1 - cut, 1)], COLORS["hold"], "6 4"))
    found.append(
        ("Shares at or below the same risk", "Below the diagonal the archive's risks are higher; the distance is the "
         "largest gap up or down.",
         line_chart("Share of the archive against share of the calibration set", lines, x_label="share of calibration "
                    "trajectories at or below", y_label="share of the archive's", high=1.0))
    )  # fmt: skip
    unit, unit_name = (1_000, "trajectory, thousands") if d.n >= 100_000 else (1, "trajectory")
    x = [(i + 0.5) * d.n / PLACES / unit for i in range(PLACES)]
    lines = [
        Line("HOLD or BLOCK", _known(x, d.places[:, 0]), COLORS["unsafe"]),
        Line("mean rank", _known(x, d.places[:, 1]), COLORS["safe"]),
        Line(f"expected at most {alpha:g}", [(0, alpha), (d.n / unit, alpha)], COLORS["muted"], "3 4"),
    ]
    if d.alarm_at is not None:
        lines.append(Line("alarm", [(d.alarm_at / unit, 0), (d.alarm_at / unit, 1)], COLORS["block"], "6 4"))
    found.append(
        ("Along the archive", "Share of alerting trajectories, and mean rank among the calibration maxima (0.5 without "
         "drift), in the order of files and records.",
         line_chart("Alerts along the archive", lines, x_label=unit_name, y_label="share, rank", high=1.0))
    )  # fmt: skip
    return found


def _known(x: Sequence[float], y: np.ndarray) -> list[tuple[float, float]]:
    return [(own, float(value)) for own, value in zip(x, y, strict=True) if np.isfinite(value)]


def _thinned(curve: np.ndarray, most: int = 600) -> np.ndarray:
    return curve[np.unique(np.linspace(0, len(curve) - 1, min(len(curve), most)).astype(int))]


def _detection(archive: Archive) -> str:
    d = archive.detection
    assert d is not None
    return (
        f"Of {d.unsafe + d.safe:,} labelled trajectories ({d.unsafe:,} unsafe, {d.safe:,} safe; "
        f"{archive.drift.n - d.unsafe - d.safe:,} have no label): safety rate {number(d.sr)}, false-alert rate "
        f"{number(d.fpr)}, AUROC of the maximum fused risk {number(d.auroc)}. Labels are those of the archive's files."
    )


def _breakdown(key: str, tally: Tally) -> dict[str, Any] | None:
    rows, rest, count = _capped(tally, MOST_ROWS)
    if not rows or (count == 1 and not rest and key != "tool"):
        return None
    return {"heading": _HEADINGS[key], "columns": ["steps", "HOLD", "BLOCK", "mean hazard", "max hazard"],
            "rows": [_cells(name, row) for name, row in rows],
            "rest": [_cells(name, row) for name, row in rest]}  # fmt: skip


def _breakdown_files(archive: Archive) -> dict[str, Any] | None:
    rows, rest, count = _capped(archive.drift.files, MOST_ROWS)
    if count < 2:
        return None
    return {"heading": "File", "columns": ["trajectories", "HOLD", "BLOCK", "mean rank", "max rank"],
            "rows": [_cells(name, row) for name, row in rows],
            "rest": [_cells(name, row) for name, row in rest]}  # fmt: skip


def _cells(name: str, row: Row) -> tuple[str, list[tuple[str, str]]]:
    unscored = f"{row.count - row.finite:,} not scored" if row.finite < row.count else ""
    return clip(name, 70), [
        (f"{row.count:,}", unscored),
        (_percent(row.hold, row.count), ""),
        (_percent(row.block, row.count), ""),
        (risk(row.mean), ""),
        (risk(row.largest), ""),
    ]


def _lead(lead: Lead) -> dict[str, Any]:
    shown = range(len(lead.scores))
    where = f"{', riskiest' if lead.decision == 'PASS' else ''} at step {lead.peak:,}"
    label = {True: ", labelled unsafe", False: ", labelled safe", None: ""}[lead.scores.unsafe]
    cut = (
        f"Steps {lead.first:,} to {lead.first + len(shown) - 1:,} of {lead.steps:,}. "
        if len(shown) < lead.steps
        else ""
    )
    alike = "the same tools" if lead.instruction is None else "this instruction, numbers aside,"
    more = f"At least {lead.more:,} more of {alike} are not shown." if lead.more else ""
    return {
        "decision": lead.decision,
        "verdict": f"{lead.decision}{where}, fused up to {_risk(lead.max_fused)}",
        "place": f"{lead.file}, record {lead.record}",
        "id": clip(lead.id, 80) + (f" · {lead.source}" if lead.source else "") + label,
        "instruction": lead.instruction,
        "svg": Markup(plots.timeline(lead.scores, lead.tools, shown, lead.first)),
        "note": cut + more,
        "rows": [
            {"step": own.number, "tool": clip(own.tool, 60), "arguments": own.arguments, "observation": own.observation,
             "hazard": risk(own.hazard), "fused": risk(own.fused), "decision": own.decision,
             "first_hazard": own.number - lead.first == lead.scores.first_hazard}
            for own in lead.near
        ],
    }  # fmt: skip


def _rejects(archive: Archive) -> list[tuple[str, str, str]]:
    found = [
        (f"{own.count:,}", clip(own.example, 240), clip(", ".join(own.places), 240))
        for own in list(archive.reasons.values())[:MOST_REASONS]
    ]
    rest = sum(own.count for own in list(archive.reasons.values())[MOST_REASONS:]) + archive.other_reasons
    return [*found, (f"{rest:,}", "other reasons", "see rejects/")] if rest else found


def _unread(archive: Archive) -> dict[str, str]:
    manifest = archive.results.manifest
    return {} if manifest is None else {str(name): str(why) for name, why in manifest["unread_files"].items()}


def _skipped(archive: Archive) -> str:
    manifest = archive.results.manifest
    return (
        "" if manifest is None or not manifest["skipped_files"] else _some([str(f) for f in manifest["skipped_files"]])
    )


def _some(names: Sequence[str], most: int = 5) -> str:
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(clip(name, 100) for name in names[:most]) + rest


def _count_rows(archive: Archive) -> list[tuple[str, str, bool]]:
    """Name, count, and whether the row is a part of the one above it."""
    counts, decided, total = archive.results.counts, archive.decisions, archive.breakdowns["source"].total()
    rows = (
        ("Records", counts["records"], False),
        ("converted", counts["converted"], True),
        ("rejected", counts["rejected"], True),
        ("Trajectories", counts["trajectories"], False),
        *((name, decided.get(name, 0), True) for name in ("PASS", "HOLD", "BLOCK")),
        ("without steps", counts["without_steps"], True),
        ("labelled unsafe", counts["unsafe"], True),
        ("labelled safe", counts["safe"], True),
        ("Steps", counts["steps"], False),
        ("PASS", total.count - total.hold - total.block, True),
        ("HOLD", total.hold, True),
        ("BLOCK", total.block, True),
        ("held because a score was not finite", counts["nonfinite_steps"], True),
        ("calls without a result", counts["unobserved_calls"], True),
        ("unparsable arguments", counts["unparsable_arguments"], True),
    )
    formats = [(name.partition(":")[2], value, True) for name, value in sorted(counts.items()) if name[:7] == "format:"]
    return [
        (clip(name, 60), f"{value:,}", part)
        for name, value, part in (*rows, ("Records by format", counts["records"], False), *formats)
    ]


def _facts(archive: Archive) -> list[tuple[str, str]]:
    job, c, manifest = archive.results.job, archive.results.calibration, archive.results.manifest
    run = manifest["last_run"] if manifest else {}
    sign = "≥" if c.paper_rule else ">"
    encoder = job.get("encoder")
    facts = [
        ("BLOCK", f"hazard {sign} {number(c.lambda_block, digits=4)}; alpha {c.block.alpha:g}"),
        ("HOLD", f"fused {sign} {number(c.lambda_hold, digits=4)}; alpha {c.hold.alpha:g}"),
        ("Calibration", f"{c.n:,} safe trajectories, {job.get('calibration')}"),
        ("Weights", str(job.get("weights"))),
        ("Encoder", ", ".join(f"{k} {v}" for k, v in encoder.items()) if isinstance(encoder, dict) else str(encoder)),
        ("Format", str(job.get("format") or "recognised record by record")),
        ("Reasoning", "read" if job.get("thought") else "not read"),
        ("jaxguard", str(job.get("jaxguard"))),
    ]
    if c.group_key:
        facts.append(("Thresholds by", f"{c.group_key}, HOLD for {', '.join(c.hold_groups) or 'none'}"))
    if run:
        facts.append(("Last run", f"{run.get('seconds')} s, {run.get('steps')} steps scored"))
    return [(name, clip(value, 300)) for name, value in facts]


def _percent(part: int, whole: int) -> str:
    if not whole:
        return "–"
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.05 or not part else "<0.1 %"


def _risk(value: float) -> str:
    return risk(value) if math.isfinite(value) else "not finite"


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(visible(text), WIDTH)
