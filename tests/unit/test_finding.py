"""Runs are found by their contents as a plain model says, on each store, within bounds that the answer names."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core._engines.base import Op
from agent_runtime_core._journal.record import ATTEMPT, DONE, ENDED, Record
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.queue.contents import MOST_TAGS, TAGS, ContentFilter
from agent_runtime_core.queue.records import CODE_VERSION, LIVE, RunFilter, RunRow
from agent_runtime_core.runner import AgentRunner, finding
from agent_runtime_core.runner.finding import SORTS, Finder
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import VirtualClock
from tests.support.codec import RepeatableCodec
from tests.support.runs import Rig

WORDS = ["reset", "Reset by peer", "r\u00e9set", "\u00c9t\u00e9", 'say "reset"', "a\nb", "", "7", "re"]
VALUES = st.sampled_from([*WORDS, 7, 70, True, None, {"deep": ["reset"]}, [1, "x"]])
ERRORS = st.none() | st.builds(
    lambda kind, words: {"type": kind, "message": words},
    st.sampled_from(["ConnectionError", "reset"]),
    st.sampled_from(WORDS),
)


@st.composite
def stored_runs(draw: st.DrawFn) -> list[tuple[RunRow, list[Record], str | None]]:
    """Rows, their journals, and the version that `resume` named."""
    found = []
    for n in range(draw(st.integers(0, 12))):
        status, at = draw(st.sampled_from([each.value for each in RunStatus])), draw(st.sampled_from([1.0, 2.0, 3.0]))
        live = status in LIVE
        tags = draw(st.lists(st.sampled_from(["x", "y", "reset"]), max_size=2, unique=True))
        metadata = {key: draw(VALUES) for key in draw(st.sets(st.sampled_from("kl")))} | ({TAGS: tags} if tags else {})
        error, version = draw(ERRORS), draw(st.none() | st.sampled_from(["v1", "v2"]))
        row = RunRow(
            str(UUID(int=n + 1)),
            draw(st.sampled_from("ab")),
            json.dumps({"v": draw(VALUES)}),
            metadata=json.dumps(metadata),
            created_at=at,
            updated_at=at,
            status=status,
            arrival=0,
            origin="inline",
            run_key=draw(st.none() | st.sampled_from(["reset-1", "job"])),
            tenant=f"t{n}",
            failures=draw(st.integers(0, 2)),
            crashes=draw(st.integers(0, 1)),
            started_at=draw(st.none() | st.just(at)),
            ended_at=None if live else at + draw(st.integers(0, 3)),
            error=json.dumps(error) if error else None,
            mail_seq=0,
        )
        began = json.dumps({"code_version": version}) if version else None
        records = [Record(0, ATTEMPT, row.agent, attempt=1, info=began)]
        if draw(st.booleans()):
            records.append(Record(1, DONE, "model", "k:1", result=json.dumps({"message": draw(VALUES)})))
        if not live and draw(st.booleans()):
            usage = draw(st.sampled_from([{}, {"cost_usd": 0.0}, {"cost_usd": 0.5}, {"cost_usd": 2.0}]))
            result = {"final_output": {"out": draw(VALUES)}, "usage": usage, "error": draw(ERRORS)}
            records.append(Record(len(records), ENDED, status, attempt=1, result=json.dumps(result)))
        found.append((row, records, draw(st.none() | st.sampled_from(["v2", "v3"]))))
    return found


@st.composite
def filters(draw: st.DrawFn) -> RunFilter:
    fields: dict[str, Any] = {
        "metadata": (("k", draw(st.sampled_from([*WORDS, "70", "true", '{"deep":["reset"]}']))),),
        "tag": draw(st.sampled_from(["x", "reset", "z"])),
        "error_type": draw(st.sampled_from(["ConnectionError", "reset", "Other"])),
        "code_version": draw(st.sampled_from(["v1", "v2", "v3", "v9"])),
        "search": draw(st.sampled_from(["RESET", "r\u00c9set", "\u00e9t\u00e9", 'say "reset"', "a\nb", "7", "deep"])),
    }
    kept = draw(st.lists(st.sampled_from([*fields]), max_size=2))
    return RunFilter(
        agent=draw(st.none() | st.just("a")),
        since=0.5,
        newest_first=draw(st.booleans()),
        min_attempts=draw(st.sampled_from([1, 1, 2, 3])),
        contents=ContentFilter(**{name: value for name, value in fields.items() if name in kept}),
    )


def values_in(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        for each in tree.values():
            yield from values_in(each)
    elif isinstance(tree, list):
        for each in tree:
            yield from values_in(each)
    elif tree is not None:
        yield tree if isinstance(tree, str) else json.dumps(tree)


def is_wanted(row: RunRow, records: list[Record], version: str | None, wanted: RunFilter) -> bool:
    """What `Finder` decides, on values that are all decoded."""
    contents, metadata = wanted.contents, json.loads(row.metadata)
    ended = next((json.loads(each.result or "") for each in records if each.kind == ENDED), None)
    error = json.loads(row.error or "null") if ended is None else ended["error"]
    began = json.loads(records[0].info or "{}").get("code_version")
    texts = [row.run_id, row.run_key or ""]
    for tree in (json.loads(row.input), metadata, json.loads(row.error or "null"), error):
        texts += values_in(tree)
    for each in records:
        texts += values_in(json.loads(each.result or "null"))
    texts += values_in(version)
    return (
        (wanted.agent is None or row.agent == wanted.agent)
        and row.attempt >= wanted.min_attempts
        and all(
            key in metadata and (metadata[key] == text or json.dumps(metadata[key]).replace(" ", "") == text)
            for key, text in contents.metadata
        )
        and (contents.tag is None or contents.tag in metadata.get(TAGS, ()))
        and (contents.error_type is None or (error or {}).get("type") == contents.error_type)
        and (contents.code_version is None or (version or began) == contents.code_version)
        and (contents.search is None or any(contents.search.lower() in text.lower() for text in texts))
    )


async def agree(runner: AgentRunner, stored: Any, wanted: list[RunFilter]) -> None:
    async with runner:
        queue, state = runner.queue, runner.state_store
        for row, records, version in stored:
            await queue.commits.commit(None, [Op("queue.insert", (row,))])
            if version is not None and row.status in LIVE:
                await queue.commits.commit(None, [queue.post_op(row.run_id, CODE_VERSION, "", json.dumps(version))])
            for each in records:
                await state.commits.commit(None, [Op("journal.append", (row.run_id, each))])
        every = [
            (found, records, version if row.status in LIVE else None)
            for row, records, version in stored
            if (found := await queue.row(row.run_id)) is not None
        ]
        for each in wanted:
            expected = [row for row, records, version in every if is_wanted(row, records, version, each)]
            expected.sort(key=lambda row: (row.created_at, row.arrival) if each.newest_first else (0, row.arrival))
            if each.newest_first:
                expected.reverse()
            for limit in (1, 5, 1000):
                rows, after = list[RunRow](), None
                while True:
                    page = await Finder(queue, state, each).find(limit, after)
                    assert len(page.rows) <= limit
                    rows += page.rows
                    if (after := page.position) is None:
                        break
                assert [row.run_id for row in rows] == [row.run_id for row in expected], each
                assert rows == expected


MODEL = given(stored_runs(), st.lists(filters(), min_size=4, max_size=8))
CHECKS = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
_NUMBERS = itertools.count()


@pytest.fixture(params=["few", "many"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "many", a handful of runs takes several pages and requests."""
    if request.param == "many":
        for name, value in (("_PAGE", 2), ("_LARGE_PAGE", 2), ("_TOGETHER", 2), ("MOST_ROWS", 5)):
            monkeypatch.setattr(finding, name, value)


