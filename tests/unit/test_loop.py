"""The agent loop: what it asks, what it runs, where it stops, and that a resumed run repeats none of it."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._views.attempts import step_views
from agent_runtime_core._views.runs import usage_view
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.errors import (
    CircuitOpen,
    InvalidArgument,
    LeaseLost,
    LimitExceeded,
    OutputMismatch,
    RateLimited,
    StepCancelledError,
    StreamCut,
    UnknownPrice,
)
from agent_runtime_core.interfaces import AgentRuntime, LLMResponse, LLMStreamChunk, RunContext, RunResult
from agent_runtime_core.limits import UNSEEN_TOKENS, RunLimits
from agent_runtime_core.loop import CancellationToken, Hooks, LoopResult, TurnState, agent_tool, run_turn_loop
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig, open_run
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockRunContext, run_agent_test
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted, asks, call

HELLO = [{"role": "user", "content": "hello"}]


def registry(*fns: Callable[..., Any], **options: Any) -> ToolRegistry:
    found = ToolRegistry()
    for fn in fns:
        found.register(fn if isinstance(fn, Tool) else Tool.from_function(fn, **options))
    return found


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def boom() -> str:
    raise ValueError("it broke")


def in_pairs(messages: list[dict[str, Any]]) -> bool:
    """Whether each tool call is followed by its result."""
    open_: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            open_.remove(message["tool_call_id"])
            continue
        if open_:
            return False
        open_ = [each["id"] for each in message.get("tool_calls") or ()]
    return not open_


@asynccontextmanager
async def context(kind: str, tmp_path: Path, messages: list[Any] = HELLO) -> AsyncIterator[Any]:
    if kind == "mock":
        yield MockRunContext(messages)
        return
    url: Any = "memory://" if kind == "memory" else tmp_path / "runs.db"
    async with open_run(url, "r", input={"messages": messages}) as ctx:
        yield ctx


KINDS = pytest.mark.parametrize("kind", ["mock", "memory", "sqlite"])


# -- what it does


@pytest.mark.sentence("004", "send context to provider; stream/collect assistant output")
@KINDS
async def test_an_answer_without_a_tool_call_ends_it(kind: str, tmp_path: Path) -> None:
    client = Scripted("hi")
    async with context(kind, tmp_path) as ctx:
        done = await run_turn_loop(ctx, client)
    assert done.text == "hi"
    assert done.state is TurnState.YIELDING
    assert done.messages == [*HELLO, {"role": "assistant", "content": "hi"}]
    assert (done.turns, done.tool_calls) == (1, 0)
    assert done.usage == {
        "prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120, "turns": 1, "tool_calls": 0
    }  # fmt: skip


async def test_an_answer_in_parts_is_its_text(tmp_path: Path) -> None:
    parts = [
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
        {"type": "text", "text": "h"},
        {"text": "i"},
    ]
    message = {"role": "assistant", "content": parts}
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, Scripted(message))
    assert done.text == "hi"
    assert done.messages[-1] == message


@pytest.mark.sentence("004", "detect tool calls; execute tools; append tool results and continue until completion")
@KINDS
async def test_tools_are_run_and_their_results_go_back(kind: str, tmp_path: Path) -> None:
    client = Scripted(asks(call("add", {"a": 1, "b": 2}, "c1"), call("add", {"a": 3, "b": 4}, "c2")), "3 and 7")
    async with context(kind, tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, registry(add), temperature=0.5)
    assert [(m["tool_call_id"], m["content"]) for m in done.messages if m["role"] == "tool"] == [
        ("c1", "3"),
        ("c2", "7"),
    ]
    assert in_pairs(done.messages)
    assert client.asked[1] == done.messages[:-1]
    assert client.options[0]["temperature"] == 0.5
    assert client.options[0]["tools"][0]["function"]["name"] == "add"
    assert (done.turns, done.tool_calls, done.usage["total_tokens"]) == (2, 2, 240)


@KINDS
async def test_what_goes_wrong_with_a_tool_is_told_to_the_model(kind: str, tmp_path: Path) -> None:
    calls = [
        call("boom", {}, "1"),
        call("nobody", {}, "2"),
        call("add", '{"a": 1', "3"),
        call("add", {"a": "x", "b": 1}, "4"),
    ]
    client = Scripted(asks(*calls), "sorry")
    async with context(kind, tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, registry(add, boom))
    said = {m["tool_call_id"]: m for m in done.messages if m["role"] == "tool"}
    assert all(m["content"].startswith("Error: ") for m in said.values())
    assert all(m["metadata"] == {"is_error": True} for m in said.values())
    assert "it broke" in said["1"]["content"]
    assert "'nobody'" in said["2"]["content"]
    assert done.text == "sorry"


async def test_calls_without_an_id_or_with_the_same_one_get_ids_of_their_own(tmp_path: Path) -> None:
    calls = [
        call("add", {"a": 1, "b": 1}, "x"),
        call("add", {"a": 2, "b": 2}, "x"),
        {**call("add", {"a": 3, "b": 3}), "id": None},
    ]
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, Scripted(asks(*calls), "ok"), registry(add))
    assert in_pairs(done.messages)
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["2", "4", "6"]


async def test_safe_tools_run_side_by_side_and_others_in_turn(tmp_path: Path) -> None:
    running, most, order = [0], [0], list[str]()

    async def look(name: str) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return name

    async def write(name: str) -> str:
        assert running[0] == 0, "a tool with side effects runs alone"
        running[0] += 1
        await asyncio.sleep(0.001)
        running[0] -= 1
        order.append(name)
        return name

    tools = registry(look)
    tools.register(Tool.from_function(write, has_side_effects=True))
    names = [
        ("look", "1"),
        ("look", "2"),
        ("look", "3"),
        ("write", "a"),
        ("look", "4"),
        ("look", "5"),
        ("write", "b"),
        ("write", "c"),
    ]
    calls = [call(tool, {"name": name}, name) for tool, name in names]
    async with context("sqlite", tmp_path) as ctx:
        done = await run_turn_loop(ctx, Scripted(asks(*calls), "ok"), tools)
    assert most[0] == 3
    assert order == ["a", "b", "c"]
    assert [m["tool_call_id"] for m in done.messages if m["role"] == "tool"] == [name for _, name in names]


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_the_events_of_a_run_are_those_of_a_tool_agent_and_no_steps(kind: str, tmp_path: Path) -> None:
    client = Scripted(asks(call("add", {"a": 1, "b": 2}, "c1")), "3")
    async with context(kind, tmp_path) as ctx:
        await run_turn_loop(ctx, client, registry(add))
        events = await ctx._writer.bus.get_events(ctx.run_id)
    told = [(e.event_type, e.payload) for e in events if not e.event_type.startswith("run.")]
    assert [kind for kind, _ in told] == ["tool.call", "tool.result"]
    assert told[0][1].items() >= {"tool_name": "add", "tool_args": {"a": 1, "b": 2}, "tool_call_id": "c1"}.items()
    assert told[1][1].items() >= {"tool_name": "add", "tool_call_id": "c1", "result": 3}.items()
    assert [e.sequence for e in events] == list(range(len(events)))


@KINDS
async def test_what_a_tool_does_to_its_arguments_is_not_told(kind: str, tmp_path: Path) -> None:
    def spoil(name: str, parts: Any) -> int:
        parts[0]["n"] = 2
        parts.append({})
        return len(parts)

    async def before(name: str, args: dict[str, Any]) -> None:
        args["name"] = "changed"

    given = {"name": "as sent", "parts": [{"n": 1}]}
    async with context(kind, tmp_path) as ctx:
        client = Scripted(asks(call("spoil", given)), "ok")
        done = await run_turn_loop(ctx, client, registry(spoil), hooks=Hooks(before_tool=before))
        if kind == "mock":
            told = dict(ctx.events)["tool.call"]
        else:
            events = await ctx._writer.bus.get_events(ctx.run_id)
            told = next(e.payload for e in events if e.event_type == "tool.call")
    assert told["tool_args"] == given
    assert done.messages[-2]["content"] == "2"


@KINDS
@pytest.mark.parametrize("text", ['{"a": ' * 99 + "1" + "}" * 99, '{"a": ' * 101 + "1" + "}" * 101, '{"a": 1e999}'])
async def test_arguments_that_nothing_could_tell_of_go_back_to_the_model(kind: str, tmp_path: Path, text: str) -> None:
    asked = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": text}}
    async with context(kind, tmp_path) as ctx:
        done = await run_turn_loop(ctx, Scripted(asks(asked), "sorry"), registry(add))
    assert done.text == "sorry"
    assert "Error: tool 'add'" in done.messages[-2]["content"]


@pytest.mark.sentence("004", "send context to provider; stream/collect assistant output")
async def test_a_streamed_answer_is_told_as_it_comes(tmp_path: Path) -> None:
    client = Scripted(asks(call("add", {"a": 1, "b": 2}), content="let me see"), "it is three")
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, registry(add), stream=True)
        events = await ctx._writer.bus.get_events(ctx.run_id)
    deltas = [e.payload["delta"] for e in events if e.event_type == "assistant.delta"]
    assert "".join(deltas) == "let me seeit is three"
    assert done.text == "it is three"
    assert done.tool_calls == 1


@pytest.mark.sentence("004", "calls provider (`stream` preferred, with fallback to `complete`)")
async def test_a_client_without_a_stream_is_asked_for_the_whole(tmp_path: Path) -> None:
    class Whole(Scripted):
        def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
            raise NotImplementedError

    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, Whole("hi"), stream=True)
    assert done.text == "hi"


class _Coroutine(Scripted):
    """A stream that is a coroutine: by `has`, one that gives the pieces, or says that there is none."""

    has = True

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:  # type: ignore[override]
        if not self.has:
            raise NotImplementedError
        return super().stream(messages, **options)


class _Missing(Scripted):
    stream = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [_Coroutine, type("Without", (_Coroutine,), {"has": False}), _Missing])
async def test_a_stream_that_is_no_generator(kind: type[Scripted], tmp_path: Path) -> None:
    client = kind(asks(call("add", {"a": 1, "b": 2})), "three")
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, registry(add), stream=True)
    assert (done.text, done.tool_calls) == ("three", 1)


class Pieces(Scripted):
    """Streams the pieces of each answer as they are written."""

    def __init__(self, *answers: list[LLMStreamChunk]) -> None:
        super().__init__()
        self.answers = list(answers)
        self.closed = 0

    async def stream(self, messages: list[Any], **options: Any) -> AsyncIterator[LLMStreamChunk]:
        try:
            for piece in self.answers.pop(0):
                yield piece
        finally:
            self.closed += 1


@pytest.mark.sentence(
    "004", "accumulates assistant text and tool-call deltas; reconstructs tool calls deterministically"
)
async def test_tool_calls_of_a_stream_may_come_before_its_last_piece(tmp_path: Path) -> None:
    two = [call("add", {"a": 1, "b": 2}, "c1"), call("add", {"a": 3, "b": 4}, "c2")]
    client = Pieces(
        [
            *(LLMStreamChunk(tool_calls=[each]) for each in two),
            LLMStreamChunk(usage={"total_tokens": 7}, finish_reason="x"),
        ],
        [LLMStreamChunk("ten"), LLMStreamChunk(finish_reason="stop")],
    )
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, registry(add), stream=True)
    assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["3", "7"]
    assert (done.text, done.usage["total_tokens"]) == ("ten", 7)


@pytest.mark.sentence(
    "004", "accumulates assistant text and tool-call deltas; reconstructs tool calls deterministically"
)
async def test_tool_calls_of_a_stream_that_did_not_finish_are_not_run(tmp_path: Path) -> None:
    client = Pieces([LLMStreamChunk("let me"), LLMStreamChunk(tool_calls=[call("add", {"a": 1, "b": 2})])])
    ctx = MockRunContext(HELLO)
    with pytest.raises(StreamCut, match="without a finish_reason"):
        await run_turn_loop(ctx, client, registry(add), stream=True)
    assert ctx.get_events("tool.call") == []


async def test_a_stream_is_closed_when_nobody_can_be_told_of_it() -> None:
    class Deaf(MockRunContext):
        async def emit(self, event_type: Any, payload: dict[str, Any]) -> None:
            raise LeaseLost("r")

    client = Pieces([LLMStreamChunk("a", finish_reason="stop"), LLMStreamChunk("b")])
    with pytest.raises(LeaseLost) as caught:
        await run_turn_loop(Deaf(HELLO), client, stream=True)
    assert caught.value.__traceback__ is not None  # which keeps the generator alive
    assert client.closed == 1


async def test_a_client_may_tell_no_usage(tmp_path: Path) -> None:
    silent = LLMResponse({"role": "assistant", "content": "hi"}, None)  # type: ignore[arg-type]
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, Scripted(silent))
    assert (done.text, done.usage) == ("hi", {"turns": 1, "tool_calls": 0})


async def test_a_loop_that_outlives_its_run_is_collected_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks of the run then never returns: one day it is closed, in a context that is not its own."""
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: said.append(about.exc_value))
    called, answered, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Late(Scripted):
        async def stream(self, messages: Any, **options: Any) -> AsyncIterator[LLMStreamChunk]:
            called.set()
            await answered.wait()
            left.set()
            yield LLMStreamChunk("hello")

    class Agent(AgentRuntime):
        key = "both"

        async def run(self, ctx: RunContext) -> RunResult:
            async def fail() -> None:
                await called.wait()
                raise ValueError("one of them")

            await asyncio.gather(fail(), run_turn_loop(ctx, Late(), stream=True))
            return RunResult()

    async with AgentRunner.open(tmp_path / "runs.db", config=RunnerConfig(max_retries=1)) as runner:
        assert (await runner.execute(Agent(), "r", {"messages": HELLO})).status is RunStatus.FAILED
        answered.set()
        await left.wait()
        await asyncio.sleep(0.05)
        gc.collect()
    assert said == []


