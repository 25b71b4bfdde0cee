"""Records of a queue: the row of a run, messages of its mailbox, claim requests and updates."""

from __future__ import annotations

import datetime as _dt
import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from .._core.clock import SYSTEM, aware
from .._core.codec.json import decode_dict, differing_keys, same_tree
from .._core.former_names import keep_former_arguments, keep_former_names
from .._core.ids import known_uuid
from .._engines.payloads import why_unreadable
from ..errors import (
    MOST_NAMED,
    IdempotencyConflict,
    StorageCorrupt,
    StorageError,
    UnserialisableResult,
    brief,
    brief_kind,
)
from ..limits import OF_TENANT
from .contents import ANY_CONTENTS, ContentFilter, RunContents

LIVE = ("pending", "running", "waiting")
SCHEDULE = "agent-runtime.schedule"  # the agent of the rows of schedules, which are live until they are deleted
SCHEDULE_REASON = "schedule"  # the first word of their reason
#: Values of `RunRow.blocked`. QUEUED_BEHIND: another run of its concurrency key comes first, or it is not due yet.
#: SET_ASIDE: an inline run whose process has ended, until its process or a caller takes it again; others may go first.
QUEUED_BEHIND, SET_ASIDE = 1, 2
CODE_VERSION = "code_version"  # kind of a mailbox message that names the version whose code continues its run
LIMITS = "limits"  # kind of a mailbox message that sets limits of its run
MESSAGE = "message"  # kind of a mailbox message that `runner.send` stored for the agent
RESTORED = "restored"  # kind of a mailbox message: the store was restored from a copy that may lack steps of the run
CONFIRMED = "confirmed"  # name of such a message after a person has confirmed that the copy lacks none
IN_DOUBT = "in_doubt:"  # begins the name of a question about a step in doubt
QUESTION = "question"  # kind of a mailbox message in which the run itself asks a person; its id is the request id
CLOSED = "closed"  # kind of a mailbox message with the id of an answer: the run does not wait for one any more
WAIT_CANCELLED = '"cancelled"'  # payload of such a message if the code of the run has cancelled the wait
ACTED = "acted"  # kind of a mailbox message that says who has answered, cancelled or resumed the run
SIGNAL_ONLY = "arc.signal:"  # begins the id of a signal that answers no approval
ANSWER = "arc.answer:"  # begins the id of a message that answers one request
CANCELLED_BY_CALLER = "cancel"  # reason of a run that was cancelled while no worker had a claim on it
RATE_LIMITED = "rate_limit"  # reason of a pending run that its rate limit delays
ABANDONED = "cancel abandoned"  # reason of a run that was cancelled after its claim was over, by no worker


class RowChanged(Exception):
    """The row has changed since the writer read it. Nothing was written: read it again and decide again."""

    def __str__(self) -> str:
        return (
            super().__str__()
            or "the row has changed since it was read; nothing was written. Read it again and decide again"
        )


_Made = TypeVar("_Made")


