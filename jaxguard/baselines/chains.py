"""Guards that count: Markov chains over discrete states of a run, which say how likely the violation is from here.

Both learn from the steps that stage 2 learns from: up to the first hazard step, which leads to the violation; a safe
run ends after its last step. The risk of a proposed call is the probability that it, or one of the ``stage2.horizon``
calls after it, is the violation, starting in the state that the call makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.cluster.vq import kmeans2

from jaxguard.baselines.keywords import load_rules, matching
from jaxguard.baselines.markov import Keys, MarkovChain
from jaxguard.baselines.rival import PrefixRival, RivalError, StepVectors
from jaxguard.baselines.tools import CHANGES, OTHER, tool_kind
from jaxguard.ranking import auroc
from jaxguard.training.episodes import supervising_step
from jaxguard.types import Trajectory

Reader = Callable[[Trajectory], StepVectors]
CLUSTERS, DECAYS = (8, 16, 32), (0.0, 0.5, 0.8)
# Of which clusters are made; more would take minutes and move them little.
MOST_STEPS = 5_000


@dataclass(frozen=True)
class Lesson:
    """What chains learn from.

    Attributes:
        train, validation: Trajectories of the run's parts, with their labels.
        horizon: ``stage2.horizon``.
        unlabelled: ``stage2.unlabelled_hazard``.
        seed: Of what is drawn.
    """

    train: Sequence[Trajectory]
    validation: Sequence[Trajectory] = field(default=())
    horizon: int = 3
    unlabelled: str = "skip"
    seed: int = 0

    def supervised(self) -> Iterator[tuple[Trajectory, int, bool]]:
        """Training runs that teach something, with the number of steps to learn from and how they end."""
        for trajectory in self.train:
            hazard = supervising_step(trajectory, self.unlabelled)
            if trajectory.steps and hazard != -2:
                yield trajectory, hazard + 1 if hazard >= 0 else len(trajectory), hazard >= 0


def _chain(name: str, lesson: Lesson, states: Callable[[Trajectory], Sequence[Keys]]) -> MarkovChain:
    runs = [(states(trajectory)[:end], violated) for trajectory, end, violated in lesson.supervised()]
    if not any(violated for _, violated in runs):
        raise RivalError(
            f"rival {name!r}: none of {len(lesson.train)} training trajectories has a first hazard step to learn from, "
            "expected at least one"
        )
    return MarkovChain(runs, lesson.horizon + 1)


class ToolChain(PrefixRival):
    """A chain over tools, after the probabilistic runtime monitors for agents (ProbGuard).

    The published monitor abstracts runs with symbolic predicates that are crafted for a domain. Here the state is the
    same for every domain: the proposed tool, the last tool before it that made or removed something, and which of the
    observation rules of ``keywords.yaml`` the run has met so far. A tool that training did not show counts as one of
    its kind (:func:`~jaxguard.baselines.tools.tool_kind`).

    Raises:
        RivalError: no training trajectory has a first hazard step.
    """

    name = "tool-chain"

    def __init__(self, lesson: Lesson):
        self._rules = [rule for rule in load_rules() if rule.where == ("observation",)]
        self.chain = _chain(self.name, lesson, self.states)

    def states(self, trajectory: Trajectory) -> list[Keys]:
        """Keys of the state at each step, :class:`~jaxguard.baselines.markov.MarkovChain`."""
        seen: frozenset[str] = frozenset()
        found: list[Keys] = []
        changed = ""
        for step in trajectory.steps:
            seen |= {rule.name for rule in matching(self._rules, step)}
            kind = tool_kind(step.tool)
            last = tool_kind(changed)
            found.append(((step.tool, changed, seen), (step.tool, last, seen), (kind, last, seen), kind))
            changed = step.tool if kind in CHANGES else changed
        return found

    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks of the steps."""
        return np.array([self.chain.risk(keys) for keys in self.states(trajectory)], np.float64)


