"""Limits of the agent loop over generated runs that are stopped anywhere, taken up again, and have children.

All runs are made once; each test looks at one thing that has to hold of every one of them.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from agent_runtime_core._execution.step import CURRENT_STEP
from agent_runtime_core._journal.record import Record
from agent_runtime_core.config import configure, reset_config
from agent_runtime_core.errors import AgentRuntimeError, LimitExceeded, RateLimited, RequestRefused
from agent_runtime_core.interfaces import LLMClient, LLMResponse, RunResult
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.loop import agent_tool, run_turn_loop
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing.clock import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.fault_runs import Agent, Store, drop, settings, store
from tests.support.scripted_model import Scripted, asks, call

#: The runs are made once for all of the tests, so one process of pytest-xdist gets them all.
pytestmark = pytest.mark.xdist_group("loop limits")

RUNS, MANY_RUNS = 200, 2000
ON_DISK = 20  # one in so many is on SQLite, half of those through open_run
INTERRUPTIONS = 5
LONGEST = 7  # turns after which a script answers
ANSWER = 40  # tokens an answer may have: what a call in doubt counts for depends on it
PRICE = {"input": 1000.0, "output": 4000.0}  # USD for a million tokens
MODEL = "scripted-1"
HELLO = [{"role": "user", "content": "hello"}]
CONFIG = settings(max_retries=30, park_after=0)
ENDED = (RunStatus.SUCCEEDED, RunStatus.FAILED, RunStatus.DEAD)


@dataclass
class Spent:
    """What the journals of a run and its children tell."""

    tokens: int = 0
    cost: float = 0.0
    #: Reserved for calls whose end nobody recorded.
    doubt_tokens: int = 0
    doubt_cost: float = 0.0
    dearest: float = 0.0
    #: Recorded calls of the model, by run.
    turns: Counter[str] = field(default_factory=Counter)

    def take(self, run: str, records: list[Record], now: tuple[str, str] | None) -> None:
        """Add a run's journal. `now` is the run and key of a call that is being made, and so in no doubt."""
        open_: dict[str, dict[str, Any]] = {}
        for record in records:
            if record.name != "model":
                continue
            if record.kind == "started":
                if record.key in open_:
                    self._doubt(open_[record.key])
                open_[record.key] = json.loads(record.info or "{}").get("reserve", {})
                continue
            open_.pop(record.key, None)
            if record.kind == "done":
                answer = json.loads(record.result or "{}")
                self.turns[run] += 1
                self.tokens += answer["usage"]["total_tokens"]
                cost = float(answer["cost_usd"])
                self.cost += cost
                self.dearest = max(self.dearest, cost)
        for key, reserve in open_.items():
            if (run, key) != now:
                self._doubt(reserve)

    def _doubt(self, reserve: dict[str, Any]) -> None:
        tokens = reserve.get("tokens", 0)
        cost = float(reserve.get("usd", tokens * PRICE["input"] / 1e6))
        self.doubt_tokens += tokens
        self.doubt_cost += cost
        self.dearest = max(self.dearest, cost)