class RunRow(NamedTuple):
    """A run as its queue stores it.

    A backend stores all fields and orders rows by `priority` and `arrival`. Only `RunTransitions` decides how they
    change. Times are seconds since 1970 on the wall clock; `lease_until` is on the clock of `RunQueue.lease_now`.

    Attributes:
        run_id: A UUID in lower case with dashes; unique.
        agent: The key of the agent.
        input: The input, a JSON object.
        digest: The digest of agent and input. The digest of a second run with the same id or idempotency key must be
            equal.
        metadata: What the caller stored with the run, a JSON object.
        priority: 32 bits; greater priorities are claimed first.
        created_at: When the run was stored.
        due_at: When a delayed or waiting run becomes ready; 0: it is ready now.
        expires_at: A run that has not started by then never starts.
        deadline: The run is stopped then.
        run_key: The caller's own run id, if it was no UUID.
        idem_key: Idempotency key; unique within the tenant.
        parent_id: The run that called this child run.
        concurrency_key: Of the live runs of a key and tenant, at most `concurrency_limit` have `blocked` 0.
        origin: "inline": only its own process or an explicit `take` may claim it; "": any worker.
        blocked: 0: may be claimed; blocked by its concurrency key if 1 (queued) or 2 (set aside).
        status: The status of the run, as in `RunStatus`.
        generation: One more each time the run is reopened.
        failures: Attempts that failed.
        crashes: Attempts whose claim was not released before its lease ended.
        crashes_in_row: Crashes in a row without a new record of a step in between.
        min_step_count: Step ends in the journal when last counted, its minimum; -1: not counted yet.
        parked: 1: the next claim resumes a wait or a released attempt, instead of starting an attempt.
        reason: What the run waits for, or why it ended.
        claim_id: Fencing token of the last claim; of the current claim while running.
        worker: Name of the worker that claimed it.
        holder: Id of the process that claimed it; "" if the store cannot detect dead processes.
        lease_until: When the claim ends unless a heartbeat extends it.
        claimed_at: Last claim.
        started_at: First claim.
        ended_at: None while the run is live.
        updated_at: When the run was stored, claimed, updated, ended or reopened, or became due.
        cancel_at: When its cancellation was requested.
        output: The result of the run, as JSON.
        error: Why the run failed, as JSON.
        mail_seq: Number of the last message in its mailbox.
        arrival: Order of arrival, from 1, set by `RunTransitions.add`; 0: not stored yet.
        conversation: The `conversation_id` of the input.
        questions: Open questions to a person, as `questions_after` writes them.
        tenant: Whose run it is: a column of each key; "" for a run without a tenant.
        concurrency_limit: How many live runs of its concurrency key may have `blocked` 0 when this run starts.
        rate: The rate limit of its starts, as `RateLimit.text` writes it; None: no limit.
        turn: Runs with different values take turns in claims of equal priority; None: it takes no turns.
    """

    run_id: str
    agent: str
    input: str = "{}"
    digest: str = ""
    metadata: str = "{}"
    priority: int = 0
    created_at: float = 0.0
    due_at: float = 0.0
    expires_at: float | None = None
    deadline: float | None = None
    run_key: str | None = None
    idem_key: str | None = None
    parent_id: str | None = None
    concurrency_key: str | None = None
    origin: str = ""
    blocked: int = 0
    status: str = "pending"
    generation: int = 1
    failures: int = 0
    crashes: int = 0
    crashes_in_row: int = 0
    min_step_count: int = -1
    parked: int = 0
    reason: str = ""
    claim_id: str = ""
    worker: str = ""
    holder: str = ""
    lease_until: float = 0.0
    claimed_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    updated_at: float = 0.0
    cancel_at: float | None = None
    output: str | None = None
    error: str | None = None
    mail_seq: int = 0
    arrival: int = 0
    conversation: str | None = None
    questions: str = ""
    tenant: str = ""
    concurrency_limit: int = 1
    rate: str | None = None
    turn: str | None = None

    @property
    def attempt(self) -> int:
        """Number of the run attempt, from 1."""
        return 1 + self.failures + self.crashes

    def with_values(self, **values: Any) -> RunRow:
        """Return the row with other values. Faster than `_replace`, which looks up all fields by name.

        Args:
            **values: The new values by the names of the fields.
        """
        cells = list(self)
        for name, value in values.items():
            cells[_PLACE[name]] = value
        return tuple.__new__(RunRow, cells)

    def decoded(self, column: str, made: Callable[[Any], _Made]) -> _Made:
        """Return `made(value)` of a column.

        Args:
            column: The name of the field.
            made: Makes a value from the stored value.

        Raises:
            StorageCorrupt: if that fails. It names the run and the column.
            UnknownEncryptionKey: if it is encrypted, and there is no codec.
        """
        value = self[_PLACE[column]]
        try:
            return made(value)
        except (ValueError, TypeError, OverflowError, RecursionError, StorageCorrupt) as error:
            wrong = damaged(self.run_id, column, value)
            if isinstance(error, UnserialisableResult | StorageCorrupt) and isinstance(wrong, StorageCorrupt):
                raise
            raise wrong from error


