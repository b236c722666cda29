"""The report of a run: complete, self-contained, escaped, with the figures of the table."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from benchmarks.samples import MACHINE, extra, variant, write
from jaxguard.benchmarks import plots
from jaxguard.benchmarks.compare import render_comparison
from jaxguard.benchmarks.records import Run, read_run
from jaxguard.benchmarks.report import lead, render_markdown, render_tables, write_report
from jaxguard.benchmarks.table import duration, markdown, significant
from jaxguard.cli import main

EVIL = "<script>alert(1)</script>"


class Checker(HTMLParser):
    """Collects tags, attribute names and text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.names: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.names |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def everything(path: Path, **top: Any) -> Path:
    """A file with every scenario."""

    def two(us: float, rounds: int = 120) -> dict[str, Any]:
        ours = [us * (1 + 0.01 * (i % 7)) for i in range(rounds)]
        return {"jax product": variant(ours, compile_s=1.25), "torch eager": variant([2 * v for v in ours], "torch")}

    floor = {"read": 100.0, "matmul": 20.0}
    extras = [
        extra("SingleStream", {"size": "small", "batch": 1},
              {**two(400.0, 1200), EVIL: {"unavailable": "not <here>"}}, floor_us=floor),
        *(extra("MultiStream", {"size": "small", "batch": n, "gap_ms": gap}, two(300.0 + 20 * n), items=n, threads=2,
                floor_us=floor) for gap in (0, 20) for n in (1, 8, 64)),
        extra("MultiStream", {"size": "paper", "batch": 8}, two(3_000.0), items=8),
        *(extra("Server", {"size": "small", "rate_per_s": n}, two(400.0 + n, 60 if n == 50 else 120))
          for n in (50, 200)),
        extra("Server", {"size": "small", "load": "most"}, two(900.0), holds_per_s={"jax product": 2100.0, EVIL: 0.5}),
        *(extra("Offline", {"size": "small", "batch": n}, two(20.0 * n), items=n) for n in (64, 512)),
        extra("Training", {"size": "small"}, two(38_000.0), items=128),
        extra("ColdStart", {}, two(4.2e6, 3)),
        extra("EndToEnd", {"texts": "short"}, two(21_000.0),
              split_us={"tokenise": 300.0, "encode": 20_000.0, "decide": 3.0}),
    ]  # fmt: skip
    return write(path, *extras, {"other": 1}, **top)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read_run(everything(tmp_path / "run.json"))


def page(run: Run, out: Path) -> tuple[str, Checker]:
    text = write_report(run, out)[0].read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    return text, checker


def test_page_is_complete_and_self_contained(run: Run, tmp_path: Path) -> None:
    text, checker = page(run, tmp_path / "new" / "out")
    shown = " ".join(checker.text)
    for part in ("SingleStream", "MultiStream", "Server", "Offline", "Training", "ColdStart", "EndToEnd", "Some CPU",
                 "The device is a CPU: no GPU figure was measured.", "1 benchmark of the file skipped",
                 "unavailable: not <here>", "floor 100 µs", "encode 20.0 ms, 98.5 %", "arrivals per second",
                 "items per second", "Held, small, most: jax product 2,100/s", "abc123"):  # fmt: skip
        assert part in shown, part
    assert "host-name" not in shown
    assert EVIL not in text
    assert EVIL in shown
    assert not {"script", "img", "link", "iframe"} & set(checker.tags)
    assert not {n for n in checker.names if n.startswith("on")} | ({"src", "href"} & checker.names)
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    # One CDF; a chart for each gap; one under load; one of archives; the split. A single batch makes no chart.
    assert text.count("<svg") == 1 + 2 + 1 + 1 + 1
    for svg in re.findall(r"<svg.*?</svg>", text, re.S):
        ET.fromstring(svg)
        assert "nan" not in svg


