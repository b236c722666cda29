"""ATIF documents: a step holds its own results, results without a call's id, documents inside documents."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.readers.atif import READER
from jaxguard.traces.registry import Context, RecordError
from jaxguard.types import JaxguardError

CONTEXT = Context(Path("jobs/garden.json"), 2)


@pytest.fixture(autouse=True)
def _needs_the_package():
    pytest.importorskip("atif")


def call(name, call_id, **arguments):
    return {"tool_call_id": call_id, "function_name": name, "arguments": arguments}


def document(*steps, **fields):
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, start=1)]
    agent = {"name": "digger", "version": "3", "model_name": "m-1"}
    return {"schema_version": "ATIF-v1.6", "session_id": "s-9", "agent": agent, "steps": numbered} | fields


SYSTEM = {"source": "system", "message": "You tend a garden."}
USER = {"source": "user", "message": "Water the roses."}
LOOK = {
    "source": "agent",
    "message": "First the barrel.",
    "reasoning_content": "Is there water?",
    "tool_calls": [call("look", "a", at="barrel"), call("look", "b", at="roses")],
    "observation": {
        "results": [{"source_call_id": "b", "content": "dry"}, {"source_call_id": "a", "content": "half full"}]
    },
}
POUR = {
    "source": "agent",
    "message": "",
    "tool_calls": [call("pour", "c", litres=2)],
    "observation": {"results": [{"content": "poured"}]},
}
DONE = {"source": "agent", "message": "They are watered."}


def read(record, context=CONTEXT):
    return list(READER.read(record, context))


def test_a_document():
    (made,) = read(document(SYSTEM, USER, LOOK, POUR, DONE))
    assert made.id == "garden:s-9"
    assert made.group == "atif:s-9"
    assert made.instruction == "Water the roses."
    assert [(s.tool, s.arguments, s.call_id) for s in made.steps] == [
        ("look", {"at": "barrel"}, "a"),
        ("look", {"at": "roses"}, "b"),
        ("pour", {"litres": 2}, "c"),
    ]
    assert [s.observation for s in made.steps] == ["", "", "dry\nhalf full"]
    assert [s.parallel for s in made.steps] == [False, True, False]
    assert not any(s.unobserved for s in made.steps)
    assert made.steps[0].thought == "Is there water?\nFirst the barrel."
    assert made.final_observation == "poured"
    assert (made.unsafe, made.first_hazard, made.timing, made.source) == (None, None, False, "atif")
    assert made.metadata == {
        "agent": "digger",
        "agent_version": "3",
        "model": "m-1",
        "session": "s-9",
        "schema_version": "ATIF-v1.6",
        "final_reply": "They are watered.",
    }


def test_a_result_without_an_id_answers_all_calls_of_its_step_that_have_no_other():
    """Terminals show one screen after several commands."""
    shared = LOOK | {"observation": {"results": [{"source_call_id": "a", "content": "one"}, {"content": "screen"}]}}
    (made,) = read(document(USER, shared, POUR))
    assert not any(s.unobserved for s in made.steps)
    assert made.steps[2].observation == "one\nscreen"
    (made,) = read(document(USER, LOOK | {"observation": {"results": [{"content": "screen"}]}}, POUR))
    assert not any(s.unobserved for s in made.steps)
    assert made.steps[2].observation == "screen"


def test_a_call_without_result_is_unobserved_and_a_late_one_finds_it():
    open_call = LOOK | {"observation": None}
    (made,) = read(document(USER, open_call, POUR))
    assert [s.unobserved for s in made.steps] == [True, True, False]
    late = {"source": "system", "message": "", "observation": {"results": [{"source_call_id": "b", "content": "late"}]}}
    (made,) = read(document(USER, open_call, late, POUR))
    assert [s.unobserved for s in made.steps] == [True, False, False]
    assert made.steps[2].observation == "late"


def test_a_result_of_no_call_closes_none():
    feedback = {"source": "agent", "message": "hm", "observation": {"results": [{"content": "one action, please"}]}}
    (made,) = read(document(USER, LOOK | {"observation": None}, feedback, POUR))
    assert [s.unobserved for s in made.steps] == [True, True, False]
    assert made.steps[2].observation == "[assistant] hm\n[system] one action, please"
    assert made.metadata["notes"] == {"results_without_call": 1}
    with pytest.raises(RecordError, match="an agent's steps have results, but none has tool_calls"):
        read(document(USER, feedback))


@pytest.mark.parametrize("number", range(5))
def test_nothing_of_later_is_seen(number):
    record = document(SYSTEM, USER, LOOK, POUR, LOOK | {"tool_calls": [call("look", "d")], "observation": None})
    (before,) = read(record)
    changed = copy.deepcopy(record)
    step = changed["steps"][number]
    step["message"] = "CHANGED"
    for result in (step.get("observation") or {}).get("results", []):
        result["content"] = "CHANGED"
    (after,) = read(changed)
    first_call_of = {2: 0, 3: 2, 4: 3}
    assert [(s.tool, s.arguments, s.observation) for s in after.steps[: first_call_of.get(number, 0) + 1]] == [
        (s.tool, s.arguments, s.observation) for s in before.steps[: first_call_of.get(number, 0) + 1]
    ]


def test_documents_of_sub_agents_are_trajectories():
    inner = document(USER, POUR, trajectory_id="inner")
    sub = document(USER, LOOK, trajectory_id="sub", subagent_trajectories=[inner])
    reference = [{"trajectory_id": "sub"}]
    ask = {
        "source": "agent",
        "message": "",
        "tool_calls": [call("delegate", "x")],
        "observation": {"results": [{"source_call_id": "x", "subagent_trajectory_ref": reference}]},
    }
    made = read(document(USER, ask, POUR, trajectory_id="root", subagent_trajectories=[sub]))
    assert [(t.id, [s.tool for s in t.steps]) for t in made] == [
        ("garden:root", ["delegate", "pour"]),
        ("garden:root/sub", ["look", "look"]),
        ("garden:root/sub/inner", ["pour"]),
    ]
    assert {t.group for t in made} == {"atif:s-9"}
    assert made[0].steps[1].observation == "[subagent_trajectory]"
    assert "notes" not in made[0].metadata
    reference[0] = {"trajectory_path": "elsewhere.json"}
    assert read(document(USER, ask))[0].metadata["notes"] == {"subagents_elsewhere": 1}


def test_a_continued_session():
    copied = POUR | {"is_copied_context": True}
    (made,) = read(document(USER, copied, LOOK, continued_trajectory_ref="garden.cont-2.json"))
    assert [s.tool for s in made.steps] == ["pour", "look", "look"]
    assert made.metadata["notes"] == {"copied_calls": 1}
    assert made.metadata["continued_in"] == "garden.cont-2.json"


def test_parts_of_a_message():
    image = {"type": "image", "source": {"media_type": "image/png", "path": "images/a.png"}}
    shown = POUR | {"observation": {"results": [{"content": [{"type": "text", "text": "see"}, image]}]}}
    (made,) = read(document(USER | {"message": [{"type": "text", "text": "Dig."}]}, shown))
    assert made.instruction == "Dig."
    assert made.final_observation == "see\n[image]"


def test_no_calls():
    (made,) = read(document(USER, DONE, session_id=None))
    assert made.steps == ()
    assert (made.id, made.group) == ("garden:2", "garden:2")
    assert made.metadata["final_reply"] == "They are watered."


@pytest.mark.parametrize(
    ("steps", "fields", "reason"),
    [
        ([USER], {"steps": None}, r"steps: Input should be a valid list, got None"),
        ([USER], {"steps": []}, r"expected a list of messages"),
        ([USER], {"agent": []}, r"agent: .*, got \[\]"),
        ([USER, POUR | {"tool_calls": [call("x", "1") | {"arguments": "{}"}]}], {}, r"steps\[1\].tool_calls\[0\].arg"),
        ([USER, POUR | {"tool_calls": [call("", "1")]}], {}, r"as the function's name"),
        ([USER, POUR | {"actions": [1]}], {}, r"steps\[1\].actions: Extra inputs are not permitted, got \[1\]"),
        ([USER | {"tool_calls": [call("x", "1")]}], {}, r"only valid on `source='agent'` steps"),
        ([USER | {"source": "tool"}], {}, r"steps\[0\].source"),
        ([USER, LOOK | {"observation": {"results": [{"source_call_id": "z"}]}}], {}, r"does not match any tool_call"),
        ([POUR], {}, "expected an instruction"),
        ([USER, USER | {"step_id": 7}], {}, "not sequential"),
    ],
)
def test_malformed(steps, fields, reason):
    with pytest.raises(RecordError, match=reason):
        read(document(*steps, **fields))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "atif", None)
    with pytest.raises(JaxguardError, match=r"atif is not installed; pip install 'jaxguard\[formats\]'"):
        read(document(USER))


# The number of objects that "tool_calls" lists hold: jq '[.steps[].tool_calls // [] | length] | add'.
_CALLS = {
    "2026-02-09__12-15-32__011_boto__boto3__step14__bucket___ke5rTee": 20,
    "2026-02-09__12-22-47__015_ansible__mazer__step31__load__bKPozqs": 26,
    "2026-02-09__12-22-47__077_blosc__bloscpack__step50__pu__CzbUH5h": 18,
    "2026-02-09__12-22-47__294_bogdanvuk__pygears__step87____ktF4zp8": 7,
    "Hermes_70B-t-bench-ext__create-makefile-log__nDFu6Ut": 9,
    "Hermes_70B-t-bench-ext__et-3aa91448__MRugp6r": 42,
    "Hermes_70B-t-bench-ext__et-3e33ee25__tzw2pUW": 37,
    "nova-complex-docker__079_conan-io__conan__step67__log__Sxi5ueY": 13,
    "nova-complex-docker__093_adtzlr__felupe__step71__asse__hdvuH38": 23,
    "terminus2-complex-daytona__079_conan-io__conan__step67__log__St6xeAx": 31,
    "terminus2-complex-daytona__294_bogdanvuk__pygears__step87____f9WTYwR": 29,
    "terminus2-simple-daytona__022_aws-samples__hardeneks__step__KKAXDyE": 11,
    "terminus2-simple-daytona__028_algorand__pyteal__step145__t__7RQ43V3": 12,
    "terminus2-simple-daytona__030_amerkurev__doku__step17__sho__8P2qKZK": 4,
}


@pytest.mark.data
def test_real_documents(data_dir, tmp_path):
    report = convert(data_dir / "formats" / "atif", tmp_path)
    made = {t.id.rsplit(":", 1)[0]: t for t in read_trajectories(tmp_path)}
    assert {name: len(t.steps) for name, t in made.items()} == _CALLS
    assert report.counts["rejected"] == report.counts["unobserved_calls"] == 0
    # The first call comes before anything was shown; every later one of a new step saw a result.
    assert all(t.steps[0].observation == "" and t.instruction for t in made.values())
