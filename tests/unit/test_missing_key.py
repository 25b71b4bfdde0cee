"""A worker without the key leaves runs whose documents are encrypted to a worker that has the key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

pytest.importorskip("cryptography")

from agent_runtime_core import AgentRunner, AgentRuntime, RunnerConfig, RunResult, configure
from agent_runtime_core._engines.payloads import NotDecoded
from agent_runtime_core.config import reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import UnknownEncryptionKey
from agent_runtime_core.persistence.models import AuditEntry, AuditEventType, Conversation, Fact, TaskList
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import claim
from agent_runtime_core.status import RunStatus

CODECS = {
    "no codec": None,
    "another key": AESGCMCodec({"other": b"o" * 32}, "other"),
    "another key of the same id": AESGCMCodec({"k": b"o" * 32}, "k"),
}
KEY = AESGCMCodec({"k": b"k" * 32}, "k")

ID = UUID(int=7)
#: How a document is written, and how the code of a run reads it.
DOCUMENTS: dict[str, tuple[Callable[[Any], Awaitable[Any]], Callable[[Any], Awaitable[Any]]]] = {
    "memory": (lambda s: s.memory.set("fact", "secret"), lambda s: s.memory.get("fact")),
    "preference": (lambda s: s.preferences.set("colour", "secret"), lambda s: s.preferences.get("colour")),
    "conversation": (
        lambda s: s.conversations.save(Conversation(id=ID, title="secret")),
        lambda s: s.conversations.get(ID),
    ),
    "task": (lambda s: s.tasks.save(TaskList(id=ID, name="secret")), lambda s: s.tasks.get(ID)),
    "knowledge": (
        lambda s: s.knowledge.save_fact(Fact(id=ID, key="key", value="secret")),
        lambda s: s.knowledge.get_fact(ID),
    ),
    "audit": (
        lambda s: s.audit.log_event(AuditEntry(event_type=AuditEventType.AGENT_START, action="secret")),
        lambda s: s.audit.get_events(),
    ),
}


class Reader(AgentRuntime):
    """An agent that takes an error for the absence of its document, as code does that catches `Exception`."""

    key = "reader"

    def __init__(self, what: str, done: list[str]) -> None:
        self.what, self.done = what, done

    async def run(self, ctx: Any) -> RunResult:
        try:
            found = await DOCUMENTS[self.what][1](ctx.persistence)
        except Exception:  # noqa: BLE001 - such code exists
            found = None
        await ctx.step("use", lambda: self.done.append(repr(found)))
        return RunResult({"found": repr(found)})


def opened(path: Path, agent: AgentRuntime) -> AgentRunner:
    registry = Registry()
    registry.register(agent)
    config = RunnerConfig(max_retries=1)
    return AgentRunner.open(str(path / "runs.db"), registry=registry, config=config)


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("what", DOCUMENTS)
async def test_no_code_continues_without_a_document_that_it_cannot_read(
    what: str, codec: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "OUTAGE_DELAY", 0.0)
    done = list[str]()
    configure(payload_codec=KEY)
    async with opened(tmp_path, Reader(what, done)) as runner:
        await DOCUMENTS[what][0](runner.persistence)
    configure(payload_codec=codec)
    async with opened(tmp_path, Reader(what, done)) as runner:
        await runner.submit("reader", {}, run_id="r")
        with pytest.raises((UnknownEncryptionKey, NotDecoded)):
            await runner.run_once()
        left = await runner.get_run("r")
        assert (left.status, left.attempt, done) == (RunStatus.PENDING, 1, [])
        assert left.reason in ("UnknownEncryptionKey", "NotDecoded")
    configure(payload_codec=KEY)
    if codec is not None:
        return  # the input of the run is encrypted with that key
    async with opened(tmp_path, Reader(what, done)) as runner:
        await runner.run_once()
        assert (await runner.wait("r", timeout=10)).status is RunStatus.SUCCEEDED
    assert len(done) == 1
    assert "secret" in done[0]
