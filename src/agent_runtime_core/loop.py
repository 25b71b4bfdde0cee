"""The agent loop: ask the model, run the tools it asks for, until it answers; each call a recorded step of the run."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from ._clock import SYSTEM, Clock
from ._json import encode
from .attempts import PLAIN_POLICY, Policy
from .config import get_config
from .context import UNRECORDED, Context
from .errors import (
    InvalidArgument,
    LimitExceeded,
    NotSupported,
    OutputMismatch,
    RunFailed,
    StepCancelledError,
    UnknownPrice,
)
from .event_types import EventType
from .interfaces import LLMClient, LLMResponse, LLMStreamChunk, RunResult, ToolCallDict
from .limits import NO_LIMITS, Budget, RunLimits
from .llm._prices import cost_usd, price_of
from .llm._tries import RETRY_BUDGET, RetryBudget
from .outputs import Output
from .tools.calls import ToolAnswer, answer_call
from .tools.registry import ToolRegistry
from .tools.tool import Tool

__all__ = ["CancellationToken", "Hooks", "LoopResult", "TurnState", "agent_tool", "run_turn_loop"]

MALFORMED = 3  # turns in a row whose every tool call was malformed, after which the loop gives up
RETRIES = 50  # times that all calls of the model in one loop may be tried again
REPAIRS = 2  # times a model is asked to correct an answer that is not of the type asked for
DELTA_EVERY = 0.02  # seconds of a streamed answer that are told together
_CHARS_A_TOKEN = 3  # fewer than any model has on average, so that a guess is rather too large
_ANSWER = 4096  # tokens an answer is taken to have at most where nobody says


class TurnState(str, Enum):  # noqa: UP042 (as the other enums of the public face)
    """Where a loop stands."""

    STREAMING = "streaming"  # the model is asked
    TOOL_EXECUTION = "tool_execution"
    WAITING = "waiting"  # for somebody's approval
    YIELDING = "yielding"  # the model has answered
    HANDED_OFF = "handed_off"  # another agent has answered
    CANCELLED = "cancelled"
    LIMITED = "limited"  # a limit was reached


class CancellationToken:
    """Ends a loop from outside: between two calls, or in the middle of one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def cancel(self) -> None:
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass
class LoopResult:
    """How a loop ended. `messages` are those it was given and all that came, each tool call with its result."""

    messages: list[dict[str, Any]]
    state: TurnState
    text: str | None = None
    #: What the text says, where an `output_type` was asked for.
    output: Any = None
    #: The same as plain JSON.
    plain_output: Any = None
    usage: dict[str, Any] = field(default_factory=dict)
    turns: int = 0
    tool_calls: int = 0


@dataclass(frozen=True)
class Hooks:
    """What an agent does around the calls of its loop."""

    before_tool: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None
    after_tool: Callable[[str, Any], Awaitable[Any]] | None = None
    #: The messages to send, of all there are; those left out stay in the history.
    trim: Callable[[list[dict[str, Any]]], Any] | None = None
    on_state: Callable[[TurnState], None] | None = None


async def run_turn_loop(
    ctx: Any,
    client: LLMClient,
    tools: ToolRegistry | None = None,
    limits: RunLimits | Mapping[str, Any] | None = None,
    *,
    messages: Sequence[Any] | None = None,
    model: str | None = None,
    temperature: float | None = None,
    max_tokens: int | None = None,
    stream: bool = False,
    output_type: Any = None,
    cancellation: CancellationToken | None = None,
    hooks: Hooks | None = None,
    **extra: Any,
) -> LoopResult:
    """Ask `client`, run the tools it asks for, and go on until it answers without asking for one.

    Over the context of a durable run, every call of the model and of a tool is a recorded step: a
    resumed run pays for none of them twice. Over any other context they are just made. `messages` are
    the run's input by default, and `tools` the context's. The strictest of `limits`, those of the
    context's runner and those of the run's input wins; when one is reached, LimitExceeded carries a
    RunResult with what there is. UnknownPrice: a limit in USD without one in tokens, and no price.
    """
    loop = _Loop(ctx, client, tools if tools is not None else ctx.tools, _limits(ctx, limits), hooks or Hooks())
    loop.messages = loop.said = [dict(each) for each in (ctx.input_messages if messages is None else messages)]
    loop.ask_for(model, temperature, max_tokens, extra)
    loop.stream, loop.cancellation = stream, cancellation
    loop.output = None if output_type is None else Output(output_type)
    token = RETRY_BUDGET.set(RetryBudget(RETRIES))
    try:
        return await loop.run()
    finally:
        RETRY_BUDGET.reset(token)


