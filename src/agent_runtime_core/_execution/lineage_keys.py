"""Keys by which all runs of a lineage find the same effect.

The key of a step counts the calls of its name, also calls that fail. A fork may fail less often than the run that it
was forked from, so the same payment has another key there. Its effect is found by its arguments instead: by the number
of equal calls before it that did not fail. Calls inside steps are counted together if the steps around them have the
same names, since a step that failed may have been called again as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from .journal_view import JournalView
from .step_keys import StepKeys
from .step_scope import SCOPE_SUFFIX, Identity, StepScope, scope_id

_NUMBERED: Final = ("s:", "x:", "m:")  # steps, and the steps of lists and maps


class _Call(NamedTuple):
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
        self._numbers: dict[_Call, _Numbers] = {}
        self._calls: dict[Identity, _Call] = {}
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
                self._take(identity, _Call(self._first_name(identity[0]), base, place, digest))

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

    def _take(self, identity: Identity, call: _Call) -> int:
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
        number = self._take((name, key), _Call(self._first_name(name), base, place, digest))
        where = f"@{place}" if place else ""
        return f"{base}{number}{where}" if base == "s:" else f"{base}#{number}{where}" if number else f"{base}{where}"

    def release(self, identity: Identity) -> None:
        """Note that this call of a step failed, or was refused."""
        call = self._calls.pop(identity, None)
        if call is not None:
            numbers = self._numbers[call]
            numbers.free.append(numbers.by_call.pop(identity))

    def is_last(self, identity: Identity) -> bool:
        """Return whether no equal call has a higher number."""
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
            self._take(identity, _Call(self._first_name(identity[0]), _split(identity[1])[0], place, digest))
        return place

    def _scopes(self) -> Iterator[StepScope]:
        scope = self._keys.counting_scope()
        while scope is not None:
            yield scope
            scope = scope.outer
