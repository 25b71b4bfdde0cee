"""StateStore: the journal, checkpoint and status of runs."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import decode_dict, digest, encode_as
from .._core.former_names import keep_former_names
from .._core.ids import stored_id, unbroken
from .._core.validation import must
from .._engines.base import Backend, Guard, NotApplied, Op, OperationSet
from .._engines.payloads import UNREADABLE, PayloadFields, Payloads, Undecoded, why_unreadable
from .._engines.payloads import same_digest as same_digest
from .._journal.record import Record, decode_record, decode_records, encode_record, outcome_of
from ..errors import StorageCorrupt, StorageError, UnserialisableResult, brief_kind
from ..queue.base import RunQueue


def decode_state(payloads: Payloads | None, run_id: str, row: StateRow) -> StateRow:
    """Return the state of a run as its readers get it."""
    if payloads is None:
        return row
    return row._replace(checkpoint=payloads.decode_optional("checkpoint of run", run_id, row.checkpoint))


def _encode_effect(payloads: Payloads, args: Any) -> tuple[EffectRow, tuple[str, ...]]:
    """Return the row as its store gets it, and the digests that its store compares. Ids of runs stay readable."""
    [row] = args
    if row.status in (MEMBER, CHILD):
        return row, ()
    digest, *others = payloads.digests(row.digest)
    result = payloads.encode_optional("effect of run", row.run_id, row.result)
    return row._replace(digest=digest, result=result), tuple(others)


def decode_effect(payloads: Payloads | None, row: EffectRow, digest: str, digests: Sequence[str]) -> EffectRow:
    """Return the row of an effect as its readers get it.

    Args:
        payloads: The codec of the process, or None.
        row: The stored row.
        digest: The digest of the effect that was looked up. The row gets it, unless its own digest cannot be compared.
        digests: The forms of that digest.
    """
    if row.digest in digests:
        row = row._replace(digest=digest)
    if row.status in (MEMBER, CHILD) or row.result is None:
        return row
    error: StorageError | None = None
    if payloads is None:
        error = why_unreadable(f"effect of run {row.run_id}", row.result)
    else:
        try:
            return row._replace(result=payloads.decode("effect of run", row.run_id, row.result))
        except UNREADABLE as reason:
            error = reason
    # The effect must be found nevertheless. Only who uses its result needs its key.
    return row if error is None else row._replace(result=Undecoded(row.result, error))


def _encode_transaction(payloads: Payloads, args: Any) -> tuple[Any, ...]:
    run_id, fn, arguments, draft, make_record = args
    return run_id, fn, arguments, draft, lambda result: encode_record(payloads, run_id, make_record(result))


FIELDS = PayloadFields(
    {
        "journal.append": lambda payloads, args: (args[0], encode_record(payloads, *args)),
        "journal.transact": _encode_transaction,
        "state.checkpoint": lambda payloads, args: (
            args[0],
            payloads.encode("checkpoint of run", args[0], args[1]),
            *args[2:],
        ),
        "effect.begin": _encode_effect,
        "effect.put": _encode_effect,
        "effect.drop": _encode_effect,
    },
    {"journal.transact": lambda payloads, args, result: payloads.decode_optional("result of run", args[0], result)},
)


class StateRow(NamedTuple):
    """The mutable part of a run's state.

    `mark` is the position in the run at which the checkpoint was saved, `t` the wall time of the last write.

    Attributes:
        status: The status of the run that was saved last, or None.
        checkpoint: The last checkpoint, as JSON, or None.
        mark: The position in the run at which the checkpoint was saved, or None.
        t: The wall time of the last write.
    """

    status: str | None = None
    checkpoint: str | None = None
    mark: str | None = None
    t: float = 0.0


#: Values of `EffectRow.status`.
BEGUN: Final = "begun"  # a step was started, and its outcome is not recorded
HAPPENED: Final = "done"  # a step was completed: `result` is its result
APPROVED: Final = "approved"  # an approval was answered: `result` is the answer
TAKEN: Final = "taken"  # never stored: a run may repeat the effect of another run
MEMBER: Final = "member"  # no effect: the run belongs to the lineage, whose rows are kept while there are members
CHILD: Final = "child"  # no effect: the lineage of a child, of which this lineage is a member
ERASED: Final = "erased"  # in place of the run id of a member that never leaves: the lineage contains erased runs
CALLED: Final = "called"  # a child of this lineage started the effect, in the lineage that `result` names


class EffectRow(NamedTuple):
    """A step or an approval of one run, which forks of the run must not repeat without notice.

    Runs that were forked from each other share an `origin`: the first run of that lineage. The lineage of a child run
    is kept while the lineage of its caller is, which is a member of it and contains a row with the digest "child". The
    lineage of the caller also contains a row for each effect of a child, with the status "called".

    Attributes:
        origin: The first run of the lineage.
        key: The name and the key of the step or wait, after the name of the call if the status is "called"; "" of
            members and children.
        digest: The digest of its arguments, or of the details of an approval; "" for none.
        run_id: The run that did it.
        status: "begun" (the outcome is not recorded), "done", "approved", "member", "child" or "called".
        result: The result of the step or the answer, as JSON.
        t: When the row was written, in seconds since 1970.
        arrival: The `arrival` of the row of the run: after its deletion, another run may get its id.
    """

    origin: str
    key: str
    digest: str
    run_id: str
    status: str
    result: str | None = None
    t: float = 0.0
    arrival: int = 0


keep_former_names(EffectRow, n="arrival")


def erased_key(key: str) -> str:
    """Return the key under which a store keeps an effect whose run was erased: a digest. Both keys find the effect."""
    return f"#{digest(key)}" if "\t" in key else key


def erased_effect(row: EffectRow) -> EffectRow:
    """Return what remains of an effect whose run is erased, so that no run repeats it. Of a call, only ids remain."""
    return row._replace(key=erased_key(row.key), result=row.result if row.status == CALLED else None)


def rows_of_run(there: Sequence[EffectRow], row: EffectRow, others: Sequence[str] = ()) -> list[EffectRow]:
    """Return the rows of an effect that are of the same run as `row`.

    Args:
        there: The stored rows, also rows whose digests cannot be compared: these may be of other arguments.
        row: The row that the run writes.
        others: Further digests of the effect.
    """
    mine = [each for each in there if (each.run_id, each.arrival) == (row.run_id, row.arrival)]
    return [each for each in mine if each.digest == row.digest or each.digest in others]


def rows_of_other_runs(there: Sequence[EffectRow], row: EffectRow) -> list[EffectRow]:
    """Return the rows of an effect that other runs have."""
    return [each for each in there if (each.run_id, each.arrival) != (row.run_id, row.arrival)]


_FURTHEST: Final = 2**53  # greater than every position, and every store accepts it


class RunEnd(NamedTuple):
    """How a run ended and what it used, without its output and messages."""

    status: str
    generation: int
    error: str | None  # JSON, as in the result
    usage: str | None  # JSON, as in the result


class EffectExists(Exception):
    """Another run of the lineage already stored a row of this effect. Nothing was written."""


@dataclass(frozen=True, repr=False, eq=False)
class StateOperations:
    """The operations on states and effects, decided once for the backends that keep rows in a transaction.

    A backend passes what reads and writes its rows in an open transaction, and calls `operation_set`.

    Attributes:
        state: `state(tx, run_id)` returns the StateRow of a run.
        effects: `effects(tx, origin, key, digests)` returns the EffectRows of an effect.
        put: `put(tx, row)` replaces what a run stored for an effect.
        drop: `drop(tx, row)` deletes what a run stored for an effect.
        drop_lineage: Deletes all rows of a lineage.
    """

    state: Callable[[Any, str], StateRow]
    effects: Callable[[Any, str, str, Sequence[str]], list[EffectRow]]
    put: Callable[..., None]
    drop: Callable[..., None]
    drop_lineage: Callable[[Any, str], None]

    def operation_set(self, backend_operations: Mapping[str, Callable[..., Any]], **options: Any) -> OperationSet:
        """Return the operations of a backend, with the options of `OperationSet`.

        `backend_operations` change the row of a state, which each backend does in one statement.

        Args:
            backend_operations: The operations that change the row of a state.
            **options: The options of `OperationSet`.
        """
        return OperationSet(
            "state",
            {
                "effect.begin": self._begin, "effect.put": self.put, "effect.drop": self.drop,
                "effect.leave": self._leave, "effect.rewrite": self._rewrite, **backend_operations,
            },
            {
                "state.checkpoint": self._checkpointed, "state.status": self._status_set,
                "effect.begin": self._has_begun, "effect.put": self._was_put, "effect.drop": self._was_dropped,
            },
            **options,
        )  # fmt: skip

    def _begin(self, tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
        there = self.effects(tx, row.origin, row.key, (row.digest, *others))
        if rows_of_run(there, row, others):
            return
        if rows_of_other_runs(there, row):
            raise EffectExists
        self.put(tx, row)

    def _leave(self, tx: Any, origin: str, run_id: str) -> None:
        leaving = [(origin, run_id)]
        for lineage, member in leaving:
            self.drop(tx, EffectRow(lineage, "", "", member, MEMBER))
            if not self.effects(tx, lineage, "", ("",)):
                leaving += [(each.run_id, lineage) for each in self.effects(tx, lineage, "", (CHILD,))]
                self.drop_lineage(tx, lineage)

    def _rewrite(self, tx: Any, old: EffectRow, new: EffectRow) -> bool:
        if old not in self.effects(tx, old.origin, old.key, (old.digest,)):
            return False
        self.drop(tx, old)
        if not self._rows_of_run(tx, new):
            self.put(tx, new)
        return True

    def _rows_of_run(self, tx: Any, row: EffectRow, others: Sequence[str] = ()) -> list[EffectRow]:
        return rows_of_run(self.effects(tx, row.origin, row.key, (row.digest, *others)), row, others)

    def _checkpointed(self, tx: Any, run_id: str, text: str, mark: str | None, now: float) -> None:
        row = self.state(tx, run_id)
        if (row.checkpoint, row.mark, row.t) != (text, mark, now):
            raise NotApplied

    def _status_set(self, tx: Any, run_id: str, text: str, now: float) -> None:
        row = self.state(tx, run_id)
        if (row.status, row.t) != (text, now):
            raise NotApplied

    def _has_begun(self, tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
        if not self._rows_of_run(tx, row, others):
            raise NotApplied

    def _was_put(self, tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
        if row not in self.effects(tx, row.origin, row.key, (row.digest,)):
            raise NotApplied

    def _was_dropped(self, tx: Any, row: EffectRow, others: Sequence[str] = ()) -> None:
        if self._rows_of_run(tx, row, others):
            raise NotApplied


def damaged(run_id: str, column: str, value: object) -> StorageError:
    """Return the error for a column of a run's state with a value that the library does not write, or encrypted."""
    return why_unreadable(f"{column} of run {run_id}", value) or StorageCorrupt(
        f"run {run_id}: the {column} of its state must be a value that this library wrote, got {brief_kind(value)}. "
        "Restore a backup"
    )


