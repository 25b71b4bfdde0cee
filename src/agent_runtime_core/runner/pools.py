"""The pools of a store, as they are now."""

from __future__ import annotations

import datetime as _dt
from collections.abc import Mapping
from dataclasses import dataclass

from .._core.clock import aware
from .._engines.base import Op
from ..limits import NANO, UNITS
from ..queue import rate_limits
from ..queue.base import RunQueue
from ..queue.pools import PREFIX, Amounts, Pool

_PAGE = 100  # pools that one commit deletes


@dataclass(frozen=True)
class PoolInfo:
    """A pool, as `runner.pools()` returns it. Amounts are by unit: "usd", "tokens" and "requests".

    Attributes:
        name: The name of the pool.
        tenant: The tenant whose pool it is; None for a pool that tenants share.
        per: The period: "hour", "day" or "month", or the seconds of a sliding period.
        ends_at: When the calendar period ends, an aware datetime in UTC; None for a sliding period.
        limits: What the pool allows in a period, as the last model call stated it.
        spent: What finished model calls have used.
        reserved: What is reserved for model calls that have not ended.
        left: What is left of each limit; below 0 if calls have used more than they have reserved.
    """

    name: str
    tenant: str | None
    per: str | float
    ends_at: _dt.datetime | None
    limits: Mapping[str, float]
    spent: Mapping[str, float]
    reserved: Mapping[str, float]
    left: Mapping[str, float]


async def pools(queue: RunQueue, tenant: str = "") -> list[PoolInfo]:
    """Return the pools that count something now, by name.

    Args:
        queue: The queue.
        tenant: Only the pools of this tenant; "" for all pools.
    """
    found: list[PoolInfo] = []
    for name, text in (await _stored(queue)).items():
        pool = Pool(text, None, queue.clock.wall())
        if tenant in ("", pool.tenant):
            found.append(_info(name, pool))
    return found


def _info(name: str, pool: Pool) -> PoolInfo:
    used, reserved = pool.used, pool.reserved
    left = {unit: limit - used[i] for i, (unit, limit) in enumerate(zip(UNITS, pool.limits, strict=True)) if limit >= 0}
    usd, tokens, calls = (used[i] - reserved[i] for i in range(3))
    return PoolInfo(
        name, pool.tenant or None, pool.per, aware(pool.ends) if pool.ends else None,
        _shown({unit: limit for unit, limit in zip(UNITS, pool.limits, strict=True) if limit >= 0}),
        _by_unit((usd, tokens, calls)), _by_unit(reserved), _shown(left),
    )  # fmt: skip


def _by_unit(amounts: Amounts) -> dict[str, float]:
    return _shown(dict(zip(UNITS, amounts, strict=True)))


def _shown(amounts: Mapping[str, int]) -> dict[str, float]:
    return {unit: amount / NANO if unit == "usd" else amount for unit, amount in amounts.items()}


async def given_back_ops(queue: RunQueue, run_id: str, now: float) -> list[Op]:
    """Return what gives back the reservations of calls that a killed process has left open.

    Args:
        queue: The queue.
        run_id: The run, which no process executes.
        now: The time on the wall clock.
    """
    # The journal does not name the pools of a call whose process was killed before it stored the start.
    names = [name for name, text in (await _stored(queue)).items() if f'"{run_id}/' in text]
    return [Op("queue.give_back", (names, f"{run_id}/", now))] if names else []


async def drop_unused(queue: RunQueue) -> None:
    """Delete the states of pools and rate limits that count nothing any more.

    A store would contain ever more of them if their names contain a tenant, or a customer.
    """
    now = queue.clock.wall()
    if queue.keeps_limits and (rates := rate_limits.unused(await queue.read("shared", rate_limits.PREFIX), now)):
        await queue.commits.commit(None, [Op("queue.forget_shared", (rates,))])
    names = [name for name, text in (await _stored(queue)).items() if Pool(text, None, now).text() is None]
    for start in range(0, len(names), _PAGE):  # one transaction for all would time out, and lock too many names
        some = names[start : start + _PAGE]
        await queue.commits.commit(None, [Op("queue.give_back", (some, "/", now))])  # no call has such an id


async def _stored(queue: RunQueue) -> dict[str, str]:
    if not queue.keeps_limits:
        return {}
    found: dict[str, str] = await queue.read("shared", PREFIX)
    return {name.removeprefix(PREFIX): text for name, text in sorted(found.items())}
