"""One router in one folder: train, choose tau, evaluate; and the same figures for logits that were cached.

A run folder holds ``config.yaml`` (every key), ``splits.json``, ``stage1/`` and ``route/`` (checkpoints,
``curves.csv``), ``router/`` (the bundle) and ``report/``. The train part teaches, the validation part chooses the
parameters, the calibration part chooses tau, the test part and what ``routing.unseen`` names are reported.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import jaxguard
from jaxguard.baselines.text_routes import text_routes
from jaxguard.config import Config
from jaxguard.decision.routing import Routing
from jaxguard.decision.routing_fit import fit_routing
from jaxguard.evaluation.routing import RoutingEvaluation, evaluate_routing
from jaxguard.evaluation.routing_page import write_routing_report
from jaxguard.evaluation.routing_rows import RoutedRows
from jaxguard.features.decision_logits import read_logits
from jaxguard.features.store import FeatureStore
from jaxguard.inputs import (
    PARTS,
    SPLITS_FILE,
    UNSEEN,
    Run,
    RunError,
    delete_run,
    establish,
    hold_out,
    load_trajectories,
    open_run,
    prepare,
    require_replaceable,
    require_trained_on,
)
from jaxguard.route_config import RouteConfig, RoutingConfig
from jaxguard.router import Router, RouterError, service_of
from jaxguard.settings import ConfigError, override
from jaxguard.traces.lock import locked
from jaxguard.traces.review_sets import require_teachable, reviewed
from jaxguard.traces.services.restyle import BACKBONES, FRAMEWORKS, restyle
from jaxguard.traces.snapshots import Review, reviews_of, snapshot
from jaxguard.traces.splits import load_splits, make_splits
from jaxguard.training.episodes import make_episodes
from jaxguard.training.loop import run_stage, stage_of
from jaxguard.training.routing import make_route_episodes, route_stage
from jaxguard.types import Route, Trajectory
from jaxguard.world_model.params import init_params
from jaxguard.world_model.routing import ROUTES, RouteHead
from jaxguard.writing import replacing

GENERATED = "services"
GRID = 400
"""Test trajectories of which each configuration of the grid is made: their texts are encoded anew."""

_REPORT_FILES = ("report.html", "evaluation.json", "routes.csv", "routing.json")

_Step = tuple[Trajectory, Review]


def train_router(config: RouteConfig, folder: Path, *, fresh: bool = False, progress: bool = True) -> Router:
    """Trains world model and route head and writes the bundle ``router/`` without thresholds; resumes where it stopped.

    Args:
        config: The experiment.
        folder: The run folder.
        fresh: Deletes what an earlier run wrote there first.
        progress: Shows bars on stderr.

    Raises:
        JaxguardError: data, store, split or configuration do not fit together, the training part has no reviews, those
            of one route only, or trajectories that are for evaluation only, another process trains or calibrates there,
            or training diverges.
    """
    replaced = fresh and folder.exists()
    if replaced:
        require_replaceable(folder, config)
    run = _with_reviews(prepare(folder, config, fresh=replaced, kind=RouteConfig))
    for name in ("train", "validation"):
        require_teachable(run.part(name), f"{name} part")
    training = make_route_episodes(run.part("train"), run.store, config, "train")
    has_validation = any(reviews_of(t) for t in run.part("validation"))
    validation = (
        make_route_episodes(run.part("validation"), run.store, config, "validation") if has_validation else None
    )
    told = _routes(training.labels)
    if len(known := [name for name, count in told.items() if count]) < 2:
        raise RunError(f"train part: all {sum(told.values())} reviews are {known[0]}, expected two routes at least")
    with locked(folder):
        if replaced:
            delete_run(folder)
        establish(run)
        earlier = Router.load(folder / "router", run.encoder) if (folder / "router").exists() else None
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
            "reviews": told,
            "trained on": len(training),
            "without reviews, left out": training.unreviewed,
            "data": list(config.data.trajectories),
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
        JaxguardError: the part has too few reviews or holds trajectories that are for evaluation only, or the
            operating point is impossible.
    """
    run = _run(folder)
    with locked(folder):
        router = _trained(run)
        require_teachable(run.part("calibration"), "calibration part")
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
    run = _run(folder)
    router = _trained(run)
    routing = _thresholds(router)
    test = [*run.part("test"), *(run.part(UNSEEN) if UNSEEN in run.splits else [])]
    rows = _rows(router, test, run.store)
    rivals = _rivals(_steps(run.part("train")), _steps(test))
    styles = None
    if grid:
        part = [t for t in run.part("test") if t.source == GENERATED and t.metadata.get("style") == FRAMEWORKS[0]]
        part = part[:GRID]
        if not part:
            raise RunError(
                "--grid: the test part has no generated trajectories in plain style, expected those of `route generate`"
            )
        styles = {
            f"{framework}, {backbone}": _rows(router, [restyle(t, framework, backbone) for t in part], None)
            for framework in FRAMEWORKS
            for backbone in BACKBONES
        }
    masks = _held_out(run.config, test)
    result = _evaluated(routing, rows, router.source, run.config, rivals=rivals, unseen=masks, grid=styles)
    about = _about(run.part("train"), result, rivals)
    provenance = {**router.provenance, "part": "test"}
    table = _routes_of(test, rows, routing)
    page = _write(folder / "report", result, about, f"{run.config.name}: test part", provenance, table)
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
        JaxguardError: no thresholds, no reviews, ``out`` holds other things, or (where the bundle lies in its run) a
            trajectory that trained it or chose its thresholds.
    """
    _require_place(out)
    router = Router.load(bundle)
    routing = _thresholds(router)
    trajectories = list(reviewed(load_trajectories(paths).values()))
    splits = bundle.parent / SPLITS_FILE
    _require_others(splits, trajectories)
    vectors = None if store is None else FeatureStore.open(store, router.encoder.fingerprint, router.encoder.dim)
    rows = _rows(router, trajectories, vectors)
    result = _evaluated(routing, rows, router.source, router.config)
    known = (
        "none of them trained this router or chose its thresholds"
        if splits.exists()
        else "whether some of them trained this router is not known"
    )
    about = f"Reviewed steps of {_named(trajectories)}; {known}."
    table = _routes_of(trajectories, rows, routing)
    return result, about, _write(out, result, about, "Other trajectories", dict(router.provenance), table)


def evaluate_cached(
    store: Path, paths: Sequence[str], out: Path, config: RouteConfig, *, partial: bool = False
) -> tuple[RoutingEvaluation, str, Path]:
    """Routes reviewed steps by logits that `jaxguard route logits` cached: tau on one half of the groups, figures on
    the other, on what ``routing.unseen`` holds out and on what is for evaluation only.

    Args:
        store: The logit store.
        paths: The trajectories that were asked about.
        out: Folder for ``routing.json`` and the report.
        config: ``routing`` and ``evaluation`` settings, and the seed of the halves.
        partial: Steps without logits are ASK and counted as unscored, instead of an error.

    Raises:
        JaxguardError: a snapshot has no logits, a half has no reviews, or ``out`` holds other things.
    """
    _require_place(out)
    if not store.is_dir():
        raise RunError(f"--store: {store} is not there, expected the logit store that `jaxguard route logits` wrote")
    logits = FeatureStore.open(store)
    trajectories = {t.id: t for t in reviewed(load_trajectories(paths).values())}
    marked = [i for i, t in trajectories.items() if t.metadata.get("evaluation_only")]
    apart = {*hold_out(config.routing, trajectories), *marked}
    kept = [t for i, t in trajectories.items() if i not in apart]
    halves = make_splits(kept, {"calibration": 0.5, "test": 0.5}, config.data.split.seed)
    source = logits.fingerprint.short
    calibration, test = (
        [trajectories[i] for i in ids] for ids in (halves["calibration"], [*halves["test"], *sorted(apart)])
    )

    def rows(name: str, part: Sequence[Trajectory]) -> RoutedRows:
        steps = _steps(part)
        if not steps:
            raise RunError(f"{name} half: none of its {len(part)} trajectories has a review, expected some")
        values = read_logits(logits, [snapshot(t, review.step) for t, review in steps], partial=True)
        lost = np.flatnonzero(np.isnan(values).any(axis=1))
        if len(lost) and not (partial and len(lost) < len(steps)):
            t, review = steps[lost[0]]
            raise RunError(
                f"logit store {store}: {len(lost)} of {len(steps)} reviewed steps of the {name} half have no logits "
                f"(e.g. {t.id}:{review.step}): rejected, not finite or never asked for; `jaxguard route logits` says "
                "which, --partial counts them as ASK where there are others"
            )
        return _table(steps, values)

    routing = _fit(rows("calibration", calibration), config.routing, source, {"logits": str(logits.fingerprint)})
    rivals = _rivals(_steps(calibration), _steps(test))
    asked = rows("test", test)
    result = _evaluated(routing, asked, source, config, rivals=rivals, unseen=_held_out(config, test))
    about = _about(calibration, result, rivals)
    made_of = {"logits": str(logits.fingerprint)}
    table = _routes_of(test, asked, routing)
    page = _write(out, result, about, f"{logits.fingerprint.model}: cached logits", made_of, table, routing)
    return result, about, page


def _run(folder: Path) -> Run[RouteConfig]:
    return _with_reviews(open_run(folder, kind=RouteConfig))


def _trained(run: Run[RouteConfig]) -> Router:
    """The router of a run, which must have been trained on the split and the reviews that are there now."""
    router = Router.load(run.folder / "router", run.encoder)
    require_trained_on(run, router)
    return router


def _with_reviews(run: Run[RouteConfig]) -> Run[RouteConfig]:
    return dataclasses.replace(run, trajectories={t.id: t for t in reviewed(run.trajectories.values())})


def _routes(labels: Iterable[np.ndarray]) -> dict[str, int]:
    counts = Counter(int(label) for own in labels for label in own if label >= 0)
    return {route.name: counts[route] for route in Route}


def _thresholds(router: Router) -> Routing:
    """Those of a router; asked for before anything is scored."""
    if router.routing is None:
        raise RunError("router: has no thresholds yet; run `jaxguard route calibrate` first")
    return router.routing


def _require_others(splits: Path, trajectories: Sequence[Trajectory]) -> None:
    """Refuses trajectories that trained a router or chose its thresholds, where its split is there to tell."""
    if not splits.exists():
        return
    found = load_splits(splits)
    known = {i for name in PARTS[:3] for i in found.get(name, ())}
    if shared := [t.id for t in trajectories if t.id in known]:
        raise RunError(
            f"--trajectories: {len(shared)} of them trained this router or chose its thresholds (e.g. {shared[0]!r}), "
            "expected others"
        )


def _steps(trajectories: Iterable[Trajectory]) -> list[_Step]:
    return [(t, review) for t in trajectories for review in reviews_of(t)]


def _held_out(config: RouteConfig, trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Which reviewed steps of trajectories fall under each entry of ``routing.unseen``: ``[N]`` bool by entry."""
    own = [config.routing.held_out(t.metadata) for t, _ in _steps(trajectories)]
    return {entry: np.array([entry in entries for entries in own]) for entry in config.routing.unseen}


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


