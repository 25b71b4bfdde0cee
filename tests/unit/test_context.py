"""What an agent does through its context: steps, events, checkpoints, recorded chance, waits and children."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import enum
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from agent_runtime_core import waits
from agent_runtime_core.errors import (
    InvalidArgument,
    JournalMismatch,
    NotSupported,
    PortalMisuse,
    RunFailed,
    StepCancelledError,
    StepExecutionError,
    StepInDoubt,
    StorageBusy,
    StorageFull,
    UnserialisableResult,
    WaitTimeout,
)
from agent_runtime_core.events import SQLiteEventBus
from agent_runtime_core.interfaces import ErrorInfo, EventType, LLMResponse, RunContext, RunResult, Tool, ToolRegistry
from agent_runtime_core.keyed import keyed_steps
from agent_runtime_core.ledger import BUSY_TRIES
from agent_runtime_core.persistence import Conversation, PersistenceManager, Task, TaskState
from agent_runtime_core.portal import from_thread
from agent_runtime_core.queue import SQLiteQueue, memory
from agent_runtime_core.runner import AgentRunner, open_run
from agent_runtime_core.state import SQLiteStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Happened, Step, StepExecutor
from agent_runtime_core.steps.model import ReadOnlyState
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.waits import Waits
from tests.bars import work_in
from tests.unit.rig import Rig, Script, soon, until


class Size(enum.Enum):
    SMALL = "s"


@dataclass
class Box:
    size: Size
    weight: float


async def twice(rig: Rig, body: Any, run_id: str = "r", **options: Any) -> tuple[Any, Any]:
    """What the body returns in a life that fails right after it, and in the next one."""
    made: list[Any] = []

    async def run(ctx: Any) -> Any:
        made.append(await body(ctx))
        if len(made) == 1:
            raise ConnectionError("cut")
        return made[-1]

    await rig.go(run, run_id, **options)
    assert made, await rig.go(run, run_id, **options)
    await rig.value(run, run_id, **options)
    return made[0], made[1]


# -- ctx.step


async def test_a_step_is_run_once_and_answered_from_its_record(place: Path | None) -> None:
    calls: list[int] = []

    async def add(a: int, b: int) -> int:
        calls.append(a)
        return a + b

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.step("add", add, n, 1) for n in range(3)]

        assert await twice(rig, body) == ([1, 2, 3], [1, 2, 3])
        assert calls == [0, 1, 2]


async def test_types_follow_the_annotation_or_returns(place: Path | None) -> None:
    def box() -> Box:
        return Box(Size.SMALL, 1.5)

    def plain() -> Any:
        return Box(Size.SMALL, 2.5)

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return [
                await ctx.step("box", box),
                await ctx.step("plain", plain, returns=Box),
                await ctx.step("none", lambda: None),
                await ctx.step("tuple", lambda: (1, {2})),
            ]

        expected = [Box(Size.SMALL, 1.5), Box(Size.SMALL, 2.5), None, (1, {2})]
        made = await twice_values(rig, body)
        assert made == (expected, expected)


async def twice_values(rig: Rig, body: Any) -> tuple[Any, Any]:
    """`twice` for values that are not the run's output."""
    made: list[Any] = []

    async def run(ctx: Any) -> None:
        made.append(await body(ctx))
        if len(made) == 1:
            raise ConnectionError("cut")

    await rig.go(run)
    await rig.value(run)
    return made[0], made[1]


async def test_the_context_is_put_where_a_step_asks_for_it() -> None:
    async def middle(a: int, ctx: RunContext, b: int) -> list[Any]:
        await ctx.emit("inside", {})
        return [a, ctx.step_id is not None, b]

    def plain(ctx: RunContext) -> str:
        from_thread(ctx.emit, "inside", {})
        return str(ctx.run_id)

    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            assert await ctx.step("middle", middle, 1, 2) == [1, True, 2]
            assert await ctx.step("plain", plain) == str(ctx.run_id)
            with pytest.raises(InvalidArgument, match=r"needs 1 argument"):
                await ctx.step("short", middle)

        await rig.value(body)
        assert len(await rig.told("inside")) == 2


