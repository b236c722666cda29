"""The pre-action rule at the level of text: what comes after a call cannot change what a score of it reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from review_samples import agentharm, toolemu, toolemu_call, when2call

from jaxguard.traces.readers import agentdojo, openai_chat
from jaxguard.traces.registry import Context, RecordError, reader_named
from jaxguard.traces.snapshots import snapshot

WORDS = "alpha beta gamma delta <think>epsilon</think> [user] {}".split()  # noqa: SIM905


def message(rng: random.Random) -> dict:
    """Any message, also such as no sane log holds: answers out of order, unknown ids, empty texts."""
    text = " ".join(rng.choices(WORDS, k=rng.randrange(4)))
    content = rng.choice([text, None, [{"type": "text", "content": text}], [{"type": "thinking", "content": text}]])
    role = rng.choice(["assistant", "assistant", "assistant", "tool", "tool", "user", "system"])
    made: dict = {"role": role, "content": content}
    ids = ["a", "b", "c", "d"]
    if role == "assistant":
        made["tool_calls"] = [
            {"id": rng.choice(ids), "function": {"name": rng.choice(WORDS), "arguments": rng.choice(["", "{}", "{x"])}}
            for _ in range(rng.choice([0, 0, 1, 1, 2]))
        ]
    if role == "tool":
        made |= {"tool_call_id": rng.choice([*ids, None]), "error": rng.choice([None, None, "E"])}
    return made


def readable(steps, instruction) -> list[tuple]:
    """All that a score may read, step by step."""
    return [(instruction, s.observation, s.tool, s.arguments, s.raw_arguments, s.call_id, s.parallel) for s in steps]


def chat(messages: list[dict], rng: random.Random):
    return openai_chat.READER, {"messages": messages, "id": "x"}


def dojo(messages: list[dict], rng: random.Random):
    record = {
        "suite_name": "s",
        "pipeline_name": "p",
        "user_task_id": "user_task_1",
        "injection_task_id": "injection_task_1",
        "attack_type": "a",
        # Outcomes are known only after the run, so they may not show in any text.
        "security": rng.random() < 0.5,
        "utility": rng.random() < 0.5,
        "messages": messages,
    }
    return agentdojo.READER, record


@pytest.mark.parametrize("shape", [chat, dojo])
def test_nothing_after_a_call_changes_what_its_score_reads(shape):
    rng = random.Random(7)
    context = Context(Path("x.jsonl"), 0)
    compared = 0
    for _ in range(400):
        head = [{"role": "user", "content": "go"}] if rng.random() < 0.8 else [{"role": "system", "content": "sys"}]
        head += [message(rng) for _ in range(rng.randrange(1, 8))]
        # Cut right after a message of calls: its steps are the last whose scores the head may decide.
        while head and not head[-1].get("tool_calls"):
            head.pop()
        if not head:
            continue
        try:
            reader, record = shape(head, rng)
            (before,) = reader.read(record, context)
        except RecordError:
            continue  # no instruction before the first call
        for _ in range(3):
            tail = [message(rng) for _ in range(rng.randrange(6))]
            reader, record = shape(head + tail, rng)
            (after,) = reader.read(record, context)
            count = len(before.steps)
            assert readable(after.steps[:count], after.instruction) == readable(before.steps, before.instruction)
            compared += count
    assert compared > 1000


def test_the_thought_is_the_only_field_that_holds_private_text():
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "<think>PRIVATE</think>", "tool_calls": None},
        {"role": "user", "content": "and?"},
        {
            "role": "assistant",
            "content": "PRIVATE too",
            "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "ok"},
    ]
    (made,) = openai_chat.READER.read({"messages": messages}, Context(Path("x"), 0))
    assert "PRIVATE" in made.steps[0].thought
    assert "PRIVATE" not in repr([readable(made.steps, made.instruction), made.final_observation])


def emulated(rng: random.Random) -> list:
    """An entry of a ToolEmu run: a call, perhaps with made-up text behind it, and its result."""
    tool, result = rng.choice("abc"), " ".join(rng.choices(WORDS, k=rng.randrange(3)))
    log = rng.choice([None, f"Action: {tool}\nAction Input: {{}}\nObservation: {result}", result])
    return toolemu_call(tool, rng.choice(["{}", '{"x": 1}\n', "{x"]), result, log)


def test_nothing_after_a_call_of_an_emulated_run_changes_what_its_score_reads():
    """Neither its own result nor the closing text, the judge's and the emulator's words, or what the case says."""
    rng = random.Random(7)
    reader, context = reader_named("toolemu"), Context(Path("x.jsonl"), 0)
    compared = 0
    for _ in range(100):
        calls = [emulated(rng) for _ in range(rng.randrange(1, 5))]
        (before,) = reader.read(toolemu(*calls, score="0"), context)
        last = [calls[-1][0], ["another result", "E", "E"]]
        tail = [emulated(rng) for _ in range(rng.randrange(4))]
        words = dict.fromkeys(("underspecifications", "risky_outcome", "risky_actions", "output"), "W")
        changed = toolemu(*calls[:-1], last, *tail, score=rng.choice("123"), closing="Other.", **words)
        (after,) = reader.read(changed, context)
        count = len(calls)
        assert readable(after.steps[:count], after.instruction) == readable(before.steps, before.instruction)
        assert [snapshot(after, t) for t in range(count)] == [snapshot(before, t) for t in range(count)]
        compared += count
    assert compared > 200


@pytest.mark.parametrize(
    ("name", "record", "changes"),
    [
        ("when2call", when2call(), {"correct_answer": "request_for_info", "target_tool": None, "held_out_param": "x"}),
        ("when2call", when2call(), {"answers": {"tool_call": when2call()["answers"]["tool_call"], "direct": "Other"}}),
        ("agentharm", agentharm(), {"benign": True, "name": "N", "category": "C", "grading_function": "g"}),
        ("agentharm", agentharm(), {"target_functions": ["draw_flyer", "another"]}),
    ],
)
def test_a_label_and_what_it_was_made_from_show_in_no_text(name, record, changes):
    context = Context(Path("x.jsonl"), 0)
    (before,), (after,) = (reader_named(name).read(own, context) for own in (record, record | changes))
    assert readable(after.steps, after.instruction) == readable(before.steps, before.instruction)
    assert snapshot(after, 0).to_json() == snapshot(before, 0).to_json()
