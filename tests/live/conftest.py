"""Live tests ask real providers, which costs money: each is skipped unless `-m live` asks for it and its key is set."""

from __future__ import annotations

import os
import re

import pytest

NAMES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY")
# Read before the fixture that takes the keys away from every test.
KEYS = {name: os.environ[name] for name in NAMES if os.environ.get(name)}


def asked_for(expression: str) -> bool:
    """Whether `-m` names live tests, and not only others that they are not."""
    return re.search(r"(?<!not )\blive\b", expression) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not asked_for(item.config.option.markexpr):
        pytest.skip("a live test needs -m live")


@pytest.fixture
def key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _nothing_left_behind: None) -> str:
    """The key that the test's `@pytest.mark.live(NAME)` names, set again; without it the test is skipped."""
    mark = request.node.get_closest_marker("live")
    assert mark is not None
    name: str = mark.args[0]
    if name not in KEYS:
        pytest.skip(f"a live test needs {name} to be set")
    monkeypatch.setenv(name, KEYS[name])
    return name
