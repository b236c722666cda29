"""Offline: scoring stored trajectories, and texts that the embedded encoder encodes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from bench.measure import Unavailable, Variant, describe, make, take_turns, text
from jaxguard.config import MODEL_PRESETS, EncoderConfig, ModelConfig
from jaxguard.features.encoder import load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
from jaxguard.world_model.packing import Texts, sequences
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.scorer import Scorer

FINGERPRINT = EncoderFingerprint("bench", "none", 0, "mean", "float32", 1, "none")


Found = dict[int, np.ndarray]

LENGTHS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "3 to 40 steps": lambda rng, n: rng.integers(3, 41, n),
    "16 steps each": lambda rng, n: np.full(n, 16),
    "1 to 400 steps": lambda rng, n: np.exp(rng.normal(np.log(8), 1.1, n)).astype(int).clip(1, 400),  # half below 9
}


def archive(path: Path, config: ModelConfig, lengths: np.ndarray, new: float) -> tuple[FeatureStore, list[Texts]]:
    """A store of random vectors, and the texts of every trajectory.

    ``new`` is the share of texts that were not there before.
    """
    rng = np.random.default_rng(1)

    def draw(kind: str, size: int) -> np.ndarray:
        is_new = rng.random(size) < new
        is_new[0] = True
        count = is_new.cumsum()
        back = (rng.random(size) * np.minimum(count, 2_000)).astype(int)  # one seen before is one of the latest
        return np.array([f"{kind} {i}" for i in count - 1 - np.where(is_new, 0, back)])

    total = int(lengths.sum())
    obs, act, ins = draw("observation", total), draw("action", total), draw("instruction", len(lengths))
    texts = np.unique(np.concatenate([obs, act, ins])).tolist()
    store = FeatureStore.create_or_open(path, FINGERPRINT, config.embed_dim)
    store.add(texts, rng.normal(size=(len(texts), config.embed_dim)).astype(np.float32))
    return store, [
        Texts(obs[end - n : end].tolist(), act[end - n : end].tolist(), [], str(e))
        for n, end, e in zip(lengths, lengths.cumsum(), ins, strict=True)
    ]


def torch_loop(config: ModelConfig, params: Params, store: FeatureStore, texts: list[Texts], batch: int, half: bool):
    """What a script would do: all vectors in memory at once, trajectories sorted by length, padded batches."""
    import torch

    from bench.torch_twin import offline
    from bench.torch_twin.weights import twin
    from bench.torch_variants import device

    model = twin(config, params).to(device())

    def run(_: int) -> Found:
        items = [(own.obs, own.act, own.ins) for own in sequences(texts, store.rows)]
        with torch.autocast(device().type, torch.bfloat16, enabled=half):
            return dict(enumerate(offline.score(model, store.gather(np.arange(store.row_count)), items, batch)))

    return run


# A quarter of new texts is the share of AgentDyn, and few real sets have more.
@pytest.mark.parametrize(
    ("size", "lengths", "new", "batch"),
    [
        *(("small", "3 to 40 steps", 0.25, batch) for batch in (32, 128, 256)),
        ("small", "3 to 40 steps", 1.0, 128),
        ("small", "16 steps each", 0.25, 128),
        ("small", "1 to 400 steps", 0.25, 128),
        ("paper", "3 to 40 steps", 0.25, 128),
    ],
)
def test_score_from_store(
    benchmark, smoke: bool, say, tmp_path: Path, size: str, lengths: str, new: float, batch: int
) -> None:
    """Steps/s from a feature store on disk; ``batch`` are the product's lanes (128 is what it takes)."""
    if smoke and (new, batch) != (1.0, 128):
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    count = 100 if smoke else 500 if size == "paper" else 2_500
    drawn = LENGTHS[lengths](np.random.default_rng(0), count)
    total = int(drawn.sum())
    store, texts = archive(tmp_path / "store", config, drawn, new)
    params = init_params(config, 0)
    scorer = Scorer(config, params)

    def product(_: int, scorer: Scorer = scorer) -> Found:
        return dict(scorer.score(sequences(texts, store.rows), store.gather, lanes=batch))

    def torch_eager(half: bool) -> Callable[[int], Found]:
        return torch_loop(config, params, store, texts, batch, half)

    variants: dict[str, Variant | Unavailable] = {"jax product": make("jax", lambda: product)}
    if not smoke:
        variants["torch eager"] = make("torch", partial(torch_eager, False))
    if not smoke and (lengths, new, batch) == ("3 to 40 steps", 0.25, 128):
        rounded = Scorer(config, params, precision="bfloat16")
        variants["jax product, bfloat16"] = make("jax", lambda: partial(product, scorer=rounded), dtype="bfloat16")
        variants["torch eager, bfloat16"] = make("torch", partial(torch_eager, True), dtype="bfloat16")
    expected = product(0)
    assert [len(expected[i]) for i in range(count)] == drawn.tolist()
    for name, variant in variants.items():
        if name == "torch eager" and isinstance(variant, Variant):  # bfloat16: tests/test_default_guard.py
            found = variant.run(0)
            far = [np.abs(found[i] - risks).max(axis=1) > 1e-5 for i, risks in expected.items()]
            # Where two classes of a latent are equally probable, rounding decides, and a run goes on differently.
            assert np.concatenate(far).mean() < 1e-3, name
    take_turns(variants, 1 if smoke else 7, turn=1, warm_up=0)
    cores = len(os.sched_getaffinity(0))
    benchmark.group = f"Offline, {size}"
    case = {"size": size, "lengths": lengths, "new_texts": new, "batch": batch}
    benchmark.extra_info.update(describe(variants, "Offline", case, items=total, threads=cores, turn=1))
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            rate = total / np.median(variant.rounds_us) * 1e6
            say(f"Offline {size}, {lengths}, {new:.0%} of texts new, batch {batch}: {name} {rate:,.0f} steps/s")
    benchmark.pedantic(product, (0,), rounds=1)


