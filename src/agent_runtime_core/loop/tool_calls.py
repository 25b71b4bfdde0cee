"""The tool calls of a loop: their order, approvals, child agents, and what is recorded."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

from .._core.arguments import SYSTEM_ROLES
from .._core.codec.json import MAX_PARSED, arguments_digest, decode, encode, loads_strict
from .._core.context_vars import start_soon
from .._core.event_types import EventType
from .._core.log import step_position
from .._core.validation import Shown, must
from .._execution.loop_messages import INTERRUPTED, NOT_RUN, unanswered, with_note
from .._execution.recorded_calls import UNRECORDED
from .._execution.step import DEFAULT_OPTIONS, StepOptions
from ..errors import LimitExceeded, RunFailed, ToolTimeout, UnknownAgent, UnserialisableResult, brief
from ..interfaces import RunResult, ToolCallDict
from ..limits import RunLimits
from ..tools.arguments import parsed_arguments
from ..tools.invocation import BAD_ARGUMENTS, ENDS_RUN, FAILED, UNKNOWN_TOOL, ToolAnswer, answer_call, answer_read, ran
from ..tools.names import tool_name
from ..tools.registry import ToolRegistry
from ..tools.results import as_plain, text_of_result
from ..tools.retries import is_retried
from ..tools.tool import Tool, in_doubt_policy
from .prepared_calls import CallPreparation, IndexedCall, PreparedCall, read
from .session import LoopSession
from .state import TurnState

_TAKEN_OVER = "Error: not run, because another agent has taken over the conversation"
_REJECTED = "refused"  # the error of a call that a person rejected
_NESTED_TEXT = re.compile(r'"(?:\s|\\[nrt"])*[\[{]')  # JSON text as a value in JSON
MALFORMED = 3  # turns in a row with only malformed tool calls, after which the loop fails


class ToolCalls:
    """Runs the tools that the model of a loop requests."""

    def __init__(self, session: LoopSession) -> None:
        self.session: LoopSession = session
        self.preparation: CallPreparation = CallPreparation(session)
        #: The result of the agent that took over the conversation by a handoff.
        self.child: RunResult | None = None
        self.malformed: int = 0  # turns in a row
        #: How many calls with an in-doubt policy this loop made, by tool and arguments.
        self.guarded: Counter[str] = Counter()
        #: Errors of hooks after tools with side effects, by the index of the call. Raised after the call is recorded.
        self.hook_errors: dict[int, Exception] = {}
        self.started: set[int] = set()  # indexes of the calls of this turn whose tool was called
        self.answered: dict[int, tuple[ToolCallDict, dict[str, Any]]] = {}  # calls of this turn with their answers
        self.recorded_seconds: float = 0.0  # seconds of the longest recorded call of a concurrent group

    async def run(self, key: str, calls: list[ToolCallDict]) -> None:
        """Answer all tool calls of one turn.

        Raises:
            LimitExceeded: They exceed a limit, or the model made only malformed calls in several turns.
        """
        session = self.session
        session.state(TurnState.TOOL_EXECUTION)
        answers: dict[int, dict[str, Any]] = {}
        self.started, self.answered = set(), {}
        try:
            session.check("tools")
            count = len(calls)
            if session.copied:
                count -= sum(session.steps.from_fork("tool", f"{key}:{index}") for index in range(count))
            await self._wait_until_allowed(lambda: session.budget.before_tools(count))
            session.budget.tool(count)
            self.preparation.notes = {}
            found: list[IndexedCall] = []
            for index, call in enumerate(calls):
                tool = self._tool(call.name)
                _parse(call, tool)
                found.append((index, call, tool))
            if len(asking := self.preparation.asking(key, found)) > 1:
                async with self.preparation.asked_together(key, asking):
                    await self._in_order(key, found, answers)
            else:
                await self._in_order(key, found, answers)
        finally:
            # This is needed after an error too: providers reject a history in which a call has no answer.
            for index, call in enumerate(calls):
                if (answer := answers.get(index)) is not None:
                    message = _answer_message(call, answer)
                    if (note := self.preparation.notes.get(index)) is not None:
                        message["content"] = with_note(message["content"], note)
                    session.messages.append(message)
                    continue
                reason = INTERRUPTED if index in self.started else NOT_RUN if self.child is None else _TAKEN_OVER
                session.messages.append(unanswered(call.id, reason))
        if self.child is None:
            self._count_malformed(answers)

    async def _wait_until_allowed(self, before: Callable[[], None]) -> None:
        """Wait for concurrent loops whose reservations leave no budget; LimitExceeded if none could release it."""
        session = self.session
        if not session.budget.unlimited:
            session.stop_timer()
            try:
                await session.budget.until_allowed(before, session.unless_cancelled)
            finally:
                session.start_timer()

    async def _in_order(self, key: str, calls: list[IndexedCall], answers: dict[int, dict[str, Any]]) -> None:
        """Run calls without side effects concurrently, and those with side effects one after the other.

        A handoff comes last, whatever its position: after it, no model of this loop would get a result.
        """
        session = self.session
        concurrent: list[IndexedCall] = []
        if len(calls) > 1:
            calls = sorted(calls, key=lambda each: _is_handoff(each[2]))
        for index, call, tool in calls:
            if tool is None or not (tool.has_side_effects or tool.requires_confirmation or tool.metadata.get("agent")):
                concurrent.append((index, call, tool))
                continue
            await self._run_concurrently(key, concurrent, answers)
            concurrent = []
            session.check(f"tool {call.name!r}")
            await self._run_concurrently(key, [(index, call, tool)], answers)
            if self.child is not None:
                return
        await self._run_concurrently(key, concurrent, answers)

    def _tool(self, name: str) -> Tool | None:
        """Return the tool with a name. Runs of earlier versions called an agent by its key, whatever it contained."""
        tools = self.session.tools
        tool = tools.get(name)
        if tool is None:
            agents = (each for each in tools.list_tools() if _agent(each))
            tool = next((each for each in agents if _key(_agent(each)).replace("-", "_") == name), None)
        return tool

    async def _run_concurrently(self, key: str, calls: list[IndexedCall], answers: dict[int, dict[str, Any]]) -> None:
        async def one(index: int, call: ToolCallDict, tool: Tool | None) -> None:
            answers[index] = await self._one(key, index, call, tool)
            self.answered[index] = call, answers[index]
            hook_error = self.hook_errors.pop(index, None)
            if hook_error is not None:
                raise hook_error

        if len(calls) < 2:
            for each in calls:
                await one(*each)
        else:
            await _gather([start_soon(one(*each)) for each in calls])
        if self.recorded_seconds:
            self.session.add_work_time(self.recorded_seconds)
            self.recorded_seconds = 0.0

    async def _one(self, turn: str, index: int, call: ToolCallDict, tool: Tool | None) -> dict[str, Any]:
        """Return the answer to one call as it is recorded: {"content", "ok", "error", "result"}."""
        session, key = self.session, f"{turn}:{index}"
        agent = None if tool is None else tool.metadata.get("agent")
        # The call of a child agent is recorded after its events, so it is replayed after them.
        recorded = session.steps.replayed("tool", key) if agent else session.steps.recorded("tool", key)
        given: PreparedCall | None = None
        if recorded is UNRECORDED or agent:
            given = await self.preparation.prepared(index, key, call, tool)
        if tool is not None and agent and given is not None and given.rejection is None and _may_begin(given, recorded):
            return await self._delegated(key, call, tool, agent, given, recorded is not UNRECORDED)
        if given is None or recorded is not UNRECORDED:
            if agent:
                session.steps.recorded("tool", key)
            elif tool is not None:
                self.preparation.replay(index, key, call)
                if recorded["error"] != _REJECTED:
                    self._effect(call, in_doubt_policy(tool))
            # Concurrent calls take as long as the longest call.
            self.recorded_seconds = max(self.recorded_seconds, session.steps.duration("tool", key))
            return cast("dict[str, Any]", recorded)
        if given.rejection is not None:
            return await self._rejected(key, call, given.rejection)
        return await self._recorded(key, index, call, tool, given)

    async def _recorded(
        self, key: str, index: int, call: ToolCallDict, tool: Tool | None, prepared: PreparedCall
    ) -> dict[str, Any]:
        """Run a tool as a recorded step, and return its answer."""
        session = self.session
        lazy = tool is None or not (tool.has_side_effects or tool.requires_confirmation)
        arguments = prepared.arguments
        changed = prepared.changed
        args = _args(call) if changed is not None or arguments is None else arguments
        call_record = {"name": call.name, "id": call.id, "args": args}
        in_doubt = in_doubt_policy(tool)
        options = _options(tool, in_doubt, session.tools)

        def attempt(number: int) -> Awaitable[dict[str, Any]]:
            self.started.add(index)
            # Read again for each retry, because a failed attempt may have changed them.
            given = arguments
            if number > 1:
                given = read(call) if changed is None else cast("dict[str, Any]", decode(changed))
            return self._answer(
                call, call_record, tool, given, index,
                lambda error: (isinstance(error, ToolTimeout) and not options.repeats_doubt)
                or options.delay(error, number, session.clock.random) is not None,
            )  # fmt: skip

        answer: dict[str, Any] = await session.in_time(
            session.steps.run(
                "tool",
                key,
                attempt,
                options=options,
                tool=call_record,
                effect=self._effect(call, in_doubt),
                lazy=lazy,
                given=None if changed is None else arguments,
            )
        )
        return answer

    def _effect(self, call: ToolCallDict, in_doubt: object) -> str | None:
        """Return a key of the call that is the same in all forks of the run; None if its policy is "retry".

        It counts the calls of this loop with the same tool and arguments. The index of the call would not do: in a fork
        the model may make the same call in another turn.
        """
        if in_doubt == "retry":
            return None
        digest = arguments_digest(call.name, _args(call)) or ""
        self.guarded[digest] += 1
        return f"{self.session.name}:{call.name}:{self.guarded[digest] - 1}"

    async def _answer(
        self, call: ToolCallDict, call_record: Mapping[str, Any], tool: Tool | None, arguments: dict[str, Any] | None,
        index: int, retries: Callable[[BaseException], bool],
    ) -> dict[str, Any]:  # fmt: skip
        session = self.session
        hooks, ctx, traced = session.hooks, session.ctx, session.traced
        started = session.clock.wall() if traced else 0.0
        if tool is None or arguments is None:
            answer = await answer_call(session.tools, call, ctx, after=hooks.after_tool)
        else:
            answer = await self._attempt(call_record["name"], index, tool, dict(arguments), retries)
        if traced:
            ctx.trace(
                "tool.done",
                {
                    **step_position(ctx.step_id), "tool_name": call_record["name"], "tool_call_id": call_record["id"],
                    "input": _args(call), "output": answer.content, "started_at": started,
                    "ended_at": session.clock.wall(), "error": None if answer.ok else answer.content,
                    "error_type": answer.error,
                },
            )  # fmt: skip
        return _plain(answer)

    async def _attempt(
        self, name: str, index: int, tool: Tool, arguments: dict[str, Any], retries: Callable[[BaseException], bool]
    ) -> ToolAnswer:
        """Run a tool once, with its hooks.

        If the hook after a tool with side effects fails, the call is recorded before the error is raised. Otherwise a
        retry of the run would repeat the effect.
        """
        session, after = self.session, self.session.hooks.after_tool
        run = partial(answer_read, session.tools, name, tool, arguments, session.ctx, retries=retries)
        if after is None or not tool.has_side_effects:
            return await run(after=after)
        failure: Exception | None = None

        async def recorded(name: str, result: Any) -> Any:
            nonlocal failure
            try:
                return await after(name, result)
            except ENDS_RUN:
                raise
            except Exception as error:  # noqa: BLE001 - the error of a hook, raised after the call is recorded
                failure = error

        answer = await run(after=recorded)
        if failure is None:
            return answer
        self.hook_errors[index] = failure
        return ran(name, f"the hook that follows it raised {type(failure).__name__}, so its result is missing")

    async def _rejected(self, key: str, call: ToolCallDict, reason: str) -> dict[str, Any]:
        answer = {
            "content": f"Error: a person refused this call: {reason}",
            "ok": False,
            "result": None,
            "error": _REJECTED,
        }

        async def recorded_answer(attempt: int) -> dict[str, Any]:
            return answer

        record = {"name": call.name, "id": call.id, "args": _args(call)}
        return cast("dict[str, Any]", await self.session.steps.run("tool", key, recorded_answer, tool=record))

    async def _delegated(
        self, key: str, call: ToolCallDict, tool: Tool, agent: Any, given: PreparedCall, recorded: bool
    ) -> dict[str, Any]:
        """Run a child agent with the remaining budget; its answer is the answer of the tool, hooks included.

        A child that is finished returns its recorded result.
        """
        session = self.session
        args = _args(call)
        event = {**session.steps.event_fields("tool", key), "tool_name": call.name, "tool_call_id": call.id}
        await session.ctx.emit(EventType.TOOL_CALL, {**event, "tool_args": args})
        if tool.requires_confirmation:
            args = given.arguments or {}
        else:
            args = await self.preparation.hooked(key, call.name, args)
        with suppress(LimitExceeded):  # if nothing is left, the child fails with this error
            await self._wait_until_allowed(session.budget.before_call)
        limits = session.budget.reserve_for_child(RunLimits.of(tool.metadata.get("limits")))
        task = args.get("task") or args.get("message") or encode(args)
        handoff = _is_handoff(tool)
        messages = [*(self._handed_over() if handoff else []), {"role": "user", "content": task}]
        input_ = {"messages": messages, "limits": limits.as_dict()}
        session.stop_timer()
        paid = session.steps.from_fork(f"call:{agent if isinstance(agent, str) else agent.key}", f"{key}:child")
        failure: Exception | None = None
        with session.budget.active_call():
            try:
                result = await session.ctx.call(agent, input_, key=f"{key}:child")
            except (RunFailed, UnknownAgent) as error:
                child_result = getattr(error, "result", None)
                failure, result = error, child_result if isinstance(child_result, RunResult) else RunResult()
            session.budget.return_unused(limits, {} if paid else result.usage)
        session.start_timer()
        if failure is not None:
            answer = _failed(failure) if isinstance(failure, RunFailed) else _failed(failure.args[0], UNKNOWN_TOOL)
        else:
            response = result.final_output.get("response", result.final_output)
            answer = await self._after_child(key, call, response)
            if handoff and answer["ok"] and answer.get("error") is None:
                self.child = replace(result, final_output={"response": answer["result"]})
        failed = {} if answer["ok"] else {"error": answer["content"]}
        await session.ctx.emit(EventType.TOOL_RESULT, {**event, "result": answer["result"], **failed})
        if recorded:
            return cast("dict[str, Any]", session.steps.recorded("tool", key))

        async def recorded_answer(attempt: int) -> dict[str, Any]:
            return answer

        return cast("dict[str, Any]", await session.steps.run("tool", key, recorded_answer, lazy=True))

    def _handed_over(self) -> list[Mapping[str, Any]]:
        """Return the messages that another agent gets in a handoff: the conversation with the other calls of this turn.

        Prompts, and what only the provider of this loop reads, belong to the first agent.
        """
        messages = self.session.messages
        shared: list[Mapping[str, Any]] = [each for each in messages[:-1] if each.get("role") not in SYSTEM_ROLES]
        if answered := [self.answered[index] for index in sorted(self.answered)]:
            calls = [dict(call) for call, _ in answered]
            shared.append({"role": "assistant", "content": messages[-1].get("content"), "tool_calls": calls})
            shared += [_answer_message(*each) for each in answered]
        return shared

    async def _after_child(self, key: str, call: ToolCallDict, response: Any) -> dict[str, Any]:
        """Return the answer of a child agent after the hook that follows it, which is called once."""
        hook = self.session.hooks.after_tool
        if hook is None:
            return _good(response)

        async def after(attempt: int) -> dict[str, Any]:
            result = await hook(call.name, response)
            try:
                return _good(result)
            except UnserialisableResult:
                pass
            try:
                return _good(as_plain(result))
            except UnserialisableResult as error:
                kind = type(result).__name__
                return _plain(ran(call.name, f"its result of type {kind} cannot be stored: {error}"))

        return await self._once(f"{key}:after", after)

    async def _once(self, key: str, hook: Callable[[int], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        recorded = self.session.steps.recorded("hook", key)
        if recorded is UNRECORDED:
            recorded = await self.session.steps.run("hook", key, hook)
        return cast("dict[str, Any]", recorded)

    def _count_malformed(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        for answer in answers.values():
            if answer.get("error") not in (BAD_ARGUMENTS, UNKNOWN_TOOL):
                self.malformed = 0
                return
        self.malformed += 1
        if self.malformed >= MALFORMED:
            raise LimitExceeded(
                "malformed_tool_calls", MALFORMED, self.malformed, "no tool call of these model calls was valid"
            )


def _answer_message(call: ToolCallDict, answer: Mapping[str, Any]) -> dict[str, Any]:
    message = {"role": "tool", "tool_call_id": call.id, "content": answer["content"]}
    return message if answer["ok"] else {**message, "metadata": {"is_error": True}}


async def _gather(tasks: list[asyncio.Task[None]]) -> None:
    try:
        await asyncio.gather(*tasks)
    except GeneratorExit:  # this coroutine is garbage-collected, and so are its tasks
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _options(tool: Tool | None, in_doubt: str | Callable[..., Any], registry: ToolRegistry) -> StepOptions:
    """Return how the call of a tool is attempted."""
    # A registry that runs tools in another way retries them itself.
    if tool is None or not tool.retries or type(registry).execute is not ToolRegistry.execute:
        return DEFAULT_OPTIONS if in_doubt == "retry" else StepOptions(on_in_doubt=in_doubt)
    delay = tool.retry_delay
    return StepOptions(
        tool.retries,
        0.0 if callable(delay) else delay,
        retry_on=partial(is_retried, tool),
        backoff=delay if callable(delay) else None,
        on_in_doubt=in_doubt,
    )


def _args(call: ToolCallDict) -> dict[str, Any]:
    """Return the arguments as a dict for events and records, {} if they are invalid."""
    raw = call.arguments
    if isinstance(raw, str) and len(raw) > MAX_PARSED:  # the call is rejected anyway
        return {}
    try:
        parsed = loads_strict(raw) if isinstance(raw, str) and raw.strip() else raw
        arguments = dict(parsed) if isinstance(parsed, Mapping) else {}
        encode([[arguments]])  # nested as in the event
    except (ValueError, RecursionError):
        return {}
    return arguments


def _plain(answer: ToolAnswer) -> dict[str, Any]:
    """Return the answer as it is recorded; a result that equals the text is stored once."""
    content = answer.content if answer.parts is None else answer.parts
    plain: dict[str, Any] = {"content": content, "ok": answer.ok, "error": answer.error}
    if answer.result is not None and answer.result != content:
        plain["result"] = answer.result
    elif not answer.ok or answer.result is None:
        plain["result"] = None
    return plain


def _good(response: Any) -> dict[str, Any]:
    encode([[response]])  # nested as in the result of a run
    content = text_of_result(response)
    return {"content": content, "ok": True, "result": response}


def _failed(reason: object, kind: str = FAILED) -> dict[str, Any]:
    return {"content": f"Error: {reason}", "ok": False, "result": None, "error": kind}


def _may_begin(given: PreparedCall, recorded: Any) -> bool:
    """Return whether the child agent of a call may run: the arguments are valid and the call was not rejected."""
    if isinstance(recorded, Mapping):
        return recorded.get("error") not in ("refused", BAD_ARGUMENTS, UNKNOWN_TOOL)
    return given.is_valid


def _parse(call: ToolCallDict, tool: Tool | None) -> None:
    """Replace the JSON text of arrays and objects in the arguments of a call, as the schema of the tool allows."""
    raw = call.arguments
    if tool is None or (isinstance(raw, str) and _NESTED_TEXT.search(raw) is None):  # most calls
        return
    given = read(call)
    if given is None or (parsed := parsed_arguments(tool.parameters, given)) == given:
        return
    call["function"] = {**(call.get("function") or {}), "name": call.name, "arguments": encode(parsed)}


def _is_handoff(tool: Tool | None) -> bool:
    return tool is not None and _agent(tool) is not None and bool(tool.metadata.get("handoff"))


def _agent(tool: Tool) -> Any:
    return tool.metadata.get("agent")


def _key(agent: Any) -> str:
    """Return the key of an agent, which may be the key itself; empty if it is neither."""
    key = agent if isinstance(agent, str) else getattr(agent, "key", None)
    return key if isinstance(key, str) else ""


def agent_tool(
    agent: Any, *, name: str | None = None, description: str = "", handoff: bool = False,
    limits: RunLimits | Mapping[str, Any] | None = None,
) -> Tool:  # fmt: skip
    """Return a tool that runs another agent: the model passes a task, and the agent runs as a child of the run.

        tools.register(agent_tool(researcher, description="Researches a question."))

    Args:
        agent: An agent, or the key of a registered agent.
        name: The name of the tool, by default the agent's key with "_" for "-". A key with other characters than
            letters, digits, "_" and "-", or with more than 64, is shortened and gets a digest.
        description: What the agent does, for the model.
        handoff: Whether the agent's answer ends the loop.
        limits: Limits of the child, within what remains of the run's own. A child that reaches them fails, and its
            parent continues.

    Raises:
        InvalidArgument: `agent` is neither an agent nor a key, or the name or a limit is invalid.
    """
    child_limits = RunLimits.of(limits)
    key = _key(agent)
    if not key:
        raise must("agent", "be an agent or the key of one", agent)
    usual = key.replace("-", "_")

    def never(task: str) -> str:
        raise must(
            f"agent {brief(key)}", "be run by the agent loop", Shown("a call as a function"), "Use ctx.call(...)"
        )

    return Tool(
        name or (usual if tool_name(usual) == usual else tool_name(key)),
        description or f"Gives a task to the agent {key}.",
        {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
        never,
        metadata={"agent": agent, "handoff": handoff, "limits": child_limits.as_dict()},
    )
