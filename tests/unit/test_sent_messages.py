"""Messages that are sent to a run while its agent works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import open_run
from agent_runtime_core._core.codec.json import decode
from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core._execution.mailbox import MailboxReader
from agent_runtime_core._execution.run_control import MailEvent
from agent_runtime_core._journal.record import Record
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.errors import IllegalTransition, InvalidArgument, LimitExceeded, UnknownRun
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, RunResult, Tool, ToolRegistry
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.loop import Hooks, TurnState, run_turn_loop
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import SQLiteQueue
from agent_runtime_core.queue.records import MailboxMessage
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.testing import create_test_context, record, run_agent_test
from tests.support.runs import Rig, Script, until
from tests.support.scripted_model import Scripted, asks, call

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
Say = Callable[[list[Any]], Awaitable[Any]]


def user(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def unanswered(text: str) -> dict[str, Any]:
    return user(text, metadata={"unanswered": True})


class Model(LLMClient):
    """A model whose answer to the n-th call is what the n-th function returns."""

    default_model = "model"

    def __init__(self, *answers: Say | str) -> None:
        self.answers = [*answers]
        self.asked: list[list[Any]] = []

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        self.asked.append([*messages])
        answer = self.answers.pop(0)
        said = answer if isinstance(answer, str) else await answer(messages)
        return LLMResponse(said if isinstance(said, dict) else assistant(said), {"total_tokens": 10}, "model", "stop")

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        response = await self.generate(messages)
        yield LLMStreamChunk(response.message["content"], finish_reason="stop", response=response)


async def go(rig: Rig, body: Any) -> RunResult:
    """Execute the body as run "r" that begins with "hello"; once more resumes it."""
    return await rig.runner.execute(Script(body), "r", HELLO)


def loop(model: LLMClient, *tools: Any, **options: Any) -> Callable[[Any], Awaitable[RunResult]]:
    """An agent's code: one loop over the run's messages."""

    async def body(ctx: Any) -> RunResult:
        done = await run_turn_loop(ctx, model, tools_of(*tools), **options)
        return RunResult({"response": done.text}, done.messages, done.usage)

    return body


def tools_of(*functions: Any) -> ToolRegistry:
    tools = ToolRegistry()
    for each in functions:
        tools.register(each if isinstance(each, Tool) else Tool.from_function(each))
    return tools


@pytest.fixture(params=["memory", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "runs.db" if request.param == "sqlite" else None


# -- sending


async def test_a_message_before_the_first_model_call_is_part_of_its_request(where: Path | None) -> None:
    async with Rig(where) as rig:
        model = Model("hi")
        rig.register(loop(model))
        await rig.runner.submit("script", HELLO, run_id="r")
        await rig.runner.send("r", "and be brief")
        await rig.runner.run_once()
        result = await rig.runner.wait("r")
        assert model.asked == [[user("hello"), user("and be brief")]]
        assert result.final_messages == [user("hello"), user("and be brief"), assistant("hi")]


async def test_messages_during_a_call_and_a_tool_come_before_the_next_call(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def work() -> str:
            await rig.runner.send("r", "three")
            return "worked"

        async def first(messages: list[Any]) -> Any:
            await rig.runner.send("r", "one")
            await rig.runner.send("r", {"role": "user", "content": [{"type": "text", "text": "two"}]})
            return asks(call("work"))

        model = Model(first, "done")
        result = await go(rig, loop(model, work))
        contents = [each["content"] for each in model.asked[1]]
        assert contents == ["hello", None, "worked", "one", [{"type": "text", "text": "two"}], "three"]
        assert result.final_messages == [*model.asked[1], assistant("done")]


async def test_the_loop_continues_if_a_message_arrives_while_the_model_answers(where: Path | None) -> None:
    async with Rig(where) as rig:
        states: list[TurnState] = []

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "wait")
            return "done"

        result = await go(rig, loop(Model(first, "waited"), hooks=Hooks(on_state=states.append)))
        assert result.final_messages == [user("hello"), assistant("done"), user("wait"), assistant("waited")]
        assert result.final_output == {"response": "waited"}
        assert states == [TurnState.STREAMING, TurnState.STREAMING, TurnState.YIELDING]


async def test_a_typed_answer_is_given_after_the_last_message() -> None:
    async with Rig() as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "more")
            return "1"

        result = await go(rig, loop(Model(first, "2"), output_type=int))
        assert result.final_output == {"response": "2"}


async def test_an_answer_is_kept_if_no_further_call_is_allowed() -> None:
    async with Rig() as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "more")
            return "done"

        result = await go(rig, loop(Model(first), limits=RunLimits(max_turns=1)))
        assert result.error is None
        assert result.final_messages == [user("hello"), assistant("done"), unanswered("more")]


async def test_each_message_is_published_once(where: Path | None) -> None:
    async with Rig(where) as rig:
        model = Model("hi")
        rig.register(loop(model))
        await rig.runner.submit("script", HELLO, run_id="r")
        first = await rig.runner.send("r", "one")
        assert await rig.runner.send("r", "two", when="interrupt", message_id="2") == "2"
        assert await rig.runner.send("r", "two", when="interrupt", message_id="2") == "2"
        await rig.runner.run_once()
        received = [payload for kind, payload in await rig.told("message.received")]
        assert received == [
            {"content": "one", "message_id": first, "when": "next_turn"},
            {"content": "two", "message_id": "2", "when": "interrupt"},
        ]
        assert [each["content"] for each in model.asked[0]] == ["hello", "one", "two"]


async def test_a_signal_with_the_same_id_is_another_message() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.wait_for_signal("go"), await ctx.messages()]

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.signal("r", "go", 1, message_id="x")
        await rig.runner.send("r", "text", message_id="x")
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": [1, [user("text")]]}


async def test_a_finished_run_accepts_no_message() -> None:
    async with Rig() as rig:
        rig.register(loop(Model("hi")))
        await rig.runner.submit("script", {**HELLO, "conversation_id": "room 7"}, run_id="r")
        await rig.runner.send("r", "early", message_id="1")
        await rig.runner.run_once()
        with pytest.raises(IllegalTransition) as refused:
            await rig.runner.send("r", "late")
        assert str(refused.value) == (
            "run 'r' has succeeded, so it accepts no messages. Start a new run of its conversation: "
            "runner.submit('script', {'messages': [...], 'conversation_id': 'room 7'})"
        )
        assert await rig.runner.send("r", "early", message_id="1") == "1"  # it was stored before the end
        with pytest.raises(UnknownRun):
            await rig.runner.send("another", "text")


@pytest.mark.parametrize(
    ("message", "options", "reason"),
    [
        ("", {}, "or list of parts as its content, got"),
        (" \n", {}, "or list of parts as its content, got"),
        (3, {}, "message must be a string or a dict"),
        ({"role": "assistant", "content": "x"}, {}, "role 'user', got 'assistant'"),
        ({"role": "system", "content": "x"}, {}, "role 'user', got 'system'"),
        ({"role": "user"}, {}, "or list of parts as its content, got"),
        ({"role": "user", "content": {"a": 1}}, {}, "or list of parts as its content, got"),
        ("x", {"when": "now"}, "when must be 'next_turn' or 'interrupt', got 'now'"),
    ],
)
async def test_what_is_no_message_is_rejected(message: Any, options: Any, reason: str) -> None:
    async with Rig() as rig:
        with pytest.raises(InvalidArgument, match=reason):
            await rig.runner.send("r", message, **options)
        with pytest.raises(InvalidArgument, match=reason):
            create_test_context("hello").send(message, **options)


# -- resumed runs


async def test_a_message_is_taken_again_if_its_call_was_not_recorded(where: Path | None) -> None:
    async with Rig(where) as rig:
        inside = asyncio.Event()

        async def hangs(messages: list[Any]) -> str:
            inside.set()
            await asyncio.get_running_loop().create_future()
            return ""

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            return "first"

        async def third(messages: list[Any]) -> str:
            await rig.runner.send("r", "two")
            return "third"

        model = Model(first, hangs, third, "fourth")
        body = loop(model)
        task = asyncio.ensure_future(go(rig, body))
        await until(inside)
        task.cancel()
        await asyncio.wait({task})
        result = await go(rig, body)
        assert model.asked[1] == model.asked[2] == [user("hello"), assistant("first"), user("one")]
        assert result.final_messages == [*model.asked[1], assistant("third"), user("two"), assistant("fourth")]
        assert len(await rig.told("message.received")) == 2


async def test_a_replayed_loop_takes_its_messages_from_the_records(where: Path | None) -> None:
    """A second loop of the run waits for nothing: what it received is not given to the first one on a resume."""
    async with Rig(where) as rig:
        inside = asyncio.Event()

        async def between(ctx: Any) -> None:
            if not inside.is_set():
                inside.set()
                await asyncio.get_running_loop().create_future()

        async def second_call(messages: list[Any]) -> str:
            await rig.runner.send("r", "late")
            return "b"

        model = Model("a", second_call, "c")

        async def body(ctx: Any) -> RunResult:
            one = await run_turn_loop(ctx, model)
            two = await run_turn_loop(ctx, model)
            await between(ctx)
            return RunResult({"one": one.messages, "two": two.messages})

        task = asyncio.ensure_future(go(rig, body))
        await until(inside)
        await rig.runner.send("r", "too late")
        task.cancel()
        await asyncio.wait({task})
        # The second loop ended. Only it may continue, with the message that no record has.
        model.answers.append("d")
        result = await go(rig, body)
        assert result.final_output["one"] == [user("hello"), assistant("a")]
        assert result.final_output["two"] == [
            user("hello"), assistant("b"), user("late"), assistant("c"), user("too late"), assistant("d")
        ]  # fmt: skip


async def test_a_loop_whose_call_failed_gives_its_messages_to_the_next_one(where: Path | None) -> None:
    async with Rig(where) as rig:
        inside = asyncio.Event()

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            return "first"

        async def fails(messages: list[Any]) -> str:
            raise ValueError("no")

        model = Model(first, fails, "second")

        async def body(ctx: Any) -> RunResult:
            try:
                await run_turn_loop(ctx, model)
            except ValueError:
                done = await run_turn_loop(ctx, model)
            if not inside.is_set():
                inside.set()
                await asyncio.get_running_loop().create_future()
            return RunResult({"messages": done.messages})

        task = asyncio.ensure_future(go(rig, body))
        await until(inside)
        task.cancel()
        await asyncio.wait({task})
        result = await go(rig, body)
        assert model.asked[2] == [user("hello"), user("one")]
        assert result.final_output["messages"] == [user("hello"), user("one"), assistant("second")]


async def test_a_resumed_run_takes_what_the_failed_one_left(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def fails(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            raise ValueError("no")

        model = Model(fails, "ok")
        rig.register(loop(model))
        await rig.runner.submit("script", HELLO, run_id="r")
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_messages == [user("hello"), unanswered("one")]
        await rig.runner.resume("r")
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_messages == [user("hello"), user("one"), assistant("ok")]


@pytest.mark.parametrize("inline", [True, False])
async def test_the_next_attempt_takes_the_messages_of_the_last_one(where: Path | None, inline: bool) -> None:
    async with Rig(where, max_retries=2, retry_backoff_base=0) as rig:

        async def fails(messages: list[Any]) -> str:
            await rig.runner.send("r", "two", message_id="2")
            raise ValueError("no")

        model = Model(fails, "ok")
        rig.register(loop(model))
        await rig.runner.submit("script", HELLO, run_id="r")
        await rig.runner.send("r", "one")
        if inline:
            await rig.runner.execute("script", "r", HELLO)
        else:
            while await rig.runner.run_once():
                pass
        texts = [user("hello"), user("one"), user("two")]
        assert model.asked == [texts[:2], texts]
        assert (await rig.runner.wait("r")).final_messages == [*texts, assistant("ok")]


async def test_a_message_to_a_run_that_waits_for_an_approval_comes_after_its_tool(where: Path | None) -> None:
    async with Rig(where, park_after=0) as rig:

        async def ask(messages: list[Any]) -> Any:
            return asks(call("pay"))

        def pay() -> str:
            return "paid"

        tool = Tool.from_function(pay)
        tool.requires_confirmation = True
        model = Model(ask, "done")
        rig.register(loop(model, tool))
        await rig.runner.submit("script", HELLO, run_id="r")
        await rig.runner.run_once()
        await rig.runner.send("r", "be quick", when="interrupt")
        await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).reason == "approval tool:pay"
        await rig.runner.approve("r", "tool:pay")
        await rig.runner.run_once()
        contents = [each["content"] for each in (await rig.runner.wait("r")).final_messages]
        assert contents == ["hello", None, "paid", "be quick", "done"]


async def test_a_fork_has_the_received_messages_and_none_of_the_unread(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            return "first"

        async def second(messages: list[Any]) -> str:
            await rig.runner.send("r", "two")
            return "second"

        model = Model(first, second, "third", "other")
        rig.register(loop(model))
        await rig.runner.submit("script", HELLO, run_id="r")
        await rig.runner.run_once()
        await rig.runner.fork("r", ("model", "l:0:1"), new_run_id="f")
        await rig.runner.send("f", "mine")
        await rig.runner.run_once()
        assert (await rig.runner.wait("f")).final_messages == [
            user("hello"), assistant("first"), user("one"), assistant("second"), user("mine"), assistant("other")
        ]  # fmt: skip


async def test_limits_count_the_same_on_a_resume() -> None:
    async with Rig() as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            return "first"

        def make() -> Any:
            return loop(Model(first, "second"), limits=RunLimits(max_turns=1, max_tokens=10_000))

        result = await go(rig, make())
        assert result.final_messages[-1] == unanswered("one")


async def test_a_reached_limit_leaves_the_messages_once() -> None:
    async with Rig() as rig:

        class Limited(ToolCallingAgent):
            key = "limited"
            system_prompt = "x"
            tools = ToolRegistry()
            max_iterations = 1

            def get_llm_client(self) -> LLMClient:
                return model

        async def work() -> str:
            await rig.runner.send("r", "one")
            return "worked"

        Limited.tools = tools_of(work)
        model = Scripted(asks(call("work")), "never")
        result = await rig.runner.execute(Limited(), "r", HELLO)
        assert result.error is not None
        assert result.error.type == "LimitExceeded"
        assert [each["content"] for each in result.final_messages] == ["hello", None, "worked", "one"]
        assert result.final_messages[-1] == unanswered("one")


# -- the end of a run


async def test_a_message_during_the_last_commit_is_not_lost(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def body(ctx: Any) -> RunResult:
            return RunResult({"response": "done"}, [*ctx.input_messages, assistant("done")])

        send_before_end(rig, "one", "two")
        result = await go(rig, body)
        assert result.final_messages == [user("hello"), assistant("done"), unanswered("one"), unanswered("two")]
        assert (await rig.runner.wait("r")).final_messages == result.final_messages
        kinds = [kind for kind, _ in await rig.told()]
        assert (kinds.count("run.started"), kinds.count("run.succeeded")) == (1, 1)


async def test_other_mail_during_the_last_commit_changes_nothing(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def body(ctx: Any) -> str:
            return "done"

        end, sent = rig.runner.queue.commits.commit, list[int]()

        async def late(guard: Any, ops: Any) -> Any:
            if not sent and any(op.name == "queue.settle" for op in ops):
                sent.append(1)
                await rig.runner.signal("r", "late")
            return await end(guard, ops)

        patch(rig, late)
        assert (await rig.go(body)).final_messages == []
        assert (await rig.runner.get_run("r")).status == "succeeded"


async def test_an_agent_that_reads_none_keeps_all_in_its_result(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def body(ctx: Any) -> RunResult:
            await ctx.step("read", rig.runner.send, "r", "one")
            return RunResult({"response": "done"})

        result = await go(rig, body)
        assert result.final_messages == [user("hello"), assistant("done"), unanswered("one")]


async def test_a_cancelled_run_keeps_its_messages() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            await rig.runner.send("r", "one")
            await rig.runner.cancel("r")
            await asyncio.get_running_loop().create_future()

        result = await go(rig, body)
        assert result.status == "cancelled"
        assert result.final_messages == [user("hello"), unanswered("one")]


@pytest.mark.parametrize("whole", [True, False])
async def test_a_late_message_is_in_the_conversation(tmp_path: Path, whole: bool) -> None:
    registry = Registry()
    stores = PersistenceManager.open(tmp_path / "b.db")
    async with AgentRunner.open(tmp_path / "a.db", registry=registry, persistence=stores) as runner:

        class Plain(ToolCallingAgent):
            key = "plain"
            system_prompt = "x"
            tools = ToolRegistry()

            async def run(self, ctx: Any) -> RunResult:
                await ctx.step("send", runner.send, "r", "late")
                return RunResult({"response": "hi"}, [*ctx.input_messages, assistant("hi")] if whole else [])

        registry.register(Plain())
        await runner.submit("plain", {**HELLO, "conversation_id": "room"}, run_id="r")
        await runner.run_once()
        assert (await runner.get_run("r")).status == "succeeded"
        chat = conversation_id("room")
        assert chat is not None
        stored = await runner.persistence.conversations.history(chat)
        assert [(each.role, each.content, each.metadata) for each in stored] == [
            ("user", "hello", {}),
            ("assistant", "hi", {}),
            ("user", "late", {"unanswered": True}),
        ]


def patch(rig: Rig, commit: Any) -> None:
    """Replace the commits of the rig's runner."""
    rig.runner.queue.commits.commit = commit  # type: ignore[method-assign]


