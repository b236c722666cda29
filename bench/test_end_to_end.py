"""EndToEnd: texts in, decision out, with the embedded encoder; and where the time of a call goes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np
import pytest

from bench.measure import TURN, Variant, describe, lines, take_turns, text
from jaxguard.config import MODEL_PRESETS
from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
from jaxguard.decision.policy import Cutoffs, decide_step
from jaxguard.features.minilm import MiniLMEncoder
from jaxguard.world_model.params import init_params
from jaxguard.world_model.scorer import Scorer


@pytest.mark.parametrize(("observed", "proposed"), [(60, 20), (240, 60)])
def test_call(benchmark, smoke: bool, say, one_core: str, observed: int, proposed: int) -> None:
    """An observation and an action of about so many tokens; both are new, so that nothing is known before."""
    if smoke and observed > 60:
        pytest.skip("left out of the smoke run")
    rng = np.random.default_rng(0)
    config, encoder = MODEL_PRESETS["small"], MiniLMEncoder()
    scorer = Scorer(config, init_params(config, 0))
    state = scorer.start(encoder.encode(["Look after the orders."])[0])
    fusion, cutoffs = FusionParams(), Cutoffs(0.9, 0.8)

    made = itertools.cycle([[text(rng, observed), text(rng, proposed)] for _ in range(500)])

    def texts() -> list[str]:
        return next(made)

    def decide(hazard: float, prefix: float) -> int:
        _, evidence = advance(EvidenceState(), hazard, prefix, fusion)
        return decide_step(evidence.hazard, evidence.fused, cutoffs)[0]

    def call(_: int) -> int:
        obs, act = encoder.encode(texts(), live=True)
        return decide(*scorer.step(state, obs, act)[1:])

    call(0)
    variants = {"jax product": Variant("jax", call)}
    take_turns(variants, 20 if smoke else 400)
    vectors = encoder.encode(texts(), live=True)

    def median_us(run: Callable[[], object]) -> float:
        times = []
        for _ in range(20 if smoke else 200):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return float(np.median(times)) * 1e6

    tokenise = median_us(lambda: list(encoder._windower.windows(texts())))
    split = {
        "tokenise": tokenise,
        "encode": median_us(lambda: encoder.encode(texts(), live=True)) - tokenise,
        "world model": median_us(lambda: scorer.step(state, *vectors)),
        "decide": median_us(lambda: decide(0.3, 0.2)),
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
