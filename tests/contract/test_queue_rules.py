"""The rules of a queue are written twice, in Python and in Lua: the same commits give the same rows on each engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core._core.ids import new_ulid
from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue import MailboxMessage, RowChanged, RunFilter, RunQueue, RunRow, RunUpdate, get_queue
from agent_runtime_core.queue.rate_limits import counted_rate
from agent_runtime_core.queue.records import LIVE, QUESTION, answer_id
from agent_runtime_core.testing.clock import VirtualClock

IDS = [str(UUID(int=(n + 1) << 100 | n)) for n in range(6)]
TENANTS = ["", "", "t", "u"]
ENDED = ("failed", "cancelled", "dead", "timed_out")
RATES = [None, None, "1 40.0 agent a", "2 5.0 key x", "1 5.0 key x", "1 5.0 key y\ntenant "]
LEASE, LATER, FOREVER = 30.0, 50.0, 1e9
MESSAGES = [
    ("cancel", "", None), ("signal", "s", "m-1"), ("signal", "s", None), (QUESTION, "plan", "q-0"),
    (QUESTION, "in_doubt:pay", "q-1"), ("signal", "plan", answer_id("q-0")), ("closed", "pay", answer_id("q-1", "x")),
]  # fmt: skip


class Act(NamedTuple):
    """One operation of a commit, or seconds that pass before it. `pick` decides what depends on the stored row."""

    kind: str
    run: int
    pick: int


KINDS = (
    *["insert"] * 3, *["claim"] * 4, *["settle"] * 4, *["post"] * 3, "take", "take", "end", "reopen", "delete", "beat",
    "assign", "abandoned", "rewrite",
)  # fmt: skip
KINDS_OF_LIMITED = (*["insert"] * 6, *["claim"] * 6, *["settle"] * 5, "post", "end", "end", "reopen", "beat", "assign")


def commits_of(kinds: Sequence[str], seconds: Sequence[float]) -> Any:
    """Return a strategy of commits: the seconds that pass, and then the operations of one commit."""
    acts = st.builds(Act, st.sampled_from(kinds), st.integers(0, len(IDS) - 1), st.integers(0, 2**32 - 1))
    commit = st.tuples(st.sampled_from(seconds), st.lists(acts, min_size=1, max_size=4))
    return st.lists(commit, min_size=5, max_size=25)


COMMITS = commits_of(KINDS, [0.0, 0.0, 0.5, LEASE + 1, LATER + 1])
#: Many runs with rate limits, and few with anything else that delays or blocks them.
LIMITED = commits_of(KINDS_OF_LIMITED, [0.0, 0.0, 0.125, 1.0, 3.0, 6.0, LEASE + 1, -4.0, -20.0, -90.0])


class Places:
    """The same queue on several engines, with one clock. The first one says what is stored."""

    def __init__(self, queues: Sequence[RunQueue], clock: VirtualClock, *, limited: bool) -> None:
        self.limited = limited
        self.queues, self.clock, self.moments = queues, clock, itertools.count()
        #: The order in which each `n` of an engine was seen: a refused commit uses numbers up on some engines only.
        self.arrivals: list[dict[int, int]] = [{} for _ in queues]
        self.seen = set[str]()

    async def ops(self, act: Act) -> list[Op] | None:
        """Return the operation of an act for each engine; None if the act needs a stored row."""
        rng, now, run_id = random.Random(act.pick), self.clock.wall(), IDS[act.run]
        row: RunRow | None = await self.queues[0].read("row", run_id)
        if self.limited and act.kind == "settle":  # most runs of a limit wait
            running = await self.queues[0].read("find", RunFilter(("running",)))
            row = rng.choice(running) if running else row
            run_id = run_id if row is None else row.run_id
        args: tuple[Any, ...]
        match act.kind:
            case "insert":
                args = (self.new(run_id, rng),)
            case "claim":
                agents = rng.choice([None, ("a",), ("b",), ("a", "b"), ("b", "a")])
                args = (self.request(rng, rng.choice([1, 2, 3]), agents),)
            case "take":
                flags = [rng.random() < chance for chance in (0.7, 0.5, 0.5)]
                args = (self.new(run_id, rng), *flags[:2], self.request(rng, 1, None), flags[2])
            case "post":
                kind, name, msg_id = rng.choice(MESSAGES)
                args = (run_id, MailboxMessage(kind, name, "null", msg_id or self.ulid(rng), now))
            case "end":
                expect = rng.choice([("pending", "waiting"), ("pending",), LIVE])
                args = (run_id, expect, rng.choice(["cancelled", "failed"]), now, "cancel")
            case "reopen":
                args = (run_id, ENDED, now)
            case "assign":
                args = (run_id, rng.choice(TENANTS))
            case _ if row is None:
                return None
            case "settle":
                args = (run_id, self.update(row, rng))
            case "delete":
                rows = [await queue.read("row", run_id) for queue in self.queues]
                return [Op("queue.delete", (run_id, each.generation, each.arrival)) for each in rows]
            case "beat":
                args = ([(run_id, row.claim_id)], self.lease())
            case "abandoned":
                args = (run_id, row.claim_id, self.request(rng, 1, None), rng.random() < 0.5)
            case _:
                old = (row.input, row.digest, row.metadata, row.output, row.error)
                new = ('{"x":1}', row.digest, row.metadata, row.output, row.error)
                args = (run_id, old if rng.random() < 0.8 else new, new, self.queues[0].lease_now())
        return [Op(f"queue.{act.kind}", args)] * len(self.queues)

    def new(self, run_id: str, rng: random.Random) -> RunRow:
        now = self.clock.wall()
        if self.limited:
            key = rng.choice([None, "L", "L"])
            return RunRow(
                run_id, rng.choice("aab"), digest="d", priority=rng.choice([0, 0, 5, -1]), created_at=now,
                updated_at=now, rate=rng.choice(RATES), concurrency_key=key,
                concurrency_limit=rng.choice([1, 2, 3]), turn=rng.choice([None, "", "t", "t", "u"]),
                expires_at=rng.choice([None] * 5 + [now + 4.0]), deadline=rng.choice([None] * 5 + [now + 6.0]),
            )  # fmt: skip
        return RunRow(
            run_id, rng.choice("ab"), digest=rng.choice("dde"), priority=rng.choice([0, 0, 5, -1]), created_at=now,
            updated_at=now, due_at=rng.choice([0.0, 0.0, now + LATER]), run_key=rng.choice([None, "k"]),
            idem_key=rng.choice([None, None, "i"]), parent_id=rng.choice([None, IDS[0]]),
            concurrency_key=rng.choice([None, "L", "L", "M"]), origin=rng.choice(["", "", "inline"]),
            conversation=rng.choice([None, "c"]), tenant=rng.choice(TENANTS),
            concurrency_limit=rng.choice([1, 1, 2, 3]), rate=rng.choice(RATES),
        )  # fmt: skip

    def request(self, rng: random.Random, count: int, agents: tuple[str, ...] | None) -> Any:
        found = self.queues[0].claim_request("w", LEASE, agents, count, ready_only=rng.random() < 0.3)
        until = self.lease() if count == 1 else FOREVER
        turn = rng.choice(["", "s", "t", "u"]) if self.limited and rng.random() < 0.5 else None
        tickets = tuple(self.ulid(rng) for _ in range(count))
        return found._replace(tickets=tickets, lease_until=until, after_turn=turn)

    def lease(self) -> float:
        """Return when a lease ends. No two leases end at the same time: which of these comes first is not specified."""
        return self.queues[0].lease_now() + LEASE + next(self.moments) / 1024

    def update(self, row: RunRow, rng: random.Random) -> RunUpdate:
        status = rng.choice(["waiting", "waiting", "pending", "succeeded", "failed", "running", "dead"])
        if self.limited and rng.random() < 0.5:
            status = "pending"
        late = status in ("waiting", "pending") and rng.random() < 0.5
        return RunUpdate(
            row.claim_id if rng.random() < 0.9 else self.ulid(rng), status, self.clock.wall(),
            due_at=self.clock.wall() + LATER if late else 0.0, parked=int(status == "waiting"),
            reason=rng.choice(["", "sleep", "signal x"]), failures=row.failures + rng.choice([0, 1]),
            crashes=row.crashes, crashes_in_row=rng.choice([0, row.crashes_in_row]), min_step_count=row.min_step_count,
            output='{"o":1}' if status == "succeeded" else None, cursor=rng.choice([-1, -1, row.mail_seq]),
            renew=self.ulid(rng) if status == "running" and rng.random() < 0.5 else "",
            take_back=counted_rate(row) if status == "pending" and rng.random() < 0.8 else "",
        )  # fmt: skip

    def ulid(self, rng: random.Random) -> str:
        # The same id in each shrunk example, and no id twice: a repeated ticket is a repeated claim.
        self.clock.random.seed(f"{rng.getrandbits(64)} {next(self.moments)}")
        return new_ulid(self.clock)

    async def commit(self, number: int, ops: list[Op]) -> Any:
        """Return what a commit gave on an engine: its results, or that it was refused."""
        try:
            return self.compared(number, await self.queues[number].commits.commit(None, ops))
        except RowChanged:
            return "refused"

    def compared(self, number: int, given: Any) -> Any:
        """Return a result as each engine has it."""
        if isinstance(given, RunRow):
            seen = self.arrivals[number]
            row = given.with_values(arrival=seen.setdefault(given.arrival, len(seen)))
            return self.as_ready(row) if 0 < row.due_at <= self.clock.wall() else row
        if isinstance(given, list | tuple):
            return [self.compared(number, each) for each in given]
        return given

    async def stored(self, number: int) -> dict[str, Any]:
        """Return what is stored on an engine.

        A run that is due is shown as ready: an engine may make it ready in a commit that is refused, or later.
        """
        queue = self.queues[number]
        rows = self.compared(number, await queue.read("find", RunFilter(limit=100)))
        ready = [self.as_ready(row) if self.is_due(row) else row for row in rows]
        self.seen |= {each.reason for each in ready if each.due_at}
        groups = Counter(
            (each.concurrency_key, each.tenant) for each in ready if each.status in LIVE and not each.blocked
        )
        self.seen |= {f"{count} active" for (key, _), count in groups.items() if key is not None}
        shared = await queue.read("shared", "rate:")
        found: dict[str, Any] = {"shared": {name: json.loads(state) for name, state in shared.items()}}
        found |= {"rows": ready, "mail": [await queue.read("mail", row.run_id, 0) for row in rows]}
        if ready == rows:
            found["counts"] = [await queue.counts(), *[await queue.counts(tenant) for tenant in "tu"]]
            found["due"] = await queue.read("next_due")
        return found

    def as_ready(self, row: RunRow) -> RunRow:
        return row.with_values(status="pending", due_at=0.0, updated_at=row.due_at)

    def is_due(self, row: RunRow) -> bool:
        return 0 < row.due_at <= self.clock.wall()


@contextlib.asynccontextmanager
async def places(redis_url: str, folder: Path, number: int, *, limited: bool) -> AsyncIterator[Places]:
    clock = VirtualClock()
    queues = [
        get_queue("memory", clock=clock),
        get_queue("sqlite", path=folder / f"{number}.db", durability="normal", clock=clock),
        get_queue("redis", url=f"{redis_url}n{number}", clock=clock),
    ]
    try:
        yield Places(queues, clock, limited=limited)
    finally:
        for queue in queues:
            await queue.close()


def _differing(one: Any, other: Any) -> Any:
    """Return what two results or states differ in."""
    if isinstance(one, RunRow) and isinstance(other, RunRow):
        return {name: (a, b) for name, a, b in zip(RunRow._fields, one, other, strict=True) if a != b}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_differing(a, b) for a, b in zip(one, other, strict=True) if a != b]
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _differing(one[name], other[name]) for name in one.keys() & other if one[name] != other[name]}
    return one, other


async def play(
    redis_url: str, folder: Path, number: int, commits: list[tuple[float, list[Act]]], *, limited: bool
) -> tuple[int, set[str]]:
    """Make the commits on each engine, compare what they return and what is stored.

    Returns:
        How many commits were made, and which reasons of delayed runs and numbers of active runs of a key were seen.
    """
    made = 0
    async with places(redis_url, folder, number, limited=limited) as at:
        for seconds, acts in commits:
            at.clock.set_wall(at.clock.wall() + seconds) if seconds < 0 else at.clock.advance(seconds)
            ops = [found for act in acts if (found := await at.ops(act)) is not None]
            if not ops:
                continue
            made += 1
            given: list[Any] = []
            for each in range(len(at.queues)):
                result = await at.commit(each, [op[each] for op in ops])
                given.append({"results": result, **await at.stored(each)})
                names = f"{[op[0].name for op in ops]} on {type(at.queues[each]).__name__}"
                differing = _differing(given[0], given[each])
                assert not differing, f"{names} differs: {differing}"
    return made, at.seen


@pytest.mark.redis
@pytest.mark.parametrize("examples", [200, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("limited", [False, True], ids=["all", "limited"])
def test_the_same_commits_give_the_same_rows_on_each_engine(
    redis_url: str, tmp_path: Path, examples: int, limited: bool
) -> None:
    numbers, made, seen = itertools.count(), 0, Counter[str]()

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(LIMITED if limited else COMMITS)
    def compare(commits: list[tuple[float, list[Act]]]) -> None:
        nonlocal made
        more, found = asyncio.run(play(redis_url, tmp_path, next(numbers), commits, limited=limited))
        made += more
        seen.update(found)

    compare()
    assert made > 5 * examples
    assert not limited or min(seen["rate_limit"], seen["2 active"]) > examples / 20, seen
