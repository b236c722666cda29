"""The embedded encoder against PyTorch, stored values, and itself in other batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxguard.features.minilm import MiniLMEncoder, _model_folder, map_weights
from jaxguard.types import JaxguardError

CALL = 'send_email {"to":"ann@example.org","body":"Quarterly numbers attached."}'
TEXTS = ["hello world", CALL, "", "Grüße, 東京! " * 9, "word " * 100, "q" * 300, " \n"]
# Of transformers' BertModel: values 0, 1, 2, 100, 200, 383 of the mean of hidden state k, and its norm.
GOLDEN = {
    ("hello world", 0): ([-0.038788, 0.475113, -0.109266, -0.170455, -0.058624, 0.034763], 4.775186),
    ("hello world", 3): ([-0.306802, 0.718016, -0.004102, -0.079967, 0.219809, 0.139839], 6.951262),
    ("hello world", 6): ([-0.197446, 0.177665, 0.03857, 0.158812, 0.094913, 0.17299], 5.726848),
    (CALL, 0): ([0.110361, -0.013515, -0.282073, 0.221317, 0.118431, 0.13137], 3.330394),
    (CALL, 3): ([-0.079503, 0.670456, -0.167709, -0.123597, 0.251386, 0.299898], 5.960668),
    (CALL, 6): ([-0.036064, 0.184849, 0.134767, 0.279298, -0.285033, -0.004021], 3.394444),
}


@pytest.fixture(scope="module")
def encoder() -> MiniLMEncoder:
    # Few lengths and small batches: every shape costs a compilation.
    return MiniLMEncoder(max_tokens=32, batch_tokens=256)


@pytest.fixture(scope="module")
def of_layer(encoder: MiniLMEncoder) -> dict[int, MiniLMEncoder]:
    return {3: encoder} | {layer: MiniLMEncoder(layer, max_tokens=32, batch_tokens=256) for layer in (0, 6)}


@pytest.mark.parametrize(("text", "layer"), GOLDEN)
def test_equals_stored_values(of_layer: dict[int, MiniLMEncoder], text: str, layer: int) -> None:
    values, norm = GOLDEN[text, layer]
    got = of_layer[layer].encode([text])[0]
    np.testing.assert_allclose(got[[0, 1, 2, 100, 200, 383]], values, atol=5e-6)
    np.testing.assert_allclose(np.linalg.norm(got), norm, atol=2e-5)


@pytest.fixture(scope="module")
def pytorch() -> Callable[[str, int], np.ndarray]:
    """(text, tokens per window) -> transformers' mean hidden states over all windows, [7, 384]."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)  # many threads on few busy cores take a hundred times longer
    model = transformers.BertModel.from_pretrained(_model_folder(), add_pooling_layer=False).eval()
    tokenizer = transformers.BertTokenizerFast.from_pretrained(_model_folder())

    def mean_states(text: str, max_tokens: int) -> np.ndarray:
        ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
        total, count = np.zeros((7, 384)), 0
        for start in range(0, len(ids), max_tokens - 2):
            window = [tokenizer.cls_token_id, *ids[start : start + max_tokens - 2], tokenizer.sep_token_id]
            with torch.no_grad():
                states = model(torch.tensor([window]), output_hidden_states=True).hidden_states
            total += torch.cat(states).double().sum(1).numpy()
            count += len(window)
        return total / max(count, 1)

    return mean_states


def test_equals_pytorch_on_texts_of_any_length(
    of_layer: dict[int, MiniLMEncoder], pytorch: Callable[[str, int], np.ndarray]
) -> None:
    expected = np.stack([pytorch(text, 32) for text in TEXTS])
    for layer, encoder in of_layer.items():
        np.testing.assert_allclose(encoder.encode(TEXTS), expected[:, layer], atol=1e-5)


