"""Read a tool's arguments strictly: nothing that a model sends is guessed, dropped or converted."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Final, NoReturn, cast

from .._core.codec.json import MAX_PARSED
from .._core.json_schema import fits_plainly, misfits, with_parsed_text
from .._core.validation import MAX_DEPTH
from ..errors import BadArguments, brief

__all__ = ["BadArguments", "check_arguments", "parsed_arguments", "read_arguments"]

_DEEPEST: Final = MAX_DEPTH - 2  # events and records of the call have them two levels deeper
_MOST_PROBLEMS: Final = 8  # problems listed in one message
_ALWAYS_USABLE: Final = frozenset({int, bool, type(None)})
_LONGEST_PATH: Final = 60  # characters of the path of a value in a message
_DIGITS: Final = 400  # of an integer; a float contains at most 309 before its decimal point
_OBJECT: Final = 'Send an object such as {"name": "value"}'
#: How the JSON text of an array or object begins, even if it is encoded twice.
_STARTS: Final = ("[", "{", '"')
_SHORTER: Final = "Send a smaller value"
_TOO_DEEP: Final = f"be nested at most {_DEEPEST} levels deep, got more. Send a flatter value"


def read_arguments(arguments: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the arguments of a tool call as a dict.

    JSON text must be at most 1 MB, nested at most 98 levels, with unique keys, and without NaN, infinities, lone
    surrogates or anything after its end.

    Args:
        arguments: A dict, its JSON text, or None (no arguments).

    Raises:
        BadArguments: They are not a valid JSON object.
    """
    # Models send an empty text or null for a tool without parameters.
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")):
        return {}
    tree: dict[str, Any]
    if isinstance(arguments, str):
        tree = _read(arguments)
        if not isinstance(tree, dict):
            raise BadArguments(f"arguments must be a JSON object, got {brief(arguments)}. {_OBJECT}")
    elif isinstance(arguments, Mapping):
        tree = dict(arguments)
    else:
        raise BadArguments(f"arguments must be a dict or its JSON text, got {brief(arguments)}")
    found = _unusable(tree)
    if found is not None:
        where = found[0].removeprefix(".") or "arguments"
        raise BadArguments(f"{where if len(where) <= _LONGEST_PATH else f'{where[:_LONGEST_PATH]}…'} {found[1]}")
    return tree


def check_arguments(parameters: Any, arguments: Mapping[str, Any], besides: Collection[str] = ()) -> None:
    """Raise BadArguments, with every problem, unless the arguments match `parameters`, a JSON Schema.

    `besides` names arguments that the caller adds to them.
    """
    if type(parameters) is not dict and not isinstance(parameters, Mapping):
        return
    if besides:
        required = [name for name in parameters.get("required", ()) if name not in besides]
        parameters = {**parameters, "required": required}
    if fits_plainly(arguments, parameters):
        return
    problems = list(islice(misfits(dict(arguments), parameters, ""), _MOST_PROBLEMS + 1))
    if problems:
        # Those with a question are last, because nothing is added after it.
        listed = sorted(problems[:_MOST_PROBLEMS], key=lambda each: each.endswith("?"))
        text = "; ".join(listed).replace("?; unexpected", "? Also unexpected")
        if len(problems) > _MOST_PROBLEMS:
            text += " And more." if text.endswith("?") else "; and more"
        raise BadArguments(text)


def parsed_arguments(parameters: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with arrays and objects in place of their JSON text, which some models send.

    Text is parsed where `parameters`, a JSON Schema, allows an array or an object and no text. Text that is not valid
    JSON stays as it is.
    """
    if not _may_contain_text(arguments) or not isinstance(parameters, Mapping):
        return arguments
    try:
        return cast("dict[str, Any]", with_parsed_text(arguments, parameters, _parsed_or_none))
    except RecursionError:
        return arguments


def _may_contain_text(value: Any) -> bool:
    """Return whether a value may contain the JSON text of an array or object."""
    if isinstance(value, str):
        return value.lstrip()[:1] in _STARTS
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in values:  # noqa: SIM110 - any() of a generator takes as long as all of the above
        if isinstance(each, (str, dict, list)) and _may_contain_text(each):
            return True
    return False


def _parsed_or_none(text: str) -> Any:
    if text.lstrip()[:1] not in _STARTS:
        return None
    try:
        return _read(text)
    except BadArguments:
        return None


def _read(text: str) -> Any:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise BadArguments(f"invalid JSON arguments: lone surrogate at character {error.start}. Remove it") from None
    if size > MAX_PARSED:
        raise BadArguments(f"arguments must have at most {MAX_PARSED:,} bytes, got {size:,}. {_SHORTER}")
    try:
        return (_STRICT if len(text) <= _DIGITS else _STRICT_WITH_LONG_TEXT).decode(text)
    except BadArguments:
        raise
    except RecursionError:
        raise BadArguments(f"arguments must {_TOO_DEEP}") from None
    except ValueError as error:
        raise BadArguments(f"invalid JSON arguments: {error}, got text that ends with {text[-40:]!r}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise BadArguments(f"arguments must have unique keys, got {brief(twice)} twice in one object")
    return tree


def _no_constant(text: str) -> NoReturn:
    raise BadArguments(f"invalid JSON arguments: {text} is not a JSON number. Use null or a string")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise BadArguments(f"a number must fit a float (at most {sys.float_info.max:.1e}), got {text[:40]}. {_SHORTER}")
    return number


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise BadArguments(f"an integer must have at most {_DIGITS} digits, got {len(text)}. {_SHORTER}")
    return int(text)


def _unusable(value: Any, depth: int = 1) -> tuple[str, str] | None:
    """Return the path and the description of the first value that JSON cannot express, or None."""
    if isinstance(value, str):
        return (
            None
            if value.isascii() or _is_text(value)
            else ("", f"must not contain a lone surrogate, got {brief(value)}. Remove it")
        )
    if isinstance(value, float):
        return None if math.isfinite(value) else ("", f"must be a JSON number, got {value}. Use null or a string")
    if not isinstance(value, (dict, list)):
        return None
    if depth > _DEEPEST:
        return "", f"must {_TOO_DEEP}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            if type(item) not in _ALWAYS_USABLE and (found := _unusable(item, depth + 1)):
                return f"[{index}]{found[0]}", found[1]
        return None
    for key, item in value.items():
        if not isinstance(key, str):
            return "", f"must have only strings as keys, got {brief(key)}"
        if not (key.isascii() or _is_text(key)):
            return "", f"must have keys without lone surrogates, got {brief(key)}"
        if type(item) not in _ALWAYS_USABLE and (found := _unusable(item, depth + 1)):
            return f".{key[:60]}{found[0]}", found[1]
    return None


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


# Created once: json.loads() with hooks would create a decoder for each call.
_STRICT: Final = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite)
_STRICT_WITH_LONG_TEXT: Final = json.JSONDecoder(
    object_pairs_hook=_once, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole
)
