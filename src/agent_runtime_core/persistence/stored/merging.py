"""What a model's holder changed, put into what is stored now."""

from __future__ import annotations

import json
from typing import Any


def merged(mine: str, base: str | None, theirs: str | None) -> str:
    """`theirs` with the fields in which `mine` is not as `base`; `mine` where one of them is missing."""
    if base is None or theirs is None:
        return mine
    if mine == base:
        return theirs
    return json.dumps(json.loads(theirs) | changed_fields(mine, base), separators=(",", ":"))


def changed_fields(mine: str, base: str) -> dict[str, Any]:
    """The fields in which `mine` is not as `base`, as they stand in the text."""
    new, old = json.loads(mine), json.loads(base)
    # As texts: 1, 1.0 and True are equal.
    return {name: each for name, each in new.items() if json.dumps(each) != json.dumps(old.get(name))}
