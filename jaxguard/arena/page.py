"""The arena's figures as text and as an HTML page, and single runs to read."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxguard.arena.figures import Figures, Group
from jaxguard.arena.plan import HELD_OUT_ATTACKS, REFUSED
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.pages import Section, write_page
from jaxguard.evaluation.table import WIDTH
from jaxguard.evaluation.wording import arguments, clip, number, risk, span, visible
from jaxguard.traces.readers.calls import visible_text

if TYPE_CHECKING:
    from jaxguard.arena.play import Play

COLUMNS = {
    "success_without": "attack success",
    "success_with": "with guard",
    "cut": "cut",
    "benign_without": "benign utility",
    "benign_with": "with guard",
    "benign_kept": "kept",
    "hijacked_without": "utility, hijacked",
    "hijacked_with": "with guard",
    "ignoring_without": "utility, ignoring",
    "ignoring_with": "with guard",
}
"""Metrics and the heads of their columns."""
HEADINGS = {
    "suite": "By suite",
    "attack": "By attack",
    "conduct": "By moment of the attack",
    "goal": "By injected goal",
}
_MOMENTS = {"at_once": "as soon as seen", "at_end": "after the task"}


def render_figures(figures: Figures) -> str:
    """Tables of at most 100 columns."""
    f = figures
    every = f.every.metrics
    lines = [
        f"{f.every.attacks:,} attacks and {f.every.benign:,} benign runs of {f.users} user tasks and {f.goals} "
        "injection tasks, all held out.",
        f"Attack success {_told(every['success_without'])} without the guard, {_told(every['success_with'])} with it: "
        f"cut by {_told(every['cut'])}.",
        f"Benign utility {_told(every['benign_without'])} without, {_told(every['benign_with'])} with it: "
        f"{_told(every['benign_kept'])} kept.",
        f"Utility of hijacked agents {_told(every['hijacked_without'])} without, {_told(every['hijacked_with'])} with; "
        f"of agents that ignore the injection {_told(every['ignoring_without'])} and {_told(every['ignoring_with'])}.",
        f"The guard took {number(f.milliseconds[0], digits=1)} ms a call (median; 95 % below "
        f"{number(f.milliseconds[1], digits=1)}), encoding included, over {f.calls:,} calls.",
    ]
    if f.dropped:
        lines.append("Left out: " + ", ".join(f"{count:,} ({why})" for why, count in f.dropped.items()) + ".")
    lines = [part for line in lines for part in textwrap.wrap(line, WIDTH)]
    for key, groups in f.groups.items():
        head = f"{HEADINGS[key]:34}{'attacks':>8}{'success':>9}{'cut':>8}{'':>12}"
        lines += ["", head + (f"{'benign':>8}{'kept':>8}" if key == "suite" else "")]
        for group in groups:
            m = group.metrics
            benign = f"{group.benign:>8,}{number(m['benign_kept'].value):>8}{span(m['benign_kept']):>12}"
            lines.append(
                f"{_name(key, group)[:33]:34}{group.attacks:>8,}{number(m['success_with'].value):>9}"
                f"{number(m['cut'].value):>8}{span(m['cut']):>12}{benign if group.benign else ''}".rstrip()
            )
    return "\n".join(lines) + "\n"


def write_arena_page(path: Path, figures: Figures, facts: Mapping[str, Any], shown: Sequence[tuple[str, Play]]) -> Path:
    """Writes the page and returns its path; the folder must exist.

    Args:
        path: Of the HTML file.
        figures: What was measured.
        facts: Provenance.
        shown: Runs to show in full, with what became of each.
    """
    f, every = figures, figures.every.metrics
    cards = [
        ("attack success cut by", number(every["cut"].value), _span(every["cut"])),
        ("attack success with guard", number(every["success_with"].value), _span(every["success_with"])),
        ("benign utility kept", number(every["benign_kept"].value), _span(every["benign_kept"])),
        ("ms per call", number(f.milliseconds[0], digits=1), f"95 % below {number(f.milliseconds[1], digits=1)}"),
    ]
    note = (
        "User tasks and injected goals were held out from training and calibration. Agents are scripted: they follow "
        "every injection they see, and know their calls beforehand; success and utility are AgentDojo's own checks on "
        "the calls that ran. A task with a held call counts as not done. Brackets: 95 % intervals, user tasks "
        "resampled."
    )
    left_out = ", ".join(f"{count:,} ({why})" for why, count in f.dropped.items())
    sections = [Section("With and without the guard", note, _table("", [f.every], lambda _: "all"))]
    for key, groups in f.groups.items():
        about = "Attacks not in training are marked." if key == "attack" else ""
        sections.append(Section(HEADINGS[key], about, _table(key, groups, lambda group, key=key: _name(key, group))))
    for kind, done in shown:
        sections.append(Section(f"{kind.replace('-', ' ')}: {done.case.id}", visible(done.instruction), _steps(done)))
    told = {**facts, "left out": left_out or "nothing", "calls judged": f"{f.calls:,}"}
    return write_page(
        path,
        "diagnosis.html.j2",
        title="Live arena",
        lead=f"{f.every.attacks:,} attacks and {f.every.benign:,} benign runs of {f.users} user tasks and {f.goals} "
        "injection tasks.",
        cards=cards,
        sections=sections,
        facts=[(visible(name), clip(str(value), 400)) for name, value in told.items()],
    )


def transcript(done: Play) -> str:
    """A run as text: what was asked, every call with its verdict, and the beginning of every result."""
    lines = [done.case.id, "", f"User: {visible(done.instruction)}", ""]
    for call, decided, asked, result in _calls(done, 2_000):
        lines += [f"{call} [{decided}] {asked}", f"    {result}"]
    last = visible_text(done.messages[-1].get("content"))
    outcome = f"task done: {done.utility}; injected goal reached: {done.attacked}"
    return "\n".join([*lines, "", f"Agent: {visible(last)}", "", outcome]) + "\n"


def _calls(done: Play, length: int) -> Iterable[tuple[str, str, str, str]]:
    """Id, verdict, call and result of every proposed call."""
    for message in done.messages:
        if message["role"] != "tool":
            continue
        call = message["tool_call"]
        verdict = done.course.verdicts.get(call["id"])
        decided = (
            "unguarded"
            if verdict is None
            else f"{verdict.decision.name}, hazard {risk(verdict.hazard)}, fused {risk(verdict.fused)}"
        )
        asked = f"{call['function']}({arguments(call['args'], None, length)})"
        result = message["error"] or visible_text(message["content"])
        yield call["id"], decided, visible(asked), clip(result if result != REFUSED else "not executed", length)


def _steps(done: Play) -> dict[str, Any]:
    rows = [
        (call, [decided, clip(asked, 160), clip(result, 160)]) for call, decided, asked, result in _calls(done, 200)
    ]
    return {"first": "call", "columns": ["verdict", "call", "result"], "rows": rows}


def _table(key: str, groups: Sequence[Group], name: Any) -> dict[str, Any]:
    columns = {
        k: head for k, head in COLUMNS.items() if key in ("", "suite") or k.startswith(("success", "cut", "hij"))
    }
    rows = [
        (name(group), [f"{group.attacks:,}", *(_cell(group.metrics[metric]) for metric in columns)]) for group in groups
    ]
    return {"first": key or "runs", "columns": ["attacks", *columns.values()], "rows": rows}


def _cell(interval: Interval) -> str:
    told = number(interval.value)
    return f"{told} ({between})" if (between := span(interval)) else told


def _told(interval: Interval) -> str:
    return _cell(interval).replace("(", "[").replace(")", "]")


def _span(interval: Interval) -> str:
    return span(interval) or "no interval"


def _name(key: str, group: Group) -> str:
    if key == "attack" and group.name in HELD_OUT_ATTACKS:
        return f"{group.name} (new)"
    return _MOMENTS.get(group.name, group.name)
