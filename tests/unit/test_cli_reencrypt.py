"""`agent-runtime reencrypt`: what it says, and what it leaves in the file."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime_core._engines.payloads import encode_contents
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.persistence.manager import open_document_store
from tests.support.command_line import Commands, on
from tests.support.reencryption import BOTH, CANARY, KEYS, NEW, OLD

BOTH_AT = "tests.support.reencryption:BOTH"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield str(tmp_path / "runs.db")
    reset_config()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


def submit(store: str, codec: object, count: int = 1, text: str = CANARY) -> None:
    configure(payload_codec=codec)

    async def submitted(runner: object) -> None:
        for _ in range(count):
            await runner.submit("nobody", {"text": text})  # type: ignore[attr-defined]

    on(store, submitted)
    reset_config()


def files(store: str) -> bytes:
    return b"".join(path.read_bytes() for path in Path(store).parent.glob("runs.db*") if path.is_file())


def test_it_says_what_it_did(store: str, run: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(store, OLD, 3)
    monkeypatch.setenv("AGENT_RUNTIME_PAYLOAD_CODEC", BOTH_AT)
    assert run("reencrypt", store) == (
        0,
        "3 texts re-encrypted\nkey 'old': 0 texts, so it can be removed from the codec\nkey 'new' (current): 3 texts\n",
        "",
    )
    assert run("reencrypt", "--url", store, "--batch", "1")[:2] == (
        0,
        "0 texts re-encrypted\nkey 'old': 0 texts, so it can be removed from the codec\nkey 'new' (current): 3 texts\n",
    )
    assert run.json("reencrypt", store) == {
        "current": "new", "digest_key_id": None, "texts": 0, "runs": 3, "keys": {"old": 0, "new": 3}, "plain": 0,
        "skipped": [], "not_supported": {}, "unreadable": {},
    }  # fmt: skip


def test_the_codec_may_be_in_a_module_of_the_application(
    store: str, run: Commands, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    submit(store, None)
    name = f"secrets_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "from agent_runtime_core.encryption import AESGCMCodec\ncodec = AESGCMCodec({'k': bytes(32)}, 'k')\n"
    )
    monkeypatch.setenv("AGENT_RUNTIME_PAYLOAD_CODEC", f"{name}:codec")
    assert run("reencrypt", store, "--agent-path", str(tmp_path)) == (
        0,
        "1 text re-encrypted\nkey 'k' (current): 1 text\n",
        "",
    )


def test_the_key_of_digests_is_not_lost(store: str, run: Commands) -> None:
    old = AESGCMCodec({"old": KEYS["old"]}, "old")
    submit(store, old)
    both = AESGCMCodec(KEYS, "new")
    configure(payload_codec=both)
    assert run("reencrypt", store)[1] == (
        "1 text re-encrypted\n"
        "key 'old': 0 texts, so it can be removed from the codec if you pass digest_key\n"
        "key 'new' (current): 1 text\n"
    )
    new = AESGCMCodec({"new": KEYS["new"]}, "new", digest_key=both.digest_key)
    assert new.digest("text") == both.digest("text") == old.digest("text")
    configure(payload_codec=new)
    assert run("reencrypt", store)[1] == "0 texts re-encrypted\nkey 'new' (current): 1 text\n"


def test_runs_of_workers_are_named(store: str, run: Commands) -> None:
    submit(store, OLD, 7)
    configure(payload_codec=OLD)

    async def claim(runner: object) -> list[str]:
        runs = await runner.queue.claim("w", 60, limit=6)  # type: ignore[attr-defined]
        configure(payload_codec=BOTH)
        one = await asyncio.to_thread(run, "reencrypt", store)
        for each in runs[1:]:
            await runner.queue.release(each.run_id, "w", True)  # type: ignore[attr-defined]
        two = await asyncio.to_thread(run, "reencrypt", store)
        return [str(runs[0].run_id), *map(str, (*one, *two))]

    first, *said = on(store, claim)
    assert said[:2] == ["1", "1 text re-encrypted\nkey 'old': 6 texts\nkey 'new' (current): 1 text\n"]
    assert said[2].startswith("agent-runtime: 6 runs are owned by workers and were skipped: '")
    assert said[2].endswith("' and 1 more (--json lists them). Run the command again later\n")
    assert said[5] == (
        f"agent-runtime: 1 run is owned by a worker and was skipped: '{first}'. Run the command again later\n"
    )


def test_what_cannot_be_read_is_named(store: str, run: Commands) -> None:
    submit(store, OLD, 7)
    configure(payload_codec=NEW)
    code, out, err = run("reencrypt", store)
    assert (code, out) == (1, "0 texts re-encrypted\nkey 'new' (current): 0 texts\nkey 'old': 7 texts\n")
    assert err.count("is encrypted with key 'old'") == 5
    assert err.endswith("agent-runtime: 2 more texts cannot be read. Use --json to list them\n")


def test_the_file_is_written_again_if_wanted(store: str, run: Commands) -> None:
    submit(store, OLD)
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as conn:
        conn.execute("PRAGMA secure_delete = OFF")  # as SQLite does unless it was built otherwise
        conn.execute("CREATE TABLE other (text TEXT)")
        conn.execute("INSERT INTO other VALUES (?)", (CANARY * 1000,))
        conn.execute("DELETE FROM other")
    configure(payload_codec=BOTH)
    assert run("reencrypt", store)[0] == 0
    assert CANARY.encode() in files(store), "a free page has an old text"
    assert run("reencrypt", store, "--compact")[0] == 0
    assert CANARY.encode() not in files(store)


def test_documents_in_files_are_named_by_their_url(tmp_path: Path, store: str, run: Commands) -> None:
    async def put() -> None:
        documents = open_document_store(f"files:///{tmp_path / 'documents'}")
        encode_contents([documents], OLD)
        notes = Collection(documents, "project", "note")
        await notes.write(notes.put(Entry("k", CANARY)))
        await documents.close()

    asyncio.run(put())
    configure(payload_codec=BOTH)
    assert run("reencrypt", f"files:///{tmp_path / 'documents'}")[:2] == (
        0,
        "1 text re-encrypted\nkey 'old': 0 texts, so it can be removed from the codec\nkey 'new' (current): 1 text\n",
    )
    code, out, err = run("reencrypt", f"files:///{tmp_path / 'none'}")
    assert (code, out) == (2, "")
    assert err.endswith("not found. Check the path\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.db"], "agent-runtime: store 'none.db' not found. Check the path"),
        ([], "agent-runtime: no store was named. Pass --url"),
        (["memory://"], "agent-runtime: other processes cannot see the runs of a store in memory"),
    ],
)
def test_a_store_must_be_there(arguments: list[str], said: str, store: str, run: Commands) -> None:
    code, out, err = run("reencrypt", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(said)


def test_a_codec_must_be_set(store: str, run: Commands) -> None:
    submit(store, None)
    code, out, err = run("reencrypt", store)
    assert (code, out) == (2, "")
    assert err.startswith(
        "agent-runtime: payload_codec must be a payload codec, got None. Set AGENT_RUNTIME_PAYLOAD_CODEC"
    )
    assert run("reencrypt", store, "--url", store)[0] == 2, "one name is enough"
