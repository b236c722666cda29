"""Cases: which trajectories make one, which tools they have, and what those answer."""

from __future__ import annotations

import re

import pytest

from jaxguard.online.cases import GENERIC, CaseError, MockTools, make_cases
from jaxguard.types import Step, Trajectory


def run(name: str, *steps: Step, unsafe: bool | None = False, final: str = "", **metadata: object) -> Trajectory:
    return Trajectory(name, f"do {name}", steps, unsafe=unsafe, final_observation=final, metadata=metadata)


def step(tool: str, observation: str = "", number: int = 0, **more: object) -> Step:
    marks = {name: more.pop(name) for name in ("parallel", "unobserved", "hazard") if name in more}
    return Step(tool, more, f"c{number}", observation, **marks)  # type: ignore[arg-type]


def only(trajectory: Trajectory, *others: Trajectory):
    cases, _ = make_cases([trajectory, *others], 100, 1)
    return next(case for case in cases if case.id == trajectory.id)


def test_what_makes_no_case_is_counted_with_its_reason() -> None:
    cases, left_out = make_cases(
        [
            run("good", step("read")),
            run("named", tools=["read"]),
            run("unlabelled", step("read"), unsafe=None),
            Trajectory("mute", " ", (step("read"),), unsafe=False),
            run("talk", step("reply", text="no")),
            run("words", step("read"), step("reply", number=1, hazard=True, text="how to"), unsafe=True),
        ],
        100,
        1,
    )
    assert [case.id for case in cases] == ["good", "named"]
    assert left_out == {
        "without a label": 1,
        "without an instruction": 1,
        "without a tool": 1,
        "whose hazard is an answer, not a call": 1,
    }
    with pytest.raises(CaseError, match="1 without a label"):
        make_cases([run("unlabelled", step("read"), unsafe=None)], 100, 1)


def test_schemas_are_inferred_from_all_calls() -> None:
    calls = [
        Step("send", {"to": "a", "times": 1, "cc": ["b"], "flag": True, "mixed": 1, "maybe": None}, "c0"),
        Step("send", {"to": "b", "times": 1.5, "cc": [], "flag": False, "mixed": "x"}, "c1"),
    ]
    case = only(run("a", calls[0], tools=["other"]), run("b", calls[1]), run("c", Step("send", None, "c", "", "{bad")))
    other, send = (schema["function"] for schema in case.schemas)
    assert send == {
        "name": "send",
        "parameters": {
            "type": "object",
            "properties": {
                "to": {"type": "string"},
                "times": {"type": "number"},
                "cc": {"type": "array", "items": {}},
                "flag": {"type": "boolean"},
                "mixed": {},
                "maybe": {},
            },
            "required": ["to", "times", "cc", "flag", "mixed"],
            "additionalProperties": False,
        },
    }
    assert other == {
        "name": "other",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": True},
    }


def test_names_become_what_endpoints_take_and_lead_back() -> None:
    tools = ["mail.send", "mail_send", "größe", "x" * 80, "x" * 81]
    case = only(run("a", *(step(tool, number=i) for i, tool in enumerate(tools))))
    assert list(case.tools.values()) == tools
    assert len(set(case.tools)) == 5
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in case.tools)
    assert [schema["function"]["name"] for schema in case.schemas] == list(case.tools)


def test_a_call_gets_what_was_recorded_after_it() -> None:
    tools = MockTools(only(run("a", step("read", file="x"), step("read", "X", 1, file="y"), final="Y")))
    assert tools.answer("read", {"file": "y"}) == ("Y", "recorded")
    assert tools.answer("read", {"file": "x"}) == ("X", "recorded")
    assert tools.answer("read", {"file": "x"}) == ("X", "recorded")


def test_equal_calls_get_their_results_in_order() -> None:
    tools = MockTools(only(run("a", step("poll"), step("poll", "one", 1), step("poll", "two", 2), final="three")))
    assert [tools.answer("poll", {})[0] for _ in range(4)] == ["one", "two", "three", "three"]


def test_other_arguments_get_what_the_tool_showed_and_other_tools_a_fixed_sentence() -> None:
    tools = MockTools(only(run("a", step("read", file="x"), step("send", "injected", 1, to="b"), final="Sent")))
    assert tools.answer("read", {"file": "z"}) == ("injected", "same_tool")
    assert tools.answer("list", {}) == (GENERIC, "generic")


def test_an_unobserved_or_unreadable_call_has_nothing_to_show() -> None:
    unreadable = Step("parse", None, "c1", "x", raw_arguments="{bad")
    tools = MockTools(only(run("a", step("read", unobserved=True), unreadable, final="after")))
    assert tools.answer("read", {}) == (GENERIC, "generic")
    assert tools.answer("parse", {}) == (GENERIC, "generic")


def test_a_turn_of_parallel_calls_shows_its_observation_once_whichever_is_made_first() -> None:
    steps = (step("a"), step("b", number=1, parallel=True), step("c", "both", 2))
    for order in (["a", "b"], ["b", "a"]):
        tools = MockTools(only(run("x", *steps, final="end")))
        assert [tools.answer(tool, {})[0] for tool in order] == ["both", ""]
        assert tools.answer(order[0], {})[0] == "both"  # asked again, it says it again
        assert tools.answer("c", {})[0] == "end"
