"""`agent-runtime copy`: a store with runs in every state is moved between servers and files, and each run continues."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._engines.base import MARK, Guard, Op, moving_mark
from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.errors import InvalidArgument, NotSupported, StorageBusy, StorageCorrupt, StorageMoved
from agent_runtime_core.queue.records import RunFilter
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import moving
from agent_runtime_core.runner.moving import give_up_move, move_store
from agent_runtime_core.runner.processes import ListedProcess
from agent_runtime_core.testing import VirtualClock
from tests.support import reencryption
from tests.support.backends import backends
from tests.support.command_line import Commands
from tests.support.moving import HOUR, LONG, TOPIC, Agents, drain, dump, fill, running
from tests.support.redis_servers import RedisServer
from tests.support.runs import Script, soon

AHEAD = 100_000.0  # seconds that the clock of a new store is ahead of the clock of the old store
BOTH_WAYS = pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(
            kinds,
            id="-".join(kinds),
            marks=[getattr(pytest.mark, kind) for kind in ("redis", "postgres") if kind in kinds],
        )
        for kinds in (
            ("sqlite", "redis"),
            ("redis", "sqlite"),
            ("sqlite", "redis", "sqlite"),
            ("sqlite", "sqlite"),
            ("sqlite", "postgres"),
            ("postgres", "sqlite"),
            ("postgres", "postgres"),
            ("sqlite", "postgres", "redis", "sqlite"),
            ("redis", "postgres"),
        )
    ],
)


@pytest.fixture
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], str]:
    """Return what names a new store of a kind."""
    numbers = itertools.count()
    servers = {
        kind: request.getfixturevalue(f"{kind}_url")
        for kind in ("redis", "postgres")
        if request.node.get_closest_marker(kind)
    }

    def url(kind: str) -> str:
        if kind == "redis":
            return f"{servers[kind]}-{next(numbers)}"
        if kind == "postgres":
            return f"{servers[kind]}_{next(numbers)}"
        return str(tmp_path / f"{next(numbers)}.db")

    return url


async def continues(runner: AgentRunner, clock: VirtualClock, agents: Agents) -> None:
    """Finish every run of `fill`, and check that no saved result is computed again."""
    rows = {row.run_id: row for row in await runner.queue.find(RunFilter())}
    before, agents.calls, agents.fails = [*agents.calls], [], False
    parked = str((await runner.get_run("parked")).run_id)
    cursor = (await runner.event_bus.get_events(parked))[-1].sequence + 1
    [child] = await runner.queue.children(str((await runner.get_run("calling")).run_id))
    for name in ("parked", "long", child.run_id):
        await runner.signal(name, "go", name)
    for tenant in ("a", "b"):
        await runner.signal("parked", "go", tenant, tenant=tenant)
    for name in ("asking", "first"):
        await runner.approve(name, "pay")
    await runner.resume("failed")
    await drain(runner)
    assert [(await runner.get_run(name)).status for name in ("sleeping", "delayed")] == ["waiting", "pending"]
    clock.advance(HOUR)
    await drain(runner)
    assert [(await runner.get_run(name)).status for name in ("sleeping", "delayed")] == ["succeeded", "pending"]
    clock.advance(HOUR)
    await drain(runner)
    counts = await runner.queue.counts()
    assert {status for status, _ in counts.runs} == {"succeeded", "failed", "cancelled"}
    assert counts.runs["failed", "guarded"] == 1, "the fork whose effect another run has"
    # The run with the greater priority is first, and a blocked run follows the active run of its concurrency key.
    fast = [f"fast {name}" for name in ("queued", "behind", "crashed", "last behind", "delayed")]
    assert sorted(agents.calls) == sorted([*fast, "slept"])
    assert agents.calls.index("fast behind") < agents.calls.index("fast last behind")
    assert not {*agents.calls} & {*before}
    assert (await runner.queue.require("crashed")).crashes == 1
    for name in ("parked", "long", "calling"):
        value = (await runner.wait(name, timeout=5)).final_output["value"]
        assert value == (child.run_id if name == "calling" else name)
    events = await runner.event_bus.get_events(parked, cursor)
    assert [each.sequence for each in events] == [*range(cursor, cursor + len(events))]
    assert events[-1].event_type == "run.succeeded"
    for row in await runner.queue.find(RunFilter()):
        if row != rows[row.run_id]:
            assert row.claim_id > rows[row.run_id].claim_id
    await _keys_are_known(runner)


async def _keys_are_known(runner: AgentRunner) -> None:
    once = [await runner.submit("fast", idempotency_key="once"), (await runner.get_run("queued")).run_id]
    assert once[0] == once[1]
    tenants = [await runner.submit("signalled", run_id="parked", tenant=each) for each in ("a", "b")]
    assert len({*tenants, (await runner.get_run("parked")).run_id}) == 3
    again = await runner.fork("paid", "look")
    await drain(runner)
    failed = await runner.wait(again, timeout=5)
    assert failed.error is not None
    assert "was already done in run 'paid'" in failed.error.message
    last = max(row.arrival for row in await runner.queue.find(RunFilter()))
    await runner.submit("fast", run_id="new")
    assert (await runner.queue.require("new")).arrival > last
    assert await runner.event_bus.publish(TOPIC, "my.topic", {}) is not None
    assert [each.sequence for each in await runner.event_bus.get_events(TOPIC)] == [0, 1, 2, 3]
    await runner.persistence.memory.set("name", "new")
    assert await runner.persistence.memory.get("name") == "new"


@BOTH_WAYS
async def test_a_store_with_runs_in_every_state_is_moved_and_each_continues(
    kinds: tuple[str, ...], new_url: Callable[[str], str]
) -> None:
    agents, clock, url = Agents(), VirtualClock(), new_url(kinds[0])
    async with running(url, clock, agents) as runner:
        await fill(runner, clock)
        wanted = await dump(runner)
    for kind in kinds[1:]:
        later, target = VirtualClock(clock.wall() + AHEAD), new_url(kind)
        async with running(url, clock, agents) as old, running(target, later, agents) as new:
            move = await move_store(old, new)
            assert (move.counts["runs"], move.counts["messages"]) == (20, 4)
            assert move.counts["records"] > LONG
            assert all(move.counts.values()), move.counts
            assert await dump(new) == wanted
            assert await dump(old) == wanted, "reads of the old store stay possible"
        clock, url = later, target
    async with running(url, clock, agents) as runner:
        await continues(runner, clock, agents)


@BOTH_WAYS
async def test_contents_are_copied_as_they_are_encrypted(
    kinds: tuple[str, ...], tmp_path: Path, new_url: Callable[[str], str], request: pytest.FixtureRequest
) -> None:
    def place(kind: str) -> reencryption.Place:
        found = reencryption.Place(
            kind, tmp_path, (request.getfixturevalue(f"{kind}_server"), "") if kind != "sqlite" else None
        )
        found.url = new_url(kind)
        return found

    agents, old = reencryption.Agents(), place(kinds[0])
    async with old.runner(reencryption.OLD, *agents.scripts) as runner:
        await reencryption.fill(runner)
    for kind in kinds[1:]:
        new = place(kind)
        async with old.runner(None) as source, new.runner(None) as target:
            await move_store(source, target)
        old = new
    async with old.runner(reencryption.OLD, *agents.scripts) as runner:
        await reencryption.check(runner, agents)


# -- the mark


async def _writes(runner: AgentRunner) -> dict[str, Any]:
    """Return all kinds of writes."""
    engine: Any = runner.queue.commits
    return {
        "submit": lambda: runner.submit("fast"),
        "claim": runner.run_once,
        "signal": lambda: runner.signal("parked", "go"),
        "event": lambda: runner.event_bus.publish(TOPIC, "my.topic", {}),
        "checkpoint": lambda: runner.state_store.save_checkpoint("parked", {}),
        "document": lambda: runner.persistence.memory.set("name", "late"),
        "thread": lambda: asyncio.to_thread(engine.commit_from_thread, None, [Op("fence.install", ("x", "1"))]),
    }


@pytest.fixture(params=backends(["memory", "sqlite", "redis", "postgres"]))
def marked(request: pytest.FixtureRequest, new_url: Callable[[str], str]) -> AbstractAsyncContextManager[AgentRunner]:
    """Return a runner on an empty store."""
    agents = Agents()
    if request.param == "memory":
        return reencryption.Place("memory", Path()).runner(None, *agents.scripts)
    return running(new_url(request.param), VirtualClock(), agents)


async def test_a_store_with_the_mark_accepts_only_commits_under_the_mark(
    marked: AbstractAsyncContextManager[AgentRunner],
) -> None:
    async with marked as runner:
        engine: Any = runner.queue.commits
        await runner.submit("signalled", run_id="parked")
        await drain(runner)
        await runner.submit("fast", run_id="ready")
        mark = moving_mark("1", to="there.db", done=True)
        await engine.commit(None, [Op("fence.install", (MARK, mark))])
        for name, write in (await _writes(runner)).items():
            with pytest.raises(StorageMoved, match=r"was moved to there\.db, so it accepts no writes") as error:
                await write()
            assert error.value.to == "there.db", name
        assert (await runner.get_run("parked")).status == "waiting"
        assert await engine.fence_of(MARK) == mark
        await engine.commit(Guard(MARK, mark), [Op("fence.forget", (MARK,))])
        assert await engine.fence_of(MARK) is None
        for write in (await _writes(runner)).values():
            await write()


async def test_a_claim_that_was_made_before_the_mark_writes_nothing(
    marked: AbstractAsyncContextManager[AgentRunner],
) -> None:
    async with marked as runner:
        engine: Any = runner.queue.commits
        inside, mark = asyncio.Event(), moving_mark("1", to="there.db", done=True)

        async def held(ctx: Any) -> None:
            await ctx.step("before", lambda: 1)
            inside.set()
            await asyncio.Event().wait()

        executing = asyncio.create_task(runner.execute(Script(held, "held"), "held"))
        await inside.wait()
        [row] = await runner.queue.find(RunFilter())
        guard = Guard(row.run_id, row.claim_id)
        await engine.commit(None, [Op("fence.install", (MARK, mark))])
        with pytest.raises(StorageMoved):
            await engine.commit(guard, [Op("state.checkpoint", (row.run_id, "{}", None, 1.0))])
        await engine.commit(Guard(MARK, mark), [Op("fence.forget", (MARK,))])
        await engine.commit(guard, [Op("state.checkpoint", (row.run_id, "{}", None, 1.0))])
        executing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await executing


@pytest.mark.parametrize("to", ["there.db", None])
async def test_a_worker_ends_if_its_store_was_moved_and_waits_for_one_that_is_filled(
    marked: AbstractAsyncContextManager[AgentRunner], to: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    about = {"source": "old.db"} if to is None else {"to": to, "done": True}
    async with marked as runner:
        engine: Any = runner.queue.commits
        await runner.submit("fast", run_id="r")
        mark = moving_mark("1", **about)
        await engine.commit(None, [Op("fence.install", (MARK, mark))])
        working = asyncio.create_task(runner.run_loop())
        if to is not None:
            with pytest.raises(StorageMoved, match=r"there\.db"):
                await asyncio.wait_for(working, 10)
            return
        await soon(lambda: "claiming runs failed" in caplog.text)
        for _ in range(100):
            await asyncio.sleep(0)
        assert caplog.text.count("was not renewed") == 1, "it pauses before it tries again"
        await engine.commit(Guard(MARK, mark), [Op("fence.forget", (MARK,))])
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working


# -- what is refused


Stores = tuple[AgentRunner, AgentRunner]


@pytest.fixture
def stores(new_url: Callable[[str], str]) -> AbstractAsyncContextManager[Stores]:
    """Return a file with a parked run, and an empty server, on the same clock."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Stores]:
        agents, clock = Agents(), VirtualClock()
        async with running(new_url("sqlite"), clock, agents) as old, running(new_url("redis"), clock, agents) as new:
            await old.submit("signalled", run_id="parked")
            await drain(old)
            yield old, new

    return opened()


