"""Run graphs of LangGraph inside a run: checkpoints in your store, durable calls, questions to people, limits.

Needs the extra `langgraph`. `run_graph` runs a graph and resumes it where it stopped. Inside its nodes
`current_run().step(...)` makes single calls durable, `DurableChatModel` does so for the calls of a model, and
`durable_tool` for the calls of a tool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from .._core.lazy_import import load

if not TYPE_CHECKING:
    load("langgraph", needed_by=__name__)  # its error names the extra

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs, var_child_runnable_config
from langgraph.constants import START
from langgraph.errors import GraphBubbleUp
from langgraph.types import Command, StateSnapshot

from .._core.context_vars import restore
from .._core.run_tasks import EVENT_WAITERS
from .._core.validation import must
from .._execution.step import CONTROL_FLOW, CURRENT_STEP, FRAMEWORK_TASKS, FrameworkTask, StepScope
from ..errors import JournalMismatch, brief
from ..interfaces import RunContext
from ._langgraph_model import DurableChatModel as DurableChatModel
from ._langgraph_saver import AgentRuntimeSaver as AgentRuntimeSaver
from ._langgraph_tools import durable_tool as durable_tool
from ._steps import number_of_use

__all__ = ["AgentRuntimeSaver", "DurableChatModel", "durable_tool", "run_graph"]

CALL = "agent_runtime_call"  # in the metadata of each checkpoint: the call of `run_graph` that wrote it
FIRST = "agent_runtime_first"  # in the metadata of each checkpoint: the superstep of the thread before that call
TASKS = "__pregel_tasks"  # LangGraph's name of the channel of `Send`
_TASK, _SCRATCHPAD = "__pregel_task_id", "__pregel_scratchpad"  # LangGraph's names in the config of a node


class _Call(NamedTuple):
    """A call of `run_graph`.

    Attributes:
        run_id: Its run.
        id: The same when the run is resumed.
        place: The same in the forks of the run.
        first: The superstep of the thread before the call.
        scope: The step that it is in.
        attempt: A separate object for each attempt.
    """

    run_id: str
    id: str
    place: str
    first: int
    scope: StepScope | None
    attempt: object


_CALL: ContextVar[_Call | None] = ContextVar("agent_runtime_graph", default=None)


async def run_graph(
    ctx: RunContext, graph: Any, input: Any, config: RunnableConfig | None = None, *,
    stream_mode: str | Sequence[str] = (), subgraphs: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """Run a compiled graph to its end, and return what its `ainvoke` returns.

    If the run is resumed, the graph continues at its last checkpoint. Each `interrupt(value)` of a node becomes
    `ctx.approve(NAME_OF_THE_NODE, value)`: the run waits until a person answers, and the answer is what `interrupt`
    returns. If there are several questions, they are asked one after the other.

        builder.compile(checkpointer=AgentRuntimeSaver("agents.db"))
        ...
        result = await run_graph(ctx, graph, {"question": "..."})

    Args:
        ctx: The context of the run.
        graph: A graph that was compiled with a checkpointer.
        input: The input of the graph.
        config: The config of the graph. Without a `thread_id`, the thread uses the id of the run.
        stream_mode: Publish these parts of LangGraph's stream as events of the run, such as "updates" or "messages".
            The type of an event is `langgraph.updates`, and its payload contains the fields `data` and `ns`.
        subgraphs: Publish the parts of subgraphs too.
        **options: More arguments of the graph's `astream`.

    Raises:
        InvalidArgument: The graph is compiled without a checkpointer, or the config names a checkpoint.
        JournalMismatch: The graph lacks a node that its checkpoint continues with.
    """
    if not hasattr(graph.checkpointer, "aget_tuple"):
        fix = "Compile it with builder.compile(checkpointer=AgentRuntimeSaver('agents.db'))"
        raise must("graph", "have a checkpointer", graph.checkpointer, fix)
    call_id = str(await ctx.uuid4())
    config = _configured(ctx, config)
    saved = await graph.checkpointer.aget_tuple(config)
    metadata = {} if saved is None else saved.metadata
    resumes = metadata.get(CALL) == call_id
    first = metadata.get(FIRST if resumes else "step", -2)  # -1 is the superstep of the first input
    config = merge_configs(config, {"metadata": {CALL: call_id, FIRST: first}})
    if saved is not None and resumes:
        _check_nodes(graph, saved.checkpoint)
        input = await _resumed(ctx, graph, config)
    call = _call(ctx, call_id, first)
    modes = [stream_mode] if isinstance(stream_mode, str) else list(stream_mode)
    run = _Stream(ctx, graph, config, modes, {"subgraphs": subgraphs, **options})
    while True:
        output = await run.until_stopped(input, call._replace(attempt=object()))
        state = await graph.aget_state(config)
        if not state.interrupts:
            return output
        input = Command(resume=await _answers(ctx, state))


def _call(ctx: RunContext, call_id: str, first: int) -> _Call:
    """Return a call of `run_graph` by the code that calls this."""
    scope = CURRENT_STEP.get()
    scope = scope if scope is not None and scope.token.run_id == _id(ctx) else None
    place = f"{'' if scope is None else scope.scope_id}/{number_of_use(ctx, 'run_graph')}"
    return _Call(_id(ctx), call_id, place, first, scope, object())


async def _resumed(ctx: RunContext, graph: Any, config: RunnableConfig) -> Command[Any] | None:
    """Return the input with which a graph resumes; None to continue. A finished graph then returns its output."""
    journal = getattr(ctx, "journal", None)  # a MockRunContext has no journal
    if journal is not None:
        journal.recall_tasks()
    state = await graph.aget_state(config)
    # A node that failed after its question was answered saved the answer, and LangGraph still lists the question. Then
    # the node runs before anybody is asked again: a second answer would count for its next question.
    failed = any(task.error is not None for task in state.tasks)
    return Command(resume=await _answers(ctx, state)) if state.interrupts and not failed else None


def _check_nodes(graph: Any, checkpoint: Any) -> None:
    """Raise if a checkpoint waits for a node that the graph does not have.

    LangGraph would skip the node, and the graph would end without what follows it.
    """
    waiting = checkpoint["channel_values"]
    missing = [f"the node {each.node!r}" for each in waiting.get(TASKS) or () if each.node not in graph.nodes]
    for channel in waiting:
        for prefix, kind in (("branch:to:", "node"), ("join:", "edge")):
            if channel.startswith(prefix) and channel not in graph.channels:
                missing.append(f"the {kind} {channel.removeprefix(prefix)!r}")
    if missing:
        nodes = brief(sorted(each for each in graph.nodes if each != START))
        raise JournalMismatch(
            f"graph must have {missing[0]}, with which its checkpoint continues, got the nodes {nodes}. "
            "Keep the names of nodes until no unfinished run needs them",
            recorded=missing[0],
            found=nodes,
        )


def _configured(ctx: RunContext, config: RunnableConfig | None) -> RunnableConfig:
    given = (config or {}).get("configurable", {})
    if given.get("checkpoint_id"):
        fix = "Use graph.aupdate_state to continue from an earlier checkpoint"
        raise must("config", "not have a checkpoint_id", given["checkpoint_id"], fix)
    thread = given.get("thread_id", str(ctx.run_id))
    return merge_configs(config, {"configurable": {"thread_id": thread}})


async def _answers(ctx: RunContext, state: StateSnapshot) -> dict[str, Any]:
    """Ask for the answers to all questions of a graph; by the id of the interrupt."""
    names = {each.id: task.name for task in state.tasks for each in task.interrupts}
    answers = {}
    for each in state.interrupts:
        schema = each.response_schema if isinstance(each.response_schema, dict) else None
        name = names.get(each.id, "interrupt")
        answers[each.id] = await ctx.approve(name, _plain(each.value), schema=schema, key=each.id)
    return answers


@dataclasses.dataclass
class _Stream:
    """Runs a graph, and publishes the parts of its stream."""

    ctx: RunContext
    graph: Any
    config: RunnableConfig
    modes: Sequence[str]
    options: Mapping[str, Any]

    async def until_stopped(self, input: Any, call: _Call) -> Any:
        """Run the graph until it ends or asks; its last values."""
        output = None
        modes = list(dict.fromkeys([*self.modes, "values"]))
        token = _CALL.set(call)
        # The values of a checkpoint must be durable before its nodes run: the keys of their steps contain its id.
        parts = self.graph.astream(
            input, self.config, **{"durability": "sync", **self.options}, stream_mode=modes, version="v2"
        )
        try:
            async for part in parts:
                if part["type"] == "values" and not part["ns"]:
                    output = part["data"]
                if part["type"] in self.modes:
                    data = {"ns": list(part["ns"]), "data": _plain(part["data"])}
                    await self.ctx.emit(f"langgraph.{part['type']}", data)
        finally:
            await parts.aclose()
            restore(_CALL, token)
        return output


def _id(ctx: RunContext) -> str:
    return str(ctx.run_id)


def _plain(value: Any) -> Any:
    """Return a value of a graph as JSON."""
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, BaseMessage) or hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


def _current_task(run_id: str, scope: StepScope | None) -> FrameworkTask | None:
    """Return the node of a graph that the calling code is in, between steps.

    The id of a node's task is the same when the graph resumes at the checkpoint before it. Each attempt of the node
    uses a separate counter.
    """
    call = _CALL.get()
    if call is None or call.run_id != run_id or call.scope is not scope:
        return None  # even in a run that a node of another run's graph started
    config = var_child_runnable_config.get() or {}
    configurable = config.get("configurable") or {}
    if (task := configurable.get(_TASK)) is not None and (pad := configurable.get(_SCRATCHPAD)) is not None:
        return FrameworkTask(task, pad.interrupt_counter, f"{call.place}/{_place(call, config.get('metadata') or {})}")
    return FrameworkTask(call.id, call.attempt, call.place)


def _place(call: _Call, metadata: Mapping[str, Any]) -> str:
    """Return where a node is in its graph: the nodes around it, its superstep and its path, without random ids."""
    around = [each.partition(":")[0] for each in str(metadata.get("langgraph_checkpoint_ns", "")).split("|")]
    # A subgraph begins to count at 0 in each call.
    step = metadata.get("langgraph_step", 0) - (call.first if len(around) == 1 else 0)
    return f"{'|'.join(around)}/{step}/{metadata.get('langgraph_path')}"


FRAMEWORK_TASKS.append(_current_task)
CONTROL_FLOW.append(GraphBubbleUp)
# Without it a run whose nodes wait is not parked while `run_graph` publishes what they send, or the parts of subgraphs.
EVENT_WAITERS.add("langgraph._internal._queue:AsyncQueue.wait")  # until a node sends something
