"""Prompts that are planned and executed in the background, and queried by run id."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as _dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, cast
from uuid import UUID

from ._core.clock import aware
from ._core.context_vars import start_soon
from ._core.settings import POSITIVE, SECONDS, TRIES, number, with_known_names
from ._core.validation import must
from .config import get_config
from .errors import RunNotFound, UnknownRun
from .interfaces import LLMClient
from .persistence.manager import PersistenceConfig, PersistenceManager, get_persistence_manager
from .persistence.model_codec import json_form
from .planning.agent import PlanningAgent, tried_steps
from .planning.executor import BACKOFF_BASE, MAX_CONCURRENCY, MAX_RETRIES, ON_LONG_PLAN
from .planning.plan import MOST_STEPS, BasePlanner
from .queue.records import RunRow
from .registry import Registry
from .runner.runner import AgentRunner
from .runner.settings import RunInfo
from .status import TERMINAL, failure_reason, short_status
from .status import RunStatus as _Status
from .tools.base import BaseTool
from .tools.registry import ToolRegistry
from .tools.tool import Tool

__all__ = ["Orchestrator", "OrchestratorSettings", "RunCreate", "RunResponse", "RunStatus"]


_MOST_KEPT: Final = 100  # responses in `runs`: each may have megabytes of results


class RunStatus(str, Enum):  # noqa: UP042 (like the other public enums)
    """Status of a run. A waiting run is RUNNING; a cancelled, timed-out or dead run is FAILED.

    Attributes:
        PENDING: The run waits for a worker.
        RUNNING: The run is executing, or waits.
        COMPLETED: The run succeeded.
        FAILED: The run failed, timed out, was cancelled or is dead.
    """

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class RunCreate:
    """A request for a run.

    Args:
        prompt: What to do.
        max_steps: The most steps of the plan that are executed, from 1 to 100.

    Raises:
        InvalidArgument: A value is invalid.
    """

    prompt: str
    max_steps: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise must("prompt", "be a string", self.prompt)
        number(1, MOST_STEPS, whole=True).check("max_steps", self.max_steps)


@dataclass
class RunResponse:
    """The state of a run when it was queried. Datetimes are in UTC and timezone-aware.

    Attributes:
        run_id: The id of the run.
        status: The status.
        steps: One dict for each step attempt that ended: {"step_number", "tool_name", "tool_input", "result",
            "attempt"}. `result` is {"success", "output", "error"}.
        result: The result of the last step, or a list if the plan ends with several steps.
        error: Why the run failed, or None.
        created_at: When the run was stored.
        updated_at: When the run last changed.
    """

    run_id: str
    status: RunStatus
    steps: list[dict[str, Any]] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    created_at: _dt.datetime = field(kw_only=True)
    updated_at: _dt.datetime = field(kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a value that is not JSON, such as a datetime, becomes a string."""
        return cast("dict[str, Any]", json.loads(json.dumps(self.model_dump(), default=json_form)))

    def model_dump(self) -> dict[str, Any]:
        """Return the fields with their Python values, under the name that pydantic uses."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}


@with_known_names
@dataclass(frozen=True)
class OrchestratorSettings:
    """Settings of an `Orchestrator`.

    Args:
        max_retries: Attempts of a step, including the first.
        backoff_base: Seconds before the first retry; each further delay is twice as long.
        max_concurrency: Steps of a run that execute at the same time.
        concurrent_runs: Runs of this process that execute at the same time.
        on_long_plan: What happens to a plan with more than `max_steps` steps: "cut" executes the first steps, "fail"
            none.

    Raises:
        UnknownSetting: A setting does not exist.
        InvalidArgument: A value is invalid.
    """

    max_retries: int = MAX_RETRIES
    backoff_base: float = BACKOFF_BASE
    max_concurrency: int = MAX_CONCURRENCY
    concurrent_runs: int = 16
    on_long_plan: str = "cut"

    def __post_init__(self) -> None:
        TRIES.check("max_retries", self.max_retries)
        for name in ("max_concurrency", "concurrent_runs"):
            POSITIVE.check(name, getattr(self, name))
        SECONDS.check("backoff_base", self.backoff_base)
        ON_LONG_PLAN.check("on_long_plan", self.on_long_plan)

    @classmethod
    def of(cls, given: OrchestratorSettings | Mapping[str, Any] | None) -> OrchestratorSettings:
        """Return settings from `OrchestratorSettings`, from a dict of their fields, or from None (the defaults).

        Args:
            given: The settings.

        Raises:
            InvalidArgument: `given` is of another type, or a value is invalid.

        Examples:
            >>> from agent_runtime_core.orchestrator import OrchestratorSettings
            >>> OrchestratorSettings.of({"max_retries": 5}).max_retries
            5
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, Mapping):
            raise must("settings", "be OrchestratorSettings or a dict of their fields", given)
        return cls(**given)


