"""EXECUTE, ASK or REFUSE from the logits of three decision tokens, at thresholds that are set after training.

Safety Sentry, section 3.3, with l the logits and p their softmax over the whole vocabulary::

    q = p_execute / (p_execute + p_ask) = sigmoid(l_execute - l_ask)
    REFUSE where l_refuse is the largest of the three (ties: REFUSE), else EXECUTE if q >= tau, else ASK

tau moves the boundary of EXECUTE and ASK and leaves REFUSE alone. A row with a logit that is not finite never
executes: it is ASK, and counted. At tau = 1 a row still executes where q rounds to 1, in float64 from a
difference of 37 on.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.types import JaxguardError, Route

VERSION = 1
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Routes = NDArray[np.int8]
_LARGEST = float(np.finfo(np.float32).max)


class RoutingError(JaxguardError):
    """Logits, labels or thresholds that cannot be routed with."""


@dataclass(frozen=True, eq=False)
class Shares:
    """What of N rows of logits decides; the one definition of q that every other part reads.

    Attributes:
        q: float64 ``[N]`` share of EXECUTE in EXECUTE and ASK; NaN where not scored.
        refused: ``[N]`` is REFUSE the largest? False where not scored.
        scored: ``[N]`` are all three logits finite in float32?
    """

    q: Floats
    refused: Bools
    scored: Bools

    def __len__(self) -> int:
        return len(self.q)

    @property
    def movable(self) -> Bools:
        """``[N]`` rows whose route depends on tau."""
        return self.scored & ~self.refused

    @property
    def unscored(self) -> int:
        """Rows that are ASK because a logit was not finite."""
        return int((~self.scored).sum())

    def routes(self, tau: ArrayLike) -> Routes:
        """``[N]`` values of :class:`~jaxguard.types.Route` at one tau, or at one for each row.

        Raises:
            RoutingError: A tau outside [0, 1], or not as many as rows.
        """
        taus = check_taus(tau)
        if taus.shape not in ((), self.q.shape):
            raise RoutingError(f"tau: got shape {taus.shape}, expected one number or [{len(self)}]")
        executes = self.movable & (self.q >= taus)
        return np.where(executes, Route.EXECUTE, np.where(self.refused, Route.REFUSE, Route.ASK)).astype(np.int8)


def shares(logits: ArrayLike) -> Shares:
    """Reads logits ``[N, 3]``, columns in the order of :class:`~jaxguard.types.Route`.

    Raises:
        RoutingError: Another shape, or no numbers.
    """
    try:
        values = np.asarray(logits, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise RoutingError(f"logits: {error}, expected numbers") from None
    if values.ndim != 2 or values.shape[1] != len(Route):
        raise RoutingError(f"logits: got shape {values.shape}, expected [N, {len(Route)}]")
    scored: Bools = np.all(np.abs(values) <= _LARGEST, axis=1)
    execute, ask, refuse = np.where(scored[:, None], values, 0.0).T
    gap = execute - ask
    small = np.exp(-np.abs(gap))  # at most 1: nothing overflows
    q = np.where(gap >= 0, 1.0, small) / (1.0 + small)
    return Shares(np.where(scored, q, np.nan), scored & (refuse >= np.maximum(execute, ask)), scored)


def route_step(logits: Sequence[float], tau: float) -> tuple[Route, float]:
    """Route and q of one step; the same as :func:`shares` and its routes without the cost of arrays.

    Args:
        logits: Three numbers in the order of :class:`~jaxguard.types.Route`; where one is not finite in float32 the
            route is ASK and q is NaN.
        tau: In [0, 1].
    """
    execute, ask, refuse = logits
    if not all(abs(value) <= _LARGEST for value in (execute, ask, refuse)):
        return Route.ASK, math.nan
    gap = execute - ask
    small = float(np.exp(-abs(gap)))  # the array's own exp: another may differ in the last bit
    q = (1.0 if gap >= 0 else small) / (1.0 + small)
    if refuse >= max(execute, ask):
        return Route.REFUSE, q
    return (Route.EXECUTE if q >= tau else Route.ASK), q


def check_taus(tau: ArrayLike) -> Floats:
    """``tau`` as float64.

    Raises:
        RoutingError: One outside [0, 1].
    """
    taus = np.asarray(tau, dtype=np.float64)
    outside = ~((taus >= 0.0) & (taus <= 1.0))
    if outside.any():
        raise RoutingError(f"tau: got {float(taus[outside][0])!r}, expected a number in [0, 1]")
    return taus


def check_labels(labels: ArrayLike, n: int, name: str = "labels") -> NDArray[np.int64]:
    """``labels`` ``[n]`` as int64; ``name`` is what an error calls them.

    Raises:
        RoutingError: Another length, or a value that is no :class:`~jaxguard.types.Route`.
    """
    values = np.asarray(labels)
    if values.shape != (n,) or not (np.issubdtype(values.dtype, np.integer) or not n):
        raise RoutingError(f"{name}: got {values.dtype} of shape {values.shape}, expected integers of shape [{n}]")
    wrong = (values < 0) | (values >= len(Route))
    if wrong.any():
        raise RoutingError(f"{name}: got {values[wrong][0]}, expected 0 (EXECUTE), 1 (ASK) or 2 (REFUSE)")
    return values.astype(np.int64)


@dataclass(frozen=True)
class Routing:
    """Thresholds of a router and what they are valid for.

    Attributes:
        taus: tau by operating point, over all services.
        active: The operating point in use; a key of ``taus``.
        source: Fingerprint of what produced the logits that the thresholds were chosen on.
        services: tau by operating point and service, where the service had enough rows of its own.
        fell_back: Why a service uses the tau of all services, by operating point and service.
        impossible: Why an operating point does not exist, by its name.
        provenance: Where the rows came from and what the points reached on them; JSON-like.
    """

    taus: Mapping[str, float]
    active: str
    source: str
    services: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    fell_back: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    impossible: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("active", "source"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise RoutingError(f"routing {name}: got {value!r:.40}, expected a text that is not empty")
        for name in ("services", "fell_back", "impossible", "provenance"):
            _mapping(name, getattr(self, name))
        _check_named_taus("taus", self.taus)
        for kind in ("services", "fell_back"):
            for point, of in getattr(self, kind).items():
                if point not in self.taus:
                    raise RoutingError(f"routing {kind}: got point {point!r}, expected one of {', '.join(self.taus)}")
                if kind == "services":
                    _check_named_taus(f"services[{point!r}]", of)
                else:
                    _check_reasons(f"fell_back[{point!r}]", of)
        _check_reasons("impossible", self.impossible)
        self._known(self.active)

    def tau_for(self, service: str | None = None, point: str | None = None) -> float:
        """tau of a service at an operating point (the active one without a name); of all services where it has none.

        Raises:
            RoutingError: No such operating point; says why where it is an impossible one.
        """
        name = self._known(self.active if point is None else point)
        own = self.services.get(name, {})
        return own.get(service, self.taus[name]) if service else self.taus[name]

    def taus_for(self, services: Sequence[str | None], point: str | None = None) -> Floats:
        """``[N]`` tau of each service."""
        known = {service: self.tau_for(service, point) for service in dict.fromkeys(services)}
        return np.array([known[service] for service in services], dtype=np.float64)

    def route(
        self, logits: ArrayLike, services: Sequence[str | None] | None = None, *, point: str | None = None
    ) -> Routes:
        """``[N]`` values of :class:`~jaxguard.types.Route` for logits ``[N, 3]``.

        Args:
            logits: Columns in the order of :class:`~jaxguard.types.Route`; of the source that :meth:`check` accepts.
            services: ``[N]`` service of each row, None or ``""`` where it is not known; without it all rows are routed
                at the tau of all services.
            point: Another operating point than the active one.

        Raises:
            RoutingError: Shapes disagree, or there is no such operating point.
        """
        found = shares(logits)
        if services is None:
            return found.routes(self.tau_for(None, point))
        if len(services) != len(found):
            raise RoutingError(f"services: got {len(services)}, expected one for each of {len(found)} rows")
        return found.routes(self.taus_for(services, point))

    def check(self, source: str) -> None:
        """Refuses logits of another source than the thresholds were chosen on.

        Raises:
            RoutingError: Names what was found and what was expected.
        """
        if source != self.source:
            raise RoutingError(
                f"routing: fingerprint of the logits is {source!r}, expected {self.source!r}: these thresholds were "
                "chosen on other logits and say nothing here; choose them again"
            )

    def to_json(self) -> str:
        """As text; raises RoutingError where the provenance holds anything but finite JSON values."""
        try:
            return json.dumps({"version": VERSION, **asdict(self)}, indent=2, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RoutingError(f"provenance: {error}, expected JSON-like values") from None

    @classmethod
    def from_json(cls, text: str) -> Routing:
        """Reads :meth:`to_json`.

        Raises:
            RoutingError: Not JSON, another version, a missing or unknown field, or a value of the wrong kind.
        """
        try:
            record = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise RoutingError(f"routing: not JSON ({error}), expected the text of a routing") from None
        _mapping("text", record)
        version = record.pop("version", None)
        if version != VERSION:
            raise RoutingError(f"routing: version is {version!r:.40}, expected {VERSION}; choose the thresholds again")
        expected = {own.name for own in fields(cls)}
        if record.keys() != expected:
            missing, unknown = sorted(expected - record.keys()), sorted(record.keys() - expected)
            raise RoutingError(f"routing: missing fields {missing}, unknown fields {unknown}, expected neither")
        return cls(**record)

    def _known(self, point: str) -> str:
        if point not in self.taus:
            why = f" ({self.impossible[point]})" if point in self.impossible else ""
            known = f"expected one of {', '.join(self.taus)}" if self.taus else "and there is no other"
            raise RoutingError(f"operating point: got {point!r}{why}, {known}")
        return point


def _refuse_constant(name: str) -> float:
    raise RoutingError(f"routing: found {name}, expected finite numbers only")


def _mapping(name: str, value: Any) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise RoutingError(f"routing {name}: got {value!r:.40}, expected an object with texts as names")


def _check_named_taus(name: str, taus: Any) -> None:
    _mapping(name, taus)
    for key, tau in taus.items():
        if isinstance(tau, bool) or not isinstance(tau, int | float) or not 0.0 <= tau <= 1.0 or math.isnan(tau):
            raise RoutingError(f"routing {name}[{key!r}]: got {tau!r:.40}, expected a number in [0, 1]")


def _check_reasons(name: str, reasons: Any) -> None:
    _mapping(name, reasons)
    for key, reason in reasons.items():
        if not isinstance(reason, str) or not reason:
            raise RoutingError(f"routing {name}[{key!r}]: got {reason!r:.40}, expected a reason")
