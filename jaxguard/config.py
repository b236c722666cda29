"""Experiment configuration: frozen dataclasses, one YAML file, dotted overrides.

A config file names only what differs from the defaults below, which are the paper's where the paper
gives a value. ``recipe: paper`` (or ``recipe=paper``) takes back what was added to it, see :data:`RECIPES`.
Unknown keys, wrong types and impossible values are errors that name the key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxguard.settings import (
    load_settings,
    require,
    require_at_least,
    require_at_most,
    require_positive,
    require_seed,
)

SEED = 20260701
# Above these a value can only be a mistake, which should not end in an allocation that fails hours later.
LARGEST_SIZE = 65_536
LARGEST_WINDOW = 10_000
LARGEST_RESAMPLES = 1_000_000

PRECISIONS = ("float32", "bfloat16")
"""Of the factors of products where texts are encoded or archives scored; sums are float32."""


@dataclass(frozen=True)
class SplitConfig:
    """How trajectories are divided; groups never stand on both sides.

    ``validation`` chooses checkpoints and fusion weights, ``calibration`` sets thresholds, ``test`` is only
    reported. ``group_by`` is ``"group"`` (the reader's key) or the name of a metadata field; ``join_actions``
    also keeps trajectories with equal actions together. ``file`` reuses the ids that an earlier run wrote.
    With ``data.unseen``, ``local`` safe trajectories of it make the calibration part and its other groups the
    test part; ``train`` and ``validation`` then share the rest in proportion.
    """

    train: float = 0.5
    validation: float = 0.1
    calibration: float = 0.2
    test: float = 0.2
    group_by: str = "group"
    join_actions: bool = False
    seed: int = SEED
    file: str | None = None
    local: int = 100

    def __post_init__(self) -> None:
        require_seed(self.seed, "data.split")
        for name in ("train", "validation", "calibration", "test"):
            require(getattr(self, name) >= 0, f"data.split.{name}", getattr(self, name), "a share of 0 or more")
        total = self.train + self.validation + self.calibration + self.test
        require_at_least(self, "data.split", 1, "local")
        require(abs(total - 1.0) < 1e-6, "data.split", total, "train + validation + calibration + test = 1")


@dataclass(frozen=True)
class DriftConfig:
    """The drift generator: how many trajectories, from which seed."""

    trajectories: int = 800
    seed: int = SEED

    def __post_init__(self) -> None:
        require_seed(self.seed, "data.drift")
        require_at_least(self, "data.drift", 1, "trajectories")


@dataclass(frozen=True)
class DataConfig:
    """Converted trajectories (files or folders written by ``jaxguard convert``) and their features.

    ``train_only`` are trajectories that are only trained on, whatever the split of the others. ``unseen`` are only
    calibrated and tested on (:class:`SplitConfig`): does a guard transfer?
    """

    trajectories: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    store: str = ""
    split: SplitConfig = field(default_factory=SplitConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    thought: bool = False


@dataclass(frozen=True)
class EncoderConfig:
    """Which frozen encoder makes the features; ``None`` stands for the preset's value.

    Attributes:
        name: ``"minilm"`` (embedded), ``"qwen3-4b-instruct-2507"`` or ``"hf"`` (any Hugging Face model folder).
        path: Folder of the model; needed by every preset but the embedded one.
        layer: Index into transformers' ``hidden_states``; 0 is the embedding output.
        max_tokens: Tokens of one window, special tokens included.
        dtype: Arithmetic of the forward pass: ``"float32"``, ``"bfloat16"``, ``"float16"``.
        device: PyTorch device, e.g. ``"cuda"``; the embedded encoder runs where JAX runs.
        batch_tokens: Tokens of a full batch.
    """

    name: str = "minilm"
    path: str | None = None
    layer: int | None = None
    max_tokens: int | None = None
    dtype: str | None = None
    device: str | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        tokens = self.batch_tokens  # beyond, memory ends the process rather than an error
        require(tokens is None or 0 < tokens <= 262_144, "encoder.batch_tokens", tokens, "1 to 262144")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the world model: D ``deter``, S ``stoch`` categoricals of C ``classes``, E ``embed_dim``.

    With ``grounded`` an action is given by two vectors: the call's, and that of what the run has said so far of the
    things that the call names (:mod:`jaxguard.features.grounding`: an excerpt).

    The last three take parts of it away, for ablations (paper, table 5). Without ``recurrent`` every step starts from
    the instruction's state, so that nothing is carried over. Without ``successor`` risk is read at the current state
    (h_t, z_t) instead of the predicted one. ``heads`` other than ``"both"`` leaves ``"hazard"`` or ``"prefix"``; the
    other risk is neither trained nor ever more than 0.
    """

    embed_dim: int = 384
    deter: int = 256
    stoch: int = 16
    classes: int = 16
    hidden: int = 256
    unimix: float = 0.01
    adapter_dim: int = 64
    adapter_scale: float = 0.25
    grounded: bool = False
    recurrent: bool = True
    successor: bool = True
    heads: str = "both"

    def __post_init__(self) -> None:
        sizes = ("embed_dim", "deter", "stoch", "classes", "hidden", "adapter_dim")
        require_at_least(self, "model", 1, *sizes)
        require_at_most(self, "model", LARGEST_SIZE, *sizes)
        require(0.0 <= self.unimix < 1.0, "model.unimix", self.unimix, "a share in [0, 1)")
        require(self.heads in ("both", "hazard", "prefix"), "model.heads", self.heads, "'both', 'hazard' or 'prefix'")

    @property
    def act_dim(self) -> int:
        """A, values of an action: E for each of its vectors."""
        return self.embed_dim * (2 if self.grounded else 1)

    @property
    def kept(self) -> tuple[float, float]:
        """1 for each of (hazard, prefix) that ``heads`` leaves, else 0."""
        return float(self.heads != "prefix"), float(self.heads != "hazard")

    @staticmethod
    def presets() -> Mapping[str, ModelConfig]:
        """Sizes by the name that may stand for them."""
        return MODEL_PRESETS


MODEL_PRESETS: Mapping[str, ModelConfig] = {
    "small": ModelConfig(),
    "paper": ModelConfig(embed_dim=2560, deter=512, stoch=32, classes=32, hidden=512, adapter_dim=128),
}


RECIPES: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "stage1.schedule": "constant",
        "stage1.input_dropout": 0.0,
        "stage1.weight_decay": 0.0,
        "stage2.schedule": "constant",
        "stage2.input_dropout": 0.0,
        "stage2.weight_decay": 0.0,
        "stage2.train_core": False,
        "stage2.world_model_scale": 0.25,
        "stage2.positive_weight": 1.0,
        "stage2.pooled": False,
        "train.balance": False,
        "model.grounded": False,
        "decision.max_lost": 0.0,
        "decision.raised_for": "recall",
    },
}
"""Settings by the name that stands for them: ``recipe: paper`` in a file overrides the file's own, ``recipe=paper``
whatever came before it. ``paper`` takes back what was added to the paper's training and thresholds."""


