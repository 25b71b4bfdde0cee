"""Rows of effects are kept while a run of their lineage, or of the lineage of a caller, is stored; and not longer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.errors import AgentRuntimeError, InvalidArgument, UnknownEncryptionKey, UnknownRun
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, reencrypt
from agent_runtime_core.runner.retention import forget
from agent_runtime_core.state import SQLiteStateStore
from agent_runtime_core.state.base import StateStore
from tests.support.reencryption import BOTH, MOSTLY_SQLITE, NEW, OLD, ON_EVERY_ENGINE, Place, place_of
from tests.support.runs import Script


@pytest.fixture(params=MOSTLY_SQLITE)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


class Firm:
    """A desk that calls a manager that calls a payer. Each of them pays once for an order."""

    def __init__(self) -> None:
        self.paid: Counter[tuple[str, str]] = Counter()
        self.failing = set[str]()  # agents that fail after they paid
        self.lazy = set[str]()  # agents that do not pay
        self.waiting = set[str]()  # agents that wait for a signal after they paid
        self.scripts = [Script(self.desk, "desk"), Script(self.manager, "manager"), Script(self.payer, "payer")]

    async def _pay(self, ctx: Any, who: str) -> None:
        order = ctx.input["order"]

        async def pay() -> str:
            self.paid[order, who] += 1
            return f"{who} has paid"

        if who not in self.lazy:
            await ctx.step("pay", pay, on_in_doubt="fail")
        if who in self.failing:
            raise ConnectionError("after the payment")
        if who in self.waiting:
            await ctx.wait_for_signal("close")

    async def desk(self, ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        await ctx.call("manager", {"order": ctx.input["order"]})
        await self._pay(ctx, "desk")
        return "done"

    async def manager(self, ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        await ctx.call("payer", {"order": ctx.input["order"]})
        await self._pay(ctx, "manager")
        return "done"

    async def payer(self, ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        await self._pay(ctx, "payer")
        return "done"

    def check(self) -> None:
        assert all(times == 1 for times in self.paid.values()), self.paid


async def work(runner: AgentRunner) -> None:
    while await runner.run_once():
        pass


async def submitted(runner: AgentRunner, run_id: str = "r") -> None:
    await runner.submit("desk", {"order": run_id}, run_id=run_id)
    await work(runner)


async def run_of(runner: AgentRunner, agent: str, parent: Any = None) -> Any:
    """Return the id of the only run of an agent, or of a child of that run."""
    runs = [each for each in await runner.runs(limit=100) if each.agent_key == agent]
    [run] = [each.run_id for each in runs if parent in (None, each.parent_run_id)]
    return run


async def forked(runner: AgentRunner, source: Any = "r", **how: Any) -> RunResult:
    new = await runner.fork(source, "first", **how)
    await work(runner)
    return await runner.wait(new, timeout=0)


async def discard_all(runner: AgentRunner, place: Place) -> None:
    for run in await runner.runs(limit=1000):
        with contextlib.suppress(AgentRuntimeError):
            await runner.cancel(run.run_id, wait=False)
    await work(runner)
    for run in await runner.runs(limit=1000):
        await runner.discard(run.run_id)
    assert place.effects() == 0


@asynccontextmanager
async def firm_of(place: Place, firm: Firm, codec: Any = None) -> AsyncIterator[AgentRunner]:
    async with place.runner(codec, *firm.scripts) as runner:
        yield runner
        await discard_all(runner, place)


def refused(result: RunResult) -> bool:
    return result.error is not None and "EffectAlreadyDone" in f"{result.error.type} {result.error.message}"


@pytest.mark.parametrize("codec", [None, OLD], ids=["plain", "codec"])
async def test_a_fork_refuses_what_a_deleted_child_did(codec: Any, place: Place) -> None:
    firm = Firm()
    firm.waiting.add("desk")
    async with firm_of(place, firm, codec) as runner:
        await submitted(runner)
        assert await runner.vacuum({"succeeded": 0}) == 2, "the manager and the payer"
        assert refused(await forked(runner))
        fork = await runner.fork("r", "first", new_run_id="fork")
        await work(runner)
        assert refused(await forked(runner, fork)), "a fork of a fork"
        firm.waiting.clear()
        assert (await forked(runner, effects="reuse")).error is None
        firm.check()


@ON_EVERY_ENGINE
async def test_rows_of_children_go_with_the_last_run_of_the_tree(place: Place) -> None:
    firm = Firm()
    async with firm_of(place, firm) as runner:
        await submitted(runner)
        assert (await forked(runner, new_run_id="fork")).error is not None
        stored = place.effects()
        manager = await run_of(runner, "manager", (await runner.get_run("r")).run_id)
        payer = await run_of(runner, "payer", manager)
        for run in (payer, manager, "r"):
            await runner.discard(run)
            assert refused(await forked(runner, "fork")), "the fork is stored"
        assert 0 < place.effects() < 3 * stored
        firm.check()


async def test_the_parent_is_deleted_first_and_the_child_later(place: Place) -> None:
    firm = Firm()
    async with firm_of(place, firm) as runner:
        await submitted(runner)
        manager = await run_of(runner, "manager")
        payer = await run_of(runner, "payer")
        await runner.discard("r")
        assert refused(await forked(runner, manager))
        await runner.discard(manager)
        assert refused(await forked(runner, payer))
        firm.check()


async def test_a_child_that_is_called_again_after_its_deletion_pays_no_second_time(place: Place) -> None:
    """A cancelled child sends its caller no result, so a resumed caller calls it again."""
    firm = Firm()
    firm.waiting.add("payer")
    async with firm_of(place, firm) as runner:
        await submitted(runner)
        payer = await run_of(runner, "payer")
        assert firm.paid["r", "payer"] == 1
        await runner.cancel("r")
        await work(runner)
        await runner.discard(payer)
        firm.waiting.clear()
        await runner.resume("r")
        await work(runner)
        again = await runner.wait(payer, timeout=0)
        assert refused(again)
        assert again.error is not None
        assert "which was deleted" in again.error.message
        firm.check()


async def test_a_run_with_the_id_of_a_deleted_one_pays_no_second_time_while_a_fork_is_stored(place: Place) -> None:
    paid: list[str] = []

    async def body(ctx: Any) -> None:
        await ctx.step("first", lambda: 1)
        await ctx.step("pay", paid.append, "r", on_in_doubt="fail")

    async with place.runner(None, Script(body, "desk")) as runner:
        await submitted(runner)
        assert refused(await forked(runner, new_run_id="fork"))
        await runner.discard("r")
        await submitted(runner)
        assert refused(await runner.wait("r", timeout=0))
        for run in ("fork", "r"):
            await runner.discard(run)
        assert place.effects() == 0
        await submitted(runner)
        assert (await runner.wait("r", timeout=0)).error is None, "the deleted runs are forgotten"


async def pays_late(runner: AgentRunner, firm: Firm, payer: Any) -> None:
    """Let a payer that had failed pay, and delete it."""
    firm.lazy.clear()
    firm.failing.clear()
    await runner.resume(payer)
    await work(runner)
    assert firm.paid["r", "payer"] == 1
    await runner.discard(payer)


@pytest.mark.parametrize("codec", [None, OLD], ids=["plain", "codec"])
async def test_a_child_that_is_kept_longer_than_its_caller_stays_in_the_lineage(codec: Any, place: Place) -> None:
    """The payer has not paid yet when its callers, by whose journals its lineage is found, are deleted."""
    firm = Firm()
    firm.failing.add("payer")
    firm.lazy |= {"payer", "manager", "desk"}
    async with firm_of(place, firm, codec) as runner:
        await submitted(runner)
        fork = await runner.fork("r", "first", new_run_id="fork")
        await work(runner)
        manager = await run_of(runner, "manager", fork)
        late = await run_of(runner, "payer", manager)
        for run in (manager, "fork"):
            await runner.discard(run)
        await pays_late(runner, firm, late)
        assert refused(await forked(runner))
        firm.check()


async def test_a_child_that_joins_after_its_caller_was_deleted_is_kept_for_forks_of_it(place: Place) -> None:
    firm = Firm()
    firm.lazy |= {"payer", "manager", "desk"}
    firm.failing.add("payer")
    async with firm_of(place, firm) as runner:
        await submitted(runner)
        await runner.fork("r", "first", new_run_id="fork")
        source = (await runner.get_run("r")).run_id
        manager = await run_of(runner, "manager", source)
        payer = await run_of(runner, "payer", manager)
        await runner.discard("r")
        await runner.discard(manager)
        await pays_late(runner, firm, payer)
        assert refused(await forked(runner, "fork"))
        firm.check()


@ON_EVERY_ENGINE
async def test_a_live_child_is_not_deleted(place: Place) -> None:
    firm = Firm()
    async with firm_of(place, firm) as runner:
        await runner.submit("desk", {"order": "r"}, run_id="r")
        await runner.run_once()
        manager = await run_of(runner, "manager")
        with pytest.raises(AgentRuntimeError, match="cannot delete"):
            await runner.discard(manager)
        await work(runner)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_caller_that_is_deleted_while_its_child_joins_leaves_no_row(
    when: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    firm = Firm()
    firm.lazy |= {"payer", "manager", "desk"}
    firm.failing.add("payer")
    async with firm_of(place, firm) as runner:
        await submitted(runner)
        firm.lazy.clear()
        firm.failing.clear()
        payer, commits = await run_of(runner, "payer"), runner.state_store.commits
        commit = commits.commit
        manager = await runner.queue.require(str(await run_of(runner, "manager")))

        async def deleting(guard: Any, ops: Any) -> Any:
            joins = guard is None and ops[0].name == "effect.put"
            if joins and when == "before":
                monkeypatch.setattr(commits, "commit", commit)
                await forget(runner.backends, manager)
            results = await commit(guard, ops)
            if joins and when == "after":
                monkeypatch.setattr(commits, "commit", commit)
                await forget(runner.backends, manager)
            return results

        monkeypatch.setattr(commits, "commit", deleting)
        await runner.resume(payer)
        await work(runner)
        monkeypatch.setattr(commits, "commit", commit)
        assert (await runner.wait(payer, timeout=0)).error is None
        assert await runner.queue.row(manager.run_id) is None
        await runner.discard("r")
        await runner.discard(payer)
        assert place.effects() == 0


async def test_runs_without_guarded_steps_store_and_read_no_rows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    firm, asked = Firm(), list[Any]()
    firm.lazy |= {"desk", "manager", "payer"}

    async def noted(self: StateStore, *args: Any) -> Any:
        asked.append(args)
        return []

    async with place.runner(None, *firm.scripts) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(StateStore, "effects", noted)
            await submitted(runner)
        assert (await runner.wait("r")).error is None
        assert asked == []
        assert place.effects() == 0


@ON_EVERY_ENGINE
async def test_rows_of_deleted_children_are_encrypted_again(place: Place) -> None:
    """No stored run is in their lineage. It is found from the lineage of the caller."""
    firm = Firm()
    firm.waiting.add("desk")
    async with place.runner(OLD, *firm.scripts) as runner:
        await submitted(runner)
        assert await runner.vacuum({"succeeded": 0}) == 2
    async with place.runner(BOTH) as runner:
        assert (await reencrypt(runner)).unreadable == {}
        assert (await reencrypt(runner)).texts == 0
    assert "arc1.old." not in place.stored()
    async with place.runner(NEW, *firm.scripts) as runner:
        firm.waiting.clear()
        assert (await forked(runner, effects="reuse")).error is None
        firm.check()
        await discard_all(runner, place)


@pytest.mark.parametrize("codec", [None, OLD], ids=["plain", "codec"])
async def test_a_process_without_the_codec_deletes_whole_trees(codec: Any, place: Place) -> None:
    firm = Firm()
    async with place.runner(codec, *firm.scripts) as runner:
        await submitted(runner)
        await runner.fork("r", "first", new_run_id="fork")
        await runner.fork("fork", "first")
        await work(runner)
        assert place.effects() > 0
    async with place.runner(None) as runner:
        assert await runner.vacuum({"succeeded": 0, "failed": 0}) == 9
    assert place.effects() == 0


async def test_without_the_codec_a_caller_is_deleted_after_children_without_a_recorded_lineage(place: Place) -> None:
    """Their lineage is found by the journal of the caller, which this process cannot read."""
    firm = Firm()
    firm.lazy |= {"payer", "manager", "desk"}
    async with place.runner(OLD, *firm.scripts) as runner:
        await submitted(runner)
        await runner.fork("r", "first", new_run_id="fork")
        await work(runner)
    async with place.runner(None) as runner:
        with pytest.raises(UnknownEncryptionKey):
            await runner.discard("fork")
        deleted = [await runner.vacuum({"succeeded": 0}) for _ in range(4)]
        assert deleted == [3, 2, 1, 0]
    assert place.effects() == 0


@asynccontextmanager
async def on_three_engines(folder: Path, *scripts: Script) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    for script in scripts:
        registry.register(script)
    engines = [SQLiteEngine.open(folder / f"{name}.db") for name in ("queue", "events", "state")]
    queue, bus = SQLiteQueue(engine=engines[0]), SQLiteEventBus(engine=engines[1])
    config = RunnerConfig(park_after=0, max_retries=1)
    async with AgentRunner(queue, bus, SQLiteStateStore(engine=engines[2]), config, registry=registry) as runner:
        yield runner
        for run in await runner.runs(limit=100):
            await runner.discard(run.run_id)
        view: Any = runner.state_store.commits
        assert await view.read(lambda conn: conn.execute("SELECT count(*) FROM arc_effects").fetchone()) == (0,)
    for engine in engines:
        await engine.close()


async def test_trees_on_three_engines_leave_no_row(tmp_path: Path) -> None:
    firm = Firm()
    async with on_three_engines(tmp_path, *firm.scripts) as runner:
        await submitted(runner)
        manager = await run_of(runner, "manager")
        await runner.discard(await run_of(runner, "payer"))
        assert refused(await forked(runner, new_run_id="fork"))
        assert refused(await forked(runner, manager))
        await runner.discard("r")
        assert refused(await forked(runner, "fork"))
    firm.check()


async def test_a_caller_that_is_half_deleted_while_its_child_joins_leaves_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several engines, its row is deleted after its membership."""
    fails = [True]

    async def desk(ctx: Any) -> None:
        await ctx.call("payer", {})

    async def payer(ctx: Any) -> None:
        if fails:
            raise ConnectionError("not yet")
        await ctx.step("pay", lambda: 1, on_in_doubt="fail")

    async with on_three_engines(tmp_path, Script(desk, "desk"), Script(payer, "payer")) as runner:
        await submitted(runner)
        child, commits = await run_of(runner, "payer"), runner.queue.commits
        commit = commits.commit

        async def paying(guard: Any, ops: Any) -> Any:
            if ops[0].name == "queue.delete" and fails:
                fails.clear()
                await runner.resume(child)
                await work(runner)
            return await commit(guard, ops)

        with monkeypatch.context() as patch:
            patch.setattr(commits, "commit", paying)
            await runner.discard("r")
        assert (await runner.wait(child, timeout=0)).error is None


