"""Experiment configuration: frozen dataclasses, one YAML file, dotted overrides.

A config file names only what differs from the defaults below, which are the paper's where the paper
gives a value. ``recipe: paper`` (or ``recipe=paper``) takes back what was added to it, see :data:`RECIPES`.
Unknown keys, wrong types and impossible values are errors that name the key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jaxguard.strict_yaml import load_yaml
from jaxguard.types import JaxguardError

SEED = 20260701
# Above these a value can only be a mistake, which should not end in an allocation that fails hours later.
LARGEST_SIZE = 65_536
LARGEST_WINDOW = 10_000
LARGEST_RESAMPLES = 1_000_000


class ConfigError(JaxguardError):
    """A configuration key is unknown or its value impossible."""


def _require(condition: bool, key: str, value: object, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {value!r}, expected {expected}")


def _require_at_least(config: object, section: str, least: int, *names: str) -> None:
    for name in names:
        _require((value := getattr(config, name)) >= least, f"{section}.{name}", value, f"{least} or more")


def _require_at_most(config: object, section: str, most: int, *names: str) -> None:
    for name in names:
        _require((value := getattr(config, name)) <= most, f"{section}.{name}", value, f"at most {most:,}")


def _require_positive(config: object, section: str, *names: str) -> None:
    for name in names:
        _require((value := getattr(config, name)) > 0, f"{section}.{name}", value, "a positive number")


def _require_seed(seed: int, section: str) -> None:
    _require(0 <= seed < 2**31, f"{section}.seed", seed, "0 to 2147483647")


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
        _require_seed(self.seed, "data.split")
        for name in ("train", "validation", "calibration", "test"):
            _require(getattr(self, name) >= 0, f"data.split.{name}", getattr(self, name), "a share of 0 or more")
        total = self.train + self.validation + self.calibration + self.test
        _require_at_least(self, "data.split", 1, "local")
        _require(abs(total - 1.0) < 1e-6, "data.split", total, "train + validation + calibration + test = 1")


@dataclass(frozen=True)
class DriftConfig:
    """The drift generator: how many trajectories, from which seed."""

    trajectories: int = 800
    seed: int = SEED

    def __post_init__(self) -> None:
        _require_seed(self.seed, "data.drift")
        _require_at_least(self, "data.drift", 1, "trajectories")


@dataclass(frozen=True)
class DataConfig:
    """Converted trajectories (files or folders written by ``jaxguard convert``) and their features.

    ``unseen`` are trajectories that are only calibrated and tested on (:class:`SplitConfig`): does a guard transfer?
    """

    trajectories: tuple[str, ...] = ()
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
        _require(tokens is None or 0 < tokens <= 262_144, "encoder.batch_tokens", tokens, "1 to 262144")


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the world model: D ``deter``, S ``stoch`` categoricals of C ``classes``, E ``embed_dim``."""

    embed_dim: int = 384
    deter: int = 256
    stoch: int = 16
    classes: int = 16
    hidden: int = 256
    unimix: float = 0.01
    adapter_dim: int = 64
    adapter_scale: float = 0.25

    def __post_init__(self) -> None:
        sizes = ("embed_dim", "deter", "stoch", "classes", "hidden", "adapter_dim")
        _require_at_least(self, "model", 1, *sizes)
        _require_at_most(self, "model", LARGEST_SIZE, *sizes)
        _require(0.0 <= self.unimix < 1.0, "model.unimix", self.unimix, "a share in [0, 1)")


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
        "stage2.positive_weight": 1.0,
        "stage2.pooled": False,
        "train.balance": False,
        "decision.max_lost": 0.0,
    },
}
"""Settings by the name that stands for them: ``recipe: paper`` in a file overrides the file's own, ``recipe=paper``
whatever came before it. ``paper`` takes back what was added to the paper's training and thresholds."""


