"""A tiny router with a fake encoder, and reviewed trajectories, made once for all tests of routers."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from guard_samples import CONFIG as GUARD_CONFIG
from guard_samples import FakeEncoder, calibrated_guard

from jaxguard.decision.policy import Mode
from jaxguard.decision.routing import Routing, shares
from jaxguard.guard import Guard
from jaxguard.route_config import RouteConfig
from jaxguard.router import JointSession, Router
from jaxguard.types import Step, Trajectory
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.routing import RouteHead

CONFIG = RouteConfig(name="tiny", model=GUARD_CONFIG.model)
ROUTES = ("EXECUTE", "ASK", "REFUSE")
TRIGGERS = ("a", "h", "j")


def make_params(model: Any = CONFIG.model, seed: int = 5) -> Params:
    """World model and head, all away from their initial zeros and ones."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: {"world": init_params(model, 0), "head": init_params(model, 0, RouteHead)})

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        spread = rng.normal(size=leaf.shape) * (0.3 if path[-1].key != "kernel" else 1.5 * leaf.shape[0] ** -0.5)
        return np.asarray(spread + (path[-1].key == "scale"), np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def trajectory(number: int, length: int, **metadata: Any) -> Trajectory:
    """Calls on numbered files, of which observations and memory speak; every second step is reviewed."""
    steps = tuple(
        Step(f"tool{(number + t) % 3}", {"path": f"file{t % 3}.txt", "t": t}, f"c{t}",
             f"file{(t + 1) % 3}.txt is {number + t}. Also file{t % 3}.txt is old." if t else "")
        for t in range(length)
    )  # fmt: skip
    reviews = [
        {"step": t, "route": ROUTES[(number + t) % 3], "trigger": TRIGGERS[(number + t) % 3]}
        for t in range(number % 2, length, 2)
    ]
    own = {
        "service": "mail" if number % 2 else "files",
        "memory": f"Never touch file{number % 3}.txt." if number % 3 else "",
        "reviews": reviews,
    }
    return Trajectory(f"t{number}", f"task {number}", steps, source="made", metadata={**own, **metadata})


TRAJECTORIES = [trajectory(i, (0, 1, 5, 18, 3)[i % 5]) for i in range(20)]


@functools.cache
def bare_router() -> Router:
    """Without thresholds."""
    return Router(CONFIG, make_params(), FakeEncoder(), provenance={"data": ["a"], "seconds": 1.5})


@functools.cache
def all_logits() -> dict[str, np.ndarray]:
    return {t.id: logits for _, t, logits in bare_router().logits(TRAJECTORIES)}


@functools.cache
def routed_router() -> Router:
    """tau is the median of all shares; that of mail is higher, that of files lower."""
    q = shares(np.concatenate(list(all_logits().values()))[:, :3]).q
    low, middle, high = np.quantile(q, [0.3, 0.5, 0.7]).tolist()
    taus = {"balanced": middle}
    services = {"balanced": {"mail": high, "files": low}}
    return bare_router().routed(Routing(taus, "balanced", bare_router().source, services))


def fresh_router(encoder: FakeEncoder | None = None) -> Router:
    """The compiled scorer with an encoder of its own, so that a test may spoil it."""
    own = dataclasses.replace(routed_router(), encoder=encoder or FakeEncoder())
    own._scorer = routed_router().scorer
    return own


def configured(**route: bool) -> Router:
    """The same weights, read by other settings of ``route``."""
    config = dataclasses.replace(CONFIG, route=dataclasses.replace(CONFIG.route, **route))
    return Router(config, bare_router().params, FakeEncoder())


@dataclasses.dataclass
class Both:
    """Guard and router over one encoder, with the interface of either."""

    guard: Guard
    router: Router

    @property
    def encoder(self) -> Any:
        return self.router.encoder

    def session(self, instruction: str, metadata: Any = None, mode: Mode = Mode.FAIL_CLOSED) -> JointSession:
        return JointSession(self.guard, self.router, instruction, metadata, mode)


def both() -> Both:
    encoder = FakeEncoder()
    guard = dataclasses.replace(calibrated_guard(), encoder=encoder)
    guard._scorer = calibrated_guard().scorer
    return Both(guard, fresh_router(encoder))
