"""Runs side by side: figures by hand, undefined ones left out of the mean, and folders without an evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxguard.evaluation.compare import COMPARED, METRICS, CompareError, read_outcome, render_comparison


def run(folder: Path, **values: float | None) -> Path:
    rows = {name: {"value": values.get(name, 0.5), "low": None, "high": None} for name in METRICS}
    (folder / "report").mkdir(parents=True)
    ahead = {name: values.get(f"ahead_{name}", 0.0) for name in ("value", "low", "high")}
    rivals = {
        "logistic (bag)": {"auroc": {"value": values.get("bag", 0.6)}, "sr": {"value": 0.1}, "auroc_ahead": ahead}
    }
    content = {"sections": [{"rows": {"jaxguard": rows, **rivals}}, {"rows": {}}]}
    (folder / "report" / "evaluation.json").write_text(json.dumps(content))
    return folder


def test_rows_mean_and_range(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / "a", f1=0.9, mas=None, bag=0.8, ahead_value=0.3, ahead_low=0.1, ahead_high=0.4),
        run(tmp_path / "b", f1=0.7, mas=3.0, ahead_value=-0.2, ahead_low=-0.3, ahead_high=-0.1),
        run(tmp_path / "c", f1=0.8, ahead_value=None, ahead_low=None, ahead_high=None),
    ]
    lines = render_comparison(runs).splitlines()
    head = lines[0].split()
    assert head == list(COMPARED.values())

    def cell(line: str, metric: str) -> str:
        return line.split()[1 + list(COMPARED).index(metric)]

    assert [cell(line, "f1") for line in lines[1:7]] == ["0.900", "0.700", "0.800", "0.800", "0.700", "0.900"]
    assert [cell(line, "mas") for line in lines[1:7]] == ["–", "3.00", "0.50", "1.75", "0.50", "3.00"]
    assert [cell(line, "logistic (bag)") for line in lines[1:4]] == ["0.800", "0.600", "0.600"]
    assert {cell(line, "logistic (step)") for line in lines[1:7]} == {"–"}
    assert [line.split()[0] for line in lines[4:7]] == ["mean", "lowest", "highest"]
    assert len({len(line) for line in lines[:7]}) == 1
    assert lines[7:] == [
        "AUROC ahead of Bag by 0.050 on average; beyond the interval in 1 of 2 runs, behind beyond it in 1"
    ]


def test_folders_without_a_readable_evaluation(tmp_path: Path) -> None:
    with pytest.raises(CompareError, match=r"no report/evaluation\.json there; run `jaxguard evaluate"):
        read_outcome(tmp_path)
    folder = run(tmp_path / "old")
    for content in ("{", "[]", '{"sections": []}', '{"sections": [{"rows": {"jaxguard": {}}}]}'):
        (folder / "report" / "evaluation.json").write_text(content)
        with pytest.raises(CompareError, match="expected what `jaxguard evaluate` wrote"):
            read_outcome(folder)
    for number, value in enumerate(("much", [], {}, 10**400)):
        with pytest.raises(CompareError, match="expected what `jaxguard evaluate` wrote"):
            read_outcome(run(tmp_path / str(number), f1=value))  # type: ignore[arg-type]


def test_a_routers_run_is_refused_as_such(tmp_path: Path) -> None:
    folder = run(tmp_path / "routed")
    (folder / "router").mkdir()
    with pytest.raises(CompareError, match=r"routed: is a router's, expected guards' runs"):
        read_outcome(folder)
