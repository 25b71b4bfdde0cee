"""Recorded conversations with a model: written, read, played back, and missed loudly."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from agent_runtime_core.errors import AgentRuntimeError, InvalidArgument, RateLimited
from agent_runtime_core.interfaces import LLMClient, LLMResponse, LLMStreamChunk, ToolCallDict
from agent_runtime_core.loop import run_turn_loop
from agent_runtime_core.testing import (
    Cassette,
    CassetteMiss,
    MockLLMClient,
    MockRunContext,
    MockTool,
    RecordingLLMClient,
    ReplayLLMClient,
)
from agent_runtime_core.testing.models import chunks_of
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.cases import for_each

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [MockTool("add").to_openai_format()]


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def exchange(asked: str, answered: str, **request: Any) -> dict[str, Any]:
    return {
        "request": {"messages": user(asked), **request},
        "response": {"message": {"role": "assistant", "content": answered}},
    }


async def said(client: LLMClient, text: str, **options: Any) -> Any:
    return (await client.generate(user(text), **options)).message["content"]


async def miss(client: LLMClient, text: str, **options: Any) -> str:
    with pytest.raises(CassetteMiss) as caught:
        await client.generate(user(text), **options)
    return str(caught.value)


# The file


async def test_a_recording_is_played_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "cassettes" / "talk.json"
    whole = LLMResponse({"role": "assistant", "content": "4"}, {"prompt_tokens": 7}, "gpt-4o-1", "stop", cost_usd=0.25)
    client = RecordingLLMClient(MockLLMClient([{"tool_calls": [CALL]}, whole]), path)
    turns = [user("2+2?"), [*user("2+2?"), {"role": "tool", "content": "4", "tool_call_id": "c1"}]]
    recorded = [await client.generate(turn, model="gpt-4o", tools=TOOLS, temperature=0) for turn in turns]
    assert json.loads(path.read_text("utf-8"))["exchanges"][1] == {
        "request": {"messages": turns[1], "model": "gpt-4o", "tools": TOOLS},
        "response": {
            "message": {"role": "assistant", "content": "4"},
            "usage": {"prompt_tokens": 7},
            "model": "gpt-4o-1",
            "finish_reason": "stop",
            "cost_usd": 0.25,
        },
    }
    assert [each.name for each in path.parent.iterdir()] == ["talk.json"]
    replay = ReplayLLMClient(path)
    assert [await replay.generate(turn, model="gpt-4o", tools=TOOLS) for turn in turns] == recorded
    assert replay.unused == []


async def test_the_file_is_whole_after_every_answer(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text("an older recording")
    client = RecordingLLMClient(MockLLMClient([RateLimited("no"), "one"], default_response="more"), path)
    with pytest.raises(RateLimited):
        await client.generate(user("a"))
    assert path.read_text() == "an older recording"
    await client.generate(user("a"))
    assert len(Cassette.load(path).exchanges) == 1
    await asyncio.gather(*(client.generate(user(str(number))) for number in range(20)))
    assert Cassette.load(path).exchanges == client.cassette.exchanges
    assert len(client.cassette.exchanges) == 21


@for_each("streamed", [False, True])
@for_each("order", [*itertools.permutations(range(3))])
async def test_equal_concurrent_requests_keep_their_order(
    order: tuple[int, ...], streamed: bool, tmp_path: Path
) -> None:
    ended = [asyncio.Event() for _ in order]
    started = itertools.count()

    class Slow(MockLLMClient):
        async def generate(self, *args: Any, **kwargs: Any) -> LLMResponse:
            number = next(started)
            await ended[number].wait()
            return LLMResponse({"role": "assistant", "content": str(number)}, model="m", finish_reason="stop")

        async def stream(self, *args: Any, **kwargs: Any) -> Any:
            for chunk in chunks_of(await self.generate()):
                yield chunk

    async def ask(client: Any) -> str:
        if not streamed:
            return str((await client.generate(user("a"))).message["content"])
        return "".join([chunk.delta async for chunk in client.stream(user("a"))])

    path = tmp_path / "talk.json"
    client = RecordingLLMClient(Slow(), path)
    asked = [asyncio.ensure_future(ask(client)) for _ in order]
    while next_ := [number for number in order if not asked[number].done()]:
        await asyncio.sleep(0)
        ended[next_[0]].set()
        await asyncio.wait([asked[next_[0]]])
    assert [task.result() for task in asked] == ["0", "1", "2"]
    assert Cassette.load(path).exchanges == client.cassette.exchanges
    replay = ReplayLLMClient(path)
    assert await asyncio.gather(*(ask(replay) for _ in order)) == ["0", "1", "2"]


async def test_two_answers_are_not_written_at_once(tmp_path: Path) -> None:
    class Watched(Cassette):
        both, overlapped = threading.Barrier(2), False

        def save(self, path: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self.both.wait(0.1)
                Watched.overlapped = True

    client = RecordingLLMClient(MockLLMClient(), tmp_path / "a.json")
    client.cassette = Watched()
    await asyncio.gather(client.generate(user("a")), client.generate(user("b")))
    assert len(client.cassette.exchanges) == 2
    assert not Watched.overlapped


async def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "talk.json"
    cassette = Cassette()
    cassette.save(path)
    before = path.read_bytes()
    cassette.add({"messages": user("a")}, {"message": {"content": "b"}})

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fails)
    with pytest.raises(OSError, match="disk full"):
        cassette.save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_any_text_comes_back(tmp_path: Path) -> None:
    cassette = Cassette()
    for text in ("Grüße 🎉", "\ud800 alone", "a\\nb\n\u2028c", ""):
        cassette.add({"messages": user(text)}, {"message": {"role": "assistant", "content": text}})
    cassette.save(tmp_path / "a.json")
    assert Cassette.load(tmp_path / "a.json") == cassette
    assert "Grüße 🎉" in (tmp_path / "a.json").read_text("utf-8")


def test_an_exchange_is_kept_as_it_was() -> None:
    messages = user("a")
    cassette = Cassette()
    cassette.add({"messages": messages}, LLMResponse({"content": "b"}))
    messages.append("more")
    assert cassette.exchanges[0].request == {"messages": user("a")}


@pytest.mark.parametrize(
    ("request_", "response", "why"),
    [
        ({}, {"message": {}}, '"messages"'),
        ({"messages": "a"}, {"message": {}}, '"messages"'),
        ({"messages": []}, {}, '"message"'),
        ({"messages": []}, {"message": "a"}, '"message"'),
        ({"messages": [object()]}, {"message": {}}, "is not JSON-serializable"),
        ({"messages": [float("nan")]}, {"message": {}}, "must be JSON-serializable"),
    ],
)
def test_what_is_no_exchange_is_refused(request_: Any, response: Any, why: str) -> None:
    cassette = Cassette()
    with pytest.raises(InvalidArgument, match=why):
        cassette.add(request_, response)
    assert cassette.exchanges == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"version": 2, "exchanges": []}', '{"version": 1, "exchanges": [{}]}', "\xff"]
)
def test_what_is_no_cassette_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"a\.json"):
        ReplayLLMClient(tmp_path / "a.json")


def test_a_missing_file_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"cassette must be an existing file, got .*gone\.json.* RecordingLLMClient"
    ):
        ReplayLLMClient(tmp_path / "gone.json")


# Playing back


async def test_answers_go_by_the_request_and_not_by_the_order() -> None:
    replay = ReplayLLMClient([exchange("a", "1"), exchange("b", "2")])
    assert len(replay.unused) == 2
    assert [await said(replay, "b"), await said(replay, "a")] == ["2", "1"]
    assert replay.unused == []


async def test_a_request_is_answered_as_often_as_it_was_recorded() -> None:
    recorded = [exchange("a", "1"), exchange("b", "between"), exchange("a", "2")]
    replay = ReplayLLMClient(recorded)
    assert [await said(replay, "a"), await said(replay, "a")] == ["1", "2"]
    told = await miss(replay, "a")
    assert "recorded 2 times" in told
    assert "strict=False" in told
    lax = ReplayLLMClient(recorded, strict=False)
    assert [await said(lax, "a") for _ in range(4)] == ["1", "2", "2", "2"]
    await miss(lax, "c")


async def test_the_model_and_the_tools_have_a_part_in_it_where_they_were_recorded() -> None:
    plain = [exchange("a", "1")]
    assert await said(ReplayLLMClient(plain), "a", model="any", tools=TOOLS) == "1"
    nothing: list[Any] = [None, []]
    for silent in nothing:
        recorded = [exchange("a", "1", model=None, tools=silent)]
        assert await said(ReplayLLMClient(recorded), "a", model="any") == "1"
        assert await said(ReplayLLMClient(recorded), "a", tools=[]) == "1"
        assert '+  "tools": [' in await miss(ReplayLLMClient(recorded), "a", tools=TOOLS)
    named = [exchange("a", "1", model="gpt-4o", tools=TOOLS)]
    assert await said(ReplayLLMClient(named), "a", model="gpt-4o", tools=TOOLS, temperature=1, top_p=0.1) == "1"
    told = await miss(ReplayLLMClient(named), "a", model="gpt-5", tools=TOOLS)
    assert '-  "model": "gpt-4o"' in told
    assert '+  "model": "gpt-5"' in told
    await miss(ReplayLLMClient(named), "a", model="gpt-4o")


async def test_an_answer_is_a_copy() -> None:
    replay = ReplayLLMClient([exchange("a", "1")], strict=False)
    (await replay.generate(user("a"))).message["content"] = "changed"
    assert await said(replay, "a") == "1"


async def test_shapes_that_json_does_not_tell_apart_are_equal() -> None:
    cassette = Cassette()
    cassette.add({"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, {"message": {"content": "1"}})
    asked = [MappingProxyType({"role": "assistant", "tool_calls": (ToolCallDict(CALL),)})]
    assert (await ReplayLLMClient(cassette).generate(asked)).message == {"content": "1"}


async def test_a_recording_can_be_streamed() -> None:
    recorded = exchange("a", "a longer answer")
    recorded["response"] |= {"finish_reason": "stop", "usage": {"prompt_tokens": 1}, "model": "m"}
    recorded["response"]["message"]["tool_calls"] = [CALL]
    chunks = [chunk async for chunk in ReplayLLMClient([recorded]).stream(user("a"))]
    assert "".join(chunk.delta for chunk in chunks) == "a longer answer"
    last = chunks[-1]
    assert (last.delta, last.finish_reason, last.usage) == ("", "stop", {"prompt_tokens": 1})
    assert last.tool_calls == [CALL]
    assert last.response is not None
    assert last.response.model == "m"
    with pytest.raises(CassetteMiss):
        await anext(aiter(ReplayLLMClient([]).stream(user("a"))))


# Missing


async def test_a_miss_is_loud_and_shows_the_nearest_difference() -> None:
    replay = ReplayLLMClient([exchange("What is the weather in Oslo?", "Rain"), exchange("Tell me a joke", "No")])
    told = await miss(replay, "What is the weather in Rome?")
    assert "exchange 0 of 2" in told
    assert '-      "content": "What is the weather in Oslo?"' in told
    assert '+      "content": "What is the weather in Rome?"' in told
    assert "joke" not in told
    assert issubclass(CassetteMiss, AssertionError)
    assert issubclass(CassetteMiss, AgentRuntimeError)
    assert "empty" in await miss(ReplayLLMClient([]), "a")
    await said(replay, "What is the weather in Oslo?")
    assert "already replayed" in await miss(replay, "What is the weather in Rome?")


async def test_a_miss_can_be_printed_whatever_was_asked() -> None:
    client = ReplayLLMClient([{"request": {"messages": [{"content": "\ud800 alone"}]}, "response": {"message": {}}}])
    with pytest.raises(CassetteMiss) as caught:
        await client.generate([{"content": "\udfff alone"}])
    assert all(each in str(caught.value).encode().decode() for each in ("\\ud800 alone", "\\udfff alone"))


async def test_the_nearest_is_the_longest_common_history() -> None:
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(5) for role in ("user", "assistant")]
    recorded = [
        {"request": {"messages": turns[: 2 * n + 1]}, "response": {"message": {"content": "x"}}} for n in range(5)
    ]
    asked = [*turns[:7], {"role": "user", "content": "new"}]
    with pytest.raises(CassetteMiss, match="exchange 3 of 5"):
        await ReplayLLMClient(recorded).generate(asked)


async def test_a_difference_deep_in_a_long_text_is_shown_in_forty_lines() -> None:
    long = "".join(f"line {number} of the instructions.\n" for number in range(500))
    told = await miss(ReplayLLMClient([exchange(long, "1")]), long.replace("line 250 ", "line 250, changed, "))
    assert "-line 250 of the" in told
    assert "+line 250, changed, of the" in told
    assert len(told.splitlines()) < 20
    image = "".join(f"{number:07d}" for number in range(20_000))
    told = await miss(ReplayLLMClient([exchange(image, "1")]), image.replace("0010000", "x" * 7))
    assert "xxxxxxx" in told
    assert max(map(len, told.splitlines())) < 200
    told = await miss(ReplayLLMClient([exchange(long, "1")]), long.upper())
    assert len(told.splitlines()) == 41
    assert "more lines" in told


# Recording


async def test_a_stream_is_recorded_whole_and_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    client = RecordingLLMClient(MockLLMClient(["a longer answer"]), path)
    chunks = [chunk async for chunk in client.stream(user("a"), model="m", temperature=0)]
    assert "".join(chunk.delta for chunk in chunks) == "a longer answer"
    assert await said(ReplayLLMClient(path), "a", model="m") == "a longer answer"


class Foreign(LLMClient):
    """A client written for 0.5.2: its last chunk does not have the whole answer."""

    def __init__(self) -> None:
        self.closed = False

    async def generate(self, messages: list[Any], **kwargs: Any) -> LLMResponse:
        raise NotImplementedError

    async def stream(self, messages: list[Any], **kwargs: Any) -> AsyncIterator[LLMStreamChunk]:
        try:
            yield LLMStreamChunk(delta="one ")
            yield LLMStreamChunk(delta="two")
            yield LLMStreamChunk(finish_reason="stop", tool_calls=[CALL], usage={"total_tokens": 3})
            yield LLMStreamChunk(finish_reason="stop")
        finally:
            self.closed = True

    async def embed(self, texts: Any, *, model: str | None = None) -> list[list[float]]:
        return [[1.0] for _ in texts]

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        return {"flagged": False}

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        return len(messages)


async def test_a_stream_without_a_whole_answer_is_put_together(tmp_path: Path) -> None:
    client = RecordingLLMClient(Foreign(), tmp_path / "a.json")
    assert len([chunk async for chunk in client.stream(user("a"))]) == 4
    (kept,) = client.cassette.exchanges
    assert kept.response["message"] == {"role": "assistant", "content": "one two", "tool_calls": [CALL]}
    assert kept.response["usage"] == {"total_tokens": 3}


SUM = {"id": "s", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
USED = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        ([LLMStreamChunk(tool_calls=[SUM], finish_reason="tool_calls")], [LLMStreamChunk("3", finish_reason="stop")]),
        ([LLMStreamChunk(tool_calls=[SUM]), LLMStreamChunk(finish_reason="tool_calls")], [LLMStreamChunk("3")]),
        (
            [LLMStreamChunk("so", finish_reason="tool_calls"), LLMStreamChunk(tool_calls=[SUM], usage=USED)],
            [LLMStreamChunk("3"), LLMStreamChunk(finish_reason="stop"), LLMStreamChunk(usage=USED)],
        ),
    ],
)
async def test_a_loop_goes_the_same_way_over_what_was_recorded_of_a_client_of_ones_own(
    asks: list[LLMStreamChunk], answers: list[LLMStreamChunk], tmp_path: Path
) -> None:
    class Own(LLMClient):
        async def generate(self, messages: list[Any], **kwargs: Any) -> LLMResponse:
            raise NotImplementedError

        async def stream(self, messages: list[Any], **kwargs: Any) -> AsyncIterator[LLMStreamChunk]:
            for chunk in asks if len(messages) == 1 else answers:
                yield chunk

    def add(a: int, b: int) -> int:
        return a + b

    tools = ToolRegistry()
    tools.register(Tool.from_function(add))
    first = await run_turn_loop(
        MockRunContext(user("1 + 2")), RecordingLLMClient(Own(), tmp_path / "a.json"), tools, stream=True
    )
    again = await run_turn_loop(MockRunContext(user("1 + 2")), ReplayLLMClient(tmp_path / "a.json"), tools, stream=True)
    assert first == again
    assert (first.text, first.tool_calls) == ("3", 1)


async def test_a_stream_that_is_left_behind_its_end_is_recorded(tmp_path: Path) -> None:
    client = RecordingLLMClient(Foreign(), tmp_path / "a.json")
    stream: Any = client.stream(user("a"))
    while (await anext(stream)).finish_reason is None:
        pass
    await stream.aclose()
    assert [each.response["message"]["content"] for each in client.cassette.exchanges] == ["one two"]


async def test_a_stream_that_is_left_is_closed_and_not_recorded(tmp_path: Path) -> None:
    foreign = Foreign()
    client = RecordingLLMClient(foreign, tmp_path / "a.json")
    stream: Any = client.stream(user("a"))
    await anext(stream)
    await stream.aclose()
    assert foreign.closed
    assert client.cassette.exchanges == []
    assert not (tmp_path / "a.json").exists()


async def test_other_questions_are_passed_on(tmp_path: Path) -> None:
    client = RecordingLLMClient(Foreign(), tmp_path / "a.json")
    assert await client.embed(["a", "b"]) == [[1.0], [1.0]]
    assert await client.moderate("a") == {"flagged": False}
    assert await client.count_tokens(user("a")) == 1
    assert not (tmp_path / "a.json").exists()


async def test_a_request_that_cannot_be_kept_asks_nobody(tmp_path: Path) -> None:
    inner = MockLLMClient()
    with pytest.raises(InvalidArgument, match="the request must be JSON-serializable"):
        await RecordingLLMClient(inner, tmp_path / "a.json").generate([object()])
    assert inner.get_call_count() == 0
