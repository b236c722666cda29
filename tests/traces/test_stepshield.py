"""StepShield: results move to the next step, labels mark the first rogue step."""

from __future__ import annotations

import copy
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxguard.traces.readers.stepshield import READER, load_labels
from jaxguard.traces.registry import Context, RecordError
from jaxguard.types import JaxguardError, Trajectory


def record(kind: str = "ROGUE", labels: dict[int, str] | None = None, steps: int = 4) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [
        {
            "step": n + 1,
            "thought": f"thought {n}",
            "action": "run",
            "arguments": {"command": f"make {n}"},
            "observation": f"result {n}",
            "label": (labels or {}).get(n),
            "rationale": None,
        }
        for n in range(steps)
    ]
    task = {"title": "Mend it", "description": "Mend the build.", "constraints": ["be kind"], "success_criteria": []}
    return {"file": "f", "trajectory_id": f"SEC-L2-007-{kind}", "task": task, "steps": rows}


def unlabelled() -> dict[str, Any]:
    out = record()
    out["trajectory_id"] = "abc"
    for row in out["steps"]:
        del row["label"], row["rationale"]
    return out


def read(rec: dict[str, Any], companions: Any = None) -> Trajectory:
    assert READER.matches(rec)
    (trajectory,) = READER.read(rec, Context(Path("x.jsonl"), 0, companions))
    return trajectory


def test_result_of_a_step_is_the_observation_of_the_next() -> None:
    trajectory = read(record(labels={2: "SEC"}))
    assert [step.observation for step in trajectory.steps] == ["", "result 0", "result 1", "result 2"]
    assert trajectory.final_observation == "result 3"
    assert [step.thought for step in trajectory.steps] == [f"thought {n}" for n in range(4)]
    assert trajectory.steps[1].arguments == {"command": "make 1"}
    assert trajectory.instruction == "Mend it\nMend the build.\nConstraints:\n- be kind"


def test_label_is_the_first_rogue_step_and_later_steps_are_unknown() -> None:
    trajectory = read(record(labels={1: "SEC", 3: "SEC"}))
    assert (trajectory.unsafe, trajectory.first_hazard, trajectory.timing) == (True, 1, True)
    assert [step.hazard for step in trajectory.steps] == [False, True, None, True]
    assert trajectory.metadata["kind"] == "rogue"
    assert (trajectory.metadata["category"], trajectory.metadata["severity"]) == ("SEC", "L2")


def test_clean_twin_is_safe_throughout_and_shares_the_group() -> None:
    clean, rogue = read(record("CLEAN")), read(record(labels={1: "SEC"}))
    assert (clean.unsafe, clean.first_hazard, clean.timing) == (False, None, True)
    assert {step.hazard for step in clean.steps} == {False}
    assert clean.group == rogue.group
    assert clean.metadata["pair"] == rogue.metadata["pair"] == "SEC-L2-007"
    reworded = record("CLEAN")
    reworded["task"]["description"] = "Repair it, please."
    assert read(reworded).group == rogue.group
    reworded["task"]["title"] = "Another thing"
    assert read(reworded).group != rogue.group


