"""The dataclasses, Enums and tuples that an annotation names, as plain JSON and back."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections import abc
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar

from ._hints import hints_of
from ._json import MAX_BYTES, MAX_RESULT, decode, encode, encode_step_result
from ._refusals import At, a_kind, inside, refused, short
from ._tags import DICTS, NOT_STORED, REGISTRY, Turn
from .errors import InvalidArgument, UnserialisableResult, brief

_MISSING: Final = dataclasses.MISSING
_C = TypeVar("_C", bound=type)


class _Form(NamedTuple):
    """What an annotation adds to encode() and decode(); `shapes` says that they alone would not do."""

    turn: Turn
    shapes: bool = True


def convert(value: object, annotation: object) -> object:
    """The dataclasses, Enums and tuples that the annotation names, from plain JSON.

    An Enum is read by name, then by value. Raises UnserialisableResult where the two do not agree. Leaves are not
    looked at, and keys that are no field of a dataclass are passed over.
    """
    return form_of(annotation).turn(value, None, True)


def codec_for(
    annotation: object | None, max_bytes: int = MAX_RESULT
) -> tuple[Callable[[object], str], Callable[[str], object]]:
    """(encode, decode) for results of that annotation and that size; decode() itself where it adds nothing to it."""
    write: Callable[[object], str] = encode_step_result
    if max_bytes != MAX_RESULT:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or not 0 < max_bytes <= MAX_BYTES:
            raise InvalidArgument(f"max_result_bytes is a number of 1 to {MAX_BYTES:,} bytes, not {brief(max_bytes)}")
        write = partial(encode, max_bytes=max_bytes, exact=True)
    if isinstance(annotation, str):
        raise InvalidArgument(f"the annotation {short(annotation)} is text: pass the type itself")
    turn, shapes = form_of(annotation)
    if not shapes:
        return write, decode
    return lambda value: write(turn(value, None, False)), lambda text: turn(decode(text), None, True)


def register_type(cls: _C) -> _C:
    """Register a dataclass or an Enum, so that results may hold its values anywhere. Also a decorator.

    The class is stored by its name, `module.qualname`. A later definition of the same name replaces it, as when a
    notebook cell runs again or a module is reloaded; stored values are decoded into the newest definition. A process
    that reads such a result must have registered the class too: the library imports nothing by name.

    Args:
        cls: The class.

    Returns:
        The class.

    Raises:
        InvalidArgument: It is no dataclass or Enum class, or cannot be rebuilt from its fields.
    """
    given: object = cls
    if not _registrable(given):
        raise InvalidArgument(f"register_type takes a dataclass or an Enum class, not {brief(given)}")
    REGISTRY.add(given, f"{given.__module__}.{given.__qualname__}", form_of(given).turn)
    return cls


def _registrable(given: object) -> TypeGuard[type]:
    return isinstance(given, type) and (dataclasses.is_dataclass(given) or issubclass(given, enum.Enum))


_SEQUENCES: Final = {list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable}
_MAPPINGS: Final = {dict, abc.Mapping, abc.MutableMapping}
_WRAPPERS: Final = {typing.Annotated, typing.Final, typing.Required, typing.NotRequired}


def form_of(annotation: Any) -> _Form:
    try:
        return _known_form(annotation)
    except TypeError:  # unhashable, as Literal and Annotated may be
        return _build_form(annotation)


@lru_cache(maxsize=1024)
def _known_form(annotation: Any) -> _Form:
    return _build_form(annotation)


def _build_form(annotation: Any) -> _Form:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, typing.NewType):
        return form_of(annotation.__supertype__)
    if origin is None and hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):
        return _Form(partial(_turn_alias, annotation))
    if origin in _WRAPPERS:
        return form_of(args[0])
    if origin is typing.Union or origin is types.UnionType:
        return _union([arg for arg in args if arg is not type(None)])
    cls = annotation if origin is None else origin
    if not isinstance(cls, type):
        return _LEAF
    if typing.is_typeddict(cls):
        return _Form(partial(_turn_keys, cls, _same))
    if dataclasses.is_dataclass(cls):
        _constructible(cls)
        return _Form(partial(_turn_fields, cls))
    if issubclass(cls, enum.Enum):
        return _Form(partial(_turn_member, cls))
    return _container(cls, args)


def _union(members: list[Any]) -> _Form:
    forms = [form_of(member) for member in members]
    if len(forms) == 1 or not any(form.shapes for form in forms):
        return forms[0] if len(forms) == 1 else _LEAF
    said = " | ".join(getattr(member, "__name__", str(member)) for member in members)
    named = [f"register_type({member.__name__})" for member in members if _registrable(member)]
    out = f"annotate Any, and {' and '.join(named) or 'register_type the dataclasses and Enums in it'}"
    return _Form(partial(_turn_union, [form.turn for form in forms], said, out))


def _container(cls: type, args: tuple[Any, ...]) -> _Form:
    fixed = cls is tuple and len(args) > 0 and args[-1] is not ...
    item = form_of(args[-1 if cls in _MAPPINGS else 0]) if args and not fixed else _LEAF
    if cls in _MAPPINGS and item is not _LEAF:
        return _Form(partial(_turn_keys, None, item.turn), item.shapes)
    if cls in _SEQUENCES and item is not _LEAF:
        return _Form(partial(_turn_items, list, [], item.turn), item.shapes)
    if cls in (tuple, set, frozenset):
        forms = [form_of(arg) for arg in args] if fixed else []
        turns = [form.turn for form in forms]
        return _Form(partial(_turn_items, cls, turns, item.turn), any(form.shapes for form in (*forms, item)))
    return _LEAF


@lru_cache(maxsize=1024)
def _turns_of(cls: Any) -> dict[str, Turn]:
    # On first use: a class may name itself in what it holds.
    hints = hints_of(cls)
    names = [*hints]
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if NOT_STORED not in field.metadata]
    return {name: form_of(hints.get(name)).turn for name in names}


def _constructible(cls: type) -> None:
    if issubclass(cls, str | int | float | bytes | dict | list | tuple | set | frozenset):
        raise InvalidArgument(f"{cls.__name__} holds more than its fields: let it hold the builtin value in a field")
    # dataclasses.fields() leaves InitVar out, and their values are gone once __init__ has run.
    for field in getattr(cls, "__dataclass_fields__", {}).values():
        bare = field.default is field.default_factory is _MISSING
        if bare and getattr(getattr(field, "_field_type", None), "name", "") == "_FIELD_INITVAR":
            raise InvalidArgument(f"{cls.__name__}.{field.name} is an InitVar, which is not kept: give it a default")


def _misfit(at: At | None, said: str, value: object) -> UnserialisableResult:
    if type(value).__name__ == said:
        why = f"the annotation names another definition of {said}, got one that was defined later or elsewhere"
        return refused(at, f"{why}. Define the annotated function again, or register_type({said}).")
    return refused(at, f"the annotation says {said}, this is {a_kind(type(value))}: make the two agree")


def _passes(value: object) -> bool:
    """Whether the value stays as it is under every annotation: a registered type has a tag of its own."""
    return value is None or REGISTRY.tag_of(type(value)) is not None


# The turns. `back` is from plain JSON; both ways give the value itself where nothing changes.


def _same(value: Any, at: At | None, back: bool) -> Any:
    return value


_LEAF: Final = _Form(_same, shapes=False)


def _turn_alias(annotation: Any, value: Any, at: At | None, back: bool) -> Any:
    # A `type` alias may name itself: looked into on use.
    return form_of(annotation.__value__).turn(value, at, back)


def _turn_items(kind: Any, turns: list[Turn], rest: Turn, value: Any, at: At | None, back: bool) -> Any:
    """Lists, tuples and sets, item by item. A tuple or a set is a list in plain JSON, so a list in its place is
    refused; under `list`, a tuple stays one.
    """
    is_list, given = kind is list, type(value)
    if given is list and not is_list and not back:
        raise _misfit(at, kind.__name__, value)
    if given is not kind and given is not list and not (is_list and given is tuple):
        return value
    here, turned = inside(at, value), []
    for index, item in enumerate(value):
        here.step = None if given in (set, frozenset) else index
        turned.append((turns[index] if index < len(turns) else rest)(item, here, back))
    if kind is tuple and not back:
        return turned
    if (is_list or given is kind) and all(a is b for a, b in zip(value, turned, strict=True)):
        return value
    if not is_list and not back:
        return turned
    try:
        return (given if is_list else kind)(turned)
    except TypeError as error:
        raise refused(at, f"no {kind.__name__} can hold these: {error}") from error


def _turn_keys(cls: Any, rest: Turn, value: Any, at: At | None, back: bool) -> Any:
    """A dict, value by value; with `cls`, a TypedDict, each by its own annotation."""
    if type(value) not in DICTS:
        return value
    named = _turns_of(cls) if cls else {}
    here, turned = inside(at, value), {}
    for key, item in value.items():
        here.step = key
        turned[key] = named.get(key, rest)(item, here, back)
    return turned if any(turned[key] is not item for key, item in value.items()) else value


def _turn_member(cls: type[enum.Enum], value: Any, at: At | None, back: bool) -> Any:
    """An Enum, written by the name of its member; a Flag by its number, for sets of flags have no name."""
    if type(value) is cls:
        plain = value.value if isinstance(value, enum.Flag) else value.name
        if plain is None or (type(plain) is str and cls.__members__.get(plain) is not value):
            raise refused(at, f"{value!r} is no member of {cls.__name__}: return one")
        return value if back else plain
    if _passes(value):
        return value
    if not back:
        raise _misfit(at, cls.__name__, value)
    if issubclass(cls, enum.Flag) and type(value) is int:
        try:
            return cls(value)
        except ValueError as error:
            raise refused(at, f"{value} has bits that {cls.__name__} does not know") from error
    if type(value) is str and value in cls.__members__:
        return cls.__members__[value]
    for member in cls:
        if type(member.value) is type(value) and member.value == value:
            return member
    raise refused(at, f"{short(value)} is no member of {cls.__name__}: was it renamed or taken out?")


def _turn_fields(cls: type, value: Any, at: At | None, back: bool) -> Any:
    """A dataclass, written as a dict of its fields and built by its own constructor."""
    kind: type = type(value)
    if back and kind is dict:
        return _built(cls, value, at)
    if kind is not cls:
        if _passes(value):
            return value
        raise _misfit(at, cls.__name__, value)
    if back:
        return value
    here, tree = inside(at, value), {}
    for name, turn in _turns_of(cls).items():
        item = getattr(value, name, _MISSING)
        if item is not _MISSING:
            here.step = name
            tree[name] = turn(item, here, back)
    return tree


def _built(cls: Any, tree: dict[str, Any], at: At | None) -> Any:
    here, turns = inside(at, tree), _turns_of(cls)
    given, arguments = {}, {}
    for field in dataclasses.fields(cls):
        here.step = name = field.name
        if name in tree and name in turns:
            given[name] = turns[name](tree[name], here, True)
            if field.init:
                arguments[name] = given[name]
        elif field.init and field.default is field.default_factory is _MISSING:
            raise refused(at, f"{cls.__name__} needs {name!r}, which is not here: give the field a default")
    try:
        record = cls(**arguments)
    except Exception as error:  # the constructor is the user's
        raise refused(at, f"{cls.__name__} would not be built: {type(error).__name__}: {error}") from error
    for name, item in given.items():
        # What __post_init__ changes was changed before it was written, and a second time would show.
        if getattr(record, name, _MISSING) is not item:
            object.__setattr__(record, name, item)
    return record


def _turn_union(turns: list[Turn], said: str, out: str, value: Any, at: At | None, back: bool) -> Any:
    """What the one member makes of it that has something to turn; written only where it alone would read it back."""
    if _passes(value):
        return value
    made = _made(turns, said, value, at, back)
    read = made if back else _made(turns, said, made[0] if made else value, at, True)
    if len(made) > 1 or len(read) != len(made):
        kind = type(value)
        way = f"register_type({kind.__name__})" if _registrable(kind) else out
        raise refused(at, f"the JSON of {a_kind(kind)} fits more than one of {said}: {way}")
    return made[0] if made else value


def _made(turns: list[Turn], said: str, value: Any, at: At | None, back: bool) -> list[Any]:
    """What the members make of the value, leaving out those that refuse it or leave it as it is."""
    results = []
    for turn in turns:
        with contextlib.suppress(UnserialisableResult):
            results.append(turn(value, at, back))
    if not results:
        raise _misfit(at, said, value)
    return [result for result in results if result is not value]
