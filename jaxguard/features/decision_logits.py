"""Decision-token logits of snapshots, read off a causal language model and kept in a feature store.

The threshold tau (Safety Sentry, section 3.3) needs three numbers per snapshot. Of each snapshot are stored, under
its canonical JSON, six float32 values at the position where the decision token stands: the three logits in the
order of :class:`jaxguard.types.Route`, and their log-probabilities over the whole vocabulary.

In style ``"think"`` the model first writes its block, greedily; where it does not end it within ``max_think``
tokens (or ends its turn), the block is closed by force, which is counted and listed in the store's folder.

A batch's rows are padded on the left, positions count from each row's first token: in float32 a snapshot's values
do not depend on its batch (1e-4). In bfloat16 they do in the second decimal; calibrate with the batch size that serves.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxguard.features.decision_model import load_model, read_router_file
from jaxguard.features.decision_prompt import DECISION_TOKENS, DEFAULT_PROMPT, Prompt, PromptEncoder, PromptError
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.shards import usable
from jaxguard.features.store import FeatureStore, FeatureStoreError, MissingTexts, text_hash
from jaxguard.traces.snapshots import Snapshot, SnapshotError, reviews_of, snapshot
from jaxguard.types import JaxguardError, Route, Trajectory

DIM = 2 * len(Route)
_FORCED_FILE = "closed_by_force.txt"
_POOLING = "decision:"


@dataclass(frozen=True)
class Answers:
    """What a model said to N snapshots.

    Attributes:
        values: float32 [N, 6]: logits, then log-probabilities; NaN for a snapshot that was not run.
        errors: Why a snapshot was not run, by its index.
        forced: Whose think block was closed by force, bool [N].
    """

    values: np.ndarray
    errors: dict[int, str]
    forced: np.ndarray


class DecisionReader:
    """A causal language model, perhaps with a LoRA adapter, that is asked for decisions.

    Attributes:
        fingerprint: Names model, weights, adapter and tokenizer, style, arithmetic, and the hash of prompt and tokens.
    """

    def __init__(
        self,
        path: Path,
        *,
        adapter: Path | None = None,
        tokens: Sequence[str] | None = None,
        prompt: Prompt | None = None,
        style: str | None = None,
        max_tokens: int = 6144,
        max_think: int = 256,
        dtype: str = "float32",
        device: str = "cpu",
        batch_tokens: int = 16_384,
    ) -> None:
        """Load the model.

        Args:
            path: Folder of the model.
            adapter: Folder of the adapter. What it was trained with (``router.json``) is used where ``tokens``,
                ``prompt`` or ``style`` is None; without one: the paper's tokens, the default prompt, ``"first"``.
            tokens: Three strings, each one token of the tokenizer, in the order of :class:`jaxguard.types.Route`.
            prompt: The template.
            style: ``"first"`` or ``"think"``.
            max_tokens: Longest prompt; a longer one is rejected, never cut (the paper's training length).
            max_think: Longest think block, tokens.
            dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
            device: PyTorch device.
            batch_tokens: Tokens of a full batch, padding and think blocks included.

        Raises:
            JaxguardError: A package, a folder, a setting or a token is not what it should be.
        """
        for name, value in (("max_tokens", max_tokens), ("max_think", max_think), ("batch_tokens", batch_tokens)):
            if value < 1:
                raise JaxguardError(f"{name}: got {value}, expected 1 or more")
        trained = read_router_file(adapter) if adapter is not None else {}
        self.tokens = tuple(tokens or trained.get("tokens", DECISION_TOKENS))
        self.prompt = prompt or trained.get("prompt", DEFAULT_PROMPT)
        self.style = style or trained.get("style", "first")
        loaded = load_model(path, adapter, dtype=dtype, device=device)
        self._encode = PromptEncoder(loaded.tokenizer, self.prompt, self.tokens, self.style)
        self._model, self._device, self._tokenizer = loaded.model, loaded.device, loaded.tokenizer
        self._max_tokens, self._max_think, self._batch_tokens = max_tokens, max_think, batch_tokens
        # A block closed by force: its tokens, a line break (a token or two), its end.
        self._spare = max_think + 2 + len(self._encode.close) if self.style == "think" else 0
        longest = max_tokens + self._spare
        config = loaded.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None)
        if positions is not None and longest > positions:
            raise JaxguardError(f"max_tokens: got {max_tokens}, expected at most {positions - self._spare}")
        asked = json.dumps([self.prompt.system, self.prompt.user, *self.tokens]).encode()
        self.fingerprint = EncoderFingerprint(
            model=path.resolve().name + (f"+{adapter.resolve().name}" if adapter is not None else ""),
            weights=loaded.weights,
            layer=int(config.num_hidden_layers),
            pooling=f"{_POOLING}{self.style}" + (f":{max_think}" if self.style == "think" else ""),
            dtype=dtype,
            max_tokens=max_tokens,
            chunking="whole",
            template=int.from_bytes(hashlib.sha256(asked).digest()[:6], "big"),
        )

    def read(self, texts: Sequence[str]) -> Answers:
        """Ask for N snapshots, given as canonical JSON, in batches of similar length."""
        values = np.full((len(texts), DIM), np.nan, np.float32)
        forced = np.zeros(len(texts), bool)
        errors: dict[int, str] = {}
        prompts: dict[int, list[int]] = {}
        for index, text in enumerate(texts):
            try:
                ids = self._encode(text)
            except PromptError as error:
                errors[index] = str(error)
                continue
            if len(ids) > self._max_tokens:
                errors[index] = f"the prompt has {len(ids)} tokens, expected at most {self._max_tokens}"
            else:
                prompts[index] = ids
        for batch in self._batches(prompts):
            rows = [prompts[index] for index in batch]
            try:
                if self.style == "think":
                    rows, forced[batch] = self._thought(rows)
                values[batch] = self._values(rows)
            except RuntimeError as error:  # PyTorch's, of memory above all
                raise JaxguardError(
                    f"model on {self._device}: {len(rows)} prompts of up to {max(map(len, rows))} tokens could not be "
                    f"run ({str(error).strip().splitlines()[0]}); a smaller batch_tokens takes less memory"
                ) from error
        return Answers(values, errors, forced)

    def _batches(self, prompts: dict[int, list[int]]) -> Iterator[list[int]]:
        """Indices of similar length, longest first: a batch that does not fit fails at once."""
        batch: list[int] = []
        width = 0
        for index in sorted(prompts, key=lambda index: -len(prompts[index])):
            if batch and (len(batch) + 1) * width > self._batch_tokens:
                yield batch
                batch = []
            if not batch:
                width = len(prompts[index]) + self._spare
            batch.append(index)
        if batch:
            yield batch

    def _padded(self, rows: list[list[int]]) -> tuple[Any, Any]:
        """Token ids and mask, [B, L], padded on the left."""
        import torch

        width = max(map(len, rows))
        ids, mask = np.zeros((len(rows), width), np.int64), np.zeros((len(rows), width), np.int64)
        for at, row in enumerate(rows):
            ids[at, width - len(row) :] = row
            mask[at, width - len(row) :] = 1
        return torch.from_numpy(ids).to(self._device), torch.from_numpy(mask).to(self._device)

    def _thought(self, rows: list[list[int]]) -> tuple[list[list[int]], np.ndarray]:
        """The rows with their think blocks, closed; and which were closed by force."""
        import torch

        close = self._encode.close
        ends = {close[0], self._tokenizer.eos_token_id} - {None}
        ids, mask = self._padded(rows)
        with torch.inference_mode():
            written = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self._max_think,
                do_sample=False,
                eos_token_id=sorted(ends),
                pad_token_id=close[0],
            )[:, ids.shape[1] :].tolist()
        forced = np.zeros(len(rows), bool)
        for at, new in enumerate(written):
            length = next((place for place, token in enumerate(new) if token in ends), len(new))
            forced[at] = length == len(new) or new[length] != close[0]
            lead = self._encode.encode("\n") if forced[at] else []
            rows[at] = [*rows[at], *new[:length], *lead, *close]
        return rows, forced

    def _values(self, rows: list[list[int]]) -> np.ndarray:
        """float32 [B, 6] at the end of each row."""
        import torch

        ids, mask = self._padded(rows)
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=1,
            ).logits[:, -1]
            at = list(self._encode.decisions)
            scores = logits.float()
            return torch.cat([scores[:, at], scores.log_softmax(-1)[:, at]], dim=1).cpu().numpy()


@dataclass(frozen=True)
class LogitReport:
    """What a :func:`cache_logits` did; ``snapshots = reused + scored + rejected + unscored``.

    Attributes:
        snapshots: Snapshots asked for.
        reused: Those whose values were there already (from an earlier run, or from an equal snapshot).
        scored: Those whose values were added.
        rejected: ``(id, reason)`` of those that were not run: too long, with text that cannot be escaped, or with
            arguments that JSON cannot hold.
        unscored: Ids of those for which the model gave NaN, infinity or more than a store holds; they have no values.
        forced: Ids of those, reused ones too, whose think block was closed by force.
    """

    snapshots: int
    reused: int
    scored: int
    rejected: tuple[tuple[str, str], ...]
    unscored: tuple[str, ...]
    forced: tuple[str, ...]


def reviewed_snapshots(trajectories: Iterable[Trajectory], *, every: bool = False) -> Iterator[tuple[str, Snapshot]]:
    """``(id, snapshot)`` of the reviewed steps, or of ``every`` step; ids are ``trajectory:step``.

    Raises:
        SnapshotError: A trajectory's metadata are not what they should be.
    """
    for trajectory in trajectories:
        reviewed = [review.step for review in reviews_of(trajectory)]
        for step in range(len(trajectory)) if every else reviewed:
            yield f"{trajectory.id}:{step}", snapshot(trajectory, step)


def cache_logits(
    snapshots: Iterable[tuple[str, Snapshot]],
    store: str | Path,
    reader: DecisionReader,
    *,
    chunk: int = 128,
    progress: Callable[[int], object] | None = None,
) -> LogitReport:
    """Ask for all snapshots that the store lacks, and append their values chunk by chunk.

    A killed run that is started again asks for what is missing only.

    Args:
        snapshots: Ids (for the report) and snapshots, e.g. of :func:`reviewed_snapshots`.
        store: Folder of the store; made if it is not there.
        chunk: New snapshots per shard; what a kill costs.
        progress: Called after each chunk with the number of snapshots done.

    Raises:
        FeatureStoreError: The store belongs to another reader, is damaged, or cannot be written.
    """
    opened = FeatureStore.create_or_open(store, reader.fingerprint, DIM)
    opened.verify()
    closed = _read_forced(opened.path)
    count = reused = scored = 0
    rejected: list[tuple[str, str]] = []
    unscored: list[str] = []
    forced: list[str] = []
    pending: dict[str, list[str]] = {}

    def flush() -> None:
        nonlocal scored
        texts = list(pending)
        answers = reader.read(texts)
        finite = usable(answers.values)
        new = {text_hash(texts[i]).hex() for i in np.flatnonzero(answers.forced & finite)}
        if new:
            # Before the values: a text that has values is never missing here.
            _append_forced(opened.path, new)
            closed.update(new)
        opened.add([text for text, good in zip(texts, finite, strict=True) if good], answers.values[finite])
        for index, (text, ids) in enumerate(pending.items()):
            if index in answers.errors:
                rejected.extend((name, answers.errors[index]) for name in ids)
            elif not finite[index]:
                unscored.extend(ids)
            else:
                scored += len(ids)
                forced.extend(ids if text_hash(text).hex() in closed else ())
        pending.clear()
        if progress is not None:
            progress(count)

    for name, shown in snapshots:
        count += 1
        try:
            text = shown.to_json()
        except SnapshotError as error:
            rejected.append((name, str(error)))
            continue
        if text in pending:
            pending[text].append(name)
        elif text in opened:
            reused += 1
            forced.extend([name] if text_hash(text).hex() in closed else ())
        else:
            pending[text] = [name]
        if len(pending) >= chunk:
            flush()
    if pending:
        flush()
    return LogitReport(count, reused, scored, tuple(rejected), tuple(unscored), tuple(forced))


def read_logits(
    store: FeatureStore, snapshots: Sequence[Snapshot], *, log_probabilities: bool = False, partial: bool = False
) -> np.ndarray:
    """The stored logits (or log-probabilities over the vocabulary) of N snapshots, float32 [N, 3].

    Args:
        store: What :func:`cache_logits` wrote.
        snapshots: To look up.
        log_probabilities: Those instead of the logits.
        partial: NaN for snapshots without values, instead of an error.

    Raises:
        FeatureStoreError: The store holds something else.
        MissingTexts: Some snapshots have no values (rejected, unscored or never asked for); says which is the first.
    """
    if store.dim != DIM or not store.fingerprint.pooling.startswith(_POOLING):
        raise FeatureStoreError(
            f"store {store.path}: holds {store.dim} values of {store.fingerprint.pooling!r}, expected {DIM} of "
            f"'{_POOLING}...'"
        )
    rows = store.find([_key(shown) for shown in snapshots])
    if len(lost := np.flatnonzero(rows < 0)) and not partial:
        raise MissingTexts(
            f"store {store.path}: {len(lost)} of {len(rows)} snapshots have no logits, the first is number {lost[0]}"
        )
    values = np.full((len(rows), DIM), np.nan, np.float32)
    values[rows >= 0] = store.gather(rows[rows >= 0])
    return values[:, len(Route) :] if log_probabilities else values[:, : len(Route)]


def _key(shown: Snapshot) -> str:
    """Canonical JSON; where there is none, a text that no store holds."""
    try:
        return shown.to_json()
    except SnapshotError:
        return "\0"


def _read_forced(folder: Path) -> set[str]:
    """Text hashes; a line that a kill cut short belongs to a text without values and is passed over."""
    path = folder / _FORCED_FILE
    lines = path.read_text(encoding="utf-8").split() if path.exists() else []
    return {line for line in lines if len(line) == 2 * len(text_hash(""))}


def _append_forced(folder: Path, hashes: set[str]) -> None:
    with (folder / _FORCED_FILE).open("a", encoding="utf-8") as file:
        file.write("\n" + "\n".join(sorted(hashes)) + "\n")
