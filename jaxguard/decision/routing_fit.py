"""All thresholds of a router from validation rows: every operating point, over all services and by service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.routing import Routing, RoutingError, check_labels, shares
from jaxguard.decision.routing_bounds import CannotCertify, certified_tau
from jaxguard.decision.routing_points import POINTS, OperatingPoint, choose_points
from jaxguard.types import Route

CERTIFIED = "certified"


def fit_routing(
    logits: ArrayLike,
    labels: ArrayLike,
    services: Sequence[str | None],
    *,
    source: str,
    active: str = "balanced",
    min_rows: int = 30,
    oar_limit: float = 0.05,
    uar_limit: float = 0.05,
    delta: float | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Routing:
    """Chooses the taus of every operating point, over all services and for each service that has enough rows.

    Args:
        logits: ``[N, 3]`` of validation rows.
        labels: ``[N]`` values of :class:`~jaxguard.types.Route`.
        services: ``[N]`` service of each row; None or ``""`` where it is not known.
        source: Fingerprint of what produced the logits.
        active: Operating point in use.
        min_rows: EXECUTE rows, and ASK rows, that a service needs for a tau of its own.
        oar_limit: Of ``autonomous``.
        uar_limit: Of ``conservative`` and ``certified``.
        delta: With it there is a fourth point, ``certified``: the lowest tau whose UAR is at most ``uar_limit`` with
            confidence 1 - delta (:func:`~jaxguard.decision.routing_bounds.certified_tau`). It holds over all services
            together and none has its own.
        provenance: Kept with the thresholds, beside what the points reached.

    Raises:
        RoutingError: Shapes, labels or settings are not what they should be, or the active point is impossible.
    """
    values = np.asarray(logits)
    own = check_labels(labels, len(shares(values)))
    if len(services) != len(own):
        raise RoutingError(f"services: got {len(services)}, expected one for each of {len(own)} rows")
    if type(min_rows) is not int or min_rows < 1:
        raise RoutingError(f"min_rows: got {min_rows!r}, expected an integer of at least 1")

    def choose(rows: Any) -> dict[str, OperatingPoint]:
        return choose_points(values[rows], own[rows], oar_limit=oar_limit, uar_limit=uar_limit)

    points = choose(slice(None))
    taus = {name: point.tau for name, point in points.items() if point.tau is not None}
    impossible = {name: point.reason for name, point in points.items() if point.tau is None}
    told: dict[str, Any] = {name: asdict(point) for name, point in points.items()}
    own_taus: dict[str, dict[str, float]] = {name: {} for name in taus}
    fell_back: dict[str, dict[str, str]] = {name: {} for name in taus}
    keys = np.array([service or "" for service in services], dtype=object)
    for service in sorted(set(keys.tolist()) - {""}):
        rows = np.array([key == service for key in keys])  # NumPy would drop a NUL at the end
        executes, asks = int((own[rows] == Route.EXECUTE).sum()), int((own[rows] == Route.ASK).sum())
        few = f"{executes} EXECUTE and {asks} ASK rows, expected at least {min_rows} of each"
        enough = min(executes, asks) >= min_rows
        chosen = choose(rows) if enough else dict.fromkeys(POINTS, OperatingPoint(None, reason=few))
        for name in taus:
            tau = chosen[name].tau
            if tau is None:
                fell_back[name][service] = chosen[name].reason
            else:
                own_taus[name][service] = tau
    if delta is not None:
        try:
            certified = certified_tau(values, own, limit=uar_limit, delta=delta)
            taus[CERTIFIED], told[CERTIFIED] = certified.tau, asdict(certified)
        except CannotCertify as error:
            impossible[CERTIFIED] = str(error)
    return Routing(
        taus=taus,
        active=active,
        source=source,
        services=own_taus,
        fell_back=fell_back,
        impossible=impossible,
        provenance={**(provenance or {}), "rows": len(own), "min_rows": min_rows, "points": told},
    )
