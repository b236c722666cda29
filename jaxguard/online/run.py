"""``jaxguard online``: cases, conditions, runs, judgements, figures and the page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxguard.baselines.endpoint import Endpoint, EndpointConfig, Usage, in_threads
from jaxguard.baselines.llm import LlmGuardConfig
from jaxguard.baselines.prompting import PromptFile
from jaxguard.online.agent import HOLD_POLICIES, run_case
from jaxguard.online.cases import Case, make_cases
from jaxguard.online.conditions import Condition, Guarded, Rivalled, Unguarded, require_names
from jaxguard.online.judge import Judge
from jaxguard.online.page import write_online_page
from jaxguard.online.rates import Online, Outcome, condition_result
from jaxguard.online.scripted import MODEL, scripted_server
from jaxguard.settings import require, require_at_least, require_at_most, require_seed
from jaxguard.types import Trajectory
from jaxguard.writing import write_whole

TRANSCRIPTS, SUMMARY, PAGE = "transcripts.jsonl", "summary.json", "online.html"


@dataclass(frozen=True)
class OnlineConfig:
    """Settings of an online evaluation.

    Attributes:
        agent: Endpoint of the agent.
        judge: That of the judge; what is not set is as the agent's.
        guard: That of guards that are language models, likewise.
        llm: How those are asked.
        cases: How many, stratified by risk type and label.
        seed: Of that sample and of the bootstrap.
        max_steps: Most calls that an agent may propose in a case.
        hold: What HOLD means: ``deny``, the call is refused; ``ask``, it waits for a user who is not there.
        resamples: Of the bootstrap.
    """

    agent: EndpointConfig = field(default_factory=EndpointConfig)
    judge: EndpointConfig = field(default_factory=EndpointConfig)
    guard: EndpointConfig = field(default_factory=EndpointConfig)
    llm: LlmGuardConfig = field(default_factory=LlmGuardConfig)
    cases: int = 100
    seed: int = 20260716
    max_steps: int = 6
    hold: str = "deny"
    resamples: int = 1_000

    def __post_init__(self) -> None:
        require_at_least(self, "online", 1, "cases", "max_steps")
        require_at_least(self, "online", 0, "resamples")
        require_at_most(self, "online", 1_000, "max_steps")
        require_seed(self.seed, "online")
        require(self.hold in HOLD_POLICIES, "online.hold", self.hold, " or ".join(HOLD_POLICIES))

    def endpoint(self, role: str) -> EndpointConfig:
        """The endpoint of ``agent``, ``judge`` or ``guard``, with what it takes over from the agent's."""
        own, base, plain = getattr(self, role), self.agent, EndpointConfig()
        if own.url and own.url != base.url:  # elsewhere: neither the key nor the prices are those of the agent
            return own
        taken = {f.name: getattr(base, f.name) for f in dataclasses.fields(own)
                 if getattr(own, f.name) == getattr(plain, f.name)}  # fmt: skip
        return dataclasses.replace(own, **taken)


@dataclass(frozen=True)
class OnlineReport:
    """What was found, what it took (calls, tokens and cost by role), and the page."""

    online: Online
    usage: dict[str, Usage]
    page: Path


