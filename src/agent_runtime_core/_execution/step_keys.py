"""Keys that identify repeated calls of one step name, a lock for each key, and the keys of effects in a lineage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .._core.context_vars import queued
from .journal_view import JournalView
from .step import CANCEL_HOOK, CURRENT_STEP, FRAMEWORK_TASKS, SCOPE_SUFFIX, Identity, JournalToken, StepScope, scope_id
from .step_failure import CUT_OFF


def _next_occurrence(counts: dict[tuple[str, str], int], space: str, name: str) -> int:
    count = counts.get((space, name), 0)
    counts[space, name] = count + 1
    return count


class KeyLock:
    """Lets one task at a time run the step of one identity.

    Code inside that step may enter again.
    """

    __slots__ = ("_entered", "_identity", "_locked", "_token")

    def __init__(self, token: JournalToken, locked: dict[Identity, asyncio.Event | None], identity: Identity) -> None:
        self._token = token
        self._locked: dict[Identity, asyncio.Event | None] = locked
        self._identity: Identity = identity
        self._entered = False

    async def __aenter__(self) -> None:
        locked, identity, scope = self._locked, self._identity, CURRENT_STEP.get()
        while scope is not None:
            if scope.token is self._token and (scope.name, scope.key) == identity:
                return  # else a step that calls itself would wait for its own end
            scope = scope.outer
        while identity in locked:
            if (released := locked[identity]) is None:
                released = locked[identity] = asyncio.Event()
            with queued():
                await released.wait()
        locked[identity] = None
        self._entered = True

    async def __aexit__(self, *_: object) -> None:
        if self._entered and (released := self._locked.pop(self._identity)) is not None:
            released.set()


_Call = tuple[StepScope | None, str, str | None]  # scope, name of the step, digest of the arguments


@dataclass(slots=True, eq=False, repr=False)
class OpenCall:
    """A call without a key whose outcome is not recorded; another call with its arguments is the same step.

    Attributes:
        of: The scope of the call, the name of the step, and the digest of the arguments.
        key: The key of the step.
        position: The position of the step.
        task: The task of the call; None once the call ended.
        cancelling: How many cancellations of the task were requested before the call.
        around: The call is of a step around a guarded step, and was noted when the guarded step began.
        errors: What this call and the earlier calls with this key raised, as `describe_call` returns it.
    """

    of: _Call
    key: str
    position: int
    task: asyncio.Task[object] | None
    cancelling: int
    around: bool = False
    errors: tuple[dict[str, Any], ...] = ()

    @property
    def is_cut_off(self) -> bool:
        """Whether the call ended, or a cancellation of it was requested."""
        if self.task is None:
            return True
        ended = self.around and self.task.done()  # an attempt of the step, after which the step may go on
        return self.task.cancelling() > self.cancelling and not ended


class StepKeys:
    """Counts the calls of each name that the code of one claim makes, separately in each step."""

    def __init__(self, run_id: str) -> None:
        self.token: JournalToken = JournalToken(run_id)
        #: Keys used inside a step by a failed attempt. The next attempt of that step skips them.
        self.failed_try_keys: set[Identity] = set()
        #: By scope, space and name: an occurrence that may be used again, and the digest of its arguments.
        self.reusable_keys: dict[tuple[StepScope | None, str, str], tuple[int, str | None]] = {}
        #: Calls of guarded steps, and of steps around them, by key, the earliest first.
        self.open_calls: dict[_Call, dict[str, OpenCall]] = {}
        #: The scope of the agent's `cancel` hook while it runs.
        self.cancel_hook: StepScope | None = None
        #: Identities in use now. The event is set at the end of the use; it exists only if a task waits for it.
        self.locked_keys: dict[Identity, asyncio.Event | None] = {}
        self._counts: dict[tuple[str, str], int] = {}  # of the calls between steps
        self._tasks: dict[str, tuple[object, StepScope]] = {}  # by the key of a framework's task: its last attempt
        self._shared_ids: dict[str, str] = {}  # of scopes whose id is different in a fork: their id in all forks

    def next_key(self, space: str, name: str, arguments_digest: str | None = None) -> str:
        """Return the key of the next call of `name` without an explicit key.

        Each step counts its own calls. After a resume, the code inside a completed step does not run, and concurrent
        steps may run in another order; one count for the whole run would then give other keys.

        A call that was cut off and may have caused an effect keeps its key: the earliest key with these arguments.
        """
        scope = self.counting_scope()
        if self.open_calls and space in "sc":
            for key, call in self.open_calls.get((scope, name, arguments_digest), {}).items():
                if call.is_cut_off:
                    self.reusable_keys.pop((scope, space, name), None)
                    return key
        if self.reusable_keys:
            occurrence, digest = self.reusable_keys.pop((scope, space, name), (0, ""))
            if digest == arguments_digest:
                self._counts_in(scope)[space, name] = occurrence
        if scope is None:
            return f"{space}:{_next_occurrence(self._counts, space, name)}"
        counts = self._counts_in(scope)
        while True:
            key = f"{space}:{_next_occurrence(counts, space, name)}@{scope.scope_id}"
            if (name, key) not in self.failed_try_keys:
                return key

    def number_of_use(self, name: str) -> int:
        """Return how often the calling code used a name of an integration before, in its step or task."""
        return _next_occurrence(self._counts_in(self.counting_scope()), "use", name)

    def reuse_key(self, name: str, key: str, arguments_digest: str | None, scope: StepScope | None) -> None:
        """Give `key` to the next call of `name` in this scope.

        For a call that was cancelled, or whose commit ended with an unknown outcome: the repeated call must find the
        same record. Applies only if this was the last call of `name` and the next call passes the same arguments.
        """
        scope = self.task_scope() or (None if scope is None or scope.token is not self.token else scope)
        space, _, occurrence = key.partition("@")[0].partition(":")
        if occurrence.isdecimal() and self._counts_in(scope).get((space, name)) == int(occurrence) + 1:
            self.reusable_keys[scope, space, name] = int(occurrence), arguments_digest

    def has_open_call(self, name: str, key: str, digest: str | None) -> bool:
        """Return whether this key belongs to a call that was begun before, without a recorded outcome."""
        return key in self.open_calls.get((self.counting_scope(), name, digest), ())

    def open_call(self, name: str, key: str, digest: str | None, next_position: Callable[[], int]) -> OpenCall:
        """Begin a call whose key is kept for the same call if it is cut off.

        Args:
            name: The name of the step.
            key: Its key.
            digest: The digest of the arguments.
            next_position: Returns the position of a step that was not called before.
        """
        task, scope = asyncio.current_task(), self.counting_scope()
        cancelling = 0 if task is None else task.cancelling()
        calls = self.open_calls.setdefault((scope, name, digest), {})
        known = calls.get(key)
        position = next_position() if known is None else known.position
        errors = () if known is None else known.errors if known.task is None else (*known.errors, CUT_OFF)
        calls[key] = call = OpenCall((scope, name, digest), key, position, task, cancelling, errors=errors)
        while scope is not None and scope.key[:2] == "s:":  # these calls are the same again too, while this step runs
            of = (scope.outer, scope.name, scope.digest)
            around = OpenCall(of, scope.key, scope.position, task, cancelling, around=True)
            self.open_calls.setdefault(of, {}).setdefault(scope.key, around)
            scope = scope.outer
        return call

    def around(self, name: str, key: str, digest: str | None) -> OpenCall | None:
        """Return the open call of this step, if it was noted for a guarded step inside it."""
        call = self.open_calls.get((self.counting_scope(), name, digest), {}).get(key)
        return call if call is not None and call.around else None

    def errors_of(self, name: str, key: str, digest: str | None) -> tuple[dict[str, Any], ...]:
        """Return what the earlier calls with this key raised."""
        call = self.open_calls.get((self.counting_scope(), name, digest), {}).get(key)
        return () if call is None else call.errors

    def end_call(self, call: OpenCall, error: dict[str, Any] | None) -> None:
        """End a call. If it was cut off with an error, the same call gets its key again."""
        call.task = None
        if error is not None:
            call.errors += (error,)
        elif self.open_calls.get(call.of, {}).get(call.key) is call:  # another call may have the key meanwhile
            self._close(call.of, call.key)

    def keep(
        self, name: str, key: str, digest: str | None, error: dict[str, Any], next_position: Callable[[], int]
    ) -> None:
        """Give the key of a call that ended with this error to the same call, unless the caller gave it the key."""
        if key[:2] != "k:":
            self.end_call(self.open_call(name, key, digest, next_position), error)

    def close(self, name: str, key: str, digest: str | None) -> None:
        """Give this key to no further call, because its outcome is recorded."""
        self._close((self.counting_scope(), name, digest), key)

    def _close(self, of: _Call, key: str) -> None:
        calls = self.open_calls.get(of, {})
        if calls.pop(key, None) is not None and not calls:
            del self.open_calls[of]

    def scope(self) -> StepScope | None:
        """Return the step of this run that the calling code is in, or None between steps."""
        scope = CURRENT_STEP.get()
        return None if scope is None or scope.token is not self.token else scope

    def task_scope(self) -> StepScope | None:
        """Return the scope of the `cancel` hook or the framework's task that the calling code is in.

        None if it is in none, or in a step.
        """
        if self.cancel_hook is None and not FRAMEWORK_TASKS:
            return None
        scope = self.scope()
        if self.cancel_hook is not None and CANCEL_HOOK.get() is self.cancel_hook:
            return self.cancel_hook if scope is None else None
        for find in FRAMEWORK_TASKS:
            if (task := find(self.token.run_id, scope)) is None:
                continue
            attempt, known = self._tasks.get(task.key, (None, None))
            if known is None or attempt is not task.attempt:
                known = StepScope(self.token, "task", f"t:{task.key}", 1, scope)
                self._tasks[task.key] = task.attempt, known
                self._shared_ids[known.scope_id] = scope_id("task", task.place)
            return known
        return None

    def counting_scope(self) -> StepScope | None:
        """Return the scope in which the calling code's calls are counted, or None between steps."""
        if self.cancel_hook is None and not FRAMEWORK_TASKS and not self._shared_ids:  # as in most runs
            scope = CURRENT_STEP.get()
            return None if scope is None or scope.token is not self.token else scope
        scope = self.task_scope() or self.scope()
        if self._shared_ids and scope is not None and scope.scope_id not in self._shared_ids:
            self._shared_ids[scope.scope_id] = scope_id(scope.name, self.shared_key(scope.key))
        return scope

    def shared_key(self, key: str) -> str:
        """Return the key of a step in all forks of the run; in a task of a framework, its key differs."""
        found = SCOPE_SUFFIX.search(key) if self._shared_ids else None
        if found is None:
            return key
        return f"{key[: found.start(1)]}{self._shared_ids.get(found[1], found[1])}{key[found.end(1) :]}"

    def _counts_in(self, scope: StepScope | None) -> dict[tuple[str, str], int]:
        if scope is None:
            return self._counts
        if scope.counts is None:
            scope.counts = {}
        return scope.counts

    def exclusive(self, name: str, key: str) -> KeyLock:
        """Return the lock of this identity.

        Tasks of a failed attempt may still run a step. The next attempt waits for them and takes their results, instead
        of running the step a second time.
        """
        return KeyLock(self.token, self.locked_keys, (name, key))

    def scope_suffix(self) -> str:
        """Return the suffix for the keys of step lists and maps inside the current step; "" between steps."""
        scope = self.counting_scope()
        return "" if scope is None else f"@{scope.scope_id}"


