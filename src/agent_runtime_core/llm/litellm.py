"""Every provider that litellm speaks to, in OpenAI's chat format."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

from .._core.lazy_import import load
from ..config import get_config
from ..errors import (
    ContextOverflow,
    ModelNotFound,
    NotConfigured,
    ProviderError,
)
from ._api_keys import is_loopback, refuse_sdk_options, usable
from ._client import ChatClient
from ._openai_errors import translated, without_keys
from ._openai_format import ids_in, outgoing
from ._openai_stream import Assembly
from ._provider import Chunk, Completion, ProviderAdapter, Request, Timeouts
from .openai import answer_of, as_dict, asked_of, poured, vectors

__all__ = ["LiteLLMClient"]

_OF_CHAT = frozenset({"timeouts", "retries", "clock", "breakers"})
#: What litellm answers by itself.
_MOCKS = ("mock_response", "mock_tool_calls")
#: Retries are the ChatClient's.
_ONCE = {"num_retries": 0, "max_retries": 0}


class _None(int):
    """Nought that is true: litellm's embeddings take `max_retries or 2`."""

    def __bool__(self) -> bool:
        return True


_ONCE_EMBEDDED = {"num_retries": 0, "max_retries": _None(0)}


class LiteLLMClient(ChatClient):
    """Any provider through litellm; keys come from litellm's own variables, or `api_key` among the options.

    `base_url` is where the provider is asked instead of its own address. `timeouts`, `retries` and `clock` are the
    ChatClient's; other options go with every request, as `drop_params=True` does. The first request imports litellm,
    which takes seconds; `warm_up()` does that before. MissingDependency: the litellm package is not installed.
    """

    def __init__(self, default_model: str | None = None, base_url: str | None = None, **options: Any) -> None:
        chat = {name: options.pop(name) for name in _OF_CHAT & options.keys()}
        own = {"max_retries": "retries=", "num_retries": "retries=", "timeout": "timeouts="}
        refuse_sdk_options(options, own, "litellm")
        if not _installed():
            load("litellm", needed_by=type(self).__name__)
        if base_url is not None:
            options["api_base"] = base_url
        if "api_key" in options:
            options["api_key"] = usable(options["api_key"], NotConfigured, LiteLLMWire.provider)
        wire = LiteLLMWire(options)
        super().__init__(wire, default_model=default_model or get_config().default_model, **chat)
        self._litellm = wire

    async def warm_up(self) -> None:
        """Import litellm, in a thread."""
        await self._litellm.sdk()


class LiteLLMWire(ProviderAdapter):
    """Chat completions through litellm 1.100 and later."""

    provider = "litellm"

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._sdk: Any = None
        base = str(options.get("api_base") or "")
        #: The models say which provider it is, where no address does.
        self.endpoint: str = base or "litellm"
        self.remote: bool = not ((base and is_loopback(base)) or any(mock in options for mock in _MOCKS))

    async def sdk(self) -> Any:
        """litellm, imported in a thread at its first use."""
        if self._sdk is None:
            self._sdk = await asyncio.to_thread(_imported)
        return self._sdk

    async def request(self, request: Request) -> Completion:
        sdk = await self.sdk()
        raw = await sdk.acompletion(**self._asked(request))
        return answer_of(as_dict(raw), self.provider, request, raw)

    async def stream(self, request: Request) -> AsyncIterator[Chunk]:
        sdk = await self.sdk()
        asked = self._asked(request, stream=True)
        stream = await sdk.acompletion(**asked)
        assembly = Assembly(self.provider, request.model, ids_in(request.messages))
        async with contextlib.aclosing(poured(self, request, stream, assembly)) as pieces:
            async for piece in pieces:
                yield piece
        if (_is_finished(stream) or any(mock in asked for mock in _MOCKS)) and (answer := assembly.answer()):
            yield Chunk(answer=answer)

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        error = _original(error)
        kind, said = type(error).__name__, without_keys(str(error))
        if "No module named" in said:
            return NotConfigured(f"litellm lacks a package for this model: {said}", provider=self.provider, model=model)
        if "LLM Provider NOT provided" in said:
            return ModelNotFound(
                "litellm cannot tell its provider: write 'provider/model'", provider=self.provider, model=model
            )
        told = translated(error, self.provider, model, ("litellm", "openai"), str(self._options.get("api_key") or ""))
        if told is not None and kind == "ContextWindowExceededError" and not isinstance(told, ContextOverflow):
            return ContextOverflow(str(told), provider=self.provider, model=model, status=told.status, code=told.code)
        return told

    async def embed(self, texts: Sequence[str], model: str | None, timeouts: Timeouts) -> list[list[float]]:
        if not texts:
            return []
        sdk = await self.sdk()
        asked = {"model": model or "text-embedding-3-small", "input": list(texts), "timeout": self._timeout(timeouts)}
        told = await sdk.aembedding(**self._options, **asked, **_ONCE_EMBEDDED)
        return vectors(told, len(texts), self.provider)

    async def count_tokens(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None, model: str, timeouts: Timeouts
    ) -> int:
        sdk = await self.sdk()
        sent = outgoing(messages, self.provider)
        return int(await asyncio.to_thread(sdk.token_counter, model=model, messages=sent, tools=tools and list(tools)))

    def _asked(self, request: Request, *, stream: bool = False) -> dict[str, Any]:
        asked = asked_of(request, self.provider, self._timeout(request.timeouts), stream=stream)
        asked = {**self._options, **asked, **_ONCE}
        return {name: value for name, value in asked.items() if value is not None}

    def _timeout(self, timeouts: Timeouts) -> Any:
        httpx: Any = load("httpx", needed_by="LiteLLMClient")
        # The total is for providers to whom litellm can give only one number.
        return httpx.Timeout(timeouts.total, connect=timeouts.connect)


def _installed() -> bool:
    """Whether there is something to import, which the first request does."""
    if sys.modules.get("litellm") is not None:
        return True  # a test's own may have no spec
    try:
        return importlib.util.find_spec("litellm") is not None
    except Exception:  # noqa: BLE001 - an import hook of somebody's: the first request tells
        return True


def _is_finished(stream: Any) -> bool:
    # litellm ends a stream with "stop" of its own where the provider did not say that it finished.
    told = [getattr(stream, name, "") for name in ("received_finish_reason", "intermittent_finish_reason")]
    return told != [None, None]


def _original(error: Exception) -> Exception:
    inner = getattr(error, "original_exception", None)
    return inner if type(error).__name__ == "MidStreamFallbackError" and isinstance(inner, Exception) else error


def _imported() -> Any:
    # Else the import asks the network for a table of prices, and asks again when there is none.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sdk: Any = load("litellm", needed_by="LiteLLMClient")
    # Else every error prints an advertisement.
    sdk.suppress_debug_info = True
    return sdk
