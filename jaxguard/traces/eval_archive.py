"""Inspect AI's ``.eval`` logs: a zip archive with a header and one JSON file for each sample, read one by one."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxguard.traces import files
from jaxguard.traces.files import Broken, Parsed
from jaxguard.traces.readers.inspect_ai import sample_record
from jaxguard.traces.registry import CannotRead

_SAMPLES = "samples/"
# The second is there from the start on; it is all that a log has which broke off.
_HEADERS = ("header.json", "_journal/start.json")


def read_samples(path: Path) -> Iterator[Parsed | Broken]:
    """One record for each sample, in the archive's order.

    Raises:
        OSError: The file cannot be opened or the disk fails.
        CannotRead: inspect-ai is not installed.
    """
    try:
        # Adds to ``zipfile`` the compression that newer logs are written with.
        import inspect_ai.log  # noqa: F401
    except ImportError as error:
        reason = f"an Inspect log: {error.name} is not installed; pip install 'jaxguard[formats]'"
        raise CannotRead(reason) from error
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        yield Broken(0, f"an Inspect log that is no whole zip archive ({error})")
        return
    with archive:
        # A sample that was logged again stands there twice; its name means the last one.
        names = dict.fromkeys(archive.namelist())
        header: Mapping[str, Any] = {}
        for name in _HEADERS:
            if name in names:
                found = _member(archive, name, 0)
                header = found.record if isinstance(found, Parsed) else header
                break
        samples = [name for name in names if name.startswith(_SAMPLES) and name.endswith(".json")]
        for position, name in enumerate(samples):
            found = _member(archive, name, position)
            if isinstance(found, Parsed):
                record = sample_record(found.record, header)
                found = Parsed(position, record, found.surrogates, found.nonfinite, found.size)
            yield found
        if not samples:
            yield Broken(0, f"the Inspect log holds no samples (its status is {header.get('status')!r:.20})")


def _member(archive: zipfile.ZipFile, name: str, position: int) -> Parsed | Broken:
    limit = files.MAX_RECORD_BYTES
    try:
        with archive.open(name) as stream:
            data = stream.read(limit + 1)
    except OSError:
        raise
    except Exception as error:  # the unpacker of newer logs has errors of its own, known only where it is installed
        return Broken(position, f"{name}: cannot be unpacked ({error})")
    if len(data) > limit:
        return Broken(position, f"{name}: longer than {limit} bytes")
    return files.parse_record(data, position, name)
