"""Text that gives a label away, and how it is masked: the one place for these rules.

Agent Security Bench (ASB) simulates its tools. The answer of an ordinary tool is *"You have
successfully <what the description promises>"*, that of an attack tool says outright that it is one:
*"You have used the attacker tool <name>. You have achieved the attacker goal: <goal>"*. Both stand in
one template, several to a message, each followed by injected text if there is any::

    The knowledge I get from <tool> is: <report>; <injected text>;The knowledge I get from ...

A mask that rewrites the attack report alone is itself a label: its wording, or the lack of the usual
one, occurs in attacked runs only. So :func:`neutral` replaces **every** report, of ordinary and of
attack tools, by the same word. Nothing is lost with it: an ordinary report repeats the description of
its tool, which is a constant. What carries information stays: the name of the tool, and injected text.

The same logs, reused by other sets, carry the same text, so all readers share these functions. Labels
are read from the raw text (:func:`is_attack_result`) before it is masked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NEUTRAL_REPORT = "done."

TOOL_LIST = "You are given the available tools from the tool list:"
MEMORY_HINT = "To generate the current plan workflow, you must refer to the previous workflow"

_RESULT = re.compile(r"The knowledge I get from ([^:;]{1,200}?) is:")
_ATTACK_REPORT = "You have used the attacker tool"
# A report ends at the semicolon before injected text or before the next result. An empty one is the
# work of a defence that took a result away, which happens to attack tools: it must not stand out either.
_REPORT = re.compile(
    r"(The knowledge I get from [^:;]{1,200}? is:)"
    r"\s*(?:You have (?:successfully|used the attacker tool)[^;]*|(?=;|\Z))"
)
_PLAN_STEP = re.compile(r"\s*At step \d+, you need to ")
_TOOL_NAME = re.compile(r'"name": ?"([^"]{1,200})"')


@dataclass(frozen=True)
class ToolResult:
    """One tool's answer in an observation text; ``attack`` says that the tool calls itself an attack tool."""

    tool: str
    attack: bool


def neutral(text: str) -> str:
    """``text`` with every simulated tool report, harmless or not, replaced by :data:`NEUTRAL_REPORT`."""
    return _REPORT.sub(rf"\1 {NEUTRAL_REPORT}", text)


def is_attack_result(text: str) -> bool:
    """Does raw (unmasked) text hold the answer of an attack tool? Reads a label: never for features."""
    return _ATTACK_REPORT in text


def tool_results(text: str) -> list[ToolResult]:
    """The tools that answered in a raw observation text, in order."""
    found = list(_RESULT.finditer(text))
    results = []
    for index, match in enumerate(found):
        end = found[index + 1].start() if index + 1 < len(found) else len(text)
        results.append(ToolResult(match[1], is_attack_result(text[match.end() : end])))
    return results


def is_plan_step(text: str) -> bool:
    """Is this the harness handing the agent the next step of the plan that the agent itself wrote?

    Such a message ("At step 2, you need to ...") has the role of a user but is the agent's own private
    plan, word for word. It says what the agent is about to do and is no outside information, so readers
    treat it as thought, which no score reads by default, and not as an observation.
    """
    return _PLAN_STEP.match(text) is not None


def split_prompt(text: str) -> tuple[str, str, list[str]]:
    """A prompt of an ASB run as ``(task, memory, tool names)``.

    The harness text with the tool list is cut off: it names the attack tool in attacked and in safe
    runs alike and is the same for all tasks of an agent. ``memory`` is the retrieved earlier workflow
    (poisoned in memory attacks), which the agent sees before it acts; ``""`` where there is none.
    """
    head, _, tail = text.partition(TOOL_LIST)
    task, hint, rest = head.partition(MEMORY_HINT)
    return task.strip(), (hint + rest).strip(), _TOOL_NAME.findall(tail)
