"""One process at a time trains or calibrates in a guard's run folder; a router's is in test_route_run.py."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from small_run import SmallRun

from jaxguard.run import calibrate_run, open_run, train
from jaxguard.traces.lock import locked
from jaxguard.types import JaxguardError

pytestmark = pytest.mark.usefixtures("toy_size")


def test_one_process_at_a_time_trains_or_calibrates(small_run: SmallRun, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(small_run.run, tmp_path / "run"))
    config = open_run(copy).config
    with locked(copy):
        for fresh in (False, True):
            with pytest.raises(JaxguardError, match="another process is writing there"):
                train(config, copy, fresh=fresh, progress=False)
        with pytest.raises(JaxguardError, match="another process is writing there"):
            calibrate_run(copy)
    assert (copy / "guard" / "guard.json").read_bytes() == (small_run.run / "guard" / "guard.json").read_bytes()
