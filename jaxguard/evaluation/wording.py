"""Numbers and foreign text as a reader should see them, in a terminal and in a report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxguard.evaluation.bootstrap import Interval
from jaxguard.features.characters import visible

STEP_METRICS = frozenset({"mas"})


def number(value: float, metric: str = "", *, digits: int | None = None) -> str:
    """A value as text, a dash where undefined; steps with fewer digits than shares."""
    if not math.isfinite(value):
        return "–"
    places = digits if digits is not None else (2 if metric in STEP_METRICS else 3)
    text = f"{value:.{places}f}"
    return text.replace("-", "−") if float(text) else f"{0:.{places}f}"


def told_apart(value: float, among: Iterable[float], digits: int = 3) -> str:
    """One of several shares, with as many digits as tell them apart, from each other and from 0 and 1."""
    shares = {0.0, 1.0, *among}
    enough = (d for d in range(digits, 9) if len({number(share, digits=d) for share in shares}) == len(shares))
    return number(value, digits=next(enough, 9))


def risk(value: float) -> str:
    """A risk or a threshold with two digits, and with more where two would hide that it is above 0 or below 1."""
    if 0.995 <= value < 1:
        return ">0.9999" if value >= 0.99995 else number(value, digits=4)
    if 0 < value < 0.005:
        return "<0.0001" if value < 0.00005 else number(value, digits=4)
    return number(value, digits=2)


def span(interval: Interval, metric: str = "") -> str:
    """An interval as text, short enough for a column; empty where there is none."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return ""
    places = 1 if metric in STEP_METRICS else 2
    return "–".join(_short(end, places) for end in (interval.low, interval.high))


def _short(value: float, places: int) -> str:
    text = number(value, digits=places)
    if text == "1.00":
        return "1"  # two of them in full would run into the next column
    return text.replace("0.", ".", 1) if text.startswith(("0.", "−0.")) else text


def visible_lines(text: str) -> str:
    """:func:`visible` text that keeps its line breaks, for a preformatted block."""
    return "\n".join(visible(line) for line in text.replace("\r\n", "\n").split("\n"))


def clip(text: str, length: int) -> str:
    """Visible text of at most ``length`` characters, with an ellipsis where something was cut."""
    shown = visible(text[: 4 * length])
    return shown if len(shown) <= length and len(text) <= 4 * length else shown[: length - 1].rstrip() + "…"


def arguments(values: Mapping[str, Any] | None, raw: str | None, length: int) -> str:
    """A call's arguments in one short line."""
    if values is None:
        return clip(raw or "", length)
    return clip(", ".join(f"{k}={_literal(v, length)}" for k, v in values.items()), length)


def _literal(value: Any, length: int) -> str:
    return value[:length] if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)[:length]