async def writable(runner: AgentRunner) -> bool:
    try:
        await runner.submit("fast")
    except StorageMoved:
        return False
    return True


@pytest.mark.redis
async def test_a_store_with_a_living_worker_is_refused_unless_forced(
    stores: AbstractAsyncContextManager[Stores],
) -> None:
    async with stores as (old, new):
        worker = ListedProcess(old.queue, old.config, lambda: ["fast"])
        await worker.renew()
        with pytest.raises(InvalidArgument, match=r"must be used by no worker while it is moved, got worker .* \(pid"):
            await move_store(old, new)
        assert await writable(old)
        assert await writable(new)
        await worker.leave()


@pytest.mark.redis
async def test_a_run_with_a_valid_lease_counts_as_living(stores: AbstractAsyncContextManager[Stores]) -> None:
    async with stores as (old, new):
        await old.submit("fast", run_id="owned")
        await old.queue.claim("w1", agent_keys=["fast"])
        with pytest.raises(InvalidArgument, match="got run owned of worker w1"):
            await move_store(old, new)
        move = await move_store(old, new, force=True)
        assert move.counts["runs"] == 2
        await drain(new)
        owned = await new.queue.require("owned")
        assert (owned.status, owned.crashes) == ("succeeded", 1), "its lease is not copied"


