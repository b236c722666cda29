"""An archive's records in blocks: what is read, embedded, scored and written together, and becomes a shard.

A block is a piece of one file, or several small files. Where it ends depends on what it holds alone, so that a run
that was stopped makes the same blocks again.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import IO

import numpy as np

from jaxguard.features.characters import well_formed
from jaxguard.features.texts import trajectory_texts
from jaxguard.results import Member
from jaxguard.traces.reading import TALLIED, Outcome, tally
from jaxguard.types import JaxguardError, Step, Trajectory
from jaxguard.world_model.packing import Sequence, Texts

STEPS_PER_BLOCK = 32_768
RECORDS_PER_BLOCK = 32_768
CHARS_PER_BLOCK = 64 << 20
"""A block ends at the first record that reaches one of these; a single trajectory may exceed them."""


COUNTS: tuple[str, ...] = (
    *("files_rejected", "records", "converted", "rejected"),
    *TALLIED,
    *("renamed_ids", "surrogates_replaced", "nonfinite_replaced", "nonfinite_steps"),
)
"""What a block counts, beside ``format:NAME`` and ``decision:NAME``; ``records == converted + rejected``."""


_FIELDS = tuple(field.name for field in fields(Trajectory) if field.name != "steps")
_TRAJECTORY = attrgetter(*_FIELDS)
_STEP = attrgetter(*(field.name for field in fields(Step)))


class SpoolError(JaxguardError):
    """The temporary folder cannot hold what waits there."""


@dataclass
class Item:
    """A trajectory of a block; ``about`` is it without its steps and texts."""

    about: Trajectory
    file: str
    record: int
    length: int
    first_hazard: int | None
    metadata: str  # as JSON
    texts: Texts | None  # until their rows are known
    sequence: Sequence | None = None


@dataclass
class Block:
    """Consecutive records of one file, or all records of several.

    Attributes:
        members: The files.
        items: Its trajectories, in order.
        rejects: Records that are none: file, position (``None``: the whole file) and reason.
        tallies: Counts of what it holds of each member, see :data:`COUNTS`.
        tools: Of all steps, one after the other; ``call_ids`` and ``unobserved`` likewise.
        risks: float32 ``[N, 2]``, filled while trajectories are scored.
        waiting: Trajectories that are not scored yet.
        size: Bytes of the archive that it stands for.
    """

    members: list[Member]
    items: list[Item] = field(default_factory=list)
    rejects: list[tuple[str, int | None, str]] = field(default_factory=list)
    tallies: list[Counter[str]] = field(default_factory=lambda: [Counter()])
    tools: list[str] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    unobserved: list[bool] = field(default_factory=list)
    chars: int = 0
    size: int = 0
    risks: np.ndarray | None = None
    starts: np.ndarray | None = None  # [B + 1]
    waiting: int = 0
    _spool: IO[bytes] | None = None
    _offsets: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the shard that it becomes."""
        if len(self.members) == 1:
            return f"{self.members[0].key}-{self.members[0].number:05d}"
        keys = "".join(member.key for member in self.members)
        return f"{hashlib.blake2b(keys.encode(), digest_size=16).hexdigest()}-00000"

    def add(self, outcome: Outcome, thought: bool, grounded: bool) -> None:
        """Takes up one record of the last member."""
        file = self.members[-1].file
        counts = self.tallies[-1]
        if outcome.position is None:
            counts["files_rejected"] += 1
            self.rejects.append((file, None, outcome.reason))
            return
        counts["records"] += 1
        counts["surrogates_replaced"] += outcome.surrogates
        counts["nonfinite_replaced"] += outcome.nonfinite
        if outcome.format:
            counts[f"format:{outcome.format}"] += 1
        reason = outcome.reason
        made: list[tuple[Trajectory, Texts]] = []
        try:
            for trajectory in outcome.trajectories:
                texts = trajectory_texts(trajectory, thought=thought, grounded=grounded)
                own = Texts(texts.observations[:-1], texts.actions, texts.said, texts.instruction)
                made.append((trajectory, own))
        except JaxguardError as error:
            reason = str(error)
        if reason:
            counts["rejected"] += 1
            self.rejects.append((file, outcome.position, reason))
            return
        counts["converted"] += 1
        for trajectory, own in made:
            self._add(trajectory, own, outcome.position)

    def _add(self, trajectory: Trajectory, texts: Texts, record: int) -> None:
        steps = trajectory.steps
        self.tallies[-1].update(tally(trajectory))
        self.tools += [well_formed(step.tool) for step in steps]
        self.call_ids += [well_formed(step.call_id) for step in steps]
        self.unobserved += [step.unobserved for step in steps]
        self.chars += sum(map(len, texts.every()))
        self.chars += len(trajectory.id) * (len(steps) + 1) + sum(len(step.call_id) for step in steps)
        self._keep(trajectory)
        metadata = json.dumps(dict(trajectory.metadata), sort_keys=True)
        self.chars += len(metadata)
        # What is not needed until the block is written does not wait in memory.
        about = replace(trajectory, steps=(), first_hazard=None, instruction="", final_observation="")
        file = self.members[-1].file
        self.items.append(Item(about, file, record, len(steps), trajectory.first_hazard, metadata, texts))

    def absorb(self, other: Block) -> None:
        """Takes up all that another block of other files holds; that one is not to be used any more."""
        self.members += other.members
        for name in ("tallies", "items", "rejects", "tools", "call_ids", "unobserved"):
            getattr(self, name).extend(getattr(other, name))
        self.chars += other.chars
        self.size += other.size
        if other._spool is not None:
            spool = self._spool = self._spool or _spool()
            shift = spool.seek(0, io.SEEK_END)
            other._spool.seek(0)
            shutil.copyfileobj(other._spool, spool)
            self._offsets += [shift + offset for offset in other._offsets]
            other.close()

    @property
    def full(self) -> bool:
        """Does the next record belong to the next block?"""
        return (
            len(self.tools) >= STEPS_PER_BLOCK
            or sum(own["records"] for own in self.tallies) >= RECORDS_PER_BLOCK
            or self.chars >= CHARS_PER_BLOCK
        )

    def _keep(self, trajectory: Trajectory) -> None:
        """On disk, because few of a block's trajectories are wanted again, but not known which."""
        try:
            if self._spool is None:
                self._spool = _spool()
            self._offsets.append(self._spool.tell())
            # As tuples: pickling the objects takes three times as long.
            whole = _TRAJECTORY(trajectory), list(map(_STEP, trajectory.steps))
            pickle.dump(whole, self._spool, pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise SpoolError(
                f"temporary folder {tempfile.gettempdir()}: cannot be written ({error.strerror}), where a block's "
                "trajectories wait; TMPDIR names another. Finished shards are kept"
            ) from error

    def kept(self, index: int) -> Trajectory:
        """The trajectory of ``items[index]`` with its steps."""
        assert self._spool is not None
        self._spool.seek(self._offsets[index])
        values, steps = pickle.load(self._spool)
        about = dict(zip(_FIELDS, values, strict=True))
        return Trajectory(steps=tuple(Step(*step) for step in steps), **about)

    def texts(self) -> Iterator[str]:
        """Every text that is looked up."""
        for item in self.items:
            assert item.texts is not None
            yield from item.texts.every()

    def look_up(self, rows: Mapping[str, int]) -> None:
        """Takes the rows of all :meth:`texts`, and forgets the texts."""
        for item in self.items:
            assert item.texts is not None
            every = item.texts.every()
            item.sequence = item.texts.sequence(np.fromiter((rows[text] for text in every), np.int64, len(every)))
            item.texts = None
        lengths = np.array([item.length for item in self.items], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.risks = np.empty((len(self.tools), 2), np.float32)
        self.waiting = len(self.items)

    def put(self, index: int, risks: np.ndarray) -> None:
        """Takes the risks of ``items[index]``."""
        assert self.risks is not None
        assert self.starts is not None
        self.risks[self.starts[index] : self.starts[index + 1]] = risks
        self.items[index].sequence = None
        self.waiting -= 1

    def close(self) -> None:
        """Frees what :meth:`kept` needs."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None


def _spool() -> IO[bytes]:
    return tempfile.TemporaryFile()  # closed when the block is written


def blocks(outcomes: Iterable[Outcome], key: str, file: str, thought: bool, grounded: bool) -> Iterator[Block]:
    """The records of a file in blocks; at least one, of which the last is marked.

    Args:
        outcomes: The records.
        key: Content key of the file.
        file: Its name.
        thought: Put the agent's reasoning before each action.
        grounded: Read what was said of the things that each action names.
    """
    block = Block([Member(key, file, 0, False)])
    for outcome in outcomes:
        if block.full:
            yield block
            block = Block([Member(key, file, block.members[0].number + 1, False)])
        block.add(outcome, thought, grounded)
    block.members = [replace(block.members[0], last=True)]
    yield block


def unique_ids(items: Iterable[Item]) -> list[str]:
    """The trajectories' ids; one that occurred before gets ``~2``, ``~3``, ..."""
    seen: set[str] = set()
    uses: dict[str, int] = {}
    made = []
    for item in items:
        name = own = well_formed(item.about.id)
        while own in seen:
            uses[name] = uses.get(name, 1) + 1
            own = f"{name}~{uses[name]}"
        seen.add(own)
        made.append(own)
    return made
