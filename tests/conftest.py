"""What every test gets: a loop and a time limit for coroutine tests, and no setting left behind by another test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import itertools
import os
import re
import signal
from collections import defaultdict
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cases import close_files, forget
from tests.support.postgres_servers import PostgresServer
from tests.support.redis_servers import RedisCluster, RedisServer

#: They import the engine itself, which needs the redis package.
collect_ignore = [] if find_spec("redis") else ["unit/test_engine_redis.py", "fault/test_redis_cuts.py"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As in the background of a shell script. Workers respect that, and tests send SIGINT to their own.
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Only hangs take this long: on a busy machine, one of eight programs, a test takes ten times its usual time.
LIMIT_SECONDS = 180.0
SLOW_LIMIT_SECONDS = 300.0
STANDSTILL = 15.0
LONGEST_NAME = 100  # characters of a text in the name of a case
#: Folders of many short tests, which come last.
SHORT = ("contract", "server", "unit")
#: What the tests give as keys.
KEYS = re.compile(rb"sk-(?:ant-|lf-)?canary-[\w-]+")


class EagerTasks(asyncio.DefaultEventLoopPolicy):
    """Gives every loop of this process eager tasks: a coroutine starts inside the call that makes its task."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        loop = super().new_event_loop()
        loop.set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined, unused-ignore]
        return loop


if os.environ.get("EAGER_TASKS"):  # needs Python 3.12 or later
    asyncio.set_event_loop_policy(EagerTasks())