class StateStore(Backend):
    """The journal, checkpoint and status of runs.

    Guarantees of every backend:

    1. The journal of a run is append-only. Each position is written once; positions may be left out. A record at the
       same position by the same claim is the same record: repeating it changes nothing. An end without a claim is
       stored once for each generation, even if several callers write it at the same time.
    2. A write with a claim raises LeaseLost once the claim is superseded.
    3. Values that are read are copies, as all values are encoded and decoded.

    A backend implements two methods.

    `commit(guard, ops)` applies all of `ops` or none. If `guard.token` is not the fencing token of `guard.key`, it
    raises LeaseLost, unless all of `ops` were applied before (a status or checkpoint is recognized by its `now`). The
    operations are:

    * `journal.append(run_id, Record)`: append at the next position if `seq` is -1. An end without a claim is not
      appended if the last end was written without a claim for the same `attempt`; the result is then the position of
      that end.
    * `state.checkpoint(run_id, text, mark, now)`, `state.status(run_id, text, now)`, `state.delete(run_id)`.
    * `fence.install` and `fence.forget`, as on `EventBus`.
    * `effect.begin(EffectRow, others)`: raises EffectExists if another run stored a row of that effect and this run did
      not. The row names this run by `run_id` and `arrival`.
    * `effect.put(EffectRow, others)`, `effect.drop(EffectRow, others)`: replace and delete what this run stored for
      that effect.
    * `effect.leave(origin, run_id)`: deletes the row of this member. If it was the last row, deletes all rows of the
      lineage, and applies `effect.leave(row.run_id, origin)` for each of them with the digest "child".

    Rows with the same `origin` and `key` are of the same effect if `same_digest(row.digest, digests)`. `digests`
    contains the digest of the operation and the `others`: with a payload codec, the digests under its other keys and
    the plain digest. Without a codec, the operations take no second argument. A row belongs to an effect, and is
    replaced or deleted, only if its digest is in `digests`.

    `read(what, ...)` returns:

    * "records" (run_id, after): the records in order.
    * "ending" (run_id): the last record of kind "ended", or None.
    * "endings" (run_ids): the last record of kind "ended" by run id, if it exists. The result, which may be large, may
      be left out if the `info` contains a key "end".
    * "state" (run_id): a StateRow.
    * "effects" (origin, key, digests): the rows of one effect. A store that erases runs also returns rows whose key it
      replaced by a digest.

    Args:
        clock: The source of times and random values.
    """

    payload_fields = FIELDS

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self.clock = clock

    @abstractmethod
    async def read(self, what: str, *args: Any) -> Any:
        """Read from the store; the class describes each `what`.

        Args:
            what: What to read.
            *args: Its arguments.

        Returns:
            What the class describes for it.
        """

    #: Whether `ctx.transaction` can run a function inside the commit of its record.
    transacts = False
    #: The `keeps_rows` of the queue whose rows this store reads, if both have one engine. It then saves no statuses.
    reads_rows: ClassVar[str] = ""

    async def save_checkpoint(self, run_id: UUID | str, state: Mapping[str, Any], *, claim: str | None = None) -> None:
        """Replace the run's checkpoint.

        Args:
            run_id: The run.
            state: A mapping, which must be JSON-serializable.
            claim: Current claim id of the run; None to write without a claim.

        Raises:
            LeaseLost: if `claim` is not current.
            InvalidArgument: `state` is not a mapping.

        Examples:
            >>> import asyncio
            >>> from uuid import UUID
            >>> from agent_runtime_core.state import InMemoryStateStore
            >>> async def main():
            ...     store = InMemoryStateStore()
            ...     await store.save_checkpoint(UUID(int=1), {"page": 3})
            ...     return await store.get_checkpoint(UUID(int=1))
            >>> asyncio.run(main())
            {'page': 3}
        """
        if not isinstance(state, Mapping):
            raise must("state", "be a dict", state)
        key = stored_id(run_id)
        text = encode_as("state", dict(state))
        if self.redaction is not None:
            text = self.redaction.stored_dict("state", text, f"run {key}")
        op = Op("state.checkpoint", (key, text, None, self.clock.wall()))
        await self.commits.commit(None if claim is None else Guard(key, claim), [op])

    async def get_checkpoint(self, run_id: UUID | str) -> dict[str, Any] | None:
        """Return the last checkpoint of the run, or None.

        Args:
            run_id: The id of the run.
        """
        key = stored_id(run_id)
        text = (await self.state(key)).checkpoint
        try:
            return None if text is None else decode_dict(text)
        except UnserialisableResult:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged(key, "checkpoint", text) from error

    async def update_run_status(self, run_id: UUID | str, status: str, *, claim: str | None = None) -> None:
        """Set the run's status.

        Args:
            run_id: The id of the run.
            status: The status.
            claim: The current claim id of the run; None to write without a claim.

        Raises:
            LeaseLost: if `claim` is not current.
        """
        text = unbroken("status", status)
        key = stored_id(run_id)
        guard = None if claim is None else Guard(key, claim)
        await self.commits.commit(guard, [Op("state.status", (key, text, self.clock.wall()))])

    def status_ops(self, queue: RunQueue, run_id: str, status: str, now: float) -> list[Op]:
        """Return what saves the status of a run of this queue: nothing if `get_run_status` reads the run's row."""
        if self.reads_rows and self.reads_rows == queue.keeps_rows and self.commits is queue.commits:
            return []
        return [Op("state.status", (run_id, status, now))]

    async def get_run_status(self, run_id: UUID | str) -> str | None:
        """Return the status that was saved last for a run, or None. On SQLite, a queue in the same file saves it.

        Args:
            run_id: The id of the run.
        """
        return (await self.state(stored_id(run_id))).status

    async def state(self, run_id: str) -> StateRow:
        """Return the status and the checkpoint of a run.

        Args:
            run_id: The id of the run.
        """
        row: StateRow = await self.read("state", run_id)
        return decode_state(self.payloads, run_id, row)

    async def effects(self, origin: str, key: str, digest: str) -> list[EffectRow]:
        """Return the rows of one effect, one for each run of the lineage that did it, the oldest first.

        A row whose digest cannot be compared, since this process does not have its key, is returned as it is stored.

        Args:
            origin: The first run of the lineage.
            key: The name and the key of the step or wait.
            digest: The digest of its arguments.
        """
        digests = (digest,) if self.payloads is None or not key else self.payloads.digests(digest)
        rows: list[EffectRow] = await self.read("effects", origin, key, digests)
        return sorted(
            (decode_effect(self.payloads, row, digest, digests) for row in rows), key=lambda row: (row.t, row.run_id)
        )

    async def records(self, run_id: UUID | str, after: int = -1) -> list[Record]:
        """Return the records of the run's journal after a position, in order.

        Args:
            run_id: The id of the run.
            after: Only records after this position.

        Raises:
            InvalidArgument: `after` is not an integer.
        """
        if not isinstance(after, int):
            raise must("after", "be an integer, a position in the journal", after)
        key = stored_id(run_id)
        records: list[Record] = await self.read("records", key, max(-1, min(after, _FURTHEST)))
        return decode_records(self.payloads, key, records)

    async def ending(self, run_id: str) -> Record | None:
        """Return the record of the run's last end, or None.

        Args:
            run_id: The id of the run.
        """
        record: Record | None = await self.read("ending", run_id)
        return None if record is None else decode_record(self.payloads, run_id, record)

    async def endings(self, run_ids: Sequence[str]) -> dict[str, RunEnd]:
        """Return how the last generation of each of these runs ended, in one read; others are left out.

        Args:
            run_ids: The ids of the runs.
        """
        found: dict[str, Record] = await self.read("endings", tuple(run_ids))
        payloads = None if self.payloads is None else self.payloads.marking
        return {run_id: _run_end(run_id, decode_record(payloads, run_id, record)) for run_id, record in found.items()}


def _run_end(run_id: str, record: Record) -> RunEnd:
    try:
        error, usage = (None if each is None else json.dumps(each) for each in outcome_of(record))
    except (ValueError, TypeError, AttributeError, RecursionError) as wrong:
        raise damaged(run_id, "end", record.info) from wrong
    return RunEnd(record.name, record.attempt, error, usage)
