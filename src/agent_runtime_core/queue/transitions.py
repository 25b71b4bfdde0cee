"""Every change of a run's row, decided once for all backends; a backend implements the row store below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .._core.former_names import warn_former
from .._core.ids import ULID_RANDOM_LENGTH, above
from .._engines.base import NotApplied, OperationSet, always
from ..errors import NotSupported, StorageBusy
from .pools import PREFIX, Amounts, Pool, PoolLimit, Refusal
from .rate_limits import MOST_DELAYED, Rate, Starts, taken_back
from .rate_limits import PREFIX as RATES
from .records import (
    CONTENTS,
    LIVE,
    QUEUED_BEHIND,
    SET_ASIDE,
    ClaimRequest,
    MailboxMessage,
    ProcessRow,
    RowChanged,
    RunRow,
    RunUpdate,
    as_abandoned,
    as_assigned,
    as_claimed,
    as_delayed,
    as_reopened,
    as_updated,
    contents_of,
    is_rate_limited,
    questions_after,
)

CLOCK_STEP = 1.0  # seconds: smaller steps of the clock are not looked for
INLINE_RESERVATION = 5.0  # seconds for which a waiting inline run keeps its place after its caller last took it


#: Methods of `RunTransitions` in 0.6.0, and what they are called now.
_FORMER = {
    "promote": "make_due_ready",
    "expired": "expired_leases",
    "ready": "claimable",
    "head": "active_in_group",
    "behind": "next_in_group",
    "lapsed": "abandoned_inline",
    "mailed": "message_number",
    "add_mail": "add_message",
    "dead": "is_dead",
    "ring": "notify",
}


class RunTransitions(ABC):
    """The rows and mailboxes of a queue inside one open transaction.

    To write a backend, subclass it: implement the abstract methods over your tables, and let `commit` call the
    functions of `operations(YourTransitions)` and `replays(YourTransitions)`. The methods below "the operations" are
    then complete; they are the values of `Op("queue.insert", …)`, `Op("queue.claim", …)` and so on.

    What the abstract methods rely on:

    * All that they read and write in one transaction is committed together or not at all, and no other transaction
      sees or changes it in between.
    * `save` and `add` keep the indexes by which `claimable`, `expired_leases`, `make_due_ready`, `active_in_group`,
      `next_in_group` and `abandoned_inline` find rows.
    * A group is all rows of one `concurrency_key` and `tenant`. Its live rows with `blocked` 0 are active. While fewer
      rows are active than the `concurrency_limit` of the next row with `blocked` 1 allows, all rows with `blocked` 1
      are delayed. The value 2 is for rows that were set aside.

    Args:
        tx: The open transaction of the engine. It provides `fence(key, token)` and `notify(topic)`.
    """

    def __init__(self, tx: Any) -> None:
        self.tx = tx

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for old, new in _FORMER.items():
            if old in cls.__dict__ and new not in cls.__dict__:
                warn_former(cls.__name__, old, new, stacklevel=4)  # past ABCMeta: the line of the class statement
                setattr(cls, new, cls.__dict__[old])

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name):
            if name not in _FORMER:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            warn_former(type(self).__name__, name, _FORMER[name])
            return getattr(self, _FORMER[name])

    # -- implemented by a backend

    @abstractmethod
    def get(self, run_id: str) -> RunRow | None:
        """Return the row of a run.

        Args:
            run_id: The id of the run.
        """

    @abstractmethod
    def by_key(self, idem_key: str, tenant: str) -> RunRow | None:
        """Return the row of that tenant with that idempotency key.

        Args:
            idem_key: The idempotency key.
            tenant: The tenant, or "".
        """

    @abstractmethod
    def add(self, row: RunRow) -> RunRow:
        """Store a new row, pending or already claimed, and return it with an `arrival` above all earlier values.

        Args:
            row: The row of the run.

        Returns:
            The row with its `arrival`.
        """

    def add_new(self, row: RunRow) -> RunRow | None:
        """Do as `add`, unless a row with this id is stored: then return None. The id is the only key of the row.

        Args:
            row: The row of the run.

        Returns:
            The row with its `arrival`, or None.
        """
        return self.add(row) if self.get(row.run_id) is None else None

    @abstractmethod
    def save(self, row: RunRow) -> None:
        """Replace the stored row with the same `arrival`.

        Args:
            row: The row of the run.
        """

    @abstractmethod
    def drop(self, row: RunRow) -> None:
        """Delete a row and its mailbox.

        Args:
            row: The row of the run.
        """

    @abstractmethod
    def make_due_ready(self, wall: float) -> Sequence[tuple[str, str]]:
        """Set delayed and waiting rows with 0 < `due_at` <= `wall` to pending.

        Their `updated_at` becomes their `due_at`, which becomes 0.

        If there are very many, it may change only the rows of the greatest priorities; later claims change the others.

        Args:
            wall: The time on the wall clock.

        Returns:
            The concurrency key and the tenant of each changed row whose `blocked` is 1.
        """

    @abstractmethod
    def expired_leases(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Return running rows of agents that `want.admits` with `origin` "" and an expired lease or a dead holder.

        A lease is expired if `lease_until` < `want.lease_now`; see `is_dead` for the holder. At most `limit` rows, the
        smallest `lease_until` first.

        Args:
            want: The request of the worker.
            limit: At most this many rows.
        """

    @abstractmethod
    def claimable(self, want: ClaimRequest, limit: int) -> list[RunRow]:
        """Return pending rows of agents that `want.admits` with `origin` "", `due_at` 0 and `blocked` 0.

        At most `limit` rows, the greatest priority first, then the smallest `arrival`.

        Args:
            want: The request of the worker.
            limit: At most this many rows.
        """

    @abstractmethod
    def active_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        """Return the first live row by `arrival` with that concurrency key and tenant, and `blocked` 0.

        Args:
            concurrency_key: The concurrency key.
            tenant: The tenant, or "".
        """

    def all_active_in_group(self, concurrency_key: str, tenant: str, limit: int) -> Sequence[RunRow]:
        """Return the live rows with that concurrency key and tenant, and `blocked` 0, by `arrival`.

        Args:
            concurrency_key: The concurrency key.
            tenant: The tenant, or "".
            limit: At most this many rows.

        Raises:
            NotSupported: The queue does not support concurrency limits above 1.
        """
        if limit > 1:
            raise NotSupported(
                f"{type(self).__name__} does not define all_active_in_group, so concurrency_limit must be 1"
            )
        row = self.active_in_group(concurrency_key, tenant)
        return () if row is None else (row,)

    @abstractmethod
    def next_in_group(self, concurrency_key: str, tenant: str) -> RunRow | None:
        """Return the row with that concurrency key and tenant that may be claimed next.

        Of the rows with `blocked` 1 and `due_at` 0, its priority is the greatest, then its `arrival` the smallest.

        Args:
            concurrency_key: The concurrency key.
            tenant: The tenant, or "".
        """

    @abstractmethod
    def abandoned_inline(self, want: ClaimRequest) -> list[RunRow]:
        """Return pending and running rows with a concurrency key, an origin, `blocked` 0 and an expired lease.

        Args:
            want: The request of the worker.
        """

    @abstractmethod
    def message_number(self, run_id: str, msg_id: str) -> int | None:
        """Return the `seq` of the message with that id in the mailbox of a run, None if there is none.

        Args:
            run_id: The id of the run.
            msg_id: The id of the message.
        """

    @abstractmethod
    def add_message(self, run_id: str, mail: MailboxMessage) -> None:
        """Store a message, whose `seq` is set, in the mailbox of a run.

        Args:
            run_id: The id of the run.
            mail: The message.
        """

    def replace_contents(self, row: RunRow) -> None:
        """Replace input, digest, metadata, output and error of the stored row. By default `save` does it.

        Args:
            row: The row of the run.
        """
        self.save(row)

    def replace_message(self, run_id: str, old: MailboxMessage, new: MailboxMessage) -> bool:
        """Replace a stored message by one with another payload, and return whether `old` is stored.

        Args:
            run_id: The id of the run.
            old: The message that should be stored.
            new: The message that replaces it.

        Returns:
            Whether `old` is stored.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define replace_message, so payloads cannot be re-encoded")

    def move(self, row: RunRow, after: RunRow) -> None:
        """Replace a stored row by the same row with another tenant, and with the `blocked` of its new group.

        Args:
            row: The stored row.
            after: The row that replaces it.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define move, so stored runs cannot be given to a tenant")

    def add_copied(self, row: RunRow) -> None:
        """Store a new row of another store under its own `arrival`.

        Args:
            row: The row of the run.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define add_copied, so no store can be copied to it")

    def keep_arrival(self, last: int) -> None:
        """Give later rows an `arrival` greater than `last`.

        Args:
            last: The greatest `arrival` so far.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define keep_arrival, so no store can be copied to it")

    def save_process(self, row: ProcessRow, kept: float) -> None:
        """Store or replace the row of a process, and delete rows that were last renewed more than `kept` seconds ago.

        A backend that defines this and `drop_process` sets `keeps_processes`.

        Args:
            row: The row of the process.
            kept: Seconds.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define save_process, so it lists no processes")

    def drop_process(self, process_id: str) -> None:
        """Delete the row of a process, if it is stored.

        Args:
            process_id: The id of the process.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define drop_process, so it lists no processes")

    def shared(self, name: str) -> str | None:
        """Return a state that all processes share, such as the last starts of a rate limit. None: there is none.

        The transaction locks the name: no other transaction reads or changes the state until this transaction ends.

        Args:
            name: The name of the state.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define shared, so it keeps no limits of several runs")

    def save_shared(self, name: str, state: str | None) -> None:
        """Store or replace a state that all processes share, or delete it.

        Args:
            name: The name of the state.
            state: The state. None: delete it.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define save_shared, so it keeps no limits of several runs")

    def wall_time(self, wall: float) -> float:
        """Return the wall time by which periods of shared states are measured: by default that of the caller.

        Args:
            wall: The time on the wall clock of the caller.
        """
        return wall

    def shared_if_free(self, name: str) -> tuple[bool, str | None]:
        """Return True and the state, as `shared` does; or False if another transaction has locked the name.

        A claim calls it, which has locked rows: it must not wait for a transaction that waits for these rows.

        Args:
            name: The name of the state.
        """
        return True, self.shared(name)

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None:
        """Return the first row by priority and `arrival` of an agent that a rate limit delays.

        It has this `rate` and `agent`, the status "pending", the `reason` "rate_limit" and a `due_at` above 0.

        Args:
            rate: `RunRow.rate`.
            agent: The key of the agent.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define next_rate_limited, so rate_limit must be None")

    def bring_forward(self, name: str, seconds: float) -> None:
        """Subtract seconds from the `due_at` of all rows that a rate limit delays.

        The state of their `rate` is named so, their status is "pending", their `reason` is "rate_limit" and their
        `due_at` is above 0. A claim calls it: it must not wait for rows that another transaction has locked.

        Args:
            name: The name of the state, as `Rate.name` returns it.
            seconds: The seconds.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define bring_forward, so rate_limit must be None")

    def shared_states(self, prefix: str) -> Mapping[str, str]:
        """Return the states that all processes share whose names begin so, without a lock. By default none.

        Args:
            prefix: The beginning of the names.
        """
        return {}

    def clock_seen(self) -> dict[str, float]:
        """Return a dict of this process and store, for `follow_clock`. By default a new dict."""
        return {}

    def next_turn(self, want: ClaimRequest, priority: int, after: str | None) -> RunRow | None:
        """Return a row as `claimable` does, but with this priority, and with the first turn above `after`.

        Of the rows with that turn, it has the smallest `arrival`. Rows whose `turn` is None are ignored.

        Args:
            want: The request of the worker.
            priority: The priority.
            after: A turn. None: the first turn of all.

        Raises:
            NotSupported: The queue does not support this.
        """
        raise NotSupported(f"{type(self).__name__} does not define next_turn, so take_turns must be None")

    def forget_shared(self, states: Sequence[tuple[str, str]]) -> None:
        """Delete shared states that are still as they were read.

        Args:
            states: Names and states, sorted: transactions lock the names in this order.
        """
        for name, state in states:
            if self.shared(name) == state:
                self.save_shared(name, None)

    def is_dead(self, holder: str) -> bool:
        """Return whether the process with that id is known to have ended. By default a lease must expire instead.

        Args:
            holder: The id of the process.
        """
        return False

    def fence(self, run_id: str, token: str | None) -> None:
        """Set the fencing token of a run: only writes under that claim are accepted. None: under no claim.

        Args:
            run_id: The id of the run.
            token: The id of the claim, or None.
        """
        self.tx.fence(run_id, token)

    def notify(self, topic: str) -> None:
        """Wake the listeners of a topic ("work", "done" or "mail") after the commit.

        Args:
            topic: The topic.
        """
        self.tx.notify(topic)

    # -- the operations

    def _save(self, row: RunRow) -> RunRow:
        self.save(row)
        self.notify("work" if row.status in LIVE else "done")
        if row.concurrency_key is not None and (row.blocked or row.status not in LIVE):
            self._release(row.concurrency_key, row.tenant)
        return row

    def _release(self, concurrency_key: str, tenant: str) -> None:
        """Unblock the next runs of a group, as long as fewer runs of it are active than they allow."""
        group = concurrency_key, tenant
        is_free = self.active_in_group(*group) is None
        while (row := self.next_in_group(*group)) is not None and (is_free or self._has_room(row)):
            self.save(row.with_values(blocked=0))
            self.notify("work")
            is_free = False

    def _has_room(self, row: RunRow) -> bool:
        """Return whether fewer runs of a group are active than a row of it allows, if at least one run is."""
        limit, group = row.concurrency_limit, (row.concurrency_key or "", row.tenant)
        return limit > 1 and len(self.all_active_in_group(*group, limit)) < limit

    def _is_full(self, row: RunRow) -> bool:
        """Return whether so many runs of a group are active that a row, which is not active, must wait."""
        is_free = self.active_in_group(row.concurrency_key or "", row.tenant) is None
        return not is_free and not self._has_room(row)

    def _is_blocked(self, row: RunRow) -> bool:
        """Return whether a new row of a group must wait, for active runs or for runs that come first."""
        if self._is_full(row):
            return True
        first = self.next_in_group(row.concurrency_key or "", row.tenant) if row.concurrency_limit > 1 else None
        return first is not None and first.priority >= row.priority

    def _enter_group(self, row: RunRow) -> RunRow:
        """Return a pending row, blocked if its concurrency key requires it."""
        if row.concurrency_key is None:
            return row
        if row.origin:
            return row.with_values(blocked=SET_ASIDE)
        waits = row.due_at > 0 or self._is_blocked(row)
        return row.with_values(blocked=QUEUED_BEHIND if waits else 0)

    def _expect(self, run_id: str, statuses: Sequence[str]) -> RunRow:
        row = self.get(run_id)
        if row is None or row.status not in statuses:
            raise RowChanged
        return row

    def insert(self, row: RunRow) -> RunRow:
        """Store a row unless a row with its id or idempotency key is stored; return the stored row.

        Args:
            row: The row of the run.

        Returns:
            The stored row.
        """
        added = self.add_new(row) if _has_no_key(row) else None
        if added is None and (stored := self._existing(row)) is not None:
            return stored
        self.notify("work")
        return added or self.add(self._enter_group(row))

    def _existing(self, row: RunRow) -> RunRow | None:
        stored = self.get(row.run_id)
        return self.by_key(row.idem_key, row.tenant) if stored is None and row.idem_key is not None else stored

    def insert_applied(self, row: RunRow) -> RunRow:
        """Return the result of an `insert` that may have been committed before.

        Args:
            row: The row of the run.

        Raises:
            NotApplied: The row is not stored.
        """
        stored = self._existing(row)
        if stored is None:
            raise NotApplied
        return stored

    def _claim(self, row: RunRow, ticket: str, want: ClaimRequest) -> RunRow:
        row = as_claimed(row, above(ticket, row.claim_id), want)
        if row.arrival == 0:  # not stored yet
            row = self.add(row)
        else:
            self.save(row)
        self.fence(row.run_id, row.claim_id)
        return row

    def claim(self, want: ClaimRequest) -> list[RunRow]:
        """Claim up to one run for each ticket, those with expired leases first.

        Args:
            want: The request of the worker.

        Returns:
            The rows of the claimed runs.

        Raises:
            StorageBusy: if an earlier try may have claimed runs, because its reply was lost. The queue releases them.
        """
        if getattr(self.tx, "repeats", False):
            raise StorageBusy("the reply to a claim was lost. Claim again")
        return self.claim_next(want)

    def claim_next(self, want: ClaimRequest) -> list[RunRow]:
        """Do as `claim`, in a commit that was not tried before.

        Args:
            want: The request of the worker.

        Returns:
            The rows of the claimed runs.
        """
        found: list[RunRow] = []
        if not want.ready_only:
            for group in self.make_due_ready(want.wall):
                self._release(*group)
            found = self.expired_leases(want, len(want.tickets))
            for row in self.abandoned_inline(want):
                self._set_aside(row, want)
            self.follow_clock(want.wall)
        if want.after_turn is not None:
            return self._claim_limited(found, want)
        if len(found) < len(want.tickets):
            found = found + self.claimable(want, len(want.tickets) - len(found))
        for row in found:
            if row.rate is not None:
                return self._claim_limited(found, want)
        return [self._claim(row, ticket, want) for row, ticket in zip(found, want.tickets, strict=False)]

    def follow_clock(self, wall: float) -> None:
        """Bring delayed runs forward if the clock went back since this process claimed last, or before its first claim.

        A limit whose runs were brought forward is looked for again by the next claim, because this commit may fail.

        Args:
            wall: The time on the wall clock of the store.
        """
        seen = self.clock_seen()
        before = seen.get("claimed")
        if before is not None and wall >= before - CLOCK_STEP:
            if wall > before + CLOCK_STEP:
                seen["claimed"] = wall
            return
        starts = Starts(self, wall)
        if not starts.follow_clock(self.shared_states(RATES)):
            seen["claimed"] = wall
        starts.save()

    def _claim_limited(self, rows: Sequence[RunRow], want: ClaimRequest) -> list[RunRow]:
        """Claim these rows and other ready ones, as their rate limits and the turns of the worker allow."""
        claimed, starts, delayed = list[RunRow](), Starts(self, want.wall), 0
        self._start(rows, want, claimed, starts)
        if want.after_turn is not None:
            self._start_by_turns(want.after_turn, want, claimed, starts)
        while delayed < starts.delayed and len(claimed) < len(want.tickets) and not starts.is_over:
            delayed = starts.delayed
            self._start(self.claimable(want, MOST_DELAYED), want, claimed, starts)
        if starts.is_over and len(claimed) < len(want.tickets):  # other runs may follow those that were delayed
            self.notify("work")
        starts.save()
        return claimed

    def _start_by_turns(self, after: str, want: ClaimRequest, claimed: list[RunRow], starts: Starts) -> None:
        """Claim ready rows, each time of the next turn."""
        head = self._first_claimable(want)
        while head is not None and len(claimed) < len(want.tickets) and not starts.is_over:
            row = self.next_turn(want, head.priority, after)
            if row is None:  # the circle begins again, unless all rows of that priority were claimed
                priority, head = head.priority, self._first_claimable(want)
                if head is None or head.priority != priority:
                    continue
                row = self.next_turn(want, priority, None)
                if row is None or (head.turn is None and (row.turn, row.arrival) > ("", head.arrival)):
                    row = head
            after = row.turn or ""
            self._start([row], want, claimed, starts)

    def _first_claimable(self, want: ClaimRequest) -> RunRow | None:
        for row in self.claimable(want, 1):
            self.save(row)  # as it is: a store may have taken it out of an index to return it
            return row
        return None

    def _start(self, rows: Sequence[RunRow], want: ClaimRequest, claimed: list[RunRow], starts: Starts) -> None:
        """Claim rows, as long as there are tickets, or delay them where their rate limits require it."""
        for row in rows:
            while len(claimed) < len(want.tickets) and not starts.is_over:
                chosen, at = starts.next(row)
                if chosen is not None:
                    asked = want if at == want.wall else want._replace(wall=at)
                    claimed.append(self._claim(chosen, want.tickets[len(claimed)], asked))
                if chosen is None or chosen is row:
                    break
            else:
                self.save(row)  # as it is: a store may have taken it out of an index to return it

    def delay(self, row: RunRow, due_at: float) -> None:
        """Delay a row that a claim may claim, because its rate limit has no room.

        Args:
            row: The row.
            due_at: The time on the wall clock at which there may be room.
        """
        if row.status == "running":
            self.fence(row.run_id, None)
        self.save(as_delayed(row, due_at))

    def claim_applied(self, want: ClaimRequest) -> list[RunRow]:
        """Return the result of a `claim` that was applied before.

        Args:
            want: The request of the worker.
        """
        # The runs that it claimed are not known here; the caller releases what the tickets have claimed.
        return []

    def take(
        self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        """Claim one run for its caller.

        Args:
            row: The run, as its caller would store it.
            insert: Whether to store it if it is new.
            reopen: Whether to begin a new generation if it ended without success.
            want: The request, with one ticket.
            wait: If another run with its concurrency key is active, store it as waiting for that run.

        Returns:
            A word and a row: "claimed"; "held" by a live process; "ended"; "conflict" with another run, agent or input;
            "unknown" and None; or "behind" and the active row with its concurrency key. The run is changed or stored
            only with "claimed", or with "behind" and `wait`.
        """
        if insert and _has_no_key(row):
            added = self.add_new(as_claimed(row, above(want.tickets[0], row.claim_id), want))
            if added is not None:
                self.fence(added.run_id, added.claim_id)
                return ("claimed", added)
        stored = self._existing(row) if insert else self.get(row.run_id)
        if stored is None:
            if not insert:
                return ("unknown", None)
            candidate = row
        elif stored.run_id != row.run_id or (insert and (row.digest, row.tenant) != (stored.digest, stored.tenant)):
            return ("conflict", stored)
        elif stored.status == "running" and is_of_ticket(stored.claim_id, want.tickets[0]):
            return ("claimed", stored)  # by an earlier try, whose answer was lost
        elif stored.status == "running" and not self._has_ended(stored, want):
            return ("held", stored)
        elif stored.status in LIVE:
            candidate = stored
        elif stored.status == "succeeded" or not reopen:
            return ("ended", stored)
        else:
            candidate = as_reopened(stored, want.wall).with_values(origin=row.origin)
        is_active = stored is not None and stored.status in LIVE and not stored.blocked
        active = None if is_active else self._active_run(candidate, want)
        if active is not None:
            if wait:
                candidate = candidate.with_values(
                    blocked=QUEUED_BEHIND, due_at=0.0, origin=candidate.origin and row.origin, holder=want.holder,
                    lease_until=want.lease_now + INLINE_RESERVATION,
                )  # fmt: skip
                _ = self.add(candidate) if stored is None else self.save(candidate)
            return ("behind", active)
        return ("claimed", self._claim(candidate.with_values(origin=row.origin), want.tickets[0], want))

    def _has_ended(self, row: RunRow, want: ClaimRequest) -> bool:
        """Return whether the lease of a row is expired or its process dead."""
        return row.lease_until < want.lease_now or self.is_dead(row.holder)

    def _active_run(self, row: RunRow, want: ClaimRequest) -> RunRow | None:
        """Return an active run for which `row`, which is not active, must wait. It sets abandoned inline runs aside."""
        while row.concurrency_key is not None:
            active = self.all_active_in_group(row.concurrency_key, row.tenant, row.concurrency_limit)
            if len(active) < row.concurrency_limit:
                break
            gone = (each for each in active if each.origin and each.status != "waiting" and self._has_ended(each, want))
            if (abandoned := next(gone, None)) is None:
                return active[0]
            self._set_aside(abandoned, want)
        return None

    def _set_aside(self, row: RunRow, want: ClaimRequest) -> None:
        if row.status == "running":
            self.fence(row.run_id, None)
        self._save(as_abandoned(row, want.wall))

    def settle(self, run_id: str, how: RunUpdate) -> RunRow:
        """Apply an update by the run's claim; see `RunUpdate` for when it is rejected.

        Args:
            run_id: The id of the run.
            how: The update.

        Returns:
            The new row.

        Raises:
            RowChanged: The update does not apply; see `RunUpdate`.
        """
        row = self._expect(run_id, ("running",))
        if row.claim_id != how.claim_id or 0 <= how.cursor != row.mail_seq:
            raise RowChanged
        if row.cancel_at is not None and how.status in ("waiting", "pending"):
            # Its next claim cancels it, so it must not be delayed. A claim that wants to park it will be notified.
            if how.status == "waiting":
                raise RowChanged
            how = how._replace(due_at=0.0)
        if how.take_back:
            self._take_back(Rate.read(how.take_back), row)
        row = as_updated(row, how)
        if how.status == "running":
            if how.renew:
                row = row.with_values(claim_id=above(how.renew, row.claim_id))
                self.fence(run_id, row.claim_id)
            self.save(row)
            return row
        self.fence(run_id, None)
        return self._save(self._enter_group(row) if row.status == "pending" and row.origin else row)

    def _take_back(self, rate: Rate, row: RunRow) -> None:
        """Take the start of a row's claim back, and let the next delayed run start instead."""
        state = taken_back(rate.per, self.shared(rate.name), row.claimed_at or 0.0)
        if state is not None:
            self.save_shared(rate.name, state)
            self._pass_on(row.with_values(due_at=row.claimed_at))

    def settle_applied(self, run_id: str, how: RunUpdate) -> RunRow:
        """Return the result of a `settle` that was applied before, or raise NotApplied.

        Args:
            run_id: The id of the run.
            how: The update.
        """
        row = self.get(run_id)
        if row is None or row.status != how.status or not _released_by(row, how):
            raise NotApplied
        if row.updated_at != how.now and not how.due_at:  # a delayed run may have become due since
            raise NotApplied
        return row

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        """Extend leases.

        Args:
            claims: Pairs of a run id and a claim id.
            lease_until: When the leases end, on the lease clock.

        Returns:
            For each pair, whether the claim is current and whether cancellation of the run was requested.
        """
        results = []
        for run_id, claim_id in claims:
            row = self.get(run_id)
            if row is not None and row.status == "running" and row.claim_id == claim_id:
                self.save(row.with_values(lease_until=lease_until))
                results.append((True, row.cancel_at is not None))
            else:
                results.append((False, False))
        return results

    def post(self, run_id: str, mail: MailboxMessage) -> tuple[str, int]:
        """Put a message into the mailbox of a live run; a waiting run becomes pending.

        Args:
            run_id: The id of the run.
            mail: The message.

        Returns:
            The status of the run before, or "unknown", and the message's number, or 0 if the run is not live.
        """
        row = self.get(run_id)
        if row is None:
            return ("unknown", 0)
        seq = self.message_number(run_id, mail.msg_id)
        if seq is not None or row.status not in LIVE:
            return (row.status, seq or 0)
        seq = row.mail_seq + 1
        self.add_message(run_id, mail._replace(seq=seq))
        after = row.with_values(mail_seq=seq, questions=questions_after(row.questions, mail))
        if mail.kind == "cancel" and row.cancel_at is None:
            # No later claim runs its code, so any worker may end it if its own process has ended or released it.
            after = after.with_values(cancel_at=mail.t, origin="")
            if row.status == "pending":  # its next claim cancels it, so it must not be delayed
                after = after.with_values(due_at=0.0)
            if after.blocked == SET_ASIDE:
                after = self._enter_group(after)
        if row.status == "waiting":
            after = after.with_values(status="pending", due_at=0.0)
        self._save(after)
        if is_rate_limited(row) and not after.due_at:
            self._pass_on(row)
        self.notify("mail")
        return (row.status, seq)

    def post_applied(self, run_id: str, mail: MailboxMessage) -> tuple[str, int]:
        """Return the result of a `post` that was applied before, or raise NotApplied.

        Args:
            run_id: The id of the run.
            mail: The message.
        """
        row, seq = self.get(run_id), self.message_number(run_id, mail.msg_id)
        if row is not None and row.status in LIVE and seq is None:
            raise NotApplied
        return ("unknown" if row is None else row.status, seq or 0)

    def end(self, run_id: str, expect: Sequence[str], status: str, now: float, reason: str) -> RunRow:
        """End a run with one of the statuses `expect`, without a claim.

        Args:
            run_id: The id of the run.
            expect: The statuses that the run may have.
            status: The final status.
            now: The time on the wall clock.
            reason: Why the run ended.

        Returns:
            The new row.
        """
        row = self._expect(run_id, expect)
        self.fence(run_id, None)
        self.notify("mail")
        ended = self._save(
            row.with_values(status=status, blocked=0, due_at=0.0, reason=reason, ended_at=now, updated_at=now)
        )
        if is_rate_limited(row):
            self._pass_on(row)
        return ended

    def _pass_on(self, row: RunRow) -> None:
        """Let the next run of a rate limit start when a delayed run, which left the line, would have started."""
        following = self.next_rate_limited(row.rate or "", row.agent)
        if following is not None and following.due_at > row.due_at > 0:
            self.save(following.with_values(due_at=row.due_at))

    def abandoned(self, run_id: str, claim_id: str, want: ClaimRequest, required: bool) -> bool:
        """Return whether a running run is to be cancelled, and this claim on it is over.

        Args:
            run_id: The run.
            claim_id: The claim.
            want: Contains the time at which the lease must have passed, unless the process of the claim has ended.
            required: Raise RowChanged instead of returning False, so that nothing of the commit is applied.
        """
        row = self.get(run_id)
        is_abandoned = (
            row is not None
            and (row.status, row.claim_id) == ("running", claim_id)
            and row.cancel_at is not None
            and self._has_ended(row, want)
        )
        if required and not is_abandoned:
            raise RowChanged
        return is_abandoned

    def reopen(self, run_id: str, expect: Sequence[str], now: float) -> RunRow:
        """Make a run with one of the terminal statuses `expect` pending in a new generation.

        Args:
            run_id: The id of the run.
            expect: The statuses that the run may have.
            now: The time on the wall clock.

        Returns:
            The new row.
        """
        return self._save(self._enter_group(as_reopened(self._expect(run_id, expect), now).with_values(origin="")))

    def delete(self, run_id: str, generation: int, n: int) -> None:
        """Delete a run that has ended.

        Args:
            run_id: The id of the run.
            generation: The generation of the run.
            n: The `arrival` of its row.

        Raises:
            RowChanged: if it is live, or its generation or `arrival` differs.
        """
        row = self.get(run_id)
        if row is None:
            return
        if row.status in LIVE or (row.generation, row.arrival) != (generation, n):
            raise RowChanged
        self.drop(row)
        self.fence(run_id, None)

    def rewrite(self, run_id: str, old: tuple[str | None, ...], new: tuple[str | None, ...], lease_now: float) -> str:
        """Replace the contents of a run by the same contents, encoded in another way. It notifies no listener.

        Args:
            run_id: The id of the run.
            old: The contents that should be stored, as `contents_of` returns them.
            new: The contents that replace them.
            lease_now: The time on the lease clock.

        Returns:
            "rewritten"; or, without a change, "gone" if the run is not stored, "owned" if it is under a live claim, and
            "changed" if its contents are not `old`.
        """
        row = self.get(run_id)
        if row is None:
            return "gone"
        if row.status == "running" and row.lease_until >= lease_now and not self.is_dead(row.holder):
            return "owned"
        if contents_of(row) != tuple(old):
            return "changed"
        if old != new:
            self.replace_contents(row.with_values(**dict(zip(CONTENTS, new, strict=True))))
        return "rewritten"

    def assign(self, run_id: str, tenant: str) -> str:
        """Give a stored run to a tenant.

        Args:
            run_id: The id of the run.
            tenant: The tenant.

        Returns:
            "assigned"; or, without a change, "gone" if the run is not stored, "running" if a worker executes it, and
            "taken" if a run of the tenant uses its idempotency key, or holds its concurrency key while the run waits.
        """
        row = self.get(run_id)
        if row is None:
            return "gone"
        if row.tenant == tenant:
            return "assigned"
        if row.status == "running":
            return "running"
        if row.idem_key is not None and self.by_key(row.idem_key, tenant) is not None:
            return "taken"
        after = as_assigned(row, tenant)
        if row.concurrency_key is not None and row.status in LIVE:
            if row.status == "pending":
                after = self._enter_group(after)
            elif self._is_full(after):
                return "taken"
        self.move(row, after)
        if row.concurrency_key is not None and row.status in LIVE:
            self._release(row.concurrency_key, row.tenant)
        if is_rate_limited(row):
            self._pass_on(row)
            self.notify("work")
        return "assigned"

    def rewrite_mail(self, run_id: str, changes: Sequence[tuple[MailboxMessage, MailboxMessage]]) -> list[bool]:
        """Replace messages by the same messages, encoded in another way, if they are stored.

        Args:
            run_id: The id of the run.
            changes: Pairs of an old and a new message.

        Returns:
            For each pair of an old and a new message, whether the old message was stored.
        """
        if self.get(run_id) is None:
            return [False] * len(changes)
        return [self.replace_message(run_id, old, new) for old, new in changes]

    def copy(self, row: RunRow, messages: Sequence[MailboxMessage]) -> None:
        """Store a run of another store, and messages of its mailbox, unless they are stored. No listener is notified.

        Args:
            row: The row. It says nothing of the lease in the other store.
            messages: The first messages of its mailbox, or those after messages that were copied before.
        """
        if self.get(row.run_id) is None:
            self.add_copied(row)
            if row.status == "running":
                self.fence(row.run_id, row.claim_id)
        for message in messages:
            if self.message_number(row.run_id, message.msg_id) is None:
                self.add_message(row.run_id, message)

    # -- pools

    def reserve(self, call_id: str, pools: Sequence[PoolLimit], wall: float, forced: bool) -> list[Refusal]:
        """Reserve amounts for a call in all of these pools, or in none. An open reservation of the call is replaced.

        Args:
            call_id: Identifies the call. It begins with the run id and "/".
            pools: The pools, sorted: transactions lock them in this order.
            wall: The time on the wall clock.
            forced: Whether to reserve without regard to the limits: the call was made.

        Returns:
            The pools without room; none if the amounts are reserved.
        """
        now, refusals = self.wall_time(wall), list[Refusal]()
        found = [Pool(self.shared(PREFIX + each.name), each.per, now) for each in pools]
        for pool, want in zip(found, pools, strict=True):
            pool.close(call_id, (0, 0, 0))
            if not forced and (refusal := pool.refusal(want)) is not None:
                refusals.append(refusal)
        for pool, want in zip(found, pools, strict=True):
            pool.tenant, pool.limits = want.tenant, want.limits
            if not refusals:
                pool.reserve(call_id, want)
            self.save_shared(PREFIX + want.name, pool.text())
        return refusals

    def spend(self, names: Sequence[str], call_id: str, amounts: Amounts, wall: float) -> None:
        """Close the reservations of a call, and count what it used. A repeat changes nothing.

        Args:
            names: The names of the pools, sorted.
            call_id: Identifies the call.
            amounts: What the call used.
            wall: The time on the wall clock.
        """
        self._close(names, wall, lambda id: id == call_id, amounts)

    def give_back(self, names: Sequence[str], prefix: str, wall: float) -> None:
        """Drop reservations of calls that were not finished, and states of pools that count nothing.

        Args:
            names: The names of the pools, sorted.
            prefix: What the ids of the calls begin with: the run id and "/", or one id.
            wall: The time on the wall clock.
        """
        self._close(names, wall, lambda id: id.startswith(prefix), (0, 0, 0))

    def _close(self, names: Sequence[str], wall: float, is_wanted: Callable[[str], bool], amounts: Amounts) -> None:
        now = self.wall_time(wall)
        for name in names:
            text = self.shared(PREFIX + name)
            if text is not None:
                pool = Pool(text, None, now)
                for id in [*filter(is_wanted, pool.reservations)]:
                    pool.close(id, amounts)
                self.save_shared(PREFIX + name, pool.text())


class ServerLeases(RunTransitions):
    """`RunTransitions` of a store whose leases are measured by the clock of its server.

    The queue's `lease_now()` is then 0, so the times of leases in its requests are seconds from now. Here they are
    replaced by times of the server.

    Args:
        tx: The open transaction. It provides `now`, the time of the server, and `engine.by_server`, which is False if a
            test passes its own clock.
    """

    def lease_time(self, seconds: float) -> float:
        """Return a time on the lease clock, for seconds from now.

        Args:
            seconds: Seconds from now.
        """
        return self.tx.now + seconds if self.tx.engine.by_server else seconds

    def wall_time(self, wall: float) -> float:
        """Return the time of the server, unless a test passes its own clock."""
        return float(self.tx.now) if self.tx.engine.by_server else wall

    def wanted(self, want: ClaimRequest) -> ClaimRequest:
        """Return a request with times on the lease clock.

        Args:
            want: The request, with seconds from now.
        """
        return want._replace(lease_until=self.lease_time(want.lease_until), lease_now=self.lease_time(want.lease_now))

    def claim_next(self, want: ClaimRequest) -> list[RunRow]:
        """Do as `RunTransitions.claim_next`."""
        return super().claim_next(self.wanted(want))

    def take(
        self, row: RunRow, insert: bool, reopen: bool, want: ClaimRequest, wait: bool = False
    ) -> tuple[str, RunRow | None]:
        """Do as `RunTransitions.take`."""
        return super().take(row, insert, reopen, self.wanted(want), wait)

    def beat(self, claims: Sequence[tuple[str, str]], lease_until: float) -> list[tuple[bool, bool]]:
        """Do as `RunTransitions.beat`."""
        return super().beat(claims, self.lease_time(lease_until))

    def abandoned(self, run_id: str, claim_id: str, want: ClaimRequest, required: bool) -> bool:
        """Do as `RunTransitions.abandoned`."""
        return super().abandoned(run_id, claim_id, self.wanted(want), required)

    def rewrite(self, run_id: str, old: tuple[str | None, ...], new: tuple[str | None, ...], lease_now: float) -> str:
        """Do as `RunTransitions.rewrite`."""
        return super().rewrite(run_id, old, new, self.lease_time(lease_now))


def _has_no_key(row: RunRow) -> bool:
    """Whether nothing but the id of a new row decides if it can be stored and claimed."""
    return row.idem_key is None and row.concurrency_key is None


def is_of_ticket(claim_id: str, ticket: str) -> bool:
    """Whether a claim was made with a ticket. Its id may be raised above the run's last claim id; see `above`."""
    return claim_id[-ULID_RANDOM_LENGTH:] == ticket[-ULID_RANDOM_LENGTH:]


def _released_by(row: RunRow, how: RunUpdate) -> bool:
    """Return whether the row's claim is the claim of `how`, or the claim that it was renewed to."""
    return row.claim_id == (above(how.renew, how.claim_id) if how.renew else how.claim_id)


OPS = (
    "insert", "claim", "take", "settle", "beat", "post", "abandoned", "end", "reopen", "delete", "rewrite",
    "rewrite_mail", "assign", "save_process", "drop_process", "copy", "keep_arrival",
    "reserve", "spend", "give_back", "forget_shared",
)  # fmt: skip


def operations(rows: Callable[[Any], RunTransitions]) -> Mapping[str, Callable[..., Any]]:
    """Return the operations of a queue by name; each takes the open transaction and the arguments of its `Op`.

    Args:
        rows: Makes the backend's `RunTransitions` of an open transaction: the class itself.
    """
    return {f"queue.{verb}": _bound(rows, verb) for verb in OPS}


def replays(rows: Callable[[Any], RunTransitions]) -> Mapping[str, Callable[..., Any]]:
    """Return, by name, functions that return the result of an operation which may have been committed before.

    An engine calls such a function if the claim that repeats the operation is not current any more. The function raises
    `NotApplied` if the operation was not committed.
    """
    return {f"queue.{verb}": _bound(rows, f"{verb}_applied") for verb in ("insert", "claim", "settle", "post")}


def _bound(rows: Callable[[Any], RunTransitions], method: str) -> Callable[..., Any]:
    def run(tx: Any, *args: Any) -> Any:
        return getattr(rows(tx), method)(*args)

    return run


def operation_set(
    rows: Callable[[Any], RunTransitions],
    migrations: Sequence[str] = (),
    tables: Sequence[str] = (),
    fence: Callable[[Any, str], str | None] | None = None,
    short_reads: Mapping[Callable[..., Any], Callable[..., Any]] | None = None,
    **options: Any,
) -> OperationSet:
    """Return all that an engine needs to know about the queue's operations.

    Args:
        rows: The backend's `RunTransitions`.
        migrations: SQL scripts; script `i` brings the schema from version `i` to `i` + 1.
        tables: Names of the dicts that it needs on the memory engine.
        fence: Returns the current fencing token of a run, given the open transaction and the run id. Without it, the
            engine stores the tokens.
        short_reads: On SQLite: see `OperationSet.short_reads`.
        **options: On a `ThreadedEngine`: `one_statement`, `batches` and `lock` of `OperationSet`.
    """
    slow = dict.fromkeys(("queue.delete", "queue.rewrite", "queue.rewrite_mail", "queue.copy"), always)
    reads = short_reads or {}
    return OperationSet(
        "queue", operations(rows), replays(rows), migrations, tables, frozenset(), slow, fence, reads, **options
    )
