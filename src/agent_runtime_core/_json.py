"""Exact JSON text of values: what comes back equals what went in, type for type, or the writing is refused."""

from __future__ import annotations

import binascii
import collections.abc
import dataclasses
import datetime as _dt
import enum
import functools
import hashlib
import inspect
import json
import json.encoder
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from .errors import InvalidArgument, UnserialisableResult

# A value that JSON lacks is written {"$": tag, "v": form}; the tag of a registered type is its `module.qualname`,
# which has a dot, and the tags below have none. A dict of the user's that holds "$" is itself written with a tag.
TAG: Final = "$"
MAX_BYTES: Final = 1024 * 1024
MAX_DEPTH: Final = 100
MAX_DIGITS: Final = 4300
# Arguments may be larger than a result: only their digest is kept.
_DIGEST_BYTES: Final = 8 * MAX_BYTES

_INT_END: Final = 10**MAX_DIGITS
_WORD: Final = 2**63
_quote: Final = json.encoder.encode_basestring_ascii
_BARE: Final = frozenset({bool, float, type(None)})
_LOOK: Final = -(2**62)
_ABSENT: Final = object()
_C = TypeVar("_C", bound=type)


class _At:
    """One level of a walk: the container, the one above it, and the step being taken inside."""

    __slots__ = ("depth", "held", "parent", "step")

    def __init__(self, parent: _At | None, held: object) -> None:
        self.parent, self.held = parent, held
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.step: object = None


def _levels(at: _At | None) -> list[_At]:
    levels = []
    while at is not None:
        levels.append(at)
        at = at.parent
    return levels[::-1]


def _path(at: _At | None) -> str:
    text, levels = "$", _levels(at)
    for level in levels[:12]:
        step = level.step
        if isinstance(step, int):
            text += f"[{step}]"
        elif isinstance(step, str):
            text += f".{step}" if step.isidentifier() and len(step) <= 60 else f"[{_short(step)}]"
        else:
            text += "[*]"  # a set has no positions
    return text if len(levels) <= 12 else text + "…"


def _short(value: object) -> str:
    if type(value) is str:
        value = value[:61]
    elif type(value) is int and not -_WORD < value < _WORD:
        return "<int>"
    # Not every repr is short, or safe to call.
    text = (
        ascii(value) if value is None or type(value) in (str, int, float, bool, UUID) else f"<{type(value).__name__}>"
    )
    return text if len(text) <= 60 else text[:57] + "..." + text[0]


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def _refused(at: _At | None, reason: str) -> UnserialisableResult:
    return UnserialisableResult(_path(at), reason)


def _inside(at: _At | None, held: object) -> _At:
    here = _At(at, held)
    if here.depth <= MAX_DEPTH:
        return here
    levels = _levels(here)
    seen: dict[int, _At] = {}
    for level in levels:
        first = level if level.held is None else seen.setdefault(id(level.held), level)
        if first is not level:
            raise _refused(level.parent, f"a cycle, back to {_path(first.parent)}: return a copy without the way back")
    raise _refused(at, f"nested deeper than {MAX_DEPTH} levels: return a flatter value")


def _foreign(value: object) -> str:
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
                return f"{_a(kind)} would come back as {_a(base)}: return {base.__name__}(value)"
        out = f"return a dict, or register_type({name})"
    return f"{_a(kind)} has no JSON form here: {out}"


class _Registry:
    """The types that register_type named, by class and by name; the one of this process is REGISTRY."""

    def __init__(self) -> None:
        self.names: dict[type, str] = {}
        self.classes: dict[str, type] = {}

    def add(self, cls: type, name: str) -> None:
        known = self.classes.setdefault(name, cls)
        if known is not cls:
            raise InvalidArgument(f"another class named {name} is registered: give one of the two another name")
        self.names[cls] = name


REGISTRY: Final = _Registry()


def register_type(cls: _C) -> _C:
    """Lets a dataclass or an Enum be a result wherever it stands, known by `module.qualname`; also a decorator.

    Raises InvalidArgument for anything else, and for another class of a name that is taken. A process that reads such
    a result must have registered the class as well: nothing is ever imported by name.
    """
    given: object = cls
    if not isinstance(given, type) or not (dataclasses.is_dataclass(given) or issubclass(given, enum.Enum)):
        raise InvalidArgument(f"register_type takes a dataclass or an Enum class, not {given!r}")
    if dataclasses.is_dataclass(given):
        _constructible(given)
    REGISTRY.add(given, f"{given.__module__}.{given.__qualname__}")
    return cls


