"""JSON text of values: what comes back equals what went in, or the writing is refused; in the result of a step also
type for type."""

from __future__ import annotations

import contextlib
import hashlib
import json
import json.encoder
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

from ...errors import UnserialisableResult
from ..validation import MAX_DEPTH, unsupported_type
from .tagged import HALVES, MAX_PARTS, PART, TAG, TagEncoder, oversize, size_budget, untag

#: Of a value that is written: a message, an answer of a model, an event.
MAX_BYTES: Final = PART * MAX_PARTS
#: Of a step's result, unless the step says more.
MAX_RESULT: Final = 1024 * 1024
#: Of what has such values more than once in it, as the result of a run has an answer in its messages too.
MAX_WHOLE: Final = 4 * MAX_BYTES
#: Of a text that comes from outside and is parsed as JSON: a short one can take long.
MAX_PARSED: Final = 1024 * 1024
# Arguments may be larger than a result: only their digest is kept.
_DIGEST_BYTES: Final = 8 * MAX_BYTES

_ALLOWANCES: Final = {most: size_budget(most) for most in (MAX_RESULT, MAX_BYTES, MAX_WHOLE, _DIGEST_BYTES)}
_WORD: Final = 2**63
_BARE: Final = frozenset({bool, float, type(None)})
_LOOK: Final = -(2**62)
_ENTRY: Final = 5 * PART
_ITEM: Final = 2 * PART
_quote: Final = json.encoder.encode_basestring_ascii


def _no_foreign(value: object) -> object:
    # Only a tree that another thread changes while it is written gets here.
    raise TypeError(unsupported_type(value))


def _writer(*, sort_keys: bool = False, ascii: bool = True) -> Callable[[object, int], Iterable[str]]:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        slow = json.JSONEncoder(
            allow_nan=False, ensure_ascii=ascii, separators=(",", ":"), sort_keys=sort_keys, default=_no_foreign
        )
        return lambda value, _: slow.iterencode(value)
    # JSONEncoder.encode() builds one of these per call, which costs as much as a small result.
    write: Callable[[object, int], Iterable[str]]
    quote = _quote if ascii else json.encoder.encode_basestring
    write = make(None, _no_foreign, quote, None, ":", ",", sort_keys, False, False)
    return write


_write: Final = _writer()
_write_sorted: Final = _writer(sort_keys=True)
_write_utf8: Final = _writer(ascii=False)


def compact(value: object) -> str:
    """JSON text of lists, tuples, dicts and plain values of ours, not of ASCII alone: Lua takes texts as they are."""
    return "".join(_write_utf8(value, 0))


def encode(value: object, *, max_bytes: int = MAX_BYTES, sort_keys: bool = False, exact: bool = False) -> str:
    """ASCII JSON text of a tree of None, bool, int, float, str, list and dict, and of UUID, datetime, date, time,
    timedelta, Decimal, bytes, tuple, set, frozenset and registered types inside it.

    What is told and kept for others has the value of an Enum that is a text or a number, which it equals. `exact` is
    for the result of a step, whose caller gets the type back: there ours have a tag and a user's own is refused.

    Raises UnserialisableResult, with the path, for every value that would not come back as it is, for a text of more
    than `max_bytes`, and for a value of so many parts that it would take long.
    """
    if type(value) is dict and not value:
        return "{}"  # as most metadata is
    write = _write_sorted if sort_keys else _write
    left = _left(value, MAX_DEPTH, _ALLOWANCES.get(max_bytes) or size_budget(max_bytes))
    text = None
    if left >= 0:
        try:
            text = "".join(write(value, 0))
        except (TypeError, ValueError):
            text = None  # NaN, an infinity, or a change by another thread; the pass below finds where
    elif left != _LOOK:
        raise oversize(max_bytes)
    if text is None or (len(text) <= max_bytes and _paired(text, value)):
        tree = TagEncoder(max_bytes, plain_text, exact).of(value, None)
        try:
            text = "".join(write(tree, 0))
        except ValueError as error:  # sys.set_int_max_str_digits() was lowered
            raise UnserialisableResult("$", str(error)) from error
    if len(text) > max_bytes:
        raise oversize(max_bytes)
    return text


