"""Tokens, cost and number of runs, by agent, model or day."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from .._core.clock import aware
from .._core.validation import unknown
from .._execution.usage import charged_by_model, reported_by
from .._journal.record import DONE, Record, is_copied
from ..errors import InvalidArgument
from ..limits import COSTS, sum_usd
from ..queue.records import RunFilter, RunRow
from ..runner.run_client import RunClient
from .journal import outcomes_of
from .plain import iso_time, plain_value

BY: Final = ("agent", "model", "day")
DEFAULT_SECONDS: Final = 30 * 86_400.0
_PAGE: Final = 500
#: Runs that are counted at most, the newest first. By model the journal of each run is read.
MOST_RUNS: Final = {"agent": 100_000, "day": 100_000, "model": 2_000}

_Item = tuple[str, dict[str, Any]]


async def usage_view(
    runner: RunClient, by: str = "agent", since: float | None = None, until: float | None = None,
    tenant: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return what the runs that were created in a time have used.

    Args:
        runner: The runner on the store.
        by: "agent", "model" or "day" (of their creation, in UTC).
        since: Wall seconds; None for 30 days before `until`.
        until: Wall seconds; None for now.
        tenant: Only runs of this tenant; None for all runs.

    Returns:
        {"by", "since", "until", "complete", "items", "total"}. Each item is {<by>, "runs", "tokens", "prompt_tokens",
        "completion_tokens", "cost_usd"}, the most expensive first. `complete` is False if there are more runs than are
        counted; `since` is then the creation of the oldest run that was. By agent and day only finished runs have
        usage; by model each model call and `ctx.charge` counts, and `runs` are those that called the model.

    Raises:
        InvalidArgument: `by` is unknown.
    """
    if by not in BY:
        raise InvalidArgument(unknown("by", by, BY))
    now = runner.queue.clock.wall()
    since = (now if until is None else until) - DEFAULT_SECONDS if since is None else since
    wanted = RunFilter(since=since, until=until, tenant=tenant, limit=_PAGE, newest_first=True, light=True)
    sums, left, complete, oldest = dict[str, dict[str, Any]](), MOST_RUNS[by], True, since
    while rows := await runner.queue.find(wanted):
        for row, items in await _used(runner, by, rows[:left]):
            for name, usage in items:
                _add(sums.setdefault(name, _nothing()), usage)
            oldest = row.created_at
        left -= len(rows)
        if len(rows) < _PAGE:
            break
        if left <= 0:
            complete = False
            break
        wanted = wanted._replace(before=(rows[-1].created_at, rows[-1].arrival))
    total = _nothing()
    for each in sums.values():
        _add(total, each)
    order = sorted(sums.items(), key=lambda item: (-item[1]["cost_usd"], -item[1]["tokens"], item[0]))
    if by == "day":
        order = sorted(sums.items(), reverse=True)
    return {
        "by": by, "since": iso_time(since if complete else oldest), "until": iso_time(now if until is None else until),
        "complete": complete, "items": [{by: name, **sums_} for name, sums_ in order], "total": total,
    }  # fmt: skip


async def _used(runner: RunClient, by: str, rows: list[RunRow]) -> list[tuple[RunRow, Iterable[_Item]]]:
    if by == "model":
        return [(row, (await _by_model(runner, row)).items()) for row in rows]
    found: list[tuple[RunRow, Iterable[_Item]]] = []
    for row, (_, usage) in zip(rows, await outcomes_of(runner, rows), strict=True):
        name = row.agent if by == "agent" else f"{aware(row.created_at):%Y-%m-%d}"
        found.append((row, [(name, {**usage, "runs": 1})]))
    return found


async def _by_model(runner: RunClient, row: RunRow) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for record in await runner.state_store.records(row.run_id):
        for model, usage in _models_in(record):
            sums = found.setdefault(model or "unknown", _nothing())
            _add(sums, {**usage, "runs": 0})
            sums["runs"] = 1
    return found


def _models_in(record: Record) -> Iterator[_Item]:
    """Yield what the model call of a record has used, and what its step has charged, under the names of the models."""
    if is_copied(record):
        return
    yield from charged_by_model(record).items()
    if record.kind != DONE or record.name != "model":
        return
    answer = plain_value(record.result)
    if isinstance(answer, dict) and isinstance(answer.get("message"), dict):
        yield str(answer.get("model") or ""), reported_by(record)


def _nothing() -> dict[str, Any]:
    return {"runs": 0, "tokens": 0, "prompt_tokens": 0, "completion_tokens": 0, "cost_usd": 0.0}


def _add(sums: dict[str, Any], usage: dict[str, Any]) -> None:
    for name in sums:
        value = usage.get("total_tokens", usage.get("tokens")) if name == "tokens" else usage.get(name)
        if isinstance(value, int | float):
            sums[name] = sum_usd(sums[name], value) if name in COSTS else sums[name] + value