def pytest_configure(config: pytest.Config) -> None:
    """Collect a folder once, in whatever order files are given: pytest 9.1 collects `tests` again for each file in it,
    and no file of another folder gets the fixtures of its conftest.py after that (pytest issue 14635)."""

    def folder(argument: str) -> Path:
        path = config.invocation_params.dir / argument.partition("::")[0]
        return path if path.is_dir() else path.parent

    config.args.sort(key=folder)
    if "live" not in config.option.markexpr:  # only those tests ask a server on the internet
        # Each HTTP client reads this file. To read all certificates of a system takes half of the time of a short test.
        os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "certificate.pem")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name the case of a long text by its beginning and its length.

    pytest-xdist sends each name several times, and every process that a test starts gets it in its environment.
    """
    if not isinstance(val, str | bytes) or len(val) <= LONGEST_NAME:
        return None
    start = val[: LONGEST_NAME // 2]
    return f"{start if isinstance(start, str) else start.decode('ascii', 'backslashreplace')}... of {len(val)}"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without looking for garbage, of which there is little, in more and more that stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}
    limit = SLOW_LIMIT_SECONDS if pyfuncitem.get_closest_marker("slow") else LIMIT_SECONDS

    async def within_the_limit() -> None:
        guard = asyncio.timeout(limit)
        try:
            async with guard:
                await test(**arguments)
        except TimeoutError:
            if not guard.expired():
                raise
            pytest.fail(f"still running after {limit:g} s")

    asyncio.run(within_the_limit(), debug=False)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """No key of the tests is in what any of them logged, printed, raised or left in its folder, databases first of
    all."""
    report = yield
    if report.when != "setup":
        said = [(f"what it said: {name}", text.encode()) for name, text in report.sections]
        said.append(("its error", str(report.longrepr or "").encode()))
        left = _left(item) if report.when == "call" else ()
        found = [where for where, text in (*said, *left) if KEYS.search(text)]
        if found:
            report.outcome, report.longrepr = "failed", f"a key of the tests is in {', '.join(sorted(set(found)))}"
    return report


def _left(item: pytest.Item) -> Iterator[tuple[str, bytes]]:
    """The files that a test left in its folder."""
    folder: Path | None = getattr(item, "funcargs", {}).get("tmp_path")
    if folder is None:
        return
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError):
                yield path.relative_to(folder).as_posix(), path.read_bytes()


@pytest.fixture(autouse=True)
def _nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        # Processes that a test starts are not measured: they would take up to twice as long.
        if name.startswith(("AGENT_RUNTIME_", "COVERAGE_PROCESS")) or name in {"OPENAI_API_KEY", "ANTHROPIC_API_KEY"}:
            monkeypatch.delenv(name)
    yield
    forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Close the SQLite files that a test has left open."""
    try:
        return (yield)
    finally:
        close_files()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One server for all tests that do not end, stop or configure it: those start one of their own."""
    # Functions and keys of many tests; nothing reaches the disk.
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """One cluster for all tests that leave it as it is, which pytest-xdist runs in one process: it starts slowly."""
    with RedisCluster() as cluster:
        yield cluster


_PREFIXES = itertools.count(1)


@pytest.fixture
def redis_url(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """That server, with a prefix for this test alone, so that it sees no key of another; here it is never taken for one
    that is away, though its machine may give it no time for some seconds."""
    if find_spec("redis"):
        monkeypatch.setattr(
            importlib.import_module("agent_runtime_core._engines.redis.connection"), "ANSWER", STANDSTILL
        )
        monkeypatch.setattr(
            importlib.import_module("agent_runtime_core._engines.redis.engine"), "COMMIT_TIMEOUT", STANDSTILL
        )
    return f"{redis_server.url}?prefix=t{next(_PREFIXES)}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One server for all tests that do not end, stop or configure it: those start one of their own."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """That server, with the beginning of the name of a schema; what a test has made of it is dropped after the test.

    As with Redis, a machine that gives the server no time for some seconds is no outage.
    """
    threaded = importlib.import_module("agent_runtime_core._engines.threaded")
    monkeypatch.setattr(threaded, "COMMIT_TIMEOUT", STANDSTILL)
    name = f"t{next(_PREFIXES)}"
    yield f"{postgres_server.url}?schema={name}"
    drop = "SELECT nspname FROM pg_namespace WHERE nspname = %s OR nspname LIKE %s"
    for (schema,) in postgres_server.ask(drop, name, f"{name}\\_%"):
        postgres_server.ask(f"SET client_min_messages = error; DROP SCHEMA {schema} CASCADE")


def pytest_collection_finish() -> None:
    """What is there before the first test stays: looking through it takes up to a second, again and again."""
    gc.collect()
    gc.freeze()
    gc.unfreeze = _unfreeze


def _unfreeze() -> None:
    """Instead of `gc.unfreeze`, which made the tests after it take twice as long, whoever called it."""
    raise AssertionError("gc.unfreeze() would slow down all tests of this process. Call it in another process")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the slow tests, and repeats of a case on more backends, only if `-m` asks for tests.

    Each slow test uses all cores by itself: with `--dist loadgroup`, pytest-xdist runs them in one process. In another
    one it runs what needs litellm, whose import takes five seconds, and the servers of the tests of the wire.
    """
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group("slow"))
        elif "redis_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("redis_cluster"))
        elif "litellm" in item.nodeid or item.get_closest_marker("wire"):
            item.add_marker(pytest.mark.xdist_group("litellm"))
    if not config.option.markexpr:
        more = [item for item in items if any(map(item.get_closest_marker, ("slow", "all_backends")))]
        if more:
            config.hook.pytest_deselected(items=more)
            left_out = set(more)
            items[:] = [item for item in items if item not in left_out]
    if hasattr(config, "workerinput"):
        _distribute(items)


def _distribute(items: list[pytest.Item]) -> None:
    """Let long tests begin first, and give the short tests of a file to a process in tens.

    With `--dist loadgroup`, the scheduler of pytest-xdist counts all groups of a process after each test. That took
    17 s when each of 19,000 tests was a group.
    """
    places = {item: item.path.relative_to(Path(__file__).parent).parts[0] in SHORT for item in items}
    items.sort(key=places.__getitem__)
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    for item in items:
        if places[item] and not item.get_closest_marker("xdist_group"):
            file = item.nodeid.partition("::")[0]
            item.add_marker(pytest.mark.xdist_group(f"{file} {next(numbers[file]) // 10}"))
