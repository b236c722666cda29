"""The same steps as another agent would have left them: so that a router does not depend on the style of traces.

As in Safety Sentry, section 4.6, a configuration is a framework (how observations and tools are written) and a
backbone (how much the agent reads and says). What decides a step is never touched. The corpus is written in the
frameworks of :data:`LEARNED`; those of :data:`FRAMEWORKS` are asked about, and only the plain one is in both.
"""

from __future__ import annotations

import dataclasses
import json
import re

from jaxguard.types import JaxguardError, Step, Trajectory

FRAMEWORKS = ("plain", "structured")
BACKBONES = ("terse", "thorough")
LEARNED = ("plain", "tagged", "labelled", "listed")

_ALL = dict.fromkeys((*LEARNED, *FRAMEWORKS))
_SENTENCE_ENDS = re.compile(r"(?<=[.!?])\s+")


def restyle(trajectory: Trajectory, framework: str, backbone: str) -> Trajectory:
    """The trajectory in another style, under an id of its own.

    Args:
        trajectory: Of :mod:`jaxguard.traces.services.corpus`, in the plain framework.
        framework: ``"plain"``; ``"structured"``: observations as JSON records, tool names in CamelCase; or another
            of :data:`LEARNED`.
        backbone: ``"terse"``, or ``"thorough"``: every read is announced and closed in the observation.

    Raises:
        JaxguardError: Another framework or backbone.
    """
    for name, value, known in (("framework", framework, tuple(_ALL)), ("backbone", backbone, BACKBONES)):
        if value not in known:
            raise JaxguardError(f"{name}: got {value!r:.80}, expected one of {', '.join(known)}")
    return dataclasses.replace(
        trajectory,
        id=f"{trajectory.id}:{framework}:{backbone}",
        steps=tuple(restyled(step, framework, backbone) for step in trajectory.steps),
        final_observation=_observation(trajectory.final_observation, framework, backbone),
    )


def restyled(step: Step, framework: str, backbone: str = "terse") -> Step:
    """One step in another style, as :func:`restyle`."""
    return dataclasses.replace(
        step, tool=_tool(step.tool, framework), observation=_observation(step.observation, framework, backbone)
    )


def _tool(name: str, framework: str) -> str:
    first, *others = name.split("_")
    match framework:
        case "structured":
            return "".join(part.capitalize() for part in (first, *others))
        case "tagged":
            return "-".join((first, *others))
        case "labelled":
            return "".join((first, *(part.capitalize() for part in others)))
        case "listed":
            return f"tools.{name}"
        case _:
            return name


def _observation(text: str, framework: str, backbone: str) -> str:
    if not text:
        return text
    if backbone == "thorough":
        text = f"Here is what came back. {text} That was all."
    match framework:
        case "structured":
            return json.dumps({"status": "ok", "result": text})
        case "tagged":
            return f"<output>\n{text}\n</output>"
        case "labelled":
            return f"exit code: 0\nstdout: {text}"
        case "listed":
            return json.dumps({"content": [{"type": "text", "text": part} for part in _SENTENCE_ENDS.split(text)]})
        case _:
            return text