def send_before_end(rig: Rig, *texts: str) -> None:
    """Have each of these messages arrive just before a commit that ends the run."""
    commit, left = rig.runner.queue.commits.commit, [*texts]

    async def late(guard: Any, ops: Any) -> Any:
        if left and any(op.name == "queue.settle" and op.args[1].status == "succeeded" for op in ops):
            await rig.runner.send("r", left.pop(0))
        return await commit(guard, ops)

    patch(rig, late)


# -- interrupting


def streaming(*texts: str, then: Callable[[], Awaitable[Any]]) -> Any:
    """A model that streams these texts, calls `then`, and never ends its first answer."""

    class Endless(Model):
        ended = False

        async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
            self.asked.append([*messages])
            if len(self.asked) > 1:
                yield LLMStreamChunk("new", finish_reason="stop")
                return
            try:
                for text in texts:
                    yield LLMStreamChunk(text)
                await then()
                await asyncio.get_running_loop().create_future()
            finally:
                self.ended = True

    return Endless()


async def test_an_interrupt_keeps_what_was_streamed(where: Path | None) -> None:
    async with Rig(where) as rig:
        model = streaming("Once ", "upon", then=lambda: rig.runner.send("r", "stop", when="interrupt"))
        inside = asyncio.Event()

        async def body(ctx: Any) -> RunResult:
            done = await run_turn_loop(ctx, model, stream=True, limits=RunLimits(max_tokens=100_000))
            if not inside.is_set():
                inside.set()
                await asyncio.get_running_loop().create_future()
            return RunResult({"usage": done.usage}, done.messages)

        task = asyncio.ensure_future(go(rig, body))
        await until(inside)
        task.cancel()
        await asyncio.wait({task})
        result = await go(rig, body)
        assert model.ended
        partial = assistant("Once upon", metadata={"partial": True})
        assert result.final_messages == [user("hello"), partial, user("stop"), assistant("new")]
        assert model.asked == [[user("hello")], [user("hello"), partial, user("stop")]]
        deltas = [payload["delta"] for _, payload in await rig.told("assistant.delta")]
        assert "".join(deltas) == "Once uponnew"
        model_calls = [each for each in await rig.records() if each.name == "model" and each.kind == "done"]
        recorded: Any = [decode(each.result or "") for each in model_calls]
        assert [each["finish_reason"] for each in recorded] == ["interrupted", "stop"]
        assert (await record(rig.runner, "r")).exchanges[1].request["messages"] == model.asked[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_interrupt_before_any_text_adds_no_message(stream: bool) -> None:
    async with Rig() as rig:

        async def hangs(messages: list[Any]) -> str:
            await rig.runner.send("r", "stop", when="interrupt")
            await asyncio.get_running_loop().create_future()
            return ""

        result = await go(rig, loop(Model(hangs, "new"), stream=stream))
        assert result.final_messages == [user("hello"), user("stop"), assistant("new")]
        assert result.usage["turns"] == 2


async def test_an_answer_that_a_provider_calls_interrupted_is_an_answer() -> None:
    async with Rig() as rig:

        class Other(Model):
            async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
                return LLMResponse(assistant("done"), {}, "model", "interrupted")

        assert (await go(rig, loop(Other()))).final_output == {"response": "done"}


@pytest.mark.parametrize("outer", [True, False])
async def test_the_last_call_that_is_allowed_is_not_interrupted(outer: bool) -> None:
    """Otherwise the run would fail, and have no answer."""
    async with Rig(limits=RunLimits(max_turns=1) if outer else None) as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "stop", when="interrupt")
            for _ in range(100):
                await asyncio.sleep(0)
            return "an answer"

        result = await go(rig, loop(Model(first), limits=RunLimits(max_turns=None if outer else 1)))
        assert result.final_output == {"response": "an answer"}
        assert result.final_messages == [user("hello"), assistant("an answer"), unanswered("stop")]


