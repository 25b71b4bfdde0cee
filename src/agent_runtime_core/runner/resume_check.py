"""Find out whether the code of an agent can resume a stored run, without writing anything.

The code is executed against the run's journal. Saved results are returned, as in a resumed run. The first step, wait or
value without one ends the check: up to there the code fits the journal.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

from .._core.context_vars import ACTIVE_RUN, RUN, start_soon
from .._core.run_tasks import tasks_of
from .._core.timeouts import wait_cancelled
from .._engines.base import Op
from .._execution.context import Context
from .._execution.journal_view import CHILD, SIGNAL
from .._execution.run_control import RunControl
from .._execution.run_writer import ReadOnlyWriter
from .._execution.step_journal import RunJournal, StepJournal
from .._execution.sync_context import run_agent
from .._journal.record import Record
from ..errors import JournalMismatch, UnserialisableResult, deciding_error
from ..interfaces import AgentRuntime
from ..queue.records import RunRow
from .left_runs import version_mismatch
from .runner import AgentRunner

RESUMES: Final = "resumes"
MISMATCH: Final = "mismatch"  # the journal contains other steps than the code
FAILS: Final = "fails"  # the code raises before the first step without a saved result
UNKNOWN: Final = "unknown"  # the check could not come to that step

_PREFIXES: Final = ("", CHILD, SIGNAL)  # before the user's name in the names of records

_POLL: Final = 0.02  # seconds between two looks at a run that neither ended nor reached a new step


@dataclass(frozen=True)
class ResumeCheck:
    """Whether the code can resume a run.

    Attributes:
        outcome: "resumes", "mismatch", "fails" or "unknown".
        stopped_at: The first step, wait or value without a saved result; None if the code reached none.
        reason: Why the run cannot be resumed, or what the code leaves out.
        cure: How to change the code; None if the check knows no change.
    """

    outcome: str
    stopped_at: str | None = None
    reason: str | None = None
    cure: str | None = None


class _StoppingWriter(ReadOnlyWriter):
    """Ends the check at the first write."""

    stopped_at: str | None = None

    def __init__(self, row: RunRow, runner: AgentRunner, control: RunControl) -> None:
        super().__init__(row, *runner.backends, runner.queue.clock)
        self._control = control

    def closed_error(self, name: str) -> Any:
        """Cancel the task of the run. Code that handles exceptions does not handle this exception."""
        if self.stopped_at is None:
            self.stopped_at = name
        self._control.cancel_task()
        return asyncio.CancelledError()

    async def write(self, state: Sequence[Op] = (), events: Sequence[Op] = (), queue: Sequence[Op] = ()) -> NoReturn:
        for each in queue:
            if each.name == "queue.insert":  # the run makes sure that workers can execute a child it waits for
                raise self.closed_error(f"{CHILD}{each.args[0].agent}")
        await super().write(state, events, queue)


class _NoStores(Exception):
    """The code between steps used `ctx.persistence`."""


class _Exits(Exception):
    """The code raised SystemExit."""


async def check_resume(runner: AgentRunner, row: RunRow, agent: AgentRuntime, timeout: float) -> ResumeCheck:
    """Replay a run with this agent.

    Args:
        runner: A runner on the store of the run.
        row: The run.
        agent: The agent that would resume it.
        timeout: Seconds after which the check gives up.
    """
    found, mismatch = await _replay(runner, row, agent, timeout)
    if mismatch is None or mismatch.found is None or mismatch.recorded is None:
        return found
    renamed, _ = await _replay(runner, row, agent, timeout, (mismatch.recorded, mismatch.found))
    # Code that still contains a step of the old name has a new step before it. That step is no new name of the old
    # step.
    old_names = [f"{prefix}{mismatch.recorded}" for prefix in _PREFIXES]
    if renamed.outcome == RESUMES and renamed.stopped_at not in old_names:
        cure = f'ctx.renamed("{mismatch.recorded}", "{mismatch.found}") before the step'
    else:
        cure = 'if await ctx.patched("NAME"): new code, else: old code'
    return replace(found, cure=cure)


async def _replay(
    runner: AgentRunner, row: RunRow, agent: AgentRuntime, timeout: float, renamed: tuple[str, str] | None = None
) -> tuple[ResumeCheck, JournalMismatch | None]:
    control = RunControl()
    writer = _StoppingWriter(row, runner, control)
    records = await writer.open()
    if renamed is not None:
        records = [_with_name(each, *renamed) for each in records]
    mail = await runner.queue.mail(row.run_id) if row.mail_seq else ()
    if (why := version_mismatch(agent, records, mail)) is not None:
        return ResumeCheck(MISMATCH, reason=why), None
    journal: RunJournal = StepJournal(writer, records, control)
    if not journal.view.completed and not journal.view.started:
        return ResumeCheck(RESUMES, reason="no step has started"), None
    try:
        ctx = Context(row, journal, _services(runner, agent), control)
    except UnserialisableResult as unknown:
        return ResumeCheck(FAILS, reason=f"the input cannot be decoded: {unknown}"), None
    before = dict(journal.view.started)
    context = contextvars.copy_context()
    context.run(RUN.set, control)
    context.run(ACTIVE_RUN.set, control)
    task = control.task = start_soon(_run(agent, ctx), context=context)
    in_time = await _reaches_a_new_step(task, ctx, writer, timeout)
    waits = bool(ctx.waiting_tasks)
    error = None if not task.done() or task.cancelled() else task.exception()
    await _end(task, control)
    return _outcome(writer, journal, before, error, waits=waits, ended=task.done(), in_time=in_time)


async def _run(agent: AgentRuntime, ctx: Context) -> Any:
    try:
        return await run_agent(agent, ctx)
    except SystemExit as error:  # the event loop would end the process
        raise _Exits(f"SystemExit: {error}") from error


def _with_name(record: Record, old: str, new: str) -> Record:
    """Return the record as if the step, child run or wait `old` had been called `new`."""
    if record.next is not None and (after := json.loads(record.next))["name"] == old:
        record = record._replace(next=json.dumps({**after, "name": new}))
    for prefix in _PREFIXES:
        if record.name == f"{prefix}{old}":
            return record._replace(name=f"{prefix}{new}")
    return record


def _services(runner: AgentRunner, agent: AgentRuntime) -> Any:
    """Return the services of the runner without those that have effects."""
    return replace(
        runner.services(inline=True, agent=agent), persistence=_no_stores, recorder=None, not_kept=None, run_child=None,
        tracer=None, slots=None, park_after=None, backpressure=None,
    )  # fmt: skip


def _no_stores() -> NoReturn:
    raise _NoStores("the code between steps uses ctx.persistence, which a check does not execute")


async def _reaches_a_new_step(task: asyncio.Task[Any], ctx: Context, writer: _StoppingWriter, timeout: float) -> bool:
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout
    while not task.done() and writer.stopped_at is None and not ctx.waiting_tasks:
        if loop.time() > until:
            return False
        await asyncio.wait({task}, timeout=_POLL)
    if ctx.waiting_tasks and not task.done():
        await asyncio.wait({task}, timeout=_POLL)  # another task of the run may come to a step
    return True


async def _end(task: asyncio.Task[Any], control: RunControl) -> None:
    """End all tasks of the replayed run. Calls on its context raise CancelledError from now on."""
    control.close()
    control.clearing = True
    if not task.done():
        task.cancel()
        await wait_cancelled((task,), "a replayed run")
    if left := tasks_of(task.get_loop(), control):
        for each in left:
            each.cancel()
        await wait_cancelled(left, "a task of a replayed run")


def _outcome(
    writer: _StoppingWriter, journal: RunJournal, before: dict[tuple[str, str], int], error: BaseException | None, *,
    waits: bool, ended: bool, in_time: bool,
) -> tuple[ResumeCheck, JournalMismatch | None]:  # fmt: skip
    cause = None if error is None else deciding_error(error)
    if isinstance(cause, JournalMismatch):
        recorded, found = journal.mismatch or (repr(cause.recorded), cause.found and repr(cause.found))
        reason = f"the journal has {_step(recorded)} where the code has {_step(found)}"
        return ResumeCheck(MISMATCH, reason=str(cause) if cause.recorded == cause.found else reason), cause
    if isinstance(cause, _NoStores):
        return ResumeCheck(UNKNOWN, reason=str(cause)), None
    if cause is not None and writer.stopped_at is None:
        reason = str(cause) if isinstance(cause, _Exits) else f"{type(cause).__name__}: {cause}"
        return ResumeCheck(FAILS, reason=reason), None
    if not in_time:
        return ResumeCheck(UNKNOWN, reason="the code did not reach a new step in time"), None
    return ResumeCheck(RESUMES, writer.stopped_at, _left_out(writer, journal, before, waits=waits)), None


def _step(words: str | None) -> str:
    return "no step" if words is None else f"step {words}" if words[0] in "'\"" else words


def _left_out(
    writer: _StoppingWriter, journal: RunJournal, before: dict[tuple[str, str], int], *, waits: bool
) -> str | None:
    """Return which steps the run recorded or started and this code does not call."""
    interrupted = sorted({name for name, key in before if not key.startswith("w:")})
    if interrupted and writer.stopped_at is not None and writer.stopped_at not in interrupted and not waits:
        return f"step {interrupted[0]!r} has started, and the code goes to {writer.stopped_at!r} without it"
    if writer.stopped_at is None and not waits and journal.has_later_records():
        return "the code ends before the last step that is recorded"
    return None
