"""The dependencies of a step list: validated before any step runs, then used to find the steps that can start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from .._core.codec.tagged import stored_as_dict
from .._core.validation import Shown, must, unknown
from ..errors import InvalidArgument, brief
from .model import Results, Step


def is_graph(steps: Sequence[Step]) -> bool:
    """Return whether any step declares dependencies."""
    return any(step.depends_on for step in steps)


class Graph:
    """The steps of a list by position, and the dependencies between them.

    Call `begin` before each pass; then `take` and `next_after` return each position once.

    Attributes:
        steps: The steps.
        positions: Positions by step name.
        needs: For each position, the positions that it depends on.
        users: For each position, the positions that depend on it.
        order: All positions, each after those that it depends on.

    Raises:
        InvalidArgument: A dependency is not in the list, or dependencies form a cycle, named as in `a -> b -> a`.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps: Sequence[Step] = steps
        self.positions: dict[str, int] = {step.name: position for position, step in enumerate(steps)}
        self.needs: list[list[int]] = [self._needs(step) for step in steps]
        self.users: list[list[int]] = [[] for _ in steps]
        for position, needs in enumerate(self.needs):
            for other in needs:
                self.users[other].append(position)
        self.order: list[int] = self._order()
        self._before: list[int] = []  # for each position, the bits of all that it depends on

    def _needs(self, step: Step) -> list[int]:
        for name in step.depends_on:
            if name not in self.positions:
                fix = "Name a step of the same list"
                where = f"step {brief(step.name)}: depends_on"
                raise InvalidArgument(f"{where}: {unknown('step', name, self.positions, fix)}")
        return sorted({self.positions[name] for name in step.depends_on})

    def _order(self) -> list[int]:
        """Return all positions, each after those that it depends on. Of several that may be next, the lowest is."""
        self.begin(set())
        order = []
        while (position := self.take()) is not None:
            order.append(position)
            self.finished(position)
        if len(order) < len(self.steps):
            cycle = " -> ".join(self._cycle(self._left))
            fix = "Remove one of these dependencies"
            raise must("depends_on", "not form a cycle", Shown(cycle), fix)
        return order

    def _cycle(self, left: Sequence[int]) -> list[str]:
        """Return the names along the dependencies from a step back to itself."""
        # Each step that never became ready waits for another such step.
        position = next(position for position, count in enumerate(left) if count)
        path: list[int] = []
        while position not in path:
            path.append(position)
            position = next(other for other in self.needs[position] if left[other])
        cycle = path[path.index(position) :]
        first = cycle.index(min(cycle))
        cycle = cycle[first:] + cycle[: first + 1]
        return [self.steps[each].name for each in cycle]

    def dependents(self, position: int) -> set[int]:
        """Return the positions that depend on this position, directly or indirectly."""
        found: set[int] = set()
        ahead = [position]
        while ahead:
            for user in self.users[ahead.pop()]:
                if user not in found:
                    found.add(user)
                    ahead.append(user)
        return found

    def results(self, position: int, results: Mapping[str, Any]) -> Reachable:
        """Return the results that the step at this position may read."""
        if not self._before:
            self._before = [0] * len(self.steps)
            for each in self.order:
                for other in self.needs[each]:
                    self._before[each] |= self._before[other] | 1 << other
        return Reachable(self, self._before[position], self.steps[position].name, results)

    # -- one pass

    def begin(self, done: set[int]) -> None:
        """Start a pass in which the steps at these positions are completed already."""
        # -1, so that a completed step never becomes ready, even if it depends on others by now.
        self._left: list[int] = [
            -1 if position in done else sum(other not in done for other in needs)
            for position, needs in enumerate(self.needs)
        ]
        self._ready: list[int] = [position for position, count in enumerate(self._left) if not count]

    def take(self) -> int | None:
        """Return the lowest position that can start, or None."""
        return heappop(self._ready) if self._ready else None

    def next_after(self, position: int) -> int | None:
        """Return the lowest position that can start once this position is finished, or None."""
        first = next((user for user in self.users[position] if self._left[user] == 1), None)
        if first is None or (self._ready and self._ready[0] < first):
            return self.take()
        self._left[first] = -1
        return first

    def finished(self, position: int) -> None:
        """Note that the step at this position is finished, so that others may start."""
        for user in self.users[position]:
            self._left[user] -= 1
            if not self._left[user]:
                heappush(self._ready, user)


@stored_as_dict
class Reachable(Results):
    """The results that a step depends on, directly or indirectly.

    Reading another result raises InvalidArgument, because it may or may not exist yet.
    """

    def __init__(self, graph: Graph, mask: int, step: str, results: Mapping[str, Any]) -> None:
        super().__init__(results)
        self._graph, self._mask, self._step = graph, mask, step

    def __getitem__(self, name: str) -> Any:
        position = self._graph.positions.get(name)
        if position is None:
            raise KeyError(name)
        if not self._mask >> position & 1:
            where = f"step {self._step!r}"
            raise must(where, "depend on each step whose result it reads", name, "Add it to depends_on")
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        position = self._graph.positions.get(name) if isinstance(name, str) else None
        return position is not None and bool(self._mask >> position & 1)

    def __iter__(self) -> Iterator[str]:
        return (step.name for position, step in enumerate(self._graph.steps) if self._mask >> position & 1)

    def __len__(self) -> int:
        return self._mask.bit_count()
