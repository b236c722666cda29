"""A seeded sample of trajectories that keeps the shares of strata."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence

from jaxguard.types import JaxguardError, Trajectory


def risk_type_and_label(trajectory: Trajectory) -> tuple[str, bool | None]:
    """The stratum of a trajectory by ``metadata["risk_type"]`` and label."""
    return str(trajectory.metadata.get("risk_type") or ""), trajectory.unsafe


def stratified(
    trajectories: Sequence[Trajectory],
    count: int,
    seed: int,
    stratum: Callable[[Trajectory], Hashable] = risk_type_and_label,
) -> list[Trajectory]:
    """``count`` of the trajectories (all, if there are no more), in their order.

    Strata get their share by largest remainder; which members, the seed and their ids decide, not their order.

    Raises:
        JaxguardError: ``count`` is negative.
    """
    if count < 0:
        raise JaxguardError(f"sample: got {count} trajectories, expected 0 or more")
    if count >= len(trajectories):
        return list(trajectories)
    strata: dict[Hashable, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=lambda t: _rank(seed, t)):
        strata.setdefault(stratum(trajectory), []).append(trajectory)
    whole, rest = {}, {}
    for name, members in strata.items():
        whole[name], rest[name] = divmod(count * len(members), len(trajectories))
    for name in sorted(rest, key=lambda name: (-rest[name], repr(name)))[: count - sum(whole.values())]:
        whole[name] += 1
    chosen = {t.id for name, members in strata.items() for t in members[: whole[name]]}
    return [trajectory for trajectory in trajectories if trajectory.id in chosen]


def _rank(seed: int, trajectory: Trajectory) -> bytes:
    return hashlib.sha256(f"{seed}\0{trajectory.id}".encode("utf-8", "replace")).digest()
