"""Give stored runs, and the conversations that they name, to a tenant.

Each run is moved in a separate commit. Nothing else is stored, so that an interrupted call can be repeated: it first
moves the child runs and conversations of the runs that were moved before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from .._core.arguments import checked_tenant
from .._core.validation import must
from .._engines.base import Op
from .._execution.context import conversation_id
from ..errors import AgentRuntimeError
from ..queue.base import RunQueue
from ..queue.memory import InMemoryQueue
from ..queue.records import LIVE, SCHEDULE, RunFilter, RunRow
from .runner import AgentRunner

_PAGE: Final = 500  # rows in one read
_AT_ONCE: Final = 16  # runs; their reads and commits share round trips


@dataclass
class Assignment:
    """What `assign_runs` did, or would do.

    Attributes:
        tenant: The tenant.
        source: The tenant that had the runs; None for runs without a tenant.
        runs: How many of the chosen runs were moved.
        child_runs: How many child runs of theirs were moved.
        conversations: How many conversations were moved.
        skipped: Why a run was not moved now, by run id. A later call can move it.
        taken: Why a run cannot be moved, by run id: the tenant uses one of its keys.
        kept: Why a conversation was not moved, by its id, or a schedule, by its run id.
    """

    tenant: str
    source: str | None = None
    runs: int = 0
    child_runs: int = 0
    conversations: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)


async def assign_runs(
    runner: AgentRunner, tenant: str, wanted: RunFilter, *, source: str | None = None, dry_run: bool = False
) -> Assignment:
    """Give stored runs, their child runs and the conversations that they name to a tenant.

    Runs that a worker executes are skipped. The call may be interrupted at any time, and repeated.

    Args:
        runner: A runner on the store.
        tenant: The tenant.
        wanted: Which runs. A child run follows its parent, even if the filter does not admit it.
        source: The tenant of the runs. If None, they have no tenant.
        dry_run: Only say what would be done. An idempotency key that the tenant uses is not found.

    Raises:
        InvalidArgument: A tenant is invalid, or both are the same.
    """
    if source == tenant:
        raise must("source", "be another tenant", source)
    call = _Assigning(runner, checked_tenant(tenant), checked_tenant(source), dry_run)
    await call.move(wanted._replace(light=True, newest_first=False, before=None, limit=_PAGE))
    return call.done


class _Assigning:
    def __init__(self, runner: AgentRunner, tenant: str, source: str, dry_run: bool) -> None:
        self._runner, self._queue, self._tenant, self._source = runner, runner.queue, tenant, source
        self._dry_run = dry_run
        # A dry run moves copies of the runs with a concurrency key, so that the rules of the queue say what would be.
        self._moved_in: RunQueue = InMemoryQueue(clock=runner.queue.clock) if dry_run else runner.queue
        self._copied = set[str | None]()  # concurrency keys
        self._copying = asyncio.Lock()
        self._conversations: set[str] = set()
        self._child_runs: set[str] = set()  # those found without the tenant: two runs of a page may be of one tree
        self.done = Assignment(tenant, source or None)

    async def move(self, wanted: RunFilter) -> None:
        # What an interrupted call left: nothing else would find it, because its run was moved.
        async for rows in _pages(self._queue, wanted._replace(tenant=self._tenant)):
            await _each(rows, self._follow)
        in_groups = list[RunRow]()
        wanted = wanted._replace(tenant=self._source)
        async for rows in _pages(self._queue, wanted):
            in_groups += [row for row in rows if _is_in_group(row)]
            await _each([row for row in rows if row.parent_id is None and not _is_in_group(row)], self._move_run)
            for row in rows:
                if row.parent_id is not None and not _is_in_group(row):
                    await self._move_run(row)
        # The active run of a concurrency key goes first, then those behind it as the queue would start them.
        for row in sorted(in_groups, key=lambda row: (row.blocked, -row.priority, row.arrival)):
            await self._move_run(row)
        for conversation in sorted(self._conversations):
            await self._move_conversation(conversation, wanted)

    # -- runs

    async def _move_run(self, row: RunRow) -> None:
        if row.parent_id is not None and not await self._is_left(row):
            return
        if await self._assign(row):
            self.done.runs += 1
            await self._follow(row)

    async def _is_left(self, row: RunRow) -> bool:
        """Return whether a child run follows no run: its parent was deleted, or was moved before."""
        parent = await self._queue.row(row.parent_id or "")
        if parent is not None and parent.tenant != self._tenant:
            return False
        now = await self._queue.row(row.run_id)
        return now is not None and now.tenant == self._source

    async def _follow(self, row: RunRow) -> None:
        """Move the child runs of a run of the tenant."""
        if row.conversation is not None:
            self._conversations.add(row.conversation)
        for child in await self._queue.children(row.run_id):
            if child.tenant == self._source:
                if child.run_id in self._child_runs:
                    continue
                self._child_runs.add(child.run_id)
                if not await self._assign(child):
                    continue
                self.done.child_runs += 1
            if child.tenant in (self._source, self._tenant):
                await self._follow(child)

    async def _assign(self, row: RunRow) -> bool:
        """Move one run, and return whether it is of the tenant now."""
        done = self.done
        if row.agent == SCHEDULE:  # its id is made of its name and its tenant
            done.kept[row.run_id] = f"{row.run_key}: put the schedule for the tenant, and delete this schedule"
            return False
        if (reason := await self._behind(row)) is not None:
            done.skipped[row.run_id] = reason
            return False
        if row.run_key is not None:
            of_key = RunFilter(run_key=row.run_key, tenant=self._tenant, light=True, limit=1)
            if [each for each in await self._queue.find(of_key) if each.run_id != row.run_id]:
                done.taken[row.run_id] = f"run {row.run_key!r}: the tenant has a run with this run_id"
                return False
        outcome = await self._outcome(row)
        name = row.run_key or row.run_id
        if outcome == "running":
            done.skipped[row.run_id] = f"run {name!r}: a worker executes it"
        elif outcome == "taken":
            key = "concurrency key of an active" if await self._active(row, self._tenant) else "idempotency key of a"
            done.taken[row.run_id] = f"run {name!r}: it has the {key} run of the tenant"
        return outcome == "assigned"

    async def _outcome(self, row: RunRow) -> str:
        if self._dry_run and not _is_in_group(row):
            return "running" if row.status == "running" else "assigned"
        return await (await self._queue_of(row)).assign(row.run_id, self._tenant)

    async def _queue_of(self, row: RunRow) -> RunQueue:
        """Return the queue in which a run with a concurrency key is moved, with all live runs of that key."""
        async with self._copying:
            if self._dry_run and row.concurrency_key not in self._copied:
                self._copied.add(row.concurrency_key)
                for tenant in (self._source, self._tenant):
                    wanted = RunFilter(LIVE, concurrency_key=row.concurrency_key, tenant=tenant, limit=_PAGE)
                    async for rows in _pages(self._queue, wanted):
                        ops = [Op("queue.copy", (each.with_values(input="{}"), ())) for each in rows]
                        await self._moved_in.commits.commit(None, ops)
        return self._moved_in

    async def _behind(self, row: RunRow) -> str | None:
        """Return why a run must stay in its group: without the active run there, it could start beside that run."""
        if not row.blocked or not _is_in_group(row):
            return None
        now = await (await self._queue_of(row)).row(row.run_id)
        active = None if now is None or not now.blocked else await self._active(now, self._source)
        if active is None:
            return None
        key = row.concurrency_key
        return f"run {row.run_key or row.run_id!r}: it is behind run {active!r} with concurrency key {key!r}"

    async def _active(self, row: RunRow, tenant: str) -> str | None:
        """Return the name of a tenant's active run with the concurrency key of `row`."""
        if not _is_in_group(row):
            return None
        wanted = RunFilter(LIVE, concurrency_key=row.concurrency_key, tenant=tenant, light=True, limit=_PAGE)
        async for rows in _pages(await self._queue_of(row), wanted):
            for each in rows:
                if not each.blocked:
                    return each.run_key or each.run_id
        return None

    # -- conversations

    async def _move_conversation(self, conversation: str, wanted: RunFilter) -> None:
        if self._source:
            self.done.kept[conversation] = f"conversation {conversation!r}: it belongs to tenant {self._source!r}"
            return
        async for rows in _pages(self._queue, RunFilter(conversation=conversation, tenant=self._source, light=True)):
            for row in rows:
                if not (self._dry_run and (row.parent_id is not None or wanted.admits(row))):
                    why = f"run {row.run_key or row.run_id!r} without a tenant names it"
                    self.done.kept[conversation] = f"conversation {conversation!r}: {why}"
                    return
        if self._dry_run:
            self.done.conversations += 1
            return
        try:
            moved = await self._runner.persistence.assign_conversation(conversation, self._tenant)
        except AgentRuntimeError as error:
            self.done.kept[conversation] = f"conversation {conversation!r}: {error}"
        else:
            self.done.conversations += moved
            if not moved and await _exists(self._runner, conversation):
                why = "the tenant has a conversation with this id"
                self.done.kept[conversation] = f"conversation {conversation!r}: {why}"


async def _exists(runner: AgentRunner, conversation: str) -> bool:
    named = conversation_id(conversation)
    return named is not None and await runner.persistence.conversations.get(named) is not None


async def _pages(queue: RunQueue, wanted: RunFilter) -> AsyncIterator[list[RunRow]]:
    after = 0
    while rows := await queue.find(wanted._replace(after=after)):
        yield rows
        after = rows[-1].arrival


def _is_in_group(row: RunRow) -> bool:
    return row.concurrency_key is not None and row.status in LIVE


async def _each(rows: Sequence[RunRow], act: Callable[[RunRow], Awaitable[None]]) -> None:
    """Call `act` for each row, some at the same time."""
    for start in range(0, len(rows), _AT_ONCE):
        await asyncio.gather(*map(act, rows[start : start + _AT_ONCE]))