async def test_tools_that_outlive_their_run_are_collected_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda about: said.append(about.exc_value))

    async with open_run("memory://", "r", input={"messages": HELLO}) as ctx:
        begun = asyncio.Event()

        async def hang() -> None:
            begun.set()
            await asyncio.get_running_loop().create_future()

        client = Scripted(asks(call("hang", {}, "1"), call("hang", {}, "2")))
        _ = asyncio.ensure_future(run_turn_loop(ctx, client, registry(hang)))  # noqa: RUF006
        await begun.wait()
        await asyncio.sleep(0)
    del ctx, hang, client
    gc.collect()
    assert said == []


@pytest.mark.parametrize("messages", ["hello", b"hello", {"role": "user"}, ["hello"], [1]], ids=repr)
async def test_messages_that_are_none_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidArgument, match="messages must be a list of dicts"):
        await run_turn_loop(MockRunContext(messages), Scripted("never"))


async def test_tools_that_are_no_registry_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tools must be a ToolRegistry"):
        await run_turn_loop(MockRunContext(HELLO), Scripted("never"), [Tool.from_function(add)])  # type: ignore[arg-type]


async def test_the_messages_that_are_sent_may_be_trimmed_and_the_history_stays(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": str(n)} for n in range(10)]
    client = Scripted("one")
    async with context("memory", tmp_path, messages) as ctx:
        done = await run_turn_loop(ctx, client, hooks=Hooks(trim=lambda all_: all_[-2:]))
        assert len(client.asked[0]) == 2
        assert len(done.messages) == 11
        with pytest.raises(InvalidArgument, match="trim must return a list of messages"):
            await run_turn_loop(ctx, Scripted("x"), hooks=Hooks(trim=lambda all_: None))


async def test_an_answer_that_was_only_paused_goes_on(tmp_path: Path) -> None:
    paused = {"role": "assistant", "content": "one moment", "provider_fields": {"anthropic": {"content": [1]}}}
    client = Scripted(LLMResponse(paused, {"total_tokens": 1}, "m", "pause_turn"), "there")
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client)
    assert done.text == "there"
    assert client.asked[1] == [*HELLO, paused]


