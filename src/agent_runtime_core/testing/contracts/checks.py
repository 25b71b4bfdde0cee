"""Shared checks of the conformance tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

from ..._engines.base import Backend
from ...queue.base import RunQueue
from ..clock import not_followed_by

try:
    import resource
except ImportError:  # Windows
    SWITCHES: int | None = None
else:
    SWITCHES = getattr(resource, "RUSAGE_THREAD", None)  # of Linux

PATIENCE = 20.0  # seconds that a case may take, without the calls of its backends
LONGEST = 6  # times `PATIENCE` that it may take with these calls, because a loaded server answers late
STALL = 0.01  # seconds for which a call may block the event loop
TRIES = 5  # a short stall of the machine must not fail a case with a time limit
SHOWN = 200  # characters of a value in a message
BEFORE = 20  # characters shown before the first difference
FEW = 3  # differing fields in a message

#: Methods that a backend overrides, which may also be coroutine functions there.
OPEN = frozenset({"_heads", "close", "lease_now", "listen", "standing"})

#: JSON that a store gets changed if it parses it: spaces, order, repeated keys, escapes, and numbers of other forms.
CONTENTS = (
    '{"bb":1,"a":[1,2]}',
    ' {"a" : 1.0,"a":2} ',
    '["\\u0000\\ud800\\u00e9\\/", 1E400, 1e2, 100000000000000000000.10, -0]',
)

C = TypeVar("C", bound=Callable[..., Awaitable[None]])
S = TypeVar("S", bound="Closes")


class Closes(Protocol):
    """A store that can be closed."""

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def opened(make: Callable[..., S], **options: Any) -> AsyncIterator[S]:
    """Open a store that is closed at the end."""
    store = make(**options)
    try:
        yield store
    finally:
        await store.close()


class Cases(list[C]):
    """The cases of a contract. The object is a decorator that adds a case.

    `several` are cases that need a second backend object on the same store.
    """

    def __init__(self, cases: Iterable[C] = (), several: Sequence[Callable[..., Awaitable[None]]] = ()) -> None:
        super().__init__(cases)
        self.several: tuple[Callable[..., Awaitable[None]], ...] = tuple(several)

    def __call__(self, case: C) -> C:
        checked = cast(C, _checked(case))
        self.append(checked)
        return checked

    async def check(self, make: Any, *, again: Any = None) -> None:
        """Run every case.

        Args:
            make: Makes a new and empty backend.
            again: `again(backend)` opens another object on the same store. With it the cases in `several` run too.

        Raises:
            AssertionError: A case failed.
        """
        for case in self:
            await case(make)
        if again is not None:
            for each in self.several:
                await each(make, again)


def _checked(case: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Wrap a case: check the attribute names of its backends, limit its time, and name the case when it times out."""

    @functools.wraps(case)
    async def run(*makes: Callable[..., Any]) -> None:
        with _Limit() as limit:
            try:
                async with limit.timeout:
                    await case(*(functools.partial(_made, limit, make) for make in makes))
            except TimeoutError as error:
                if not limit.is_over():
                    raise  # a timeout of the backend
                raise AssertionError(f"{case.__name__}: did not finish within {PATIENCE:g} s") from error

    return run


