"""Run one function over many items, each of them a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._core.codec.json import arguments_digest, encode
from .._core.validation import Shown, must
from .._execution.journal_view import CONCURRENT_INFO
from .._execution.run_writer import StepWriter
from .._execution.step import CURRENT_STEP, StepFunction, StepOptions, call, step_function
from .._execution.step_journal import StepJournal
from .._execution.step_runner import StepCall, run_step
from .._journal.record import SKIPPED, Record
from ..errors import StepCancelledError, brief
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
        """Run one item, whose lock this task has. Returns the next item for this worker."""
        journal, ctx, key, item = self.journal, self.options.ctx, self.keys[index], self.items[index]
        if self.failed is not None:
            return None
        if ctx.cancelled():
            raise StepCancelledError(self.name)
        if journal.lookup(self.name, key) is not None:  # another map ran it while this one waited for the lock
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
            return None  # if another item fails, this one never starts, and it would be left in doubt
        journal.carried.add((self.name, key))
        return encode({"name": name, "key": key, "pos": index, "tries": self.step.retries + 1})
