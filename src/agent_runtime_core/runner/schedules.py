"""Schedules: each starts runs of an agent at the times of a cron expression or an interval.

A schedule is a row of the queue with the agent `SCHEDULE`, which is due at its next tick. The worker that claims the
row stores the run of the tick and the next due time in one commit, under the guard of its claim. So several workers
fire a tick once, and a worker that is killed fires it completely or leaves it to the next worker.

The row's `input` contains what the caller put, and its `reason` contains the state, as `_State` writes it.
"""

from __future__ import annotations

import contextlib
import datetime as _dt
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar, cast
from uuid import UUID
from zlib import crc32
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from .._core.arguments import checked_name, checked_seconds, checked_tenant, checked_time, mapping
from .._core.codec.json import decode
from .._core.ids import SCHEDULED, known_uuid, stored_id
from .._core.lazy_import import load
from .._core.log import log
from .._core.settings import check_known
from .._core.validation import Shown, is_number, must
from .._engines.base import Guard, Op
from .._engines.outages import OUTAGE
from .._engines.payloads import mark_in
from ..errors import (
    AgentRuntimeError,
    IdempotencyConflict,
    LeaseLost,
    StorageCorrupt,
    UnknownEncryptionKey,
    UnknownRun,
    UnserialisableResult,
    brief,
)
from ..queue.base import RunQueue
from ..queue.contents import checked_tags
from ..queue.records import (
    LIVE,
    SCHEDULE,
    SCHEDULE_REASON,
    RowChanged,
    RunFilter,
    RunRow,
    RunUpdate,
    same_input,
    unreadable,
)
from ..registry import key_of

if TYPE_CHECKING:
    from ..interfaces import AgentRuntime

_Agent = TypeVar("_Agent", bound="AgentRuntime")

