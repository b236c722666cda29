"""What a scored archive holds: where alerts are, what to read first, and whether it looks like the calibration set.

The folder is read shard by shard (:mod:`jaxguard.evaluation.archive_folder`). What is kept does not grow with the
steps; of labelled trajectories it is four bytes each.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from jaxguard.evaluation.archive_folder import Results, ResultsError, Shard
from jaxguard.evaluation.archive_leads import Finalist, Lead, Leads, read_tools
from jaxguard.evaluation.plots import bins
from jaxguard.evaluation.tally import Tally
from jaxguard.types import Decision

NOT_GIVEN = "(not given)"
KEYS = ("service", "domain")
"""Metadata by which steps are broken down."""
MOST_REASONS = 1_000
"""Reasons of rejects that are told apart."""
PLACES = 60
"""Parts of the archive, of equal numbers of trajectories, over which alerts are followed."""

_SEVERITY = {decision.name: int(decision) for decision in Decision}


@dataclass(frozen=True)
class Drift:
    """Trajectories' maxima of the fused risk against those of the calibration set.

    Attributes:
        n: Trajectories of the archive.
        calibration_n: Those of the calibration set.
        distance: Largest difference of the two shares at or below a risk (two-sample Kolmogorov-Smirnov), in [0, 1];
            NaN without trajectories, as ``p_value``.
        p_value: Of that distance or a larger one between samples of one distribution.
        at: Risk at which the shares differ most; ``below`` are the two shares there, archive and calibration.
        curve: Shares at or below each calibration maximum: ``[K, 2]`` of calibration and archive.
        bins: Counts of the archive and of the calibration set, see :func:`~jaxguard.evaluation.plots.bins`.
        alerts: Shares of the archive's trajectories that are BLOCK, and HOLD or BLOCK.
        places: ``[P, 2]`` share of HOLD or BLOCK, and mean rank among the calibration maxima, along the archive.
        alarm_at: Trajectory at which the shift detector raised an alarm, None if it did not; ``alarm_place`` is its
            file and record.
        evidence: log10 of the shift detector's capital; None where no run has ended.
        files: By file: alerts, and mean and largest rank among the calibration maxima (0.5 on average without drift).
    """

    n: int
    calibration_n: int
    distance: float
    p_value: float
    at: float
    below: tuple[float, float]
    curve: NDArray[np.float64]
    bins: tuple[NDArray[np.int64], NDArray[np.int64]]
    alerts: tuple[float, float]
    places: NDArray[np.float64]
    alarm_at: int | None
    alarm_place: tuple[str, int] | None
    evidence: float | None
    files: Tally


@dataclass(frozen=True)
class Detection:
    """How decisions agree with the labels of those trajectories that have one."""

    unsafe: int
    safe: int
    sr: float
    fpr: float
    auroc: float


@dataclass
class Reason:
    """Rejects of one reason, numbers and quoted text aside."""

    count: int = 0
    example: str = ""
    places: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Archive:
    """A scored archive.

    Attributes:
        results: The folder.
        decisions: Trajectories by their worst decision.
        breakdowns: Steps by ``source`` (the format), ``tool``, ``service`` and ``domain``.
        leads: Trajectories to read first.
        drift: Against the calibration set.
        detection: None where nothing has a label.
        reasons: Of rejects, by what groups them; the most frequent first.
        other_reasons: Rejects of reasons beyond :data:`MOST_REASONS`.
        incomplete: Files of which not all shards are finished.
    """

    results: Results
    decisions: Mapping[str, int]
    breakdowns: Mapping[str, Tally]
    leads: list[Lead]
    drift: Drift
    detection: Detection | None
    reasons: Mapping[str, Reason]
    other_reasons: int
    incomplete: list[str]


def read_archive(folder: Path) -> Archive:
    """Reads a folder that scoring wrote.

    Raises:
        ResultsError: It is none, or damaged.
    """
    results = Results(folder)
    survey = _Survey(results)
    for shard in results.shards:
        survey.take(shard)
    reasons, other = _reasons(results)
    leads = survey.leads.chosen(results)
    return Archive(
        results, survey.decisions, survey.tallies, leads, survey.drift(), survey.detection(),
        reasons, other, _incomplete(results.shards),
    )  # fmt: skip


class _Survey:
    """Sums over shards."""

    def __init__(self, results: Results):
        self._results = results
        calibration = results.calibration
        # Rounded like the tables, so that equal scores are equal.
        self._maxima = np.asarray(calibration.hold_maxima, np.float32)
        distinct, count = np.unique(self._maxima, return_counts=True)
        # Those that are not finite are not listed, and count as larger than all.
        self._distinct = np.append(distinct, np.float32(np.inf))
        self._upto = np.append(np.cumsum(count), calibration.n)  # [K] calibration maxima at or below each distinct one
        self._below, self._at_most = (np.zeros(len(self._distinct) + 1, np.int64) for _ in range(2))
        self._bins = np.zeros(len(bins([])), np.int64)
        self._places = np.zeros((PLACES, 3))
        self._labelled: tuple[list[NDArray[np.float32]], list[NDArray[np.float32]]] = ([], [])
        self._right = [0, 0]
        self._alarm_place: tuple[str, int] | None = None
        self._seen = 0
        shift = results.manifest["shift"] if results.manifest and not results.unfinished else {}
        self._alarm_at, self._evidence = shift.get("alarm_at_trajectory"), shift.get("log10_evidence")
        self.decisions: Counter[str] = Counter()
        self.tallies = {name: Tally() for name in ("source", "tool", *KEYS)}
        self.files = Tally()
        self.leads = Leads()

    def take(self, shard: Shard) -> None:
        """Reads a shard's tables."""
        results, first = self._results, self._seen
        lengths: list[NDArray[np.int64]] = []
        names: dict[str, dict[str, int]] = {name: {} for name in ("source", *KEYS)}
        codes: dict[str, list[NDArray[np.int64]]] = {name: [] for name in names}
        finalists: list[Finalist] = []
        columns = ("trajectory_id", "file", "record", "source", "steps", "decision", "max_fused", "unsafe", "metadata")
        for batch in results.batches(shard, "trajectories", *columns):
            lengths.append(_array(batch, "steps").astype(np.int64))
            found = {"source": _encoded(batch, "source"), **_metadata(batch)}
            for name, (own, at) in found.items():
                place = names[name]
                codes[name].append(np.array([place.setdefault(text, len(place)) for text in own], np.int64)[at])
            finalists += self._trajectories(shard, batch, self._seen - first)
            self._seen += len(batch)
        starts = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *lengths]))])
        if starts[-1] != shard.counts["steps"]:
            raise ResultsError(
                f"{shard.path(results.folder, 'trajectories')}: has {starts[-1]} steps, expected "
                f"{shard.counts['steps']}"
            )
        owner = {
            name: np.repeat(np.concatenate([np.empty(0, np.int64), *own]), np.diff(starts))
            for name, own in codes.items()
        }
        for finalist in finalists:
            finalist.start = int(starts[finalist.row])
        done = 0
        for batch in results.batches(shard, "steps", "tool", "decision", "hazard"):
            stop = done + len(batch)
            decision, hazard = _decisions(batch), _array(batch, "hazard")
            own, tool = _encoded(batch, "tool")
            self.tallies["tool"].add(own, tool, decision, hazard)
            for name, of in owner.items():
                self.tallies[name].add(list(names[name]), of[done:stop], decision, hazard)
            read_tools(finalists, done, own, tool)
            done = stop
        self.leads.take(results, shard, finalists)

    def _trajectories(self, shard: Shard, batch: pa.RecordBatch, row: int) -> list[Finalist]:
        decision = _decisions(batch)
        fused = np.nan_to_num(_array(batch, "max_fused"), nan=np.inf, posinf=np.inf)
        for number, count in zip(*np.unique(decision, return_counts=True), strict=True):
            self.decisions[Decision(int(number)).name] += int(count)
        left, right = (np.searchsorted(self._distinct, fused, side) for side in ("left", "right"))
        size = len(self._distinct) + 1
        self._at_most += np.bincount(left, minlength=size)
        self._below += np.bincount(right, minlength=size)
        self._bins += bins(fused)
        upto = np.concatenate([[0], self._upto])
        rank = (upto[left] + upto[right]) / 2 / self._results.calibration.n
        place = (self._seen + np.arange(len(batch))) * PLACES // max(self._results.counts["trajectories"], 1)
        for column, weights in enumerate((np.ones(len(batch)), decision > Decision.PASS, rank)):
            self._places[:, column] += np.bincount(place, weights=weights, minlength=PLACES)
        files, at = _encoded(batch, "file")
        self.files.add(files, at, decision, rank)
        record = _array(batch, "record")
        if self._alarm_at is not None and 0 <= self._alarm_at - self._seen < len(batch):
            place = self._alarm_at - self._seen
            self._alarm_place = (files[at[place]], int(record[place]))
        labels = batch.column("unsafe")
        known = ~np.asarray(labels.is_null())
        unsafe = np.asarray(labels.fill_null(False))
        for which in (0, 1):
            members = known & (unsafe == bool(which))
            self._labelled[which].append(fused[members])
            self._right[which] += int((decision[members] > Decision.PASS).sum())
        return self.leads.wanted(shard, batch, decision, fused, self._seen, row)

    def drift(self) -> Drift:
        """Two-sample Kolmogorov-Smirnov: between two calibration maxima only the archive's share grows, so it differs
        most from that of the calibration set at one of them, or right below."""
        n, m = self._seen, self._results.calibration.n
        ours, theirs = np.cumsum(self._at_most)[:-1] / max(n, 1), self._upto / m
        ours = np.stack([ours, np.cumsum(self._below)[:-1] / max(n, 1)])  # at each maximum, and right below
        theirs = np.stack([theirs, np.concatenate([[0.0], theirs[:-1]])])
        gaps = np.abs(ours - theirs)
        side, worst = np.unravel_index(int(gaps.argmax()), gaps.shape)
        distance = float(gaps[side, worst]) if n else math.nan
        counts = self._places[:, :1]
        alarm = int(self._alarm_at) if self._alarm_at is not None else None
        blocked, held = self.decisions["BLOCK"], self.decisions["HOLD"]
        return Drift(
            n, m, distance, _ks_p_value(distance, n, m), float(self._distinct[worst]),
            (float(ours[side, worst]), float(theirs[side, worst])), np.c_[theirs[0], ours[0]],
            (self._bins, bins(self._maxima)), (blocked / max(n, 1), (blocked + held) / max(n, 1)),
            np.divide(self._places[:, 1:], counts, out=np.full((PLACES, 2), np.nan), where=counts > 0),
            alarm, self._alarm_place, self._evidence, self.files,
        )  # fmt: skip

    def detection(self) -> Detection | None:
        """Rates and AUROC over the labelled trajectories."""
        safe, unsafe = (np.concatenate([np.empty(0, np.float32), *own]) for own in self._labelled)
        if not len(safe) and not len(unsafe):
            return None
        safe.sort()
        wins = 0.0
        for first in range(0, len(unsafe), 1 << 20):  # a part at a time: each takes 16 bytes more
            part = unsafe[first : first + (1 << 20)]
            wins += sum(float(np.searchsorted(safe, part, side).sum()) for side in ("left", "right")) / 2
        share = [
            found / len(own) if len(own) else math.nan for found, own in zip(self._right, (safe, unsafe), strict=True)
        ]
        auroc = wins / len(safe) / len(unsafe) if len(safe) and len(unsafe) else math.nan
        return Detection(len(unsafe), len(safe), share[1], share[0], auroc)


