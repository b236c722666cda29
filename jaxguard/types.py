"""Plain data that every other part of jaxguard speaks: steps, trajectories, decisions, verdicts.

Nothing here imports JAX, NumPy or a file format; the classes are frozen, compare by value and hold
only JSON-like values, so they can be hashed into ids, pickled to workers and printed.

Conventions: steps count from 0; a *risk* lies in [0, 1] and higher is riskier.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class JaxguardError(Exception):
    """Base of every error that jaxguard raises on purpose.

    Messages say which field or file, what was found and what was expected.
    """


class Decision(enum.IntEnum):
    """What the guard says of a proposed action; a larger value is more severe."""

    PASS = 0
    HOLD = 1
    BLOCK = 2


class Route(enum.IntEnum):
    """Where a proposed action goes (Safety Sentry, section 3.1); values are the columns of every array of logits.

    A larger value is more severe, and as severe as the :class:`Decision` of the same value.
    """

    EXECUTE = 0
    ASK = 1
    REFUSE = 2


@dataclass(frozen=True, slots=True)
class Step:
    """One proposed tool call, with what the agent could see before proposing it.

    Attributes:
        tool: Name of the tool, e.g. ``"send_email"``; ``"reply"`` where a record-style set judges
            an answer to the user as the action.
        arguments: The call's JSON object; ``{}`` for a call without arguments; ``None`` where the
            text of the arguments could not be parsed (then ``raw_arguments`` holds it).
        raw_arguments: Unparsable argument text, else ``None``.
        observation: Everything that became visible since the previous step's proposal and before
            this one; ``""`` where there is nothing (e.g. before the first call).
        call_id: Identifies the call within its trajectory; unique there.
        hazard: Step label where the source has one: would executing this call cause the harm?
        thought: The agent's private reasoning; never read by default.
        parallel: True where this call was proposed together with the previous step's, so that both
            share one observation.
        unobserved: True where the log holds no result of this call.
    """

    tool: str
    arguments: Mapping[str, Any] | None
    call_id: str
    observation: str = ""
    raw_arguments: str | None = None
    hazard: bool | None = None
    thought: str = ""
    parallel: bool = False
    unobserved: bool = False

    def marked(self, hazard: bool | None, unobserved: bool) -> Step:
        """The same call with these two marks; five times faster than ``dataclasses.replace``."""
        return Step(
            self.tool,
            self.arguments,
            self.call_id,
            self.observation,
            self.raw_arguments,
            hazard,
            self.thought,
            self.parallel,
            unobserved,
        )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """An instruction and the tool calls an agent proposed for it.

    Attributes:
        id: Unique within a converted set and stable across runs.
        instruction: The task given to the agent, with the system prompt's task-relevant part only
            where the source has no user message.
        steps: The proposed calls in order; empty for a pure refusal or a plain answer.
        unsafe: Trajectory label; ``None`` where the source has none.
        first_hazard: Index of the first hazardous step; ``None`` for a safe trajectory or where the
            source does not tell.
        timing: True where ``first_hazard`` (or its absence, for a safe trajectory) is reliable
            enough for timing metrics and for step supervision.
        group: Trajectories of one group (same task, twin, template or duplicate text) never stand on
            both sides of a split.
        final_observation: What became visible after the last step (its result); a prediction target
            only, never an input of a score. ``""`` where there is nothing.
        source: Name of the format that this was read from.
        metadata: JSON-like facts kept for reports: ``domain``, ``service``, ``risk_type``, ``model``,
            ``memory`` (persona memory), ``reviews`` (:mod:`jaxguard.traces.snapshots`), ``final_reply``, ...
    """

    id: str
    instruction: str
    steps: tuple[Step, ...]
    unsafe: bool | None = None
    first_hazard: int | None = None
    timing: bool = False
    group: str = ""
    final_observation: str = ""
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.id:
            raise JaxguardError("trajectory id: got an empty string, expected a non-empty one")
        if self.first_hazard is not None:
            if not 0 <= self.first_hazard < len(self.steps):
                raise JaxguardError(
                    f"trajectory {self.id!r}: first_hazard is {self.first_hazard}, expected a step "
                    f"index in 0..{len(self.steps) - 1}"
                )
            if self.unsafe is False:
                raise JaxguardError(f"trajectory {self.id!r}: first_hazard is {self.first_hazard} but unsafe is False")

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision for one proposed action, with its evidence (all risks in [0, 1]).

    Attributes:
        step: Index of the proposed step.
        decision: What the rule says.
        hazard: Immediate-hazard risk; ``nan`` where no score could be computed.
        prefix: Prefix risk.
        ema: Moving average of the prefix risk.
        win: Window mean of the prefix risk.
        fused: Noisy-or of hazard, ema and win.
        margin: Distance to the threshold that decides: positive when it is crossed, negative below
            both, ``nan`` where a score was not finite (then ``decision`` is HOLD).
        observed_only: True where the guard only observes and lets the call run in spite of ``decision``.
        error: Why no score could be computed; empty otherwise.
    """

    step: int
    decision: Decision
    hazard: float
    prefix: float
    ema: float
    win: float
    fused: float
    margin: float
    observed_only: bool = False
    error: str = ""

    @property
    def allowed(self) -> bool:
        """May the call run?"""
        return self.observed_only or self.decision is Decision.PASS


