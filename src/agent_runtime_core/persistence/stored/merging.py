"""What a model's holder changed, put into what is stored now; and marks that tell writers of the same text apart."""

from __future__ import annotations

import json

from ..models import new_id

_STAMP = ',"write":"'
_CUT = -(len(_STAMP) + 34)


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
