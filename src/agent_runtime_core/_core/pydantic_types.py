"""Recognize the types of pydantic and call its `TypeAdapter`. This module never imports pydantic.

A process that holds a model of pydantic already imported pydantic. Other processes pay nothing for it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import types
import typing
from functools import lru_cache
from typing import Any, Final

_HOOK: Final = "__get_pydantic_core_schema__"
_MOST: Final = 5
_LONGEST: Final = 200


def is_pydantic(cls: object) -> bool:
    """Whether this is a model of pydantic, or another class with its own schema in pydantic, such as HttpUrl."""
    return isinstance(cls, type) and hasattr(cls, _HOOK) and _module() is not None


def is_pydantic_dataclass(cls: object) -> bool:
    """Whether this is a dataclass that `pydantic.dataclasses` made."""
    return dataclasses.is_dataclass(cls) and "__pydantic_validator__" in vars(cls) and _module() is not None


def is_model(cls: object) -> bool:
    """Whether this is a model of pydantic: a subclass of BaseModel."""
    return is_pydantic(cls) and issubclass(typing.cast("type", cls), getattr(_module(), "BaseModel"))  # noqa: B009


def needs_pydantic(annotation: Any) -> bool:
    """Whether the annotation is a class with a schema in pydantic, or a union with such a class in a member."""
    if is_pydantic(annotation):
        return True
    return typing.get_origin(annotation) in (typing.Union, types.UnionType) and mentions_pydantic(annotation)


def mentions_pydantic(annotation: Any, within: tuple[Any, ...] = ()) -> bool:
    """Whether the annotation, or a part of it in brackets, is a class with a schema in pydantic.

    Args:
        annotation: The annotation.
        within: The `type` aliases that contain it; an alias may name itself.
    """
    if _module() is None or any(annotation is each for each in within):
        return False
    parts = typing.get_args(annotation)
    if not parts and hasattr(annotation, "__value__") and hasattr(annotation, "__type_params__"):
        parts, within = (annotation.__value__,), (*within, annotation)
    return is_pydantic(annotation) or any(mentions_pydantic(each, within) for each in parts)


def adapter_of(annotation: Any) -> Any:
    """Return the `TypeAdapter` of an annotation.

    Raises:
        Exception: Pydantic cannot make a schema, for example because a forward reference is not defined.
    """
    try:
        # Members of a union are compared in any order, and pydantic tries them in order.
        return _adapter(annotation, str(annotation))
    except TypeError:  # unhashable, as Annotated may be
        return getattr(_module(), "TypeAdapter")(annotation)  # noqa: B009


def from_json(annotation: Any, tree: Any, **options: Any) -> Any:
    """Validate a parsed JSON tree as JSON: strict models accept the JSON forms of their types only there.

    Raises:
        Exception: Pydantic's ValidationError, or an error of a validator.
    """
    return adapter_of(annotation).validate_json(json.dumps(tree), **options)


def reason_of(error: BaseException) -> str:
    """Return the message of an error of pydantic on one line, without the input and links."""
    errors = getattr(error, "errors", None)
    if not callable(errors):
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(lines) or type(error).__name__
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    found = errors(include_url=False, include_context=False, include_input=False)
    texts = [": ".join(filter(None, (_place(each["loc"]), each["msg"]))) for each in found[:_MOST]]
    more = [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
    return "; ".join([*texts, *more])


def _place(location: tuple[Any, ...]) -> str:
    return ".".join(map(str, location))


@lru_cache(maxsize=1024)
def _adapter(annotation: Any, _: str) -> Any:
    return getattr(_module(), "TypeAdapter")(annotation)  # noqa: B009


def _module() -> types.ModuleType | None:
    # Versions before 2 have no TypeAdapter, and their models are like all other foreign classes.
    module = sys.modules.get("pydantic")
    return module if getattr(module, "TypeAdapter", None) is not None else None
