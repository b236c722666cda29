"""Langfuse traces: one call told in many places is one step, in the order in which the agent could know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxguard.traces.readers.langfuse import READER
from jaxguard.traces.reading import Companions, read_file
from jaxguard.traces.registry import Context, RecordError, detect

CONTEXT = Context(Path("export.json"), 0)
SYSTEM = {"role": "system", "content": "You keep a library."}
TASK = {"role": "user", "content": "Lend me two books."}


def obs(kind, own, start, end=None, given=None, got=None, parent=None, **more):
    def stamp(at):
        return None if at is None else f"2026-03-01T10:00:{at:06.3f}Z"

    def text(value):
        return value if value is None else json.dumps(value)

    return {
        "id": own, "traceId": "t1", "type": kind, "name": own, "parentObservationId": parent, "startTime": stamp(start),
        "endTime": stamp(start if end is None else end), "input": text(given), "output": text(got), **more,
    }  # fmt: skip


def trace(*observations, **more):
    return {"trace": {"id": "t1", "name": "library", "timestamp": "x", **more}, "observations": list(observations)}


def ask(*calls, text=None):
    made = [
        {"id": own, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
        for own, tool, arguments in calls
    ]
    return {"role": "assistant", "content": text, "tool_calls": made}


def answer(own, text):
    return {"role": "tool", "tool_call_id": own, "content": text}


FIND = ask(("c1", "find", {"title": "Emma"}), text="I look.")
LEND = ask(("c2", "lend", {"book": 1}), ("c3", "lend", {"book": 2}))


def usual():
    """Two turns, each call told by a generation, by a tool, by later requests and by the chain around all."""
    history = [SYSTEM, TASK, FIND, answer("c1", "shelf 3")]
    late = [*history, LEND, answer("c2", "lent"), answer("c3", "gone")]
    end = {"role": "assistant", "content": "One is lent."}
    return [
        obs("SPAN", "root", 0, 9, {"messages": [TASK]}, {"messages": [*late[1:], end]}),
        obs("GENERATION", "g1", 1, 2, [SYSTEM, TASK], FIND, "root", model="m-1"),
        obs("TOOL", "find", 2, 3, {"title": "Emma"}, "shelf 3", "root"),
        obs("GENERATION", "g2", 3, 4, history, LEND, "root"),
        {**obs("TOOL", "t2", 4, 5, {"book": 1}, "lent", "root"), "name": "lend"},
        {**obs("TOOL", "t3", 4, 6, {"book": 2}, "gone", "root"), "name": "lend"},
        obs("GENERATION", "g3", 6, 7, late, end, "root"),
    ]


def read(record):
    (made,) = READER.read(record, CONTEXT)
    return made


def seen(made):
    return [(s.tool, s.arguments, s.call_id, s.observation, s.parallel, s.unobserved) for s in made.steps]


STEPS = [
    ("find", {"title": "Emma"}, "c1", "", False, False),
    ("lend", {"book": 1}, "c2", "shelf 3", False, False),
    ("lend", {"book": 2}, "c3", "shelf 3", True, False),
]


def test_a_usual_trace():
    made = read(trace(*usual(), sessionId="s9"))
    assert seen(made) == STEPS
    assert (made.id, made.group, made.source, made.unsafe, made.timing) == ("t1", "s9", "langfuse", None, False)
    assert made.instruction == "Lend me two books."
    assert made.steps[0].thought == "I look."
    assert made.final_observation == "lent\ngone"
    assert made.metadata == {"name": "library", "model": "m-1", "session_id": "s9", "final_reply": "One is lent."}


def test_any_order_in_the_file_and_any_place_of_the_observations():
    observations = usual()[::-1]
    assert seen(read(trace(*observations))) == STEPS
    assert seen(read({"id": "t1", "timestamp": "x", "observations": observations})) == STEPS
    assert seen(read({"trace": {"id": "t1", "observations": observations}})) == STEPS


@pytest.mark.parametrize("left_out", [("g1",), ("find", "t2", "t3"), ("g1", "g2"), ("g1", "g2", "g3"), ("root",)])
def test_what_one_place_leaves_out_another_tells(left_out):
    made = read(trace(*(one for one in usual() if one["id"] not in left_out)))
    assert [step[:2] for step in seen(made)] == [step[:2] for step in STEPS]
    # Without the first generation the system prompt is first told by the second.
    late = [step.observation.removesuffix("\n[system] You keep a library.") for step in made.steps]
    assert late == [step[3] for step in STEPS]
    assert [step[4:] for step in seen(made)] == [step[4:] for step in STEPS]


def test_only_a_chain_tells():
    assert [step[:3] for step in seen(read(trace(usual()[0])))] == [step[:3] for step in STEPS]


def test_nothing_later_shows():
    def changed(*places):
        observations = usual()
        for place, field in places:
            observations[place][field] = json.dumps("something else")
        return read(trace(*observations))

    whole = read(trace(*usual()))
    late = [(5, "output"), (4, "output"), (6, "input"), (6, "output"), (0, "output")]
    assert changed(*late).steps == whole.steps
    later = changed(*late, (3, "input"), (3, "output"), (2, "output"))
    assert later.steps[0] == whole.steps[0]


def test_what_ends_while_a_model_runs_is_not_seen_by_it():
    made = read(
        trace(
            obs("GENERATION", "g1", 0, 1, [TASK], ask(("a", "slow", {}), ("b", "fast", {}))),
            {**obs("TOOL", "t1", 1, 8, {}, "slow one", call_id="a"), "name": "slow"},
            {**obs("TOOL", "t2", 1, 2, {}, "fast one"), "name": "fast"},
            obs("GENERATION", "g2", 3, 9, [TASK], ask(("c", "next", {}))),
        )
    )
    assert made.steps[2].observation == "fast one"
    assert made.final_observation == "slow one"
    assert [step.unobserved for step in made.steps] == [False, False, True]


def test_calls_that_gemini_runs_itself():
    task = {"role": "user", "parts": [{"text": "Roll."}]}
    ran = [
        task,
        {"role": "model", "parts": [{"function_call": {"name": "roll", "args": {"sides": 6}, "id": None}}]},
        {"role": "user", "parts": [{"function_response": {"name": "roll", "response": {"result": 4}}}]},
    ]
    end = {"content": {"role": "model", "parts": [{"text": "Four."}]}}
    got = {"automatic_function_calling_history": ran, "candidates": [end]}
    made = read(trace(obs("GENERATION", "g", 0, 3, {"contents": [task]}, got)))
    assert seen(made) == [("roll", {"sides": 6}, "call_0", "", False, False)]
    assert (made.instruction, made.final_observation, made.metadata["final_reply"]) == ("Roll.", "4", "Four.")
    both = [obs("GENERATION", "g", 0, 3, {"contents": [task]}, got), obs("TOOL", "roll", 1, 2, {"sides": 6}, 4, "g")]
    assert seen(read(trace(*both))) == seen(made)


def test_agents_side_by_side_do_not_see_what_the_other_is_about_to_say():
    made = read(
        trace(
            obs("SPAN", "root", 0, 9, "Compare two books."),
            obs("GENERATION", "a", 1, 3, "Read Emma.", "A novel.", "root"),
            obs("GENERATION", "b", 2, 5, "Read Persuasion.", ask(("c", "find", {})), "root"),
            obs("GENERATION", "d", 6, 7, "Sum up.", ask(("e", "write", {})), "root"),
        )
    )
    assert [step.observation for step in made.steps] == [
        "[user] Read Emma.\n[user] Read Persuasion.", "[assistant] A novel.\n[user] Sum up."]  # fmt: skip


@pytest.mark.parametrize("turns", [2, 3])
def test_ids_that_start_anew_in_each_turn(turns):
    observations, history = [], [TASK]
    for turn in range(turns):
        call = ask(("call_0", "roll", {}))
        observations += [
            obs("GENERATION", f"g{turn}", 3 * turn, 3 * turn + 1, list(history), call),
            {**obs("TOOL", f"t{turn}", 3 * turn + 1, 3 * turn + 2, {}, f"{turn}"), "name": "roll"},
        ]
        history += [call, answer("call_0", f"{turn}")]
    made = read(trace(*observations))
    assert [step.observation for step in made.steps] == ["", "0", "1"][:turns]
    assert not any(step.unobserved for step in made.steps)
    assert made.final_observation == f"{turns - 1}"


def test_equal_calls_without_ids_are_all_told():
    def turn(*parts):
        return {"candidates": [{"content": {"role": "model", "parts": list(parts)}}]}

    call = {"functionCall": {"name": "roll", "args": {}}}

    def result(number):
        return {"role": "user", "parts": [{"functionResponse": {"name": "roll", "response": {"result": number}}}]}

    task = {"role": "user", "parts": [{"text": "Roll until six."}]}
    model = {"role": "model", "parts": [call]}
    made = read(
        trace(
            obs("GENERATION", "g1", 0, 1, {"contents": [task]}, turn(call)),
            obs("GENERATION", "g2", 2, 3, {"contents": [task, model, result("one")]}, turn(call)),
            obs("GENERATION", "g3", 4, 5, {"contents": [task, model, result("one"), model, result("six")]},
                turn({"text": "Six."})),
        )
    )  # fmt: skip
    assert [(s.tool, s.observation, s.unobserved) for s in made.steps] == [("roll", "", False), ("roll", "one", False)]
    assert (made.final_observation, made.metadata["final_reply"]) == ("six", "Six.")


def test_a_model_call_within_a_model_call_is_one():
    text = "user: Lend me two books."
    both = [
        obs("GENERATION", "outer", 0, 2, {"messages": [TASK]}, {"choices": [{"message": FIND}]}),
        obs("GENERATION", "inner", 0.5, 1.5, text, "None", "outer"),
    ]
    made = read(trace(*both))
    assert [step[:3] for step in seen(made)] == [STEPS[0][:3]]
    assert made.metadata.get("final_reply") is None
    # Around several it is an agent: what it returns stands at its end.
    agent = [
        obs("GENERATION", "agent", 0, 9, {"prompt": "Lend me two books."}, {"text": "Done."}),
        obs("GENERATION", "g1", 1, 2, [TASK], FIND, "agent"),
        obs("TOOL", "find", 2, 3, {"title": "Emma"}, "shelf 3", "agent"),
        obs("GENERATION", "g2", 3, 4, [TASK, FIND, answer("c1", "shelf 3")], LEND, "agent"),
    ]
    made = read(trace(*agent))
    assert [step[:5] for step in seen(made)] == [step[:5] for step in STEPS]
    assert made.metadata["final_reply"] == "Done."


def test_a_sub_agent_stands_within_its_call():
    made = read(
        trace(
            obs("GENERATION", "g1", 0, 1, [TASK], ask(("c1", "ask_helper", {"what": "Emma"}))),
            obs("TOOL", "ask_helper", 1, 5, {"what": "Emma"}, "shelf 3"),
            obs("GENERATION", "g2", 2, 3, [{"role": "user", "content": "Where is Emma?"}], FIND | {
                "tool_calls": [{"id": "h1", "name": "find", "args": {"title": "Emma"}}]}, "ask_helper"),
            obs("TOOL", "find", 3, 4, {"title": "Emma"}, "row 3", "ask_helper"),
            obs("GENERATION", "g3", 6, 7, [TASK], LEND),
        )
    )  # fmt: skip
    assert [(s.tool, s.observation) for s in made.steps] == [
        ("ask_helper", ""),
        ("find", "[user] Where is Emma?"),
        ("lend", "row 3\nshelf 3"),
        ("lend", "row 3\nshelf 3"),
    ]


def test_tools_without_models():
    made = read(
        trace(
            obs("AGENT", "root", 0, 9, "Lend me a book.", "Lent."),
            obs("TOOL", "find", 1, 3, {"kwargs": {"title": "Emma"}, "args": []}, "shelf 3", "root"),
            obs("TOOL", "count", 2, 4, "{'of': 'Emma'}", None, "root"),
            obs("SPAN", "lend", 5, 6, {"input": "Emma"}, None, "root", level="ERROR", statusMessage="no card",
                metadata=json.dumps({"attributes": json.dumps({"openinference.span.kind": "TOOL"})})),
        )
    )  # fmt: skip
    assert made.instruction == "Lend me a book."
    assert [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps] == [
        ("find", {"title": "Emma"}, "", False, False),
        ("count", {"of": "Emma"}, "", True, True),
        ("lend", {"input": "Emma"}, "shelf 3", False, False),
    ]
    assert made.final_observation == "no card"


def test_a_tool_with_defaults_filled_in_runs_the_call():
    observations = usual()
    observations[2]["input"] = json.dumps({"title": "Emma", "limit": 5})
    assert seen(read(trace(*observations))) == STEPS
    # One with other arguments is another call.
    observations[2]["input"] = json.dumps({"title": "Persuasion"})
    assert [s.tool for s in read(trace(*observations)).steps] == ["find", "find", "lend", "lend"]


def test_many_calls_of_a_tool_each_find_their_span():
    calls = [ask((f"c{n}" if n % 2 else "", "find", {"n": n})) for n in range(200)]
    models = [obs("GENERATION", f"g{n}", 0, 1, [TASK], call) for n, call in enumerate(calls)]
    tools = [
        {**obs("TOOL", f"t{n}", 2 + n / 10, 3 + n / 10, {"n": n, "limit": 1}, f"{n}"), "name": "find"}
        for n in reversed(range(200))
    ]
    for tool in tools[::2]:
        tool["metadata"] = json.dumps({"attributes": {"gen_ai.tool.call.id": f"c{tool['id'][1:]}"}})
    made = read(trace(*models, *tools))
    assert len(made.steps) == 200
    assert not any(step.unobserved for step in made.steps)


def test_a_conversation_without_calls_is_kept():
    made = read(
        trace(obs("GENERATION", "g", 0, 1, "What is Emma?", {"choices": [{"message": {"content": "A book."}}]}))
    )
    assert (made.instruction, made.steps, made.metadata["final_reply"]) == ("What is Emma?", (), "A book.")


@pytest.mark.parametrize(
    ("observations", "reason"),
    [
        ([obs("SPAN", "GET /", 0, 1, {"url": "/"}, {"status": 200})], "none of the 1 spans is a model call"),
        ([obs("GENERATION", "g", 0, 1)], "none of the 1 spans holds what went in or came out"),
        ([obs("GENERATION", "g", 0, 1, "a"), obs("TOOL", "g", 0, 1)], r"\[1\].id: 'g' stands twice"),
        ([{**obs("GENERATION", "g", 0), "startTime": "soon"}], r"observations\[0\].startTime: got 'soon'"),
        ([{**obs("GENERATION", "g", 0), "startTime": None}], r"observations\[0\].startTime: got None"),
        ([{**obs("GENERATION", "g", 0), "id": 7}], r"observations\[0\].id: got 7"),
        ([obs("TOOL", "a", 0, 1, "x", None, "b"), obs("TOOL", "b", 0, 1, "x", None, "a")], "parents form a circle"),
        ([obs("GENERATION", "g", 0, 1, "a"), "text"], r"observations\[1\]: got str, expected an object"),
        ([obs("GENERATION", "g", 0, 1, "hi", {"role": "assistant", "server_tool_calls": [{}]})], "server_tool_calls"),
        ([obs("GENERATION", "g", 0, 1, "hi", [{"type": "web_search_call", "id": "w"}])], "web_search_call"),
        ([obs("GENERATION", "g", 0, 1, "hi", {"choices": [{"message": FIND}] * 2})], "2 alternatives"),
        ([obs("GENERATION", "g", 0, 1, [{"role": "robot", "content": "x"}])], "got role 'robot'"),
        ([obs("GENERATION", "g", 0, 1, "hi", ask(("a", None, {})))], "as the function's name"),
        ([obs("TOOL", "find", 0, 1, {"a": 1}, "x")], "no user or system text"),
        ([obs("GENERATION", "g", 0, 1, "hi", {"tool_calls": [7]})], r"\[0\].output, message 0, a call: got 7"),
        ([obs("GENERATION", "g", 0, 1, "hi", {"tool_calls": "x"})], r"message 0, tool_calls: got 'x', expected a list"),
        ([{**obs("GENERATION", "g", 0), "output": '{"tool_calls": [{"na'}], r"\[0\].output: text that names calls"),
        ([obs("GENERATION", "g", 0, 1, "hi", "I must look.\nAction: find\nAction Input: {}")], "no tool's span tells"),
        ([], "expected a list of observations"),
    ],
)
def test_what_cannot_be_read_has_a_reason(observations, reason):
    with pytest.raises(RecordError, match=reason):
        read(trace(*observations))


@pytest.mark.slow
def test_thousands_of_levels_and_of_turns():
    chain = [obs("SPAN", f"s{n}", 0, 9, parent=f"s{n - 1}") for n in range(2000)]
    assert read(trace(*chain, obs("GENERATION", "g", 1, 2, [TASK], FIND, "s1999"))).steps[0].tool == "find"
    nested = [obs("GENERATION", f"s{n}", 0, 9, "hi", parent=f"s{n - 1}") for n in range(2000)]
    assert read(trace(*nested)).steps == ()
    turns = [obs("GENERATION", f"g{n}", 0, 1, [TASK], ask(("", "find", {"n": n}))) for n in range(2000)]
    tools = [{**obs("TOOL", f"t{n}", 2, 3, {"n": -n - 1}, "x"), "name": "find"} for n in range(2000)]
    assert len(read(trace(*turns, *tools)).steps) == 4000


def test_detection():
    made = {"id": "t1", "timestamp": "x", "observations": usual(), "output": [TASK]}
    for record in (trace(*usual()), trace(), made):
        assert detect(record) is READER
    for record in ({"observations": []}, {"observations": ["x"]}, {"trace": 1}, {"trace": {"observations": 3}}):
        assert detect(record) is None


# Counted in the exports by eye, by the ids of calls there (grep -o 'call_[A-Za-z0-9]*\|toolu_[A-Za-z0-9]*' | sort -u);
# the four with none have no tool at all.
COUNTS = {
    "agno-2025-06-11.trace.json": 1,
    "claude-agent-2025-12-22.trace.json": 2,
    "crewai-2025-07-11.trace.json": 0,
    "google-gemini-2025-08-01.trace.json": 0,
    "koog-2025-08-26.trace.json": 2,
    "langgraph-python-2025-08-22.trace.json": 1,
    "microsoft-agent-2025-12-17.trace.json": 1,
    "pydantic-ai-with-gemini-2025-12-24.trace.json": 0,
    "vercel-aisdk-2025-11-17.trace.json": 1,
    "vertex-ai-2025-08-01.trace.json": 0,
}


@pytest.mark.data
def test_real_exports(data_dir):
    folder = data_dir / "formats" / "langfuse"
    found = {}
    for file in sorted(folder.iterdir()):
        (outcome,) = read_file(file, Companions(folder))
        assert not outcome.reason, (file, outcome.reason)
        (made,) = outcome.trajectories
        found[file.name] = len(made.steps)
        assert not any(step.unobserved or step.raw_arguments for step in made.steps)
    assert found == COUNTS
