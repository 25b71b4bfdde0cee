"""Where runs are kept: by URL, by name, or as handed in."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._engines.memory import MemoryEngine
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core.config import RuntimeConfig, configure, get_config
from agent_runtime_core.errors import InvalidArgument, StorageCorrupt, UnknownSetting
from agent_runtime_core.events import EventBus, InMemoryEventBus, SQLiteEventBus, get_event_bus
from agent_runtime_core.persistence import PersistenceManager
from agent_runtime_core.queue import InMemoryQueue, RunQueue, SQLiteQueue, get_queue
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.runner.backends import Backends, configured, open_url, traced
from agent_runtime_core.state import InMemoryStateStore, SQLiteStateStore, StateStore, get_state_store
from agent_runtime_core.testing.clock import VirtualClock


async def test_a_path_or_url_of_a_file_is_three_backends_on_one_engine(tmp_path: Path) -> None:
    path = tmp_path / "a b.db"
    for where in (path, str(path), f"sqlite:///{path}", f"sqlite:///{str(path).replace(' ', '%20')}"):
        queue, bus, state = places = open_url(where, max_retries=7)
        assert isinstance(queue, SQLiteQueue)
        assert isinstance(bus, SQLiteEventBus)
        assert isinstance(state, SQLiteStateStore)
        assert queue.engine is bus.engine is state.engine
        assert Path(queue.engine.path) == path
        assert queue.max_retries == 7
        assert places.durable
        await places.close()
        assert str(path) not in SQLiteEngine._open


async def test_a_relative_url_is_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = open_url("sqlite:///rel.db", durability="normal")
    assert (tmp_path / "rel.db").exists()
    assert places.queue.engine.durability == "normal"  # type: ignore[attr-defined]
    await places.close()


async def test_memory_is_one_engine_each_time() -> None:
    places, others = open_url("memory://"), open_url("memory://")
    assert places.queue.commits is places.bus.commits is places.state.commits
    assert places.queue.commits is not others.queue.commits
    assert not places.durable


@pytest.mark.parametrize("bad", ["sqlite://a.db", "sqlite:///", "mysql://x", "memory2://"])
def test_a_bad_url_is_named_with_the_way_out(bad: str) -> None:
    with pytest.raises(InvalidArgument, match=f"store URL must .*'{bad}'"):
        open_url(bad)


@pytest.mark.parametrize(
    ("bad", "way_out"),
    [
        ("sqlite:///x.db?foo=1", r"have no options.*sqlite:///x\.db, and %3F"),
        ("file:x.db?mode=memory", r"not begin with file:.*sqlite:///relative\.db.*memory://"),
        ("file:/x.db", r"not begin with file:.*sqlite:////absolute/path\.db"),
        ("FILE:x.db", "not begin with file:"),
        ("file:///x.db", "not begin with file:"),
    ],
)
def test_options_and_the_urls_of_sqlite_itself_are_refused_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, way_out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=rf"store URL must (?=.*'{re.escape(bad)}').*{way_out}"):
        open_url(bad)
    with pytest.raises(InvalidArgument, match=rf"store URL must (?=.*'{re.escape(bad)}').*{way_out}"):
        PersistenceManager.open(bad)
    assert not [*tmp_path.iterdir()]


async def test_a_question_mark_in_the_name_of_a_file_is_written_as_a_path_or_encoded(tmp_path: Path) -> None:
    for where in (tmp_path / "a?.db", f"sqlite:///{tmp_path}/a%3F.db"):
        await (places := open_url(where)).close()
        assert Path(places.queue.engine.path) == tmp_path / "a?.db"  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_read_is_not_kept_open(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"nonsense" * 1000)
    with pytest.raises(StorageCorrupt):
        open_url(path)
    assert str(path) not in SQLiteEngine._open


async def test_the_configuration_decides_what_is_not_handed_in(tmp_path: Path) -> None:
    places = configured(get_config())
    assert isinstance(places.queue, InMemoryQueue)
    assert isinstance(places.state, InMemoryStateStore)
    assert places.queue.engine is places.state.engine
    queue = InMemoryQueue()
    places = configured(get_config(), queue)
    assert places.queue is queue
    assert places.bus.commits is places.state.commits is queue.engine
    bus = InMemoryEventBus()
    assert configured(get_config(), None, bus).state.commits is bus.engine

    config = configure(backend_url=f"sqlite:///{tmp_path}/a.db")
    places = configured(config)
    assert isinstance(places.bus, SQLiteEventBus)
    await places.close()
    places = configured(config, queue)
    assert places.queue is queue
    assert isinstance(places.bus, SQLiteEventBus), "the URL stands for what was not handed in"
    assert isinstance(places.state, SQLiteStateStore)
    await places.bus.close()
    await places.state.close()


async def test_the_url_of_the_configuration_is_where_each_factory_looks(tmp_path: Path) -> None:
    # Whatever the settings of the single backends say: what is submitted there is what workers find.
    configure(backend_url=f"sqlite:///{tmp_path}/a.db", queue_backend="redis", durability="normal")
    places = Backends(get_queue(max_retries=5), get_event_bus(), get_state_store())
    engines = [backend.commits for backend in places]
    assert all(isinstance(engine, SQLiteEngine) and engine is engines[0] for engine in engines)
    assert Path(engines[0].path) == tmp_path / "a.db"  # type: ignore[attr-defined]
    assert (places.queue.max_retries, engines[0].durability) == (5, "normal")  # type: ignore[attr-defined]
    await places.close()
    asked = get_queue("memory")
    assert isinstance(asked, InMemoryQueue), "a name that is asked for is what it says"
    elsewhere = get_queue(path=tmp_path / "b.db")
    assert Path(elsewhere.engine.path) == tmp_path / "b.db"  # type: ignore[attr-defined]
    await elsewhere.close()
    with pytest.raises(InvalidArgument, match=r"mysql://\*\*\*@host") as refusal:
        configure(backend_url="mysql://me:secret@host/db")
    assert "secret" not in str(refusal.value)


async def test_each_backend_may_be_named_by_itself(tmp_path: Path) -> None:
    config = configure(queue_backend="memory", state_store_backend="sqlite", sqlite_path=str(tmp_path / "b.db"))
    places = configured(config, max_retries=2)
    assert isinstance(places.queue, InMemoryQueue)
    assert isinstance(places.state, SQLiteStateStore)
    assert Path(places.state.engine.path) == tmp_path / "b.db"
    assert places.queue.max_retries == 2
    assert places.durable
    await places.close()


def test_a_queue_in_memory_takes_its_attempts_by_place_or_name() -> None:
    assert [queue.max_retries for queue in (InMemoryQueue(), InMemoryQueue(5), InMemoryQueue(max_retries=7))] == [
        3,
        5,
        7,
    ]


def test_a_name_nobody_has_is_refused() -> None:
    config: Any = RuntimeConfig(queue_backend="memori")
    with pytest.raises(
        ValueError,
        match=r"unknown queue 'memori'\. Did you mean 'memory'\? Write 'package\.module:Class' for a custom one",
    ):
        configured(config)


class Heard:
    """Stands for a sink of somebody's package."""

    def trace(self, event: dict[str, object]) -> None: ...


