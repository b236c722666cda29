"""Templates and the material in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxguard.baselines.prompting import Limits, PromptFile, PromptFileError, TooLong, material


def entry(i: int, text: str = "seen") -> dict[str, Any]:
    return {"tool": f"t{i}", "arguments": {}, "observation": text}


def test_short_material_is_left_as_it_is() -> None:
    value = {"task": "go", "trace": [entry(0)], "action": {"tool": "x", "arguments": {"a": [1, None, True]}}}
    assert json.loads(material(value, Limits())) == value


def test_a_long_text_loses_its_middle_and_says_so() -> None:
    text = "a" * 1_000 + "b" * 5_000 + "c" * 1_000
    cut = json.loads(material({"task": text, "trace": []}, Limits(longest_text=2_000)))["task"]
    assert cut == "a" * 1_000 + " [... 5,000 characters left out ...] " + "c" * 1_000


def test_the_earliest_calls_go_first_and_are_counted() -> None:
    value = {"task": "go", "trace": [entry(i, f"{i}" * 300) for i in range(10)], "action": {"tool": "x"}}
    line = material(value, Limits(longest_prompt=1_200))
    found = json.loads(line)
    assert len(line) <= 1_200
    assert [call["tool"] for call in found["trace"]] == ["t7", "t8", "t9"]
    assert found["earlier_calls_left_out"] == 7
    assert found["action"] == {"tool": "x"}


def test_texts_are_cut_further_where_not_even_the_last_call_fits() -> None:
    value = {"task": "t" * 1_500, "trace": [entry(0, "o" * 1_500)], "action": {"tool": "x" * 1_500}}
    line = material(value, Limits(longest_prompt=1_500))
    found = json.loads(line)
    assert len(line) <= 1_500
    assert len(found["trace"]) == 1
    assert all(part.count("left out") == 1 for part in (found["task"], found["action"]["tool"]))


def test_what_cannot_be_cut_is_too_long() -> None:
    with pytest.raises(TooLong, match="1,000"):
        material({"task": "go", "trace": [], "action": {"list": list(range(1_000))}}, Limits(longest_prompt=1_000))


def test_material_is_one_line_whatever_it_holds() -> None:
    text = "a\nb\rc\u2028d\u2029e\x85f\x0bg"
    line = material({"task": text, "trace": []}, Limits())
    assert len(line.splitlines()) == 1
    assert json.loads(line)["task"] == text


def test_the_fence_depends_on_what_it_holds() -> None:
    prompt = PromptFile("diagnosis")
    (_, one), (_, two) = (prompt.messages(data) for data in ('{"task":"a"}', '{"task":"b"}'))
    marks = [message["content"].partition("<<<")[2][:16] for message in (one, two)]
    assert marks[0] != marks[1]
    assert one["content"].count(marks[0]) == 3
    assert prompt.messages('{"task":"a"}')[1] == one


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.j2"
    path.write_text("{% block system %}{% endblock %}{% block user %}Judge {{ data }}{% endblock %}")
    assert PromptFile(path).messages("<&>") == [{"role": "user", "content": "Judge <&>"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% block user %}x{% endblock %}", "lacks the block system"),
        ("{% block user %}", "TemplateSyntaxError"),
        ("{% block system %}{% endblock %}{% block user %}{{ label }}{% endblock %}", "label"),
    ],
)
def test_a_template_that_cannot_be_used_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.j2"
    path.write_text(text)
    with pytest.raises(PromptFileError, match=message) as caught:
        PromptFile(path).messages("{}")
    assert "mine.j2" in str(caught.value)


def test_a_missing_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(PromptFileError, match=r"none\.j2"):
        PromptFile(tmp_path / "none.j2")