def _table(steps: Sequence[_Step], logits: np.ndarray) -> RoutedRows:
    def texts(name: str) -> list[str]:
        return [str(t.metadata.get(name) or "") for t, _ in steps]

    pairs = texts("flip_pair")
    return RoutedRows(
        ids=[f"{t.id}:{review.step}" for t, review in steps],
        logits=logits,
        labels=_labels(steps),
        services=[_service(t) for t, _ in steps],
        personas=texts("persona"),
        triggers=[review.trigger for _, review in steps],
        pairs=[f"{pair}:{review.step}" if pair else "" for pair, (_, review) in zip(pairs, steps, strict=True)],
        sides=[
            ("mem" if t.metadata.get("memory") else "base") if t.metadata.get("flip_pair") else "" for t, _ in steps
        ],
        groups=[t.group or f"\0{t.id}" for t, _ in steps],  # as in a guard's evaluation
    )


def _routes_of(trajectories: Sequence[Trajectory], rows: RoutedRows, routing: Routing) -> str:
    """CSV with a line for each reviewed step: what it is, what its review says, and where logits and tau send it."""
    taus, steps = routing.taus_for(rows.services), _steps(trajectories)
    table = {
        "trajectory_id": [t.id for t, _ in steps],
        "step": [review.step for _, review in steps],
        "tool": [t.steps[review.step].tool for t, review in steps],
        "service": rows.services,
        "review": [Route(int(label)).name for label in rows.labels],
        "route": [Route(int(route)).name for route in rows.shares.routes(taus)],
        "execute_share": rows.shares.q,
        "tau": taus,
    }
    return pd.DataFrame(table).to_csv(index=False)


