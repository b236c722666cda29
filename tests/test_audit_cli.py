"""``jaxguard audit`` from trajectories to adjudicated ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from small_run import done, refused

from jaxguard.cli import main
from jaxguard.evaluation.audit import Annotation, digest, read_set, write_annotations
from jaxguard.traces.convert import write_made
from jaxguard.traces.drift import generate


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_made(generate(12, 3), tmp_path / "data")
    return tmp_path / "data"


def annotate(path: Path, data: Path, who: str, shift: int = 0) -> Path:
    """The set's own labels, each hazard ``shift`` steps later."""
    notes = []
    for own in read_set(data).values():
        first = None if own.first_hazard is None else min(own.first_hazard + shift, len(own) - 1)
        notes.append(Annotation(own.id, digest(own), who, "labelled", first))
    write_annotations(notes, path)
    return path


@pytest.mark.parametrize("name", ["page", "compare", "apply"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["audit", name, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: jaxguard audit {name} ")


def test_from_a_page_to_adjudicated_trajectories(data: Path, tmp_path: Path) -> None:
    said = done("audit", "page", data, "--out", tmp_path / "new" / "page.html", "--sample", 5).out
    assert said.startswith(f"wrote {tmp_path / 'new' / 'page.html'} with 5 trajectories")

    a, b = annotate(tmp_path / "a.jsonl", data, "anna"), annotate(tmp_path / "b.jsonl", data, "ben", -1)
    unsafe = sum(bool(own.unsafe) for own in read_set(data).values())
    said = done("audit", "compare", a, b, "--adjudicated", b, "--trajectories", data, "--out", tmp_path / "out").out
    assert said.endswith(f"{unsafe} disagreements; wrote {tmp_path / 'out'}\n")
    values = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert [p["metrics"]["exact"]["value"] for p in values["pairs"]] == [(12 - unsafe) / 12, 1.0, (12 - unsafe) / 12]
    assert [p["metrics"]["within_one"]["value"] for p in values["pairs"]] == [1.0, 1.0, 1.0]
    only = tmp_path / "out" / "disagreements.jsonl"
    assert f"with {unsafe} traj" in done("audit", "page", data, "--only", only, "--out", tmp_path / "p.html").out

    final = tmp_path / "out" / "final.jsonl"
    said = done("audit", "apply", data, "--annotations", final, "--out", tmp_path / "made").out
    assert said.startswith("12 trajectories: 12 with adjudicated labels, 0 without any")
    before, after = read_set(data), read_set(tmp_path / "made")
    for name, own in before.items():
        assert after[name].first_hazard == (None if own.first_hazard is None else own.first_hazard - 1)
        assert digest(after[name]) == digest(own)
    said = done("audit", "compare", b, "--trajectories", tmp_path / "made").out
    assert "B and S" not in said
    assert "A and S" in said


def test_refusals(data: Path, tmp_path: Path) -> None:
    a = annotate(tmp_path / "a.jsonl", data, "anna")
    assert "expected a second annotation file" in refused("audit", "compare", a)
    assert "holds the trajectories themselves" in refused("audit", "apply", data, "--annotations", a, "--out", data)
    assert "nope" in refused("audit", "compare", a, tmp_path / "nope.jsonl")
    other = tmp_path / "other"
    write_made(generate(12, 4), other)
    message = refused("audit", "apply", other, "--annotations", a, "--out", tmp_path / "made")
    assert f"{a}, line 1: " in message
    assert not (tmp_path / "made").exists()


def test_nothing_heavy_is_needed(data: Path, tmp_path: Path) -> None:
    code = (
        f"from jaxguard.cli import main; main(['audit', 'page', {str(data)!r}, '--out', {str(tmp_path / 'p.html')!r}])"
    )
    code += "; import sys; print([n for n in ('jax', 'torch', 'sklearn') if n in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.splitlines()[-1] == "[]"
