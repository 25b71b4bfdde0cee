"""`agent-runtime worker` as real processes on one SQLite file: started, told to stop, killed."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner, RunStatus
from agent_runtime_core.cli.worker import THRESHOLDS
from tests.fault.jobs.agents import open_runner
from tests.support.processes import PATIENCE, ROOT, Command, becomes, lines, until

AGENTS = "tests.fault.jobs.agents:registry"


def worker(stack: ExitStack, db: Path, *options: object) -> Command:
    """One that has said that it is ready."""
    started = Command(
        "agent_runtime_core", "worker", AGENTS, "--agent-path", ROOT, "--url", f"sqlite:///{db}",
        "--log-level", "warning", *options,
    )  # fmt: skip
    child = stack.enter_context(started)
    said = child.expect("worker")
    assert f"is ready: sqlite:///{db}, agents noop, steps," in said, said
    assert f"-{child.pid} " in said
    return child


async def submitted(runner: AgentRunner, count: int, where: Path, n: int = 3, **how: float) -> list[UUID]:
    """Each step leaves a line in `effects`; the one with the number `held` goes on when there is a file `gate`."""
    params = {"n": n, "effects": str(where / "effects"), "gate": str(where / "gate"), **how}
    return [await runner.submit("steps", {"params": params}) for _ in range(count)]


async def test_a_worker_does_what_another_process_submitted(tmp_path: Path) -> None:
    db = tmp_path / "all.db"
    with ExitStack() as stack:
        child = await asyncio.to_thread(worker, stack, db, "--concurrency", 4)
        async with open_runner([db] * 3) as runner:
            runs = await submitted(runner, 10, tmp_path)
            for run in runs:
                assert (await runner.wait(run, 30)).final_output == {"out": [0, 1, 4]}
        assert {words[2] for words in lines(tmp_path / "effects")} == {str(child.pid)}
        child.send(signal.SIGTERM)
        assert await child.aended() == 0


async def test_a_worker_serves_metrics(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    db = tmp_path / "all.db"

    def scraped(url: str) -> Counter[str]:
        with urlopen(url, timeout=PATIENCE) as response:
            families = parser.text_string_to_metric_families(response.read().decode())
        found = Counter[str]()
        for sample in (sample for family in families for sample in family.samples):
            found[sample.name] += sample.value  # of all labels
        return found

    with ExitStack() as stack:
        child = await asyncio.to_thread(worker, stack, db, "--metrics-port", 0)
        url = child.expect("metrics on")
        assert url.startswith("http://127.0.0.1:")
        async with open_runner([db] * 3) as runner:
            [run] = await submitted(runner, 1, tmp_path)
            await runner.wait(run, PATIENCE)

        async def counted() -> bool:
            return (await asyncio.to_thread(scraped, url))["agent_runtime_runs_total"] == 1

        await becomes(counted, "the run is counted")
        found = await asyncio.to_thread(scraped, url)
        assert found["agent_runtime_step_seconds_count"] == 3
        assert "agent_runtime_dead" in found
        child.send(signal.SIGTERM)
        assert await child.aended() == 0


def test_a_port_for_metrics_that_is_in_use_is_named(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [
            sys.executable, "-m", "agent_runtime_core", "worker", AGENTS, "--agent-path", str(ROOT),
            "--url", f"sqlite:///{tmp_path / 'all.db'}", "--metrics-port", str(port),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert f"port {port} of '127.0.0.1' cannot be used for metrics: Address already in use" in done.stderr


async def test_a_worker_told_to_stop_under_load_loses_nothing_and_uses_no_attempt(tmp_path: Path) -> None:
    db = tmp_path / "all.db"
    async with open_runner([db] * 3) as runner:
        runs = await submitted(runner, 24, tmp_path, 4, pause=0.05, held=2)
        with ExitStack() as stack:
            for _ in range(3):
                known = len(lines(tmp_path / "effects"))
                child = await asyncio.to_thread(worker, stack, db, "--concurrency", 8, "--grace", 0.02)
                await asyncio.to_thread(until, lambda: len(lines(tmp_path / "effects")) >= known + 8, "it to be busy")  # noqa: B023
                child.send(signal.SIGTERM)
                assert await child.aended() == 0
                infos = [await runner.get_run(run) for run in runs]
                assert {info.status for info in infos} <= {RunStatus.PENDING, RunStatus.SUCCEEDED}
            assert any(info.status is RunStatus.PENDING for info in infos), "it was stopped in the middle"
            (tmp_path / "gate").touch()
            last = await asyncio.to_thread(worker, stack, db, "--concurrency", 8)
            for run in runs:
                assert (await runner.wait(run, 30)).final_output == {"out": [0, 1, 4, 9]}
                assert (await runner.get_run(run)).attempt == 1
            last.send(signal.SIGINT)
            assert await last.aended() == 0


async def test_a_second_signal_skips_the_grace(tmp_path: Path) -> None:
    db, effects = tmp_path / "all.db", tmp_path / "effects"
    async with open_runner([db] * 3) as runner:
        run = await runner.submit("sleeper", {"params": {"effects": str(effects)}})
        with ExitStack() as stack:
            child = await asyncio.to_thread(worker, stack, db, "--grace", 600)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 1, "the step to begin")
            child.send(signal.SIGTERM)
            assert await asyncio.to_thread(child.poll_line, 0.3) is None
            assert child.process.poll() is None, "the first one waits"
            assert await asyncio.to_thread(child.hurry) == 0
        info = await runner.get_run(run)
        assert (info.status, info.attempt) == (RunStatus.PENDING, 1)


STUBBORN = """
import asyncio
import time
from pathlib import Path

