"""With a full-text index, a search finds the same runs as without it, and reads few others."""

from __future__ import annotations

import asyncio
import itertools
import json
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import DONE, Record
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument, NotSupported
from agent_runtime_core.queue import sqlite_search
from agent_runtime_core.queue.contents import MOST_INDEXED, ContentFilter, contains
from agent_runtime_core.queue.records import LIVE, RunFilter, RunRow, RunUpdate
from agent_runtime_core.runner import AgentRunner, finding, search_index
from agent_runtime_core.runner.finding import Finder, contents_of, with_journal
from agent_runtime_core.runner.reencryption import reencrypt
from tests.support.cases import for_each
from tests.support.codec import encrypting
from tests.support.command_line import Commands, on

# Letters whose lower case is longer or depends on the letters around it, what JSON and the stores write in another way,
# and what their patterns and queries mean by it.
LETTERS = 'abAB\u00e9\u0130\u03a3\u03c3\U0001f600"\\\n%_*\0\1\ud800 7'
PHRASES = ["Needle", "aB\u0130\u03a3", '\U0001f600"\\\n', "%_*\0\1\ud800"]
TEXTS = st.builds("".join, st.lists(st.sampled_from(PHRASES) | st.text(LETTERS, max_size=2), max_size=3))
PARTS = st.sampled_from(PHRASES).flatmap(lambda text: st.sampled_from([text, text.upper(), text[:3], text[-3:]]))
WORDS = PARTS | st.text(LETTERS, min_size=1, max_size=4).filter(lambda text: text.strip() != "")
VALUES = TEXTS | st.lists(TEXTS | st.integers(0, 99), max_size=2) | st.dictionaries(st.sampled_from("kl"), TEXTS)
TENANTS = st.sampled_from(["", "", "acme", "b"])
NUMBERS = st.integers(0, 9)
ACTIONS = st.one_of(
    st.tuples(st.just("insert"), VALUES, TENANTS, st.sampled_from(["pending", "waiting", "failed", "succeeded"])),
    st.tuples(st.just("insert"), VALUES, TENANTS, st.sampled_from(["failed", "succeeded"])),
    st.tuples(st.just("step"), NUMBERS, VALUES, st.sampled_from(["running", "waiting", "pending"])),
    st.tuples(st.just("message"), NUMBERS, VALUES),
    st.tuples(st.sampled_from(["end", "requeue", "delete"]), NUMBERS),
    st.tuples(st.just("assign"), NUMBERS, st.sampled_from(["acme", "b"])),
    st.tuples(st.sampled_from(["build", "build", "pass", "recreate"])),
)
CHECKS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
_NUMBER = itertools.count()