async def test_another_name_at_a_recorded_place_is_refused(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def first(ctx: Any) -> None:
            await ctx.step("a", lambda: 1)
            await ctx.step("b", lambda: 2)
            raise ConnectionError

        await rig.go(first)

        async def other(ctx: Any) -> None:
            await ctx.step("a", lambda: 1)
            with pytest.raises(JournalMismatch, match=r"'b'.*'x'") as caught:
                await ctx.step("x", lambda: 2)
            assert (caught.value.recorded, caught.value.found) == ("b", "x")
            raise ConnectionError

        await rig.go(other)

        async def order(ctx: Any) -> None:
            with pytest.raises(JournalMismatch) as caught:
                await ctx.step("b", lambda: 2)
            assert (caught.value.recorded, caught.value.found) == ("a", "b")
            raise ConnectionError

        await rig.go(order)

        async def renamed(ctx: Any) -> Any:
            await ctx.step("a", lambda: 1)
            ctx.renamed("b", "x")
            return await ctx.step("x", lambda: 9)

        assert await rig.value(renamed) == 2


async def test_a_renamed_step_in_doubt_keeps_its_key(place: Path | None) -> None:
    inside = asyncio.Event()
    keys: list[Any] = []

    async def hangs(ctx: RunContext) -> None:
        keys.append(ctx.idempotency_key)
        inside.set()
        await asyncio.Event().wait()

    async def done(ctx: RunContext) -> None:
        keys.append(ctx.idempotency_key)

    async with Rig(place) as rig:
        await rig.cut(lambda ctx: ctx.step("pay", hangs), inside)

        async def body(ctx: Any) -> Any:
            ctx.renamed("pay", "charge")
            await ctx.step("charge", done)

        await rig.value(body)
        assert keys[0] == keys[1]


async def test_other_arguments_use_the_record_and_say_so(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def first(ctx: Any) -> None:
            await ctx.step("a", lambda n: n, 1)
            raise ConnectionError

        await rig.go(first)

        async def strict(ctx: Any) -> None:
            with pytest.raises(JournalMismatch, match="other arguments"):
                await ctx.step("a", lambda n: n, 2, on_changed_input="raise")
            raise ConnectionError

        await rig.go(strict)
        assert await rig.value(lambda ctx: ctx.step("a", lambda n: n, 2)) == 1
        skipped = await rig.told("step.skipped")
        assert [payload["input_changed"] for _, payload in skipped] == [True]


class SideBySide:
    """Steps of one name without keys, each in a task of its own, that are asked for one after the other."""

    def __init__(self, within: bool) -> None:
        self.within = within

    async def __call__(self, ctx: Any, *order: int, answer: bool = True) -> Any:
        gates = {n: asyncio.Event() for n in order}

        async def one(n: int) -> Any:
            await gates[n].wait()
            try:
                return await ctx.step("p", lambda n: n * 10, n)
            finally:
                for after in order[order.index(n) + 1 :][:1]:
                    gates[after].set()

        async def all_of_them() -> list[Any]:
            gates[order[0]].set()
            values = await asyncio.gather(*(one(n) for n in sorted(order)), return_exceptions=True)
            for value in values:
                if isinstance(value, BaseException):
                    raise value
            if not answer:
                raise ConnectionError
            return values

        return await (ctx.step("around", all_of_them) if self.within else all_of_them())


@pytest.mark.parametrize("within", [False, True], ids=["between", "within"])
async def test_steps_of_one_name_that_ran_at_once_without_keys_answer_in_the_same_order_only(
    place: Path | None, within: bool
) -> None:
    steps = SideBySide(within)
    async with Rig(place) as rig:
        await rig.go(lambda ctx: steps(ctx, 0, 1, 2, answer=False))
        result = await rig.go(lambda ctx: steps(ctx, 2, 1, 0))
        assert result.error is not None
        assert "key=str(i)" in result.error.message
        assert result.error.type == "JournalMismatch"
        assert await rig.value(lambda ctx: steps(ctx, 0, 1, 2)) == [0, 10, 20]


async def test_one_that_ran_at_once_with_one_in_doubt_answers_for_none_of_other_arguments(place: Path | None) -> None:
    inside = asyncio.Event()

    async def work(n: int) -> int:
        if n == 1 and not inside.is_set():
            inside.set()
            await asyncio.Event().wait()
        return n * 10

    async def body(ctx: Any, *order: int) -> list[int]:
        return list(await asyncio.gather(*(ctx.step("p", work, n) for n in order)))

    async with Rig(place) as rig:
        await rig.cut(lambda ctx: body(ctx, 0, 1), inside)
        result = await rig.go(lambda ctx: body(ctx, 1, 0))
        assert result.error is not None
        assert result.error.type == "JournalMismatch"


async def test_the_only_step_of_its_name_answers_for_other_arguments_beside_others_too(place: Path | None) -> None:
    steps = SideBySide(within=False)
    async with Rig(place) as rig:
        await rig.go(lambda ctx: steps(ctx, 1, answer=False))
        assert await rig.value(lambda ctx: steps(ctx, 2)) == [10]
        assert [payload["input_changed"] for _, payload in await rig.told("step.skipped")] == [True]


async def test_arguments_without_a_json_form_stay_out_of_the_digest() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.step("a", lambda thing, n: n, object(), 1)

        assert await twice(rig, body) == (1, 1)
        assert await rig.told("step.skipped") == []


async def test_steps_side_by_side_are_known_by_their_keys(place: Path | None) -> None:
    order = iter([[2, 0, 1], [0, 1, 2]])
    calls: list[int] = []

    async def item(n: int) -> int:
        calls.append(n)
        return n * 10

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            values = await asyncio.gather(*(ctx.step("item", item, n, key=str(n)) for n in next(order)))
            return sorted(values)

        assert await twice(rig, body) == ([0, 10, 20], [0, 10, 20])
        assert sorted(calls) == [0, 1, 2]


@pytest.mark.parametrize("inside", [(), ("one", "two"), ("one",)], ids=["between steps", "in two steps", "in one"])
async def test_a_keyed_step_asked_for_by_two_tasks_at_once_is_done_once(
    place: Path | None, inside: tuple[str, ...]
) -> None:
    calls: list[int] = []

    async def work(n: int) -> int:
        calls.append(n)
        await asyncio.sleep(0)
        return n

    async def body(ctx: Any) -> Any:
        async def asked() -> Any:
            return await ctx.step("work", work, 1, key="k")

        parts = [ctx.step(name, asked) for name in inside]
        return await asyncio.gather(*parts, *(asked() for _ in range(2 - len(parts))))

    async with Rig(place) as rig:
        assert await twice(rig, body) == ([1, 1], [1, 1])
        assert calls == [1]
        done = [record.key for record in await rig.records() if (record.kind, record.name) == ("done", "work")]
        assert done == ["k:k"]
        told = [kind for kind, about in await rig.told("step.") if about["step_name"] == "work"]
        assert told == ["step.started", "step.completed"]


async def test_steps_of_other_names_side_by_side_need_no_keys(place: Path | None) -> None:
    turn = iter([1, 0])

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            slow = next(turn)

            async def step(n: int) -> int:
                for _ in range(20 if n == slow else 1):
                    await asyncio.sleep(0)
                return n

            values = await asyncio.gather(ctx.step("left", step, 0), ctx.step("right", step, 1))
            return [*values, await ctx.step("after", step, 2)]

        assert await twice(rig, body) == ([0, 1, 2], [0, 1, 2])


async def test_steps_of_tasks_side_by_side_may_come_in_another_order(place: Path | None) -> None:
    """No two of them are in flight at once, in either life."""
    turn = iter([{"left": 1, "right": 2}, {"left": 2, "right": 1}, {"left": 1, "right": 2}])

    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            sooner = asyncio.Event()
            order = next(turn)

            async def branch(name: str) -> list[str]:
                if order[name] == 2:
                    await sooner.wait()
                values = [await ctx.step(name, same, name), await ctx.step(f"{name} again", same, name)]
                sooner.set()
                return values

            values = await asyncio.gather(branch("left"), branch("right"))
            return [*values, await ctx.step("after", same, "after")]

        values = [["left", "left"], ["right", "right"], "after"]
        assert await twice(rig, body) == (values, values)


async def test_what_follows_steps_side_by_side_keeps_its_place(place: Path | None) -> None:
    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any, last: str = "end") -> None:
            await asyncio.gather(ctx.step("left", same, "l"), ctx.step("right", same, "r"))
            await ctx.step(last, same, "e")
            raise ConnectionError("cut")

        async def changed(ctx: Any) -> None:
            with pytest.raises(JournalMismatch) as caught:
                await body(ctx, "finish")
            assert (caught.value.recorded, caught.value.found) == ("end", "finish")

        await rig.go(body)
        await rig.value(changed)


async def test_a_step_that_failed_beside_others_is_tried_afresh(place: Path | None) -> None:
    """Another task goes on before the run hears of the failure: that is not the caller who went on without the step."""
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            failed = asyncio.Event()

            async def left() -> str:
                try:
                    return str(await ctx.step("left", flaky))
                finally:
                    failed.set()

            async def right() -> str:
                await failed.wait()
                return str(await ctx.step("right", same, "r"))

            values = await asyncio.gather(left(), right(), return_exceptions=True)
            for value in values:
                if isinstance(value, Exception):
                    raise value
            return values

        await rig.go(body)
        assert await rig.value(body) == ["up", "r"]
        assert len(tries) == 2


@pytest.mark.parametrize("beside", ["step", "list", "graph", "map", "now", "sleep", "signal", "call", "model"])
async def test_a_step_that_failed_is_tried_afresh_whatever_comes_beside_it(place: Path | None, beside: str) -> None:
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async def one(*_: Any) -> int:
        return 1

    async def other(ctx: Any) -> Any:
        match beside:
            case "step":
                return await ctx.step("other", one)
            case "list":
                return await StepExecutor(ctx).run([Step("other", one)])
            case "graph":
                return await StepExecutor(ctx).run([Step("other", one), Step("last", one, depends_on=["other"])])
            case "map":
                return await StepExecutor(ctx).map("other", one, [1])
            case "now":
                return await ctx.now()
            case "sleep":
                return await ctx.sleep(0.01)
            case "signal":
                return await ctx.wait_for_signal("go")
            case "call":
                return await ctx.call(Script(body_of_child, "child"), {})
            case _:
                return await keyed_steps(ctx).perform("model", "turn", lambda attempt: one())

    async def body_of_child(ctx: Any) -> Any:
        return 1

    async def body(ctx: Any) -> Any:
        failed = asyncio.Event()

        async def fails() -> Any:
            try:
                return await ctx.step("a", flaky)
            finally:
                failed.set()

        async def follows() -> Any:
            await failed.wait()
            return (
                keyed_steps(ctx).recorded("model", "turn") if len(tries) > 1 and beside == "model" else await other(ctx)
            )

        value, _ = await asyncio.gather(fails(), follows())
        return value

    async with Rig(place, max_retries=3, retry_backoff_base=0) as rig:
        await rig.runner.submit("script", run_id="r")
        await rig.runner.signal("r", "go")
        assert await rig.value(body) == "up"
        assert len(tries) == 2


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("gave_up", [False, True])
async def test_a_transaction_whose_outcome_was_not_heard_is_done_once_in_all_tries_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gave_up: bool, landed: bool
) -> None:
    tries: list[int] = []

    def pay(conn: Any) -> str:
        conn.execute("CREATE TABLE IF NOT EXISTS paid (n)")
        conn.execute("INSERT INTO paid VALUES (1)")
        return f"paid in try {len(tries)}"

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            tries.append(len(tries))
            try:
                return await ctx.transaction("pay", pay)
            except asyncio.CancelledError:
                raise TimeoutError from None  # as a `timeout` of the step makes of it

        return await ctx.step("outer", outer, retries=2, retry_delay=0)

    async with Rig(tmp_path / "runs.db") as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def unheard(guard: Any, ops: Any) -> Any:
            if len(tries) == 1 and any(op.name == "journal.transact" for op in ops):
                if landed:
                    await commit(guard, ops)
                raise asyncio.CancelledError if gave_up else StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", unheard)
        assert await rig.value(body) == f"paid in try {1 if landed else 2}"
        assert [record.name for record in await rig.records() if record.kind == "done"] == ["pay", "outer"]
        numbers = [event.sequence for event in await rig.runner.event_bus.get_events("r")]
        assert numbers == list(range(len(numbers)))
        with contextlib.closing(sqlite3.connect(tmp_path / "runs.db")) as db:
            assert db.execute("SELECT count(*) FROM paid").fetchone() == (1,)


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_step_whose_commit_was_not_answered_runs_again_only_if_it_did_not_land(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, inside: bool, key: str | None, landed: bool
) -> None:
    sent: list[str] = []
    all_there, crash = asyncio.Event(), True

    async def body(ctx: Any) -> Any:
        async def send(what: str) -> str:
            sent.append(what)
            return f"{what} {len(sent)}"

        async def both() -> list[str]:
            return [await ctx.step("send", send, what, key=key and f"{key}{what}") for what in ("a", "b")]

        if inside:
            both_sent = await ctx.step("both", both, retries=2, retry_delay=0)
        else:
            try:
                both_sent = await both()
            except StorageBusy:
                both_sent = [f"a {1}", await ctx.step("send", send, "b", key=key and f"{key}b")]
        if crash:
            all_there.set()
            await asyncio.Event().wait()
        return [both_sent, await ctx.step("send", send, "c", key=key and f"{key}c")]

    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def unheard(guard: Any, ops: Any) -> Any:
            if any(op.name == "journal.append" and op.args[1][7] == '"b 2"' for op in ops):
                if landed:
                    await commit(guard, ops)
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", unheard)
        await rig.cut(body, all_there)
        crash = False
        again = [] if landed else ["b"]
        assert await rig.value(body) == [["a 1", "b 2" if landed else "b 3"], f"c {3 + len(again)}"]
        assert sent == ["a", "b", *again, "c"]


