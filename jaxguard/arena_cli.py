"""``jaxguard arena``: scripted agents, benign and attacked, in AgentDojo's environments, with and without a guard."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxguard.config import SEED


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``arena`` to the parser's commands; ``command`` makes one of them."""
    text = "a live arena (AgentDojo): record runs to train a guard on, then run held-out tasks with and without it"
    arena = commands.add_parser("arena", help=text, description=text[0].upper() + text[1:] + ".")
    among = arena.add_subparsers(dest="arena_command", required=True, metavar="COMMAND")

    sub = command("record", _record, "play scripted agents and write their runs as trajectories", among=among)
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for trajectories, split and plan")
    sub.add_argument("--suites", nargs="+", metavar="NAME", help="suites of AgentDojo (default: all four)")
    sub.add_argument("--seed", type=int, default=SEED, metavar="N", help="of the split of tasks (%(default)s)")

    sub = command("run", _run, "play held-out tasks without and with a guard, print tables and write a page",
                  among=among)  # fmt: skip
    sub.add_argument("--guard", type=Path, required=True, metavar="BUNDLE", help="calibrated guard bundle (RUN/guard)")
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for page, figures, transcripts")
    text = "folder that record wrote (default: what the guard was trained on)"
    sub.add_argument("--recording", type=Path, metavar="DIR", help=text)
    text = "test, or validation while settings are chosen (default: %(default)s)"
    sub.add_argument("--part", default="test", metavar="NAME", help=text)


def _say(text: str) -> None:
    print(text, flush=True)


def _count(done: int) -> None:
    if done % 100 == 0:
        print(f"{done:,} runs", file=sys.stderr, flush=True)


def _record(arguments: argparse.Namespace) -> None:
    from jaxguard.arena import require_agentdojo

    require_agentdojo()
    from jaxguard.arena.recording import record
    from jaxguard.arena.stage import SUITES

    made = record(arguments.suites or SUITES, arguments.seed, arguments.out, progress=_count)
    for part in ("users", "goals"):
        sizes: dict[str, int] = {}
        for own in getattr(made.plan, part).values():
            for name, ids in own.items():
                sizes[name] = sizes.get(name, 0) + len(ids)
        kind = "user tasks" if part == "users" else "injection tasks"
        _say(f"{kind}: " + ", ".join(f"{count} {name}" for name, count in sizes.items()))
    for name, count in made.runs.items():
        _say(f"{count:>6,} runs {name}")
    for why, count in made.dropped.items():
        _say(f"{count:>6,} dropped: {why}")
    for name in made.unsolved:
        _say(f"not solved by its own ground truth: {name}")
    _say(f"wrote {arguments.out}")


def _run(arguments: argparse.Namespace) -> None:
    from jaxguard.arena import require_agentdojo

    require_agentdojo()
    from jaxguard.arena.live import PAGE_FILE, run_live
    from jaxguard.arena.page import render_figures

    figures = run_live(arguments.guard, arguments.out, arguments.recording, part=arguments.part, progress=_count)
    _say(render_figures(figures))
    _say(f"wrote {arguments.out / PAGE_FILE}")
