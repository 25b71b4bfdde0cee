"""Build the full-text index of a store, and keep it current. No step and no submit does anything for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from .._core.log import log
from .._core.validation import Shown, must
from .._engines.base import Op
from .._engines.payloads import UNREADABLE
from ..errors import AgentRuntimeError, NotSupported, StorageCorrupt
from ..queue.base import RunQueue
from ..queue.contents import IndexEntry, IndexState, indexed_text
from ..queue.records import LIVE, RunFilter, RunRow, row_contents, unreadable
from ..state.base import StateStore
from .finding import with_journal

_PAGE: Final = 64  # runs that are read together
_AT_ONCE: Final = 16  # journals that are read at the same time
_CHARACTERS: Final = 262_144  # that one commit indexes at most, so that other commits wait for a short time only
_PAUSE: Final = 1.0  # seconds between two looks of a page
_SECONDS: Final = 0.1  # after which a look begins no further page
_SMALL_PAGE: Final = 16  # runs that a look reads together
_FAILED: Final = 60.0  # seconds after a failure until the next look
_WAIT: Final = 0.05  # seconds between two looks at transactions that are open
_WAITS: Final = 40


class SearchIndex:
    """The full-text index of a store.

    Args:
        queue: The queue of the runs, which stores the index.
        state: The state store of the runs.
    """

    def __init__(self, queue: RunQueue, state: StateStore) -> None:
        self._queue, self._state = queue, state
        self._safe = 0  # no open transaction may store a run with an `arrival` up to this
        self._last, self._writers = 0, frozenset[str]()
        self._looked = -_PAUSE
        self._is_busy = False

    async def read(self, limit: int = _PAGE) -> IndexState | None:
        """Return how far the index goes; None without an index."""
        if not self._queue.may_index:
            return None
        found: IndexState | None = await self._queue.read("search_state", limit)
        if found is not None:
            self._look(found)
        return found

    def _look(self, found: IndexState) -> None:
        # A number is assigned before its run can be read. So what was assigned is complete when the transactions that
        # were open then have ended.
        if not self._writers & found.writers:
            self._safe, self._last, self._writers = self._last, found.last, found.writers
        if not found.writers:
            self._safe = found.last

    async def build(self) -> int:
        """Index all runs that are stored now. Create the index if there is none.

        It may be interrupted, and called again. A page that is open (`agent-runtime serve`) then indexes new runs.

        Returns:
            How many runs were indexed.

        Raises:
            InvalidArgument: A payload codec encrypts the contents.
            NotSupported: The store cannot have a full-text index, or it was opened read-only.

        Examples:
            >>> import asyncio
            >>> from tempfile import TemporaryDirectory
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     with TemporaryDirectory() as folder:
            ...         async with AgentRunner.open(f"{folder}/runs.db") as runner:
            ...             await runner.submit("report", {"month": "May"}, run_id="report-1")
            ...             await runner.search_index.build()
            ...             return [run.run_key for run in await runner.runs(search="may")]
            >>> asyncio.run(main())
            ['report-1']
        """
        await self._create()
        done = waits = until = 0
        limit = _PAGE
        while (state := await self.read(limit)) is not None:
            until = until or state.last
            number = await self._pass(state, until, _PAGE)
            done += number
            if not number and limit:
                if max(self._safe, state.upto) >= until or waits >= _WAITS:
                    break
                waits += 1
                await asyncio.sleep(_WAIT)
            # To find the runs that changed takes a look at each live run, so this is not done before each page.
            limit = _PAGE if state.changed or not number else 0
        return done

    async def _create(self) -> None:
        queue = self._queue
        if not queue.keeps_search:
            raise NotSupported(
                f"{type(queue).__name__} has no full-text index. Searches read the runs of the last day instead"
            )
        if not queue.may_index:
            fix = "Search with a time range instead, which decrypts the runs in it"
            raise must("payload_codec", "be None for a full-text index", Shown("a codec that encrypts"), fix)
        await queue.commits.commit(None, [Op("search.create", ())])

    async def drop(self) -> bool:
        """Delete the index, and return whether there was one. Searches then read a bounded number of runs.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import AgentRunner
            >>> async def main():
            ...     async with AgentRunner.open("memory://") as runner:
            ...         return await runner.search_index.drop()
            >>> asyncio.run(main())
            False
        """
        if not self._queue.keeps_search:
            return False
        return bool((await self._queue.commits.commit(None, [Op("search.drop", ())]))[0])

    async def forget(self) -> None:
        """Remove what the index still contains of deleted runs."""
        first = goes_on = self._queue.keeps_search
        while goes_on:
            [goes_on] = await self._queue.commits.commit(None, [Op("search.merge", (first,))])
            first = False

    async def look(self) -> None:
        """Index what is new, for a short time. For a page that is open."""
        clock = self._queue.clock
        began = clock.monotonic()
        if self._is_busy or began - self._looked < _PAUSE or getattr(self._queue.commits, "read_only", False):
            return
        self._is_busy, self._looked = True, began
        try:
            while (state := await self.read(_SMALL_PAGE)) is not None:
                if not await self._pass(state, state.last, _SMALL_PAGE) or clock.monotonic() - began > _SECONDS:
                    break
        except AgentRuntimeError as error:  # the list of runs needs no index
            self._looked = began + _FAILED
            log.warning("cannot update the full-text index of %s: %s", type(self._queue).__name__, error)
        finally:
            self._is_busy = False

    async def _pass(self, state: IndexState, until: int, size: int) -> int:
        """Index at most `size` new runs, and the runs that changed; return how many these are."""
        until = min(until, self._safe)
        changed = await self._queue.numbered(state.changed)
        new = await self._queue.find_runs(RunFilter(after=state.upto, limit=size)) if state.upto < until else []
        new = [row for row in new if row.arrival <= until]
        gone = {*state.changed} - {row.arrival for row in changed}
        entries = [IndexEntry(n, (0, None, 0, None), None, True) for n in gone]
        entries += await self._entries([*changed, *new])
        part, length, upto = list[IndexEntry](), 0, 0
        for entry in entries:
            if part and length > _CHARACTERS:
                await self._put(upto, part)
                part, length = [], 0
            part.append(entry)
            length += len(entry.text or "")
            upto = max(upto, entry.arrival)
        if not new and state.upto < until:
            upto = until  # no runs are left there
        if part or upto:
            await self._put(upto, part)
        return len(entries)

    async def _put(self, upto: int, entries: Sequence[IndexEntry]) -> None:
        await self._queue.commits.commit(None, [Op("search.put", (upto, tuple(entries)))])

    async def _entries(self, rows: Sequence[RunRow]) -> list[IndexEntry]:
        found: list[IndexEntry] = []
        for at in range(0, len(rows), _AT_ONCE):
            found += await asyncio.gather(*(self._entry(row) for row in rows[at : at + _AT_ONCE]))
        return found

    async def _entry(self, row: RunRow) -> IndexEntry:
        if row.status == "running":
            return IndexEntry(row.arrival, (row.generation, None, row.mail_seq, None), None, True)
        seen, live = (row.generation, row.ended_at, row.mail_seq, row.claim_id), row.status in LIVE
        try:
            if (error := unreadable(row)) is not None:
                raise error
            # The last record of the journal has what the end of the run has.
            contents = await with_journal(self._queue, self._state, row, row_contents(row))
        except (StorageCorrupt, *UNREADABLE):
            return IndexEntry(row.arrival, seen, None, live)  # a search says that it could not read the run
        return IndexEntry(row.arrival, seen, indexed_text(row.tenant, contents), live)
