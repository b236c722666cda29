"""The chain against counting by hand, enumeration of all paths, and the fundamental matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxguard.baselines.markov import Keys, MarkovChain

Runs = list[tuple[list[Keys], bool]]
letters = st.sampled_from("abc")
some_runs = st.lists(st.tuples(st.lists(letters, min_size=1, max_size=5), st.booleans()), min_size=1, max_size=8)


def keyed(found: list[tuple[list[str], bool]]) -> Runs:
    """States that are letters, of which a and b share a more general key."""
    return [([(letter, letter == "c") for letter in run], violated) for run, violated in found]


def by_enumeration(matrix: np.ndarray, start: int, horizon: int) -> float:
    """Sum over every path of transient states that reaches the violation within the horizon."""
    size, total = len(matrix), 0.0
    for length in range(horizon):
        for path in itertools.product(range(size), repeat=length):
            states = (start, *path)
            moves = [matrix[a, b] for a, b in itertools.pairwise(states)]
            total += np.prod(moves) * matrix[states[-1], size]
    return total


def test_transitions_are_counts_shrunk_toward_the_general_and_the_uniform() -> None:
    chain = MarkovChain(keyed([(["a", "c"], True), (["a", "b"], False)]), horizon=1)
    assert chain.states == ("a", "c", "b")
    # Successors in the order a, c, b, violation, end; one transition's worth of the more general row each time.
    any_two = (np.array([0, 1, 1, 0, 1]) + 0.2) / 4
    np.testing.assert_allclose(chain.matrix()[0], (np.array([0, 1, 1, 0, 0]) + any_two) / 3)
    c_only = (np.array([0, 0, 0, 1, 0]) + 0.2) / 2
    np.testing.assert_allclose(chain.matrix()[1], (np.array([0, 0, 0, 1, 0]) + c_only) / 2)
    assert chain.risk(("a", False)) == pytest.approx(chain.matrix()[0, 3])


def test_a_state_that_training_did_not_show_has_the_row_of_what_it_is_like() -> None:
    chain = MarkovChain(keyed([(["a", "c"], True), (["a", "b"], False)]), horizon=1)
    assert chain.risk(("z", True)) == pytest.approx((1 + 0.2) / 2)
    assert chain.risk(("z", False)) == pytest.approx(0.2 / 4)
    assert chain.risk(("z", None)) == pytest.approx(0.2)


@settings(max_examples=25, deadline=None)
@given(some_runs, st.integers(1, 4))
def test_bounded_reachability_is_the_sum_over_paths(found: list, horizon: int) -> None:
    chain = MarkovChain(keyed(found), horizon)
    matrix = chain.matrix()
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0)
    assert (matrix > 0).all()
    for at, state in enumerate(chain.states):
        expected = by_enumeration(matrix, at, horizon)
        assert chain.risk((state, state == "c")) == pytest.approx(expected)


@settings(max_examples=10, deadline=None)
@given(some_runs)
def test_without_a_bound_it_is_absorption(found: list) -> None:
    """(I - Q)^-1 R, the fundamental matrix times the transitions to the violation."""
    chain = MarkovChain(keyed(found), 400)
    matrix, size = chain.matrix(), len(chain.states)
    absorbed = np.linalg.solve(np.eye(size) - matrix[:, :size], matrix[:, size])
    np.testing.assert_allclose(chain.values[0], absorbed, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(some_runs, st.integers(1, 6))
def test_risks_are_probabilities_and_grow_with_the_horizon(found: list, horizon: int) -> None:
    short, long = MarkovChain(keyed(found), horizon), MarkovChain(keyed(found), horizon + 1)
    for near, far in zip(short.values, long.values, strict=True):
        assert (near >= 0).all()
        assert (near <= far + 1e-12).all()
        assert (far <= 1 + 1e-12).all()
