"""A benchmark run as a page in the look of the evaluation report, as Markdown, and as one flat table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from jaxguard.benchmarks import plots
from jaxguard.benchmarks.plots import Line, Style
from jaxguard.benchmarks.records import PRODUCT, SCENARIOS, Record, Run, case_text
from jaxguard.benchmarks.table import HEADS, MEANING, duration, row_cells, scenario_table, significant
from jaxguard.evaluation.pages import write_page
from jaxguard.evaluation.wording import clip, visible
from jaxguard.writing import write_whole

TITLE = "jaxguard: speed"
Figure = tuple[str, str, Markup]

# Per scenario: heading of its card, column, whether the best row is the lowest, and how to write it.
_CARDS: dict[str, tuple[str, str, bool, Callable[[float], str]]] = {
    "SingleStream": ("Live step", "p50_us", True, duration),
    "MultiStream": ("Sessions at once", "rate_per_s", False, lambda v: f"{v:,.0f}/s"),
    "Offline": ("Archive", "rate_per_s", False, lambda v: f"{v:,.0f}/s"),
    "Training": ("Training step", "p50_us", True, duration),
    "ColdStart": ("Cold start", "p50_us", True, duration),
    "EndToEnd": ("Text to decision", "p50_us", True, duration),
}


def write_report(run: Run, out: Path | str) -> list[Path]:
    """Writes ``report.html``, ``report.md`` and ``table.csv`` to a folder, which is created; returns their paths."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    page = write_page(
        out / "report.html",
        "benchmark.html.j2",
        title=TITLE,
        lead=visible(lead(run)),
        cards=_cards(run),
        notes=[visible(note) for note in run.notes],
        meaning=MEANING,
        heads=HEADS,
        sections=[_section(run, scenario) for scenario in _present(run)],
        facts=[(name, clip(value, 200)) for name, value in facts(run)],
    )
    text, table = out / "report.md", out / "table.csv"
    write_whole(text, render_markdown(run))
    write_whole(table, run.frame.to_csv(index=False))
    return [page, text, table]


def render_tables(run: Run) -> str:
    """The tables of all scenarios, and what a reader must know of them, for a terminal."""
    lines = [visible(lead(run)), *run.notes]
    for scenario in _present(run):
        lines += ["", scenario, scenario_table(run.frame[run.frame.scenario == scenario]), *_held(run, scenario)]
    return "\n".join(lines) + "\n"


def render_markdown(run: Run) -> str:
    """The report without its charts."""
    lines = [f"# {TITLE}", "", visible(lead(run)), ""]
    lines += [f"- {visible(note)}" for note in run.notes] + [""] * bool(run.notes)
    lines += [MEANING, ""]
    for scenario in _present(run):
        lines += [f"## {scenario}", "", SCENARIOS[scenario], ""]
        lines += [scenario_table(run.frame[run.frame.scenario == scenario]), ""]
        lines += [line for text in _held(run, scenario) for line in (text, "")]
        for record in _split_records(run, scenario):
            parts = ", ".join(f"{name} {duration(us)}" for name, us in record.split.items())
            lines += [visible(f"{record.case}: {parts}."), ""]
    lines += ["## Machine and provenance", ""]
    lines += [f"- {name}: {visible(value)}" for name, value in facts(run)]
    return "\n".join(lines) + "\n"


def lead(run: Run) -> str:
    """What was measured on what, in two or three sentences."""
    known = run.facts
    device = str(known.get("device") or "a device that the file does not name")
    cores = f", {known['cores']} cores" if "cores" in known else ""
    records, rows = len(run.records), len(run.frame)
    text = f"{records} record{'s' if records > 1 else ''} with {rows} measurements, on {device}{cores}."
    # Queues of a server that cannot keep up grow with the time measured: their ratios say little.
    alike = (run.frame.framework != "jax") & (run.frame.scenario != "Server")
    rivals = run.frame[alike & run.frame.ratio.notna()]
    if len(rivals):
        slower = int((rivals.ratio > 1).sum())
        text += (
            f" In {slower} of {len(rivals)} measurements of a rival its median is above that of {PRODUCT}; ratios go "
            f"from {significant(rivals.ratio.min())} to {significant(rivals.ratio.max())}."
        )
    if known.get("smoke"):
        text += " A smoke run: a few rounds each, which shows that everything runs and not how fast."
    if run.on_cpu:
        text += " The device is a CPU: no GPU figure was measured."
    return text


def facts(run: Run) -> list[tuple[str, str]]:
    """Machine, versions and provenance: names and values as text."""
    found = [(name, significant(value) if isinstance(value, float) else str(value))
             for name, value in run.facts.items()]  # fmt: skip
    system = " ".join(str(run.machine[key]) for key in ("system", "machine") if run.machine.get(key))
    more = (("system", system), ("commit", run.commit), ("measured", run.datetime), ("file", run.path.name))
    return found + [(name, value) for name, value in more if value]


def _present(run: Run) -> list[str]:
    found = set(run.frame.scenario)
    return [scenario for scenario in SCENARIOS if scenario in found]


def _cards(run: Run) -> list[tuple[str, str, str]]:
    cards = []
    ours = run.frame[(run.frame.variant == PRODUCT) & (run.frame.rounds > 0)]
    for scenario, (name, column, lowest, text) in _CARDS.items():
        rows = ours[ours.scenario == scenario]
        if len(rows):
            best = rows.sort_values(column, ascending=lowest, kind="stable").iloc[0]
            what = "median" if lowest else "items"
            cards.append((name, text(float(best[column])), clip(f"{what}; {best['case']}", 60)))
    return cards


