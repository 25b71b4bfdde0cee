"""Validate values against JSON Schema: the keywords that people write by hand."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from ..errors import brief

_TYPES: Final[Mapping[str, Any]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}
SCALARS: Final = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ABOUT_PLAIN: Final = frozenset({"type", "description", "title", "default"})
_ABOUT_PLAIN_OBJECT: Final = frozenset(
    {"type", "description", "title", "properties", "required", "additionalProperties"}
)
#: Above this, several integers are read as the same float: 9007199254740993.0 is read as …992.
LARGEST_EXACT: Final = 2**53 - 1
#: Nested schemas. A schema that refers to itself would have no end.
_DEEPEST: Final = 400
_NEAREST: Final = 4


def misfit(value: Any, schema: Mapping[str, Any], path: str = "$") -> str | None:
    """Return why `value` does not match `schema`, or None if it does.

    Checks type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
    minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, minLength, maxLength, pattern, allOf, anyOf, oneOf
    (as anyOf) and a $ref into the schema itself (JSON Schema 2020-12). Other keywords are ignored, and so is a pattern
    that is not a regular expression of Python.
    """
    return next(misfits(value, schema, path), None)


def fits_plainly(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether an object matches a schema that has only plain properties; False means that `misfits` must decide.

    The arguments of most tools have such a schema, and `misfits` takes ten times as long for them.
    """
    properties = schema.get("properties")
    if type(value) is not dict or schema.get("type") != "object" or not isinstance(properties, dict):
        return False
    if not _ABOUT_PLAIN_OBJECT.issuperset(schema):
        return False
    for name, item in value.items():
        each = properties.get(name)
        if type(each) is not dict or not _ABOUT_PLAIN.issuperset(each) or each.get("type") != SCALARS.get(type(item)):
            return False
    for name in schema.get("required", ()):  # noqa: SIM110 - all() of a generator takes as long as all of the above
        if name not in value:
            return False
    return True


def misfits(value: Any, schema: Mapping[str, Any], path: str = "$") -> Iterator[str]:
    """Yield each mismatch between `value` and `schema`, with its path."""
    try:
        yield from _Check(schema).of(value, schema, path, 0)
    except RecursionError:
        yield f"{path} is nested too deeply to be checked"


def choice(value: Any, choices: Sequence[Any]) -> int | None:
    """Return the index of the choice that equals `value`, or None. True does not equal 1."""
    for index, each in enumerate(choices):
        if each == value and isinstance(each, bool) is isinstance(value, bool):
            return index
    return None