def require_regularisation(config: Any, section: str) -> None:
    require(config.schedule in ("constant", "cosine"), f"{section}.schedule", config.schedule, "'constant' or 'cosine'")
    require(0 <= config.input_dropout < 1, f"{section}.input_dropout", config.input_dropout, "a share in [0, 1)")
    require_at_least(config, section, 0, "weight_decay")


@dataclass(frozen=True)
class Stage1Config:
    """World-model pretraining (paper, eq. 4-6): loss scales, and the length of training.

    ``posterior_scale`` weighs the auxiliary prediction from the posterior feature beside the
    prediction from the prior feature, which has weight 1. ``schedule`` is that of the learning rate:
    ``"constant"``, or ``"cosine"`` down to zero over ``steps``. ``input_dropout`` is the share of embedding
    entries set to zero in training, ``weight_decay`` that of AdamW.
    """

    steps: int = 2000
    batch_size: int = 8
    learning_rate: float = 2e-4
    pred_scale: float = 1.25
    posterior_scale: float = 1.0
    kl_scale: float = 0.03
    free_nats: float = 0.2
    clip_norm: float = 100.0
    schedule: str = "constant"
    input_dropout: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require_regularisation(self, "stage1")
        require_at_least(self, "stage1", 0, "steps")
        require_at_least(self, "stage1", 1, "batch_size")
        require_at_most(self, "stage1", LARGEST_SIZE, "batch_size")
        require_positive(self, "stage1", "learning_rate", "clip_norm")
        require_at_least(self, "stage1", 0, "pred_scale", "posterior_scale", "kl_scale", "free_nats")


@dataclass(frozen=True)
class Stage2Config:
    """Risk-supervised training (paper, eq. 7-10).

    ``world_model_scale`` multiplies the learning rate of the world-model modules on the path to the heads; the GRU core
    stays frozen unless ``train_core`` puts it among them. ``positive_weight`` multiplies the loss of positive targets.
    ``pooled`` adds a linear head on what the run has shown so far, with the share of the hazard logit that ranks
    validation trajectories best (:mod:`jaxguard.training.pooled`). ``unlabelled_hazard`` says what an unsafe
    trajectory without a reliable first hazard step teaches: ``"skip"`` nothing, ``"last_step"`` that its last step is
    the hazard.
    """

    steps: int = 1500
    batch_size: int = 8
    learning_rate: float = 2e-4
    world_model_scale: float = 0.25
    horizon: int = 3
    rho: float = 2.0
    unlabelled_hazard: str = "skip"
    clip_norm: float = 100.0
    schedule: str = "constant"
    input_dropout: float = 0.0
    weight_decay: float = 0.0
    train_core: bool = False
    positive_weight: float = 1.0
    pooled: bool = True

    def __post_init__(self) -> None:
        require_regularisation(self, "stage2")
        require_positive(self, "stage2", "positive_weight")
        require_at_least(self, "stage2", 0, "steps", "horizon", "world_model_scale")
        require_at_least(self, "stage2", 1, "batch_size")
        require_at_most(self, "stage2", LARGEST_SIZE, "batch_size")
        require_positive(self, "stage2", "learning_rate", "rho", "clip_norm")
        require(
            self.unlabelled_hazard in ("skip", "last_step"),
            "stage2.unlabelled_hazard",
            self.unlabelled_hazard,
            "'skip' or 'last_step'",
        )


