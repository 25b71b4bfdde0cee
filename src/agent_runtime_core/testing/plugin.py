"""A pytest plugin: no test asks a model beyond this machine, unless it is marked live and live tests are asked for."""

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

_KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
_REFUSED = (
    "a test asks no model beyond this machine: give the agent a MockLLMClient or a ReplayLLMClient, "
    "or mark the test with @pytest.mark.live and run it with --live and a key set"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("agent-runtime-core").addoption(
        "--live",
        action="store_true",
        help="run tests marked live too: they ask real models, which costs money; -m live runs them alone",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "live(*providers): asks a real model; runs only with --live or -m live, and with <PROVIDER>_API_KEY set "
        "for each of them (for none: with any of OPENAI_API_KEY and ANTHROPIC_API_KEY)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    # Loaded with the first test: every pytest where this library is installed reads this module.
    forbid = cast("Callable[[str | None], str | None]", load("..llm._client:forbid_remote", package=__package__))
    allowed = item.get_closest_marker("live") is not None and _missing(item) is None
    before = forbid(None if allowed else _REFUSED)
    try:
        return (yield)
    finally:
        forbid(before)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("live") and (missing := _missing(item)):
        pytest.skip(f"a live test needs {missing}")


def _missing(item: pytest.Item) -> str | None:
    """What a test marked live still lacks to run; None if nothing."""
    if not item.config.getoption("--live") and not _selects_live(item.config.getoption("-m")):
        return "--live or -m live"
    providers = {str(provider) for mark in item.iter_markers("live") for provider in mark.args}
    if providers:
        names = sorted(f"{provider.upper()}_API_KEY" for provider in providers)
        unset = [name for name in names if not os.environ.get(name)]
        return f"{' and '.join(unset)} to be set" if unset else None
    return None if any(map(os.environ.get, _KEYS)) else f"{' or '.join(_KEYS)} to be set"


def _selects_live(expression: str) -> bool:
    """Whether `-m` asks for live tests by name; what it says after a `not` asks for nothing."""
    try:
        return _names_live(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError:
        return False


def _names_live(node: ast.expr) -> bool:
    match node:
        case ast.BoolOp(values=parts):
            return any(map(_names_live, parts))
        case ast.Name(id=name):
            return name == "live"
    return False
