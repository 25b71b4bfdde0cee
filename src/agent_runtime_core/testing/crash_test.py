"""Kill an agent's run at each of its writes and check that its outcome remains the same.

Everything is in memory; each simulated process uses a separate event loop and thread. Waits and pauses of the runtime
take no time, `asyncio.sleep` does. A kill stops the loop for ever: threads get half a second to finish, and pending
`finally` blocks run between `effects()` and the next `reset()`. The start of a step is written without waiting, so a
process killed there may have started the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from .._core.arguments import checked_int, checked_seconds, mapping, run_input
from .._core.codec.json import encode
from .._core.threads import in_thread
from .._core.validation import must
from .._engines.base import Op
from .._engines.memory import MemoryEngine
from .._execution.context import conversation_id
from .._journal.record import DONE, FAILED, RESET, RETRYING, STARTED, Record
from ..errors import NotSupported
from ..events.event import Event
from ..interfaces import AgentRuntime, RunResult
from ..persistence.manager import PersistenceManager
from ..queue.records import RunFilter
from ..registry import Registry, key_of
from ..runner.runner import AgentRunner
from ..runner.settings import RunnerConfig
from ..status import TERMINAL, RunStatus
from ..tools.registry import ToolRegistry
from .clock import JumpingClock
from .crash_points import CrashPoint
from .simulated_process import RUN, CrashSetting, SimulatedProcess

Identity = tuple[str, str, str]  # (run id, name of a step, its key)
EventKey = tuple[str, bool]  # an event, and whether a step published it: a repeated step publishes it again

FINAL_EVENTS = {"run.succeeded", "run.failed", "run.cancelled", "run.timed_out"}
#: Events that a resumed run may publish again or in addition.
REPEATABLE = {
    "run.started", "run.resumed", "run.heartbeat", "step.started", "step.skipped", "step.retrying", "step.failed",
    "step.in_doubt", "progress.update", "tool.call",
}  # fmt: skip
COMPLETED = "step.completed"
#: Statuses of a run that was stopped from outside: after a crash it may have made less progress.
STOPPED = {RunStatus.CANCELLED, RunStatus.TIMED_OUT}
REVIEW = "signal:in_doubt:"  # prefix of waits that only exist after a crash


class WriteLog:
    """The journal records of one whole run, over all its simulated processes."""

    def __init__(self) -> None:
        self.started: set[Identity] = set()
        self.done: dict[Identity, Record] = {}
        self.repeated: list[str] = []
        self._drawn: dict[str, list[str]] = {}

    def __call__(self, ops: Sequence[Op], applied: bool) -> None:
        for op in ops:
            if op.name == "journal.append":
                (self._applied if applied else self._attempted)(*op.args)

    def drawn(self, run_id: str) -> Sequence[str]:
        """The random values that the run drew so far: "random" or "uuid4", in order."""
        return self._drawn.get(run_id, ())

    def _attempted(self, run_id: str, record: Record) -> None:
        if record.kind not in (STARTED, DONE, RETRYING, FAILED) or record.name.startswith(REVIEW):
            return
        steps = [(run_id, record.name, record.key)]
        if record.next is not None:
            after = json.loads(record.next)
            steps.append((run_id, after["name"], after["key"]))
        for step in steps:
            self.started.add(step)
            known = self.done.get(step)
            if known is not None and (known.seq, known.claim_id) != (record.seq, record.claim_id):
                self.repeated.append(_named(step))

    def _applied(self, run_id: str, record: Record) -> None:
        if record.kind == RESET:
            self.done = {step: known for step, known in self.done.items() if step[0] != run_id}
        if record.kind != DONE:
            return
        step = (run_id, record.name, record.key)
        if step not in self.done and record.name in ("random", "uuid4") and record.key.startswith("v:"):
            self._drawn.setdefault(run_id, []).append(record.name)
        self.done.setdefault(step, record)


@dataclass(frozen=True)
class RunSummary:
    """The outcome of one whole run; `events` counts the events of each run id."""

    result: RunResult
    outcomes: dict[str, Any]
    steps: frozenset[Identity]
    events: dict[str, Counter[EventKey]]
    exact: bool  # no attempt failed, so each event published between steps must occur exactly once
    conversation: list[Any] | None  # the run's conversation, if it is in the same store
    effects: Any
    errors: Sequence[str]


async def summarize(
    client: AgentRunner, root: str, writes: WriteLog, compare: Callable[[RunResult], Any],
    conversation: list[Any] | None, effects: Any,
) -> RunSummary:  # fmt: skip
    """Summarize the store after the run `root` and its children have finished."""
    outcomes, counts, errors, exact = {}, {}, [], True
    if writes.repeated:
        errors.append(f"{writes.repeated[0]} has a saved result but was executed again")
    for row in await client.queue.find(RunFilter()):
        result = await client.wait(row.run_id)
        exact = exact and row.failures == 0
        label = "the run" if row.run_id == root else f"child {row.agent!r}"
        outcomes[row.run_id] = (label, (compare if row.run_id == root else outcome_of)(result))
        events = await client.event_bus.get_events(row.run_id)
        errors += [f"{error} in the events of {label}" for error in event_log_errors(events)]
        counts[row.run_id] = Counter(_comparable(events))
    result = await client.wait(root)
    return RunSummary(result, outcomes, frozenset(writes.started), counts, exact, conversation, effects, errors)


def outcome_of(result: RunResult) -> tuple[Any, ...]:
    """The compared parts of a result: status, final output and error type.

    The output of a stopped run is left out: after a crash the run may have made less progress.
    """
    output = None if result.status in STOPPED else result.final_output
    return status_of(result), output, None if result.error is None else result.error.type


def status_of(result: RunResult) -> str:
    """Return the status of a result, or an empty string."""
    return "" if result.status is None else result.status.value


def event_log_errors(events: Sequence[Event]) -> Iterable[str]:
    """Yield what is wrong with the events of a run."""
    numbers = [event.sequence for event in events]
    if numbers != list(range(len(numbers))):
        yield f"the sequence numbers have a gap ({numbers})"
    final = [event.event_type for event in events if event.event_type in FINAL_EVENTS and not event.from_agent]
    if len(final) != 1 or events[-1].event_type != final[0]:
        yield f"the log must end with its only final event, got {[event.event_type for event in events]}"
    completed = Counter(event.payload["step_id"] for event in events if event.event_type == COMPLETED)
    for step, count in completed.items():
        if count > 1:
            yield f"{COMPLETED} of step {step} was published {count} times"


def _comparable(events: Sequence[Event]) -> Iterable[EventKey]:
    for event in events:
        kind, payload = event.event_type, event.payload
        if kind == COMPLETED:
            yield f"{kind} of {payload['step_name']} ({payload['step_id']})", False
        elif kind == "tool.result":
            # Published with the step's record or by the step itself, so a repeated step may publish it twice.
            yield f"{kind} of {payload['tool_name']} ({payload['step_id']})", True
        elif kind in FINAL_EVENTS and not event.from_agent:
            yield kind, False
        elif event.from_agent or kind not in REPEATABLE:
            yield f"{kind} {encode(payload)}", "step_id" in payload


def difference(baseline: RunSummary, other: RunSummary) -> str | None:
    """Return the first difference of `other` from the undisturbed run, or None."""
    if other.errors:
        return other.errors[0]
    for compare in (_outcome_difference, _step_difference, _event_difference):
        if (found := compare(baseline, other)) is not None:
            return found
    if other.conversation != baseline.conversation:
        return f"the conversation is {other.conversation!r:.1000}, undisturbed {baseline.conversation!r:.1000}"
    if other.effects != baseline.effects:
        return f"effects() returned {other.effects!r:.1000}, undisturbed {baseline.effects!r:.1000}"
    return None


def _outcome_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    for run_id, (label, expected) in baseline.outcomes.items():
        found = other.outcomes.get(run_id)
        if found is None and not _stopped(baseline):
            return f"{label} is missing"
        if found is not None and found[1] != expected:
            return f"{label} ended as {found[1]!r:.1000}{_error(other.result)}, undisturbed as {expected!r:.1000}"
    if more := other.outcomes.keys() - baseline.outcomes.keys():
        return f"{other.outcomes[min(more)][0]} was called, which the undisturbed run does not call"
    return None


def _stopped(baseline: RunSummary) -> bool:
    return baseline.result.status in STOPPED


def _error(result: RunResult) -> str:
    return "" if result.error is None else f" ({result.error.type}: {result.error.message:.1000})"


def _step_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    more, less = (sorted(map(_named, steps)) for steps in (other.steps - baseline.steps, baseline.steps - other.steps))
    if not more and (not less or _stopped(baseline)):
        return None
    steps = [f"also {', '.join(more)}"] if more else []
    steps += [f"not {', '.join(less)}"] if less else []
    return (
        f"other steps were executed, with other idempotency keys ({'; '.join(steps)}). Derive the names, keys and "
        "order of steps only from the input and from results of steps"
    )


def _event_difference(baseline: RunSummary, other: RunSummary) -> str | None:
    exact = baseline.exact and other.exact
    for run_id, expected in baseline.events.items():
        found = other.events.get(run_id, Counter())
        for event in [*found, *(() if _stopped(baseline) else expected)]:
            repeats = not exact or event[1]
            if (event in found) != (event in expected) or not (repeats or found[event] == expected[event]):
                return f"event {event[0]:.1000} was published {found[event]} times, undisturbed {expected[event]} times"
    return None


def _named(step: Identity) -> str:
    _, name, key = step
    return f"step {name!r} ({key.removeprefix('k:')})"


__all__ = ["CrashReport", "crash_everywhere"]

Agent = AgentRuntime | Callable[[], AgentRuntime]


@dataclass(frozen=True)
class CrashReport:
    """Number of `writes` of the undisturbed run, number of `kills` in all runs, and the undisturbed `outcome`.

    Attributes:
        writes: Number of writes of the undisturbed run.
        kills: Number of kills in all runs.
        outcome: The undisturbed outcome.
    """

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
    params: Mapping[str, Any] | None = None,
) -> CrashReport:
    """Run an agent undisturbed, then once killed at each of its writes, and compare the outcomes.

    Each write is tested twice: killed before it is applied, and after it but before the reply. A new runner then
    resumes the run. Compared are: status, final output and error type of the run and its children; executed steps by
    idempotency key; events, except those that a resume adds; and the value of `effects()` at the end. A cancelled or
    timed-out run may have made less progress. No step with a saved result may be executed again.

    Args:
        agent: An agent, or a function or class that makes an agent for each process.
        input: The input of the run.
        agents: The agents that it calls, in the same forms.
        config: Settings of the runners.
        tools: The tools of the run.
        persistence: True keeps conversations in the same store, with kills at their writes. Reset your own manager.
        signals: Payloads for signals and approvals that the run waits for, by name. If several questions are open, they
            are answered in this order.
        status: The expected final status.
        compare: Maps the run's result to the value to compare.
        effects: Returns the side effects to compare; may be a coroutine function, as may `reset`.
        reset: Called before each run to undo side effects.
        again: Also kill this many later processes at each write, but never so often that the run would be dead.
        timeout: Real seconds that one process may take.
        params: Merged into the "params" of the input.

    Returns:
        The number of writes and kills, and the undisturbed outcome.

    Raises:
        AssertionError: An outcome differs; the message names the write and the difference.
        InvalidArgument: The value of an option is invalid.
        WaitTimeout: The run waits for a signal that is not in `signals`.
        UnknownAgent: The run calls an agent that is not in `agents`.
        NotSupported: The run needs another store, as `ctx.transaction` does.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRuntime, RunResult
        >>> from agent_runtime_core.testing import crash_everywhere
        >>> class Hello(AgentRuntime):
        ...     key = "hello"
        ...     async def run(self, ctx):
        ...         name = await ctx.step("name", str.title, "ada")
        ...         return RunResult(final_output={"response": f"Hello, {name}!"})
        >>> asyncio.run(crash_everywhere(Hello)).kills > 0
        True
    """
    wanted = _status(status)
    checked_int("again", again, least=0)
    makers = [_maker(each) for each in (agent, *agents)]
    setting = CrashSetting(lambda: [make() for make in makers], config, tools, persistence, mapping("signals", signals))
    limit = checked_seconds("timeout", timeout)
    trial = _CrashTrial(setting, run_input(input, params), compare or outcome_of, effects, reset, limit)
    baseline = await trial.baseline(wanted)
    writes = trial.writes
    await _kill_each(trial, baseline, (), again)
    return CrashReport(writes, trial.kills, baseline.result)


def _status(status: RunStatus | str) -> RunStatus:
    if not isinstance(status, str) or status not in TERMINAL:
        raise must("status", f"be a terminal status ({', '.join(TERMINAL)})", status)
    return RunStatus(status)


def _maker(agent: Agent) -> Callable[[], AgentRuntime]:
    if isinstance(agent, type) or (callable(agent) and not hasattr(agent, "run")):
        return agent
    known = cast(AgentRuntime, agent)
    key_of(known)
    return lambda: known


async def _kill_each(trial: _CrashTrial, baseline: RunSummary, points: tuple[CrashPoint, ...], again: int) -> None:
    """Kill the process that follows these crash points at each of its writes, until it finishes before the next."""
    n = 0
    while True:
        n += 1
        for applied in (False, True):
            more = (*points, CrashPoint(n, applied))
            reached = await trial.killed(baseline, more)
            if not reached:
                return
            if again:
                await _kill_each(trial, baseline, more, again - 1)


class _CrashTrial:
    """Executes whole runs of one agent with one input."""

    def __init__(
        self, setting: CrashSetting, input: Mapping[str, Any], compare: Callable[[RunResult], Any],
        effects: Callable[[], Any] | None, reset: Callable[[], Any] | None, timeout: float,
    ) -> None:  # fmt: skip
        self.setting, self.input, self.timeout = setting, input, timeout
        self._compare, self._effects, self._reset = compare, effects, reset
        self._key = setting.agents()[0].key
        self.writes = self.kills = 0

    async def baseline(self, status: RunStatus) -> RunSummary:
        """Execute the undisturbed run twice: an agent that differs by itself cannot be compared after a crash."""
        first, _ = await self._run(())
        result = first.result
        error = result.error
        if error is not None and error.type == "NotSupported":
            raise NotSupported(f"crash_everywhere stores runs in memory: {error.message}")
        reason = "" if error is None else f" ({error.type}: {error.message})"
        if result.status is not status:
            raise AssertionError(f"the undisturbed run must end as {status.value}, got {status_of(result)}{reason}")
        second, _ = await self._run(())
        if (found := difference(first, second)) is not None:
            raise AssertionError(
                f"two undisturbed runs differ: {found}. Undo side effects with reset=, and pass a function that makes "
                "a new agent for each process"
            )
        return first

    async def killed(self, baseline: RunSummary, points: Sequence[CrashPoint]) -> bool:
        """Execute and compare one run with these crash points; False if it finished before the last of them."""
        other, fatal = await self._run(points)
        self.kills += len(fatal)
        reached = len(fatal) == len(points)
        if (found := difference(baseline, other)) is not None:
            where = ", then ".join(f"{point} ({_ops(ops)})" for point, ops in zip(points, fatal, strict=False))
            raise AssertionError(f"killed {where}: {found}" if fatal else f"undisturbed, at the end: {found}")
        return reached

    async def _run(self, points: Sequence[CrashPoint]) -> tuple[RunSummary, list[Sequence[Op]]]:
        """Execute one run to its end, in as many processes as needed; also return the writes with a kill."""
        await _called(self._reset)
        writes, clock = WriteLog(), JumpingClock()
        store = MemoryEngine(clock)
        client = self.setting.runner(store, Registry(), writes.drawn)
        processes: list[SimulatedProcess] = []
        try:
            await client.submit(self._key, self.input, run_id=RUN)
            fatal = await self._run_processes(points, store, clock, client, writes, processes)
            effects = copy.deepcopy(await _called(self._effects))
            conversation = await self._conversation(client)
            return await summarize(client, str(RUN), writes, self._compare, conversation, effects), fatal
        finally:
            await client.close()
            for process in processes:
                await in_thread(process.dispose)

    async def _conversation(self, client: AgentRunner) -> list[Any] | None:
        """The messages of the run's conversation, if it is in the same store."""
        known = conversation_id(self.input.get("conversation_id"))
        if self.setting.persistence is not True or known is None:
            return None
        conversation = await client.persistence.conversations.get(known)
        messages = [] if conversation is None else conversation.messages
        return [
            [each.role, each.content, *([call.name, call.arguments] for call in each.tool_calls)] for each in messages
        ]

    async def _run_processes(
        self,
        points: Sequence[CrashPoint],
        store: MemoryEngine,
        clock: JumpingClock,
        client: AgentRunner,
        writes: WriteLog,
        processes: list[SimulatedProcess],
    ) -> list[Sequence[Op]]:
        fatal: list[Sequence[Op]] = []
        recorded = crashes = 0
        while True:
            # One more crash without a new record would make the run a dead letter.
            may_kill = len(fatal) < len(points) and crashes < client.config.max_crashes - 1
            point = points[len(fatal)] if may_kill else None
            process = SimulatedProcess(store, client, self.setting, point, writes, writes.drawn)
            processes.append(process)
            if await self._finishes(process):
                self.writes = process.engine.writes
                return fatal
            fatal.append(process.engine.fatal or ())
            crashes = 1 if len(writes.done) > recorded else crashes + 1
            recorded = len(writes.done)
            clock.drop_sleepers()
            await _expire_leases(client)

    async def _finishes(self, process: SimulatedProcess) -> bool:
        try:
            async with asyncio.timeout(self.timeout) as limit:
                return await process.run()
        except TimeoutError:
            if not limit.expired():
                raise
            raise AssertionError(
                f"the run must finish within {self.timeout:g} s. Pass a longer timeout=; a wait inside a step does not "
                "get a signal here"
            ) from None


async def _expire_leases(client: AgentRunner) -> None:
    """End the leases of the killed process, so that the next process can claim its runs."""
    claims = tuple((row.run_id, row.claim_id) for row in await client.queue.find(RunFilter(("running",))))
    await client.queue.commits.commit(None, [Op("queue.beat", (claims, -1.0))])


async def _called(fn: Callable[[], Any] | None) -> Any:
    result = None if fn is None else fn()
    return await result if inspect.isawaitable(result) else result


def _ops(ops: Sequence[Op]) -> str:
    """Short text for the operations of a write."""
    return ", ".join(f"{op.name}{_detail(op)}" for op in ops)


def _detail(op: Op) -> str:
    with contextlib.suppress(IndexError):
        detail = op.args[1]
        if isinstance(detail, Record):
            return f" {detail.kind} {detail.name}".rstrip()
        if op.name == "queue.settle":
            return f" {detail.status}"
    return ""
