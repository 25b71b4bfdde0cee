"""The limits of a run, and what the run used of them."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as _dt
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ._core.arguments import checked_name
from ._core.context_vars import queued
from ._core.settings import COUNT, POSITIVE, POSITIVE_SECONDS, TRUTH, SettingType, number, with_known_names
from ._core.validation import must, unknown
from .errors import InvalidArgument, LimitExceeded

__all__ = ["ModelLimits", "RateLimit", "RunLimits", "SpendPool"]

Waiting = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]  # wraps a wait, such as a wait that can be cancelled

#: Calendar periods of a pool, in UTC.
PERIODS: Final = ("hour", "day", "month")
#: Money of pools in whole parts of a USD: sums of integers are equal on every store and in every order.
NANO: Final = 1_000_000_000
_MOST: Final = 2**53 - 1  # the integers that Lua and JSON keep exactly
_MOST_USD: Final = 9_000_000
_USD_OF_POOL: Final = dataclasses.replace(
    number(most=_MOST_USD, above=True), wanted=f"a number above 0 and at most {_MOST_USD:,}"
).or_none()
_AMOUNT: Final = number(1, _MOST, whole=True).or_none()
_ALL_NAMES: Final = "{tenant}"


@partial(with_known_names, what="field of a SpendPool")
@dataclass(frozen=True)
class SpendPool:
    """A budget that all runs with this pool share, in every process of the store.

    What a model call may use is reserved before the call, and corrected to its usage in the commit that records its
    answer. A call counts in the period in which it began. Put pools into the `pools` of `RunLimits`:

        RunnerConfig(limits=RunLimits(pools=[SpendPool("acme", usd=20, per="day")]))

    Args:
        name: The name of the pool. `{tenant}` in it stands for the tenant of the run, so each tenant gets a pool.
        usd: USD for each period, from the configured `model_prices`; None for no limit.
        tokens: Tokens for each period; None for no limit.
        per: A calendar period in UTC, "hour", "day" or "month"; or a sliding period as a timedelta or in seconds.
        on_empty: What a model call without room does: "wait" until there is room, parked and without a slot of
            the worker, or "fail" with LimitExceeded.

    Raises:
        InvalidArgument: A value is invalid, or neither `usd` nor `tokens` is set.

    Examples:
        >>> from agent_runtime_core import SpendPool
        >>> SpendPool("acme", usd=20, per="day").on_empty
        'wait'
    """

    name: str
    usd: float | None = None
    tokens: int | None = None
    per: str | float | _dt.timedelta = "day"
    on_empty: str = "wait"

    def __post_init__(self) -> None:
        checked_name("name of a SpendPool", self.name)
        what = f"SpendPool {self.name!r}: "
        _USD_OF_POOL.check(f"{what}usd", self.usd)
        _AMOUNT.check(f"{what}tokens", self.tokens)
        if self.usd is None and self.tokens is None:
            raise must(f"SpendPool {self.name!r}", "limit usd or tokens", None)
        if not isinstance(self.per, str) or self.per not in PERIODS:
            object.__setattr__(self, "per", _seconds(f"{what}per", self.per, "'hour', 'day', 'month', a timedelta or "))
        if self.on_empty not in ("wait", "fail"):
            raise must(f"{what}on_empty", "be 'wait' or 'fail'", self.on_empty)

    @property
    def amounts(self) -> tuple[int, int, int]:
        """What the pool allows in each period, in the order of `UNITS`; -1 for no limit."""
        return -1 if self.usd is None else nano(self.usd), -1 if self.tokens is None else self.tokens, -1

    def named(self, tenant: str | None) -> tuple[str, str]:
        """Return the name in the store for runs of that tenant, and the tenant if the pool is only for it.

        Args:
            tenant: The tenant, or None.
        """
        is_own = _ALL_NAMES in self.name
        return self.name.replace(_ALL_NAMES, tenant or ""), (tenant or "") if is_own else ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values, without those that are None."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@partial(with_known_names, what="field of a ModelLimits")
@dataclass(frozen=True)
class ModelLimits:
    """How many requests and tokens a provider allows, for all workers of the store together.

    A model call without room waits: shortly in memory, and longer as a parked run. Pass the limits to a model client,
    or put them into the `pools` of `RunLimits`:

        OpenAIClient(limits=ModelLimits(requests=500, tokens=200_000, per=60))

    Args:
        requests: Model calls in each period; None for no limit. A request that the client repeats counts once.
        tokens: Tokens of prompts and answers in each period; None for no limit.
        per: The sliding period, as a timedelta or in seconds.
        name: Clients with the same name share the limits. By default the provider and the model of the call.

    Raises:
        InvalidArgument: A value is invalid, or neither `requests` nor `tokens` is set.

    Examples:
        >>> from agent_runtime_core import ModelLimits
        >>> ModelLimits(requests=500, tokens=200_000).per
        60.0
    """

    requests: int | None = None
    tokens: int | None = None
    per: float | _dt.timedelta = 60.0
    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            checked_name("name of a ModelLimits", self.name)
        for field in ("requests", "tokens"):
            _AMOUNT.check(f"ModelLimits: {field}", getattr(self, field))
        if self.requests is None and self.tokens is None:
            raise must("ModelLimits", "limit requests or tokens", None)
        object.__setattr__(self, "per", _seconds("ModelLimits: per", self.per, "a timedelta or "))

    @property
    def amounts(self) -> tuple[int, int, int]:
        """What is allowed in each period, in the order of `UNITS`; -1 for no limit."""
        return -1, -1 if self.tokens is None else self.tokens, -1 if self.requests is None else self.requests

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values. `requests` is always there: it tells them from those of a SpendPool."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {"requests": None, **found}


#: What a pool counts: USD in nano-dollars, tokens, model calls.
UNITS: Final = ("usd", "tokens", "requests")


def nano(usd: float) -> int:
    """Return an amount of USD in nano-dollars."""
    return round(usd * NANO)


def _seconds(what: str, per: Any, others: str) -> float:
    seconds = per.total_seconds() if isinstance(per, _dt.timedelta) else per
    if not POSITIVE_SECONDS.fits(seconds):
        raise must(what, f"be {others}{POSITIVE_SECONDS.wanted}", per)
    return float(seconds)


def _pools(given: Any) -> tuple[SpendPool | ModelLimits, ...]:
    """Return pools from a list of pools or of dicts with their fields."""
    if not isinstance(given, (list, tuple)):
        raise must("pools", "be a list of SpendPool and ModelLimits", given)
    return tuple(map(_pool, given))


def _pool(given: Any) -> SpendPool | ModelLimits:
    if isinstance(given, (SpendPool, ModelLimits)):
        return given
    if not isinstance(given, Mapping):
        raise must("each of pools", "be a SpendPool or a ModelLimits", given)
    kind = ModelLimits if "requests" in given or "name" not in given else SpendPool
    return kind(**given)


@partial(with_known_names, what="limit")
@dataclass(frozen=True)
class RunLimits:
    """Limits of a run; None means no limit.

    No model call or tool call begins after a limit is reached. The last model call before that may exceed `max_tokens`
    and `max_cost_usd` by its own usage, because only its response says what it used.

        RunnerConfig(limits=RunLimits(max_turns=20, max_cost_usd=0.50))

    Args:
        max_turns: Model calls.
        max_tool_calls: Tool calls.
        max_tokens: Tokens of prompts and answers, as the provider reports them.
        max_cost_usd: USD, from the configured `model_prices`.
        turn_timeout: Seconds of work in one model call and its tool calls.
        run_timeout: Seconds of work in the run. Waiting, and the time between two executions, do not count.
        count_estimates: Whether `max_tokens` and `max_cost_usd` also count the estimated usage of interrupted model
            calls, for which the provider reported nothing.
        pools: `SpendPool` and `ModelLimits`, which the run shares with others. Pools of an agent and of a run are
            added to those of the runner.

    Raises:
        InvalidArgument: A value is invalid.

    Examples:
        >>> from agent_runtime_core import RunLimits
        >>> RunLimits(max_turns=20, max_cost_usd=0.5).as_dict()
        {'max_turns': 20, 'max_cost_usd': 0.5}
    """

    max_turns: int | None = None
    max_tool_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    turn_timeout: float | None = None
    run_timeout: float | None = None
    count_estimates: bool = False
    pools: Sequence[SpendPool | ModelLimits] = ()

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            kind.check(name, getattr(self, name))
        if self.pools != ():
            object.__setattr__(self, "pools", _pools(self.pools))

    @classmethod
    def of(cls, given: RunLimits | Mapping[str, Any] | None) -> RunLimits:
        """Return limits from `RunLimits`, from a dict of their fields, or from None (no limits).

        Args:
            given: The limits.

        Raises:
            InvalidArgument: A field is unknown or invalid.

        Examples:
            >>> from agent_runtime_core import RunLimits
            >>> RunLimits.of({"max_turns": 3}).max_turns
            3
        """
        if isinstance(given, RunLimits):
            return given
        if given is None:
            return NO_LIMITS
        if not isinstance(given, Mapping):
            raise must("limits", "be RunLimits or a dict of their fields", given)
        for name in given:
            if name not in _NAMES:
                raise InvalidArgument(unknown("limit", name, _NAMES))
        return cls(**given)

    def stricter(self, other: RunLimits | Mapping[str, Any] | None) -> RunLimits:
        """Return the smaller value of each limit; estimates count if either counts them.

        Args:
            other: The limits to compare with, as in `of`.

        Examples:
            >>> from agent_runtime_core import RunLimits
            >>> RunLimits(max_turns=5).stricter({"max_turns": 3, "max_tokens": 1000}).as_dict()
            {'max_turns': 3, 'max_tokens': 1000}
        """
        others = RunLimits.of(other)
        if others is NO_LIMITS or self is NO_LIMITS:  # most runs
            return self if others is NO_LIMITS else others
        pairs = ((name, (getattr(self, name), getattr(others, name))) for name in _NUMBERS)
        smaller = {name: min((v for v in both if v is not None), default=None) for name, both in pairs}
        pools = (*self.pools, *(each for each in others.pools if each not in self.pools))
        return RunLimits(**smaller, count_estimates=self.count_estimates or others.count_estimates, pools=pools)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults.

        Examples:
            >>> from agent_runtime_core import RunLimits
            >>> RunLimits(max_tokens=1000).as_dict()
            {'max_tokens': 1000}
        """
        found = {name: value for name in _NAMES if (value := getattr(self, name)) is not None and value is not False}
        pools = found.pop("pools")
        return {**found, "pools": [each.as_dict() for each in pools]} if pools else found


