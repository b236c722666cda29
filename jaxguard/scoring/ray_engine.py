"""Scores an archive in many processes, on one machine or a cluster, with Ray Data.

The process that holds the folder of results cuts the archive into items, and actors score them, each with the whole
pipeline of :mod:`jaxguard.scoring.pipeline`. They share the archive, the folder of results, the feature store and the
guard bundle: on a cluster these must lie where every machine finds them under the same path.

A shard's bytes do not depend on who made it. An actor that dies is replaced, and what it was at is done again except
for its finished shards.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import pickle
import shutil
import socket
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxguard.features.store import FeatureStore
from jaxguard.guard import Guard
from jaxguard.scoring.job import WRITING, Job, JobOfWorker, identity
from jaxguard.scoring.pipeline import Done, Progress, Run, batches
from jaxguard.traces.registry import Reader, reader_named
from jaxguard.traces.sources import Source, SourceError, content_key
from jaxguard.types import JaxguardError

LARGE = 256 << 20
"""Bytes from which on several actors share a file: each reads all of it and scores every n-th block."""
ITEMS_PER_WORKER = 8
"""More even out the load, and cost more starts of the pipeline."""
TRIES = 4
"""How often an item is begun whose actor dies. Ray itself would go on for ever, with one that needs too much memory."""
CPUS_PER_WORKER = 4
"""A pipeline's threads, and those of the encoder, keep about so many busy."""
SCRATCH = ".ray"
"""Folder below that of the results while actors work: what one compiled and the next need not, and counts of tries."""

logger = logging.getLogger(__name__)


class RayError(JaxguardError):
    """Ray is not installed or not reachable, or work on it failed."""


Batch = tuple[Source, ...]


@dataclass(frozen=True)
class Item:
    """Work for one actor: the blocks of these files whose number is ``share`` modulo ``shares``."""

    batches: tuple[Batch, ...]
    share: int = 0
    shares: int = 1

    @property
    def sources(self) -> list[Source]:
        """Its files."""
        return [source for batch in self.batches for source in batch]


