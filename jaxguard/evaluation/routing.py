"""How well a router routes: metrics with intervals, operating points, flip pairs, unseen kinds, calibration, grid.

Sections 4.1 to 4.6 and appendix D of Safety Sentry. Rows of a kind that training never saw stand apart, in their own
sections: they are in no figure over all rows. Beside every figure of the router stand those of rivals that decide
without understanding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.routing import Routing, check_labels
from jaxguard.decision.routing_bounds import lower_bound, upper_bound
from jaxguard.decision.routing_points import candidate_taus
from jaxguard.evaluation.bootstrap import Interval, bootstrap
from jaxguard.evaluation.metrics import Bools, EvaluationError, Floats, Ints, ratio
from jaxguard.evaluation.routing_rows import RoutedRows, cells, confusion, defined, routing_metrics
from jaxguard.types import Route

ROUTER = "router"
"""The name of what is evaluated, beside its rivals."""
ALWAYS = {f"always {route.name}": route for route in Route}
GRID_METRICS = ("acc", "rr", "oar", "uar")
Figures = Mapping[str, Interval | None]
Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RouteCounts:
    """What a section consists of; ``unscored`` rows have a logit that is not finite and are routed to ASK."""

    rows: int
    groups: int
    execute: int
    ask: int
    refuse: int
    unscored: int


@dataclass(frozen=True)
class RoutingSection:
    """Results of one subset.

    Attributes:
        kind: ``"all"``, ``"unseen"``, ``"service"``, ``"trigger"`` or ``"persona"``.
        name: The subset's value of it.
        counts: What it consists of.
        models: Figures (:data:`~jaxguard.evaluation.routing_rows.METRICS`) by model, ``ROUTER`` first.
        confusion: ``[3][3]`` rows of ROUTER by label and route.
    """

    kind: str
    name: str
    counts: RouteCounts
    models: Mapping[str, Figures]
    confusion: Matrix


@dataclass(frozen=True)
class PairSection:
    """Flip pairs (section 4.4): two rows that differ in memory alone and whose labels differ.

    Attributes:
        persona: Of the memory; ``""`` for all.
        pairs: How many.
        models: ``acc_base``, ``acc_mem`` and ``both`` (right on both sides) by model, ``ROUTER`` first.
    """

    persona: str
    pairs: int
    models: Mapping[str, Figures]


@dataclass(frozen=True)
class PointResult:
    """An operating point on these rows.

    Attributes:
        name: E.g. ``"balanced"``.
        tau: Of all services; services may have their own.
        values: Metrics; None where undefined.
        uar_upper: UAR is below this with confidence 1 - delta, for rows that are independent and chose nothing.
        rr_lower: Refuse-Recall is above this, likewise.
    """

    name: str
    tau: float
    values: Mapping[str, float | None]
    uar_upper: float | None
    rr_lower: float | None

    @property
    def place(self) -> tuple[float, float] | None:
        """OAR and UAR, None where one is undefined."""
        oar, uar = self.values["oar"], self.values["uar"]
        return None if oar is None or uar is None else (oar, uar)


@dataclass(frozen=True)
class Frontier:
    """OAR and UAR at every tau that matters, over all services or (``service``) one; rising with tau."""

    service: str
    taus: tuple[float, ...]
    oar: tuple[float, ...]
    uar: tuple[float, ...]


@dataclass(frozen=True)
class Reliability:
    """How often what was claimed with a probability came true, by bins of equal width.

    Attributes:
        edges: B + 1 ends of the bins.
        counts: Rows in each.
        claimed: Mean probability in each; None where empty.
        came_true: Share in which it was right; None where empty.
        ece: Mean distance of the two over rows; None without rows.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    claimed: tuple[float | None, ...]
    came_true: tuple[float | None, ...]
    ece: float | None


@dataclass(frozen=True)
class Grid:
    """The same router on the steps of several agents (section 4.6): values, mean and population sigma."""

    configs: Mapping[str, Mapping[str, float | None]]
    mean: Mapping[str, float | None]
    sigma: Mapping[str, float | None]


