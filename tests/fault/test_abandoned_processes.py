"""Processes that are killed or stand still inside a run, which is then cancelled; and what is listed of them."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.cli.main import main as command
from agent_runtime_core.queue.records import ABANDONED
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.status import RunStatus
from tests.fault.jobs.claims import LEASE, quick
from tests.support.backends import SERVERS, backends
from tests.support.fault_runs import SERVER, Agent
from tests.support.processes import Child, becomes

KINDS = backends(["sqlite", "redis", "postgres"])


@pytest.fixture
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return SERVER["url"] if request.node.callspec.params.get("kind") in SERVERS else str(tmp_path / "runs.db")


def opened(url: str, registry: Registry | None = None, **config: Any) -> AgentRunner:
    return AgentRunner.open(url, config=quick(**config), registry=registry or Registry())


async def reason_of(runner: AgentRunner, run_id: str) -> tuple[str, str]:
    info = await runner.get_run(run_id)
    return info.status.value, info.reason


async def last_event(runner: AgentRunner, run_id: str) -> tuple[str, Any]:
    event = (await runner.event_bus.get_events(run_id))[-1]
    return event.event_type, event.payload


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("working", [False, True])
async def test_the_run_of_a_killed_block_is_cancelled(kind: str, url: str, working: bool) -> None:
    with Child("claims", url, "block") as child:
        child.expect("in")
        assert child.kill()
    async with opened(url) as runner, asyncio.timeout(20):
        loop = asyncio.ensure_future(runner.run_loop(0.1, handle_signals=False)) if working else None
        assert await runner.cancel("import", wait=True) is RunStatus.CANCELLED
        assert await reason_of(runner, "import") == ("cancelled", ABANDONED)
        kind_of_event, payload = await last_event(runner, "import")
        assert (kind_of_event, payload["hook"]) == ("run.cancelled", "not_run")
        await runner.discard("import")
        runner.stop()
        if loop is not None:
            await loop


@pytest.mark.parametrize("kind", KINDS)
async def test_who_does_not_wait_cancels_it_too(kind: str, url: str) -> None:
    with Child("claims", url, "block") as child:
        child.expect("in")
        assert child.kill()
    async with opened(url) as runner:

        async def cancelled() -> bool:
            await runner.cancel("import")
            return (await runner.get_run("import")).status is RunStatus.CANCELLED

        if kind == "sqlite":
            assert await cancelled(), "its process is known to have ended"
        await becomes(cancelled, "the run is cancelled after its lease")


@pytest.mark.parametrize("kind", KINDS)
async def test_the_run_of_a_killed_worker_is_taken_over_by_one_that_lives(kind: str, url: str) -> None:
    registry = Registry()
    registry.register(Agent("busy", lambda ctx: asyncio.sleep(600)))
    async with opened(url, registry, worker_id="second") as runner, asyncio.timeout(30):
        with Child("claims", url, "worker") as child:
            child.expect("ready")
            await runner.submit("busy", run_id="r")
            child.expect("in")
            loop = asyncio.ensure_future(runner.run_loop(0.1, handle_signals=False))
            await becomes(lambda: _has(runner, 2), "two workers are listed")
            assert child.kill()
        assert await runner.cancel("r", wait=True) is RunStatus.CANCELLED
        info = await runner.get_run("r")
        assert (info.worker, info.reason) == ("second", "")
        runner.stop()
        await loop


async def _has(runner: AgentRunner, count: int) -> bool:
    return len(await runner.processes()) == count


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_parent_ends_with_the_child_that_it_executed(kind: str, url: str) -> None:
    with Child("claims", url, "family") as child:
        child.expect("in")
        assert child.kill()
    async with opened(url) as runner, asyncio.timeout(30):
        assert await runner.cancel("parent", wait=True) is RunStatus.CANCELLED
        found = {info.agent_key: (info.status.value, info.reason) for info in await runner.runs()}
        assert found == dict.fromkeys(("parent", "busy"), ("cancelled", ABANDONED))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_process_that_stood_still_past_its_lease_writes_nothing_after_the_end(kind: str, url: str) -> None:
    with Child("claims", url, "block") as child:
        child.expect("in")
        if kind == "sqlite":
            child.stop_between_commits(url)
        else:
            child.stop()
        async with opened(url) as runner, asyncio.timeout(30):
            assert await runner.cancel("import", wait=True) is RunStatus.CANCELLED
            run_id = str((await runner.get_run("import")).run_id)
            before = await runner.state_store.records(run_id)
            child.send(signal.SIGCONT)
            assert child.expect("out") in ("LeaseLost", "CancelledError", "RunFailed")
            assert await runner.state_store.records(run_id) == before
            assert await reason_of(runner, "import") == ("cancelled", ABANDONED)


@pytest.mark.parametrize("kind", KINDS)
async def test_workers_are_listed_until_they_end(kind: str, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async def shown(*options: str) -> str:
        capsys.readouterr()
        assert await asyncio.to_thread(command, ["workers", "--url", url, *options]) == 0
        return capsys.readouterr().out

    async def is_shown(word: str) -> bool:
        return word in await shown()

    if kind == "postgres":  # a command that only reads creates no schema
        assert await asyncio.to_thread(command, ["migrate", url]) == 0
    with Child("claims", url, "worker") as child:
        child.expect("ready")
        await becomes(lambda: is_shown("living"), "the worker is listed")
        [found] = json.loads(await shown("--json"))
        assert (found["worker"], found["pid"], found["slots"]) == ("first", child.pid, 1)
        assert found["agents"] == ["busy", "parent"]
        heading, line = (await shown()).splitlines()
        assert heading.split() == [
            "WORKER", "HOST", "PID", "STATE", "SLOTS", "AGENTS", "VERSION", "STARTED_AT", "LAST_SEEN_AT",
        ]  # fmt: skip
        assert "busy, parent" in line
        assert line.endswith("s ago)")
        assert child.kill()
    if kind == "sqlite":
        assert await is_shown("ended"), "its lock is free"
    await becomes(lambda: is_shown("ended"), f"it was not seen for {2 * LEASE / 3:g} s")
    with Child("claims", url, "worker") as child:
        child.expect("ready")
        await becomes(lambda: is_shown("living"), "a second worker is listed")
        child.send(signal.SIGTERM)
        child.expect("stopped")
        assert [each["living"] for each in json.loads(await shown("--json"))] == [False], "it has deleted its row"
