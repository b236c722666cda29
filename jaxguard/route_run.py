"""One router in one folder: train, choose tau, evaluate; and the same figures for logits that were cached.

A run folder holds ``config.yaml`` (every key), ``splits.json``, ``stage1/`` and ``route/`` (checkpoints,
``curves.csv``), ``router/`` (the bundle) and ``report/``. The train part teaches, the validation part chooses the
parameters, the calibration part chooses tau, the test part and what ``routing.unseen`` names are reported.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxguard
from jaxguard.baselines.text_routes import text_routes
from jaxguard.config import Config
from jaxguard.decision.routing import Routing
from jaxguard.decision.routing_fit import fit_routing
from jaxguard.evaluation.routing import RoutingEvaluation, evaluate_routing
from jaxguard.evaluation.routing_page import write_routing_report
from jaxguard.evaluation.routing_rows import RoutedRows, majority_by_tool
from jaxguard.features.decision_logits import read_logits
from jaxguard.features.store import FeatureStore
from jaxguard.inputs import (
    UNSEEN,
    Run,
    RunError,
    delete_run,
    establish,
    load_trajectories,
    open_run,
    prepare,
    require_replaceable,
    require_trained_on,
)
from jaxguard.route_config import RouteConfig, RoutingConfig
from jaxguard.router import Router
from jaxguard.settings import ConfigError, override
from jaxguard.traces.review_sets import reviewed
from jaxguard.traces.services.restyle import BACKBONES, FRAMEWORKS, restyle
from jaxguard.traces.snapshots import reviews_of, snapshot
from jaxguard.traces.splits import make_splits
from jaxguard.training.episodes import make_episodes
from jaxguard.training.loop import run_stage, stage_of
from jaxguard.training.routing import make_route_episodes, route_stage
from jaxguard.types import Route, Trajectory
from jaxguard.world_model.params import init_params
from jaxguard.world_model.routing import ROUTES, RouteHead

GENERATED = "services"
GRID = 400
"""Test trajectories of which each configuration of the grid is made: their texts are encoded anew."""

logger = logging.getLogger(__name__)


def train_router(config: RouteConfig, folder: Path, *, fresh: bool = False, progress: bool = True) -> Router:
    """Trains world model and route head and writes the bundle ``router/`` without thresholds; resumes where it stopped.

    Args:
        config: The experiment.
        folder: The run folder.
        fresh: Deletes what an earlier run wrote there first.
        progress: Shows bars on stderr.

    Raises:
        JaxguardError: data, store, split or configuration do not fit together, the training part has no reviews or
            holds trajectories that are for evaluation only, or training diverges.
    """
    replaced = fresh and folder.exists()
    if replaced:
        require_replaceable(folder, config)
    run = _with_reviews(prepare(folder, config, fresh=replaced, kind=RouteConfig))
    for name in ("train", "validation"):
        if kept := [t.id for t in run.part(name) if t.metadata.get("evaluation_only")]:
            raise RunError(
                f"{name} part: {len(kept)} trajectories are for evaluation only (e.g. {kept[0]!r}), expected none; "
                "leave their set out of data.trajectories and name it to `jaxguard route evaluate`"
            )
    training = make_route_episodes(run.part("train"), run.store, config, "train")
    has_validation = any(reviews_of(t) for t in run.part("validation"))
    validation = (
        make_route_episodes(run.part("validation"), run.store, config, "validation") if has_validation else None
    )
    if replaced:
        delete_run(folder)
    establish(run)
    earlier = Router.load(folder / "router", run.encoder) if (folder / "router").exists() else None
    started = time.perf_counter()
    world = init_params(config.model, config.train.seed)
    if config.stage1.steps:
        options: dict[str, Any] = {"max_steps": config.train.max_steps, "thought": config.data.thought}
        seen = make_episodes(run.part("train"), run.store, part="train", **options)
        kept_back = (
            make_episodes(run.part("validation"), run.store, part="validation", **options) if validation else None
        )
        guard = Config(model=config.model, stage1=config.stage1, train=config.train)
        first = run_stage(
            stage_of(guard, 1), config.train, world, seen, kept_back, folder / "stage1", progress=progress
        )
        world = first.params
    params = {"world": world, "head": init_params(config.model, config.train.seed + 1, RouteHead)}
    result = run_stage(
        route_stage(config), config.train, params, training, validation, folder / "route", progress=progress
    )
    provenance = {
        "trajectories": {name: len(ids) for name, ids in run.splits.items()},
        "reviews": _routes(training.labels),
        "data": list(config.data.trajectories),
        "training_seconds": round(time.perf_counter() - started, 1),
        "seed": config.train.seed,
        "inputs": dict(run.digests),
    }
    router = Router(config, result.params, run.encoder, provenance=provenance)
    if earlier is not None and (earlier.source, earlier.provenance.get("inputs")) == (router.source, run.digests):
        return dataclasses.replace(router, routing=earlier.routing)  # nothing was left to train
    router.save(folder / "router")
    return router


def calibrate_router(folder: Path, overrides: Sequence[str] = ()) -> Router:
    """Chooses tau on the calibration part, over all services and by service, and rewrites ``router/``.

    Args:
        folder: A trained run.
        overrides: ``routing.key=value`` settings to use in place of the run's own; ``routing.unseen`` stays.

    Raises:
        ConfigError: an override is not one of ``routing``.
        JaxguardError: the part has too few reviews, or the operating point is impossible.
    """
    run, router = _opened(folder)
    if other := [o for o in overrides if not o.startswith("routing.") or o.startswith("routing.unseen")]:
        raise ConfigError(f"override {other[0]!r}: expected routing.* here; other settings need another training")
    settings = override(run.config, overrides).routing
    rows = _rows(router, run.part("calibration"), run.store)
    routing = _fit(rows, settings, router.source, {"run": folder.name, "part": "calibration"})
    router = router.routed(routing)
    router.save(folder / "router")
    return router


def evaluate_router(folder: Path, *, grid: bool = False) -> tuple[RoutingEvaluation, str, Path]:
    """Routes the test part and what is held out, beside plain baselines; writes ``report/``.

    Args:
        folder: A run with thresholds.
        grid: Also routes generated test trajectories in the style of four upstream configurations.

    Returns:
        The figures, one sentence on the data, and the page.

    Raises:
        JaxguardError: no thresholds, or no reviews to test on.
    """
    run, router = _opened(folder)
    test = [*run.part("test"), *(run.part(UNSEEN) if UNSEEN in run.splits else [])]
    rows = _rows(router, test, run.store)
    owner = {t.id: t for t in test}
    held_out = [run.config.routing.held_out(owner[_owner(name)].metadata) for name in rows.ids]
    masks = {entry: np.array([entry in own for own in held_out]) for entry in run.config.routing.unseen}
    train = _steps(run.part("train"))
    rivals = _rivals(train, _steps_of(rows, owner))
    styles = None
    if grid:
        part = [t for t in run.part("test") if t.source == GENERATED][:GRID]
        if not part:
            raise RunError("--grid: the test part has no generated trajectories, expected those of `route generate`")
        styles = {
            f"{framework}, {backbone}": _rows(router, [restyle(t, framework, backbone) for t in part], None)
            for framework in FRAMEWORKS
            for backbone in BACKBONES
        }
    result = _evaluated(router.routing, rows, router.source, run.config, rivals, masks, styles)
    about = _about(run.part("train"), result, rivals)
    page = _write(
        folder / "report", result, about, f"{run.config.name}: test part", {**router.provenance, "part": "test"}
    )
    return result, about, page


def evaluate_elsewhere(
    bundle: Path, paths: Sequence[str], out: Path, *, store: Path | None = None
) -> tuple[RoutingEvaluation, str, Path]:
    """Routes reviewed trajectories that a router was not trained on, at its thresholds; writes a report to ``out``.

    Trajectories without reviews get those that follow from their hazard labels
    (:mod:`jaxguard.traces.review_sets`).

    Args:
        bundle: A router with thresholds.
        paths: Converted trajectories.
        out: Folder for the report.
        store: Feature store with their texts; without one they are encoded on the spot.

    Raises:
        JaxguardError: no thresholds, or no reviews.
    """
    router = Router.load(bundle)
    trajectories = list(reviewed(load_trajectories(paths).values()))
    vectors = None if store is None else FeatureStore.open(store, router.encoder.fingerprint, router.encoder.dim)
    rows = _rows(router, trajectories, vectors)
    result = _evaluated(router.routing, rows, router.source, router.config, {}, {}, None)
    about = f"Reviewed steps of {_named(trajectories)}, on which this router was not trained."
    return result, about, _write(out, result, about, "Another place", dict(router.provenance))


def evaluate_cached(
    store: Path, paths: Sequence[str], out: Path, config: RouteConfig
) -> tuple[RoutingEvaluation, str, Path]:
    """Routes reviewed steps by logits that `jaxguard route logits` cached: tau on one half of the groups, figures on
    the other.

    Args:
        store: The logit store.
        paths: The trajectories that were asked about.
        out: Folder for ``routing.json`` and the report.
        config: ``routing`` and ``evaluation`` settings, and the seed of the halves.

    Raises:
        JaxguardError: a snapshot has no logits, or a half has no reviews.
    """
    logits = FeatureStore.open(store)
    trajectories = {t.id: t for t in reviewed(load_trajectories(paths).values())}
    halves = make_splits(trajectories.values(), {"calibration": 0.5, "test": 0.5}, config.data.split.seed)
    source = logits.fingerprint.short

    def rows(name: str) -> RoutedRows:
        part = [trajectories[i] for i in halves[name]]
        steps = _steps(part)
        if not steps:
            raise RunError(f"{name} half: none of its {len(part)} trajectories has a review, expected some")
        values = read_logits(logits, [snapshot(t, step) for t, step in steps])
        return _table(steps, values)

    routing = _fit(rows("calibration"), config.routing, source, {"logits": str(logits.fingerprint)})
    test = rows("test")
    train, asked = (_steps([trajectories[i] for i in halves[name]]) for name in ("calibration", "test"))
    rivals = _rivals(train, asked)
    result = _evaluated(routing, test, source, config, rivals, {}, None)
    about = _about([trajectories[i] for i in halves["calibration"]], result, rivals)
    page = _write(out, result, about, f"{logits.fingerprint.model}: cached logits", {"logits": str(logits.fingerprint)})
    (out / "routing.json").write_text(routing.to_json(), encoding="utf-8")
    return result, about, page


def _opened(folder: Path) -> tuple[Run[RouteConfig], Router]:
    """A run and its router, which must have been trained on the split and the reviews that are there now."""
    run = _with_reviews(open_run(folder, kind=RouteConfig))
    router = Router.load(folder / "router", run.encoder)
    require_trained_on(run, router.provenance)
    return run, router


def _with_reviews(run: Run[RouteConfig]) -> Run[RouteConfig]:
    return dataclasses.replace(run, trajectories={t.id: t for t in reviewed(run.trajectories.values())})


def _routes(labels: Iterable[np.ndarray]) -> dict[str, int]:
    counts = Counter(int(label) for own in labels for label in own if label >= 0)
    return {route.name: counts[route] for route in Route}


def _steps(trajectories: Iterable[Trajectory]) -> list[tuple[Trajectory, int]]:
    return [(t, review.step) for t in trajectories for review in reviews_of(t)]


def _owner(row: str) -> str:
    return row.rpartition(":")[0]


def _steps_of(rows: RoutedRows, owner: Mapping[str, Trajectory]) -> list[tuple[Trajectory, int]]:
    return [(owner[_owner(name)], int(name.rpartition(":")[2])) for name in rows.ids]


def _rows(router: Router, trajectories: Sequence[Trajectory], store: FeatureStore | None) -> RoutedRows:
    """The reviewed steps of trajectories with the router's logits, in the order of ``trajectories``.

    Raises:
        RunError: none has a review.
    """
    part = [t for t in trajectories if reviews_of(t)]
    if not part:
        raise RunError(f"trajectories: got {len(trajectories)}, none with a review, expected some")
    by_position = {position: logits for position, _, logits in router.logits(part, store)}
    values = [by_position[i][review.step, :ROUTES] for i, t in enumerate(part) for review in reviews_of(t)]
    return _table(_steps(part), np.array(values))


def _table(steps: Sequence[tuple[Trajectory, int]], logits: np.ndarray) -> RoutedRows:
    reviews = [next(r for r in reviews_of(t) if r.step == step) for t, step in steps]

    def texts(name: str) -> list[str]:
        return [str(t.metadata.get(name) or "") for t, _ in steps]

    pairs = texts("pair")
    return RoutedRows(
        ids=[f"{t.id}:{step}" for t, step in steps],
        logits=logits,
        labels=np.array([review.route for review in reviews], np.int64),
        services=[service or domain for service, domain in zip(texts("service"), texts("domain"), strict=True)],
        personas=texts("persona"),
        triggers=[review.trigger for review in reviews],
        pairs=[f"{pair}:{step}" if pair else "" for pair, (_, step) in zip(pairs, steps, strict=True)],
        sides=[("mem" if t.metadata.get("memory") else "base") if t.metadata.get("pair") else "" for t, _ in steps],
        groups=[t.group for t, _ in steps],
        tools=[t.steps[step].tool for t, step in steps],
    )


def _fit(rows: RoutedRows, settings: RoutingConfig, source: str, provenance: Mapping[str, Any]) -> Routing:
    return fit_routing(
        rows.logits,
        rows.labels,
        rows.services,
        source=source,
        active=settings.point,
        min_rows=settings.least,
        oar_limit=settings.limit,
        uar_limit=settings.limit,
        delta=settings.delta,
        provenance=provenance,
    )


def _rivals(train: Sequence[tuple[Trajectory, int]], asked: Sequence[tuple[Trajectory, int]]) -> dict[str, np.ndarray]:
    """Routes of plain baselines that learned from the same steps."""
    labels = _labels(train)
    tools = [[t.steps[step].tool for t, step in steps] for steps in (train, asked)]
    found = {"majority by tool": majority_by_tool(tools[0], labels, tools[1])} if len(labels) else {}
    return {**found, **text_routes(train, labels, asked)}


def _labels(steps: Sequence[tuple[Trajectory, int]]) -> np.ndarray:
    by_step = ({review.step: review.route for review in reviews_of(t)}[step] for t, step in steps)
    return np.fromiter(by_step, np.int64, len(steps))


def _evaluated(
    routing: Routing | None,
    rows: RoutedRows,
    source: str,
    config: RouteConfig,
    rivals: Mapping[str, np.ndarray],
    unseen: Mapping[str, np.ndarray],
    grid: Mapping[str, RoutedRows] | None,
) -> RoutingEvaluation:
    if routing is None:
        raise RunError("router: has no thresholds yet; run `jaxguard route calibrate` first")
    return evaluate_routing(
        rows,
        routing,
        source=source,
        rivals=rivals,
        unseen=unseen,
        grid=grid,
        resamples=config.evaluation.resamples,
        seed=config.evaluation.seed,
        delta=config.routing.delta,
    )


def _named(trajectories: Sequence[Trajectory]) -> str:
    return ", ".join(sorted({t.source or "an unnamed set" for t in trajectories}))


def _about(train: Sequence[Trajectory], result: RoutingEvaluation, rivals: Mapping[str, Any]) -> str:
    """One sentence: where the data come from, and what plain baselines reach on them."""
    made = {t.source for t in train} == {GENERATED}
    what = (
        "A generated corpus, whose sentences are in training and test alike but for what is held out"
        if made
        else f"Reviewed steps of {_named(train)}"
    )
    models = result.overall.models
    always = max((name for name in models if name.startswith("always ")), key=lambda n: _accuracy(models, n))
    told = [f"{name} reaches accuracy {_accuracy(models, name):.2f}" for name in (always, *rivals)]
    return f"{what}: on the test part {', '.join(told)}."


def _accuracy(models: Mapping[str, Any], name: str) -> float:
    value = models[name]["acc"]
    return 0.0 if value is None else float(value.value)


def _write(folder: Path, result: RoutingEvaluation, about: str, title: str, provenance: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "report.html.partial"
    facts = {name: str(value) for name, value in {**provenance, "jaxguard": jaxguard.__version__}.items()}
    write_routing_report(partial, result, about=about, title=title, facts=facts)
    (folder / "evaluation.json").write_text(result.to_json(), encoding="utf-8")
    return partial.replace(folder / "report.html")
