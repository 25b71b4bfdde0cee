"""Messages sent at random moments to an agent that is killed: each is in the history once, in order.

The long form, 200 messages on each kind of store: pytest tests/fault/test_sent_messages.py -m slow
"""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agent_runtime_core import AgentRunner
from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.errors import IllegalTransition
from tests.fault.jobs.steered import CALLS, CHAT
from tests.support.backends import SERVERS, backends
from tests.support.processes import PATIENCE, Child

log = logging.getLogger("fault")

KINDS = backends(["sqlite", "redis", "postgres"], default=["sqlite", "redis"])
KILLS = 5  # of each run
MESSAGES = 20  # to each run


class Ordeal:
    """One run of the agent: sends it messages and kills it at random moments."""

    def __init__(self, url: str, number: int) -> None:
        self.url = url
        self.random = Random(number)
        self.kills = 0
        self.unsent = [f"message {at}" for at in range(MESSAGES)]
        self.accepted: list[str] = []
        self.rejected: list[str] = []

    async def run(self) -> None:
        async with AgentRunner.open(self.url) as runner:
            said = None
            while said is None:
                with Child("steered", self.url) as child:
                    said = await self.follow(runner, child)
                    if said is None:
                        assert await asyncio.to_thread(child.kill) or child.ended() == 0, "it failed"
                        self.kills += 1
            while self.unsent:
                await self.send(runner)
            self.check(said)
            chat = conversation_id(CHAT)
            assert chat is not None
            stored = await runner.persistence.conversations.history(chat)
            self.check([{"role": each.role, "content": each.content} for each in stored])

    async def follow(self, runner: AgentRunner, child: Child) -> list[Any] | None:
        """Let the agent work until it is done, and return its messages; or until a moment to kill it, and return None.

        A run that was not killed often enough is killed in its last call.
        """
        line: str | None = None
        while True:
            line = line or await asyncio.to_thread(child.poll_line, PATIENCE)
            assert line is not None, f"silent: {child.process.poll()}"
            word, _, rest = line.partition(" ")
            if word == "done":
                messages: list[Any] = json.loads(rest)
                return messages
            await self.send_some(runner)
            if word == "last" and self.kills < KILLS:
                return None
            child.tell(rest)
            await self.send_some(runner)
            line = None
            if self.kills < KILLS and self.random.random() < 0.6:
                line = await asyncio.to_thread(child.poll_line, self.random.uniform(0, 0.03))
                if line is None or self.random.random() < 0.5:
                    return None

    async def send_some(self, runner: AgentRunner) -> None:
        for _ in range(self.random.choice([0, 0, 1, 1, 2])):
            if self.unsent:
                await self.send(runner)

    async def send(self, runner: AgentRunner) -> None:
        text = self.unsent.pop(0)
        when = self.random.choice(["next_turn", "next_turn", "interrupt"])
        try:
            await runner.send("steered", text, when=when, message_id=text)
        except IllegalTransition:
            self.rejected.append(text)
        else:
            self.accepted.append(text)

    def check(self, messages: list[Any]) -> None:
        texts = [each["content"] for each in messages if each["role"] == "user"]
        assert texts == ["hello", *self.accepted]
        calls = [call["id"] for each in messages for call in each.get("tool_calls") or ()]
        assert len(calls) in (0, CALLS - 1)  # a stored message has its calls elsewhere


async def ordeals(url: str, wanted: int) -> None:
    """As many runs, two at once, as it takes for that many messages that were accepted."""
    accepted = rejected = kills = number = 0
    while accepted < wanted:
        both = [Ordeal(_place(url, number + at), number + at) for at in range(2)]
        await asyncio.gather(*(each.run() for each in both))
        number += 2
        accepted += sum(len(each.accepted) for each in both)
        rejected += sum(len(each.rejected) for each in both)
        kills += sum(each.kills for each in both)
    log.info("%d messages accepted, %d rejected, %d kills, %d runs", accepted, rejected, kills, number)
    assert kills == KILLS * number


def _place(url: str, number: int) -> str:
    return f"{url}_{number}" if "://" in url else f"{url}/{number}.db"


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    kind = request.node.callspec.params["kind"]
    return str(request.getfixturevalue(f"{kind}_url")) if kind in SERVERS else str(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
async def test_each_message_is_in_the_history_once(kind: str, place: str) -> None:
    await ordeals(place, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_each_of_200_messages_is_in_the_history_once(kind: str, place: str) -> None:
    await ordeals(place, 200)