def _made(limit: _Limit, make: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    made = make(*args, **options)
    for each in made if isinstance(made, tuple) else (made,):
        if isinstance(each, Backend):
            hides_nothing(each)
            limit.watch(each)
        if isinstance(each, RunQueue):
            limit.move_leases(each)
    return made


class _Limit:
    """The time limit of a case, which does not count the time in which a backend executes a call.

    Attributes:
        timeout: Ends the case.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._since = self._loop.time()
        self._running = 0  # calls
        self._waited = 0.0  # seconds in which a call was running, before `_since`
        self._undo = contextlib.ExitStack()
        self.timeout: asyncio.Timeout = asyncio.timeout(None)

    def __enter__(self) -> _Limit:
        self._check()
        return self

    def __exit__(self, *_: object) -> None:
        self._next.cancel()
        self._undo.close()

    def left(self) -> float:
        """Return the seconds for which the case can go on, if no call begins."""
        now = self._loop.time()
        waited = self._waited + (now - self._since if self._running else 0.0)
        return min(PATIENCE - (now - self._began - waited), LONGEST * PATIENCE - (now - self._began))

    def is_over(self) -> bool:
        return self.timeout.expired() or self.left() <= 0

    def _check(self) -> None:
        left = self.left()
        if left <= 0:
            self.timeout.reschedule(self._loop.time())
        self._next = self._loop.call_later(max(left, 0.001), self._check)

    def watch(self, backend: Backend) -> None:
        """Count the calls of a backend until the case ends."""
        for owner, names in (
            (backend, ("commit", "read", "_rows", "_head", "close")),
            (getattr(backend, "engine", None), ("commit",)),
        ):
            for name in names:
                if hasattr(owner, name):
                    self._replace(owner, name, self._counted(getattr(owner, name)))

    def move_leases(self, queue: RunQueue) -> None:
        """Move the lease clock of a queue with the clock of the case, if it is the clock of a server."""
        own = queue.lease_now
        clock = None if type(queue).lease_now is RunQueue.lease_now else not_followed_by(queue.clock, own)
        if clock is not None:
            self._replace(queue, "lease_now", lambda: own() + clock.boot())

    def _replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        own = vars(owner).get(name) if hasattr(owner, "__dict__") else None
        with contextlib.suppress(AttributeError):  # an object with slots
            setattr(owner, name, new)
            self._undo.callback(*((delattr, owner, name) if own is None else (setattr, owner, name, own)))

    def _counted(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        async def awaited(call: Awaitable[Any]) -> Any:
            self._count(1)
            try:
                return await call
            finally:
                self._count(-1)

        @functools.wraps(fn)
        async def later(*args: Any, **options: Any) -> Any:
            return await awaited(fn(*args, **options))

        @functools.wraps(fn)
        def now(*args: Any, **options: Any) -> Any:
            found = fn(*args, **options)
            return awaited(found) if inspect.isawaitable(found) and not inspect.iscoroutine(found) else found

        return later if inspect.iscoroutinefunction(fn) else now

    def _count(self, change: int) -> None:
        now = self._loop.time()
        if self._running:
            self._waited += now - self._since
        self._since, self._running = now, self._running + change


def hides_nothing(backend: Backend) -> None:
    """Check that no attribute of the backend replaces an inherited attribute and is used differently."""
    mine, base = type(backend).__name__, next(each for each in type(backend).__mro__ if Backend in each.__bases__)
    for name, inherited in vars(base).items():
        if name.startswith(("__", "_abc_")):
            continue
        if getattr(inherited, "__isabstractmethod__", False):
            continue
        if not _is_compatible(name, getattr(backend, name), inherited):
            raise AssertionError(f"{mine}.{name} hides {base.__name__}.{name}, which the runner calls. Rename it")
    if not hasattr(backend.commits, "commit"):
        raise AssertionError(
            f"{mine}.{'engine' if hasattr(backend, 'engine') else 'commits'} must have a `commit` method, because it "
            "is used for writing. Rename it if it is something else"
        )


def _is_compatible(name: str, found: Any, inherited: object) -> bool:
    if not inspect.isfunction(inherited):
        return not callable(found) if isinstance(inherited, property) else type(found) is type(inherited)
    if not callable(found) or getattr(found, "__func__", None) is inherited:
        return callable(found)
    is_async = [inspect.iscoroutinefunction(each) for each in (inspect.unwrap(found), inherited)]
    if name not in OPEN and is_async[0] is not is_async[1]:
        return False
    parameters = [*inspect.signature(inherited).parameters.values()][1:]
    required = [each for each in parameters if each.default is each.empty]
    return all(_accepts(found, each) for each in (parameters, required))


def _accepts(function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> bool:
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(function).bind(*positional, **by_name)
    except TypeError:
        return False
    return True


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {_difference(found, expected)}")


def _difference(found: Any, expected: Any) -> str:
    """The differing parts of the expected and the found value."""
    kind = type(expected)
    if kind is type(found) and hasattr(kind, "_fields"):
        differing = [each for each in kind._fields if getattr(found, each) != getattr(expected, each)]
        shown = [f"{each}: {_difference(getattr(found, each), getattr(expected, each))}" for each in differing[:FEW]]
        more = [f"and {len(differing) - FEW} more fields"] if len(differing) > FEW else []
        return "; ".join([*shown, *more])
    if kind in (list, tuple) and kind is type(found) and len(repr(expected)) + len(repr(found)) > SHOWN:
        alike = min(len(expected), len(found))
        at = next((n for n in range(alike) if found[n] != expected[n]), alike)
        where = f"item {at} of {len(expected)}, {len(found)} found"
        if at < alike:
            return f"{where}: {_difference(found[at], expected[at])}"
        one, other = (repr(each[at]) if at < len(each) else "none" for each in (expected, found))
        return f"{where}: {_text_difference(one, other)}"
    return _text_difference(repr(expected), repr(found))


def _text_difference(expected: str, found: str) -> str:
    """Both texts; long texts start shortly before their first difference."""
    if expected == found:
        return f"expected {expected:.{SHOWN}}, found an unequal value with the same repr"
    alike = next((n for n, (one, other) in enumerate(zip(expected, found, strict=False)) if one != other), len(found))
    start = max(alike - BEFORE, 0) if max(len(expected), len(found)) > SHOWN else 0
    shown = [
        f"{'…' if start else ''}{text[start : start + SHOWN]}{'…' if len(text) > start + SHOWN else ''}"
        for text in (expected, found)
    ]
    return "expected {}, found {}".format(*shown)


@contextlib.contextmanager
def refused(error: type[Exception], what: str) -> Iterator[None]:
    try:
        yield
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{what}: must raise {error.__name__}, got {other!r:.400}") from other
    raise AssertionError(f"{what}: {error.__name__} was not raised")


@contextlib.contextmanager
def accepted(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: must be accepted, got {error!r:.400}") from error


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_while_it_writes(write: Callable[[int], Awaitable[Any]]) -> None:
    """Check that a task that is cancelled some loop iterations into `write(number)` is cancelled and does not go on."""

    async def writer(number: int) -> None:
        await write(number)
        await turns()  # a commit that never suspended is cancelled here

    for iterations in range(8):
        writing = asyncio.ensure_future(writer(iterations))
        await turns(iterations)
        writing.cancel()
        await asyncio.wait({writing})
        same(writing.cancelled(), True, f"whether a writer is cancelled after {iterations} loop iterations")


async def keeps_the_loop_free(fill: Callable[[int], Awaitable[Any]], many: int, what: str) -> None:
    """Check that a backend does not wait in the event loop. It is checked where the system tells why a thread paused.

    Time in which the loop computes does not count, nor does time in which a loaded machine executes others. A wait
    counts if it is most of the time in each of `TRIES` tries, because a thread of the backend may hold the interpreter.

    Args:
        fill: `fill(count)` writes that many items in one commit and reads them.
        many: A count for which a server needs some time. One item is also written, ten times.
        what: Names the items.
    """
    if SWITCHES is None:
        return

    async def one_by_one() -> None:
        for _ in range(10):
            await fill(1)

    for call, how in ((one_by_one, "one by one"), (functools.partial(fill, many), f"{many:,} in one commit")):
        for _ in range(TRIES):
            longest, stalled, took = await _stalled(call)
            if stalled < STALL or (longest < took / 2 and stalled < took * 0.8):
                break
        else:
            raise AssertionError(
                f"{what}, written and read {how}: must not block the event loop, got {stalled * 1000:.0f} ms in which "
                "no other task ran. Wait in a thread, or use an asynchronous driver"
            )


def _switches() -> int:
    """Return how often this thread gave up the processor to wait."""
    switches: int = resource.getrusage(SWITCHES or 0).ru_nvcsw
    return switches


async def _stalled(call: Callable[[], Awaitable[Any]]) -> tuple[float, float, float]:
    """Return the longest wait of the event loop during a call, all its waits, and the time of the call, in seconds."""
    stalls = [0.0]

    async def watch() -> None:
        before, count = time.perf_counter() - time.thread_time(), _switches()
        while True:
            await asyncio.sleep(0)
            now, switched = time.perf_counter() - time.thread_time(), _switches()
            if switched != count:
                stalls.append(now - before)
            before, count = now, switched

    watching = asyncio.ensure_future(watch())
    await turns(2)
    began = time.perf_counter()
    try:
        await call()
        took = time.perf_counter() - began
        await turns(2)
    finally:
        watching.cancel()
    return max(stalls), sum(stalls), took
