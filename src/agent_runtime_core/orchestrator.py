"""Prompts as runs: planned and carried out in the background, and asked about by their ids."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as _dt
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast
from uuid import UUID

from ._core.clock import aware
from ._core.context_vars import start_soon
from ._core.settings import POSITIVE, SECONDS, number, with_known_names
from .config import get_config
from .errors import InvalidArgument, RunNotFound, UnknownRun, brief
from .interfaces import LLMClient, RunResult
from .persistence.jsonl import json_form
from .persistence.manager import PersistenceConfig, PersistenceManager, get_persistence_manager
from .planning.agent import PlanningAgent
from .planning.base import BasePlanner
from .planning.executor import BACKOFF_BASE, MAX_CONCURRENCY, MAX_RETRIES
from .planning.plan import MOST_STEPS
from .planning.progress import tried_steps
from .registry import Registry
from .runner.runner import AgentRunner
from .runner.settings import RunInfo
from .status import TERMINAL
from .status import RunStatus as _Status
from .tools.base import BaseTool
from .tools.registry import ToolRegistry
from .tools.tool import Tool

__all__ = ["Orchestrator", "OrchestratorSettings", "RunCreate", "RunResponse", "RunStatus"]


class RunStatus(str, Enum):  # noqa: UP042 (as the other enums of the public face)
    """Where a run stands. One that waits is running; one that was cancelled, timed out or is dead has failed."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


_WORDS = {
    _Status.PENDING: RunStatus.PENDING,
    _Status.RUNNING: RunStatus.RUNNING,
    _Status.WAITING: RunStatus.RUNNING,
    _Status.SUCCEEDED: RunStatus.COMPLETED,
}


@dataclass(frozen=True)
class RunCreate:
    """What is to be done, and the steps (1 to 100) that its plan may have at most."""

    prompt: str
    max_steps: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            raise InvalidArgument(f"prompt must be a string, got {brief(self.prompt)}")
        number(1, MOST_STEPS, whole=True).check("max_steps", self.max_steps)


