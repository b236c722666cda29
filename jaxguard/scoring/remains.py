"""What stays of a shard when some of its files were edited: the rows of the others, as a shard of their own.

Rows are taken over as they were written, so that those of a file that is no longer in the archive are kept too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jaxguard.results import Member, ResultsError, Shard
from jaxguard.scoring.shards import STEPS, TRAJECTORIES, file_lines, parquet, whole_counts


def remains(folder: Path, shard: Shard, leaving: Collection[str]) -> tuple[dict[str, bytes], Shard] | None:
    """A shard without some of its files, as :func:`jaxguard.scoring.shards.make_shard` returns one.

    Its bytes depend on those of the shard and on what leaves alone. ``None`` where nothing stays. ``top`` has those of
    the old one that stay.

    Args:
        folder: Of the results.
        shard: Finished, in ``folder``.
        leaving: Content keys of the files.

    Raises:
        ResultsError: A file of the shard is damaged.
    """
    stays = [member.key not in leaving for member in shard.members]
    members = tuple(itertools.compress(shard.members, stays))
    if not members:
        return None
    name = _name(shard, members)
    tallies = _tallies(folder, shard)
    own_tallies = list(itertools.compress(tallies, stays))
    counts = whole_counts(own_tallies)

    outcomes = _rows(folder, shard, "trajectories", tallies, stays, name, TRAJECTORIES)
    steps = _rows(folder, shard, "steps", tallies, stays, name, STEPS)
    files = {"steps": parquet(steps), "trajectories": parquet(outcomes)}
    ids = set(outcomes["trajectory_id"].to_pylist())
    if top := b"".join(line for line in _lines(folder, shard, "top") if json.loads(line)["id"] in ids):
        files["top"] = top
    rejects = iter(_lines(folder, shard, "rejects"))
    kept = []
    for own, stay in zip(tallies, stays, strict=True):  # in the order of the files
        lines = list(itertools.islice(rejects, own["rejected"] + own["files_rejected"]))
        kept += lines if stay else []
    if kept:
        files["rejects"] = b"".join(kept)
    if len(members) > 1:
        files["files"] = file_lines(members, own_tallies)
    digests = {kind: hashlib.sha256(content).hexdigest() for kind, content in files.items()}
    return files, Shard(name, members, counts, digests, shard.name)


def _name(shard: Shard, members: tuple[Member, ...]) -> str:
    """No other shard's, as the bytes are no other's: the same files scored together make another one."""
    keys = ":".join([shard.name, *(member.key for member in members)])
    return f"{hashlib.blake2b(keys.encode(), digest_size=16).hexdigest()}-00000"


def _tallies(folder: Path, shard: Shard) -> list[Counter[str]]:
    """Counts of each file; several are always small ones, each there as a whole."""
    found = [Counter({str(k): int(v) for k, v in json.loads(line)["counts"].items()})
             for line in _lines(folder, shard, "files")]  # fmt: skip
    if len(found) != len(shard.members) or whole_counts(found) != shard.counts:
        raise ResultsError(f"{shard.path(folder, 'files')}: the counts are not those of {shard.name}")
    return found


def _rows(
    folder: Path, shard: Shard, kind: str, tallies: list[Counter[str]], stays: list[bool], name: str, schema: pa.Schema
) -> pa.Table:
    table = pq.read_table(shard.checked(folder, kind)).cast(schema)
    ends = list(itertools.accumulate(own[kind] for own in tallies))
    parts = [table.slice(end - own[kind], own[kind]) for own, end in zip(tallies, ends, strict=True)]
    kept = pa.concat_tables(itertools.compress(parts, stays))
    return kept.set_column(0, schema.field("shard"), pa.repeat(pa.scalar(name, pa.string()), len(kept)))


def _lines(folder: Path, shard: Shard, kind: str) -> list[bytes]:
    if kind not in shard.sha256:
        return []
    return shard.checked(folder, kind).read_bytes().splitlines(keepends=True)
