"""Logs of Inspect AI: a ``.json`` log holds all samples of an evaluation, a ``.eval`` archive a file for each.

``split`` takes a JSON log apart, :mod:`jaxguard.traces.eval_archive` an archive; both give records of one sample with a
few facts of its log, so that a broken sample costs no other. Each is read through the package ``inspect-ai``, which
knows the layouts of older logs and puts back what stands in ``attachments``.

The messages of a sample are those that its agent had at the end. Where the events tell of calls that are not among them
(of sub-agents, or from before a history was cut), the trajectories are made of the events:
:mod:`jaxguard.traces.readers.inspect_events`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.registry import CannotRead, Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

if TYPE_CHECKING:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessage
    from inspect_ai.tool import ToolCall

SAMPLE, LOG = "inspect_sample", "inspect_log"
_VERSIONS = (1, 2)
_FACTS = ("task", "model", "run_id", "eval_id", "created")
_MAX_METADATA_CHARS = 500
_ATTACHMENT = "attachment://"
_UNPARSED = re.compile(r"Error parsing the following tool call arguments:\n\n(.*)\n\nError details: .*", re.DOTALL)


def sample_record(sample: object, log: Mapping[str, Any]) -> Record:
    """A sample as a record of its own, with what is kept of its log's header."""
    evaluation = log.get("eval")
    facts = {name: evaluation.get(name) for name in _FACTS} if isinstance(evaluation, Mapping) else {}
    return {SAMPLE: sample, LOG: {**facts, "version": log.get("version"), "status": log.get("status")}}


def _matches_log(record: Record) -> bool:
    evaluation = record.get("eval")
    return isinstance(evaluation, Mapping) and {"task", "model", "config"} <= evaluation.keys() and "status" in record


def _matches_sample(record: Record) -> bool:
    return isinstance(record.get(LOG), Mapping) and SAMPLE in record


def _split(records: Sequence[Record]) -> Iterator[Record]:
    for record in records:
        samples = record.get("samples")
        if not _matches_log(record):
            yield record
        elif not isinstance(samples, list) or not samples:
            yield sample_record(None, record)
        else:
            yield from (sample_record(sample, record) for sample in samples)


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    if not _matches_sample(record):
        raise RecordError(
            f"no Inspect log: got the fields {', '.join(sorted(record))[:100]}, expected eval and samples"
        )
    log = record[LOG]
    if log.get("version") not in (None, *_VERSIONS):
        raise RecordError(f"version: got {log['version']!r:.20}, expected one of {_VERSIONS}")
    if record[SAMPLE] is None:
        raise RecordError(f"the log holds no samples (its status is {log.get('status')!r:.20})")
    sample = _validated(record[SAMPLE])
    stem = context.stem
    name = f"{stem}:{sample.id}:{sample.epoch}"
    metadata = _metadata(sample, log)
    for suffix, messages, where in _conversations(sample):
        conversation = read_conversation(_with_instruction(messages, sample), where)
        lost = sum(_ATTACHMENT in step.observation for step in conversation.steps if not step.parallel)
        notes = {"missing_attachments": lost} if lost else {}
        # Other epochs, models and runs of the same sample.
        group = f"inspect:{log.get('task')}:{sample.id}"
        yield conversation.trajectory(metadata, notes, id=name + suffix, group=group, source="inspect_ai")


def _validated(raw: object) -> EvalSample:
    try:
        from inspect_ai.log import EvalSample, resolve_sample_attachments
        from pydantic import ValidationError
    except ImportError as error:
        raise CannotRead(f"inspect_ai: {error.name} is not installed; pip install 'jaxguard[formats]'") from error
    try:
        # A copy, because older layouts are changed in place.
        sample = EvalSample.model_validate(dict(raw) if isinstance(raw, Mapping) else raw)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_context=False)
        place = ".".join(str(part) for part in first["loc"]) or "sample"
        more = f" (and {len(others)} more)" if others else ""
        raise RecordError(f"not a sample: {place}: {first['msg']}, got {first['input']!r:.60}{more}") from error
    return resolve_sample_attachments(sample, "core")