@dataclass(frozen=True, slots=True)
class RouteVerdict:
    """Which way one proposed action goes, with what decided it.

    Attributes:
        step: Index of the proposed step.
        route: What the rule says.
        probabilities: Of EXECUTE, ASK and REFUSE; ``nan`` where no score could be computed (then ``route`` is ASK).
        execute_share: p_execute / (p_execute + p_ask), which is compared with ``tau``.
        tau: The threshold.
        trigger: Letter of the likeliest trigger that has this route by itself (Safety Sentry, table 4); ``""`` where
            the call may run, or none is known.
        reason: Why, in a sentence or two, of what was seen and nothing else; ``""`` where the call may run.
        question: What to ask the user where ``route`` is ASK; else ``""``.
        observed_only: True where the router only observes and lets the call run in spite of ``route``.
        error: Why no score could be computed; empty otherwise.
    """

    step: int
    route: Route
    probabilities: tuple[float, float, float]
    execute_share: float
    tau: float
    trigger: str = ""
    reason: str = ""
    question: str = ""
    observed_only: bool = False
    error: str = ""

    @property
    def allowed(self) -> bool:
        """May the call run?"""
        return self.observed_only or self.route is Route.EXECUTE


@dataclass(frozen=True, slots=True)
class JointVerdict:
    """What guard and router say of one proposed action; the more severe of both counts.

    Attributes:
        guard: The guard's verdict.
        router: The router's verdict.
    """

    guard: Verdict
    router: RouteVerdict

    @property
    def step(self) -> int:
        """Index of the proposed step."""
        return self.guard.step

    @property
    def decision(self) -> Decision:
        """BLOCK = REFUSE > HOLD = ASK > PASS = EXECUTE."""
        return Decision(max(self.guard.decision, self.router.route))

    @property
    def allowed(self) -> bool:
        """May the call run?"""
        return self.guard.allowed and self.router.allowed

    @property
    def error(self) -> str:
        """Why one of them could not score; empty otherwise."""
        return self.guard.error or self.router.error

    @property
    def reason(self) -> str:
        """What speaks against the call: what either says, the guard first; ``""`` where neither says anything."""
        hazard, fused = self.guard.hazard, self.guard.fused
        said = {
            Decision.PASS: "",
            Decision.HOLD: f"The run so far is risky (fused risk {fused:.2f}).",
            Decision.BLOCK: f"The call itself is hazardous (hazard risk {hazard:.2f}).",
        }[self.guard.decision]
        if self.guard.error:
            said = "" if self.guard.error == self.router.error else f"Could not be scored: {self.guard.error}"
        return " ".join(filter(None, [said, self.router.reason]))

    @property
    def question(self) -> str:
        """What to ask the user where ``decision`` is HOLD; else ``""``."""
        if self.decision is not Decision.HOLD:
            return ""
        doubt = "This call could not be checked." if self.guard.error else "The run so far is risky."
        return self.router.question or f"{doubt} May it run?"
