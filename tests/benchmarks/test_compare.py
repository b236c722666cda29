"""Two runs compared: verdicts on known shifts, intervals that respect turns, and what cannot be compared is listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.samples import MACHINE, extra, variant, write
from jaxguard.benchmarks.compare import _median_draws, compare, render_comparison
from jaxguard.benchmarks.records import RecordsError, Run, read_run
from jaxguard.cli import main

TURN = 20


def noisy(seed: int, median: float, turns: int = 30, between: float = 0.02, within: float = 0.05) -> list[float]:
    """Rounds in turns: what a turn's rounds share varies by ``between``, each by ``within`` more."""
    rng = np.random.default_rng(seed)
    rounds = np.repeat(rng.normal(0, between, turns), TURN) + rng.normal(0, within, turns * TURN)
    return (median * np.exp(rounds)).tolist()


def run(path: Path, medians: dict[str, float], seed: int, **settings: Any) -> Run:
    variants = {name: variant(noisy(seed + i, median, **settings)) for i, (name, median) in enumerate(medians.items())}
    return read_run(write(path, extra("SingleStream", {"size": "small"}, variants, turn=TURN)))


def test_verdicts_on_known_shifts(tmp_path: Path) -> None:
    a = run(tmp_path / "a.json", {"same": 100.0, "less": 100.0, "more": 100.0}, 1)
    b = run(tmp_path / "b.json", {"same": 100.0, "less": 90.0, "more": 110.0}, 50)
    frame = compare(a, b)
    assert frame.verdict.tolist() == ["within noise", "faster", "slower"]
    assert frame.ratio.to_numpy() == pytest.approx([1.0, 0.9, 1.1], abs=0.02)
    assert (frame.low < frame.ratio).all()
    assert (frame.ratio < frame.high).all()
    assert frame.turns_a.tolist() == [30, 30, 30]
    assert frame.attrs["level"] == pytest.approx(1 - 0.05 / 3)
    swapped = compare(b, a)
    assert swapped.verdict.tolist() == ["within noise", "slower", "faster"]


