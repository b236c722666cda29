"""Folders that hold a trained model: written whole or not at all, and read with every part that loading needs."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxguard.types import JaxguardError
from jaxguard.versions import versions

WEIGHTS = "weights.safetensors"
_OBJECTS = ("config", "encoder", "provenance")
"""Entries of a description that must be objects."""

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """One kind of bundle.

    Attributes:
        name: For messages, e.g. ``"guard"``.
        version: The one that this jaxguard writes and reads.
        error: What is raised.
        remedy: What makes one anew, for the message about another version.
        thresholds: The entry that holds the digest of the thresholds; their file is called like it.
        command: What chooses them.
    """

    name: str
    version: int
    error: type[JaxguardError]
    remedy: str
    thresholds: str
    command: str

    @property
    def file(self) -> str:
        """The description's file, by which a folder is known as a bundle of this kind."""
        return f"{self.name}.json"

    @property
    def key(self) -> str:
        """The description's entry that holds the version."""
        return "jaxguard_bundle" if self.name == "guard" else f"jaxguard_{self.name}"

    def write(
        self, target: Path, description: Mapping[str, Any], weights: dict[str, np.ndarray], thresholds: str | None
    ) -> None:
        """Writes the folder; an existing bundle there is replaced, or stays where that fails.

        Args:
            target: The folder.
            description: JSON-like; versions and digest of the thresholds are added.
            weights: Arrays by name.
            thresholds: Text of the thresholds, ``None`` where there are none.

        Raises:
            JaxguardError: ``error`` where another thing stands there, the description is not JSON, or weights cannot
                be written.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not (target / self.file).exists():
            raise self.error(f"{self.name} bundle {target}: exists and is not a bundle; name another folder")
        content = None if thresholds is None else thresholds.encode()
        digest = None if content is None else _digest(content)
        own = {self.key: self.version, self.thresholds: digest, "versions": versions()}
        try:
            text = json.dumps({**own, **description}, indent=2, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise self.error(f"provenance: {error}, expected JSON-like values") from None
        with _replacing(target) as made:
            try:
                save_file(weights, made / WEIGHTS)
            except SafetensorError as error:  # a full disk, say
                raise self.error(f"{self.name} bundle {target}: weights cannot be written ({error})") from error
            if content is not None:
                (made / f"{self.thresholds}.json").write_bytes(content)
            (made / self.file).write_text(text, encoding="utf-8")
            (made / WEIGHTS).chmod((made / self.file).stat().st_mode)  # safetensors keeps others from reading

    @contextlib.contextmanager
    def naming(self, folder: Path) -> Iterator[None]:
        """Whatever is refused within is an ``error`` that names the bundle."""
        try:
            yield
        except JaxguardError as error:
            raise self.error(f"{self.name} bundle {folder}: {error}") from error

    def read(self, folder: Path) -> dict[str, Any]:
        """The description, checked for what loading needs; as all that reads, to be called within :meth:`naming`.

        Raises:
            JaxguardError: ``error``: none there, another version, damaged.
        """
        try:
            description = json.loads((folder / self.file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            inner = folder / self.name
            run = f"; that is a run, its bundle is {inner}" if (inner / self.file).exists() else ""
            # Of a process that was killed between two renames; eight letters are tempfile's.
            scratch = [] if folder.exists() else folder.parent.glob(f".{glob.escape(folder.name)}-????????")
            left = sorted(path / "made" for path in scratch if (path / "made" / self.file).exists())
            kept = f"; one whose writing was interrupted lies in {left[0]}, move it to {folder}" if left else ""
            raise self.error(f"no {self.file} there, expected a bundle that jaxguard wrote{run}{kept}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise self.error(f"{self.file} cannot be read ({reason(error)})") from error
        found = description.get(self.key) if isinstance(description, dict) else None
        if type(found) is not int or found != self.version:
            raise self.error(f"version is {found!r:.40}, this jaxguard reads version {self.version}; {self.remedy}")
        if missing := {*_OBJECTS, "weights", self.thresholds} - description.keys():
            raise self.error(f"{self.file} lacks {', '.join(sorted(missing))}")
        for name in _OBJECTS:
            if not isinstance(description[name], dict):
                raise self.error(f"{name} in {self.file} is {description[name]!r:.80}, expected an object")
        return dict(description)

    def read_weights(self, folder: Path, read: Callable[[Mapping[str, np.ndarray]], T]) -> T:
        """The weights of a bundle; ``read`` makes them of the arrays.

        Raises:
            JaxguardError: ``error`` where they cannot be read.
        """
        try:
            arrays = load_file(folder / WEIGHTS)
        # What safetensors raises for a dtype that NumPy lacks depends on the dtype.
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise self.error(f"{WEIGHTS} cannot be read ({reason(error)})") from error
        try:
            return read(arrays)
        except JaxguardError as error:
            raise self.error(f"{WEIGHTS} cannot be read ({error})") from error

    def read_thresholds(self, folder: Path, digest: object, read: Callable[[str], T]) -> T | None:
        """The thresholds of a bundle, if any: those that were written with its description, and no others.

        Args:
            folder: The bundle.
            digest: What the description says of them.
            read: Makes them of their text.

        Raises:
            JaxguardError: ``error`` where they cannot be read, or are others.
        """
        path = folder / f"{self.thresholds}.json"
        if not path.exists():
            return None  # nothing passes without thresholds
        try:
            content = path.read_bytes()
            thresholds = read(content.decode("utf-8"))
        except (OSError, UnicodeDecodeError, JaxguardError) as error:
            raise self.error(
                f"{path.name} cannot be read ({error}); delete it and run `{self.command}` again"
            ) from error
        if _digest(content) != digest:
            raise self.error(
                f"{path.name} is not the file that {self.file} was written with; delete it and run "
                f"`{self.command}` again"
            )
        return thresholds


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def reason(error: Exception) -> str:
    """An exception in one line; of our own and the system's the message says enough."""
    return str(error) if isinstance(error, OSError | JaxguardError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """A new folder that takes the place of ``target`` when the block ends well."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made, replaced = Path(scratch) / "made", Path(scratch) / "replaced"
        made.mkdir()
        yield made
        try:
            if target.exists():
                target.rename(replaced)
            made.rename(target)
        except BaseException:
            if replaced.exists() and not target.exists():  # or it would go with the scratch folder
                replaced.rename(target)
            raise
