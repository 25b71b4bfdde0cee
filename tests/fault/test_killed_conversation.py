"""SIGKILL at random moments of runs that share a conversation: its history holds each message once, in order.

The long form, 100 kills for each kind of store: pytest tests/fault/test_killed_conversation.py -m slow
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from agent_runtime_core.portal import call
from tests.fault.jobs.chatting import CHAT, stores
from tests.support.backends import POSTGRES, SERVERS
from tests.support.processes import Child

log = logging.getLogger("fault")

TURNS = 6
STORES = ["files", "default", "own", "sqlite", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]


def ordeal(where: str, db: Path, directory: Path, number: int, kills: int, pause: float) -> int:
    """Talk to the end, killed up to so many times; how often it was."""
    random, killed = Random(f"{where} {number}"), 0
    while True:
        with Child("chatting", where, db, directory, TURNS, pause) as child:
            child.expect("ready")
            until = time.monotonic() + (random.uniform(0, pause * 2 * TURNS) if killed < kills else 30.0)
            said: str | None = ""
            while said is not None and not said.startswith("done"):
                said = child.poll_line(max(until - time.monotonic(), 0.0))
            if said is None:
                assert killed < kills, "it came to no end"
                assert child.kill() or child.ended() == 0, "it ended by itself, and not well"
                killed += 1
                continue
            assert child.ended() == 0
            return killed


async def history(where: str, db: Path, directory: Path) -> list[tuple[str, object]]:
    manager = stores(where, str(db), str(directory))
    try:
        told = await manager.conversations.get_messages(CHAT)
        assert told == await manager.conversations.history(CHAT)
        return [(each.role, each.content) for each in told]
    finally:
        await manager.close()


def whole() -> list[tuple[str, object]]:
    said: list[tuple[str, object]] = []
    for turn in range(TURNS):
        said += [("user", f"question {turn}"), ("assistant", f"answer to question {turn}, {2 * turn + 1}th")]
    return said


def check(where: str, url: str, tmp_path: Path, wanted: int, pause: float, *, at_once: int = 4, each: int = 10) -> int:
    """As many conversations, each killed at most `each` times, as it takes for that many kills; how many it were."""

    def one(number: int) -> int:
        directory = tmp_path / f"{number}"
        directory.mkdir()
        place = f"{url}_{number}" if where in SERVERS else where
        db = directory / "runs.db"
        killed = ordeal(place, db, directory, number, each, pause)
        assert call(history, place, db, directory) == whole()
        return killed

    killed, number = 0, 0
    with ThreadPoolExecutor(at_once) as pool:
        while killed < wanted:
            killed += sum(pool.map(one, range(number, number + at_once)))
            number += at_once
    log.info("%d kills over %d conversations on %s", killed, number, where)
    return killed


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    where = request.node.callspec.params["where"]
    return str(request.getfixturevalue(f"{where}_url")) if where in SERVERS else ""


@pytest.mark.parametrize("where", STORES)
def test_each_message_is_in_the_history_once(where: str, url: str, tmp_path: Path) -> None:
    assert check(where, url, tmp_path, 3, 0.01, at_once=2, each=3) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("where", STORES)
def test_each_message_is_in_the_history_once_over_a_hundred_kills(where: str, url: str, tmp_path: Path) -> None:
    assert check(where, url, tmp_path, 100, 0.02) >= 100