class Model:
    """A store to which actions are applied."""

    def __init__(self, runner: AgentRunner) -> None:
        self.runner, self.queue, self.state = runner, runner.queue, runner.state_store
        self._runs = self._messages = 0

    async def rows(self, **wanted: Any) -> list[RunRow]:
        return await self.queue.find(RunFilter(limit=1000, **wanted))

    async def apply(self, action: tuple[Any, ...]) -> None:
        name, *args = action
        rows = await self.rows()
        if name in ("build", "pass", "recreate"):
            await self._index(name)
        elif name == "insert":
            await self._insert(*args)
        elif rows:
            await self._change(name, rows, args)

    async def _change(self, name: str, rows: list[RunRow], args: list[Any]) -> None:
        row = rows[args[0] % len(rows)]
        is_live = row.status in LIVE
        match name:
            case "step":
                await self._step(row if row.status == "running" else None, *args[1:])
            case "message":
                self._messages += 1
                op = self.queue.post_op(row.run_id, "signal", "", json.dumps(args[1]), f"m{self._messages}")
                await self.queue.commits.commit(None, [op])
            case "end" if is_live:
                await self.runner.cancel(row.run_id)
            case "requeue" if row.status in ("failed", "cancelled"):
                await self.runner.requeue(row.run_id)
            case "delete" if not is_live:
                await self.runner.discard(row.run_id)
            case "assign" if not row.tenant:
                await self.queue.assign(row.run_id, args[1])

    async def _step(self, row: RunRow | None, value: Any, then: str) -> None:
        """Store a step of a running run, or of the next run that is ready. Only with a claim are steps stored."""
        for each in [row] if row is not None else await self.queue.claim_rows("w", 60):
            seq = len(await self.state.records(each.run_id))
            record = Record(seq, DONE, "model", f"k:{seq}", result=json.dumps(value))
            await self.state.commits.commit(None, [Op("journal.append", (each.run_id, record))])
            if then != "running":
                update = RunUpdate(each.claim_id, then, 30.0, 0.0 if then == "pending" else 1e12, cursor=each.mail_seq)
                await self.queue.settle(each.run_id, update)

    async def _insert(self, value: Any, tenant: str, status: str) -> None:
        self._runs += 1
        live = status in LIVE
        # The clock went back now and then.
        at = float(self._runs - 2 * (self._runs % 3))
        row = RunRow(
            str(UUID(int=self._runs)), "a", json.dumps({"v": value}), metadata=json.dumps({"m": value}),
            created_at=at + 10, updated_at=at + 10, status=status, run_key=f"Run-{self._runs}", tenant=tenant,
            ended_at=None if live else at + 20, output=None if live else json.dumps(value),
        )  # fmt: skip
        await self.queue.commits.commit(None, [Op("queue.insert", (row,))])

    async def _index(self, name: str) -> None:
        index = self.runner.search_index
        if name == "pass":
            if (state := await index.read()) is not None:
                await index._pass(state, state.last, 3)
            return
        if name == "recreate":
            await index.drop()
        await index.build()

    async def expected(self, words: str, **wanted: Any) -> list[str]:
        found = []
        for row in await self.rows(**wanted):
            contents = contents_of(row, (await self.state.endings([row.run_id])).get(row.run_id))
            contents = await with_journal(self.queue, self.state, row, contents)
            if contains(words, contents.names, contents.texts):
                found.append(row.run_id)
        return found

    async def found(self, words: str, limit: int, **wanted: Any) -> list[str]:
        filter_ = RunFilter(contents=ContentFilter(search=words), since=0.0 if len(words) > 2 else 0.5, **wanted)
        found, after = list[str](), None
        for _ in range(200):
            page = await Finder(self.queue, self.state, filter_).find(limit, after)
            found += [row.run_id for row in page.rows]
            if (after := page.position) is None:
                return found
        raise AssertionError("the pages do not end")


async def agree(runner: AgentRunner, actions: list[tuple[Any, ...]], words: list[str]) -> None:
    async with runner:
        model = Model(runner)
        await runner.search_index.build()
        for number, action in enumerate(actions):
            await model.apply(action)
            if number % 5 == 4 or number == len(actions) - 1:
                for each in words:
                    for wanted in ({"newest_first": True}, {}, {"tenant": "acme", "newest_first": True}):
                        expected = await model.expected(each, **wanted)
                        for limit in (2, 1000):
                            assert await model.found(each, limit, **wanted) == expected, (each, wanted)


