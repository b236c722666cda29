"""The folder that `jaxguard score` writes: its names, and the record of a shard. Scoring writes it, reports read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxguard.traces.files import load_json
from jaxguard.types import JaxguardError

LAYOUT = 2
"""Version of the folder, in ``job.json``."""
PARTS = "parts"
MANIFEST = "manifest.json"
CALIBRATION = "calibration.json"
KINDS: Mapping[str, str] = {
    "steps": ".parquet",
    "trajectories": ".parquet",
    "top": ".jsonl",
    "rejects": ".jsonl",
    "files": ".jsonl",
}
"""Folders of a shard's files, with the ends of their names."""


class ResultsError(JaxguardError):
    """A folder is none that `jaxguard score` wrote, or it is damaged."""


@dataclass(frozen=True)
class Member:
    """A file's piece in a shard: its content key and name, the piece's number, and whether it is the last."""

    key: str
    file: str
    number: int
    last: bool


@dataclass(frozen=True)
class Shard:
    """The record of a finished shard.

    Attributes:
        name: Of its files.
        members: The pieces of files that are in it.
        counts: Of what it holds, see :mod:`jaxguard.scoring.blocks`.
        sha256: Of its files, by kind; the two tables are always there.
        replaces: Name of the shard of which it is what is still wanted, ``""`` if it was scored itself. Where both are
            there, the other one no longer counts.
    """

    name: str
    members: tuple[Member, ...]
    counts: Mapping[str, int]
    sha256: Mapping[str, str]
    replaces: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """What shards are ordered by where their order matters."""
        return self.members[0].file, self.members[0].number

    def path(self, folder: Path, kind: str) -> Path:
        """Where its file of a kind is."""
        return folder / kind / f"{self.name}{KINDS[kind]}"

    def checked(self, folder: Path, kind: str) -> Path:
        """Where its file of a kind is, with the bytes that were written.

        Raises:
            ResultsError: It is gone, or is another one.
        """
        path = self.path(folder, kind)
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            digest = ""
        if digest != self.sha256.get(kind):
            what = "is not what was written there" if digest else "is gone"
            raise ResultsError(
                f"{path}: {what}; delete {PARTS}/{self.name}.json and run the same `jaxguard score` command to have it "
                "scored again (nothing was overwritten)"
            )
        return path

    def to_json(self) -> str:
        """The content of its record."""
        members = [asdict(member) for member in self.members]
        record = {
            "shard": self.name,
            "members": members,
            "counts": dict(self.counts),
            "sha256": dict(self.sha256),
            "replaces": self.replaces,
        }
        return json.dumps(record, indent=1, sort_keys=True) + "\n"


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the folder.

    Raises:
        ResultsError: It holds none.
        FileNotFoundError: It is not there.
    """
    try:
        found = load_json(path)
        if not isinstance(found, dict):
            raise ValueError(f"is a {type(found).__name__}")
    except ValueError as error:
        raise ResultsError(f"{path}: {error}, expected what `jaxguard score` wrote") from error
    return found


def read_shard(path: Path) -> Shard:
    """The record of a shard.

    Raises:
        ResultsError: It is none, or that of another.
    """
    try:
        found = read_object(path)
        counts = {str(name): int(value) for name, value in found["counts"].items()}
        digests = {str(kind): str(value) for kind, value in found["sha256"].items()}
        members = tuple(Member(**own) for own in found["members"])
        made = Shard(str(found["shard"]), members, counts, digests, str(found["replaces"]))
        if not made.members or f"{made.name}.json" != path.name:
            raise ValueError("is of another shard")
        if not {"steps", "trajectories"} <= {*counts} & {*digests} <= {*KINDS}:
            raise ValueError("lacks tables")
    except ResultsError as error:
        raise ResultsError(f"{error}; delete it to have the shard scored again") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(
            f"{path}: {error!r}, expected what `jaxguard score` wrote; delete it to have the shard scored again"
        ) from error
    return made
