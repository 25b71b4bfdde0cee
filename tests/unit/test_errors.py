"""The errors of this library travel: between processes, and as copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from agent_runtime_core import errors
from agent_runtime_core.interfaces import ErrorInfo

MADE = [
    errors.InvalidTurn("topic", "is missing"),
    errors.BadArguments("no city", "weather"),
    errors.UnknownAgent("no agent 'a'"),
    errors.ToolTimeout("weather", 2.0),
    errors.ToolFailed("weather", "rain"),
    errors.PlanningError("no plan", ["a cycle"], "{}"),
    errors.MissingDependency("redis is not installed", name="redis"),
    errors.RunBusy("run-1", "worker-1", 1.5, "lane"),
    errors.RunFailed("run-1 failed", "failed", ErrorInfo("ValueError", "no")),
    errors.LeaseLost("run-1", "claim"),
    errors.JournalMismatch("other code", recorded="a", found="b"),
    errors.UnserialisableResult("$.a", "a set"),
    errors.StepExecutionError("load", "down", 3),
    errors.StepInDoubt("load", "nobody knows"),
    errors.StepCancelledError("load"),
    errors.LimitExceeded("max_turns", 3, 4, "turns"),
    errors.OutputMismatch("no number", "seven"),
    errors.RateLimited("too many", provider="p", model="m", status=429, retry_after=2.0),
    errors.CircuitOpen("not asked", after=5.0, provider="p"),
    errors.StorageBusy("no answer"),
    errors.UnsafeRedis("loses runs", {"maxmemory-policy": "allkeys-lru"}),
]


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("carry", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_an_error_is_the_same_where_it_arrives(
    error: errors.AgentRuntimeError, carry: Callable[[errors.AgentRuntimeError], errors.AgentRuntimeError]
) -> None:
    there = carry(error)
    assert (type(there), str(there), vars(there)) == (type(error), str(error), vars(error))
    if isinstance(error, ImportError) and isinstance(there, ImportError):
        assert there.name == error.name
