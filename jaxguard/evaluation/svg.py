"""Just enough SVG for the report's charts: scales, axes, marks, and text that is always escaped.

Written out by hand because tool names come from attackers (a plotting library would read ``$`` as
mathematics), because the browser's fonts know more scripts, and because a chart is then a few kilobytes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxguard.evaluation.wording import number, visible

# Okabe and Ito's colours, which people with colour vision deficiencies can tell apart.
COLORS = {
    "ink": "#1c2733",
    "muted": "#64707d",
    "grid": "#e6eaee",
    "axis": "#aab4be",
    "safe": "#0072b2",
    "unsafe": "#d55e00",
    "hazard": "#d55e00",
    "prefix": "#b9c2cb",
    "ema": "#009e73",
    "win": "#56b4e9",
    "fused": "#1c2733",
    "pass": "#9aa5b1",
    "hold": "#e69f00",
    "hold_text": "#8a5a00",
    "block": "#b3123f",
    "block_text": "#b3123f",
    "band": "#0072b2",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from data to pixels; ``low`` may be the larger end."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        """Pixel of a value; values outside the domain land on its edge."""
        share = min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)
        return self.start + share * (self.stop - self.start)


@dataclass
class Canvas:
    """A drawing of fixed size; methods append marks in drawing order."""

    width: float
    height: float
    label: str
    parts: list[str] = field(default_factory=list)

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0, dash: str = "") -> None:
        """A straight line."""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            f'stroke-width="{width:g}"{dashed}/>'
        )

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, opacity: float = 1.0, title: str = ""
    ) -> None:
        """A filled rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}" '
            f'fill="{fill}" fill-opacity="{opacity:g}">{_title(title)}</rect>'
        )

    def path(
        self,
        points: Sequence[tuple[float, float]],
        color: str,
        width: float = 1.5,
        *,
        dash: str = "",
        opacity: float = 1.0,
    ) -> None:
        """A polyline; NaN points break it."""
        commands, pen = [], "M"
        for x, y in points:
            if not (np.isfinite(x) and np.isfinite(y)):
                pen = "M"
                continue
            commands.append(f"{pen}{x:.1f} {y:.1f}")
            pen = "L"
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="{" ".join(commands)}" fill="none" stroke="{color}" stroke-width="{width:g}" '
            f'stroke-opacity="{opacity:g}" stroke-linejoin="round" stroke-linecap="round"{dashed}/>'
        )

    def area(self, points: Sequence[tuple[float, float]], fill: str, opacity: float) -> None:
        """A filled polygon."""
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{corners}" fill="{fill}" fill-opacity="{opacity:g}"/>')

    def dot(self, x: float, y: float, radius: float, fill: str, *, stroke: str = "#fff", title: str = "") -> None:
        """A circle, by default with a white rim that keeps it readable on lines."""
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}" stroke="{stroke}" '
            f'stroke-width="1.5">{_title(title)}</circle>'
        )

    def shape(self, points: Sequence[tuple[float, float]], fill: str, title: str = "") -> None:
        """A small filled polygon with a white rim."""
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polygon points="{corners}" fill="{fill}" stroke="#fff" stroke-width="1.5">{_title(title)}</polygon>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        color: str = COLORS["muted"],
        anchor: str = "start",
        bold: bool = False,
        rotate: float = 0.0,
        halo: bool = False,
    ) -> None:
        """A line of text, escaped and made visible; ``halo`` keeps it readable on marks."""
        weight = ' font-weight="600"' if bold else ""
        turn = f' transform="rotate({rotate:g} {x:.1f} {y:.1f})"' if rotate else ""
        rim = ' stroke="#fff" stroke-width="4" stroke-linejoin="round" paint-order="stroke"' if halo else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
            f"{weight}{turn}{rim}>{html.escape(visible(text))}</text>"
        )

    def render(self) -> str:
        """The drawing as an ``<svg>`` element."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" '
            f'aria-label="{html.escape(visible(self.label), quote=True)}">' + "".join(self.parts) + "</svg>"
        )


@dataclass(frozen=True, slots=True)
class Plot:
    """A canvas with a plotting area and two scales."""

    canvas: Canvas
    x: Scale
    y: Scale

    @property
    def bottom(self) -> float:
        """Pixel of the x axis."""
        return self.y.start

    def at(self, xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
        """Pixels of data points; NaN stays NaN."""
        return [(self.x(x), self.y(y) if np.isfinite(y) else float("nan")) for x, y in zip(xs, ys, strict=True)]


def plot(
    label: str,
    *,
    size: tuple[float, float],
    x: tuple[float, float],
    y: tuple[float, float],
    x_ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    x_label: str = "",
    y_label: str = "",
    margin: tuple[float, float, float, float] = (16, 16, 44, 52),
) -> Plot:
    """An empty plot with light horizontal grid lines; ``margin`` is top, right, bottom, left."""
    width, height = size
    top, right, bottom, left = margin
    canvas = Canvas(width, height, label)
    area = Plot(canvas, Scale(*x, left, width - right), Scale(*y, height - bottom, top))
    for tick in y_ticks:
        canvas.line(left, area.y(tick), width - right, area.y(tick), COLORS["grid"])
        canvas.text(left - 8, area.y(tick) + 4, tick_text(tick, y_ticks), size=11, anchor="end")
    canvas.line(left, area.bottom, width - right, area.bottom, COLORS["axis"])
    for tick in x_ticks:
        canvas.line(area.x(tick), area.bottom, area.x(tick), area.bottom + 4, COLORS["axis"])
        canvas.text(area.x(tick), area.bottom + 18, tick_text(tick, x_ticks), size=11, anchor="middle")
    if x_label:
        canvas.text((left + width - right) / 2, height - 6, x_label, anchor="middle")
    if y_label:
        canvas.text(13, (top + height - bottom) / 2, y_label, anchor="middle", rotate=-90)
    return area


def ticks(high: float, count: int = 5) -> list[float]:
    """Round tick values from 0 to at least ``high``."""
    step = 10.0 ** np.floor(np.log10(max(high, 1e-9) / count))
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if high / (step * m) <= count)
    return [float(step * i) for i in range(int(np.ceil(high / step - 1e-9)) + 1)]


def tick_text(value: float, among: Sequence[float]) -> str:
    """A tick with just the digits that tell it from its neighbours."""
    for digits in range(4):
        if all(abs(round(t, digits) - t) < 1e-9 for t in among):
            return number(value, digits=digits)
    return number(value, digits=4)


def _title(text: str) -> str:
    return f"<title>{html.escape(visible(text))}</title>" if text else ""
