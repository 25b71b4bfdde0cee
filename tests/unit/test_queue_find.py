"""Lists of runs equal a plain model on each backend, and SQLite reads them from indexes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core._engines.base import Op
from agent_runtime_core.queue import get_queue, redis_find, sqlite, sqlite_find
from agent_runtime_core.queue.base import RunQueue
from agent_runtime_core.queue.records import LIVE, QUESTION, RowChanged, RunCounts, RunFilter, RunRow, light
from agent_runtime_core.queue.sqlite import SQLiteQueue
from agent_runtime_core.status import RunStatus

STATUSES = [status.value for status in RunStatus]
REASONS = ["", "signal", "signal go", "signal go now", "signals", "sleep", " x", "signal "]
KEYS = ["x", "xy", "x\u00e9", "\U0010ffff", "0", "00000000-0000"]
TIMES = st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e-5])
IDS = [str(UUID(int=n << 120 | n)) for n in range(8)]


@st.composite
def rows(draw: st.DrawFn) -> list[RunRow]:
    drawn = []
    for n in range(draw(st.integers(0, 20))):
        status, at = draw(st.sampled_from(STATUSES)), draw(TIMES)
        questions = draw(st.sampled_from(["", "", "01A plan\n", "01A plan\n01B in_doubt:pay\n"]))
        drawn.append(
            RunRow(
                str(UUID(int=draw(st.sampled_from([0, 1, 15])) << 124 | n)),
                draw(st.sampled_from("ab")), '{"i":1}', "", '{"m":1}', 0, at, draw(st.sampled_from([0.0, 5.0])),
                run_key=draw(st.none() | st.sampled_from(KEYS)), parent_id=draw(st.none() | st.sampled_from(IDS[:2])),
                concurrency_key=draw(st.none() | st.sampled_from("kl")), status=status, failures=draw(st.integers(0,
                1)),
                reason=draw(st.sampled_from(REASONS)), ended_at=None if status in LIVE else at + 1, output='{"o":1}',
                conversation=draw(st.none() | st.sampled_from("cd")), questions=questions,
                tenant=draw(st.sampled_from(["", "", "t", "u"])),
            )
        )  # fmt: skip
    return drawn


FILTERS = st.builds(
    RunFilter,
    statuses=st.none() | st.lists(st.sampled_from(STATUSES), max_size=3).map(tuple),
    agent=st.none() | st.sampled_from("abz"),
    since=TIMES,
    ended_before=st.none() | TIMES,
    after=st.integers(0, 3),
    limit=st.sampled_from([1, 2, 5, 1000]),
    until=st.none() | TIMES,
    prefix=st.none() | st.sampled_from([*KEYS, "f", "1", "", "\U0010fffe", IDS[1]]),
    parent=st.none() | st.sampled_from(IDS[:3]),
    conversation=st.none() | st.sampled_from("cdz"),
    tenant=st.none() | st.sampled_from(["", "t", "u", "z"]),
    run_key=st.none() | st.sampled_from(KEYS),
    concurrency_key=st.none() | st.sampled_from("klz"),
    reason=st.none() | st.sampled_from([*REASONS, "sig", "x"]),
    retrying=st.booleans(),
    asking=st.booleans(),
    in_doubt=st.booleans(),
    newest_first=st.booleans(),
    before=st.none() | st.tuples(TIMES, st.integers(0, 9)),
    light=st.booleans(),
    without_input=st.booleans(),
)
#: Stores do not decide the others: see test_finding.py.
FIELDS = [each for each in RunFilter._fields if each not in ("min_attempts", "contents")]


@st.composite
def filters(draw: st.DrawFn) -> RunFilter:
    """A filter with few of the fields, or it would seldom admit a row."""
    whole = draw(FILTERS)
    kept = {"limit", "newest_first", "light", "without_input", *draw(st.lists(st.sampled_from(FIELDS), max_size=4))}
    return RunFilter(**{name: value for name, value in whole._asdict().items() if name in kept})


def expected(every: list[RunRow], wanted: RunFilter) -> list[RunRow]:
    found = [row for row in every if wanted.admits(row)]
    if wanted.newest_first:
        found.sort(key=lambda row: (row.created_at, row.arrival), reverse=True)
    shown = found[: wanted.limit]
    if wanted.light:
        return [light(row) for row in shown]
    return [row._replace(input="{}", output=None) for row in shown] if wanted.without_input else shown


async def changed(queue: RunQueue, every: list[RunRow], changes: list[tuple[str, int]]) -> None:
    """Change some of the rows, so that they leave their indexes and enter others."""
    for what, place in changes:
        if not every:
            return
        row = await queue.row(every[place % len(every)].run_id)
        if row is None:
            continue
        ops = {
            "end": Op("queue.end", (row.run_id, LIVE, "cancelled", 9.0, "cancel")),
            "reopen": Op("queue.reopen", (row.run_id, ("failed", "dead", "cancelled"), 9.0)),
            "delete": Op("queue.delete", (row.run_id, row.generation, row.arrival)),
            "ask": queue.post_op(row.run_id, QUESTION, "in_doubt:step", "{}", "01C"),
            "answer": queue.post_op(row.run_id, "signal", "plan", "1", "arc.answer:01A"),
        }
        with contextlib.suppress(RowChanged):  # it has another status
            await queue.commits.commit(None, [ops[what]])


async def agree(queue: RunQueue, stored: list[RunRow], changes: Any, wanted: list[RunFilter]) -> None:
    try:
        for row in stored:
            await queue.commits.commit(None, [Op("queue.insert", (row,))])
        await changed(queue, stored, changes)
        every = [row for row in [await queue.row(each.run_id) for each in stored] if row is not None]
        every.sort(key=lambda row: row.arrival)
        for each in wanted:
            assert await queue.find(each) == expected(every, each), each
        assert await queue.counts() == RunCounts.of(every)
    finally:
        await queue.close()


CHANGES = st.lists(
    st.tuples(st.sampled_from(["end", "reopen", "delete", "ask", "answer"]), st.integers(0, 20)), max_size=6
)
MODEL = given(rows(), CHANGES, st.lists(filters(), min_size=5, max_size=12))
CHECKS = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=["few", "many"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "many", a handful of runs is what a store usually has by the thousand."""
    if request.param == "many":
        for module, name, value in (
            (sqlite_find, "FEW", 2), (sqlite_find, "MANY", 2), (redis_find, "PAGE", 3), (redis_find, "MOST_NAMES", 2),
            (redis_find, "MOST_MEMBERS", 2), (sqlite_find, "BATCH", 4), (sqlite, "BATCH", 4),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, value)


