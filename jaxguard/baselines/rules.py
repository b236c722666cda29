"""Rules that look at tool names and counts alone.

They cost nothing and sometimes win, because a data set gives itself away (attack tools in another
spelling, unsafe runs that are longer): a figure that does not beat them says nothing about a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from jaxguard.types import Trajectory

CAMEL_CASE = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+$")


def unknown_tool(train: Iterable[Trajectory], test: Sequence[Trajectory]) -> np.ndarray:
    """``[n]`` bool: the trajectory calls a tool that no safe training trajectory calls."""
    known = {step.tool for trajectory in train if trajectory.unsafe is False for step in trajectory.steps}
    return np.array([any(step.tool not in known for step in trajectory.steps) for trajectory in test], bool)


def camel_case_tool(test: Sequence[Trajectory]) -> np.ndarray:
    """``[n]`` bool: the trajectory calls a tool spelt LikeThis."""
    return np.array([any(CAMEL_CASE.match(step.tool) for step in t.steps) for t in test], bool)


def two_or_more_calls(test: Sequence[Trajectory]) -> np.ndarray:
    """``[n]`` bool: the trajectory has at least two calls."""
    return np.array([len(t) >= 2 for t in test], bool)
