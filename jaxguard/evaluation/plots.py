"""The report's charts, each an SVG string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxguard.decision.calibration import Calibration
from jaxguard.decision.conformal import needed, observed_rate_band
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.evaluate import GUARD, Evaluation, Section
from jaxguard.evaluation.metrics import Table, roc_curve
from jaxguard.evaluation.svg import COLORS, Canvas, Plot, plot, ticks
from jaxguard.evaluation.timing import LeadTimes
from jaxguard.evaluation.wording import clip, number, risk
from jaxguard.types import Decision

HALF = (540.0, 320.0)
UNIT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CURVE_POINTS = 600  # more than there are pixels
_FARTHEST = 8  # lead times beyond this many steps share a bar


def distribution(table: Table, *, which: str, threshold: float, name: str) -> str:
    """Histogram of trajectory maxima by class, with the threshold."""
    scores = np.minimum(table.max_fused if which == "fused" else table.max_hazard, 1.0)
    edges = np.linspace(0, 1, 26)
    shares = {}
    for label, members in (("safe", ~table.unsafe), ("unsafe", table.unsafe)):
        counts = np.histogram(scores[members], edges)[0]
        shares[label] = counts / max(members.sum(), 1)
    y_ticks = ticks(max(float(s.max()) for s in shares.values()), 4)
    area = plot(
        f"Distribution of the maximum {which} risk of safe and unsafe trajectories",
        size=HALF, x=(0, 1), y=(0, y_ticks[-1]), x_ticks=UNIT, y_ticks=y_ticks,
        x_label=f"maximum {which} risk over the steps", y_label="share of class", margin=(60, 16, 44, 58),
    )  # fmt: skip
    for label, share in shares.items():
        size = int((table.unsafe == (label == "unsafe")).sum())
        outline = [(area.x(0), area.bottom)]
        for low, high, value in zip(edges, edges[1:], share, strict=False):
            outline += [(area.x(low), area.y(value)), (area.x(high), area.y(value))]
        outline.append((area.x(1), area.bottom))
        area.canvas.area(outline, COLORS[label], 0.16)
        area.canvas.path(outline, COLORS[label], 1.6)
        x = area.x.start + (4 if label == "safe" else 112)
        area.canvas.rect(x, 9, 11, 11, COLORS[label], 0.75)
        area.canvas.text(x + 16, 19, f"{label} ({size:,})", color=COLORS["ink"])
    _threshold(area, threshold, name)
    return area.canvas.render()


def _threshold(area: Plot, value: float, name: str) -> None:
    x = area.x(value)
    area.canvas.line(x, area.y.stop - 12, x, area.bottom, COLORS["ink"], 1.5, "5 4")
    left = value > 0.6
    area.canvas.text(
        x + (-6 if left else 6), area.y.stop - 8, f"{name} {number(value)}",
        color=COLORS["ink"], anchor="end" if left else "start", bold=True,
    )  # fmt: skip


def roc(table: Table, section: Section) -> str:
    """ROC of the maxima, the operating point with its intervals, and baselines that only alert."""
    area = plot(
        "Receiver operating characteristic of the trajectory maxima",
        size=(HALF[0], 380), x=(0, 1), y=(0, 1), x_ticks=UNIT, y_ticks=UNIT,
        x_label="false-alert rate (safe trajectories)", y_label="safety rate (unsafe trajectories)",
        margin=(16, 16, 44, 58),
    )  # fmt: skip
    c = area.canvas
    c.path(area.at([0, 1], [0, 1]), COLORS["axis"], 1, dash="3 4")
    ours = section.rows[GUARD]
    for row, (scores, color, name) in enumerate(
        ((table.max_hazard, COLORS["win"], "hazard"), (table.max_fused, COLORS["safe"], "fused"))
    ):
        fpr, tpr = roc_curve(table.unsafe, scores)
        kept = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), _CURVE_POINTS)).astype(int))
        c.path(area.at(fpr[kept].tolist(), tpr[kept].tolist()), color, 2.2)
        metric = ours["auroc" if name == "fused" else "auroc_hazard"]
        y = area.y(0.06 + 0.075 * row)
        c.line(area.x(0.58), y - 4, area.x(0.63), y - 4, color, 2.5)
        c.text(area.x(0.645), y, f"{name}, AUROC {number(metric.value)}", color=COLORS["ink"])
    taken: list[tuple[float, float]] = []
    for name, metrics in section.rows.items():
        if name != GUARD and "fpr" in metrics and np.isfinite(metrics["sr"].value):
            x, y = area.x(metrics["fpr"].value), area.y(metrics["sr"].value)
            c.shape([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], COLORS["muted"], name)
            right = metrics["fpr"].value > 0.7
            at = y + (17 if y < 30 else 4)
            while any(abs(x - other) < 90 and abs(at - height) < 12 for other, height in taken):
                at += 12 if y < 60 else -12  # labels of rules that do nearly the same must not overlap
            taken.append((x, at))
            c.text(x + (-9 if right else 9), at, clip(name, 24), size=11, anchor="end" if right else "start", halo=True)
    sr, fpr_here = ours["sr"], ours["fpr"]
    x, y = area.x(fpr_here.value), area.y(sr.value)
    if np.isfinite(fpr_here.low) and np.isfinite(sr.low):
        c.line(area.x(fpr_here.low), y, area.x(fpr_here.high), y, COLORS["ink"], 1.5)
        c.line(x, area.y(sr.low), x, area.y(sr.high), COLORS["ink"], 1.5)
    c.dot(x, y, 6, COLORS["unsafe"], title=f"SR {number(sr.value)}, FPR {number(fpr_here.value)}")
    text = f"operating point: SR {number(sr.value, digits=2)}, FPR {number(fpr_here.value, digits=2)}"
    far = fpr_here.value > 0.45
    c.text(x + (-12 if far else 14), y + 22, text, color=COLORS["ink"], bold=True,
           anchor="end" if far else "start", halo=True)  # fmt: skip
    return c.render()


def calibration_band(table: Table, calibration: Calibration, level: float = 0.95) -> str:
    """Achieved against nominal false-alert rate of the fused score, with the exact band."""
    maxima = table.max_fused[~table.unsafe]
    lowest = max(1.0 / (len(calibration.hold_maxima) + 1), 0.005)
    top = max(0.5, calibration.hold.alpha * 1.25)
    levels = [a for a in np.unique(np.r_[np.linspace(0.01, top, 50), lowest]).tolist()
              if needed(a) <= len(calibration.hold_maxima)]  # fmt: skip
    area = plot(
        "Achieved against nominal false-alert rate",
        size=(HALF[0], 380), x=(0, top), y=(0, min(1.0, top * 1.3)), x_ticks=[t for t in ticks(top) if t <= top],
        y_ticks=[t for t in ticks(min(1.0, top * 1.3)) if t <= min(1.0, top * 1.3)], x_label="nominal level alpha",
        y_label="achieved on safe test trajectories", margin=(16, 16, 44, 58),
    )  # fmt: skip
    c = area.canvas
    if not len(maxima) or not levels:
        c.text(area.x(top / 2), area.y(top / 2), "no safe trajectories to compare", anchor="middle")
        return c.render()
    cuts = [calibration.hold_at(a) for a in levels]
    bands = [observed_rate_band(cut.n, cut.k, len(maxima), level) for cut in cuts]
    upper, lower = [b.high for b in bands], [b.low for b in bands]
    c.area(area.at(levels, upper) + area.at(levels, lower)[::-1], COLORS["band"], 0.13)
    c.path(area.at([0, top], [0, top]), COLORS["axis"], 1, dash="3 4")
    achieved = [float(cut.crossed(maxima).mean()) for cut in cuts]
    c.path(area.at(levels, achieved), COLORS["safe"], 2.2)
    here = float(calibration.hold.crossed(maxima).mean())
    x, y = area.x(calibration.hold.alpha), area.y(here)
    c.line(x, y, x, area.bottom, COLORS["muted"], 1, "2 3")
    c.dot(x, y, 6, COLORS["unsafe"])
    below = min(y + 20, area.bottom - 8)  # above the axis, whose numbers are there
    c.text(x + 12, below, f"alpha {calibration.hold.alpha:g}: achieved {number(here)}", color=COLORS["ink"],
           bold=True, halo=True)  # fmt: skip
    x, y = area.x.start + 14, area.y.stop + 8
    c.rect(x, y, 22, 11, COLORS["band"], 0.2)
    c.text(x + 30, y + 10, f"{level:.0%} band if exchangeable", color=COLORS["ink"])
    c.text(x + 30, y + 27, f"{calibration.hold.n:,} calibration, {len(maxima):,} test trajectories", size=11)
    return c.render()


def forest(sections: Sequence[Section]) -> str:
    """Safety rate and false-alert rate of every subset with their intervals."""
    step = 24
    area = plot(
        "Safety rate and false-alert rate by subset",
        size=(HALF[0], 84 + step * len(sections)), x=(0, 1), y=(len(sections) - 0.5, -0.5), x_ticks=UNIT,
        x_label="rate, with interval", margin=(40, 16, 44, 150),
    )  # fmt: skip
    c = area.canvas
    for x, name, color in ((150, "safety rate", COLORS["ema"]), (260, "false-alert rate", COLORS["unsafe"])):
        c.dot(x + 6, 14, 5, color)
        c.text(x + 18, 18, name, color=COLORS["ink"])
    for tick in UNIT:
        c.line(area.x(tick), area.y.stop, area.x(tick), area.bottom, COLORS["grid"])
    for i, section in enumerate(sections):
        y = area.y(i)
        c.text(area.x.start - 10, y + 4, clip(section.name, 22), anchor="end", color=COLORS["ink"],
               bold=section.kind == "all")  # fmt: skip
        for key, color in (("fpr", COLORS["unsafe"]), ("sr", COLORS["ema"])):
            metric = section.rows[GUARD][key]
            if np.isfinite(metric.low):
                c.line(area.x(metric.low), y, area.x(metric.high), y, color, 2.5)
            if np.isfinite(metric.value):
                c.dot(area.x(metric.value), y, 5, color, title=f"{key.upper()} {number(metric.value)}")
    return c.render()


def lead_time_chart(lead: LeadTimes) -> str:
    """First alerts relative to the first hazard; far ones share a bar, missed ones stand apart."""
    counts = {step: 0 for step in range(-_FARTHEST, _FARTHEST + 1)}
    for step, count in lead.histogram.items():
        counts[max(-_FARTHEST, min(_FARTHEST, step))] += count
    # Most important first from the left: early, at the hazard, late, never.
    order = range(_FARTHEST, -_FARTHEST - 1, -1)
    y_ticks = ticks(max([*counts.values(), lead.missed, 1]), 4)
    y_ticks = [t for t in y_ticks if t == int(t)]
    high = max(y_ticks[-1], max(counts.values()), lead.missed) * 1.12
    area = plot(
        "Steps between the first alert and the first hazard",
        size=HALF, x=(0, len(counts) + 2.0), y=(0, high), y_ticks=y_ticks,
        x_label="steps from the first alert to the first hazard", y_label="unsafe trajectories",
        margin=(40, 16, 44, 58),
    )  # fmt: skip
    groups = (
        ("before", COLORS["ema"], lead.before), ("at the hazard", COLORS["hold"], lead.at_hazard),
        ("after", COLORS["unsafe"], lead.late), ("never", COLORS["muted"], lead.missed),
    )  # fmt: skip
    colors = {name: color for name, color, _ in groups}
    bars = [(i, str(abs(s)) if abs(s) < _FARTHEST else f"{_FARTHEST}+", counts[s],
             colors["before" if s > 0 else "after" if s < 0 else "at the hazard"], s)
            for i, s in enumerate(order)]  # fmt: skip
    bars.append((len(counts) + 1, "never", lead.missed, colors["never"], 0))
    for i, text, count, color, step in bars:
        left, right = area.x(i + 0.1), area.x(i + 0.9)
        area.canvas.rect(left, area.y(count), right - left, area.bottom - area.y(count), color, 0.85, f"{count:,}")
        sign = "−" if step < 0 else ""
        area.canvas.text((left + right) / 2, area.bottom + 17, sign + text, size=11, anchor="middle")
        if count:
            area.canvas.text((left + right) / 2, area.y(count) - 5, f"{count:,}", size=11, anchor="middle",
                             color=COLORS["ink"])  # fmt: skip
    x = area.x.start
    for name, color, count in groups:
        text = f"{name} {count:,}"
        area.canvas.rect(x, 9, 11, 11, color, 0.85)
        area.canvas.text(x + 16, 19, text, color=COLORS["ink"])
        x += 34 + 6.6 * len(text)
    return area.canvas.render()


def early_warning(table: Table, evaluation: Evaluation) -> str:
    """Share of unsafe trajectories warned of before their hazard against the false-alert rate, over all thresholds."""
    top = 0.5
    area = plot(
        "Early warning against false alerts",
        size=HALF, x=(0, top), y=(0, 1), x_ticks=ticks(top), y_ticks=UNIT,
        x_label="false-alert rate (safe trajectories)", y_label="warned of before the hazard",
        margin=(16, 16, 44, 58),
    )  # fmt: skip
    c, counted = area.canvas, ~table.unsafe | table.timed
    if not table.timed.any() or table.unsafe.all():
        c.text(area.x(top / 2), area.y(0.5), "no hazard with a known step to warn of", anchor="middle")
        return c.render()
    c.path(area.at([0, top], [0, top]), COLORS["axis"], 1, dash="3 4")
    ours = evaluation.overall.rows[GUARD]
    ceiling = ours["phir_ceiling"].value
    c.path(area.at([0, top], [ceiling, ceiling]), COLORS["muted"], 1.2, dash="6 4")
    c.text(area.x(top) - 4, area.y(ceiling) + (14 if ceiling > 0.9 else -6), f"cannot exceed {number(ceiling)}",
           size=11, anchor="end", halo=True)  # fmt: skip
    scores = np.where(table.unsafe, table.max_early, table.max_fused)[counted]
    fpr, warned = roc_curve(table.unsafe[counted], scores)
    inside = fpr <= top
    edge = float(np.interp(top, fpr, warned))
    c.path(area.at([*fpr[inside].tolist(), top], [*warned[inside].tolist(), edge]), COLORS["ema"], 2.2)
    for w in evaluation.early_warning:
        if w.fpr <= top:
            x, y = area.x(w.fpr), area.y(w.phir)
            lead = f", {number(w.lead, digits=1)} steps ahead" if w.phir else ""
            c.dot(x, y, 5, COLORS["ema"], title=f"alpha {w.alpha:g}: {number(w.phir)} at FPR {number(w.fpr)}{lead}")
            if w.alpha == max(v.alpha for v in evaluation.early_warning if v.fpr <= top):
                c.text(x + 10, y + 18, f"alpha {w.alpha:g}{lead}", color=COLORS["ink"], bold=True, halo=True)
    c.text(area.x(top) - 4, area.y(0.06), f"timeliness {number(ours['timeliness'].value)}", color=COLORS["ink"],
           anchor="end", halo=True)  # fmt: skip
    return c.render()


def timeline(record: ScoredTrajectory, tools: Sequence[str], shown: range) -> str:
    """All risks over the ``shown`` steps of one trajectory, with thresholds, first hazard and decisions."""
    n = len(shown)
    spacing = min(110.0, 985.0 / max(n, 1))
    wide = spacing >= 96
    longest = max((len(tools[t]) for t in shown), default=0)
    below = 34 if wide else 24 + min(longest, 16) * (5.2 if spacing < 30 else 4.4)
    right, left = 96.0, 44.0
    width = max(left + spacing * n + right, 420.0)
    # A short timeline keeps its spacing at the minimum width: empty steps follow its last one.
    last = (width - left - right) / spacing - 0.5
    area = plot(
        f"Risk timeline of {record.id}",
        size=(width, 196 + below),
        x=(-0.5, last),
        y=(0, 1),
        y_ticks=(0, 0.5, 1),
        margin=(24, right, below, left),
    )
    c = area.canvas
    if record.first_hazard is not None and record.first_hazard in shown:
        x = area.x(record.first_hazard - shown.start)
        half = min(spacing / 2, 26)
        c.rect(x - half, area.y.stop, 2 * half, area.bottom - area.y.stop, COLORS["unsafe"], 0.11)
        edge = "start" if x - 40 < left else "end" if x + 40 > width - right else "middle"
        c.text({"start": left, "end": width - right, "middle": x}[edge], 15, "first hazard", size=11,
               color=COLORS["unsafe"], anchor=edge, bold=True)  # fmt: skip
    _threshold_labels(area, record, width - right)
    at = list(range(n))
    for name, line in (("prefix", 1.4), ("win", 1.6), ("ema", 1.6), ("hazard", 1.8), ("fused", 2.4)):
        c.path(area.at(at, getattr(record, name)[shown.start : shown.stop].tolist()), COLORS[name], line)
    small = spacing < 24
    for i, t in enumerate(shown):
        value = float(record.fused[t])
        y = area.y(value) if np.isfinite(value) else area.y(1.0)
        decision = Decision(int(record.decision[t]))
        title = f"step {t}: {clip(tools[t], 60)}, fused {number(value)}, {decision.name}"
        _marker(c, area.x(i), y, decision, title, small=small)
        x, text = area.x(i), tools[t] or "(no name)"
        if wide:
            c.text(x, area.bottom + 16, clip(text, int(spacing / 6.6)), size=11, anchor="middle")
            c.text(x, area.bottom + 30, str(t), size=10, anchor="middle")
        else:
            turn = -60 if spacing < 30 else -38
            size = 9.5 if spacing < 20 else 11
            c.text(x + 4, area.bottom + 14, clip(text, 16), size=size, anchor="end", rotate=turn)
    return c.render()


def _threshold_labels(area: Plot, record: ScoredTrajectory, edge: float) -> None:
    marks = sorted(((record.lambda_block, "block", "hazard"), (record.lambda_hold, "hold", "fused")), reverse=True)
    previous = -1e9
    for value, name, _ in marks:
        y = area.y(value)
        area.canvas.line(area.x.start, y, edge, y, COLORS[name], 1.2, "6 4")
        at = max(y + 4, previous + 14)  # labels of close thresholds must not overlap
        previous = at
        area.canvas.text(
            edge + 8, at, f"{name.upper()} {risk(value)}", size=11, color=COLORS[f"{name}_text"], bold=True
        )


def _marker(canvas: Canvas, x: float, y: float, decision: Decision, title: str, *, small: bool) -> None:
    r = 4.5 if small else 6.5
    if decision is Decision.BLOCK:
        canvas.shape([(x - r, y - r), (x + r, y - r), (x + r, y + r), (x - r, y + r)], COLORS["block"], title)
    elif decision is Decision.HOLD:
        canvas.shape([(x, y - r * 1.3), (x + r * 1.3, y), (x, y + r * 1.3), (x - r * 1.3, y)], COLORS["hold"], title)
    else:
        # On a dense timeline a white rim would cut the line into dashes.
        canvas.dot(x, y, r * 0.55, COLORS["fused"], stroke="none" if small else "#fff", title=title)


def legend() -> str:
    """What the lines and marks of a timeline mean."""
    c = Canvas(1090, 26, "Legend of the timelines")
    x = 2.0
    names: Mapping[str, str] = {
        "fused": "fused S", "hazard": "hazard", "prefix": "prefix", "ema": "ema", "win": "window mean",
    }  # fmt: skip
    for name, text in names.items():
        c.line(x, 13, x + 22, 13, COLORS[name], 2.6)
        c.text(x + 28, 17, text, color=COLORS["ink"])
        x += 48 + 7 * len(text)
    for decision, text in ((Decision.PASS, "PASS"), (Decision.HOLD, "HOLD"), (Decision.BLOCK, "BLOCK")):
        _marker(c, x + 8, 13, decision, "", small=False)
        c.text(x + 22, 17, text, color=COLORS["ink"])
        x += 46 + 8 * len(text)
    c.rect(x, 4, 16, 18, COLORS["unsafe"], 0.16)
    c.text(x + 22, 17, "first hazard step", color=COLORS["ink"])
    x += 142
    c.line(x, 13, x + 22, 13, COLORS["muted"], 1.4, "6 4")
    c.text(x + 28, 17, "thresholds", color=COLORS["ink"])
    return c.render()
