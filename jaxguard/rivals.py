"""Other guards on a run's own parts: fitted, chosen, calibrated and tested where the run's guard is.

Weights of trained ones stay in ``RUN/rivals/NAME``, figures go to ``RUN/rivals/evaluation.json`` and ``report.html``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from jaxguard.baselines import logistic
from jaxguard.baselines.chains import AbsorbingChain, Lesson, ToolChain
from jaxguard.baselines.keywords import KeywordRival, load_rules
from jaxguard.baselines.neural import NETWORKS, NeuralRival, fit_network
from jaxguard.baselines.rival import Rival, RivalError
from jaxguard.config import Config, DecisionConfig
from jaxguard.evaluation.evaluate import Baseline, Evaluation
from jaxguard.inputs import Run, run_episodes
from jaxguard.run import judged, open_calibrated, safe_calibration, step_reader, write_evaluation
from jaxguard.training.episodes import Episodes
from jaxguard.types import Trajectory

FOLDER = "rivals"


class Workshop:
    """Makes rivals for a run; what several of them need is made once.

    Args:
        run: A trained run.
        rules: YAML file of keyword rules in place of jaxguard's own.
        progress: Shows bars on stderr.
    """

    def __init__(self, run: Run[Config], *, rules: Path | None = None, progress: bool = True):
        self._run, self._rules, self._progress = run, rules, progress
        self._reader = step_reader(run)
        self.makers: Mapping[str, Callable[[], Rival]] = {
            "keywords": lambda: KeywordRival(None if rules is None else load_rules(rules)),
            "tool-chain": lambda: ToolChain(self._lesson),
            "absorbing-chain": lambda: AbsorbingChain(self._lesson, self._reader),
            **{f"logistic-{name}": lambda name=name: self._logistic(name) for name in logistic.STEPWISE},  # type: ignore[misc]
            **{name: lambda name=name: self._network(name) for name in NETWORKS},  # type: ignore[misc]
        }

    def make(self, only: Sequence[str] = ()) -> Iterator[Rival]:
        """All rivals, or those named, one after the other.

        Raises:
            RivalError: a name is not known; the training part lacks the labels that a rival learns from.
            TrainingError: a rival's folder holds weights of other data or settings.
        """
        if unknown := [name for name in only if name not in self.makers]:
            raise RivalError(f"rival: got {unknown[0]!r}, expected some of {', '.join(self.makers)}")
        return (self.makers[name]() for name in (only or self.makers))

    @cached_property
    def _train(self) -> Episodes:
        return run_episodes(self._run, "train")

    @cached_property
    def _validation(self) -> Episodes | None:
        return run_episodes(self._run, "validation") if self._run.splits["validation"] else None

    @cached_property
    def _lesson(self) -> Lesson:
        config = self._run.config
        parts = self._run.part("train"), self._run.part("validation")
        return Lesson(*parts, config.stage2.horizon, config.stage2.unlabelled_hazard, config.train.seed)

    def _logistic(self, name: str) -> Rival:
        found = logistic.LogisticRival.fit(self._train, name, self._reader)
        if found is None:
            raise RivalError(
                f"rival 'logistic-{name}': the training part supervises steps of one class alone, expected steps with "
                "and without a hazard"
            )
        return found

    def _network(self, name: str) -> Rival:
        run, folder = self._run, self._run.folder / FOLDER / name
        params = fit_network(name, run.config, self._train, self._validation, folder, progress=self._progress)
        rival = NeuralRival(name, run.config, params, self._reader)
        rival.choose_fusion(run.part("validation"), run.splits["calibration"])
        return rival


def rivals(
    run: Run[Config],
    test: Sequence[Trajectory],
    only: Sequence[str] = (),
    *,
    decision: DecisionConfig | None = None,
    rules: Path | None = None,
    progress: bool = True,
) -> dict[str, Baseline]:
    """Rivals by name, aligned with ``test``; see :class:`Workshop`.

    Args:
        run: A trained run.
        test: Trajectories to score.
        only: Names; all of them where there are none.
        decision: Level and rule of the thresholds; the run's by default.
        rules: YAML file of keyword rules in place of jaxguard's own.
        progress: Shows bars on stderr.
    """
    safe = safe_calibration(run)
    made = Workshop(run, rules=rules, progress=progress).make(only)
    return {rival.name: judged(rival, test, safe, decision or run.config.decision) for rival in made}


def rivals_run(
    folder: Path,
    only: Sequence[str] = (),
    *,
    fresh: bool = False,
    rules: Path | None = None,
    progress: bool = True,
) -> tuple[Evaluation, Path]:
    """Fits rivals on a calibrated run, tests them beside its guard, and writes figures and a page.

    Args:
        folder: The run folder.
        only: Names; all of them where there are none.
        fresh: Deletes the weights that an earlier call kept.
        rules: YAML file of keyword rules in place of jaxguard's own.
        progress: Shows bars on stderr.

    Raises:
        JaxguardError: no calibrated run, or as :func:`rivals`.
    """
    run, guard = open_calibrated(folder, "test")
    calibration = guard.calibration
    assert calibration is not None  # open_calibrated saw to it
    if fresh:
        for name in NETWORKS:
            if not only or name in only:
                shutil.rmtree(folder / FOLDER / name, ignore_errors=True)
    # The level that the guard has, which may be another than when it was trained.
    decision = dataclasses.replace(
        run.config.decision, alpha_hold=calibration.hold.alpha, paper_rule=calibration.paper_rule
    )
    found = rivals(run, run.part("test"), only, decision=decision, rules=rules, progress=progress)
    result, _, page = write_evaluation(run, guard, "test", found, folder / FOLDER)
    return result, page
