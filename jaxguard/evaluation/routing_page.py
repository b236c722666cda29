"""The report of a router: a page in the look of the other reports, and the same figures as plain text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from markupsafe import Markup

from jaxguard.evaluation import routing_plots as plots
from jaxguard.evaluation.bootstrap import Interval
from jaxguard.evaluation.metrics import EvaluationError
from jaxguard.evaluation.pages import Section, write_page
from jaxguard.evaluation.routing import GRID_METRICS, ROUTER, Figures, PairSection, RoutingEvaluation, RoutingSection
from jaxguard.evaluation.routing_rows import METRICS
from jaxguard.evaluation.table import WIDTH
from jaxguard.evaluation.wording import clip, number, span, told_apart, visible
from jaxguard.traces.snapshots import TRIGGER_NAMES
from jaxguard.types import Route

ALL_REFUSED = f"always {Route.REFUSE.name}"
"""Makes neither of both errors, being no router: it has no place among those that do."""
KINDS = {"service": "Service", "trigger": "Trigger", "persona": "Persona"}
PAIRS = {"acc_base": "Acc base", "acc_mem": "Acc mem", "both": "both right"}
_POINT = {"tau": "τ", "acc": "Acc", "rr": "RR", "rr_lower": "RR above", "oar": "OAR", "uar": "UAR",
          "uar_upper": "UAR below"}  # fmt: skip


def write_routing_report(
    path: Path, evaluation: RoutingEvaluation, *, about: str, title: str = "Routing report",
    facts: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """Writes the page and returns its path; the folder must exist.

    Args:
        path: Of the HTML file.
        evaluation: What to show.
        about: One sentence on the data: where it comes from and what plain baselines reach on it. Stands first.
        title: Of the page.
        facts: More to say under Provenance.

    Raises:
        EvaluationError: An empty ``about``.
    """
    e = evaluation
    if not about.strip():
        raise EvaluationError("about: got an empty text, expected a sentence on the data")
    sections = [_points(e), _overall(e), *_unseen(e), *_breakdowns(e), *_pairs(e), _calibration(e), *_grid(e)]
    told = {
        "logits": e.source,
        "intervals": f"{e.level:.0%} cluster bootstrap, {e.resamples:,} resamples, seed {e.seed}",
        "bounds": f"exact one-sided, confidence {1 - e.delta:g}, rows taken as independent",
        **(facts or {}),
    }
    return write_page(
        path,
        "diagnosis.html.j2",
        title=visible(title),
        lead=visible(about),
        cards=_cards(e),
        sections=sections,
        facts=[(visible(name), clip(value, 400)) for name, value in told.items()],
    )


def render(evaluation: RoutingEvaluation, about: str = "") -> str:
    """The figures as plain text, at most 100 columns wide; ``about`` is the first line where it is given."""
    e = evaluation
    lines = _wrap(visible(about)) if about else []
    for section in (own for own in e.sections if own.kind in ("all", "unseen")):
        lines += ["", _heading(section), *_wrap(_counts(section), "  "), f"{'':18}" + _heads(METRICS.values(), 9)]
        for name, figures in section.models.items():
            lines.append(f"{visible(name)[:17]:18}" + _heads([_number(figures[key]) for key in METRICS], 9))
            if name == ROUTER:
                spans = [_span(figures[key]) for key in METRICS]
                lines += [f"{'':18}" + _heads(spans, 9)] if any(spans) else []
    rival = _best_rival(e)
    for kind, what in KINDS.items():
        of = [section for section in e.sections if section.kind == kind]
        if of:
            lines += ["", f"{what}: rows, {ROUTER}, Acc of {visible(rival)}"]
            lines.append(f"{'':18}{'rows':>7}" + _heads([*METRICS.values(), "rival"], 8))
        for section in of:
            ours = [_number(section.models[ROUTER][key]) for key in METRICS]
            cells = _heads([*ours, _number(section.models[rival]["acc"])], 8)
            lines.append(f"{visible(_named(section))[:17]:18}{section.counts.rows:>7,}" + cells)
    lines += ["", f"Operating points ({e.active} in use)", f"{'':18}" + _heads(_POINT.values(), 11)]
    lines += [f"{visible(name)[:17]:18}" + _heads(found, 11) for name, found in _point_rows(e)]
    lines += [line for name, why in e.impossible.items() for line in _wrap(f"{name}: impossible, {visible(why)}", "  ")]
    for pairs in e.pairs:
        lines += ["", f"Flip pairs, {visible(pairs.persona) or 'all personas'}: {pairs.pairs:,}"]
        lines.append(f"{'':18}" + _heads(PAIRS.values(), 12))
        lines += [
            f"{visible(name)[:17]:18}" + _heads([_number(figures[key]) for key in PAIRS], 12)
            for name, figures in _told_models(e, pairs)
        ]
    if e.grid:
        lines += ["", "Upstream configurations", f"{'':30}" + _heads([METRICS[key] for key in GRID_METRICS], 9)]
        lines += [f"{visible(name)[:29]:30}" + _heads(found, 9) for name, found in _grid_rows(e)]
    lines += ["", *(line for note in _notes(e) for line in _wrap(note))]
    return "\n".join(lines).strip("\n") + "\n"


def _wrap(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)


def _heads(texts: Iterable[str], width: int) -> str:
    return "".join(f"{text:>{width}}" for text in texts)


def _plain(value: float | None) -> str:
    return number(math.nan if value is None else value)


def _number(value: Interval | None) -> str:
    return _plain(None if value is None else value.value)


def _span(value: Interval | None) -> str:
    """The interval; empty where no resample changed anything, as for a rival that names one class."""
    return "" if value is None or value.low == value.high else span(value)


def _cell(value: Interval | None) -> Markup:
    ends = _span(value)
    return Markup("{}<small>{}</small>").format(_number(value), ends) if ends else Markup(_number(value))


def _heading(section: RoutingSection) -> str:
    return "All rows" if section.kind == "all" else clip(f"Never seen: {section.name}", WIDTH)


def _counts(section: RoutingSection) -> str:
    c = section.counts
    unscored = f"; {c.unscored:,} with logits that are not finite, routed to ASK" if c.unscored else ""
    return (
        f"{c.rows:,} rows in {c.groups:,} groups: {c.execute:,} EXECUTE, {c.ask:,} ASK, {c.refuse:,} REFUSE{unscored}"
    )


def _point_rows(e: RoutingEvaluation) -> list[tuple[str, list[str]]]:
    return [
        (
            point.name,
            [
                told_apart(point.tau, [p.tau for p in e.points]),
                *(
                    _plain({"rr_lower": point.rr_lower, "uar_upper": point.uar_upper}.get(key, point.values.get(key)))
                    for key in list(_POINT)[1:]
                ),
            ],
        )
        for point in e.points
    ]


def _grid_rows(e: RoutingEvaluation) -> list[tuple[str, list[str]]]:
    if e.grid is None:
        return []
    rows = {**e.grid.configs, "mean": e.grid.mean, "σ": e.grid.sigma}
    return [(name, [_plain(values[key]) for key in GRID_METRICS]) for name, values in rows.items()]


def _order(e: RoutingEvaluation) -> str:
    """A warning where the names of the points mislead; empty where they do not."""
    taus = {point.name: point.tau for point in e.points}
    if taus.get("autonomous", 0.0) <= taus.get("conservative", 1.0):
        return ""
    return (
        "One tau keeps the limits of both autonomous and conservative, and each spends its own: conservative has the "
        "lower tau and asks less."
    )


def _notes(e: RoutingEvaluation) -> list[str]:
    notes = [
        *filter(None, [_order(e)]),
        "RR: refuse-recall. OAR: over-ask rate, EXECUTE asked about. UAR: under-ask rate, ASK executed.",
        f"Under {ROUTER}: {e.level:.0%} cluster-bootstrap intervals, {e.resamples:,} resamples, seed {e.seed}.",
        f"RR above and UAR below are exact one-sided bounds with confidence {1 - e.delta:g} that take rows as "
        "independent; rows of one trajectory are not.",
        *(
            f"Calibration of {name}: expected calibration error {_plain(found.ece)} on {sum(found.counts):,} rows."
            for name, found in (("q", e.reliability["q"]), ("the most probable route", e.reliability["top"]))
        ),
    ]
    if e.own_taus:
        own = ", ".join(f"{visible(name)} {told_apart(tau, e.own_taus.values())}" for name, tau in e.own_taus.items())
        notes.append(f"Services with a tau of their own at {e.active}: {own}.")
    notes += [f"{visible(name)} uses the tau of all services: {visible(why)}." for name, why in e.fell_back.items()]
    if e.incomplete_pairs or e.unflipped_pairs:
        notes.append(
            f"Not among the flip pairs: {e.incomplete_pairs:,} without one side, {e.unflipped_pairs:,} of one label."
        )
    return notes


def _cards(e: RoutingEvaluation) -> list[tuple[str, str, str]]:
    ours, rival = e.overall.models[ROUTER], _best_rival(e)

    def card(key: str, what: str) -> tuple[str, str, str]:
        return METRICS[key], _number(ours[key]), "; ".join(filter(None, (_span(ours[key]), what)))

    return [
        card("acc", f"{clip(rival, 24)} {_number(e.overall.models[rival]['acc'])}"),
        card("macro_f1", "mean of three"),
        card("rr", "REFUSE rows refused"),
        card("oar", "EXECUTE asked about"),
        card("uar", "ASK executed"),
        ("Rows", f"{e.overall.counts.rows:,}", f"in {e.overall.counts.groups:,} groups"),
    ]


def _best_rival(e: RoutingEvaluation) -> str:
    """The rival with the highest accuracy on all rows; the same one in every breakdown."""
    accuracy = {name: own.value for name, found in e.overall.models.items() if (own := found["acc"]) is not None}
    return max(accuracy.keys() - {ROUTER}, key=lambda name: (accuracy[name], name))


def _models(section: RoutingSection) -> dict[str, object]:
    rows = [(visible(name), [_cell(figures[key]) for key in METRICS]) for name, figures in section.models.items()]
    return {"first": "", "columns": list(METRICS.values()), "rows": rows}


def _points(e: RoutingEvaluation) -> Section:
    figures: list[tuple[str, str, Markup]] = []
    rivals = {
        name: (found["oar"].value, found["uar"].value)
        for name, found in e.overall.models.items()
        if name not in (ROUTER, ALL_REFUSED) and found["oar"] is not None and found["uar"] is not None
    }
    curve = next((own for own in e.frontiers if not own.service), None)
    if curve is not None:
        note = "Lower left is better. Stars: operating points, as they route service by service; diamonds: rivals."
        figures.append(("All thresholds", note, Markup(plots.pareto(curve, e.points, rivals))))
        places = [rate for point in e.points if point.place is not None for rate in point.place]
        top = min(1.0, max(0.02, 1.25 * max(places, default=1.0)))
        if top < 0.7:
            zoom = plots.pareto(curve, e.points, rivals, top=top)
            figures.append(("Around the operating points", "The same, closer.", Markup(zoom)))
    rows = [*_point_rows(e), *((f"{name}: {visible(why)}", ["–"] * len(_POINT)) for name, why in e.impossible.items())]
    note = (
        f"{e.active} is in use. The thresholds were chosen on other rows. RR above and UAR below are exact bounds with "
        f"confidence {1 - e.delta:g} that take rows as independent, which rows of one trajectory are not. {_order(e)}"
    )
    return Section("Where can it stand?", note, {"first": "", "columns": list(_POINT.values()), "rows": rows}, figures)


def _overall(e: RoutingEvaluation) -> Section:
    chart = Markup(plots.confusion_chart(e.overall.confusion))
    figures = [("Label and route", "Shares are of the label's rows.", chart), *_by_service(e)]
    return Section("How well does it route?", f"{_counts(e.overall)}. At {e.active}.", _models(e.overall), figures)


def _by_service(e: RoutingEvaluation) -> list[tuple[str, str, Markup]]:
    services = {section.name: section for section in e.sections if section.kind == "service"}
    own = [frontier for frontier in e.frontiers if frontier.service]
    if len(own) < 2:
        return []
    own.sort(key=lambda frontier: -services[frontier.service].counts.rows)
    stars = {}
    for frontier in own:
        figures = services[frontier.service].models[ROUTER]
        oar, uar = figures["oar"], figures["uar"]
        if oar is not None and uar is not None:
            stars[frontier.service] = (oar.value, uar.value)
    left_out = len(own) - plots.MOST_SERVICES
    note = f"Stars: where each stands at {e.active}."
    note += f" {left_out} smaller services are not drawn." if left_out > 0 else ""
    return [("By service", note, Markup(plots.service_frontiers(own, stars)))]


def _unseen(e: RoutingEvaluation) -> list[Section]:
    return [
        Section(
            f"And what it never saw: {clip(s.name, 60)}?",
            f"{_counts(s)}. They are in no figure over all rows.",
            _models(s),
        )
        for s in e.sections
        if s.kind == "unseen"
    ]


def _named(section: RoutingSection) -> str:
    trigger = TRIGGER_NAMES.get(section.name, "") if section.kind == "trigger" else ""
    return f"{section.name}, {trigger}" if trigger else section.name


def _breakdowns(e: RoutingEvaluation) -> list[Section]:
    keys, rival, made = ("acc", "macro_f1", "rr", "oar", "uar"), _best_rival(e), []
    for kind, name in KINDS.items():
        rows = []
        for s in e.sections:
            if s.kind == kind:
                figures = [*(_cell(s.models[ROUTER][key]) for key in keys), _cell(s.models[rival]["acc"])]
                rows.append((clip(_named(s), 60), [f"{s.counts.rows:,}", f"{s.counts.unscored:,}", *figures]))
        if rows:
            columns = ["rows", "unscored", *(METRICS[key] for key in keys), f"{clip(rival, 24)}, Acc"]
            note = f"{ROUTER} at {e.active}; a dash where a class has no row."
            made.append(Section(f"By {name.lower()}", note, {"first": name, "columns": columns, "rows": rows}))
    return made


def _pairs(e: RoutingEvaluation) -> list[Section]:
    if not e.pairs:
        return []
    rows = [
        (f"{visible(name)}, {visible(pairs.persona) or 'all'}", [f"{pairs.pairs:,}", *(_cell(own[k]) for k in PAIRS)])
        for pairs in e.pairs
        for name, own in _told_models(e, pairs)
    ]
    note = (
        "Rows that differ in memory alone and whose labels differ: who does not read the memory is right on one side "
        f"at most. Left out: {e.incomplete_pairs:,} pairs that lack a side, {e.unflipped_pairs:,} of one label."
    )
    table = {"first": "", "columns": ["pairs", *PAIRS.values()], "rows": rows}
    return [Section("Does it listen to the user's memory?", note, table)]


def _told_models(e: RoutingEvaluation, pairs: PairSection) -> list[tuple[str, Figures]]:
    """All models over all personas, within one the router and the best rival."""
    kept = (ROUTER, _best_rival(e))
    return [(name, own) for name, own in pairs.models.items() if not pairs.persona or name in kept]


def _calibration(e: RoutingEvaluation) -> Section:
    q, top = e.reliability["q"], e.reliability["top"]
    figures = [
        ("q", "EXECUTE and ASK rows that are not refused, which is where the threshold decides.",
         Markup(plots.reliability_diagram(q, claim="q, share of EXECUTE", outcome="share labelled EXECUTE"))),
        ("Most probable route", "All three classes, before any threshold.",
         Markup(plots.reliability_diagram(top, claim="probability of the most probable route",
                                          outcome="share in which it is the label"))),
    ]  # fmt: skip
    note = "On the dashed line a probability means what it says. Rows with logits that are not finite claim nothing."
    return Section("Do its probabilities mean what they say?", note, figures=figures)


def _grid(e: RoutingEvaluation) -> list[Section]:
    if e.grid is None:
        return []
    table = {"first": "Configuration", "columns": [METRICS[key] for key in GRID_METRICS], "rows": _grid_rows(e)}
    note = "The same router and thresholds on the steps of other agents; σ is that of the population."
    return [Section("Does it hold for other agents?", note, table)]
