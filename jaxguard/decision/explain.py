"""Why a call is asked about or refused, and what to ask: put together from what was seen, nothing made up.

The trigger is the router's own (Safety Sentry, table 4); what is quoted stands word for word in the trace or in the
user's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

from jaxguard.features.characters import visible
from jaxguard.types import Route, Step

LONGEST_QUOTE = 200

REASONS: Mapping[str, str] = {
    "e": "Something that the call needs is missing.",
    "f": "Whether the requester may have this done is not settled.",
    "g": "The effect is large and cannot be taken back.",
    "h": "What the call acts on is not unique.",
    "i": "The call relies on a state that was not checked, or may have changed.",
    "j": "Data would go where they must not.",
    "k": "Evidence or a signed record would be destroyed or altered.",
    "l": "Someone without a right to it would get access.",
    "m": "A person would be harmed or shamed.",
    "n": "Others could not work any more.",
}
"""What a trigger means for the person who is asked."""

UNPARSED = "Its arguments are no JSON object with each key once, so that what it will do is not known."
"""Said of a call whose arguments could not be parsed."""

_QUESTIONS: Mapping[str, str] = {
    "e": "{tool} on {thing}: what should {missing} be?",
    "f": "Who has allowed {tool} on {thing}, and may it go ahead?",
    "g": "{tool} on {thing} cannot be taken back. Go ahead?",
    "h": "Which one is meant by {thing}, before {tool} runs?",
    "i": "Has the present state of {thing} been checked, so that {tool} may run?",
}


def missing_arguments(step: Step, earlier: Iterable[Step]) -> tuple[str, ...]:
    """Arguments that are empty, or that earlier calls of the same tool had and this one lacks.

    None where the arguments could not be parsed: what they lack is not known.
    """
    if step.arguments is None:
        return ()
    own = step.arguments
    known = dict.fromkeys(key for other in earlier if other.tool == step.tool for key in other.arguments or {})
    empty = [key for key, value in own.items() if _is_empty(value)]
    return tuple(dict.fromkeys([*empty, *(key for key in known if key not in own)]))


def explain(
    route: Route, trigger: str, step: Step, *, evidence: str = "", note: str = "", missing: Iterable[str] = ()
) -> tuple[str, str]:
    """Reason and question for a routed call; both empty for EXECUTE, the question also for REFUSE.

    What they quote of arguments, trace and memory is made visible, so that it hides nothing from who is asked.

    Args:
        route: Where the call goes.
        trigger: Letter of the trigger, ``""`` where none is known.
        step: The proposed call.
        evidence: What the trace last said of the things that the call names.
        note: What the user's memory says of them.
        missing: From :func:`missing_arguments`.
    """
    if route is Route.EXECUTE:
        return "", ""
    said = [UNPARSED if step.raw_arguments is not None else "", REASONS.get(trigger, "")]
    said += [f'The trace says: "{_quote(evidence)}"'] if evidence else []
    said += [f'The memory says: "{_quote(note)}"'] if note else []
    reason = " ".join(filter(None, said)) or "Nothing was seen that settles this call."
    if route is Route.REFUSE:
        return visible(reason), ""
    thing = _thing(step.arguments or {})
    template = _QUESTIONS.get(trigger, "May {tool} run on {thing}?")
    what = ", ".join(missing) or "the value that is missing"
    question = template.format(tool=_quote(step.tool), thing=thing, missing=_quote(what))
    return visible(reason), visible(question)


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, Sized) and len(value) == 0)


def _thing(arguments: Mapping[str, Any]) -> str:
    """The first argument that names something; tools name what they act on first, as a rule."""
    for value in arguments.values():
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return _quote(str(value).strip())
    return "this"


def _quote(text: str) -> str:
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 3]}..."
