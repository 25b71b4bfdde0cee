"""What the runs of the last week did: numbers, latencies, cost and errors, counted while somebody looks at them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakKeyDictionary

from .._journal.record import DONE, Record, is_copied
from ..queue.records import LIVE, RunFilter, RunRow
from ..runner.run_client import RunClient
from .attempts import LOOP
from .journal import outcomes_of
from .plain import iso_time
from .runs import models_in

#: The windows of the dashboard: their seconds, and the seconds of each point of its charts.
WINDOWS: Final = {"hour": (3_600, 300), "day": (86_400, 3_600), "week": (604_800, 21_600)}
#: Runs that are counted at most, the newest first.
MOST_RUNS: Final = 100_000
#: Journals of older runs that are read at most, and of new runs that wait to be read. They have the steps and calls.
MOST_JOURNALS: Final = 2_000
_WEEK: Final = 604_800
_BUCKET: Final = 300  # seconds
_PAGE: Final = 500
_PAGES: Final = 20  # that one look reads at most
_SECONDS: Final = 0.25  # after which a look reads no further page
_FIRST_SECONDS: Final = 0.05  # the same for the first look, for which the page waits
_JOURNALS: Final = 40  # that one look reads at most
_MOST_LIVE: Final = 2_000  # runs whose end is looked for
_MOST_NAMES: Final = 100  # of agents, tenants, models and errors in five minutes; further ones count as "other"
_GROWTH: Final = math.log(1.1)  # each class of a latency is 10 % longer than the class before it
_FAILED: Final = ("failed", "dead", "timed_out")
_COSTS: Final = ("agent", "tenant", "model")
_SHARES: Final = (50, 95, 99)


class Dashboard:
    """Counts the runs of one store, or of one tenant, and keeps what it has counted in memory.

    A look reads what is new, and further back as long as the last week is not complete. So nothing is written, no run
    and no step does anything for it, and the first look at a large store is as fast as later looks.

    Args:
        tenant: Count only the runs of this tenant; None for all runs.
    """

    _of: ClassVar[WeakKeyDictionary[Any, dict[str | None, Dashboard]]] = WeakKeyDictionary()

    def __init__(self, tenant: str | None) -> None:
        self._tenant = tenant
        self._buckets: dict[int, Counter[tuple[str, ...]]] = {}
        self._live: dict[str, RunRow] = {}
        self._unread: list[RunRow] = []  # ended runs whose journals are to be read, the last one first
        self._last = self._read = self._journals = 0
        self._before: tuple[float, int] | None = None
        self._since = math.inf  # the creation of the oldest run that was counted
        self._complete = self._busy = False
        self._missed = False  # whether the ends of some live runs will not be counted

    @classmethod
    def of(cls, runner: RunClient, tenant: str | None) -> Dashboard:
        """Return the dashboard of a store and tenant, which later calls return again."""
        found = cls._of.setdefault(runner.queue, {})
        if tenant not in found and len(found) > _MOST_NAMES:
            found.clear()  # it is counted again
        return found.setdefault(tenant, cls(tenant))

    async def view(self, runner: RunClient, window: str) -> dict[str, Any]:
        """Count what is new, and return what the runs of a window did.

        Args:
            runner: The runner on the store.
            window: "hour", "day" or "week".

        Returns:
            {"window", "since", "until", "counted_since", "complete", "runs", "journals", "started", "ended", "failed",
            "series", "latency", "cost", "errors"}. `counted_since` is the creation of the oldest run that was counted,
            and `complete` whether all runs of the last week are counted. `series` are {"at", "started", "ended",
            "failed"}. `latency` has, for "queue" (from creation to start), "run", "step" and "model", {"p50", "p95",
            "p99", "count"}, in seconds within 5 %. `cost` has, for "agent", "tenant" and "model", {"name", "cost_usd",
            "tokens"}, the most expensive first. Steps, model calls and models are of the journals that were read.
        """
        now = runner.queue.clock.wall()
        if not self._busy:
            self._busy = True
            try:
                await self._look(runner, now)
            finally:
                self._busy = False
        return self._view(window, now)

    async def _look(self, runner: RunClient, now: float) -> None:
        clock = runner.queue.clock
        began, seconds = clock.monotonic(), _SECONDS if self._read else _FIRST_SECONDS
        for bucket in [each for each in self._buckets if each * _BUCKET < now - _WEEK - _BUCKET]:
            del self._buckets[bucket]
        await self._ended(runner)
        for _ in range(_PAGES):
            if not await self._page(runner, now) or clock.monotonic() - began > seconds:
                break
        for _ in range(min(_JOURNALS, len(self._unread))):
            row = self._unread.pop(0)
            self._journals += 1
            self._add_records(row, await runner.state_store.records(row.run_id))
            if clock.monotonic() - began > 2 * seconds:
                break

    async def _page(self, runner: RunClient, now: float) -> bool:
        """Count a page of new runs, or else of older runs; return whether there may be more of them."""
        wanted = RunFilter(since=now - _WEEK, tenant=self._tenant, limit=_PAGE, light=True)
        if self._last:
            rows = await runner.queue.find_runs(wanted._replace(after=self._last))
            if rows:
                self._last = rows[-1].arrival
                self._read += len(rows)
                await self._add(runner, rows, ())
                return True
        if self._complete or self._read >= MOST_RUNS:
            return False
        rows = await runner.queue.find_runs(wanted._replace(newest_first=True, before=self._before))
        self._last = max(self._last, *(each.arrival for each in rows)) if rows else self._last
        self._complete = len(rows) < _PAGE
        if rows:
            self._before = (rows[-1].created_at, rows[-1].arrival)
            self._since = rows[-1].created_at
            self._read += len(rows)
            await self._add(runner, rows)
        return not self._complete

    async def _ended(self, runner: RunClient) -> None:
        """Count the ends of runs that were live at the last look."""
        found = await runner.queue.snapshots([*self._live]) if self._live else {}
        ended = [row for run_id, row in self._live.items() if run_id not in found or found[run_id].status not in LIVE]
        rows: list[RunRow] = []
        for each in ended[:_PAGE]:
            del self._live[each.run_id]
            wanted = RunFilter(after=each.arrival - 1, limit=1, light=True)
            rows += [row for row in await runner.queue.find(wanted) if row.run_id == each.run_id]
        await self._add(runner, rows, {each.run_id for each in ended if each.started_at})

    async def _add(self, runner: RunClient, rows: Sequence[RunRow], known: Collection[str] | None = None) -> None:
        """Count older runs, or with `known` new runs. The start of a known run was counted before."""
        done = [row for row in rows if row.status not in LIVE and row.ended_at is not None]
        for row in rows:
            if row.started_at and row.run_id not in (known or ()):
                self._count(row.started_at, ("number", "started"))
                self._time(row.started_at, "queue", row.started_at - row.created_at)
            if row.status in LIVE and len(self._live) < _MOST_LIVE:
                self._live[row.run_id] = row
            self._missed = self._missed or (row.status in LIVE and row.run_id not in self._live)
        for row, (error, usage) in zip(done, await outcomes_of(runner, done), strict=True):
            at, started = row.ended_at or 0.0, row.started_at
            self._count(at, ("number", "ended"))
            if started:
                self._time(at, "run", at - started)
            if row.status in _FAILED:
                self._count(at, ("number", "failed"))
                self._named(at, "error", str((error or {}).get("type") or row.status))
            for kind, name in (("agent", row.agent), ("tenant", row.tenant)):
                self._spent(at, kind, name, usage.get("cost_usd"), usage.get("total_tokens"))
        if known is None:
            self._unread += done[: max(MOST_JOURNALS - self._journals - len(self._unread), 0)]
        else:
            self._unread = [*done[::-1], *self._unread][:MOST_JOURNALS]

    def _add_records(self, row: RunRow, records: Iterable[Record]) -> None:
        for record in records:
            if record.kind != DONE or is_copied(record):
                continue
            if record.tries:  # the records of waits and values have none
                is_model = record.name == "model" and record.key.startswith(LOOP)
                self._time(record.t, "model" if is_model else "step", record.ms / 1000)
            for model, usage in models_in(record):
                tokens = usage.get("total_tokens")
                self._spent(record.t, "model", model or "unknown", usage.get("cost_usd"), tokens)

    def _count(self, at: float, key: tuple[str, ...], number: float = 1) -> None:
        self._buckets.setdefault(int(at // _BUCKET), Counter())[key] += number  # type: ignore[assignment]

    def _time(self, at: float, kind: str, seconds: float) -> None:
        self._count(at, ("latency", kind, str(round(math.log(max(seconds, 1e-4)) / _GROWTH))))

    def _named(self, at: float, kind: str, name: str, number: float = 1) -> None:
        names = self._buckets.get(int(at // _BUCKET), ())
        is_new = (kind, name) not in names and sum(each[0] == kind for each in names) >= _MOST_NAMES
        self._count(at, (kind, "other" if is_new else name), number)

    def _spent(self, at: float, kind: str, name: str, cost: Any, tokens: Any) -> None:
        self._named(at, f"{kind} cost", name, cost or 0.0)
        self._named(at, f"{kind} tokens", name, tokens or 0)

    def _view(self, window: str, now: float) -> dict[str, Any]:
        seconds, step = WINDOWS[window]
        first = math.floor((now - seconds) / step) + 1
        points = {number: Counter[tuple[str, ...]]() for number in range(first, math.floor(now / step) + 1)}
        for bucket, counts in self._buckets.items():
            if (point := points.get(bucket * _BUCKET // step)) is not None:
                point.update(counts)
        total = sum(points.values(), Counter[tuple[str, ...]]())
        names = ("started", "ended", "failed")
        return {
            "window": window, "since": iso_time(first * step), "until": iso_time(now),
            "counted_since": iso_time(self._since) if self._read and self._since < math.inf else None,
            "complete": self._complete and not self._missed, "runs": self._read, "journals": self._journals,
            **{name: int(total["number", name]) for name in names},
            "series": [
                {"at": iso_time(number * step), **{name: int(point["number", name]) for name in names}}
                for number, point in points.items()
            ],
            "latency": {kind: _latency(total, kind) for kind in ("queue", "run", "step", "model")},
            "cost": {kind: _cost(total, kind) for kind in _COSTS},
            "errors": [
                {"type": name, "runs": int(number)}
                for (kind, name, *_), number in total.most_common() if kind == "error"
            ],
        }  # fmt: skip


def _latency(total: Counter[tuple[str, ...]], kind: str) -> dict[str, Any]:
    classes = sorted((int(key[2]), number) for key, number in total.items() if key[:2] == ("latency", kind))
    count, found = sum(number for _, number in classes), dict[str, Any]()
    for share in _SHARES:
        below = 0
        for each, number in classes:
            below += number
            if below * 100 >= count * share:
                found[f"p{share}"] = float(f"{math.exp(each * _GROWTH):.3g}")
                break
    return {**{f"p{share}": found.get(f"p{share}") for share in _SHARES}, "count": int(count)}


def _cost(total: Counter[tuple[str, ...]], kind: str) -> list[dict[str, Any]]:
    costs = {name: cost for (what, name, *_), cost in total.items() if what == f"{kind} cost"}
    tokens = {name: number for (what, name, *_), number in total.items() if what == f"{kind} tokens"}
    order = sorted({*costs, *tokens}, key=lambda name: (-costs.get(name, 0), -tokens.get(name, 0), name))
    return [
        {"name": name, "cost_usd": round(costs.get(name, 0), 9), "tokens": int(tokens.get(name, 0))} for name in order
    ]
