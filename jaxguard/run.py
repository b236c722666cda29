"""One experiment in one folder: train, calibrate, evaluate.

A run folder holds ``config.yaml`` (every key), ``splits.json``, ``stage1/`` and ``stage2/`` (checkpoints,
``curves.csv``), ``guard/`` (the bundle) and ``report/``. Each step reads what the one before wrote.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxguard
from jaxguard.baselines import logistic, rules
from jaxguard.baselines.rival import Rival, StepReader
from jaxguard.baselines.rival import score as ask
from jaxguard.config import Config, DecisionConfig
from jaxguard.decision.calibration import Calibration, calibrate
from jaxguard.decision.conformal import conformal_threshold
from jaxguard.decision.evidence import FusionParams, evidence, trajectory_max
from jaxguard.decision.fusion import FusionGrid, fit_fusion
from jaxguard.decision.margin import best_f1, floor
from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.evaluate import Baseline, Evaluation, evaluate, step_maxima, stepwise_baseline
from jaxguard.evaluation.outcomes import OUTCOMES, outcomes, stamp
from jaxguard.evaluation.report import write_report
from jaxguard.evaluation.timing import shared_beginnings
from jaxguard.evaluation.transfer import Place, Transfer, transfer
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard
from jaxguard.inputs import (
    PARTS,
    Run,
    RunError,
    delete_run,
    establish,
    even_sources,
    load_trajectories,
    open_run,
    prepare,
    require_replaceable,
    require_trained_on,
    run_episodes,
)
from jaxguard.settings import ConfigError, override
from jaxguard.traces.lock import locked
from jaxguard.training.loop import require_supervision, train_stage
from jaxguard.training.pooled import fit_pooled
from jaxguard.types import Trajectory
from jaxguard.world_model.params import count, init_params
from jaxguard.writing import replacing

logger = logging.getLogger(__name__)


def train(config: Config, folder: Path, *, fresh: bool = False, progress: bool = True) -> Guard:
    """Trains both stages and writes the (not yet calibrated) bundle ``guard/``; resumes where it stopped.

    Args:
        config: The experiment.
        folder: The run folder.
        fresh: Deletes what an earlier run wrote there first.
        progress: Shows bars on stderr.

    Raises:
        JaxguardError: data, store, split or configuration do not fit together, another process trains or
            calibrates there, or training diverges.
    """
    replaced = fresh and folder.exists()
    if replaced:
        require_replaceable(folder, config)
    # Whatever stops the new run is met before its folder is written, or the old one deleted.
    run = prepare(folder, config, fresh=replaced)
    training = run_episodes(run, "train")
    validation = run_episodes(run, "validation") if run.splits["validation"] else None
    if config.stage2.steps:
        require_supervision(training)
    with locked(folder):
        if replaced:
            delete_run(folder)
        establish(run)
        encoder = run.encoder
        # Before training, after which a bundle that cannot be read would stop the new one from being written.
        earlier = Guard.load(folder / "guard", encoder) if (folder / "guard").exists() else None
        params = init_params(config.model, config.train.seed)
        logger.info(
            "training %d parameters on %d trajectories (%d steps; %d cut to %d steps)",
            count(params),
            len(training),
            training.lengths.sum(),
            training.cut,
            config.train.max_steps,
        )
        for stage, settings in ((1, config.stage1), (2, config.stage2)):
            if settings.steps:
                result = train_stage(
                    config, stage, params, training, validation, folder / f"stage{stage}", progress=progress
                )
                params = result.params
        share = 0.0
        if config.stage2.steps and config.stage2.pooled and config.model.heads != "prefix":  # adds to the hazard logit
            fit = fit_pooled(config.model, params, training, validation, config.train.seed)
            params, share = fit.params, fit.share
        if config.train.half:
            params = jax.tree.map(lambda x: np.asarray(x).astype(np.float16).astype(np.float32), params)
        provenance = {
            "trajectories": {name: len(run.splits[name]) for name in PARTS},
            "data": list(config.data.trajectories),
            "seed": config.train.seed,
            "pooled_share": share,
            "inputs": dict(run.digests),
        }
        guard = Guard(config, params, encoder, provenance=provenance)
        if earlier is not None:
            found = (earlier.weights, earlier.provenance.get("inputs"))
            if found == (guard.weights, provenance["inputs"]):
                return dataclasses.replace(guard, calibration=earlier.calibration)  # nothing was left to train
        guard.save(folder / "guard")
        return guard


def _trained(run: Run[Config]) -> Guard:
    """The guard of a run, which must have been trained on the split and the labels that are there now."""
    guard = Guard.load(run.folder / "guard", run.encoder)
    require_trained_on(run, guard)
    return guard


def all_risks(
    guard: Guard, trajectories: Sequence[Trajectory], store: FeatureStore | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hazard risks ``[N]``, prefix risks ``[N]`` and lengths ``[n]``, trajectory after trajectory."""
    by_position = {position: risks for position, _, risks in guard.risks(trajectories, store)}
    flat = np.concatenate([by_position[i] for i in range(len(trajectories))]) if trajectories else np.empty((0, 2))
    return flat[:, 0], flat[:, 1], np.array([len(t) for t in trajectories], np.int64)


