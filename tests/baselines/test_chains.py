"""Abstract states of runs: what they remember, what they make of the unknown, and equal seeds give equal chains."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rival_samples import READER, run, runs

from jaxguard.baselines import chains
from jaxguard.baselines.chains import AbsorbingChain, Abstraction, Lesson, ToolChain, decaying_means
from jaxguard.baselines.rival import RivalError, score
from jaxguard.baselines.tools import tool_kind
from jaxguard.types import Step

LESSON = Lesson(runs(40), runs(20, seed=500), horizon=2)


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        ("delete_file", "remove"),
        ("GetOrders", "read"),
        ("payInvoice", "pay"),
        ("grant_access", "grant"),
        ("files.create", "write"),
        ("send_money", "send"),
        ("frobnicate", "other"),
        ("", "other"),
    ],
)
def test_tool_kinds(tool: str, kind: str) -> None:
    assert tool_kind(tool) == kind


def test_both_chains_remember_what_was_changed_last() -> None:
    """The hazard's step looks alike in safe and unsafe runs; only what came before differs."""
    test = runs(20, seed=900)
    for rival in (ToolChain(LESSON), AbsorbingChain(LESSON, READER)):
        last = np.array([risks[-1] for risks in score(rival, test)])
        assert last[1::2].min() > last[::2].max(), rival.name


def test_risk_rises_toward_the_hazard() -> None:
    risks = ToolChain(LESSON).risks(run(900, True))
    assert risks[-1] == risks.max()
    assert risks[-2] > risks[0]


def test_an_unknown_tool_counts_as_one_of_its_kind() -> None:
    rival, known = ToolChain(LESSON), run(900, True)
    renamed = dataclasses.replace(known.steps[-1], tool="mail_note")  # of the kind of send_note
    strange = dataclasses.replace(known.steps[-1], tool="frobnicate")
    as_kind, as_none = (
        rival.risks(dataclasses.replace(known, steps=(*known.steps[:-1], step)))[-1] for step in (renamed, strange)
    )
    assert as_kind > 0.5
    assert 0 < as_none < as_kind


def test_words_seen_once_stay_seen() -> None:
    steps = (Step("open", {}, "0"), Step("open", {}, "1", observation="confidential"), Step("open", {}, "2"))
    states = ToolChain(LESSON).states(dataclasses.replace(run(0, False), steps=steps))
    assert [len(keys[0][2]) for keys in states] == [0, 1, 1]  # type: ignore[index]


def test_the_decaying_mean_forgets_by_its_factor() -> None:
    sample = run(3, False)
    obs, act, _ = READER(sample)
    both = np.concatenate([obs, act], axis=1)
    means = decaying_means(READER, sample, 0.8)
    np.testing.assert_array_equal(means[0], both[0])
    np.testing.assert_allclose(means[2], 0.8 * (0.8 * both[0] + 0.2 * both[1]) + 0.2 * both[2], rtol=1e-5)
    np.testing.assert_allclose(decaying_means(READER, sample, 0.0), both, rtol=1e-6)


def test_the_nearest_centre_is_the_state() -> None:
    sample = run(3, False)
    points = decaying_means(READER, sample, 0.5)
    found = Abstraction(READER, 0.5, points[[4, 2, 1]])(sample)
    assert [found[t][0][0] for t in (4, 2, 1)] == [0, 1, 2]  # type: ignore[index]


def test_chains_learn_up_to_the_hazard_alone() -> None:
    """What follows the hazard, and runs that teach nothing, change no risk."""
    extra = Step("wipe_all", {}, "x", observation="confidential")
    longer = [dataclasses.replace(t, steps=(*t.steps, extra)) if t.unsafe else t for t in LESSON.train]
    untimed = [dataclasses.replace(run(77, u), timing=False) for u in (False, True)]
    changed = dataclasses.replace(LESSON, train=[*longer, *untimed])
    test = runs(6, seed=900)
    for one, two in (
        (ToolChain(LESSON), ToolChain(changed)),
        (AbsorbingChain(LESSON, READER), AbsorbingChain(changed, READER)),
    ):
        for a, b in zip(score(one, test), score(two, test), strict=True):
            np.testing.assert_array_equal(a, b)


def test_equal_seeds_give_equal_risks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "MOST_STEPS", 100)  # fewer than there are: a part is drawn
    test = runs(6, seed=900)
    first, again = (score(AbsorbingChain(LESSON, READER), test) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_validation_chooses_and_without_it_there_is_a_default() -> None:
    chosen, plain = AbsorbingChain(LESSON, READER), AbsorbingChain(dataclasses.replace(LESSON, validation=()), READER)
    assert plain.states.decay == 0.5
    assert len(plain.states.centres) == 16
    assert chosen.states.decay in chains.DECAYS
    assert len(chosen.states.centres) in chains.CLUSTERS


def test_no_hazard_to_learn_from_is_refused() -> None:
    lesson = Lesson([run(i, False) for i in range(4)])
    for make in (lambda: ToolChain(lesson), lambda: AbsorbingChain(lesson, READER)):
        with pytest.raises(RivalError, match="none of 4 training trajectories has a first hazard step"):
            make()
