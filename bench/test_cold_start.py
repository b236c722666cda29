"""ColdStart: from the start of a process to its first decision, and where the time goes; encoding apart.

Every round is a new process on one core. The first one of the cached variant fills the persistent compilation cache and
is not counted.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import serialize_executable
from safetensors.numpy import save_file

from bench.measure import Unavailable, Variant, describe, lines
from jaxguard.config import MODEL_PRESETS
from jaxguard.world_model.params import flatten, init_params
from jaxguard.world_model.scorer import Scorer

COMMON = """
import sys, time
import numpy as np
size, folder = sys.argv[1:3]
vectors = np.random.default_rng(0).normal(size=(3, int(sys.argv[3]))).astype(np.float32)
def decide(hazard, prefix):
    from jaxguard.decision.evidence import EvidenceState, FusionParams, advance
    from jaxguard.decision.policy import Cutoffs, decide_step
    _, e = advance(EvidenceState(), hazard, prefix, FusionParams())
    print(f"{hazard:.6f}", decide_step(e.hazard, e.fused, Cutoffs(0.9, 0.8))[0].name, flush=True)
"""
PRODUCT = """
from safetensors.numpy import load_file
from jaxguard.config import MODEL_PRESETS
from jaxguard.world_model.params import unflatten
from jaxguard.world_model.scorer import Scorer
config = MODEL_PRESETS[size]
scorer = Scorer(config, unflatten(load_file(folder + "/flax.safetensors"), config))
state = scorer.start(vectors[0])
decide(*scorer.step(state, vectors[1], vectors[2])[1:])
"""
SERIALIZED = """
import pickle
from jax.experimental import serialize_executable
start, live = (serialize_executable.deserialize_and_load(*p) for p in pickle.load(open(folder + "/compiled", "rb")))
carry, given = start(vectors[:1])
decide(*map(float, np.asarray(live(carry, given, vectors[1:, None])[2])[0]))
"""
TORCH = """
import torch
from safetensors.torch import load_file
from bench.torch_twin.model import RSSM
from jaxguard.config import MODEL_PRESETS
torch.set_num_threads(1)
model = RSSM(MODEL_PRESETS[size]).eval()
model.load_state_dict(load_file(folder + "/torch.safetensors"))
with torch.inference_mode():
    x = torch.from_numpy(vectors)
    decide(*model(model.start(x[:1]), x[1:2], x[2:])[1][0].tolist())
"""


def first_decision(code: str, arguments: list[str], cache: Path | None) -> tuple[float, str]:
    """Seconds from spawning a process to its first decision, and what it said."""
    own = {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if cache else {}
    # The parent's cache, if any, must not help.
    kept = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", COMMON + code, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": str(Path(__file__).parents[1]), **own},
    ) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        seconds = time.perf_counter() - begin
    assert process.returncode == 0, said
    return seconds, said


def serialize(config_name: str, path: Path) -> None:
    """The product's two live functions, compiled for this machine, as bytes."""
    config = MODEL_PRESETS[config_name]
    scorer = Scorer(config, init_params(config, 0))
    vector = np.zeros((1, config.embed_dim), np.float32)
    start = jax.jit(lambda ins: tuple(scorer._start(ins)))
    carry, given = start(vector)
    state = type(scorer.start(vector[0]))
    live = jax.jit(lambda carry, given, x: (*(after := scorer._live(state(carry, given), x))[0], after[1]))
    compiled = start.lower(vector).compile(), live.lower(carry, given, np.stack([vector, vector])).compile()
    path.write_bytes(pickle.dumps([serialize_executable.serialize(own) for own in compiled]))


@pytest.mark.parametrize("size", ["small", "paper"])
def test_first_decision(benchmark, smoke: bool, say, one_core: str, tmp_path: Path, size: str) -> None:
    if smoke:
        pytest.skip("left out of the smoke run")
    config = MODEL_PRESETS[size]
    params = init_params(config, 0)
    save_file(flatten(params), tmp_path / "flax.safetensors")
    serialize(size, tmp_path / "compiled")
    programs = {
        "jax product": (PRODUCT, None),
        "jax product, compilation cache": (PRODUCT, tmp_path / "cache"),
        "jax serialized executable": (SERIALIZED, None),
    }
    variants: dict[str, Variant | Unavailable] = {name: Variant("jax", lambda _: None) for name in programs}
    try:
        from bench.torch_twin import weights
    except ModuleNotFoundError as error:
        variants["torch eager"] = Unavailable("torch", f"not installed: {error.name}")
    else:
        weights.save(params, tmp_path / "torch.safetensors")
        programs["torch eager"], variants["torch eager"] = (TORCH, None), Variant("torch", lambda _: None)
    arguments, answers = [size, str(tmp_path), str(config.embed_dim)], []
    first_decision(PRODUCT, arguments, tmp_path / "cache")
    for _ in range(7):
        for name, (code, cache) in programs.items():
            seconds, said = first_decision(code, arguments, cache)
            variants[name].rounds_us.append(seconds * 1e6)  # type: ignore[union-attr]
            answers.append(float(said.split()[0]))
    assert np.ptp(answers) < 1e-5, answers
    benchmark.group = f"ColdStart, {size}"
    case = {"size": size}
    benchmark.extra_info.update(describe(variants, "ColdStart", case, items=1, threads=1, turn=1, cores=one_core))
    for line in lines(variants, f"ColdStart {size}"):
        say(line)
    benchmark.pedantic(first_decision, (PRODUCT, arguments, tmp_path / "cache"), rounds=1)
