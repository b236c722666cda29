"""Just enough SVG for the report's charts: scales, axes, marks, and text that is always escaped.

Written out by hand because tool names come from attackers (a plotting library would read ``$`` as
mathematics), because the browser's fonts know more scripts, and because a chart is then a few kilobytes.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from jaxguard.evaluation.wording import clip, number, visible

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


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        """Whether the two overlap."""
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        """Whether the other lies inside."""
        return (
            self.left <= other.left and other.right <= self.right and self.top <= other.top
        ) and other.bottom <= self.bottom


@dataclass(frozen=True, slots=True)
class Spot:
    """A place for a text: the smaller the cost the better; ``leader`` is the line to a mark that is not beside it."""

    box: Box
    cost: float
    anchor: str = "middle"
    leader: tuple[float, float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Label:
    """A text wanted beside the mark at (x, y), ``gap`` pixels from it.

    With a ``reach`` of more than 20 pixels it may stand so far above or below, with a line to the mark.
    """

    x: float
    y: float
    text: str
    gap: float = 9
    reach: float = 14
    size: float = 11
    bold: bool = False


@dataclass
class Labels:
    """Places texts so that none lies over another or over a mark, and where possible none over a curve."""

    canvas: Canvas
    bounds: Box
    marks: list[Box] = field(default_factory=list)
    texts: list[Box] = field(default_factory=list)
    leaders: list[Box] = field(default_factory=list)
    curve: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 2)))

    def mark(self, x: float, y: float, radius: float) -> None:
        """Keeps texts off a mark."""
        self.marks.append(Box(x - radius, y - radius, x + radius, y + radius))

    def trace(self, points: Sequence[tuple[float, float]]) -> None:
        """Makes texts avoid a polyline."""
        corners = np.asarray(points, dtype=np.float64)
        run = np.r_[0.0, np.cumsum(np.hypot(*np.diff(corners, axis=0).T))]
        at = np.linspace(0.0, run[-1], int(run[-1] / 4) + 2)
        self.curve = np.r_[self.curve, np.c_[np.interp(at, run, corners[:, 0]), np.interp(at, run, corners[:, 1])]]

    def beside(self, wanted: Sequence[Label]) -> list[str]:
        """Puts texts beside their marks, the first ones best; returns the texts for which there was no room.

        Where a text finds no room, all are placed again with that text first.
        """
        texts, leaders = list(self.texts), list(self.leaders)
        order, best = list(wanted), dict[Label, Spot]()
        for _ in range(min(len(order), 6)):
            self.texts, self.leaders = list(texts), list(leaders)
            found = {label: spot for label in order if (spot := self._settle(label))}
            if len(found) > len(best):
                best = found
            failed = [label for label in order if label not in found]
            if not failed:
                break
            order = failed + [label for label in order if label in found]
        self.texts = texts + [spot.box for spot in best.values()]
        self.leaders = leaders + [piece for spot in best.values() if spot.leader for piece in _pieces(spot.leader)]
        for label, spot in best.items():
            self._draw(label, spot)
        return [label.text for label in wanted if label not in best]

    def _settle(self, label: Label) -> Spot | None:
        """The best free spot for a text, from then on taken."""
        spot, lowest = None, float("inf")
        for candidate in sorted(_around(label), key=lambda spot: spot.cost):
            if candidate.cost >= lowest:
                break
            if self._free(candidate):
                cost = candidate.cost + 6 * self._crossed(candidate.box)
                spot, lowest = (candidate, cost) if cost < lowest else (spot, lowest)
        if spot:
            self.texts.append(spot.box)
            self.leaders += _pieces(spot.leader) if spot.leader else []
        return spot

    def _draw(self, label: Label, spot: Spot) -> None:
        box = spot.box
        if spot.leader:
            self.canvas.line(*spot.leader, COLORS["axis"])
        x = {"start": box.left, "end": box.right, "middle": (box.left + box.right) / 2}[spot.anchor]
        self.canvas.text(
            x, (box.top + box.bottom) / 2 + 0.36 * label.size, label.text, size=label.size,
            color=COLORS["ink" if label.bold else "muted"], anchor=spot.anchor, bold=label.bold, halo=True,
        )  # fmt: skip

    def _free(self, spot: Spot) -> bool:
        solid = [*self.texts, *self.marks]
        if not self.bounds.holds(spot.box) or any(spot.box.meets(box) for box in [*solid, *self.leaders]):
            return False
        return not (spot.leader and any(piece.meets(box) for piece in _pieces(spot.leader) for box in solid))

    def _crossed(self, box: Box) -> int:
        x, y = self.curve.T
        return int(np.count_nonzero((x > box.left) & (x < box.right) & (y > box.top) & (y < box.bottom)))


def _around(label: Label) -> Iterator[Spot]:
    x, y, gap, reach = label.x, label.y, label.gap, label.reach
    width, height = text_width(label.text, label.size, bold=label.bold), 1.25 * label.size
    for top in (y + gap, y - gap - height):
        yield Spot(Box(x - width / 2, top, x + width / 2, top + height), height)
    for away in (0.0, 14.0, 30.0, 60.0) if reach > 20 else (0.0,):
        for shift in np.arange(-reach, reach + 1, 2.0).tolist():
            top, near = y + shift - height / 2, gap + away
            for side, left, anchor in ((1, x + near, "start"), (-1, x - near - width, "end")):
                far = away > 0 or abs(shift) > height / 2 + 6
                leader = (x, y, x + side * (near - 1), y + shift) if far else None
                cost = abs(shift) + away + (side < 0)
                yield Spot(Box(left, top, left + width, top + height), cost, anchor, leader)


def _pieces(line: tuple[float, float, float, float]) -> list[Box]:
    """Small boxes along a line, from where it leaves the mark at its start."""
    x1, y1, x2, y2 = line
    length = float(np.hypot(x2 - x1, y2 - y1))
    shares = np.arange(min(9.0, length), length + 1, 2.0) / max(length, 1e-9)
    points = [(x1 + share * (x2 - x1), y1 + share * (y2 - y1)) for share in shares.tolist()]
    return [Box(x - 1, y - 1, x + 1, y + 1) for x, y in points]


def text_width(text: str, size: float = 12, *, bold: bool = False) -> float:
    """About how many pixels a text is wide; fonts differ, so rather too many."""
    return sum(map(_em, visible(text))) * size * (1.06 if bold else 1.0)


def _em(char: str) -> float:
    if unicodedata.east_asian_width(char) in "WF":
        return 1.0
    if char in "mwMW@%…—":
        return 0.92
    if char in " .,:;'|!()[]/-fijlrtI":
        return 0.34
    return 0.7 if char.isupper() else 0.57


def fit(text: str, width: float, size: float = 12, *, bold: bool = False) -> str:
    """Text cut to about ``width`` pixels."""
    length = min(len(text), 400)
    while length > 1 and text_width(clip(text, length), size, bold=bold) > width:
        length -= 1
    return clip(text, max(length, 1))


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
