"""The files of an archive: a file, a folder, a glob, or an address that fsspec knows; zip files are looked into.

A :class:`Source` is one file to read. Local files are read where they are; others, and the members of zip files, are
copied to a temporary folder for as long as they are read, so that a disk has to hold the largest file and no more.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import IO, Any

from jaxguard.traces.files import SUFFIXES, has_trace_name, load_json
from jaxguard.traces.jsonl import OUTPUT_FILES, TRAJECTORIES_FILE, is_converted
from jaxguard.traces.registry import CannotRead, all_readers

ZIP = ".zip"
RESULTS_FILE = "job.json"
"""Marks a folder that scoring wrote."""

_BUFFER = 1 << 20
_CACHES = ("simplecache", "filecache", "blockcache")
"""Of fsspec, before another address; files are copied from behind them."""
GLOB_CHARACTERS = frozenset("*?[")


class SourceError(CannotRead):
    """An archive cannot be listed, or holds no file to read, or one of its files cannot be fetched."""


@dataclass(frozen=True)
class Source:
    """One file of an archive.

    Attributes:
        name: For messages and results: relative to the archive, ``/`` between folders, ``a.zip!b.jsonl`` in a zip file.
        address: Local path, or address for fsspec; of the zip file where ``member`` is given.
        member: Name within a zip file, else ``""``.
        size: Bytes, unzipped.
        remote: Is ``address`` one for fsspec?
        beside: Names of the side files (labels, ...) in its folder.
        problem: Why it cannot be read, else ``""``.
    """

    name: str
    address: str
    member: str = ""
    size: int = 0
    beside: tuple[str, ...] = ()
    problem: str = ""
    remote: bool = False

    @contextmanager
    def local(self) -> Iterator[Path]:
        """The file on this machine, its side files beside it.

        Raises:
            SourceError: It cannot be fetched.
        """
        if self.problem:
            raise SourceError(self.problem)
        if not self.member and not self.remote:
            yield Path(self.address)
            return
        with tempfile.TemporaryDirectory(prefix="jaxguard-") as folder:
            above, slash, own = (self.member or self.address).rpartition("/")
            for name in (own, *self.beside):
                try:
                    with self._open(above + slash + name) as remote, (Path(folder) / name).open("wb") as file:
                        shutil.copyfileobj(remote, file, _BUFFER)
                except Exception as error:  # file systems and unpackers have errors of their own
                    raise SourceError(f"the file cannot be fetched ({_reason(error)})") from error
            yield Path(folder) / own

    def _open(self, path: str) -> IO[bytes]:
        return _opened_zip(self.address, self.remote).open(path) if self.member else _open(path, self.remote)


def is_address(archive: str) -> bool:
    """Is this an address for fsspec, such as ``s3://bucket/traces``, rather than a local path?"""
    return "://" in archive or "::" in archive


