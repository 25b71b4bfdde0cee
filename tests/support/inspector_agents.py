"""The agents of `inspector_data`: `agent-runtime serve tests.support.inspector_agents:agents --db FILE.db`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    LLMResponse,
    RunContext,
    RunnerConfig,
    RunResult,
    Step,
    StepExecutor,
    Tool,
    ToolCallingAgent,
    ToolRegistry,
)
from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.planning import Plan, PlanStep
from agent_runtime_core.planning.plan import BasePlanner
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing import VirtualClock
from tests.support.scripted_model import Scripted, asks, call

ANSWER_SCHEMA = {
    "type": "object",
    "required": ["decision", "notify"],
    "properties": {
        "decision": {"enum": ["approve", "partial", "reject"], "title": "Decision", "description": "What to do."},
        "amount": {"type": "number", "title": "Amount", "description": "In USD, for a partial refund."},
        "note": {"type": "string", "title": "Note to the customer"},
        "notify": {"type": "boolean", "title": "Send an e-mail"},
    },
}


class StoryClock(VirtualClock):
    """A clock that jumps to the end of the next sleep, so that concurrent work overlaps and nobody waits."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        self._due: list[tuple[float, int]] = []
        self._ids = itertools.count()

    async def sleep(self, seconds: float) -> None:
        mine = (self.boot() + seconds, next(self._ids))
        heapq.heappush(self._due, mine)
        try:
            while self.boot() < mine[0]:
                await asyncio.sleep(0.001)  # the others of the same time begin theirs
                if self._due[0] == mine:
                    self.advance(max(mine[0] - self.boot(), 0.0))
        finally:
            self._due.remove(mine)
            heapq.heapify(self._due)


#: Its sleeps are the work of the agents. A process that serves or works has the clock of the machine here.
clock: Any = None


async def work(seconds: float) -> None:
    if clock is not None:
        await clock.sleep(seconds)
    else:
        await asyncio.sleep(seconds)


# -- agents


class Coded(AgentRuntime):
    """An agent that is a function."""

    key = "coded"

    def __init__(self, key: str, code: Callable[[Any], Awaitable[Any]], description: str = "") -> None:
        self.key, self._code = key, code
        self.__doc__ = self.description = description

    async def run(self, ctx: RunContext) -> RunResult:
        value = await self._code(ctx)
        return value if isinstance(value, RunResult) else RunResult({"response": value})


class Model(Scripted):
    """A scripted model that takes its time."""

    default_model = "demo-1"

    async def generate(self, messages: list[Any], **options: Any) -> LLMResponse:
        response = await super().generate(messages, **options)
        await work(1.1 + len(str(response.message.get("content"))) / 60)
        response.model = self.default_model
        return response


class Support(ToolCallingAgent):
    """Answers questions of customers, and asks a person before it pays money back."""

    key = "support"
    system_prompt = "You help customers of a lamp shop. Look orders up before you answer. Be brief and friendly."
    tools = ToolRegistry()

    def get_llm_client(self) -> Any:
        return Model(say=_answer, tokens=(412, 58), cost=0.0021)

    async def after_run(self, ctx: Any, result: RunResult) -> RunResult:
        if "refund" not in str(ctx.input_messages[-1]["content"]):
            return result
        details = {"question": "Refund this order?", "order": "1004", "amount": 129.0, "asked": "Mia, support"}
        decision = await ctx.approve("refund", details, schema=ANSWER_SCHEMA)
        await ctx.step("refund", refund, "1004", on_in_doubt="review")
        result.artifacts = {"decision": decision, "letter": "Dear customer, the money is on its way."}
        return result


def _answer(messages: Any) -> Any:
    """What the model says next follows from the messages, so that the run can be resumed in another process."""
    since = [each["role"] for each in messages].copy()
    last_user = max(at for at, role in enumerate(since) if role == "user")
    text, after = str(messages[last_user]["content"]), messages[last_user + 1 :]
    results = [each for each in after if each["role"] == "tool"]
    if "refund" in text:
        lines: list[Any] = [
            asks(call("find_order", {"order": "1004"}, "c1"), call("stock", {"article": "lamp"}, "c2"),
                 call("weather", {"city": "Bern"}, "c3"), content="I look at the order, the stock and the weather."),
            asks(call("find_order", {"order": "1003"}, "c4"), content="It arrived broken. I look for a spare part."),
            "The lamp of order 1004 arrived broken, and 17 are in stock. I suggest a refund of 129 USD.",
        ]  # fmt: skip
        return lines[0 if not results else 1 if len(results) < 4 else 2]
    if "discount" in text:
        return asks(call("discount", {"order": "1002", "percent": 15}, "e1")) if not results else "You get 15 % off."
    if "parcel" in text:
        return (
            asks(call("find_order", {"order": "1001"}, "d1"))
            if not results
            else "It is in Zurich. It arrives tomorrow."
        )
    return f"I am glad to help. You asked: {text}"


