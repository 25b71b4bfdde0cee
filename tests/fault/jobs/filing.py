"""Writers of documents in files: filing.py DIRECTORY writes | counts N | appends NAME N.

`writes` never ends by itself: it says "done N" for each commit that was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from agent_runtime_core.persistence.documents.base import Document, Entry, Table
from agent_runtime_core.persistence.documents.files import FileDocuments
from tests.fault.jobs.effects import say


def number(document: Document | None) -> int:
    return 0 if document is None else int(document.text)


async def writes(documents: FileDocuments) -> None:
    """Numbers in order: each in two headers that are equal, and as a message; some moved, some taken away."""
    headers, messages = Table(documents, "project", "header"), Table(documents, "project", "message")
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
    table = Table(documents, "project", "counter")

    def one_more(there: Document | None) -> Entry:
        # Two that write the same text over the same version would both be told that it is there.
        return Entry("n", json.dumps([1 if there is None else json.loads(there.text)[0] + 1, os.getpid()]))

    for _ in range(times):
        await table.change("n", one_more)


async def appends(documents: FileDocuments, name: str, times: int) -> None:
    """As many appenders as the name has words, in turns of one loop."""
    table = Table(documents, "project", "message")

    async def append(who: str) -> None:
        for n in range(times):
            await table.write(table.add(Entry(f"talk/{who}/{n}", f'["{who}", {n}]', "talk")))

    async with asyncio.TaskGroup() as group:
        for who in name.split(","):
            group.create_task(append(who))


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
    await documents.close()
    say("over")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
