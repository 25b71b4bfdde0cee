"""How a journal record lies in a SQLite file."""

from __future__ import annotations

import contextlib
import random
import sqlite3
import string
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.commit_request import CommitRequest
from agent_runtime_core._engines.sqlite.transaction import SQLiteTx
from agent_runtime_core._journal.record import DONE, ENDED, Record
from agent_runtime_core._journal.sqlite import LONGEST_PACKED, MIGRATIONS, SHORTEST_PACKED, _crc
from agent_runtime_core.errors import StorageCorrupt
from agent_runtime_core.state import SQLiteStateStore

RUN = "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce"
NOISE = "".join(random.Random(1).choices(string.printable, k=5000)).replace("\0", "")
FULL = Record(
    3, DONE, "näme\t with a tab\n", "k:\tkey\t\n", 2, "01CLAIM", 1763777777.123456, '{"r":1}', '{"e":1}', '{"s":1}',
    4, 5, 6, 7, '{"i":1}', '{"n":1}', "abc", -1, 0,
)  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStateStore]:
    store = SQLiteStateStore(tmp_path / "runs.db")
    yield store
    store.engine.close_now()


@pytest.mark.parametrize(
    "record",
    [
        Record(0, DONE),
        FULL,
        FULL._replace(error=None, state=None, info=None, next=None, digest=None, result=None, key="", name=""),
        FULL._replace(t=0.1 + 0.2, ms=10**9, pos=-1),
    ],
)
async def test_a_record_comes_back_as_it_was(store: SQLiteStateStore, record: Record) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, record))])
    assert [each._replace(ev=-1) for each in await store.records(RUN)] == [record]


@pytest.mark.parametrize(
    ("kind", "result", "packed"),
    [
        (DONE, "x" * (SHORTEST_PACKED - 1), False),
        (DONE, "x" * SHORTEST_PACKED, True),
        (DONE, "x" * LONGEST_PACKED, True),
        (DONE, "x" * (LONGEST_PACKED + 1), False),
        (ENDED, "x" * (SHORTEST_PACKED - 1), False),
        (ENDED, "x" * (LONGEST_PACKED + 1), True),
        (DONE, "ä" * 2000, True),
        (DONE, NOISE, False),
    ],
)
async def test_results_of_a_few_kilobytes_are_compressed_if_it_helps(
    store: SQLiteStateStore, tmp_path: Path, kind: str, result: str, packed: bool
) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, Record(0, kind, "s", result=result)))])
    assert [each.result for each in await store.records(RUN)] == [result]
    conn = sqlite3.connect(tmp_path / "runs.db")
    [stored] = [row[0] for row in conn.execute("SELECT result FROM arc_journal")]
    conn.close()
    assert isinstance(stored, bytes) is packed
    assert len(stored) < len(result) if packed else stored == result


async def test_what_takes_long_to_compress_is_the_threads_to_do(tmp_path: Path) -> None:
    # Without flushes, which would be the thread's too on a slow disk.
    store = SQLiteStateStore(tmp_path / "normal.db", durability="normal")
    where: list[str] = []
    apply = store.engine.writer.committer.apply

    def watched(tx: SQLiteTx, request: CommitRequest) -> bool:
        where.append(threading.current_thread().name)
        return apply(tx, request)

    store.engine.writer.committer.apply = watched  # type: ignore[method-assign]
    for seq, (kind, size) in enumerate([(ENDED, 1), (ENDED, LONGEST_PACKED + 1), (DONE, 1)]):
        record = Record(seq, kind, "s", result="x" * size)
        await store.commits.commit(None, [Op("journal.append", (RUN, record))])
    assert where == ["MainThread", "agent-runtime-writer", "MainThread"]
    await store.close()


async def test_a_compressed_result_that_was_damaged_is_told(store: SQLiteStateStore, tmp_path: Path) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, Record(0, DONE, "s", result="x" * 2000)))])
    conn = sqlite3.connect(tmp_path / "runs.db")
    [packed] = [row[0] for row in conn.execute("SELECT result FROM arc_journal")]
    conn.execute("UPDATE arc_journal SET result = ?", (packed[:-1] + bytes([packed[-1] ^ 1]),))
    conn.commit()
    conn.close()
    with pytest.raises(StorageCorrupt, match="does not match its checksum"):
        await store.records(RUN)


