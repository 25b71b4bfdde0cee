"""The agent loop: call the model and run the tools that it requests, until it answers. Each call is a recorded step."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from .._core.arguments import messages_in
from .._core.codec.json import encode
from .._core.context_vars import restore
from .._core.validation import must
from .._execution.loop_messages import unanswered
from .._execution.recorded_calls import UNRECORDED
from ..errors import LimitExceeded, OutputMismatch
from ..interfaces import LLMClient, RunResult, ToolCallDict
from ..limits import RunLimits
from ..llm._finish_reasons import LENGTH, normal_reason
from ..llm._openai_format import text_of_answer
from ..llm._retries import RETRY_BUDGET, RetryBudget
from ..tools.registry import ToolRegistry
from ..tools.structured_output import Output
from .answers import ON_TRUNCATED, Flaw, flaw_of
from .model_calls import ModelCalls
from .session import Cancelled, LoopSession, joins_history, was_interrupted
from .state import CancellationToken, Hooks, LoopResult, TurnState
from .tool_calls import ToolCalls

RETRIES = 50  # retries of all model calls in one loop
#: Keys of an input that are often written for `messages`.
_NOT_MESSAGES = frozenset({
    "message", "msg", "msgs", "prompt", "messages", "message_list", "messages_list", "input_messages", "chat_messages",
    "chat_history", "message_history", "user_message", "user_messages", "user_prompt", "inputmessages", "chatmessages",
    "usermessage",
})  # fmt: skip
REPAIRS = 2  # how often a model may correct an answer of the wrong type


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
    on_truncated: str = "accept",
    cancellation: CancellationToken | None = None,
    hooks: Hooks | None = None,
    **extra: Any,
) -> LoopResult:
    """Call the model and run the tools that it requests, until it answers without requesting a tool.

        result = await run_turn_loop(ctx, client, tools, RunLimits(max_turns=5))
        print(result.text)

    With the context of a durable run, every model call and tool call is a recorded step: a resumed run repeats and pays
    for none of them. With any other context the calls are only made.

    Args:
        ctx: The context of the run.
        client: The model client.
        tools: The tools; by default the tools of the context.
        limits: Limits of this loop. The limits of the runner and of the run's input apply to all loops of the run
            together.
        messages: The conversation; by default the run's input messages.
        model: The model; None for the client's default.
        temperature: Randomness of the answers; None for the provider's default.
        max_tokens: The most tokens of one answer; None for the client's default.
        stream: Whether to publish answers as they are generated, as ASSISTANT_DELTA events.
        output_type: The type of the answer, or a JSON Schema. The model may correct an invalid answer twice.
        on_truncated: What to do with a text that was truncated at `max_tokens`: "accept" returns it with
            `finish_reason="length"`, "fail" raises OutputMismatch. Any other incomplete answer raises in both cases.
        cancellation: A token that ends the loop from outside.
        hooks: Functions that the loop calls.
        **extra: Further options of the model client, such as top_p, seed, stop or reasoning_effort. A `tool_choice`
            that forces a call applies until the model calls a tool.

    Returns:
        The messages, the answer and the usage.

    Raises:
        LimitExceeded: A limit was reached; its `result` is a RunResult with the output so far.
        OutputMismatch: The answer does not have the type `output_type`, or was truncated.
        AnswerRefused: The model refused to answer, or the provider blocked the answer.
        UnknownPrice: There is a limit in USD, none in tokens, and no price for the model.
        InvalidArgument: An argument is invalid.
    """
    if messages is None:
        require_messages(ctx)
    conversation = [dict(each) for each in messages_in(ctx.input_messages if messages is None else messages)]
    tools = ctx.tools if tools is None else tools
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise must("max_tokens", "be an integer of at least 1, or None for the client's default", max_tokens)
    ON_TRUNCATED.check("on_truncated", on_truncated)
    if not hasattr(tools, "to_openai_format"):
        raise must("tools", "be a ToolRegistry", tools, "Register each tool with ToolRegistry().register(tool)")
    session = LoopSession(ctx, client, tools, RunLimits.of(limits), hooks or Hooks(), cancellation, conversation)
    output = None if output_type is None else Output(output_type)
    options = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **extra}
    if output is not None:
        options.setdefault("response_format", output.response_format)
    model_calls = ModelCalls(session, model, max_tokens, options, stream=stream)
    model_calls.need_price()
    token = RETRY_BUDGET.set(RetryBudget(RETRIES))
    try:
        return await _Loop(session, model_calls, output, accept_truncated=on_truncated == "accept").run()
    finally:
        session.leave()
        restore(RETRY_BUDGET, token)


def require_messages(ctx: Any) -> None:
    """Raise InvalidArgument if the run's input contains no `messages`, but something under a similar name.

    The model would get a prompt without a question. An input without any such key is accepted.
    """
    given = getattr(ctx, "input", None)
    if not isinstance(given, Mapping) or "messages" in given:
        return
    for name in given:
        if isinstance(name, str) and _means_messages(name):
            fix = "Write {'messages': [{'role': 'user', 'content': '...'}]}"
            raise must("the key of the messages in the input", "be 'messages'", name, fix)


def _means_messages(name: str) -> bool:
    plain = name.lower().replace("-", "_").strip("_")
    return plain in _NOT_MESSAGES or bool(difflib.get_close_matches(plain, ("messages",), cutoff=0.85))


class _Loop:
    """One execution of the loop."""

    def __init__(
        self, session: LoopSession, model_calls: ModelCalls, output: Output | None, *, accept_truncated: bool
    ) -> None:
        self.session: LoopSession = session
        self.model_calls: ModelCalls = model_calls
        self.tool_calls: ToolCalls = ToolCalls(session)
        self.output: Output | None = output
        self.accept_truncated: bool = accept_truncated
        self.initial_count: int = len(session.messages)  # messages at the start
        self.repairs: int = 0
        self.turns: int = 0  # including the turns of the run from which this run was forked
        self.finish_reason: str = ""  # of the last answer

    async def run(self) -> LoopResult:
        try:
            while True:
                ended = await self._turn()
                if ended is not None:
                    return ended
        except LimitExceeded as limit:
            self.session.state(TurnState.LIMITED)
            limit.result = self._partial()  # even if the limit belongs to a loop inside a tool
            raise
        except Cancelled:
            return self._ended(TurnState.CANCELLED, None)

    def _partial(self) -> RunResult:
        session = self.session
        messages = session.messages
        new = messages[self.initial_count :]
        texts = [text_of_answer(m["content"]) for m in new if m.get("role") == "assistant" and m.get("content")]
        return RunResult(
            final_output={"response": texts[-1] if texts else None},
            final_messages=list(messages),
            usage=session.budget.reported_usage(),
        )

    def _ended(self, state: TurnState, text: str | None, output: Any = None, plain: Any = None) -> LoopResult:
        session = self.session
        session.state(state)
        budget = session.budget
        return LoopResult(
            session.messages, state, text, output, plain, budget.reported_usage(), budget.turns, budget.tool_calls,
            self.finish_reason,
        )  # fmt: skip

    async def _turn(self) -> LoopResult | None:
        session = self.session
        key = f"{session.name}:{self.turns}"
        session.check(f"turn {self.turns + 1}")
        session.begin_turn()
        response = await self.model_calls.answer(key)
        self.turns += 1
        if not session.copied:
            session.budget.turn()
        self.finish_reason = normal_reason(response["finish_reason"])
        if joins_history(response):
            session.messages.append(response["message"])
        calls = [ToolCallDict(call) for call in response["message"].get("tool_calls") or ()]
        flaw = self._flaw(response["message"])
        if flaw is not None and not self._was_used(key, calls):
            raise self._incomplete(flaw, calls)
        if calls:
            self.model_calls.release_tool_choice()
            await self.tool_calls.run(key, calls)
        session.raise_if_late()
        session.end_turn()
        if self.tool_calls.child is not None:
            return self._handed_off(self.tool_calls.child)
        # After `pause_turn` the provider continues when it gets its message back.
        continues = calls or was_interrupted(response) or self.finish_reason == "pause_turn"
        return None if continues else await self._answered(response)

    def _flaw(self, message: Mapping[str, Any]) -> Flaw | None:
        """Return why the answer must not be used, or None. A typed answer that was truncated must fit its type."""
        accept = self.accept_truncated
        if accept and self.output is not None and self.finish_reason == LENGTH:
            accept = self.output.problem(text_of_answer(message.get("content"))) is None
        return flaw_of(message, self.finish_reason, accept_truncated=accept)

    def _incomplete(self, flaw: Flaw, calls: Sequence[ToolCallDict]) -> OutputMismatch:
        """Return the error for an answer that must not be used, with the output so far."""
        error, partial = flaw.error(), self._partial()
        partial.final_output = {"response": flaw.text or None}
        # Providers reject a history in which a call has no answer.
        partial.final_messages += [unanswered(call.id) for call in calls]
        error.result = partial
        return error

    def _was_used(self, key: str, calls: Sequence[ToolCallDict]) -> bool:
        """Return whether the journal continues after this answer: an earlier version of the library used it."""
        steps = self.session.steps
        if steps.replayed("model", f"{self.session.name}:{self.turns}") is not UNRECORDED:
            return True
        return any(steps.replayed("tool", f"{key}:{index}") is not UNRECORDED for index in range(len(calls)))

    async def _answered(self, response: Mapping[str, Any]) -> LoopResult | None:
        session = self.session
        text = text_of_answer(response["message"].get("content"))
        if self.output is None:
            return await self._yielded(text)
        problem = self.output.problem(text)
        if problem is None:
            return await self._yielded(text, *self.output.values(text))
        self.repairs += 1
        if self.repairs > REPAIRS:
            raise self._mismatch(
                f"the model's answer does not have the requested type after {REPAIRS} corrections: {problem}", text
            )
        session.new_messages = [{"role": "user", "content": self.output.repair(problem)}]
        session.messages += session.new_messages
        return None

    async def _yielded(self, text: str, output: Any = None, plain: Any = None) -> LoopResult | None:
        """End the loop with this answer, unless new messages have arrived for the model."""
        if await self.session.received.has_more(f"{self.session.name}:{self.turns}"):
            self.repairs = 0  # each answer may be corrected
            return None
        return self._ended(TurnState.YIELDING, text, output, plain)

    def _mismatch(self, reason: str, text: str) -> OutputMismatch:
        mismatch = OutputMismatch(reason, text)
        mismatch.result = self._partial()
        return mismatch

    def _handed_off(self, child: RunResult) -> LoopResult:
        response = child.final_output.get("response", child.final_output)
        text = response if isinstance(response, str) else encode(response)
        self.session.messages.append({"role": "assistant", "content": text})
        return self._ended(TurnState.HANDED_OFF, text, None, None if isinstance(response, str) else response)
