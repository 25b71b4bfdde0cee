"""Parts of error messages about values: the path in a value, the nearest name, URLs without secrets."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import enum
import re
from collections.abc import Iterable, Iterator
from typing import Final, TypeGuard
from uuid import UUID

from ..errors import InvalidArgument, UnserialisableResult, brief
from .pydantic_types import is_model

MAX_DEPTH: Final = 100

# Each pattern needs linear time, because the texts come from command lines, models and servers.
_URL = re.compile("[A-Za-z][A-Za-z0-9+.-]*://")
# The lookahead skips a value that is hidden already: hiding it again would remove the text after it.
_OPTION = re.compile(
    r"(?i:((?:password|passwd|listen_url)=)(?!\*\*\*)[^&#]*|"
    r"((?:pwd|passphrase|secret|token|credentials?|(?:api|secret|private|access)[_-]?key)=)"
    r"(?!\*\*\*|\.\.\.)[^&#\s'\"]+)"
)
#: Names of values that are secret. They begin with any words: `client_secret`, `dbPassword`.
SECRET_NAME: Final = re.compile(
    r"(?:(?:api|secret|private|access)[_-]?key|authorization|cookies?|credentials?|passw(?:or)?d|passphrase|pwd|secret"
    r"|token)$",
    re.IGNORECASE,
)
# A secret name and its value in text that is nearly JSON.
_MEMBER = re.compile(
    r"((?:key|authorization|passw(?:or)?d|passphrase|pwd|secret|token|headers)['\"]\s*[:,]\s*).*", re.I | re.S
)
_HEADER_NAME = r"(?:key|credentials?|passw(?:or)?d|passphrase|secret|token|auth)['\"]?\s*:"
# A header with credentials. A name without "-" may be a module if no space follows the colon.
_HEADER = re.compile(
    r"((?:^|[\s,;&?{('\"])(?:[\w-]*(?:authorization|cookies?)['\"]?\s*[:=]"
    rf"|[\w-]*{_HEADER_NAME}\s|\w+-[\w-]*{_HEADER_NAME})\s*)(?!\*\*\*).+",
    re.IGNORECASE | re.DOTALL,
)
_SCHEME = re.compile(
    r"(\bbearer\s+|(?:^|['\"])\s*(?:basic|digest|negotiate)\s+)(?!\*\*\*).+", re.IGNORECASE | re.DOTALL
)
# An address differs from run to run, and says nothing to the reader.
_ADDRESS = re.compile(r"^<.* at 0x[0-9a-f]+|^<coroutine |^<(async_)?generator ")
_WORD = re.compile(r"\S+")
# The first character of the user name or the host. A URL without a scheme begins with it.
_AUTHORITY = re.compile("(?<=://)[^/]")
_AUTHORITY_OR_START = re.compile("(?<=://)[^/]|^(?![A-Za-z+]*://)[^/]")
# An authority with a colon and no port after it: the host is missing or cut off, and this is the password.
_NO_PORT = r"[^/?#@\[\]:'\"]*:(?!//|[0-9]{1,5}(?![\w-])|[/?#\s'\"]|$).*"
_AFTER_SCHEME = re.compile(f"(?<=://){_NO_PORT}", re.DOTALL)
_AFTER_SCHEME_OR_START = re.compile(f"(?<=://){_NO_PORT}|^(?![A-Za-z+]*://){_NO_PORT}", re.DOTALL)


class Path:
    """A level of a walk through a value: the container, its parent level, and the key or index of the current item."""

    __slots__ = ("depth", "held", "parent", "step")

    def __init__(self, parent: Path | None, held: object) -> None:
        self.parent: Path | None = parent
        self.held: object = held
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.step: object = None


def _levels(at: Path | None) -> list[Path]:
    levels = []
    while at is not None:
        levels.append(at)
        at = at.parent
    return levels[::-1]


def _path(at: Path | None) -> str:
    text, levels = "$", _levels(at)
    for level in levels[:12]:
        step = level.step
        if isinstance(step, int):
            text += f"[{step}]"
        elif isinstance(step, str):
            text += f".{step}" if step.isidentifier() and len(step) <= 60 else f"[{short(step)}]"
        else:
            text += "[*]"  # the items of a set have no positions
    return text if len(levels) <= 12 else text + "…"


def not_encodable(at: Path | None, reason: str) -> UnserialisableResult:
    return UnserialisableResult(_path(at), reason)


def descend(at: Path | None, held: object) -> Path:
    """Return the level of the container `held` below `at`.

    Raises:
        UnserialisableResult: The level is deeper than MAX_DEPTH, which a cycle always reaches.
    """
    here = Path(at, held)
    if here.depth <= MAX_DEPTH:
        return here
    levels = _levels(here)
    seen: dict[int, Path] = {}
    for level in levels:
        first = level if level.held is None else seen.setdefault(id(level.held), level)
        if first is not level:
            raise not_encodable(
                level.parent, f"a cycle back to {_path(first.parent)}. Use a copy without that reference"
            )
    raise not_encodable(at, f"nested deeper than {MAX_DEPTH} levels. Use a flatter value")


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is a float, or an int that a float can hold. A bool is not a number."""
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
    # The repr of other types may be long, or fail.
    safe = value is None or type(value) in (str, int, float, bool, UUID)
    text = ascii(value) if safe else f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..." + text[0]


def type_name(kind: type) -> str:
    return f"{'an' if kind.__name__[:1] in 'AEIOUaeiou' else 'a'} {kind.__name__}"


