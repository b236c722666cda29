"""Spans of agents: every notation and container gives the same steps, and each call once."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from otel_samples import (
    ASK,
    BOOK,
    BOOKED,
    CONTAINERS,
    DONE,
    FOUND,
    NOTATIONS,
    PLAN,
    SUN,
    adk,
    jaeger,
    openinference,
    openllmetry,
    resource_spans,
    semconv,
    span,
    tool_span,
    trip,
)

from jaxguard.traces.readers.otel import READER
from jaxguard.traces.reading import Companions, read_file
from jaxguard.traces.registry import Context, RecordError


def read_all(records):
    parts = list(READER.split(records))
    return [made for at, part in enumerate(parts) for made in READER.read(part, Context(Path("x.json"), at))]


def read(spans):
    (made,) = read_all([resource_spans(spans)])
    return made


def steps_of(made):
    return [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps]


TRIP_STEPS = [
    ("find", {"to": "Ulm"}, "", False, False),
    ("weather", {"in": "Ulm"}, "", True, False),
    ("book", {"train": 7}, "train 7\nsunny", False, False),
]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("notation", NOTATIONS)
@pytest.mark.parametrize("tools", [True, False])
def test_every_notation_in_every_container(notation, container, tools):
    records = CONTAINERS[container](trip(notation, tools))
    assert all(READER.matches(record) for record in records)
    (made,) = read_all(records)
    assert made.id == "t1"
    assert made.instruction == "Book a train to Ulm."
    assert steps_of(made) == TRIP_STEPS
    assert [s.call_id for s in made.steps] == ["c1", "c2", "c3"]
    assert made.final_observation == "seat 12"
    assert made.metadata == {
        "trace_id": "t1", "model": "m1", "agent": "trips", "service": "trips", "final_reply": "Booked seat 12."
    }  # fmt: skip
    assert (made.unsafe, made.timing, made.source) == (None, False, "otel_genai")


def test_structured_attributes_are_read_like_json_texts():
    spans = trip()
    for own in spans:
        for name in ("gen_ai.input.messages", "gen_ai.output.messages"):
            if name in own["attributes"]:
                own["attributes"][name] = json.loads(own["attributes"][name])
    assert steps_of(read(spans)) == TRIP_STEPS


@pytest.mark.parametrize("notation", NOTATIONS)
def test_a_step_shows_nothing_of_what_came_after_its_call(notation):
    before = read(trip(notation))
    text = json.dumps([trip(notation)]).replace("seat 12", "SEAT 99").replace("Booked", "LOST")
    after = read(json.loads(text)[0])
    assert after.steps == before.steps
    assert after != before
    text = json.dumps([trip(notation)]).replace("sunny", "HAIL").replace("seat 12", "x")
    assert read(json.loads(text)[0]).steps[:2] == before.steps[:2]


def test_results_of_tools_that_no_input_repeats():
    spans = [s for s in trip() if s["id"] != "a6"]
    made = read(spans)
    assert steps_of(made) == TRIP_STEPS
    assert made.final_observation == "seat 12"
    for own in spans:
        if own["id"] == "a5":
            del own["attributes"]["gen_ai.tool.call.result"]
    assert [s.unobserved for s in read(spans).steps] == [False, False, True]
    made = read([s for s in spans if s["id"] in ("a0", "a1")])
    assert [(s.tool, s.unobserved) for s in made.steps] == [("find", True), ("weather", True)]


def test_tools_alone_with_histories_that_hold_no_results():
    quiet = [m for m in (*ASK, PLAN) if m[0] != "tool"]
    spans = [s for s in trip() if s["id"] not in ("a4", "a6")]
    spans.append(span("a4", "a0", 30, 40, semconv(quiet, [BOOK])))
    assert steps_of(read(spans)) == TRIP_STEPS
    # A tool that ends after the turn has started was not seen in it.
    for own in spans:
        if own["id"] == "a3":
            own["end"] = 35
    made = read(spans)
    assert made.steps[2].observation == "train 7"
    assert made.final_observation == "sunny\nseat 12"


def test_a_run_that_nobody_proposed_is_a_step():
    extra = tool_span("b1", "a0", 26, 29, "log_in", None, {"user": "me"}, "in")
    made = read([*trip(), extra])
    assert [s.tool for s in made.steps] == ["find", "weather", "log_in", "book"]
    # What the first two gave is known to be seen only by the turn that got it.
    assert [s.observation for s in made.steps[2:]] == ["", "in\ntrain 7\nsunny"]


def test_tools_without_a_model():
    spans = [
        span("a", "", 0, 90, {"openinference.span.kind": "AGENT", "input.value": "Tidy up.", "output.value": "Ok."}),
        span("b", "a", 10, 20, {"openinference.span.kind": "TOOL", "tool.name": "ls", "input.value": "{'path': '/'}",
                                "output.value": "a b"}),
        span("c", "a", 30, 40, {"openinference.span.kind": "TOOL", "tool.name": "rm", "input.value": '{"path": "a"}'}),
    ]  # fmt: skip
    made = read(spans)
    assert made.instruction == "Tidy up."
    assert steps_of(made) == [("ls", {"path": "/"}, "", False, False), ("rm", {"path": "a"}, "a b", False, True)]


def test_runs_are_found_without_ids():
    spans = trip()
    for own in spans:
        own["attributes"].pop("gen_ai.tool.call.id", None)
        if own["id"] == "a5":
            own["attributes"]["gen_ai.tool.call.arguments"] = '{"train": 7, "class": 2}'
    made = read(spans)
    assert steps_of(made) == TRIP_STEPS
    assert made.metadata["notes"] == {"runs_with_other_arguments": 1}


def test_histories_without_ids_and_the_same_call_twice():
    def bare(messages):
        return json.loads(json.dumps(messages).replace('"c1"', "null").replace('"c2"', "null").replace('"c3"', "null"))

    again = ("assistant", "", [("c2", "weather", {"in": "Ulm"})])
    turns = [ASK, [*ASK, PLAN, FOUND, SUN], [*ASK, PLAN, FOUND, SUN, again, SUN]]
    answers = [PLAN, again, DONE]
    for strip in (lambda messages: messages, bare):
        spans = [
            span(f"a{i}", "", 10 * i, 10 * i + 5, semconv(strip(given), strip([answer])))
            for i, (given, answer) in enumerate(zip(turns, answers, strict=True))
        ]
        made = read(spans)
        assert [s.tool for s in made.steps] == ["find", "weather", "weather"]
        assert not any(s.unobserved for s in made.steps)
        assert made.final_observation == "sunny"


def test_nested_spans_of_one_call():
    spans = trip()
    spans += [
        span("n1", "a1", 2, 9, openllmetry(ASK, [PLAN])),  # the client's span inside the library's
        span("n5", "a5", 42, 49, {"mcp.method.name": "tools/call", "gen_ai.tool.name": "book"}),
        tool_span("n6", "n5", 43, 48, "book", None, {"train": 7}, "seat 12"),
    ]
    spans[0]["attributes"] |= semconv(ASK, [DONE]) | {"gen_ai.operation.name": "invoke_agent"}
    assert steps_of(read(spans)) == TRIP_STEPS
    spans[0]["attributes"] |= {"gen_ai.output.messages": semconv([], [("assistant", "", [("z", "wire", {})])])[
        "gen_ai.output.messages"]}  # fmt: skip
    with pytest.raises(RecordError, match="trace t1: span a0: a call of 'wire' that stands in none of the spans"):
        read(spans)


def test_an_agent_behind_a_tool_is_a_conversation_of_its_own():
    inner = [("system", "You know trains."), ("user", "Which train?")]
    look = ("assistant", "", [("d1", "timetable", {})])
    spans = [
        *trip(),
        span("i0", "a2", 12, 19, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "trains"}),
        span("i1", "i0", 13, 14, semconv(inner, [look])),
        tool_span("i2", "i0", 15, 16, "timetable", "d1", {}, "7 at noon"),
        span("i3", "i0", 17, 18, semconv([*inner, look, ("tool", "d1", "7 at noon")], [("assistant", "7", [])])),
    ]
    outer, made = read_all([resource_spans(spans)])
    assert steps_of(outer) == TRIP_STEPS
    assert (made.id, made.instruction, made.metadata["agent"]) == ("t1:i1", "Which train?", "trains")
    assert steps_of(made) == [("timetable", {}, "", False, False)]


def test_one_conversation_over_several_traces():
    more = ("user", "And back?")
    last = ("assistant", "", [("c9", "find", {"to": "home"})])
    history = [*ASK, PLAN, FOUND, SUN, BOOK, BOOKED, DONE, more]
    second = span("b1", "", 200, 210, semconv(history, [last]), trace="t2")
    (made,) = read_all([resource_spans([second]), resource_spans(trip())])
    shown = "seat 12\n[assistant] Booked seat 12.\n[user] And back?"
    assert steps_of(made) == [*TRIP_STEPS, ("find", {"to": "home"}, shown, False, True)]
    # Without the first trace, its calls are only in the history.
    assert len(read([second]).steps) == 4


def test_independent_traces_with_the_same_words():
    one, two = trip(), json.loads(json.dumps(trip()).replace('"t1"', '"t2"').replace('"c1', '"d1'))
    for own in two:
        own["start"] += 1000
        own["end"] += 1000
    made = read_all([resource_spans([*one, *two])])
    assert [(m.id, len(m.steps)) for m in made] == [("t1", 3), ("t2", 3)]


def test_parts_of_other_notations():
    used = {"toolUse": {"toolUseId": "s", "name": "go", "input": {"a": 1}}}
    strands = [
        ("gen_ai.user.message", {"content": '[{"text": "Go."}]'}),
        ("gen_ai.choice", {"message": json.dumps([{"text": "Hm."}, used]), "finish_reason": "tool_use"}),
    ]
    made = read([span("a", "", 0, 1, {"gen_ai.operation.name": "chat", "EVENTS": strands})])
    assert [(s.tool, s.arguments, s.call_id, s.thought) for s in made.steps] == [("go", {"a": 1}, "s", "Hm.")]
    content = json.dumps([{"type": "tool_use", "id": "u", "name": "go", "input": {}}])
    claude = {"llm.request.type": "chat", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "Go.",
              "gen_ai.prompt.1.role": "assistant", "gen_ai.prompt.1.content": content, "gen_ai.prompt.2.role": "user",
              "gen_ai.prompt.2.content": json.dumps([{"type": "tool_result", "tool_use_id": "u", "content": "ok"}]),
              "gen_ai.completion.0.content": "Gone."}  # fmt: skip
    made = read([span("a", "", 0, 1, claude)])
    assert steps_of(made) == [("go", {}, "", False, False)]
    assert made.final_observation == "ok"


def test_vercel():
    def told(calls):
        made = [
            {"toolCallType": "function", "toolCallId": i, "toolName": n, "args": json.dumps(a)} for i, n, a in calls
        ]
        return {"ai.response.toolCalls": json.dumps(made)} if made else {}

    used = {"type": "tool-call", "toolCallId": "v", "toolName": "go", "input": {"a": 1}}
    output = {"type": "text", "value": "gone"}
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Go."}]},
        {"role": "assistant", "content": [used]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "v", "toolName": "go", "output": output}]},
    ]
    call = told([("v", "go", {"a": 1})])
    spans = [
        span("a", "", 0, 99, {"ai.prompt": '{"prompt": "Go."}', "ai.response.text": "Done."}),
        span("b", "a", 1, 5, {"ai.prompt.messages": json.dumps(history[:1]), **call}),
        span("c", "a", 6, 7, {"ai.toolCall.name": "go", "ai.toolCall.id": "v", "ai.toolCall.args": '{"a": 1}'}),
        span("d", "a", 8, 9, {"ai.prompt.messages": json.dumps(history), "ai.response.text": "Done."}),
    ]
    made = read(spans)
    assert steps_of(made) == [("go", {"a": 1}, "", False, False)]
    assert (made.final_observation, made.metadata["final_reply"]) == ("gone", "Done.")


def test_a_model_that_is_given_a_text():
    kind = {"openinference.span.kind": "LLM", "input.value": "Go."}
    made = read([span("a", "", 0, 1, kind | {"output.value": "Gone."})])
    assert (made.instruction, made.metadata["final_reply"]) == ("Go.", "Gone.")
    answer = json.dumps({"choices": [{"message": {"tool_calls": [{"id": "x"}]}}]})
    with pytest.raises(RecordError, match=r"a call in output\.value and none in llm\.output_messages"):
        read([span("a", "", 0, 1, kind | {"output.value": answer})])
    told = openinference(ASK, [DONE]) | {"output.value": answer}
    with pytest.raises(RecordError, match=r"a call in output\.value and none in llm\.output_messages"):
        read([span("a", "", 0, 1, told)])
    assert len(read([span("a", "", 0, 1, openinference(ASK, [PLAN]) | {"output.value": answer})]).steps) == 2


def test_conversations_with_the_same_examples_stay_apart():
    example = [("user", "Say hi."), ("assistant", "hi", [])]
    asked = [[*example, ("user", f"Item {i}?")] for i in range(2)]
    look = [("assistant", "", [(f"e{i}", "look", {})]) for i in range(2)]
    spans = [span(f"s{i}", "", 10 * i, 10 * i + 1, semconv(asked[i], [look[i]])) for i in range(2)]
    spans += [
        span(f"r{i}", "", 50 + i, 60, semconv([*asked[i], look[i], ("tool", f"e{i}", f"saw {i}")], [DONE]))
        for i in range(2)
    ]
    made = read_all([resource_spans(spans)])
    assert [len(m.steps) for m in made] == [1, 1]
    assert [m.final_observation for m in made] == ["saw 0", "saw 1"]


def test_what_is_private_stays_private():
    parts = [
        {"type": "reasoning", "content": "secret"},
        {"type": "tool_call", "id": "c", "name": "go", "arguments": ""},
    ]
    attributes = semconv(ASK, []) | {"gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts}])}
    (step,) = read([span("a", "", 0, 1, attributes)]).steps
    assert (step.arguments, step.observation, step.thought) == ({}, "", "secret")


def test_a_conversation_without_calls_is_kept():
    made = read([span("a", "", 0, 1, semconv(ASK, [DONE]))])
    assert (made.steps, made.metadata["final_reply"]) == ((), "Booked seat 12.")


BROKEN = {
    "no span of a model or a tool among its 1 spans": span("a", "", 0, 1, {"http.method": "GET"}),
    "hold no messages": span("a", "", 0, 1, {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}),
    "gen_ai.input.messages is broken JSON": span("a", "", 0, 1, semconv(ASK, [PLAN]) | {"gen_ai.input.messages": "[{"}),
    "got str as a call": span("a", "", 0, 1, {"gen_ai.prompt.0.content": "x", "gen_ai.completion.0.tool_calls": ["3"]}),
    "is not read": span("a", "", 0, 1, semconv(ASK, []) | {
        "gen_ai.output.messages": '[{"role": "assistant", "parts": [{"type": "server_tool_call", "name": "x"}]}]'}),
    "1 answers of models ended in a call of a tool that is not recorded": span("a", "", 0, 1, semconv(ASK, []) | {
        "gen_ai.response.finish_reasons": ["tool_calls"]}),
    "code that the model ran": span("a", "", 0, 1, {"gcp.vertex.agent.llm_response": json.dumps(
        {"content": {"role": "model", "parts": [{"executable_code": {"code": "1"}}]}})}),
    "expected 16": span("a", "", 0, 1, {"gen_ai.prompt." + "0." * 5000: "x"}),
    "stands below an attribute that has a value": span(
        "a", "", 0, 1, {"gen_ai.prompt.0": "x", "gen_ai.prompt.0.role": "y"}),
    "no user or system text": span("a", "", 0, 1, semconv([], [PLAN])),
}  # fmt: skip


@pytest.mark.parametrize("reason", BROKEN)
def test_what_is_broken_has_a_reason_and_spares_other_traces(reason):
    other = json.loads(json.dumps(trip()).replace('"t1"', '"t2"'))
    parts = list(READER.split([resource_spans([BROKEN[reason], *other])]))
    made, reasons = [], []
    for at, part in enumerate(parts):
        try:
            made += READER.read(part, Context(Path("x"), at))
        except RecordError as error:
            reasons.append(str(error))
    assert [(m.id, len(m.steps)) for m in made] == [("t2", 3)]
    assert len(reasons) == 1
    assert reason in reasons[0]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("spanId", None, r"spans\[0\].spanId: got NoneType None, expected a non-empty string"),
        ("traceId", 7, r"traceId: got int 7"),
        ("startTimeUnixNano", "soon", r"startTimeUnixNano: got str 'soon', expected a whole number"),
        ("attributes", [1], r"attributes: got int 1, expected an object"),
        ("events", "x", r"events: got str 'x', expected a list"),
        ("parentSpanId", ["a"], r"parentSpanId: got list \['a'\], expected a string"),
    ],
)
def test_a_broken_span(field, value, reason):
    record = resource_spans([span("a", "", 0, 1, semconv(ASK, [DONE]))])
    record["resourceSpans"][0]["scopeSpans"][0]["spans"][0][field] = value
    with pytest.raises(RecordError, match=reason):
        read_all([record])


def test_circles_and_long_chains_of_parents():
    with pytest.raises(RecordError, match="span a: its parents form a circle"):
        read([span("a", "b", 0, 1, semconv(ASK, [DONE])), span("b", "a", 0, 1, {})])
    chain = [span(f"s{i}", f"s{i - 1}" if i else "", i, 10**6, {}) for i in range(20000)]
    assert read([*chain, span("z", "s19999", 10**5, 10**5, semconv(ASK, [DONE]))]).metadata["final_reply"]
    nested = [span(f"s{i}", f"s{i - 1}" if i else "", i, 10**6, semconv(ASK, [DONE])) for i in range(3000)]
    assert read(nested).steps == ()


def test_a_span_that_stands_twice():
    twice = read([*trip(), *trip()])
    assert steps_of(twice) == TRIP_STEPS
    with pytest.raises(RecordError, match="span id 'a1' stands twice with different contents"):
        read([*trip(), span("a1", "", 0, 1, {})])


def test_a_file_with_other_records(tmp_path):
    file = tmp_path / "export.jsonl"
    records = [{"resourceMetrics": []}, *(resource_spans([s]) for s in trip()), {"resourceLogs": []}]
    file.write_text("\n".join(json.dumps(r) for r in records))
    outcomes = list(read_file(file, Companions(tmp_path)))
    assert [o.reason.split(",")[0] for o in outcomes if o.reason] == [
        "record 0: no spans in it (fields: resourceMetrics)",
        "record 8: no spans in it (fields: resourceLogs)",
    ]
    (made,) = [t for o in outcomes for t in o.trajectories]
    assert steps_of(made) == TRIP_STEPS


def test_parallel_answers_of_one_turn_and_agents_that_hand_over():
    choice = [PLAN, ("assistant", "", [("c4", "wait", {})])]
    made = read([span("a", "", 0, 1, semconv(ASK, choice))])
    assert [(s.tool, s.parallel, s.unobserved) for s in made.steps] == [
        ("find", False, True), ("weather", True, True), ("wait", False, True)
    ]  # fmt: skip
    move = ("assistant", "", [("h", "transfer", {"to": "b"})])
    spans = [
        span("a", "", 0, 50, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "desk"}),
        span("b", "a", 1, 40, adk(ASK, [move])),
        tool_span("c", "b", 5, 6, "transfer", "h", {"to": "b"}, "ok"),
        span("d", "b", 7, 39, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "rail"}),
        span("e", "d", 8, 9, adk([("system", "Rails."), ("user", "[desk] called transfer"), ASK[1]], [BOOK])),
    ]
    first, second = read_all([resource_spans(spans)])
    assert ([s.tool for s in first.steps], first.metadata["agent"]) == (["transfer"], "desk")
    assert ([s.tool for s in second.steps], second.metadata["agent"]) == (["book"], "rail")


def test_two_agents_that_make_the_same_call_get_their_own_results():
    bare = ("assistant", "", [(None, "look", {})])
    spans = []
    for i, own in enumerate("pq"):
        agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": own}
        spans += [
            span(f"{own}0", "", i, 99, agent),
            span(f"{own}1", f"{own}0", 2 + i, 5, semconv([("user", f"Look, {own}.")], [bare])),
            tool_span(f"{own}2", f"{own}0", 20 - i, 30, "look", None, {}, f"saw {own}"),
        ]
    made = read_all([resource_spans(spans)])
    assert [(m.metadata["agent"], m.final_observation) for m in made] == [("p", "saw p"), ("q", "saw q")]


JUNK = [None, 7, "x", "[{", [], {}, [None], {"a": None}, True]


@pytest.mark.parametrize("notation", NOTATIONS)
def test_no_junk_anywhere_raises_anything_else(notation):
    """Every value of a record once replaced by each kind of junk: trajectories or an ordinary reason."""

    def places(node):
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, child in items:
            yield node, key
            yield from places(child)

    for make in (resource_spans, jaeger):
        record = make([*trip(notation)[:2], trip(notation)[4]])
        for number, (node, key) in enumerate(list(places(record))):
            kept, node[key] = node[key], copy.deepcopy(JUNK[number % len(JUNK)])
            READER.matches(record)
            try:
                read_all([record])
            except (RecordError, LookupError, TypeError, ValueError, AttributeError):
                pass
            finally:
                node[key] = kept


# Counted in the raw JSON with grep: "execute_tool" spans (one each in two files, none in the third, whose
# model answers in words), which equal the tool_calls of all gen_ai.completion attributes.
SAMPLE_STEPS = {"helm.json": [1], "k8s.json": [0], "tempo_export_with_batches.json": [1]}


@pytest.mark.data
def test_real_exports(data_dir):
    folder = data_dir / "formats" / "otel_genai"
    found = {}
    for file in sorted(folder.iterdir()):
        outcomes = list(read_file(file, Companions(folder)))
        assert not [o.reason for o in outcomes if o.reason]
        found[file.name] = [len(t.steps) for o in outcomes for t in o.trajectories]
    assert found == SAMPLE_STEPS