def _constructible(cls: type) -> None:
    if issubclass(cls, str | int | float | bytes | dict | list | tuple | set | frozenset):
        raise InvalidArgument(f"{cls.__name__} holds more than its fields: let it hold the builtin value in a field")
    # dataclasses.fields() leaves InitVar out, and their values are gone once __init__ has run.
    for field in getattr(cls, "__dataclass_fields__", {}).values():
        kind = getattr(field, "_field_type", None)
        bare = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if bare and getattr(kind, "name", "") == "_FIELD_INITVAR":
            raise InvalidArgument(f"{cls.__name__}.{field.name} is an InitVar, which is not kept: give it a default")


def _no_foreign(value: object) -> object:
    # Only a tree that another thread changes while it is written gets here.
    raise TypeError(_foreign(value))


def _writer(sort_keys: bool) -> Callable[[object, int], Iterable[str]]:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        slow = json.JSONEncoder(allow_nan=False, separators=(",", ":"), sort_keys=sort_keys, default=_no_foreign)
        return lambda value, _: slow.iterencode(value)
    # JSONEncoder.encode() builds one of these per call, which costs as much as a small result.
    write: Callable[[object, int], Iterable[str]]
    write = make(None, _no_foreign, _quote, None, ":", ",", sort_keys, False, False)
    return write


_write: Final = _writer(sort_keys=False)
_write_sorted: Final = _writer(sort_keys=True)


def encode(value: object, *, max_bytes: int = MAX_BYTES) -> str:
    """ASCII JSON text of a tree of None, bool, int, float, str, list and dict, and of UUID, datetime, date, time,
    timedelta, Decimal, bytes, tuple, set, frozenset and registered types inside it.

    Raises UnserialisableResult, with the path, for every value that would not come back as it is.
    """
    return _text(value, max_bytes, _write)


def _text(value: object, max_bytes: int, write: Callable[[object, int], Iterable[str]]) -> str:
    left = _left(value, MAX_DEPTH, max_bytes)
    text = None
    if left >= 0:
        try:
            text = "".join(write(value, 0))
        except (TypeError, ValueError):
            text = None  # NaN, an infinity, or a change by another thread; the pass below finds where
    elif left != _LOOK:
        raise _oversize(max_bytes)
    if text is None:
        tree = _Tagging(max_bytes).of(value, None)
        try:
            text = "".join(write(tree, 0))
        except ValueError as error:  # sys.set_int_max_str_digits() was lowered
            raise UnserialisableResult("$", str(error)) from error
    if len(text) > max_bytes:
        raise _oversize(max_bytes)
    return text


def _oversize(max_bytes: int) -> UnserialisableResult:
    return UnserialisableResult("$", f"larger than {max_bytes:,} bytes as JSON: store it elsewhere, return where it is")


def _left(value: Any, depth: int, budget: int) -> int:
    """What a plain tree leaves of the budget at most; _LOOK for a tree that the tagging pass must look at."""
    kind = type(value)
    items: Iterable[Any]
    if kind is dict:
        if depth == 0 or TAG in value:
            return _LOOK
        budget -= 5 * len(value)
        if budget < 0:
            return budget
        for key in value:
            if type(key) is not str:
                return _LOOK
            budget -= len(key)
        items = value.values()
    elif kind is list:
        if depth == 0:
            return _LOOK
        budget -= 2 * len(value)
        if budget < 0:
            return budget
        items = value
    elif kind is str:
        return budget - len(value)
    elif kind in _BARE or (kind is int and -_WORD < value < _WORD):
        return budget
    else:
        return _LOOK
    for item in items:
        kind = type(item)
        if kind is str:
            budget -= len(item)
        elif kind is int:
            if not -_WORD < item < _WORD:
                return _LOOK
        elif kind is dict or kind is list:
            if item or depth == 1:
                budget = _left(item, depth - 1, budget)
                if budget < 0:
                    return budget
        elif kind not in _BARE:
            return _LOOK
    return budget


