"""Session logs of Claude Code: merged answers, sub-agents, sessions in one file, lines beside the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.reading import Companions, Outcome, read_file
from jaxguard.types import Trajectory

Line = dict[str, Any]


class Log:
    """Lines of one session, each the child of the one before it."""

    def __init__(self, session: str = "s1", **fields: Any) -> None:
        self.fields = {"sessionId": session, "isSidechain": False, **fields}
        self.parent: str | None = None
        self.lines: list[Line] = []

    def add(self, kind: str, **fields: Any) -> Line:
        uuid = f"{self.fields['sessionId']}-{self.fields.get('agentId', '')}-{len(self.lines)}"
        line = {"type": kind, "uuid": uuid, "parentUuid": self.parent, **self.fields, **fields}
        self.parent = line["uuid"]
        self.lines.append(line)
        return line

    def user(self, content: object, **fields: Any) -> Line:
        return self.add("user", message={"role": "user", "content": content}, **fields)

    def result(self, call_id: str, text: str, **fields: Any) -> Line:
        return self.user([{"type": "tool_result", "tool_use_id": call_id, "content": text}], **fields)

    def says(self, message_id: str, *blocks: Line, **fields: Any) -> Line:
        message = {"role": "assistant", "id": message_id, "model": "m-1", "content": list(blocks)}
        return self.add("assistant", message=message, **fields)


def text(words: str) -> Line:
    return {"type": "text", "text": words}


def call(call_id: str, tool: str = "Bash", **arguments: Any) -> Line:
    return {"type": "tool_use", "id": call_id, "name": tool, "input": arguments}


def outcomes(tmp_path: Path, lines: Iterable[Line]) -> list[Outcome]:
    (tmp_path / "log.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return list(read_file(tmp_path / "log.jsonl", Companions(tmp_path)))


def read(tmp_path: Path, lines: Iterable[Line]) -> list[Trajectory]:
    made = outcomes(tmp_path, lines)
    assert [outcome.reason for outcome in made if outcome.reason] == []
    return [trajectory for outcome in made for trajectory in outcome.trajectories]


def plain_log() -> Log:
    log = Log(version="9.9")
    log.user("Tidy the shed.")
    log.says("m1", {"type": "thinking", "thinking": "hm"})
    log.says("m1", text("I look."))
    log.says("m1", call("a", command="ls"))
    log.result("a", "rake")
    log.says("m1", call("b", "Read", path="rake"))
    log.result("b", "rusty")
    log.says("m2", call("c", command="rm rake"))
    log.result("c", "gone")
    log.says("m3", text("Tidy."))
    return log


def test_lines_of_one_message_are_one_answer(tmp_path: Path) -> None:
    (made,) = read(tmp_path, plain_log().lines)
    assert (made.id, made.group, made.instruction, made.source) == ("s1", "s1", "Tidy the shed.", "claude_code")
    assert [(s.tool, s.arguments, s.observation, s.parallel) for s in made.steps] == [
        ("Bash", {"command": "ls"}, "", False),
        ("Read", {"path": "rake"}, "", True),
        ("Bash", {"command": "rm rake"}, "rake\nrusty", False),
    ]
    assert "hm" in made.steps[0].thought
    assert "I look." in made.steps[0].thought
    assert made.final_observation == "gone"
    assert (made.unsafe, made.timing) == (None, False)
    assert made.metadata == {
        "agent": "claude_code",
        "session_id": "s1",
        "model": "m-1",
        "version": "9.9",
        "final_reply": "Tidy.",
    }


def test_a_later_line_changes_no_earlier_step(tmp_path: Path) -> None:
    (before,) = read(tmp_path, plain_log().lines)
    for late in range(5, 10):
        changed = late_steps(tmp_path, plain_log(), late)
        seen = {5: 1, 6: 2, 7: 2, 8: 3, 9: 3}[late]
        assert changed[:seen] == [step_key(step) for step in before.steps[:seen]]


def step_key(step: Any) -> tuple[object, ...]:
    return step.tool, step.arguments, step.observation, step.thought


def late_steps(tmp_path: Path, log: Log, late: int) -> list[tuple[object, ...]]:
    for block in log.lines[late]["message"]["content"]:
        key = {"text": "text", "tool_use": "input", "tool_result": "content"}[block["type"]]
        block[key] = {"command": "other"} if key == "input" else "other"
    (made,) = read(tmp_path, log.lines)
    return [step_key(step) for step in made.steps]


def test_streamed_copies_do_not_double(tmp_path: Path) -> None:
    log = Log()
    log.user("Go.")
    log.says("m1", text("I"))
    log.says("m1", text("I look."), call("a"))
    log.says("m1", text("I look."), call("a", command="l"))
    log.says("m1", call("a", command="ls", limit=1))
    log.result("a", "rake")
    (made,) = read(tmp_path, log.lines)
    assert [(s.arguments, s.thought) for s in made.steps] == [({"command": "ls", "limit": 1}, "I look.")]


def test_two_calls_of_one_id_are_refused(tmp_path: Path) -> None:
    log = Log()
    log.user("Go.")
    log.says("m1", call("a", command="ls"), call("a", command="rm"))
    (made,) = outcomes(tmp_path, log.lines)
    assert "two different calls have the id 'a'" in made.reason


def test_a_call_without_result_is_unobserved(tmp_path: Path) -> None:
    log = Log()
    log.user("Go.")
    log.says("m1", call("a"))
    log.says("m1", call("b"))
    log.result("b", "ok")
    (made,) = read(tmp_path, log.lines)
    assert [s.unobserved for s in made.steps] == [True, False]


def test_sub_agents_are_trajectories_of_their_own(tmp_path: Path) -> None:
    log = plain_log()
    new, old = Log(isSidechain=True, agentId="x7"), Log(isSidechain=True)
    for side in (new, old):
        side.user("Look at the rake.")
        side.says("n1", call("d", "Read"))
        side.result("d", "red")
    for number, line in enumerate(old.lines):
        line |= {"uuid": f"old-{number}", "parentUuid": f"old-{number - 1}" if number else None}
    shuffled = [log.lines[0], *new.lines[:1], *old.lines[:2], *log.lines[1:4], *new.lines[1:], *log.lines[4:]]
    made = {t.id: t for t in read(tmp_path, [*shuffled, old.lines[2]])}
    assert {name: len(t.steps) for name, t in made.items()} == {"s1": 3, "s1/x7": 1, "s1/old-0": 1}
    assert made["s1/x7"].instruction == "Look at the rake."
    assert made["s1/x7"].metadata["agent_id"] == "x7"
    assert {t.group for t in made.values()} == {"s1"}
    (own,) = read(tmp_path, log.lines)
    assert made["s1"].steps == own.steps


def test_progress_of_a_sub_agent_is_read(tmp_path: Path) -> None:
    log = plain_log()
    inner = Log()
    inner.user("Look.")
    inner.says("n1", call("d", "Read"))
    told = [
        {"type": "progress", "sessionId": "s1", "data": {"type": "agent_progress", "agentId": "p", "message": line}}
        for line in inner.lines
    ]
    for number, line in enumerate(inner.lines):
        line["uuid"] = f"in-{number}"
    made = read(tmp_path, [*log.lines[:5], *told, *log.lines[5:], told[1]])
    assert {t.id: len(t.steps) for t in made} == {"s1": 3, "s1/p": 1}


def test_a_call_in_a_line_that_is_not_read_rejects_the_file(tmp_path: Path) -> None:
    log = plain_log()
    log.add("novelty", payload=[{"deep": call("zz", "Wire")}])
    (made,) = outcomes(tmp_path, log.lines)
    assert made.position is None
    assert "a 'novelty' line holds a call of 'Wire' that no message has" in made.reason
    log.lines[-1]["payload"] = [call("a", command="ls")]
    assert len(read(tmp_path, log.lines)) == 1


def test_sessions_of_one_file(tmp_path: Path) -> None:
    one, two = plain_log(), Log("s2")
    two.user("Sweep.")
    two.says("k1", call("a"))
    resumed = Log("s3")
    resumed.parent = one.lines[-1]["uuid"]
    resumed.user("And the cellar?")
    resumed.says("k2", call("e", "Sweep"))
    mixed = [*one.lines, *two.lines, *one.lines, *resumed.lines]  # a resumed session repeats its history
    made = read(tmp_path, mixed)
    assert [(t.id, [s.tool for s in t.steps]) for t in made] == [
        ("s1", ["Bash", "Read", "Bash", "Sweep"]),
        ("s2", ["Bash"]),
    ]
    assert made[0].steps[3].observation == "gone\n[assistant] Tidy.\n[user] And the cellar?"


def test_a_prompt_that_was_taken_back_stays_where_it_was(tmp_path: Path) -> None:
    """What a step shows must not depend on whether the user rewinds later: steps stand in the order of the log."""
    log = Log()
    log.user("Start.")
    log.says("m1", call("a"))
    fork = log.result("a", "ok")["uuid"]
    log.user("Burn it.")
    log.says("m2", call("b", "Burn"))
    log.result("b", "ash")
    (before,) = read(tmp_path, log.lines)
    log.parent = fork
    log.user("Bury it.")
    log.says("m3", call("c", "Dig"))
    (made,) = read(tmp_path, log.lines)
    assert (made.id, [step.tool for step in made.steps]) == ("s1", ["Bash", "Burn", "Dig"])
    assert made.steps[:2] == before.steps
    assert made.steps[2].observation == "ash\n[user] Bury it."


def test_what_stands_beside_the_task_is_seen_and_not_the_task(tmp_path: Path) -> None:
    log = Log()
    log.user("Caveat: The messages below were generated by local commands.", isMeta=True)
    log.user("<command-name>/clear</command-name>\n<command-args></command-args>")
    log.user("<bash-input>make</bash-input>")
    log.add("attachment", attachment={"type": "hook_additional_context", "content": ["be quick"]})
    log.add("attachment", attachment={"type": "skill_listing", "content": "long list"})
    log.user("Mend the build.")
    log.says("m1", call("a"))
    log.add("attachment", attachment={"type": "queued_command", "prompt": "hurry"})
    log.add("system", subtype="compact_boundary", content="Conversation compacted")
    log.user("Summary of what was.", isCompactSummary=True)
    log.says("m2", call("b"))
    (made,) = read(tmp_path, log.lines)
    assert made.instruction == "Mend the build."
    first = made.steps[0].observation
    assert "<bash-input>make" in first
    assert "[system] be quick" in first
    assert "long list" not in first
    assert made.steps[1].observation == "[user] hurry\n[system] Summary of what was."


def test_an_expanded_command_is_the_task(tmp_path: Path) -> None:
    log = Log()
    log.user("<command-message>fix</command-message><command-name>/fix</command-name><command-args>7</command-args>")
    log.user([text("Fix the issue of this number.")], isMeta=True)
    log.says("m1", call("a"))
    (made,) = read(tmp_path, log.lines)
    assert made.instruction == "/fix 7\nFix the issue of this number."


def test_streamed_json_of_the_program(tmp_path: Path) -> None:
    log = plain_log()
    log.lines[2]["message"]["content"].append(call("a", "Task", prompt="Find rakes."))
    log.lines[3]["message"]["content"].pop()
    lines = [{"type": "system", "subtype": "init", "session_id": "z", "tools": ["Bash"]}]
    own = {"session_id": "z", "parent_tool_use_id": None}
    lines += [{"type": line["type"], "message": line["message"], **own} for line in log.lines]
    lines.append({**lines[4], "parent_tool_use_id": "a", "message": {**lines[4]["message"], "content": [call("q")]}})
    lines.append({"type": "result", "session_id": "z", "result": "Tidy."})
    made = {t.id: t for t in read(tmp_path, lines)}
    assert {name: len(t) for name, t in made.items()} == {"z": 3, "z/a": 1}
    assert made["z/a"].instruction == "Find rakes."


def test_a_session_without_calls_is_kept(tmp_path: Path) -> None:
    log = Log()
    log.user("Hi.")
    log.says("m1", text("Hello."))
    (made,) = read(tmp_path, log.lines)
    assert (made.steps, made.metadata["final_reply"]) == ((), "Hello.")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("message", None, "message: got None, expected one of user"),
        ("message", {"role": "assistant", "content": []}, "expected one of user"),
        ("message", {"role": "user", "content": [{"type": "server_tool_use", "name": "x"}]}, "is not read"),
    ],
)
def test_malformed_lines_have_a_reason(tmp_path: Path, field: str, value: object, reason: str) -> None:
    log = plain_log()
    log.lines[4][field] = value
    (made,) = outcomes(tmp_path, log.lines)
    assert reason in made.reason


def test_links_in_a_circle_and_odd_ids_end(tmp_path: Path) -> None:
    log = plain_log()
    log.lines[0]["parentUuid"] = log.lines[-1]["uuid"]
    log.lines[1] |= {"uuid": 7, "parentUuid": ["x"]}
    log.lines.append({"type": ["odd"], "uuid": {}, "sessionId": 3})
    (made,) = read(tmp_path, log.lines)
    assert len(made) == 3


@pytest.mark.data
def test_real_sessions(data_dir: Path) -> None:
    # Counted with: grep -o '"type":"tool_use"' FILE | wc -l; every id in them occurs once as "id".
    counted = {
        "12a546d1-83a7-49a6-abba-5400db340b43.jsonl": 35,
        "256ba646-2c15-437a-98e9-4171aafd030e.jsonl": 3,
        "2b4ed4c0-b905-41de-9238-273db3ec737a.jsonl": 9,
        "71c9afe9-d9cc-4583-86b3-e62ba682b83a.jsonl": 2,
        "agent-aef063ba534d73153.jsonl": 6,
        "b25638d7-b104-4f06-a797-70ac33d069ed.jsonl": 17,
        "b45ad5d8-81fb-4bcb-baba-19d9f503d731.jsonl": 8,
        "cbc0f75b-b36d-4efd-a7da-ac800ea30eb6.jsonl": 9,
        "ef958aa1-0e93-49f0-bb71-150f63befcd1.jsonl": 40,
    }
    folder = data_dir / "formats" / "claude_code"
    found = {}
    for file in sorted(folder.iterdir()):
        made = list(read_file(file, Companions(folder)))
        assert [o.reason for o in made if o.reason] == []
        (trajectory,) = (t for o in made for t in o.trajectories)
        assert not any(step.unobserved for step in trajectory.steps)
        found[file.name] = len(trajectory)
    assert found == counted
