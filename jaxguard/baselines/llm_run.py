"""``jaxguard llm score``: a language model's risk of every step, as JSON lines, with what could not be scored."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxguard.baselines.endpoint import Endpoint, EndpointConfig, Usage, in_threads
from jaxguard.baselines.llm import LlmGuard, LlmGuardConfig, LlmGuardError, Opinion
from jaxguard.baselines.rival import blind
from jaxguard.settings import require_seed
from jaxguard.traces.files import load_json
from jaxguard.traces.sampling import stratified
from jaxguard.types import Step, Trajectory
from jaxguard.writing import write_whole

SCORES_FILE, SUMMARY_FILE, CACHE_FILE = "scores.jsonl", "summary.json", "cache.sqlite"
_SAME = ("endpoint", "model", "guard")
"""What a folder's earlier results must share with new ones."""


@dataclass(frozen=True)
class LlmConfig:
    """Settings of ``jaxguard llm score``: the endpoint, how it is asked, the seed of a sample."""

    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    llm: LlmGuardConfig = field(default_factory=LlmGuardConfig)
    seed: int = 20260716

    def __post_init__(self) -> None:
        require_seed(self.seed, "llm")


@dataclass(frozen=True)
class LlmReport:
    """What was scored.

    Attributes:
        trajectories: Scored, wholly or in part.
        steps: Their steps.
        problems: Unscored steps by reason.
        usage: Calls, tokens and cost of this run.
    """

    trajectories: int
    steps: int
    problems: dict[str, int]
    usage: Usage

    @property
    def scored(self) -> int:
        """Steps with a risk."""
        return self.steps - sum(self.problems.values())


def score_with_llm(
    trajectories: Sequence[Trajectory],
    out: Path,
    config: LlmConfig,
    style: str,
    *,
    template: Path | None = None,
    policy: Path | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> LlmReport:
    """Scores every step of the trajectories, or of a stratified sample of ``limit`` of them.

    Writes ``scores.jsonl`` (a row per step, in order: trajectory id, step, call id, tool, risk or null, problem, the
    model's answer), ``summary.json`` and ``cache.sqlite``. The same command again takes from the cache what was
    answered, and asks again for what failed.

    Raises:
        LlmGuardError: ``out`` holds the scores of another endpoint, model or way of asking; or see :class:`LlmGuard`.
        EndpointRefused: No call can succeed; what was answered is in the cache.
    """
    chosen = trajectories if limit is None else stratified(trajectories, limit, config.seed)
    out.mkdir(parents=True, exist_ok=True)
    with Endpoint(config.endpoint, out / CACHE_FILE) as endpoint:
        guard = LlmGuard(endpoint, style, config.llm, template=template, policy=policy)
        about: dict[str, Any] = {
            "endpoint": config.endpoint.url,
            "model": config.endpoint.model,
            "guard": guard.fingerprint(),
            "seed": config.seed,
        }
        _require_same(out, about)
        write_whole(out / SUMMARY_FILE, json.dumps(about, indent=1))
        steps = sum(map(len, chosen))
        rows = []
        for done, row in enumerate(_rows(guard, chosen, config.endpoint.concurrency), 1):
            rows.append(json.dumps(row, ensure_ascii=False))
            if progress is not None:
                progress(done, steps)
        report = LlmReport(len(chosen), steps, dict(guard.problems.most_common()), endpoint.usage)
    write_whole(out / SCORES_FILE, "".join(f"{row}\n" for row in rows), errors="replace")
    counts = {"trajectories": report.trajectories, "steps": steps, "scored": report.scored, "unscored": report.problems}
    write_whole(out / SUMMARY_FILE, json.dumps(about | counts | {"usage": vars(report.usage)}, indent=1))
    return report


def _rows(guard: LlmGuard, trajectories: Sequence[Trajectory], workers: int) -> Iterator[dict[str, Any]]:
    def ask(place: tuple[Trajectory, int, Step]) -> dict[str, Any]:
        seen, t, step = place
        opinion: Opinion = guard.opinion(dataclasses.replace(seen, steps=seen.steps[:t]), seen.steps[t])
        return {
            "trajectory_id": seen.id,
            "step": t,
            "call_id": step.call_id,
            "tool": step.tool,
            "risk": opinion.risk if math.isfinite(opinion.risk) else None,
            "problem": opinion.problem,
            "answer": opinion.answer,
        }

    places = ((seen, t, step) for seen in map(blind, trajectories) for t, step in enumerate(seen.steps))
    return in_threads(ask, places, workers)


def _require_same(out: Path, about: dict[str, Any]) -> None:
    path = out / SUMMARY_FILE
    if not path.exists():
        return
    try:
        before = load_json(path)
        differing = [name for name in _SAME if before.get(name) != json.loads(json.dumps(about[name]))]
    except (OSError, ValueError, AttributeError) as error:
        raise LlmGuardError(f"{path}: cannot be read ({error}); expected what an earlier run wrote") from error
    if differing:
        raise LlmGuardError(
            f"{out}: holds scores of another {differing[0]} ({before.get(differing[0])!r:.200}); choose another folder"
        )
