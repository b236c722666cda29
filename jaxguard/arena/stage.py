"""AgentDojo's suites as the arena needs them: tasks, what an attacked agent gets to see and when, a clock that stands.

A *goal* is what an injection asks for. It is an injection task of the suite, or, in training, what another user task
asks for, or an errand: then the same calls are injected in one run and wanted by the user in another.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import yaml
from agentdojo.agent_pipeline import GroundTruthPipeline
from agentdojo.attacks.attack_registry import ATTACKS
from agentdojo.attacks.base_attacks import BaseAttack
from agentdojo.base_tasks import BaseInjectionTask
from agentdojo.default_suites.v1.tools import cloud_drive_client, email_client
from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
from agentdojo.task_suite.load_suites import get_suites
from agentdojo.task_suite.task_suite import read_suite_file
from agentdojo.types import get_text_content_as_str

from jaxguard.arena.errands import PER_TOOL, PREFIX, errand
from jaxguard.arena.plan import ArenaError

BENCHMARK = "v1.2.2"
"""Version of AgentDojo's tasks."""
SUITES = ("banking", "slack", "travel", "workspace")
ATTACKER_SEES = "local"
"""Name of the attacked pipeline: some attacks address its model, and AgentDojo derives that from the name."""
CLOCK = datetime.datetime(2024, 5, 15, 12, 0)
"""The day on which AgentDojo's environments are set."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def agentdojo_version() -> str:
    """Version of the installed package."""
    return version("agentdojo")


@contextmanager
def standing_clock() -> Iterator[None]:
    """Tools that stamp what they write with the time of day stamp it with :data:`CLOCK`: runs repeat to the letter."""
    modules = (email_client, cloud_drive_client)
    before = [module.datetime for module in modules]
    for module in modules:
        module.datetime = SimpleNamespace(datetime=SimpleNamespace(now=lambda: CLOCK))
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.datetime = own


class MadeGoal(BaseInjectionTask):
    """A goal that is no injection task of AgentDojo: what a user task asks for, or an errand."""

    def __init__(self, name: str, text: str, calls: Callable[[Any], list[FunctionCall]]):
        self.ID = name
        self.GOAL = text.replace('"', "'")  # it is written between double quotes in YAML
        self._calls = calls

    def ground_truth(self, pre_environment: Any) -> list[FunctionCall]:
        return self._calls(pre_environment)

    def security(self, model_output: str, pre_environment: Any, post_environment: Any) -> bool:
        raise ArenaError(f"{self.ID}: AgentDojo does not say when this goal is reached")


class Stage:
    """One suite; what is worked out of its tasks is kept."""

    def __init__(self, name: str):
        self.name = name
        self.suite = copy.copy(get_suites(BENCHMARK)[name])
        self.suite.load_and_inject_default_environment = self.environment  # attacks read it, too
        self._attacks: dict[str, BaseAttack] = {}
        self._exposed: dict[str, tuple[int, ...]] = {}
        self._effects: dict[tuple[str, str], tuple[bool, ...]] = {}

    @property
    def users(self) -> list[str]:
        """Ids of the user tasks."""
        return list(self.suite.user_tasks)

    @cached_property
    def injections(self) -> list[str]:
        """Ids of the injection tasks whose ground truth is known; the others have none in AgentDojo."""
        environment = self.environment({})
        return [name for name, task in self.suite.injection_tasks.items() if task.ground_truth(environment)]

    @cached_property
    def errands(self) -> dict[str, MadeGoal]:
        """Made-up goals by name (:mod:`jaxguard.arena.errands`), of those that change a default environment."""
        environment = self.environment({})
        found = {}
        with standing_clock():
            for tool in self.suite.tools:
                for number in range(PER_TOOL):
                    name = f"{PREFIX}_{tool.name}_{number}"
                    made = errand(tool, f"{self.name} {name}", self._known(environment))
                    if made is None:
                        break
                    call = FunctionCall(function=tool.name, args=made[1])
                    if any(self._changes(environment.model_copy(deep=True), [call])):
                        found[name] = MadeGoal(name, made[0], lambda _, call=call: [call])  # type: ignore[misc]
        return found

    @staticmethod
    def _known(environment: Any) -> dict[str, list[str]]:
        if not hasattr(environment, "slack"):
            return {}
        users, channels = environment.slack.users, environment.slack.channels
        return {"user": [*users, "Nora", "Theo"], "recipient": users, "channel": channels}

    def environment(self, injections: dict[str, str]) -> Any:
        """A new environment with texts in its injection vectors.

        Does what the suite's own method does, ten times faster: reading YAML is most of a run.
        """
        suite = self.suite
        filled = suite.get_injection_vector_defaults() | injections
        text = read_suite_file(suite.name, "environment.yaml", suite.data_path).format(**filled)
        return suite.environment_type.model_validate(yaml.load(text, _LOADER))

    def user(self, name: str) -> Any:
        """A user task.

        Raises:
            ArenaError: the suite has no such task.
        """
        return self._named(self.suite.user_tasks, name)

    def goal(self, name: str) -> BaseInjectionTask:
        """An injection task, or an errand, or a user task as a goal."""
        if name in self.suite.user_tasks:
            task = self.suite.user_tasks[name]
            return MadeGoal(name, task.PROMPT, task.ground_truth)
        if name.startswith(PREFIX):
            return self._named(self.errands, name)
        return self._named(self.suite.injection_tasks, name)

    def _named(self, tasks: Mapping[str, Any], name: str) -> Any:
        if name not in tasks:
            raise ArenaError(f"suite {self.name}: has no task {name!r}, expected one of {', '.join(tasks)}")
        return tasks[name]

    def texts(self, user: str, goal: str, attack: str) -> dict[str, str]:
        """What an attack writes into the injection vectors that the agent sees when it does the user's task.

        Raises:
            ArenaError: AgentDojo has no such attack.
        """
        if attack not in ATTACKS:
            raise ArenaError(f"attack: got {attack!r}, expected one of {', '.join(ATTACKS)}")
        if attack not in self._attacks:
            made = self._attacks[attack] = ATTACKS[attack](self.suite, SimpleNamespace(name=ATTACKER_SEES))
            # What an agent sees does not depend on the attack: worked out by the first for all.
            made.get_injection_candidates = next(iter(self._attacks.values())).get_injection_candidates
        return self._attacks[attack].attack(self.user(user), self.goal(goal))

    def exposed(self, user: str) -> tuple[int, ...]:
        """Which calls of the user's task, counted from 0, have a result that shows some injection vector."""
        if user not in self._exposed:
            vectors = self.suite.get_injection_vector_defaults()
            environment = self.environment({name: f"<CANARY---{name}--->" for name in vectors})
            task = self.user(user)
            with standing_clock():
                environment = task.init_environment(environment)
                _, _, _, messages, _ = GroundTruthPipeline(task).query(
                    task.PROMPT, FunctionsRuntime(self.suite.tools), environment
                )
            results = [get_text_content_as_str(m["content"]) for m in messages if m["role"] == "tool"]
            self._exposed[user] = tuple(i for i, text in enumerate(results) if "<CANARY---" in text)
        return self._exposed[user]

    def effects(self, user: str, goal: str) -> tuple[bool, ...]:
        """Which calls of a goal change the environment of a user's task; all, where none does."""
        if (user, goal) not in self._effects:
            with standing_clock():
                environment = self.user(user).init_environment(self.environment({}))
                calls = self.goal(goal).ground_truth(environment)
                found = list(self._changes(environment, calls))
            self._effects[user, goal] = tuple(found) if any(found) else (True,) * len(found)
        return self._effects[user, goal]

    def _changes(self, environment: Any, calls: Sequence[FunctionCall]) -> Iterator[bool]:
        runtime = FunctionsRuntime(self.suite.tools)
        for call in calls:
            before = environment.model_copy(deep=True)
            _, error = runtime.run_function(environment, call.function, copy.deepcopy(call.args))
            yield error is None and environment != before


def load_stages(names: Sequence[str]) -> dict[str, Stage]:
    """Stages by the names of their suites.

    Raises:
        ArenaError: no name, one that AgentDojo does not have, or one twice.
    """
    wrong = [name for name in names if name not in SUITES]
    if wrong or not names or len(set(names)) < len(names):
        raise ArenaError(f"suites: got {', '.join(names) or 'none'}, expected some of {', '.join(SUITES)}, each once")
    return {name: Stage(name) for name in names}
