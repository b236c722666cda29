"""LangSmith runs: batches, flat lists and trees are the same traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxguard.traces.readers.langsmith import READER
from jaxguard.traces.reading import Companions, read_file
from jaxguard.traces.registry import detect

TASK = {"role": "user", "content": "Water the plants."}


def run(kind, own, start, end, inputs, outputs, parent=None, **more):
    order = f"20260301T1000{start:02d}000000Z{own}"
    return {
        "id": own, "trace_id": "root", "run_type": kind, "name": own, "parent_run_id": parent,
        "dotted_order": f"20260301T100000000000Zroot.{order}" if parent else order,
        "start_time": f"2026-03-01T10:00:{start:02d}.000000", "end_time": f"2026-03-01T10:00:{end:02d}+00:00",
        "inputs": inputs, "outputs": outputs, **more,
    }  # fmt: skip


def ai(text, *calls):
    """LangChain's serialised message."""
    made = [{"name": tool, "args": arguments, "id": own, "type": "tool_call"} for own, tool, arguments in calls]
    raw = [{"id": own, "function": {"name": tool, "arguments": json.dumps(given)}} for own, tool, given in calls]
    kwargs = {"content": text, "tool_calls": made, "additional_kwargs": {"tool_calls": raw}}
    return {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "AIMessage"], "kwargs": kwargs}


def message(kind, text, **more):
    return {
        "lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", kind],
        "kwargs": {"content": text, **more},
    }  # fmt: skip


def generations(said):
    return {"generations": [[{"text": "", "message": said}]], "llm_output": None}


LOOK = ai("", ("c1", "look", {"room": "hall"}))
POUR = ai("", ("c2", "pour", {"pot": 1}), ("c3", "pour", {"pot": 2}))
HUMAN = message("HumanMessage", "Water the plants.")
DRY = message("ToolMessage", "two dry pots", tool_call_id="c1")


def usual():
    return [
        run("chain", "root", 0, 30, {"messages": [TASK]}, {"messages": [HUMAN, LOOK, DRY, POUR]},
            session_name="garden", extra={"metadata": {"thread_id": "th", "ls_model_name": "m"}}),
        run("llm", "m1", 1, 3, {"messages": [[HUMAN]]}, generations(LOOK), "root"),
        run("tool", "look", 4, 5, {"input": "{'room': 'hall'}"}, {"output": DRY}, "root"),
        run("llm", "m2", 6, 7, {"messages": [[HUMAN, LOOK, DRY]]}, generations(POUR), "root"),
        run("tool", "pour", 8, 12, {"input": "{'pot': 1}"}, {"output": "poured"}, "root"),
        {**run("tool", "t2", 8, 9, {"input": "{'pot': 2}"}, None, "root", error="no water"), "name": "pour"},
    ]  # fmt: skip


STEPS = [
    ("look", {"room": "hall"}, "c1", "", False, False),
    ("pour", {"pot": 1}, "c2", "two dry pots", False, False),
    ("pour", {"pot": 2}, "c3", "two dry pots", True, False),
]


def read(tmp_path: Path, *records):
    file = tmp_path / "runs.jsonl"
    file.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return list(read_file(file, Companions(tmp_path)))


def one(tmp_path, *records):
    (outcome,) = read(tmp_path, *records)
    assert outcome.reason == ""
    (made,) = outcome.trajectories
    return made


def seen(made):
    return [(s.tool, s.arguments, s.call_id, s.observation, s.parallel, s.unobserved) for s in made.steps]


def as_patches():
    """Each run sent at its start, without its outputs, and patched at its end."""
    posts = [{**one, "outputs": None, "end_time": None} for one in usual()]
    patches = [{name: one[name] for name in ("dotted_order", "trace_id", "outputs", "end_time")} for one in usual()]
    patches[5]["error"] = "no water"
    return posts, patches


def tree():
    root, *inner = usual()
    inner = [{name: value for name, value in run.items() if name != "parent_run_id"} for run in inner]
    return {**root, "child_runs": inner}


def test_a_usual_trace(tmp_path):
    made = one(tmp_path, {"runs": usual()})
    assert seen(made) == STEPS
    assert made.final_observation == "no water\npoured"
    assert (made.id, made.group, made.source, made.unsafe) == ("root", "th", "langsmith", None)
    assert made.instruction == "Water the plants."
    assert made.metadata == {"name": "root", "project": "garden", "model": "m", "session_id": "th"}


def test_all_layouts_are_the_same(tmp_path):
    posts, patches = as_patches()
    whole = one(tmp_path, {"runs": usual()})
    for records in (
        usual(),
        usual()[::-1],
        [tree()],
        [{"post": posts, "patch": patches}],
        [{"post": posts[:3], "patch": []}, {"post": posts[3:], "patch": patches[:1]}, {"patch": patches[1:]}],
        [{"runs": [{**run, "trace_id": None, "dotted_order": None} for run in usual()]}],
    ):
        assert one(tmp_path, *records) == whole