@pytest.mark.parametrize("inside", [False, True])
async def test_a_message_whose_wait_gave_up_when_it_was_recorded_goes_to_the_next_wait_alone(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    seen: list[list[int]] = []
    all_there = asyncio.Event()
    given_up = 0

    async def body(ctx: Any) -> Any:
        async def collect() -> list[int]:
            got: list[int] = []
            while len(got) < 2:
                with contextlib.suppress(TimeoutError):
                    got.append(await bounded(ctx.wait_for_signal("go")))
            seen.append(got)
            if len(seen) == 1:
                all_there.set()
                await asyncio.Event().wait()
            return got

        return await (ctx.step("collect", collect) if inside else collect())

    async def bounded(wait: Any) -> Any:
        try:
            return await wait
        except asyncio.CancelledError:
            if given_up == 1 and not seen:
                raise TimeoutError from None  # as `asyncio.timeout` makes of it
            raise

    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def late(guard: Any, ops: Any) -> Any:
            nonlocal given_up
            results = await commit(guard, ops)
            if not given_up and any(
                op.name == "journal.append" and op.args[1][1:3] == ("done", "signal:go") for op in ops
            ):
                given_up = 1
                raise asyncio.CancelledError
            return results

        monkeypatch.setattr(engine, "commit", late)
        await rig.runner.submit("script", run_id="r")
        for number in range(3):
            await rig.runner.signal("r", "go", number)
        await rig.cut(body, all_there)
        assert await rig.value(body) == [0, 1]
        assert seen == [[0, 1], [0, 1]]


async def test_a_wait_goes_on_in_the_next_try_of_its_step(place: Path | None) -> None:
    clock, tries, limits = VirtualClock(), list[float](), list[asyncio.Timeout]()

    async def body(ctx: Any) -> Any:
        async def limited(wait: Awaitable[Any]) -> None:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                await wait

        async def patient() -> Any:
            tries.append(clock.wall())
            if len(tries) < 3:
                await limited(ctx.approve("go"))
            await ctx.approve("go", timeout=50)
            if len(tries) < 5:
                await limited(ctx.sleep(100))
            await ctx.sleep(100)
            return clock.wall() - tries[0]

        return await ctx.step("patient", patient, retries=9, retry_delay=0)

    async with Rig(place, clock) as rig:

        async def give_up(number: int, wait: str) -> None:
            await soon(lambda: len(limits) == number)
            while not any(record.name == wait for record in await rig.records()):  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.001)
            limits[-1].reschedule(asyncio.get_running_loop().time() + 0.02)
            await soon(lambda: len(tries) == number + 1)

        running = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        await give_up(1, "signal:go")
        await give_up(2, "signal:go")
        await rig.runner.approve("r", "go")
        await give_up(3, "sleep")
        await give_up(4, "sleep")
        clock.advance(100)
        async with asyncio.timeout(10):
            assert await running == 100
        assert len(await rig.told("approval.requested")) == 1


async def test_a_wait_is_over_though_the_clock_moved_while_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, look, moves = VirtualClock(), Waits._look, [100.0]

    async def looked(waits: Waits) -> None:
        await look(waits)
        asked = clock.wall

        def wall() -> float:  # next it is worked out how long to sleep
            clock.wall = asked  # type: ignore[method-assign]
            if moves:
                asyncio.get_running_loop().call_soon(clock.advance, moves.pop())
            return asked()

        clock.wall = wall  # type: ignore[method-assign]

    monkeypatch.setattr(Waits, "_look", looked)

    async def body(ctx: Any) -> float:
        began = clock.boot()
        await ctx.sleep(100)
        return clock.boot() - began

    async with Rig(None, clock) as rig, asyncio.timeout(10):
        assert await rig.value(body) == 100


async def test_a_step_that_a_failed_try_left_behind_answers_for_the_next_try(place: Path | None) -> None:
    ran, tries, go = list[str](), list[int](), asyncio.Event()

    async def body(ctx: Any) -> Any:
        async def slow(name: str) -> str:
            ran.append(name)
            await go.wait()
            return name

        async def fails_once() -> None:
            tries.append(1)
            while not ran:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if len(tries) == 1:
                raise ValueError("down")
            go.set()

        async def chain() -> list[str]:
            return [await ctx.step("slow", slow, "first"), await ctx.step("slow", slow, "second")]

        async def both() -> Any:
            return (await asyncio.gather(chain(), ctx.step("key", slow, "key", key="k"), fails_once()))[0]

        return await ctx.step("both", both, retries=1, retry_delay=0)

    async with Rig(place) as rig, asyncio.timeout(10):
        assert await rig.value(body) == ["first", "second"]
        assert sorted(ran) == ["first", "key", "second"]
        done = [(each.name, each.key) for each in await rig.records() if each.kind == "done"]
        assert len(done) == len(set(done)) == 4


@pytest.mark.parametrize("kind", ["list", "graph", "map", "keyed map"])
async def test_a_list_that_a_failed_try_left_behind_answers_for_the_next_try(place: Path | None, kind: str) -> None:
    ran, tries, go = list[str](), list[int](), asyncio.Event()

    async def body(ctx: Any) -> Any:
        async def slow(name: str) -> str:
            ran.append(name)
            await go.wait()
            return name

        def step(name: str, *before: str) -> Step:
            return Step(name, lambda ctx, state: slow(name), depends_on=before if kind == "graph" else ())

        async def all_of_them() -> list[Any]:
            if kind.endswith("map"):
                key = None if kind == "map" else str
                return await StepExecutor(ctx).map("each", slow, ["a", "b"], key=key)
            return list((await StepExecutor(ctx).run([step("a"), step("b", "a")])).values())

        async def fails_once() -> None:
            tries.append(1)
            while not ran:  # noqa: ASYNC110
                await asyncio.sleep(0)
            if len(tries) == 1:
                raise ValueError("down")
            go.set()

        async def both() -> Any:
            return (await asyncio.gather(all_of_them(), fails_once()))[0]

        return await ctx.step("both", both, retries=1, retry_delay=0)

    async with Rig(place) as rig, asyncio.timeout(10):
        assert await rig.value(body) == ["a", "b"]
        assert sorted(ran) == ["a", "b"]
        done = [(each.name, each.key) for each in await rig.records() if each.kind == "done"]
        assert len(done) == len(set(done)) == 3


@pytest.mark.parametrize("kind", ["signal", "approval", "child", "sleep"])
async def test_a_wait_that_a_failed_try_left_behind_answers_for_the_next_try(place: Path | None, kind: str) -> None:
    clock, tries = VirtualClock(), list[int]()

    async def body(ctx: Any) -> Any:
        async def fails_once() -> None:
            await asyncio.sleep(0.02)
            tries.append(1)
            if len(tries) == 1:
                raise ValueError("down")

        async def waits() -> Any:
            if kind == "child":
                return (await ctx.call("other", {})).final_output["value"]
            if kind == "sleep":
                return await ctx.sleep(50)
            return await (ctx.wait_for_signal("go") if kind == "signal" else ctx.approve("go"))

        async def both() -> Any:
            return (await asyncio.gather(waits(), fails_once()))[0]

        return await ctx.step("both", both, retries=1, retry_delay=0)

    async def other(ctx: Any) -> Any:
        return await ctx.wait_for_signal("go")

    async with Rig(place, clock) as rig:
        rig.register(other, "other")
        running = asyncio.ensure_future(rig.value(body))
        await soon(lambda: len(tries) == 2)
        runs = await rig.runner.runs()
        await rig.runner.signal(
            next(run.run_id for run in runs if (run.agent_key == "other") == (kind == "child")), "go", 1
        )
        clock.advance(50)
        async with asyncio.timeout(10):
            assert await running == (None if kind == "sleep" else 1)
        done = [(each.name, each.key) for each in await rig.records() if each.kind == "done"]
        assert len(done) == len(set(done)) == 2
        assert len(await rig.told("approval.requested")) == (kind == "approval")


@pytest.mark.parametrize("instead", ["list", "graph", "map", "now"])
async def test_a_step_that_was_gone_on_without_fails_again_whatever_came_instead(
    place: Path | None, instead: str
) -> None:
    tries: list[str] = []

    def flaky() -> None:
        tries.append("flaky")
        raise ConnectionError("down")

    async def one(*_: Any) -> int:
        return 1

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError):
            await ctx.step("a", flaky)
        match instead:
            case "list":
                await StepExecutor(ctx).run([Step("other", one)])
            case "graph":
                await StepExecutor(ctx).run([Step("other", one), Step("last", one, depends_on=["other"])])
            case "map":
                await StepExecutor(ctx).map("other", one, [1])
            case _:
                await ctx.now()
        return await ctx.step("b", one)

    async with Rig(place) as rig:
        cut = ConnectionError("cut")

        async def cut_off(ctx: Any) -> Any:
            await body(ctx)
            raise cut

        await rig.go(cut_off)
        assert await rig.value(body) == 1
        assert tries == ["flaky"]


