"""jaxguard: says, before an LLM agent's tool call runs, whether it may."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxguard.types import Decision, JaxguardError, Step, Trajectory, Verdict

if TYPE_CHECKING:
    from jaxguard.guard import Guard

__all__ = ["Decision", "JaxguardError", "Step", "Trajectory", "Verdict", "__version__", "load_default"]
__version__ = "0.1.0"


def load_default() -> Guard:
    """The guard that comes with the package: ``small`` size, embedded encoder, thresholds at 0.10 and 0.05.

    Its model card, ``default_guard/MODEL_CARD.md`` beside this file, says what it was made from and how it does.

    Raises:
        JaxguardError: the embedded encoder's package is not installed.
    """
    from pathlib import Path

    from jaxguard.guard import Guard

    return Guard.load(Path(__file__).parent / "default_guard")
