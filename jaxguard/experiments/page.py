"""The page of a summary: every table, and a picture of each set's guards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

import jaxguard
from jaxguard.evaluation.pages import Section, write_page
from jaxguard.evaluation.svg import COLORS, fit, plot, text_width
from jaxguard.evaluation.wording import number, visible
from jaxguard.experiments.statistics import METRICS
from jaxguard.experiments.summary import Figure, Summary
from jaxguard.experiments.tables import Table

_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST_NAME = 190
_DRAWN = ("f1", "phir_minus_fpr")
_LEADS = {
    "rivals": ("Rivals", "The guard and its rivals, fitted, calibrated and tested on the same trajectories."),
    "ablations": ("Ablations", "The guard without one of its parts; every variant differs in one setting."),
    "transfer": ("Transfer", "A guard on another set, with its own thresholds and with thresholds from there."),
}


def write_summary_page(path: Path, summary: Summary, tables: Mapping[str, Sequence[Table]], plan: str) -> Path:
    """Writes the page and returns its path; the folder must exist.

    Args:
        path: File to write.
        summary: What pictures are drawn from.
        tables: By experiment.
        plan: Name of the plan.
    """
    sections = []
    for experiment, found in tables.items():
        heading, note = _LEADS[experiment]
        for i, table in enumerate(found):
            first, *columns = table.head
            content = {"first": first, "columns": columns, "rows": [(row[0], row[1:]) for row in table.rows]}
            own = summary.having(experiment, table.title).figures
            drawn = [f for f in own if f.metric in _DRAWN and math.isfinite(f.value)]
            figures = (
                [(METRICS[m], "One dot per seed, with its interval.", dots(own, m)) for m in _DRAWN] if drawn else []
            )
            about = " ".join((*((note,) if not i else ()), *table.notes))
            sections.append(Section(f"{heading}: {visible(table.title)}", about, content, figures))
    return write_page(
        path,
        "diagnosis.html.j2",
        title="Experiments",
        lead="All tables come from summary.json beside this page. " + " ".join(map(visible, summary.left_out)),
        cards=[],
        sections=sections,
        facts=[("Plan", plan), ("jaxguard", jaxguard.__version__)],
    )


def dots(figures: Sequence[Figure], metric: str) -> Markup:
    """A metric of every guard: one dot with its interval for each seed."""
    names = list(dict.fromkeys(f.guard for f in figures))
    left = min(max((text_width(visible(name)) for name in names), default=0.0), _MOST_NAME) + 14
    low = min((f.low for f in figures if f.metric == metric and math.isfinite(f.low)), default=0.0)
    start = 0.0 if low >= 0 else -1.0
    ticks = _TICKS if start == 0 else (-1.0, -0.5, 0.0, 0.5, 1.0)
    area = plot(
        f"{METRICS[metric]} of each guard", size=(460, 64 + 26 * len(names)), x=(start, 1.0),
        y=(len(names) - 0.5, -0.5), x_ticks=ticks, x_label=METRICS[metric], margin=(12, 16, 44, left),
    )  # fmt: skip
    canvas = area.canvas
    for tick in ticks:
        canvas.line(area.x(tick), area.y.stop, area.x(tick), area.bottom, COLORS["grid"])
    for i, name in enumerate(names):
        own = [f for f in figures if (f.guard, f.metric) == (name, metric) and math.isfinite(f.value)]
        canvas.text(area.x.start - 10, area.y(i) + 4, fit(visible(name), _MOST_NAME), anchor="end", bold=i == 0)
        color = COLORS["ema"] if i == 0 else COLORS["muted"]
        for k, f in enumerate(own):
            y = area.y(i) + 5 * (k - (len(own) - 1) / 2)
            if math.isfinite(f.low):
                canvas.line(area.x(f.low), y, area.x(f.high), y, color, 1.5)
            canvas.dot(area.x(f.value), y, 3.5, color, title=f"{name}, seed {f.seed}: {number(f.value)}")
    return Markup(canvas.render())