class _Tagging:
    """The slow pass: a JSON tree in which all that JSON lacks is tagged, or the reason why there is none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = self.left = max_bytes

    def spend(self, size: int) -> None:
        # A lower bound of the text, so that a bomb of shared parts ends early; encode() measures the text itself.
        self.left -= size
        if self.left < 0:
            raise _oversize(self.max_bytes)

    def of(self, value: Any, at: _At | None) -> object:
        kind = type(value)
        if kind is str:
            self.spend(len(value))
            return value
        if value is None or kind is bool:
            return value
        if kind is int:
            if not -_INT_END < value < _INT_END:
                raise _refused(at, f"an int of more than {MAX_DIGITS:,} digits: return it as hex(value)")
            self.spend(max(value.bit_length() - 1, 0) * 3 // 10)
            return value
        if kind is float:
            if value - value != 0.0:
                raise _refused(at, f"{value!r} has no JSON form: return None or a string in its place")
            return value
        if kind is dict:
            tree = self.dict_of(value, _inside(at, value))
            return {TAG: "dict", "v": tree} if TAG in tree else tree
        if kind is list:
            return self.items(value, _inside(at, value))
        tagging = _TAGGING.get(kind)
        if tagging is not None:
            tag, form = tagging
            return {TAG: tag, "v": form(self, value, at)}
        name = REGISTRY.names.get(kind)
        if name is None:
            raise _refused(at, _foreign(value))
        plain = _form(kind).plain(value, at)
        if type(plain) is dict:
            return {TAG: name, "v": self.dict_of(plain, _inside(at, value))}
        return {TAG: name, "v": plain}

    def dict_of(self, value: dict[Any, Any], here: _At) -> dict[str, object]:
        self.spend(5 * len(value))
        tree: dict[str, object] = {}
        for key, item in value.items():
            if type(key) is not str:
                reason = f"the key {_short(key)} is {_a(type(key))}: JSON keys are str, so write them as str yourself"
                raise _refused(here.parent, reason)
            self.spend(len(key))
            here.step = key
            tree[key] = self.of(item, here)
        return tree

    def items(self, value: Iterable[Any], here: _At) -> list[object]:
        self.spend(2 * len(value))  # type: ignore[arg-type]
        tree = []
        for here.step, item in enumerate(value):
            tree.append(self.of(item, here))
        return tree

    def of_tuple(self, value: Any, at: _At | None) -> object:
        return self.items(value, _inside(at, value))

    def of_set(self, value: Any, at: _At | None) -> object:
        here = _inside(at, value)
        here.step = None
        self.spend(2 * len(value))
        tree = [self.of(item, here) for item in value]
        # The order of a set changes with the hash seed; that of the texts does not.
        return sorted(tree, key=_tree_text)

    def of_moment(self, value: Any, at: _At | None) -> object:
        # ISO text where it says all; else [text, fold, zone], for it has neither the fold nor the name of a zone.
        zone = value.tzinfo
        self.spend(8)
        if zone is None:
            return [value.isoformat(), 1, None] if value.fold else value.isoformat()
        bare = value.replace(tzinfo=None).isoformat()
        if type(zone) is ZoneInfo and zone.key is not None:
            return [bare, value.fold, zone.key]
        if type(zone) is not _dt.timezone:
            out = "use zoneinfo.ZoneInfo(name), or return value.astimezone(datetime.UTC)"
            raise _refused(at, f"a time zone that is {_a(type(zone))} has no JSON form: {out}")
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        # fromisoformat() reads an offset below one second as none.
        if not name and not value.fold and not offset.microseconds:
            return value.isoformat()
        return [bare, value.fold, [self.of_delta(offset, at), *(self.of(part, at) for part in name)]]

    def of_delta(self, value: Any, at: _At | None) -> list[int]:
        return [value.days, value.seconds, value.microseconds]

    def of_decimal(self, value: Any, at: _At | None) -> object:
        if not value.is_finite():
            raise _refused(at, f"{value!r} has no JSON form: return None or a string in its place")
        return self.of(str(value), at)

    def of_bytes(self, value: Any, at: _At | None) -> object:
        self.spend(len(value) * 4 // 3)
        return binascii.b2a_base64(value, newline=False).decode("ascii")

    def of_text(self, value: Any, at: _At | None) -> object:
        self.spend(8)
        return str(value)


def _tree_text(tree: object) -> str:
    return "".join(_write(tree, 0))


_TAGGING: Final[dict[type, tuple[str, Callable[[_Tagging, Any, _At | None], object]]]] = {
    UUID: ("uuid", _Tagging.of_text),
    _dt.datetime: ("datetime", _Tagging.of_moment),
    _dt.date: ("date", _Tagging.of_text),
    _dt.time: ("time", _Tagging.of_moment),
    _dt.timedelta: ("timedelta", _Tagging.of_delta),
    Decimal: ("decimal", _Tagging.of_decimal),
    bytes: ("bytes", _Tagging.of_bytes),
    tuple: ("tuple", _Tagging.of_tuple),
    set: ("set", _Tagging.of_set),
    frozenset: ("frozenset", _Tagging.of_set),
}


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


_START: Final = json.decoder.WHITESPACE.match  # type: ignore[attr-defined]
# Called directly: the method around it looks for space twice.
_SCAN: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite).scan_once  # type: ignore[attr-defined]


def decode(text: str) -> object:
    """The value that encode() wrote.

    Raises UnserialisableResult for text that is no JSON, and for a type that this process has not registered.
    """
    try:
        value, end = _SCAN(text, _START(text, 0).end())
        if end != len(text) and text[end:].strip():
            raise ValueError(f"there is more after character {end}")
        # One character is found many times faster than three.
        return _revived(value, None) if "$" in text and '"$"' in text else value
    except RecursionError as error:
        raise UnserialisableResult("$", "nested too deeply to be read here") from error
    except UnserialisableResult:
        raise
    except (ValueError, StopIteration) as error:
        raise UnserialisableResult("$", f"the text is not what was written: {error}") from error


def _revived(value: Any, at: _At | None) -> Any:
    """The tree with its tags replaced, in place where it can be."""
    if type(value) is list:
        here = _At(at, None)
        for index, item in enumerate(value):
            if type(item) is dict or type(item) is list:
                here.step = index
                value[index] = _revived(item, here)
        return value
    if type(value) is not dict:
        return value
    tag = value.get(TAG, _ABSENT)
    if tag is _ABSENT:
        return _revived_items(value, at)
    if type(tag) is not str or len(value) != 2 or "v" not in value:
        raise _refused(at, f'the text is not what was written: a "{TAG}" that is no tag')
    form = value["v"]
    if tag == "dict" and type(form) is dict:
        return _revived_items(form, at)
    cls = REGISTRY.classes.get(tag)
    if cls is not None:
        form = _revived_items(form, at) if type(form) is dict else form
        return _form(cls).convert(form, at)
    revive = _REVIVE.get(tag)
    if revive is None:
        way = f"register_type({tag.rsplit('.', 1)[-1]}) before reading it"
        out = way if "." in tag else "a later version wrote it"
        raise _refused(at, f"the type {_short(tag)} is not known in this process: {out}")
    try:
        return revive(_revived(form, at))
    except (TypeError, ValueError, ArithmeticError, LookupError, OSError) as error:
        if isinstance(error, UnserialisableResult):
            raise
        raise _refused(at, f"the {tag} here cannot be read: {type(error).__name__}: {error}") from error


def _revived_items(value: dict[str, Any], at: _At | None) -> dict[str, Any]:
    here = _At(at, None)
    for key, item in value.items():
        if type(item) is dict or type(item) is list:
            here.step = key
            value[key] = _revived(item, here)
    return value


def _strict(kind: type, form: Any) -> Any:
    if type(form) is not kind:
        raise TypeError(f"expected {_a(kind)}, found {_a(type(form))}")
    return form


def _revive_moment(kind: type[_dt.datetime] | type[_dt.time], form: Any) -> object:
    if type(form) is str:
        return kind.fromisoformat(form)
    text, fold, zone = _strict(list, form)
    tzinfo: _dt.tzinfo | None = None
    if type(zone) is str:
        tzinfo = ZoneInfo(zone)
    elif zone is not None:
        offset, *name = _strict(list, zone)
        tzinfo = _dt.timezone(_dt.timedelta(*offset), *name)
    return kind.fromisoformat(text).replace(tzinfo=tzinfo, fold=fold)


def _revive_decimal(form: Any) -> Decimal:
    number = Decimal(_strict(str, form))
    if not number.is_finite():
        raise ValueError(f"{number} is not finite")
    return number


_REVIVE: Final[dict[str, Callable[[Any], object]]] = {
    "uuid": lambda form: UUID(_strict(str, form)),
    "datetime": functools.partial(_revive_moment, _dt.datetime),
    "date": lambda form: _dt.date.fromisoformat(_strict(str, form)),
    "time": functools.partial(_revive_moment, _dt.time),
    "timedelta": lambda form: _dt.timedelta(*_strict(list, form)),
    "decimal": _revive_decimal,
    "bytes": lambda form: binascii.a2b_base64(_strict(str, form), strict_mode=True),
    "tuple": lambda form: tuple(_strict(list, form)),
    "set": lambda form: set(_strict(list, form)),
    "frozenset": lambda form: frozenset(_strict(list, form)),
}


_Turn = Callable[[Any, _At | None], Any]


class _Form(Protocol):
    """What an annotation adds to encode() and decode(): both directions, one the inverse of the other.

    A form under a union of several is `strict`: it raises on all that is not of its type, so that one form is left.
    Both directions return the value itself where nothing changes. `shapes` says that encode() alone would not do.
    """

    shapes: bool

    def plain(self, value: Any, at: _At | None) -> Any: ...

    def convert(self, value: Any, at: _At | None) -> Any: ...


def _misfit(at: _At | None, said: str, value: object) -> UnserialisableResult:
    return _refused(at, f"the annotation says {said}, this is {_a(type(value))}: make the two agree")


class _Leaf:
    """Anything: encode() alone decides."""

    shapes = False

    def plain(self, value: Any, at: _At | None) -> Any:
        return value

    convert = plain


_LEAF: Final = _Leaf()


class _Kinds:
    """Under a union: the members that need no form, told by their types."""

    shapes = False

    def __init__(self, kinds: Iterable[type]) -> None:
        self.kinds = frozenset(kinds)

    def plain(self, value: Any, at: _At | None) -> Any:
        if type(value) in self.kinds or (type(value) is int and float in self.kinds):
            return value
        raise _misfit(at, " | ".join(sorted(kind.__name__ for kind in self.kinds)), value)

    convert = plain


class _Items:
    """list and the abstract sequences: lists and tuples stay what they are, item by item."""

    def __init__(self, item: _Form, strict: bool, kinds: frozenset[type]) -> None:
        self.item, self.strict, self.kinds = item, strict, kinds
        self.shapes = item.shapes

    def plain(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, self.item.plain)

    def convert(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, self.item.convert)

    def _each(self, value: Any, at: _At | None, turn: _Turn) -> Any:
        kind = type(value)
        if kind not in self.kinds:
            if self.strict:
                raise _misfit(at, "list", value)
            return value
        here, changed, turned = _inside(at, value), False, []
        for here.step, item in enumerate(value):
            other = turn(item, here)
            changed = changed or other is not item
            turned.append(other)
        return kind(turned) if changed else value


class _Bunch:
    """tuple, set and frozenset, which are lists in plain JSON; so a list in their place is refused."""

    def __init__(self, kind: Any, items: list[_Form], rest: _Form, strict: bool) -> None:
        self.kind, self.items, self.rest, self.strict = kind, items, rest, strict
        self.shapes = rest.shapes or any(item.shapes for item in items)

    def plain(self, value: Any, at: _At | None) -> Any:
        if type(value) is not self.kind:
            if self.strict or type(value) is list:
                raise _misfit(at, self.kind.__name__, value)
            return value
        self._fits(value, at)
        here, turned = _inside(at, value), []
        for index, item in enumerate(value):
            here.step = index if self.kind is tuple else None
            turned.append(self._item(index).plain(item, here))
        if self.kind is tuple:
            return turned
        if all(a is b for a, b in zip(value, turned, strict=True)):
            return value
        return sorted(turned, key=lambda item: _text_at(item, here))

    def convert(self, value: Any, at: _At | None) -> Any:
        if type(value) is not list and type(value) is not self.kind:
            if self.strict:
                raise _misfit(at, self.kind.__name__, value)
            return value
        self._fits(value, at)
        here, turned = _inside(at, value), []
        for index, item in enumerate(value):
            here.step = index
            turned.append(self._item(index).convert(item, here))
        if type(value) is self.kind and all(a is b for a, b in zip(value, turned, strict=True)):
            return value
        try:
            return self.kind(turned)
        except TypeError as error:
            raise _refused(at, f"no {self.kind.__name__} can hold these: {error}") from error

    def _item(self, index: int) -> _Form:
        return self.items[index] if index < len(self.items) else self.rest

    def _fits(self, value: Any, at: _At | None) -> None:
        if self.strict and self.items and len(value) != len(self.items):
            raise _refused(at, f"the annotation says {len(self.items)} items, these are {len(value)}")


def _text_at(value: object, at: _At) -> str:
    try:
        return encode(value)
    except UnserialisableResult as error:
        raise _refused(at, error.reason) from error


class _Dict:
    """dict and the abstract mappings, value by value; their keys are str."""

    def __init__(self, item: _Form, strict: bool) -> None:
        self.item, self.strict = item, strict
        self.shapes = item.shapes

    def plain(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, self.item.plain)

    def convert(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, self.item.convert)

    def _each(self, value: Any, at: _At | None, turn: _Turn) -> Any:
        if type(value) is not dict:
            if self.strict:
                raise _misfit(at, "dict", value)
            return value
        here, changed, turned = _inside(at, value), False, {}
        for key, item in value.items():
            here.step = key
            turned[key] = other = turn(item, here)
            changed = changed or other is not item
        return turned if changed else value


class _Typed:
    """A TypedDict: the keys it names, each by its own annotation."""

    shapes = True

    def __init__(self, cls: Any, strict: bool) -> None:
        self.cls, self.strict = cls, strict

    @functools.cached_property
    def items(self) -> dict[str, _Form]:
        return _forms_of(self.cls, list(self.cls.__annotations__), self.strict)

    def plain(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, "plain")

    def convert(self, value: Any, at: _At | None) -> Any:
        return self._each(value, at, "convert")

    def _each(self, value: Any, at: _At | None, way: typing.Literal["plain", "convert"]) -> Any:
        strays = type(value) is not dict or value.keys() - self.items.keys() or self.cls.__required_keys__ - set(value)
        if self.strict and strays:
            raise _misfit(at, self.cls.__name__, value)
        if type(value) is not dict:
            return value
        here, changed, turned = _inside(at, value), False, {}
        for key, item in value.items():
            here.step = key
            form = self.items.get(key, _LEAF)
            turned[key] = other = form.plain(item, here) if way == "plain" else form.convert(item, here)
            changed = changed or other is not item
        return turned if changed else value


class _Members:
    """An Enum, written by the name of its member; a Flag by its number, for sets of flags have no name."""

    shapes = True

    def __init__(self, cls: type[enum.Enum], strict: bool) -> None:
        self.cls, self.strict = cls, strict

    def plain(self, value: Any, at: _At | None) -> Any:
        if type(value) is self.cls:
            if isinstance(value, enum.Flag):
                return value.value
            if self.cls.__members__.get(value.name) is value:
                return value.name
            raise _refused(at, f"{value!r} is no member of {self.cls.__name__}: return one")
        if type(value) in REGISTRY.names or (value is None and not self.strict):
            return value
        raise _misfit(at, self.cls.__name__, value)

    def convert(self, value: Any, at: _At | None) -> Any:
        if type(value) is self.cls or type(value) in REGISTRY.names or (value is None and not self.strict):
            return value
        if issubclass(self.cls, enum.Flag):
            if type(value) is int:
                try:
                    return self.cls(value)
                except ValueError as error:
                    raise _refused(at, f"{value} has bits that {self.cls.__name__} does not know") from error
        else:
            if type(value) is str and value in self.cls.__members__:
                return self.cls.__members__[value]
            for member in () if self.strict else self.cls:
                if type(member.value) is type(value) and member.value == value:
                    return member
        raise _refused(at, f"{_short(value)} is no member of {self.cls.__name__}: was it renamed or taken out?")


class _Record:
    """A dataclass, written as a dict of its fields and built by its own constructor."""

    shapes = True

    def __init__(self, cls: type, strict: bool) -> None:
        _constructible(cls)
        self.cls, self.strict = cls, strict
        self.fields = {field.name: field for field in dataclasses.fields(cls)}

    @functools.cached_property
    def items(self) -> dict[str, _Form]:
        # On first use: a field may be of the class itself.
        return _forms_of(self.cls, list(self.fields), self.strict)

    def plain(self, value: Any, at: _At | None) -> Any:
        if type(value) is not self.cls:
            if type(value) in REGISTRY.names or (value is None and not self.strict):
                return value
            raise _misfit(at, self.cls.__name__, value)
        here, tree = _inside(at, value), {}
        for name, form in self.items.items():
            item = getattr(value, name, _ABSENT)
            if item is not _ABSENT:
                here.step = name
                tree[name] = form.plain(item, here)
        return tree

    def convert(self, value: Any, at: _At | None) -> Any:
        if type(value) is not dict:
            if type(value) is self.cls or type(value) in REGISTRY.names or (value is None and not self.strict):
                return value
            raise _misfit(at, self.cls.__name__, value)
        if self.strict and value.keys() - self.fields.keys():
            raise _misfit(at, self.cls.__name__, value)
        here, given, arguments = _inside(at, value), {}, {}
        for name, field in self.fields.items():
            here.step = name
            if name in value:
                given[name] = self.items[name].convert(value[name], here)
                if field.init:
                    arguments[name] = given[name]
            elif field.init and field.default is field.default_factory is dataclasses.MISSING:
                raise _refused(at, f"{self.cls.__name__} needs {name!r}, which is not here: give the field a default")
        try:
            record = self.cls(**arguments)
        except Exception as error:  # the constructor is the user's
            raise _refused(at, f"{self.cls.__name__} would not be built: {type(error).__name__}: {error}") from error
        for name, item in given.items():
            # What __post_init__ changes was changed before it was written, and a second time would show.
            if getattr(record, name, _ABSENT) is not item:
                object.__setattr__(record, name, item)
        return record


class _Optional:
    """X or None."""

    def __init__(self, form: _Form) -> None:
        self.form = form
        self.shapes = form.shapes

    def plain(self, value: Any, at: _At | None) -> Any:
        return None if value is None else self.form.plain(value, at)

    def convert(self, value: Any, at: _At | None) -> Any:
        return None if value is None else self.form.convert(value, at)


class _Union:
    """One of several: written only where no other member could be read from the same JSON."""

    shapes = True

    def __init__(self, members: list[_Form], said: str) -> None:
        self.members, self.said = members, said

    def plain(self, value: Any, at: _At | None) -> Any:
        if type(value) in REGISTRY.names:
            return value
        fits = self._taken(value, at, lambda member: member.plain)
        if not fits:
            raise _misfit(at, self.said, value)
        plain = fits[0]
        readers = self._taken(plain, at, lambda member: member.convert)
        if len(readers) > 1 and any(back is not plain for back in readers):
            name = type(value).__name__
            reason = f"the JSON of {_a(type(value))} fits more than one of {self.said}: register_type({name})"
            raise _refused(at, reason)
        return plain

    def convert(self, value: Any, at: _At | None) -> Any:
        if type(value) in REGISTRY.names:
            return value
        readers = self._taken(value, at, lambda member: member.convert)
        if not readers:
            raise _misfit(at, self.said, value)
        if len(readers) > 1 and any(back is not value for back in readers):
            raise _refused(at, f"this fits more than one of {self.said}: register_type tells them apart")
        return readers[0]

    def _taken(self, value: Any, at: _At | None, way: Callable[[_Form], _Turn]) -> list[Any]:
        taken = []
        for member in self.members:
            try:
                taken.append(way(member)(value, at))
            except UnserialisableResult:
                continue
        return taken


class _Later:
    """A `type` alias, which may name itself: looked into on first use."""

    shapes = True

    def __init__(self, annotation: Any, strict: bool) -> None:
        self.annotation, self.strict = annotation, strict

    @functools.cached_property
    def form(self) -> _Form:
        return _form(self.annotation.__value__, self.strict)

    def plain(self, value: Any, at: _At | None) -> Any:
        return self.form.plain(value, at)

    def convert(self, value: Any, at: _At | None) -> Any:
        return self.form.convert(value, at)


_LISTS: Final = frozenset(
    {
        list,
        collections.abc.Sequence,
        collections.abc.MutableSequence,
        collections.abc.Collection,
        collections.abc.Iterable,
    }
)
_MAPPINGS: Final = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})
_WRAPPERS: Final = frozenset({typing.Annotated, typing.Final, typing.ClassVar, typing.Required, typing.NotRequired})


def _form(annotation: Any, strict: bool = False) -> _Form:
    try:
        return _cached_form(annotation, strict)
    except TypeError:  # unhashable, as Literal and Annotated may be
        return _build_form(annotation, strict)


@functools.lru_cache(maxsize=1024)
def _cached_form(annotation: Any, strict: bool) -> _Form:
    return _build_form(annotation, strict)


def _build_form(annotation: Any, strict: bool) -> _Form:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.NewType):
        return _form(annotation.__supertype__, strict)
    if origin is None and hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):
        return _Later(annotation, strict)
    if origin in _WRAPPERS:
        return _form(args[0], strict)
    if origin is typing.Union or origin is types.UnionType:
        return _union(args)
    if origin is typing.Literal:
        return _Kinds({type(value) for value in args}) if strict else _LEAF
    cls = annotation if origin is None else origin
    if not isinstance(cls, type) or cls in (object, Any):
        return _LEAF
    if typing.is_typeddict(cls):
        return _Typed(cls, strict)
    if dataclasses.is_dataclass(cls):
        return _Record(cls, strict)
    if issubclass(cls, enum.Enum):
        return _Members(cls, strict)
    if cls in _LISTS:
        item = _form(args[0], strict) if args else _LEAF
        kinds = frozenset({list, tuple} if not strict or cls is not list else {list})
        return _Items(item, strict, kinds) if strict or item.shapes else _LEAF
    if cls in _MAPPINGS:
        item = _form(args[1], strict) if len(args) == 2 else _LEAF
        return _Dict(item, strict) if strict or item.shapes else _LEAF
    if cls is tuple and args and args[-1] is not ...:
        return _Bunch(tuple, [_form(arg, strict) for arg in args], _LEAF, strict)
    if cls is tuple or cls is set or cls is frozenset:
        return _Bunch(cls, [], _form(args[0], strict) if args else _LEAF, strict)
    return _Kinds({cls}) if strict else _LEAF


def _union(args: tuple[Any, ...]) -> _Form:
    members = [arg for arg in args if arg is not type(None)]
    if len(members) == 1:
        form = _form(members[0])
        return _LEAF if form is _LEAF else _Optional(form)
    if not any(_form(member).shapes for member in members):
        return _LEAF
    forms: list[_Form] = []
    kinds: set[type] = set()
    for member in members:
        form = _form(member, strict=True)
        if isinstance(form, _Kinds):
            kinds |= form.kinds
        else:
            forms.append(form)
    if kinds:
        forms.append(_Kinds(kinds))
    said = " | ".join(member.__name__ if type(member) is type else str(member) for member in members)
    union = _Union(forms, said)
    return union if len(members) == len(args) else _Optional(union)


def _forms_of(cls: type, names: list[str], strict: bool) -> dict[str, _Form]:
    try:
        hints = typing.get_type_hints(cls)
    except (NameError, TypeError, AttributeError, SyntaxError):
        hints = _readable_hints(cls)  # one name that is imported for type checkers only must not hide the others
    return {name: _form(hints.get(name, Any), strict) for name in names}


def _readable_hints(cls: type) -> dict[str, Any]:
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        space = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
        for name, annotation in inspect.get_annotations(base).items():
            hints[name] = _hint(annotation, space, dict(vars(base)), unreadable=Any)
    return hints


def _hint(annotation: Any, space: dict[str, Any], local: dict[str, Any], unreadable: Any) -> Any:
    holder = types.SimpleNamespace(__annotations__={"value": annotation})
    try:
        return typing.get_type_hints(holder, space, local)["value"]
    except (NameError, TypeError, AttributeError, SyntaxError):
        return unreadable


def plain(value: object, annotation: object) -> object:
    """The value with the dataclasses, Enums and tuples that the annotation names as plain JSON; convert() undoes it.

    Raises UnserialisableResult where the two do not agree. Leaves are not looked at.
    """
    return _form(annotation).plain(value, None)


def convert(value: object, annotation: object) -> object:
    """The dataclasses, Enums and tuples that the annotation names, from plain JSON.

    An Enum is read by name, then by value. Raises UnserialisableResult where the two do not agree. Leaves are not
    looked at, and keys that are no field of a dataclass are passed over.
    """
    return _form(annotation).convert(value, None)


class Encoder(Protocol):
    def __call__(self, value: object, *, max_bytes: int = MAX_BYTES) -> str: ...


def codec_for(annotation: object | None) -> tuple[Encoder, Callable[[str], object]]:
    """(encode, decode) for results of that annotation; the bare functions where it adds nothing to them."""
    if isinstance(annotation, str):
        raise InvalidArgument(f"the annotation {_short(annotation)} is text: pass the type itself")
    try:
        return _cached_codec(annotation)
    except TypeError:
        return _build_codec(annotation)


@functools.lru_cache(maxsize=1024)
def _cached_codec(annotation: Any) -> tuple[Encoder, Callable[[str], object]]:
    return _build_codec(annotation)


def _build_codec(annotation: Any) -> tuple[Encoder, Callable[[str], object]]:
    form = _form(annotation)
    if not form.shapes:
        return encode, decode

    def encode_form(value: object, *, max_bytes: int = MAX_BYTES) -> str:
        return _text(form.plain(value, None), max_bytes, _write)

    def decode_form(text: str) -> object:
        return form.convert(decode(text), None)

    return encode_form, decode_form


def returns_of(fn: Callable[..., object]) -> object | None:
    """What the function gives once awaited, by its annotation; None where there is none that can be read here."""
    target: Any = fn
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target) and not isinstance(target, type):
        target = getattr(type(target), "__call__", target)  # noqa: B004 - the method itself, for its annotations
    try:
        target = inspect.unwrap(target)
        annotation = target.__annotations__["return"]
    except (AttributeError, KeyError, NameError, TypeError, ValueError):
        return None
    target = getattr(target, "__func__", target)
    hint: Any = _hint(annotation, getattr(target, "__globals__", {}), _enclosing(target), unreadable=None)
    if typing.get_origin(hint) in (collections.abc.Awaitable, collections.abc.Coroutine):
        hint = typing.get_args(hint)[-1]
    return typing.cast("object | None", hint)


def _enclosing(fn: Any) -> dict[str, Any]:
    """The names of enclosing functions that this one uses, so that a class made in a function can be named."""
    names = getattr(getattr(fn, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(fn, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


def digest(text: str) -> str:
    """BLAKE2b of 128 bits, in hex, over the UTF-8 text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_NO_ARGUMENTS: Final = digest("{}")


def arguments_digest(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[str | None, tuple[str, ...]]:
    """(digest, names of the arguments that stayed out of it because they are no JSON).

    A positional argument is named by its index. The order of keyword arguments and of dict keys has no part in it. The
    digest is None where every argument stayed out.
    """
    if not args and not kwargs:
        return _NO_ARGUMENTS, ()
    texts: list[str] = []
    left_out: list[str] = []
    for name, value in (*((str(index), value) for index, value in enumerate(args)), *sorted(kwargs.items())):
        try:
            texts.append(f"{_quote(name)}:{_text(value, _DIGEST_BYTES, _write_sorted)}")
        except UnserialisableResult:
            left_out.append(name)
    return digest("{" + ",".join(texts) + "}") if texts else None, tuple(left_out)
