"""Folders of results made by hand, as `jaxguard score` would write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxguard.decision.calibration import calibrate
from jaxguard.decision.evidence import FusionParams
from jaxguard.results import KINDS, LAYOUT
from jaxguard.scoring import shards
from jaxguard.traces.jsonl import encode_line
from jaxguard.types import Step, Trajectory

ENDS = KINDS


def made(
    folder: Path,
    *shards_of: Sequence[Mapping[str, Any]],
    alarm: int | None = None,
    rejects: Sequence[Mapping[str, Any]] = (),
    finished: bool = True,
    unread: Mapping[str, str] | None = None,
    maxima: Sequence[float] = tuple(np.linspace(0, 0.5, 99)),
) -> Path:
    """A folder of results by hand, a file a shard.

    A trajectory holds ``fused`` by step, and what else is not to be the default; ``text`` puts it among the texts.
    """
    for name in ("parts", *ENDS):
        (folder / name).mkdir(parents=True)
    calibration = calibrate(
        maxima, maxima, alpha_hold=0.1, alpha_block=0.05, fusion=FusionParams(), encoder="e", weights="w"
    ).to_json()
    (folder / "calibration.json").write_text(calibration)
    guard = {"jaxguard_scores": LAYOUT, "calibration": hashlib.sha256(calibration.encode()).hexdigest()[:32]}
    (folder / "job.json").write_text(json.dumps(guard))
    total: dict[str, int] = {}
    for number, of in enumerate(shards_of):
        own_rejects = list(rejects) if number == 0 else []
        part = write_shard(folder, f"{number:032x}", f"file {number}.jsonl", of, own_rejects)
        for name, count in part["counts"].items():
            total[name] = total.get(name, 0) + count
    manifest = {
        "counts": total,
        "files": {f"file {number}.jsonl": f"{number:032x}" for number in range(len(shards_of))},
        "unread_files": dict(unread or {}),
        "skipped_files": [],
        "shift": {"log10_evidence": 0.0 if alarm is None else 9.0, "alarm_at_trajectory": alarm},
        "guard": guard,
        "last_run": {"seconds": 1.5, "steps": 3},
    }
    if finished:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def write_shard(
    folder: Path, key: str, file: str, of: Sequence[Mapping[str, Any]], rejects: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    name = f"{key}-00000"
    outcomes, steps, top = [], [], []
    for i, own in enumerate(of):
        fused = own["fused"]
        tools = own.get("tools", ["look"] * len(fused))
        verdicts = ["BLOCK" if f > 0.9 else "HOLD" if not f <= 0.6 else "PASS" for f in fused]
        about = {
            "shard": name, "trajectory_id": own.get("id", f"t{i}"), "file": file, "record": i,
            "source": own.get("source", "chat"), "steps": len(fused),
            "decision": max(verdicts, key=["PASS", "HOLD", "BLOCK"].index, default="PASS"),
            "max_hazard": max(fused, default=0.0),
            "max_fused": np.inf if np.isnan(fused).any() else max(fused, default=0.0),
            "unsafe": own.get("unsafe"), "first_hazard": own.get("first_hazard"), "first_alert": None,
            "first_block": None, "metadata": json.dumps(own.get("metadata", {})),
        }  # fmt: skip
        outcomes.append(about)
        steps += [
            {"shard": name, "trajectory_id": about["trajectory_id"], "step": t, "call_id": f"c{t}", "tool": tools[t],
             **dict.fromkeys(("hazard", "prefix", "ema", "win", "fused", "margin"), f), "decision": verdicts[t],
             "unobserved": False}
            for t, f in enumerate(fused)
        ]  # fmt: skip
        if "text" in own:
            calls = tuple(Step(tool, {"n": t}, f"c{t}", own["text"]) for t, tool in enumerate(tools))
            top.append(encode_line(Trajectory(about["trajectory_id"], own["text"], calls))[0])
    pq.write_table(pa.Table.from_pylist(steps, shards.STEPS), folder / "steps" / f"{name}.parquet")
    pq.write_table(pa.Table.from_pylist(outcomes, shards.TRAJECTORIES), folder / "trajectories" / f"{name}.parquet")
    kinds = ["steps", "trajectories"]
    for kind, content in (
        ("top", b"".join(top)),
        ("rejects", "".join(json.dumps(own) + "\n" for own in rejects).encode()),
    ):
        if content:
            (folder / kind / f"{name}.jsonl").write_bytes(content)
            kinds.append(kind)
    counts = {"records": len(of) + len(rejects), "converted": len(of), "rejected": len(rejects), "files_rejected": 0,
              "trajectories": len(of), "steps": len(steps)}  # fmt: skip
    digests = {k: hashlib.sha256((folder / k / f"{name}{ENDS[k]}").read_bytes()).hexdigest() for k in kinds}
    member = {"key": key, "number": 0, "last": True, "file": file}
    part = {"shard": name, "members": [member], "counts": counts, "sha256": digests, "replaces": ""}
    (folder / "parts" / f"{name}.json").write_text(json.dumps(part))
    return part


def quiet(count: int = 20) -> list[dict[str, Any]]:
    return [{"fused": [0.5 * i / count]} for i in range(count)]
