"""All providers that litellm supports, in OpenAI's chat format."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from .._core.clock import Clock
from .._core.lazy_import import load
from ..config import get_config
from ..errors import ContextOverflow, ModelNotFound, NotConfigured, ProviderError, RequestRefused
from ._client import ChatClient
from ._client_per_loop import is_loopback, refuse_sdk_options, usable
from ._fallbacks import openai_fallbacks
from ._finish_reasons import FAILED, normal_reason
from ._openai_format import ids_in, outgoing, text_of_answer
from ._openai_stream import Assembly
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from ._provider_errors import translated, without_keys
from ._stream_body import StreamBody, read_rest
from .openai import answer_of, as_dict, chat_arguments, stream_chunks, vectors

__all__ = ["LiteLLMClient"]

_CHAT_OPTIONS = frozenset({"timeouts", "retries", "clock", "breakers", "limits"})
#: Options with which litellm answers without a provider.
_MOCKS = ("mock_response", "mock_tool_calls")
#: The ChatClient retries, not litellm.
_NO_RETRIES = {"num_retries": 0, "max_retries": 0}


class _TrueZero(int):
    """A zero that is true: litellm's embeddings use `max_retries or 2`."""

    def __bool__(self) -> bool:
        return True


_NO_EMBEDDING_RETRIES = {"num_retries": 0, "max_retries": _TrueZero(0)}


class LiteLLMClient(ChatClient):
    """A client for any provider that litellm supports.

    The first request imports litellm, which takes seconds; `warm_up()` imports it before.

        client = LiteLLMClient("mistral/mistral-small-latest")

    Args:
        default_model: The model of requests that name none, as "provider/model"; by default the configured model.
        base_url: The server, instead of the provider's own.
        send_reasoning: Whether to send a model's reasoning back, as for OpenAIClient.
        schema_in_prompt: Whether to describe `response_format` in the prompt, as for OpenAIClient.
        **options: `timeouts`, `retries`, `clock`, `breakers` and `limits` go to ChatClient. Others are sent with every
            request, such as `drop_params=True` or `api_key`. Without `api_key`, litellm reads its own environment
            variables.

    Raises:
        MissingDependency: The litellm package is not installed.
    """

    def __init__(
        self,
        default_model: str | None = None,
        base_url: str | None = None,
        *,
        send_reasoning: bool | None = None,
        schema_in_prompt: bool | None = None,
        **options: Any,
    ) -> None:
        chat = {name: options.pop(name) for name in _CHAT_OPTIONS & options.keys()}
        own = {"max_retries": "retries=", "num_retries": "retries=", "timeout": "timeouts="}
        refuse_sdk_options(options, own, "litellm")
        if not _installed():
            load("litellm", needed_by=type(self).__name__)
        if base_url is not None:
            options["api_base"] = base_url
        if "api_key" in options:
            options["api_key"] = usable(options["api_key"], NotConfigured, LiteLLMWire.provider)
        wire = LiteLLMWire(options)
        fallbacks = openai_fallbacks(
            wire.provider,
            str(options.get("api_base") or ""),
            send_reasoning=send_reasoning,
            schema_in_prompt=schema_in_prompt,
            by_prefix=True,
        )
        super().__init__(wire, default_model=default_model or get_config().default_model, fallbacks=fallbacks, **chat)
        self._litellm = wire

    async def warm_up(self) -> None:
        """Import litellm in a thread."""
        await self._litellm.sdk()