def test_several_traces_in_a_file(tmp_path):
    other = [
        {**run, "id": f"{run['id']}2", "trace_id": "root2", "parent_run_id": run["parent_run_id"] and "root2"}
        for run in usual()
    ]
    mixed = [run for pair in zip(usual(), other, strict=True) for run in pair]
    outcomes = read(tmp_path, *mixed)
    assert [outcome.trajectories[0].id for outcome in outcomes] == ["root", "root2"]
    assert seen(outcomes[0].trajectories[0]) == seen(outcomes[1].trajectories[0]) == STEPS


def test_nothing_later_shows(tmp_path):
    changed = usual()
    for place in (4, 5):
        changed[place]["outputs"] = {"output": "something else"}
    changed[0]["outputs"] = {"messages": [HUMAN, LOOK, DRY, POUR, message("AIMessage", "Not done.")]}
    assert one(tmp_path, *changed).steps == one(tmp_path, *usual()).steps
    changed[2]["outputs"] = {"output": "nothing"}
    changed[3]["inputs"] = {"messages": [[HUMAN, LOOK]]}
    made = one(tmp_path, *changed)
    assert made.steps[0] == one(tmp_path, *usual()).steps[0]
    assert made.steps[1].observation == "nothing"


def test_openai_runs_and_a_missing_result(tmp_path):
    call = {"id": "x", "type": "function", "function": {"name": "look", "arguments": ""}}
    answer = {"choices": [{"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [call]}}]}
    made = one(tmp_path, run("llm", "root", 0, 1, {"model": "m", "messages": [TASK]}, answer))
    assert seen(made) == [("look", {}, "x", "", False, True)]


def test_a_tool_run_for_langchains_call(tmp_path):
    call = {"name": "look", "args": {"room": "attic"}, "id": "zz", "type": "tool_call"}
    runs = [
        run("chain", "root", 0, 9, {"input": "Look."}, {"output": "Nothing there."}),
        run("tool", "look", 1, 2, {"input": call}, {"output": "dust"}, "root"),
    ]
    made = one(tmp_path, *runs)
    assert (made.instruction, made.final_observation) == ("Look.", "dust")
    assert seen(made) == [("look", {"room": "attic"}, "zz", "", False, False)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"runs": [run("llm", "root", 0, 1, {}, None)]}, "none of the 1 spans holds what went in or came out"),
        ({"runs": [{**run("llm", "", 0, 1, {}, None), "dotted_order": 3}]}, "expected an id"),
        ({"runs": [{**run("llm", "a", 0, 1, "x", None), "start_time": []}]}, "start_time: got []"),
        ({"runs": [run("llm", "a", 0, 1, "x", "y", "b"), run("llm", "b", 0, 1, "x", "y", "a")]}, "form a circle"),
        ({"runs": [run("chain", "root", 0, 1, {"url": "/"}, {"status": 200})]}, "none of the 1 spans is a model call"),
    ],
)
def test_what_cannot_be_read_has_a_reason(tmp_path, record, reason):
    (outcome,) = read(tmp_path, record)
    assert reason in outcome.reason
    # It costs no other trace of the file.
    outcomes = read(tmp_path, {"runs": [{**one, "trace_id": "good", "id": f"g{one['id']}", "parent_run_id": None}
                                        for one in usual()]}, record)  # fmt: skip
    assert sum(bool(outcome.trajectories) for outcome in outcomes) == 1
    assert any(reason in outcome.reason for outcome in outcomes)


def test_a_run_that_is_none_is_rejected_by_itself(tmp_path):
    outcomes = read(tmp_path, {"runs": [*usual(), "text", None]})
    assert [bool(outcome.reason) for outcome in outcomes] == [True, True, False]


def test_no_matcher_raises():
    for record in (
        {"post": 3},
        {"post": [3]},
        {"runs": []},
        {"runs": [[]]},
        {"run_type": 3, "trace_id": 1},
        {"patch": [{}]},
    ):
        assert not READER.matches(record)
    assert detect(usual()[0]) is READER


# The first two hold one model call without tools (no "tool_calls" in them); the third leaves out what went in and out.
COUNTS = {
    "js_wrap_openai_default.json": 0,
    "py_wrap_openai_stream.json": 0,
    "sample_runs_flat.json": "none of the 4 spans holds what went in or came out, expected both to be exported",
}


@pytest.mark.data
def test_real_exports(data_dir):
    folder = data_dir / "formats" / "langsmith"
    found = {}
    for file in sorted(folder.iterdir()):
        (outcome,) = read_file(file, Companions(folder))
        found[file.name] = outcome.reason or len(outcome.trajectories[0].steps)
    assert found == COUNTS