def _ks_p_value(distance: float, n: int, m: int) -> float:
    if not math.isfinite(distance):
        return math.nan
    from scipy import stats  # takes a moment to import

    return float(stats.kstwo.sf(distance, max(round(n * m / (n + m)), 1)))


def _array(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    return np.asarray(batch.column(name))


def _encoded(batch: pa.RecordBatch, name: str) -> tuple[list[str], NDArray[np.int64]]:
    """Distinct values of a column, and which of them each row has."""
    column = batch.column(name)
    if not isinstance(column, pa.DictionaryArray):
        column = column.dictionary_encode()
    return column.dictionary.to_pylist(), np.asarray(column.indices).astype(np.int64)


def _decisions(batch: pa.RecordBatch) -> NDArray[np.int8]:
    names, codes = _encoded(batch, "decision")
    if unknown := [name for name in names if name not in _SEVERITY]:
        raise ResultsError(f"column decision: got {unknown[0]!r:.60}, expected one of {', '.join(_SEVERITY)}")
    return np.array([_SEVERITY[name] for name in names], np.int8)[codes]


def _metadata(batch: pa.RecordBatch) -> dict[str, tuple[list[str], NDArray[np.int64]]]:
    """As :func:`_encoded`, for each of :data:`KEYS`."""
    texts, codes = _encoded(batch, "metadata")
    found: list[Mapping[str, Any]] = []
    for text in texts:
        try:
            own = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"column metadata: {error}, expected JSON objects") from error
        found.append(own if isinstance(own, dict) else {})
    made = {}
    for key in KEYS:
        place: dict[str, int] = {}
        of = np.array([place.setdefault(_text(own.get(key)), len(place)) for own in found], np.int64)
        made[key] = (list(place), of[codes])
    return made


