"""Logs of Inspect AI, invented with its own classes: samples, archives, calls that only events tell of."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.files import Broken, Parsed, read_records
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.reading import ArchiveReader, Companions, read_file
from jaxguard.traces.registry import CannotRead
from jaxguard.traces.sources import Source

log_module = pytest.importorskip("inspect_ai.log")
event_module = pytest.importorskip("inspect_ai.event")
model = pytest.importorskip("inspect_ai.model")
tool = pytest.importorskip("inspect_ai.tool")


def call(name, call_id, **arguments):
    return tool.ToolCall(id=call_id, function=name, arguments=arguments)


def says(text="", *calls):
    return model.ChatMessageAssistant(content=text, tool_calls=list(calls) or None)


def result(text, of, error=None):
    return model.ChatMessageTool(content=text, tool_call_id=of.id, function=of.function, error=error)


def asks(text):
    return model.ChatMessageUser(content=text)


def generation(history, output, **fields):
    return event_module.ModelEvent(
        model="m",
        input=list(history),
        tools=[],
        tool_choice="auto",
        config=model.GenerateConfig(),
        output=model.ModelOutput(model="m", choices=[model.ChatCompletionChoice(message=output)]),
        **fields,
    )


LOOK, LOOK_TOO, POUR = call("look", "a", at="barrel"), call("look", "b", at="roses"), call("pour", "c", litres=2)
CHAT = [
    model.ChatMessageSystem(content="You tend a garden."),
    asks("Water the roses."),
    says("<think>Is there water?</think>First the barrel.", LOOK, LOOK_TOO),
    result("half full", LOOK),
    result("dry", LOOK_TOO),
    says("", POUR),
    result("", POUR, tool.ToolCallError("timeout", "the can leaks")),
    says("They are watered."),
]


def sample(messages=CHAT, number=1, **fields):
    return log_module.EvalSample(
        **({"id": number, "epoch": 1, "input": "Water the roses.", "target": "", "messages": list(messages)} | fields)
    )


def log(*samples):
    spec = log_module.EvalSpec(
        eval_id="e-7",
        created="2026-01-02T03:04:05+00:00",
        task="garden",
        model="mock/m-1",
        dataset=log_module.EvalDataset(name="d", samples=len(samples)),
        config=log_module.EvalConfig(),
    )
    return log_module.EvalLog(status="success", eval=spec, samples=list(samples))


def write(folder, made, name="night.json"):
    path = folder / name
    log_module.write_eval_log(made, str(path))
    return path


def outcomes(path):
    return list(read_file(path, Companions(path.parent)))


def read(folder, *samples, name="night.json"):
    found = outcomes(write(folder, log(*samples), name))
    assert [o.reason for o in found] == [""] * len(samples)
    return [t for o in found for t in o.trajectories]


@pytest.mark.parametrize("name", ["night.json", "night.eval"])
def test_a_sample(tmp_path, name):
    scores = {"match": log_module_score("C")}
    (made,) = read(tmp_path, sample(scores=scores, metadata={"x": 1}), name=name)
    assert (made.id, made.group, made.source) == ("night:1:1", "inspect:garden:1", "inspect_ai")
    assert made.instruction == "Water the roses."
    assert [(s.tool, s.arguments, s.call_id) for s in made.steps] == [
        ("look", {"at": "barrel"}, "a"),
        ("look", {"at": "roses"}, "b"),
        ("pour", {"litres": 2}, "c"),
    ]
    assert [s.observation for s in made.steps] == ["", "", "half full\ndry"]
    assert [s.parallel for s in made.steps] == [False, True, False]
    assert made.steps[0].thought == "Is there water?\nFirst the barrel."
    assert made.final_observation == "the can leaks"
    assert (made.unsafe, made.first_hazard, made.timing) == (None, None, False)
    assert made.metadata == {
        "domain": "garden",
        "sample": 1,
        "epoch": 1,
        "model": "mock/m-1",
        "eval_id": "e-7",
        "scores": {"match": "C"},
        "final_reply": "They are watered.",
    }


def log_module_score(value):
    return pytest.importorskip("inspect_ai.scorer").Score(value=value)


@pytest.mark.parametrize("name", ["night.json", "night.eval"])
def test_every_sample_and_epoch_has_its_own_id_and_attachments_come_back(tmp_path, name):
    long = "row of roses, " * 50
    chat = [asks(long), says("", LOOK), result(long, LOOK), says("", POUR)]
    first = log_module.condense_sample(sample(chat, events=[generation(chat[:1], chat[1])]))
    assert "attachment://" in first.model_dump_json()
    made = read(tmp_path, first, sample(number="x/y"), sample(epoch=2), name=name)
    assert {t.id for t in made} == {"night:1:1", "night:x/y:1", "night:1:2"}
    (one,) = [t for t in made if t.id == "night:1:1"]
    assert one.instruction == one.steps[1].observation == long
    assert [s.unobserved for s in one.steps] == [False, True]
    assert "notes" not in one.metadata


def test_a_missing_attachment_is_noted(tmp_path):
    chat = [asks("go"), says("", LOOK), result("attachment://gone", LOOK), says("", POUR)]
    (made,) = read(tmp_path, sample(chat))
    assert made.metadata["notes"] == {"missing_attachments": 1}


def test_parts_of_a_message(tmp_path):
    parts = [model.ContentReasoning(reasoning="secret"), model.ContentText(text="I look.")]
    broken = tool.ToolCall(
        id="a",
        function="look",
        arguments={},
        parse_error='Error parsing the following tool call arguments:\n\n{"at": \n\nError details: cut off',
    )
    image = model.ContentImage(image="data:image/png;base64,AAAA")
    chat = [
        model.ChatMessageUser(content=[model.ContentText(text="Look."), image]),
        model.ChatMessageAssistant(content=parts, tool_calls=[broken]),
        model.ChatMessageTool(content=[model.ContentText(text="a rose"), image], tool_call_id="a", function="look"),
    ]
    (made,) = read(tmp_path, sample(chat))
    (step,) = made.steps
    assert made.instruction == "Look.\n[image]"
    assert step.thought == "secret\nI look."
    assert (step.arguments, step.raw_arguments) == (None, '{"at": ')
    assert made.final_observation == "a rose\n[image]"


def test_a_tool_of_the_provider_is_a_step_whose_result_comes_after_it(tmp_path):
    def used(call_id, answer):
        return model.ContentToolUse(
            tool_type="web_search", id=call_id, name="web_search", arguments='{"q": "rose"}', result=answer
        )

    parts = [
        model.ContentText(text="I search."),
        used("s1", "found"),
        used("s2", "more"),
        model.ContentText(text="So."),
    ]
    chat = [asks("go"), model.ChatMessageAssistant(content=parts, tool_calls=[LOOK])]
    (made,) = read(tmp_path, sample(chat))
    assert [(s.tool, s.observation, s.thought, s.unobserved) for s in made.steps] == [
        ("web_search", "", "I search.", False),
        ("web_search", "found", "", False),
        ("look", "more", "So.", True),
    ]
    assert made.steps[0].arguments == {"q": "rose"}


def test_a_history_without_the_input(tmp_path):
    (made,) = read(tmp_path, sample([says("", LOOK), result("dry", LOOK)]))
    assert made.instruction == "Water the roses."
    assert made.final_observation == "dry"


def test_events_that_only_repeat_the_messages_add_nothing(tmp_path):
    events = [generation(CHAT[:2], CHAT[2]), generation(CHAT[:5], CHAT[5]), generation(CHAT[:7], CHAT[7])]
    (made,) = read(tmp_path, sample(events=events))
    assert [s.call_id for s in made.steps] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["night.json", "night.eval"])
def test_calls_of_sub_agents_and_of_a_cut_history_are_read_from_the_events(tmp_path, name):
    ask = call("ask_helper", "d")
    dig, dig_more = call("dig", "e"), call("dig", "f")
    helper = [asks("Help: dig."), says("", dig), result("a hole", dig), says("", dig_more)]
    cut = [*CHAT[:2], result("done digging", ask), says("", POUR)]
    events = [
        generation(CHAT[:2], CHAT[2]),
        generation(CHAT[:5], says("", ask)),
        generation(helper[:1], helper[1]),
        generation(helper[:3], helper[3]),
        event_module.ToolEvent(id="f", function="dig", arguments={}, result="deeper", completed="2026-01-02T03:04:05Z"),
        generation([*CHAT[:5], says("", ask), result("done digging", ask)], cut[3]),
        generation([*CHAT[:5], says("", ask), result("done digging", ask), cut[3]], says("Bye.")),
    ]
    main, sub = read(tmp_path, sample([*cut, says("Bye.")], events=events), name=name)
    assert [s.call_id for s in main.steps] == ["a", "b", "d", "c"]
    assert [s.observation for s in main.steps] == ["", "", "half full\ndry", "done digging"]
    assert main.metadata["final_reply"] == "Bye."
    assert (main.id, sub.id) == ("night:1:1", "night:1:1/1")
    assert main.group == sub.group
    assert (sub.instruction, [s.call_id for s in sub.steps]) == ("Help: dig.", ["e", "f"])
    assert [s.observation for s in sub.steps] == ["", "a hole"]
    assert sub.final_observation == "deeper"
    assert not sub.steps[1].unobserved


def test_calls_of_failed_attempts_are_trajectories(tmp_path):
    events = [generation(CHAT[:2], CHAT[2]), generation(CHAT[:5], CHAT[5])]
    retried = log_module.EvalRetryError(message="boom", traceback="", traceback_ansi="", events=events)
    final, attempt = read(tmp_path, sample(error_retries=[retried]))
    assert [s.call_id for s in final.steps] == [s.call_id for s in attempt.steps] == ["a", "b", "c"]
    assert attempt.id == "night:1:1/retry1.0"


@pytest.mark.parametrize("number", range(len(CHAT)))
@pytest.mark.parametrize("from_events", [False, True])
def test_nothing_of_later_is_seen(tmp_path, number, from_events):
    def made_of(chat):
        events = [generation(chat[:2], chat[2]), generation(chat[:5], chat[5]), generation(chat[:7], chat[7])]
        (made,) = read(tmp_path, sample(chat[-1:] if from_events else chat, events=events))
        return made

    changed = [
        m.model_copy(update={"content": "CHANGED", "error": None}) if i == number else m for i, m in enumerate(CHAT)
    ]
    before, after = made_of(CHAT), made_of(changed)
    seen = {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 3, 6: 3, 7: 3}[number]
    assert [s.call_id for s in after.steps] == ["a", "b", "c"]
    for one, other in zip(before.steps[:seen], after.steps[:seen], strict=True):
        assert (one.tool, one.arguments, one.observation) == (other.tool, other.arguments, other.observation)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (sample([result("dry", LOOK)]), "1 tool results, but no call"),
        (sample([]), "the sample has no messages"),
        (
            sample([asks("go")], events=[event_module.ToolEvent(id="z", function="dig", arguments={})]),
            "the tool 'dig' was run without a call in any message",
        ),
        (
            sample([asks("go")], output=generation([], says("", POUR)).output),
            "input or output: a call of 'pour' that no message and no event tells of",
        ),
        (
            sample([asks("go"), says("", POUR)], events=[generation([asks("go")], says("", LOOK))]),
            "the histories disagree about the call 'c' of 'pour'",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_rejected_and_the_next_sample_is_not(tmp_path, made, reason):
    broken, good = outcomes(write(tmp_path, log(made, sample(number=2))))
    assert reason in broken.reason
    assert len(good.trajectories) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"samples": None}, "the log holds no samples (its status is 'success')"),
        ({"samples": [7]}, "not a sample: sample: "),
        ({"samples": [{"id": 1, "epoch": "x"}]}, "not a sample: epoch: "),
        (
            {"samples": [{"id": 1, "epoch": 1, "input": "", "target": "", "messages": [{"role": "ghost"}]}]},
            "messages.0",
        ),
        ({"version": 9}, "version: got 9, expected one of (1, 2)"),
    ],
)
def test_malformed(tmp_path, change, reason):
    path = write(tmp_path, log(sample()))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    (found,) = outcomes(path)
    assert reason in found.reason


def test_an_archive_is_read_sample_by_sample(tmp_path):
    """A broken one costs no other, and a log that broke off has no header."""
    path = write(tmp_path, log(*(sample(number=i) for i in range(1, 5))), "night.eval")
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, data in parts.items():
            if "2_epoch" in name:
                data = data[:50]
            if "3_epoch" in name:
                data = b"[]"
            if name != "header.json":
                new.writestr(name, data)
    found = list(read_records(path))
    assert [type(item) for item in found] == [Parsed, Broken, Broken, Parsed]
    assert [item.position for item in found] == [0, 1, 2, 3]
    assert found[1].reason.startswith("samples/2_epoch_1.json: not JSON")
    assert found[0].size > 0
    results = outcomes(path)
    assert [len(o.trajectories) for o in results] == [1, 0, 0, 1]
    assert results[0].trajectories[0].metadata["domain"] == "garden"


def test_broken_archives(tmp_path, monkeypatch):
    whole = write(tmp_path, log(sample()), "night.eval").read_bytes()
    path = tmp_path / "cut.eval"
    path.write_bytes(whole[: len(whole) // 2])
    (found,) = read_records(path)
    assert found.reason.startswith("an Inspect log that is no whole zip archive")

    position = whole.index(b"samples/1_epoch_1.json") + 40
    path.write_bytes(whole[:position] + bytes(20) + whole[position + 20 :])
    (found,) = read_records(path)
    assert found.reason.startswith("samples/1_epoch_1.json: cannot be unpacked")

    with zipfile.ZipFile(path, "w") as empty:
        empty.writestr("header.json", '{"status": "error"}')
    (found,) = read_records(path)
    assert found.reason == "the Inspect log holds no samples (its status is 'error')"

    other = tmp_path / "other.json"
    other.write_bytes(whole)
    (found,) = read_records(other)
    assert found.reason.startswith("a zip archive, expected a log of Inspect AI named .eval")

    monkeypatch.setattr("jaxguard.traces.files.MAX_RECORD_BYTES", 100)
    (found,) = read_records(write(tmp_path, log(sample()), "long.eval"))
    assert found.reason == "samples/1_epoch_1.json: longer than 100 bytes"


def test_without_the_package(tmp_path, monkeypatch):
    path, archive = write(tmp_path, log(sample())), write(tmp_path, log(sample()), "night.eval")
    monkeypatch.setitem(sys.modules, "inspect_ai.log", None)
    for file in (path, archive):
        with pytest.raises(CannotRead, match=r"is not installed; pip install 'jaxguard\[formats\]'"):
            outcomes(file)
        (found,) = ArchiveReader().read(Source(file.name, str(file)))
        assert (found.position, "is not installed" in found.reason) == (None, True)


@pytest.mark.data
def test_real_logs(data_dir, tmp_path):
    """Calls counted in the raw text: jq '[.samples[].messages[].tool_calls // [] | length] | add'.

    The log of tool errors was made from a real one by leaving out all but the results.
    """
    expected = {"2025-05-12T20-27-36-04-00_browser:1:1": 4, "log_images_tc:1:1": 0, "log_read_sample:1:1": 0}
    report = convert(data_dir / "formats" / "inspect_ai", tmp_path)
    made = {t.id: t for t in read_trajectories(tmp_path)}
    assert {name: len(t.steps) for name, t in made.items()} == expected
    assert report.counts["rejected"] == 1
    assert report.counts["unobserved_calls"] == 0
    (error,) = outcomes(Path(data_dir / "formats" / "inspect_ai" / "log_tool_call_error.json"))
    assert "11 tool results, but no call" in error.reason
