"""The text baselines read what they say they read, and learn from it."""

from __future__ import annotations

import numpy as np

from jaxguard.baselines.text_routes import KINDS, MAJORITY, Step, text_routes
from jaxguard.types import Route, Trajectory
from jaxguard.types import Step as Call


def case(tool: str, seen: str, memory: str, earlier: str = "", after: str = "") -> Step:
    """A trajectory of three steps whose second is asked about."""
    steps = (
        Call("look", {}, "0", observation=""),
        Call(tool, {"item": "vase"}, "1", observation=f"{earlier} {seen}".strip()),
        Call(after or "stop", {}, "2", observation=after),
    )
    return Trajectory("t", "tidy up", steps, metadata={"memory": memory}), 1


def cases(which: str, count: int = 30) -> tuple[list[Step], np.ndarray]:
    """Steps whose route is told by one place only: the tool, what was seen, or memory."""
    labels = np.arange(count) % 3
    marks = [("alpha", "beta", "gamma")[label] for label in labels]
    noise = [f"word{i * 7 % 5}" for i in range(count)]
    fixed = {"tool": "act", "seen": "quiet", "memory": "none"}
    made = [
        case(**{**fixed, which: f"{mark}_x" if which == "tool" else f"{mark} {word}"})
        for mark, word in zip(marks, noise, strict=True)
    ]
    return made, labels


def accuracy(which: str) -> dict[str, float]:
    steps, labels = cases(which)
    found = text_routes(steps, labels, steps[:12])
    majority = found.pop(MAJORITY)
    assert set(majority.tolist()) == set((labels[:12] if which == "tool" else labels[-1:]).tolist())
    assert set(found) == set(KINDS)
    for routes in found.values():
        assert routes.shape == (12,)
        assert routes.dtype == np.int64
        assert set(routes.tolist()) <= set(Route)
    return {name: float((routes == labels[:12]).mean()) for name, routes in found.items()}


def test_each_reads_what_its_name_says() -> None:
    assert accuracy("tool") == {"bag of words": 1.0, "current call": 1.0, "call and latest observation": 1.0}
    seen = accuracy("seen")
    assert seen["bag of words"] == seen["call and latest observation"] == 1.0
    assert seen["current call"] < 0.5
    memory = accuracy("memory")
    assert memory["bag of words"] == 1.0
    assert max(memory["current call"], memory["call and latest observation"]) < 0.5


def test_nothing_after_the_step_is_read() -> None:
    for text in KINDS.values():
        assert text(case("act", "quiet", "none", after="later")) == text(case("act", "quiet", "none", after="other"))


def test_names_with_joints_are_one_token() -> None:
    labels = np.array([0, 1] * 6)
    train = [case("act", "web-api" if label else "api web", "none") for label in labels]
    found = text_routes(train, labels, train[:2])
    assert found["call and latest observation"].tolist() == [0, 1]


def test_majority_by_tool() -> None:
    tools, labels = ["read", "read", "send", "send", "drop", "read"], np.array([0, 0, 0, 1, 2, 2])
    train, asked = ([case(tool, "", "") for tool in own] for own in (tools, ["read", "send", "drop", "new"]))
    assert text_routes(train, labels, asked)[MAJORITY].tolist() == [0, 1, 2, 0]


def test_one_class_gives_the_majority_and_nothing_asked_gives_nothing() -> None:
    steps, labels = cases("tool", 6)
    assert set(text_routes(steps, np.zeros(6, np.int64), steps)) == {MAJORITY}
    assert text_routes(steps, labels, []) == {}
    assert text_routes([], np.zeros(0, np.int64), steps) == {}
    assert set(np.unique(text_routes(steps, labels % 2, steps)["current call"])) == {0, 1}


def test_a_kind_without_a_word_to_learn_from_is_left_out() -> None:
    labels = np.array([0, 1] * 3)
    silent = [(Trajectory("t", "?", (Call("?", {}, "0"),)), 0) for _ in labels]
    assert set(text_routes(silent, labels, silent)) == {MAJORITY, "bag of words"}  # the snapshot has words of its own
