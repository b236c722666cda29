"""Throughput: scoring stored trajectories, encoding texts, training steps."""

from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxguard.config import MODEL_PRESETS, Config
from jaxguard.features.encoder import load_encoder
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.features.store import FeatureStore
from jaxguard.training.episodes import Episodes, make_batch
from jaxguard.training.state import TrainState, make_step
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
    scorer = Scorer(config, init_params(config, 0))

    def run() -> int:
        def sequences():
            for n, own in zip(lengths, named, strict=True):
                rows = store.rows(own)
                yield Sequence(rows[:n], rows[n:-1], int(rows[-1]))

        return sum(len(risks) for _, risks in scorer.score(sequences(), store.gather))

    assert run() == total
    benchmark.group = "offline scoring, small"
    benchmark.pedantic(run, rounds=1 if smoke else 5, warmup_rounds=0)
    seconds = benchmark.stats.stats.median
    benchmark.extra_info.update(steps=total, new_texts=new, steps_per_s=round(total / seconds))
    say(f"offline scoring small, {new:.0%} of texts new: {total / seconds:,.0f} steps/s from the feature store")


def test_encoder(benchmark, smoke: bool, say) -> None:
    """Texts/s of the embedded encoder on texts of about 20, 60 and 250 tokens."""
    encoder = load_encoder()
    rng = np.random.default_rng(0)
    words = ("order", "server", "letter", "window", "report", "garden", "ticket", "invoice", "meeting", "river")

    def text(count: int) -> str:
        return " ".join(words[i] for i in rng.integers(0, len(words), size=count))

    benchmark.group = "embedded encoder"
    for count in (20,) if smoke else (20, 60, 250):
        batch = [text(count) for _ in range(8 if smoke else 256)]
        encoder.encode(batch)
        begin = time.perf_counter()
        encoder.encode([f"{t} again" for t in batch])
        rate = len(batch) / (time.perf_counter() - begin)
        benchmark.extra_info[f"texts_per_s_{count}_tokens"] = round(rate, 1)
        say(f"embedded encoder, about {count} tokens: {rate:,.0f} texts/s")
    pair = [text(60), text(20)]
    benchmark.pedantic(lambda: encoder.encode(pair, live=True), rounds=3 if smoke else 100, warmup_rounds=2)
    say(f"embedded encoder, one call (observation + action): {benchmark.stats.stats.median * 1e3:.1f} ms")


def test_training_step(benchmark, smoke: bool, say) -> None:
    """Milliseconds of a training step of both stages, `small`, batch 8, 16 steps."""
    config = Config()
    rng = np.random.default_rng(0)
    rows = 64
    table = rng.normal(size=(rows, config.model.embed_dim)).astype(np.float32)
    trajectories = tuple((rng.integers(0, rows, 17), rng.integers(0, rows, 16), 0) for _ in range(8))
    episodes = Episodes(
        table, tuple(map(str, range(8))), trajectories, (np.ones(16, bool),) * 8, np.array([15, -1] * 4), (None,) * 8, 0
    )
    batch = make_batch(episodes, np.arange(8), 8, config.stage2)
    benchmark.group = "training step, small, batch 8, T 16"
    for stage in (1, 2):
        transform, step = make_step(config, stage)
        params = init_params(config.model, 0)
        state = TrainState(params, transform.init(params), jax.numpy.zeros((), jax.numpy.int32))
        state, _ = step(state, batch)
        times = []
        for _ in range(3 if smoke else 30):
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            times.append(time.perf_counter() - begin)
        benchmark.extra_info[f"stage{stage}_ms"] = round(float(np.median(times)) * 1e3, 2)
        say(f"training step small, stage {stage}: {np.median(times) * 1e3:.0f} ms")
    benchmark.pedantic(make_batch, (episodes, np.arange(8), 8, config.stage2), rounds=3 if smoke else 100)
