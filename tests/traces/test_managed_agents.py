"""Event streams of hosted agent sessions: what the model saw when, denials, threads, what stands twice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import Companions, Outcome, read_file
from jaxguard.types import Trajectory

Event = dict[str, Any]
_numbers = iter(range(10**9))


def event(kind: str, own: str = "", **fields: Any) -> Event:
    return {"type": kind, "id": own or f"e{next(_numbers)}", "processed_at": "2030-01-01T00:00:00Z", **fields}


def says(kind: str, text: str, **fields: Any) -> Event:
    return event(kind, content=[{"type": "text", "text": text}], **fields)


def call(own: str, name: str = "look", kind: str = "agent.tool_use", **arguments: Any) -> Event:
    return event(kind, own, name=name, input=arguments)


def result(call_id: str, text: str) -> Event:
    return says("agent.tool_result", text, tool_use_id=call_id)


def start() -> Event:
    return event("span.model_request_start")


def end() -> Event:
    return event("span.model_request_end")


def stream(*events: Event) -> list[object]:
    about = {"type": "session", "id": "s1", "agent": {"name": "Farmer", "model": {"id": "m-1"}}}
    return [
        ["client.beta.sessions.create", about],
        *(["client.beta.sessions.events.stream", event] for event in events),
    ]


def send(*events: Event) -> list[object]:
    return ["client.beta.sessions.events.send", ["s1", {"events": list(events)}]]


def outcomes(tmp_path: Path, lines: Iterable[object]) -> list[Outcome]:
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_file(tmp_path / "log.jsonl", Companions(tmp_path)))


def read(tmp_path: Path, lines: Iterable[object]) -> list[Trajectory]:
    made = outcomes(tmp_path, lines)
    assert [outcome.reason for outcome in made if outcome.reason] == []
    return [trajectory for outcome in made for trajectory in outcome.trajectories]


def session() -> list[Event]:
    return [
        event("session.status_running"),
        says("user.message", "Feed the hens."),
        start(),
        says("agent.message", "I look."),
        call("a", barn=1),
        result("a", "3 hens"),  # while the model still speaks
        call("b", "weigh", "agent.mcp_tool_use"),
        end(),
        says("agent.mcp_tool_result", "2 kg", mcp_tool_use_id="b"),
        start(),
        call("c", "scatter", "agent.custom_tool_use"),
        end(),
        event("session.status_idle"),
        says("user.custom_tool_result", "scattered", custom_tool_use_id="c"),
        start(),
        says("agent.message", "Fed."),
        end(),
    ]


def test_a_session(tmp_path: Path) -> None:
    (made,) = read(tmp_path, stream(*session()))
    assert (made.id, made.instruction, made.source) == ("s1", "Feed the hens.", "managed_agents")
    assert [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps] == [
        ("look", {"barn": 1}, "", False, False),
        ("weigh", {}, "", True, False),
        ("scatter", {}, "3 hens\n2 kg", False, False),
    ]
    assert made.steps[0].thought == "I look."
    assert made.final_observation == "scattered"
    assert made.metadata == {"session_id": "s1", "agent": "Farmer", "model": "m-1", "final_reply": "Fed."}


@pytest.mark.parametrize(("late", "earlier"), [(5, 2), (8, 2), (13, 3), (15, 3)])
def test_a_later_event_changes_no_earlier_step(tmp_path: Path, late: int, earlier: int) -> None:
    (before,) = read(tmp_path, stream(*session()))
    events = session()
    events[late]["content"] = [{"type": "text", "text": "quite another text"}]
    (after,) = read(tmp_path, stream(*events))
    assert after.steps[:earlier] == before.steps[:earlier]


def test_plain_events_and_pages_read_the_same(tmp_path: Path) -> None:
    (whole,) = read(tmp_path, stream(*session()))
    (plain,) = read(tmp_path, session())
    assert (plain.id, plain.steps) == ("log:0", whole.steps)
    (page,) = read(tmp_path, [{"data": session(), "has_more": False}])
    assert page.steps == whole.steps
    events = session()
    for number, one in enumerate(events):
        one["processed_at"] = f"2030-01-01T00:00:{number:02}Z"
    (newest_first,) = read(tmp_path, [{"data": events[::-1]}])
    assert newest_first.steps == whole.steps


def test_what_was_sent_and_comes_back_stands_once(tmp_path: Path) -> None:
    events = session()
    sent = [send({name: one[name] for name in one if name not in ("id", "processed_at")}) for one in events[1:14:12]]
    lines = stream(*events)
    (whole,) = read(tmp_path, lines)
    (made,) = read(tmp_path, [lines[0], sent[0], *lines[1:12], sent[1], *lines[12:], *lines[3:6]])
    assert (made.instruction, made.steps, made.final_observation) == (
        whole.instruction,
        whole.steps,
        whole.final_observation,
    )
    (only_sent,) = read(tmp_path, [lines[0], sent[0], *lines[3:13], sent[1]])
    assert only_sent.steps == whole.steps


def test_a_denied_call_is_a_step_and_its_denial_is_seen_after_it(tmp_path: Path) -> None:
    no = event("user.tool_confirmation", tool_use_id="a", result="deny", deny_message="not now")
    yes = event("user.tool_confirmation", tool_use_id="b", result="allow")
    head = [says("user.message", "Pay."), call("a", "wire"), no]
    (made,) = read(tmp_path, stream(*head, result("a", "refused"), call("b"), yes))
    assert [(s.tool, s.observation, s.unobserved) for s in made.steps] == [
        ("wire", "", False),
        ("look", "[user] denied: not now\nrefused", True),
    ]
    (made,) = read(tmp_path, stream(*head, call("b")))
    assert [(s.observation, s.unobserved) for s in made.steps] == [("", False), ("denied: not now", True)]


def test_threads_are_trajectories_of_their_own(tmp_path: Path) -> None:
    asked = says("agent.thread_message_sent", "Count the eggs.", to_session_thread_id="t2")
    inner = [{**call("d", "count"), "session_thread_id": "t2"}, result("d", "12")]
    back = says("agent.thread_message_received", "12 eggs", from_session_thread_id="t2")
    events = [says("user.message", "Report."), call("a"), result("a", "x"), asked, *inner, back, call("e")]
    made = {t.id: t for t in read(tmp_path, stream(*events))}
    assert {name: [s.call_id for s in t.steps] for name, t in made.items()} == {"s1": ["a", "e"], "s1/t2": ["d"]}
    assert made["s1/t2"].instruction == "Count the eggs."
    assert made["s1"].steps[1].observation == "x\n[assistant] Count the eggs.\n[user] 12 eggs"


def test_two_sessions_of_one_file(tmp_path: Path) -> None:
    two = {"type": "session", "id": "s2"}
    lines = [*stream(*session()), ["client.beta.sessions.create", two], says("user.message", "Hi."), call("z")]
    assert [(t.id, len(t)) for t in read(tmp_path, lines)] == [("s1", 3), ("s2", 1)]


def test_documents_are_seen_as_their_text(tmp_path: Path) -> None:
    page = {"type": "document", "source": {"type": "text", "data": "page text"}}
    found = event("agent.tool_result", tool_use_id="a", content=[page, {"type": "image"}, {"type": "hit", "url": "u"}])
    (made,) = read(tmp_path, stream(says("user.message", "Go."), call("a"), found))
    assert made.final_observation == 'page text\n[image]\n{"type": "hit", "url": "u"}'


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (event("agent.novel_tool_use", name="wire"), "'agent.novel_tool_use' is not read"),
        (event("agent.tool_use", name=3), "as the function's name"),
        ({"type": "agent.tool_use", "id": ["x"], "name": "wire", "input": {}}, "unhashable"),
    ],
)
def test_what_is_not_understood_has_a_reason(tmp_path: Path, broken: Event, reason: str) -> None:
    made = outcomes(tmp_path, stream(*session(), broken))
    assert any(reason in outcome.reason for outcome in made), made


@pytest.mark.data
def test_real_sessions(data_dir: Path) -> None:
    # Counted with: grep -cE '"type":"agent\.(custom_|mcp_)?tool_use"' FILE
    counted = {"anthropic_managed_custom_tools.jsonl": 1, "anthropic_managed_mcp_tools_reject.jsonl": 2}
    folder = data_dir / "formats" / "anthropic_managed_agents"
    found = {}
    for file in sorted(folder.iterdir()):
        (trajectory,) = (t for o in read_file(file, Companions(folder)) for t in o.trajectories)
        assert not any(step.unobserved for step in trajectory.steps)
        found[file.name] = len(trajectory)
    assert found == counted
