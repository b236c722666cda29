"""The interface: what a rival is shown, what it may answer, and that both ways to ask are one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rival_samples import READER, lookup, run

from jaxguard.baselines.rival import PrefixRival, RivalError, blind, score
from jaxguard.features.texts import action_text
from jaxguard.types import Step, Trajectory


class Recorder:
    """Answers what it is told to, and keeps what it was shown."""

    name = "recorder"

    def __init__(self, *answers: float):
        self.answers = list(answers)
        self.shown: list[tuple[Trajectory, Step]] = []

    def observe(self, prefix: Trajectory, action: Step) -> float:
        self.shown.append((prefix, action))
        return self.answers[len(self.shown) - 1]


def test_each_step_is_asked_about_with_what_ran_before_it() -> None:
    sample, rival = run(1, True, 4), Recorder(0.0, 0.25, float("nan"), 1.0)
    (risks,) = score(rival, [sample])
    np.testing.assert_array_equal(risks, [0.0, 0.25, np.nan, 1.0])
    for t, (prefix, action) in enumerate(rival.shown):
        assert [s.tool for s in prefix.steps] == [s.tool for s in sample.steps[:t]]
        assert (action.tool, action.observation) == (sample.steps[t].tool, sample.steps[t].observation)


def test_no_label_is_shown() -> None:
    steps = tuple(s.marked(True, True) for s in run(1, True, 4).steps)
    metadata = {"risk_type": "leak", "final_reply": "done"}
    labelled = dataclasses.replace(
        run(1, True, 4), steps=steps, group="bad", final_observation="leaked", metadata=metadata
    )
    rival = Recorder(0, 0, 0, 0)
    score(rival, [labelled])
    for prefix, action in rival.shown:
        assert (prefix.unsafe, prefix.first_hazard, prefix.timing) == (None, None, False)
        assert (prefix.group, prefix.final_observation, dict(prefix.metadata)) == ("", "", {})
        assert all((s.hazard, s.unobserved) == (None, False) for s in (*prefix.steps, action))
    assert blind(blind(labelled)) == blind(labelled)


@pytest.mark.parametrize("answer", [-0.1, 1.5, float("inf")])
def test_an_answer_that_is_no_risk_is_refused(answer: float) -> None:
    with pytest.raises(RivalError, match=r"rival 'recorder', trajectory '1-True', step 1: risk is .*, expected one in"):
        score(Recorder(0.5, answer, 0.5, 0.5), [run(1, True, 4)])


@pytest.mark.parametrize("answer", [[], [np.zeros(3)], [np.zeros((4, 1))]])
def test_answers_must_be_aligned(answer: list[np.ndarray]) -> None:
    class Batched(Recorder):
        def score_all(self, trajectories: object) -> list[np.ndarray]:
            return answer

    with pytest.raises(RivalError, match=r"scored 0 trajectories, expected 1|risks have shape"):
        score(Batched(), [run(1, True, 4)])


def test_a_run_without_steps_has_no_risks() -> None:
    (risks,) = score(Recorder(), [Trajectory("empty", "nothing to do", ())])
    assert risks.shape == (0,)


def test_a_prefix_rival_is_asked_for_the_last_step() -> None:
    class Counter(PrefixRival):
        name = "counter"

        def risks(self, trajectory: Trajectory) -> np.ndarray:
            return np.arange(len(trajectory)) / 10

    sample = blind(run(1, True, 4))
    assert Counter().observe(dataclasses.replace(sample, steps=sample.steps[:2]), sample.steps[2]) == 0.2


def test_the_reader_gives_what_the_guard_reads_and_not_the_last_result() -> None:
    sample = dataclasses.replace(run(1, True, 4), final_observation="never looked up")
    asked: list[str] = []

    def recording(texts: tuple[str, ...]) -> np.ndarray:
        asked.extend(texts)
        return lookup(texts)

    obs, act, ins = dataclasses.replace(READER, lookup=recording)(sample)
    assert "never looked up" not in asked
    np.testing.assert_array_equal(obs, lookup([s.observation for s in sample.steps]))
    np.testing.assert_array_equal(act[3], lookup([action_text(sample.steps[3])])[0])
    np.testing.assert_array_equal(ins, lookup(["do it"])[0])
