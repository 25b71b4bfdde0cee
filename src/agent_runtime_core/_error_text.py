"""The text of errors and values in messages and records: cut off, and without a failing __str__ or __repr__."""

from __future__ import annotations

from typing import cast

MOST_NAMED = 5  # errors of a group that its message lists
LONGEST = 16_384  # characters kept of an error message or a traceback, so that it fits into a journal record


def shortened(text: str) -> str:
    """Return `text`, without its middle if it is more than twice as long as `LONGEST` characters."""
    if len(text) <= 2 * LONGEST:  # a shortened text, with a few words added, is not shortened again
        return text
    half = LONGEST // 2
    return f"{text[:half]}… ({len(text) - 2 * half} characters left out) …{text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return an error's message, or its class name if it has none; for a group, also the errors inside it."""
    try:
        text = shortened(str(error)) or type(error).__name__
        return text if not isinstance(error, BaseExceptionGroup) else shortened(f"{text}: {_contained(error)}")
    except Exception:  # noqa: BLE001 - the __str__ of a foreign class may raise anything
        return f"{type(error).__name__} (its message is not available)"


def leaves_of(error: BaseException) -> list[BaseException]:
    """Return the errors of a group in order, with those of nested groups; for any other error, the error itself."""
    found: list[BaseException] = []
    pending = [error]
    while pending:
        each = pending.pop()
        if isinstance(each, BaseExceptionGroup):
            pending += reversed(each.exceptions)
        else:
            found.append(each)
    return found


def _contained(group: BaseExceptionGroup[BaseException]) -> str:
    errors = leaves_of(group)
    more = [f"{len(errors) - MOST_NAMED} more"] if len(errors) > MOST_NAMED else []
    return "; ".join([*(f"{type(each).__name__}: {text_of(each)}" for each in errors[:MOST_NAMED]), *more])


def brief(value: object, most: int = 80) -> str:
    """Return the repr of a value for an error message, cut at `most` characters; its type name if repr() fails."""
    kind = type(value)
    if kind is int and cast("int", value).bit_length() > 256:
        return f"<int of {cast('int', value).bit_length()} bits>"  # repr() raises for more than 4,300 digits
    if kind in (str, bytes):
        value = cast("str", value)[: most + 1]
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the __repr__ of a foreign class may raise anything
        return f"<{kind.__name__}>"
    return text if len(text) <= most else f"{text[: most - 1]}…"


def brief_kind(value: object) -> str:
    """Return a number as `brief` does, but only type and length of a text: a stored one may be of a user."""
    if isinstance(value, str):
        return f"a string of {len(value):,} characters"
    if isinstance(value, bytes):
        return f"bytes of length {len(value):,}"
    return brief(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
