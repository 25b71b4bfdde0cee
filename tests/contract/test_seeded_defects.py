"""Each promise of the kit, broken on purpose in somebody's backend, is found by the case that guards it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.clock import Clock
from agent_runtime_core._core.context_vars import start_soon
from agent_runtime_core.errors import LeaseLost
from agent_runtime_core.events import Guard, Op, StoredEvent
from agent_runtime_core.queue import ClaimRequest, MailboxMessage, ProcessRow, RowChanged, RunFilter, RunRow, RunUpdate
from agent_runtime_core.state import EffectExists, EffectRow, Record, StateRow
from agent_runtime_core.testing.contracts import (
    concurrency,
    events,
    queue,
    queue_concurrency_keys,
    queue_enqueue,
    queue_leases,
    queue_limits,
    queue_lists,
    queue_mailbox,
    queue_reads,
    races,
    runs,
    runs_attempts,
    state,
    state_effects,
)
from agent_runtime_core.testing.contracts.checks import turns
from tests.contract.third_party.their_bus import TheirBus
from tests.contract.third_party.their_queue import TheirQueue, TheirRows
from tests.contract.third_party.their_store import TheirStore

PLACE = Path(__file__).parent / "third_party"
PUBLIC = {"engines", "errors", "events", "interfaces", "queue", "state", "testing.contracts.llm"}

# -- queues


class NoFence(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None, ops)


class NotAtomic(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return [(await super(NotAtomic, self).commit(guard if n == 0 else None, [op]))[0] for n, op in enumerate(ops)]


class LostReply(TheirQueue):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.replays = {}


class _LostPriority(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return sorted(super().claimable(want, 10_000), key=lambda row: row.arrival)[:limit]


class _LastComesFirst(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return sorted(super().claimable(want, 10_000), key=lambda row: (-row.priority, -row.arrival))[:limit]


class _AnyAgent(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return super().claimable(want._replace(agents=None), limit)


class _ClaimsTwice(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return super().claimable(want, limit) or self._wanted(want, "running")[:limit]


class _ForgetsDelay(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        return super().make_due_ready(float("inf"))


class _NeverDue(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        return ()


class _DelayLosesPlace(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        before = dict(self.tx.runs)
        lanes = super().make_due_ready(wall)
        for run_id, row in self.tx.runs.items():
            if row is not before[run_id]:
                self.tx.arrived += 1
                self.tx.runs[run_id] = row._replace(arrival=self.tx.arrived)
        return lanes


class _NoReclaim(TheirRows):
    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return []


class _StealsFromInline(TheirRows):
    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return [row for row in self._wanted(want, "running") if row.lease_until < want.lease_now][:limit]


class _UncountedCrash(TheirRows):
    def _claim(self, row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        return super()._claim(row._replace(status="pending"), ticket, want)


class _ClaimIdsFall(TheirRows):
    def _claim(self, row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        return super()._claim(row._replace(claim_id=""), ticket, want)


class _NoKeys(TheirRows):
    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return None


class _LostMail(TheirRows):
    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        if not self.tx.mail.get(run_id):
            super().add_message(run_id, mail)


class _MailTwice(TheirRows):
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        return None


class _SleepsOverMail(TheirRows):
    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        return super().settle(run_id, how._replace(cursor=-1))


class _NoWaking(TheirRows):
    def post(self, run_id: str, mail: MailboxMessage) -> tuple[str, int]:
        before = self.get(run_id)
        answer = super().post(run_id, mail)
        if before is not None and before.status == "waiting":
            self.save(self.tx.runs[run_id]._replace(status="waiting", due_at=before.due_at))
        return answer


class _EndsAreNotFinal(TheirRows):
    """A claim outlives the end it wrote."""

    def fence(self, run_id: str, token: str | None) -> None:
        if token is not None:
            super().fence(run_id, token)

    def _expect(self, run_id: str, statuses: Sequence[str]) -> RunRow:
        row = self.get(run_id)
        if row is None:
            raise RowChanged
        return row


class _SuccessIsReopened(TheirRows):
    def take(
        self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        there = self.get(row.run_id)
        if there is not None and there.status == "succeeded":
            self.save(there._replace(status="failed"))
        return super().take(row, insert, reopen, want, wait)


class _LeavesMail(TheirRows):
    def drop(self, row: RunRow) -> None:
        del self.tx.runs[row.run_id]


class _DeletesByName(TheirRows):
    def delete(self, run_id: str, generation: int, n: int) -> None:
        row = self.get(run_id)
        super().delete(run_id, *((row.generation, row.arrival) if row else (generation, n)))


class _DeletesByNumber(TheirRows):
    def delete(self, run_id: str, generation: int, n: int) -> None:
        row = self.get(run_id)
        super().delete(run_id, row.generation if row else generation, n)


class _ForgetsLimits(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        return super().add(row._replace(expires_at=None))


class _HeldIsReady(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        due = [row for row in self._wanted(want, "pending") if row.due_at == 0 and not row.origin]
        return sorted(due, key=lambda row: (-row.priority, row.arrival))[:limit]


class _NoHead(TheirRows):
    def active_in_group(self, lane: str, tenant: str) -> RunRow | None:
        return None


class _OnlyRunningHasTheLane(TheirRows):
    def active_in_group(self, lane: str, tenant: str) -> RunRow | None:
        head = super().active_in_group(lane, tenant)
        return head if head is not None and head.status == "running" else None


class _OneLaneForAll(TheirRows):
    def active_in_group(self, lane: str, tenant: str) -> RunRow | None:
        return next(
            (row for row in self.tx.runs.values() if row.concurrency_key and not row.blocked and row.ended_at is None),
            None,
        )


class _NobodyBehind(TheirRows):
    def next_in_group(self, lane: str, tenant: str) -> RunRow | None:
        return None


class _ArrivalOnly(TheirRows):
    def next_in_group(self, lane: str, tenant: str) -> RunRow | None:
        due = [row for row in self._group(lane, tenant, 1) if row.due_at == 0]
        return min(due, key=lambda row: row.arrival, default=None)


class _DelayIsNoPlace(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        super().make_due_ready(wall)
        return ()


class _BehindBeforeItIsDue(TheirRows):
    def next_in_group(self, lane: str, tenant: str) -> RunRow | None:
        return min(self._group(lane, tenant, 1), key=lambda row: (-row.priority, row.arrival), default=None)


class _NeverAside(TheirRows):
    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        return []


class _AsideAtOnce(TheirRows):
    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        return super().abandoned_inline(want._replace(lease_now=float("inf")))


class _KeyEndsWithItsRun(TheirRows):
    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        row = super().by_key(idem_key, tenant)
        return row if row is not None and row.ended_at is None else None


class _FoldsAgents(TheirRows):
    """As a column does whose collation knows no case."""

    def _wanted(self, want: ClaimRequest, status: str) -> list[RunRow]:
        agents = None if want.agents is None else [agent.lower() for agent in want.agents]
        rows = super()._wanted(want._replace(agents=None), status)
        return [row for row in rows if agents is None or row.agent.lower() in agents]


class _FoldsMessages(TheirRows):
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        box = self.tx.mail.get(run_id, ())
        return next((mail.seq for mail in box if mail.msg_id.lower() == msg_id.lower()), None)


class _ShortMail(TheirRows):
    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        super().add_message(run_id, mail._replace(payload=mail.payload[:65535]))


class _WholeSeconds(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        return super().add(row._replace(due_at=float(int(row.due_at))))


class _OneLaneIsDue(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        return list(super().make_due_ready(wall))[:1]


class _BackToTheEnd(TheirRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return sorted(super().claimable(want, 10_000), key=lambda row: (-row.priority, row.updated_at, row.arrival))[
            :limit
        ]


class _WaitingStandsAside(TheirRows):
    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        waiting = [
            row for row in self.tx.runs.values() if row.concurrency_key and row.origin and row.status == "waiting"
        ]
        return [*super().abandoned_inline(want), *waiting]


class _StoredUnclaimed(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        row = super().add(row)
        self.save(row._replace(lease_until=0.0))
        return row


class _NumbersComeAgain(TheirRows):
    def drop(self, row: RunRow) -> None:
        super().drop(row)
        self.tx.arrived = max((each.arrival for each in self.tx.runs.values()), default=0)


class TornByCancel(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        first = await super().commit(guard, ops[:1])
        await asyncio.sleep(0)
        return first + await super().commit(None, ops[1:])


class AnswersWhatItCannotRepeat(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        stale = guard is not None and self.store.claims.get(guard.key) != guard.token
        known = [op for op in ops if not stale or op.name in self.replays]
        return await super().commit(guard, known) if known else [None]


class ShortPages(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found[:100] if isinstance(found, list) else found


class MailByName(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return sorted(found, key=lambda mail: mail.name) if what == "mail" else found


class NewsOfOthers(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return {key: news._replace(cancelled=False) for key, news in found.items()} if what == "news" else found


class _OneIdForAll(TheirRows):
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        boxes = self.tx.mail.values()
        return next((mail.seq for box in boxes for mail in box if mail.msg_id == msg_id), None)


class _KnowsTheLastMessages(TheirRows):
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        box = self.tx.mail.get(run_id, ())[-10:]
        return next((mail.seq for mail in box if mail.msg_id == msg_id), None)


class _AgentsLike(TheirRows):
    """As LIKE 'name%' does."""

    def _wanted(self, want: ClaimRequest, status: str) -> list[RunRow]:
        rows = super()._wanted(want._replace(agents=None), status)
        return [row for row in rows if want.agents is None or row.agent.startswith(want.agents)]


def _latin(text: str) -> str:
    return text.encode("latin-1", "replace").decode("latin-1")


def _without_emoji(text: str) -> str:
    return "".join(sign if sign < "\U00010000" else "?" for sign in text)


def _one_break(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _storing(fold: Callable[[str], str], column: str) -> type[TheirRows]:
    """Rows that keep that column folded."""

    def folded(row: RunRow) -> RunRow:
        value = getattr(row, column)
        return row.with_values(**{column: value and fold(value)})

    class Folds(TheirRows):
        def add(self, row: RunRow) -> RunRow:
            return super().add(folded(row))

        def save(self, row: RunRow) -> None:
            super().save(folded(row))

    Folds.__name__ = f"{column}{fold.__name__}"
    return Folds


def _losing(what: str, **values: Any) -> type[TheirRows]:
    """Rows that are whole when they are added, and lose something when they are saved."""

    class Loses(TheirRows):
        def save(self, row: RunRow) -> None:
            super().save(row._replace(**values))

    Loses.__name__ = what
    return Loses


class _KeysInLatin(TheirRows):
    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        rows = self.tx.runs.values()
        return next((row for row in rows if row.idem_key and _latin(row.idem_key) == _latin(idem_key)), None)


class _MessagesInLatin(TheirRows):
    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        super().add_message(run_id, mail._replace(name=_latin(mail.name)))


class _MessagesInLines(TheirRows):
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        box = self.tx.mail.get(run_id, ())
        return next((mail.seq for mail in box if _one_break(mail.msg_id) == _one_break(msg_id)), None)


class _LanesLike(TheirRows):
    def next_in_group(self, lane: str, tenant: str) -> RunRow | None:
        rows = [
            row
            for row in self.tx.runs.values()
            if row.concurrency_key and row.concurrency_key.startswith(lane) and row.blocked == 1
        ]
        return min(rows, key=lambda row: (-row.priority, row.arrival), default=None)


class _SmallPriorities(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        return super().add(row._replace(priority=max(-(2**15), min(row.priority, 2**15 - 1))))


class _SecondsOnly(TheirRows):
    def add(self, row: RunRow) -> RunRow:
        return super().add(row._replace(created_at=float(int(row.created_at))))


class _EndsInSeconds(TheirRows):
    def save(self, row: RunRow) -> None:
        super().save(row._replace(ended_at=row.ended_at and float(int(row.ended_at))))


class _ShortReasons(TheirRows):
    def save(self, row: RunRow) -> None:
        super().save(row._replace(reason=row.reason[:20]))


class _ShortOutputs(TheirRows):
    def save(self, row: RunRow) -> None:
        super().save(row._replace(output=row.output and row.output[:65535]))


class SwallowsCancelling(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        writing = start_soon(super().commit(guard, ops))  # an eager one would have ended here
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        return writing.result()


class RefusesWhatIsLate(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        row = self.store.runs.get(guard.key) if guard is not None else None
        if guard is not None and row is not None and row.status == "running" and row.lease_until < self.lease_now():
            raise LeaseLost(*guard)
        return await super().commit(guard, ops)


class TakesGreaterClaims(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        greater = guard is not None and guard.token > self.store.claims.get(guard.key, "~")
        return await super().commit(None if greater else guard, ops)


class SomeChildren(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found[:100] if what == "children" else found


class LiveChildren(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return [row for row in found if row.ended_at is None] if what == "children" else found


class FindsFew(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found[:500] if what == "find" else found


class FindsAll(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        return await super().read(what, *((args[0]._replace(limit=10_000),) if what == "find" else args))


def _ignoring(*fields: str) -> type[TheirQueue]:
    """A queue whose lists ignore these fields of their filter."""

    class Ignores(TheirQueue):
        async def read(self, what: str, *args: Any) -> Any:
            if what == "find":
                args = (args[0]._replace(**{field: RunFilter._field_defaults[field] for field in fields}),)
            return await super().read(what, *args)

    Ignores.__name__ = f"Ignores{'And'.join(fields)}"
    return Ignores


class SkipsRunsOfOneTime(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        if what != "find" or args[0].before is None:
            return found
        return [row for row in found if row.created_at < args[0].before[0]]


class _KeysOfAllTenants(TheirRows):
    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        return next((row for row in self.tx.runs.values() if row.idem_key == idem_key), None)


class _GroupsOfAllTenants(TheirRows):
    def _group(self, lane: str, tenant: str, held: int) -> list[RunRow]:
        rows = self.tx.runs.values()
        return [row for row in rows if (row.concurrency_key, row.blocked, row.ended_at) == (lane, held, None)]


class _DueRunsOfNoTenant(TheirRows):
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        return [(lane, "") for lane, _ in super().make_due_ready(wall)]


class _MovesWithoutThePlace(TheirRows):
    def move(self, row: RunRow, after: RunRow) -> None:
        self.save(row._replace(tenant=after.tenant))


class CountsOfAllTenants(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        return await super().read(what, *(() if what == "counts" else args))


class ListsOfAllTenants(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        return await super().read(what, *([args[0]._replace(tenant=None)] if what == "find" else args))


class CountsNoReasons(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found._replace(waiting={}) if what == "counts" else found


class LastIsDue(TheirQueue):
    async def read(self, what: str, *args: Any) -> Any:
        if what != "next_due":
            return await super().read(what, *args)
        return max((row.due_at for row in self.store.runs.values() if row.due_at > 0), default=None)


class DueThoughItIsOver(TheirQueue):
    """Tells when a run would have been due that was cancelled meanwhile."""

    async def read(self, what: str, *args: Any) -> Any:
        rows = [RunRow(*row) for row in self.store.runs.values()]
        self.due = {**getattr(self, "due", {}), **{row.run_id: row.due_at for row in rows if row.due_at > 0}}
        return min(self.due.values(), default=None) if what == "next_due" else await super().read(what, *args)


class GivesForEver(TheirQueue):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is None and ops[0].name == "queue.claim":
            self.store.runs.update((key, row._replace(status="pending")) for key, row in self.store.runs.items())
        return await super().commit(guard, ops)


class ListsProcesses(TheirQueue):
    """Without a defect; those below have one each."""

    keeps_processes = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listed: dict[str, ProcessRow] = {}

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        for name, args in ops:
            if name.endswith("_process"):
                getattr(self, name.removeprefix("queue."))(*args)
        return await super().commit(guard, [op for op in ops if not op.name.endswith("_process")])

    async def read(self, what: str, *args: Any) -> Any:
        return [*self.listed.values()] if what == "processes" else await super().read(what, *args)

    def save_process(self, row: ProcessRow, kept: float) -> None:
        self.listed = {key: each for key, each in self.listed.items() if each.seen_at >= row.seen_at - kept}
        self.listed[row.process_id] = row

    def drop_process(self, process_id: str) -> None:
        self.listed.pop(process_id, None)


class _LimitedRows(TheirRows):
    """Without a defect; those below have one each."""

    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> list[RunRow]:
        return self._group(concurrency_key, tenant, 0)[:limit]

    def shared(self, name: str) -> str | None:
        return self.tx.claims.get(f"shared {name}")

    def save_shared(self, name: str, state: str | None) -> None:
        self.fence(f"shared {name}", state)

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        return min(self._limited(rate, agent), key=lambda row: (-row.priority, row.arrival), default=None)

    def shared_states(self, prefix: str) -> dict[str, str]:
        stored = {name.removeprefix("shared "): text for name, text in self.tx.claims.items()}
        return {name: text for name, text in stored.items() if name.startswith(prefix)}

    def bring_forward(self, name: str, seconds: float) -> None:
        delayed = [row for row in self.tx.runs.values() if row.reason == "rate_limit" and row.due_at > 0]
        for row in delayed:
            if f"rate:{(row.rate or '').partition(' ')[2]}" == name:
                self.save(row._replace(due_at=row.due_at - seconds))

    def _limited(self, rate: str, agent: str) -> list[RunRow]:
        wanted = (rate, agent, "pending", "rate_limit")
        rows = (row for row in self.tx.runs.values() if row.due_at > 0)
        return [row for row in rows if (row.rate, row.agent, row.status, row.reason) == wanted]

    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        rows = (row for row in self.claimable(want, 1000) if row.priority == priority and row.turn is not None)
        later = (row for row in rows if after is None or (row.turn or "") > after)
        return min(later, key=lambda row: (row.turn or "", row.arrival), default=None)


class _OneIsActive(_LimitedRows):
    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> list[RunRow]:
        return super().all_active_in_group(concurrency_key, tenant, 1) * limit


class _ForgetsStarts(_LimitedRows):
    def save_shared(self, name: str, state: str | None) -> None: ...


class _Unlimited(_LimitedRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return [row._replace(rate=None) for row in super().claimable(want, limit)]


class _SharesAllStates(_LimitedRows):
    def shared(self, name: str) -> str | None:
        return super().shared("")

    def save_shared(self, name: str, state: str | None) -> None:
        super().save_shared("", state)


class _DelayedByArrival(_LimitedRows):
    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        return min(self._limited(rate, agent), key=lambda row: row.arrival, default=None)


class _NoneIsDelayed(_LimitedRows):
    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        return None


class _SilentDelay(_LimitedRows):
    def delay(self, row: RunRow, due_at: float) -> None:
        super().delay(row, due_at)
        self.save(self.tx.runs[row.run_id]._replace(reason=""))


class _UncountedRetry(_LimitedRows):
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return [row._replace(rate=None) if row.failures else row for row in super().claimable(want, limit)]


class _UncountedTakeover(_LimitedRows):
    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        return [row._replace(rate=None) for row in super().expired_leases(want, limit)]


class _CancelsLater(_LimitedRows):
    def save(self, row: RunRow) -> None:
        before = self.tx.runs.get(row.run_id)
        if before is not None and before.due_at and row.status == "pending" and row.cancel_at is not None:
            row = row._replace(due_at=before.due_at)
        super().save(row)


class _KeepsStarts(_LimitedRows):
    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        return super().settle(run_id, how._replace(take_back=""))


class _TakesBackAny(_LimitedRows):
    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        return super().settle(run_id, how._replace(take_back=self.tx.runs[run_id].rate or ""))


class _KeepsDueTimes(_LimitedRows):
    def bring_forward(self, name: str, seconds: float) -> None: ...


class _ChangesClaimTimes(_LimitedRows):
    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        return super().settle(run_id, how._replace(now=self.tx.runs[run_id].claimed_at or 0.0))


class _AlwaysTheFirstTurn(_LimitedRows):
    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        return super().next_turn(want, priority, None)


class _AnyPriority(_LimitedRows):
    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        lowest = min((row.priority for row in self.claimable(want, 1000)), default=priority)
        return super().next_turn(want, lowest, after)


class _TurnsOfOneAgent(_LimitedRows):
    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        return super().next_turn(want._replace(agents=(want.agents or ("agent",))[:1]), priority, after)


class KeepsEndedProcesses(ListsProcesses):
    def drop_process(self, process_id: str) -> None: ...


class KeepsOldProcesses(ListsProcesses):
    def save_process(self, row: ProcessRow, kept: float) -> None:
        super().save_process(row, 1e9)


class _EndsDuringLease(TheirRows):
    def _has_ended(self, row: RunRow, want: ClaimRequest) -> bool:
        return True


class _EndsAnyClaim(TheirRows):
    def abandoned(self, run_id: str, claim_id: str, want: ClaimRequest, required: bool) -> bool:
        row = self.get(run_id)
        return super().abandoned(
            run_id, claim_id if row is None else row.claim_id, want._replace(lease_now=1e9), required
        )


class _NoRelease(TheirRows):
    def _release(self, lane: str, tenant: str) -> None: ...


def _with(rows: type[TheirRows]) -> type[TheirQueue]:
    return type(rows.__name__.removeprefix("_"), (TheirQueue,), {"rows": rows})


def _limited(rows: type[TheirRows]) -> type[TheirQueue]:
    return type(rows.__name__.removeprefix("_"), (TheirQueue,), {"rows": rows, "keeps_limits": True})


QUEUES: list[tuple[type[TheirQueue], queue.Case]] = [
    (NoFence, queue_leases.a_stale_claim_writes_nothing),
    (NotAtomic, queue_leases.a_commit_is_all_or_nothing),
    (LostReply, queue_leases.a_lost_reply_is_repeated_without_harm),
    (_with(_LostPriority), queue_enqueue.claims_come_by_priority_then_in_order_of_arrival),
    (_with(_LostPriority), queue_enqueue.a_batch_is_claimed_in_the_same_order),
    (_with(_LastComesFirst), queue_enqueue.claims_come_by_priority_then_in_order_of_arrival),
    (_with(_AnyAgent), queue_enqueue.a_claim_is_for_the_agents_it_names),
    (_with(_ClaimsTwice), queue_enqueue.a_run_goes_to_one_of_many_claimers),
    (_with(_ForgetsDelay), queue_enqueue.a_delayed_run_waits_for_its_time),
    (_with(_NeverDue), queue_mailbox.a_waiting_run_is_claimed_when_its_time_has_come),
    (_with(_DelayLosesPlace), queue_enqueue.a_delayed_run_keeps_its_priority_and_place),
    (_with(_NoReclaim), queue_leases.a_lease_that_ran_out_is_claimed_anew_and_counts_as_a_crash),
    (_with(_StealsFromInline), queue_leases.take_claims_that_one_run),
    (_with(_UncountedCrash), queue_leases.crashes_in_a_row_are_counted_until_the_run_gets_on),
    (_with(_ClaimIdsFall), queue_leases.claim_ids_grow_also_where_the_clock_goes_back),
    (_with(_NoKeys), queue_enqueue.racing_enqueuers_of_one_key_make_one_run),
    (_with(_LostMail), queue_mailbox.a_message_is_kept_once),
    (_with(_MailTwice), queue_mailbox.a_message_is_kept_once),
    (_with(_SleepsOverMail), queue_mailbox.a_run_does_not_park_past_a_message),
    (_with(_SleepsOverMail), queue_mailbox.messages_racing_a_park_are_never_lost),
    (_with(_NoWaking), queue_mailbox.a_message_wakes_a_waiting_run),
    (_with(_EndsAreNotFinal), queue_leases.a_run_moves_only_along_the_table_of_transitions),
    (_with(_SuccessIsReopened), queue_leases.a_run_moves_only_along_the_table_of_transitions),
    (_with(_LeavesMail), queue_reads.a_deleted_run_is_gone_with_its_mail_and_key),
    (_with(_DeletesByName), queue_reads.a_run_is_deleted_as_it_was_seen),
    (_with(_DeletesByNumber), queue_reads.a_run_is_deleted_as_it_was_seen),
    (_with(_ForgetsLimits), queue_reads.times_and_limits_are_kept),
    (_with(_HeldIsReady), queue_concurrency_keys.runs_of_one_key_go_one_at_a_time_in_order_of_arrival),
    (_with(_NoHead), queue_concurrency_keys.runs_of_one_key_go_one_at_a_time_in_order_of_arrival),
    (_with(_NoHead), queue_concurrency_keys.racing_claims_never_hold_two_runs_of_one_key),
    (_with(_OnlyRunningHasTheLane), queue_concurrency_keys.a_park_a_retry_and_a_hand_back_keep_the_turn),
    (_with(_OneLaneForAll), queue_concurrency_keys.keys_do_not_wait_for_each_other),
    (_with(_NobodyBehind), queue_concurrency_keys.the_end_of_a_run_lets_the_next_of_its_key_go_in_the_same_commit),
    (_with(_NobodyBehind), queue_concurrency_keys.cancelling_takes_a_run_out_of_its_lane),
    (_with(_ArrivalOnly), queue_concurrency_keys.of_those_held_the_greatest_priority_goes_first),
    (_with(_DelayIsNoPlace), queue_concurrency_keys.a_delayed_run_comes_into_its_lane_when_it_is_due),
    (_with(_BehindBeforeItIsDue), queue_concurrency_keys.a_delayed_run_comes_into_its_lane_when_it_is_due),
    (_with(_NeverAside), queue_concurrency_keys.an_inline_run_that_nobody_goes_on_with_stands_aside),
    (_with(_AsideAtOnce), queue_concurrency_keys.an_inline_run_that_nobody_goes_on_with_stands_aside),
    (_with(_AsideAtOnce), queue_concurrency_keys.take_waits_for_its_turn),
    (_with(_KeysOfAllTenants), queue_lists.tenants_use_the_same_names_apart),
    (_with(_GroupsOfAllTenants), queue_lists.tenants_use_the_same_names_apart),
    (_with(_GroupsOfAllTenants), queue_lists.taking_a_run_waits_for_the_key_of_its_own_tenant),
    (_with(_DueRunsOfNoTenant), queue_lists.a_delayed_run_waits_for_the_key_of_its_own_tenant),
    (_with(_MovesWithoutThePlace), queue_lists.a_run_that_is_given_to_a_tenant_takes_its_keys_along),
    (_with(_losing("losestenants", tenant="")), queue_lists.a_stored_run_is_given_to_a_tenant),
    (ListsOfAllTenants, queue_lists.a_run_key_without_a_tenant_means_one_run),
    (ListsOfAllTenants, queue_lists.lists_and_counts_of_a_tenant_have_its_runs_only),
    (CountsOfAllTenants, queue_lists.lists_and_counts_of_a_tenant_have_its_runs_only),
    (_with(_KeyEndsWithItsRun), queue_enqueue.a_key_stands_for_its_run_also_when_that_is_over),
    (_with(_FoldsAgents), queue_enqueue.names_are_told_apart),
    (_with(_FoldsMessages), queue_enqueue.names_are_told_apart),
    (_with(_ShortMail), queue_enqueue.what_is_long_is_kept_whole),
    (_with(_WholeSeconds), queue_enqueue.a_delayed_run_waits_for_its_time),
    (_with(_OneLaneIsDue), queue_concurrency_keys.a_delayed_run_comes_into_its_lane_when_it_is_due),
    (_with(_BackToTheEnd), queue_enqueue.a_run_that_was_given_back_keeps_its_place),
    (_with(_WaitingStandsAside), queue_concurrency_keys.an_inline_run_that_waits_keeps_its_turn),
    (_with(_StoredUnclaimed), queue_leases.take_claims_that_one_run),
    (_with(_NumbersComeAgain), queue_reads.a_deleted_run_is_gone_with_its_mail_and_key),
    (TornByCancel, queue_leases.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (AnswersWhatItCannotRepeat, queue_leases.a_stale_claim_writes_nothing),
    (ShortPages, queue_reads.what_is_many_is_listed_whole),
    (ShortPages, queue_mailbox.a_full_mailbox_is_read_in_order),
    (MailByName, queue_mailbox.a_full_mailbox_is_read_in_order),
    (_limited(_OneIsActive), queue_limits.a_key_admits_as_many_active_runs_as_its_limit),
    (_limited(_OneIsActive), queue_limits.each_run_waits_for_its_own_concurrency_limit),
    (_limited(_OneIsActive), queue_limits.callers_wait_for_a_concurrency_limit),
    (_limited(_Unlimited), queue_limits.no_period_has_more_starts_than_its_rate_limit),
    (_limited(_ForgetsStarts), queue_limits.after_a_time_without_workers_there_is_no_burst),
    (_limited(_SilentDelay), queue_limits.delayed_runs_do_not_delay_other_runs_and_say_why_they_wait),
    (_limited(_DelayedByArrival), queue_limits.a_delayed_run_of_greater_priority_starts_first),
    (_limited(_UncountedRetry), queue_limits.retries_count_as_starts_and_resumed_runs_do_not),
    (_limited(_UncountedTakeover), queue_limits.a_run_whose_worker_crashed_waits_for_its_rate_limit),
    (_limited(_SharesAllStates), queue_limits.rate_limits_are_counted_by_key_and_period),
    (_limited(_NoneIsDelayed), queue_limits.a_delayed_run_that_is_cancelled_lets_the_next_one_start_when_it_would_have),
    (_limited(_KeepsStarts), queue_limits.a_release_of_a_run_under_whose_claim_nothing_ran_takes_its_start_back),
    (_limited(_TakesBackAny), queue_limits.a_release_of_a_run_under_whose_claim_nothing_ran_takes_its_start_back),
    (_limited(_CancelsLater), queue_limits.delayed_runs_that_are_cancelled_leave_their_times_to_others),
    (_limited(_KeepsStarts), queue_limits.tickets_that_are_given_back_use_up_no_start),
    (_limited(_ChangesClaimTimes), queue_limits.only_the_rate_limit_that_counted_a_claim_takes_its_start_back),
    (_limited(_KeepsDueTimes), queue_limits.after_the_clock_was_set_back_delayed_runs_start_as_soon_as_there_is_room),
    (_limited(_AlwaysTheFirstTurn), queue_limits.runs_of_equal_priority_are_claimed_in_turns),
    (_limited(_AlwaysTheFirstTurn), queue_limits.many_runs_of_one_turn_delay_another_turn_by_one_run),
    (_limited(_AnyPriority), queue_limits.a_greater_priority_comes_before_any_turn),
    (_limited(_TurnsOfOneAgent), queue_limits.runs_of_several_agents_share_their_turns),
    (_limited(_Unlimited), queue_limits.a_delayed_run_does_not_use_its_turn),
    (KeepsEndedProcesses, queue_leases.the_row_of_a_process_is_replaced_and_deleted),
    (KeepsOldProcesses, queue_leases.a_process_that_was_not_seen_for_a_day_is_deleted_by_the_next_one),
    (_with(_EndsDuringLease), queue_leases.a_run_is_abandoned_if_it_is_to_be_cancelled_and_its_claim_is_over),
    (_with(_EndsAnyClaim), queue_leases.a_worker_that_claims_an_abandoned_run_first_keeps_it),
    (_with(_NoRelease), queue_leases.who_ends_an_abandoned_run_ends_its_claim_and_frees_its_key),
    (NewsOfOthers, queue_mailbox.news_is_told_of_every_run_that_is_asked_about),
    (_with(_OneIdForAll), queue_mailbox.a_message_is_kept_once),
    (_with(_KnowsTheLastMessages), queue_mailbox.a_full_mailbox_is_read_in_order),
    (_with(_AgentsLike), queue_enqueue.a_claim_is_for_the_agents_it_names),
    (_with(_storing(_latin, "agent")), queue_enqueue.names_are_told_apart),
    (_with(_storing(_latin, "worker")), queue_enqueue.names_are_told_apart),
    (_with(_storing(_latin, "idem_key")), queue_enqueue.a_run_key_is_kept_as_it_is),
    (_with(_storing(_latin, "run_key")), queue_enqueue.a_run_key_is_kept_as_it_is),
    (_with(_storing(_without_emoji, "run_key")), queue_enqueue.a_run_key_is_kept_as_it_is),
    (_with(_storing(_without_emoji, "agent")), queue_enqueue.names_are_told_apart),
    (_with(_storing(_without_emoji, "concurrency_key")), queue_enqueue.lanes_are_told_apart),
    (_with(_KeysInLatin), queue_enqueue.names_are_told_apart),
    (_with(_MessagesInLatin), queue_enqueue.names_are_told_apart),
    (_with(_MessagesInLines), queue_enqueue.names_are_told_apart),
    (_with(_LanesLike), queue_enqueue.lanes_are_told_apart),
    *(
        (_with(_losing(f"loses{column}", **{column: None})), queue_reads.what_a_run_came_with_it_keeps)
        for column in ("deadline", "expires_at", "run_key", "parent_id", "idem_key", "concurrency_key")
    ),
    (_with(_losing("losesmetadata", metadata="{}")), queue_reads.what_a_run_came_with_it_keeps),
    (_with(_SmallPriorities), queue_enqueue.claims_come_by_priority_then_in_order_of_arrival),
    (_with(_SecondsOnly), queue_reads.what_a_run_came_with_it_keeps),
    (_with(_EndsInSeconds), queue_reads.what_a_run_came_with_it_keeps),
    (_with(_ShortReasons), queue_reads.what_a_run_came_with_it_keeps),
    (_with(_ShortOutputs), queue_enqueue.what_is_long_is_kept_whole),
    (SwallowsCancelling, queue_leases.a_caller_that_is_cancelled_in_a_commit_is_cancelled),
    (RefusesWhatIsLate, queue_leases.a_claim_holds_past_its_lease_until_somebody_takes_the_run),
    (TakesGreaterClaims, queue_leases.a_stale_claim_writes_nothing),
    (SomeChildren, queue_reads.what_is_many_is_listed_whole),
    (LiveChildren, queue_reads.children_know_their_parent),
    (FindsFew, queue_reads.what_is_many_is_listed_whole),
    (FindsAll, queue_reads.find_lists_what_was_asked_for),
    (_ignoring("newest_first"), queue_lists.the_newest_runs_are_listed_page_by_page),
    (SkipsRunsOfOneTime, queue_lists.runs_of_the_same_time_are_listed_by_their_number),
    (_ignoring("until"), queue_lists.a_range_of_creation_times_is_listed),
    (_ignoring("statuses"), queue_lists.statuses_and_agents_are_merged_in_order),
    (_ignoring("prefix"), queue_lists.a_prefix_of_the_id_or_the_key_is_found),
    *(
        (_ignoring(field), queue_lists.children_conversations_and_concurrency_keys_are_found)
        for field in ("parent", "conversation", "concurrency_key")
    ),
    (_ignoring("reason"), queue_lists.reasons_are_found_by_their_first_words),
    (_ignoring("retrying"), queue_lists.runs_that_are_tried_again_are_found),
    *(
        (_ignoring(field), queue_lists.open_questions_are_found_until_they_are_answered)
        for field in ("asking", "in_doubt")
    ),
    (_ignoring("light"), queue_lists.a_light_row_has_no_large_values),
    (_ignoring("without_input"), queue_lists.a_row_without_its_input_has_its_metadata),
    (CountsNoReasons, queue_lists.runs_are_counted),
    (_ignoring("agent"), queue_lists.many_runs_of_several_agents_are_merged_in_order),
    (FindsFew, queue_lists.many_runs_of_one_time_are_listed_whole),
    (LastIsDue, queue_enqueue.a_delayed_run_waits_for_its_time),
    (DueThoughItIsOver, queue_enqueue.a_delayed_run_waits_for_its_time),
    (GivesForEver, queue_enqueue.claims_come_by_priority_then_in_order_of_arrival),
]

# -- queues of several objects


def again(queue: TheirQueue) -> TheirQueue:
    """A second object with what the first one has now: what they write afterwards, each has for itself."""
    other = type(queue)(clock=queue.clock)
    other.store = queue.store
    return other


class OnePlace(TheirQueue):
    """Two objects keep one store, and `again` hands it on."""

    def __init__(self, **options: Any) -> None:
        self.place: dict[str, Any] = {}
        super().__init__(**options)

    @property
    def store(self) -> Any:
        return self.place["store"]

    @store.setter
    def store(self, store: Any) -> None:
        self.place["store"] = store


def shared(queue: OnePlace) -> OnePlace:
    other = type(queue)(clock=queue.clock)
    other.place = queue.place
    return other


class FencesOfOneObject(OnePlace):
    """Each object has the claims that were made through it, and takes its own word for them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mine: dict[str, str] = {}

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        known = guard is not None and self.mine.get(guard.key) == guard.token
        if guard is not None and known:
            self.store.claims[guard.key] = guard.token
        answers = await super().commit(guard, ops)
        self.mine |= {key: token for key, token in self.store.claims.items() if ops[0].name == "queue.claim"}
        return answers