@pytest.mark.sentence("004", "`TurnState`: `Streaming`, `ToolExecution`, `Yielding`, `Cancelled`")
async def test_its_states_are_told(tmp_path: Path) -> None:
    states: list[TurnState] = []
    async with context("memory", tmp_path) as ctx:
        await run_turn_loop(
            ctx, Scripted(asks(call("add", {"a": 1, "b": 1})), "2"), registry(add), hooks=Hooks(on_state=states.append)
        )
    assert states == [TurnState.STREAMING, TurnState.TOOL_EXECUTION, TurnState.STREAMING, TurnState.YIELDING]


# -- typed answers


@dataclass
class City:
    name: str
    people: int


@pytest.mark.parametrize("text", ['{"name":"Ulm","people":7}', '```json\n{"name": "Ulm", "people": 7}\n```'])
async def test_an_answer_of_a_type(text: str, tmp_path: Path) -> None:
    client = Scripted(text)
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, output_type=City)
    assert done.output == City("Ulm", 7)
    assert done.plain_output == {"name": "Ulm", "people": 7}
    asked = client.options[0]["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["schema"]["required"] == ["name", "people"]


async def test_an_answer_of_another_type_is_corrected_and_after_that_refused(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    client = Scripted("seven", '{"n": "7"}', '{"n": 7}')
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, output_type=schema)
        assert done.output == {"n": 7}
        assert "invalid JSON" in client.asked[1][-1]["content"]
        assert "$.n must be an integer, got '7'" in client.asked[2][-1]["content"]
        with pytest.raises(OutputMismatch, match="after 2 corrections: invalid JSON") as caught:
            await run_turn_loop(ctx, Scripted("a", "b", "c"), output_type=schema)
    assert caught.value.text == "c"


# -- resuming


class _Stop(BaseException):
    pass


async def test_a_resumed_loop_asks_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    ran: list[int] = []

    def note(n: int) -> int:
        ran.append(n)
        return n

    def script(messages: Any) -> Any:
        said = sum(m["role"] == "assistant" for m in messages)
        return asks(call("note", {"n": said}, f"c{said}")) if said < 6 else "done"

    finals: list[LoopResult] = []
    for stop in (1, 2, 4, 6, None):
        client = Scripted(say=script)

        async def life(client: Scripted = client, stop: int | None = stop) -> None:
            async with open_run(tmp_path / "runs.db", "job", input={"messages": HELLO}) as ctx:

                def trim(messages: list[Any]) -> list[Any]:
                    if stop is not None and len(ran) >= stop:
                        raise asyncio.CancelledError
                    return messages

                finals.append(await run_turn_loop(ctx, client, registry(note), hooks=Hooks(trim=trim)))

        if stop is None:
            await life()
        else:
            with pytest.raises(asyncio.CancelledError):
                await life()
        assert ran == list(range(len(ran)))
    assert ran == list(range(6))
    done = finals[0]
    assert done.text == "done"
    assert done.usage["total_tokens"] == 7 * 120, "what earlier lives used counts"
    assert in_pairs(done.messages)


async def test_a_failing_provider_ends_the_run_by_its_own_name_and_a_retry_goes_on(tmp_path: Path) -> None:
    lines: list[Any] = [asks(call("add", {"a": 1, "b": 1})), RateLimited("slow down"), "two"]
    client = Scripted(*lines)

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, client, registry(add))
            return RunResult({"response": done.text})

    async with AgentRunner.open(tmp_path / "runs.db", config=RunnerConfig(retry_backoff_base=0)) as runner:
        result = await runner.execute(Agent(), "r", {"messages": HELLO})
        assert result.final_output == {"response": "two"}
        assert (await runner.get_run("r")).attempt == 2
    assert len(client.asked) == 3, "the first answer was recorded"


# -- limits


@pytest.mark.sentence("004", "Max-turn budget: enforce strict upper bound on recursive/tool-driven loops")
@pytest.mark.sentence("004", "Max-cost budget: implement selected accounting strategy and enforce fail-fast")
@pytest.mark.parametrize("kind", ["mock", "memory"])
@pytest.mark.parametrize(
    ("limits", "name", "asked", "ran"),
    [
        ({"max_turns": 3}, "max_turns", 3, 3),
        ({"max_tool_calls": 2}, "max_tool_calls", 3, 2),
        ({"max_tool_calls": 0}, "max_tool_calls", 1, 0),
        ({"max_tokens": 300}, "max_tokens", 3, 3),
        ({"max_tokens": 0}, "max_tokens", 0, 0),
        ({"max_cost_usd": 0.25, "max_tokens": 10**9}, "max_cost_usd", 3, 3),
    ],
)
async def test_no_call_is_made_beyond_a_limit(
    kind: str, limits: dict[str, Any], name: str, asked: int, ran: int, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(n: int) -> int:
        seen.append(n)
        return n

    client = Scripted(say=lambda messages: asks(call("note", {"n": len(messages)}), content="on it"), cost=0.1)
    async with context(kind, tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match=name) as caught:
            await run_turn_loop(ctx, client, registry(note), limits)
    assert (len(client.asked), len(seen)) == (asked, ran)
    partial = caught.value.result
    assert isinstance(partial, RunResult)
    assert partial.usage["turns"] == asked
    assert in_pairs(partial.final_messages)
    assert partial.final_output == {"response": "on it" if asked else None}


async def test_what_was_said_before_is_no_answer_of_a_loop_that_a_limit_ended(tmp_path: Path) -> None:
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    async with context("mock", tmp_path) as ctx:
        with pytest.raises(LimitExceeded) as caught:
            await run_turn_loop(ctx, Scripted(), registry(), {"max_tokens": 0}, messages=before)
    partial = caught.value.result
    assert isinstance(partial, RunResult)
    assert (partial.final_output, partial.final_messages) == ({"response": None}, before)


async def test_a_loop_inside_a_tool_that_a_limit_ended_leaves_the_outer_one_what_it_has(tmp_path: Path) -> None:
    async def inside(ctx: RunContext) -> str | None:
        asked = [{"role": "user", "content": "inner"}]
        return (
            await run_turn_loop(ctx, Scripted(), registry(), {"max_turns": 1, "max_tokens": 0}, messages=asked)
        ).text

    async with context("mock", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match="max_tokens=0") as caught:
            await run_turn_loop(ctx, Scripted(asks(call("inside"), content="so far")), registry(inside), messages=HELLO)
    partial = caught.value.result
    assert isinstance(partial, RunResult)
    assert partial.final_output == {"response": "so far"}
    assert [each["role"] for each in partial.final_messages] == ["user", "assistant", "tool"]
    assert (partial.usage["turns"], partial.usage["total_tokens"]) == (1, 120)
    assert in_pairs(partial.final_messages)


async def test_the_estimate_of_a_call_that_a_token_broke_off_is_its_reserve(tmp_path: Path) -> None:
    token = CancellationToken()

    class Broken(Scripted):
        async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
            token.cancel()
            await asyncio.sleep(30)
            raise AssertionError

    limits = {"max_tokens": 1000, "count_estimates": True}
    async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO, "limits": limits}) as ctx:
        done = await run_turn_loop(ctx, Broken(), registry(), cancellation=token)
        assert done.state is TurnState.CANCELLED
        assert "total_tokens" not in done.usage
        assert done.usage["estimated_tokens"] > UNSEEN_TOKENS
        with pytest.raises(LimitExceeded, match="max_tokens=1000"):
            await run_turn_loop(ctx, Scripted("more"), registry())


