"""Benchmark files as pytest-benchmark writes them, made small."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MACHINE = {
    "node": "host-name",
    "system": "Linux",
    "machine": "x86_64",
    "cpu": {"brand_raw": "Some CPU"},
    "jaxguard": {"jaxguard": "0.1.0", "jax": "0.10.2", "device": "cpu", "cores": 2},
}


def variant(rounds: list[float], framework: str = "jax", dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {"framework": framework, "dtype": dtype, "rounds_us": rounds, **more}


def extra(scenario: str, case: Mapping[str, Any], variants: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"scenario": scenario, "case": case, "items": 1, "threads": 1, "turn": 2, "variants": variants, **more}


def write(path: Path, *extras: Any, **top: Any) -> Path:
    """A file with a benchmark per ``extra_info``; ``top`` replaces its other parts."""
    content = {
        "machine_info": MACHINE,
        "commit_info": {"id": "abc123", "dirty": False},
        "datetime": "2026-08-01T12:00:00+00:00",
        "benchmarks": [
            {"name": f"test_{i}", "group": None, "stats": {}, "extra_info": e} for i, e in enumerate(extras)
        ],
        **top,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
