"""The agents of a process, by key."""

from __future__ import annotations

from typing import Any

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.interfaces import AgentRuntime, RunContext, RunResult
from agent_runtime_core.registry import (
    DEFAULT,
    Registry,
    clear_registry,
    get_runtime,
    list_runtimes,
    register_runtime,
    unregister_runtime,
)


class Agent(AgentRuntime):
    def __init__(self, key: str) -> None:
        self._key = key

    @property
    def key(self) -> str:
        return self._key

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult()


def test_registered_agents_are_found_by_key_in_order() -> None:
    b, a = Agent("b"), Agent("a")
    register_runtime(b)
    register_runtime(a)
    assert get_runtime("a") is a
    assert list_runtimes() == ["b", "a"]
    assert DEFAULT.get("b") is b


def test_an_unknown_key_is_none() -> None:
    assert get_runtime("nobody") is None


def test_a_key_of_two_classes_is_rejected_and_the_first_stays() -> None:
    class Other(Agent):
        """Another class with the same key."""

    first = Agent("a")
    register_runtime(first)
    with pytest.raises(ValueError, match=r"must be unique, got 'a' for .*Agent and .*Other\. Give one"):
        register_runtime(Other("a"))
    assert get_runtime("a") is first


def test_a_later_definition_of_the_same_class_replaces_the_agent() -> None:
    register_runtime(Agent("a"))
    register_runtime(Agent("b"))
    redefined: Any = type("Agent", (Agent,), {"__module__": Agent.__module__, "__qualname__": Agent.__qualname__})
    again: AgentRuntime = redefined("a")
    register_runtime(again)  # as a notebook cell that runs a second time
    assert get_runtime("a") is again
    register_runtime(again)  # as a script that imports its agents and runs a second time
    assert (get_runtime("a"), list_runtimes()) == (again, ["a", "b"])


def test_unregister_tells_whether_there_was_one() -> None:
    register_runtime(Agent("a"))
    assert unregister_runtime("a") is True
    assert unregister_runtime("a") is False
    register_runtime(Agent("a"))
    clear_registry()
    assert list_runtimes() == []


def test_a_registry_of_its_own_shares_nothing() -> None:
    mine = Registry()
    mine.register(Agent("a"))
    assert mine.keys() == ["a"]
    assert list_runtimes() == []


def test_an_agent_of_any_class_will_do() -> None:
    class Quacks:
        key = "duck"

        async def run(self, ctx: Any) -> Any: ...

    duck: Any = Quacks()
    register_runtime(duck)
    assert get_runtime("duck") is duck


def test_what_is_no_agent_is_refused() -> None:
    wrong: Any = Agent
    with pytest.raises(InvalidArgument, match=r"Pass Agent\(\)"):
        register_runtime(wrong)
    for key in ("", None):
        nameless: Any = Agent(key)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="key must be a non-empty string"):
            register_runtime(nameless)

    class Idle:
        key = "idle"

    idle: Any = Idle()
    with pytest.raises(InvalidArgument, match=r"must have a method run\(ctx\)"):
        register_runtime(idle)
    assert list_runtimes() == []


class Batch(Agent):
    run_timeout_seconds: Any = float("inf")
    stall_timeout_seconds = 600


def test_the_time_limits_of_an_agent_are_its_attributes_and_what_register_was_given() -> None:
    mine, batch, plain = Registry(), Batch("batch"), Agent("plain")
    assert mine.time_limits(plain) == mine.time_limits(None) == {}
    assert mine.time_limits(batch) == {"run_timeout_seconds": float("inf"), "stall_timeout_seconds": 600}
    mine.register(batch, run_timeout_seconds=60)
    mine.register(plain, stall_timeout_seconds=5)
    assert mine.time_limits(batch) == {"run_timeout_seconds": 60, "stall_timeout_seconds": 600}
    assert mine.time_limits(Batch("batch")) == {"run_timeout_seconds": 60, "stall_timeout_seconds": 600}
    assert mine.time_limits(Agent("batch")) == {}, "an agent of another class with that key"
    assert mine.time_limits(plain) == {"stall_timeout_seconds": 5}
    mine.register(plain)
    assert mine.time_limits(plain) == {}


def test_the_default_registry_has_time_limits_too() -> None:
    plain = Agent("plain")
    register_runtime(plain, run_timeout_seconds=60, stall_timeout_seconds=5)
    assert DEFAULT.time_limits(plain) == {"run_timeout_seconds": 60, "stall_timeout_seconds": 5}


@pytest.mark.parametrize("value", [0, -1, "60", float("nan"), True])
def test_an_invalid_time_limit_is_rejected_when_the_agent_is_registered(value: Any) -> None:
    class Wrong(Batch):
        run_timeout_seconds = value

    mine = Registry()
    with pytest.raises(InvalidArgument, match=r"^Wrong\.run_timeout_seconds must be a number of seconds above 0"):
        mine.register(Wrong("a"))
    with pytest.raises(InvalidArgument, match=r"^stall_timeout_seconds must be a number of seconds above 0"):
        mine.register(Agent("a"), stall_timeout_seconds=value)
    assert mine.keys() == []