def _text(value: Any) -> str:
    if value is None or value == "":
        return NOT_GIVEN
    return value if isinstance(value, str) else json.dumps(value)


def _reasons(results: Results) -> tuple[dict[str, Reason], int]:
    found: dict[str, Reason] = {}
    total = other = 0
    for shard in results.shards:
        for file, position, reason in results.rejects(shard):
            total += 1
            # What is quoted and counted differs from record to record.
            kind = re.sub(r"\d+", "0", re.sub(r"'[^']*'|\"[^\"]*\"", "'…'", reason[:2_000]))[:300]
            if kind not in found and len(found) >= MOST_REASONS:
                other += 1
                continue
            own = found.setdefault(kind, Reason())
            own.count += 1
            if len(own.places) < 3:
                own.example = own.example or reason[:2_000]
                own.places.append(file[:300] if position is None else f"{file[:300]}, record {position}")
    if total != (expected := results.counts["rejected"] + results.counts["files_rejected"]):
        raise ResultsError(f"{results.folder / 'rejects'}: holds {total} rejects, expected {expected}")
    return dict(sorted(found.items(), key=lambda item: (-item[1].count, item[0]))), other


def _incomplete(shards: Sequence[Shard]) -> list[str]:
    numbers: dict[str, set[int]] = {}
    ends: dict[str, int] = {}
    files: dict[str, str] = {}
    for member in (member for shard in shards for member in shard.members):
        files[member.key] = member.file
        numbers.setdefault(member.key, set()).add(member.number)
        if member.last:
            ends[member.key] = member.number
    return [file for key, file in files.items() if numbers[key] != set(range(ends.get(key, -1) + 1))]
