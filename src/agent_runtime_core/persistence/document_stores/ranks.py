"""Assign ranks so that documents get a wanted order, and most of them keep the rank they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def ranks_for(keys: Sequence[str], present: Mapping[str, float]) -> dict[str, float | None]:
    """Return an ascending rank for each key, in the order of `keys`.

    New keys at the end get None: the store assigns a rank after all others.

    Args:
        keys: The keys in the wanted order.
        present: The ranks that documents have now.
    """
    ranked = [key for key in keys if key in present]
    if not ranked:
        return dict.fromkeys(keys)
    span = keys[: keys.index(ranked[-1]) + 1]
    assigned = dict(zip(ranked, sorted(present[key] for key in ranked), strict=True))
    ranks = _interpolated(span, assigned)
    if any(after <= before for before, after in pairwise(ranks)):
        ranks = _spread(len(span), min(assigned.values()), max(assigned.values()))
    return {**dict.fromkeys(keys), **dict(zip(span, ranks, strict=True))}


def _interpolated(span: Sequence[str], assigned: Mapping[str, float]) -> list[float]:
    """Space new ranks evenly between their neighbors. Those before the first one are 1 apart."""
    ranks: list[float] = []
    pending = 0
    for key in span:
        if key not in assigned:
            pending += 1
            continue
        end = assigned[key]
        start = ranks[-1] if ranks else end - pending - 1
        ranks += [start + (end - start) * n / (pending + 1) for n in range(1, pending + 1)]
        ranks.append(end)
        pending = 0
    return ranks


def _spread(count: int, low: float, high: float) -> list[float]:
    """Space all ranks evenly from `low` to `high`, if no number is left between two neighbors."""
    step = (high - low) / max(count - 1, 1)
    if low + step <= low or high - step >= high:
        step = 1.0
    return [low + step * n for n in range(count)]
