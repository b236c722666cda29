"""An audit as text, as JSON, as a page, and as the list of what is to be adjudicated."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from jaxguard.evaluation.audit import (
    CANNOT_SAY,
    NO_HAZARD,
    SAFE_RUN,
    UNSAFE_SOMEWHERE,
    Annotation,
    write_annotations,
)
from jaxguard.evaluation.audit_compare import CHANGES, METRICS, Adjudication, Audit, Disagreement
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.pages import write_page
from jaxguard.evaluation.wording import arguments, clip, number, span, visible
from jaxguard.types import Trajectory
from jaxguard.writing import write_whole

PAGE = "audit.html"
VALUES = "audit.json"
DISAGREEMENTS = "disagreements.jsonl"
FINAL = "final.jsonl"
MOST_SHOWN = 100  # disagreements on the page; the file has all

_WORDS = {
    NO_HAZARD: "no hazard",
    UNSAFE_SOMEWHERE: "unsafe, no step named",
    SAFE_RUN: "safe, not timed",
    CANNOT_SAY: "cannot say",
}
_COUNTS = {
    "adjudicated": "adjudicated",
    "agreed": "agreed on and not adjudicated",
    "unsure": "adjudicator cannot say",
    "open": "still open",
}
_MEANING = (
    "Categories of kappa: unsafe and safe; for the step, each step number and “no hazard”. Unweighted, each difference "
    "counts 1; “one apart agrees” also takes neighbouring steps as the same; linear weights count the steps between, "
    "and leave “no hazard” out, which has no distance to a step. The same step number means another thing in every "
    "trajectory, so that chance agrees rarely and kappa of the step is near the share of exact agreement. “Cannot say” "
    "is in no share and no kappa; it is counted, and listed below."
)


def told(answer: int) -> str:
    """An answer in words."""
    return _WORDS.get(answer, f"step {answer}")


def write_audit(folder: Path, audit: Audit, trajectories: Mapping[str, Trajectory] | None = None) -> None:
    """Writes page, values, the list of disagreements and, where some were adjudicated, the final annotations.

    Args:
        folder: Made if absent; files of the same names in it are replaced.
        audit: What :func:`~jaxguard.evaluation.audit_compare.compare_labels` found.
        trajectories: Their steps are shown beside disagreements.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_record(audit, own) for own in audit.disagreements]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_whole(folder / DISAGREEMENTS, text)
    write_whole(folder / VALUES, json.dumps(_values(audit), indent=1) + "\n")
    if audit.adjudication is not None:
        write_annotations(_final_annotations(audit), folder / FINAL)
    write_page(
        folder / PAGE,
        "audit.html.j2",
        title="Label audit",
        lead=_lead(audit),
        cards=_cards(audit),
        heads=[f"{pair.a} and {pair.b}" for pair in audit.pairs],
        metrics=[
            (title, [(number(p.metrics[name].value), span(p.metrics[name]), p.of[name]) for p in audit.pairs])
            for name, title in METRICS.items()
        ],
        meaning=_MEANING,
        intervals=_intervals(audit),
        counts=_counts(audit),
        changes=_changes(audit),
        disagreements=[_story(audit, own, trajectories) for own in audit.disagreements[:MOST_SHOWN]],
        total=len(audit.disagreements),
        file=DISAGREEMENTS,
        sources=[(letter, visible(own.name)) for letter, own in audit.sources.items()],
    )


def _final_annotations(audit: Audit) -> list[Annotation]:
    """The adjudicator's, "cannot say" included, then what both agree on, under both names."""
    a, c = audit.sources["A"].annotations, audit.sources["C"].annotations
    second = audit.sources[audit.pairs[0].b]
    agreed = []
    for name in audit.adjudication.final if audit.adjudication else ():
        if name not in c:
            who = second.annotations[name].annotator if name in second.annotations else second.name
            agreed.append(replace(a[name], annotator=f"{a[name].annotator}, {who}"))
    return [*c.values(), *agreed]


def render_audit(audit: Audit) -> str:
    """Tables as plain text, at most 100 columns wide."""
    lines = [f"{letter}  {clip(own.name, 96)}" for letter, own in audit.sources.items()]
    heads = [f"{pair.a} and {pair.b}" for pair in audit.pairs]
    lines += ["", _row("", heads)]
    lines += [_row(title, [_cell(pair.metrics[name]) for pair in audit.pairs]) for name, title in METRICS.items()]
    lines.append("")
    lines += [_row(what, [f"{count:,}" for count in counts]) for what, counts in _counts(audit)]
    if audit.adjudication is not None:
        changes = audit.adjudication.changes
        lines += ["", _row("Changed by adjudication, against", [change.source for change in changes])]
        for name, title in CHANGES.items():
            lines.append(_row(title, [_cell(change.shares[name]) for change in changes]))
            lines.append(_row("  of", [f"{change.of[name]:,}" for change in changes]))
        lines.append(_row("“Cannot say” settled", [f"{change.settled:,}" for change in changes]))
        lines += textwrap.wrap(f"Final labels: {_final(audit.adjudication)}.", 100)
    return "\n".join([*lines, "", *textwrap.wrap(f"Brackets: {_intervals(audit)}", 100)]) + "\n"


