"""Contents that this process cannot decrypt: commands that only show runs mark them, and nothing can be executed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig
from agent_runtime_core.cli.store import contents_only_shown
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import NotSupported, StorageCorrupt, UnknownEncryptionKey
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.backends import POSTGRES
from tests.support.command_line import Commands, process
from tests.support.local_client import LocalClient, inspecting
from tests.support.runs import Script

CANARY = "canary-of-contents"
OLD, NEW = bytes(range(32)), bytes(range(1, 33))
MARK = {"encrypted": {"key": "2026-10"}}
WORDS = "(encrypted with key '2026-10')"
RUNS = ("done", "failed", "asks", "pending", "cancelled")


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


@pytest.fixture(params=[None, "2026-11", "2026-10"], ids=["no codec", "another key", "another key of the id"])
def codec(request: pytest.FixtureRequest) -> AESGCMCodec | None:
    return None if request.param is None else AESGCMCodec({request.param: NEW}, request.param)


async def works(ctx: Any) -> RunResult:
    async def tell(text: str) -> str:
        return f"{text} {CANARY}"

    async def state(ctx: Any, state: Any) -> str:
        state["said"] = CANARY
        return CANARY

    failures = iter([True])

    async def flaky() -> str:
        if next(failures, False):
            raise ValueError(CANARY)
        return CANARY

    async def fails() -> None:
        raise ValueError(CANARY)

    await ctx.step("tell", tell, CANARY)
    await ctx.step("flaky", flaky, retries=1)
    await StepExecutor(ctx).run([Step("one", state), Step("two", state), Step("three", state)])
    try:
        await ctx.step("fails", fails)
    except Exception:  # noqa: BLE001 - the run continues without it
        await ctx.checkpoint({"at": CANARY})
    await ctx.emit("my.event", {"text": CANARY})
    return RunResult({"answer": CANARY}, final_messages=[{"role": "assistant", "content": CANARY}])


async def breaks(ctx: Any) -> None:
    raise LookupError(CANARY)


async def asks(ctx: Any) -> Any:
    return await ctx.approve("ship", {"order": CANARY})


def registered() -> Registry:
    registry = Registry()
    for body in (works, breaks, asks):
        registry.register(Script(body, body.__name__))
    return registry


async def write_store(url: str, codec: AESGCMCodec | None) -> None:
    configure(payload_codec=codec)
    config = RunnerConfig(max_retries=1, park_after=0)
    async with AgentRunner.open(url, registry=registered(), config=config) as runner:
        about: dict[str, Any] = {"metadata": {"note": CANARY}}
        asked = {"text": CANARY, "conversation_id": CANARY[:6]}
        for agent, run_id in (("works", "done"), ("breaks", "failed"), ("asks", "asks")):
            await runner.submit(agent, asked, run_id=run_id, **about)
            await runner.run_once()
        for run_id in ("pending", "cancelled"):
            await runner.submit("works", {"text": CANARY}, run_id=run_id, **about)
        await runner.signal("pending", "hello", CANARY)
        await runner.cancel("cancelled")
    reset_config()


@pytest.fixture(params=["sqlite", "redis", POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    found = (
        str(tmp_path / "runs.db") if request.param == "sqlite" else str(request.getfixturevalue(f"{request.param}_url"))
    )
    asyncio.run(write_store(found, AESGCMCodec({"2026-10": OLD}, "2026-10")))
    return found


def shown(commands: Commands, *args: str) -> str:
    code, out, err = commands(*args)
    assert code == 0, err
    assert CANARY not in out
    assert "arc1." not in out
    assert not err
    return out


def test_commands_mark_contents(url: str, codec: AESGCMCodec | None, capsys: pytest.CaptureFixture[str]) -> None:
    configure(payload_codec=codec)
    commands = Commands(capsys, url)
    listed = shown(commands, "runs")
    assert all(name in listed for name in (*RUNS, "succeeded", "waiting"))
    run = json.loads(shown(commands, "show", "done", "--events", "--json"))
    assert (run["status"], run["input"], run["metadata"]) == ("succeeded", MARK, MARK)
    assert {"tell", "flaky", "one", "two", "three", "fails"} <= {each["name"] for each in run["steps"]}
    assert [each["error"] for each in run["steps"] if each["name"] == "fails"] == [WORDS]
    assert json.loads(shown(commands, "show", "failed", "--json"))["error"]["message"] == WORDS
    for run_id in RUNS:
        assert WORDS in shown(commands, "show", run_id, "--events")
        json.loads(shown(commands, "show", run_id, "--events", "--json"))
        shown(commands, "events", run_id)
        shown(commands, "export", run_id)
        assert "<html" in shown(commands, "export", run_id, "--html")
    lines = [json.loads(each) for each in shown(commands, "export", "done").splitlines()]
    [message] = [each["message"] for each in lines if each["kind"] == "message"]
    assert message == {"role": "assistant", "content": WORDS}
    assert "ship" in shown(commands, "show", "asks")


async def event_types(url: str) -> dict[str, list[tuple[int, str]]]:
    async with AgentRunner.open(url, registry=Registry()) as runner:
        found = {}
        for run_id in RUNS:
            run = await runner.get_run(run_id)
            events = await runner.event_bus.get_events(run.run_id)
            found[run_id] = [(each.sequence, each.event_type) for each in events]
            assert all(each.payload is not None for each in events)
        return found


async def test_events_keep_their_numbers_and_types(url: str) -> None:
    configure(payload_codec=AESGCMCodec({"2026-10": OLD}, "2026-10"))
    known = await event_types(url)
    assert len(known["done"]) > 20
    configure()
    with contents_only_shown():
        assert await event_types(url) == known


async def test_no_run_is_executed_by_a_process_that_only_shows(url: str, codec: AESGCMCodec | None) -> None:
    configure(payload_codec=codec)
    with contents_only_shown():
        async with AgentRunner.open(url, registry=registered()) as runner:
            with pytest.raises(NotSupported, match="cannot execute a run"):
                await runner.queue.claim("worker", limit=1)
            with pytest.raises(NotSupported):
                await runner.run_once()
            with pytest.raises(NotSupported):
                await runner.submit("works", {"text": "x"})
            with pytest.raises(NotSupported):
                await runner.execute("works", "pending", {"text": CANARY})
            with pytest.raises(NotSupported):
                await runner.signal("pending", "hello")


async def test_other_processes_get_the_error_and_lists_of_runs(url: str, codec: AESGCMCodec | None) -> None:
    configure(payload_codec=codec)
    same_id = codec is not None and "2026-10" in repr(codec)
    error, message = UnknownEncryptionKey, "is encrypted with key '2026-10'"
    async with AgentRunner.open(url, registry=registered()) as runner:
        with pytest.raises(StorageCorrupt if same_id else error, match="2026-10" if same_id else message) as raised:
            await runner.get_run("done")
        assert ("Set payload_codec" in str(raised.value)) == (codec is None)
        if codec is not None:
            assert {each.run_key for each in await runner.runs()} == set(RUNS)


@pytest.mark.parametrize("command", [("runs",), ("show", "done"), ("events", "done"), ("export", "done")])
def test_a_process_without_any_setting(command: tuple[str, ...], tmp_path: Path) -> None:
    asyncio.run(write_store(str(tmp_path / "runs.db"), AESGCMCodec({"2026-10": OLD}, "2026-10")))
    done = process(*command, "--url", "runs.db", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert CANARY not in done.stdout


def test_the_inspector_marks_contents(codec: AESGCMCodec | None, tmp_path: Path) -> None:
    asyncio.run(write_store(str(tmp_path / "runs.db"), AESGCMCodec({"2026-10": OLD}, "2026-10")))
    configure(payload_codec=codec)
    with contents_only_shown(), inspecting(tmp_path / "runs.db") as server:
        client = LocalClient(server.port)
        for part in ("", "/result", "/steps", "/timeline", "/journal", "/messages", "/plan", "/events"):
            for run_id in RUNS:
                answer = client.data(f"runs/{run_id}{part}")
                assert answer.status in (200, 202), (run_id, part, answer.body)
                assert CANARY.encode() not in answer.body
        for path in ("runs", "runs/done/compare/failed", "approvals", "queue", "agents", "usage", "usage?by=model"):
            answer = client.data(path)
            assert answer.status == 200, (path, answer.body)
            assert CANARY.encode() not in answer.body
        assert client.data("runs/done").json["input"] == MARK
        assert client.data("approvals").json["items"][0]["details"] == MARK
        client.close()