def _require_regularisation(config: Any, section: str) -> None:
    _require(
        config.schedule in ("constant", "cosine"), f"{section}.schedule", config.schedule, "'constant' or 'cosine'"
    )
    _require(0 <= config.input_dropout < 1, f"{section}.input_dropout", config.input_dropout, "a share in [0, 1)")
    _require_at_least(config, section, 0, "weight_decay")


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
        _require_regularisation(self, "stage1")
        _require_at_least(self, "stage1", 0, "steps")
        _require_at_least(self, "stage1", 1, "batch_size")
        _require_at_most(self, "stage1", LARGEST_SIZE, "batch_size")
        _require_positive(self, "stage1", "learning_rate", "clip_norm")
        _require_at_least(self, "stage1", 0, "pred_scale", "posterior_scale", "kl_scale", "free_nats")


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
        _require_regularisation(self, "stage2")
        _require_positive(self, "stage2", "positive_weight")
        _require_at_least(self, "stage2", 0, "steps", "horizon", "world_model_scale")
        _require_at_least(self, "stage2", 1, "batch_size")
        _require_at_most(self, "stage2", LARGEST_SIZE, "batch_size")
        _require_positive(self, "stage2", "learning_rate", "rho", "clip_norm")
        _require(
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
    """

    seed: int = SEED
    max_steps: int = 64
    validate_every: int = 200
    checkpoint_every: int = 500
    select: str = "best"
    balance: bool = False
    tensorboard: bool = False

    def __post_init__(self) -> None:
        _require_seed(self.seed, "train")
        _require_at_least(self, "train", 1, "max_steps", "validate_every", "checkpoint_every")
        _require(self.select in ("best", "last"), "train.select", self.select, "'best' or 'last'")


@dataclass(frozen=True)
class DecisionConfig:
    """Evidence, fusion and thresholds (paper, eq. 11-14).

    ``alpha_hold`` and ``alpha_block`` are false-alert levels per safe trajectory. ``fit_fusion`` fits the
    noisy-or weights on the validation split. Thresholds are raised above their conformal value where that loses at
    most ``max_lost`` of the detections and early warnings on the validation split. ``mondrian`` names a metadata
    field whose groups get thresholds of their own where they are large enough.
    """

    alpha_hold: float = 0.10
    alpha_block: float = 0.05
    beta: float = 0.7
    window: int = 3
    fit_fusion: bool = True
    max_lost: float = 0.02
    mondrian: str | None = None
    paper_rule: bool = False

    def __post_init__(self) -> None:
        for name in ("alpha_hold", "alpha_block"):
            _require(0 < getattr(self, name) < 1, f"decision.{name}", getattr(self, name), "a level in (0, 1)")
        _require(0 <= self.beta < 1, "decision.beta", self.beta, "a factor in [0, 1)")
        _require(0 <= self.max_lost < 1, "decision.max_lost", self.max_lost, "a share in [0, 1)")
        _require_at_least(self, "decision", 1, "window")
        _require_at_most(self, "decision", LARGEST_WINDOW, "window")


@dataclass(frozen=True)
class EvaluationConfig:
    """Bootstrap resamples and how many timelines of each kind the report shows."""

    resamples: int = 1000
    seed: int = SEED
    timelines: int = 2

    def __post_init__(self) -> None:
        _require_seed(self.seed, "evaluation")
        _require_at_least(self, "evaluation", 1, "resamples")
        _require_at_most(self, "evaluation", LARGEST_RESAMPLES, "resamples")
        _require_at_least(self, "evaluation", 0, "timelines")


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


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain JSON-like values (tuples become lists)."""
    return typing.cast(dict[str, Any], _plain(dataclasses.asdict(config)))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value


def from_dict(values: Mapping[str, Any], cls: type[Any] = Config, prefix: str = "") -> Any:
    """Builds ``cls`` from nested mappings; keys that ``cls`` lacks raise :class:`ConfigError`."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{prefix.rstrip('.') or 'config'}: got {values!r}, expected a mapping of keys")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    arguments: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(f"{prefix}{key}: unknown key; {hint}known here: {', '.join(sorted(known))}")
        arguments[key] = _convert(value, hints[key], f"{prefix}{key}")
    return cls(**arguments)


def _convert(value: Any, hint: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        if hint is ModelConfig and isinstance(value, str):
            return _named(MODEL_PRESETS, value, key)
        if hint is ModelConfig and isinstance(value, Mapping) and "preset" in value:
            rest = {k: v for k, v in value.items() if k != "preset"}
            preset = _named(MODEL_PRESETS, value["preset"], f"{key}.preset")
            return from_dict({**to_dict(preset), **rest}, ModelConfig, f"{key}.")
        return from_dict(value, typing.cast(type[Any], hint), f"{key}.")
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None:
        if type(None) in options:
            return None
        raise ConfigError(f"{key}: got null, expected {_name(hint)}")
    if isinstance(value, int) and value.bit_length() > 63:  # too long to be shown, perhaps
        raise ConfigError(f"{key}: got an integer of {value.bit_length()} bits, expected one of 63 at most")
    for option in options:
        if typing.get_origin(option) is tuple:
            items = [value] if isinstance(value, str) else value
            if isinstance(items, list | tuple) and all(isinstance(v, str) for v in items):
                return tuple(items)
        elif option is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:  # YAML 1.1 reads 2e-4 (no dot) as text
                number = float(value)
            except (ValueError, OverflowError):
                continue
            _require(math.isfinite(number), key, value, "a finite number")
            return number
        elif option in (int, str, bool) and type(value) is option:
            return value
    raise ConfigError(f"{key}: got {value!r} ({type(value).__name__}), expected {_name(hint)}")


def _named(table: Mapping[str, Any], name: object, key: str) -> Any:
    if not isinstance(name, str) or name not in table:
        raise ConfigError(f"{key}: got {name!r}, expected one of {', '.join(table)}")
    return table[name]


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file (or nothing) and applies ``key.sub=value`` overrides in order.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type or impossible value.
    """
    return typing.cast(Config, from_dict(load_values(path, overrides)))


def load_values(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What :func:`load_config` makes a config of, for :func:`from_dict` with another class; raises as that does."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"config file {path}: not UTF-8 text: {error}") from error
        loaded = _yaml(text, f"config file {path}")
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {path}: got {type(loaded).__name__}, expected a mapping of keys")
        values = loaded or {}
    return _overridden(values, overrides)


def override(config: Config, overrides: Sequence[str]) -> Config:
    """``config`` with ``key.sub=value`` settings applied in order; raises as :func:`load_config`."""
    return typing.cast(Config, from_dict(_overridden(to_dict(config), overrides)))


def _overridden(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    settings: list[tuple[str, Any]] = [("recipe", values.pop("recipe"))] if "recipe" in values else []
    for setting in overrides:
        key, separator, raw = setting.partition("=")
        if not separator or not key:
            raise ConfigError(f"override {setting!r:.80}: expected key=value, e.g. stage1.steps=500")
        settings.append((key, _yaml(raw, f"override {setting!r:.80}")))
    for key, value in settings:
        for name, part in _named(RECIPES, value, key).items() if key == "recipe" else ((key, value),):
            _assign(values, name.split("."), part, name)
    return values


def _yaml(text: str, what: str) -> Any:
    """The value that ``text`` holds; an error is one line."""
    try:
        return load_yaml(text)
    except RecursionError:
        raise ConfigError(f"{what}: not valid YAML: nested too deeply") from None
    # Besides its own errors, PyYAML lets through what Python raises for 2020-13-45, "!!int x" or "!!timestamp x".
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(f"{what}: not valid YAML: {' '.join(str(error).split())}") from error


def _assign(values: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        child = values.get(part)
        if part == "model" and isinstance(child, str):
            child = {"preset": child}
        if child is None:
            child = {}
        if not isinstance(child, dict):
            raise ConfigError(f"override {key}: {part} holds {child!r}, expected a group of keys")
        values[part] = child
        values = child
    values[path[-1]] = value


def dump_config(config: Config, path: str | Path) -> None:
    """Writes every key, defaults included, as YAML that :func:`load_config` reads back equal; whole or not at all."""
    partial = Path(f"{path}.partial")
    partial.write_text(yaml.safe_dump(to_dict(config), sort_keys=False), encoding="utf-8")
    partial.replace(path)
