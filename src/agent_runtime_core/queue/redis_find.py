"""Lists and counts of the runs on a Redis server, in replies of limited length; see redis_rows.lua for the indexes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._engines.redis.engine import RedisEngine
from .._engines.redis.script import as_list
from .records import RunCounts, RunFilter, RunRow

PAGE = 500  # most rows or messages in one reply
MOST_NAMES = 5_000  # most members of `names` in one reply; a prefix of more is found in the list of all runs
MOST_MEMBERS = 10_000  # the same for other lists
_LATEST = 1e300  # after all times at which runs are created

_TIMES = {
    "created_at", "due_at", "expires_at", "deadline", "lease_until", "claimed_at", "started_at", "ended_at",
    "updated_at", "cancel_at",
}  # fmt: skip
_DEFAULTS = [RunRow._field_defaults.get(name) for name in RunRow._fields]
TIME_INDEXES = tuple(index for index, name in enumerate(RunRow._fields) if name in _TIMES)


def decoded_row(cells: list[Any] | None) -> RunRow | None:
    """Decode a row of the script, in which times are strings."""
    if not cells:
        return None
    cells += _DEFAULTS[len(cells) :]  # a row of an older release contains fewer fields
    for index in TIME_INDEXES:
        if cells[index] is not None:
            cells[index] = float(cells[index])
    row: RunRow = tuple.__new__(RunRow, cells)
    return row


def decoded_rows(reply: Any) -> list[RunRow]:
    """Decode the rows of a reply."""
    return [row for cells in as_list(reply) if (row := decoded_row(cells)) is not None]


async def find(engine: RedisEngine, wanted: RunFilter) -> list[RunRow]:
    """Return the rows that a filter admits."""
    if wanted.statuses == () or wanted.limit <= 0 or "\0" in (wanted.prefix or ""):
        return []
    wanted = wanted._replace(prefix=wanted.prefix or None)
    if wanted.run_key is not None or wanted.prefix is not None:
        # A member contains NUL after the name, so that the run key with NUL is the beginning of this name alone.
        name = wanted.prefix if wanted.run_key is None else f"{wanted.run_key}\0"
        names = await _listed(engine, "queue.names", name, MOST_NAMES)
        if names is not None:
            return await _some(engine, wanted, _in_order(wanted, names))
    lists = _lists(wanted)
    if wanted.newest_first:
        return await _newest(engine, wanted, lists)
    in_range = wanted.since > 0 or wanted.until is not None
    if in_range or wanted.agent is not None or wanted.tenant or lists not in (None, ["created"]):
        members = await _listed(engine, "queue.members", lists, _asked(wanted), MOST_MEMBERS)
        if members is not None:
            return await _some(engine, wanted, [member[17:53] for member in sorted(as_list(members))])
    first = await _first_since(engine, wanted.since) if wanted.since > 0 and not wanted.after else 1
    return await _oldest(engine, wanted._replace(after=max(wanted.after, first - 1)))


def _lists(wanted: RunFilter) -> list[str] | None:
    """Return the lists with all runs of a filter; None for the lists of its statuses and agent."""
    for is_given, name in (
        (wanted.in_doubt, "in_doubt"),
        (wanted.asking, "asking"),
        (wanted.retrying, "retrying"),
        (wanted.conversation is not None, f"by:conversation:{wanted.conversation}"),
        (wanted.concurrency_key is not None, f"by:lane:{wanted.concurrency_key}"),
        (wanted.parent is not None, f"by:parent:{wanted.parent}"),
        (wanted.reason, f"reason:{' '.join((wanted.reason or '').split(' ')[:2])}"),
    ):
        if is_given:
            return [name]
    # The members of "created" have the run keys, so a prefix is looked for in this list.
    by_state = wanted.prefix is None and (wanted.statuses is not None or wanted.agent is not None or wanted.tenant)
    return None if by_state else ["created"]


def _asked(wanted: RunFilter) -> dict[str, Any]:
    """Encode a filter for the script."""
    statuses = None if wanted.statuses is None else tuple(dict.fromkeys(wanted.statuses))
    return wanted._replace(statuses=statuses)._asdict()


async def _listed(engine: RedisEngine, what: str, *args: Any) -> Any:
    """Return a reply of the script from its lists, after it puts the runs of an older release into them."""
    while (reply := await engine.ask(what, *args)) is False:
        after: float | None = 0
        while after is not None:
            after = await engine.ask("queue.enlist", after, PAGE)
    return reply


def _in_order(wanted: RunFilter, names: Any) -> list[str]:
    """Return the run ids of members of `names`, in the order of the filter."""
    places = set()
    for name in as_list(names):
        _, created_at, member = name.rsplit("\0", 2)
        n, run_id = int(member[:16]), member[17:]
        places.add((-float(created_at), -n, run_id) if wanted.newest_first else (0.0, n, run_id))
    return [run_id for _, _, run_id in sorted(places)]


async def _some(engine: RedisEngine, wanted: RunFilter, run_ids: Sequence[str]) -> list[RunRow]:
    """Return the runs in `run_ids` that a filter admits, in their order."""
    found: list[RunRow] = []
    asked, start, size = _asked(wanted), 0, min(PAGE, wanted.limit)
    while start < len(run_ids) and len(found) < wanted.limit:
        page = run_ids[start : start + size]
        last, rows = await engine.ask("queue.some", page, asked)
        start, size = start + (last or len(page)), PAGE
        found += decoded_rows(rows)
    return found[: wanted.limit]


async def _newest(engine: RedisEngine, wanted: RunFilter, lists: list[str] | None) -> list[RunRow]:
    found: list[RunRow] = []
    asked = _asked(wanted)
    until = (_LATEST if wanted.until is None else wanted.until, 0)
    before: tuple[float, int] | None = until if wanted.before is None else min(until, wanted.before)
    size = members = min(PAGE, wanted.limit)
    while before is not None and len(found) < wanted.limit:
        before, rows = await _listed(engine, "queue.newest", lists, asked, *before, size, members)
        found += decoded_rows(rows)
        # Not all that were read are wanted. A member of another prefix costs much less than a row.
        size = min(PAGE, 2 * size)
        members = size if wanted.prefix is None else MOST_NAMES
    return found[: wanted.limit]


async def _first_since(engine: RedisEngine, since: float) -> int:
    """Return the smallest `n` of the runs created from a time on."""
    first, count = 2**53, MOST_NAMES
    while True:
        size, last, n = await _listed(engine, "queue.since", since, count)
        first = min(first, n or first)
        if size < count:
            return first
        if float(last) == since:
            count *= 2  # all of them have the same time
        since = float(last)


async def _oldest(engine: RedisEngine, wanted: RunFilter) -> list[RunRow]:
    found: list[RunRow] = []
    asked, after, size = _asked(wanted), wanted.after, min(PAGE, wanted.limit)
    while after is not None and len(found) < wanted.limit:
        after, page = await engine.ask("queue.find", asked, after, size)
        found += decoded_rows(page)
        size = PAGE  # some rows were read that the filter does not admit, so there may be more of them
    return found[: wanted.limit]


async def counts(engine: RedisEngine, tenant: str | None = None) -> RunCounts:
    """Return how many runs are stored. With a tenant, only its runs are counted."""
    runs, first, due, waiting = await _listed(engine, "queue.counts", tenant or "")
    oldest: dict[str, float] = {}
    for agent, at, index in as_list(first):
        while at is None and index is not None:
            _, at, index = await engine.ask("queue.oldest", tenant or "", agent, index)
        if at is not None:
            oldest[agent] = float(at)
    return RunCounts(
        {(status, agent): number for status, agent, number in as_list(runs)}, oldest, due, dict(as_list(waiting))
    )
