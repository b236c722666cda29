"""What stands in front of an agent's calls: nothing, a guard at its thresholds, or a rival at one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxguard.baselines.rival import Rival, RivalError
from jaxguard.guard import Guard
from jaxguard.online.cases import Case
from jaxguard.types import Decision, Step, Trajectory


@dataclass(frozen=True)
class Ruling:
    """What is said of a proposed call.

    Attributes:
        decision: Only PASS lets it run.
        risk: What decided, in [0, 1]; NaN where nothing could be scored (then ``decision`` is HOLD), or nothing is.
        error: Why nothing could be scored; ``""`` otherwise.
    """

    decision: Decision
    risk: float = math.nan
    error: str = ""


class Hook(Protocol):
    """Stands before the calls of one run."""

    def check(self, step: Step) -> Ruling:
        """Asked before a call; it may be asked of calls that never run."""
        ...

    def ran(self, step: Step) -> None:
        """Told that the call just checked runs."""
        ...


class Condition(Protocol):
    """A way to guard; ``name`` is unique among those compared."""

    @property
    def name(self) -> str: ...

    def start(self, case: Case) -> Hook: ...


@dataclass(frozen=True)
class Unguarded:
    """Everything runs."""

    name: str = "none"

    def start(self, case: Case) -> Hook:
        return self

    def check(self, step: Step) -> Ruling:
        return Ruling(Decision.PASS)

    def ran(self, step: Step) -> None:
        """Nothing to remember."""


@dataclass(frozen=True)
class Guarded:
    """A guard's live session, at its own thresholds; what cannot be scored is held."""

    name: str
    guard: Guard

    def __post_init__(self) -> None:
        _ = self.guard.scorer  # made here, so that runs in many threads share one

    def start(self, case: Case) -> Hook:
        return _Live(self.guard, case)


class _Live:
    def __init__(self, guard: Guard, case: Case):
        self._session = guard.session(case.trajectory.instruction, case.trajectory.metadata)

    def check(self, step: Step) -> Ruling:
        said = self._session.check(step.observation, step.tool, step.arguments, call_id=step.call_id)
        # The risk that decided: both cutoffs are crossed from below, BLOCK by hazard and HOLD by fused.
        risk = said.hazard if said.decision is Decision.BLOCK else said.fused
        return Ruling(said.decision, risk, said.error)

    def ran(self, step: Step) -> None:
        self._session.commit(step.call_id)


@dataclass(frozen=True)
class Rivalled:
    """A rival: BLOCK where its risk is above the threshold, HOLD where it gives none."""

    name: str
    rival: Rival
    threshold: float

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise RivalError(f"rival {self.name!r}: threshold is {self.threshold}, expected one in [0, 1]")

    def start(self, case: Case) -> Hook:
        return _Asked(self, Trajectory(case.id, case.trajectory.instruction, (), source=case.trajectory.source))


@dataclass
class _Asked:
    condition: Rivalled
    start: Trajectory
    steps: list[Step] = field(default_factory=list)

    def check(self, step: Step) -> Ruling:
        c = self.condition
        prefix = Trajectory(self.start.id, self.start.instruction, tuple(self.steps), source=self.start.source)
        risk = float(c.rival.observe(prefix, step))
        if math.isnan(risk):
            return Ruling(Decision.HOLD, risk, "unscored")
        if not 0 <= risk <= 1:
            raise RivalError(f"rival {c.name!r}: risk is {risk}, expected one in [0, 1] or NaN")
        return Ruling(Decision.BLOCK if risk > c.threshold else Decision.PASS, risk)

    def ran(self, step: Step) -> None:
        self.steps.append(step)


def require_names(conditions: Sequence[Condition]) -> None:
    """Refuses two conditions of one name."""
    names = [condition.name for condition in conditions]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise RivalError(f"conditions: two are called {twice[0]!r}, expected names of their own; see NAME=...")
