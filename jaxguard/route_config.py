"""Configuration of a router's training: as :mod:`jaxguard.config`, with a routing stage in place of the risk stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxguard.config import (
    LARGEST_SIZE,
    SEED,
    DataConfig,
    EncoderConfig,
    EvaluationConfig,
    ModelConfig,
    Stage1Config,
    TrainConfig,
    require_regularisation,
)
from jaxguard.settings import (
    load_settings,
    require,
    require_at_least,
    require_at_most,
    require_positive,
    require_seed,
)


@dataclass(frozen=True)
class CorpusConfig:
    """The generator of reviewed service steps: how many trajectories, from which seed."""

    trajectories: int = 11_000
    seed: int = SEED

    def __post_init__(self) -> None:
        require_seed(self.seed, "corpus")
        require_at_least(self, "corpus", 1, "trajectories")


@dataclass(frozen=True)
class RouteStageConfig:
    """Training on reviews: cross-entropy of three logits at the reviewed steps.

    ``trigger_scale`` weighs that of the triggers beside it.

    ``world_model_scale`` multiplies the learning rate of the world model's modules on the path to the head;
    ``train_core`` puts the GRU core among them. ``memory``, ``grounding`` and ``recurrence`` take away, where false,
    the user's memory, what was said of the things that a call names, and the recurrent state.
    """

    steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 5e-4
    world_model_scale: float = 1.0
    train_core: bool = True
    clip_norm: float = 1.0
    schedule: str = "cosine"
    input_dropout: float = 0.1
    weight_decay: float = 0.01
    trigger_scale: float = 0.3
    memory: bool = True
    grounding: bool = True
    recurrence: bool = True

    def __post_init__(self) -> None:
        require_regularisation(self, "route")
        require_at_least(self, "route", 0, "world_model_scale", "trigger_scale")
        require_at_least(self, "route", 1, "steps", "batch_size")
        require_at_most(self, "route", LARGEST_SIZE, "batch_size")
        require_positive(self, "route", "learning_rate", "clip_norm")


@dataclass(frozen=True)
class RoutingConfig:
    """How tau is chosen, and what is held out.

    Attributes:
        point: Operating point that a router works at: ``"autonomous"``, ``"balanced"`` or ``"conservative"``.
        limit: Largest over-ask rate of the autonomous, and under-ask rate of the conservative point.
        least: Reviewed EXECUTE steps, and ASK steps, that a service needs for a tau of its own.
        delta: Share of cases in which the confidence statements may be wrong.
        unseen: What is neither trained on nor used to choose tau, as ``field=value`` of the metadata, e.g.
            ``"service=mail"``; each is reported by itself.
    """

    point: str = "balanced"
    limit: float = 0.05
    least: int = 30
    delta: float = 0.05
    unseen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        points = ("autonomous", "balanced", "conservative")
        require(self.point in points, "routing.point", self.point, f"one of {', '.join(points)}")
        for name in ("limit", "delta"):
            share = getattr(self, name)
            require(1e-9 <= share <= 1 - 1e-9, f"routing.{name}", share, "a share from 1e-9 to 1 - 1e-9")
        require_at_least(self, "routing", 1, "least")
        for entry in self.unseen:
            require("=" in entry[1:-1], "routing.unseen", entry, "field=value, e.g. service=mail")

    def held_out(self, metadata: Mapping[str, Any]) -> list[str]:
        """The entries of ``unseen`` that a trajectory falls under."""
        split = (entry.partition("=") for entry in self.unseen)
        return [f"{name}={value}" for name, _, value in split if metadata.get(name) == value]


@dataclass(frozen=True)
class RouteConfig:
    """One router, from reviewed trajectories to report."""

    name: str = "router"
    data: DataConfig = field(default_factory=DataConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    stage1: Stage1Config = field(default_factory=Stage1Config)
    route: RouteStageConfig = field(default_factory=RouteStageConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        full = self.model.successor and self.model.heads == "both"
        require(full, "model", "successor or heads taken away", "neither: a router reads the successor, and no risks")
        require(not self.model.grounded, "model.grounded", True, "false: a router has texts of its own for that")
        require(not self.train.half, "train.half", True, "false: bundles of routers hold full precision")


def load_route_config(path: str | Path | None, overrides: Sequence[str] = ()) -> RouteConfig:
    """A router's experiment from a YAML file (or the defaults) and overrides."""
    return load_settings(path, overrides, RouteConfig)
