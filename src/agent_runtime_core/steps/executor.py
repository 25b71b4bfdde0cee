"""Run step lists and maps. Each step is recorded once and never runs again after that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, Final, cast

from .._core.codec.json import arguments_digest, decode, encode
from .._core.ids import unbroken
from .._core.typed_steps import takes_options_of, typed_blocking_map, typed_map
from .._core.validation import Shown, is_number, must, shown
from .._execution.checkpoint_writer import LIST_KEY, CheckpointWriter
from .._execution.journal_view import CONCURRENT_INFO
from .._execution.run_writer import StepWriter
from .._execution.step import CURRENT_STEP, Identity, StepFunction, StepOptions, call, step_function
from .._execution.step_journal import StepJournal
from .._execution.step_keys import StepKeys
from .._execution.step_runner import StepCall, run_step
from .._execution.sync_context import SyncRunContext
from .._journal.record import SKIPPED, Record
from ..errors import StepCancelledError, brief
from ..interfaces import RunContext
from ..portal import from_thread
from .graph import Graph, is_graph
from .graph_run import GraphRun
from .model import ExecutionState, Step, name_of, unique
from .sequence import StepSequence
from .step_list import ListOptions, recorded_results
from .worker_pool import all_of


class MapRun:
    """One pass over the items of a map."""

    def __init__(self, options: ListOptions, journal: StepJournal[StepWriter], scope: str) -> None:
        self.options: ListOptions = options
        self.journal: StepJournal[StepWriter] = journal
        self.scope: str = scope
        self.failed: BaseException | None = None

    async def run(
        self, name: str, fn: Callable[..., Any], items: list[Any], keys: list[str], step: StepOptions, by_position: bool
    ) -> list[Any]:
        """Run the items that are not recorded yet. Returns the results in the order of the items.

        Args:
            name: Name of the map.
            fn: A function of an item.
            items: The items.
            keys: A key for each item.
            step: The options of each item.
            by_position: The keys are the positions of the items.
        """
        self.fn: Callable[..., Any] = fn
        self.items: list[Any] = items
        self.step: StepOptions = step
        self.function: StepFunction = step_function(fn, step.returns, step.max_result_bytes)
        suffix = self._key_suffix(by_position)
        self.keys: list[str] = [f"m:{key}{suffix}" for key in keys]
        self.name = name
        self.digests: list[str | None] = [arguments_digest(item) for item in items]
        if by_position:
            self._check_positions(f"{name}{suffix}")
        self.info: str | None = CONCURRENT_INFO if self.journal.in_child_task() else None  # of the records of its items
        self.results: list[Any] = [None] * len(items)
        if self.journal.unconfirmed.pending:
            await self.journal.unconfirmed.resolve()
        missing = await self._take_recorded(range(len(items)))
        self.queue: Iterator[int] = iter(missing)
        workers = min(self.options.max_concurrency, len(missing))
        await all_of([self._worker(next(self.queue)) for _ in range(workers)])
        if self.failed is not None:
            raise self.failed
        return self.results

    def _key_suffix(self, by_position: bool) -> str:
        """Return the suffix of the keys: the checkpoint_key, and for positions the enclosing step."""
        return (f"@x:{self.scope}" if self.scope else "") + (self.journal.keys.scope_suffix() if by_position else "")

    def _check_positions(self, which: str) -> None:
        """Reject items that would get the results of other items, from an earlier map of this claim.

        Another attempt of the enclosing step counts as another map: it uses saved results, as a resumed run does.
        """
        maps, scope = self.journal.maps, CURRENT_STEP.get()
        which = which if scope is None else f"{which}@{scope.attempt}"
        earlier = maps.get(which, [])
        for position, (digest, earlier_digest) in enumerate(zip(self.digests, earlier, strict=False)):
            if digest != earlier_digest:
                where = f"map {brief(self.name)}: position {position}"
                constraint = "have the same item as in the earlier map of that name, whose result is saved"
                fix = "Give each map its own name, or its items keys with key="
                raise must(where, constraint, Shown("another item"), fix)
        if len(self.digests) > len(earlier):
            maps[which] = self.digests

    async def _take_recorded(self, positions: Iterable[int]) -> list[int]:
        """Take the results of recorded items from the journal. Returns the positions of the others."""
        journal, found, missing, skips = self.journal, dict[int, Record](), [], []
        for index in positions:
            key = self.keys[index]
            record = journal.lookup(self.name, key)
            if record is None:
                missing.append(index)
                continue
            found[index] = record
            skip: list[Any] = [record.name, key, index]
            skips.append([*skip, {"input_changed": True}] if record.digest != self.digests[index] else skip)
        records = list(found.values())
        results = recorded_results([self.function.decode] * len(records), records)
        for index, result in zip(found, results, strict=True):
            self.results[index] = result
        if skips:
            journal.advance(*records)
            total = len(self.items)
            await journal.writer.buffer(
                journal.records.boundary(SKIPPED, nev=len(skips), total=total, info={"steps": skips})
            )
        return missing

    async def _worker(self, index: int) -> None:
        position: int | None = index
        while position is not None and self.failed is None:
            try:
                async with self.journal.keys.exclusive(self.name, self.keys[position]):
                    position = await self._run_item(position)
            except Exception as error:  # noqa: BLE001 - run() raises it when the running items are recorded
                self.failed = self.failed or error
                return

    async def _run_item(self, index: int) -> int | None:
        """Run an item, whose lock this task holds. Returns the next item for this worker."""
        journal, ctx, key, item = self.journal, self.options.ctx, self.keys[index], self.items[index]
        if self.failed is not None:
            return None
        if ctx.cancelled():
            raise StepCancelledError(self.name)
        if journal.lookup(self.name, key) is not None:  # another map ran it while this map waited for the lock
            await self._take_recorded([index])
            return next(self.queue, None)
        started = (self.name, key) in journal.carried
        journal.carried.discard((self.name, key))
        following: int | None = None

        def seal(work: StepCall, text: str, attempt: int, ms: int) -> tuple[Record]:
            nonlocal following
            following = None if self.failed is not None else next(self.queue, None)
            next_start = None if following is None or ctx.cancelled() else self._start_of(following)
            return (journal.records.completed(work, text, attempt, ms, next=next_start),)

        work = StepCall(
            journal.view.journal_name(self.name, key), key,
            journal.writer.watched(lambda attempt: call(self.fn, self.function, (item,), ctx)), self.step,
            encode=self.function.encode, decode=self.function.decode, position=index, total=len(self.items),
            digest=self.digests[index], info=self.info, start_recorded=started and self.step.on_in_doubt == "retry",
        )  # fmt: skip
        try:
            self.results[index] = await run_step(journal, work, seal)
        except BaseException:
            if following is not None:
                journal.carried.discard((self.name, self.keys[following]))
            raise
        journal.advance()
        return following

    def _start_of(self, index: int) -> str | None:
        """Return the encoded start of an item for the record before it; None if the start needs its own record."""
        journal, key = self.journal, self.keys[index]
        name = journal.view.journal_name(self.name, key)
        if (
            (name, key) in journal.view.started
            or (self.name, key) in journal.carried
            or not journal.is_unclaimed(self.name, key)
        ):
            return None
        if self.step.on_in_doubt != "retry" or not journal.writer.has_journal:
            return None  # if another item fails, this item never starts, and it would be left in doubt
        journal.carried.add((self.name, key))
        return encode({"name": name, "key": key, "pos": index, "tries": self.step.retries + 1})


# -- steps without a journal


async def open_checkpoint(
    ctx: Any, key: str, poll_interval: float, labels: Mapping[Identity, str], shown: ExecutionState, resume: bool
) -> tuple[StepJournal[StepWriter], ExecutionState]:
    """Open the checkpoint of a context in place of a journal.

    Args:
        ctx: The context.
        key: The key of the executor's state in the checkpoint.
        poll_interval: Seconds between two checks whether the context was cancelled.
        labels: The names under which the results of the list or map are saved.
        shown: The present state of the executor. A new state starts with its `custom_state`.
        resume: Load the saved state. Otherwise the list restarts.

    Returns:
        The journal, and the state for the executor.

    Raises:
        InvalidArgument: The checkpoint contains something else under the key.
    """
    writer = CheckpointWriter(ctx, key, poll_interval, labels)
    saved = await _saved_state(ctx, key) if resume else None
    state = ExecutionState() if saved is None else saved
    writer.load(state)
    journal = StepJournal(writer, records := writer.records(), keys=StepKeys(str(getattr(ctx, "run_id", ""))))
    if not resume:
        journal.view.resets["x:"] = -1  # the list adds 1: its steps have LIST_KEY also after a restart
    if saved is not None:
        journal.view.states.begin(LIST_KEY, writer.custom_state)
        if records:
            journal.view.states.set(LIST_KEY, "0", records[-1].seq, writer.custom_state, writer.custom_state)
    custom = cast("dict[str, Any]", decode(writer.custom_state)) if saved is not None else shown.custom_state
    return journal, ExecutionState(state.execution_id, started_at=state.started_at, custom_state=custom)


async def _saved_state(ctx: Any, key: str) -> ExecutionState | None:
    """Return the state that the checkpoint contains under the key, or None."""
    saved = (await ctx.get_state() or {}).get(key)
    if saved is None:
        return None
    try:
        return ExecutionState.from_dict(saved)
    except (AttributeError, TypeError, ValueError) as error:
        fix = "Pass another checkpoint_key=, or restart with run(steps, resume=False)"
        raise must(f"the checkpoint's {brief(key)}", "be the state of a StepExecutor", saved, fix) from error


def labels_of(steps: Iterable[Step]) -> dict[Identity, str]:
    """Return the labels of the steps of a list: their names."""
    return {(step.name, LIST_KEY): step.name for step in steps}


DEFAULT_KEY = "_step_executor_state"
#: Options of a step that a map does not take.
_NOT_IN_MAP: Final = ("description", "on_changed_input")


class StepExecutor:
    """Runs the steps of a run and saves their results, so that a resumed run continues after the last completed step.

        executor = StepExecutor(ctx)
        results = await executor.run([Step("fetch", fetch), Step("store", store, retries=3)])
        sizes = await executor.map("size", size_of, urls, timeout=30)

    Args:
        ctx: The context of the run. A runner's context saves results in the journal. Any other object with `emit`,
            `checkpoint`, `get_state` and `cancelled` saves the whole state in its checkpoint.
        checkpoint_key: The key of this state in the checkpoint. In a runner's context, executors with different keys
            run separate lists.
        cancel_check_interval: Seconds between two calls of `ctx.cancelled()` while a step runs, for a context without
            a journal. A runner cancels its runs itself.
        max_concurrency: How many items of a `map`, or steps of a list with `depends_on`, run at the same time.

    Raises:
        InvalidArgument: `ctx` is not a context, or a value is out of range.
    """

    def __init__(
        self,
        ctx: Any,
        *,
        checkpoint_key: str = DEFAULT_KEY,
        cancel_check_interval: float = 0.5,
        max_concurrency: int = 16,
    ) -> None:
        missing = [name for name in ("emit", "checkpoint", "get_state", "cancelled") if not hasattr(ctx, name)]
        if missing:
            got = Shown(f"{shown(ctx)} without {missing[0]!r}")
            raise must("ctx", "be the context of a run", got, "Pass its ctx" if hasattr(ctx, "ctx") else "")
        self._call: Callable[..., Any] = from_thread
        if isinstance(ctx, SyncRunContext):
            self._call, ctx = ctx.call_on_loop, ctx.async_context
        if not isinstance(checkpoint_key, str):
            raise must("checkpoint_key", "be a string", checkpoint_key)
        if not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise must("max_concurrency", "be an integer of at least 1", max_concurrency)
        if not is_number(cancel_check_interval) or not cancel_check_interval > 0:
            raise must("cancel_check_interval", "be a number of seconds above 0", cancel_check_interval)
        self.ctx = ctx
        self.checkpoint_key = checkpoint_key
        self.cancel_check_interval = cancel_check_interval
        self.options: ListOptions = ListOptions(ctx, max_concurrency)

    @property
    def state(self) -> ExecutionState:
        """The progress of the present step list."""
        return self.options.state

    @property
    def max_concurrency(self) -> int:
        """How many steps run at the same time."""
        return self.options.max_concurrency

    def update_custom_state(self, values: Mapping[str, Any]) -> None:
        """Add values to the state that steps see. They are saved with the next step that succeeds.

        Args:
            values: JSON-serializable values by name.

        Raises:
            InvalidArgument: Steps run concurrently, so their state is read-only.
        """
        self.options.state.custom_state.update(values)
        self.options.added.update(values)

    async def open_journal(
        self, labels: Callable[[], Mapping[Identity, str]], resume: bool = True
    ) -> tuple[StepJournal[StepWriter], str]:
        """Open the journal for the steps of a list or a map.

        Args:
            labels: Returns the names under which a checkpoint saves the results, if the context has no journal.
            resume: Load the saved results from the checkpoint.

        Returns:
            The journal, and the scope of the step keys.
        """
        journal = getattr(self.ctx, "journal", None)
        if isinstance(journal, StepJournal):
            await self.ctx.control.ensure_open()
            return journal, "" if self.checkpoint_key == DEFAULT_KEY else self.checkpoint_key
        journal, self.options.state = await open_checkpoint(
            self.ctx, self.checkpoint_key, self.cancel_check_interval, labels(), self.options.state, resume
        )
        return journal, ""

    async def run(
        self, steps: Iterable[Step], *, initial_state: Mapping[str, Any] | None = None, resume: bool = True
    ) -> dict[str, Any]:
        """Run the steps in order and return their results.

        A completed step does not run again, in this process or after a crash: its saved result is returned.

        If any step declares `depends_on`, the list is a DAG. A step starts when all the steps that it names are
        completed, and steps run concurrently, so `state` is read-only. If a step fails after its last retry, only the
        steps that depend on it do not run. When all others have finished, the error of the first failed step of the
        list is raised.

        Args:
            steps: The steps. Each name occurs once.
            initial_state: Values that are added to the state before the first step. A list with a saved state ignores
                them.
            resume: False restarts from the first step.

        Returns:
            The results by name of the step, including saved results.

        Raises:
            StepExecutionError: The last attempt of a step failed.
            StepCancelledError: The run was cancelled before a step started.
            JournalMismatch: The recorded list had other steps.
            InvalidArgument: A name occurs twice, a dependency is not in the list, or dependencies form a cycle.
        """
        steps = unique(steps)
        if initial_state is not None and not isinstance(initial_state, Mapping):
            raise must("initial_state", "be a dict", initial_state)
        graph = Graph(steps) if is_graph(steps) else None
        journal, scope = await self.open_journal(lambda: labels_of(steps), resume)
        suffix = journal.keys.scope_suffix()
        async with (
            journal.keys.exclusive("\0".join(map(name_of, steps)), f"x:{scope}{suffix}") if suffix else nullcontext()
        ):
            if graph is not None:
                return await GraphRun(self.options, journal, scope).run(graph, initial_state, resume)
            return await StepSequence(self.options, journal, scope).run(steps, initial_state, resume)

    @typed_map
    @takes_options_of(RunContext.step, _NOT_IN_MAP)
    async def map(
        self,
        name: str,
        fn: Callable[..., Any],
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> list[Any]:
        """Call `fn(item)` for every item, several at the same time, and save each result as a step.

        If an item fails after its last retry, no other item starts. When the running items have finished and are
        saved, the error is raised.

        Args:
            name: Name of the map.
            fn: A function of the item, or a coroutine function. A plain function runs in a thread.
            items: The items.
            key: Returns the key of an item. It identifies the item in all maps of that name; without it, the position
                does.
            **options: How each item is run, as for `Step`: `retries`, `retry_delay`, `timeout`, `retry_on`, `backoff`,
                `on_in_doubt`, `returns` and `max_result_bytes`.

        Returns:
            The results in the order of the items.

        Raises:
            StepExecutionError: The last attempt of an item failed.
            StepCancelledError: The run was cancelled before an item started.
            InvalidArgument: Two items have the same key, or an earlier map of that name had another item in the same
                position.

        Examples:
            >>> import asyncio
            >>> from agent_runtime_core import MockRunContext, StepExecutor
            >>> asyncio.run(StepExecutor(MockRunContext()).map("size", len, ["a", "bb", "ccc"]))
            [1, 2, 3]
        """
        step = StepOptions.of("map", options, _NOT_IN_MAP)
        name = unbroken("map name", name)
        try:
            iterator = iter(items)
        except TypeError:
            raise must(f"map {brief(name)}: items", "be a list or another iterable", items) from None
        listed = list(iterator)
        keys = [
            str(i) if key is None else unbroken(f"map {name!r}: key", str(key(item))) for i, item in enumerate(listed)
        ]
        if len(set(keys)) != len(keys):
            duplicate = next(k for k in keys if keys.count(k) > 1)
            raise must(f"map {brief(name)}: keys of items", "be unique", Shown(f"{brief(duplicate)} twice"))
        journal, scope = await self.open_journal(lambda: {(name, f"m:{each}"): f"{name}[{each}]" for each in keys})
        return await MapRun(self.options, journal, scope).run(name, fn, listed, keys, step, key is None)

    # -- in a plain run

    def run_sync(
        self, steps: Iterable[Step], *, initial_state: Mapping[str, Any] | None = None, resume: bool = True
    ) -> dict[str, Any]:
        """`run` for an executor with the context of a plain `run(ctx)`, or `sync_ctx` of `open_run_sync`.

        Args:
            steps: As in `run`.
            initial_state: As in `run`.
            resume: As in `run`.

        Returns:
            What `run` returns.
        """
        return cast("dict[str, Any]", self._call(self.run, steps, initial_state=initial_state, resume=resume))

    @typed_blocking_map
    def map_sync(self, name: str, fn: Callable[..., Any], items: Iterable[Any], **options: Any) -> list[Any]:
        """`map` for an executor with the context of a plain `run(ctx)`, or `sync_ctx` of `open_run_sync`.

        Args:
            name: As in `map`.
            fn: As in `map`.
            items: As in `map`.
            **options: The other arguments of `map`.

        Returns:
            What `map` returns.
        """
        return cast("list[Any]", self._call(self.map, name, fn, items, **options))
