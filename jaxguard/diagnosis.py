"""``jaxguard diagnose``: what the world model of a trained run carries, after stage 1 and at the end.

Everything comes from the validation part. Probes are logistic regressions, fitted on one half of its groups and
scored on the other. What one of them finds in the state after a call but not in the embeddings of that step
(what was seen before the call, and the call), the model has remembered.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import jaxguard
from jaxguard.config import Config
from jaxguard.evaluation.diagnose import (
    Diagnosis,
    DiagnosisError,
    Probe,
    gradient_norms,
    latent_use,
    read_curves,
    states,
)
from jaxguard.evaluation.diagnosis_page import write_diagnosis
from jaxguard.guard import Guard
from jaxguard.inputs import require_trained_on, run_episodes
from jaxguard.ranking import auroc
from jaxguard.run import open_run
from jaxguard.traces.drift import all_templates
from jaxguard.training.checkpoints import Checkpoints
from jaxguard.training.episodes import Episodes
from jaxguard.training.pooled import REGULARISATION
from jaxguard.training.state import TrainState, optimiser, partition
from jaxguard.types import Trajectory
from jaxguard.world_model.params import Params, init_params
from jaxguard.writing import replacing

STAGE_1, FINAL = "after stage 1", "final"
LAGS = (0, 1, 2, 4, 8)
KINDS = 8  # of tools; the most frequent ones are told apart
FEWEST = 5  # examples of a class in either half
LEFT_OUT = -1  # label of a step that a probe does not use


class Target(NamedTuple):
    """What a probe is to read: a class of every step, and on which steps it is scored."""

    name: str
    labels: np.ndarray  # [N] class, or LEFT_OUT
    scored: np.ndarray  # [N] bool
    lag: int | None = None


class Score(NamedTuple):
    """See :class:`~jaxguard.evaluation.diagnose.Probe`."""

    auroc: float
    n: int
    accuracy: float
    majority: float


def diagnose_run(folder: Path) -> tuple[Diagnosis, Path]:
    """Looks into a trained run; writes ``report/diagnosis.json`` and ``report/diagnosis.html``.

    Returns:
        What was found, and the page.

    Raises:
        DiagnosisError: stage 1 is missing or unfinished, or the validation part has no steps.
        JaxguardError: not a run folder, or its data are not where they were.
    """
    run = open_run(folder)
    config, model, part = run.config, run.config.model, run.part("validation")
    if not any(t.steps for t in part):
        raise DiagnosisError(f"run folder {folder}: its validation part has no steps, expected some to look at")
    guard = Guard.load(folder / "guard", run.encoder)
    require_trained_on(run, guard)
    parameters = {STAGE_1: stage1_params(folder, config), FINAL: guard.params}
    episodes = run_episodes(run, "validation")
    by_id = {t.id: t for t in part}
    trajectories = [by_id[i] for i in episodes.ids]
    held = {name: states(model, params, episodes) for name, params in parameters.items()}
    sources = {("", "step"): embeddings(episodes)}
    for name, found in held.items():
        sources[name, "h"] = found.h
        sources[name, "z"] = np.eye(model.classes, dtype=np.float32)[found.z].reshape(len(found.z), -1)
    groups = [t.group or t.id for t in trajectories]
    half = halves(groups)
    fitted = np.repeat(half, episodes.lengths)
    probes = [
        Probe(target.name, name, source, *probe(features, target.labels, fitted, target.scored), target.lag)
        for target in targets(config, trajectories, episodes, half)
        for (name, source), features in sources.items()
    ]
    stages = {f"stage {n}": n for n, s in ((1, config.stage1), (2, config.stage2)) if s.steps}
    diagnosis = Diagnosis(
        title=f"{config.name}: what the world model carries",
        facts={
            "part": "validation",
            "trajectories": len(episodes),
            "steps": len(fitted),
            "groups": len(set(groups)),
            "probes are fitted on": f"{half.sum():,} trajectories",
            "cut to the training limit": episodes.cut,
            "share of the recurrent hazard head": 1 - guard.provenance.get("pooled_share", 0.0),
            "latents": f"{model.stoch} categoricals of {model.classes} classes",
            "jaxguard": jaxguard.__version__,
        },
        free_nats=config.stage1.free_nats,
        latents={name: latent_use(s, model.classes, config.stage1.free_nats) for name, s in held.items()},
        gradients=gradient_norms(config, parameters, episodes),
        rates={f"stage {n}": partition(n, config.stage2.train_core)(parameters[FINAL]) for n in (1, 2)},
        probes=tuple(probes),
        curves={name: read_curves(folder / f"stage{n}" / "curves.csv") for name, n in stages.items()},
    )
    report = folder / "report"
    report.mkdir(exist_ok=True)
    page = report / "diagnosis.html"
    with replacing(report / "diagnosis.json", page) as (figures, shown):
        figures.write_text(diagnosis.to_json(), encoding="utf-8")
        write_diagnosis(shown, diagnosis)
    return diagnosis, page


def stage1_params(folder: Path, config: Config) -> Params:
    """What stage 1 of a run handed on to stage 2.

    Unlike a resumed training this asks for nothing but the checkpoint: the data, the machine that drew the first
    weights and settings that do not change shapes may be others.

    Raises:
        DiagnosisError: there is no stage 1, or it is not finished.
        TrainingError: its checkpoint is damaged.
    """
    path, steps = folder / "stage1" / "checkpoints", config.stage1.steps
    if not steps or not path.is_dir():
        raise DiagnosisError(
            f"run folder {folder}: has no stage 1 (stage1.steps is {steps}), expected what `jaxguard train` writes "
            f"to {path}"
        )
    with contextlib.closing(ocp.CheckpointManager(path.absolute())) as manager:
        latest = manager.latest_step()
        if latest != steps:
            raise DiagnosisError(
                f"checkpoints {path}: the newest is of step {latest}, expected {steps}; `jaxguard train` finishes it"
            )
        try:
            meta = manager.restore(latest, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        except Exception as error:  # Orbax raises bare Exceptions for what it cannot decode
            raise DiagnosisError(f"checkpoint {path}/{latest}: cannot be read: {error}") from error
    identity = meta["identity"] if isinstance(meta, dict) and "identity" in meta else {}  # restore() refuses {}
    start = init_params(config.model, config.train.seed)
    template = TrainState(start, optimiser(config, 1).init(start), jnp.zeros((), jnp.int32))
    with contextlib.closing(Checkpoints(path, identity)) as checkpoints:
        state, best, meta = checkpoints.restore(template)
    return state.params if meta["best_loss"] is None else best  # as train_stage decides at its end


def embeddings(episodes: Episodes) -> np.ndarray:
    """``[N, E + A]``: observation and action of every step, trajectory after trajectory."""
    return np.concatenate([np.hstack(episodes.vectors(index)[:2]) for index in range(len(episodes))])


def halves(groups: Sequence[str]) -> np.ndarray:
    """For each of ``[n]`` trajectories, are probes fitted on it? Whole groups, about as many on either side."""
    sizes = Counter(groups)
    counts, side = [0, 0], {}
    # Large groups first, each to the emptier side: that balances better than drawing.
    for group in sorted(sizes, key=lambda g: (-sizes[g], g)):
        side[group] = int(counts[1] < counts[0])
        counts[side[group]] += sizes[group]
    return np.array([side[g] == 0 for g in groups], bool)


def targets(config: Config, trajectories: Sequence[Trajectory], episodes: Episodes, half: np.ndarray) -> list[Target]:
    """What needs memory to be read; ``trajectories`` are those of ``episodes``, ``half`` is from :func:`halves`."""
    lengths = episodes.lengths
    horizon = config.stage2.horizon
    near = np.concatenate(
        [hazard_labels(n, int(h), horizon) for n, h in zip(lengths, episodes.hazard_step, strict=True)]
    )
    everywhere = np.ones(len(near), bool)
    found = [Target(f"first hazard within {horizon} steps", near, everywhere)]
    bad = np.concatenate([drift_labels(t)[:n] for t, n in zip(trajectories, lengths, strict=True)])
    if (bad != LEFT_OUT).any():
        last = np.concatenate([np.arange(n) == len(t) - 1 for t, n in zip(trajectories, lengths, strict=True)])
        found.append(Target("document or backup in bad state", bad, everywhere))
        found.append(Target("the same at the decisive call", bad, last))
    tools = [[kind(step.tool) for step in t.steps[:n]] for t, n in zip(trajectories, lengths, strict=True)]
    frequent = Counter(tool for names, known in zip(tools, half, strict=True) if known for tool in names)
    number = {tool: i for i, (tool, _) in enumerate(frequent.most_common(KINDS))}
    for lag in LAGS:
        labels = np.concatenate([lagged([number.get(tool, LEFT_OUT) for tool in names], lag) for names in tools])
        found.append(Target(f"kind of tool {lag} steps ago", labels, everywhere, lag))
    return found


def hazard_labels(length: int, hazard: int, horizon: int) -> np.ndarray:
    """``[length]``: 1 where the first hazard is 1 to ``horizon`` steps ahead, 0 in safe trajectories.

    ``hazard`` is that of :class:`~jaxguard.training.episodes.Episodes`: -1 for a safe trajectory, -2 where unknown.
    """
    if hazard < 0:
        return np.full(length, 0 if hazard == -1 else LEFT_OUT)
    ahead = hazard - np.arange(length)
    return np.where((ahead >= 1) & (ahead <= horizon), 1, LEFT_OUT)


def kind(tool: str) -> str:
    """First word of a tool's name, in small letters: the rest often names a domain, which needs no memory."""
    return re.split(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])", tool.strip("_"))[0].lower()


