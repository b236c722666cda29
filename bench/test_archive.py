"""`jaxguard score` from text to tables, every vector in the store: rate, memory, useful lanes, a billion's cost.

``JAXGUARD_BENCH_STEPS`` sets its steps, ``JAXGUARD_BENCH_COPIES`` how often the archive is there, under other ids:
1000000 and 10 take an hour and 10 GB of disk.
"""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest

from bench.measure import text
from bench.stored_archive import stored_archive, untrained_guard
from bench.test_memory import peak_mib
from jaxguard.features.encoder import load_encoder
from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.scoring.archive import score_archive
from jaxguard.world_model.packing import CHUNK, LANES, Block, Packer

BILLION = 1_000_000_000
NEW_TEXTS = 0.5  # a step, as in the archive: a quarter of the observations and of the actions


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_score_archive(benchmark, smoke: bool, say, tmp_path: Path) -> None:
    steps = 2_000 if smoke else int(os.environ.get("JAXGUARD_BENCH_STEPS", "200000"))
    guard = untrained_guard(tmp_path / "guard")
    copies = int(os.environ.get("JAXGUARD_BENCH_COPIES", "1"))
    archive, store, total = stored_archive(tmp_path, steps, guard, copies=copies)
    out = tmp_path / "out"
    arguments = ("score", str(archive), "--guard", str(guard), "--store", str(store), "--quiet", "--out")

    def run() -> tuple[float, float, float]:
        begin, before = time.perf_counter(), _cpu_s()
        peak = peak_mib(*arguments, str(out))
        return time.perf_counter() - begin, _cpu_s() - before, peak

    wall, cpu, peak = run()
    read, written = _size(archive), sum(_size(out / kind) for kind in ("steps", "trajectories", "top", "parts"))
    texts = len(FeatureStore.open(store))
    say(
        f"score, {total:,} steps from the store, {len(os.sched_getaffinity(0))} cores: {total / wall:,.0f} steps/s "
        f"with start and compilation, {read / wall / 1e6:.1f} MB/s of JSONL, peak memory {peak:,.0f} MiB"
    )
    benchmark.extra_info |= {"steps": total, "wall_s": wall, "cpu_s": cpu, "peak_mib": peak, "written": written}

    encoder, rng = load_encoder(), np.random.default_rng(0)
    sample = [text(rng, 80) for _ in range(32 if smoke else 512)]
    encoder.encode(sample[:32])
    begin, before = time.perf_counter(), time.process_time()
    encoder.encode(sample)
    per_text = (time.process_time() - before) / len(sample)
    benchmark.extra_info |= {"cpu_s_per_text": per_text, "texts_per_s": len(sample) / (time.perf_counter() - begin)}
    rows = [
        ("read, score and write", cpu / total * BILLION / 3600, "core hours"),
        (f"encode {NEW_TEXTS:g} new texts of 80 words a step", per_text * NEW_TEXTS * BILLION / 3600, "core hours"),
        ("JSONL read", read / total * BILLION / 1e12, "TB"),
        ("results written", written / total * BILLION / 1e9, "GB"),
        ("vectors stored", _size(store) / texts * NEW_TEXTS * BILLION / 1e12, "TB"),
        ("index of the vectors in memory", 24 * NEW_TEXTS * BILLION / 1e9, "GB a process"),
    ]
    for what, value, unit in rows:
        say(f"a billion steps: {what}: {value:,.1f} {unit}")

    packed = [0, 0]
    original = Packer.next_block

    def counted(packer: Packer) -> Block | None:
        block = original(packer)
        if block is not None:
            packed[0] += sum(piece.size for piece in block.pieces)
            packed[1] += CHUNK * LANES
        return block

    loaded = Guard.load(guard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Packer, "next_block", counted)
        benchmark.pedantic(
            lambda: score_archive(archive, loaded, tmp_path / "again", store=store, progress=False), rounds=1
        )
    assert packed[0] == total
    say(f"score: {packed[0] / packed[1]:.1%} of the computed steps are wanted")
    benchmark.group = "archive; timed: score in this process"
