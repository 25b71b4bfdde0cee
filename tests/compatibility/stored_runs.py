"""Runs and documents that one version stores and a later version must read and continue."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from agent_runtime_core import (
    AgentRunner,
    AgentRuntime,
    ErrorInfo,
    EventType,
    LLMResponse,
    LLMStreamChunk,
    RunContext,
    RunLimits,
    RunnerConfig,
    RunResult,
    RunStatus,
    Step,
    StepExecutor,
    StepResult,
    StepStatus,
    TurnState,
)
from agent_runtime_core.events import Event
from agent_runtime_core.loop import LoopResult
from agent_runtime_core.orchestrator import RunCreate, RunResponse
from agent_runtime_core.orchestrator import RunStatus as OrchestratorStatus
from agent_runtime_core.persistence import (
    AuditEntry,
    AuditEventType,
    Branch,
    Conversation,
    ConversationMessage,
    Embedding,
    ErrorRecord,
    ErrorSeverity,
    Fact,
    FactType,
    PerformanceMetric,
    PersistenceManager,
    Scope,
    Summary,
    Task,
    TaskList,
    TaskState,
    ToolCall,
    ToolResult,
)
from agent_runtime_core.planning import Plan, PlanResult, PlanStep, StepKind
from agent_runtime_core.registry import Registry
from agent_runtime_core.tools import ToolAnswer
from agent_runtime_core.tools import ToolResult as ToolOutput
from agent_runtime_core.turns import StepMetrics, StepState, Turn

DONE = UUID(int=1)
PARKED = UUID(int=2)
PENDING = UUID(int=3)
FAILED = UUID(int=4)
LISTED = UUID(int=5)
FORKED = UUID(int=6)
CONVERSATION = UUID(int=11)
MESSAGE = UUID(int=12)
TASKS = UUID(int=13)
TASK = UUID(int=14)
FACT = UUID(int=15)
EMBEDDING = UUID(int=16)


class Orders(AgentRuntime):
    """An agent with a step, a checkpoint, an event, a guarded step and a wait."""

    key = "orders"

    async def run(self, ctx: RunContext) -> RunResult:
        answer = None
        price = await ctx.step("price", self.price, 3)
        await ctx.checkpoint({"price": price})
        stored = await ctx.step("models", models)
        assert stored == models()
        await ctx.emit("order.priced", {"price": price})
        await ctx.step("charge", self.charge, price, on_in_doubt="fail")
        if ctx.input_messages[0]["content"] == "ask":
            answer = await ctx.wait_for_signal("answer")
        if ctx.input_messages[0]["content"] == "fail":
            return RunResult(
                error=ErrorInfo("ValueError", "no stock")
            )  # an exception would store a traceback with paths
        return RunResult(final_output={"price": price, "answer": answer})

    def price(self, count: int) -> int:
        return 14 * count

    def charge(self, amount: int) -> dict[str, int]:
        return {"charged": amount}


class Listed(AgentRuntime):
    """An agent that runs a list of steps and then waits."""

    key = "listed"

    async def run(self, ctx: RunContext) -> RunResult:
        done = await StepExecutor(ctx).run([Step("first", self.first), Step("second", self.second)])
        return RunResult(final_output={"done": done, "go": await ctx.wait_for_signal("go")})

    async def first(self, ctx: RunContext, state: dict[str, Any]) -> str:
        return "one"

    async def second(self, ctx: RunContext, state: dict[str, Any]) -> str:
        return "two"


def models() -> list[Any]:
    """Return one value of each model of this library that a step can return, equal in each process."""
    when = datetime(2026, 11, 25, tzinfo=UTC)
    call = ToolCall(id="call", name="look", timestamp=when)
    message = ConversationMessage(id=MESSAGE, role="user", tool_calls=[call], timestamp=when)
    task = Task(id=TASK, name="buy", created_at=when, updated_at=when)
    times: Any = {"created_at": when, "updated_at": when}
    return [
        EventType.RUN_STARTED, Event(DONE, "order.priced", {"price": 42}, when), ErrorInfo("ValueError", "no stock"),
        LLMResponse({"role": "assistant"}), LLMStreamChunk("a"), RunResult({"price": 42}), RunLimits(max_turns=3),
        LoopResult([], TurnState.YIELDING), TurnState.YIELDING, RunCreate("add 1 and 2"),
        RunResponse("run", OrchestratorStatus.PENDING, created_at=when, updated_at=when), OrchestratorStatus.PENDING,
        Branch(id=None, leaf=MESSAGE, messages=1, follows=None, replaces=None, updated_at=when),
        AuditEntry(id=FACT, event_type=AuditEventType.CUSTOM, timestamp=when), AuditEventType.CUSTOM, message,
        Conversation(id=CONVERSATION, messages=[message], **times),
        Embedding(id=FACT, vector=[0.5], content="Bern", created_at=when),
        ErrorRecord(id=FACT, timestamp=when), ErrorSeverity.ERROR, Fact(id=FACT, key="capital", value=1, **times),
        FactType.CUSTOM, PerformanceMetric(id=FACT, name="m", value=1.0, timestamp=when), Scope.PROJECT,
        Summary(id=FACT, content="short", created_at=when), task,
        TaskList(id=TASKS, name="Journey", tasks=[task], **times),
        TaskState.NOT_STARTED, call, ToolResult(tool_call_id="call", timestamp=when), PlanResult(1),
        Plan([PlanStep(1, "calculator", {"expression": "1 + 2"})], "add"), StepKind.TOOL_CALL, RunStatus.SUCCEEDED,
        StepStatus.COMPLETED, StepResult("first", StepStatus.COMPLETED, 1), ToolOutput(True, 1),
        ToolAnswer("1", True, 1),
        StepState(1, "step", metrics=StepMetrics(2.0)), Turn("turn", "trace", created_at=when),
    ]  # fmt: skip


def registry() -> Registry:
    agents = Registry()
    agents.register(Orders())
    agents.register(Listed())
    return agents


def asks(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def runner_of(url: str) -> AgentRunner:
    return AgentRunner.open(url, config=RunnerConfig(park_after=0, max_retries=1), registry=registry())


async def store_runs(runner: AgentRunner) -> None:
    """Store a run that is done, one that waits, one that is pending, one that failed, a step list and a fork."""
    await runner.submit("orders", asks("hello"), run_id=DONE)
    await runner.submit("orders", asks("ask"), run_id=PARKED, metadata={"customer": "Ada"})
    await runner.submit("orders", asks("fail"), run_id=FAILED)
    await runner.submit("listed", asks("hello"), run_id=LISTED)
    while await runner.run_once():
        pass
    await runner.submit("orders", asks("later"), run_id=PENDING)
    await runner.fork(DONE, "price", new_run_id=FORKED, effects="reuse")


async def store_documents(stores: PersistenceManager) -> None:
    """Store one document of each kind, in a conversation with a second branch."""
    await stores.memory.set("theme", {"dark": True})
    await stores.memory.set("models", models())
    await stores.preferences.set("language", "de", Scope.PROJECT)
    message = ConversationMessage(id=MESSAGE, role="user", content="Which trains go to Chur?")
    await stores.conversations.save(Conversation(id=CONVERSATION, title="Trains", messages=[message]))
    await stores.conversations.append(CONVERSATION, [ConversationMessage(role="assistant", content="Two an hour.")])
    await stores.conversations.edit_message(CONVERSATION, MESSAGE, "Which trains go to Bern?")
    tasks = [Task(id=TASK, name="buy", priority=2), Task(name="travel", dependencies=[TASK])]
    await stores.tasks.save(TaskList(id=TASKS, name="Journey", tasks=tasks, conversation_id=CONVERSATION))
    if stores.knowledge is not None:
        await stores.knowledge.save_fact(Fact(id=FACT, key="capital", value="Bern"))
        await stores.knowledge.save_embedding(Embedding(id=EMBEDDING, vector=[0.0, 1.0], content="Bern"))
    if stores.audit is not None:
        await stores.audit.log_event(AuditEntry(event_type=AuditEventType.CUSTOM, action="opened"))
