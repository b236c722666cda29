"""LangSmith's runs: batches as they are sent (``post`` and ``patch``), lists of runs, and trees of ``child_runs``.

A file may hold them in any of these shapes, a run or a batch a line; the runs of one trace, wherever they stand in the
file, are one trajectory. A run that stands several times (sent, then patched) is one, and later fields count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxguard.traces.readers.message_dialects import unwrap
from jaxguard.traces.readers.span_tree import Span, seconds, trajectory_of
from jaxguard.traces.registry import Context, Reader, Record, RecordError
from jaxguard.types import Trajectory

_BATCHES = ("post", "patch", "runs")
_MARKS = ("dotted_order", "trace_id", "parent_run_id", "child_runs", "session_name")
_MODELS = ("llm", "chat_model")


def _is_run(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("run_type"), str) and any(name in value for name in _MARKS)


def _matches(record: Record) -> bool:
    for name in _BATCHES:
        runs = record.get(name)
        if isinstance(runs, list) and runs:
            # A patch may leave out what does not change.
            first = runs[0]
            return _is_run(first) or (name == "patch" and isinstance(first, dict) and "dotted_order" in first)
    return _is_run(record)


def _split(records: Sequence[Record]) -> Iterable[Record]:
    """All runs of a file by trace, those of a trace merged by id."""
    runs: dict[str, dict[str, Any]] = {}
    for raw in _all_runs(records):
        own = _own_id(raw)
        if not own:
            yield {"runs": [raw]}  # rejected when it is read
            continue
        # A later text for a run tells its end; what it leaves out stands. What went in stands as well: a list that the
        # run went on with would show it what came after.
        before = runs.get(own, {})
        changed = {
            name: value
            for name, value in raw.items()
            if name not in before or (value not in (None, {}, []) and not (name == "inputs" and before[name]))
        }
        runs[own] = {**runs.get(own, {}), **changed, "id": own}
    traces: dict[str, list[dict[str, Any]]] = {}
    for trace, run in zip(_traces(runs), runs.values(), strict=True):
        traces.setdefault(trace, []).append(run)
    yield from ({"trace": trace, "runs": members} for trace, members in traces.items())


def _all_runs(records: Sequence[Record]) -> Iterator[Any]:
    """The runs of batches and trees, parents before their children."""
    for record in records:
        batches = [record[name] for name in _BATCHES if isinstance(record.get(name), list)]
        waiting: list[tuple[Any, str]] = (
            [(run, "") for batch in batches for run in batch] if batches else [(record, "")]
        )
        waiting.reverse()
        while waiting:
            run, parent = waiting.pop()
            if not isinstance(run, dict):
                yield run
                continue
            children = run.get("child_runs")
            kept = {name: value for name, value in run.items() if name != "child_runs"}
            if parent and not kept.get("parent_run_id"):
                kept["parent_run_id"] = parent
            yield kept
            if isinstance(children, list):
                waiting += [(child, _own_id(kept)) for child in reversed(children)]


def _own_id(run: Any) -> str:
    """A run's id; a patch may tell it only in its place within the trace (``<time>Z<id>.<time>Z<id>``)."""
    if not isinstance(run, dict):
        return ""
    own, order = run.get("id"), run.get("dotted_order")
    if isinstance(own, str) and own:
        return own
    return order.rpartition(".")[2].partition("Z")[2] if isinstance(order, str) else ""


def _traces(runs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Each run's trace: as it says itself, or that of the run it goes back to."""
    known: dict[str, str] = {}
    for own in runs:
        path: dict[str, None] = {}
        node = own
        while node not in known and node not in path:
            path[node] = None
            run = runs[node]
            trace, parent = run.get("trace_id"), run.get("parent_run_id")
            if isinstance(trace, str) and trace:
                known[node] = trace
            elif isinstance(parent, str) and parent in runs:
                node = parent
            else:
                known[node] = node
        trace = known.get(node, node)  # in a circle, which reading rejects, any of its runs will do
        known.update(dict.fromkeys(path, trace))
        yield trace


def _read(record: Record, context: Context) -> Iterable[Trajectory]:
    runs = record.get("runs")
    if not isinstance(runs, list) or not runs:
        raise RecordError(f"runs: got {runs!r:.60}, expected a list of runs")
    for number, run in enumerate(runs):
        if not _own_id(run):
            raise RecordError(
                f"runs[{number}].id: got {run if not isinstance(run, dict) else run.get('id')!r:.60}, expected an id"
            )
    ordered = sorted(runs, key=lambda run: str(run.get("dotted_order") or ""))
    spans = [_span(run, f"run {run['id']!r}") for run in ordered]
    trace = record.get("trace")
    notes = [_notes(run) for run in ordered]
    thread = next((note[name] for note in notes for name in ("thread_id", "session_id") if note.get(name)), "")
    metadata = {
        "name": next((run.get("name") for run in ordered if not run.get("parent_run_id")), None),
        "project": next((run.get("session_name") for run in ordered if run.get("session_name")), None),
        "model": next((note["ls_model_name"] for note in notes if note.get("ls_model_name")), None),
        "session_id": thread,
    }
    own = trace if isinstance(trace, str) else ordered[0]["id"]
    yield trajectory_of(spans, own, "langsmith", thread if isinstance(thread, str) else "", metadata)


def _notes(run: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = run.get("extra")
    metadata = extra.get("metadata") if isinstance(extra, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _span(run: Mapping[str, Any], at: str) -> Span:
    kind, name, parent, end = (run.get(field) for field in ("run_type", "name", "parent_run_id", "end_time"))
    if not isinstance(kind, str) or not kind:
        raise RecordError(f"{at}, run_type: got {kind!r:.60}, expected a string")
    inputs, outputs, error = run.get("inputs"), run.get("outputs"), run.get("error")
    return Span(
        at=at,
        id=run["id"],
        parent=parent if isinstance(parent, str) else "",
        kind="llm" if kind in _MODELS else "tool" if kind == "tool" else "other",
        name=name if isinstance(name, str) else "",
        start=seconds(run.get("start_time"), f"{at}, start_time"),
        end=None if end is None else seconds(end, f"{at}, end_time"),
        inputs=inputs,
        outputs=None if outputs == {} else outputs,
        call_id=_call_id(inputs, outputs),
        error=error if isinstance(error, str) else "",
    )


def _call_id(inputs: Any, outputs: Any) -> str:
    """The id of the call that a tool ran for, from LangChain's call that went in, or its message that came out."""
    output = _inner(outputs, "output")
    message = output.get("kwargs")
    call_id = (message if isinstance(message, dict) else output).get("tool_call_id")
    if isinstance(call_id, str):
        return call_id
    given = _inner(inputs, "input")
    call_id = given.get("id") if given.get("type") == "tool_call" else None
    return call_id if isinstance(call_id, str) else ""


def _inner(payload: Any, name: str) -> Mapping[str, Any]:
    inner = unwrap(payload.get(name, payload)) if isinstance(payload, dict) else None
    return inner if isinstance(inner, dict) else {}


READER = Reader(
    name="langsmith",
    description="LangSmith runs: post/patch batches, lists of runs, trees of child_runs",
    matches=_matches,
    read=_read,
    split=_split,
)