# -- a fork and a deletion at the same time


async def forked_while_deleted(runner: AgentRunner, n: int, after: str | None, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Fork a run that is deleted before the n-th access to the stores. Return whether there were so many."""
    left, source = n, await runner.queue.require(f"r{n}")

    def counted(access: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*args: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                await forget(runner.backends, source)
            return await access(*args)

        return call

    with monkeypatch.context() as patch:
        for owner in {id(each): each for each in (runner.queue.commits, runner.state_store.commits)}.values():
            patch.setattr(owner, "commit", counted(owner.commit))
        for backend in (runner.queue, runner.state_store):
            patch.setattr(backend, "read", counted(backend.read))
        try:
            await runner.fork(source.run_id, after, new_run_id=f"fork{n}")
        except (UnknownRun, InvalidArgument):
            assert await runner.queue.row(f"fork{n}") is None
    return left <= 0


@pytest.mark.parametrize("after", ["first", None])
@pytest.mark.parametrize("engines", [1, 3])
async def test_a_fork_of_a_run_that_is_deleted_meanwhile_pays_no_second_time(
    engines: int, after: str | None, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    firm = Firm()
    firm.lazy |= {"manager", "payer"}  # their rows would be kept with them
    async with firm_of(place, firm) if engines == 1 else on_three_engines(tmp_path, *firm.scripts) as runner:
        n = 1
        await submitted(runner, "r1")
        while await forked_while_deleted(runner, n, after, monkeypatch):
            n += 1
            await submitted(runner, f"r{n}")
        await work(runner)
        assert n > 4
    firm.check()


# -- random trees


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 2)),
    st.tuples(st.just("fork"), st.integers(0, 30)),
    st.tuples(st.just("discard"), st.integers(0, 30)),
    st.tuples(st.just("resume"), st.integers(0, 30)),
    st.tuples(st.just("vacuum"), st.sampled_from(["succeeded", "failed", "cancelled"])),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("fail"), st.sampled_from(["desk", "manager", "payer"])),
    st.tuples(st.just("wait"), st.sampled_from(["desk", "manager", "payer"])),
    st.tuples(st.just("pay"), st.sampled_from(["desk", "manager", "payer"])),
)


class Tree:
    """Does random actions on trees of runs."""

    def __init__(self, runner: AgentRunner, firm: Firm) -> None:
        self.runner, self.firm, self.orders = runner, firm, 0

    async def do(self, action: str, argument: Any) -> None:
        runner, firm = self.runner, self.firm
        if action == "submit":
            self.orders += 1
            await submitted(runner, f"order {self.orders}")
        elif action == "vacuum":
            await runner.vacuum({argument: 0})
        elif action in ("fail", "pay", "wait"):
            names = {"fail": firm.failing, "pay": firm.lazy, "wait": firm.waiting}[action]
            names ^= {argument}
        elif runs := await runner.runs(limit=100):
            run = runs[argument % len(runs)].run_id
            with contextlib.suppress(AgentRuntimeError):  # it has not finished, succeeded, or has no such step
                if action == "fork":
                    await runner.fork(run, "first")
                elif action == "discard":
                    await runner.discard(run)
                elif action == "cancel":
                    await runner.cancel(run, wait=False)
                else:
                    await runner.resume(run)
        await work(runner)
        firm.check()


async def _try(place: Place, actions: list[tuple[str, Any]]) -> None:
    firm = Firm()
    firm.lazy |= {"manager"}
    async with firm_of(place, firm) as runner:
        tree = Tree(runner, firm)
        for action, argument in [("submit", 0), *actions]:
            await tree.do(action, argument)


@given(st.lists(ACTIONS, max_size=14))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_no_effect_happens_twice_in_a_random_tree_in_memory(actions: list[tuple[str, Any]]) -> None:
    asyncio.run(_try(Place("memory", Path()), actions))


@ON_EVERY_ENGINE
async def test_no_effect_happens_twice_in_a_random_tree(place: Place) -> None:
    if place.kind == "memory":
        pytest.skip("tried above")

    examples: list[list[tuple[str, Any]]] = []

    @given(st.lists(ACTIONS, min_size=6, max_size=14))
    @settings(max_examples=8, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def collect(actions: list[tuple[str, Any]]) -> None:
        examples.append(actions)

    collect()
    for actions in examples:
        await _try(place, actions)