def emptied(queue: OnePlace) -> OnePlace:
    """Opens the place anew, and what was there is gone."""
    return type(queue)(clock=queue.clock)


SEVERAL: list[tuple[Any, Any, Any]] = [
    (TheirQueue, again, concurrency.of_two_claimers_one_gets_the_run),
    (TheirQueue, again, concurrency.what_is_written_through_one_is_read_through_the_other),
    (FencesOfOneObject, shared, concurrency.a_claim_through_one_is_over_for_the_other),
    (OnePlace, emptied, concurrency.a_queue_is_all_there_when_it_is_opened_again),
    (TheirBus, lambda bus: type(bus)(), concurrency.sequences_go_on_through_both),
    (TheirBus, lambda bus: type(bus)(), concurrency.a_fence_of_a_bus_is_seen_through_the_other),
    (TheirBus, lambda bus: type(bus)(), concurrency.a_log_is_all_there_when_it_is_opened_again),
    (TheirStore, lambda store: type(store)(), concurrency.a_journal_is_one_through_both),
    (TheirStore, lambda store: type(store)(), concurrency.a_state_is_one_through_both),
    (TheirStore, lambda store: type(store)(), concurrency.a_store_is_all_there_when_it_is_opened_again),
]

PARTS: dict[Any, tuple[Any, ...]] = {
    queue: (queue_enqueue, queue_leases, queue_mailbox, queue_concurrency_keys, queue_limits, queue_reads, queue_lists),
    events: (),
    state: (state_effects,),
    runs: (runs_attempts,),
}

