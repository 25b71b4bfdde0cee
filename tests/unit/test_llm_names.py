"""What `agent_runtime_core.llm` exports, and which client get_llm_client() gives."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from agent_runtime_core import llm
from agent_runtime_core.config import configure
from agent_runtime_core.errors import InvalidArgument, NotConfigured, ProviderError
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk


class Model(LLMClient):
    """A client as somebody else writes one."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    async def generate(self, messages: list[Any], **kwargs: Any) -> LLMResponse:
        return LLMResponse({"role": "assistant", "content": "hello"})

    async def stream(self, messages: list[Any], **kwargs: Any) -> AsyncIterator[LLMStreamChunk]:
        yield LLMStreamChunk("hello")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> str:
    """The provider's name of a client in somebody else's package."""
    module = types.ModuleType("their_models")
    module.Model = Model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "their_models", module)
    return "their_models:Model"


def test_every_name_is_there_and_nothing_else() -> None:
    assert dir(llm) == sorted(vars(llm)["__all__"])
    assert set(llm.PROVIDERS) == {"openai", "anthropic", "litellm"}
    with pytest.raises(AttributeError, match="has no attribute 'GeminiClient'"):
        _ = llm.GeminiClient  # type: ignore[attr-defined]


def test_the_errors_of_a_client_without_a_key_are_one_class_each() -> None:
    kinds = [llm.OpenAIConfigurationError, llm.AnthropicConfigurationError]
    for kind in kinds:
        assert issubclass(kind, NotConfigured)
        assert issubclass(kind, ProviderError)
        assert issubclass(kind, ValueError)
    assert kinds[0] is not kinds[1]


def test_importing_the_package_loads_no_client_and_no_sdk() -> None:
    code = (
        "import sys, agent_runtime_core.llm as llm\n"
        "llm.get_llm_client, llm.use_llm_client\n"
        "bad = {'openai', 'anthropic', 'litellm', 'httpx', f'{llm.__name__}._chat', f'{llm.__name__}.openai'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_configured_provider_is_the_default(theirs: str) -> None:
    configure(model_provider=theirs)
    first, second = llm.get_llm_client(), llm.get_llm_client()
    assert isinstance(first, Model)
    assert first is not second
    made = llm.get_llm_client(default_model="m")
    assert isinstance(made, Model)
    assert made.options == {"default_model": "m"}


def test_a_provider_by_name_goes_before_the_configured_one(theirs: str) -> None:
    configure(model_provider="openai")
    assert isinstance(llm.get_llm_client(theirs), Model)


def test_a_provider_nobody_knows_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown model provider 'opnai'") as raised:
        llm.get_llm_client("opnai")
    assert isinstance(raised.value, InvalidArgument)
    configure(model_provider="antropic")
    with pytest.raises(
        InvalidArgument, match=r"unknown model provider 'antropic'\. Did you mean 'anthropic'\? Write 'pack"
    ):
        llm.get_llm_client()


def test_a_client_in_use_is_the_one_asked_for_without_arguments(theirs: str) -> None:
    configure(model_provider=theirs)
    outer, inner = Model(), Model()
    with llm.use_llm_client(outer) as used:
        assert used is outer
        assert llm.get_llm_client() is outer
        with llm.use_llm_client(inner):
            assert llm.get_llm_client() is inner
            assert llm.get_llm_client(theirs) not in (inner, outer)
            assert llm.get_llm_client(default_model="m") not in (inner, outer)
        assert llm.get_llm_client() is outer
        with pytest.raises(ZeroDivisionError), llm.use_llm_client(inner):
            raise ZeroDivisionError
        assert llm.get_llm_client() is outer
    assert llm.get_llm_client() not in (inner, outer)


async def test_tasks_side_by_side_use_their_own_client() -> None:
    both_inside = asyncio.Barrier(2)

    async def use(client: Model) -> bool:
        with llm.use_llm_client(client):
            await both_inside.wait()
            return llm.get_llm_client() is client

    assert all(await asyncio.gather(use(Model()), use(Model())))
