"""The texts that are encoded for a trajectory: instruction, observations, actions.

A vector is looked up in the feature store by its text, so this module alone decides what a guard can
see of a step. Metadata (domain, service, persona memory) and, by default, the agent's private thought
are not part of any text. Any change of what is written here raises :data:`TEMPLATE_VERSION`, which is
part of every encoder fingerprint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from jaxguard.features.characters import well_formed
from jaxguard.features.grounding import Grounding
from jaxguard.types import JaxguardError, Step, Trajectory

TEMPLATE_VERSION = 1


_ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


@dataclass(frozen=True, slots=True)
class TrajectoryTexts:
    """Texts of a trajectory of T steps.

    Attributes:
        instruction: The task, e in the design's notation.
        observations: T + 1 texts; ``observations[t]`` is visible before action t, the last one is what
            became visible after the last action (a prediction target, never an input of a score).
        actions: T texts, one per proposed call.
        said: T texts, where they were asked for: what the trace last said of the things that each call names.
    """

    instruction: str
    observations: tuple[str, ...]
    actions: tuple[str, ...]
    said: tuple[str, ...] = ()

    def unique(self) -> tuple[str, ...]:
        """Every distinct text once, in order of first appearance."""
        return tuple(dict.fromkeys((self.instruction, *self.observations, *self.actions, *self.said)))


def action_text(step: Step, *, thought: bool = False) -> str:
    """Return the text of a proposed call: ``tool {"key":"value"}``.

    Arguments are compact JSON in the order of the source, so that the text is the same on every run and
    on every machine; unparsable arguments are given as they stood. With ``thought``, the agent's
    reasoning stands before the call, on lines of its own.

    Raises:
        JaxguardError: The arguments cannot be written as JSON (too deeply nested, or not JSON values).
    """
    if step.raw_arguments is not None:
        arguments = step.raw_arguments
    else:
        try:
            arguments = _ENCODE({} if step.arguments is None else dict(step.arguments))
        except (TypeError, ValueError, RecursionError) as error:
            raise JaxguardError(
                f"arguments of call {step.call_id!r} to {step.tool!r}: expected a JSON object, got one that "
                f"cannot be written as JSON ({type(error).__name__}: {error})"
            ) from error
    call = f"{step.tool} {arguments}"
    return well_formed(f"{step.thought}\n{call}" if thought and step.thought else call)


def trajectory_texts(trajectory: Trajectory, *, thought: bool = False, grounded: bool = False) -> TrajectoryTexts:
    """Return the texts of ``trajectory``; see :class:`TrajectoryTexts` for the lengths.

    ``observations[t]`` and ``actions[t]`` depend on step t alone, ``said[t]`` on steps 0..t (the pre-action rule).

    Args:
        trajectory: Any trajectory.
        thought: Put the agent's reasoning before each action.
        grounded: Give ``said``.

    Raises:
        JaxguardError: As :func:`action_text`, with the trajectory named.
    """
    try:
        actions = tuple(action_text(step, thought=thought) for step in trajectory.steps)
    except JaxguardError as error:
        raise JaxguardError(f"trajectory {trajectory.id!r}: {error}") from error
    return TrajectoryTexts(
        instruction=well_formed(trajectory.instruction),
        observations=(
            *(well_formed(step.observation) for step in trajectory.steps),
            well_formed(trajectory.final_observation),
        ),
        actions=actions,
        said=tuple(_said(trajectory)) if grounded else (),
    )


def _said(trajectory: Trajectory) -> Iterator[str]:
    seen = Grounding(escaped=True)
    for step in trajectory.steps:
        yield seen.excerpt(step)
        seen.add(step.observation)
