"""Names and detection; no record of one format looks like another."""

from __future__ import annotations

import pytest
from review_samples import LOOK, agentharm, toolemu, when2call

from jaxguard.traces.files import Parsed, has_trace_name, read_records
from jaxguard.traces.registry import Reader, RecordError, all_readers, detect, format_names, reader_named
from jaxguard.types import JaxguardError

CHAT = [{"role": "user", "content": "hi"}]
SAMPLES = {
    "jaxguard": [{"jaxguard": 1, "id": "x", "instruction": "do", "steps": []}],
    "agentdojo": [
        {"suite_name": "bank", "pipeline_name": "m", "user_task_id": "user_task_0", "messages": CHAT},
        {"suite_name": "bank", "pipeline_name": "m", "user_task_id": "user_task_0", "conversations": CHAT},
    ],
    "atif": [
        {"schema_version": "ATIF-v1.2", "agent": {"name": "a", "version": "1"}, "steps": []},
        {"schema_version": "ATIF-v1.8", "trajectory_id": "t", "agent": {}, "steps": [{"step_id": 1}]},
    ],
    "inspect_ai": [
        {"version": 2, "status": "success", "eval": {"task": "t", "model": "m", "config": {}}, "samples": []},
        {"status": "error", "eval": {"task": "t", "model": "m", "config": {}, "dataset": {}}, "plan": {}},
    ],
    "inspect_sample": [{"inspect_sample": {"id": 1, "messages": CHAT}, "inspect_log": {"task": "t"}}],
    "sharegpt": [{"conversations": [{"from": "human", "value": "hi"}]}],
    "otel_genai": [
        {"resourceSpans": [{"scopeSpans": [{"spans": []}]}]},
        {"trace": {"resourceSpans": []}},
        {"batches": [{"instrumentationLibrarySpans": []}]},
        {"data": [{"traceID": "a1", "spans": [], "processes": {}}]},
    ],
    "langfuse": [
        {"trace": {"id": "t"}, "observations": [{"id": "o", "traceId": "t", "type": "SPAN", "startTime": "x"}]},
        {
            "id": "t",
            "timestamp": "x",
            "output": CHAT,
            "observations": [{"type": "X", "startTime": "x", "traceId": "t"}],
        },
    ],
    "langsmith": [
        {"post": [{"id": "r", "run_type": "llm", "trace_id": "r", "inputs": {"messages": CHAT}}], "patch": []},
        {"patch": [{"dotted_order": "20260301T100000000000Zr", "outputs": {}}]},
        {"runs": [{"id": "r", "run_type": "chain", "parent_run_id": None}]},
        {"id": "r", "run_type": "tool", "dotted_order": "20260301T100000000000Zr"},
    ],
    "openai_chat": [{"messages": CHAT}, {"traj": CHAT, "task_id": 3}, {"output": CHAT, "id": 1}],
    "openai_responses": [
        {"object": "response", "id": "r", "output": [{"type": "message", "role": "assistant", "content": []}]},
        {"request": {"input": "hi"}, "response": {"object": "response", "output": []}},
        {"messages": [CHAT[0], {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}]},
        {"input": "hi", "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text"}]}]},
    ],
    "codex": [
        {"type": "session_meta", "payload": {"id": "s"}},
        {"type": "response_item", "payload": {"type": "message", "role": "user", "content": []}},
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"},
        {"session": {"id": "s"}, "items": [{"type": "message", "role": "user", "content": [{"type": "input_text"}]}]},
    ],
    "managed_agents": [
        {"array": ["client.beta.sessions.create", {"type": "session", "id": "s"}]},
        {"type": "user.message", "content": [{"type": "text", "text": "hi"}], "id": "e"},
        {"data": [{"type": "agent.tool_use", "name": "f", "input": {}}], "has_more": False},
    ],
    "mcp": [
        {"seq": 0, "dir": "c2s", "msg": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "f"}}},
        {"dir": "s2c", "msg": [{"jsonrpc": "2.0", "id": 1, "result": {}}]},
        {"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "x"}},
    ],
    "claude_code": [
        {"type": "user", "parentUuid": None, "sessionId": "s", "uuid": "u", "message": CHAT[0]},
        {"type": "assistant", "session_id": "s", "message": {"role": "assistant", "content": []}},
    ],
    "when2call": [when2call(right) for right in ("tool_call", "request_for_info", "cannot_answer")],
    "toolemu": [toolemu(LOOK), toolemu()],
    "agentharm": [agentharm(True), agentharm(False)],
}


@pytest.mark.parametrize(("name", "record"), [(name, record) for name, rows in SAMPLES.items() for record in rows])
def test_detection(name, record):
    found = detect(record)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "record",
    [{}, {"a": 1}, {"messages": []}, {"messages": ["text"]}, {"messages": None}, {"output": "text"}, {"traj": [{}]},
     {"resourceSpans": {}}, {"trace": []}, {"trace": {"resourceSpans": 1}}, {"batches": [1]}, {"data": [{"spans": []}]},
     {"messages": [{"role": ["user"]}]}, {"suite_name": 1, "user_task_id": 2, "pipeline_name": 3, "messages": "x"}],
)  # fmt: skip
def test_nothing_is_recognised_and_no_matcher_raises(record):
    assert detect(record) is None


def test_names():
    names = format_names()
    assert len(names) == len(set(names))
    for name in names:
        assert reader_named(name).name == name
    with pytest.raises(JaxguardError, match=r"format: got 'nope', expected one of jaxguard, "):
        reader_named("nope")


def test_an_ambiguous_record_names_its_formats(monkeypatch):
    twins = tuple(Reader(name, "", lambda record: True, lambda record, context: []) for name in ("one", "two"))
    monkeypatch.setattr("jaxguard.traces.registry.all_readers", lambda: twins)
    with pytest.raises(RecordError, match=r"several formats \(one, two\)"):
        detect({"a": 1})


@pytest.mark.data
def test_matchers_exclude_each_other_on_real_files(data_dir):
    """Of every file's first records, at most one reader wants each, and all want the same reader."""
    recognised = set()
    for file in sorted(data_dir.rglob("*")):
        if not file.is_file() or not has_trace_name(file.name):
            continue
        names = set()
        for item, _ in zip(read_records(file), range(50), strict=False):
            if isinstance(item, Parsed):
                found = [reader.name for reader in all_readers() if reader.matches(item.record)]
                assert len(found) <= 1, (file, item.position, found)
                names.update(found)
        assert len(names) <= 1, (file, names)
        recognised |= names
    assert recognised >= {"stepshield", "asb", "agentdojo", "asse_security", "r_judge", "atbench", "openai_chat"}
    assert recognised >= {"when2call", "toolemu", "agentharm"}
