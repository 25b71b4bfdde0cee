"""Classify the tasks of runs: which tasks work, which are inside a wait of their run, and which only join others.

A run may leave its slot, and be parked, only while none of its tasks works. No event reports that a working task starts
to join another task, so the tasks are scanned when a task of the run enters a wait, when a working task ends, and now
and then while a run with open waits still works.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Collection, Iterable, Mapping
from contextvars import Context
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType
from typing import Any, Final, Protocol, TypeVar, cast

from .clock import Clock
from .context_vars import RUN, Run

FIRST_PAUSE: Final = 0.02  # seconds until a run that works during open waits is scanned again; doubles each time
LONGEST_PAUSE: Final = 1.0
SHARE: Final = 9  # seconds without a scan after each second that a scan takes
SETTLING: Final = 5  # iterations of the loop in which the end of a task reaches all that join it

AnyTask = asyncio.Task[Any]
R = TypeVar("R", bound=Run)

#: Functions of frameworks, each as "module:qualified name". What they wait for, themselves or by tasks that only wait
#: for an event, is done by other tasks of the run.
EVENT_WAITERS: Final[set[str]] = set()

_EVENT_WAIT: Final = asyncio.Event.wait.__code__
_WAIT: Final = asyncio.tasks._wait.__code__  # type: ignore[attr-defined]
_GATHERING: Final[type] = asyncio.tasks._GatheringFuture  # type: ignore[attr-defined]
_GROUP_EXITS: Final = ("__aexit__", "_aexit")
_GROUP_MODULES: Final = ("asyncio.taskgroups", "anyio._backends._asyncio")
_EVENT_LIBRARIES: Final = ("asyncio", "anyio")
_WAITING_LIBRARIES: Final = (*_EVENT_LIBRARIES, "threading", "concurrent", "queue", "agent_runtime_core")
_GENERATOR_CALLS: Final = ("async_generator_asend", "async_generator_athrow")


class RunTasks:
    """The unfinished tasks of one run.

    Attributes:
        working: Tasks that do something other than wait or join, and tasks that cannot be read.
        resting: Tasks that are inside a wait of the run, or join others of its tasks.
        joined: What the joining tasks await.
        ended: What of it is done. A task that joins several may be about to continue then, or wait for the others.
    """

    __slots__ = ("ended", "joined", "resting", "working")

    def __init__(self, tasks: Collection[AnyTask], waiting: Collection[AnyTask], queued: Collection[AnyTask]) -> None:
        self.working: list[AnyTask] = []
        self.resting: set[AnyTask] = set()
        self.joined: set[asyncio.Future[Any]] = set()
        self.ended: set[asyncio.Future[Any]] = set()
        self.resting.update(each for each in tasks if each in waiting)
        stacks = {task: _Stack(task.get_coro()) for task in tasks if task not in waiting}
        joins = [stack for stack in stacks.values() if stack.awaits(_WAIT) and stack.is_known]
        event_tasks = {part for stack in joins for part in stack.local("fs")}
        for task, stack in stacks.items():
            awaited = _awaited(task)
            if awaited is None or awaited.done() or _waited_enough(stack):
                self.working.append(task)  # it is about to continue
            elif (
                task in queued
                or _waits_for_event(awaited, stack, task in event_tasks)
                or ((parts := _joined(awaited, stack)) is not None and self._only_joins(parts, tasks))
            ):
                self.resting.add(task)
                self.joined.add(awaited)
            else:
                self.working.append(task)

    def only_wait(self, main: AnyTask | None) -> bool:
        """Return whether the run waits: its `main` task waits or joins, and no task of the run works."""
        return not self.working and main in self.resting

    def _only_joins(self, parts: Iterable[asyncio.Future[Any]], tasks: Collection[AnyTask]) -> bool:
        """Return whether `parts` are tasks of the run, at least one of them unfinished."""
        unfinished = False
        for part in parts:
            if part.done():
                self.ended.add(part)
            elif _is_helper(part):
                continue
            elif part in tasks or (
                isinstance(part, _GATHERING) and self._only_joins(part._children, tasks)  # type: ignore[attr-defined]
            ):
                unfinished = True
            else:
                return False
        return unfinished  # else it is about to continue


def scan(loop: asyncio.AbstractEventLoop, waiting: Mapping[R, Collection[AnyTask]]) -> dict[R, RunTasks]:
    """Classify the tasks of several runs in one pass over the tasks of `loop`.

    Args:
        loop: The event loop of the runs.
        waiting: The tasks of each run that are inside one of its waits, by what their contexts name as their run.

    Returns:
        The unfinished tasks of each of these runs.
    """
    found: dict[Any, set[AnyTask]] = {run: set() for run in waiting}
    for task in asyncio.all_tasks(loop):
        tasks = found.get(run_of(task))
        if tasks is not None:
            tasks.add(task)
    return {run: RunTasks(found[run], waiting[run], run.queued) for run in waiting}


def tasks_of(loop: asyncio.AbstractEventLoop, run: Run) -> list[AnyTask]:
    """Return the unfinished tasks of a run but the current task, in the order of their creation."""
    current = asyncio.current_task(loop)
    found = [task for task in asyncio.all_tasks(loop) if task is not current and run_of(task) is run]
    return sorted(found, key=lambda task: (len(task.get_name()), task.get_name()))


if sys.version_info >= (3, 12):

    def context_of(task: AnyTask) -> Context | None:
        """Return the context of a task."""
        return task.get_context()

else:

    def context_of(task: AnyTask) -> Context | None:
        """Return the context of a task, which is the first context that a task of asyncio refers to."""
        return next((each for each in gc.get_referents(task) if type(each) is Context), None)


def run_of(task: AnyTask) -> Run | None:
    """Return the run that the context of `task` names, if it names one and can be read."""
    context = context_of(task)
    return None if context is None else context.get(RUN)


def _is_helper(future: asyncio.Future[Any]) -> bool:
    """Return whether this is a task that the library started for itself; see `start_helper`."""
    context = context_of(future) if isinstance(future, asyncio.Task) else None
    return context is not None and context.get(RUN, future) is None


def _awaited(task: AnyTask) -> asyncio.Future[Any] | None:
    return getattr(task, "_fut_waiter", None)


def _frames_of(awaited: Any) -> tuple[list[FrameType], Any]:
    """Return the frames of a suspended coroutine, the innermost last, and what the innermost awaits."""
    frames: list[FrameType] = []
    while True:
        if isinstance(awaited, CoroutineType):
            frame, awaited = awaited.cr_frame, awaited.cr_await
        elif isinstance(awaited, AsyncGeneratorType):
            frame, awaited = awaited.ag_frame, awaited.ag_await
        elif type(awaited).__name__ in _GENERATOR_CALLS:
            # No attribute leads from the call of a generator to the generator.
            awaited = next((it for it in gc.get_referents(awaited) if isinstance(it, AsyncGeneratorType)), None)
            continue
        else:
            return frames, awaited
        if frame is not None:
            frames.append(frame)


def frames_of(coroutine: Any) -> list[FrameType]:
    """Return the frames of a suspended coroutine, the innermost last."""
    return _frames_of(coroutine)[0]


def is_waiting_code(frame: FrameType) -> bool:
    """Return whether this is code of a library by which other code waits."""
    return _module(frame).partition(".")[0] in _WAITING_LIBRARIES


class _Stack:
    """Where a task is.

    Attributes:
        innermost: The frame that awaits a future itself. None if there is something on the way that cannot be read.
    """

    __slots__ = ("_frames", "innermost")

    def __init__(self, awaited: Any) -> None:
        self._frames, awaited = _frames_of(awaited)
        readable = type(awaited).__name__ == "FutureIter" and bool(self._frames)
        self.innermost: FrameType | None = self._frames[-1] if readable else None

    @property
    def caller(self) -> FrameType | None:
        """The innermost frame outside of asyncio and anyio, None if there is none."""
        return next(
            (it for it in reversed(self._frames) if _module(it).partition(".")[0] not in _EVENT_LIBRARIES), None
        )

    @property
    def is_known(self) -> bool:
        """Whether that is a function of `EVENT_WAITERS`."""
        caller = self.caller
        return caller is not None and f"{_module(caller)}:{caller.f_code.co_qualname}" in EVENT_WAITERS

    def awaits(self, code: CodeType) -> bool:
        """Return whether this is the innermost function."""
        return self.innermost is not None and self.innermost.f_code is code

    def local(self, name: str) -> Any:
        """Return a variable of the innermost function."""
        return cast("FrameType", self.innermost).f_locals[name]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _waited_enough(stack: _Stack) -> bool:
    """Return whether the task is in an `asyncio.wait` for the first of several futures, and a future is done."""
    if not stack.awaits(_WAIT) or stack.local("return_when") != asyncio.FIRST_COMPLETED:
        return False
    return any(each.done() for each in stack.local("fs"))


def _waits_for_event(awaited: asyncio.Future[Any], stack: _Stack, is_event_task: bool) -> bool:
    """Return whether a function of `EVENT_WAITERS`, or a task that it waits for, is in a wait for an event.

    Such a function may also wait for a future that it made itself.
    """
    if stack.awaits(_EVENT_WAIT):
        return stack.is_known or (is_event_task and stack.caller is None)
    return stack.innermost is stack.caller and stack.is_known and not isinstance(awaited, asyncio.Task | _GATHERING)


def _joined(awaited: asyncio.Future[Any], stack: _Stack) -> Iterable[asyncio.Future[Any]] | None:
    """Return the futures that a task joins, None if it does something else or cannot be read."""
    if isinstance(awaited, asyncio.Task | _GATHERING):
        return (awaited,)
    if stack.awaits(_WAIT):
        return cast(Any, stack.local("fs")) if stack.local("timeout_handle") is None else None  # else it will continue
    if stack.innermost is not None and stack.innermost.f_code.co_name in _GROUP_EXITS:
        group: Any = stack.innermost.f_locals.get("self")
        if type(group).__name__ == "TaskGroup" and type(group).__module__ in _GROUP_MODULES:
            return getattr(group, "_tasks", None)
    return None


class TaskOwner(Protocol):
    """A run with open waits, as the monitor sees it."""

    @property
    def run(self) -> Run:
        """What the contexts of its tasks name."""

    @property
    def is_open(self) -> bool:
        """Whether the run is driven here while waits are open."""

    def may_release_slot(self) -> bool:
        """Return whether the run can be waiting at all: no step of it is in flight, and none of its waits ended."""

    def waiting_tasks(self) -> Collection[AnyTask]:
        """Return the tasks that are inside a wait of the run."""

    def check_tasks(self, tasks: RunTasks) -> bool:
        """Take the outcome of a scan; False to be scanned again soon."""


class Monitor:
    """Scans the tasks of one event loop for all runs with open waits together."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._runs: dict[TaskOwner, None] = {}
        self._next: asyncio.Handle | None = None
        self._rests_until = 0.0
        self._pause = FIRST_PAUSE

    def request(self, run: TaskOwner) -> None:
        """Scan the tasks of `run` at the end of this iteration of the loop."""
        self._runs[run] = None
        self._pause = FIRST_PAUSE
        if self._next is None:
            late = self._rests_until - self._loop.time()
            # Many scans in a row would leave a loop with many tasks no time for anything else.
            self._next = self._loop.call_soon(self._scan) if late <= 0 else self._loop.call_later(late, self._scan)

    def forget(self, run: TaskOwner) -> None:
        """Scan no more for a run without an open wait."""
        self._runs.pop(run, None)

    def _again(self, iterations: int = SETTLING) -> None:
        """Scan after all that is ready now, and what follows from that."""
        if iterations:
            self._loop.call_soon(self._again, iterations - 1)
        elif self._next is None:
            self._scan()

    def _scan(self) -> None:
        self._next = None
        if self._timer is not None:
            self._timer.cancel()
        self._runs = {run: None for run in self._runs if run.is_open}
        runs = [run for run in self._runs if run.may_release_slot()]
        if not runs:
            return
        began = self._loop.time()
        found = scan(self._loop, {run.run: run.waiting_tasks() for run in runs})
        decided = [run.check_tasks(found[run.run]) for run in runs]
        ended = self._loop.time()
        self._rests_until = ended + SHARE * (ended - began)
        if not all(decided):
            self._timer = self._clock.call_later(self._pause, self._again)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