def _section(run: Run, scenario: str) -> dict[str, Any]:
    rows, before = [], -1
    row: Any
    for row in run.frame[run.frame.scenario == scenario].itertuples():
        values = [clip(value, 60) for value in row_cells(row)]
        first = row.record != before
        before = row.record
        rows.append(
            {
                "case": values[0] if first else "",
                "first": first,
                "ours": row.variant == PRODUCT,
                "cells": values[1:],
                "reason": clip(f"unavailable: {row.unavailable}", 160) if row.unavailable else "",
            }
        )
    figures, wide = _figures(run, scenario)
    return {
        "heading": scenario,
        "note": SCENARIOS[scenario],
        "held": _held(run, scenario),
        "rows": rows,
        "figures": figures,
        "wide": wide,
    }


def _held(run: Run, scenario: str) -> list[str]:
    """Sentences on the rates of arrivals that variants keep up with."""
    return [
        visible(f"Held, {record.case}: {', '.join(f'{name} {_rate(rate)}/s' for name, rate in record.holds.items())}.")
        for record in run.records
        if record.scenario == scenario and record.holds
    ]


def _split_records(run: Run, scenario: str) -> list[Record]:
    return [r for r in run.records if r.scenario == scenario and sum(r.split.values()) > 0]


def _figures(run: Run, scenario: str) -> tuple[list[Figure], list[Figure]]:
    """Charts half the page wide, and charts as wide as the page."""
    looks = plots.styles(run.records)
    narrow: list[Figure] = []
    if scenario == "SingleStream":
        for record in run.records:
            if record.scenario == scenario and any(len(v.rounds) for v in record.variants):
                note = "Left is faster; a steep line is a steady one."
                narrow.append((f"Latency: {clip(record.case, 60)}", note, Markup(plots.latency_cdf(record, looks))))
    if scenario in ("MultiStream", "Offline"):
        narrow += _against(run, scenario, "batch", looks)
    if scenario == "Server":
        narrow += _against(run, scenario, "rate_per_s", looks)
    split = _split_records(run, scenario)
    note = "The parts need not add up to the median of the rounds."
    wide = [("Where the time goes", note, Markup(plots.split_bars(split)))] if split else []
    return narrow, wide


def _against(run: Run, scenario: str, over: str, looks: Mapping[str, Style]) -> list[Figure]:
    """A chart for each group of records that differ in one field alone, where it has at least two values."""
    groups: dict[tuple[str, int], list[int]] = {}
    for i, record in enumerate(run.records):
        value = record.fields.get(over)
        if record.scenario == scenario and isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            rest = case_text({name: v for name, v in record.fields.items() if name != over})
            groups.setdefault((rest, record.threads), []).append(i)
    figures = []
    for (rest, threads), members in groups.items():
        ordered = sorted(members, key=lambda i: run.records[i].fields[over])
        if len({run.records[i].fields[over] for i in ordered}) < 2:
            continue
        lines = _server_lines(run, ordered, looks) if over == "rate_per_s" else _rate_lines(run, ordered, looks)
        if not any(np.isfinite(y) for line in lines for _, y in line.points):
            continue
        name = clip(f"{rest or 'all'}, {threads} thread{'s' if threads > 1 else ''}", 60)
        if over == "batch":
            svg = plots.logarithmic_chart(
                f"{scenario}: rate against batch, {name}", lines, x_label="batch, logarithmic",
                y_label="items per second, logarithmic", y_text=_rate,
            )  # fmt: skip
            figures.append((f"Rate: {name}", "Higher is faster.", Markup(svg)))
        else:
            svg = plots.logarithmic_chart(
                f"{scenario}: latency against arrival rate, {name}", lines, x_label="arrivals per second, logarithmic",
                y_label="latency, logarithmic", y_text=duration,
            )  # fmt: skip
            figures.append((f"Latency under load: {name}", "Solid p50, dashed p99 where it is known.", Markup(svg)))
    return figures


def _lines(run: Run, members: Sequence[int], over: str, column: str) -> dict[str, list[tuple[float, float]]]:
    rows = run.frame[run.frame.record.isin(members)].sort_values(f"case_{over}", kind="stable")
    return {
        str(name): list(zip(own[f"case_{over}"].astype(float), own[column], strict=True))
        for name, own in rows.groupby("variant", sort=False)
        if own[column].notna().any()
    }


def _rate_lines(run: Run, members: Sequence[int], looks: Mapping[str, Style]) -> list[Line]:
    lines = [Line(name, points, looks[name]) for name, points in _lines(run, members, "batch", "rate_per_s").items()]
    records = [run.records[i] for i in members]
    most = [(float(r.fields["batch"]), r.items / r.floor_us * 1e6) for r in records]
    if any(np.isfinite(y) for _, y in most):
        lines.append(Line("at the floor", most, plots.FLOOR))
    return lines


def _server_lines(run: Run, members: Sequence[int], looks: Mapping[str, Style]) -> list[Line]:
    lines = []
    for column, dash in (("p50_us", ""), ("p99_us", "6 4")):
        for name, points in _lines(run, members, "rate_per_s", column).items():
            lines.append(Line(f"{name}, {column.removesuffix('_us')}", points, Style(looks[name].color, dash)))
    return lines


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else significant(value)
