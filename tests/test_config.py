"""Configuration: what is refused and how the message names it, presets, overrides, round trip."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxguard.config import MODEL_PRESETS, RECIPES, SEED, Config, ModelConfig, load_config
from jaxguard.experiments.plan import load_plan
from jaxguard.route_config import load_route_config
from jaxguard.settings import ConfigError, dump_settings, from_dict, to_dict
from jaxguard.training.lora import LoraSettings, load_lora_settings


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_the_paper_s() -> None:
    config = load_config(None)
    assert config == Config()
    assert (config.stage1.pred_scale, config.stage1.kl_scale, config.stage1.free_nats) == (1.25, 0.03, 0.2)
    assert (config.stage2.learning_rate, config.stage2.batch_size, config.stage2.world_model_scale) == (2e-4, 8, 0.25)
    assert (config.model.unimix, config.model.adapter_scale) == (0.01, 0.25)
    assert config.train.seed == SEED == 20260701
    assert MODEL_PRESETS["paper"].embed_dim == 2560
    assert MODEL_PRESETS["small"].embed_dim == 384


def test_a_file_names_only_what_differs(tmp_path: Path) -> None:
    path = write(
        tmp_path, "name: mine\nstage1: {steps: 7}\ndata: {trajectories: here, split: {train: 0.6, test: 0.1}}\n"
    )
    config = load_config(path)
    assert (config.name, config.stage1.steps, config.data.split.train) == ("mine", 7, 0.6)
    assert config.data.trajectories == ("here",)
    assert config.stage1.batch_size == Config().stage1.batch_size
    assert load_config(write(tmp_path, "")) == Config()


def test_dump_and_load_give_the_same(tmp_path: Path) -> None:
    config = load_config(
        None,
        ["model=paper", "stage2.rho=1.5", "data.trajectories=[a, b]", "encoder.layer=3", "name=ÄÖ", "data.store=x"],
    )
    dump_settings(config, tmp_path / "c.yaml")
    assert load_config(tmp_path / "c.yaml") == config
    assert from_dict(to_dict(config), Config) == config
    assert to_dict(config)["data"]["trajectories"] == ["a", "b"]


def test_model_presets() -> None:
    assert load_config(None, ["model=small"]).model == ModelConfig()
    paper = MODEL_PRESETS["paper"]
    assert load_config(None, ["model=paper"]).model == paper
    assert load_config(None, ["model={preset: paper, deter: 128}"]).model == dataclasses.replace(paper, deter=128)
    assert load_config(None, ["model=paper", "model.deter=128"]).model == dataclasses.replace(paper, deter=128)
    assert load_config(None, ["model.deter=128", "model.preset=paper"]).model == dataclasses.replace(paper, deter=128)
    assert load_config(None, ["model.deter=128", "model=paper"]).model == paper


def test_overrides_apply_in_order_after_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: paper\nstage1: {steps: 7}\nstage2:\n")
    config = load_config(
        path, ["stage1.steps=8", "stage1.steps=9", "stage2.steps=5", "model.deter=64", "data.split.file=x"]
    )
    assert config.stage1.steps == 9
    assert config.stage2.steps == 5
    assert config.model == dataclasses.replace(MODEL_PRESETS["paper"], deter=64)
    assert config.data.split.file == "x"
    assert load_config(None, ["encoder.path=", "encoder.layer=null"]).encoder.path is None


def test_numbers_as_yaml_writes_them() -> None:
    """YAML 1.1 takes 2e-4 for text."""
    assert load_config(None, ["stage1.learning_rate=2e-4"]).stage1.learning_rate == 2e-4
    config = load_config(None, ["stage1.clip_norm=5"])
    assert config.stage1.clip_norm == 5.0
    assert type(config.stage1.clip_norm) is float


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stage1.step=5", r"stage1\.step: unknown key; did you mean stage1\.steps\? known here: .*free_nats"),
        ("stge1.steps=5", r"stge1: unknown key; did you mean stage1\?"),
        ("zzz=5", r"^zzz: unknown key; known here: data, "),
        ("model.deter.x=1", r"model\.deter: got \{'x': 1\} \(dict\), expected int"),
        ("data.split.valid=0.1", r"data\.split\.valid: unknown key; did you mean data\.split\.validation\?"),
        ("stage1.steps=many", r"stage1\.steps: got 'many' \(str\), expected int"),
        ("stage1.steps=5.0", r"stage1\.steps: got 5\.0 \(float\), expected int"),
        ("stage1.steps=true", r"stage1\.steps: got True \(bool\), expected int"),
        ("stage1.steps=", r"stage1\.steps: got null, expected int"),
        ("stage1=", r"stage1: got None, expected a mapping of keys"),
        ("stage1=5", r"stage1: got 5, expected a mapping of keys"),
        ("stage1.learning_rate=true", r"stage1\.learning_rate: got True \(bool\), expected float"),
        ("stage1.learning_rate=.nan", r"stage1\.learning_rate: got nan, expected a finite number"),
        ("stage1.clip_norm=inf", r"stage1\.clip_norm: got 'inf', expected a finite number"),
        ("decision.fit_fusion=1", r"decision\.fit_fusion: got 1 \(int\), expected bool"),
        ("encoder.layer=three", r"encoder\.layer: got 'three' \(str\), expected int \| None"),
        ("data.trajectories=[1, 2]", r"data\.trajectories: got \[1, 2\] \(list\), expected tuple\[str, \.\.\.\]"),
        ("name=12", r"name: got 12 \(int\), expected str"),
        ("model=huge", r"model: got 'huge', expected one of small, paper"),
        ("model={preset: 3}", r"model\.preset: got 3, expected one of small, paper"),
        ("model={preset: {deter: 3}}", r"model\.preset: got \{'deter': 3\}, expected one of"),
        ("stage1", r"override 'stage1': expected key=value"),
        ("=5", r"override '=5': expected key=value"),
        ("name=[", r"override 'name=\[': not valid YAML"),
        ("stage1..steps=5", r"stage1\.: unknown key"),
        ("name=2020-13-45", r"override 'name=2020-13-45': not valid YAML: month must be in 1\.\.12"),
        (f"stage1.steps={'1' * 5000}", r"override 'stage1\.steps=1+: not valid YAML: Exceeds the limit"),
        (f"stage1.steps=0x{'1' * 5000}", r"stage1\.steps: got an integer of 19997 bits, expected one of 63"),
        (f"stage1.learning_rate={10**30}", r"stage1\.learning_rate: got an integer of 100 bits"),
        (f"name={'[' * 3000}", r"override 'name=\[+: not valid YAML: nested too deeply"),
        ("name=!!int x", r"override 'name=!!int x': not valid YAML: invalid literal for int"),
        ("name=!!int ''", r"not valid YAML: string index out of range"),
        ("name=!!bool x", r"override 'name=!!bool x': not valid YAML: 'x'"),
        ("name=!!timestamp x", r"override 'name=!!timestamp x': not valid YAML"),
    ],
)
def test_what_cannot_be_read_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(None, [override])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.deter=0", "model.deter"),
        ("model.unimix=1.0", "model.unimix"),
        ("stage1.steps=-1", "stage1.steps"),
        ("stage1.batch_size=0", "stage1.batch_size"),
        ("stage1.learning_rate=0", "stage1.learning_rate"),
        ("stage1.kl_scale=-0.1", "stage1.kl_scale"),
        ("stage2.clip_norm=0", "stage2.clip_norm"),
        ("stage2.rho=0", "stage2.rho"),
        ("stage2.horizon=-1", "stage2.horizon"),
        ("stage2.world_model_scale=-1", "stage2.world_model_scale"),
        ("stage2.unlabelled_hazard=first", "stage2.unlabelled_hazard"),
        ("train.checkpoint_every=0", "train.checkpoint_every"),
        ("train.validate_every=0", "train.validate_every"),
        ("train.max_steps=0", "train.max_steps"),
        ("train.select=worst", "train.select"),
        ("train.seed=-1", "train.seed"),
        ("train.seed=4294967296", "train.seed"),
        ("data.split.train=-0.5", "data.split.train"),
        ("data.split.train=0.9", "data.split"),
        ("data.drift.trajectories=0", "data.drift.trajectories"),
        ("decision.alpha_hold=0", "decision.alpha_hold"),
        ("decision.alpha_block=1", "decision.alpha_block"),
        ("decision.beta=1", "decision.beta"),
        ("decision.window=0", "decision.window"),
        ("evaluation.resamples=0", "evaluation.resamples"),
        ("evaluation.resamples=1000001", "evaluation.resamples"),
        ("decision.window=10001", "decision.window"),
        ("stage1.batch_size=65537", "stage1.batch_size"),
        ("stage2.batch_size=65537", "stage2.batch_size"),
        *((f"model.{name}=65537", f"model.{name}") for name in ("embed_dim", "deter", "stoch", "classes", "hidden")),
    ],
)
def test_impossible_values_are_named(override: str, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: got .*, expected "):
        load_config(None, [override])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- 1\n- 2\n", "got list, expected a mapping of keys"),
        (b"a: [", "not valid YAML"),
        (b"name: \xff\xfe", "not UTF-8 text"),
        (b"1: 2", "1: unknown key"),
        (b"name: 2020-13-45", r"c\.yaml: not valid YAML: month must be"),
        (b"name: " + b"[" * 3000, r"c\.yaml: not valid YAML: nested too deeply"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_config(path)
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config file .*nowhere\.yaml: No such file"):
        load_config(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"override stage1\.steps: stage1 holds 5, expected a group of keys"):
        load_config(write(tmp_path, "stage1: 5"), ["stage1.steps=3"])


def test_every_shipped_configuration_loads() -> None:
    files = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))
    assert files
    for file in files:
        if file.name == "route_lora.yaml":
            assert load_lora_settings(file) == LoraSettings()
        elif file.name.startswith("route"):
            assert load_route_config(file).name
        elif file.name.startswith("experiments"):
            assert load_plan(file).sets
        else:
            assert load_config(file).name


def test_the_paper_recipe_switches_off_what_goes_beyond_it(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: x\nstage1: {input_dropout: 0.1, steps: 7}\nstage2: {pooled: true, schedule: cosine}\n")
    best, paper = load_config(file), load_config(file, ["recipe=paper"])
    assert (best.stage2.pooled, best.decision.max_lost) == (True, 0.02)
    assert paper == load_config(file, [f"{key}={json.dumps(value)}" for key, value in RECIPES["paper"].items()])
    assert (paper.stage1.input_dropout, paper.stage2.schedule, paper.stage2.pooled) == (0.0, "constant", False)
    assert (paper.stage1.steps, paper.name, paper.decision.max_lost) == (7, "x", 0.0)
    later = load_config(file, ["recipe=paper", "stage2.pooled=true"])
    assert later.stage2.pooled
    assert load_config(file, ["stage2.pooled=true", "recipe=paper"]) == paper
    file.write_text(f"recipe: paper\n{file.read_text()}")
    assert load_config(file) == paper
    with pytest.raises(ConfigError, match=r"recipe: got 'papre', expected one of paper"):
        load_config(None, ["recipe=papre"])


def test_every_default_of_the_paper_recipe_is_a_default_or_switched_off() -> None:
    """What the recipe names beyond the two that the paper does not have is as in a config without a file."""
    differing = {key for key, value in RECIPES["paper"].items() if _at(Config(), key) != value}
    assert differing == {"stage2.pooled", "decision.max_lost"}


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_a_setting_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("stage1: {steps: 100}\nstage1: {batch_size: 4}\n")
    with pytest.raises(ConfigError, match=r"not valid YAML: key 'stage1' stands twice .*line 2"):
        load_config(path)


@pytest.mark.parametrize("tokens", [-1, 0, 10**9])
def test_a_batch_that_no_memory_holds_is_refused(tokens: int) -> None:
    with pytest.raises(ConfigError, match=rf"encoder\.batch_tokens: got {tokens}, expected"):
        load_config(None, [f"encoder.batch_tokens={tokens}"])
