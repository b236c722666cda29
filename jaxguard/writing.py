"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from jaxguard.types import JaxguardError


class WritingError(JaxguardError):
    """Files could not be written; the message names them."""


@contextlib.contextmanager
def replacing(*files: Path) -> Iterator[tuple[Path, ...]]:
    """Places beside ``files`` to write, which take those of the files, one after another, when the block ends well.

    Otherwise all stay as they were: what can fail, the writing, is done before the first is replaced.

    Raises:
        WritingError: The system refused to write them (a full disk, say).
    """
    places = tuple(file.with_name(f"{file.name}.partial") for file in files)
    try:
        try:
            yield places
            for file in files:
                if file.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            for place, file in zip(places, files, strict=True):
                place.replace(file)
        finally:
            for place in places:
                place.unlink(missing_ok=True)
    except (OSError, WritingError) as error:
        cause = error.__cause__ if isinstance(error, WritingError) else error  # a place may be written whole, too
        # Writing to an open file names none. What names another, or has no number, is of something else in the block.
        elsewhere = isinstance(error, OSError) and error.filename is not None and Path(error.filename) not in places
        if elsewhere or getattr(cause, "errno", None) is None:
            raise
        names = ", ".join(file.name for file in files)
        told = getattr(cause, "strerror", None) or cause
        raise WritingError(f"{files[0].parent}: {names} cannot be written ({told})") from cause


def write_whole(file: Path, text: str, *, errors: str = "strict") -> None:
    """Writes a text file as :func:`replacing` does, in UTF-8; ``errors`` is that of :meth:`str.encode`."""
    with replacing(file) as (place,):
        place.write_text(text, encoding="utf-8", errors=errors)
