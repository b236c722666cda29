"""Runs of a plan, each made once: what is finished is read, what is not goes on where it stopped."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxguard.config import Config
from jaxguard.evaluation.outcomes import OUTCOMES, read_outcomes, stamp
from jaxguard.experiments.plan import DEFAULT, FULL, Plan
from jaxguard.features.embed import embed
from jaxguard.features.encoder import load_encoder
from jaxguard.features.store import FeatureStore
from jaxguard.inputs import CONFIG_FILE, RunError
from jaxguard.run import calibrate_run, evaluate_run, open_calibrated, train
from jaxguard.settings import load_settings
from jaxguard.traces.convert import TRAJECTORIES_FILE, write_made
from jaxguard.traces.drift import generate
from jaxguard.traces.jsonl import read_trajectories


def run_folder(out: Path, name: str, variant: str, seed: str) -> Path:
    """Where a run of a set lies."""
    return out / "runs" / name / variant.replace(" ", "_").replace("/", "-") / f"seed_{seed}"


def set_config(plan: Plan, out: Path, name: str, *overrides: str) -> Config:
    """A set's configuration; of a generated one, with data and features in ``out``."""
    config = plan.config(name, *overrides)
    if name not in plan.generated:
        return config
    drift = config.data.drift
    folder = out / "data" / f"{name}-{drift.trajectories}-{drift.seed}"
    data = dataclasses.replace(config.data, trajectories=(str(folder),), store=str(out / "features"))
    return dataclasses.replace(config, data=data)


def missing_data(plan: Plan, out: Path, name: str) -> list[str]:
    """Trajectories and feature store of a set that are not there, after making what can be made."""
    config = set_config(plan, out, name)
    if name in plan.generated:
        (path,), drift = config.data.trajectories, config.data.drift
        if not (Path(path) / TRAJECTORIES_FILE).exists():
            write_made(generate(drift.trajectories, drift.seed), Path(path))
        encoder = load_encoder(config.encoder)
        store = FeatureStore.create_or_open(Path(config.data.store), encoder.fingerprint, encoder.dim)
        embed(
            read_trajectories(Path(path)), store, encoder, thought=config.data.thought, grounded=config.model.grounded
        )
    return [path for path in (*config.data.trajectories, config.data.store) if not Path(path).exists()]


def say(text: str, progress: bool) -> None:
    """Names what is made, above its bars."""
    if progress:
        print(text, file=sys.stderr, flush=True)


def evaluated(
    plan: Plan,
    out: Path,
    name: str,
    seed: str,
    variant: str = DEFAULT,
    overrides: Sequence[str] = (),
    *,
    progress: bool = True,
) -> Path:
    """The folder of a run that is trained, calibrated and evaluated; makes it where it is not.

    Raises:
        RunError: the folder holds a finished run with other settings.
        JaxguardError: data, store and settings do not fit together.
    """
    seeds = (f"train.seed={seed}", f"data.split.seed={seed}")
    config, folder = set_config(plan, out, name, *overrides, *seeds), run_folder(out, name, variant, seed)
    if (folder / "report" / OUTCOMES).exists():
        if load_settings(folder / CONFIG_FILE, (), Config) != config:
            raise RunError(
                f"run folder {folder}: holds a finished run with other settings than the plan's, expected the same; "
                "delete it, or use another --out"
            )
        _, guard = open_calibrated(folder, "test")  # refuses other labels and splits than it was trained on
        if read_outcomes(folder / "report" / OUTCOMES).made != stamp(guard):
            evaluate_run(folder)  # it was calibrated anew since
        return folder
    say(f"{name}, {variant}, seed {seed}", progress)
    for source in (run_folder(out, name, other, seed) for other in (DEFAULT, FULL)):
        if not folder.exists() and (source / "report" / OUTCOMES).exists():
            _borrow(load_settings(source / CONFIG_FILE, (), Config), config, source, folder)
    train(config, folder, progress=progress)
    calibrate_run(folder)
    evaluate_run(folder)
    return folder


def _borrow(theirs: Config, own: Config, source: Path, folder: Path) -> None:
    """Takes over the stages of a finished run that this one would train alike; checkpoints refuse what differs."""

    def seen(config: Config) -> tuple[object, ...]:
        model = dataclasses.replace(config.model, successor=True, heads="both")  # how risk is read, after stage 1
        return model, config.stage1, config.train, config.data

    if seen(theirs) != seen(own):
        return
    same = theirs.model == own.model and dataclasses.replace(theirs.stage2, pooled=own.stage2.pooled) == own.stage2
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    for stage in ("stage1", "stage2") if same else ("stage1",):
        if (source / stage).exists():
            shutil.copytree(source / stage, partial / stage)
    if partial.exists():
        partial.replace(folder)
