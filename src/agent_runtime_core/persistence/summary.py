"""What many values come to."""

from __future__ import annotations

import math
from collections.abc import Sequence


def summary(values: Sequence[float]) -> dict[str, float]:
    """count, min, max, avg, sum, p50, p95 and p99; of no values all are 0.

    A percentile lies between the two values closest to it in rank, in proportion (as NumPy's default does).
    """
    ordered = sorted(map(float, values))
    if not ordered:
        return dict.fromkeys(("count", "min", "max", "avg", "sum", "p50", "p95", "p99"), 0)
    try:
        total = math.fsum(ordered)
    except OverflowError:  # past the largest float
        total = sum(ordered)
    return {
        "count": len(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "avg": min(max(math.fsum(each / len(ordered) for each in ordered), ordered[0]), ordered[-1]),
        "sum": total,
        "p50": percentile(ordered, 0.50),
        "p95": percentile(ordered, 0.95),
        "p99": percentile(ordered, 0.99),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which that share of the sorted values lies."""
    place = (len(ordered) - 1) * share
    below = math.floor(place)
    part = place - below
    if not part:
        return ordered[below]
    return ordered[below] * (1 - part) + ordered[below + 1] * part
