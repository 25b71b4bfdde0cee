"""The states of step lists, which records hold whole or as a difference.

A step that adds 1 KB to a state of 1 MB records 1 KB: what it replaced between the common beginning and the common end
of the old and the new text. A state is recorded whole once the differences since the last whole state are as large as
it, so that a file grows with what the steps change. A difference names the state before it by a digest, as records may
be renumbered, and copied into forks.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final, NamedTuple

from ..errors import StorageCorrupt

_MARK: Final = "~"  # begins a difference; a whole state is a JSON object and begins with "{"
_COST: Final = 100  # characters that a difference counts in addition to its own, as its record must be read
_MOST: Final = 256  # differences between two whole states, as reading a state copies its text for each


class _Recorded(NamedTuple):
    """The last recorded state of the lists under a key."""

    recorded: str  # as in its record
    state: str
    differences: int  # since the last whole state
    size: int  # of these differences


class _Lists:
    """The states of the lists under one key."""

    def __init__(self) -> None:
        self.own: dict[str | None, tuple[int, str]] = {}  # the number of the record and the state of each list
        self.reached: tuple[int, str] | None = None  # the last state that this claim has reached
        self.recorded: list[str] = []  # what differences may refer to
        self.last: _Recorded | None = None

    def add(self, recorded: str) -> None:
        """Add a recorded state.

        Of several whole states in a row the last two are kept: earlier releases recorded no others. The last but one
        is kept for a difference to it, if a write without an answer was applied late.
        """
        self.recorded.append(recorded)
        if not any(each.startswith(_MARK) for each in self.recorded[-3:]):
            del self.recorded[-3:-2]


class ListStates:
    """The last states of the step lists of a run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._by_key: dict[str, _Lists] = {}

    def _lists(self, key: str) -> _Lists:
        lists = self._by_key.get(key)
        if lists is None:
            lists = self._by_key[key] = _Lists()
        return lists

    def read(self, key: str, number: str | None, seq: int, recorded: str, *, at_start: bool = False) -> None:
        """Note a state that the journal has.

        Args:
            key: The key of the list.
            number: Identifies the list under this key.
            seq: The number of the record.
            recorded: The state, as recorded.
            at_start: The record is that of a start. Forks do not copy it, so no difference may refer to it.
        """
        lists = self._lists(key)
        lists.own[number] = seq, recorded
        if not at_start:
            lists.add(recorded)
            lists.last = None

    def set(self, key: str, number: str | None, seq: int, recorded: str, state: str) -> None:
        """Note the state of a list after its last step, and how the record of that number has it."""
        lists = self._lists(key)
        lists.own[number] = lists.reached = seq, recorded
        lists.add(recorded)
        if recorded == state:
            lists.last = _Recorded(recorded, state, 0, 0)
        elif (before := lists.last) is not None:
            lists.last = _Recorded(recorded, state, before.differences + 1, before.size + _COST + len(recorded))

    def begin(self, key: str, state: str) -> None:
        """Set the state with which the lists under a key begin."""
        self._lists(key).reached = -1, state

    def of(self, key: str, number: str) -> str | None:
        """Return the last state of a list; None if no record has one."""
        lists = self._lists(key)
        own = lists.own.get(number)
        if own is None:
            return None
        if lists.reached is None or lists.reached[0] < own[0]:
            lists.reached = own
        return self._whole(key, own[1])

    def is_recorded(self, key: str, number: str) -> bool:
        """Whether the last state of this list is also in records that forks copy."""
        lists = self._lists(key)
        return lists.own[number][1] in lists.recorded

    def before(self, key: str) -> str | None:
        """Return the last state of the lists under this key that this claim has reached."""
        reached = self._lists(key).reached
        return None if reached is None else self._whole(key, reached[1])

    def to_record(self, key: str, state: str) -> str:
        """Return what the next record of a list has for this state: the state, or a shorter difference."""
        lists = self._lists(key)
        if len(state) <= _COST or not lists.recorded:
            return state
        last = lists.last
        if last is None:
            last = lists.last = self._last_recorded(key, lists.recorded[-1])
        if last.differences >= _MOST:
            return state
        start = _common_start(last.state, state)
        end = _common_end(last.state, state, min(len(last.state), len(state)) - start)
        if last.size + _COST + len(state) - start - end >= len(state):
            return state
        return f"{_MARK}{_digest(last.recorded)}:{start}:{end}:{state[start : len(state) - end]}"

    def _whole(self, key: str, recorded: str) -> str:
        return self._last_recorded(key, recorded).state if recorded.startswith(_MARK) else recorded

    def _last_recorded(self, key: str, recorded: str) -> _Recorded:
        """Return a recorded state with its whole text."""
        lists = self._lists(key)
        if (last := lists.last) is not None and last.recorded == recorded:
            return last
        changes: list[tuple[int, int, str]] = []
        digests: dict[str, str] = {}
        state, size = recorded, 0
        try:
            while state.startswith(_MARK):
                digest, first, from_end, between = state[1:].split(":", 3)
                changes.append((int(first), int(from_end), between))
                size += _COST + len(state)
                digests = digests or {_digest(each): each for each in lists.recorded}
                state = digests[digest]
        except (ValueError, KeyError) as wrong:
            raise StorageCorrupt(
                f"run {self._run_id}: a state of its step list is the difference to another state, which must be in an "
                "earlier record, and is not. Restore a backup"
            ) from wrong
        for start, end, between in reversed(changes):
            state = f"{state[:start]}{between}{state[len(state) - end :]}"
        return _Recorded(recorded, state, len(changes), size)


def _digest(recorded: str) -> str:
    return blake2b(recorded.encode(), digest_size=8).hexdigest()


def _common_start(old: str, new: str) -> int:
    """Return how many characters at the beginning of two texts are the same."""
    low, high = 0, min(len(old), len(new))
    while low < high:  # the characters before `low` are the same
        middle = (low + high + 1) // 2
        if old.startswith(new[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _common_end(old: str, new: str, most: int) -> int:
    """Return how many characters at the end of two texts are the same, at most `most`."""
    low, high = 0, most
    while low < high:  # the last `low` characters are the same
        middle = (low + high + 1) // 2
        if old.endswith(new[len(new) - middle : len(new) - low], 0, len(old) - low):
            low = middle
        else:
            high = middle - 1
    return low
