"""From a language model's answer to a risk in [0, 1], one reader for each style of prompt.

A reader never guesses: what does not hold the answer that was asked for raises :class:`Unparsable`, and the call stays
unscored. A block of thought (up to the last ``</think>``) is left out before reading.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxguard.baselines.completion import Completion

Reader = Callable[[Completion], float]

_WORDS = ("safe", "unsafe")
_FENCE = re.compile(r"^```[a-zA-Z]*\s*\n(.*?)\n?```\s*$", re.DOTALL)


class Unparsable(ValueError):
    """An answer does not hold what was asked for; the message is a short reason."""


def first_word(answer: Completion) -> float:
    """``safe`` or ``unsafe`` as the first word: 0 or 1.

    Where the endpoint tells log probabilities and half of the mass at the first word is on the two, the risk is
    p(unsafe) / (p(safe) + p(unsafe)), summed over tokens that begin one of them.
    """
    said = re.match(r"[\s*_#`\"']*(safe|unsafe)\b", spoken(answer), re.IGNORECASE)
    if said is None:
        raise Unparsable("first word is neither safe nor unsafe")
    for place in answer.alternatives:
        tokens = [(token.strip().lower(), math.exp(min(value, 0.0))) for token, value in place.items()]
        if not any(token for token, _ in tokens):  # white space before the word
            continue
        mass = {word: math.fsum(p for token, p in tokens if token and word.startswith(token)) for word in _WORDS}
        if (both := mass["safe"] + mass["unsafe"]) >= 0.5:
            return mass["unsafe"] / both
        break
    return float(said[1].lower() == "unsafe")


def diagnosis(answer: Completion) -> float:
    """``unsafe`` and ``confidence`` c (1 where it is missing): (1 + c) / 2 if unsafe, else (1 - c) / 2."""
    value = json_object(answer)
    unsafe = _boolean(value, "unsafe")
    sure = _number(value, "confidence", 1.0) if value.get("confidence") is not None else 1.0
    return (1 + sure) / 2 if unsafe else (1 - sure) / 2


def predicted(answer: Completion) -> float:
    """The larger of ``risk_now`` and ``risk_later``, a tenth of it."""
    value = json_object(answer)
    return max(_number(value, name, 10.0) for name in ("risk_now", "risk_later")) / 10


def violations(rules: int) -> Reader:
    """The largest ``certainty`` among ``violations`` of the ``rules`` rules; 0 where there is none."""

    def read(answer: Completion) -> float:
        listed = json_object(answer).get("violations")
        if not isinstance(listed, list):
            raise Unparsable("violations is no list")
        found = [0.0]
        for one in listed:
            if not isinstance(one, dict) or type(one.get("rule")) is not int or not 1 <= one["rule"] <= rules:
                raise Unparsable("a violation names no rule of the policy")
            found.append(_number(one, "certainty", 1.0))
        return max(found)

    return read


def checks(answer: Completion) -> float:
    """1 where a check has failed, 0.5 where one is open, else 0; the model gives no verdict of its own."""
    listed = json_object(answer).get("checks")
    if not isinstance(listed, list) or not listed:
        raise Unparsable("checks is no list with a check in it")
    passed = [_boolean(one, "passed", optional=True) for one in listed]
    return 1.0 if False in passed else 0.5 if None in passed else 0.0


def yes_or_no(name: str) -> Callable[[Completion], bool]:
    """The boolean ``name`` of the answer's JSON object, for judges."""
    return lambda answer: bool(_boolean(json_object(answer), name))


def spoken(answer: Completion) -> str:
    """The text without its thought.

    Raises:
        Unparsable: There is none, or it was cut within the thought.
    """
    text = answer.text.rpartition("</think>")[2]
    if "<think>" in text:
        raise Unparsable("cut within its thought")
    if not text.strip():
        raise Unparsable("empty answer")
    return text.strip()


def json_object(answer: Completion) -> Mapping[str, Any]:
    """The one JSON object that the answer is, in a code fence or not.

    Raises:
        Unparsable: It is something else, or more than that.
    """
    text = spoken(answer)
    fenced = _FENCE.match(text)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        raise Unparsable("cut before its end" if answer.finish == "length" else "not one JSON object") from None
    if not isinstance(value, dict):
        raise Unparsable("not one JSON object")
    return value


def _boolean(value: Any, name: str, *, optional: bool = False) -> bool | None:
    found = value.get(name, "missing") if isinstance(value, dict) else "missing"
    if not (isinstance(found, bool) or (optional and found is None)):
        raise Unparsable(f"{name} is neither true nor false")
    return found


def _number(value: Mapping[str, Any], name: str, top: float) -> float:
    found = value.get(name)
    if not isinstance(found, int | float) or isinstance(found, bool) or not 0 <= found <= top:
        raise Unparsable(f"{name} is no number from 0 to {top:g}")
    return float(found)
