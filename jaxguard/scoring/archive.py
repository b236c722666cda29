"""Scores an archive of traces into Parquet: one row per step, one per trajectory, and a manifest.

A run may be stopped at any moment and started again: what is finished stays, byte for byte, and the rest follows. What
is finished is known by the content of the input files, so that one that was edited is scored again, and one that was
renamed, moved or copied is not.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet as pq
from tqdm import tqdm

from jaxguard.decision.shift import ShiftWatch
from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.results import MANIFEST
from jaxguard.scoring.blocks import COUNTS
from jaxguard.scoring.job import Job, JobError, Tidied, identity, write_whole
from jaxguard.scoring.pipeline import Done, Progress, Run, batches
from jaxguard.scoring.places import address_of, require_apart, require_same_archive
from jaxguard.traces.lock import locked
from jaxguard.traces.registry import Reader, reader_named
from jaxguard.traces.sources import Source, find_sources
from jaxguard.types import Decision, JaxguardError
from jaxguard.versions import versions


@dataclass(frozen=True)
class ScoreReport:
    """What the folder of results holds after a run.

    Attributes:
        counts: Over all results in the folder: ``records == converted + rejected``; ``trajectories`` and ``steps`` are
            the rows of the two tables.
        decisions: Trajectories by their worst decision.
        seconds: Wall time of this run.
        run: Of this run alone: ``steps`` and ``shards`` scored, ``texts_embedded``, XLA programs ``compiled``, files
            ``superseded`` and ``kept`` (:class:`jaxguard.scoring.job.Tidied`).
        shift_at: Trajectory at which the archive no longer looked like the calibration set, if it came to that
            (:mod:`jaxguard.decision.shift`).
        skipped_files: What of the archive was not looked into.
        unread_files: Files that could not be read, with the reason; another run tries them again.
    """

    counts: dict[str, int]
    decisions: dict[str, int]
    seconds: float
    run: dict[str, int]
    shift_at: int | None
    skipped_files: list[str]
    unread_files: dict[str, str]


class _Bar(Progress):
    """Bytes of the archive that are scored and written, with steps a second."""

    def __init__(self, sources: list[Source], show: bool):
        self._lock = threading.Lock()
        total = sum(source.size for source in sources)
        self._bar = tqdm(total=total, desc="score", unit="B", unit_scale=True, disable=not show)
        self._begin = time.perf_counter()
        self.steps = self.windows = 0

    def passed(self, size: int) -> None:
        with self._lock:
            self._bar.update(size)

    def embedded(self, windows: int) -> None:
        with self._lock:
            self.windows += windows
            self._show()

    def written(self, steps: int) -> None:
        with self._lock:
            self.steps += steps
            self._show()

    def _show(self) -> None:
        passed = max(time.perf_counter() - self._begin, 1e-9)
        rates = f"{self.steps:,} steps, {self.steps / passed:,.0f}/s"
        self._bar.set_postfix_str(rates + (f", {self.windows:,} windows embedded" if self.windows else ""))

    def close(self) -> None:
        self._bar.close()


class Engine(Protocol):
    """What scores the files of an archive: :func:`score_here`, or many processes.

    Called with the files, the guard, its feature store, the folder's job, the reader of every record or ``None``, and
    what is told about the progress. When it returns, ``job`` knows every shard.
    """

    def __call__(
        self,
        sources: list[Source],
        guard: Guard,
        store: FeatureStore,
        job: Job,
        forced: Reader | None,
        progress: Progress,
    ) -> Done: ...


def score_here(
    sources: list[Source], guard: Guard, store: FeatureStore, job: Job, forced: Reader | None, progress: Progress
) -> Done:
    """Scores in this process."""
    run = Run(batches(sources), guard, store, job, forced, progress)
    run()
    return run.done


def score_archive(
    archive: str | os.PathLike[str],
    guard: Guard,
    out: Path,
    *,
    store: Path | None = None,
    bundle: Path | None = None,
    format: str | None = None,
    progress: bool = True,
    engine: Engine = score_here,
) -> ScoreReport:
    """Scores everything in ``archive``.

    Args:
        archive: A file, a folder, a glob or an address, see :func:`jaxguard.traces.sources.find_sources`.
        guard: A calibrated guard.
        out: Folder of results, see :mod:`jaxguard.scoring.job`; made if absent. What an earlier run with the same
            guard and settings finished there is kept and not scored again.
        store: Feature store to use and extend; ``out/features`` by default.
        bundle: Folder of the guard, in which nothing may be written.
        format: Name of the format; detected where it is None.
        progress: Shows a bar on stderr.
        engine: Where the work is done: in this process, or in many (:class:`jaxguard.scoring.ray_engine.RayEngine`).

    Raises:
        JaxguardError: nothing to read, no trajectory in it, a store of another encoder, archive, output, store and
            guard in one another's places (:mod:`jaxguard.scoring.places`), an uncalibrated guard, ``out`` holds
            results of another job or archive, or damaged ones, the disk is full, or another process writes there.
    """
    wanted = identity(guard, format)
    features = out / "features" if store is None else store
    require_apart(archive, out, store, bundle)
    forced = None if format is None else reader_named(format)
    sources, skipped = find_sources(archive, out)
    begin = time.perf_counter()
    with locked(out):
        address = address_of(archive)
        job = Job(out, wanted, address)
        require_same_archive(job, address, sources)
        assert guard.calibration is not None
        job.keep_calibration(guard.calibration.to_json())
        bar = _Bar(sources, progress)
        opened = FeatureStore.create_or_open(features, guard.encoder.fingerprint, guard.encoder.dim)
        try:
            done = engine(sources, guard, opened, job, forced, bar)
            tidied = job.tidy(done.keys)
        finally:
            bar.close()
        return _finish(archive, job, guard, done, tidied, sources, skipped, round(time.perf_counter() - begin, 3))


def _finish(
    archive: str | os.PathLike[str],
    job: Job,
    guard: Guard,
    done: Done,
    tidied: Tidied,
    sources: list[Source],
    skipped: list[str],
    seconds: float,
) -> ScoreReport:
    if unfinished := [name for name, key in done.keys.items() if not job.is_done(key)]:
        raise JobError(f"{job.folder}: {unfinished[0]} was read, but not all of its shards are there; run again")
    job.clear_unfinished()
    total = job.counts()
    counts = {name: total[name] for name in COUNTS}
    counts["files"] = len(sources) + tidied.kept
    counts["files_rejected"] += len(done.unread)
    _require_rows(job, counts)
    formats = {name.partition(":")[2]: by for name, by in sorted(total.items()) if name.startswith("format:")}
    decisions = {d.name: total[f"decision:{d.name}"] for d in Decision if total[f"decision:{d.name}"]}
    run = {
        **{name: done.counts[name] for name in ("steps", "shards", "texts", "texts_embedded", "compiled")},
        "superseded": tidied.superseded,
        "kept": tidied.kept,
    }
    unread = dict(sorted(done.unread.items()))
    watch = watch_shift(job, guard)
    manifest: dict[str, Any] = {
        "counts": counts,
        "formats": formats,
        "decisions": decisions,
        "files": dict(sorted(done.keys.items())),
        "unread_files": unread,
        "skipped_files": skipped,
        "shift": {"log10_evidence": round(watch.evidence, 2), "alarm_at_trajectory": watch.alarm_at},
        "guard": json.loads((job.folder / "job.json").read_text(encoding="utf-8")),
        "last_run": {"seconds": seconds, **run, "versions": versions()},
    }
    write_whole(job.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
    if not counts["trajectories"] and (counts["rejected"] or counts["files_rejected"]):
        first = next((f"{name}: {reason}" for name, reason in unread.items()), "") or _first_reject(job)
        raise JaxguardError(
            f"{archive}: nothing could be scored: {counts['rejected']} records and {counts['files_rejected']} files "
            f"were rejected (reasons in {job.folder / 'rejects'}); the first: {first}"
        )
    return ScoreReport(counts, decisions, seconds, run, watch.alarm_at, skipped, unread)


def _require_rows(job: Job, counts: dict[str, int]) -> None:
    """Rows of the tables as they lie on disk against what was counted when records were read."""
    if counts["records"] != counts["converted"] + counts["rejected"]:
        raise JobError(f"{job.folder}: {counts['records']} records, {counts['converted']} + {counts['rejected']} out")
    for kind in ("steps", "trajectories"):
        rows = sum(pq.read_metadata(path).num_rows for path in (job.folder / kind).iterdir())
        if rows != counts[kind]:
            raise JobError(f"{job.folder / kind}: holds {rows} rows, {counts[kind]} {kind} were read")


def _first_reject(job: Job) -> str:
    for path in sorted((job.folder / "rejects").iterdir()):
        with path.open(encoding="utf-8") as lines:
            first = json.loads(next(lines))
        place = first["file"] if first["position"] is None else f"{first['file']}, record {first['position']}"
        return f"{place}: {first['reason']}"
    return "unknown"


def watch_shift(job: Job, guard: Guard) -> ShiftWatch:
    """The shift detector over all trajectories of the folder, file after file in the order of their names."""
    assert guard.calibration is not None
    watch = ShiftWatch(guard.calibration.hold_maxima)
    for shard in sorted(job.parts.values(), key=lambda shard: shard.place):
        table = pq.read_table(shard.path(job.folder, "trajectories"), columns=["max_fused"])
        for value in table["max_fused"].to_pylist():
            watch(value)
    return watch
