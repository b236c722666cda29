"""How sure the error rates of a router are: exact bounds, and a tau that keeps a limit with a stated confidence.

Bounds are those of Clopper and Pearson for a rate counted on rows that chose nothing (held out). The certified tau is
Learn then Test with a fixed sequence: starting at tau = 1 and going down through *every* tau, "UAR(tau) > limit" is
tested with the binomial tail P(Bin(n, limit) <= errors at tau) <= delta, and the last tau that passes is taken. The
sequence is fixed before any row is seen and stops at its first failure, so that no correction is due; as UAR falls
with tau, all taus above the chosen one keep the limit too.

Both count rows as independent. Rows of one trajectory are not: give one row of each for an exact statement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from jaxguard.decision.routing import RoutingError, check_labels, shares
from jaxguard.decision.routing_points import boundary, check_share


class CannotCertify(RoutingError):
    """No tau keeps the limit with that confidence on these rows; the message names what is missing."""


@dataclass(frozen=True, slots=True)
class Certified:
    """The lowest tau whose UAR is at most ``limit`` with probability 1 - ``delta`` over the rows it was chosen on.

    Attributes:
        tau: The threshold: the middle of (low, high], in which no row changes sides.
        low: Taus up to this one fail the test.
        high: The q above ``low`` that follows, or 1.
        limit: On UAR.
        delta: Probability that the true UAR is above it all the same.
        asks: ASK rows.
        errors: ASK rows that execute at ``tau``.
        allowed: The most that pass the test.
    """

    tau: float
    low: float
    high: float
    limit: float
    delta: float
    asks: int
    errors: int
    allowed: int


def upper_bound(errors: int, n: int, delta: float = 0.05) -> float:
    """One-sided bound that a rate of ``errors`` in ``n`` rows is below with confidence 1 - delta (Clopper-Pearson).

    Raises:
        RoutingError: No rows, a count outside 0..n, or a delta outside (0, 1).
    """
    return _exact(errors, n, delta, "less")


def lower_bound(successes: int, n: int, delta: float = 0.05) -> float:
    """One-sided bound that a rate is above with confidence 1 - delta; else as :func:`upper_bound`."""
    return _exact(successes, n, delta, "greater")


def _exact(count: int, n: int, delta: float, side: str) -> float:
    check_share("delta", delta)
    if n < 1 or not 0 <= count <= n:
        raise RoutingError(f"count: got {count} of {n} rows, expected at least one row and a count from 0 to as many")
    from scipy import stats  # takes longer to import than all that routing needs

    ends = stats.binomtest(int(count), int(n), alternative=side).proportion_ci(1.0 - delta, method="exact")
    return float(ends.high if side == "less" else ends.low)


def needed_rows(limit: float, delta: float) -> int:
    """ASK rows from which on a limit can be certified if none of them executes: (1 - limit)^n <= delta.

    Raises:
        RoutingError: A limit or a delta outside (0, 1).
    """
    check_share("limit", limit)
    check_share("delta", delta)
    from scipy import stats

    n = max(math.ceil(math.log(delta) / math.log1p(-limit)) - 1, 1)
    while stats.binom.cdf(0, n, limit) > delta:  # rounding of the quotient
        n += max(1, n // 10**15)
    return n


def _allowed(n: int, limit: float, delta: float) -> int:
    """The most errors in n rows with P(Bin(n, limit) <= errors) <= delta; -1 where even none is too many."""
    from scipy import stats

    return int(np.count_nonzero(stats.binom.cdf(np.arange(n + 1), n, limit) <= delta)) - 1


def certified_tau(logits: ArrayLike, labels: ArrayLike, *, limit: float = 0.05, delta: float = 0.05) -> Certified:
    """The lowest tau whose UAR is at most ``limit`` with confidence 1 - delta, by the test of the module.

    Args:
        logits: ``[N, 3]``; rows that were not trained on.
        labels: ``[N]`` values of :class:`~jaxguard.types.Route`; ASK rows count, refused ones among them as no error.
        limit: Largest UAR, in (0, 1).
        delta: Probability of being wrong, in (0, 1).

    Raises:
        CannotCertify: Too few ASK rows even without an error, with the number it takes; or too many of them execute
            at every tau.
        RoutingError: Shapes, labels, limit or delta are not what they should be.
    """
    needed = needed_rows(limit, delta)
    found = shares(logits)
    edges = boundary(found, check_labels(labels, len(found)))
    if edges.asks < needed:
        raise CannotCertify(
            f"got {edges.asks} ASK rows, expected at least {needed} for UAR <= {limit:g} with "
            f"confidence {1 - delta:g}, even if none of them executes"
        )
    allowed = _allowed(edges.asks, limit, delta)
    passed = np.flatnonzero(edges.under <= allowed)
    if not len(passed):
        raise CannotCertify(
            f"{edges.under.min()} of {edges.asks} ASK rows execute at every tau, expected at most "
            f"{allowed} for UAR <= {limit:g} with confidence {1 - delta:g}"
        )
    first = int(passed[0])
    return Certified(
        tau=edges.middle(first),
        low=float(edges.low[first]),
        high=float(edges.high[first]),
        limit=limit,
        delta=delta,
        asks=edges.asks,
        errors=int(edges.under[first]),
        allowed=allowed,
    )
