"""A run that is cancelled and that no process executes any more: a worker takes it over, or the caller ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.errors import IllegalTransition, LeaseLost, StorageBusy, UnknownRun
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.records import ABANDONED, ProcessRow, RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, cancellation
from agent_runtime_core.runner.completion_hooks import CompletionHook
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.contract.third_party.their_queue import TheirQueue
from tests.support.runs import Rig, Script, soon

LEASE = 60.0
NOT_RUN = {"hook": "not_run", "worker": "gone"}


async def lost(runner: AgentRunner, *run_ids: str, agent: str = "script", **options: Any) -> list[RunRow]:
    """Runs that are claimed by a worker that is never heard of again."""
    for run_id in run_ids:
        await runner.submit(agent, run_id=run_id, **options)
    rows: list[RunRow] = await runner.queue.claim_rows("gone", LEASE, limit=len(run_ids))
    assert len(rows) == len(run_ids)
    return rows


async def appears(runner: AgentRunner, **values: Any) -> None:
    """The row of a worker that is alive, has the agent, and claims nothing."""
    queue = runner.queue
    now = queue.clock.wall()
    row = ProcessRow("busy", "busy", "host", 1, now, "1.0", ("script",), 4, "", now, queue.lease_now() + 1e6)
    await queue.commits.commit(None, [Op("queue.save_process", (row._replace(**values), 1e6))])


class Looks:
    """Counts how often a caller has looked at the run that it cancels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look = cancellation.AbandonedRuns.end_tree

        async def counted(*args: Any, **options: Any) -> None:
            await look(*args, **options)
            self.count += 1

        monkeypatch.setattr(cancellation.AbandonedRuns, "end_tree", counted)

    async def more(self, count: int) -> None:
        seen = self.count
        await soon(lambda: self.count >= seen + count)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    monkeypatch.setattr("agent_runtime_core.runner.run_client.CHECK_INTERVAL", 0.01)
    return Looks(monkeypatch)


def quick(place: Path | None) -> Rig:
    """The interval of its callers is short, on a clock which stands still."""
    return Rig(place, VirtualClock(), heartbeat_interval_seconds=0.01)


@pytest.mark.parametrize("wait", [False, True])
async def test_a_run_that_nobody_can_execute_is_ended_by_who_cancels_it(place: Path | None, wait: bool) -> None:
    async with Rig(place, VirtualClock()) as rig:
        [row] = await lost(rig.runner, "r")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await rig.runner.cancel("r", wait=wait) is (RunStatus.CANCELLED if wait else True)
        info = await rig.runner.get_run("r")
        assert (info.status, info.reason, info.attempt) == (RunStatus.CANCELLED, ABANDONED, 1)
        assert await rig.told() == [("run.cancelled", NOT_RUN)]
        assert (await rig.runner.wait("r", 1)).status is RunStatus.CANCELLED
        assert await rig.runner.state_store.get_run_status(row.run_id) == "cancelled"
        late = Op("journal.append", (row.run_id, Record(0, DONE, "late", "0", claim_id=row.claim_id)))
        with pytest.raises(LeaseLost):
            await rig.runner.state_store.commits.commit(Guard(row.run_id, row.claim_id), [late])
        assert await rig.runner.cancel("r") is False
        assert (await rig.runner.resume("r")).status is RunStatus.PENDING


async def test_a_run_is_not_ended_before_its_claim_is_over(place: Path | None, looks: Looks) -> None:
    async with quick(place) as rig:
        await lost(rig.runner, "r")
        assert await rig.runner.cancel("r") is True
        waiting = asyncio.ensure_future(rig.runner.cancel("r", wait=True))
        await looks.more(3)
        assert (await rig.runner.get_run("r")).status is RunStatus.RUNNING
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await waiting is RunStatus.CANCELLED