class Run:
    """One generated run: its limits, its script, where it is stopped, and what was seen of it over all its lives."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.on_disk = seed % ON_DISK == 0
        self.door = "open" if self.on_disk and seed % (2 * ON_DISK) == 0 else random.choice(["here", "worker"])
        self.limits = RunLimits(
            max_turns=random.choice([None, None, random.randint(1, 6)]),
            max_tool_calls=random.choice([None, random.randint(0, 12)]),
            max_tokens=random.choice([None, random.randint(0, 3000)]),
            max_cost_usd=random.choice([None, round(random.uniform(0, 4), 3)]),
            count_estimates=seed % 2 == 1,
        )
        self.stops_often = random.choice([0.0, 0.05, 0.15, 0.4])
        self.path = Path()
        self.state: Any = None  # the store of journals
        self.runs: dict[str, str] = {}  # agents by run
        self.stopped = asyncio.Event()
        self.stopped_by = ""
        self.lives = 1
        self.interruptions: list[str] = []
        self.asked = 0
        #: Places of calls that ran a function or a child: (run, key).
        self.executed: set[tuple[str, str]] = set()
        self.wrong: list[str] = []
        self.result: RunResult | None = None
        self.children: list[RunResult] = []
        self.spent = Spent()
        self.again = 0  # calls made when the ended run was taken up once more
        self.tools = self._tools()
        self.helper = Agent("helper", self._helper)

    @property
    def doubtful(self) -> bool:
        return self.spent.doubt_tokens > 0

    @property
    def error(self) -> str:
        assert self.result is not None
        return "" if self.result.error is None else self.result.error.type

    # -- what it does

    def line(self, agent: str, task: str, turn: int) -> Any:
        """What the model says there: the same whenever it is asked again, but for its price."""
        random = Random(f"{self.seed}:{agent}:{task}:{turn}")
        if turn >= random.randint(2, LONGEST):
            return "that is all"
        if random.random() < 0.03:
            return RequestRefused("no such thing")
        calls = [self._call(random, agent, f"{task}.{turn}.{n}") for n in range(random.randint(0, 4))]
        return asks(*calls, content="on it") if calls else "done"

    def _call(self, random: Random, agent: str, place: str) -> dict[str, Any]:
        names = ["look", "look", "write", "boom", "nobody", "wrong", "cut"]
        name = random.choice([*names, "helper", "helper"] if agent == "parent" else names)
        match name:
            case "helper":
                return call(name, {"task": place}, place)
            case "wrong":
                return call("look", {"at": 7}, place)
            case "cut":
                return call("write", '{"at": "', place)
        return call(name, {"at": place}, place)

    def _tools(self) -> ToolRegistry:
        async def look(at: str) -> str:
            await self._work()
            return f"seen {at}"

        async def write(at: str) -> str:
            await self._work()
            return f"written {at}"

        async def boom(at: str) -> str:
            await self._work()
            raise ValueError(at)

        tools = ToolRegistry()
        for each, effects in ((look, False), (write, True), (boom, False)):
            tools.register(Tool.from_function(each, has_side_effects=effects))
        return tools

    async def _work(self) -> None:
        frame = CURRENT_STEP.get()
        assert frame is not None
        await self.maybe_stop(asyncio.CancelledError())
        self.executed.add((frame.token.run_id, frame.key))
        await self.maybe_stop(asyncio.CancelledError())

    async def maybe_stop(self, error: BaseException) -> None:
        """Now and then the end of this life."""
        if len(self.interruptions) >= INTERRUPTIONS or self.random.random() >= self.stops_often:
            return
        how = "raised" if self.door == "open" else self.random.choice(["raised", "cancelled", "gone"])
        self.interruptions.append(how)
        if how == "raised":
            raise error
        self.stopped_by = how
        self.stopped.set()
        await asyncio.get_running_loop().create_future()

    async def parent(self, ctx: Any) -> RunResult:
        self._met(ctx, "parent")
        tools = ToolRegistry()
        for tool in self.tools.list_tools():
            tools.register(tool)
        tools.register(agent_tool(self.helper))
        done = await run_turn_loop(ctx, _Model(self, "parent"), tools, max_tokens=ANSWER, limits=self.limits)
        return RunResult({"response": done.text}, done.messages, done.usage)

    async def _helper(self, ctx: Any) -> RunResult:
        self._met(ctx, "helper")
        own = Random(f"{self.seed}:own:{ctx.input_messages}")
        limits = own.choice([None, {"max_turns": 2}, {"max_tool_calls": 3}, {"max_tokens": 400}])
        done = await run_turn_loop(ctx, _Model(self, "helper"), self.tools, max_tokens=ANSWER, limits=limits)
        return RunResult({"response": done.text}, done.messages, done.usage)

    def _met(self, ctx: Any, agent: str) -> None:
        self.runs[str(ctx.run_id)] = agent
        self.state = ctx._writer.state

    # -- what is seen of it

    async def journals(self, now: tuple[str, str] | None) -> Spent:
        spent = Spent()
        for run in self.runs:
            spent.take(run, await self.state.records(run), now)
        return spent

    async def before_model(self) -> None:
        frame = CURRENT_STEP.get()
        assert frame is not None
        self.asked += 1
        run, limits = frame.token.run_id, self.limits
        spent = await self.journals((run, frame.key))
        doubt = " with estimates" if spent.doubt_tokens and limits.count_estimates else ""
        tokens, cost = spent.tokens, spent.cost
        if limits.count_estimates:
            tokens, cost = tokens + spent.doubt_tokens, cost + spent.doubt_cost
        if limits.max_tokens is not None and tokens >= limits.max_tokens:
            self.wrong.append(f"asked beyond max_tokens{doubt}: {spent} of {limits}")
        if limits.max_cost_usd is not None and cost >= limits.max_cost_usd + 1e-9:
            self.wrong.append(f"asked beyond max_cost_usd{doubt}: {spent} of {limits}")
        if limits.max_turns is not None and self.runs[run] == "parent" and spent.turns[run] >= limits.max_turns:
            self.wrong.append(f"asked beyond max_turns: {spent} of {limits}")

    def tool_calls_used(self) -> int:
        return len(self.executed) + sum(agent == "helper" for agent in self.runs.values())


class _Model(LLMClient):
    """Says what the run's script has at this place, for a price that differs each time."""

    default_model = MODEL

    def __init__(self, run: Run, agent: str) -> None:
        self._run, self._agent = run, agent

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        run = self._run
        await run.before_model()
        await run.maybe_stop(RateLimited("slow down"))
        turn = sum(message["role"] == "assistant" for message in messages)
        line = run.line(self._agent, messages[0]["content"], turn)
        prompt, completion = run.random.randint(10, 300), run.random.randint(1, ANSWER)
        await run.maybe_stop(asyncio.CancelledError())
        return await Scripted(line, tokens=(prompt, completion)).generate(messages)

    def stream(self, messages: list[Any], **options: Any) -> Any:
        raise NotImplementedError


