"""Counts by a name of which there may be any number, in bounded memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.types import Decision

KEPT = 10_000
"""Distinct names that are counted by themselves; those that come later are counted together."""
_LONGEST = 200


@dataclass(frozen=True)
class Row:
    """What was counted under a name.

    Attributes:
        name: The name; a long one is cut, with a hash of it in place of the rest.
        count: Items: steps, or trajectories.
        hold: Of these, HOLD; ``block`` likewise.
        finite: Items whose value is finite; the others are steps that could not be scored, and are held.
        mean: Of these values; NaN without any, as ``largest``.
    """

    name: str
    count: int
    hold: int
    block: int
    finite: int
    mean: float
    largest: float

    @property
    def attention(self) -> tuple[float, float]:
        """What rows are sorted by: lower ends of the 95 % intervals of the shares of BLOCK, and of any alert.

        So a name with one step that was blocked does not come before one with hundreds.
        """
        return wilson_low(self.block, self.count), wilson_low(self.block + self.hold, self.count)


class Tally:
    """Counts of decisions, and mean and largest of a value, by name."""

    def __init__(self) -> None:
        self._at: dict[str, int] = {}
        self._sums = np.zeros((KEPT + 1, 5))  # count, hold, block, finite values, their sum; row 0 is for later names
        self._largest = np.full(KEPT + 1, -np.inf)

    def add(self, names: Sequence[str], codes: NDArray[np.int64], decision: NDArray[np.int8], value: ArrayLike) -> None:
        """Counts N items.

        Args:
            names: ``[K]`` distinct names.
            codes: ``[N]`` index of each item's name.
            decision: ``[N]`` values of :class:`~jaxguard.types.Decision`.
            value: ``[N]`` a number of each.
        """
        values = np.asarray(value, np.float64)
        finite = np.isfinite(values)
        size = len(names)
        sums = np.stack(
            [
                np.bincount(codes, minlength=size),
                np.bincount(codes[decision == Decision.HOLD], minlength=size),
                np.bincount(codes[decision == Decision.BLOCK], minlength=size),
                np.bincount(codes[finite], minlength=size),
                np.bincount(codes[finite], weights=values[finite], minlength=size),
            ],
            axis=1,
        )
        largest = np.full(size, -np.inf)
        np.maximum.at(largest, codes[finite], values[finite])
        used = np.flatnonzero(sums[:, 0])
        at = np.array([self._place(names[i]) for i in used.tolist()], np.int64)
        np.add.at(self._sums, at, sums[used])
        np.maximum.at(self._largest, at, largest[used])

    def _place(self, name: str) -> int:
        key = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}… {hashlib.sha256(_bytes(name)).hexdigest()[:8]}"
        place = self._at.get(key, 0)
        if not place and len(self._at) < KEPT:
            place = self._at[key] = len(self._at) + 1
        return place

    def rows(self) -> list[Row]:
        """What was counted, the names that need attention most first."""
        made = [self._row(name, at) for name, at in self._at.items()]
        return sorted(made, key=lambda row: (*(-share for share in row.attention), -row.count, row.name))

    def later(self) -> Row | None:
        """The names beyond the first :data:`KEPT`, together; None where there are no more."""
        return self._row("", 0) if self._sums[0, 0] else None

    def total(self) -> Row:
        """All names together."""
        sums = self._sums.sum(axis=0)
        return _made("", sums, float(self._largest.max()))

    def _row(self, name: str, at: int) -> Row:
        return _made(name, self._sums[at], float(self._largest[at]))


def together(rows: Sequence[Row]) -> Row:
    """One row in place of several."""
    count, hold, block, finite = (
        sum(getattr(row, name) for row in rows) for name in ("count", "hold", "block", "finite")
    )
    known = [row for row in rows if row.finite]
    mean = sum(row.mean * row.finite for row in known) / finite if finite else math.nan
    return Row("", count, hold, block, finite, mean, max((row.largest for row in known), default=math.nan))


def _made(name: str, sums: NDArray[np.float64], largest: float) -> Row:
    count, hold, block, finite, total = sums.tolist()
    mean = total / finite if finite else math.nan
    return Row(name, int(count), int(hold), int(block), int(finite), mean, largest if finite else math.nan)


def wilson_low(part: int, whole: int) -> float:
    """Lower end of Wilson's 95 % interval of a share."""
    if not part:
        return 0.0
    z, share = 1.96, part / whole
    spread = z * math.sqrt(share * (1 - share) / whole + (z / (2 * whole)) ** 2)
    return (share + z * z / (2 * whole) - spread) / (1 + z * z / whole)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
