"""What a model's call of a tool comes to: always an answer, unless the run itself cannot go on."""

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

#: No answer of the model could mend these: the run stops here, or somewhere else goes on with it.
_ENDS_RUN: Final = (LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch, StorageError)
_LARGEST: Final = 1024 * 1024  # bytes of a result as JSON: a model is to read it
_SURELY_SMALL: Final = _LARGEST // 12 - 1  # characters, of which JSON may write each with twelve
_LONGEST: Final = 4000  # characters of an error, of which a model reads the first


@dataclass(frozen=True)
class ToolAnswer:
    """What goes back to the model as `content`.

    `result` is what the tool gave, or where only its annotated return type has a form in JSON, that form.
    `error` is None for a good answer, else "unknown_tool", "bad_arguments", "failed" or "timed_out"; of these,
    only the last two called the tool.
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
    """Run the tool a model asks for; what it did wrong is in the answer, for it to do better.

    `before(name, arguments)` is awaited when the call fits, and may change the arguments; `after(name,
    result)` gives the result that counts, which has an exact JSON form, by itself or by the tool's return
    type. What they raise goes on. Of what the tool raises, only what the model can do nothing about does: a
    cancellation of this task, LeaseLost, StepCancelledError, Postponed, LimitExceeded, JournalMismatch and
    StorageError.
    """
    name = call.name
    tool = registry.get(name)
    if tool is None:
        return _wrong(UNKNOWN_TOOL, str(unknown_tool(name, registry.list_tools())))
    try:
        arguments = read_arguments(call.arguments)
    except BadArguments as error:
        return _wrong(BAD_ARGUMENTS, f"tool {name!r}: {error}")
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
    """`answer_call` with the arguments as `read_arguments` gives them."""
    try:
        check_arguments(tool.parameters, arguments)
    except BadArguments as error:
        return _wrong(BAD_ARGUMENTS, f"tool {name!r}: {error}")
    if before is not None:
        await before(name, arguments)
    # A hook may have changed them, and another registry may run its tools in its own way.
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
        return _failed(name, error)  # what the tool awaited was cancelled, and nobody cancelled the tool
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
                encode([result])  # as deep as it is told and recorded
    except (UnserialisableResult, InvalidArgument) as error:
        return _wrong(FAILED, f"the result of tool {name!r} cannot be kept: {error}")
    return ToolAnswer(_sendable(str(result)), True, result)


def _failed(name: str, error: BaseException) -> ToolAnswer:
    error = deciding_error(error)
    # Only of this very call: a tool may have called another one.
    if isinstance(error, BadArguments) and error.tool == name:
        return _wrong(BAD_ARGUMENTS, str(error))
    if isinstance(error, ToolTimeout) and error.tool == name:
        return _wrong(TIMED_OUT, str(error))
    try:
        said = text_of(error) if isinstance(error, BaseExceptionGroup) else str(error)
    except Exception:  # noqa: BLE001 - the error is the tool's, and so is its text
        said = ""
    return _wrong(FAILED, f"{type(error).__name__}: {said}" if said else type(error).__name__)


def _wrong(kind: str, why: str) -> ToolAnswer:
    why = why if len(why) <= _LONGEST else f"{why[:_LONGEST]} … ({len(why) - _LONGEST} more characters)"
    return ToolAnswer(_sendable(f"Error: {why}"), False, None, kind)


def _sendable(text: str) -> str:
    """The text as UTF-8 can carry it: half a surrogate pair would spoil every later request."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()