#: Values that lists leave out with the input, because a store may have to read a long input to find them.
_BEHIND_INPUT = {"concurrency_limit": 1, "rate": None, "turn": None}
_PLACE = {name: place for place, name in enumerate(RunRow._fields)}
#: Fields by their names in 0.6.0, which are the names of their columns in SQLite and in the script of Redis.
_FORMER = {
    "lane": "concurrency_key", "held": "blocked", "stalls": "crashes_in_row", "mark": "min_step_count", "n": "arrival",
}  # fmt: skip
#: The columns of a row in a store, in the order of the fields.
COLUMNS = tuple({new: old for old, new in _FORMER.items()}.get(name, name) for name in RunRow._fields)


def unreadable(row: RunRow) -> StorageError | None:
    """Return why the contents of a claimed run cannot be read by this process, None if they can."""
    text = row.input
    if type(text) is str and text[:1] == "{" == row.metadata[:1]:
        return None
    found = [why_unreadable(f"{name} of run {row.run_id}", getattr(row, name)) for name in ("input", "metadata")]
    return found[0] or found[1]


def damaged(run_id: object, column: str, value: object) -> StorageError:
    """Return the error for a column with a value that the library does not write, or that is encrypted."""
    return why_unreadable(f"{column} of run {run_id}", value) or StorageCorrupt(
        f"run {brief(run_id)}: {column} must be a value that this library wrote, got {brief_kind(value)}. "
        "The row is not modified: restore a backup"
    )


#: The columns of a row with contents, and with the digest of contents: those that `queue.rewrite` replaces.
CONTENTS = ("input", "digest", "metadata", "output", "error")


def contents_of(row: RunRow) -> tuple[str | None, ...]:
    """Return the values of `CONTENTS` in a row."""
    return tuple(getattr(row, name) for name in CONTENTS)