#: What stores make of texts.
FOLDS: dict[str, Callable[[str], str]] = {
    "Latin1": lambda text: text.encode("latin-1", "replace").decode("latin-1"),
    "SixteenBits": lambda text: "".join(each if ord(each) < 2**16 else "?" for each in text),
    "CutsAtNul": lambda text: text.partition("\0")[0],
    "OneLineEnd": lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
}

# -- event buses


class NoFenceBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None, ops)


class NotAtomicBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return [(await super(NotAtomicBus, self).commit(guard, [op]))[0] for op in ops]


class Reordered(TheirBus):
    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent]:
        rows = await super()._rows(run_id, since, limit)
        return [*rows[2:], *rows[:2]] if len(rows) > 2 else rows[::-1]


class SequenceGap(TheirBus):
    def next_sequence(self, run_id: str) -> int:
        sequence = super().next_sequence(run_id)
        if sequence == 1:
            self.store.heads[run_id] += 1
        return sequence


class OneCountForAll(TheirBus):
    def next_sequence(self, run_id: str) -> int:
        return super().next_sequence("all")


class DoubledEvents(TheirBus):
    def ids(self, run_id: str) -> dict[str, int]:
        return {}


class AliasedPayload(TheirBus):
    async def publish(self, run_id: Any, event_type: str, payload: dict[str, Any], **options: Any) -> Any:
        event = await super().publish(run_id, event_type, payload, **options)
        self.shared = event
        return event

    async def get_events(self, *args: Any, **options: Any) -> list[Any]:
        return [self.shared]