# -- keys of effects
#
# All runs of a lineage find the same effect by these keys. The key of a step counts the calls of its name, including
# calls that fail. A fork may fail less often than the run that it was forked from, so the key of the same payment
# differs there. Its effect is found by its arguments instead: by the number of equal calls before it that did not fail.
# Calls inside steps are counted together if the steps around them have the same names, since a step that failed may
# have been called again as well.

_NUMBERED: Final = ("s:", "x:", "m:")  # steps, and the steps of lists and maps


class _LineageCall(NamedTuple):
    """What equal calls have in common: name, key without its number, steps around it, and arguments."""

    name: str
    base: str
    place: str
    digest: str


class _Numbers:
    """The numbers of equal calls that are done or in doubt."""

    __slots__ = ("by_call", "free", "next")

    def __init__(self) -> None:
        self.by_call: dict[Identity, int] = {}
        self.free: list[int] = []  # of calls that failed
        self.next: int = 0

    def take(self, identity: Identity) -> int:
        number = self.by_call.get(identity)
        if number is None:
            if self.free:
                self.free.sort()
                number = self.free.pop(0)
            else:
                number, self.next = self.next, self.next + 1
            self.by_call[identity] = number
        return number


def _split(key: str) -> tuple[str, str]:
    """Return a key without its number and without the id of the step around it, and that id."""
    found = SCOPE_SUFFIX.search(key)
    suffix = "" if found is None else found[1]
    if key[:2] == "s:":
        return "s:", suffix
    return (key if found is None else key[: found.start()] + key[found.end(1) :]), suffix