async def test_a_step_that_failed_in_a_task_of_its_own_and_was_gone_on_without_fails_again(place: Path | None) -> None:
    """As under `asyncio.wait_for`, which makes a task of what it is given before Python 3.12."""
    tries: list[str] = []

    async def flaky() -> str:
        tries.append("flaky")
        if len(tries) == 1:
            raise ConnectionError("down")
        return "up"

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            try:
                value = await asyncio.ensure_future(ctx.step("left", flaky))
            except StepExecutionError:
                value = "without"
            value += await ctx.step("after", lambda: " it")
            if tries == ["flaky"] and not once:
                once.append(True)
                raise ConnectionError("cut")
            return value

        once: list[bool] = []
        await rig.go(body)
        assert await rig.value(body) == "without it"
        assert tries == ["flaky"]


async def test_a_step_within_a_step_is_recorded_too(place: Path | None) -> None:
    calls: list[str] = []

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            async def inner() -> str:
                calls.append("inner")
                return "I"

            async def outer() -> str:
                calls.append("outer")
                value = await ctx.step("inner", inner)
                if calls.count("outer") == 1:
                    raise ConnectionError
                return f"{value}O"

            return await ctx.step("outer", outer)

        await rig.go(body)
        assert await rig.value(body) == "IO"
        assert calls == ["outer", "inner", "outer"]


async def test_what_is_recorded_inside_a_step_answers_for_its_next_try(place: Path | None) -> None:
    calls: list[str] = []

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            seen: list[Any] = []

            async def inner() -> str:
                calls.append("inner")
                return "I"

            async def outer() -> list[Any]:
                calls.append("outer")
                await ctx.sleep(5)
                seen.append([await ctx.step("inner", inner), await ctx.step("inner", inner), await ctx.random()])
                if place is not None:
                    await ctx.transaction("note", lambda conn: calls.append("note"))
                if len(seen) < 3:
                    raise ConnectionError("again")
                return seen

            return await ctx.step("outer", outer, retries=2, retry_delay=0)

        first, second, third = await rig.value(body)
        assert first == second == third
        assert [calls.count(name) for name in ("outer", "inner", "note")] == [3, 2, 0 if place is None else 1]
        assert rig.clock.boot() == 5
        done = [(record.name, record.key) for record in await rig.records() if record.kind == "done"]
        assert len(set(done)) == len(done)


async def test_what_failed_inside_a_step_is_tried_again_with_it(place: Path | None) -> None:
    children: list[str] = []

    async with Rig(place) as rig:

        async def child(ctx: Any) -> str:
            children.append(str(ctx.run_id))
            if len(children) == 1:
                raise ConnectionError("down")
            return "up"

        rig.register(child, "child")

        async def body(ctx: Any) -> Any:
            async def outer() -> Any:
                return (await ctx.call("child", {})).final_output["value"]

            value = await ctx.step("outer", outer, retries=1, retry_delay=0)
            late: list[Any] = []

            async def patient() -> Any:
                try:
                    return await ctx.wait_for_signal("go", timeout=5)
                except WaitTimeout:
                    late.append(rig.clock.boot())
                    raise

            with pytest.raises(StepExecutionError):
                await ctx.step("patient", patient, retries=1, retry_delay=0)
            return [value, late]

        assert await rig.value(body) == ["up", [5, 10]]
        assert len(set(children)) == 2


async def test_a_wait_that_was_late_is_late_again_whatever_its_limit_is_now(place: Path | None) -> None:
    limits = iter([5.0, None])

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(WaitTimeout) as late:
                await ctx.wait_for_signal("go", timeout=next(limits))
            return str(late.value)

        assert await twice(rig, body) == ("no signal go came within 5 s", "no signal go came in time")


async def test_what_happens_inside_a_recorded_step_answers_for_no_other_step(place: Path | None) -> None:
    lives = 0

    async def same(value: str) -> str:
        return value

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            nonlocal lives
            lives += 1

            async def part(name: str) -> list[Any]:
                if name == "second" and lives == 1:
                    raise ConnectionError
                before = rig.clock.wall()
                await ctx.sleep(5)
                slept = rig.clock.wall() - before
                return [slept, await ctx.step("inner", same, name), await ctx.random()]

            return [await ctx.step(name, part, name) for name in ("first", "second")]

        await rig.go(body)
        first, second = await rig.value(body)
        assert first[:2] == [5, "first"]
        assert second[:2] == [5, "second"]
        assert first[2] != second[2]


async def test_a_step_fails_with_its_attempts_and_is_retried(place: Path | None) -> None:
    left = [2]

    def flaky() -> str:
        if left[0]:
            left[0] -= 1
            raise ConnectionError("down")
        return "up"

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            assert await ctx.step("flaky", flaky, retries=2, retry_delay=5, description="try hard") == "up"
            left[0] = 9
            with pytest.raises(StepExecutionError, match="down") as caught:
                await ctx.step("gone", flaky, retries=1, retry_delay=0)
            assert caught.value.attempts == 2
            with pytest.raises(StepExecutionError, match="timed out"):
                await ctx.step("slow", asyncio.Event().wait, timeout=0.01)

        await rig.value(body)
        assert rig.clock.boot() == 10
        started = await rig.told("step.started")
        assert started[0][1]["description"] == "try hard"
        assert started[0][1]["total_steps"] is None
        assert await rig.told("progress") == []


async def test_a_step_of_a_cancelled_run_does_not_begin() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            assert not ctx.is_cancelled()
            ctx.place.cancelled = True
            assert (ctx.cancelled(), ctx.is_cancelled()) == (True, True)
            with pytest.raises(StepCancelledError):
                await ctx.step("a", lambda: 1)

        assert (await rig.go(body)).status == "cancelled"


async def test_a_step_in_doubt_follows_its_policy(place: Path | None) -> None:
    async def hangs(inside: asyncio.Event) -> None:
        inside.set()
        await asyncio.Event().wait()

    answers: list[Any] = []
    async with Rig(place) as rig:
        for policy in ("retry", "fail", lambda: Happened("known")):
            run_id = f"r{len(answers)}"
            inside = asyncio.Event()
            await rig.cut(lambda ctx, inside=inside: ctx.step("a", hangs, inside), inside, run_id)  # type: ignore[misc]

            async def body(ctx: Any, policy: Any = policy) -> Any:
                try:
                    return await ctx.step("a", lambda: "again", on_in_doubt=policy)
                except StepInDoubt:
                    return "doubt"

            answers.append(await rig.value(body, run_id))
    assert answers == ["again", "doubt", "known"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("", str), "not ''"),
        ((3, str), "not 3"),
        (("a", "str"), "not 'str'"),
        (("a", "str"), r": pass the function and its arguments, as in ctx\.step\('fetch', fetch, 1\)"),
    ],
)
async def test_a_bad_step_is_named(arguments: Any, said: str) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=said):
                await ctx.step(*arguments)

        await rig.value(body)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": -2}, "not -2"),
        ({"timeout": 0}, "not 0"),
        ({"retries": 1, "retry_delay": "x"}, "'x'"),
        ({"on_in_doubt": "hope"}, "not 'hope'"),
        ({"on_changed_input": "shrug"}, "not 'shrug'"),
    ],
)
async def test_a_bad_option_of_a_step_is_named(options: dict[str, Any], said: str) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=said):
                await ctx.step("a", str, **options)
            with pytest.raises(InvalidArgument, match="not '' and 'b'"):
                ctx.renamed("", "b")

        await rig.value(body)


async def test_a_result_without_a_json_form_is_refused_and_not_retried() -> None:
    calls: list[int] = []

    def bad() -> Any:
        calls.append(1)
        return [float("nan")]

    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(UnserialisableResult, match=r"\$\[0\]"):
                await ctx.step("a", bad, retries=5)

        await rig.value(body)
        assert calls == [1]


# -- dicts of this library

CALLS = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]


async def test_the_tool_calls_of_an_answer_are_stored_as_plain_dicts(place: Path | None) -> None:
    told = {"role": "assistant", "content": None, "tool_calls": CALLS}

    async with Rig(place) as rig:

        async def body(ctx: Any) -> RunResult:
            calls = LLMResponse(told).tool_calls
            message = {**told, "tool_calls": calls}
            assert types_in(await ctx.step("asked", lambda: calls)) == {list, dict, str}
            await ctx.emit("asked", message)
            await ctx.checkpoint(message)
            return RunResult({"calls": calls}, [message])

        assert (await rig.go(body)).error is None
        recorded = await rig.go(body)
        kept = await rig.runner.state_store.get_checkpoint("r")
        event = next(each for each in await rig.runner.event_bus.get_events("r") if each.event_type == "asked")
        for stored in (recorded.final_messages[0], kept, event.payload):
            assert stored == told
            assert types_in(stored) == {list, dict, str, type(None)}


