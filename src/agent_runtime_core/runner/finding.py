"""Find and sort runs by what no index of a store contains: their contents, and values that are computed from them.

Such a request reads at most `MOST_ROWS` runs and `MOST_CHARACTERS` of contents. Its answer says if that was not enough.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .._core.clock import aware
from .._core.codec.json import decode
from .._core.validation import unknown
from .._journal.record import ATTEMPT, Record, is_copied
from ..errors import InvalidArgument, StorageCorrupt, UnknownEncryptionKey
from ..queue.base import RunQueue
from ..queue.contents import SHORTEST_WORD, Candidates, RunContents, indexed_words
from ..queue.records import CODE_VERSION, LIVE, MailboxMessage, RunFilter, RunRow, row_contents
from ..state.base import RunEnd, StateStore
from .settings import RunInfo

MOST_ROWS: Final = 10_000
MOST_CHARACTERS: Final = 64 * 2**20
DEFAULT_SECONDS: Final = 86_400.0  # the time range of a search and of a sorted list
SORTS: Final = ("age", "duration", "cost", "attempts")
VERSION: Final = "code_version"  # field of the record of an attempt
_PAGE: Final = 500
_LARGE_PAGE: Final = 100  # rows with their inputs
_TOGETHER: Final = 16  # journals that are read at the same time

Visible = Callable[[RunRow], Awaitable[bool]]


class RunList(list[RunInfo]):
    """The runs that `runner.runs` returns, a list.

    Attributes:
        note: Which runs were not read, if there are any; else "".
    """

    note: str = ""


def code_version_of(records: Iterable[Record], mail: Iterable[MailboxMessage]) -> str | None:
    """Return the version of the code that continues a run: that of its first attempt, or that which `resume` named.

    Args:
        records: The journal of the run.
        mail: The messages of the run.
    """
    began = next((each for each in records if each.kind == ATTEMPT and not is_copied(each)), None)
    version: Any = None if began is None or began.info is None else json.loads(began.info).get(VERSION)
    for message in mail:
        version = decode(message.payload) if message.kind == CODE_VERSION else version
    return None if version is None else str(version)


def duration_of(row: RunRow, now: float) -> float | None:
    """Return the seconds from the start of a run to its end, or until now; None before its start."""
    until = row.ended_at if row.status not in LIVE else now
    return max(until - row.started_at, 0.0) if row.started_at and until else None


def checked_sort(sort: object) -> str | None:
    """Return the name of an order, or raise InvalidArgument."""
    if sort is not None and sort not in SORTS:
        raise InvalidArgument(unknown("sort", sort, SORTS))
    return None if sort is None else str(sort)


@dataclass(slots=True)
class Found:
    """The rows that a request has found.

    Attributes:
        rows: The rows, in their order.
        position: Where the next request continues: the time and arrival of a row, or of a sorted list a value, an
            arrival and the time at which the values were computed. None after the last row.
        read: How many rows were read.
        note: What was not read; "" if nothing was left out.
    """

    rows: list[RunRow] = field(default_factory=list)
    position: tuple[float, ...] | None = None
    read: int = 0
    note: str = ""


class Finder:
    """Reads the runs of a filter, decides which are wanted, and puts them in an order.

    Args:
        queue: The queue of the runs.
        state: The state store of the runs.
        wanted: Which runs. Their time range is the last day, if they are searched or sorted and it has no beginning.
        sort: One of `SORTS`, whose greatest value comes first; None: the order of the filter.
        visible: Returns whether the caller may see a run, whose row may lack its input. None: the caller may see all.
    """

    def __init__(
        self, queue: RunQueue, state: StateStore, wanted: RunFilter, sort: str | None = None,
        visible: Visible | None = None,
    ) -> None:  # fmt: skip
        self._queue, self._state, self._sort, self._visible = queue, state, sort, visible
        self._now = queue.clock.wall()
        self._notes: list[str] = []
        self._wanted = wanted
        self._listed: Candidates | None = None  # by the full-text index of the store
        self._characters = self._unreadable = 0
        self._values: dict[str, float] = {}

    async def find(self, limit: int, after: tuple[float, ...] | None = None) -> Found:
        """Return the next rows, as many as are found within the bounds.

        Args:
            limit: How many rows at most.
            after: The `position` of the rows before.
        """
        sorts = self._sort is not None
        found, start = Found(), None
        if after is not None and sorts:
            self._now = after[2]  # or a live run would pass those that were listed
        elif after is not None:
            start = after[0], int(after[1])
        self._listed = await self._candidates(start)
        if self._listed is None:
            self._limit_time()
        while found.read < MOST_ROWS and self._characters < MOST_CHARACTERS:
            rows, start = await self._page(start)
            admitted, last = await self._admitted(rows)
            found.read += len(rows) if last is None else rows.index(last) + 1
            start = start if last is None else self._place(last)
            found.rows += admitted
            if start is None or (not sorts and len(found.rows) >= limit):
                break
            if self._listed is not None and not self._listed.places:
                break  # the next candidates are found by the next request
        if start is not None and (sorts or len(found.rows) < limit):
            self._note_end(found, start)
        found.position = start
        if sorts:
            self._put_in_order(found, limit, after)
        elif len(found.rows) > limit:
            del found.rows[limit:]
            found.position = self._place(found.rows[-1]) if found.rows else start
        if self._unreadable:
            self._notes.append(f"{self._unreadable} of the runs could not be read.")
        found.note = " ".join(self._notes)
        found.rows = [each for row in found.rows if (each := await self._whole(row)) is not None]
        return found

    async def _candidates(self, start: tuple[float, int] | None) -> Candidates | None:
        """Return the runs that may contain the words, from the index of the store; None if runs are to be scanned."""
        words = indexed_words(self._wanted.contents.search or "")
        if self._sort is not None or len(words) < SHORTEST_WORD:
            return None
        return await self._queue.search(self._from(start), words, MOST_ROWS)

    def _limit_time(self) -> None:
        """Search or sort the runs of the last day, unless the time range contains a beginning."""
        wanted, words = self._wanted, self._wanted.contents.search
        if wanted.since or (words is None and self._sort is None):
            return
        until = self._now if wanted.until is None else wanted.until
        self._wanted = wanted._replace(since=max(until - DEFAULT_SECONDS, 0.001))
        indexable = self._sort is None and len(words or "") >= SHORTEST_WORD and self._queue.may_index
        more = ", or create an index with agent-runtime index" if indexable else ""
        since = f"{aware(self._wanted.since):%Y-%m-%d %H:%M}"
        self._notes.append(f"Only runs since {since} UTC. Set since for older runs{more}.")

    def _note_end(self, found: Found, start: tuple[float, int]) -> None:
        what = f"{found.read:,} runs were read" if found.read >= MOST_ROWS else "Many contents were read"
        at = f" back to {aware(start[0]):%Y-%m-%d %H:%M} UTC" if self._wanted.newest_first else ""
        fix = "Choose a shorter time range" if self._sort else "Read the next page, or choose a shorter time range"
        self._notes.append(f"{what}{at}; there may be more. {fix}.")

    def _put_in_order(self, found: Found, limit: int, after: tuple[float, ...] | None) -> None:
        values = self._values
        keys = [((values[row.run_id], row.arrival), row) for row in found.rows]
        left = [each for each in keys if after is None or each[0] < after[:2]]
        first = heapq.nlargest(limit, left, key=lambda each: each[0])
        found.rows = [row for _, row in first]
        found.position = (*first[-1][0], self._now) if first and len(left) > len(first) else None

    # -- rows

    async def _page(self, start: tuple[float, int] | None) -> tuple[list[RunRow], tuple[float, int] | None]:
        """Return the next rows of the store, and where the page after them starts; None after the last one."""
        if self._listed is not None:
            places, end = self._listed
            page = places[:_LARGE_PAGE]
            del places[:_LARGE_PAGE]
            rows = await self._queue.numbered([n for _, n in page])
            return rows, page[-1] if places else end
        wanted, contents = self._wanted, self._wanted.contents
        size = _LARGE_PAGE if contents.search is not None else _PAGE
        metadata = wanted.without_input or self._visible is not None or bool(contents.metadata or contents.tag)
        light, without_input = contents.search is None and not metadata, contents.search is None
        asked = wanted.of_store._replace(limit=size, light=light, without_input=without_input)
        rows = await self._queue.find_runs(self._from(start, asked))
        return rows, self._place(rows[-1]) if len(rows) == size else None

    def _from(self, start: tuple[float, int] | None, wanted: RunFilter | None = None) -> RunFilter:
        """Return a filter for the runs after a place."""
        wanted = self._wanted if wanted is None else wanted
        if start is None:
            return wanted
        return wanted._replace(before=start) if wanted.newest_first else wanted._replace(after=start[1])

    def _place(self, row: RunRow) -> tuple[float, int]:
        return row.created_at, row.arrival

    async def _whole(self, row: RunRow) -> RunRow | None:
        """Return a row with what its filter asks for; None if the run was deleted in between."""
        wanted = self._wanted
        if wanted.light or wanted.without_input or wanted.contents.search is not None:
            return wanted.shortened(row)
        return await self._queue.row(row.run_id)

    # -- contents

    async def _admitted(self, rows: Sequence[RunRow]) -> tuple[list[RunRow], RunRow | None]:
        """Return the wanted rows, and the last one that was read if the bound of characters ended the page."""
        wanted, contents = self._wanted, self._wanted.contents
        ended = [row.run_id for row in rows if row.status not in LIVE]
        reads_ends = self._sort == "cost" or contents.error_type is not None or contents.search is not None
        ends = await self._ends(ended) if reads_ends and ended else {}
        cheap = wanted._replace(contents=contents._replace(search=None, code_version=None))
        reads_journal = contents.search is not None or contents.code_version is not None
        found: list[RunRow] = []
        for at in range(0, len(rows), _TOGETHER):
            chunk = rows[at : at + _TOGETHER]
            known = [(row, contents_of(row, ends.get(row.run_id))) for row in chunk]
            known = [each for each in known if cheap.admits(*each) and await self._is_visible(each[0])]
            if reads_journal:
                known = [*zip((row for row, _ in known), await self._with_journals(known), strict=True)]
            for row, each in known:
                if wanted.admits(row, each):
                    found.append(row)
                    self._values[row.run_id] = self._value(row, ends)
            self._characters += sum(len(row.input) + len(row.metadata) + len(row.output or "") for row in chunk)
            if self._characters >= MOST_CHARACTERS:
                return found, chunk[-1]
        return found, None

    async def _is_visible(self, row: RunRow) -> bool:
        return self._visible is None or await self._visible(row)

    async def _ends(self, run_ids: Sequence[str]) -> Mapping[str, RunEnd]:
        """Return how runs ended. A damaged end must not hide the other runs."""
        try:
            return await self._state.endings(run_ids)
        except (StorageCorrupt, UnknownEncryptionKey):
            if len(run_ids) == 1:
                self._unreadable += 1
                return {}
        middle = len(run_ids) // 2
        return {**await self._ends(run_ids[:middle]), **await self._ends(run_ids[middle:])}

    async def _with_journals(self, known: Sequence[tuple[RunRow, RunContents]]) -> list[RunContents]:
        """Return the contents of runs with what their journals have of it, unless the row alone decides."""
        return await asyncio.gather(*(self._with_journal(*each) for each in known))

    async def _with_journal(self, row: RunRow, contents: RunContents) -> RunContents:
        if self._wanted.admits(row, contents):
            return contents
        try:
            found = await with_journal(self._queue, self._state, row, contents)
        except (StorageCorrupt, UnknownEncryptionKey):
            self._unreadable += 1
            return contents
        self._characters += sum(len(text) for text in found.texts[len(contents.texts) :] if text)
        return found

    def _value(self, row: RunRow, ends: Mapping[str, RunEnd]) -> float:
        """Return the value by which a run is sorted. A run without the value comes last."""
        match self._sort:
            case "duration":
                return -1.0 if (found := duration_of(row, self._now)) is None else found
            case "attempts":
                return float(row.attempt)
            case "cost":
                end = ends.get(row.run_id)
                usage: Any = {} if end is None or end.generation != row.generation else json.loads(end.usage or "{}")
                return float(usage.get("cost_usd", -1.0))
        return self._now - row.created_at


async def with_journal(queue: RunQueue, state: StateStore, row: RunRow, contents: RunContents) -> RunContents:
    """Return the contents of a run with the texts of its journal and its mailbox.

    Raises:
        StorageCorrupt: They are damaged.
        UnknownEncryptionKey: They cannot be decrypted.
    """
    records = await state.records(row.run_id)
    mail = await queue.mail(row.run_id) if row.mail_seq else []
    texts = (*(text for each in records for text in (each.result, each.error)), *(each.payload for each in mail))
    return contents._replace(code_version=code_version_of(records, mail), texts=(*contents.texts, *texts))


def contents_of(row: RunRow, end: RunEnd | None) -> RunContents:
    """Return the contents of a run of its row and its end."""
    contents = row_contents(row)
    if end is None or row.status in LIVE or end.generation != row.generation:
        return contents
    return contents._replace(error=end.error, texts=(*contents.texts, end.error))