def must(name: str, constraint: str, value: object, fix: str = "") -> InvalidArgument:
    """Return the error for an invalid value: `NAME must CONSTRAINT, got VALUE. FIX`.

    Args:
        name: The argument as the caller wrote it, such as `deadline` or `step 'pay': retries`.
        constraint: What follows "must": `be an integer above 0`, `accept (ctx, state)`.
        value: The value that was passed. Pass `Shown(text)` for a description in place of its repr.
        fix: A sentence that says how to correct the call, if the constraint does not say it.
    """
    text = str(value) if isinstance(value, Shown) else shown(value)
    return InvalidArgument(f"{name} must {constraint}, got {text}.{' ' if fix else ''}{sentence(fix)}")


def shown(value: object) -> str:
    """Return the short repr of a value for a message; `the class Step` and `a coroutine` without an address."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = brief(value)
    return text if _ADDRESS.search(text) is None else type_name(type(value))


class Shown(str):
    """A description of a value, which `must` prints without quotes: `a coroutine`, `2 arguments`."""


def sentence(text: str) -> str:
    """Return the text with a full stop, unless it ends with punctuation, a bracket or a quote already."""
    return f"{text}." if text and text[-1].isalnum() else text


def unknown(what: str, name: object, known: Iterable[str], fix: str = "") -> str:
    """Return the message for an unknown name: `unknown WHAT 'helo'. Did you mean 'hello'? FIX`."""
    hint = did_you_mean(name, known)
    shown_name = without_credentials(name) if isinstance(name, str) else name
    return " ".join(filter(None, (f"unknown {what} {brief(shown_name)}.", hint, sentence(fix))))


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a sentence with the known name that is most similar, or with at most five of the known names."""
    names = sorted(map(str, known))
    # Cut off, because comparing takes quadratic time.
    near = difflib.get_close_matches(name[:100], names, n=1) if isinstance(name, str) else []
    if near:
        return f"Did you mean {near[0]!r}?"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"Known: {', '.join(names[:5])}{more}." if names else "None exist."


def redacted_url(url: str) -> str:
    """Return `url` with *** for each part that is, or may be, a secret; `url` may be any text meant as a URL."""
    url = _without_query_options(url)
    no_port = _AFTER_SCHEME if "@" in url else _AFTER_SCHEME_OR_START
    return _without_options(_without_user(url, _AUTHORITY_OR_START, no_port))


def without_credentials(text: str) -> str:
    """Return the text of a setting with *** for the credentials in it, whatever the setting is called.

    Credentials are `user:password@` of a URL, with or without its scheme, values that are named as secrets, and the
    values of headers such as `Authorization: Bearer …`. Other text with a colon, such as `package.module:Class`, is not
    changed.
    """
    if _URL.match(text):
        return _MEMBER.sub(r"\1***", redacted_url(text))
    text = _SCHEME.sub(r"\1***", _HEADER.sub(r"\1***", text))
    if ":" in text.rpartition("@")[0]:
        text = redacted_url(text.lstrip("/"))
    return _MEMBER.sub(r"\1***", redacted(text))


def redacted(text: str) -> str:
    """Return `text` with *** for the secrets of the URLs in it."""
    if _URL.match(text):
        return redacted_url(text)
    if "://" in text:
        text = _WORD.sub(lambda word: _without_user(_without_query_options(word[0]), _AUTHORITY, _AFTER_SCHEME), text)
    return _without_options(text)


def _without_user(url: str, authority: re.Pattern[str], no_port: re.Pattern[str]) -> str:
    """Hide everything from the authority to the last @, as a password may contain any character."""
    found, at = authority.search(url), url.rfind("@")
    if found is not None and found.start() < at:
        url = f"{url[: found.start()]}***{url[at:]}"
    before, sign, host = url.rpartition("@")
    return before + sign + no_port.sub("***", host)


def _without_query_options(url: str) -> str:
    """Hide the options after the first ?: an @ in an option is not the end of a user name and password."""
    before, mark, query = url.partition("?")
    return before + mark + _without_options(query)


def _without_options(text: str) -> str:
    return _OPTION.sub(lambda found: f"{found[1] or found[2]}***", text)


def unsupported_type(value: object) -> str:
    """Return why a value cannot be encoded, and how to fix it."""
    kind = type(value)
    name = kind.__name__
    if isinstance(value, type):
        return f"the class {value.__name__} is not JSON-serializable. Use its name"
    if isinstance(value, enum.Enum) or dataclasses.is_dataclass(value) or is_model(kind):
        out = f"Annotate the return type, pass returns={name}, or call register_type({name})"
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        out = "Use value._asdict() or tuple(value)"
    elif isinstance(value, bytearray | memoryview):
        out = "Use bytes(value)"
    elif isinstance(value, collections.abc.Awaitable):
        out = "Await it and use its result"
    elif isinstance(value, Iterator | range | collections.abc.KeysView | collections.abc.ValuesView):
        out = "Use list(value)"
    else:
        for base in (str, int, float, bytes, dict, list, tuple, set, frozenset):
            if isinstance(value, base):
                return f"{type_name(kind)} would be restored as {type_name(base)}. Use {base.__name__}(value)"
        out = (
            "Use a dict or a dataclass" if kind.__module__ == "builtins" else f"Use a dict, or make {name} a dataclass"
        )
    return f"{type_name(kind)} is not JSON-serializable. {out}"