class RunFilter(NamedTuple):
    """Which rows `read("find", …)` returns.

    They come in order of `arrival`, or with `newest_first` in descending order of (`created_at`, `arrival`).

    Attributes:
        statuses: The status is one of these; None: any.
        agent: Key of the agent; None: any.
        since: Created at this time or later, in wall seconds.
        ended_before: Ended before this time, in wall seconds.
        after: `arrival` greater than this.
        limit: At most so many.
        until: Created before, wall seconds.
        prefix: The run id or the run key begins with this.
        parent: Run id of the parent.
        conversation: The `conversation_id` of the input; None: any.
        concurrency_key: The concurrency key; None: any.
        reason: The reason is this word, or begins with this word and a space.
        retrying: Live, after a failed attempt.
        asking: Live, with an open question.
        in_doubt: Live, with an open question about a step in doubt.
        newest_first: In descending order of (`created_at`, `arrival`).
        before: With `newest_first`: (created_at, arrival) less than this.
        light: Leave out `input`, `output` and `metadata`: they are "{}", None and "{}". The fields after `tenant` are
            left out too: they have their defaults.
        tenant: The tenant; "": of no tenant; None: any.
        run_key: The run key; None: any.
        without_input: Leave out `input` and `output`, and the fields after `tenant`.
        min_attempts: At least so many attempts. This condition and `contents` are for `runner.runs`, which reads at
            most 10,000 runs. Stores do not decide them.
        contents: Conditions on the contents of the run.

    Examples:
        >>> from agent_runtime_core.queue import RunFilter, RunRow
        >>> row = RunRow("b1a0c6c4-5d3f-4c0e-9d0a-0c5f0c5f0c5f", "report", status="failed", arrival=1)
        >>> RunFilter(statuses=("failed",)).admits(row), RunFilter(agent="other").admits(row)
        (True, False)
    """

    statuses: tuple[str, ...] | None = None
    agent: str | None = None
    since: float = 0.0
    ended_before: float | None = None
    after: int = 0
    limit: int = 1000
    until: float | None = None
    prefix: str | None = None
    parent: str | None = None
    conversation: str | None = None
    concurrency_key: str | None = None
    reason: str | None = None
    retrying: bool = False
    asking: bool = False
    in_doubt: bool = False
    newest_first: bool = False
    before: tuple[float, int] | None = None
    light: bool = False
    tenant: str | None = None
    run_key: str | None = None
    without_input: bool = False
    min_attempts: int = 1
    contents: ContentFilter = ANY_CONTENTS

    @property
    def of_store(self) -> RunFilter:
        """The same filter without the conditions that stores do not decide."""
        return self._replace(min_attempts=1, contents=ANY_CONTENTS)

    def admits(self, row: RunRow, contents: RunContents | None = None) -> bool:
        """Return whether a row is one of them, apart from `limit`.

        Args:
            row: A row.
            contents: The contents of the run. None: those in the row.
        """
        return (
            self._of_row(row)
            and row.attempt >= self.min_attempts
            and (self.contents == ANY_CONTENTS or self.contents.admits(contents or row_contents(row)))
        )

    def _of_row(self, row: RunRow) -> bool:
        return (
            (self.statuses is None or row.status in self.statuses)
            and (self.agent is None or row.agent == self.agent)
            and row.created_at >= self.since
            and (self.until is None or row.created_at < self.until)
            and (self.ended_before is None or (row.ended_at is not None and row.ended_at < self.ended_before))
            and row.arrival > self.after
            and (self.before is None or (row.created_at, row.arrival) < self.before)
            and (
                self.prefix is None or row.run_id.startswith(self.prefix) or (row.run_key or "").startswith(self.prefix)
            )
            and (self.parent is None or row.parent_id == self.parent)
            and (self.conversation is None or row.conversation == self.conversation)
            and (self.concurrency_key is None or row.concurrency_key == self.concurrency_key)
            and (self.tenant is None or row.tenant == self.tenant)
            and (self.run_key is None or row.run_key == self.run_key)
            and (self.reason is None or row.reason == self.reason or row.reason.startswith(f"{self.reason} "))
            and (not self.retrying or (row.status in LIVE and row.failures > 0))
            and (not self.asking or (row.status in LIVE and row.questions != ""))
            and (not self.in_doubt or (row.status in LIVE and f" {IN_DOUBT}" in row.questions))
        )

    def listed(self, rows: Iterable[RunRow]) -> list[RunRow]:
        """Return the stored rows that `read("find", …)` returns. For a store without indexes.

        Args:
            rows: All stored rows.
        """
        found = (row for row in rows if self.admits(row))
        if self.newest_first:
            ordered = heapq.nlargest(self.limit, found, key=lambda row: (row.created_at, row.arrival))
        else:
            ordered = heapq.nsmallest(self.limit, found, key=lambda row: row.arrival)
        return [self.shortened(row) for row in ordered]

    def shortened(self, row: RunRow) -> RunRow:
        """Return a row without the values that `light` and `without_input` leave out.

        Args:
            row: A row.
        """
        if self.light:
            return light(row)
        return row.with_values(input="{}", output=None, **_BEHIND_INPUT) if self.without_input else row


def row_contents(row: RunRow) -> RunContents:
    """Return the contents of a run that its row has."""
    texts = (row.input, row.metadata, row.output, row.error)
    return RunContents(row.metadata, row.error, None, (row.run_id, row.run_key), texts)


def waits_since_stored(row: RunRow) -> bool:
    """Return whether a run has waited for a worker since it was stored.

    A run that was delayed, retried, released or reopened has not: it waits since later, and no index has these times.
    Nor does a run that waits for its concurrency key or for its own process.

    Args:
        row: A row.
    """
    is_ready = row.status == "pending" and row.due_at == 0 and row.blocked == 0 and row.origin == ""
    return is_ready and row.updated_at == row.created_at