# -- its lives


async def live(run: Run, path: Path) -> None:
    """Take the run up until it has ended, and look at what is left."""
    if run.door == "open":
        await _live_in_open_run(run, path)
        return
    async with store("sqlite" if run.on_disk else "memory", path, VirtualClock(seed=run.seed)) as here:
        here.agent("parent", run.parent)
        here.agents.register(run.helper)
        key, dead = f"run-{run.seed}", list[asyncio.Task[Any]]()
        runner = here.runner(CONFIG)
        if run.door == "worker":
            await runner.submit("parent", {"messages": HELLO}, run_id=key)
        try:
            while not await _one_life(run, runner, key, dead):
                run.lives += 1
                run.stopped.clear()
                runner = here.runner(CONFIG)
            run.result = await runner.wait(key)
            await _look_back(run, here, runner)
            if run.door == "here" and run.error == "LimitExceeded":
                before = run.asked + run.tool_calls_used()
                run.stops_often = 0.0
                await runner.execute("parent", key, {"messages": HELLO})
                run.again = run.asked + run.tool_calls_used() - before
        finally:
            for task in dead:
                task.cancel()
            if dead:
                await asyncio.wait(dead)


async def _one_life(run: Run, runner: AgentRunner, key: str, dead: list[asyncio.Task[Any]]) -> bool:
    """True when the run has ended in it."""
    begin: Callable[[], Awaitable[Any]] = (
        runner.run_once if run.door == "worker" else lambda: runner.execute("parent", key, {"messages": HELLO})
    )
    stop = asyncio.ensure_future(run.stopped.wait())
    try:
        while True:
            task: asyncio.Task[Any] = asyncio.ensure_future(begin())
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if run.stopped.is_set():
                break
            task.result()
            if (await runner.get_run(key)).status in ENDED:
                return True
    finally:
        stop.cancel()
    if run.stopped_by == "cancelled":
        task.cancel()
        await asyncio.wait({task})
        if run.door == "worker":
            await runner.close()  # hands back what it has
            run_clock(runner).advance(61)
        return False
    dead.append(task)
    for each in run.runs:
        await drop(runner, task, each)
    run_clock(runner).advance(61)
    return False


def run_clock(runner: AgentRunner) -> VirtualClock:
    clock = runner.queue.clock
    assert isinstance(clock, VirtualClock)
    return clock


async def _look_back(run: Run, here: Store, runner: AgentRunner) -> None:
    run.spent = await run.journals(None)
    for each, agent in run.runs.items():
        if agent == "helper" and (await runner.get_run(each)).status in ENDED:
            run.children.append(await runner.wait(each))