def test_window_of_256_tokens_equals_pytorch(pytorch: Callable[[str, int], np.ndarray]) -> None:
    text = " ".join(f"item {number} costs {number * 7} euros;" for number in range(40))
    encoder = MiniLMEncoder()
    assert [len(ids) for _, ids, _ in encoder._windower.windows([text])] == [242]
    np.testing.assert_allclose(encoder.encode([text], live=True)[0], pytorch(text, 256)[3], atol=1e-5)


def test_company_and_place_in_a_batch_change_no_bit(encoder: MiniLMEncoder) -> None:
    together = encoder.encode(TEXTS)
    np.testing.assert_array_equal(encoder.encode(TEXTS[::-1])[::-1], together)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(encoder.encode([text])[0], vector)


@pytest.mark.slow
def test_live_shapes_and_padding_change_next_to_nothing(encoder: MiniLMEncoder) -> None:
    batched = encoder.encode(TEXTS)
    live = np.concatenate([encoder.encode([text], live=True) for text in TEXTS])
    assert np.abs(live - batched).max() < 1e-5
    ids = next(encoder._windower.windows(["hello world"]))[1]
    sums = []
    for length in encoder.shapes.lengths:
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(ids)] = ids
        sums.append(encoder._run(padded, np.array([len(ids)], np.int32))[0] / len(ids))
    assert len(sums) > 2
    for other in sums[1:]:
        assert np.abs(other - sums[0]).max() < 1e-6


def test_texts_without_tokens_get_zeros(encoder: MiniLMEncoder) -> None:
    got = encoder.encode(["", " \n", "x"])
    assert not got[:2].any()
    assert np.abs(got[2]).max() > 0.1


def test_compiled_once_for_each_shape() -> None:
    encoder = MiniLMEncoder(layer=1, max_tokens=24, batch_tokens=96)
    for count in (1, 2, 30):
        encoder.encode(["a b c"] * count + ["word " * 50] * count, live=True)
        encoder.encode(["a b c"] * count)
    assert encoder.shapes.all() == [(rows, n) for n, full in ((16, 6), (20, 4), (24, 4)) for rows in (1, 2, full)]
    assert encoder._sum._cache_size() <= len(encoder.shapes.all())


def test_padding_is_a_small_part_of_what_is_computed() -> None:
    shapes = MiniLMEncoder(layer=0).shapes
    rng = np.random.default_rng(0)
    for middle in (20, 60):
        tokens = np.exp(rng.normal(np.log(middle), 0.4, 4_096)).astype(int).clip(3, 256)  # a call of `embed`
        padded, windows = np.unique([shapes.length(int(n)) for n in tokens], return_counts=True)
        rows = np.array([shapes.rows(int(length), 1, False) for length in padded])
        computed = (-(-windows // rows) * rows * padded).sum()
        assert computed < 1.2 * tokens.sum()


def test_bfloat16_is_another_encoder_close_to_float32(encoder: MiniLMEncoder) -> None:
    rounded = MiniLMEncoder(max_tokens=32, batch_tokens=256, dtype="bfloat16")
    assert rounded.fingerprint.differences(encoder.fingerprint) == "dtype: bfloat16 != float32"
    texts = [text for text in TEXTS if text.strip()]
    got, expected = rounded.encode(texts), encoder.encode(texts)
    norms = np.linalg.norm(got, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((got * expected).sum(axis=1) / norms).min() > 0.9999
    assert 1e-4 < np.abs(got - expected).max() < 0.02
    with pytest.raises(JaxguardError, match=r"dtype: got 'float16', expected one of float32, bfloat16"):
        MiniLMEncoder(dtype="float16")


def test_fingerprint_names_the_settings(of_layer: dict[int, MiniLMEncoder]) -> None:
    three, six = of_layer[3].fingerprint, of_layer[6].fingerprint
    assert three.differences(six) == "layer: 3 != 6"
    assert (three.max_tokens, three.pooling, three.dtype) == (32, "mean", "float32")
    assert len(three.weights) == 16


def test_a_missing_tensor_is_named() -> None:
    with pytest.raises(JaxguardError, match=r"embeddings\.position_embeddings\.weight"):
        map_weights({}, 1)