NEVER: Final = 253_370_764_800.0  # due time of a schedule without a next tick: in the year 9999
MOST_AT_ONCE: Final = 100  # runs that one commit stores, and so the most missed ticks that `catch_up="all"` fires
MISSED_AFTER: Final = 60.0  # seconds after which a tick counts as missed, for `catch_up="none"`
CATCH_UP: Final = ("last", "all", "none")
OVERLAP: Final = ("skip", "queue", "cancel_previous")
_DEFAULTS: Final[Mapping[str, Any]] = {
    "input": None, "cron": None, "every": None, "timezone": "UTC", "catch_up": "last", "overlap": "skip", "jitter": 0,
    "start": None, "end": None, "paused": False, "metadata": None, "priority": 0, "concurrency_key": None,
    "concurrency_limit": 1, "tags": (),
}  # fmt: skip
_CRON: Final = "a schedule with cron="
_FIRST: Final = 2**31 - 1  # priority of the rows: runs that wait for a worker delay no tick
_PAGE: Final = 500  # rows that are read together
_CHANGE: Final = 3 * 3600  # seconds, more than a clock is ever changed by for summer time
_RETRY_SECONDS: Final = 5.0  # after an error in a tick, such as a missing package


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule, as it is stored.

    Attributes:
        id: Names the schedule within its tenant.
        agent: Key of the agent whose runs it starts.
        input: The input of each run.
        cron: A cron expression, None for an interval.
        every: Seconds between two ticks, None for a cron expression.
        timezone: The time zone of the cron expression.
        catch_up: What happens to ticks that passed while no worker ran: "last", "all" or "none".
        overlap: What happens to a tick while the run of the tick before is live: "skip", "queue" or "cancel_previous".
        jitter: Each tick is delayed by a fixed part of so many seconds.
        start: The first time at which a tick may be.
        end: The last time at which a tick may be.
        paused: Whether no tick fires.
        metadata: The metadata of each run.
        priority: The priority of each run.
        concurrency_key: The concurrency key of each run.
        concurrency_limit: How many runs of the concurrency key may be active.
        tags: The tags of each run.
        tenant: The tenant that the schedule and its runs belong to.
        next_tick: The time of the next tick, None if there is none.
        last_tick: The time of the last tick that started a run.
        last_run_id: The run of that tick.
        skipped: How many ticks were skipped because of `overlap`.
        error: In lists: why this process cannot read the schedule, None if it can. Then the fields besides `id` and
            `tenant` are empty, and `get` raises the error.
    """

    id: str
    agent: str
    input: Mapping[str, Any] = field(default_factory=dict)
    cron: str | None = None
    every: float | None = None
    timezone: str = "UTC"
    catch_up: str = "last"
    overlap: str = "skip"
    jitter: float = 0.0
    start: _dt.datetime | None = None
    end: _dt.datetime | None = None
    paused: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)
    priority: int = 0
    concurrency_key: str | None = None
    concurrency_limit: int = 1
    tags: tuple[str, ...] = ()
    tenant: str | None = None
    next_tick: _dt.datetime | None = None
    last_tick: _dt.datetime | None = None
    last_run_id: UUID | None = None
    skipped: int = 0
    error: str | None = None

    @classmethod
    def listed(cls, row: RunRow) -> Self:
        """Return the schedule that a row of the queue contains. If it cannot be read, its `error` says why."""
        try:
            return cls.of(row)
        except AgentRuntimeError as error:
            return cls(id=_name(row), agent="", tenant=row.tenant or None, error=str(error))

    @classmethod
    def of(cls, row: RunRow) -> Self:
        """Return the schedule that a row of the queue contains.

        Raises:
            InvalidArgument: This machine does not know the time zone.
            MissingDependency: The package for `cron` is missing.
            StorageCorrupt: The row is damaged.
            UnknownEncryptionKey: This process lacks the key of the schedule.
        """
        spec, state = _spec(row), _state(row)
        zone = _zone(spec["timezone"])
        try:
            return cls._of(row, spec, state, zone)
        except AgentRuntimeError:
            raise
        except Exception as error:  # whatever a value of another type causes
            raise _damaged(row, "input") from error

    @classmethod
    def _of(cls, row: RunRow, spec: Mapping[str, Any], state: _State, zone: ZoneInfo) -> Self:
        ticks = Ticks(spec)

        def shown(time: float | None) -> _dt.datetime | None:
            return None if time is None else _dt.datetime.fromtimestamp(time, zone)

        run_id = None if state.fired is None else UUID(tick_id(spec["id"], state.fired, row.tenant)[0])
        times = {"start": shown(spec["start"]), "end": shown(spec["end"])}
        next_tick = None if spec["paused"] else ticks.after(state.decided)
        return cls(
            **{**spec, **times, "tags": (*spec["tags"],)}, tenant=row.tenant or None, next_tick=shown(next_tick),
            last_tick=shown(state.fired), last_run_id=run_id, skipped=state.skipped,
        )  # fmt: skip


def schedule(id: str | None = None, **options: Any) -> Callable[[type[_Agent]], type[_Agent]]:
    """Declare a schedule of an agent; a decorator of its class.

        @schedule(cron="0 9 * * mon-fri", timezone="Europe/Berlin")
        class Report(AgentRuntime):
            key = "report"

    A worker stores it when its `run_loop` begins. The schedule stays if you remove the decorator, until you delete it.

    Args:
        id: Names the schedule; by default as the agent.
        **options: As for `Schedules.put`, without a tenant.
    """

    def declare(agent: type[_Agent]) -> type[_Agent]:
        agent.schedules = (*agent.schedules, options if id is None else {"id": id, **options})
        return agent

    return declare


class _State(NamedTuple):
    """What a schedule did."""

    decided: float  # ticks up to this time have fired, or never will
    fired: float | None = None  # the last tick that started a run
    skipped: int = 0

    @classmethod
    def read(cls, reason: str) -> Self:
        _, decided, fired, skipped = reason.split(" ")
        return cls(float(decided), None if fired == "-" else float(fired), int(skipped))

    def text(self) -> str:
        return f"{SCHEDULE_REASON} {self.decided!r} {'-' if self.fired is None else repr(self.fired)} {self.skipped}"


class Ticks:
    """The times of a schedule, as seconds since 1970."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._start: float = -math.inf if spec["start"] is None else spec["start"]
        self._end: float = math.inf if spec["end"] is None else spec["end"]
        self._jitter, self._id = spec["jitter"], spec["id"]
        self._every, self._cron, self._zone = spec["every"], spec["cron"], spec["timezone"]

    def after(self, time: float) -> float | None:
        """Return the first tick after a time; None if there is none."""
        since = max(time, math.nextafter(self._start, -math.inf))
        tick = next((each for each in self._walk(since) if each > since), None)
        return None if tick is None or tick > self._end else tick

    def due(self, after: float, now: float, most: int) -> list[float]:
        """Return the last ticks after a time whose jitter passed, at most `most`, the earliest first."""
        since, window = now, 3600.0
        found: list[float] = []
        while since > after and len(found) < most:  # a year of minutes is not walked from its beginning
            since, window = max(after, now - window), 2 * window
            ticks = takewhile(lambda tick: tick <= min(now, self._end), self._walk(since))
            found = [tick for tick in ticks if tick > since and tick >= self._start and self.jittered(tick) <= now]
        return found[-most:]

    def jittered(self, tick: float) -> float:
        """Return when a tick fires: the same on each worker."""
        return tick + float(self._jitter) * (crc32(f"{self._id} {tick!r}".encode()) / 2**32)

    def _walk(self, since: float) -> Iterator[float]:
        """Yield the ticks from about a time on."""
        if self._every is not None:
            first = max(self._start, 0.0)
            number = max(math.floor((since - first) / self._every), 0)
            while True:
                yield round(first + number * self._every, 3)
                number += 1
        assert self._cron is not None
        yield from _cron_ticks(self._cron, ZoneInfo(self._zone), since)


