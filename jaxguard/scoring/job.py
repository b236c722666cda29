"""The folder of a scoring job: what it was started for, which shards are finished, and that they are what was written.

::

    job.json                        which guard and settings the folder belongs to
    parts/KEY-NNNNN.json            what a shard holds; written last, and only then the shard is finished
    steps/  trajectories/  top/  rejects/    the shards' files
    superseded/                     shards of files that were edited since
    manifest.json                   the sum of all, made when a run ends

KEY names the content of an input file (:func:`jaxguard.traces.sources.content_key`). Nothing here is ever overwritten
by other bytes.
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
from typing import Any

import jaxguard
from jaxguard.guard import Guard
from jaxguard.scoring.shards import KINDS
from jaxguard.traces.files import load_json
from jaxguard.traces.sources import RESULTS_FILE
from jaxguard.types import JaxguardError

LAYOUT = 1
PARTS = "parts"
SUPERSEDED = "superseded"
WRITING = ".writing"
"""Locked, shared, by each of several processes that write."""
ENDING = 60
"""Seconds."""
_PARTIAL = ".partial"
_SHARD = re.compile(r"[0-9a-f]{32}-[0-9]{5,}")
Part = dict[str, Any]


class JobError(JaxguardError):
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
        "format": format,
    }


class Job:
    """A folder of results that this job may write to.

    Args:
        folder: Made if absent.
        wanted: The :func:`identity` of the job.

    Attributes:
        parts: Records of the finished shards, by content key and number.

    Raises:
        JobError: It holds something else, results of another job, or a shard that is not what was written.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, Any]):
        self.folder = folder
        self.parts: dict[str, dict[int, Part]] = defaultdict(dict)
        self._open(dict(wanted))
        self._await_others()
        self._clear_partial()
        self.refresh()

    def refresh(self) -> None:
        """Takes up shards that other processes finished since; whoever holds the folder calls it when they are done.

        Raises:
            JobError: One is not what was written.
        """
        known = {f"{key}-{number:05d}.json" for key, own in self.parts.items() for number in own}
        for path in sorted((self.folder / PARTS).glob("*.json")):
            if path.name not in known:
                part = _read_part(path)
                self._check(part)
                self.parts[part["key"]][part["number"]] = part

    def _open(self, wanted: dict[str, Any]) -> None:
        path = self.folder / RESULTS_FILE
        try:
            found = load_json(path)
        except FileNotFoundError:
            if (self.folder / "manifest.json").exists() or (self.folder / PARTS).exists():
                raise JobError(
                    f"--out {self.folder}: holds something else than results of `jaxguard score`; nothing was "
                    "overwritten, name another folder"
                ) from None
            for name in (PARTS, *KINDS):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
            write_whole(path, (json.dumps(wanted, indent=1, sort_keys=True) + "\n").encode())
            return
        except ValueError as error:
            raise JobError(f"{path}: {error}, expected what `jaxguard score` wrote; nothing was overwritten") from error
        if not isinstance(found, dict) or "jaxguard_scores" not in found:
            raise JobError(f"{path}: was not written by `jaxguard score`; nothing was overwritten")
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
                with (self.folder / WRITING).open("rb") as file:
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

    def path(self, kind: str, key: str, number: int) -> Path:
        """Where a shard's file of a kind is."""
        return self.folder / kind / f"{key}-{number:05d}{KINDS[kind]}"

    def _check(self, part: Part) -> None:
        for kind, digest in part["sha256"].items():
            path = self.path(kind, part["key"], part["number"])
            try:
                found = hashlib.sha256(path.read_bytes()).hexdigest()
            except FileNotFoundError:
                found = ""
            if found != digest:
                what = "is not what was written there" if found else "is gone"
                raise JobError(
                    f"{path}: {what}; delete {PARTS}/{part['key']}-{part['number']:05d}.json to have it scored again, "
                    "nothing was overwritten"
                )

    def _finished(self, key: str) -> Mapping[int, Part]:
        return self.parts.get(key, {})

    def is_done(self, key: str) -> bool:
        """Are all shards of this content finished?"""
        own = self._finished(key)
        return any(part["last"] and set(own) == set(range(number + 1)) for number, part in own.items())

    def has(self, key: str, number: int) -> bool:
        """Is this shard finished?"""
        return number in self._finished(key)

    def write(self, files: Mapping[str, bytes], part: Part) -> None:
        """Writes a shard, its record last.

        Raises:
            JobError: The disk is full or fails; what is finished stays.
        """
        key, number = part["key"], part["number"]
        for kind in KINDS:
            path = self.path(kind, key, number)
            if kind in files:
                write_whole(path, files[kind])
            else:
                path.unlink(missing_ok=True)  # of a run that was killed before the record was written
        text = json.dumps(part, indent=1, sort_keys=True) + "\n"
        write_whole(self.folder / PARTS / f"{key}-{number:05d}.json", text.encode())
        self.parts[key][number] = part

    def tidy(self, present: Mapping[str, str]) -> dict[str, int]:
        """Takes out of the results what the archive no longer holds under the same name.

        Args:
            present: Content key of every file of the archive, by name.

        Returns:
            Files ``superseded`` (edited since: their shards move to a folder of that name), and ``kept`` (no longer in
            the archive: their rows stay).
        """
        keys = set(present.values())
        found = {"superseded": 0, "kept": 0}
        for key in [key for key in self.parts if key not in keys]:
            own = self.parts[key]
            edited = any(part["file"] in present for part in own.values())
            if not edited and self.is_done(key):
                found["kept"] += 1
                continue
            found["superseded"] += 1
            for number in sorted(own):
                self._supersede(key, number)
            del self.parts[key]
        return found

    def _supersede(self, key: str, number: int) -> None:
        # The record first: without it, the shard counts as unfinished.
        for kind, path in [
            (PARTS, self.folder / PARTS / f"{key}-{number:05d}.json"),
            *((kind, self.path(kind, key, number)) for kind in KINDS),
        ]:
            target = self.folder / SUPERSEDED / kind
            target.mkdir(parents=True, exist_ok=True)
            if path.exists():
                path.replace(target / path.name)

    def counts(self) -> Counter[str]:
        """Sums over all finished shards."""
        total: Counter[str] = Counter()
        for own in self.parts.values():
            for part in own.values():
                total.update(part["counts"])
        return total

    def clear_unfinished(self) -> None:
        """Deletes files of shards that were never finished, so that who opens the folder reads what was counted.

        Raises:
            JobError: Names a file that is none of ours; it was not touched.
        """
        self._clear_partial()
        finished = {f"{key}-{number:05d}" for key, own in self.parts.items() for number in own}
        for kind, suffix in KINDS.items():
            for path in (self.folder / kind).iterdir():
                name = path.name.removesuffix(suffix)
                if not _SHARD.fullmatch(name):
                    raise JobError(
                        f"{path}: is no shard, expected nothing else there, because readers take all of them"
                    )
                if name not in finished:
                    path.unlink()


