"""Spans out of the containers that tracing backends export; what the spans say is not read here.

Three layouts: OTLP JSON (``resourceSpans[].scopeSpans[].spans[]``, also under ``trace``), Tempo's (``batches`` in the
place of ``resourceSpans``, ``instrumentationLibrarySpans`` in older ones) and Jaeger's (``data[].spans[]``). The spans
of a trace may stand in any order and in several records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxguard.traces.registry import RecordError

_SCOPES = ("scopeSpans", "instrumentationLibrarySpans")
_WHOLE = re.compile(r"-?[0-9]{1,20}")
_VALUES = ("stringValue", "intValue", "doubleValue", "boolValue", "bytesValue")


@dataclass(frozen=True)
class Span:
    """One operation; times are nanoseconds, ``parent`` is ``""`` for a root, ``error`` the status message of a failure.

    ``events`` are pairs of a name and attributes, in the order of the log.
    """

    trace: str
    id: str
    parent: str
    name: str
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: tuple[tuple[str, Mapping[str, Any]], ...]
    service: str = ""
    error: str = ""


@dataclass(frozen=True)
class BadSpan:
    """What should be a span (or hold some) and is not; ``trace`` is ``""`` where it names none."""

    trace: str
    reason: str


def holds_spans(record: Mapping[str, Any]) -> bool:
    """Is this one of the containers? Never raises."""
    return _layout(record) != ""


def _layout(record: Mapping[str, Any]) -> str:
    if isinstance(record.get("resourceSpans"), list):
        return "resourceSpans"
    inner = record.get("trace")
    if isinstance(inner, dict) and isinstance(inner.get("resourceSpans"), list):
        return "trace"
    batches, data = record.get("batches"), record.get("data")
    if isinstance(batches, list) and any(isinstance(b, dict) and any(s in b for s in _SCOPES) for b in batches):
        return "batches"
    if isinstance(data, list) and any(isinstance(t, dict) and "traceID" in t and "spans" in t for t in data):
        return "data"
    return ""


def spans_of(record: Mapping[str, Any], at: str) -> Iterator[Span | BadSpan]:
    """Everything in a container; a broken span stands alone, so that other traces of the file can be read.

    Args:
        record: The container.
        at: Names it in reasons.
    """
    layout = _layout(record)
    if layout == "data":
        for index, trace in enumerate(record["data"]):
            yield from _jaeger_trace(trace, f"{at}.data[{index}]")
    elif layout:
        holder = record["trace"] if layout == "trace" else record
        name = "batches" if layout == "batches" else "resourceSpans"
        for index, batch in enumerate(holder[name]):
            yield from _batch(batch, f"{at}.{name}[{index}]")
    else:
        names = ", ".join(sorted(map(str, record))[:5])
        yield BadSpan("", f"{at}: no spans in it (fields: {names}), expected resourceSpans, batches or data")


def _batch(batch: Any, at: str) -> Iterator[Span | BadSpan]:
    try:
        resource = _object(batch, at).get("resource") or {}
        service = attributes_of(_object(resource, f"{at}.resource").get("attributes"), at).get("service.name")
        groups = [(name, batch[name]) for name in _SCOPES if batch.get(name) is not None]
        scopes = [
            (f"{at}.{name}[{i}]", scope)
            for name, group in groups
            for i, scope in enumerate(_list(group, f"{at}.{name}"))
        ]
        found = [
            (f"{place}.spans[{i}]", span)
            for place, scope in scopes
            for i, span in enumerate(_list(_object(scope, place).get("spans") or [], f"{place}.spans"))
        ]
    except RecordError as error:
        yield BadSpan("", str(error))
        return
    for place, span in found:
        yield _guarded(_otlp_span, span, "traceId", place, str(service or ""))


def _jaeger_trace(trace: Any, at: str) -> Iterator[Span | BadSpan]:
    try:
        spans = _list(_object(trace, at).get("spans"), f"{at}.spans")
        processes = _object(trace.get("processes") or {}, f"{at}.processes")
    except RecordError as error:
        yield BadSpan(str(trace.get("traceID") or "") if isinstance(trace, dict) else "", str(error))
        return
    for index, span in enumerate(spans):
        own = processes.get(str(span.get("processID"))) if isinstance(span, dict) else None
        service = own.get("serviceName") if isinstance(own, dict) else None
        yield _guarded(_jaeger_span, span, "traceID", f"{at}.spans[{index}]", str(service or ""))


def _guarded(make: Any, span: Any, trace_key: str, at: str, service: str) -> Span | BadSpan:
    try:
        made: Span = make(_object(span, at), at, service)
        return made
    except RecordError as error:
        trace = span.get(trace_key) if isinstance(span, dict) else ""
        return BadSpan(trace if isinstance(trace, str) else "", str(error))


def _otlp_span(span: Mapping[str, Any], at: str, service: str) -> Span:
    status = span.get("status")
    failed = isinstance(status, dict) and status.get("code") in (2, "2", "STATUS_CODE_ERROR")
    start = _time(span, "startTimeUnixNano", at)
    return Span(
        trace=_name(span, "traceId", at),
        id=_name(span, "spanId", at),
        parent=_parent(span.get("parentSpanId"), f"{at}.parentSpanId"),
        name=str(span.get("name") or ""),
        start=start,
        end=_time(span, "endTimeUnixNano", at) if span.get("endTimeUnixNano") is not None else start,
        attributes=attributes_of(span.get("attributes"), f"{at}.attributes"),
        events=tuple(
            (str(_object(e, f"{at}.events").get("name")), attributes_of(e.get("attributes"), f"{at}.events"))
            for e in _list(span.get("events") or [], f"{at}.events")
        ),
        service=service,
        error=str(status.get("message") or "error") if isinstance(status, dict) and failed else "",
    )


def _jaeger_span(span: Mapping[str, Any], at: str, service: str) -> Span:
    tags = attributes_of(span.get("tags"), f"{at}.tags")
    trace, start = _name(span, "traceID", at), _time(span, "startTime", at) * 1000
    references = [_object(r, f"{at}.references") for r in _list(span.get("references") or [], f"{at}.references")]
    # A reference to another trace is a link, not a parent.
    parents = [r.get("spanID") for r in references if r.get("traceID") in (trace, None)]
    children_of = [r.get("spanID") for r in references if r.get("refType") == "CHILD_OF" and r.get("spanID") in parents]
    logs = [
        attributes_of(_object(log, f"{at}.logs").get("fields"), f"{at}.logs")
        for log in _list(span.get("logs") or [], at)
    ]
    failed = tags.get("error") in (True, "true") or tags.get("otel.status_code") == "ERROR"
    return Span(
        trace=trace,
        id=_name(span, "spanID", at),
        parent=_parent(next(iter(children_of or parents), ""), f"{at}.references"),
        name=str(span.get("operationName") or ""),
        start=start,
        end=start + (_time(span, "duration", at) * 1000 if span.get("duration") is not None else 0),
        attributes=tags,
        events=tuple((str(fields.get("event") or fields.get("name") or ""), fields) for fields in logs),
        service=service,
        error=str(tags.get("otel.status_description") or "error") if failed else "",
    )


def attributes_of(given: Any, at: str) -> dict[str, Any]:
    """A list of keys and values (OTLP's typed ones, Jaeger's plain ones) as an object.

    Raises:
        RecordError: It is none, or a key stands twice with different values.
    """
    if given is None or isinstance(given, dict):
        return dict(given or {})
    found: dict[str, Any] = {}
    for pair in _list(given, at):
        key = _object(pair, at).get("key")
        if not isinstance(key, str):
            raise RecordError(f"{at}: got {key!r} as a key, expected a string")
        value = _value(pair.get("value"))
        if key in found and found[key] != value:
            raise RecordError(f"{at}: {key!r} stands twice with different values")
        found[key] = value
    return found


def _value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for name in _VALUES:
        if name in value:
            # JSON of protobuf writes whole numbers as texts.
            text = value[name]
            return int(text) if name == "intValue" and isinstance(text, str) and _WHOLE.fullmatch(text) else text
    for name in ("arrayValue", "kvlistValue"):
        if name in value:
            held = value[name].get("values") if isinstance(value[name], dict) else None
            if name == "kvlistValue":
                return attributes_of(held, name)
            return [_value(item) for item in _list(held or [], name)]
    return value or None


def _object(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{at}: got {_shown(value)}, expected an object")
    return value


def _list(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list):
        raise RecordError(f"{at}: got {_shown(value)}, expected a list")
    return value


def _name(span: Mapping[str, Any], key: str, at: str) -> str:
    value = span.get(key)
    if not isinstance(value, str) or not value:
        raise RecordError(f"{at}.{key}: got {_shown(value)}, expected a non-empty string")
    return value


def _parent(value: Any, at: str) -> str:
    if value is not None and not isinstance(value, str):
        raise RecordError(f"{at}: got {_shown(value)}, expected a string")
    return "" if not value or not value.strip("0") else value


def _time(span: Mapping[str, Any], key: str, at: str) -> int:
    value = span.get(key)
    try:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        return int(value)
    except ValueError:
        raise RecordError(f"{at}.{key}: got {_shown(value)}, expected a whole number") from None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
