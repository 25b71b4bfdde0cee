"""Encode values as JSON text and decode them.

A decoded value equals the encoded value, or encoding it is refused. In the result of a step the types are equal too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import json.encoder
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

from ...errors import UnserialisableResult
from ..validation import MAX_DEPTH, unsupported_type
from .tagged import HALVES, MAX_PARTS, PART, TAG, TagEncoder, oversize, refused_for_weight, size_budget, untag

#: Size limit of a value: a message, a model's response, an event.
MAX_BYTES: Final = PART * MAX_PARTS
#: Size limit of a step's result, unless the step sets a larger limit.
MAX_RESULT: Final = 1024 * 1024
#: Size limit of a value that contains others repeatedly: the result of a run contains its answer in its messages too.
MAX_WHOLE: Final = 4 * MAX_BYTES
#: Size limit of a text from outside that is parsed as JSON, because even a short text can take long.
MAX_PARSED: Final = 1024 * 1024
# Arguments may be larger than a result, because only their digest is stored.
_DIGEST_BYTES: Final = 8 * MAX_BYTES

_ALLOWANCES: Final = {most: size_budget(most) for most in (MAX_RESULT, MAX_BYTES, MAX_WHOLE, _DIGEST_BYTES)}
_WORD: Final = 2**63
_BARE: Final = frozenset({bool, float, type(None)})
#: Less than any budget that is left: the tagging pass must check the tree.
LOOK: Final = -(2**62)
_ENTRY: Final = 5 * PART
_ITEM: Final = 2 * PART
_quote: Final = json.encoder.encode_basestring_ascii


def _no_foreign(value: object) -> object:
    # Only reached if another thread changes the tree while it is encoded.
    raise TypeError(unsupported_type(value))


def _writer(*, sort_keys: bool = False, ascii: bool = True) -> Callable[[object, int], Iterable[str]]:
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        slow = json.JSONEncoder(
            allow_nan=False, ensure_ascii=ascii, separators=(",", ":"), sort_keys=sort_keys, default=_no_foreign
        )
        return lambda value, _: slow.iterencode(value)
    # JSONEncoder.encode() builds an encoder in each call, which costs as much as encoding a small result.
    write: Callable[[object, int], Iterable[str]]
    quote = _quote if ascii else json.encoder.encode_basestring
    write = make(None, _no_foreign, quote, None, ":", ",", sort_keys, False, False)
    return write


_write: Final = _writer()
_write_sorted: Final = _writer(sort_keys=True)
_write_utf8: Final = _writer(ascii=False)


def compact(value: object) -> str:
    """Return JSON text of lists, tuples, dicts and plain values of the library, with non-ASCII characters as they are.

    The Lua scripts read such text without a conversion.
    """
    return "".join(_write_utf8(value, 0))


class LargeValue(Exception):
    """A value is heavier than `encode` may encode without a pause."""


def encode(
    value: object, *, max_bytes: int = MAX_BYTES, sort_keys: bool = False, exact: bool = False,
    at_once: int | None = None,
) -> str:  # fmt: skip
    """Return the ASCII JSON text of a value.

    The value is a tree of None, bool, int, float, str, list and dict, which may contain UUID, datetime, date, time,
    timedelta, Decimal, bytes, tuple, set, frozenset and registered types.

    Args:
        value: The value.
        max_bytes: The size limit of the text.
        sort_keys: Whether keys of dicts are sorted.
        exact: For the result of a step, whose caller gets the same types back. Then an Enum of this library is tagged,
            and a user's unregistered Enum is refused. Otherwise a string or number Enum is encoded as its value, which
            it equals.
        at_once: The greatest weight of a plain value that is encoded; None for any.

    Raises:
        LargeValue: A plain value is heavier than `at_once`.
        UnserialisableResult: A part, which is named by its path, would not be equal after decoding; the text is longer
            than `max_bytes`; or the value consists of so many parts that encoding would take long.
    """
    if type(value) is dict and not value:
        return "{}"  # as most metadata is
    write = _write_sorted if sort_keys else _write
    budget = _ALLOWANCES.get(max_bytes) or size_budget(max_bytes)
    left = plain_left(value, MAX_DEPTH, budget)
    text = None
    if left >= 0:
        if at_once is not None and budget - left > at_once:
            raise LargeValue
        try:
            text = "".join(write(value, 0))
        except (TypeError, ValueError):
            text = None  # NaN, an infinity, or a change by another thread: the tagging pass finds the path
    elif left != LOOK:
        raise refused_for_weight(value, max_bytes)
    # A single character is found many times as fast as three, and most text contains none.
    if text is None or ("\\" in text and "\\ud" in text and len(text) <= max_bytes and has_pair(text, value)):
        tree = TagEncoder(max_bytes, plain_text, exact).of(value, None)
        try:
            text = "".join(write(tree, 0))
        except ValueError as error:  # sys.set_int_max_str_digits() was lowered
            raise UnserialisableResult("$", str(error)) from error
    if len(text) > max_bytes:
        raise oversize(max_bytes, f"{len(text):,}")
    return text


def has_pair(text: str, tree: object) -> bool:
    """Whether the text contains a character where the tree contains two separate surrogates."""
    return "\\" in text and "\\ud" in text and HALVES.search("".join(_write_utf8(tree, 0))) is not None


def plain_text(tree: object) -> str:
    """Return JSON text of a tree that needs no tags; TypeError or ValueError if it needs some."""
    return "".join(_write(tree, 0))


def plain_left(tree: Any, depth: int, budget: int) -> int:
    """Return an upper bound of the budget that a plain tree leaves; LOOK if the tagging pass must check the tree.

    Each character costs 1, and each byte around a part costs PART.
    """
    items: Iterable[Any]
    kind = type(tree)
    if kind is dict:
        if depth == 0 or TAG in tree:
            return LOOK
        budget -= _ENTRY * len(tree)
        for key in tree:
            if type(key) is not str:
                return LOOK
            budget -= len(key)
        items = tree.values()
    elif kind is list:
        if depth == 0:
            return LOOK
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
                return LOOK
        elif kind is dict or kind is list:
            if item or depth == 1:
                budget = plain_left(item, depth - 1, budget)
                if budget < 0:
                    return budget
        elif kind not in _BARE:
            return LOOK
    return budget


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number - number != 0.0:
        raise ValueError(f"{text[:40]} is larger than any float")
    return number


_START: Final = json.decoder.WHITESPACE.match  # type: ignore[attr-defined]
_STRICT: Final = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
# Called directly, because the method around it searches for whitespace twice.
_SCAN: Final = _STRICT.scan_once  # type: ignore[attr-defined]


def loads_strict(text: str) -> Any:
    """Parse JSON text from outside.

    Raises:
        ValueError: It is no JSON, or contains NaN or a number larger than any float.
        RecursionError: It is nested too deeply.
    """
    return _STRICT.decode(text)


def decode(text: str) -> object:
    """Return the value that `encode` wrote.

    Raises:
        UnserialisableResult: The text is no JSON, or contains a type that this process did not register.
    """
    if text == "{}":
        return {}
    try:
        # `encode` writes no leading space, and searching for it takes as long as decoding a small value.
        value, end = _SCAN(text, 0 if text[:1] > " " else _START(text, 0).end())
        if end != len(text) and text[end:].strip():
            raise ValueError(f"there is more after character {end}")
        # Searching for one character is many times faster than for three.
        return untag(value, None) if "$" in text and '"$"' in text else value
    except RecursionError as error:
        raise UnserialisableResult("$", "nested too deeply to be read") from error
    except UnserialisableResult:
        raise
    except (ValueError, StopIteration) as error:
        raise UnserialisableResult("$", f"the stored text was changed: {error}. Restore a backup") from error


def encode_as(name: str, value: object) -> str:
    """Encode an argument of the caller; an error contains the path `name.a` in place of `$.a`."""
    try:
        return encode(value)
    except UnserialisableResult as error:
        raise UnserialisableResult(
            f"{name}{error.path[1:]}", error.reason, max_bytes=error.max_bytes
        ) from error.__cause__


def decode_checked(text: str, read: Callable[[str], object] = decode) -> object:
    """As `decode`, but raise ValueError if the text is no JSON, and UnserialisableResult for an unregistered type."""
    try:
        return read(text)
    except UnserialisableResult:
        loads_strict(text)  # raises ValueError; an unregistered type is valid JSON
        raise


def decode_dict(text: str, *, known: bool = False) -> dict[str, Any]:
    """Decode a dict; with `known`, by `decode_known`.

    Raises:
        ValueError: It is no dict.
        UnserialisableResult: It contains a type that is not registered.
    """
    found = decode_checked(text, decode_known if known else decode)
    if not isinstance(found, dict):
        raise ValueError("not a dict")
    return found


def decode_known(text: str) -> object:
    """As `decode`, but return the stored tree if it contains an unregistered type. Only for showing it to people."""
    try:
        return decode(text)
    except UnserialisableResult:
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
        raise


def decode_all(texts: Sequence[str]) -> list[object]:
    """Decode several texts that `encode` wrote. For short texts this takes half the time of single calls."""
    if len(texts) > 1 and sum(map(len, texts)) <= MAX_PARSED:
        with contextlib.suppress(UnserialisableResult):  # raised below, for the text with the error
            values = cast("list[object]", decode(f"[{','.join(texts)}]"))
            if len(values) == len(texts):
                return values
    return [decode(text) for text in texts]


def same_tree(text: str, other: str) -> bool:
    """Whether two JSON texts are equal up to the order of keys."""
    return text == other or _in_order(text) == _in_order(other)


def _in_order(text: str) -> str:
    return "".join(_write_sorted(json.loads(text), 0))


def differing_keys(text: str, other: str) -> list[str]:
    """Return the keys whose values differ in two JSON texts of objects. A missing key has no value."""
    one, two = json.loads(text), json.loads(other)
    texts = [{key: "".join(_write_sorted(value, 0)) for key, value in each.items()} for each in (one, two)]
    return [key for key in dict.fromkeys((*one, *two)) if texts[0].get(key) != texts[1].get(key)]


def digest(text: str) -> str:
    """BLAKE2b of 128 bits, in hex, over the UTF-8 text."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_NO_ARGUMENTS: Final = digest("{}")


def arguments_digest(*args: object) -> str | None:
    """Return a digest of arguments that does not depend on the order of dict keys.

    Arguments that are not JSON are left out. The digest is None if that is every argument.
    """
    if not args:
        return _NO_ARGUMENTS
    texts: list[str] = []
    for index, value in enumerate(args):
        try:  # noqa: SIM105 - `suppress` makes three calls for each argument of each step
            texts.append(f'"{index}":{encode(value, max_bytes=_DIGEST_BYTES, sort_keys=True)}')
        except UnserialisableResult:
            pass
    return digest("{" + ",".join(texts) + "}") if texts else None
