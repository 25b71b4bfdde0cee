"""A schedule is a row of the queue: what the other features do with it, and what must not break it."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, IllegalTransition, InvalidArgument, RunResult, open_run
from agent_runtime_core._engines.base import Op
from agent_runtime_core._views.overview import agents_view, queue_view
from agent_runtime_core._views.schedules import schedule_items
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import (
    IdempotencyConflict,
    NotSupported,
    StorageBusy,
    StorageClosed,
    StorageCorrupt,
    UnknownEncryptionKey,
    UnknownRun,
)
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.persistence import PersistenceConfig, PersistenceManager
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.records import LIVE, SCHEDULE, RunCounts, RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig, reencrypt
from agent_runtime_core.runner.moving import move_store
from agent_runtime_core.runner.tenants import assign_runs
from agent_runtime_core.runner.verification import mark_restored, verify_store
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing import VirtualClock
from tests.support.backends import SERVERS

START = 1_800_000_000.0  # a whole multiple of the intervals below
KEYS = {"old": bytes(range(32)), "new": bytes(range(1, 33))}
OLD, BOTH, NEW = (
    AESGCMCodec({name: KEYS[name] for name in names}, names[-1], digest_key=bytes(range(2, 34)))
    for names in (("old",), ("old", "new"), ("new",))
)


class Report(AgentRuntime):
    """Notes the times that its runs stand for."""

    key = "report"

    def __init__(self) -> None:
        self.times: list[float] = []

    async def run(self, ctx: Any) -> RunResult:
        self.times.append(ctx.scheduled_at.timestamp())
        return RunResult()


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=START)


class Store:
    """A store of one kind, on which a test opens runners."""

    def __init__(self, kind: str, clock: VirtualClock, options: dict[str, Any]) -> None:
        self.kind, self.clock, self._options = kind, clock, options
        if kind == "memory":  # which lasts as long as this engine
            queue: Any = get_queue(kind, clock=clock)
            self._options = {"engine": queue.engine}

    def opened(self, *agents: AgentRuntime) -> AgentRunner:
        registry = Registry()
        for agent in agents:
            registry.register(agent)
        queue: Any = get_queue(self.kind, clock=self.clock, **self._options)
        bus: Any = get_event_bus(self.kind, engine=queue.engine, clock=self.clock)
        state: Any = get_state_store(self.kind, engine=queue.engine, clock=self.clock)
        stores = PersistenceManager(PersistenceConfig.on(queue.engine))
        return AgentRunner(queue, bus, state, RunnerConfig(park_after=0), registry=registry, persistence=stores)


MOVABLE = ["sqlite", *(pytest.param(each, marks=getattr(pytest.mark, each)) for each in SERVERS)]


@pytest.fixture(params=["memory", *MOVABLE])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock) -> Store:
    options: dict[str, Any] = {"path": tmp_path / "runs.db"} if request.param == "sqlite" else {}
    if request.param in SERVERS:
        options = {"url": request.getfixturevalue(f"{request.param}_url")}
    return Store(request.param, clock, options)


@pytest.fixture
def runner(store: Store, report: Report) -> Iterator[AgentRunner]:
    runner = store.opened(report)
    yield runner
    asyncio.run(runner.close())


async def worked(runner: AgentRunner) -> None:
    """Execute what is due now."""
    while await runner.run_once():
        pass


# -- lists and counts


async def test_a_schedule_is_not_counted(runner: AgentRunner, clock: VirtualClock) -> None:
    await runner.submit("other", delay=50)
    await runner.submit("other")
    await runner.schedules.put("daily", "report", every=100, metadata={"of": "me"})
    expected = RunCounts({("pending", "other"): 2}, {"other": START}, 1, {})
    assert await runner.queue.counts() == expected
    view = await queue_view(runner)
    assert (view["total"], view["due_later"], view["waiting"]) == (2, 1, {})
    assert [each["key"] for each in await agents_view(runner, Registry())] == ["other"]
    clock.advance(100)
    await runner.queue.claim_rows("other", agent_keys=["none"])  # makes due rows ready
    assert (await runner.queue.counts()).oldest_pending == {"other": START}


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_page_of_runs_is_full_if_schedules_are_between_them(newest_first: bool, runner: AgentRunner) -> None:
    for number in range(6):
        await runner.submit("report", run_id=f"r{number}")
        for other in range(number):
            await runner.schedules.put(f"s{number}-{other}", "report", every=100)
    names = [f"r{number}" for number in range(6)]
    expected = names[::-1] if newest_first else names
    for wanted in (RunFilter(), RunFilter(("pending", "waiting")), RunFilter(prefix="")):
        found = list[str | None]()
        page = wanted._replace(newest_first=newest_first, limit=2)
        while rows := await runner.queue.find_runs(page):
            assert len(rows) == 2
            found += [row.run_key for row in rows]
            last = rows[-1]
            page = page._replace(
                **{"before": (last.created_at, last.arrival)} if newest_first else {"after": last.arrival}
            )
        assert found == expected
    assert await runner.queue.find_runs(RunFilter(agent=SCHEDULE)) == []
    assert await runner.queue.find_runs(RunFilter(limit=0)) == []


async def test_the_run_of_a_tick_is_found_by_the_name_of_its_schedule(runner: AgentRunner, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    assert [run.agent_key for run in await runner.runs(prefix="schedule:daily:")] == ["report"]


# -- actions on the row


async def test_a_schedule_is_no_run_to_act_on(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    put = await runner.schedules.put("daily", "report", every=100)
    row = await runner.schedules.row("daily")
    assert row is not None
    for name in ("schedule:daily", row.run_id):
        calls: list[Any] = [
            runner.get_run(name), runner.cancel(name), runner.resume(name), runner.requeue(name), runner.fork(name),
            runner.wait(name), runner.discard(name),
        ]  # fmt: skip
        if name != row.run_id:  # by its id, the run is not looked up
            calls += [runner.signal(name, "go"), runner.send(name, "hello"), runner.approve(name, "pay"),
                      anext(runner.stream(name)), anext(runner.event_pages(name))]  # fmt: skip
        for call in calls:
            with pytest.raises(UnknownRun, match="names a schedule" if name != row.run_id else "not found"):
                await call
    assert await runner.schedules.get("daily") == put
    assert await runner.signal(row.run_id, "go")
    await worked(runner)
    assert await runner.schedules.get("daily") == put
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 100]


async def test_a_deleted_schedule_does_not_fire(runner: AgentRunner, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    [claimed] = await runner.queue.claim_rows("other", agent_keys=[SCHEDULE])
    assert await runner.schedules.delete("daily")
    await runner.schedules.fire(claimed)  # the claim is over
    await worked(runner)
    assert await runner.queue.find(RunFilter()) == []


async def test_callers_cannot_use_names_of_schedules(runner: AgentRunner, tmp_path: Path) -> None:
    name = "schedule:daily:2027-01-15T08:01:40Z"
    source = await runner.submit("report")
    with pytest.raises(InvalidArgument, match="must not begin with 'schedule:'"):
        await runner.execute("report", run_id=name)
    with pytest.raises(InvalidArgument, match="must not begin with 'schedule:'"):
        await runner.fork(source, new_run_id=name)
    with pytest.raises(InvalidArgument, match="must not begin with 'schedule:'"):
        async with open_run(tmp_path / "other.db", run_id=name):
            pass
    with pytest.raises(InvalidArgument, match="must not begin with 'schedule:'"):
        await runner.queue.enqueue(name, "report", {})


async def test_a_run_may_have_the_id_of_a_schedule(runner: AgentRunner) -> None:
    await runner.schedules.put("daily", "report", every=100)
    row = await runner.schedules.row("daily")
    assert row is not None
    await runner.schedules.delete("daily")
    await runner.submit("report", run_id=row.run_id)
    assert await runner.schedules.get("daily") is None
    assert not await runner.schedules.delete("daily")
    with pytest.raises(IdempotencyConflict, match="has the id of schedule 'daily'"):
        await runner.schedules.put("daily", "report", every=100)


# -- what moves, changes and deletes rows


async def test_vacuum_keeps_schedules(runner: AgentRunner, clock: VirtualClock) -> None:
    put = await runner.schedules.put("daily", "report", every=1e8)
    clock.advance(1e7)
    everything = dict.fromkeys(("succeeded", "failed", "cancelled", "dead", "timed_out"), 0.0)
    assert await runner.vacuum(everything) == 0
    assert await runner.schedules.get("daily") == put


async def test_erasure_of_a_tenant_deletes_its_schedules(runner: AgentRunner, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100, tenant="acme")
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    with pytest.raises(IllegalTransition, match="'schedule:daily'"):
        await runner.erase(tenant="acme")
    erased = await runner.erase(tenant="acme", cancel=True)
    assert (erased.left, await runner.runs(tenant="acme")) == ({}, [])
    assert [each.tenant for each in await runner.schedules.list()] == [None]


async def test_a_schedule_is_not_given_to_a_tenant(runner: AgentRunner, clock: VirtualClock) -> None:
    put = await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    for dry_run in (True, False):
        found = await assign_runs(runner, "acme", RunFilter(), dry_run=dry_run)
        assert found.runs == 1
        [reason] = found.kept.values()
        assert reason.startswith("schedule:daily: put the schedule for the tenant")
    assert [each.id for each in await runner.schedules.list(tenant="acme")] == []
    stored = await runner.schedules.get("daily")
    assert stored is not None
    assert stored.every == put.every


@pytest.mark.parametrize("store", MOVABLE, indirect=True)
async def test_a_store_is_moved_with_its_schedules(
    runner: AgentRunner, report: Report, clock: VirtualClock, tmp_path: Path
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    before = await runner.schedules.list()
    async with Store("sqlite", clock, {"path": tmp_path / "new.db"}).opened(report) as target:
        await move_store(runner, target)
        assert await target.schedules.list() == before
        clock.advance(100)
        await worked(target)
    assert report.times == [START + 100, START + 200]


async def test_a_restored_schedule_fires(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100)
    assert await mark_restored(runner) == 1
    assert not (await verify_store(runner)).damaged
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 100]


@pytest.fixture
def _settings() -> Iterator[None]:
    yield
    reset_config()


def hidden(kind: str, value: Any) -> Any:
    return {**value, "input": {"text": "…"}} if kind == "input" and "input" in value else value


@pytest.mark.usefixtures("_settings")
async def test_an_encrypted_schedule_is_kept_by_a_worker_without_its_key(
    report: Report, clock: VirtualClock, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    configure(payload_codec=OLD)
    async with store.opened(report) as runner:
        put = await runner.schedules.put("daily", "report", {"text": "canary"}, every=100)
        assert await runner.schedules.put("daily", "report", {"text": "canary"}, every=100) == put
        clock.advance(100)
        await worked(runner)
        [row] = await runner.queue.read("find", RunFilter(agent=SCHEDULE))
        assert "canary" not in row.input
    configure(payload_codec=NEW)
    async with store.opened(report) as runner:
        clock.advance(100)
        await worked(runner)
        assert "schedule daily could not fire" in caplog.text
    configure(payload_codec=BOTH)
    async with store.opened(report) as runner:
        assert (await reencrypt(runner)).unreadable == {}
    configure(payload_codec=NEW)
    async with store.opened(report) as runner:
        clock.advance(5)
        await worked(runner)
        assert report.times == [START + 100, START + 200]
        assert (await runner.schedules.list())[0].input == {"text": "canary"}


@pytest.mark.usefixtures("_settings")
async def test_an_encrypted_schedule_hides_no_other_schedule(report: Report, store: Store) -> None:
    configure(payload_codec=OLD)
    async with store.opened(report) as runner:
        await runner.schedules.put("b", "report", {"text": "canary"}, every=100, tenant="acme")
    configure(payload_codec=NEW)
    async with store.opened(report) as runner:
        for id in ("a", "c"):
            await runner.schedules.put(id, "report", every=100)
        found = {each.id: each for each in await runner.schedules.list()}
        assert [found["a"].error, found["c"].error] == [None, None]
        hidden = found["b"]
        assert hidden.error is not None
        assert "old" in hidden.error
        assert (hidden.tenant, hidden.agent, hidden.input, hidden.next_tick) == ("acme", "", {}, None)
        [_, item, _] = sorted(await schedule_items(runner, await runner.schedules.rows()), key=lambda each: each["id"])
        assert (item["id"], item["tenant"], item["agent"], item["last_state"]) == ("b", "acme", None, None)
        assert "is encrypted with key" in item["error"]
        for call in (runner.schedules.get, runner.schedules.pause, runner.schedules.next_ticks):
            with pytest.raises(UnknownEncryptionKey):
                await call("b", tenant="acme")
        assert await runner.schedules.delete("b", tenant="acme")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("reason", "schedule"),
        ("reason", "schedule x - 0"),
        ("input", "[]"),
        ("input", "{"),
        ("input", '{"id": "b"}'),
        ("input", {"start": "soon"}),
        ("input", {"every": None, "cron": "61 * * * *"}),
        ("input", {"timezone": "Europe/Nowhere"}),
    ],
)
async def test_a_damaged_schedule_hides_no_other_schedule(column: str, value: Any, runner: AgentRunner) -> None:
    for id in ("a", "b", "c"):
        await runner.schedules.put(id, "report", every=100)
    row = await runner.schedules.row("b")
    assert row is not None
    text = value if isinstance(value, str) else json.dumps({**json.loads(row.input), **value})
    damaged = row.with_values(**{column: text})
    ops = [Op("queue.end", (row.run_id, LIVE, "cancelled", START, "")),
           Op("queue.delete", (row.run_id, row.generation, row.arrival)), Op("queue.insert", (damaged,))]  # fmt: skip
    await runner.queue.commits.commit(None, ops)
    found = await runner.schedules.list()
    assert [(each.id, each.error is None) for each in found] == [("a", True), ("b", False), ("c", True)]
    items = await schedule_items(runner, await runner.schedules.rows())
    assert [(each["id"], each["error"] is None) for each in items] == [("a", True), ("b", False), ("c", True)]
    with pytest.raises(InvalidArgument if "timezone" in value else StorageCorrupt):
        await runner.schedules.get("b")
    assert await runner.schedules.delete("b")
    assert (await runner.schedules.put("b", "report", every=100)).error is None


@pytest.mark.usefixtures("_settings")
async def test_a_schedule_with_redacted_contents_is_equal_to_itself(
    report: Report, clock: VirtualClock, store: Store
) -> None:
    configure(redact=hidden, redact_stored=True)
    async with store.opened(report) as runner:
        await runner.schedules.put("daily", "report", {"text": "secret"}, every=100)
        clock.advance(150)
        await runner.schedules.put("daily", "report", {"text": "secret"}, every=100)
        await worked(runner)
        assert report.times == [START + 100]


async def test_a_closed_runner_changes_no_schedule(runner: AgentRunner) -> None:
    await runner.schedules.put("daily", "report", every=100)
    await runner.close()
    with pytest.raises(StorageClosed):
        await runner.schedules.pause("daily")


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_a_read_only_runner_changes_no_schedule(runner: AgentRunner, tmp_path: Path) -> None:
    put = await runner.schedules.put("daily", "report", every=100)
    async with AgentRunner.open(tmp_path / "runs.db", registry=Registry(), read_only=True) as reader:
        assert await reader.schedules.list() == [put]
        assert len(await reader.schedules.next_ticks("daily")) == 5
        with pytest.raises(NotSupported):
            await reader.schedules.put("other", "report", every=100)
        for call in (reader.schedules.pause, reader.schedules.resume, reader.schedules.delete,
                     reader.schedules.run_now):  # fmt: skip
            with pytest.raises(NotSupported):
                await call("daily")


# -- races, outages, clocks


async def test_two_puts_at_the_same_time(runner: AgentRunner, store: Store) -> None:
    async with store.opened() as other:
        for _ in range(5):
            puts = [
                each.schedules.put("daily", "report", every=every)
                for each, every in ((runner, 100), (other, 200), (runner, 300), (other, 400))
            ]
            found = await asyncio.gather(*puts)
            [stored] = await runner.schedules.list()
            assert stored.every in {each.every for each in found}
            assert len(await runner.queue.find(RunFilter())) == 1


async def test_a_put_while_a_worker_fires(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    """Either the tick fires before the change, or it never does."""
    for number in range(10):
        await runner.schedules.put("daily", "report", every=100 + number)
        clock.advance(1000)
        before = len(report.times)
        [claimed] = await runner.queue.claim_rows("other", agent_keys=[SCHEDULE])
        _, put = await asyncio.gather(
            runner.schedules.fire(claimed), runner.schedules.put("daily", "report", every=500 + number)
        )
        await worked(runner)
        assert len(report.times) - before <= 1
        [stored] = await runner.schedules.list()
        assert (stored.every, stored.next_tick) == (500 + number, put.next_tick)


async def test_a_clock_that_is_set_back_repeats_no_tick(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(300)
    await worked(runner)
    clock.set_wall(clock.wall() - 250)
    await worked(runner)
    await runner.schedules.pause("daily")
    await runner.schedules.resume("daily")
    await worked(runner)
    clock.advance(250)
    await worked(runner)
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 300, START + 400]


async def test_runs_that_wait_for_a_worker_delay_no_tick(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    for _ in range(5):
        await runner.submit("report", priority=5, metadata={"scheduled_at": "2027-01-01T00:00:00+00:00"})
    clock.advance(100)
    assert await runner.run_once()
    found = await runner.schedules.get("daily")
    assert found is not None
    assert found.last_tick == dt.datetime.fromtimestamp(START + 100, dt.UTC)


async def test_ticks_of_an_agent_that_no_worker_has(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("gone", "unknown", every=100)
    await runner.schedules.put("daily", "report", every=100)
    for _ in range(3):
        clock.advance(100)
        await worked(runner)
    assert report.times == [START + 100, START + 200, START + 300]
    [left] = await runner.runs(agent="unknown")  # one run waits for a worker, and the later ticks are skipped
    assert left.status == "pending"
    gone = await runner.schedules.get("gone")
    assert gone is not None
    assert gone.skipped == 2


async def test_an_input_that_became_invalid_is_logged_and_tried_again(
    runner: AgentRunner, report: Report, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    new_run = runner.schedules._new_run

    def refused(*_: Any, **__: Any) -> Any:
        raise InvalidArgument("input must be something else")

    runner.schedules._new_run = refused
    await worked(runner)
    assert "schedule daily could not fire: input must be something else. Retrying in 5 s" in caplog.text
    runner.schedules._new_run = new_run
    await worked(runner)
    assert report.times == []
    clock.advance(5)
    await worked(runner)
    assert report.times == [START + 100]


async def test_a_store_that_does_not_reply_while_a_tick_fires(
    runner: AgentRunner, report: Report, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit is not applied. The second commit is applied, and its reply is lost."""
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    [claimed] = await runner.queue.claim_rows("other", agent_keys=[SCHEDULE])
    commit, calls = runner.queue.commits.commit, list[str]()

    async def cut(guard: Any, ops: Any) -> Any:
        calls.append(ops[-1].name)
        if len(calls) > 1:
            await commit(guard, ops)
        if len(calls) < 3:
            raise StorageBusy("no reply")

    with monkeypatch.context() as patch:
        patch.setattr(runner.queue.commits, "commit", cut)
        firing = asyncio.create_task(runner.schedules.fire(claimed))
        while not firing.done():
            clock.advance(0.5)
            await asyncio.sleep(0)
    assert calls == ["queue.settle"] * 3
    await worked(runner)
    assert report.times == [START + 100]