class JobOfWorker(Job):
    """The folder as one of several processes that write to it sees it; another one holds it, and has checked it.

    The finished shards of a file are looked up when it is asked for. Others' unfinished files are left alone.

    Raises:
        JobError: It is not there, or holds results of another job.
    """

    def __init__(self, folder: Path, wanted: Mapping[str, Any]):
        self.folder = folder
        self.parts = defaultdict(dict)
        if not (folder / RESULTS_FILE).exists():
            raise JobError(f"--out {folder}: is not there on this machine, expected a folder that all machines share")
        self._open(dict(wanted))
        self._writing = (folder / WRITING).open("ab")
        fcntl.flock(self._writing, fcntl.LOCK_SH)

    def close(self) -> None:
        """Says that this process no longer writes; so does its end."""
        self._writing.close()

    def _finished(self, key: str) -> dict[int, Part]:
        if key not in self.parts:
            found = map(_read_part, (self.folder / PARTS).glob(f"{key}-*.json"))
            self.parts[key] = {part["number"]: part for part in found}
        return self.parts[key]


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


def _read_part(path: Path) -> Part:
    try:
        part = load_json(path)
        if f"{part['key']}-{part['number']:05d}.json" != path.name:
            raise ValueError(f"is of {part['key']}-{part['number']:05d}")
        if not isinstance(part["counts"], dict) or not set(part["sha256"]) <= set(KINDS):
            raise ValueError("lacks counts or names other files")
        part["last"], part["file"]
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{path}: {error!r}, expected what `jaxguard score` wrote; delete it to score it again"
        ) from error
    return dict(part)
