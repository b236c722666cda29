"""The own schema: an exact round trip, and errors that name the field."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxguard.traces.jsonl import SchemaError, encode_line, from_json, read_trajectories, to_json, write_trajectories
from jaxguard.types import Step, Trajectory

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)


@st.composite
def trajectories(draw):
    steps = []
    for index in range(draw(st.integers(0, 4))):
        raw = draw(st.none() | TEXT)
        steps.append(
            Step(
                tool=draw(TEXT.filter(bool)),
                arguments=draw(OBJECT) if raw is None else None,
                raw_arguments=raw,
                call_id=f"c{index}",
                observation=draw(TEXT),
                hazard=draw(st.none() | st.booleans()),
                thought=draw(TEXT),
                parallel=draw(st.booleans()),
                unobserved=draw(st.booleans()),
            )
        )
    unsafe = draw(st.none() | st.booleans())
    hazard = draw(st.none() | st.integers(0, len(steps) - 1)) if steps and unsafe else None
    return Trajectory(
        id=draw(TEXT.filter(bool)),
        instruction=draw(TEXT),
        steps=tuple(steps),
        unsafe=unsafe,
        first_hazard=hazard,
        timing=draw(st.booleans()),
        group=draw(TEXT),
        final_observation=draw(TEXT),
        source=draw(TEXT),
        metadata=draw(OBJECT),
    )


@given(trajectories())
def test_round_trip_is_exact(trajectory):
    assert from_json(json.loads(json.dumps(to_json(trajectory)))) == trajectory


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_file_round_trip_and_equal_bytes(tmp_path, name):
    made = [Trajectory(id=str(i), instruction="do é", steps=(Step("t", {"a": i}, "c"),)) for i in range(5)]
    path = tmp_path / "new" / name
    assert write_trajectories(iter(made), path) == 5
    first = path.read_bytes()
    assert list(read_trajectories(path)) == made
    write_trajectories(made, path)
    assert path.read_bytes() == first
    assert [p.name for p in path.parent.iterdir()] == [name]


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.jsonl"
    write_trajectories([Trajectory("a", "i", ())], path)

    def broken():
        yield Trajectory("b", "i", ())
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_trajectories(broken(), path)
    assert [t.id for t in read_trajectories(path)] == ["a"]


def test_a_minimal_record_written_by_hand():
    made = from_json({"jaxguard": 1, "id": "x", "instruction": "do", "steps": [{"tool": "a"}, {"tool": "b"}]})
    assert made == Trajectory("x", "do", (Step("a", {}, "call_0"), Step("b", {}, "call_1")))


GOOD = {"jaxguard": 1, "id": "x", "instruction": "do", "steps": [{"tool": "a", "arguments": {}, "call_id": "1"}]}


def with_step(**changes):
    return {**GOOD, "steps": [{**GOOD["steps"][0], **changes}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**GOOD, "jaxguard": 2}, "jaxguard: got int 2, expected schema version 1"),
        ({**GOOD, "jaxguard": True}, "jaxguard: got bool True, expected schema version 1"),
        ({k: v for k, v in GOOD.items() if k != "id"}, "id: missing, expected a non-empty string"),
        ({**GOOD, "id": ""}, "trajectory id: got an empty string"),
        ({**GOOD, "instruction": None}, "instruction: got NoneType None, expected a string"),
        ({**GOOD, "steps": {}}, "steps: got dict {}, expected a list of steps"),
        ({**GOOD, "steps": ["a"]}, r"steps\[0\]: got str 'a', expected an object"),
        ({**GOOD, "unsafe": 1}, "unsafe: got int 1, expected true, false or null"),
        ({**GOOD, "unsafe": True, "first_hazard": 7}, "first_hazard is 7, expected a step index"),
        ({**GOOD, "first_hazard": True}, "first_hazard: got bool True, expected a step index or null"),
        ({**GOOD, "first_hazzard": 0}, "first_hazzard: unknown field, expected one of "),
        (with_step(tool=""), r"steps\[0\].tool: got str '', expected a non-empty string"),
        (with_step(tol="a"), r"steps\[0\].tol: unknown field"),
        (with_step(arguments="{}"), r"steps\[0\].arguments: got str '{}', expected an object"),
        (with_step(raw_arguments="{"), r"steps\[0\].arguments: got dict {}, expected null"),
        (with_step(hazard="yes"), r"steps\[0\].hazard: got str 'yes', expected true, false or null"),
        ({**GOOD, "steps": GOOD["steps"] * 2}, r"steps\[1\].call_id: got str '1', expected an id that no earlier"),
    ],
)
def test_errors_name_field_value_and_expectation(record, message):
    with pytest.raises(SchemaError, match=message):
        from_json(record)


def test_reading_names_file_and_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, "steps": 3}) + "\n")
    with pytest.raises(SchemaError, match=r"x.jsonl, record 1: steps: got int 3"):
        list(read_trajectories(path))
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(SchemaError, match=r"x.jsonl, record 0: .*gzip"):
        list(read_trajectories(path))
    with pytest.raises(SchemaError, match=r"no file trajectories.jsonl.gz there"):
        list(read_trajectories(tmp_path))


SHARED = (
    Step("a", {}, "1"),
    Step("b", {}, "2", observation="large"),
    Step("c", {}, "3", observation="large", parallel=True),
    Step("d", {}, "4", observation="large", parallel=True),
    Step("e", {}, "5", observation="other", parallel=True),
    Step("f", {}, "6", parallel=True),
    Step("g", {}, "7"),
)


def test_what_parallel_calls_saw_is_stored_once():
    record = to_json(Trajectory("t", "do", SHARED))
    assert [step.get("observation") for step in record["steps"]] == [None, "large", None, None, "other", "", None]
    assert from_json(json.loads(json.dumps(record))).steps == SHARED
    size = 1_000_000
    many = (Step("a", {}, "0", "x" * size), *(Step("b", {}, str(i), "x" * size, parallel=True) for i in range(1, 100)))
    line, _, _ = encode_line(Trajectory("t", "do", many))
    assert size < len(line) < 1.1 * size


def test_files_that_store_it_with_every_call_are_still_read():
    record = to_json(Trajectory("t", "do", SHARED[:4]))
    record["steps"][2]["observation"] = record["steps"][3]["observation"] = "large"
    assert from_json(record).steps == SHARED[:4]


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (Trajectory("t", "do", (Step("", {}, "1"),)), r"steps\[0\].tool: got str '', expected a non-empty string"),
        (Trajectory("t", "do", (Step("a", {}, "1"), Step("b", {}, "1"))), r"steps\[1\].call_id: got str '1'"),
        (Trajectory("t", "do", (Step("a", {}, "\ud800"), Step("b", {}, "\ud801"))), r"steps\[1\].call_id: got str"),
        (Trajectory("t", ["do"], ()), "instruction: got list"),
        (
            Trajectory("t", "do", (), metadata={"a": "x" * 3000}),
            "trajectory 't': a line of 3074 bytes, expected up to 2000",
        ),
    ],
)
def test_nothing_is_written_that_cannot_be_read_back(monkeypatch, trajectory, message):
    monkeypatch.setattr("jaxguard.traces.jsonl.MAX_RECORD_BYTES", 2000)
    with pytest.raises(SchemaError, match=message):
        encode_line(trajectory)
