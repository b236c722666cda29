"""Reads, embeds, scores and writes, each in a thread of its own, with short queues between them.

What is held at once is a few blocks, whatever the archive: a queue that is full makes the stage before it wait.
Trajectories of a block are scored longest first, and the lanes of the scorer take from the next block where one runs
out, so that nearly every step that is computed is wanted; a block is written when its last trajectory is done.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.scoring.blocks import Block, blocks
from jaxguard.scoring.job import Job
from jaxguard.scoring.shards import make_shard
from jaxguard.traces.reading import ArchiveReader
from jaxguard.traces.registry import CannotRead, Reader
from jaxguard.traces.sources import Source, SourceError, content_key
from jaxguard.world_model import packing

QUEUE = 2
"""Blocks between two stages."""
BATCH_BYTES, BATCH_FILES = 16 << 20, 1_024
"""Small files become one shard together, but not beyond a batch of so many: another machine may have the next."""
OPEN_BLOCKS = 64
"""Blocks that may wait for a trajectory of theirs; lanes run empty rather than take up more."""
TEXTS_PER_CALL = 4_096
"""New texts that are encoded, and stored, together: what a kill costs."""

CHANGED = "the file changed while it was read; run again when it is complete"

_END = None


class Stopped(Exception):
    """Another stage failed; the stage that sees this ends quietly."""


class Progress:
    """What a run has done so far; a subclass shows it. Called from several threads."""

    def passed(self, size: int) -> None:
        """So many bytes of the archive are done with."""

    def embedded(self, windows: int) -> None:
        """So many windows more were encoded."""

    def written(self, steps: int) -> None:
        """A shard of so many steps is finished."""


@dataclass
class Done:
    """What was done with the files of an archive.

    Attributes:
        keys: Content key of each file that was read, by name.
        unread: Files that could not be read, with the reason.
        counts: ``texts``, ``texts_embedded``, ``shards`` and ``steps`` of this run, and ``compiled``: XLA programs, of
            which there are a few for the scorer and one for each length of texts, whatever the archive.
    """

    keys: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def update(self, other: Done) -> None:
        """Takes up what another process did, be it with other blocks of the same files."""
        self.unread |= other.unread
        for name, key in other.keys.items():
            if self.keys.setdefault(name, key) != key:
                self.unread[name] = CHANGED
        for name in self.unread.keys() & other.keys.keys() | other.unread.keys():
            self.keys.pop(name, None)
        self.counts += other.counts


class _Channel:
    """A bounded queue that gives up when the run fails."""

    def __init__(self, failed: threading.Event):
        self._queue: queue.Queue[Block | None] = queue.Queue(QUEUE)
        self._failed = failed

    def put(self, item: Block | None) -> None:
        while True:
            if self._failed.is_set():
                raise Stopped
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self, wait: bool = True) -> Block | None:
        """The next block, ``None`` at the end; raises queue.Empty where there is none yet and ``wait`` is false."""
        while True:
            if self._failed.is_set():
                raise Stopped
            try:
                return self._queue.get(timeout=0.1) if wait else self._queue.get_nowait()
            except queue.Empty:
                if not wait:
                    raise


def batches(sources: Sequence[Source]) -> Iterator[list[Source]]:
    """Consecutive files that may share shards: equal archives are cut alike, whatever of them is finished."""
    batch: list[Source] = []
    size = 0
    for source in sources:
        if batch and source.size >= BATCH_BYTES:  # alone, as it may be shared among several processes
            yield batch
            batch, size = [], 0
        batch.append(source)
        size += source.size
        if size >= BATCH_BYTES or len(batch) >= BATCH_FILES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Run:
    """One run over files of an archive; results go to ``job``.

    Args:
        batches: Files to score, in groups that may share shards (:func:`batches`); those whose content is finished are
            passed over.
        guard: With thresholds.
        store: Its vectors; texts that it lacks are added.
        job: Where shards go.
        forced: The reader of every record, or ``None``.
        progress: Told what was done.
        owns: Which blocks of a file are this run's, by number; all by default. Others are read and left out.

    Attributes:
        done: What was done so far.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Source]],
        guard: Guard,
        store: FeatureStore,
        job: Job,
        forced: Reader | None = None,
        progress: Progress | None = None,
        owns: Callable[[int], bool] = lambda _number: True,
    ):
        self._batches, self._guard, self._store, self._job = batches, guard, store, job
        self._forced, self._progress, self._owns = forced, progress or Progress(), owns
        self.done = Done()
        self._small: Block | None = None
        self._taken: set[str] = set()
        self._accounted = 0  # bytes of the file at hand that blocks on their way stand for
        self._counting = threading.Lock()
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._read, self._embedded, self._scored = (_Channel(self._failed) for _ in range(3))

    def __call__(self) -> None:
        """Runs to the end.

        Raises:
            JaxguardError: A side file is broken, the disk is full, the store is damaged.
        """
        compiled = self._count_compiled
        jax.monitoring.register_event_duration_secs_listener(compiled)
        try:
            self._run()
        finally:
            jax.monitoring.unregister_event_duration_listener(compiled)

    def _count_compiled(self, event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._counting:  # the encoder and the scorer compile in threads of their own
                self.done.counts["compiled"] += 1

    def _run(self) -> None:
        stages = (self._reading, self._embedding, self._writing)
        threads = [threading.Thread(target=self._guarded, args=(stage,), name=stage.__name__) for stage in stages]
        for thread in threads:
            thread.start()
        try:
            self._guarded(self._scoring)
            for thread in threads:
                thread.join()
        except BaseException:  # an interrupt: nobody may write any more when this returns
            self._failed.set()
            for thread in threads:
                thread.join()
            raise
        if self._error is not None:
            raise self._error

    def _guarded(self, stage: Callable[[], None]) -> None:
        try:
            stage()
        except Stopped:
            pass
        except BaseException as error:  # of whatever kind: the other stages must end, and the caller must know
            if self._error is None:
                self._error = error
            self._failed.set()

    def _reading(self) -> None:
        reader = ArchiveReader(self._forced)
        for batch in self._batches:
            for source in batch:
                self._accounted = 0
                try:
                    with source.local() as path:
                        self._read_file(reader, source, path)
                except CannotRead as error:
                    self.done.unread[source.name] = str(error)
                self._progress.passed(source.size - self._accounted)
            self._put_small()
        self._read.put(_END)

    def _read_file(self, reader: ArchiveReader, source: Source, path: Path) -> None:
        try:
            before = os.stat(path)
            whole = before.st_size or 1
            key = content_key(path, source.beside)
        except OSError as error:
            raise SourceError(f"the file cannot be read ({error.strerror or error})") from error
        if key in self._taken or self._job.is_done(key):
            self.done.keys[source.name] = key
            return

        read = 0

        def at(position: int) -> None:  # what was unzipped has another size than what is listed
            nonlocal read
            read = source.size * position // whole

        config = self._guard.config
        outcomes = reader.read_local(path, at)
        for block in blocks(outcomes, key, source.name, config.data.thought, config.model.grounded):
            try:
                after = os.stat(path)
            except OSError as error:
                raise SourceError(f"the file vanished while it was read ({error.strerror})") from error
            if (before.st_mtime_ns, before.st_size) != (after.st_mtime_ns, after.st_size):
                raise SourceError(CHANGED)
            (member,) = block.members
            if member.last:
                read = source.size
            if not self._owns(member.number) or self._job.has(key, member.number):
                block.close()
                continue
            block.size, self._accounted = read - self._accounted, read
            if member.number or not member.last or block.full:
                self._read.put(block)
            else:
                self._pool(block)
        self.done.keys[source.name] = key
        self._taken.add(key)

    def _pool(self, block: Block) -> None:
        """Small files become one shard together."""
        if self._small is None:
            self._small = block
        else:
            self._small.absorb(block)
        if self._small.full:
            self._put_small()

    def _put_small(self) -> None:
        if self._small is not None:
            self._read.put(self._small)
            self._small = None

    def _embedding(self) -> None:
        while (block := self._read.get()) is not _END:
            distinct = list(dict.fromkeys(block.texts()))
            self.done.counts["texts"] += len(distinct)
            rows = self._store.find(distinct)
            if (rows < 0).any():
                self._add_missing([distinct[i] for i in np.flatnonzero(rows < 0).tolist()])
                rows = self._store.rows(distinct)
            block.look_up(dict(zip(distinct, rows.tolist(), strict=True)))
            self._embedded.put(block)
        self._embedded.put(_END)

    def _add_missing(self, texts: list[str]) -> None:
        missing = self._store.missing(texts)  # another process may have stored some
        for first in range(0, len(missing), TEXTS_PER_CALL):
            part = missing[first : first + TEXTS_PER_CALL]
            vectors = self._guard.encoder.encode(part, self._windows)
            self.done.counts["texts_embedded"] += self._store.add(part, vectors)

    def _windows(self, count: int) -> None:
        if self._failed.is_set():  # a call may take minutes
            raise Stopped
        self._progress.embedded(count)

    def _scoring(self) -> None:
        # A call of the scorer ends when nothing is ready, so that no finished one waits for texts being embedded.
        where: dict[int, tuple[Block, int]] = {}
        ended = False

        def following(first: Block) -> Iterator[packing.Sequence]:
            nonlocal ended
            block: Block | None = first
            position = 0
            while block is not None:
                order = np.argsort([-item.length for item in block.items], kind="stable")
                for index in order.tolist():
                    sequence = block.items[index].sequence
                    assert sequence is not None
                    where[position] = block, index
                    position += 1
                    yield sequence
                if not block.items:
                    self._scored.put(block)
                if len({id(own) for own, _ in where.values()}) >= OPEN_BLOCKS:
                    return
                try:
                    block = self._embedded.get(wait=False)
                except queue.Empty:
                    return
                ended = block is _END

        while not ended:
            block = self._embedded.get()
            if block is _END:
                break
            where.clear()
            for position, risks in self._guard.scorer.score(following(block), self._store.gather):
                own, index = where.pop(position)
                own.put(index, risks)
                if not own.waiting:
                    self._scored.put(own)
        self._scored.put(_END)

    def _writing(self) -> None:
        calibration = self._guard.calibration
        assert calibration is not None
        while (block := self._scored.get()) is not _END:
            files, shard = make_shard(block, calibration)
            self._job.write(files, shard)
            block.close()
            self.done.counts.update({"shards": 1, "steps": len(block.tools)})
            self._progress.written(len(block.tools))
            self._progress.passed(block.size)
