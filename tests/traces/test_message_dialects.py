"""One small exchange in the notation of each framework."""

from __future__ import annotations

import json

import pytest

from jaxguard.traces.readers.calls import read_conversation
from jaxguard.traces.readers.message_dialects import messages_in, result_text, unwrap
from jaxguard.traces.registry import RecordError

ARGUMENTS = {"city": "Bern"}
TEXT = json.dumps(ARGUMENTS)
PAIR = {"id": "k1", "type": "function", "function": {"name": "rain", "arguments": TEXT}}
ASKED = {"role": "user", "content": "Will it rain?"}

DIALECTS = {
    "openai": [ASKED, {"role": "assistant", "content": None, "tool_calls": [PAIR]},
               {"role": "tool", "tool_call_id": "k1", "content": "no"}, {"role": "assistant", "content": "No."}],
    "responses": {"instructions": "Be brief.", "input": [
        ASKED, {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "id": "fc", "call_id": "k1", "name": "rain", "arguments": TEXT},
        {"type": "function_call_output", "call_id": "k1", "output": "no"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "No."}]}]},
    "anthropic": {"system": "Be brief.", "messages": [
        ASKED, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"},
                                                 {"type": "tool_use", "id": "k1", "name": "rain", "input": ARGUMENTS}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "k1",
                                      "content": [{"type": "text", "text": "no"}]}]},
        {"role": "assistant", "content": [{"type": "text", "text": "No."}]}]},
    "gemini": {"config": {"system_instruction": "Be brief."}, "contents": [
        {"role": "user", "parts": [{"text": "Will it rain?", "function_call": None}]},
        {"role": "model", "parts": [{"text": "hm", "thought": True},
                                    {"functionCall": {"name": "rain", "args": ARGUMENTS}}]},
        {"role": "user", "parts": [{"functionResponse": {"name": "rain", "response": {"result": "no"}}}]},
        {"role": "model", "parts": [{"text": "No."}]}]},
    "langchain": {"messages": [[
        {"type": "human", "content": "Will it rain?"},
        {"type": "ai", "content": "",
         "tool_calls": [{"name": "rain", "args": ARGUMENTS, "id": "k1", "type": "tool_call"}],
         "invalid_tool_calls": [], "additional_kwargs": {"tool_calls": [PAIR]}},
        {"type": "tool", "content": "no", "tool_call_id": "k1", "id": "m7"},
        {"type": "ai", "data": {"content": "No."}}]]},
    "vercel": {"messages": [
        ASKED, {"role": "assistant", "content": [
            {"type": "tool-call", "toolCallId": "k1", "toolName": "rain", "input": ARGUMENTS}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "k1", "toolName": "rain",
                                      "output": {"type": "text", "value": "no"}}]},
        {"role": "assistant", "content": "No."}]},
    "bedrock": {"messages": [
        {"role": "user", "content": [{"text": "Will it rain?"}]},
        {"role": "assistant", "content": [{"toolUse": {"toolUseId": "k1", "name": "rain", "input": ARGUMENTS}}]},
        {"role": "user", "content": [{"toolResult": {"toolUseId": "k1", "content": [{"text": "no"}]}}]},
        {"role": "assistant", "content": [{"text": "No."}]}]},
    "opentelemetry": [
        {"role": "user", "parts": [{"type": "text", "content": "Will it rain?"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "k1", "name": "rain", "arguments": ARGUMENTS}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "k1",
                                    "response": {"type": "function_result", "call_id": "k1", "result": "no"}}]},
        {"role": "assistant", "parts": [{"type": "text", "content": "No."}], "finish_reason": "stop"}],
    "pydantic-ai": [
        {"kind": "request", "parts": [{"part_kind": "system-prompt", "content": "Be brief."},
                                      {"part_kind": "user-prompt", "content": "Will it rain?"}]},
        {"kind": "response", "parts": [
            {"part_kind": "tool-call", "tool_name": "rain", "args": TEXT, "tool_call_id": "k1"}]},
        {"kind": "request", "parts": [
            {"part_kind": "tool-return", "tool_name": "rain", "content": "no", "tool_call_id": "k1"}]},
        {"kind": "response", "parts": [{"part_kind": "text", "content": "No."}]}],
    "koog": [ASKED, {"role": "tool", "content": json.dumps([PAIR])}, {"role": "tool", "content": "no"},
             {"role": "assistant", "content": "No."}],
    "agno": {"messages": [
        "role='user' content='Will it rain?' name=None tool_call_id=None tool_calls=None audio=None",
        f"role='assistant' content=None name=None tool_call_id=None tool_calls=[{PAIR!r}] audio=None images=None",
        "role='tool' content='no' name=None tool_call_id='k1' tool_calls=None audio=None",
        "role='assistant' content='No.' name=None tool_call_id=None tool_calls=None audio=None"]},
}  # fmt: skip


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("encodings", [0, 1, 2])
def test_dialects(name, encodings):
    payload = DIALECTS[name]
    for _ in range(encodings):
        payload = json.dumps(payload)
    made = read_conversation(messages_in(unwrap(payload), "user", "x"))
    assert made.instruction == "Will it rain?"
    assert [(s.tool, s.arguments, s.observation, s.unobserved) for s in made.steps] == [("rain", ARGUMENTS, "", False)]
    assert made.steps[0].call_id == ("call_0" if name == "gemini" else "k1")
    assert made.steps[0].thought == ("hm" if name in ("responses", "anthropic", "gemini") else "")
    assert (made.final_observation, made.final_reply, dict(made.notes)) == ("no", "No.", {})


