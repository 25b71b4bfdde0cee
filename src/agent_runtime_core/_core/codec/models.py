"""Models of pydantic as plain JSON and back.

The usual form is what pydantic writes: a dict of the fields by name. It is only used if pydantic reads an identical
value from it. Otherwise (a validator that changes its own result, a private attribute, a field left out of the JSON)
the state of the model is stored field by field, and is restored without validators, as a copy of a model is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ..pydantic_types import adapter_of, from_json, is_model, reason_of
from ..validation import Path, descend, not_encodable, type_name
from .json import loads_strict
from .tagged import ModelState, Turn
from .type_hints import hints_of

_MISSING: Final = object()
_BY_NAME: Final = {"by_alias": False, "by_name": True}
_SCALARS: Final = frozenset({bool, int, float, str, type(None)})
TurnOf = Callable[[Any], Turn]


def model_to_json(annotation: Any, value: Any, at: Path | None, turn_of: TurnOf) -> Any:
    """Return the JSON form of a value, from which `model_from_json` makes an identical value.

    Args:
        annotation: The annotation of the value.
        value: The value.
        at: Where it is.
        turn_of: Returns the conversion of a field, by its annotation.

    Raises:
        UnserialisableResult: There is no such form.
    """
    try:
        text = adapter_of(annotation).dump_json(value, by_alias=False, round_trip=True, warnings="error")
        tree = loads_strict(text.decode())
        found = _difference(value, from_json(annotation, tree, **_BY_NAME), "")
    except Exception as error:  # noqa: BLE001 - validators and serializers are the user's
        found = reason_of(error)
    else:
        if found is None:
            return tree
        found = f"pydantic reads another value from its JSON ({found})"
    if is_model(annotation) and type(value) is annotation:
        return _state_of(value, at, turn_of)
    out = " or register_type() the model" if is_model(type(value)) else ""
    raise not_encodable(at, f"{type_name(type(value))} is not JSON-serializable: {found}. Correct the annotation{out}")


def model_from_json(annotation: Any, tree: Any, at: Path | None, turn_of: TurnOf, by_name: bool) -> Any:
    """Return the value that `model_to_json` converted, or with `by_name` False the value of JSON with aliases.

    Raises:
        UnserialisableResult: The JSON does not fit the annotation.
    """
    if type(tree) is ModelState and is_model(annotation):
        return _restored(annotation, tree, at, turn_of)
    try:
        return from_json(annotation, tree, **(_BY_NAME if by_name else {}))
    except Exception as error:  # validators are the user's
        name = getattr(annotation, "__name__", str(annotation))
        raise not_encodable(at, f"not a valid {name}: {reason_of(error)}") from error


def _turns(cls: Any, turn_of: TurnOf) -> dict[str, Turn]:
    """Return the conversion of each field and private attribute."""
    private = {name: hint for name, hint in hints_of(cls).items() if name in cls.__private_attributes__}
    fields = {name: field.annotation for name, field in cls.__pydantic_fields__.items()}
    return {name: turn_of(annotation) for name, annotation in (private | fields).items()}


def _state_of(value: Any, at: Path | None, turn_of: TurnOf) -> ModelState:
    state, turns, here = value.__getstate__(), _turns(type(value), turn_of), descend(at, value)

    def converted(part: Mapping[str, Any] | None) -> dict[str, Any]:
        made = {}
        for name, item in (part or {}).items():
            here.step = name
            made[name] = turns[name](item, here, False) if name in turns else item
        return made

    # What functools.cached_property keeps beside the fields is computed again.
    fields = {name: item for name, item in state["__dict__"].items() if name in type(value).__pydantic_fields__}
    extra, private = state["__pydantic_extra__"], state["__pydantic_private__"]
    given = sorted(state["__pydantic_fields_set__"])
    return ModelState(converted(fields), dict(extra or {}), converted(private), given)


def _restored(cls: Any, stored: ModelState, at: Path | None, turn_of: TurnOf) -> Any:
    turns, here = _turns(cls, turn_of), descend(at, stored)

    def converted(part: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        made = {}
        for here.step, about in known.items():
            name = here.step
            if name in part:
                made[name] = turns[name](part[name], here, True) if name in turns else part[name]
            elif (default := _default(about)) is not _MISSING:
                made[name] = default
            elif known is cls.__pydantic_fields__:
                why = f"{cls.__name__} needs {name!r}, which is missing. Add it, or give the field a default"
                raise not_encodable(at, why)
        return made

    fields = converted(stored.fields, cls.__pydantic_fields__)
    private = converted(stored.private, cls.__private_attributes__)
    model = cls.__new__(cls)
    model.__setstate__(
        {
            "__dict__": fields,
            "__pydantic_extra__": dict(stored.extra) if cls.model_config.get("extra") == "allow" else None,
            "__pydantic_fields_set__": set(stored.given) & (fields.keys() | stored.extra.keys()),
            "__pydantic_private__": private if cls.__private_attributes__ else None,
        }
    )
    return model


def _default(about: Any) -> Any:
    """Return the default of a field or private attribute that was added after the value was stored."""
    try:
        found = (
            about.get_default(call_default_factory=True, validated_data={})
            if hasattr(about, "annotation")
            else (about.get_default())
        )
    except Exception:  # noqa: BLE001 - the factory is the user's
        return _MISSING
    return _MISSING if type(found).__name__ == "PydanticUndefinedType" else found


def _difference(one: Any, two: Any, path: str) -> str | None:
    """Return the first difference between two values and their types; None if they are identical."""
    kind = type(one)
    if kind is not type(two):
        return f"{path or '$'}: {kind.__name__} is read as {type(two).__name__}"
    if kind in _SCALARS:
        return None if one == two else f"{path or '$'} differs"
    if is_model(kind):
        fields = kind.__pydantic_fields__
        names = {name: (vars(one).get(name), vars(two).get(name)) for name in fields}
        for part in ("__pydantic_extra__", "__pydantic_private__"):
            if found := _difference(getattr(one, part), getattr(two, part), path):
                return found
        return _first_of(names.items(), path)
    if dataclasses.is_dataclass(kind):
        every = [field.name for field in dataclasses.fields(kind)]
        return _first_of(((name, (getattr(one, name, None), getattr(two, name, None))) for name in every), path)
    if isinstance(one, dict) and list(one) == list(two):
        return _first_of(((key, (one[key], two[key])) for key in one), path)
    if isinstance(one, (list, tuple)) and len(one) == len(two):
        return _first_of(((index, pair) for index, pair in enumerate(zip(one, two, strict=True))), path)
    return None if one == two else f"{path or '$'} differs"


def _first_of(pairs: Iterable[tuple[Any, tuple[Any, Any]]], path: str) -> str | None:
    for name, (one, two) in pairs:
        # Most values are equal scalars, for which this is many times faster.
        if type(one) is type(two) and type(one) in _SCALARS and one == two:
            continue
        if (found := _difference(one, two, f"{path}.{name}" if path else str(name))) is not None:
            return found
    return None
