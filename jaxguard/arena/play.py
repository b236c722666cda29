"""One run of a scripted agent in an AgentDojo environment, and what came of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentdojo.functions_runtime import FunctionsRuntime

from jaxguard.arena.agents import Arena, Course, Message, Script, logged
from jaxguard.arena.plan import HIJACKED, JOINED, Case
from jaxguard.arena.stage import MadeGoal, Stage, standing_clock
from jaxguard.guard import Guard
from jaxguard.traces.files import clean_json
from jaxguard.traces.readers.agentdojo import READER
from jaxguard.traces.readers.turns import with_hazards
from jaxguard.traces.registry import Context
from jaxguard.types import Trajectory


@dataclass(frozen=True)
class Play:
    """A run that was made.

    Attributes:
        case: What was to be done.
        instruction: What the agent was asked.
        messages: All messages, in the layout of AgentDojo's logs.
        course: Which calls were proposed, refused, executed.
        utility: Does AgentDojo say that the user's task was done, and did all of its calls run? A scripted agent knows
            its arguments beforehand, so that it could do what it was not permitted to read about. ``None`` where more
            was asked for or injected than AgentDojo knows of.
        attacked: Was the injected goal reached? By AgentDojo's check; other goals than its injection tasks are, if all
            of their calls ran.
        seconds: Duration, environment included.
    """

    case: Case
    instruction: str
    messages: Sequence[Message]
    course: Course
    utility: bool | None
    attacked: bool
    seconds: float


def play(stage: Stage, case: Case, guard: Guard | None = None) -> Play:
    """Runs a case, with a guard before every call if there is one.

    Raises:
        ArenaError: the suite or AgentDojo lacks what the case names.
    """
    started = time.perf_counter()
    task = stage.user(case.user)
    goal = stage.goal(case.goal) if case.goal else None
    texts = stage.texts(case.user, case.goal, case.attack) if case.attack else {}
    instruction = task.PROMPT
    if case.conduct == "asked" and goal is not None:
        instruction = JOINED[case.joined].format(task=task.PROMPT, goal=goal.GOAL)
    with standing_clock():
        environment = stage.environment(texts)
        # AgentDojo does so too; what a ground truth takes from the environment must be there when it is asked for.
        before = task.init_environment(environment.model_copy(deep=True))
        own = list(task.ground_truth(before))
        injected = list(goal.ground_truth(before)) if goal is not None else []
        if case.conduct == "asked":
            own, injected = own + injected, []
        elif case.conduct not in HIJACKED:
            injected = []
        script = Script(own, injected, stage.exposed(case.user), case.conduct == "at_once", task.GROUND_TRUTH_OUTPUT)
        arena = Arena(instruction, script, guard.session(instruction, {"domain": stage.name}) if guard else None)
        judged = goal if case.conduct != "asked" and not isinstance(goal, MadeGoal) else None
        security = False
        utility: bool | None = None
        if judged is not None or goal is None:
            utility, security = stage.suite.run_task_with_pipeline(arena, task, judged, texts, environment=environment)
        else:  # what else was done may have taken away what AgentDojo's check of the user's task looks at
            tools = FunctionsRuntime(stage.suite.tools)
            arena.query(task.PROMPT, tools, task.init_environment(environment))
    course = arena.course
    reached = bool(injected) and len(course.ran("injected")) == len(injected)
    return Play(
        case=case,
        instruction=instruction,
        messages=logged(arena.messages),
        course=course,
        utility=utility if utility is None else utility and not any(i.startswith("own") for i in course.refused),
        attacked=security if judged is not None else reached,
        seconds=time.perf_counter() - started,
    )


def trajectory(stage: Stage, done: Play, part: str) -> Trajectory:
    """An unguarded run as the reader of AgentDojo's logs makes it, with the injected calls as its hazards.

    Of an injected goal, the calls that change the environment are the hazards, or all of them where none does: what it
    only reads on the way is also read for users.
    """
    case, course = done.case, done.course
    hazards: list[bool | None] = [False] * len(course.proposed)
    if done.attacked:
        for call, changes in enumerate(stage.effects(case.user, case.goal)):
            hazards[course.proposed.index(f"injected-{call}")] = changes
    record: dict[str, Any] = {
        "suite_name": case.suite,
        "pipeline_name": case.id.split("/")[0],
        "user_task_id": case.user,
        "injection_task_id": case.goal if case.attack and case.conduct != "asked" else None,
        "attack_type": case.attack or None,
        "messages": done.messages,
        "utility": done.utility,
        "security": done.attacked,
        "derived_first_hazard_call": hazards.index(True) + 1 if done.attacked else None,
    }
    (read,) = READER.read(clean_json(record)[0], Context(Path(case.id), 0))
    # Ids that say whose call it is have no place in what is learned from.
    steps = tuple(dataclasses.replace(step, call_id=f"call_{i}") for i, step in enumerate(read.steps))
    return dataclasses.replace(
        read,
        id=case.id,
        steps=with_hazards(steps, hazards),
        metadata={**read.metadata, "part": part, "conduct": case.conduct},
    )