class RunCounts(NamedTuple):
    """How many runs a queue stores.

    Attributes:
        runs: The number of runs by status and agent.
        oldest_pending: Of each agent, when the oldest run was stored that has waited for a worker since then, wall
            seconds; see `waits_since_stored`.
        due_later: Delayed and waiting runs with a time at which they become ready.
        waiting: Waiting runs by the first word of their reason.
    """

    runs: dict[tuple[str, str], int]
    oldest_pending: dict[str, float]
    due_later: int
    waiting: dict[str, int]

    @classmethod
    def of(cls, rows: Iterable[RunRow], tenant: str | None = None) -> RunCounts:
        """Count the stored rows of a tenant; None: all rows. For a store without indexes.

        Args:
            rows: All stored rows.
            tenant: Count only the runs of this tenant. None: all.

        Returns:
            The counts.
        """
        rows = [row for row in rows if not tenant or row.tenant == tenant]
        oldest: dict[str, float] = {}
        for row in rows:
            if waits_since_stored(row):
                oldest[row.agent] = min(row.created_at, oldest.get(row.agent, row.created_at))
        return cls(
            dict(Counter((row.status, row.agent) for row in rows)),
            oldest,
            sum(row.due_at > 0 for row in rows),
            dict(Counter(row.reason.partition(" ")[0] for row in rows if row.status == "waiting")),
        )

    def of_runs(self) -> RunCounts:
        """Return the counts without the schedules."""
        waiting = self.runs.get(("waiting", SCHEDULE), 0)
        return RunCounts(
            {key: count for key, count in self.runs.items() if key[1] != SCHEDULE},
            {agent: at for agent, at in self.oldest_pending.items() if agent != SCHEDULE},
            self.due_later - waiting,
            {reason: count for reason, count in self.waiting.items() if reason != SCHEDULE_REASON},
        )


class RunSnapshot(NamedTuple):
    """The fields of a run that its worker, and those who wait for its end, poll.

    Attributes:
        status: The status of the run.
        claim_id: The id of its last claim.
        mail_seq: The number of the last message in its mailbox.
        cancelled: Whether cancellation was requested.
    """

    status: str
    claim_id: str
    mail_seq: int
    cancelled: bool


class ClaimRequest(NamedTuple):
    """A request of one worker for as many runs as it contains tickets.

    `RunTransitions` passes it to `expired_leases`, `claimable` and `abandoned_inline`. These read `agents` and
    `lease_now`; the other fields are for the transitions.

    Attributes:
        tickets: A new ULID for each run wanted; the run's claim id is made of it, above its last claim id.
        worker: The name of the worker.
        holder: Id of its process, or "".
        lease_until: When the leases of the claims end, on the lease clock.
        lease_now: The time on the lease clock before which a lease must end for its claim to be taken over.
        wall: The time on the wall clock.
        agents: The keys of the agents that the worker runs; None: all, see `admits`.
        ready_only: Claim ready runs only: ignore expired leases and timers.
        wait_name: If there is no run, wait in the store under this name, where the store can do that.
        wait_seconds: For so long; an earlier request under the same name ends.
        after_turn: Of the ready runs of the greatest priority, claim first those with the next greater `RunRow.turn`,
            in a circle. None: claim in order of arrival, whatever their turns.
    """

    tickets: tuple[str, ...]
    worker: str
    holder: str
    lease_until: float
    lease_now: float
    wall: float
    agents: tuple[str, ...] | None
    ready_only: bool = False
    wait_name: str | None = None
    wait_seconds: float = 0.0
    after_turn: str | None = None

    def admits(self, agent: str) -> bool:
        """Return whether the request claims rows of an agent. The rows of schedules are no runs: who claims names them.

        Args:
            agent: The key of the agent.
        """
        return agent != SCHEDULE if self.agents is None else agent in self.agents


class ProcessRow(NamedTuple):
    """A runner that claims runs, as its queue stores it. It renews the row with its heartbeat.

    Attributes:
        process_id: A ULID, new for each runner.
        worker: The name of the worker.
        host: The host name of its machine.
        pid: The id of its process on the machine.
        started_at: When the runner was created, in wall seconds.
        version: The version of this library.
        agents: The keys of the agents that it has registered.
        slots: Runs that its loop executes at the same time; 0 without a loop.
        holder: The id of its process, as in `RunRow.holder`.
        seen_at: When the row was last renewed, wall seconds.
        alive_until: When the process counts as ended unless it renews the row, on the lease clock.
    """

    process_id: str
    worker: str
    host: str
    pid: int
    started_at: float
    version: str
    agents: tuple[str, ...]
    slots: int
    holder: str
    seen_at: float
    alive_until: float


