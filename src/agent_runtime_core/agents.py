"""An agent that is a model with tools: subclass it, name the prompt and the tools, and run it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ._core.event_types import EventType
from .errors import InvalidArgument, LimitExceeded, brief
from .interfaces import AgentRuntime, ErrorInfo, LLMClient, RunContext, RunResult
from .limits import RunLimits
from .llm import configured_client
from .loop.state import CancellationToken, Hooks, LoopResult, TurnState
from .loop.turn_loop import run_turn_loop
from .tools.registry import ToolRegistry

__all__ = ["ToolCallingAgent"]


class ToolCallingAgent(AgentRuntime):
    """Asks a model, runs the tools it asks for, and ends with its answer as `final_output["response"]`.

    In a durable run each call of the model and of a tool is recorded. A tool that fails, and arguments
    that do not fit, are told to the model. Class attributes do for all the properties.
    """

    if TYPE_CHECKING:  # checkers take them as that which a subclass makes of them, attributes or properties
        system_prompt: Any  # a text
        tools: Any  # a ToolRegistry
        max_iterations: Any  # a whole number
        model: Any  # a text, or None
        temperature: Any  # a number, or None
        max_tokens: Any  # a whole number, or None
    else:

        @property
        @abstractmethod
        def system_prompt(self) -> str: ...

        @property
        @abstractmethod
        def tools(self) -> ToolRegistry: ...

        @property
        def max_iterations(self) -> int:
            """Calls of the model at most; the stricter of this and `limits.max_turns` holds."""
            return 10

        @property
        def model(self) -> str | None:
            return None

        @property
        def temperature(self) -> float | None:
            return None

        @property
        def max_tokens(self) -> int | None:
            """Tokens of one answer of the model at most; None leaves it to the client. `limits` limit the whole run."""
            return None

    #: Tell the answer in pieces as it comes, as ASSISTANT_DELTA events; `params["stream"]` of a run says so too.
    stream: bool = False
    #: What one run may use; the strictest of this, the runner's and the run's own holds.
    limits: RunLimits | Mapping[str, Any] | None = None
    #: The type of the answer: then `final_output["response"]` is its plain JSON.
    output_type: Any = None

    def get_llm_client(self) -> LLMClient:
        """The model's client; by default the one that is configured, which all runs share."""
        return configured_client()

    async def before_run(self, ctx: RunContext) -> None:
        """Called before the first call of the model, on every attempt."""

    async def after_run(self, ctx: RunContext, result: RunResult) -> RunResult:
        """May replace the result of a run that succeeded."""
        return result

    async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> None:
        """Called before a tool is run."""

    async def on_tool_result(self, ctx: RunContext, tool_name: str, result: Any) -> Any:
        """May replace what a tool returned."""
        return result

    def trim(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages to send, of all there are; leave each tool call together with its results."""
        return messages

    async def run(self, ctx: RunContext) -> RunResult:
        await self.before_run(ctx)
        prompt = {"role": "system", "content": self.system_prompt}
        own = RunLimits.of(self.limits).stricter(RunLimits(max_turns=self._iterations()))
        stream = ctx.params.get("stream", self.stream)
        try:
            done = await run_turn_loop(
                ctx, self.get_llm_client(), self.tools, own, messages=[prompt, *ctx.input_messages], model=self.model,
                temperature=self.temperature, max_tokens=self.max_tokens, stream=bool(stream),
                output_type=self.output_type, hooks=self._hooks(ctx), cancellation=self.cancellation(ctx),
            )  # fmt: skip
        except LimitExceeded as limit:
            partial = limit.result if isinstance(limit.result, RunResult) else RunResult()
            partial.final_messages = partial.final_messages[1:]
            partial.error = ErrorInfo(
                "LimitExceeded", str(limit), retriable=False,
                details={"limit": limit.limit, "allowed": limit.allowed, "used": limit.used},
            )  # fmt: skip
            return partial
        return await self.after_run(ctx, await self._told(ctx, done))

    def cancellation(self, ctx: RunContext) -> CancellationToken | None:
        """A token that ends the loop from outside, for those who hold one; a cancelled run ends it without."""
        return None

    def _iterations(self) -> int:
        most = self.max_iterations
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InvalidArgument(
                f"max_iterations of agent {brief(self.key)} is a whole number above 0, not {brief(most)}"
            )
        return most

    def _hooks(self, ctx: RunContext) -> Hooks:
        kind = type(self)

        async def before(name: str, args: dict[str, Any]) -> None:
            await self.on_tool_call(ctx, name, args)

        async def after(name: str, result: Any) -> Any:
            return await self.on_tool_result(ctx, name, result)

        return Hooks(
            before_tool=None if kind.on_tool_call is ToolCallingAgent.on_tool_call else before,
            after_tool=None if kind.on_tool_result is ToolCallingAgent.on_tool_result else after,
            trim=None if kind.trim is ToolCallingAgent.trim else self.trim,
        )

    async def _told(self, ctx: RunContext, done: LoopResult) -> RunResult:
        said: Any = done.text
        # A typed answer may be None; that of another agent is the one it gave, in whatever form.
        typed = self.output_type is not None and done.state is TurnState.YIELDING
        if typed or done.plain_output is not None:
            said = done.plain_output
        if done.text is not None:
            await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": done.text})
        return RunResult(
            final_output={"response": said}, final_messages=done.messages[1:], usage=done.usage,
            artifacts={"state": done.state.value} if done.state.value != "yielding" else {},
        )  # fmt: skip
