"""Leak-free splits: trajectories that share a group, a text or (on request) an action sequence stay together.

Sharing is transitive, so what is assigned to a part is a *component*: the trajectories that a chain of
shared keys joins. A split is a function of the seed and of the set of trajectories, not of their order.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxguard.traces.files import load_json
from jaxguard.types import JaxguardError, Trajectory
from jaxguard.writing import write_whole

SPLITS_VERSION = 1

Label = bool | None


class SplitError(JaxguardError):
    """A split cannot be made, or a stored one does not fit; says which part, id or fraction is at fault."""


@dataclass
class _Component:
    """Trajectories that must stay together; ``rank`` orders components by the seed alone."""

    ids: list[str]
    labels: Counter[Label]
    rank: bytes


def make_splits(
    trajectories: Iterable[Trajectory],
    fractions: Mapping[str, float],
    seed: int,
    *,
    group_by: str | None = None,
    join_actions: bool = False,
) -> dict[str, list[str]]:
    """Assign every trajectory to a part; twins (equal ``metadata["pair"]`` of one source) are never parted.

    Parts approach their fractions as closely as whole components allow, for unsafe, safe and unlabelled
    trajectories separately; where there are enough components, every part gets some of each.

    Args:
        trajectories: Read once; only ids, keys and labels are kept.
        fractions: Part name -> share, e.g. ``{"train": 0.6, "val": 0.1, "calibration": 0.1, "test": 0.2}``; they
            add up to 1.
        seed: Decides which components go where.
        group_by: A metadata field to group by in place of ``Trajectory.group`` (e.g. ``injection_task_id``, to
            hold out injected goals). A trajectory without the field is a group of its own, but some must have
            it. Texts then count as
            equal only with their observations, and a text that occurs in several groups (a run that never
            saw the goal) is a component of its own: it would join the very groups that are to be told apart.
        join_actions: Also keep equal action sequences (tools and arguments) together, whatever the
            instruction: for sets whose runs repeat under other titles. Empty sequences join nothing.

    Returns:
        Part name -> ids in ascending order, in the order of ``fractions``.

    Raises:
        SplitError: A fraction is negative or they do not add up to 1, two trajectories share an id, there are no
            trajectories, or none has the field ``group_by``.
    """
    _check_fractions(fractions)
    components = _components(trajectories, seed, group_by, join_actions)
    parts = [name for name, share in fractions.items() if share > 0]
    totals: Counter[Label] = Counter()
    for component in components:
        totals.update(component.labels)
    targets = {name: {label: fractions[name] * totals[label] for label in totals} for name in parts}
    filled: dict[str, Counter[Label]] = {name: Counter() for name in parts}
    result: dict[str, list[str]] = {name: [] for name in fractions}

    def assign(component: _Component, part: str) -> None:
        filled[part].update(component.labels)
        result[part].extend(component.ids)

    rest = components
    for label in sorted(totals, key=lambda label: (totals[label], str(label))):
        rest = _give_each_part_one(rest, parts, label, filled, targets, assign)
    # Large components first: the small ones then even out what the large ones overshot.
    for component in sorted(rest, key=lambda c: (-len(c.ids), c.rank)):
        assign(component, min(parts, key=lambda part: _added_misfit(component.labels, filled[part], targets[part])))
    return {name: sorted(ids) for name, ids in result.items()}


def transfer_splits(
    seen: Iterable[Trajectory],
    unseen: Iterable[Trajectory],
    fractions: Mapping[str, float],
    seed: int,
    local: int,
    *,
    group_by: str | None = None,
    join_actions: bool = False,
) -> dict[str, list[str]]:
    """Parts for a guard that is trained on some sets and used on another.

    Whole components of ``unseen`` make ``calibration``, in seeded order, until they hold ``local`` safe trajectories;
    their unsafe ones are ``left_out``, as is every seen trajectory whose text also stands in ``unseen``.

    Args:
        seen: Trajectories to train on.
        unseen: Trajectories to calibrate and test on.
        fractions: Shares of ``train`` and ``validation``; only their ratio counts.
        seed: Decides which components go where.
        local: Safe calibration trajectories wanted.
        group_by: See :func:`make_splits`.
        join_actions: See :func:`make_splits`.

    Returns:
        ``train``, ``validation``, ``calibration``, ``test`` and ``left_out`` -> ids in ascending order.

    Raises:
        SplitError: As :func:`make_splits`; or ``unseen`` has too few safe trajectories to leave any for the test.
    """
    foreign = list(unseen)
    texts = {_entry(trajectory, None).text for trajectory in foreign}
    kept: list[Trajectory] = []
    left_out: list[Trajectory] = []
    for trajectory in seen:
        (left_out if _entry(trajectory, None).text in texts else kept).append(trajectory)
    total = fractions["train"] + fractions["validation"]
    if not total > 0:
        raise SplitError(f"fractions: train + validation is {total:g}, expected more than 0")
    parts = make_splits(
        kept,
        {name: fractions[name] / total for name in ("train", "validation")},
        seed,
        group_by=group_by,
        join_actions=join_actions,
    )
    label_of = {trajectory.id: trajectory.unsafe for trajectory in foreign}
    calibration: list[str] = []
    test: list[str] = []
    others = [trajectory.id for trajectory in left_out]
    for component in _components(foreign, seed, group_by, join_actions):
        safe = [name for name in component.ids if label_of[name] is False]
        if safe and len(calibration) + len(safe) <= local:
            calibration += safe
            others += [name for name in component.ids if label_of[name] is not False]
        else:
            test += component.ids
    if len(calibration) < local or not any(label_of[name] is False for name in test):
        raise SplitError(
            f"unseen: {len(calibration)} safe trajectories in whole groups for calibration, expected {local} and "
            "some more for the test; choose a smaller data.split.local"
        )
    return parts | {"calibration": sorted(calibration), "test": sorted(test), "left_out": sorted(others)}


def _check_fractions(fractions: Mapping[str, float]) -> None:
    for name, share in fractions.items():
        if not (math.isfinite(share) and share >= 0):
            raise SplitError(f"fractions.{name}: got {share}, expected a number that is not negative")
    total = sum(fractions.values())
    if abs(total - 1) > 1e-6:
        raise SplitError(f"fractions: {dict(fractions)} add up to {total:g}, expected 1")


@dataclass
class _Entry:
    """What is kept of a trajectory: its group and digests of its texts in place of the texts."""

    id: str
    label: Label
    group: str
    text: str
    actions: str
    pair: str


def _components(
    trajectories: Iterable[Trajectory], seed: int, group_by: str | None, join_actions: bool
) -> list[_Component]:
    """Union-find over the keys that trajectories share."""
    entries: list[_Entry] = []
    fields: set[str] = set()
    for trajectory in trajectories:
        entries.append(_entry(trajectory, group_by))
        fields.update(name for name, value in trajectory.metadata.items() if value is not None)
    if not entries:
        raise SplitError("trajectories: got none, expected at least one")
    if group_by is not None and group_by not in fields:
        raise SplitError(
            f"group_by: no trajectory has {group_by!r} in its metadata, expected one of the fields there "
            f"({', '.join(sorted(fields)) or 'none'})"
        )
    id_uses = Counter(entry.id for entry in entries)
    if len(id_uses) < len(entries):
        repeated = next(name for name, uses in id_uses.items() if uses > 1)
        raise SplitError(f"trajectories: the id {repeated!r} occurs more than once, expected unique ids")
    groups_of_text: dict[str, set[str]] = {}
    for entry in entries:
        groups_of_text.setdefault(entry.text, set()).add(entry.group)

    parent = list(range(len(entries)))
    first_with: dict[tuple[str, str], int] = {}

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for index, entry in enumerate(entries):
        keys = [("text", entry.text)]
        if entry.group and (group_by is None or len(groups_of_text[entry.text]) == 1):
            keys.append(("group", entry.group))
        if entry.pair:
            keys.append(("pair", entry.pair))
        if join_actions and entry.actions:
            keys.append(("actions", entry.actions))
        for key in keys:
            parent[root(index)] = root(first_with.setdefault(key, index))

    members: dict[int, list[_Entry]] = {}
    for index, entry in enumerate(entries):
        members.setdefault(root(index), []).append(entry)
    components = [
        _Component(
            ids=[entry.id for entry in group],
            labels=Counter(entry.label for entry in group),
            rank=_digest(str(seed), min(entry.id for entry in group)),
        )
        for group in members.values()
    ]
    return sorted(components, key=lambda component: component.rank)


def _entry(trajectory: Trajectory, group_by: str | None) -> _Entry:
    actions = action_fingerprint(trajectory)
    pair = trajectory.metadata.get("pair")
    if group_by is None:
        group: Any = trajectory.group
        seen: list[str] = []
    else:
        group = trajectory.metadata.get(group_by)
        seen = [step.observation for step in trajectory.steps]
    return _Entry(
        id=trajectory.id,
        label=trajectory.unsafe,
        group="" if group is None else str(group),
        text=_digest(trajectory.instruction, actions, *seen).hex(),
        actions=actions if trajectory.steps else "",
        pair="" if pair is None else f"{trajectory.source}/{pair}",
    )


def action_fingerprint(trajectory: Trajectory) -> str:
    """Equal for two trajectories exactly when they propose the same calls in the same order.

    Arguments are compared as JSON values with sorted keys, and texts with white space collapsed.
    """
    calls = [[step.tool, step.raw_arguments or _normalised(step.arguments)] for step in trajectory.steps]
    return _digest(json.dumps(calls, sort_keys=True)).hex()


def _normalised(value: Any) -> Any:
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Mapping):
        return {str(key): _normalised(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_normalised(child) for child in value]
    return value


def _digest(*texts: str) -> bytes:
    # Lengths keep ("ab", "c") and ("a", "bc") apart; surrogates may stand in text made by hand.
    joined = "".join(f"{len(text)}:{text}" for text in texts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).digest()


def _give_each_part_one(
    components: list[_Component],
    parts: Sequence[str],
    label: Label,
    filled: Mapping[str, Counter[Label]],
    targets: Mapping[str, Mapping[Label, float]],
    assign: Any,
) -> list[_Component]:
    """Hand each part that lacks ``label`` a component that has it, the largest target first; returns the rest."""
    rest = list(components)
    lacking = [part for part in parts if not filled[part][label]]
    for part in sorted(lacking, key=lambda part: -targets[part][label]):
        room = sum(targets[part].values())
        having = [component for component in rest if component.labels[label]]
        if not having:
            break
        fitting = [component for component in having if len(component.ids) <= room]
        chosen = fitting[0] if fitting else min(having, key=lambda component: (len(component.ids), component.rank))
        assign(chosen, part)
        rest.remove(chosen)
    return rest


def _added_misfit(labels: Counter[Label], filled: Counter[Label], target: Mapping[Label, float]) -> float:
    """Growth of the squared distance to the target, relative to the target's size, summed over labels."""
    growth = 0.0
    for label, count in labels.items():
        before = filled[label] - target[label]
        growth += ((before + count) ** 2 - before**2) / (target[label] + 1)
    return growth