async def test_each_typed_answer_may_be_corrected_twice() -> None:
    async with Rig() as rig:

        async def typed(messages: list[Any]) -> str:
            await rig.runner.send("r", f"another than {messages[-1]['content'][:4]}")
            return '{"n": 1}'

        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        result = await go(
            rig, loop(Model("bad", "bad", typed, "bad", "bad", typed, "bad", '{"n": 2}'), output_type=schema)
        )
        assert result.final_output == {"response": '{"n": 2}'}


async def test_one_of_two_concurrent_loops_continues(where: Path | None) -> None:
    """The other one must not call the model again without a new message: some providers reject such a request."""
    async with Rig(where) as rig:
        answering, sent = 0, asyncio.Event()

        async def last(messages: list[Any]) -> str:
            nonlocal answering
            answering += 1
            if answering == 2:
                await rig.runner.send("r", "more")
                sent.set()
            await until(sent)
            return "first"

        models = Model(last, "second"), Model(last, "second")

        async def body(ctx: Any) -> RunResult:
            await asyncio.gather(*(run_turn_loop(ctx, model, ToolRegistry()) for model in models))
            return RunResult({})

        assert (await go(rig, body)).error is None
        asked = sorted(([each["content"] for each in model.asked[-1]] for model in models), key=len)
        assert asked == [["hello"], ["hello", "first", "more"]]


