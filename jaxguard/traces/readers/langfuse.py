"""Langfuse's trace export: a trace and its observations (generations, tools, agents, spans, events).

``{"trace": {...}, "observations": [...]}`` as the web page exports it, or the trace with its ``observations`` inside as
the API gives it. Payloads are values or JSON texts. One trace is one trajectory; :mod:`.span_tree` says in what order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxguard.traces.readers.message_dialects import unwrap
from jaxguard.traces.readers.span_tree import Span, seconds, trajectory_of
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

# A span of a tool that is not of type TOOL is known by what its instrument noted.
_TOOL_NAMES = ("gen_ai.tool.name", "tool.name", "ai.toolCall.name")
_CALL_IDS = ("gen_ai.tool.call.id", "ai.toolCall.id", "tool_call.id", "tool.call_id", "tool_call_id")
_KINDS = ("openinference.span.kind", "langsmith.span.kind", "traceloop.span.kind", "gen_ai.operation.name")
_TOOL_KINDS = ("tool", "execute_tool")


def _observations(record: Record) -> tuple[Any, str]:
    trace = record.get("trace")
    if "observations" not in record and isinstance(trace, dict):
        return trace.get("observations"), "trace.observations"
    return record.get("observations"), "observations"


def _matches(record: Record) -> bool:
    observations, _ = _observations(record)
    if not isinstance(observations, list):
        return False
    first = observations[0] if observations else None
    if isinstance(first, dict):
        return "type" in first and "startTime" in first and ("traceId" in first or "parentObservationId" in first)
    return (
        not observations
        and isinstance(record.get("trace", record), dict)
        and "timestamp" in record.get("trace", record)
    )


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    observations, field = _observations(record)
    if not isinstance(observations, list) or not observations:
        raise RecordError(f"{field}: got {observations!r:.60}, expected a list of observations")
    given = record.get("trace")
    trace: Mapping[str, Any] = given if isinstance(given, dict) else record
    spans = [_span(observation, f"{field}[{number}]") for number, observation in enumerate(observations)]
    roots = {span.id for span in spans}
    if trace.get("input") is not None and not any(span.inputs for span in spans if span.parent not in roots):
        # The application may have told the trace what was asked, and no observation.
        start = min(span.start for span in spans)
        spans.append(Span("trace", "trace", "", "other", "trace", start, None, trace["input"], trace.get("output")))
    own = trace.get("id") or observations[0].get("traceId")
    if not isinstance(own, str) or not own:
        raise RecordError(f"trace.id: got {own!r:.60}, expected the trace's id")
    models = (observation.get("model") for observation in observations)
    session = trace.get("sessionId")
    metadata = {
        "name": trace.get("name"),
        "model": next((model for model in models if isinstance(model, str)), None),
        "session_id": session,
        "environment": trace.get("environment"),
        "user_id": trace.get("userId"),
    }
    yield trajectory_of(spans, own, "langfuse", session if isinstance(session, str) else "", metadata)


def _span(observation: Any, at: str) -> Span:
    if not isinstance(observation, dict):
        raise RecordError(f"{at}: got {type(observation).__name__}, expected an object")
    own, kind = observation.get("id"), observation.get("type")
    for name, value in (("id", own), ("type", kind)):
        if not isinstance(value, str) or not value:
            raise RecordError(f"{at}.{name}: got {value!r:.60}, expected a non-empty string")
    parent, end = observation.get("parentObservationId"), observation.get("endTime")
    inputs, outputs = observation.get("input"), observation.get("output")
    notes = _notes(observation)
    tool = next((notes[name] for name in _TOOL_NAMES if isinstance(notes.get(name), str) and notes[name]), "")
    is_tool = kind == "TOOL" or bool(tool) or any(str(notes.get(name)).lower() in _TOOL_KINDS for name in _KINDS)
    given = observation.get("name")
    failed = observation.get("level") == "ERROR" and observation.get("statusMessage")
    return Span(
        at=at,
        id=str(own),
        parent=parent if isinstance(parent, str) else "",
        kind="llm" if kind == "GENERATION" else "tool" if is_tool else "other",
        name=tool or (given if isinstance(given, str) else ""),
        start=seconds(observation.get("startTime"), f"{at}.startTime"),
        end=None if end is None else seconds(end, f"{at}.endTime"),
        inputs=inputs,
        outputs=outputs,
        call_id=next((notes[name] for name in _CALL_IDS if isinstance(notes.get(name), str)), "") or _answers(outputs),
        error=str(failed) if failed else "",
    )


def _notes(observation: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of the OpenTelemetry span that an observation was, if it was one."""
    metadata = unwrap(observation.get("metadata"))
    attributes = unwrap(metadata.get("attributes")) if isinstance(metadata, dict) else None
    return attributes if isinstance(attributes, dict) else {}


def _answers(outputs: Any) -> str:
    """The id of the call that LangChain's tool message answers."""
    message = unwrap(outputs)
    call_id = message.get("tool_call_id") if isinstance(message, dict) else None
    return call_id if isinstance(call_id, str) else ""


READER = Reader(
    name="langfuse",
    description="Langfuse trace exports: a trace with its observations",
    matches=_matches,
    read=_read,
)
