"""Open the stores whose URL schemes other installed packages add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

from .._core.lazy_import import load_scheme, reason
from .._core.validation import Shown, must, redacted_url, type_name
from .._engines.base import Backend
from .._engines.shared_engine import refused
from ..errors import AgentRuntimeError, StorageError, brief
from ..events.base import EventBus
from ..queue.base import RunQueue
from ..state.base import StateStore

_KINDS = {"queue": RunQueue, "event bus": EventBus, "state store": StateStore}


def open_installed(url: str, *, max_retries: int, read_only: bool) -> tuple[RunQueue, EventBus, StateStore]:
    """Open the queue, the event bus and the state store at `url`.

    Raises:
        InvalidArgument: The package that has the scheme does not return three backends.
        StorageError: It raised an error that is none of this library.
    """
    found = load_scheme(url)
    try:
        backends = found.opener.open(url, max_retries=max_retries)
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
    return cast("tuple[RunQueue, EventBus, StateStore]", backends)


def _reject_commits(backends: tuple[Backend, ...]) -> None:
    """Make these backends reject every commit. Those of one engine still share one."""
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
        # A backend that commits by itself calls `listen` of this object as that of its engine, and has none.
        return None if self._own else self._committer.listen(topic, wake)
