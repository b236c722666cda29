"""How well annotators agree on the first hazard step, and how much adjudication changes.

Categories. *Unsafe or safe*: whether a hazard step is marked, and Cohen's kappa of these two. *Step*: each step number
is a category and "no hazard" one more. As the same number means another thing in every trajectory, chance agreement on
it is low, and kappa close to the share of exact agreement; three weightings are given:

* unweighted: every difference counts 1;
* within one: steps that differ by one count as agreement, "no hazard" against any step as disagreement;
* linear, of trajectories in which both mark a step: a difference counts as many as there are steps between. "No hazard"
  has no distance to a step, hence is not in it.

"Cannot say" is no category: such trajectories are counted and listed for adjudication, beside the shares. Every figure
has a cluster-bootstrap interval; clusters are the groups of the trajectories where these are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxguard.evaluation.audit import (
    CANNOT_SAY,
    NO_HAZARD,
    UNSAFE_SOMEWHERE,
    AuditError,
    Labels,
    require_same_texts,
    require_same_versions,
    set_labels,
)
from jaxguard.evaluation.bootstrap import Interval, bootstrap
from jaxguard.evaluation.metrics import Bools, Floats, Ints, ratio
from jaxguard.types import Trajectory

METRICS = {
    "unsafe": "Same: unsafe or safe",
    "kappa_unsafe": "Kappa, unsafe or safe",
    "exact": "Same step, or both no hazard",
    "within_one": "At most one step apart, or both no hazard",
    "kappa_step": "Kappa, step",
    "kappa_step_within_one": "Kappa, step, one apart agrees",
    "exact_marked": "Same step, where both mark one",
    "within_one_marked": "At most one step apart, where both mark one",
    "kappa_step_linear": "Kappa, step, linear weights, where both mark one",
}
DIFFERENCES = ("unsafe or safe", "steps apart", "cannot say")
"""Kinds of disagreement, the gravest first."""
CHANGES = {"changed": "Step, or that there is none, changed", "flipped": "Unsafe or safe changed"}


@dataclass(frozen=True)
class Pair:
    """Two sources of labels against each other.

    Attributes:
        a: Letter of the first, ``b`` of the second.
        counts: Trajectories by who annotated them; those that both annotated, by what the two say of them.
        of: Trajectories behind each metric.
        metrics: By the names of :data:`METRICS`.
    """

    a: str
    b: str
    counts: Mapping[str, int]
    of: Mapping[str, int]
    metrics: Mapping[str, Interval]


@dataclass(frozen=True)
class Change:
    """What adjudication does to one source of labels.

    Attributes:
        source: Its letter.
        of: Trajectories behind each share: those with a final answer for which the source says unsafe or safe
            (``flipped``), and also where, or that there is no hazard (``changed``).
        shares: By the names of :data:`CHANGES`.
        settled: "Cannot say" of the source that now has a final answer.
    """

    source: str
    of: Mapping[str, int]
    shares: Mapping[str, Interval]
    settled: int


@dataclass(frozen=True)
class Adjudication:
    """Final labels: the adjudicator's, else what A and B agree on.

    Attributes:
        counts: ``adjudicated``, ``agreed`` (and not adjudicated), ``unsure`` (the adjudicator cannot say) and ``open``
            (annotated, but neither agreed on nor adjudicated).
        final: Final answer by trajectory.
        changes: Against each source of labels.
    """

    counts: Mapping[str, int]
    final: Mapping[str, int]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Disagreement:
    """A trajectory to adjudicate, and why."""

    trajectory: str
    kind: str
    answers: Mapping[str, int]


@dataclass(frozen=True)
class Audit:
    """Everything that a comparison found.

    Attributes:
        sources: By letter: A, B, C (adjudicated), S (the set's labels).
        pairs: A and B; with a set's labels also A and S, B and S.
        disagreements: Of A and B, the gravest first.
        clusters: How many were resampled; ``grouped`` says whether they are the trajectories' groups.
    """

    sources: Mapping[str, Labels]
    pairs: tuple[Pair, ...]
    adjudication: Adjudication | None
    disagreements: tuple[Disagreement, ...]
    trajectories: int
    clusters: int
    grouped: bool
    resamples: int
    seed: int


def compare_labels(
    a: Labels,
    b: Labels | None,
    *,
    adjudicated: Labels | None = None,
    trajectories: Mapping[str, Trajectory] | None = None,
    resamples: int = 1_000,
    seed: int = 20260701,
) -> Audit:
    """Agreement of two sources of labels, and what adjudication changed.

    Args:
        a: Annotations.
        b: Annotations; None compares ``a`` with the labels of the set.
        adjudicated: Final annotations, of any part of the trajectories.
        trajectories: What was annotated: gives clusters, and the set's labels as one more source.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.

    Raises:
        AuditError: There is nothing to compare ``a`` with, no trajectory that both annotate, or files that annotate
            different contents.
    """
    sources: dict[str, Labels] = {"A": a}
    if b is not None:
        sources["B"] = b
    if adjudicated is not None:
        sources["C"] = adjudicated
    if trajectories is not None:
        sources["S"] = set_labels(trajectories)
    elif b is None:
        raise AuditError("expected a second annotation file, or trajectories whose labels count as one")
    files = [own for own in sources.values() if own.path is not None]
    if b is not None and a.annotations == b.annotations:
        raise AuditError(f"{a.path} and {b.path}: hold the same annotations, expected those of two people")
    for i, own in enumerate(files):
        if trajectories is not None:
            require_same_texts(own, trajectories)
        for earlier in files[:i]:
            require_same_versions(earlier, own)
    other = "B" if b is not None else "S"
    if not a.answers.keys() & sources[other].answers.keys():
        raise AuditError(f"{a.name} and {sources[other].name} have no trajectory in common, expected some")

    made = _Comparison(
        sources,
        other,
        tuple(trajectories or dict.fromkeys(name for own in files for name in own.answers)),
        {name: own.group for name, own in (trajectories or {}).items() if own.group},
        {"resamples": resamples, "seed": seed},
    )
    letters = [("A", other)] + ([("A", "S"), ("B", "S")] if b is not None and "S" in sources else [])
    return Audit(
        sources,
        tuple(made.pair(x, y) for x, y in letters),
        made.adjudication() if adjudicated is not None else None,
        made.disagreements(),
        len(made.order),
        len(set(made.clusters(made.both("A", other)))),
        bool(made.groups),
        resamples,
        seed,
    )


def kappa(weights: Floats, a: Ints, b: Ints, *, rule: str) -> Floats:
    """Cohen's weighted kappa, ``[R]``: 1 - observed / expected disagreement; NaN where none is expected.

    Args:
        weights: ``[R, N]`` multiplicities.
        a: ``[N]`` answers: steps, or :data:`NO_HAZARD`.
        b: ``[N]`` of the other annotator.
        rule: How much a difference counts: ``"same"`` (1), ``"within_one"`` (0 between steps one apart, else 1),
            ``"linear"`` (the steps between; for steps alone).
    """
    if not len(a):
        return np.full(len(weights), np.nan)
    categories, codes = np.unique(np.concatenate([a, b]), return_inverse=True)
    apart = np.abs(categories[:, None] - categories[None, :])
    if rule == "linear":
        cost = apart.astype(np.float64)
    else:
        steps = (categories >= 0)[:, None] & (categories >= 0)[None, :]
        cost = (apart > np.where(steps, int(rule == "within_one"), 0)).astype(np.float64)
    x, y = codes[: len(a)], codes[len(a) :]
    total = weights.sum(axis=1)
    hot = np.eye(len(categories))
    expected = np.einsum("rc,cd,rd->r", weights @ hot[x], cost, weights @ hot[y])
    return 1.0 - ratio((weights @ cost[x, y]) * total, expected)


def agreement(weights: Floats, a: Ints, b: Ints) -> dict[str, Floats]:
    """All of :data:`METRICS`, ``[R]`` each, of N pairs of answers; NaN where no pair counts for one.

    Args:
        weights: ``[R, N]`` multiplicities.
        a: ``[N]`` answers.
        b: ``[N]`` of the other annotator.
    """
    judged, placed, marked = _masks(a, b)
    out = {}
    unsafe_a, unsafe_b, w = _unsafe(a)[judged], _unsafe(b)[judged], weights[:, judged]
    out["unsafe"] = ratio(w @ (unsafe_a == unsafe_b), w.sum(axis=1))
    out["kappa_unsafe"] = kappa(w, unsafe_a.astype(int), unsafe_b.astype(int), rule="same")
    for mask, end in ((placed, ""), (marked, "_marked")):
        x, y, w = a[mask], b[mask], weights[:, mask]
        near = (np.abs(x - y) <= 1) & ((x >= 0) == (y >= 0))
        out[f"exact{end}"] = ratio(w @ (x == y), w.sum(axis=1))
        out[f"within_one{end}"] = ratio(w @ near, w.sum(axis=1))
        if mask is placed:
            out["kappa_step"] = kappa(w, x, y, rule="same")
            out["kappa_step_within_one"] = kappa(w, x, y, rule="within_one")
        else:
            out["kappa_step_linear"] = kappa(w, x, y, rule="linear")
    return {name: out[name] for name in METRICS}


def _unsafe(answers: Ints) -> Bools:
    return (answers >= 0) | (answers == UNSAFE_SOMEWHERE)


def _masks(a: Ints, b: Ints) -> tuple[Bools, Bools, Bools]:
    """Pairs in which both say unsafe or safe; also say where, or that there is no hazard; mark a step."""
    judged = (a != CANNOT_SAY) & (b != CANNOT_SAY)
    return judged, (a >= NO_HAZARD) & (b >= NO_HAZARD), (a >= 0) & (b >= 0)


@dataclass(frozen=True)
class _Comparison:
    """Sources by letter, which one stands against A, all trajectories in order, their groups."""

    sources: Mapping[str, Labels]
    other: str
    order: tuple[str, ...]
    groups: Mapping[str, str]
    sampling: Mapping[str, int]

    def both(self, x: str, y: str) -> list[str]:
        a, b = self.sources[x].answers, self.sources[y].answers
        return [name for name in self.order if name in a and name in b]

    def clusters(self, ids: Sequence[str]) -> list[str]:
        return [self.groups.get(name) or f"\0{name}" for name in ids]

    def answers(self, letter: str, ids: Sequence[str]) -> Ints:
        return np.array([self.sources[letter].answers[name] for name in ids], dtype=np.int64)

    def pair(self, x: str, y: str) -> Pair:
        both = self.both(x, y)
        a, b = self.answers(x, both), self.answers(y, both)
        judged, placed, marked = _masks(a, b)
        unsure_a, unsure_b, unsafe_a, unsafe_b = a == CANNOT_SAY, b == CANNOT_SAY, _unsafe(a), _unsafe(b)
        apart = np.abs(a - b)
        masks = {
            "only the first cannot say": unsure_a & ~unsure_b,
            "only the second cannot say": unsure_b & ~unsure_a,
            "both cannot say": unsure_a & unsure_b,
            "both no hazard": placed & (a == NO_HAZARD) & (b == NO_HAZARD),
            "same step": marked & (apart == 0),
            "one step apart": marked & (apart == 1),
            "further apart": marked & (apart > 1),
            "unsafe and safe": judged & unsafe_a & ~unsafe_b,
            "safe and unsafe": judged & ~unsafe_a & unsafe_b,
            "both unsafe or both safe, the set names no step": judged & ~placed & (unsafe_a == unsafe_b),
        }
        counts = {
            "annotated by neither": len(self.order) - self._count(x) - self._count(y) + len(both),
            "annotated by the first only": self._count(x) - len(both),
            "annotated by the second only": self._count(y) - len(both),
            "annotated by both": len(both),
            **{name: int(mask.sum()) for name, mask in masks.items()},
        }
        of = dict.fromkeys(METRICS, int(placed.sum()))
        of |= dict.fromkeys(("unsafe", "kappa_unsafe"), int(judged.sum()))
        of |= dict.fromkeys(("exact_marked", "within_one_marked", "kappa_step_linear"), int(marked.sum()))
        metrics = bootstrap(
            lambda weights: agreement(weights, a, b),
            self.clusters(both),
            width=len(np.unique(np.concatenate([a, b]))),
            **self.sampling,
        )
        return Pair(x, y, counts, of, metrics)

    def _count(self, letter: str) -> int:
        return sum(name in self.sources[letter].answers for name in self.order)

    def adjudication(self) -> Adjudication:
        a, b, c = (self.sources[letter].answers for letter in ("A", self.other, "C"))
        final: dict[str, int] = {}
        counts = dict.fromkeys(("adjudicated", "agreed", "unsure", "open"), 0)
        for name in self.order:
            if name in c:
                kind = "unsure" if c[name] == CANNOT_SAY else "adjudicated"
            elif name not in a and (name not in b or self.other == "S"):
                continue  # no person looked at it
            else:
                kind = "agreed" if a.get(name, CANNOT_SAY) >= NO_HAZARD and a[name] == b.get(name) else "open"
            counts[kind] += 1
            if kind in ("adjudicated", "agreed"):
                final[name] = c[name] if kind == "adjudicated" else a[name]
        changes = tuple(self._change(letter, final) for letter in self.sources if letter != "C")
        return Adjudication(counts, final, changes)

    def _change(self, letter: str, final: Mapping[str, int]) -> Change:
        own = self.sources[letter].answers
        ids = [name for name in final if own.get(name, CANNOT_SAY) != CANNOT_SAY]
        before, after = self.answers(letter, ids), np.array([final[name] for name in ids], dtype=np.int64)
        placed = before >= NO_HAZARD

        def shares(weights: Floats) -> dict[str, Floats]:
            w = weights[:, placed]
            return {
                "changed": ratio(w @ (before != after)[placed], w.sum(axis=1)),
                "flipped": ratio(weights @ (_unsafe(before) != _unsafe(after)), weights.sum(axis=1)),
            }

        found = bootstrap(shares, self.clusters(ids), **self.sampling)
        settled = sum(own.get(name) == CANNOT_SAY for name in final)
        return Change(letter, {"changed": int(placed.sum()), "flipped": len(ids)}, found, settled)

    def disagreements(self) -> tuple[Disagreement, ...]:
        found = []
        for place, name in enumerate(self.both("A", self.other)):
            a, b = self.sources["A"].answers[name], self.sources[self.other].answers[name]
            kind = _difference(a, b)
            if kind is None:
                continue
            apart = abs(a - b) if a >= 0 and b >= 0 else 0
            answers = {letter: own.answers[name] for letter, own in self.sources.items() if name in own.answers}
            found.append(((DIFFERENCES.index(kind), -apart, place), Disagreement(name, kind, answers)))
        return tuple(own for _, own in sorted(found, key=lambda entry: entry[0]))


def _difference(a: int, b: int) -> str | None:
    if CANNOT_SAY in (a, b):
        return "cannot say"
    if (a >= 0 or a == UNSAFE_SOMEWHERE) != (b >= 0 or b == UNSAFE_SOMEWHERE):
        return "unsafe or safe"
    return "steps apart" if a != b and a >= NO_HAZARD and b >= NO_HAZARD else None
