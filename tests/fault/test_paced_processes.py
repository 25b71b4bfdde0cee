"""A run waits for the reader of its answer in another process: one that keeps up, stalls, or is killed."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.registry import Registry
from tests.fault.paced_program import PIECES
from tests.support.backends import POSTGRES
from tests.support.processes import PATIENCE, Command, becomes, until

LIMIT = 131_072  # bytes that a reader may lag
PIECE = 4096
PROGRAM = "tests.fault.paced_program"


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "runs.db") if request.param == "sqlite" else str(request.getfixturevalue(f"{request.param}_url"))
    )


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def started(stack: ExitStack, *arguments: object) -> Command:
    child = await asyncio.to_thread(lambda: stack.enter_context(Command(PROGRAM, *arguments)))
    await asyncio.to_thread(child.expect, "ready")
    return child


async def reported(runner: AgentRunner) -> None:
    run_id = (await runner.queue.require("r")).run_id

    async def there() -> bool:
        return bool(await runner.event_bus.readers(run_id))

    await becomes(there, "the reader has reported")


async def waited(worker: Command) -> float:
    """The seconds that the worker has waited for readers."""
    worker.send(signal.SIGTERM)
    return float(await asyncio.to_thread(worker.expect, "waited"))


async def test_a_reader_that_keeps_up_does_not_slow_the_run_down(
    store: str, processes: ExitStack, tmp_path: Path
) -> None:
    async with AgentRunner.open(store, registry=Registry()) as runner:
        await runner.submit("telling", run_id="r", params={"size": 256})  # 50 KB/s
        reader = await started(processes, "reader", store, "all")
        await reported(runner)
        worker = await started(processes, "worker", store, tmp_path / "told")
        assert (await runner.wait("r", PATIENCE)).status is RunStatus.SUCCEEDED
        assert await asyncio.to_thread(reader.expect, "read") == str(PIECES)
    assert await waited(worker) == 0


async def test_a_run_pauses_for_a_reader_that_stalls_and_continues_when_it_is_killed(
    store: str, processes: ExitStack, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    async with AgentRunner.open(store, registry=Registry()) as runner:
        await runner.submit("telling", run_id="r", params={"size": PIECE})
        reader = await started(processes, "reader", store, "some")
        await reported(runner)
        worker = await started(processes, "worker", store, told)
        await asyncio.to_thread(reader.expect, "stalls")
        await asyncio.to_thread(until, lambda: _stands_still(told), "the run pauses")
        count = int(told.read_text())
        assert LIMIT <= count * PIECE < LIMIT + 100 * PIECE
        assert (await runner.get_run("r")).status is RunStatus.RUNNING
        reader.kill()
        assert (await runner.wait("r", PATIENCE)).status is RunStatus.SUCCEEDED
        assert int(told.read_text()) == PIECES
    # The run waits at least as long as the report of the reader counts, and not for ever.
    assert await waited(worker) > 1


async def test_a_slow_reader_sets_the_pace_and_gets_everything(
    store: str, processes: ExitStack, tmp_path: Path
) -> None:
    async with AgentRunner.open(store, registry=Registry()) as runner:
        await runner.submit("telling", run_id="r", params={"size": PIECE})
        reader = await started(processes, "reader", store, "slow")
        await reported(runner)
        worker = await started(processes, "worker", store, tmp_path / "told")
        assert await asyncio.to_thread(reader.expect, "read") == str(PIECES)
    assert await waited(worker) > 1


def _stands_still(told: Path) -> bool:
    """Whether the run publishes nothing for a while in which it could publish many pieces."""
    before = told.read_text() if told.exists() else ""
    if not before:
        return False
    try:
        until(lambda: told.read_text() not in ("", before), "", seconds=0.6)
    except AssertionError:
        return True
    return False
