"""A server that executes runs, and lacks the key of some: problems name the key, and lists have the other runs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.token_file import Token
from tests.server.conftest import TOKEN, client_of
from tests.support.runs import Script

CANARY = "quetzal-7731"
OLD, NEW = bytes(range(32)), bytes(range(1, 33))
PARTS = ("", "/result", "/steps", "/timeline", "/journal", "/messages", "/plan", "/events")


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


async def echo(ctx: Any) -> Any:
    async def tell() -> str:
        return CANARY

    return await ctx.step("tell", tell)


async def fails(ctx: Any) -> None:
    raise ValueError(CANARY)


def opened(path: Path, codec: AESGCMCodec | None) -> AgentRunner:
    configure(payload_codec=codec)
    registry = Registry()
    registry.register(Script(echo, "echo"))
    registry.register(Script(fails, "fails"))
    return AgentRunner.open(path, registry=registry, config=RunnerConfig(max_retries=1))


@pytest.fixture(params=[None, NEW], ids=["no codec", "another key"])
def codec(request: pytest.FixtureRequest) -> AESGCMCodec | None:
    return None if request.param is None else AESGCMCodec({"2026-11": request.param}, "2026-11")


@contextlib.asynccontextmanager
async def serving(path: Path, codec: AESGCMCodec | None) -> AsyncIterator[Any]:
    async with opened(path, AESGCMCodec({"2026-10": OLD}, "2026-10")) as runner:
        for agent in ("echo", "fails"):
            await runner.submit(agent, {"text": CANARY}, run_id=f"old-{agent}")
            await runner.run_once()
        await runner.submit("echo", {"text": CANARY}, run_id="old-pending")
    async with opened(path, codec) as runner:
        await runner.submit("echo", {"text": "new"}, run_id="new")
        tokens = Tokens([Token.of(TOKEN)], clock=runner.queue.clock)
        app = create_app(runner, orchestrator=Orchestrator(runner=runner), authenticate=tokens)
        async with client_of(app) as client:
            yield client


async def test_lists_have_all_runs(codec: AESGCMCodec | None, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(tmp_path / "runs.db", codec) as client:
        answer = await client.get("/api/v1/runs")
        assert answer.status_code == 200, answer.text
        assert {each["key"] for each in answer.json()["items"]} == {"old-echo", "old-fails", "old-pending", "new"}
        for path in ("queue", "agents", "usage", "approvals"):
            answer = await client.get(f"/api/v1/{path}")
            assert answer.status_code in (200, 404), (path, answer.text)
        assert (await client.get("/api/v1/runs/new")).status_code == 200
    assert CANARY not in caplog.text


async def test_problems_name_the_key(
    codec: AESGCMCodec | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown = 0
    async with serving(tmp_path / "runs.db", codec) as client:
        for run_id in ("old-echo", "old-fails", "old-pending"):
            for part in PARTS[: -1 if run_id == "old-pending" else None]:  # its events are awaited
                answer = await client.get(f"/api/v1/runs/{run_id}{part}")
                assert CANARY not in answer.text
                assert "arc1." not in answer.text
                if answer.status_code in (200, 202):  # a run without a journal has no steps to decrypt
                    continue
                assert answer.status_code == 503, (run_id, part, answer.text)
                body = answer.json()
                assert body["type"] == "urn:agent-runtime:unknown-encryption-key"
                assert body["detail"] == "The contents are encrypted with key 2026-10, which this server does not have."
                shown += 1
    assert shown > 16
    assert CANARY not in caplog.text
