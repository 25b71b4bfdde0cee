"""Rate limits of runs: which runs may start in one claim, and until when the others are delayed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from .records import RATE_LIMITED, RunRow
from .windows import CELLS, Window

PREFIX = "rate:"  # begins the names of the shared states of rate limits
SKEW = 3600.0  # seconds
MOST_DELAYED = 100  # most runs that one claim delays; the next claim continues
MOST_LEFT = 50  # most times that are left over for other runs
RETRY = 0.01  # seconds until the next claim, if another transaction has the state of a limit
STEP = 0.05  # seconds: times of delayed runs are multiples of this, so that workers wake at most 20 times a second


class Rate(NamedTuple):
    """A rate limit as the row of a run stores it.

    Attributes:
        starts: Most runs that start in any period.
        per: The length of the period in seconds.
        key: Runs with the same key and period are counted together.
    """

    starts: int
    per: float
    key: str

    @classmethod
    def read(cls, text: str) -> Rate:
        """Return the limit that `text()` wrote.

        Args:
            text: `RunRow.rate`.
        """
        starts, per, key = text.split(" ", 2)
        return cls(int(starts), float(per), key)

    def text(self) -> str:
        """Return the limit as a row stores it: the starts, the seconds and the key, with spaces in between."""
        return f"{self.starts} {self.per!r} {self.key}"

    @property
    def name(self) -> str:
        """The name of the state that all runs of this key and period share."""
        return f"{PREFIX}{self.per!r} {self.key}"


def _per(name: str) -> float:
    """Return the period of the limits that share the state of this name."""
    return float(name.removeprefix(PREFIX).split(" ", 1)[0])


def unused(states: Mapping[str, str], now: float) -> list[tuple[str, str]]:
    """Return the states of rate limits that neither count a start nor have a delayed run any more.

    Args:
        states: States by their names, which begin with `PREFIX`.
        now: The time on the wall clock of the caller, which may differ from the clock of the store by `SKEW`.
    """
    found = []
    for name, text in sorted(states.items()):
        tail, left, cells = json.loads(text)
        if max(tail, *left, *(last + _per(name) for _, last, _ in cells), 0.0) < now - SKEW:
            found.append((name, text))
    return found


class _Rows(Protocol):
    """What `Starts` reads and changes: see the methods of `RunTransitions` with these names."""

    def shared_if_free(self, name: str) -> tuple[bool, str | None]: ...

    def save_shared(self, name: str, state: str | None) -> None: ...

    def next_rate_limited(self, rate: str, agent: str) -> RunRow | None: ...

    def delay(self, row: RunRow, due_at: float) -> None: ...

    def bring_forward(self, name: str, seconds: float) -> None: ...


class _Line:
    """The state of one key: its last starts, and the times at which its delayed runs are due.

    Each delayed run has another time, so that some run is due whenever there is room. The time of a run that has
    started before it was due is left over for the next run that is delayed.

    Args:
        per: The length of the period in seconds.
        text: The stored state, or None.
    """

    def __init__(self, per: float, text: str | None) -> None:
        tail, left, cells = (0.0, [], []) if text is None else json.loads(text)
        self.tail: float = tail  # the first time after those of all delayed runs
        self.left: list[float] = left
        self.window = Window(per, [tuple(cell) for cell in cells])
        self._is_next_known = False
        self._is_checked = False

    def text(self) -> str:
        left = ",".join(map(repr, self.left))
        return f"[{self.tail!r},[{left}],{self.window.text()}]"

    def shift(self, seconds: float) -> None:
        """Have the starts count as made earlier, and the delayed runs due earlier by as much."""
        self.window.shift(seconds)
        self.tail -= seconds
        self.left = [each - seconds for each in self.left]

    def forget_ended(self, free: float, next_delayed: Callable[[], RunRow | None]) -> None:
        """Forget the times of delayed runs if all of them have ended, before a run is delayed until `free` or later."""
        if self.tail > free and not self._is_checked:
            if next_delayed() is None:
                self.tail, self.left = 0.0, []
            self._is_checked = True

    def started_before_due(self, row: RunRow, now: float) -> None:
        self.left = sorted(each for each in (*self.left, row.due_at) if each > now)[:MOST_LEFT]

    def due(self, row: RunRow, rate: Rate, free: float) -> float:
        """Return when a run is due that cannot start before `free`."""
        if row.reason == RATE_LIMITED and not self._is_next_known:
            # It was due too early, because runs before it started late. It starts the others of that time with it.
            self._is_next_known = True
            return later(free, rate.per)
        at = next((each for each in self.left if each >= free), None)
        if at is None:
            at = max(free, self.tail)
            self.tail = at + rate.per / rate.starts
        else:
            self.left.remove(at)
        return later(at, rate.per)


def later(at: float, per: float) -> float:
    """Return the next time at which workers wake for runs of a limit.

    Args:
        at: A time in seconds.
        per: The length of the limit's period in seconds.
    """
    step = min(STEP, per / CELLS)
    return max(math.ceil(at / step) * step, at)


def _is_over(row: RunRow, now: float) -> bool:
    """Return whether a worker ends a run that it claims now, because it is too late to start: see `before_start`."""
    if row.deadline is not None and now >= row.deadline:
        return True
    is_new = row.started_at is None and row.min_step_count < 0  # else it may have records, and does not expire
    return is_new and row.expires_at is not None and now > row.expires_at


def counted_rate(row: RunRow) -> str:
    """Return the rate limit that counted the claim of a row as a start; "" if none did.

    Args:
        row: The row as it was claimed.
    """
    claimed_at = row.claimed_at or 0.0
    is_changed = row.updated_at != claimed_at  # under the claim: it does not show any more what was claimed
    if row.rate is None or row.origin or row.parked or row.cancel_at is not None or is_changed:
        return ""
    before = row.with_values(started_at=None) if row.started_at == claimed_at else row
    return "" if _is_over(before, claimed_at) else row.rate


def taken_back(per: float, text: str | None, at: float) -> str | None:
    """Return the state of a limit without the start that it counts at a time; None if it does not count that start.

    Args:
        per: The length of the limit's period in seconds.
        text: The stored state, or None.
        at: The time at which the start counts.
    """
    line = _Line(per, text)
    return line.text() if line.window.take_back(1, at) else None


class Starts:
    """The runs that may start in one claim.

    A run whose limit has no room is delayed. It is checked again when it is due, so that runs which became due while no
    worker ran do not start together. Of the delayed runs of an agent and limit, the first one by priority and arrival
    starts first, whichever of them is due. So the time of a delayed run only wakes workers when there is room.

    Args:
        rows: The rows.
        now: The time on the clock of the store.
    """

    def __init__(self, rows: _Rows, now: float) -> None:
        self._rows, self._now = rows, now
        self._lines: dict[str, _Line | None] = {}  # None: another transaction has it
        self._waiting: set[str] = set()  # keys that another transaction has, and for which a run will wake a worker
        self.delayed: int = 0

    def next(self, row: RunRow) -> tuple[RunRow | None, float]:
        """Return the run that may be claimed because `row` may, and the time at which it counts as started.

        It is `row`, or a delayed run of the same agent and limit that comes before `row`. A run that its claim only
        ends, because it is too late, is not counted, and delayed runs start instead of it. None: `row` was delayed, or
        stays ready because another transaction has the state of its limit.

        Args:
            row: A row that may be claimed.
        """
        is_resumed = row.parked and row.status != "running"
        if row.rate is None or is_resumed or row.cancel_at is not None:
            return row, self._now
        rate, is_over = Rate.read(row.rate), _is_over(row, self._now)
        line = self._line(rate.name)
        if line is None:
            if is_over:
                return row, self._now
            if rate.name in self._waiting:  # stays ready: the claim for which the first run wakes a worker finds it
                return None, self._now
            self._waiting.add(rate.name)
            return self._delay(row, self._now + RETRY)
        free = line.window.free_at(1, rate.starts, self._now)
        if free > self._now:
            if is_over:
                return row, self._now
            line.forget_ended(free, partial(self._rows.next_rate_limited, row.rate, row.agent))
            return self._delay(row, line.due(row, rate, free))
        first = self._rows.next_rate_limited(row.rate, row.agent)
        if first is None:
            line.tail, line.left = 0.0, []  # all delayed runs have started or ended
        elif is_over or (-first.priority, first.arrival) < (-row.priority, row.arrival):
            line.started_before_due(first, self._now)
            row, is_over = first, _is_over(first, self._now)
        if is_over:
            return row, self._now
        return row, line.window.add(1, self._now)

    def _line(self, name: str) -> _Line | None:
        if name not in self._lines:
            is_free, text = self._rows.shared_if_free(name)
            self._lines[name] = line = _Line(_per(name), text) if is_free else None
            if line is not None and (behind := line.window.behind(self._now)):
                line.shift(behind)
                self._rows.bring_forward(name, behind)
        return self._lines[name]

    def follow_clock(self, states: Mapping[str, str]) -> bool:
        """Bring the delayed runs of all limits forward if the clock went back by more than their period.

        Otherwise no run would be due, and no claim look at its limit, until the clock has caught up.

        Args:
            states: The states of all rate limits by their names.

        Returns:
            Whether there was such a limit.
        """
        ahead = [name for name, text in sorted(states.items()) if _Line(_per(name), text).window.behind(self._now)]
        for name in ahead:
            self._line(name)
        return bool(ahead)

    def _delay(self, row: RunRow, due_at: float) -> tuple[None, float]:
        self.delayed += 1
        self._rows.delay(row, due_at)
        return None, due_at

    @property
    def is_over(self) -> bool:
        """Whether this claim has delayed as many runs as a claim may."""
        return self.delayed >= MOST_DELAYED

    def save(self) -> None:
        """Store the states that have changed."""
        for name, line in self._lines.items():
            if line is not None:
                self._rows.save_shared(name, line.text())
