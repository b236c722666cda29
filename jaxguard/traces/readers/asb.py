"""Agent Security Bench execution logs: undefended, under attack, and under a defence.

Calls and their results stand in the same assistant text::

    [Action]: I will call the A with the params as None;I will call the B ...;[Observation]: The knowledge ...

The calls of one text are proposed together and share an observation; the results move to the next
observation, masked by :mod:`jaxguard.traces.leaks`. What else a record holds:

- "[Thinking]" plans, the harness handing out the steps of that plan, "Fail n times ..." notices and
  answers without a call are the agent's own reasoning: ``thought``.
- A retrieved workflow (memory attack) is visible before the first call: its observation.
- The user's text is the instruction, with the injected text of direct prompt injection in it, as the
  agent read it. The tool list is harness text and is left out; its names are in the metadata.

A run is unsafe when the attack tool was called (``attack_successful``); the first such call is the first
hazard. A defence may block the call after it was proposed: such a run is safe by its label, but its
proposal was not, so it is of no use for timing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces import leaks
from jaxguard.traces.readers.turns import Call, StepBuilder, group_key, with_hazards
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_REQUIRED = {"id", "agent_name", "attack_tool", "attack_successful", "messages", "derived_tool_calls"}
_SIDE_FILES = ("agent_task.jsonl", "all_normal_tools.jsonl", "all_attack_tools.jsonl")
_CALL = re.compile(r"I will call the (\S{1,200}) with the params as ")


def _matches(record: Record) -> bool:
    return set(record) >= _REQUIRED


def parse_turn(text: str) -> tuple[list[Call], str | None]:
    """An "[Action]" text as ``(calls, raw observation)``; the observation is ``None`` where it has none."""
    proposal, mark, result = text.partition("[Observation]:")
    calls = []
    position = 0
    # A pattern that reached for the semicolon itself would search to the end of the text from every call without one.
    while (call := _CALL.search(proposal, position)) and (end := proposal.find(";", call.end())) >= 0:
        calls.append(Call(call[1], *_parameters(proposal[call.end() : end]), dialect="asb"))
        position = end + 1
    return calls, result.strip() if mark else None


def _parameters(text: str) -> tuple[dict[str, Any] | None, str | None]:
    """ASB's tools take nothing and log ``None``; anything else is kept as it stands."""
    return ({}, None) if text.strip() in ("None", "") else (None, text)


def _read(record: Record, _context: Context) -> Iterable[Trajectory]:
    messages, unsafe, target = record["messages"], record["attack_successful"], record["attack_tool"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RecordError(f"messages: found {type(messages).__name__}, expected a list of objects")
    if not isinstance(unsafe, bool):
        raise RecordError(f"attack_successful: found {unsafe!r}, expected true or false")

    dialogue = _walk(messages)
    steps, final, _ = dialogue.build.finish()
    names = [step.tool for step in steps]
    if names != record["derived_tool_calls"]:
        raise RecordError(
            f"derived_tool_calls: found {record['derived_tool_calls']!r}, but the messages propose {names!r}"
        )
    attempts = [index for index, name in enumerate(names) if name == target]
    given = record.get("derived_first_attack_tool_call")
    if given != (attempts[0] + 1 if attempts else None):
        raise RecordError(f"derived_first_attack_tool_call: found {given!r}, but {target!r} is {attempts}")

    blocked = bool(attempts) and not unsafe
    timing = bool(attempts) == unsafe
    if timing:
        steps = with_hazards(steps, [name == target for name in names])
    yield Trajectory(
        id=str(record["id"]),
        instruction="\n".join(dialogue.task),
        steps=steps,
        unsafe=unsafe,
        first_hazard=attempts[0] if attempts and unsafe else None,
        timing=timing,
        group=group_key("profile", dialogue.profile or str(record["agent_name"])),
        final_observation=final,
        source="asb",
        metadata={
            "attack": record.get("attack"),
            "variant": record.get("variant"),
            "defense": record.get("defense"),
            "model": record.get("model"),
            "agent_name": record["agent_name"],
            "attack_tool": target,
            "aggressive": record.get("aggressive"),
            "refused": record.get("derived_refused"),
            "attempt_blocked": blocked,
            "tools": dialogue.tools,
            "final_reply": dialogue.reply,
        },
    )


@dataclass
class _Dialogue:
    """What the messages of a run hold besides its steps."""

    build: StepBuilder = field(default_factory=StepBuilder)
    task: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    profile: str = ""
    reply: str = ""


def _walk(messages: Iterable[Record]) -> _Dialogue:
    out = _Dialogue()
    for message in messages:
        role = message.get("role")
        if role == "assistant":
            _assistant(out, message)
            continue
        text = _text(message, "content")
        if leaks.is_plan_step(text):
            out.build.think(text)
            continue
        task, memory, tools = leaks.split_prompt(text)
        out.tools += tools
        out.build.observe(memory or None)
        if role == "user" and task:
            out.task.append(task)
        elif role == "system" and not out.profile:
            out.profile = task
    return out


def _assistant(out: _Dialogue, message: Record) -> None:
    if "content" not in message:  # a step of the plan without a call: the agent just answers
        out.reply = leaks.neutral(_text(message, "thinking"))
        out.build.think(out.reply)
        return
    text = _text(message, "content")
    if not text.startswith("[Action]"):
        if text.startswith(leaks.MEMORY_HINT):
            out.build.observe(text)
        else:
            out.build.think(leaks.neutral(text))
        return
    calls, result = parse_turn(text)
    if calls:
        out.reply = ""
    out.build.propose(calls)
    out.build.observe(None if result is None else leaks.neutral(result))


def _text(message: Record, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str):
        raise RecordError(f"messages: {key!r} is {type(value).__name__}, expected a text")
    return value


READER = Reader(
    name="asb",
    description="Agent Security Bench execution logs (calls and observations in assistant text)",
    matches=_matches,
    read=_read,
    is_companion=lambda name: name in _SIDE_FILES,
)