@MODEL
@CHECKS
def test_memory(stored: list[RunRow], changes: Any, wanted: list[RunFilter]) -> None:
    asyncio.run(agree(get_queue("memory"), stored, changes, wanted))


@pytest.mark.usefixtures("sizes")
@MODEL
@CHECKS
def test_sqlite(stored: list[RunRow], changes: Any, wanted: list[RunFilter]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        queue = get_queue("sqlite", path=f"{directory}/runs.db", durability="normal")
        asyncio.run(agree(queue, stored, changes, wanted))


@pytest.mark.redis
@pytest.mark.usefixtures("sizes")
@MODEL
@CHECKS
def test_redis(redis_url: str, stored: list[RunRow], changes: Any, wanted: list[RunFilter]) -> None:
    pytest.importorskip("redis")
    queue = get_queue("redis", url=f"{redis_url}-{next(_NUMBERS)}")
    asyncio.run(agree(queue, stored, changes, wanted))


_NUMBERS = itertools.count()


class Explained:
    """A connection that collects the query plans of all statements."""

    def __init__(self, path: Path) -> None:
        self.conn = sqlite3.connect(path)
        self.plans: list[str] = []

    def execute(self, query: str, values: Any = ()) -> sqlite3.Cursor:
        self.plans += [row[3] for row in self.conn.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        return self.conn.execute(query, values)


@pytest.fixture
def explained(tmp_path: Path) -> Iterator[Explained]:
    queue = SQLiteQueue(tmp_path / "runs.db")
    asyncio.run(agree(queue, [RunRow(each, "a") for each in IDS], [], []))
    explained = Explained(tmp_path / "runs.db")
    yield explained
    explained.conn.close()


@pytest.mark.parametrize("newest_first", [True, False], ids=["newest", "oldest"])
@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        ({}, "created"),
        ({"since": 5.0}, "created"),
        ({"until": 5.0}, "created"),
        ({"before": (5.0, 1)}, "created"),
        ({"statuses": ("failed", "pending")}, "state"),
        ({"agent": "a"}, "state"),
        ({"prefix": "x"}, "key"),
        ({"prefix": "0"}, "key"),
        ({"parent": IDS[0]}, "parent"),
        ({"conversation": "c"}, "conversation"),
        ({"concurrency_key": "k"}, "lane"),
        ({"reason": "signal"}, "reason"),
        ({"reason": "signal go"}, "reason"),
        ({"retrying": True}, "retrying"),
        ({"asking": True}, "asking"),
        ({"in_doubt": True}, "in_doubt"),
    ],
)
def test_each_filter_reads_an_index(
    explained: Explained, wanted: dict[str, Any], index: str, newest_first: bool
) -> None:
    sqlite_find.find(explained, RunFilter(**wanted, newest_first=newest_first))  # type: ignore[arg-type]
    assert not [plan for plan in explained.plans if "SCAN arc_runs" in plan]
    if wanted or newest_first:
        assert [plan for plan in explained.plans if f"INDEX arc_runs_{index} " in plan], explained.plans


