"""What buses over our own engines share: who follows is woken by the engine, and closing lets go of it."""

from __future__ import annotations

from collections.abc import Callable

from .._engines.backend import EngineStore
from .base import EventBus


class BackedBus(EngineStore, EventBus):
    """A bus on an engine that keeps the journal's records too, whose events need no copy."""

    derives = True

    def listen(self, topic: str, wake: Callable[[], None]) -> Callable[[], None]:
        return self.engine.listen(topic, wake)

    async def close(self) -> None:
        if not self._closed:
            await EventBus.close(self)
            await self.engine.close()
