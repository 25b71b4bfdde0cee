"""A third party's backends on `ThreadedEngine` keep the contracts, also as several objects, and pass `conformance`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, AgentRuntime, RunResult, StepExecutionError
from agent_runtime_core._core.clock import SYSTEM
from agent_runtime_core.engines import Op
from agent_runtime_core.errors import InvalidArgument, StorageBusy
from agent_runtime_core.queue import ServerLeases, operation_set
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing.clock import RunClock
from agent_runtime_core.testing.contracts import events, queue, runs, state
from tests.contract.third_party.their_engine import TheirEngine
from tests.contract.third_party.their_sql_bus import TheirSQLBus
from tests.contract.third_party.their_sql_queue import TheirSQLQueue, TheirSQLRows
from tests.contract.third_party.their_sql_store import TheirSQLStore
from tests.support.command_line import process

ROOT = Path(__file__).parents[2]
THREE = (TheirSQLQueue, TheirSQLBus, TheirSQLStore)
SUITES: dict[str, tuple[Any, tuple[type[Any], ...]]] = {
    "queue": (queue, (TheirSQLQueue,)),
    "events": (events, (TheirSQLBus,)),
    "state": (state, (TheirSQLStore,)),
    "runs": (runs, THREE),
}


class Places:
    """Opens backends in new files, and again."""

    def __init__(self, kinds: tuple[type[Any], ...], folder: Path) -> None:
        self.kinds, self.folder, self.numbers = kinds, folder, itertools.count()
        self.made: dict[int, tuple[Any, str]] = {}

    def make(self, clock: Any = SYSTEM, **options: Any) -> Any:
        return self.opened(str(self.folder / f"{next(self.numbers)}.db"), {"clock": clock, **options})

    def opened(self, place: str, options: dict[str, Any]) -> Any:
        made = tuple(kind(place, **options) for kind in self.kinds)
        self.made[id(made if len(made) > 1 else made[0])] = made, place
        return made if len(made) > 1 else made[0]

    def again(self, backends: Any) -> Any:
        made, place = self.made[id(backends)]
        # With another clock it is another engine, as in another process.
        return self.opened(place, {"clock": RunClock(made[0].clock, ("uuid4",) * len(self.made))})


def cases(name: str) -> list[Any]:
    return [pytest.param(name, case, id=f"{name}-{case.__name__}") for case in SUITES[name][0].CASES]


def several(name: str) -> list[Any]:
    return [pytest.param(name, case, id=f"{name}-{case.__name__}") for case in SUITES[name][0].CASES.several]


@pytest.mark.parametrize(("name", "case"), list(itertools.chain.from_iterable(map(cases, SUITES))))
async def test_contract(name: str, case: Any, tmp_path: Path) -> None:
    await case(Places(SUITES[name][1], tmp_path).make)


@pytest.mark.parametrize(("name", "case"), list(itertools.chain.from_iterable(map(several, SUITES))))
async def test_several_objects(name: str, case: Any, tmp_path: Path) -> None:
    places = Places(SUITES[name][1], tmp_path)
    await case(places.make, places.again)


@pytest.mark.parametrize("kind", THREE, ids=lambda kind: kind.__name__)
def test_conformance_passes(kind: type[Any], tmp_path: Path) -> None:
    target, option = f"{kind.__module__}:{kind.__name__}", f"place={tmp_path}/{{n}}.db"
    done = process("conformance", target, "--agent-path", str(ROOT), "--option", option, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "not run:" not in done.stdout


def test_the_queue_is_short() -> None:
    text = Path(__file__).with_name("third_party").joinpath("their_sql_queue.py").read_text("utf-8")
    assert len(text.splitlines()) <= 120


async def test_backends_at_one_place_share_an_engine_until_the_last_is_closed(tmp_path: Path) -> None:
    place = str(tmp_path / "one.db")
    one, other = TheirSQLQueue(place), TheirSQLBus(place)
    engine = one.engine
    assert other.engine is engine
    await one.close()
    await one.close()
    assert await other.get_events("run-1") == []
    await other.close()
    assert TheirSQLQueue(place).engine is not engine


def test_a_backend_without_a_place_names_the_way_to_pass_it() -> None:
    with pytest.raises(InvalidArgument, match="place must be passed"):
        TheirSQLQueue()


def test_an_error_shows_no_password() -> None:
    assert TheirEngine("key", "their://user:secret@host/db", SYSTEM).location == "their://***@host/db"


class Books(AgentRuntime):
    key = "books"

    async def run(self, ctx: Any) -> RunResult:
        def insert(conn: Any) -> int:
            conn.execute("CREATE TABLE books (title)")
            return int(conn.execute("INSERT INTO books VALUES ('Dune')").rowcount)

        def fail(conn: Any) -> None:
            conn.execute("INSERT INTO books VALUES ('Emma')")
            raise ConnectionError("another server is gone")

        stored = await ctx.transaction("insert", insert)
        with pytest.raises(StepExecutionError, match="another server is gone"):
            await ctx.transaction("fail", fail)
        return RunResult({"stored": stored})


async def test_a_function_of_a_transaction_commits_with_its_step_and_rolls_back_alone(tmp_path: Path) -> None:
    place, registry = str(tmp_path / "one.db"), Registry()
    registry.register(Books())
    async with AgentRunner(TheirSQLQueue(place), TheirSQLBus(place), TheirSQLStore(place), registry=registry) as runner:
        result = await runner.execute("books")
        titles = await runner.queue.engine.read(  # type: ignore[attr-defined]
            lambda conn: [title for (title,) in conn.execute("SELECT title FROM books")]
        )
    assert result.final_output == {"stored": 1}
    assert titles == ["Dune"]


class ServerClock:
    """The clock of a server."""

    now = 1000.0


class TimedEngine(TheirEngine):
    server_clock = True

    def begin(self, conn: Any, *, writes: bool) -> float:
        super().begin(conn, writes=writes)
        return ServerClock.now


class TimedRows(ServerLeases, TheirSQLRows):
    pass


class TimedQueue(TheirSQLQueue):
    engine_class = TimedEngine
    operation_sets = (operation_set(TimedRows),)


async def test_leases_are_measured_by_the_clock_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "one.db")
    one = TimedQueue(place)
    monkeypatch.setattr(SYSTEM, "boot", lambda: 5e9)  # of another machine
    await one.enqueue("run-1", "agent", {})
    [row] = await one.claim_rows("w1", 60)
    assert row.lease_until == 1060.0
    for now, count in ((1059.0, 0), (1061.0, 1)):
        monkeypatch.setattr(ServerClock, "now", now)
        assert len(await one.claim_rows("w2", 60)) == count
    [(kept, _)] = (await one.engine.commit(None, [Op("queue.beat", ([(row.run_id, row.claim_id)], 60.0))]))[0]
    assert not kept
    await one.close()


async def test_such_a_queue_keeps_the_contract_with_the_clock_of_a_test(tmp_path: Path) -> None:
    places = Places((TimedQueue,), tmp_path)
    await queue.check(places.make, again=places.again)


class CutEngine(TheirEngine):
    """Its connection is lost after the next commit: the reply is, too."""

    is_cut = False

    def end(self, conn: Any) -> None:
        super().end(conn)
        if self.is_cut:
            self.is_cut = False
            raise ConnectionResetError("the reply was lost")

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, ConnectionResetError)


class CutQueue(TheirSQLQueue):
    engine_class = CutEngine


async def test_a_claim_whose_reply_was_lost_leaves_its_run_to_the_next_claim(tmp_path: Path) -> None:
    queue = CutQueue(str(tmp_path / "one.db"))
    await queue.enqueue("run-1", "agent", {})
    queue.engine.is_cut = True  # type: ignore[attr-defined]
    with pytest.raises(StorageBusy, match="the reply to a claim was lost"):
        await queue.claim_rows("w1", 60)
    [row] = await queue.claim_rows("w1", 60)
    assert (row.run_key, row.crashes) == ("run-1", 0)
    await queue.close()