@pytest.mark.sentence("004", "Per-turn timeout: wrap provider/tool stages in bounded timeout")
async def test_a_turn_that_takes_too_long_is_broken_off(tmp_path: Path) -> None:
    async with context("sqlite", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match=r"turn_timeout=0\.05"):
            await run_turn_loop(ctx, Scripted("late", pause=30), limits={"turn_timeout": 0.05})

    async def slow() -> str:
        await asyncio.sleep(30)
        return ""

    async with open_run(tmp_path / "other.db", "r", input={"messages": HELLO}) as ctx:
        with pytest.raises(LimitExceeded, match=r"run_timeout=0\.05") as caught:
            await run_turn_loop(ctx, Scripted(asks(call("slow")), "x"), registry(slow), {"run_timeout": 0.05})
    assert isinstance(caught.value.result, RunResult)
    assert in_pairs(caught.value.result.final_messages)


@pytest.mark.sentence("004", "Max-cost budget: implement selected accounting strategy and enforce fail-fast")
async def test_a_limit_in_usd_needs_a_price_or_a_limit_in_tokens(tmp_path: Path) -> None:
    client = Scripted("hi")
    async with context("memory", tmp_path) as ctx:
        with pytest.raises(UnknownPrice, match="'scripted-1' has no price"):
            await run_turn_loop(ctx, client, limits={"max_cost_usd": 1})
        assert client.asked == []
        await run_turn_loop(ctx, client, limits={"max_cost_usd": 1, "max_tokens": 1000})
        configure(model_prices={"scripted-1": {"input": 10_000, "output": 10_000}})
        client = Scripted(say=lambda messages: asks(call("add", {"a": 1, "b": 1})))
        with pytest.raises(LimitExceeded, match="max_cost_usd=2"):
            await run_turn_loop(ctx, client, registry(add), {"max_cost_usd": 2})
    assert len(client.asked) == 2


async def test_a_model_that_nobody_has_named_yet_is_not_said_to_have_no_price(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    configure(model_prices={"theirs": {"input": 10_000, "output": 10_000}})
    answer = LLMResponse(
        {"role": "assistant", "content": "hi"}, {"prompt_tokens": 100, "completion_tokens": 0}, "theirs"
    )

    class Unnamed(Scripted):
        default_model = ""  # as a client of somebody else's, that has none

    client = Unnamed(say=lambda messages: answer)
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, limits={"max_tokens": 10_000})
    assert done.usage["cost_usd"] == 1
    assert "no price" not in caplog.text


async def test_a_limit_in_usd_holds_where_the_answer_names_another_model(tmp_path: Path) -> None:
    configure(model_prices={"scripted-1": {"input": 10_000, "output": 10_000}})
    answer = LLMResponse(
        asks(call("add", {"a": 1, "b": 1})), {"prompt_tokens": 100, "completion_tokens": 20}, "alias-9"
    )
    client = Scripted(say=lambda messages: answer)
    async with context("memory", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match="max_cost_usd=2"):
            await run_turn_loop(ctx, client, registry(add), {"max_cost_usd": 2, "max_turns": 9})
    assert len(client.asked) == 2


@pytest.mark.parametrize(("limit", "most"), [("max_tokens", 2000), ("max_cost_usd", 20)])
async def test_an_answer_whose_usage_nobody_tells_is_counted_by_its_length(
    limit: str, most: int, tmp_path: Path
) -> None:
    configure(model_prices={"scripted-1": {"input": 10_000, "output": 10_000}})
    answer = LLMResponse(asks(call("add", {"a": 1, "b": 1}), content="x" * 3000))
    client = Scripted(say=lambda messages: answer)
    async with context("memory", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match=limit) as caught:
            await run_turn_loop(ctx, client, registry(add), {limit: most, "max_turns": 9})
    assert len(client.asked) == 2  # of about 1000 tokens, and of 1000 more with the first one among its messages
    assert isinstance(caught.value.result, RunResult)
    assert 3000 <= caught.value.result.usage["total_tokens"] < 3300


@pytest.mark.parametrize("usage", [{"prompt_tokens": 10}, {"prompt_tokens": 10, "total_tokens": 10}])
@pytest.mark.parametrize(("limit", "most"), [("max_tokens", 1500), ("max_cost_usd", 15)])
async def test_an_answer_whose_own_tokens_are_not_reported_is_counted_by_its_length(
    limit: str, most: int, usage: dict[str, int], tmp_path: Path
) -> None:
    configure(model_prices={"scripted-1": {"input": 10_000, "output": 10_000}})
    answer = LLMResponse(asks(call("add", {"a": 1, "b": 1}), content="x" * 3000), usage, cost_usd=0.1)
    client = Scripted(say=lambda messages: answer)
    async with context("memory", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match=limit):
            await run_turn_loop(ctx, client, registry(add), {limit: most, "max_turns": 9})
    assert len(client.asked) <= 2


@pytest.mark.sentence("004", "Per-turn timeout: wrap provider/tool stages in bounded timeout")
async def test_what_does_not_listen_to_a_time_limit_is_told_of_and_comes_too_late(tmp_path: Path) -> None:
    async def stubborn() -> str:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            return "late"
        return "never"

    class Stubborn(Scripted):
        async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
            self.asked.append(messages)
            return LLMResponse({"role": "assistant", "content": await stubborn()})

    for client in (Scripted(asks(call("stubborn")), "x"), Stubborn()):
        with pytest.raises(LimitExceeded, match=r"turn_timeout=0\.05") as caught:
            await run_turn_loop(MockRunContext(HELLO), client, registry(stubborn), {"turn_timeout": 0.05})
        assert len(client.asked) == 1
        assert isinstance(caught.value.result, RunResult)
        assert caught.value.result.final_messages[-1]["content"] == "late"


async def test_the_runner_and_the_run_may_be_stricter_and_a_limit_ends_the_run_failed(tmp_path: Path) -> None:
    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            client = Scripted(say=lambda messages: asks(call("add", {"a": 1, "b": 1}), content="working"))
            await run_turn_loop(ctx, client, registry(add), RunLimits(max_turns=9))
            raise AssertionError("not reached")

    config = RunnerConfig(limits=RunLimits(max_turns=5))
    async with AgentRunner.open(tmp_path / "runs.db", config=config) as runner:
        result = await runner.execute(Agent(), "r1", {"messages": HELLO})
        assert result.status is RunStatus.FAILED
        assert result.error is not None
        assert result.error.type == "LimitExceeded"
        assert not result.error.retriable
        assert result.usage["turns"] == 5
        assert result.final_output == {"response": "working"}
        assert in_pairs(result.final_messages)
        result = await runner.execute(Agent(), "r2", {"messages": HELLO, "limits": {"max_turns": 2}})
        assert result.usage["turns"] == 2
        assert (await runner.get_run("r1")).attempt == 1
    with pytest.raises(InvalidArgument, match="limits must be RunLimits"):
        RunnerConfig(limits=3)  # type: ignore[arg-type]


