"""An agent that calls a model with tools: subclass it and set a prompt and tools."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, cast

from ._core.event_types import EventType
from ._core.validation import must
from ._execution.sync_context import call_method
from .errors import LimitExceeded, OutputMismatch, brief
from .interfaces import AgentRuntime, ErrorInfo, LLMClient, RunContext, RunResult
from .limits import RunLimits
from .llm import configured_client
from .loop.model_settings import check_attributes, settings_of_agent, settings_of_run
from .loop.state import CancellationToken, Hooks, LoopResult, TurnState
from .loop.turn_loop import require_messages, run_turn_loop
from .tools.registry import ToolRegistry

__all__ = ["ToolCallingAgent"]


class ToolCallingAgent(AgentRuntime):
    """Calls a model, runs the tools that it requests, and ends with the answer in `final_output["response"]`.

        class Weather(ToolCallingAgent):
            key = "weather"
            system_prompt = "You answer questions about the weather."
            tools = ToolRegistry()

        Weather.tools.register(get_weather)

    In a durable run every model call and tool call is recorded. A tool that fails, and invalid arguments, are reported
    to the model. A subclass defines its settings as attributes or as properties. Any other attribute is its own, but a
    misspelled setting raises UnknownSetting when the agent is registered. The hooks `before_run`, `after_run`,
    `on_tool_call` and `on_tool_result` may be plain functions, which run in a thread and receive a SyncRunContext.

    Attributes:
        max_iterations: The most model calls of a run; the smaller of this and `limits.max_turns` applies.
        model: The model, a str; None for the client's default.
        temperature: Randomness of the answers, a float; None for the provider's default.
        max_tokens: The most tokens of one answer, an int; None for the client's default. `limits` apply to the whole
            run.
        top_p: Tokens with the smallest probability are left out until this share of it remains, a number from 0 to 1.
        reasoning_effort: How much a reasoning model thinks, a str such as "low", in the words of the provider.
        seed: A whole number for answers that are as reproducible as the provider allows.
        stop: A text, or several in a list, at which an answer ends.
        presence_penalty: A number from -2 to 2 that makes repetitions less likely.
        frequency_penalty: A number from -2 to 2 that makes repetitions less likely.
        tool_choice: Which tools the model must call: "auto", "none", "required" or a function. After a call it is
            "auto".
        parallel_tool_calls: Whether an answer may have several tool calls, a bool.
        service_tier: The provider's class of service, a str.
        user: The end user, a str for the provider.
        model_settings: Further options of the model client, a dict. `params["model_settings"]` of a run may set every
            setting above.
        on_truncated: What to do with a text that was truncated at `max_tokens`: "fail" the run, or "accept" it as the
            answer.
        stream: Whether to publish the answer in ASSISTANT_DELTA events; `params["stream"]` of a run overrides it.
        limits: Limits of a run; the strictest of these, the runner's and the run's own apply.
        output_type: The type of the answer; with it, `final_output["response"]` is the answer as plain JSON.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import MockLLMClient, ToolCallingAgent, ToolRegistry, run_agent_test, tool
        >>> @tool
        ... def add(a: int, b: int) -> int:
        ...     "Add two numbers."
        ...     return a + b
        >>> class Adder(ToolCallingAgent):
        ...     key = "adder"
        ...     system_prompt = "You add numbers."
        ...     tools = ToolRegistry()
        >>> Adder.tools.register(add)
        >>> model = MockLLMClient([MockLLMClient.calls("add", a=12, b=30), "12 and 30 make 42."])
        >>> result, _ = asyncio.run(run_agent_test(Adder(), "12 + 30?"))
        >>> result.final_output["response"]
        '12 and 30 make 42.'
    """

    if TYPE_CHECKING:  # Any, so that a subclass may define attributes or properties
        system_prompt: Any  # str
        tools: Any  # ToolRegistry
    else:

        @property
        @abstractmethod
        def system_prompt(self) -> str:
            """The system prompt."""

        @property
        @abstractmethod
        def tools(self) -> ToolRegistry:
            """The tools that the model may call."""

    max_iterations: Any = 10
    model: Any = None
    temperature: Any = None
    max_tokens: Any = None
    top_p: Any = None
    reasoning_effort: Any = None
    seed: Any = None
    stop: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    service_tier: Any = None
    user: Any = None
    model_settings: Any = None
    on_truncated: str = "fail"
    stream: bool = False
    limits: RunLimits | Mapping[str, Any] | None = None
    output_type: Any = None

    def get_llm_client(self) -> LLMClient:
        """Return the model client; by default the configured client, which all runs share."""
        return configured_client()

    if TYPE_CHECKING:
        # A subclass defines each of these with `async def`, or with `def` and a `SyncRunContext`: therefore Any.

        def before_run(self, ctx: Any) -> Coroutine[Any, Any, None] | Any:
            """Prepare an attempt of the run."""

        def after_run(self, ctx: Any, result: RunResult) -> Coroutine[Any, Any, RunResult] | Any:
            """Return the result of a run that succeeded."""

        def on_tool_call(self, ctx: Any, tool_name: str, tool_args: dict[str, Any]) -> Coroutine[Any, Any, Any] | Any:
            """Return the arguments of a tool, or None if they are changed in place or not at all."""

        def on_tool_result(self, ctx: Any, tool_name: str, result: Any) -> Coroutine[Any, Any, Any] | Any:
            """Return the result of a tool."""
    else:

        async def before_run(self, ctx: RunContext) -> None:
            """Prepare an attempt of the run, before its first model call.

            Args:
                ctx: The context of the run.
            """

        async def after_run(self, ctx: RunContext, result: RunResult) -> RunResult:
            """Return the result of a run that succeeded, changed or not.

            Args:
                ctx: The context of the run.
                result: The result of the loop.
            """
            return result

        async def on_tool_call(
            self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]
        ) -> dict[str, Any] | None:
            """Return the arguments of a tool, or None if they are changed in place or not at all.

            Called once for each call, before a person is asked to approve it. The arguments are recorded. The hook runs
            between steps, so it may wait for a person with `ctx.approve`.

            Args:
                ctx: The context of the run.
                tool_name: The name of the tool.
                tool_args: The arguments that the model sent.
            """

        async def on_tool_result(self, ctx: RunContext, tool_name: str, result: Any) -> Any:
            """Return the result of a tool, changed or not.

            Args:
                ctx: The context of the run.
                tool_name: The name of the tool.
                result: What the tool returned.
            """
            return result

    def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages to send, out of all messages.

        If a tool call and its results are separated, the loop removes both. If the model did not see the results yet,
        the loop sends both instead.

        Args:
            messages: All messages of the loop.
        """
        return messages

    async def run(self, ctx: RunContext) -> RunResult:
        kind = type(self)
        # An agent with such a hook may read other keys of its input itself.
        if kind.before_run is ToolCallingAgent.before_run and kind.trim is ToolCallingAgent.trim:
            require_messages(ctx)
        await call_method(self.before_run, ctx)
        prompt = {"role": "system", "content": self.system_prompt}
        limits = RunLimits.of(self.limits).stricter(RunLimits(max_turns=self._iterations()))
        stream = ctx.params.get("stream", self.stream)
        try:
            done = await run_turn_loop(
                ctx, self.get_llm_client(), self.tools, limits, messages=[prompt, *ctx.input_messages],
                stream=bool(stream), output_type=self.output_type, on_truncated=self.on_truncated,
                hooks=self._hooks(ctx), cancellation=self.cancellation(ctx), **self._model_settings(ctx),
            )  # fmt: skip
        except OutputMismatch as mismatch:
            if isinstance(mismatch.result, RunResult):
                mismatch.result.final_messages = mismatch.result.final_messages[1:]
            raise
        except LimitExceeded as limit:
            partial = limit.result if isinstance(limit.result, RunResult) else RunResult()
            partial.final_messages = partial.final_messages[1:]
            partial.error = ErrorInfo(
                "LimitExceeded",
                str(limit),
                retriable=False,
                details={"limit": limit.limit, "allowed": limit.allowed, "used": limit.used},
            )
            return partial
        return cast("RunResult", await call_method(self.after_run, ctx, await self._result(ctx, done)))

    def cancellation(self, ctx: RunContext) -> CancellationToken | None:
        """Return a token that ends the loop from outside, or None. A cancelled run needs no token.

        Args:
            ctx: The context of the run.
        """
        return None

    def _check_attributes(self) -> None:
        check_attributes(type(self), ToolCallingAgent)

    def _model_settings(self, ctx: RunContext) -> dict[str, Any]:
        """Return the settings of this run's model calls. Settings of the run replace settings of the agent."""
        return settings_of_agent(self, f"agent {brief(self.key)}") | settings_of_run(ctx.params)

    def _iterations(self) -> int:
        limit = self.max_iterations
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise must(f"agent {brief(self.key)}: max_iterations", "be an integer above 0", limit)
        return limit

    def _hooks(self, ctx: RunContext) -> Hooks:
        kind = type(self)

        async def before(name: str, args: dict[str, Any]) -> Any:
            return await call_method(self.on_tool_call, ctx, name, args)

        async def after(name: str, result: Any) -> Any:
            return await call_method(self.on_tool_result, ctx, name, result)

        return Hooks(
            before_tool=None if kind.on_tool_call is ToolCallingAgent.on_tool_call else before,
            after_tool=None if kind.on_tool_result is ToolCallingAgent.on_tool_result else after,
            trim=None if kind.trim is ToolCallingAgent.trim else self.trim,
        )

    async def _result(self, ctx: RunContext, done: LoopResult) -> RunResult:
        response: Any = done.text
        # A typed answer may be None. After a handoff the response comes from the other agent, and can be of any type.
        typed = self.output_type is not None and done.state is TurnState.YIELDING
        if typed or done.plain_output is not None:
            response = done.plain_output
        if done.text is not None:
            await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": done.text})
        return RunResult(
            final_output={"response": response},
            final_messages=done.messages[1:],
            usage=done.usage,
            artifacts={"state": done.state.value} if done.state.value != "yielding" else {},
        )
