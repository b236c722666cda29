"""Measuring variants side by side, and what a record says about it.

Variants take turns of :data:`TURN` rounds, so that their ratio does not depend on what else the machine does. Their
order is drawn anew each time: threads of one runtime still spin when the next variant begins, and whoever always
followed it would pay. A pause lets them fall asleep, then calls that are not counted bring the variant's own threads
and weights back. Compilation happens before and is timed apart.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxguard.config import MODEL_PRESETS
from jaxguard.settings import to_dict
from jaxguard.versions import versions

TURN = 20
PAUSE_S = 0.01
WARM_UP = 2


@dataclass
class Variant:
    """One way to do the same work.

    ``run(i)`` does the i-th round and returns only when the result is there, on the host. ``slow`` variants get a tenth
    of the rounds.
    """

    framework: str
    run: Callable[[int], Any]
    dtype: str = "float32"
    slow: bool = False
    compile_s: float | None = None
    rounds_us: list[float] = field(default_factory=list)


class CannotRun(Exception):
    """A variant is not for this machine; the message says why."""


@dataclass
class Unavailable:
    """A variant that this machine cannot run, and why."""

    framework: str
    unavailable: str
    dtype: str = "float32"


WORDS = ("order", "server", "letter", "window", "report", "garden", "ticket", "invoice", "meeting", "river")


def text(rng: np.random.Generator, words: int) -> str:
    """A text of so many words, about as many tokens."""
    return " ".join(WORDS[i] for i in rng.integers(0, len(WORDS), size=words))


Variants = Mapping[str, Variant | Unavailable]


def make(framework: str, build: Callable[[], Callable[[int], Any]], **settings: Any) -> Variant | Unavailable:
    """Builds a variant and makes its first call: its ``compile_s``, with preparing weights but without imports.

    A missing library or :class:`CannotRun` makes it unavailable, other errors do not.
    """
    try:
        importlib.import_module(framework)
        begin = time.perf_counter()
        run = build()
    except ModuleNotFoundError as error:
        return Unavailable(framework, f"not installed: {error.name}")
    except CannotRun as error:
        return Unavailable(framework, str(error))
    run(0)
    return Variant(framework, run, compile_s=round(time.perf_counter() - begin, 3), **settings)


def take_turns(variants: Variants, rounds: int, turn: int = TURN, warm_up: int = WARM_UP) -> None:
    """Fills ``rounds_us`` of every variant that can run; ``warm_up`` calls before each turn are not counted."""
    rng = np.random.default_rng(0)
    runnable = [variant for variant in variants.values() if isinstance(variant, Variant)]
    for number in range(max(rounds // turn, 1)):
        for place in rng.permutation(len(runnable)):
            variant = runnable[place]
            if variant.slow and number % 10:
                continue
            time.sleep(PAUSE_S)
            for i in range(warm_up):
                variant.run(i)
            for i in range(min(turn, rounds)):
                begin = time.perf_counter()
                variant.run(i)
                variant.rounds_us.append((time.perf_counter() - begin) * 1e6)


def median_us(run: Callable[[], object], rounds: int = 200) -> float:
    """Median microseconds of a call."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times)) * 1e6


def with_transfers(p50_us: float, given: np.ndarray, results: int) -> dict[str, float]:
    """Parts of a call: bringing its inputs to jax's device, its ``results`` (so many floats) back, and the rest."""
    made = iter([jax.block_until_ready(jax.numpy.full(results, float(i))) for i in range(200)])
    inward = median_us(lambda: jax.block_until_ready(jax.device_put(given)))
    outward = median_us(lambda: np.asarray(next(made)))  # a fresh one each: an array remembers its copy on the host
    rest = max(p50_us - inward - outward, 0.0)
    return {"inputs to the device": inward, "step and decision": rest, "results back": outward}


def describe(
    variants: Variants, scenario: str, case: dict[str, Any], *, items: int, threads: int, turn: int = TURN, **more: Any
) -> dict[str, Any]:
    """The ``extra_info`` of a benchmark: raw rounds and everything needed to read them.

    A ``size`` in the case brings its shapes.
    """
    told = {}
    for name, variant in variants.items():
        kept = ("framework", "dtype", "compile_s", "unavailable")
        told[name] = {key: value for key in kept if (value := getattr(variant, key, None)) is not None}
        if isinstance(variant, Variant):
            told[name]["rounds_us"] = [round(us, 1) for us in variant.rounds_us]
    return {
        "scenario": scenario,
        "case": case,
        "items": items,
        "threads": threads,
        "turn": turn,
        "variants": told,
        "device": str(jax.devices()[0].device_kind),
        "versions": versions(),
        "shapes": to_dict(MODEL_PRESETS[case["size"]]) if "size" in case else {},
        **more,
    }


def lines(variants: Variants, what: str, base: str = "jax product") -> list[str]:
    """One line per variant for the end of the run."""
    result = []
    product = variants[base]
    reference = float(np.median(product.rounds_us)) if isinstance(product, Variant) else np.nan
    for name, variant in variants.items():
        if isinstance(variant, Unavailable):
            result.append(f"{what} {name:22} {variant.unavailable}")
            continue
        p50 = float(np.median(variant.rounds_us))
        tail = f", p99 {np.percentile(variant.rounds_us, 99):9.0f}" if len(variant.rounds_us) >= 100 else ""
        result.append(f"{what} {name:22} p50 {p50:9.0f} us{tail}, {p50 / reference:5.2f} x product")
    return result
