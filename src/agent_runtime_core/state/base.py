"""What a run has done and where it stands: its journal, its last checkpoint, its status."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from .._core.clock import SYSTEM, Clock
from .._core.codec.json import decode_dict, encode
from .._core.ids import stored_id, unbroken
from .._engines.base import Backend, Guard, Op
from .._journal.record import Record
from ..errors import InvalidArgument, StorageCorrupt, UnserialisableResult, brief

_FURTHEST: Final = 2**53  # no run gets there, and every store can be asked for it


class StateRow(NamedTuple):
    """The mutable part of a run's state: `mark` is the place of the checkpoint in the run, `t` when it was written."""

    status: str | None = None
    checkpoint: str | None = None
    mark: str | None = None
    t: float = 0.0


#: Values of `EffectRow.status`.
BEGUN: Final = "begun"  # a step was started, and its outcome is not recorded
HAPPENED: Final = "done"  # a step has completed: `result` is its result
APPROVED: Final = "approved"  # an approval was answered: `result` is the answer
TAKEN: Final = "taken"  # never stored: a run begins what another one did, because it may
MEMBER: Final = "member"  # not an effect: the run belongs to the lineage, and keeps its rows from being deleted


class EffectRow(NamedTuple):
    """What one run did of a step or an approval that its forks must not repeat silently.

    Runs that were forked from each other share an `origin`: the first run of that lineage.
    """

    origin: str
    key: str  # name and key of the step or wait; "" in the row of a member
    digest: str  # of its arguments, or of the details of an approval; "" where there are none
    run_id: str  # the run that did it
    status: str
    result: str | None = None
    t: float = 0.0


class EffectExists(Exception):
    """Another run of the lineage has a row of that effect; nothing was written."""


def damaged(run_id: str, column: str, value: object) -> StorageCorrupt:
    """That the stored state of a run holds what was never written there."""
    return StorageCorrupt(
        f"run {run_id}: the {column} of its state is {brief(value)}, which was not written: restore a backup"
    )


class StateStore(Backend):
    """The journal, checkpoint and status of runs.

    What it guarantees, on every backend:

    1. The journal of a run is append-only: a position is written once, and one may be left out; the same
       position by the same claim is the same record, and repeating it changes nothing. An end under no claim
       is there once for each generation, however many write it at once.
    2. A write with a claim is refused with LeaseLost once that claim was superseded.
    3. What is read is not shared with what was written: everything goes through its encoding.

    A backend brings two methods: `commit(guard, ops)` applies `journal.append(run_id, Record)` (at the next
    position where `seq` is -1; where it is an end under no claim, and the last end is one of the same
    `attempt` under no claim, it is that one),
    `state.checkpoint(run_id, text, mark, now)`, `state.status(run_id, text, now)` and
    `state.delete(run_id)`, and the fences `fence.install` and `fence.forget`, all or nothing, refusing
    with LeaseLost where `guard.token` is not the fence of `guard.key`, unless all of `ops` are found to
    have landed before (a status or checkpoint is known by its `now`); `read(what, ...)` answers
    records(run_id, after) in order, ending(run_id), the last record of kind "ended" or None, and
    state(run_id) as a StateRow.

    It also applies `effect.begin(EffectRow)`, which raises EffectExists where another run has a row of that
    origin, key and digest and this run has none, `effect.put(EffectRow)`, `effect.drop(origin, key, digest, run_id)`
    and `effect.leave(origin, run_id)`; `read("effects", origin, key, digest)` answers the rows of one effect.
    """

    def __init__(self, *, clock: Clock = SYSTEM) -> None:
        self.clock = clock

    @abstractmethod
    async def read(self, what: str, *args: Any) -> Any:
        """Return what is stored, as the class describes it for each `what`."""

    #: Whether `ctx.transaction` can run a function inside the commit of its record.
    transacts = False

    async def close(self) -> None:
        """Close what this store holds. A second call does nothing."""

    async def save_checkpoint(self, run_id: UUID | str, state: Mapping[str, Any], *, claim: str | None = None) -> None:
        """Replace the run's checkpoint; with `claim`, only while that claim holds."""
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"a checkpoint is a dict, not {type(state).__name__}: {brief(state)}")
        key = stored_id(run_id)
        op = Op("state.checkpoint", (key, encode(dict(state)), None, self.clock.wall()))
        await self.commits.commit(None if claim is None else Guard(key, claim), [op])

    async def get_checkpoint(self, run_id: UUID | str) -> dict[str, Any] | None:
        """The last checkpoint saved, or None."""
        key = stored_id(run_id)
        text = (await self.state(key)).checkpoint
        try:
            return None if text is None else decode_dict(text)
        except UnserialisableResult:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged(key, "checkpoint", text) from error

    async def update_run_status(self, run_id: UUID | str, status: str, *, claim: str | None = None) -> None:
        """Say where the run stands; with `claim`, only while that claim holds."""
        text = unbroken("a status", status)
        key = stored_id(run_id)
        guard = None if claim is None else Guard(key, claim)
        await self.commits.commit(guard, [Op("state.status", (key, text, self.clock.wall()))])

    async def get_run_status(self, run_id: UUID | str) -> str | None:
        return (await self.state(stored_id(run_id))).status

    async def state(self, run_id: str) -> StateRow:
        row: StateRow = await self.read("state", run_id)
        return row

    async def effects(self, origin: str, key: str, digest: str) -> list[EffectRow]:
        """Return the rows of one effect, one for each run of the lineage that did it, the oldest first."""
        rows: list[EffectRow] = await self.read("effects", origin, key, digest)
        return sorted(rows, key=lambda row: (row.t, row.run_id))

    async def records(self, run_id: UUID | str, after: int = -1) -> list[Record]:
        """The run's journal past that position, in order."""
        if not isinstance(after, int):
            raise InvalidArgument(f"after={brief(after)} is no position in a journal: it is a whole number")
        records: list[Record] = await self.read("records", stored_id(run_id), max(-1, min(after, _FURTHEST)))
        return records

    async def ending(self, run_id: str) -> Record | None:
        """The record of the run's last end, or None."""
        record: Record | None = await self.read("ending", run_id)
        return record
