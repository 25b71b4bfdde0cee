"""What a model was like when it was read, so that saving it writes what its holder changed and nothing else."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from ..models import new_id

_SEEN = "_agent_runtime_core_seen"
_STAMP = ',"write":"'
_CUT = -(len(_STAMP) + 34)


class Seen(NamedTuple):
    """The text of a model as its holder last read or saved it there; for a list also the keys of its parts."""

    place: str
    text: str
    parts: tuple[str, ...] = ()


def remember(model: Any, place: str, text: str, parts: tuple[str, ...] = ()) -> None:
    # In the instance and not beside it: copies keep it, and it goes with them.
    vars(model)[_SEEN] = Seen(place, text, parts)


def seen(model: Any, place: str) -> Seen | None:
    """None for a model that was built by hand, or read elsewhere."""
    found: Seen | None = vars(model).get(_SEEN)
    return found if found is not None and found.place == place else None


def merged(mine: str, base: str | None, theirs: str | None) -> str:
    """`theirs` with the fields in which `mine` is not as `base`; `mine` where one of them is missing."""
    if base is None or theirs is None:
        return mine
    if mine == base:
        return bare(theirs)
    new, old = json.loads(mine), json.loads(base)
    # As texts: 1, 1.0 and True are equal.
    changed = {name: each for name, each in new.items() if json.dumps(each) != json.dumps(old.get(name))}
    return json.dumps(json.loads(bare(theirs)) | changed, separators=(",", ":"))


def stamped(text: str) -> str:
    """The text with a mark of its own: two writers of the same change must not take each other's for theirs."""
    return f'{bare(text)[:-1]}{_STAMP}{new_id().hex}"}}'


def bare(text: str) -> str:
    """The text without that mark."""
    return f"{text[:_CUT]}}}" if text[_CUT:].startswith(_STAMP) else text
