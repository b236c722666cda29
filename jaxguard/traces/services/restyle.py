"""The same steps as another agent would have left them: for asking whether a router depends on the style of traces.

As in Safety Sentry, section 4.6, a configuration is a framework (how observations and tools are written) and a
backbone (how much the agent reads and says). What decides a step is never touched.
"""

from __future__ import annotations

import dataclasses
import json

from jaxguard.types import JaxguardError, Step, Trajectory

FRAMEWORKS = ("plain", "structured")
BACKBONES = ("terse", "thorough")


def restyle(trajectory: Trajectory, framework: str, backbone: str) -> Trajectory:
    """The trajectory in another style, under an id of its own.

    Args:
        trajectory: Of :mod:`jaxguard.traces.services.corpus`.
        framework: ``"plain"``, or ``"structured"``: observations as JSON records, tool names in CamelCase.
        backbone: ``"terse"``, or ``"thorough"``: every read is announced and closed in the observation.

    Raises:
        JaxguardError: Another framework or backbone.
    """
    for name, value, known in (("framework", framework, FRAMEWORKS), ("backbone", backbone, BACKBONES)):
        if value not in known:
            raise JaxguardError(f"{name}: got {value!r:.80}, expected one of {', '.join(known)}")
    steps = [_restyled(step, framework, backbone) for step in trajectory.steps]
    return dataclasses.replace(
        trajectory,
        id=f"{trajectory.id}:{framework}:{backbone}",
        steps=tuple(steps),
        final_observation=_observation(trajectory.final_observation, framework, backbone),
    )


def _restyled(step: Step, framework: str, backbone: str) -> Step:
    tool = step.tool if framework == "plain" else "".join(part.capitalize() for part in step.tool.split("_"))
    return dataclasses.replace(step, tool=tool, observation=_observation(step.observation, framework, backbone))


def _observation(text: str, framework: str, backbone: str) -> str:
    if not text:
        return text
    if backbone == "thorough":
        text = f"Here is what came back. {text} That was all."
    return text if framework == "plain" else json.dumps({"status": "ok", "result": text})
