"""A worker leaves a run to other workers whose journal code of another version wrote."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, ErrorInfo, RunResult, Step, StepExecutor
from agent_runtime_core.errors import InvalidArgument, JournalMismatch
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner.resume_check import check_resume
from agent_runtime_core.status import RunStatus
from tests.support.runs import Hurried, Rig, Script

Code = Callable[[Any], Awaitable[Any]]
DONE: list[str] = []


def code(body: Code, version: str | None = None, accepts: tuple[str, ...] = ()) -> AgentRuntime:
    """An agent whose class is its own, as that of each release is."""

    class Job(Script):
        code_version = version
        accepts_code_versions = accepts

    return Job(body, "job")


def effect(name: str) -> Callable[[], str]:
    def do() -> str:
        DONE.append(name)
        return name

    return do


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    DONE.clear()
    return tmp_path / "runs.db" if request.param == "sqlite" else None


class Releases(Rig):
    """Workers of several releases over one store."""

    clock: Hurried

    def __init__(self, place: Path | None) -> None:
        super().__init__(place, Hurried(), park_after=0)

    async def __aenter__(self) -> Releases:
        return self


def worker(rig: Releases, agent: AgentRuntime, **config: Any) -> AgentRunner:
    runner = rig.another(**config)
    runner.registry = Registry()
    runner.registry.register(agent)
    return runner


async def lives(*workers: AgentRunner) -> None:
    """List these workers as living ones that claim runs."""
    for each in workers:
        each._process.slots = 1
        await each._process.renew()


async def parked(runner: AgentRunner, run: str = "r") -> None:
    await runner.submit("job", {}, run_id=run)
    while await runner.run_once():
        pass
    await runner.signal(run, "go")


async def new(ctx: Any) -> str:
    await ctx.step("load", effect("load"))
    await ctx.step("clean", effect("clean"))
    await ctx.wait_for_signal("go")
    return str(await ctx.step("send", effect("send")))


async def old(ctx: Any) -> str:
    await ctx.step("load", effect("load"))
    await ctx.wait_for_signal("go")
    return str(await ctx.step("send", effect("send again")))


async def careless(ctx: Any) -> str:
    try:
        return await old(ctx)
    except Exception:  # noqa: BLE001 - such code exists
        return str(await ctx.step("apology", effect("apology")))


@pytest.mark.parametrize("body", [old, careless])
async def test_a_run_of_other_code_is_left_to_it(
    place: Path | None, body: Code, caplog: pytest.LogCaptureFixture
) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new)), worker(rig, code(body))
        await parked(first)
        before = await first.get_run("r")
        for _ in range(3):
            await second.run_once()
            rig.clock.advance(20)
        left = await first.get_run("r")
        assert (left.status, left.reason) == (RunStatus.PENDING, "code of another version")
        assert (left.attempt, left.generation) == (before.attempt, before.generation)
        assert [each.run_key for each in await first.runs(status="pending")] == ["r"]
        rig.clock.advance(20)
        while await first.run_once():
            pass
        result = await first.wait("r", timeout=5)
        assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"value": "send"})
        assert DONE == ["load", "clean", "send"]
        warned = [each for each in caplog.records if "is left to a worker whose code fits" in each.message]
        events = [each async for each in first.stream("r") if each.event_type == "run.left"]
        assert (len(warned), len(events)) == (1, 1)
        assert events[0].payload == {"reason": "code of another version", "worker": second.config.worker_id}


async def test_a_worker_that_left_a_run_does_not_execute_its_code_again(place: Path | None) -> None:
    async with Releases(place) as rig:
        calls = list[str]()

        async def counting(ctx: Any) -> str:
            calls.append("old")
            return await old(ctx)

        first, second = worker(rig, code(new)), worker(rig, code(counting))
        await parked(first)
        for _ in range(5):
            await second.run_once()
            rig.clock.advance(20)
        assert calls == ["old"]
        second.registry.unregister("job")
        second.registry.register(code(new))  # reloaded code is other code
        await second.run_once()
        assert (await second.wait("r", timeout=5)).status is RunStatus.SUCCEEDED


async def test_a_run_that_every_living_worker_has_left_fails(place: Path | None) -> None:
    async with Releases(place) as rig:
        first, second, third = worker(rig, code(new)), worker(rig, code(old)), worker(rig, code(old))
        await parked(first)
        await lives(second, third)
        await second.run_once()
        assert (await first.get_run("r")).status is RunStatus.PENDING
        rig.clock.advance(2)
        await third.run_once()
        result = await first.wait("r", timeout=5)
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == "JournalMismatch"
        assert DONE == ["load", "clean"]


@pytest.mark.parametrize(("seconds", "is_left"), [(70, True), (599, True), (601, False)])
async def test_a_run_waits_for_a_worker_that_was_killed_and_may_come_back(
    place: Path | None, seconds: float, is_left: bool
) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new)), worker(rig, code(old))
        await parked(first)
        await lives(first)
        rig.clock.advance(seconds)
        await lives(second)
        await second.run_once()
        assert ((await second.get_run("r")).status is RunStatus.PENDING) == is_left
        if is_left:  # started again, it is another process
            third = worker(rig, code(new))
            rig.clock.advance(20)
            while await third.run_once():
                pass
            assert (await third.wait("r", timeout=5)).status is RunStatus.SUCCEEDED


async def test_a_run_does_not_wait_for_a_worker_that_has_left_in_order(place: Path | None) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new)), worker(rig, code(old))
        await parked(first)
        await lives(first, second)
        await first._process.leave()
        await second.run_once()
        assert (await second.wait("r", timeout=5)).status is RunStatus.FAILED


async def test_the_only_worker_fails_a_run_immediately_and_asks_its_agent(place: Path | None) -> None:
    async with Releases(place) as rig:
        asked = list[BaseException]()

        class Asked(AgentRuntime):
            key = "job"

            async def run(self, ctx: Any) -> RunResult:
                return RunResult({"value": await careless(ctx)})

            async def on_error(self, ctx: Any, error: BaseException) -> ErrorInfo:
                asked.append(error)
                return ErrorInfo("Mine", "no code fits", retriable=False)

        first, second = worker(rig, code(new)), worker(rig, Asked())
        await parked(first)
        await lives(second)
        await second.run_once()
        result = await first.wait("r", timeout=5)
        assert result.error is not None
        assert (result.status, result.error.type) == (RunStatus.FAILED, "Mine")
        assert [type(each) for each in asked] == [JournalMismatch]
        assert DONE == ["load", "clean"]


@pytest.mark.parametrize("limit", [0, 600])
async def test_a_run_that_nobody_can_execute_fails_after_the_time_for_other_code(
    place: Path | None, limit: float
) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new)), worker(rig, code(old), other_code_timeout_seconds=limit)
        await parked(first)
        since = rig.clock.wall()
        while (await first.get_run("r")).status is RunStatus.PENDING:
            await second.run_once()
            rig.clock.advance(1)
            assert rig.clock.wall() - since < limit + 30
        assert rig.clock.wall() - since >= limit
        result = await first.wait("r", timeout=5)
        assert result.error is not None
        assert result.error.type == "JournalMismatch"


async def test_code_that_does_not_fit_its_own_journal_fails_immediately(place: Path | None) -> None:
    async with Releases(place) as rig:

        async def changing(ctx: Any) -> None:
            calls.append(1)
            await ctx.step(f"try {len(calls)}", effect("try"))
            await ctx.wait_for_signal("go")

        calls = list[int]()
        first = worker(rig, code(changing))
        await parked(first)
        await first.run_once()
        result = await first.wait("r", timeout=5)
        assert result.error is not None
        assert result.error.type == "JournalMismatch"


async def test_code_that_continued_after_other_code_leaves_what_that_wrote(place: Path | None) -> None:
    """It has written to the journal too, and what does not fit is of the other version."""

    async with Releases(place) as rig:

        async def newer(ctx: Any) -> str:
            await ctx.step("load", effect("load"))
            await ctx.wait_for_signal("go")
            await ctx.step("check", effect("check"))
            await ctx.wait_for_signal("send")
            return str(await ctx.step("send", effect("send")))

        async def older(ctx: Any) -> str:
            await ctx.step("load", effect("load"))
            await ctx.wait_for_signal("go")
            return str(await ctx.step("post", effect("post")))

        second, first = worker(rig, code(older)), worker(rig, code(newer))
        await parked(second)
        await first.run_once()
        await first.signal("r", "send")
        await second.run_once()
        assert (await first.get_run("r")).reason == "code of another version"
        rig.clock.advance(20)
        await first.run_once()
        assert (await first.wait("r", timeout=5)).status is RunStatus.SUCCEEDED
        assert DONE == ["load", "check", "send"]


async def test_code_that_has_executed_something_new_fails_its_run(place: Path | None) -> None:
    async with Releases(place) as rig:

        async def wrong(ctx: Any) -> str:
            await asyncio.gather(ctx.step("new", effect("new"), key="new"))
            return await old(ctx)

        first, second = worker(rig, code(new)), worker(rig, code(wrong))
        await parked(first)
        await second.run_once()
        assert (await first.wait("r", timeout=5)).status is RunStatus.FAILED


async def test_the_time_for_other_code_begins_again_after_a_step(place: Path | None) -> None:
    async with Releases(place) as rig:

        async def long(ctx: Any) -> str:
            for names in (("load", "clean"), ("pack",), ("weigh",)):
                for name in names:
                    await ctx.step(name, effect(name))
                await ctx.wait_for_signal("go")
            return "sent"

        first, second = worker(rig, code(long)), worker(rig, code(old))
        await parked(first)
        for _ in range(2):
            await second.run_once()
            assert (await first.get_run("r")).reason == "code of another version"
            rig.clock.advance(500)
            await first.run_once()
            assert (await first.get_run("r")).status is RunStatus.WAITING
            await first.signal("r", "go")
            rig.clock.advance(500)
        await first.run_once()
        assert (await first.wait("r", timeout=5)).status is RunStatus.SUCCEEDED


async def test_execute_raises_as_before(place: Path | None) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new)), worker(rig, code(old))
        await parked(first)
        result = await second.execute("job", "r", {})
        assert result.error is not None
        assert result.error.type == "JournalMismatch"


# -- what differs between two versions


async def _renamed_wait(ctx: Any) -> None:
    await ctx.step("load", effect("load"))
    await ctx.wait_for_signal("start")


async def _without_step(ctx: Any) -> None:
    await ctx.wait_for_signal("go")


def listed(*names: str) -> Code:
    async def body(ctx: Any) -> str:
        await StepExecutor(ctx).run([Step(each, lambda ctx, state, name=each: effect(name)()) for each in names])
        await ctx.wait_for_signal("go")
        return "done"

    return body


PAIRS: dict[str, tuple[Code, Code]] = {
    "an inserted step": (new, old),
    "a renamed wait": (old, _renamed_wait),
    "a removed first step": (old, _without_step),
    "a list with another step": (listed("a", "b"), listed("a", "c")),
    "a shorter list": (listed("a", "b"), listed("a")),
}


@pytest.mark.parametrize("pair", PAIRS)
async def test_each_difference_leaves_the_run_to_the_version_that_began_it(place: Path | None, pair: str) -> None:
    async with Releases(place) as rig:
        began, other = PAIRS[pair]
        first, second = worker(rig, code(began)), worker(rig, code(other))
        await parked(first)
        done = [*DONE]
        await second.run_once()
        assert (await first.get_run("r")).reason == "code of another version"
        assert done == DONE
        rig.clock.advance(20)
        await first.run_once()
        assert (await first.wait("r", timeout=5)).status is RunStatus.SUCCEEDED


async def test_old_and_new_workers_finish_a_hundred_runs_together(place: Path | None) -> None:
    """The new code has a renamed and an inserted step. The workers take turns at random while new runs come."""
    chance = random.Random(7)

    async def before(ctx: Any) -> list[str]:
        name = ctx.input["name"]
        loaded = await ctx.step("load", effect(f"load {name}"))
        await ctx.wait_for_signal("go")
        return [loaded, await ctx.step("send", effect(f"send {name}"))]

    async def after(ctx: Any) -> list[str]:
        name = ctx.input["name"]
        ctx.renamed("load", "read")
        loaded = await ctx.step("read", effect(f"load {name}"))
        if await ctx.patched("clean"):
            await ctx.step("clean", effect(f"clean {name}"))
        await ctx.wait_for_signal("go")
        return [loaded, await ctx.step("send", effect(f"send {name}"))]

    names = [f"run {number}" for number in range(100)]
    async with Releases(place) as rig:
        workers = [worker(rig, code(before)), worker(rig, code(after))]
        await lives(*workers)
        waiting, new_runs = list[str](), [*names]
        while waiting or new_runs:
            if new_runs and chance.random() < 0.5:
                name = new_runs.pop()
                await workers[0].submit("job", {"name": name}, run_id=name)
                waiting.append(name)
            elif waiting and chance.random() < 0.5:
                await workers[0].signal(waiting.pop(chance.randrange(len(waiting))), "go")
            await chance.choice(workers).run_once()
            rig.clock.advance(chance.random())
            await lives(*workers)
        while await workers[0].runs(status=["pending", "waiting", "running"], limit=1):
            await chance.choice(workers).run_once()
            rig.clock.advance(1)
            await lives(*workers)
        ended = [await workers[0].get_run(name) for name in names]
        assert {each.status for each in ended} == {RunStatus.SUCCEEDED}
        assert sorted(each for each in DONE if "clean" not in each) == sorted(
            f"{what} {name}" for what in ("load", "send") for name in names
        )
        assert len(DONE) == len(set(DONE))


# -- code_version


async def test_a_run_is_continued_only_by_the_version_that_began_it(place: Path | None) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new, "1")), worker(rig, code(new, "2"))
        await parked(first)
        await lives(second)
        # Else it would claim the run without end.
        assert [await second.run_once() for _ in range(4)] == [True, True, False, False]
        for _ in range(100):  # far longer than other_code_timeout_seconds
            await second.run_once()
            rig.clock.advance(20)
            await lives(second)
        left = await second.get_run("r")
        assert (left.status, left.reason, left.attempt) == (RunStatus.PENDING, "code of another version", 1)
        assert (await check_resume(second, await second.queue.require("r"), code(new, "2"), 5)).outcome == "mismatch"
        await first.run_once()
        result = await first.wait("r", timeout=5)
        assert result.status is RunStatus.SUCCEEDED
        [started] = [each async for each in first.stream("r") if each.event_type == "run.started"]
        assert started.payload["code_version"] == "1"


@pytest.mark.parametrize(
    ("began", "other", "fits"),
    [
        (code(new, "1"), code(new, "2", ("0", "1")), True),
        (code(new, "1"), code(new, "1"), True),
        (code(new), code(new, "2"), True),
        (code(new, "1"), code(new), False),
        (code(new, "1"), code(new, None, ("1",)), True),
    ],
    ids=["accepted", "the same", "begun without a version", "code without a version", "accepted without a version"],
)
async def test_which_versions_continue_a_run(
    place: Path | None, began: AgentRuntime, other: AgentRuntime, fits: bool
) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, began), worker(rig, other)
        await parked(first)
        await second.run_once()
        assert ((await first.get_run("r")).status is RunStatus.SUCCEEDED) == fits


async def test_resume_names_the_version_whose_code_continues(place: Path | None) -> None:
    async def fails(ctx: Any) -> None:
        await ctx.step("load", effect("load"))
        raise ValueError("no")

    async def mended(ctx: Any) -> str:
        return str(await ctx.step("load", effect("load")))

    async with Releases(place) as rig:
        first, second = worker(rig, code(fails, "1")), worker(rig, code(mended, "2"))
        await first.submit("job", {}, run_id="r")
        await first.run_once()
        with pytest.raises(InvalidArgument, match="code_version must be"):
            await second.resume("r", code_version="")
        await second.resume("r")
        await second.run_once()
        assert (await second.get_run("r")).reason == "code of another version"
        await second.cancel("r")
        await second.resume("r", code_version="2")
        rig.clock.advance(20)
        await second.run_once()
        assert (await second.wait("r", timeout=5)).status is RunStatus.SUCCEEDED
        fork = await first.fork("r", "load")  # is begun by the version that claims it first
        await first.run_once()
        assert (await first.get_run(fork)).status is RunStatus.FAILED


async def test_execute_refuses_a_run_of_another_version(place: Path | None) -> None:
    async with Releases(place) as rig:
        first, second = worker(rig, code(new, "1")), worker(rig, code(new, "2"))
        await parked(first)
        with pytest.raises(
            JournalMismatch, match="code_version of agent 'job' must be '1', which began the run, got '2'"
        ):
            await second.execute("job", "r", {})
        assert (await first.get_run("r")).status is RunStatus.PENDING


@pytest.mark.parametrize(
    ("version", "accepts", "message"),
    [
        (1, (), "code_version must be"),
        ("1", "2", "accepts_code_versions must be"),
        ("1", ("",), "accepts_code_versions"),
    ],
)
def test_versions_are_checked_when_an_agent_is_registered(version: Any, accepts: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Registry().register(code(new, version, accepts))
