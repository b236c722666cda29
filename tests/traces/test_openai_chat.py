"""Chat records: ids, groups, labels and metadata around the conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.readers.openai_chat import READER
from jaxguard.traces.registry import Context, RecordError

CONTEXT = Context(Path("runs/shop-bot.jsonl.gz"), 4)


def call(name, arguments, call_id):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}],
    }


CHAT = [
    {"role": "system", "content": "You sell shoes."},
    {"role": "user", "content": "Refund order 12."},
    call("get_order", '{"order": 12}', "a"),
    {"role": "tool", "tool_call_id": "a", "name": "get_order", "content": "paid"},
    call("refund", '{"order": 12', "b"),
    {"role": "tool", "tool_call_id": "b", "name": "refund", "content": "refunded"},
    {"role": "assistant", "content": "Refunded."},
]


def read(record, context=CONTEXT):
    (made,) = READER.read(record, context)
    return made


def test_a_benchmark_record():
    made = read({"task_id": 7, "trial": 2, "reward": 1.0, "info": {"user": "x"}, "traj": CHAT})
    assert made.id == "shop-bot:7:2"
    assert made.group == "shop-bot:7"
    assert made.instruction == "Refund order 12."
    assert [s.tool for s in made.steps] == ["get_order", "refund"]
    assert (made.steps[1].arguments, made.steps[1].raw_arguments) == (None, '{"order": 12')
    assert (made.unsafe, made.first_hazard, made.timing) == (None, None, False)
    assert made.final_observation == "refunded"
    assert made.metadata == {"task_id": 7, "trial": 2, "reward": 1.0, "final_reply": "Refunded."}
    assert made.source == "openai_chat"


@pytest.mark.parametrize(("label", "unsafe"), [(1, True), (0, False), (-1, None)])
def test_a_judged_record(label, unsafe):
    made = read({"id": 3, "instruction": "Refund order 12.", "output": CHAT, "pred_label": label, "pred_answer": "x"})
    assert made.id == "shop-bot:3"
    assert made.unsafe is unsafe
    assert made.timing is False
    assert made.metadata.get("label_source") == (None if unsafe is None else "judge model")
    assert "instruction" not in made.metadata


@pytest.mark.parametrize(
    "beside",
    [
        {"output": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        {"choices": [{"message": {"role": "assistant", "tool_calls": [{"id": "1"}]}}]},
        {"response": {"content": [{"type": "tool_use", "name": "wire"}]}},
        {"tool_calls": [{"id": "1"}]},
    ],
)
def test_calls_beside_the_messages_do_not_vanish(beside):
    with pytest.raises(RecordError, match="a call that is not among the messages of 'messages'"):
        read({"messages": CHAT, **beside})
    assert len(read({"messages": CHAT, "dialog": CHAT[:3]}).steps) == 2
    tools = {"tools": [{"type": "function", "function": {"name": "wire"}}], "info": {"tool_calls": []}}
    assert len(read({"messages": CHAT, **tools}).steps) == 2


def test_a_record_without_id_is_named_by_its_place():
    made = read({"messages": CHAT})
    assert made.id == "shop-bot:4"
    assert made.group == ""


def test_odd_conversations_are_noted():
    made = read({"messages": [*CHAT, {"role": "tool", "tool_call_id": "zzz", "content": "late"}]})
    assert made.metadata["notes"] == {"unmatched_results": 1}
    assert made.final_observation.endswith("late")


def test_a_record_of_another_shape_has_a_reason():
    with pytest.raises(RecordError, match="no chat messages in any of the fields messages, traj"):
        read({"text": "hello"})


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("tau_bench/gpt-4o-airline.jsonl", {"trajectories": 170, "steps": 1011, "unlabelled": 170, "renamed_ids": 0}),
        (
            "agent_safetybench/trajectories_gpt4omini.jsonl",
            {"trajectories": 88, "steps": 243, "unsafe": 67, "safe": 21, "without_steps": 4},
        ),
    ],
)
def test_real_sets(data_dir, tmp_path, name, counts):
    report = convert(data_dir / name, tmp_path)
    assert report.counts | counts == report.counts
    assert report.counts["rejected"] == report.counts["unparsable_arguments"] == report.counts["unobserved_calls"] == 0
    assert all(t.instruction for t in read_trajectories(tmp_path))
