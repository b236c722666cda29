"""Peak memory of convert, embed and score at 1x and 10x of the same archive, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.stored_archive import untrained_guard
from jaxguard.traces.convert import convert

# VmHWM and not ru_maxrss: the latter still knows the process that this one was forked from.
PEAK = """
import sys
from pathlib import Path
from jaxguard.cli import main
status = main(sys.argv[1:])
line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmHWM"))
print(line.split()[1], file=sys.stderr)
sys.exit(status)
"""


def peak_mib(*arguments: str) -> float:
    """Peak resident memory of a `jaxguard` command, MiB."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) / 1024


def archive(path: Path, records: int) -> None:
    """OpenAI chat messages, every fourth text its own, so that the store grows with the archive too."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(records):
            messages: list[dict[str, object]] = [{"role": "user", "content": f"Look after parcel {i % 50}."}]
            for t in range(8):
                call = {"id": f"c{t}", "function": {"name": "track", "arguments": json.dumps({"parcel": i % 50})}}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                text = f"Parcel {i if t % 4 == 0 else t} is on its way. " * (3 + t)
                messages.append({"role": "tool", "tool_call_id": f"c{t}", "content": text})
            file.write(json.dumps({"messages": messages}) + "\n")


@pytest.fixture
def guard(tmp_path: Path) -> Path:
    return untrained_guard(tmp_path / "guard")


def test_peak_memory(benchmark, smoke: bool, say, tmp_path: Path, guard: Path) -> None:
    small, factors = (20, (1,)) if smoke else (1000, (1, 10))
    peaks: dict[str, list[float]] = {"convert": [], "embed": [], "score": []}
    for factor in factors:
        base = tmp_path / f"x{factor}"
        base.mkdir()
        archive(base / "traces.jsonl", small * factor)
        traces, store = str(base / "traces"), str(base / "store")
        peaks["convert"].append(peak_mib("convert", str(base / "traces.jsonl"), "--out", traces))
        peaks["embed"].append(peak_mib("embed", "--trajectories", traces, "--store", store, "--quiet"))
        peaks["score"].append(
            peak_mib("score", traces, "--guard", str(guard), "--out", str(base / "out"), "--store", store, "--quiet")
        )
    for name, found in peaks.items():
        benchmark.extra_info[name] = {f"peak_mib_{f}x": round(p) for f, p in zip(factors, found, strict=True)}
        shown = ", ".join(f"{p:.0f} MiB at {small * f:,}" for f, p in zip(factors, found, strict=True))
        say(f"peak memory of {name}: {shown} trajectories")
    benchmark.group = "peak memory; timed: convert"
    source = tmp_path / "x1" / "traces.jsonl"
    benchmark.pedantic(convert, (source, tmp_path / "again"), rounds=1 if smoke else 3)
    rate = source.stat().st_size / benchmark.stats.stats.median / 1e6
    say(f"convert: {rate:.1f} MB/s of JSONL on one core")
