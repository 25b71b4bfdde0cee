"""Validate values against JSON Schema: the keywords that people write by hand."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from ..errors import MissingDependency, brief
from .lazy_import import load
from .validation import Shown, must

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
_ALL: Final = frozenset(_TYPES)
_NESTED: Final = ("array", "object")
#: Schemas in each other whose types are read.
_MOST_ALTERNATIVES: Final = 16
_ABOUT_PLAIN: Final = frozenset({"type", "description", "title", "default"})
_ABOUT_PLAIN_OBJECT: Final = frozenset(
    {"type", "description", "title", "properties", "required", "additionalProperties"}
)
#: Keywords whose values are no schemas.
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
#: Keywords that are checked only with the package `jsonschema`.
_OTHERS: Final = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxProperties",
        "minProperties",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
#: What follows "must" for those that are common.
_CONSTRAINTS: Final = {
    "contains": "have an item that matches {}",
    "maxProperties": "have at most {} properties",
    "minProperties": "have at least {} properties",
    "not": "not match {}",
    "oneOf": "match only one schema in oneOf",
    "propertyNames": "have only property names that match {}",
}
#: Above this, several integers are read as the same float: 9007199254740993.0 is read as …992.
LARGEST_EXACT: Final = 2**53 - 1
#: Nested schemas. A schema that refers to itself would have no end.
_DEEPEST: Final = 400
_NEAREST: Final = 4
_MOST_NAMES: Final = 5
#: The subject of a message about all arguments of a call.
_ARGUMENTS: Final = "arguments"


def misfit(value: Any, schema: Mapping[str, Any], path: str = "$") -> str | None:
    """Return why `value` does not match `schema`, or None if it does.

    Checks type, enum, const, properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
    minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, minLength, maxLength, pattern, allOf, anyOf, oneOf
    (as anyOf) and a $ref into the schema itself (JSON Schema 2020-12). The package `jsonschema`, if it is installed,
    checks the other keywords. Without it they are ignored. A pattern that is not a regular expression of Python is
    always ignored.

    Args:
        value: The value.
        schema: The JSON Schema.
        path: How messages name the value.

    Examples:
        >>> from agent_runtime_core.schema import misfit
        >>> misfit({"n": 1}, {"type": "object", "properties": {"n": {"type": "integer"}}}) is None
        True
    """
    return next(misfits(value, schema, path), None)


def fits_plainly(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether an object matches a schema with only plain properties; False means that `misfits` must decide.

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
    """Yield each mismatch between `value` and `schema`, with its path. The path "" means the arguments of a call.

    Args:
        value: The value.
        schema: The JSON Schema.
        path: How messages name the value.
    """
    try:
        found = False
        for mismatch in _Check(schema).of(value, schema, path, 0):
            found = True
            yield mismatch
        if not found and _names_others(schema):
            yield from _misfits_of_others(value, schema, path)
    except RecursionError:
        yield f"{path or _ARGUMENTS} must be less deeply nested to be checked, got {_got(value)}"


def with_parsed_text(value: Any, schema: Mapping[str, Any], parse: Callable[[str], Any]) -> Any:
    """Return a value without JSON text where the schema allows an array or object and no text.

    Text is parsed at any depth. It stays as it is if `parse` returns a value of another type.
    """
    return _parsed(value, [schema], schema, parse)


def _parsed(value: Any, schemas: Sequence[Any], root: Mapping[str, Any], parse: Callable[[str], Any]) -> Any:
    """Return the parsed value; each of the schemas may apply to it."""
    if isinstance(value, str):
        allowed = frozenset[str]().union(*(_allowed(each, root) for each in schemas))
        if "string" in allowed or allowed.isdisjoint(_NESTED):
            return value
        parsed = parse(value)
        kind = next((name for name in _NESTED if isinstance(parsed, _TYPES[name])), None)
        if kind not in allowed:
            # Some models encode a value twice.
            return _parsed(parsed, schemas, root, parse) if isinstance(parsed, str) and parsed != value else value
        value = parsed
    if not isinstance(value, (dict, list)):
        return value
    parts = _alternatives_of(schemas, root)
    if isinstance(value, list):
        items = [_parsed(item, _schemas_of_item(parts, index), root, parse) for index, item in enumerate(value)]
        return items if items != value else value
    return {name: _parsed(item, _schemas_of_property(parts, name), root, parse) for name, item in value.items()}


def _allowed(schema: Any, root: Mapping[str, Any], within: tuple[Any, ...] = ()) -> frozenset[str]:
    """Return the types that a schema allows, and more of them where it refers to itself."""
    if schema is False:
        return frozenset()
    if not isinstance(schema, Mapping) or len(within) > _MOST_ALTERNATIVES:
        return _ALL
    kinds = schema.get("type")
    allowed = _ALL if kinds is None else frozenset([kinds] if isinstance(kinds, str) else kinds)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if values is not None:
            allowed &= {name for name in _TYPES if any(_is(value, name) for value in values)}
    reference = schema.get("$ref")
    if reference is not None and reference not in within:
        allowed &= _allowed(referred(root, reference), root, (*within, reference))
    for each in schema.get("allOf", ()):
        allowed &= _allowed(each, root, (*within, None))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            options = (_allowed(each, root, (*within, None)) for each in schema[keyword])
            allowed &= frozenset[str]().union(*options)
    return allowed


def _alternatives_of(schemas: Sequence[Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas with all that they refer to, combine or offer as alternatives."""
    found: dict[int, Mapping[str, Any]] = {}
    left = list(schemas)
    while left:
        each = left.pop()
        if not isinstance(each, Mapping) or id(each) in found:
            continue
        found[id(each)] = each
        left += [referred(root, each.get("$ref"))]
        left += [part for keyword in ("allOf", "anyOf", "oneOf") for part in each.get(keyword, ())]
    return list(found.values())


