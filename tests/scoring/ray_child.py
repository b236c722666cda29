"""What Ray's processes run before anything else in the tests: the toy encoder, small blocks, and faults on demand."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxguard.results import Shard

STEPS_PER_BLOCK = 60
stack = contextlib.ExitStack()  # open as long as the process lives


def prepare() -> None:
    """Called by Ray in every process that it starts; environment variables name the folders."""
    from small_run import at_toy_size

    from jaxguard.scoring import blocks, job

    stack.enter_context(at_toy_size(Path(os.environ["TOY_CACHE"])))
    blocks.STEPS_PER_BLOCK = STEPS_PER_BLOCK
    faults, write, fsync, written = Path(os.environ["TOY_FAULTS"]), job.JobOfWorker.write, os.fsync, 0

    def faulty_write(self: job.JobOfWorker, files: Mapping[str, bytes], shard: Shard) -> None:
        nonlocal written
        written += 1
        if shard.members[0].file in _said(faults / "dies_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if written > 1 and _claimed(faults / "dies_once"):
            # Midway: some of the shard's files are there, its record is not, and one file is half of one.
            write_whole, calls = job.write_whole, 0

            def die(path: Path, content: bytes) -> None:
                nonlocal calls
                calls += 1
                if calls == 2:
                    path.with_name(f"{path.name}.0.partial").write_bytes(content[:10])
                    os.kill(os.getpid(), signal.SIGKILL)
                write_whole(path, content)

            job.write_whole = die
        write(self, files, shard)

    def full(file: int) -> None:
        if (faults / "disk_full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    job.JobOfWorker.write = faulty_write
    job.os.fsync = full


def _said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _claimed(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
