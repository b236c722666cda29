"""The folder of a scoring job: what it was started for, which shards are finished, and that they are what was written.

::

    job.json                        which guard, settings and archive the folder belongs to
    calibration.json                the guard's calibration, for readers that do not have the guard
    parts/SHARD.json                what a shard holds; written last, and only then the shard is finished
    steps/  trajectories/  top/  rejects/  files/    the shards' files
    superseded/                     shards with rows of files that were edited since
    manifest.json                   the sum of all, made when a run ends

SHARD is the key of the content (:func:`jaxguard.traces.sources.content_key`) and the number of a piece of a large file,
or a digest of the keys of several small files. Nothing here is ever overwritten by other bytes. Where some files of a
shard were edited, a new shard takes over the rows of the others; its record names the one that it replaces, and from
then on that one no longer counts, wherever the run is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import jaxguard
from jaxguard.guard import Guard
from jaxguard.results import CALIBRATION, KINDS, LAYOUT, MANIFEST, PARTS, ResultsError, Shard, read_shard
from jaxguard.scoring.remains import remains
from jaxguard.traces.files import load_json
from jaxguard.traces.sources import RESULTS_FILE
from jaxguard.types import JaxguardError

SUPERSEDED = "superseded"
WRITING = ".writing"
"""Locked, shared, by each of several processes that write."""
ENDING = 60
"""Seconds that a new run waits for processes of one that was killed."""
_PARTIAL = ".partial"
_ARCHIVE = "archive"
_SHARD = re.compile(r"[0-9a-f]{32}-[0-9]{5,}")


class Tidied(NamedTuple):
    """What :meth:`Job.tidy` did.

    ``superseded``: files that were edited since; the shards with their rows are in a folder of that name. ``kept``:
    files that are no longer in the archive; their rows stay.
    """

    superseded: int
    kept: int


class JobError(ResultsError):
    """A folder of results is not what this job can go on with."""


def identity(guard: Guard, format: str | None) -> dict[str, Any]:
    """All that a row depends on beside the input: a folder holds rows of one identity.

    Raises:
        JaxguardError: The guard has no thresholds.
    """
    if guard.calibration is None:
        raise JaxguardError("--guard: this guard has no thresholds; run `jaxguard calibrate` first")
    calibration = guard.calibration
    return {
        "jaxguard_scores": LAYOUT,
        "jaxguard": jaxguard.__version__,
        "weights": guard.weights,
        "encoder": guard.encoder.fingerprint.to_dict(),
        "calibration": hashlib.sha256(calibration.to_json().encode()).hexdigest()[:32],
        "lambda_block": calibration.lambda_block,
        "lambda_hold": calibration.lambda_hold,
        "thought": guard.config.data.thought,
        "precision": guard.precision,
        "format": format,
    }


class Job:
    """A folder of results that this job may write to.

    Args:
        folder: Made if absent.
        wanted: The :func:`identity` of the job.
        archive: Address of its archive; kept when the folder is made.

    Attributes:
        parts: Records of the finished shards, by name.
        archive: Address of the archive that the folder was made for.

    Raises:
        JobError: It holds something else, results of another job, or a shard that is not what was written.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, Any], archive: str = ""):
        self.folder = folder
        self.archive = archive
        self.parts: dict[str, Shard] = {}
        self._pieces: dict[str, dict[int, bool]] = defaultdict(dict)  # of each content: is it the last?
        self._open(dict(wanted))
        self._begin()

    def _begin(self) -> None:
        for name in (PARTS, *KINDS):
            (self.folder / name).mkdir(exist_ok=True)
        self._await_others()
        self._clear_partial()
        self.refresh()
        self._end_superseding()

    def refresh(self, *, check: bool = True) -> None:
        """Takes up shards that other processes finished since.

        Args:
            check: Compare them with their digests; whoever holds the folder does.

        Raises:
            JobError: One is not what was written.
        """
        for path in sorted((self.folder / PARTS).glob("*.json")):
            if path.stem not in self.parts:
                shard = read_shard(path)
                for kind in shard.sha256 if check else ():
                    shard.checked(self.folder, kind)
                self._know(shard)

    def _open(self, wanted: dict[str, Any]) -> None:
        path = self.folder / RESULTS_FILE
        try:
            found = load_json(path)
        except FileNotFoundError:
            if (self.folder / MANIFEST).exists() or (self.folder / PARTS).exists():
                raise JobError(
                    f"--out {self.folder}: holds something else than results of `jaxguard score`; nothing was "
                    "overwritten, name another folder"
                ) from None
            self.folder.mkdir(parents=True, exist_ok=True)
            made = {**wanted, _ARCHIVE: self.archive}
            write_whole(path, (json.dumps(made, indent=1, sort_keys=True) + "\n").encode())
            return
        except ValueError as error:
            raise JobError(f"{path}: {error}, expected what `jaxguard score` wrote; nothing was overwritten") from error
        if not isinstance(found, dict) or "jaxguard_scores" not in found:
            raise JobError(f"{path}: was not written by `jaxguard score`; nothing was overwritten")
        self.archive = str(found.pop(_ARCHIVE, ""))
        if differing := [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]:
            shown = ", ".join(
                f"{name} ({str(found.get(name))[:40]}, now {str(wanted.get(name))[:40]})" for name in differing
            )
            raise JobError(
                f"--out {self.folder}: holds results of another job, which differs in {shown}; nothing was "
                "overwritten, name another folder"
            )

    def _await_others(self) -> None:
        """Until no process of a run that ended still writes: when the one that holds the folder is killed, others that
        it had write on for some seconds."""
        limit = time.monotonic() + ENDING
        while True:
            try:
                with (self.folder / WRITING).open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except FileNotFoundError:
                return
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise JobError(
                        f"--out {self.folder}: processes of an earlier run still write there, expected them to end "
                        f"within {ENDING} s; end them, and run again"
                    ) from None
            time.sleep(0.2)

    def _clear_partial(self) -> None:
        """Deletes what killed writers left; only while nobody else writes."""
        for pattern in (f"*.json.*{_PARTIAL}", *(f"{name}/*{_PARTIAL}" for name in (PARTS, *KINDS))):
            for leftover in self.folder.glob(pattern):
                leftover.unlink()

    def keep_calibration(self, text: str) -> None:
        """Puts the calibration beside the results, the one of which ``job.json`` holds the digest."""
        path = self.folder / CALIBRATION
        if not path.exists() or path.read_bytes() != text.encode():
            write_whole(path, text.encode())

    def _know(self, shard: Shard) -> None:
        self.parts[shard.name] = shard
        for member in shard.members:
            self._pieces[member.key][member.number] = member.last

    def is_done(self, key: str) -> bool:
        """Are all pieces of this content in finished shards?"""
        pieces = self._pieces.get(key, {})
        return any(last and set(pieces) >= set(range(number)) for number, last in pieces.items())

    def knows(self, key: str) -> bool:
        """Is any piece of this content in a finished shard?"""
        return bool(self._pieces.get(key))

    def has(self, key: str, number: int) -> bool:
        """Is this piece of a content in a finished shard?"""
        return number in self._pieces.get(key, {})

    def write(self, files: Mapping[str, bytes], shard: Shard) -> None:
        """Writes a shard, its record last.

        Raises:
            JobError: The disk is full or fails; what is finished stays.
        """
        for kind in KINDS:
            path = shard.path(self.folder, kind)
            if kind in files:
                write_whole(path, files[kind])
            else:
                path.unlink(missing_ok=True)  # of a run that was killed before the record was written
        write_whole(self.folder / PARTS / f"{shard.name}.json", shard.to_json().encode())
        self._know(shard)

    def tidy(self, present: Mapping[str, str]) -> Tidied:
        """Takes out of the results what the archive no longer holds under the same name.

        Args:
            present: Content key of every file of the archive, by name.

        Raises:
            JobError: The manifest of the last run cannot be read.
        """
        keys = set(present.values())
        # Names as of the last run, because shards know those of the run that made them.
        edited = {key for name, key in self._last_names().items() if present.get(name, key) != key} - keys
        superseded, kept = set(), set()
        for shard in list(self.parts.values()):
            own = {member.key: member.file for member in shard.members}
            gone = own.keys() - keys
            changed = {key for key in gone if key in edited or own[key] in present or not self.is_done(key)}
            superseded |= changed
            kept |= gone - changed
            if changed:
                left = remains(self.folder, shard, changed)
                if left is not None:
                    self.write(*left)
                self._supersede(shard, left and left[1])
        return Tidied(len(superseded), len(kept - superseded))

    def _last_names(self) -> dict[str, str]:
        path = self.folder / MANIFEST
        try:
            return dict(load_json(path)["files"])
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise JobError(f"{path}: {error!r}, expected what `jaxguard score` wrote; delete it to go on") from error

    def _supersede(self, shard: Shard, instead: Shard | None) -> None:
        self._put_aside(shard.name)
        del self.parts[shard.name]
        for member in shard.members:
            del self._pieces[member.key][member.number]
        if instead is not None:
            self._know(instead)

    def _put_aside(self, name: str) -> None:
        # The record first: without it, the shard counts as unfinished.
        for kind, suffix in {PARTS: ".json", **KINDS}.items():
            path = self.folder / kind / f"{name}{suffix}"
            target = self.folder / SUPERSEDED / kind
            target.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.replace(target / path.name)

    def _end_superseding(self) -> None:
        """Goes on where a run was killed while it put shards aside."""
        for shard in list(self.parts.values()):
            if shard.replaces in self.parts:
                self._supersede(self.parts[shard.replaces], shard)
        for record in (self.folder / SUPERSEDED / PARTS).glob("*.json"):
            if record.stem not in self.parts:
                self._put_aside(record.stem)

    def counts(self) -> Counter[str]:
        """Sums over all finished shards."""
        total: Counter[str] = Counter()
        for shard in self.parts.values():
            total.update(shard.counts)
        return total

    def clear_unfinished(self) -> None:
        """Deletes files of shards that were never finished, so that who opens the folder reads what was counted.

        Raises:
            JobError: Names a file that is none of ours; it was not touched.
        """
        self._clear_partial()
        for kind, suffix in KINDS.items():
            for path in (self.folder / kind).iterdir():
                name = path.name.removesuffix(suffix)
                if not _SHARD.fullmatch(name):
                    raise JobError(
                        f"{path}: is no shard, expected nothing else there, because readers take all of them"
                    )
                if name not in self.parts:
                    path.unlink()


class JobOfWorker(Job):
    """The folder as one of several processes that write to it sees it; another one holds it, and has checked it.

    Others' unfinished files are left alone. It is a context in which this process writes; its end, and that of the
    process, says that it no longer does.

    Raises:
        JobError: It is not there, or holds results of another job.
    """

    def _begin(self) -> None:
        self._writing: IO[bytes] | None = None

    def __enter__(self) -> JobOfWorker:
        self._writing = (self.folder / WRITING).open("a+b")
        fcntl.flock(self._writing, fcntl.LOCK_SH)
        self.refresh(check=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.close()

    def _open(self, wanted: dict[str, Any]) -> None:
        if not (self.folder / RESULTS_FILE).exists():
            raise JobError(
                f"--out {self.folder}: is not there on this machine, expected a folder that all machines share"
            )
        super()._open(wanted)


def write_whole(path: Path, content: bytes) -> None:
    """A file that appears complete, durably, or not at all, also where several processes write it.

    Raises:
        JobError: It cannot be written, the disk is full, say.
    """
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}{_PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise JobError(
            f"{path}: cannot be written ({error.strerror or error}); finished shards are kept, the same command goes on"
        ) from error
