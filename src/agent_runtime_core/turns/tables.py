"""A file of settings read key by key: what is unknown or of the wrong type is refused with its file, key and value."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from .._refusals import meant
from ..errors import InvalidArgument, UnknownSetting, brief


class Key(NamedTuple):
    """What a value must be, in words and as a test; the text of a secret is not shown."""

    wanted: str
    fits: Callable[[Any], bool]
    secret: bool = False


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


TEXT = Key("a text", _is_text)
SECRET = Key("a text", _is_text, secret=True)
TRUTH = Key("true or false", lambda value: isinstance(value, bool))
COUNT = Key("a whole number of 0 or more", lambda value: _is_count(value, 0))
POSITIVE = Key("a whole number above 0", lambda value: _is_count(value, 1))
#: Not shown: it might be a key that stands one level too high.
TABLE = Key("a table", lambda value: isinstance(value, dict), secret=True)


def between(least: float, most: float) -> Key:
    """A number from `least` to `most`."""
    return Key(
        f"a number from {least:g} to {most:g}",
        lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most,
    )


def parsed(content: bytes, where: str) -> dict[str, Any]:
    """The tables of a TOML file; InvalidArgument names the file and the line."""
    try:
        return tomllib.loads(text_of(content, where))
    except (ValueError, RecursionError) as error:
        # A number of more digits than Python reads is a ValueError that is no TOMLDecodeError.
        raise InvalidArgument(f"{where} is not TOML: {error}") from error


def text_of(content: bytes, where: str) -> str:
    """The text of a file in UTF-8, with or without the mark that some editors put in front."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{where} is not UTF-8: {error.reason} at byte {error.start}") from error


def known(name: str, names: Iterable[str], called: str, what: str = "setting") -> None:
    """UnknownSetting, with the nearest, for a name that is none of the names."""
    names = tuple(names)
    if name not in names:
        raise UnknownSetting(f"{called}: no {what} {brief(name)}: {meant(name, names)}")


def checked(table: Mapping[str, Any], keys: Mapping[str, Key], called: str) -> dict[str, Any]:
    """The values of a table that may have these keys; `called` is its file, and its name where it has one."""
    for name, value in table.items():
        known(name, keys, called)
        if not keys[name].fits(value):
            shown = "'***'" if keys[name].secret else f"{brief(value)}"
            raise InvalidArgument(f"{called}: {name}={shown} cannot be used: it must be {keys[name].wanted}")
    return dict(table)


def take_table(document: dict[str, Any], name: str, where: str) -> dict[str, Any]:
    """That table, taken out of the document; empty where there is none."""
    table = document.pop(name, {})
    return checked({name: table}, {name: TABLE}, where)[name]  # type: ignore[no-any-return]