@pytest.mark.usefixtures("sizes")
@MODEL
@CHECKS
def test_memory(stored: Any, wanted: list[RunFilter]) -> None:
    asyncio.run(agree(AgentRunner.open("memory://"), stored, wanted))


@pytest.mark.usefixtures("sizes")
@MODEL
@CHECKS
def test_sqlite(stored: Any, wanted: list[RunFilter]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(agree(AgentRunner.open(f"{directory}/runs.db", durability="normal"), stored, wanted))


@MODEL
@CHECKS
def test_sqlite_with_a_codec(stored: Any, wanted: list[RunFilter]) -> None:
    configure(payload_codec=RepeatableCodec())
    try:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(agree(AgentRunner.open(f"{directory}/runs.db", durability="normal"), stored, wanted))
    finally:
        reset_config()


@pytest.mark.redis
@pytest.mark.usefixtures("sizes")
@MODEL
@CHECKS
def test_redis(redis_url: str, stored: Any, wanted: list[RunFilter]) -> None:
    pytest.importorskip("redis")
    asyncio.run(agree(AgentRunner.open(f"{redis_url}-{next(_NUMBERS)}"), stored, wanted))


@pytest.mark.postgres
@MODEL
@settings(CHECKS, max_examples=8)
def test_postgres(postgres_url: str, stored: Any, wanted: list[RunFilter]) -> None:
    pytest.importorskip("psycopg")
    asyncio.run(agree(AgentRunner.open(f"{postgres_url}_{next(_NUMBERS)}"), stored, wanted))


# -- orders


def sorted_by(row: RunRow, records: list[Record], now: float, sort: str) -> float:
    if sort == "attempts":
        return row.attempt
    if sort == "age":
        return now - row.created_at
    if sort == "duration":
        until = now if row.status in LIVE else row.ended_at
        return -1 if row.started_at is None else (until or 0) - row.started_at
    ended: Any = next((json.loads(each.result or "") for each in records if each.kind == ENDED), {"usage": {}})
    return -1 if row.status in LIVE else float(ended["usage"].get("cost_usd", -1))


@given(stored_runs(), st.sampled_from(SORTS), st.sampled_from([1, 3, 1000]))
@CHECKS
def test_the_greatest_values_come_first_page_by_page(stored: Any, sort: str, limit: int) -> None:
    async def main() -> None:
        clock = VirtualClock()
        runner = AgentRunner(queue=InMemoryQueue(clock=clock))
        clock.set_wall(100.0)
        async with runner:
            await agree_on_order(runner)

    async def agree_on_order(runner: AgentRunner) -> None:
        for row, records, _ in stored:
            await runner.queue.commits.commit(None, [Op("queue.insert", (row,))])
            for each in records:
                await runner.state_store.commits.commit(None, [Op("journal.append", (row.run_id, each))])
        keys = []
        for row, records, _ in stored:
            found = await runner.queue.row(row.run_id)
            assert found is not None
            keys.append((sorted_by(found, records, runner.queue.clock.wall(), sort), found.arrival, found.run_id))
        shown, after = list[str](), None
        while True:
            wanted = RunFilter(since=0.5, newest_first=True, light=True)
            page = await Finder(runner.queue, runner.state_store, wanted, sort).find(limit, after)
            shown += [row.run_id for row in page.rows]
            if (after := page.position) is None:
                break
        assert shown == [run_id for *_, run_id in sorted(keys, reverse=True)]

    asyncio.run(main())


# -- bounds, and what the answer says of them


async def test_a_search_reads_the_last_day_and_says_so() -> None:
    clock = VirtualClock()
    async with Rig(clock=clock) as rig:
        await rig.runner.submit("a", {"text": "needle"}, run_id="old")
        clock.set_wall(clock.wall() + 86_500)
        await rig.runner.submit("a", {"text": "needle"}, run_id="new")
        found = await rig.runner.runs(search="needle")
        assert [run.run_key for run in found] == ["new"]
        assert found.note.startswith("Only runs since ")
        found = await rig.runner.runs(search="needle", since=1)
        assert ([run.run_key for run in found], found.note) == (["old", "new"], "")
        found = await rig.runner.runs(sort="age", until=clock.wall() - 86_400)
        assert [run.run_key for run in found] == ["old"], "the day ends at `until`"


async def test_no_more_rows_are_read_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MOST_ROWS", 4)
    monkeypatch.setattr(finding, "_PAGE", 2)
    async with Rig() as rig:
        for n in range(6):
            await rig.runner.submit("a", run_id=f"r{n}", tags=["t"] if n in (1, 5) else [])
        found = await rig.runner.runs(tag="t", newest_first=True)
        assert [run.run_key for run in found] == ["r5"]
        assert found.note.startswith("4 runs were read back to ")
        assert (await rig.runner.runs(tag="t", newest_first=True, limit=1)).note == "", "the page is full"
        monkeypatch.setattr(finding, "MOST_ROWS", 6)
        found = await rig.runner.runs(tag="t", newest_first=True)
        assert [run.run_key for run in found] == ["r5", "r1"]


async def test_no_more_contents_are_read_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_TOGETHER", 1)
    async with Rig() as rig:
        for n in range(4):
            await rig.runner.submit("a", {"text": "x" * 1000}, run_id=f"r{n}")
        monkeypatch.setattr(finding, "MOST_CHARACTERS", 1500)
        wanted = RunFilter(newest_first=True, contents=ContentFilter(search="needle"))
        page = await Finder(rig.runner.queue, rig.runner.state_store, wanted).find(9)
        assert (page.read, page.rows) == (2, [])
        assert "Many contents were read back to" in page.note
        assert (await Finder(rig.runner.queue, rig.runner.state_store, wanted).find(9, page.position)).read == 2


async def test_a_queue_rejects_conditions_that_no_store_decides() -> None:
    async with Rig() as rig:
        for wanted in (RunFilter(min_attempts=2), RunFilter(contents=ContentFilter(tag="x"))):
            with pytest.raises(InvalidArgument, match="Use runner"):
                await rig.runner.queue.find(wanted)


# -- tags


async def test_tags_are_shown_found_and_inherited_by_forks() -> None:
    async with Rig() as rig:
        run_id = await rig.runner.submit("a", metadata={"k": 1}, tags=["x", "y", "x"])
        run = await rig.runner.get_run(run_id)
        assert (run.tags, run.metadata) == (("x", "y"), {"k": 1})
        fork = await rig.runner.get_run(await rig.runner.fork(run_id))
        assert fork.tags == ("x", "y")
        assert {each.run_id for each in await rig.runner.runs(tag="y")} == {run_id, fork.run_id}
        assert [each.run_id for each in await rig.runner.runs(tag="Y")] == []


async def test_an_agent_does_not_see_the_key_of_the_tags() -> None:
    async def metadata(ctx: Any) -> Any:
        return ctx.metadata

    async with Rig() as rig:
        rig.register(metadata, "agent")
        await rig.runner.submit("agent", metadata={"k": 1}, run_id="r", tags=["x"])
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": {"k": 1}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": "x"}, "tags must be a list of strings"),
        ({"tags": [""]}, "tag must be a string of 1 to 128 characters"),
        ({"tags": ["x" * 129]}, "tag must be a string of 1 to 128 characters"),
        ({"tags": [1]}, "tag must be a string"),
        ({"tags": ["a\nb"]}, "tag must not contain control characters"),
        ({"tags": map(str, range(MOST_TAGS + 1))}, "tags must have at most 32 tags"),
        ({"metadata": {TAGS: ["x"]}}, "metadata must not contain the key 'agent-runtime.tags'"),
    ],
)
async def test_invalid_tags_are_rejected(options: Any, message: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=message):
            await rig.runner.submit("a", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"search": " "}, "search must be a string"),
        ({"sort": "name"}, "unknown sort 'name'"),
        ({"metadata": {1: 2}}, "a key of metadata must be a string"),
        ({"tag": ""}, "tag must be a string"),
        ({"min_attempts": "x"}, "min_attempts must be"),
    ],
)
async def test_invalid_filters_are_rejected(options: Any, message: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=message):
            await rig.runner.runs(**options)
