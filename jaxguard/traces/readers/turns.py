"""Builds steps from a dialogue, so that the pre-action rule is kept in one place.

A reader walks its record in order and says what became visible, what the agent thought and what it
proposed. Text that arrives after a proposal can only reach the *next* step, whatever field of the
record it stood in.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxguard.types import Step


@dataclass(frozen=True)
class Call:
    """One proposed call as parsed from text; ``dialect`` names the notation, for tallies."""

    tool: str
    arguments: Mapping[str, Any] | None
    raw_arguments: str | None = None
    dialect: str = ""


class StepBuilder:
    """Collects a trajectory's steps; feed it in the order of the record, then call :meth:`finish`."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._seen: list[str] = []
        self._thoughts: list[str] = []
        self._open = 0  # calls of the latest turn that have no result yet

    def observe(self, text: str | None) -> None:
        """Something became visible: it belongs to the next step, and answers the calls before it.

        ``None`` is a missing result; an empty text is a result that says nothing.
        """
        if text is None:
            return
        for index in range(len(self.steps) - self._open, len(self.steps)):
            self.steps[index] = self.steps[index].marked(self.steps[index].hazard, False)
        self._open = 0
        if text:
            self._seen.append(text)

    def think(self, text: str | None) -> None:
        """The agent reasoned: kept for the next step's ``thought``."""
        if text and text.strip():
            self._thoughts.append(text)

    def propose(self, calls: Sequence[Call]) -> None:
        """The agent proposed calls in one turn; all of them see what was visible before the turn."""
        if not calls:
            return
        observation, thought = "\n".join(self._seen), "\n".join(self._thoughts)
        self._seen, self._thoughts, self._open = [], [], 0
        for index, call in enumerate(calls):
            self._add(call, observation, thought if index == 0 else "", parallel=index > 0)

    def propose_also(self, calls: Sequence[Call]) -> None:
        """Further calls of the latest turn, which the record shows by their results alone.

        To be called before :meth:`observe` gets those results.
        """
        for call in calls:
            self._add(call, self.steps[-1].observation, "", parallel=True)

    def _add(self, call: Call, observation: str, thought: str, *, parallel: bool) -> None:
        self.steps.append(
            Step(
                tool=call.tool,
                arguments=call.arguments,
                raw_arguments=call.raw_arguments,
                call_id=f"call-{len(self.steps)}",
                observation=observation,
                thought=thought,
                parallel=parallel,
                unobserved=True,
            )
        )
        self._open += 1

    def finish(self) -> tuple[tuple[Step, ...], str, str]:
        """``(steps, final observation, thought after the last step)``."""
        return tuple(self.steps), "\n".join(self._seen), "\n".join(self._thoughts)


def group_key(kind: str, text: str) -> str:
    """Key that equal texts share whatever their case, spacing and punctuation.

    ``kind`` keeps groups of different nature apart ("task", "profile"); it does not name the format, so
    that the same task in two sets stays on one side of a split.
    """
    normalised = " ".join(re.findall(r"\w+", text.casefold()))
    # A surrogate half cannot be encoded strictly; it must not stop a conversion.
    digest = hashlib.sha256(normalised.encode("utf-8", "replace")).hexdigest()
    return f"{kind}:{digest[:16]}"


def with_hazards(steps: Sequence[Step], hazards: Sequence[bool | None]) -> tuple[Step, ...]:
    """The steps with one hazard label each (``None``: not known)."""
    return tuple(step.marked(hazard, step.unobserved) for step, hazard in zip(steps, hazards, strict=True))
