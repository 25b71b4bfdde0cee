"""Child runs and waits are compared with the journal like steps, and guarded results inside a step are not left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunnerConfig, RunStatus, Step, StepExecutor
from agent_runtime_core.errors import JournalMismatch, StepInDoubt, WaitTimeout
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.runner.resume_check import check_resume
from tests.support.runs import Script

Code = Callable[[Any], Awaitable[Any]]
DONE: list[str] = []


@pytest.fixture(params=["memory", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    DONE.clear()
    return "memory://" if request.param == "memory" else str(tmp_path / "runs.db")


def kid(key: str) -> Script:
    async def body(ctx: Any) -> str:
        DONE.append(key)
        return key

    return Script(body, key)


def opened(url: str) -> AgentRunner:
    runner = AgentRunner.open(url, config=RunnerConfig(max_retries=1, park_after=0), persistence=None)
    for key in ("refund", "refund-2", "mail"):
        runner.registry.register(kid(key))
    return runner


async def drained(runner: AgentRunner, code: Code | AgentRuntime) -> Any:
    """Let a worker execute the run, which has this code now, until nothing is left to do."""
    agent = code if isinstance(code, AgentRuntime) else Script(code)
    runner.registry.unregister(agent.key)
    runner.registry.register(agent)
    if not await runner.runs(agent="script"):
        await runner.submit("script", {}, run_id="r")
    elif (await runner.get_run("r")).status in (RunStatus.FAILED, RunStatus.DEAD):
        await runner.resume("r")
    while await runner.run_once():
        pass
    info = await runner.get_run("r")
    return info if info.status is RunStatus.WAITING else await runner.wait("r")


def error_of(result: Any) -> str | None:
    return None if result.error is None else str(result.error.type)


def effect(name: str) -> Callable[[], str]:
    def do() -> str:
        DONE.append(name)
        return name

    return do


def guarded(ctx: Any, name: str, **more: Any) -> Any:
    return ctx.step(name, effect(name), on_in_doubt="fail", **more)


def down() -> None:
    raise ConnectionError("down")


async def ends(ctx: Any) -> None:
    await ctx.wait_for_signal("end")


#: Something of the main line, what a deploy makes of it, and how an error calls both.
CHANGES: list[tuple[Code, Code, str, str]] = [
    (
        lambda ctx: ctx.call("refund", {}), lambda ctx: ctx.call("refund-2", {}),
        "child run 'refund'", "child run 'refund-2'",
    ),
    (lambda ctx: ctx.call("refund", {}), lambda ctx: guarded(ctx, "refund"), "child run 'refund'", "'refund'"),
    (lambda ctx: guarded(ctx, "pay"), lambda ctx: ctx.call("refund", {}), "'pay'", "child run 'refund'"),
    (lambda ctx: ctx.sleep(0), lambda ctx: ctx.call("refund", {}), "ctx.sleep()", "child run 'refund'"),
    (lambda ctx: ctx.messages(), lambda ctx: guarded(ctx, "pay"), "'mail'", "'pay'"),
    (
        lambda ctx: tried(ctx.wait_for_signal("go", timeout=0)),
        lambda ctx: tried(ctx.wait_for_signal("run", timeout=0)),
        "wait 'go'", "wait 'run'",
    ),
    (lambda ctx: tried(ctx.approve("ok", timeout=0)), lambda ctx: ctx.sleep(0), "wait 'ok'", "ctx.sleep()"),
]  # fmt: skip


async def tried(wait: Awaitable[Any]) -> Any:
    try:
        return await wait
    except WaitTimeout:
        return "late"


@pytest.mark.parametrize(("old", "new", "recorded", "found"), CHANGES)
async def test_another_call_is_rejected_before_it_runs(
    url: str, old: Code, new: Code, recorded: str, found: str
) -> None:
    async def before(ctx: Any) -> None:
        await ctx.step("look", int)
        await old(ctx)
        await ctx.step("mail", int)
        await ends(ctx)

    async def after(ctx: Any) -> None:
        await ctx.step("look", int)
        await new(ctx)
        await ctx.step("mail", int)
        await ends(ctx)

    async with opened(url) as runner:
        assert (await drained(runner, before)).status is RunStatus.WAITING
        was = [*DONE]
        check = await check_resume(runner, await runner.queue.require("r"), Script(after), 10)
        assert check.outcome == "mismatch"
        assert check.reason is not None
        assert all(each in check.reason for each in (recorded, found))
        await runner.signal("r", "end")
        info = await drained(runner, after)
        assert (info.status, error_of(info)) == (RunStatus.FAILED, "JournalMismatch")
        assert info.error.message.startswith(
            f"the next step must be {recorded}, which the journal has in this position, got {found}. If "
        )
        assert was == DONE
        assert (await drained(runner, before)).status is RunStatus.SUCCEEDED
        assert was == DONE


@pytest.mark.parametrize("change", ["removed", "inserted", "moved"])
async def test_other_changes_of_the_main_line(url: str, change: str) -> None:
    async def before(ctx: Any) -> None:
        await ctx.call("refund", {})
        await ctx.sleep(0)
        await ctx.call("mail", {})
        await ends(ctx)

    async def after(ctx: Any) -> None:
        if change == "inserted":
            await ctx.call("refund-2", {})
        if change != "removed":
            await ctx.call("refund", {})
        if change != "moved":
            await ctx.sleep(0)
        await ctx.call("mail", {})
        if change == "moved":
            await ctx.sleep(0)
        await ends(ctx)

    async with opened(url) as runner:
        await drained(runner, before)
        await runner.signal("r", "end")
        assert error_of(await drained(runner, after)) == "JournalMismatch"
        assert DONE == ["refund", "mail"]


async def test_renamed_children_waits_and_nested_steps(url: str) -> None:
    async def before(ctx: Any) -> None:
        await ctx.call("refund", {})
        assert await ctx.wait_for_signal("go") == 1

        async def outer() -> None:
            await guarded(ctx, "pay")
            await ctx.step("fails", down)

        await ctx.step("outer", outer)

    async def after(ctx: Any) -> Any:
        ctx.renamed("refund", "refund-2")
        ctx.renamed("go", "run")
        ctx.renamed("pay", "pay-2")
        ctx.renamed("outer", "outer-2")
        await ctx.call("refund-2", {})
        assert await ctx.wait_for_signal("run") == 1

        async def outer() -> str:
            await guarded(ctx, "pay-2")
            return str(await ctx.step("works", effect("works")))

        return await ctx.step("outer-2", outer)

    async with opened(url) as runner:
        await runner.submit("script", {}, run_id="r")
        await runner.signal("r", "go", 1)
        assert (await drained(runner, before)).status is RunStatus.FAILED
        assert (await drained(runner, after)).error is None
        assert DONE == ["refund", "pay", "works"]


async def test_an_open_wait_that_was_renamed_receives_messages_to_both_names(url: str) -> None:
    async def before(ctx: Any) -> Any:
        return [await ctx.approve("plan", {"n": 1}), await ctx.wait_for_signal("go"), await ctx.wait_for_signal("end")]

    async def after(ctx: Any) -> Any:
        for old, new in (("plan", "plan-2"), ("go", "run"), ("end", "stop")):
            ctx.renamed(old, new)
        return [
            await ctx.approve("plan-2", {"n": 1}),
            await ctx.wait_for_signal("run"),
            await ctx.wait_for_signal("stop"),
        ]

    async with opened(url) as runner:
        await drained(runner, before)
        assert await runner.approve("r", "plan", "yes")
        await drained(runner, after)
        await runner.signal("r", "go", 1)
        await drained(runner, after)
        await runner.signal("r", "stop", 2)
        assert (await drained(runner, after)).status is RunStatus.SUCCEEDED
        assert (await runner.wait("r")).final_output == {"value": ["yes", 1, 2]}


async def test_a_child_in_flight_keeps_its_agent_when_that_is_renamed(url: str) -> None:
    async def refund(ctx: Any) -> str:
        DONE.append(str(await ctx.wait_for_signal("go")))
        return "refund"

    async def before(ctx: Any) -> Any:
        return (await ctx.call("refund", {})).final_output["value"]

    async def renamed(ctx: Any) -> Any:
        return (await ctx.call("refund-2", {})).final_output["value"]

    async def after(ctx: Any) -> Any:
        ctx.renamed("refund", "refund-2")
        return await renamed(ctx)

    async with opened(url) as runner:
        runner.registry.register(Script(refund, "refund"))
        await drained(runner, before)
        [child] = await runner.runs(agent="refund")
        check = await check_resume(runner, await runner.queue.require("r"), Script(renamed), 10)
        assert (check.outcome, check.cure) == ("mismatch", 'ctx.renamed("refund", "refund-2") before the step')
        await runner.signal(child.run_id, "go", "paid")
        info = await drained(runner, after)
        assert info.status is RunStatus.SUCCEEDED
        assert (await runner.wait("r")).final_output == {"value": "refund"}
        assert DONE == ["paid"]


@pytest.mark.parametrize("inline", [False, True])
async def test_a_child_in_flight_is_not_replaced(url: str, inline: bool) -> None:
    async def refund(ctx: Any) -> str:
        await ctx.step("refund", effect("refund"))
        if not inline:
            await ctx.wait_for_signal("go")
        elif DONE == ["refund"]:
            raise asyncio.CancelledError
        return "refund"

    async def before(ctx: Any) -> Any:
        return (await ctx.call("refund", {})).final_output["value"]

    async def after(ctx: Any) -> Any:
        return await ctx.call("refund-2", {})

    async with opened(url) as runner:
        runner.registry.register(Script(refund, "refund"))
        if inline:
            task = asyncio.ensure_future(runner.execute(Script(before), "r"))
            await asyncio.wait({task})
            assert error_of(await runner.execute(Script(after), "r")) == "JournalMismatch"
            assert DONE == ["refund"]
            return
        await drained(runner, before)
        [child] = await runner.runs(agent="refund")
        await runner.signal(child.run_id, "go")
        info = await drained(runner, after)
        assert error_of(info) == "JournalMismatch"
        assert (
            "child run 'refund', which has started and has no saved result, got child run 'refund-2'"
            in info.error.message
        )
        assert DONE == ["refund"]


async def in_doubt(runner: AgentRunner, code: Code, begun: asyncio.Event) -> None:
    """Stop the run once `begun` is set, as a crash does."""
    task = asyncio.ensure_future(runner.execute(Script(code), "r"))
    await begun.wait()
    task.cancel()
    await asyncio.wait({task})


def hangs(begun: asyncio.Event) -> Callable[[], Awaitable[None]]:
    async def hang() -> None:
        DONE.append("hang")
        begun.set()
        await asyncio.Event().wait()

    return hang


@pytest.mark.parametrize("policy", ["retry", "fail"])
@pytest.mark.parametrize("nested", [False, True])
async def test_only_a_guarded_step_in_doubt_keeps_its_place(url: str, policy: str, nested: bool) -> None:
    async with opened(url) as runner:
        begun = asyncio.Event()

        async def before(ctx: Any) -> None:
            async def outer() -> None:
                await ctx.step("pay", hangs(begun), on_in_doubt=policy)

            await ctx.step("look", int)
            await (ctx.step("outer", outer) if nested else outer())

        async def after(ctx: Any) -> Any:
            await ctx.step("look", int)
            await ctx.step("charge", effect("charge"))

        await in_doubt(runner, before, begun)
        result = await runner.execute(Script(after), "r")
        if policy == "retry":
            assert (result.status, DONE) == (RunStatus.SUCCEEDED, ["hang", "charge"])
        else:
            assert (error_of(result), DONE) == ("JournalMismatch", ["hang"])


async def test_a_renamed_child_that_is_cut_off_and_called_again_is_the_same_child(url: str) -> None:
    begun = asyncio.Event()

    async def refund(ctx: Any) -> str:
        DONE.append("begun")
        begun.set()
        if len(DONE) < 3:
            await asyncio.Event().wait()
        return "refund"

    async def before(ctx: Any) -> Any:
        await ctx.call("refund", {})

    async def after(ctx: Any) -> Any:
        ctx.renamed("refund", "refund-2")
        begun.clear()
        call = asyncio.ensure_future(ctx.call("refund-2", {}))
        await begun.wait()
        call.cancel()
        await asyncio.wait({call})
        return (await ctx.call("refund-2", {})).final_output["value"]

    async with opened(url) as runner:
        runner.registry.register(Script(refund, "refund"))
        await in_doubt(runner, before, begun)
        assert (await runner.execute(Script(after), "r")).final_output == {"value": "refund"}
        assert sorted(each.agent_key for each in await runner.runs()) == ["refund", "script"]


async def test_a_renamed_wait_that_was_late_is_another_one_in_the_next_attempt_of_its_step(url: str) -> None:
    begun = asyncio.Event()

    async def before(ctx: Any) -> Any:
        async def outer() -> None:
            await tried(ctx.wait_for_signal("go", timeout=0))
            await hangs(begun)()

        await ctx.step("outer", outer)

    async def after(ctx: Any) -> Any:
        ctx.renamed("go", "run")

        async def outer() -> Any:
            try:
                return await ctx.wait_for_signal("run", timeout=0)
            finally:
                await runner.signal("r", "run", 1)

        return await ctx.step("outer", outer, retries=1, retry_delay=0)

    async with opened(url) as runner:
        await in_doubt(runner, before, begun)
        assert (await runner.execute(Script(after), "r")).final_output == {"value": 1}


@pytest.mark.parametrize("deeper", [False, True])
async def test_a_renamed_child_of_a_fork_does_not_repeat_what_it_did(url: str, deeper: bool) -> None:
    def calls(agent: str, *renamed: str) -> Code:
        async def code(ctx: Any) -> Any:
            if renamed:
                ctx.renamed(*renamed)
            await ctx.step("look", int)
            return (await ctx.call(agent, {})).final_output["value"]

        return code

    def register(code: Code) -> None:
        desk = Script(calls("clerk") if deeper else code)
        for each in (desk, Script(code, "clerk")):
            runner.registry.unregister(each.key)
            runner.registry.register(each)

    async def worked() -> list[Any]:
        while await runner.run_once():
            pass
        return [error_of(await runner.wait(each.run_id)) for each in await runner.runs(agent="refund-2")]

    async with opened(url) as runner:
        for key in ("refund", "refund-2"):
            runner.registry.unregister(key)
            runner.registry.register(Script(lambda ctx: guarded(ctx, "pay"), key))
        register(calls("refund"))
        await runner.submit("script", {}, run_id="r")
        assert await worked() == []
        register(calls("refund-2", "refund", "refund-2"))
        fork = await runner.fork("r", "look")
        assert await worked() == ["EffectAlreadyDone"]
        await runner.fork(fork, "look")
        assert await worked() == ["EffectAlreadyDone"] * 2
        assert DONE == ["pay"]
        await runner.fork("r", "look", effects="repeat")
        assert sorted(map(str, await worked())) == ["EffectAlreadyDone"] * 2 + ["None"]
        assert DONE == ["pay", "pay"]


async def test_a_failed_step_with_a_guarded_result_inside_keeps_its_place(url: str) -> None:
    def code(outer_name: str, *names: str, fails: bool = False) -> Code:
        async def body(ctx: Any) -> Any:
            async def outer() -> None:
                for name in names:
                    await guarded(ctx, name)
                if fails:
                    down()

            await ctx.step(outer_name, outer)

        return body

    async with opened(url) as runner:
        assert error_of(await runner.execute(Script(code("outer", "pay", fails=True)), "r")) == "StepExecutionError"
        for other in (code("outer-2", "pay"), code("outer", "pay-2"), code("outer", "check", "pay")):
            assert error_of(await runner.execute(Script(other), "r")) == "JournalMismatch"
            assert DONE == ["pay"]
        assert (await runner.execute(Script(code("outer", "pay", "check")), "r")).error is None
        assert DONE == ["pay", "check"]


@pytest.mark.parametrize("change", ["child", "wait", "step", "deeper", "limited", "plain"])
async def test_a_call_inside_a_step_waits_for_the_guarded_result(url: str, change: str) -> None:
    """Whatever it is: without a saved result it may be the guarded step under another name."""

    async def inner(ctx: Any, name: str, fails: bool) -> None:
        if change == "child" and name == "pay-2":
            await ctx.call("refund", {})
        elif change == "wait" and name == "pay-2":
            await ctx.sleep(0)
        elif change == "deeper":
            await ctx.step(f"in {name}", lambda: guarded(ctx, name))
        else:
            await guarded(ctx, name)
        if fails:
            down()

    def code(name: str, *, fails: bool) -> Code | AgentRuntime:
        class Plain(AgentRuntime):
            key = "script"

            def run(self, ctx: Any) -> RunResult:
                def outer() -> None:
                    ctx.step(name, effect(name), on_in_doubt="fail")
                    if fails:
                        down()

                ctx.step("outer", outer)
                return RunResult()

        async def body(ctx: Any) -> Any:
            limit = 60 if change == "limited" else None
            await ctx.step("outer", inner, ctx, name, fails, timeout=limit)

        return Plain() if change == "plain" else body

    async with opened(url) as runner:
        assert error_of(await drained(runner, code("pay", fails=True))) == "StepExecutionError"
        info = await drained(runner, code("pay-2", fails=False))
        assert (error_of(info), DONE) == ("JournalMismatch", ["pay"])
        assert info.error.message.startswith("the next step inside 'outer' must be ")
        assert (await drained(runner, code("pay", fails=False))).error is None
        assert DONE == ["pay"]


async def test_ordinary_code_inside_a_step_is_free(url: str) -> None:
    def code(*names: str, fails: bool) -> Code:
        async def body(ctx: Any) -> Any:
            async def outer() -> None:
                for name in names:
                    await (guarded(ctx, name) if name == "pay" else ctx.step(name, effect(name)))
                if fails:
                    down()

            await ctx.step("outer", outer)

        return body

    async with opened(url) as runner:
        await runner.execute(Script(code("a", "b", fails=True)), "r")
        await runner.execute(Script(code("c", "b", "pay", "d", fails=True)), "r")
        assert (await runner.execute(Script(code("c", "b", "pay", "e", fails=False)), "r")).error is None
        assert DONE == ["a", "b", "c", "pay", "d", "e"]


async def test_tasks_inside_a_step_have_no_order(url: str) -> None:
    """The other task comes first when the run resumes, which correct code does too."""

    async def body(ctx: Any) -> Any:
        first = not DONE

        async def paid() -> None:
            if not first:
                await asyncio.sleep(0.01)
            await guarded(ctx, "pay")

        async def outer() -> None:
            task = asyncio.ensure_future(paid())
            if first:
                await task
                down()
            await ctx.step("other", effect("other"))
            await task

        await ctx.step("outer", outer)

    async with opened(url) as runner:
        await runner.execute(Script(body), "r")
        assert (await runner.execute(Script(body), "r")).error is None
        assert DONE == ["pay", "other"]


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("cut", ["sleep", "signal", "messages", "child", "step"])
async def test_code_that_was_cut_off_and_went_on_fits_its_journal(url: str, cut: str, fork: bool) -> None:
    async def hang(*_: Any) -> Any:
        DONE.append("hang")
        await asyncio.Event().wait()

    async def body(ctx: Any) -> Any:
        waits: dict[str, Callable[[], Awaitable[Any]]] = {
            "sleep": lambda: ctx.sleep(60),
            "signal": lambda: ctx.wait_for_signal("never"),
            "messages": lambda: ctx.messages(None),
            "child": lambda: ctx.call("hangs", {}),
            "step": lambda: ctx.step("hang", hang),
        }
        await ctx.step("first", int)
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await waits[cut]()
        await ctx.step("later", effect("later"))
        await ctx.call("mail", {})
        if DONE.count("mail") == 1 and DONE.count("end") < 2:
            DONE.append("end")
            down()

    async with opened(url) as runner:
        runner.registry.register(Script(hang, "hangs"))
        assert error_of(await runner.execute(Script(body), "r")) == "ConnectionError"
        if fork:
            await runner.fork("r", new_run_id="f")
        run = "f" if fork else "r"
        assert error_of(await runner.execute(Script(body), run)) == "ConnectionError"
        assert (await runner.execute(Script(body), run)).error is None
        assert [each for each in DONE if each != "hang"] == ["later", "mail", "end", "end"]


async def test_a_guarded_step_that_is_in_doubt_and_caught(url: str) -> None:
    async with opened(url) as runner:
        begun = asyncio.Event()

        async def body(ctx: Any) -> Any:
            try:
                await ctx.step("pay", hangs(begun), on_in_doubt="fail")
            except StepInDoubt:
                await ctx.step("note", effect("note"))
            if "end" not in DONE:
                DONE.append("end")
                down()

        await in_doubt(runner, body, begun)
        assert error_of(await runner.execute(Script(body), "r")) == "ConnectionError"
        assert (await runner.execute(Script(body), "r")).error is None
        assert DONE == ["hang", "note", "end"]


async def test_new_steps_before_a_wait_that_lasts_run(url: str) -> None:
    async def before(ctx: Any) -> Any:
        await ctx.step("look", int)
        return await ctx.approve("plan")

    async def after(ctx: Any) -> Any:
        await ctx.step("look", int)
        await ctx.step("check", effect("check"))
        await ctx.call("mail", {})
        return await ctx.approve("plan")

    async def renamed(ctx: Any) -> Any:
        await ctx.step("look", int)
        return await ctx.approve("other")

    async with opened(url) as runner:
        await drained(runner, before)
        assert (await check_resume(runner, await runner.queue.require("r"), Script(renamed), 10)).outcome == "mismatch"
        await runner.signal("r", "unrelated")
        for _ in range(2):
            assert (await drained(runner, after)).status is RunStatus.WAITING
            await runner.signal("r", "unrelated")
        assert await runner.approve("r", "plan", "yes")
        assert (await drained(runner, after)).status is RunStatus.SUCCEEDED
        assert DONE == ["check", "mail"]


async def test_patched_guards_new_children_and_waits(url: str) -> None:
    async def before(ctx: Any) -> None:
        await ctx.call("refund", {})
        await ctx.sleep(0)
        await ends(ctx)

    async def after(ctx: Any) -> None:
        await ctx.call("refund", {})
        if await ctx.patched("mail"):
            await ctx.call("mail", {})
            await ctx.sleep(0)
        await ctx.sleep(0)
        await ends(ctx)

    async with opened(url) as runner:
        await drained(runner, before)
        await runner.signal("r", "end")
        assert (await drained(runner, after)).status is RunStatus.SUCCEEDED
        await runner.submit("script", {}, run_id="new")
        await runner.signal("new", "end")
        while await runner.run_once():
            pass
        assert (await runner.get_run("new")).status is RunStatus.SUCCEEDED
        assert DONE == ["refund", "refund", "mail"]


async def test_records_of_earlier_versions_are_not_compared(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def before(ctx: Any) -> None:
        await ctx.step("look", int)
        await ctx.call("refund", {})
        await ctx.sleep(0)
        await ctx.step("mail", int)
        await ends(ctx)

    async def after(ctx: Any) -> None:
        await ctx.step("look", int)
        await ctx.sleep(0)
        await ctx.call("refund", {})
        await ctx.step("mail", int)
        await ends(ctx)
        await ctx.call("mail", {})

    async with opened(url) as runner:
        with monkeypatch.context() as patch:  # they have no positions
            patch.setattr("agent_runtime_core._execution.step_journal.StepJournal.position", lambda *_: 0)
            patch.setattr(
                "agent_runtime_core._execution.context_steps.StepCall",
                _with_position("agent_runtime_core._execution.context_steps"),
            )
            await drained(runner, before)
        await runner.signal("r", "end")
        assert (await drained(runner, after)).status is RunStatus.SUCCEEDED
        assert DONE == ["refund", "mail"]


def _with_position(module: str) -> Any:
    import importlib

    made, count = importlib.import_module(module).StepCall, iter(range(1, 100))
    return lambda *args, **more: made(*args, **{**more, "position": next(count)})


async def test_concurrent_children_and_waits_have_no_order(url: str) -> None:
    def code(order: list[str]) -> Code:
        async def body(ctx: Any) -> Any:
            calls = {"refund": lambda: ctx.call("refund", {}), "mail": lambda: ctx.call("mail", {}),
                     "sleep": lambda: ctx.sleep(0), "step": lambda: ctx.step("step", int)}  # fmt: skip
            await ctx.step("look", int)
            await asyncio.gather(*(calls[each]() for each in order))
            await ctx.call("refund-2", {})
            await ends(ctx)

        return body

    async with opened(url) as runner:
        await drained(runner, code(["refund", "mail", "sleep", "step"]))
        await runner.signal("r", "end")
        assert (await drained(runner, code(["step", "sleep", "mail", "refund"]))).status is RunStatus.SUCCEEDED
        assert sorted(DONE) == ["mail", "refund", "refund-2"]


async def test_waits_of_one_name_in_several_tasks_have_no_order(url: str) -> None:
    async def code(ctx: Any) -> None:
        async def beside() -> None:
            await ctx.sleep(0)

        async def look() -> None:
            await asyncio.sleep(0)  # the other task comes to its sleep first; in the next execution, it comes second

        other = asyncio.ensure_future(beside())
        await ctx.step("look", look)
        await ctx.sleep(0)
        await guarded(ctx, "pay")
        await ctx.sleep(0)
        await guarded(ctx, "mail")
        if DONE == ["pay", "mail"]:
            DONE.append("down")
            down()
        await other

    async with opened(url) as runner:
        assert (await runner.execute(Script(code), "r")).status is RunStatus.FAILED
        assert (await runner.execute(Script(code), "r")).error is None
        assert DONE == ["pay", "mail", "down"]


async def test_children_in_step_lists_and_maps(url: str) -> None:
    async def call(ctx: Any, state: Any) -> Any:
        return (await ctx.call("refund", {})).final_output["value"]

    async def body(ctx: Any) -> Any:
        async def each(item: int) -> Any:
            return (await ctx.call("mail", {"params": {"n": item}})).final_output["value"]

        await StepExecutor(ctx).run([Step("a", call), Step("b", call)])
        await StepExecutor(ctx).map("m", each, [1, 2, 3])
        await ctx.sleep(0)
        if "end" not in DONE:
            DONE.append("end")
            down()
        await ctx.call("refund-2", {})

    async with opened(url) as runner:
        assert error_of(await runner.execute(Script(body), "r")) == "ConnectionError"
        await runner.fork("r", new_run_id="f")
        assert (await runner.execute(Script(body), "r")).error is None
        assert (await runner.execute(Script(body), "f")).error is None
        assert sorted(DONE) == ["end", *["mail"] * 3, *["refund"] * 2, *["refund-2"] * 2]


async def test_a_call_that_is_rejected_as_invalid_is_so_again(url: str) -> None:
    async def body(ctx: Any) -> Any:
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: ctx.call("refund", [1]), lambda: ctx.approve("ok", float("nan")), lambda: ctx.sleep(-1),
            lambda: ctx.wait_for_signal("x", timeout=-1), lambda: ctx.step("bad", object),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises((TypeError, ValueError)):
                await call()
        await ctx.step("later", int)
        if "end" not in DONE:
            DONE.append("end")
            down()

    async with opened(url) as runner:
        assert error_of(await runner.execute(Script(body), "r")) == "ConnectionError"
        assert (await runner.execute(Script(body), "r")).error is None


async def test_a_caught_mismatch_is_raised_again(url: str) -> None:
    async def before(ctx: Any) -> None:
        await ctx.call("refund", {})
        down()

    async def after(ctx: Any) -> None:
        with pytest.raises(JournalMismatch, match=r"call ctx\.renamed\('refund', 'refund-2'\) before it") as caught:
            await ctx.call("refund-2", {})
        assert (caught.value.recorded, caught.value.found) == ("refund", "refund-2")
        await guarded(ctx, "instead")

    async with opened(url) as runner:
        await runner.execute(Script(before), "r")
        assert error_of(await runner.execute(Script(after), "r")) == "JournalMismatch"
        assert DONE == ["refund"]


@pytest.mark.parametrize(("outer", "inner"), [("outer-2", "pay"), ("outer", "pay-2"), ("outer", "pay")])
async def test_a_fork_inside_a_step_keeps_what_is_inside(url: str, outer: str, inner: str) -> None:
    def code(outer: str, inner: str, *, fails: bool) -> Code:
        async def body(ctx: Any) -> Any:
            async def run() -> None:
                await guarded(ctx, inner)
                if fails:
                    down()

            await ctx.step(outer, run)

        return body

    async with opened(url) as runner:
        assert (await runner.execute(Script(code("outer", "pay", fails=True)), "r")).error is not None
        await runner.fork("r", new_run_id="f")
        await runner.fork("f", new_run_id="g")
        for run in ("f", "g"):
            error = (await runner.execute(Script(code(outer, inner, fails=False)), run)).error
            assert (error.type if error else None) == (
                None if (outer, inner) == ("outer", "pay") else "JournalMismatch"
            )
        assert DONE == ["pay"]
