"""What the contract suites share: checks that say what they expected."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

from ..._engines.base import Backend

PATIENCE = 20.0  # seconds after which what should have come counts as missing
TRIES = 5  # a machine that stands still for a moment breaks no promise
SHOWN = 200  # characters of a value that a message shows
BEFORE = 20  # of them that are the same in the other one
FEW = 3  # fields that a message compares

#: What a backend is to have in its own way, also as a function that gives something to await.
OPEN = frozenset({"_heads", "close", "lease_now", "listen", "standing"})

C = TypeVar("C", bound=Callable[..., Awaitable[None]])


class Cases(list[C]):
    """The cases of a contract; one is taken in by decorating it. `several` need a second object on the same place."""

    def __init__(self, cases: Iterable[C] = (), several: Sequence[Callable[..., Awaitable[None]]] = ()) -> None:
        super().__init__(cases)
        self.several: tuple[Callable[..., Awaitable[None]], ...] = tuple(several)

    def __call__(self, case: C) -> C:
        told = cast(C, _told(case))
        self.append(told)
        return told

    async def check(self, make: Any, *, again: Any = None) -> None:
        """Run every case; those of several objects too where `again(backend)` opens another one on its place."""
        for case in self:
            await case(make)
        if again is not None:
            for each in self.several:
                await each(make, again)


def _told(case: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The case, looking at the names of what is made for it, and saying which one it is that waits in vain."""

    @functools.wraps(case)
    async def run(*makes: Callable[..., Any]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await case(*(functools.partial(_made, make) for make in makes))
        except TimeoutError as error:
            if loop.time() - began < PATIENCE:
                raise  # the backend's own
            raise AssertionError(f"{case.__name__}: what it waits for did not come for {PATIENCE:g} s") from error

    return run


def _made(make: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
    made = make(*args, **options)
    for each in made if isinstance(made, tuple) else (made,):
        if isinstance(each, Backend):
            hides_nothing(each)
    return made


def hides_nothing(backend: Backend) -> None:
    """No attribute or helper has the name of something inherited, and cannot be used as that is."""
    mine, base = type(backend).__name__, next(each for each in type(backend).__mro__ if Backend in each.__bases__)
    for name, inherited in vars(base).items():
        if name.startswith(("__", "_abc_")):
            continue
        if getattr(inherited, "__isabstractmethod__", False):
            continue
        if not _used_alike(name, getattr(backend, name), inherited):
            raise AssertionError(
                f"{mine}.{name} hides {base.__name__}.{name}, which the runner calls: give it another name"
            )
    if not hasattr(backend.commits, "commit"):
        raise AssertionError(
            f"{mine}.{'engine' if hasattr(backend, 'engine') else 'commits'} is taken for what writes for it, and has "
            "no `commit`: give it another name"
        )


def _used_alike(name: str, found: Any, inherited: object) -> bool:
    if not inspect.isfunction(inherited):
        return not callable(found) if isinstance(inherited, property) else type(found) is type(inherited)
    if not callable(found) or getattr(found, "__func__", None) is inherited:
        return callable(found)
    awaited = [inspect.iscoroutinefunction(each) for each in (inspect.unwrap(found), inherited)]
    if name not in OPEN and awaited[0] is not awaited[1]:
        return False
    asked = [*inspect.signature(inherited).parameters.values()][1:]
    needed = [each for each in asked if each.default is each.empty]
    return all(_takes(found, each) for each in (asked, needed))


def _takes(function: Callable[..., Any], arguments: Sequence[inspect.Parameter]) -> bool:
    by_place = [each for each in arguments if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = {each.name: each for each in arguments if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(function).bind(*by_place, **by_name)
    except TypeError:
        return False
    return True


def same(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise AssertionError(f"{what}: {_unlike(found, expected)}")


def _unlike(found: Any, expected: Any) -> str:
    """What was expected and what was found, as far as they differ."""
    kind = type(expected)
    if kind is type(found) and hasattr(kind, "_fields"):
        differing = [each for each in kind._fields if getattr(found, each) != getattr(expected, each)]
        told = [f"{each}: {_unlike(getattr(found, each), getattr(expected, each))}" for each in differing[:FEW]]
        more = [f"and {len(differing) - FEW} more fields"] if len(differing) > FEW else []
        return "; ".join([*told, *more])
    if kind in (list, tuple) and kind is type(found) and len(repr(expected)) + len(repr(found)) > SHOWN:
        alike = min(len(expected), len(found))
        at = next((n for n in range(alike) if found[n] != expected[n]), alike)
        where = f"item {at} of {len(expected)}, {len(found)} found"
        if at < alike:
            return f"{where}: {_unlike(found[at], expected[at])}"
        one, other = (repr(each[at]) if at < len(each) else "none" for each in (expected, found))
        return f"{where}: {_apart(one, other)}"
    return _apart(repr(expected), repr(found))


def _apart(expected: str, found: str) -> str:
    """Both texts, long ones from a little before the place where they part."""
    if expected == found:
        return f"expected {expected:.{SHOWN}}, found another one that looks the same"
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
        raise AssertionError(f"{what}: {error.__name__} was expected, not {other!r:.400}") from other
    raise AssertionError(f"{what}: {error.__name__} was not raised")


@contextlib.contextmanager
def accepted(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{what}: refused with {error!r:.400}") from error


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled_while_it_writes(write: Callable[[int], Awaitable[Any]]) -> None:
    """A task that is told to stop some turns into the `write` of that number stops, and does not go on."""

    async def writer(number: int) -> None:
        await write(number)
        await turns()  # where the commit did not wait for anything, it is cancelled here

    for patience in range(8):
        writing = asyncio.ensure_future(writer(patience))
        await turns(patience)
        writing.cancel()
        await asyncio.wait({writing})
        same(writing.cancelled(), True, f"that a writer is cancelled when it was told so after {patience} turns")
