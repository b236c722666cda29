"""A tiny guard with a fake encoder, made once for all tests of guards."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxguard.config import Config, ModelConfig
from jaxguard.decision.calibration import Calibration, calibrate
from jaxguard.decision.evidence import FusionParams, evidence, trajectory_max
from jaxguard.features.fingerprint import EncoderFingerprint
from jaxguard.guard import Guard
from jaxguard.types import Step, Trajectory
from jaxguard.world_model.params import Params, init_params

DIM = 8
CONFIG = Config(
    name="tiny", model=ModelConfig(embed_dim=DIM, deter=8, stoch=2, classes=3, hidden=8, adapter_dim=4, unimix=0.02)
)


class FakeEncoder:
    """A vector from the hash of the text; ``fault`` spoils what it returns."""

    def __init__(self, layer: int = 1):
        self.fingerprint = EncoderFingerprint("fake", "0", layer, "mean", "float32", 16, "windows")
        self.dim = DIM
        self.fault: Callable[[np.ndarray], np.ndarray] = lambda vectors: vectors
        self.seen: list[str] = []

    def encode(self, texts: Sequence[str], on_windows: Any = None, *, live: bool = False) -> np.ndarray:
        self.seen += texts
        return self.fault(np.stack([self.vector(text) for text in texts]))

    def vector(self, text: str) -> np.ndarray:
        if not text:
            return np.zeros(DIM, np.float32)
        seed = hashlib.sha256(text.encode("utf-8")).digest()
        return np.random.default_rng(list(seed)).normal(size=DIM).astype(np.float32)


def make_params() -> Params:
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda: init_params(CONFIG.model, 0))

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        spread = rng.normal(size=leaf.shape) * (0.3 if path[-1].key != "kernel" else 1.5 * leaf.shape[0] ** -0.5)
        return np.asarray(spread + (path[-1].key == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def trajectory(number: int, length: int) -> Trajectory:
    steps = tuple(
        Step(f"tool{(number + t) % 3}", {"n": number, "t": [t]}, f"c{t}", f"saw {number} {t}" if t else "")
        for t in range(length)
    )
    metadata = {"domain": "mail" if number % 2 else "bank"}
    return Trajectory(f"t{number}", f"task {number}", steps, unsafe=False, metadata=metadata)


TRAJECTORIES = [trajectory(i, (0, 1, 5, 18, 3)[i % 5]) for i in range(40)]


@functools.cache
def bare_guard() -> Guard:
    """Without thresholds."""
    return Guard(CONFIG, make_params(), FakeEncoder(), provenance={"data": ["a"], "seconds": 1.5})


@functools.cache
def calibrated_guard() -> Guard:
    return bare_guard().calibrated(thresholds(bare_guard()))


def fresh_guard() -> Guard:
    """The calibrated one's compiled scorer with an encoder of its own, so that a test may spoil it."""
    own = dataclasses.replace(calibrated_guard(), encoder=FakeEncoder())
    own._scorer = calibrated_guard().scorer
    return own


def thresholds(guard: Guard, **changes: Any) -> Calibration:
    """Thresholds that the guard's own trajectories cross now and then, and on which no score lies.

    One that lies on a threshold would be told apart by rounding, which live steps and archives do not share.
    """
    by_position = {position: risks for position, _, risks in guard.risks(TRAJECTORIES)}
    risks = np.concatenate([by_position[i] for i in range(len(TRAJECTORIES))])
    lengths = [len(t) for t in TRAJECTORIES]
    fused = evidence(risks[:, 0], risks[:, 1], lengths, FusionParams()).fused
    options: dict[str, Any] = {
        "alpha_hold": 0.45, "alpha_block": 0.3, "fusion": FusionParams(), "weights": guard.weights,
        "encoder": guard.encoder.fingerprint.short, "groups": [t.metadata["domain"] for t in TRAJECTORIES],
        "group_key": "domain",
    }  # fmt: skip
    maxima = (trajectory_max(values, lengths) + 1e-5 for values in (risks[:, 0], fused))
    return calibrate(*maxima, **options | changes)


def replay(session: Any, steps: Sequence[Step]) -> list[Any]:
    """Checks and commits every step."""
    verdicts = []
    for step in steps:
        verdicts.append(session.check(step.observation, step.tool, step.arguments, call_id=step.call_id))
        session.commit(step.call_id)
    return verdicts


def fail(_: np.ndarray) -> np.ndarray:
    """A fault for :class:`FakeEncoder`."""
    raise RuntimeError("no connection")