def _given(encode: Callable[[list[str]], np.ndarray], batch: list[str], _: int) -> np.ndarray:
    return encode(batch)


def torch_encoder(layer: int, half: bool = False) -> Callable[[list[str]], np.ndarray]:
    """The same model and tokenizer in PyTorch: only the layers that are read, texts sorted by length, batches of 1,024
    tokens without padding but to the longest."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    from jaxguard.features.minilm import _model_folder

    folder = _model_folder()
    model = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    model.encoder.layer = model.encoder.layer[:layer]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()

    def encode(texts: list[str]) -> np.ndarray:
        ids = [found.ids for found in tokenizer.encode_batch_fast(texts)]
        out = np.empty((len(texts), 384), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(ids[i]))
        while order:
            rows = max(1, 1024 // len(ids[order[-1]]))
            part, order = order[-rows:], order[:-rows]
            length = len(ids[part[-1]])
            mask = torch.tensor([[1] * len(ids[i]) + [0] * (length - len(ids[i])) for i in part])
            given = torch.tensor([ids[i] + [0] * (length - len(ids[i])) for i in part])
            with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                state = model(given, attention_mask=mask).last_hidden_state
                out[part] = ((state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
        return out

    return encode


def test_encoder(benchmark, smoke: bool, say) -> None:
    """Texts/s of the embedded encoder on texts of about 20, 60 and 150 tokens."""
    encoder = load_encoder()
    rng = np.random.default_rng(0)
    benchmark.group = "embedded encoder"
    for count in (20,) if smoke else (20, 60, 150):  # none is longer than a window
        batch = [text(rng, count) for _ in range(8 if smoke else 256)]
        variants: dict[str, Variant | Unavailable] = {
            "jax product": make("jax", lambda batch=batch: partial(_given, encoder.encode, batch)),
        }
        if not smoke:
            variants["torch eager"] = make("torch", lambda batch=batch: partial(_given, torch_encoder(3), batch))
            variants["jax product, bfloat16"] = make(
                "jax",
                lambda batch=batch: partial(_given, load_encoder(EncoderConfig(dtype="bfloat16")).encode, batch),
                dtype="bfloat16",
            )
            variants["torch eager, bfloat16"] = make(
                "torch", lambda batch=batch: partial(_given, torch_encoder(3, half=True), batch), dtype="bfloat16"
            )
        expected = encoder.encode(batch)
        for name, variant in variants.items():
            if isinstance(variant, Variant):
                atol = 0.02 if name.endswith("bfloat16") else 1e-4
                np.testing.assert_allclose(variant.run(0), expected, atol=atol, err_msg=name)
        take_turns(variants, 1 if smoke else 5, turn=1, warm_up=0)
        for name, variant in variants.items():
            if isinstance(variant, Variant):
                rate = len(batch) / np.median(variant.rounds_us) * 1e6
                benchmark.extra_info[f"{name}, texts_per_s_{count}_tokens"] = round(rate, 1)
                say(f"embedded encoder, about {count} tokens: {name} {rate:,.0f} texts/s")
    pair = [text(rng, 60), text(rng, 20)]
    benchmark.pedantic(lambda: encoder.encode(pair, live=True), rounds=3 if smoke else 100, warmup_rounds=2)
    say(f"embedded encoder, one call (observation + action): {benchmark.stats.stats.median * 1e3:.1f} ms")