LEAST_PERIOD = 0.001  # seconds
OF_TENANT: Final = "\ntenant "  # in a stored rate limit, before the tenant whose runs are counted apart
ALL_AGENTS: Final = "*"  # the key of a rate limit for the runs of all agents


@partial(with_known_names, what="rate limit")
@dataclass(frozen=True)
class RateLimit:
    """At most so many runs start in any period. The others wait in the queue, without a slot, and start in order.

    All workers on a store share the count. It counts attempts that start, so also retries; a parked run that resumes
    is no start.

        class Mailer(AgentRuntime):
            key = "mailer"
            rate_limit = RateLimit(50, per=1.0)

    Args:
        starts: Most starts in any sliding period.
        per: The length of the period: seconds, or a timedelta.
        key: Runs with this key and the same period are counted together, whichever agent executes them. None: the runs
            of each agent, or those of all agents ("*") for the limit of a `RunnerConfig`. A function is called with the
            input of each new run and returns the key, or None for a run without a rate limit.
        per_tenant: Count the runs of each tenant apart.

    Raises:
        InvalidArgument: A value is invalid.

    Examples:
        >>> from agent_runtime_core import RateLimit
        >>> RateLimit(50, per=1.0, key="mail").starts
        50
    """

    starts: int
    per: float | _dt.timedelta
    key: str | Callable[[Mapping[str, Any]], str | None] | None = None
    per_tenant: bool = False

    def __post_init__(self) -> None:
        POSITIVE.check("starts", self.starts)
        seconds = self.per.total_seconds() if isinstance(self.per, _dt.timedelta) else self.per
        _PERIOD.check("per", seconds)
        object.__setattr__(self, "per", float(seconds))
        if self.key is not None and not callable(self.key):
            checked_name("key", self.key)
        TRUTH.check("per_tenant", self.per_tenant)

    def text(self, agent: str, input: Mapping[str, Any], tenant: str) -> str | None:
        """Return the limit as the row of a run stores it; None if it does not limit this run.

        Args:
            agent: The agent of the run.
            input: The input of the run.
            tenant: The tenant of the run, or "".
        """
        key = self.key(input) if callable(self.key) else self.key
        if key is None and callable(self.key):
            return None
        counted = f"agent {agent}" if key is None else f"key {checked_name('the key of a rate limit', key)}"
        # No name has a line break, so no key is that of another tenant.
        return f"{self.starts} {self.per!r} {counted}" + (f"{OF_TENANT}{tenant}" if self.per_tenant else "")


