"""Places for steps: never more than there are, in order of arrival, also where their number changes."""

from __future__ import annotations

import asyncio

from agent_runtime_core.turns.processor import StepSlots


class Crowd:
    """Tasks that take a place each, and give it back when they are told to."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.slots = StepSlots()
        self.inside: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    async def come(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number] = asyncio.Event()
            self.tasks[number] = asyncio.create_task(self._stay(number))
        await self.settle()

    async def _stay(self, number: int) -> None:
        async with self.slots.acquired(lambda: self.most):
            self.inside.append(number)
            try:
                await self.gates[number].wait()
            finally:
                self.inside.remove(number)

    async def go(self, *numbers: int) -> None:
        for number in numbers:
            self.gates[number].set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_places_are_taken_in_order_of_arrival() -> None:
    crowd = Crowd(2)
    await crowd.come(1, 2, 3, 4)
    assert crowd.inside == [1, 2]
    await crowd.go(2)
    assert crowd.inside == [1, 3]
    await crowd.go(1, 3)
    assert crowd.inside == [4]
    await crowd.go(4)


async def test_their_number_may_change_while_they_are_taken() -> None:
    crowd = Crowd(1)
    await crowd.come(1, 2, 3)
    crowd.most = 3
    await crowd.come(4)
    assert crowd.inside == [1, 2, 3]
    crowd.most = 1
    await crowd.go(1, 2)
    assert crowd.inside == [3]
    await crowd.go(3)
    assert crowd.inside == [4]
    await crowd.go(4)


async def test_who_is_cancelled_keeps_no_place() -> None:
    crowd = Crowd(1)
    await crowd.come(1, 2, 3)
    crowd.tasks[2].cancel()
    await crowd.settle()
    crowd.gates[1].set()
    await asyncio.wait({crowd.tasks[1]})
    crowd.tasks[3].cancel()  # in the moment in which it is given one
    await crowd.settle()
    assert crowd.inside == []
    await crowd.come(4)
    assert crowd.inside == [4]
    await crowd.go(4)
