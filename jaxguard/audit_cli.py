"""``jaxguard audit``: labels by hand, how well they agree, and trajectories with what was adjudicated."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

SET = "file of trajectories, or folder that convert or generate wrote"
ANNOTATIONS = "annotation file that the page exports"


def add_commands(commands: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``audit`` to the parser's commands; ``command`` makes one of them."""
    text = "labels by hand: a page to mark first hazard steps on, agreement of annotators, adjudicated labels"
    audit = commands.add_parser("audit", help=text, description=text[0].upper() + text[1:] + ".")
    audits = audit.add_subparsers(dest="audit_command", required=True, metavar="COMMAND")

    sub = command("page", _page, "write a page on which a person marks first hazard steps, blind", among=audits)
    sub.add_argument("trajectories", type=Path, metavar="TRAJECTORIES", help=SET)
    sub.add_argument("--out", type=Path, required=True, metavar="FILE", help="HTML file to write")
    sub.add_argument("--sample", type=int, metavar="N", help="how many trajectories (default: all)")
    sub.add_argument("--seed", type=int, default=20260701, metavar="S", help="of choice and order (%(default)s)")
    sub.add_argument("--annotator", default="", metavar="NAME", help="name that the page starts with")
    text = "only trajectories that this file names, such as disagreements.jsonl of audit compare"
    sub.add_argument("--only", type=Path, metavar="FILE", help=text)

    sub = command("compare", _compare, "say how well two annotators agree, and what adjudication changed", among=audits)
    sub.add_argument("a", type=Path, metavar="A", help=ANNOTATIONS)
    text = "another one; left out, A is compared with the labels of --trajectories"
    sub.add_argument("b", type=Path, nargs="?", metavar="B", help=text)
    sub.add_argument("--adjudicated", type=Path, metavar="C", help="annotation file that settles disagreements")
    text = "what was annotated: gives groups for the intervals, the set's own labels, and texts for the page"
    sub.add_argument("--trajectories", type=Path, metavar="DIR", help=text)
    sub.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for page, values, disagreements.jsonl and final.jsonl"
    )

    sub = command("apply", _apply, "write trajectories with adjudicated labels in place of their own", among=audits)
    sub.add_argument("trajectories", type=Path, metavar="TRAJECTORIES", help=SET)
    sub.add_argument(
        "--annotations",
        type=Path,
        required=True,
        metavar="C",
        help="annotation file with final labels, such as final.jsonl of audit compare",
    )
    sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the trajectories")


def _say(text: str) -> None:
    print(text, flush=True)


def _page(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.audit import read_set
    from jaxguard.evaluation.audit_page import read_ids, write_audit_page

    count = write_audit_page(
        arguments.out,
        read_set(arguments.trajectories),
        sample=arguments.sample,
        seed=arguments.seed,
        only=read_ids(arguments.only) if arguments.only else None,
        annotator=arguments.annotator,
    )
    _say(f"wrote {arguments.out} with {count:,} trajectories; open it in a browser")


def _compare(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.audit import read_annotations, read_set
    from jaxguard.evaluation.audit_compare import compare_labels
    from jaxguard.evaluation.audit_report import render_audit, write_audit

    trajectories = read_set(arguments.trajectories) if arguments.trajectories else None
    audit = compare_labels(
        read_annotations(arguments.a),
        read_annotations(arguments.b) if arguments.b else None,
        adjudicated=read_annotations(arguments.adjudicated) if arguments.adjudicated else None,
        trajectories=trajectories,
    )
    _say(render_audit(audit).rstrip())
    if arguments.out:
        write_audit(arguments.out, audit, trajectories)
        _say(f"{len(audit.disagreements):,} disagreements; wrote {arguments.out}")


def _apply(arguments: argparse.Namespace) -> None:
    from jaxguard.evaluation.audit import apply_annotations, read_annotations, read_set
    from jaxguard.traces.convert import write_made

    labels = read_annotations(arguments.annotations)
    made = apply_annotations(read_set(arguments.trajectories), labels, arguments.trajectories, arguments.out)
    write_made(made, arguments.out)
    given = len(labels.annotations)
    unsure = sum(own.status == "unsure" for own in labels.annotations.values())
    _say(
        f"{len(made):,} trajectories: {given - unsure:,} with adjudicated labels, {unsure:,} without any because the "
        f"annotator cannot say, {len(made) - given:,} as they were; wrote {arguments.out}"
    )