def calibrate_run(folder: Path, overrides: Sequence[str] = ()) -> Guard:
    """Fits the fusion on the validation part, sets thresholds on the calibration part, rewrites ``guard/``.

    Args:
        folder: A trained run.
        overrides: ``decision.key=value`` settings to use in place of the run's own.

    Raises:
        ConfigError: an override is not one of ``decision``.
        JaxguardError: too few safe calibration trajectories for a level (the message says how many it needs).
    """
    run = open_run(folder)
    with locked(folder):
        guard = _trained(run)
        decision = _decision(run.config, overrides)
        fusion, grid = FusionParams(beta=decision.beta, window=decision.window), FusionGrid()
        if not decision.temporal:
            fusion, grid = FusionParams(beta=0.0, window=1), FusionGrid(beta=(0.0,), window=(1,))
        fitted: dict[str, Any] = {"fitted": False}
        labelled = _labelled_validation(run)
        hazard, prefix, lengths = all_risks(guard, labelled, run.store)
        if decision.fit_fusion and labelled:
            fit = fit_fusion(
                hazard,
                prefix,
                lengths,
                [bool(t.unsafe) for t in labelled],
                first_hazard=[-1 if t.first_hazard is None else t.first_hazard for t in labelled],
                ids=[t.id for t in labelled],
                calibration_ids=run.splits["calibration"],
                grid=grid,
                default=fusion,
                tolerance=decision.fusion_tolerance,
            )
            fusion = fit.params
            fitted = {"fitted": fit.fitted, "auroc": fit.value if fit.fitted else None, "timeliness": fit.timeliness}
        safe = safe_calibration(run, decision)
        calibration = set_thresholds(guard, safe, run.store, fusion, decision, {"fusion": fitted, "run": folder.name})
        if not decision.paper_rule:
            fused = evidence(hazard, prefix, lengths, fusion).fused
            floors = [
                _floor(threshold.value, values, lengths, labelled, decision)
                for threshold, values in ((calibration.block, hazard), (calibration.hold, fused))
            ]
            calibration = calibration.raised(*floors)
        guard = guard.calibrated(calibration)
        guard.save(folder / "guard")
    return guard


def recalibrate(
    bundle: Path,
    paths: Sequence[str],
    out: Path,
    overrides: Sequence[str] = (),
    *,
    store: Path | None = None,
    unlabelled_are_safe: bool = False,
) -> Guard:
    """Sets a calibrated guard's thresholds anew on safe trajectories of the place where it is to be used.

    Weights and fusion stay; the levels are those of the bundle's configuration or of ``overrides``. Thresholds are
    the conformal ones: what they could be raised to is only known where there are unsafe trajectories too.

    Args:
        bundle: A calibrated guard.
        paths: Converted trajectories; those labelled safe are used.
        out: Bundle to write; may be ``bundle``.
        overrides: ``decision.key=value`` settings.
        store: Feature store with their texts; without one they are encoded on the spot.
        unlabelled_are_safe: Takes trajectories without a label as safe.

    Raises:
        ConfigError: an override is not one of ``decision``.
        JaxguardError: no calibrated bundle, or too few safe trajectories for a level.
    """
    guard = Guard.load(bundle)
    if guard.calibration is None:
        raise RunError(f"guard bundle {bundle}: has no thresholds and no fusion; run `jaxguard calibrate` first")
    decision = _decision(guard.config, overrides)
    trajectories = load_trajectories(paths).values()
    unlabelled = sum(t.unsafe is None for t in trajectories)
    safe = [t for t in trajectories if t.unsafe is False or (unlabelled_are_safe and t.unsafe is None)]
    if not safe:
        raise RunError(
            f"trajectories: got {len(trajectories):,}, of which {unlabelled:,} have no label and none is safe; "
            "expected safe ones (--unlabelled-are-safe takes those without a label as safe)"
        )
    vectors = None if store is None else FeatureStore.open(store, guard.encoder.fingerprint, guard.encoder.dim)
    provenance = {"trajectories": [str(path) for path in paths], "not safe, left out": len(trajectories) - len(safe)}
    if decision.balance:
        safe = even_sources(safe, guard.config.train.seed)
    fusion = guard.calibration.fusion
    guard = guard.calibrated(set_thresholds(guard, safe, vectors, fusion, decision, provenance))
    guard.save(out)
    return guard


