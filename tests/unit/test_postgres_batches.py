"""Batches are a second form of the rules: random commits leave the same behind as the rules alone."""

from __future__ import annotations

import asyncio
import dataclasses
from random import Random
from typing import Any, cast

import pytest

from agent_runtime_core._core.ids import new_ulid
from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.postgres.connection import PostgresConnection
from agent_runtime_core._journal.record import Record
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.queue import get_queue
from agent_runtime_core.queue.records import MailboxMessage, RunFilter, RunRow, RunUpdate
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.state import get_state_store
from agent_runtime_core.testing import VirtualClock

pytestmark = pytest.mark.postgres
ROUNDS = 60


class Store:
    """A queue, a bus and a state store on one schema, with or without batches."""

    def __init__(self, url: str, *, batched: bool) -> None:
        clock = VirtualClock()
        self.queue = get_queue("postgres", url=url, clock=clock)
        self.engine: Any = cast(Any, self.queue).engine
        self.bus = get_event_bus("postgres", engine=self.engine)
        self.state = get_state_store("postgres", engine=self.engine)
        self.applied = 0
        engine = self.engine
        if not batched:
            engine.batches.clear()
        for shape, batch in engine.batches.items():
            engine.batches[shape] = batch._replace(apply=self._counted(batch.apply))

    def _counted(self, apply: Any) -> Any:
        def counted(engine: Any, requests: Any) -> Any:
            left = yield from apply(engine, requests)
            self.applied += len(requests) - len(left)
            return left

        return counted

    async def close(self) -> None:
        for each in (self.state, self.bus, self.queue):
            await each.close()

    async def commit(self, commits: list[tuple[Guard | None, list[Op]]]) -> list[Any]:
        """What becomes of commits that are requested at the same time."""
        found = await asyncio.gather(*(self.engine.commit(*each) for each in commits), return_exceptions=True)
        return [type(each).__name__ if isinstance(each, BaseException) else plain(each) for each in found]

    async def contents(self) -> list[Any]:
        rows = await self.queue.find(RunFilter(limit=10_000))
        found: list[Any] = []
        for row in rows:
            events = [(each.sequence, each.event_type) for each in await self.bus.get_events(row.run_id)]
            found.append((plain(row), plain(await self.state.records(row.run_id)), events))
        return found


def plain(value: Any) -> Any:
    """Without the arrival of a row: a number is also spent on a row that is stored already."""
    if isinstance(value, RunRow):
        return value.with_values(arrival=0)
    return (
        [plain(each) for each in value] if isinstance(value, list | tuple) and not hasattr(value, "_fields") else value
    )


@dataclasses.dataclass
class Plan:
    """Chooses commits from what is known of the runs; the same for both stores."""

    chance: Random
    queue: Any
    known: list[str] = dataclasses.field(default_factory=list)
    claims: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)
    now: float = 1000.0

    def commit(self) -> tuple[Guard | None, list[Op]]:
        self.now += 0.001
        match self.chance.randrange(10) if self.known else 0:
            case 0 | 1:
                return None, [Op("queue.insert", (self.row(),)) for _ in range(self.chance.choice((1, 1, 3)))]
            case 2:
                want = self.want(1)
                row = self.row() if self.chance.random() < 0.7 else self.row(self.chance.choice(self.known))
                return None, [Op("queue.take", (row, self.chance.random() < 0.9, False, want))]
            case 3:
                return None, [Op("queue.claim", (self.want(3),))]
            case 4:
                mail = MailboxMessage("signal", "go", "null", f"m{self.chance.randrange(50)}", self.now)
                return None, [Op("queue.post", (self.chance.choice(self.known), mail))]
            case 5:
                event = (new_ulid(self.queue.clock), "custom.note", "{}", self.now)
                return None, [Op("events.publish", (self.chance.choice(self.known), (event,)))]
            case 6 | 7:
                return self.steps()
            case _:
                return self.end()

    def row(self, run_id: str | None = None) -> RunRow:
        made: RunRow = self.queue.new_row(
            run_id, self.chance.choice("ab"), {}, {}, priority=self.chance.randrange(3),
            concurrency_key=self.chance.choice((None, None, "k")), delay=self.chance.choice((0, 0, 0.5)),
            idempotency_key=self.chance.choice((None, None, f"i{self.chance.randrange(20)}")),
        )  # fmt: skip
        self.known.append(made.run_id)
        return made.with_values(created_at=self.now, updated_at=self.now)

    def want(self, count: int, *, ready_only: bool = False) -> Any:
        agents = self.chance.choice((("a",), ("a", "b"), None))
        want = self.queue.claim_request("w", 60, agents, count, ready_only=ready_only)
        return want._replace(wall=self.now, lease_now=500.0, lease_until=600.0)

    def held(self) -> tuple[str, str, int]:
        """A run, a claim that may be over, and the position of its next record."""
        run_id = self.chance.choice([*self.claims] or self.known)
        claim, seq = self.claims.get(run_id, ("0" * 26, 0))
        if self.chance.random() < 0.1:
            claim = new_ulid(self.queue.clock)
        return run_id, claim, max(seq + self.chance.choice((0, 0, 0, 0, 0, -1, 2)), 0)

    def steps(self) -> tuple[Guard | None, list[Op]]:
        run_id, claim, seq = self.held()
        records = [
            Record(seq + n, "done", f"s{seq + n}", f"k\0{seq + n}", 1, claim, self.now, '"\\u0000"', nev=n + 1)
            for n in range(self.chance.choice((1, 2)))
        ]
        return Guard(run_id, claim), [Op("journal.append", (run_id, record)) for record in records]

    def end(self) -> tuple[Guard | None, list[Op]]:
        run_id, claim, seq = self.held()
        status = self.chance.choice(("succeeded", "failed", "pending", "waiting"))
        how = RunUpdate(claim, status, self.now, output="1", cursor=self.chance.choice((-1, -1, 0)))
        record = Record(
            seq, "ended" if status in ("succeeded", "failed") else "resumed", status, "", 1, claim, self.now
        )
        ops = [Op("journal.append", (run_id, record)), Op("queue.settle", (run_id, how))]
        if self.chance.random() < 0.5:
            ops.append(Op("queue.claim", (self.want(1, ready_only=True),)))
        return Guard(run_id, claim), ops

    def learn(self, commits: list[tuple[Guard | None, list[Op]]], results: list[Any]) -> None:
        for (_, ops), result in zip(commits, results, strict=True):
            if isinstance(result, str):
                continue
            for op, found in zip(ops, result, strict=True):
                rows = found if op.name == "queue.claim" else found[1:] if op.name == "queue.take" else []
                for row in rows:
                    if isinstance(row, RunRow) and row.status == "running":
                        seq = self.claims.get(row.run_id, ("", 0))[1]
                        self.claims[row.run_id] = row.claim_id, seq
                if op.name == "journal.append":
                    run_id, record = op.args
                    claim, seq = self.claims.get(run_id, (record.claim_id, 0))
                    self.claims[run_id] = claim, max(seq, record.seq + 1)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(each, marks=pytest.mark.slow) for each in range(3, 40))])
