"""What a run may use, and what it has used so far."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ._core.context_vars import queued
from ._core.settings import COUNT, POSITIVE, POSITIVE_SECONDS, TRUTH, number
from ._core.validation import nearest_name
from .errors import InvalidArgument, LimitExceeded, brief

__all__ = ["RunLimits"]

Waiting = Callable[[Coroutine[Any, Any, Any]], Awaitable[Any]]  # what a wait is awaited through


@dataclass(frozen=True)
class RunLimits:
    """Limits of a run; None is no limit. Times are seconds a run is at work, not those it waits or lies dead.

    A turn is one call of the model and the tool calls it asks for. No call is begun once a limit is
    reached: the last one before may go beyond `max_tokens` and `max_cost_usd` by what it takes itself.

    `max_tokens` and `max_cost_usd` limit what the provider reported. The usage of a model call that was cut off is
    only an estimate. With `count_estimates=True` these two limits count estimates too.
    """

    max_turns: int | None = None
    max_tool_calls: int | None = None
    max_tokens: int | None = None
    max_cost_usd: float | None = None
    turn_timeout: float | None = None
    run_timeout: float | None = None
    count_estimates: bool = False

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            kind.check(name, getattr(self, name))

    @classmethod
    def of(cls, given: RunLimits | Mapping[str, Any] | None) -> RunLimits:
        """Limits as they come: as such, as a dict, or none."""
        if isinstance(given, RunLimits):
            return given
        if given is None:
            return NO_LIMITS
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"limits are RunLimits or a dict of their fields, not {brief(given)}")
        for name in given:
            if name not in _NAMES:
                raise InvalidArgument(f"no limit is called {brief(name)}: {nearest_name(name, _NAMES)}")
        return cls(**given)

    def stricter(self, other: RunLimits | Mapping[str, Any] | None) -> RunLimits:
        """The smaller of each limit."""
        there = RunLimits.of(other)
        pairs = ((name, (getattr(self, name), getattr(there, name))) for name in _NUMBERS)
        smaller = {name: min((v for v in both if v is not None), default=None) for name, both in pairs}
        return RunLimits(**smaller, count_estimates=self.count_estimates or there.count_estimates)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {name: value for name in _NAMES if (value := getattr(self, name)) is not None and value is not False}


_NAMES = tuple(field.name for field in dataclasses.fields(RunLimits))
_NUMBERS = _NAMES[:-1]  # all but count_estimates
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
    """Return the fields that `given` names, validated: all keys of a mapping, or what a RunLimits sets."""
    limits = RunLimits.of(given)
    return {name: getattr(limits, name) for name in given} if isinstance(given, Mapping) else limits.as_dict()


#: Tokens that an interrupted model call is estimated to have generated unseen, if its request set no `max_tokens`.
UNSEEN_TOKENS = 1024

#: The parts of a usage that add up.
COUNTED = frozenset({
    "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "cache_write_tokens", "reasoning_tokens",
})  # fmt: skip


class Budget:
    """What a loop has used of its limits, or with `outer` of those of its run too, its children's use included."""

    def __init__(
        self, limits: RunLimits, outer: Budget | None = None, *, overrides: Mapping[str, Any] | None = None
    ) -> None:
        #: Limits that `resume` or `requeue` set for this run. They replace those of agent, runner and input.
        self.overrides: Mapping[str, Any] = outer.overrides if outer is not None else overrides or {}
        limits = dataclasses.replace(limits, **self.overrides) if self.overrides else limits
        self.limits: RunLimits = limits
        self.outer: Budget | None = outer
        #: Of all limits that hold here.
        self.strictest: RunLimits = limits if outer is None else limits.stricter(outer.strictest)
        #: Whether there is none.
        self.free: bool = self.strictest == NO_LIMITS
        #: Whether a time limit holds here.
        self.timed: bool = self.strictest.turn_timeout is not None or self.strictest.run_timeout is not None
        self._all: tuple[Budget, ...] = (self,) if outer is None else (self, *outer._all)
        self.turns: int = 0
        self.tool_calls: int = 0
        self.tokens: int = 0
        self.cost: float = 0.0
        #: At most what interrupted model calls used, which no provider reported.
        self.estimated_tokens: int = 0
        self.estimated_cost: float = 0.0
        self.seconds: float = 0.0
        #: What children have been given and did not bring back yet, and what calls of the model hold until they end.
        self.lent_tokens: int = 0
        self.lent_cost: float = 0.0
        self.lent_calls: int = 0
        self.lent_turns: int = 0
        self._beside: set[asyncio.Future[None]] = set()  # each done when what others stand beside has ended
        self.usage: dict[str, Any] = {}
        self._warned = False

    @property
    def begun(self) -> bool:
        """Whether anything of it was used."""
        return bool(self.turns or self.usage or self.estimated_tokens)

    # -- asking whether something may be done: LimitExceeded if not

    def _over(self, name: str, used: float) -> None:
        allowed = getattr(self.limits, name)
        if allowed is not None and used >= allowed:
            raise _reached(name, allowed, used)

    @property
    def _tokens(self) -> int:
        """Tokens that count against `max_tokens`, without those reserved for calls in flight."""
        return self.tokens + self.estimated_tokens if self.limits.count_estimates else self.tokens

    @property
    def _cost(self) -> float:
        """USD that count against `max_cost_usd`, without those reserved for calls in flight."""
        return self.cost + self.estimated_cost if self.limits.count_estimates else self.cost

    def before_turn(self) -> None:
        """Another turn is about to begin."""
        if self.free:
            return
        self._over("max_turns", self.turns + self.lent_turns)
        self.before_call()
        if self.outer is not None:
            self.outer.before_turn()

    def before_call(self) -> None:
        """The model is about to be asked again."""
        if self.free:
            return
        self._over("max_tokens", self._tokens + self.lent_tokens)
        self._over("max_cost_usd", self._cost + self.lent_cost)
        self._over("run_timeout", self.seconds)
        if self.outer is not None:
            self.outer.before_call()

    def before_tools(self, count: int) -> None:
        """That many tool calls are about to be made."""
        if self.free:
            return
        allowed, used = self.limits.max_tool_calls, self.tool_calls + self.lent_calls
        if allowed is not None and used + count > allowed:
            raise _reached("max_tool_calls", allowed, used, f"the model asks for {count} more")
        if self.outer is not None:
            self.outer.before_tools(count)

    def remaining(self, seconds: float, turn_seconds: float) -> float | None:
        """Seconds until a time limit, `seconds` into this stretch of work and `turn_seconds` into the turn."""
        limits = self.limits
        ends = [] if self.outer is None else [self.outer.remaining(seconds, turn_seconds)]
        if limits.turn_timeout is not None:
            ends.append(limits.turn_timeout - turn_seconds)
        if limits.run_timeout is not None:
            ends.append(limits.run_timeout - self.seconds - seconds)
        return min((end for end in ends if end is not None), default=None)

    def late(self, seconds: float, turn_seconds: float) -> LimitExceeded:
        """The time limit that was reached, so far into the stretch of work and the turn."""
        left, turn, run = self.remaining(seconds, turn_seconds), self.limits.turn_timeout, self.limits.run_timeout
        if turn is not None and left == turn - turn_seconds:
            return _reached("turn_timeout", turn, max(turn, turn_seconds))
        if run is not None and left == run - self.seconds - seconds:
            return _reached("run_timeout", run, max(run, self.seconds + seconds))
        assert self.outer is not None
        return self.outer.late(seconds, turn_seconds)

    # -- telling what was done

    def turn(self) -> None:
        for each in self._all:
            each.turns += 1

    def tool(self, count: int = 1) -> None:
        for each in self._all:
            each.tool_calls += count

    def worked(self, seconds: float) -> None:
        for each in self._all:
            each.seconds += seconds

    def used(self, usage: Mapping[str, Any], cost: float | None) -> None:
        """A call of the model, or a child, used that."""
        tokens = tokens_of(usage)
        for each in self._all:
            each._count(usage, tokens, cost)

    def _count(self, usage: Mapping[str, Any], tokens: int, cost: float | None) -> None:
        mine = self.usage
        for name, value in usage.items():
            if name in COUNTED and isinstance(value, int):
                mine[name] = mine.get(name, 0) + value
        self.tokens += tokens
        if cost is not None:
            self.cost += cost
            self.usage["cost_usd"] = self.cost

    def reserve_for_child(self, most: RunLimits = NO_LIMITS) -> RunLimits:
        """An allotment for a child: what is left of what adds up, or `most`; held back here until it is back."""
        given = most
        for each in self._all:
            given = given.stricter(each._rest())
        for each in self._all:
            each._hold(given, 1)
        return given

    def _rest(self) -> RunLimits:
        limits = self.limits

        def rest(allowed: Any, used: Any) -> Any:
            return None if allowed is None else max(allowed - used, 0)

        return RunLimits(
            max_tool_calls=rest(limits.max_tool_calls, self.tool_calls + self.lent_calls),
            max_tokens=rest(limits.max_tokens, self._tokens + self.lent_tokens),
            max_cost_usd=rest(limits.max_cost_usd, self._cost + self.lent_cost),
            count_estimates=limits.count_estimates,
        )

    def _hold(self, given: RunLimits, sign: int) -> None:
        self.lent_tokens += sign * (given.max_tokens or 0)
        self.lent_cost += sign * (given.max_cost_usd or 0.0)
        self.lent_calls += sign * (given.max_tool_calls or 0)

    def return_unused(self, given: RunLimits, usage: Mapping[str, Any]) -> None:
        """The child has ended: what it did not use is there again."""
        for each in self._all:
            each._hold(given, -1)
        calls, cost = usage.get("tool_calls"), usage.get("cost_usd")
        self.tool(calls if isinstance(calls, int) else 0)
        self.used(usage, cost if isinstance(cost, (int, float)) else None)
        self._estimate(usage)

    def recalled(self, usage: Mapping[str, Any]) -> None:
        """Loops whose code does not run again used that in an earlier life of the run."""
        for each in self._all:
            each.turns += usage.get("turns", 0)
        self.tool(usage.get("tool_calls", 0))
        self.used(usage, usage.get("cost_usd"))
        self._estimate(usage)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around what may use less than it holds: others who have no room wait for its end."""
        others, ended = self._all[-1]._beside, asyncio.get_running_loop().create_future()
        others.add(ended)
        try:
            yield
        finally:
            others.remove(ended)
            ended.set_result(None)

    async def room(self, before: Callable[[], None], waiting: Waiting | None = None) -> None:
        """Wait until `before` raises no LimitExceeded, or nobody else is at work; then it is raised. `waiting` is what
        each wait is awaited through."""
        others = self._all[-1]._beside
        while True:
            try:
                return before()
            except LimitExceeded:
                if not others:
                    raise
            wait = _one_ended(others)
            await (wait if waiting is None else waiting(wait))

    @asynccontextmanager
    async def held(
        self, reserve: Mapping[str, Any] | None, *, turn: bool = True, waiting: Waiting | None = None
    ) -> AsyncIterator[None]:
        """Around a call of the model that others may stand beside: until it has ended its `reserve` counts as used, and
        with `turn` it as a turn. LimitExceeded if it may not begin, which it is told when no other is at work that may
        turn out to use less than it holds; `waiting` is what that wait is awaited through.
        """
        await self.room(self.before_turn if turn else self.before_call, waiting)
        held = RunLimits(max_tokens=reserve.get("tokens"), max_cost_usd=reserve.get("usd")) if reserve else NO_LIMITS
        with self.at_work():
            self._hold_beside(held, int(turn), 1)
            try:
                yield
            finally:
                self._hold_beside(held, int(turn), -1)

    @asynccontextmanager
    async def concurrent(self, reserve: Mapping[str, Any] | None, *, turn: bool = True) -> AsyncIterator[None]:
        """The same, and then it is counted: as a turn, and as what it reserved where nobody knows how it ended."""
        async with self.held(reserve, turn=turn):
            try:
                yield
                if turn:
                    self.turn()
            except asyncio.CancelledError:
                self.count_in_doubt(reserve)
                raise

    def _hold_beside(self, held: RunLimits, turns: int, sign: int) -> None:
        for each in self._all:
            each._hold(held, sign)
            each.lent_turns += sign * turns

    def count_in_doubt(self, reserve: Mapping[str, Any] | None) -> None:
        """Count a model call that began and whose outcome is unknown: its estimate is all that was reserved for it."""
        if reserve:
            self._estimate({"estimated_tokens": reserve.get("tokens"), "estimated_cost_usd": reserve.get("usd")})

    def _estimate(self, usage: Mapping[str, Any]) -> None:
        """Count the estimates of a usage."""
        tokens, cost = usage.get("estimated_tokens"), usage.get("estimated_cost_usd")
        for each in self._all:
            each.estimated_tokens += tokens if isinstance(tokens, int) else 0
            each.estimated_cost += cost if isinstance(cost, (int, float)) else 0.0

    def newly_doubtful(self) -> LimitExceeded | None:
        """Return the first limit that only the estimates of interrupted calls reach; once for a run and claim."""
        root = self._all[-1]
        if not root.estimated_tokens or root._warned:
            return None
        for each in self._all:
            limits = each.limits
            for name, used, estimated in (
                ("max_tokens", each.tokens, each.estimated_tokens), ("max_cost_usd", each.cost, each.estimated_cost),
            ):  # fmt: skip
                allowed = getattr(limits, name)
                if allowed is not None and not limits.count_estimates and used < allowed <= used + estimated:
                    root._warned = True
                    return LimitExceeded(name, allowed, used + estimated)
        return None

    def reported_usage(self) -> dict[str, Any]:
        """The usage of a RunResult: what was reported, and estimates of interrupted calls in keys of their own."""
        told = {**self.usage, "turns": self.turns, "tool_calls": self.tool_calls}
        if self.estimated_tokens:
            told["estimated_tokens"] = self.estimated_tokens
        if self.estimated_cost:
            told["estimated_cost_usd"] = self.estimated_cost
        return told


def _reached(name: str, allowed: float, used: float, what: str = "") -> LimitExceeded:
    return LimitExceeded(name, allowed, used, what, fix="Raise it with runner.resume(run_id, limits=...)")


async def _one_ended(others: Collection[asyncio.Future[None]]) -> None:
    with queued():
        await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)


def tokens_of(usage: Mapping[str, Any]) -> int:
    """All tokens of a call, whichever way they are told."""
    total = usage.get("total_tokens")
    if isinstance(total, int) and total:
        return total
    parts = (usage.get("prompt_tokens"), usage.get("completion_tokens"))
    return sum(part for part in parts if isinstance(part, int))