CALL = [{"id": "k1", "type": "function", "function": {"name": "rain", "arguments": ARGUMENTS}}]


@pytest.mark.parametrize(
    "payload",
    [
        {"choices": [{"message": {"role": "assistant", "tool_calls": CALL}}]},
        {"generations": [[{"text": "", "message": {"kwargs": {"tool_calls": CALL}, "id": ["AIMessage"]}}]]},
        {"text": "", "toolCalls": json.dumps([{"toolCallId": "k1", "toolName": "rain", "args": ARGUMENTS}])},
        [{"toolCallId": "k1", "toolName": "rain", "input": ARGUMENTS}],
        {"type": "message", "role": "assistant", "content": [{"type": "tool_use", "id": "k1", "name": "rain",
                                                              "input": ARGUMENTS}]},
        {"output": [{"type": "function_call", "call_id": "k1", "name": "rain", "arguments": ARGUMENTS}]},
        {"output": {"message": {"role": "assistant", "tool_calls": CALL}}},
    ],
)  # fmt: skip
def test_responses(payload):
    (message,) = messages_in(payload, "assistant", "x")
    assert message["role"] == "assistant"
    assert message["tool_calls"] == CALL


def test_texts():
    assert messages_in("hello", "user", "x") == [{"role": "user", "content": "hello"}]
    assert messages_in({"question": "why?"}, "user", "x") == [{"role": "user", "content": "why?"}]
    assert messages_in([["system", "s"], ["human", "h"]], "user", "x") == [
        {"role": "system", "content": "s"}, {"role": "user", "content": "h"}]  # fmt: skip
    assert messages_in({"a": 1}, "user", "x", known_only=True) == []
    assert messages_in({"answer": 2}, "assistant", "x") == [{"role": "assistant", "content": [{"answer": 2}]}]
    for nothing in (None, "", [], {}, {"content": "role"}):
        assert messages_in(nothing, "user", "x") == []


def test_a_list_of_the_tools_that_there_are_is_no_result():
    tools = {"role": "tool", "content": {"type": "function", "function": {"name": "rain", "parameters": {}}}}
    assert messages_in([ASKED, tools], "user", "x") == [ASKED]


def test_code_that_gemini_runs_itself_is_a_call():
    parts = [{"executableCode": {"language": "PYTHON", "code": "1+1"}}, {"codeExecutionResult": {"output": "2"}}]
    (call,) = (
        m["tool_calls"] for m in messages_in({"role": "model", "parts": parts}, "assistant", "x") if "tool_calls" in m
    )
    assert call[0]["function"]["arguments"]["code"] == "1+1"


@pytest.mark.parametrize("payload", [
    [{"type": "mcp_call", "name": "f"}], {"role": "assistant", "content": [{"type": "server_tool_use", "name": "f"}]},
    {"role": "assistant", "actionToolCalls": [1]},
])  # fmt: skip
def test_other_notations_are_refused(payload):
    with pytest.raises(RecordError, match="is not read"):
        messages_in(payload, "assistant", "x")


@pytest.mark.parametrize(
    ("value", "text"),
    [("a", "a"), (None, ""), ({"output": "a"}, "a"), ({"content": [{"type": "text", "text": "a"}]}, "a"), ([1], "[1]"),
     ({"type": "tool", "content": "a"}, "a"), ({"temperature": 3}, '{"temperature": 3}')],
)  # fmt: skip
def test_results(value, text):
    assert result_text(value) == text


def test_json_that_cannot_be_carried_on_stays_text():
    for text in ('{"a": 1, "a": 2}', "[" * 300 + "]" * 300, "{broken", '"open'):
        assert unwrap(text) == text
