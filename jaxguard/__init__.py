"""jaxguard: says, before an LLM agent's tool call runs, whether it may."""

from jaxguard.types import Decision, JaxguardError, Step, Trajectory, Verdict

__all__ = ["Decision", "JaxguardError", "Step", "Trajectory", "Verdict", "__version__"]
__version__ = "0.1.0"