class Orchestrator:
    """Plans prompts with `planner`, and executes the plans in the background.

        async with Orchestrator() as orchestrator:
            run = await orchestrator.create_run(prompt="add 3 and 4")
            done = await orchestrator.wait(run.run_id)
            print(done.result)

    If the backends are durable, runs survive this process: any process with an Orchestrator with the same `key` on the
    same backends executes them and can query them. Work begins with the first `create_run`, or with `async with`, which
    also closes the orchestrator at its end.

    Args:
        planner: Makes a plan from a prompt.
        tool_registry: The tools of plans; by default a CalculatorTool and a TodoStoreTool.
        settings: `OrchestratorSettings`, or a dict of their fields.
        runner: The runner; by default a new runner on the configured backends.
        client: The model client for the llm_call steps of plans.
        key: The agent key of the runs.
        work: Whether this process executes the runs. With False, a worker that registered `agent` executes them.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core.orchestrator import Orchestrator
        >>> async def main():
        ...     async with Orchestrator() as orchestrator:
        ...         run = await orchestrator.create_run(prompt="add 3 and 4")
        ...         return (await orchestrator.wait(run.run_id)).result
        >>> asyncio.run(main())
        7
    """

    def __init__(
        self,
        planner: BasePlanner | None = None,
        tool_registry: ToolRegistry | Iterable[Tool | BaseTool] | None = None,
        settings: OrchestratorSettings | Mapping[str, Any] | None = None,
        *,
        runner: AgentRunner | None = None,
        client: LLMClient | None = None,
        key: str = "orchestrator",
        work: bool = True,
    ) -> None:
        self.settings: OrchestratorSettings = OrchestratorSettings.of(settings)
        self.agent: PlanningAgent = PlanningAgent(
            key, planner, tool_registry, client=client, max_retries=self.settings.max_retries,
            backoff_base=self.settings.backoff_base, max_concurrency=self.settings.max_concurrency,
            on_long_plan=self.settings.on_long_plan,
        )  # fmt: skip
        self._agents = Registry()
        self._agents.register(self.agent)
        self._own = runner is None
        self.work: bool = work
        self.runner: AgentRunner = _configured_runner() if runner is None else runner
        self._worker: AgentRunner | None = None
        self._working: asyncio.Task[None] | None = None
        #: The runs by id that this object returned, as they were then; the latest 100. `get_run` reads the store.
        self.runs: dict[str, RunResponse] = {}

    @property
    def planner(self) -> BasePlanner:
        """The planner of the agent."""
        return self.agent.planner

    @property
    def tool_registry(self) -> ToolRegistry:
        """The tools that plans may use."""
        return self.agent.tools

    async def __aenter__(self) -> Orchestrator:
        self._work()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def create_run(
        self,
        request: RunCreate | None = None,
        *,
        prompt: str | None = None,
        max_steps: int = 10,
        idempotency_key: str | None = None,
    ) -> RunResponse:
        """Store a run and return it immediately; it is executed in the background.

        Args:
            request: The request, or None to pass `prompt` and `max_steps`.
            prompt: What to do.
            max_steps: The most steps of the plan that are executed, from 1 to 100.
            idempotency_key: A second call with the same key returns the existing run.

        Returns:
            The run.

        Raises:
            InvalidArgument: The request is invalid.
            IdempotencyConflict: The key was used with another prompt.
        """
        row = self.new_run(_request(request, prompt, max_steps), idempotency_key)
        info = RunInfo.of((await self.insert_run(row))[0])
        if idempotency_key is not None:
            return await self._response(info)
        return self._returned(
            RunResponse(str(info.run_id), RunStatus.PENDING, created_at=info.created_at, updated_at=info.created_at)
        )  # as it was stored, although it may be running already

    def new_run(
        self, request: RunCreate, idempotency_key: str | None = None, traceparent: str | None = None,
        tenant: str | None = None,
    ) -> RunRow:  # fmt: skip
        """Return the row of the run for a request, in the span with that W3C `traceparent`. Nothing is stored."""
        input_ = {"messages": [{"role": "user", "content": request.prompt}], "params": {"max_steps": request.max_steps}}
        return self.runner.new_run(
            self.agent, input_, idempotency_key=idempotency_key, traceparent=traceparent, tenant=tenant
        )

    async def insert_run(self, row: RunRow) -> tuple[RunRow, bool]:
        """Store a row of `new_run`, and work on it. Return the stored row, and whether this call stored it."""
        stored, new = await self.runner.insert_run(row)
        self._work()
        return stored, new

    async def get_run(self, run_id: UUID | str) -> RunResponse:
        """Return a run with the step attempts that have ended.

        Args:
            run_id: The id of the run.

        Raises:
            RunNotFound: The orchestrator does not know a run with that id (also a ValueError and a KeyError).
        """
        return await self._response(await self._info(run_id))

    async def wait(self, run_id: UUID | str, timeout: float | None = None) -> RunResponse:
        """Wait until a run is finished, and return it.

        Args:
            run_id: The id of the run.
            timeout: Seconds to wait, or None for no limit.

        Returns:
            The finished run.

        Raises:
            TimeoutError: The run did not finish in time.
            RunNotFound: The orchestrator does not know a run with that id.
        """
        if self._working is not None:
            self._work()  # restart it if its event loop is closed
        await self.runner.wait((await self._info(run_id)).run_id, timeout)
        return await self.get_run(run_id)

    async def close(self) -> None:
        """Stop working: let active runs finish within the runner's `grace_seconds`, then release them.

        With memory backends pending runs would be lost, so they are finished first, within the same time.
        """
        if not self.runner.backends.durable:
            await self._finish_pending()
        await self._stop_working()
        if self._own:
            await self.runner.close()

    # -- work

    def _work(self) -> None:
        """Start a task on this event loop that claims and executes runs."""
        if not self.work:
            return
        task = self._working
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            return
        if self._worker is not None:
            self._worker.heartbeat.stop()
        self._worker = self.runner.worker_for(self._agents)
        loop = self._worker.run_loop(concurrency=self.settings.concurrent_runs, handle_signals=False)
        self._working = start_soon(loop)

    async def _stop_working(self) -> None:
        worker, task = self._worker, self._working
        self._worker = self._working = None
        if worker is None or task is None:
            return
        if task.get_loop() is asyncio.get_running_loop():
            await asyncio.sleep(0)  # run_loop must have started to notice stop()
            worker.stop()
            await task
        await worker.close()

    async def _finish_pending(self) -> None:
        if self._working is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.runner.config.grace_seconds):
                for info in await self.runner.runs(_Status.PENDING, self.agent.key):
                    await self.runner.wait(info.run_id)

    # -- queries

    async def _info(self, run_id: UUID | str) -> RunInfo:
        try:
            info = await self.runner.get_run(run_id)
        except UnknownRun:
            info = None
        if info is None or info.agent_key != self.agent.key:
            error = RunNotFound(f"Run not found: {run_id}")
            error.add_note("The orchestrator finds only its own runs. Use runner.get_run(run_id) for other runs")
            raise error
        return info

    def _returned(self, response: RunResponse) -> RunResponse:
        self.runs.pop(response.run_id, None)
        self.runs[response.run_id] = response
        if len(self.runs) > _MOST_KEPT:
            del self.runs[next(iter(self.runs))]
        return response

    async def _response(self, info: RunInfo) -> RunResponse:
        records = await self.runner.state_store.records(info.run_id)
        times = [info.created_at, info.started_at, info.ended_at, *(aware(each.t) for each in records[-1:])]
        response = RunResponse(
            str(info.run_id), RunStatus(short_status(info.status)), tried_steps(records, self.tool_registry),
            created_at=info.created_at, updated_at=max(each for each in times if each is not None),
        )  # fmt: skip
        if info.status in TERMINAL:
            outcome = await self.runner.wait(info.run_id)
            if outcome.status is _Status.SUCCEEDED:
                response.result = outcome.final_output.get("result")
            else:
                error = outcome.error
                kind, message = (None, "") if error is None else (error.type, error.message)
                response.error = failure_reason(info.status.value, kind, message)
        return self._returned(response)


def _request(request: Any, prompt: str | None, max_steps: int) -> RunCreate:
    if request is None and prompt is not None:
        return RunCreate(prompt, max_steps)
    if not isinstance(request, RunCreate) or prompt is not None:
        raise must("request", "be a RunCreate", request, "Pass it alone, or pass prompt= and max_steps= without it")
    if max_steps not in (RunCreate.max_steps, request.max_steps):
        raise must("max_steps", f"equal the {request.max_steps} of the RunCreate", max_steps, "Set it there only")
    return request


def _configured_runner() -> AgentRunner:
    """Return a runner on the configured backends, with stores in memory if these are and no others are configured."""
    config = get_config()
    in_memory = config.backend_url is None and config.queue_backend == config.state_store_backend == "memory"
    stores = None
    if in_memory and get_persistence_manager().config == PersistenceConfig():
        stores = PersistenceManager.open("memory://")
    return AgentRunner(persistence=stores, registry=Registry())
