"""``jaxguard rivals``: other guards beside a run's own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def add_command(command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``rivals``; ``command`` makes a command."""
    sub = command("rivals", _rivals, "fit other guards on a run's parts and test them beside its guard")
    sub.add_argument("run", type=Path, metavar="RUN", help="run folder, calibrated")
    sub.add_argument("--only", metavar="NAME,...", help="these rivals alone (default: all; a wrong name lists them)")
    sub.add_argument("--rules", type=Path, metavar="FILE", help="YAML of keyword rules (default: jaxguard's own)")
    sub.add_argument("--fresh", action="store_true", help="train again what an earlier call trained")
    sub.add_argument("--quiet", action="store_true", help="no progress bars")


def _rivals(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.table import differences, render
    from jaxguard.rivals import rivals_run

    only = [name.strip() for name in arguments.only.split(",")] if arguments.only is not None else []
    result, page = rivals_run(
        arguments.run, only, fresh=arguments.fresh, rules=arguments.rules, progress=not arguments.quiet
    )
    print(render(result), differences(result.overall), f"wrote {page}", sep="\n", flush=True)