def test_labels_beside_the_file(tmp_path: Path) -> None:
    rows = [{"trajectory_id": "abc", "type": "rogue", "category": "SEC", "severity": "L1", "rogue_step": 3}]
    (tmp_path / "test_labels.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    labels = load_labels(tmp_path)
    trajectory = read(unlabelled(), labels)
    assert (trajectory.unsafe, trajectory.first_hazard, trajectory.timing) == (True, 2, True)
    assert [step.hazard for step in trajectory.steps] == [False, False, True, None]
    benign = read(unlabelled(), {"abc": {"type": "benign", "rogue_step": None}})
    assert (benign.unsafe, benign.timing, benign.metadata["kind"]) == (False, True, "benign")


@pytest.mark.parametrize("companions", [None, {}])
def test_without_a_label_nothing_is_claimed(companions: Any) -> None:
    trajectory = read(unlabelled(), companions)
    assert (trajectory.unsafe, trajectory.first_hazard, trajectory.timing) == (None, None, False)
    assert {step.hazard for step in trajectory.steps} == {None}


def test_rogue_run_without_a_labelled_step_is_no_good_for_timing() -> None:
    trajectory = read(record("ROGUE"))
    assert (trajectory.unsafe, trajectory.first_hazard, trajectory.timing) == (True, None, False)


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"type": "rogue", "rogue_step": 9}, "rogue_step: found 9"),
        ({"type": "clean", "rogue_step": 1}, "rogue_step: found 1 of a clean run"),
        ({"type": "odd", "rogue_step": None}, "label type: found 'odd'"),
        ({"type": "rogue", "rogue_step": True}, "rogue_step: found True"),
    ],
)
def test_impossible_labels_are_rejected(label: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        read(unlabelled(), {"abc": label})


def test_broken_records_and_label_files_are_named(tmp_path: Path) -> None:
    broken = record()
    broken["steps"][1]["action"] = None
    with pytest.raises(RecordError, match="action is None"):
        read(broken)
    with pytest.raises(RecordError, match="named a clean run"):
        read(record("CLEAN", labels={0: "SEC"}))
    (tmp_path / "test_labels.jsonl").write_text('{"no": "id"}\n')
    with pytest.raises(JaxguardError, match=r"test_labels.jsonl, record 0: trajectory_id is None"):
        load_labels(tmp_path)
    assert load_labels(tmp_path / "none") is None
    assert READER.is_companion("test_labels.jsonl")
    assert not READER.is_companion("test.jsonl.gz")


GOOD_LABEL = b'{"trajectory_id": "abc", "type": "benign", "rogue_step": null}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("test_labels.jsonl", b'{"trajectory_id": "\xff\xfe', "record 0: line 1: not JSON"),
        ("test_labels.jsonl.gz", gzip.compress(GOOD_LABEL * 1000, mtime=0)[:-9], "the gzip stream breaks"),
        ("test_labels.jsonl", gzip.compress(GOOD_LABEL, mtime=0)[:12], "the gzip stream breaks|broken at its start"),
        ("test_labels.jsonl", b"[" * 100_000, "record 0: line 1: nested too deeply"),
        ("test_labels.jsonl", b'["abc"]', "record 0: trajectory_id is None, expected a string"),
        (
            "test_labels.jsonl",
            b'{"trajectory_id": ["abc"]}',
            "record 0: trajectory_id is \\['abc'\\], expected a string",
        ),
        (
            "test_labels.jsonl",
            GOOD_LABEL * 2 + GOOD_LABEL.replace(b"benign", b"clean"),
            "record 2: another label of 'abc' than before, expected one",
        ),
    ],
)
def test_a_broken_label_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(JaxguardError, match=f"{name}, .*(?:{message})"):
        load_labels(tmp_path)


def test_labels_that_are_compressed_under_a_plain_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_labels.jsonl").write_bytes(gzip.compress(GOOD_LABEL))
    labels = load_labels(tmp_path)
    assert labels is not None
    assert labels["abc"]["type"] == "benign"


def test_an_empty_action_is_no_tool() -> None:
    rec = record()
    rec["steps"][1]["action"] = ""
    with pytest.raises(RecordError, match="action is '', expected the name of a tool"):
        read(rec)


def test_missing_results_and_odd_arguments() -> None:
    rec = record("CLEAN")
    rec["steps"][1]["observation"] = None
    rec["steps"][2]["arguments"] = '{"a": '
    trajectory = read(rec)
    assert [step.unobserved for step in trajectory.steps] == [False, True, False, False]
    assert trajectory.steps[2].observation == ""
    assert trajectory.steps[2].raw_arguments == '{"a": '


@pytest.mark.parametrize("t", range(4))
def test_nothing_after_an_action_reaches_its_step(t: int) -> None:
    rec = record(labels={3: "SEC"})
    changed = copy.deepcopy(rec)
    changed["steps"][t]["observation"] = "CHANGED"
    for row in changed["steps"][t + 1 :]:
        row.update(thought="CHANGED", arguments={"x": 1}, observation="CHANGED")
    before, after = read(rec).steps, read(changed).steps
    assert after[: t + 1] == before[: t + 1]
    assert after[t + 1 :] != before[t + 1 :] or t == 3


@pytest.mark.data
def test_real_counts(data_dir: Path) -> None:
    folder = data_dir / "stepshield"
    labels = load_labels(folder)
    counts: dict[str, Counter[Any]] = {}
    for name in ("train", "test"):
        with gzip.open(folder / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            trajectories = [read(json.loads(line), labels) for line in lines]
        counts[name] = Counter((t.metadata["kind"], t.unsafe) for t in trajectories)
        assert all(t.timing for t in trajectories)
        assert all(t.steps[t.first_hazard].hazard for t in trajectories if t.first_hazard is not None)
        assert len({t.id for t in trajectories}) == len(trajectories)
    assert counts["train"] == {("rogue", True): 544, ("clean", False): 544}
    assert counts["test"] == {("rogue", True): 539, ("clean", False): 539, ("benign", False): 5653}
