"""EndToEnd: from an observation and an action to a decision, and where the time of a call goes.

With the embedded encoder from texts; with one of the paper's size, whose weights are random because latency does not
depend on them, from token ids.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from bench.measure import TURN, Unavailable, Variant, describe, lines, make, median_us, take_turns, text
from jaxguard.config import MODEL_PRESETS
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.features.minilm import MiniLMEncoder
from jaxguard.world_model.params import init_params
from jaxguard.world_model.scorer import Scorer


def decide(hazard: float, prefix: float) -> int:
    """What follows from a step's risks."""
    _, evidence = advance(EvidenceState(), hazard, prefix, FusionParams())
    return decide_step(evidence.hazard, evidence.fused, Cutoffs(0.9, 0.8))[0]


@pytest.mark.parametrize(("observed", "proposed"), [(60, 20), (240, 60)])
def test_call(benchmark, smoke: bool, say, one_core: str, observed: int, proposed: int) -> None:
    """An observation and an action of about so many tokens; both are new, so that nothing is known before."""
    if smoke and observed > 60:
        pytest.skip("left out of the smoke run")
    rng = np.random.default_rng(0)
    config, encoder = MODEL_PRESETS["small"], MiniLMEncoder()
    scorer = Scorer(config, init_params(config, 0))
    state = scorer.start(encoder.encode(["Look after the orders."])[0])

    made = itertools.cycle([[text(rng, observed), text(rng, proposed)] for _ in range(500)])

    def texts() -> list[str]:
        return next(made)

    def call(_: int) -> int:
        obs, act = encoder.encode(texts(), live=True)
        return decide(*scorer.step(state, obs, act)[1:])

    call(0)
    variants = {"jax product": Variant("jax", call)}
    take_turns(variants, 20 if smoke else 400)
    vectors = encoder.encode(texts(), live=True)

    rounds = 20 if smoke else 200
    tokenise = median_us(lambda: list(encoder._windower.windows(texts())), rounds)
    split = {
        "tokenise": tokenise,
        "encode": median_us(lambda: encoder.encode(texts(), live=True), rounds) - tokenise,
        "world model": median_us(lambda: scorer.step(state, *vectors), rounds),
        "decide": median_us(lambda: decide(0.3, 0.2), rounds),
    }
    benchmark.group = "EndToEnd, small"
    case = {"size": "small", "encoder": "minilm", "observation_tokens": observed, "action_tokens": proposed}
    benchmark.extra_info.update(
        describe(variants, "EndToEnd", case, items=1, threads=1, turn=TURN, split_us=split, cores=one_core)
    )
    for line in lines(variants, f"EndToEnd small, {observed} + {proposed} tokens"):
        say(line)
    shares = ", ".join(f"{name} {us / sum(split.values()):.1%}" for name, us in split.items())
    say(f"EndToEnd small, {observed} + {proposed} tokens: {shares}")
    benchmark.pedantic(call, (0,), rounds=20)


PAPER_MS = 25.0
"""What the paper reports for a call on an H100."""
SHAPES: dict[str, dict[str, int]] = {
    # As Qwen3-4B, without the layers above the one that is read.
    "Qwen3-4B to layer 31": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 31, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
    "tiny Qwen3": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    },
}  # fmt: skip


def large_encoder(shape: dict[str, int], place: Any) -> Any:
    """The transformer in bfloat16, without the norm behind its last layer: hidden states as the guard reads them."""
    import torch
    from transformers import Qwen3Config, Qwen3Model

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(place):
            model = Qwen3Model(Qwen3Config(**shape, use_cache=False)).eval()
    finally:
        torch.set_default_dtype(default)
    model.norm = torch.nn.Identity()
    return model


def needs(shape: dict[str, int], tokens: int) -> str:
    """What a call with so many tokens takes of a machine, and what the paper's time means for it."""
    model = large_encoder(shape, "meta")
    weights = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    gigabytes, teraflop = 2 * weights / 1e9, 2 * weights * tokens / 1e12
    return (
        f"reads {gigabytes:.1f} GB of bfloat16 weights and computes {teraflop:.2f} TFLOP for {tokens} tokens; "
        f"{PAPER_MS:g} ms take {gigabytes / PAPER_MS * 1e3:,.0f} GB/s and {teraflop / PAPER_MS * 1e3:,.0f} TFLOP/s"
    )


def test_large_encoder(benchmark, smoke: bool, say) -> None:
    """256 new tokens of an observation and 64 of an action: history is in the guard's state, not in the prompt."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from bench.torch_variants import device

    full = "Qwen3-4B to layer 31"
    say(f"EndToEnd, an encoder like {full} {needs(SHAPES[full], 256 + 64)}")
    on_gpu = jax.default_backend() != "cpu"
    if not (smoke or on_gpu):
        pytest.skip("needs a GPU: on a CPU a call takes seconds")
    name = full if on_gpu else "tiny Qwen3"
    shape, place = SHAPES[name], device()
    config = dataclasses.replace(MODEL_PRESETS["paper"], embed_dim=shape["hidden_size"])
    scorer = Scorer(config, init_params(config, 0))
    state = scorer.start(np.zeros(config.embed_dim, np.float32))
    # A row for each of the two, padded on the right.
    ids = np.random.default_rng(0).integers(0, shape["vocab_size"], size=(16, 2, 256))
    mask = torch.from_numpy((np.arange(256) < np.array([[256], [64]])).astype(np.int64)).to(place)
    weigh = (mask / mask.sum(dim=1, keepdim=True)).float()
    model = large_encoder(shape, place)

    def encoder(run: Any) -> Callable[[int], np.ndarray]:
        def encode(i: int) -> np.ndarray:
            with torch.inference_mode():
                tokens = torch.from_numpy(ids[i % 16]).to(place)
                hidden = run(input_ids=tokens, attention_mask=mask).last_hidden_state
                return torch.einsum("rl,rle->re", weigh, hidden.float()).cpu().numpy()

        return encode

    def call(encode: Callable[[int], np.ndarray]) -> Callable[[int], int]:
        return lambda i: decide(*scorer.step(state, *encode(i))[1:])

    encode = encoder(model)
    vectors = encode(0)
    assert np.isfinite(vectors).all()
    variants: dict[str, Variant | Unavailable] = {
        "jax product": make("torch", lambda: call(encode), dtype="bfloat16"),
    }
    if not smoke:
        compiled = encoder(torch.compile(model, mode="reduce-overhead"))
        variants["jax product, encoder compiled"] = make("torch", lambda: call(compiled), dtype="bfloat16")
    rounds = 10 if smoke else 200
    take_turns(variants, rounds)
    split = {
        "encode": median_us(lambda: encode(1), rounds),
        "world model": median_us(lambda: scorer.step(state, *vectors), rounds),
        "decide": median_us(lambda: decide(0.3, 0.2), rounds),
    }
    benchmark.group = "EndToEnd, paper"
    case = {"size": "paper", "encoder": name, "observation_tokens": 256, "action_tokens": 64}
    benchmark.extra_info.update(
        describe(variants, "EndToEnd", case, items=1, threads=torch.get_num_threads(), split_us=split)
    )
    for line in lines(variants, f"EndToEnd paper, {name}, 256 + 64 tokens"):
        say(line)
    ours = variants["jax product"]
    assert isinstance(ours, Variant)
    benchmark.pedantic(ours.run, (0,), rounds=rounds)