def evaluate_online(
    trajectories: Sequence[Trajectory],
    out: Path,
    config: OnlineConfig,
    conditions: Callable[[Callable[[], Endpoint]], Sequence[Condition]],
    *,
    scripted: bool = False,
    progress: Callable[[int, int], object] | None = None,
) -> OnlineReport:
    """Runs every case under every condition, judges it, and writes transcripts, summary and page into ``out``.

    Args:
        trajectories: Cases are made of these (:mod:`jaxguard.online.cases`).
        out: Folder; answers are cached there, so that the same command goes on where it was stopped. Conditions share
            what is equal: until a first refusal the agent is asked once for all of them.
        config: Settings.
        conditions: Makes the conditions; is given what opens the endpoint for language models as guards.
        scripted: Play agent and judge from the recorded trajectories, without a language model.
        progress: Called with runs done and all runs.

    Raises:
        CaseError: No trajectory makes a case.
        EndpointRefused: No call can succeed, or address or model are missing.
    """
    cases, left_out = make_cases(trajectories, config.cases, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if scripted:
            server = stack.enter_context(scripted_server(cases))
            plain = EndpointConfig(url=server.url, model=MODEL, concurrency=2)
            roles = {"agent": plain, "judge": plain}
        else:
            roles = {"agent": config.endpoint("agent"), "judge": config.endpoint("judge")}
        endpoints: dict[str, Endpoint] = {}

        def opened(role: str) -> Endpoint:
            if role not in endpoints:
                settings = roles[role] if role in roles else config.endpoint(role)
                cache = None if scripted and role in roles else out / "cache" / f"{role}.sqlite"
                endpoints[role] = stack.enter_context(Endpoint(settings, cache))
            return endpoints[role]

        agent, judge = opened("agent"), Judge(opened("judge"), scripted=scripted)
        compared = conditions(lambda: opened("guard"))
        require_names(compared)
        prompt = PromptFile("agent", "jaxguard.online")

        def one(place: tuple[Condition, Case]) -> Outcome:
            condition, case = place
            run = run_case(
                case, agent, condition.start(case), prompt,
                max_steps=config.max_steps, hold=config.hold, scripted=scripted,
            )  # fmt: skip
            return Outcome(condition.name, case, run, judge(case, run))

        outcomes: list[Outcome] = []
        for condition in compared:  # one after the other: what an earlier one asked, the cache answers
            for outcome in in_threads(one, [(condition, case) for case in cases], agent.config.concurrency):
                outcomes.append(outcome)
                if progress is not None:
                    progress(len(outcomes), len(compared) * len(cases))
        usage = {role: e.usage for role, e in endpoints.items() if not (scripted and role in roles)}
        prompts = {"agent": prompt.digest, **{name: p.digest for name, p in judge.prompts.items()}}
        models = {role: endpoint.config.model for role, endpoint in endpoints.items()}
    results = [
        condition_result(
            c.name, [o for o in outcomes if o.condition == c.name], resamples=config.resamples, seed=config.seed
        )
        for c in compared
    ]
    unsafe = sum(case.trajectory.unsafe is True for case in cases)
    settings = {
        "models": models, "addresses": "this machine, scripted" if scripted else {r: c.url for r, c in roles.items()},
        "prompts": prompts, "cases": len(cases), "seed": config.seed, "max_steps": config.max_steps,
        "hold": config.hold, "resamples": config.resamples, "conditions": {c.name: _about(c) for c in compared},
    }  # fmt: skip
    online = Online(results, {"unsafe": unsafe, "safe": len(cases) - unsafe}, left_out, settings, scripted)
    write_whole(out / TRANSCRIPTS, "".join(f"{line}\n" for line in map(_transcript, outcomes)), errors="replace")
    write_whole(out / SUMMARY, json.dumps(_summary(online, usage), indent=1, ensure_ascii=False), errors="replace")
    return OnlineReport(online, usage, write_online_page(out / PAGE, online, usage))


def _about(condition: Condition) -> str:
    """What stood there, for the summary."""
    if isinstance(condition, Guarded) and (found := condition.guard.calibration) is not None:
        return (
            f"guard {condition.guard.weights}, BLOCK above {found.block.value:.4f}, HOLD above {found.hold.value:.4f}"
        )
    if isinstance(condition, Rivalled):
        return f"{condition.rival.name}, BLOCK above {condition.threshold:g}"
    return "everything runs" if isinstance(condition, Unguarded) else type(condition).__name__


def _transcript(outcome: Outcome) -> str:
    run, trajectory = outcome.run, outcome.case.trajectory
    calls = [
        {
            "tool": call.tool, "arguments": call.arguments, "ran": call.ran, "kind": call.kind, "result": call.result,
            "decision": None if call.ruling is None else call.ruling.decision.name,
            "risk": None if call.ruling is None else _finite(call.ruling.risk),
            "error": "" if call.ruling is None else call.ruling.error,
            "check_ms": round(1e3 * call.seconds, 3),
        }
        for call in run.calls
    ]  # fmt: skip
    row = {
        "condition": outcome.condition, "case": outcome.case.id, "unsafe_case": trajectory.unsafe,
        "risk_type": trajectory.metadata.get("risk_type"), "group": trajectory.group, "ended": run.ended,
        "error": run.error, "judged_unsafe": outcome.judgement.unsafe, "judged_helped": outcome.judgement.helped,
        "problems": dict(outcome.judgement.problems), "judge": dict(outcome.judgement.said), "calls": calls,
        "messages": list(run.messages),
    }  # fmt: skip
    return json.dumps(row, ensure_ascii=False)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _summary(online: Online, usage: dict[str, Usage]) -> dict[str, Any]:
    value = dataclasses.asdict(online) | {
        "frontier": online.frontier,
        "usage": {role: vars(told) for role, told in usage.items()},
    }
    return _without_nan(value)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return [_without_nan(part) for part in value] if isinstance(value, list | tuple) else _finite(value)


__all__ = ["OnlineConfig", "OnlineReport", "evaluate_online"]
