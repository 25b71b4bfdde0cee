"""Where documents of a group lie so that they are in a given order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ..documents.base import Document


def ranks(keys: Sequence[str], there: Mapping[str, Document]) -> dict[str, float | None]:
    """Ranks for documents in that order, new ones among them; None where the store finds the right one.

    Those of the group that `keys` does not name lie behind them if any has to be moved, and are named then too.
    """
    known = [there[key].rank for key in keys if key in there]
    new = [key not in there for key in keys]
    in_order = all(one < other for one, other in itertools.pairwise(known))
    if in_order and new == sorted(new):
        return dict.fromkeys(keys)
    others = [key for key in there if key not in set(keys)]
    return {key: float(number) for number, key in enumerate([*keys, *others], 1)}
