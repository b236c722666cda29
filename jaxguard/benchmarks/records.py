"""One benchmark run: the pytest-benchmark file that ``pytest bench --benchmark-json=FILE`` writes, as a tidy table.

A record measures several variants of the same work by turns. Its raw rounds stay reachable in
:attr:`Run.records`; :attr:`Run.frame` summarises them, a row per record and variant.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from jaxguard.traces.files import load_json
from jaxguard.types import JaxguardError

SCENARIOS = {
    "SingleStream": "One step after another, the next when the last is done: latency at batch 1.",
    "MultiStream": "A step of several sessions at once: latency and rate of a batch.",
    "Server": "Steps arrive at random at a given rate: latency from arrival to answer, waiting included.",
    "Offline": "Everything is there from the start: rate at large batches.",
    "Training": "Optimiser steps, compilation apart.",
    "ColdStart": "From a fresh process to the first answer, compilation included.",
    "EndToEnd": "From texts to a decision, encoding included.",
}
PRODUCT = "jax product"
# Column: percentile, and the rounds it takes before that many lie beyond it that it means something.
PERCENTILES = {"p50_us": (50.0, 1), "p90_us": (90.0, 1), "p99_us": (99.0, 100), "p999_us": (99.9, 1_000)}
# Beyond these, quotients and logarithms of what was measured leave what a float can hold.
_SMALLEST, _LARGEST = 1e-12, 1e15
_RANGE = f"0, or {_SMALLEST:g} to {_LARGEST:g} in size"
_UNITS = {"_per_s": "/s", "_ms": " ms", "_us": " µs", "_s": " s"}


class RecordsError(JaxguardError):
    """A file that holds no benchmark records, or a record that says something impossible."""


@dataclass(frozen=True)
class Variant:
    """One way to do the work of a record.

    Attributes:
        name: E.g. ``"jax product"``.
        framework: E.g. ``"jax"``; empty where not said.
        dtype: E.g. ``"float32"``; empty where not said.
        rounds: Microseconds of each round, in the order measured; empty where unavailable.
        compile_s: Seconds to prepare the weights and make the first call, compilation in it; NaN where not said.
        unavailable: Why it was not measured; empty where it was.
    """

    name: str
    framework: str
    dtype: str
    rounds: NDArray[np.float64]
    compile_s: float
    unavailable: str


@dataclass(frozen=True)
class Record:
    """What one benchmark measured.

    Attributes:
        scenario: A key of :data:`SCENARIOS`.
        case: The fields in one line, e.g. ``"small, batch 64"``.
        fields: What was measured: names and plain values.
        items: Steps (or texts) that a round computes.
        threads: Threads allowed.
        turn: Rounds that a variant takes before the next has its turn.
        floors: Least microseconds a round can take, by what limits it: ``read``, ``matmul``.
        split: Microseconds by part of a round; empty where not measured.
        holds: By variant, the highest rate of arrivals it answers in time, per second; empty where not measured.
        variants: In the file's order.
    """

    scenario: str
    case: str
    fields: Mapping[str, Any]
    items: int
    threads: int
    turn: int
    floors: Mapping[str, float]
    split: Mapping[str, float]
    holds: Mapping[str, float]
    variants: tuple[Variant, ...]

    @property
    def floor_us(self) -> float:
        """The larger of the floors; NaN where none is known."""
        return max(self.floors.values(), default=0.0) or math.nan


@dataclass(frozen=True)
class Run:
    """One file of benchmark records.

    Attributes:
        path: The file.
        machine: What pytest-benchmark says of the machine; :attr:`facts` is this project's part of it.
        commit: Id of the commit, ``" with changes"`` after it where files were changed; empty where unknown.
        datetime: When, as the file says it.
        records: The records of this project, raw rounds included.
        frame: A row per record and variant, see :func:`read_run`.
        skipped: Benchmarks in the file that are not such records.
        notes: What a reader of the tables must know, in sentences.
    """

    path: Path
    machine: Mapping[str, Any]
    commit: str
    datetime: str
    records: tuple[Record, ...]
    frame: pd.DataFrame = field(repr=False)
    skipped: int
    notes: tuple[str, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """Processor, and what the benchmarks noted: versions, ``device`` and ``cores``."""
        cpu, own = self.machine.get("cpu"), self.machine.get("jaxguard")
        brand = cpu.get("brand_raw") if isinstance(cpu, Mapping) else None
        return ({"processor": brand} if brand else {}) | (dict(own) if isinstance(own, Mapping) else {})

    @property
    def on_cpu(self) -> bool:
        """Whether the device measured is a CPU; False where the file does not say."""
        return "cpu" in str(self.facts.get("device", "")).lower()


def read_run(path: Path | str) -> Run:
    """Reads a pytest-benchmark file.

    The frame's columns: ``record`` (position in :attr:`Run.records`), ``scenario``, ``case``, a ``case_NAME`` for
    each field of the cases, ``variant``, ``framework``, ``dtype``, ``threads``, ``items``, ``rounds``, ``p50_us``,
    ``p90_us``, ``p99_us`` (NaN below 100 rounds), ``p999_us`` (NaN below 1,000 rounds), ``rate_per_s`` (items over
    the median), ``compile_s``, ``floor_us`` (the larger floor), ``floor_of`` (which one that is), ``times_floor``
    (median over floor), ``ratio`` (median over that of the variant ``jax product`` in the same record) and
    ``unavailable`` (the reason where a variant could not be measured; its figures are NaN). Times are in
    microseconds, compilation in seconds. Records of the same case and variant but other threads get the threads
    into their case.

    Raises:
        RecordsError: The file is missing, is no pytest-benchmark file, has no records of this project, or one of
            them is malformed.
    """
    path = Path(path)
    content = _content(path)
    records, skipped = [], 0
    for i, benchmark in enumerate(content["benchmarks"]):
        extra = benchmark.get("extra_info") if isinstance(benchmark, dict) else None
        if isinstance(extra, dict) and "scenario" in extra:
            name = benchmark.get("name", "no name")
            records.append(_record(f"{path}: benchmarks[{i}] ({name})", extra))
        else:
            skipped += 1
    if not records:
        raise RecordsError(
            f"{path}: benchmarks: {skipped} of them, none with a scenario in its extra_info; expected at least one"
        )
    kept = _told_apart(records)
    _refuse_repeated(path, kept)
    commit = content.get("commit_info")
    commit = commit if isinstance(commit, dict) else {}
    changed = " with changes" if commit.get("id") and commit.get("dirty") else ""
    return Run(
        path=path,
        machine=content["machine_info"],
        commit=str(commit.get("id") or "") + changed,
        datetime=str(content.get("datetime") or ""),
        records=tuple(kept),
        frame=_frame(kept),
        skipped=skipped,
        notes=_notes(kept, skipped),
    )


def case_text(fields: Mapping[str, Any]) -> str:
    """The fields of a case in one line: texts alone, numbers after their name, the unit in the name moved behind."""
    return ", ".join(_part(name, value) for name, value in fields.items())


def _part(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return name.replace("_", " ") if value else f"no {name.replace('_', ' ')}"
    suffix = next((suffix for suffix in _UNITS if name.endswith(suffix)), "")
    return f"{name.removesuffix(suffix).replace('_', ' ')} {value:,}{_UNITS.get(suffix, '')}"


def _content(path: Path) -> dict[str, Any]:
    try:
        content = load_json(path)
        json.dumps(content, ensure_ascii=False).encode()
    except FileNotFoundError:
        raise RecordsError(f"{path}: no such file, expected what `pytest bench --benchmark-json=FILE` wrote") from None
    except UnicodeEncodeError:
        raise RecordsError(f"{path}: holds half of a surrogate pair, expected Unicode text") from None
    except ValueError as error:
        raise RecordsError(f"{path}: not JSON ({error}), expected a pytest-benchmark file") from None
    parts = (("benchmarks", list), ("machine_info", dict))
    for name, kind in parts:
        found = content.get(name) if isinstance(content, dict) else None
        if not isinstance(found, kind):
            raise RecordsError(f"{path}: {name}: got {_short(found)}, expected a {kind.__name__} as in a "
                               "pytest-benchmark file")  # fmt: skip
    return content


def _record(where: str, extra: Mapping[str, Any]) -> Record:
    scenario = extra["scenario"]
    if scenario not in list(SCENARIOS):
        raise _wrong(f"{where}: scenario", scenario, f"one of {', '.join(SCENARIOS)}")
    fields = _mapping(f"{where}: case", extra.get("case"))
    for name, value in fields.items():
        if not (value is None or isinstance(value, str | bool) or _number(value)):
            raise _wrong(f"{where}: case.{name}", value, f"a text, a number ({_RANGE}), true or false")
    counts = {}
    for name in ("items", "threads", "turn"):
        value = counts[name] = extra.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _LARGEST:
            raise _wrong(f"{where}: {name}", value, f"a whole number from 1 to {_LARGEST:g}")
    variants = _mapping(f"{where}: variants", extra.get("variants"))
    if not variants:
        raise _wrong(f"{where}: variants", variants, "at least one")
    return Record(
        scenario=scenario,
        case=case_text(fields) or "all",
        fields=fields,
        floors=_figures(f"{where}: floor_us", extra.get("floor_us"), "microseconds"),
        split=_figures(f"{where}: split_us", extra.get("split_us"), "microseconds"),
        holds=_figures(f"{where}: holds_per_s", extra.get("holds_per_s"), "calls per second"),
        variants=tuple(_variant(f"{where}: variants.{name}", name, entry) for name, entry in variants.items()),
        **counts,  # type: ignore[arg-type]  # checked above
    )


def _variant(where: str, name: str, entry: Any) -> Variant:
    entry = _mapping(where, entry)
    reason = ""
    rounds = entry.get("rounds_us")
    if rounds is None and entry.get("unavailable"):
        reason, rounds = str(entry["unavailable"]), []
    elif not isinstance(rounds, list) or not rounds:
        raise _wrong(f"{where}.rounds_us", rounds, "a list of microseconds, or `unavailable` with a reason")
    for i, value in enumerate(rounds):
        if not _number(value) or value <= 0:
            raise _wrong(f"{where}.rounds_us[{i}]", value, f"a number above 0 ({_RANGE})")
    seconds = entry.get("compile_s")
    if seconds is not None and (not _number(seconds) or seconds < 0):
        raise _wrong(f"{where}.compile_s", seconds, f"a number of at least 0 ({_RANGE})")
    return Variant(
        name=name,
        framework=str(entry.get("framework") or ""),
        dtype=str(entry.get("dtype") or ""),
        rounds=np.asarray(rounds, np.float64),
        compile_s=math.nan if seconds is None else float(seconds),
        unavailable=reason,
    )


def _told_apart(records: list[Record]) -> list[Record]:
    """Records of one case that were measured with several numbers of threads say so in their case."""
    threads: dict[tuple[str, str], set[int]] = {}
    for record in records:
        threads.setdefault((record.scenario, record.case), set()).add(record.threads)
    return [
        replace(r, case=f"{r.case}, {r.threads} thread{'s' if r.threads > 1 else ''}")
        if len(threads[r.scenario, r.case]) > 1
        else r
        for r in records
    ]


def _refuse_repeated(path: Path, records: list[Record]) -> None:
    counts = Counter((r.scenario, r.case, v.name) for r in records for v in r.variants)
    (scenario, case, variant), count = counts.most_common(1)[0]
    if count > 1:
        raise RecordsError(
            f"{path}: {scenario}, {case}, {variant}: measured {count} times; expected cases that tell records apart"
        )


def _frame(records: list[Record]) -> pd.DataFrame:
    names = list(dict.fromkeys(name for record in records for name in record.fields))
    rows = []
    for i, record in enumerate(records):
        base = next((np.median(v.rounds) for v in record.variants if v.name == PRODUCT and len(v.rounds)), math.nan)
        floor = record.floor_us
        for variant in record.variants:
            n = len(variant.rounds)
            quantiles = {
                column: float(np.percentile(variant.rounds, q)) if n >= least else math.nan
                for column, (q, least) in PERCENTILES.items()
            }
            median = quantiles["p50_us"]
            rows.append(
                {
                    "record": i,
                    "scenario": record.scenario,
                    "case": record.case,
                    **{f"case_{name}": record.fields.get(name) for name in names},
                    "variant": variant.name,
                    "framework": variant.framework,
                    "dtype": variant.dtype,
                    "threads": record.threads,
                    "items": record.items,
                    "rounds": n,
                    **quantiles,
                    "rate_per_s": record.items / median * 1e6,
                    "compile_s": variant.compile_s,
                    "floor_us": floor,
                    "floor_of": max(record.floors, key=record.floors.__getitem__) if floor > 0 else "",
                    "times_floor": median / floor,
                    "ratio": median / float(base),
                    "unavailable": variant.unavailable,
                }
            )
    return pd.DataFrame(rows)


def _notes(records: list[Record], skipped: int) -> tuple[str, ...]:
    variants = [v for r in records for v in r.variants]
    missing = sum(bool(v.unavailable) for v in variants)
    without = sum(not any(v.name == PRODUCT and len(v.rounds) for v in r.variants) for r in records)
    found = (
        (skipped, f"{skipped} benchmark{'s' if skipped > 1 else ''} of the file skipped: no scenario in extra_info."),
        (missing, f"{missing} of {len(variants)} measurements unavailable; the tables give the reason."),
        (without, f"{without} of {len(records)} records without a measured {PRODUCT}, so without a ratio to it."),
    )
    return tuple(text for count, text in found if count)


def _mapping(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    return value


def _figures(where: str, value: Any, unit: str) -> dict[str, float]:
    figures = _mapping(where, {} if value is None else value)
    for name, figure in figures.items():
        if not _number(figure) or figure < 0:
            raise _wrong(f"{where}.{name}", figure, f"{unit}: a number of at least 0 ({_RANGE})")
    return {name: float(figure) for name, figure in figures.items()}


def _number(value: Any) -> bool:
    """A number that can have been measured; comparing also refuses NaN and integers of hundreds of digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return value == 0 or _SMALLEST <= abs(value) <= _LARGEST


def _wrong(where: str, value: Any, expected: str) -> RecordsError:
    return RecordsError(f"{where}: got {_short(value)}, expected {expected}")


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
