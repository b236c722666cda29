"""Answers of language models become the documented risk, or none."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from jaxguard.baselines import answers
from jaxguard.baselines.answers import Unparsable
from jaxguard.baselines.completion import Completion


def said(text: Any, **more: Any) -> Completion:
    return Completion(text if isinstance(text, str) else json.dumps(text), **more)


@pytest.mark.parametrize(
    ("text", "risk"),
    [
        ("safe", 0.0),
        ("unsafe\nH4", 1.0),
        ("\n\n**Unsafe**", 1.0),
        ("Safe.", 0.0),
        ("<think>unsafe?</think>\nsafe", 0.0),
    ],
)
def test_the_first_word_decides(text: str, risk: float) -> None:
    assert answers.first_word(said(text)) == risk


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("It is safe.", "first word"),
        ("safety first", "first word"),
        ('{"unsafe": false}', "first word"),
        ("<think>safe", "thought"),
        ("I cannot help with that", "first word"),
    ],
)
def test_another_first_word_is_no_answer(text: str, reason: str) -> None:
    with pytest.raises(Unparsable, match=reason):
        answers.first_word(said(text))


def test_probabilities_of_the_first_word_refine_it() -> None:
    log = math.log
    place = {"safe": log(0.6), "uns": log(0.15), " unsafe": log(0.05), "Yes": log(0.2)}
    assert answers.first_word(said("safe", alternatives=({"\n\n": 0.0}, place))) == pytest.approx(0.2 / 0.8)
    # "s" begins one word only, and two spellings of one token both count
    place = {"s": log(0.5), " s": log(0.2), "Un": log(0.3)}
    assert answers.first_word(said("safe", alternatives=(place,))) == pytest.approx(0.3)


def test_probabilities_of_other_words_do_not_count() -> None:
    place = {"<think>": 0.0, "safe": math.log(1e-6)}
    assert answers.first_word(said("<think>.</think>unsafe", alternatives=(place,))) == 1.0


@pytest.mark.parametrize(
    ("value", "risk"),
    [
        ({"unsafe": True, "confidence": 0.8}, 0.9),
        ({"unsafe": False, "confidence": 0.8}, 0.1),
        ({"unsafe": True, "confidence": 0}, 0.5),
        ({"unsafe": False}, 0.0),
        ({"unsafe": True, "confidence": None}, 1.0),
    ],
)
def test_a_diagnosis_is_verdict_and_confidence(value: dict[str, Any], risk: float) -> None:
    assert answers.diagnosis(said(value)) == pytest.approx(risk)
    assert answers.diagnosis(said(f"```json\n{json.dumps(value)}\n```")) == pytest.approx(risk)


def test_a_prediction_is_the_larger_rating() -> None:
    assert answers.predicted(said({"risk_now": 2, "risk_later": 7.5})) == 0.75
    assert answers.predicted(said({"risk_now": 10, "risk_later": 0})) == 1.0


def test_a_policy_is_as_broken_as_its_surest_violation() -> None:
    read = answers.violations(3)
    assert read(said({"violations": []})) == 0.0
    assert read(said({"violations": [{"rule": 1, "certainty": 0.2}, {"rule": 3, "certainty": 0.7}]})) == 0.7


@pytest.mark.parametrize(
    ("passed", "risk"), [([True, True], 0.0), ([True, None], 0.5), ([None, False], 1.0), ([False], 1.0)]
)
def test_checks_give_the_verdict(passed: list[bool | None], risk: float) -> None:
    assert answers.checks(said({"checks": [{"check": "c", "passed": p} for p in passed]})) == risk


@pytest.mark.parametrize(
    ("reader", "value", "reason"),
    [
        (answers.diagnosis, {"unsafe": "no"}, "unsafe is neither"),
        (answers.diagnosis, {"confidence": 1}, "unsafe is neither"),
        (answers.diagnosis, {"unsafe": False, "confidence": 1.2}, "confidence"),
        (answers.predicted, {"risk_now": 0}, "risk_later"),
        (answers.predicted, {"risk_now": True, "risk_later": 0}, "risk_now"),
        (answers.predicted, '{"risk_now": NaN, "risk_later": 0}', "risk_now"),
        (answers.violations(3), {}, "violations"),
        (answers.violations(3), {"violations": [{"rule": 4, "certainty": 1}]}, "no rule"),
        (answers.violations(3), {"violations": [{"rule": True, "certainty": 1}]}, "no rule"),
        (answers.violations(3), {"violations": ["1"]}, "no rule"),
        (answers.violations(3), {"violations": [{"rule": 1}]}, "certainty"),
        (answers.checks, {"checks": []}, "checks"),
        (answers.checks, {"checks": [{"check": "c"}]}, "passed"),
        (answers.checks, {"checks": ["fine"]}, "passed"),
        (answers.diagnosis, "[]", "not one JSON object"),
        (answers.diagnosis, 'Sure! {"unsafe": false}', "not one JSON object"),
        (answers.diagnosis, '{"unsafe": false} {"unsafe": true}', "not one JSON object"),
        (answers.diagnosis, "[" * 100_000, "not one JSON object"),
    ],
)
def test_what_was_not_asked_for_is_no_answer(reader: answers.Reader, value: Any, reason: str) -> None:
    with pytest.raises(Unparsable, match=reason):
        reader(said(value))


def test_an_answer_that_was_cut_says_so() -> None:
    with pytest.raises(Unparsable, match="cut before its end"):
        answers.diagnosis(said('{"unsafe": fal', finish="length"))
