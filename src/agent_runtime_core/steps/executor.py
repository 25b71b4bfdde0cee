"""Lists of steps and fan-outs, each step recorded once and never run again after that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from .._core.codec.json import MAX_RESULT
from .._core.ids import unbroken
from .._core.validation import is_number
from .._execution.run_writer import StepWriter
from .._execution.step_journal import StepJournal
from .._execution.step_policy import InDoubt, Policy, RetryOn
from .._execution.step_scope import Identity
from ..errors import InvalidArgument, brief
from ..retry import Delay
from .checkpoint_only import labels_of, open_checkpoint
from .graph import Graph, is_graph
from .graph_run import GraphRun
from .map_run import MapRun
from .model import ExecutionState, Step, name_of, unique
from .sequence import StepSequence
from .step_list import ListOptions

DEFAULT_KEY = "_step_executor_state"


class StepExecutor:
    """Runs steps over a run's context: our own, which has a journal, or anything with emit, checkpoint,
    get_state and cancelled, whose checkpoint then keeps the whole state under `checkpoint_key`.

    `cancel_check_interval` is how often, in seconds, such a foreign context is asked whether it was
    cancelled while a step runs; ours tells by itself. At most `max_concurrency` items of a `map`, or steps of a
    list with `depends_on`, run at once.
    """

    def __init__(
        self,
        ctx: Any,
        *,
        checkpoint_key: str = DEFAULT_KEY,
        cancel_check_interval: float = 0.5,
        max_concurrency: int = 16,
    ) -> None:
        lacks = [name for name in ("emit", "checkpoint", "get_state", "cancelled") if not hasattr(ctx, name)]
        if lacks:
            hint = ": give its ctx" if hasattr(ctx, "ctx") else ""
            raise InvalidArgument(f"StepExecutor takes a run's context, and {brief(ctx)} has no {lacks[0]}{hint}")
        if not isinstance(checkpoint_key, str):
            raise InvalidArgument(f"checkpoint_key is a text, not {brief(checkpoint_key)}")
        if not isinstance(max_concurrency, int) or max_concurrency < 1:
            raise InvalidArgument(f"max_concurrency is a whole number of at least 1, not {brief(max_concurrency)}")
        if not is_number(cancel_check_interval) or not cancel_check_interval > 0:
            raise InvalidArgument(
                f"cancel_check_interval is a number of seconds above 0, not {brief(cancel_check_interval)}"
            )
        self.ctx = ctx
        self.checkpoint_key = checkpoint_key
        self.cancel_check_interval = cancel_check_interval
        self.options: ListOptions = ListOptions(ctx, max_concurrency)

    @property
    def state(self) -> ExecutionState:
        return self.options.state

    @property
    def max_concurrency(self) -> int:
        return self.options.max_concurrency

    def update_custom_state(self, values: Mapping[str, Any]) -> None:
        """Add to the state that steps see; kept with the next step that succeeds.

        InvalidArgument while steps run side by side, for whom it is read-only.
        """
        self.options.state.custom_state.update(values)
        self.options.added.update(values)

    async def open_journal(
        self, labels: Callable[[], Mapping[Identity, str]], resume: bool = True
    ) -> tuple[StepJournal[StepWriter], str]:
        """Open the journal for the steps of a list or a map. Returns it with the scope of their keys.

        Where the context has no journal, its checkpoint has the results under these labels.
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
        """Run the steps in order; their results by name, those of skipped ones included.

        Where any of them has `depends_on`, each begins when those it names are recorded, and steps run side by
        side: `state` is read-only then. A step that fails for good stops those that depend on it and no
        others; when these have run, the error of the first failed step of the list is raised.

        A recorded step is not run again, in this process or after a crash; `resume=False` begins anew.
        StepExecutionError after a step's last retry, StepCancelledError before a step of a cancelled
        run, JournalMismatch where the list is not the one that was recorded, InvalidArgument for names that
        occur twice, dependencies that are not there, and steps that wait for each other.
        """
        steps = unique(steps)
        if initial_state is not None and not isinstance(initial_state, Mapping):
            raise InvalidArgument(
                f"initial_state is a dict, not {type(initial_state).__name__}: {brief(initial_state)}"
            )
        graph = Graph(steps) if is_graph(steps) else None
        journal, scope = await self.open_journal(lambda: labels_of(steps), resume)
        around = journal.keys.scope_suffix()
        async with (
            journal.keys.exclusive("\0".join(map(name_of, steps)), f"x:{scope}{around}") if around else nullcontext()
        ):
            if graph is not None:
                return await GraphRun(self.options, journal, scope).run(graph, initial_state, resume)
            return await StepSequence(self.options, journal, scope).run(steps, initial_state, resume)

    async def map(
        self,
        name: str,
        fn: Callable[..., Any],
        items: Iterable[Any],
        *,
        key: Callable[[Any], str] | None = None,
        retries: int = 0,
        retry_delay: float = 1.0,
        timeout: float | None = None,
        retry_on: RetryOn = Exception,
        backoff: Delay | None = None,
        on_in_doubt: InDoubt = "retry",
        returns: Any = None,
        max_result_bytes: int = MAX_RESULT,
    ) -> list[Any]:
        """`fn(item)` for every item, some at once, each recorded by itself; the results in the items' order.

        An item is known by its place, or by `key(item)`, in all maps of that name: InvalidArgument where another map
        had other items in the same places. When one fails for good, no other is begun,
        those in flight are finished and recorded, and then its error is raised.
        """
        policy = Policy(retries, retry_delay, timeout, retry_on, backoff, on_in_doubt)
        name = unbroken("the name of a map", name)
        try:
            walk = iter(items)
        except TypeError:
            raise InvalidArgument(
                f"map {brief(name)}: items are a list or another iterable, not {brief(items)}"
            ) from None
        listed = list(walk)
        keys = [
            str(i) if key is None else unbroken(f"a key of map {name!r}", str(key(item)))
            for i, item in enumerate(listed)
        ]
        if len(set(keys)) != len(keys):
            twice = next(k for k in keys if keys.count(k) > 1)
            raise InvalidArgument(f"map {brief(name)}: two items have the key {brief(twice)}: keys are unique")
        journal, scope = await self.open_journal(lambda: {(name, f"m:{each}"): f"{name}[{each}]" for each in keys})
        return await MapRun(self.options, journal, scope).run(
            name, fn, listed, keys, policy, returns, max_result_bytes, key is None
        )
