"""Ranks that put documents into the order in which somebody wants them, leaving most of them where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise


def ranks_for(keys: Sequence[str], known: Mapping[str, float]) -> dict[str, float | None]:
    """A rank for each key, growing in their order; `known` are those they have.

    New ones at the end have None: they go behind all there are.
    """
    old = [key for key in keys if key in known]
    if not old:
        return dict.fromkeys(keys)
    body = keys[: keys.index(old[-1]) + 1]
    held = dict(zip(old, sorted(known[key] for key in old), strict=True))
    ranks = _between(body, held)
    if any(after <= before for before, after in pairwise(ranks)):
        ranks = _spread(len(body), min(held.values()), max(held.values()))
    return {**dict.fromkeys(keys), **dict(zip(body, ranks, strict=True))}


def _between(body: Sequence[str], held: Mapping[str, float]) -> list[float]:
    """New ones lie evenly between their neighbours; those before the first, a whole step apart."""
    ranks: list[float] = []
    new = 0
    for key in body:
        if key not in held:
            new += 1
            continue
        end = held[key]
        start = ranks[-1] if ranks else end - new - 1
        ranks += [start + (end - start) * n / (new + 1) for n in range(1, new + 1)]
        ranks.append(end)
        new = 0
    return ranks


def _spread(count: int, low: float, high: float) -> list[float]:
    """Evenly from one to the other, where there is room no longer."""
    step = (high - low) / max(count - 1, 1)
    if low + step <= low or high - step >= high:
        step = 1.0
    return [low + step * n for n in range(count)]