@pytest.mark.redis
async def test_a_claim_between_the_check_and_the_mark_is_found(
    stores: AbstractAsyncContextManager[Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        await old.submit("fast", run_id="owned")
        checks, check = itertools.count(), moving._refuse_living

        async def late(side: Any) -> None:
            await check(side)
            if not next(checks):
                await old.queue.claim("w1", agent_keys=["fast"])

        monkeypatch.setattr(moving, "_refuse_living", late)
        with pytest.raises(InvalidArgument, match="got run owned"):
            await move_store(old, new)
        assert await writable(old), "the mark was lifted"
        assert await writable(new)


@pytest.mark.redis
async def test_a_claim_before_an_interrupted_mark_is_found_by_the_next_call(
    stores: AbstractAsyncContextManager[Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        await old.submit("fast", run_id="owned")
        await old.queue.claim("w1", agent_keys=["fast"])
        with monkeypatch.context() as patched:
            patched.setattr(moving, "_refuse_living", _nothing)
            patched.setattr(moving, "_require_empty", _interrupted_second())
            with pytest.raises(StorageBusy):
                await move_store(old, new)
        assert not await writable(old)
        with pytest.raises(InvalidArgument, match="got run owned"):
            await move_store(old, new)
        assert await writable(old)


async def _nothing(*_: Any) -> None:
    pass


def _interrupted_second() -> Any:
    calls = itertools.count()

    async def check(side: Any) -> None:
        if next(calls):
            await _interrupted()

    return check


@pytest.mark.redis
async def test_the_target_must_be_empty(stores: AbstractAsyncContextManager[Stores]) -> None:
    async with stores as (old, new):
        await new.persistence.memory.set("name", "there")
        with pytest.raises(InvalidArgument, match="the target of a move must be an empty store, got redis"):
            await move_store(old, new)
        assert await writable(old)
        assert await writable(new)


@pytest.mark.redis
async def test_a_write_to_the_target_before_its_mark_is_found(
    stores: AbstractAsyncContextManager[Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        checks, check = itertools.count(), moving._require_empty

        async def late(side: Any) -> None:
            await check(side)
            if next(checks) == 1:
                await new.submit("fast")

        monkeypatch.setattr(moving, "_require_empty", late)
        with pytest.raises(InvalidArgument, match="must be an empty store"):
            await move_store(old, new)
        assert await writable(new), "the mark was lifted"
        assert not await writable(old)
        await give_up_move(old)
        assert await writable(old)


@pytest.mark.redis
async def test_a_moved_store_is_moved_nowhere_else_and_again_only_to_its_target(
    stores: AbstractAsyncContextManager[Stores], new_url: Callable[[str], str]
) -> None:
    async with stores as (old, new):
        await move_store(old, new)
        assert await writable(new)
        assert (await move_store(old, new)).counts == {}, "it was finished before"
        assert await writable(new)
        async with running(new_url("sqlite"), VirtualClock(), Agents()) as third:
            with pytest.raises(StorageMoved, match="was moved to redis://"):
                await move_store(old, third)
            with pytest.raises(
                InvalidArgument, match=r"must be one that was not finished, got a finished move to redis"
            ):
                await give_up_move(old)
            with pytest.raises(InvalidArgument, match=r"must be one that was not finished, got none"):
                await give_up_move(third)
            assert (await move_store(new, third)).counts["runs"] == 3
            assert not await writable(new)
            assert await writable(third)


@pytest.mark.redis
async def test_a_move_is_given_up(
    stores: AbstractAsyncContextManager[Stores], new_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        with monkeypatch.context() as patched:
            patched.setattr(moving._Copy, "copy", _interrupted)
            with pytest.raises(StorageBusy):
                await move_store(old, new)
        assert not await writable(old)
        with pytest.raises(StorageMoved, match="must be complete before it is used, got a copy of"):
            await new.submit("fast")
        await give_up_move(old)
        assert await writable(old)
        with pytest.raises(StorageMoved, match="must be complete"):
            await move_store(old, new)
        assert await writable(old)
        async with running(new_url("sqlite"), VirtualClock(), Agents()) as third:
            with pytest.raises(StorageMoved, match="must be complete"):
                await move_store(new, third)
            await move_store(old, third)


async def _interrupted(*_: Any) -> None:
    raise StorageBusy("the server does not reply")


@pytest.mark.redis
async def test_a_move_that_is_given_up_by_another_process_ends(
    stores: AbstractAsyncContextManager[Stores], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        copy = moving._Copy.copy

        async def given_up(self: Any, move: Any) -> None:
            await copy(self, move)
            await give_up_move(old)

        monkeypatch.setattr(moving._Copy, "copy", given_up)
        with pytest.raises(InvalidArgument, match="a move that another process gave up"):
            await move_store(old, new)
        assert await writable(old)
        assert not await writable(new)


@pytest.mark.redis
@pytest.mark.parametrize("name", ["queue.copy", "journal.copy", "events.copy", "documents.copy"])
async def test_what_is_missing_in_the_new_store_is_found(
    stores: AbstractAsyncContextManager[Stores], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stores as (old, new):
        await old.persistence.memory.set("name", "value")
        commit = moving._Copy._commit

        async def without(self: Any, operations: Any) -> None:
            await commit(self, [op for op in operations if op.name != name])

        monkeypatch.setattr(moving._Copy, "_commit", without)
        with pytest.raises(StorageCorrupt, match="does not contain the same"):
            await move_store(old, new)
        assert not await writable(new)
        monkeypatch.undo()
        assert (await move_store(old, new)).counts["records"] > 0


async def test_stores_in_memory_are_not_moved(tmp_path: Path) -> None:
    async with AgentRunner.open("memory://") as memory, AgentRunner.open(tmp_path / "a.db") as file:
        with pytest.raises(
            NotSupported,
            match="source must be one SQLite file, one Redis server or one PostgreSQL database, got InMemoryQueue",
        ):
            await move_store(memory, file)
        with pytest.raises(NotSupported, match="target must be one SQLite file"):
            await move_store(file, memory)
        with pytest.raises(InvalidArgument, match="target must be another store than the source"):
            await move_store(file, file)
        without = AgentRunner(*file.backends, persistence=None)
        with pytest.raises(NotSupported, match="source must be a runner with the documents of its store, got none"):
            await move_store(without, file)
    assert MemoryEngine().tables == {"fence": {}}


# -- interrupted at each commit


@BOTH_WAYS
@pytest.mark.parametrize("applied", [False, True])
async def test_a_move_is_interrupted_at_each_commit_and_repeated(
    kinds: tuple[str, ...], applied: bool, new_url: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt it at the first commit, then at the second, and so on, before the commit or before its reply."""
    monkeypatch.setattr(moving, "_MOST_ITEMS", 100)
    agents, clock, url = Agents(), VirtualClock(), new_url(kinds[0])
    async with running(url, clock, agents) as runner:
        await fill(runner, clock)
        wanted = await dump(runner)
    commit, calls, last = moving._Side.commit, itertools.count(), -1

    async def failing(self: Any, *args: Any) -> Any:
        nonlocal last
        if (number := next(calls)) != limit:
            return await commit(self, *args)
        last = number
        if applied:
            await commit(self, *args)
        raise StorageBusy("no reply")

    monkeypatch.setattr(moving._Side, "commit", failing)
    target = new_url(kinds[1])
    async with running(url, clock, agents) as old, running(target, clock, agents) as new:
        for limit in itertools.count():
            calls = itertools.count()
            try:
                await move_store(old, new)
            except StorageBusy:
                continue
            if last < limit:
                break
        assert limit > 3
        monkeypatch.undo()
        assert await dump(new) == wanted
        assert not await writable(old)
        assert await writable(new)


# -- the command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)


@pytest.mark.redis
def test_the_command_moves_a_store_and_prints_counts(
    run: Commands, tmp_path: Path, redis_server: RedisServer, redis_url: str
) -> None:
    path = str(tmp_path / "agents.db")

    async def submitted() -> None:
        async with AgentRunner.open(path, registry=Registry()) as runner:
            await runner.submit("nobody", {"text": "hello"}, run_id="r-1")
            await runner.send("r-1", "Hurry!")

    asyncio.run(submitted())
    code, out, err = run("copy", path, redis_url)
    assert (code, err) == (0, "")
    shown = redis_url.replace("redis://", "")
    assert out.replace(shown, "SERVER") == (
        f"moved {path} to redis://SERVER\nruns: 1\nmessages: 1\nrecords: 0\nevents: 0\ncheckpoints: 0\neffects: 0\n"
        "documents: 0\n"
    )
    assert run("copy", path, redis_url)[1] == f"{path} was moved before\n"
    code, _, err = run("submit", "nobody", "--url", path)
    assert code == 2
    assert err.startswith(f"agent-runtime: {path} was moved to redis://")
    assert "r-1" in run("runs", "--url", path)[1]
    assert "r-1" in run("runs", "--url", redis_url)[1]
    code, _, err = run("copy", path, "--undo")
    assert code == 2
    assert "got a finished move to redis://" in err
    assert run("copy", path)[0] == run("copy", path, redis_url, "--undo")[0] == 2
    back = json.loads(run("copy", redis_url, str(tmp_path / "back.db"), "--json")[1])
    assert back["counts"]["runs"] == 1
    assert len(back["digests"]["runs"]) == 64


def test_the_command_gives_up_a_move(run: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, target = str(tmp_path / "agents.db"), str(tmp_path / "new.db")
    assert run("submit", "nobody", "--url", path)[0] == 0
    with monkeypatch.context() as patched:
        patched.setattr(moving._Copy, "copy", _interrupted)
        assert run("copy", path, target)[0] == 2
    assert "--undo" in run("submit", "nobody", "--url", path)[2]
    assert run("copy", path, "--undo") == (0, f"{path} accepts writes again. Delete what was copied from it\n", "")
    assert run("submit", "nobody", "--url", path)[0] == 0
    assert "must be complete" in run("submit", "nobody", "--url", target)[2]
    assert run("copy", str(tmp_path / "missing.db"), target)[0] == 2
