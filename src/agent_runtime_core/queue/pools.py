"""The state of a pool: what runs spent and reserved in a period. `redis_pools.lua` contains the same rules."""

from __future__ import annotations

import datetime as _dt
import json
import math
from typing import Any, Final, NamedTuple

from .windows import Window

#: Begins the names of the shared states that are pools.
PREFIX: Final = "pool:"
#: Seconds after which a reservation is dropped that nobody closed: no model call takes that long.
HELD: Final = 86_400.0
_SECONDS: Final = {"hour": 3600, "day": 86_400}

Amounts = tuple[int, int, int]
"""Nano-dollars, tokens and model calls."""

NOTHING: Final[Amounts] = (0, 0, 0)


class PoolLimit(NamedTuple):
    """A pool as a reservation names it.

    Attributes:
        name: Its name in the store, without `PREFIX`.
        tenant: The tenant whose pool it is, or "".
        per: "hour", "day" or "month", or the seconds of a sliding period.
        limits: What it allows in a period; -1 for no limit.
        amounts: What is reserved.
    """

    name: str
    tenant: str
    per: str | float
    limits: Amounts
    amounts: Amounts


class Refusal(NamedTuple):
    """A pool without room.

    Attributes:
        name: The name of the pool.
        unit: The index of what is used up: nano-dollars, tokens, model calls.
        used: How much of it is used, with what is reserved.
        seconds: Seconds until there is room in the period.
        is_reserved: Whether there would be room without the reservations of calls that have not ended.
    """

    name: str
    unit: int
    used: int
    seconds: float
    is_reserved: bool


def end_of(per: str, now: float) -> float:
    """Return when the calendar period ends that contains `now`.

    Args:
        per: "hour", "day" or "month", in UTC.
        now: Wall time in seconds.
    """
    if per in _SECONDS:
        return float((math.floor(now / _SECONDS[per]) + 1) * _SECONDS[per])
    then = _dt.datetime.fromtimestamp(now, _dt.UTC)
    year, month = (then.year + 1, 1) if then.month == 12 else (then.year, then.month + 1)
    return _dt.datetime(year, month, 1, tzinfo=_dt.UTC).timestamp()


class Pool:
    """One pool at a moment.

    A reservation is part of the amounts from the start, and is corrected when the call ends. So it belongs to the
    period in which it was made, and one that nobody closes ends with that period.

    Args:
        text: The stored state; None for a pool that nothing used.
        per: "hour", "day" or "month", or the seconds of a sliding period. None: as it is stored.
        now: Wall time on the clock of the store.

    Attributes:
        per: The period.
        tenant: The tenant whose pool it is, or "".
        ends: When the calendar period ends; 0 for a sliding one.
        limits: What it allowed at the last reservation.
        reservations: The open reservations: when each was made, and its amounts.
    """

    def __init__(self, text: str | None, per: str | float | None, now: float) -> None:
        stored: dict[str, Any] = {} if text is None else json.loads(text)
        self.now: float = now
        self.per: str | float = stored["per"] if per is None else per
        if stored and stored["per"] != self.per:
            stored = {}  # amounts of another period say nothing about this one
        self.tenant: str = stored.get("tenant", "")
        self.limits: Amounts = tuple(stored.get("limits", (-1, -1, -1)))
        self.reservations: dict[str, tuple[float, Amounts]] = {
            id: (at, (a, b, c)) for id, at, a, b, c in stored.get("open", ())
        }
        self.ends: float = 0.0
        length = math.inf
        if isinstance(self.per, str):
            stored = self._in_period(self.per, stored)
        else:
            length = self.per
        cells: list[list[Any]] = stored.get("cells", [])
        self._windows = [Window(length, ((c[0], c[1], c[unit]) for c in cells)) for unit in (2, 3, 4)]
        self._move()

    def _in_period(self, per: str, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the state without what an earlier period counted."""
        ends, self.ends = stored.get("ends", 0.0), end_of(per, self.now)
        # A clock that is a little behind another one does not begin a period that is over once more.
        if ends > self.ends and ends <= end_of(per, self.ends):
            self.ends = ends
        return {**stored, "cells": []} if ends < self.ends else stored

    def _move(self) -> None:
        """Drop what ended before now."""
        cells = self._windows[0].cells
        if cells and (behind := cells[-1][1] - self.now) > self._windows[0].per:  # the clock went back
            self.reservations = {id: (at - behind, amounts) for id, (at, amounts) in self.reservations.items()}
        for window in self._windows:
            window.total(self.now)
        for id, (at, _) in [*self.reservations.items()]:
            if self._cell(at) is None:
                del self.reservations[id]
            elif at < self.now - HELD:
                self.close(id, NOTHING)

    def _cell(self, at: float) -> int | None:
        cells = self._windows[0].cells
        return next((i for i, (first, last, _) in enumerate(cells) if first <= at <= last), None)

    @property
    def used(self) -> Amounts:
        """What the period counted, with what is reserved."""
        usd, tokens, calls = (sum(int(amount) for _, _, amount in window.cells) for window in self._windows)
        return usd, tokens, calls

    @property
    def reserved(self) -> Amounts:
        """What is reserved for calls that have not ended."""
        usd, tokens, calls = (sum(amounts[unit] for _, amounts in self.reservations.values()) for unit in range(3))
        return usd, tokens, calls

    def refusal(self, want: PoolLimit) -> Refusal | None:
        """Return why the amounts cannot be reserved now; None if there is room.

        Args:
            want: What to reserve.
        """
        found, used, reserved = None, self.used, self.reserved
        for unit, (limit, amount) in enumerate(zip(want.limits, want.amounts, strict=True)):
            if limit < 0:
                continue
            free = self._windows[unit].free_at(amount, limit, self.now)
            if free == math.inf:  # not in this period
                free = self.ends or self.now + self._windows[unit].per
            seconds = free - self.now
            if seconds > 0 and (found is None or seconds > found.seconds):
                is_reserved = used[unit] - reserved[unit] + amount <= limit
                found = Refusal(want.name, unit, used[unit], seconds, is_reserved)
        return found

    def reserve(self, id: str, want: PoolLimit) -> None:
        """Reserve amounts.

        Args:
            id: Identifies the call.
            want: What to reserve.
        """
        for unit, window in enumerate(self._windows):
            at = window.add(want.amounts[unit], self.now)
        self.reservations[id] = (at, want.amounts)

    def close(self, id: str, amounts: Amounts) -> None:
        """Close a reservation, if it is open.

        Args:
            id: Identifies the call.
            amounts: What the call used.
        """
        if id not in self.reservations:
            return
        at, reserved = self.reservations.pop(id)
        cell = self._cell(at)
        assert cell is not None
        for unit, window in enumerate(self._windows):
            first, last, amount = window.cells[cell]
            window.cells[cell] = (first, last, amount + amounts[unit] - reserved[unit])

    def text(self) -> str | None:
        """Return the state as it is stored; None for a pool that counts nothing."""
        rows = zip(*(window.cells for window in self._windows), strict=True)
        cells = [[first, last, usd, tokens, calls] for (first, last, usd), (_, _, tokens), (_, _, calls) in rows]
        if not self.reservations and not any(any(cell[2:]) for cell in cells):
            return None
        opened = [[id, at, *amounts] for id, (at, amounts) in sorted(self.reservations.items())]
        return json.dumps(
            {
                "per": self.per, "tenant": self.tenant, "ends": self.ends, "limits": self.limits, "cells": cells,
                "open": opened,
            }
        )  # fmt: skip
