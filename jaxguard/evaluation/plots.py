"""The report's charts, each an SVG string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.decision.calibration import Calibration
from jaxguard.decision.conformal import needed, observed_rate_band
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.evaluate import GUARD, Evaluation, Section
from jaxguard.evaluation.metrics import Table, roc_curve
from jaxguard.evaluation.svg import COLORS, Box, Canvas, Label, Labels, Plot, fit, plot, text_width, ticks
from jaxguard.evaluation.timing import LeadTimes, Warnings
from jaxguard.evaluation.wording import clip, number, risk
from jaxguard.types import Decision

HALF = (540.0, 320.0)
UNIT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_CURVE_POINTS = 600  # more than there are pixels
_FARTHEST = 8  # lead times beyond this many steps share a bar
_MOST_NAME = 270.0  # pixels of a subset's name
_MOST_TOOL = 220.0  # pixels of a tool's name
_EDGES = np.linspace(0, 1, 26)
_UNTIMED = "no unsafe trajectory has a known hazard step"


def distribution(table: Table, *, which: str, threshold: float, name: str) -> str:
    """Histogram of trajectory maxima by class, with the threshold."""
    scores = table.max_fused if which == "fused" else table.max_hazard
    counts = {label: bins(scores[table.unsafe == (label == "unsafe")]) for label in ("safe", "unsafe")}
    return histogram(
        f"Distribution of the maximum {which} risk of safe and unsafe trajectories",
        counts,
        x_label=f"maximum {which} risk over the steps",
        y_label="share of class",
        threshold=threshold,
        name=name,
    )


def bins(scores: ArrayLike) -> NDArray[np.int64]:
    """Counts of risks for :func:`histogram`; what is not finite goes to the last."""
    values = np.nan_to_num(np.asarray(scores, np.float64), nan=1.0, posinf=1.0)
    return np.histogram(np.minimum(values, 1.0), _EDGES)[0]


def histogram(
    label: str, counts: Mapping[str, ArrayLike], *, x_label: str, y_label: str, threshold: float, name: str
) -> str:
    """Histograms of two sets of risks, each by its name, as shares of the set; with a threshold."""
    sizes = {own: int(np.sum(values)) for own, values in counts.items()}
    shares = {own: np.asarray(values) / max(sizes[own], 1) for own, values in counts.items()}
    y_ticks = ticks(max(float(s.max()) for s in shares.values()), 4)
    area = plot(
        label, size=HALF, x=(0, 1), y=(0, y_ticks[-1]), x_ticks=UNIT, y_ticks=y_ticks,
        x_label=x_label, y_label=y_label, margin=(60, 16, 44, 58),
    )  # fmt: skip
    x = area.x.start + 4
    for color, (own, share) in zip((COLORS["safe"], COLORS["unsafe"]), shares.items(), strict=True):
        outline = [(area.x(0), area.bottom)]
        for low, high, value in zip(_EDGES, _EDGES[1:], share, strict=False):
            outline += [(area.x(low), area.y(value)), (area.x(high), area.y(value))]
        outline.append((area.x(1), area.bottom))
        area.canvas.area(outline, color, 0.16)
        area.canvas.path(outline, color, 1.6)
        text = f"{own} ({sizes[own]:,})"
        area.canvas.rect(x, 9, 11, 11, color, 0.75)
        area.canvas.text(x + 16, 19, text, color=COLORS["ink"])
        x += max(108, 34 + 6.6 * len(text))
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
        size=(HALF[0], 420), x=(0, 1), y=(0, 1), x_ticks=UNIT, y_ticks=UNIT,
        x_label="false-alert rate (safe trajectories)", y_label="safety rate (unsafe trajectories)",
        margin=(56, 16, 44, 58),
    )  # fmt: skip
    c, labels = area.canvas, _labels(area, above=28)
    c.path(area.at([0, 1], [0, 1]), COLORS["axis"], 1, dash="3 4")
    ours = section.rows[GUARD]
    # Dashes on top: where the curves are equal, both show.
    for row, (scores, color, name, width, dash) in enumerate(
        ((table.max_fused, COLORS["safe"], "fused", 2.8, ""), (table.max_hazard, COLORS["hold"], "hazard", 1.8, "5 6"))
    ):
        fpr, tpr = roc_curve(table.unsafe, scores)
        kept = np.unique(np.linspace(0, len(fpr) - 1, min(len(fpr), _CURVE_POINTS)).astype(int))
        points = area.at(fpr[kept].tolist(), tpr[kept].tolist())
        c.path(points, color, width, dash=dash)
        labels.trace(points)
        metric = ours["auroc" if name == "fused" else "auroc_hazard"]
        x = area.x.start + 190 * row
        c.line(x, 15, x + 24, 15, color, width, dash)
        c.text(x + 30, 19, f"{name}, AUROC {number(metric.value)}", color=COLORS["ink"])
    rivals = {
        name: (area.x(metrics["fpr"].value), area.y(metrics["sr"].value))
        for name, metrics in section.rows.items()
        if name != GUARD and "fpr" in metrics and np.isfinite([metrics["sr"].value, metrics["fpr"].value]).all()
    }
    for name, (x, y) in rivals.items():
        c.shape([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], COLORS["muted"], name)
        labels.mark(x, y, 6)
    sr, fpr_here = ours["sr"], ours["fpr"]
    x, y = area.x(fpr_here.value), area.y(sr.value)
    if np.isfinite(fpr_here.low) and np.isfinite(sr.low):
        for (x1, y1), (x2, y2) in (
            ((area.x(fpr_here.low), y), (area.x(fpr_here.high), y)),
            ((x, area.y(sr.low)), (x, area.y(sr.high))),
        ):
            c.line(x1, y1, x2, y2, COLORS["ink"], 1.5)
            labels.trace([(x1, y1), (x2, y2)])
    labels.mark(x, y, 6)
    text = f"operating point: SR {number(sr.value, digits=2)}, FPR {number(fpr_here.value, digits=2)}"
    own = Label(x, y, text, gap=11, reach=80, size=12, bold=True)
    labels.beside([own, *(Label(*place, clip(name, 32), reach=200) for name, place in rivals.items())])
    c.dot(x, y, 6, COLORS["unsafe"], title=f"SR {number(sr.value)}, FPR {number(fpr_here.value)}")
    return c.render()


def _labels(area: Plot, above: float = 10) -> Labels:
    return Labels(area.canvas, Box(area.x.start + 2, area.y.stop - above, area.x.stop + 8, area.bottom - 2))


def calibration_band(table: Table, calibration: Calibration, level: float = 0.95) -> str:
    """Achieved against nominal false-alert rate of the fused score, with the exact band."""
    maxima, alpha = table.max_fused[~table.unsafe], calibration.hold.alpha
    lowest = max(1.0 / (len(calibration.hold_maxima) + 1), 0.005)
    top = max(0.5, alpha * 1.25)
    levels = [a for a in np.unique(np.r_[np.linspace(0.01, top, 50), lowest]).tolist()
              if needed(a) <= len(calibration.hold_maxima)]  # fmt: skip
    cuts = [calibration.hold_at(a) for a in levels] if len(maxima) else []
    bands = [observed_rate_band(cut.n, cut.k, len(maxima), level) for cut in cuts]
    upper, lower = [b.high for b in bands], [b.low for b in bands]
    achieved = [float(cut.crossed(maxima).mean()) for cut in cuts]
    here = float(calibration.hold.crossed(maxima).mean()) if cuts else 0.0
    y_ticks = ticks(max([min(top, 1.0), here, *achieved, *upper]))
    area = plot(
        "Achieved against nominal false-alert rate",
        size=(HALF[0], 420), x=(0, top), y=(0, y_ticks[-1]), x_ticks=[t for t in ticks(top) if t <= top],
        y_ticks=y_ticks, x_label="nominal level alpha", y_label="achieved on safe test trajectories",
        margin=(56, 16, 44, 58),
    )  # fmt: skip
    c, labels = area.canvas, _labels(area, above=28)
    if not cuts:
        c.text(area.x(top / 2), area.y(y_ticks[-1] / 2), "no safe trajectories to compare", anchor="middle")
        return c.render()
    c.area(area.at(levels, upper) + area.at(levels, lower)[::-1], COLORS["band"], 0.13)
    c.path(area.at([0, top], [0, top]), COLORS["axis"], 1, dash="3 4")
    points = area.at(levels, achieved)
    c.path(points, COLORS["safe"], 2.2)
    labels.trace(points)
    x, y = area.x(alpha), area.y(here)
    c.line(x, y, x, area.bottom, COLORS["muted"], 1, "2 3")
    labels.mark(x, y, 6)
    text = f"alpha {alpha:g}: achieved {number(here)}"
    labels.beside([Label(x, y, text, gap=11, reach=80, size=12, bold=True)])
    c.dot(x, y, 6, COLORS["unsafe"])
    x = area.x.start
    c.rect(x, 2, 22, 11, COLORS["band"], 0.2)
    c.text(x + 30, 12, f"{level:.0%} band if exchangeable", color=COLORS["ink"])
    c.text(x + 30, 28, f"{calibration.hold.n:,} calibration, {len(maxima):,} test trajectories", size=11)
    return c.render()


def forest(sections: Sequence[Section]) -> str:
    """Safety rate and false-alert rate of every subset with their intervals."""
    step = 24
    names = [(section.name, section.kind == "all") for section in sections]
    left = min(max((text_width(name, bold=bold) for name, bold in names), default=0.0), _MOST_NAME) + 14
    area = plot(
        "Safety rate and false-alert rate by subset",
        size=(HALF[0], 84 + step * len(sections)), x=(0, 1), y=(len(sections) - 0.5, -0.5), x_ticks=UNIT,
        x_label="rate, with interval", margin=(40, 16, 44, left),
    )  # fmt: skip
    c = area.canvas
    for shift, name, color in ((0, "safety rate", COLORS["ema"]), (110, "false-alert rate", COLORS["unsafe"])):
        x = left + shift
        c.dot(x + 6, 14, 5, color)
        c.text(x + 18, 18, name, color=COLORS["ink"])
    for tick in UNIT:
        c.line(area.x(tick), area.y.stop, area.x(tick), area.bottom, COLORS["grid"])
    for i, (section, (name, bold)) in enumerate(zip(sections, names, strict=True)):
        y = area.y(i)
        shown = fit(name, _MOST_NAME, bold=bold)
        c.text(area.x.start - 10, y + 4, shown, anchor="end", color=COLORS["ink"], bold=bold)
        for key, color in (("fpr", COLORS["unsafe"]), ("sr", COLORS["ema"])):
            metric = section.rows[GUARD][key]
            if np.isfinite(metric.low):
                c.line(area.x(metric.low), y, area.x(metric.high), y, color, 2.5)
            if np.isfinite(metric.value):
                c.dot(area.x(metric.value), y, 5, color, title=f"{key.upper()} {number(metric.value)}")
    return c.render()


def lead_time_chart(lead: LeadTimes) -> str:
    """First alerts relative to the first hazard; far ones share a bar, missed ones stand apart."""
    if not lead.missed and not any(lead.histogram.values()):
        return _nothing("Steps between the first alert and the first hazard", _UNTIMED)
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


def _nothing(label: str, reason: str) -> str:
    canvas = Canvas(HALF[0], 90, label)
    canvas.rect(0, 0, HALF[0], 90, COLORS["grid"], 0.4)
    canvas.text(HALF[0] / 2, 49, reason, anchor="middle")
    return canvas.render()


def early_warning(table: Table, evaluation: Evaluation) -> str:
    """Share of unsafe trajectories warned of before their hazard against the false-alert rate, over all thresholds."""
    label = "Early warning against false alerts"
    if not table.timed.any() or table.unsafe.all():
        return _nothing(label, "no safe trajectories to compare" if table.timed.any() else _UNTIMED)
    configured = next((w for w in evaluation.early_warning if np.isclose(w.alpha, evaluation.alpha_hold)), None)
    top = 0.5 if configured is None or configured.fpr <= 0.5 else 1.0
    area = plot(
        label, size=HALF, x=(0, top), y=(0, 1), x_ticks=ticks(top), y_ticks=UNIT,
        x_label="false-alert rate (safe trajectories)", y_label="warned of before the hazard",
        margin=(40, 16, 44, 58),
    )  # fmt: skip
    c, labels, counted = area.canvas, _labels(area), ~table.unsafe | table.timed
    c.path(area.at([0, top], [0, top]), COLORS["axis"], 1, dash="3 4")
    ours = evaluation.overall.rows[GUARD]
    ceiling = ours["phir_ceiling"].value
    if ceiling < 1:
        c.path(area.at([0, top], [ceiling, ceiling]), COLORS["muted"], 1.2, dash="6 4")
    scores = np.where(table.unsafe, table.max_early, table.max_fused)[counted]
    fpr, warned = roc_curve(table.unsafe[counted], scores)
    inside = fpr <= top
    edge = float(np.interp(top, fpr, warned))
    points = area.at([*fpr[inside].tolist(), top], [*warned[inside].tolist(), edge])
    c.path(points, COLORS["ema"], 2.2)
    labels.trace(points)
    _warning_marks(area, labels, [w for w in evaluation.early_warning if w.fpr <= top], configured)
    keys = [(f"all thresholds, timeliness {number(ours['timeliness'].value)}", COLORS["ema"], 2.2, "")]
    if ceiling < 1:
        text = f"{number(ceiling, digits=2)}: more only with as many false alerts"
        keys.append((text, COLORS["muted"], 1.2, "6 4"))
    for row, (text, color, width, dash) in enumerate(keys):
        y = 9 + 17 * row
        c.line(area.x.start, y, area.x.start + 24, y, color, width, dash)
        c.text(area.x.start + 30, y + 4, text, color=COLORS["ink"])
    return c.render()


def _warning_marks(area: Plot, labels: Labels, drawn: Sequence[Warnings], configured: Warnings | None) -> None:
    """A dot for each level, and labels where there is room: always for the configured level, else for the last."""
    main = configured or max(drawn, key=lambda w: w.alpha, default=None)
    groups = sorted(_coinciding(drawn), key=lambda group: (main not in group, -group[-1].alpha))
    for group in reversed(groups):
        x, y = area.x(group[0].fpr), area.y(group[0].phir)
        title = "; ".join(f"alpha {w.alpha:g}: {number(w.phir)} at FPR {number(w.fpr)}{_ahead([w])}" for w in group)
        here = configured in group
        area.canvas.dot(x, y, 6 if here else 5, COLORS["unsafe" if here else "ema"], title=title)
        labels.mark(x, y, 5)
    for group in groups:
        x, y, bold = area.x(group[0].fpr), area.y(group[0].phir), main in group
        text = f"alpha {', '.join(f'{w.alpha:g}' for w in group)}{_ahead(group)}"
        labels.beside([Label(x, y, text, reach=120 if bold else 14, bold=bold)])


def _coinciding(points: Sequence[Warnings]) -> list[list[Warnings]]:
    """Warnings by the point they share, each in order of alpha."""
    found: dict[tuple[float, float], list[Warnings]] = {}
    for w in sorted(points, key=lambda w: w.alpha):
        found.setdefault((round(w.fpr, 3), round(w.phir, 3)), []).append(w)
    return list(found.values())


def _ahead(group: Sequence[Warnings]) -> str:
    leads = {number(w.lead, digits=1) for w in group if w.phir}
    return f", {leads.pop()} steps ahead" if len(leads) == 1 else ""


def timeline(record: ScoredTrajectory, tools: Sequence[str], shown: range, first: int = 0) -> str:
    """All risks over the ``shown`` steps of one trajectory, with thresholds, first hazard and decisions.

    ``first`` is the step's number with which ``record`` starts.
    """
    n = len(shown)
    names = [tools[t] or "(no name)" for t in shown]
    longest = min(max((text_width(name, 11) for name in names), default=0.0), _MOST_TOOL)
    right, left = 96.0, 44.0
    spacing = min(max(110.0, longest + 10), 985.0 / max(n, 1))
    wide = spacing >= max(96.0, longest + 6)
    turn, below = 0.0, 34.0
    if not wide:
        turn = -60.0 if spacing < 30 else -38.0
        rise, reach = np.sin(np.radians(-turn)), np.cos(np.radians(turn))
        below = 24 + rise * longest
        # The names of the first steps lean out to the left.
        widths = [min(text_width(name, 11), _MOST_TOOL) for name in names]
        left = max(left, *(reach * width - (i + 0.4) * spacing for i, width in enumerate(widths)))
        spacing = min(spacing, (1125.0 - right - left) / n)
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
        title = f"step {first + t}: {clip(tools[t], 60)}, fused {number(value)}, {decision.name}"
        _marker(c, area.x(i), y, decision, title, small=small)
        x, text = area.x(i), names[i]
        if wide:
            c.text(x, area.bottom + 16, fit(text, spacing - 6, 11), size=11, anchor="middle")
            c.text(x, area.bottom + 30, str(first + t), size=10, anchor="middle")
        else:
            size = 9.5 if spacing < 20 else 11
            c.text(x + 4, area.bottom + 14, fit(text, _MOST_TOOL, size), size=size, anchor="end", rotate=turn)
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