def transfer_run(
    folder: Path, paths: Sequence[str], *, alpha: float | None = None, store: Path | None = None
) -> Transfer:
    """Measures a run's guard on trajectories of another place (:mod:`jaxguard.evaluation.transfer`); writes nothing.

    Args:
        folder: A calibrated run.
        paths: Converted, labelled trajectories.
        alpha: False-alert level in (0, 1); that of the run's HOLD by default.
        store: Feature store with their texts; the run's own by default.

    Raises:
        JaxguardError: the run is not calibrated, or the trajectories are not labelled.
    """
    run = open_run(folder)
    guard = _trained(run)
    if guard.calibration is None:
        raise RunError(f"run folder {folder}: has no thresholds yet; run `jaxguard calibrate {folder}` first")
    fusion = guard.calibration.fusion
    vectors = run.store if store is None else FeatureStore.open(store, guard.encoder.fingerprint, guard.encoder.dim)

    def place(trajectories: Sequence[Trajectory], vectors: FeatureStore) -> Place:
        hazard, prefix, lengths = all_risks(guard, trajectories, vectors)
        features = np.zeros((len(trajectories), 2 * guard.encoder.dim))
        for row, trajectory in zip(features, trajectories, strict=True):
            if trajectory.steps:
                observations, actions, _ = StepReader(vectors.get, guard.config.data.thought)(trajectory)
                row[:] = np.concatenate([part.mean(axis=0) for part in (observations, actions)])
        return Place(
            trajectory_max(evidence(hazard, prefix, lengths, fusion).fused, lengths),
            np.array([t.unsafe for t in trajectories], bool),
            [t.group or t.id for t in trajectories],
            features,
        )

    there = [t for t in load_trajectories(paths).values() if t.unsafe is not None]
    known = {i for name in PARTS[:3] for i in run.splits[name]}
    if shared := [t.id for t in there if t.id in known]:
        raise RunError(
            f"trajectories: {len(shared)} of them trained or calibrated this guard (e.g. {shared[0]!r}), expected "
            "others"
        )
    read = {"thought": guard.config.data.thought, "grounded": guard.config.model.grounded}
    texts = dict.fromkeys(text for t in there for text in trajectory_texts(t, **read).unique())
    if missing := vectors.missing(list(texts)):
        named = " ".join(f"--trajectories {path}" for path in paths)
        raise RunError(
            f"feature store {vectors.path}: {len(missing):,} of {len(texts):,} texts have no vector; run `jaxguard "
            f"embed --config {folder}/config.yaml --store {vectors.path} {named}` first"
        )
    safe = safe_calibration(run, run.config.decision)
    hold = guard.calibration.hold
    alpha = hold.alpha if alpha is None else alpha
    own = hold.value if alpha == hold.alpha and hold.raised_from is not None else None
    return transfer(place(safe, run.store), place(there, vectors), own, alpha, seed=run.config.evaluation.seed)


def _decision(config: Config, overrides: Sequence[str]) -> DecisionConfig:
    """The decision settings of a configuration, some of them overridden."""
    if other := [o for o in overrides if not o.startswith("decision.")]:
        raise ConfigError(f"override {other[0]!r}: expected decision.* here; other settings need another training")
    return override(config, overrides).decision


def _floor(
    value: float, risks: np.ndarray, lengths: np.ndarray, trajectories: Sequence[Trajectory], decision: DecisionConfig
) -> float:
    """What the risks of labelled trajectories let a threshold be raised to (:mod:`jaxguard.decision.margin`)."""
    maxima, unsafe = trajectory_max(risks, lengths), np.array([bool(t.unsafe) for t in trajectories], bool)
    before = np.array([t.first_hazard or 0 for t in trajectories], np.int64)  # steps before the first hazard step
    early = np.arange(len(risks)) - np.repeat(np.cumsum(lengths) - lengths, lengths) < np.repeat(before, lengths)
    timed = np.array([bool(t.unsafe) and t.timing and t.first_hazard is not None for t in trajectories], bool)
    raised = best_f1 if decision.raised_for == "f1" else floor
    return raised(
        value, maxima[~unsafe], maxima[unsafe], trajectory_max(risks[early], before)[timed], decision.max_lost
    )