_flaky: dict[str, int] = {}


async def find_order(order: str) -> dict[str, Any]:
    """Return an order.

    Args:
        order: The number of the order.
    """
    await work(1.3)
    return {"order": order, "article": "lamp", "price": 129.0, "status": "delivered", "lines": [{"sku": "L-9", "n": 1}]}


async def stock(article: str) -> int:
    """Return how many of an article are in stock."""
    await work(2.4)
    return 17


async def weather(city: str, ctx: RunContext) -> str:
    """Return the weather of a city. The service fails at first."""
    run = str(ctx.run_id)
    _flaky[run] = _flaky.get(run, 0) + 1
    await work(0.7)
    if _flaky[run] < 3:
        raise ConnectionError(f"503 Service Unavailable: weather of {city}")
    return "18 °C and sunny"


async def discount(order: str, percent: int) -> str:
    """Give a discount. A person must approve it."""
    await work(0.4)
    return f"{percent} % off order {order}"


async def refund(order: str) -> str:
    """Pay an order back."""
    await work(0.9)
    return "refunded"


for _tool in (
    Tool.from_function(find_order),
    Tool.from_function(stock),
    Tool.from_function(weather, retries=3, retry_delay=2.0),
    Tool.from_function(discount, has_side_effects=True, requires_confirmation=True),
):
    Support.tools.register(_tool)


async def _report(ctx: Any) -> RunResult:
    async def fetch(_ctx: Any, state: Any) -> dict[str, Any]:
        await work(3.2)
        return {"rows": 1200, "source": ctx.params.get("source", "sales.csv")}

    async def clean(_ctx: Any, state: Any) -> int:
        await work(1.1)
        return 1188

    async def analyse(item: str) -> dict[str, Any]:
        await work(2.0 + len(item) / 4)
        return {"region": item, "revenue": 1000 * len(item), "factor": ctx.params.get("factor", 1)}

    done = await StepExecutor(ctx).run([Step("fetch", fetch), Step("clean", clean)])
    regions = ["north", "south-west", "east", "islands", "west", "centre"]
    found = await StepExecutor(ctx, max_concurrency=3).map("analyse", analyse, regions, key=str)
    await ctx.emit("report.progress", {"percent": 80, "note": "analysed all regions"})
    await ctx.checkpoint({"regions": len(found)})
    total = await ctx.step("total", lambda: sum(each["revenue"] for each in found) * ctx.params.get("factor", 1))
    return RunResult(
        {"response": f"{done['clean']} rows, {total} USD"}, artifacts={"chart": {"x": regions, "y": [1, 2, 3]}}
    )


async def _flaky_import(ctx: Any) -> Any:
    async def download() -> str:
        await work(1.5)
        raise ConnectionError("connection reset by peer (ftp.example.net:21)")

    await ctx.step("plan", lambda: ["a.csv", "b.csv"])
    return await ctx.step("download", download, retries=2, retry_delay=5.0)


async def _broken(ctx: Any) -> Any:
    rows = await ctx.step("read", lambda: [{"id": 1, "price": "12,50"}])
    return await ctx.step("parse", lambda: [float(row["price"]) for row in rows])


async def _order(ctx: Any) -> Any:
    await ctx.step("reserve", lambda: {"article": "lamp", "count": 2})
    parcel = await ctx.wait_for_signal("shipped")
    await ctx.sleep(86_400 * 3)
    return parcel


async def _reminder(ctx: Any) -> Any:
    await ctx.step("prepare", lambda: "ready")
    await ctx.sleep(7 * 86_400)
    return "sent"


async def _translate(ctx: Any) -> Any:
    async def translated() -> str:
        await work(4.0)
        return str(ctx.params["text"]).upper()

    return await ctx.step("translate", translated)


async def _editor(ctx: Any) -> Any:
    await ctx.step("draft", lambda: "Lamps for the winter")
    parts = []
    for language in ("German", "French", "Italian"):
        child = await ctx.call("translator", {"params": {"text": f"{language}: lamps"}}, key=language)
        parts.append(child.final_output["response"])
    return parts


async def _payment(ctx: Any) -> Any:
    """Without a `die` in its metadata it completes; with one, its first execution never ends."""
    await ctx.step("quote", lambda: {"amount": 42.0, "currency": "CHF"})

    async def charge() -> str:
        place = ctx.metadata.get("die")
        if place and os.path.isdir(os.path.dirname(place)) and not os.path.exists(place):
            Path(place).touch()
            os.write(1, b"inside\n")
            await asyncio.Event().wait()
        return f"paid under {ctx.idempotency_key}"

    paid = await ctx.step("charge", charge, on_in_doubt=ctx.metadata.get("doubt", "retry"))
    await ctx.step("receipt", lambda: {"receipt": "R-2026-17"})
    return paid


