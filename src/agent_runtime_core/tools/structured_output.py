"""Typed answers of a model: the schema that it gets, and the conversion of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .._core.codec.json import MAX_PARSED, encode, loads_strict
from .._core.json_schema import misfit, require_references
from ..errors import InvalidArgument, UnserialisableResult
from .annotations import schema_of, typed
from .json_in_text import json_texts, prose_of
from .names import INVALID_PART

#: The property that contains an answer whose schema is not that of an object.
RESULT: Final = "result"
_NOT_AT_THE_ROOT: Final = frozenset({"anyOf", "oneOf", "allOf", "enum", "const", "not", "$ref"})
#: A reference into a schema, except into its definitions, which stay at the root.
_ELSEWHERE: Final = re.compile(r"#$|#/(?!(\$defs|definitions)/)")
_DEFINITIONS: Final = ("$defs", "definitions", "$schema")


class Output:
    """The type of an answer: a dataclass, a TypedDict, any type with a JSON form, or a JSON Schema.

    If it is not an object, the model gets the schema of an object with the value in its property `result`, because
    providers accept no other schemas. Answers with and without that object are valid. The model client changes what
    else its provider does not accept.
    """

    def __init__(self, wanted: Any) -> None:
        self._type: Any = None if isinstance(wanted, Mapping) else wanted
        self._value_schema: dict[str, Any] = (
            dict(wanted) if isinstance(wanted, Mapping) else schema_of(wanted, "the output type")
        )
        require_references(self._value_schema, "output_type")
        self.schema: dict[str, Any]
        self.schema, self._wrapped = _as_object(self._value_schema)
        # Providers accept only such names of schemas.
        title = self._value_schema.get("title") or getattr(wanted, "__name__", "answer")
        name = INVALID_PART.sub("_", str(title))[:64]
        self.response_format: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": {"name": name or "answer", "schema": self.schema},
        }

    def problem(self, text: str) -> str | None:
        """Return why the text does not contain a value of the requested type, or None."""
        return self._find(text)[0]

    def values(self, text: str) -> tuple[Any, Any]:
        """Return the typed value and the plain JSON of a valid text."""
        plain = self._find(text)[1]
        return self._converted(plain), plain

    def repair(self, problem: str) -> str:
        """Return the message that asks the model to correct an invalid answer."""
        end = "" if problem.endswith(("?", ".")) else "."
        return (
            f"Your answer cannot be used: {problem}{end} Answer again with nothing but JSON that fits this schema: "
            f"{json.dumps(self.schema)}"
        )

    def _find(self, text: str) -> tuple[str | None, Any]:
        """Return None and the first JSON value in the text that has the type; otherwise the problem of the longest."""
        if len(text) > MAX_PARSED:
            return f"it must have at most {MAX_PARSED:,} characters, got {len(text):,}", None
        problems: list[tuple[int, str]] = []
        for texts in json_texts(text):
            values = _parsed(texts, problems)
            if self._wrapped:
                # First, because prose may contain values of many types, such as [1], but no such object.
                for size, value in values:
                    if isinstance(value, dict) and value.keys() == {RESULT}:
                        problem = self._problem_of(value[RESULT], f"$.{RESULT}")
                        if problem is None:
                            return None, value[RESULT]
                        problems.append((size + 1, problem))
            for size, value in values:
                problem = self._problem_of(value, "$")
                if problem is None:
                    return None, value
                problems.append((size, problem))
        # Models that ignore the schema answer with the bare word or text.
        prose = prose_of(text) if self._value_schema.get("type") == "string" else ""
        if prose and self._problem_of(prose, "$") is None:
            return None, prose
        return max(problems, key=lambda each: each[0])[1], None

    def _problem_of(self, found: Any, path: str) -> str | None:
        """Return why a JSON value does not have the requested type, or None."""
        mismatch = misfit(found, self._value_schema, path)
        if mismatch is not None:
            return mismatch
        try:
            self._converted(found)
        except (InvalidArgument, UnserialisableResult, TypeError, ValueError) as error:
            return str(error)
        try:
            encode([[found]])  # nested as in the result of a run
        except UnserialisableResult as error:
            return f"{error.path.replace('$[0][0]', path, 1)} is {error.reason}"
        return None

    def _converted(self, found: Any) -> Any:
        return found if self._type is None else typed(found, self._type)


def _parsed(texts: Sequence[str], problems: list[tuple[int, str]]) -> list[tuple[int, Any]]:
    """Return the value and the length of each text that is JSON; add the problem of the others."""
    values = []
    for text in texts:
        try:
            values.append((len(text), loads_strict(text)))
        except (ValueError, RecursionError) as error:
            problems.append((-1, f"invalid JSON: {error}"))
    return values


def _as_object(schema: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the schema of an object, and whether that is a new object with the value in its property `result`."""
    if schema.get("type") == "object" and _NOT_AT_THE_ROOT.isdisjoint(schema):
        return dict(schema), False
    inner = {name: each for name, each in schema.items() if name not in _DEFINITIONS}
    outer = {name: _moved(schema[name]) for name in _DEFINITIONS if name in schema}
    wrapped = {
        "type": "object",
        "properties": {RESULT: _moved(inner)},
        "required": [RESULT],
        "additionalProperties": False,
    }
    return wrapped | outer, True


def _moved(tree: Any) -> Any:
    """Return part of a schema with references to its former root changed to the new place."""
    if isinstance(tree, (list, tuple)):
        return [_moved(each) for each in tree]
    if not isinstance(tree, Mapping):
        return tree
    made = {name: _moved(each) for name, each in tree.items()}
    target = made.get("$ref")
    if isinstance(target, str) and _ELSEWHERE.match(target):
        made["$ref"] = f"#/properties/{RESULT}{target[1:]}"
    return made