def test_same_seed_same_intervals(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a.json", {"x": 100.0}, 1), run(tmp_path / "b.json", {"x": 101.0}, 2)
    assert compare(a, b).equals(compare(a, b))
    assert compare(a, b, seed=3).low[0] != compare(a, b).low[0]


def test_more_rows_make_wider_intervals(tmp_path: Path) -> None:
    one = [run(tmp_path / f"{i}.json", {"x": 100.0}, i) for i in (1, 100)]
    many = [run(tmp_path / f"{i}.json", {"x": 100.0} | {f"v{j}": 100.0 for j in range(9)}, i) for i in (1, 100)]
    alone, together = compare(*one).iloc[0], compare(*many).iloc[0]
    assert alone.ratio == together.ratio
    assert together.high - together.low > 1.2 * (alone.high - alone.low)


def test_turns_are_resampled_whole(tmp_path: Path) -> None:
    """Where rounds of a turn are alike, 600 of them are no more than 30 independent ones, and intervals must say so."""
    files = {}
    for name, between, within in (("alike", 0.1, 0.0), ("independent", 0.0, 0.1)):
        pair = [run(tmp_path / f"{i}.json", {"x": 100.0}, i, between=between, within=within) for i in (1, 2)]
        found = compare(*pair).iloc[0]
        files[name] = found.high - found.low
    assert files["alike"] > 2.5 * files["independent"]


@pytest.mark.parametrize("turns", [5, pytest.param(12, marks=pytest.mark.slow)])
def test_false_verdicts_keep_their_level(tmp_path: Path, turns: int) -> None:
    """Runs of 20 rows that differ by chance alone: one in 20 pairs may have a verdict, however few the turns.

    Percentiles of the resampled ratios, in place of Student's t, would give one to most pairs of 5 turns.
    """
    medians = {f"v{i}": 100.0 for i in range(20)}
    wrong = 0
    for i in range(20):
        a = run(tmp_path / "a.json", medians, 1_000 + 20 * i, turns=turns)
        b = run(tmp_path / "b.json", medians, 50_000 + 20 * i, turns=turns)
        wrong += bool(set(compare(a, b).verdict) - {"within noise"})
    assert wrong <= 4  # 1 expected at most; more than 4 by chance in 0.3 % of such tests


def test_rounds_without_any_noise(tmp_path: Path) -> None:
    runs = [
        read_run(
            write(tmp_path / f"{i}.json", extra("Offline", {}, {"x": variant([us] * 10), "y": variant([4.0] * 10)}))
        )
        for i, us in enumerate((2.0, 3.0))
    ]
    frame = compare(*runs)
    assert frame[["low", "ratio", "high"]].to_numpy() == pytest.approx(np.array([[1.5] * 3, [1.0] * 3]))
    assert frame.verdict.tolist() == ["slower", "within noise"]


@pytest.mark.parametrize("count", [7, 8])
def test_drawn_medians_are_those_of_numpy(count: int) -> None:
    """Turns of three rounds, the last one shorter; drawn here a second time by hand."""
    rounds = np.random.default_rng(0).permutation(np.arange(1.0, count + 1))
    turns = [rounds[i : i + 3] for i in range(0, count, 3)]
    picked = np.random.default_rng(9).integers(0, 3, size=(50, 3))
    expected = [np.median(np.concatenate([turns[t] for t in draw])) for draw in picked]
    assert _median_draws(rounds, 3, 50, np.random.default_rng(9)).tolist() == expected


def test_what_cannot_be_compared_is_listed(tmp_path: Path) -> None:
    few, enough = noisy(1, 100.0, turns=4), noisy(1, 100.0, turns=5)
    base = {"few": variant(few), "enough": variant(enough), "gone": variant(enough), "lost": variant(enough)}
    other = {**base, "few": variant(enough), "new": variant(enough), "lost": {"unavailable": "no torch"}}
    del other["gone"]
    a = read_run(write(tmp_path / "a.json", extra("Offline", {"batch": 8}, base, turn=TURN)))
    b = read_run(write(tmp_path / "b.json", extra("Offline", {"batch": 8}, other, turn=TURN)))
    frame = compare(a, b).set_index("variant")
    assert frame.verdict.to_dict() == {
        "few": "too few turns",
        "enough": "within noise",
        "gone": "only in A",
        "lost": "unavailable in B: no torch",
        "new": "only in B",
    }
    assert frame.low.notna().tolist() == [False, True, False, False, False]
    assert frame.loc["few", "ratio"] == pytest.approx(np.median(enough) / np.median(few))
    assert frame.attrs["decided"] == 1
    text = render_comparison(a, b, compare(a, b))
    counted = text.splitlines()[-1].removeprefix("B against A: ").removesuffix(".").split(", ")
    assert sorted(counted) == sorted(f"1 {verdict.split(':')[0]}" for verdict in frame.verdict)
    assert "| unavailable in B: no torch |" in text


def test_other_cases_do_not_match(tmp_path: Path) -> None:
    runs = [
        read_run(write(tmp_path / f"{n}.json", extra("Offline", {"batch": n}, {"x": variant([1.0] * 40)})))
        for n in (8, 9)
    ]
    assert compare(*runs).verdict.tolist() == ["only in A", "only in B"]
    assert "No rows match." in render_comparison(*runs)


def test_header_says_what_differs(tmp_path: Path) -> None:
    machine = {**MACHINE, "jaxguard": {**MACHINE["jaxguard"], "jax": "0.11.0"}}  # type: ignore[dict-item]
    record = extra("Offline", {"batch": 8}, {"x": variant([1.0] * 40)})
    a = read_run(write(tmp_path / "a.json", record))
    same = render_comparison(a, read_run(write(tmp_path / "b.json", record)))
    assert "Machine and versions: the same." in same
    assert "Commit: the same, abc123." in same
    assert "Threads: the same in all matched rows." in same
    other = write(tmp_path / "b.json", {**record, "threads": 2, "items": 8}, {}, machine_info=machine,
                  commit_info={"id": "def456"})  # fmt: skip
    text = render_comparison(a, read_run(other))
    assert "Machine and versions: jax 0.10.2 → 0.11.0." in text
    assert "Commit: abc123 → def456." in text
    assert "Threads differ in 1 of 1 matched rows: 1 → 2." in text
    assert "Items differ in 1 of 1 matched rows: 1 → 8." in text
    assert "B: 1 benchmark of the file skipped" in text


def test_level_must_be_a_probability(tmp_path: Path) -> None:
    a = run(tmp_path / "a.json", {"x": 1.0}, 1)
    for level in (0.0, 1.0, float("nan")):
        with pytest.raises(RecordsError, match="level: got"):
            compare(a, a, level=level)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a.json", {"x|y": 100.0}, 1)
    run(tmp_path / "b.json", {"x|y": 80.0}, 2)
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "x\\|y" in line)
    assert line.endswith("| faster |")
    assert "95% probability" in out
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "none.json")]) == 1
    assert "jaxguard bench: " in (err := capsys.readouterr().err)
    assert "none.json: no such file" in err