def set_thresholds(
    guard: Guard,
    safe: Sequence[Trajectory],
    store: FeatureStore | None,
    fusion: FusionParams,
    decision: DecisionConfig,
    provenance: Mapping[str, Any],
) -> Calibration:
    """Conformal thresholds of ``guard`` from safe trajectories, at the levels of ``decision``."""
    if not guard.config.stage2.steps:
        logger.warning(
            "stage2.steps is 0: the risk heads were never trained, and thresholds on their risks say nothing"
        )
    if decision.mondrian and safe and not any(t.metadata.get(decision.mondrian) is not None for t in safe):
        fields = sorted({name for t in safe for name in t.metadata})
        raise ConfigError(
            f"decision.mondrian: got {decision.mondrian!r}, which no safe calibration trajectory has in its metadata, "
            f"expected one of {', '.join(fields) or 'none: they have no metadata'}"
        )
    hazard, prefix, lengths = all_risks(guard, safe, store)
    fused = evidence(hazard, prefix, lengths, fusion).fused
    groups = [t.metadata.get(decision.mondrian) for t in safe] if decision.mondrian else None
    return calibrate(
        trajectory_max(hazard, lengths),
        trajectory_max(fused, lengths),
        alpha_hold=decision.alpha_hold,
        alpha_block=decision.alpha_block,
        fusion=fusion,
        encoder=guard.encoder.fingerprint.short,
        weights=guard.weights,
        groups=groups,
        group_key=decision.mondrian or "",
        paper_rule=decision.paper_rule,
        provenance=provenance,
    )


def baselines(run: Run[Config], test: Sequence[Trajectory]) -> dict[str, Baseline]:
    """Simple guards trained and calibrated on the same parts, aligned with ``test``.

    Zero-step trajectories score 0 and never alert.
    """
    found: dict[str, Baseline] = {
        "unknown tool": Baseline(alert=rules.unknown_tool(run.part("train"), test)),
        "CamelCase tool": Baseline(alert=rules.camel_case_tool(test)),
        "two calls or more": Baseline(alert=rules.two_or_more_calls(test)),
    }
    if not all(any(t.steps for t in run.part(name)) for name in ("train", "calibration", "test")):
        return found  # nothing to learn from, or to score
    training, calibration, testing = run_episodes(run, "train"), *(run_episodes(run, n, whole=True) for n in PARTS[2:])
    safe = safe_calibration(run, decision := run.config.decision)
    bag = logistic.BagScorer(training)
    of_test, of_calibration = bag(testing), bag(calibration)
    if of_test is not None and of_calibration is not None:
        known = dict(zip((*testing.ids, *calibration.ids), (*of_test, *of_calibration), strict=True))
        score, of_safe = (np.array([known.get(t.id, 0.0) for t in part]) for part in (test, safe))
        limit = conformal_threshold(of_safe, decision.alpha_hold, paper_rule=decision.paper_rule)
        found["logistic (bag)"] = Baseline(score=score, alert=limit.crossed(score))
    for name in logistic.STEPWISE:
        rival = logistic.LogisticRival.fit(training, name, step_reader(run))
        if rival is not None:
            found[f"logistic ({name})"] = judged(rival, run, test, decision)
    return found


def step_reader(run: Run[Config]) -> StepReader:
    """Looks up what a guard reads of a trajectory, for rivals."""
    return StepReader(run.store.get, run.config.data.thought, run.config.model.grounded)


def _labelled_validation(run: Run[Config]) -> list[Trajectory]:
    """The trajectories that choose the fusion, and how far thresholds are raised."""
    return [t for t in run.part("validation") if t.unsafe is not None]


def safe_calibration(run: Run[Config], decision: DecisionConfig) -> list[Trajectory]:
    """The trajectories that set thresholds."""
    safe = [t for t in run.part("calibration") if t.unsafe is False]
    return even_sources(safe, run.config.train.seed) if decision.balance else safe


