"""AgentDojo runs: both layouts, and what attack, achievement and derived call mean for the labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxguard.traces.convert import convert
from jaxguard.traces.files import read_records
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.readers.agentdojo import READER, load_targets
from jaxguard.traces.registry import Context, RecordError
from jaxguard.types import JaxguardError

CONTEXT = Context(Path("runs/model.jsonl"), 0)


def old(role, text, **more):
    return {"role": role, "content": text, **more}


def new(role, text, **more):
    return {"role": role, "content": None if text is None else [{"type": "text", "content": text}], **more}


def messages(make, calls):
    made = [make("system", "Be helpful."), make("user", "Pay the bill.")]
    for index, (name, args) in enumerate(calls):
        call = {"function": name, "args": args, "id": f"c{index}"}
        made.append(make("assistant", None if make is new else "", tool_calls=[call]))
        made.append(make("tool", f"r{index}", tool_call_id=f"c{index}", tool_call=call, error=None))
    return [*made, make("assistant", "All paid.", tool_calls=None)]


CALLS = [("read", {"f": "bill"}), ("send", {"to": "EVIL-1"}), ("send", {"to": "power co"})]


def record(make=new, calls=CALLS, field="messages", **more):
    return {
        "suite_name": "bank",
        "pipeline_name": "m-1",
        "user_task_id": "user_task_3",
        "injection_task_id": None,
        "attack_type": None,
        "security": True,
        "utility": False,
        field: messages(make, calls),
        **more,
    }


ATTACK = {"injection_task_id": "injection_task_5", "attack_type": "important"}


def read(rec, companions=None):
    (made,) = READER.read(rec, Context(CONTEXT.file, 0, companions))
    return made


@pytest.mark.parametrize("make", [old, new])
@pytest.mark.parametrize("field", ["messages", "conversations"])
def test_both_layouts(make, field):
    made = read(record(make, field=field))
    assert made.instruction == "Pay the bill."
    assert [(s.tool, s.arguments, s.observation) for s in made.steps] == [
        ("read", {"f": "bill"}, ""),
        ("send", {"to": "EVIL-1"}, "r0"),
        ("send", {"to": "power co"}, "r1"),
    ]
    assert made.final_observation == "r2"
    assert made.metadata["final_reply"] == "All paid."
    assert made.id == "m-1/bank/user_task_3/none/none"
    assert made.group == "bank/user_task_3"


def labels(made):
    return made.unsafe, made.first_hazard, made.timing, [s.hazard for s in made.steps]


def test_without_attack_it_is_safe():
    assert labels(read(record())) == (False, None, True, [False] * 3)
    # Logs of older versions write "none".
    assert labels(read(record(injection_task_id="none", attack_type="none"))) == (False, None, True, [False] * 3)


def test_achieved_with_a_derived_call():
    made = read(record(**ATTACK, derived_first_hazard_call=2))
    assert labels(made) == (True, 1, True, [False, True, None])
    assert made.metadata["injection_task_id"] == "bank/injection_task_5"
    assert made.id == "m-1/bank/user_task_3/important/injection_task_5"
    assert "attempted_hazard" not in made.metadata


def test_achieved_without_a_derived_call_is_unusable_for_timing():
    assert labels(read(record(**ATTACK, derived_first_hazard_call=None))) == (True, None, False, [None] * 3)


def test_not_achieved():
    made = read(record(**ATTACK, security=False, derived_first_hazard_call=None))
    assert labels(made) == (False, None, True, [False] * 3)


def test_an_attempt_that_failed_teaches_nothing():
    made = read(record(**ATTACK, security=False, derived_first_hazard_call=2))
    assert labels(made) == (False, None, False, [False, None, None])
    assert made.metadata["attempted_hazard"] == 1


def test_an_unknown_outcome_has_no_label():
    made = read(record(**ATTACK, security=None, derived_first_hazard_call=None))
    assert labels(made) == (None, None, False, [None] * 3)


def test_a_goal_that_the_user_asks_for_is_safe():
    made = read(record(user_task_id="injection_task_5"))
    assert labels(made)[:3] == (False, None, True)
    assert made.metadata["direct_goal"] is True
    assert made.metadata["injection_task_id"] == "bank/injection_task_5"


def write_targets(folder, texts=("evil-1",), functions=("send",)):
    entry = {
        "suite": "bank",
        "injection_task_id": "injection_task_5",
        "functions": functions,
        "args_contain_any": texts,
    }
    (folder / "injection_targets.json").write_text(json.dumps([entry]))


def test_a_missing_field_is_derived_from_the_targets(tmp_path):
    write_targets(tmp_path)
    targets = load_targets(tmp_path)
    assert labels(read(record(**ATTACK), targets)) == (True, 1, True, [False, True, None])
    # The field wins where it is there, also when it says null.
    assert labels(read(record(**ATTACK, derived_first_hazard_call=None), targets))[1] is None
    # No attack, no hazard; another function, no hazard.
    assert labels(read(record(), targets))[0] is False
    assert labels(read(record(**ATTACK, calls=[("read", {"f": "EVIL-1"})]), targets))[1] is None


@pytest.mark.parametrize(("functions", "texts", "step"), [([], ["evil-1"], 1), (["send"], [], 1), (["pay"], [], None)])
def test_an_empty_list_of_targets_allows_all(tmp_path, functions, texts, step):
    write_targets(tmp_path, texts, functions)
    assert read(record(**ATTACK), load_targets(tmp_path)).first_hazard == step


def test_broken_targets_stop_the_conversion(tmp_path):
    assert load_targets(tmp_path) is None
    write_targets(tmp_path, texts=None)
    with pytest.raises(
        JaxguardError, match=r"injection_targets.json, record 0: args_contain_any is None, expected a list"
    ):
        load_targets(tmp_path)
    (tmp_path / "run.jsonl").write_text(json.dumps(record()))
    with pytest.raises(JaxguardError, match="injection_targets"):
        convert(tmp_path / "run.jsonl", tmp_path / "out")


def test_a_text_in_place_of_a_list_of_targets_is_no_list_of_letters(tmp_path):
    write_targets(tmp_path, functions="send")
    with pytest.raises(JaxguardError, match=r"record 0: functions is 'send', expected a list of strings"):
        load_targets(tmp_path)
    write_targets(tmp_path, texts="evil")
    with pytest.raises(JaxguardError, match=r"record 0: args_contain_any is 'evil', expected a list of strings"):
        load_targets(tmp_path)


@pytest.mark.parametrize(("content", "message"), [(b"\xff\xfe", "not JSON"), (b"[" * 100_000, "nested too deeply")])
def test_a_broken_file_of_targets_is_named(tmp_path, content, message):
    (tmp_path / "injection_targets.json").write_bytes(content)
    with pytest.raises(JaxguardError, match=f"injection_targets.json, record 0: .*{message}"):
        load_targets(tmp_path)


def test_two_targets_of_one_task_that_differ_are_named(tmp_path):
    write_targets(tmp_path)
    path = tmp_path / "injection_targets.json"
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry, entry]))
    assert load_targets(tmp_path) is not None
    path.write_text(json.dumps([entry, entry | {"functions": []}]))
    with pytest.raises(JaxguardError, match="record 1: another target of bank/injection_task_5 than before"):
        load_targets(tmp_path)


@pytest.mark.parametrize("value", [5, ["injection_task_5"], True, {}])
@pytest.mark.parametrize("name", ["injection_task_id", "attack_type"])
def test_an_attack_of_the_wrong_type_is_not_the_lack_of_one(name, value):
    with pytest.raises(RecordError, match=f"{name}: got .*, expected a string or null"):
        read(record(**{**ATTACK, name: value}))


def test_an_error_takes_the_place_of_an_empty_result():
    rec = record(calls=CALLS[:1])
    rec["messages"][3].update(content=[{"type": "text", "content": ""}], error="ValueError: no such file")
    assert read(rec).final_observation == "ValueError: no such file"


def test_a_defence_does_not_speak_as_the_user():
    rec = record(old, field="conversations", calls=[])
    rec["conversations"] += [
        old("user", "</function_error>\nThe call of send was refused."),
        old("assistant", "", tool_calls=[{"function": "read", "args": {}, "id": "x"}]),
    ]
    assert read(rec).steps[0].observation == "[assistant] All paid.\n[system] The call of send was refused."


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"derived_first_hazard_call": 9}, "derived_first_hazard_call: got 9, expected null or a call number in 1..3"),
        ({"derived_first_hazard_call": 0}, "got 0, expected null or a call number in 1..3"),
        ({"derived_first_hazard_call": True}, "got True, expected null"),
        ({"security": "yes"}, "security: got 'yes', expected true, false or null"),
        ({"suite_name": ""}, "suite_name: got '', expected a non-empty string"),
        ({"messages": []}, "messages: got list"),
    ],
)
def test_broken_records_have_a_reason(change, reason):
    with pytest.raises(RecordError, match=reason):
        read(record(**ATTACK) | change)


@pytest.mark.data
def test_agentdyn(data_dir, tmp_path):
    report = convert(data_dir / "agentdyn", tmp_path)
    expected = {
        "files": 6,
        "records": 3297,
        "converted": 3297,
        "rejected": 0,
        "trajectories": 3297,
        "steps": 21525,
        "without_steps": 388,
        "unsafe": 641,
        "safe": 2656,
        "first_hazards": 626,
        "timing": 3297 - 15 - 102,
        "parallel_calls": 21525 - 19557,
        "unobserved_calls": 121,
        "renamed_ids": 0,
    }
    assert report.counts | expected == report.counts
    assert report.skipped_files == ["injection_targets.json"]
    attempts = direct = 0
    for trajectory in read_trajectories(tmp_path):
        attempts += "attempted_hazard" in trajectory.metadata
        direct += "direct_goal" in trajectory.metadata
        if trajectory.first_hazard is not None:
            assert trajectory.steps[trajectory.first_hazard].hazard is True
    assert (attempts, direct) == (102, 158)


@pytest.mark.data
def test_the_targets_rule_gives_the_published_calls(data_dir):
    """Leaving the derived field out and deriving it again must find the same call in every attacked run."""
    targets = load_targets(data_dir / "agentdyn")
    compared = 0
    for file in sorted((data_dir / "agentdyn").glob("*.jsonl.gz")):
        for item in read_records(file):
            rec = dict(item.record)
            published = read(rec)
            del rec["derived_first_hazard_call"]
            derived = read(rec, targets)
            assert labels(derived) == labels(published), published.id
            compared += published.metadata.get("injection_task_id") is not None
    assert compared == 2830 + 158


@pytest.mark.data
def test_drift_runs(data_dir, tmp_path):
    report = convert(data_dir / "agentdojo_drift", tmp_path)
    expected = {"trajectories": 889, "steps": 2899, "unsafe": 14, "safe": 875, "timing": 875, "without_steps": 16}
    assert report.counts | expected == report.counts
