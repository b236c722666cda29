"""The canonical summary and the tables from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from jaxguard.experiments.page import write_summary_page
from jaxguard.experiments.summary import Figure, Paired, Summary, SummaryError, read_summary
from jaxguard.experiments.tables import ahead, claim_table, guard_tables, spread, transfer_tables


def figure(guard: str, value: float, metric: str = "f1", seed: str = "1", experiment: str = "rivals") -> Figure:
    return Figure(experiment, "set", seed, guard, metric, value, value - 0.1, value + 0.1)


def paired(
    guard: str, other: str, value: float, seed: str = "1", experiment: str = "rivals", metric: str = "f1"
) -> Paired:
    return Paired(experiment, "set", seed, guard, other, metric, value, value - 0.05, value + 0.05, 0.02)


SUMMARY = Summary(
    (figure("jaxguard", 0.9), figure("jaxguard", 0.8, seed="2"), figure("mlp", 0.5), figure("mlp", 0.6, seed="2"),
     figure("mlp", math.nan, "mas"), figure("full", 0.9, experiment="ablations"),
     figure("no <memory>", 0.5, experiment="ablations")),
    (paired("jaxguard", "mlp", 0.4), paired("jaxguard", "mlp", 0.2, "2"),
     paired("no <memory>", "full", -0.4, experiment="ablations"),
     paired("no <memory>", "full", -0.02, experiment="ablations", metric="fpr")),
    ("rivals: asb: data/asb is not there",),
)  # fmt: skip


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path / "summary.json")
    found = read_summary(tmp_path / "summary.json")
    assert repr(found) == repr(SUMMARY)  # NaN is not equal to itself
    assert read_summary(tmp_path / "other.json") == Summary()


@pytest.mark.parametrize("text", ["", "[]", '{"summary": 2}', '{"summary": 1, "figures": [{"a": 1}], "paired": []}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(SummaryError, match=r"summary\.json"):
        read_summary(tmp_path / "summary.json")


def test_an_experiment_that_ran_again_replaces_its_rows_and_no_others() -> None:
    again = Summary((figure("jaxguard", 0.1),), (), ("rivals: other: gone",))
    found = SUMMARY.replaced("rivals", again)
    assert found.having("rivals").figures == again.figures
    assert found.having("ablations") == SUMMARY.having("ablations")
    assert found.left_out == ("rivals: other: gone",)


def test_tables_show_means_spread_and_who_is_ahead() -> None:
    (table,) = guard_tables(SUMMARY, "rivals", "jaxguard")
    assert [row[0] for row in table.rows] == ["jaxguard", "mlp"]
    assert table.rows[0][1] == "0.850 ± 0.071"
    assert table.rows[1][-1] == "0.300, above in 2, below in 0 of 2, p ≤ 0.02"
    assert table.head[-1] == "F1 of jaxguard ahead"
    assert "0.850 ± 0.071" in table.text()


def test_what_the_paper_says_is_compared_with_what_happened() -> None:
    (table,) = claim_table(SUMMARY, {"no <memory>": "model.recurrent=false", "other": "x=1"})
    assert [(row[1], row[3]) for row in table.rows] == [
        ("F1 falls", "so here, beyond the interval in 1 of 1"),
        ("FPR rises", "does not"),
    ]


def test_one_value_has_no_spread_and_none_a_dash() -> None:
    assert spread([0.5]) == "0.500"
    assert spread([math.nan]) == "–"
    assert ahead([]) == "–"


def test_transfer_has_rates_by_threshold() -> None:
    rows = tuple(Figure("transfer", "a -> b", s, "own", m, v) for s in "12" for m, v in (("fpr", 0.5), ("auroc", 0.7)))
    (table,) = transfer_tables(Summary(rows))
    assert table.rows == (("own", "–", "–", "0.500 ± 0.000"),)
    assert table.notes == ("AUROC there 0.700 ± 0.000.",)


def test_the_page_shows_every_table_and_escapes_names(tmp_path: Path) -> None:
    tables = {
        "rivals": guard_tables(SUMMARY, "rivals", "jaxguard"),
        "ablations": guard_tables(SUMMARY, "ablations", "full"),
    }
    text = write_summary_page(tmp_path / "report.html", SUMMARY, tables, "plan.yaml").read_text()
    assert "0.850 ± 0.071" in text
    assert "no &lt;memory&gt;" in text
    assert "<memory>" not in text
    assert "data/asb is not there" in text
    assert text.count("<svg") == 4