def types_in(value: Any) -> set[type]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return {type(value)}.union(*map(types_in, inside))


# -- Enums and models


class Mood(str, enum.Enum):  # noqa: UP042 - as older code has them
    GLAD = "glad"


async def test_an_enum_is_told_and_kept_as_its_value(place: Path | None) -> None:
    told = {"own": TaskState.COMPLETE, "users": [Mood.GLAD], Mood.GLAD: 1}
    plain = {"own": "complete", "users": ["glad"], "glad": 1}

    async with Rig(place) as rig:

        async def body(ctx: Any) -> RunResult:
            assert [ctx.input["said"], ctx.metadata, types_in(ctx.input["said"])] == [plain, plain, types_in(plain)]
            await ctx.emit("told", told)
            await ctx.checkpoint(told)
            results = await StepExecutor(ctx).run(
                [Step("a", lambda ctx, state: state["said"])], initial_state={"said": told}
            )
            assert types_in(results["a"]) == types_in(plain)
            return RunResult(told)

        for _ in range(2):
            result = await rig.go(body, input_data={"said": told}, metadata=told)
            assert (result.error, result.final_output) == (None, plain)
        assert types_in(result.final_output) == types_in(plain)
        event = next(each for each in await rig.runner.event_bus.get_events("r") if each.event_type == "told")
        for stored in (event.payload, await rig.runner.state_store.get_checkpoint("r")):
            assert (stored, types_in(stored)) == (plain, types_in(plain))
    async with PersistenceManager.open("memory://") as manager:
        await manager.memory.set("told", told)
        assert types_in(await manager.memory.get("told")) == types_in(plain)


async def test_of_a_step_comes_back_what_it_gave_or_the_reason_why_not(place: Path | None) -> None:
    given = [
        TaskState.COMPLETE,
        ErrorInfo("E", "m"),
        Task(name="x", state=TaskState.CANCELLED),
        Conversation(title="t"),
    ]

    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            own = await ctx.step("own", lambda: given)
            with pytest.raises(UnserialisableResult, match=r"\$\[0\].* register_type\(Mood\)"):
                await ctx.step("users", lambda: [Mood.GLAD])
            return own

        assert await twice_values(rig, body) == (given, given)


# -- recorded time and chance


async def test_now_random_and_uuid_are_the_same_again(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            values = [await ctx.now(), await ctx.random(), await ctx.uuid4(), await ctx.now(), await ctx.random()]
            rig.clock.random.random()
            getattr(rig.clock, "advance")(60)  # noqa: B009
            await ctx.step("a", lambda: 1)
            return values

        first, second = await twice_values(rig, body)
        assert first == second
        now, chance, uid, later, another = first
        assert isinstance(now, dt.datetime)
        assert now.tzinfo is not None
        assert now == later
        assert 0 <= chance < 1
        assert chance != another
        assert isinstance(uid, UUID)
        assert uid.version == 4
        assert await rig.told("step.skipped") == []


# -- events and checkpoints


async def test_what_was_emitted_is_absorbed_while_replaying(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            await ctx.emit("one", {"n": 1})
            await ctx.step("a", lambda: 1)
            await ctx.emit("two", {"n": 2})
            await ctx.step("b", lambda: 1)
            await ctx.emit(EventType.ASSISTANT_MESSAGE, {"content": "3"})
            return ctx.attempt

        await twice(rig, body)
        told = [kind for kind, _ in await rig.told()]
        assert told.count("one") == 1
        assert told.count("two") == 1
        assert told.index("one") < told.index("step.started") < told.index("two")


@pytest.mark.parametrize("before", ["now", "sleep", "list", "step", "nothing"])
async def test_what_is_emitted_last_comes_once_however_the_run_was_cut(place: Path | None, before: str) -> None:
    async with Rig(place) as rig:
        inside = asyncio.Event()

        async def body(ctx: Any) -> None:
            match before:
                case "now":
                    await ctx.now()
                case "sleep":
                    await ctx.sleep(1)
                case "list":
                    await StepExecutor(ctx).run([Step(name, lambda ctx, state: 1) for name in "ab"])
                case "step":
                    await ctx.step("a", lambda: 1)
            await ctx.emit("after", {})
            if not inside.is_set():
                inside.set()
                await asyncio.Event().wait()

        await rig.cut(body, inside)
        await rig.value(body)
        assert len(await rig.told("after")) == 1


async def test_what_was_not_emitted_before_the_cut_is_emitted_after_it(place: Path | None) -> None:
    async with Rig(place) as rig:
        lives: list[int] = []

        async def body(ctx: Any) -> None:
            async def outer() -> None:
                await ctx.step("inner", lambda: 1)

            lives.append(1)
            await ctx.step("outer", outer)
            if len(lives) == 1:
                raise ConnectionError
            await ctx.emit("after", {})

        await rig.go(body)
        await rig.value(body)
        assert len(await rig.told("after")) == 1


async def test_a_failure_the_code_went_on_without_is_as_recorded_as_a_result(place: Path | None) -> None:
    calls: list[str] = []

    def step(name: str, fails: bool = False) -> Any:
        def fn() -> str:
            calls.append(name)
            if fails:
                raise ValueError(f"{name} failed")
            return name

        return fn

    async with Rig(place) as rig:

        def body(last: bool) -> Any:
            async def run(ctx: Any) -> Any:
                with pytest.raises(
                    StepExecutionError, match=r"step 'try' failed after 2 attempt.*try failed"
                ) as caught:
                    await ctx.step("try", step("try", len(calls) < 2), retries=1, retry_delay=0)
                assert caught.value.attempts == 2
                await ctx.step("instead", step("instead"))
                return await ctx.step("last", step("last", not last))

            return run

        await rig.go(body(False))
        assert calls == ["try", "try", "instead", "last"]
        assert await rig.value(body(True)) == "last"
        assert calls == ["try", "try", "instead", "last", "last"]


async def test_a_failure_that_ended_the_attempt_is_tried_afresh(place: Path | None) -> None:
    calls: list[int] = []

    def fn() -> int:
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError
        return len(calls)

    async with Rig(place, max_retries=3) as rig:
        assert await rig.value(lambda ctx: ctx.step("a", fn)) == 3


async def test_events_of_a_step_carry_its_ids_and_come_again_with_each_try() -> None:
    left = [1]

    async def step(ctx: RunContext) -> None:
        await ctx.emit("inside", {"n": 1})
        if left[0]:
            left[0] -= 1
            raise ConnectionError

    async with Rig() as rig:
        await rig.value(lambda ctx: ctx.step("a", step, retries=1, retry_delay=0))
        events = [e for e in await rig.runner.event_bus.get_events("r") if e.event_type == "inside"]
        assert len(events) == 2
        assert all(set(e.payload) == {"n", "step_id", "trace_id"} for e in events)


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [("", {}, "not ''"), (3, {}, "not 3"), ("own", [1], "a dict, not list"), ("own", "text", "a dict, not str")],
)
async def test_what_is_no_event_is_refused(place: Path | None, kind: Any, payload: Any, said: str) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            for inside in (False, True):

                async def tells() -> None:
                    with pytest.raises(InvalidArgument, match=said):
                        await ctx.emit(kind, payload)

                await (ctx.step("step", tells) if inside else tells())
            with pytest.raises(InvalidArgument, match="not 'soon'"):
                await ctx.wait_for_signal("go", timeout="soon")

        await rig.value(body)
        assert await rig.told("own") == []


async def test_a_checkpoint_is_kept_told_and_read_again(place: Path | None) -> None:
    async with Rig(place) as rig:
        states: list[Any] = []

        async def body(ctx: Any) -> None:
            states.append(await ctx.get_state())
            state = {"done": [1], "t": (1, 2)}
            await ctx.checkpoint(state)
            state["done"].append(2)  # type: ignore[attr-defined]
            states.append(await ctx.get_state())
            with pytest.raises(InvalidArgument, match=r"not list: \[1\]"):
                await ctx.checkpoint([1])
            if len(states) == 2:
                raise ConnectionError

        await rig.go(body)
        await rig.value(body)
        assert states == [None, *[{"done": [1], "t": (1, 2)}] * 3]
        told = await rig.told("state.checkpoint")
        assert told[0] == ("state.checkpoint", {"state": {"done": [1], "t": (1, 2)}})


async def test_an_event_without_a_json_form_is_refused() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(UnserialisableResult, match="bad"):
                await ctx.emit("a", {"bad": object()})
            await ctx.emit("empty")

        await rig.value(body)
        assert await rig.told("empty") == [("empty", {})]


# -- what a context shows


async def test_a_context_shows_its_run(place: Path | None) -> None:
    conversation = UUID(int=5)
    async with Rig(place) as rig:

        async def body(ctx: Any) -> None:
            assert ctx.run_key == "r"
            assert ctx.trace_id == ctx.run_id.hex
            assert ctx.input_messages == [{"role": "user"}]
            assert ctx.params == {"p": 1, "q": 2}
            assert ctx.conversation_id == conversation
            assert ctx.metadata == {"m": 1}
            assert ctx.attempt == 1
            assert (ctx.step_id, ctx.idempotency_key) == (None, None)

        given = {"messages": [{"role": "user"}], "params": {"p": 0, "q": 2}, "conversation_id": conversation}
        await rig.value(body, input_data=given, metadata={"m": 1}, params={"p": 1})

        async def bare(ctx: Any) -> None:
            assert (ctx.input_messages, ctx.params, ctx.conversation_id) == ([], {}, None)

        await rig.value(bare, "bare", input_data={"messages": None, "conversation_id": None})


async def test_tools_are_the_agents_own_or_else_the_runners() -> None:
    def mine() -> None:
        """Mine."""

    class Armed(Script):
        tools = ToolRegistry()

    Armed.tools.register(Tool.from_function(mine))
    seen: list[Any] = []

    async def body(ctx: Any) -> None:
        assert ctx.tools is ctx.tool_registry
        seen.append(ctx.tools)

    async with Rig() as rig:
        shared = rig.runner.tools
        await rig.runner.execute(Script(body))
        await rig.runner.execute(Armed(body))
        empty = Armed(body)
        empty.tools = ToolRegistry()
        await rig.runner.execute(empty)
        assert seen == [shared, Armed.tools, empty.tools]


# -- transactions


async def test_a_transaction_commits_with_its_record(tmp_path: Path) -> None:
    def pay(conn: Any, amount: int) -> int:
        conn.execute("CREATE TABLE IF NOT EXISTS money (amount INTEGER)")
        conn.execute("INSERT INTO money VALUES (?)", (amount,))
        conn.executemany("INSERT INTO money VALUES (?)", [(1,)])
        return int(conn.execute("SELECT sum(amount) FROM money").fetchone()[0])

    def fails(conn: Any) -> None:
        conn.execute("INSERT INTO money VALUES (1000)")
        raise ValueError("no")

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.transaction("pay", pay, 5), await ctx.transaction("again", pay, 0)]

        assert await twice(rig, body) == ([6, 7], [6, 7])

        async def failing(ctx: Any) -> int:
            with pytest.raises(StepExecutionError, match="no"):
                await ctx.transaction("fails", fails)
            return int(await ctx.transaction("pay", pay, 0))

        assert await rig.value(failing, "other") == 8


