"""SIGKILL at random moments of a 12-turn tool agent: no recorded call of the model is sent again.

The long form, 100 kills: pytest tests/wire/test_killed_agent.py -m slow -o log_cli=true --log-cli-level=INFO
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fault.jobs.conversing import TURNS
from tests.support.processes import Child, image, lines
from tests.wire.server import Aimock

pytestmark = [pytest.mark.wire, pytest.mark.usefixtures("server")]
log = logging.getLogger("fault")


def script(server: Aimock) -> None:
    """Asks for a number to be noted eleven times, one after the other, and ends."""
    server.reset()
    asked: list[dict[str, Any]] = []
    for number in range(TURNS):
        found = (
            {"toolCallId": f"c{number - 1}"} if number else {"userMessage": "Note the numbers", "hasToolResult": False}
        )
        last = {"content": "all noted"}
        call = {"toolCalls": [{"id": f"c{number}", "name": "note", "arguments": {"number": number}}]}
        asked.append({"match": found, "response": last if number == TURNS - 1 else call})
    server.script(*asked)


def recorded(db: Path) -> int:
    """How many calls of the model the journal has."""
    conn = image(db) if db.exists() and db.stat().st_size else None
    if conn is None:
        return 0
    try:
        if not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'arc_journal'").fetchone():
            return 0
        found: int = conn.execute("SELECT count(*) FROM arc_journal WHERE kind = 'done' AND name = 'model'").fetchone()[
            0
        ]
        return found
    finally:
        conn.close()


def turns_asked(server: Aimock, before: int) -> list[int]:
    """The turn of every request but the first ones: how many answers it had in it."""
    whole = [body for body in server.sent()[before:] if body is not None]  # None: cut while it was sent
    return [sum(m["role"] == "assistant" for m in body["messages"]) for body in whole]


class Job(Child):
    imports = (*Child.imports, "openai")


class Conversation:
    """One run, killed at random moments up to `kills` times and then left to finish."""

    def __init__(self, where: Path, number: int, kills: int, server: Aimock) -> None:
        self.db, self.effects = where / f"{number}.db", where / f"{number}.effects"
        self.random = Random(f"conversation {number}")
        self.kills, self.server = kills, server
        self.killed = self.twice = 0

    def go(self) -> Any:
        script(self.server)
        while True:
            kept, before = recorded(self.db), len(self.server.sent())
            with Job("conversing", self.db, "r", self.server.openai, self.effects) as child:
                child.expect("ready")
                said = child.poll_line(self.random.uniform(0, 0.08)) if self.killed < self.kills else child.line()
                if said is None:
                    self.killed += child.kill()
                    said = child.poll_line(0)
            asked = turns_asked(self.server, before)
            assert all(turn >= kept for turn in asked), "a recorded call of the model was sent again"
            assert asked == list(range(kept, kept + len(asked)))
            if said is not None:
                assert said.startswith("done "), said
                self.check_effects()
                return json.loads(said[5:])

    def check_effects(self) -> None:
        keys: dict[str, set[str]] = {}
        ran = lines(self.effects)
        for number, key in ran:
            keys.setdefault(number, set()).add(key)
        assert sorted(keys, key=int) == [str(n) for n in range(TURNS - 1)]
        assert all(len(found) == 1 for found in keys.values()), "another idempotency key"
        self.twice = len(ran) - len(keys)
        assert self.twice <= self.killed, "at most once more per crash"


def in_pairs(messages: list[Any]) -> bool:
    called = [call["id"] for m in messages for call in m.get("tool_calls") or ()]
    return called == [m["tool_call_id"] for m in messages if m["role"] == "tool"]


def conversations(where: Path, kills: int, server: Aimock) -> None:
    expected = Conversation(where, 0, 0, server).go()
    assert expected["status"] == "succeeded"
    assert len(expected["messages"]) == 2 * TURNS
    assert in_pairs(expected["messages"])
    killed = twice = 0
    number = 1
    while killed < kills:
        one = Conversation(where, number, min(10, kills - killed), server)
        assert one.go() == expected
        killed, twice, number = killed + one.killed, twice + one.twice, number + 1
    log.info("%d kills over %d conversations: %d tool calls ran again, with the same key", killed, number - 1, twice)


def test_a_conversation_killed_at_random_moments_pays_for_nothing_twice(
    sdk: Any, server: Aimock, tmp_path: Path
) -> None:
    sdk("openai")
    conversations(tmp_path, 5, server)


@pytest.mark.slow
def test_100_kills_of_a_conversation(sdk: Any, server: Aimock, tmp_path: Path) -> None:
    sdk("openai")
    conversations(tmp_path, 100, server)