def save_splits(
    path: Path,
    splits: Mapping[str, Sequence[str]],
    *,
    seed: int,
    group_by: str | None = None,
    join_actions: bool = False,
) -> None:
    """Write a split by id, with what it was made from, so that another run can reuse it."""
    content = {
        "jaxguard_splits": SPLITS_VERSION,
        "seed": seed,
        "group_by": group_by,
        "join_actions": join_actions,
        "sizes": {name: len(ids) for name, ids in splits.items()},
        "splits": {name: list(ids) for name, ids in splits.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1) + "\n")


def load_splits(path: Path, ids: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Read a split back.

    Args:
        path: Written by :func:`save_splits`.
        ids: The ids of the trajectories at hand; where given, they must be exactly those of the split.

    Raises:
        SplitError: The file is no split, an id stands in two parts, or ``ids`` has ids that the split lacks
            or the reverse.
    """
    try:
        content = load_json(path)
    except (OSError, ValueError) as error:
        raise SplitError(f"{path}: {error}, expected a file written by save_splits") from error
    version = content.get("jaxguard_splits") if isinstance(content, dict) else None
    if version != SPLITS_VERSION:
        raise SplitError(f"{path}: jaxguard_splits is {version!r}, expected {SPLITS_VERSION}")
    splits = content.get("splits")
    if not isinstance(splits, dict) or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in splits.values()
    ):
        raise SplitError(f"{path}: splits is no object of id lists")
    part_of: dict[str, str] = {}
    for part, names in splits.items():
        for name in names:
            if name in part_of:
                raise SplitError(f"{path}: the id {name!r} stands in {part_of[name]} and in {part}, expected one part")
            part_of[name] = part
    if ids is not None:
        given = set(ids)
        _refuse(path, sorted(part_of.keys() - given), "are in the split, but not among the trajectories")
        _refuse(path, sorted(given - part_of.keys()), "are among the trajectories, but not in the split")
    return splits


def _refuse(path: Path, names: list[str], complaint: str) -> None:
    if names:
        shown = ", ".join(repr(name) for name in names[:3]) + (", ..." if len(names) > 3 else "")
        raise SplitError(f"{path}: {len(names)} ids ({shown}) {complaint}; was it made from another conversion?")