async def _live_in_open_run(run: Run, path: Path) -> None:
    where = path / "runs.db"
    while True:
        try:
            async with open_run(where, "r", input={"messages": HELLO}) as ctx:
                run.result = await run.parent(ctx)
                run.result.status = RunStatus.SUCCEEDED
            break
        except LimitExceeded as limit:
            run.result = cast("RunResult", limit.result)
            run.result.error = await _told_error(where)
            break
        except RequestRefused:
            run.result = RunResult(error=await _told_error(where))
            break
        except (RateLimited, asyncio.CancelledError):
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            run.lives += 1
    async with AgentRunner.open(where) as runner:
        run.state = runner.state_store
        run.spent = await run.journals(None)


async def _told_error(where: Path) -> Any:
    async with AgentRunner.open(where) as runner:
        return (await runner.wait("r")).error


async def _all(path: Path, count: int) -> list[Run]:
    runs = [Run(seed) for seed in range(count)]
    for run in runs:
        here = path / str(run.seed)
        if run.on_disk:
            here.mkdir()
        async with asyncio.timeout(20):
            try:
                await live(run, here)
            except AgentRuntimeError as error:
                run.wrong.append(f"broke: {type(error).__name__}: {error}")
                run.result = run.result or RunResult()
    return runs


@pytest.fixture(scope="module", params=[RUNS, pytest.param(MANY_RUNS, marks=pytest.mark.slow)])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Run]]:
    configure(model_prices={MODEL: PRICE})
    try:
        yield asyncio.run(_all(tmp_path_factory.mktemp("limits"), request.param))
    finally:
        reset_config()


def none(wrong: list[tuple[Run, Any]]) -> None:
    """Nothing is wrong, or the first few runs of which something is."""
    text = "\n".join(
        f"run {run.seed} ({run.door}, {run.interruptions}, {run.limits}): {what}" for run, what in wrong[:3]
    )
    assert not wrong, f"{len(wrong)} runs\n{text}"


# -- what holds of all of them


def test_they_are_what_this_is_about(runs: list[Run]) -> None:
    told = Counter(
        name
        for run in runs
        for name in ("max_turns", "max_tool_calls", "max_tokens", "max_cost_usd")
        if run.result and run.result.error and run.result.error.message.startswith(f"limit reached: {name}=")
    )
    assert min(told[name] for name in ("max_turns", "max_tool_calls", "max_tokens", "max_cost_usd")) >= 5, told
    assert sum(run.lives > 1 for run in runs) >= 40
    assert sum("helper" in run.runs.values() for run in runs) >= 60
    assert sum(run.doubtful for run in runs) >= 20
    stops = Counter(how for run in runs for how in run.interruptions)
    assert min(stops[how] for how in ("raised", "cancelled", "gone")) >= 20, stops
    assert {run.door for run in runs} == {"here", "worker", "open"}


def test_each_ends_with_an_answer_or_for_a_reason_that_is_its_own(runs: list[Run]) -> None:
    broken = [(run, what) for run in runs for what in run.wrong if what.startswith("broke")]
    none(broken)
    none([(run, run.result) for run in runs if run.error not in ("", "LimitExceeded", "RequestRefused", "Poisoned")])


@pytest.mark.parametrize("limit", ["max_tokens", "max_cost_usd", "max_turns"])
def test_no_call_of_the_model_is_begun_once_a_limit_is_reached(runs: list[Run], limit: str) -> None:
    none([(run, what) for run in runs for what in run.wrong if what.startswith(f"asked beyond {limit}:")])


@pytest.mark.parametrize("limit", ["max_tokens", "max_cost_usd"])
def test_estimates_count_against_a_limit_that_says_so(runs: list[Run], limit: str) -> None:
    assert sum(run.doubtful and run.limits.count_estimates for run in runs) >= 10
    none([(run, what) for run in runs for what in run.wrong if what.startswith(f"asked beyond {limit} with")])


