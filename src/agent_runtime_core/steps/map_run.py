"""One function over many items, each item a step of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .._core.codec.json import arguments_digest, encode
from .._execution.journal_view import CONCURRENT_INFO
from .._execution.run_writer import StepWriter
from .._execution.step_function import StepFunction, call, step_function
from .._execution.step_journal import StepJournal
from .._execution.step_policy import Policy
from .._execution.step_runner import StepCall, run_step
from .._execution.step_scope import CURRENT_STEP
from .._journal.record import SKIPPED, Record
from ..errors import InvalidArgument, StepCancelledError, brief
from .step_list import ListOptions, recorded_results
from .worker_pool import all_of


class MapRun:
    """One pass over the items."""

    def __init__(self, options: ListOptions, journal: StepJournal[StepWriter], scope: str) -> None:
        self.options: ListOptions = options
        self.journal: StepJournal[StepWriter] = journal
        self.scope: str = scope
        self.failed: BaseException | None = None

    async def run(
        self, name: str, fn: Callable[..., Any], items: list[Any], keys: list[str], policy: Policy, returns: Any,
        max_result_bytes: int, by_place: bool,
    ) -> list[Any]:  # fmt: skip
        self.fn: Callable[..., Any] = fn
        self.items: list[Any] = items
        self.policy: Policy = policy
        self.how: StepFunction = step_function(fn, returns, max_result_bytes)
        space = self._space(by_place)
        self.keys: list[str] = [f"m:{key}{space}" for key in keys]
        self.name = name
        self.digests: list[str | None] = [arguments_digest((item,), {})[0] for item in items]
        if by_place:
            self._keep_places(f"{name}{space}")
        self.info: str | None = CONCURRENT_INFO if self.journal.in_child_task() else None  # of the records of its items
        self.results: list[Any] = [None] * len(items)
        if self.journal.unconfirmed.pending:
            await self.journal.unconfirmed.resolve()
        missing = await self._recorded(range(len(items)))
        self.queue: Iterator[int] = iter(missing)
        workers = min(self.options.max_concurrency, len(missing))
        await all_of([self._worker(next(self.queue)) for _ in range(workers)])
        if self.failed is not None:
            raise self.failed
        return self.results

    def _space(self, by_place: bool) -> str:
        """What tells these items from others: the checkpoint_key, and for places the step that this map is in."""
        return (f"@x:{self.scope}" if self.scope else "") + (self.journal.keys.scope_suffix() if by_place else "")

    def _keep_places(self, which: str) -> None:
        """Refuse items that would be answered with the results of others: those of an earlier map of this claim.

        Another try of the step that this map is in is answered as a resumed one would be.
        """
        maps, frame = self.journal.maps, CURRENT_STEP.get()
        which = which if frame is None else f"{which}@{frame.attempt}"
        earlier = maps.get(which, [])
        for place, (found, had) in enumerate(zip(self.digests, earlier, strict=False)):
            if found != had:
                raise InvalidArgument(
                    f"map {brief(self.name)}: place {place} had another item in an earlier map of that name, whose "
                    "result is recorded: give each map a name of its own, or its items keys with key="
                )
        if len(self.digests) > len(earlier):
            maps[which] = self.digests

    async def _recorded(self, places: Iterable[int]) -> list[int]:
        """Take what the journal has of the items in these places; the places of those it has not."""
        journal, found, missing, skips = self.journal, dict[int, Record](), [], []
        for index in places:
            key = self.keys[index]
            record = journal.lookup(self.name, key)
            if record is None:
                missing.append(index)
                continue
            found[index] = record
            skip: list[Any] = [record.name, key, index]
            skips.append([*skip, {"input_changed": True}] if record.digest != self.digests[index] else skip)
        records = list(found.values())
        results = recorded_results([self.how.decode] * len(records), records)
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
        place: int | None = index
        while place is not None and self.failed is None:
            try:
                async with self.journal.keys.exclusive(self.name, self.keys[place]):
                    place = await self._one(place)
            except Exception as error:  # noqa: BLE001 - raised by run() when those in flight are recorded
                self.failed = self.failed or error
                return

    async def _one(self, index: int) -> int | None:
        """Perform one item, which nobody else does now; the next one for this worker."""
        journal, ctx, key, item = self.journal, self.options.ctx, self.keys[index], self.items[index]
        if self.failed is not None:
            return None
        if ctx.cancelled():
            raise StepCancelledError(self.name)
        if journal.lookup(self.name, key) is not None:  # by another map, meanwhile
            await self._recorded([index])
            return next(self.queue, None)
        begun = (self.name, key) in journal.carried
        journal.carried.discard((self.name, key))
        following: int | None = None

        def seal(work: StepCall, text: str, attempt: int, ms: int) -> tuple[Record]:
            nonlocal following
            following = None if self.failed is not None else next(self.queue, None)
            after = None if following is None or ctx.cancelled() else self._start_of(following)
            return (journal.records.completed(work, text, attempt, ms, next=after),)

        work = StepCall(
            journal.view.journal_name(self.name, key), key,
            journal.writer.watched(lambda attempt: call(self.fn, self.how, (item,), ctx)), self.policy,
            encode=self.how.encode, decode=self.how.decode, position=index, total=len(self.items),
            digest=self.digests[index], info=self.info, start_recorded=begun and self.policy.on_in_doubt == "retry",
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
        """The start of an item, for the record of the one before it to carry."""
        journal, key = self.journal, self.keys[index]
        name = journal.view.journal_name(self.name, key)
        if (
            (name, key) in journal.view.started
            or (self.name, key) in journal.carried
            or not journal.is_unclaimed(self.name, key)
        ):
            return None
        if self.policy.on_in_doubt != "retry" or not journal.writer.has_journal:
            return None  # where another item fails, this one is never begun: no doubt may be left about it
        journal.carried.add((self.name, key))
        return encode({"name": name, "key": key, "pos": index, "tries": self.policy.retries + 1})
