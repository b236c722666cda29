"""``jaxguard experiment`` and ``ship``: the papers' experiments from data to tables, and a guard for others."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jaxguard

if TYPE_CHECKING:
    from jaxguard.experiments.tables import Table
    from jaxguard.guard import Guard

EVERY, CASES = "all", "cases"


def add_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``experiment`` and ``ship``; ``command`` makes a command."""
    about = "run the papers' experiments by a plan: rivals, ablations, transfer, cases; goes on where it stopped"
    sub = command("experiment", _experiment, about)
    sub.add_argument("name", metavar="NAME", help=f"rivals, ablations, transfer, {CASES}, or {EVERY}")
    sub.add_argument("--plan", type=Path, default=Path("configs/experiments.yaml"), metavar="FILE",
                     help="YAML of sets, seeds and variants (default: %(default)s)")  # fmt: skip
    sub.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for runs, summary.json and the page"
    )
    text = "calibrated bundle for the cases (default: the guard in the package)"
    sub.add_argument("--guard", type=Path, default=jaxguard.DEFAULT_GUARD, metavar="BUNDLE", help=text)
    sub.add_argument("--quiet", action="store_true", help="no progress bars")
    sub.add_argument(
        "--set", action="append", default=[], metavar="key=value", help="a setting of the plan; repeatable"
    )

    sub = command("ship", _ship, "make a bundle with a model card of an evaluated run")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder, evaluated")
    sub.add_argument("--out", type=Path, required=True, metavar="BUNDLE", help="bundle to write")
    sub.add_argument("--about", type=Path, metavar="FILE", help="Markdown for the card's head: data and licences")


def _ship(arguments: argparse.Namespace) -> None:
    from jaxguard.shipping import ship

    print(f"wrote {ship(arguments.run, arguments.out, arguments.about)}", flush=True)


def _experiment(arguments: argparse.Namespace) -> None:
    from jaxguard.experiments.conduct import EXPERIMENTS, NothingToRun, conduct
    from jaxguard.experiments.plan import load_plan
    from jaxguard.guard import Guard
    from jaxguard.types import JaxguardError

    names = (*EXPERIMENTS, CASES) if arguments.name == EVERY else (arguments.name,)
    if names[0] not in (*EXPERIMENTS, CASES):
        raise JaxguardError(f"NAME: got {arguments.name!r}, expected {', '.join(EXPERIMENTS)}, {CASES} or {EVERY}")
    guard = Guard.load(arguments.guard) if CASES in names else None  # before hours of experiments
    plan = None if names == (CASES,) else load_plan(arguments.plan, tuple(arguments.set))
    for name in names:
        if plan is not None and name != CASES:
            try:
                tables, left_out, page = conduct(
                    name, plan, arguments.out, str(arguments.plan), progress=not arguments.quiet
                )
            except NothingToRun as error:
                if arguments.name != EVERY:
                    raise
                print(f"left out: {error}", flush=True)
                continue
        elif guard is not None:
            tables, left_out, page = _cases(guard, arguments.out)
        for table in tables:
            print(table.text())
        for reason in left_out:
            print(f"left out: {reason}")
        print(f"wrote {page}", flush=True)


def _cases(guard: Guard, out: Path) -> tuple[list[Table], tuple[str, ...], Path]:
    from jaxguard.experiments.cases import cases, outcome, write_cases

    found = cases(guard)
    print(outcome(found), "\n", sep="")
    out.mkdir(parents=True, exist_ok=True)
    about = f"{guard.config.name}, weights {guard.weights}"
    return [case.table for case in found], (), write_cases(out / "cases.html", found, about)
