"""Traces of OpenTelemetry's GenAI conventions and of OpenInference to trajectories, one per conversation.

Every span of a model's call holds the conversation so far and the answer, so one call of a tool stands in an answer, in
all later inputs, in outer spans (an agent's, a library's around the client's) and in the tool's own span. It becomes
one step:

- Of nested model spans the innermost with an answer is read; a tool's or an agent's span between them ends the nesting
  (a call inside it is another one). What outer spans hold is compared: a call that is nowhere else is a reject.
- Spans are read by start. An input continues a conversation of the file when it holds an answer of it and the same
  first words of the user, or, below the same agent, the same words of system and user; else it opens a new one.
  So a trace with several agents gives several trajectories, and a chat of one trace a turn gives one.
- Of an input, what the conversation does not hold yet is added at the span's start; the answer after it.
- A tool's span is matched to a proposed call by id, by tool and arguments, or by tool, and answers it where no later
  input does. One that nobody proposed is a call of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.readers.span_threads import Thread, Threads
from jaxguard.traces.readers.spans import Span, holds_spans, spans_of
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory


def _split(records: Sequence[Record]) -> Iterable[Record]:
    traces: dict[str, list[Span]] = {}
    broken: dict[str, str] = {}
    parts: list[Record] = []
    for index, record in enumerate(records):
        for item in spans_of(record, f"record {index}"):
            if isinstance(item, Span):
                traces.setdefault(item.trace, []).append(item)
            elif item.trace:
                broken.setdefault(item.trace, item.reason)
            else:
                parts.append({"reject": item.reason})
    threads = Threads()
    for trace, spans in sorted(traces.items(), key=lambda item: min(span.start for span in item[1])):
        if trace not in broken:
            try:
                threads.read(trace, spans)
            except (RecordError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
                broken[trace] = str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"
    parts += [{"reject": f"trace {trace}: {reason}"} for trace, reason in broken.items()]
    names: set[str] = set()
    for thread in threads.all:
        name = thread.trace if thread.trace not in names else f"{thread.trace}:{thread.first_span}"
        names.add(thread.trace)
        parts.append({"id": name, "conversation": thread})
    return parts


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    if "reject" in record:
        raise RecordError(record["reject"])
    thread = record.get("conversation")
    if not isinstance(thread, Thread):
        raise RecordError("got a container of spans, expected one conversation of it")
    conversation = read_conversation(thread.messages(), f"trace {record['id']}: messages")
    metadata: dict[str, Any] = dict(thread.metadata)
    yield conversation.trajectory(metadata, thread.notes, id=record["id"], source=READER.name)


READER = Reader(
    name="otel_genai",
    description="OpenTelemetry GenAI and OpenInference spans: OTLP JSON, exports of Tempo and Jaeger",
    matches=holds_spans,
    read=_read,
    split=_split,
)