def make_items(cut: Sequence[Batch], workers: int) -> list[Item]:
    """Work for ``workers`` actors, of about equal sizes; batches stay whole, large ones are shared."""
    total = sum(source.size for batch in cut for source in batch)
    wanted = min(LARGE, total // (workers * ITEMS_PER_WORKER))
    items: list[Item] = []
    waiting: list[Batch] = []
    size = 0
    for batch in cut:
        own = sum(source.size for source in batch)
        if own > LARGE and workers > 1:
            shares = min(workers, -(-own // LARGE))
            items += [Item((batch,), share, shares) for share in range(shares)]
            continue
        waiting.append(batch)
        size += own
        if size >= wanted:
            items.append(Item(tuple(waiting)))
            waiting, size = [], 0
    return [*items, Item(tuple(waiting))] if waiting else items


def without_copies(cut: Sequence[Batch]) -> tuple[list[Batch], dict[str, str]]:
    """The files without those whose content an earlier one has, and the content keys of those, by name.

    Only files of equal sizes are compared. In one process the pipeline itself passes copies over; here another actor
    might score them at the same time, under another name.
    """
    sizes = Counter(source.size for batch in cut for source in batch)
    seen: set[str] = set()
    copies: dict[str, str] = {}
    for source in (source for batch in cut for source in batch if sizes[source.size] > 1):
        try:
            with source.local() as path:
                key = content_key(path, source.beside)
        except (SourceError, OSError):
            continue  # whoever scores it says why it cannot be read
        if key in seen:
            copies[source.name] = key
        seen.add(key)
    kept = [tuple(source for source in batch if source.name not in copies) for batch in cut]
    return [batch for batch in kept if batch], copies


@dataclass(frozen=True)
class RayEngine:
    """The engine of :func:`jaxguard.scoring.archive.score_archive` that works on Ray.

    Attributes:
        bundle: The guard's bundle, which every actor loads.
        workers: Number of actors; one for each GPU by default, or for every 4 CPUs where there is none.
        address: Of a cluster; without one, Ray is started on this machine, unless it runs in this process or
            ``RAY_ADDRESS`` names a cluster.
    """

    bundle: Path
    workers: int | None = None
    address: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise RayError(f"--workers: got {self.workers}, expected at least 1")
        _ray()

    def __call__(
        self,
        sources: list[Source],
        guard: Guard,
        store: FeatureStore,
        job: Job,
        forced: Reader | None,
        progress: Progress,
    ) -> Done:
        """Scores ``sources``; see :class:`jaxguard.scoring.archive.Engine`.

        Raises:
            JaxguardError: As the pipeline; or Ray cannot be reached, or an item's actor died again and again.
        """
        # Actors work in folders of their own.
        absolute = [
            source if source.remote else replace(source, address=os.path.abspath(source.address)) for source in sources
        ]
        bundle = self.bundle.absolute(), guard.precision
        worker = (*bundle, job.folder.absolute(), store.path.absolute(), forced and forced.name)
        cut, copies = without_copies([tuple(batch) for batch in batches(absolute)])
        done = Done(keys=copies)
        for source in absolute:
            if source.name in copies:
                progress.passed(source.size)
        with _connected(self.address) as ray:
            cluster = ray.cluster_resources()
            workers = (
                self.workers or int(cluster.get("GPU", 0)) or max(1, int(cluster.get("CPU", 1)) // CPUS_PER_WORKER)
            )
            items = make_items(cut, workers)
            workers = min(workers, len(items))
            left = Counter(item.sources[0].name for item in items)
            shutil.rmtree(job.folder / SCRATCH, ignore_errors=True)  # of one that was killed
            (job.folder / SCRATCH).mkdir()
            try:
                for number, own in _results(ray, items, worker, workers, cluster):
                    done.update(own)
                    progress.written(own.counts["steps"])
                    files = items[number].sources
                    left[files[0].name] -= 1
                    for source in files if not left[files[0].name] else ():
                        progress.passed(source.size)
            finally:
                shutil.rmtree(job.folder / SCRATCH, ignore_errors=True)
        job.refresh()
        (job.folder / WRITING).unlink(missing_ok=True)
        return done


def _results(
    ray: Any, items: list[Item], worker: tuple[Any, ...], workers: int, cluster: dict[str, float]
) -> Iterator[tuple[int, Done]]:
    """Number of each item and what was done, as soon as it is."""
    kind = "GPU" if cluster.get("GPU") else "CPU"
    # Several actors may share a GPU or a CPU, but none may ask for more than there is: it would wait for ever.
    part = 1 / math.ceil(workers / max(1, int(cluster.get(kind, 1))))
    rows = [{"number": number, "item": pickle.dumps(item)} for number, item in enumerate(items)]
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        _Worker,
        fn_constructor_args=(*worker, part),
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        **{f"num_{kind.lower()}s": part},
    )
    data.context.max_errored_blocks = 0  # with any other number, an actor that died for good is waited for
    data.context.enable_progress_bars = data.context.print_on_execution_start = False
    try:
        for row in data.iter_rows():
            done, error, trace = pickle.loads(row["done"])
            if error:
                logger.info("%s", trace)
                raise RayError(error)
            yield row["number"], done
    except ray.exceptions.RayError as error:
        raise RayError(f"Ray failed ({str(error).strip().splitlines()[-1]}); finished shards are kept") from error


class _Worker:
    """An actor: scores items, with a guard and a feature store that it opens once."""

    def __init__(self, bundle: Path, precision: str, folder: Path, store: Path, format: str | None, part: float):
        self._bundle, self._precision, self._folder, self._path = bundle, precision, folder, store
        self._format, self._part = format, part

    @functools.cached_property
    def _guard(self) -> Guard:
        # Read when JAX first looks for a device: actors that share a GPU must leave each other memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", f"{0.9 * self._part:.3f}")
        if jax.config.values["jax_compilation_cache_dir"] is None:
            # One for each machine: what was compiled for one processor may not run on another.
            jax.config.update("jax_compilation_cache_dir", str(self._folder / SCRATCH / socket.gethostname()))
        return Guard.load(self._bundle, precision=self._precision)

    @functools.cached_property
    def _store(self) -> FeatureStore:
        # Not made if absent: then it is not the one that the others share.
        return FeatureStore.open(self._path, self._guard.encoder.fingerprint, self._guard.encoder.dim)

    @functools.cached_property
    def _job(self) -> JobOfWorker:
        return JobOfWorker(self._folder, identity(self._guard, self._format))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        done, error, trace = Done(), "", ""
        number, item = row["number"], pickle.loads(row["item"])
        try:
            with self._tried(number, item):
                done = self._score(item)
        except JaxguardError as problem:
            error = str(problem)
        except Exception as problem:  # of whatever kind: raised here, it would reach the user as pages of Ray's
            error, trace = f"{type(problem).__name__}: {problem}", traceback.format_exc()
        return {"number": number, "done": pickle.dumps((done, error, trace))}

    @contextmanager
    def _tried(self, number: int, item: Item) -> Iterator[None]:
        """Leaves a mark where the process dies meanwhile."""
        marks = self._folder / SCRATCH / f"tries-{number}"
        with marks.open("ab") as file:
            if file.tell() >= TRIES:
                names = ", ".join(source.name for source in item.sources[:3])
                raise RayError(
                    f"{names}{', ...' if item.sources[3:] else ''}: the process died {TRIES} times while it scored "
                    "them, killed for want of memory, say; finished shards are kept, the same command goes on"
                )
            file.write(b".")
        yield
        marks.unlink()

    def _score(self, item: Item) -> Done:
        forced = None if self._format is None else reader_named(self._format)
        with self._job as job:
            run = Run(
                item.batches,
                self._guard,
                self._store,
                job,
                forced,
                owns=lambda number: number % item.shares == item.share,
            )
            run()
        return run.done


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise RayError("--engine ray: Ray is not installed; pip install 'jaxguard[ray]'") from error
    return ray


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """Ray, running; it is stopped afterwards if it was started here."""
    ray = _ray()
    loud = logger.isEnabledFor(logging.INFO)
    if not loud:
        logging.getLogger("ray.data").setLevel(logging.ERROR)
    if ray.is_initialized():
        yield ray
        return
    if not loud:
        os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        with warnings.catch_warnings():
            # The processes that Ray starts become other programs at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(
                address,
                include_dashboard=None if address else False,
                log_to_driver=loud,
                logging_level=logging.INFO if loud else logging.ERROR,
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise RayError(f"--ray-address {address}: Ray cannot be reached ({error})") from error
    try:
        yield ray
    finally:
        ray.shutdown()