async def test_a_worker_that_has_the_agent_gets_a_heartbeat_interval(place: Path | None, looks: Looks) -> None:
    async with quick(place) as rig:
        await lost(rig.runner, "r")
        await appears(rig.runner)
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        waiting = asyncio.ensure_future(rig.runner.cancel("r", wait=True))
        await looks.more(3)
        assert (await rig.runner.get_run("r")).status is RunStatus.RUNNING
        rig.clock.advance(0.011)  # type: ignore[attr-defined]
        assert await waiting is RunStatus.CANCELLED
        assert (await rig.runner.get_run("r")).reason == ABANDONED


async def test_who_does_not_wait_ends_it_an_interval_after_the_first_request(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "r")
        await appears(rig.runner)
        rig.clock.advance(LEASE + 21)  # type: ignore[attr-defined]
        interval = rig.runner.config.heartbeat_interval
        for seconds, status in ((0, "running"), (interval / 2, "running"), (interval / 2, "cancelled")):
            rig.clock.advance(seconds)  # type: ignore[attr-defined]
            assert await rig.runner.cancel("r") is True
            assert (await rig.runner.get_run("r")).status == status


@pytest.mark.parametrize("what", [{"slots": 0}, {"agents": ("other",)}, {"alive_until": 1.0}], ids=str)
async def test_a_process_that_cannot_claim_it_is_not_waited_for(place: Path | None, what: dict[str, Any]) -> None:
    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "r")
        await appears(rig.runner, **what)
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await rig.runner.cancel("r") is True
        assert (await rig.runner.get_run("r")).status is RunStatus.CANCELLED


async def test_a_queue_without_rows_of_processes_may_have_a_worker(looks: Looks) -> None:
    clock = VirtualClock()
    queue = TheirQueue(clock=clock)
    config = RunnerConfig(heartbeat_interval_seconds=0.01)
    async with AgentRunner(queue, InMemoryEventBus(), InMemoryStateStore(), config, registry=Registry()) as runner:
        assert await runner.processes() == []
        await lost(runner, "r")
        clock.advance(LEASE + 1)
        waiting = asyncio.ensure_future(runner.cancel("r", wait=True))
        await looks.more(3)
        assert (await runner.get_run("r")).status is RunStatus.RUNNING
        clock.advance(0.011)
        assert await waiting is RunStatus.CANCELLED


async def test_a_worker_takes_it_over_first(place: Path | None) -> None:
    async def body(ctx: Any) -> None:
        raise AssertionError("its code is not executed")

    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "r")
        rig.register(body)
        working = asyncio.ensure_future(rig.runner.run_loop(handle_signals=False))
        waiting = asyncio.ensure_future(rig.runner.cancel("r", wait=True))
        async with asyncio.timeout(10):
            while not waiting.done():
                rig.clock.advance(1)  # type: ignore[attr-defined]
                while not any(each.living for each in await rig.runner.processes()):  # noqa: ASYNC110 - a row rings for nobody
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
        assert waiting.result() is RunStatus.CANCELLED
        info = await rig.runner.get_run("r")
        assert (info.worker, info.attempt, info.reason) == (rig.runner.config.worker_id, 2, "")
        rig.runner.stop()
        await working