def _limits(ctx: Any, own: RunLimits | Mapping[str, Any] | None) -> RunLimits:
    given = getattr(ctx, "input", None)
    found = RunLimits.of(own).stricter(getattr(ctx, "limits", None) or NO_LIMITS)
    return found.stricter(given.get("limits")) if isinstance(given, Mapping) else found


class _Unjournaled:
    """The steps of a context that records none, in the shape of those of `Context`."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def recorded(self, name: str, key: str) -> Any:
        return UNRECORDED

    def in_doubt(self, name: str, key: str) -> bool:
        return False

    async def perform(
        self, name: str, key: str, call: Callable[[int], Awaitable[Any]], *, policy: Policy = PLAIN_POLICY,
        tool: dict[str, Any] | None = None, reserve: dict[str, Any] | None = None, lazy: bool = False,
    ) -> Any:  # fmt: skip
        if tool is None:
            return await call(1)
        told = {"tool_name": tool["name"], "tool_call_id": tool["id"]}
        await self._ctx.emit(EventType.TOOL_CALL, {**told, "tool_args": tool["args"]})
        answer = await call(1)
        await self._ctx.emit(EventType.TOOL_RESULT, {**told, "result": answer.get("result", answer["content"])})
        return answer


class _Loop:
    """One pass of the loop."""

    messages: list[dict[str, Any]]
    said: list[dict[str, Any]]  # of them, those since the last call of the model that are no answers to it
    stream: bool
    cancellation: CancellationToken | None
    output: Output | None

    def __init__(self, ctx: Any, client: LLMClient, tools: ToolRegistry, limits: RunLimits, hooks: Hooks) -> None:
        self.ctx = ctx
        self.client = client
        self.tools = tools
        self.hooks = hooks
        self.budget = Budget(limits)
        self.clock: Clock = getattr(ctx, "clock", SYSTEM)
        durable = isinstance(ctx, Context)
        self.steps: Any = ctx if durable else _Unjournaled(ctx)
        self.name: str = ctx.book.occurrence("l", "loop") if durable else ""
        self.definitions = tools.to_openai_format() or None
        self.malformed = 0
        self.repairs = 0
        self.counted = 0  # messages whose length is part of `guess`
        self.guess = 0  # tokens that all messages so far are likely to have
        self.turn_began = 0.0
        self.child: RunResult | None = None

    def ask_for(
        self, model: str | None, temperature: float | None, max_tokens: int | None, extra: dict[str, Any]
    ) -> None:
        self.model = model
        self.max_tokens = max_tokens
        options = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **extra}
        self.options = {name: value for name, value in options.items() if value is not None}

    async def run(self) -> LoopResult:
        self._price_is_known()
        if self.output is not None:
            self.options.setdefault("response_format", self.output.response_format)
        try:
            while True:
                ended = await self._turn()
                if ended is not None:
                    return ended
        except LimitExceeded as limit:
            self._state(TurnState.LIMITED)
            if limit.result is None:
                limit.result = self._partial()
            raise
        except _Cancelled:
            return self._ended(TurnState.CANCELLED, None)

    def _partial(self) -> RunResult:
        said = [m.get("content") for m in self.messages if m.get("role") == "assistant" and m.get("content")]
        return RunResult(
            final_output={"response": said[-1] if said else None},
            final_messages=list(self.messages),
            usage=self.budget.told(),
        )

    def _ended(self, state: TurnState, text: str | None, output: Any = None, plain: Any = None) -> LoopResult:
        self._state(state)
        budget = self.budget
        return LoopResult(self.messages, state, text, output, plain, budget.told(), budget.turns, budget.tool_calls)

    def _state(self, state: TurnState) -> None:
        if self.hooks.on_state is not None:
            self.hooks.on_state(state)

    def _price_is_known(self) -> None:
        limits, config = self.budget.limits, get_config()
        if limits.max_cost_usd is None or limits.max_tokens is not None:
            return
        model = self.model or getattr(self.client, "default_model", None) or config.default_model
        if price_of(model, config.model_prices) is None:
            raise UnknownPrice(
                f"max_cost_usd={limits.max_cost_usd:g}, and model {model!r} has no price: name it in "
                f"configure(model_prices=...), or give max_tokens too"
            )

    def _check(self, what: str) -> None:
        if self.cancellation is not None and self.cancellation.cancelled:
            raise _Cancelled
        if self.ctx.cancelled():
            raise StepCancelledError(what)

    # -- a turn

    async def _turn(self) -> LoopResult | None:
        budget, number = self.budget, self.budget.turns
        self._check(f"turn {number + 1}")
        budget.before_turn()
        self.turn_began = self.clock.boot()
        response = await self._ask(f"{self.name}:{number}")
        budget.turns += 1
        self.messages.append(response["message"])
        calls = [ToolCallDict(call) for call in response["message"].get("tool_calls") or ()]
        if not calls and response["finish_reason"] == "pause_turn":
            # The provider is still at it: sent back as it is, it goes on.
            self.budget.seconds += self.clock.boot() - self.turn_began
            return None
        if not calls:
            return self._answered(response)
        ended = await self._run_tools(f"{self.name}:{number}", calls)
        budget.seconds += self.clock.boot() - self.turn_began
        return ended

    def _answered(self, response: dict[str, Any]) -> LoopResult | None:
        text = response["message"].get("content")
        text = text if isinstance(text, str) else "" if text is None else str(text)
        self.budget.seconds += self.clock.boot() - self.turn_began
        if self.output is None:
            return self._ended(TurnState.YIELDING, text)
        problem = self.output.problem(text)
        if problem is None:
            return self._ended(TurnState.YIELDING, text, *self.output.values(text))
        self.repairs += 1
        if self.repairs > REPAIRS:
            raise OutputMismatch(f"the model's answer is not what was asked for: {problem}", text)
        self.said = [{"role": "user", "content": self.output.repair(problem)}]
        self.messages += self.said
        return None

    # -- the model

    async def _ask(self, key: str) -> dict[str, Any]:
        self._state(TurnState.STREAMING)
        guess = self._guess()
        recorded = self.steps.recorded("model", key)
        if recorded is UNRECORDED:
            if self.steps.in_doubt("model", key):
                # Somebody may have been paid for it.
                self._spent({"total_tokens": guess}, self._cost({"prompt_tokens": guess}, self.model))
                self.budget.before_call()
            sent = await self._trimmed()
            asked = self._told_of(sent)
            limits = self.budget.limits
            reserve = {"tokens": guess} if limits.max_tokens is not None or limits.max_cost_usd is not None else None
            recorded = await self._in_time(
                self.steps.perform("model", key, lambda attempt: self._call(sent, asked), reserve=reserve)
            )
        else:
            self.budget.seconds += recorded.get("ms", 0) / 1000
        self.said = []
        response = cast("dict[str, Any]", recorded)
        self._spent(response["usage"], response["cost_usd"])
        self.guess = max(self.guess, response["usage"].get("total_tokens") or 0)
        return response

    def _spent(self, usage: Mapping[str, Any], cost: float | None) -> None:
        self.budget.used(usage, cost)

    def _cost(self, usage: Mapping[str, Any], model: str | None) -> float | None:
        config = get_config()
        limited = self.budget.limits.max_cost_usd is not None
        if not config.model_prices and not limited:
            return None
        return cost_usd(usage, model or getattr(self.client, "default_model", "") or "", config.model_prices)

    def _guess(self) -> int:
        """Tokens that this call is likely to have at most, the answer included."""
        for message in self.messages[self.counted :]:
            content = message.get("content")
            size = len(content) if isinstance(content, str) else len(str(content))
            self.guess += (size + len(str(message.get("tool_calls") or ""))) // _CHARS_A_TOKEN + 4
        self.counted = len(self.messages)
        return self.guess + (self.max_tokens or _ANSWER)

    async def _trimmed(self) -> list[dict[str, Any]]:
        if self.hooks.trim is None:
            return self.messages
        # The list is theirs to change, the messages in it are not.
        trimmed = self.hooks.trim(list(self.messages))
        if inspect.isawaitable(trimmed):
            trimmed = await trimmed
        if not isinstance(trimmed, list):
            raise InvalidArgument(f"trim returns the messages to send as a list, not {trimmed!r:.80}")
        return trimmed

    def _told_of(self, sent: list[dict[str, Any]]) -> dict[str, Any]:
        """What of the request does not follow from the records before it, so that it can be told from the journal."""
        if self.said is self.messages:
            given = getattr(self.ctx, "input_messages", None) or []
            own = len(self.messages) - len(given)
            asked: dict[str, Any] = (
                {"said": self.messages[:own], "input": len(given)}
                if own >= 0 and self.messages[own:] == given
                else {"said": list(self.messages)}
            )
        else:
            asked = {"said": self.said} if self.said else {}
        if sent is not self.messages:
            places = {id(message): place for place, message in enumerate(self.messages)}
            kept = [places.get(id(message), -1) for message in sent]
            asked |= {"sent": sent} if -1 in kept else {"kept": kept}
        return asked

    async def _call(self, messages: list[dict[str, Any]], asked: dict[str, Any]) -> dict[str, Any]:
        answer = await self._traced_call(messages)
        return {**answer, "asked": asked} if asked else answer

    async def _traced_call(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if not getattr(self.ctx, "traced", False):
            return await self._asked(messages)
        began, answer, failure = self.clock.wall(), dict[str, Any](), None
        try:
            answer = await self._asked(messages)
            return answer
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            parameters = {name: value for name, value in self.options.items() if name != "model"}
            self.ctx.trace(
                "llm.call",
                {
                    "step_id": self.ctx.step_id, "parent_id": None, "model": answer.get("model") or self.model,
                    "provider": getattr(self.client, "provider", type(self.client).__name__),
                    "input": list(messages), "output": answer.get("message"), "usage": answer.get("usage") or {},
                    "cost_usd": answer.get("cost_usd"), "started_at": began, "ended_at": self.clock.wall(),
                    "error": failure, "model_parameters": parameters,
                },
            )  # fmt: skip

    async def _asked(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        began = self.clock.boot()
        if self.stream:
            response = await self._streamed(messages)
        else:
            response = await self.client.generate(messages, tools=self.definitions, **self.options)
        message = _with_ids(response.message)
        cost = response.cost_usd
        if cost is None:
            cost = self._cost(response.usage, response.model or self.model)
        return {
            "message": message,
            "usage": {name: value for name, value in response.usage.items() if isinstance(value, (int, float))},
            "model": response.model,
            "finish_reason": response.finish_reason,
            "cost_usd": cost,
            "ms": int((self.clock.boot() - began) * 1000),
        }

    async def _streamed(self, messages: list[dict[str, Any]]) -> LLMResponse:
        """The whole answer, told in pieces as it comes; all at once by a client that has no stream."""
        try:
            return await self._poured(self.client.stream(messages, tools=self.definitions, **self.options))
        except (NotImplementedError, NotSupported):
            return await self.client.generate(messages, tools=self.definitions, **self.options)

    async def _poured(self, pieces: AsyncIterator[LLMStreamChunk]) -> LLMResponse:
        buffered, told, text = "", self.clock.boot(), ""
        response: LLMResponse | None = None
        calls: list[Any] | None = None
        finish, usage = "", dict[str, Any]()
        async for piece in pieces:
            buffered += piece.delta
            text += piece.delta
            if piece.finish_reason is not None:
                response, calls, finish = piece.response, piece.tool_calls, piece.finish_reason
                usage = piece.usage or {}
            if buffered and (piece.finish_reason is not None or self.clock.boot() - told >= DELTA_EVERY):
                await self.ctx.emit(EventType.ASSISTANT_DELTA, {"delta": buffered})
                buffered, told = "", self.clock.boot()
        if response is not None:
            return response
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            message["tool_calls"] = [dict(call) for call in calls]
        return LLMResponse(message, usage, self.model or "", finish)

    # -- tools

    async def _run_tools(self, key: str, calls: list[ToolCallDict]) -> LoopResult | None:
        self._state(TurnState.TOOL_EXECUTION)
        answers: dict[int, dict[str, Any]] = {}
        try:
            self._check("tools")
            self.budget.before_tools(len(calls))
            await self._in_order(key, calls, answers)
        finally:
            # Whatever ends it: a call without an answer would be refused by the model when the history is sent again.
            for place, call in enumerate(calls):
                answer = answers.get(place) or {"content": "Error: not run", "ok": False}
                message = {"role": "tool", "tool_call_id": call.id, "content": answer["content"]}
                if not answer["ok"]:
                    message["metadata"] = {"is_error": True}
                self.messages.append(message)
        if self.child is not None:
            return self._handed_off(self.child)
        self._count_malformed(answers)
        return None

    async def _in_order(self, key: str, calls: list[ToolCallDict], answers: dict[int, dict[str, Any]]) -> None:
        """Side by side as long as no call has side effects; those that have, one after the other."""
        together: list[int] = []
        for place, call in enumerate(calls):
            tool = self.tools.get(call.name)
            if tool is None or not (tool.has_side_effects or tool.requires_confirmation or _agent(tool)):
                together.append(place)
                continue
            await self._beside(key, calls, together, answers)
            together = []
            self._check(f"tool {call.name!r}")
            answers[place] = await self._one(f"{key}:{place}", call, tool)
            if self.child is not None:
                return
        await self._beside(key, calls, together, answers)

    async def _beside(
        self, key: str, calls: list[ToolCallDict], places: list[int], answers: dict[int, dict[str, Any]]
    ) -> None:
        if not places:
            return
        if len(places) == 1:
            place = places[0]
            answers[place] = await self._one(f"{key}:{place}", calls[place], self.tools.get(calls[place].name))
            return

        async def one(place: int) -> None:
            answers[place] = await self._one(f"{key}:{place}", calls[place], self.tools.get(calls[place].name))

        tasks = [asyncio.ensure_future(one(place)) for place in places]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, key: str, call: ToolCallDict, tool: Tool | None) -> dict[str, Any]:
        """The answer to one call: {"content", "ok", "result", "error"}."""
        self.budget.tool_calls += 1
        # Asked first even if the call is recorded: approvals are known by how often they were asked for.
        refusal = await self._confirmed(call) if tool is not None and tool.requires_confirmation else None
        recorded = self.steps.recorded("tool", key)
        if recorded is not UNRECORDED:
            return cast("dict[str, Any]", recorded)
        if refusal is not None:
            return await self._refused(key, call, refusal)
        if tool is not None and (agent := _agent(tool)):
            return await self._delegated(key, call, tool, agent)
        lazy = tool is None or not (tool.has_side_effects or tool.requires_confirmation)
        answered = self.steps.perform(
            "tool", key, lambda attempt: self._answer(call), policy=_policy(tool), tool=_told(call), lazy=lazy
        )
        return cast("dict[str, Any]", await self._in_time(answered))

    async def _answer(self, call: ToolCallDict) -> dict[str, Any]:
        hooks, began = self.hooks, self.clock.wall()
        answer = await answer_call(self.tools, call, self.ctx, before=hooks.before_tool, after=hooks.after_tool)
        if getattr(self.ctx, "traced", False):
            self.ctx.trace(
                "tool.done",
                {
                    "step_id": self.ctx.step_id, "tool_name": call.name, "tool_call_id": call.id, "input": _args(call),
                    "output": answer.content, "started_at": began, "ended_at": self.clock.wall(),
                    "error": None if answer.ok else answer.content,
                },
            )  # fmt: skip
        return _plain(answer)

    async def _confirmed(self, call: ToolCallDict) -> str | None:
        """Why a person does not want it, or None; they may give other arguments."""
        self._state(TurnState.WAITING)
        details = {"tool_name": call.name, "tool_args": _args(call), "tool_call_id": call.id}
        budget = self.budget
        budget.seconds += self.clock.boot() - self.turn_began
        answer = await self.ctx.approve(f"tool:{call.name}", details)
        self.turn_began = self.clock.boot()  # waiting for a person does not count
        self._state(TurnState.TOOL_EXECUTION)
        if isinstance(answer, Mapping):
            if answer.get("approved"):
                if isinstance(answer.get("arguments"), Mapping):
                    call["function"] = {**call["function"], "arguments": encode(dict(answer["arguments"]))}
                return None
            return str(answer.get("reason") or "denied")
        return None if answer is True else "denied" if answer in (False, None) else str(answer)

    async def _refused(self, key: str, call: ToolCallDict, why: str) -> dict[str, Any]:
        answer = {
            "content": f"Error: a person refused this call: {why}",
            "ok": False,
            "result": None,
            "error": "refused",
        }

        async def told(attempt: int) -> dict[str, Any]:
            return answer

        return cast("dict[str, Any]", await self.steps.perform("tool", key, told, tool=_told(call)))

    async def _delegated(self, key: str, call: ToolCallDict, tool: Tool, agent: Any) -> dict[str, Any]:
        """Run another agent with what is left of the budget; its answer is the tool's."""
        args = _args(call)
        given = self.budget.lend()
        task = args.get("task") or args.get("message") or encode(args)
        handoff = bool(tool.metadata.get("handoff"))
        messages = (
            [*self.messages[:-1], {"role": "user", "content": task}] if handoff else [{"role": "user", "content": task}]
        )
        input_ = {"messages": messages, "limits": given.as_dict()}
        told = {"tool_name": call.name, "tool_call_id": call.id}
        await self.ctx.emit(EventType.TOOL_CALL, {**told, "tool_args": args})
        try:
            result = await self._child(agent, input_, f"{key}:child")
        except RunFailed as failure:
            ended = failure.result if isinstance(failure.result, RunResult) else RunResult()
            self.budget.bring_back(given, ended.usage)
            answer = {"content": f"Error: {failure}", "ok": False, "result": None, "error": "failed"}
        else:
            self.budget.bring_back(given, result.usage)
            if handoff:
                self.child = result
            said = result.final_output.get("response", result.final_output)
            answer = {"content": said if isinstance(said, str) else encode(said), "ok": True, "result": said}
        await self.ctx.emit(EventType.TOOL_RESULT, {**told, "result": answer["result"]})

        async def kept(attempt: int) -> dict[str, Any]:
            return answer

        return cast("dict[str, Any]", await self.steps.perform("tool", key, kept, lazy=True))

    async def _child(self, agent: Any, input_: dict[str, Any], key: str) -> RunResult:
        if isinstance(self.ctx, Context):
            return await self.ctx.call(agent, input_, key=key)
        return cast(RunResult, await self.ctx.call(agent, input_))

    def _handed_off(self, child: RunResult) -> LoopResult:
        said = child.final_output.get("response", child.final_output)
        text = said if isinstance(said, str) else encode(said)
        self.messages.append({"role": "assistant", "content": text})
        return self._ended(TurnState.HANDED_OFF, text, None, None if isinstance(said, str) else said)

    def _count_malformed(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        bad = all(answer.get("error") in ("bad_arguments", "unknown_tool") for answer in answers.values())
        self.malformed = self.malformed + 1 if bad else 0
        if self.malformed >= MALFORMED:
            raise LimitExceeded(
                "malformed_tool_calls", MALFORMED, self.malformed, "no tool call of these turns could be run"
            )

    # -- time

    async def _in_time(self, work: Awaitable[Any]) -> Any:
        """Its result, unless a time limit or the token comes first."""
        now = self.clock.boot()
        left = self.budget.left(now - self.turn_began, now - self.turn_began)
        limit: AbstractAsyncContextManager[Any] = nullcontext() if left is None else asyncio.timeout(max(left, 0))
        token = self.cancellation
        try:
            async with limit:
                return await (work if token is None else _until(token, work))
        except TimeoutError:
            if isinstance(limit, asyncio.Timeout) and limit.expired():
                raise self.budget.late(self.clock.boot() - self.turn_began) from None
            raise


class _Cancelled(Exception):
    """The token was cancelled."""


async def _until(token: CancellationToken, work: Awaitable[Any]) -> Any:
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(token.wait())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Cancelled
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _with_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with an id of its own for every tool call, which its result is paired by."""
    calls = message.get("tool_calls")
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls"}
    seen: set[str] = set()
    named = []
    for place, call in enumerate(calls):
        id_ = str(call.get("id") or f"call_{place}")
        while id_ in seen:
            id_ += "_"
        seen.add(id_)
        named.append({**call, "id": id_})
    return {**message, "tool_calls": named}


def _args(call: ToolCallDict) -> dict[str, Any]:
    """The arguments as a dict, empty where they are none: what is told of a call, not what it is run with."""
    given = call.arguments
    try:
        found = json.loads(given, parse_constant=_no_constant) if isinstance(given, str) and given.strip() else given
    except (ValueError, RecursionError):
        return {}
    return dict(found) if isinstance(found, Mapping) else {}


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


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


def _agent(tool: Tool) -> Any:
    return tool.metadata.get("agent")


def _again() -> None:
    """A check function that knows nothing of what became of a call: it is made again, under the same key."""


def _policy(tool: Tool | None) -> Policy:
    """The start of a call with side effects is durable before it is made, so that its doubt is known."""
    if tool is None:
        return PLAIN_POLICY
    wanted = tool.metadata.get("on_in_doubt")
    if wanted is None:
        return _CAREFUL if tool.has_side_effects else PLAIN_POLICY
    return Policy(on_in_doubt=wanted)


_CAREFUL = Policy(on_in_doubt=_again)


def agent_tool(
    agent: Any, *, name: str | None = None, description: str = "", handoff: bool = False, key: str | None = None
) -> Tool:
    """A tool that is another agent: a model gives it a task, and it runs as a child of the run.

    It may use what is left of the run's limits. With `handoff` its answer is the end of the loop.
    """
    found = key or (agent if isinstance(agent, str) else agent.key)

    def never(task: str) -> str:
        raise InvalidArgument(f"the agent {found!r} is run by the agent loop, not as a function")

    return Tool(
        name or found.replace("-", "_"),
        description or f"Gives a task to the agent {found}.",
        {"type": "object", "properties": {"task": {"type": "string"}}, "required": ["task"]},
        never,
        metadata={"agent": agent, "handoff": handoff},
    )