class LineageKeys:
    """The keys of the guarded steps of one claim in its lineage."""

    def __init__(self, keys: StepKeys, view: JournalView) -> None:
        self._keys, self._view = keys, view
        self._numbers: dict[_LineageCall, _Numbers] = {}
        self._calls: dict[Identity, _LineageCall] = {}
        self._places: dict[str, str] = {}  # by the id of a step: what identifies it by names only
        self._unplaced: dict[str, list[tuple[Identity, str]]] = {}  # by the id of a step that is not in the journal
        self._read()

    def _read(self) -> None:
        """Number the calls in the journal."""
        view = self._view
        found = [each for each in (*view.completed, *view.started, *view.errors_before) if each[1][:2] in _NUMBERED]
        known: dict[str, Identity] = {}
        if any("@" in key for _, key in found):
            known = {
                scope_id(*each): each for each in (*view.completed, *view.started, *view.ended_tries, *view.opened)
            }
        for identity in found:
            base, suffix = _split(identity[1])
            digest = "" if base[:2] == "x:" else view.digest_of(*identity) or ""
            place = self._place_in_journal(suffix, known)
            if place is None:
                self._unplaced.setdefault(suffix, []).append((identity, digest))
            else:
                self._take(identity, _LineageCall(self._first_name(identity[0]), base, place, digest))

    def _place_in_journal(self, suffix: str, known: dict[str, Identity]) -> str | None:
        if not suffix:
            return ""
        if suffix not in self._places and suffix in known:
            name, key = known[suffix]
            base, outer = _split(key)
            if (place := self._place_in_journal(outer, known)) is not None:
                self._places[suffix] = scope_id(self._first_name(name), f"{base}@{place}")
        return self._places.get(suffix)

    def _first_name(self, name: str) -> str:
        """Return the first name that the step had."""
        former = self._view.former_names(name)
        return former[-1] if former else name

    def _take(self, identity: Identity, call: _LineageCall) -> int:
        self._calls[identity] = call
        numbers = self._numbers.get(call)
        if numbers is None:
            numbers = self._numbers[call] = _Numbers()
        return numbers.take(identity)

    def take(self, name: str, key: str, digest: str) -> str:
        """Return the key of a step in its lineage. It keeps its number until `release`."""
        if key[:2] not in _NUMBERED:
            return self._keys.shared_key(key)
        base, suffix = _split(key)
        place = self._place(suffix)
        number = self._take((name, key), _LineageCall(self._first_name(name), base, place, digest))
        where = f"@{place}" if place else ""
        return f"{base}{number}{where}" if base == "s:" else f"{base}#{number}{where}" if number else f"{base}{where}"

    def release(self, identity: Identity) -> None:
        """Note that this call of a step failed, or was refused."""
        call = self._calls.pop(identity, None)
        if call is not None:
            numbers = self._numbers[call]
            numbers.free.append(numbers.by_call.pop(identity))

    def is_last(self, identity: Identity) -> bool:
        """Return whether no equal call uses a higher number."""
        call = self._calls.get(identity)
        return call is None or self._numbers[call].by_call[identity] == self._numbers[call].next - 1

    def _place(self, suffix: str) -> str:
        """Return what identifies the step around a call in all runs of the lineage."""
        if not suffix:
            return ""
        place = self._places.get(suffix)
        if place is None:
            scope = next((each for each in self._scopes() if each.scope_id == suffix), None)
            if scope is None or scope.key[:2] == "t:":  # a task of a framework
                place = self._keys.shared_key(f"s:0@{suffix}").rpartition("@")[2]
            else:
                base, outer = _split(scope.key)
                place = scope_id(self._first_name(scope.name), f"{base}@{self._place(outer)}")
            self._places[suffix] = place
        for identity, digest in self._unplaced.pop(suffix, ()):
            self._take(identity, _LineageCall(self._first_name(identity[0]), _split(identity[1])[0], place, digest))
        return place

    def _scopes(self) -> Iterator[StepScope]:
        scope = self._keys.counting_scope()
        while scope is not None:
            yield scope
            scope = scope.outer
