"""Encode models as JSON text, and decode them."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any, Final, TypeVar, cast

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.codec.typed import Policy, build
from ..errors import StorageCorrupt
from .models import Task

M = TypeVar("M")

_STORED: Final = Policy(enums_by_value=True)


def text_of(model: Any, *, leave_out: frozenset[str] = frozenset(), max_bytes: int = MAX_BYTES) -> str:
    """Return a model as JSON, without the fields in `leave_out`.

    Raises:
        UnserialisableResult: A field is not JSON-serializable, or the text is longer than `max_bytes`.
    """
    return encode(_plain(model, leave_out), max_bytes=max_bytes)


def _plain(model: Any, leave_out: frozenset[str] = frozenset()) -> dict[str, Any]:
    return {
        field.name: _plain_value(getattr(model, field.name))
        for field in dataclasses.fields(model)
        if field.init and field.name not in leave_out
    }


def _plain_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if _is_model(value):
        return _plain(value)
    if isinstance(value, list) and any(map(_is_model, value)):
        return [_plain_value(each) for each in value]
    return value


def _is_model(value: object) -> bool:
    return type(value).__module__ == Task.__module__


def model_of(cls: type[M], text: str, **more: Any) -> M:
    """Decode the text that `text_of` wrote, and add the fields of `more`. Fields of a later version are dropped.

    Raises:
        StorageCorrupt: The text does not hold such a model.
    """
    try:
        return cast(M, build({**cast("dict[str, Any]", decode(text)), **more}, cls, _STORED))
    except (TypeError, ValueError) as error:
        raise StorageCorrupt(
            f"a stored {cls.__name__} cannot be read ({type(error).__name__}). Restore a backup."
        ) from error
