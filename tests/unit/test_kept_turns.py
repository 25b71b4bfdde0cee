"""A run that does not succeed keeps what its tools did in its conversation, and a resumed run has each message once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as properties
from hypothesis import strategies as st

from agent_runtime_core._engines.base import Op
from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.encryption import AESGCMCodec
from agent_runtime_core.errors import ContextOverflow, ProviderUnavailable, RequestRefused
from agent_runtime_core.interfaces import ErrorInfo, RunContext, RunResult, ToolRegistry
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.persistence import Conversation, ConversationMessage
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.execution import RunExecution
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import crash_everywhere
from agent_runtime_core.tools.results import ContentParts
from agent_runtime_core.tools.tool import Tool
from tests.support.backends import SERVERS, backends
from tests.support.codec import KEY
from tests.support.fault_runs import Agent, settings
from tests.support.scripted_model import Scripted, asks, call

ROOM = "room 7"
KINDS = backends(["memory", "sqlite", "redis", "postgres"], default=["memory", "sqlite"])
PAID = ["user: pay", "call pay", "tool: paid 1"]


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return "memory://" if request.param == "memory" else str(tmp_path / "app.db")


class Bank:
    """The tools of an agent, and what they did."""

    def __init__(self) -> None:
        self.paid = 0
        self.answer: Callable[[], Awaitable[Any]] | None = None
        self.entered = asyncio.Event()

    async def pay(self) -> Any:
        self.paid += 1
        self.entered.set()
        return f"paid {self.paid}" if self.answer is None else await self.answer()

    def tools(self, **options: Any) -> ToolRegistry:
        tools = ToolRegistry()
        tools.register(Tool.from_function(self.pay, name="pay", has_side_effects=True, **options))
        tools.register(Tool.from_function(lambda: "looked", name="look"))
        return tools


class Payer(ToolCallingAgent):
    key = "payer"
    system_prompt = "Be exact."

    def __init__(self, model: Scripted, tools: ToolRegistry) -> None:
        self.scripted, self._tools = model, tools

    @property
    def tools(self) -> ToolRegistry:
        return self._tools

    def get_llm_client(self) -> Scripted:
        return self.scripted


@asynccontextmanager
async def opened(url: str, *agents: Any, **options: Any) -> AsyncIterator[AgentRunner]:
    registry = Registry()
    for each in agents:
        registry.register(each)
    config = settings(**{"max_retries": 1, "park_after": 0, **options})
    async with AgentRunner.open(url, config=config, registry=registry) as runner:
        yield runner


def said(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "conversation_id": ROOM}


async def messages(runner: AgentRunner) -> list[ConversationMessage]:
    known = conversation_id(ROOM)
    assert known is not None
    store = runner.persistence.conversations
    return [] if await store.get(known) is None else await store.history(known)


async def stored(runner: AgentRunner) -> Conversation:
    """Return the conversation, which exists."""
    known = conversation_id(ROOM)
    assert known is not None
    conversation = await runner.persistence.conversations.get(known)
    assert conversation is not None
    return conversation


def shown(each: ConversationMessage) -> str:
    if each.tool_calls:
        return f"call {' '.join(one.name for one in each.tool_calls)}"
    return f"{each.role}: {each.content}"


async def kept(runner: AgentRunner) -> list[str]:
    return [shown(each) for each in await messages(runner)]


async def seen_next(runner: AgentRunner, model: Scripted) -> list[str]:
    """Execute another run of the conversation, and return what its model gets after the prompt."""
    model.lines = ["it was paid"]
    await runner.execute("payer", None, said("again"))
    return [
        f"call {' '.join(one['function']['name'] for one in each['tool_calls'])}"
        if each.get("tool_calls")
        else f"{each['role']}: {each['content']}"
        for each in model.asked[-1]
        if each["role"] != "system"
    ]


# -- how a run ends


async def fails(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    payer.scripted.lines.append(ProviderUnavailable("away"))
    await runner.execute("payer", "r", said("pay"))


async def reaches_its_limit(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    await runner.execute("payer", "r", {**said("pay"), "limits": {"max_turns": 1}})


async def is_refused_by_the_model(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    payer.scripted.lines.append({"role": "assistant", "content": None, "refusal": "no"})
    await runner.execute("payer", "r", said("pay"))


async def times_out(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    payer.scripted.pause = 0.0

    def slow(messages: Any) -> Any:
        if len(messages) > 2:
            payer.scripted.pause = 60.0
        return payer.scripted.lines.pop(0) if payer.scripted.lines else "late"

    payer.scripted.say = slow
    await runner.execute("payer", "r", said("pay"))
    payer.scripted.say, payer.scripted.pause = None, 0.0


async def is_cancelled_while_it_runs(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    asked = asyncio.Event()

    def slow(messages: Any) -> Any:
        if len(messages) > 2:
            payer.scripted.pause = 60.0
            asked.set()
        return payer.scripted.lines.pop(0) if payer.scripted.lines else "late"

    payer.scripted.say = slow
    task = asyncio.create_task(runner.execute("payer", "r", said("pay")))
    await asked.wait()
    await runner.cancel("r")
    await task
    payer.scripted.say, payer.scripted.pause = None, 0.0


async def is_cancelled_while_it_is_parked(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    await parked(runner, payer)
    await runner.cancel("r", wait=True)


async def is_cancelled_by_another_process(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    await parked(runner, payer)
    backends = runner.backends
    other = AgentRunner(*backends, persistence=runner.persistence, registry=Registry())
    await other.cancel("r")


async def passes_its_deadline_while_it_is_parked(runner: AgentRunner, payer: Payer, bank: Bank) -> None:
    await parked(runner, payer, deadline=time.time() + 600)
    await runner.approve("r", "tool:ask")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(runner.queue.clock, "wall", lambda: time.time() + 900)
        assert await runner.run_once()


async def parked(runner: AgentRunner, payer: Payer, deadline: float | None = None) -> None:
    payer.scripted.lines.append(asks(call("ask", {}, id="a")))
    payer.tools.register(Tool.from_function(lambda: "asked", name="ask", requires_confirmation=True))
    await runner.submit("payer", said("pay"), run_id="r", deadline=deadline)
    assert await runner.run_once()
    assert (await runner.get_run("r")).status == "waiting"


PARKED = (is_cancelled_while_it_is_parked, is_cancelled_by_another_process, passes_its_deadline_while_it_is_parked)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (fails, "failed"),
        (reaches_its_limit, "failed"),
        (is_refused_by_the_model, "failed"),
        (times_out, "timed_out"),
        (is_cancelled_while_it_runs, "cancelled"),
        (is_cancelled_while_it_is_parked, "cancelled"),
        (is_cancelled_by_another_process, "cancelled"),
        (passes_its_deadline_while_it_is_parked, "timed_out"),
    ],
)
@pytest.mark.parametrize("unanswered", [True, False])
async def test_the_next_run_sees_what_the_tools_of_the_last_one_did(
    url: str, end: Any, status: str, unanswered: bool
) -> None:
    bank, model = Bank(), Scripted(asks(call("pay")))
    payer = Payer(model, bank.tools())
    limits = {"run_timeout_seconds": 0.3} if end is times_out else {}
    async with opened(url, payer, keep_unanswered=unanswered, **limits) as runner:
        await end(runner, payer, bank)
        assert (await runner.get_run("r")).status == status
        found = await messages(runner)
        expected = [*PAID, *(["call ask", "tool: Error: not run"] if end in PARKED else [])]
        assert [shown(each) for each in found] == expected
        assert [(each.run_id, each.position) for each in found] == [
            ((await runner.get_run("r")).run_id, at) for at in range(len(found))
        ]
        assert await seen_next(runner, model) == [*expected, "user: again"]
        assert bank.paid == 1


async def test_an_open_call_is_closed_and_a_resumed_run_replaces_what_closed_it(url: str) -> None:
    """Two payments of one answer, and a cancellation while the first one runs."""
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay", id="one"), call("pay", id="two"))), bank.tools())
    block = asyncio.Event()

    async def slow() -> str:
        await block.wait()
        return f"paid {bank.paid}"

    bank.answer = slow
    async with opened(url, payer) as runner:
        task = asyncio.create_task(runner.execute("payer", "r", said("pay")))
        await bank.entered.wait()
        await runner.cancel("r")
        assert (await task).status is RunStatus.CANCELLED
        interrupted = "tool: Error: the call was interrupted before it had a result. It may have taken effect"
        assert await kept(runner) == ["user: pay", "call pay pay", interrupted, "tool: Error: not run"]
        assert await seen_next(runner, payer.scripted) == [
            "user: pay", "call pay pay", interrupted, "tool: Error: not run", "user: again"
        ]  # fmt: skip
        block.set()
        payer.scripted.lines = ["done"]
        await runner.resume("r")
        assert await runner.run_once()
        assert (await runner.wait("r")).status is RunStatus.SUCCEEDED
        assert await kept(runner) == [
            "user: pay", "call pay pay", "tool: paid 2", "tool: paid 3",
            "user: again", "assistant: it was paid", "assistant: done",
        ]  # fmt: skip
        assert not any("open" in each.metadata or "unanswered" in each.metadata for each in await messages(runner))


@pytest.mark.parametrize("signed", [{}, {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]}])
@pytest.mark.parametrize(
    ("first", "second"), [([3], [4]), ([1, 2], [4]), ([3], [1, 2])], ids=["both", "the second", "the first"]
)
async def test_a_run_cancelled_between_two_edits_shows_what_was_executed(
    url: str, first: list[int], second: list[int], signed: dict[str, Any]
) -> None:
    """Of calls whose arguments are JSON text. Shown arguments that a person sends back are no edit."""
    text, moved = '{"items": "[1, 2]"}', list[list[int]]()

    def move(items: list[int]) -> str:
        moved.append(items)
        return "moved"

    payer = Payer(Scripted({**asks(call("move", text, "one"), call("move", text, "two")), **signed}), ToolRegistry())
    payer.tools.register(Tool.from_function(move, has_side_effects=True, requires_confirmation=True))

    def told(*given: list[int] | None) -> list[Any]:
        """What the model is told: arguments of the calls, then results. None stands for a call that was not run."""
        edits = [None if each is None or each == [1, 2] else {"items": each} for each in given]
        results = ["Error: not run" if each is None else "moved" for each in given]
        if signed:
            note = "\n\nNote: a person changed the arguments of this call before it ran, to "
            results = [
                each if edit is None else f"{each}{note}{json.dumps(edit, separators=(',', ':'))}"
                for each, edit in zip(results, edits, strict=True)
            ]
        return [*(json.loads(text) if each is None or signed else each for each in edits), *results]

    async def stored() -> list[Any]:
        found = await messages(runner)
        calls = [one.arguments for each in found for one in each.tool_calls]
        return [*calls, *(each.content for each in found if each.role == "tool")]

    async with opened(url, payer) as runner:
        await runner.submit("payer", said("move"), run_id="r")
        assert await runner.run_once()
        asked = (await runner.approvals())[0].request_id
        edit = {"approved": True, "tool_args": {"items": first}}
        await runner.approve("r", "tool:move", edit, request_id=asked)
        assert await runner.run_once()
        await runner.cancel("r", wait=True)
        assert await stored() == told(first, None)
        await runner.resume("r")
        assert await runner.run_once()
        await runner.approve("r", "tool:move", {"approved": True, "arguments": {"items": second}})
        payer.scripted.lines = ["done"]
        assert await runner.run_once()
        result = await runner.wait("r", timeout=0)
        assert moved == [first, second]
        calls = [json.loads(each["function"]["arguments"]) for each in result.final_messages[-4]["tool_calls"]]
        assert [*calls, *(each["content"] for each in result.final_messages[-3:-1])] == told(first, second)
        assert await stored() == told(first, second)


async def test_a_dead_run_keeps_its_turns(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay"))), bank.tools())
    async with opened(url, payer, max_crashes=2) as runner:
        await parked(runner, payer)
        await runner.approve("r", "tool:ask")

        async def killed(*args: Any) -> None:
            raise RuntimeError("the worker is gone")

        with monkeypatch.context() as patched:
            patched.setattr(RunExecution, "_attempt", killed)
            for _ in range(3):
                with contextlib.suppress(RuntimeError):
                    await runner.run_once()
                row = await runner.queue.require("r")
                await runner.queue.commits.commit(None, [Op("queue.beat", (((row.run_id, row.claim_id),), -1.0))])
        await runner.run_once()
        assert (await runner.get_run("r")).status == "dead"
        assert await kept(runner) == [*PAID, "call ask", "tool: Error: not run"]


# -- a run that is resumed comes to the same conversation as one that was never interrupted

TURN = st.lists(st.sampled_from(["pay", "look"]), min_size=1, max_size=3)


@properties(max_examples=60, deadline=None, database=None, derandomize=True)
@given(data=st.data(), turns=st.lists(TURN, min_size=1, max_size=3), again=st.integers(1, 2), other=st.booleans())
def test_a_resumed_run_adds_no_message_twice(data: Any, turns: list[list[str]], again: int, other: bool) -> None:
    """The model, or a tool, fails at any call, in one or two executions. Another run may come in between."""
    points = ["model", *[f"tool {number}" for number in range(sum(map(len, turns)))]]
    failures = [data.draw(st.sampled_from(points)) for _ in range(again)]
    at_model = [data.draw(st.integers(0, len(turns))) for _ in range(again)]
    sent = data.draw(st.booleans())
    asyncio.run(_interrupted(turns, list(zip(failures, at_model, strict=True)), other=other, sent=sent))


class _Down(BaseException):
    """Ends the attempt inside a tool, as a cancellation does."""


async def _interrupted(turns: list[list[str]], failures: list[tuple[str, int]], *, other: bool, sent: bool) -> None:
    numbers = itertools.count()
    script = [asks(*(call(name, id=f"c{next(numbers)}") for name in names)) for names in turns]
    calls: list[str] = []
    failing: list[tuple[str, int]] = []
    interrupt: list[Callable[[], Awaitable[Any]]] = []

    def say(messages: Sequence[Any]) -> Any:
        if messages[-1]["content"] == "in between":
            return "answer in between"
        done = sum(1 for each in messages if each["role"] == "assistant" and each.get("tool_calls"))
        if failing and failing[0][0] == "model" and failing[0][1] == done:
            failing.pop(0)
            return ProviderUnavailable("away")
        return script[done] if done < len(script) else "the end"

    async def tool(name: str) -> str:
        number = len(calls)
        if failing and failing[0][0] == f"tool {number}":
            failing.pop(0)
            await interrupt[0]()
            await asyncio.sleep(60)
        calls.append(name)
        return f"{name} {number}"

    tools = ToolRegistry()
    for name, effects in (("pay", True), ("look", False)):
        tools.register(Tool.from_function(lambda name=name: tool(name), name=name, has_side_effects=effects))
    payer = Payer(Scripted(say=say), tools)
    async with opened("memory://", payer) as runner:
        interrupt.append(lambda: runner.cancel("r"))
        await runner.submit("payer", said("pay"), run_id="r")
        if sent:
            await runner.send("r", "and quickly")
        for failure in failures:
            failing[:] = [failure]
            if (await runner.get_run("r")).status in ("failed", "cancelled"):
                await runner.resume("r")
            await runner.run_once()
            failing.clear()
            if (await runner.get_run("r")).status == "succeeded":
                break
            if other:
                other = False
                await runner.execute("payer", None, said("in between"))
                history = payer.scripted.asked[-1]
                ids = [one["id"] for each in history for one in each.get("tool_calls") or ()]
                assert ids == [each["tool_call_id"] for each in history if each["role"] == "tool"]
                assert all(any(name in str(each["content"]) for each in history) for name in set(calls))
        if (await runner.get_run("r")).status != "succeeded":
            await runner.resume("r")
            await runner.run_once()
        assert (await runner.get_run("r")).status == "succeeded"
        found = await kept(runner)
        between = [each for each in found if each not in ("user: in between", "assistant: answer in between")]
        results = iter(calls)
        assert len(found) - len(between) in (0, 2)
        expected = ["user: pay", *(["user: and quickly"] if sent else [])]
        for names in turns:
            expected += [f"call {' '.join(names)}", *[f"tool: {name}" for name in names]]
        assert [each.rsplit(" ", 1)[0] if each.startswith("tool:") else each for each in between] == [
            *expected,
            "assistant: the end",
        ]
        assert sorted(results) == sorted(calls)
        own = [each for each in await messages(runner) if shown(each) in between]
        assert not any(each.metadata.keys() & {"open", "unanswered", "rejected"} for each in own)


# -- what a run does not keep, and what changes between its executions


async def test_messages_after_the_last_complete_turn_stay_unless_the_setting_says_no(url: str) -> None:
    for unanswered in (True, False):
        bank, run_id = Bank(), f"run {unanswered}"
        payer = Payer(Scripted(asks(call("pay")), ProviderUnavailable("away")), bank.tools())
        async with opened(url, payer, keep_unanswered=unanswered) as runner:

            async def sends(run_id: str = run_id) -> str:
                await runner.send(run_id, "and quickly")
                return "paid 1"

            bank.answer = sends
            before = len(await messages(runner))
            await runner.execute("payer", run_id, said("pay"))
            assert (await kept(runner))[before:] == [*PAID, *(["user: and quickly"] if unanswered else [])]


async def test_an_agent_that_keeps_the_conversation_itself_gets_no_turn_of_a_cancelled_run(url: str) -> None:
    class Own(Payer):
        async def before_run(self, ctx: Any) -> None:
            ctx.own_conversation()

    payer = Own(Scripted(asks(call("pay"))), Bank().tools())
    async with opened(url, payer) as runner:
        await parked(runner, payer)
        await runner.cancel("r")
        assert await messages(runner) == []


async def test_a_run_with_the_id_of_a_deleted_run_adds_its_own_messages(url: str) -> None:
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay")), ProviderUnavailable("away")), bank.tools())
    async with opened(url, payer) as runner:
        for number in (1, 2, 3):
            payer.scripted.lines = [asks(call("pay")), ProviderUnavailable("away"), f"paid for the {number}th time"]
            assert (await runner.execute("payer", "r", said(f"pay {number}"))).status is RunStatus.FAILED
            await runner.resume("r")
            assert await runner.run_once()
            assert (await runner.get_run("r")).status == "succeeded"
            await runner.discard("r")
        found = await kept(runner)
        assert found == [
            line
            for number in (1, 2, 3)
            for line in (
                f"user: pay {number}", "call pay", f"tool: paid {number}", f"assistant: paid for the {number}th time"
            )
        ]  # fmt: skip


async def test_a_run_that_failed_under_an_earlier_release_adds_each_message_once(url: str) -> None:
    """Its message has neither a run nor a position, and no turn is stored."""
    payer = Payer(Scripted(ProviderUnavailable("away"), asks(call("pay")), "done"), Bank().tools())
    async with opened(url, payer) as runner:
        await runner.execute("payer", "r", said("pay"))
        store, conversation = runner.persistence.conversations, await stored(runner)
        for each in conversation.messages:
            each.run_id = each.position = None
        await store.save(conversation)
        await runner.resume("r")
        assert await runner.run_once()
        assert await kept(runner) == [*PAID, "assistant: done"]
        assert not any(each.metadata.get("unanswered") for each in await messages(runner))


@pytest.mark.parametrize("what", ["conversation", "result", "call"])
async def test_what_was_deleted_between_two_executions_stops_no_run(url: str, what: str) -> None:
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay")), ProviderUnavailable("away"), "done", "it was paid"), bank.tools())
    async with opened(url, payer) as runner:
        await runner.execute("payer", "r", said("pay"))
        store, conversation = runner.persistence.conversations, await stored(runner)
        if what == "conversation":
            await store.delete(conversation.id)
        else:
            del conversation.messages[2 if what == "result" else 1]
            await store.save(conversation)
        await runner.resume("r")
        assert await runner.run_once()
        assert await kept(runner) == [*PAID, "assistant: done"]
        assert bank.paid == 1


async def test_what_the_application_edits_between_two_executions_stays(url: str) -> None:
    payer = Payer(Scripted(asks(call("pay")), ProviderUnavailable("away"), "done"), Bank().tools())
    async with opened(url, payer) as runner:
        await runner.execute("payer", "r", said("pay"))
        store, conversation = runner.persistence.conversations, await stored(runner)
        conversation.messages[2].content = "paid, receipt removed"
        await store.save(conversation)
        edited = await store.edit_message(conversation.id, conversation.messages[0].id, "pay, please")
        await runner.resume("r")
        assert await runner.run_once()
        main = await store.history(conversation.id, branch_id=None)
        assert [shown(each) for each in main] == [
            "user: pay", "call pay", "tool: paid, receipt removed", "assistant: done"
        ]  # fmt: skip
        assert [shown(each) for each in await store.history(conversation.id, leaf=edited.id)] == ["user: pay, please"]


async def test_a_message_of_the_customer_while_the_run_is_parked_stays_apart(url: str) -> None:
    """With another concurrency key, the next run does not wait for the parked one."""
    payer = Payer(Scripted(asks(call("pay"))), Bank().tools())
    async with opened(url, payer) as runner:
        await parked(runner, payer)
        payer.scripted.lines = ["hello"]
        await runner.execute("payer", None, said("hi"), concurrency_key="")
        assert [each["content"] for each in payer.scripted.asked[-1]] == ["Be exact.", "hi"]
        await runner.cancel("r")
        assert await kept(runner) == ["user: hi", "assistant: hello", *PAID, "call ask", "tool: Error: not run"]


@pytest.mark.parametrize("error", [RequestRefused("bad image"), ContextOverflow("too long")])
async def test_a_result_that_the_provider_may_have_rejected_is_kept_as_a_short_text(url: str, error: Any) -> None:
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay")), error), bank.tools())

    async def pictured() -> Any:
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        return ContentParts([{"type": "text", "text": "receipt 4711" + " " * 9_000}, picture])

    bank.answer = pictured
    async with opened(url, payer) as runner:
        await runner.execute("payer", "r", said("pay"))
        found = await messages(runner)
        assert [each.role for each in found] == ["user", "assistant", "tool"]
        assert str(found[2].content).startswith("receipt 4711")
        assert len(str(found[2].content)) < 2_100
        assert "rejected" not in found[0].metadata  # the first request, which was answered, had the user's message
        assert (await seen_next(runner, payer.scripted))[2].startswith("tool: receipt 4711")
        payer.scripted.lines = ["done"]
        await runner.resume("r")
        assert await runner.run_once()
        assert (await messages(runner))[2].content == (await pictured())  # what the tool returned


async def test_an_agent_without_the_loop_keeps_the_turns_that_it_returned(url: str) -> None:
    async def run(ctx: Any) -> RunResult:
        told = [*ctx.input_messages, asks(call("pay"), call("look", id="x"))]
        told += [{"role": "tool", "tool_call_id": "id-pay", "content": "paid 1"}, {"role": "assistant", "content": "?"}]
        return RunResult({}, told, error=ErrorInfo("Odd", "no", retriable=False))

    async with opened(url, Agent("own", run)) as runner:
        await runner.execute("own", None, said("pay"))
        no_result = "tool: Error: no result of this call is known"
        assert await kept(runner) == ["user: pay", "call pay look", "tool: paid 1", no_result]


async def test_turns_of_all_loops_of_a_run_stay(url: str) -> None:
    """The second loop continues the first one, and the third one has another conversation."""
    bank = Bank()
    model = Scripted(asks(call("pay")), "first", asks(call("look")), "second", asks(call("pay")), ValueError("no"))

    async def run(ctx: Any) -> RunResult:
        tools = bank.tools()
        prompt = {"role": "system", "content": "Be exact."}
        done = await run_turn_loop(ctx, model, tools, messages=[prompt, *ctx.input_messages])
        more = [*done.messages, {"role": "user", "content": "go on"}]
        await run_turn_loop(ctx, model, tools, messages=more)
        await run_turn_loop(ctx, model, tools, messages=[{"role": "user", "content": "something else"}])
        return RunResult({})

    async with opened(url, Agent("loops", run)) as runner:
        await runner.execute("loops", None, said("pay"))
        assert await kept(runner) == [
            *PAID, "assistant: first", "user: go on", "call look", "tool: looked", "assistant: second",
            "call pay", "tool: paid 2",
        ]  # fmt: skip


async def test_a_fork_that_fails_keeps_the_copied_turns_on_its_branch(url: str) -> None:
    bank = Bank()
    payer = Payer(Scripted(asks(call("pay")), ProviderUnavailable("away"), ProviderUnavailable("away")), bank.tools())
    async with opened(url, payer) as runner:
        await runner.execute("payer", "r", said("pay"))
        fork = await runner.fork("r")
        await runner.run_once()
        assert (await runner.get_run(fork)).status == "failed"
        assert await kept(runner) == PAID
        store, room = runner.persistence.conversations, conversation_id(ROOM)
        assert room is not None
        [_, other] = await store.branches(room)
        assert [shown(each) for each in await store.history(room, branch_id=other.id)] == PAID
        assert bank.paid == 1


async def test_two_cancellations_and_a_worker_at_the_same_time_keep_each_message_once(url: str) -> None:
    payer = Payer(Scripted(asks(call("pay"))), Bank().tools())
    async with opened(url, payer) as runner:
        await parked(runner, payer)
        await runner.approve("r", "tool:ask")
        payer.scripted.lines = ["done"]
        await asyncio.gather(runner.cancel("r"), runner.run_once(), runner.cancel("r"))
        found = await kept(runner)
        assert found[:4] == [*PAID, "call ask"]
        assert len(found) == (6 if (await runner.get_run("r")).status == "succeeded" else 5)


async def test_turns_of_encrypted_runs_are_kept_encrypted(tmp_path: Path) -> None:
    payer = Payer(Scripted(asks(call("pay"))), Bank().tools())
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k"))
    async with opened(str(tmp_path / "app.db"), payer) as runner:
        await parked(runner, payer)
        await runner.cancel("r")
        assert (await kept(runner))[:3] == PAID
    stored = b"".join(each.read_bytes() for each in tmp_path.glob("app.db*") if each.is_file())
    assert b"paid 1" not in stored
    configure(payload_codec=None)


async def test_a_process_without_the_key_cancels_the_run_and_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    payer = Payer(Scripted(asks(call("pay"))), Bank().tools())
    configure(payload_codec=AESGCMCodec({"k": KEY}, "k"))
    async with opened(str(tmp_path / "app.db"), payer) as runner:
        await parked(runner, payer)
    configure(payload_codec=None)
    async with opened(str(tmp_path / "app.db")) as runner:
        await runner.cancel("r")
        assert (await runner.queue.require("r")).status == "cancelled"
    assert any("are not in its conversation" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("end", ["limit", "error"])
async def test_a_run_killed_at_each_write_before_it_fails_keeps_the_same_turns(end: str) -> None:
    paid: dict[str, int] = {}

    async def pay(ctx: RunContext) -> str:
        paid[ctx.idempotency_key or ""] = 1  # the service recognizes the key
        return "paid"

    def say(messages: Sequence[Any]) -> Any:
        if len(messages) > 4 and end == "error":
            return RequestRefused("no")
        return asks(call("pay", id="a"), call("look", id="b"), call("pay", id="c"))

    tools = ToolRegistry()
    tools.register(Tool.from_function(pay, name="pay", has_side_effects=True))
    tools.register(Tool.from_function(lambda: "looked", name="look"))
    report = await crash_everywhere(
        lambda: Payer(Scripted(say=say), tools), {**said("pay"), "limits": {"max_tool_calls": 6}}, status="failed",
        persistence=True, effects=lambda: dict(paid), reset=paid.clear,
    )  # fmt: skip
    assert report.outcome.error is not None
    assert report.outcome.error.type == ("LimitExceeded" if end == "limit" else "RequestRefused")
    assert len(paid) == (4 if end == "limit" else 2)
