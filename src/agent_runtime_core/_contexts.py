"""Context variables that tasks set for a while."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar, Token
from typing import Any


def restore(variable: ContextVar[Any], token: Token[Any]) -> None:
    """Give a variable the value it had.

    A task that waits for ever, as those that outlive their run do, is collected some day in whoever's context that is:
    nothing is restored there.
    """
    with contextlib.suppress(ValueError):
        variable.reset(token)
