"""A tool agent as Langfuse is told of it, decoded at a local receiver: everything once, also where a worker died."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from agent_runtime_core._execution.run_control import Stop
from agent_runtime_core.agents import ToolCallingAgent
from agent_runtime_core.config import configure
from agent_runtime_core.interfaces import LLMClient
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.status import RunStatus
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import Tool
from agent_runtime_core.tracing import LangfuseTraceSink
from tests.support.otlp_receiver import Receiver, Seen, clients_let_go, receiving
from tests.support.processes import until
from tests.support.scripted_model import Scripted, asks, call

pytest.importorskip("langfuse")

HELLO = [{"role": "user", "content": "how warm is it?"}]
CONVERSATION = UUID("0192f000-0000-7000-8000-0000000000cc")
PRICE = {"input": 1000.0, "output": 5000.0}  # USD for a million tokens
COST = 100 * 1000 / 1e6 + 20 * 5000 / 1e6  # of one scripted answer


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as it:
        yield it


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PUBLIC_KEY", "SECRET_KEY", "HOST", "BASE_URL", "TRACING_ENVIRONMENT"):
        monkeypatch.delenv(f"LANGFUSE_{name}", raising=False)


@pytest.fixture(autouse=True)
def _clients() -> Iterator[None]:
    with clients_let_go():
        yield


def sink(url: str, **options: Any) -> LangfuseTraceSink:
    """One with a key of its own: in a process there is one Langfuse client for each."""
    return LangfuseTraceSink(f"pk-lf-{uuid4()}", "sk-lf-secret", url, **{"content": True, **options})


class Weather(ToolCallingAgent):
    """Asks for the weather, then for a conversion, and answers; `hang` is a tool that never returns, once."""

    key = "weather"
    system_prompt = "You know the weather."

    def __init__(self, hang: str = "") -> None:
        self.hang, self.hung = hang, asyncio.Event()
        self.client = Scripted(say=self._say)
        self._tools = ToolRegistry()
        self._tools.register(Tool.from_function(self.weather))
        self._tools.register(Tool.from_function(self.convert, has_side_effects=True))

    @property
    def tools(self) -> ToolRegistry:
        return self._tools

    def get_llm_client(self) -> LLMClient:
        return self.client

    def _say(self, messages: Any) -> Any:
        turn = sum(message["role"] == "assistant" for message in messages)
        lines: list[Any] = [
            asks(call("weather", {"city": "Ulm"}, "c1")),
            asks(call("convert", {"degrees": 21}, "c2")),
            "70 °F",
        ]
        return lines[turn]

    async def weather(self, city: str) -> int:
        await self._maybe_hang("weather")
        return 21

    async def convert(self, degrees: int) -> str:
        await self._maybe_hang("convert")
        return "70 °F"

    async def _maybe_hang(self, name: str) -> None:
        if name == self.hang and not self.hung.is_set():
            self.hung.set()
            await asyncio.get_running_loop().create_future()


def input_(**more: Any) -> dict[str, Any]:
    return {"messages": HELLO, "conversation_id": CONVERSATION, **more}


async def arrived(receiver: Receiver, count: int) -> None:
    """So many spans are there: a runner that closes waits no longer than 2.5 s for what its sinks still send."""
    await asyncio.to_thread(until, lambda: len(receiver.spans) >= count, f"{count} spans to arrive")


def totals(generations: list[Seen]) -> list[dict[str, int]]:
    return [span.json("usage_details") for span in generations]


async def test_a_run_is_there_in_full(receiver: Receiver, tmp_path: Path) -> None:
    configure(model_prices={"scripted-1": PRICE})
    agent = Weather()
    async with AgentRunner.open(tmp_path / "runs.db", trace_sinks=[sink(receiver.url)]) as runner:
        began = time.time()
        result = await runner.execute(agent, "r", input_(), metadata={"tenant": "acme"})
        ended = time.time()
    assert result.status is RunStatus.SUCCEEDED
    await arrived(receiver, 6)
    [root] = receiver.of("agent")
    generations, tools = receiver.of("generation"), receiver.of("tool")
    assert (len(generations), len(tools)) == (3, 2)
    assert len(receiver.spans) == 6, [span.name for span in receiver.spans]
    assert len({span.id for span in receiver.spans}) == 6
    assert {span.trace for span in receiver.spans} == {root.trace}
    assert {span.parent for span in [*generations, *tools]} == {root.id}
    assert root.name == "weather"
    assert [span.name for span in generations] == ["scripted-1"] * 3
    assert [span.name for span in tools] == ["weather", "convert"]
    for span in receiver.spans:
        assert span.about["session.id"] == str(CONVERSATION)
        assert span.about["langfuse.trace.name"] == "weather"
        assert not span.failed
        assert began - 0.01 <= root.start <= span.start <= span.end <= root.end + 0.001 <= ended + 0.01
    # One after the other, as it was.
    order = sorted([*generations, *tools], key=lambda span: (span.start, span.end))
    assert [span.kind for span in order] == ["generation", "tool", "generation", "tool", "generation"]
    assert totals(generations) == [{"input": 100, "output": 20, "total": 120}] * 3
    assert [span.json("cost_details") for span in generations] == [{"total": pytest.approx(COST)}] * 3
    assert root.json("metadata.usage")["total_tokens"] == 360
    assert root.json("metadata.usage")["cost_usd"] == pytest.approx(3 * COST)
    assert root.json("metadata.tenant") == "acme"
    assert root.json("metadata.run_id") == str(result.run_id)
    assert root.json("metadata.outcome") == "succeeded"
    # What was said.
    assert root.json("input") == HELLO
    assert root.json("output") == {"response": "70 °F"}
    for turn, span in enumerate(generations):
        assert span.json("input") == agent.client.asked[turn]
    assert generations[0].json("output")["tool_calls"][0]["function"]["name"] == "weather"
    assert generations[2].json("output")["content"] == "70 °F"
    assert [span.json("input") for span in tools] == [{"city": "Ulm"}, {"degrees": 21}]
    assert [span.about["langfuse.observation.output"] for span in tools] == ["21", "70 °F"]


async def test_without_content_nothing_that_was_said_is_sent(receiver: Receiver, tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "runs.db", trace_sinks=[sink(receiver.url, content=False)]) as runner:
        await runner.execute(Weather(), "r", input_())
    await arrived(receiver, 6)
    assert len(receiver.spans) == 6
    sent = b"".join(receiver.bodies)
    for said in ("how warm", "You know", "Ulm", "70 °F"):
        assert said.encode() not in sent


@pytest.mark.parametrize("hang", ["weather", "convert"])
async def test_a_run_whose_worker_died_shows_each_call_once(receiver: Receiver, hang: str, tmp_path: Path) -> None:
    agents = Registry()
    agents.register(agent := Weather(hang))
    config = RunnerConfig(grace_seconds=0)

    def runner(worker: str) -> AgentRunner:
        settings = RunnerConfig(**{**vars(config), "worker_id": worker})
        return AgentRunner.open(
            tmp_path / "runs.db", config=settings, registry=agents, trace_sinks=[sink(receiver.url)]
        )

    first = runner("first")
    run_id = await first.submit(agent, input_())
    dead = asyncio.ensure_future(first.run_once())
    await agent.hung.wait()
    first.heartbeat.drop(str(run_id))
    for drive in tuple(first._worker._executions.values()):
        drive.control.stop(Stop.LOST)
        drive.control.close()
    # Its lease ends now, so that the next worker need not wait for long.
    row = await first.queue.require(str(run_id))
    await first.queue.extend_lease(row.run_id, "first", 0.001, claim_id=row.claim_id)
    async with runner("second") as second:
        async with asyncio.timeout(10):
            while not await second.run_once():  # noqa: ASYNC110 - its lease has to run out
                await asyncio.sleep(0.02)
        assert (await second.wait(run_id)).final_output == {"response": "70 °F"}
    dead.cancel()
    await asyncio.wait({dead})
    await first.close()
    await arrived(receiver, 7)
    generations, tools = receiver.of("generation"), receiver.of("tool")
    assert len(agent.client.asked) == 3
    assert [len(span.json("input")) for span in generations] == [2, 4, 6], "each generation once"
    # The call that died told nothing; the other was not run again.
    assert [span.name for span in tools] == ["weather", "convert"]
    roots = receiver.of("agent")
    assert [root.json("metadata.attempt") for root in roots] == [1, 2]
    assert len({span.trace for span in receiver.spans}) == 1, "one trace, whoever worked on it"
    assert {span.about["session.id"] for span in receiver.spans} == {str(CONVERSATION)}
    before = {"weather": 1, "convert": 2}[hang]
    assert [span.parent for span in generations] == [roots[0].id] * before + [roots[1].id] * (3 - before)
    assert roots[1].json("metadata.outcome") == "succeeded"
    assert totals(generations) == [{"input": 100, "output": 20, "total": 120}] * 3


class Busy(ToolCallingAgent):
    """Does `turns` turns with a tool each; how many steps that is, the test counts."""

    key = "busy"
    system_prompt = "Work."
    tools = ToolRegistry()
    max_iterations = 1000

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def get_llm_client(self) -> LLMClient:
        def say(messages: Any) -> Any:
            turn = sum(message["role"] == "assistant" for message in messages)
            return asks(call("echo", {"n": turn}, f"c{turn}")) if turn < self.turns else "done"

        return Scripted(say=say)


async def echo(n: int) -> str:
    return str(n)


Busy.tools.register(Tool.from_function(echo))


def dead_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.mark.parametrize("closes", [True, False])
def test_a_process_ends_by_itself_while_the_server_is_away(closes: bool, tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(f"""
import asyncio
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.tracing import LangfuseTraceSink
from tests.acceptance.test_traced_agent import Busy, input_

async def main():
    sink = LangfuseTraceSink("pk", "sk-secret", "http://127.0.0.1:{dead_port()}")
    runner = AgentRunner.open("memory://", trace_sinks=[sink])
    print((await runner.execute(Busy(20), "r", input_())).status.value, flush=True)
    if {closes}:
        await runner.close()

asyncio.run(main())
""")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(code)],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    assert "sk-secret" not in done.stderr
    assert done.stdout == "succeeded\n"
