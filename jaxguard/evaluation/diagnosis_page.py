"""The page of a diagnosis, in the look of the evaluation report: one file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from jaxguard.evaluation.diagnose import MODULES, SOURCES, Diagnosis
from jaxguard.evaluation.lines import MARGIN, SIZE, Line, Points, line_chart, name_lines
from jaxguard.evaluation.pages import Section, write_page
from jaxguard.evaluation.svg import COLORS, plot, ticks
from jaxguard.evaluation.wording import clip, number, visible

_SOURCE_COLORS = {"h": COLORS["safe"], "z": COLORS["ema"], "step": COLORS["muted"]}
_RATES = {"full": "full rate", "scaled": "scaled rate", "frozen": "frozen"}
# Which columns of the curves are drawn together: split, colour, dash (the two predictions often coincide).
_TERMS = {
    "stage 1": {"prior_pred": ("train", COLORS["safe"], ""), "post_pred": ("train", COLORS["hold"], "2 5"),
                "kl": ("train", COLORS["unsafe"], "")},
    "stage 2": {"hazard": ("train", COLORS["unsafe"], ""), "prefix": ("train", COLORS["safe"], ""),
                "hazard_auroc": ("validation", COLORS["ema"], "")},
}  # fmt: skip


def write_diagnosis(path: Path, diagnosis: Diagnosis) -> Path:
    """Writes the page and returns its path; the folder must exist."""
    return write_page(
        path,
        "diagnosis.html.j2",
        title=visible(diagnosis.title),
        lead=_lead(diagnosis),
        cards=_cards(diagnosis),
        sections=[_latents(diagnosis), _memory(diagnosis), _lags(diagnosis), _gradients(diagnosis), _curves(diagnosis)],
        facts=[(name, clip(f"{value:,}" if isinstance(value, int) else str(value), 200))
               for name, value in diagnosis.facts.items()],
    )  # fmt: skip


def bars(label: str, shares: Mapping[str, Sequence[float]], top: float, *, y_label: str) -> Markup:
    """One group of bars per categorical, one bar of it per parameter set; the y axis ends at ``top``."""
    colors = dict(zip(shares, (COLORS["win"], COLORS["safe"]), strict=False))
    count = max(map(len, shares.values()))
    area = plot(
        label, size=SIZE, x=(0, count), y=(0, top), y_ticks=[t for t in ticks(top, 4) if t <= top],
        x_label="categorical", y_label=y_label, margin=MARGIN,
    )  # fmt: skip
    width = 0.8 / len(shares)
    for which, (name, values) in enumerate(shares.items()):
        for i, value in enumerate(values):
            left, right = area.x(i + 0.1 + which * width), area.x(i + 0.1 + (which + 1) * width)
            title = f"categorical {i}, {name}: {number(value, digits=2)}"
            area.canvas.rect(left, area.y(value), right - left, area.bottom - area.y(value), colors[name], 0.9, title)
    for i in range(0, count, -(-count // 16)):
        area.canvas.text(area.x(i + 0.5), area.bottom + 17, str(i), size=11, anchor="middle")
    name_lines(area, [(name, color, "") for name, color in colors.items()])
    return Markup(area.canvas.render())


def _lead(d: Diagnosis) -> str:
    use = list(d.latents.values())[-1]
    return (
        f"On {d.facts['trajectories']:,} trajectories of the {d.facts['part']} part the posterior's entropy is "
        f"{number(100 * use.entropy_share, digits=1)}\u00a0% of log C, {number(use.in_use, digits=1)} "
        f"of {use.classes} classes are in use, and observations add {number(use.kl, digits=2)} nats to the prediction."
    )


def _cards(d: Diagnosis) -> list[tuple[str, str, str]]:
    before, use = d.latents.values()
    cards = [
        ("Entropy", f"{number(100 * use.entropy_share, digits=0)} %",
         f"of log C; after stage 1 {number(100 * before.entropy_share, digits=0)} %"),
        ("Classes in use", number(use.in_use, digits=1),
         f"of {use.classes}; after stage 1 {number(before.in_use, digits=1)}"),
        ("KL", number(use.kl, digits=2), f"nats; after stage 1 {number(before.kl, digits=2)}, free {d.free_nats:g}"),
    ]  # fmt: skip
    for target, of in d.by_target(lags=False).items():
        state, step = of[list(d.latents)[-1], "h"], of["", "step"]
        cards.append(("AUROC, state", number(state.auroc), f"{target}; current step {number(step.auroc)}"))
    return cards


def _latents(d: Diagnosis) -> Section:
    rows = [
        (name, [number(float(np.mean(u.entropy))), f"{number(100 * u.entropy_share, digits=1)} %",
                number(u.in_use, digits=2), f"{min(u.effective):.1f} to {max(u.effective):.1f}",
                number(u.kl), f"{number(100 * u.kl_above, digits=1)} %"])
        for name, u in d.latents.items()
    ]  # fmt: skip
    columns = ["entropy", "of log C", "classes in use", "least to most", "KL", f"above {d.free_nats:g} free"]
    classes = next(iter(d.latents.values())).classes
    colors = dict(zip(d.latents, (COLORS["win"], COLORS["safe"]), strict=False))
    kl = [Line(n, list(enumerate(u.kl_by_step, 1)), colors[n]) for n, u in d.latents.items()]
    longest = max(1, *(len(line.points) for line in kl))
    kl.append(Line("free nats", [(0, d.free_nats), (longest, d.free_nats)], COLORS["unsafe"], "6 4"))
    figures = [
        ("Classes in use", "Exponential of the entropy of how often each class is the mode; 1 is a dead categorical.",
         bars("Classes in use by categorical", {n: u.effective for n, u in d.latents.items()}, classes,
              y_label="effective classes")),
        ("Posterior entropy", f"Near log C = {np.log(classes):.2f} a categorical says nothing of its observation.",
         bars("Posterior entropy by categorical", {n: u.entropy for n, u in d.latents.items()}, float(np.log(classes)),
              y_label="nats")),
        ("KL of posterior and prior", "By observation; at or below the free nats no gradient of the KL flows.",
         line_chart("KL of posterior and prior by step", kl, x_label="observation", y_label="nats")),
    ]  # fmt: skip
    note = "Latents are modes, as scoring takes them; entropy and KL, in nats, are means over steps."
    return Section("Are latents used?", note, {"first": "", "columns": columns, "rows": rows}, figures)


def _memory(d: Diagnosis) -> Section:
    keys = [("", "step"), *((name, source) for name in d.latents for source in ("h", "z"))]
    columns = [SOURCES[s] + (f", {n}" if n else "") for n, s in keys] + ["steps", "most frequent class"]
    rows = []
    for target, of in d.by_target(lags=False).items():
        first = of[keys[0]]
        cells = [number(of[key].auroc) for key in keys]
        rows.append((target, [*cells, f"{first.n:,}", f"{number(100 * first.majority, digits=0)} %"]))
    note = (
        "AUROC of logistic regressions, fitted on half of the groups and scored on the other; a dash where a class is "
        "too rare. The current step is the observation before the call and the call itself; the state is that after "
        "the call, as the risk heads read it. What the state has beyond the current step is memory."
    )
    return Section("What can be read off the state?", note, {"first": "AUROC", "columns": columns, "rows": rows})


def _lags(d: Diagnosis) -> Section:
    lines: dict[str, list[Line]] = {"auroc": [], "gain": []}
    probes = [p for of in d.by_target(lags=True).values() for p in of.values()]
    for name, source in dict.fromkeys((p.parameters, p.source) for p in probes):
        own = [p for p in probes if (p.parameters, p.source) == (name, source)]
        text = SOURCES[source] + (f", {name}" if name else "")
        dash = "6 4" if name == next(iter(d.latents)) else ""
        for key, values in (("auroc", [p.auroc for p in own]), ("gain", [p.accuracy - p.majority for p in own])):
            points = [(float(p.lag or 0), v) for p, v in zip(own, values, strict=True)]
            lines[key].append(Line(text, points, _SOURCE_COLORS[source], dash, marks=True))
    figures = [
        ("AUROC", "One kind against the others, mean over kinds; 0.5 is chance.",
         line_chart("AUROC by lag", lines["auroc"], x_label="steps ago", y_label="AUROC", low=0.4, high=1.0)),
        ("Accuracy above the most frequent kind", "What always naming the most frequent kind does not reach.",
         line_chart("Accuracy by lag", lines["gain"], x_label="steps ago", y_label="gain in accuracy", high=1.0)),
    ]  # fmt: skip
    counts = ", ".join(f"{of['', 'step'].n:,}" for of in d.by_target(lags=True).values())
    note = (
        f"The first word of the tool's name so many steps ago, of the most frequent ones; by lag {counts} steps scored."
    )
    return Section("How far back does it remember?", note, figures=figures)


def _gradients(d: Diagnosis) -> Section:
    keys = [(name, loss) for loss in d.rates for name in d.gradients]
    columns = [f"{loss} loss, {name}" for name, loss in keys] + [f"in {loss}" for loss in d.rates]
    rows = []
    for module in MODULES:
        cells = [number(d.gradients[name][loss][module], digits=4) for name, loss in keys]
        rows.append((module, cells + [_RATES[rates[module]] for rates in d.rates.values()]))
    note = "Mean norm over a few validation batches, before clipping; parameter set named after the loss."
    return Section("Do gradients reach the modules?", note, {"first": "Module", "columns": columns, "rows": rows})


def _curves(d: Diagnosis) -> Section:
    figures = []
    for stage, rows in d.curves.items():

        def points(split: str, column: str, rows: Sequence[Mapping[str, Any]] = rows) -> Points:
            return [(r["step"], r[column]) for r in rows if r["split"] == split and column in r]

        loss = [
            Line("train", points("train", "loss"), COLORS["win"]),
            Line("validation", points("validation", "loss"), COLORS["unsafe"], marks=True),
        ]
        terms = [Line(name, points(split, name), color, dash) for name, (split, color, dash) in _TERMS[stage].items()]
        heads = (("loss", "Total, as it is minimised.", loss), ("terms", "In training; AUROC in validation.", terms))
        for head, note, lines in heads:
            svg = line_chart(f"{stage}: {head}", lines, x_label="optimiser step", y_label=head)
            figures.append((f"{stage.capitalize()}: {head}", note, svg))
    return Section("How did training go?", "From the curves that training wrote.", figures=figures)
