"""The whole path at toy size: a hash for an encoder, a model of 8 units, three training steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import resource
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxguard import cli
from jaxguard.config import Config, EncoderConfig
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.training import loop
from jaxguard.training.state import make_step, make_validation
from jaxguard.world_model.params import init_params

DIM = 12
SIZES = (
    f"model.embed_dim={DIM}",
    *("model.deter=8", "model.stoch=2", "model.classes=3", "model.hidden=8", "model.adapter_dim=4"),
    *("stage1.steps=3", "stage2.steps=3", "train.checkpoint_every=2", "train.validate_every=2", "train.max_steps=16"),
    *("data.drift.trajectories=60", "evaluation.resamples=40", "evaluation.timelines=1"),
    *("data.split.train=0.3", "data.split.validation=0.1", "data.split.calibration=0.4", "data.split.test=0.2"),
    *("decision.alpha_hold=0.3", "decision.alpha_block=0.2"),
)


class HashEncoder:
    """A vector from the hash of a text and the layer; remembers what it was given."""

    seen: list[str] = []  # noqa: RUF012

    def __init__(self, layer: int = 1):
        self.fingerprint = EncoderFingerprint("hash", "0", layer, "mean", "float32", 16, "windows")
        self.dim = DIM

    def encode(self, texts: Sequence[str], on_windows: Any = None, *, live: bool = False) -> np.ndarray:
        HashEncoder.seen += texts
        if on_windows is not None:
            on_windows(len(texts))
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> np.ndarray:
        if not text:
            return np.zeros(DIM, np.float32)
        seed = hashlib.sha256(f"{self.fingerprint.layer} {text}".encode()).digest()
        return np.random.default_rng(list(seed)).normal(size=DIM).astype(np.float32)


def hash_encoder(settings: EncoderConfig | None = None) -> HashEncoder:
    """In place of ``load_encoder``; ``encoder.layer`` makes another one."""
    return HashEncoder((settings.layer if settings else None) or 1)


@contextlib.contextmanager
def at_toy_size(cache: Path) -> Iterator[None]:
    """The hash encoder in place of the real ones, and compiled functions shared and hardly optimised."""
    options = {
        "jax_compilation_cache_dir": str(cache),
        "jax_persistent_cache_min_compile_time_secs": 0.1,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in options}

    def configure(values: dict[str, Any]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    with pytest.MonkeyPatch.context() as patch:
        for module in ("jaxguard.features.encoder", "jaxguard.guard", "jaxguard.inputs", "jaxguard.experiments.runs"):
            patch.setattr(f"{module}.load_encoder", hash_encoder)
        patch.setattr(loop, "make_step", _shared(make_step))
        patch.setattr(loop, "make_validation", _shared(make_validation))
        patch.setattr("jaxguard.run.init_params", _initial)
        configure(options)
        yield
    configure(before)


@functools.cache
def _made(maker: Callable[..., Any], stage: int, *parts: Any) -> Any:
    model, stage1, stage2, train = parts
    return maker(Config(model=model, stage1=stage1, stage2=stage2, train=train), stage)


def _shared(maker: Callable[..., Any]) -> Callable[..., Any]:
    """One compiled function for all runs of equal sizes, wherever their data and folders are."""

    def make(config: Config, stage: int) -> Any:
        # The seed orders batches and draws the start, halving comes after: no parts of a step.
        train = dataclasses.replace(config.train, seed=0, half=False)
        return _made(maker, stage, config.model, config.stage1, config.stage2, train)

    return make


_initial = functools.cache(init_params)


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed."""

    status: int
    out: str
    err: str


def command(*arguments: object) -> Outcome:
    """Runs a command line in this process; an exception that escapes it fails the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([str(a) for a in arguments])
    return Outcome(status, out.getvalue(), err.getvalue())


def done(*arguments: object) -> Outcome:
    """A command that must succeed."""
    outcome = command(*arguments)
    assert outcome.status == 0, outcome.err
    return outcome


def refused(*arguments: object) -> str:
    """The message of a command that must be refused: exit status 1 and nothing but the message on stderr."""
    outcome = command(*arguments)
    assert outcome.status == 1, outcome
    lines = [line for line in outcome.err.splitlines() if line.strip()]
    message = lines[-1]
    assert message.startswith(f"jaxguard {arguments[0]}: "), outcome.err
    assert "Traceback" not in outcome.err
    return message


@dataclass(frozen=True)
class SmallRun:
    """A finished run with its inputs, and what the commands said."""

    root: Path
    said: dict[str, Outcome]

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def guard(self) -> Path:
        return self.run / "guard"

    def settings(self, *more: str) -> list[str]:
        """Overrides of ``train`` for these inputs."""
        return [f"data.trajectories=[{self.data}]", f"data.store={self.store}", *SIZES, *more]

    def train(self, out: Path, *more: str, fresh: bool = False) -> tuple[object, ...]:
        """Arguments of a ``train`` command."""
        return ("train", "--quiet", "--out", out, *(["--fresh"] if fresh else []), *self.settings(*more))


def make_small_run(root: Path) -> SmallRun:
    """Generate, embed, train, calibrate, evaluate."""
    made = SmallRun(root, {})
    made.said["generate"] = done("generate", "--out", made.data, *SIZES)
    made.said["embed"] = done("embed", "--quiet", "--trajectories", made.data, "--store", made.store, *SIZES)
    made.said["train"] = done(*made.train(made.run))
    made.said["calibrate"] = done("calibrate", made.run)
    made.said["evaluate"] = done("evaluate", made.run)
    return made


@contextlib.contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a full disk: the system refuses bytes beyond ``size``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def chat(name: object, *tools: str, answer: str = "ok", arguments: str = "{}") -> dict[str, Any]:
    """A chat record with one call for each of ``tools``."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"please do {name}"}]
    for i, tool in enumerate(tools):
        call = {"id": f"{i}", "type": "function", "function": {"name": tool, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"{i}", "content": answer})
    return {"id": f"{name}", "messages": [*messages, {"role": "assistant", "content": "done"}]}


def native(name: str, *tools: str, **more: Any) -> dict[str, Any]:
    """A record in jaxguard's own schema."""
    return {"jaxguard": 1, "id": name, "instruction": f"do {name}", "steps": [{"tool": t} for t in tools], **more}


def lines(path: Path, *records: object) -> Path:
    """A file with one record a line; text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return path