class RunUpdate(NamedTuple):
    """What becomes of a run whose claim writes this: the values of the row's fields of the same names.

    `RunTransitions.settle` rejects it with `RowChanged` if `claim_id` is not the row's, if `cursor` is not its last
    message, or if `status` is "waiting" and cancellation was requested. If cancellation was requested and `status` is
    "pending", the run is ready immediately instead of at `due_at`.

    Attributes:
        claim_id: The claim that writes.
        status: "running" keeps the claim; any other status ends it.
        now: The time of the update, in wall seconds.
        due_at: When the run becomes ready, in wall seconds; 0: it is ready now.
        parked: 1 if the next claim resumes a wait or a released attempt, instead of starting an attempt.
        reason: What the run waits for, or why it ended.
        failures: The attempts that failed.
        crashes: The attempts whose claim was not released before its lease ended.
        crashes_in_row: The crashes in a row without a new record of a step in between.
        min_step_count: The step ends in the journal when last counted; -1: not counted yet.
        output: The result of the run, as JSON.
        error: Why the run failed, as JSON.
        cursor: Number of the last message that the claim has read; -1: do not check.
        renew: A ticket: the running claim gets a new id, and all writes under the old id are rejected.
        take_back: The rate limit that has counted the claim as a start, if nothing ran under the claim: the start is
            taken back; see `counted_rate`. "": none.
    """

    claim_id: str
    status: str
    now: float
    due_at: float = 0.0
    parked: int = 0
    reason: str = ""
    failures: int = 0
    crashes: int = 0
    crashes_in_row: int = 0
    min_step_count: int = -1
    output: str | None = None
    error: str | None = None
    cursor: int = -1
    renew: str = ""
    take_back: str = ""


def answer_id(request_id: str, message_id: str | None = None) -> str:
    """Return the id of a message that answers this request and no other."""
    return f"{ANSWER}{request_id}" if message_id is None else f"{ANSWER}{request_id}:{message_id}"


def answered_request(msg_id: str) -> str | None:
    """Return the id of the request that a message answers, None if the message may answer any request."""
    return msg_id.removeprefix(ANSWER).partition(":")[0] if msg_id.startswith(ANSWER) else None


def light(row: RunRow) -> RunRow:
    """Return the row without its input, output and metadata; see `RunFilter.light`."""
    return row.with_values(input="{}", output=None, metadata="{}", **_BEHIND_INPUT)


class OpenQuestion(NamedTuple):
    """A question that a run asks a person now, as its row shows it."""

    request_id: str
    asked_at: float  # wall seconds
    name: str  # with spaces instead of line breaks


def end_of_prefix(prefix: str) -> str | None:
    """Return the first string, in the order of code points, after all that begin with a prefix; None if none is."""
    prefix = prefix.rstrip("\U0010ffff")
    if not prefix:
        return None
    following = ord(prefix[-1]) + 1
    return prefix[:-1] + chr(0xE000 if following == 0xD800 else following)


def questions_after(questions: str, mail: MailboxMessage) -> str:
    """Return `RunRow.questions` after a new message of the run's mailbox.

    Each question is a line "<request id> <wall seconds> <name>".
    """
    if mail.kind == QUESTION:
        name = mail.name.replace("\n", " ")
        return f"{questions}{mail.msg_id} {mail.t!r} {name}\n"
    request = answered_request(mail.msg_id)
    if request is None or not questions:
        return questions
    return "".join(f"{line}\n" for line in questions.split("\n")[:-1] if not line.startswith(f"{request} "))


def open_questions(row: RunRow) -> list[OpenQuestion]:
    """Return what a run asks people now, in the order in which it asked."""
    if row.status not in LIVE or not row.questions:
        return []
    parts = (line.split(" ", 2) for line in row.questions.split("\n")[:-1])
    return [OpenQuestion(request_id, float(asked_at), name) for request_id, asked_at, name in parts]


class MailboxMessage(NamedTuple):
    """A message in the mailbox of a run.

    A backend stores the messages of each run by `seq` until the run is deleted, and finds a message by its `msg_id`.

    Attributes:
        kind: "signal", "child" (the result of a child run), "message" (for the agent), "question" (to a person),
            "closed" (its id is the id of an answer: the run has stopped waiting for an answer), "cancel", "limits" or
            "acted" (who did what).
        name: The name of the signal or question, the run id of the child, or what was done; else "".
        payload: The contents, as JSON.
        msg_id: Unique in the mailbox; a second message with the same id is dropped.
        t: When it was posted, wall seconds.
        seq: Its number in the mailbox, from 1, set by `RunTransitions.post`.
    """

    kind: str
    name: str
    payload: str
    msg_id: str
    t: float
    seq: int = 0


