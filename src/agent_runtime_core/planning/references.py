"""References of a plan's inputs to results of earlier steps: `{{step_1.result}}`, `{{step_1.result.items.0}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from .._core.codec.json import MAX_BYTES, encode
from ..errors import InvalidArgument, UnserialisableResult, brief

_REFERENCE: Final = re.compile(r"\{\{\s*step_([0-9]{1,9})\.result((?:\.[A-Za-z0-9_-]+)*)\s*\}\}")
_MOST_DIGITS: Final = 18  # of an index: more than any list has items
_MEANT: Final = re.compile(r"\{\{[^{}]*\}\}")


class Reference(NamedTuple):
    """To the result of a step, or to what stands in it at `path`."""

    step: int
    path: tuple[str, ...]
    text: str


def reference(step: int, *path: str | int) -> str:
    """The text that stands for that result in a tool_input."""
    return "{{" + ".".join((f"step_{step}", "result", *map(str, path))) + "}}"


def references(value: Any) -> Iterator[Reference]:
    """Those anywhere in a tool_input."""
    for text in _texts(value):
        for found in _REFERENCE.finditer(text):
            yield _read(found)


def malformed(value: Any) -> Iterator[str]:
    """What looks as if it were meant for one, and is none."""
    for text in _texts(value):
        for found in _MEANT.finditer(text):
            if "step" in found[0].lower() and _REFERENCE.fullmatch(found[0]) is None:
                yield found[0]


def is_reference(value: Any) -> bool:
    """Whether a text is one reference and nothing else: it stands for the result itself, whatever its type."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value.strip()) is not None


def resolve(tool_input: Any, results: Mapping[int, Any]) -> Any:
    """Return a copy of the input with results in the place of references.

    A text that is one reference becomes the result as it is. Inside a longer text the reference becomes the result's
    plain text, or its JSON text if the result is not a text.

    Raises:
        InvalidArgument: A step has no result, its result has no such field, or the results are larger than MAX_BYTES
            in all. The total is checked before a result is copied: a short text may name a large result a thousand
            times.
    """
    return _resolved(tool_input, _Results(results))


def _resolved(tool_input: Any, results: _Results) -> Any:
    if isinstance(tool_input, Mapping):
        return {key: _resolved(item, results) for key, item in tool_input.items()}
    if isinstance(tool_input, (list, tuple)):
        return [_resolved(item, results) for item in tool_input]
    if not isinstance(tool_input, str):
        return tool_input
    whole = _REFERENCE.fullmatch(tool_input.strip())
    if whole is not None:
        return results.value_and_text(_read(whole))[0]
    return _REFERENCE.sub(lambda found: results.value_and_text(_read(found))[1], tool_input)


class _Results:
    """The results that one input refers to, with a limit on their total size."""

    def __init__(self, results: Mapping[int, Any]) -> None:
        self._results = results
        self._left = MAX_BYTES

    def value_and_text(self, wanted: Reference) -> tuple[Any, str]:
        value = _found(wanted, self._results)
        text = _plain(value)
        # A whole reference counts too: it may become a text later, see `fitted` and `as_text`.
        self._left -= len(text)
        if self._left < 0:
            raise InvalidArgument(
                f"the results in the input of a step must be at most {MAX_BYTES:,} characters together, got more at "
                f"{brief(wanted.text)}. Refer to fewer or smaller results"
            )
        return value, text


def fitted(given: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """A resolved input with text wherever these parameters, a JSON Schema, take nothing else: 42 becomes "42"."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    about = properties if isinstance(properties, Mapping) else {}
    return {name: as_text(value) if _is_text_only(about.get(name)) else value for name, value in given.items()}


def _is_text_only(schema: Any) -> bool:
    """Whether nothing but text fits, or null in its place."""
    if not isinstance(schema, Mapping):
        return False
    kinds, options = schema.get("type"), schema.get("anyOf")
    if kinds is None and isinstance(options, (list, tuple)):
        left = [each for each in options if each != {"type": "null"}]
        return bool(left) and all(map(_is_text_only, left))
    return kinds in ("string", ["string"], ["string", "null"], ["null", "string"])


def as_text(value: Any) -> Any:
    """The text that stands for a result: itself, or JSON of what is no text. None stays what it is."""
    return None if value is None else _plain(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _read(found: re.Match[str]) -> Reference:
    return Reference(int(found[1]), tuple(found[2].split(".")[1:]), found[0])


def _found(wanted: Reference, results: Mapping[int, Any]) -> Any:
    if wanted.step not in results:
        raise InvalidArgument(f"{brief(wanted.text)}: step {wanted.step} has no result")
    value = results[wanted.step]
    for name in wanted.path:
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, (list, tuple)) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            there = (
                f"there is {', '.join(map(repr, list(value)[:12]))}" if isinstance(value, Mapping) else "it has none"
            )
            raise InvalidArgument(
                f"{brief(wanted.text)}: the result of step {wanted.step} has no field {brief(name)}: {there}"
            )
    return value


def _is_index(name: str) -> bool:
    """Whether it is a number that a list may have as an index. int() raises ValueError for more than 4,300 digits."""
    return name.isdecimal() and len(name) <= _MOST_DIGITS


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        try:
            return encode(value)
        except UnserialisableResult:
            return str(value)
