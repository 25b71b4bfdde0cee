"""Schedules: when their ticks are, which runs they start, and what changes them."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, InvalidArgument, RunResult
from agent_runtime_core.errors import MissingDependency, UnknownRun, UnknownSetting
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.records import SCHEDULE, RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import schedule
from agent_runtime_core.runner.schedules import Ticks
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing import VirtualClock
from tests.support.backends import POSTGRES, SERVERS

START = 1_800_000_000.0  # a whole multiple of the intervals below
SPEC: dict[str, Any] = {
    "id": "s", "start": None, "end": None, "jitter": 0.0, "every": None, "cron": None, "timezone": "UTC"
}  # fmt: skip


class Report(AgentRuntime):
    """Notes the times that its runs stand for."""

    key = "report"

    def __init__(self) -> None:
        self.times: list[float] = []
        self.started, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def run(self, ctx: Any) -> RunResult:
        self.times.append(ctx.scheduled_at.timestamp())
        self.started.set()
        await self.go_on.wait()
        return RunResult(final_output=ctx.metadata)


@pytest.fixture
def report() -> Report:
    return Report()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(start=START)


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def runner(
    request: pytest.FixtureRequest, tmp_path: Path, clock: VirtualClock, report: Report
) -> Iterator[AgentRunner]:
    registry = Registry()
    registry.register(report)
    options: dict[str, Any] = {"path": tmp_path / "runs.db"} if request.param == "sqlite" else {}
    if request.param in SERVERS:
        options = {"url": request.getfixturevalue(f"{request.param}_url")}
    queue: Any = get_queue(request.param, clock=clock, **options)
    parts: list[Any] = [
        get(request.param, engine=queue.engine, clock=clock) for get in (get_event_bus, get_state_store)
    ]
    opened = AgentRunner(queue, *parts, registry=registry)
    yield opened
    asyncio.run(opened.close())


async def worked(runner: AgentRunner) -> None:
    """Executes what is due now."""
    while await runner.run_once():
        pass


async def test_a_tick_is_one_run_with_a_name(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    put = await runner.schedules.put("daily", "report", {"x": 1}, every=100, metadata={"of": "me"})
    assert put.next_tick == dt.datetime.fromtimestamp(START + 100, dt.UTC)
    assert (put.last_tick, put.last_run_id, put.skipped) == (None, None, 0)
    await worked(runner)
    assert not report.times
    clock.advance(100)
    await worked(runner)
    await worked(runner)
    assert report.times == [START + 100]
    at = dt.datetime.fromtimestamp(START + 100, dt.UTC)
    run = await runner.get_run(f"schedule:daily:{at:%Y-%m-%dT%H:%M:%SZ}")
    assert run.status == "succeeded"
    assert run.metadata == {"of": "me", "schedule": "daily", "scheduled_at": at.isoformat()}
    found = await runner.schedules.get("daily")
    assert found is not None
    assert (found.last_tick, found.last_run_id) == (at, run.run_id)
    assert found.next_tick == at + dt.timedelta(seconds=100)
    assert await runner.schedules.list() == [found]


async def test_a_tick_does_not_fire_again_after_its_run_was_deleted(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    clock.advance(10)
    assert await runner.vacuum({"succeeded": 5}) == 1
    await worked(runner)
    assert report.times == [START + 100]


@pytest.mark.parametrize(
    ("catch_up", "late", "fired"),
    [
        ("last", 0, [5]),
        ("all", 0, [1, 2, 3, 4, 5]),
        ("none", 0, [5]),
        ("last", 90, [5]),
        ("all", 90, [1, 2, 3, 4, 5]),
        ("none", 90, []),
    ],
)
async def test_ticks_that_passed_while_nobody_worked(
    catch_up: str, late: float, fired: list[int], runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=100, catch_up=catch_up, overlap="queue")
    clock.advance(500 + late)
    await worked(runner)
    assert report.times == [START + 100 * each for each in fired]
    clock.advance(100 - late)
    await worked(runner)
    assert report.times[-1] == START + 600


async def test_missed_ticks_are_bounded(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("often", "report", every=1, catch_up="all", overlap="queue")
    clock.advance(150)
    await worked(runner)
    assert report.times == [START + each for each in range(51, 151)]


async def test_a_tick_is_skipped_while_the_run_before_is_live(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=10)
    report.go_on.clear()
    clock.advance(10)
    first = asyncio.create_task(runner.run_once())
    await report.started.wait()
    clock.advance(10)
    assert not await runner.run_once()
    report.go_on.set()
    await first
    found = await runner.schedules.get("daily")
    assert found is not None
    assert found.skipped == 1
    clock.advance(10)
    await worked(runner)
    assert report.times == [START + 10, START + 30]


async def test_a_tick_cancels_the_run_before(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=10, overlap="cancel_previous")
    report.go_on.clear()
    clock.advance(10)
    first = asyncio.create_task(runner.run_once())
    await report.started.wait()
    clock.advance(10)
    report.go_on.set()
    await worked(runner)
    await first
    statuses = {run.run_key: run.status.value for run in await runner.runs(agent="report")}
    assert sorted(statuses.values()) in (["cancelled", "succeeded"], ["succeeded", "succeeded"])
    assert report.times == [START + 10, START + 20]


async def test_an_equal_schedule_changes_nothing(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    first = await runner.schedules.put("daily", "report", {"x": 1}, every=100)
    clock.advance(350)
    assert await runner.schedules.put("daily", "report", {"x": 1}, every=dt.timedelta(seconds=100)) == first
    await worked(runner)
    assert report.times == [START + 300]


async def test_a_changed_schedule_never_fires_a_tick_of_the_old_one(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(350)
    queue = runner.queue
    [claimed] = await queue.claim_rows("other", agent_keys=[SCHEDULE])  # a worker that is about to fire the tick
    await runner.schedules.put("daily", "report", every=1000)
    await runner.schedules.fire(claimed)
    await worked(runner)
    assert not report.times
    clock.advance(1000 - 350)
    await worked(runner)
    assert report.times == [START + 1000]


async def test_pause_and_resume(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100, catch_up="all")
    paused = await runner.schedules.pause("daily")
    assert (paused.paused, paused.next_tick) == (True, None)
    clock.advance(250)
    await worked(runner)
    assert not report.times
    resumed = await runner.schedules.resume("daily")
    assert resumed.next_tick == dt.datetime.fromtimestamp(START + 300, dt.UTC)
    clock.advance(50)
    await worked(runner)
    assert report.times == [START + 300]


async def test_start_and_end(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put(
        "daily", "report", every=100, start=START + 150, end=START + 360, catch_up="all", overlap="queue"
    )
    clock.advance(5000)
    await worked(runner)
    assert report.times == [START + 150, START + 250, START + 350]
    found = await runner.schedules.get("daily")
    assert found is not None
    assert found.next_tick is None
    assert await runner.schedules.next_ticks("daily") == []


async def test_run_now_and_delete(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(30)
    run_id = await runner.schedules.run_now("daily")
    await worked(runner)
    assert report.times == [START + 30]
    assert (await runner.get_run(run_id)).status == "succeeded"
    assert await runner.schedules.delete("daily")
    assert not await runner.schedules.delete("daily")
    clock.advance(1000)
    await worked(runner)
    assert report.times == [START + 30]
    assert await runner.schedules.get("daily") is None
    await runner.schedules.put("daily", "report", every=100)
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 30, START + 1100]


async def test_two_tenants_use_the_same_name(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    for tenant in (None, "a", "b"):
        await runner.schedules.put("daily", "report", every=100, tenant=tenant)
    await runner.schedules.pause("daily", tenant="b")
    clock.advance(100)
    await worked(runner)
    assert report.times == [START + 100] * 2
    assert {run.tenant for run in await runner.runs(agent="report")} == {None, "a"}
    assert [each.tenant for each in await runner.schedules.list()] == [None, "a", "b"]
    assert [each.paused for each in await runner.schedules.list(tenant="b")] == [True]


async def test_a_cancelled_row_is_deleted(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=100)
    [row] = await runner.queue.find(RunFilter(agent=SCHEDULE))
    await runner.queue.commits.commit(None, [runner.queue.post_op(row.run_id, "cancel", "", "null")])
    await worked(runner)
    assert await runner.schedules.list() == []
    clock.advance(500)
    await worked(runner)
    assert not report.times


async def test_a_busy_worker_fires_ticks(runner: AgentRunner, report: Report, clock: VirtualClock) -> None:
    await runner.schedules.put("daily", "report", every=10, overlap="queue")
    report.go_on.clear()
    clock.advance(10)
    loop = asyncio.create_task(runner.run_loop(handle_signals=False))
    await report.started.wait()
    clock.advance(10)
    for _ in range(1000):
        if len(await runner.runs(agent="report")) == 2:
            break
        clock.advance(0.05)
        await asyncio.sleep(0)
    assert len(await runner.runs(agent="report")) == 2
    assert len(report.times) == 1
    report.go_on.set()
    runner.stop()
    await loop


async def test_a_worker_stores_what_its_agents_declare(runner: AgentRunner, clock: VirtualClock) -> None:
    @schedule(every=100)
    @schedule("weekly", every=700, timezone="Europe/Berlin")
    class Declared(Report):
        key = "declared"

    assert Declared.schedules == ({"id": "weekly", "every": 700, "timezone": "Europe/Berlin"}, {"every": 100})
    assert not Report.schedules
    agent = Declared()
    runner.registry.register(agent)
    loop = asyncio.create_task(runner.run_loop(handle_signals=False))
    while not agent.started.is_set():
        clock.advance(1)
        await asyncio.sleep(0)
    runner.stop()
    await loop
    found = [(each.id, each.every, each.timezone) for each in await runner.schedules.list()]
    assert found == [("declared", 100.0, "UTC"), ("weekly", 700.0, "Europe/Berlin")]


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [({"evry": 3}, UnknownSetting, "every"), ({"every": -3}, InvalidArgument, "every must be")],
)
async def test_a_worker_refuses_a_wrong_declaration(
    declared: dict[str, Any], error: type[Exception], message: str
) -> None:
    class Declared(Report):
        key = "declared"
        schedules = (declared,)

    registry = Registry()
    registry.register(Declared())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        with pytest.raises(error, match=message):
            await runner.run_loop(handle_signals=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "must contain either cron or every, got neither"),
        ({"every": 5, "cron": "* * * * *"}, "must contain either cron or every, got both"),
        ({"every": 0}, "every must be a number of seconds of at least 1"),
        ({"every": float("nan")}, "every must be"),
        ({"every": True}, "every must be"),
        ({"cron": "0 0 31 2 *"}, "cron must be a cron expression, got '0 0 31 2 \\*'. Bad day-of-month"),
        ({"cron": "61 * * * *"}, "cron must be a cron expression"),
        ({"cron": "* * *"}, "cron must contain five fields"),
        ({"cron": "0 * * * * *"}, "cron must contain five fields"),
        ({"cron": 5}, "cron must be a cron expression"),
        ({"every": 5, "timezone": "Mars/Olympus"}, "timezone must be the name of a time zone"),
        ({"every": 5, "timezone": None}, "timezone must be"),
        ({"every": 5, "catch_up": "some"}, "catch_up must be one of last, all, none"),
        ({"every": 5, "overlap": "?"}, "overlap must be one of skip, queue, cancel_previous"),
        ({"every": 5, "jitter": -1}, "jitter must be"),
        ({"every": 5, "start": START, "end": START - 1}, "end must not be before start"),
        ({"every": 5, "start": dt.datetime(2027, 1, 1)}, "start must be timezone-aware"),  # noqa: DTZ001
        ({"every": 5, "paused": 1}, "paused must be a bool"),
        ({"every": 5, "input": 3}, "input must be"),
        ({"every": 5, "priority": "high"}, "priority must be"),
        ({"every": 5, "tags": "nightly"}, "tags must be a list of strings"),
        ({"every": 5, "concurrency_limit": 0}, "concurrency_limit must be"),
        ({"every": 5, "overlap": "queue", "concurrency_key": "k"}, "overlap must be 'skip' or 'cancel_previous'"),
        ({"every": 5, "overlap": "queue", "concurrency_limit": 2}, "overlap must be 'skip' or 'cancel_previous'"),
        ({"every": 5, "id": "a:b"}, "must contain no colon"),
        ({"every": 5, "id": ""}, "schedule id must be"),
    ],
)
async def test_bad_input_is_refused_when_it_is_put(options: dict[str, Any], message: str) -> None:
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        with pytest.raises(InvalidArgument, match=message):
            await runner.schedules.put(**{"id": "s", "agent": "report", **options})
        assert await runner.schedules.list() == []


async def test_a_run_of_a_schedule_has_its_key_limit_and_tags(
    runner: AgentRunner, report: Report, clock: VirtualClock
) -> None:
    options: dict[str, Any] = {"concurrency_key": "printer", "concurrency_limit": 2, "tags": ("a", "b")}
    stored = await runner.schedules.put("s", "report", every=60, **options)
    assert {name: getattr(stored, name) for name in options} == options
    assert await runner.schedules.put("s", "report", every=60, **options) == stored
    row = await runner.queue.require(await runner.schedules.run_now("s"))
    assert (row.concurrency_key, row.concurrency_limit) == ("printer", 2)
    info = await runner.get_run(row.run_id)
    assert (info.tags, info.metadata["schedule"]) == (("a", "b"), "s")


async def test_the_names_of_schedules_are_reserved() -> None:
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        with pytest.raises(InvalidArgument, match="run_id must not begin with 'schedule:'"):
            await runner.submit("report", run_id="schedule:daily:2026-01-01T00:00:00Z")
        for call in (runner.schedules.pause, runner.schedules.resume, runner.schedules.run_now,
                     runner.schedules.next_ticks):  # fmt: skip
            with pytest.raises(UnknownRun, match="schedule 'other' is not stored"):
                await call("other")


async def test_cron_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cronsim", None)
    async with AgentRunner.open("memory://", registry=Registry()) as runner:
        with pytest.raises(MissingDependency, match=r"agent-runtime-core\[schedules\]"):
            await runner.schedules.put("s", "report", cron="* * * * *")


def test_jitter_is_fixed_and_within_its_bound() -> None:
    ticks = Ticks({**SPEC, "every": 10.0, "jitter": 5.0})
    delays = [ticks.jittered(10.0 * each) - 10.0 * each for each in range(200)]
    assert min(delays) >= 0
    assert max(delays) < 5
    assert len(set(delays)) > 190
    assert ticks.due(0.0, 1000.0, 3)[-1] in (990.0, 1000.0)
    assert ticks.due(0.0, ticks.jittered(1000.0), 1) == [1000.0]
    assert ticks.due(0.0, ticks.jittered(1000.0) - 0.001, 1) == [990.0]


# -- clocks that change

ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata")
CRONS = ("30 2 * * *", "0 * * * *", "*/15 * * * *", "15,45 1-3 * * *", "0 0 1 * *", "30 2 * * sun", "* 2 * * *")
TWO_YEARS = (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime(2028, 1, 1, tzinfo=dt.UTC))


def transitions(zone: ZoneInfo) -> list[float]:
    """The times at which the clock of a zone changes."""
    hours = range(int(TWO_YEARS[0].timestamp()), int(TWO_YEARS[1].timestamp()), 1800)
    offsets = [(each, dt.datetime.fromtimestamp(each, zone).utcoffset()) for each in hours]
    return [float(later) for (_, old), (later, new) in itertools.pairwise(offsets) if old != new]


def expected(cron: str, zone: ZoneInfo, begin: float, end: float) -> list[float]:
    """The ticks of a day, found by looking at each minute of the wall clock and of real time."""
    minutes, hours, days, _, weekdays = cron.split(" ")

    def allows(text: str, value: int) -> bool:
        if text == "sun":
            return value == 0
        if text.startswith("*"):
            return value % int(text.partition("/")[2] or 1) == 0
        parts = [part.partition("-") for part in text.split(",")]
        return any(int(low) <= value <= int(high or low) for low, _, high in parts)

    def matches(at: dt.datetime) -> bool:
        return (
            allows(minutes, at.minute)
            and allows(hours, at.hour)
            and allows(days, at.day)
            and allows(weekdays, (at.weekday() + 1) % 7)
        )

    real = range(int(begin), int(end), 60)
    if minutes.startswith("*") or hours.startswith("*"):  # follows real time
        return [float(each) for each in real if matches(dt.datetime.fromtimestamp(each, zone))]
    found: list[float] = []
    first = dt.datetime.fromtimestamp(begin, zone).replace(tzinfo=None)
    for minute in range(int((end - begin) // 60) + 180):
        wall = first + dt.timedelta(minutes=minute)
        if not matches(wall):
            continue
        at = wall.replace(tzinfo=zone).timestamp()  # of a repeated time the first one
        if dt.datetime.fromtimestamp(at, zone).replace(tzinfo=None) != wall:  # skipped: the first valid time after it
            at = next(float(each) for each in real if dt.datetime.fromtimestamp(each, zone).replace(tzinfo=None) > wall)
        if begin <= at < end and at not in found:
            found.append(at)
    return found


@pytest.mark.parametrize("name", ZONES)
def test_ticks_around_each_change_of_the_clock(name: str) -> None:
    """A skipped time runs once at the first valid time after it, a repeated one once; wildcards follow real time."""
    zone = ZoneInfo(name)
    changes = transitions(zone) or [START]
    assert len(changes) == (1 if name == "Asia/Kolkata" else 4)
    for change in changes:
        midnight = dt.datetime.fromtimestamp(change, zone).replace(hour=0, minute=0, second=0, microsecond=0)
        begin = midnight.timestamp()
        end = begin + 36 * 3600
        for cron in CRONS:
            ticks, found, tick = Ticks({**SPEC, "cron": cron, "timezone": name}), list[float](), begin - 1
            while (following := ticks.after(tick)) is not None and following < end:
                found.append(tick := following)
            assert found == expected(cron, zone, begin, end), (cron, midnight)
            assert ticks.due(begin - 1, end - 1, 5000) == found, (cron, midnight)
