"""A run that this process cannot decode is left to another one: it keeps its attempts, and so do the other runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, configure, open_run
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import StorageCorrupt, StorageError, UnknownEncryptionKey
from agent_runtime_core.queue.records import RunRow
from agent_runtime_core.registry import Registry
from agent_runtime_core.status import RunStatus
from tests.support.runs import Rig, Script, soon

LONG = 1e6  # seconds, so that waits on a clock that hurries let no lease expire
SAME = b"digests that stay the same"
HERE = AESGCMCodec({"k1": bytes(range(32))}, "k1", digest_key=SAME)
#: By what a process has instead: the codec and the error.
OTHERS: dict[str, tuple[AESGCMCodec | None, type[StorageError], str]] = {
    "another_key": (
        AESGCMCodec({"k2": bytes(range(1, 33))}, "k2", digest_key=SAME), UnknownEncryptionKey,
        "is encrypted with key 'k1', which is none of the keys of the codec. Add that key",
    ),
    "no_codec": (
        None, UnknownEncryptionKey,
        "is encrypted with key 'k1', and no payload codec is set. Set payload_codec",
    ),
    "altered": (
        AESGCMCodec({"k1": bytes(range(1, 33))}, "k1", digest_key=SAME), StorageCorrupt,
        "cannot be decrypted: it was changed or moved",
    ),
}  # fmt: skip


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return None if request.param == "memory" else tmp_path / "runs.db"


def rig_with_codec(place: Path | None, **config: Any) -> Rig:
    configure(payload_codec=HERE)
    return Rig(place, park_after=0, **config)


def process_of(rig: Rig, other: str, **config: Any) -> AgentRunner:
    configure(payload_codec=OTHERS[other][0])
    return rig.another(**config)


def refused(other: str, place: str = "") -> Any:
    _, error, message = OTHERS[other]
    return pytest.raises(error, match=f"{place}.*{message}")


async def answer(ctx: Any) -> Any:
    return ctx.input.get("text")


async def stored_row(rig: Rig, run_id: str = "r") -> RunRow:
    row = await rig.runner.queue.row((await rig.runner.get_run(run_id)).run_id)
    assert row is not None
    return row


def unused(row: RunRow) -> tuple[Any, ...]:
    return row.status, row.failures, row.crashes, row.crashes_in_row


async def test_a_worker_releases_the_run_and_raises(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", {"text": "secret"}, run_id="r")
        worker = process_of(rig, other)
        with refused(other, "input of run"):
            await worker.run_once()
        row = await stored_row(rig)
        assert unused(row) == ("pending", 0, 0, 0)
        assert row.due_at > rig.clock.wall(), "no worker claims it again at once"
        assert not await worker.run_once()
        rig.clock.advance(60)  # type: ignore[attr-defined]
        assert await rig.runner.run_once()
        info = await rig.runner.get_run("r")
        assert (info.status, info.attempt) == (RunStatus.SUCCEEDED, 1)


async def test_metadata_alone_may_be_encrypted(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", {}, run_id="r", metadata={"tenant": "secret"})
        with refused(other, "metadata of run"):
            await process_of(rig, other).run_once()
        assert unused(await stored_row(rig)) == ("pending", 0, 0, 0)


async def test_the_other_runs_of_a_worker_go_on(
    place: Path | None, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with rig_with_codec(place, lease_ttl_seconds=LONG) as rig:
        rig.register(answer)
        worker = process_of(rig, other)
        for number in range(3):
            await rig.runner.submit("script", {"text": "secret"}, run_id=f"secret-{number}")
            await worker.submit("script", {"text": f"{number}"}, run_id=f"open-{number}")
        claims = 0
        claim_rows = worker.queue.claim_rows

        async def counted(*args: Any, **options: Any) -> list[RunRow]:
            nonlocal claims
            claims += len(rows := await claim_rows(*args, **options))
            return rows

        worker.queue.claim_rows = counted  # type: ignore[method-assign]
        began = rig.clock.boot()
        loop = asyncio.create_task(worker.run_loop(concurrency=2, handle_signals=False))
        for number in range(3):
            result = await worker.wait(f"open-{number}", timeout=1e9)
            assert result.final_output["value"] == f"{number}"
        worker.stop()
        await loop
        seconds = rig.clock.boot() - began
        for number in range(3):
            assert unused(await stored_row(rig, f"secret-{number}")) == ("pending", 0, 0, 0)
        reports = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert 1 <= len(reports) <= 1 + seconds / 60
        assert "is left to a worker that can read it: input of run" in reports[0].getMessage()
        assert reports[0].exc_info is None
        assert claims <= 6 + 3 * seconds / 5, "each of them is claimed every five seconds at most"


async def test_a_run_that_ends_claims_one_that_cannot_be_decoded(place: Path | None, other: str) -> None:
    async with rig_with_codec(place, lease_ttl_seconds=LONG) as rig:
        rig.register(answer)
        worker = process_of(rig, other)
        await worker.submit("script", {"text": "open"}, run_id="open", priority=1)
        await rig.runner.submit("script", {"text": "secret"}, run_id="secret")
        loop = asyncio.create_task(worker.run_loop(concurrency=1, handle_signals=False))
        assert (await worker.wait("open", timeout=1e9)).final_output["value"] == "open"
        worker.stop()
        await loop
        assert unused(await stored_row(rig, "secret")) == ("pending", 0, 0, 0)


async def test_execute_releases_the_run_and_raises(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        agent = rig.register(answer)
        await rig.runner.submit("script", {"text": "secret"}, run_id="r")
        with refused(other, "input of run"):
            await process_of(rig, other).execute(agent, "r", {"text": "secret"})
        assert unused(await stored_row(rig)) == ("pending", 0, 0, 0)
        result = await rig.runner.execute(agent, "r", {"text": "secret"})
        assert result.final_output["value"] == "secret"


async def test_open_run_releases_the_run_and_raises(tmp_path: Path, other: str) -> None:
    path = tmp_path / "runs.db"
    configure(payload_codec=HERE)
    with pytest.raises(asyncio.CancelledError):
        async with open_run(path, run_id="r", input={"text": "secret"}):
            raise asyncio.CancelledError
    configure(payload_codec=OTHERS[other][0])
    with refused(other, "input of run"):
        async with open_run(path, run_id="r", input={"text": "secret"}):
            pass
    configure(payload_codec=HERE)
    async with open_run(path, run_id="r", input={"text": "secret"}) as ctx:
        assert ctx.attempt == 1


async def test_get_run_raises(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", {"text": "secret"}, run_id="r")
        with refused(other, "input of run"):
            await process_of(rig, other).get_run("r")


async def waiting(ctx: Any) -> Any:
    await ctx.step("said", lambda: "secret")
    return await ctx.wait_for_signal("answer")


async def test_a_journal_that_cannot_be_decoded_is_left(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(waiting)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.run_once()
        await rig.runner.signal("r", "answer", "yes")
        with refused(other, "record of run|result of run"):
            await process_of(rig, other).run_once()
        assert unused(await stored_row(rig)) == ("pending", 0, 0, 0)
        rig.clock.advance(60)  # type: ignore[attr-defined]
        assert await rig.runner.run_once()
        assert (await rig.runner.wait("r", timeout=5)).final_output["value"] == "yes"


async def test_a_message_that_cannot_be_decoded_is_left(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(waiting)
        worker = process_of(rig, other)
        await worker.submit("script", {}, run_id="r")
        await worker.run_once()
        await rig.runner.signal("r", "answer", "yes")
        with refused(other, "message of run"):
            await worker.run_once()
        row = await worker.queue.row((await worker.get_run("r")).run_id)
        assert row is not None
        assert unused(row) == ("pending", 0, 0, 0)
        assert "run.failed" not in [event.event_type async for event in _events(worker)]


async def _events(worker: AgentRunner) -> Any:
    for event in await worker.event_bus.get_events((await worker.get_run("r")).run_id):
        yield event


@pytest.mark.parametrize("other", ["another_key", "altered"])
async def test_a_conversation_that_cannot_be_decoded_is_left(tmp_path: Path, other: str) -> None:
    registry = Registry()
    registry.register(Script(answer))
    talk = {"conversation_id": "c", "messages": [{"role": "user", "content": "secret"}]}
    configure(payload_codec=HERE)
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry) as runner:
        (await runner.execute("script", "first", talk)).raise_for_status()
    configure(payload_codec=OTHERS[other][0])
    async with AgentRunner.open(tmp_path / "runs.db", registry=registry) as worker:
        await worker.submit("script", talk, run_id="r")
        with refused(other, "document "):
            await worker.run_once()
        row = await worker.queue.row((await worker.get_run("r")).run_id)
        assert row is not None
        assert unused(row) == ("pending", 0, 0, 0)


async def test_a_stored_error_is_not_encoded_twice(place: Path | None, other: str) -> None:
    async def failing(ctx: Any) -> None:
        raise ValueError("secret")

    async with rig_with_codec(place, max_retries=3) as rig:
        rig.register(failing)
        await rig.runner.submit("script", {"text": "secret"}, run_id="r")
        await rig.runner.run_once()
        before = await stored_row(rig)
        assert before.error is not None
        rig.clock.advance(600)  # type: ignore[attr-defined]
        with refused(other):
            await process_of(rig, other).run_once()
        assert (await stored_row(rig)).error == before.error


async def test_claims_without_a_reply_are_released_beside_such_runs(place: Path | None, other: str) -> None:
    async with rig_with_codec(place) as rig:
        rig.register(answer)
        await rig.runner.submit("script", {"text": "secret"}, run_id="r")
        [row] = await rig.runner.queue.claim_rows("w", 60)
        await process_of(rig, other).queue.give_back([row.claim_id])
        assert unused(await stored_row(rig)) == ("pending", 0, 0, 0)


def _waits_in_the_store(worker: AgentRunner) -> bool:
    claims = worker._worker._blocking_claims
    return claims is not None and bool(claims._name and claims._open)


@pytest.mark.redis
async def test_a_run_that_a_store_delivers_is_released(redis_url: str, other: str) -> None:
    registry = Registry()
    registry.register(Script(answer))
    configure(payload_codec=OTHERS[other][0])
    delivered = set[str]()
    async with AgentRunner.open(redis_url, registry=registry) as worker:
        start_delivered = worker._worker.start_delivered

        def noted(rows: list[RunRow]) -> None:
            delivered.update(str(row.run_key) for row in rows)
            start_delivered(rows)

        worker._worker.start_delivered = noted  # type: ignore[method-assign]
        loop = asyncio.create_task(worker.run_loop(handle_signals=False))
        configure(payload_codec=HERE)
        async with AgentRunner.open(redis_url, registry=registry) as client:
            for number in range(3):
                await soon(lambda: _waits_in_the_store(worker))
                await client.submit("script", {"text": "secret"}, run_id=f"secret-{number}")
                await worker.submit("script", {"text": "open"}, run_id=f"open-{number}")
                result = await worker.wait(f"open-{number}", timeout=60)
                assert result.final_output["value"] == "open"
            worker.stop()
            await loop
            assert "secret-0" in delivered
            for number in range(3):
                row = await client.queue.row((await client.get_run(f"secret-{number}")).run_id)
                assert row is not None
                assert unused(row) == ("pending", 0, 0, 0)