from agent_runtime_core import AgentRuntime, RunResult


class Stubborn(AgentRuntime):
    key = "stubborn"

    async def run(self, ctx):
        Path(ctx.params["started"]).touch()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                pass


class Blocking(AgentRuntime):
    key = "blocking"

    async def run(self, ctx):
        await asyncio.to_thread(self.block, Path(ctx.params["started"]))

    def block(self, started):
        started.touch()
        time.sleep(3600)
"""


EXITING = """
import asyncio, sys
from agent_runtime_core import AgentRuntime, ErrorInfo, RunResult
from agent_runtime_core.registry import Registry


class Exits(AgentRuntime):
    key = "exits"

    async def run(self, ctx):
        async def leaves():
            sys.exit(3)

        def interrupts():
            raise KeyboardInterrupt

        kinds = {"exit": leaves, "interrupt": lambda: asyncio.to_thread(interrupts)}
        task = asyncio.ensure_future(kinds[ctx.input["kind"]]())
        if ctx.input["awaits"]:
            await task
        await asyncio.wait([task])
        await ctx.step("after", lambda: 1)
        return RunResult()

    async def on_error(self, ctx, error):
        return ErrorInfo("Exits", str(error), retriable=False)


registry = Registry()
registry.register(Exits())
"""


@pytest.mark.parametrize("awaits", [True, False])
@pytest.mark.parametrize("kind", ["exit", "interrupt"])
async def test_a_worker_goes_on_after_a_task_of_an_agent_that_exits(kind: str, awaits: bool, tmp_path: Path) -> None:
    (tmp_path / "exiting_agents.py").write_text(EXITING)
    db = tmp_path / "all.db"
    with ExitStack() as stack:
        child = stack.enter_context(
            Command(
                "agent_runtime_core", "worker", "exiting_agents:registry", "--agent-path", tmp_path,
                "--url", f"sqlite:///{db}",
            )
        )  # fmt: skip
        await asyncio.to_thread(child.expect, "worker")
        async with open_runner([db] * 3) as runner:
            for _ in range(2):
                run = await runner.submit("exits", {"kind": kind, "awaits": awaits})
                result = await runner.wait(run, 30)
                assert result.status is (RunStatus.FAILED if awaits else RunStatus.SUCCEEDED)
        child.send(signal.SIGTERM)
        assert await child.aended() == 0


@pytest.mark.parametrize("agent", ["Stubborn", "Blocking"])
async def test_a_worker_ends_when_an_agent_ignores_its_cancellation(tmp_path: Path, agent: str) -> None:
    db, started = tmp_path / "all.db", tmp_path / "started"
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    options = ("--agent-path", tmp_path, "--url", db, "--grace", 0.1)
    async with AgentRunner.open(db) as runner:
        run = await runner.submit(agent.lower(), {"params": {"started": str(started)}})
        with Command("agent_runtime_core", "worker", f"stubborn:{agent}", *options) as child:
            child.expect("worker")
            await asyncio.to_thread(until, started.exists, "the run to start")
            child.send(signal.SIGTERM)
            assert await child.aended() == 0
        info = await runner.get_run(run)
        assert (info.status, info.attempt) == (RunStatus.PENDING, 1)


async def test_a_run_of_a_killed_worker_goes_on_at_once_in_another(tmp_path: Path) -> None:
    db, effects = tmp_path / "all.db", tmp_path / "effects"
    async with open_runner([db] * 3) as runner:
        with ExitStack() as stack:
            workers = [await asyncio.to_thread(worker, stack, db, "--poll", 0.2) for _ in range(2)]
            [run] = await submitted(runner, 1, tmp_path, held=1)
            await asyncio.to_thread(until, lambda: len(lines(effects)) == 2, "the second step to begin")
            holder = int(lines(effects)[0][2])
            [victim] = [each for each in workers if each.pid == holder]
            [heir] = [each for each in workers if each.pid != holder]
            assert victim.kill()

            async def taken_over() -> bool:
                return lines(effects)[-1][2] == str(heir.pid)

            await becomes(taken_over, "the other worker to go on")  # before the lease of 60 seconds ends
            (tmp_path / "gate").touch()
            assert (await runner.wait(run, 30)).final_output == {"out": [0, 1, 4]}
        assert [words[1] for words in lines(effects)] == ["s0", "s1", "s1", "s2"], "what is recorded is not run again"
        assert (await runner.get_run(run)).attempt == 2


RUNNER = """
from agent_runtime_core import AgentRunner, RunnerConfig
from tests.fault.jobs.agents import registry

