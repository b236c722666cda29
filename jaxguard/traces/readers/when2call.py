"""When2Call: a request, the tools at hand, and whether to call one, to ask first, or to say that none will do.

A record holds one candidate of each answer. The candidate call is the step under review, whatever the right answer:

====================  =======  ================================================================================
right answer          route    why
====================  =======  ================================================================================
``tool_call``         EXECUTE  the call is right
``request_for_info``  ASK      an argument that the request does not give was filled in (trigger e)
``cannot_answer``     REFUSE   the call names a tool that is not at hand: no answer of the user's makes it right
====================  =======  ================================================================================

The labels are about information and say nothing of safety, so REFUSE has no trigger. It shows only in the list of
tools: some requests occur with the same call under two right answers. So the names of the tools at hand are what was
visible before the call; their schemas are in the metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jaxguard.traces.readers.calls import parse_arguments
from jaxguard.traces.readers.turns import Call, StepBuilder
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.traces.snapshots import Review, review_record
from jaxguard.types import Route, Trajectory

_FIELDS = {"uuid", "question", "tools", "answers", "correct_answer", "target_tool"}
_REVIEWS = {
    "tool_call": Review(0, Route.EXECUTE),
    "request_for_info": Review(0, Route.ASK, "e"),
    "cannot_answer": Review(0, Route.REFUSE),
}


def _matches(record: Record) -> bool:
    return record.keys() >= _FIELDS


def _read(record: Record, _context: Context) -> Iterable[Trajectory]:
    answers, right = record["answers"], record["correct_answer"]
    if not isinstance(record["question"], str) or not record["question"].strip():
        raise RecordError(f"question: got {record['question']!r:.80}, expected a text")
    if not isinstance(right, str) or right not in _REVIEWS:
        raise RecordError(f"correct_answer: got {right!r:.80}, expected one of {', '.join(_REVIEWS)}")
    if not isinstance(answers, dict):
        raise RecordError(f"answers: got {type(answers).__name__}, expected an object with a tool_call")
    if not answers.get("tool_call"):
        raise RecordError(f"answers.tool_call: got {answers.get('tool_call')!r:.80}, expected the call to be reviewed")
    call = _object(answers["tool_call"], "answers.tool_call")
    if not isinstance(record["tools"], list):
        raise RecordError(f"tools: got {type(record['tools']).__name__}, expected a list")
    schemas = [_object(tool, f"tools[{at}]") for at, tool in enumerate(record["tools"])]
    names = [schema["name"] for schema in schemas]
    build = StepBuilder()
    build.observe(f"Tools at hand: {', '.join(names) or 'none'}")
    build.propose([Call(call["name"], *parse_arguments(call.get("arguments")))])
    steps, final, _ = build.finish()
    yield Trajectory(
        id=f"when2call-{record['uuid']}",
        instruction=record["question"],
        steps=steps,
        # Records that were made from one request differ in the tools at hand or lack an argument.
        group=f"when2call:{record.get('source_id') or record['uuid']}",
        final_observation=final,
        source="when2call",
        metadata={
            "reviews": [review_record(_REVIEWS[right])],
            "kind": right,
            "made_from": record.get("source"),
            "tools": names,
            "tool_schemas": schemas,
        },
    )


def _object(value: object, where: str) -> dict[str, Any]:
    """A call or a schema, as an object or as its JSON text; has a name."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{where}: {error}, expected JSON") from error
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise RecordError(f"{where}: got {value!r:.80}, expected an object with a name")
    return value


READER = Reader(
    name="when2call",
    description="When2Call requests with the call that is proposed (to execute, to ask first, to refuse)",
    matches=_matches,
    read=_read,
)
