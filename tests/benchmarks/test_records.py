"""A benchmark file as a table: figures by hand, what is skipped is said, and bad files are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.samples import extra, variant, write
from jaxguard.benchmarks.records import RecordsError, case_text, read_run


def row(frame: Any, name: str) -> Any:
    return frame[frame.variant == name].iloc[0]


def test_figures_by_hand(tmp_path: Path) -> None:
    product = variant([float(v) for v in range(1, 101)], compile_s=1.5)
    rival = variant([303.0] * 99, "torch", "bfloat16")
    path = write(
        tmp_path / "a.json",
        extra("MultiStream", {"size": "small", "batch": 64}, {"torch eager": rival, "jax product": product},
              items=64, threads=2, floor_us={"read": 10.1, "matmul": 2.0}),
    )  # fmt: skip
    run = read_run(path)
    assert list(run.frame.variant) == ["torch eager", "jax product"]
    ours, theirs = row(run.frame, "jax product"), row(run.frame, "torch eager")
    assert ours.p50_us == 50.5
    assert ours.p90_us == pytest.approx(90.1)
    assert ours.p99_us == pytest.approx(99.01)
    assert ours.rate_per_s == pytest.approx(64 / 50.5e-6)
    assert (ours.floor_us, ours.floor_of, ours.times_floor) == (10.1, "read", pytest.approx(5.0))
    assert (ours.ratio, theirs.ratio) == (1.0, 6.0)
    assert (ours.compile_s, ours.rounds, ours.threads, ours["items"]) == (1.5, 100, 2, 64)
    assert (ours.scenario, ours.case, ours.case_size, ours.case_batch) == (
        "MultiStream", "small, batch 64", "small", 64,
    )  # fmt: skip
    assert (theirs["framework"], theirs["dtype"]) == ("torch", "bfloat16")
    assert np.isnan(theirs.compile_s)
    assert run.records[0].variants[1].rounds.tolist() == [float(v) for v in range(1, 101)]
    assert run.notes == ()
    assert run.on_cpu
    assert run.facts["processor"] == "Some CPU"


@pytest.mark.parametrize(("rounds", "p99", "p999"), [(99, False, False), (100, True, False), (999, True, False),
                                                      (1000, True, True)])  # fmt: skip
def test_far_percentiles_take_enough_rounds(tmp_path: Path, rounds: int, p99: bool, p999: bool) -> None:
    path = write(tmp_path / "a.json", extra("SingleStream", {}, {"jax product": variant([2.0] * rounds)}))
    ours = read_run(path).frame.iloc[0]
    assert (not np.isnan(ours.p99_us), not np.isnan(ours.p999_us)) == (p99, p999)
    assert ours.p90_us == 2.0


def test_other_benchmarks_and_unavailable_variants_are_counted(tmp_path: Path) -> None:
    variants = {"jax product": {"unavailable": "no <GPU>"}, "torch eager": variant([5.0])}
    path = write(tmp_path / "a.json", {"peak_mib": 3}, extra("Offline", {"batch": 8}, variants), {})
    run = read_run(path)
    assert run.skipped == 2
    assert [note.split(";")[0] for note in run.notes] == [
        "2 benchmarks of the file skipped: no scenario in extra_info.",
        "1 of 2 measurements unavailable",
        "1 of 1 records without a measured jax product, so without a ratio to it.",
    ]
    ours = row(run.frame, "jax product")
    assert ours.unavailable == "no <GPU>"
    assert ours.rounds == 0
    assert run.frame[["p50_us", "rate_per_s"]].isna().any(axis=1).tolist() == [True, False]
    assert run.frame.ratio.isna().all()
    assert run.frame.floor_us.isna().all()


def test_ratio_is_to_the_product_of_the_same_record(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        extra("Offline", {"batch": 1}, {"jax product": variant([10.0]), "x": variant([20.0])}),
        extra("Offline", {"batch": 2}, {"jax product": variant([40.0]), "x": variant([20.0])}),
    )
    assert read_run(path).frame.ratio.tolist() == [1.0, 2.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"size": "small", "batch": 64}, "small, batch 64"),
        ({"gap_ms": 20, "rate_per_s": 1500}, "gap 20 ms, rate 1,500/s"),
        ({"warm_start": True, "donated": False, "budget_s": 0.5}, "warm start, no donated, budget 0.5 s"),
    ],
)
def test_case_in_one_line(fields: dict[str, Any], text: str) -> None:
    assert case_text(fields) == text


def test_threads_tell_records_of_one_case_apart(tmp_path: Path) -> None:
    records = [extra("Offline", {"batch": 8}, {"jax product": variant([1.0])}, threads=n) for n in (1, 2)]
    path = write(tmp_path / "a.json", *records)
    assert read_run(path).frame.case.tolist() == ["batch 8, 1 thread", "batch 8, 2 threads"]
    with pytest.raises(RecordsError, match=r"Offline, batch 8, 1 thread, jax product: measured 2 times"):
        read_run(write(path, *records, records[0]))


def test_commit_with_changes(tmp_path: Path) -> None:
    path, record = tmp_path / "a.json", extra("ColdStart", {}, {"x": variant([1.0])})
    assert read_run(write(path, record)).commit == "abc123"
    assert read_run(write(path, record, commit_info={"id": "f", "dirty": True})).commit == "f with changes"
    assert read_run(write(path, record, commit_info=None)).commit == ""


def test_files_that_are_no_benchmark_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(RecordsError, match=r"a\.json: no such file"):
        read_run(path)
    for content, message in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"benchmarks": [], "machine_info": {"node": "\\ud800"}}', "holds half of a surrogate pair"),
        ("[]", "benchmarks: got nothing, expected a list"),
        ('{"benchmarks": {}}', "benchmarks: got {}, expected a list"),
        ('{"benchmarks": []}', "machine_info: got nothing, expected a dict"),
        ('{"benchmarks": [], "machine_info": {}}', "benchmarks: 0 of them, none with a scenario"),
        ('{"benchmarks": [{}, 3, {"extra_info": []}], "machine_info": {}}', "benchmarks: 3 of them, none"),
    ):
        path.write_text(content)
        with pytest.raises(RecordsError, match=message):
            read_run(path)
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(RecordsError, match="not JSON"):
        read_run(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scenario": "Fast"}, "scenario: got 'Fast', expected one of SingleStream,"),
        ({"scenario": ["Server"]}, "scenario: got"),
        ({"case": None}, "case: got nothing, expected an object"),
        ({"case": {"size": [1]}}, r"case\.size: got \[1\]"),
        ({"items": 0}, "items: got 0, expected a whole number from 1 to"),
        ({"items": 10**400}, "items: got 1000"),
        ({"case": {"batch": 5e-324}}, r"case\.batch: got 5e-324, expected a text, a number"),
        ({"case": {"rate_per_s": 1e300}}, r"case\.rate_per_s: got 1e\+300"),
        ({"split_us": {"encode": 1e308}}, r"split_us\.encode: got 1e\+308"),
        ({"variants": {"x": variant([1e-300])}}, r"variants\.x\.rounds_us\[0\]: got 1e-300"),
        ({"threads": True}, "threads: got True"),
        ({"turn": None}, "turn: got nothing"),
        ({"floor_us": {"read": -1.0}}, r"floor_us\.read: got -1\.0"),
        ({"split_us": {"encode": "long"}}, r"split_us\.encode: got 'long'"),
        ({"holds_per_s": {"x": -2}}, r"holds_per_s\.x: got -2, expected calls per second"),
        ({"variants": {}}, "variants: got {}, expected at least one"),
        ({"variants": {"x": None}}, r"variants\.x: got nothing"),
        ({"variants": {"x": variant([])}}, r"variants\.x\.rounds_us: got \[\]"),
        ({"variants": {"x": {"framework": "jax"}}}, r"variants\.x\.rounds_us: got nothing"),
        ({"variants": {"x": variant([1.0, 0.0])}}, r"variants\.x\.rounds_us\[1\]: got 0\.0, expected a number above 0"),
        ({"variants": {"x": variant([float("nan")])}}, r"variants\.x\.rounds_us\[0\]: got nan"),
        ({"variants": {"x": variant([float("inf")])}}, r"variants\.x\.rounds_us\[0\]: got inf"),
        ({"variants": {"x": variant([10**400])}}, r"variants\.x\.rounds_us\[0\]: got 1000"),
        ({"variants": {"x": variant(["7"])}}, r"variants\.x\.rounds_us\[0\]: got '7'"),  # type: ignore[list-item]
        ({"variants": {"x": variant([1.0], compile_s=-2)}}, r"variants\.x\.compile_s: got -2"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = extra("Server", {"rate_per_s": 5}, {"jax product": variant([1.0])})
    path = write(tmp_path / "a.json", good, {**good, "case": {"rate_per_s": 6}, **change})
    with pytest.raises(RecordsError, match=rf"a\.json: benchmarks\[1\] \(test_1\): {message}"):
        read_run(path)


def test_a_floor_of_nothing_is_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", extra("Server", {}, {"x": variant([1.0])}, floor_us={"read": 0.0, "matmul": 0}))
    assert np.isnan(read_run(path).frame.times_floor[0])
    content = json.loads(path.read_text())
    content["benchmarks"][0]["extra_info"]["floor_us"] = {"read": 0.0, "matmul": 0.5}
    path.write_text(json.dumps(content))
    assert read_run(path).frame[["floor_of", "times_floor"]].iloc[0].tolist() == ["matmul", 2.0]