keep_former_names(RunRow, changed="with_values", told="decoded", **_FORMER)
keep_former_names(RunUpdate, stalls="crashes_in_row", mark="min_step_count")
keep_former_names(RunFilter, lane="concurrency_key")
# A backend of 0.6.0 calls `row._replace(n=…)` to add a row, and a program `find(RunFilter(lane=…))`.
keep_former_arguments(RunRow, "_replace", **_FORMER)
keep_former_arguments(RunFilter, "__new__", lane="concurrency_key")
keep_former_names(ClaimRequest, light="ready_only", seconds="wait_seconds", standing="wait_name")


def as_claimed(row: RunRow, ticket: str, request: ClaimRequest) -> RunRow:
    """Return the row under a new claim. If it was running, its last worker never released it: that is a crash."""
    crash = 1 if row.status == "running" else 0
    return row.with_values(
        status="running",
        claim_id=ticket,
        worker=request.worker,
        holder=request.holder,
        lease_until=request.lease_until,
        claimed_at=request.wall,
        started_at=row.started_at or request.wall,
        updated_at=request.wall,
        due_at=0.0,
        blocked=0,
        reason="" if row.reason == RATE_LIMITED else row.reason,
        crashes=row.crashes + crash,
        crashes_in_row=row.crashes_in_row + crash,
        parked=0 if crash else row.parked,
    )


def as_delayed(row: RunRow, due_at: float) -> RunRow:
    """Return the row of a run that its rate limit delays. If it was running, its worker never released it."""
    crash = 1 if row.status == "running" else 0
    return row.with_values(
        status="pending", due_at=due_at, reason=RATE_LIMITED, parked=0, lease_until=0.0, crashes=row.crashes + crash,
        crashes_in_row=row.crashes_in_row + crash,
    )  # fmt: skip


def as_assigned(row: RunRow, tenant: str) -> RunRow:
    """Return the row as a run of a tenant. A rate limit that delays it is checked again, for that tenant."""
    rate, mark, _ = (row.rate or "").partition(OF_TENANT)
    after = row.with_values(
        tenant=tenant,
        rate=rate + mark + tenant if mark else row.rate,
        turn=tenant if row.turn == row.tenant else row.turn,
    )
    return after.with_values(due_at=0.0, reason="") if is_rate_limited(row) else after


def is_rate_limited(row: RunRow) -> bool:
    """Return whether a rate limit delays a run."""
    return row.rate is not None and row.reason == RATE_LIMITED and row.status == "pending" and row.due_at > 0


def as_reopened(row: RunRow, now: float) -> RunRow:
    """Return the row in a new generation: counters, result and cancellation are reset."""
    return row.with_values(
        status="pending", generation=row.generation + 1, failures=0, crashes=0, crashes_in_row=0, min_step_count=-1,
        parked=0,
        reason="", ended_at=None, expires_at=None, cancel_at=None, output=None, error=None, due_at=0.0, updated_at=now,
    )  # fmt: skip


def as_abandoned(row: RunRow, now: float) -> RunRow:
    """Return the row of an inline run whose process has ended: it blocks no other run of its concurrency key."""
    crash = 1 if row.status == "running" else 0
    return row.with_values(
        status="pending", blocked=SET_ASIDE, lease_until=0.0, updated_at=now, crashes=row.crashes + crash,
        crashes_in_row=row.crashes_in_row + crash, parked=0 if crash else row.parked,
    )  # fmt: skip


def as_updated(row: RunRow, how: RunUpdate) -> RunRow:
    """Return the row with the values of an update by its claim."""
    ended = how.now if how.status not in LIVE else None
    return row.with_values(
        status=how.status, due_at=how.due_at, parked=how.parked, reason=how.reason, failures=how.failures,
        crashes=how.crashes, crashes_in_row=how.crashes_in_row, min_step_count=how.min_step_count, output=how.output,
        error=how.error,
        ended_at=ended, updated_at=how.now, lease_until=row.lease_until if how.status == "running" else 0.0,
    )  # fmt: skip


