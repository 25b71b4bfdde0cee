"""Why a run is where it is: what it waits for, what blocks it, when it is due, its last error, and where it is from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple

from .._core.clock import aware
from .._execution.effects import FORKED_FROM
from ..limits import ALL_AGENTS, OF_TENANT
from ..queue.rate_limits import Rate
from ..queue.records import IN_DOUBT, LIVE, QUEUED_BEHIND, RATE_LIMITED, SET_ASIDE, RunFilter, RunRow, open_questions
from ..runner.left_runs import REASON as OTHER_CODE
from ..runner.processes import ProcessInfo, processes
from ..runner.run_client import RunClient
from .plain import plain_value

#: Most runs that are looked up for one list, so that its number of reads is bounded.
_MOST_LOOKED_UP: Final = 20
_MOST_LIVE: Final = 100  # live runs of each status of a concurrency key among which the active ones are looked for
_MOST_NAMED: Final = 3  # active runs of a concurrency key that a text names

Visible = Callable[[RunRow], Awaitable[bool]]
Reason = dict[str, Any]


async def reasons_of(
    runner: RunClient, rows: Sequence[RunRow], errors: Sequence[Any], visible: Visible | None = None
) -> list[list[Reason]]:
    """Return for each run why it is where it is: {"kind", "text", "run_id"}, what keeps it from continuing first.

    `run_id` is the other run that the text names, or None. A run that the caller may not see is not named.

    Args:
        runner: The runner on the store.
        rows: The runs. Their rows may lack the input.
        errors: The last error of each run, or None.
        visible: Returns whether the caller may see a run. None: the caller may see all.
    """
    related = _Related(runner, visible)
    return [[each async for each in _reasons(row, error, related)] for row, error in zip(rows, errors, strict=True)]


async def _reasons(row: RunRow, error: Any, related: _Related) -> Any:
    if row.status in LIVE:
        async for each in _of_live(row, related):
            yield each
    if error:
        text = f"{error.get('type')}: {error.get('message')}"
        yield _reason("error", f"last error: {text}" if row.status in LIVE else text)
    for kind, what, run_id in (("child", "child of", row.parent_id), ("fork", "fork of", forked_from(row))):
        if run_id is not None and (name := await related.name(run_id)) is not None:
            yield _reason(kind, f"{what} {name}", run_id)


async def _of_live(row: RunRow, related: _Related) -> Any:
    """Yield what keeps a live run from continuing."""
    if row.cancel_at is not None:
        yield _reason("cancel", "was asked to stop")
    names = [each.name for each in open_questions(row)]
    for name in names:
        what = f"review of step {name.removeprefix(IN_DOUBT)!r}" if name.startswith(IN_DOUBT) else f"answer to {name!r}"
        yield _reason("question", f"waits for the {what}")
    if row.status == "waiting" and row.reason and not names:
        word, _, rest = row.reason.partition(" ")
        if word == "child" and (child := await related.name(rest)) is not None:
            yield _reason("wait", f"waits for {child}", rest)
        elif word == "pool":  # the rest is the name in quotes; of a spend pool, or of the limits of a model
            yield _reason("wait", f"waits for room in pool {rest}")
        else:
            yield _reason("wait", f"waits for {word} {rest!r}" if rest else f"waits for {word}")
    if row.due_at > related.now and row.status != "running":
        due = f"due at {aware(row.due_at):%Y-%m-%d %H:%M:%S} UTC"
        if row.status == "pending" and row.reason == RATE_LIMITED:
            yield _reason("rate_limit", f"delayed by {_limit_words((await related.whole(row)).rate)}, {due}")
        else:
            yield _reason("due", due)
    if row.status == "pending":
        async for each in _of_pending(row, related):
            yield each


async def _of_pending(row: RunRow, related: _Related) -> Any:
    """Yield what keeps a run that could start from a worker. A run that is due later does not wait for its key yet."""
    is_due = row.due_at <= related.now
    if row.blocked == QUEUED_BEHIND and row.concurrency_key is not None:
        if is_due:
            yield await _blocked(row, row.concurrency_key, related)
    elif row.blocked == SET_ASIDE or row.origin:
        yield _reason("inline", "its process has ended: execute the run again, or resume it")
    elif row.reason == OTHER_CODE:
        yield _reason("code", "waits for a worker whose code fits its journal")
    elif is_due and await related.has_no_worker(row.agent):
        yield _reason("worker", f"no living worker executes agent {row.agent!r}")


async def _blocked(row: RunRow, key: str, related: _Related) -> Reason:
    """Return which runs block a run of a concurrency key: those that hold its slots, or the run that comes first."""
    of_key, group = f"concurrency key {key!r}", await related.group(row)
    active, first, slots = group.active, group.first, 1
    if len(active) > 1:  # or else the run waits for the active run, whatever its own limit is
        slots = (await related.whole(row)).concurrency_limit
        if len(active) < slots and first is not None and first.run_id != row.run_id:
            named = await related.may_see(first)
            text = f"blocked by {_name(first) if named else 'another run'}, which comes first for {of_key}"
            return _reason("blocked", text, first.run_id if named else None)
    seen = [each for each in active if await related.may_see(each)][:_MOST_NAMED]
    left = len(active) - len(seen)
    what = ", ".join(map(_name, seen)) + (f" and {left} more" if left else "")
    if not seen:
        what = "other runs" if slots > 1 else "another run"
    used = f" ({len(active)} of {slots} slots)" if slots > 1 else ""
    return _reason("blocked", f"blocked by {what} of {of_key}{used}", seen[0].run_id if seen else None)


def _limit_words(rate: str | None) -> str:
    """Return the words for a stored rate limit. None: the row was not read."""
    if rate is None:
        return "its rate limit"
    limit = Rate.read(rate)
    counted, _, tenant = limit.key.partition(OF_TENANT)
    kind, _, name = counted.partition(" ")
    what = "the rate limit "
    if kind == "agent":
        what += f"of agent {name!r}"
    else:
        what += "of all agents" if name == ALL_AGENTS else repr(name)
    of_tenant = f" for tenant {tenant!r}" if tenant else ""
    return f"{what}{of_tenant} ({limit.starts} per {limit.per:g} s)"


def forked_from(row: RunRow) -> str | None:
    """Return the id of the run that a run was forked from; None for other runs, and for a row without metadata."""
    if FORKED_FROM not in row.metadata:
        return None
    about = row.decoded("metadata", plain_value)
    found = about.get(FORKED_FROM) if isinstance(about, dict) else None
    run_id = found.get("run_id") if isinstance(found, dict) else None
    return run_id if isinstance(run_id, str) else None


def _reason(kind: str, text: str, run_id: str | None = None) -> Reason:
    return {"kind": kind, "text": text, "run_id": run_id}


def _name(row: RunRow) -> str:
    return f"run {row.run_key or row.run_id} ({row.agent}, {row.status})"


class _Group(NamedTuple):
    """The runs of a concurrency key and tenant, without their inputs.

    Attributes:
        active: The runs that hold its slots.
        first: Of the runs that wait for a slot, the run that gets it first.
    """

    active: list[RunRow]
    first: RunRow | None


class _Related:
    """Looks up the runs and processes that reasons name: each once, and a bounded number."""

    def __init__(self, runner: RunClient, visible: Visible | None) -> None:
        self.now: float = runner.queue.clock.wall()
        self._queue, self._visible = runner.queue, visible
        self._named = dict[str, RunRow | None]()
        self._groups = dict[tuple[str, str], _Group]()
        self._whole = dict[str, RunRow]()
        self._processes: list[ProcessInfo] | None = None

    async def name(self, run_id: str) -> str | None:
        """Return the name of a run; None if the caller may not see it."""
        if run_id not in self._named:
            if len(self._named) >= _MOST_LOOKED_UP:
                return None if self._visible else f"run {run_id}"
            wanted = RunFilter(prefix=run_id, without_input=True)  # a run key may begin with the id
            found = [row for row in await self._queue.find(wanted) if row.run_id == run_id]
            self._named[run_id] = found[0] if found else None
        row = self._named[run_id]
        if row is None:
            return None if self._visible else f"run {run_id}, which was deleted"
        return _name(row) if await self.may_see(row) else None

    async def group(self, row: RunRow) -> _Group:
        """Return the runs of the concurrency key of a run; none of them if that would be too many reads."""
        key = (row.concurrency_key or "", row.tenant)
        if key not in self._groups and len(self._groups) < _MOST_LOOKED_UP:
            wanted = RunFilter(concurrency_key=key[0], tenant=key[1], without_input=True, limit=_MOST_LIVE)
            rows: list[RunRow] = []
            for statuses in (("running", "waiting"), ("pending",)):
                rows += await self._queue.find(wanted._replace(statuses=statuses))
            behind = [each for each in rows if each.blocked == QUEUED_BEHIND and each.due_at <= self.now]
            first = min(behind, key=lambda each: (-each.priority, each.arrival), default=None)
            self._groups[key] = _Group([each for each in rows if each.blocked == 0], first)
        return self._groups.get(key, _Group([], None))

    async def whole(self, row: RunRow) -> RunRow:
        """Return a run with its limits, which a row of a list lacks; the row as it is after too many reads."""
        if row.rate is not None or row.concurrency_limit > 1:
            return row
        if row.run_id not in self._whole and len(self._whole) < _MOST_LOOKED_UP:
            self._whole[row.run_id] = await self._queue.row(row.run_id) or row
        return self._whole.get(row.run_id, row)

    async def has_no_worker(self, agent: str) -> bool:
        """Return whether no living process claims the runs of an agent. Some callers may not see the processes."""
        if self._visible is not None or not self._queue.keeps_processes:
            return False
        if self._processes is None:
            self._processes = [each for each in await processes(self._queue) if each.living]
        return not any(each.claims(agent) for each in self._processes)

    async def may_see(self, row: RunRow) -> bool:
        return self._visible is None or await self._visible(row)
