"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from small_run import SmallRun


# XLA's compiler for CPUs with all that only speeds code up left out: tests compile for minutes and run for seconds.
QUICK_FLAGS = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false"
)


def pytest_configure(config: pytest.Config) -> None:
    """Where slow tests are left out, everything compiles quickly; with them, as it does for users.

    XLA reads its flags once, when a process first computes; child processes inherit them. Flags that are set already,
    also to nothing, stay. A flag that XLA does not know ends the process, so that other versions go without.
    """
    if "not slow" in config.option.markexpr and version("jaxlib").startswith("0.10."):
        os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the development data sets; tests that need it are skipped where it is absent."""
    name = os.environ.get("JAXGUARD_DATA")
    if not name:
        pytest.skip("JAXGUARD_DATA is not set")
    path = Path(name)
    if not path.is_dir():
        pytest.fail(f"JAXGUARD_DATA: {path} is not a folder")
    return path


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config) -> Path:
    """Folder of the compilations that toy-sized runs share, also with the next session."""
    cache = pytestconfig.cache
    assert cache is not None
    return cache.mkdir("jaxguard-compiled")


@pytest.fixture
def toy_size(compiled: Path) -> Iterator[None]:
    """See :func:`small_run.at_toy_size`."""
    from small_run import at_toy_size

    with at_toy_size(compiled):
        yield


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> SmallRun:
    """A finished toy-sized run; not to be changed, copy its folders. The workers of a session share one."""
    from small_run import at_toy_size, make_small_run

    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    finished = shared / "small_run.pickle"
    with (shared / "small_run.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not finished.exists():
            with at_toy_size(compiled):
                finished.write_bytes(pickle.dumps(make_small_run(tmp_path_factory.mktemp("small"))))
    made: SmallRun = pickle.loads(finished.read_bytes())
    return made