@pytest.mark.sentence("004", "Max-turn budget: enforce strict upper bound on recursive/tool-driven loops")
async def test_loops_side_by_side_begin_no_turn_too_many(tmp_path: Path) -> None:
    """The turns of all of them are the run's, those under way included."""
    client = Scripted(say=lambda messages: asks(call("add", {"a": 1, "b": 1})), pause=0.01)

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            loops = [run_turn_loop(ctx, client, registry(add)) for _ in range(4)]
            for ended in await asyncio.gather(*loops, return_exceptions=True):
                assert isinstance(ended, LimitExceeded), ended
                assert ended.limit == "max_turns"
            raise LimitExceeded("max_turns", 6, 6)

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Agent(), "r", {"messages": HELLO, "limits": {"max_turns": 6}})
    assert result.usage["turns"] == len(client.asked) == 6


async def test_a_call_waits_for_one_beside_it_that_may_use_less_than_it_holds(tmp_path: Path) -> None:
    """Each may use 4,000 tokens and uses 120: two do not fit at once, and all of them one after the other."""
    under_way = most = 0

    class Counted(Scripted):
        async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            try:
                return await super().generate(messages, **options)
            finally:
                under_way -= 1

    client = Counted(say=lambda messages: "hi", pause=0.01)
    async with open_run("memory://", "r", input={"messages": HELLO, "limits": {"max_tokens": 4000}}) as ctx:
        loops = [run_turn_loop(ctx, client, max_tokens=4000, limits={"turn_timeout": 5}) for _ in range(5)]
        done = await asyncio.gather(*loops)
    assert [each.text for each in done] == ["hi"] * 5
    assert most == 1
    assert all(each.turns == 1 for each in done)


async def test_who_waits_for_a_call_beside_it_does_not_take_its_turns_time(tmp_path: Path) -> None:
    client = Scripted(say=lambda messages: "hi", pause=0.5)
    async with open_run("memory://", "r", input={"messages": HELLO, "limits": {"max_tokens": 4000}}) as ctx:
        loops = [run_turn_loop(ctx, client, max_tokens=4000, limits={"turn_timeout": 1.3}) for _ in range(3)]
        assert [each.text for each in await asyncio.gather(*loops)] == ["hi"] * 3


async def test_a_model_that_only_sends_nonsense_is_given_up(tmp_path: Path) -> None:
    client = Scripted(say=lambda messages: asks(call("add", "{")))
    async with context("memory", tmp_path) as ctx:
        with pytest.raises(LimitExceeded, match="malformed_tool_calls=3"):
            await run_turn_loop(ctx, client, registry(add))
    assert len(client.asked) == 3


# -- cancelling


@pytest.mark.sentence("004", "Cancellation: check token between major loop stages and during awaited operations")
async def test_a_token_ends_it_between_calls_and_in_the_middle_of_one(tmp_path: Path) -> None:
    token = CancellationToken()
    token.cancel()
    client = Scripted("never")
    async with context("memory", tmp_path) as ctx:
        done = await run_turn_loop(ctx, client, cancellation=token)
        assert (done.state, client.asked) == (TurnState.CANCELLED, [])
        token = CancellationToken()
        client = Scripted("never", pause=30)
        asyncio.get_running_loop().call_later(0.01, token.cancel)
        done = await run_turn_loop(ctx, client, cancellation=token)
        assert (done.state, len(client.asked)) == (TurnState.CANCELLED, 1)


async def test_any_thread_may_cancel_a_token_and_several_loops_may_heed_it() -> None:
    token = CancellationToken()
    clients = [Scripted("never", pause=30) for _ in range(2)]

    async def heeding(client: Scripted) -> TurnState:
        async with asyncio.timeout(10):
            return (await run_turn_loop(MockRunContext(HELLO), client, cancellation=token)).state

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(asyncio.run, heeding(client)) for client in clients]
        while not all(client.asked for client in clients):  # noqa: ASYNC110 - they are in other loops
            await asyncio.sleep(0.001)
        await asyncio.to_thread(token.cancel)
        assert [end.result() for end in ends] == [TurnState.CANCELLED] * 2
    assert await heeding(Scripted("never")) is TurnState.CANCELLED


async def test_a_token_ends_the_wait_for_an_approval(tmp_path: Path) -> None:
    token = CancellationToken()
    tools = registry(Tool.from_function(add, requires_confirmation=True))
    states: list[TurnState] = []

    def heard(state: TurnState) -> None:
        states.append(state)
        if state is TurnState.WAITING:
            asyncio.get_running_loop().call_later(0.01, token.cancel)

    async with context("sqlite", tmp_path) as ctx, asyncio.timeout(10):
        client = Scripted(asks(call("add", {"a": 1, "b": 2})))
        done = await run_turn_loop(ctx, client, tools, cancellation=token, hooks=Hooks(on_state=heard))
    assert states[-2:] == [TurnState.WAITING, TurnState.CANCELLED]
    assert in_pairs(done.messages)


async def test_a_token_ends_the_wait_for_room_under_a_limit(tmp_path: Path) -> None:
    token = CancellationToken()
    client, other = Scripted("first", pause=30), Scripted("never")
    limits = {"max_turns": 1}  # of the run: the second loop has to wait for what becomes of the first one's turn
    async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO, "limits": limits}) as ctx:
        first = asyncio.ensure_future(run_turn_loop(ctx, client, registry()))
        while not client.asked:  # noqa: ASYNC110 - it is asked when it is
            await asyncio.sleep(0.001)
        asyncio.get_running_loop().call_later(0.01, token.cancel)
        async with asyncio.timeout(10):
            done = await run_turn_loop(ctx, other, registry(), cancellation=token)
        assert (done.state, done.usage["turns"], other.asked) == (TurnState.CANCELLED, 0, [])
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_a_cancelled_run_asks_no_more() -> None:
    ctx = MockRunContext(HELLO)
    ctx.cancel()
    client = Scripted("never")
    with pytest.raises(StepCancelledError, match="turn 1"):
        await run_turn_loop(ctx, client)
    assert client.asked == []


@pytest.mark.sentence("004", "Cancellation: check token between major loop stages and during awaited operations")
async def test_cancelling_a_run_ends_a_call_of_the_model_that_is_under_way(tmp_path: Path) -> None:
    asked = asyncio.Event()

    class Waiting(Scripted):
        async def generate(self, messages: list[Any], **options: Any) -> Any:
            asked.set()
            await asyncio.sleep(30)

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            await run_turn_loop(ctx, Waiting())
            return RunResult()

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        running = asyncio.ensure_future(runner.execute(Agent(), "r", {"messages": HELLO}))
        await asked.wait()
        await runner.cancel("r")
        assert (await running).status is RunStatus.CANCELLED


# -- people and other agents


