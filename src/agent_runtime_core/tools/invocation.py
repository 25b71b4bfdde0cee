"""Run the tool calls of a model. Each call gets an answer, unless the run itself must stop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from .._core.codec.json import decode, encode
from .._core.context_vars import claimed_run
from .._core.log import log
from .._core.timeouts import cancellations, replaced_cancellation
from .._core.validation import MAX_DEPTH
from ..errors import (
    JournalMismatch,
    LeaseLost,
    LimitExceeded,
    Postponed,
    StepCancelledError,
    StorageError,
    ToolTimeout,
    UnserialisableResult,
    deciding_error,
    described,
    text_of,
)
from .arguments import BadArguments, check_arguments, parsed_arguments, read_arguments
from .base import output_of
from .registry import CallsTool, ToolRegistry, unknown_tool
from .results import ContentParts, in_json, text_of_parts, text_of_result
from .tool import Tool

__all__ = ["BAD_ARGUMENTS", "FAILED", "NO_RESULT", "TIMED_OUT", "UNKNOWN_TOOL", "ToolAnswer", "answer_call"]


UNKNOWN_TOOL: Final = "unknown_tool"
BAD_ARGUMENTS: Final = "bad_arguments"
FAILED: Final = "failed"
TIMED_OUT: Final = "timed_out"
NO_RESULT: Final = "no_result"

#: Errors that a model cannot fix: the run stops here, or continues on another worker.
ENDS_RUN: Final = (LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageError)
_LARGEST: Final = 1024 * 1024  # bytes of a result as JSON, because a model must read it
_SURELY_SMALL: Final = _LARGEST // 12 - 1  # characters; JSON needs at most twelve bytes for a character
_LONGEST: Final = 4000  # characters of an error that a model gets


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a tool call.

    Attributes:
        content: The text for the model.
        ok: Whether the tool succeeded. True also if the tool ran and only its result cannot be stored.
        result: What the tool returned, in the JSON form of its annotated return type if it is not JSON itself. None if
            it cannot be stored; `content` then says that the tool ran.
        error: None, or "unknown_tool", "bad_arguments", "failed", "timed_out" or "no_result". The tool did not run for
            the first two. For "no_result" it succeeded, and only its result is missing.
        parts: The content parts for the model, if the tool returned `ContentParts`. `content` is their text.
    """

    content: str
    ok: bool
    result: Any = None
    error: str | None = None
    parts: list[dict[str, Any]] | None = None


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
        after: Awaited with the name and the result; returns the result to use.

    Returns:
        The answer for the model.

    The content of a string result is the string, and of another result its JSON.

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
    retries: Callable[[BaseException], bool] | None = None,
) -> ToolAnswer:
    """Like `answer_call`, with the arguments that `read_arguments` returned.

    With `retries`, makes one attempt and raises an error of the tool for which it returns True: the caller retries.
    """
    arguments = parsed_arguments(tool.parameters, arguments)
    try:
        check_arguments(tool.parameters, arguments)
    except BadArguments as error:
        return _error_answer(BAD_ARGUMENTS, f"tool {name!r}: {error}")
    if before is not None:
        await before(name, arguments)
    requested = cancellations()
    try:
        result = output_of(
            name, await _execute(registry, name, tool, arguments, ctx, before is None, retries is not None)
        )
    except ENDS_RUN:
        raise
    except asyncio.CancelledError as error:
        if asyncio.current_task() is None or cancellations() > requested:
            raise
        return _failed(name, error)  # something that the tool awaited was cancelled, not the tool
    except Exception as error:
        run = claimed_run()
        if cancellations() > requested or (run is not None and run.cut_off()):
            raise replaced_cancellation(error) from error  # the tool was cut off: its error is no answer
        ends = error.subgroup(ENDS_RUN) if isinstance(error, ExceptionGroup) else None
        if ends is not None:
            raise deciding_error(ends) from error
        if retries is not None and retries(error):
            raise
        return _failed(name, error)
    if after is not None:
        result = await after(name, result)
    return answer_of(tool, result)


def answer_of(tool: Tool, result: Any) -> ToolAnswer:
    """Return the answer of a tool that ran. A result that cannot be stored is described, and is no failure.

    A model repeats a call that failed. A call with side effects would take effect again.
    """
    if type(result) is str and len(result) <= _SURELY_SMALL:
        return ToolAnswer(_sendable(result), True, result)
    try:
        if isinstance(result, ContentParts):
            parts: Any = decode(encode([*result], max_bytes=_LARGEST))
            return ToolAnswer(_sendable(text_of_parts(parts)), True, parts, None, parts)
        stored, text = in_json(tool, result, _LARGEST)
        if text.count("[") + text.count("{") >= MAX_DEPTH:
            encode([stored])  # nested as in the event and the record
        return ToolAnswer(_sendable(text_of_result(stored)), True, stored)
    except UnserialisableResult as error:
        log.warning("tool %r ran, but its result cannot be stored: %s", tool.name, error)
        return ran(tool.name, f"its result of type {type(result).__name__} cannot be stored: {error}")


def ran(name: str, problem: str) -> ToolAnswer:
    """Return the answer of a tool that ran, but whose result the model cannot get."""
    return ToolAnswer(_sendable(f"Tool {name!r} ran, but {problem:.{_LONGEST}}"), True, None, NO_RESULT)


def _execute(
    registry: ToolRegistry, name: str, tool: Tool, arguments: dict[str, Any], ctx: Any, checked: bool, once: bool
) -> Awaitable[Any]:
    """Run a tool, in a single attempt if `once`. `checked` says that the arguments are unchanged since their check."""
    if type(registry).execute is not ToolRegistry.execute:  # a subclass may run tools in another way
        return registry.execute(name, arguments, ctx)
    if not checked:
        return registry.execute_read(name, arguments, ctx, once=once)
    return registry.run_once(tool, arguments, ctx) if once else registry.run_checked(tool, arguments, ctx)


def _failed(name: str, error: BaseException) -> ToolAnswer:
    error = deciding_error(error)
    # Only errors of this call: a tool may have called another tool.
    if isinstance(error, BadArguments) and error.tool == name:
        return _error_answer(BAD_ARGUMENTS, str(error))
    if isinstance(error, ToolTimeout) and error.tool == name:
        return _error_answer(TIMED_OUT, str(error))
    message = ""
    with described():
        message = text_of(error) if isinstance(error, BaseExceptionGroup) else str(error)
    return _error_answer(FAILED, f"{type(error).__name__}: {message}" if message else type(error).__name__)


def _error_answer(kind: str, reason: str) -> ToolAnswer:
    reason = reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]} … ({len(reason) - _LONGEST} more characters)"
    return ToolAnswer(_sendable(f"Error: {reason}"), False, None, kind)


def _sendable(text: str) -> str:
    """Return the text with lone surrogates escaped: UTF-8 cannot encode them, so one would break all later requests."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
