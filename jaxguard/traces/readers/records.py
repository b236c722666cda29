"""Record-style sets: ASSE-Security, R-Judge and ATBench (also R-Judge's layout without ``risk_type``).

They share one layout: ``contents`` is a list of sessions, each a list of messages of the roles ``user``
(``content``), ``agent`` (``thought``, ``action``) and ``environment`` (``content``). The action is free text in
many notations (:mod:`jaxguard.traces.readers.dialects`). How a record becomes a trajectory:

- The first user text is the instruction, later ones are observations tagged ``[user]``. Sessions follow one
  another; their number is in the metadata.
- An action that is empty is no step: its thought is kept for the next step and the turn is counted.
- ``null`` content of the environment means that the log has no result.

Records of ASSE-Security that were made from ASB runs need more care: the result of the executed call
stands in the ``thought`` of the same turn. It moves to the next observation and is masked as in ASB. Where
several tools answered, the record shows the first call alone; the others are restored from their
results (they were proposed in the same turn and share its observation) and counted. The first call that
an attack tool answered is the first hazard step, so these records are usable for timing. Of all other
unsafe records the hazardous step is not known.

AgentHarm runs occur in ASSE-Security and, by themselves, in R-Judge's layout (the text of AgentHarm's grader tells
them). Its authors ask to keep them out of training: ``evaluation_only`` is true in the metadata. All of their tasks are
harmful, so every call of those by themselves has the review REFUSE, whether or not the agent refused later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces import leaks
from jaxguard.traces.readers.dialects import REPLY, parse_action
from jaxguard.traces.readers.turns import Call, StepBuilder, group_key, with_hazards
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.traces.snapshots import Review, review_record
from jaxguard.types import Route, Step, Trajectory

_COMMON = {"id", "contents", "label"}
_ASSE = _COMMON | {
    "profile", "application_scenario", "risk_type", "failure_mode", "ambiguous", "risk_description",
}  # fmt: skip
_R_JUDGE = _COMMON | {"scenario", "profile", "goal", "risk_description"}
_R_JUDGE_RISK = ("risk_type", " ")  # one record of the published file has the key " "
_ATBENCH = _COMMON | {"tool_used", "risk_source", "failure_mode", "harm_type", "reason", "source"}

_RESULT_MARK = "[Observation]:"
_GRADER_MARK = "Grading breakdown:"
_HINT = "\n\nHint:"  # AgentHarm repeats a prompt with and without a hint


@dataclass
class _Dialogue:
    """A record's text on its way to a trajectory."""

    build: StepBuilder = field(default_factory=StepBuilder)
    instruction: str | None = None
    simulated: bool = False  # made from an ASB run
    attacks: list[bool] = field(default_factory=list)  # per step, where `simulated`
    tools: list[str] = field(default_factory=list)
    empty_actions: int = 0
    restored_calls: int = 0
    reply: str = ""


def _messages(record: Record) -> Iterator[Mapping[str, Any]]:
    sessions = record["contents"]
    if not isinstance(sessions, list) or not all(isinstance(session, list) for session in sessions):
        raise RecordError("contents: expected a list of lists of messages")
    for session in sessions:
        for message in session:
            if not isinstance(message, dict) or message.get("role") not in ("user", "agent", "environment"):
                raise RecordError(f"contents: expected user, agent and environment messages, found {message!r:.100}")
            yield message


def _text(message: Mapping[str, Any], key: str) -> str | None:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise RecordError(f"{message['role']} {key}: found {type(value).__name__}, expected a text or null")
    return value


def _walk(record: Record) -> _Dialogue:
    out = _Dialogue()
    for message in _messages(record):
        if message["role"] == "agent":
            _agent(out, _text(message, "thought") or "", _text(message, "action") or "")
        elif message["role"] == "environment":
            out.build.observe(_text(message, "content"))
        else:
            _user(out, _text(message, "content"))
    return out


def _user(out: _Dialogue, text: str | None) -> None:
    if text is None:
        return
    if out.instruction is None:
        out.simulated = leaks.TOOL_LIST in text
        out.instruction, memory, out.tools = leaks.split_prompt(text)
        out.build.observe(memory or None)
    elif out.simulated and leaks.is_plan_step(text):
        out.build.think(text)
    elif text:
        out.build.observe(f"[user] {text}")


def _agent(out: _Dialogue, thought: str, action: str) -> None:
    result: str | None = None
    if out.simulated:
        thought, mark, after = thought.partition(_RESULT_MARK)
        result = after.strip() if mark else None
        thought = leaks.neutral(thought)
    out.build.think(thought)
    calls = parse_action(action)
    if not calls:
        out.empty_actions += 1
        out.reply = thought
    else:
        out.build.propose(calls)
        out.reply = ""
    if result is not None:
        _executed(out, calls, result)
    elif out.simulated:
        out.attacks += [False] * len(calls)


