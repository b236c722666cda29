"""Routed rows with realistic noise, made from a seed."""

from __future__ import annotations

import numpy as np

from jaxguard.decision.routing import Routing
from jaxguard.decision.routing_fit import fit_routing
from jaxguard.evaluation.routing_rows import RoutedRows

NASTY = '<script>alert(1)</script>$x$ & "'
SERVICES = ("chat", "tickets", "records", NASTY)
PERSONAS = ("cautious", "permissive", "adversarial")
TRIGGERS = ("abcd", "efghi", "jklmn")


def make_rows(n: int, seed: int = 0, *, gap: float = 2.5, services: tuple[str, ...] = SERVICES) -> RoutedRows:
    """Every third step stands there twice, without and with a memory; four of five such labels flip."""
    rng = np.random.default_rng(seed)
    columns: dict[str, list] = {name: [] for name in ("ids", "labels", "services", "personas", "triggers", "pairs")}
    columns |= {name: [] for name in ("sides", "groups")}
    for i in range(n):
        label = int(rng.integers(0, 3))
        service = str(rng.choice(services))
        paired = i % 3 == 0
        other = (label + int(rng.integers(1, 3))) % 3 if i % 5 else label
        for side, own in (("base", label), ("mem", other)) if paired else (("", label),):
            columns["ids"].append(f"{seed}:{i}{side}")
            columns["labels"].append(own)
            columns["services"].append(service)
            columns["personas"].append(str(rng.choice(PERSONAS)) if side == "mem" else "")
            columns["triggers"].append(str(rng.choice(list(TRIGGERS[own]))))
            columns["pairs"].append(f"p{i}" if paired else "")
            columns["sides"].append(side)
            columns["groups"].append(f"g{i // 4}")
    labels = np.array(columns.pop("labels"))
    harder = np.array([1.0 + 0.6 * services.index(s) for s in columns["services"]])[:, None]
    logits = (gap * np.eye(3)[labels] + harder * rng.normal(size=(len(labels), 3))).astype(np.float32)
    logits[::97] = np.nan
    return RoutedRows(logits=logits, labels=labels, **columns)


def make_routing(rows: RoutedRows, **settings) -> Routing:
    return fit_routing(rows.logits, rows.labels, rows.services, source="abc", **settings)
