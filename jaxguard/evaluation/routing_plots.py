"""Charts of a router: frontiers of its two errors, reliability, confusion; each an SVG string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from jaxguard.evaluation.lines import name_lines
from jaxguard.evaluation.routing import Frontier, Matrix, PointResult, Reliability
from jaxguard.evaluation.svg import COLORS, Box, Canvas, Label, Labels, Plot, plot, ticks
from jaxguard.evaluation.wording import clip, number, told_apart
from jaxguard.types import Route

SIZE = (540.0, 420.0)
UNIT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
OAR, UAR = "over-ask rate (EXECUTE asked about)", "under-ask rate (ASK executed)"
MOST_SERVICES = 10
# Two services never share both: first all colours drawn through, then dashed.
_STYLES = [(COLORS[color], dash) for dash in ("", "7 4") for color in ("safe", "unsafe", "ema", "hold", "block")]

Place = tuple[float, float]


def pareto(
    curve: Frontier, points: Sequence[PointResult], rivals: Mapping[str, Place] | None = None, *, top: float = 1.0
) -> str:
    """OAR against UAR over all taus, with operating points and rivals (OAR, UAR); both axes end at ``top``.

    A point of which services have their own tau need not lie on the curve, which is that of one tau for all. Points and
    rivals beyond the axes are left out.
    """
    area = _rates_plot("Over-ask and under-ask rate over all thresholds", top)
    c, labels = area.canvas, Labels(area.canvas, Box(area.x.start + 2, 34, area.x.stop + 8, area.bottom - 2))
    c.line(area.x.start, 15, area.x.start + 24, 15, COLORS["safe"], 2.4)
    c.text(area.x.start + 30, 19, f"all taus, one for all services ({len(curve.taus):,} drawn)", color=COLORS["ink"])
    for line in _inside(area, curve, top):
        c.path(line, COLORS["safe"], 2.4)
        labels.trace(line)
    wanted = []
    for name, (oar, uar) in (rivals or {}).items():
        if max(oar, uar) <= top:
            x, y = area.x(oar), area.y(uar)
            c.shape([(x, y - 6), (x + 6, y), (x, y + 6), (x - 6, y)], COLORS["muted"], f"{name}: {_told(oar, uar)}")
            labels.mark(x, y, 6)
            wanted.append(Label(x, y, clip(name, 32), reach=200))
    ours, taus = [], [point.tau for point in points]
    for point in points:
        at = point.place
        if at is not None and max(at) <= top:
            x, y = area.x(at[0]), area.y(at[1])
            labels.mark(x, y, 6)
            ours.append(Label(x, y, f"{point.name}, τ {told_apart(point.tau, taus, 2)}", gap=11, reach=120, bold=True))
            c.shape(_star(x, y, 8), COLORS["unsafe"], f"{point.name}: {_told(*at)}")
    labels.beside([*ours, *wanted])
    return c.render()


def service_frontiers(curves: Sequence[Frontier], stars: Mapping[str, Place]) -> str:
    """Frontiers of services, at most ten, each with a star at the (OAR, UAR) that it operates at."""
    drawn = curves[:MOST_SERVICES]
    entries = [(clip(curve.service, 24), *style) for curve, style in zip(drawn, _STYLES, strict=False)]
    area = _rates_plot("Over-ask and under-ask rate by service", 1.0, above=28 + 16 * (len(drawn) // 3))
    for curve, (color, dash) in zip(drawn, _STYLES, strict=False):
        area.canvas.path(area.at(curve.oar, curve.uar), color, 2, dash=dash)
    for curve, (color, _) in zip(drawn, _STYLES, strict=False):
        if curve.service in stars:
            oar, uar = stars[curve.service]
            area.canvas.shape(_star(area.x(oar), area.y(uar), 8), color, f"{curve.service}: {_told(oar, uar)}")
    name_lines(area, entries)
    return area.canvas.render()


def reliability_diagram(found: Reliability, *, claim: str, outcome: str) -> str:
    """Share in which a claim came true against its probability; bars below show how many rows claim what."""
    area = plot(
        f"Reliability: {outcome} against {claim}",
        size=SIZE, x=(0, 1), y=(0, 1), x_ticks=UNIT, y_ticks=UNIT, x_label=claim, y_label=outcome,
        margin=(40, 16, 44, 58),
    )  # fmt: skip
    c, n = area.canvas, sum(found.counts)
    if found.ece is None:
        c.text(area.x(0.5), area.y(0.5), "no rows", anchor="middle")
        return c.render()
    for low, high, count in zip(found.edges, found.edges[1:], found.counts, strict=False):
        height = (area.bottom - area.y.stop) * 0.25 * count / max(found.counts)
        left = area.x(low) + 1
        c.rect(left, area.bottom - height, area.x(high) - 1 - left, height, COLORS["muted"], 0.25, f"{count:,} rows")
    c.path(area.at([0, 1], [0, 1]), COLORS["axis"], 1, dash="3 4")
    places = [
        (said, true, count)
        for said, true, count in zip(found.claimed, found.came_true, found.counts, strict=True)
        if said is not None and true is not None
    ]
    c.path(area.at([said for said, _, _ in places], [true for _, true, _ in places]), COLORS["safe"], 2)
    for said, true, count in places:
        title = f"claimed {number(said)}, came true {number(true)}, {count:,} rows"
        c.dot(area.x(said), area.y(true), 5, COLORS["safe"], title=title)
    c.text(
        area.x.start, 19, f"expected calibration error {number(found.ece)}, {n:,} rows", color=COLORS["ink"], bold=True
    )
    c.text(area.x.stop, 19, "bars: rows", anchor="end", size=11)
    return c.render()


def confusion_chart(matrix: Matrix) -> str:
    """Rows by label and route: counts, and shares of the label."""
    width, height, left, top = 540.0, 330.0, 100.0, 60.0
    canvas = Canvas(width, height, "Rows by label and route")
    across, down = (width - left - 16) / 3, (height - top - 16) / 3
    canvas.text(left + 1.5 * across, 18, "route", anchor="middle")
    canvas.text(14, top + 1.5 * down, "label", anchor="middle", rotate=-90)
    for label in Route:
        total = sum(matrix[label])
        y = top + label * down
        canvas.text(left - 12, y + down / 2 - 2, label.name, anchor="end", color=COLORS["ink"], bold=True)
        canvas.text(left - 12, y + down / 2 + 14, f"{total:,}", anchor="end", size=11)
        canvas.text(
            left + (label + 0.5) * across, top - 14, label.name, anchor="middle", color=COLORS["ink"], bold=True
        )
        for route in Route:
            count = matrix[label][route]
            share = count / total if total else float("nan")
            x = left + route * across
            color = COLORS["ema"] if label == route else COLORS["unsafe"]
            canvas.rect(x + 2, y + 2, across - 4, down - 4, COLORS["grid"], 0.5)
            if total:
                canvas.rect(x + 2, y + 2, across - 4, down - 4, color, 0.75 * share, f"{label.name} as {route.name}")
            canvas.text(
                x + across / 2, y + down / 2, f"{count:,}", size=20, anchor="middle", color=COLORS["ink"], bold=True
            )
            text = f"{number(100 * share, digits=1)} %" if total else "–"
            canvas.text(x + across / 2, y + down / 2 + 20, text, anchor="middle", color=COLORS["ink"])
    return canvas.render()


def _rates_plot(label: str, top: float, above: float = 40) -> Plot:
    at = UNIT if top == 1.0 else [tick for tick in ticks(top) if tick <= top]
    return plot(
        label, size=SIZE, x=(0, top), y=(0, top), x_ticks=at, y_ticks=at, x_label=OAR, y_label=UAR,
        margin=(above, 16, 44, 58),
    )  # fmt: skip


def _inside(area: Plot, curve: Frontier, top: float) -> list[list[Place]]:
    """The parts of a curve within the axes, in pixels."""
    shown = (np.asarray(curve.oar) <= top) & (np.asarray(curve.uar) <= top)
    pixels = area.at(curve.oar, curve.uar)
    ends = np.flatnonzero(np.diff(np.r_[False, shown, False]))
    return [pixels[first:last] for first, last in zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True)]


def _star(x: float, y: float, radius: float) -> list[Place]:
    angles = np.pi * (np.arange(10) / 5 - 0.5)
    reach = radius * np.where(np.arange(10) % 2, 0.45, 1.0)
    return list(zip((x + reach * np.cos(angles)).tolist(), (y + reach * np.sin(angles)).tolist(), strict=True))


def _told(oar: float, uar: float) -> str:
    return f"OAR {number(oar)}, UAR {number(uar)}"