class LiteLLMWire(ProviderAdapter):
    """Sends chat completions with litellm 1.100 or later."""

    provider = "litellm"

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._sdk: Any = None
        base = str(options.get("api_base") or "")
        #: Without a base URL the model name identifies the provider.
        self.endpoint: str = base or "litellm"
        self.remote: bool = not ((base and is_loopback(base)) or any(mock in options for mock in _MOCKS))

    async def sdk(self) -> Any:
        """Return litellm, which is imported in a thread on first use."""
        if self._sdk is None:
            self._sdk = await asyncio.to_thread(_imported)
        return self._sdk

    async def request(self, request: Request) -> Completion:
        sdk = await self.sdk()
        raw = await sdk.acompletion(**self._arguments(request))
        return answer_of(as_dict(raw), self.provider, request, raw)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        sdk = await self.sdk()
        arguments = self._arguments(request, stream=True)
        stream = await sdk.acompletion(**arguments)
        received = getattr(stream, "completion_stream", None)
        mocked = any(mock in arguments for mock in _MOCKS)
        assembly = _Assembly(self.provider, request, stream, mocked=mocked)
        if hasattr(received, "response"):
            stream.completion_stream = _SdkStream(received, assembly, request.clock)
        async with contextlib.aclosing(stream_chunks(self, request, stream, assembly, StreamBody(received))) as chunks:
            async for chunk in chunks:
                yield chunk
        if answer := assembly.answer():
            yield Chunk(answer=answer)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        error = _original(error)
        kind, message = type(error).__name__, without_keys(str(error))
        if "No module named" in message:
            return NotConfigured(
                f"litellm needs another package for this model: {message}", provider=self.provider, model=model
            )
        if "Invalid response object" in message and "KeyError: 'message'" in message:
            # The server completed and billed the answer, so another request would be billed in vain.
            return RequestRefused(
                "the answer has no message. If its reasoning used all tokens, pass a larger max_tokens",
                provider=self.provider,
                model=model,
            )
        if "LLM Provider NOT provided" in message:
            return ModelNotFound("unknown provider. Write 'provider/model'", provider=self.provider, model=model)
        result = translated(error, self.provider, model, ("litellm", "openai"), str(self._options.get("api_key") or ""))
        if result is not None and kind == "ContextWindowExceededError" and not isinstance(result, ContextOverflow):
            return ContextOverflow(
                str(result), provider=self.provider, model=model, status=result.status, code=result.code
            )
        return result

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        if not texts:
            return []
        sdk = await self.sdk()
        arguments = {
            "model": model or "text-embedding-3-small",
            "input": list(texts),
            "timeout": self._timeout(timeouts),
        }
        response = await sdk.aembedding(**self._options, **arguments, **_NO_EMBEDDING_RETRIES)
        return vectors(response, len(texts), self.provider)

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        sdk = await self.sdk()
        sent = outgoing(messages, self.provider)
        return int(await asyncio.to_thread(sdk.token_counter, model=model, messages=sent, tools=tools and list(tools)))

    def _arguments(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        timeout = self._timeout(request.timeouts)
        arguments = chat_arguments(request, self.provider, self.endpoint, timeout, stream=stream)
        arguments = {**self._options, **arguments, **_NO_RETRIES}
        return {name: value for name, value in arguments.items() if value is not None}

    def _timeout(self, timeouts: Timeouts) -> Any:
        httpx: Any = load("httpx", needed_by="LiteLLMClient")
        # Some providers of litellm accept only one number: the total.
        return httpx.Timeout(timeouts.total, connect=timeouts.connect)


class _Assembly(Assembly):
    """Assembles the chunks of litellm, with what its stream knows besides them."""

    def __init__(self, provider: str, request: Request, stream: Any, *, mocked: bool) -> None:
        super().__init__(provider, request.model, ids_in(request.messages))
        self._stream, self._mocked = stream, mocked

    @property
    def finished(self) -> bool:
        return self._received_reason is not None or super().finished

    @property
    def _received_reason(self) -> Any:
        return getattr(self._stream, "received_finish_reason", None)

    def usage(self) -> dict[str, int]:
        for chunk in getattr(self._stream, "chunks", None) or ():
            # The total in litellm's last chunk leaves out the reasoning, which the server's total contains.
            self.add_usage(as_dict(chunk).get("usage"))
        return super().usage()

    def answer(self) -> Completion | None:
        self.usage()
        self.native_reason = self._received_reason
        # litellm keeps the finish reason until the stream ends.
        self.finish_reason = self.finish_reason or str(self._received_reason or "")
        # litellm adds a finish reason "stop" to a stream that the provider did not finish.
        reasons = [getattr(self._stream, f"{kind}_finish_reason", "") for kind in ("received", "intermittent")]
        return super().answer() if reasons != [None, None] or self._mocked else None


class _SdkStream:
    """The stream of an SDK. It ends without an error after the finish reason, as litellm reads on for the usage.

    `assembly` gets the words of a refusal, which litellm drops. litellm gets texts in parts as text.
    """

    def __init__(self, stream: Any, assembly: Assembly, clock: Clock) -> None:
        self._stream, self._assembly, self._clock = stream, assembly, clock
        self._finished = False
        self._failed = False
        self._has_usage = False

    def __aiter__(self) -> _SdkStream:
        return self

    async def __anext__(self) -> Any:
        if not self._finished:
            chunk = self._taken(await anext(self._stream))
            if self._failed:  # litellm raises an error for this chunk, and reads no usage after it
                await self._read_rest(lambda chunk: self._taken(chunk) is None)
            return chunk
        rest: list[Any] = []

        def keep(chunk: Any) -> bool:
            rest.append(self._taken(chunk))
            return True

        if not await self._read_rest(keep):
            raise StopAsyncIteration
        return rest[0]

    def _read_rest(self, take: Callable[[Any], bool]) -> Awaitable[bool]:
        return read_rest(self._stream, take, lambda: self._has_usage, self._clock)

    def _taken(self, chunk: Any) -> Any:
        received = as_dict(chunk)
        self._assembly.add_refusal(received)
        self._assembly.add_usage(received.get("usage"))
        choices = received.get("choices") or ()
        reasons = [choice.get("finish_reason") for choice in choices if isinstance(choice, dict)]
        self._failed = self._failed or any(reason and normal_reason(reason) == FAILED for reason in reasons)
        self._finished = (self._finished or any(reasons)) and not self._failed
        self._has_usage = self._has_usage or ((self._finished or self._failed) and bool(received.get("usage")))
        for choice in getattr(chunk, "choices", None) or ():
            delta: Any = getattr(choice, "delta", None)
            if isinstance(parts := getattr(delta, "content", None), list):
                delta.content = text_of_answer([as_dict(part) for part in parts])
        return chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _installed() -> bool:
    """Return whether litellm can be found; the first request imports it."""
    if sys.modules.get("litellm") is not None:
        return True  # a replacement in tests may have no spec
    try:
        return importlib.util.find_spec("litellm") is not None
    except Exception:  # noqa: BLE001 - a foreign import hook failed: the first request will show whether it matters
        return True


def _original(error: Exception) -> Exception:
    inner = getattr(error, "original_exception", None)
    return inner if type(error).__name__ == "MidStreamFallbackError" and isinstance(inner, Exception) else error


def _imported() -> Any:
    # Otherwise the import downloads a price table, and tries again if that fails.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sdk: Any = load("litellm", needed_by="LiteLLMClient")
    # Otherwise every error prints an advertisement.
    sdk.suppress_debug_info = True
    return sdk
