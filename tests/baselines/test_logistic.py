"""The learnt baselines see what they claim to see, and no more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxguard.baselines.logistic import BagScorer, LogisticRival
from jaxguard.baselines.rival import StepReader
from jaxguard.training.episodes import Episodes

DIM = 5


@dataclasses.dataclass(frozen=True)
class StepScores:
    steps: list[np.ndarray]

    @property
    def maxima(self) -> np.ndarray:
        return np.array([s.max() for s in self.steps])


def step_scores(train: Episodes, test: Episodes, name: str = "step") -> StepScores | None:
    rival = LogisticRival.fit(train, name, StepReader(lambda texts: np.zeros((len(texts), DIM))))
    return None if rival is None else StepScores([rival.of_steps(*test.vectors(i)) for i in range(len(test))])


def bag_scores(train: Episodes, test: Episodes) -> np.ndarray | None:
    return BagScorer(train)(test)


def episodes(count: int, seed: int, hazards: Sequence[int] | None = None) -> Episodes:
    """Trajectories of 4 steps; in every second one, step 2 is the hazard: its action has a large first value."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(count * 10, DIM)).astype(np.float32)
    rows = tuple((np.arange(5) + 10 * i, np.arange(5, 9) + 10 * i, 10 * i + 9) for i in range(count))
    unsafe = tuple(bool(i % 2) for i in range(count))
    for i in range(1, count, 2):
        table[rows[i][1][2], 0] += 8.0
    default = [2 if bad else -1 for bad in unsafe]
    return Episodes(
        table=table,
        ids=tuple(f"{seed}-{i}" for i in range(count)),
        rows=rows,
        new_observation=tuple(np.ones(4, bool) for _ in range(count)),
        hazard_step=np.array(default if hazards is None else hazards),
        unsafe=unsafe,
        cut=0,
    )


def with_rows(source: Episodes, index: int, observations: Sequence[int], actions: Sequence[int]) -> Episodes:
    """``source`` with other table rows, relative to the trajectory's own."""
    rows = list(source.rows)
    old_observations, old_actions, instruction = rows[index]
    rows[index] = (old_observations[list(observations)], old_actions[list(actions)], instruction)
    return dataclasses.replace(source, rows=tuple(rows))


TRAIN, TEST = episodes(60, 0), episodes(20, 1)


def test_step_scorer_finds_the_step() -> None:
    found = step_scores(TRAIN, TEST)
    assert found is not None
    assert [len(s) for s in found.steps] == [4] * 20
    assert all(s.min() >= 0 and s.max() <= 1 for s in found.steps)
    assert found.maxima.tolist() == [s.max() for s in found.steps]
    assert [int(np.argmax(s)) for s in found.steps[1::2]] == [2] * 10
    assert found.maxima[1::2].min() > found.maxima[::2].max()


def test_step_scorer_has_no_memory() -> None:
    """Other steps before and after leave a step's score; another observation, action or instruction does not."""
    base = step_scores(TRAIN, TEST)
    assert base is not None
    moved = step_scores(TRAIN, with_rows(TEST, 3, (2, 3, 1, 0, 4), (2, 3, 1, 0)))
    assert moved is not None
    np.testing.assert_allclose(moved.steps[3], base.steps[3][[2, 3, 1, 0]], rtol=1e-6)
    result = step_scores(TRAIN, with_rows(TEST, 3, (0, 1, 2, 3, 0), (0, 1, 2, 3)))
    assert result is not None
    np.testing.assert_array_equal(result.steps[3], base.steps[3])  # the last call's result is not read
    for changed in (with_rows(TEST, 3, (0, 0, 2, 3, 4), (0, 1, 2, 3)), with_rows(TEST, 3, range(5), (0, 0, 2, 3))):
        other = step_scores(TRAIN, changed)
        assert other is not None
        assert other.steps[3][1] != base.steps[3][1]
        np.testing.assert_allclose(other.steps[3][[0, 2, 3]], base.steps[3][[0, 2, 3]], rtol=1e-6)


