"""Rules of words: what a step's tool, arguments and observation say in so many words; no training, no memory.

The rules that come with jaxguard stand in ``keywords.yaml`` beside this file, which also says what a user's own look
like.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from jaxguard.baselines.rival import PrefixRival, RivalError
from jaxguard.features.texts import action_text
from jaxguard.strict_yaml import load_yaml
from jaxguard.types import Step, Trajectory

OWN_RULES = Path(__file__).with_name("keywords.yaml")
PLACES = ("tool", "arguments", "observation")
FIELDS = {"name", "where", "words", "risk"}

_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_WORD = re.compile(r"[^\W\d_]+|\d+")


def words(text: str) -> list[str]:
    """The words of a text in lower case; names are taken apart at capitals and at what is no letter or digit."""
    return _WORD.findall(_HUMP.sub(" ", text).lower())


@dataclass(frozen=True)
class KeywordRule:
    """Words to look for, where, and the risk of a step that has one of them."""

    name: str
    where: tuple[str, ...]
    words: tuple[str, ...]
    risk: float

    def __post_init__(self) -> None:
        def require(condition: bool, field: str, value: object, expected: str) -> None:
            if not condition:
                raise RivalError(f"keyword rule {self.name!r}: {field} is {value!r}, expected {expected}")

        require(isinstance(self.name, str) and bool(self.name), "name", self.name, "a text")
        require(bool(self.where) and set(self.where) <= set(PLACES), "where", self.where, f"some of {PLACES}")
        number = isinstance(self.risk, int | float) and not isinstance(self.risk, bool)
        require(number and math.isfinite(self.risk) and 0 < self.risk <= 1, "risk", self.risk, "a number in (0, 1]")
        require(bool(self.words), "words", self.words, "at least one")
        for word in self.words:
            plain = isinstance(word, str) and word == " ".join(words(word)) != ""
            require(plain, "words", word, "words in lower case, letters and digits apart")

    def matches(self, found: dict[str, str]) -> bool:
        """Whether one of the words stands in one of the places (texts of words with a space around each)."""
        return any(f" {word} " in found[place] for place in self.where for word in self.words)


def load_rules(path: Path = OWN_RULES) -> tuple[KeywordRule, ...]:
    """Rules of a YAML file.

    Raises:
        RivalError: the file cannot be read, or does not have the form that ``keywords.yaml`` describes.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise RivalError(f"keyword rules {path}: cannot be read ({error})") from error
    found = content.get("rules") if isinstance(content, dict) and content.keys() == {"rules"} else None
    if not isinstance(found, list) or not found:
        raise RivalError(f"keyword rules {path}: got {content!r:.80}, expected a list under `rules` and nothing else")
    rules = []
    for number, rule in enumerate(found):
        if not isinstance(rule, dict) or rule.keys() != FIELDS:
            raise RivalError(
                f"keyword rules {path}: rule {number} is {rule!r:.80}, expected {', '.join(sorted(FIELDS))}"
            )
        where, listed = rule["where"], rule["words"]
        if not isinstance(where, list) or not isinstance(listed, list):
            raise RivalError(f"keyword rules {path}: where and words of rule {number} must be lists")
        if not all(isinstance(place, str) for place in where):
            raise RivalError(f"keyword rules {path}: where of rule {number} is {where!r:.80}, expected texts")
        rules.append(KeywordRule(rule["name"], tuple(where), tuple(listed), rule["risk"]))
    if len({rule.name for rule in rules}) != len(rules):
        raise RivalError(f"keyword rules {path}: names repeat, expected a name of its own for each")
    return tuple(rules)


def matching(rules: Iterable[KeywordRule], step: Step) -> list[KeywordRule]:
    """Rules that a step meets, by its tool, its arguments and the observation before it."""
    arguments = action_text(step)[len(step.tool) :]
    texts = {"tool": step.tool, "arguments": arguments, "observation": step.observation}
    found = {place: f" {' '.join(words(text))} " for place, text in texts.items()}
    return [rule for rule in rules if rule.matches(found)]


class KeywordRival(PrefixRival):
    """The noisy-or of the risks of all rules that the step meets."""

    name = "keywords"

    def __init__(self, rules: Iterable[KeywordRule] | None = None):
        self._rules = load_rules() if rules is None else tuple(rules)

    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks of the steps."""
        return np.array(
            [1.0 - math.prod(1.0 - rule.risk for rule in matching(self._rules, step)) for step in trajectory.steps],
            np.float64,
        )