class ForgetsTypes(TheirBus):
    def append(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        return super().append(run_id, [(id_, kind, text.replace("$", ""), t) for id_, kind, text, t in rows])


class TornPage(TheirBus):
    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent]:
        return (await super()._rows(run_id, since, limit))[:1000]


class ShortPage(TheirBus):
    async def _rows(self, run_id: str, since: int, limit: int) -> list[StoredEvent]:
        rows = await super()._rows(run_id, since, limit)
        while sum(len(row.payload) for row in rows[1:]) > 262_144:
            del rows[-1]
        return rows


class KeepsDeleted(TheirBus):
    def apply(self, op: Op) -> Any:
        return None if op.name == "events.delete" else super().apply(op)


class CountsOn(TheirBus):
    """A run that was deleted begins anew where it ended."""

    def apply(self, op: Op) -> Any:
        head = self.store.heads.get(op.args[0], 0)
        answer = super().apply(op)
        if op.name == "events.delete":
            self.store.heads[op.args[0]] = head
        return answer


class TrimsTheLast(TheirBus):
    def apply(self, op: Op) -> Any:
        if op.name == "events.trim":
            log = self.store.logs.get(op.args[0], [])
            self.store.logs[op.args[0]] = [event for event in log if event.sequence >= op.args[1]]
            return len(log) - len(self.store.logs[op.args[0]])
        return super().apply(op)


class TornByCancelBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        first = await super().commit(guard, ops[:1])
        await asyncio.sleep(0)
        return first + await super().commit(None, ops[1:])


class TornBetweenRuns(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        answers: list[Any] = []
        for _, of_run in itertools.groupby(ops, lambda op: op.args[0]):
            answers += await super().commit(None if answers else guard, [*of_run])
            await asyncio.sleep(0)
        return answers


class LooksThenWrites(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        stale = guard is not None and self.store.claims.get(guard.key) != guard.token
        await asyncio.sleep(0)
        return await super().commit(guard if stale else None, ops)


class TakesHalfARepeat(TheirBus):
    def repeated(self, guard: Guard, op: Op) -> list[int] | bool:
        ids = self.ids(op.args[0])
        if op.name == "events.publish" and any(row[0] in ids for row in op.args[1]):
            return [ids.get(row[0], -1) for row in op.args[1]]
        return super().repeated(guard, op)


class InstallsOnce(TheirBus):
    def apply(self, op: Op) -> Any:
        if op.name == "fence.install" and self.store.claims.get(op.args[0]) == op.args[1]:
            raise LeaseLost(*op.args)
        return super().apply(op)


class NeverForgets(TheirBus):
    def apply(self, op: Op) -> Any:
        return None if op.name == "fence.forget" else super().apply(op)


class KeepsTheFence(TheirBus):
    """What is undone leaves its claim behind."""

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        try:
            return await super().commit(guard, ops)
        except LeaseLost:
            self.store.claims |= {op.args[0]: op.args[1] for op in ops[:1] if op.name == "fence.install"}
            raise


class DeletesAllClaims(TheirBus):
    def apply(self, op: Op) -> Any:
        if op.name == "events.delete":
            self.store.claims.clear()
        return super().apply(op)


class HeadIsLength(TheirBus):
    async def _head(self, run_id: str) -> int:
        return len(self.store.logs.get(run_id, []))


class KnowsTheLastIds(TheirBus):
    def ids(self, run_id: str) -> dict[str, int]:
        return dict(list(super().ids(run_id).items())[-100:])


class FoldsIds(TheirBus):
    def append(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        return super().append(run_id, [(id_.lower(), *rest) for id_, *rest in rows])  # type: ignore[misc]


class ShortTypes(TheirBus):
    def append(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        return super().append(run_id, [(id_, kind[:50], text, t) for id_, kind, text, t in rows])


class RepublishOverwrites(TheirBus):
    def append(self, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        numbers, log = super().append(run_id, rows), self.store.logs[run_id]
        for number, (event_id, event_type, payload, t) in zip(numbers, rows, strict=True):
            place = [event.sequence for event in log].index(number)
            log[place] = StoredEvent(number, event_type, payload, t, event_id)
        return numbers


class ShieldAloneBus(TheirBus):
    """Whoever is cancelled goes on at once, and what was to be written comes later."""

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await asyncio.shield(asyncio.ensure_future(self.slowly(guard, ops)))

    async def slowly(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        await turns(5)
        return await super().commit(guard, ops)


class SwallowsCancelBus(ShieldAloneBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        writing = asyncio.ensure_future(self.slowly(guard, ops))
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        return writing.result()


class TakesGreaterClaimsBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and guard.token > self.store.claims.get(guard.key, "~"):
            guard = None
        return await super().commit(guard, ops)


class GuardsPublishOnly(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(guard if ops[0].name == "events.publish" else None, ops)


class FencesAreFreeBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None if ops[0].name.startswith("fence.") else guard, ops)


class AsksForTheRunWrittenBus(TheirBus):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(guard and Guard(ops[0].args[0], guard.token), ops)


class DeletesTheClaimBus(TheirBus):
    def apply(self, op: Op) -> Any:
        if op.name == "events.delete":
            self.store.claims.pop(op.args[0], None)
        return super().apply(op)


def _with_ids(name: str) -> type[TheirBus]:
    def append(self: TheirBus, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        return TheirBus.append(self, run_id, [(FOLDS[name](row[0]), *row[1:]) for row in rows])

    return type(f"{name}Ids", (TheirBus,), {"append": append})


def _with_types(name: str) -> type[TheirBus]:
    def append(self: TheirBus, run_id: str, rows: Sequence[tuple[str, str, str, float]]) -> list[int]:
        return TheirBus.append(self, run_id, [(row[0], FOLDS[name](row[1]), *row[2:]) for row in rows])

    return type(f"{name}Types", (TheirBus,), {"append": append})


BUSES: list[tuple[type[TheirBus], events.Case]] = [
    (NoFenceBus, events.a_stale_claim_is_refused),
    (NotAtomicBus, events.a_commit_is_all_or_nothing),
    (Reordered, events.sequences_count_from_zero_for_each_run),
    (SequenceGap, events.sequences_count_from_zero_for_each_run),
    (OneCountForAll, events.sequences_count_from_zero_for_each_run),
    (DoubledEvents, events.an_event_id_is_absorbed_and_keeps_its_sequence),
    (AliasedPayload, events.a_payload_is_no_alias_of_the_callers),
    (ForgetsTypes, events.payloads_come_back_as_they_were),
    (TornPage, events.a_long_log_is_read_whole),
    (ShortPage, events.a_page_holds_at_most_256_kib),
    (KeepsDeleted, events.a_deleted_run_is_gone),
    (CountsOn, events.a_deleted_run_is_gone),
    (TrimsTheLast, events.a_log_that_is_trimmed_goes_on),
    (HeadIsLength, events.a_log_that_is_trimmed_goes_on),
    (TornByCancelBus, events.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (TornBetweenRuns, events.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (LooksThenWrites, events.a_claim_that_is_superseded_while_it_writes_writes_before_or_not_at_all),
    (TakesHalfARepeat, events.a_repeat_is_answered_only_where_all_of_it_was_written),
    (InstallsOnce, events.a_claim_may_be_carried_here_again_and_is_forgotten),
    (NeverForgets, events.a_claim_may_be_carried_here_again_and_is_forgotten),
    (KeepsTheFence, events.a_commit_is_all_or_nothing),
    (DeletesAllClaims, events.a_deleted_run_is_gone),
    (KnowsTheLastIds, events.an_id_is_known_however_long_ago_it_was_published),
    (FoldsIds, events.texts_are_kept_whole_and_told_apart),
    (ShortTypes, events.texts_are_kept_whole_and_told_apart),
    (RepublishOverwrites, events.an_event_stays_as_it_was_first_published),
    (TakesGreaterClaimsBus, events.every_write_is_refused_under_a_stale_claim),
    (GuardsPublishOnly, events.every_write_is_refused_under_a_stale_claim),
    (FencesAreFreeBus, events.every_write_is_refused_under_a_stale_claim),
    (AsksForTheRunWrittenBus, events.a_claim_counts_for_its_own_run_whichever_is_written),
    (DeletesTheClaimBus, events.a_deleted_run_is_gone),
    *((_with_types(name), events.texts_are_kept_whole_and_told_apart) for name in FOLDS),
    *((_with_ids(name), events.texts_are_kept_whole_and_told_apart) for name in ("Latin1", "SixteenBits")),
    (ShieldAloneBus, events.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (SwallowsCancelBus, events.a_writer_that_is_cancelled_does_not_go_on),
]

# -- state stores


class NoFenceStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None, ops)


class NotAtomicStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return [(await super(NotAtomicStore, self).commit(guard, [op]))[0] for op in ops]


class LostReplyStore(TheirStore):
    def landed(self, op: Op) -> bool:
        return False


class TakesAnyRepeat(TheirStore):
    def landed(self, op: Op) -> bool:
        return True


class OverwritesHistory(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        journal = self.store.journals.setdefault(run_id, [])
        if 0 <= record.seq < len(journal):
            journal[record.seq] = record
            return record.seq
        return super().append(run_id, record)


class AbsorbsOtherClaims(TheirStore):
    def there(self, run_id: str, record: Record) -> bool:
        return 0 <= record.seq < len(self.store.journals.get(run_id, []))


class AppendsRepeats(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        return super().append(run_id, record._replace(seq=-1))


class TwoEnds(TheirStore):
    def same_end(self, last: Record, record: Record) -> bool:
        return False


class AnyClaimInstalled(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "fence.install":
            self.store.claims[op.args[0]] = op.args[1]
            return True
        return super().apply(op)


class NewestFirst(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found[::-1] if what == "records" else found


class InclusiveRecords(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        return await super().read(what, *((args[0], args[1] - 1) if what == "records" else args))


class FirstEnding(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        if what != "ending":
            return await super().read(what, *args)
        return next((each for each in self.store.journals.get(args[0], []) if each.kind == "ended"), None)


class FirstEndings(FirstEnding):
    """Also for many runs."""


class EndsOfAll(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return {run_id: found.get(run_id, Record(0, "ended")) for run_id in args[0]} if what == "endings" else found


class ResultsLost(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        if what != "endings":
            return found
        return {run_id: each._replace(result=None) for run_id, each in found.items()}


class AliasedCheckpoint(TheirStore):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.shared: dict[str, Any] = {}

    async def save_checkpoint(self, run_id: Any, state: Any, **options: Any) -> None:
        await super().save_checkpoint(run_id, state, **options)
        self.shared[str(run_id)] = state

    async def get_checkpoint(self, run_id: Any) -> dict[str, Any] | None:
        return self.shared.get(str(run_id))


class CheckpointWipesStatus(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "state.checkpoint":
            self.store.rows[op.args[0]] = StateRow(None, *op.args[1:])
            return None
        return super().apply(op)


class KeepsDeletedJournal(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "state.delete":
            self.store.rows.pop(op.args[0], None)
            return None
        return super().apply(op)


class TornByCancelStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        first = await super().commit(guard, ops[:1])
        await asyncio.sleep(0)
        return first + await super().commit(None, ops[1:])


class LooksThenWritesStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        stale = guard is not None and self.store.claims.get(guard.key) != guard.token
        await asyncio.sleep(0)
        return await super().commit(guard if stale else None, ops)


class AnyKey(TheirStore):
    def there(self, run_id: str, record: Record) -> bool:
        journal = self.store.journals.get(run_id, [])
        return 0 <= record.seq < len(journal) and super().there(run_id, record._replace(key=journal[record.seq].key))


class ShortJournal(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        found = await super().read(what, *args)
        return found[:1000] if what == "records" else found


class ShortResults(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        return super().append(run_id, record._replace(result=(record.result or "")[:65535] or None))


class KeepsTheFenceStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        try:
            return await super().commit(guard, ops)
        except LeaseLost:
            self.store.claims |= {op.args[0]: op.args[1] for op in ops[:1] if op.name == "fence.install"}
            raise


class DeletesAllClaimsStore(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "state.delete":
            self.store.claims.clear()
        return super().apply(op)


class KnowsTextsOnly(TheirStore):
    def landed(self, op: Op) -> bool:
        if op.name == "state.checkpoint":
            return bool(self.store.rows.get(op.args[0], StateRow()).checkpoint == op.args[1])
        return super().landed(op)


class RepeatOverwrites(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        seq = super().append(run_id, record)
        self.store.journals[run_id][seq] = record._replace(seq=seq)
        return seq


class ComparesAllOfIt(TheirStore):
    def there(self, run_id: str, record: Record) -> bool:
        return record in self.store.journals.get(run_id, [])


class EndsAllAlike(TheirStore):
    """An end by a claim is taken for that of nobody's."""

    def same_end(self, last: Record, record: Record) -> bool:
        return super().same_end(last, record._replace(claim_id=""))


class AnyRecordIsAnEnd(TheirStore):
    def same_end(self, last: Record, record: Record) -> bool:
        return super().same_end(last, record._replace(kind="ended"))


class LosesEventCounts(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        return super().append(run_id, record._replace(nev=0))


class ShieldAloneStore(TheirStore):
    """Whoever is cancelled goes on at once, and what was to be written comes later."""

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await asyncio.shield(asyncio.ensure_future(self.slowly(guard, ops)))

    async def slowly(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        await turns(5)
        return await super().commit(guard, ops)


class SwallowsCancelStore(ShieldAloneStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        writing = asyncio.ensure_future(self.slowly(guard, ops))
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(writing)
        return writing.result()


class TakesGreaterClaimsStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if guard is not None and guard.token > self.store.claims.get(guard.key, "~"):
            guard = None
        return await super().commit(guard, ops)


class GuardsStepsOnly(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(guard if ops[0].name == "journal.append" else None, ops)


class FencesAreFreeStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None if ops[0].name.startswith("fence.") else guard, ops)


class AsksForTheRunWrittenStore(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(guard and Guard(ops[0].args[0], guard.token), ops)


class DeletesTheClaimStore(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "state.delete":
            self.store.claims.pop(op.args[0], None)
        return super().apply(op)


class StatusIsFree(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        return await super().commit(None if ops[0].name == "state.status" else guard, ops)


class TakesAnyForgetting(TheirStore):
    def landed(self, op: Op) -> bool:
        return op.name == "fence.forget" or super().landed(op)


def _with_records(name: str, column: str) -> type[TheirStore]:
    def append(self: TheirStore, run_id: str, record: Record) -> int:
        folded: dict[str, Any] = {column: FOLDS[name](getattr(record, column))}
        return TheirStore.append(self, run_id, record._replace(**folded))

    return type(f"{name}{column.title()}s", (TheirStore,), {"append": append})


def _with_statuses(name: str) -> type[TheirStore]:
    def apply(self: TheirStore, op: Op) -> Any:
        if op.name == "state.status":
            op = Op(op.name, (op.args[0], FOLDS[name](op.args[1]), op.args[2]))
        return TheirStore.apply(self, op)

    return type(f"{name}Statuses", (TheirStore,), {"apply": apply})


class ComparesInLatin1(TheirStore):
    """What is kept is whole, and what is sent again is looked for by less."""

    def there(self, run_id: str, record: Record) -> bool:
        fold = FOLDS["Latin1"]
        keys = [each.key for each in self.store.journals.get(run_id, []) if fold(each.key) == fold(record.key)]
        return any(super(ComparesInLatin1, self).there(run_id, record._replace(key=key)) for key in keys)


class RefusesGaps(TheirStore):
    def append(self, run_id: str, record: Record) -> int:
        if record.seq > self.end(run_id) + 1:
            raise LeaseLost(run_id, record.claim_id)
        return super().append(run_id, record)


class CountsRecords(TheirStore):
    def end(self, run_id: str) -> int:
        return len(self.store.journals.get(run_id, [])) - 1


class SlicesByPosition(TheirStore):
    async def read(self, what: str, *args: Any) -> Any:
        if what == "records":
            return self.store.journals.get(args[0], [])[args[1] + 1 :]
        return await super().read(what, *args)


class BeginsTwice(TheirStore):
    def apply(self, op: Op) -> Any:
        return super().apply(Op("effect.put", op.args) if op.name == "effect.begin" else op)


class LooksThenBegins(TheirStore):
    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if ops[0].name != "effect.begin":
            return await super().commit(guard, ops)
        row = ops[0].args[0]
        if any(each[:3] == row[:3] and each.run_id != row.run_id for each in self.store.effects):
            raise EffectExists
        await asyncio.sleep(0)
        return await super().commit(guard, [Op("effect.put", (row,))])


class BeginsWhatWasDone(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "effect.begin":
            row = op.args[0]
            if not any(each[:3] == row[:3] and each.run_id != row.run_id for each in self.store.effects):
                op = Op("effect.put", (row,))
        return super().apply(op)


class OneRowForAllRuns(TheirStore):
    def apply(self, op: Op) -> Any:
        if op.name == "effect.put":
            self.store.effects = [each for each in self.store.effects if each[:3] != op.args[0][:3]]
        return super().apply(op)


class ForgetsEffectReplies(TheirStore):
    def landed(self, op: Op) -> bool:
        return not op.name.startswith("effect.") and super().landed(op)


class ComparesOneDigest(TheirStore):
    def begin(self, effect: EffectRow, others: Sequence[str] = ()) -> None:
        super().begin(effect)


class ComparesNoOtherKeys(TheirStore):
    def begin(self, effect: EffectRow, others: Sequence[str] = ()) -> None:
        digests, mine = (effect.digest, *others), (effect.run_id, effect.arrival)
        there = [each for each in self.store.effects if each[:2] == effect[:2] and each.digest in digests]
        if any((each.run_id, each.arrival) != mine for each in there):
            raise EffectExists
        if not there:
            self.store.effects.append(effect)


class ReplacesOneDigest(TheirStore):
    def apply(self, op: Op) -> Any:
        return super().apply(Op(op.name, op.args[:1]) if op.name in ("effect.put", "effect.drop") else op)


class TakesAnotherRunWithItsId(TheirStore):
    def effects_of_run(self, effect: EffectRow, others: Sequence[str] = ()) -> list[EffectRow]:
        rows = [each for each in self.store.effects if each[:2] == effect[:2] and each.run_id == effect.run_id]
        return [each for each in rows if each.digest in (effect.digest, *others)]


class ForgetsChildLineages(TheirStore):
    def leave(self, origin: str, run_id: str) -> None:
        self.store.effects = [each for each in self.store.effects if each.digest != "child"]
        super().leave(origin, run_id)


class DeletesEffectsEarly(TheirStore):
    def leave(self, origin: str, run_id: str) -> None:
        self.store.effects = [each for each in self.store.effects if each.origin != origin]


class KeepsEffects(TheirStore):
    def leave(self, origin: str, run_id: str) -> None:
        return


STORES: list[tuple[type[TheirStore], state.Case]] = [
    (NoFenceStore, state.a_stale_claim_writes_nothing),
    (NotAtomicStore, state.a_commit_is_all_or_nothing),
    (LostReplyStore, state.a_lost_reply_is_repeated_without_harm),
    (TakesAnyRepeat, state.a_stale_claim_writes_nothing),
    (OverwritesHistory, state.a_position_is_written_once),
    (AbsorbsOtherClaims, state.a_position_is_written_once),
    (AppendsRepeats, state.a_position_is_written_once),
    (TwoEnds, state.an_end_under_no_claim_is_there_once_for_each_generation),
    (AnyClaimInstalled, state.only_a_greater_claim_is_installed),
    (NewestFirst, state.a_journal_is_read_in_order),
    (InclusiveRecords, state.a_journal_is_read_in_order),
    (FirstEnding, state.the_ending_is_the_last_one),
    (FirstEndings, state.endings_are_read_for_many_runs),
    (EndsOfAll, state.endings_are_read_for_many_runs),
    (ResultsLost, state.endings_are_read_for_many_runs),
    (AliasedCheckpoint, state.a_checkpoint_is_no_alias_of_the_callers),
    (CheckpointWipesStatus, state.the_status_is_kept_beside_the_checkpoint),
    (KeepsDeletedJournal, state.a_deleted_run_is_gone),
    (TornByCancelStore, state.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (LooksThenWritesStore, state.a_claim_that_is_superseded_while_it_writes_writes_before_or_not_at_all),
    (AnyKey, state.a_position_is_written_once),
    (ShortJournal, state.a_long_journal_is_read_whole),
    (ShortResults, state.a_record_comes_back_as_it_was),
    (KeepsTheFenceStore, state.a_commit_is_all_or_nothing),
    (DeletesAllClaimsStore, state.a_deleted_run_is_gone),
    (KnowsTextsOnly, state.a_lost_reply_is_repeated_without_harm),
    (RepeatOverwrites, state.a_record_stays_as_it_was_first_written),
    (ComparesAllOfIt, state.a_record_stays_as_it_was_first_written),
    (EndsAllAlike, state.an_end_under_no_claim_is_there_once_for_each_generation),
    (AnyRecordIsAnEnd, state.an_end_under_no_claim_is_there_once_for_each_generation),
    (LosesEventCounts, state.a_record_comes_back_as_it_was),
    (RefusesGaps, state.a_position_may_be_left_out),
    (CountsRecords, state.a_position_may_be_left_out),
    (SlicesByPosition, state.a_position_may_be_left_out),
    (TakesGreaterClaimsStore, state.a_stale_claim_writes_nothing),
    (GuardsStepsOnly, state.a_stale_claim_writes_nothing),
    (FencesAreFreeStore, state.a_stale_claim_writes_nothing),
    (StatusIsFree, state.a_stale_claim_writes_nothing),
    (TakesAnyForgetting, state.a_stale_claim_writes_nothing),
    (AsksForTheRunWrittenStore, state.a_claim_counts_for_its_own_run_whichever_is_written),
    (DeletesTheClaimStore, state.a_deleted_run_is_gone),
    (BeginsTwice, state_effects.an_effect_is_begun_by_one_run),
    (BeginsWhatWasDone, state_effects.an_effect_is_begun_by_one_run),
    (NotAtomicStore, state_effects.a_refused_effect_leaves_nothing_of_its_commit),
    (OneRowForAllRuns, state_effects.each_run_has_a_row_of_its_own),
    (LooksThenBegins, state_effects.of_two_runs_one_begins_an_effect),
    (ForgetsEffectReplies, state_effects.an_effect_that_was_written_may_be_repeated),
    (TakesAnyRepeat, state_effects.an_effect_that_was_written_may_be_repeated),
    (ComparesOneDigest, state_effects.an_effect_has_several_digests),
    (ComparesNoOtherKeys, state_effects.an_effect_has_several_digests),
    (ReplacesOneDigest, state_effects.an_effect_has_several_digests),
    (TakesAnotherRunWithItsId, state_effects.another_run_may_have_the_id_of_a_deleted_one),
    (ForgetsChildLineages, state_effects.effects_of_a_child_are_kept_for_the_lineage_of_its_caller),
    (DeletesEffectsEarly, state_effects.effects_go_with_the_last_run_of_their_lineage),
    (KeepsEffects, state_effects.effects_go_with_the_last_run_of_their_lineage),
    *((_with_records(name, "name"), state.texts_are_kept_whole_and_told_apart) for name in FOLDS),
    *((_with_records(name, "key"), state.texts_are_kept_whole_and_told_apart) for name in FOLDS),
    *((_with_statuses(name), state.texts_are_kept_whole_and_told_apart) for name in FOLDS),
    (ComparesInLatin1, state.texts_are_kept_whole_and_told_apart),
    (ShieldAloneStore, state.a_writer_that_is_cancelled_wrote_all_or_nothing),
    (SwallowsCancelStore, state.a_writer_that_is_cancelled_does_not_go_on),
]

DEFECTS = [*QUEUES, *BUSES, *STORES]

RUNS: list[tuple[type[TheirQueue], type[TheirBus], type[TheirStore], runs.Case]] = [
    (_with(_ForgetsDelay), TheirBus, TheirStore, runs_attempts.a_failed_attempt_is_retried_and_keeps_its_steps),
    (_with(_NoKeys), TheirBus, TheirStore, runs.what_is_asked_for_twice_is_done_once),
    (_with(_NoWaking), TheirBus, TheirStore, runs.a_run_that_waits_is_parked_and_goes_on_once),
    (TheirQueue, SequenceGap, TheirStore, runs_attempts.a_run_of_steps_tells_and_records_all_of_it),
    (TheirQueue, KeepsDeleted, TheirStore, runs_attempts.what_is_old_is_forgotten_everywhere),
    (TheirQueue, TheirBus, KeepsDeletedJournal, runs_attempts.what_is_old_is_forgotten_everywhere),
    (TheirQueue, TheirBus, DeletesEffectsEarly, runs_attempts.a_fork_repeats_no_effect),
    (TheirQueue, TheirBus, FirstEnding, runs_attempts.three_crashes_without_progress_make_a_dead_letter),
]


@pytest.mark.parametrize(("defect", "case"), DEFECTS, ids=[f"{d.__name__}-{c.__name__}" for d, c in DEFECTS])
async def test_a_defect_is_found(defect: Any, case: Any) -> None:
    with pytest.raises((AssertionError, LeaseLost)):
        await case(defect)


@pytest.mark.parametrize(("theirs", "case"), [(row[:3], row[3]) for row in RUNS], ids=[row[3].__name__ for row in RUNS])
async def test_a_defect_is_found_by_running(theirs: Sequence[type[Any]], case: runs.Case) -> None:
    queue_type, bus_type, store_type = theirs

    def make(clock: Clock) -> tuple[TheirQueue, TheirBus, TheirStore]:
        return queue_type(clock=clock), bus_type(), store_type(clock=clock)

    with pytest.raises(AssertionError):
        await case(make)


@pytest.mark.parametrize(("make", "again", "case"), SEVERAL, ids=[case.__name__ for _, _, case in SEVERAL])
async def test_a_defect_of_several_objects_is_found(make: Any, again: Any, case: Any) -> None:
    with pytest.raises((AssertionError, LeaseLost)):
        await case(make, again)


async def test_several_objects_are_looked_at_where_a_second_one_can_be_opened() -> None:
    await queue.check(OnePlace, again=shared)
    await queue.check(TheirQueue)
    with pytest.raises(AssertionError, match="through two objects"):
        await queue.check(TheirQueue, again=again)
    for kit, make in ((events, TheirBus), (state, TheirStore)):
        with pytest.raises((AssertionError, LeaseLost)):
            await kit.check(make, again=lambda backend: type(backend)())
    every = {**vars(concurrency), **vars(races)}.values()
    cases = {each for each in every if "again" in getattr(each, "__annotations__", {})}
    assert cases - {concurrency.opened, races.opened_together} == {
        *queue.CASES.several,
        *events.CASES.several,
        *state.CASES.several,
    }


@pytest.mark.parametrize("kit", [queue, events, state, runs], ids=lambda kit: kit.__name__.rpartition(".")[2])
def test_every_case_is_in_the_table(kit: Any) -> None:
    parts = [kit, *PARTS[kit]]
    functions = [
        each for part in parts for each in vars(part).values() if getattr(each, "__module__", "") == part.__name__
    ]
    cases = {each for each in functions if each.__annotations__ == {"make": "Make", "return": "None"}} - {kit.check}
    assert cases == set(kit.CASES)
    assert len({case.__name__ for case in kit.CASES}) == len(kit.CASES)


async def test_check_runs_every_case() -> None:
    await queue.check(TheirQueue)
    await queue.check(ListsProcesses)
    await queue.check(_limited(_LimitedRows))
    await state.check(TheirStore)
    await events.check(TheirBus)
    await runs.check(lambda clock: (TheirQueue(clock=clock), TheirBus(), TheirStore(clock=clock)))
    with pytest.raises(AssertionError):
        await queue.check(NoFence)


@pytest.mark.parametrize("path", sorted(PLACE.glob("their_*.py")), ids=lambda path: path.stem)
def test_a_backend_of_ones_own_is_one_small_file_over_public_names(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(text.splitlines()) < 160
    modules = {node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    ours = {module for module in modules if module.split(".")[0] not in sys.stdlib_module_names}
    theirs = {f"tests.contract.third_party.{each.stem}" for each in PLACE.glob("their_*.py")}
    assert ours <= {f"agent_runtime_core.{name}" for name in PUBLIC} | theirs