def _cron_ticks(cron: str, zone: ZoneInfo, since: float) -> Iterator[float]:
    """Yield the ticks of a cron expression from about a time on.

    If the clock skips a time of day, the tick is at the first valid time after it. If the clock repeats a time of day,
    there is one tick. If the minute or the hour is a wildcard, ticks follow real time instead, as in the cron of
    Debian.
    """
    minute, hour, *_ = cron.split()
    follows = minute.startswith("*") or hour.startswith("*")
    near = {_dt.datetime.fromtimestamp(since + side * _CHANGE, zone).utcoffset() for side in (-1, 1)}
    first = _dt.datetime.fromtimestamp(math.floor(since) - (_CHANGE if len(near) > 1 else 1), zone)
    repeated: list[float] = []  # ticks in the second pass of an hour that the clock repeats
    last = -math.inf
    for wall in load("cronsim:CronSim", needed_by=_CRON)(cron, first.replace(tzinfo=None)):  # type: ignore[operator]
        before, after = (wall.replace(tzinfo=zone, fold=fold).timestamp() for fold in (0, 1))
        if before > after:  # the clock skips it: after the change by the offset before the change, and vice versa
            if follows:
                continue
            before = _changed(zone, after, before)
        while repeated and repeated[0] < before:
            yield heapq.heappop(repeated)
        if before > last:
            yield (last := before)
        if follows and after > before:
            heapq.heappush(repeated, after)


def _changed(zone: ZoneInfo, low: float, high: float) -> float:
    """Return the time between two times at which the clock of a zone changes."""
    offset = _dt.datetime.fromtimestamp(low, zone).utcoffset()
    while high - low > 1:
        middle = (low + high) // 2
        if _dt.datetime.fromtimestamp(middle, zone).utcoffset() == offset:
            low = middle
        else:
            high = middle
    return high


