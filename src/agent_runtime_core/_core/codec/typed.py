"""Dataclasses, Enums and tuples that an annotation names, as plain JSON and back."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as _dt
import enum
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final, NamedTuple, TypeGuard, TypeVar
from uuid import UUID

from ...errors import UnserialisableResult, brief
from ..pydantic_types import is_model, needs_pydantic
from ..validation import Path, Shown, descend, must, not_encodable, type_name, unknown
from .json import MAX_BYTES, MAX_RESULT, decode, encode
from .models import model_from_json, model_to_json
from .tagged import DICTS, NOT_STORED, REGISTRY, TAGGING, Turn
from .type_hints import hints_of

_MISSING: Final = dataclasses.MISSING
_SEQUENCES: Final = {list, abc.Sequence, abc.MutableSequence, abc.Collection, abc.Iterable}
_MAPPINGS: Final = {dict, abc.Mapping, abc.MutableMapping}
_WRAPPERS: Final = {typing.Annotated, typing.Final, typing.Required, typing.NotRequired}
_PLAIN_TYPES: Final = {bool, int, float, str, list, dict, type(None), object, Any}
_C = TypeVar("_C", bound=type)


@dataclass(frozen=True, eq=False)
class Policy:
    """The differences between the stored and received formats whose values are built by annotation.

    Attributes:
        enums_by_value: Write an Enum as its value, and read it by value, else by name. If False, write it by name, and
            read it by name, else by value.
        restore: Set each field to its stored value, including fields that `__init__` does not take and fields that
            `__post_init__` changes. If False, only call the constructor.
        strict: The types that a value may have where the annotation names the key; another annotated type allows
            itself. If None, a value of another type than a list, dict or scalar annotation names stays as it is.
        special: Returns the function that converts values of an annotation, or None for the usual function.
        adapt: Returns the fields to build a dataclass from. By default the fields are used as they are, and unknown
            fields are dropped.
    """

    enums_by_value: bool = False
    restore: bool = False
    strict: Mapping[type, tuple[type, ...]] | None = None
    special: Callable[[Any], Turn | None] = lambda _: None
    adapt: Callable[[type, dict[str, Any]], dict[str, Any]] = lambda _, tree: tree


def as_text(annotation: Any) -> Turn | None:
    """For `Policy.special`, where values have no tags: UUIDs and datetimes are strings."""
    if annotation is UUID:
        return partial(_convert_text, UUID, UUID, str)
    if annotation is _dt.datetime:
        return partial(_convert_text, _dt.datetime, _dt.datetime.fromisoformat, _dt.datetime.isoformat)
    return None


def _convert_text(
    kind: type, read: Callable[[str], Any], write: Callable[[Any], str], value: Any, at: Path | None, back: bool
) -> Any:
    if back:
        return read(value) if isinstance(value, str) else value
    return write(value) if isinstance(value, kind) else value


#: Results of steps, and values of registered types.
STEP_RESULT: Final = Policy(restore=True)
#: Formats that any JSON parser reads.
PLAIN: Final = Policy(enums_by_value=True, special=as_text)


class Codec(NamedTuple):
    """Converts values of an annotation to plain JSON and back; `needed` is False if the annotation adds nothing."""

    convert: Turn
    needed: bool = True


def build(value: object, annotation: object, policy: Policy = STEP_RESULT, at: Path | None = None) -> object:
    """Build the dataclasses, Enums and tuples that the annotation names from plain JSON.

    Raises:
        UnserialisableResult: The value and the annotation do not agree.
    """
    return codec_of(annotation, policy).convert(value, at, True)


def to_plain(value: object, annotation: object, policy: Policy) -> Any:
    """Return plain JSON from which `build` makes an equal value.

    Raises:
        UnserialisableResult: The value and the annotation do not agree.
    """
    return codec_of(annotation, policy).convert(value, None, False)


def codec_for(
    annotation: object | None, max_bytes: int = MAX_RESULT
) -> tuple[Callable[[object], str], Callable[[str], object]]:
    """Return functions that encode and decode results of an annotation and size limit.

    The second function is `decode` itself if the annotation adds nothing.
    """
    write: Callable[[object], str] = _ENCODE
    if max_bytes != MAX_RESULT:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or not 0 < max_bytes <= MAX_BYTES:
            raise must("max_result_bytes", f"be an integer from 1 to {MAX_BYTES:,}", max_bytes)
        write = partial(encode, max_bytes=max_bytes, exact=True)
    if isinstance(annotation, str):
        raise must("the type of a result", "be a type", annotation, "Pass the type itself, without quotes")
    convert, needed = codec_of(annotation)
    if not needed:
        return write, decode
    return lambda value: write(convert(value, None, False)), partial(_read, annotation, convert)


def _read(_: object, convert: Turn, text: str) -> object:
    return convert(decode(text), None, True)


def annotation_of(read: Callable[[str], object]) -> object | None:
    """Return the annotation of a function of `codec_for` that decodes, or None."""
    return read.args[0] if isinstance(read, partial) and read.func is _read else None


_ENCODE: Final = partial(encode, max_bytes=MAX_RESULT, exact=True)


def size_limit(write: Callable[[object], str]) -> int | None:
    """Return the size limit of a function of `codec_for` that only encodes, None if it converts values before."""
    return write.keywords.get("max_bytes") if isinstance(write, partial) and write.func is encode else None


def register_type(cls: _C) -> _C:
    """Register a dataclass, an Enum or a model of pydantic, so that results may hold its values anywhere.

    Also a decorator.

    The class is stored by its name, `module.qualname`. A later definition of the same name replaces it, as when a
    notebook cell runs again or a module is reloaded; stored values are decoded into the newest definition. A process
    that reads such a result must have registered the class too: the library imports nothing by name.

    Args:
        cls: The class.

    Returns:
        The class.

    Raises:
        InvalidArgument: It is no dataclass, Enum class or model of pydantic, or cannot be rebuilt from its fields.
    """
    given: object = cls
    if not _registrable(given):
        raise must("the argument of register_type", "be a dataclass, an Enum class or a model of pydantic", given)
    codec_of(given)
    REGISTRY.add(given)
    return cls


def _registrable(given: object) -> TypeGuard[type]:
    return isinstance(given, type) and (
        dataclasses.is_dataclass(given) or issubclass(given, enum.Enum) or is_model(given)
    )


def is_union(annotation: Any) -> bool:
    """Whether this is `A | B`, Union or Optional."""
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def codec_of(annotation: Any, policy: Policy = STEP_RESULT) -> Codec:
    # `int | str` equals `str | int` as a key of the cache, but a policy may try the members in order.
    if policy is STEP_RESULT or isinstance(annotation, type):
        try:
            return _known_codec(annotation, policy)
        except TypeError:  # unhashable, as Literal and Annotated may be
            pass
    return _codec(annotation, policy)


def _codec(annotation: Any, policy: Policy) -> Codec:
    codec = _unchecked_codec(annotation, policy)
    if policy.strict is None or object in (kinds := _allowed(annotation, policy.strict)):
        return codec
    return Codec(partial(_convert_checked, kinds, codec.convert))


_known_codec: Final = lru_cache(maxsize=1024)(_codec)


def _allowed(annotation: Any, strict: Mapping[type, tuple[type, ...]]) -> tuple[type, ...]:
    """Return the types that a value of that annotation may have."""
    if is_union(annotation):
        return tuple(kind for each in typing.get_args(annotation) for kind in _allowed(each, strict))
    cls = typing.get_origin(annotation) or annotation
    if cls is Any:
        return (object,)
    plain = (dict,) if dataclasses.is_dataclass(cls) else (str,) if issubclass(cls, enum.Enum) else ()
    return strict.get(cls, (cls, *plain))


def _unchecked_codec(annotation: Any, policy: Policy) -> Codec:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if (special := policy.special(annotation)) is not None:
        return Codec(special)
    if isinstance(annotation, typing.NewType):
        return codec_of(annotation.__supertype__, policy)
    if origin is None and hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):
        return Codec(partial(_convert_alias, annotation, policy))
    if origin in _WRAPPERS:
        return codec_of(args[0], policy)
    if needs_pydantic(annotation) and not _is_optional(annotation):
        return Codec(partial(_convert_model, annotation, policy.restore))
    if is_union(annotation):
        return _union([arg for arg in args if arg is not type(None)], policy)
    cls = annotation if origin is None else origin
    if not isinstance(cls, type):
        return _LEAF
    if typing.is_typeddict(cls):
        return Codec(partial(_convert_dict, cls, policy, _same))
    if dataclasses.is_dataclass(cls):
        if policy.restore:
            _require_restorable(cls)
        return Codec(partial(_convert_dataclass, cls, policy))
    if issubclass(cls, enum.Enum):
        return Codec(partial(_convert_enum, cls, policy.enums_by_value))
    return _container(cls, args, policy)


def _is_optional(annotation: Any) -> bool:
    """Whether this is `A | None`: a union with one member besides None."""
    return is_union(annotation) and sum(arg is not type(None) for arg in typing.get_args(annotation)) == 1


def _union(members: list[Any], policy: Policy) -> Codec:
    # A strict policy checks the union as a whole.
    codecs = [(codec_of if policy.strict is None else _unchecked_codec)(member, policy) for member in members]
    if len(codecs) == 1 or not any(codec.needed for codec in codecs):
        return codecs[0] if len(codecs) == 1 else _LEAF
    said = " | ".join(getattr(member, "__name__", str(member)) for member in members)
    named = [f"register_type({member.__name__})" for member in members if _registrable(member)]
    out = f"Annotate Any, and {' and '.join(named) or 'register_type the dataclasses and Enums in it'}"
    return Codec(partial(_convert_union, [codec.convert for codec in codecs], said, out))


def _container(cls: type, args: tuple[Any, ...], policy: Policy) -> Codec:
    fixed = cls is tuple and len(args) > 0 and args[-1] is not ...
    item = codec_of(args[-1 if cls in _MAPPINGS else 0], policy) if args and not fixed else _LEAF
    if cls in _MAPPINGS and item is not _LEAF:
        return Codec(partial(_convert_dict, None, policy, item.convert), item.needed)
    if cls in _SEQUENCES and item is not _LEAF:
        return Codec(partial(_convert_items, list, [], item.convert), item.needed)
    if cls in (tuple, set, frozenset):
        codecs = [codec_of(arg, policy) for arg in args] if fixed else []
        first = [codec.convert for codec in codecs]
        return Codec(partial(_convert_items, cls, first, item.convert), any(each.needed for each in (*codecs, item)))
    return _LEAF


@lru_cache(maxsize=1024)
def _converters(cls: Any, policy: Policy) -> dict[str, Turn]:
    # On first use: a class may name itself in what it holds.
    hints = hints_of(cls)
    names = [*hints]
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls) if NOT_STORED not in field.metadata]
    return {name: codec_of(hints.get(name), policy).convert for name in names}


def _require_restorable(cls: type) -> None:
    if issubclass(cls, str | int | float | bytes | dict | list | tuple | set | frozenset):
        base = next(each.__name__ for each in cls.__mro__[1:] if each.__module__ == "builtins")
        fix = f"Hold the {base} in a field"
        raise must(f"class {cls.__name__}", "have all its data in fields", Shown(f"a subclass of {base}"), fix)
    # dataclasses.fields() leaves InitVar out, and their values are gone after `__init__`.
    for field in getattr(cls, "__dataclass_fields__", {}).values():
        bare = field.default is field.default_factory is _MISSING
        if bare and getattr(getattr(field, "_field_type", None), "name", "") == "_FIELD_INITVAR":
            where = f"field {field.name!r} of {cls.__name__}"
            raise must(where, "be stored or have a default", Shown("an InitVar without one"), "Add a default")


def _mismatch(at: Path | None, said: str, value: object) -> UnserialisableResult:
    if type(value).__name__ == said:
        why = f"the annotation names another definition of {said}, got one that was defined later or elsewhere"
        return not_encodable(at, f"{why}. Define the annotated function again, or register_type({said}).")
    return not_encodable(
        at, f"the annotation says {said}, got {type_name(type(value))}. Correct the annotation or the value"
    )


def _passes(value: object) -> bool:
    """Whether the value stays as it is under every annotation: the tag of a registered type names the type."""
    return value is None or REGISTRY.tag_of(type(value)) is not None


# The conversions. `back` is from plain JSON; both ways return the value itself where nothing changes.


def _same(value: Any, at: Path | None, back: bool) -> Any:
    return value


_LEAF: Final = Codec(_same, needed=False)


def _convert_checked(kinds: tuple[type, ...], convert: Turn, value: Any, at: Path | None, back: bool) -> Any:
    # True is an int, and rarely meant as an int.
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise not_encodable(at, f"must be {wanted}, got {brief(value)}")
    return convert(value, at, back)


def _convert_alias(annotation: Any, policy: Policy, value: Any, at: Path | None, back: bool) -> Any:
    # A `type` alias may name itself: looked into on use.
    return codec_of(annotation.__value__, policy).convert(value, at, back)


def _convert_model(annotation: Any, by_name: bool, value: Any, at: Path | None, back: bool) -> Any:
    """A model of pydantic, another type with a schema in pydantic, or a union that contains such a type."""
    if value is None or (type(value) is not annotation and _passes(value)):
        return value
    if is_model(annotation) and type(value) is not annotation:
        if back and isinstance(value, annotation):
            return value
        if not back:
            raise _mismatch(at, annotation.__name__, value)
    if not back:
        return model_to_json(annotation, value, at, _turn_of_field)
    return model_from_json(annotation, value, at, _turn_of_field, by_name)


def _turn_of_field(annotation: Any) -> Turn:
    """Return the conversion of a field of a model, which may have types that only pydantic knows, such as Path."""
    codec = codec_of(annotation)
    is_foreign = isinstance(annotation, type) and annotation not in TAGGING and annotation not in _PLAIN_TYPES
    return partial(_convert_model, annotation, True) if is_foreign and not codec.needed else codec.convert


def _convert_items(kind: Any, first: list[Turn], rest: Turn, value: Any, at: Path | None, back: bool) -> Any:
    """Convert a list, tuple or set item by item.

    A list is rejected for a tuple or a set, although plain JSON uses lists for both. A tuple for a `list` stays a
    tuple.
    """
    is_list, given = kind is list, type(value)
    if given is list and not is_list and not back:
        raise _mismatch(at, kind.__name__, value)
    if given is not kind and given is not list and not (is_list and given is tuple):
        return value
    here, converted = descend(at, value), []
    for index, item in enumerate(value):
        here.step = None if given in (set, frozenset) else index
        converted.append((first[index] if index < len(first) else rest)(item, here, back))
    if kind is tuple and not back:
        return converted
    if (is_list or given is kind) and all(a is b for a, b in zip(value, converted, strict=True)):
        return value
    if not is_list and not back:
        return converted
    try:
        return (given if is_list else kind)(converted)
    except TypeError as error:
        raise not_encodable(at, f"no {kind.__name__} can hold these: {error}") from error


def _convert_dict(cls: Any, policy: Policy, rest: Turn, value: Any, at: Path | None, back: bool) -> Any:
    """A dict, value by value; with `cls`, a TypedDict, each by its own annotation."""
    if type(value) not in DICTS:
        return value
    named = _converters(cls, policy) if cls else {}
    here, converted = descend(at, value), {}
    for key, item in value.items():
        here.step = key
        converted[key] = named.get(key, rest)(item, here, back)
    return converted if any(converted[key] is not item for key, item in value.items()) else value


def _convert_enum(cls: type[enum.Enum], by_value: bool, value: Any, at: Path | None, back: bool) -> Any:
    """An Enum, written by value or by the name of its member; a Flag by its number, for sets of flags have no name."""
    if type(value) is cls:
        is_flag = isinstance(value, enum.Flag)
        if not is_flag and cls.__members__.get(value.name) is not value:
            raise not_encodable(at, f"must be a member of {cls.__name__}, got {value!r}")
        return value if back else value.value if by_value or is_flag else value.name
    if _passes(value):
        return value
    if not back:
        raise _mismatch(at, cls.__name__, value)
    member = cls.__members__.get(value) if type(value) is str else None
    if by_value or member is None:
        with contextlib.suppress(ValueError):
            member = cls(value)
    # True equals 1, and is another value.
    if member is None or (type(value) is not str and isinstance(value, bool) is not isinstance(member.value, bool)):
        known = [str(each.value) if by_value else each.name for each in cls]
        raise not_encodable(at, unknown(cls.__name__, value, known))
    return member


def _convert_dataclass(cls: type, policy: Policy, value: Any, at: Path | None, back: bool) -> Any:
    """A dataclass, written as a dict of its fields and built by its own constructor."""
    kind: type = type(value)
    if back and kind is dict:
        return _built(cls, policy, value, at)
    if kind is not cls and not (back and isinstance(value, cls)):
        if _passes(value):
            return value
        raise _mismatch(at, cls.__name__, value)
    if back:
        return value
    here, tree = descend(at, value), {}
    for name, convert in _converters(cls, policy).items():
        item = getattr(value, name, _MISSING)
        if item is not _MISSING:
            here.step = name
            tree[name] = convert(item, here, back)
    return tree


def _built(cls: Any, policy: Policy, tree: dict[str, Any], at: Path | None) -> Any:
    here, converters = descend(at, tree), _converters(cls, policy)
    tree, values, arguments = policy.adapt(cls, tree), {}, {}
    for field in dataclasses.fields(cls):
        here.step = name = field.name
        if name in tree and name in converters and (field.init or policy.restore):
            values[name] = converters[name](tree[name], here, True)
            if field.init:
                arguments[name] = values[name]
        elif field.init and field.default is field.default_factory is _MISSING:
            raise not_encodable(
                at, f"{cls.__name__} needs {name!r}, which is missing. Add it, or give the field a default"
            )
    try:
        record = cls(**arguments)
    except Exception as error:  # the constructor is the user's
        raise not_encodable(at, f"{cls.__name__} could not be constructed: {type(error).__name__}: {error}") from error
    for name, item in values.items() if policy.restore else ():
        # What __post_init__ changes was changed before it was written, and a second time would show.
        if getattr(record, name, _MISSING) is not item:
            object.__setattr__(record, name, item)
    return record


def _convert_union(members: list[Turn], said: str, out: str, value: Any, at: Path | None, back: bool) -> Any:
    """Return the value as converted by the one union member that changes it.

    A value is only encoded if that member alone would decode it again.
    """
    if _passes(value):
        return value
    made = _changed(members, said, value, at, back)
    read = made if back else _changed(members, said, made[0] if made else value, at, True)
    if len(made) > 1 or len(read) != len(made):
        kind = type(value)
        way = f"Call register_type({kind.__name__})" if _registrable(kind) else out
        raise not_encodable(at, f"the JSON of {type_name(kind)} fits more than one of {said}. {way}")
    return made[0] if made else value


def _changed(members: list[Turn], said: str, value: Any, at: Path | None, back: bool) -> list[Any]:
    """Return the results of the union members that accept the value and change it."""
    results = []
    for convert in members:
        with contextlib.suppress(UnserialisableResult):
            results.append(convert(value, at, back))
    if not results:
        raise _mismatch(at, said, value)
    return [result for result in results if result is not value]
