"""Fill a feature store with the texts of trajectories; stop it at any point and start it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from jaxguard.features.encoder import Encoder
from jaxguard.features.grounding import route_texts
from jaxguard.features.shards import FeatureStoreError
from jaxguard.features.store import FeatureStore
from jaxguard.features.texts import trajectory_texts
from jaxguard.types import Trajectory

# A chunk of new texts becomes one shard; what a kill costs is at most one chunk.
_CHUNK_TEXTS = 4096
_CHUNK_CHARS = 32 << 20


@dataclass(frozen=True)
class EmbedReport:
    """What an :func:`embed` did.

    Attributes:
        trajectories: Trajectories read.
        texts: Texts they hold, repetitions included.
        unique: Distinct texts.
        already_there: Distinct texts the store had before.
        embedded: Distinct texts added; ``unique = already_there + embedded`` unless another process
            adds to the same store meanwhile.
        windows: Windows that were encoded.
        seconds: Wall time.
        texts_per_s: Embedded texts per second of wall time.
    """

    trajectories: int
    texts: int
    unique: int
    already_there: int
    embedded: int
    windows: int
    seconds: float
    texts_per_s: float


def embed(
    trajectories: Iterable[Trajectory],
    store: FeatureStore,
    encoder: Encoder,
    *,
    thought: bool = False,
    grounded: bool = False,
    chunk_texts: int = _CHUNK_TEXTS,
    progress: Callable[[int, int], object] | None = None,
) -> EmbedReport:
    """Encode every text of ``trajectories`` that ``store`` lacks, and append it chunk by chunk.

    Those of a reviewed trajectory include what a router reads (:mod:`jaxguard.features.grounding`).

    Memory holds one chunk, whatever the number of trajectories (beside the store's index). A killed run
    that is started again ends with the same vectors, bit for bit on the same machine.

    Args:
        thought: Put the agent's reasoning before each action.
        grounded: Include what was said of the things that each action names.
        chunk_texts: New texts per shard.
        progress: Called after each batch and each chunk with (texts stored, windows encoded) so far.

    Raises:
        FeatureStoreError: The store was made by another encoder, or cannot be written.
        JaxguardError: A trajectory's arguments cannot be written as text.
    """
    if store.fingerprint != encoder.fingerprint or store.dim != encoder.dim:
        raise FeatureStoreError(
            f"feature store {store.path}: holds vectors of {store.fingerprint} with {store.dim} values, expected "
            f"those of {encoder.fingerprint} with {encoder.dim} values (differing fields, found != expected: "
            f"{store.fingerprint.differences(encoder.fingerprint) or 'dim'})"
        )
    started = time.perf_counter()
    store.refresh()
    found_before = np.zeros(store.row_count, bool)
    count_trajectories = count_texts = embedded = windows = 0
    pending: dict[str, None] = {}
    pending_chars = 0

    def add_windows(count: int) -> None:
        nonlocal windows
        windows += count
        if progress is not None:
            progress(embedded, windows)

    def flush() -> None:
        nonlocal embedded, pending_chars
        texts = store.missing(list(pending))  # another process may have stored some meanwhile
        pending.clear()
        pending_chars = 0
        if texts:
            embedded += store.add(texts, encoder.encode(texts, add_windows))
            add_windows(0)

    for trajectory in trajectories:
        texts = trajectory_texts(trajectory, thought=thought, grounded=grounded)
        count_trajectories += 1
        count_texts += 1 + len(texts.observations) + len(texts.actions) + len(texts.said)
        distinct = dict.fromkeys(texts.unique())
        if "reviews" in trajectory.metadata:
            known = route_texts(trajectory)
            count_texts += 1 + len(known.evidence) + len(known.notes)
            distinct.update(dict.fromkeys((known.memory, *known.evidence, *known.notes)))
        new = [text for text in distinct if text not in pending]
        rows = store.find(new)
        found_before[rows[(rows >= 0) & (rows < len(found_before))]] = True
        for text, row in zip(new, rows, strict=True):
            if row < 0:
                pending[text] = None
                pending_chars += len(text)
        if len(pending) >= chunk_texts or pending_chars >= _CHUNK_CHARS:
            flush()
    flush()
    seconds = time.perf_counter() - started
    already_there = int(found_before.sum())
    return EmbedReport(
        trajectories=count_trajectories,
        texts=count_texts,
        unique=already_there + embedded,
        already_there=already_there,
        embedded=embedded,
        windows=windows,
        seconds=seconds,
        texts_per_s=embedded / seconds if seconds > 0 else 0.0,
    )
