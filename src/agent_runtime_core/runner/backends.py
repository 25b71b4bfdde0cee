"""Open the three backends of a runner: by one URL, by their names, or as they were passed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar, cast
from uuid import UUID

from .._core.clock import Clock
from .._core.codec.json import decode_dict
from .._core.lazy_import import load, load_scheme, reason
from .._core.validation import Shown, must, redacted_url, type_name
from .._engines.base import Backend, Engine
from .._engines.memory import MemoryEngine
from .._engines.shared_engine import ReadOnlyEngine, refused
from .._execution.result_codec import decode_result, error_in, omitted_history_in
from .._execution.run_control import RunRecorder
from ..config import INSTALLED, SETTINGS, RuntimeConfig, place_of
from ..errors import AgentRuntimeError, StorageCorrupt, StorageError, brief
from ..events import get_event_bus
from ..events.base import EventBus
from ..interfaces import RunResult, TraceSink
from ..queue import get_queue
from ..queue.base import RunQueue
from ..queue.records import RunRow
from ..state import get_state_store
from ..state.base import StateStore
from ..status import RunStatus
from ..tracing import get_trace_sink
from ..tracing.tracer import NoopTraceSink, Tracer

_Opened = TypeVar("_Opened", bound=Backend)


class Backends(NamedTuple):
    """The queue, the event bus and the state store of a runner."""

    queue: RunQueue
    bus: EventBus
    state: StateStore

    @property
    def durable(self) -> bool:
        """Whether stored runs persist when this process ends."""
        return not all(
            isinstance(getattr(backend, "engine", None), MemoryEngine) for backend in (self.queue, self.state)
        )

    @property
    def hold_documents(self) -> bool:
        """Whether the six stores can be on the engine of these backends."""
        return isinstance(getattr(self.queue, "engine", None), Engine)

    @property
    def together(self) -> bool:
        """Whether the row of a run and its journal are on one engine, so that one commit writes both."""
        return self.state.commits is self.queue.commits

    def require_writable(self) -> None:
        """Raise NotSupported if the store was opened read-only."""
        engine = self.queue.commits
        if getattr(engine, "read_only", False):
            raise refused(getattr(engine, "location", ""))

    async def close(self) -> None:
        """Close all three, even if closing a backend fails."""
        async with AsyncExitStack() as closing:
            for backend in reversed(self):
                closing.push_async_callback(backend.close)


@contextmanager
def opening() -> Iterator[Callable[[_Opened], _Opened]]:
    """Close the backends that were passed to the yielded function if the block fails, so that none stays open."""
    with ExitStack() as undo:

        def opened(backend: _Opened) -> _Opened:
            # A custom backend may need an event loop to be closed, and there is none here.
            close = getattr(getattr(backend, "engine", None), "close_now", None)
            if close is not None:
                undo.callback(close)
            return backend

        yield opened
        undo.pop_all()


def traced(config: RuntimeConfig, sinks: Sequence[TraceSink], clock: Clock) -> Tracer | None:
    """Return a tracer for these trace sinks and the configured sinks, or None if there are none.

    Raises:
        InvalidArgument: An item is not a trace sink.
    """
    SETTINGS["trace_sinks"].check("trace_sinks", sinks)
    named = [get_trace_sink(sink) if isinstance(sink, str) else sink for sink in (*sinks, *config.trace_sinks)]
    if config.tracing_backend is not None:
        named.append(get_trace_sink(config.tracing_backend))
    every = [sink for sink in named if not isinstance(sink, NoopTraceSink)]
    if config.langfuse_enabled and not any(getattr(sink, "service", "") == "langfuse" for sink in every):
        every.append(get_trace_sink("langfuse"))
    return Tracer(every, clock=clock, redaction=config.redaction()) if every else None


def open_url(
    path_or_url: str | os.PathLike[str], *, durability: str = "full", max_retries: int = 3, read_only: bool = False
) -> Backends:
    """Open the backends at a store URL; see `place_of`."""
    name, where = place_of(path_or_url)
    if name == INSTALLED:
        return open_installed(where["url"], max_retries=max_retries, read_only=read_only)
    if read_only:
        engine = _read_only_engine(name, where)
        try:
            return open_built_in({"engine": engine}, name, max_retries)
        finally:
            engine.close_now()  # the backends have it open
    if name == "memory":
        where["engine"] = MemoryEngine()
    elif name == "sqlite":
        where["durability"] = durability
    return open_built_in(where, name, max_retries)


def _read_only_engine(name: str, where: dict[str, Any]) -> Any:
    """Open an engine that rejects every commit."""
    if name == "memory":
        fix = "Leave read_only out: a new store in memory is empty"
        raise must("store URL", "name a file or a server with read_only=True", "memory://", fix)
    if name == "sqlite":
        FileEngine: Any = load(".._engines.sqlite.read_only:ReadOnlySQLite", package=__package__)
        return FileEngine.open(**where)
    if name == "postgres":
        PostgresEngine: Any = load(".._engines.postgres.engine:PostgresEngine", package=__package__)
        return ReadOnlyEngine(PostgresEngine.open(where["url"], read_only=True))
    RedisEngine: Any = load(".._engines.redis.engine:RedisEngine", package=__package__)
    return ReadOnlyEngine(RedisEngine.open(**where))


def open_built_in(where: dict[str, Any], name: str, max_retries: int) -> Backends:
    """Open three backends of the library. `where` contains their location, and other options that all of them take."""
    with opening() as opened:
        queue = opened(get_queue(name, **where, max_retries=max_retries))
        return Backends(queue, opened(get_event_bus(name, **where)), opened(get_state_store(name, **where)))


def configured(
    config: RuntimeConfig,
    queue: RunQueue | None = None,
    bus: EventBus | None = None,
    state: StateStore | None = None,
    *,
    max_retries: int = 3,
) -> Backends:
    """Return the passed backends, and open the configured backends for the rest. Those in memory share an engine."""
    if config.backend_url is not None and queue is None and bus is None and state is None:
        return open_url(config.backend_url, durability=config.durability, max_retries=max_retries)
    given = [getattr(backend, "engine", None) for backend in (queue, bus, state)]
    shared = next((engine for engine in given if isinstance(engine, MemoryEngine)), None) or MemoryEngine()

    def options(setting: str) -> dict[str, Any]:
        name, where = config.chosen(setting, None, {})
        return {"backend": name, **({"engine": shared} if name == "memory" else where)}

    with opening() as opened:
        if queue is None:
            queue = opened(get_queue(**options("queue_backend"), max_retries=max_retries))
        if bus is None:
            bus = opened(get_event_bus(**options("event_bus_backend")))
        if state is None:
            state = opened(get_state_store(**options("state_store_backend")))
        return Backends(queue, bus, state)


_KINDS = {"queue": RunQueue, "event bus": EventBus, "state store": StateStore}


def open_installed(url: str, *, max_retries: int, read_only: bool, **more: Any) -> Backends:
    """Open the queue, the event bus and the state store at `url`. `more` is passed to the package.

    Raises:
        InvalidArgument: The package that defines the scheme does not return three backends.
        StorageError: It raised an error that does not belong to this library.
    """
    found = load_scheme(url)
    try:
        backends = found.opener.open(url, max_retries=max_retries, **more)
    except AgentRuntimeError:
        raise
    except Exception as error:  # of the driver, for example that the server cannot be reached
        shown = brief(redacted_url(url), 500)
        raise StorageError(f"store {shown} was not opened by the package {found.package}: {reason(error)}") from error
    if inspect.iscoroutine(backends):
        backends.close()
        raise must(f"{found.called}: open", "be a plain function", Shown("a coroutine function"))
    wanted = "return a queue, an event bus and a state store"
    if not isinstance(backends, tuple) or len(backends) != len(_KINDS):
        raise must(f"{found.called}: open", wanted, backends)
    for (what, kind), backend in zip(_KINDS.items(), backends, strict=True):
        if not isinstance(backend, kind):
            fix = f"The {what} must be {type_name(kind)}"
            raise must(f"{found.called}: open", wanted, backend, fix)
    if read_only:
        _reject_commits(backends)
    return Backends(*backends)


def _reject_commits(backends: tuple[Backend, ...]) -> None:
    """Make these backends reject every commit. Backends of one engine still share an engine."""
    engines: dict[int, _RejectsCommits] = {}
    for backend in backends:
        committer: Any = backend.commits
        engine = engines.setdefault(id(committer), _RejectsCommits(committer, own=committer is backend))
        cast(Any, backend).engine = engine


class _RejectsCommits:
    """In place of the engine of a backend, or of a backend that commits by itself."""

    read_only = True

    def __init__(self, committer: Any, *, own: bool) -> None:
        self._committer, self._own = committer, own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._committer, name)

    def commit(self, *_: object) -> Any:
        raise refused(getattr(self._committer, "location", type_name(type(self._committer))))

    commit_from_thread = commit_nowait = commit

    def listen(self, topic: str, wake: Callable[[], None]) -> Any:
        # A backend that commits by itself calls `listen` of this object as its engine, and defines no `listen` itself.
        return None if self._own else self._committer.listen(topic, wake)


# -- results


async def result_of(backends: Backends, row: RunRow, recorder: Callable[[RunRow], RunRecorder]) -> RunResult:
    """Return the result of a finished run.

    Args:
        backends: Where the run is stored.
        row: The run.
        recorder: Returns what restores the history that the stored result refers to.
    """
    result = await _stored_result(backends, row, recorder)
    result.run_key = row.run_key
    return result


async def _stored_result(backends: Backends, row: RunRow, recorder: Callable[[RunRow], RunRecorder]) -> RunResult:
    record = await backends.state.ending(row.run_id)
    if record is not None and record.attempt == row.generation and record.result is not None:
        if omitted_history_in(record.result) is not None:
            return await recorder(row).restore(record.result)
        return decode_result(record.result)
    succeeded = row.status == "succeeded" and row.output is None
    had_journal = row.min_step_count >= 0 and backends.together
    if succeeded and (had_journal or await backends.state.records(row.run_id)):
        await backends.queue.require(row.run_id)  # it may have just been deleted
        raise StorageCorrupt(
            f"run {row.run_key or row.run_id!r} has succeeded, but the end of its journal is missing. Restore a backup"
        )
    # Finished by methods of the queue, or before its journal could be written.
    output = row.decoded("output", decode_dict) if row.output else {}
    error = row.decoded("error", error_in) if row.error else None
    return RunResult(output, error=error, status=row.decoded("status", RunStatus), run_id=row.decoded("run_id", UUID))