@pytest.mark.parametrize(
    "sql",
    ["DELETE FROM arc_journal", "SELECT * FROM arc_runs", "COMMIT", "PRAGMA journal_mode", "ATTACH ':memory:' AS x",
     "SAVEPOINT mine", "CREATE TEMP TABLE mine (x)", "CREATE TABLE temp.mine (x)", "CREATE TEMP VIEW mine AS SELECT 1",
     "CREATE TEMP TRIGGER mine INSERT ON money BEGIN SELECT 1; END",
     "CREATE VIRTUAL TABLE temp.mine USING fts5(x)"],
)  # fmt: skip
async def test_a_transaction_stays_off_our_tables_and_controls(tmp_path: Path, sql: str) -> None:
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            await ctx.transaction("money", lambda conn: bool(conn.execute("CREATE TABLE money (amount)")))
            with pytest.raises(StepExecutionError, match=r"not authorized|prohibited"):
                await ctx.transaction("t", lambda conn: conn.execute(sql).fetchall())
            assert await ctx.step("after", lambda: 1) == 1

        await rig.value(body)


async def test_a_transaction_may_change_tables_of_its_own(tmp_path: Path) -> None:
    def alter(conn: Any) -> int:
        conn.execute("CREATE TABLE money (amount)")
        conn.execute("ALTER TABLE money RENAME TO cash")
        conn.execute("ALTER TABLE cash ADD COLUMN note")
        conn.execute("ALTER TABLE cash DROP COLUMN amount")
        return int(conn.execute("SELECT count(*) FROM cash").fetchone()[0])

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.transaction("alter", alter)

        assert await rig.value(body) == 0


async def test_a_transaction_is_stopped_after_its_time(tmp_path: Path) -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"

    class Ticking(VirtualClock):
        def boot(self) -> float:
            self.advance(0.05)
            return super().boot()

    async with Rig(tmp_path / "a.db", Ticking(), lease_ttl_seconds=1e6, run_timeout_seconds=1e6) as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match="interrupted"):
                await ctx.transaction("t", lambda conn: conn.execute(endless).fetchone())

        await rig.value(body)


MANY = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 9) SELECT i, name FROM n, sqlite_master"


def first_of_many(conn: Any) -> Any:
    return conn.execute(MANY).fetchone()[0]


def fails_half_way(conn: Any) -> None:
    rows = conn.execute(MANY)
    raise ValueError(rows.fetchone())


def hands_out_its_rows(conn: Any) -> Any:
    return conn.execute(MANY)


@pytest.mark.parametrize("fn", [fails_half_way, hands_out_its_rows])
async def test_rows_that_a_transaction_did_not_read_hold_up_no_later_commit(tmp_path: Path, fn: Any) -> None:
    other = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises((StepExecutionError, UnserialisableResult)) as kept:
                await ctx.transaction("t", fn)
            other.execute("CREATE TABLE IF NOT EXISTS theirs (n)")  # as another process commits
            assert await ctx.step("after", lambda: 1) == 1, f"while {kept.value!r} is kept"
            return int(await ctx.transaction("again", first_of_many))

        assert await rig.value(body) == 1
    other.close()


@pytest.mark.parametrize(
    "end", [SystemExit("no more"), asyncio.CancelledError(), GeneratorExit()], ids=["exit", "cancelled", "closed"]
)
async def test_what_ends_a_program_in_a_transaction_is_its_callers_as_in_a_step(
    tmp_path: Path, end: BaseException
) -> None:
    def leaves(conn: Any) -> None:
        conn.execute("CREATE TABLE half (n)")
        raise end

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> int:
            with pytest.raises(type(end)):
                await ctx.transaction("t", leaves)
            return int(await ctx.transaction("after", first_of_many))

        assert await rig.value(body) == 1
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as conn:
        assert not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'half'").fetchall()


def twice_the_same(conn: Any, after: str) -> None:
    conn.execute("CREATE TABLE once (n INTEGER PRIMARY KEY ON CONFLICT ROLLBACK)")
    conn.execute("CREATE TABLE notes (n)")
    conn.execute("INSERT INTO once VALUES (1)")
    if after == "nothing caught":
        conn.execute("INSERT INTO once VALUES (1)")
    with contextlib.suppress(sqlite3.IntegrityError):
        conn.execute("INSERT INTO once VALUES (1)")
    if after == "another error":
        raise ValueError("rolled back")
    if after == "writes":
        conn.execute("CREATE TABLE alone (n)")


@pytest.mark.parametrize("after", ["nothing", "nothing caught", "another error", "writes"])
async def test_what_comes_after_a_rollback_by_sqlite_does_not_stand_alone(tmp_path: Path, after: str) -> None:
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(StepExecutionError, match=r"rolled back|UNIQUE"):
                await ctx.transaction("t", twice_the_same, after)
            assert await ctx.step("after", lambda: 1) == 1

        await rig.value(body)
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as conn:
        left = conn.execute("SELECT name FROM sqlite_master WHERE name IN ('once', 'notes', 'alone')").fetchall()
    assert left == []


async def test_a_transaction_needs_sqlite_and_a_plain_function(tmp_path: Path) -> None:
    async def later(conn: Any) -> None: ...

    async with Rig() as rig:

        async def memory(ctx: Any) -> None:
            with pytest.raises(NotSupported, match="SQLite"):
                await ctx.transaction("t", lambda conn: 1)

        await rig.value(memory)
    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match=r"'t'.*cannot be a coroutine"):
                await ctx.transaction("t", later)
            with pytest.raises(UnserialisableResult):
                await ctx.transaction("u", lambda conn: object())

        await rig.value(body)


# -- waits in place


async def test_a_sleep_is_not_begun_anew(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            await ctx.sleep(100)
            await ctx.sleep(0)
            return None

        await twice(rig, body)
        assert rig.clock.boot() == pytest.approx(100)


async def test_a_sleep_cut_short_goes_on_to_its_first_end(place: Path | None) -> None:
    clock = VirtualClock()
    async with Rig(place, clock, lease_ttl_seconds=1e6) as rig:

        async def body(ctx: Any) -> float:
            await ctx.sleep(100)
            return clock.boot()

        task = asyncio.ensure_future(rig.go(body))
        await clock.until_sleeping()
        clock.advance(60)
        task.cancel()
        await asyncio.wait({task})
        going = asyncio.ensure_future(rig.value(body))
        await clock.until_sleeping()
        assert clock.next_due == pytest.approx(40)
        clock.advance(40.1)
        assert await going == pytest.approx(100.1)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), "1", True, None, 1e12])