async def test_a_client_may_raise_an_error_of_its_own_when_it_is_interrupted() -> None:
    async with Rig() as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "stop", when="interrupt")
            try:
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                raise ConnectionError("aborted") from None
            return ""

        result = await go(rig, loop(Model(first, "new")))
        assert result.final_messages == [user("hello"), user("stop"), assistant("new")]


async def test_a_call_is_watched_once_a_message_has_arrived() -> None:
    async with Rig() as rig:
        watched = []

        def watches() -> int:
            return sum("_watch" in repr(task.get_coro()) for task in asyncio.all_tasks())

        async def first(messages: list[Any]) -> str:
            await asyncio.sleep(0)
            watched.append(watches())
            await rig.runner.send("r", "next")
            for _ in range(1000):
                await asyncio.sleep(0)
                if watches():
                    return "first"
            return "never watched"

        async def second(messages: list[Any]) -> str:
            return "second"

        result = await go(rig, loop(Model(first, second)))
        assert watched == [0]
        assert result.final_messages == [user("hello"), assistant("first"), user("next"), assistant("second")]


async def test_a_message_that_arrives_before_a_call_begins_interrupts_it(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def body(ctx: Any) -> RunResult:
            async def trim(messages: list[Any]) -> list[Any]:
                if model.asked or sent.is_set():
                    return messages
                await rig.runner.send("r", "stop", when="interrupt")
                await until(ctx.control.mail)
                sent.set()
                return messages

            done = await run_turn_loop(ctx, model, hooks=Hooks(trim=trim))
            return RunResult({"response": done.text}, done.messages)

        async def hangs(messages: list[Any]) -> str:
            await asyncio.get_running_loop().create_future()
            return ""

        sent, model = asyncio.Event(), Model(hangs, "new")
        result = await go(rig, body)
        assert result.final_messages == [user("hello"), user("stop"), assistant("new")]


async def test_two_reads_at_the_same_time_find_each_message_once() -> None:
    class Slow:
        """A mailbox whose reads end in the opposite order."""

        def __init__(self) -> None:
            self.reads: list[asyncio.Future[list[MailboxMessage]]] = []

        async def mail(self, run_id: str, after: int) -> list[MailboxMessage]:
            self.reads.append(asyncio.get_running_loop().create_future())
            return await self.reads[-1]

    slow: Any = Slow()
    mailbox = MailboxReader(slow, "r", MailEvent(), set())
    reads = [asyncio.ensure_future(mailbox.read()) for _ in range(2)]
    await asyncio.sleep(0)
    one, two = (MailboxMessage("signal", "a", "null", f"{n}", 0.0, n) for n in (1, 2))
    slow.reads[1].set_result([one, two])
    await reads[1]
    slow.reads[0].set_result([one])
    await reads[0]
    assert mailbox.unread("signal", "a") == (one, two)
    assert mailbox.cursor == 2


async def test_a_message_for_the_next_turn_does_not_interrupt() -> None:
    async with Rig() as rig:

        async def first(messages: list[Any]) -> str:
            await rig.runner.send("r", "one")
            await rig.runner.send("r", "two", when="interrupt")
            await asyncio.get_running_loop().create_future()
            return ""

        result = await go(rig, loop(Model(first, "new")))
        assert [each["content"] for each in result.final_messages] == ["hello", "one", "two", "new"]


async def test_an_interrupt_does_not_cut_off_a_tool() -> None:
    async with Rig() as rig:
        notified: list[asyncio.Event] = []

        async def work() -> str:
            await rig.runner.send("r", "stop", when="interrupt")
            await until(notified[0])
            return "worked"

        async def first(messages: list[Any]) -> Any:
            return asks(call("work"))

        async def body(ctx: Any) -> RunResult:
            notified.append(ctx.control.mail)
            return await loop(Model(first, "new"), work)(ctx)

        result = await go(rig, body)
        assert [each["content"] for each in result.final_messages] == ["hello", None, "worked", "stop", "new"]


async def test_a_cancelled_run_is_not_interrupted() -> None:
    async with Rig() as rig:

        async def hangs(messages: list[Any]) -> str:
            await rig.runner.cancel("r")
            await asyncio.get_running_loop().create_future()
            return ""

        assert (await go(rig, loop(Model(hangs)))).status == "cancelled"


async def test_an_interrupt_ends_one_of_two_calls(where: Path | None) -> None:
    async with Rig(where) as rig:
        both, go_on = asyncio.Barrier(3), asyncio.Event()

        async def hangs(messages: list[Any]) -> str:
            await both.wait()
            await until(go_on)
            return "first"

        async def again(messages: list[Any]) -> str:
            go_on.set()
            return "second"

        model = Model(hangs, hangs, again)

        async def send() -> None:
            await both.wait()
            await rig.runner.send("r", "stop", when="interrupt")

        async def body(ctx: Any) -> RunResult:
            one, two, _ = await asyncio.gather(run_turn_loop(ctx, model), run_turn_loop(ctx, model), send())
            return RunResult({"texts": sorted([str(one.text), str(two.text)])})

        result = await go(rig, body)
        assert result.final_output == {"texts": ["first", "second"]}
        assert model.asked == [[user("hello")], [user("hello")], [user("hello"), user("stop")]]


async def test_a_concurrent_call_with_messages_is_recorded_as_concurrent() -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> None:
            await rig.runner.send("r", "one")
            await asyncio.gather(run_turn_loop(ctx, Model("a"), limits=RunLimits(max_tokens=100_000)))

        await go(rig, body)
        records = [each for each in await rig.records() if each.name == "model"]
        assert [(each.kind, "beside" in (each.info or "")) for each in records] == [("started", True), ("done", True)]
        assert '"mail":[1]' in (records[1].info or "")


@pytest.mark.parametrize("recorded", [True, False])
async def test_messages_of_an_unconfirmed_call_are_unread_if_it_has_no_record(recorded: bool) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> bool:
            await rig.runner.send("r", "one")
            unconfirmed, step = ctx.journal.unconfirmed, ("model", "k:l:0:0")

            async def resolve() -> None:
                unconfirmed.pending.clear()
                if recorded:
                    ctx.journal.view.completed[step] = Record(0, "done", *step)

            taken = await ctx.inbox.take()
            unconfirmed.resolve = resolve
            unconfirmed.pending.append(None)
            ctx.inbox.put_back(taken, step)
            return bool(await ctx.inbox.has_new())

        assert (await go(rig, body)).final_output == {"value": not recorded}


# -- ctx.messages


async def test_an_agent_reads_its_messages_once(where: Path | None) -> None:
    async with Rig(where) as rig:
        inside = asyncio.Event()

        async def body(ctx: Any) -> list[Any]:
            found = [await ctx.messages()]
            await ctx.step("send", both)
            found += [await ctx.messages(), await ctx.messages()]
            if not inside.is_set():
                inside.set()
                await asyncio.get_running_loop().create_future()
            return found

        async def both() -> None:
            await rig.runner.send("r", "one")
            await rig.runner.send("r", "two")

        await rig.cut(body, inside)
        await rig.runner.send("r", "three")
        result = await rig.go(body)
        assert result.final_output == {"value": [[], [user("one"), user("two")], []]}
        assert result.final_messages == [user("one"), user("two"), unanswered("three")]
        assert len(await rig.told("message.received")) == 2


async def test_an_agent_waits_for_a_message_and_is_parked(where: Path | None) -> None:
    async with Rig(where, park_after=0) as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.messages(timeout=None), await ctx.messages(timeout=5)]

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.run_once()
        info = await rig.runner.get_run("r")
        assert (info.status, info.reason) == ("waiting", "messages")
        await rig.runner.signal("r", "other")
        await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status == "waiting"
        await rig.runner.send("r", "one")
        await rig.runner.run_once()
        rig.clock.advance(6)  # type: ignore[attr-defined]
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": [[user("one")], []]}


