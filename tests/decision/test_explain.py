"""Reasons and questions say what was seen, and nothing else."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from jaxguard.decision.explain import LONGEST_QUOTE, REASONS, explain, missing_arguments
from jaxguard.traces.snapshots import TRIGGERS
from jaxguard.types import Route, Step

SEND = Step("send_file", {"file": "plan.q1", "to": "ada"}, "c1")


def test_every_trigger_that_stops_a_call_has_a_reason() -> None:
    assert set(REASONS) == {letter for letter, route in TRIGGERS.items() if route is not Route.EXECUTE}


def test_a_call_that_may_run_needs_no_words() -> None:
    for trigger in ("", "a", "g"):
        assert explain(Route.EXECUTE, trigger, SEND, evidence="x", note="y", missing=["z"]) == ("", "")


@pytest.mark.parametrize("trigger", ["", *"efghijklmn"])
def test_refused_calls_have_a_reason_and_no_question_asked_ones_both(trigger: str) -> None:
    reason, question = explain(Route.REFUSE, trigger, SEND)
    assert reason == (REASONS[trigger] if trigger else "Nothing was seen that settles this call.")
    assert question == ""
    asked_reason, question = explain(Route.ASK, trigger, SEND)
    assert asked_reason == reason
    assert question.endswith("?")
    assert "send_file" in question
    assert "plan.q1" in question


@pytest.mark.parametrize(
    ("evidence", "note"), list(itertools.product(["", "plan.q1 is sealed."], ["", "Ask about plan.q1."]))
)
def test_only_what_was_seen_is_quoted(evidence: str, note: str) -> None:
    reason, _ = explain(Route.ASK, "h", SEND, evidence=evidence, note=note)
    assert re.findall(r'"([^"]*)"', reason) == [text for text in (evidence, note) if text]
    assert ("The trace says" in reason) == bool(evidence)
    assert ("The memory says" in reason) == bool(note)
    assert reason.startswith(REASONS["h"])


def test_long_quotes_are_cut_visibly() -> None:
    fits, long = "x" * LONGEST_QUOTE, "y" * (LONGEST_QUOTE + 1)
    reason, _ = explain(Route.REFUSE, "j", SEND, evidence=fits, note=long)
    quoted = re.findall(r'"([^"]*)"', reason)
    assert quoted == [fits, "y" * (LONGEST_QUOTE - 3) + "..."]


def test_the_question_names_what_is_missing() -> None:
    assert explain(Route.ASK, "e", SEND, missing=["until", "rights"])[1] == (
        "send_file on plan.q1: what should until, rights be?"
    )
    assert explain(Route.ASK, "e", SEND)[1] == "send_file on plan.q1: what should the value that is missing be?"


def test_braces_in_names_are_text() -> None:
    odd = Step("{tool}", {"x": "{missing}"}, "c")
    assert explain(Route.ASK, "g", odd)[1] == "{tool} on {missing} cannot be taken back. Go ahead?"


@pytest.mark.parametrize(
    ("arguments", "thing"),
    [
        ({"flag": True, "blank": " ", "list": ["a"], "none": None, "number": 7, "name": "b"}, "7"),
        ({"list": ["a"]}, "this"),
        ({}, "this"),
        (None, "this"),
    ],
)
def test_the_thing_is_the_first_argument_that_names_one(arguments: dict[str, object] | None, thing: str) -> None:
    call = Step("act", arguments, "c", raw_arguments="{oops" if arguments is None else None)
    assert explain(Route.ASK, "", call)[1] == f"May act run on {thing}?"


def test_missing_arguments_are_empty_ones_and_those_that_earlier_calls_had() -> None:
    earlier = [
        Step("send_file", {"file": "a", "to": "b", "until": "may"}, "c0"),
        Step("send_file", None, "c1", raw_arguments="{"),
        Step("drop_file", {"force": True}, "c2"),
    ]
    assert missing_arguments(SEND, earlier) == ("until",)
    assert missing_arguments(SEND, []) == ()
    holes = Step(
        "send_file", {"to": "", "file": " \n", "cc": [], "more": {}, "until": None, "zero": 0, "no": False}, "c"
    )
    assert missing_arguments(holes, earlier) == ("to", "file", "cc", "more", "until")
    assert missing_arguments(Step("send_file", {}, "c"), earlier) == ("file", "to", "until")
    numbers = {"a": np.float64(1.5), "b": np.float64(0.0), "c": (), "d": set(), "e": np.zeros(2)}
    assert missing_arguments(Step("send_file", numbers, "c"), []) == ("c", "d")


def test_of_unparsable_arguments_it_is_not_known_what_they_lack() -> None:
    earlier = [Step("send_file", {"file": "a"}, "c0")]
    assert missing_arguments(Step("send_file", None, "c", raw_arguments='{"file": "b"'), earlier) == ()


@pytest.mark.parametrize("trigger", ["", *"efghi"])
def test_a_question_can_be_sent_whatever_the_names_of_a_call_hold(trigger: str) -> None:
    odd = Step("t\ud800" + "x" * 10_000, {"k": "\udc00y", "z\ud800": ""}, "c")
    missing = [f"key{i}\ud800" for i in range(10_000)]
    _, question = explain(Route.ASK, trigger, odd, missing=missing)
    assert "\ufffd" in question.encode().decode()
    assert len(question) < 4 * LONGEST_QUOTE


def test_what_is_quoted_hides_nothing_from_a_reader() -> None:
    sly = "a\x1b[2Kb\u202egnp\r\nok\ud800"
    said = explain(Route.ASK, "e", Step(sly, {"file": sly}, "c1"), evidence=sly, note=sly, missing=[sly])
    for text in said:
        assert not re.search("[\x00-\x1f\u202e\ud800]", text)
        text.encode()
    assert "a\ufffd[2Kb" in said[0]
