"""Contents that are encrypted before they reach a store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec, PayloadCodec
from agent_runtime_core.errors import (
    IdempotencyConflict,
    InvalidArgument,
    NotSupported,
    StorageBusy,
    StorageCorrupt,
    UnknownEncryptionKey,
)
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.steps import Step, StepExecutor
from tests.support.runs import Script

CANARY = "canary-of-contents"
OLD, NEW = bytes(range(32)), bytes(range(1, 33))


@pytest.fixture(autouse=True)
def _config() -> Iterator[None]:
    yield
    reset_config()


@pytest.fixture
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs.db")


async def speak(ctx: Any) -> dict[str, Any]:
    async def tell(text: str) -> str:
        return f"{CANARY} {text}"

    async def add(ctx: Any, state: Any) -> str:
        state["said"] = [CANARY] * 40
        return CANARY

    said = await ctx.step("tell", tell, CANARY)
    await StepExecutor(ctx).run([Step("one", add), Step("two", add)])
    await ctx.checkpoint({"at": CANARY})
    await ctx.emit("my.event", {"text": CANARY})
    return {"said": said, "answer": await ctx.wait_for_signal("answer")}


def bytes_under(folder: Path) -> bytes:
    return b"\n".join(each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file())


def opened(url: str, codec: PayloadCodec | None) -> AgentRunner:
    configure(payload_codec=codec, park_after=0)
    runner = AgentRunner.open(url)
    runner.registry.unregister("speaker")
    runner.registry.register(Script(speak, "speaker"))
    return runner


async def test_no_content_is_in_the_file(tmp_path: Path, store_url: str) -> None:
    codec = AESGCMCodec({"k1": OLD}, "k1")
    async with opened(store_url, codec) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r", metadata={"note": CANARY})
        await runner.run_once()
        await runner.signal("r", "answer", {"text": CANARY})
        assert CANARY.encode() not in bytes_under(tmp_path), "with its log"
        await runner.run_once()
        result = await runner.wait("r", timeout=5)
        assert result.final_output["value"] == {"said": f"{CANARY} {CANARY}", "answer": {"text": CANARY}}
        run = await runner.get_run("r")
        assert (run.input["text"], run.metadata["note"]) == (CANARY, CANARY)
        assert await runner.state_store.get_checkpoint(run.run_id) == {"at": CANARY}
        events = [event async for event in runner.stream("r")]
        assert {"text": CANARY} in [event.payload for event in events]
    stored = bytes_under(tmp_path)
    assert CANARY.encode() not in stored
    assert b"speaker" in stored, "names stay readable"


async def test_another_process_resumes_with_the_key(store_url: str) -> None:
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r")
        await runner.run_once()
        await runner.signal("r", "answer", "yes")
    async with opened(store_url, AESGCMCodec({"k1": OLD, "k2": NEW}, "k2")) as runner:
        await runner.run_once()
        assert (await runner.wait("r", timeout=5)).final_output["value"]["answer"] == "yes"


async def test_without_the_key_the_error_names_the_key_and_the_run(store_url: str) -> None:
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        run_id = await runner.submit("speaker", {"text": CANARY}, run_id="r")
    async with opened(store_url, AESGCMCodec({"k2": NEW}, "k2")) as runner:
        with pytest.raises(
            UnknownEncryptionKey, match=rf"input of run {run_id} is encrypted with key 'k1'.* Add that key"
        ):
            await runner.get_run("r")


async def test_another_key_of_the_same_id_is_refused(store_url: str) -> None:
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r")
    async with opened(store_url, AESGCMCodec({"k1": NEW}, "k1")) as runner:
        with pytest.raises(StorageCorrupt, match=r"input of run .* cannot be decrypted"):
            await runner.get_run("r")


async def test_what_was_stored_before_is_read_unless_the_codec_is_strict(store_url: str) -> None:
    async with opened(store_url, None) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r")
        await runner.run_once()
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1", strict=True)) as runner:
        with pytest.raises(StorageCorrupt, match=r"input of run .* must be encrypted, got plain text"):
            await runner.get_run("r")
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        await runner.submit("speaker", {"text": CANARY}, run_id="r")
        await runner.signal("r", "answer", "yes")
        await runner.run_once()
        assert (await runner.wait("r", timeout=5)).final_output["value"]["said"] == f"{CANARY} {CANARY}"


async def test_a_run_id_that_was_used_is_recognized_by_its_input(store_url: str) -> None:
    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        first = await runner.submit("speaker", {"text": CANARY, "n": 1}, run_id="r")
        assert await runner.submit("speaker", {"n": 1, "text": CANARY}, run_id="r") == first
        with pytest.raises(IdempotencyConflict):
            await runner.submit("speaker", {"text": "other"}, run_id="r")
        with pytest.raises(IdempotencyConflict):
            await runner.execute("speaker", "r", {"text": "other"})


class _Lossy:
    """An engine that applies a commit, and loses the first reply."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.lost = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results: list[Any] = await self._engine.commit(guard, ops)
        if not self.lost and any(op.name == "state.checkpoint" for op in ops):
            self.lost += 1
            raise StorageBusy("no reply")
        return results


