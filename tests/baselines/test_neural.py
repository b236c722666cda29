"""Learnt rivals: sizes, windows, what they learn from, and that a second call reads what the first one trained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rival_samples import DIM, READER, lookup, runs

from jaxguard.baselines import neural
from jaxguard.baselines.networks import Transformer, parameters_of, transformer_sizes
from jaxguard.baselines.neural import NETWORKS, NeuralRival, fit_network, label_prefixes, windows
from jaxguard.baselines.rival import RivalError, score
from jaxguard.config import MODEL_PRESETS, Config, ModelConfig, Stage1Config, Stage2Config, TrainConfig
from jaxguard.training.episodes import Episodes, TrainingError, make_batch, make_episodes
from jaxguard.types import Trajectory
from jaxguard.world_model.params import Params, build_as, flatten, init_params
from jaxguard.world_model.rssm import RSSM

pytestmark = pytest.mark.usefixtures("toy_size")
TINY = ModelConfig(embed_dim=DIM, deter=8, stoch=2, classes=3, hidden=8, adapter_dim=4)
CONFIG = Config(
    model=TINY,
    stage1=Stage1Config(steps=4),
    stage2=Stage2Config(steps=6, learning_rate=1e-2, input_dropout=0.1),
    train=TrainConfig(max_steps=8, validate_every=3, checkpoint_every=20),
)


def episodes(trajectories: list[Trajectory]) -> Episodes:
    return make_episodes(trajectories, SimpleNamespace(get=lookup), max_steps=8)  # type: ignore[arg-type]


TRAIN, VALIDATION = episodes(runs(24)), episodes(runs(8, seed=300))


def fitted(name: str, folder: Path, train: Episodes = TRAIN, config: Config = CONFIG) -> Params:
    return fit_network(name, config, train, VALIDATION, folder, progress=False)


def equal(one: Params, two: Params) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True))


@pytest.mark.parametrize("config", [ModelConfig(), MODEL_PRESETS["paper"], TINY, ModelConfig(embed_dim=1024)])
def test_the_transformer_is_as_large_as_the_guard(config: ModelConfig) -> None:
    guard, rival = parameters_of(RSSM, config), parameters_of(Transformer, config)
    assert abs(rival / guard - 1) < 0.1
    width, hidden = transformer_sizes(config)
    assert width % 4 == 0
    assert hidden >= 2 * width


def test_parameters_are_counted_as_they_are_made() -> None:
    params = init_params(TINY, 0, Transformer)
    assert sum(a.size for a in flatten(params).values()) == parameters_of(Transformer, TINY)


@given(st.integers(0, 60), st.integers(1, 20))
def test_a_step_has_one_window_whatever_the_length(length: int, limit: int) -> None:
    def by_step(n: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for start, size, first, end in windows(n, limit):
            assert first == len(found)  # no gap, no overlap
            assert start <= first < end <= start + size
            assert size <= limit
            found += [(start, size)] * (end - first)
        assert len(found) == n
        return found

    own = by_step(length)
    assert by_step(60)[:length] == own
    assert all(start == 0 or t - start >= limit - max(limit // 2, 1) for t, (start, _) in enumerate(own))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_looks_back_and_not_ahead(name: str) -> None:
    module = NETWORKS[name].module
    params = init_params(TINY, 0, module)
    rng = np.random.default_rng(0)
    obs, act = (rng.normal(size=(2, 5, DIM)).astype(np.float32) for _ in range(2))
    ins = rng.normal(size=(2, DIM)).astype(np.float32)
    run = jax.jit(lambda obs, act, ins: build_as(module, TINY, params)(obs, act, ins))
    base = np.asarray(run(obs, act, ins))
    assert base.shape == (2, 5, 2)
    for part in (obs, act):
        changed = part.copy()
        changed[:, 3] += 1.0
        found = np.asarray(run(*((changed, act) if part is obs else (obs, changed)), ins))
        np.testing.assert_array_equal(found[:, :3], base[:, :3])
        assert (found[:, 3] != base[:, 3]).all()
        assert (found[:, 4] == base[:, 4]).all() == (name == "step-mlp")
    assert (np.asarray(run(obs, act, ins + 1)) != base).all()


def test_every_prefix_has_the_label_of_its_run() -> None:
    batch = make_batch(TRAIN, np.array([0, 1, 2]), 4, CONFIG.stage2)
    made = label_prefixes(batch, [False, True, None])
    length = len(TRAIN.rows[0][1])
    np.testing.assert_array_equal(made.prefix[:, :length], np.array([0, 1, 0, 0])[:, None] * np.ones(length))
    np.testing.assert_allclose(made.supervised[1, :length], 0.9 ** np.arange(length - 1, -1, -1))
    assert made.supervised[:2, length:].sum() == made.supervised[2:].sum() == made.hazard.sum() == 0


def test_a_second_call_reads_and_does_not_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fitted("step-mlp", tmp_path)
    start = init_params(TINY, CONFIG.train.seed, NETWORKS["step-mlp"].module)
    assert not equal(first, start)

    def never(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(neural, "step_function", lambda *_: never)
    assert equal(fitted("step-mlp", tmp_path), first)


@pytest.mark.parametrize("what", ["label", *(pytest.param(w, marks=pytest.mark.slow) for w in ("vector", "setting"))])
def test_weights_of_other_data_or_settings_are_refused(tmp_path: Path, what: str) -> None:
    fitted("trace-gru", tmp_path)
    train, config = TRAIN, CONFIG
    if what == "label":
        train = dataclasses.replace(TRAIN, unsafe=(None, *TRAIN.unsafe[1:]))
    elif what == "vector":
        train = dataclasses.replace(TRAIN, table=TRAIN.table + 1)
    else:
        config = dataclasses.replace(CONFIG, stage2=dataclasses.replace(CONFIG.stage2, learning_rate=2e-2))
    with pytest.raises(TrainingError, match="was written for another"):
        fitted("trace-gru", tmp_path, train, config)


@pytest.mark.slow
def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    one, two = (fitted("transformer", tmp_path / name) for name in "ab")
    assert equal(one, two)
    seed = dataclasses.replace(CONFIG, train=dataclasses.replace(CONFIG.train, seed=1))
    assert not equal(one, fitted("transformer", tmp_path / "c", config=seed))


def test_only_the_trace_network_goes_without_step_labels(tmp_path: Path) -> None:
    blinded = dataclasses.replace(TRAIN, hazard_step=np.full(len(TRAIN), -2))
    assert equal(fitted("trace-gru", tmp_path / "a"), fitted("trace-gru", tmp_path / "b", blinded))
    with pytest.raises(TrainingError, match="no training trajectory has a first hazard step"):
        fitted("step-mlp", tmp_path / "c", blinded)
    one_class = dataclasses.replace(TRAIN, unsafe=(True,) * len(TRAIN))
    with pytest.raises(RivalError, match="expected safe and unsafe training trajectories"):
        fitted("trace-gru", tmp_path / "d", one_class)


@pytest.mark.slow
def test_memory_solves_what_the_current_step_cannot(tmp_path: Path) -> None:
    longer = dataclasses.replace(CONFIG, stage2=dataclasses.replace(CONFIG.stage2, steps=300, input_dropout=0.0))
    train, test = episodes(runs(80)), runs(40, seed=900)
    ahead = {}
    for name in NETWORKS:
        rival = NeuralRival(name, longer, fitted(name, tmp_path / name, train, longer), READER)
        last = np.array([risks[-1] for risks in score(rival, test)])
        ahead[name] = float((last[1::2] > last[::2]).mean())
    assert ahead["transformer"] > 0.9
    assert ahead["trace-gru"] > 0.9
    assert ahead["step-mlp"] < 0.8


def test_the_weights_of_both_risks_come_from_validation() -> None:
    params = init_params(TINY, 0, NETWORKS["step-mlp"].module)
    rival = NeuralRival("step-mlp", CONFIG, params, READER)
    rival.choose_fusion([], [])
    rival.choose_fusion(runs(10), [])  # too few of either kind
    assert rival.fusion == neural.PLAIN
    sample = runs(2)[0]
    hazard, prefix = rival.heads(sample).T
    np.testing.assert_allclose(rival.risks(sample), 1 - (1 - hazard) * (1 - prefix))
    rival.choose_fusion(runs(60), [])
    assert (rival.fusion.beta, rival.fusion.window, rival.fusion.w_win) == (0.0, 1, 0.0)  # never a memory of its own
