"""What a run reserves in the pools that it shares with other runs, and what it spent of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from .._core.ids import step_id
from .._engines.base import Op
from ..errors import AgentRuntimeError, LimitExceeded
from ..limits import NANO, UNITS, ModelLimits, SpendPool, nano, tokens_of, usd_of
from ..queue.pools import NOTHING, Amounts, PoolLimit, Refusal
from .run_control import RunControl
from .run_writer import RunWriter
from .step import Identity
from .usage import total

#: Seconds after which a call asks again if only reservations of other calls are in its way: first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
_LEAST: Final[Amounts] = (1, 1, 1)  # what a call needs at least that reserves nothing

Pools = Sequence[SpendPool | ModelLimits]
Waiting = Callable[[Awaitable[Any]], Awaitable[Any]]


def _amounts(usage: Mapping[str, Any], cost: float | None, calls: int) -> Amounts:
    return nano(cost or 0.0), tokens_of(usage), calls


class RunPools:
    """The pools of one run under one claim.

    Args:
        writer: Writes for the claim.
        tenant: The tenant of the run, or None.
        control: Finds the context of the run, which waits.
    """

    def __init__(self, writer: RunWriter, tenant: str | None, control: RunControl) -> None:
        self._writer, self._tenant, self._control = writer, tenant, control
        self._used: dict[Identity, Amounts] = {}  # what the answers of open model calls have used

    def wanted(self, pools: Pools, amounts: Amounts, model: str) -> dict[str, tuple[PoolLimit, bool]]:
        """Return by name what a call reserves, and whether it waits for room in that pool.

        Args:
            pools: The pools. Of pools with one name, the strictest limits hold.
            amounts: What the call may use.
            model: The provider and model of the call, the name of `ModelLimits` without a name.
        """
        found: dict[str, tuple[PoolLimit, bool]] = {}
        for pool in pools:
            name, tenant, asked, waits = "", "", amounts, True
            if isinstance(pool, SpendPool):
                (name, tenant), waits = pool.named(self._tenant), pool.on_empty == "wait"
            else:
                name = pool.name or model
                # A call that is larger than the limit is admitted when nothing else is.
                _, tokens, calls = (
                    amount if limit < 0 else min(amount, limit)
                    for amount, limit in zip(amounts, pool.amounts, strict=True)
                )
                asked = amounts[0], tokens, calls
            want = PoolLimit(name, tenant, cast("str | float", pool.per), pool.amounts, asked)
            if name in found:
                other, waits_too = found[name]
                usd, tokens, calls = map(_stricter, other.limits, want.limits)
                want, waits = other._replace(limits=(usd, tokens, calls)), waits and waits_too
            found[name] = want, waits
        return found

    async def reserve(self, name: str, key: str, wanted: Mapping[str, tuple[PoolLimit, bool]]) -> None:
        """Reserve what a call may use, and wait for room.

        Args:
            name: The name of the step of the call.
            key: Its key.
            wanted: What `wanted` returned.

        Raises:
            LimitExceeded: A pool without room fails calls, or the call needs more than a pool allows in a period.
            Postponed: The call is inside a step, and there is no room for long.
        """
        for want, _ in wanted.values():
            for unit, (limit, amount) in enumerate(zip(want.limits, want.amounts, strict=True)):
                if 0 <= limit < amount:
                    raise _exceeded(want.name, unit, limit, amount, "one call may use that much")
        if self._writer.closed_error is not None:
            raise self._writer.closed_error(name)
        names, pause = sorted(wanted), _FIRST_PAUSE
        while True:
            self._writer.reservations[name, key] = names
            reserve = (self._id(name, key), sorted(want for want, _ in wanted.values()), self._now(), False)
            [refusals] = (await self._writer.write(queue=[Op("queue.reserve", reserve)]))[2]
            if not refusals:
                return
            del self._writer.reservations[name, key]
            await self._wait(wanted, refusals, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def admit(self, pools: Pools) -> None:
        """Wait until pools have room for a call that reserves nothing."""
        wanted = self.wanted([each for each in pools if isinstance(each, SpendPool)], _LEAST, "")
        name, key, pause = "", "admitted", _FIRST_PAUSE
        while wanted:
            reserve = (self._id(name, key), sorted(want for want, _ in wanted.values()), self._now(), False)
            given_back = (sorted(wanted), self._id(name, key), self._now())
            ops = [Op("queue.reserve", reserve), Op("queue.give_back", given_back)]
            refusals = (await self._writer.write(queue=ops))[2][0]
            if not refusals:
                return
            await self._wait(wanted, refusals, pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _wait(
        self, wanted: Mapping[str, tuple[PoolLimit, bool]], refusals: Sequence[Refusal], pause: float
    ) -> None:
        longest, reason = 0.0, ""
        for refusal in refusals:
            want, waits = wanted[refusal.name]
            if not waits and not refusal.is_reserved:
                raise _exceeded(refusal.name, refusal.unit, want.limits[refusal.unit], refusal.used)
            seconds = min(refusal.seconds, pause) if refusal.is_reserved else refusal.seconds
            if seconds > longest:
                longest, reason = seconds, f"pool {refusal.name!r}"
        context = self._control.context()
        assert context is not None  # code of the run makes the call
        await context.waits.pause(longest, reason)

    def used(self, name: str, key: str, usage: Mapping[str, Any], cost: float | None) -> None:
        """Note what the answer of a call used."""
        self._used[name, key] = _amounts(usage, cost, 1)

    async def settle(self, name: str, key: str, charged: Mapping[str, Mapping[str, Any]] | None) -> None:
        """Count what an attempt of a step used in the commit of its next record.

        Args:
            name: The name of the step.
            key: Its key.
            charged: What its code charged, by model. Without a reservation it counts in the pools of the run.
        """
        reserved = self._writer.reservations.get((name, key))
        usd, tokens, calls = self._used.pop((name, key), NOTHING)
        if charged:
            sum_ = total(charged.values())
            more = _amounts(sum_, usd_of(sum_.get("cost_usd")), int(sum_.get("turns", 0)))
            usd, tokens, calls = usd + more[0], tokens + more[1], calls + more[2]
        names, id, amounts = reserved, self._id(name, key), (usd, tokens, calls)
        if names is None:
            if not any(amounts):
                return
            context = self._control.context()
            pools = () if context is None else context.budget.strictest.pools
            wanted = self.wanted([each for each in pools if isinstance(each, SpendPool)], amounts, "")
            if not wanted:
                return
            # The call was made. A repeat of its record must not count it again, which a reservation ensures.
            names = self._writer.reservations[name, key] = sorted(wanted)
            reserve = (id, sorted(want for want, _ in wanted.values()), self._now(), True)
            await self._writer.write(queue=[Op("queue.reserve", reserve)])
        await self._writer.with_next_record((name, key), [Op("queue.spend", (names, id, amounts, self._now()))])

    async def give_back(self, name: str, key: str) -> None:
        """Give back what is reserved for a call that was interrupted."""
        self._used.pop((name, key), None)
        if (names := self._writer.reservations.pop((name, key), None)) is None:
            return
        if not self._control.closed:
            with contextlib.suppress(AgentRuntimeError):  # the end of the run, or its next claim, gives it back
                await self._writer.later(Op("queue.give_back", (names, self._id(name, key), self._now())))

    def _id(self, name: str, key: str) -> str:
        return f"{self._writer.run_id}/{step_id(self._writer.run_id, name, key)}"

    def _now(self) -> float:
        return self._writer.clock.wall()


def _stricter(one: int, other: int) -> int:
    return max(one, other) if min(one, other) < 0 else min(one, other)


def _exceeded(pool: str, unit: int, allowed: int, used: int, what: str = "") -> LimitExceeded:
    scale = NANO if UNITS[unit] == "usd" else 1
    return LimitExceeded(f"pool {pool!r} ({UNITS[unit]})", allowed / scale, used / scale, what)


class PooledCalls:
    """The model calls of a loop, which reserve in pools.

    Args:
        run: The pools of the run.
        pools: Those of the loop and of its client.
        model: Returns the provider and the model, the name of `ModelLimits` without a name.
    """

    def __init__(self, run: RunPools, pools: Pools, model: Callable[[], str]) -> None:
        self._run, self._pools, self._model = run, pools, model

    @asynccontextmanager
    async def reserved(self, key: str, reserve: Mapping[str, Any], waiting: Waiting) -> AsyncIterator[list[str]]:
        """Reserve what the model call with that key may use, and give it back if the call is interrupted.

        Args:
            key: The key of the call.
            reserve: What it may use, as `reservation_of` returns it.
            waiting: Wraps the wait for room.

        Yields:
            The names of the pools, for the record of the start.
        """
        identity = "model", f"k:{key}"
        amounts = _amounts({"total_tokens": reserve.get("tokens")}, usd_of(reserve.get("usd")), 1)
        wanted = self._run.wanted(self._pools, amounts, self._model())
        try:
            await waiting(self._run.reserve(*identity, wanted))
            yield sorted(wanted)
        finally:
            await self._run.give_back(*identity)

    def used(self, key: str, usage: Mapping[str, Any], cost: float | str | None) -> None:
        """Note what the answer of the call with that key used."""
        self._run.used("model", f"k:{key}", usage, usd_of(cost))
