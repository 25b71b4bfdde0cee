"""References to results of earlier steps in a plan: `{{step_1.result}}`, `{{step_1.result.items.0}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from .._core.codec.json import MAX_BYTES, encode
from .._core.validation import Shown, must, unknown
from ..errors import InvalidArgument, UnserialisableResult, brief

_REFERENCE: Final = re.compile(r"\{\{\s*step_([0-9]{1,9})\.result((?:\.[A-Za-z0-9_-]+)*)\s*\}\}")
_MOST_DIGITS: Final = 18  # of an index: no list is long enough for more
_LIKE_REFERENCE: Final = re.compile(r"\{\{[^{}]*\}\}")


class Reference(NamedTuple):
    """A reference to the result of a step, or to the value at `path` in it. `text` is the reference as written."""

    step: int
    path: tuple[str, ...]
    text: str


def reference(step: int, *path: str | int) -> str:
    """Return the text of a reference for a tool_input."""
    return "{{" + ".".join((f"step_{step}", "result", *map(str, path))) + "}}"


def references(value: Any) -> Iterator[Reference]:
    """Yield all references in a tool_input."""
    for text in _texts(value):
        for found in _REFERENCE.finditer(text):
            yield _read(found)


def malformed(value: Any) -> Iterator[str]:
    """Yield texts that look like references but are not valid references."""
    for text in _texts(value):
        for found in _LIKE_REFERENCE.finditer(text):
            if "step" in found[0].lower() and _REFERENCE.fullmatch(found[0]) is None:
                yield found[0]


def is_reference(value: Any) -> bool:
    """Return whether a value is one whole reference, which `resolve` replaces by the result itself, of any type."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value.strip()) is not None


def resolve(tool_input: Any, results: Mapping[int, Any]) -> Any:
    """Return a copy of the input with references replaced by results.

    A string that is one whole reference becomes the result itself. Inside a longer string, a reference becomes the
    result if that is a string, else its JSON text.

    Args:
        tool_input: The input, with references.
        results: The results by step number.

    Raises:
        InvalidArgument: There is no result of a step, no such field in its result, or the results are larger than
            MAX_BYTES in all. The total is checked before a result is copied: a short text may name a large result a
            thousand times.

    Examples:
        >>> from agent_runtime_core.planning import resolve
        >>> resolve({"a": "{{step_1.result}}", "text": "got {{step_1.result}}"}, {1: 7})
        {'a': 7, 'text': 'got 7'}
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

    def value_and_text(self, target: Reference) -> tuple[Any, str]:
        value = _lookup(target, self._results)
        text = _to_text(value)
        # A whole reference counts too: it may become a text later, see `with_text_values` and `as_text`.
        self._left -= len(text)
        if self._left < 0:
            raise must(
                "the results in the input of a step",
                f"have at most {MAX_BYTES:,} characters together",
                Shown(f"more at {brief(target.text)}"),
                "Refer to fewer or smaller results",
            )
        return value, text


def with_text_values(given: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    """Return resolved arguments, as text where the JSON Schema `parameters` accepts only text: 42 becomes "42"."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    return {name: as_text(value) if _is_text_only(schemas.get(name)) else value for name, value in given.items()}


def _is_text_only(schema: Any) -> bool:
    """Return whether a schema accepts only strings, or strings and null."""
    if not isinstance(schema, Mapping):
        return False
    kinds, options = schema.get("type"), schema.get("anyOf")
    if kinds is None and isinstance(options, (list, tuple)):
        left = [each for each in options if each != {"type": "null"}]
        return bool(left) and all(map(_is_text_only, left))
    return kinds in ("string", ["string"], ["string", "null"], ["null", "string"])


def as_text(value: Any) -> Any:
    """Return a result as text: a string unchanged, other values as JSON, None as None."""
    return None if value is None else _to_text(value)


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


def _lookup(target: Reference, results: Mapping[int, Any]) -> Any:
    if target.step not in results:
        steps = ", ".join(map(str, sorted(results)[:5])) or "none"
        got = Shown(f"step {target.step}")
        raise must(brief(target.text), "refer to a step with a result", got, f"Steps with a result: {steps}")
    value = results[target.step]
    for name in target.path:
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, (list, tuple)) and _is_index(name) and int(name) < len(value):
            value = value[int(name)]
        else:
            names = map(
                str, value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list) else ()
            )
            raise InvalidArgument(f"{brief(target.text)}: {unknown('field', name, names)}")
    return value


def _is_index(name: str) -> bool:
    """Return whether a name may be the index of a list. int() raises ValueError for more than 4,300 digits."""
    return name.isdecimal() and len(name) <= _MOST_DIGITS


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        try:
            return encode(value)
        except UnserialisableResult:
            return str(value)
