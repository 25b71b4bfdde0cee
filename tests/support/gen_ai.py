"""The published JSON schemas of the GenAI conventions, as validators of the attributes of spans."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agent_runtime_core._core.lazy_import import load

SCHEMAS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("gen_ai_schemas.json").read_text())


@cache
def _validators(name: str) -> list[Any]:
    """Return the published schema, and one in which a part of a known type must have the fields of that type.

    The published schemas accept any part with a `type`, so a text without `content` would pass.
    """
    schema = copy.deepcopy(SCHEMAS[name])
    if "GenericPart" in schema["$defs"]:
        types = [
            each["properties"]["type"] for each in schema["$defs"].values() if "type" in each.get("properties", {})
        ]
        known = [each["const"] for each in types if "const" in each]
        schema["$defs"]["GenericPart"]["properties"]["type"]["not"] = {"enum": known}
    make: Any = load("jsonschema:Draft202012Validator")
    return [make(SCHEMAS[name]), make(schema)]


def validated(name: str, text: str) -> Any:
    """Return the value of an attribute, which must follow its schema."""
    value = json.loads(text)
    for validator in _validators(name):
        validator.validate(value)
    for each in value:
        if name == "gen_ai.output.messages":  # version 1.41 of the conventions requires it
            assert isinstance(each["finish_reason"], str)
        for part in each.get("parts", [each]):
            assert part.get("id", "") is not None  # some versions of the schema have no null
    return value


def messages_in(attributes: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and the validated values of the attributes that have a schema."""
    for name in SCHEMAS:
        if attributes.get(name) is not None:
            yield name, validated(name, attributes[name])