def content_key(path: Path, beside: Sequence[str] = ()) -> str:
    """Names what a file holds and how it is to be read: 32 hexadecimal digits.

    Two files have the same where their bytes, their side files and the ends of their names are the same, whatever
    else they are called.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in (path, *(path.with_name(name) for name in beside)):
        found = file.stat()
        # Side files are those of very many others.
        own = _digest(file) if file == path else _digest_of_side_file(file, found.st_mtime_ns, found.st_size)
        kind = _ending(file.name) if file == path else file.name
        digest.update(own + kind.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _ending(name: str) -> str:
    """What of a name tells how a file is read."""
    plain = name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if plain.endswith(suffix)), "") + name.lower()[len(plain) :]


def _digest(file: Path) -> bytes:
    own = hashlib.blake2b()
    with file.open("rb") as stream:
        while chunk := stream.read(_BUFFER):
            own.update(chunk)
    return own.digest()


@lru_cache(maxsize=64)
def _digest_of_side_file(file: Path, _mtime: int, _size: int) -> bytes:
    return _digest(file)


def find_sources(archive: str | os.PathLike[str], out: Path | None = None) -> tuple[list[Source], list[str]]:
    """The files to read, and what is not read (by name, with the reason where it is not the name), in sorted order.

    Args:
        archive: A file, a folder (walked), a glob, or an address of one for fsspec.
        out: Folder of results, which is left out where the archive is around it.

    Raises:
        SourceError: There is no such file, it cannot be listed, holds no file of traces, or two of the same name.
    """
    address = os.fspath(archive)
    remote = is_address(address) and not os.path.lexists(address)
    listed, single = _remote(address) if remote else _local(address, out)
    sources: list[Source] = []
    skipped: list[str] = []
    beside: dict[str, tuple[str, ...]] = {}
    for entry in listed:
        if _is_side_file(PurePosixPath(entry.name).name) and not single:
            folder = entry.address.rpartition("/")[0]
            beside[folder] = (*beside.get(folder, ()), PurePosixPath(entry.address).name)
    for entry in listed:
        name = PurePosixPath(entry.name).name
        if entry.problem:
            skipped.append(f"{entry.name} ({entry.problem})")
        elif single or not (_is_side_file(name) or not _is_read(name)):
            own = beside.get(entry.address.rpartition("/")[0], ()) if not single else _siblings(entry.address, remote)
            made = Source(entry.name, entry.address, size=entry.size, beside=own, remote=remote)
            if name.lower().endswith(ZIP):
                _look_into(made, sources, skipped)
            else:
                sources.append(made)
        else:
            skipped.append(entry.name)
    if not sources:
        others = f"; not read: {', '.join(skipped[:5])}{', ...' if len(skipped) > 5 else ''}" if skipped else ""
        raise SourceError(f"{address}: no file of traces to read there (.jsonl, .json, .parquet, ..., .zip){others}")
    names = Counter(source.name for source in sources)
    if twice := [name for name, count in names.items() if count > 1]:
        raise SourceError(
            f"{address}: {twice[0]} is the name of two files, one of them in a zip file; expected names of their own, "
            "rename one"
        )
    return sources, skipped


@dataclass(frozen=True)
class _Entry:
    name: str
    address: str
    size: int = 0
    problem: str = ""


def _is_side_file(name: str) -> bool:
    return any(reader.is_companion(name) for reader in all_readers())


def _is_read(name: str) -> bool:
    return has_trace_name(name) or name.lower().endswith(ZIP)


def _siblings(address: str, remote: bool) -> tuple[str, ...]:
    """Side files beside a file that was named itself."""
    folder, _, _ = address.rpartition("/")
    try:
        names = (
            [PurePosixPath(str(path)).name for path in _file_system(address)[0].ls(folder, detail=False)]
            if remote
            else os.listdir(folder or ".")
        )
    except Exception:
        return ()
    return tuple(sorted(name for name in names if _is_side_file(name) and not address.endswith(f"/{name}")))


def _local(archive: str, out: Path | None) -> tuple[list[_Entry], bool]:
    root = Path(archive)
    if not os.path.lexists(root) and GLOB_CHARACTERS & set(archive):
        found = sorted(Path(path) for path in glob.glob(archive, recursive=True))
        if not found:
            raise SourceError(f"{archive}: no file or folder matches")
        plain = itertools.takewhile(lambda part: not GLOB_CHARACTERS & set(part), Path(archive).parts)
        base = Path(*plain)
        own = None if out is None else out.resolve()
        entries: dict[str, _Entry] = {}
        results = {path.parent for path in found if path.name == RESULTS_FILE and _holds_results(path.parent)}
        for path in found:
            above = set(path.resolve().parents)
            if own in above or results & set(path.parents):
                continue  # output
            for file, problem in _walk(path, own):
                entries.setdefault(str(file), _entry(file, base, problem))
        return list(entries.values()), False
    if not root.exists():
        raise SourceError(f"{root}: there is no such file or folder")
    if root.is_file():
        return [_entry(root, root.parent, None)], True
    if not root.is_dir():
        raise SourceError(f"{root}: is neither a file nor a folder")
    if out is not None and root.resolve() == out.resolve():
        raise SourceError(f"{out}: the output folder is the input folder, expected another one")
    walked = _walk(root, None if out is None else out.resolve())
    return [_entry(file, root, problem) for file, problem in walked], False


def _entry(file: Path, base: Path, problem: str | None) -> _Entry:
    name = file.relative_to(base).as_posix()
    try:
        return _Entry(name, str(file), 0 if problem else file.stat().st_size, problem or "")
    except OSError as error:  # it vanished since it was listed
        return _Entry(name, str(file), 0, f"cannot be read: {error.strerror}")


def _walk(root: Path, out: Path | None) -> Iterator[tuple[Path, str | None]]:
    """Everything below a folder but the output folder, in sorted order; with the reason where it is not to be read."""
    waiting = [root]
    while waiting:
        path = waiting.pop()
        if (path != root and (path.is_symlink() or not path.is_dir())) or (path == root and not path.is_dir()):
            yield path, _why_not_read(path, root, out)
        elif path != root and path.name.startswith("."):
            yield path, "a hidden folder"
        elif path.resolve() != out:
            try:
                if _holds_results(path):
                    yield path, "results of an earlier scoring"
                else:
                    waiting += sorted(path.iterdir(), reverse=True)
            except OSError as error:
                raise SourceError(f"{path}: the folder cannot be read ({error.strerror})") from error


def _holds_results(folder: Path) -> bool:
    try:
        found = load_json(folder / RESULTS_FILE)
    except (FileNotFoundError, ValueError):
        return False
    return isinstance(found, dict) and "jaxguard_scores" in found


def _why_not_read(path: Path, root: Path, out: Path | None) -> str | None:
    if path.is_symlink():
        if path.is_dir():
            return "a link to a folder, not followed"
        if not path.exists():
            return "a link that leads nowhere"
        target = path.resolve()
        # An output folder around the input holds more than output.
        is_output = target.parent == out and target.name in OUTPUT_FILES
        if is_output or (out in target.parents and out not in root.resolve().parents):
            return "a link into the output folder"
    if path.name == TRAJECTORIES_FILE and path.parent != root and is_converted(path.parent):
        return "made by an earlier conversion"
    return None if path.is_file() else "no regular file"


def _remote(address: str) -> tuple[list[_Entry], bool]:
    *outer, _ = address.split("::")
    if outer and (outer[0] not in _CACHES or outer[1:]):
        raise SourceError(
            f"{address}: is an address within another, expected that of a file or folder itself (a zip file is looked "
            f"into), with one of {', '.join(_CACHES)} before it at most"
        )
    system, path = _file_system(address)

    def full(found: str) -> str:
        return str(system.unstrip_protocol(found))

    try:
        if GLOB_CHARACTERS & set(path):
            details = system.glob(path, detail=True)
            for folder in [name for name, detail in details.items() if detail["type"] == "directory"]:
                details |= system.find(folder, detail=True)
            details = {name: detail for name, detail in details.items() if detail["type"] != "directory"}
            if not details:
                raise SourceError(f"{address}: no file or folder matches")
        elif system.isfile(path):
            return [_Entry(PurePosixPath(path).name, full(path), int(system.size(path) or 0))], True
        else:
            details = system.find(path, detail=True)
            if not details and not system.exists(path):
                raise SourceError(f"{address}: there is no such file or folder")
    except SourceError:
        raise
    except Exception as error:  # file systems have errors of their own
        raise SourceError(f"{address}: cannot be listed ({_reason(error)})") from error
    names = sorted(details)
    hidden = _not_looked_into(names, path)
    base = (
        os.path.commonpath([PurePosixPath(name).parent for name in names])
        if GLOB_CHARACTERS & set(path) and names
        else path
    )
    return [
        _Entry(
            str(PurePosixPath(name).relative_to(base)),
            full(name),
            int(details[name].get("size") or 0),
            hidden(name) or ("" if details[name]["type"] == "file" else "no regular file"),
        )
        for name in names
    ], False


def _not_looked_into(names: Sequence[str], root: str = "") -> Callable[[str], str]:
    """Why a file is not read because of the folder that it is in, for names that were listed; as :func:`_walk`."""
    results = {str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == RESULTS_FILE}
    above = set(PurePosixPath(root).parents) | {PurePosixPath(root)}

    def why(name: str) -> str:
        for folder in PurePosixPath(name).parents:
            if folder not in above and folder.name.startswith("."):
                return "in a hidden folder"
            if str(folder) in results:
                return "results of an earlier scoring"
        return ""

    return why


def _file_system(address: str) -> tuple[Any, str]:
    import fsspec  # takes a moment, and local archives do without

    try:
        return fsspec.core.url_to_fs(address)
    except Exception as error:
        raise SourceError(f"{address}: {error}, expected a path or an address that fsspec can open") from error


def _open(address: str, remote: bool) -> IO[bytes]:
    if not remote:
        return open(address, "rb")
    system, path = _file_system(address)
    return system.open(path, "rb")


# The zip file that was opened last stays open: its directory may list very many members.
_last_zip: dict[tuple[str, Any], zipfile.ZipFile] = {}


def _opened_zip(address: str, remote: bool) -> zipfile.ZipFile:
    if remote:
        system, path = _file_system(address)
        state = system.ukey(path)
    else:
        found = os.stat(address)
        state = (found.st_mtime_ns, found.st_size, found.st_ino)
    if (address, state) not in _last_zip:
        for other in _last_zip.values():
            other.close()
        _last_zip.clear()
        _last_zip[address, state] = zipfile.ZipFile(_open(address, remote))
    return _last_zip[address, state]


def _look_into(source: Source, sources: list[Source], skipped: list[str]) -> None:
    """Adds the members of a zip file, or the file itself as one that cannot be read."""
    try:
        listed = (info for info in _opened_zip(source.address, source.remote).infolist() if not info.is_dir())
        members = sorted(listed, key=attrgetter("filename"))
    except Exception as error:
        problem = f"the zip archive cannot be read ({_reason(error)})"
        sources.append(Source(source.name, source.address, size=source.size, problem=problem, remote=source.remote))
        return
    beside: dict[str, tuple[str, ...]] = {}
    for info in members:
        folder, _, own_name = info.filename.rpartition("/")
        if _is_side_file(own_name):
            beside[folder] = (*beside.get(folder, ()), own_name)
    hidden = _not_looked_into([info.filename for info in members])
    for info, before in zip(members, [None, *members], strict=False):
        path = PurePosixPath(info.filename)
        name = f"{source.name}!{info.filename}"
        if before is not None and before.filename == info.filename:
            skipped.append(f"{name} (another member of the same name is read)")
        elif problem := hidden(info.filename):
            skipped.append(f"{name} ({problem})")
        elif _is_side_file(path.name) or not has_trace_name(path.name):
            skipped.append(f"{name} (a zip archive inside of another)" if path.suffix.lower() == ZIP else name)
        elif info.flag_bits & 1:
            problem = "it is encrypted"
            sources.append(Source(name, source.address, info.filename, info.file_size, (), problem, source.remote))
        else:
            own = beside.get(info.filename.rpartition("/")[0], ())
            sources.append(Source(name, source.address, info.filename, info.file_size, own, "", source.remote))


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
