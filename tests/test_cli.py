"""The command line: what it prints, what it leaves on disk, and the message and exit status of a refusal."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import jax
import pyarrow.parquet as pq
import pytest
from small_run import SIZES, HashEncoder, SmallRun, chat, command, done, lines, native, refused

import jaxguard
from jaxguard.cli import main
from jaxguard.config import load_config
from jaxguard.features.store import FeatureStore
from jaxguard.traces.drift import generate
from jaxguard.traces.jsonl import read_trajectories
from jaxguard.traces.registry import format_names
from jaxguard.types import JaxguardError

pytestmark = pytest.mark.usefixtures("toy_size")

COMMANDS = (
    *("formats", "convert", "generate", "embed", "train", "calibrate"),
    *("recalibrate", "transfer", "evaluate", "compare", "diagnose", "score"),
)
BENCH = ("bench compare", "bench report")


# Help and misuse


def test_the_module_runs() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "jaxguard", "--help"], capture_output=True, text=True, check=False, timeout=120
    )
    assert finished.returncode == 0
    assert finished.stderr == ""
    for name in (*COMMANDS, "bench"):
        assert f"\n    {name}" in finished.stdout


def test_a_closed_pipe_ends_quietly() -> None:
    """As in ``jaxguard formats | head -0``."""
    script = "import os, sys; os.close(1); r, w = os.pipe(); os.close(r); os.dup2(w, 1); "
    script += "from jaxguard.cli import main; sys.exit(main(['formats']))"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert finished.returncode == 1
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RecursionError("maximum depth"), 1, "the input is nested too deeply (maximum depth)"),
        (MemoryError(), 1, "out of memory (no more is known)"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 9 GB\nmore"), 1, "out of memory (RESOURCE_EXHAUSTED: 9 GB)"),
        (
            UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
            1,
            "a text cannot be decoded or encoded",
        ),
        (JaxguardError("x: got 1, expected 2"), 1, "x: got 1, expected 2"),
    ],
)
def test_what_ends_a_command_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, message: str
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("jaxguard.traces.registry.all_readers", fail)
    outcome = command("formats")
    assert (outcome.status, outcome.out) == (status, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith(f"jaxguard formats: {message}")


def test_a_bug_is_traced_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("jaxguard.traces.registry.all_readers", fail)
    with pytest.raises(KeyError, match="a bug"):
        command("formats")


@pytest.mark.parametrize("name", [*COMMANDS, *BENCH])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: jaxguard {name} ")
    assert "--verbose" in said


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxguard {jaxguard.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["guess"], "invalid choice: 'guess'"),
        (["train"], "the following arguments are required: --out"),
        (["score", "x"], "the following arguments are required: --out"),
    ],
)
def test_misuse_is_status_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Settings


def test_unknown_keys_and_bad_values_are_named(tmp_path: Path) -> None:
    def train(*overrides: str) -> str:
        return refused("train", "--out", tmp_path / "run", *overrides)

    assert "stage1.stesp: unknown key; did you mean stage1.steps? known here: batch_size" in train("stage1.stesp=3")
    assert "stage1.steps: got 'many' (str), expected int" in train("stage1.steps=many")
    assert "override 'steps': expected key=value, e.g. stage1.steps=500" in train("steps")
    assert "decision.alpha_hold: got 2.0, expected a level in (0, 1)" in train("decision.alpha_hold=2")
    assert f"config file {tmp_path / 'none.yaml'}: No such file" in refused(
        "train", "--out", tmp_path / "run", "--config", tmp_path / "none.yaml"
    )
    (tmp_path / "bad.yaml").write_text("stage1: {colour: red}")
    assert "stage1.colour: unknown key" in refused(
        "generate", "--out", tmp_path / "x", "--config", tmp_path / "bad.yaml"
    )
    assert not (tmp_path / "run").exists()


def test_overrides_win_over_the_file_wherever_they_stand(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("data: {drift: {trajectories: 4, seed: 5}}")
    done("generate", "--config", tmp_path / "c.yaml", "--out", tmp_path / "file")
    done("generate", "--config", tmp_path / "c.yaml", "--out", tmp_path / "after", "data.drift.trajectories=2")
    done("generate", "data.drift.trajectories=2", "--config", tmp_path / "c.yaml", "--out", tmp_path / "before")
    for folder, count in (("file", 4), ("after", 2), ("before", 2)):
        assert list(read_trajectories(tmp_path / folder)) == list(generate(count, 5))


# Commands


def test_formats() -> None:
    assert [line.split()[0] for line in done("formats").out.splitlines()] == format_names()


def test_convert(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    lines(archive / "a.jsonl", chat("one", "look"), "{", native("two"))
    (archive / "b.json.gz").write_bytes(gzip.compress(json.dumps([chat("three", "send")]).encode()))
    (archive / "notes.txt").write_text("mine")
    said = done("convert", archive, "--out", tmp_path / "out").out
    assert "a.jsonl: 1 openai_chat, 1 jaxguard; 1 rejected records" in said
    assert "b.json.gz: 1 openai_chat; 0 rejected records" in said
    assert "not read: notes.txt" in said
    assert "4 records, 3 converted, 1 rejected, 3 trajectories, 2 steps, 1 without steps" in said
    assert len(list(read_trajectories(tmp_path / "out"))) == 3


def test_generate(small_run: SmallRun) -> None:
    assert small_run.said["generate"].out == f"wrote 60 drift trajectories of seed 20260701 to {small_run.data}\n"
    assert list(read_trajectories(small_run.data)) == list(generate(60, 20260701))


def test_embed(small_run: SmallRun, tmp_path: Path) -> None:
    store = FeatureStore.open(small_run.store)
    assert (
        f"{len(store):,} distinct texts of 60 trajectories: {len(store):,} encoded by hash"
        in small_run.said["embed"].out
    )
    HashEncoder.seen.clear()
    again = ("embed", "--quiet", "--store", tmp_path / "store", "--trajectories", small_run.data)
    done(*again)
    more = lines(tmp_path / "more.jsonl", native("extra", "look"))
    said = done(*again, "--trajectories", more).out
    assert f"{len(store) + 2:,} distinct texts of 61 trajectories: 2 encoded" in said
    assert f"{len(store):,} were there" in said
    assert len(HashEncoder.seen) == len(set(HashEncoder.seen)) == len(store) + 2


def test_train_calibrate_and_evaluate_say_what_they_did(small_run: SmallRun) -> None:
    assert small_run.said["train"].out.startswith("trained experiment in ")
    assert str(small_run.guard) in small_run.said["train"].out
    calibrated = small_run.said["calibrate"].out
    stored = json.loads((small_run.guard / "calibration.json").read_text())
    assert f"BLOCK above {stored['block']['value']:.4f}: alpha 0.2 on {stored['block']['n']} safe" in calibrated
    assert f"HOLD above {stored['hold']['value']:.4f}: alpha 0.3 on {stored['hold']['n']} safe" in calibrated
    evaluated = small_run.said["evaluate"].out
    assert "logistic (step)" in evaluated
    assert evaluated.endswith(f"wrote {small_run.run / 'report' / 'report.html'}\n")
    for outcome in small_run.said.values():
        assert "%|" not in outcome.err


def test_score(small_run: SmallRun, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.jsonl", chat("one", "look", "send"), "{", native("two"))
    said = done("score", archive, "--guard", small_run.guard, "--out", tmp_path / "out", "--quiet").out
    assert "3 records, 1 rejected: 2 trajectories, 2 steps" in said
    assert f"wrote {tmp_path / 'out'}" in said
    decided = json.loads((tmp_path / "out" / "manifest.json").read_text())["decisions"]
    assert "trajectories: " + ", ".join(f"{n} {name}" for name, n in decided.items()) in said
    assert pq.read_table(tmp_path / "out" / "steps").num_rows == 2
    assert "this run: 2 steps scored, 6 texts embedded" in said
    again = done("score", archive, "--guard", small_run.guard, "--out", tmp_path / "out", "--quiet").out
    assert "this run: 0 steps scored, 0 texts embedded, 0 programs compiled" in again


def test_files_that_could_not_be_read_are_status_3(small_run: SmallRun, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    lines(archive / "a.jsonl", native("one", "look"), "{]")
    lines(archive / "odd.jsonl", {"of": "no known format"})
    convert = ("convert", archive, "--out", tmp_path / "converted")
    score = ("score", archive, "--guard", small_run.guard, "--out", tmp_path / "out", "--quiet")
    done(*convert)
    done(*score)
    (archive / "b.zip").write_text("no zip")
    said = command(*convert)
    assert said.status == 3
    assert "unread, or not to its end: b.zip" in said.out
    manifest = json.loads((tmp_path / "converted" / "manifest.json").read_text())
    assert [file["file"] for file in manifest["files"] if file["unread"]] == ["b.zip"]
    assert len(list(read_trajectories(tmp_path / "converted"))) == 1
    said = command(*score)
    assert said.status == 3
    assert "unread, another run tries again: b.zip" in said.out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert list(manifest["unread_files"]) == ["b.zip"]
    assert pq.read_table(tmp_path / "out" / "trajectories")["trajectory_id"].to_pylist() == ["one"]
    (archive / "b.zip").unlink()
    done(*convert)
    done(*score)


def test_bars_are_shown_unless_quiet(small_run: SmallRun, tmp_path: Path) -> None:
    archive = lines(tmp_path / "a.jsonl", native("one", "look"))
    score = ("score", archive, "--guard", small_run.guard)
    assert "%|" in done(*score, "--out", tmp_path / "loud").err
    assert "%|" not in done(*score, "--out", tmp_path / "quiet", "--quiet").err


# Missing files


def test_missing_files_are_named(small_run: SmallRun, tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert f"{none}: there is no such file or folder" in refused("convert", none, "--out", tmp_path / "out")
    assert f"{none}: there is no such file or folder" in refused(
        "score", none, "--guard", small_run.guard, "--out", tmp_path / "out"
    )
    assert f"guard bundle {none}: no guard.json there" in refused(
        "score", small_run.data, "--guard", none, "--out", tmp_path / "out"
    )
    assert f"{none}: no file" in refused("embed", "--trajectories", none, "--store", tmp_path / "store")
    assert f"data.trajectories: {none} does not exist" in refused(
        "train", "--out", tmp_path / "run", *SIZES, f"data.trajectories=[{none}]"
    )
    assert f"feature store {none}: no manifest.json there" in refused(
        *small_run.train(tmp_path / "run", f"data.store={none}")
    )


def test_unknown_format_names_the_known_ones(small_run: SmallRun, tmp_path: Path) -> None:
    message = refused("convert", small_run.data, "--out", tmp_path / "out", "--format", "opnai_chat")
    assert "opnai_chat" in message
    assert "openai_chat" in message.replace("opnai_chat", "")


def test_disk_errors_are_messages(small_run: SmallRun, tmp_path: Path) -> None:
    """A file stands where a folder is to be made."""
    taken = lines(tmp_path / "taken", "mine")
    for arguments in (
        ("generate", "--out", taken, "data.drift.trajectories=2"),
        ("convert", small_run.data, "--out", taken),
        ("score", small_run.data, "--guard", small_run.guard, "--out", taken),
        ("embed", "--trajectories", small_run.data, "--store", taken),
        small_run.train(taken),
    ):
        assert str(taken) in refused(*arguments)
    assert taken.read_text() == "mine"


def test_the_configuration_of_a_run_is_complete(small_run: SmallRun) -> None:
    """Every key is written, so that a later change of a default does not change the run."""
    text = (small_run.run / "config.yaml").read_text()
    for key in ("free_nats", "window", "join_actions", "posterior_scale", "max_tokens"):
        assert f"{key}:" in text
    assert load_config(small_run.run / "config.yaml").stage1.steps == 3


def test_verbose_says_more(small_run: SmallRun, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arguments = small_run.train(tmp_path / "run", "stage1.steps=0", "stage2.steps=0")
    assert command(*arguments, "--verbose").status == 0
    assert any(r.getMessage().startswith("training ") and " parameters on " in r.getMessage() for r in caplog.records)
