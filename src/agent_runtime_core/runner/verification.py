"""Read everything that a store contains, and mark the runs of a store that was restored from a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Final

from .._core.codec.json import encode
from .._core.event_types import EventType
from .._core.ids import new_ulid
from .._core.validation import Shown, must
from .._execution.claim_writer import publish_op
from .._execution.journal_view import JournalView
from .._journal.record import Record
from ..errors import AgentRuntimeError, StorageCorrupt
from ..events.event import sequence_after
from ..persistence.documents.base import Collection, DocumentStore
from ..queue.records import LIVE, RESTORED, RunFilter, RunRow, unreadable
from .processes import processes
from .runner import AgentRunner

_PAGE: Final = 200  # runs, events or documents in one read


@dataclass
class Verification:
    """What `verify_store` found.

    Attributes:
        runs: How many runs there are, by status.
        records: How many records their journals contain.
        events: How many events of runs there are.
        messages: How many messages are in mailboxes.
        documents: How many documents there are, by kind.
        damaged: What cannot be read or is missing, and why, by its place.
    """

    runs: dict[str, int] = field(default_factory=dict)
    records: int = 0
    events: int = 0
    messages: int = 0
    documents: dict[str, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)


async def verify_store(runner: AgentRunner) -> Verification:
    """Read each run with its journal, events and messages, and each document.

    Each journal record contains a checksum, and each run says how many steps of its journal ended, so that records
    which were changed or are missing are found. Of a SQLite file, the pages and indexes are checked too. A store that
    workers write to meanwhile is no reason for a finding.

    Args:
        runner: A runner on the store, opened read-only.
    """
    found, statuses = Verification(), Counter[str]()
    backends = (*runner.backends, *runner.document_stores())
    engines = {getattr(each.commits, "location", ""): each.commits for each in backends}
    for location, engine in engines.items():
        if (problems := getattr(engine, "problems", None)) is not None:
            found.damaged |= {f"{location}:{number}": each for number, each in enumerate(problems(), 1)}
    async for row in _rows(runner):
        statuses[row.status] += 1
        await _verify_run(runner, row, found)
    found.runs = dict(sorted(statuses.items()))
    for documents in {id(each.commits): each for each in runner.document_stores()}.values():  # some share an engine
        await _verify_documents(documents, found)
    return found


async def _rows(runner: AgentRunner) -> AsyncIterator[RunRow]:
    wanted = RunFilter(limit=_PAGE)
    while (rows := await runner.queue.find(wanted)) and rows[-1].arrival > wanted.after:
        for row in rows:
            yield row
        wanted = wanted._replace(after=rows[-1].arrival)


async def _verify_run(runner: AgentRunner, row: RunRow, found: Verification) -> None:
    name = f"run {row.run_key or row.run_id}"
    try:
        if (error := unreadable(row)) is not None:
            raise error
        records = await runner.backends.state.records(row.run_id)
        found.records += len(records)
        ends = JournalView(row.run_id, records, runner.queue.clock.wall).ends
        if runner.backends.together and ends < row.min_step_count and await runner.queue.row(row.run_id) == row:
            raise StorageCorrupt(f"the ends of {row.min_step_count} steps were recorded and {ends} are found")
        await runner.backends.state.state(row.run_id)
        found.messages += len(await runner.queue.mail(row.run_id, 0))
        since = 0
        while page := await runner.backends.bus.stored_rows(row.run_id, since, _PAGE):
            found.events += sum(each.nev if isinstance(each, Record) else 1 for each in page)
            since = sequence_after(page[-1])
            if not page.more:
                break
    except AgentRuntimeError as error:
        found.damaged[name] = str(error)


async def _verify_documents(documents: DocumentStore, found: Verification) -> None:
    for space, kind in await documents.read("kinds"):
        if space is None or kind is None:  # an earlier release did not store the long name of a space
            continue
        try:
            async for page in Collection(documents, space, kind).pages(size=_PAGE):
                found.documents[kind] = found.documents.get(kind, 0) + len(page)
        except AgentRuntimeError as error:
            found.damaged[f"documents {space}/{kind}"] = str(error)


# -- a store that was restored from a copy


async def mark_restored(runner: AgentRunner, *, force: bool = False, dry_run: bool = False) -> int:
    """Mark each run that is not finished: it may have done more than the store knows. Return how many there are.

    From then on, each guarded step that such a run starts without a record is in doubt, until a person confirms the run
    with `confirm_restored`.

    Args:
        runner: A runner on the store, in which no worker executes runs.
        force: Mark them although workers seem to live.
        dry_run: Only count them.

    Raises:
        InvalidArgument: A worker lives, according to the store.
    """
    living = [each.worker for each in await processes(runner.queue) if each.living and each.slots]
    if living and not force:
        raise must("the store", "have no living workers", Shown(", ".join(living)), "Stop them first")
    epoch, marked, queue = new_ulid(runner.queue.clock), 0, runner.queue
    payload = encode({"epoch": epoch})
    wanted = RunFilter(tuple(LIVE), limit=_PAGE)
    while rows := await queue.find(wanted):
        marked += len(rows)
        for row in () if dry_run else rows:
            event = (f"restored:{epoch}", EventType.RUN_RESTORED.value, payload, queue.clock.wall())
            await runner.event_bus.commits.commit(None, [publish_op(row.run_id, [event])])
            await queue.commits.commit(None, [queue.post_op(row.run_id, RESTORED, "", payload, f"restored:{epoch}")])
        wanted = wanted._replace(after=rows[-1].arrival)
    return marked


async def confirm_restored(
    runner: AgentRunner, run_id: str, *, by: str | None = None, tenant: str | None = None
) -> bool:
    """Note that a run had done nothing more than the restored store knows. Return whether the run was resumed.

    A run that ended without success is resumed, because it perhaps failed with a step in doubt.

    Args:
        runner: A runner on the store.
        run_id: The run, by its id or its key.
        by: Who confirms it.
        tenant: The tenant of the run.
    """
    row = await runner.queue.require(run_id, tenant)
    if row.status not in LIVE:
        await runner.resume(row.run_id, by=by, restored=True)
        return True
    queue = runner.queue
    ops = [queue.confirmed_op(row.run_id), *queue.acted_ops(row.run_id, "confirm", by, new_ulid(queue.clock))]
    await queue.commits.commit(None, ops)
    return False