async def _crash(ctx: Any) -> Any:
    def grow() -> None:
        sys.stdout.flush()
        os.kill(os.getpid(), 9)  # as the kernel does if memory is exhausted

    await ctx.step("load model", grow)


async def _long_wait(ctx: Any) -> Any:
    await ctx.step("first", lambda: 1)
    await work(40.0)
    await ctx.sleep(3600)
    return "never"


async def _ticker(ctx: Any) -> Any:
    """Three events for each tick, as a step publishes its start and its end."""
    ticks = int(ctx.params.get("events", 200)) // 3
    for number in range(ticks):
        await ctx.step("tick", lambda number=number: number, key=str(number))
        await ctx.emit("tick", {"number": number, "text": f"line {number} of the log"})
    return ticks


async def _live(ctx: Any) -> Any:
    """Work that can be watched: each step takes a moment."""
    for number in range(int(ctx.params.get("steps", 20))):

        async def one(number: int = number) -> dict[str, int]:
            await work(float(ctx.params.get("seconds", 0.5)))
            return {"number": number}

        await ctx.step(f"step {number + 1}", one)
        await ctx.emit("progress", {"done": number + 1})
    return "done"


async def _writer(ctx: Any) -> RunResult:
    """Streams the beginning of an answer, then waits: it can be seen while it is written, without any timing."""
    for piece in ("## Draft\n\nThe **first** ", "part of <b>the</b> answer"):
        await ctx.emit("assistant.delta", {"delta": piece})
    await ctx.wait_for_signal("finish")
    answer = {"role": "assistant", "content": "## Draft\n\nThe **whole** answer."}
    return RunResult({"response": "written"}, final_messages=[*ctx.input_messages, answer])


async def _refund_order(ctx: Any) -> Any:
    """Asks a person whether to pay an order back."""
    if not await ctx.approve("refund", {"order": ctx.params["order"], "amount": 20.0}):
        return "declined"
    return await ctx.step("pay", refund, ctx.params["order"])


async def _buyer(ctx: Any) -> Any:
    """Charges what its input says."""

    async def buy() -> str:
        ctx.charge(model="demo-1", input_tokens=100, output_tokens=10, cost_usd=float(ctx.params["cost"]))
        return "bought"

    return await ctx.step("buy", buy)


class _FixedPlanner(BasePlanner):
    async def create_plan(self, prompt: str, available_tools: Any) -> Plan:
        await work(1.8)

        def step(number: int, expression: str, why: str, needs: list[int]) -> PlanStep:
            return PlanStep(number, "calculator", {"expression": expression}, why, depends_on=needs)

        return Plan([
            step(1, "12 + 30", "Add the two amounts.", []), step(2, "7 * 6", "Compute the rent.", []),
            step(3, "{{step_1.result}} + {{step_2.result}}", "Add both.", [1, 2]),
            step(4, "100 - 16", "What is left.", []),
            step(5, "{{step_3.result}} - {{step_4.result}}", "Compare.", [3, 4]),
            step(6, "{{step_5.result}} + 1", "Round up.", [5]),
        ], "Compare two budgets")  # fmt: skip


CODED: dict[str, tuple[Callable[[Any], Awaitable[Any]], str]] = {
    "report": (_report, "Makes a sales report of all regions."), "importer": (_flaky_import, "Downloads files."),
    "parser": (_broken, "Parses prices."), "order": (_order, "Ships an order."),
    "reminder": (_reminder, "Sends a reminder after a week."), "translator": (_translate, "Translates a text."),
    "editor": (_editor, "Writes a text and has it translated."), "payment": (_payment, "Charges a card."),
    "trainer": (_crash, "Loads a model that is too large."), "waiter": (_long_wait, "Waits for too long."),
    "ticker": (_ticker, "Emits events."), "live": (_live, "Works slowly, to be watched."),
    "writer": (_writer, "Streams an answer."), "refunds": (_refund_order, "Pays orders back."),
    "buyer": (_buyer, "Buys."),
}  # fmt: skip


def agents() -> Registry:
    """The agents, for a worker or a server: `agent-runtime serve tests.support.inspector_data:agents …`."""
    registry = Registry()
    registry.register(Support())
    for key, (code, description) in CODED.items():
        registry.register(Coded(key, code, description))
    registry.register(planner().agent)
    return registry


def planner(runner: AgentRunner | None = None) -> Orchestrator:
    return Orchestrator(_FixedPlanner(), runner=runner or AgentRunner.open("memory://"), work=False)


def settings(**changes: Any) -> RunnerConfig:
    return RunnerConfig(
        **{"park_after": 0, "worker_id": "worker-1", "retry_backoff_base": 4, "grace_seconds": 1, **changes}
    )


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}