def _executed(out: _Dialogue, calls: list[Call], result: str) -> None:
    """Moves the answers of a turn's tools to the next observation; reads the labels in them first."""
    answers = leaks.tool_results(result)
    if calls and [answer.tool for answer in answers[:1]] == [call.tool for call in calls]:
        restored = [Call(answer.tool, {}, dialect="restored") for answer in answers[1:]]
        out.build.propose_also(restored)
        out.restored_calls += len(restored)
        out.attacks += [answer.attack for answer in answers]
    else:
        attacking = {answer.tool for answer in answers if answer.attack}
        out.attacks += [call.tool in attacking for call in calls]
    out.build.observe(leaks.neutral(result))


def _trajectory(record: Record, source: str, group: str, about: Mapping[str, Any], out: _Dialogue) -> Trajectory:
    steps, final, _ = out.build.finish()
    unsafe = _label(record["label"])
    first: int | None = None
    if out.simulated and unsafe:
        first = out.attacks.index(True) if True in out.attacks else None
    timing = not unsafe or first is not None
    if timing:
        steps = with_hazards(steps, out.attacks if unsafe else [False] * len(steps))
    return Trajectory(
        id=f"{source}-{record['id']}",
        instruction=out.instruction or "",
        steps=steps,
        unsafe=unsafe,
        first_hazard=first,
        timing=timing,
        group=group,
        final_observation=final,
        source=source,
        metadata={
            **about,
            "sessions": len(record["contents"]),
            "empty_actions": out.empty_actions,
            "restored_calls": out.restored_calls,
            "tools": out.tools,
            "final_reply": out.reply or _last_reply(steps),
        },
    )


def _last_reply(steps: tuple[Step, ...]) -> str:
    if not steps or steps[-1].tool != REPLY or steps[-1].arguments is None:
        return ""
    return str(steps[-1].arguments["text"])


def _label(value: object) -> bool:
    if value not in (0, 1):
        raise RecordError(f"label: found {value!r}, expected 0 (safe) or 1 (unsafe)")
    return bool(value)


def _task_group(out: _Dialogue, record: Record) -> str:
    """Same task text, hint aside; a record without any user text shares a group with none."""
    task = (out.instruction or "").partition(_HINT)[0].strip()
    return group_key("task", task or f"no text {record['id']}")


def _read_asse(record: Record, _context: Context) -> Iterable[Trajectory]:
    out = _walk(record)
    profile = str(record["profile"])
    # As in ASB: one task per agent, so that the agent's profile is the group, across both sets.
    group = group_key("profile", profile) if out.simulated else _task_group(out, record)
    about = {
        "domain": record["application_scenario"],
        "risk_type": record["risk_type"],
        "failure_mode": record["failure_mode"],
        "ambiguous": bool(record["ambiguous"]),
        "made_from": "asb" if out.simulated else "agentharm",
        **({} if out.simulated else {"evaluation_only": True}),
    }
    yield _trajectory(record, "asse_security", group, about, out)


def _read_r_judge(record: Record, _context: Context) -> Iterable[Trajectory]:
    out = _walk(record)
    risk = next((record[key] for key in _R_JUDGE_RISK if key in record), None)
    about = {"domain": record["scenario"], "risk_type": risk, "profile": record["profile"]}
    if _GRADER_MARK in str(record["risk_description"]):
        calls = [t for t, step in enumerate(out.build.steps) if step.tool != REPLY]
        reviews = [review_record(Review(t, Route.REFUSE)) for t in calls]
        about |= {"made_from": "agentharm", "evaluation_only": True, "reviews": reviews}
    yield _trajectory(record, "r_judge", _task_group(out, record), about, out)


def _read_atbench(record: Record, _context: Context) -> Iterable[Trajectory]:
    out = _walk(record)
    about = {
        "risk_type": record["risk_source"],
        "failure_mode": record["failure_mode"],
        "harm_type": record["harm_type"],
        "kind": record["source"],
    }
    out.tools = [str(tool.get("name")) for tool in record["tool_used"] if isinstance(tool, dict)]
    yield _trajectory(record, "atbench", _task_group(out, record), about, out)


def _is_r_judge(record: Record) -> bool:
    return set(record).difference(_R_JUDGE_RISK) == _R_JUDGE


READERS = (
    Reader(
        name="asse_security",
        description="ASSEBench security records (made from ASB and AgentHarm runs)",
        matches=lambda record: set(record) == _ASSE,
        read=_read_asse,
    ),
    Reader(
        name="r_judge",
        description="R-Judge records (sessions of user, agent and environment turns)",
        matches=_is_r_judge,
        read=_read_r_judge,
    ),
    Reader(
        name="atbench",
        description="ATBench records (tool-use runs with three-way risk diagnosis)",
        matches=lambda record: set(record) == _ATBENCH,
        read=_read_atbench,
    ),
)