#: How the runs are read that are not listed.
TABLE = "SEARCH arc_runs USING INTEGER PRIMARY KEY (rowid>?)"


BIG = 900_000  # bytes of an input of another tenant


def read_bytes() -> int:
    """What this process has read from files."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc")
@pytest.mark.parametrize("newest_first", [True, False], ids=["newest", "oldest"])
def test_a_tenant_reads_no_row_of_another_tenant(tmp_path: Path, newest_first: bool) -> None:
    path = tmp_path / "runs.db"
    fields: dict[str, Any] = {
        "agent": "a", "parent_id": IDS[0], "conversation": "c", "concurrency_key": "k", "run_key": "key",
        "reason": "signal go",
        "failures": 1, "questions": f"1 q in_doubt:x{IDS[0]}", "status": "waiting", "blocked": 2,
    }  # fmt: skip
    rows = [
        RunRow(str(UUID(int=number)), tenant=tenant, input=json.dumps("x" * size), **fields)
        for number, (tenant, size) in enumerate([("anna", BIG), ("", BIG), ("ben", 1)] * 4, 1)
    ]
    asyncio.run(agree(SQLiteQueue(path), rows, [], []))
    filters: list[dict[str, Any]] = [
        {}, {"statuses": ("waiting", "failed")}, {"agent": "a"}, {"prefix": "0"}, {"prefix": "key"}, {"run_key": "key"},
        {"parent": IDS[0]}, {"conversation": "c"}, {"concurrency_key": "k"}, {"reason": "signal"}, {"retrying": True},
        {"asking": True}, {"in_doubt": True}, {"asking": True, "agent": "a"}, {"until": 1e12}, {"before": (1e12, 1)},
    ]  # fmt: skip
    for wanted in filters:
        view = sqlite3.connect(path)
        before = read_bytes()
        found = sqlite_find.find(view, RunFilter(tenant="ben", newest_first=newest_first, **wanted))
        assert [row.tenant for row in found] == ["ben"] * 4, wanted
        assert read_bytes() - before < BIG, wanted
        view.close()
    view = sqlite3.connect(path)
    before = read_bytes()
    assert sqlite_find.counts(view, "ben").runs == {("waiting", "a"): 4}
    assert SQLiteQueue.reads["row"](view, rows[0].run_id, "ben") is None
    assert read_bytes() - before < BIG
    view.close()


def test_a_common_prefix_is_found_in_the_order_of_creation(
    explained: Explained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_find, "FEW", 0)
    sqlite_find.find(explained, RunFilter(prefix="0", newest_first=True))  # type: ignore[arg-type]
    assert "SEARCH arc_runs USING COVERING INDEX arc_runs_created (listed=? AND created_at>? AND created_at<?)" in [
        plan.replace("(created_at,n)<(?,?)", "created_at<?") for plan in explained.plans
    ]
    assert TABLE in explained.plans
    assert not [plan for plan in explained.plans if "SCAN arc_runs" in plan or "TEMP B-TREE" in plan]


def test_the_oldest_pending_run_is_one_read_of_an_index(explained: Explained) -> None:
    for tenant, index in ((None, "state (listed=? AND"), ("ben", "tenant (listed=? AND tenant=? AND")):
        explained.plans.clear()
        sqlite_find.oldest_of(explained, "a", tenant, sqlite_find._LISTED)  # type: ignore[arg-type]
        assert explained.plans == [f"SEARCH arc_runs USING INDEX arc_runs_{index} status=? AND agent=?)"]


def test_counts_read_indexes_alone(explained: Explained) -> None:
    sqlite_find.counts(explained)  # type: ignore[arg-type]
    plans = [plan for plan in explained.plans if plan.startswith(("SCAN", "SEARCH arc_runs USING"))]
    of_table = [plan for plan in plans if plan == TABLE]
    assert [plan.split(" (")[0] for plan in plans if plan != TABLE] == [
        "SEARCH arc_runs USING COVERING INDEX arc_runs_state",
        "SCAN arc_runs USING INDEX arc_runs_waiting",
        "SEARCH arc_runs USING COVERING INDEX arc_runs_due",
    ]
    assert len(of_table) == 3


@pytest.mark.redis
async def test_the_runs_of_an_older_release_on_redis_are_found(redis_url: str) -> None:
    redis = pytest.importorskip("redis")
    queue = get_queue("redis", url=redis_url)
    talk = UUID(int=7)
    try:
        for n, conversation in enumerate(("talk", str(talk).upper(), talk, None)):
            await queue.enqueue(f"r{n}", "a", {"conversation_id": conversation} if conversation else {})
        client = redis.Redis.from_url(redis_url.partition("?")[0])
        tag = client.keys(f"*{redis_url.rpartition('=')[2]}*:n")[0].decode().removesuffix("n")
        for key in client.keys(f"{tag}run:*"):
            cells = json.loads(client.get(key))
            client.set(key, json.dumps(cells[:37]))
        for key in ("lists", "created", "names", "state:pending:a", "by:conversation:talk", f"by:conversation:{talk}"):
            assert client.delete(f"{tag}{key}") == 1
        found = await queue.find(RunFilter(newest_first=True, prefix="r"))
        assert [(row.run_key, row.conversation, row.questions) for row in found] == [
            ("r3", None, ""), ("r2", str(talk), ""), ("r1", str(talk), ""), ("r0", "talk", ""),
        ]  # fmt: skip
        for wanted, keys in (
            (RunFilter(conversation=str(talk), newest_first=True), ["r2", "r1"]),
            (RunFilter(agent="a", newest_first=True), ["r3", "r2", "r1", "r0"]),
        ):
            assert [row.run_key for row in await queue.find(wanted)] == keys
        assert (await queue.counts()).runs == {("pending", "a"): 4}
        client.close()
    finally:
        await queue.close()
