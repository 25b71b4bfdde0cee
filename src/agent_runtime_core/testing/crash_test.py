"""A run that is killed at every write it makes, to see that it comes to the same."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .._core.arguments import checked_int, checked_seconds, mapping
from .._core.threads import in_thread
from .._engines.base import Op
from .._engines.memory import MemoryEngine
from .._execution.context import conversation_id
from .._journal.record import Record
from ..errors import InvalidArgument, NotSupported, brief
from ..interfaces import AgentRuntime, RunResult
from ..persistence.manager import PersistenceManager
from ..queue.records import RunFilter
from ..registry import Registry, key_of
from ..runner.crash_suspects import MAX_CRASHES_WITHOUT_PROGRESS
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..status import TERMINAL, RunStatus
from ..tools.registry import ToolRegistry
from .clock import JumpingClock
from .crash_points import CrashPoint
from .run_comparison import RunSummary, WriteLog, account, difference, ending, told_as
from .simulated_process import RUN, CrashSetting, SimulatedProcess

__all__ = ["CrashReport", "crash_everywhere"]

Agent = AgentRuntime | Callable[[], AgentRuntime]


@dataclass(frozen=True)
class CrashReport:
    """`writes` of the undisturbed run, `kills` that were carried out in all runs, and the undisturbed `outcome`."""

    writes: int
    kills: int
    outcome: RunResult


async def crash_everywhere(
    agent: Agent,
    input: Mapping[str, Any] | None = None,
    *,
    agents: Sequence[Agent] = (),
    config: RunnerConfig | None = None,
    tools: ToolRegistry | None = None,
    persistence: PersistenceManager | bool = False,
    signals: Mapping[str, Any] | None = None,
    status: RunStatus | str = RunStatus.SUCCEEDED,
    compare: Callable[[RunResult], Any] | None = None,
    effects: Callable[[], Any] | None = None,
    reset: Callable[[], Any] | None = None,
    again: int = 0,
    timeout: float = 30.0,
) -> CrashReport:
    """Run an agent undisturbed, then kill it at its n-th write, n = 1, 2, …, and see that it comes to the same.

    Each n is two runs: one is killed before the write lands, one after it landed and before its answer is seen. A new
    runner then goes on with what is stored. AssertionError names the write and the difference, if one of these is
    not as in the undisturbed run: the `status` of the run, its final output and the type of its error (or what
    `compare` makes of its result), and those of its children; the steps that were carried out, by their idempotency
    keys; the events, but for those that a resume adds; what `effects()` gives at the end of the run. A run that is
    cancelled or runs out of time may have got less far. No step that was recorded may be carried out again.

    `agent`, and each of `agents` that it calls, is an agent, or a function or class that makes a new one for each life,
    as a new process would. `reset()` is called before each run, and puts the world back as `effects()` sees it; both
    may be coroutine functions. `signals` answer what the run waits for, by name. With `persistence=True` conversations
    are kept, and killed at, in the same store; a manager of your own is yours to reset. `again` kills so many of the
    lives after the first one as well, at every write of theirs, but not so often without a new record that the run
    would be dead. No life may take more than `timeout` real seconds.

    Everything is in memory, and each life on a loop and in a thread of its own. Waits and pauses of the runtime take no
    time; `asyncio.sleep` does. A kill is simulated: that loop never turns again. What threads do at that moment is
    given half a second to end, and `finally` blocks of the dead run after `effects()` was asked and before `reset()`.
    The start of a step is written without waiting for it: a process killed there may have begun the step.

    InvalidArgument: an option that cannot be used. WaitTimeout, UnknownAgent: nothing would wake the run any more.
    NotSupported: it needs another store, as `ctx.transaction` does.
    """
    wanted = _status(status)
    checked_int("again", again, least=0)
    makers = [_maker(each) for each in (agent, *agents)]
    setting = CrashSetting(lambda: [make() for make in makers], config, tools, persistence, mapping("signals", signals))
    trial = _CrashTrial(
        setting, mapping("input", input), compare or ending, effects, reset, checked_seconds("timeout", timeout)
    )
    plain = await trial.plain(wanted)
    writes = trial.writes
    await _each(trial, plain, (), again)
    return CrashReport(writes, trial.kills, plain.result)


def _status(status: RunStatus | str) -> RunStatus:
    if not isinstance(status, str) or status not in TERMINAL:
        raise InvalidArgument(f"status is how the run ends ({', '.join(TERMINAL)}), not {brief(status)}")
    return RunStatus(status)


def _maker(agent: Agent) -> Callable[[], AgentRuntime]:
    if isinstance(agent, type) or (callable(agent) and not hasattr(agent, "run")):
        return agent
    known = cast(AgentRuntime, agent)
    key_of(known)
    return lambda: known


async def _each(trial: _CrashTrial, plain: RunSummary, blows: tuple[CrashPoint, ...], again: int) -> None:
    """Kill what comes after these blows at each of its writes, until it is over before that."""
    n = 0
    while True:
        n += 1
        for landed in (False, True):
            more = (*blows, CrashPoint(n, landed))
            reached = await trial.killed(plain, more)
            if not reached:
                return
            if again:
                await _each(trial, plain, more, again - 1)


class _CrashTrial:
    """Whole runs of one agent on one input."""

    def __init__(
        self, setting: CrashSetting, input: Mapping[str, Any], compare: Callable[[RunResult], Any],
        effects: Callable[[], Any] | None, reset: Callable[[], Any] | None, timeout: float,
    ) -> None:  # fmt: skip
        self.setting, self.input, self.timeout = setting, input, timeout
        self._compare, self._effects, self._reset = compare, effects, reset
        self._key = setting.agents()[0].key
        self.writes = self.kills = 0

    async def plain(self, status: RunStatus) -> RunSummary:
        """The undisturbed run, twice: what differs by itself says nothing about a crash."""
        first, _ = await self._run(())
        result = first.result
        error = result.error
        if error is not None and error.type == "NotSupported":
            raise NotSupported(f"crash_everywhere keeps runs in memory: {error.message}")
        why = "" if error is None else f" ({error.type}: {error.message})"
        if result.status is not status:
            raise AssertionError(f"the undisturbed run is {told_as(result)}{why}, and not {status.value}")
        second, _ = await self._run(())
        if (wrong := difference(first, second)) is not None:
            raise AssertionError(
                f"two undisturbed runs differ: {wrong}; reset= puts back what a run leaves behind, and a function that "
                "makes the agent gives each life a new one"
            )
        return first

    async def killed(self, plain: RunSummary, blows: Sequence[CrashPoint]) -> bool:
        """One run with these blows, compared; False if it was over before the last of them."""
        other, fatal = await self._run(blows)
        self.kills += len(fatal)
        reached = len(fatal) == len(blows)
        if (wrong := difference(plain, other)) is not None:
            told = ", then ".join(f"{blow} ({_ops(ops)})" for blow, ops in zip(blows, fatal, strict=False))
            raise AssertionError(f"killed {told}: {wrong}" if fatal else f"undisturbed, at the end: {wrong}")
        return reached

    async def _run(self, blows: Sequence[CrashPoint]) -> tuple[RunSummary, list[Sequence[Op]]]:
        """One run to its end, over as many lives as it takes; the operations of the writes it was killed at."""
        await _called(self._reset)
        tally, clock = WriteLog(), JumpingClock()
        store = MemoryEngine(clock)
        client = self.setting.runner(store, Registry(), tally.drawn)
        lives: list[SimulatedProcess] = []
        try:
            await client.submit(self._key, self.input, run_id=RUN)
            fatal = await self._live(blows, store, clock, client, tally, lives)
            effects = copy.deepcopy(await _called(self._effects))
            return await account(client, str(RUN), tally, self._compare, await self._said(client), effects), fatal
        finally:
            await client.close()
            for life in lives:
                await in_thread(life.dispose)

    async def _said(self, client: AgentRunner) -> list[Any] | None:
        """The messages of the run's conversation, if they are kept with it."""
        known = conversation_id(self.input.get("conversation_id"))
        if self.setting.persistence is not True or known is None:
            return None
        conversation = await client.persistence.conversations.get(known)
        return [] if conversation is None else [[each.role, each.content] for each in conversation.messages]

    async def _live(
        self,
        blows: Sequence[CrashPoint],
        store: MemoryEngine,
        clock: JumpingClock,
        client: AgentRunner,
        tally: WriteLog,
        lives: list[SimulatedProcess],
    ) -> list[Sequence[Op]]:
        fatal: list[Sequence[Op]] = []
        recorded = deaths = 0
        while True:
            # One death more without a record in between, and the run is dead.
            blow = blows[len(fatal)] if len(fatal) < len(blows) and deaths < MAX_CRASHES_WITHOUT_PROGRESS - 1 else None
            life = SimulatedProcess(store, client, self.setting, blow, tally, tally.drawn)
            lives.append(life)
            if await self._lived(life):
                self.writes = life.front.writes
                return fatal
            fatal.append(life.front.fatal or ())
            deaths = 1 if len(tally.done) > recorded else deaths + 1
            recorded = len(tally.done)
            clock.forget()
            await _let_go(client)

    async def _lived(self, life: SimulatedProcess) -> bool:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await life.run()
        except TimeoutError:
            if not limit.expired():
                raise
            raise AssertionError(
                f"the run is not over after {self.timeout:g} s: timeout= gives it longer; a wait inside of a step is "
                "answered by nobody here"
            ) from None


async def _let_go(client: AgentRunner) -> None:
    """The process is dead: its leases are over."""
    held = tuple((row.run_id, row.claim_id) for row in await client.queue.find(RunFilter(("running",))))
    await client.queue.commits.commit(None, [Op("queue.beat", (held, -1.0))])


async def _called(fn: Callable[[], Any] | None) -> Any:
    result = None if fn is None else fn()
    return await result if inspect.isawaitable(result) else result


def _ops(ops: Sequence[Op]) -> str:
    """The operations of a write, as short as tells them apart."""
    return ", ".join(f"{op.name}{_about(op)}" for op in ops)


def _about(op: Op) -> str:
    with contextlib.suppress(IndexError):
        about = op.args[1]
        if isinstance(about, Record):
            return f" {about.kind} {about.name}".rstrip()
        if op.name == "queue.settle":
            return f" {about.status}"
    return ""
