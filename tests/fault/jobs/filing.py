"""Writers of documents in files: filing.py DIRECTORY writes | counts N | appends NAME N | fills | looks.

`writes` never ends by itself: it says "done N" for each commit that was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Awaitable
from typing import Any

from agent_runtime_core._engines.base import INSTALL, Op
from agent_runtime_core.errors import AgentRuntimeError
from agent_runtime_core.persistence.documents.base import Collection, Document, Entry
from agent_runtime_core.persistence.documents.files import FileDocuments
from tests.fault.jobs.effects import say


def number(document: Document | None) -> int:
    return 0 if document is None else int(document.text)


async def writes(documents: FileDocuments) -> None:
    """Numbers in order: each in two headers that are equal, and as a message; some moved, some taken away."""
    headers, messages = Collection(documents, "project", "header"), Collection(documents, "project", "message")
    n = number(await headers.get("one"))
    while True:
        n += 1
        text, key = str(n), f"talk/{n}"
        await headers.write(
            headers.put(Entry("one", text, rank=float(n))),  # renamed each time
            headers.put(Entry("two", text)),  # stays where it is
            messages.add(Entry(key, text, "talk")),
            *([messages.delete(f"talk/{n - 5}")] if n > 5 and n % 2 else []),
        )
        await headers.write(headers.put(Entry("alone", text)))
        say(f"done {n}")


async def counts(documents: FileDocuments, times: int) -> None:
    table = Collection(documents, "project", "counter")

    def one_more(there: Document | None) -> Entry:
        # Two that write the same text over the same version would both be told that it is there.
        return Entry("n", json.dumps([1 if there is None else json.loads(there.text)[0] + 1, os.getpid()]))

    for _ in range(times):
        await table.change("n", one_more)


async def appends(documents: FileDocuments, name: str, times: int) -> None:
    """As many appenders as the name has words, in turns of one loop."""
    table = Collection(documents, "project", "message")

    async def append(who: str) -> None:
        for n in range(times):
            await table.write(table.add(Entry(f"talk/{who}/{n}", f'["{who}", {n}]', "talk")))

    async with asyncio.TaskGroup() as group:
        for who in name.split(","):
            group.create_task(append(who))


async def outcome(doing: Awaitable[Any]) -> Any:
    """What came of it, or the name of its error."""
    try:
        found = await doing
    except AgentRuntimeError as error:
        return type(error).__name__
    return [each.text for each in found] if found and isinstance(found[0], Document) else found


async def fills(documents: FileDocuments) -> None:
    """Files may grow to ever fewer bytes: what comes of commits, and what is there then."""
    table = Collection(documents, "project", "memory")
    await table.write(table.put(Entry("a", "1")), table.put(Entry("b", "1")))
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in (3000, 400, 150, 20, 0):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
        told = {
            "one": await outcome(table.write(table.put(Entry("a", "x" * 4000)))),
            "two": await outcome(table.write(table.put(Entry("a", "2")), table.put(Entry("b", "x" * 4000)))),
            "fence": await outcome(documents.commit(None, [Op(INSTALL, ("r" * 4000, "1"))])),
            "there": await outcome(table.many(["a", "b"])),
        }
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        again = [table.put(Entry("a", "1")), table.put(Entry("b", "1"))]
        told["after"] = len(await table.write(*again))
        say(json.dumps(told))


async def looks(documents: FileDocuments) -> None:
    """As somebody who may only read there."""
    if os.geteuid() == 0:
        os.setuid(65534)
    table = Collection(documents, "project", "memory")
    for _ in range(3):
        sys.stdin.readline()
        told = [
            await outcome(table.many(["a"])),
            await outcome(table.find()),
            await outcome(table.write(table.put(Entry("a", "2")))),
        ]
        say(json.dumps(told))


async def main(root: str, job: str, *rest: str) -> None:
    documents = FileDocuments(root)
    documents.patience = 60.0
    say("ready")
    match job:
        case "writes":
            await writes(documents)
        case "counts":
            await counts(documents, int(rest[0]))
        case "appends":
            await appends(documents, rest[0], int(rest[1]))
        case "fills":
            await fills(documents)
        case "looks":
            await looks(documents)
    await documents.close()
    say("over")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
