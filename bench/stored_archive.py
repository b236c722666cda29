"""An archive whose texts all have vectors in a store, and a guard for it; nothing in them means anything."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jaxguard.config import MODEL_PRESETS, Config
from jaxguard.decision.calibration import calibrate
from jaxguard.decision.evidence import FusionParams
from jaxguard.features.encoder import load_encoder
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.guard import Guard
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.world_model.params import init_params

STEPS_PER_FILE = 200_000


def untrained_guard(path: Path) -> Path:
    """A calibrated bundle of the small size, with weights as they are drawn."""
    config = Config()
    assert config.model == MODEL_PRESETS["small"]
    made = Guard(config, init_params(config.model, 0), load_encoder())
    calibration = calibrate(
        [0.5] * 40,
        [0.5] * 40,
        alpha_hold=0.1,
        alpha_block=0.05,
        fusion=FusionParams(),
        encoder=made.encoder.fingerprint.short,
        weights=made.weights,
    )
    made.calibrated(calibration).save(path)
    return path


def stored_archive(folder: Path, steps: int, guard: Path, new: float = 0.25, copies: int = 1) -> tuple[Path, Path, int]:
    """Trajectories of 3 to 40 steps with about 400 characters a step, in files of :data:`STEPS_PER_FILE` steps.

    Args:
        new: Share of texts that were not there before; others repeat one of the last 2,000.
        copies: So many times the archive, under other ids.

    Returns:
        The archive, the store, and the number of steps.
    """
    rng = np.random.default_rng(0)
    archive, count, texts = folder / "archive", 0, 0
    archive.mkdir(parents=True)
    files = 0
    while count < steps:
        target = min(count + STEPS_PER_FILE, steps)
        with (archive / f"{files:04d}.jsonl").open("w", encoding="utf-8") as file:
            while count < target:
                length = int(rng.integers(3, 41))
                fresh = rng.random((2, length)) < new
                numbers = np.where(fresh, texts + fresh.cumsum().reshape(2, length), texts)
                numbers = np.where(fresh, numbers, np.maximum(numbers - rng.integers(0, 2_000, (2, length)), 0))
                texts += int(fresh.sum())
                rows = [
                    {
                        "tool": f"tool_{act % 40}",
                        "arguments": {"path": f"/data/{act}/report.txt", "text": f"entry {act} " * 5},
                        "call_id": f"c{t}",
                        "observation": f"row {obs} of the table: " + f"value {obs} " * 18,
                    }
                    for t, (obs, act) in enumerate(numbers.T.tolist())
                ]
                record = {
                    "jaxguard": 1,
                    "id": f"run {files} {count}",
                    "instruction": f"task {count % 500}",
                    "steps": rows,
                }
                file.write(json.dumps(record) + "\n")
                count += length
        files += 1
    encoder = Guard.load(guard).encoder
    store = FeatureStore.create_or_open(folder / "store", encoder.fingerprint, encoder.dim)
    for path in sorted(archive.iterdir()):
        distinct = {text for made in read_trajectories(path) for text in trajectory_texts(made).unique()}
        missing = store.missing(sorted(distinct))
        store.add(missing, rng.normal(size=(len(missing), encoder.dim)).astype(np.float32))
    for path in sorted(archive.iterdir()):
        for copy in range(1, copies):
            with path.open() as lines, (archive / f"{copy}-{path.name}").open("w") as file:
                file.writelines(line.replace('"id": "run ', f'"id": "run {copy} ', 1) for line in lines)
    return archive, folder / "store", count * copies