def test_markdown_and_csv_have_every_row(run: Run, tmp_path: Path) -> None:
    _, text, table = write_report(run, tmp_path / "out")
    lines = text.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(run.frame) + 2 * 7
    row = next(line for line in lines if line.startswith("| small, batch 1 ") and "torch eager" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["small, batch 1", "torch eager", "1", "1,200", "824 µs", "848 µs", "848 µs", "848 µs", "1,214",
                     "–", "100 µs read", "8.24", "2.00"]  # fmt: skip
    assert "short: tokenise 300 µs, encode 20.0 ms, decide 3.00 µs." in lines
    assert any(line.startswith("Held, small, most: jax product 2,100/s, ") for line in lines)
    assert "- 1 of 33 measurements unavailable; the tables give the reason." in lines
    stored = pd.read_csv(table)
    assert list(stored.columns) == list(run.frame.columns)
    assert stored.p50_us.tolist() == pytest.approx(run.frame.p50_us.tolist(), nan_ok=True)


def test_the_largest_and_smallest_figures_make_a_report(tmp_path: Path) -> None:
    ends = {"jax product": variant([1e-12, 1e15]), "torch eager": variant([1e15] * 200)}
    extras = [
        *(extra("MultiStream", {"batch": n}, ends, items=10**15, floor_us={"read": 1e-12}) for n in (1e-12, 1e15)),
        *(extra("Server", {"rate_per_s": n}, ends, split_us={"a": 1e15}) for n in (1e-12, 1e15)),
        extra("SingleStream", {}, ends, floor_us={"read": 1e15}, turn=10**15),
    ]
    found = read_run(write(tmp_path / "run.json", *extras))
    text, _ = page(found, tmp_path / "out")
    assert not re.search(r"\b(nan|inf)\b", text)
    assert render_comparison(found, found)


def test_rates_are_left_out_where_they_mean_nothing(run: Run) -> None:
    def rate(scenario: str) -> str:
        part = render_markdown(run).split(f"## {scenario}\n")[1]
        row = next(line for line in part.splitlines() if "jax product" in line)
        return row.split("|")[9].strip()

    assert rate("Server") == rate("ColdStart") == "–"
    assert rate("Training") == "3,270"


def test_an_accelerator_is_not_called_a_cpu(tmp_path: Path) -> None:
    machine = {**MACHINE, "jaxguard": {"device": "NVIDIA H200"}}
    run = read_run(everything(tmp_path / "a.json", machine_info=machine))
    assert "NVIDIA H200" in lead(run)
    assert "no GPU figure" not in lead(run) + render_markdown(run)
    unknown = read_run(everything(tmp_path / "a.json", machine_info={}))
    assert "a device that the file does not name" in lead(unknown)
    assert "no GPU figure" not in lead(unknown)


def test_lead_counts_rivals_by_their_ratio(tmp_path: Path) -> None:
    variants = {"jax product": variant([10.0]), "x": variant([5.0], "torch"), "y": variant([30.0], "torch")}
    variants["jax aot"] = variant([40.0])  # no rival
    run = read_run(write(tmp_path / "a.json", extra("Offline", {}, variants)))
    assert "In 1 of 2 measurements of a rival its median is above" in lead(run)
    assert "from 0.500 to 3.00." in lead(run)


def test_nothing_measured_still_makes_a_report(tmp_path: Path) -> None:
    nothing = {"jax product": {"unavailable": "no device"}}
    run = read_run(
        write(tmp_path / "a.json", *(extra(s, {"batch": n, "rate_per_s": n}, nothing, split_us={"a": 0.0})
              for s in ("SingleStream", "MultiStream", "Server", "EndToEnd") for n in (1, 2)))
    )  # fmt: skip
    text, checker = page(run, tmp_path / "out")
    assert "<svg" not in text
    assert " ".join(checker.text).count("unavailable: no device") == 8


def test_one_look_for_each_variant(run: Run) -> None:
    names = {f"v{i}": variant([1.0]) for i in range(20)}
    record = read_run(write(run.path, extra("Offline", {}, names))).records[0]
    looks = plots.styles([record])
    assert set(looks) == {"jax product", *names}
    assert len(set(looks.values())) == 21


def test_cdf_marks_the_floor_and_draws_each_measured_variant(run: Run) -> None:
    looks = plots.styles(run.records)
    svg = plots.latency_cdf(run.records[0], looks)
    for name in ("jax product", "torch eager"):
        assert len(re.findall(rf'<path [^>]*stroke="{looks[name].color}"', svg)) == 1
    floor = [e for e in ET.fromstring(svg).iter() if e.tag.endswith("line") and e.get("x1") == e.get("x2")
             and e.get("stroke-dasharray")]  # fmt: skip
    product = re.search(rf'<path d="M([\d.]+) [^>]*stroke="{looks["jax product"].color}"', svg)
    assert product is not None
    assert len(floor) == 1
    assert float(floor[0].get("x1", "nan")) < float(product[1])


@pytest.mark.parametrize(
    ("us", "text"),
    [(3.0, "3.00 µs"), (999.4, "999 µs"), (999.6, "1.00 ms"), (51_000.0, "51.0 ms"), (999_900.0, "1.00 s"),
     (1.3e6, "1.30 s"), (0.0, "0 µs"), (float("nan"), "–")],
)  # fmt: skip
def test_durations(us: float, text: str) -> None:
    assert duration(us) == text


def test_significant_digits() -> None:
    shown = [significant(v) for v in (0.0123456, 0.9996, 9.996, 99.96, 12_345.6, float("inf"))]
    assert shown == ["0.0123", "1.00", "10.0", "100", "12,346", "–"]


def test_tables_are_aligned_and_escaped() -> None:
    lines = markdown(("a", "b", "c"), [("x|y", "long text", "1"), ("z", "", "unavailable: for a long reason")]).split(
        "\n"
    )
    assert lines[2] == "| x\\|y | long text | 1 |"
    assert len({len(line) for line in lines[:3]}) == 1
    assert lines[3].endswith("| unavailable: for a long reason |")


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = everything(tmp_path / "run.json")
    out = tmp_path / "out"
    assert main(["bench", "report", str(path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(render_tables(read_run(path)))
    assert {p.name for p in out.iterdir()} == {"report.html", "report.md", "table.csv"}
    assert f"wrote {out / 'report.html'}" in printed
    path.write_text("{}")
    assert main(["bench", "report", str(path), "--out", str(tmp_path / "no")]) == 1
    assert "benchmarks: got nothing, expected a list" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "draw"], ["bench", "report", "x"], ["bench", "compare", "x"]]
)
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: jaxguard bench" in capsys.readouterr().err
