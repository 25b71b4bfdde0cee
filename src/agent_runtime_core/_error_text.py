"""The text of errors and values in messages and records: cut off, and without a failing __str__ or __repr__."""

from __future__ import annotations

import inspect
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, cast

_SUSPENDED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

MOST_NAMED = 5  # errors of a group that its message lists
LONGEST = 16_384  # characters kept of an error message or a traceback, so that it fits into a journal record


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error may be a Ctrl-C, which only the main thread receives.

    A future may bring the main thread an error that another thread has raised: a frame of it is not below the main
    thread's first frame. A coroutine that has ended does not know who called it.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    first = _first(sys._getframe())
    starts = (_first(frame) for frame, _ in traceback.walk_tb(error.__traceback__))
    return all(each is first or each.f_code.co_flags & _SUSPENDED for each in starts)


def _first(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


@contextmanager
def described() -> Iterator[None]:
    """Suppress what the methods of a foreign class raise while it is described, also SystemExit, but no Ctrl-C."""
    try:
        yield
    except BaseException as error:
        if is_interrupt(error):
            raise


def shortened(text: str) -> str:
    """Return `text`, without its middle if it is more than twice as long as `LONGEST` characters."""
    if len(text) <= 2 * LONGEST:  # a shortened text, with a few words added, is not shortened again
        return text
    half = LONGEST // 2
    return f"{text[:half]}… ({len(text) - 2 * half} characters left out) …{text[-half:]}"


def text_of(error: BaseException) -> str:
    """Return an error's message, or its class name if it has none; for a group, also the errors inside it."""
    with described():
        text = shortened(str(error)) or type(error).__name__
        return text if not isinstance(error, BaseExceptionGroup) else shortened(f"{text}: {_contained(error)}")
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
    text = f"<{kind.__name__}>"
    with described():
        text = repr(value)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def brief_kind(value: object) -> str:
    """Return a number as `brief` does, but only type and length of a text: a stored one may be of a user."""
    if isinstance(value, str):
        return f"a string of {len(value):,} characters"
    if isinstance(value, bytes):
        return f"bytes of length {len(value):,}"
    return brief(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
