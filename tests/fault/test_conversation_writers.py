"""Several processes that append to one conversation: no message lost, and those of each in its order.

The long form: pytest tests/fault/test_conversation_writers.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core.persistence.models import Conversation
from tests.contract.persistence.stores import TECHNOLOGIES
from tests.fault.jobs.appends import conversations
from tests.support.backends import SERVERS
from tests.support.processes import Child

LONG = 280.0  # seconds that all of the appends may take

log = logging.getLogger("fault")

SHARED = [each for each in TECHNOLOGIES if each.id != "memory"]


@pytest.fixture(params=SHARED)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    if request.param in SERVERS:
        return request.param, request.getfixturevalue(f"{request.param}_url")
    return request.param, str(tmp_path / "conversations")


async def appended(place: tuple[str, str], processes: int, each: int) -> None:
    store = conversations(*place)
    conversation = Conversation(title="crowd")
    await store.save(conversation)
    with ExitStack() as stack:
        children = [
            stack.enter_context(Child("appends", *place, conversation.id, who, each)) for who in range(processes)
        ]
        for child in children:
            assert await child.aline() == "ready"
        began = time.monotonic()
        for child in children:
            child.tell("go")
        said = [await asyncio.to_thread(child.poll_line, LONG) for child in children]
        assert said == [str(each)] * processes
        took = time.monotonic() - began
    found: list[Any] = [message.content for message in await store.get_messages(conversation.id)]
    await store.close()
    log.info("%d processes appended %d messages on %s in %.1f s", processes, len(found), place[0], took)
    assert len(found) == processes * each
    for who in range(processes):
        assert [n for name, n in found if name == str(who)] == list(range(each))


async def test_processes_append_to_one_conversation(place: tuple[str, str]) -> None:
    await appended(place, 4, 50)


@pytest.mark.slow
async def test_sixteen_processes_append_500_messages_each(place: tuple[str, str]) -> None:
    await appended(place, 16, 500)