def same_run(asked: RunRow, stored: RunRow) -> None:
    """Check that a stored run is the run that the caller submits.

    Raises:
        IdempotencyConflict: if the run stored under the same id or idempotency key differs in agent or input, or the
            run stored under the same id differs in tenant or idempotency key.
    """
    from_key = asked.run_id != stored.run_id
    if asked.tenant != stored.tenant:
        # Nothing else is named: the caller may not know what the other tenant's run is.
        differing = ["tenant"]
    elif not same_input(asked, stored):
        differing = _differing_fields(asked, stored)
    elif asked.idem_key not in (None, stored.idem_key) and not from_key:
        # The key would not be stored: a later call with this key alone would get another run.
        differing = ["idempotency_key"]
    else:
        return
    what, value = ("idempotency key", asked.idem_key) if from_key else ("run id", asked.run_key or asked.run_id)
    raise IdempotencyConflict(
        f"{what} {value!r} was used before with another {_listed(differing)}. Use another {what} for another run"
    )


def same_message(message_id: str, asked: MailboxMessage, stored: MailboxMessage) -> None:
    """Check that the message stored under an id is the message that the caller sends.

    Raises:
        IdempotencyConflict: The kind, name or content of the stored message differs.
    """
    if (asked.kind, asked.name) != (stored.kind, stored.name):
        differing = "another name"
    elif not same_tree(asked.payload, stored.payload):
        differing = "other content"
    else:
        return
    raise IdempotencyConflict(
        f"message id {brief(message_id)} was used before with {differing}. Use another message id for another message"
    )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _differing_fields(asked: RunRow, stored: RunRow) -> list[str]:
    """Return the names of the differing fields. Their values may be texts of customers, which no log should contain."""
    agent = ["agent_key"] if asked.agent != stored.agent else []
    # Only the first level: a key further down may be data, such as an address.
    return agent + [f"input.{brief(key)[1:-1]}" for key in differing_keys(stored.input, asked.input)]


def same_input(asked: RunRow, stored: RunRow) -> bool:
    """Return whether two runs have the same tenant, agent and input.

    The order of an input's keys does not matter here, although the digest depends on it.
    """
    if asked.digest == stored.digest:
        return asked.tenant == stored.tenant
    if (asked.tenant, asked.agent) != (stored.tenant, stored.agent):
        return False
    return stored.decoded("input", partial(same_tree, asked.input))


@dataclass
class QueuedRun:
    """A claimed or submitted run. `attempt` is 1 plus the number of failures and crashes.

    Attributes:
        run_id: The id of the run.
        agent_key: The key of the agent.
        input: The input of the run.
        metadata: What the caller stored with the run.
        priority: Runs with a greater priority are claimed first.
        attempt: 1 plus the number of failures and crashes.
        created_at: When the run was stored.
        scheduled_at: When the run becomes ready; None for a run that is ready.
        claim_id: The id of the claim, or "".
        row: The row that the run was made of.
    """

    run_id: UUID
    agent_key: str
    input: dict[str, Any]
    metadata: dict[str, Any] = field(default_factory=dict)
    priority: int = 0
    attempt: int = 1
    created_at: _dt.datetime = field(default_factory=lambda: aware(SYSTEM.wall()))
    scheduled_at: _dt.datetime | None = None
    claim_id: str = ""
    row: RunRow | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, row: RunRow) -> QueuedRun:
        """Return the public form of a row."""
        run = cls(
            run_id=row.decoded("run_id", known_uuid),
            agent_key=row.agent,
            input={},
            priority=row.priority,
            attempt=row.attempt,
            created_at=row.decoded("created_at", aware),
            scheduled_at=row.decoded("due_at", aware) if row.due_at > 0 else None,
            claim_id=row.claim_id,
            row=row,
        )
        # Decoded on first access. Otherwise a run that cannot be decoded here would make the claim fail, and the other
        # runs of that claim would be lost.
        del run.input, run.metadata
        return run

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            row = self.__dict__.get("row")
            if row is None or name not in ("input", "metadata"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            value = row.decoded(name, decode_dict)
            setattr(self, name, value)
            return value