async def test_a_worker_that_is_stopped_fires_what_it_has_claimed(
    runner: AgentRunner, report: Report, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    fire, claimed, go_on = runner.schedules._fire, asyncio.Event(), asyncio.Event()

    async def slow(row: Any) -> None:
        claimed.set()
        await go_on.wait()
        await fire(row)

    monkeypatch.setattr(runner.schedules, "_fire", slow)
    loop = asyncio.create_task(runner.run_loop(handle_signals=False))
    await claimed.wait()
    runner.stop()
    await asyncio.sleep(0)
    go_on.set()
    await loop
    [run] = await runner.runs(agent="report")
    assert run.status == "pending"
    stored = await runner.schedules.get("daily")
    assert stored is not None
    assert stored.last_run_id == run.run_id


async def test_more_schedules_than_one_claim_takes(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    for number in range(600):
        await runner.schedules.put(f"s{number}", "report", every=100)
    assert len(await runner.schedules.list()) == 600
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 100] * 600


async def test_a_name_that_another_schedule_begins_with(runner: AgentRunner) -> None:
    at = dt.datetime.fromtimestamp(START, dt.UTC)
    await runner.schedules.put("a", "report", every=100, start=at)
    await runner.schedules.put("a b/é", "report", every=100, start=at)
    assert [each.id for each in await runner.schedules.list()] == ["a", "a b/é"]
    assert await runner.schedules.delete("a")
    assert [each.id for each in await runner.schedules.list()] == ["a b/é"]
    assert not await runner.schedules.delete("a")


@pytest.mark.usefixtures("_settings")
async def test_a_schedule_that_is_encrypted_and_redacted_is_stored_once(report: Report, store: Store) -> None:
    configure(redact=hidden, redact_stored=True, payload_codec=OLD)
    async with store.opened(report) as runner:
        puts = [await runner.schedules.put("daily", "report", {"text": "secret"}, every=100) for _ in range(2)]
        assert puts[0] == puts[1]
        assert (await runner.schedules.pause("daily")).paused
        assert not (await runner.schedules.resume("daily")).paused
        assert puts[0].input == {"text": "…"}
