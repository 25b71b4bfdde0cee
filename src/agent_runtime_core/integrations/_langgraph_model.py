"""A LangChain chat model whose calls are steps of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.base import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    convert_to_openai_messages,
    message_to_dict,
    messages_from_dict,
)
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from .. import portal
from ..interfaces import current_run
from ._steps import ModelUsage, model_step


class DurableChatModel(BaseChatModel):
    """Records each call of a chat model as a step of the run, and counts it against the limits of the run.

        model = DurableChatModel(model=init_chat_model("openai:gpt-5.4-nano"))

    Outside of runs it calls the model as it is. Tokens are streamed while a call is made; a saved result is one
    message.

    Attributes:
        model: The chat model to call.
        step: The name of the steps.
    """

    model: BaseChatModel
    step: str = "model call"

    @property
    def _llm_type(self) -> str:
        return self.model._llm_type

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return dict(self.model._identifying_params)

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return self.model._get_ls_params(stop=stop, **kwargs)

    def bind_tools(
        self, tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool], **kwargs: Any
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with the tools in the form that the provider of the inner model expects."""
        bound: Any = self.model.bind_tools(tools, **kwargs)
        return self.bind(**bound.kwargs)

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        async def call() -> dict[str, Any]:
            # Also decides whether to stream, and then reports the tokens to the callbacks of this call.
            result = await self.model._agenerate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs)
            return _stored(result)

        ctx = current_run()
        if ctx is None:
            return _loaded(await call())
        return _loaded(await model_step(ctx, self.step, call, usage=self._usage, trace=partial(self._trace, messages)))

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None, **kwargs: Any,
    ) -> ChatResult:  # fmt: skip
        def call() -> dict[str, Any]:
            return _stored(self.model._generate_with_cache(messages, stop=stop, run_manager=run_manager, **kwargs))

        ctx = current_run()
        if ctx is None:
            return _loaded(call())

        async def call_in_thread() -> dict[str, Any]:
            return await asyncio.to_thread(call)

        trace = partial(self._trace, messages)
        return _loaded(portal.from_thread(model_step, ctx, self.step, call_in_thread, usage=self._usage, trace=trace))

    def _usage(self, stored: dict[str, Any]) -> ModelUsage:
        message = _loaded(stored).generations[0].message
        usage: Any = getattr(message, "usage_metadata", None) or {}
        name = message.response_metadata.get("model_name") or self._get_ls_params().get("ls_model_name") or ""
        return ModelUsage(str(name), usage.get("input_tokens", 0), usage.get("output_tokens", 0))

    def _trace(self, messages: list[BaseMessage], stored: dict[str, Any], contents: bool) -> dict[str, Any]:
        """Return the provider, the messages and the finish reason of a call."""
        answer = _loaded(stored).generations[0]
        known = answer.message.response_metadata | (answer.generation_info or {})
        return {
            "model": self._usage(stored).model or self.model._llm_type,
            "provider": self._get_ls_params().get("ls_provider"),
            "input": convert_to_openai_messages(messages) if contents else None,
            "output": convert_to_openai_messages(answer.message),
            "finish_reason": known.get("finish_reason") or known.get("stop_reason"),
        }


def _stored(result: ChatResult) -> dict[str, Any]:
    made = [{"message": message_to_dict(each.message), "info": each.generation_info} for each in result.generations]
    return {"generations": made, "llm_output": result.llm_output}


def _loaded(stored: dict[str, Any]) -> ChatResult:
    made = []
    for each in stored["generations"]:
        [message] = messages_from_dict([each["message"]])
        made.append(ChatGeneration(message=message, generation_info=each["info"]))
    return ChatResult(generations=made, llm_output=stored["llm_output"])
