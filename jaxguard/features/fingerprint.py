"""What produced a vector: two stores or bundles may only be mixed where this agrees."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.features.texts import TEMPLATE_VERSION
from jaxguard.types import JaxguardError

_VOCABULARIES = ("vocab.*", "merges.txt", "added_tokens.json", "*.model")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True)
class EncoderFingerprint:
    """Everything that decides which vector a text gets (design, "Features").

    Attributes:
        model: Model id, e.g. ``"all-MiniLM-L6-v2"``.
        weights: Hash of weights and tokenizer, see :func:`hash_files`.
        layer: Index into transformers' ``hidden_states``; 0 is the embedding output.
        pooling: ``"mean"`` (masked, over all tokens), or what a logit reader does instead.
        dtype: Arithmetic of the forward pass: ``"float32"``, ``"bfloat16"``, ``"float16"``.
        max_tokens: Tokens of one window, special tokens included.
        chunking: How long text is cut, e.g. ``"windows"``.
        template: :data:`jaxguard.features.texts.TEMPLATE_VERSION`.
    """

    model: str
    weights: str
    layer: int
    pooling: str
    dtype: str
    max_tokens: int
    chunking: str
    template: int = TEMPLATE_VERSION

    def to_dict(self) -> dict[str, str | int]:
        """The fields as JSON values, in order of declaration."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Stable JSON: the same text for equal fingerprints on every run."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @property
    def short(self) -> str:
        """First 12 hex digits of the hash of :meth:`to_json`."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.model} layer {self.layer} [{self.short}]"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EncoderFingerprint:
        """Inverse of :meth:`to_dict`.

        Raises:
            JaxguardError: A field is missing, unknown, or not of its type.
        """
        types = {"layer": int, "max_tokens": int, "template": int}
        names = [field.name for field in dataclasses.fields(cls)]
        if sorted(values) != sorted(names):
            raise JaxguardError(f"encoder fingerprint: got fields {sorted(values)}, expected {sorted(names)}")
        for name in names:
            expected = types.get(name, str)
            if type(values[name]) is not expected:
                raise JaxguardError(f"encoder fingerprint: {name} is {values[name]!r}, expected {expected.__name__}")
        return cls(**values)

    def differences(self, other: EncoderFingerprint) -> str:
        """The differing fields, e.g. ``"layer: 3 != 6, dtype: float32 != bfloat16"``; ``""`` if none."""
        mine, theirs = self.to_dict(), other.to_dict()
        return ", ".join(f"{name}: {mine[name]} != {theirs[name]}" for name in mine if mine[name] != theirs[name])


def hash_files(paths: Iterable[Path]) -> str:
    """Return 16 hex digits over the names and contents of ``paths``, in the order of their names.

    Contents are streamed; a file that did not change since it was last hashed by this process is not
    read again.

    Raises:
        JaxguardError: A file cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.name):
        try:
            status = path.stat()
            digest = _file_digest(str(path.resolve()), status.st_size, status.st_mtime_ns)
        except OSError as error:
            raise JaxguardError(f"weights file {path}: cannot be read ({error})") from error
        total.update(f"{path.name}\0{digest}\0".encode())
    return total.hexdigest()[:16]


def tokenizer_files(folder: Path) -> list[Path]:
    """What decides how a folder's tokenizer cuts texts: ``tokenizer.json`` or what it is made of, and its settings."""
    whole = folder / "tokenizer.json"
    names = ("tokenizer.json",) if whole.is_file() else _VOCABULARIES
    return [file for name in (*names, *_SETTINGS) for file in sorted(folder.glob(name)) if file.is_file()]


@functools.lru_cache(maxsize=256)
def _file_digest(path: str, size: int, mtime_ns: int) -> str:
    """Hash of one file; size and time are part of the cache key only."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
