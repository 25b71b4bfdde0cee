"""Random programs: the same code always fits its journal, and changed code repeats no effect under another name."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_runtime_core import AgentRunner, RunnerConfig, RunStatus
from agent_runtime_core.errors import RunFailed, StepExecutionError, StepInDoubt, WaitTimeout
from agent_runtime_core.testing import crash_everywhere
from tests.support.runs import Script

#: A call of a program: its kind, its name, the calls inside it, and a number that a rename does not change.
Node = tuple[str, str, list[Any], int]

OPTIONS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}

PLAIN = ("step", "guarded", "fails", "flaky", "child", "bad child", "sleep", "late", "signal", "messages", "approval")
CUT = ("cut signal", "cut messages", "cut step")


def nodes(depth: int, *kinds: str, inside: tuple[str, ...] | None = None) -> st.SearchStrategy[list[Node]]:
    """Return programs of these calls, and of blocks with the calls `inside`."""
    leaf: st.SearchStrategy[Any] = st.tuples(st.sampled_from(kinds), st.sampled_from("ab"), st.just([]), st.just(0))
    if depth:
        blocks = ("outer", "retried", "gather")
        program = nodes(depth - 1, *(inside or kinds))
        leaf = st.one_of(leaf, leaf, st.tuples(st.sampled_from(blocks), st.sampled_from("ab"), program, st.just(0)))
    return st.lists(leaf, min_size=1, max_size=3)


def numbered(program: list[Any], concurrent: bool = False, numbers: Any = None) -> list[Node]:
    """Give each call its number. Of concurrent calls, each has a name of its own, as the documentation demands."""
    numbers = numbers or itertools.count(1)
    found = []
    for kind, name, inside, _ in program:
        number = next(numbers)
        name = f"{name}{number}" if concurrent else name
        found.append((kind, name, numbered(inside, kind == "gather", numbers), number))
    return found


class Stopped(Exception):
    """The code raised an error between steps."""


class World:
    """What a program did, and where it is stopped."""

    def __init__(self, in_doubt: Any = "fail") -> None:
        self.effects: list[int] = []
        self.in_doubt = in_doubt
        self.left: float = float("inf")  # calls until the run is stopped
        self.stop: Callable[[], None] = lambda: None
        self.fails = False  # whether that is an error of the code
        self.flaky: set[int] = set()

    async def point(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.stop()
            await asyncio.Event().wait()

    async def effect(self, number: int) -> int:
        await self.point()
        self.effects.append(number)
        if not self.fails:  # an error of the function would mean that there was no effect
            await self.point()
        return number

    async def run(self, ctx: Any, program: list[Node]) -> list[Any]:
        return [await self.call(ctx, *node) for node in program]

    async def call(self, ctx: Any, kind: str, name: str, inside: list[Node], number: int) -> Any:
        await self.point()
        if kind == "gather":
            return await asyncio.gather(*(self.call(ctx, *node) for node in inside))
        if kind.startswith("cut"):
            try:
                async with asyncio.timeout(0):
                    await self.cut(ctx, kind, name)
            except TimeoutError:
                return "cut"
        try:
            return await getattr(self, f"_{kind.replace(' ', '_')}")(ctx, name, inside, number)
        except StepInDoubt:
            raise  # the run ends
        except (RunFailed, StepExecutionError, WaitTimeout) as error:
            return type(error).__name__

    async def cut(self, ctx: Any, kind: str, name: str) -> None:
        if kind == "cut signal":
            await ctx.wait_for_signal(f"never {name}")
        elif kind == "cut messages":
            await ctx.messages(None)
        else:
            await ctx.step(f"cut {name}", asyncio.Event().wait)

    async def _step(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.step(name, int)

    async def _guarded(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.step(f"pay {name}", self.effect, number, on_in_doubt=self.in_doubt)

    async def _fails(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.step(f"fails {name}", self.failing)

    async def failing(self) -> None:
        raise ValueError

    async def _flaky(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        def fn() -> int:
            if number not in self.flaky:
                self.flaky.add(number)
                raise ValueError
            return number

        return await ctx.step(f"flaky {name}", fn, retries=1, retry_delay=0)

    async def _child(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return (await ctx.call(f"kid-{name[0]}", {"params": {"n": number}}, key=name[1:] or None)).final_output

    async def _bad_child(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.call("bad", {"params": {"n": number}}, key=name[1:] or None)

    async def _sleep(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.sleep(0, key=name[1:] or None)

    async def _late(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.wait_for_signal(f"late {name}", timeout=0)

    async def _signal(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.wait_for_signal(f"late {name}", timeout=0.001)

    async def _messages(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.messages(key=name[1:] or None)

    async def _approval(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.approve(f"plan {name}", {"n": number}, timeout=0)

    async def _outer(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        return await ctx.step(f"outer {name}", self.run, ctx, inside)

    async def _retried(self, ctx: Any, name: str, inside: list[Node], number: int) -> Any:
        async def body() -> Any:
            found = await self.run(ctx, inside)
            if number not in self.flaky:
                self.flaky.add(number)
                raise ValueError
            return found

        return await ctx.step(f"retried {name}", body, retries=1, retry_delay=0)

    def agents(self) -> list[Script]:
        async def kid(ctx: Any) -> Any:
            return await ctx.step("pay", self.effect, ctx.params["n"], on_in_doubt=self.in_doubt)

        async def bad(ctx: Any) -> Any:
            raise ValueError

        return [*(Script(kid, key) for key in ("kid-a", "kid-b", "kid-other")), Script(bad, "bad")]


def check() -> None:
    """The check function of guarded steps: run them again."""


#: In `crash_everywhere` one worker executes all runs, so a step that waits for a child run would wait forever.
WITHOUT_CHILDREN = tuple(each for each in (*PLAIN, *CUT) if "child" not in each)


@settings(max_examples=8, **OPTIONS)
@given(nodes(1, *PLAIN, *CUT, inside=WITHOUT_CHILDREN))
def test_a_program_that_is_killed_at_any_write_fits_its_journal(program: list[Any]) -> None:
    known = numbered(program)

    def agent() -> Script:
        return Script(lambda ctx: World(check).run(ctx, known))

    kids = [lambda index=index: World(check).agents()[index] for index in range(4)]
    asyncio.run(crash_everywhere(agent, agents=kids, config=RunnerConfig(max_retries=1)))


async def executed(runner: AgentRunner, world: World, program: list[Node], left: float, *, fail: bool) -> Any:
    """Execute the run until it ends, or is stopped at the call of that number; None then."""
    world.left, world.fails = left, fail
    task = asyncio.ensure_future(runner.execute(Script(lambda ctx: world.run(ctx, program)), "r"))

    def stop() -> None:
        if fail:
            raise Stopped
        task.cancel()

    world.stop = stop
    await asyncio.wait({task})
    return None if task.cancelled() else task.result()


async def with_runner(place: str, world: World, use: Callable[[AgentRunner], Awaitable[None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = "memory://" if place == "memory" else str(Path(folder) / "runs.db")
        config = RunnerConfig(max_retries=1, max_crashes=100)
        async with AgentRunner.open(url, config=config, persistence=None) as runner:
            for agent in world.agents():
                runner.registry.register(agent)
            await use(runner)


STOPS = st.lists(st.tuples(st.integers(1, 25), st.booleans()), max_size=4)


@pytest.mark.parametrize("place", ["memory", "sqlite"])
def test_a_program_that_is_stopped_anywhere_fits_its_journal(place: str) -> None:
    @settings(max_examples=25, **OPTIONS)
    @given(nodes(2, *PLAIN, *CUT), STOPS)
    def holds(program: list[Any], stops: list[tuple[int, bool]]) -> None:
        known, world = numbered(program), World(check)

        async def use(runner: AgentRunner) -> None:
            for left, fail in stops:
                result = await executed(runner, world, known, left, fail=fail)
                assert result is None or result.error is None or result.error.type != "JournalMismatch"
            result = await executed(runner, world, known, float("inf"), fail=False)
            assert (result.status, result.error) == (RunStatus.SUCCEEDED, None)

        asyncio.run(with_runner(place, world, use))

    holds()


CHANGED = ("guarded", "child", "outer")


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Node], list[Node]]:
    """A program, and the program after a deploy that changes one call outside of `gather`."""
    known = numbered(draw(nodes(1, "step", "guarded", "child", "sleep", "late", "approval", "fails", *CUT)))
    places = [(known, at) for at in range(len(known))]
    places += [(each[2], at) for each in known if each[0] in ("outer", "retried") for at in range(len(each[2]))]
    old, at = draw(st.sampled_from(places))
    changed = copied(known)
    there = changed if old is known else next(new[2] for new, was in zip(changed, known, strict=True) if was[2] is old)
    how = draw(st.sampled_from(["rename", "remove", "insert", "swap"]))
    if how == "rename":
        kind, _, inside, number = there[at]
        there[at] = (kind, "other", inside, number)
    elif how == "remove":
        del there[at]
    elif how == "insert":
        there.insert(at, (draw(st.sampled_from(["guarded", "child", "sleep", "step"])), "other", [], 1000))
    else:
        there.insert(0, there.pop(at))
    return known, changed


def copied(program: list[Node]) -> list[Node]:
    return [(kind, name, copied(inside), number) for kind, name, inside, number in program]


@pytest.mark.parametrize("place", ["memory", "sqlite"])
def test_changed_code_repeats_no_effect(place: str) -> None:
    @settings(max_examples=60, **OPTIONS)
    @given(changes(), STOPS, st.integers(1, 25))
    def holds(programs: tuple[list[Node], list[Node]], stops: list[tuple[int, bool]], left: int) -> None:
        (old, new), world = programs, World()

        async def use(runner: AgentRunner) -> None:
            for at, fail in [*stops, (left, True)]:
                result = await executed(runner, world, old, at, fail=fail)
                assert result is None or result.error is None or result.error.type != "JournalMismatch"
            before = [*world.effects]
            result = await executed(runner, world, new, float("inf"), fail=False)
            if result.error is not None and result.error.type == "JournalMismatch":
                assert world.effects == before, "it is rejected before anything new starts"
                result = await executed(runner, world, old, float("inf"), fail=False)
                assert result.error is None or result.error.type != "JournalMismatch"
            assert not [each for each, times in Counter(world.effects).items() if times > 1]

        asyncio.run(with_runner(place, world, use))

    holds()
