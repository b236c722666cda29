"""Each experiment of a plan: which runs it needs, and which figures and differences it takes from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxguard.evaluation.evaluate import GUARD
from jaxguard.evaluation.outcomes import OUTCOMES, GuardOutcome, Outcomes, read_outcomes
from jaxguard.experiments.page import write_summary_page
from jaxguard.experiments.plan import FULL, Plan
from jaxguard.experiments.runs import evaluated, missing_data, run_folder, say, set_config
from jaxguard.experiments.statistics import differences, measured, require_same
from jaxguard.experiments.summary import Figure, Paired, Summary, figures, read_summary
from jaxguard.experiments.tables import Table, claim_table, guard_tables, transfer_tables
from jaxguard.inputs import RunError
from jaxguard.rivals import FOLDER as RIVALS
from jaxguard.rivals import NAMES, rivals_run
from jaxguard.run import transfer_run

Experiment = Callable[[Plan, Path, bool], Summary]


def _there(plan: Plan, out: Path, names: tuple[str, ...], experiment: str) -> tuple[list[str], list[str]]:
    """The sets whose trajectories are there, and what to say of the others."""
    absent = {name: paths for name in names if (paths := missing_data(plan, out, name))}
    said = [f"{experiment}: {name}: {', '.join(paths)} is not there" for name, paths in absent.items()]
    return [name for name in names if name not in absent], said


def _paired(
    experiment: str,
    data: str,
    seed: str,
    names: tuple[str, str],
    found: Outcomes,
    one: GuardOutcome,
    other: GuardOutcome,
) -> Iterator[Paired]:
    for metric, d in differences(found, one, other, seed=int(seed)).items():
        yield Paired(experiment, data, seed, *names, metric, d.interval.value, d.interval.low, d.interval.high, d.p)


def _met(folder: Path) -> bool:
    """Whether all rivals were tested beside the guard as it is now."""
    if not (folder / RIVALS / OUTCOMES).exists():
        return False
    found, now = read_outcomes(folder / RIVALS / OUTCOMES), read_outcomes(folder / "report" / OUTCOMES)
    return found.made == now.made and found.ids == now.ids and set(NAMES) <= set(found.guards)


def rivals(plan: Plan, out: Path, progress: bool = True) -> Summary:
    """The guard beside its rivals, on every set and seed: same splits, same calibration."""
    rows: list[Figure] = []
    paired: list[Paired] = []
    names, left_out = _there(plan, out, plan.sets, "rivals")
    for name in names:
        for seed in plan.seeds:
            folder = evaluated(plan, out, name, seed, progress=progress)
            if not _met(folder):
                say(f"{name}, rivals, seed {seed}", progress)
                rivals_run(folder, progress=progress)
            found = read_outcomes(folder / RIVALS / OUTCOMES)
            for guard, own in found.guards.items():
                rows += figures("rivals", name, seed, guard, measured(found, guard, seed=int(seed)))
                if guard != GUARD:
                    ours = found.guards[GUARD]
                    paired += _paired("rivals", name, seed, (GUARD, guard), found, ours, own)
    return Summary(tuple(rows), tuple(paired), tuple(left_out))


def ablations(plan: Plan, out: Path, progress: bool = True) -> Summary:
    """The guard without one of its parts, beside the one that has them all (paper, table 5)."""
    rows: list[Figure] = []
    paired: list[Paired] = []
    names, left_out = _there(plan, out, plan.ablated, "ablations")
    for name in names:
        for seed in plan.ablation_seeds:
            full: Outcomes | None = None
            for variant, overrides in plan.variants.items():
                folder = evaluated(plan, out, name, seed, variant, overrides, progress=progress)
                found = read_outcomes(folder / "report" / OUTCOMES)
                rows += figures("ablations", name, seed, variant, measured(found, GUARD, seed=int(seed)))
                if full is None:
                    full = found
                    continue
                require_same(found, full, f"{folder} and {run_folder(out, name, FULL, seed)}")
                own, whole = found.guards[GUARD], full.guards[GUARD]
                paired += _paired("ablations", name, seed, (variant, FULL), found, own, whole)
    return Summary(tuple(rows), tuple(paired), tuple(left_out))


def transfer(plan: Plan, out: Path, progress: bool = True) -> Summary:
    """Guards with their thresholds on other sets, and with thresholds from a few safe trajectories there."""
    rows: list[Figure] = []
    left_out: list[str] = []
    for entry in plan.transfer:
        source, target = entry.split(" -> ")
        names, absent = _there(plan, out, (source, target), "transfer")
        left_out += absent
        if len(names) < 2:
            continue
        for seed in plan.seeds:
            folder = evaluated(plan, out, source, seed, progress=progress)
            there = set_config(plan, out, target).data
            found = transfer_run(folder, there.trajectories, store=Path(there.store))
            rows.append(Figure("transfer", entry, seed, "own", "auroc", found.auroc))
            for row in found.rows:
                for metric, value in (("f1", row.f1), ("sr", row.sr), ("fpr", row.fpr)):
                    ends = row.fpr_range if metric == "fpr" and row.fpr_range else (float("nan"), float("nan"))
                    rows.append(Figure("transfer", entry, seed, row.name, metric, value, *ends))
    return Summary(tuple(rows), (), tuple(dict.fromkeys(left_out)))


EXPERIMENTS: Mapping[str, Experiment] = {"rivals": rivals, "ablations": ablations, "transfer": transfer}


class NothingToRun(RunError):
    """The plan names nothing for an experiment, or nothing that is there."""


def conduct(
    name: str, plan: Plan, out: Path, source: str, *, progress: bool = True
) -> tuple[list[Table], tuple[str, ...], Path]:
    """Runs one experiment, puts it into ``summary.json``, and writes the page of all that is there.

    Args:
        name: Of :data:`EXPERIMENTS`.
        plan: Which runs.
        out: Folder for runs and summary.
        source: Name of the plan, for the page.
        progress: Says what is made, with bars, on stderr.

    Returns:
        The experiment's tables, what was left out, and the page.

    Raises:
        NothingToRun: the plan names nothing for it, or nothing that is there.
        JaxguardError: a run cannot be made, or ``out`` holds others' work.
    """
    out.mkdir(parents=True, exist_ok=True)
    file, digest = out / "summary.json", plan.digest
    before = read_summary(file).of_plan(digest)
    found = EXPERIMENTS[name](plan, out, progress)
    if not found.figures:
        raise NothingToRun(
            f"experiment {name}: nothing to run; {'; '.join(found.left_out) or 'the plan names nothing'}"
        )
    summary = before.replaced(name, found, digest)
    summary.write(file)
    settings = {variant: own[-1] for variant, own in plan.variants.items() if variant != FULL}
    every = {
        "rivals": guard_tables(summary, "rivals", GUARD),
        "ablations": [*guard_tables(summary, "ablations", FULL), *claim_table(summary, settings)],
        "transfer": transfer_tables(summary),
    }
    page = write_summary_page(out / "report.html", summary, every, source)
    return every[name], found.left_out, page
