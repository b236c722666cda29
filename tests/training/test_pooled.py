"""What the pooled head is fitted on, and the share that validation gives it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.training import pooled
from jaxguard.training.episodes import Episodes
from jaxguard.training.pooled import fit_pooled, fit_steps, logistic, pooled_features
from jaxguard.world_model.packing import Sequence
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.scorer import Scorer

TINY = ModelConfig(embed_dim=6, deter=8, stoch=2, classes=3, hidden=8, adapter_dim=4)


def episodes(count: int, seed: int, strength: float = 4.0) -> Episodes:
    """4 steps; in every second trajectory the first observation says that step 2 will be the hazard."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(count * 10, 6)).astype(np.float32)
    rows = tuple((np.arange(5) + 10 * i, np.arange(5, 9) + 10 * i, 10 * i + 9) for i in range(count))
    for i in range(count):
        table[rows[i][1][2], 1] += strength
        if i % 2:
            table[rows[i][0][0], 0] += strength
    return Episodes(
        table=table,
        ids=tuple(f"{seed}-{i}" for i in range(count)),
        rows=rows,
        new_observation=tuple(np.ones(4, bool) for _ in range(count)),
        hazard_step=np.where(np.arange(count) % 2, 2, -1),
        unsafe=tuple(bool(i % 2) for i in range(count)),
        cut=0,
    )


@pytest.fixture(scope="module")
def params() -> Params:
    return init_params(TINY, 0)


def test_logistic_is_that_of_standardised_features() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32) * [1.0, 100.0, 0.0] + [5.0, -40.0, 2.0]
    y = x[:, 0] + 0.01 * x[:, 1] + rng.normal(size=400) > 4.6
    found = logistic(x.astype(np.float32), y)
    scaled = logistic((x * [3.0, 0.1, 1.0] + [1.0, 2.0, 3.0]).astype(np.float32), y)
    assert found is not None
    assert scaled is not None
    assert ((found(x) > 0) == y).mean() > 0.75
    np.testing.assert_allclose(scaled(x * [3.0, 0.1, 1.0] + [1.0, 2.0, 3.0]), found(x), atol=1e-3)
    np.testing.assert_allclose(found.risk(x), 1 / (1 + np.exp(-found(x))))
    assert logistic(x.astype(np.float32), np.zeros(400, bool)) is None


def test_a_feature_that_varies_by_rounding_alone_is_not_scaled_up() -> None:
    rng = np.random.default_rng(0)
    x = np.stack([rng.normal(size=400), 0.3 + 1e-8 * rng.normal(size=400)], axis=1).astype(np.float32)
    found = logistic(x.copy(), x[:, 0] > 0)
    assert found is not None
    assert abs(found.kernel[1]) < 1e-3


def test_features_look_back_and_not_ahead() -> None:
    data = episodes(4, 0)
    whole = pooled_features(*data.vectors(1))
    observations, actions, instruction = data.rows[1]
    cut = dataclasses.replace(data, rows=(data.rows[0], (observations[:3], actions[:2], instruction), *data.rows[2:]))
    assert whole.shape == (4, 60)
    np.testing.assert_array_equal(pooled_features(*cut.vectors(1)), whole[:2])
    table = data.table
    np.testing.assert_allclose(whole[3, 12:18], table[observations[:4]].mean(0), rtol=1e-6)
    np.testing.assert_array_equal(whole[3, 30:36], table[actions[:4]].max(0))
    np.testing.assert_array_equal(whole[2, 48:54], table[actions[2]] * table[instruction])


def test_fitted_on_supervised_steps_alone() -> None:
    data = episodes(60, 0)
    table = data.table.copy()
    for observations, actions, _ in data.rows[1::2]:
        table[actions[3]] += 50.0
        table[observations[3:]] -= 50.0
    one, two = fit_steps(data), fit_steps(dataclasses.replace(data, table=table))
    assert one is not None
    assert two is not None
    np.testing.assert_array_equal(one.kernel, two.kernel)
    assert fit_steps(dataclasses.replace(data, hazard_step=np.full(60, -1))) is None
    assert fit_steps(dataclasses.replace(data, hazard_step=np.full(60, -2))) is None


