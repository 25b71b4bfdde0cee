"""Typed answers of a model: the schema that it gets, and the conversion of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .._core.codec.json import MAX_PARSED, encode, loads_strict
from .._core.json_schema import misfit
from ..errors import InvalidArgument, UnserialisableResult
from .annotations import schema_of, typed

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_-]+")


class Output:
    """The type of an answer: a dataclass, a TypedDict, any type with a JSON form, or a JSON Schema."""

    def __init__(self, wanted: Any) -> None:
        self._type: Any = None if isinstance(wanted, Mapping) else wanted
        self.schema: dict[str, Any] = (
            dict(wanted) if isinstance(wanted, Mapping) else schema_of(wanted, "the output type", ())
        )
        # Providers accept only such names of schemas.
        name = _NOT_IN_A_NAME.sub("_", str(self.schema.get("title") or getattr(wanted, "__name__", "answer")))[:64]
        self.response_format: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": {"name": name or "answer", "schema": self.schema},
        }

    def problem(self, text: str) -> str | None:
        """Return why the text does not have the requested type, or None."""
        if len(text) > MAX_PARSED:
            return f"it has {len(text):,} characters, the maximum is {MAX_PARSED:,}"
        try:
            found = _read(text)
        except (ValueError, RecursionError) as error:
            return f"it is not JSON ({error})"
        mismatch = misfit(found, self.schema)
        if mismatch is not None:
            return mismatch
        try:
            self._converted(found)
        except (InvalidArgument, UnserialisableResult, TypeError, ValueError) as error:
            return str(error)
        try:
            encode([[found]])  # nested as in the result of a run
        except UnserialisableResult as error:
            return f"{error.path.replace('$[0][0]', '$', 1)} is {error.reason}"
        return None

    def values(self, text: str) -> tuple[Any, Any]:
        """Return the typed value and the plain JSON of a valid text."""
        found = _read(text)
        return self._converted(found), found

    def _converted(self, found: Any) -> Any:
        return found if self._type is None else typed(found, self._type)

    def repair(self, problem: str) -> str:
        """Return the message that asks the model to correct an invalid answer."""
        return (
            f"Your answer cannot be used: {problem}. Answer again with nothing but JSON that fits this schema: "
            f"{json.dumps(self.schema)}"
        )


def _read(text: str) -> Any:
    return loads_strict(_without_fence(text))


def _without_fence(text: str) -> str:
    """Return the text without the code fence that models often put around JSON."""
    text = text.strip()
    if text.startswith("```") and text.endswith("```"):
        text = text[3:-3].strip()
        text = text[4:].strip() if text[:4].lower() == "json" else text
    return text
