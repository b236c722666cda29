"""A scored block as files: Parquet tables of steps and trajectories, the riskiest trajectories in full, rejects, and
the counts of each file where it holds several.

The bytes of a shard depend on the block, the guard and the versions at work alone.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxguard.decision.calibration import Calibration
from jaxguard.decision.scored import judge_steps
from jaxguard.results import Member, Shard
from jaxguard.scoring.blocks import COUNTS, Block, unique_ids
from jaxguard.traces.jsonl import encode_line
from jaxguard.types import Decision, JaxguardError

TOP_PER_SHARD = 20
"""Trajectories that a shard keeps with all their texts, under the ids of its tables: those with the most severe
decision, and among them with the highest fused risk."""

STEPS = pa.schema(
    [
        ("shard", pa.string()),
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
        ("shard", pa.string()),
        ("trajectory_id", pa.string()),
        ("file", pa.string()),
        ("record", pa.int32()),
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
_DECISIONS = np.array([decision.name for decision in sorted(Decision)])


def make_shard(block: Block, calibration: Calibration) -> tuple[dict[str, bytes], Shard]:
    """The files of a scored block by folder, and the record that says what they are.

    Raises:
        JaxguardError: A finite risk lies outside [0, 1].
    """
    assert block.risks is not None
    assert block.starts is not None
    items, starts = block.items, block.starts
    lengths = np.diff(starts)
    judged = judge_steps(
        [item.about.metadata for item in items], lengths, block.risks[:, 0], block.risks[:, 1], calibration
    )
    ids = unique_ids(items)

    ev = judged.evidence
    step = np.arange(len(judged.decision)) - np.repeat(starts[:-1], lengths)
    owner = np.repeat(np.arange(len(items)), lengths)
    columns = {
        "shard": _same(block.name, len(step)),
        "trajectory_id": pa.array(ids, pa.string()).take(pa.array(owner)),
        "step": step.astype(np.int32),
        "call_id": pa.array(block.call_ids, pa.string()),
        "tool": pa.array(block.tools, pa.string()),
        "decision": pa.array(_DECISIONS[judged.decision], pa.string()),
        "unobserved": pa.array(block.unobserved, pa.bool_()),
        "margin": judged.margin.astype(np.float32),
        **{name: getattr(ev, name).astype(np.float32) for name in ("hazard", "prefix", "ema", "win", "fused")},
    }
    steps = pa.table({name: columns[name] for name in STEPS.names}, schema=STEPS)

    alerts, blocks_at = judged.decision != Decision.PASS, judged.decision == Decision.BLOCK
    worst = _maxima(judged.decision.astype(np.float64), starts).astype(int)
    hazard, fused = _maxima(ev.hazard, starts), _maxima(ev.fused, starts)
    about = [item.about for item in items]
    outcomes = pa.table(
        {
            "shard": _same(block.name, len(items)),
            "trajectory_id": pa.array(ids, pa.string()),
            "file": pa.array([_text(item.file) for item in items], pa.string()),
            "record": pa.array([item.record for item in items], pa.int32()),
            "source": pa.array([own.source for own in about], pa.string()),
            "steps": lengths.astype(np.int32),
            "decision": pa.array(_DECISIONS[worst], pa.string()),
            "first_alert": pa.array(_first(alerts, starts), pa.int32()),
            "first_block": pa.array(_first(blocks_at, starts), pa.int32()),
            "max_hazard": hazard.astype(np.float32),
            "max_fused": fused.astype(np.float32),
            "unsafe": pa.array([own.unsafe for own in about], pa.bool_()),
            "first_hazard": pa.array([item.first_hazard for item in items], pa.int32()),
            "metadata": pa.array([item.metadata for item in items], pa.string()),
        },
        schema=TRAJECTORIES,
    )
    tallies = [Counter(own) for own in block.tallies]
    of_file = {member.file: own for member, own in zip(block.members, tallies, strict=True)}
    undecided = np.bincount(owner[np.isnan(judged.margin)], minlength=len(items))
    for item, own_id, number, missing in zip(items, ids, worst.tolist(), undecided.tolist(), strict=True):
        tally = of_file[item.file]
        tally["renamed_ids"] += own_id != item.about.id
        tally["nonfinite_steps"] += missing
        tally[f"decision:{Decision(number).name}"] += 1

    files = {"steps": parquet(steps), "trajectories": parquet(outcomes)}
    if top := _top(block, ids, worst, fused):
        files["top"] = top
    if block.rejects:
        lines = (
            json.dumps({"file": file, "position": position, "reason": reason}) + "\n"
            for file, position, reason in block.rejects
        )
        files["rejects"] = "".join(lines).encode()
    if len(block.members) > 1:
        files["files"] = file_lines(block.members, tallies)
    digests = {kind: hashlib.sha256(content).hexdigest() for kind, content in files.items()}
    return files, Shard(block.name, tuple(block.members), whole_counts(tallies), digests)


def file_lines(members: Sequence[Member], tallies: Sequence[Counter[str]]) -> bytes:
    """A line for each file of a shard: its name and what it adds to the counts."""
    return b"".join(
        (json.dumps({"file": member.file, "counts": {k: v for k, v in sorted(own.items()) if v}}) + "\n").encode()
        for member, own in zip(members, tallies, strict=True)
    )


def whole_counts(tallies: Sequence[Counter[str]]) -> Counter[str]:
    """Counts of a shard from those of its files; of :data:`COUNTS` also those that are 0."""
    counts = Counter(dict.fromkeys(COUNTS, 0))
    for own in tallies:
        counts.update({name: by for name, by in own.items() if by})
    return counts


def _same(text: str, count: int) -> pa.Array:
    return pa.repeat(pa.scalar(text, pa.string()), count)


def _text(name: str) -> str:
    return name.encode("utf-8", "replace").decode()  # a file name may be no UTF-8


def _maxima(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Of each trajectory: 0 without steps, infinity where one is not finite."""
    out = np.zeros(len(starts) - 1)
    some = np.flatnonzero(np.diff(starts))
    if len(some):
        out[some] = np.maximum.reduceat(np.where(np.isfinite(values), values, np.inf), starts[some])
    return out


def _first(flags: np.ndarray, starts: np.ndarray) -> list[int | None]:
    """First step of each trajectory that is flagged."""
    at = np.flatnonzero(flags)
    found = np.searchsorted(at, starts[:-1])
    return [
        int(at[index] - start) if index < len(at) and at[index] < end else None
        for index, start, end in zip(found.tolist(), starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def _top(block: Block, ids: list[str], worst: np.ndarray, fused: np.ndarray) -> bytes:
    lines = []
    for index in sorted(range(len(ids)), key=lambda i: (-worst[i], -fused[i], i))[:TOP_PER_SHARD]:
        if block.items[index].length:
            try:
                lines.append(encode_line(replace(block.kept(index), id=ids[index]))[0])
            except JaxguardError:
                continue  # too deep or too long for a line; its rows are there
    return b"".join(lines)


def parquet(table: pa.Table) -> bytes:
    """The bytes of a table's file."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