async def test_a_commit_without_a_reply_is_repeated_with_the_same_bytes(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(ctx: Any) -> str:
        await ctx.checkpoint({"at": CANARY})
        return "done"

    async with opened(store_url, AESGCMCodec({"k1": OLD}, "k1")) as runner:
        committer: Any = runner.state_store.commits
        lossy = _Lossy(committer._target)
        monkeypatch.setattr(committer, "_target", lossy)
        assert (await runner.execute(Script(body, "body"), run_id="r")).final_output["value"] == "done"
        assert lossy.lost == 1


@pytest.mark.parametrize(("text", "most"), [("abc " * 1_000, 400), ("\u00e9" * 799, 300), ("x" * 799, 1_200)])
def test_texts_are_compressed_before_they_are_encrypted(text: str, most: int) -> None:
    codec = AESGCMCodec({"k1": OLD}, "k1")
    stored = codec.encode(text, context="result of run r")
    assert len(stored) <= most
    assert codec.decode(stored, context="result of run r") == text
    for other in (stored.replace(".z.", ".", 1), stored.replace("arc1.k1.", "arc1.k1.z.", 1)):
        if other != stored:
            with pytest.raises(StorageCorrupt, match="cannot be decrypted"):
                codec.decode(other, context="result of run r")


async def test_documents_are_encrypted_and_not_searchable(tmp_path: Path) -> None:
    configure(payload_codec=AESGCMCodec({"k1": OLD}, "k1"), backend_url=f"sqlite:///{tmp_path / 'docs.db'}")
    async with PersistenceManager() as stores:
        await stores.memory.set("name", CANARY)
        assert await stores.memory.get("name") == CANARY
        with pytest.raises(NotSupported, match="cannot be searched"):
            await stores.conversations.search(CANARY)
        assert CANARY.encode() not in bytes_under(tmp_path)


@pytest.mark.parametrize(
    ("keys", "current", "message"),
    [
        ({}, "k", "keys must be a dict with at least one key"),
        ({"k": b"short"}, "k", "key 'k' must be 32 bytes, got 5 bytes"),
        ({"k": OLD[:16]}, "k", "key 'k' must be 32 bytes, got 16 bytes"),
        ({"k": "x" * 32}, "k", "key 'k' must be 32 bytes, got another type"),
        ({"a.b": OLD}, "a.b", "a key id must have 1 to 64 letters"),
        ({"k": OLD}, "other", "current must be one of the key ids 'k' or None, got 'other'"),
    ],
)
def test_keys_are_checked(keys: Any, current: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        AESGCMCodec(keys, current)


async def test_a_codec_without_a_current_key_reads_and_writes_plain_text(store_url: str) -> None:
    """So a fleet that has it in all processes can switch encryption on in one process after the other."""
    reads, writes = AESGCMCodec({"k": b"k" * 32}, None), AESGCMCodec({"k": b"k" * 32}, "k")
    assert reads.encode("text", context="c") == "text"
    assert reads.decode(writes.encode("text", context="c"), context="c") == "text"
    assert repr(reads) == "AESGCMCodec(keys=['k'], current=None)"
    with pytest.raises(InvalidArgument, match="strict must be False while current is None"):
        AESGCMCodec({"k": b"k" * 32}, None, strict=True)


def test_the_same_text_is_encrypted_differently_each_time_and_shows_no_key() -> None:
    codec = AESGCMCodec({"k1": OLD}, "k1")
    texts = {codec.encode("text", context="c") for _ in range(100)}
    assert len(texts) == 100
    assert {codec.decode(each, context="c") for each in texts} == {"text"}
    with pytest.raises(StorageCorrupt):
        codec.decode(texts.pop(), context="other")
    assert OLD.hex() not in repr(codec)
    assert repr(OLD) not in repr(codec)
    assert isinstance(codec, PayloadCodec)


def test_a_damaged_text_is_refused() -> None:
    codec = AESGCMCodec({"k1": OLD}, "k1")
    sealed = codec.encode("text", context="c")
    for wrong in (sealed[:-4], sealed[:10], f"{sealed[:-2]}!!", sealed.replace("k1", "k1", 1)[:-5] + "AAAA="):
        with pytest.raises((StorageCorrupt, UnknownEncryptionKey)):
            codec.decode(wrong, context="c")
