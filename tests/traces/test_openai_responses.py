"""Responses: kinds of items, conversations over several responses, what stands twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import Companions, Outcome, read_file
from jaxguard.types import Trajectory

Item = dict[str, Any]


def call(call_id: str, name: str = "look", **arguments: Any) -> Item:
    own = {"id": f"fc_{call_id}", "call_id": call_id, "name": name, "arguments": json.dumps(arguments)}
    return {"type": "function_call", **own, "status": "completed"}


def result(call_id: str, output: object = "ok") -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def says(text: str, role: str = "assistant") -> Item:
    part = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": part, "text": text}]}


def thinks(text: str) -> Item:
    return {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": text}]}


def response(own: str, *output: Item, **fields: Any) -> Item:
    return {"id": own, "object": "response", "model": "m-1", "output": list(output), **fields}


def pair(given: object, answer: Item, **fields: Any) -> Item:
    return {"request": {"input": given, **fields}, "response": answer}


def outcomes(tmp_path: Path, records: object) -> list[Outcome]:
    (tmp_path / "log.json").write_text(json.dumps(records))
    return list(read_file(tmp_path / "log.json", Companions(tmp_path)))


def read(tmp_path: Path, *records: Item) -> list[Trajectory]:
    made = outcomes(tmp_path, list(records))
    assert [outcome.reason for outcome in made if outcome.reason] == []
    return [trajectory for outcome in made for trajectory in outcome.trajectories]


def test_a_conversation_that_is_kept_by_the_server(tmp_path: Path) -> None:
    first = pair("Feed the hens.", response("r1", thinks("hm"), says("I look."), call("a"), call("b", n=1)))
    then = pair([result("a", "3 hens"), result("b", "corn")], response("r2", call("c")), previous_response_id="r1")
    last = response("r3", says("Fed."), input=[result("c")], previous_response_id="r2")
    (made,) = read(tmp_path, first, then, last)
    assert (made.id, made.instruction, made.source) == ("r1", "Feed the hens.", "openai_responses")
    assert [(s.call_id, s.arguments, s.observation, s.parallel) for s in made.steps] == [
        ("a", {}, "", False),
        ("b", {"n": 1}, "", True),
        ("c", {}, "3 hens\ncorn", False),
    ]
    assert made.steps[0].thought == "hm\nI look."
    assert made.metadata == {"model": "m-1", "final_reply": "Fed."}
    first["request"]["input"], last["input"] = "Feed the hens.", [result("c", "another")]
    (changed,) = read(tmp_path, first, then, last)
    assert changed.steps == made.steps
    then["request"]["input"][1]["output"] = "another"
    assert read(tmp_path, first, then, last)[0].steps[:2] == made.steps[:2]


def test_histories_that_are_sent_again_do_not_double(tmp_path: Path) -> None:
    history: list[Item] = [says("Feed the hens.", "user")]
    records = []
    for own, items in (("r1", [thinks("hm"), call("a")]), ("r2", [call("b")]), ("r3", [says("Fed.")])):
        records.append(pair(list(history), response(own, *items)))
        history += [*(item for item in items if item["type"] != "reasoning")]
        history += [result(item["call_id"], own) for item in items if item["type"] == "function_call"]
    (made,) = read(tmp_path, *records)
    assert [(s.call_id, s.observation, s.unobserved) for s in made.steps] == [("a", "", False), ("b", "r1", False)]
    assert made.metadata["final_reply"] == "Fed."
    del records[2]["request"]["input"][0]  # shortened
    (shortened,) = read(tmp_path, *records)
    assert shortened.steps == made.steps


def test_going_back_in_a_conversation_is_a_trajectory_of_its_own(tmp_path: Path) -> None:
    first = pair("Feed the hens.", response("r1", call("a")))
    one = pair([result("a", "x")], response("r2", call("b")), previous_response_id="r1")
    other = pair([result("a", "x")], response("r3", call("c")), previous_response_id="r1")
    made = read(tmp_path, first, one, other)
    assert [(t.id, [s.call_id for s in t.steps]) for t in made] == [("r1", ["a", "b"]), ("r3", ["c"])]
    assert made[1].instruction == "Feed the hens."
    again = [pair("Feed the hens.", response(own, call(own))) for own in ("q1", "q2")]
    assert [len(t) for t in read(tmp_path, *again)] == [1, 1]


def test_a_response_that_is_told_twice(tmp_path: Path) -> None:
    whole = response("r1", says("I look."), call("a"), input="Feed.", status="completed")
    begun = {"type": "response.created", "response": response("r1", input="Feed.", status="in_progress")}
    (made,) = read(tmp_path, begun, {"type": "response.completed", "response": whole}, whole)
    assert [s.call_id for s in made.steps] == ["a"]
    event = {"type": "response.output_item.done", "item": call("a")}
    assert [len(t) for t in read(tmp_path, begun, {"type": "x", "response": whole}, event)] == [1]
    made_apart = outcomes(tmp_path, [begun, whole, {"type": "response.output_item.done", "item": call("z")}])
    assert [bool(o.reason) for o in made_apart] == [False, True]


def test_tools_that_the_server_runs(tmp_path: Path) -> None:
    mcp = {"type": "mcp_call", "id": "m1", "name": "roll", "arguments": '{"n": 2}', "output": "7", "server_label": "d"}
    files = {"type": "file_search_call", "id": "f1", "queries": ["hens"], "results": [{"text": "3 hens"}]}
    code = {"type": "code_interpreter_call", "id": "c1", "code": "1+1", "outputs": [{"type": "logs", "logs": "2"}]}
    web = {"type": "web_search_call", "id": "w1", "action": {"type": "search", "query": "corn"}}
    click = {"type": "computer_call", "id": "k", "call_id": "k1", "action": {"type": "click", "x": 1}}
    shot = {
        "type": "computer_call_output",
        "call_id": "k1",
        "output": {"type": "computer_screenshot", "image_url": "u"},
    }
    listed = {"type": "mcp_list_tools", "server_label": "d", "tools": []}
    record = response("r", listed, mcp, says("So."), files, code, web, click, input=[says("Go.", "user")])
    (made,) = read(tmp_path, record, pair([shot], response("r2", says("Done.")), previous_response_id="r"))
    assert [(s.tool, s.arguments, s.observation, s.unobserved, s.parallel) for s in made.steps] == [
        ("roll", {"n": 2}, "", False, False),
        ("file_search", {"queries": ["hens"]}, "7", False, False),
        ("code_interpreter", {"code": "1+1"}, "3 hens", False, False),
        ("web_search", {"type": "search", "query": "corn"}, '{"type": "logs", "logs": "2"}', True, False),
        ("computer", {"type": "click", "x": 1}, "", False, False),
    ]
    assert made.final_observation == "[computer_screenshot]"


@pytest.mark.parametrize("approve", [True, False])
def test_an_mcp_call_that_needs_approval_is_one_step(tmp_path: Path, approve: bool) -> None:
    asked = {"type": "mcp_approval_request", "id": "q1", "name": "wire", "arguments": "{}", "server_label": "bank"}
    answer = {"type": "mcp_approval_response", "approval_request_id": "q1", "approve": approve, "reason": "too much"}
    ran = {
        "type": "mcp_call",
        "id": "m1",
        "approval_request_id": "q1",
        "name": "wire",
        "arguments": "{}",
        "output": "ok",
    }
    output = [ran] if approve else []
    records = [pair("Pay.", response("r1", asked)), pair([answer], response("r2", *output), previous_response_id="r1")]
    (made,) = read(tmp_path, *records)
    assert [(s.tool, s.unobserved) for s in made.steps] == [("wire", False)]
    assert made.final_observation == ("ok" if approve else "[denied] too much")


def test_a_bare_list_of_items(tmp_path: Path) -> None:
    items = [{"role": "user", "content": "Go."}, thinks("hm"), call("a"), result("a"), says("Done.")]
    (made,) = read(tmp_path, *items)
    assert (made.source, made.instruction, len(made)) == ("openai_responses", "Go.", 1)
    (again,) = read(tmp_path, says("Go.", "user"), *items[1:])
    assert (again.source, again.steps) == (made.source, made.steps)


def test_responses_without_requests_have_the_instructions_or_a_reason(tmp_path: Path) -> None:
    (made,) = read(tmp_path, response("r1", call("a"), instructions="Tend the farm."))
    assert (made.instruction, made.steps[0].unobserved) == ("Tend the farm.", True)
    (lost,) = outcomes(tmp_path, [response("r1", call("a"))])
    assert "no user or system text before the first call" in lost.reason


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (response("r", input=7), "input: got 7"),
        (response("r", {"type": "hologram_call"}, input="Go."), "'hologram_call' is not read"),
        (response("r", input="Go.") | {"output": [None]}, "got None, expected an object"),
        (response("r", input="Go.", extra={"deep": [call("z")]}), "stands beside the items"),
        (response("r", {**call("a"), "name": ["x"]}, input="Go."), "as the function's name"),
        (response("r", {"type": "message", "content": "x"}, input="Go."), "role: got NoneType None"),
        (response(["r"], {"type": ["x"]}, input="Go."), "is not read"),  # type: ignore[arg-type]
    ],
)
def test_malformed_records_have_a_reason(tmp_path: Path, record: Item, reason: str) -> None:
    made = outcomes(tmp_path, [record])
    assert any(reason in outcome.reason for outcome in made), made
