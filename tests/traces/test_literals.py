"""Python literals in agents' text: JSON-like values out, never an evaluation, never an exception."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxguard.traces.readers.literals import MAX_CHARACTERS, MAX_NESTING, literal, literal_call

JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the first draw loads tables of characters
@given(JSON_LIKE)
def test_what_python_writes_is_read_back(value: Any) -> None:
    assert literal(repr(value)) == ast.literal_eval(repr(value))


@given(st.text())
def test_any_text_is_survived(text: str) -> None:
    literal(text)
    literal_call(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{'a': true, 'b': null, 'c': None}", {"a": True, "b": None, "c": None}),
        ("{'to': 0xAbC0, 'n': -3, 'x': 1.5}", {"to": "0xAbC0", "n": -3, "x": 1.5}),
        ("{'note': 'pay 0xAbC0 now'}", {"note": "pay 0xAbC0 now"}),
        ("{'text': 'two\nlines', \n 'k': (1, 2)}", {"text": "two\nlines", "k": [1, 2]}),
        ("{1: 'a', None: 'b'}", {"1": "a", "None": "b"}),
        (r"{'path': 'C:\\d'}", {"path": "C:\\d"}),
    ],
)
def test_values(text: str, value: Any) -> None:
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "f(1)",
        "{'a': open('x')}",
        "{'a': 1e999}",
        "{'a': b'x'}",
        "{1, 2}",
        "{**x}",
        "'\ud800'",
        "\0",
        "9" * 5000,
    ],
)
def test_what_is_no_json_like_literal_is_none(text: str) -> None:
    assert literal(text) is None


def test_size_and_nesting_are_limited() -> None:
    assert literal("[" * MAX_NESTING + "]" * MAX_NESTING) is not None
    assert literal("[" * (MAX_NESTING + 1) + "]" * (MAX_NESTING + 1)) is None
    assert literal("'" + "a" * (MAX_CHARACTERS - 2) + "'") is not None
    assert literal("'" + "a" * MAX_CHARACTERS + "'") is None
    for hostile in ("1+" * 100_000 + "1", "not " * 60_000 + "1", "a." * 100_000 + "b", "-" * 200_000 + "1"):
        assert literal(hostile) is None


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ("", {}),
        ("a=1, b='x'", {"a": 1, "b": "x"}),
        ("a: 1, b: 'x: y'", {"a": 1, "b": "x: y"}),
        ("'a': 1", {"a": 1}),
        ("1, 'x'", {"args": [1, "x"]}),
        ("1, a=2", {"args": [1], "a": 2}),
        ("a < 3", None),
        ("**a", None),
        ("1, args=2", None),
        (")(", None),
        ("a=1) + f(b=2", None),
    ],
)
def test_call_arguments(inner: str, arguments: dict[str, Any] | None) -> None:
    assert literal_call(inner) == arguments
