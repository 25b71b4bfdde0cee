"""The agent loop: ask the model, run the tools it asks for, until it answers; each call a recorded step of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core.codec.json import encode
from .._core.context_vars import restore
from ..errors import InvalidArgument, LimitExceeded, OutputMismatch, brief
from ..interfaces import LLMClient, RunResult, ToolCallDict, messages_in
from ..limits import RunLimits
from ..llm._retries import RETRY_BUDGET, RetryBudget
from ..tools.registry import ToolRegistry
from ..tools.structured_output import Output
from .model_calls import ModelCalls
from .session import Cancelled, LoopSession
from .state import CancellationToken, Hooks, LoopResult, TurnState
from .tool_calls import ToolCalls

RETRIES = 50  # times that all calls of the model in one loop may be tried again
CUT = (
    "the model's answer was cut at its length (finish_reason 'length') before there was a text or a whole tool call: "
    "give a greater max_tokens, or ask for less at once"
)
REPAIRS = 2  # times a model is asked to correct an answer that is not of the type asked for


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
    the run's input by default, and `tools` the context's. `limits` are this loop's; those of the
    context's runner and of the run's input hold for all loops of the run together. When one is reached,
    LimitExceeded carries a RunResult with what there is. UnknownPrice: a limit in USD without one in
    tokens, and no price.
    """
    said = [dict(each) for each in messages_in(ctx.input_messages if messages is None else messages)]
    tools = ctx.tools if tools is None else tools
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise InvalidArgument(
            f"max_tokens must be an integer of at least 1, or None for the client's default, got {brief(max_tokens)}"
        )
    if not hasattr(tools, "to_openai_format"):
        raise InvalidArgument(f"tools are a ToolRegistry, not {brief(tools)}: register them in one")
    talk = LoopSession(ctx, client, tools, RunLimits.of(limits), hooks or Hooks(), cancellation, said)
    output = None if output_type is None else Output(output_type)
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **extra}
    if output is not None:
        options.setdefault("response_format", output.response_format)
    asking = ModelCalls(talk, model, max_tokens, options, stream=stream)
    asking.need_price()
    token = RETRY_BUDGET.set(RetryBudget(RETRIES))
    try:
        return await _Loop(talk, asking, output).run()
    finally:
        restore(RETRY_BUDGET, token)


class _Loop:
    """One pass of the loop."""

    def __init__(self, talk: LoopSession, asking: ModelCalls, output: Output | None) -> None:
        self.talk: LoopSession = talk
        self.asking: ModelCalls = asking
        self.calling: ToolCalls = ToolCalls(talk)
        self.output: Output | None = output
        self.given: int = len(talk.messages)  # how many there were before this pass said anything
        self.repairs: int = 0
        self.turns: int = 0  # of the conversation, those of a run that this one was forked from included

    async def run(self) -> LoopResult:
        try:
            while True:
                ended = await self._turn()
                if ended is not None:
                    return ended
        except LimitExceeded as limit:
            self.talk.state(TurnState.LIMITED)
            limit.result = self._partial()  # also where the limit was one of a loop inside a tool of this one
            raise
        except Cancelled:
            return self._ended(TurnState.CANCELLED, None)

    def _partial(self) -> RunResult:
        talk = self.talk
        messages = talk.messages
        new = messages[self.given :]
        said = [_text(m["content"]) for m in new if m.get("role") == "assistant" and m.get("content")]
        return RunResult(
            final_output={"response": said[-1] if said else None},
            final_messages=list(messages),
            usage=talk.budget.reported_usage(),
        )

    def _ended(self, state: TurnState, text: str | None, output: Any = None, plain: Any = None) -> LoopResult:
        talk = self.talk
        talk.state(state)
        budget = talk.budget
        return LoopResult(
            talk.messages, state, text, output, plain, budget.reported_usage(), budget.turns, budget.tool_calls
        )

    async def _turn(self) -> LoopResult | None:
        talk = self.talk
        key = f"{talk.name}:{self.turns}"
        talk.check(f"turn {self.turns + 1}")
        talk.begin_turn()
        response = await self.asking.answer(key)
        self.turns += 1
        if not talk.copied:
            talk.budget.turn()
        talk.messages.append(response["message"])
        calls = [ToolCallDict(call) for call in response["message"].get("tool_calls") or ()]
        if calls:
            await self.calling.run(key, calls)
        talk.raise_if_late()
        talk.end_turn()
        if self.calling.child is not None:
            return self._handed_off(self.calling.child)
        # A provider that only paused is sent its message back as it is, and goes on.
        return None if calls or response["finish_reason"] == "pause_turn" else self._answered(response)

    def _answered(self, response: Mapping[str, Any]) -> LoopResult | None:
        talk = self.talk
        text = _text(response["message"].get("content"))
        if self.output is None:
            if not text and response["finish_reason"] == "length":
                raise self._mismatch(CUT, text)
            return self._ended(TurnState.YIELDING, text)
        problem = self.output.problem(text)
        if problem is None:
            return self._ended(TurnState.YIELDING, text, *self.output.values(text))
        self.repairs += 1
        if self.repairs > REPAIRS:
            raise self._mismatch(f"the model's answer is not what was asked for: {problem}", text)
        talk.new_messages = [{"role": "user", "content": self.output.repair(problem)}]
        talk.messages += talk.new_messages
        return None

    def _mismatch(self, why: str, text: str) -> OutputMismatch:
        mismatch = OutputMismatch(why, text)
        mismatch.result = self._partial()
        return mismatch

    def _handed_off(self, child: RunResult) -> LoopResult:
        said = child.final_output.get("response", child.final_output)
        text = said if isinstance(said, str) else encode(said)
        self.talk.messages.append({"role": "assistant", "content": text})
        return self._ended(TurnState.HANDED_OFF, text, None, None if isinstance(said, str) else said)


def _text(content: Any) -> str:
    """The text of an answer, which some servers send in parts; those that are no text are left out."""
    if isinstance(content, list):
        return "".join(_text(part.get("text")) for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else "" if content is None else str(content)
