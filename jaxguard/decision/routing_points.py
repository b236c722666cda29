"""Operating points of a router, chosen on validation rows (Safety Sentry, section 4.3 and appendix D).

With OAR = P(ASK | label EXECUTE) and UAR = P(EXECUTE | label ASK):

- ``autonomous``: of the taus with OAR <= 5 %, those with the lowest UAR, of these those with the lowest OAR;
- ``balanced``: those with the lowest OAR + UAR;
- ``conservative``: of the taus with UAR <= 5 %, those with the lowest OAR, of these those with the lowest UAR.

Between two neighbouring q of the rows nothing changes, so that every tau is looked at by looking at the intervals
between them. The point is the middle of the best interval; of equally good ones the widest is taken, of equally wide
ones the highest. A point that does not exist has no tau and says why; nothing near it is taken instead.
Where one tau keeps both limits, ``conservative`` may have the lower tau of the two: each rule spends its limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.decision.conformal import exact_level
from jaxguard.decision.routing import Bools, Floats, RoutingError, Shares, check_labels, shares
from jaxguard.types import Route

POINTS = ("autonomous", "balanced", "conservative")
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A tau and what it reaches on the rows that it was chosen on; rates are None and ``tau`` too where impossible.

    Attributes:
        tau: The threshold.
        low: Taus above this one, and
        high: up to this one, route these rows alike.
        oar: Over-ask rate.
        uar: Under-ask rate.
        reason: Why there is no such tau; empty where there is one.
    """

    tau: float | None
    low: float | None = None
    high: float | None = None
    oar: float | None = None
    uar: float | None = None
    reason: str = ""


@dataclass(frozen=True, eq=False)
class Boundary:
    """All taus, as K intervals ``(low, high]`` within which no row changes sides; the first one holds 0 too.

    Attributes:
        low: ``[K]`` rising.
        high: ``[K]``.
        over: ``[K]`` EXECUTE rows that are asked about; rises with tau.
        under: ``[K]`` ASK rows that execute; falls with tau.
        executes: EXECUTE rows.
        asks: ASK rows.
    """

    low: Floats
    high: Floats
    over: Ints
    under: Ints
    executes: int
    asks: int

    def middle(self, k: int) -> float:
        """The tau in the middle of interval k; its end where floats leave no room."""
        low, high = float(self.low[k]), float(self.high[k])
        tau = low + (high - low) / 2
        return tau if tau > low else high


def boundary(found: Shares, labels: Ints) -> Boundary:
    """The intervals of tau for rows with these labels ``[N]``; REFUSE rows move neither rate and do not divide."""
    execute, ask = labels == Route.EXECUTE, labels == Route.ASK
    values = np.unique(found.q[found.movable & (execute | ask)])
    high = np.r_[values, 1.0] if not len(values) or values[-1] < 1.0 else values
    low = np.r_[0.0, high[:-1]]

    def below(rows: Bools) -> Ints:
        return np.searchsorted(np.sort(found.q[rows & found.movable]), high, side="left")

    over = below(execute) + int((execute & ~found.scored).sum())
    under = int((ask & found.movable).sum()) - below(ask)
    return Boundary(low, high, over, under, int(execute.sum()), int(ask.sum()))


def candidate_taus(logits: ArrayLike, labels: ArrayLike, most: int = 1_000) -> Floats:
    """Taus ``[T]``, rising, that together show every pair of OAR and UAR; evenly thinned to at most ``most``.

    Raises:
        RoutingError: Shapes or labels are not what they should be.
    """
    found = shares(logits)
    edges = boundary(found, check_labels(labels, len(found)))
    kept = np.unique(np.linspace(0, len(edges.high) - 1, min(len(edges.high), most)).round().astype(int))
    return np.array([edges.middle(int(i)) for i in kept])


def choose_points(
    logits: ArrayLike, labels: ArrayLike, *, oar_limit: float = 0.05, uar_limit: float = 0.05
) -> dict[str, OperatingPoint]:
    """The three operating points, by the rules of the module.

    Args:
        logits: ``[N, 3]`` of validation rows.
        labels: ``[N]`` values of :class:`~jaxguard.types.Route`.
        oar_limit: Of ``autonomous``, in (0, 1).
        uar_limit: Of ``conservative``, in (0, 1).

    Raises:
        RoutingError: Shapes, labels or limits are not what they should be.
    """
    for name, limit in (("oar_limit", oar_limit), ("uar_limit", uar_limit)):
        check_share(name, limit)
    found = shares(logits)
    edges = boundary(found, check_labels(labels, len(found)))
    if not (edges.executes and edges.asks):
        reason = f"{edges.executes} EXECUTE and {edges.asks} ASK rows, expected at least one of each"
        return {name: OperatingPoint(None, reason=reason) for name in POINTS}
    over, under, executes, asks = edges.over, edges.under, edges.executes, edges.asks
    over_allowed = over <= math.floor(exact_level(oar_limit) * executes)
    under_allowed = under <= math.floor(exact_level(uar_limit) * asks)
    every = np.ones(len(over), bool)
    # Integers in the order of the rules: no rounding of rates decides.
    return {
        "autonomous": _choose(edges, over_allowed, under * (executes + 1) + over, f"OAR <= {oar_limit:g}"),
        "balanced": _choose(edges, every, over * asks + under * executes, "any"),
        "conservative": _choose(edges, under_allowed, over * (asks + 1) + under, f"UAR <= {uar_limit:g}"),
    }


def _choose(edges: Boundary, allowed: Bools, cost: Ints, rule: str) -> OperatingPoint:
    if not allowed.any():
        return OperatingPoint(
            None,
            reason=f"no tau reaches {rule}: the lowest OAR is {edges.over.min()} of {edges.executes}, the lowest UAR "
            f"{edges.under.min()} of {edges.asks}",
        )
    best = np.flatnonzero(allowed & (cost == cost[allowed].min()))
    k = max(best.tolist(), key=lambda at: (edges.high[at] - edges.low[at], at))
    return OperatingPoint(
        tau=edges.middle(k),
        low=float(edges.low[k]),
        high=float(edges.high[k]),
        oar=float(edges.over[k] / edges.executes),
        uar=float(edges.under[k] / edges.asks),
    )


def check_share(name: str, value: float) -> None:
    """Refuses what is not strictly between 0 and 1, by name, with a RoutingError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise RoutingError(f"{name}: got {value!r}, expected a number strictly between 0 and 1")
