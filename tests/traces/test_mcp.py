"""Recordings of Model Context Protocol connections."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import Companions, Outcome, read_file
from jaxguard.types import Trajectory

Message = dict[str, Any]


def asks(own: object, method: str, **params: Any) -> Message:
    return {"dir": "c2s", "msg": {"jsonrpc": "2.0", "id": own, "method": method, "params": params}}


def call(own: object, name: str, **arguments: Any) -> Message:
    return asks(own, "tools/call", name=name, arguments=arguments)


def answers(own: object, **result: Any) -> Message:
    return {"dir": "s2c", "msg": {"jsonrpc": "2.0", "id": own, "result": result}}


def says(own: object, text: str) -> Message:
    return answers(own, content=[{"type": "text", "text": text}])


def tools(own: object, *names: str) -> Message:
    return answers(own, tools=[{"name": name, "description": f"does {name}"} for name in names])


def session() -> list[Message]:
    lines = [
        asks(0, "initialize"),
        answers(0, serverInfo={"name": "barn"}, instructions="Be kind to hens."),
        {"dir": "c2s", "msg": {"jsonrpc": "2.0", "method": "notifications/initialized"}},
        asks(1, "tools/list"),
        tools(1, "look"),
        call(2, "look", barn=1),
        call("2", "weigh"),
        {"dir": "s2c", "msg": {"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "log"}}},
        says("2", "2 kg"),
        says(2, "3 hens"),
        call(3, "feed"),
        {"dir": "s2c", "msg": {"jsonrpc": "2.0", "id": 3, "error": {"code": -1, "message": "no corn"}}},
        call(4, "wait"),
    ]
    return [{"seq": number, **line} for number, line in enumerate(lines)]


def outcomes(tmp_path: Path, lines: Iterable[object]) -> list[Outcome]:
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_file(tmp_path / "log.jsonl", Companions(tmp_path)))


def read(tmp_path: Path, lines: Iterable[object]) -> list[Trajectory]:
    made = outcomes(tmp_path, lines)
    assert [outcome.reason for outcome in made if outcome.reason] == []
    return [trajectory for outcome in made for trajectory in outcome.trajectories]


def keys(made: Trajectory) -> list[tuple[object, ...]]:
    return [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps]


def test_a_recording(tmp_path: Path) -> None:
    summary = {"type": "summary", "server": {"command": "barnd"}}
    (made,) = read(tmp_path, [*session(), summary])
    assert made.id == "log"
    assert made.source == "mcp"
    assert made.instruction == (
        "No instruction was recorded: tool calls over a Model Context Protocol connection.\n"
        "Server: barn\nBe kind to hens.\nTool look: does look"
    )
    assert keys(made) == [
        ("look", {"barn": 1}, "", False, False),
        ("weigh", {}, "", True, False),
        ("feed", {}, "2 kg\n3 hens", False, False),
        ("wait", {}, 'error: {"code": -1, "message": "no corn"}', False, True),
    ]
    assert made.metadata == {"service": "barn", "server": {"command": "barnd"}}


@pytest.mark.parametrize(("late", "earlier"), [(8, 2), (9, 2), (11, 3), (12, 3)])
def test_a_later_message_changes_no_earlier_step(tmp_path: Path, late: int, earlier: int) -> None:
    (before,) = read(tmp_path, session())
    lines = session()
    message = lines[late]["msg"]
    for name in ("result", "error"):
        if name in message:
            message[name] = {"content": [{"type": "text", "text": "quite another text"}]}
    if "params" in message:
        message["params"]["name"] = "other"
    (after,) = read(tmp_path, [*lines, asks(9, "tools/list"), tools(9, "steal")])
    assert (keys(after)[:earlier], after.instruction) == (keys(before)[:earlier], before.instruction)


def test_order_batches_and_plain_messages(tmp_path: Path) -> None:
    (whole,) = read(tmp_path, session())
    (shuffled,) = read(tmp_path, [session()[0], *reversed(session()[1:])])
    assert shuffled.steps == whole.steps
    messages = [line["msg"] for line in session()]
    (plain,) = read(tmp_path, messages)
    assert plain.steps == whole.steps
    batch = [*session()[:5], {"seq": 5, "dir": "c2s", "msg": messages[5:7]}, *session()[7:]]
    (batched,) = read(tmp_path, batch)
    assert batched.steps == whole.steps


def test_a_new_connection_begins_a_new_trajectory(tmp_path: Path) -> None:
    made = read(tmp_path, [*session(), *session()])
    assert [(t.id, len(t)) for t in made] == [("log", 4), ("log:1", 4)]
    assert made[0].steps == made[1].steps


def test_tools_and_resources_that_are_told_later_are_seen(tmp_path: Path) -> None:
    lines = [call(1, "look"), asks(2, "tools/list"), tools(2, "look"), asks(3, "resources/read")]
    lines += [answers(3, contents=[{"uri": "u", "text": "notes"}]), says(1, "ok"), call(4, "feed")]
    (made,) = read(tmp_path, lines)
    assert made.steps[1].observation == "[system] Tool look: does look\n[system] notes\nok"


def test_results_without_text(tmp_path: Path) -> None:
    lines = [call(1, "a"), answers(1, content=[], structuredContent={"n": 1}), call(2, "b")]
    lines.append(answers(2, content=[{"type": "image", "data": "x"}, {"type": "resource", "resource": {"text": "r"}}]))
    (made,) = read(tmp_path, lines)
    assert (made.steps[1].observation, made.final_observation) == ('{"n": 1}', "[image]\nr")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (asks(7, "tools/call"), "as the function's name"),
        ({"dir": "c2s", "msg": {"jsonrpc": "2.0", "method": "tools/call", "params": []}}, "params: got"),
        ({**call(7, "look"), "dir": "s2c"}, "goes from the server to the client"),
        ({**answers(7, content={"type": "tool_use", "name": "x"}), "dir": "c2s"}, "a tool_use part, which is not read"),
    ],
)
def test_what_is_not_understood_has_a_reason(tmp_path: Path, line: Message, reason: str) -> None:
    (made,) = outcomes(tmp_path, [*session(), {"seq": 99, **line}])
    assert reason in made.reason


def test_a_recording_without_calls_is_none(tmp_path: Path) -> None:
    (made,) = outcomes(tmp_path, session()[:5])
    assert "holds no tools/call request" in made.reason


@pytest.mark.data
def test_real_recording(data_dir: Path) -> None:
    # Counted with: grep -c '"method":"tools/call"' FILE
    folder = data_dir / "formats" / "mcp"
    (made,) = (t for o in read_file(folder / "echo-session.jsonl", Companions(folder)) for t in o.trajectories)
    assert [(s.tool, s.unobserved) for s in made.steps] == [("echo", False)]
