"""One Parquet shard of a feature store: written whole or not at all, read through a memory map.

A shard is ordinary Parquet with two non-null columns, ``hash`` (16 bytes) and ``vector``
(``fixed_size_list<float16|float32, E>``), in one row group, uncompressed, PLAIN, and few enough rows
for one data page per column. A page ends with its values, so that the vectors of a shard are one
contiguous piece of the file, whose place follows from the footer: rows are read from the map without
decoding the shard. A checksum in the footer covers both columns; it proves the bytes and the place.
"""

from __future__ import annotations

import json
import mmap
import os
import uuid
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.types import JaxguardError

HASH_BYTES = 16
TEMPORARY = ".tmp-"
SUFFIX = ".parquet"
LARGEST_VALUE = 1e9
"""In a vector. The squares of larger ones overflow, and a norm that divides by infinity makes all texts alike."""
# Arrow starts a new page after 20,000 rows; a shard must fit into one.
MAX_ROWS = 16_384
_MAX_BYTES = 256 << 20
_KEY = b"jaxguard"


class FeatureStoreError(JaxguardError):
    """A feature store cannot be opened, read or written; the message names the folder or file."""


def rows_per_shard(row_bytes: int) -> int:
    """How many rows of ``row_bytes`` one shard may hold (at most 256 MiB, at least one row)."""
    return max(1, min(MAX_ROWS, _MAX_BYTES // row_bytes))


def usable(vectors: np.ndarray) -> np.ndarray:
    """Which rows of ``[N, E]`` are finite and within :data:`LARGEST_VALUE`: bool ``[N]``."""
    return np.asarray((np.abs(vectors.astype(np.float32, copy=False)) <= LARGEST_VALUE).all(axis=1))


def fsync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_shard(
    folder: Path, name: str, hashes: np.ndarray, vectors: np.ndarray, fingerprint: EncoderFingerprint
) -> None:
    """Write one shard as ``folder/name``; a kill at any point leaves no shard or the whole one.

    Args:
        hashes: ``S16 [N]``.
        vectors: ``float16 | float32 [N, E]``, C-contiguous, finite.
    """
    rows, dim = vectors.shape
    item = pa.field("element", pa.from_numpy_dtype(vectors.dtype), nullable=False)
    facts = {
        "rows": rows,
        "crc32": _checksum(hashes, vectors),
        "fingerprint": fingerprint.to_dict(),
    }
    schema = pa.schema(
        [
            pa.field("hash", pa.binary(HASH_BYTES), nullable=False),
            pa.field("vector", pa.list_(item, dim), nullable=False),
        ],
        metadata={_KEY: json.dumps(facts).encode()},
    )
    columns = [
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(HASH_BYTES), rows, [None, pa.py_buffer(hashes.tobytes())]),
        pa.FixedSizeListArray.from_arrays(
            pa.Array.from_buffers(item.type, vectors.size, [None, pa.py_buffer(vectors)]), type=schema.field(1).type
        ),
    ]
    temporary = folder / f"{TEMPORARY}{uuid.uuid4().hex}{SUFFIX}"
    try:
        with open(temporary, "xb") as file:
            pq.write_table(
                pa.Table.from_arrays(columns, schema=schema),
                file,
                row_group_size=rows,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                data_page_size=2**31 - 1,
                write_batch_size=rows,
            )
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(folder)


class Shard:
    """A shard opened for reading: its hashes in memory, its vectors behind a map.

    Attributes:
        path: The file.
        rows: Number of rows N.
        size: Bytes of the vectors.

    Raises:
        FeatureStoreError: The file is truncated, damaged, of another shape or of another fingerprint.
    """

    def __init__(self, path: Path, dim: int, dtype: np.dtype, fingerprint: EncoderFingerprint) -> None:
        self.path = path
        self._dim, self._dtype = dim, dtype
        self._map: np.ndarray | None = None
        self._verified = False
        try:
            meta = pq.read_metadata(path)
            facts = json.loads((meta.schema.to_arrow_schema().metadata or {})[_KEY])
            self.rows, self._crc32 = int(facts["rows"]), int(facts["crc32"])
            found = EncoderFingerprint.from_dict(facts["fingerprint"])
            schema = meta.schema.to_arrow_schema()
            shape_ok = schema.field("vector").type.list_size == dim and (
                schema.field("vector").type.value_type == pa.from_numpy_dtype(dtype)
            )
            layout_ok = meta.num_rows == self.rows and meta.num_row_groups == 1
            self.size = self.rows * dim * dtype.itemsize
            self._hash_at = self._values_at(meta, 0, HASH_BYTES)
            self._vector_at = self._values_at(meta, 1, dim * dtype.itemsize)
        except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, AttributeError, JaxguardError) as error:
            raise FeatureStoreError(
                f"shard {path}: truncated, damaged, or not written by a feature store ({type(error).__name__}: {error})"
            ) from error
        if found != fingerprint:
            raise FeatureStoreError(
                f"shard {path}: written under another encoder than its store ({found.differences(fingerprint)})"
            )
        if not shape_ok:
            raise FeatureStoreError(
                f"shard {path}: vectors are {schema.field('vector').type}, expected {dim} values of {dtype}"
            )
        if not layout_ok:
            raise self._damaged("rows or row groups do not agree with the footer")
        size = path.stat().st_size
        for start, width in ((self._hash_at, HASH_BYTES), (self._vector_at, dim * dtype.itemsize)):
            if not 0 < start <= size - self.rows * width:
                raise self._damaged("its columns do not lie where the footer says")

    @staticmethod
    def _values_at(meta: pq.FileMetaData, column: int, width: int) -> int:
        """Offset of a column's values: they end its only page, and the page ends its chunk."""
        chunk = meta.row_group(0).column(column)
        return chunk.data_page_offset + chunk.total_compressed_size - meta.num_rows * width

    def _damaged(self, what: str) -> FeatureStoreError:
        return FeatureStoreError(
            f"shard {self.path}: damaged, or rewritten by another program ({what}); delete the file, "
            "and what filled the store (embed, route logits) replaces its vectors"
        )

    def _opened(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise FeatureStoreError(f"shard {self.path}: cannot be read ({error})") from error

    def hashes(self) -> np.ndarray:
        """Text hashes, ``S16 [N]``."""
        with self._opened() as file:
            file.seek(self._hash_at)
            return np.frombuffer(file.read(self.rows * HASH_BYTES), dtype=f"S{HASH_BYTES}")

    def gather(self, rows: np.ndarray) -> np.ndarray:
        """Vectors of ``rows`` (int64 [M], within the shard) as float32 [M, E]."""
        if self._map is None:
            self._map = self._open_map()
        # Bytes are gathered and viewed afterwards: the values need not start at a multiple of their size.
        return np.take(self._map, rows, axis=0).view(self._dtype).astype(np.float32, copy=False)

    def close(self) -> None:
        """Give back the map (and its file handle); the next :meth:`gather` opens it again."""
        self._map = None

    def _open_map(self) -> np.ndarray:
        """Map the vectors as uint8 [N, E * itemsize]; the first time, check every byte."""
        width = self._dim * self._dtype.itemsize
        with self._opened() as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(pages, np.uint8, self.rows * width, self._vector_at).reshape(self.rows, width)
        if not self._verified:
            if _checksum(self.hashes(), flat) != self._crc32:
                raise self._damaged("its checksum differs")
            for start in range(0, self.rows, 1024):
                block = np.ascontiguousarray(flat[start : start + 1024]).view(self._dtype)
                good = usable(block)
                if not good.all():
                    row = start + int(np.argmin(good))
                    raise self._damaged(f"row {row} holds NaN, infinity or a value beyond {LARGEST_VALUE:g}")
            self._verified = True
        return flat


def _checksum(hashes: np.ndarray, vectors: np.ndarray) -> int:
    return zlib.crc32(vectors.data, zlib.crc32(hashes.data))
