"""Calls that a person must approve: the answers that fit, what they mean, and the condition of a tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

from .._core.json_schema import misfit
from .._core.validation import must

#: Whether a person must approve a call, or a function of its arguments and the context that decides.
Confirmation: TypeAlias = "bool | Callable[[dict[str, Any], Any], Any]"

#: The names under which an answer may contain the arguments that a person changed. A question shows the second name.
EDITS: Final = ("arguments", "tool_args")
UNREADABLE: Final = "the arguments in the answer cannot be read"
_TITLE: Final = "Answer about a call"
_FITS: Final = 'Known answers: true, false, {"approved": false, "reason": "…"}, {"approved": true, "arguments": {…}}.'
#: Keywords of JSON Schema that decide about properties which `properties` does not name.
_OPEN: Final = frozenset(
    {"$ref", "additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "unevaluatedProperties"}
)


class Decision(NamedTuple):
    """The decision of a person about a call.

    Attributes:
        rejection: Why the call is rejected; None if it is approved.
        arguments: The arguments with which it is approved; None for the arguments of the question.
    """

    rejection: str | None
    arguments: dict[str, Any] | None = None


def check_confirmation(subject: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is a bool or a function."""
    if not isinstance(value, bool) and not callable(value):
        raise must(f"{subject}: requires_confirmation", "be True, False or a function(arguments, ctx)", value)


def shown_confirmation(value: Confirmation) -> bool | str:
    """Return `requires_confirmation` as lists show it: a bool, or "conditional" for a function."""
    return value if isinstance(value, bool) else "conditional"


def answer_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema of the answers to a question about a call with these parameters."""
    edited = {"$ref": "#/$defs/arguments"}
    answer = {
        "type": "object",
        "properties": {"approved": {"type": "boolean"}, "reason": {"type": "string"}, **dict.fromkeys(EDITS, edited)},
        "required": ["approved"],
        "additionalProperties": False,
    }
    options = [{"type": "boolean"}, answer]
    return {"title": _TITLE, "anyOf": options, "$defs": {"arguments": _moved(_closed(parameters))}}


def misfit_of_answer(answer: Any, schema: Mapping[str, Any] | None) -> str | None:
    """Return why an answer does not fit a question with this schema, or None if it does.

    This is the only check of answers: before an answer is stored, and when the code of the run reads it.
    """
    if schema is None:
        return None
    wrong = misfit(answer, schema)
    if schema.get("title") != _TITLE:
        return wrong
    if wrong is None and isinstance(answer, Mapping) and all(name in answer for name in EDITS):
        wrong = f"$ must have only one of {' and '.join(map(repr, EDITS))}"  # nobody can know which is meant
    return None if wrong is None else f"{wrong}. {_FITS}"


def _closed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema without room for properties that it does not name, unless it says that there is."""
    schema = {"type": "object", **parameters}
    if "properties" in schema and _OPEN.isdisjoint(schema):
        schema["additionalProperties"] = False
    return schema


def _moved(schema: Any) -> Any:
    """Return a schema with references for its place inside the schema of the answer."""
    if isinstance(schema, Mapping):
        parts = cast("Mapping[str, Any]", schema)
        moved = {name: _moved(each) for name, each in parts.items()}
        reference = parts.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = f"#/$defs/arguments{reference[1:]}"
        return moved
    return [_moved(each) for each in schema] if isinstance(schema, list) else schema


def decision_of(answer: Any) -> Decision:
    """Return what a recorded answer means. An answer that an earlier release accepted may not fit the schema."""
    if not isinstance(answer, Mapping):
        return Decision(None if answer is True else "denied" if answer in (False, None) else str(answer))
    given = cast("Mapping[str, Any]", answer)
    if given.get("approved") is not True:
        return Decision(str(given.get("reason") or "denied"))
    edits = [given[name] for name in EDITS if name in given]
    if not edits:
        return Decision(None)
    if len(edits) > 1 or not isinstance(edits[0], Mapping):
        return Decision(UNREADABLE)
    return Decision(None, dict(cast("Mapping[str, Any]", edits[0])))
