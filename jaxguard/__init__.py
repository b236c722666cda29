"""jaxguard: says, before an LLM agent's tool call runs, whether it may."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxguard.types import Decision, JaxguardError, Step, Trajectory, Verdict

if TYPE_CHECKING:
    from jaxguard.features.encoder import Encoder
    from jaxguard.guard import Guard

__all__ = ["DEFAULT_GUARD", "Decision", "JaxguardError", "Step", "Trajectory", "Verdict", "__version__", "load_default"]
__version__ = "0.1.0"

DEFAULT_GUARD = Path(__file__).parent / "default_guard"
"""Bundle of the guard that comes with the package; ``MODEL_CARD.md`` in it has its data, figures and limits."""


def load_default(encoder: Encoder | None = None) -> Guard:
    """The guard that comes with the package, calibrated; see :meth:`jaxguard.guard.Guard.load`.

    It knows the kinds of agents it was trained on (``DEFAULT_GUARD / "MODEL_CARD.md"``) and no others.

    Args:
        encoder: Used instead of making the embedded one; must have its fingerprint.

    Raises:
        JaxguardError: the encoder's weights are not installed, or ``encoder`` is another one.
    """
    from jaxguard.guard import Guard  # JAX is imported where a guard is wanted

    return Guard.load(DEFAULT_GUARD, encoder)
