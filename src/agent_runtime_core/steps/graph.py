"""Which steps of a list wait for which: checked before anything runs, then asked what can begin."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from .._core.codec.tagged import stored_as_dict
from ..errors import InvalidArgument, brief
from .model import Results, Step


def is_graph(steps: Sequence[Step]) -> bool:
    return any(step.depends_on for step in steps)


class Graph:
    """The steps of a list by their places, and what each depends on.

    InvalidArgument for a dependency that is not in the list, and for steps that wait for each other, which it names
    as in `a -> b -> a`.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: Sequence[Step] = steps
        self.places: dict[str, int] = {step.name: place for place, step in enumerate(steps)}
        self.needs: list[list[int]] = [self._needs(step) for step in steps]
        self.users: list[list[int]] = [[] for _ in steps]
        for place, needs in enumerate(self.needs):
            for other in needs:
                self.users[other].append(place)
        self.order: list[int] = self._order()
        self._before: list[int] = []  # for each place, the bits of those it depends on

    def _needs(self, step: Step) -> list[int]:
        for name in step.depends_on:
            if name not in self.places:
                near = difflib.get_close_matches(name[:100], self.places, n=1)
                hint = f"did you mean {near[0]!r}?" if near else "name a step of the same list"
                raise InvalidArgument(
                    f"step {brief(step.name)} depends on {brief(name)}, which is not in the list: {hint}"
                )
        return sorted({self.places[name] for name in step.depends_on})

    def _order(self) -> list[int]:
        """All places, each behind those it depends on; of those that could be next, the first in the list."""
        self.begin(set())
        order = []
        while (place := self.take()) is not None:
            order.append(place)
            self.finished(place)
        if len(order) < len(self.steps):
            circle = " -> ".join(self._circle(self._left))
            raise InvalidArgument(f"steps wait for each other: {circle}: take one of these out")
        return order

    def _circle(self, left: Sequence[int]) -> list[str]:
        """Names along the dependencies from a step back to itself."""
        # Each step that was never ready waits for another one like it.
        place = next(place for place, count in enumerate(left) if count)
        path: list[int] = []
        while place not in path:
            path.append(place)
            place = next(other for other in self.needs[place] if left[other])
        circle = path[path.index(place) :]
        first = circle.index(min(circle))
        circle = circle[first:] + circle[: first + 1]
        return [self.steps[each].name for each in circle]

    def dependents(self, place: int) -> set[int]:
        """All that depends on a step, directly or not."""
        found: set[int] = set()
        ahead = [place]
        while ahead:
            for user in self.users[ahead.pop()]:
                if user not in found:
                    found.add(user)
                    ahead.append(user)
        return found

    def results(self, place: int, results: Mapping[str, Any]) -> Reachable:
        """Of these, what the step at `place` may read."""
        if not self._before:
            self._before = [0] * len(self.steps)
            for each in self.order:
                for other in self.needs[each]:
                    self._before[each] |= self._before[other] | 1 << other
        return Reachable(self, self._before[place], self.steps[place].name, results)

    # -- a pass: `begin`, then each place is taken once

    def begin(self, done: set[int]) -> None:
        """Nothing is taken yet, and these have their results."""
        # One that is done never comes to 0, also where it depends on others by now.
        self._left: list[int] = [
            -1 if place in done else sum(other not in done for other in needs) for place, needs in enumerate(self.needs)
        ]
        self._ready: list[int] = [place for place, count in enumerate(self._left) if not count]

    def take(self) -> int | None:
        """The first place in the list that can begin, if there is one."""
        return heappop(self._ready) if self._ready else None

    def next_after(self, place: int) -> int | None:
        """The same, or one that waits for nothing but this place, which is about to be finished."""
        first = next((user for user in self.users[place] if self._left[user] == 1), None)
        if first is None or (self._ready and self._ready[0] < first):
            return self.take()
        self._left[first] = -1
        return first

    def finished(self, place: int) -> None:
        """This one has its result: others may begin."""
        for user in self.users[place]:
            self._left[user] -= 1
            if not self._left[user]:
                heappush(self._ready, user)


@stored_as_dict
class Reachable(Results):
    """Results of what a step depends on, directly or not; others are refused, as they may be there or not."""

    def __init__(self, graph: Graph, mask: int, step: str, results: Mapping[str, Any]) -> None:
        super().__init__(results)
        self._graph, self._mask, self._step = graph, mask, step

    def __getitem__(self, name: str) -> Any:
        place = self._graph.places.get(name)
        if place is None:
            raise KeyError(name)
        if not self._mask >> place & 1:
            raise InvalidArgument(
                f"step {self._step!r} reads the result of {brief(name)}, on which it does not depend: name it "
                "in depends_on"
            )
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        place = self._graph.places.get(name) if isinstance(name, str) else None
        return place is not None and bool(self._mask >> place & 1)

    def __iter__(self) -> Iterator[str]:
        return (step.name for place, step in enumerate(self._graph.steps) if self._mask >> place & 1)

    def __len__(self) -> int:
        return self._mask.bit_count()
