"""What is left of documents in memory that have expired, or whose space was dropped."""

from __future__ import annotations

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core.persistence.documents.base import Collection, Entry
from agent_runtime_core.persistence.documents.memory import MemoryDocuments
from agent_runtime_core.testing import VirtualClock


def left(engine: MemoryEngine) -> dict[str, int]:
    """How many entries its tables have, those of one level below counted too."""
    return {
        name: len(table) + sum(len(each) for each in table.values() if isinstance(each, dict))
        for name, table in engine.tables.items()
        if name.startswith("document")
    }


async def test_the_expired_are_swept_by_later_writes() -> None:
    clock = VirtualClock()
    engine = MemoryEngine(clock)
    table = Collection(MemoryDocuments(engine=engine), "project", "thing")
    ends = (clock.wall() + 60, clock.wall() + 1000)
    await table.write(*(table.put(Entry(f"k{n}", "", expires=ends[n % 2], words="w")) for n in range(20)))
    clock.advance(100)
    for n in range(10):
        await table.write(table.put(Entry("kept", str(n))))
    assert left(engine) == {"documents": 12, "document_notes": 12, "document_ends": 10, "document_ranks": 1}
    assert len(await table.find()) == 11


async def test_a_dropped_space_leaves_nothing() -> None:
    engine = MemoryEngine(VirtualClock())
    documents = MemoryDocuments(engine=engine)
    for n in range(5):
        table = Collection(documents, f"session:{n}", "thing", 60.0)
        await table.write(table.put(Entry("a", "", words="w")), table.add(Entry("b", "", "g")))
        await documents.drop(table.space)
    assert left(engine) == {"documents": 0, "document_notes": 0, "document_ends": 0, "document_ranks": 0}