async def test_a_bad_sleep_is_named(seconds: Any) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match="not "):
                await ctx.sleep(seconds)

        await rig.value(body)


async def test_signals_come_in_order_each_once_and_stay_recorded(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            assert await rig.runner.signal("r", "go", {"n": 1}, message_id="one")
            assert await rig.runner.signal("r", "go", {"n": 1}, message_id="one")
            await rig.runner.signal("r", "other", "x", message_id="two")
            await rig.runner.signal("r", "go", {"n": 2}, message_id="three")
            return [
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("go"),
                await ctx.wait_for_signal("other"),
            ]

        assert await twice(rig, body) == ([{"n": 1}, {"n": 2}, "x"], [{"n": 1}, {"n": 2}, "x"])


async def test_the_work_of_a_signal_does_not_grow_with_the_signals_before_it() -> None:
    async def body(ctx: Any) -> Any:
        return [await ctx.wait_for_signal("go") for _ in range(ctx.input["signals"])]

    sent, heard = list[int](), list[int]()
    for signals in (25, 50):
        async with Rig() as rig:
            rig.register(body)
            run_id = await rig.runner.submit("script", {"signals": signals})
            with work_in(memory) as sending:
                for number in range(signals):
                    await rig.runner.signal(run_id, "go", number)
            with work_in(memory, waits) as hearing:
                await rig.runner.run_once()
            assert (await rig.runner.wait(run_id)).final_output["value"] == [*range(signals)]
            sent += sending
            heard += hearing
    assert 0 < sent[1] < 2.2 * sent[0], sent
    assert 0 < heard[1] < 2.2 * heard[0], heard


async def test_a_message_whose_wait_was_not_recorded_keeps_its_turn(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Rig(place) as rig:
        engine = rig.runner.queue.commits
        commit, refused = engine.commit, list[Any]()

        async def full(guard: Any, ops: Any) -> Any:
            if not refused and any(op.name == "journal.append" and "signal:go" in op.args[1] for op in ops):
                refused.append(ops)
                raise StorageFull("no room")
            return await commit(guard, ops)

        async def body(ctx: Any) -> Any:
            for number in range(3):
                await rig.runner.signal("r", "go", number)
            monkeypatch.setattr(engine, "commit", full)
            with pytest.raises(StorageFull):
                await ctx.wait_for_signal("go")
            return [await ctx.wait_for_signal("go") for _ in range(3)]

        assert await rig.value(body) == [0, 1, 2]


async def test_a_signal_that_does_not_come_times_out_each_time_again(place: Path | None) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(WaitTimeout, match="no signal go came within 30 s"):
                await ctx.wait_for_signal("go", timeout=30)
            return rig.clock.boot()

        first, second = await twice(rig, body)
        assert first == pytest.approx(30, abs=1)
        assert second == pytest.approx(first)


@pytest.mark.parametrize(("name", "timeout"), [("", None), (7, None), ("a", -1), ("a", float("nan")), ("a", 1e12)])
async def test_a_bad_wait_is_named(name: Any, timeout: Any) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(InvalidArgument, match="not "):
                await ctx.wait_for_signal(name, timeout=timeout)

        await rig.value(body)


@pytest.mark.parametrize("given_up", [False, True])
async def test_a_message_that_comes_while_several_waits_look_is_heard(
    place: Path | None, given_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, read, looks = asyncio.Event(), asyncio.Event(), list[int]()

    async def body(ctx: Any) -> Any:
        async def other() -> Any:
            async with asyncio.timeout(None) as limit:
                limits.append(limit)
                return await ctx.wait_for_signal("other")

        return (await asyncio.gather(ctx.wait_for_signal("first"), other(), return_exceptions=True))[0]

    async with Rig(place, VirtualClock()) as rig:
        limits = list[asyncio.Timeout]()
        mail = rig.runner.queue.mail

        async def slow(*about: Any) -> Any:
            looks.append(1)
            found = await mail(*about)
            if len(looks) == 1:
                reading.set()
                await read.wait()
            elif len(looks) == 2 and given_up:
                limits[0].reschedule(0)
                await asyncio.sleep(60)
            return found

        monkeypatch.setattr(rig.runner.queue, "mail", slow)
        running = asyncio.ensure_future(rig.value(body))
        await until(reading)
        await rig.runner.signal("r", "first", 1)
        held = next(iter(rig.runner.heart._held.values()))
        await soon(held.place.mail.is_set)
        read.set()
        await soon(lambda: len(looks) > 2)
        await rig.runner.signal("r", "other", 2)
        async with asyncio.timeout(10):
            assert await running == 1


async def test_an_approval_beside_other_code_is_asked_for_though_records_lie_ahead(place: Path | None) -> None:
    lives, recorded, asked = list[int](), asyncio.Event(), asyncio.Event()

    async def body(ctx: Any) -> Any:
        lives.append(1)

        async def fetched() -> None:
            if len(lives) > 1:
                await asked.wait()  # it comes to its record later than it did in the first life
            await ctx.step("sum", int)
            recorded.set()

        async def released() -> Any:
            if len(lives) == 1:
                await asyncio.sleep(60)
            return await ctx.approve("go", {"what": "all"})

        answer, _ = await asyncio.gather(released(), fetched())
        return answer

    async with Rig(place, VirtualClock()) as rig:
        await rig.cut(body, recorded)
        running = asyncio.ensure_future(rig.value(body))
        async with asyncio.timeout(10):
            while not await rig.told("approval.requested"):  # noqa: ASYNC110 - nobody rings for it
                await asyncio.sleep(0.001)
        asked.set()
        await rig.runner.approve("r", "go", "yes")
        assert await running == "yes"
        assert len(await rig.told("approval.requested")) == 1


async def test_an_approval_asks_once_and_its_answer_fits(place: Path | None) -> None:
    schema = {"type": "object", "required": ["ok"], "properties": {"ok": {"type": "boolean"}}}
    async with Rig(place) as rig:

        async def body(ctx: Any) -> Any:
            return await ctx.approve("deploy", {"what": "all"}, schema=schema)

        going = asyncio.ensure_future(rig.value(body))
        await rig.begun()
        async for event in rig.runner.stream("r"):
            if event.event_type == "approval.requested":
                told = {"name": "deploy", "details": {"what": "all"}, "schema": schema}
                assert event.payload == {**told, "request_id": event.payload["request_id"]}
                with pytest.raises(InvalidArgument, match=r"\$ lacks 'ok'"):
                    await rig.runner.approve("r", "deploy", {})
                with pytest.raises(InvalidArgument, match=r"\$\.ok is str"):
                    await rig.runner.approve("r", "deploy", {"ok": "yes"})
                assert await rig.runner.approve("r", "deploy", {"ok": True})
                break
        assert await going == {"ok": True}
        assert not await rig.runner.approve("r", "deploy", {"ok": True})


# -- children


async def test_a_child_runs_once_and_its_result_is_recorded(place: Path | None) -> None:
    ran: list[Any] = []

    async def child(ctx: Any) -> RunResult:
        ran.append(ctx.params["n"])
        return RunResult({"twice": ctx.params["n"] * 2}, usage={"tokens": 1})

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> Any:
            one = await ctx.call("child", {"params": {"n": 1}})
            two = await ctx.call(Script(child, "child"), {"params": {"n": 2}}, key="second")
            assert one.usage == {"tokens": 1}
            assert one.status == "succeeded"
            return [one.final_output["twice"], two.final_output["twice"], str(one.run_id)]

        first, second = await twice(rig, body)
        assert first == second
        assert first[:2] == [2, 4]
        assert ran == [1, 2]
        info = await rig.runner.get_run(first[2])
        parent = await rig.runner.get_run("r")
        assert info.parent_run_id == parent.run_id


async def test_a_child_that_fails_raises(place: Path | None) -> None:
    async def child(ctx: Any) -> None:
        raise ValueError("bad child")

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> None:
            with pytest.raises(RunFailed, match="bad child"):
                await ctx.call("child", {})

        await rig.value(body)


async def test_a_child_cut_off_is_joined_again(place: Path | None) -> None:
    inside = asyncio.Event()
    lives: list[int] = []

    async def child(ctx: Any) -> int:
        lives.append(1)
        await ctx.step("once", lambda: None)
        if len(lives) == 1:
            inside.set()
            await asyncio.Event().wait()
        return len(lives)

    async with Rig(place) as rig:
        rig.register(child, "child")

        async def body(ctx: Any) -> Any:
            return (await ctx.call("child", {})).final_output["value"]

        await rig.cut(body, inside)
        assert await rig.value(body) == 2
        assert len(await rig.runner.runs(agent="child")) == 1


# -- beside


async def test_from_thread_works_only_inside_a_plain_step_function() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            with pytest.raises(PortalMisuse, match="plain step function"):
                from_thread(ctx.emit, "x", {})

            def plain() -> Any:
                from_thread(ctx.emit, "x", {"n": 1})
                return from_thread(lambda: 5)

            assert await ctx.step("plain", plain) == 5

        await rig.value(body)
        assert await rig.told("x") != []


async def test_a_sealed_context_never_returns_and_writes_nothing() -> None:
    async with Rig() as rig:
        kept: list[Any] = []

        async def body(ctx: Any) -> None:
            kept.append(ctx)

        await rig.value(body)
        ctx = kept[0]
        before = len(await rig.told())
        late = [
            asyncio.ensure_future(each)
            for each in (
                ctx.emit("late", {}), ctx.checkpoint({}), ctx.get_state(), ctx.step("a", str), ctx.now(), ctx.random(),
                ctx.uuid4(), ctx.sleep(0), ctx.wait_for_signal("a"), ctx.approve("a"), ctx.call("a", {}),
                ctx.transaction("t", str), StepExecutor(ctx).run([Step("a", lambda ctx, state: None)]),
            )
        ]  # fmt: skip
        for _ in range(20):
            await asyncio.sleep(0)
        for task in late[:-1]:
            assert not task.done()
        for task in late:
            task.cancel()
        await asyncio.wait(late)
        assert len(await rig.told()) == before


def test_read_only_state_refuses_every_change() -> None:
    state = ReadOnlyState({"a": 1}, {"r": 2})
    assert (state["a"], state.results["r"]) == (1, 2)
    changes: list[Callable[[], Any]] = [
        lambda: state.__setitem__("a", 2),
        lambda: state.__delitem__("a"),
        lambda: state.__ior__({"b": 1}),
        state.clear,
        lambda: state.pop("a"),
        state.popitem,
        lambda: state.setdefault("b", 1),
        lambda: state.update(b=1),
    ]
    for change in changes:
        with pytest.raises(InvalidArgument, match="read-only"):
            change()
    assert state == {"a": 1}


async def test_the_loop_is_free_while_a_run_waits() -> None:
    async with Rig(None, VirtualClock()) as rig:
        task = asyncio.ensure_future(rig.go(lambda ctx: ctx.wait_for_signal("go")))
        await asyncio.sleep(0.01)
        assert not task.done()
        await rig.runner.signal("r", "go", 1)
        await soon(task.done)
        assert task.result().final_output == {"value": 1}


async def test_a_users_own_sql_error_fails_the_step_with_its_cause(tmp_path: Path) -> None:
    def twice(conn: Any) -> None:
        conn.execute("CREATE TABLE IF NOT EXISTS mine (id INTEGER PRIMARY KEY)")
        conn.execute("INSERT INTO mine VALUES (1)")
        conn.execute("INSERT INTO mine VALUES (1)")

    async with open_run(tmp_path / "runs.db", "r") as ctx:
        with pytest.raises(StepExecutionError, match="UNIQUE") as caught:
            await ctx.transaction("twice", twice)
        assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
        assert await ctx.transaction("count", lambda conn: conn.execute("SELECT 1").fetchone()[0]) == 1


async def test_a_run_whose_first_transaction_fails_has_told_that_it_started(tmp_path: Path) -> None:
    def bad(conn: Any) -> None:
        raise ValueError("no")

    async with Rig(tmp_path / "a.db") as rig:

        async def body(ctx: Any) -> str:
            with pytest.raises(StepExecutionError):
                await ctx.transaction("t", bad)
            return "went on"

        assert await rig.value(body) == "went on"
        kinds = [kind for kind, _ in await rig.told()]
        assert kinds == ["run.started", "step.failed", "run.succeeded"]


async def test_trace_sinks_hear_of_a_transaction_as_of_a_step(tmp_path: Path) -> None:
    heard: list[tuple[str, Any]] = []

    async def body(ctx: Any) -> Any:
        ctx.book.ledger.told = lambda kind, payload: heard.append((kind, payload.get("result")))
        return [await ctx.step("a", lambda: 1), await ctx.transaction("t", lambda conn: 2)]

    async with Rig(tmp_path / "a.db") as rig:
        assert await rig.value(body) == [1, 2]
        assert [kind for kind, _ in heard] == ["step.started", "step.completed", "step.completed", "run.succeeded"]
        del heard[:]
        assert await rig.value(body) == [1, 2]
        assert heard == []


@pytest.mark.parametrize("error", [StorageBusy("did not answer"), asyncio.CancelledError(), OSError("a bus of theirs")])
async def test_a_transaction_whose_event_was_not_published_is_done_once_and_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    done: list[str] = []
    errors = [error] * (1 + BUSY_TRIES if isinstance(error, StorageBusy) else 1)

    async def body(ctx: Any) -> Any:
        async def outer() -> Any:
            try:
                return await ctx.transaction("t", lambda conn: done.append("t"))
            except asyncio.CancelledError:
                raise TimeoutError from None  # as a `timeout` of the step makes of it

        return await ctx.step("outer", outer, retries=1, retry_delay=0)

    queue, state = SQLiteQueue(path=tmp_path / "a.db"), SQLiteStateStore(path=tmp_path / "a.db")
    bus = SQLiteEventBus(path=tmp_path / "events.db")
    commit = bus.commits.commit

    async def refusing(guard: Any, ops: Any) -> Any:
        if errors and done and any(op.name == "events.publish" for op in ops):
            raise errors.pop()
        return await commit(guard, ops)

    monkeypatch.setattr(bus.commits, "commit", refusing)
    async with AgentRunner(queue, bus, state) as runner:
        assert (await runner.execute(Script(body), "r")).status == RunStatus.SUCCEEDED
        assert done == ["t"]
        events = await bus.get_events("r")
        assert [e.payload["step_name"] for e in events if e.event_type == "step.completed"] == ["outer", "t"]


async def test_a_failed_transaction_fails_again_where_the_code_went_on_without_it(tmp_path: Path) -> None:
    tried: list[str] = []

    def bad(conn: Any) -> None:
        tried.append("t")
        raise ValueError("no")

    async with Rig(tmp_path / "a.db", max_retries=1) as rig:

        async def body(ctx: Any) -> str:
            try:
                await ctx.transaction("t", bad)
            except StepExecutionError:
                fallback: str = await ctx.step("b", lambda: "fallback")
            if len(tried) == 1:
                tried.append("again")
                raise RuntimeError("after the fallback")
            return fallback

        assert (await rig.go(body)).status == RunStatus.FAILED
        assert await rig.value(body) == "fallback"
        assert tried == ["t", "again"]


async def test_a_conversation_may_have_any_name(tmp_path: Path) -> None:
    async with Rig(tmp_path / "runs.db") as rig:
        ids = [
            await rig.value(_conversation_of, f"r{n}", input_data={"conversation_id": name})
            for n, name in enumerate(("support-7", "support-7", "support-8", "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce", 7))
        ]
        assert ids[0] == ids[1] != ids[2]
        assert ids[3] == "5bd5bb05-9e0c-4ac2-a1ba-9a2be0f8a1ce"
        assert len(set(ids)) == 4


async def test_an_empty_name_is_no_conversation(tmp_path: Path) -> None:
    """Else all who have none would share one."""
    async with Rig(tmp_path / "runs.db") as rig:
        assert await rig.value(_conversation_of, input_data={"conversation_id": ""}) == "None"


async def _conversation_of(ctx: Any) -> str:
    return str(ctx.conversation_id)


HALF = "half \ud83d"


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.step(HALF, lambda: 1),
        lambda ctx: ctx.step("a", lambda: 1, key=HALF),
        lambda ctx: ctx.emit(HALF, {}),
        lambda ctx: ctx.wait_for_signal(HALF),
        lambda ctx: StepExecutor(ctx).map(HALF, lambda item: item, [1]),
        lambda ctx: StepExecutor(ctx).map("m", lambda item: item, [1], key=lambda item: HALF),
        lambda ctx: StepExecutor(ctx).run([Step(HALF, lambda ctx, state: 1)]),
    ],
    ids=["step", "key", "event", "signal", "map", "key of an item", "list"],
)
async def test_a_name_that_no_store_keeps_is_refused_and_told(place: Path | None, ask: Any) -> None:
    async with Rig(place) as rig:

        async def body(ctx: Any) -> str:
            with pytest.raises(InvalidArgument, match=r"'half \\ud83d' holds half a character"):
                await ask(ctx)
            return str(await ctx.step("whole", lambda: "on it goes"))

        assert await rig.value(body) == "on it goes"


@dataclass
class Once:
    """Built the first time only: what is recorded of it cannot be read again."""

    made: list[int]

    def __post_init__(self) -> None:
        if self.made:
            raise ValueError("once only")
        self.made = [1]


async def test_a_result_that_cannot_be_read_again_is_no_result_of_its_step(place: Path | None) -> None:
    async def make() -> Once:
        return Once([])

    async with Rig(place) as rig:
        error = (await rig.go(lambda ctx: ctx.step("once", make))).error
        assert error is not None
        assert (error.type, "Once would not be built: ValueError: once only" in error.message) == (
            "UnserialisableResult", True,
        )  # fmt: skip
        assert [record.kind for record in await rig.records() if record.name == "once"][-1] == "failed"
