"""The lock on an output folder: one holder at a time, and no trace of it afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxguard.traces.lock import LOCK_FILE, locked
from jaxguard.types import JaxguardError


def test_a_second_holder_is_refused(tmp_path: Path) -> None:
    with (
        locked(tmp_path / "out"),
        pytest.raises(JaxguardError, match="out: another process is writing there, expected one at a time"),
        locked(tmp_path / "out"),
    ):
        pass
    with locked(tmp_path / "out"):
        pass


def test_a_killed_holder_does_not_hold_on(tmp_path: Path) -> None:
    script = (
        "import os; from pathlib import Path; from jaxguard.traces.lock import locked\n"
        f"with locked(Path({str(tmp_path)!r})): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=120).returncode == 9
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_made_and_stayed_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="stop"), locked(tmp_path / "made"):
        raise RuntimeError("stop")
    assert not (tmp_path / "made").exists()
    with locked(tmp_path / "made"):
        (tmp_path / "made" / "x").touch()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["x"]
    (tmp_path / "there").mkdir()
    with locked(tmp_path / "there"):
        pass
    assert (tmp_path / "there").exists()
