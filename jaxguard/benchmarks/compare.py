"""Two benchmark runs side by side: what became faster or slower, and what only looks so.

Rounds of one turn follow each other within milliseconds and share whatever else the machine did then, so the
bootstrap resamples whole turns. Its intervals cover what varies *within* the runs; what varies from one process to
the next (placement in memory, clock speed) they cannot know: compare two runs of one commit to see that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from jaxguard.benchmarks.records import Record, RecordsError, Run, Variant
from jaxguard.benchmarks.table import duration, markdown, significant
from jaxguard.evaluation.wording import visible

LEAST_TURNS = 5
FASTER, SLOWER, NOISE, FEW = "faster", "slower", "within noise", "too few turns"
RESAMPLES = 1_000  # give the standard error to about 2 %
_CHUNK = 4_000_000  # weights held at once: 16 MB
_MUST_AGREE = ("threads", "items", "turn")

Key = tuple[str, str, str]


def compare(a: Run, b: Run, *, level: float = 0.95, seed: int = 20260701) -> pd.DataFrame:
    """Ratios of medians, ``b`` over ``a``, with bootstrap intervals and a verdict on ``b``.

    Rows are matched by scenario, case and variant. The intervals hold together: with m rows to decide, each has the
    level ``1 - (1 - level) / m`` (Bonferroni), found in the frame's ``attrs["level"]``. An interval is that of
    Student's t around the logarithm of the ratio, with the standard error of the bootstrap and Welch's degrees of
    freedom: with five or ten turns, percentiles of the resampled ratios would be far too narrow.

    Returns:
        Columns ``scenario``, ``case``, ``variant``, ``p50_a_us``, ``p50_b_us`` (microseconds), ``turns_a``,
        ``turns_b``, ``ratio``, ``low``, ``high`` and ``verdict``: "faster" or "slower" where the interval lies on
        one side of 1, "within noise" where it holds 1, "too few turns" (below five on a side, no interval), "only
        in A", "only in B", or "unavailable in A: ..." with the reason. Rows of ``a`` come first, in its order.

    Raises:
        RecordsError: ``level`` is no probability strictly between 0 and 1.
    """
    if not 0.0 < level < 1.0:
        raise RecordsError(f"level: got {level!r}, expected a probability strictly between 0 and 1")
    sides = (_by_key(a), _by_key(b))
    keys = list(dict.fromkeys([*sides[0], *sides[1]]))
    decided = [key for key in keys if all(_turns(side, key) >= LEAST_TURNS for side in sides)]
    each = 1.0 - (1.0 - level) / max(len(decided), 1)
    rng = np.random.default_rng(seed)
    rows = []
    for key in keys:
        medians = [float(np.median(s[key][1].rounds)) if _turns(s, key) else math.nan for s in sides]
        ratio, low, high = medians[1] / medians[0], math.nan, math.nan
        if key in decided:
            parts = [(s[key][1].rounds, s[key][0].turn) for s in sides]
            low, high = _interval(math.log(ratio), [_variance(*part, rng) for part in parts], each)
        rows.append(
            {
                **dict(zip(("scenario", "case", "variant"), key, strict=True)),
                **dict(zip(("p50_a_us", "p50_b_us"), medians, strict=True)),
                **dict(zip(("turns_a", "turns_b"), (_turns(s, key) for s in sides), strict=True)),
                "ratio": ratio,
                "low": low,
                "high": high,
                "verdict": _verdict(sides, key, low, high),
            }
        )
    frame = pd.DataFrame(rows)
    frame.attrs = {"level": each, "together": level, "decided": len(decided), "seed": seed}
    return frame


def _by_key(run: Run) -> dict[Key, tuple[Record, Variant]]:
    return {(r.scenario, r.case, v.name): (r, v) for r in run.records for v in r.variants}


def _turns(side: Mapping[Key, tuple[Record, Variant]], key: Key) -> int:
    """Turns begun; 0 where nothing was measured."""
    return -(-len(side[key][1].rounds) // side[key][0].turn) if key in side else 0


def _verdict(sides: tuple[Mapping[Key, Any], Mapping[Key, Any]], key: Key, low: float, high: float) -> str:
    for name, side, other in (("A", *sides), ("B", *sides[::-1])):
        if key not in other:
            return f"only in {name}"
        if key in side and side[key][1].unavailable:
            return f"unavailable in {name}: {side[key][1].unavailable}"
    if math.isnan(low):
        return FEW
    return FASTER if high < 1.0 else SLOWER if low > 1.0 else NOISE


def _variance(rounds: NDArray[np.float64], turn: int, rng: np.random.Generator) -> tuple[float, int]:
    """Variance of the logarithm of the median, and the turns it was found from.

    Resampling T turns shows ``(T - 1) / T`` of the variance, as the variance within any sample does.
    """
    turns = -(-len(rounds) // turn)
    return float(np.log(_median_draws(rounds, turn, RESAMPLES, rng)).var(ddof=1)) * turns / (turns - 1), turns


def _interval(log_ratio: float, variances: Sequence[tuple[float, int]], level: float) -> tuple[float, float]:
    total = sum(variance for variance, _ in variances)
    if not total:  # every resample has the same median
        return math.exp(log_ratio), math.exp(log_ratio)
    freedom = total**2 / sum(variance**2 / (turns - 1) for variance, turns in variances)
    half = float(stats.t.ppf((1.0 + level) / 2.0, freedom)) * math.sqrt(total)
    return math.exp(log_ratio - half), math.exp(log_ratio + half)


def _median_draws(
    rounds: NDArray[np.float64], turn: int, resamples: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Medians of all rounds when turns are drawn with replacement; the last turn may be shorter than the others."""
    order = np.argsort(rounds)
    values, member = rounds[order], order // turn
    turns = int(member.max()) + 1
    found = []
    step = max(1, _CHUNK // len(rounds))
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        picked = rng.integers(0, turns, size=(count, turns)) + np.arange(count)[:, None] * turns
        times = np.bincount(picked.ravel(), minlength=count * turns).reshape(count, turns).astype(np.int32)
        upto = np.cumsum(times[:, member], axis=1, dtype=np.int32)
        half = upto[:, -1:] / 2.0
        # With an even number of rounds the median is the mean of the two in the middle.
        found.append((values[(upto >= half).argmax(axis=1)] + values[(upto > half).argmax(axis=1)]) / 2.0)
    return np.concatenate(found)


def render_comparison(a: Run, b: Run, frame: pd.DataFrame | None = None) -> str:
    """What differs between the runs, the table of :func:`compare` (made where not given), and the verdicts counted."""
    frame = compare(a, b) if frame is None else frame
    of = frame.attrs
    lines = [f"{name} {visible(_title(run))}" for name, run in (("A", a), ("B", b))]
    lines += [f"   {name}: {note}" for name, run in (("A", a), ("B", b)) for note in run.notes]
    lines += [visible(line) for line in differences(a, b)]
    if of["decided"]:
        lines.append(
            f"Ratio: median of B over median of A, with its interval. The {of['decided']} intervals hold together with "
            f"{of['together']:.0%} probability (Bonferroni: {100 * of['level']:.4g} % each; {RESAMPLES:,} "
            f"bootstrap resamples of whole turns, seed {of['seed']}). Variation between processes is not in them."
        )
    else:
        lines.append(
            f"Ratio: median of B over median of A. No row has {LEAST_TURNS} turns in both files, which an interval "
            "takes; `make bench` makes them, a smoke run does not."
        )
    heads = ("scenario", "case", "variant", "p50 A", "p50 B", "turns A", "turns B", "ratio", "interval", "B is")
    rows = []
    r: Any
    for r in frame.itertuples():
        medians = [duration(r.p50_a_us), duration(r.p50_b_us), str(r.turns_a), str(r.turns_b)]
        figures = [significant(r.ratio), _between(r.low, r.high), r.verdict]
        rows.append([r.scenario, r.case, r.variant, *medians, *figures])
    lines += ["", markdown(heads, rows, left=(0, 1, 2, len(heads) - 1)), ""]
    counts = frame["verdict"].str.partition(":")[0].value_counts()
    lines.append("B against A: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items()) + ".")
    return "\n".join(lines) + "\n"


def differences(a: Run, b: Run) -> list[str]:
    """A line each for machine and versions, commits, and what matched records do not share."""
    facts = [f"{name} {a.facts.get(name, 'unknown')} → {b.facts.get(name, 'unknown')}"
             for name in dict.fromkeys([*a.facts, *b.facts]) if a.facts.get(name) != b.facts.get(name)]  # fmt: skip
    lines = ["Machine and versions: " + ("; ".join(facts) if facts else "the same") + "."]
    commits = [run.commit or "unknown" for run in (a, b)]
    same = commits[0] == commits[1]
    lines.append(f"Commit: {f'the same, {commits[0]}' if same else ' → '.join(commits)}.")
    sides = _by_key(a), _by_key(b)
    shared = [key for key in sides[0] if key in sides[1]]
    for name in _MUST_AGREE:
        pairs = [tuple(getattr(side[key][0], name) for side in sides) for key in shared]
        unlike = [pair for pair in pairs if pair[0] != pair[1]]
        if unlike:
            kinds = ", ".join(f"{one} → {other}" for one, other in dict.fromkeys(unlike))
            lines.append(f"{name.capitalize()} differ in {len(unlike)} of {len(pairs)} matched rows: {kinds}.")
        elif name == "threads":
            lines.append("Threads: the same in all matched rows." if pairs else "No rows match.")
    return lines


def _title(run: Run) -> str:
    return " · ".join(part for part in (str(run.path), run.datetime, str(run.facts.get("device", ""))) if part)


def _between(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{low:.3f}–{high:.3f}"
