"""A disk that is full, a file that is cut short or has a bit flipped: typed errors, and nothing that was promised lost.

The long forms, 200 sizes and 100 cuts and 100 flips: pytest tests/fault/test_disk.py -m slow
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._journal.record import Record
from agent_runtime_core.errors import StorageCorrupt, StorageError, StorageTooNew, UnknownRun
from tests.fault.jobs.agents import open_runner
from tests.support.fault_runs import until
from tests.support.processes import Child

log = logging.getLogger("fault")


def filled(where: Path, sizes: list[int]) -> None:
    errors: Counter[str] = Counter()
    acknowledged = 0
    with Child("full", where, *sizes) as child:
        for size in sizes:
            told = json.loads(child.line())
            assert told["size"] == size
            assert (told["error"], told["integrity"], told["lost"]) == ("StorageFull", ["ok"], [])
            assert told["again"] in ("StorageFull", "not refused")  # something smaller may still fit
            assert told["after"] == ["20000", "20001", "20002"], "it works again when there is space"
            errors[told["error"]] += 1
            acknowledged += told["acknowledged"]
        told = json.loads(child.line())
        assert told == {"error": "StorageFull", "after": 1}
        assert child.ended() == 0
    log.info("%d sizes of a full disk: %s, %d acknowledged steps, 0 lost", len(sizes), dict(errors), acknowledged)


def sizes(count: int) -> list[int]:
    random = Random(count)
    return [0, 1, 4096, 5 << 20, *(random.randrange(300_000) for _ in range(count - 4))]


def test_a_full_disk_is_told_and_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    filled(tmp_path, sizes(20))


@pytest.mark.slow
def test_200_sizes_of_a_full_disk(tmp_path: Path) -> None:
    filled(tmp_path, sizes(200))


RUNS = [UUID(int=n + 1) for n in range(4)]


class Truth(NamedTuple):
    """What a sound file says."""

    data: bytes
    records: dict[UUID, list[Record]]
    outputs: dict[UUID, Any]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    db = tmp_path_factory.mktemp("sound") / "all.db"

    async def make() -> Truth:
        async with open_runner([db] * 3) as runner:
            for run in RUNS:
                input_ = {"params": {"n": 10, "say": True, "text": "t" * 600}}
                await runner.execute("steps", run, input_)
            return Truth(
                b"",
                {run: await runner.state_store.records(run) for run in RUNS},
                {run: (await runner.wait(run)).final_output for run in RUNS},
            )

    told = asyncio.run(make())
    assert not Path(f"{db}-wal").exists(), "all of it is in the file"
    return told._replace(data=db.read_bytes())


def refusal(db: Path, error: StorageError) -> str:
    # Where the damage is in the text of a schema, SQLite only knows that it cannot make sense of it.
    plain = type(error) is StorageError and "no such" in str(error)
    assert plain or isinstance(error, (StorageCorrupt, StorageTooNew)), repr(error)
    assert str(db) in str(error)
    return f"refused: {type(error).__name__}"


async def survey(db: Path, truth: Truth) -> list[str]:
    """What happened on a damaged file: the errors, and whether any value was wrong."""
    before = hashlib.sha256(db.read_bytes()).digest()
    told: list[str] = []

    async def look(what: str, ask: Callable[[AgentRunner], Any], check: Callable[[Any], bool]) -> None:
        try:
            answer = await ask(runner)
            right = check(answer)
        except (StorageError, UnknownRun) as error:
            told.append(type(error).__name__)
        else:
            assert right, f"{what}: a wrong value was given: {answer!r:.300}"

    try:
        opened = open_runner([db] * 3)
    except StorageError as error:
        told.append(refusal(db, error))
    if told:
        assert hashlib.sha256(db.read_bytes()).digest() == before, "the file is left as it is"
        return told
    async with opened as runner:
        for run in RUNS:
            await survey_run(run, truth, look)
        await look("new run", lambda r: r.execute("steps", input_data={"params": {"n": 2}}), lambda result: True)
    return told or ["untouched"]


async def survey_run(run: UUID, truth: Truth, look: Callable[..., Awaitable[None]]) -> None:
    expected = {record.seq: checked(record) for record in truth.records[run]}
    await look(
        "journal",
        lambda r: r.state_store.records(run),
        lambda records: all(expected[record.seq] == checked(record) for record in records),
    )
    await look("output", lambda r: outcome(r, run), lambda out: out in (None, truth.outputs[run]))
    await look(
        "events", lambda r: r.event_bus.get_events(run), lambda events: all(e.payload is not None for e in events)
    )


def checked(record: Record) -> Record:
    """What the checksum of a record is over."""
    return record._replace(ev=0)


async def outcome(runner: AgentRunner, run: UUID) -> Any:
    info = await runner.get_run(run)
    return (await runner.wait(run, timeout=1)).final_output if info.ended_at is not None else None


def cuts(data: bytes, count: int) -> Iterator[bytes]:
    random = Random("cuts")
    for n in range(count):
        at = (2, 50, 100, 512, 4096)[n] if n < 5 else random.randrange(1, len(data))
        yield data[:at]  # one byte counts as none for SQLite


def flips(data: bytes, count: int) -> Iterator[bytes]:
    random = Random("flips")
    for n in range(count):
        at = random.randrange(100) if n % 5 == 0 else random.randrange(len(data))
        flipped = bytearray(data)
        flipped[at] ^= 1 << random.randrange(8)
        yield bytes(flipped)


def working() -> set[threading.Thread]:
    """The threads there are but for those of the loop's own pool, which grows when one of them is slow to come back."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


async def damaged(where: Path, truth: Truth, damage: Callable[[bytes, int], Iterator[bytes]], count: int) -> None:
    found: Counter[str] = Counter()
    threads, files = working(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for n, data in enumerate(damage(truth.data, count)):
        home = where / str(n)
        home.mkdir()
        db = home / "all.db"
        db.write_bytes(data)
        found.update(set(await survey(db, truth)))
    log.info("%d x %s: %s", count, damage.__name__, dict(found))
    gc.collect()
    assert any("Corrupt" in kind for kind in found)
    with contextlib.suppress(TimeoutError):
        await until(lambda: working() <= threads)  # one that was told to end may be at its last step
    assert working() <= threads, "what is refused leaves no thread behind"
    if files:
        assert len(os.listdir("/proc/self/fd")) <= files + 4, "nor a file"


@pytest.mark.parametrize("damage", [cuts, flips])
async def test_a_damaged_file_gives_typed_errors_and_no_wrong_value(
    damage: Callable[[bytes, int], Iterator[bytes]], truth: Truth, tmp_path: Path
) -> None:
    await damaged(tmp_path, truth, damage, 20)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cuts, flips])
async def test_100_damaged_files(damage: Callable[[bytes, int], Iterator[bytes]], truth: Truth, tmp_path: Path) -> None:
    await damaged(tmp_path, truth, damage, 100)