def lagged(classes: Sequence[int], lag: int) -> np.ndarray:
    """``[T]``: the class of ``lag`` steps before, ``LEFT_OUT`` where there was no such step."""
    values = np.array(classes, np.int64)
    return np.concatenate([np.full(min(lag, len(values)), LEFT_OUT), values[: max(len(values) - lag, 0)]])


def drift_labels(trajectory: Trajectory) -> np.ndarray:
    """``[T]``: 1 where after the step's call the working document is sensitive, or nothing can be restored; else 0.

    That is what makes the last call of a trajectory of :mod:`jaxguard.traces.drift` the hazard. ``LEFT_OUT`` before
    the document is first filled (the backup first made or retired), and in every other trajectory.
    """
    about = trajectory.metadata
    found = [
        t
        for t in (all_templates([about["domain"]]) if trajectory.source == "drift" and "domain" in about else ())
        if (t.scenario, t.index) == (about.get("scenario"), about.get("template"))
    ]
    if not found:
        return np.full(len(trajectory), LEFT_OUT)
    template, state, labels = found[0], LEFT_OUT, []
    bad, _ = template.contents
    for step in trajectory.steps:
        verb, arguments = step.tool.split("_")[0], step.arguments or {}
        if template.scenario == "exfiltration" and {"source", "target"} <= arguments.keys():
            state = int(arguments["source"] == bad.kind)
        elif template.scenario == "exfiltration" and verb == "redact":
            state = 0
        elif template.scenario == "destroy_undo" and verb in ("retire", "create"):
            state = int(verb == "retire")
        labels.append(state)
    return np.array(labels, np.int64)


