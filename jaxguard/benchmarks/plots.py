"""The benchmark report's charts, each an SVG string: times and rates on logarithmic axes, because they span decades."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxguard.benchmarks.records import PRODUCT, Record
from jaxguard.benchmarks.table import duration, significant
from jaxguard.evaluation.svg import COLORS, Canvas, Plot, plot, ticks
from jaxguard.evaluation.wording import clip, number

SIZE = (540.0, 330.0)
_OTHERS = (
    *(COLORS["unsafe"], COLORS["ema"], COLORS["hold"], COLORS["win"], COLORS["muted"], COLORS["block"]),
    "#cc79a7",  # Okabe and Ito's purple, which the other charts do not need
)
_MOST_POINTS = 400  # of a distribution; a line has about as many pixels
_ROW = 16.0  # height of a row of the legend


@dataclass(frozen=True)
class Style:
    """How the lines of a variant look."""

    color: str
    dash: str = ""


FLOOR = Style(COLORS["ink"], "5 4")


@dataclass(frozen=True)
class Line:
    """A named line of points (x, y); NaN breaks it."""

    name: str
    points: Sequence[tuple[float, float]]
    style: Style


def styles(records: Sequence[Record]) -> dict[str, Style]:
    """One look for each variant throughout a report; the product is blue, dashes come when colours run out."""
    names = dict.fromkeys(v.name for r in records for v in r.variants if v.name != PRODUCT)
    found = {PRODUCT: Style(COLORS["safe"])}
    for i, name in enumerate(names):
        found[name] = Style(_OTHERS[i % len(_OTHERS)], ("", "7 3", "2 3")[min(i // len(_OTHERS), 2)])
    return found


def latency_cdf(record: Record, looks: Mapping[str, Style]) -> str:
    """Share of rounds that took at most so long, a line per variant; the floor as a vertical line."""
    measured = [v for v in record.variants if len(v.rounds)]
    floor = record.floor_us
    ends = [float(np.quantile(v.rounds, q)) for v in measured for q in (0.0, 0.999)]
    low, high = _around([*ends, *([floor] if floor > 0 else [])])
    entries = [(v.name, looks[v.name]) for v in measured]
    if floor > 0:
        entries.append((f"floor {duration(floor)}", FLOOR))
    area = _logarithmic(
        f"Distribution of the latency, {record.case}", entries, x=(low, high), y=(0.0, 1.0),
        x_label="time of a round, logarithmic", y_label="share of rounds at most this long",
        x_text=duration, y_ticks=(0, 0.25, 0.5, 0.75, 1),
    )  # fmt: skip
    for variant in sorted(measured, key=lambda v: v.name == PRODUCT):  # the product on top
        shares = np.linspace(0.0, 1.0, min(len(variant.rounds), _MOST_POINTS))
        times = np.log10(np.quantile(variant.rounds, shares))
        look = looks[variant.name]
        area.canvas.path(area.at(times.tolist(), shares.tolist()), look.color, 2.2, dash=look.dash)
    if floor > 0:
        x = area.x(math.log10(floor))
        area.canvas.line(x, area.y.stop, x, area.bottom, FLOOR.color, 1.5, FLOOR.dash)
    return area.canvas.render()


def logarithmic_chart(
    label: str, lines: Sequence[Line], *, x_label: str, y_label: str, y_text: Callable[[float], str]
) -> str:
    """Lines with marks over their own x values, both axes logarithmic."""
    points = [(x, y) for line in lines for x, y in line.points if np.isfinite(y)]
    xs = sorted({x for line in lines for x, _ in line.points})
    area = _logarithmic(
        label, [(line.name, line.style) for line in lines], x=_around(xs, 0.04), y=_around([y for _, y in points]),
        x_label=x_label, y_label=y_label, x_text=_plain, y_text=y_text, x_values=xs,
    )  # fmt: skip
    for line in reversed(lines):  # the first on top
        pixels = area.at(
            [math.log10(x) for x, _ in line.points],
            [math.log10(y) if np.isfinite(y) else math.nan for _, y in line.points],
        )
        area.canvas.path(pixels, line.style.color, 2, dash=line.style.dash)
        for (x, y), (_, value) in zip(pixels, line.points, strict=True):
            if np.isfinite(y):
                area.canvas.dot(x, y, 4, line.style.color, title=f"{line.name}: {y_text(value)}")
    return area.canvas.render()


def split_bars(records: Sequence[Record]) -> str:
    """Where the time of a round goes: a stacked bar per record, its parts named with time and share."""
    parts = list(dict.fromkeys(name for record in records for name in record.split))
    colors = dict(zip(parts, (COLORS["win"], COLORS["safe"], *_OTHERS) * (len(parts) // 9 + 1), strict=False))
    longest = max(sum(record.split.values()) for record in records)
    unit, size = ("s", 1e6) if longest >= 1e6 else ("ms", 1e3) if longest >= 1e3 else ("µs", 1.0)
    x_ticks = ticks(longest / size)
    step = 62.0
    area = plot(
        "Time of a round by part", size=(1120.0, 60 + step * len(records)), x=(0, x_ticks[-1]),
        y=(len(records) - 0.5, -0.5), x_ticks=x_ticks, x_label=f"time of a round, {unit}", margin=(8, 24, 44, 210),
    )  # fmt: skip
    c = area.canvas
    for tick in x_ticks:
        c.line(area.x(tick), area.y.stop, area.x(tick), area.bottom, COLORS["grid"])
    for i, record in enumerate(records):
        top, start, total = area.y(i) - 20, 0.0, sum(record.split.values())
        c.text(area.x.start - 12, top + 16, clip(record.case, 30), anchor="end", color=COLORS["ink"])
        c.text(area.x.start - 12, top + 31, duration(total), size=11, anchor="end")
        at = area.x.start + 2
        for name, us in record.split.items():
            share = us / total if total else 0.0
            text = f"{clip(name, 30)} {duration(us)}, {number(100 * share, digits=1)} %"
            left, right = area.x(start / size), area.x((start + us) / size)
            # What takes next to no time still gets a pixel, so that its name has something to point at.
            c.rect(left, top, max(right - left, 1.0), 22, colors[name], 0.9, text)
            c.rect(at, top + 29, 9, 9, colors[name], 0.9)
            c.text(at + 14, top + 38, text, size=11.5, color=COLORS["ink"], halo=True)
            at += 36 + 6.1 * len(text)
            start += us
    return c.render()


def _logarithmic(
    label: str,
    entries: Sequence[tuple[str, Style]],
    *,
    x: tuple[float, float],
    y: tuple[float, float],
    x_label: str,
    y_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str] | None = None,
    x_values: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
) -> Plot:
    """An empty plot under a legend; its scales take decimal logarithms of x, and of y where ``y_text`` is given."""
    rows = _legend_rows(entries, SIZE[0] - 16 - 66)
    top = 14 + _ROW * len(rows)
    y_range = (math.log10(y[0]), math.log10(y[1])) if y_text else y
    area = plot(
        label, size=(SIZE[0], SIZE[1] + top - 30), x=(math.log10(x[0]), math.log10(x[1])), y=y_range, y_ticks=y_ticks,
        x_label=x_label, y_label=y_label, margin=(top, 16, 46, 66),
    )  # fmt: skip
    c = area.canvas
    if y_text:
        for value in _round_values(*y):
            pixel = area.y(math.log10(value))
            c.line(area.x.start, pixel, area.x.stop, pixel, COLORS["grid"])
            c.text(area.x.start - 8, pixel + 4, _tick(y_text(value)), size=11, anchor="end")
    free = -1e9
    for value in x_values or _round_values(*x):
        pixel, text = area.x(math.log10(value)), _tick(x_text(value))
        c.line(pixel, area.bottom, pixel, area.bottom + 4, COLORS["axis"])
        if pixel - 3.4 * len(text) > free:
            c.text(pixel, area.bottom + 18, text, size=11, anchor="middle")
            free = pixel + 3.4 * len(text) + 4
    _legend(c, rows)
    return area


def _around(values: Sequence[float], share: float = 0.06) -> tuple[float, float]:
    """The range of positive values with some room at both ends, as logarithms see it."""
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(share * (high - low), 0.03)
    return 10 ** (low - room), 10 ** (high + room)


def _round_values(low: float, high: float) -> list[float]:
    """Powers of ten within a range, and between them 2 and 5 times those, or each multiple where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 4, 5, 6, 8) if span < 0.8 else (1, 2, 5) if span < 3.2 else (1,)
    return [m * 10.0**d for d in decades for m in steps if low <= m * 10.0**d <= high]


def _tick(text: str) -> str:
    """``1.00 ms`` as ``1 ms``: ticks are round."""
    figure, space, unit = text.partition(" ")
    return (figure.rstrip("0").rstrip(".") if "." in figure else figure) + space + unit


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else significant(value)


def _legend_rows(entries: Sequence[tuple[str, Style]], width: float) -> list[list[tuple[float, str, Style]]]:
    rows: list[list[tuple[float, str, Style]]] = [[]]
    x = 0.0
    for name, look in entries:
        text = clip(name, 40)
        wide = 42 + 6.2 * len(text)
        if rows[-1] and x + wide > width:
            rows.append([])
            x = 0.0
        rows[-1].append((x, text, look))
        x += wide
    return rows


def _legend(canvas: Canvas, rows: Sequence[Sequence[tuple[float, str, Style]]]) -> None:
    for i, row in enumerate(rows):
        for x, text, look in row:
            y = 14 + _ROW * i
            canvas.line(66 + x, y - 4, 86 + x, y - 4, look.color, 3, look.dash)
            canvas.text(92 + x, y, text, color=COLORS["ink"], size=11.5)