def _checked(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what `Schedules.put` stores, or raise InvalidArgument."""
    name = checked_name("schedule id", spec["id"])
    if ":" in name:
        raise must("schedule id", "contain no colon", name)
    if (spec["cron"] is None) == (spec["every"] is None):
        got = Shown("neither" if spec["cron"] is None else "both")
        raise must(f"schedule {name!r}", "contain either cron or every", got)
    every = spec["every"]
    if isinstance(every, _dt.timedelta):
        every = every.total_seconds()
    if every is not None and (not is_number(every) or not 1 <= every < 1e9):
        raise must("every", "be a number of seconds of at least 1, or a timedelta", every)
    for option, allowed in (("catch_up", CATCH_UP), ("overlap", OVERLAP)):
        if spec[option] not in allowed:
            raise must(option, f"be one of {', '.join(allowed)}", spec[option])
    if spec["overlap"] == "queue" and (spec["concurrency_key"] is not None or spec["concurrency_limit"] != 1):
        fix = "The runs of the schedule then execute one at a time. Use overlap='skip' for another key"
        raise must("overlap", "be 'skip' or 'cancel_previous' with concurrency_key and concurrency_limit", "queue", fix)
    if not isinstance(spec["paused"], bool):
        raise must("paused", "be a bool", spec["paused"])
    _zone(spec["timezone"])
    times = {name: checked_time(name, spec[name]) for name in ("start", "end")}
    if times["start"] is not None and times["end"] is not None and times["end"] < times["start"]:
        raise must("end", "not be before start", spec["end"])
    stored = spec | times | {
        "every": None if every is None else float(every), "jitter": checked_seconds("jitter", spec["jitter"]),
        "input": mapping("input", spec["input"]), "metadata": mapping("metadata", spec["metadata"]),
        "tags": checked_tags(spec["tags"]),
    }  # fmt: skip
    if spec["cron"] is not None:
        if not isinstance(spec["cron"], str):
            raise must("cron", "be a cron expression such as '0 9 * * mon-fri'", spec["cron"])
        invalid: Any = load("cronsim:CronSimError", needed_by=_CRON)
        try:
            exists = len(spec["cron"].split()) == 5 and Ticks(stored | {"start": None, "end": None}).after(0.0)
        except invalid as error:
            raise must("cron", "be a cron expression", spec["cron"], str(error)) from None
        if not exists:
            raise must("cron", "contain five fields, and name a time that exists", spec["cron"])
    return stored


def tick_id(schedule: str, tick: float, tenant: str) -> tuple[str, str]:
    """Return the run id and the run key of a tick."""
    text = _dt.datetime.fromtimestamp(tick, _dt.UTC).isoformat(timespec="milliseconds" if tick % 1 else "seconds")
    key = f"{SCHEDULED}{schedule}:{text.replace('+00:00', 'Z')}"
    return stored_id(key, tenant), key


class Schedules:
    """The schedules of a runner's store: `runner.schedules`.

    Args:
        queue: The queue.
        new_run: Returns the row of a new run, as `AgentRunner.new_run`.
        check_writable: Raises an error if the runner is closed or read-only.
    """

    def __init__(self, queue: RunQueue, new_run: Callable[..., RunRow], check_writable: Callable[[], None]) -> None:
        self._queue = queue
        self._new_run = new_run
        self._check_writable = check_writable

    async def put(
        self, id: str, agent: str | AgentRuntime, input: Mapping[str, Any] | None = None, *, cron: str | None = None,
        every: float | _dt.timedelta | None = None, timezone: str = "UTC", catch_up: str = "last",
        overlap: str = "skip", jitter: float = 0, start: _dt.datetime | float | None = None,
        end: _dt.datetime | float | None = None, paused: bool = False, metadata: Mapping[str, Any] | None = None,
        priority: int = 0, concurrency_key: str | None = None, concurrency_limit: int = 1, tags: Iterable[str] = (),
        tenant: str | None = None,
    ) -> Schedule:  # fmt: skip
        """Store a schedule, or replace the stored schedule with that id.

        An equal schedule changes nothing. After a change, the first tick is the first after now: no tick of the old
        schedule fires any more.

        Args:
            id: Names the schedule within its tenant, without a colon.
            agent: The agent or its key.
            input: The input of each run.
            cron: When runs start, such as `0 9 * * mon-fri`. Needs the extra `schedules`.
            every: Instead of `cron`: seconds between two runs, at least 1, counted from `start` or else from 1970.
            timezone: The time zone of `cron`.
            catch_up: Of the ticks that passed while no worker ran, "last" fires the last tick, "all" fires the last
                100, and "none" fires the ticks of the last minute.
            overlap: While the run of the tick before is live, "skip" starts no run, "queue" starts the run after that
                run, and "cancel_previous" cancels that run.
            jitter: Delays each tick by a part of so many seconds, which is fixed for the schedule and the tick.
            start: No tick is before this time.
            end: No tick is after this time.
            paused: Whether to fire no tick.
            metadata: The metadata of each run.
            priority: The priority of each run.
            concurrency_key: The concurrency key of each run, as in `submit`; not with `overlap="queue"`, which uses
                a key of the schedule.
            concurrency_limit: As in `submit`. Runs of a schedule have the rate limit of their agent or runner.
            tags: The tags of each run.
            tenant: The tenant that the schedule and its runs belong to.

        Returns:
            The stored schedule.

        Raises:
            InvalidArgument: An argument is invalid.
            MissingDependency: The package for `cron` is missing.
        """
        options = {
            "input": input, "cron": cron, "every": every, "timezone": timezone, "catch_up": catch_up,
            "overlap": overlap, "jitter": jitter, "start": start, "end": end, "paused": paused, "metadata": metadata,
            "priority": priority, "concurrency_key": concurrency_key, "concurrency_limit": concurrency_limit,
            "tags": tags,
        }  # fmt: skip
        spec, owner = self._specified(id, agent, options), checked_tenant(tenant)
        return await self._replaced(spec["id"], owner, lambda _: spec)

    def _specified(self, id: str, agent: str | AgentRuntime, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is stored of a schedule, or raise InvalidArgument."""
        key = checked_name("agent", agent if isinstance(agent, str) else key_of(agent))
        spec = _checked({"id": id, "agent": key, **_DEFAULTS, **options})
        self._run(spec, "", 0.0)  # checks what a run is checked for
        return spec

    async def get(self, id: str, *, tenant: str | None = None) -> Schedule | None:
        """Return a schedule, or None if there is none.

        Raises:
            StorageCorrupt: The schedule is damaged.
            UnknownEncryptionKey: This process lacks the key of the schedule.
        """
        row = await self.row(id, tenant=tenant)
        return None if row is None else Schedule.of(row)

    async def list(self, *, tenant: str | None = None) -> list[Schedule]:
        """Return the schedules of a tenant, ordered by id; without `tenant`, all schedules.

        A schedule that this process cannot read hides no other schedule: its `error` says why.
        """
        return [Schedule.listed(row) for row in await self.rows(tenant=tenant)]

    async def next_ticks(
        self, id: str, count: int = 5, *, after: _dt.datetime | float | None = None, tenant: str | None = None
    ) -> Sequence[_dt.datetime]:
        """Return the next ticks of a schedule, without jitter, from now or after a time."""
        row = await self._required(id, tenant)
        spec, at = _spec(row), checked_time("after", after)
        ticks, times = Ticks(spec), list[_dt.datetime]()
        zone = _zone(spec["timezone"])
        tick: float | None = self._queue.clock.wall() if at is None else at
        while len(times) < count and (tick := ticks.after(cast(float, tick))) is not None:
            times.append(_dt.datetime.fromtimestamp(tick, zone))
        return times

    async def pause(self, id: str, *, tenant: str | None = None) -> Schedule:
        """Fire no tick until `resume`. Runs that have started go on."""
        return await self._replaced(id, checked_tenant(tenant), lambda row: _known(id, row) | {"paused": True})

    async def resume(self, id: str, *, tenant: str | None = None) -> Schedule:
        """Fire ticks again, from the first tick after now."""
        return await self._replaced(id, checked_tenant(tenant), lambda row: _known(id, row) | {"paused": False})

    async def run_now(self, id: str, *, tenant: str | None = None) -> UUID:
        """Start a run of the schedule now, besides its ticks. Returns the id of the run."""
        row = await self._required(id, tenant)
        now = round(self._queue.clock.wall(), 3)
        run = self._run(_spec(row), row.tenant, now)
        return (await self._queue.insert(run)).decoded("run_id", known_uuid)

    async def delete(self, id: str, *, tenant: str | None = None) -> bool:
        """Delete a schedule. Its runs stay. Returns whether it was stored."""
        self._check_writable()
        row = await self._light(_row_id(id, owner := checked_tenant(tenant))[1], owner)
        return row is not None and await self.drop(row)

    async def row(self, id: str, *, tenant: str | None = None) -> RunRow | None:
        """Return the row of the queue that contains a schedule, None if there is none."""
        row = await self._queue.row(_row_id(id, checked_tenant(tenant))[0])
        return None if row is None or row.agent != SCHEDULE or row.status not in LIVE else row

    async def rows(self, *, tenant: str | None = None) -> Sequence[RunRow]:
        """Return the rows of the queue that contain the schedules, in the order of `list`."""
        wanted, found = RunFilter(LIVE, SCHEDULE, limit=_PAGE, tenant=tenant), dict[tuple[str, str], RunRow]()
        while rows := await self._queue.find(wanted):
            found |= {(row.tenant, row.run_key or ""): row for row in rows}
            wanted = wanted._replace(after=rows[-1].arrival)
        return [found[name] for name in sorted(found)]

    async def drop(self, row: RunRow) -> bool:
        """Delete the schedule in a row. Returns whether it was stored."""
        now: RunRow | None = row
        while now is not None:
            with contextlib.suppress(RowChanged):
                await self._queue.commits.commit(None, _deletion(now))
                return True
            now = await self._light(row.run_key, row.tenant)
        return False

    async def _light(self, key: str | None, tenant: str) -> RunRow | None:
        """Return the row of a schedule without its contents, so that it can be deleted without its encryption key."""
        found = await self._queue.find(RunFilter(LIVE, SCHEDULE, limit=1, light=True, tenant=tenant, run_key=key))
        return found[0] if found else None

    def declared(self, agents: Iterable[AgentRuntime]) -> Sequence[tuple[str, AgentRuntime, Mapping[str, Any]]]:
        """Return what agents declare in `AgentRuntime.schedules`, or raise InvalidArgument."""
        found = [
            (options.get("id", key_of(agent)), agent, {name: options[name] for name in options if name != "id"})
            for agent in agents
            for options in agent.schedules
        ]
        for id, agent, options in found:
            for name in options:
                check_known(name, _DEFAULTS, f"schedule {brief(id)}")
            self._specified(id, agent, options)
        return found

    async def put_declared(self, declared: Iterable[tuple[str, AgentRuntime, Mapping[str, Any]]]) -> None:
        """Store what `declared` returned, once the store answers."""
        for id, agent, options in declared:
            while True:
                try:
                    await self.put(id, agent, **options)
                    break
                except OUTAGE:
                    await self._queue.clock.sleep(1.0)
                except AgentRuntimeError as error:  # nobody waits for this, and the other schedules must be stored
                    log.error("schedule %s of agent %r was not stored: %s", brief(id), key_of(agent), error)
                    break

    # -- rows

    async def _required(self, id: str, tenant: str | None) -> RunRow:
        row = await self.row(id, tenant=tenant)
        if row is None:
            raise _unknown(id)
        return row

    async def _replaced(self, id: str, tenant: str, change: Callable[[RunRow | None], dict[str, Any]]) -> Schedule:
        """Store what `change` returns for the stored row, in a new row, so that claims of the old row end."""
        self._check_writable()
        run_id, key = _row_id(id, tenant)
        while True:
            old = await self._queue.row(run_id)
            if old is not None and old.agent != SCHEDULE:
                raise IdempotencyConflict(f"run {run_id} has the id of schedule {brief(id)}. Use another schedule id")
            live = old if old is not None and old.status in LIVE else None
            now = self._queue.clock.wall()
            new = change(live)
            state = _State(now)
            if live is not None:
                before = _state(live)
                state = before._replace(decided=max(before.decided, now))  # the clock may have been set back
            row = self._queue.new_row(None, SCHEDULE, new, new["metadata"], _FIRST, tenant=tenant or None).with_values(
                run_id=run_id, run_key=key, status="waiting", due_at=_due(new, state), reason=state.text()
            )
            if live is not None and same_input(row, live):
                return Schedule.of(live)
            ops: Sequence[Op] = () if old is None else _deletion(old)
            with contextlib.suppress(RowChanged):
                found = (await self._queue.commits.commit(None, [*ops, Op("queue.insert", (row,))]))[-1]
                if same_input(row, found):  # else another process stored the schedule since
                    return Schedule.of(found)

    def _run(self, spec: Mapping[str, Any], tenant: str, tick: float) -> RunRow:
        """Return the row of the run of a tick."""
        run_id, key = tick_id(spec["id"], tick, tenant)
        at = _dt.datetime.fromtimestamp(tick, _dt.UTC).isoformat()
        return self._new_run(
            spec["agent"], spec["input"], metadata=spec["metadata"] | {"schedule": spec["id"], "scheduled_at": at},
            priority=spec["priority"], tenant=tenant or None, tags=spec["tags"],
            concurrency_key=f"{SCHEDULED}{spec['id']}" if spec["overlap"] == "queue" else spec["concurrency_key"],
            concurrency_limit=spec["concurrency_limit"],
        ).with_values(run_id=run_id, run_key=key)  # fmt: skip

    # -- ticks, under the claim of a worker

    async def fire(self, row: RunRow) -> None:
        """Store the runs of the ticks that are due, and release the claimed row until the next tick."""
        clock = self._queue.clock
        while True:
            try:
                await self._fire(row)
                return
            except LeaseLost:
                return  # the schedule was changed, or another worker claimed it since
            except RowChanged:
                await self._cancelled(row)
                return
            except OUTAGE:
                await clock.sleep(1.0)
            except Exception as error:
                log.exception("schedule %s could not fire: %s. Retrying in %g s", _name(row), error, _RETRY_SECONDS)
                await self._put_off(row)
                return

    async def _fire(self, row: RunRow) -> None:
        if row.cancel_at is not None:
            raise RowChanged
        spec, state = _spec(row), _state(row)
        now, ticks = row.claimed_at or self._queue.clock.wall(), Ticks(spec)
        due = ticks.due(state.decided, now, MOST_AT_ONCE if spec["catch_up"] == "all" else 1)
        state = state._replace(decided=max((state.decided, *due)))
        if spec["catch_up"] == "none":
            due = [tick for tick in due if ticks.jittered(tick) >= now - MISSED_AFTER]
        ops: list[Op] = []
        if due and spec["overlap"] != "queue":
            previous, is_skipped = await self._previous(spec, row, state), spec["overlap"] == "skip"
            firing = [] if is_skipped and previous is not None else due[:1] if is_skipped else due[-1:]
            if firing and previous is not None:
                ops.append(self._queue.post_op(previous.run_id, "cancel", "", "null", f"cancel:{previous.generation}"))
            state, due = state._replace(skipped=state.skipped + len(due) - len(firing)), firing
        if due:
            state = state._replace(fired=due[-1])
        ops += [Op("queue.insert", (self._run(spec, row.tenant, tick),)) for tick in due]
        await self._settle(row, due_at=_due(spec, state), reason=state.text(), ops=ops)

    async def _previous(self, spec: Mapping[str, Any], row: RunRow, state: _State) -> RunRow | None:
        """Return the run of the tick before, if it is live."""
        if state.fired is None:
            return None
        run = await self._queue.row(tick_id(spec["id"], state.fired, row.tenant)[0])
        return run if run is not None and run.status in LIVE else None

    async def _settle(self, row: RunRow, *, due_at: float, reason: str, ops: Sequence[Op]) -> None:
        how = RunUpdate(row.claim_id, "waiting", self._queue.clock.wall(), due_at=due_at, reason=reason)
        await self._queue.commits.commit(Guard(row.run_id, row.claim_id), [*ops, Op("queue.settle", (row.run_id, how))])

    async def _put_off(self, row: RunRow) -> None:
        due = self._queue.clock.wall() + _RETRY_SECONDS
        with contextlib.suppress(AgentRuntimeError, RowChanged):  # its lease ends
            await self._settle(row, due_at=due, reason=row.reason, ops=[])

    async def _cancelled(self, row: RunRow) -> None:
        """A caller cancelled the row like a run: the schedule is deleted."""
        with contextlib.suppress(AgentRuntimeError):  # its lease ends
            await self.drop(row)


def _deletion(row: RunRow) -> Sequence[Op]:
    ops = [Op("queue.delete", (row.run_id, row.generation, row.arrival))]
    if row.status in LIVE:
        ops.insert(0, Op("queue.end", (row.run_id, LIVE, "cancelled", row.updated_at, SCHEDULE_REASON)))
    return ops


def _row_id(id: str, tenant: str) -> tuple[str, str]:
    """Return the run id and the run key of the row of a schedule."""
    key = f"{SCHEDULED}{checked_name('schedule id', id)}"
    return stored_id(key, tenant), key


def _spec(row: RunRow) -> dict[str, Any]:
    if (error := unreadable(row)) is not None:
        raise error
    try:
        spec = decode(row.input)
    except UnserialisableResult as error:
        raise _damaged(row, "input") from error
    if (mark := mark_in(spec)) is not None:  # rows of lists contain marks
        raise UnknownEncryptionKey(mark["encrypted"]["key"], f"schedule {_name(row)}")
    if not isinstance(spec, dict) or not spec.keys() >= {"id", "agent", *_DEFAULTS}:
        raise _damaged(row, "input")
    return spec


def _state(row: RunRow) -> _State:
    try:
        return _State.read(row.reason)
    except ValueError as error:
        raise _damaged(row, "reason") from error


def _damaged(row: RunRow, column: str) -> StorageCorrupt:
    return StorageCorrupt(
        f"schedule {brief(_name(row))} must be stored as this library wrote it, got a damaged {column}. Delete the "
        "schedule and put it again, or restore a backup"
    )


def _name(row: RunRow) -> str:
    return (row.run_key or row.run_id).removeprefix(SCHEDULED)


def _zone(name: Any) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        fix = "Use a name of the IANA database; on Windows, install tzdata"
        raise must("timezone", "be the name of a time zone, such as 'Europe/Berlin'", name, fix) from None


def _unknown(id: str) -> UnknownRun:
    return UnknownRun(f"schedule {brief(id)} is not stored. runner.schedules.list() returns those that are")


def _known(id: str, row: RunRow | None) -> dict[str, Any]:
    if row is None:
        raise _unknown(id)
    return _spec(row)


def _due(spec: Mapping[str, Any], state: _State) -> float:
    ticks = Ticks(spec)
    tick = None if spec["paused"] else ticks.after(state.decided)
    return NEVER if tick is None else ticks.jittered(tick)