@pytest.mark.parametrize("result", ["12", "x" * (SHORTEST_PACKED - 1), NOISE, None])
@pytest.mark.parametrize(
    "change",
    ["result = coalesce(result, '') || '1'", "name = name || 'x'", "body = body || 'x'", "kind = 'failed'", "nev = 7"],
)
async def test_a_record_that_was_damaged_is_told(
    store: SQLiteStateStore, tmp_path: Path, result: str | None, change: str
) -> None:
    records = [FULL._replace(seq=seq, result=result) for seq in range(3)]
    await store.commits.commit(None, [Op("journal.append", (RUN, record)) for record in records])
    assert [each._replace(ev=-1) for each in await store.records(RUN)] == records
    conn = sqlite3.connect(tmp_path / "runs.db")
    conn.execute(f"UPDATE arc_journal SET {change} WHERE id & 4294967295 = 1")
    conn.commit()
    conn.close()
    with pytest.raises(StorageCorrupt, match=r"journal record 1 .* does not match its checksum"):
        await store.records(RUN)


async def test_a_result_whose_kind_was_damaged_is_told(store: SQLiteStateStore, tmp_path: Path) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, FULL._replace(seq=0, result="12")))])
    conn = sqlite3.connect(tmp_path / "runs.db")
    conn.execute("PRAGMA writable_schema=ON")
    conn.execute("UPDATE sqlite_master SET sql = replace(sql, 'result TEXT', 'result') WHERE name = 'arc_journal'")
    conn.commit()
    conn.close()
    conn = sqlite3.connect(tmp_path / "runs.db")
    conn.execute("UPDATE arc_journal SET result = 12")
    assert conn.execute("SELECT typeof(result) FROM arc_journal").fetchone() == ("integer",)
    conn.commit()
    conn.close()
    with pytest.raises(StorageCorrupt, match="does not match its checksum"):
        await store.records(RUN)


@pytest.mark.parametrize("result", ["12", "x" * LONGEST_PACKED])
async def test_a_text_that_became_bytes_by_damage_is_told(store: SQLiteStateStore, tmp_path: Path, result: str) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, FULL._replace(seq=0, result=result + "ä")))])
    conn = sqlite3.connect(tmp_path / "runs.db")
    [stored] = [row[0] for row in conn.execute("SELECT result FROM arc_journal")]
    damaged = stored.encode() if isinstance(stored, str) else stored[:2] + bytes(len(stored) - 2)
    body, nev = conn.execute("SELECT body, nev FROM arc_journal").fetchone()
    crc = _crc(RUN, 0, DONE, FULL.name, damaged, body, nev)  # which does not tell a text from its bytes
    conn.execute("UPDATE arc_journal SET result = ?, crc = ?", (damaged, crc))
    conn.commit()
    conn.close()
    with pytest.raises(
        StorageCorrupt, match=f"run {RUN}: journal record 0 .* has a result that cannot be decompressed"
    ):
        await store.records(RUN)


async def test_a_number_of_an_event_that_was_damaged_is_told(store: SQLiteStateStore, tmp_path: Path) -> None:
    await store.commits.commit(None, [Op("journal.append", (RUN, FULL._replace(seq=0)))])
    conn = sqlite3.connect(tmp_path / "runs.db")
    conn.execute("UPDATE arc_journal SET ev = 'x'")
    conn.commit()
    conn.close()
    with pytest.raises(
        StorageCorrupt, match=f"run {RUN}: journal record 0 .* has event number 'x', which is no integer"
    ):
        await store.records(RUN)


async def test_a_run_that_was_deleted_begins_with_its_first_event_again(store: SQLiteStateStore) -> None:
    begun = FULL._replace(seq=0, nev=3)
    for _ in range(2):
        await store.commits.commit(None, [Op("journal.append", (RUN, begun)), Op("journal.append", (RUN, FULL))])
        assert [(each.seq, each.ev) for each in await store.records(RUN)] == [(0, 0), (3, 3)]
        await store.commits.commit(None, [Op("journal.delete", (RUN,))])
    assert await store.records(RUN) == []


