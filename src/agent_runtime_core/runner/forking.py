"""Create a new run from the saved results of another run.

The copied records publish no events, and their usage does not count for the new run. The new run joins its lineage
first, while its source is stored. If state and queue share an engine, one commit writes the rest. Else the journal is
written before the row in the queue: a run without that row does not exist yet, and a repeated call writes the same
journal.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast
from uuid import UUID

from .._core.codec.json import decode, encode
from .._core.ids import step_id
from .._core.validation import must, unknown
from .._engines.base import INSTALL, LOWEST_TOKEN, Op
from .._execution.claim_writer import ClaimWriter
from .._execution.effects import FORKED_FROM, join_lineage, leave_if_deleted, membership
from .._execution.journal_view import BEFORE_FIELD, is_approval
from .._execution.step import EFFECTS
from .._execution.step_journal import RunJournal, StepJournal
from .._journal.record import COPIED, DONE, FORKED, RESET, Record, is_copied
from ..errors import IdempotencyConflict, InvalidArgument, LeaseLost, UnserialisableResult, brief
from ..events.event import Event, payload_of
from ..queue.contents import tags_in, without_tags
from ..queue.records import LIVE, RunRow, same_input
from .backends import Backends

After = str | tuple[str, str | int] | None

_MAX_READS: Final = 5  # of the journal of a run that executes at the same time
_ENDS: Final = ("step.completed", "tool.result")


async def fork(
    backends: Backends, source: RunRow, after: After, new_run_id: UUID | str | None, input: Mapping[str, Any] | None,
    effects: str = "refuse", by: str | None = None,
) -> UUID:  # fmt: skip
    """Create a fork. See `AgentRunner.fork`."""
    if effects not in EFFECTS:
        fix = "With 'refuse', the fork fails at a step that was done before"
        raise must("effects", "be 'refuse', 'reuse', 'ask' or 'repeat'", effects, fix)
    records, cut, checkpoint = await _journal_until(backends, source, after)
    journal = StepJournal(ClaimWriter(source, *backends, backends.queue.clock), records)
    await join_lineage(journal)
    copies = _copies(
        journal, source, [each for each in records if cut is not None and each.seq <= cut.seq], checkpoint, effects
    )
    row = _row(backends, source, cut, new_run_id, input, {"effects": effects} | ({} if by is None else {"by": by}))
    row = row.with_values(min_step_count=sum(each.kind == DONE for each in copies))
    stored = await backends.queue.row(row.run_id)
    if stored is None:
        await _join(backends, source, records, journal.view.origin, row.run_id)
        stored = await _stored(backends, row, copies, checkpoint)
    if stored is None:
        raise _id_taken(row, "belongs to another fork, whose creation was interrupted")
    if not _same(row, stored, after):
        raise _id_taken(row, "belongs to another run")
    return UUID(row.run_id)


async def _journal_until(
    backends: Backends, source: RunRow, after: After
) -> tuple[list[Record], Record | None, str | None]:
    """Return the journal, the last record that is copied, and the checkpoint of that point."""
    state, run_id = backends.state, source.run_id
    for _ in range(_MAX_READS):
        records = await state.records(run_id)
        checkpoint = (await state.state(run_id)).checkpoint
        if after is not None or not await state.records(run_id, records[-1].seq if records else -1):
            break
    cut = _cut_point(source, records, after)
    if after is not None and cut is not None:
        checkpoint = await _checkpoint_at(
            backends, run_id, records, [each for each in records if each.seq >= cut.seq], checkpoint
        )
    return records, cut, checkpoint


def _cut_point(source: RunRow, records: Sequence[Record], after: After) -> Record | None:
    """Return the record of the step `after`; of several records, the last."""
    done = [each for each in records if each.kind == DONE]
    if after is None:
        return done[-1] if done else None
    name, key = after if isinstance(after, tuple) and len(after) == 2 else (after, None)
    if not isinstance(name, str) or (key is not None and (isinstance(key, bool) or not isinstance(key, (str, int)))):
        raise must("after_step", "be a step's name or id, a pair (name, key or occurrence), or None", after)
    found = [each for each in done if each.name == name and (key is None or _is_key(each.key, str(key)))]
    if not found and key is None:
        found = [each for each in done if step_id(source.run_id, each.name, each.key) == name]
    if not found:
        raise InvalidArgument(_unrecorded(source.run_key or source.run_id, done, name, key))
    return found[-1]


def _is_key(recorded: str, key: str) -> bool:
    """Compare with a recorded key: `k:` before a key of the caller, `s:` before an occurrence, `m:` before an item."""
    return key in (recorded, recorded.partition(":")[2])


def _unrecorded(run: str, done: Sequence[Record], name: str, key: str | int | None) -> str:
    names = {each.name for each in done}
    if key is not None and name in names:
        keys = [each.key.partition(":")[2] for each in done if each.name == name]
        return f"run {run!r}: {unknown(f'key of step {brief(name)}', str(key), keys)}"
    return f"run {run!r}: {unknown('completed step', name, names)}"


async def _checkpoint_at(
    backends: Backends, run_id: str, records: Sequence[Record], later: Sequence[Record], stored: str | None
) -> str | None:
    """Return the last checkpoint before the events of the records `later`."""
    found = records[0].state if records[0].kind == FORKED else None
    if is_copied(later[0]):
        return found  # all events of the run are later
    ends = {step_id(run_id, each.name, each.key) for each in later if each.kind == DONE}
    for event in await backends.bus.get_events(run_id):
        if event.event_type in _ENDS and payload_of(event).get("step_id") in ends:
            return found
        if event.event_type == "state.checkpoint":
            found = _state_of(event)
    return stored


def _state_of(event: Event) -> str:
    """Return the checkpoint of an event as it is stored. The types of its values need not be known here."""
    try:
        return encode(event.payload["state"])
    except UnserialisableResult:
        return json.dumps(payload_of(event)["state"])


def _copies(
    whole: RunJournal, source: RunRow, records: Sequence[Record], checkpoint: str | None, effects: str
) -> list[Record]:
    """Return the records that another run can resume from: results, and failures that the code handled."""
    journal = StepJournal(whole.writer, records)
    handled = {each.seq for each in journal.view.swallowed_failures.values()}
    kept = [each for each in records if each.kind in (DONE, RESET) or each.seq in handled]
    claim = f"{COPIED}{source.run_id}"
    about = {"origin": whole.view.origin, "effects": effects, "approvals": _approvals(whole, kept)}
    about |= _order(journal, handled)
    forked = Record(0, FORKED, claim_id=claim, t=journal.records.wall(), state=checkpoint, info=encode(about))
    return [
        forked,
        *(
            each._replace(seq=seq, claim_id=claim, info=_without_message(each.info), next=None, ev=-1, nev=0)
            for seq, each in enumerate(kept, 1)
        ),
    ]


def _order(journal: RunJournal, handled: Collection[int]) -> dict[str, Any]:
    """Return what the copied records do not show, and the fork needs to compare its code with them.

    The code was cut off in a step, child run or wait, for example by `asyncio.timeout`, and went on. Its start is not
    copied, so that it starts in the fork, where it must be accepted in the same position. So must a step without an end
    that contains a guarded result. The starts of guarded steps are not copied either, nor what shows that a failed step
    contains a step in doubt, so that its repetition is the same step.
    """
    view = journal.view
    last = max((at for at, each in enumerate(view.ordered) if each.kind == DONE), default=0)
    left = [
        [each.name, each.key, each.pos]
        for at, each in enumerate(view.ordered)
        if each.kind != DONE and each.seq not in handled and (at < last or view.has_guarded_inside(each))
    ]
    guarded = sorted([*each] for each in view.guarded if each in view.completed)
    held = [[*each] for each in view.swallowed_failures if view.holds_doubt(*each)]
    before = [[*each, errors] for each, errors in view.errors_before.items()]
    found = (("left", left), ("guarded", guarded), ("held", held), (BEFORE_FIELD, before))
    return {name: value for name, value in found if value}


def _approvals(journal: RunJournal, copied: Sequence[Record]) -> list[dict[str, str]]:
    """Return the approvals in these records, each with the run that received it. They count as spent in the fork."""
    known = {(each["name"], each["key"]): each["run_id"] for each in journal.view.spent_approvals}
    return [
        {
            "name": each.name.removeprefix("signal:"),
            "key": each.key,
            "run_id": known.get((each.name.removeprefix("signal:"), each.key), journal.writer.run_id),
        }
        for each in copied
        if is_approval(each)
    ]


def _without_message(info: str | None) -> str | None:
    """Remove the number of the consumed message, which is another message in the new mailbox."""
    if info is None or '"mail"' not in info:
        return info
    fields = cast("dict[str, Any]", decode(info))
    if fields.pop("mail", None) is None:
        return info
    return encode(fields) if fields else None


def _row(
    backends: Backends, source: RunRow, cut: Record | None, new_run_id: UUID | str | None,
    input: Mapping[str, Any] | None, more: Mapping[str, str],
) -> RunRow:  # fmt: skip
    about: dict[str, Any] = {"run_id": source.run_id, "step": None, "step_id": None, **more}
    if cut is not None:
        about |= {"step": cut.name, "step_id": step_id(source.run_id, cut.name, cut.key)}
    before = cast("dict[str, Any]", decode(source.metadata))
    metadata = {**without_tags(before), FORKED_FROM: about}
    input_ = cast("dict[str, Any]", decode(source.input)) if input is None else input
    key, tenant = source.concurrency_key, source.tenant
    return backends.queue.new_row(
        new_run_id, source.agent, input_, metadata, source.priority, concurrency_key=key, tenant=tenant,
        tags=tags_in(before), concurrency_limit=source.concurrency_limit,
    ).with_values(rate=source.rate, turn=source.turn)  # fmt: skip


def _same(row: RunRow, stored: RunRow, after: After) -> bool:
    """Return whether the stored run is the requested fork. A fork of everything may be one of an earlier state."""
    mine, theirs = (cast("dict[str, Any]", decode(each.metadata)).get(FORKED_FROM) for each in (row, stored))
    if not same_input(row, stored) or not isinstance(theirs, dict) or mine is None:
        return False
    fields = ("run_id",) if after is None else ("run_id", "step_id")
    return mine["effects"] == theirs.get("effects", "refuse") and all(mine[each] == theirs.get(each) for each in fields)


async def _join(backends: Backends, source: RunRow, records: Sequence[Record], origin: str, run_id: str) -> None:
    """Make a fork a member of its lineage while its source is stored.

    A deletion of the source before that removed the rows of the lineage. A later deletion keeps them.

    Raises:
        UnknownRun: The source was deleted since its journal was read.
    """
    queue, state, members = backends.queue, backends.state, membership(origin, run_id)
    if source.run_id == origin:  # else the source is a member already, or was deleted
        members += membership(origin, origin)
    await state.commits.commit(None, members)
    if await _is_deleted(backends, source, records):
        for lineage, each in ((origin, run_id), (run_id, run_id), (origin, source.run_id)):
            await leave_if_deleted(queue, state, lineage, each)
        raise queue.unknown_run(source.run_key or source.run_id)


async def _is_deleted(backends: Backends, source: RunRow, records: Sequence[Record]) -> bool:
    """Return whether the source of a fork was deleted since its journal was read, or before that."""
    if records:
        return (await backends.state.records(source.run_id, records[-1].seq - 1))[:1] != [records[-1]]
    # A run that was not claimed yet has no journal, and a deletion removes the journal before the row.
    row = await backends.queue.row(source.run_id)
    return row is None or row.arrival != source.arrival or (row.status not in LIVE and row.started_at is not None)


async def _stored(backends: Backends, row: RunRow, copies: Sequence[Record], checkpoint: str | None) -> RunRow | None:
    """Store the new run; return the stored row, perhaps of another caller, or None if another fork owns the journal."""
    stored = await backends.state.records(row.run_id)
    if list(map(_compared, stored)) == list(map(_compared, copies[: len(stored)])):
        with contextlib.suppress(LeaseLost):
            return await _write(backends, row, copies, checkpoint)
    return await backends.queue.row(row.run_id)


def _compared(record: Record) -> tuple[Any, ...]:
    """Return the fields of a record that a repeated call writes again."""
    return (*record[:4], *record[7:9], record.info if record.kind == FORKED else None)


def _id_taken(row: RunRow, why: str) -> IdempotencyConflict:
    return IdempotencyConflict(f"run id {row.run_key or row.run_id!r} {why}. Use another new_run_id")


async def _write(backends: Backends, row: RunRow, copies: Sequence[Record], checkpoint: str | None) -> RunRow:
    """Store the new run, and return the row that is stored under its id then."""
    key, queue, state = row.run_id, backends.queue.commits, backends.state.commits
    # The lowest fence is refused if the new run was claimed already.
    ops = [Op(INSTALL, (key, LOWEST_TOKEN)), *(Op("journal.append", (key, each)) for each in copies)]
    if checkpoint is not None:
        ops.append(Op("state.checkpoint", (key, checkpoint, None, row.created_at)))
    insert = Op("queue.insert", (row,))
    if state is queue:
        ops.append(insert)
    else:
        await state.commit(None, ops)
        ops = [insert]
    stored: RunRow = (await queue.commit(None, ops))[-1]
    return stored
