"""Read the words of a server from the body of an error, whatever its shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import unescape
from typing import Any

#: Fields that have the words, or an object with the words; the most specific first.
_NAMES = (
    "message", "error_message", "errormessage", "msg", "status_msg", "faultstring", "detail", "details",
    "error_description", "description", "reason", "error", "errors", "fault", "base_resp", "raw", "metadata", "title",
)  # fmt: skip
#: Fields with the words of an error in a successful answer that has no field `error`.
ERROR_FIELDS = (
    "message", "Message", "detail", "errors", "msg", "error_msg", "errmsg", "error_message", "errorMessage", "fault",
    "title",
)  # fmt: skip
#: Fields that name the error, if there are no words.
_CODES = ("code", "type", "status")
#: Levels of objects in objects and JSON in strings that are read.
_DEPTH = 8
#: Characters of a body that are read, and of the words that are returned.
_LONGEST_BODY = 50_000
_LONGEST = 2_000
#: Errors of a list that are returned.
_MOST = 5
# Control characters and marks of text direction can change what a terminal shows.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]+")

_HIDDEN = re.compile(r"<(?:script|style)\b", re.I)
_HIDDEN_END = re.compile(r"</(?:script|style)\s*>", re.I)
_TAG = re.compile(r"<[^<>]*>")


def words_of(body: Any) -> str:
    """Return the words in the body of an error, "" if there are none.

    Args:
        body: Text (JSON, HTML or plain), or parsed JSON.
    """
    found: list[str] = []
    for each in _words(body, _DEPTH):
        text = " ".join(_CONTROL.sub(" ", each).split())
        if text and not any(text in known for known in found):
            found.append(text)
        if len(found) == _MOST:
            break
    return "; ".join(found)[:_LONGEST]


def _words(body: Any, depth: int) -> Iterator[str]:
    if depth <= 0:
        return
    if isinstance(body, str):
        yield from _in_text(body[:_LONGEST_BODY].strip(), depth)
    elif isinstance(body, list):
        for each in body[:_MOST]:
            yield from _words(each, depth - 1)
    elif isinstance(body, Mapping):
        yield from _in_object(body, depth)


def _in_text(text: str, depth: int) -> Iterator[str]:
    if text[:1] in ("{", "[", '"'):
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            yield text
        else:
            yield from _words(parsed, depth - 1)
    elif text[:1] == "<" or "<html" in text[:500].lower():
        yield _without_tags(text)
    else:
        yield text


def _in_object(body: Mapping[Any, Any], depth: int) -> Iterator[str]:
    fields = {str(name).lower(): value for name, value in body.items()}
    where = fields.get("loc")
    prefix = ".".join(map(str, where)) + ": " if isinstance(where, list) and where else ""
    some = False
    for name in _NAMES:
        for words in _words(fields.get(name), depth - 1):
            some = some or bool(words)
            yield prefix + words
    if some or depth < _DEPTH - 2:
        return
    if codes := [f"{name} {fields[name]}" for name in _CODES if fields.get(name)]:
        yield ", ".join(codes)
    else:
        # The errors of a form have the fields of the request as names.
        for name, value in fields.items():
            for words in _words(value, depth - 1):
                yield f"{name}: {words}"


def _without_tags(text: str) -> str:
    """Return the text of an HTML page."""
    first, *rest = _HIDDEN.split(text)
    shown = [first] + [part[end.end() :] for part in rest if (end := _HIDDEN_END.search(part))]
    return unescape(_TAG.sub(" ", " ".join(shown)))
