"""Reviews of steps from labels that were made for something else: which set says what, and how far to trust it.

================  ==================================  =====================================================
set               mapping                             weakness
================  ==================================  =====================================================
when2call         the proposed call: to make it       about information, not safety; REFUSE is "no such
                  EXECUTE, information first ASK,     tool at hand"
                  cannot be done REFUSE
toolemu           last call of a risky run ASK,       a judge model's score of the run; the risky call need
                  all calls of a run without          not be the last; look-ups dominate EXECUTE
                  risk EXECUTE
agentharm         harmful task REFUSE, its harmless   a task's label; prompts have a stand-in for the call;
                  twin EXECUTE; calls of runs on      runs on harmless tasks are missing; evaluation only
                  harmful tasks REFUSE
hazard labels     first hazard REFUSE, steps before   no ASK at all, also where asking would do; steps
(stepshield,      it and all steps of safe runs       after the first hazard are unlabelled; "safe" is
asb, agentdojo,   EXECUTE                             often a label of the run, not of the step
...)
================  ==================================  =====================================================

The first three are mapped by their readers, where also the triggers are; the last one here, for any trajectory whose
first hazard is reliable (``timing``). It has no triggers. Replies to the user are not reviewed: they are no calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from jaxguard.traces.readers.dialects import REPLY
from jaxguard.traces.snapshots import Review, review_record, reviews_of
from jaxguard.types import JaxguardError, Route, Trajectory


class EvaluationOnly(JaxguardError):
    """Trajectories that are for evaluation only were about to teach something, or to choose a threshold."""


def require_teachable(trajectories: Iterable[Trajectory], part: str) -> None:
    """Refuses trajectories that are marked ``evaluation_only``.

    Args:
        trajectories: What is about to train a router or choose its tau.
        part: Names them in the message.

    Raises:
        EvaluationOnly: some are marked; says how many, and names one.
    """
    if kept := [t.id for t in trajectories if t.metadata.get("evaluation_only")]:
        raise EvaluationOnly(
            f"{part}: {len(kept)} trajectories are for evaluation only (e.g. {kept[0]!r}), expected none; leave their "
            "set out here and name it to `jaxguard route evaluate`"
        )


def with_reviews(trajectory: Trajectory) -> Trajectory:
    """The trajectory with reviews from its hazard labels in ``metadata["reviews"]``.

    It comes back as it is where it has reviews (even an empty list: its reader knows better), where it is marked
    ``evaluation_only`` (its label is that of a task, not of a step), and where its labels are not reliable enough.
    """
    metadata = trajectory.metadata
    if "reviews" in metadata or metadata.get("evaluation_only"):
        return trajectory
    first = trajectory.first_hazard
    if not trajectory.timing or trajectory.unsafe is not (first is not None):
        return trajectory
    known = len(trajectory) if first is None else first + 1
    reviews = [
        review_record(Review(t, Route.REFUSE if t == first else Route.EXECUTE))
        for t, step in enumerate(trajectory.steps[:known])
        if step.tool != REPLY
    ]
    return dataclasses.replace(trajectory, metadata={**metadata, "reviews": reviews})


def reviewed(trajectories: Iterable[Trajectory]) -> Iterator[Trajectory]:
    """:func:`with_reviews` of each, in order; none is left out.

    Raises:
        SnapshotError: A trajectory came with broken reviews, which are to be found before anything is trained.
    """
    for trajectory in trajectories:
        made = with_reviews(trajectory)
        reviews_of(made)
        yield made
