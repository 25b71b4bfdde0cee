"""Pytest plugin that blocks requests to remote models, except in tests marked `agent_runtime_live`."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, cast

from .._core.lazy_import import load

if TYPE_CHECKING:
    import pytest
else:
    pytest = load("pytest", needed_by=__name__)

# Without the prefix, both names could belong to the project whose tests run: pytest then refuses to start.
OPTION = "--agent-runtime-live"
MARKER = "agent_runtime_live"

_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_BLOCKED = (
    "a test must not call a remote model. Pass a MockLLMClient or a ReplayLLMClient to the agent, "
    "or mark the test with @pytest.mark.agent_runtime_live and run it with --agent-runtime-live and an API key set"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--agent-runtime-live`."""
    parser.getgroup("agent-runtime-core").addoption(
        OPTION,
        action="store_true",
        help=f"also run tests marked {MARKER}, which call real models and cost money; -m {MARKER} runs only these",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `agent_runtime_live`."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(*providers): calls a real model; runs only with {OPTION} or -m {MARKER} and with "
        "<PROVIDER>_API_KEY set for each provider (without arguments: with OPENAI_API_KEY or ANTHROPIC_API_KEY)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Block remote model calls in tests that are not live."""
    # Imported with the first test: every pytest process with this library installed imports this module.
    forbid = cast("Callable[[str | None], str | None]", load("..llm._client:forbid_remote", package=__package__))
    allowed = item.get_closest_marker(MARKER) is not None and _missing(item) is None
    before = forbid(None if allowed else _BLOCKED)
    try:
        return (yield)
    finally:
        forbid(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip live tests that lack an option or a key."""
    if item.get_closest_marker(MARKER) and (missing := _missing(item)):
        pytest.skip(f"a live test needs {missing}")


def _missing(item: pytest.Item) -> str | None:
    """Return what a live test needs and does not have, or None if it can run."""
    if not item.config.getoption(OPTION) and not _selects_live(item.config.getoption("-m")):
        return f"{OPTION} or -m {MARKER}"
    providers = {str(provider) for mark in item.iter_markers(MARKER) for provider in mark.args}
    if providers:
        names = sorted(f"{provider.upper()}_API_KEY" for provider in providers)
        unset = [name for name in names if not os.environ.get(name)]
        return f"{' and '.join(unset)} to be set" if unset else None
    return None if any(map(os.environ.get, _KEYS)) else f"{' or '.join(_KEYS)} to be set"


def _selects_live(expression: str) -> bool:
    """Whether the expression of `-m` names the marker, other than after a `not`."""
    try:
        return _names_live(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return False


def _names_live(node: ast.expr) -> bool:
    match node:
        case ast.BoolOp(values=parts):
            return any(map(_names_live, parts))
        case ast.Name(id=name):
            return name == MARKER
    return False
