"""What the kit says of a backend that breaks the contract, and what it refuses to look at."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from agent_runtime_core.queue import RunRow
from agent_runtime_core.state import StateRow
from agent_runtime_core.testing.contracts import (
    checks,
    events,
    queue,
    queue_concurrency_keys,
    queue_leases,
    queue_reads,
    state,
)
from agent_runtime_core.testing.contracts.checks import same
from tests.contract.third_party.their_bus import TheirBus
from tests.contract.third_party.their_queue import TheirQueue
from tests.contract.third_party.their_store import TheirStore


def _helper(self: Any, what: str) -> str:
    return what


@pytest.mark.parametrize(
    ("kit", "theirs", "name", "base"),
    [
        (queue, TheirQueue, name, "RunQueue")
        for name in ("row", "find", "mail", "snapshots", "take", "claim_request", "holder")
    ]
    + [(events, TheirBus, name, "EventBus") for name in ("head", "published", "_page")]
    + [(state, TheirStore, name, "StateStore") for name in ("ending", "state", "records", "transacts")],
)
async def test_a_name_that_hides_an_inherited_one_is_refused(kit: Any, theirs: Any, name: str, base: str) -> None:
    said = f"^Own.{name} hides {base}.{name}, which the runner calls. Rename it$"
    helps = type("Own", (theirs,), {name: _helper})
    with pytest.raises(AssertionError, match=said):
        await kit.check(helps)
    if name == "holder":
        return  # a property: Python refuses the attribute itself

    def make(**options: Any) -> Any:
        backend = type("Own", (theirs,), {})(**options)
        setattr(backend, name, {})
        return backend

    with pytest.raises(AssertionError, match=said):
        await kit.check(make)


@pytest.mark.parametrize(("name", "value"), [("engine", {}), ("commits", _helper)])
async def test_what_is_taken_for_the_engine_is_refused(name: str, value: object) -> None:
    with pytest.raises(AssertionError, match=f"Own.{name} must have a `commit` method"):
        await state.check(type("Own", (TheirStore,), {name: value}))


async def test_an_override_that_is_called_alike_is_let_be() -> None:
    class Counted(TheirQueue):
        async def enqueue(self, *args: Any, **options: Any) -> Any:
            return await super().enqueue(*args, **options)

    await queue.CASES[0](Counted)


@pytest.mark.parametrize(
    ("found", "expected", "said"),
    [
        (1, 2, "expected 2, found 1"),
        (StateRow("a", "b"), StateRow("a", t=1.0), "checkpoint: expected None, found 'b'; t: expected 1.0, found 0.0"),
        ([*range(90)], [*range(5000)], "item 90 of 5000, 90 found: expected 90, found none"),
        ([*range(90)], [*range(80), 7, *range(81, 90)], "item 80 of 90, 90 found: expected 7, found 80"),
        ("x" * 900 + "a", "x" * 900 + "b", f"expected …{'x' * 20}b', found …{'x' * 20}a'"),
        (float("nan"), float("nan"), "expected nan, found an unequal value with the same repr"),
    ],
)
def test_a_message_names_what_differs(found: object, expected: object, said: str) -> None:
    with pytest.raises(AssertionError) as raised:
        same(found, expected, "it")
    assert str(raised.value) == f"it: {said}"


async def test_fields_beyond_the_first_few_are_counted() -> None:
    one, other = RunRow("a", "b", "c", "d", "e"), RunRow("1", "2", "3", "4", "5")
    with pytest.raises(AssertionError, match=r"; and 2 more fields$"):
        same(one, other, "it")


async def test_a_case_that_waits_in_vain_says_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(TheirQueue):
        async def read(self, what: str, *args: Any) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(checks, "PATIENCE", 0.01)
    with pytest.raises(AssertionError, match=r"^a_claim_hands_over_what_was_enqueued: did not finish within"):
        await queue.check(Silent)


async def test_the_time_of_a_loaded_server_is_not_that_of_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TheirStore] = []

    class Loaded(TheirStore):
        async def commit(self, *args: Any) -> Any:
            await asyncio.sleep(0.1)
            return await super().commit(*args)

    def make() -> TheirStore:
        made.append(Loaded())
        return made[-1]

    async def commits(make: Any) -> None:
        store = make()
        for _ in range(3):
            await store.commits.commit(None, [])

    async def waits(make: Any) -> None:
        await commits(make)
        await asyncio.Event().wait()

    monkeypatch.setattr(checks, "PATIENCE", 0.2)
    await checks.Cases[Any]()(commits)(make)
    with pytest.raises(AssertionError, match=r"^waits: did not finish within 0.2 s$"):
        await checks.Cases[Any]()(waits)(make)
    assert len(made) == 2
    assert not any("commit" in vars(store) for store in made), "the backends are as they were"


async def test_leases_by_the_clock_of_a_server_move_with_the_clock_of_a_case() -> None:
    class ByServer(TheirQueue):
        def lease_now(self) -> float:
            return time.monotonic() + 1e9

    class ByOffset(TheirQueue):
        def lease_now(self) -> float:
            return self.clock.boot() + 1e9

    for case in (
        *queue_leases.CASES,
        queue_reads.times_and_limits_are_kept,
        queue_concurrency_keys.an_inline_run_that_nobody_goes_on_with_stands_aside,
    ):
        await case(ByServer)
        await case(ByOffset)

    class Stopped(TheirQueue):
        async def commit(self, guard: Any, ops: Any) -> Any:
            want = [op._replace(args=(op.args[0]._replace(lease_now=0.0),)) if "claim" in op.name else op for op in ops]
            return await super().commit(guard, want)

    with pytest.raises(AssertionError, match="a run with an expired lease was not claimed"):
        await queue_leases.a_lease_that_ran_out_is_claimed_anew_and_counts_as_a_crash(Stopped)


async def test_a_time_out_of_the_backend_is_its_own() -> None:
    class TimesOut(TheirQueue):
        async def read(self, what: str, *args: Any) -> Any:
            raise TimeoutError("no answer")

    with pytest.raises(TimeoutError, match="no answer"):
        await queue.check(TimesOut)