def _schemas_of_property(parts: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    absent = object()
    found = [part.get("properties", {}).get(name, part.get("additionalProperties", absent)) for part in parts]
    return [each for each in found if each is not absent]


def _schemas_of_item(parts: Sequence[Mapping[str, Any]], index: int) -> list[Any]:
    found = []
    for part in parts:
        first = part.get("prefixItems", ())
        if index < len(first):
            found.append(first[index])
        elif "items" in part:
            found.append(part["items"])
    return found


def choice(value: Any, choices: Sequence[Any]) -> int | None:
    """Return the index of the choice that equals `value`, or None. True does not equal 1.

    Args:
        value: The value.
        choices: The choices.

    Examples:
        >>> from agent_runtime_core.schema import choice
        >>> choice("b", ["a", "b"]), choice(True, [1])
        (1, None)
    """
    for index, each in enumerate(choices):
        if each == value and isinstance(each, bool) is isinstance(value, bool):
            return index
    return None


def require_references(schema: Any, where: str) -> None:
    """Raise InvalidArgument if a $ref in the schema names nothing in it; `where` is the subject of the message."""
    for reference in _references(schema):
        if referred(schema, reference) is None:
            fix = "Define it there: references to other documents are not followed"
            raise must(f"{where}: $ref", "name a part of the schema", Shown(repr(reference)), fix)


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each object in a schema, except those in values such as defaults. Not recursive: it may be deep."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, Mapping):
            yield part
            left.extend(each for name, each in part.items() if name not in _VALUES)
        elif isinstance(part, (list, tuple)):
            left.extend(part)


def _references(schema: Any) -> Iterator[str]:
    return (part["$ref"] for part in _parts(schema) if isinstance(part.get("$ref"), str))


def _names_others(schema: Any) -> bool:
    """Whether the schema contains a keyword that only `jsonschema` checks."""
    return _jsonschema() is not None and any(not _OTHERS.isdisjoint(part) for part in _parts(schema))


@functools.cache
def _jsonschema() -> Any:
    try:
        return load("jsonschema")
    except MissingDependency:
        return None


def _misfits_of_others(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    package = _jsonschema()
    # An empty registry, because the usual one requests references from the network.
    registry = load("referencing:Registry")()  # type: ignore[operator]
    kind = package.validators.validator_for(schema, default=package.Draft202012Validator)
    try:
        errors = list(islice(kind(schema, registry=registry).iter_errors(value), _NEAREST))
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - the schema is invalid, and is checked as far as it is understood
        return
    for found in errors:
        place = path
        for step in found.absolute_path:
            place = f"{place}[{step}]" if isinstance(step, int) else _inside(place, step)
        if found.validator == "uniqueItems":
            continue  # a parameter that is a set accepts equal items
        # The words of this module, if it knows the keyword: `then` may hold any.
        known = None
        if found.validator not in _OTHERS and isinstance(found.schema, Mapping):
            inner = {name: each for name, each in found.schema.items() if name not in _OTHERS and name != "$ref"}
            known = next(_Check(schema).of(found.instance, inner, place, 0), None)
        constraint = _CONSTRAINTS.get(found.validator, f"match {found.validator} {{}}").format(
            brief(found.validator_value)
        )
        yield known or f"{place or _ARGUMENTS} must {constraint}, got {_got(found.instance)}"


class _Check:
    """Checks one value against one schema; a $ref is resolved in `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        # Without these, alternatives in a schema that refers to itself would take time exponential in the depth.
        self._known: dict[tuple[int, int], bool] = {}
        self._explaining = False

    def of(self, value: Any, schema: Any, path: str, depth: int) -> Iterator[str]:
        if schema is False:
            yield f"{path or _ARGUMENTS} must be left out, got {_got(value)}"
        if not isinstance(schema, Mapping):
            return
        if depth > _DEEPEST:
            yield f"{path:.200} must be less deeply nested to be checked, got {_got(value)}"
            return
        if "$ref" in schema:
            if (target := referred(self._root, schema["$ref"])) is None:
                yield f"{path or _ARGUMENTS} cannot be checked: the schema does not contain {brief(schema['$ref'])}"
                return
            yield from self.of(value, target, path, depth + 1)
        kinds = schema.get("type")
        if kinds is not None and not _is(value, kinds):
            yield f"{path or _ARGUMENTS} must be {_a(kinds)}, got {_got(value)}"
            return
        if "const" in schema and choice(value, [schema["const"]]) is None:
            yield f"{path or _ARGUMENTS} must be {brief(schema['const'])}, got {_got(value)}"
        if "enum" in schema and choice(value, schema["enum"]) is None:
            yield f"{path or _ARGUMENTS} must be {_one_of(schema['enum'])}, got {_got(value)}"
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
        noun, where = ("property", f"{path}: ") if path else ("argument", "")
        missing = [name for name in schema.get("required", ()) if name not in value]
        for name in missing:
            wanted = _kinds(properties.get(name))
            yield f"{where}missing required {noun} {name!r}" + (f" ({wanted})" if wanted else "")
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
                # The names that are missing already say which names are known.
                yield f"{where}unexpected {noun} {brief(name)}{_near(name, properties, bool(missing))}"
            else:
                yield from self.of(value[name], others, _inside(path, name), depth)

    def _array(self, value: list[Any], schema: Mapping[str, Any], path: str, depth: int) -> Iterator[str]:
        least, most = schema.get("minItems"), schema.get("maxItems")
        if least is not None and len(value) < least:
            yield f"{path or _ARGUMENTS} must have at least {_count(least, 'item')}, got {len(value)}"
        if most is not None and len(value) > most:
            yield f"{path or _ARGUMENTS} must have at most {_count(most, 'item')}, got {len(value)}"
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
            wanted = " or ".join(map(_a, kinds))
            yield f"{path or _ARGUMENTS} must be {wanted}, got {_got(value)}"
        elif len(meant) == 1:
            yield from self.of(value, meant[0], path, depth)
        else:
            nearest = self._explanation(value, meant, path, depth)
            yield f"{path or _ARGUMENTS} must match a schema in {keyword}, got {_got(value)}{nearest}"

    def _explanation(self, value: Any, options: Sequence[Any], path: str, depth: int) -> str:
        """Return the mismatch with the most similar option."""
        if self._explaining or not options:
            return ""
        self._explaining = True
        found = [list(islice(self.of(value, option, path, depth), _NEAREST)) for option in options[:_NEAREST]]
        self._explaining = False
        return f" (nearest: {'; '.join(sorted(found, key=len)[0])})"

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
            option = referred(self._root, option["$ref"])
        kinds = option.get("type") if isinstance(option, Mapping) else None
        return kinds is None or _is(value, kinds)


def referred(root: Any, reference: Any) -> Any:
    """Return the schema that a $ref into `root` names: by its path, its $anchor or its $id; None if there is none."""
    if not isinstance(reference, str) or not isinstance(root, Mapping):
        return None
    document, _, fragment = reference.partition("#")
    place: Any = root if document in ("", root.get("$id")) else _named(root, "$id", document)
    if not fragment or fragment.startswith("/"):
        for step in fragment.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            place = _at(place, name)
        return place
    found = _named(place, "$anchor", unquote(fragment))
    return _named(place, "$dynamicAnchor", unquote(fragment)) if found is None else found


def _at(place: Any, name: str) -> Any:
    if isinstance(place, Mapping):
        return place.get(name)
    is_index = isinstance(place, (list, tuple)) and name.isdecimal() and int(name) < len(place)
    return place[int(name)] if is_index else None


def _named(root: Any, keyword: str, name: str) -> Any:
    return next((part for part in _parts(root) if part.get(keyword) == name), None)


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
        return _one_of(schema["enum"])
    kinds = schema.get("type", "")
    if kinds or "anyOf" not in schema:
        return kinds if isinstance(kinds, str) else " or ".join(kinds)
    options = [_kinds(option) for option in schema["anyOf"]]
    return " or ".join(options) if all(options) else ""


def _a(kinds: Any) -> str:
    """Return the names of JSON types with their articles."""
    if not isinstance(kinds, str):
        return " or ".join(map(_a, kinds))
    if kinds not in _TYPES or kinds == "null":
        return kinds
    return f"{'an' if kinds[0] in 'aio' else 'a'} {kinds}"


def _one_of(choices: Sequence[Any]) -> str:
    return brief(choices[0]) if len(choices) == 1 else f"one of {_listed(choices)}"


def _listed(values: Collection[Any]) -> str:
    more = f" and {len(values) - _MOST_NAMES} more" if len(values) > _MOST_NAMES else ""
    return ", ".join(map(brief, islice(values, _MOST_NAMES))) + more


def _count(number: Any, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _got(value: Any) -> str:
    return "an object" if isinstance(value, dict) else "an array" if isinstance(value, list) else brief(value)


def _inside(path: str, name: Any) -> str:
    if isinstance(name, str) and name.isidentifier() and len(name) <= 60:
        return f"{path}.{name}" if path else name
    return f"{path}[{brief(name)}]" if path else brief(name)


def _near(name: Any, known: Mapping[str, Any], only_similar: bool) -> str:
    # Cut off, because comparing takes quadratic time.
    near = difflib.get_close_matches(str(name)[:60], known, n=1)
    if near:
        return f". Did you mean {near[0]!r}?"
    return f" (known: {_listed(known)})" if known and not only_similar else ""


def _bounds(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    is_text = isinstance(value, str)
    if not is_text and (isinstance(value, bool) or not isinstance(value, (int, float))):
        return
    broken = _broken_length(value, schema) if is_text else _broken_range(value, schema)
    for constraint in broken:
        yield f"{path or _ARGUMENTS} must {constraint}, got {_got(value)}"


def _broken_length(value: str, schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = schema.get("minLength"), schema.get("maxLength")
    if isinstance(schema.get("pattern"), str) and not _matches(value, schema["pattern"]):
        yield f"match the pattern {schema['pattern']!r}"
    if low is not None and len(value) < low:
        yield f"have at least {_count(low, 'character')}"
    if high is not None and len(value) > high:
        yield f"have at most {_count(high, 'character')}"


def _broken_range(value: float, schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if above is not None and value <= above:
        yield f"be above {above}"
    if below is not None and value >= below:
        yield f"be below {below}"
    factor = schema.get("multipleOf")
    if factor is not None and not _is_multiple(value, factor):
        yield f"be a multiple of {factor}"
    if low is not None and value < low:
        yield f"be at least {low}"
    if high is not None and value > high:
        yield f"be at most {high}"


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


#: Keywords whose values are data, in which "$ref" means nothing.
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
#: Keywords whose value is a mapping of names to schemas. A name there may be the same as a keyword.
_NAMED: Final = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_DEFINITIONS: Final = "#/$defs/"


def hoisted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose inner `$defs` are moved to its root, where references look for them."""
    found: dict[str, Any] = {}
    moved = _without_definitions(schema, found)
    return {**moved, "$defs": found} if found else schema


def _without_definitions(tree: Any, found: dict[str, Any]) -> Any:
    if isinstance(tree, list):
        return [_without_definitions(each, found) for each in tree]
    if not isinstance(tree, dict):
        return tree
    definitions = tree.get("$defs")
    if isinstance(definitions, dict):
        names = _free_names(definitions, found)
        found |= {names[title]: _renamed(each, names) for title, each in definitions.items()}
        tree = _renamed({name: each for name, each in tree.items() if name != "$defs"}, names)
    made = {}
    for name, each in tree.items():
        if name in _NAMED and isinstance(each, dict):
            made[name] = {key: _without_definitions(item, found) for key, item in each.items()}
        else:
            made[name] = each if name in _DATA else _without_definitions(each, found)
    return made


def _free_names(definitions: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, str]:
    """Return names for more definitions: with a number if two different definitions share a name."""
    number = 1
    while True:
        names = {title: title if number == 1 else f"{title}_{number}" for title in definitions}
        if all(found.get(names[title]) in (None, _renamed(each, names)) for title, each in definitions.items()):
            return names
        number += 1


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    """Return part of a schema with the new names of the definitions to which it refers."""
    if isinstance(tree, list):
        return [_renamed(each, names) for each in tree]
    if not isinstance(tree, dict):
        return tree
    made = {name: each if name in _DATA else _renamed(each, names) for name, each in tree.items()}
    reference = tree.get("$ref")
    if isinstance(reference, str) and reference.removeprefix(_DEFINITIONS) in names:
        made["$ref"] = _DEFINITIONS + names[reference.removeprefix(_DEFINITIONS)]
    if isinstance(about := made.get("discriminator"), dict) and isinstance(mapping := about.get("mapping"), dict):
        to = {key: f"{_DEFINITIONS}{names.get(each.removeprefix(_DEFINITIONS), '')}" for key, each in mapping.items()}
        made["discriminator"] = {**about, "mapping": to}
    return made
