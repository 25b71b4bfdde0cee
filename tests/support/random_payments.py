"""Random programs that pay, and random histories of their runs: kills, drains, forks, new keys, deletions."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from hypothesis import strategies as st

from agent_runtime_core._core.codec.json import arguments_digest
from agent_runtime_core._core.ids import step_id
from agent_runtime_core.errors import AgentRuntimeError, EffectAlreadyDone
from agent_runtime_core.queue.records import LIVE, RunFilter
from agent_runtime_core.runner import AgentRunner, reencrypt
from agent_runtime_core.steps import AlreadyDone, Step, StepExecutor
from tests.support.reencryption import BOTH, NEW, OLD, Place
from tests.support.runs import Script


class Node(NamedTuple):
    """One call of a program.

    Attributes:
        kind: "pay" or what else the code does.
        name: The name of the step or child.
        number: The order that is paid; a number that no other call of the program has.
        inside: The calls inside it.
        how: Options of a payment.
    """

    kind: str
    name: str
    number: int = 0
    inside: tuple[Any, ...] = ()
    how: tuple[tuple[str, Any], ...] = ()


# -- programs

#: What the bank does with each request, one after the other. Later requests are paid.
ACTS = ("error", "error", "before", "after", "own", "nan", "ok")
POLICIES = ("fail", "fail", "review", "check")


@st.composite
def _payments(draw: st.DrawFn) -> Node:
    how = {
        "acts": tuple(draw(st.lists(st.sampled_from(ACTS), max_size=2))),
        "policy": draw(st.sampled_from(POLICIES)),
        "way": draw(st.sampled_from(["args", "args", "args", "closure", "key", "list"])),
        "cut": draw(st.booleans()),
        "limit": draw(st.booleans()),
        "retries": draw(st.sampled_from([0, 0, 1])),
        "catch": draw(st.sampled_from(["raise", "continue", "again", "again"])),
    }
    return Node(
        draw(st.sampled_from(["pay", "pay", "pay", "twin"])), draw(st.sampled_from("ab")), how=tuple(how.items())
    )


@st.composite
def _nodes(draw: st.DrawFn, depth: int) -> Node:
    kinds = (
        "pay",
        "pay",
        "pay",
        "pay",
        "step",
        "stop",
        "approve",
        "outer",
        "outer",
        "undo",
        "child",
        "gather",
        "again",
    )
    kind = draw(st.sampled_from(kinds if depth else kinds[:7]))
    if kind == "pay":
        return draw(_payments())
    name = draw(st.sampled_from("ab"))
    if kind in ("step", "stop", "approve"):
        return Node(kind, name)
    if kind == "again":  # with several payments, the code itself would repeat those before the failed one
        around, payment = draw(st.sampled_from(["outer", "outer", "child"])), draw(_payments())
        inside = payment if around == "outer" else payment._replace(kind="pay")
        return Node(around, name, inside=(inside,), how=(("catch", "again"),))
    nodes = draw(st.lists(_nodes(depth - 1), min_size=1, max_size=3))
    return Node(kind, name, inside=tuple(nodes), how=(("catch", draw(st.sampled_from(["raise", "continue"]))),))


@st.composite
def programs(draw: st.DrawFn) -> list[Node]:
    """Random programs."""
    return numbered(draw(st.lists(_nodes(2), min_size=1, max_size=4)))


def numbered(program: Any, numbers: Any = None, concurrent: bool = False) -> list[Node]:
    """Give each call its number. Of concurrent calls, each has another name, as the documentation demands."""
    numbers, made = numbers or itertools.count(1), []
    for node in program:
        number = next(numbers)
        name = f"{node.name}{number}" if concurrent else node.name
        inside = numbered(node.inside, numbers, node.kind == "gather")
        made.append(node._replace(number=number, name=name, inside=tuple(inside)))
    return made


# -- what happens to the runs

#: How a process ends while a run is executed.
ENDINGS = ("kill", "kill", "drain", "leave", "cancel")


@st.composite
def histories(draw: st.DrawFn, also: str = "fork") -> list[tuple[Any, ...]]:
    """What happens to the runs of a program: forks of them, or else a deploy that renames what the code calls."""
    return draw(st.lists(_actions(also), max_size=9))


@st.composite
def _actions(draw: st.DrawFn, also: str) -> tuple[Any, ...]:
    some, number = (
        ("work", "work", "work", also, also, "resume", "resume", "codec", "vacuum", "discard", "cancel"),
        st.integers(0, 30),
    )
    action = draw(st.sampled_from(some))
    if action == "work":
        return action, draw(st.integers(1, 25)), draw(st.sampled_from(ENDINGS))
    if action == "fork":
        return action, draw(number), draw(number)
    if action == "vacuum":
        return action, draw(st.sampled_from(["succeeded", "failed", "cancelled"]))
    return (action,) if action in ("codec", "deploy") else (action, draw(number))


_CUT: ContextVar[asyncio.Timeout | None] = ContextVar("cut", default=None)


class Bank:
    """The ledger: it is outside of the store, and knows nothing of steps."""

    def __init__(self) -> None:
        self.paid: Counter[tuple[str, int]] = Counter()
        self.refunds: list[Any] = []
        self.limits: dict[tuple[str, int], int] = {}
        self.requests: Counter[tuple[str, int]] = Counter()
        self.orders: dict[str, tuple[str, int]] = {}  # by the digest of the arguments

    def check(self) -> None:
        wrong = {order: times for order, times in self.paid.items() if times > self.limits.get(order, 1)}
        assert not wrong, f"paid too often: {wrong}"
        assert not self.refunds, "code that was stopped has paid back"


class World:
    """Executes programs, and stops them where the history says."""

    def __init__(self) -> None:
        self.bank = Bank()
        self.left: float = math.inf  # calls until the process ends
        self.hanging = asyncio.Event()
        self.refused: set[Any] = set()  # runs in which a call was refused
        self.given_up: dict[tuple[Any, str], int] = {}  # the last step around payments that failed, by run and name
        self.mixed: set[Any] = set()  # runs in which another step of that name was called after it
        self.deployed = False  # the code has other names for children, and for payments inside steps
        self.stopped_once: set[tuple[str, int]] = set()
        self.scripts = [Script(self.agent, name) for name in ("root", "kid-a", "kid-b", "kid-a2", "kid-b2")]

    async def agent(self, ctx: Any) -> Any:
        await ctx.step("first", int)
        return await self.run(ctx, ctx.input["root"], ctx.input["program"])

    async def run(self, ctx: Any, root: str, program: Any) -> list[Any]:
        return [await self.call(ctx, root, Node(*node)) for node in program]

    async def hang(self) -> None:
        cut = _CUT.get()
        if cut is None:
            self.hanging.set()
        else:
            cut.reschedule(asyncio.get_running_loop().time())
        await asyncio.get_running_loop().create_future()

    async def point(self) -> None:
        """A place where the process may end."""
        self.left -= 1
        if self.left <= 0:
            self.hanging.set()
            await asyncio.get_running_loop().create_future()

    # -- calls

    async def call(self, ctx: Any, root: str, node: Node) -> Any:
        await self.point()
        how = dict(node.how)
        for left in reversed(range(3)):
            try:
                return await getattr(self, f"_{node.kind}")(ctx, root, node, how)
            except Exception as error:
                if isinstance(error, EffectAlreadyDone):
                    self.refused.add(ctx.run_id)
                if node.kind == "outer":
                    self.given_up[ctx.run_id, node.name] = node.number
                catch = how.get("catch", "raise")
                if catch == "raise" or type(error).__name__ == "JournalMismatch":
                    raise
                if catch == "continue" or not left:
                    return type(error).__name__
        raise AssertionError

    async def _step(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        return await ctx.step(node.name, int)

    async def _stop(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        if (root, node.number) not in self.stopped_once:
            self.stopped_once.add((root, node.number))
            raise LookupError("an error between steps")

    async def _approve(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        return await ctx.approve(f"plan {node.name}{node.number}", {"n": node.number})

    async def _outer(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        inside = [Node(*each) for each in node.inside]
        if self.given_up.get((ctx.run_id, node.name), node.number) != node.number:
            self.mixed.add(ctx.run_id)
        if self.deployed:
            inside = [each._replace(name=f"{each.name}2") if each.kind == "pay" else each for each in inside]
        return await ctx.step(f"outer {node.name}", self.run, ctx, root, inside)

    async def _undo(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        try:
            return await self.run(ctx, root, node.inside)
        except asyncio.CancelledError:  # the attempt was stopped, and the run goes on later
            await ctx.step("pay back", self.bank.refunds.append, node.number, on_in_doubt="fail")
            raise

    async def _gather(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        found = await asyncio.gather(
            *(self.call(ctx, root, Node(*each)) for each in node.inside), return_exceptions=True
        )
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return found

    async def _child(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        concurrent = node.name[1:] or None
        agent = f"kid-{node.name[0]}{'2' * (self.deployed and concurrent is None)}"
        return (await ctx.call(agent, {"root": root, "program": node.inside}, key=concurrent)).final_output

    async def _twin(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        """The same payment twice, which the code wants."""
        # After an ordinary error of the second payment, the code itself repeats the first one.
        self.bank.limits[root, node.number] = 2 + how["acts"].count("error")
        how |= {"policy": "fail", "way": "args"}
        return [await self._pay(ctx, root, node, how), await self._pay(ctx, root, node, how)]

    async def _pay(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        if not how["cut"]:
            return await self._paying(ctx, root, node, how)
        try:
            async with asyncio.timeout(None) as cut:
                _CUT.set(cut)
                return await self._paying(ctx, root, node, how)
        finally:
            _CUT.set(None)

    async def _paying(self, ctx: Any, root: str, node: Node, how: dict[str, Any]) -> Any:
        order = (root, node.number)
        self.bank.orders[arguments_digest(*order) or ""] = order

        async def pay(root: str = root, number: int = node.number) -> Any:
            return await self.request(order, how)

        async def check() -> Any:
            return AlreadyDone("paid") if self.bank.paid[order] else None

        policy = how["policy"]
        if policy == "check":
            policy = check
        elif policy == "review" and how["way"] in ("closure", "list"):
            policy = "fail"  # the reviewer could not tell which order it is
        options = {"on_in_doubt": policy, "retries": how["retries"], "retry_delay": 0.0}
        if how["limit"]:
            options["timeout"] = 0.002
        name = f"pay {node.name}"
        match how["way"]:
            case "args":
                return await ctx.step(name, pay, *order, **options)
            case "closure":
                return await ctx.step(name, pay, **options)
            case "key":
                return await ctx.step(name, pay, *order, key=str(node.number), **options)

        async def listed(ctx: Any, state: Any) -> Any:
            return await pay()

        steps = [Step("note", _note), Step(name, listed, **options)]
        return (await StepExecutor(ctx).run(steps))[name]

    async def request(self, order: tuple[str, int], how: dict[str, Any]) -> Any:
        await self.point()
        number = self.bank.requests[order]
        self.bank.requests[order] += 1
        act = how["acts"][number] if number < len(how["acts"]) else "ok"
        if act == "error":
            raise ConnectionError("not paid")
        if act == "before":
            await self._wait(how)
        self.bank.paid[order] += 1
        if act == "own":
            try:
                await self._wait(how)
            except asyncio.CancelledError:
                raise ConnectionError("connection closed") from None
        if act == "after":
            await self._wait(how)
        self.left -= 1
        if self.left <= 0:
            await self._wait({})
        return math.nan if act == "nan" else "paid"

    async def _wait(self, how: dict[str, Any]) -> None:
        if how.get("limit") and _CUT.get() is None:
            await asyncio.get_running_loop().create_future()  # until the time limit of the step
        await self.hang()


async def _note(ctx: Any, state: Any) -> int:
    return 1


CODECS = (None, OLD, BOTH, NEW)


class History:
    """Does what a history says with the runs of one program."""

    def __init__(self, place: Place, program: list[Node]) -> None:
        self.place, self.program = place, json.loads(json.dumps(program))
        self.world = World()
        self.codec = 0
        self.mismatches: list[str] = []

    def process(self) -> Any:
        """Return a new process."""
        return self.place.runner(CODECS[self.codec], *self.world.scripts, max_crashes=1000, grace_seconds=0.0)

    async def play(self, actions: list[tuple[Any, ...]]) -> None:
        self.own_tasks = {*asyncio.all_tasks()}
        async with self.process() as runner:
            await runner.submit("root", {"root": "r", "program": self.program}, run_id="r")
        for action, *arguments in actions:
            await getattr(self, f"_{action}")(*arguments)
            self.world.bank.check()
        await self._finish()
        await self._resume_all()
        await self._finish()
        for _ in range(0 if self.world.deployed else 2):  # a fork from the beginning finds what it must not repeat
            for which in range(2):
                await self._fork(which, 0)
                await self._finish()
            await self._discard_children()

    async def _finish(self) -> None:
        for _ in range(30):
            if not await self._work(math.inf, "drain"):
                break
        else:
            raise AssertionError("the runs do not end")
        async with self.process() as runner:
            for run in await runner.runs(limit=100):
                result = await runner.wait(run.run_id, timeout=0)
                error = f"{result.error.type} {result.error.message}" if result.error is not None else ""
                # After a refusal the other run may fail, so that the fork would not be refused when it is resumed.
                # What a step in doubt contains may be missing in the next step that has its key.
                allowed = self.world.deployed or run.run_id in self.world.refused | self.world.mixed
                assert "JournalMismatch" not in error or allowed, error
        self.world.bank.check()

    async def _work(self, left: float, ending: str) -> bool:
        """Execute runs until the process ends. Returns whether it was ended while it worked."""
        world = self.world
        world.left = left
        world.hanging.clear()
        async with self.process() as runner:
            working = asyncio.ensure_future(runner.run_loop(0.01, concurrency=8, handle_signals=False))
            try:
                async with asyncio.timeout(30):
                    while not world.hanging.is_set() and await runner.queue.find(RunFilter(LIVE)):
                        await self._answer(runner)
                        await asyncio.sleep(0.001)
            except TimeoutError:
                raise AssertionError("the runs hang") from None
            if world.hanging.is_set():
                await getattr(self, f"_by_{ending}")(runner, working)
                return True
            runner.stop()
            await working
        return False

    async def _answer(self, runner: AgentRunner) -> None:
        """Answer what people are asked, truthfully."""
        questions = await runner.approvals()
        for each in questions:
            answer: Any = True
            if each.name.startswith("in_doubt:"):
                records = await runner.state_store.records(each.run_id)
                started = [r for r in records if step_id(str(each.run_id), r.name, r.key) == each.details["step_id"]]
                order = self.world.bank.orders[next(r.digest or "" for r in started if r.digest)]
                paid = self.world.bank.paid[order]
                answer = {"outcome": "done", "result": "paid"} if paid else {"outcome": "retry"}
            await runner.approve(each.run_id, each.name, answer, request_id=each.request_id)

    async def _by_kill(self, runner: AgentRunner, working: asyncio.Task[None]) -> None:
        """Nothing that the process would still write reaches the store."""
        engine: Any = runner.queue.commits

        async def never(*_: Any) -> Any:
            return await asyncio.get_running_loop().create_future()

        engine.commit, engine.commit_nowait = never, lambda *_: None
        try:
            while left := asyncio.all_tasks() - self.own_tasks:
                for task in left:
                    task.cancel()
                await asyncio.wait(left, timeout=0.01)
        finally:
            del engine.commit, engine.commit_nowait
        if self.place.kind == "memory":  # on SQLite, the locks of the process show that it has ended
            runs = engine.tables["runs"]
            runs |= {key: row.with_values(lease_until=0.0) for key, row in runs.items() if row.status == "running"}

    async def _by_drain(self, runner: AgentRunner, working: asyncio.Task[None]) -> None:
        await runner.close()
        await _ended(working)

    async def _by_leave(self, runner: AgentRunner, working: asyncio.Task[None]) -> None:
        working.cancel()
        await _ended(working)

    async def _by_cancel(self, runner: AgentRunner, working: asyncio.Task[None]) -> None:
        for run in await runner.runs(limit=100):
            if run.status.value == "running":
                await runner.cancel(run.run_id)
        await asyncio.wait({working}, timeout=0.1)
        working.cancel()
        await _ended(working)

    async def _with_run(self, which: int, use: Callable[[AgentRunner, Any], Awaitable[Any]]) -> None:
        async with self.process() as runner:
            if runs := await runner.runs(limit=100):
                with contextlib.suppress(AgentRuntimeError):  # it has not finished, or has succeeded
                    await use(runner, runs[which % len(runs)].run_id)

    async def _fork(self, which: int, after: int) -> None:
        async def use(runner: AgentRunner, run_id: Any) -> None:
            records = await runner.state_store.records(run_id)
            steps = [(each.name, each.key) for each in records if each.kind == "done"]
            await runner.fork(run_id, steps[after % len(steps)] if steps else None)

        await self._with_run(which, use)

    async def _deploy(self) -> None:
        self.world.deployed = True

    async def _resume(self, which: int) -> None:
        await self._with_run(which, lambda runner, run_id: runner.resume(run_id))

    async def _resume_all(self) -> None:
        async with self.process() as runner:
            for run in await runner.runs(limit=100):
                with contextlib.suppress(AgentRuntimeError):  # it has succeeded, or its caller has ended
                    await runner.resume(run.run_id)

    async def _discard_children(self) -> None:
        async with self.process() as runner:
            for run in await runner.runs(limit=100):
                if run.parent_run_id is not None:
                    await runner.discard(run.run_id)

    async def _discard(self, which: int) -> None:
        await self._with_run(which, lambda runner, run_id: runner.discard(run_id))

    async def _cancel(self, which: int) -> None:
        await self._with_run(which, lambda runner, run_id: runner.cancel(run_id))

    async def _vacuum(self, status: str) -> None:
        await self._with_run(0, lambda runner, _: runner.vacuum({status: 0}))

    async def _codec(self) -> None:
        """Encryption is switched on; later the key is rotated, and the contents are encrypted again."""
        if CODECS[self.codec] is BOTH:
            async with self.process() as runner:
                await reencrypt(runner)
        self.codec = min(self.codec + 1, len(CODECS) - 1)


async def _ended(working: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError, AgentRuntimeError):
        async with asyncio.timeout(30):
            await working
