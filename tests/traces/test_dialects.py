"""Notations of actions: each dialect, odd text, and limits."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxguard.traces.readers.dialects import parse_action


def one(text: str) -> tuple[str, Any, str]:
    (call,) = parse_action(text)
    assert (call.arguments is None) != (call.raw_arguments is None)
    return call.tool, call.arguments if call.arguments is not None else call.raw_arguments, call.dialect


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Final Answer: It is done.", ("reply", {"text": "It is done."}, "final")),
        ("Final Answer It is done.", ("reply", {"text": "It is done."}, "final")),
        ('Complete{"response": "Bye."}', ("reply", {"text": "Bye."}, "final")),
        ("Complete{'response': \"Can't.\"}", ("reply", {"text": "Can't."}, "final")),
        ('Complete{"task": 3}', ("Complete", {"task": 3}, "braces")),
        ("Finally(a=1)", ("Finally", {"a": 1}, "parens")),
        ('{"name": "mix", "arguments": {"a": 1}}', ("mix", {"a": 1}, "json")),
        ('{"tool": "mix", "input": "{\\"a\\": 1}"}', ("mix", {"a": 1}, "json")),
        ('{"function": {"name": "mix", "arguments": "{}"}, "id": "c1"}', ("mix", {}, "json")),
        ('{"mix": {"a": 1}}', ("mix", {"a": 1}, "json")),
        ('{mix: {"a": 1}}', ("mix", {"a": 1}, "json")),
        ('"command": {"name": "mix", "args": {"a": 1}}}}', ("mix", {"a": 1}, "json")),
        ('The action is {"action_type": "click", "idx": 1}', ("click", {"idx": 1}, "json")),
        ('Action: mix: {"a": 1}', ("mix", {"a": 1}, "colon")),
        ('Mix\nAction Input: {"a": "é\\u00e9"}\n', ("Mix", {"a": "éé"}, "input")),
        ('Mix \r\n Action Input:\n{"a": 1}', ("Mix", {"a": 1}, "input")),
        ('Mix Input: {"a": 1}', ("Mix", {"a": 1}, "input")),
        ("Mix\nAction Input:", ("Mix", {}, "input")),
        ('Mix\nAction Input: {"a": "cut', ("Mix", '{"a": "cut', "input")),
        ("mix{'a': [1, None], 'b': \"it's\"}", ("mix", {"a": [1, None], "b": "it's"}, "braces")),
        ('mix: {"a": 1}\n', ("mix", {"a": 1}, "colon")),
        ("mix: {}", ("mix", {}, "colon")),
        ('mix: {"a": 1} and more', ("mix", '{"a": 1} and more', "colon")),
        ("mix: {'a': NaN}", ("mix", "{'a': NaN}", "colon")),
        ('mix: {"a": NaN}', ("mix", '{"a": NaN}', "colon")),
        ('mix: {"a": 1e999}', ("mix", '{"a": 1e999}', "colon")),
        ("mix: {'a': 'x'}}}", ("mix", "{'a': 'x'}}}", "colon")),
        ("a.b-c()", ("a.b-c", {}, "parens")),
        ("mix(a=1, b=['x'])", ("mix", {"a": 1, "b": ["x"]}, "parens")),
        ("mix(a: 'x')", ("mix", {"a": "x"}, "parens")),
        ("mix(1, 2)", ("mix", {"args": [1, 2]}, "parens")),
        ("mix(a < 3)", ("mix", "a < 3", "parens")),
        ('mix(text="two\nlines"', ("mix", {"text": "two\nlines"}, "parens")),
        ("```bash\nls -l\n```", ("bash", {"command": "ls -l"}, "fence")),
        ("```sh\nls```", ("bash", {"command": "ls"}, "fence")),
        ("```python\nprint(1)\n```", ("python", {"code": "print(1)"}, "fence")),
        ('```json\n{"name": "mix", "arguments": {}}\n```', ("mix", {}, "json")),
        ("```c\nint x;\n```", ("reply", {"text": "```c\nint x;\n```"}, "fence")),
        ("click <OK>", ("click", {"target": "<OK>"}, "ui")),
        ("Open <Paint Shop>", ("open", {"target": "<Paint Shop>"}, "ui")),
        ("click https://paint.example/", ("click", {"target": "https://paint.example/"}, "ui")),
        ("<Settings>-<Volume> [5]", ("ui", {"target": "<Settings>-<Volume> [5]"}, "ui")),
        ("Search 'red'", ("search", {"target": "'red'"}, "ui")),
        ("Open the door, please.", ("reply", {"text": "Open the door, please."}, "text")),
        ("I called mix(a=1) (see above)", ("reply", {"text": "I called mix(a=1) (see above)"}, "text")),
        ("Anna: hello {you}", ("reply", {"text": "Anna: hello {you}"}, "text")),
        ("Great! (really)", ("reply", {"text": "Great! (really)"}, "text")),
        ('{"free": "object"}', ("reply", {"text": '{"free": "object"}'}, "text")),
        ("[not json", ("reply", {"text": "[not json"}, "text")),
        ("\ud800\u202e混ぜる{'a': 1}", ("reply", {"text": "\ud800\u202e混ぜる{'a': 1}"}, "text")),
    ],
)
def test_dialects(text: str, expected: tuple[str, Any, str]) -> None:
    assert one(text) == expected


@pytest.mark.parametrize(
    ("text", "tools", "arguments"),
    [
        ('[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]', "ab", [{}, {"x": 1}]),
        ('a: {"x": 1}\nb: {"x": 2}', "ab", [{"x": 1}, {"x": 2}]),
        ("delete <A> AND delete <B>", ["delete"] * 2, [{"target": "<A>"}, {"target": "<B>"}]),
        ("<Choose> A b | click <OK>", ["choose", "click"], [{"target": "A b"}, {"target": "<OK>"}]),
    ],
)
def test_several_calls_in_one_action(text: str, tools: list[str], arguments: list[Any]) -> None:
    calls = parse_action(text)
    assert [call.tool for call in calls] == list(tools)
    assert [call.arguments for call in calls] == arguments


@pytest.mark.parametrize("text", [None, "", " \n\t"])
def test_no_action_is_no_call(text: str | None) -> None:
    assert parse_action(text) == []


@given(st.text(alphabet=st.sampled_from(list("aZ_0 {}[]()'\":,=|<>`\\\n;\ud800é")), max_size=60))
def test_any_text_gives_calls_with_exactly_one_kind_of_arguments(text: str) -> None:
    calls = parse_action(text)
    assert bool(calls) == bool(text.strip())
    assert all((call.arguments is None) != (call.raw_arguments is None) for call in calls)


def test_megabyte_arguments_and_deep_nesting() -> None:
    big = "x" * 1_000_000
    assert one(f'mix{{"a": "{big}"}}') == ("mix", {"a": big}, "braces")
    assert one(f"mix{{'a': '{big}'}}") == ("mix", f"{{'a': '{big}'}}", "braces")
    for deep in ('{"a":' * 50_000 + "1" + "}" * 50_000, "{'a':" * 50_000, "{'a':" * 100 + "1" + "}" * 100):
        assert one(f"mix: {deep}") == ("mix", deep, "colon")
    assert one("[" * 100_000) == ("reply", {"text": "[" * 100_000}, "text")


def test_hostile_text_takes_linear_time() -> None:
    start = time.perf_counter()
    n = 300_000
    for text in (
        "a" + "\n" * n + "b",
        "a" + " " * n + "b",
        "```" + " \n" * n,
        "click <a>" + " " * n + "|",
        "a" * n,
        "mix(" + "'\\'" * n,
        "mix: {" + "a: 1, " * (n // 6),
        'mix: {"a": 1}\n' * (n // 14),
        "Final" + " " * n,
    ):
        parse_action(text)
    assert time.perf_counter() - start < 10


@pytest.mark.data
def test_real_tally(data_dir: Path) -> None:
    """Outcomes on the real sets; all actions were looked through by eye when these figures were fixed."""
    tally: dict[str, Counter[str]] = {}
    for name, file in (
        ("asse", "asse_security/asse_security"),
        ("r_judge", "r_judge/r_judge"),
        ("atbench", "atbench300/atbench300"),
    ):
        counts: Counter[str] = Counter()
        for line in (data_dir / f"{file}.jsonl").read_text(encoding="utf-8").splitlines():
            for message in (m for session in json.loads(line)["contents"] for m in session if m["role"] == "agent"):
                calls = parse_action(message["action"])
                counts.update([call.dialect for call in calls] or ["none"])
                counts["raw"] += sum(call.raw_arguments is not None for call in calls)
        tally[name] = counts
    assert tally["asse"] == {"parens": 1067, "none": 750, "final": 118, "braces": 63, "raw": 0}
    assert tally["atbench"] == {"json": 638, "final": 352, "raw": 0}
    assert tally["r_judge"] == {
        "braces": 352, "input": 296, "colon": 191, "final": 181, "text": 93, "ui": 79, "json": 22, "parens": 19,
        "fence": 12, "none": 1, "raw": 3,
    }  # fmt: skip