async def test_random_commits_have_the_same_outcome_with_and_without_batches(seed: int, postgres_url: str) -> None:
    batched, plainly = Store(f"{postgres_url}_1", batched=True), Store(f"{postgres_url}_2", batched=False)
    try:
        plan = Plan(Random(seed), batched.queue)
        for _ in range(ROUNDS):
            commits = [plan.commit() for _ in range(plan.chance.choice((1, 2, 6)))]
            results = await batched.commit(commits)
            assert results == await plainly.commit(commits), commits
            plan.learn(commits, results)
        assert await batched.contents() == await plainly.contents()
        assert batched.applied > 10
        assert plainly.applied == 0
    finally:
        await batched.close()
        await plainly.close()


STEPS = 10


class Steps(AgentRuntime):
    key = "steps"

    async def run(self, ctx: Any) -> RunResult:
        for n in range(STEPS):
            await ctx.step(f"s{n}", lambda: 1)
        return RunResult({"done": True})


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The round trips: what is sent together is one. What the heartbeat of a process sends is not of a run."""
    found = list[str]()
    for name in ("execute", "run", "pipelined"):
        call = getattr(PostgresConnection, name)

        def noted(conn: Any, statements: Any, *args: Any, call: Any = call) -> Any:
            before = len(found)
            rows = call(conn, statements, *args)
            found[before:] = [str(statements)] if statements and "processes" not in str(statements) else []
            return rows

        monkeypatch.setattr(PostgresConnection, name, noted)
    return found


async def test_a_run_takes_few_round_trips(postgres_url: str, sent: list[str]) -> None:
    """At most three, and one for each step."""
    registry = Registry()
    registry.register(Steps())
    async with AgentRunner.open(postgres_url, registry=registry, persistence=None) as runner:
        await runner.execute("steps", None, {"messages": []})  # which migrates, and reads what is read once
        sent.clear()
        await runner.execute("steps", None, {"messages": []})
        assert STEPS < len(sent) <= 3 + STEPS


async def test_a_worker_reads_no_journal_of_a_run_that_never_started(postgres_url: str, sent: list[str]) -> None:
    registry, count = Registry(), 20

    class Last(AgentRuntime):
        key = "last"

        async def run(self, ctx: Any) -> RunResult:
            nonlocal count
            if not (count := count - 1):
                runner.stop()
            return RunResult()

    registry.register(Last())
    async with AgentRunner.open(postgres_url, registry=registry, persistence=None) as runner:
        for _ in range(count):
            await runner.submit("last", {"messages": []})
        sent.clear()
        await runner.run_loop()
        assert not any("journal" in each for each in sent if each.startswith("SELECT"))
