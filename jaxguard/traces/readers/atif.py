"""Agent Trajectory Interchange Format (ATIF, of Harbor and Terminal-Bench), one document a record.

A document has ``schema_version`` ``"ATIF-v1.x"``, ``agent`` and ``steps``. A step of source ``agent`` is a whole turn:
the agent's words, the calls it proposes and, in ``observation.results``, what came of them; only the next step saw the
latter. A result names its call in ``source_call_id``; one that names none (a terminal's screen after several commands)
is the result of all calls of its step that have no other. Documents of sub-agents that stand inside are trajectories of
their own. The package ``atif`` holds every document to the schema: its models know each version's fields, so that a
field that nobody knows, which might hold calls, cannot be passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.registry import CannotRead, Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

if TYPE_CHECKING:
    import atif
    from pydantic import ValidationError

_VERSION = "ATIF-v"
_MAX_METADATA_CHARS = 500
# What a result that only points at a sub-agent's document shows.
_REFERENCE = "[subagent_trajectory]"


def _matches(record: Record) -> bool:
    version = record.get("schema_version")
    return isinstance(version, str) and version.startswith(_VERSION)


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    document = _validated(record)
    stem = context.stem
    name = document.trajectory_id or document.session_id or str(context.position)
    # A session goes on in other files, which begin with a copy of this one's steps.
    group = f"atif:{document.session_id}" if document.session_id else f"{stem}:{name}"
    for place, own, part in _documents(document, "", f"{stem}:{name}"):
        yield _trajectory(part, place, own, group)


def _validated(record: Record) -> atif.Trajectory:
    try:
        import atif
        from pydantic import ValidationError
    except ImportError as error:
        raise CannotRead(f"atif: {error.name} is not installed; pip install 'jaxguard[formats]'") from error
    try:
        return atif.Trajectory.model_validate(record)
    except ValidationError as error:
        raise RecordError(_reason(error)) from error


def _reason(error: ValidationError) -> str:
    first, *others = error.errors(include_url=False, include_context=False)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    found = "" if first["type"] in ("missing", "value_error") else f", got {first['input']!r:.60}"
    more = f" (and {len(others)} more)" if others else ""
    return f"not valid ATIF: {place or 'record'}: {message}{found}{more}"


def _documents(root: atif.Trajectory, place: str, name: str) -> Iterator[tuple[str, str, atif.Trajectory]]:
    """A document and those of the sub-agents inside it, at any depth, each with its place and its id."""
    waiting = [(place, name, root)]
    while waiting:
        place, name, document = waiting.pop()
        yield place, name, document
        inside = document.subagent_trajectories or []
        waiting += [
            (f"{place}subagent_trajectories[{i}].", f"{name}/{sub.trajectory_id}", sub) for i, sub in enumerate(inside)
        ][::-1]


def _trajectory(document: atif.Trajectory, place: str, name: str, group: str) -> Trajectory:
    messages = [message for step in document.steps for message in _messages(step)]
    conversation = read_conversation(messages, f"{place}steps")
    notes = Counter(conversation.notes)
    for step in document.steps:
        results = step.observation.results if step.observation else []
        if step.is_copied_context and step.tool_calls:
            notes["copied_calls"] += len(step.tool_calls)
        if step.source == "agent" and not step.tool_calls:
            notes["results_without_call"] += sum(result.source_call_id is None for result in results)
        notes["subagents_elsewhere"] += sum(
            ref.trajectory_id not in {sub.trajectory_id for sub in document.subagent_trajectories or []}
            for result in results
            for ref in result.subagent_trajectory_ref or []
        )
    notes = +notes
    if notes["results_without_call"] and not conversation.steps:
        raise RecordError(f"{place}steps: an agent's steps have results, but none has tool_calls")
    model = document.agent.model_name or next((step.model_name for step in document.steps if step.model_name), None)
    facts: dict[str, Any] = {
        "agent": document.agent.name,
        "agent_version": document.agent.version,
        "model": model,
        "session": document.session_id,
        "schema_version": document.schema_version,
        "continued_in": document.continued_trajectory_ref,
    }
    metadata = {key: value for key, value in facts.items() if value and len(value) <= _MAX_METADATA_CHARS}
    return conversation.trajectory(metadata, notes, id=name, group=group, source="atif")


def _messages(step: atif.Step) -> Iterator[dict[str, Any]]:
    """A step as chat messages: what was said and proposed, then what came of it."""
    calls = step.tool_calls or []
    yield {
        "role": "assistant" if step.source == "agent" else step.source,
        "content": _content(step.message),
        "reasoning_content": step.reasoning_content,
        "tool_calls": [
            {"id": call.tool_call_id, "function": {"name": call.function_name, "arguments": call.arguments}}
            for call in calls
        ],
    }
    results = step.observation.results if step.observation else []
    named = {result.source_call_id for result in results}
    unnamed = [call.tool_call_id for call in calls if call.tool_call_id not in named]
    for result in results:
        content = _content(result.content)
        if content is None and result.subagent_trajectory_ref:
            content = _REFERENCE
        if result.source_call_id is not None:
            yield {"role": "tool", "tool_call_id": result.source_call_id, "content": content}
        elif unnamed:
            yield {"role": "tool", "tool_call_id": unnamed[0], "content": content}
            yield from ({"role": "tool", "tool_call_id": other, "content": ""} for other in unnamed[1:])
            unnamed = []
        elif calls:  # one result more than there are calls left
            yield {"role": "tool", "tool_call_id": calls[-1].tool_call_id, "content": content}
        else:  # no call's result, so that it must not answer one that is still open
            yield {"role": "system", "content": content}


def _content(value: str | list[atif.ContentPart] | None) -> str | list[dict[str, Any]] | None:
    if isinstance(value, list):
        return [part.model_dump(exclude_none=True) for part in value]
    return value


READER = Reader(
    name="atif",
    description="ATIF documents (Agent Trajectory Interchange Format, of Harbor and Terminal-Bench)",
    matches=_matches,
    read=_read,
)
