"""Session logs of the Codex CLI: items, events that repeat them, older layouts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import Companions, Outcome, read_file
from jaxguard.types import Trajectory

Line = dict[str, Any]


def item(kind: str, **fields: Any) -> Line:
    return {"timestamp": "t", "type": "response_item", "payload": {"type": kind, **fields}}


def event(kind: str, **fields: Any) -> Line:
    return {"timestamp": "t", "type": "event_msg", "payload": {"type": kind, **fields}}


def says(role: str, text: str) -> Line:
    part = "output_text" if role == "assistant" else "input_text"
    return item("message", role=role, content=[{"type": part, "text": text}])


def call(call_id: str, name: str = "shell", **arguments: Any) -> Line:
    return item("function_call", name=name, arguments=json.dumps(arguments), call_id=call_id)


def result(call_id: str, output: object) -> Line:
    return item("function_call_output", call_id=call_id, output=output)


def session() -> list[Line]:
    return [
        {"type": "session_meta", "payload": {"id": "s1", "cli_version": "1.2", "model_provider": "p"}},
        says("developer", "Rules."),
        says("user", "<environment_context>cwd</environment_context>"),
        says("user", "Mend the gate."),
        event("user_message", message="Mend the gate."),
        {"type": "turn_context", "payload": {"model": "m-1"}},
        item("reasoning", summary=[{"type": "summary_text", "text": "look first"}], encrypted_content="x"),
        event("agent_reasoning", text="look first"),
        says("assistant", "I look."),
        event("agent_message", message="I look."),
        call("a", command=["ls"]),
        call("b", command=["pwd"]),
        event("exec_command_end", call_id="a", stdout="gate"),
        result("a", "gate"),
        result("b", [{"type": "input_text", "text": "/farm"}]),
        item("custom_tool_call", name="apply_patch", call_id="c", input="*** Begin Patch"),
        item("custom_tool_call_output", call_id="c", output="done"),
        item("web_search_call", status="completed", action={"type": "search", "query": "hinge"}),
        says("assistant", "Mended."),
    ]


def outcomes(tmp_path: Path, lines: Iterable[Line]) -> list[Outcome]:
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_file(tmp_path / "log.jsonl", Companions(tmp_path)))


def read(tmp_path: Path, lines: Iterable[Line]) -> list[Trajectory]:
    made = outcomes(tmp_path, lines)
    assert [outcome.reason for outcome in made if outcome.reason] == []
    return [trajectory for outcome in made for trajectory in outcome.trajectories]


def test_a_session(tmp_path: Path) -> None:
    (made,) = read(tmp_path, session())
    assert (made.id, made.instruction, made.source) == ("s1", "Mend the gate.", "codex")
    assert [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps] == [
        ("shell", {"command": ["ls"]}, "", False, False),
        ("shell", {"command": ["pwd"]}, "", True, False),
        ("apply_patch", {"input": "*** Begin Patch"}, "gate\n/farm", False, False),
        ("web_search", {"type": "search", "query": "hinge"}, "done", False, True),
    ]
    assert made.steps[0].thought == "look first\nI look."
    assert made.metadata == {
        "agent": "codex",
        "session_id": "s1",
        "model": "m-1",
        "model_provider": "p",
        "cli_version": "1.2",
        "final_reply": "Mended.",
    }


@pytest.mark.parametrize(("late", "earlier"), [(13, 2), (14, 2), (15, 2), (16, 3), (18, 4)])
def test_a_later_line_changes_no_earlier_step(tmp_path: Path, late: int, earlier: int) -> None:
    (before,) = read(tmp_path, session())
    lines = session()
    payload = lines[late]["payload"]
    for name in ("output", "input", "content"):
        if name in payload:
            payload[name] = "quite another text"
    (after,) = read(tmp_path, lines)
    keys = [[(s.tool, s.arguments, s.observation, s.thought) for s in t.steps[:earlier]] for t in (before, after)]
    assert keys[0] == keys[1]


def test_words_after_a_call_are_not_its_thought(tmp_path: Path) -> None:
    (made,) = read(tmp_path, [says("user", "Go."), call("a"), says("assistant", "Later."), result("a", "x"), call("b")])
    assert [(s.thought, s.observation) for s in made.steps] == [("", ""), ("", "[assistant] Later.\nx")]


def test_a_prompt_that_only_an_event_tells_is_read(tmp_path: Path) -> None:
    lines = [says("developer", "Rules."), event("user_message", message="Mend it."), call("a")]
    (made,) = read(tmp_path, lines)
    assert (made.instruction, made.steps[0].unobserved) == ("Mend it.", True)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (event("exec_command_begin", call_id="zz", command=["rm"]), "tells of the call 'zz'"),
        ({"type": "compacted", "payload": {"replacement_history": [call("q")["payload"]]}}, "of the id 'q'"),
        (item("hologram_call", call_id="h"), "'hologram_call' is not read"),
        ({"type": "response_item", "payload": None}, "payload: got None"),
        (item("function_call", name=None, call_id="n", arguments="{}"), "as the function's name"),
    ],
)
def test_what_is_not_understood_has_a_reason(tmp_path: Path, line: Line, reason: str) -> None:
    (made,) = outcomes(tmp_path, [*session(), line])
    assert reason in made.reason


def test_a_command_of_the_user_and_a_summary(tmp_path: Path) -> None:
    lines = [*session()[:-1], event("exec_command_begin", call_id="u", source="user_shell")]
    lines.append(
        {"type": "compacted", "payload": {"message": "So far.", "replacement_history": [call("a")["payload"]]}}
    )
    (made,) = read(tmp_path, [*lines, call("d")])
    assert made.steps[4].observation == "[system] So far."


def test_two_sessions_and_a_forked_one(tmp_path: Path) -> None:
    fork = [{"type": "session_meta", "payload": {"id": "own"}}, *session()]
    made = read(tmp_path, [*fork, {"type": "session_meta", "payload": {"id": "s2"}}, says("user", "Hi."), call("a")])
    assert [(t.id, len(t)) for t in made] == [("own", 4), ("s2", 1)]


def test_older_layouts(tmp_path: Path) -> None:
    (whole,) = read(tmp_path, session())
    bare = [line["payload"] for line in session() if line["type"] == "response_item"]
    state = {"record_type": "state"}
    (made,) = read(tmp_path, [{"id": "s0", "timestamp": "t", "instructions": None}, *bare[:3], state, *bare[3:]])
    assert (made.id, made.steps) == ("s0", whole.steps)
    (made,) = read(tmp_path, [{"session": {"id": "s9"}, "items": bare}])
    assert (made.id, made.steps) == ("s9", whole.steps)


def test_a_shell_call_is_answered_by_its_id(tmp_path: Path) -> None:
    shell = item("local_shell_call", call_id="a", status="completed", action={"type": "exec", "command": ["ls"]})
    (made,) = read(tmp_path, [says("user", "Go."), shell, result("a", {"content": "gate", "success": True})])
    assert (made.steps[0].tool, made.steps[0].arguments) == ("local_shell", {"type": "exec", "command": ["ls"]})
    assert (made.steps[0].unobserved, made.final_observation) == (False, "gate")


@pytest.mark.data
def test_real_sessions(data_dir: Path) -> None:
    # Counted by eye: nine lines, of which one is a function_call.
    folder = data_dir / "formats" / "other_cli_sessions"
    (made,) = (t for o in read_file(folder / "codex_sample-session.jsonl", Companions(folder)) for t in o.trajectories)
    assert [(s.tool, s.unobserved) for s in made.steps] == [("exec_command", False)]
