"""Check settings by tables of their types, whether a program, a file or the environment sets them."""

from __future__ import annotations

import dataclasses
import datetime as _dt
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, TypeVar

from ..errors import UnknownSetting, brief
from .validation import SECRET_NAME, Shown, is_number, must, redacted_url, type_name, unknown, without_credentials

_Kind = TypeVar("_Kind")
_DEEPEST: Final = 8  # levels of a setting that are shown

_TRUTH: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def shown_setting(value: Any, depth: int = 0) -> Any:
    """Return the value of a setting for a text: without credentials, whatever the setting is called.

    Strings are shown `without_credentials`, values of dicts under a secret name as ***, and objects that are not
    settings as their type, because their repr may contain anything.
    """
    if value is None or isinstance(value, bool | int | float | type | _dt.date | _dt.time):
        return value
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, PurePath):
        return type(value)(without_credentials(str(value)))
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {_key_shown(key): _item_shown(key, item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple) and len(value) == 2 and _is_secret(value[0], value[1]):  # a header
            header = (_key_shown(value[0]), "***")
            return header if isinstance(value, tuple) else [*header]
        if isinstance(value, list | tuple | set | frozenset):
            items = [shown_setting(item, depth + 1) for item in value]
            return tuple(items) if isinstance(value, tuple) else items
    return value if type(value) in _CLASSES else Shown(type_name(type(value)))


def _key_shown(key: Any) -> str:
    return without_credentials(key) if isinstance(key, str) else brief(shown_setting(key, _DEEPEST))


def _item_shown(name: Any, value: Any, depth: int = 0) -> Any:
    if _is_secret(name, value):
        return "***"
    if isinstance(name, str) and name.lower().endswith("headers") and isinstance(value, Mapping):
        return {_key_shown(key): "***" for key in value}
    return shown_setting(value, depth)


def _is_secret(name: Any, value: Any) -> bool:
    return value is not None and isinstance(name, str) and SECRET_NAME.search(name) is not None


def _redacted_url(value: Any) -> Any:
    return redacted_url(value) if isinstance(value, str) else shown_setting(value)


def _hidden(value: Any) -> Any:
    return None if value is None else "***"


@dataclass(frozen=True)
class SettingType:
    """What a setting may be, in words and as a test.

    `read` makes the value of an environment variable; it returns the text itself if it cannot, which `fits` then
    rejects. `shown` returns the value for a text, without its secrets.
    """

    wanted: str
    fits: Callable[[Any], bool]
    read: Callable[[str], Any] = str
    shown: Callable[[Any], Any] = shown_setting

    def check(self, called: str, value: Any) -> None:
        """Raise InvalidArgument, which names the setting as `called`, for a value that does not fit."""
        if not self.fits(value):
            raise must(called, f"be {self.wanted}", self.shown(value))

    def or_none(self, why: str = "") -> SettingType:
        return dataclasses.replace(
            self, wanted=f"{self.wanted}, or None{why}", fits=lambda value: value is None or self.fits(value)
        )


def number(least: float = 0, most: float = math.inf, *, above: bool = False, whole: bool = False) -> SettingType:
    """The type of a finite number from `least` to `most`; `above` excludes `least` itself."""

    def fits(value: Any) -> bool:
        return (
            is_number(value)
            and least <= value <= most
            and value < math.inf
            and not (above and value == least)
            and (isinstance(value, int) or not whole)
        )

    kind = "an integer" if whole else "a number"
    scope = (
        f"above {least:g}" if above else f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    )
    return SettingType(f"{kind} {scope}", fits, _number_in)


def choice(*values: str) -> SettingType:
    """The type of a string that is in this list."""
    return SettingType(" or ".join(map(repr, values)), lambda value: isinstance(value, str) and value in values)


def _number_in(text: str) -> float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


TEXT: Final = SettingType("a non-empty string", lambda value: isinstance(value, str) and value.strip() != "")
URL: Final = dataclasses.replace(TEXT, shown=_redacted_url)
SECRET: Final = dataclasses.replace(TEXT, shown=_hidden)
TRUTH: Final = SettingType(
    "true or false", lambda value: isinstance(value, bool), lambda text: _TRUTH.get(text.lower(), text)
)
COUNT: Final = number(whole=True)
POSITIVE: Final = number(1, whole=True)
#: How often something is tried at most.
TRIES: Final = dataclasses.replace(POSITIVE, wanted=f"{POSITIVE.wanted}, where 1 means no retry")
SECONDS: Final = dataclasses.replace(number(), wanted="a number of seconds of at least 0")
#: math.inf means forever.
DURATION: Final = SettingType("a number of seconds of at least 0", lambda value: is_number(value) and value >= 0)
POSITIVE_SECONDS: Final = dataclasses.replace(number(above=True), wanted="a number of seconds above 0")
TIME_LIMIT: Final = SettingType(
    "a number of seconds above 0, where inf means no limit", lambda value: is_number(value) and value > 0, _number_in
)
# Hidden, because the value may be a key that was written one level too high.
TABLE: Final = SettingType("a table", lambda value: isinstance(value, dict), shown=_hidden)


def check_known(name: str, names: Iterable[str], called: str = "", what: str = "setting") -> None:
    """Raise UnknownSetting, with the nearest name, for a name that is not one of `names`."""
    names = tuple(names)
    if name not in names:
        raise UnknownSetting(f"{called}{': ' * bool(called)}{unknown(what, name, names)}")


def check_all(
    values: Mapping[str, Any], types: Mapping[str, SettingType], called: str = "", what: str = "setting"
) -> dict[str, Any]:
    """Return a copy of settings that have a type each and fit it; `called` is the file and table that they are from."""
    for name, value in values.items():
        check_known(name, types, called, what)
        types[name].check(f"{called}{' ' if called.endswith(']') else ': ' * bool(called)}{name}", value)
    return dict(values)


def from_variables(
    types: Mapping[str, SettingType], variables: Mapping[str, str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Return the settings that environment variables set; `variables` are their names. An empty variable is not set."""
    found: dict[str, Any] = {}
    for name, variable in variables.items():
        text = environment.get(variable, "").strip()
        if text:
            found[name] = types[name].read(text)
            types[name].check(variable, found[name])
    return found


_CLASSES: Final = set[type]()  # whose repr shows no credentials


def without_credentials_in_repr(kind: type[_Kind]) -> type[_Kind]:
    """Make the repr of a dataclass show its fields without credentials. A repr that the class defines stays."""

    def text(self: _Kind) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = (f"{each.name}={_item_shown(each.name, getattr(self, each.name))!r}" for each in fields if each.repr)
        return f"{kind.__name__}({', '.join(shown)})"

    if kind.__dataclass_params__.repr:  # type: ignore[attr-defined]
        kind.__repr__ = text  # type: ignore[method-assign, assignment]
    _CLASSES.add(kind)
    return kind


def with_known_names(kind: type[_Kind], what: str = "setting") -> type[_Kind]:
    """Make a dataclass a class of settings.

    It raises UnknownSetting, with the nearest name, for a keyword that it does not have, and its repr shows no
    credentials.
    """
    made: Callable[..., None] = kind.__init__
    names = [each.name for each in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(made)
    def init(self: _Kind, *args: Any, **settings: Any) -> None:
        for name in settings:
            check_known(name, names, what=what)
        made(self, *args, **settings)

    kind.__init__ = init  # type: ignore[method-assign, assignment]
    return without_credentials_in_repr(kind)