def test_too_many_steps_are_thinned_and_hazards_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watch(features: np.ndarray, labels: np.ndarray) -> pooled.Linear | None:
        seen.append((len(features), int(labels.sum())))
        return logistic(features, labels)

    monkeypatch.setattr(pooled, "logistic", watch)
    fit_steps(episodes(60, 0))
    monkeypatch.setattr(pooled, "LARGEST_BYTES", 4 * 60 * 100)
    fit_steps(episodes(60, 0), seed=1)
    assert seen[0] == (30 * 4 + 30 * 3, 30)
    assert seen[1][1] == 30
    assert 80 <= seen[1][0] <= 150


@pytest.mark.slow
def test_an_untrained_model_leaves_everything_to_the_pooled_head(params: Params) -> None:
    train, validation = episodes(300, 0, strength=8.0), episodes(40, 1, strength=8.0)
    fit = fit_pooled(TINY, params, train, validation, seed=0)
    assert fit.share >= 0.5
    linear = fit_steps(train)
    assert linear is not None
    scorers = Scorer(TINY, params), Scorer(TINY, fit.params)
    items = [Sequence(o[:-1], a, i) for o, a, i in validation.rows]
    before, after = (dict(s.score(items, lambda rows: validation.table[rows])) for s in scorers)
    for i in range(len(validation)):
        logits = [np.log(r[i][:, 0]) - np.log1p(-r[i][:, 0]) for r in (before, after)]
        expected = (1 - fit.share) * logits[0] + fit.share * linear(pooled_features(*validation.vectors(i)))
        np.testing.assert_allclose(logits[1], expected, atol=1e-3)
        np.testing.assert_array_equal(after[i][:, 1], before[i][:, 1])


def test_a_pooled_head_that_adds_nothing_gets_no_share(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent head, here by decree, ranks perfectly: what was trained stays byte for byte."""
    train, validation = episodes(80, 0), episodes(40, 1)
    perfect = [np.full(4, 30.0 if unsafe else -30.0) for unsafe in validation.unsafe]
    monkeypatch.setattr(pooled, "_recurrent", lambda *_: perfect)
    fit = fit_pooled(TINY, params, train, validation, seed=0)
    assert fit.share == 0.0
    assert fit.params is params


def test_large_recurrent_logits_are_told_apart(params: Params) -> None:
    """Risks of logits beyond 17 are all 1 in float32."""
    data = episodes(10, 0)
    out = {name: 400.0 * np.asarray(leaf) for name, leaf in params["hazard_head"]["out"].items()}
    large = {**params, "hazard_head": {**params["hazard_head"], "out": out}}
    one, two = pooled._recurrent(TINY, params, data), pooled._recurrent(TINY, large, data)
    np.testing.assert_allclose(np.concatenate(two), 400.0 * np.concatenate(one), rtol=1e-2, atol=1e-2)
    assert np.abs(np.concatenate(two)).max() > 30


@pytest.mark.slow
def test_unlabelled_validation_trajectories_do_not_choose(params: Params) -> None:
    train, validation = episodes(80, 0), episodes(40, 1)
    flipped = dataclasses.replace(validation, unsafe=tuple(True if u else None for u in validation.unsafe))
    assert fit_pooled(TINY, params, train, flipped, seed=0).share == 0.0  # no safe one is left
    some = dataclasses.replace(validation, unsafe=(None, None, *validation.unsafe[2:]))
    fewer = dataclasses.replace(
        validation,
        ids=validation.ids[2:], rows=validation.rows[2:], unsafe=validation.unsafe[2:],
        new_observation=validation.new_observation[2:], hazard_step=validation.hazard_step[2:],
    )  # fmt: skip
    found = [fit_pooled(TINY, params, train, part, seed=0) for part in (some, fewer)]
    assert found[0].share == found[1].share


@pytest.mark.parametrize("validation", ["none", "one class"])
def test_nothing_to_choose_the_share_on_gives_none(params: Params, validation: str) -> None:
    only_safe = dataclasses.replace(episodes(20, 1), unsafe=(False,) * 20)
    fit = fit_pooled(TINY, params, episodes(40, 0), None if validation == "none" else only_safe, seed=0)
    assert fit.share == 0.0
    assert fit.params is params