_PERIOD = dataclasses.replace(number(LEAST_PERIOD), wanted="a number of seconds of at least 0.001, or a timedelta")
#: Who takes turns: the tenants, or what a function returns for the input of a run.
TURNS: Final = SettingType(
    "'tenant', a function of the input, or None", lambda value: value in (None, "tenant") or callable(value)
)
RATE_LIMIT: Final = SettingType("RateLimit(...) or None", lambda value: value is None or isinstance(value, RateLimit))

_NAMES = tuple(field.name for field in dataclasses.fields(RunLimits))
_NUMBERS = _NAMES[:-2]  # all but count_estimates and pools
_NO_LIMIT = " for no limit"
_TYPES = {
    "max_turns": POSITIVE.or_none(_NO_LIMIT),
    **dict.fromkeys(("max_tool_calls", "max_tokens"), COUNT.or_none(_NO_LIMIT)),
    "max_cost_usd": number().or_none(_NO_LIMIT),
    **dict.fromkeys(("turn_timeout", "run_timeout"), POSITIVE_SECONDS.or_none(_NO_LIMIT)),
    "count_estimates": TRUTH,
}
NO_LIMITS = RunLimits()


def named_limits(given: RunLimits | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the validated fields that `given` names: all keys of a mapping, or what a RunLimits sets."""
    limits = RunLimits.of(given)
    found = limits.as_dict()
    return {name: found.get(name, getattr(limits, name)) for name in given} if isinstance(given, Mapping) else found


#: Estimate of the unseen tokens of an interrupted model call whose request had no `max_tokens`.
UNSEEN_TOKENS = 1024

#: The counters of a usage that are summed over calls.
COUNTED = frozenset({
    "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "cache_write_tokens",
    "cache_write_1h_tokens", "reasoning_tokens", "web_search_requests",
})  # fmt: skip

#: The entries of a usage that are costs in USD.
COSTS: Final = frozenset({"cost_usd", "estimated_cost_usd"})
_USD_DIGITS: Final = 10  # after the point: a token at 0.0001 USD per million costs 0.0000000001 USD
_USD: Final = re.compile(r"\d{1,15}(\.\d{1,30})?")


class Budget:
    """What a loop used of its limits, and with `outer` of the limits of its run. The usage of children counts."""

    def __init__(
        self, limits: RunLimits, outer: Budget | None = None, *, overrides: Mapping[str, Any] | None = None,
        of_runner: Sequence[SpendPool | ModelLimits] = (),
    ) -> None:  # fmt: skip
        #: Limits that `resume` or `requeue` set for this run. They replace those of agent, runner and input.
        self.overrides: Mapping[str, Any] = outer.overrides if outer is not None else overrides or {}
        limits = dataclasses.replace(limits, **self.overrides) if self.overrides else limits
        self.limits: RunLimits = limits
        self.outer: Budget | None = outer
        self._of_runner = of_runner  # pools that child runs have without being told, from their runner
        #: The stricter of these limits and the limits of `outer`.
        self.strictest: RunLimits = limits if outer is None else limits.stricter(outer.strictest)
        #: Whether no limit applies.
        self.unlimited: bool = self.strictest == NO_LIMITS
        #: Whether a time limit applies.
        self.timed: bool = self.strictest.turn_timeout is not None or self.strictest.run_timeout is not None
        self._chain: tuple[Budget, ...] = (self,) if outer is None else (self, *outer._chain)
        self.turns: int = 0
        self.tool_calls: int = 0
        self.tokens: int = 0
        self.cost: float = 0.0
        #: Upper estimates of what interrupted model calls used; no provider reported it.
        self.estimated_tokens: int = 0
        self.estimated_cost: float = 0.0
        self.seconds: float = 0.0
        #: What is reserved for active children and model calls, until they end.
        self.reserved_tokens: int = 0
        self.reserved_cost: float = 0.0
        self.reserved_calls: int = 0
        self.reserved_turns: int = 0
        self._active_calls: set[asyncio.Future[None]] = set()  # each is done when an active call or child ends
        self.usage: dict[str, Any] = {}
        self._warned = False

    @property
    def begun(self) -> bool:
        """Whether any of the budget was used."""
        return bool(self.turns or self.tool_calls or self.usage or self.estimated_tokens)

    # -- checks: raise LimitExceeded if a limit is reached

    def _check(self, name: str, used: float) -> None:
        allowed = getattr(self.limits, name)
        if allowed is not None and used >= allowed:
            raise LimitExceeded(name, allowed, used)

    @property
    def _tokens(self) -> int:
        """Tokens that count against `max_tokens`, without those reserved for calls in flight."""
        return self.tokens + self.estimated_tokens if self.limits.count_estimates else self.tokens

    @property
    def _cost(self) -> float:
        """USD that count against `max_cost_usd`, without those reserved for calls in flight."""
        return sum_usd(self.cost, self.estimated_cost) if self.limits.count_estimates else self.cost

    def before_turn(self) -> None:
        """Check that another turn may begin."""
        if self.unlimited:
            return
        self._check("max_turns", self.turns + self.reserved_turns)
        self.before_call()
        if self.outer is not None:
            self.outer.before_turn()

    def exceeded(self) -> LimitExceeded | None:
        """Return the first limit of which more was used than it allows."""
        for each in self._chain:
            used = {
                "max_turns": each.turns,
                "max_tool_calls": each.tool_calls,
                "max_tokens": each._tokens,
                "max_cost_usd": each._cost,
            }
            for name, amount in used.items():
                allowed = getattr(each.limits, name)
                if allowed is not None and amount > allowed:
                    return LimitExceeded(name, allowed, amount)
        return None

    def spent(self) -> LimitExceeded | None:
        """Return the first limit in tokens or USD that is reached without what is reserved for calls in flight."""
        for each in self._chain:
            for name, amount in (("max_tokens", each._tokens), ("max_cost_usd", each._cost)):
                allowed = getattr(each.limits, name)
                if allowed is not None and amount >= allowed:
                    return LimitExceeded(name, allowed, amount)
        return None

    @property
    def is_last_turn(self) -> bool:
        """Whether `max_turns` allows no turn after those that are counted and active."""
        for each in self._chain:
            most = each.limits.max_turns
            if most is not None and each.turns + each.reserved_turns >= most:
                return True
        return False

    def before_call(self) -> None:
        """Check that another model call may begin."""
        if self.unlimited:
            return
        self._check("max_tokens", self._tokens + self.reserved_tokens)
        if self.limits.max_cost_usd is not None:
            self._check("max_cost_usd", sum_usd(self._cost, self.reserved_cost))
        self._check("run_timeout", self.seconds)
        if self.outer is not None:
            self.outer.before_call()

    def before_tools(self, count: int) -> None:
        """Check that `count` more tool calls may begin."""
        if self.unlimited:
            return
        allowed, used = self.limits.max_tool_calls, self.tool_calls + self.reserved_calls
        if allowed is not None and used + count > allowed:
            raise LimitExceeded("max_tool_calls", allowed, used, f"the model requested {count} more")
        if self.outer is not None:
            self.outer.before_tools(count)

    def remaining(self, seconds: float, turn_seconds: float) -> float | None:
        """Return the seconds until a time limit, after `seconds` of this work period and `turn_seconds` of the turn."""
        limits = self.limits
        ends = [] if self.outer is None else [self.outer.remaining(seconds, turn_seconds)]
        if limits.turn_timeout is not None:
            ends.append(limits.turn_timeout - turn_seconds)
        if limits.run_timeout is not None:
            ends.append(limits.run_timeout - self.seconds - seconds)
        return min((end for end in ends if end is not None), default=None)

    def time_limit_error(self, seconds: float, turn_seconds: float) -> LimitExceeded:
        """Return the error for the time limit that was reached, so far into the period of work and the turn."""
        left, turn, run = self.remaining(seconds, turn_seconds), self.limits.turn_timeout, self.limits.run_timeout
        if turn is not None and left == turn - turn_seconds:
            return LimitExceeded("turn_timeout", turn, max(turn, turn_seconds))
        if run is not None and left == run - self.seconds - seconds:
            return LimitExceeded("run_timeout", run, max(run, self.seconds + seconds))
        assert self.outer is not None
        return self.outer.time_limit_error(seconds, turn_seconds)

    # -- counting

    def turn(self) -> None:
        """Count one turn."""
        for each in self._chain:
            each.turns += 1

    def tool(self, count: int = 1) -> None:
        """Count tool calls."""
        for each in self._chain:
            each.tool_calls += count

    def add_seconds(self, seconds: float) -> None:
        """Count seconds of work."""
        for each in self._chain:
            each.seconds += seconds

    def used(self, usage: Mapping[str, Any], cost: float | str | None) -> None:
        """Count the usage and the cost of a model call or a child, in USD as a number or as it is stored."""
        tokens, usd = tokens_of(usage), None if cost is None else usd_of(cost)
        for each in self._chain:
            each._count(usage, tokens, usd)

    def add_counted(self, usage: Mapping[str, Any]) -> None:
        """Count in this budget alone a usage that the budget around it already counted."""
        if usage:
            self._count(usage, tokens_of(usage), usd_of(usage.get("cost_usd")))
            self._add_estimates(usage)

    def _count(self, usage: Mapping[str, Any], tokens: int, cost: float | None) -> None:
        total = self.usage
        for name, value in usage.items():
            if name in COUNTED and isinstance(value, int):
                total[name] = total.get(name, 0) + value
        self.tokens += tokens
        if cost is not None:
            self.cost = self.usage["cost_usd"] = sum_usd(self.cost, cost)

    def reserve_for_child(self, most: RunLimits = NO_LIMITS) -> RunLimits:
        """Reserve what remains of the limits, or `most`, for a child; return the child's limits."""
        reservation = most
        for each in self._chain:
            reservation = reservation.stricter(each._unreserved())
        for each in self._chain:
            each._reserve(reservation, 1)
        return reservation

    def _unreserved(self) -> RunLimits:
        limits = self.limits

        def rest(allowed: Any, used: Any) -> Any:
            return None if allowed is None else max(allowed - used, 0)

        cost = rest(limits.max_cost_usd, sum_usd(self._cost, self.reserved_cost))

        return RunLimits(
            max_tool_calls=rest(limits.max_tool_calls, self.tool_calls + self.reserved_calls),
            max_tokens=rest(limits.max_tokens, self._tokens + self.reserved_tokens),
            max_cost_usd=usd_of(cost),
            count_estimates=limits.count_estimates,
            pools=tuple(each for each in limits.pools if each not in self._of_runner),
        )

    def _reserve(self, given: RunLimits, sign: int) -> None:
        self.reserved_tokens += sign * (given.max_tokens or 0)
        if given.max_cost_usd:
            self.reserved_cost = sum_usd(self.reserved_cost, sign * given.max_cost_usd)
        self.reserved_calls += sign * (given.max_tool_calls or 0)

    def return_unused(self, given: RunLimits, usage: Mapping[str, Any]) -> None:
        """Release the reservation of a child that ended, and count what it used."""
        for each in self._chain:
            each._reserve(given, -1)
        calls = usage.get("tool_calls")
        self.tool(calls if isinstance(calls, int) else 0)
        self.used(usage, usage.get("cost_usd"))
        self._estimate(usage)

    def recalled(self, usage: Mapping[str, Any]) -> None:
        """Count what loops used in an earlier execution of the run whose code is not executed again."""
        for each in self._chain:
            each.turns += usage.get("turns", 0)
        self.tool(usage.get("tool_calls", 0))
        self.used(usage, usage.get("cost_usd"))
        self._estimate(usage)

    @contextmanager
    def active_call(self) -> Iterator[None]:
        """Mark a call or child as active: it may use less than it reserved, so other calls wait for its end."""
        active, ended = self._chain[-1]._active_calls, asyncio.get_running_loop().create_future()
        active.add(ended)
        try:
            yield
        finally:
            active.remove(ended)
            ended.set_result(None)

    async def until_allowed(self, before: Callable[[], None], waiting: Waiting | None = None) -> None:
        """Wait until the check `before` passes.

        Args:
            before: A check, such as `before_call`.
            waiting: Wraps each wait, if given.

        Raises:
            LimitExceeded: The check fails, and no active call or child could release a reservation.
        """
        active = self._chain[-1]._active_calls
        while True:
            try:
                return before()
            except LimitExceeded:
                if not active:
                    raise
            wait = _one_ended(active)
            await (wait if waiting is None else waiting(wait))

    @asynccontextmanager
    async def reserved(
        self, reserve: Mapping[str, Any] | None, *, turn: bool = True, waiting: Waiting | None = None
    ) -> AsyncIterator[None]:
        """Reserve the budget of one model call that runs concurrently with others.

        Until the call ends, its `reserve` counts as used, and with `turn` the call counts as a turn.

        Args:
            reserve: Upper bounds of the call, as `reservation_of` returns them, or None.
            turn: Whether the call is a turn.
            waiting: Wraps the wait for other active calls, if given.

        Raises:
            LimitExceeded: A limit is reached, and no other active call could release a reservation.
        """
        await self.until_allowed(self.before_turn if turn else self.before_call, waiting)
        reservation = (
            RunLimits(max_tokens=reserve.get("tokens"), max_cost_usd=usd_of(reserve.get("usd")))
            if reserve
            else NO_LIMITS
        )
        with self.active_call():
            self._reserve_call(reservation, int(turn), 1)
            try:
                yield
            finally:
                self._reserve_call(reservation, int(turn), -1)

    @asynccontextmanager
    async def concurrent(self, reserve: Mapping[str, Any] | None, *, turn: bool = True) -> AsyncIterator[None]:
        """Like `reserved`; then count the turn, or the whole reservation if the call was interrupted."""
        async with self.reserved(reserve, turn=turn):
            try:
                yield
                if turn:
                    self.turn()
            except asyncio.CancelledError:
                self.count_in_doubt(reserve)
                raise

    def _reserve_call(self, reservation: RunLimits, turns: int, sign: int) -> None:
        for each in self._chain:
            each._reserve(reservation, sign)
            each.reserved_turns += sign * turns

    def count_in_doubt(self, reserve: Mapping[str, Any] | None) -> None:
        """Count a model call whose outcome is unknown: its estimated usage is its whole reservation."""
        if reserve:
            self._estimate({"estimated_tokens": reserve.get("tokens"), "estimated_cost_usd": reserve.get("usd")})

    def _estimate(self, usage: Mapping[str, Any]) -> None:
        """Count the estimated part of a usage."""
        for each in self._chain:
            each._add_estimates(usage)

    def _add_estimates(self, usage: Mapping[str, Any]) -> None:
        tokens, cost = usage.get("estimated_tokens"), usd_of(usage.get("estimated_cost_usd")) or 0.0
        self.estimated_tokens += tokens if isinstance(tokens, int) else 0
        self.estimated_cost = sum_usd(self.estimated_cost, cost)

    def newly_doubtful(self) -> LimitExceeded | None:
        """Return the first limit that only estimates of interrupted calls reach; once per run and claim."""
        root = self._chain[-1]
        if not root.estimated_tokens or root._warned:
            return None
        for each in self._chain:
            limits = each.limits
            for name, used, estimated in (
                ("max_tokens", each.tokens, each.estimated_tokens),
                ("max_cost_usd", each.cost, each.estimated_cost),
            ):
                allowed = getattr(limits, name)
                both = sum_usd(used, estimated) if name == "max_cost_usd" else used + estimated
                if allowed is not None and not limits.count_estimates and used < allowed <= both:
                    root._warned = True
                    return LimitExceeded(name, allowed, both)
        return None

    def reported_usage(self) -> dict[str, Any]:
        """Return the usage for a RunResult. Estimates of interrupted calls have their own keys."""
        reported = {**self.usage, "turns": self.turns, "tool_calls": self.tool_calls}
        if self.estimated_tokens:
            reported["estimated_tokens"] = self.estimated_tokens
        if self.estimated_cost:
            reported["estimated_cost_usd"] = self.estimated_cost
        return reported


async def _one_ended(active: Collection[asyncio.Future[None]]) -> None:
    with queued():
        await asyncio.wait(active, return_when=asyncio.FIRST_COMPLETED)


def tokens_of(usage: Mapping[str, Any]) -> int:
    """Return all tokens of a call: the reported total, else prompt and completion."""
    total = usage.get("total_tokens")
    if isinstance(total, int) and total:
        return total
    parts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return sum(part for part in parts if isinstance(part, int))


def usd_of(value: Any) -> float | None:
    """Return a cost in USD with ten digits after the point, from a number or from the text that `usd_text` returns.

    None for any other value: an object that a step returned may have any value under the name of a cost.
    """
    if isinstance(value, str):
        return round(float(value), _USD_DIGITS) if _USD.fullmatch(value) else None
    return round(float(value), _USD_DIGITS) if isinstance(value, (int, float)) else None


def usd_text(cost: float | None) -> str | None:
    """Return a cost as decimal text, in which journals store it. A float may be written as 1e-08."""
    return None if cost is None else f"{cost:.{_USD_DIGITS}f}".rstrip("0").rstrip(".")


def sum_usd(*costs: float) -> float:
    """Return the sum of costs, rounded: so it equals the sum of their decimal texts, in any order."""
    return round(sum(costs), _USD_DIGITS)


def stored_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a usage with its costs as decimal text."""
    return {name: usd_text(usd_of(value)) if name in COSTS else value for name, value in usage.items()}


def reservation_of(tokens: int, cost: float | None) -> dict[str, Any]:
    """Return the most that a model call may use, as it is stored with the start of the call."""
    return {"tokens": tokens} if cost is None else {"tokens": tokens, "usd": usd_text(cost)}
