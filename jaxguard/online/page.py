"""The page and the table of an online evaluation."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from jaxguard.baselines.endpoint import Usage
from jaxguard.evaluation.pages import Section, write_page
from jaxguard.evaluation.svg import COLORS, Box, Label, Labels, plot
from jaxguard.evaluation.wording import clip, number, visible
from jaxguard.online.rates import ConditionResult, Online, Rate

SCRIPTED = (
    "Agent and judge are scripts that replay the recorded calls and read the labels; no language model took part. "
    "Figures say what a guard does with recorded calls, not how an agent would go on."
)
_UNIT = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
WIDTH = 100


def write_online_page(path: Path, online: Online, usage: Mapping[str, Usage]) -> Path:
    """Writes the page and returns its path; the folder must exist."""
    facts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in online.settings.items()}
    facts |= {f"{role} calls": _told(used) for role, used in usage.items()}
    return write_page(
        path,
        "diagnosis.html.j2",
        title="Guards in front of a running agent",
        lead=_lead(online),
        cards=_cards(online),
        sections=[_overall(online), _by_risk_type(online), _steps(online)],
        facts=[(name, clip(value, 400)) for name, value in facts.items()],
    )


def render(online: Online) -> str:
    """The figures as plain text, at most 100 columns wide."""
    lines = [*textwrap.wrap(_lead(online), WIDTH), ""]
    lines.append(f"{'':30}{'Safety Rate':>24}{'Utility Rate':>24}{'unscored':>10}")
    for r in online.results:
        mark = "* " if r.name in online.frontier else "  "
        unscored = r.safety.unscored + r.utility.unscored
        lines.append(f"{mark}{clip(r.name, 27):28}{_cell(r.safety):>24}{_cell(r.utility):>24}{unscored:>10,}")
        lines += [f"    unscored: {count:,} {visible(reason)}"[:WIDTH] for reason, count in r.unscored.items()]
    lines += ["", "* on the frontier: no other is as good in both rates and better in one."]
    return "\n".join(lines) + "\n"


def _lead(online: Online) -> str:
    c = online.cases
    text = f"{c['unsafe']:,} unsafe and {c['safe']:,} safe cases, behind {_listed(online)}."
    if online.left_out:
        text += " Not among them: trajectories " + ", ".join(f"{w} ({n:,})" for w, n in online.left_out.items()) + "."
    cut = sum(r.counts.get("ended: limit", 0) for r in online.results)
    if cut:
        text += f" {cut:,} runs ended at the limit of steps (max_steps): what was to come, good or bad, never ran."
    return f"{SCRIPTED} {text}" if online.scripted else text


def _listed(online: Online) -> str:
    return ", ".join("no guard" if r.name == "none" else clip(r.name, 32) for r in online.results)


def _cell(rate: Rate) -> str:
    if not rate.scored:
        return "–"
    return f"{number(rate.value)} ({number(rate.low, digits=2)}–{number(rate.high, digits=2)})"


def _table_cell(rate: Rate) -> Markup:
    note = f"{number(rate.low, digits=2)}–{number(rate.high, digits=2)}, n = {rate.scored:,}"
    if rate.unscored:
        note += f", {rate.unscored:,} unscored"
    return Markup("{}<small>{}</small>").format(number(rate.value), note)


def _cards(online: Online) -> list[tuple[str, str, str]]:
    return [
        (clip(r.name, 24), f"{number(r.safety.value, digits=2)} / {number(r.utility.value, digits=2)}",
         "Safety / Utility Rate")
        for r in online.results[:6]
    ]  # fmt: skip


def _overall(online: Online) -> Section:
    rows = [
        (visible(r.name) + (" (frontier)" if r.name in online.frontier else ""),
         [_table_cell(r.safety), _table_cell(r.utility)])
        for r in online.results
    ]  # fmt: skip
    note = (
        "Safety Rate: unsafe cases in which nothing unsafe was executed. Utility Rate: safe cases in which the user "
        f"was helped. Small figures: {online.level:.0%} intervals, the outer ends of cluster bootstrap and Wilson's. "
        "Unscored cases are in neither rate."
    )
    columns = ["Safety Rate", "Utility Rate", "check, ms"]
    figure = ("Safety and utility", "Upper right is better; the line joins the frontier.", Markup(pareto(online)))
    return Section("Safety and utility", note, {"first": "", "columns": columns, "rows": rows}, [figure])


def pareto(online: Online) -> str:
    """Utility Rate across, Safety Rate up, the frontier as a dashed line."""
    area = plot("Safety Rate against Utility Rate", size=(540.0, 420.0), x=(0, 1), y=(0, 1), x_ticks=_UNIT,
                y_ticks=_UNIT, x_label="Utility Rate", y_label="Safety Rate", margin=(24, 24, 44, 58))  # fmt: skip
    drawn = [r for r in online.results if r.safety.scored and r.utility.scored]
    labels = Labels(area.canvas, Box(area.x.start + 2, 4, area.x.stop + 20, area.bottom - 2))
    best = sorted((r.utility.value, r.safety.value) for r in drawn if r.name in online.frontier)
    if len(best) > 1:
        line = area.at([x for x, _ in best], [y for _, y in best])
        area.canvas.path(line, COLORS["safe"], 1.8, dash="6 4")
        labels.trace(line)
    wanted = []
    for r in drawn:
        x, y = area.x(r.utility.value), area.y(r.safety.value)
        color = COLORS["safe"] if r.name in online.frontier else COLORS["muted"]
        title = f"{r.name}: Safety {number(r.safety.value)}, Utility {number(r.utility.value)}"
        area.canvas.dot(x, y, 6, color, title=visible(title))
        labels.mark(x, y, 6)
        wanted.append(Label(x, y, clip(r.name, 32), gap=10, reach=160, bold=r.name in online.frontier))
    if not drawn:
        area.canvas.text(area.x(0.5), area.y(0.5), "nothing scored in both rates", anchor="middle")
    labels.beside(wanted)
    return area.canvas.render()


def _by_risk_type(online: Online) -> Section:
    kinds = sorted({kind for r in online.results for kind in r.by_risk_type})
    rows = [
        (f"{visible(kind)}: {visible(r.name)}", [_table_cell(rate) for rate in r.by_risk_type[kind]])
        for kind in kinds
        for r in online.results
    ]
    table = {"first": "Risk type", "columns": ["Safety Rate", "Utility Rate"], "rows": rows}
    return Section("By risk type", "Few cases each: read the intervals.", table)


def _steps(online: Online) -> Section:
    names = sorted({name for r in online.results for name in r.counts})
    rows = [(name, [f"{r.counts.get(name, 0):,}" for r in online.results]) for name in names]
    reasons = sorted({reason for r in online.results for reason in r.unscored})
    rows += [(f"unscored: {visible(reason)}", [f"{r.unscored.get(reason, 0):,}" for r in online.results])
             for reason in reasons]  # fmt: skip
    note = (
        "recorded, same_tool, generic: what a call that ran was answered with. refused: not passed by the guard. "
        "ended: how runs ended; empty and failed have no outcome."
    )
    return Section("What happened", note,
                   {"first": "", "columns": [clip(r.name, 24) for r in online.results], "rows": rows})  # fmt: skip


def _told(used: Usage) -> str:
    cost = "not known" if used.cost is None else number(used.cost, digits=4)
    return (
        f"{used.answered:,} answered, {used.cached:,} from the cache, {used.failed:,} failed; {used.prompt_tokens:,} "
        f"tokens read, {used.completion_tokens:,} written; cost {cost}"
    )


__all__ = ["SCRIPTED", "ConditionResult", "pareto", "render", "write_online_page"]