def _row(title: str, cells: Iterable[str]) -> str:
    return f"{title:50}" + "".join(f"{cell:>16}" for cell in cells)


def _counts(audit: Audit) -> list[tuple[str, list[int]]]:
    return [(what, [pair.counts[what] for pair in audit.pairs]) for what in audit.pairs[0].counts]


def _final(adjudication: Adjudication) -> str:
    return ", ".join(f"{adjudication.counts[kind]:,} {what}" for kind, what in _COUNTS.items())


def _cell(interval: Interval) -> str:
    found = span(interval)
    return number(interval.value) + (f" ({found})" if found else "")


def _intervals(audit: Audit) -> str:
    what = "groups of the trajectories" if audit.grouped else "trajectories (no groups are known)"
    return (
        f"95 % cluster-bootstrap intervals, {audit.clusters:,} {what}, {audit.resamples:,} resamples, seed "
        f"{audit.seed}."
    )


def _lead(audit: Audit) -> str:
    pair = audit.pairs[0]
    exact, unsafe = pair.metrics["exact"], pair.metrics["kappa_unsafe"]
    share = number(100 * exact.value, digits=1)
    return (
        f"Of {pair.of['exact']:,} trajectories that {pair.a} and {pair.b} both judged, {share}\u00a0% have the same "
        f"first hazard step, or none in both; kappa of unsafe or safe is {number(unsafe.value)}."
    )


def _cards(audit: Audit) -> list[tuple[str, str, str]]:
    pair = audit.pairs[0]
    titles = {
        "exact": "Exact",
        "within_one": "Within one step",
        "kappa_unsafe": "Kappa, unsafe",
        "kappa_step": "Kappa, step",
    }
    cards = []
    for name, title in titles.items():
        found = span(pair.metrics[name])
        cards.append(
            (title, number(pair.metrics[name].value), f"{found and f'{found}, '}{pair.of[name]:,} trajectories")
        )
    changes = audit.adjudication.changes if audit.adjudication else ()
    return cards + [
        (f"Changed, {own.source}", number(own.shares["changed"].value), "by adjudication") for own in changes
    ]


def _changes(audit: Audit) -> dict[str, Any] | None:
    if audit.adjudication is None:
        return None
    rows = []
    for change in audit.adjudication.changes:
        cells = [(number(change.shares[n].value), span(change.shares[n]), change.of[n]) for n in CHANGES]
        rows.append((f"{change.source}: {visible(audit.sources[change.source].name)}", cells, change.settled))
    return {"columns": list(CHANGES.values()), "rows": rows, "note": _final(audit.adjudication)}


def _record(audit: Audit, own: Disagreement) -> dict[str, Any]:
    return {
        "trajectory": own.trajectory,
        "kind": own.kind,
        "answers": {letter: told(answer) for letter, answer in own.answers.items()},
        "comments": {
            letter: source.annotations[own.trajectory].comment
            for letter, source in audit.sources.items()
            if own.trajectory in source.annotations and source.annotations[own.trajectory].comment
        },
    }


def _story(audit: Audit, own: Disagreement, trajectories: Mapping[str, Trajectory] | None) -> dict[str, Any]:
    comments = _record(audit, own)["comments"]
    story: dict[str, Any] = {
        "kind": own.kind,
        "id": visible(own.trajectory),
        "answers": [
            (letter, told(answer), visible(comments.get(letter, ""))) for letter, answer in own.answers.items()
        ],
        "instruction": "",
        "rows": [],
    }
    if trajectories is not None:
        trajectory = trajectories[own.trajectory]
        story["instruction"] = clip(trajectory.instruction, 600)
        for t, step in enumerate(trajectory.steps):
            marks = " ".join(letter for letter, answer in own.answers.items() if answer == t)
            story["rows"].append(
                {
                    "step": t,
                    "marks": marks,
                    "tool": clip(step.tool, 60),
                    "observation": clip(step.observation, 400),
                    "arguments": arguments(step.arguments, step.raw_arguments, 400),
                }
            )
    return story


def _values(audit: Audit) -> dict[str, Any]:
    """What was found, for other programs; undefined values are null."""
    found: dict[str, Any] = {
        "sources": {letter: own.name for letter, own in audit.sources.items()},
        "trajectories": audit.trajectories,
        "clusters": audit.clusters,
        "grouped": audit.grouped,
        "resamples": audit.resamples,
        "seed": audit.seed,
        "pairs": [
            {"a": p.a, "b": p.b, "counts": dict(p.counts), "metrics": _intervals_of(p.metrics, p.of)}
            for p in audit.pairs
        ],
        "disagreements": len(audit.disagreements),
    }
    if audit.adjudication is not None:
        found["adjudication"] = {
            "counts": dict(audit.adjudication.counts),
            "changes": [
                {"source": c.source, "settled": c.settled, "shares": _intervals_of(c.shares, c.of)}
                for c in audit.adjudication.changes
            ],
        }
    return found


def _intervals_of(metrics: Mapping[str, Interval], of: Mapping[str, int]) -> dict[str, dict[str, float | int | None]]:
    return {
        name: {"of": of[name]}
        | {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in asdict(own).items()}
        for name, own in metrics.items()
    }
