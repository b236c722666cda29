"""Offline: scoring stored trajectories, and texts that the embedded encoder encodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.measure import Unavailable, Variant, describe, lines, make, take_turns, text
from jaxguard.config import MODEL_PRESETS
from jaxguard.features.encoder import load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
from jaxguard.world_model.packing import Sequence
from jaxguard.world_model.params import init_params
from jaxguard.world_model.scorer import Scorer

FINGERPRINT = EncoderFingerprint("bench", "none", 0, "mean", "float32", 1, "none")


@pytest.mark.parametrize("new", [1.0, 0.25], ids=["new", "repeated"])
def test_score_from_store(benchmark, smoke: bool, say, tmp_path: Path, new: float) -> None:
    """Steps/s of the `small` model from a feature store on disk, lengths 3 to 40.

    ``new`` is the share of texts not seen before; a quarter is that of AgentDyn, and few real sets have more.
    """
    config = MODEL_PRESETS["small"]
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 41, size=100 if smoke else 5_000)
    total = int(lengths.sum())

    def draw(kind: str, size: int) -> np.ndarray:
        is_new = rng.random(size) < new
        is_new[0] = True
        count = is_new.cumsum()
        back = (rng.random(size) * np.minimum(count, 2_000)).astype(int)  # one seen before is one of the latest
        return np.array([f"{kind} {i}" for i in count - 1 - np.where(is_new, 0, back)])

    obs, act, ins = draw("observation", total), draw("action", total), draw("instruction", len(lengths))
    texts = np.unique(np.concatenate([obs, act, ins])).tolist()
    store = FeatureStore.create_or_open(tmp_path / "store", FINGERPRINT, config.embed_dim)
    store.add(texts, rng.normal(size=(len(texts), config.embed_dim)).astype(np.float32))
    ends = lengths.cumsum()
    named = [
        [*obs[end - n : end].tolist(), *act[end - n : end].tolist(), str(e)]
        for n, end, e in zip(lengths, ends, ins, strict=True)
    ]
    params = init_params(config, 0)
    scorer = Scorer(config, params)

    Found = dict[int, np.ndarray]

    def product(_: int) -> Found:
        def sequences():
            for n, own in zip(lengths, named, strict=True):
                rows = store.rows(own)
                yield Sequence(rows[:n], rows[n:-1], int(rows[-1]))

        return dict(scorer.score(sequences(), store.gather))

    def torch_loop(batch: int) -> Callable[[], Callable[[int], Found]]:
        def build() -> Callable[[int], Found]:
            from bench.torch_twin import offline
            from bench.torch_twin.weights import twin
            from bench.torch_variants import use_cores

            use_cores()
            model = twin(config, params)

            def run(_: int) -> Found:
                # All vectors at once, in memory: what a script would do with an archive of this size.
                rows = [store.rows(own) for own in named]
                items = [(r[:n], r[n:-1], int(r[-1])) for n, r in zip(lengths, rows, strict=True)]
                return dict(enumerate(offline.score(model, store.gather(np.arange(len(texts))), items, batch)))

            return run

        return build

    variants: dict[str, Variant | Unavailable] = {"jax product": make("jax", lambda: product)}
    if not smoke:
        variants |= {f"torch eager, batch {b}": make("torch", torch_loop(b)) for b in (32, 128)}
    expected = product(0)
    assert sum(map(len, expected.values())) == total
    for name, variant in variants.items():
        if name != "jax product" and isinstance(variant, Variant):
            found = variant.run(0)
            far = [np.abs(found[i] - risks).max(axis=1) > 1e-5 for i, risks in expected.items()]
            # Where two classes of a latent are equally probable, rounding decides, and a run goes on differently.
            assert np.concatenate(far).mean() < 1e-3, name
    take_turns(variants, 1 if smoke else 5, turn=1)
    cores = len(os.sched_getaffinity(0))
    benchmark.group = "Offline, small"
    case = {"size": "small", "new_texts": new}
    benchmark.extra_info.update(describe(variants, "Offline", case, items=total, threads=cores, turn=1))
    for line in lines(variants, f"Offline small, {new:.0%} of texts new"):
        say(line)
    for name, variant in variants.items():
        if isinstance(variant, Variant):
            rate = total / np.median(variant.rounds_us) * 1e6
            say(f"Offline small, {new:.0%} of texts new: {name} {rate:,.0f} steps/s from the feature store")
    benchmark.pedantic(product, (0,), rounds=1)


def test_encoder(benchmark, smoke: bool, say) -> None:
    """Texts/s of the embedded encoder on texts of about 20, 60 and 250 tokens."""
    encoder = load_encoder()
    rng = np.random.default_rng(0)
    benchmark.group = "embedded encoder"
    for count in (20,) if smoke else (20, 60, 250):
        batch = [text(rng, count) for _ in range(8 if smoke else 256)]
        encoder.encode(batch)
        begin = time.perf_counter()
        encoder.encode([f"{t} again" for t in batch])
        rate = len(batch) / (time.perf_counter() - begin)
        benchmark.extra_info[f"texts_per_s_{count}_tokens"] = round(rate, 1)
        say(f"embedded encoder, about {count} tokens: {rate:,.0f} texts/s")
    pair = [text(rng, 60), text(rng, 20)]
    benchmark.pedantic(lambda: encoder.encode(pair, live=True), rounds=3 if smoke else 100, warmup_rounds=2)
    say(f"embedded encoder, one call (observation + action): {benchmark.stats.stats.median * 1e3:.1f} ms")
