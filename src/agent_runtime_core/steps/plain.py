"""Steps over a context without a journal: its checkpoint keeps the whole state, its emit takes the events."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from .._clock import SYSTEM
from .._contexts import start_soon
from .._json import decode, encode, plain_text
from ..attempts import refused_of
from ..callees import Callee, call, callee, threaded
from ..errors import (
    InvalidArgument,
    StepCancelledError,
    StepExecutionError,
    UnserialisableResult,
    brief,
    deciding_error,
    holds,
    text_of,
)
from ..event_types import EventType
from ..policy import NEVER_RETRIED, Policy
from ..tools.deadline import let_go, limited
from .crew import Crew, Next, all_of
from .graph import Graph
from .model import ExecutionState, ReadOnlyState, Results, State, Step, state_text

if TYPE_CHECKING:
    from .executor import StepExecutor


class Plain:
    """What both kinds of plain runs share: events, checkpoints, and the tries of one step."""

    def __init__(self, executor: StepExecutor) -> None:
        self.executor: StepExecutor = executor
        self.ctx: Any = executor.ctx
        self._saving = asyncio.Lock()
        self._texts: dict[str, str] = {}  # the results that are kept, as they are saved
        self._unsaved = False  # whether there are some since then

    @property
    def kept(self) -> ExecutionState:
        return self.executor._state

    async def load(self, resume: bool, decoders: Mapping[str, Callable[[str], object]]) -> bool:
        """Take up what was saved; results come back as the decoder of their name says."""
        saved = (await self.ctx.get_state() or {}).get(self.executor.checkpoint_key) if resume else None
        try:
            state = ExecutionState.from_dict(saved or {})
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"{brief(saved)}, saved under {self.executor.checkpoint_key!r}, is no state of a StepExecutor: give it "
                "another checkpoint_key=, or begin anew with run(steps, resume=False)"
            ) from error
        self.executor._state = state
        self._texts = {name: _saved_text(value) for name, value in state.step_results.items()}
        for name, text in self._texts.items():
            state.step_results[name] = decoders.get(name, decode)(text)
        for name in state.completed_steps:
            if name not in self._texts:  # a state that somebody wrote may name its steps alone
                state.step_results[name], self._texts[name] = None, "null"
        state.custom_state = cast("dict[str, Any]", decode(_saved_text(state.custom_state)))
        return saved is not None

    async def begin(self, steps: Sequence[Step], initial: Mapping[str, Any] | None, resume: bool) -> None:
        """Take up the list, with what was added to the state since the one before; not where a step of it is kept."""
        given = self.kept.custom_state
        if not await self.load(resume, {step.name: step.callee().decode for step in steps}):
            self.kept.custom_state = {**given, **(initial or {})}
        elif {step.name for step in steps}.isdisjoint(self.kept.completed_steps):
            self.kept.custom_state |= {**self.executor.added, **(initial or {})}

    def keep(self, name: str, result: Any, text: str) -> None:
        self.executor.added = {}
        self.kept.step_results[name], self._texts[name] = result, text
        self.kept.completed_steps.append(name)
        self._unsaved = True

    async def save_rest(self) -> None:
        """At the end of the list, what still waits for a checkpoint."""
        if self._unsaved:
            await self.save()

    async def save(self) -> None:
        async with self._saving:  # else an older state could be the last one saved
            self._unsaved = False
            whole = dict(await self.ctx.get_state() or {})
            results = {name: json.loads(text) for name, text in self._texts.items()}
            state = json.loads(state_text(self.kept.custom_state))
            whole[self.executor.checkpoint_key] = {
                **self.kept.to_dict(), "step_results": results, "custom_state": state,
            }  # fmt: skip
            await self.ctx.checkpoint(whole)

    def completed(self, about: Mapping[str, Any]) -> int:
        """How many steps lie behind, as progress tells it."""
        return int(about["step_index"])

    def check(self, name: str) -> None:
        """Refuse what that step leaves besides its result, if it cannot be saved."""

    async def tries(
        self, name: str, about: Mapping[str, Any], policy: Policy, description: str | None, run: Callable[[], Any],
        how: Callee,
    ) -> tuple[Any, str]:  # fmt: skip
        """The result of the first try that succeeds, as a resumed run would read it, and its text."""
        emit, attempt = self.ctx.emit, 0
        while True:
            attempt += 1
            percent = self.completed(about) / about["total_steps"] * 100
            tried = {**about, "attempt": attempt, "max_attempts": policy.retries + 1}
            await emit(EventType.STEP_STARTED, {**tried, "description": description})
            await emit(EventType.PROGRESS_UPDATE, {**tried, "progress_percent": percent, "description": description})
            since = SYSTEM.boot()
            try:
                work = self._watched(run(), name)
                value = await (work if policy.timeout is None else limited(work, policy.timeout, f"step {name!r}"))
                try:
                    text = how.encode(value)
                except UnserialisableResult as error:
                    raise refused_of(name, error) from None
                result = how.decode(text)
                self.check(name)
            except Exception as error:
                if holds(error, StepCancelledError):
                    raise
                await self._failed(name, tried, policy, attempt, error)
                continue
            ms = int((SYSTEM.boot() - since) * 1000)
            await emit(EventType.STEP_COMPLETED, {**tried, "duration_ms": ms})
            return result, text

    async def _failed(
        self, name: str, tried: Mapping[str, Any], policy: Policy, attempt: int, error: Exception
    ) -> None:
        message = text_of(deciding_error(error))
        delay = policy.delay(error, attempt, SYSTEM.random)
        if delay is None:
            about = {key: tried[key] for key in ("step_name", "step_index", "total_steps")}
            await self.ctx.emit(EventType.STEP_FAILED, {**about, "attempts": attempt, "error": message})
            if isinstance(error, StepExecutionError) or holds(error, NEVER_RETRIED):
                raise error
            raise StepExecutionError(name, message, attempt) from error
        await self.ctx.emit(EventType.STEP_RETRYING, {**tried, "error": message, "retry_delay": delay})
        await self._watched(asyncio.sleep(delay), name)

    async def _watched(self, work: Any, name: str) -> Any:
        """The result of `work`, ended early when the context says it was cancelled."""
        task = start_soon(work)
        try:
            while not (await asyncio.wait({task}, timeout=self.executor.cancel_check_interval))[0]:
                if self.ctx.cancelled():
                    task.cancel()
                    await let_go(task, f"step {name!r}")
                    raise StepCancelledError(name)
        except asyncio.CancelledError:
            task.cancel()
            await let_go(task, f"step {name!r}")
            raise
        return task.result()


class PlainChain(Plain):
    """A list of steps."""

    async def run(self, steps: Sequence[Step], initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        await self.begin(steps, initial_state, resume)
        self.read: Results = Results(self.kept.step_results)  # as the steps may read them
        done = set(self.kept.completed_steps)
        for index, step in enumerate(steps):
            about = {"step_name": step.name, "step_index": index, "total_steps": len(steps)}
            if step.name in done:
                await self.ctx.emit(EventType.STEP_SKIPPED, {**about, "reason": "already_completed"})
                continue
            if self.ctx.cancelled():
                raise StepCancelledError(step.name)
            await self._perform(index, step, about)
        await self.save_rest()
        return {step.name: self.kept.step_results[step.name] for step in steps}

    async def _perform(self, index: int, step: Step, about: Mapping[str, Any]) -> None:
        committed = state_text(self.kept.custom_state)
        how = step.callee()

        def run() -> Any:
            # Each try sees the state as last committed.
            values = cast("dict[str, Any]", decode(committed))
            self.state = State(values, self.read)
            self.kept.custom_state = self.state
            # (ctx, state) by place: nothing is to be injected.
            return step.fn(self.ctx, self.state) if how.is_async else threaded(step.fn, (self.ctx, self.state))

        try:
            result, text = await self.tries(step.name, about, step.policy(), step.description, run, how)
        except BaseException:
            self.kept.custom_state = cast("dict[str, Any]", decode(committed))
            raise
        kept = self.kept
        kept.custom_state = cast("dict[str, Any]", decode(self.left))
        self.keep(step.name, result, text)
        kept.current_step_index = index + 1
        if step.checkpoint:
            await self.save()

    def check(self, name: str) -> None:
        self.left: str = state_text(self.state, name)


class PlainDag(Plain):
    """A list whose steps say what they depend on: side by side here too, one after the other in saving."""

    async def run(self, graph: Graph, initial_state: Mapping[str, Any] | None, resume: bool) -> dict[str, Any]:
        await self.begin(graph.steps, initial_state, resume)
        self.graph: Graph = graph
        self.steps: Sequence[Step] = graph.steps
        self.state_text: str = state_text(self.kept.custom_state)
        shown = self.kept.custom_state = ReadOnlyState(cast("dict[str, Any]", decode(self.state_text)), {})
        try:
            await self._work()
        finally:
            if self.kept.custom_state is shown:
                self.kept.custom_state = dict(shown)
        return {step.name: self.kept.step_results[step.name] for step in self.steps}

    async def _work(self) -> None:
        graph = self.graph
        self.done: set[int] = {graph.places[name] for name in self.kept.completed_steps if name in graph.places}
        self.told: set[int] = set()
        for place in sorted(self.done):
            await self.ctx.emit(EventType.STEP_SKIPPED, {**self._about(place), "reason": "already_completed"})
        graph.begin(self.done)
        await Crew(graph, self.executor.max_concurrency, self._one, self._left_out).work()
        await self.save_rest()

    def _about(self, place: int) -> dict[str, Any]:
        return {"step_name": self.steps[place].name, "step_index": place, "total_steps": len(self.steps)}

    def completed(self, about: Mapping[str, Any]) -> int:
        return len(self.done)

    async def _one(self, place: int, _: bool) -> Next:
        step, kept = self.steps[place], self.kept
        if self.ctx.cancelled():
            raise StepCancelledError(step.name)
        result, text = await self.tries(
            step.name, self._about(place), step.policy(), step.description, partial(self._try, place), step.callee()
        )
        self.keep(step.name, result, text)
        kept.current_step_index = len(kept.completed_steps)
        self.done.add(place)
        if step.checkpoint:
            await self.save()
        self.graph.finished(place)
        return self.graph.take(), False

    def _try(self, place: int) -> Any:
        step = self.steps[place]
        values = cast("dict[str, Any]", decode(self.state_text))
        state = ReadOnlyState(values, self.graph.results(place, self.kept.step_results))
        # (ctx, state) by place: nothing is to be injected.
        return step.fn(self.ctx, state) if step.callee().is_async else threaded(step.fn, (self.ctx, state))

    async def _left_out(self, place: int) -> None:
        lost = sorted(self.graph.behind(place) - self.done - self.told)
        self.told.update(lost)
        why = {"reason": "dependency_failed", "dependency": self.steps[place].name}
        for each in lost:
            await self.ctx.emit(EventType.STEP_SKIPPED, {**self._about(each), **why})


class PlainFanOut(Plain):
    """One function over many items; each result is kept in the checkpoint under `name[key]`."""

    async def run(
        self, name: str, fn: Callable[..., Any], items: list[Any], keys: list[str], policy: Policy, returns: Any,
        max_result_bytes: int,
    ) -> list[Any]:  # fmt: skip
        how: Callee = callee(fn, returns, max_result_bytes)
        self.how: Callee = how
        await self.load(True, {f"{name}[{key}]": how.decode for key in keys})
        self.name: str = name
        self.fn: Callable[..., Any] = fn
        self.policy: Policy = policy
        self.total: int = len(items)
        self.queue: Iterator[tuple[int, Any, str]] = iter(
            [(i, item, f"{name}[{key}]") for i, (item, key) in enumerate(zip(items, keys, strict=True))]
        )
        self.failed: Exception | None = None
        await all_of([self._worker() for _ in range(min(self.executor.max_concurrency, len(items)))])
        if self.failed is not None:
            raise self.failed
        return [self.kept.step_results[f"{name}[{key}]"] for key in keys]

    async def _worker(self) -> None:
        for index, item, label in self.queue:
            if self.failed is not None:
                return
            try:
                await self._one(index, item, label)
            except Exception as error:  # noqa: BLE001 - raised by run() when those in flight are kept
                self.failed = self.failed or error

    async def _one(self, index: int, item: Any, label: str) -> None:
        about = {"step_name": self.name, "step_index": index, "total_steps": self.total}
        if label in self.kept.step_results:
            await self.ctx.emit(EventType.STEP_SKIPPED, {**about, "reason": "already_completed"})
            return
        if self.ctx.cancelled():
            raise StepCancelledError(self.name)
        once = partial(call, self.fn, self.how, (item,), self.ctx)
        result, text = await self.tries(self.name, about, self.policy, None, once, self.how)
        self.keep(label, result, text)
        await self.save()


def _saved_text(value: Any) -> str:
    """The text of a value that was saved: in its form, or as it is where the context's store keeps values."""
    try:
        return plain_text(value)
    except (TypeError, ValueError):
        return encode(value, max_bytes=sys.maxsize)