def test_the_configured_sinks_are_told_too() -> None:
    clock = VirtualClock()
    given = Heard()
    assert traced(RuntimeConfig(), (), clock) is None
    assert traced(RuntimeConfig(tracing_backend="noop", trace_sinks=["noop"]), (), clock) is None
    for config in (RuntimeConfig(trace_sinks=[given]), RuntimeConfig(tracing_backend=f"{__name__}:Heard")):
        assert traced(config, (), clock) is not None
    with pytest.raises(InvalidArgument, match="unknown trace sink 'langfuze'"):
        traced(RuntimeConfig(trace_sinks=["langfuze"]), (), clock)


@pytest.mark.parametrize("wrong", ["langfuse", [5], [Heard], Heard()], ids=["name", "number", "class", "sink"])
def test_what_is_no_list_of_sinks_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match="trace_sinks must be a list of trace sinks or their names"):
        AgentRunner(trace_sinks=wrong)
    with pytest.raises(InvalidArgument, match="trace_sinks must be a list of trace sinks or their names"):
        configure(trace_sinks=wrong)


async def test_a_factory_gives_the_backend_that_the_url_names(tmp_path: Path) -> None:
    here, there = tmp_path / "here.db", tmp_path / "there.db"
    configure(backend_url=f"sqlite:///{here}", durability="normal")
    makers: list[Any] = [get_queue, get_event_bus, get_state_store]
    for make in makers:
        for options, path in ({}, here), ({"path": there}, there), ({"db_path": there}, there):
            backend: Any = make(**options)
            assert Path(backend.engine.path) == path
            assert backend.engine.durability == "normal"
            await backend.close()
        assert isinstance(make("memory").engine, MemoryEngine)


async def test_beside_a_backend_that_was_handed_in_the_others_are_where_the_url_says(tmp_path: Path) -> None:
    config = RuntimeConfig(backend_url=f"sqlite:///{tmp_path / 'a.db'}")
    queue = InMemoryQueue()
    places = configured(config, queue)
    assert places.queue is queue
    assert isinstance(places.bus, SQLiteEventBus)
    assert isinstance(places.state, SQLiteStateStore)
    await places.close()