@pytest.fixture(params=["few", "many"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "many", a handful of runs takes several pages, candidates and commits."""
    if request.param == "many":
        for module, name, value in (
            (finding, "_LARGE_PAGE", 2), (finding, "MOST_ROWS", 3), (sqlite_search, "_MARGIN", 4),
            (search_index, "_PAGE", 2), (search_index, "_CHARACTERS", 20),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)


SAME = given(st.lists(ACTIONS, min_size=8, max_size=20), st.lists(WORDS, min_size=2, max_size=3))


@pytest.mark.usefixtures("sizes")
@SAME
@CHECKS
def test_sqlite_finds_the_same_runs(actions: Any, words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(agree(AgentRunner.open(f"{directory}/runs.db", durability="normal"), actions, words))


@pytest.mark.postgres
@pytest.mark.usefixtures("sizes")
@SAME
@settings(CHECKS, max_examples=10)
def test_postgres_finds_the_same_runs(postgres_url: str, actions: Any, words: list[str]) -> None:
    pytest.importorskip("psycopg")
    asyncio.run(agree(AgentRunner.open(f"{postgres_url}_{next(_NUMBER)}"), actions, words))


#: What happens to the only run after it was indexed, as its status then, and the actions that store the word.
CHANGES: dict[str, tuple[str, list[tuple[Any, ...]]]] = {
    "message to a live run": ("waiting", [("message", 0, "needle")]),
    "step of a run that runs": ("pending", [("step", 0, "needle", "running")]),
    "step of a run that waits again": ("pending", [("step", 0, "needle", "waiting")]),
    "end": ("pending", [("step", 0, "needle", "succeeded")]),
    "step after a requeue": ("failed", [("requeue", 0), ("step", 0, "needle", "waiting")]),
    "tenant of a live run": ("waiting", [("assign", 0, "acme")]),
    "tenant of an ended run": ("failed", [("assign", 0, "acme")]),
}


@for_each("change", CHANGES)
@pytest.mark.parametrize("store", ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
async def test_a_run_that_changed_is_found(
    change: str, store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = str(tmp_path / f"{change}.db")
    if store == "postgres":
        url = f"{request.getfixturevalue('postgres_url')}_{next(_NUMBER)}"
    status, actions = CHANGES[change]
    async with AgentRunner.open(url) as runner:
        model = Model(runner)
        of_tenant = change.startswith("tenant")
        await model.apply(("insert", "needle" if of_tenant else "straw", "", status))
        await runner.search_index.build()
        wanted = {"tenant": "acme"} if of_tenant else {}
        assert await model.found("needle", 9, **wanted) == []
        for action in actions:
            await model.apply(action)
        [row] = await model.rows()
        assert await model.found("needle", 9, **wanted) == [row.run_id]
        await runner.search_index.build()
        assert await model.found("needle", 9, **wanted) == [row.run_id]
        assert await reads_of(runner, "zzzz") == int(row.status == "running")


# -- what is read


async def reads_of(runner: AgentRunner, words: str) -> int:
    wanted = RunFilter(newest_first=True, contents=ContentFilter(search=words))
    return (await Finder(runner.queue, runner.state_store, wanted).find(10)).read


async def filled(runner: AgentRunner, number: int = 30) -> None:
    for n in range(number):
        await runner.submit("a", {"text": f"Needle {n:02}" if n % 10 == 0 else "straw"}, run_id=f"r{n}")
        await runner.cancel(f"r{n}")


async def test_only_candidates_are_read(tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        await filled(runner)
        before = await runner.runs(search="needle")
        assert "create an index with agent-runtime index" in before.note
        assert await reads_of(runner, "needle") == 30
        assert await runner.search_index.build() == 30
        after = await runner.runs(search="needle")
        assert ([run.run_key for run in after], after.note) == (["r0", "r10", "r20"], "")
        assert await reads_of(runner, "needle") == 3
        assert "create an index" not in (await runner.runs(search="ne")).note, "too short for an index"
        assert await runner.search_index.drop()
        assert not await runner.search_index.drop()
        assert (await runner.runs(search="needle")).note == before.note


async def test_long_contents_are_read_by_each_search(tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        await runner.submit("a", {"text": "x" * MOST_INDEXED + " needle"}, run_id="long")
        await runner.cancel("long")
        assert await runner.search_index.build() == 1
        assert [run.run_key for run in await runner.runs(search="needle")] == ["long"]
        assert await runner.search_index.build() == 0


async def test_more_candidates_than_the_bound_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MOST_ROWS", 4)
    monkeypatch.setattr(sqlite_search, "_MARGIN", 1)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        await filled(runner, 6)
        await runner.search_index.build()
        found = await runner.runs(search="straw", newest_first=True)
        assert [run.run_key for run in found] == ["r5", "r4", "r3", "r2", "r1"]
        assert "Read the next page" in found.note


# -- who keeps it current


async def test_a_look_of_a_page_indexes_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_index, "_PAUSE", 0.0)
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        await filled(runner, 3)
        await runner.search_index.look()
        assert await runner.search_index.read() is None, "only the command creates an index"
        await runner.search_index.build()
        await runner.submit("a", {"text": "needle"}, run_id="new")
        await runner.search_index.look()
        state = await runner.search_index.read()
        assert state is not None
        assert (state.upto, state.last, state.changed) == (4, 4, [])
        await runner.cancel("new")
        state = await runner.search_index.read()
        assert state is not None
        assert state.changed == [4]
        await runner.search_index.look()
        assert await reads_of(runner, "zzzz") == 0


async def test_a_read_only_store_uses_an_index_and_builds_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path) as runner:
        await filled(runner)
        await runner.search_index.build()
        await runner.submit("a", {"text": "needle"}, run_id="new")
        async with AgentRunner.open(path, read_only=True) as reader:
            await reader.search_index.look()
            assert [run.run_key for run in await reader.runs(search="needle")] == ["r0", "r10", "r20", "new"]
            assert await reads_of(reader, "needle") == 4
            with pytest.raises(NotSupported):
                await reader.search_index.build()
    async with AgentRunner.open(path, read_only=True) as reader:  # without a log
        assert await reads_of(reader, "needle") == 4


KILLED = """
import asyncio, os, sys
from agent_runtime_core.runner import AgentRunner, search_index
search_index._PAGE = 4
async def main():
    async with AgentRunner.open(sys.argv[1]) as runner:
        put, left = runner.search_index._put, [3]
        async def killed(*args):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), 9)
            await put(*args)
        runner.search_index._put = killed
        await runner.search_index.build()
