"""Lanes against one step at a time, and that nothing recompiles whatever the archive holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxguard.config import ModelConfig
from jaxguard.types import JaxguardError
from jaxguard.world_model import scorer as scorer_module
from jaxguard.world_model.packing import CHUNK, LANES, LOOKED_UP, Sequence, Texts, beside, gather_pairs, sequences
from jaxguard.world_model.params import Params, init_params
from jaxguard.world_model.scorer import BATCHES, Scorer

RNG = np.random.default_rng(6)
ROWS = 40


@pytest.fixture(scope="module")
def scorer(tiny: ModelConfig, params: Params) -> Scorer:
    return Scorer(tiny, params)


@pytest.fixture(scope="module")
def table(tiny: ModelConfig) -> np.ndarray:
    return RNG.normal(size=(ROWS, tiny.embed_dim)).astype(np.float32)


def sequence(length: int) -> Sequence:
    obs, act = RNG.integers(0, ROWS, size=(2, length))
    return Sequence(obs, act, int(RNG.integers(0, ROWS)))


def one_by_one(scorer: Scorer, table: np.ndarray, item: Sequence) -> np.ndarray:
    state = scorer.start(table[item.ins])
    risks = np.empty((len(item.act), 2))
    for t, (o, a) in enumerate(zip(item.obs, item.act, strict=True)):
        state, *risks[t] = scorer.step(state, table[o], table[a])
    return risks


def in_lanes(scorer: Scorer, table: np.ndarray, items: list[Sequence]) -> dict[int, np.ndarray]:
    found = list(scorer.score(items, lambda rows: table[rows]))
    assert sorted(position for position, _ in found) == list(range(len(items)))
    return dict(found)


def test_lanes_equal_single_steps(scorer: Scorer, table: np.ndarray) -> None:
    lengths = [0, 1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 0, 100, *RNG.integers(1, 12, size=200)]
    assert len(lengths) > LANES
    items = [sequence(int(n)) for n in lengths]
    found = in_lanes(scorer, table, items)
    for position, item in enumerate(items):
        assert found[position].shape == (len(item.act), 2)
        assert found[position].dtype == np.float32
        np.testing.assert_allclose(found[position], one_by_one(scorer, table, item), atol=1e-6)
    every = np.concatenate(list(found.values()))
    assert (every > 0).all()
    assert (every < 1).all()
    assert np.ptp(every) > 0.05


@pytest.mark.slow
def test_bfloat16_rounds_lanes_and_no_live_step(
    tiny: ModelConfig, params: Params, scorer: Scorer, table: np.ndarray
) -> None:
    rounded = Scorer(tiny, params, precision="bfloat16")
    items = [sequence(int(n)) for n in RNG.integers(1, 12, size=50)]
    for item in items[:5]:
        np.testing.assert_array_equal(one_by_one(rounded, table, item), one_by_one(scorer, table, item))
    found, expected = in_lanes(rounded, table, items), in_lanes(scorer, table, items)
    far = np.concatenate([np.abs(found[i] - expected[i]).max(axis=1) for i in range(len(items))])
    assert found[0].dtype == np.float32
    assert (far > 1e-6).mean() > 0.9  # rounded indeed
    (_, side_by_side), (_, plain) = (
        own.step_many(own.start_many(table[:4]), table[4:8], table[8:12]) for own in (rounded, scorer)
    )
    assert 1e-6 < np.abs(side_by_side - plain).max() < 0.05
    assert np.median(far) < 5e-3


def test_one_trajectory_of_ten_thousand_steps(scorer: Scorer, table: np.ndarray) -> None:
    long = sequence(10_000)
    items = [sequence(3), long, sequence(40)]
    found = in_lanes(scorer, table, items)
    np.testing.assert_allclose(found[1], one_by_one(scorer, table, long), atol=1e-6)
    np.testing.assert_allclose(found[2], one_by_one(scorer, table, items[2]), atol=1e-6)


def test_blocks_of_single_steps(scorer: Scorer, table: np.ndarray) -> None:
    items = [sequence(1) for _ in range(CHUNK * LANES + 3 * LANES)]
    found = in_lanes(scorer, table, items)
    for position in (0, CHUNK * LANES - 1, CHUNK * LANES, len(items) - 1):
        np.testing.assert_allclose(found[position], one_by_one(scorer, table, items[position]), atol=1e-6)


def test_a_text_is_encoded_once_and_again_after_more_texts_than_are_kept(
    scorer: Scorer, tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = CHUNK * LANES + 100
    monkeypatch.setattr(scorer_module, "KEPT", kept)
    many = RNG.normal(size=(3 * kept, tiny.embed_dim)).astype(np.float32)
    ids = np.concatenate([np.arange(3 * kept), RNG.integers(0, 3 * kept, 500)])
    items = [Sequence(part, part[::-1], int(part[0])) for part in np.split(ids, np.arange(9, len(ids), 9))]
    asked: list[np.ndarray] = []

    def gather(rows: np.ndarray) -> np.ndarray:
        asked.append(rows)
        return many[rows]

    found = dict(scorer.score(items, gather))
    for position in (0, 7, len(items) // 2, len(items) - 1):
        np.testing.assert_allclose(found[position], one_by_one(scorer, many, items[position]), atol=1e-6)
    again = [Sequence(np.arange(9), np.arange(9, 18), 18)] * 300
    asked.clear()
    list(scorer.score(again, gather))
    assert sorted(np.concatenate(asked).tolist()) == [0, 0, *range(19)]  # row 0 stands in empty lanes


def test_bits_do_not_depend_on_how_many_texts_are_encoded_at_once(scorer: Scorer, tiny: ModelConfig) -> None:
    many = RNG.normal(size=(4 * BATCHES[0], tiny.embed_dim)).astype(np.float32)
    long = Sequence(np.arange(1100) % len(many), np.arange(1100)[::-1] % len(many), 3)
    company = [Sequence(rows, rows, int(rows[0])) for rows in RNG.integers(0, len(many), size=(60, 20))]
    alone = dict(scorer.score([long], lambda rows: many[rows]))[0]
    together = dict(scorer.score([*company, long], lambda rows: many[rows]))[60]
    np.testing.assert_array_equal(alone, together)


def test_risks_do_not_depend_on_order_or_company(scorer: Scorer, table: np.ndarray) -> None:
    items = [sequence(int(n)) for n in RNG.integers(1, 40, size=90)]
    found = in_lanes(scorer, table, items)
    order = RNG.permutation(len(items))
    shuffled = in_lanes(scorer, table, [items[i] for i in order])
    for position, index in enumerate(order):
        np.testing.assert_array_equal(shuffled[position], found[index])
    np.testing.assert_array_equal(in_lanes(scorer, table, [items[7]])[0], found[7])


def test_nothing_and_empty_trajectories(scorer: Scorer, table: np.ndarray) -> None:
    assert in_lanes(scorer, table, []) == {}
    found = in_lanes(scorer, table, [sequence(0), sequence(0)])
    assert [found[i].shape for i in (0, 1)] == [(0, 2), (0, 2)]
    assert in_lanes(scorer, table, [sequence(0), sequence(2), sequence(0)])[1].shape == (2, 2)


def test_results_come_while_the_input_is_still_read(scorer: Scorer, table: np.ndarray) -> None:
    read = 0

    def stream() -> Iterator[Sequence]:
        nonlocal read
        for _ in range(5000):
            read += 1
            yield sequence(4)

    next(scorer.score(stream(), lambda rows: table[rows]))
    assert read <= 3 * CHUNK * LANES // 4


def test_everything_is_compiled_once(tiny: ModelConfig, params: Params, table: np.ndarray) -> None:
    scorer = Scorer(tiny, params)
    many = RNG.normal(size=(5000, tiny.embed_dim)).astype(np.float32)
    for lengths in ([3], [1, 100, 7], [0, 2] * 100, [20] * 300):
        items = [sequence(n) for n in lengths]
        list(scorer.score([Sequence(*RNG.integers(0, 5000, size=(2, n)), 7) for n in lengths], lambda rows: many[rows]))
        in_lanes(scorer, table, items)
        one_by_one(scorer, table, items[0])
    functions = (scorer._start, scorer._live, scorer._chunk)
    assert [function._cache_size() for function in functions] == [1, 1, 1]
    assert all(kind.write._cache_size() == 1 for kind in scorer._kinds)


def test_a_bad_vector_spoils_its_own_trajectory_only(scorer: Scorer, table: np.ndarray) -> None:
    spoiled = table.copy()
    spoiled[0, 1] = np.nan
    items = [Sequence(np.array([1, 0, 2]), np.array([3, 3, 3]), 4)]
    items += [Sequence(RNG.integers(1, ROWS, 5), RNG.integers(1, ROWS, 5), 2) for _ in range(3 * LANES)]
    found = in_lanes(scorer, spoiled, items)
    np.testing.assert_array_equal(np.isnan(found[0]), [[False] * 2, [True] * 2, [True] * 2])
    clean = in_lanes(scorer, table, items)
    for position in range(1, len(items)):
        np.testing.assert_array_equal(found[position], clean[position])


def test_step_leaves_the_state_usable(scorer: Scorer, table: np.ndarray) -> None:
    state = scorer.start(table[0])
    first = scorer.step(state, table[1], table[2])
    assert scorer.step(state, table[3], table[4])[1:] != first[1:]
    assert scorer.step(state, table[1], table[2])[1:] == first[1:]


def test_many_sessions_in_one_call_equal_each_alone(scorer: Scorer, table: np.ndarray) -> None:
    ins, obs, act = (RNG.integers(0, ROWS, size=shape) for shape in (9, (7, 9), (7, 9)))
    state, risks = scorer.start_many(table[ins]), []
    for o, a in zip(obs, act, strict=True):
        state, found = scorer.step_many(state, table[o], table[a])
        risks.append(found)
    for session in range(9):
        item = Sequence(obs[:, session], act[:, session], int(ins[session]))
        np.testing.assert_allclose(np.stack(risks)[:, session], one_by_one(scorer, table, item), atol=1e-6)
    with pytest.raises(JaxguardError, match=r"actions: got a vector of shape \(9, 5\), expected \(9, 6\)"):
        scorer.step_many(state, table[ins], table[ins][:, :5])


def test_wrong_shapes_are_named(scorer: Scorer, table: np.ndarray) -> None:
    with pytest.raises(JaxguardError, match=r"instruction: got a vector of shape \(5,\), expected \(6,\)"):
        scorer.start(table[0, :5])
    state = scorer.start(table[0])
    with pytest.raises(JaxguardError, match=r"observation: got a vector of shape \(2, 6\), expected \(6,\)"):
        scorer.step(state, table[:2], table[0])
    with pytest.raises(JaxguardError, match=r"action: got a vector of shape \(7,\)"):
        scorer.step(state, table[0], np.zeros(7))
    broken = Sequence(np.zeros(2, np.int64), np.zeros(3, np.int64), 0)
    with pytest.raises(JaxguardError, match="trajectory 1: got 2 observations and 3 actions"):
        in_lanes(scorer, table, [sequence(1), broken])


def test_texts_become_rows_in_their_order() -> None:
    lengths = [0, 3, 1, *RNG.integers(0, 6, size=2 * LOOKED_UP).tolist()]
    texts = [
        Texts([f"o{i}.{t}" for t in range(n)], [f"a{i}.{t}" for t in range(n)], [], f"i{i % 5}")
        for i, n in enumerate(lengths)
    ]
    known: dict[str, int] = {}
    calls = []

    def rows(asked: list[str]) -> np.ndarray:
        calls.append(len(asked))
        return np.array([known.setdefault(text, len(known)) for text in asked])

    found = list(sequences(iter(texts), rows))
    assert len(calls) == 3
    name = {row: text for text, row in known.items()}
    told = [Texts([name[r] for r in s.obs], [name[r] for r in s.act], [], name[s.ins]) for s in found]
    assert told == texts


def test_both_texts_of_an_action_become_one_number_and_their_vectors_stand_side_by_side() -> None:
    texts = Texts(["o0", "o1"], ["a0", "a1"], ["s0", "s1"], "i")
    rows = np.array([4, 9, 2**31 - 1, 0, 3, 2**31 - 2, 7])
    (found,) = sequences([texts], lambda asked: rows[: len(asked)])
    assert found.obs.tolist() == [4, 9]
    assert found.ins == 7
    both = gather_pairs(lambda ids: np.stack([ids, -ids], axis=-1))
    assert both(found.act).tolist() == [[2**31 - 1, 1 - 2**31, 3, -3], [0, 0, 2**31 - 2, 2 - 2**31]]


@pytest.mark.parametrize("pooled", [False, True])
def test_lanes_equal_single_steps_where_an_action_has_two_vectors(
    tiny: ModelConfig, table: np.ndarray, pooled: bool
) -> None:
    config = dataclasses.replace(tiny, grounded=True)
    params = init_params(config, 4)
    if pooled:
        kernel = RNG.normal(size=params["pooled_head"]["kernel"].shape).astype(np.float32)
        params["pooled_head"] = {"kernel": kernel, "bias": np.ones(1, np.float32)}
    scorer = Scorer(config, params)
    items = []
    for length in (1, 3, CHUNK + 2, 5):
        own = sequence(length)
        items.append(Sequence(own.obs, beside(own.act, RNG.integers(0, ROWS, length)), own.ins))
    found = in_lanes(scorer, table, items)
    both = gather_pairs(lambda rows: table[rows])
    alone = []
    for position, item in enumerate(items):
        state = scorer.start(table[item.ins])
        for t, (obs, act) in enumerate(zip(table[item.obs], both(item.act), strict=True)):
            state, *risks = scorer.step(state, obs, act)
            np.testing.assert_allclose(found[position][t], risks, atol=1e-6)
            alone.append(risks[0])
    swapped = [Sequence(item.obs, beside(item.act & 0xFFFF, item.act >> 32), item.ins) for item in items]
    assert (
        np.abs(np.concatenate([r[:, 0] for _, r in sorted(in_lanes(scorer, table, swapped).items())]) - alone).max()
        > 1e-3
    )
    with pytest.raises(JaxguardError, match=rf"action: got a vector of shape \({tiny.embed_dim},\)"):
        scorer.step(state, table[0], table[1])
    states = scorer.start_many(table[:3])
    _, many = scorer.step_many(states, table[3:6], np.concatenate([table[6:9], table[9:12]], axis=1))
    one = scorer.step(scorer.start(table[1]), table[4], np.concatenate([table[7], table[10]]))[1:]
    np.testing.assert_allclose(many[1], one, atol=1e-6)