def test_no_limit_is_reached_by_estimates_alone_unless_it_counts_them(runs: list[Run]) -> None:
    assert sum(run.doubtful and not run.limits.count_estimates for run in runs) >= 10
    wrong = []
    for run in runs:
        assert run.result is not None
        details = {} if run.result.error is None else run.result.error.details
        used = {"max_tokens": run.spent.tokens, "max_cost_usd": run.spent.cost}.get(details.get("limit", ""))
        if used is not None and not run.limits.count_estimates and used < details["allowed"] - 1e-9:
            wrong.append((run, f"{details}, but only {used} was reported"))
    none(wrong)


def test_no_more_turns_are_recorded_than_may_be(runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        for each, turns in run.spent.turns.items():
            if run.runs[each] == "parent" and run.limits.max_turns is not None and turns > run.limits.max_turns:
                wrong.append((run, turns))
    none(wrong)


def test_no_more_tools_are_run_than_may_be_children_and_theirs_included(runs: list[Run]) -> None:
    limited = [run for run in runs if run.limits.max_tool_calls is not None]
    none([(run, run.tool_calls_used()) for run in limited if run.tool_calls_used() > (run.limits.max_tool_calls or 0)])


def test_usd_overshoot_by_one_call_at_most(runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        most = run.limits.max_cost_usd
        estimated = run.spent.doubt_cost if run.limits.count_estimates else 0.0
        if most is not None and run.spent.cost + estimated > most + run.spent.dearest + 1e-9:
            wrong.append((run, run.spent))
    none(wrong)


def test_every_tool_call_of_the_final_messages_has_its_result(runs: list[Run]) -> None:
    wrong = []
    for run in runs:
        assert run.result is not None
        for result in (run.result, *run.children):
            if not in_pairs(result.final_messages):
                wrong.append((run, result.final_messages))
    none(wrong)


def in_pairs(messages: list[dict[str, Any]]) -> bool:
    """Whether the results of each turn's tool calls follow it, in its order."""
    wanted: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            if not wanted or message["tool_call_id"] != wanted.pop(0):
                return False
            continue
        if wanted:
            return False
        wanted = [each["id"] for each in message.get("tool_calls") or ()]
    return not wanted


@pytest.mark.parametrize("doubt", [False, True])
def test_the_usage_told_is_the_sum_of_what_was_recorded(runs: list[Run], doubt: bool) -> None:
    wrong = []
    for run in runs:
        # What a call in doubt was to cost is only on record where something limits it.
        priced = run.limits.max_tokens is not None or run.limits.max_cost_usd is not None
        if (
            run.error in ("RequestRefused", "Poisoned")
            or run.doubtful is not doubt
            or (run.interruptions and not priced)
        ):
            continue
        assert run.result is not None
        told, spent = run.result.usage, run.spent
        same_cost = abs(told.get("cost_usd", 0.0) - spent.cost) < 1e-6
        same_estimate = abs(told.get("estimated_cost_usd", 0.0) - spent.doubt_cost) < 1e-6
        tokens = (told.get("total_tokens", 0), told.get("estimated_tokens", 0))
        if tokens != (spent.tokens, spent.doubt_tokens) or not (same_cost and same_estimate):
            wrong.append((run, f"told {told}, recorded {spent}"))
    none(wrong)


def test_a_run_that_ended_at_a_limit_makes_no_call_when_it_is_taken_up_again(runs: list[Run]) -> None:
    assert sum(run.door == "here" and run.error == "LimitExceeded" for run in runs) >= 20
    none([(run, run.again) for run in runs if run.again])


# -- a parent and its child, one by one


class Pair:
    """A parent that asks a helper, both by a script, in one process."""

    def __init__(self, parent: Scripted, helper: Scripted, helpers: Any = None, *, handoff: bool = False) -> None:
        self.parent, self.helper, self.ran = parent, helper, list[str]()
        self.failures = 0  # times that the parent fails after its loop

        def look(at: str) -> str:
            self.ran.append(at)
            return f"seen {at}"

        tools = ToolRegistry()
        tools.register(Tool.from_function(look))

        async def help_(ctx: Any) -> RunResult:
            done = await run_turn_loop(ctx, self.helper, tools, limits=helpers)
            return RunResult({"response": done.text}, done.messages, done.usage)

        async def ask(ctx: Any) -> RunResult:
            all_ = ToolRegistry()
            all_.register(agent_tool(Agent("helper", help_), handoff=handoff))
            all_.register(tools.list_tools()[0])
            done = await run_turn_loop(ctx, self.parent, all_)
            if self.failures:
                self.failures -= 1
                raise ConnectionError("once more")
            return RunResult({"response": done.text}, done.messages, done.usage)

        self.agent = Agent("parent", ask)

    async def run(self, **limits: Any) -> RunResult:
        async with AgentRunner.open("memory://", config=settings()) as runner:
            return await runner.execute(self.agent, "p", {"messages": HELLO, "limits": limits})


def looks(*places: str) -> dict[str, Any]:
    return asks(*(call("look", {"at": place}, place) for place in places))


HELP = call("helper", {"task": "help"}, "h")
TURN = 120  # tokens of each scripted answer


@pytest.mark.parametrize("own", [{"max_turns": 1}, {"max_tool_calls": 1}, {"max_tokens": 100}, {"max_cost_usd": 0.05}])
async def test_a_child_at_a_limit_of_its_own_does_not_stop_its_parent(own: dict[str, Any]) -> None:
    helper = Scripted(looks("a"), looks("b"), cost=0.06)
    pair = Pair(
        Scripted(asks(HELP), "it could not", cost=0.1), helper, own | {"max_tokens": own.get("max_tokens", 9999)}
    )
    result = await pair.run(max_tokens=10_000, max_cost_usd=5, max_tool_calls=10)
    assert result.final_output == {"response": "it could not"}, result.error
    assert f"{next(iter(own))}=" in pair.parent.asked[1][-1]["content"]
    assert result.usage["total_tokens"] == TURN * (2 + len(helper.asked))
    assert result.usage["cost_usd"] == pytest.approx(0.2 + 0.06 * len(helper.asked))
    assert result.usage["tool_calls"] == 1 + len(pair.ran)


async def test_a_child_that_uses_up_the_tool_calls_leaves_its_parent_its_answer() -> None:
    pair = Pair(Scripted(asks(HELP), "that will do"), Scripted(looks("a", "b"), looks("c")))
    result = await pair.run(max_tool_calls=3)
    assert result.final_output == {"response": "that will do"}, result.error
    assert (sorted(pair.ran), result.usage["tool_calls"]) == (["a", "b"], 3)
    assert "limit reached: max_tool_calls=2" in pair.parent.asked[1][-1]["content"]


async def test_a_child_is_not_lent_what_the_calls_beside_it_need() -> None:
    beside = [call("look", {"at": "x"}, "x"), call("look", {"at": "y"}, "y")]
    pair = Pair(Scripted(asks(HELP, *beside), "done"), Scripted(looks("a"), looks("b"), looks("c"), "d"))
    result = await pair.run(max_tool_calls=4)
    assert len(pair.ran) + 1 <= 4, pair.ran
    assert sorted(pair.ran) == ["a", "x", "y"]
    assert result.usage["tool_calls"] == 4


async def test_a_child_that_failed_has_spent_what_it_spent() -> None:
    pair = Pair(Scripted(asks(HELP), "it failed"), Scripted(looks("a"), looks("b"), RequestRefused("no")))
    result = await pair.run(max_tokens=10_000)
    assert result.final_output == {"response": "it failed"}
    assert result.usage["total_tokens"] == 4 * TURN


async def test_what_a_child_has_spent_is_known_to_a_parent_that_is_taken_up_again() -> None:
    pair = Pair(Scripted(asks(HELP), "done"), Scripted(looks("a"), "b"))
    pair.failures = 2
    result = await pair.run(max_tokens=10_000)
    assert result.final_output == {"response": "done"}
    assert (len(pair.parent.asked), len(pair.helper.asked)) == (2, 2)
    assert (result.usage["total_tokens"], result.usage["tool_calls"]) == (4 * TURN, 2)


async def test_a_handoff_is_the_end_of_a_loop_that_is_taken_up_again_too() -> None:
    pair = Pair(Scripted(asks(HELP), "I was not to be asked"), Scripted("I take over"), handoff=True)
    pair.failures = 1
    result = await pair.run()
    assert result.final_output == {"response": "I take over"}
    assert (len(pair.parent.asked), len(pair.helper.asked)) == (1, 1)
    assert result.usage["total_tokens"] == 2 * TURN
