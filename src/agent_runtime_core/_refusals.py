"""Refusing a value: where in it, why, and what to do instead."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable, Iterator
from typing import Final, TypeGuard
from uuid import UUID

from .errors import UnserialisableResult

MAX_DEPTH: Final = 100

_PASSWORD = r"(?i:(?<=password=)|(?<=passwd=))[^&#]*"
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
_IN_TEXT = re.compile(rf"(?<=://)[^/].*(?=@)|{_PASSWORD}")
# Where the part with the host begins, also where somebody forgot the scheme.
_START = r"(?:(?<=://)|^(?![A-Za-z+]*://))"
# What stands before the last @, and passwords among the options.
_SECRETS = re.compile(rf"{_START}[^/].*(?=@)|{_PASSWORD}", re.DOTALL)
# No @, and after the colon no port: somebody forgot the host, and this is the password.
_NO_PORT = re.compile(rf"{_START}[^/?#@\[\]]*:(?!//|[0-9]{{0,5}}(?:[/?#]|$))[^@]*$", re.DOTALL)


class At:
    """One level of a walk: the container, the one above it, and the step being taken inside."""

    __slots__ = ("depth", "held", "parent", "step")

    def __init__(self, parent: At | None, held: object) -> None:
        self.parent, self.held = parent, held
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.step: object = None


def _levels(at: At | None) -> list[At]:
    levels = []
    while at is not None:
        levels.append(at)
        at = at.parent
    return levels[::-1]


def _path(at: At | None) -> str:
    text, levels = "$", _levels(at)
    for level in levels[:12]:
        step = level.step
        if isinstance(step, int):
            text += f"[{step}]"
        elif isinstance(step, str):
            text += f".{step}" if step.isidentifier() and len(step) <= 60 else f"[{short(step)}]"
        else:
            text += "[*]"  # a set has no positions
    return text if len(levels) <= 12 else text + "…"


def refused(at: At | None, reason: str) -> UnserialisableResult:
    return UnserialisableResult(_path(at), reason)


def inside(at: At | None, held: object) -> At:
    """One level deeper, into the container `held`; refused beyond MAX_DEPTH, which is where a cycle ends up."""
    here = At(at, held)
    if here.depth <= MAX_DEPTH:
        return here
    levels = _levels(here)
    seen: dict[int, At] = {}
    for level in levels:
        first = level if level.held is None else seen.setdefault(id(level.held), level)
        if first is not level:
            raise refused(level.parent, f"a cycle, back to {_path(first.parent)}: return a copy without the way back")
    raise refused(at, f"nested deeper than {MAX_DEPTH} levels: return a flatter value")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is an int or a float that clocks and loops can count with; an int may be larger than any float."""
    return (
        isinstance(value, (int, float))
        and type(value) is not bool
        and (isinstance(value, float) or value.bit_length() < 1024)
    )


def short(value: object) -> str:
    if type(value) is int and value.bit_length() > 63:
        return "<int>"
    if type(value) is str:
        value = value[:61]
    # Not every repr is short, or safe to call.
    safe = value is None or type(value) in (str, int, float, bool, UUID)
    text = ascii(value) if safe else f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..." + text[0]


def a_kind(kind: type) -> str:
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def meant(name: object, known: Iterable[str]) -> str:
    """Of a name that is none of these: the one it is much like, or else which there are."""
    names = sorted(known)
    # Cut off: what is compared takes time in the square of its length.
    near = difflib.get_close_matches(str(name)[:100], names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def redacted_url(url: str) -> str:
    """`url` with *** for what is, or may be, a secret in it; any text that is meant as one will do."""
    return _NO_PORT.sub("***", _SECRETS.sub("***", url))


def redacted(text: str) -> str:
    """A text with *** for the secrets of a URL that it is, or that stands in it."""
    return redacted_url(text) if _URL.match(text) else _IN_TEXT.sub("***", text)


def foreign(value: object) -> str:
    """Why this has no form here, and what to do about it."""
    kind = type(value)
    name = kind.__name__
    if isinstance(value, type):
        return f"the class {value.__name__} has no JSON form here: return its name"
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value):
        out = f"annotate the return type, pass returns={name}, or register_type({name})"
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        out = "return value._asdict() or tuple(value)"
    elif isinstance(value, bytearray | memoryview):
        out = "return bytes(value)"
    elif isinstance(value, collections.abc.Awaitable):
        out = "await it and return what it gives"
    elif isinstance(value, Iterator | range | collections.abc.KeysView | collections.abc.ValuesView):
        out = "return list(value)"
    else:
        for base in (str, int, float, bytes, dict, list, tuple, set, frozenset):
            if isinstance(value, base):
                return f"{a_kind(kind)} would come back as {a_kind(base)}: return {base.__name__}(value)"
        out = f"return a dict, or make {name} a dataclass"
    return f"{a_kind(kind)} has no JSON form here: {out}"
