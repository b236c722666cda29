"""Time and peak memory of the report of an archive with ten million steps, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.test_memory import peak_mib
from jaxguard.decision.calibration import calibrate
from jaxguard.decision.evidence import FusionParams
from jaxguard.results import KINDS, LAYOUT
from jaxguard.scoring.blocks import COUNTS, STEPS_PER_BLOCK
from jaxguard.scoring.shards import STEPS, TOP_PER_SHARD, TRAJECTORIES
from jaxguard.traces.jsonl import encode_line
from jaxguard.types import Step, Trajectory

HOLD, BLOCK = 0.9, 0.95
DECISIONS = pa.array(["PASS", "HOLD", "BLOCK"])


def results(folder: Path, steps: int, tools: int, per_shard: int = STEPS_PER_BLOCK) -> None:
    """A folder as scoring writes it, with ``tools`` distinct names of tools and trajectories of 1 to 19 steps."""
    for name in ("parts", *KINDS):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    maxima = rng.beta(1, 6, 500)
    calibration = calibrate(
        maxima, maxima, alpha_hold=0.1, alpha_block=0.05, fusion=FusionParams(), encoder="bench", weights="bench"
    )
    text = calibration.to_json()
    (folder / "calibration.json").write_text(text)
    job = {"jaxguard_scores": LAYOUT, "calibration": hashlib.sha256(text.encode()).hexdigest()[:32]}
    (folder / "job.json").write_text(json.dumps(job))
    total = dict.fromkeys(COUNTS, 0)
    names = pa.array([f"tool_{i}" for i in range(tools)])
    for counts in _shards(folder, steps, per_shard, names, rng):
        for name, count in counts.items():
            total[name] += count
    manifest = {
        "counts": {**total, "files": 1},
        "files": {"a.jsonl": "0" * 32},
        "unread_files": {},
        "skipped_files": [],
        "shift": {"log10_evidence": 0.4, "alarm_at_trajectory": None},
        "guard": job,
        "last_run": {"seconds": 1.0, "steps": steps},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _shards(
    folder: Path, steps: int, per_shard: int, names: pa.Array, rng: np.random.Generator
) -> Iterator[dict[str, int]]:
    for number, first in enumerate(range(0, steps, per_shard)):
        n = min(per_shard, steps - first)
        ends = np.unique(np.append(np.cumsum(rng.integers(1, 20, n)).clip(max=n), n))
        lengths = np.diff(ends, prepend=0)
        m = len(lengths)
        starts = ends - lengths
        risk = {name: rng.beta(0.3, 8, n).astype(np.float32) for name in ("hazard", "prefix", "ema", "win", "fused")}
        decision = np.where(risk["hazard"] > 0.5, 2, np.where(risk["fused"] > 0.4, 1, 0))
        worst = np.maximum.reduceat(decision, starts)
        ids = pa.array([f"trajectory-{number}-{i}" for i in range(m)])
        name = f"{'0' * 32}-{number:05d}"
        made = {
            "shard": pa.repeat(pa.scalar(name), n),
            "trajectory_id": ids.take(pa.array(np.repeat(np.arange(m), lengths))),
            "step": (np.arange(n) - np.repeat(starts, lengths)).astype(np.int32),
            "call_id": pa.array([f"call_{i}" for i in range(n)]),
            "tool": names.take(pa.array(rng.integers(0, len(names), n))),
            **risk,
            "decision": DECISIONS.take(pa.array(decision)),
            "margin": risk["fused"],
            "unobserved": np.zeros(n, bool),
        }
        unsafe = rng.random(m) < 0.5
        metadata = [
            json.dumps({"domain": f"domain {i % 9}", "final_reply": "all done, " * 20, "service": f"s{i % 40}", "n": i})
            for i in range(m)
        ]
        outcomes = {
            "shard": pa.repeat(pa.scalar(name), m),
            "trajectory_id": ids,
            "file": pa.repeat(pa.scalar("a.jsonl"), m),
            "record": np.arange(m, dtype=np.int32),
            "source": pa.repeat(pa.scalar("openai_chat"), m),
            "steps": lengths.astype(np.int32),
            "decision": DECISIONS.take(pa.array(worst)),
            "first_alert": pa.nulls(m, pa.int32()),
            "first_block": pa.nulls(m, pa.int32()),
            "max_hazard": np.maximum.reduceat(risk["hazard"], starts),
            "max_fused": np.maximum.reduceat(risk["fused"], starts),
            "unsafe": pa.array(unsafe, mask=rng.random(m) < 0.2),
            "first_hazard": pa.nulls(m, pa.int32()),
            "metadata": pa.array(metadata),
        }
        digests = {}
        for kind, schema, columns in (("steps", STEPS, made), ("trajectories", TRAJECTORIES, outcomes)):
            path = folder / kind / f"{name}.parquet"
            pq.write_table(
                pa.table({own: columns[own] for own in schema.names}, schema=schema), path, compression="zstd"
            )
            digests[kind] = path
        order = np.lexsort((np.arange(m), -outcomes["max_fused"], -worst))[:TOP_PER_SHARD]
        digests["top"] = folder / "top" / f"{name}.jsonl"
        digests["top"].write_bytes(
            b"".join(
                encode_line(
                    Trajectory(
                        ids[int(i)].as_py(),
                        f"Do task {i}, " + "with great care " * 20,
                        tuple(Step("t", {}, f"c{t}", "seen " * 200) for t in range(lengths[i])),
                    )
                )[0]
                for i in order
            )
        )
        counts = {
            **dict.fromkeys(COUNTS, 0),
            **dict.fromkeys(("records", "converted", "trajectories"), m),
            "steps": n,
        }
        part = {
            "shard": name,
            "members": [{"key": "0" * 32, "number": number, "last": first + n == steps, "file": "a.jsonl"}],
            "counts": counts,
            "sha256": {kind: hashlib.sha256(path.read_bytes()).hexdigest() for kind, path in digests.items()},
            "replaces": "",
        }
        (folder / "parts" / f"{name}.json").write_text(json.dumps(part))
        yield counts


@pytest.mark.parametrize("tools", [100, 1_000_000])
def test_report(benchmark, smoke: bool, say, tmp_path: Path, tools: int) -> None:
    """Distinct tools by the million are what a hostile archive may hold."""
    steps = 40_000 if smoke else 10_000_000
    folder = tmp_path / "results"
    results(folder, steps, tools)

    def report() -> tuple[float, float]:
        begin = time.perf_counter()
        peak = peak_mib("report", str(folder))
        return time.perf_counter() - begin, peak

    benchmark.group = "archive report"
    seconds, peak = benchmark.pedantic(report, rounds=1)
    benchmark.extra_info["peak_mib"] = round(peak)
    say(f"report of {steps:,} steps with up to {tools:,} tools: {seconds:.1f} s, {peak:.0f} MiB")