async def test_a_message_wakes_an_agent_that_waits_for_something_else(where: Path | None) -> None:
    async with Rig(where, park_after=0) as rig:

        async def body(ctx: Any) -> Any:
            return [await ctx.wait_for_signal("go"), await ctx.messages()]

        rig.register(body)
        await rig.runner.submit("script", {}, run_id="r")
        await rig.runner.run_once()
        await rig.runner.send("r", "one")
        await rig.runner.run_once()
        assert (await rig.runner.get_run("r")).status == "waiting"
        await rig.runner.signal("r", "go")
        await rig.runner.run_once()
        assert (await rig.runner.wait("r")).final_output == {"value": [None, [user("one")]]}


@pytest.mark.parametrize("timeout", [-1, "soon"])
async def test_a_timeout_must_be_a_number_of_seconds(timeout: Any) -> None:
    async with Rig() as rig:

        async def body(ctx: Any) -> Any:
            with pytest.raises(InvalidArgument, match="timeout must be"):
                await ctx.messages(timeout=timeout)

        (await rig.go(body)).raise_for_status()


async def test_a_loop_inside_a_step_takes_no_message(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def inner() -> str:
            return str((await run_turn_loop(context[0], Model("inner"))).text)

        context: list[Any] = []

        async def body(ctx: Any) -> RunResult:
            context.append(ctx)
            await rig.runner.send("r", "one")
            await ctx.step("inner", inner)
            return await loop(Model("outer"))(ctx)

        result = await go(rig, body)
        assert result.final_messages == [user("hello"), user("one"), assistant("outer")]


async def test_open_run_takes_messages_and_replays_them(tmp_path: Path) -> None:
    place = str(tmp_path / "runs.db")
    said: list[Any] = []
    for _ in range(2):
        async with open_run(place, "r", input=HELLO) as ctx:
            if not said:
                async with AgentRunner.open(place) as runner:
                    await runner.send("r", "one")
            done = await run_turn_loop(ctx, Model("hi"))
            said.append(done.messages)
            if len(said) == 1:
                async with AgentRunner.open(place) as runner:
                    await runner.send("r", "unread")
    assert said == [[user("hello"), user("one"), assistant("hi")]] * 2
    async with AgentRunner.open(place) as runner:
        result = await runner.wait("r")
    assert result.final_messages == [user("hello"), user("one"), unanswered("unread")]


async def test_a_child_run_takes_its_own_messages(where: Path | None) -> None:
    async with Rig(where) as rig:

        async def child(ctx: Any) -> RunResult:
            await ctx.step("send", rig.runner.send, str(ctx.run_id), "to the child")
            return await loop(Model("child"))(ctx)

        rig.register(child, "child")

        async def parent(ctx: Any) -> RunResult:
            called = await ctx.call("child", HELLO)
            await ctx.step("send", rig.runner.send, "r", "to the parent")
            done = await run_turn_loop(ctx, Model("parent"))
            return RunResult({"child": called.final_messages}, done.messages)

        result = await go(rig, parent)
        assert result.final_output == {"child": [user("hello"), user("to the child"), assistant("child")]}
        assert result.final_messages == [user("hello"), user("to the parent"), assistant("parent")]


# -- contexts of tests


async def test_a_test_sends_messages_to_a_loop() -> None:
    ctx = create_test_context("hello")

    async def first(messages: list[Any]) -> str:
        ctx.send("one")
        return "first"

    async def second(messages: list[Any]) -> str:
        ctx.send("two", when="interrupt")
        await asyncio.get_running_loop().create_future()
        return ""

    done = await run_turn_loop(ctx, Model(first, second, "third"))
    assert [each["content"] for each in done.messages] == ["hello", "first", "one", "two", "third"]


async def test_a_test_sends_messages_to_an_agent() -> None:
    class Reader(ToolCallingAgent):
        key = "reader"
        system_prompt = "x"
        tools = ToolRegistry()

        async def run(self, ctx: Any) -> RunResult:
            return RunResult({"first": await ctx.messages(), "then": await ctx.messages(timeout=None)})

    ctx = create_test_context("hello")
    assert ctx.send("one", message_id="1") == ctx.send("again", message_id="1") == "1"
    result = await run_agent_test(Reader(), ctx)
    assert result.final_output == {"first": [user("one")], "then": []}
    ctx.send("two")
    ctx.clear()
    assert await ctx.messages() == []


async def test_a_failed_call_gives_the_messages_back() -> None:
    ctx = create_test_context("hello")
    ctx.send("one")
    with pytest.raises(LimitExceeded) as reached:
        await run_turn_loop(ctx, Scripted(LimitExceeded("x", 1, 1, "y")))
    partial = reached.value.result
    assert isinstance(partial, RunResult)
    assert [each["content"] for each in partial.final_messages] == ["hello"]
    assert await ctx.messages() == [user("one")]


async def test_several_engines_keep_late_messages(tmp_path: Path) -> None:
    queue = SQLiteQueue(tmp_path / "queue.db")
    async with AgentRunner(queue, config=RunnerConfig(max_retries=1), registry=Registry()) as runner:

        async def body(ctx: Any) -> RunResult:
            await runner.send("r", "one")
            return RunResult({"response": "done"})

        result = await runner.execute(Script(body), "r", HELLO)
        assert result.final_messages == [user("hello"), assistant("done"), unanswered("one")]
    await queue.close()