def _paired(text: str, tree: object) -> bool:
    """Whether this text of the tree says a character where the tree has two halves of one."""
    return "\\ud" in text and HALVES.search("".join(_write_utf8(tree, 0))) is not None


def plain_text(tree: object) -> str:
    """JSON text of a tree that is in its form already; TypeError or ValueError where it is none."""
    return "".join(_write(tree, 0))


def _left(tree: Any, depth: int, budget: int) -> int:
    """What a plain tree leaves of the budget at most; _LOOK for one that the tagging pass must look at.

    Characters count one, parts PART for each byte around them.
    """
    items: Iterable[Any]
    kind = type(tree)
    if kind is dict:
        if depth == 0 or TAG in tree:
            return _LOOK
        budget -= _ENTRY * len(tree)
        for key in tree:
            if type(key) is not str:
                return _LOOK
            budget -= len(key)
        items = tree.values()
    elif kind is list:
        if depth == 0:
            return _LOOK
        budget -= _ITEM * len(tree)
        items = tree
    else:
        items = (tree,)
    if budget < 0:
        return budget
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


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


_START: Final = json.decoder.WHITESPACE.match  # type: ignore[attr-defined]
_STRICT: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
# Called directly: the method around it looks for space twice.
_SCAN: Final = _STRICT.scan_once  # type: ignore[attr-defined]


def loads_strict(text: str) -> Any:
    """The tree that a text of somebody else's says; ValueError for what is no JSON, NaN and numbers larger than any
    float with it, RecursionError for what is nested too deeply."""
    return _STRICT.decode(text)


def decode(text: str) -> object:
    """The value that encode() wrote.

    Raises UnserialisableResult for text that is no JSON, and for a type that this process has not registered.
    """
    if text == "{}":
        return {}
    try:
        # What was written here begins with no space: looking for it takes as long as a small value.
        value, end = _SCAN(text, 0 if text[:1] > " " else _START(text, 0).end())
        if end != len(text) and text[end:].strip():
            raise ValueError(f"there is more after character {end}")
        # One character is found many times faster than three.
        return untag(value, None) if "$" in text and '"$"' in text else value
    except RecursionError as error:
        raise UnserialisableResult("$", "nested too deeply to be read here") from error
    except UnserialisableResult:
        raise
    except (ValueError, StopIteration) as error:
        raise UnserialisableResult("$", f"the text is not what was written: {error}") from error


def decode_checked(text: str, read: Callable[[str], object] = decode) -> object:
    """decode(); ValueError for what is no JSON, UnserialisableResult for a type that is not registered."""
    try:
        return read(text)
    except UnserialisableResult:
        loads_strict(text)  # which has nothing against such a type
        raise


def decode_dict(text: str, *, known: bool = False) -> dict[str, Any]:
    """decode() of a dict, or decode_known(); ValueError for what is none, UnserialisableResult for a type that is not
    registered."""
    found = decode_checked(text, decode_known if known else decode)
    if not isinstance(found, dict):
        raise ValueError("not a dict")
    return found


def decode_known(text: str) -> object:
    """decode(), or the tree as it is stored where it holds a type that this process has not registered: to look at."""
    try:
        return decode(text)
    except UnserialisableResult:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
        raise


def decode_all(texts: Sequence[str]) -> list[object]:
    """What decode() gives of each of these texts that encode() wrote, in half the time where they are short."""
    if len(texts) > 1 and sum(map(len, texts)) <= MAX_PARSED:
        with contextlib.suppress(UnserialisableResult):  # told below, of the text that it is about
            values = cast("list[object]", decode(f"[{','.join(texts)}]"))
            if len(values) == len(texts):
                return values
    return [decode(text) for text in texts]


def same_tree(text: str, other: str) -> bool:
    """Whether two JSON texts differ in nothing but the order of keys."""
    return text == other or _in_order(text) == _in_order(other)


def _in_order(text: str) -> str:
    return "".join(_write_sorted(json.loads(text), 0))


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
    named = [(str(index), value) for index, value in enumerate(args)]
    for name, value in named + sorted(kwargs.items()) if kwargs else named:
        try:
            texts.append(f"{_quote(name)}:{encode(value, max_bytes=_DIGEST_BYTES, sort_keys=True)}")
        except UnserialisableResult:
            left_out.append(name)
    return digest("{" + ",".join(texts) + "}") if texts else None, tuple(left_out)
