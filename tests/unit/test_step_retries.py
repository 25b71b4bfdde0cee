"""What one try of a step leaves behind, and what the next one finds of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from agent_runtime_core._core.codec.json import encode
from agent_runtime_core._execution.claim_writer import ClaimWriter
from agent_runtime_core._journal.record import DONE, RETRYING, Record
from agent_runtime_core.errors import StepExecutionError, StorageBusy, WaitTimeout
from agent_runtime_core.events import InMemoryEventBus
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.queue import InMemoryQueue
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.state import InMemoryStateStore
from agent_runtime_core.status import RunStatus
from agent_runtime_core.steps import Step, StepExecutor
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.runs import PATIENT, Rig, Script, soon
from tests.support.scripted_model import Scripted, asks, call


def unheard(engine: Any, monkeypatch: pytest.MonkeyPatch, which: Callable[[Record], bool], *landed: bool) -> None:
    """Have the commit of such a record not answered until that is told: once for each of `landed`, which says whether
    it is there all the same."""
    left, commit, append, unanswered = list(landed), engine.commit, ClaimWriter.append, asyncio.Event()

    async def lost(guard: Any, ops: Any) -> Any:
        if left and any(op.name == "journal.append" and which(op.args[1]) for op in ops):
            if left[0]:
                await commit(guard, ops)
            unanswered.set()
            raise StorageBusy("did not answer")
        return await commit(guard, ops)

    async def told(self: ClaimWriter, *records: Record, **more: Any) -> Any:
        try:
            return await append(self, *records, **more)
        except (StorageBusy, asyncio.CancelledError):  # of code that is stopped, as the store is away
            if unanswered.is_set():
                unanswered.clear()
                left.pop(0)
            raise

    monkeypatch.setattr(engine, "commit", lost)
    monkeypatch.setattr(ClaimWriter, "append", told)


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize("inside", [False, True])
async def test_a_step_whose_commit_was_not_answered_does_not_run_again(
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
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.result == '"b 2"', landed)
        await rig.cut(body, all_there)
        crash = False
        assert await rig.value(body) == [["a 1", "b 2"], "c 3"]
        assert sent == ["a", "b", "c"]


@pytest.mark.parametrize("landed", [(False,), (True,), (False, False), (False, True)])
@pytest.mark.parametrize("kind", ["map", "keyed map", "list", "graph"])
async def test_one_of_several_whose_commit_was_not_answered_does_not_run_again(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, kind: str, landed: tuple[bool, ...]
) -> None:
    sent: list[str] = []
    all_there, crash = asyncio.Event(), True

    async def body(ctx: Any) -> Any:
        async def send(what: str) -> str:
            sent.append(what)
            return f"{what} {len(sent)}"

        def step(what: str, **options: Any) -> Step:
            return Step(what, lambda ctx, state: send(what), **options)

        async def both() -> list[str]:
            executor = StepExecutor(ctx, max_concurrency=1)
            if "map" in kind:
                return await executor.map("send", send, ["a", "b"], key=str if "keyed" in kind else None)
            needs = {"depends_on": ["a"]} if kind == "graph" else {}
            return list((await executor.run([step("a"), step("b", **needs)])).values())

        both_sent = await ctx.step("both", both, retries=2, retry_delay=0)
        if crash:
            all_there.set()
            await asyncio.Event().wait()
        return both_sent

    async with Rig(place) as rig:
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.result == '"b 2"', *landed)
        await rig.cut(body, all_there)
        crash = False
        assert await rig.value(body) == ["a 1", "b 2"]
        assert sent == ["a", "b"]
        done = [(record.name, record.key) for record in await rig.records() if record.kind == DONE]
        assert len(done) == len(set(done)) == 3


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("which", ["model", "tool"])
async def test_a_call_of_a_loop_whose_commit_was_not_answered_is_not_made_again(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, which: str, landed: bool
) -> None:
    client = Scripted(say=lambda messages: asks(call("add", {"n": 1})) if len(messages) == 1 else "done")
    added: list[int] = []

    def add(n: int) -> int:
        added.append(n)
        return n

    async def body(ctx: Any) -> Any:
        async def loop() -> Any:
            tools = ToolRegistry()
            tools.register(Tool.from_function(add))
            return (await run_turn_loop(ctx, client, tools, messages=[{"role": "user", "content": "go"}])).text

        return await ctx.step("loop", loop, retries=2, retry_delay=0)

    async with Rig(place, linger=PATIENT) as rig:
        unheard(
            rig.runner.queue.commits, monkeypatch, lambda record: (record.kind, record.name) == (DONE, which), landed
        )
        assert await rig.value(body) == "done"
        assert (len(client.asked), len(added)) == (2, 1)
        done = [(record.name, record.key) for record in await rig.records() if record.kind == DONE]
        assert len(done) == len(set(done)) == 4


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("caught", [False, True])
async def test_a_step_whose_commit_was_not_answered_does_not_run_again_in_the_next_attempt(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, caught: bool, landed: bool
) -> None:
    sent: list[str] = []

    async def body(ctx: Any) -> Any:
        async def send() -> str:
            sent.append("it")
            return "sent"

        with contextlib.suppress(*[StorageBusy] if caught else []):
            return await ctx.step("send", send)
        return "not known"

    async with Rig(place) as rig:
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.result == '"sent"', landed)
        if caught:
            assert await rig.value(body) == "not known"
        else:
            with pytest.raises(StorageBusy):  # told to the caller, and no attempt is used
                await rig.go(body)
            assert await rig.value(body) == "sent"
        assert [record.name for record in await rig.records() if record.kind == DONE] == ["send"]
        assert sent == ["it"]


@pytest.mark.parametrize("landed", [False, True])
async def test_a_step_whose_commit_was_not_answered_does_not_run_again_when_its_run_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    sent: list[str] = []

    async def send() -> str:
        sent.append("it")
        return "sent"

    async def not_answered() -> None:
        async with open_run(tmp_path / "runs.db", "r") as ctx:
            engine = ctx.journal.writer.queue.commits
            unheard(engine, monkeypatch, lambda record: record.result == '"sent"', landed)
            await ctx.step("send", send)

    with pytest.raises(StorageBusy):
        await not_answered()
    async with open_run(tmp_path / "runs.db", "r") as ctx:
        assert await ctx.step("send", send) == "sent"
    assert sent == ["it"]


@pytest.mark.parametrize("landed", [False, True])
async def test_a_step_whose_commit_was_not_answered_does_not_run_again_behind_a_park(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    sent: list[str] = []

    async def send() -> str:
        sent.append("it")
        return "sent"

    async def sent_at_last(ctx: Any) -> None:
        await asyncio.sleep(0)
        with contextlib.suppress(StorageBusy):
            await ctx.step("send", send, key="it")

    async def body(ctx: Any) -> Any:
        await asyncio.gather(ctx.wait_for_signal("go"), sent_at_last(ctx))
        return await ctx.step("send", send, key="it")

    async with Rig(place, park_after=0) as rig:
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.result == '"sent"', landed)
        rig.register(body)
        run_id = await rig.runner.submit("script", run_id="r")
        assert await rig.runner.run_once()
        assert (await rig.runner.get_run(run_id)).status is RunStatus.WAITING
        await rig.runner.signal(run_id, "go")
        assert await rig.runner.run_once()
        assert (await rig.runner.wait(run_id)).final_output == {"value": "sent"}
        # The outage has stopped the code, and without a record nothing shows that the step was done.
        assert sent == ["it"] or (sent == ["it", "it"] and not landed)


@pytest.mark.parametrize("landed", [(True, True), (False, True, False)])
async def test_trace_sinks_hear_once_of_what_was_not_answered(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, landed: tuple[bool, ...]
) -> None:
    heard: list[str] = []
    client = Scripted(say=lambda messages: asks(call("add", {"n": 1})) if len(messages) == 1 else "done")

    async def body(ctx: Any) -> Any:
        ctx.journal.writer.on_events = lambda make: heard.extend(kind for kind, _ in make())

        async def loop() -> Any:
            tools = ToolRegistry()
            tools.register(Tool.from_function(int, name="add", description="", parameters={}))
            return (await run_turn_loop(ctx, client, tools, messages=[{"role": "user", "content": "go"}])).text

        async def nothing() -> None: ...

        async def both() -> Any:
            await ctx.step("nothing", nothing)
            return await loop()

        return await ctx.step("both", both, retries=3, retry_delay=0)

    async with Rig(place, linger=PATIENT) as rig:
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.name in ("nothing", "tool"), *landed)
        assert await rig.value(body) == "done"
        assert (heard.count("step.completed"), heard.count("tool.result")) == (2, 1)
        told = [kind for kind, _ in await rig.told()]
        assert (told.count("step.completed"), told.count("tool.result")) == (2, 1)


@pytest.mark.parametrize("landed", [False, True])
async def test_a_recorded_value_whose_commit_was_not_answered_is_that_of_the_next_try(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    async def body(ctx: Any) -> Any:
        async def draws() -> Any:
            return await ctx.uuid4()

        return await ctx.step("draws", draws, retries=2, retry_delay=0)

    async with Rig(place) as rig:
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.key.startswith("v:"), landed)
        drawn = await rig.value(body)
        assert [each.result for each in await rig.records() if each.kind == DONE] == [encode(drawn)] * 2
        assert [each.kind for each in await rig.records()].count(RETRYING) == 1


WAITS = {"sleep": "sleep", "signal": "signal:go", "approval": "signal:pay", "call": "call:child"}


def waiting(ctx: Any, kind: str, ran: list[str]) -> Awaitable[Any]:
    """Such a wait, which has nothing to wait for but the clock: messages 0, 1, ... are there."""

    async def child(ctx: Any) -> Any:
        ran.append("child")
        return len(ran) - 1

    async def slept() -> int:
        await ctx.sleep(10)
        return 0

    async def called() -> Any:
        return (await ctx.call(Script(child, "child"), {})).final_output["value"]

    match kind:
        case "sleep":
            return slept()
        case "signal":
            return cast("Awaitable[Any]", ctx.wait_for_signal("go"))
        case "approval":
            return cast("Awaitable[Any]", ctx.approve("pay"))
    return called()


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", WAITS)
async def test_a_wait_whose_end_was_not_answered_is_over_in_the_next_try(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, kind: str, inside: bool, landed: bool
) -> None:
    ran, values = list[str](), list[Any]()
    tries = 0

    async def body(ctx: Any) -> Any:
        async def both() -> list[Any]:
            nonlocal tries
            tries += 1
            return [await waiting(ctx, kind, ran), await waiting(ctx, kind, ran)]

        for number in range(2):
            for name in ("go", "pay"):
                await rig.runner.signal("r", name, number, message_id=f"{name}{number}")
        try:
            values.append(await (ctx.step("both", both, retries=2, retry_delay=0) if inside else both()))
        except StorageBusy:
            values.append(await both())
        if len(values) == 1:
            raise ValueError("once more, from what is recorded")
        return values

    async with Rig(place) as rig:
        which = (DONE, WAITS[kind])
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record[1:3] == which, landed)
        since = rig.clock.wall()
        await rig.go(body)
        assert tries == 2
        first, again = await rig.value(body)
        assert again == first == ([0, 0] if kind == "sleep" else [0, 1])
        assert int((rig.clock.wall() - since) / 10) == (2 if kind == "sleep" else 0), "and no sleep is slept twice"
        done = [(each.name, each.key) for each in await rig.records() if each.kind == DONE]
        assert len(done) == len(set(done)) == 2 + inside
        assert ran == (["child"] * 2 if kind == "call" else [])


BESIDE = {
    "the end of a sleep": ("done", "sleep"),
    "that of a wait": ("done", "signal:go"),
    "that of a called run": ("done", "call:child"),
    "its start": ("started", "call:child"),
    "the start of a step": ("started", "careful"),
    "its failure": ("retrying", "careful"),
}


@pytest.mark.parametrize("landed", [False, True])
@pytest.mark.parametrize("what", BESIDE)
async def test_what_is_not_answered_while_steps_go_on_beside_it_costs_nothing(
    place: Path | None, monkeypatch: pytest.MonkeyPatch, what: str, landed: bool
) -> None:
    ran, tries, lost, values = list[str](), list[int](), list[Record](), list[Any]()
    stalled, last, heard = asyncio.Event(), asyncio.Event(), list[str]()

    async def careful() -> int:
        tries.append(1)
        if len(tries) < 2:
            raise ValueError("not yet")
        return 0

    async def one(ctx: Any) -> Any:
        if BESIDE[what][1] == "careful":
            return await ctx.step("careful", careful, on_in_doubt="fail", retries=1, retry_delay=0)
        return await waiting(ctx, {name: kind for kind, name in WAITS.items()}[BESIDE[what][1]], ran)

    async def others(ctx: Any) -> None:
        await stalled.wait()
        for n in range(3):
            await ctx.step(f"other-{n}", asyncio.sleep, 0)
        last.set()

    async def body(ctx: Any) -> Any:
        ctx.journal.writer.on_events = lambda make: heard.extend(kind for kind, _ in make())
        await rig.runner.signal("r", "go", 0)
        values.append([(await asyncio.gather(one(ctx), others(ctx)))[0], await ctx.uuid4()])
        if len(values) == 1:
            raise ValueError("once more, from what is recorded")
        return values

    async with Rig(place) as rig, asyncio.timeout(10):
        engine = rig.runner.queue.commits
        commit = engine.commit

        async def stall(guard: Any, ops: Any) -> Any:
            found = [op.args[1] for op in ops if op.name == "journal.append" and op.args[1][1:3] == BESIDE[what]]
            if found and not lost:
                lost.extend(found)
                if landed:
                    await commit(guard, ops)
                stalled.set()
                await last.wait()
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", stall)
        await rig.go(body)
        assert (len(lost), len(values)) == (1, 1)
        records = await rig.records()
        assert [each.seq for each in records] == sorted({each.seq for each in records})
        of_it = [(each.kind, each.name, each.key, each.attempt) for each in records if each[1:3] == BESIDE[what]]
        assert len(of_it) == len(set(of_it)) == (2 if what == "the start of a step" else 1)
        assert (len(ran), len(tries)) in ((0, 2), (1, 0), (0, 0))
        told = [kind for kind, _ in await rig.told()]
        retrying = int(BESIDE[what][1] == "careful")
        assert (told.count("run.started"), told.count("step.retrying")) == (1, retrying)
        assert heard.count("step.retrying") == retrying
        first, again = await rig.value(body)
        assert again == first


async def test_a_start_that_nobody_answers_for_is_not_looked_for_without_end(
    place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[list[str]] = []

    async def body(ctx: Any) -> Any:
        engine = ctx.journal.writer.queue.commits
        commit = engine.commit

        async def away(guard: Any, ops: Any) -> Any:
            tried.append([op.args[1].kind for op in ops if op.name == "journal.append"])
            raise StorageBusy("did not answer")

        monkeypatch.setattr(engine, "commit", away)
        try:
            await ctx.step("never", asyncio.sleep, 0, on_in_doubt="fail")
        finally:
            monkeypatch.setattr(engine, "commit", commit)

    async with Rig(place) as rig:
        with pytest.raises(StorageBusy):
            await rig.go(body)
        assert {kinds[-1] for kinds in tried} == {"started"}
        assert len(tried) <= 4


async def test_a_called_run_gets_to_workers_though_its_start_landed_without_it() -> None:
    clock = VirtualClock()
    queue, bus, state = InMemoryQueue(clock=clock), InMemoryEventBus(clock=clock), InMemoryStateStore(clock=clock)
    commit, last, lost = state.engine.commit, asyncio.Event(), list[Any]()

    async def stall(guard: Any, ops: Any) -> Any:
        answers = await commit(guard, ops)
        if not lost and any(op.name == "journal.append" and op.args[1][1:3] == ("started", "call:child") for op in ops):
            lost.append(ops)
            await last.wait()
            raise StorageBusy("did not answer")
        return answers

    state.engine.commit = stall  # type: ignore[method-assign]

    async def child(ctx: Any) -> Any:
        return "theirs"

    async def parent(ctx: Any) -> Any:
        async def others() -> None:
            while not lost:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await ctx.step("other", asyncio.sleep, 0)
            last.set()

        called, _ = await asyncio.gather(ctx.call("child", {}), others())
        return called.final_output["value"]

    agents = Registry()
    agents.register(Script(parent, "parent"))
    agents.register(Script(child, "child"))
    async with AgentRunner(queue, bus, state, RunnerConfig(park_after=0), registry=agents) as runner:
        run_id = await runner.submit("parent")
        assert [await runner.run_once() for _ in range(3)] == [True] * 3
        assert (await runner.wait(run_id)).final_output == {"value": "theirs"}
        assert len(lost) == 1


@pytest.mark.parametrize("inside", [False, True])
async def test_a_failure_that_ended_its_attempt_is_not_answered_by_what_was_written_again_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    tries, told = list[int](), asyncio.Event()

    async def fails_once(ctx: Any) -> str:
        tries.append(1)
        if inside:
            with contextlib.suppress(StorageBusy):
                await ctx.uuid4()
        else:
            await told.wait()
        if len(tries) < 2:
            raise ConnectionError("away for a moment")
        return "fine"

    async def body(ctx: Any) -> Any:
        async def progress() -> None:
            with contextlib.suppress(StorageBusy):
                await ctx.emit("progress", {"n": 1})
            told.set()

        beside = asyncio.ensure_future(asyncio.sleep(0) if inside else progress())
        try:
            return await ctx.step("flaky", fails_once, ctx)
        finally:
            await beside

    async with Rig(tmp_path / "runs.db", linger=PATIENT) as rig, asyncio.timeout(10):
        engine = rig.runner.queue.commits
        commit, left = engine.commit, [1, 2, 3]

        async def away(guard: Any, ops: Any) -> Any:
            of_it = [op.args[1] for op in ops if op.name == "journal.append"]
            if left and (any(op.name == "events.publish" for op in ops) or any(r.name == "uuid4" for r in of_it)):
                left.pop()
                raise StorageBusy("did not answer")
            return await commit(guard, ops)

        monkeypatch.setattr(engine, "commit", away)
        first = await rig.go(body)
        assert (first.status, left) == (RunStatus.FAILED, [])
        told_kinds = [(kind, about) for kind, about in await rig.told("run.")]
        assert [kind for kind, _ in told_kinds] == ["run.started", "run.failed"]
        assert told_kinds[0][1].keys() == {"agent_key", "attempt"}
        assert await rig.value(body) == "fine"
        assert len(tries) == 2
        assert not any("in_doubt" in about for _, about in await rig.told("step.started"))


async def test_starts_whose_commit_was_not_answered_are_told_once_and_are_no_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = list[str](), asyncio.Event()

    async def slow() -> str:
        begun.append("slow")
        await go.wait()
        if len(begun) < 2:
            raise ValueError("once more")
        return "slow"

    async def quick(what: str) -> str:
        return what

    async def body(ctx: Any) -> Any:
        async def others() -> None:
            while not begun:  # noqa: ASYNC110
                await asyncio.sleep(0)
            with contextlib.suppress(StorageBusy):
                await ctx.step("quick", quick, "first", key="first")
            await ctx.step("quick", quick, "second", key="second")
            go.set()

        async def both() -> Any:
            return (await asyncio.gather(ctx.step("slow", slow), others()))[0]

        return await ctx.step("both", both, retries=1, retry_delay=0)

    async with Rig(tmp_path / "runs.db", linger=PATIENT) as rig, asyncio.timeout(10):
        unheard(rig.runner.queue.commits, monkeypatch, lambda record: record.result == '"first"', False)
        assert await rig.value(body) == "slow"
        assert len(begun) == 2
        told = [(kind, about.get("step_name")) for kind, about in await rig.told() if kind.endswith("started")]
        assert told[0] == ("run.started", None)
        assert [name for _, name in told].count("slow") == 2
        assert [name for _, name in told].count("both") == 2


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
