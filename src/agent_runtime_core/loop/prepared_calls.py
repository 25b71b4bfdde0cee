"""What comes before a tool call: the hook, the condition of the tool, and the question to a person."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from .._core.codec.json import encode
from .._core.context_vars import start_soon
from .._core.log import log
from .._core.validation import must
from .._execution.loop_messages import question_details, with_edits
from .._execution.recorded_calls import UNRECORDED, RecordedCalls
from .._execution.sync_context import is_async, run_plain
from ..errors import holds
from ..interfaces import ToolCallDict
from ..tools.arguments import BadArguments, check_arguments, read_arguments
from ..tools.confirmation import Decision, answer_schema, decision_of
from ..tools.invocation import ENDS_RUN
from ..tools.tool import Tool
from .session import LoopSession
from .state import TurnState

IndexedCall = tuple[int, ToolCallDict, Tool | None]  # a call, with its index in the answer and its tool
_Asks = Callable[[Awaitable[Any]], Awaitable[Any]]


class PreparedCall(NamedTuple):
    """What is known about a call before its tool runs.

    Attributes:
        arguments: The arguments with which the tool runs; None if they cannot be read.
        changed: The arguments after a hook as JSON, if they may differ from the arguments of the call.
        is_valid: Whether they match the parameters of the tool. Only known for another agent, and with a hook or a
            confirmation.
        rejection: Why a person rejected the call, or None.
    """

    arguments: dict[str, Any] | None
    changed: str | None = None
    is_valid: bool = True
    rejection: str | None = None


class Question:
    """The question to a person about one call.

    Args:
        ctx: The context of the run.
        steps: The recorded calls of the run.
        key: Identifies the call in the journal.
        tool: The tool.
        name: The name by which it is called.
        arguments: The arguments of the call, which match the parameters of the tool.
        call_id: The id of the call.
    """

    def __init__(
        self, ctx: Any, steps: RecordedCalls, key: str, tool: Tool, name: str, arguments: dict[str, Any], call_id: str
    ) -> None:
        self._ctx, self._steps, self._key, self._tool, self._name = ctx, steps, key, tool, name
        self._arguments, self._call_id = arguments, call_id
        self._details: dict[str, Any] = question_details(name, arguments, call_id)

    async def is_asked(self) -> bool:
        """Return whether a person is asked. A condition of the tool decides once, and its outcome is recorded."""
        condition, steps, key = self._tool.requires_confirmation, self._steps, self._key
        if isinstance(condition, bool):
            return condition
        outcome = steps.recorded("condition", key)
        if outcome is UNRECORDED:
            if steps.has_begun(f"signal:tool:{self._name}", key):  # when the tool had no condition
                return True
            outcome = await steps.run("condition", key, lambda _: self._evaluated(condition))
        self._details = question_details(self._name, self._arguments, self._call_id, outcome)
        return outcome is not False

    async def _evaluated(self, condition: Callable[..., Any]) -> bool | str:
        """Return False if no person is asked, else True or the text of the question. Any other outcome asks."""
        given: dict[str, Any] = copy.deepcopy(self._arguments)
        try:
            if is_async(condition):
                outcome = await condition(given, self._ctx)
            else:
                outcome = await run_plain(lambda ctx, given: condition(given, ctx), self._ctx, given)
        except Exception as error:
            if holds(error, ENDS_RUN):
                raise
            outcome = error
        if isinstance(outcome, bool | str):
            return outcome
        got = f"{'raised' if isinstance(outcome, Exception) else 'returned'} {type(outcome).__name__}"
        run = getattr(self._ctx, "run_key", None) or getattr(self._ctx, "run_id", None)
        log.warning("the condition of tool %.120s of run %s %.300s, so a person is asked", self._name, run, got)
        return True

    async def ask(self) -> Decision:
        """Ask, and wait for an answer that fits the parameters of the tool."""
        schema = answer_schema(self._tool.parameters)
        answer = await self._ctx.approve(f"tool:{self._name}", self._details, schema=schema, key=self._key)
        return decision_of(answer)


class CallPreparation:
    """Prepares the calls of a loop: the questions about several calls of one answer are asked at the same time."""

    def __init__(self, session: LoopSession) -> None:
        self.session: LoopSession = session
        #: What the model is told about edited calls, by their index in the answer, if the call itself stays as it is.
        self.notes: dict[int, str] = {}
        self._tasks: dict[int, asyncio.Task[PreparedCall]] = {}  # by the index of the call in the answer

    def asking(self, turn: str, calls: Sequence[IndexedCall]) -> list[IndexedCall]:
        """Return the calls of a new answer that a person may need to approve."""
        steps = self.session.steps
        return [
            each
            for each in calls
            if each[2] is not None and each[2].requires_confirmation
            if steps.replayed("tool", f"{turn}:{each[0]}") is UNRECORDED
        ]

    @asynccontextmanager
    async def asked_together(self, turn: str, calls: Sequence[IndexedCall]) -> AsyncIterator[None]:
        """Prepare several calls at the same time, while the block runs."""
        self._tasks = {
            index: start_soon(self._prepare(index, f"{turn}:{index}", call, tool, _unchanged))
            for index, call, tool in calls
        }
        try:
            yield
        except GeneratorExit:  # the loop is garbage-collected, and so are its tasks
            raise
        except BaseException:
            await self._stop()
            raise
        await self._stop()

    async def _stop(self) -> None:
        """Cancel the preparations that are left, which closes their questions."""
        tasks, self._tasks = [*self._tasks.values()], {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def prepared(self, index: int, key: str, call: ToolCallDict, tool: Tool | None) -> PreparedCall:
        """Return what is known about a call when its tool may run."""
        if tool is None or not (
            tool.requires_confirmation or self.session.hooks.before_tool is not None or tool.metadata.get("agent")
        ):
            return PreparedCall(read(call))  # the tool checks the arguments
        task = self._tasks.get(index)
        if task is None:
            return await self._prepare(index, key, call, tool, self._waiting)
        return await (task if task.done() else self._waiting(task))

    def replay(self, index: int, key: str, call: ToolCallDict) -> None:
        """Take up what was recorded before a call that has a saved result."""
        steps = self.session.steps
        hooked = steps.recorded("hook", f"{key}:before")
        steps.recorded("condition", key)
        answer = steps.recorded(f"signal:tool:{call.name}", key)
        if answer is not UNRECORDED:
            self._edit(index, call, decision_of(answer), read(call) if hooked is UNRECORDED else hooked)

    async def hooked(self, key: str, name: str, arguments: dict[str, Any], *, lazy: bool = False) -> dict[str, Any]:
        """Return the arguments after the hook before a tool, which is called once, between steps: it may wait."""
        hook, steps = self.session.hooks.before_tool, self.session.steps
        recorded = steps.recorded("hook", f"{key}:before")
        if recorded is not UNRECORDED:  # even if the code uses no hook any more: a person may have approved this
            return cast("dict[str, Any]", recorded)
        if hook is None:
            return arguments

        async def changed() -> dict[str, Any]:
            returned: Any = await hook(name, arguments)
            if returned is not None and not isinstance(returned, Mapping):
                fix = "Return the arguments to use, or None after a change in place"
                raise must(f"the result of the hook before tool {name!r}", "be None or a dict", returned, fix)
            return arguments if returned is None else dict(cast("Mapping[str, Any]", returned))

        return cast("dict[str, Any]", await steps.between("hook", f"{key}:before", changed, lazy=lazy))

    async def _prepare(
        self, index: int, key: str, call: ToolCallDict, tool: Tool | None, waiting: _Asks
    ) -> PreparedCall:
        arguments, changed = read(call), None
        if tool is None or arguments is None or not _are_valid(arguments, tool):
            return PreparedCall(arguments, is_valid=False)
        confirmation = tool.requires_confirmation
        # The hook before another agent follows the event of its call, unless a question shows its arguments.
        if confirmation or not tool.metadata.get("agent"):
            hooked = await self.hooked(key, call.name, arguments, lazy=not (tool.has_side_effects or confirmation))
            if hooked is not arguments:
                arguments, changed = hooked, encode(hooked)
        if confirmation:
            question = Question(self.session.ctx, self.session.steps, key, tool, call.name, arguments, call.id)
            if await question.is_asked():
                decision: Decision = await waiting(question.ask())
                if decision.rejection is not None:
                    return PreparedCall(arguments, rejection=decision.rejection)
                if self._edit(index, call, decision, arguments):
                    return PreparedCall(read(call))
        return PreparedCall(arguments, changed)

    async def _waiting(self, work: Awaitable[Any]) -> Any:
        """Wait for a person. The time does not count."""
        session = self.session
        session.state(TurnState.WAITING)
        session.stop_timer()
        answer = await session.unless_cancelled(work)
        session.start_timer()
        session.state(TurnState.TOOL_EXECUTION)
        return answer

    def _edit(self, index: int, call: ToolCallDict, decision: Decision, shown: dict[str, Any] | None) -> bool:
        """Replace the arguments of a call by the arguments that a person approved, in the call that the model sees too.

        Args:
            index: The index of the call in the answer of the model.
            call: The call.
            decision: The decision of the person.
            shown: The arguments in the question.

        Returns:
            Whether the person changed them.
        """
        edited = decision.arguments
        if edited is None:
            return False
        if encode(edited, sort_keys=True) == encode(shown, sort_keys=True):
            return False
        text, messages = encode(edited), self.session.messages
        call["function"] = {"name": call.name, "arguments": text}
        # The last message is the answer of the model: the results of the tools follow it.
        messages[-1], notes = with_edits(messages[-1], {index: text})
        self.notes |= notes
        return True


async def _unchanged(work: Awaitable[Any]) -> Any:
    return await work


def read(call: ToolCallDict) -> dict[str, Any] | None:
    """Return the arguments with which a tool runs, or None if they are invalid."""
    try:
        return read_arguments(call.arguments)
    except BadArguments:
        return None


def _are_valid(arguments: Mapping[str, Any], tool: Tool) -> bool:
    """Return whether arguments match the parameters of a tool."""
    try:
        check_arguments(tool.parameters, arguments)
    except BadArguments:
        return False
    return True
