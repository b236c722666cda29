"""An archive's records in blocks: what is read, embedded, scored and written together, and becomes a shard.

Where a block ends depends on the file's content alone, so that a run that was stopped makes the same ones again.
"""

from __future__ import annotations

import pickle
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import IO

import numpy as np

from jaxguard.features.texts import trajectory_texts, well_formed
from jaxguard.traces.reading import Outcome
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.world_model.packing import Sequence, Texts

STEPS_PER_BLOCK = 32_768
RECORDS_PER_BLOCK = 32_768
CHARS_PER_BLOCK = 64 << 20
"""A block ends at the first record that reaches one of these; a single trajectory may exceed them."""


COUNTS: tuple[str, ...] = (
    "files_rejected",
    "records",
    "converted",
    "rejected",
    "trajectories",
    "steps",
    "without_steps",
    "unsafe",
    "safe",
    "unlabelled",
    "parallel_calls",
    "unobserved_calls",
    "unparsable_arguments",
    "renamed_ids",
    "surrogates_replaced",
    "nonfinite_replaced",
    "nonfinite_steps",
)
"""What a block counts, beside ``format:NAME`` and ``decision:NAME``; ``records == converted + rejected``."""


@dataclass
class Item:
    """A trajectory of a block; ``about`` is it without its steps."""

    about: Trajectory
    record: int
    length: int
    first_hazard: int | None
    texts: Texts | None  # until their rows are known
    sequence: Sequence | None = None


@dataclass
class Block:
    """Consecutive records of one file.

    Attributes:
        key: Content key of the file.
        number: 0-based index of the block in its file.
        file: Name of the file in the archive.
        last: Is it the file's last?
        items: Its trajectories, in order.
        rejects: Records that are none: position (``None``: the whole file) and reason.
        counts: Of what it holds, see :data:`COUNTS`.
        tools: Of all steps, one after the other; ``call_ids`` and ``unobserved`` likewise.
        risks: float32 ``[N, 2]``, filled while trajectories are scored.
        waiting: Trajectories that are not scored yet.
    """

    key: str
    number: int
    file: str
    last: bool = False
    items: list[Item] = field(default_factory=list)
    rejects: list[tuple[int | None, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    tools: list[str] = field(default_factory=list)
    call_ids: list[str] = field(default_factory=list)
    unobserved: list[bool] = field(default_factory=list)
    chars: int = 0
    risks: np.ndarray | None = None
    starts: np.ndarray | None = None  # [B + 1]
    waiting: int = 0
    _spool: IO[bytes] | None = None
    _offsets: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of the shard that it becomes."""
        return f"{self.key}-{self.number:05d}"

    def add(self, outcome: Outcome, thought: bool) -> None:
        """Takes up one record."""
        counts = self.counts
        if outcome.position is None:
            counts["files_rejected"] += 1
            self.rejects.append((None, outcome.reason))
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
                texts = trajectory_texts(trajectory, thought=thought)
                made.append((trajectory, (texts.observations[:-1], texts.actions, texts.instruction)))
        except JaxguardError as error:
            reason = str(error)
        if reason:
            counts["rejected"] += 1
            self.rejects.append((outcome.position, reason))
            return
        counts["converted"] += 1
        for trajectory, own in made:
            self._add(trajectory, own, outcome.position)

    def _add(self, trajectory: Trajectory, texts: Texts, record: int) -> None:
        steps = trajectory.steps
        label = {True: "unsafe", False: "safe", None: "unlabelled"}[trajectory.unsafe]
        for name, by in (
            ("trajectories", 1),
            (label, 1),
            ("steps", len(steps)),
            ("without_steps", not steps),
            ("parallel_calls", sum(step.parallel for step in steps)),
            ("unobserved_calls", sum(step.unobserved for step in steps)),
            ("unparsable_arguments", sum(step.raw_arguments is not None for step in steps)),
        ):
            self.counts[name] += by
        self.tools += [well_formed(step.tool) for step in steps]
        self.call_ids += [well_formed(step.call_id) for step in steps]
        self.unobserved += [step.unobserved for step in steps]
        self.chars += sum(map(len, texts[0])) + sum(map(len, texts[1])) + len(texts[2])
        self._keep(trajectory)
        about = replace(trajectory, steps=(), first_hazard=None)
        self.items.append(Item(about, record, len(steps), trajectory.first_hazard, texts))

    @property
    def full(self) -> bool:
        """Does the next record belong to the next block?"""
        return (
            len(self.tools) >= STEPS_PER_BLOCK
            or self.counts["records"] >= RECORDS_PER_BLOCK
            or self.chars >= CHARS_PER_BLOCK
        )

    def _keep(self, trajectory: Trajectory) -> None:
        """On disk, because few of a block's trajectories are wanted again, but not known which."""
        if self._spool is None:
            self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (closed when the block is written)
        self._offsets.append(self._spool.tell())
        pickle.dump(trajectory, self._spool, pickle.HIGHEST_PROTOCOL)

    def kept(self, index: int) -> Trajectory:
        """The trajectory of ``items[index]`` with its steps."""
        assert self._spool is not None
        self._spool.seek(self._offsets[index])
        made: Trajectory = pickle.load(self._spool)
        return made

    def texts(self) -> Iterator[str]:
        """Every text that is looked up."""
        for item in self.items:
            assert item.texts is not None
            yield from item.texts[0]
            yield from item.texts[1]
            yield item.texts[2]

    def look_up(self, rows: np.ndarray) -> None:
        """Takes the rows of :meth:`texts`, and forgets the texts."""
        at = 0
        for item in self.items:
            middle, end = at + item.length, at + 2 * item.length
            item.sequence = Sequence(rows[at:middle], rows[middle:end], int(rows[end]))
            item.texts = None
            at = end + 1
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


def blocks(outcomes: Iterable[Outcome], key: str, file: str, thought: bool) -> Iterator[Block]:
    """The records of a file in blocks; at least one, of which the last is marked.

    Args:
        outcomes: The records.
        key: Content key of the file.
        file: Its name.
        thought: Put the agent's reasoning before each action.
    """
    block = Block(key, 0, file)
    for outcome in outcomes:
        if block.full:
            yield block
            block = Block(key, block.number + 1, file)
        block.add(outcome, thought)
    block.last = True
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
