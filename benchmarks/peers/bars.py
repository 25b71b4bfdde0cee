"""What is measured in which row, and what is asked of ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .contenders import BUSES, QUEUES, Contender

SECONDS = 5.0  # at most, of one drain or one series; a slow one is measured by what it did until then


@dataclass(frozen=True)
class Shape:
    """One figure of each contender, from `full` things or `tiny` ones; of times the `least_is_best`."""

    name: str
    measure: str
    unit: str
    full: int
    tiny: int
    arguments: Mapping[str, Any]
    least_is_best: bool = False
    against: str = ""  # the shape whose figure of the same contender it is also compared with
    elsewhere: bool = False  # asked of those only whom another process can hear
    later: bool = False  # asked of those only that keep what they are told

    def better(self, figures: list[float]) -> float:
        return min(figures) if self.least_is_best else max(figures)


@dataclass(frozen=True)
class Bar:
    """On the figure ("figure"), or its ratio to the best peer ("best") or to itself in another shape ("against")."""

    who: str
    of: str
    least: float | None = None
    most: float | None = None

    def __str__(self) -> str:
        sign, limit = (">=", self.least) if self.least is not None else ("<=", self.most)
        return f"{sign} {limit:,}" + {"figure": "", "best": " x the best peer", "against": " x one process"}[self.of]

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class Row:
    kind: str  # "queue" or "bus"
    contenders: tuple[Contender, ...]
    shapes: tuple[Shape, ...]
    bars: Mapping[str, tuple[Bar, ...]]  # by the name of a shape


def _drained(processes: int, concurrency: int, full: int, tiny: int, against: str = "") -> Shape:
    name = f"{processes} process{'es' if processes > 1 else ''} of {concurrency}"
    arguments = {"processes": processes, "concurrency": concurrency, "seconds": SECONDS}
    return Shape(f"drain by {name}", "drain", "jobs/s", full, tiny, arguments, against=against)


ONE, SIXTEEN = _drained(1, 1, 3000, 20), _drained(1, 16, 6000, 20)
FOUR = _drained(4, 16, 12_000, 40, against=SIXTEEN.name)
ENQUEUE = Shape("enqueue one by one", "enqueue", "jobs/s", 5000, 20, {"seconds": SECONDS})
CHAIN = Shape("a chain of 100 steps, a step", "chain", "µs", 100, 10, {}, least_is_best=True)
IDLE = Shape("idle enqueue to start, p50", "idle", "ms", 40, 3, {"seconds": 3 * SECONDS}, least_is_best=True)
LIVE_1 = Shape("live, 1 subscriber", "live", "deliveries/s", 5000, 20, {"subscribers": 1})
LIVE_100 = Shape("live, 100 subscribers", "live", "deliveries/s", 2000, 20, {"subscribers": 100})
REPLAY = Shape("stored, 1 subscriber", "replay", "deliveries/s", 20_000, 20, {}, later=True)
_LISTENING = {"seconds": 3 * SECONDS}
ACROSS = Shape("to another process, p50", "across", "ms", 40, 3, _LISTENING, least_is_best=True, elsewhere=True)

_ON_REDIS = tuple(each for each in QUEUES if each.stands == "redis")
_ON_POSTGRES = tuple(each for each in QUEUES if each.stands == "postgres")
_STEPS = tuple(each for each in _ON_POSTGRES if each.name != "procrastinate")
_ON_SQLITE = tuple(each for each in QUEUES if each.stands == "sqlite")
_POSTGRES, _REDIS, _FULL, _NORMAL, _MEMORY = (
    "ours, PostgreSQL",
    "ours, Redis",
    "ours, SQLite FULL",
    "ours, SQLite NORMAL",
    "ours, memory",
)

ROWS: dict[str, Row] = {
    "redis-drain": Row(
        "queue",
        _ON_REDIS,
        (ONE, SIXTEEN, FOUR),
        {
            SIXTEEN.name: (Bar(_REDIS, "figure", least=5000), Bar(_REDIS, "best", least=1)),
            FOUR.name: (Bar(_REDIS, "against", least=2.5),),
        },
    ),
    "redis-idle": Row("queue", _ON_REDIS, (IDLE,), {IDLE.name: (Bar(_REDIS, "best", most=1),)}),
    "redis-enqueue": Row("queue", _ON_REDIS, (ENQUEUE,), {}),
    "postgres-drain": Row(
        "queue", _ON_POSTGRES, (ONE, SIXTEEN, FOUR), {SIXTEEN.name: (Bar(_POSTGRES, "best", least=2),)}
    ),
    "postgres-chain": Row("queue", _STEPS, (CHAIN,), {CHAIN.name: (Bar(_POSTGRES, "best", most=0.67),)}),
    "postgres-idle": Row("queue", _ON_POSTGRES, (IDLE,), {IDLE.name: (Bar(_POSTGRES, "figure", most=15),)}),
    "sqlite-drain": Row(
        "queue",
        _ON_SQLITE,
        (ONE, SIXTEEN, FOUR),
        {
            ONE.name: (Bar(_FULL, "figure", least=1800),),
            SIXTEEN.name: (
                Bar(_FULL, "figure", least=5000),
                *(Bar(each, "best", least=1) for each in (_FULL, _NORMAL)),
            ),
            FOUR.name: tuple(Bar(each, "against", least=1) for each in (_FULL, _NORMAL)),
        },
    ),
    "sqlite-idle": Row("queue", _ON_SQLITE, (IDLE,), {}),
    "sqlite-enqueue": Row("queue", _ON_SQLITE, (ENQUEUE,), {}),
    "events": Row(
        "bus",
        BUSES,
        (LIVE_1, LIVE_100, REPLAY, ACROSS),
        {
            LIVE_100.name: (Bar(_MEMORY, "figure", least=4_000_000), Bar(_REDIS, "figure", least=2_000_000)),
            REPLAY.name: (
                Bar(_MEMORY, "figure", least=1_000_000),
                Bar(_FULL, "figure", least=40_000),
                Bar(_REDIS, "figure", least=60_000),
            ),
            ACROSS.name: (Bar(_FULL, "figure", most=2),),
        },
    ),
}