def _conversations(sample: EvalSample) -> Iterator[tuple[str, list[dict[str, Any]], str]]:
    """A suffix for the id, chat messages and their place: of all trajectories of a sample."""
    from jaxguard.traces.readers.inspect_events import conversations, told_elsewhere

    if told_elsewhere(sample):
        made: list[list[ChatMessage]] = conversations(sample.events, sample)
        where = "the events' messages"
    else:
        if not sample.messages:
            ended = f", it ended with {sample.error.message!r:.100}" if sample.error else ""
            raise RecordError(f"the sample has no messages{ended}")
        made, where = [sample.messages], "messages"
    for number, messages in enumerate(made):
        yield f"/{number}" if number else "", [part for one in messages for part in _chat(one)], where
    for attempt, retried in enumerate(sample.error_retries or [], start=1):
        for number, messages in enumerate(conversations(retried.events or [], None)):
            yield f"/retry{attempt}.{number}", [part for one in messages for part in _chat(one)], "error_retries"


def _with_instruction(messages: list[dict[str, Any]], sample: EvalSample) -> list[dict[str, Any]]:
    """Some agents keep their history without the sample's input."""
    if any(message["role"] in ("user", "system") for message in messages):
        return messages
    given = sample.input
    texts = [given] if isinstance(given, str) else [message.text for message in given if message.role == "user"]
    return [*({"role": "user", "content": text} for text in texts), *messages]


def _chat(message: ChatMessage) -> Iterator[dict[str, Any]]:
    if message.role == "assistant":
        parts: list[dict[str, Any]] = []
        for part in message.content_list:
            if part.type != "tool_use":
                parts.append(_part(part))
                continue
            # A tool of the model's provider: its result came before the message went on.
            call = {"id": part.id, "function": {"name": part.name, "arguments": part.arguments}}
            yield {"role": "assistant", "content": parts, "tool_calls": [call]}
            yield {"role": "tool", "tool_call_id": part.id, "content": part.result, "error": part.error}
            parts = []
        calls = [
            {"id": call.id, "function": {"name": call.function, "arguments": _arguments(call)}}
            for call in message.tool_calls or []
        ]
        yield {"role": "assistant", "content": parts, "tool_calls": calls}
    elif message.role == "tool":
        error = message.error.message if message.error else None
        yield {
            "role": "tool",
            "tool_call_id": message.tool_call_id,
            "name": message.function,
            "content": [_part(part) for part in message.content_list],
            "error": error if error and error not in message.text else None,
        }
    else:
        yield {"role": message.role, "content": [_part(part) for part in message.content_list]}


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """What could not be parsed stands in the error alone, with words that came only after the call."""
    if not call.parse_error:
        return call.arguments
    found = _UNPARSED.fullmatch(call.parse_error)
    return found[1] if found else call.parse_error


def _part(part: Any) -> dict[str, Any]:
    if part.type == "reasoning":
        return {"type": "thinking", "thinking": (part.summary or "") if part.redacted else part.reasoning}
    return {"type": "text", "text": part.text} if part.type == "text" else {"type": part.type}


def _metadata(sample: EvalSample, log: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"domain": log.get("task"), "sample": sample.id, "epoch": sample.epoch}
    facts |= {name: log.get(name) for name in ("model", "run_id", "eval_id")}
    facts |= {"error": sample.error.message if sample.error else None, "limit": sample.limit and sample.limit.type}
    metadata = {
        key: value
        for key, value in facts.items()
        if isinstance(value, str | int) and value != "" and len(str(value)) <= _MAX_METADATA_CHARS
    }
    scores = {name: score.value for name, score in (sample.scores or {}).items()}
    short = {
        key: value for key, value in scores.items() if isinstance(value, str | int | float) and len(str(value)) <= 50
    }
    return metadata | ({"scores": short} if short else {})


READERS = (
    Reader(
        name="inspect_ai",
        description="Inspect AI logs, .json (all samples of an evaluation in one file)",
        matches=_matches_log,
        read=_read,
        split=_split,
    ),
    Reader(
        name="inspect_sample",
        description="Inspect AI logs, .eval (an archive with a file for each sample)",
        matches=_matches_sample,
        read=_read,
    ),
)
