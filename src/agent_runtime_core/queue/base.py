"""The queue of runs: which run is claimed by whom, which runs wait, and how they ended."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as _dt
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from uuid import UUID

from .._core.arguments import (
    checked_agent_keys,
    checked_int,
    checked_name,
    checked_seconds,
    checked_tenant,
    deadline_at,
    mapping,
    run_input,
)
from .._core.clock import SYSTEM, Clock
from .._core.codec.json import decode_dict, digest, encode, encode_as
from .._core.former_names import renamed_attribute
from .._core.ids import (
    HALF,
    SCHEDULED,
    ULID_RANDOM_LENGTH,
    is_uuid,
    new_ulid,
    next_id,
    plain,
    run_uuid,
    stored_id,
    unbroken,
)
from .._core.validation import Shown, must, type_name
from .._engines.base import Backend, Guard, Op
from .._engines.outages import OUTAGE
from ..errors import (
    MOST_NAMED,
    AgentRuntimeError,
    InvalidArgument,
    LeaseLost,
    NotSupported,
    StorageBusy,
    UnknownRun,
    brief,
)
from ..limits import RATE_LIMIT, RateLimit
from .contents import ANY_CONTENTS, TAGS, Candidates, with_tags
from .live_claims import DelayedRuns, LiveClaims
from .payload_fields import FIELDS, decode_mail, decode_row, decode_rows, redacted_mail
from .rate_limits import counted_rate
from .records import (
    ACTED,
    CANCELLED_BY_CALLER,
    CONFIRMED,
    LIVE,
    RESTORED,
    SCHEDULE,
    ClaimRequest,
    MailboxMessage,
    QueuedRun,
    RowChanged,
    RunCounts,
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
MAX_CLAIMED_AT_ONCE = 10_000  # runs in one claim: their claim ids are made before, on the caller's event loop
MAX_CONCURRENCY = 10_000  # most active runs of a concurrency key: a claim may read all of them
MAX_LISTED = 2**53  # every store accepts this as a limit
_PAGE = 500  # rows that `find_runs` reads together after a page that contained schedules
PROMPT_SECONDS = 1.0  # seconds within which a store that is reachable reports that it is busy


class _Default(int):
    """A default value that differs from the same number passed by a caller."""


MAX_RETRIES: int = _Default(3)


def conversation_of(input: Mapping[str, Any]) -> str | None:
    """Return the conversation that an input names, as in `RunRow.conversation`."""
    value = input.get("conversation_id")
    if not isinstance(value, (str, UUID)) or value == "" or HALF.search(text := str(value)):
        return None
    with contextlib.suppress(ValueError):
        return str(UUID(text))
    return plain(text)


def _is_impossible(wanted: RunFilter) -> bool:
    """Return whether a text of a filter contains a lone surrogate: no store contains such a value, or accepts it."""
    texts = (
        wanted.agent, wanted.prefix, wanted.parent, wanted.conversation, wanted.concurrency_key, wanted.reason,
        wanted.tenant, wanted.run_key,
    )  # fmt: skip
    return any(text is not None and HALF.search(text) for text in texts)


def _several_tenants(run_id: object, tenants: Sequence[str]) -> InvalidArgument:
    names = ", ".join(map(repr, sorted(tenants)[:MOST_NAMED])) + ", …" * (len(tenants) > MOST_NAMED)
    fix = "Name the tenant, or use the run id"
    return must(f"run {str(run_id)!r}", "be of one tenant", Shown(f"runs of {names}"), fix)


class RunQueue(Backend):
    """Decides which worker may execute which run.

    Guarantees of every backend:

    1. `enqueue` returns after the run is stored. A second run with the same id or idempotency key is not stored.
    2. A run is claimed by one worker at a time. `claim_id` is the fencing token of a claim: every write under a claim
       that has ended or was superseded raises LeaseLost.
    3. Runs are claimed by priority, then in order of arrival; delayed runs when they are due. If very many are due at
       once, a claim may make only the runs of the greatest priorities ready, whatever their agents are. A run with an
       expired lease is claimed again, and that claim counts the crash.
    4. The first terminal status wins: only `reopen` and `take` begin a new generation.
    5. A message posted to a live run is stored once for each `msg_id`, and makes a waiting run pending.
    6. A run with a concurrency key is active, from its first claim until it ends, while fewer other runs of its key
       than its `concurrency_limit` (1 by default) are active. The others are blocked, and follow by priority, then in
       order of arrival. A run keeps its place when it is retried, parked or released.
    7. In any period of a rate limit, at most so many runs start as it allows. The others are delayed, and follow by
       priority, then in order of arrival.

    A backend implements two methods:

    * `commit(guard, ops)` applies operations named `queue.*`, all or nothing. It raises LeaseLost if `guard.token` is
      not the current claim of the run `guard.key`. `RunTransitions` implements the operations over the tables of the
      backend.
    * `read(what, ...)` returns the values listed there.

    `listen(topic, wake)` is optional: without it, workers poll.

    Args:
        max_retries: Attempts of a run that may fail before it is not retried any more, including the first.
        clock: Source of times and random values.
    """

    payload_fields = FIELDS
    #: Whether the queue implements "queue.save_process", "queue.drop_process" and `read("processes")`.
    keeps_processes: ClassVar[bool] = False
    #: Whether the queue has `read("shared", ...)`, and its transitions `all_active_in_group`, `shared`, `save_shared`,
    #: `next_rate_limited` and `next_turn`.
    keeps_limits: ClassVar[bool] = False
    #: Whether the queue has `read("search", ...)`, `read("search_state", ...)` and `read("numbered", ...)`, and the
    #: operations "search.create", "search.put", "search.merge" and "search.drop": a full-text index.
    keeps_search: ClassVar[bool] = False
    #: Settings of a runner on this queue, where the user sets none.
    recommended_settings: ClassVar[Mapping[str, float]] = {}
    #: Names the rows of this queue for a state store on the same engine that reads them; see `StateStore.reads_rows`.
    keeps_rows: ClassVar[str] = ""
    #: Name of the operation that returns the number of a run's messages; "" if reading them takes no call of a server.
    mail_count: ClassVar[str] = ""

    def __init__(self, *, max_retries: int = MAX_RETRIES, clock: Clock = SYSTEM) -> None:
        self._live_claims: LiveClaims | None = None
        self.max_retries: int = int(checked_int("max_retries", max_retries))
        #: Whether `max_retries` was passed for this queue: then a runner uses it instead of its own.
        self.limits_retries: bool = max_retries is not MAX_RETRIES
        self.clock = clock
        #: Called with the id of each run that is cancelled through this object, so that a worker in this process
        #: stops it immediately.
        self.cancel_listeners: set[Callable[[str], None]] = set()
        self._claim_ids: dict[tuple[str, str], str] = {}
        #: When the runs that this object delayed are due by the monotonic clock.
        self.delayed_runs: DelayedRuns = DelayedRuns(clock)
        #: Tickets of claims whose reply was lost: they may have claimed runs, which the next claim releases first.
        self.unconfirmed_tickets: set[str] = set()

    @abstractmethod
    async def read(self, what: str, *args: Any) -> Any:
        """Read from the store.

        Args:
            what: The name of a read, with its `args`:
                "row" (run_id), or (run_id, tenant): the RunRow, or None; with a tenant only its run.
                "find" (RunFilter): a list of the RunRows that it admits, at most its `limit`, in its order, and light
                    if it is.
                "counts" (), or (tenant): a RunCounts.
                "children" (run_id): a list of RunRow with that `parent_id`.
                "mail" (run_id, after): a list of MailboxMessage with a greater `seq`, in order of `seq`.
                "news" (run_ids): a dict of RunSnapshot by run id, without unknown runs.
                "next_due" (): the smallest `due_at` above 0 of a live run, or None.
                "processes" (): a list of the ProcessRows, if `keeps_processes`.
                "shared" (prefix): a dict of the shared states whose names begin so, if `keeps_limits`.
                "search" (RunFilter, words, most): the `Candidates`, None without an index; if `keeps_search`.
                "search_state" (limit): the `IndexState`, None without an index; if `keeps_search`.
                "numbered" (arrivals): a list of the RunRows with these, in that order; if `keeps_search`.
            args: Its arguments.

        Returns:
            What `what` names.
        """

    @property
    def holder(self) -> str:
        """Id of this process for others on the same store; "" if they could not detect its end."""
        return str(renamed_attribute(getattr(self, "engine", None), "process_id", "holder") or "")

    def lease_now(self) -> float:
        """Return the time on the clock that leases are measured by."""
        return self.clock.boot()

    @property
    def live_claims(self) -> LiveClaims:
        """The claims that this process executes on the same store."""
        if self._live_claims is None:  # kept, because each claim looks
            self._live_claims = LiveClaims.of(getattr(self, "engine", self), self.clock)
        return self._live_claims

    def expiry_now(self) -> float:
        """Return the time before which a lease must end for its claim to be taken over.

        It is `lease_now()`, without the time for which the machine was suspended just now; see `live_claims`.
        """
        return self.lease_now() - self.live_claims.suspended()

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None] | None:
        """Call `wake()` after each commit that notifies `topic`: "work", "done" or "mail".

        Args:
            topic: The topic.
            wake: Called after each of these commits, from any thread.

        Returns:
            A function that removes the listener; None if the store cannot notify.
        """
        engine = getattr(self, "engine", None)
        return engine.listen(topic, wake) if engine is not None else None

    # -- entering

    def new_row(
        self, run_id: UUID | str | None, agent_key: str, input: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None, priority: int = 0, *, delay: float = 0,
        idempotency_key: str | None = None, expires_in: float | None = None,
        deadline: _dt.datetime | float | None = None, parent_run_id: UUID | str | None = None,
        concurrency_key: str | None = None, origin: str = "", tenant: str | None = None, tags: Iterable[str] = (),
        concurrency_limit: int = 1, rate_limit: RateLimit | None = None, turn: str | None = None,
    ) -> RunRow:  # fmt: skip
        """Return the row of a new run, checked and encoded. Nothing is stored; arguments as for `enqueue`."""
        agent = checked_name("agent_key", agent_key)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            raise must("priority", "be an integer of 32 bits", priority)
        if not isinstance(input, Mapping):
            raise must("input", "be a dict", input)
        meta = {} if metadata is None else mapping("metadata", metadata)
        if tags != () or TAGS in meta:
            meta = with_tags(meta, tags)
        idem_key = None if idempotency_key is None else checked_name("idempotency_key", idempotency_key)
        key = None if concurrency_key in (None, "") else checked_name("concurrency_key", concurrency_key)
        owner = checked_tenant(tenant) if tenant else ""
        if isinstance(run_id, str) and run_id.startswith(SCHEDULED):
            raise must("run_id", f"not begin with {SCHEDULED!r}", run_id, "Runs of schedules are named so")
        uid, run_key = run_uuid(run_id, self.clock, owner)
        rate = None
        if rate_limit is not None or turn is not None or concurrency_limit != 1 or type(concurrency_limit) is not int:
            rate = self._checked_limits(concurrency_limit, rate_limit, turn, agent, input, owner)
        now = self.clock.wall()
        text, meta_text = encode_as("input", dict(input)), encode_as("metadata", meta)
        if self.redaction is not None:
            text, meta_text = (self.redaction.stored_dict("input", each, f"run {uid}") for each in (text, meta_text))
        return RunRow(
            run_id=str(uid),
            agent=agent,
            input=text,
            digest=digest(f"{agent}\0{text}"),
            metadata=meta_text,
            priority=priority,
            created_at=now,
            updated_at=now,
            due_at=now + checked_seconds("delay", delay) if delay else 0.0,
            expires_at=None if expires_in is None else now + checked_seconds("expires_in", expires_in),
            deadline=None if deadline is None else deadline_at(deadline),
            run_key=run_key,
            idem_key=idem_key,
            parent_id=None if parent_run_id is None else stored_id(parent_run_id, owner),
            concurrency_key=key,
            origin=origin,
            conversation=conversation_of(input if self.redaction is None else decode_dict(text)),
            tenant=owner,
            concurrency_limit=concurrency_limit,
            turn=turn,
            rate=rate,
        )

    def _checked_limits(
        self, limit: int, rate_limit: RateLimit | None, turn: str | None, agent: str, input: Mapping[str, Any],
        tenant: str,
    ) -> str | None:  # fmt: skip
        """Return the rate limit of a new run as its row stores it. Most runs have no limits and do not come here."""
        RATE_LIMIT.check("rate_limit", rate_limit)
        if checked_int("concurrency_limit", limit) > MAX_CONCURRENCY:
            raise must("concurrency_limit", f"be at most {MAX_CONCURRENCY}", limit)
        if turn:
            checked_name("turn", turn)
        if not self.keeps_limits:
            name = "concurrency_limit" if limit > 1 else "turn" if rate_limit is None else "rate_limit"
            raise NotSupported(f"{type(self).__name__} does not set keeps_limits, so it cannot keep a {name}")
        return None if rate_limit is None else rate_limit.text(agent, input, tenant)

    async def enqueue(
        self,
        run_id: UUID | str | None,
        agent_key: str,
        input: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        priority: int = 0,
        *,
        params: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> QueuedRun:
        """Store a run and return it once it is durable.

        Args:
            run_id: Its id; None for a new id. Text that is no UUID becomes the `run_key`.
            agent_key: Key of its agent.
            input: Its input, which must be JSON-serializable.
            metadata: Its metadata, likewise.
            priority: Greater priorities are claimed first.
            params: Merged into the "params" of the input.
            **options: `delay` and `expires_in` in seconds, `deadline` (wall time), `idempotency_key`, `parent_run_id`,
                `concurrency_key` (None or "": none), `concurrency_limit`, `rate_limit`, `turn`
                ("": one for all runs without another), `tenant`, `tags`.

        Returns:
            The run; the stored run, if there is a run with that id or idempotency key.

        Raises:
            IdempotencyConflict: if the agent or the input of the stored run differs.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.queue import InMemoryQueue
            >>> async def main():
            ...     queue = InMemoryQueue()
            ...     await queue.enqueue(None, "report", {"month": "May"})
            ...     run = await queue.claim("worker-1")
            ...     await queue.release(run.run_id, "worker-1", True, {"rows": 3})
            ...     return (await queue.row(run.run_id)).status
            >>> asyncio.run(main())
            'succeeded'
        """
        given = input if params is None else run_input(input, params)
        return QueuedRun.of(await self.insert(self.new_row(run_id, agent_key, given, metadata, priority, **options)))

    async def insert(self, row: RunRow) -> RunRow:
        """Store a new row. Return it, or the row that is stored with its run id or idempotency key.

        Args:
            row: The row of the run.

        Returns:
            The stored row.

        Raises:
            IdempotencyConflict: if the agent or the input of the stored run differs.
        """
        row = await self._assigned_before(row)
        self.delayed_runs.remember_new(row)
        stored: RunRow = (await self.commits.commit(None, [Op("queue.insert", (row,))]))[0]
        same_run(row, stored)
        return stored

    async def insertion(self, row: RunRow, connection: Any, *, sync: bool) -> Any:
        """Return what stores a new row in the transaction that the application opened on a connection.

        Args:
            row: The row.
            connection: The connection.
            sync: Whether its `run_sync` will be called in a thread, not its `run` on an event loop.

        Raises:
            InvalidArgument: The connection is of no kind that is known.
            NotSupported: The queue is not in a database that the application can be connected to.
        """
        raise NotSupported(
            f"submit with connection= needs runs on PostgreSQL, got {type_name(type(self))}. Use "
            "AgentRunner.open('postgresql://…'), or submit the run after your commit"
        )

    async def _assigned_before(self, row: RunRow) -> RunRow:
        """Return the row with the id of the run that was given to its tenant later, under the same run key."""
        if row.tenant and row.run_key is not None:
            for found in await self.find(RunFilter(run_key=row.run_key, tenant=row.tenant, light=True, limit=1)):
                return row.with_values(run_id=found.run_id)
        return row

    # -- claiming

    def blocking_claims(self, given: Callable[[list[RunRow]], None]) -> BlockingClaims | None:
        """Return long-poll claims for one worker, None if the store can only notify.

        Args:
            given: Called on the worker's event loop with the runs that were claimed for it when they arrived.
        """
        return None

    def claim_request(
        self, worker: str, lease_seconds: float, agents: Sequence[str] | None, count: int = 1, *,
        ready_only: bool = False, wait_name: str | None = None, wait_seconds: float = 0.0,
        after_turn: str | None = None,
    ) -> ClaimRequest:  # fmt: skip
        """Return a request for up to `count` runs.

        With `ready_only` it ignores expired leases and timers. With `wait_name`, a request that finds no run waits in
        the store under this name for `wait_seconds`.
        """
        lease = checked_seconds("lease_seconds", lease_seconds, least=0.001)
        clock, now = self.clock, self.lease_now()
        wall, expiry = clock.wall(), now if ready_only else self.expiry_now()
        tickets = tuple([next_id(clock, wall) for _ in range(count)])
        wanted = None if agents is None else tuple(agents)
        return ClaimRequest(
            tickets,
            worker,
            self.holder,
            now + lease,
            expiry,
            wall,
            wanted,
            ready_only,
            wait_name,
            wait_seconds,
            after_turn,
        )

    async def claim_rows(
        self, worker_id: str, lease_seconds: float = 60, *, agent_keys: Sequence[str] | None = None, limit: int = 1,
        blocking: BlockingClaims | None = None, wait_seconds: float = 0.0, after_turn: str | None = None,
    ) -> list[RunRow]:  # fmt: skip
        """Claim the next runs for a worker.

        With `blocking`, a claim that finds no run waits in the store for up to `wait_seconds`. This call returns
        immediately.
        With `after_turn`, runs of equal priority are claimed in turns, beginning after that turn.
        """
        agents = checked_agent_keys(agent_keys)
        count = min(checked_int("limit", limit), MAX_CLAIMED_AT_ONCE)
        name = None if blocking is None else blocking.ready()
        worker = checked_name("worker_id", worker_id)
        want = self.claim_request(
            worker, lease_seconds, agents, count, wait_name=name, wait_seconds=wait_seconds, after_turn=after_turn
        )
        if agents == ():
            return []
        await self._release_abandoned()
        claim = Op("queue.claim", (want,))
        if blocking is None or name is None:
            rows: list[RunRow] = (await self._commit_claim(want, claim))[0]
            return rows
        blocking.sent(want.tickets)
        stood, rows = await self._commit_claim(want, Op("queue.sit", (name,)), claim)
        blocking.answered(want.tickets, stood=stood, got=bool(rows))
        return rows

    async def _commit_claim(self, want: ClaimRequest, *ops: Op) -> list[Any]:
        """Commit a claim and return its results. If its reply is lost, what it claimed is released.

        The live claims of this queue object are extended in the same commit, so that it takes none of them over.
        """
        if self.unconfirmed_tickets:
            unconfirmed = tuple(self.unconfirmed_tickets)
            await self.give_back(unconfirmed)
            self.unconfirmed_tickets.difference_update(unconfirmed)
        live = [] if want.ready_only else self.live_claims.unextended(self)
        extends = [Op("queue.beat", (live, want.lease_until))] if live else []
        began = self.clock.monotonic()
        try:
            return (await self.commits.commit(None, [*extends, *ops]))[len(extends) :]
        except (asyncio.CancelledError, StorageBusy) as error:
            if isinstance(error, StorageBusy) and self.clock.monotonic() - began > PROMPT_SECONDS:
                # A store that does not reply would delay the error once more: release before the next claim instead.
                self.unconfirmed_tickets.update(want.tickets)
            else:
                await self.try_give_back(want.tickets)
            raise

    async def _release_abandoned(self, run_id: str | None = None) -> None:
        """Release the claims of this process that no code executes any more."""
        claims = self.live_claims
        for abandoned, how in (*claims.abandoned(run_id), *claims.owed_releases()):
            await self.try_release(abandoned, how)

    async def try_release(self, run_id: str, how: RunUpdate) -> None:
        """Release a claim. If an outage prevents it, the next heartbeat or claim of this process does it."""
        try:
            await self.settle(run_id, how)
        except OUTAGE:
            self.live_claims.owe_release(run_id, how)
        except (AgentRuntimeError, RowChanged):  # it was released or lost since
            pass

    async def give_back(self, tickets: Sequence[str]) -> None:
        """Release the runs that were claimed with these tickets, if any."""
        # A claim id is raised above the run's last one, but keeps the random bits of its ticket at its end.
        ends = {ticket[-ULID_RANDOM_LENGTH:] for ticket in tickets}
        rows: list[RunRow] = await self.read("find", RunFilter(("running",), limit=MAX_PRIORITY))  # contents undecoded
        for row in rows:
            if row.claim_id[-ULID_RANDOM_LENGTH:] in ends:
                with contextlib.suppress(LeaseLost, RowChanged):
                    how = self.unchanged_update(row, row.claim_id)._replace(status="pending", parked=row.parked)
                    await self.settle(row.run_id, how._replace(take_back=counted_rate(row)))

    async def try_give_back(self, tickets: Sequence[str]) -> None:
        """Release the runs that were claimed with these tickets. If that fails, the next claim does it."""
        try:
            await self.give_back(tickets)
        except AgentRuntimeError:
            self.unconfirmed_tickets.update(tickets)

    def confirm(self, ends: set[str]) -> None:
        """Forget the unconfirmed tickets with these random bits: their claims have reached their caller."""
        self.unconfirmed_tickets = {
            ticket for ticket in self.unconfirmed_tickets if ticket[-ULID_RANDOM_LENGTH:] not in ends
        }

    async def claim(
        self, worker_id: str, lease_seconds: float = 60, *, agent_keys: Sequence[str] | None = None, limit: int = 1
    ) -> Any:
        """Claim the next run for a worker.

        Args:
            worker_id: Name of the worker.
            lease_seconds: How long the claim lasts, unless `extend_lease` extends it.
            agent_keys: Claim only runs of these agents; None for all. Rows of schedules are no runs.
            limit: At most so many runs, up to 10,000.

        Returns:
            The run or None; with `limit` above 1 a list. Reading `input` of a run raises UnserialisableResult if it
            contains a type that is not registered in this process.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core.queue import InMemoryQueue
            >>> asyncio.run(InMemoryQueue().claim("worker-1")) is None
            True
        """
        rows = await self.claim_rows(worker_id, lease_seconds, agent_keys=agent_keys, limit=limit)
        for row in rows:
            self._claim_ids[row.run_id, worker_id] = row.claim_id
        runs = [QueuedRun.of(row) for row in rows]
        return runs if limit > 1 else (runs[0] if runs else None)

    async def take(
        self, row: RunRow, worker_id: str, lease_seconds: float, *, insert: bool, reopen: bool, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        """Claim one run for this process.

        Args:
            row: The run; see `new_row`.
            worker_id: Name of the worker.
            lease_seconds: How long the claim lasts.
            insert: Whether to store the run if it is new.
            reopen: Whether to begin a new generation if it ended without success.
            wait: If another run with its concurrency key is active, store this run behind it. It keeps its place for
                5 seconds, so the caller must take it again before that.

        Returns:
            ("claimed", row), ("held", row) by a live process, ("ended", row), ("conflict", row) with another agent or
            input, ("unknown", None), or ("behind", the active row with its concurrency key).
        """
        if insert and row.tenant:
            row = await self._assigned_before(row)
        await self._release_abandoned(row.run_id)
        want = self.claim_request(worker_id, lease_seconds, None, 1)
        result: tuple[str, RunRow | None] = (
            await self._commit_claim(want, Op("queue.take", (row, insert, reopen, want, wait)))
        )[0]
        # A process without a worker may have no heartbeat that tells.
        self.live_claims.outage.answered(wrote=result[0] == "claimed")
        stored_row = result[1]
        if (
            result[0] == "conflict"
            and stored_row is not None
            and stored_row.run_id == row.run_id
            and same_input(row, stored_row)
        ):
            # The digests differ although the inputs are equal: they depend on the order of keys.
            row = row.with_values(digest=stored_row.digest)
            return await self.take(row, worker_id, lease_seconds, insert=insert, reopen=reopen, wait=wait)
        return result

    # -- under a claim

    def _claim_of(self, run_id: UUID | str, worker_id: str, claim_id: str | None) -> tuple[str, str]:
        key = stored_id(run_id)
        token = (
            unbroken("claim_id", claim_id)
            if claim_id
            else self._claim_ids.get((key, checked_name("worker_id", worker_id)))
        )
        if token is None:
            raise LeaseLost(key, f"of worker {brief(worker_id)}", str(run_id))
        return key, token

    async def settle(self, run_id: str, how: RunUpdate, ops: Sequence[Op] = ()) -> RunRow:
        """Apply an update by the run's claim, together with `ops`, and return the new row.

        Args:
            run_id: The id of the run.
            how: The update.
            ops: Further operations of the same commit.

        Returns:
            The new row.

        Raises:
            RowChanged: if the update does not apply any more; see `RunUpdate`.
            LeaseLost: if the claim is not current.
        """
        if how.due_at:
            self.delayed_runs.remember(run_id, how.claim_id, how.due_at)
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
        """End a claimed run as succeeded or failed.

        Args:
            run_id: The id of the run.
            worker_id: Name of the worker.
            success: Whether the run succeeded; else it failed.
            output: The result of the run.
            error: Why the run failed, JSON-serializable.
            claim_id: The id of the claim; None means the last claim of this worker through this object.

        Raises:
            LeaseLost: if this worker does not hold the claim any more.
        """
        key, token = self._claim_of(run_id, worker_id, claim_id)
        row = await self.require(key)
        how = self.unchanged_update(row, token)._replace(
            status="succeeded" if success else "failed",
            min_step_count=-1,
            output=None if output is None else self._redacted("result", key, encode(mapping("output", output))),
            error=None if error is None else self._redacted("error", key, encode(error)),
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

    def _redacted(self, kind: Literal["result", "error"], run_id: str, text: str) -> str:
        return text if self.redaction is None else self.redaction.stored(kind, text, f"run {run_id}")

    def _forget(self, key: str, worker_id: str, claim_id: str) -> None:
        if self._claim_ids.get((key, worker_id)) == claim_id:
            del self._claim_ids[key, worker_id]

    def unchanged_update(self, row: RunRow, claim_id: str) -> RunUpdate:
        """Return an update that keeps the status and the counters of a row, to be changed with `_replace`."""
        return RunUpdate(
            claim_id, row.status, self.clock.wall(), failures=row.failures, crashes=row.crashes,
            crashes_in_row=row.crashes_in_row,
            min_step_count=row.min_step_count,
        )  # fmt: skip

    async def extend_lease(
        self, run_id: UUID | str, worker_id: str, lease_seconds: float, *, claim_id: str | None = None
    ) -> bool:
        """Extend the lease of a run to `lease_seconds` from now; return False if this worker holds no claim on it.

        Args:
            run_id: The id of the run.
            worker_id: Name of the worker.
            lease_seconds: Seconds from now until the claim expires.
            claim_id: The id of the claim; None means the last claim of this worker through this object.

        Returns:
            Whether this worker holds the claim.
        """
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
        """Release a run after a failed attempt, for another attempt after `delay_seconds`.

        Args:
            run_id: The id of the run.
            worker_id: Name of the worker.
            error: Why the attempt failed, JSON-serializable.
            delay_seconds: Seconds until the next attempt.
            claim_id: The id of the claim; None means the last claim of this worker through this object.

        Returns:
            False if that was the last of `max_retries` attempts, or if this worker holds no claim on the run.
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
            error=None if error is None else self._redacted("error", key, encode(error)),
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
        """Put a message into a run's mailbox.

        Args:
            run_id: The run.
            kind: "signal", "child", "message", "question", "closed", "cancel", "limits" or "acted".
            name: Name of the signal, run id of the child, what was done, or "".
            payload: JSON.
            msg_id: A second message with the same id is dropped; None for a new id.

        Returns:
            The status of the run before, or "unknown", and the message's number, or 0 if the run is not live.
        """
        op = self.post_op(stored_id(run_id), kind, name, payload, msg_id)
        result: tuple[str, int] = (await self.commits.commit(None, [op]))[0]
        return result

    def post_op(self, run_id: str, kind: str, name: str, payload: str, msg_id: str | None = None) -> Op:
        """Return the operation of `post`, for a commit together with others."""
        self.live_claims.posts += 1
        message_id = new_ulid(self.clock) if not msg_id else unbroken("msg_id", msg_id)
        if self.redaction is not None:
            payload = redacted_mail(self.redaction, run_id, kind, payload)
        mail = MailboxMessage(kind, name, payload, message_id, self.clock.wall())
        return Op("queue.post", (run_id, mail))

    def ended_op(self, row: RunRow, parent: str, payload: str) -> Op:
        """Return the operation that tells a parent how its child run ended, once for each end.

        The generations of a child that was deleted and called again begin at 1 again, but its `arrival` differs.
        Without that, its message would be dropped as the message of the deleted child, and its parent would wait for
        ever.
        """
        return self.post_op(parent, "child", row.run_id, payload, f"end:{row.run_id}:{row.arrival}:{row.generation}")

    async def may_lack_steps(self, run_id: str) -> bool:
        """Return whether the store was restored, and no person confirmed that the copy lacks no step of the run."""
        marks = [each.name for each in await self.mail(run_id) if each.kind == RESTORED]
        return bool(marks) and marks[-1] != CONFIRMED

    def confirmed_op(self, run_id: str) -> Op:
        """Return the operation that stores that a restored store lacks nothing of a live run."""
        return self.post_op(run_id, RESTORED, CONFIRMED, "null", f"{CONFIRMED}:{new_ulid(self.clock)}")

    def acted_ops(self, run_id: str, action: str, by: str | None, act_id: str) -> list[Op]:
        """Return the operations that store who acts on a live run, for a commit with the action; none without a name.

        Args:
            run_id: The run.
            action: "answer", "cancel" or "resume".
            by: The name of who acts.
            act_id: Of several acts with the same id the first is stored. The id of an answer is its id in the mailbox.
        """
        return [] if by is None else [self.post_op(run_id, ACTED, action, encode({"by": by}), f"{ACTED}:{act_id}")]

    async def cancel(self, run_id: UUID | str) -> bool:
        """Request that a run be cancelled.

        A pending or waiting run is cancelled in the same commit. The worker of a running run is notified.

        Args:
            run_id: The id of the run.

        Returns:
            True if the request is stored, False if the run is finished or unknown.
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
        """Call the `cancel_listeners` of this queue object."""
        for listener in tuple(self.cancel_listeners):
            listener(run_id)

    async def is_cancelled(self, run_id: UUID | str) -> bool:
        """Return whether the run is cancelled or its cancellation was requested.

        Args:
            run_id: The id of the run.
        """
        row = await self.row(run_id)
        return row is not None and (row.status == "cancelled" or row.cancel_at is not None)

    # -- looking

    async def row(self, run_id: UUID | str, tenant: str = "") -> RunRow | None:
        """Return the row of a run; with `tenant` only a run of this tenant, whose run key `run_id` may be.

        Args:
            run_id: The run, by its id or its key.
            tenant: The tenant whose run it is; "" for any run with this id.
        """
        row: RunRow | None = await self.read("row", stored_id(run_id, tenant), *([tenant] if tenant else []))
        return None if row is None else decode_row(self.payloads, row)

    async def require(self, run_id: UUID | str, tenant: str | None = None) -> RunRow:
        """Return the row of the run that a caller names.

        Args:
            run_id: The run id, or the run key.
            tenant: Only a run of this tenant. None means any run with that id, or the run without a tenant with that
                run key, or else the only tenant's run with that run key.

        Raises:
            InvalidArgument: Runs of several tenants use that run key. The message lists the tenants.
            UnknownRun: No such run is stored.
        """
        owner = checked_tenant(tenant)
        # The row of another tenant is not read: the time for its input would show that it is stored.
        row = await (self.row(run_id, owner) if owner else self.row(run_id))
        if row is not None and row.agent == SCHEDULE:
            raise self.unknown_run(run_id)
        if row is not None and (row.tenant == owner or (tenant is None and is_uuid(run_id))):
            return row
        if not is_uuid(run_id):
            # The id of a run that was given to its tenant later is the id that its key alone makes.
            wanted = RunFilter(run_key=str(run_id), tenant=tenant, limit=MOST_NAMED + 1, light=True)
            found = await self.find_runs(wanted)
            if len(found) > 1:
                raise _several_tenants(run_id, [each.tenant for each in found])
            if found and (row := await self.row(found[0].run_id)) is not None:
                return row
        raise self.unknown_run(run_id)

    def unknown_run(self, run_id: UUID | str) -> UnknownRun:
        """Return the error for a run id that is not stored here."""
        where = getattr(self.commits, "location", type(self).__name__)
        if str(run_id).startswith(SCHEDULED) and str(run_id).count(":") == 1:
            return UnknownRun(f"{str(run_id)!r} names a schedule in {where}, not a run. Use runner.schedules")
        return UnknownRun(f"run {str(run_id)!r} not found in {where}. List the stored runs with runner.runs()")

    async def find(self, wanted: RunFilter) -> list[RunRow]:
        """Return the rows that match a filter, in the order that `RunFilter` names.

        Args:
            wanted: Which runs.

        Raises:
            InvalidArgument: The filter has conditions that no store decides.
        """
        if wanted.min_attempts != 1 or wanted.contents != ANY_CONTENTS:  # each insert of a named run comes here
            fix = "Use runner.runs(), which reads at most 10,000 runs for them"
            raise must("wanted", "not have the conditions min_attempts and contents", Shown("them"), fix)
        if _is_impossible(wanted):
            return []
        rows: list[RunRow] = await self.read("find", wanted._replace(limit=min(wanted.limit, MAX_LISTED)))
        # A run that cannot be decrypted must not hide the others.
        return decode_rows(None if self.payloads is None else self.payloads.marking, rows)

    @property
    def may_index(self) -> bool:
        """Whether the store can keep a full-text index of contents: no codec encodes them."""
        return self.keeps_search and (self.payloads is None or bool(self.payloads.is_plain))

    async def search(self, wanted: RunFilter, words: str, most: int) -> Candidates | None:
        """Return the runs that may contain words, from the full-text index; None if there is none.

        Args:
            wanted: Which runs; the conditions that no store decides do not count.
            words: What they contain, as `indexed_words` returns it: at least 3 characters.
            most: How many candidates to read at most.
        """
        if not self.may_index or _is_impossible(wanted):
            return None
        found: Candidates | None = await self.read("search", wanted.of_store, words, most)
        return found

    async def numbered(self, arrivals: Sequence[int]) -> list[RunRow]:
        """Return the rows with these `arrival`, if `keeps_search`; without the rows that are gone.

        Args:
            arrivals: Which rows, in their order.
        """
        rows: list[RunRow] = await self.read("numbered", [*arrivals])
        return decode_rows(None if self.payloads is None else self.payloads.marking, rows)

    async def find_runs(self, wanted: RunFilter) -> list[RunRow]:
        """Return the rows of runs that match a filter, as `find` does, without the rows that contain schedules.

        Args:
            wanted: Which runs.
        """
        if wanted.agent is not None:
            return [] if wanted.agent == SCHEDULE else await self.find(wanted)
        found: list[RunRow] = []
        page = wanted
        while True:
            rows = await self.find(page)
            found += [row for row in rows if row.agent != SCHEDULE]
            if len(rows) < page.limit or len(found) >= wanted.limit:
                return found[: wanted.limit]
            place = (rows[-1].created_at, rows[-1].arrival)
            page = page._replace(before=place) if page.newest_first else page._replace(after=place[1])
            page = page._replace(limit=max(wanted.limit, _PAGE))  # schedules are often stored one after another

    async def counts(self, tenant: str | None = None) -> RunCounts:
        """Return how many runs are stored, by status and agent. With a tenant, only its runs are counted.

        Args:
            tenant: Count only the runs of this tenant. If None, all.
        """
        found: RunCounts = await (self.read("counts", tenant) if tenant else self.read("counts"))
        return found.of_runs()

    async def assign(self, run_id: str, tenant: str) -> str:
        """Give a stored run to a tenant; see `RunTransitions.assign` for what is returned."""
        return str((await self.commits.commit(None, [Op("queue.assign", (run_id, checked_tenant(tenant)))]))[0])

    async def children(self, run_id: str) -> list[RunRow]:
        """Return the child runs of a run.

        Args:
            run_id: The id of the run.
        """
        rows: list[RunRow] = await self.read("children", run_id)
        return decode_rows(None if self.payloads is None else self.payloads.marking, rows)

    async def mail(self, run_id: str, after: int = 0) -> list[MailboxMessage]:
        """Return the messages of a run with a number above `after`.

        Args:
            run_id: The id of the run.
            after: Only messages with a greater number.
        """
        messages: list[MailboxMessage] = await self.read("mail", run_id, after)
        return decode_mail(self.payloads, run_id, messages) if messages else messages

    async def snapshots(self, run_ids: Sequence[str]) -> dict[str, RunSnapshot]:
        """Return a snapshot of each of these runs; unknown runs are left out.

        Args:
            run_ids: The ids of the runs.
        """
        found: dict[str, RunSnapshot] = await self.read("news", tuple(run_ids))
        return found

    async def next_due(self) -> float | None:
        """Return the wall time at which the next delayed or waiting run becomes ready, None if there is none."""
        due: float | None = await self.read("next_due")
        return due
