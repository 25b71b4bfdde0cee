"""The server of the wire tests: where it cannot be had, they are skipped on a laptop and fail in CI."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from agent_runtime_core import llm
from tests.wire.server import Absent, Aimock, running
from tests.wire.sides import KEY, Side


def missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(f"the wire tests have to run in CI: {what}", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def _server() -> Iterator[Aimock]:
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(running())
        except Absent as error:
            missing(str(error))
        yield server


@pytest.fixture
def server(_server: Aimock, monkeypatch: pytest.MonkeyPatch) -> Aimock:
    """The server with nothing in it; no proxy stands before it, and no other server is meant."""
    for name in ("OPENAI_BASE_URL", "ANTHROPIC_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    _server.reset()
    return _server


@pytest.fixture(scope="session")
def sdk() -> Any:
    """`sdk(name)` imports an optional package."""

    def need(name: str) -> Any:
        try:
            return importlib.import_module(name)
        except ImportError:
            return missing(f"the package {name!r} is not installed")

    return need


LITELLM = pytest.param(
    "litellm",
    marks=[
        # What litellm does with pydantic.
        pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning"),
        pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
    ],
)


@pytest.fixture(params=["openai", "anthropic", LITELLM])
def side(request: pytest.FixtureRequest, server: Aimock, sdk: Any, monkeypatch: pytest.MonkeyPatch) -> Side:
    """Each of the three clients in turn, on that server."""
    name: str = request.param
    if name == "litellm":
        monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    sdk(name)
    if name == "openai":
        return Side(name, "gpt-5-mini", partial(llm.OpenAIClient, KEY, base_url=server.openai))
    if name == "anthropic":
        return Side(name, "claude-sonnet-5-5", partial(llm.AnthropicClient, KEY, base_url=server.anthropic))
    return Side(name, "openai/gpt-4o-mini", partial(llm.LiteLLMClient, base_url=server.openai, api_key=KEY))
