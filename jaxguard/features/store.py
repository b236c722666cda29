"""The on-disk feature store: text -> vector, the bridge between encoders and models.

A folder of Parquet shards (:mod:`jaxguard.features.shards`) and a ``manifest.json`` that names the
encoder. Vectors are found by the hash of their text, each text is stored once, shards are never
changed after they were written. In memory stand 24 bytes per text; vectors stay on disk behind memory
maps. Reading needs NumPy and PyArrow only. Several processes may read and append at the same time.

Router logits are kept in the same way (:mod:`jaxguard.features.decision_logits`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.shards import (
    HASH_BYTES,
    LARGEST_VALUE,
    SUFFIX,
    TEMPORARY,
    FeatureStoreError,
    Shard,
    fsync_folder,
    rows_per_shard,
    usable,
    write_shard,
)
from jaxguard.types import JaxguardError

__all__ = ["FeatureStore", "FeatureStoreError", "MissingTexts", "text_hash"]

_MANIFEST = "manifest.json"
_LOCK = ".lock"
_LAYOUT = 1
_DTYPES = ("float16", "float32")
# Every map holds one file handle, of which a process may have 1,024, and what was read of it counts as its memory.
_OPEN_MAPS, _OPEN_BYTES = 256, 256 << 20
# Archives repeat themselves: short texts asked for lately are not hashed and searched for again.
_RECENT, _SHORT = 1 << 14, 1_000  # texts, characters


class MissingTexts(FeatureStoreError, LookupError):
    """Some of the texts asked for have no vector in the store."""


def text_hash(text: str) -> bytes:
    """16 bytes of BLAKE2b over the UTF-8 of ``text`` (surrogates included, so that none fails)."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def _hashes(texts: Sequence[str]) -> np.ndarray:
    """``S16 [N]``. NumPy ignores trailing zero bytes of S16, which is exact among equal lengths."""
    return np.frombuffer(b"".join(map(text_hash, texts)), dtype=f"S{HASH_BYTES}")