@pytest.mark.parametrize("first", ["worker", "caller"])
async def test_of_a_worker_and_a_caller_one_ends_it(
    place: Path | None, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both see that the claim is over; the other one commits first."""
    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "r")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        claimed: list[RunRow] = []
        commit, taken = rig.runner.queue.commits.commit, False

        async def late(guard: Any, ops: Any) -> Any:
            nonlocal taken
            if not taken and any(op.name == "queue.abandoned" and op.args[-1] for op in ops):
                taken = True
                if first == "worker":
                    claimed.extend(await rig.runner.queue.claim_rows("w2", LEASE))
                results = await commit(guard, ops)
                claimed.extend(await rig.runner.queue.claim_rows("w2", LEASE))
                return results
            return await commit(guard, ops)

        monkeypatch.setattr(rig.runner.queue.commits, "commit", late)
        assert await rig.runner.cancel("r") is True
        info = await rig.runner.get_run("r")
        assert taken
        if first == "worker":
            assert [row.run_id for row in claimed] == [str(info.run_id)]
            assert (info.status, info.worker) == (RunStatus.RUNNING, "w2")
            assert await rig.told() == []
        else:
            assert not claimed
            assert (info.status, info.worker) == (RunStatus.CANCELLED, "gone")


async def test_its_child_runs_end_with_it_and_its_concurrency_key_is_free(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        runner = rig.runner
        await lost(runner, "r", concurrency_key="k")
        await lost(runner, "child", parent_run_id="r")
        await lost(runner, "grandchild", parent_run_id="child", agent="another")
        await runner.submit("script", run_id="pending", parent_run_id="child")
        await runner.submit("script", run_id="next", concurrency_key="k")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await runner.cancel("r", wait=True) is RunStatus.CANCELLED
        found = {info.run_key: info.reason for info in await runner.runs(status="cancelled")}
        assert found == {"r": ABANDONED, "child": ABANDONED, "grandchild": ABANDONED, "pending": "cancel"}
        assert await rig.told(run_id="grandchild") == [("run.cancelled", NOT_RUN)]
        assert await rig.told(run_id="pending") == [("run.cancelled", {})]
        assert [row.run_key for row in await runner.queue.claim_rows("w2", LEASE)] == ["next"]


async def test_a_parent_is_told_of_the_end_of_its_child(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        [parent] = await lost(rig.runner, "r")
        [child] = await lost(rig.runner, "child", parent_run_id="r")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await rig.runner.cancel("child") is True
        [mail] = await rig.runner.queue.mail(parent.run_id)
        assert (mail.kind, mail.name) == ("child", child.run_id)
        assert (await rig.runner.get_run("r")).status is RunStatus.RUNNING


async def test_a_child_that_came_after_the_request_ends_too(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "r")
        await rig.runner.cancel("r")
        await lost(rig.runner, "running", parent_run_id="r")
        await rig.runner.submit("script", run_id="pending", parent_run_id="r")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await rig.runner.cancel("r", wait=True) is RunStatus.CANCELLED
        assert [info.status for info in await rig.runner.runs()] == [RunStatus.CANCELLED] * 3


async def test_a_run_that_was_released_with_its_request_does_not_wait_for_ever(place: Path | None) -> None:
    """A worker that drains while a run is being cancelled, and no other one has its agent."""
    async with Rig(place, VirtualClock()) as rig:
        [row] = await lost(rig.runner, "r")
        assert await rig.runner.cancel("r") is True
        waiting = asyncio.ensure_future(rig.runner.cancel("r", wait=True))
        how = rig.runner.queue.unchanged_update(row, row.claim_id)._replace(status="pending")
        await rig.runner.queue.settle(row.run_id, how)
        assert await waiting is RunStatus.CANCELLED


async def test_a_live_run_that_ignores_its_cancellation_is_not_ended(place: Path | None, looks: Looks) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> None:
        begun.set()
        while not go_on.is_set():
            try:
                await go_on.wait()
            except asyncio.CancelledError:
                continue

    async with quick(place) as rig:
        running = asyncio.ensure_future(rig.go(body))
        await begun.wait()
        waiting = asyncio.ensure_future(rig.runner.cancel("r", wait=True))
        await looks.more(5)
        assert (await rig.runner.get_run("r")).status is RunStatus.RUNNING
        go_on.set()
        assert await waiting is RunStatus.CANCELLED
        assert (await running).status is RunStatus.CANCELLED
        assert (await rig.runner.get_run("r")).reason != ABANDONED


async def test_discard_and_vacuum_end_such_runs_first(place: Path | None) -> None:
    async with Rig(place, VirtualClock()) as rig:
        await lost(rig.runner, "discarded", "vacuumed", "asked", "not asked")
        for run_id in ("discarded", "vacuumed"):
            await rig.runner.cancel(run_id)
        for run_id in ("discarded", "not asked"):
            with pytest.raises(IllegalTransition, match="Cancel it first"):
                await rig.runner.discard(run_id)
        assert await rig.runner.vacuum({"cancelled": 0}) == 0
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        await rig.runner.discard("discarded")
        with pytest.raises(UnknownRun):
            await rig.runner.get_run("discarded")
        with pytest.raises(IllegalTransition, match="Cancel it first"):
            await rig.runner.discard("not asked")
        await rig.runner.vacuum({"cancelled": 10})
        assert (await rig.runner.get_run("vacuumed")).reason == ABANDONED
        rig.clock.advance(11)  # type: ignore[attr-defined]
        assert await rig.runner.vacuum({"cancelled": 10}) == 1
        assert {info.run_key for info in await rig.runner.runs(status="running")} == {"asked", "not asked"}


@pytest.mark.parametrize("interrupted", [False, True])
async def test_on_several_engines_its_claim_ends_on_each(interrupted: bool) -> None:
    """Interrupted: the state store does not reply after the queue has the end, and the next `cancel` completes it."""
    clock, away = VirtualClock(), False
    queue, bus, state = InMemoryQueue(clock=clock), InMemoryEventBus(clock=clock), InMemoryStateStore(clock=clock)
    commit = state.engine.commit

    async def or_away(guard: Any, ops: Any) -> Any:
        if away and any(op.name == "journal.append" for op in ops):
            raise StorageBusy("no reply")
        return await commit(guard, ops)

    state.engine.commit = or_away  # type: ignore[method-assign]
    async with AgentRunner(queue, bus, state, registry=Registry()) as runner:
        [row] = await lost(runner, "r")
        for engine in (bus.engine, state.engine):
            await engine.commit(None, [Op("fence.install", (row.run_id, row.claim_id))])
        clock.advance(LEASE + 1)
        if interrupted:
            away = True
            with pytest.raises(StorageBusy):
                await runner.cancel("r")
            away = False
            assert await runner.cancel("r") is False
        else:
            assert await runner.cancel("r") is True
        events = [(event.event_type, event.payload) for event in await bus.get_events("r")]
        assert events == [("run.cancelled", NOT_RUN)]
        assert await state.get_run_status(row.run_id) == "cancelled"
        for engine in (queue.engine, bus.engine, state.engine):
            with pytest.raises(LeaseLost):
                await engine.commit(Guard(row.run_id, row.claim_id), [Op("state.status", (row.run_id, "running", 1.0))])


async def test_its_claim_ends_in_further_stores_too() -> None:
    clock, engine = VirtualClock(), MemoryEngine()
    stores = PersistenceManager(PersistenceConfig.on(engine))
    queue = InMemoryQueue(clock=clock)
    own: Any = {"engine": queue.engine}
    async with AgentRunner(
        queue, InMemoryEventBus(**own), InMemoryStateStore(**own), persistence=stores, registry=Registry()
    ) as runner:
        [row] = await lost(runner, "r")
        await stores.memory.set("k", 1)
        clock.advance(LEASE + 1)
        assert await runner.cancel("r") is True
        with pytest.raises(LeaseLost):
            await engine.commit(None, [Op("fence.install", (row.run_id, row.claim_id))])


async def test_the_completion_hook_of_its_agent_is_called() -> None:
    ended: list[tuple[str, str]] = []

    class Noted(Script, CompletionHook):
        async def operations(self, info: Any, result: Any) -> list[Op]:
            return []

        async def on_end(self, info: Any, result: Any) -> None:
            ended.append((info.run_key, result.status.value))

    async with Rig(None, VirtualClock()) as rig:
        rig.registry.register(Noted(lambda ctx: asyncio.sleep(0)))
        await lost(rig.runner, "r")
        rig.clock.advance(LEASE + 1)  # type: ignore[attr-defined]
        assert await rig.runner.cancel("r") is True
    assert ended == [("r", "cancelled")]