def test_pooled_scorer_remembers_what_came_before_in_any_order_and_nothing_after() -> None:
    base = step_scores(TRAIN, TEST, "pooled")
    assert base is not None
    assert [int(np.argmax(s)) for s in base.steps[1::2]] == [2] * 10
    swapped = step_scores(TRAIN, with_rows(TEST, 4, (1, 0, 2, 3, 4), (1, 0, 2, 3)), "pooled")
    replaced = step_scores(TRAIN, with_rows(TEST, 4, (3, 1, 2, 3, 4), (0, 1, 2, 3)), "pooled")
    later = step_scores(TRAIN, with_rows(TEST, 4, (0, 1, 2, 0, 4), (0, 1, 2, 0)), "pooled")
    assert swapped is not None
    assert replaced is not None
    assert later is not None
    np.testing.assert_allclose(swapped.steps[4][2:], base.steps[4][2:], rtol=1e-5)
    assert (np.abs(replaced.steps[4] - base.steps[4]) > 1e-6).all()
    np.testing.assert_array_equal(later.steps[4][:3], base.steps[4][:3])


def test_step_scorer_learns_from_supervised_steps_alone() -> None:
    """What follows the hazard, and trajectories without supervision, change nothing."""
    base = step_scores(TRAIN, TEST)
    table = TRAIN.table.copy()
    for observations, actions, _ in TRAIN.rows[1::2]:
        table[actions[3]] += 50.0
        table[observations[3:]] -= 50.0
    assert base is not None
    after = step_scores(dataclasses.replace(TRAIN, table=table), TEST)
    assert after is not None
    np.testing.assert_array_equal(after.maxima, base.maxima)
    fewer = dataclasses.replace(TRAIN, hazard_step=np.where(np.arange(60) < 10, -2, TRAIN.hazard_step))
    only = dataclasses.replace(
        TRAIN, rows=TRAIN.rows[10:], hazard_step=TRAIN.hazard_step[10:], ids=TRAIN.ids[10:], unsafe=TRAIN.unsafe[10:]
    )
    one, two = step_scores(fewer, TEST), step_scores(only, TEST)
    assert one is not None
    assert two is not None
    np.testing.assert_array_equal(one.maxima, two.maxima)
    assert (one.maxima != base.maxima).any()


def test_bag_scorer_tells_trajectories_apart_and_is_blind_to_order() -> None:
    base = bag_scores(TRAIN, TEST)
    assert base is not None
    assert base.shape == (20,)
    assert base[1::2].min() > base[::2].max()
    shuffled = bag_scores(TRAIN, with_rows(TEST, 3, (2, 0, 3, 1, 4), (3, 1, 0, 2)))
    assert shuffled is not None
    np.testing.assert_allclose(shuffled, base, rtol=1e-5)
    changed = bag_scores(TRAIN, with_rows(TEST, 3, range(5), (3, 1, 0, 0)))
    assert changed is not None
    assert changed[3] < base[3]


def test_one_class_gives_no_scorer() -> None:
    assert step_scores(episodes(20, 0, hazards=[-1] * 20), TEST) is None
    assert step_scores(episodes(20, 0, hazards=[-2] * 20), TEST) is None
    for labels in ((False,) * 60, (True,) * 60, (None,) * 60, (None, True) * 30):
        assert bag_scores(dataclasses.replace(TRAIN, unsafe=labels), TEST) is None


def test_unlabelled_trajectories_do_not_teach_the_bag() -> None:
    labels = tuple(None if i < 10 else label for i, label in enumerate(TRAIN.unsafe))
    one = bag_scores(dataclasses.replace(TRAIN, unsafe=labels), TEST)
    two = bag_scores(
        dataclasses.replace(TRAIN, rows=TRAIN.rows[10:], ids=TRAIN.ids[10:], unsafe=TRAIN.unsafe[10:]), TEST
    )
    assert one is not None
    assert two is not None
    np.testing.assert_array_equal(one, two)