class FeatureStore:
    """Vectors of texts under one encoder. Open with :meth:`create_or_open` or :meth:`open`.

    Attributes:
        path: The folder.
        fingerprint: The encoder that made the vectors.
        dim: Values per vector, E.
        dtype: ``"float16"`` or ``"float32"``, as stored; reading always gives float32.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fingerprint, self.dim, self.dtype = _read_manifest(path)
        self._shards: list[Shard] = []
        self._starts = np.zeros(1, np.int64)  # row id of each shard's first row, and the end
        self._names: set[str] = set()
        self._keys = np.zeros(0, f"S{HASH_BYTES}")  # sorted
        self._ids = np.zeros(0, np.int64)  # row id of each key
        self._maps: OrderedDict[int, Shard] = OrderedDict()
        self._mapped = 0  # bytes of vectors behind them
        self._recent: dict[str, int] = {}  # row ids of texts asked for lately
        self.refresh()

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], fingerprint: EncoderFingerprint | None = None, dim: int | None = None
    ) -> FeatureStore:
        """Open an existing store; what ``fingerprint`` and ``dim`` give is checked.

        Raises:
            FeatureStoreError: No store there, a damaged one, or one of another encoder or size.
        """
        store = cls(Path(path))
        if fingerprint is not None and fingerprint != store.fingerprint:
            raise FeatureStoreError(
                f"feature store {path}: holds {len(store):,} vectors of {store.fingerprint}, expected those of "
                f"{fingerprint} (differing fields, found != expected: {store.fingerprint.differences(fingerprint)}); "
                "name another folder, or the settings that it was made with"
            )
        if dim is not None and dim != store.dim:
            raise FeatureStoreError(
                f"feature store {path}: dim is {store.dim} (fingerprint {store.fingerprint}), expected {dim}"
            )
        return store

    @classmethod
    def create_or_open(
        cls, path: str | os.PathLike[str], fingerprint: EncoderFingerprint, dim: int, dtype: str = "float32"
    ) -> FeatureStore:
        """Open the store at ``path`` for appending, or make an empty one; leftovers of a kill are removed.

        Raises:
            FeatureStoreError: As :meth:`open`; or ``dim`` or ``dtype`` is not usable.
        """
        folder = Path(path)
        if dtype not in _DTYPES:
            raise FeatureStoreError(f"feature store dtype: got {dtype!r}, expected one of {_DTYPES}")
        if dim < 1:
            raise FeatureStoreError(f"feature store dim: got {dim}, expected a positive number")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(folder)
            if not (folder / _MANIFEST).exists():
                if any(folder.glob(f"*{SUFFIX}")):
                    raise FeatureStoreError(f"feature store {folder}: has shards but no {_MANIFEST}")
                _write_manifest(folder, fingerprint, dim, dtype)
        except OSError as error:
            raise FeatureStoreError(f"feature store {folder}: cannot be made ({error})") from error
        store = cls.open(folder, fingerprint, dim)
        if store.dtype != dtype:
            raise FeatureStoreError(f"feature store {folder}: dtype is {store.dtype}, expected {dtype}")
        return store

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._keys)

    def __contains__(self, text: str) -> bool:
        return bool(self._find(_hashes([text]))[0] >= 0)

    @property
    def row_count(self) -> int:
        """Row ids run from 0 to this; larger than the number of texts if two processes stored the same."""
        return int(self._starts[-1])

    def find(self, texts: Sequence[str]) -> np.ndarray:
        """Row ids of ``texts`` as int64 [N], -1 for a text without a vector."""
        return self._find(_hashes(texts))

    def refresh(self) -> None:
        """Take up shards that other processes wrote since. Row ids given before stay valid."""
        try:
            with os.scandir(self.path) as entries:
                names = sorted(
                    entry.name
                    for entry in entries
                    if entry.name.endswith(SUFFIX)
                    and not entry.name.startswith(TEMPORARY)
                    and entry.name not in self._names
                )
        except OSError as error:
            raise FeatureStoreError(f"feature store {self.path}: cannot be listed ({error})") from error
        if not names:
            return
        shards = [Shard(self.path / name, self.dim, np.dtype(self.dtype), self.fingerprint) for name in names]
        starts = self._starts[-1] + np.cumsum([0, *(shard.rows for shard in shards)])
        keys = np.concatenate([shard.hashes() for shard in shards])
        # Two processes may have stored the same text: the row that was known first stays the row.
        keys, first = np.unique(keys, return_index=True)
        new = self._find(keys) < 0
        keys, ids = keys[new], starts[0] + first[new]
        at = np.searchsorted(self._keys, keys)
        self._keys, self._ids = np.insert(self._keys, at, keys), np.insert(self._ids, at, ids)
        self._shards += shards
        self._starts = np.concatenate([self._starts, starts[1:]])
        self._names.update(names)

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those of ``texts`` that have no vector yet, each once, in order (after a :meth:`refresh`)."""
        self.refresh()
        distinct = list(dict.fromkeys(texts))
        absent = self._find(_hashes(distinct)) < 0
        return [text for text, flag in zip(distinct, absent, strict=True) if flag]

    def rows(self, texts: Sequence[str]) -> np.ndarray:
        """Row ids of ``texts``, int64 [N], for :meth:`gather`; valid as long as this object lives.

        Raises:
            MissingTexts: Says how many have no vector, and which is the first.
        """
        ids = np.array([self._recent.get(text, -1) for text in texts], np.int64)
        if new := np.flatnonzero(ids < 0).tolist():
            ids[new] = self._find(_hashes([texts[i] for i in new]))
            found = {texts[i]: int(ids[i]) for i in new[:_RECENT] if ids[i] >= 0 and len(texts[i]) <= _SHORT}
            if len(self._recent) + len(found) > _RECENT:
                self._recent.clear()
            self._recent |= found
        if (ids < 0).any():
            lost = np.flatnonzero(ids < 0)
            text = texts[lost[0]]
            shown = repr(text[:80]) + ("..." if len(text) > 80 else "")
            raise MissingTexts(
                f"feature store {self.path}: {len(lost)} of {len(texts)} texts have no vector, the first is "
                f"number {lost[0]}: {shown}; `jaxguard embed --store {self.path} --trajectories DIR` embeds them, "
                "given the settings that were or will be trained with (--config, model.grounded=true)"
            )
        return ids

    def gather(self, rows: ArrayLike) -> np.ndarray:
        """Vectors of row ids (any shape [...]) as float32 [..., E].

        Raises:
            FeatureStoreError: A row id out of range, or a damaged shard (checked when first read).
        """
        ids = np.asarray(rows, dtype=np.int64)
        flat = ids.reshape(-1)
        out = np.empty((flat.size, self.dim), np.float32)
        if flat.size:
            if flat.min() < 0 or flat.max() >= self._starts[-1]:
                raise FeatureStoreError(
                    f"feature store {self.path}: row ids {flat.min()}..{flat.max()}, expected 0..{self._starts[-1] - 1}"
                )
            owner = np.searchsorted(self._starts, flat, side="right") - 1
            order = np.argsort(owner, kind="stable")
            present, first = np.unique(owner[order], return_index=True)
            for number, group in zip(present, np.split(order, first[1:]), strict=True):
                out[group] = self._shard(int(number)).gather(flat[group] - self._starts[number])
        return out.reshape(*ids.shape, self.dim)

    def verify(self) -> None:
        """Reads every shard whole, each once.

        Raises:
            FeatureStoreError: One is damaged.
        """
        for number in range(len(self._shards)):
            self._shard(number).gather(np.empty(0, np.int64))

    def get(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors of ``texts``, float32 [N, E]; errors as :meth:`rows` and :meth:`gather`."""
        return self.gather(self.rows(texts))

    def add(self, texts: Sequence[str], vectors: ArrayLike) -> int:
        """Append the texts that are not there yet, durably; return how many those were.

        Args:
            texts: N texts; repeated ones and ones already stored are passed over.
            vectors: [N, E], finite, and within the range of the store's dtype and of what a model can read.

        Raises:
            FeatureStoreError: Wrong shape; NaN, infinity or a value beyond (nothing is written then); disk errors.
        """
        given = np.asarray(vectors)
        if given.shape != (len(texts), self.dim):
            raise FeatureStoreError(
                f"feature store {self.path}: vectors have shape {given.shape}, expected {(len(texts), self.dim)}"
            )
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(given, dtype=self.dtype)
        good = usable(stored)
        if not good.all():
            index = int(np.argmin(good))
            raise FeatureStoreError(
                f"feature store {self.path}: the vector of text {index} has NaN, infinity or a value beyond "
                f"{self.dtype} or {LARGEST_VALUE:g}; {(~good).sum()} of {len(texts)} are like that, none was stored"
            )
        self.refresh()
        keys, first = np.unique(_hashes(texts), return_index=True)
        picked = np.sort(first[self._find(keys) < 0])
        if not len(picked):
            return 0
        step = rows_per_shard(stored.dtype.itemsize * self.dim)
        hashes = _hashes([texts[index] for index in picked])
        try:
            with _lock(self.path, fcntl.LOCK_SH):
                for start in range(0, len(picked), step):
                    part = slice(start, start + step)
                    # Unique across processes, and in order of time for a human reader.
                    name = f"shard-{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SUFFIX}"
                    write_shard(self.path, name, hashes[part], stored[picked[part]], self.fingerprint)
        except OSError as error:
            raise FeatureStoreError(f"feature store {self.path}: cannot be written ({error})") from error
        self.refresh()
        return len(picked)

    def _find(self, hashes: np.ndarray) -> np.ndarray:
        """Row ids of ``S16 [N]`` as int64 [N], -1 where there is none."""
        if not len(self._keys):
            return np.full(len(hashes), -1, np.int64)
        at = np.minimum(np.searchsorted(self._keys, hashes), len(self._keys) - 1)
        return np.where(self._keys[at] == hashes, self._ids[at], -1)

    def _shard(self, number: int) -> Shard:
        """Shard ``number``; closes the map that was used longest ago when too many are open."""
        if number not in self._maps:
            self._maps[number] = self._shards[number]
            self._mapped += self._shards[number].size
        self._maps.move_to_end(number)
        while len(self._maps) > 1 and (len(self._maps) > _OPEN_MAPS or self._mapped > _OPEN_BYTES):
            closed = self._maps.popitem(last=False)[1]
            closed.close()
            self._mapped -= closed.size
        return self._shards[number]


@contextlib.contextmanager
def _lock(folder: Path, mode: int) -> Iterator[None]:
    """Hold the folder's lock file; writers share it, so that only a cleaner ever waits or is turned away."""
    with open(folder / _LOCK, "a+b") as file:
        fcntl.flock(file, mode)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Delete temporary files of killed writers, unless someone is writing right now, or the store is read-only.

    A store that may not be written to can still have every text that is asked for; :meth:`FeatureStore.add` fails.
    """
    try:
        with _lock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            for path in folder.glob(f"{TEMPORARY}*"):
                path.unlink(missing_ok=True)
    except BlockingIOError:
        return
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not (folder / _MANIFEST).exists():
            raise


def _write_manifest(folder: Path, fingerprint: EncoderFingerprint, dim: int, dtype: str) -> None:
    """Write the manifest unless another process was first; never leaves half of one."""
    manifest = {
        "format": "jaxguard-features",
        "layout": _LAYOUT,
        "dim": dim,
        "dtype": dtype,
        "fingerprint": fingerprint.to_dict(),
    }
    with _lock(folder, fcntl.LOCK_SH):
        temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}.json"
        with open(temporary, "x", encoding="utf-8") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, folder / _MANIFEST)
        temporary.unlink()
        fsync_folder(folder)


def _read_manifest(folder: Path) -> tuple[EncoderFingerprint, int, str]:
    path = folder / _MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        layout, dim, dtype = manifest["layout"], manifest["dim"], manifest["dtype"]
        fingerprint = EncoderFingerprint.from_dict(manifest["fingerprint"])
    except FileNotFoundError as error:
        raise FeatureStoreError(f"feature store {folder}: no {_MANIFEST} there; not a feature store") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, JaxguardError) as error:
        raise FeatureStoreError(f"feature store manifest {path}: not readable ({error!r})") from error
    if layout != _LAYOUT or dtype not in _DTYPES or type(dim) is not int or dim < 1:
        raise FeatureStoreError(
            f"feature store manifest {path}: layout {layout!r}, dim {dim!r}, dtype {dtype!r}; expected layout "
            f"{_LAYOUT}, a positive dim, and one of {_DTYPES}"
        )
    return fingerprint, dim, dtype
