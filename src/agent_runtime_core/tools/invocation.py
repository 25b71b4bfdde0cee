"""Run the tool calls of a model. Each call has an answer, unless the run itself must stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from .._core.codec.json import encode
from .._core.validation import MAX_DEPTH
from ..errors import (
    InvalidArgument,
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    Postponed,
    StepCancelledError,
    StorageError,
    ToolTimeout,
    UnserialisableResult,
    deciding_error,
    text_of,
)
from .arguments import BadArguments, check_arguments, read_arguments
from .registry import CallsTool, ToolRegistry, unknown_tool
from .results import in_json
from .tool import Tool

__all__ = ["BAD_ARGUMENTS", "FAILED", "TIMED_OUT", "UNKNOWN_TOOL", "ToolAnswer", "answer_call"]

UNKNOWN_TOOL: Final = "unknown_tool"
BAD_ARGUMENTS: Final = "bad_arguments"
FAILED: Final = "failed"
TIMED_OUT: Final = "timed_out"

#: Errors that a model cannot fix: the run stops here, or continues on another worker.
_ENDS_RUN: Final = (LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageError)
_LARGEST: Final = 1024 * 1024  # bytes of a result as JSON, because a model has to read it
_SURELY_SMALL: Final = _LARGEST // 12 - 1  # characters; JSON needs at most twelve bytes for one
_LONGEST: Final = 4000  # characters of an error that a model gets


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a tool call.

    Attributes:
        content: The text for the model.
        ok: Whether the tool succeeded.
        result: What the tool returned, in the JSON form of its annotated return type if it is not JSON itself.
        error: None, or "unknown_tool", "bad_arguments", "failed" or "timed_out". Only for the last two the tool ran.
    """

    content: str
    ok: bool
    result: Any = None
    error: str | None = None


async def answer_call(
    registry: ToolRegistry,
    call: CallsTool,
    ctx: Any,
    *,
    before: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None,
    after: Callable[[str, Any], Awaitable[Any]] | None = None,
) -> ToolAnswer:
    """Run the tool that a model requests; the answer reports mistakes, so that the model can correct them.

    Args:
        registry: The tools.
        call: The tool call.
        ctx: The context of the run, or None.
        before: Awaited with the name and the valid arguments, which it may change.
        after: Awaited with the name and the result; returns the result to use, which must be JSON, by itself or by the
            tool's return type.

    Errors of `before` and `after` are raised. Of the tool's errors, only those are raised that a model cannot fix: a
    cancellation of this task, LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch and
    StorageError.
    """
    name = call.name
    tool = registry.get(name)
    if tool is None:
        return _error_answer(UNKNOWN_TOOL, str(unknown_tool(name, registry.list_tools())))
    try:
        arguments = read_arguments(call.arguments)
    except BadArguments as error:
        return _error_answer(BAD_ARGUMENTS, f"tool {name!r}: {error}")
    return await answer_read(registry, name, tool, arguments, ctx, before=before, after=after)


async def answer_read(
    registry: ToolRegistry,
    name: str,
    tool: Tool,
    arguments: dict[str, Any],
    ctx: Any,
    *,
    before: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None,
    after: Callable[[str, Any], Awaitable[Any]] | None = None,
) -> ToolAnswer:
    """Like `answer_call`, with the arguments that `read_arguments` returned."""
    try:
        check_arguments(tool.parameters, arguments)
    except BadArguments as error:
        return _error_answer(BAD_ARGUMENTS, f"tool {name!r}: {error}")
    if before is not None:
        await before(name, arguments)
    # A hook may have changed the arguments, and a subclass of the registry may override `execute`.
    checked = before is None and type(registry).execute is ToolRegistry.execute
    try:
        result = await (
            registry.run_checked(tool, arguments, ctx) if checked else registry.execute(name, arguments, ctx)
        )
    except _ENDS_RUN:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _failed(name, error)  # something that the tool awaited was cancelled, not the tool
    except Exception as error:
        ends = error.subgroup(_ENDS_RUN) if isinstance(error, ExceptionGroup) else None
        if ends is not None:
            raise deciding_error(ends) from error
        return _failed(name, error)
    if after is not None:
        result = await after(name, result)
    try:
        if type(result) is not str or len(result) > _SURELY_SMALL:
            result, text = in_json(tool, result, _LARGEST)
            if text.count("[") + text.count("{") >= MAX_DEPTH:
                encode([result])  # nested as in the event and the record
    except (UnserialisableResult, InvalidArgument) as error:
        return _error_answer(FAILED, f"the result of tool {name!r} cannot be stored: {error}")
    return ToolAnswer(_sendable(str(result)), True, result)


def _failed(name: str, error: BaseException) -> ToolAnswer:
    error = deciding_error(error)
    # Only errors of this call: a tool may have called another tool.
    if isinstance(error, BadArguments) and error.tool == name:
        return _error_answer(BAD_ARGUMENTS, str(error))
    if isinstance(error, ToolTimeout) and error.tool == name:
        return _error_answer(TIMED_OUT, str(error))
    try:
        message = text_of(error) if isinstance(error, BaseExceptionGroup) else str(error)
    except Exception:  # noqa: BLE001 - the __str__ of a foreign error may raise anything
        message = ""
    return _error_answer(FAILED, f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _error_answer(kind: str, reason: str) -> ToolAnswer:
    reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]} … ({len(reason) - _LONGEST} more characters)"
    return ToolAnswer(_sendable(f"Error: {reason}"), False, None, kind)


def _sendable(text: str) -> str:
    """Return the text with lone surrogates escaped: UTF-8 has none, so one would break every later request."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
