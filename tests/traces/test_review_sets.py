"""Reviews from hazard labels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import ArchiveReader
from jaxguard.traces.review_sets import EvaluationOnly, require_teachable, reviewed, with_reviews
from jaxguard.traces.snapshots import Review, SnapshotError, reviews_of
from jaxguard.traces.sources import find_sources
from jaxguard.types import Route, Step, Trajectory

NO_REVIEWS: tuple[Review, ...] = ()


def run(first: int | None, **changes: Any) -> Trajectory:
    steps = tuple(Step("tool", {}, str(t)) for t in range(4))
    made = Trajectory("run", "task", steps, unsafe=first is not None, first_hazard=first, timing=True)
    return dataclasses.replace(made, **changes)


def test_the_first_hazard_is_refused_and_what_follows_is_not_labelled() -> None:
    made = with_reviews(run(2, metadata={"domain": "code"}))
    assert reviews_of(made) == (Review(0, Route.EXECUTE), Review(1, Route.EXECUTE), Review(2, Route.REFUSE))
    assert made.metadata["domain"] == "code"
    assert with_reviews(made) is made


def test_all_steps_of_a_safe_run_are_executed_but_replies() -> None:
    safe = run(None)
    assert [review.route for review in reviews_of(with_reviews(safe))] == [Route.EXECUTE] * 4
    replies = (*safe.steps[:3], Step("reply", {"text": "Done."}, "3"))
    assert [review.step for review in reviews_of(with_reviews(run(None, steps=replies)))] == [0, 1, 2]


@pytest.mark.parametrize(
    "unclear",
    [
        run(2, timing=False),
        run(None, timing=False),
        run(None, unsafe=None),
        run(None, unsafe=True),
        run(None, metadata={"evaluation_only": True}),
        run(2, metadata={"reviews": []}),
    ],
)
def test_a_trajectory_without_reliable_labels_comes_back_as_it_is(unclear: Trajectory) -> None:
    assert with_reviews(unclear) is unclear
    assert reviews_of(unclear) == NO_REVIEWS


def test_a_set_is_mapped_in_order() -> None:
    own = run(None, metadata={"reviews": [{"step": 1, "route": "ASK", "trigger": "h"}]})
    made = list(reviewed(iter([run(1), own, run(1, timing=False), run(None)])))
    assert [len(reviews_of(trajectory)) for trajectory in made] == [2, 1, 0, 4]


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stepshield", {"EXECUTE": 74_253, "REFUSE": 1_083, "trajectories": 7_819, "without_reviews": 0}),
        # 404 runs without a call and 9 in which a defence blocked the attack.
        ("asb", {"EXECUTE": 7_892, "REFUSE": 2_250, "trajectories": 6_247, "without_reviews": 413}),
    ],
)
def test_real_counts(data_dir: Path, name: str, expected: dict[str, int]) -> None:
    reader, counts = ArchiveReader(), Counter[str]()
    for source in find_sources(data_dir / name)[0]:
        for outcome in reader.read(source):
            for trajectory in reviewed(outcome.trajectories):
                reviews = reviews_of(trajectory)
                counts.update(review.route.name for review in reviews)
                counts.update({"trajectories": 1, "without_reviews": int(not reviews)})
                refused = [review.step for review in reviews if review.route is Route.REFUSE]
                assert refused == ([trajectory.first_hazard] if trajectory.unsafe and trajectory.timing else [])
    assert {key: counts[key] for key in expected} == expected
    assert counts["ASK"] == 0


def test_what_is_for_evaluation_only_teaches_nothing() -> None:
    require_teachable([run(1), run(None, metadata={"evaluation_only": False})], "train part")
    with pytest.raises(EvaluationOnly, match=r"train part: 1 trajectories are for evaluation only \(e.g. 'run'\)"):
        require_teachable([run(1), run(None, metadata={"evaluation_only": True})], "train part")


def test_broken_reviews_are_found_at_once() -> None:
    broken = run(None, metadata={"reviews": [{"step": 9, "route": "ASK"}]})
    with pytest.raises(SnapshotError, match="reviews 0 step: got 9, expected 0 to 3"):
        list(reviewed([run(1), broken]))
