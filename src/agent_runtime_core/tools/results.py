"""Convert the result of a tool to the form that is stored, and to the text that the model gets."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime as _dt
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Set
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from .._core.codec.json import MAX_BYTES, decode, encode
from .._core.codec.type_hints import returns_of
from .._core.codec.typed import codec_for
from .._core.pydantic_types import is_model, mentions_pydantic
from .._core.validation import Path, descend, not_encodable, type_name, unsupported_type
from ..errors import InvalidArgument, UnserialisableResult
from .base import ToolResult
from .tool import Tool

__all__ = ["ContentParts", "text_of_parts"]


class ContentParts(list[dict[str, Any]]):
    """A tool result that the model receives as content parts in OpenAI's format, and not as the JSON of a list.

    @tool
    def screenshot() -> ContentParts:
        url = "data:image/png;base64," + take_screenshot()
        return ContentParts([{"type": "image_url", "image_url": {"url": url}}])
    """


def text_of_parts(parts: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of content parts, with the type of each part that is no text in brackets."""
    return "\n".join(str(each["text"]) if "text" in each else f"[{each.get('type')}]" for each in parts)


__all__ = ["as_plain", "in_json", "text_of_result"]

_UTF8: Final = json.JSONEncoder(ensure_ascii=False)  # json.dumps() would create one for each text
_ISO: Final = (_dt.datetime, _dt.date, _dt.time)
_AS_TEXT: Final = (Decimal, UUID, PurePath, _dt.timedelta)
_LISTS: Final = (list, tuple, deque, range)


def in_json(tool: Tool, result: Any, max_bytes: int = MAX_BYTES) -> tuple[Any, str]:
    """Return the result and its JSON text.

    A result that is not JSON is converted by the tool's annotated return type, or else by `as_plain`.

    Args:
        tool: The tool that returned the result.
        result: The result.
        max_bytes: The largest JSON text, in bytes.

    Raises:
        UnserialisableResult: The result cannot be converted.
    """
    try:
        return _in_json(tool, result, max_bytes)
    except UnserialisableResult:
        raise
    except Exception as error:  # the attributes of an object may raise anything, and the tool did run
        raise UnserialisableResult("$", f"converting it failed with {type(error).__name__}") from error


def _in_json(tool: Tool, result: Any, max_bytes: int) -> tuple[Any, str]:
    try:
        return result, encode(result, max_bytes=max_bytes)
    except UnserialisableResult as error:
        if error.max_bytes is not None:
            raise
        annotation = returns_of(tool.handler)
        if mentions_pydantic(annotation):
            annotation = None  # the JSON of a model contains computed fields, which the stored result of a step lacks
        try:
            if annotation is None or annotation is ToolResult:  # it does not name the type of its output
                raise
            text = codec_for(annotation, max_bytes)[0](result)
            return decode(text), text
        except (UnserialisableResult, InvalidArgument) as reason:
            if isinstance(reason, UnserialisableResult) and reason.max_bytes is not None:
                raise
            try:
                plain = as_plain(result)
            except UnserialisableResult:
                raise reason from None  # the error of the annotation names the type
            return plain, encode(plain, max_bytes=max_bytes)


def text_of_result(result: Any) -> str:
    """Return the text of a result for the model: a string as it is, any other value as JSON.

    Raises:
        UnserialisableResult: A part is not JSON-serializable.
    """
    plain = result if isinstance(result, str) else as_plain(result)
    if isinstance(plain, str):
        return plain
    try:
        return _UTF8.encode(plain)
    except ValueError as error:  # an integer with more digits than Python converts
        raise UnserialisableResult("$", str(error)) from error


def as_plain(value: Any, at: Path | None = None) -> Any:
    """Return a value as JSON that other programs read, without the tags of stored results.

    Raises:
        UnserialisableResult: A part has no obvious JSON form.
    """
    if value is None or isinstance(value, (bool, Enum)):
        return as_plain(value.value, at) if isinstance(value, Enum) else value
    if isinstance(value, (str, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else _not_finite(value)
    if isinstance(value, _ISO):
        return value.isoformat()
    if isinstance(value, _AS_TEXT):
        return str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _text_of_bytes(bytes(value))
    if isinstance(value, Mapping):
        return _fields(dict(value), at)
    if isinstance(value, _LISTS):
        return _items(list(value), at)
    if isinstance(value, Set):
        plain = _items(list(value), at)
        return sorted(plain, key=lambda each: json.dumps(each, sort_keys=True))  # the same in each process
    return _of_object(value, at)


def _of_object(value: Any, at: Path | None) -> Any:
    if isinstance(value, type):
        raise not_encodable(at, unsupported_type(value))
    if dataclasses.is_dataclass(value):
        return _fields({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, at)
    if is_model(type(value)):
        with contextlib.suppress(Exception):  # bytes that are not UTF-8, for example, which have a form below
            return as_plain(value.model_dump(mode="json"), descend(at, value))
    if callable(getattr(value, "model_dump", None)):  # Pydantic, including its first version
        return as_plain(_dumped(value.model_dump, at), descend(at, value))
    names = getattr(type(value), "__struct_fields__", None)  # msgspec
    if names is None and hasattr(type(value), "__attrs_attrs__"):
        names = [attribute.name for attribute in type(value).__attrs_attrs__]
    if names is not None:
        return _fields({name: getattr(value, name) for name in names}, at)
    if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)):  # numpy
        return as_plain(_dumped(value.tolist, at), descend(at, value))
    raise not_encodable(at, unsupported_type(value))


def _dumped(dump: Any, at: Path | None) -> Any:
    try:
        return dump()
    except Exception as error:
        raise not_encodable(at, f"converting it failed with {type(error).__name__}") from error


def _fields(table: dict[Any, Any], at: Path | None) -> dict[str, Any]:
    here = descend(at, table)
    plain: dict[str, Any] = {}
    for key, item in table.items():
        here.step = key if isinstance(key, str) else None
        name = key if isinstance(key, str) and not isinstance(key, Enum) else as_plain(key, here)
        if isinstance(name, (dict, list)):
            raise not_encodable(at, f"a key must be a string, got {type_name(type(name))}. Use str(key)")
        plain[name if isinstance(name, str) else json.dumps(name)] = as_plain(item, here)
    return plain


def _items(items: list[Any], at: Path | None) -> list[Any]:
    here = descend(at, items)
    plain = []
    for index, item in enumerate(items):
        here.step = index
        plain.append(as_plain(item, here))
    return plain


def _not_finite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _text_of_bytes(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return base64.b64encode(value).decode()
