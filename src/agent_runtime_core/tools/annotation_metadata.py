"""Descriptions and bounds in the metadata of `Annotated` types: annotated-types, pydantic's Field, msgspec's Meta."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from .._core.validation import is_number

__all__ = ["FieldDefault", "field_default", "keywords_of"]

_NUMBERS: Final = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
_LENGTHS: Final = {"min_length": ("minLength", "minItems"), "max_length": ("maxLength", "maxItems")}
_DEEPEST: Final = 5  # metadata inside of metadata


class FieldDefault:
    """The default that `= Field(default=..., description=...)` gives to a parameter.

    Attributes:
        field: The object that was given as the default of the parameter.
        has_factory: Whether a function creates the default.
        required: Whether it names no default.
    """

    def __init__(self, field: Any) -> None:
        self.field = field
        default = getattr(field, "default", ...)
        self._factory = getattr(field, "default_factory", None)
        self.has_factory: bool = callable(self._factory)
        self._default = default
        # pydantic's name for no default; the library must not import it.
        missing = default is ... or type(default).__name__ == "PydanticUndefinedType"
        self.required: bool = missing and not self.has_factory

    def value(self) -> Any:
        """Return the default; a new one if a factory creates it."""
        return self._factory() if self._factory is not None and self.has_factory else self._default


def field_default(default: Any) -> FieldDefault | None:
    """Return the default inside an object like pydantic's `FieldInfo`, or None for any other default."""
    if isinstance(default, type) or not hasattr(default, "description"):
        return None
    if not (hasattr(default, "default") or hasattr(default, "default_factory")):
        return None
    return FieldDefault(default)


def keywords_of(metadata: Iterable[Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema keywords that the metadata of a type adds to its schema; unknown metadata adds none."""
    found: dict[str, Any] = {}
    kinds = _kinds(schema)
    for each in metadata:
        if isinstance(each, str):
            found.setdefault("description", each)
        elif not isinstance(each, type):
            found |= _of_object(each, kinds, _DEEPEST)
    return found


def _of_object(about: Any, kinds: set[str], depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nested = getattr(about, "metadata", None)
    if isinstance(nested, (list, tuple)) and depth:
        for each in nested:
            if not isinstance(each, (str, type)):
                found |= _of_object(each, kinds, depth - 1)
    for attribute, keyword in _NUMBERS.items():
        bound = getattr(about, attribute, None)
        if is_number(bound) and math.isfinite(bound):
            found[keyword] = bound
    for attribute, (of_text, of_items) in _LENGTHS.items():
        length = getattr(about, attribute, None)
        if isinstance(length, int) and not isinstance(length, bool):
            if "array" in kinds:
                found[of_items] = length
            if "array" not in kinds or "string" in kinds:
                found[of_text] = length
    pattern = getattr(about, "pattern", None)
    pattern = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if isinstance(pattern, str):
        found["pattern"] = pattern
    return found | _texts(about)


def _texts(about: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword, attributes in {"title": ("title",), "description": ("documentation", "description")}.items():
        for attribute in attributes:  # `documentation` is that of typing_extensions.Doc
            text = getattr(about, attribute, None)
            if isinstance(text, str) and text:
                found[keyword] = text
    examples = getattr(about, "examples", None)
    if isinstance(examples, (list, tuple)) and examples:
        found["examples"] = list(examples)
    return found


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    kinds = schema.get("type", ())
    found = {kinds} if isinstance(kinds, str) else set(kinds)
    for option in schema.get("anyOf", ()):
        found |= _kinds(option)
    return found
