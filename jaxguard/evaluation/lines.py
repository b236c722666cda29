"""Charts of lines over a common axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from jaxguard.evaluation.svg import COLORS, Plot, plot, ticks
from jaxguard.evaluation.wording import number

SIZE = (540.0, 300.0)
MARGIN = (44.0, 16.0, 44.0, 58.0)

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """A line of a chart; ``marks`` draws its points too."""

    name: str
    points: Points
    color: str
    dash: str = ""
    marks: bool = False


def line_chart(
    label: str, lines: Sequence[Line], *, x_label: str, y_label: str, low: float = 0.0, high: float | None = None
) -> Markup:
    """Lines over a common x axis that starts at 0, with their names on top; NaN breaks a line.

    ``high`` fixes the top of the y axis; otherwise the largest value does. Values outside are drawn on the edge.
    """
    values = [y for line in lines for _, y in line.points if np.isfinite(y)]
    right = max((x for line in lines for x, _ in line.points), default=0) or 1.0
    y_ticks = [t for t in ticks(high or max([*values, 1e-6])) if t >= low and (high is None or t <= high)]
    area = plot(
        label, size=SIZE, x=(0, right), y=(low, high or y_ticks[-1]), x_ticks=[t for t in ticks(right) if t <= right],
        y_ticks=y_ticks, x_label=x_label, y_label=y_label, margin=MARGIN,
    )  # fmt: skip
    for line in lines:
        pixels = area.at([x for x, _ in line.points], [y for _, y in line.points])
        area.canvas.path(pixels, line.color, 2, dash=line.dash)
        if line.marks:
            for (x, y), (_, value) in zip(pixels, line.points, strict=True):
                if np.isfinite(y):
                    area.canvas.dot(x, y, 4, line.color, title=f"{line.name}: {number(value)}")
    if not values:
        area.canvas.text(area.x(right / 2), (area.y.start + area.y.stop) / 2, "nothing to draw", anchor="middle")
    name_lines(area, [(line.name, line.color, line.dash) for line in lines])
    return Markup(area.canvas.render())


def name_lines(area: Plot, entries: Sequence[tuple[str, str, str]]) -> None:
    """Names of lines in one or two rows above the plotting area."""
    x, y = area.x.start, 14.0
    for name, color, dash in entries:
        if x > area.x.start and x + 32 + 6.6 * len(name) > area.x.stop:
            x, y = area.x.start, y + 16
        area.canvas.line(x, y - 4, x + 20, y - 4, color, 3, dash)
        area.canvas.text(x + 26, y, name, color=COLORS["ink"], size=11.5)
        x += 42 + 6.2 * len(name)
