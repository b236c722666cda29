"""Settings shared by the benchmarks: smoke mode, facts about the machine, one core, tables and report at the end."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxguard.benchmarks.records import RecordsError, read_run
from jaxguard.benchmarks.report import render_tables, write_report
from jaxguard.versions import versions


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--smoke", action="store_true", help="few rounds and small data: does everything still run?")


@pytest.fixture(scope="session")
def smoke(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--smoke"))


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    machine_info["jaxguard"] = {
        **({"smoke": "a few rounds each: not figures to quote"} if config.option.smoke else {}),
        **versions(),
        "device": str(jax.devices()[0].device_kind),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


@pytest.fixture(scope="session", autouse=True)
def float32() -> Iterator[None]:
    """On a GPU jax may multiply with fewer bits than float32 has, which PyTorch does not by default."""
    with jax.default_matmul_precision("highest") if jax.default_backend() != "cpu" else contextlib.nullcontext():
        yield


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """PyTorch counts what it compiled anew, and refuses beyond a limit: the variants of every test start at none."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"]._dynamo.reset()


def _pin(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread that ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


@pytest.fixture
def one_core() -> Iterator[str]:
    """Keeps every thread of the process, XLA's included, on one core; says what holds where that cannot be done."""
    if not hasattr(os, "sched_setaffinity"):
        yield "not pinned"
        return
    before = os.sched_getaffinity(0)
    jax.devices()  # sizes XLA's thread pool for the tests that follow: before the process is on one core
    _pin({max(before)})
    yield "one core"
    _pin(before)


@pytest.hookimpl(tryfirst=True)  # pytest-benchmark reads the option in its own
def pytest_configure(config: pytest.Config) -> None:
    """A run of the whole folder is kept, as one with ``--benchmark-json`` is."""
    whole = [Path(own).resolve() for own in config.args] == [Path(__file__).parent]
    options = config.option
    if whole and not (options.smoke or options.keyword or options.collectonly or options.benchmark_json):
        options.benchmark_json = Path("bench_run.json")


LINES: list[str] = []


@pytest.fixture
def say() -> Any:
    """Adds a line to the summary at the end of the run."""
    return LINES.append


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if LINES:
        terminalreporter.section("figures")
        for line in LINES:
            terminalreporter.write_line(line)
    path = config.option.benchmark_json
    if path and LINES:
        try:
            run = read_run(path)
        except RecordsError as error:  # only what has no variants was run: its figures stand above
            terminalreporter.write_line(f"no tables: {error}")
            return
        terminalreporter.section("tables")
        terminalreporter.write(render_tables(run))
        made = write_report(run, path.with_suffix(""))
        terminalreporter.write_line(f"{path}, {', '.join(map(str, made))}")