@dataclass(frozen=True)
class TrainConfig:
    """What both stages share.

    ``max_steps`` is the longest trajectory seen in training (longer ones are cut there; scoring never cuts).
    ``validate_every`` and ``checkpoint_every`` count optimiser steps. ``select`` keeps the parameters of the
    ``"best"`` validation loss or of the ``"last"`` step. ``balance`` draws as many trajectories from every source.
    ``half`` rounds a guard's weights to half precision when training is done, and its bundle is half as large.
    """

    seed: int = SEED
    max_steps: int = 64
    validate_every: int = 200
    checkpoint_every: int = 500
    select: str = "best"
    balance: bool = False
    half: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        require_seed(self.seed, "train")
        require_at_least(self, "train", 1, "max_steps", "validate_every", "checkpoint_every")
        require(self.select in ("best", "last"), "train.select", self.select, "'best' or 'last'")


@dataclass(frozen=True)
class DecisionConfig:
    """Evidence, fusion and thresholds (paper, eq. 11-14).

    ``alpha_hold`` and ``alpha_block`` are false-alert levels per safe trajectory. ``fit_fusion`` fits the
    noisy-or weights on the validation split: of those within ``fusion_tolerance`` of the best AUROC, the ones that
    tell unsafe runs earliest. Thresholds are raised above their conformal value where that loses at
    most ``max_lost`` of the detections and early warnings on the validation split; with ``raised_for`` ``"f1"`` instead
    of ``"recall"`` to where F1 is best there, whatever detections that loses (of early warnings at most ``max_lost``).
    ``mondrian`` names a metadata field whose groups get thresholds of their own where they are large enough. Without
    ``temporal`` the prefix risk is fused as it stands (beta 0, window 1), whatever ``beta`` and ``window`` say: an
    ablation (paper, table 5). With ``balance`` as many safe trajectories of every source as of the rarest one set the
    thresholds, which then hold for an even mixture of the sources.
    """

    alpha_hold: float = 0.10
    alpha_block: float = 0.05
    beta: float = 0.7
    window: int = 3
    fit_fusion: bool = True
    fusion_tolerance: float = 0.001
    max_lost: float = 0.02
    raised_for: str = "recall"
    mondrian: str | None = None
    paper_rule: bool = False
    temporal: bool = True
    balance: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha_hold", "alpha_block"):
            require(0 < getattr(self, name) < 1, f"decision.{name}", getattr(self, name), "a level in (0, 1)")
        require(0 <= self.beta < 1, "decision.beta", self.beta, "a factor in [0, 1)")
        for name in ("fusion_tolerance", "max_lost"):
            require(0 <= getattr(self, name) < 1, f"decision.{name}", getattr(self, name), "a share in [0, 1)")
        require(self.raised_for in ("recall", "f1"), "decision.raised_for", self.raised_for, "'recall' or 'f1'")
        require_at_least(self, "decision", 1, "window")
        require_at_most(self, "decision", LARGEST_WINDOW, "window")


@dataclass(frozen=True)
class EvaluationConfig:
    """Bootstrap resamples and how many timelines of each kind the report shows."""

    resamples: int = 1000
    seed: int = SEED
    timelines: int = 2

    def __post_init__(self) -> None:
        require_seed(self.seed, "evaluation")
        require_at_least(self, "evaluation", 1, "resamples")
        require_at_most(self, "evaluation", LARGEST_RESAMPLES, "resamples")
        require_at_least(self, "evaluation", 0, "timelines")


@dataclass(frozen=True)
class Config:
    """One experiment, from data to report.

    ``model`` may also be given as the name of one of :data:`MODEL_PRESETS`, or as a mapping with the key
    ``preset`` and single sizes that differ from it.
    """

    name: str = "experiment"
    data: DataConfig = field(default_factory=DataConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    stage1: Stage1Config = field(default_factory=Stage1Config)
    stage2: Stage2Config = field(default_factory=Stage2Config)
    train: TrainConfig = field(default_factory=TrainConfig)
    decision: DecisionConfig = field(default_factory=DecisionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    @staticmethod
    def recipes() -> Mapping[str, Mapping[str, Any]]:
        """Groups of settings by name."""
        return RECIPES


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """An experiment from a YAML file (or the defaults) and overrides; see :func:`~jaxguard.settings.load_settings`."""
    return load_settings(path, overrides, Config)
