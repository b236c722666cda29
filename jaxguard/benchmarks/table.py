"""Figures of a run as cells of tables, for a terminal, for Markdown and for HTML."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from jaxguard.evaluation.wording import visible

HEADS = (
    *("case", "variant", "threads", "rounds", "p50", "p90", "p99", "p99.9"),
    *("items/s", "first call", "floor", "× floor", "ratio"),
)
TEXTS = (0, 1)  # columns that are texts, the others are numbers
MEANING = (
    "p50 to p99.9: time of a round; a dash where there are too few rounds (p99 takes 100, p99.9 takes 1,000). items/s: "
    "steps or texts of a round over p50. floor: the least time a round can take here, and what sets it, reading from "
    "memory (read) or arithmetic (matmul). × floor: p50 over that. ratio: p50 over that of jax product in the same "
    "record; above 1 is slower than jax product."
)
# At a given arrival rate, and for a single start, items over the median is no rate that anything runs at.
_NO_RATE = ("Server", "ColdStart")


def significant(value: float) -> str:
    """Three significant digits, all digits before the point, a dash where undefined."""
    if not math.isfinite(value):
        return "–"
    if not value:
        return "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(float(f'{value:.2e}')))))}f}"


def duration(us: float) -> str:
    """Microseconds with the unit that leaves one to three digits before the point."""
    if not math.isfinite(us):
        return "–"
    rounded = float(f"{us:.2e}")
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if rounded >= size:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us)} µs"


def row_cells(row: Any) -> list[str]:
    """The cells under :data:`HEADS` of a row of a run's frame, as ``itertuples`` gives it."""
    name = (
        f"{row.variant} ({row.dtype})"
        if row.dtype not in ("", "float32") and row.dtype not in row.variant
        else row.variant
    )
    start = [row.case, name, f"{row.threads}"]
    if row.unavailable:
        return [*start, f"unavailable: {row.unavailable}", *[""] * (len(HEADS) - 4)]
    rate = math.nan if row.scenario in _NO_RATE else row.rate_per_s
    return [
        *start,
        f"{row.rounds:,}",
        *(duration(us) for us in (row.p50_us, row.p90_us, row.p99_us, row.p999_us)),
        f"{rate:,.0f}" if rate >= 1_000 else significant(rate),
        duration(row.compile_s * 1e6),
        f"{duration(row.floor_us)} {row.floor_of}".strip(),
        significant(row.times_floor),
        significant(row.ratio),
    ]


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[int] = TEXTS) -> str:
    """An aligned Markdown table, readable in a terminal too; columns other than ``left`` to the right.

    A reason in place of figures runs on over the columns after it instead of widening its own for all rows.
    """
    shown = [[visible(cell).replace("|", "\\|") for cell in row] for row in (heads, *rows)]
    width = [max(len(row[i]) for row in shown if not _reason(row[i])) for i in range(len(heads))]
    lines = []
    for row in shown:
        pad = [w if not any(map(_reason, row[: i + 1])) else 0 for i, w in enumerate(width)]
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, pad, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * w if i in left else "-" * (w - 1) + ":" for i, w in enumerate(width)]
    lines.insert(1, f"| {' | '.join(rule)} |")
    return "\n".join(lines)


def _reason(cell: str) -> bool:
    return cell.startswith("unavailable")


def scenario_table(frame: pd.DataFrame) -> str:
    """The rows of one scenario as Markdown."""
    return markdown(HEADS, [row_cells(row) for row in frame.itertuples()])
