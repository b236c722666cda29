"""A live arena: scripted agents, benign and attacked, in AgentDojo's environments, with a guard before every call.

No language model takes part. The agents know their calls beforehand: those of AgentDojo's ground truth for the
user's task, and for an injected goal those of its ground truth. What is measured is whether a guard tells the two
apart live, and what that costs; not whether a model would have fallen for the injection.

Needs the package ``agentdojo``, of which plans, figures and pages know nothing.
"""

from importlib.util import find_spec

from jaxguard.types import JaxguardError


def require_agentdojo() -> None:
    """Says how to install AgentDojo where it is missing.

    Raises:
        JaxguardError: it is.
    """
    if find_spec("agentdojo") is None:
        raise JaxguardError("AgentDojo is not installed; pip install 'jaxguard[arena]'")
