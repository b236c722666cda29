"""ShareGPT turns: calls as turns and in tags; what might hold calls in words is not taken for a chat without any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxguard.traces.readers.sharegpt import READER
from jaxguard.traces.registry import Context, RecordError

CONTEXT = Context(Path("garden.parquet"), 3)


def turns(*pairs):
    return [{"from": speaker, "value": text} for speaker, text in pairs]


def read(record):
    (made,) = READER.read(record, CONTEXT)
    return made


POUR = json.dumps({"name": "pour", "arguments": {"litres": 2}})
LOOK = json.dumps({"name": "look", "arguments": '{"at": "roses"}'})


def test_turns_of_calls():
    made = read(
        {
            "id": 9,
            "system": "You tend a garden.",
            "conversations": turns(
                ("human", "Water the roses."),
                ("function_call", LOOK),
                ("observation", "dry"),
                ("function_call", f"[{POUR}, {LOOK}]"),
                ("observation", "wet"),
                ("gpt", "Done."),
            ),
        }
    )
    assert (made.id, made.source, made.instruction) == ("garden:9", "sharegpt", "Water the roses.")
    assert [(s.tool, s.arguments, s.observation, s.parallel, s.unobserved) for s in made.steps] == [
        ("look", {"at": "roses"}, "", False, False),
        ("pour", {"litres": 2}, "dry", False, False),
        ("look", {"at": "roses"}, "dry", True, False),
    ]
    assert (made.final_observation, made.metadata["final_reply"]) == ("wet", "Done.")


def test_tags():
    made = read(
        {
            "conversations": turns(
                ("human", "Water the roses."),
                ("gpt", f"<think>hm</think>I do.<tool_call>\n{LOOK}\n</tool_call>\n<tool_call>{POUR}</tool_call>"),
                ("tool", "<tool_response>\ndry\n</tool_response>\n<tool_response>wet</tool_response>"),
                ("gpt", f"<tool_call>{POUR}</tool_call>"),
            )
        }
    )
    assert [(s.tool, s.observation, s.thought, s.unobserved) for s in made.steps] == [
        ("look", "", "hm\nI do.", False),
        ("pour", "", "", False),
        ("pour", "dry\nwet", "", True),
    ]
    assert made.id == "garden:3"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (turns(("human", "go"), ("gpt", "Act: bash ls")), "calls in words are not read"),
        (turns(("human", "go"), ("gpt", "<tool_call>{}")), "a <tool_call> that does not end"),
        (turns(("human", "go"), ("gpt", "<tool_call>{'name': 'x'}</tool_call>")), "a call that is not JSON"),
        (turns(("human", "go"), ("function_call", "[7]")), "got 7 as a call"),
        (turns(("human", "go"), ("function_call", "{}")), "as the function's name"),
        (turns(("human", "go"), ("ghost", "x")), r"\[1\].from: got 'ghost'"),
        ([*turns(("human", "go")), 5], r"\[1\]: got 5, expected an object"),
        (turns(("human", None)), r"\[0\]: got"),
    ],
)
def test_rejects(given, reason):
    with pytest.raises(RecordError, match=reason):
        read({"conversations": given})


def test_nothing_of_later_is_seen():
    given = turns(("human", "go"), ("function_call", LOOK), ("observation", "a"), ("function_call", POUR), ("gpt", "x"))
    before = read({"conversations": given})
    for index, seen in ((2, 1), (3, 1), (4, 2)):
        changed = [dict(turn) for turn in given]
        changed[index]["value"] = POUR if index == 3 else "CHANGED"
        after = read({"conversations": changed})
        assert after.steps[:seen] == before.steps[:seen]
