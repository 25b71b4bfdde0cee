"""The queue of runs: who may execute what, since when, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID

from .._core.arguments import checked_agent_keys, checked_int, checked_name, checked_seconds, deadline_at, mapping
from .._core.clock import SYSTEM, Clock
from .._core.codec.json import digest, encode
from .._core.former_names import renamed_attribute
from .._core.ids import HALF, ULID_RANDOM_LENGTH, new_ulid, next_id, run_uuid, stored_id, unbroken
from .._engines.base import Backend, Guard, Op, needs_engine
from ..errors import AgentRuntimeError, InvalidArgument, LeaseLost, StorageBusy, UnknownRun, brief
from .queued_run import QueuedRun
from .records import (
    CANCELLED_BY_CALLER,
    LIVE,
    ClaimRequest,
    MailboxMessage,
    RowChanged,
    RunFilter,
    RunRow,
    RunSnapshot,
    RunUpdate,
    same_input,
    same_run,
)

if TYPE_CHECKING:
    from .blocking_claims import BlockingClaims

MAX_PRIORITY = 1_000_000
MAX_CLAIMED_AT_ONCE = 10_000  # runs that one claim takes: each has its id drawn before, on the caller's loop
MAX_LISTED = 2**53  # every store can be asked for so many
PROMPT_SECONDS = 1.0  # seconds within which a store that answers at all says that it cannot


class _Default(int):
    """A default that can be told from the same number given."""


MAX_RETRIES: int = _Default(3)


class RunQueue(Backend):
    """The authority on each run's life.

    What it guarantees, on every backend:

    1. `enqueue` returns after the run is stored; the same id or idempotency key stores nothing new.
    2. A run is claimed by one worker at a time. A claim is known by its `claim_id`; every write of a
       claim that was superseded or ended is refused with LeaseLost.
    3. Claims come by priority, then in order of arrival; delayed runs when they are due. Of very many that
       are due at once, of whatever agents, a claim may make ready no more than those of the greatest
       priorities. A run whose lease ran out is claimed anew, which counts as a crash then and there.
    4. Terminal states absorb: only `reopen` or `take` begin a new generation.
    5. A message posted to a live run is kept, once per `msg_id`, and wakes a waiting one.
    6. Of the runs with one concurrency key, one at a time is claimed or waits; the others are held, and
       go by priority, then in order of arrival. A retry, a park and a worker's hand-back keep the turn.

    A backend brings two methods and inherits the rest: `commit(guard, ops)` applies operations named
    `queue.*` (see `rows.Rows`, which decides them over any row store), all or nothing, refusing with
    LeaseLost when `guard.token` is not the current claim of `guard.key`; `read(what, ...)` answers
    row(run_id), find(RunFilter), children(run_id), mail(run_id, after),
    news(run_ids) and next_due(). `listen(topic, wake)` is optional: without it workers poll.
    """

    def __init__(self, *, max_retries: int = MAX_RETRIES, clock: Clock = SYSTEM) -> None:
        self.max_retries: int = int(checked_int("max_retries, which counts failures,", max_retries))
        #: Whether somebody said so for this queue: a runner on it goes by it then.
        self.limits_retries: bool = max_retries is not MAX_RETRIES
        self.clock = clock
        #: Told the id of each run whose cancelling was asked for through this object: its holder here hears it at once.
        self.cancel_listeners: set[Callable[[str], None]] = set()
        self._claim_ids: dict[tuple[str, str], str] = {}
        #: Tickets of claims that got no answer, and may hold something.
        self.unconfirmed_tickets: set[str] = set()

    @needs_engine
    async def read(self, what: str, *args: Any) -> Any:
        """Return what is stored, as the class describes it for each `what`."""
        return await self._held_store().read(what, *args)

    @property
    def holder(self) -> str:
        """Names this process to others on the same store; "" where nobody can tell a dead one."""
        return str(renamed_attribute(getattr(self, "engine", None), "process_id", "holder") or "")

    def lease_now(self) -> float:
        return self.clock.boot()

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Call `wake()` after commits that rang "work" or "mail"; None where only polling helps."""
        engine = getattr(self, "engine", None)
        return engine.listen(topic, wake) if engine is not None else None

    async def close(self) -> None:
        """Close what this queue holds: its engine, if no other backend uses it. A second call does nothing."""
        await super().close()

    # -- entering

    def new_row(
        self,
        run_id: UUID | str | None,
        agent_key: str,
        input: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
        *,
        delay: float = 0,
        idempotency_key: str | None = None,
        expires_in: float | None = None,
        deadline: _dt.datetime | float | None = None,
        parent_run_id: UUID | str | None = None,
        concurrency_key: str | None = None,
        origin: str = "",
    ) -> RunRow:
        """The row of a new run, checked and encoded; nothing is stored yet."""
        agent = checked_name("an agent key", agent_key)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise InvalidArgument(f"priority is an integer of 32 bits, not {brief(priority)}")
        if not isinstance(input, Mapping):
            raise InvalidArgument(f"the input of a run is a dict, not {type(input).__name__}: {brief(input)}")
        about = mapping("the metadata of a run", metadata)
        idem_key = None if idempotency_key is None else checked_name("an idempotency key", idempotency_key)
        lane = None if concurrency_key in (None, "") else checked_name("a concurrency key", concurrency_key)
        uid, run_key = run_uuid(run_id, self.clock)
        now = self.clock.wall()
        text = encode(dict(input))
        return RunRow(
            run_id=str(uid),
            agent=agent,
            input=text,
            digest=digest(f"{agent}\0{text}"),
            metadata=encode(about),
            priority=priority,
            created_at=now,
            updated_at=now,
            due_at=now + checked_seconds("delay", delay) if delay else 0.0,
            expires_at=None if expires_in is None else now + checked_seconds("expires_in", expires_in),
            deadline=deadline_at(deadline),
            run_key=run_key,
            idem_key=idem_key,
            parent_id=None if parent_run_id is None else str(run_uuid(parent_run_id, self.clock)[0]),
            lane=lane,
            origin=origin,
        )

    async def enqueue(
        self,
        run_id: UUID | str | None,
        agent_key: str,
        input: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
        **options: Any,
    ) -> QueuedRun:
        """Store a run and return it once it is durable; the one stored before under that id or key, if any.

        `options`: delay and expires_in in seconds, deadline (wall time), idempotency_key,
        parent_run_id, concurrency_key (None or "": none). Another agent or input under the same id or
        key is an IdempotencyConflict.
        """
        row = self.new_row(run_id, agent_key, input, metadata, priority, **options)
        stored: RunRow = (await self.commits.commit(None, [Op("queue.insert", (row,))]))[0]
        same_run(row, stored)
        return QueuedRun.of(stored)

    # -- claiming

    def blocking_claims(self, given: Callable[[list[RunRow]], None]) -> BlockingClaims | None:
        """Where claims of a worker can stand: `given`, on its loop, is told of runs that were claimed for it as they
        came. None where there are only bells."""
        return None

    def claim_request(
        self, worker: str, lease_seconds: float, agents: Sequence[str] | None, count: int = 1, *,
        ready_only: bool = False, wait_name: str | None = None, wait_seconds: float = 0.0,
    ) -> ClaimRequest:  # fmt: skip
        """A request for up to `count` runs.

        With `ready_only` it ignores expired leases and timers. With `wait_name`, a request that finds no run waits in
        the store under this name for `wait_seconds`.
        """
        lease = checked_seconds("lease_seconds", lease_seconds, least=0.001)
        clock, now = self.clock, self.lease_now()
        wall = clock.wall()
        tickets = tuple([next_id(clock, wall) for _ in range(count)])
        wanted = None if agents is None else tuple(agents)
        return ClaimRequest(
            tickets, worker, self.holder, now + lease, now, wall, wanted, ready_only, wait_name, wait_seconds
        )

    async def claim_rows(
        self, worker_id: str, lease_seconds: float = 60, *, agent_keys: Sequence[str] | None = None, limit: int = 1,
        blocking: BlockingClaims | None = None, wait_seconds: float = 0.0,
    ) -> list[RunRow]:  # fmt: skip
        """The next runs for this worker; where there is none, the claim may stand for so many seconds."""
        agents = checked_agent_keys(agent_keys)
        count = min(checked_int("limit", limit), MAX_CLAIMED_AT_ONCE)
        name = None if blocking is None else blocking.ready()
        want = self.claim_request(
            checked_name("a worker id", worker_id),
            lease_seconds,
            agents,
            count,
            wait_name=name,
            wait_seconds=wait_seconds,
        )
        if agents == ():
            return []
        claim = Op("queue.claim", (want,))
        if blocking is None or name is None:
            rows: list[RunRow] = (await self._commit_claim(want, claim))[0]
            return rows
        blocking.sent(want.tickets)
        stood, rows = await self._commit_claim(want, Op("queue.sit", (name,)), claim)
        blocking.answered(want.tickets, stood=stood, got=bool(rows))
        return rows

    async def _commit_claim(self, want: ClaimRequest, *ops: Op) -> list[Any]:
        """The results of a claim; one that its caller does not get to know is given back."""
        if self.unconfirmed_tickets:
            unsure = tuple(self.unconfirmed_tickets)
            await self.give_back(unsure)
            self.unconfirmed_tickets.difference_update(unsure)
        began = self.clock.boot()
        try:
            return await self.commits.commit(None, ops)
        except (asyncio.CancelledError, StorageBusy) as error:
            if isinstance(error, StorageBusy) and self.clock.boot() - began > PROMPT_SECONDS:
                # To ask a store that does not answer takes as long again: before the next claim is soon enough.
                self.unconfirmed_tickets.update(want.tickets)
            else:
                with contextlib.suppress(AgentRuntimeError):
                    await self.give_back(want.tickets)
            raise

    async def give_back(self, tickets: Sequence[str]) -> None:
        """Give back what was claimed with those tickets, if anything was."""
        # A claim id ends with its ticket's bits of chance, however high it had to be lifted.
        ends = {ticket[-ULID_RANDOM_LENGTH:] for ticket in tickets}
        for row in await self.find(RunFilter(("running",), limit=MAX_PRIORITY)):
            if row.claim_id[-ULID_RANDOM_LENGTH:] in ends:
                with contextlib.suppress(LeaseLost, RowChanged):
                    await self.settle(
                        row.run_id,
                        self.unchanged_update(row, row.claim_id)._replace(status="pending", parked=row.parked),
                    )

    def confirm(self, ends: set[str]) -> None:
        """What was claimed with tickets that end so came to its caller after all."""
        self.unconfirmed_tickets = {
            ticket for ticket in self.unconfirmed_tickets if ticket[-ULID_RANDOM_LENGTH:] not in ends
        }

    async def claim(
        self, worker_id: str, lease_seconds: float = 60, *, agent_keys: Sequence[str] | None = None, limit: int = 1
    ) -> Any:
        """The next run for this worker, or None; with `limit` above 1 a list of up to that many, at most 10,000.

        Where a run holds a type that is not registered here, asking for its `input` is an UnserialisableResult.
        """
        rows = await self.claim_rows(worker_id, lease_seconds, agent_keys=agent_keys, limit=limit)
        for row in rows:
            self._claim_ids[row.run_id, worker_id] = row.claim_id
        runs = [QueuedRun.of(row) for row in rows]
        return runs if limit > 1 else (runs[0] if runs else None)

    async def take(
        self, row: RunRow, worker_id: str, lease_seconds: float, *, insert: bool, reopen: bool, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        """Claim that one run for this process, storing it first if new.

        Answers ("claimed", row), ("held", row) by a live process, ("ended", row), ("conflict", row)
        with another agent or input, ("unknown", None), or ("behind", the row that has its lane). With
        `wait` a run that is behind is stored and keeps its place in the lane for `rows.PLACE` seconds:
        whoever waits takes it again before that. Without, nothing is written.
        """
        want = self.claim_request(worker_id, lease_seconds, None, 1)
        answer: tuple[str, RunRow | None] = (
            await self._commit_claim(want, Op("queue.take", (row, insert, reopen, want, wait)))
        )[0]
        there = answer[1]
        if answer[0] == "conflict" and there is not None and there.run_id == row.run_id and same_input(row, there):
            # By their digests alone they are two.
            row = row.with_values(digest=there.digest)
            return await self.take(row, worker_id, lease_seconds, insert=insert, reopen=reopen, wait=wait)
        return answer

    # -- under a claim

    def _claim_of(self, run_id: UUID | str, worker_id: str, claim_id: str | None) -> tuple[str, str]:
        key = stored_id(run_id)
        token = (
            unbroken("a claim_id", claim_id)
            if claim_id
            else self._claim_ids.get((key, checked_name("a worker id", worker_id)))
        )
        if token is None:
            raise LeaseLost(key, f"of {brief(worker_id)}")
        return key, token

    async def settle(self, run_id: str, how: RunUpdate, ops: Sequence[Op] = ()) -> RunRow:
        """Leave a claimed run as `how` says; RowChanged if its mailbox moved past `how.cursor`."""
        op = Op("queue.settle", (run_id, how))
        row: RunRow = (await self.commits.commit(Guard(run_id, how.claim_id), [op, *ops]))[0]
        return row

    async def release(
        self,
        run_id: UUID | str,
        worker_id: str,
        success: bool,
        output: Mapping[str, Any] | None = None,
        error: Any = None,
        *,
        claim_id: str | None = None,
    ) -> None:
        """End a claimed run as succeeded or failed; LeaseLost if this worker no longer holds it."""
        key, token = self._claim_of(run_id, worker_id, claim_id)
        row = await self.require(key)
        how = self.unchanged_update(row, token)._replace(
            status="succeeded" if success else "failed",
            mark=-1,
            output=None if output is None else encode(mapping("the output of a run", output)),
            error=None if error is None else encode(error),
        )
        await self._update_claimed(key, worker_id, how)

    async def _update_claimed(self, key: str, worker_id: str, how: RunUpdate) -> None:
        try:
            await self.settle(key, how)
        except (LeaseLost, RowChanged):
            self._forget(key, worker_id, how.claim_id)
            raise LeaseLost(key, how.claim_id) from None
        if how.status != "running":
            self._forget(key, worker_id, how.claim_id)

    def _forget(self, key: str, worker_id: str, claim_id: str) -> None:
        if self._claim_ids.get((key, worker_id)) == claim_id:
            del self._claim_ids[key, worker_id]

    def unchanged_update(self, row: RunRow, claim_id: str) -> RunUpdate:
        """A RunUpdate that changes nothing yet: counters as they are."""
        return RunUpdate(
            claim_id, row.status, self.clock.wall(), failures=row.failures, crashes=row.crashes, stalls=row.stalls,
            mark=row.mark,
        )  # fmt: skip

    async def extend_lease(
        self, run_id: UUID | str, worker_id: str, lease_seconds: float, *, claim_id: str | None = None
    ) -> bool:
        """True while this worker holds the run; its lease then ends `lease_seconds` from now."""
        until = self.lease_now() + checked_seconds("lease_seconds", lease_seconds, least=0.001)
        try:
            claim = self._claim_of(run_id, worker_id, claim_id)
        except LeaseLost:
            return False
        held: bool = (await self.commits.commit(None, [Op("queue.beat", ((claim,), until))]))[0][0][0]
        if not held:
            self._forget(claim[0], worker_id, claim[1])
        return held

    async def requeue_for_retry(
        self, run_id: UUID | str, worker_id: str, error: Any, delay_seconds: float = 0, *, claim_id: str | None = None
    ) -> bool:
        """Give a failed attempt back for another one after `delay_seconds`.

        False when that was the last of `max_retries` failures, or for a worker that does not hold it.
        """
        delay = checked_seconds("delay_seconds", delay_seconds)
        try:
            key, token = self._claim_of(run_id, worker_id, claim_id)
        except LeaseLost:
            return False
        row = await self.row(key)
        if row is None or row.failures + 1 >= self.max_retries:
            return False
        how = self.unchanged_update(row, token)._replace(
            status="pending",
            due_at=self.clock.wall() + delay if delay else 0.0,
            failures=row.failures + 1,
            error=None if error is None else encode(error),
        )
        try:
            await self._update_claimed(key, worker_id, how)
        except LeaseLost:
            return False
        return True

    # -- from outside

    async def post(
        self, run_id: UUID | str, kind: str, name: str, payload: str, msg_id: str | None = None
    ) -> tuple[str, int]:
        """Put a message into a run's mailbox: (the status it had, the message's number or 0 if it has ended)."""
        op = self.post_op(stored_id(run_id), kind, name, payload, msg_id)
        answer: tuple[str, int] = (await self.commits.commit(None, [op]))[0]
        return answer

    def post_op(self, run_id: str, kind: str, name: str, payload: str, msg_id: str | None = None) -> Op:
        known_by = new_ulid(self.clock) if not msg_id else unbroken("a message's id", msg_id)
        mail = MailboxMessage(kind, name, payload, known_by, self.clock.wall())
        return Op("queue.post", (run_id, mail))

    async def cancel(self, run_id: UUID | str) -> bool:
        """Ask for a run to be cancelled; True if the request is recorded, False if the run is over or unknown.

        A pending or waiting run is cancelled in that commit; a running one hears of it.
        """
        key, now = stored_id(run_id), self.clock.wall()
        try:
            await self.commits.commit(
                None, [Op("queue.end", (key, ("pending", "waiting"), "cancelled", now, CANCELLED_BY_CALLER))]
            )
        except RowChanged:
            status, _ = await self.post(key, "cancel", "", "null")
            self.notify_cancelled(key)
            return status in LIVE
        return True

    def notify_cancelled(self, run_id: str) -> None:
        """Have it heard at once in this process that the run was asked to be cancelled."""
        for tell in tuple(self.cancel_listeners):
            tell(run_id)

    async def is_cancelled(self, run_id: UUID | str) -> bool:
        """Whether the run was cancelled, or asked to be."""
        row = await self.row(run_id)
        return row is not None and (row.status == "cancelled" or row.cancel_at is not None)

    # -- looking

    async def row(self, run_id: UUID | str) -> RunRow | None:
        row: RunRow | None = await self.read("row", stored_id(run_id))
        return row

    async def require(self, run_id: UUID | str) -> RunRow:
        row = await self.row(run_id)
        if row is None:
            raise UnknownRun(f"no run {run_id} is stored here")
        return row

    async def find(self, wanted: RunFilter) -> list[RunRow]:
        if wanted.agent is not None and HALF.search(wanted.agent):
            return []  # no store keeps such a key, nor can be asked for it
        rows: list[RunRow] = await self.read("find", wanted._replace(limit=min(wanted.limit, MAX_LISTED)))
        return rows

    async def children(self, run_id: str) -> list[RunRow]:
        rows: list[RunRow] = await self.read("children", run_id)
        return rows

    async def mail(self, run_id: str, after: int = 0) -> list[MailboxMessage]:
        mail: list[MailboxMessage] = await self.read("mail", run_id, after)
        return mail

    async def snapshots(self, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
        """What changed about those runs, for holders and waiters; unknown ones are left out."""
        news: dict[str, RunSnapshot] = await self.read("news", tuple(run_ids))
        return news

    async def next_due(self) -> float | None:
        """The wall time at which the next delayed or waiting run becomes ready."""
        due: float | None = await self.read("next_due")
        return due