async def test_a_tool_that_requires_confirmation_waits_for_a_person(tmp_path: Path) -> None:
    ran: list[str] = []

    def pay(to: str) -> str:
        ran.append(to)
        return f"paid {to}"

    tools = ToolRegistry()
    tools.register(Tool.from_function(pay, requires_confirmation=True, has_side_effects=True))

    def script(messages: Any) -> Any:
        said = sum(m["role"] == "assistant" for m in messages)
        return asks(call("pay", {"to": "abcd"[said]}, f"c{said}")) if said < 4 else "done"

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, Scripted(say=script), tools)
            return RunResult({"messages": done.messages})

    agents = Registry()
    agents.register(Agent())
    config = RunnerConfig(park_after=0)
    async with AgentRunner.open(tmp_path / "runs.db", registry=agents, config=config) as runner:
        run_id = await runner.submit("a", {"messages": HELLO})
        answers: list[Any] = [
            True,
            False,
            {"approved": True, "arguments": {"to": "x"}},
            {"approved": False, "reason": "no money"},
        ]
        for n, answer in enumerate(answers):
            assert await runner.run_once()
            assert (await runner.get_run(run_id)).status is RunStatus.WAITING
            asked = [
                e.payload for e in await runner.event_bus.get_events(run_id) if e.event_type == "approval.requested"
            ]
            assert asked[-1]["details"] == {"tool_name": "pay", "tool_args": {"to": "abcd"[n]}, "tool_call_id": f"c{n}"}
            await runner.approve(run_id, "tool:pay", answer)
        assert await runner.run_once()
        result = await runner.wait(run_id)
    assert result.status is RunStatus.SUCCEEDED
    assert ran == ["a", "x"]
    said = [m["content"] for m in result.final_output["messages"] if m["role"] == "tool"]
    assert said[0] == "paid a"
    assert said[1].startswith("Error: a person refused")
    assert said[2] == "paid x"
    assert "no money" in said[3]


def helper(lines: Callable[[], Scripted], limits: Any = None) -> AgentRuntime:
    class Helper(AgentRuntime):
        key = "helper"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, lines(), registry(add), limits)
            return RunResult({"response": done.text}, done.messages, done.usage)

    return Helper()


@pytest.mark.parametrize("inline", [True, False])
async def test_another_agent_is_a_tool_and_uses_what_is_left(inline: bool, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Helper(AgentRuntime):
        key = "helper"

        async def run(self, ctx: RunContext) -> RunResult:
            seen.append(ctx.input)  # type: ignore[attr-defined]
            client = Scripted(say=lambda messages: asks(call("add", {"a": 1, "b": 1})))
            await run_turn_loop(ctx, client, registry(add))
            return RunResult()

    tools = ToolRegistry()
    tools.register(agent_tool("helper", description="helps"))

    class Parent(AgentRuntime):
        key = "parent"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(
                ctx, Scripted(asks(call("helper", {"task": "count"}, "h")), "it failed"), tools, {"max_tokens": 1000}
            )
            return RunResult({"response": done.text}, done.messages, done.usage)

    agents = Registry()
    agents.register(Parent())
    agents.register(Helper())
    async with AgentRunner.open(tmp_path / "runs.db", registry=agents) as runner:
        if inline:
            result = await runner.execute("parent", "p", {"messages": HELLO})
        else:
            await runner.submit("parent", {"messages": HELLO}, run_id="p")
            working = asyncio.ensure_future(runner.run_loop(concurrency=2, handle_signals=False))
            result = await runner.wait("p")
            runner.stop()
            await working
    assert result.status is RunStatus.FAILED, "the child left nothing to go on with"
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert seen[0]["limits"] == {"max_tokens": 880}
    assert seen[0]["messages"] == [{"role": "user", "content": "count"}]
    assert result.usage["total_tokens"] == 120 + 8 * 120


@pytest.mark.parametrize("arguments", ['{"task": ', "[]", "{}", '{"task": 5}', '{"task": null}'])
async def test_an_agent_is_not_run_with_arguments_that_do_not_fit(arguments: str, tmp_path: Path) -> None:
    runs: list[Any] = []

    class Child(AgentRuntime):
        key = "child"

        async def run(self, ctx: RunContext) -> RunResult:
            runs.append(ctx.input_messages)
            return RunResult({"response": "done"})

    class Parent(AgentRuntime):
        key = "parent"
        fails = True

        async def run(self, ctx: RunContext) -> RunResult:
            client = Scripted(*([asks(call("child", arguments))] if self.fails else []), "as you like")
            done = await run_turn_loop(ctx, client, registry(agent_tool(Child())))
            if self.fails:
                self.fails = False
                raise ConnectionError
            return RunResult({"tool": done.messages[2]["content"]})

    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", config=config) as runner:
        result = await runner.execute(Parent(), "r", {"messages": HELLO})
    assert result.final_output["tool"].startswith("Error: tool 'child': ")
    assert runs == []


async def test_a_child_that_used_up_its_part_leaves_the_rest_to_its_parent(tmp_path: Path) -> None:
    endless = helper(lambda: Scripted(say=lambda messages: asks(call("add", {"a": 1, "b": 1}))))
    tools = ToolRegistry()
    tools.register(agent_tool(endless, limits={"max_tokens": 300}))

    class Parent(AgentRuntime):
        key = "parent"

        async def run(self, ctx: RunContext) -> RunResult:
            client = Scripted(asks(call("helper", {"task": "go"}, "h")), "it ran out, I go on")
            done = await run_turn_loop(ctx, client, tools, {"max_tokens": 2000})
            return RunResult({"response": done.text}, done.messages, done.usage)

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Parent(), "p", {"messages": HELLO})
    assert result.final_output == {"response": "it ran out, I go on"}
    assert "limit reached: max_tokens=300" in result.final_messages[2]["content"]
    assert result.usage["total_tokens"] == 2 * 120 + 3 * 120
    tested = await run_agent_test(Parent(), MockRunContext(list(HELLO)))
    assert tested.final_output == result.final_output
    assert "limit reached: max_tokens=300" in tested.final_messages[2]["content"]
    assert tested.usage == result.usage


async def test_a_handoff_ends_the_loop_with_the_other_agents_answer(tmp_path: Path) -> None:
    tools = ToolRegistry()
    tools.register(agent_tool(helper(lambda: Scripted("I take over")), handoff=True))

    class Parent(AgentRuntime):
        key = "parent"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, Scripted(asks(call("helper", {"task": "go"}, "h"))), tools)
            return RunResult({"response": done.text, "state": done.state.value}, done.messages, done.usage)

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Parent(), "p", {"messages": HELLO})
        events = await runner.event_bus.get_events("p")
    assert result.final_output == {"response": "I take over", "state": "handed_off"}
    assert in_pairs(result.final_messages)
    assert result.usage["total_tokens"] == 240
    told = [each for each in events if each.event_type.startswith("tool.")]
    assert [each.event_type for each in told] == ["tool.call", "tool.result"]
    assert len({each.payload["step_id"] for each in told}) == 1
    assert {each.payload["trace_id"] for each in told} == {result.run_id.hex if result.run_id else ""}
    assert json.loads(json.dumps(result.final_messages)) == result.final_messages


# -- resuming what is not a plain call


class Stop(AgentRuntime):
    """Runs `code` until it is stopped, and again."""

    key = "stop"

    def __init__(self, code: Callable[[Any, bool], Any]) -> None:
        self.code = code
        self.lives = 0

    async def run(self, ctx: RunContext) -> RunResult:
        self.lives += 1
        done = await self.code(ctx, self.lives > 1)
        if self.lives == 1:
            raise ConnectionError("stopped")
        return RunResult({"response": done.text, "state": done.state.value}, done.messages, done.usage)


async def twice(tmp_path: Path, code: Callable[[Any, bool], Any], *others: AgentRuntime) -> RunResult:
    agents = Registry()
    for other in others:
        agents.register(other)
    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", registry=agents, config=config) as runner:
        result = await runner.execute(Stop(code), "r", {"messages": HELLO})
    assert result.status is RunStatus.SUCCEEDED, result.error
    assert in_pairs(result.final_messages)
    return result


