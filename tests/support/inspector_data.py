"""A store with runs of every kind, for looking at the inspector: `python -m tests.support.inspector_data FILE.db`.

    --runs 10000     many small runs of the last 30 days, in all states
    --events 20000   one run with so many events
    --no-digest      leave out the run with 700 steps

The runs of the story take hours on a clock that does not wait, and no real time. Processes that are killed are real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agent_runtime_core import AgentRunner
from agent_runtime_core._core.codec.json import encode
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._journal.record import ENDED, Record
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.queue import get_queue
from agent_runtime_core.registry import Registry
from agent_runtime_core.state import get_state_store
from tests.support import inspector_agents
from tests.support.inspector_agents import StoryClock, agents, asked, planner, settings

ROOT = Path(__file__).parents[2]
STORY = 45 * 60.0  # how long before now the story begins, in seconds
CONVERSATION = "6f1d1f9e-52a7-4a6e-9d3f-0c5f3f3c1a01"


# -- the story


async def story(db: Path, start: float) -> None:
    """Runs that take hours, on a clock of their own."""
    clock = inspector_agents.clock = StoryClock(start)
    engine = SQLiteEngine.open(db, durability="normal", clock=clock)
    where: dict[str, Any] = {"backend": "sqlite", "engine": engine}
    backends = get_queue(**where), get_event_bus(**where), get_state_store(**where)
    try:
        async with AgentRunner(*backends, settings(), registry=agents()) as runner:
            runner.stores_at_url = True  # it keeps conversations, as a runner with a path does
            await _conversation(runner, clock)
            await _reports(runner, clock)
            await _failures(runner, clock)
            await _waits(runner, clock)
        assert clock.wall() < start + STORY, "the story ends in the future"
    finally:
        await engine.close()
        inspector_agents.clock = None


async def _until_idle(runner: AgentRunner, clock: StoryClock, patience: float = 120.0) -> None:
    """Execute runs, and go to the next attempt of those that are retried, but not to the end of a long sleep."""
    while True:
        while await runner.run_once():
            clock.advance(1.5)
        due = await runner.queue.next_due()
        if due is None or due - clock.wall() > patience:
            return
        clock.advance(max(due - clock.wall(), 0.0) + 0.01)


async def _conversation(runner: AgentRunner, clock: StoryClock) -> None:
    for number, text in enumerate(("Where is my parcel?", "Thank you. Do you have it in red?", "Which size?")):
        given = asked(text, conversation_id=CONVERSATION)
        await runner.submit("support", given, run_id=f"chat-{number + 1}", metadata={"customer": "Ada Lovelace"})
        await _until_idle(runner, clock)
        clock.advance(95.0)
    await runner.submit(
        "support", asked("My lamp is broken, I want a refund."), run_id="refund-1004",
        metadata={"customer": "Grace Hopper", "channel": "e-mail"}, priority=5,
    )  # fmt: skip
    await runner.submit("support", asked("Can I get a discount?"), run_id="discount-1002")
    await runner.submit(
        "support", asked("A refund, please."), run_id="refund-1005", metadata={"customer": "Alan Turing"}
    )
    await _until_idle(runner, clock)
    answer = {"decision": "partial", "amount": 40.0, "note": "For the shade", "notify": True}
    await runner.approve("refund-1005", "refund", answer)
    await _until_idle(runner, clock)


async def _reports(runner: AgentRunner, clock: StoryClock) -> None:
    await runner.submit("report", {"params": {"source": "sales.csv", "factor": 1}}, run_id="report-november")
    await _until_idle(runner, clock)
    clock.advance(600)
    changed = {"params": {"source": "sales.csv", "factor": 2}}
    await runner.fork("report-november", "clean", new_run_id="report-november-fork", input=changed)
    await _until_idle(runner, clock)
    await runner.submit("editor", {}, run_id="edit-catalogue")
    await _until_idle(runner, clock)
    orchestrator = planner(runner)
    await orchestrator.create_run(prompt="Compare two budgets", max_steps=10)
    await _until_idle(runner, clock)
    await runner.submit("ticker", {"params": {"events": 200}}, run_id="ticker-200")
    await _until_idle(runner, clock)


async def _failures(runner: AgentRunner, clock: StoryClock) -> None:
    await runner.submit("parser", {"params": {"file": "prices.csv"}}, run_id="parse-prices")
    await _until_idle(runner, clock)
    await runner.submit("waiter", run_id="too-long", deadline=clock.wall() + 120)
    await runner.submit("report", run_id="expired-1", expires_in=30, delay=20)
    await runner.submit("report", run_id="cancelled-1", delay=40)
    await runner.cancel("cancelled-1")
    clock.advance(200)
    await _until_idle(runner, clock)
    clock.advance(900)


async def _waits(runner: AgentRunner, clock: StoryClock) -> None:
    await runner.submit("order", run_id="order-77", metadata={"customer": "Edsger Dijkstra"})
    await runner.submit("reminder", run_id="reminder-9")
    await runner.submit("reminder", run_id="reminder-10")
    await _until_idle(runner, clock)
    await runner.cancel("reminder-10")
    for number in range(3):
        await runner.submit("order", run_id=f"warehouse-{number + 1}", concurrency_key="warehouse:zurich")
    await _until_idle(runner, clock)
    # It is retried: its first attempt has failed, and nobody executes the second one.
    await runner.submit("importer", run_id="import-nightly")
    await runner.run_once()
    for number in range(4):
        await runner.submit("report", run_id=f"later-{number + 1}", delay=86_400 * (number + 1), priority=number)


# -- processes that die


def _child(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.inspector_data", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def killed(db: Path, run_id: str) -> None:
    """Execute the run in a process that is killed in the middle of a step."""
    with _child(db, "--execute", run_id) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        assert line == b"inside\n", f"the process did not reach the step: {line!r}"
        child.kill()


async def _execute(db: Path, run_id: str) -> None:
    async with AgentRunner.open(
        db, config=settings(worker_id=f"worker-{os.getpid()}"), registry=_only(run_id)
    ) as runner:
        await runner.run_once()


def _only(run_id: str) -> Registry:
    found, registry = agents().get(run_id.partition("-")[0]), Registry()
    assert found is not None, run_id
    registry.register(found)
    return registry


async def deaths(db: Path, folder: Path) -> None:
    """Runs whose process was killed: one was resumed, one is in doubt, one has no worker now, one is dead."""
    runs = {"payment-resumed": "retry", "payment-in-doubt": "review"}
    for run_id, policy in runs.items():
        metadata = {"die": str(folder / run_id), "doubt": policy}
        async with AgentRunner.open(db, config=settings()) as runner:
            await runner.submit("payment", run_id=run_id, metadata=metadata)
        killed(db, run_id)
        await _execute(db, run_id)
    async with AgentRunner.open(db, config=settings()) as runner:
        await runner.submit("trainer", run_id="trainer-1")
    for _ in range(3):
        with _child(db, "--execute", "trainer-1") as child:
            child.wait(60)
    await _execute(db, "trainer-1")
    async with AgentRunner.open(db, config=settings()) as runner:
        await runner.submit("payment", run_id="payment-killed", metadata={"die": str(folder / "killed")})
    killed(db, "payment-killed")


def digest(db: Path, folder: Path, steps: int = 700) -> None:
    """The example that reads files: one step for each, and one that merges."""
    texts = folder / "texts"
    texts.mkdir()
    for number in range(steps - 1):
        text = f"# Chapter {number}\n\nThis is the text of chapter {number}, which tells of lamps and of their light.\n"
        (texts / f"chapter-{number:03}.md").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "examples/digest.py",
        texts,
        "--db",
        db,
        "--out",
        folder / "digest.md",
        "--run-id",
        "digest",
    ]
    subprocess.run([*map(str, command)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


# -- many


STATES = (
    ("succeeded", 74), ("failed", 9), ("cancelled", 4), ("timed_out", 3), ("dead", 3), ("pending", 3), ("waiting", 3),
    ("retrying", 1),
)  # fmt: skip
#: Nobody has registered them: a worker on the store leaves these runs as they are.
AGENTS = ("invoices", "newsletter", "crawler", "summaries", "classifier", "backups")
_ERROR = {
    "type": "ConnectionError", "message": "connection reset by peer", "retriable": True, "details": {},
    "stack": 'Traceback (most recent call last):\n  File "app.py", line 12, in fetch\n    raise ConnectionError\n'
    "ConnectionError: connection reset by peer\n",
}  # fmt: skip


async def many_runs(db: Path, count: int, now: float, days: float = 30.0) -> None:
    """Runs of the last `days` days in all states, as rows of the queue with their endings."""
    chance = random.Random(27)
    states = [state for state, weight in STATES for _ in range(weight)]
    engine = SQLiteEngine.open(db, durability="normal")
    try:
        async with AgentRunner.open(db, config=settings(), durability="normal") as runner:
            for begin in range(0, count, 500):
                ops: list[Op] = []
                for number in range(begin, min(begin + 500, count)):
                    created = now - STORY - days * 86_400 * (1 - number / count)
                    ops += _small_run(runner, number, chance.choice(states), created, chance)
                await engine.commit(None, ops)
    finally:
        await engine.close()


def _small_run(runner: AgentRunner, number: int, state: str, created: float, chance: random.Random) -> list[Op]:
    agent = chance.choice(AGENTS)
    row = runner.new_run(
        agent, {"params": {"number": number}}, run_id=f"{agent}-{number:05}", metadata={"batch": number // 100}
    )
    started, took = created + chance.random() * 5, chance.expovariate(1 / 20) + 0.2
    ended = started + took
    row = row.with_values(created_at=created, updated_at=created)
    if state == "pending":
        return [Op("queue.insert", (row,))]
    row = row.with_values(
        started_at=started, claimed_at=started, worker=f"worker-{chance.randint(1, 4)}", updated_at=ended
    )
    error = encode(_ERROR)
    if state == "waiting":
        due = created + 86_400 * 60
        row = row.with_values(status="waiting", parked=1, reason="sleep", due_at=due)
        return [Op("queue.insert", (row,))]
    if state == "retrying":
        row = row.with_values(failures=1, error=error, due_at=created + 86_400 * 60)
        return [Op("queue.insert", (row,))]
    failed = state in ("failed", "dead", "timed_out")
    tokens = chance.randint(200, 9000)
    usage = {
        "prompt_tokens": tokens - 150, "completion_tokens": 150, "total_tokens": tokens,
        "cost_usd": round(tokens * 3e-6, 6), "turns": 2, "tool_calls": 1,
    }  # fmt: skip
    output = None if state != "succeeded" else encode({"response": f"done {number}"})
    row = row.with_values(
        status=state, ended_at=ended, output=output, error=error if failed else None,
        failures=2 if state == "failed" else 0, crashes=3 if state == "dead" else 0,
        reason="cancel" if state == "cancelled" else "",
    )  # fmt: skip
    result = {
        "status": state, "run_id": row.run_id, "final_output": {} if output is None else json.loads(output),
        "final_messages": [], "usage": usage, "artifacts": {}, "error": _ERROR if failed else None,
    }  # fmt: skip
    record = Record(-1, ENDED, state, "", 1, "", ended, result=encode(result))
    return [Op("queue.insert", (row,)), Op("journal.append", (row.run_id, record))]


async def many_events(db: Path, count: int) -> None:
    """One run with so many events."""
    async with AgentRunner.open(db, config=settings(), registry=agents(), durability="normal") as runner:
        given = {"params": {"events": count}}
        (await runner.execute("ticker", f"ticker-{count}", given)).raise_for_status()


async def make(db: Path, *, runs: int = 0, events: int = 0, steps: int = 700) -> None:
    """Make a store at `db`, which must not exist."""
    now = time.time()
    with tempfile.TemporaryDirectory(prefix="inspector-") as name:
        folder = Path(name)
        await story(db, now - STORY)
        if steps:
            await asyncio.to_thread(digest, db, folder, steps)
        if events:
            await many_events(db, events)
        await deaths(db, folder)
        if runs:
            await many_runs(db, runs, now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("db", type=Path)
    parser.add_argument("--runs", type=int, default=0)
    parser.add_argument("--events", type=int, default=0)
    parser.add_argument("--no-digest", action="store_true")
    parser.add_argument("--execute", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.execute:
        asyncio.run(_execute(options.db, options.execute))
        return
    if options.db.exists():
        parser.error(f"{options.db} exists already")
    began = time.monotonic()
    steps = 0 if options.no_digest else 700
    asyncio.run(make(options.db, runs=options.runs, events=options.events, steps=steps))
    sys.stdout.write(f"made {options.db} in {time.monotonic() - began:.1f} s\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
