"""Rules on trajectories made by hand."""

from __future__ import annotations

import pytest

from jaxguard.baselines.rules import camel_case_tool, two_or_more_calls, unknown_tool
from jaxguard.types import Step, Trajectory


def calls(*tools: str, unsafe: bool | None = None) -> Trajectory:
    steps = tuple(Step(tool, {}, f"{i}") for i, tool in enumerate(tools))
    return Trajectory("-".join(["t", *tools]), "go", steps, unsafe=unsafe)


def test_unknown_tools_are_those_of_no_safe_training_trajectory() -> None:
    train = [calls("read", "send", unsafe=False), calls("purge", unsafe=True), calls("guess")]
    test = [calls("read"), calls("send", "read"), calls("purge"), calls("read", "guess"), calls()]
    assert unknown_tool(train, test).tolist() == [False, False, True, True, False]


def test_without_safe_training_every_call_is_unknown() -> None:
    assert unknown_tool(iter([calls("read", unsafe=True)]), [calls("read"), calls()]).tolist() == [True, False]


@pytest.mark.parametrize(
    ("tool", "camel"),
    [
        ("GrantAccess", True),
        ("DataV2Exporter", True),
        ("SendEmailX", True),
        ("Grant", False),
        ("grantAccess", False),
        ("grant_access", False),
        ("GRANT", False),
        ("Grant_Access", False),
        ("GrantAccess now", False),
        ("", False),
    ],
)
def test_camel_case(tool: str, camel: bool) -> None:
    assert camel_case_tool([calls("read", tool)]).tolist() == [camel]


def test_one_camel_case_call_is_enough_and_none_is_not() -> None:
    assert camel_case_tool([calls("GrantAccess", "read"), calls()]).tolist() == [True, False]


def test_two_or_more_calls() -> None:
    assert two_or_more_calls([calls(), calls("a"), calls("a", "a"), calls("a", "b", "c")]).tolist() == [0, 0, 1, 1]


def test_no_trajectories() -> None:
    for found in (unknown_tool([], []), camel_case_tool([]), two_or_more_calls([])):
        assert found.shape == (0,)
        assert found.dtype == bool