@dataclass
class RunResponse:
    """A run as it stood when it was asked about; datetimes are aware UTC.

    Each of `steps` is one try that has ended: {"step_number", "tool_name", "tool_input", "result", "attempt"}, its
    result {"success", "output", "error"}. `result` is that of the last step, or a list where there are several.
    """

    run_id: str
    status: RunStatus
    steps: list[dict[str, Any]] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    created_at: _dt.datetime = field(kw_only=True)
    updated_at: _dt.datetime = field(kw_only=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; of a result that is more, a datetime for one, the text."""
        plain = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return cast("dict[str, Any]", json.loads(json.dumps(plain, default=json_form)))


@with_known_names
@dataclass(frozen=True)
class OrchestratorSettings:
    """A step is tried `max_retries` times, `backoff_base` seconds apart, then twice as long, and so on.

    At most `max_concurrency` steps of a run are in flight, and `concurrent_runs` runs in this process.
    """

    max_retries: int = MAX_RETRIES
    backoff_base: float = BACKOFF_BASE
    max_concurrency: int = MAX_CONCURRENCY
    concurrent_runs: int = 16

    def __post_init__(self) -> None:
        for name in ("max_retries", "max_concurrency", "concurrent_runs"):
            POSITIVE.check(name, getattr(self, name))
        SECONDS.check("backoff_base", self.backoff_base)

    @classmethod
    def of(cls, given: OrchestratorSettings | Mapping[str, Any] | None) -> OrchestratorSettings:
        """Settings as they come: as such, as a dict, or none."""
        if given is None or isinstance(given, cls):
            return given or cls()
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"settings are OrchestratorSettings or a dict of their fields, not {brief(given)}")
        return cls(**given)


class Orchestrator:
    """Takes prompts, has `planner` make plans of them, and carries those out in the background.

    Runs are runs of `runner`, by default one on the configured backends: where those are durable a run survives this
    process, and any process with an Orchestrator of the same `key` on the same backends goes on with it and can tell
    of it. Work begins with the first `create_run`, or with `async with`, which is closed at its end. Tools are by
    default a CalculatorTool and a TodoStoreTool. `client` is asked by a plan's llm_call steps.
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
    ) -> None:
        self.settings: OrchestratorSettings = OrchestratorSettings.of(settings)
        self.agent: PlanningAgent = PlanningAgent(
            key, planner, tool_registry, client=client, max_retries=self.settings.max_retries,
            backoff_base=self.settings.backoff_base, max_concurrency=self.settings.max_concurrency,
        )  # fmt: skip
        self._agents = Registry()
        self._agents.register(self.agent)
        self._own = runner is None
        self.runner: AgentRunner = _configured_runner() if runner is None else runner
        self._worker: AgentRunner | None = None
        self._working: asyncio.Task[None] | None = None

    @property
    def planner(self) -> BasePlanner:
        return self.agent.planner

    @property
    def tool_registry(self) -> ToolRegistry:
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
        """Store a run and have it begun; returns as soon as it is stored.

        The same `idempotency_key` gives the run there is. InvalidArgument: max_steps is not from 1 to 100.
        """
        asked = _asked(request, prompt, max_steps)
        input_ = {
            "messages": [{"role": "user", "content": asked.prompt}],
            "params": {"max_steps": asked.max_steps},
        }
        run_id = await self.runner.submit(self.agent, input_, idempotency_key=idempotency_key)
        info = await self.runner.get_run(run_id)
        self._work()
        if idempotency_key is not None:
            return await self._told(info)
        return RunResponse(
            str(run_id), RunStatus.PENDING, created_at=info.created_at, updated_at=info.created_at
        )  # as it was stored: it may have begun since

    async def get_run(self, run_id: UUID | str) -> RunResponse:
        """Where a run stands, with the steps that have ended. RunNotFound (a ValueError and a KeyError)."""
        return await self._told(await self._info(run_id))

    async def wait(self, run_id: UUID | str, timeout: float | None = None) -> RunResponse:
        """The same once it has ended; TimeoutError after `timeout` seconds."""
        if self._working is not None:
            self._work()  # anew, where it began on a loop that is gone
        await self.runner.wait((await self._info(run_id)).run_id, timeout)
        return await self.get_run(run_id)

    async def close(self) -> None:
        """Let what has begun end, within the runner's `grace_seconds`, then give it back.

        What is only in memory would be lost: there, what is pending is done first, within the same time.
        """
        if not self.runner.backends.durable:
            await self._until_begun()
        await self._rest()
        if self._own:
            await self.runner.close()

    # -- work

    def _work(self) -> None:
        """Have runs claimed and carried out, in a task of this loop."""
        task = self._working
        if task is not None and not task.done() and task.get_loop() is asyncio.get_running_loop():
            return
        if self._worker is not None:
            self._worker.heartbeat.stop()
        self._worker = self.runner.worker_for(self._agents)
        loop = self._worker.run_loop(concurrency=self.settings.concurrent_runs, handle_signals=False)
        self._working = start_soon(loop)

    async def _rest(self) -> None:
        worker, task = self._worker, self._working
        self._worker = self._working = None
        if worker is None or task is None:
            return
        if task.get_loop() is asyncio.get_running_loop():
            await asyncio.sleep(0)  # a loop that has not begun yet would not hear of it
            worker.stop()
            await task
        await worker.close()

    async def _until_begun(self) -> None:
        if self._working is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.runner.config.grace_seconds):
                for info in await self.runner.runs(_Status.PENDING, self.agent.key):
                    await self.runner.wait(info.run_id)

    # -- asking

    async def _info(self, run_id: UUID | str) -> RunInfo:
        try:
            info = await self.runner.get_run(run_id)
        except UnknownRun:
            info = None
        if info is None or info.agent_key != self.agent.key:
            raise RunNotFound(f"Run not found: {run_id}")
        return info

    async def _told(self, info: RunInfo) -> RunResponse:
        records = await self.runner.state_store.records(info.run_id)
        times = [info.created_at, info.started_at, info.ended_at, *(aware(each.t) for each in records[-1:])]
        told = RunResponse(
            str(info.run_id), _WORDS.get(info.status, RunStatus.FAILED), tried_steps(records, self.tool_registry),
            created_at=info.created_at, updated_at=max(each for each in times if each is not None),
        )  # fmt: skip
        if info.status in TERMINAL:
            ended = await self.runner.wait(info.run_id)
            if ended.status is _Status.SUCCEEDED:
                told.result = ended.final_output.get("result")
            else:
                told.error = _why(info.status, ended)
        return told


def _asked(request: Any, prompt: str | None, max_steps: int) -> RunCreate:
    if request is None and prompt is not None:
        return RunCreate(prompt, max_steps)
    if not isinstance(request, RunCreate) or prompt is not None:
        raise InvalidArgument(f"create_run takes a RunCreate, or prompt= and max_steps=, not {brief(request)}")
    if max_steps not in (RunCreate.max_steps, request.max_steps):
        raise InvalidArgument(
            f"max_steps={brief(max_steps)} differs from the RunCreate's {request.max_steps}: give it there"
        )
    return request


def _why(status: _Status, ended: RunResult) -> str:
    """Why it failed, with the type of the error; the word of its own status where that is another one."""
    error = ended.error
    message = error.message if error is not None else ""
    if status is _Status.FAILED:
        return f"{error.type}: {message}" if error is not None else "failed"
    return f"{status.value}: {message}" if message else status.value


def _configured_runner() -> AgentRunner:
    """On the configured backends; where they are all in memory, and nobody said anything of stores, those are too."""
    config = get_config()
    in_memory = config.backend_url is None and config.queue_backend == config.state_store_backend == "memory"
    stores = None
    if in_memory and get_persistence_manager().config == PersistenceConfig():
        stores = PersistenceManager.open("memory://")
    return AgentRunner(persistence=stores, registry=Registry())
