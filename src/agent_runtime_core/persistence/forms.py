"""Models as JSON text and back, every field of them, with types that JSON lacks told apart."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar, cast

from .._json import MAX_BYTES, decode, encode
from ..errors import StorageCorrupt, UnserialisableResult
from .models import (
    AuditEntry,
    Conversation,
    ConversationMessage,
    Embedding,
    ErrorRecord,
    Fact,
    PerformanceMetric,
    Summary,
    Task,
    TaskList,
    ToolCall,
    ToolResult,
)

M = TypeVar("M")


def text_of(model: Any, *, leave_out: frozenset[str] = frozenset(), max_bytes: int = MAX_BYTES) -> str:
    """The JSON of a model without the fields of `leave_out`; UnserialisableResult names what has no JSON form."""
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
    if type(value) in _MODELS:
        return _plain(value)
    if isinstance(value, list) and any(type(each) in _MODELS for each in value):
        return [_plain_value(each) for each in value]
    return value


def model_of(cls: type[M], text: str, **more: Any) -> M:
    """The model that `text_of` wrote, with the fields of `more`; fields of a later version are left out.

    StorageCorrupt: the text is not one of such a model.
    """
    try:
        return _model(cls, cast("dict[str, Any]", decode(text)), more)
    except (TypeError, ValueError, KeyError, AttributeError, UnserialisableResult) as error:
        raise StorageCorrupt(f"a stored {cls.__name__} cannot be read ({error}): {text:.80}") from error


def _model(cls: Callable[..., M], plain: dict[str, Any], more: dict[str, Any]) -> M:
    read = _readers(cls)
    values = {name: read[name](value) for name, value in plain.items() if name in read}
    return cls(**{**values, **more})


@functools.cache
def _readers(cls: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: _reader(hints[field.name]) for field in dataclasses.fields(cast(Any, cls)) if field.init}


def _reader(hint: Any) -> Any:
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is list and arguments[0] in _MODELS:
        return lambda values: [
            _model(arguments[0], value, {}) if isinstance(value, dict) else value for value in values
        ]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return lambda value: hint(value) if isinstance(value, str) else value
    return lambda value: value


_MODELS = frozenset(
    (AuditEntry, Conversation, ConversationMessage, Embedding, ErrorRecord, Fact, PerformanceMetric, Summary, Task,
     TaskList, ToolCall, ToolResult)
)  # fmt: skip