@pytest.mark.parametrize("bad", [None, 3, b"a.db"])
def test_what_is_no_place_is_named(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a path or a URL string"):
        open_url(bad)


@pytest.mark.parametrize("make", [get_queue, get_event_bus, get_state_store])
def test_a_backends_name_is_a_text(make: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"unknown (queue|event bus|state store) 3\. Known: memory, postgres, redis, sqlite\. "
    ):
        make(3)


@pytest.mark.parametrize(
    ("kind", "lacks", "article"),
    [(StateStore, "commit, read", "a"), (RunQueue, "commit, read", "a"), (EventBus, "_head, _rows, commit", "an")],
)
def test_a_backend_written_for_0_5_2_is_told_what_it_lacks(kind: Any, lacks: str, article: str) -> None:
    class Old(kind):  # type: ignore[misc]
        def __init__(self, path: str) -> None:
            self.path = path

        async def close(self) -> None: ...

    class Older(Old):
        async def commit(self, guard: Any, ops: Any) -> list[Any]:
            return []

    with pytest.raises(InvalidArgument) as caught:
        Old("x")
    assert str(caught.value) == (
        f"Old must define {lacks}, got a class without that. Since 0.6.0, {article} {kind.__name__} inherits the rest: "
        "see docs/guide/write-a-backend.md."
    )
    with pytest.raises(
        InvalidArgument, match=f"Older must define {lacks.removesuffix(', commit').removeprefix('commit, ')}, got"
    ):
        Older("x")
    assert str(inspect.signature(Old)) == "(path: 'str') -> 'None'"


class _Refusing:
    """A backend that cannot be made."""

    def __init__(self, **options: Any) -> None:
        raise InvalidArgument("not here")


@pytest.mark.parametrize("wrong", [{"tools": 5}, {"trace_sinks": [5]}, {"persistence": 5}, {"config": 5}])
def test_a_runner_that_is_refused_opens_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(InvalidArgument):
        AgentRunner.open(path, **wrong)
    configure(backend_url=f"sqlite:///{path}")
    with pytest.raises(InvalidArgument):
        AgentRunner(**wrong)
    assert not path.exists()


@pytest.mark.parametrize("settings", [{"trace_sinks": ["nobody"]}, {"state_store_backend": f"{__name__}:_Refusing"}])
def test_what_was_opened_for_a_runner_that_cannot_be_made_is_let_go(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    configure(queue_backend="sqlite", event_bus_backend="sqlite", sqlite_path=str(path), **settings)
    with pytest.raises(InvalidArgument):
        AgentRunner()
    assert path.exists()
    assert str(path) not in SQLiteEngine._open


def test_a_place_whose_runner_cannot_be_made_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with pytest.raises(InvalidArgument, match="trace sink"):
        AgentRunner.open(path, trace_sinks=["nobody"])  # type: ignore[list-item]
    assert str(path) not in SQLiteEngine._open


def test_a_backend_that_was_handed_in_is_left_open(tmp_path: Path) -> None:
    queue = SQLiteQueue(tmp_path / "a.db")
    with pytest.raises(InvalidArgument, match="trace sink"):
        AgentRunner(queue, trace_sinks=["nobody"])  # type: ignore[list-item]
    assert queue.engine._users == 1
    queue.engine.close_now()


@pytest.mark.parametrize("half", ["redis", "memory:", "sqlite:agents.db", "Redis", "redis:me:secret@h", "unix:/a.sock"])
def test_what_looks_like_a_url_names_no_file(half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opens: list[Any] = [open_url, AgentRunner.open, PersistenceManager.open, lambda url: get_queue_at(url)]
    for refused in opens:
        with pytest.raises(InvalidArgument, match=r"must contain '://', got .*Use \w+://.*, or \./\w+") as caught:
            refused(half)
        assert "secret" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def get_queue_at(url: str) -> RunQueue:
    configure(backend_url=url)
    return get_queue()


@pytest.mark.parametrize("name", ["./redis", Path("memory"), "redis/a.db", "rediscover.db", "a:b.db"])
async def test_a_file_may_be_called_so(name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "redis").mkdir() if name == "redis/a.db" else None
    places = open_url(name)
    assert (tmp_path / name).exists()
    await places.close()


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
@pytest.mark.parametrize("get", [get_queue, get_event_bus, get_state_store])
def test_an_option_that_no_backend_takes_is_told_with_the_nearest(get: Any, backend: str, tmp_path: Path) -> None:
    where = {"path": tmp_path / "a.db"} if backend == "sqlite" else {}
    with pytest.raises(UnknownSetting, match=r"unknown setting 'clok'\. Did you mean 'clock'\?"):
        get(backend, **where, clok=1)
    with pytest.raises(UnknownSetting, match=r"unknown setting 'zz'\. Known: clock,"):
        get(backend, **where, zz=1)
    assert not (tmp_path / "a.db").exists()
