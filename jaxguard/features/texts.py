"""The texts that are encoded for a trajectory: instruction, observations, actions.

A vector is looked up in the feature store by its text, so this module alone decides what a guard can
see of a step. Metadata (domain, service, persona memory) and, by default, the agent's private thought
are not part of any text. Any change of what is written here raises :data:`TEMPLATE_VERSION`, which is
part of every encoder fingerprint.
"""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass

from jaxguard.types import JaxguardError, Step, Trajectory

TEMPLATE_VERSION = 1

_BIDI = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class TrajectoryTexts:
    """Texts of a trajectory of T steps.

    Attributes:
        instruction: The task, e in the design's notation.
        observations: T + 1 texts; ``observations[t]`` is visible before action t, the last one is what
            became visible after the last action (a prediction target, never an input of a score).
        actions: T texts, one per proposed call.
    """

    instruction: str
    observations: tuple[str, ...]
    actions: tuple[str, ...]

    def unique(self) -> tuple[str, ...]:
        """Every distinct text once, in order of first appearance."""
        return tuple(dict.fromkeys((self.instruction, *self.observations, *self.actions)))


def well_formed(text: str) -> str:
    """Return ``text`` with surrogate pairs joined and lone surrogates replaced by U+FFFD.

    Python strings may hold surrogates (``json.loads`` lets them through), UTF-8 and tokenizers may not.
    """
    if text.isascii():
        return text
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def action_text(step: Step, *, thought: bool = False) -> str:
    """Return the text of a proposed call: ``tool {"key":"value"}``.

    Arguments are compact JSON in the order of the source, so that the text is the same on every run and
    on every machine; unparsable arguments are given as they stood. With ``thought``, the agent's
    reasoning stands before the call, on lines of its own.

    Raises:
        JaxguardError: The arguments cannot be written as JSON (too deeply nested, or not JSON values).
    """
    if step.raw_arguments is not None:
        arguments = step.raw_arguments
    else:
        try:
            arguments = _ENCODE({} if step.arguments is None else dict(step.arguments))
        except (TypeError, ValueError, RecursionError) as error:
            raise JaxguardError(
                f"arguments of call {step.call_id!r} to {step.tool!r}: expected a JSON object, got one that "
                f"cannot be written as JSON ({type(error).__name__}: {error})"
            ) from error
    call = f"{step.tool} {arguments}"
    return well_formed(f"{step.thought}\n{call}" if thought and step.thought else call)


def trajectory_texts(trajectory: Trajectory, *, thought: bool = False) -> TrajectoryTexts:
    """Return the texts of ``trajectory``; see :class:`TrajectoryTexts` for the lengths.

    ``observations[t]`` and ``actions[t]`` depend on step t alone (the pre-action rule).

    Raises:
        JaxguardError: As :func:`action_text`, with the trajectory named.
    """
    try:
        actions = tuple(action_text(step, thought=thought) for step in trajectory.steps)
    except JaxguardError as error:
        raise JaxguardError(f"trajectory {trajectory.id!r}: {error}") from error
    return TrajectoryTexts(
        instruction=well_formed(trajectory.instruction),
        observations=(
            *(well_formed(step.observation) for step in trajectory.steps),
            well_formed(trajectory.final_observation),
        ),
        actions=actions,
    )


def visible(text: str) -> str:
    """Text without characters that move a cursor, reverse the reading order or break a line.

    Line breaks and tabs become spaces; other control characters, lone surrogates and bidirectional
    overrides become U+FFFD, so that nobody can hide an argument from a reviewer.
    """
    return "".join(_visible(c) for c in text)


def _visible(char: str) -> str:
    if char in "\n\r\t\u2028\u2029":
        return " "
    return "\ufffd" if char in _BIDI or unicodedata.category(char) in ("Cc", "Cs") else char
