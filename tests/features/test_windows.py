"""Windows over long text: nothing is lost, nothing is counted twice, shapes are few."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxguard.features import windows as module
from jaxguard.features.windows import Shapes, Windower, pool_texts
from jaxguard.types import JaxguardError

BEGIN, END, UNKNOWN = 0, 1, 2


def _tokenizer(special: bool = True) -> Tokenizer:
    vocabulary = {"[B]": BEGIN, "[E]": END, "[U]": UNKNOWN} | {f"w{n}": n + 3 for n in range(5000)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[U]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[B] $A [E]", special_tokens=[("[B]", BEGIN), ("[E]", END)]
        )
    # As the embedded model's file does: both must be overridden.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4)
    return tokenizer


class CountingModel:
    """Token vectors are (1, id), so that a mean can be computed by hand; remembers its batches."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, ids: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        self.shapes.append(ids.shape)
        assert ids.dtype == np.int32
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        assert (ids[~mask] == 0).all()
        return np.stack([mask.sum(1), (ids * mask).sum(1)], axis=1).astype(np.float32)


SHAPES = Shapes((4, 6, 8), tokens=24)


def _words(count: int) -> str:
    return " ".join(f"w{n}" for n in range(count))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 8, 12, 13, 100])
def test_every_token_is_in_exactly_one_window(special: bool, count: int) -> None:
    windower = Windower(_tokenizer(special), 8)
    room = 6 if special else 8
    got = list(windower.windows([_words(count)]))
    assert [last for _, _, last in got] == [False] * (len(got) - 1) + [True]
    assert len(got) == -(-count // room)
    inner = [ids[1:-1] if special else ids for _, ids, _ in got]
    np.testing.assert_array_equal(np.concatenate(inner), np.arange(count) + 3)
    for _, ids, last in got:
        assert last or len(ids) == 8
        if special:
            assert (ids[0], ids[-1]) == (BEGIN, END)


def test_max_tokens_must_leave_room() -> None:
    with pytest.raises(JaxguardError, match="max_tokens: got 2, expected more than the 2 special tokens"):
        Windower(_tokenizer(), 2)


def test_pooling_weighs_windows_by_their_tokens() -> None:
    # 8 words: windows of 6 + 2 words, each with two special tokens (ids 0 and 1).
    got = pool_texts([_words(8)], Windower(_tokenizer(), 8), CountingModel(), SHAPES, 2)
    expected = (sum(range(3, 11)) + 2 * (BEGIN + END)) / (8 + 4)
    np.testing.assert_allclose(got, [[1.0, expected]], rtol=1e-6)


def test_texts_without_tokens_get_the_zero_vector() -> None:
    got = pool_texts(["", "w1", "  \n "], Windower(_tokenizer(), 8), CountingModel(), SHAPES, 2)
    np.testing.assert_allclose(got, [[0, 0], [1, (0 + 4 + 1) / 3], [0, 0]], rtol=1e-6)
    assert pool_texts([], Windower(_tokenizer(), 8), CountingModel(), SHAPES, 2).shape == (0, 2)


def test_order_of_texts_and_batches_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    texts = [_words(int(count)) for count in rng.integers(0, 40, 60)]
    windower = Windower(_tokenizer(), 8)
    together = pool_texts(texts, windower, CountingModel(), SHAPES, 2)
    order = rng.permutation(60)
    shuffled = pool_texts([texts[i] for i in order], windower, CountingModel(), SHAPES, 2)
    np.testing.assert_array_equal(shuffled, together[order])
    for index, text in enumerate(texts):
        alone = pool_texts([text], windower, CountingModel(), SHAPES, 2, live=True)
        np.testing.assert_array_equal(alone[0], together[index])


def test_shapes_are_few_and_announced() -> None:
    model, seen = CountingModel(), []
    texts = [_words(count) for count in range(1, 30)]
    windower = Windower(_tokenizer(), 8)
    pool_texts(texts, windower, model, SHAPES, 2, seen.append)
    assert set(model.shapes) == {(6, 4), (4, 6), (3, 8)}
    assert sum(seen) == len(list(windower.windows(texts)))
    for text in texts:
        pool_texts([text], windower, model, SHAPES, 2, live=True)
    assert set(model.shapes) <= set(SHAPES.all())
    assert (1, 4) in model.shapes


def test_full_batches_are_padded_to_the_next_length() -> None:
    assert [SHAPES.length(tokens) for tokens in (1, 4, 5, 6, 8)] == [4, 4, 6, 6, 8]
    assert SHAPES.rows(8, 1, live=False) == 3
    assert SHAPES.rows(8, 1, live=True) == 1
    assert SHAPES.rows(8, 3, live=True) == 3
    assert Shapes((64,), tokens=10).rows(64, 1, live=False) == 1


def test_long_text_is_cut_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _words(2000)
    whole = list(Windower(_tokenizer(), 8).windows([text]))
    monkeypatch.setattr(module, "PIECE_CHARS", 100)
    monkeypatch.setattr(module, "_LOOK_BACK", 40)
    pieces = list(module._pieces(text))
    assert "".join(piece for piece, _ in pieces) == text
    assert len(pieces) > 90
    assert all(len(piece) <= 100 for piece, _ in pieces)
    cut = list(Windower(_tokenizer(), 8).windows([text]))
    assert len(cut) == len(whole)
    for (_, one, _), (_, two, _) in zip(cut, whole, strict=True):
        np.testing.assert_array_equal(one, two)


def test_text_without_a_space_is_cut_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_CHARS", 50)
    monkeypatch.setattr(module, "_LOOK_BACK", 20)
    for text in ("x" * 501, "- " * 300, "", " " * 200):
        pieces = list(module._pieces(text))
        assert "".join(piece for piece, _ in pieces) == text
        assert [final for _, final in pieces] == [False] * (len(pieces) - 1) + [True]


def test_lone_surrogates_do_not_stop_the_tokenizer() -> None:
    got = pool_texts(["w1 \ud800"], Windower(_tokenizer(), 8), CountingModel(), SHAPES, 2)
    np.testing.assert_allclose(got, [[1, (BEGIN + 4 + UNKNOWN + END) / 4]])


@pytest.mark.slow
def test_fifty_megabytes_of_text_do_not_fill_the_memory() -> None:
    text = "w1 w22 w333 w4444 " * 2_800_000
    assert len(text) > 50_000_000
    resident, count = [], 0

    def on_windows(windows: int) -> None:
        nonlocal count
        count += windows
        if count % 100 == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * resource.getpagesize())

    pool_texts([text], Windower(_tokenizer(), 256), CountingModel(), Shapes((256,), 2560), 2, on_windows)
    assert count == -(-4 * 2_800_000 // 254)
    assert max(resident) - resident[0] < 50_000_000