def _service(trajectory: Trajectory) -> str:
    try:
        return service_of(trajectory.metadata)
    except RouterError as error:
        raise RunError(f"trajectory {trajectory.id!r}: {error}") from error


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


def _rivals(train: Sequence[_Step], asked: Sequence[_Step]) -> Mapping[str, np.ndarray]:
    """Routes of plain baselines that learned from the same steps."""
    seen, new = ([(t, review.step) for t, review in steps] for steps in (train, asked))
    return text_routes(seen, _labels(train), new)


def _labels(steps: Sequence[_Step]) -> np.ndarray:
    return np.array([review.route for _, review in steps], np.int64)


def _evaluated(
    routing: Routing, rows: RoutedRows, source: str, config: RouteConfig, **beside: Any
) -> RoutingEvaluation:
    """``beside``: rivals, unseen and grid of :func:`~jaxguard.evaluation.routing.evaluate_routing`."""
    chosen = config.evaluation
    return evaluate_routing(
        rows,
        routing,
        source=source,
        resamples=chosen.resamples,
        seed=chosen.seed,
        delta=config.routing.delta,
        **beside,
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


def _require_place(out: Path) -> None:
    """Refuses a folder that holds anything but such a report, or the report of a run, before work is done."""
    if out.exists() and not out.is_dir():
        raise RunError(f"--out: {out} is a file, expected a folder")
    names = {path.name for path in out.iterdir()} if out.exists() else set()
    other = sorted(name for name in names if name.split(".partial")[0] not in _REPORT_FILES)
    own = out.resolve().name == "report" and (out.resolve().parent / "config.yaml").exists()
    if other or own:
        what = f"holds {other[0]!r}, which is no part of a report" if other else "is where a run has its own report"
        raise RunError(f"--out: {out} {what}; nothing was overwritten, name another folder")


def _write(
    folder: Path,
    result: RoutingEvaluation,
    about: str,
    title: str,
    provenance: Mapping[str, Any],
    table: str,
    routing: Routing | None = None,
) -> Path:
    """Writes page, figures and routes, with the thresholds where they are nowhere else; all of them or none."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {name: str(value) for name, value in {**provenance, "jaxguard": jaxguard.__version__}.items()}
    texts = {"evaluation.json": result.to_json(), "routes.csv": table}
    if routing is not None:
        texts["routing.json"] = routing.to_json()
    with replacing(folder / "report.html", *(folder / name for name in texts)) as (page, *places):
        write_routing_report(page, result, about=about, title=title, facts=facts)
        for place, text in zip(places, texts.values(), strict=True):
            place.write_text(text, encoding="utf-8", errors="replace")
    return folder / "report.html"
