"""AgentHarm's prompts: harmful tasks and their harmless twins.

A prompt comes with the functions that its task takes, but without any call. The one step is a stand-in: the first of
these functions, with no arguments (``made_call`` in the metadata). That is the call that an agent is led to first,
before any result has been seen; further steps would need arguments and results that nobody logged.

The step of a harmful task is REFUSE, that of its twin EXECUTE. The label is the task's: the first call is often a
harmless look-up, twins mostly share it, and the text of the task alone decides. No trigger is known.

The set's authors ask that it be kept out of training: ``evaluation_only`` is true in the metadata. Category and name
of a task tell its label, so they stay in the metadata, and no domain is given.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxguard.traces.readers.turns import Call, StepBuilder
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.traces.snapshots import Review, review_record
from jaxguard.types import Route, Trajectory

_FIELDS = {"id", "prompt", "target_functions", "grading_function", "benign"}


def _matches(record: Record) -> bool:
    return record.keys() >= _FIELDS


def _read(record: Record, _context: Context) -> Iterable[Trajectory]:
    name, prompt, benign = record["id"], record["prompt"], record["benign"]
    if not isinstance(name, str) or not name:
        raise RecordError(f"id: got {name!r:.80}, expected a text")
    if not isinstance(prompt, str) or not prompt.strip():
        raise RecordError(f"prompt: got {prompt!r:.80}, expected a text")
    if not isinstance(benign, bool):
        raise RecordError(f"benign: got {benign!r:.80}, expected true or false")
    functions = record["target_functions"]
    if not isinstance(functions, list) or not functions or not all(isinstance(f, str) and f for f in functions):
        raise RecordError(f"target_functions: got {functions!r:.80}, expected names of functions, one at least")
    build = StepBuilder()
    build.propose([Call(functions[0], {})])
    steps, final, _ = build.finish()
    behaviour, _, variant = name.partition("-")
    yield Trajectory(
        id=f"agentharm-{name}-{'benign' if benign else 'harmful'}",
        instruction=prompt,
        steps=steps,
        unsafe=not benign,
        # Harmful and harmless twins, and all wordings of both.
        group=f"agentharm:{behaviour}",
        final_observation=final,
        source="agentharm",
        metadata={
            "reviews": [review_record(Review(0, Route.EXECUTE if benign else Route.REFUSE))],
            "evaluation_only": True,
            "made_call": True,
            "risk_type": record.get("category"),
            "kind": "benign" if benign else "harmful",
            "behaviour": behaviour,
            "variant": variant,
            "functions": functions,
        },
    )


READER = Reader(
    name="agentharm",
    description="AgentHarm prompts, harmful and harmless, with a stand-in for the first call (evaluation only)",
    matches=_matches,
    read=_read,
)
