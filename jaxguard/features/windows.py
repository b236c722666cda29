"""Long text in windows, windows in batches of few shapes, batches pooled back to one vector per text.

Nothing is cut off: a text is tokenised without truncation, its tokens are cut into consecutive windows
without overlap, every window gets the model's special tokens, and the vector of the text is the mean
over all tokens of all its windows (each window weighs as many tokens as it has). A text that fits one
window gets exactly the model's ordinary masked mean. A text without tokens gets the zero vector.

Everything is streamed: memory depends on the batch, not on the length of a text. A text longer than
:data:`PIECE_CHARS` is tokenised in pieces, cut at a space after a letter or digit, where no tokenizer
in use here joins what stands on both sides; without such a space the cut is made regardless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxguard.features.characters import well_formed
from jaxguard.types import JaxguardError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE_CHARS = 1 << 16
_GROUP_TEXTS = 256
_GROUP_CHARS = 1 << 18
# How far from the end of a piece a place to cut is looked for.
_LOOK_BACK = 1 << 12

#: Sums token vectors: ids int32 [R, L] (padded with 0), lengths int32 [R] -> float32 [R, E], the sum over
#: the first ``lengths[r]`` tokens of row r. Rows of length 0 are padding; their result is not looked at.
SumTokens = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Shapes:
    """The batch shapes a model is run at, so that it is compiled a bounded number of times.

    By default the last batch of a length is padded to a full one: a matrix product may round differently
    at another number of rows, and vectors must not depend on which texts are encoded together. A live
    call, which has one or two windows, pays for small batches instead (differences below 1e-5).

    Attributes:
        lengths: Increasing window lengths in tokens; a window is padded to the next one.
        tokens: Tokens of a full batch; a batch of length L has ``max(1, tokens // L)`` rows.
    """

    lengths: tuple[int, ...]
    tokens: int

    def length(self, tokens: int) -> int:
        """The padded length of a window of ``tokens`` tokens."""
        return next(length for length in self.lengths if length >= tokens)

    def rows(self, length: int, windows: int, live: bool) -> int:
        """Rows of the batch that takes ``windows`` windows of padded length ``length``."""
        full = max(1, self.tokens // length)
        return min(full, windows) if live and windows <= 2 else full

    def all(self) -> list[tuple[int, int]]:
        """Every (rows, length) that can occur."""
        return [
            shape
            for length in self.lengths
            for shape in sorted({(self.rows(length, windows, True), length) for windows in (1, 2, 3)})
        ]


class Windower:
    """Cuts texts into windows of token ids.

    Attributes:
        max_tokens: Tokens of a window with its special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        """Take a ``tokenizers`` tokenizer; its own padding and truncation are switched off.

        Raises:
            JaxguardError: ``max_tokens`` leaves no room beside the special tokens.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        probe = tokenizer.encode("a", add_special_tokens=True)
        ordinary = [i for i, special in enumerate(probe.special_tokens_mask) if not special]
        first, last = (ordinary[0], ordinary[-1]) if ordinary else (len(probe.ids), len(probe.ids))
        self._prefix, self._suffix = probe.ids[:first], probe.ids[last + 1 :]
        self.max_tokens = max_tokens
        self._room = max_tokens - len(self._prefix) - len(self._suffix)
        if self._room < 1:
            raise JaxguardError(
                f"max_tokens: got {max_tokens}, expected more than the "
                f"{len(self._prefix) + len(self._suffix)} special tokens of every window"
            )

    def windows(self, texts: Sequence[str]) -> Iterator[tuple[int, np.ndarray, bool]]:
        """Yield (index of the text, ids int32 [n], is it the text's last window), in order.

        All windows of a text but its last one have ``max_tokens`` tokens.
        """
        kept: list[int] = []
        for group in _groups(texts):
            encodings = self._tokenizer.encode_batch_fast([piece for _, piece, _ in group], add_special_tokens=False)
            for (index, _, final), encoding in zip(group, encodings, strict=True):
                kept += encoding.ids
                start = 0
                while len(kept) - start > self._room:
                    yield index, self._window(kept[start : start + self._room]), False
                    start += self._room
                kept = kept[start:]
                if final:
                    if kept:
                        yield index, self._window(kept), True
                    kept = []

    def _window(self, ids: list[int]) -> np.ndarray:
        return np.asarray([*self._prefix, *ids, *self._suffix], np.int32)


def pool_texts(
    texts: Sequence[str],
    windower: Windower,
    sum_tokens: SumTokens,
    shapes: Shapes,
    dim: int,
    on_windows: Callable[[int], None] | None = None,
    live: bool = False,
) -> np.ndarray:
    """Return the mean token vector of every text, float32 [N, E]; see the module's description.

    Args:
        sum_tokens: The model, see :data:`SumTokens`.
        on_windows: Called after every batch with the number of windows it held.
        live: Use small batches for one or two windows, see :class:`Shapes`.
    """
    means = np.zeros((len(texts), dim), np.float32)
    tokens = np.zeros(len(texts), np.int64)
    # Sums over all windows but the last of texts that have several. They all have the same length, so they
    # pass through one queue in order: the order of summation, and with it the last bit of a vector, does
    # not depend on the other texts of the call.
    heads: dict[int, np.ndarray] = {}
    full = {length: shapes.rows(length, shapes.tokens, False) for length in shapes.lengths}
    queues: dict[int, list[tuple[int, np.ndarray, bool]]] = {length: [] for length in shapes.lengths}

    def flush(length: int) -> None:
        queue, queues[length] = queues[length], []
        rows = shapes.rows(length, len(queue), live)
        ids, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        for row, (_, window, _) in enumerate(queue):
            ids[row, : len(window)], lengths[row] = window, len(window)
        sums = sum_tokens(ids, lengths)
        for row, (index, window, last) in enumerate(queue):
            tokens[index] += len(window)
            if last:
                means[index] = sums[row]
            elif index in heads:
                heads[index] += sums[row]
            else:
                heads[index] = sums[row].astype(np.float64)
        if on_windows is not None:
            on_windows(len(queue))

    for item in windower.windows(texts):
        length = shapes.length(len(item[1]))
        queues[length].append(item)
        if len(queues[length]) == full[length]:
            flush(length)
    for length, queue in queues.items():
        if queue:
            flush(length)
    for index, head in heads.items():
        means[index] = head + means[index]
    return means / np.maximum(tokens, 1)[:, None].astype(np.float32)


def _groups(texts: Sequence[str]) -> Iterator[list[tuple[int, str, bool]]]:
    """Group pieces (text index, piece, is it the text's last) into lists that bound the tokenizer's memory."""
    group: list[tuple[int, str, bool]] = []
    chars = 0
    for index, text in enumerate(texts):
        for piece, final in _pieces(text):
            group.append((index, piece, final))
            chars += len(piece)
            if len(group) >= _GROUP_TEXTS or chars >= _GROUP_CHARS:
                yield group
                group, chars = [], 0
    if group:
        yield group


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (piece, is it the last); the pieces joined are the text, made valid UTF-8."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = start + PIECE_CHARS
        cut = text.rfind(" ", end - _LOOK_BACK, end)
        while cut > 0 and not text[cut - 1].isalnum():
            cut = text.rfind(" ", end - _LOOK_BACK, cut)
        end = cut if cut > start else end
        yield well_formed(text[start:end]), False
        start = end
    yield well_formed(text[start:]), True
