"""One trace: which of its spans are a model's turns, which are runs of tools, and what only repeats them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxguard.traces.readers.span_messages import Message, Said, said_in
from jaxguard.traces.readers.span_tools import Run, call_key, kind_of, run_of, short
from jaxguard.traces.readers.spans import Span
from jaxguard.traces.registry import RecordError

_TASKS = ("input.value", "traceloop.entity.input")
_ENDED_IN_A_CALL = re.compile(r"tool|function", re.IGNORECASE)


@dataclass
class Turn:
    """A call of a model: ``scope`` is the agent's or tool's span around it (``""``: none)."""

    span: Span
    scope: str
    given: list[Message]
    answered: list[Message]


@dataclass
class Trace:
    """What a trace holds, in the order of starts.

    Attributes:
        scopes: Of every span, parents first: its scope.
        anchors: Of every span: the outermost agent's span around it, ``""`` where there is none.
        tasks: Of every span: the text that stands as input of the outermost span around it within its scope's tool.
        agents: Of every span: the name of the agent.
    """

    id: str
    turns: list[Turn] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    scopes: dict[str, str] = field(default_factory=dict)
    anchors: dict[str, str] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)
    agents: dict[str, str] = field(default_factory=dict)


def read_trace(trace: str, spans: Iterable[Span]) -> Trace:
    """The turns and runs of a trace.

    Raises:
        RecordError: It is no agent's trace, its messages are not recorded, or something in it cannot be read.
    """
    ordered, parents = _parents_first(spans)
    kinds = {span.id: kind_of(span) for span in ordered}
    said = {span.id: said_in(span) if kinds[span.id] != "tool" else Said() for span in ordered}
    for name, own in said.items():
        if (own.given or own.answered) and not kinds[name]:
            kinds[name] = "llm"
    made = Trace(trace)
    near: dict[str, dict[str, str]] = {"llm": {}, "agent": {}}  # the next span around with messages
    inputs: dict[str, list[Message]] = {}
    inside: dict[str, str] = {"": ""}  # the task of what a span holds
    outer: set[str] = set()
    for span in ordered:
        up = parents[span.id]
        kind_up = kinds.get(up, "")
        made.scopes[span.id] = up if kind_up in ("tool", "agent") else made.scopes.get(up, "")
        made.agents[span.id] = short(span, "gen_ai.agent.name", "agent.name") or made.agents.get(up, "")
        own_task = short_task(span)
        is_tool = kinds[span.id] == "tool"
        made.tasks[span.id] = inside.get(up) or ("" if is_tool else own_task)
        inside[span.id] = own_task if is_tool else made.tasks[span.id]
        made.anchors[span.id] = made.anchors.get(up) or (up if kind_up == "agent" else "")
        content_up = up in said and bool(said[up].given or said[up].answered)
        for kind, ends in (("llm", ("tool", "agent")), ("agent", ("tool",))):
            around = up if content_up and kind_up == kind else near[kind].get(up, "") if kind_up not in ends else ""
            near[kind][span.id] = around
        inputs[span.id] = (said[up].given if content_up else []) or (inputs.get(up, []) if kind_up != "tool" else [])
    for span in ordered:
        if said[span.id].answered:
            for kind in ("llm", "agent") if kinds[span.id] == "llm" else ("agent",):
                around = near[kind][span.id]
                while around and around not in outer:
                    outer.add(around)
                    around = near[kind][around]
    repeats: list[tuple[str, Message]] = []
    answers: set[tuple[str, str]] = set()
    for span in sorted(ordered, key=lambda span: (span.start, span.end)):
        own = said[span.id]
        response = (str(span.attributes.get("gen_ai.response.id") or ""), json.dumps(own.answered, sort_keys=True))
        repeats += [(span.id, message) for message in own.repeats]
        if span.id in outer or (response[0] and response in answers):
            repeats += [(span.id, message) for message in [*own.given, *own.answered]]
        elif own.given or own.answered:
            answers.add(response)
            given = own.given or inputs[span.id]
            made.turns.append(Turn(span, made.scopes[span.id], given, own.answered))
    made.runs = _runs(ordered, parents, kinds)
    if not made.turns and not made.runs:
        told = any(kinds.values())
        names = ", ".join(repr(span.name) for span in ordered[:3])
        raise RecordError(
            "its spans of models and agents hold no messages (not recorded, or in a notation that is not read)"
            if told else f"no span of a model or a tool among its {len(ordered)} spans ({names}, ...)"
        )  # fmt: skip
    _refuse_losses(
        made, repeats, [span for span in ordered if span.id not in outer and kinds[span.id] == "llm"], inputs
    )
    return made


def short_task(span: Span) -> str:
    """The input of an outer span where it is a text."""
    return next((value for name in _TASKS if isinstance(value := span.attributes.get(name), str) and value), "")


def _parents_first(spans: Iterable[Span]) -> tuple[list[Span], dict[str, str]]:
    """Every span once, none before its parent, and the parents that are in the trace."""
    known: dict[str, Span] = {}
    for span in spans:
        twin = known.setdefault(span.id, span)
        if twin is not span and twin != span:
            raise RecordError(f"span id {span.id!r} stands twice with different contents")
    parents = {name: span.parent if span.parent in known else "" for name, span in known.items()}
    children: dict[str, list[Span]] = {}
    for span in sorted(known.values(), key=lambda span: span.start):
        children.setdefault(parents[span.id], []).append(span)
    ordered = list(children.get("", []))
    for span in ordered:
        ordered += children.get(span.id, ())
    if len(ordered) < len(known):
        rest = known.keys() - {span.id for span in ordered}
        raise RecordError(f"span {min(rest)}: its parents form a circle")
    return ordered, parents


def _runs(ordered: Sequence[Span], parents: dict[str, str], kinds: dict[str, str]) -> list[Run]:
    """The runs of tools; a span inside a run that shows the same call (a client's, a server's) is a repeat."""
    runs: list[Run] = []
    around: dict[str, Run | None] = {"": None}
    for span in ordered:
        outer = around[parents[span.id]]
        around[span.id] = outer if kinds[span.id] not in ("agent", "llm") else None
        if kinds[span.id] != "tool":
            continue
        run = run_of(span)
        if outer is not None and run.tool == outer.tool and _same(run, outer):
            outer.result = run.result if outer.result is None else outer.result
            outer.arguments = run.arguments if outer.arguments is None else outer.arguments
            continue
        around[span.id] = run
        runs.append(run)
    return sorted(runs, key=lambda run: (run.span.start, run.span.end))


def _same(inner: Run, outer: Run) -> bool:
    if inner.id and outer.id:
        return inner.id == outer.id
    return inner.arguments is None or outer.arguments is None or inner.key == outer.key


def calls_of(message: Message) -> list[tuple[str, str, str]]:
    """Id (``""``: none), tool and key of each call of a message."""
    found: list[tuple[str, str, str]] = []
    for call in message.get("tool_calls") or ():
        function: dict[str, Any] = call["function"]
        found.append((call["id"] or "", function["name"], call_key(function["name"], function["arguments"])))
    return found


def _refuse_losses(
    made: Trace, repeats: Iterable[tuple[str, Message]], models: Iterable[Span], inputs: dict[str, list[Message]]
) -> None:
    """Calls in spans that are not read must stand in those that are."""
    answered = [call for turn in made.turns for message in turn.answered for call in calls_of(message)]
    others = [call for turn in made.turns for message in turn.given for call in calls_of(message)]
    held = {call[2] for call in (*answered, *others)} | {run.key for run in made.runs}
    ids = {call[0] for call in (*answered, *others)} | {run.id for run in made.runs}
    for name, message in repeats:
        for own, tool, key in calls_of(message):
            if key not in held and (not own or own not in ids):
                raise RecordError(f"span {name}: a call of {tool!r} that stands in none of the spans that are read")
    known = {turn.span.id: turn for turn in made.turns}
    silent = 0
    for span in models:
        reasons = json.dumps(span.attributes.get("gen_ai.response.finish_reasons") or "", default=str)
        turn = known.get(span.id)
        calls = [call for message in turn.answered for call in calls_of(message)] if turn else []
        silent += bool(_ENDED_IN_A_CALL.search(reasons)) and not calls and not (turn is None and inputs[span.id])
    proposed = {call[2] for call in answered}
    shown = ({call[2] for call in others} | {run.key for run in made.runs}) - proposed
    if silent > max(len(shown), len(made.runs) - len(answered)):
        raise RecordError(f"{silent} answers of models ended in a call of a tool that is not recorded")
