"""Three backends that were opened separately on one store run, or are refused with the reason."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, InvalidArgument, RunResult
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing.contracts.runs import SEPARATE
from tests.contract.third_party.their_bus import TheirBus
from tests.contract.third_party.their_queue import TheirQueue
from tests.contract.third_party.their_store import TheirStore
from tests.support.backends import backends

[CASE] = SEPARATE


class OneTableOfFences:
    """The claims of a database. Every object of a backend reads and writes them, also without an engine in common."""

    def __init__(self) -> None:
        self.fences: dict[str, str] = {}

    def add(self, backend: Any) -> Any:
        commit, fences = backend.commit, self.fences

        async def shared(guard: Any, ops: Any) -> Any:
            backend.store.claims = fences
            try:
                return await commit(guard, ops)
            finally:
                there = dict(backend.store.claims)
                fences.clear()
                fences.update(there)

        backend.commit = shared
        return backend


class Agent(AgentRuntime):
    key = "agent"

    async def run(self, ctx: Any) -> RunResult:
        return RunResult({"one": await ctx.step("one", lambda: 1)})


def conflicting(**options: Any) -> tuple[Any, Any, Any]:
    table = OneTableOfFences()
    backends = TheirQueue(**options), TheirBus(**options), TheirStore(**options)
    return tuple(map(table.add, backends))


@pytest.mark.parametrize("kind", backends(["sqlite", "redis", "postgres"]))
async def test_the_stores_of_the_library_may_be_opened_separately(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    numbers, places = itertools.count(), dict[int, dict[str, Any]]()

    def at(where: dict[str, Any]) -> tuple[Any, Any, Any]:
        made = get_queue(kind, **where), get_event_bus(kind, **where), get_state_store(kind, **where)
        places[id(made[0])] = where
        return made

    def make(**options: Any) -> tuple[Any, Any, Any]:
        number = next(numbers)
        if kind == "sqlite":
            return at({"path": tmp_path / f"{number}.db", **options})
        return at({"url": f"{request.getfixturevalue(f'{kind}_url')}_{number}", **options})

    await CASE(make, lambda backends: at(places[id(backends[0])]))


async def test_two_engines_on_one_table_of_fences_are_refused_with_the_reason() -> None:
    registry = Registry()
    registry.register(Agent())
    async with AgentRunner(*conflicting(), registry=registry) as runner:
        with pytest.raises(InvalidArgument, match="backends on one database must share one engine"):
            await runner.execute("agent")


async def test_the_kit_accepts_that_they_are_refused_and_no_other_error() -> None:
    places: dict[int, Any] = {}

    def make(**options: Any) -> Any:
        made = conflicting(**options)
        places[id(made[0])] = options
        return made

    await CASE(make, lambda backends: backends)


async def test_the_kit_finds_objects_that_do_not_see_the_same_store() -> None:
    def make(**options: Any) -> Any:
        return TheirQueue(**options), TheirBus(**options), Forgets(**options)

    with pytest.raises(AssertionError):
        await CASE(make, lambda backends: backends)


class Forgets(TheirStore):
    """A state store without its journal, as one that was opened at another place."""

    async def read(self, what: str, *args: Any) -> Any:
        return [] if what == "records" else await super().read(what, *args)