@pytest.mark.parametrize("handoff", [False, True])
async def test_a_child_is_counted_again_and_run_once(handoff: bool, tmp_path: Path) -> None:
    asked: list[Scripted] = []

    def lines() -> Scripted:
        asked.append(Scripted("from the child"))
        return asked[-1]

    tools = ToolRegistry()
    tools.register(agent_tool("helper", handoff=handoff))

    async def code(ctx: Any, again: bool) -> LoopResult:
        said: list[Any] = [] if again else [asks(call("helper", {"task": "go"}, "h")), "from the parent"]
        return await run_turn_loop(ctx, Scripted(*said), tools)

    result = await twice(tmp_path, code, helper(lines))
    assert len(asked) == 1
    assert result.final_output["state"] == ("handed_off" if handoff else "yielding")
    assert result.final_output["response"] == ("from the child" if handoff else "from the parent")
    assert result.usage["total_tokens"] == (240 if handoff else 360)


async def test_a_person_may_change_a_call_that_is_written_flat() -> None:
    flat = {"id": "1", "name": "add", "arguments": '{"a": 1, "b": 2}'}
    ctx = MockRunContext(HELLO)
    ctx.signal("tool:add", {"approved": True, "arguments": {"a": 5, "b": 6}})
    tools = registry(Tool.from_function(add, requires_confirmation=True))
    done = await run_turn_loop(ctx, Scripted(asks(flat), "eleven"), tools)
    assert done.messages[2]["content"] == "11"


async def test_nobody_is_asked_about_a_call_that_does_not_fit() -> None:
    tools = registry(Tool.from_function(add, requires_confirmation=True))
    client = Scripted(asks(call("add", {"a": "one", "b": 2})), "sorry")
    states: list[TurnState] = []
    done = await run_turn_loop(MockRunContext(HELLO), client, tools, hooks=Hooks(on_state=states.append))
    assert done.messages[2]["content"].startswith("Error: tool 'add': a must be an integer, got 'one'")
    assert TurnState.WAITING not in states


async def test_a_recorded_call_is_not_asked_about_afterwards(tmp_path: Path) -> None:
    async def code(ctx: Any, again: bool) -> LoopResult:
        tools = registry(add, requires_confirmation=again)
        said: list[Any] = [] if again else [asks(call("add", {"a": 1, "b": 2})), "three"]
        return await run_turn_loop(ctx, Scripted(*said), tools)

    assert (await twice(tmp_path, code)).final_output["response"] == "three"


async def test_the_limits_of_a_run_hold_for_all_its_loops(tmp_path: Path) -> None:
    client = Scripted(say=lambda messages: "hi")
    limits = {"max_turns": 3}
    async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO, "limits": limits}) as ctx:
        for _ in range(3):
            done = await run_turn_loop(ctx, client, limits={"max_turns": 1})
            assert done.turns == 1
        with pytest.raises(LimitExceeded, match="max_turns=3"):
            await run_turn_loop(ctx, client, limits={"max_turns": 1})
    assert len(client.asked) == 3


async def test_a_mismatch_ends_the_run_with_what_there_is(tmp_path: Path) -> None:
    client = Scripted("a", "b", "c")

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            await run_turn_loop(ctx, client, output_type=City)
            return RunResult()

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Agent(), "r", {"messages": HELLO})
        assert (await runner.get_run("r")).attempt == 1
    assert result.error is not None
    assert result.error.type == "OutputMismatch"
    assert result.final_output == {"response": "c"}
    assert result.usage["turns"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_before_it_said_anything_ends_the_run_with_what_there_is(
    tmp_path: Path, stream: bool
) -> None:
    cut = LLMResponse({"role": "assistant", "content": ""}, {"total_tokens": 7}, "scripted-1", "length")
    asked = Scripted(asks(call("add", {"a": 1, "b": 2})), cut)

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, asked, registry(add), stream=stream)
            return RunResult({"response": done.text})

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Agent(), "r", {"messages": HELLO})
        assert (await runner.get_run("r")).attempt == 1
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert (result.error.type, result.error.retriable) == ("OutputMismatch", False)
    assert "was truncated" in result.error.message
    assert [each["role"] for each in result.final_messages] == ["user", "assistant", "tool", "assistant"]
    assert result.usage["turns"] == 2


class Asking(AgentRuntime):
    """Has its loop call an agent, and fails once when that is done."""

    key = "parent"

    def __init__(self, tool: Tool, hooks: Hooks | None = None, fails: bool = False) -> None:
        self.tool, self.hooks, self.fails = tool, hooks, fails
        self.asked = Scripted(asks(call(tool.name, {"task": "count"})), "done")

    async def run(self, ctx: RunContext) -> RunResult:
        done = await run_turn_loop(ctx, self.asked, registry(self.tool), hooks=self.hooks)
        if self.fails:
            self.fails = False
            raise ConnectionError
        return RunResult({"response": done.text}, done.messages)


class Echo(AgentRuntime):
    key = "echo"

    async def run(self, ctx: RunContext) -> RunResult:
        return RunResult({"response": ctx.input_messages[-1]["content"]})


@pytest.mark.parametrize("handoff", [False, True])
async def test_hooks_see_and_change_what_an_agent_is_asked_and_answers_once(tmp_path: Path, handoff: bool) -> None:
    seen: list[Any] = []

    async def before(name: str, args: dict[str, Any]) -> None:
        seen.append((name, dict(args)))
        args["task"] = "count twice"

    async def after(name: str, result: Any) -> Any:
        seen.append((name, result))
        return f"<{result}>"

    parent = Asking(agent_tool(Echo(), handoff=handoff), Hooks(before, after), fails=True)
    async with AgentRunner.open(tmp_path / "runs.db", config=RunnerConfig(retry_backoff_base=0)) as runner:
        result = (await runner.execute(parent, "r", {"messages": HELLO})).raise_for_status()
        told = [each for each in await runner.event_bus.get_events("r") if each.event_type == "tool.result"]
        assert (await runner.get_run("r")).attempt == 2
    assert seen == [("echo", {"task": "count"}), ("echo", "count twice")]
    assert [each["content"] for each in result.final_messages if each["role"] == "tool"] == ["<count twice>"]
    assert result.final_output == {"response": "<count twice>" if handoff else "done"}
    assert {each.payload["result"] for each in told} == {"<count twice>"}


@pytest.mark.parametrize("made", [object(), json.loads("[" * 99 + "]" * 99), json.loads("[" * 100 + "]" * 100)])
async def test_an_answer_that_a_hook_makes_unkeepable_is_told_to_the_model(tmp_path: Path, made: Any) -> None:
    async def after(name: str, result: Any) -> Any:
        return made

    parent = Asking(agent_tool(Echo(), handoff=True), Hooks(after_tool=after))
    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = (await runner.execute(parent, "r", {"messages": HELLO})).raise_for_status()
    assert result.final_output == {"response": "done"}
    told = parent.asked.asked[1][-1]
    assert told["content"].startswith(f"Tool 'echo' ran, but its result of type {type(made).__name__} cannot be stored")
    assert "metadata" not in told


async def test_an_agent_that_nobody_registered_is_told_to_the_model(tmp_path: Path) -> None:
    parent = Asking(agent_tool("ecoh"), fails=True)
    agents = Registry()
    agents.register(Echo())
    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", config=config, registry=agents) as runner:
        result = (await runner.execute(parent, "r", {"messages": HELLO})).raise_for_status()
    assert result.final_output == {"response": "done"}
    said = [each["content"] for each in result.final_messages if each["role"] == "tool"]
    assert said[0].startswith("Error: unknown agent 'ecoh'")


