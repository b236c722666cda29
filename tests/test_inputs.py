"""What a run reads: its split and its trajectories, and what is said where they do not fit."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from small_run import SmallRun, done, lines, native, refused

from jaxguard.config import load_config
from jaxguard.inputs import RunError, even_sources, load_trajectories, open_run
from jaxguard.types import Trajectory

pytestmark = pytest.mark.usefixtures("toy_size")


# Splits


def test_the_split_of_another_run_is_reused_and_kept(small_run: SmallRun, tmp_path: Path) -> None:
    """Other shares and another seed, the same ids; the run then stands on its own."""
    splits = json.loads((small_run.run / "splits.json").read_text())
    splits["splits"]["train"], splits["splits"]["test"] = splits["splits"]["test"], splits["splits"]["train"]
    named = lines(tmp_path / "mine.json", splits)
    config = load_config(None, small_run.settings(f"data.split.file={named}", "data.split.seed=9"))
    assert open_run(tmp_path / "run", config).splits == splits["splits"]
    named.unlink()
    assert open_run(tmp_path / "run").splits == splits["splits"]


def test_split_files_that_do_not_fit(small_run: SmallRun, tmp_path: Path) -> None:
    def opened(name: str, content: object = None) -> str:
        if content is not None:
            lines(tmp_path / name, content)
        settings = small_run.settings(f"data.split.file={tmp_path / name}")
        return refused("train", "--quiet", "--out", tmp_path / f"run-{name}", *settings)

    assert f"data.split.file: {tmp_path / 'none'} does not exist" in opened("none")
    splits = json.loads((small_run.run / "splits.json").read_text())
    parts = splits["splits"]
    renamed = {
        "train": parts["train"],
        "rest": parts["validation"] + parts["test"],
        "calibration": parts["calibration"],
    }
    other = splits | {"splits": renamed}
    assert f"{tmp_path / 'other'}: lacks validation, test, expected the parts train, validation" in opened(
        "other", other
    )
    fewer = splits | {"splits": parts | {"test": parts["test"][1:]}}
    assert f"1 ids ({parts['test'][0]!r}) are among the trajectories, but not in the split" in opened("fewer", fewer)


# Trajectories


def test_trajectories_are_found_by_id(small_run: SmallRun, tmp_path: Path) -> None:
    more = lines(tmp_path / "more.jsonl", native("extra", "look"))
    found = load_trajectories([str(small_run.data), str(more)])
    assert len(found) == 61
    assert found["extra"].steps[0].tool == "look"


def test_trajectories_that_cannot_be_used(small_run: SmallRun, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"data\.trajectories: got no path"):
        load_trajectories([])
    with pytest.raises(RunError, match=r"id 'drift-\d+-0' occurs twice"):
        load_trajectories([str(small_run.data)] * 2)
    with pytest.raises(RunError, match=r"data\.trajectories: no trajectory in .*empty\.jsonl"):
        load_trajectories([str(lines(tmp_path / "empty.jsonl"))])
    with pytest.raises(RunError, match=r"data\.trajectories: .*nowhere does not exist; was it moved"):
        load_trajectories([str(tmp_path / "nowhere")])
    assert "data.store: got no path" in refused(
        "train", "--out", tmp_path / "run", *small_run.settings("data.store=''")
    )


def test_trajectories_that_moved_after_training(small_run: SmallRun, tmp_path: Path) -> None:
    data = shutil.copytree(small_run.data, tmp_path / "data")
    done(*small_run.train(tmp_path / "run", f"data.trajectories=[{data}]", "stage1.steps=0", "stage2.steps=0"))
    data.rename(tmp_path / "elsewhere")
    for name in ("calibrate", "evaluate"):
        assert f"data.trajectories: {data} does not exist" in refused(name, tmp_path / "run")


def test_even_sources_draws_as_many_of_each_as_the_rarest_has() -> None:
    names = [(i, name) for i in range(9) for name in "abc" if name != "c" or i < 4]
    made = [Trajectory(f"{name}{i}", "Do it.", (), source=name) for i, name in names]
    kept = even_sources(made, seed=0)
    assert Counter(t.source for t in kept) == {"a": 4, "b": 4, "c": 4}
    assert [t.id for t in kept] == [t.id for t in made if t in kept]
    assert even_sources(made, seed=0) == kept != even_sources(made, seed=1)
    assert even_sources([], seed=0) == []