@dataclass(frozen=True)
class Abstraction:
    """From vectors to discrete states.

    A state is the nearest centre of a decaying mean over the run's steps, the kind of the proposed tool, and whether
    the last call before it that changed something made or removed it.

    Attributes:
        reader: Gives vectors.
        decay: Weight of the past in the mean, in [0, 1); 0 sees the current step alone.
        centres: ``[K, 2E]``.
    """

    reader: Reader
    decay: float
    centres: np.ndarray

    def __call__(self, trajectory: Trajectory) -> list[Keys]:
        """Keys of the state at each step."""
        found: list[Keys] = []
        last = OTHER
        for step, point in zip(trajectory.steps, decaying_means(self.reader, trajectory, self.decay), strict=True):
            # Centre by centre: a matrix product may round differently when there are more rows.
            cluster = int(np.argmin(((self.centres - point) ** 2).sum(axis=1)))
            kind = tool_kind(step.tool)
            found.append(((cluster, kind, last), (kind, last), kind))
            last = kind if kind in CHANGES else last
        return found


def decaying_means(reader: Reader, trajectory: Trajectory, decay: float) -> np.ndarray:
    """``[T, 2E]``: m_t = decay m_{t-1} + (1 - decay) [o_t, a_t], m_{-1} = [o_0, a_0]."""
    obs, act, _ = reader(trajectory)
    points = np.concatenate([obs, act], axis=1)
    for t in range(1, len(points)):
        points[t] = np.float32(decay) * points[t - 1] + np.float32(1 - decay) * points[t]
    return points


class AbsorbingChain(PrefixRival):
    """An absorbing chain over safety states, after SafetyDrift.

    The published states are crafted by hand. Here they are found in the training runs: clusters (k-means) of a decaying
    mean over observations and actions, times what kinds of tools were called (:class:`Abstraction`). Number of clusters
    and decay are those that rank validation runs best.

    Raises:
        RivalError: no training trajectory has a first hazard step.
    """

    name = "absorbing-chain"

    def __init__(self, lesson: Lesson, reader: Reader):
        known: dict[str, StepVectors] = {}

        def read(trajectory: Trajectory) -> StepVectors:
            """Looks each trajectory up once, because every choice needs it again."""
            if trajectory.id not in known:
                known[trajectory.id] = reader(trajectory)
            return known[trajectory.id]

        labelled = [t for t in lesson.validation if t.unsafe is not None and t.steps]
        labels = np.array([bool(t.unsafe) for t in labelled])
        judged = len(np.unique(labels)) == 2
        best = -1.0
        for decay in DECAYS if judged else DECAYS[1:2]:
            points = _sample(
                (decaying_means(read, trajectory, decay)[:end] for trajectory, end, _ in lesson.supervised()),
                lesson.seed,
            )
            for clusters in CLUSTERS if judged else CLUSTERS[1:2]:
                states = Abstraction(read, decay, _centres(points, clusters, lesson.seed))
                chain = _chain(self.name, lesson, states)
                value = 0.0
                if judged:
                    value = auroc(np.array([max(map(chain.risk, states(t))) for t in labelled]), labels)
                if value > best:
                    best, self.states, self.chain = value, replace(states, reader=reader), chain

    def risks(self, trajectory: Trajectory) -> np.ndarray:
        """``[T]`` risks of the steps."""
        return np.array([self.chain.risk(keys) for keys in self.states(trajectory)], np.float64)


def _sample(parts: Iterable[np.ndarray], seed: int) -> np.ndarray:
    """All rows, or a random part where there are too many."""
    rows = list(itertools.chain.from_iterable(parts))
    if len(rows) > MOST_STEPS:
        chosen = np.random.default_rng(seed).choice(len(rows), MOST_STEPS, replace=False)
        rows = [rows[i] for i in np.sort(chosen)]
    return np.array(rows, np.float32)


def _centres(points: np.ndarray, clusters: int, seed: int) -> np.ndarray:
    """``[K, F]`` centres; fewer than asked for where there are fewer distinct points."""
    distinct = np.unique(points, axis=0)
    if len(distinct) <= clusters:
        return distinct
    return kmeans2(points, clusters, iter=20, minit="++", rng=seed)[0]