runner = AgentRunner.open({path!r}, config=RunnerConfig(worker_id="mine"), registry=registry())
"""


async def test_a_worker_works_for_a_runner_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own_runner.py").write_text(RUNNER.format(path=str(tmp_path / "own.db")))
    with Command("agent_runtime_core", "worker", "own_runner:runner", "--agent-path", tmp_path) as child:
        said = await child.aline()
        assert said.startswith(f"worker mine is ready: {tmp_path / 'own.db'}, agents noop,"), said
        async with open_runner([tmp_path / "own.db"] * 3) as runner:
            [run] = await submitted(runner, 1, tmp_path, 0)
            assert (await runner.wait(run, 30)).status is RunStatus.SUCCEEDED
            assert (await runner.get_run(run)).worker == "mine"
        child.send(signal.SIGTERM)
        assert await child.aended() == 0


FROZEN = """
import gc

from agent_runtime_core import AgentRuntime, RunResult


class Frozen(AgentRuntime):
    key = "frozen"

    async def run(self, ctx):
        return RunResult({
            "frozen": gc.get_freeze_count(), "left": len(gc.get_objects()), "thresholds": list(gc.get_threshold()),
        })

"""


async def test_the_garbage_collector_of_a_worker_leaves_out_what_was_imported(tmp_path: Path) -> None:
    (tmp_path / "frozen_agents.py").write_text(FROZEN)
    options = ("--agent-path", tmp_path, "--url", tmp_path / "all.db")
    with Command("agent_runtime_core", "worker", "frozen_agents:Frozen", *options) as child:
        await child.aline()
        async with open_runner([tmp_path / "all.db"] * 3) as runner:
            run = await runner.submit("frozen")
            told = (await runner.wait(run, 30)).final_output
        assert told["frozen"] > 10_000
        assert told["left"] < told["frozen"] / 10
        assert told["thresholds"] == list(THRESHOLDS)
        child.send(signal.SIGTERM)
        assert await child.aended() == 0


@pytest.mark.parametrize(
    ("own", "kept"),
    [((60_000, 5, 100), [60_000, 5, 100]), ((500, 10, 10), [500, 10, 10]), ((0, 10, 10), [0, 10, 10])],
    ids=["higher", "lower", "none"],
)
async def test_a_worker_keeps_the_thresholds_of_the_agents_module(
    own: tuple[int, int, int], kept: list[int], tmp_path: Path
) -> None:
    (tmp_path / "own_agents.py").write_text(f"{FROZEN}\n\ngc.set_threshold{own}\n")
    options = ("--agent-path", tmp_path, "--url", tmp_path / "all.db")
    with Command("agent_runtime_core", "worker", "own_agents:Frozen", *options) as child:
        await child.aline()
        async with open_runner([tmp_path / "all.db"] * 3) as runner:
            told = (await runner.wait(await runner.submit("frozen"), 30)).final_output
        assert told["thresholds"] == kept
        child.send(signal.SIGTERM)
        assert await child.aended() == 0