def judged(rival: Rival, run: Run[Config], test: Sequence[Trajectory], decision: DecisionConfig) -> Baseline:
    """A rival at a threshold that is set as that of the guard's HOLD.

    It is split-conformal for ``alpha_hold`` on the safe calibration trajectories, and raised where the validation part
    allows it. Steps that the rival could not score alert, and are counted in a warning.
    """
    labelled = _labelled_validation(run)
    parts = {"scored": test, "safe calibration": safe_calibration(run, decision), "validation": labelled}
    found = {name: ask(rival, part) for name, part in parts.items()}
    for name, risks in found.items():
        if lost := sum(int(np.isnan(r).sum()) for r in risks):
            total = sum(map(len, risks))
            text = "rival %s: %d of %d steps of the %s trajectories have no score, and alert"
            logger.warning(text, rival.name, lost, total, name)
    limit = conformal_threshold(
        step_maxima(found["safe calibration"]), decision.alpha_hold, paper_rule=decision.paper_rule
    )
    if not decision.paper_rule and labelled:
        seen = found["validation"]
        lengths = np.array([len(r) for r in seen], np.int64)
        limit = limit.at_least(_floor(limit.value, np.concatenate(seen), lengths, labelled, decision))
    return stepwise_baseline(found["scored"], limit)


def evaluate_run(folder: Path, part: str = "test") -> tuple[Evaluation, list[ScoredTrajectory], Path]:
    """Scores a part, compares with simple guards, and writes ``evaluation.json``, ``outcomes.json``, ``report.html``.

    They go to ``report/``, those of other parts than the test part to ``report-PART/``.
    """
    run, guard = open_calibrated(folder, part)
    rivals = baselines(run, run.part(part)) if part == "test" else {}
    report = folder / ("report" if part == "test" else f"report-{part}")  # no figures of training among those of tests
    return write_evaluation(run, guard, part, rivals, report)


def open_calibrated(folder: Path, part: str) -> tuple[Run[Config], Guard]:
    """A run with a part to evaluate, and its guard, which has a calibration."""
    run = open_run(folder)
    if part not in run.splits:
        raise RunError(f"part: got {part!r}, expected one of {', '.join(run.splits)}")
    guard = _trained(run)
    if guard.calibration is None:
        raise RunError(f"run folder {folder}: has no thresholds yet; run `jaxguard calibrate {folder}` first")
    if not run.splits[part]:
        raise RunError(f"part {part!r}: has no trajectories, expected at least one")
    return run, guard


def write_evaluation(
    run: Run[Config], guard: Guard, part: str, rivals: Mapping[str, Baseline], report: Path
) -> tuple[Evaluation, list[ScoredTrajectory], Path]:
    """Evaluates a part beside rivals that are aligned with it; all files are written into ``report``, or none."""
    trajectories, calibration, settings = run.part(part), guard.calibration, run.config.evaluation
    assert calibration is not None  # open_calibrated saw to it
    scored = list(guard.score(trajectories, run.store))
    latency = live_latency(guard, trajectories, run.store)
    shared = shared_beginnings(run.trajectories.values(), thought=guard.config.data.thought)
    result = evaluate(
        scored, calibration, rivals, seed=settings.seed, resamples=settings.resamples, latency_ms=latency, shared=shared
    )
    report.mkdir(parents=True, exist_ok=True)
    page, figures, each = report / "report.html", report / "evaluation.json", report / OUTCOMES
    with replacing(page, figures, each) as (shown, values, answers):
        values.write_text(result.to_json(), encoding="utf-8")
        outcomes(scored, rivals, stamp(guard)).write(answers)
        write_report(
            shown,
            result,
            scored,
            {t.id: t for t in trajectories},
            calibration,
            title=f"{run.config.name}: {part} part",
            provenance={**guard.provenance, "jaxguard": jaxguard.__version__, "part": part},
            each=settings.timelines,
        )
    return result, scored, page


def live_latency(guard: Guard, trajectories: Sequence[Trajectory], store: FeatureStore) -> dict[str, float]:
    """Milliseconds of one live step from stored vectors to risks, batch 1, one call after the other.

    Encoding, evidence and the decision are not part of it; ``bench/`` measures those.
    """
    trajectory = max(trajectories, key=len, default=None)
    if trajectory is None or not trajectory.steps:
        return {}
    reader = StepReader(store.get, guard.config.data.thought, guard.config.model.grounded)
    observations, actions, instruction = reader(trajectory)
    state = guard.scorer.start(instruction)
    guard.scorer.step(state, observations[0], actions[0])
    times = []
    for i in range(300):
        at = i % len(actions)
        begin = time.perf_counter()
        guard.scorer.step(state, observations[at], actions[at])
        times.append((time.perf_counter() - begin) * 1e3)
    return {"p50": float(np.percentile(times, 50)), "p99": float(np.percentile(times, 99))}