class _Check:
    """Checks one value against one schema; a $ref is resolved in `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # Without these, alternatives in a schema that refers to itself would take time exponential in the depth.
        self._known: dict[tuple[int, int], bool] = {}
        self._explaining = False

    def of(self, value: Any, schema: Any, path: str, depth: int) -> Iterator[str]:
        if schema is False:
            yield f"{path} is there, the schema wants nothing there"
        if not isinstance(schema, Mapping):
            return
        if depth > _DEEPEST:
            yield f"{path:.200} is nested too deeply to be checked"
            return
        if "$ref" in schema:
            yield from self.of(value, self._referred(schema["$ref"]), path, depth + 1)
        kinds = schema.get("type")
        if kinds is not None and not _is(value, kinds):
            yield f"{path} is {type(value).__name__}, the schema wants {kinds}"
            return
        if "const" in schema and choice(value, [schema["const"]]) is None:
            yield f"{path} is {brief(value)}, the schema wants {schema['const']!r}"
        if "enum" in schema and choice(value, schema["enum"]) is None:
            yield f"{path} is {brief(value)}, the schema wants one of {schema['enum']!r}"
        for each in schema.get("allOf", ()):
            yield from self.of(value, each, path, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                yield from self._alternatives(value, schema[keyword], keyword, path, depth + 1)
        if isinstance(value, dict):
            yield from self._object(value, schema, path, depth + 1)
        elif isinstance(value, list):
            yield from self._array(value, schema, path, depth + 1)
        else:
            yield from _bounds(value, schema, path)

    def _object(self, value: dict[Any, Any], schema: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        properties: Mapping[str, Any] = schema.get("properties", {})
        for name in schema.get("required", ()):
            if name not in value:
                wanted = _kinds(properties.get(name))
                yield f"{path} lacks {name!r}" + (f", the schema wants {wanted} there" if wanted else "")
        for name, each in properties.items():
            if name in value:
                yield from self.of(value[name], each, _inside(path, name), depth)
        others = schema.get("additionalProperties", True)
        if others is True:
            return
        for name in value:
            if name in properties:
                continue
            if others is False:
                yield f"{path} has {brief(name)}, which the schema does not know{_near(name, properties)}"
            else:
                yield from self.of(value[name], others, _inside(path, name), depth)

    def _array(self, value: list[Any], schema: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        least, most = schema.get("minItems"), schema.get("maxItems")
        if least is not None and len(value) < least:
            yield f"{path} has {len(value)} items, the schema wants at least {least}"
        if most is not None and len(value) > most:
            yield f"{path} has {len(value)} items, the schema wants at most {most}"
        first = schema.get("prefixItems", ())
        for index, item in enumerate(value):
            each = first[index] if index < len(first) else schema.get("items", True)
            yield from self.of(item, each, f"{path}[{index}]", depth)

    def _alternatives(self, value: Any, options: Sequence[Any], keyword: str, path: str, depth: int) -> Iterator[str]:
        if any(self._fits(value, option, depth) for option in options):
            return
        meant = [option for option in options if self._may_mean(value, option)]
        kinds = [_kinds(option) for option in options]
        if not meant and all(kinds):
            yield f"{path} is {type(value).__name__}, the schema wants {' or '.join(kinds)}"
        elif len(meant) == 1:
            yield from self.of(value, meant[0], path, depth)
        else:
            yield f"{path} fits none of the schemas in {keyword}{self._explanation(value, meant, path, depth)}"

    def _explanation(self, value: Any, options: Sequence[Any], path: str, depth: int) -> str:
        """Return the mismatch with the most similar option."""
        if self._explaining or not options:
            return ""
        self._explaining = True
        found = [list(islice(self.of(value, option, path, depth), _NEAREST)) for option in options[:_NEAREST]]
        self._explaining = False
        return f": {'; '.join(sorted(found, key=len)[0])}"

    def _fits(self, value: Any, schema: Any, depth: int) -> bool:
        key = (id(value), id(schema))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = next(self.of(value, schema, "$", depth), None) is None
        return known

    def _may_mean(self, value: Any, option: Any) -> bool:
        for _ in range(_NEAREST):
            if not isinstance(option, Mapping) or "$ref" not in option:
                break
            option = self._referred(option["$ref"])
        kinds = option.get("type") if isinstance(option, Mapping) else None
        return kinds is None or _is(value, kinds)

    def _referred(self, reference: Any) -> Any:
        """Return the schema that a $ref names; True if it is not in the root schema."""
        found = referred(self._root, reference)
        return True if found is None else found


def referred(root: Any, reference: Any) -> Any:
    """Return the schema that a $ref into `root` names, or None."""
    place: Any = root
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference[1:].split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _is(value: Any, kinds: Any) -> bool:
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, float) and "integer" in kinds and value.is_integer() and abs(value) <= LARGEST_EXACT:
        return True
    return any(isinstance(value, _TYPES[kind]) for kind in kinds if kind in _TYPES)


def _kinds(schema: Any) -> str:
    """Return a short description of what a schema requires; empty if it requires nothing."""
    if not isinstance(schema, Mapping):
        return ""
    if "enum" in schema:
        return f"one of {schema['enum']!r}"
    kinds = schema.get("type", "")
    if kinds or "anyOf" not in schema:
        return kinds if isinstance(kinds, str) else " or ".join(kinds)
    options = [_kinds(option) for option in schema["anyOf"]]
    return " or ".join(options) if all(options) else ""


def _inside(path: str, name: Any) -> str:
    return (
        f"{path}.{name}"
        if isinstance(name, str) and name.isidentifier() and len(name) <= 60
        else f"{path}[{brief(name)}]"
    )


def _near(name: Any, known: Mapping[str, Any]) -> str:
    # Cut off, because comparing takes quadratic time.
    near = difflib.get_close_matches(str(name)[:60], known, n=1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": it knows {', '.join(map(repr, islice(known, 20)))}" if known else ""


def _bounds(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    size, low, high = value, schema.get("minimum"), schema.get("maximum")
    if isinstance(value, str):
        size, low, high = len(value), schema.get("minLength"), schema.get("maxLength")
        if isinstance(schema.get("pattern"), str) and not _matches(value, schema["pattern"]):
            yield f"{path} is {brief(value)}, which does not match the pattern {schema['pattern']!r}"
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    else:
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        if above is not None and value <= above:
            yield f"{path} is {brief(value)}, not above {above}"
        if below is not None and value >= below:
            yield f"{path} is {brief(value)}, not below {below}"
        factor = schema.get("multipleOf")
        if factor is not None and not _is_multiple(value, factor):
            yield f"{path} is {brief(value)}, not a multiple of {factor}"
    if low is not None and size < low:
        yield f"{path} is {brief(value)}, below {low}"
    if high is not None and size > high:
        yield f"{path} is {brief(value)}, above {high}"


def _matches(value: str, pattern: str) -> bool:
    try:
        return re.search(pattern, value) is not None
    except re.error:
        return True


def _is_multiple(value: float, factor: float) -> bool:
    if isinstance(value, int) and isinstance(factor, int):
        return not factor or value % factor == 0
    try:
        quotient = value / factor
        # 0.3 / 0.1 is 2.9999999999999996.
        return math.isclose(quotient, round(quotient), rel_tol=1e-9, abs_tol=1e-9)
    except (OverflowError, ValueError, ZeroDivisionError):
        return True
