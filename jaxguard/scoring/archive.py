"""Scores an archive of traces into Parquet: one row per step, one per trajectory, and a manifest.

Three passes, each streaming with memory that does not grow with the archive: convert (any known format to
trajectories; rejects are kept), embed (texts that the store lacks), score. Outputs appear whole or not at all.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.decision.shift import ShiftDetector
from jaxguard.features.embed import embed
from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.traces.convert import MANIFEST_FILE, REJECTS_FILE, convert, read_manifest
from jaxguard.traces.jsonl import TRAJECTORIES_FILE, read_trajectories
from jaxguard.traces.lock import locked
from jaxguard.types import Decision, JaxguardError, Trajectory
from jaxguard.versions import versions

ROWS_PER_GROUP = 50_000
SHIFT_BLOCK = 10_000

STEPS = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("step", pa.int32()),
        ("call_id", pa.string()),
        ("tool", pa.string()),
        ("hazard", pa.float32()),
        ("prefix", pa.float32()),
        ("ema", pa.float32()),
        ("win", pa.float32()),
        ("fused", pa.float32()),
        ("decision", pa.string()),
        ("margin", pa.float32()),
        ("unobserved", pa.bool_()),
    ]
)
TRAJECTORIES = pa.schema(
    [
        ("trajectory_id", pa.string()),
        ("source", pa.string()),
        ("steps", pa.int32()),
        ("decision", pa.string()),
        ("first_alert", pa.int32()),
        ("first_block", pa.int32()),
        ("max_hazard", pa.float32()),
        ("max_fused", pa.float32()),
        ("unsafe", pa.bool_()),
        ("first_hazard", pa.int32()),
        ("metadata", pa.string()),
    ]
)


@dataclass(frozen=True)
class ScoreReport:
    """What a scoring run did; ``records == converted + rejected``, ``trajectories == scored``.

    ``shift_at`` is the trajectory at which the archive no longer looked like the calibration set, if it came to that
    (:mod:`jaxguard.decision.shift`). ``skipped_files`` are those of the archive that were not read, as in
    :class:`jaxguard.traces.convert.ConvertReport`.
    """

    counts: dict[str, int]
    decisions: dict[str, int]
    seconds: dict[str, float]
    shift_at: int | None
    skipped_files: list[str]


class _ShiftWatch:
    """A :class:`ShiftDetector` for each :data:`SHIFT_BLOCK` trajectories: what it keeps grows with what it saw."""

    def __init__(self, maxima: Sequence[float]):
        self._maxima, self._blocks = maxima, 0
        self._detector = ShiftDetector(maxima)
        self.evidence = 0.0
        self.alarm_at: int | None = None

    def __call__(self, score: float) -> None:
        if self._detector.seen == SHIFT_BLOCK:
            self._blocks += 1
            self._detector = ShiftDetector(self._maxima, seed=self._blocks)
        self.evidence = max(self.evidence, self._detector.update(score))
        if self.alarm_at is None and self._detector.alarm_at is not None:
            self.alarm_at = self._blocks * SHIFT_BLOCK + self._detector.alarm_at


class _Writer:
    """Buffers rows and writes row groups; the file gets its name when it is complete."""

    def __init__(self, path: Path, schema: pa.Schema):
        self._path, self._schema = path, schema
        self._partial = path.with_suffix(".partial")
        self._file = pq.ParquetWriter(self._partial, schema)
        self._rows: list[dict[str, Any]] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows.extend(rows)
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        self._file.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows = []

    def finish(self) -> None:
        self._flush()
        self._file.close()
        self._partial.replace(self._path)


def step_rows(trajectory: Trajectory, scored: ScoredTrajectory) -> Iterator[dict[str, Any]]:
    """One row per step, in the columns of :data:`STEPS`."""
    for t, step in enumerate(trajectory.steps):
        yield {
            "trajectory_id": trajectory.id,
            "step": t,
            "call_id": step.call_id,
            "tool": step.tool,
            "hazard": scored.hazard[t],
            "prefix": scored.prefix[t],
            "ema": scored.ema[t],
            "win": scored.win[t],
            "fused": scored.fused[t],
            "decision": Decision(int(scored.decision[t])).name,
            "margin": scored.margin[t],
            "unobserved": step.unobserved,
        }


def trajectory_row(scored: ScoredTrajectory) -> dict[str, Any]:
    """The outcome of a trajectory, in the columns of :data:`TRAJECTORIES`."""
    worst = Decision(int(scored.decision.max())) if len(scored) else Decision.PASS
    return {
        "trajectory_id": scored.id,
        "source": scored.source,
        "steps": len(scored),
        "decision": worst.name,
        "first_alert": scored.first_alert,
        "first_block": scored.first_block,
        "max_hazard": scored.max_hazard,
        "max_fused": scored.max_fused,
        "unsafe": scored.unsafe,
        "first_hazard": scored.first_hazard,
        "metadata": json.dumps(dict(scored.metadata), ensure_ascii=True, sort_keys=True),
    }


def score_archive(
    archive: Path,
    guard: Guard,
    out: Path,
    *,
    store: Path | None = None,
    format: str | None = None,
    progress: bool = True,
) -> ScoreReport:
    """Scores everything in ``archive``; see the module docstring for the passes.

    Args:
        archive: File or folder of traces in any known format, or a folder that ``convert`` wrote.
        guard: A calibrated guard.
        out: Gets ``traces/`` (unless ``archive`` is converted already), ``steps.parquet``,
            ``trajectories.parquet`` and ``manifest.json``; made if absent.
        store: Feature store to use and extend; ``out/features`` by default.
        format: Name of the format; detected where it is None.
        progress: Shows bars on stderr.

    Raises:
        JaxguardError: no known format, everything was rejected, a store of another encoder, a store where output goes,
            an uncalibrated guard, ``out`` holds results already, or another process writes to it.
    """
    with locked(out):
        return _score(archive, guard, out, store or out / "features", format, progress)


def _score(archive: Path, guard: Guard, out: Path, store: Path, format: str | None, progress: bool) -> ScoreReport:
    if (out / "manifest.json").exists():
        raise JaxguardError(f"--out {out}: holds results already; nothing was overwritten, name another folder")
    if guard.calibration is None:
        raise JaxguardError("--guard: this guard has no thresholds; run `jaxguard calibrate` first")
    calibration = guard.calibration
    for taken in (out, out / "traces"):
        if store.resolve() == taken.resolve():
            raise JaxguardError(f"--store {store}: is where the results go, expected a folder of its own")
    seconds: dict[str, float] = {}
    begin = time.perf_counter()

    def lap(name: str) -> None:
        nonlocal begin
        seconds[name] = round(time.perf_counter() - begin, 3)
        begin = time.perf_counter()

    if (archive / TRAJECTORIES_FILE).is_file() and (archive / MANIFEST_FILE).is_file():
        traces = archive
    else:
        traces = out / "traces"
        convert(archive, traces, format=format)
    conversion = read_manifest(traces / MANIFEST_FILE)
    counts = conversion["counts"]
    if not counts["trajectories"] and counts["rejected"] + counts["files_rejected"]:
        raise JaxguardError(
            f"{traces}: holds no trajectory: {counts['rejected']} records and {counts['files_rejected']} files were "
            f"rejected, see {REJECTS_FILE} there"
        )
    lap("convert")
    features = FeatureStore.create_or_open(store, guard.encoder.fingerprint, guard.encoder.dim)
    total = counts["trajectories"]
    with tqdm(desc="embed", unit="window", disable=not progress) as bar:
        embedded = embed(
            read_trajectories(traces),
            features,
            guard.encoder,
            thought=guard.config.data.thought,
            progress=lambda _stored, windows: bar.update(windows - bar.n),
        )
    lap("embed")
    decisions: Counter[str] = Counter()
    scored_count = step_count = nonfinite = 0
    steps, outcomes = _Writer(out / "steps.parquet", STEPS), _Writer(out / "trajectories.parquet", TRAJECTORIES)
    held: deque[Trajectory] = deque()  # read and not yet scored; both happen in the same order

    def reading() -> Iterator[Trajectory]:
        for trajectory in read_trajectories(traces):
            held.append(trajectory)
            yield trajectory

    watch = _ShiftWatch(calibration.hold_maxima)
    with tqdm(total=total, desc="score", unit="trajectory", disable=not progress) as bar:
        for scored in guard.score(reading(), features):
            watch(scored.max_fused)
            steps.add(step_rows(held.popleft(), scored))
            row = trajectory_row(scored)
            outcomes.add([row])
            decisions[row["decision"]] += 1
            scored_count += 1
            step_count += len(scored)
            nonfinite += int(np.isnan(scored.margin).sum())
            bar.update()
    for name, found in (("trajectories", scored_count), ("steps", step_count)):
        if counts[name] != found:
            raise JaxguardError(f"{traces}: manifest counts {counts[name]} {name}, {found} were read and scored")
    steps.finish()
    outcomes.finish()
    lap("score")
    counts |= {"scored": scored_count, "steps_scored": step_count, "nonfinite_steps": nonfinite}
    counts |= {"texts": embedded.unique, "texts_embedded": embedded.embedded}
    manifest: dict[str, Any] = {
        "counts": counts,
        "skipped_files": conversion["skipped_files"],
        "decisions": dict(sorted(decisions.items())),
        "seconds": seconds,
        "shift": {"log10_evidence": round(watch.evidence, 2), "alarm_at_trajectory": watch.alarm_at},
        "guard": {
            "weights": guard.weights,
            "encoder": guard.encoder.fingerprint.to_dict(),
            "fusion": calibration.fusion.fingerprint,
            "lambda_block": calibration.lambda_block,
            "lambda_hold": calibration.lambda_hold,
        },
        "versions": versions(),
    }
    partial = out / "manifest.partial"
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / "manifest.json")
    return ScoreReport(counts, manifest["decisions"], seconds, watch.alarm_at, conversion["skipped_files"])