async def cancels_itself() -> None:
    """Awaits what somebody else has cancelled."""
    gone = asyncio.get_running_loop().create_future()
    gone.cancel()
    await gone


@pytest.mark.parametrize("calls", [1, 2])
async def test_a_tool_that_awaited_what_was_cancelled_is_told_of_it_and_the_run_goes_on(
    tmp_path: Path, calls: int
) -> None:
    asked = Scripted(asks(*(call("cancels_itself", {}, f"c{each}") for each in range(calls))), "never mind")

    class Agent(AgentRuntime):
        key = "a"

        async def run(self, ctx: RunContext) -> RunResult:
            done = await run_turn_loop(ctx, asked, registry(cancels_itself))
            return RunResult({"response": done.text})

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Agent(), "r", {"messages": HELLO})
    assert (result.status, result.final_output) == (RunStatus.SUCCEEDED, {"response": "never mind"})
    told = [each["content"] for each in asked.asked[1] if each["role"] == "tool"]
    assert told == ["Error: CancelledError"] * calls


async def test_a_text_that_was_cut_at_its_length_is_an_answer() -> None:
    cut = LLMResponse({"role": "assistant", "content": "once upon"}, {}, "scripted-1", "length")
    done = await run_turn_loop(MockRunContext(), Scripted(cut), messages=HELLO)
    assert (done.state, done.text) == (TurnState.YIELDING, "once upon")


async def test_a_block_that_meets_an_open_circuit_can_be_entered_again(tmp_path: Path) -> None:
    client = Scripted(CircuitOpen("not now", after=30.0), "there")
    with pytest.raises(CircuitOpen):
        async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
            await run_turn_loop(ctx, client)
    async with open_run(tmp_path / "runs.db", "r", input={"messages": HELLO}) as ctx:
        assert (await run_turn_loop(ctx, client)).text == "there"


async def test_time_of_earlier_lives_counts(tmp_path: Path) -> None:
    async def slow() -> str:
        await asyncio.sleep(0.2)
        return "done"

    async def code(ctx: Any, again: bool) -> LoopResult:
        said: list[Any] = ["late"] if again else [asks(call("slow")), asyncio.CancelledError()]
        limits = {"run_timeout": 0.15 if again else 60}
        return await run_turn_loop(ctx, Scripted(*said), registry(slow), limits)

    config = RunnerConfig(retry_backoff_base=0)
    async with AgentRunner.open(tmp_path / "runs.db", config=config) as runner:
        result = await runner.execute(Stop(code), "r", {"messages": HELLO})
    assert result.error is not None
    assert result.error.type == "LimitExceeded"
    assert "run_timeout" in result.error.message


@pytest.mark.parametrize("cut_in", ["the last call", "the next turn"])
@pytest.mark.parametrize("enough", [True, False])
async def test_recorded_calls_count_one_after_the_other_unless_they_ran_side_by_side(cut_in: str, enough: bool) -> None:
    inside, hang, begun = asyncio.Event(), True, asyncio.Barrier(2)

    async def stuck() -> None:
        inside.set()
        await asyncio.Event().wait()

    async with Rig() as rig:

        async def look() -> str:
            await begun.wait()
            rig.clock.advance(10)  # type: ignore[attr-defined]
            return "seen"

        async def write(last: bool = False) -> str:
            if last and hang and cut_in == "the last call":
                await stuck()
            rig.clock.advance(30)  # type: ignore[attr-defined]
            return "written"

        class Client(Scripted):
            async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
                if len(messages) > 1 and hang:
                    await stuck()
                return await super().generate(messages, **options)

        tools = registry(look)
        tools.register(Tool.from_function(write, has_side_effects=True))
        names = [("look", {}), ("look", {}), ("write", {}), ("look", {}), ("look", {}), ("write", {"last": True})]
        client = Client(asks(*(call(name, args, f"c{n}") for n, (name, args) in enumerate(names))), "done")
        limits = {"run_timeout": 1000.0}

        async def body(ctx: Any) -> Any:
            return (await run_turn_loop(ctx, client, tools, limits, messages=HELLO)).text

        await rig.cut(body, inside)
        hang = False
        limits["run_timeout"] = 100.5 if enough else 99.5
        result = await rig.go(body)
    assert result.final_output == ({"value": "done"} if enough else {"response": None})
    assert enough or (result.error is not None and "run_timeout=99.5" in result.error.message)


async def test_costs_are_stored_as_decimal_text_and_shown_as_numbers(tmp_path: Path) -> None:
    configure(model_prices={"scripted-1": {"input": 0.001, "output": 0.001}})
    asking = [asks(call("add", {"a": n, "b": n})) for n in range(3)]

    class Cheap(ToolCallingAgent):
        key = "cheap"
        system_prompt = ""
        tools = registry(add)
        limits = RunLimits(max_cost_usd=1.0)

        def get_llm_client(self) -> Any:
            return Scripted(*asking, "done", cost=0.1)

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        result = await runner.execute(Cheap(), run_id="r", input_data={"messages": HELLO})
        assert result.run_id is not None
        records = await runner.state_store.records(result.run_id)
        answers = [json.loads(each.result or "") for each in records if each.name == "model" and each.kind == "done"]
        starts = [json.loads(each.info or "{}") for each in records if each.name == "model"]
        shown = await usage_view(runner, "model")
        row = await runner.queue.row(result.run_id)
    assert [answer["cost_usd"] for answer in answers] == ["0.1"] * 4
    assert all(Decimal(info["reserve"]["usd"]) > 0 for info in starts if "reserve" in info)
    assert any("reserve" in info for info in starts)
    assert result.usage["cost_usd"] == shown["total"]["cost_usd"] == 0.4  # the sum of floats is another number
    assert row is not None
    steps = step_views(row, records)["items"]
    assert [step["cost_usd"] for step in steps if step["cost_usd"] is not None] == [0.1] * 4


@pytest.mark.parametrize(
    "limits", [{"max_turns": 1}, {"max_tool_calls": 0}, {"max_tokens": 10}, {"max_cost_usd": 0.05, "max_tokens": 9999}]
)
@pytest.mark.parametrize("inner", [False, True])
async def test_events_say_which_limit_was_reached_and_contain_no_advice(
    limits: dict[str, Any], inner: bool, tmp_path: Path
) -> None:
    class Limited(ToolCallingAgent):
        key = "limited"
        system_prompt = ""
        tools = registry(add)

        def get_llm_client(self) -> Any:
            return Scripted(asks(call("add", {"a": 1, "b": 2})), asks(call("add", {"a": 1, "b": 2})), "done", cost=0.1)

    class Outer(Limited):
        key = "outer"
        tools = registry(agent_tool(Limited(), name="helper", description="Helps.", limits=limits))

        def get_llm_client(self) -> Any:
            return Scripted(asks(call("helper", {"task": "add"})), "done")

    async with AgentRunner.open(tmp_path / "runs.db") as runner:
        input_data = {"messages": HELLO} | ({} if inner else {"limits": limits})
        result = await runner.execute(Outer() if inner else Limited(), run_id="r", input_data=input_data)
        events = [event async for event in runner.stream("r")]
    name = next(iter(limits))
    assert result.status is (RunStatus.SUCCEEDED if inner else RunStatus.FAILED)
    told = json.dumps([each.payload for each in events])
    assert f"limit reached: {name}={limits[name]:g}, used " in told
    assert not [word for word in ("Raise", "resume", "runner.", "configure", "RunLimits") if word in told]
