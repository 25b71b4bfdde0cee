"""Move definitions of inner schemas to the root, where references look for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Keywords whose values are data, in which "$ref" means nothing.
_DATA: Final = frozenset({"const", "default", "enum", "examples"})
#: Keywords whose value is a mapping of names, which may be those of keywords, to schemas.
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
    """Return the names of definitions beside those found: with a number if two different ones have the same name."""
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
