"""Tables of a summary, for a terminal and for the page: one row per guard, mean and spread over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxguard.evaluation.wording import number, visible
from jaxguard.experiments.plan import FULL
from jaxguard.experiments.statistics import METRICS
from jaxguard.experiments.summary import Paired, Summary

# What the paper's section 4.5 says of each part that is taken away: metrics, and whether they rise or fall.
CLAIMS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "model.recurrent=false": (("f1", -1), ("fpr", 1)),
    "model.successor=false": (("f1", -1), ("fpr", 1)),
    "model.heads=prefix": (("f1", -1), ("phir", -1)),
    "model.heads=hazard": (("fpr", 1), ("phir", -1)),
    "decision.temporal=false": (("f1", -1), ("sr", -1)),
    "stage1.steps=0": (("fpr", 1),),
    "stage2.world_model_scale=0": (("sr", -1), ("phir", -1), ("mas", -1)),
}


@dataclass(frozen=True)
class Table:
    """A table as text.

    Attributes:
        title: Set, or pair of sets.
        head: Column headings.
        rows: Cells, the first being the guard's name.
        notes: Sentences under it.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """For a terminal."""
        lines = [self.head, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.head))]
        shown = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        ]
        return "\n".join([self.title, *shown, *self.notes]) + "\n"


def spread(found: Sequence[float], metric: str = "") -> str:
    """Mean, and standard deviation over seeds where there are several."""
    defined = [v for v in found if math.isfinite(v)]
    if not defined:
        return "–"
    text = number(statistics.fmean(defined), metric)
    return f"{text} ± {number(statistics.stdev(defined), metric)}" if len(defined) > 1 else text


def ahead(rows: Sequence[Paired]) -> str:
    """A difference over seeds: mean, its interval where there is one seed, how often it is beyond, largest p."""
    defined = [r for r in rows if math.isfinite(r.value)]
    if not defined:
        return "–"
    mean = number(statistics.fmean(r.value for r in defined))
    if len(defined) == 1:
        mean += f" ({number(defined[0].low)} to {number(defined[0].high)})"
    else:
        beyond = sum(r.low > 0 for r in defined), sum(r.high < 0 for r in defined)
        mean += f", above in {beyond[0]}, below in {beyond[1]} of {len(defined)}"
    p = [r.p for r in defined if math.isfinite(r.p)]
    return mean + (f", p ≤ {max(p):.2g}" if p else "")


def guard_tables(summary: Summary, experiment: str, reference: str) -> list[Table]:
    """A table of each set of rivals or ablations: metrics, and the paired difference in F1."""
    tables = []
    for data in summary.having(experiment).sets:
        own = summary.having(experiment, data)
        names = list(dict.fromkeys(f.guard for f in own.figures))
        of_rival = names[0] == reference and experiment == "rivals"
        rows = []
        for name in names:
            cells = [
                spread([f.value for f in own.figures if (f.guard, f.metric) == (name, metric)], metric)
                for metric in METRICS
            ]
            pairs = [p for p in own.paired if p.metric == "f1" and name == (p.other if of_rival else p.guard)]
            rows.append((visible(name), *cells, "" if name == reference else ahead(pairs)))
        seeds = len({f.seed for f in own.figures})
        heading = f"F1 of {reference} ahead" if of_rival else f"F1 against {reference}"
        note = f"{seeds} seed{'s' if seeds > 1 else ''} of split and training; ± is the standard deviation over them."
        tables.append(Table(data, (experiment, *METRICS.values(), heading), tuple(rows), (note,)))
    return tables


def claim_table(summary: Summary, settings: Mapping[str, str]) -> list[Table]:
    """What the paper says of each ablation, beside what happened here.

    Args:
        summary: Of ablations.
        settings: By variant, the setting in which it differs.
    """
    tables = []
    for data in summary.having("ablations").sets:
        own = summary.having("ablations", data)
        rows = []
        for variant, setting in settings.items():
            for metric, sign in CLAIMS.get(setting, ()):
                pairs = [p for p in own.paired if (p.guard, p.metric) == (variant, metric) and math.isfinite(p.value)]
                said = f"{METRICS[metric]} {'rises' if sign > 0 else 'falls'}"
                rows.append((visible(variant), said, ahead(pairs), _verdict(pairs, sign)))
        head = ("without", "the paper", f"here, against {FULL}", "")
        tables.append(Table(f"{data}: what the paper says of each part", head, tuple(rows)))
    return tables


def _verdict(pairs: Sequence[Paired], sign: int) -> str:
    if not pairs:
        return "not measured"
    mean = statistics.fmean(p.value for p in pairs)
    if mean * sign <= 0:
        return "does not" if mean else "no change"
    beyond = sum((p.low if sign > 0 else -p.high) > 0 for p in pairs)
    return f"so here, beyond the interval in {beyond} of {len(pairs)}" if beyond else "so here, within the interval"


def transfer_tables(summary: Summary) -> list[Table]:
    """Rates at each way to a threshold, for every pair of sets."""
    tables = []
    for data in summary.having("transfer").sets:
        own = summary.having("transfer", data).figures
        rows = []
        for name in dict.fromkeys(f.guard for f in own if f.metric != "auroc"):
            cells = (spread([f.value for f in own if (f.guard, f.metric) == (name, m)], m) for m in ("f1", "sr", "fpr"))
            rows.append((visible(name), *cells))
        area = spread([f.value for f in own if f.metric == "auroc"])
        tables.append(Table(data, ("threshold", "F1", "SR", "FPR"), tuple(rows), (f"AUROC there {area}.",)))
    return tables
