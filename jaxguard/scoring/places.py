"""Where a scoring job reads and where it writes: what must not be mixed is refused before anything is written."""

from __future__ import annotations

import glob
import itertools
import os
from pathlib import Path

from jaxguard.results import KINDS, PARTS
from jaxguard.scoring.job import SUPERSEDED, Job, JobError
from jaxguard.traces.sources import GLOB_CHARACTERS, Source, SourceError, content_key, is_address
from jaxguard.types import JaxguardError

LOOKED_AT = 100
"""Files of an archive that is at another address than before, of which the content is compared with the results."""


class PlaceError(JaxguardError):
    """Results or vectors would be written where something else is, or is looked for."""


def address_of(archive: str | os.PathLike[str]) -> str:
    """An archive's name that is the same from wherever it is named."""
    found = os.fspath(archive)
    if _is_remote(found):
        return found.rstrip("/")
    return os.path.realpath(found) if os.path.lexists(found) else os.path.abspath(found)


def require_apart(archive: str | os.PathLike[str], out: Path, store: Path | None, bundle: Path | None) -> None:
    """Archive, results, feature store and guard in places of their own. Links are followed; addresses are passed over.

    Raises:
        PlaceError: ``out`` or ``store`` is in the archive or in the guard's bundle, or the archive is in one of them;
            ``store`` is where shards go.
    """
    results = out.resolve()
    if store is not None:
        found = store.resolve()
        if found == results or any(found.is_relative_to(results / name) for name in (PARTS, SUPERSEDED, *KINDS)):
            raise PlaceError(f"--store {store}: is where the results go, expected a folder of its own")
    for option, path in (("--out", out), ("--store", store)):
        if path is None:
            continue
        if bundle is not None and path.resolve().is_relative_to(bundle.resolve()):
            raise PlaceError(
                f"{option} {path}: is inside of the guard bundle {bundle}, expected a folder outside of it"
            )
        if not _is_remote(os.fspath(archive)):
            _require_outside(option, path, os.fspath(archive), results)


def _require_outside(option: str, path: Path, archive: str, results: Path) -> None:
    own = path.resolve()
    pattern = not os.path.lexists(archive)
    read = (
        [Path(match).resolve() for match in glob.iglob(archive, recursive=True)]
        if pattern
        else [Path(archive).resolve()]
    )
    above = (own, *own.parents, Path(os.path.abspath(path)), *Path(os.path.abspath(path)).parents)
    # What a pattern finds among the results themselves is left out; a folder that is not there yet may match it.
    if any(own.is_relative_to(root) and not (pattern and root == results) for root in read) or (
        pattern and any(parent.match(os.path.abspath(archive)) for parent in above)
    ):
        raise PlaceError(
            f"{option} {path}: is inside of the archive {archive}, which is only read; expected a folder outside of it"
        )
    plain = itertools.takewhile(lambda part: not GLOB_CHARACTERS & set(part), Path(archive).parts)
    inputs = [Path(*plain).resolve(), *(root for root in read if not root.is_relative_to(results))] if pattern else read
    if any(root.is_relative_to(own) for root in inputs):
        raise PlaceError(f"{option} {path}: the archive {archive} is inside of it, expected a folder of its own")


def _is_remote(archive: str) -> bool:
    return is_address(archive) and not os.path.lexists(archive)


def require_same_archive(job: Job, address: str, sources: list[Source]) -> None:
    """The archive of the first run, or, at another address, one with content that was scored: it was moved.

    Names tell what was edited, so that files of another archive would count as edits of those of the same name.

    Args:
        job: The folder of results.
        address: Of the archive, see :func:`address_of`.
        sources: Its files; at most :data:`LOOKED_AT` are read, those first whose names are known.

    Raises:
        JobError: It is another archive.
    """
    if address == job.archive:
        return
    known = {member.file for shard in job.parts.values() for member in shard.members}
    looked_at = sorted((own for own in sources if own.size), key=lambda own: own.name not in known)[:LOOKED_AT]
    for source in looked_at:
        try:
            with source.local() as path:
                if job.knows(content_key(path, source.beside)):
                    return
        except (SourceError, OSError):
            continue  # whoever scores it says why it cannot be read
    raise JobError(
        f"--out {job.folder}: holds results of the archive {job.archive}, and none of {len(looked_at)} files of "
        f"{address} that were compared has content that was scored there, expected the same archive, which may have "
        "been moved; nothing was overwritten, name another folder"
    )
