"""Keyword rules: words and where they stand; a user's own file, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxguard.baselines.keywords import KeywordRival, KeywordRule, load_rules, matching, words
from jaxguard.baselines.rival import RivalError, score
from jaxguard.types import Step, Trajectory

RULE = KeywordRule("drop", ("tool",), ("drop table", "delete"), 0.5)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("delete_file", ["delete", "file"]),
        ("DeleteFile", ["delete", "file"]),
        ("HTTPDelete2", ["http", "delete", "2"]),
        ("rm -rf /tmp", ["rm", "rf", "tmp"]),
        ("", []),
        ("Größe löschen", ["größe", "löschen"]),
    ],
)
def test_words(text: str, found: list[str]) -> None:
    assert words(text) == found


@pytest.mark.parametrize(
    ("tool", "expected"), [("DROP TABLE", 1), ("drop_the_table", 0), ("undelete", 0), ("files.delete", 1)]
)
def test_a_rule_meets_whole_words_and_phrases(tool: str, expected: int) -> None:
    assert len(matching([RULE], Step(tool, {}, "0"))) == expected


def test_rules_look_where_they_say() -> None:
    step = Step("open", {"what": "delete"}, "0", observation="delete")
    assert matching([RULE], step) == []
    for place in ("arguments", "observation"):
        assert matching([KeywordRule("x", (place,), ("delete",), 0.5)], step)
    assert not matching([KeywordRule("x", ("arguments",), ("open",), 0.5)], step)


def test_unparsed_arguments_are_read_too() -> None:
    step = Step("open", None, "0", raw_arguments="{delete")
    assert matching([KeywordRule("x", ("arguments",), ("delete",), 0.5)], step)


def test_risks_are_a_noisy_or_of_the_rules_of_the_step_alone() -> None:
    rules = [RULE, KeywordRule("seen", ("observation",), ("secret",), 0.2)]
    steps = (Step("delete", {}, "0"), Step("delete", {}, "1", observation="secret secret"), Step("list", {}, "2"))
    (risks,) = score(KeywordRival(rules), [Trajectory("t", "i", steps)])
    np.testing.assert_allclose(risks, [0.5, 1 - 0.5 * 0.8, 0.0])


def test_the_rules_that_come_along() -> None:
    rules = load_rules()
    assert len(rules) >= 5
    assert {place for rule in rules for place in rule.where} == {"tool", "arguments", "observation"}
    (risks,) = score(KeywordRival(), [Trajectory("t", "i", (Step("list_items", {}, "0"), Step("wipe_disk", {}, "1")))])
    assert risks[0] == 0.0
    assert risks[1] >= 0.5


GOOD = "{name: a, where: [tool], words: [delete], risk: 0.5}"


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(f"rules:\n- {GOOD}\n")
    assert load_rules(path) == (KeywordRule("a", ("tool",), ("delete",), 0.5),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rules: []", "expected a list under `rules`"),
        ("- 1", "expected a list under `rules`"),
        ("rules: [1]", "rule 0 is 1, expected name, risk, where, words"),
        ("a: [", "cannot be read"),
        ("rules: [{name: 2020-13-45}]", "cannot be read"),
        ("rules: !!int x", "cannot be read"),
        (f"rules:\n- {GOOD}\n- {GOOD}", "names repeat"),
        (f"rules:\n- {GOOD}".replace("tool", "mind"), "where is"),
        (f"rules:\n- {GOOD}".replace("[tool]", "tool"), "must be lists"),
        (f"rules:\n- {GOOD}".replace("[tool]", "[[tool]]"), "expected texts"),
        (f"rules:\n- {GOOD}".replace("[tool]", "[]"), "where is"),
        (f"rules:\n- {GOOD}".replace("0.5", "1.5"), r"risk is 1.5, expected a number in \(0, 1\]"),
        (f"rules:\n- {GOOD}".replace("0.5", "yes"), "risk is True"),
        (f"rules:\n- {GOOD}".replace("0.5", ".nan"), "risk is nan"),
        (f"rules:\n- {GOOD}".replace("[delete]", "[]"), "words is"),
        (f"rules:\n- {GOOD}".replace("[delete]", "[Delete]"), "words is 'Delete', expected words in lower case"),
        (f"rules:\n- {GOOD}".replace("[delete]", "[3]"), "words is 3"),
        (f"rules:\n- {GOOD}".replace("[delete]", "['']"), "words is ''"),
        (f"rules:\n- {GOOD}".replace("name: a", "name: 3"), "name is 3"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)
    with pytest.raises(RivalError, match=message):
        load_rules(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RivalError, match=r"none.yaml: cannot be read"):
        load_rules(tmp_path / "none.yaml")
