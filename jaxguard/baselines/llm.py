"""Guards that are a language model behind an endpoint, in five styles of asking.

===========  ==========================================================  ============================================
style        asks                                                        answer, and the risk made of it
===========  ==========================================================  ============================================
category     is the call one of eight kinds of harm? (Llama Guard)       first word; its probability where it is told
diagnosis    where is risk from, what fails, what harm? (AgentDoG)       verdict and confidence
predictive   what follows, soon and later, how risky is it? (SafePred)   the larger of two ratings
policy       which numbered rules would be broken? (PolicyGuard)         the largest certainty of a violation
guard_agent  plan checks, carry them out (GuardAgent)                    a failed check 1, an open one 0.5
===========  ==========================================================  ============================================

The prompts are ours, in the style of the works named; none is a copy, and figures are not those of these works.
Every style sees what :func:`jaxguard.baselines.rival.blind` leaves: the task, the calls so far with what they showed,
and the proposed call; nothing after it. What is cut of long material, and when, :mod:`jaxguard.baselines.prompting`
says.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxguard.baselines import answers
from jaxguard.baselines.endpoint import Endpoint, EndpointError, in_threads
from jaxguard.baselines.prompting import Limits, PromptFile, PromptFileError, TooLong, material
from jaxguard.baselines.rival import blind
from jaxguard.settings import require_at_least
from jaxguard.traces.snapshots import SnapshotError, snapshot
from jaxguard.types import JaxguardError, Step, Trajectory

STYLES: Mapping[str, str] = {
    "category": "eight kinds of harm; the first word of the answer decides (Llama Guard)",
    "diagnosis": "source, failure and harm of the run so far (AgentDoG)",
    "predictive": "the states that the call leads to, soon and later (SafePred)",
    "policy": "numbered rules, --policy FILE or the built-in nine (PolicyGuard)",
    "guard_agent": "checks that are planned, then carried out (GuardAgent)",
}
POLICY = Path(__file__).parent / "prompts" / "policy_rules.txt"


class LlmGuardError(JaxguardError):
    """A guard cannot be made of what was given."""


@dataclass(frozen=True)
class LlmGuardConfig:
    """How a language model is asked for a risk.

    Attributes:
        logprobs: Ask for log probabilities (style ``category`` only); endpoints that refuse them want ``false``.
        longest_text: Most characters of one text of the material.
        longest_prompt: Most characters of the material.
    """

    logprobs: bool = True
    longest_text: int = Limits.longest_text
    longest_prompt: int = Limits.longest_prompt

    def __post_init__(self) -> None:
        require_at_least(self, "llm", 64, "longest_text")
        require_at_least(self, "llm", 1_000, "longest_prompt")


@dataclass(frozen=True)
class Opinion:
    """What a model said of one proposed call.

    Attributes:
        risk: In [0, 1]; NaN where it could not be scored.
        problem: Why not; ``""`` where it could.
        answer: What the model said; ``""`` where it said nothing.
    """

    risk: float
    problem: str = ""
    answer: str = ""


class LlmGuard:
    """A :class:`~jaxguard.baselines.rival.Rival` that asks a language model. May be used by many threads.

    Args:
        endpoint: Where the model answers.
        style: One of :data:`STYLES`.
        config: How it is asked.
        template: A prompt file in place of the style's own; its answers are read as the style's.
        policy: File with a rule a line, for style ``policy``.

    Attributes:
        name: Style and model.
        problems: How many calls stayed unscored, by reason.

    Raises:
        LlmGuardError: Unknown style, or a policy that cannot be read or holds no rule.
        PromptFileError: The template cannot be used.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        style: str,
        config: LlmGuardConfig | None = None,
        *,
        template: Path | None = None,
        policy: Path | None = None,
    ):
        if style not in STYLES:
            raise LlmGuardError(f"style: got {style!r}, expected one of {', '.join(STYLES)}")
        if policy is not None and style != "policy":
            raise LlmGuardError(f"policy: got {policy} with style {style!r}, expected it with style 'policy'")
        self._endpoint, self._config = endpoint, config or LlmGuardConfig()
        self._limits = Limits(self._config.longest_text, self._config.longest_prompt)
        self._values = {"rules": rules(policy or POLICY)} if style == "policy" else {}
        self._read: answers.Reader = {
            "category": answers.first_word,
            "diagnosis": answers.diagnosis,
            "predictive": answers.predicted,
            "policy": answers.violations(len(self._values.get("rules", ()))),
            "guard_agent": answers.checks,
        }[style]
        self.prompt = PromptFile(template or style)
        self.prompt.messages("{}", **self._values)  # a template that cannot be filled is no failure of a call
        self.name, self.style = f"{style} {endpoint.config.model}", style
        self.problems: Counter[str] = Counter()
        self._lock = threading.Lock()

    def fingerprint(self) -> dict[str, object]:
        """What its answers depend on besides endpoint and model."""
        return {"style": self.style, "prompt": self.prompt.digest, **dataclasses.asdict(self._config), **self._values}

    def observe(self, prefix: Trajectory, action: Step) -> float:
        """The risk of a proposed call; NaN where it could not be scored."""
        return self.opinion(prefix, action).risk

    def opinion(self, prefix: Trajectory, action: Step) -> Opinion:
        """What the model says of a proposed call.

        Args:
            prefix: The task and the steps that ran.
            action: The proposed call, with the observation before it.

        Raises:
            EndpointRefused: No call to the endpoint can succeed.
        """
        said = ""
        try:
            messages = self.prompt.messages(call_material(prefix, action, self._limits), **self._values)
            answer = self._endpoint.chat(messages, logprobs=self._config.logprobs and self.style == "category")
            said = answer.text
            return Opinion(self._read(answer), answer=said)
        except EndpointError as error:
            problem = f"endpoint: {error.reason}"
        except answers.Unparsable as error:
            problem = f"unparsable: {error}"
        except TooLong:
            problem = "too long"
        except SnapshotError:
            problem = "unreadable arguments"
        with self._lock:
            self.problems[problem] += 1
        return Opinion(math.nan, problem, said)

    def score_all(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        """Risks ``[T]`` of each trajectory, as many requests at a time as the endpoint's configuration allows."""
        places = [(i, t) for i, trajectory in enumerate(trajectories) for t in range(len(trajectory))]
        found = [np.full(len(trajectory), math.nan) for trajectory in trajectories]

        def ask(place: tuple[int, int]) -> float:
            trajectory, t = trajectories[place[0]], place[1]
            return self.observe(dataclasses.replace(blind(trajectory), steps=trajectory.steps[:t]), trajectory.steps[t])

        for (i, t), risk in zip(places, in_threads(ask, places, self._endpoint.config.concurrency), strict=True):
            found[i][t] = risk
        return found


def call_material(prefix: Trajectory, action: Step, limits: Limits) -> str:
    """A proposed call and what led to it as the one line of JSON that a prompt shows.

    Raises:
        SnapshotError: Arguments that JSON cannot hold.
        TooLong: It cannot be cut enough.
    """
    steps = (*prefix.steps, action)
    run = blind(dataclasses.replace(prefix, steps=steps, first_hazard=None))
    value = json.loads(snapshot(run, len(steps) - 1).to_json())
    return material({key: part for key, part in value.items() if part or key in ("task", "action", "trace")}, limits)


def rules(path: Path) -> list[str]:
    """The rules in a file, one a line.

    Raises:
        LlmGuardError: It cannot be read, or holds none.
    """
    try:
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise LlmGuardError(f"policy {path}: cannot be read ({error})") from error
    if not found:
        raise LlmGuardError(f"policy {path}: holds no rule, expected one a line")
    return found


__all__ = ["STYLES", "LlmGuard", "LlmGuardConfig", "LlmGuardError", "Opinion", "PromptFileError", "call_material"]
