"""The folder that `jaxguard score` wrote, opened for reading: what it was made with, and its shards one at a time.

Only JSON and Parquet files of the folder are read. Each shard's files are compared with the digests that its record
holds, so that a damaged file is named instead of counted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxguard.decision.calibration import Calibration
from jaxguard.results import CALIBRATION, LAYOUT, MANIFEST, PARTS, ResultsError, Shard, read_object, read_shard
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.sources import RESULTS_FILE
from jaxguard.types import Trajectory

COLUMNS: Mapping[str, Mapping[str, pa.DataType]] = {
    "steps": {
        "tool": pa.string(),
        "decision": pa.string(),
        **{name: pa.float32() for name in ("hazard", "prefix", "ema", "win", "fused", "margin")},
    },
    "trajectories": {
        **{name: pa.string() for name in ("trajectory_id", "file", "source", "decision", "metadata")},
        **{name: pa.int32() for name in ("record", "steps", "first_hazard")},
        **{name: pa.float32() for name in ("max_hazard", "max_fused")},
        "unsafe": pa.bool_(),
    },
}
"""What is read of the tables."""
ROWS = {"steps": 65_536, "trajectories": 8_192}
"""Rows of a table that are held at once; metadata may be long."""
_REPEATED = {"steps": ["tool", "decision"], "trajectories": ["file", "source", "decision"]}
_MAY_BE_EMPTY = frozenset({"unsafe", "first_hazard"})


class Results:
    """A folder of results.

    Attributes:
        job: What it was made with (``job.json``).
        calibration: The guard's.
        shards: In the order in which scoring watches for a shift: by their first file, and the piece of it.
        counts: Sums over the shards.
        manifest: Of the last run that ended; None where none did.
        unfinished: Why the folder does not hold everything; ``""`` where it does.

    Raises:
        ResultsError: There is no such folder, nothing finished in it, or a file is missing or is not what scoring
            writes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if not (folder / RESULTS_FILE).is_file():
            raise ResultsError(f"{folder}: no {RESULTS_FILE} there, expected a folder that `jaxguard score` wrote")
        self.job = read_object(folder / RESULTS_FILE)
        if self.job.get("jaxguard_scores") != LAYOUT:
            raise ResultsError(
                f"{folder / RESULTS_FILE}: jaxguard_scores is {str(self.job.get('jaxguard_scores'))[:40]}, expected "
                f"{LAYOUT}: another version, or not written by `jaxguard score`"
            )
        self.calibration = self._calibration()
        found = [read_shard(path) for path in (folder / PARTS).glob("*.json")]
        replaced = {shard.replaces for shard in found}  # a run was killed before it moved them away
        self.shards = sorted((own for own in found if own.name not in replaced), key=lambda shard: shard.place)
        self.counts: Counter[str] = Counter()
        for shard in self.shards:
            self.counts.update(shard.counts)
        self.manifest = self._manifest()
        if self.manifest is None and not self.shards:
            raise ResultsError(f"{folder}: scoring has not finished a shard yet, there is nothing to report")
        if (records := self.counts["records"]) != self.counts["converted"] + self.counts["rejected"]:
            raise ResultsError(
                f"{folder / 'parts'}: {records} records, expected {self.counts['converted']} converted + "
                f"{self.counts['rejected']} rejected"
            )
        self.unfinished = self._unfinished()

    def _calibration(self) -> Calibration:
        path = self.folder / CALIBRATION
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ResultsError(
                f"{path}: is not there; the same `jaxguard score` command adds it and scores nothing again"
            ) from None
        except ValueError as error:
            raise ResultsError(f"{path}: {error}, expected what `jaxguard score` wrote") from error
        if hashlib.sha256(text.encode()).hexdigest()[:32] != self.job.get("calibration"):
            raise ResultsError(f"{path}: is not the calibration that {RESULTS_FILE} names")
        return Calibration.from_json(text)

    def _manifest(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        if not path.exists():
            return None
        found = read_object(path)
        if found.get("guard") != self.job:
            raise ResultsError(f"{path}: is of another guard or job than {RESULTS_FILE}")
        kinds = {"counts": dict, "files": dict, "unread_files": dict, "skipped_files": list, "shift": dict,
                 "last_run": dict}  # fmt: skip
        for name, kind in kinds.items():
            if not isinstance(found.get(name), kind):
                raise ResultsError(f"{path}: {name} is {str(found.get(name))[:40]!r}, expected a {kind.__name__}")
        return found

    def _unfinished(self) -> str:
        if self.manifest is None:
            return "the run has not ended"
        counts = self.manifest["counts"]
        if any(counts.get(name) != self.counts[name] for name in ("records", "trajectories", "steps")):
            return "the last run has not ended: there are other shards than it had when a run ended before"
        return ""

    def open(self, shard: Shard, kind: str) -> pq.ParquetFile:
        """A table of a shard, with the columns that are read of it.

        Raises:
            ResultsError: It is missing, damaged, or has other columns.
        """
        path = shard.checked(self.folder, kind)
        try:
            file = pq.ParquetFile(path, read_dictionary=_REPEATED[kind])
        except (pa.ArrowInvalid, KeyError, OSError) as error:  # KeyError: a column that it lacks
            raise ResultsError(f"{path}: is no table of this kind ({_first_line(error)})") from error
        found = {field.name: field.type for field in file.schema_arrow}
        for name, kind_of in COLUMNS[kind].items():
            plain = found.get(name)
            plain = plain.value_type if isinstance(plain, pa.DictionaryType) else plain
            if plain != kind_of:
                raise ResultsError(f"{path}: column {name} is {plain or 'missing'}, expected {kind_of}")
        if file.metadata.num_rows != shard.counts[kind]:
            raise ResultsError(f"{path}: holds {file.metadata.num_rows} rows, expected {shard.counts[kind]}")
        return file

    def batches(self, shard: Shard, kind: str, *columns: str) -> Iterator[pa.RecordBatch]:
        """Rows of a table, at most :data:`ROWS` at once.

        Raises:
            ResultsError: As :meth:`open`, or a page is damaged.
        """
        file = self.open(shard, kind)
        try:
            for batch in file.iter_batches(ROWS[kind], columns=list(columns)):
                for name in columns:
                    if name not in _MAY_BE_EMPTY and batch.column(name).null_count:
                        raise ResultsError(
                            f"{shard.path(self.folder, kind)}: column {name} has empty rows, expected none"
                        )
                yield batch
        except (pa.ArrowInvalid, OSError) as error:
            raise ResultsError(f"{shard.path(self.folder, kind)}: cannot be read ({_first_line(error)})") from error

    def top(self, shard: Shard) -> Iterator[Trajectory]:
        """The trajectories that a shard keeps with their texts; none where it has no such file."""
        if "top" in shard.sha256:
            yield from read_trajectories(shard.checked(self.folder, "top"))

    def rejects(self, shard: Shard) -> Iterator[tuple[str, int | None, str]]:
        """Of what could not be read: file, position (None: the whole file) and reason."""
        if "rejects" not in shard.sha256:
            return
        path = shard.checked(self.folder, "rejects")
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    found = json.loads(line)
                    reject = str(found["file"]), found["position"], str(found["reason"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ResultsError(f"{path}: {error!r}, expected what `jaxguard score` wrote") from error
                yield reject


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