asyncio.run(main())
"""


async def test_a_build_that_was_killed_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path) as runner:
        await filled(runner)
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, str(path))
    assert await killed.wait() == -9
    async with AgentRunner.open(path) as runner:
        state = await runner.search_index.read()
        assert state is not None
        assert state.upto == 8
        assert [run.run_key for run in await runner.runs(search="needle")] == ["r0", "r10", "r20"]
        assert await runner.search_index.build() == 22
        assert await reads_of(runner, "needle") == 3


# -- what is deleted


def trigrams(path: Path) -> set[str]:
    """All trigrams that the parts of the index have, also of runs that were deleted."""
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("CREATE VIRTUAL TABLE temp.terms USING fts5vocab (main, arc_search, row)")
        found = {term for (term,) in conn.execute("SELECT term FROM temp.terms")}
        blocks = b"\n".join(block for (block,) in conn.execute("SELECT block FROM arc_search_data"))
        return found | {each for each in ("zqj", "qjx") if each.encode() in blocks}


@pytest.mark.parametrize("deleted", ["erase", "vacuum", "discard"])
async def test_no_byte_of_a_deleted_run_stays(tmp_path: Path, deleted: str) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path) as runner:
        for n in range(20):
            await runner.submit("a", {"text": "zqjx-secret" if n == 7 else f"straw {n}"}, run_id=f"r{n}")
            await runner.cancel(f"r{n}")
            if n % 5 == 0:
                await runner.search_index.build()
        await runner.search_index.build()
        assert [run.run_key for run in await runner.runs(search="zqjx-secret")] == ["r7"]
        if deleted == "erase":
            assert (await runner.erase(run_ids="r7")).left == {}
        elif deleted == "discard":
            await runner.discard("r7")
            await runner.search_index.forget()
        else:
            await runner.vacuum({"cancelled": 0}, compact=True)
        assert await runner.runs(search="zqjx-secret") == []
        expected = [] if deleted == "vacuum" else ["r0", "r5"]
        assert [run.run_key for run in await runner.runs(search="straw", limit=6)][::5] == expected
    for file in (path, Path(f"{path}-wal")):
        if deleted != "discard" and file.exists():
            assert b"zqjx-secret" not in file.read_bytes()
    if deleted != "vacuum":
        assert not {"zqj", "qjx"} & trigrams(path)


async def test_a_run_that_another_release_deleted_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path) as runner:
        await filled(runner, 3)
        await runner.search_index.build()
    with closing(sqlite3.connect(path)) as conn:
        conn.execute("DELETE FROM arc_runs WHERE run_key = 'r0'")
        conn.commit()
    async with AgentRunner.open(path) as runner:
        assert await runner.runs(search="needle") == []
        assert await runner.search_index.build() == 1
    with closing(sqlite3.connect(path)) as conn:
        assert conn.execute("SELECT count(*) FROM arc_search").fetchone() == (2,)
        assert conn.execute("SELECT count(*) FROM arc_search_left").fetchone() == (0,)


async def test_encryption_drops_the_index_and_builds_none(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with AgentRunner.open(path) as runner:
        await filled(runner)
        await runner.search_index.build()
    configure(payload_codec=encrypting())
    try:
        async with AgentRunner.open(path) as runner:
            assert await reads_of(runner, "needle") == 30, "the index may lack what was stored since"
            await reencrypt(runner, compact=True)
            with pytest.raises(InvalidArgument, match="payload_codec must be None for a full-text index"):
                await runner.search_index.build()
            assert [run.run_key for run in await runner.runs(search="needle")] == ["r0", "r10", "r20"]
        assert b"needle" not in path.read_bytes().lower()
    finally:
        reset_config()
    async with AgentRunner.open(path) as runner:
        assert await runner.search_index.read() is None


async def test_an_index_has_what_a_hook_left(tmp_path: Path) -> None:
    configure(redact=lambda kind, value: "***" if isinstance(value, str) else {"text": "***"}, redact_stored=True)
    try:
        async with AgentRunner.open(tmp_path / "runs.db") as runner:
            await runner.submit("a", {"text": "a secret-word"}, run_id="r")
            await runner.cancel("r")
            await runner.search_index.build()
            assert len(await runner.runs(search="***")) == 1
    finally:
        reset_config()
    assert b"secret-word" not in (tmp_path / "runs.db").read_bytes()


@pytest.mark.parametrize("store", ["memory://", pytest.param("redis", marks=pytest.mark.redis)])
async def test_other_stores_have_no_index(store: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis_url") if store == "redis" else store
    async with AgentRunner.open(url) as runner:
        await filled(runner, 3)
        with pytest.raises(NotSupported, match="has no full-text index"):
            await runner.search_index.build()
        assert not await runner.search_index.drop()
        found = await runner.runs(search="needle")
        assert [run.run_key for run in found] == ["r0"]
        assert found.note.startswith("Only runs since ")
        assert "index" not in found.note


# -- the command


def test_the_command_builds_and_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Commands(capsys, str(tmp_path / "runs.db"))
    assert run("index")[0] == 2, "there is no file"
    on(run.url, filled)
    assert run.json("index") == {"indexed": 30}
    assert [each["run_key"] for each in run.json("runs", "--search", "needle")] == ["r0", "r10", "r20"]
    assert "goes to run number 30 of 30" in run("doctor")[1]
    assert run("verify")[0] == 0
    assert run("index") == (0, f"0 runs indexed in {run.url}\n", "")
    assert run("index", "--drop") == (0, f"{run.url} has no index now\n", "")
    assert run("index", "--drop") == (0, f"{run.url} had no index\n", "")


async def test_a_copy_of_the_file_has_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        await filled(runner)
        await runner.search_index.build()
    run = Commands(capsys)
    await asyncio.to_thread(run, "backup", str(tmp_path / "runs.db"), str(tmp_path / "copy.db"))
    async with AgentRunner.open(tmp_path / "copy.db") as runner:
        assert await reads_of(runner, "needle") == 3


# -- PostgreSQL


@pytest.mark.postgres
async def test_a_run_in_an_open_transaction_is_not_passed_over(postgres_url: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    async with AgentRunner.open(postgres_url) as runner:
        await filled(runner, 2)
        await runner.search_index._create()
        connection = await psycopg.AsyncConnection.connect(postgres_url.partition("?")[0])
        async with connection:
            await runner.submit("a", {"text": "needle of the application"}, run_id="open", connection=connection)
            await runner.submit("a", {"text": "a later needle"}, run_id="later")
            await runner.cancel("later")
            state = await runner.search_index.read()
            assert state is not None
            await runner.search_index._pass(state, state.last, 9)
            assert (await runner.search_index.read()).upto == 0  # type: ignore[union-attr]
        assert await runner.search_index.build() == 4
        found = await runner.runs(search="needle", newest_first=True)
        assert {run.run_key for run in found} == {"later", "open", "r0"}