def probe(features: np.ndarray, labels: np.ndarray, fitted: np.ndarray, scored: np.ndarray) -> Score:
    """Fits a regression on the steps ``fitted`` and scores it on the others.

    Args:
        features: ``[N, F]``.
        labels: ``[N]`` classes; ``LEFT_OUT`` where there is none.
        fitted: ``[N]`` bool.
        scored: ``[N]`` bool, a further restriction of the steps it is scored on.

    Returns:
        The score on classes that are frequent enough in both halves; NaN where there are fewer than two of them.
    """
    test = ~fitted & scored
    usable = [
        c
        for c in np.unique(labels[labels != LEFT_OUT])
        if min((labels[s] == c).sum() for s in (fitted, test)) >= FEWEST
    ]
    known = np.isin(labels, usable)
    train, test = fitted & known, test & known
    truth = labels[test]
    majority = max((float((truth == c).mean()) for c in usable), default=np.nan)
    if len(usable) < 2:
        return Score(np.nan, len(truth), np.nan, majority)
    regression = LogisticRegression(C=REGULARISATION, max_iter=500, class_weight="balanced")
    model = make_pipeline(StandardScaler(), regression).fit(features[train], labels[train])
    risks = model.predict_proba(features[test])
    areas = [auroc(risks[:, i], truth == c) for i, c in enumerate(model.classes_)]
    # The fit weighs classes alike; which one is the most probable also depends on how often they occur.
    shares = np.array([(labels[train] == c).mean() for c in model.classes_])
    right = model.classes_[(risks * shares).argmax(axis=1)] == truth
    return Score(float(np.mean(areas)), len(truth), float(right.mean()), majority)
