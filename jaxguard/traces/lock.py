"""One process at a time per output folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxguard.types import JaxguardError

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds ``folder`` (made if absent) while the context lasts; one that was made and stayed empty is removed.

    The kernel lets go of the lock when the process ends, however it ends.

    Raises:
        JaxguardError: Another process holds it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder before may have removed the file between our open and our lock: that locks nothing.
            held = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            held = False
        if not held:
            raise JaxguardError(f"{folder}: another process is writing there, expected one at a time; nothing was done")
        try:
            yield
        finally:
            path.unlink()
            if made and not any(folder.iterdir()):
                folder.rmdir()