@pytest.mark.parametrize(
    ("column", "value", "refused"),
    [("result", b"no zlib", False), ("body", "no fields", True), ("body", b"\xff", True)],
)
async def test_ends_are_read_without_the_result_and_other_damage_is_told(
    store: SQLiteStateStore, tmp_path: Path, column: str, value: object, refused: bool
) -> None:
    info = '{"end":{"usage":{"total_tokens":3}}}'
    record = Record(0, ENDED, "succeeded", attempt=1, claim_id="01CLAIM", result='{"usage":{}}', info=info)
    await store.commits.commit(None, [Op("journal.append", (RUN, record))])
    with sqlite3.connect(tmp_path / "runs.db") as conn:
        conn.execute(f"UPDATE arc_journal SET {column} = ?", (value,))
    conn.close()
    if refused:
        with pytest.raises(StorageCorrupt, match="is not what was written"):
            await store.endings([RUN])
    else:
        assert (await store.endings([RUN]))[RUN].usage == '{"total_tokens": 3}'


async def test_the_end_that_an_older_release_wrote_is_read_from_its_result(
    store: SQLiteStateStore, tmp_path: Path
) -> None:
    result = '{"usage":{"total_tokens":3},"final_messages":["' + "m" * LONGEST_PACKED + '"],"error":null}'
    await store.commits.commit(
        None, [Op("journal.append", (RUN, Record(0, ENDED, "succeeded", attempt=1, result=result)))]
    )
    assert (await store.endings([RUN]))[RUN].usage == '{"total_tokens": 3}'
    with sqlite3.connect(tmp_path / "runs.db") as conn:
        conn.execute("UPDATE arc_journal SET result = x'00'")
    conn.close()
    with pytest.raises(StorageCorrupt, match="is not what was written"):
        await store.endings([RUN])


async def test_the_journals_of_a_file_of_version_1_are_read_and_continued(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    first = SQLiteStateStore(path)
    runs = ["00000000-0000-7000-8000-00000000000" + digit for digit in "231"]
    written = {run: [FULL._replace(seq=seq, result=f'"{run} {seq}"') for seq in (0, 2, 5)] for run in runs}
    for run, records in written.items():
        await first.commits.commit(None, [Op("journal.append", (run, record)) for record in records])
    before = {run: await first.records(run) for run in runs}
    await first.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as conn:
        conn.executescript(
            "BEGIN; ALTER TABLE arc_journal RENAME TO new;"
            + MIGRATIONS[0].split(";\n")[0]
            + "; INSERT INTO arc_journal SELECT run_id, id & 4294967295, kind, name, result, body, ev, nev, crc"
            " FROM new JOIN arc_journal_numbers ON number = id >> 32;"
            "DROP TABLE new; DROP TABLE arc_journal_numbers;"
            "UPDATE arc_schema SET version = 1 WHERE concern = 'journal'; COMMIT"
        )
    second = SQLiteStateStore(path)
    try:
        assert {run: await second.records(run) for run in runs} == before
        await second.commits.commit(None, [Op("journal.append", (runs[1], FULL._replace(seq=6)))])
        assert [each.seq for each in await second.records(runs[1], 2)] == [5, 6]
        assert {run: await second.records(run) for run in (runs[0], runs[2])} == {
            run: before[run] for run in (runs[0], runs[2])
        }
    finally:
        await second.close()


async def test_a_deleted_run_leaves_nothing_and_its_number_may_be_used_again(
    store: SQLiteStateStore, tmp_path: Path
) -> None:
    other = "00000000-0000-7000-8000-000000000009"
    for run in (RUN, other, RUN):
        await store.commits.commit(None, [Op("journal.append", (run, FULL._replace(seq=0)))])
        await store.commits.commit(None, [Op("state.delete", (run,))])
        assert await store.records(run) == []
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as conn:
            assert conn.execute("SELECT count(*) FROM arc_journal_numbers").fetchone() == (0,)
            assert conn.execute("SELECT count(*) FROM arc_journal").fetchone() == (0,)
