"""Which trajectories of a scored archive to read first, and what to show of them.

Those with the most severe decision, and among them the highest fused risk. Of one instruction :data:`EACH` come first,
so that one template does not fill the list; what room is left goes to its other alerts before any PASS.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jaxguard.decision.scored import ScoredTrajectory
from jaxguard.evaluation.archive_folder import COLUMNS, Results, ResultsError, Shard
from jaxguard.evaluation.wording import arguments, clip
from jaxguard.types import Decision, Trajectory

SHOWN = 20
EACH = 2
"""Trajectories of one group that come before those of others."""
PER_SHARD = 50
"""Riskiest trajectories of each shard among which those shown are chosen."""
GROUPS = 400
"""Groups (one instruction or sequence of tools each) that are kept while shards are read, the riskiest."""
MOST_STEPS = 60
"""Steps of a timeline."""
AROUND = 2
"""Steps before and after the riskiest that are shown with their texts."""
_TOOLS_COMPARED = 50
_TEXTS = ("tool", "decision")


@dataclass(frozen=True)
class LeadStep:
    """A step near the riskiest one; texts are clipped, ``None`` where the folder does not hold them."""

    number: int
    tool: str
    arguments: str | None
    observation: str | None
    hazard: float
    fused: float
    decision: str


@dataclass(frozen=True)
class Lead:
    """A trajectory to read.

    Attributes:
        id: Its id in the tables, clipped, like all other text here.
        file: The file it is from, and its ``record`` there.
        source: Its format.
        decision: The worst of its steps.
        max_fused: Infinity where a score is not finite.
        instruction: None where the folder does not hold its texts.
        steps: How many it has.
        peak: Number of the riskiest: of the most severe decision, the highest fused risk.
        first: Number of the step that ``scores`` starts with.
        scores: The steps around the riskiest one, which ``tools`` names.
        near: Those nearest to it, with texts.
        more: Others of its instruction, or without texts of its tools, that are not shown, at least so many.
    """

    id: str
    file: str
    record: int
    source: str
    decision: str
    max_fused: float
    instruction: str | None
    steps: int
    peak: int
    first: int
    scores: ScoredTrajectory
    tools: list[str]
    near: list[LeadStep]
    more: int = 0


@dataclass
class Finalist:
    """A candidate: where it is, and what it is compared by."""

    rank: tuple[float, float, int]
    shard: Shard
    row: int
    id_digest: bytes
    length: int
    start: int = 0
    tools: hashlib._Hash = field(default_factory=hashlib.sha256)
    group: bytes = b""

    @property
    def alert(self) -> bool:
        """Whether a step of it is HOLD or BLOCK."""
        return self.rank[0] < -Decision.PASS


@dataclass
class _Group:
    """Trajectories of one instruction, numbers aside; of one sequence of tools, where the texts are not there."""

    best: list[Finalist] = field(default_factory=list)
    count: int = 0


class Leads:
    """Finds the candidates in one pass."""

    def __init__(self) -> None:
        self._groups: dict[bytes, _Group] = {}
        self._least: tuple[float, float, int] | None = None  # rank that a trajectory must be before, to make a group

    def wanted(
        self,
        shard: Shard,
        batch: pa.RecordBatch,
        decision: NDArray[np.int8],
        fused: NDArray[np.float32],
        seen: int,
        row: int,
    ) -> list[Finalist]:
        """Trajectories of a batch that may be among the candidates.

        Args:
            shard: Where the batch is from.
            batch: With ``trajectory_id`` and ``steps``.
            decision: Of each trajectory.
            fused: Its maximum.
            seen: Trajectories before this batch; of equal ones the first is taken.
            row: The batch's first row in the shard.
        """
        lengths = np.asarray(batch.column("steps"))
        high = np.nan_to_num(fused.astype(np.float64), nan=np.inf, posinf=np.inf)
        fit = lengths > 0
        if self._least is not None:
            severity, risk, _ = self._least
            fit &= (-decision.astype(float) < severity) | ((-decision == severity) & (-high < risk))
        rows = np.flatnonzero(fit)
        order = rows[np.lexsort((rows, -high[rows], -decision[rows].astype(float)))][:PER_SHARD]
        ids = batch.column("trajectory_id")
        return [
            Finalist(
                (-float(decision[i]), -float(high[i]), seen + i),
                shard,
                row + i,
                _digest(ids[i].as_py()),
                int(lengths[i]),
            )
            for i in order.tolist()
        ]

    def take(self, results: Results, shard: Shard, finalists: Sequence[Finalist]) -> None:
        """Takes up those of a shard, once their tools are known.

        Raises:
            ResultsError: The texts that it keeps are missing or damaged.
        """
        if not finalists:
            return
        instructions = {_digest(own.id): _digest(_template(own.instruction)) for own in results.top(shard)}
        for own in sorted(finalists, key=_rank)[:PER_SHARD]:
            own.group = instructions.get(own.id_digest, own.tools.digest())
            group = self._groups.setdefault(own.group, _Group())
            group.best = sorted([*group.best, own], key=_rank)[:SHOWN]
            group.count += 1
        if len(self._groups) > GROUPS:
            kept = sorted(self._groups.items(), key=lambda item: item[1].best[0].rank)[:GROUPS]
            self._groups, self._least = dict(kept), kept[-1][1].best[0].rank

    def chosen(self, results: Results) -> list[Lead]:
        """The trajectories to show, the riskiest first.

        Raises:
            ResultsError: A file is missing or damaged.
        """
        alike: Counter[bytes] = Counter()  # by sequence of tools: how many of those come first
        placed: Counter[bytes] = Counter()
        varied, others = [], []
        for own in sorted((own for group in self._groups.values() for own in group.best), key=_rank):
            tools = own.tools.digest()
            untold = own.group == tools and own.group not in placed and alike[tools] >= EACH  # no text tells it apart
            if untold or placed[own.group] >= EACH:
                others.append(own)
            else:
                varied.append(own)
                placed[own.group] += 1
                alike[tools] += 1
        alerts = [own for part in (varied, others) for own in part if own.alert]
        shown = sorted([*alerts, *(own for own in varied if not own.alert)][:SHOWN], key=_rank)
        more = Counter({name: group.count for name, group in self._groups.items()})
        more.subtract(own.group for own in shown)
        return [replace(_lead(results, own), more=more.pop(own.group, 0)) for own in shown]


def _rank(own: Finalist) -> tuple[float, float, int]:
    return own.rank


def read_tools(finalists: Sequence[Finalist], at: int, names: Sequence[str], codes: NDArray[np.int64]) -> None:
    """Takes note of the tools of a shard's finalists.

    Args:
        finalists: With their ``start``.
        at: The shard's step with which ``codes`` starts.
        names: ``[K]`` names of tools.
        codes: ``[N]`` index of each step's tool.
    """
    for own in finalists:
        first, stop = max(own.start, at), min(own.start + min(own.length, _TOOLS_COMPARED), at + len(codes))
        for code in codes[max(first - at, 0) : max(stop - at, 0)].tolist():
            own.tools.update(_digest(names[code]))


def _template(instruction: str) -> str:
    """An instruction without what differs between those made from one template."""
    return re.sub(r"\d+", "0", " ".join(instruction.casefold().split()))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _lead(results: Results, own: Finalist) -> Lead:
    row = _rows(results, own.shard, "trajectories", own.row, 1).to_pylist()[0]
    table = _rows(results, own.shard, "steps", own.start, own.length)
    values = {name: table[name].to_numpy().astype(np.float64) for name in COLUMNS["steps"] if name not in _TEXTS}
    decision = np.array([Decision[name] for name in table["decision"].to_pylist()], np.int8)
    fused = np.nan_to_num(values["fused"], nan=np.inf, posinf=np.inf)
    peak = int(np.lexsort((np.arange(len(fused)), -fused, -decision.astype(float)))[0])
    first = max(0, min(peak - 2 * MOST_STEPS // 3, own.length - MOST_STEPS))
    part = slice(first, first + MOST_STEPS)
    tools = [clip(name, 200) for name in table["tool"][part].to_pylist()]
    text = next((found for found in results.top(own.shard) if _digest(found.id) == own.id_digest), None)
    if text is not None and len(text) != own.length:
        raise ResultsError(
            f"{own.shard.path(results.folder, 'top')}: {clip(text.id, 60)} has {len(text)} steps, expected {own.length}"
        )
    hazard = row["first_hazard"]
    cuts = results.calibration.for_metadata(json.loads(row["metadata"]))
    scores = ScoredTrajectory(
        id=clip(row["trajectory_id"], 200),
        group="",
        unsafe=row["unsafe"],
        first_hazard=hazard - first if hazard is not None and first <= hazard < first + MOST_STEPS else None,
        timing=False,
        source=clip(row["source"], 60),
        decision=decision[part],
        lambda_block=cuts.block,
        lambda_hold=cuts.hold,
        **{name: value[part] for name, value in values.items()},
    )
    near = [
        _step(t, tools[t - first], text, scores, first)
        for t in range(max(0, peak - AROUND), min(own.length, peak + AROUND + 1))
    ]
    return Lead(
        scores.id,
        clip(row["file"], 200),
        row["record"],
        scores.source,
        row["decision"],
        float(row["max_fused"]),
        None if text is None else clip(text.instruction, 400),
        own.length,
        peak,
        first,
        scores,
        tools,
        near,
    )


def _step(number: int, tool: str, text: Trajectory | None, scores: ScoredTrajectory, first: int) -> LeadStep:
    step = None if text is None else text.steps[number]
    return LeadStep(
        number,
        tool,
        None if step is None else arguments(step.arguments, step.raw_arguments, 240),
        None if step is None else clip(step.observation, 240),
        float(scores.hazard[number - first]),
        float(scores.fused[number - first]),
        Decision(int(scores.decision[number - first])).name,
    )


def _rows(results: Results, shard: Shard, kind: str, start: int, count: int) -> pa.Table:
    """``count`` rows of a table from ``start`` on."""
    found, at = [], 0
    for batch in results.batches(shard, kind, *COLUMNS[kind]):
        first, stop = max(start, at), min(start + count, at + len(batch))
        if first < stop:
            found.append(batch.slice(first - at, stop - first))
        at += len(batch)
    return pa.Table.from_batches(found)
