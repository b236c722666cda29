"""What every tau does to every row, counted in one compiled call (Safety Sentry, section 4.3).

A row executes at the taus up to its q, so that it is enough to find q's place among the sorted taus, to count rows by
place and label, and to sum from the top: O((N + T) log T) instead of N times T comparisons. In float64, because q is
compared with tau for equality too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from jaxguard.decision.routing import RoutingError, check_labels, check_taus, shares
from jaxguard.types import Route

_CLASSES = len(Route)
_LEAST = 1_024  # rows and taus of a compilation: fewer take no less time


def sweep(logits: ArrayLike, labels: ArrayLike, taus: ArrayLike) -> NDArray[np.int64]:
    """Confusion matrices ``[T, 3, 3]`` (tau, label, route) of N rows at T taus, in the order of ``taus``.

    Rows and taus are padded to powers of two, so that subsets of about one size share a compilation.

    Args:
        logits: ``[N, 3]``; rows that are not finite are routed to ASK.
        labels: ``[N]`` values of :class:`~jaxguard.types.Route`.
        taus: ``[T]`` in [0, 1], in any order.

    Raises:
        RoutingError: Shapes disagree, or a label or a tau is outside its range.
    """
    found = shares(logits)
    own = check_labels(labels, len(found))
    at = check_taus(taus)
    if at.ndim != 1:
        raise RoutingError(f"taus: got shape {at.shape}, expected [T]")
    q = np.full(_padded(len(found)), -np.inf)  # below every tau: never executes
    q[: len(found)] = np.where(found.movable, found.q, -np.inf)
    padded = np.zeros(len(q), np.int64)
    padded[: len(found)] = own
    every = np.ones(_padded(len(at)))
    every[: len(at)] = at
    refused = np.bincount(own[found.refused], minlength=_CLASSES)
    with jax.enable_x64(True):
        counts = _confusions(q, padded, np.bincount(own, minlength=_CLASSES), refused, every)
    return np.asarray(counts)[: len(at)]


def _padded(n: int) -> int:
    return max(_LEAST, 1 << max(n - 1, 0).bit_length())


@jax.jit
def _confusions(q: jax.Array, labels: jax.Array, totals: jax.Array, refused: jax.Array, taus: jax.Array) -> jax.Array:
    """``[T, 3, 3]`` from q ``[N]``, labels ``[N]``, rows and refused rows by label ``[3]``, and taus ``[T]``."""
    order = jnp.argsort(taus)
    reached = jnp.searchsorted(taus[order], q, side="right")  # as many of the sorted taus are <= q
    counts = jnp.zeros((len(taus) + 1, _CLASSES), jnp.int64).at[reached, labels].add(1)
    above = counts.sum(axis=0) - jnp.cumsum(counts, axis=0)[:-1]
    executed = jnp.zeros_like(above).at[order].set(above)
    asked = totals - refused - executed
    return jnp.stack([executed, asked, jnp.broadcast_to(refused, executed.shape)], axis=-1)