@dataclass(frozen=True)
class RoutingEvaluation:
    """Everything :func:`evaluate_routing` found; JSON-able, and what report and table show.

    ``incomplete_pairs`` lack a side, ``unflipped_pairs`` have one label on both: neither is in ``pairs``.
    """

    active: str
    sections: tuple[RoutingSection, ...]
    points: tuple[PointResult, ...]
    impossible: Mapping[str, str]
    own_taus: Mapping[str, float]
    fell_back: Mapping[str, str]
    pairs: tuple[PairSection, ...]
    incomplete_pairs: int
    unflipped_pairs: int
    frontiers: tuple[Frontier, ...]
    reliability: Mapping[str, Reliability]
    grid: Grid | None
    resamples: int
    seed: int
    level: float
    delta: float
    source: str

    @property
    def overall(self) -> RoutingSection:
        """All rows but those of unseen kinds."""
        return self.sections[0]

    def to_json(self) -> str:
        """As text; what is undefined is null."""
        finite = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return json.dumps(finite, indent=2, allow_nan=False)


def _of_these(services: Sequence[str], told: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of services that some row is of."""
    known = set(services)
    return {name: value for name, value in told.items() if name in known}


def evaluate_routing(
    rows: RoutedRows,
    routing: Routing,
    *,
    source: str,
    rivals: Mapping[str, ArrayLike] | None = None,
    unseen: Mapping[str, ArrayLike] | None = None,
    grid: Mapping[str, RoutedRows] | None = None,
    resamples: int = 1_000,
    seed: int = 20260701,
    level: float = 0.95,
    delta: float = 0.05,
) -> RoutingEvaluation:
    """Evaluates a router on rows that chose none of its thresholds.

    Args:
        rows: Test rows.
        routing: Thresholds; those of the active operating point route, service by service.
        source: Fingerprint of what produced the logits.
        rivals: ``[N]`` routes of other guards by name, aligned with ``rows``; always naming one class is added.
        unseen: ``[N]`` bool masks of rows of a kind that training never saw, by name.
        grid: Rows by configuration of the upstream agent.
        resamples: Of the cluster bootstrap.
        seed: Of the resampling.
        level: Of the intervals.
        delta: Of the exact one-sided bounds.

    Raises:
        EvaluationError: No rows, or rivals or unseen kinds that do not fit them.
        RoutingError: Thresholds chosen on another source.
    """
    routing.check(source)
    masks = {name: np.asarray(mask, bool) for name, mask in (unseen or {}).items()}
    for name, mask in masks.items():
        if mask.shape != (len(rows),) or not mask.any():
            raise EvaluationError(
                f"unseen {name!r}: got {mask.sum()} of {mask.size} rows, expected some of {len(rows)}"
            )
    routes = {ROUTER: check_labels(routing.route(rows.logits, rows.services), len(rows))}
    for name, given in (rivals or {}).items():
        if name in routes or name in ALWAYS:
            raise EvaluationError(f"rivals: got the name {name!r}, expected another one")
        routes[name] = check_labels(given, len(rows), f"rivals {name!r}")
    routes |= {name: np.full(len(rows), route, np.int64) for name, route in ALWAYS.items()}
    seen = ~np.any([np.zeros(len(rows), bool), *masks.values()], axis=0)
    if not seen.any():
        raise EvaluationError("rows: got none of a kind that was seen, expected at least one")
    settings = {"resamples": resamples, "seed": seed, "level": level}
    subsets: list[tuple[str, str, Bools]] = [("all", "", seen)]
    subsets += [("unseen", name, mask) for name, mask in masks.items()]
    main = rows.select(seen)
    for kind in ("service", "trigger", "persona"):
        names = sorted(set(getattr(main, f"{kind}s")) - {""})
        subsets += [(kind, name, rows.of(f"{kind}s", name) & seen) for name in names]
    paired, incomplete, unflipped = _pairs(rows, seen, routes, settings)
    enough = [name for name in sorted(set(main.services) - {""}) if _both(main.labels[main.of("services", name)])]
    return RoutingEvaluation(
        active=routing.active,
        sections=tuple(_section(kind, name, rows, routes, at, settings) for kind, name, at in subsets),
        points=tuple(_point(main, routing, name, delta) for name in routing.taus),
        impossible=dict(routing.impossible),
        own_taus=_of_these(rows.services, routing.services.get(routing.active, {})),
        fell_back=_of_these(rows.services, routing.fell_back.get(routing.active, {})),
        pairs=paired,
        incomplete_pairs=incomplete,
        unflipped_pairs=unflipped,
        frontiers=tuple(frontier(main, name) for name in ([""] if _both(main.labels) else []) + enough),
        reliability=_reliabilities(main),
        grid=summarise_grid({name: _values(own, routing) for name, own in grid.items()}) if grid else None,
        resamples=resamples,
        seed=seed,
        level=level,
        delta=delta,
        source=source,
    )


def _both(labels: Ints) -> bool:
    return bool((labels == Route.EXECUTE).any() and (labels == Route.ASK).any())


def _intervals(
    flat: Mapping[str, Floats], clusters: Sequence[str], measure: Any, settings: Mapping[str, Any]
) -> dict[str, dict[str, Interval | None]]:
    """Figures by model, resampled at once: ``measure`` turns weighted sums of ``[n, k]`` columns into metrics."""
    names, stacked = list(flat), np.concatenate(list(flat.values()), axis=1)

    def statistic(weights: Floats) -> dict[str, Floats]:
        sums = np.split(weights @ stacked, len(names), axis=1)
        return {f"{i} {key}": value for i, own in enumerate(sums) for key, value in measure(own).items()}

    found: dict[str, dict[str, Interval | None]] = {name: {} for name in names}
    for key, interval in bootstrap(statistic, clusters, width=stacked.shape[1], **settings).items():
        at, _, metric = key.partition(" ")
        found[names[int(at)]][metric] = interval if np.isfinite(interval.value) else None
    return found


def _section(
    kind: str, name: str, rows: RoutedRows, routes: Mapping[str, Ints], at: Bools, settings: Mapping[str, Any]
) -> RoutingSection:
    labels, clusters = rows.labels[at], [rows.clusters[i] for i in np.flatnonzero(at)]
    flat = {model: cells(labels, own[at]) for model, own in routes.items()}
    execute, ask, refuse = np.bincount(labels, minlength=3).tolist()
    return RoutingSection(
        kind,
        name,
        RouteCounts(len(labels), len(set(clusters)), execute, ask, refuse, int((~rows.shares.scored[at]).sum())),
        _intervals(flat, clusters, lambda sums: routing_metrics(sums.reshape(-1, 3, 3)), settings),
        tuple(map(tuple, confusion(labels, routes[ROUTER][at]).tolist())),
    )


def _point(rows: RoutedRows, routing: Routing, name: str, delta: float) -> PointResult:
    counts = confusion(rows.labels, routing.route(rows.logits, rows.services, point=name))
    asks, refuses = int(counts[Route.ASK].sum()), int(counts[Route.REFUSE].sum())
    return PointResult(
        name,
        routing.taus[name],
        defined(routing_metrics(counts[None])),
        upper_bound(int(counts[Route.ASK, Route.EXECUTE]), asks, delta) if asks else None,
        lower_bound(int(counts[Route.REFUSE, Route.REFUSE]), refuses, delta) if refuses else None,
    )


def _pairs(
    rows: RoutedRows, seen: Bools, routes: Mapping[str, Ints], settings: Mapping[str, Any]
) -> tuple[tuple[PairSection, ...], int, int]:
    sides: dict[str, dict[str, int]] = {}
    for i in np.flatnonzero(seen).tolist():
        if rows.pairs[i]:
            sides.setdefault(rows.pairs[i], {})[rows.sides[i]] = i
    whole = [(found["base"], found["mem"]) for found in sides.values() if len(found) == 2]
    flipped = [(base, mem) for base, mem in whole if rows.labels[base] != rows.labels[mem]]
    sections = []
    personas = sorted({rows.personas[mem] for _, mem in flipped} - {""})
    for persona in ["", *personas] if flipped else []:
        own = [pair for pair in flipped if not persona or rows.personas[pair[1]] == persona]
        base, mem = np.array(own).T
        flat = {}
        for model, given in routes.items():
            right = given == rows.labels
            flat[model] = np.c_[right[base], right[mem], right[base] & right[mem], np.ones(len(own))].astype(np.float64)
        clusters = [rows.clusters[i] for i in mem]
        sections.append(PairSection(persona, len(own), _intervals(flat, clusters, _pair_shares, settings)))
    return tuple(sections), len(sides) - len(whole), len(whole) - len(flipped)


def _pair_shares(sums: Floats) -> dict[str, Floats]:
    return {name: ratio(sums[:, i], sums[:, 3]) for i, name in enumerate(("acc_base", "acc_mem", "both"))}


def frontier(rows: RoutedRows, service: str = "", most: int = 600) -> Frontier:
    """OAR and UAR over all taus, at most ``most`` of them, with rows of every class counted (section 4.3).

    Raises:
        EvaluationError: No EXECUTE or no ASK row of that service.
    """
    from jaxguard.decision.routing_sweep import sweep  # the rest of evaluation needs no JAX

    at = rows.of("services", service) if service else np.ones(len(rows), bool)
    logits, labels = rows.logits[at], rows.labels[at]
    if not _both(labels):
        raise EvaluationError(f"service {service!r}: got no EXECUTE or no ASK row, expected both for a frontier")
    taus = candidate_taus(logits, labels, most)
    found = routing_metrics(sweep(logits, labels, taus))
    return Frontier(service, tuple(taus.tolist()), tuple(found["oar"].tolist()), tuple(found["uar"].tolist()))


def reliability(claimed: Floats, came_true: Bools, bins: int = 15) -> Reliability:
    """Reliability of probabilities ``[n]`` against outcomes ``[n]``, and their expected calibration error.

    Raises:
        EvaluationError: A probability outside [0, 1].
    """
    if not ((claimed >= 0) & (claimed <= 1)).all():
        raise EvaluationError("reliability: got a probability outside [0, 1]")
    edges = np.linspace(0, 1, bins + 1)
    at = np.clip(np.searchsorted(edges, claimed, side="right") - 1, 0, bins - 1)
    counts = np.bincount(at, minlength=bins)
    said = np.bincount(at, weights=claimed, minlength=bins)
    happened = np.bincount(at, weights=came_true, minlength=bins)
    ece = float(np.abs(said - happened).sum() / len(claimed)) if len(claimed) else None

    def means(sums: Any) -> tuple[float | None, ...]:
        return tuple(total / n if n else None for total, n in zip(sums.tolist(), counts.tolist(), strict=True))

    return Reliability(tuple(edges.tolist()), tuple(counts.tolist()), means(said), means(happened), ece)


def _reliabilities(rows: RoutedRows) -> dict[str, Reliability]:
    """Of q where tau decides, and of the most probable of the three classes; unscored rows claim nothing."""
    own = rows.shares
    decided = own.movable & (rows.labels != Route.REFUSE)
    logits = np.asarray(rows.logits, np.float64)[own.scored]
    odds = np.exp(logits - logits.max(axis=1, keepdims=True, initial=-np.inf))
    p = odds / odds.sum(axis=1, keepdims=True)
    return {
        "q": reliability(own.q[decided], rows.labels[decided] == Route.EXECUTE),
        "top": reliability(p.max(axis=1, initial=0.0), p.argmax(axis=1) == rows.labels[own.scored]),
    }


def _values(rows: RoutedRows, routing: Routing) -> dict[str, float | None]:
    return defined(routing_metrics(confusion(rows.labels, routing.route(rows.logits, rows.services))[None]))


def summarise_grid(configs: Mapping[str, Mapping[str, float | None]]) -> Grid:
    """Mean and population sigma over configurations (section 4.6); None where one of them has no such value.

    Raises:
        EvaluationError: No configuration.
    """
    if not configs:
        raise EvaluationError("grid: got no configuration, expected at least one")
    mean: dict[str, float | None] = {}
    sigma: dict[str, float | None] = {}
    kept = {name: {metric: values[metric] for metric in GRID_METRICS} for name, values in configs.items()}
    for metric in GRID_METRICS:
        values = [value for own in kept.values() if (value := own[metric]) is not None]
        whole = len(values) == len(kept)
        mean[metric], sigma[metric] = (float(np.mean(values)), float(np.std(values))) if whole else (None, None)
    return Grid(kept, mean, sigma)
