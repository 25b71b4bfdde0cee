"""Amounts of the last seconds in bounded space: the starts of a rate limit, the tokens of a provider's limit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

CELLS = 20  # cells that a period is divided into: at least 1 - 1 / CELLS of a limit can be used
_ULP = 2.0**-52


class Window:
    """Amounts of the last `per` seconds, in at most `CELLS` + 2 cells.

    An amount joins the last cell if the cell began less than `per` / `CELLS` seconds ago; otherwise it begins a new
    cell. A cell counts wholly until its last amount is `per` seconds old. So the amounts of any `per` seconds never
    exceed a limit that `free_at` checked, and at most one part in `CELLS` of the limit is unused.

    If the clock went back, amounts count as added at the time of the last amount. If it went back by more than a
    period, the amounts keep their ages instead: otherwise nothing would be free until the clock has caught up.

    Args:
        per: The length of the period in seconds.
        cells: For each cell, the times of its first and its last amount, and the sum of its amounts.
    """

    def __init__(self, per: float, cells: Iterable[tuple[float, float, float]] = ()) -> None:
        self.per = per
        self.cells: list[tuple[float, float, float]] = [*cells]

    @classmethod
    def read(cls, text: str | None, per: float) -> Window:
        """Return the window that `text()` has stored; an empty one for None.

        Args:
            text: What `text()` returned.
            per: The length of the period in seconds.
        """
        return cls(per, () if text is None else ((first, last, amount) for first, last, amount in json.loads(text)))

    def text(self) -> str:
        """Return the cells as JSON, which `read` reads."""
        return json.dumps(self.cells, separators=(",", ":"))

    def total(self, now: float) -> float:
        """Return the sum of the amounts that count now.

        Args:
            now: The time in seconds.
        """
        self._move_to(now)
        return sum(amount for _, _, amount in self.cells)

    def free_at(self, amount: float, limit: float, now: float) -> float:
        """Return when this amount can be added: `now`, or the later time at which enough cells have ended.

        Args:
            amount: The amount.
            limit: The greatest sum of the amounts in any period.
            now: The time in seconds.

        Returns:
            A time in seconds. Infinity: the amount is greater than the limit.
        """
        if amount > limit:
            return math.inf
        self._move_to(now)
        amounts = [each for _, _, each in self.cells]
        free = now
        for ended, (_, last, _) in enumerate(self.cells):
            if sum(amounts[ended:]) + amount <= limit:
                break
            free = last + self.per
            while free - last < self.per:  # the sum was rounded down
                free += abs(free) * _ULP
        return max(free, now)

    def add(self, amount: float, now: float) -> float:
        """Add an amount and return the time at which it counts: `now`, or the time of the last amount if that is later.

        Args:
            amount: The amount.
            now: The time in seconds.

        Returns:
            A time in seconds.
        """
        at = self._move_to(now)
        if self.cells and at - self.cells[-1][0] < self.per / CELLS:
            first, _, before = self.cells[-1]
            self.cells[-1] = (first, at, before + amount)
        else:
            self.cells.append((at, at, amount))
        return at

    def take_back(self, amount: float, at: float) -> bool:
        """Take an amount back that was added, and return whether the window contains it. Its cell keeps its times.

        Args:
            amount: The amount.
            at: The time at which it counts, as `add` returned it.
        """
        for index, (first, last, sum_) in enumerate(self.cells):
            if first <= at <= last and sum_ >= amount:
                self.cells[index] = (first, last, sum_ - amount)
                return True
        return False

    def behind(self, now: float) -> float:
        """Return by how many seconds the clock went back since the last amount; 0 if not by more than a period.

        Args:
            now: The time in seconds.
        """
        behind = self.cells[-1][1] - now if self.cells else 0.0
        return behind if behind > self.per else 0.0

    def shift(self, seconds: float) -> None:
        """Have all amounts count as added earlier.

        Args:
            seconds: By how many seconds.
        """
        self.cells = [(first - seconds, last - seconds, amount) for first, last, amount in self.cells]

    def _move_to(self, now: float) -> float:
        """Drop the cells that have ended, and return the time at which an amount added now counts."""
        if behind := self.behind(now):
            self.shift(behind)
        at = max(now, self.cells[-1][1]) if self.cells else now
        self.cells = [cell for cell in self.cells if at - cell[1] < self.per]
        return at
