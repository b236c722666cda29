"""The report of a scored archive: its figures are those of the tables, and nothing in the folder can mislead it."""

from __future__ import annotations

import hashlib
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archive_results import made, quiet, write_shard
from scipy import stats
from small_run import SmallRun, at_toy_size, chat, done, lines, native, refused

from jaxguard.evaluation import archive_leads, tally
from jaxguard.evaluation.archive import Archive, read_archive
from jaxguard.evaluation.archive_folder import COLUMNS, Results
from jaxguard.evaluation.archive_page import render, report_archive
from jaxguard.evaluation.tally import Tally, together
from jaxguard.guard import Guard
from jaxguard.ranking import auroc
from jaxguard.results import ResultsError
from jaxguard.scoring import shards
from jaxguard.scoring.archive import score_archive
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.types import JaxguardError

NASTY = "<script>alert(1)</script>\u202e\x1b[31m\ud800"


@pytest.fixture(scope="module")
def scored(small_run: SmallRun, compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trajectories with labels and domains, chats without, and records that are none; over three files."""
    archive = tmp_path_factory.mktemp("results") / "archive"
    archive.mkdir()
    shutil.copy(small_run.data / "trajectories.jsonl.gz", archive / "drift.jsonl.gz")
    lines(archive / "chats.jsonl", *(chat(f"chat {i}", "look", "send") for i in range(9)), '{"id": "cut', {"a": 1})
    more = {"metadata": {"service": "mail", "domain": ["a", 1]}}
    lines(archive / "own.jsonl", native("same", "look", "drop", **more), native("same", "look"), native("none"))
    out = archive.parent / "scored"
    with at_toy_size(compiled):
        score_archive(archive, Guard.load(small_run.guard), out, progress=False)
    return out


@pytest.fixture
def copied(scored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(scored, tmp_path / "copied")


def frame(folder: Path, kind: str) -> pd.DataFrame:
    return pd.concat([pq.read_table(path).to_pandas() for path in sorted((folder / kind).iterdir())])


def page_of(folder: Path) -> str:
    return report_archive(folder)[1].read_text(encoding="utf-8")


def test_it_knows_the_layout_that_scoring_writes() -> None:
    """The two may not import each other."""
    for kind, schema in (("steps", shards.STEPS), ("trajectories", shards.TRAJECTORIES)):
        assert {name: schema.field(name).type for name in COLUMNS[kind]} == COLUMNS[kind]


def test_figures_are_those_of_the_tables(scored: Path) -> None:
    archive = read_archive(scored)
    outcomes, steps = frame(scored, "trajectories"), frame(scored, "steps")
    joined = steps.merge(outcomes, on=["shard", "trajectory_id"], suffixes=("", "_of"))
    assert len(joined) == len(steps) == archive.results.counts["steps"]
    metadata = joined["metadata"].map(json.loads)
    for key, names in (
        ("tool", joined["tool"]),
        ("source", joined["source"]),
        ("domain", metadata.map(lambda own: own.get("domain", "(not given)"))),
        ("service", metadata.map(lambda own: own.get("service", "(not given)"))),
    ):
        names = names.map(lambda name: name if isinstance(name, str) else json.dumps(name))
        expected = {
            name: (
                len(of),
                (of.decision == "HOLD").sum(),
                (of.decision == "BLOCK").sum(),
                of.hazard.astype(float).mean(),
            )
            for name, of in joined.groupby(names)
        }
        found = {row.name: (row.count, row.hold, row.block, pytest.approx(row.mean)) for row in rows(archive, key)}
        assert found == expected
        largest = joined["hazard"].groupby(names).max()
        assert {row.name: row.largest for row in rows(archive, key)} == pytest.approx(largest.to_dict())
    assert archive.decisions == outcomes["decision"].value_counts().to_dict()
    labelled = outcomes[outcomes["unsafe"].notna()]
    unsafe, alert = labelled["unsafe"].astype(bool), labelled["decision"] != "PASS"
    detection = archive.detection
    assert detection is not None
    assert (detection.unsafe, detection.safe) == (unsafe.sum(), (~unsafe).sum())
    assert (detection.sr, detection.fpr) == pytest.approx((alert[unsafe].mean(), alert[~unsafe].mean()))
    assert detection.auroc == pytest.approx(auroc(labelled["max_fused"], unsafe))
    maxima = np.asarray(archive.results.calibration.hold_maxima, np.float32)
    test = stats.ks_2samp(outcomes["max_fused"], maxima, method="asymp")
    assert archive.drift.distance == pytest.approx(test.statistic)
    assert archive.drift.p_value == pytest.approx(test.pvalue)
    assert abs(np.subtract(*archive.drift.below)) == pytest.approx(test.statistic)
    assert archive.drift.alerts[1] == pytest.approx((outcomes["decision"] != "PASS").mean())
    np.testing.assert_array_equal(archive.drift.bins[0], np.histogram(outcomes["max_fused"], np.linspace(0, 1, 26))[0])
    by_file = outcomes.groupby("file")
    assert {row.name: row.count for row in archive.drift.files.rows()} == by_file.size().to_dict()
    ranks = outcomes["max_fused"].map(lambda own: ((maxima < own).mean() + (maxima <= own).mean()) / 2)
    assert {row.name: row.mean for row in archive.drift.files.rows()} == pytest.approx(
        ranks.groupby(outcomes["file"]).mean().to_dict()
    )


def rows(archive: Archive, key: str) -> list[tally.Row]:
    return archive.breakdowns[key].rows()


def test_the_page_and_the_terminal_show_them(scored: Path) -> None:
    archive, path = report_archive(scored)
    assert path == scored / "report" / "report.html"
    page, said = path.read_text(encoding="utf-8"), render(archive)
    counts = json.loads((scored / "manifest.json").read_text())["counts"]
    assert counts["records"] == counts["converted"] + counts["rejected"]
    sentence = f"{counts['records']:,} records of 3 files = {counts['converted']:,} scored + 2 rejected"
    assert sentence in page
    assert sentence in said
    steps = frame(scored, "steps")
    for name, of in steps.groupby("tool"):
        block, hold = ((of.decision == decision).mean() for decision in ("BLOCK", "HOLD"))
        if f"<td>{name}</td>" in page:
            cells = re.search(rf"<td>{name}</td><td>([\d,]+)</td><td>(.*?) %</td><td>(.*?) %</td>", page)
            assert cells is not None
            assert cells[1] == f"{len(of):,}"
            assert (cells[2], cells[3]) == (f"{100 * hold:.1f}", f"{100 * block:.1f}")
    assert "<script" not in page
    assert max(map(len, said.splitlines())) <= 100
    assert "Where labels exist" in page
    assert "the first of its kind" in page
    assert "chats.jsonl, record 9" in page


def test_the_command(scored: Path) -> None:
    outcome = done("report", scored)
    assert "Read first" in outcome.out
    assert outcome.out.endswith(f"wrote {scored / 'report' / 'report.html'}\n")


def test_the_riskiest_come_first_with_their_texts(scored: Path) -> None:
    leads = read_archive(scored).leads
    table = frame(scored, "trajectories").query("steps > 0").copy()
    table["severity"] = table["decision"].map({"PASS": 0, "HOLD": 1, "BLOCK": 2})
    best = table.sort_values(["severity", "max_fused"], ascending=False).iloc[0]
    assert leads[0].max_fused == best.max_fused
    keys = [({"BLOCK": 2, "HOLD": 1, "PASS": 0}[lead.decision], lead.max_fused) for lead in leads]
    assert keys == sorted(keys, reverse=True)
    steps = frame(scored, "steps")
    for lead in leads:
        own = steps[steps["trajectory_id"] == lead.id]
        if own["step"].is_unique:
            assert lead.tools == own["tool"].tolist()[: archive_leads.MOST_STEPS]
            assert lead.near[0].fused == pytest.approx(own["fused"].iloc[lead.near[0].number])
    assert any(lead.instruction is not None and lead.near[0].arguments is not None for lead in leads)


def test_texts_of_two_trajectories_with_one_id_are_told_apart(
    small_run: SmallRun, compiled: Path, tmp_path: Path
) -> None:
    """In a shard's tables the second is renamed, and so it is among its texts."""
    archive = lines(tmp_path / "own.jsonl", native("same", "look", "drop"), native("same", "look"))
    with at_toy_size(compiled):
        score_archive(archive, Guard.load(small_run.guard), tmp_path / "scored", progress=False)
    (path,) = (tmp_path / "scored" / "top").iterdir()
    assert {made.id: len(made) for made in read_trajectories(path)} == {"same": 2, "same~2": 1}


def test_an_alarm_is_shown_where_there_is_one(tmp_path: Path) -> None:
    archive, path = report_archive(made(tmp_path / "a", quiet(), quiet(), alarm=25))
    said = render(archive)
    assert said.startswith("SHIFT ALARM: From about trajectory 25 (file 1.jsonl, record 5) on")
    page = path.read_text()
    assert 'role="alert"><b>Shift alarm</b> From about trajectory 25 (file 1.jsonl, record 5) on' in page
    assert "<b>ALARM</b>" in page
    archive, path = report_archive(made(tmp_path / "b", quiet(), quiet()))
    assert "ALARM" not in render(archive)
    assert "as far as can be told" in render(archive).replace("\n", " ")
    assert 'role="alert"' not in path.read_text()
    assert "ALARM" not in path.read_text()


def test_a_distribution_that_moved_is_told(tmp_path: Path) -> None:
    archive = read_archive(made(tmp_path / "a", [{"fused": [0.8]}] * 30))
    assert archive.drift.distance == 1.0
    assert archive.drift.p_value < 1e-6
    said = " ".join(render(archive).split())
    assert (
        "100.0 % of the trajectories are HOLD or BLOCK; of safe ones like those of the calibration set at most" in said
    )
    assert "much higher than those of the 99 calibration trajectories (KS distance 1.000, p < 0.0001)" in said
    assert "no sign of safety" not in said
    low = " ".join(render(read_archive(made(tmp_path / "b", [{"fused": [0.001]}] * 30))).split())
    assert "0.0 % of the trajectories are HOLD or BLOCK" in low
    assert "much lower than those of the 99 calibration trajectories" in low
    assert "Few alerts are then no sign of safety" in low


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\u202e\x1b[31m"
    nasty = {"fused": [0.1, 0.95], "tools": [hostile, hostile], "id": hostile, "source": hostile, "text": hostile,
             "metadata": {"service": hostile, "domain": NASTY}}  # fmt: skip
    reject = {"file": hostile, "position": 3, "reason": f"bad: {hostile}"}
    archive, path = report_archive(made(tmp_path / "a", [nasty, *quiet()], rejects=[reject], unread={hostile: hostile}))
    page, said = path.read_text(encoding="utf-8"), render(archive)
    assert "<script" not in page
    assert html.escape("<script>alert(1)</script>") in page
    for text in (page, said):
        assert not set("\u202e\x1b\ud800") & set(text)
    assert re.search(r"default-src 'none'", page)


def test_one_template_does_not_fill_the_list(tmp_path: Path) -> None:
    same = [{"fused": [0.99 - i / 1000], "text": f"Send parcel {i}  to  Bob", "id": f"s{i}"} for i in range(30)]
    other = [{"fused": [0.7], "text": "Something else", "id": "other"}]
    without = [{"fused": [0.65, 0.1], "tools": ["a", "b"]}] * 5
    leads = read_archive(made(tmp_path / "a", [*same, *other, *without])).leads
    assert [lead.id for lead in leads] == [*(f"s{i}" for i in range(17)), "other", "t31", "t32"]
    assert [lead.more for lead in leads] == [13, *[0] * 17, 3, 0]
    assert [lead.instruction is None for lead in leads] == [False] * 18 + [True] * 2
    page = page_of(tmp_path / "a")
    assert "At least 13 more of this instruction, numbers aside, are not shown." in page
    assert "At least 3 more of the same tools are not shown." in page
    assert "Its texts are not in the folder of results" in page


def test_every_alert_comes_before_what_passes(tmp_path: Path) -> None:
    alerts = [{"fused": [0.99 - i / 1000], "text": f"Send parcel {i}", "id": f"s{i}"} for i in range(4)]
    passing = [{"fused": [0.1 - i / 1000], "text": f"Alone {'x' * i}", "id": f"p{i}"} for i in range(30)]
    passing += [{"fused": [0.2], "text": "Alone", "id": f"q{i}"} for i in range(3)]
    leads = read_archive(made(tmp_path / "a", [*alerts, *passing])).leads
    assert [lead.id for lead in leads[:7]] == ["s0", "s1", "s2", "s3", "q0", "q1", "p1"]
    assert [lead.decision == "PASS" for lead in leads] == [False] * 4 + [True] * 16
    assert [lead.more for lead in leads[:6]] == [0, 0, 0, 0, 2, 0]


def test_a_template_of_many_shards_leaves_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do those of which the folder holds no text, where others with the same tools were shown with theirs."""
    monkeypatch.setattr(archive_leads, "PER_SHARD", 10)
    template = [{"fused": [0.99], "text": "Send parcel 3", "id": f"s{i}"} for i in range(5)] + [{"fused": [0.98]}] * 4
    other = [{"fused": [0.61], "tools": ["drop"], "text": f"Alone {name}", "id": name} for name in "ab"]
    leads = read_archive(made(tmp_path / "a", *[template] * 9, [*template, *other])).leads
    assert [lead.id for lead in leads] == ["s0", "s1", "s2", "s3", "s4"] * 3 + ["s0", "s1", "s2", "s3", "a"]
    assert [lead.more for lead in leads] == [10 * 5 - 19, *[0] * 19]


def test_only_the_riskiest_are_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_leads, "GROUPS", 3)
    risks = np.random.default_rng(0).permutation(200).reshape(4, 50) / 200
    folder = made(tmp_path / "a", *([{"fused": [f], "tools": [f"{f}"]} for f in own] for own in risks.tolist()))
    expected = sorted(risks.ravel().tolist(), reverse=True)[:3]
    assert [lead.max_fused for lead in read_archive(folder).leads] == pytest.approx(expected)


def test_a_long_trajectory_is_shown_around_its_peak(tmp_path: Path) -> None:
    fused = [0.1] * 500
    fused[300] = 0.97
    tools = [f"tool_{t}" for t in range(500)]
    folder = made(
        tmp_path / "a", [{"fused": fused, "tools": tools, "text": "long", "first_hazard": 301, "unsafe": True}]
    )
    (lead,) = read_archive(folder).leads
    assert lead.peak == 300
    assert [own.number for own in lead.near] == [298, 299, 300, 301, 302]
    assert lead.near[2].tool == "tool_300"
    assert lead.near[2].arguments == "n=300"
    assert lead.first <= 298
    assert lead.tools[300 - lead.first] == "tool_300"
    page = page_of(folder)
    assert f"Steps {lead.first} to {lead.first + 59} of 500." in page
    assert "step 300: tool_300, fused 0.970, BLOCK" in page
    assert '<tr class="first-hazard"><td>301</td>' in page


def test_scores_that_are_not_finite(tmp_path: Path) -> None:
    archive = read_archive(made(tmp_path / "a", [{"fused": [0.2, np.nan], "tools": ["a", "b"]}, *quiet()]))
    assert archive.leads[0].max_fused == np.inf
    assert archive.leads[0].peak == 1
    row = next(row for row in rows(archive, "tool") if row.name == "b")
    assert (row.count, row.finite, row.hold) == (1, 0, 1)
    assert "not finite" in render(archive)
    assert "1 not scored" in page_of(tmp_path / "a")


def test_names_without_end_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "KEPT", 10)
    own = Tally()
    names = [f"n{i}" for i in range(25)]
    for _ in range(2):
        own.add(names, np.arange(25), np.full(25, 2, np.int8), np.arange(25.0))
    assert sorted(row.name for row in own.rows()) == sorted(names[:10])
    later = own.later()
    assert later is not None
    assert (later.count, later.block, later.mean, later.largest) == (30, 30, 17.0, 24.0)
    assert own.total().count == 50
    both = together([*own.rows(), later])
    assert (both.count, both.mean, both.largest) == (50, 12.0, 24.0)
    long = Tally()
    long.add(["x" * 1_000_000, "x" * 1_000_000 + "y"], np.array([0, 1]), np.zeros(2, np.int8), np.zeros(2))
    assert [len(row.name) < 300 for row in long.rows()] == [True, True]


def test_rows_with_few_steps_do_not_come_first() -> None:
    own = Tally()
    decision = np.array([2] + [2] * 80 + [0] * 20 + [1] * 50 + [0] * 200, np.int8)
    names = np.array([0] + [1] * 100 + [2] * 50 + [3] * 200)
    own.add(["once", "often", "held", "never"], names, decision, np.zeros(len(names)))
    assert [row.name for row in own.rows()] == ["often", "once", "held", "never"]
    assert tally.wilson_low(80, 100) == pytest.approx(
        stats.binomtest(80, 100).proportion_ci(method="wilson").low, abs=1e-5
    )


def test_an_unfinished_run_is_reported_as_one(copied: Path, tmp_path: Path) -> None:
    (copied / "manifest.json").unlink()
    archive, path = report_archive(copied)
    assert render(archive).startswith("UNFINISHED: the run has not ended.")
    assert "<b>Unfinished</b>" in path.read_text()
    assert archive.drift.alarm_at is None
    folder = made(tmp_path / "a", quiet(), alarm=3)
    write_shard(folder, f"{9:032x}", "later.jsonl", quiet(3), [])
    part = folder / "parts" / f"{9:032x}-00000.json"
    part.write_text(part.read_text().replace('"last": true', '"last": false'))
    archive = read_archive(folder)
    assert "there are other shards" in archive.results.unfinished
    assert archive.incomplete == ["later.jsonl"]
    assert "later.jsonl only in part" in " ".join(render(archive).split())
    assert "ALARM" not in render(archive)


def test_an_archive_of_which_nothing_could_be_scored(small_run: SmallRun, compiled: Path, tmp_path: Path) -> None:
    lines(tmp_path / "in" / "a.jsonl", {"a": 1}, {"b": 'quoted "x" 1'})
    with at_toy_size(compiled), pytest.raises(JaxguardError, match="nothing could be scored"):
        score_archive(tmp_path / "in", Guard.load(small_run.guard), tmp_path / "out", progress=False)
    archive, path = report_archive(tmp_path / "out")
    assert "No trajectory to compare" in path.read_text()
    assert sum(reason.count for reason in archive.reasons.values()) > 0
    assert archive.leads == []
    assert "0 trajectories" in render(archive)


def test_rejects_are_grouped(tmp_path: Path) -> None:
    rejects = [{"file": "a.jsonl", "position": i, "reason": f"field 'f{i}' at {i}: odd"} for i in range(7)]
    archive, path = report_archive(
        made(tmp_path / "a", quiet(), rejects=[*rejects, {"file": "b", "position": 1, "reason": "cut"}])
    )
    assert [(kind, own.count) for kind, own in archive.reasons.items()] == [("field '…' at 0: odd", 7), ("cut", 1)]
    assert archive.reasons["field '…' at 0: odd"].places == [f"a.jsonl, record {i}" for i in range(3)]
    assert html.escape("field 'f0' at 0: odd", quote=True).replace("&#x27;", "&#39;") in path.read_text()


def test_scoring_leaves_the_calibration_beside_its_results(
    scored: Path, copied: Path, small_run: SmallRun, compiled: Path
) -> None:
    guard = json.loads((scored / "job.json").read_text())
    text = (scored / "calibration.json").read_bytes()
    assert hashlib.sha256(text).hexdigest()[:32] == guard["calibration"]
    (copied / "calibration.json").unlink()
    with pytest.raises(ResultsError, match=r"calibration.json: is not there; the same `jaxguard score` command"):
        read_archive(copied)
    with at_toy_size(compiled):
        again = score_archive(scored.parent / "archive", Guard.load(small_run.guard), copied, progress=False)
    assert again.run["steps"] == 0
    assert (copied / "calibration.json").read_bytes() == text


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    assert "job.json there, expected a folder that `jaxguard score` wrote" in refused("report", tmp_path / "none")
    (tmp_path / "job.json").write_text('{"jaxguard_scores": 99}')
    with pytest.raises(ResultsError, match="jaxguard_scores is 99, expected 2"):
        Results(tmp_path)
    for content in ("{", "[]", "[" * 100_000, '"\xff"'):
        (tmp_path / "job.json").write_text(content, encoding="latin-1")
        with pytest.raises(ResultsError, match=r"job\.json: .*expected"):
            Results(tmp_path)


def first(folder: Path, kind: str) -> Path:
    return min((folder / kind).iterdir())


@pytest.mark.parametrize("kind", ["steps", "trajectories", "top", "rejects"])
def test_damaged_files_are_named(copied: Path, kind: str) -> None:
    path = first(copied, kind)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ResultsError, match=rf"{path.name}: is not what was written there; delete parts/"):
        read_archive(copied)
    path.unlink()
    with pytest.raises(ResultsError, match=rf"{path.name}: is gone"):
        read_archive(copied)


def resigned(folder: Path, path: Path, kind: str) -> None:
    part = folder / "parts" / f"{path.stem}.json"
    record = json.loads(part.read_text())
    record["sha256"][kind] = hashlib.sha256(path.read_bytes()).hexdigest()
    part.write_text(json.dumps(record))


def test_tables_that_say_something_impossible_are_refused(tmp_path: Path) -> None:
    def broken(change: Any, kind: str = "steps", content: bytes | None = None) -> str:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        folder = made(tmp_path / "a", quiet())
        path = first(folder, kind)
        if content is None:
            pq.write_table(change(pq.read_table(path)), path)
        else:
            path.write_bytes(content)
        resigned(folder, path, kind)
        with pytest.raises(ResultsError) as error:
            read_archive(folder)
        return str(error.value)

    def put(name: str, values: pa.Array) -> Any:
        return lambda table: table.set_column(table.schema.get_field_index(name), name, values)

    assert "is no table of this kind" in broken(None, content=b"PAR1 nothing")
    assert "is no table of this kind" in broken(lambda table: table.drop_columns(["tool"]))
    assert "column hazard is missing, expected float" in broken(lambda table: table.drop_columns(["hazard"]))
    assert "column hazard is double, expected float" in broken(put("hazard", pa.array(np.zeros(20))))
    assert "column tool has empty rows" in broken(put("tool", pa.nulls(20, pa.string())))
    assert "holds 3 rows, expected 20" in broken(lambda table: table.slice(0, 3))
    assert "got 'MAYBE', expected one of PASS" in broken(put("decision", pa.array(["MAYBE"] * 20)))
    lengths = put("steps", pa.array([2] * 20, pa.int32()))
    assert "has 40 steps, expected 20" in broken(lengths, "trajectories")
    assert "column metadata" in broken(put("metadata", pa.array(["{"] * 20)), "trajectories")


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", quiet())
    good = {name: (folder / name).read_text() for name in ("manifest.json", "calibration.json")}
    (folder / "manifest.json").write_text('{"counts": {}, "guard": 1}')
    with pytest.raises(ResultsError, match=r"manifest.json: is of another guard or job"):
        read_archive(folder)
    (folder / "manifest.json").write_text(json.dumps(json.loads(good["manifest.json"]) | {"shift": 3}))
    with pytest.raises(ResultsError, match=r"manifest.json: shift is '3', expected a dict"):
        read_archive(folder)
    (folder / "manifest.json").write_text(good["manifest.json"])
    (folder / "calibration.json").write_text(good["calibration.json"] + " ")
    with pytest.raises(ResultsError, match=r"calibration.json: is not the calibration that job.json names"):
        read_archive(folder)
    (folder / "calibration.json").write_text(good["calibration.json"])
    part = first(folder, "parts")
    record = json.loads(part.read_text())
    for change, message in (
        ({"counts": 3}, "expected what `jaxguard score` wrote"),
        ({"shard": "7"}, "is of another shard"),
        ({"counts": record["counts"] | {"rejected": 4}}, "20 records, expected 20 converted \\+ 4 rejected"),
        ({"counts": record["counts"] | {"rejected": 4, "records": 24}}, "holds 0 rejects, expected 4"),
    ):
        part.write_text(json.dumps(record | change))
        with pytest.raises(ResultsError, match=message):
            read_archive(folder)
    part.unlink()
    (folder / "manifest.json").unlink()
    with pytest.raises(ResultsError, match="has not finished a shard yet"):
        read_archive(folder)
