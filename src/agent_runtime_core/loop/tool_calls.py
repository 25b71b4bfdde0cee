"""The tools' side of a turn: which calls are made, in what order, by whom, and what is recorded of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

from .._core.codec.json import MAX_PARSED, arguments_digest, encode, loads_strict
from .._core.context_vars import start_soon
from .._core.event_types import EventType
from .._execution.recorded_calls import UNRECORDED
from .._execution.step_policy import DEFAULT_POLICY, Policy
from ..errors import InvalidArgument, LimitExceeded, RunFailed, UnknownAgent, UnserialisableResult, brief
from ..interfaces import RunResult, ToolCallDict
from ..limits import RunLimits
from ..tools.arguments import BadArguments, check_arguments, read_arguments
from ..tools.invocation import BAD_ARGUMENTS, FAILED, UNKNOWN_TOOL, ToolAnswer, answer_call, answer_read
from ..tools.tool import Tool
from .session import LoopSession
from .state import TurnState

_Placed = tuple[int, ToolCallDict, Tool | None]  # a call, with its place in the answer and its tool

_REFUSED = "refused"  # the error of a call that a person refused
MALFORMED = 3  # turns in a row whose every tool call was malformed, after which the loop gives up


class ToolCalls:
    """Runs the tools that the model of a talk asks for."""

    def __init__(self, talk: LoopSession) -> None:
        self.talk: LoopSession = talk
        #: The result of an agent that the conversation was handed to.
        self.child: RunResult | None = None
        self.malformed: int = 0  # turns in a row
        #: How many guarded calls this loop has made, by tool and arguments.
        self.guarded: Counter[str] = Counter()
        self.took: float = 0.0  # seconds that the recorded ones of the calls side by side took

    async def run(self, key: str, calls: list[ToolCallDict]) -> None:
        """Answer all calls of one turn; LimitExceeded where they are too many, or nothing but nonsense."""
        talk = self.talk
        talk.state(TurnState.TOOL_EXECUTION)
        answers: dict[int, dict[str, Any]] = {}
        try:
            talk.check("tools")
            own = len(calls)
            if talk.copied:
                own -= sum(talk.steps.from_fork("tool", f"{key}:{place}") for place in range(own))
            await self._room(lambda: talk.budget.before_tools(own))
            talk.budget.tool(own)
            await self._in_order(key, calls, answers)
        finally:
            # Whatever ends it: a call without an answer would be refused by the model when the history is sent again.
            for place, call in enumerate(calls):
                answer = answers.get(place) or {"content": "Error: not run", "ok": False}
                message = {"role": "tool", "tool_call_id": call.id, "content": answer["content"]}
                if not answer["ok"]:
                    message["metadata"] = {"is_error": True}
                talk.messages.append(message)
        if self.child is None:
            self._count_malformed(answers)

    async def _room(self, before: Callable[[], None]) -> None:
        """Wait for others at work beside this loop where they leave it no room; LimitExceeded."""
        talk = self.talk
        if not talk.budget.unlimited:
            talk.stop_timer()
            try:
                await talk.budget.until_allowed(before, talk.unless_cancelled)
            finally:
                talk.start_timer()

    async def _in_order(self, key: str, calls: list[ToolCallDict], answers: dict[int, dict[str, Any]]) -> None:
        """Side by side as long as no call has side effects; those that have, one after the other."""
        talk = self.talk
        together: list[_Placed] = []
        for place, call in enumerate(calls):
            tool = talk.tools.get(call.name)
            if tool is None or not (tool.has_side_effects or tool.requires_confirmation or _agent(tool)):
                together.append((place, call, tool))
                continue
            await self._beside(key, together, answers)
            together = []
            talk.check(f"tool {call.name!r}")
            await self._beside(key, [(place, call, tool)], answers)
            if self.child is not None:
                return
        await self._beside(key, together, answers)

    async def _beside(self, key: str, calls: list[_Placed], answers: dict[int, dict[str, Any]]) -> None:
        async def one(place: int, call: ToolCallDict, tool: Tool | None) -> None:
            answers[place] = await self._one(f"{key}:{place}", call, tool)

        if len(calls) < 2:
            for each in calls:
                await one(*each)
        else:
            await _gathered([start_soon(one(*each)) for each in calls])
        self.talk.add_work_time(self.took)
        self.took = 0.0

    async def _one(self, key: str, call: ToolCallDict, tool: Tool | None) -> dict[str, Any]:
        """The answer to one call as it is recorded: {"content", "ok", "error", "result"}."""
        talk = self.talk
        agent = None if tool is None else _agent(tool)
        # Another agent's call is recorded behind its events: the run comes to them in that order again.
        recorded = talk.steps.replayed("tool", key) if agent else talk.steps.recorded("tool", key)
        asked = recorded is UNRECORDED or agent
        refusal = None
        # Nobody is asked about a call that could not be made.
        if asked and tool is not None and tool.requires_confirmation and _fits(call, tool):
            refusal = await self._confirmed(key, call)
        if tool is not None and agent and refusal is None and _may_begin(call, tool, recorded):
            return await self._delegated(key, call, tool, agent, recorded is not UNRECORDED)
        if recorded is not UNRECORDED:
            if agent:
                talk.steps.recorded("tool", key)
            elif tool is not None:
                if tool.requires_confirmation:  # it was passed too, before the call
                    _amend(call, talk.steps.recorded(f"signal:tool:{call.name}", key))
                if recorded["error"] != _REFUSED:
                    self._effect(call, tool)
            # Calls that ran side by side took as long as the longest of them.
            self.took = max(self.took, talk.steps.duration("tool", key))
            return cast("dict[str, Any]", recorded)
        if refusal is not None:
            return await self._refused(key, call, refusal)
        lazy = tool is None or not (tool.has_side_effects or tool.requires_confirmation)
        arguments = _read(call)
        told = {"name": call.name, "id": call.id, "args": _args(call) if arguments is None else arguments}
        answered: dict[str, Any] = await talk.in_time(
            talk.steps.run(
                "tool", key, lambda attempt: self._answer(call, told, tool, arguments), policy=_policy(tool),
                tool=told, effect=self._effect(call, tool), lazy=lazy,
            )
        )  # fmt: skip
        return answered

    def _effect(self, call: ToolCallDict, tool: Tool | None) -> str | None:
        """Return the key of a guarded call in the lineage of the run, None for another one.

        It is the number of the call among those of this loop with the same tool and arguments. The place of the call
        would not do: a model that is asked again in a fork may make the same call in another turn.
        """
        if _policy(tool).on_in_doubt == "retry":
            return None
        same = arguments_digest((call.name, _args(call)), {})[0] or ""
        self.guarded[same] += 1
        return f"{self.talk.name}:{call.name}:{self.guarded[same] - 1}"

    async def _answer(
        self, call: ToolCallDict, told: Mapping[str, Any], tool: Tool | None, arguments: dict[str, Any] | None
    ) -> dict[str, Any]:
        talk = self.talk
        hooks, ctx, traced = talk.hooks, talk.ctx, talk.traced
        began = talk.clock.wall() if traced else 0.0
        if tool is None or arguments is None:
            answer = await answer_call(talk.tools, call, ctx, before=hooks.before_tool, after=hooks.after_tool)
        else:
            answer = await answer_read(
                talk.tools, told["name"], tool, dict(arguments), ctx, before=hooks.before_tool, after=hooks.after_tool
            )
        if traced:
            ctx.trace(
                "tool.done",
                {
                    "step_id": ctx.step_id, "tool_name": told["name"], "tool_call_id": told["id"],
                    "input": _args(call), "output": answer.content, "started_at": began, "ended_at": talk.clock.wall(),
                    "error": None if answer.ok else answer.content,
                },
            )  # fmt: skip
        return _plain(answer)

    async def _confirmed(self, key: str, call: ToolCallDict) -> str | None:
        """Why a person does not want it, or None; they may give other arguments."""
        talk = self.talk
        talk.state(TurnState.WAITING)
        details = {"tool_name": call.name, "tool_args": _args(call), "tool_call_id": call.id}
        talk.stop_timer()
        answer = await talk.unless_cancelled(talk.ctx.approve(f"tool:{call.name}", details, key=key))
        talk.start_timer()
        talk.state(TurnState.TOOL_EXECUTION)
        if isinstance(answer, Mapping):
            if answer.get("approved") is True:
                _amend(call, answer)
                return None
            return str(answer.get("reason") or "denied")
        return None if answer is True else "denied" if answer in (False, None) else str(answer)

    async def _refused(self, key: str, call: ToolCallDict, why: str) -> dict[str, Any]:
        answer = {
            "content": f"Error: a person refused this call: {why}",
            "ok": False,
            "result": None,
            "error": _REFUSED,
        }

        async def told(attempt: int) -> dict[str, Any]:
            return answer

        return cast("dict[str, Any]", await self.talk.steps.run("tool", key, told, tool=_told(call)))

    async def _delegated(self, key: str, call: ToolCallDict, tool: Tool, agent: Any, recorded: bool) -> dict[str, Any]:
        """Run another agent with what is left of the budget; its answer is the tool's, and so are the hooks.

        Its own record answers for a child that has ended.
        """
        talk = self.talk
        args = _args(call)
        told = {**talk.steps.event_fields("tool", key), "tool_name": call.name, "tool_call_id": call.id}
        await talk.ctx.emit(EventType.TOOL_CALL, {**told, "tool_args": args})
        args = await self._before(key, call, args)
        with suppress(LimitExceeded):  # with nothing left, that is what the child says
            await self._room(talk.budget.before_call)
        given = talk.budget.reserve_for_child(RunLimits.of(tool.metadata.get("limits")))
        task = args.get("task") or args.get("message") or encode(args)
        handoff = bool(tool.metadata.get("handoff"))
        messages = (
            [*talk.messages[:-1], {"role": "user", "content": task}] if handoff else [{"role": "user", "content": task}]
        )
        input_ = {"messages": messages, "limits": given.as_dict()}
        talk.stop_timer()
        paid = talk.steps.from_fork(f"call:{agent if isinstance(agent, str) else agent.key}", f"{key}:child")
        failure: Exception | None = None
        with talk.budget.active_call():
            try:
                result = await talk.ctx.call(agent, input_, key=f"{key}:child")
            except (RunFailed, UnknownAgent) as error:
                ended = getattr(error, "result", None)
                failure, result = error, ended if isinstance(ended, RunResult) else RunResult()
            talk.budget.return_unused(given, {} if paid else result.usage)
        talk.start_timer()
        if failure is not None:
            answer = _failed(failure) if isinstance(failure, RunFailed) else _failed(failure.args[0], UNKNOWN_TOOL)
        else:
            said = result.final_output.get("response", result.final_output)
            answer = await self._after(key, call, said)
            if handoff and answer["ok"]:
                self.child = replace(result, final_output={"response": answer["result"]})
        failed = {} if answer["ok"] else {"error": answer["content"]}
        await talk.ctx.emit(EventType.TOOL_RESULT, {**told, "result": answer["result"], **failed})
        if recorded:
            return cast("dict[str, Any]", talk.steps.recorded("tool", key))

        async def kept(attempt: int) -> dict[str, Any]:
            return answer

        return cast("dict[str, Any]", await talk.steps.run("tool", key, kept, lazy=True))

    async def _before(self, key: str, call: ToolCallDict, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments of another agent's call as the hook before it leaves them, which is asked once."""
        hook = self.talk.hooks.before_tool
        if hook is None:
            return args

        async def before(attempt: int) -> dict[str, Any]:
            await hook(call.name, args)
            return args

        return await self._once(f"{key}:before", before)

    async def _after(self, key: str, call: ToolCallDict, said: Any) -> dict[str, Any]:
        """The answer of another agent as the hook behind it gives it, which is asked once."""
        hook = self.talk.hooks.after_tool
        if hook is None:
            return _good(said)

        async def after(attempt: int) -> dict[str, Any]:
            result = await hook(call.name, said)
            try:
                return _good(result)
            except UnserialisableResult as error:
                return _failed(f"the result of tool {call.name!r} cannot be kept: {error}")

        return await self._once(f"{key}:after", after)

    async def _once(self, key: str, hook: Callable[[int], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        recorded = self.talk.steps.recorded("hook", key)
        if recorded is UNRECORDED:
            recorded = await self.talk.steps.run("hook", key, hook)
        return cast("dict[str, Any]", recorded)

    def _count_malformed(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        for answer in answers.values():
            if answer.get("error") not in (BAD_ARGUMENTS, UNKNOWN_TOOL):
                self.malformed = 0
                return
        self.malformed += 1
        if self.malformed >= MALFORMED:
            raise LimitExceeded(
                "malformed_tool_calls", MALFORMED, self.malformed, "no tool call of these turns could be run"
            )


async def _gathered(tasks: list[asyncio.Task[None]]) -> None:
    try:
        await asyncio.gather(*tasks)
    except GeneratorExit:  # it outlived its run and is collected, as are its tasks
        raise
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _read(call: ToolCallDict) -> dict[str, Any] | None:
    """The arguments a tool is run with, None where it cannot be."""
    try:
        return read_arguments(call.arguments)
    except BadArguments:
        return None


def _args(call: ToolCallDict) -> dict[str, Any]:
    """The arguments as a dict, empty where they are none: what is told of a call, not what it is run with."""
    given = call.arguments
    if isinstance(given, str) and len(given) > MAX_PARSED:  # it is refused, and not run
        return {}
    try:
        found = loads_strict(given) if isinstance(given, str) and given.strip() else given
        told = dict(found) if isinstance(found, Mapping) else {}
        encode([[told]])  # as deep as it is told
    except (ValueError, RecursionError):
        return {}
    return told


def _told(call: ToolCallDict) -> dict[str, Any]:
    return {"name": call.name, "id": call.id, "args": _args(call)}


def _plain(answer: ToolAnswer) -> dict[str, Any]:
    """The answer as it is recorded: a text that is the result too stands there once."""
    plain: dict[str, Any] = {"content": answer.content, "ok": answer.ok, "error": answer.error}
    if answer.result is not None and answer.result != answer.content:
        plain["result"] = answer.result
    elif not answer.ok or answer.result is None:
        plain["result"] = None
    return plain


def _good(said: Any) -> dict[str, Any]:
    content = said if isinstance(said, str) else encode([[said]])[2:-2]  # as deep as a result of a run has it
    return {"content": content, "ok": True, "result": said}


def _failed(why: object, kind: str = FAILED) -> dict[str, Any]:
    return {"content": f"Error: {why}", "ok": False, "result": None, "error": kind}


def _may_begin(call: ToolCallDict, tool: Tool, recorded: Any) -> bool:
    """Whether the agent of a call was asked for something, and nobody refused that."""
    if isinstance(recorded, Mapping):
        return recorded.get("error") not in ("refused", BAD_ARGUMENTS, UNKNOWN_TOOL)
    return _fits(call, tool)


def _fits(call: ToolCallDict, tool: Tool) -> bool:
    try:
        check_arguments(tool.parameters, read_arguments(call.arguments))
    except BadArguments:
        return False
    return True


def _amend(call: ToolCallDict, answer: Any) -> None:
    """Give the call the arguments that a person approved in place of its own."""
    if isinstance(answer, Mapping) and answer.get("approved") is True and isinstance(answer.get("arguments"), Mapping):
        call["function"] = {"name": call.name, "arguments": encode(dict(answer["arguments"]))}


def _agent(tool: Tool) -> Any:
    return tool.metadata.get("agent")


def _again() -> None:
    """A check function that knows nothing of what became of a call: it is made again, under the same key."""


def _policy(tool: Tool | None) -> Policy:
    """The start of a call with side effects is durable before it is made, so that its doubt is known."""
    if tool is None:
        return DEFAULT_POLICY
    wanted = tool.metadata.get("on_in_doubt")
    if wanted is None:
        return _CAREFUL if tool.has_side_effects else DEFAULT_POLICY
    return Policy(on_in_doubt=wanted)


_CAREFUL = Policy(on_in_doubt=_again)


def agent_tool(
    agent: Any, *, name: str | None = None, description: str = "", handoff: bool = False,
    limits: RunLimits | Mapping[str, Any] | None = None,
) -> Tool:  # fmt: skip
    """A tool that is another agent: a model gives it a task, and it runs as a child of the run.

    It may use what is left of the run's limits, or by `limits` a part of it; a child that used up its part
    ends failed, and its parent goes on. With `handoff` its answer is the end of the loop.
    """
    allotted = RunLimits.of(limits)
    found = agent if isinstance(agent, str) else getattr(agent, "key", None)
    if not isinstance(found, str) or not found:
        raise InvalidArgument(f"agent_tool takes an agent or the key of one, not {brief(agent)}")

    def never(task: str) -> str:
        raise InvalidArgument(f"the agent {brief(found)} is run by the agent loop, not as a function")

    return Tool(
        name or found.replace("-", "_"),
        description or f"Gives a task to the agent {found}.",
        {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
        never,
        metadata={"agent": agent, "handoff": handoff, "limits": allotted.as_dict()},
    )
