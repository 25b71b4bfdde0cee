"""The directory `.live` of a database: what the system refuses, what others put there, file systems without FIFOs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import resource
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, RunStatus, open_run
from agent_runtime_core._engines.base import Op
from agent_runtime_core._engines.sqlite import liveness
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine
from agent_runtime_core._engines.sqlite.live_directory import open_lock
from agent_runtime_core._engines.sqlite.liveness import RESCAN, ProcessLiveness
from agent_runtime_core.errors import StorageBusy, StorageCorrupt, StorageError, StorageFull
from agent_runtime_core.testing import VirtualClock
from tests.support.runs import Script, soon
from tests.unit.test_engine_sqlite import THINGS, get, opened

fcntl = pytest.importorskip("fcntl")

OURS = "agent_runtime_core._engines."
PEER = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")


class Failing:
    """Fails the nth call of one system function by the modules of the engine."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, nth: int) -> None:
        self.real = getattr(owner, name)
        self.name, self.number, self.left = name, number, nth
        self.lock = threading.Lock()
        patch.setattr(owner, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # To unlock does not fail.
        if caller.startswith(OURS) and not (self.name == "flock" and args[1] == fcntl.LOCK_UN):
            with self.lock:
                self.left -= 1
                now = self.left == 0
            if now:
                raise OSError(
                    self.number, os.strerror(self.number), *[a for a in args[:1] if isinstance(a, str | Path)]
                )
        return self.real(*args, **options)


async def used(path: Path) -> None:
    """Open a database, use all of the engine that meets the directory, and close it."""
    engine = SQLiteEngine.open(path)
    try:
        engine.add(THINGS)
        heard = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(heard.set)

        stop = engine.listen("things", wake)
        await engine.commit(None, [Op("put", ("a", 1))])
        engine._liveness._scanned_at = -1.0  # list the bells again
        await asyncio.to_thread(engine.commit_from_thread, None, [Op("put", ("b", 2))])
        assert await engine.read(get, "b") == 2
        async with asyncio.timeout(10):
            await heard.wait()
        stop()
        engine.dead_holders([PEER, "0" * 26])
        await engine.compact(always=True)
    finally:
        await engine.close()


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[ProcessLiveness]:
    """Another process on the same database."""
    live = tmp_path / "a.db.live"
    live.mkdir(mode=0o700)
    there = ProcessLiveness(live, PEER, VirtualClock())
    there.open_fifo()
    yield there
    there.close()


FUNCTIONS = [
    (os, name) for name in (
        "open", "mkdir", "mkfifo", "chmod", "fchmod", "chown", "stat", "lstat", "fstat", "rename", "unlink", "listdir",
        "read", "write", "lseek", "ftruncate", "statvfs",
    )
] + [(fcntl, "flock")]  # fmt: skip


def open_below(folder: Path) -> list[str]:
    """Return the files below `folder` that this process has open; other tests have others."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return sorted(each for each in found if each.startswith(str(folder)))


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("with_peer", [False, True], ids=["alone", "with another"])
@pytest.mark.parametrize(("owner", "name"), FUNCTIONS, ids=[name for _, name in FUNCTIONS])
async def test_whatever_the_system_refuses_is_a_storage_error_and_works_again(
    tmp_path: Path, owner: Any, name: str, with_peer: bool, each: int, request: pytest.FixtureRequest
) -> None:
    if with_peer:
        request.getfixturevalue("peer")
    await used(tmp_path / "warm.db")
    gc.collect()
    before = open_below(tmp_path)
    # Alone, what is refused is mostly the making of the directory; the next tests refuse it with other errors.
    for number in (errno.EMFILE, errno.EACCES) if with_peer else (errno.EMFILE,):
        for nth in range(1, 60, each):
            # A name of its own for the first, so that everything is made; then one that is there.
            path = tmp_path / ("a.db" if with_peer or nth % 2 else f"{number}-{nth}.db")
            with pytest.MonkeyPatch.context() as patch:
                failing = Failing(patch, owner, name, number, nth)
                with contextlib.suppress(StorageError):
                    await used(path)
            await used(path)
            if failing.left > 0:
                break
        else:
            pytest.fail("more than 60 calls")
    gc.collect()
    assert open_below(tmp_path) == before
    left = {path.name for path in (tmp_path / "a.db.live").iterdir()}
    assert left == ({"commit.lock", f"{PEER}.lock", f"{PEER}.bell"} if with_peer else {"commit.lock"})


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [(errno.EMFILE, StorageBusy, "raise the limit"), (errno.ENOSPC, StorageFull, "no space to write"),
     (errno.EDQUOT, StorageFull, "Free space or inodes"), (errno.EROFS, StorageError, "may not be read or written"),
     (errno.EACCES, StorageError, r"a\.db\.live may not be read or written")],
)  # fmt: skip
def test_the_error_says_which_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError], words: str
) -> None:
    Failing(monkeypatch, os, "mkdir", number, 1)
    with pytest.raises(kind, match=words):
        opened(tmp_path / "a.db")


# -- file systems without FIFOs


REFUSALS = [errno.EPERM, errno.EACCES, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EROFS]


@pytest.mark.parametrize("number", REFUSALS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("call", ["mkfifo", "open"])
async def test_without_fifos_everything_works_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith(".bell"):
            raise OSError(number, os.strerror(number))
        return real(path, *args, **options)

    real = getattr(os, call)
    monkeypatch.setattr(os, call, refused)
    monkeypatch.setattr(liveness, "_RETRY_FIFO", 0.0)
    script = Script(lambda ctx: ctx.step("s", lambda: 1))
    with caplog.at_level(logging.INFO, "agent_runtime_core"):
        async with AgentRunner.open(tmp_path / "a.db") as runner:
            runner.registry.register(script)
            working = asyncio.create_task(runner.run_loop(handle_signals=False))
            run_id = await runner.submit(script.key)
            assert (await runner.wait(run_id, timeout=30)).status == RunStatus.SUCCEEDED
            assert (await runner.execute(script, "other")).status == RunStatus.SUCCEEDED
            runner.stop()
            await working
        async with open_run(tmp_path / "b.db", run_id="r") as ctx:
            assert await ctx.step("s", lambda: 1) == 1
    said = [record.getMessage() for record in caplog.records if "found by polling" in record.getMessage()]
    assert [sum(f"{name}.live" in line for line in said) for name in ("a.db", "b.db")] == [1, 1]
    assert not list((tmp_path / "a.db.live").glob("*.bell"))


async def test_a_fifo_that_could_not_be_made_is_made_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "_RETRY_FIFO", 0.0)
    engine = opened(tmp_path / "a.db")
    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, os, "mkfifo", errno.ENOSPC, 1)
        engine.listen("things", lambda: None)
        await soon(lambda: engine._liveness.fifo is not None)
    await engine.close()


async def test_all_is_well_once_descriptors_are_free_again(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    engine = opened(tmp_path / "a.db")
    taken: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        stop = engine.listen("things", lambda: None)
        assert not engine._liveness.fifo
        with pytest.raises(StorageError):
            opened(tmp_path / "b.db")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert engine._liveness.open_fifo()
    stop()
    await engine.commit(None, [Op("put", ("a", 1))])
    await engine.close()
    await used(tmp_path / "b.db")


# -- what others put there


@pytest.mark.parametrize("kind", ["link", "file", "link to a FIFO"])
async def test_a_bell_that_is_no_fifo_is_not_written(tmp_path: Path, peer: ProcessLiveness, kind: str) -> None:
    bell, other = peer.directory / f"{PEER[:-1]}0.bell", tmp_path / "notes"
    if kind == "link to a FIFO":
        os.mkfifo(other)
        reading = os.open(other, os.O_RDWR | os.O_NONBLOCK)
    else:
        other.write_text("IMPORTANT")
    bell.write_text("IMPORTANT") if kind == "file" else bell.symlink_to(other)
    await used(tmp_path / "a.db")
    if kind == "link to a FIFO":
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
        os.close(reading)
    else:
        assert bell.read_text() == other.read_text() == "IMPORTANT"
    assert peer.wait(5), "the others are notified"


async def test_files_with_other_names_are_left_alone(tmp_path: Path, peer: ProcessLiveness) -> None:
    foreign = ["notes.lock", "notes.bell", "x" * 26 + ".lock", f"{PEER}x.lock", "README", ".keep"]
    for name in foreign:
        (peer.directory / name).touch()
    (peer.directory / "folder.lock").mkdir()
    await used(tmp_path / "a.db")
    assert {each.name for each in peer.directory.iterdir()} >= {*foreign, "folder.lock"}


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory", "refused"])
def test_a_lock_that_cannot_be_looked_at_counts_as_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    lock = tmp_path / f"{PEER}.lock"
    match kind:
        case "link":
            (tmp_path / "there").touch()
            lock.symlink_to(tmp_path / "there")
        case "FIFO":
            os.mkfifo(lock)
        case "directory":
            lock.mkdir()
        case "refused":
            lock.touch()
            real = open_lock

            def refuse(path: Any, flags: int = 0) -> int:
                if path == lock:
                    raise PermissionError(errno.EACCES, "Permission denied")
                return real(path, flags)

            monkeypatch.setattr(liveness, "open_lock", refuse)
    other = ProcessLiveness(tmp_path, f"{PEER[:-1]}0", VirtualClock())
    assert other.dead([PEER]) == ()
    other.close()
    assert lock.exists()


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_commit_lock_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.db.live").mkdir(mode=0o700)
    lock, other = tmp_path / "a.db.live" / "commit.lock", tmp_path / "notes"
    if kind == "link":
        lock.symlink_to(other)
    else:
        os.mkfifo(lock)
    with pytest.raises(StorageCorrupt if kind == "link" else StorageError, match=r"commit\.lock (is|must be)"):
        opened(tmp_path / "a.db")
    assert not other.exists()


def test_a_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.db.live").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"a\.db\.live must be a directory, got a symbolic link"):
        opened(tmp_path / "a.db")
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not (tmp_path / "a.db").exists()


async def test_a_directory_of_ours_that_all_may_write_is_closed_to_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live = tmp_path / "a.db.live"
    live.mkdir()
    live.chmod(0o777)
    with caplog.at_level(logging.INFO, "agent_runtime_core"):
        await used(tmp_path / "a.db")
        await used(tmp_path / "a.db")
    assert stat.S_IMODE(live.stat().st_mode) == 0o700
    assert [r.getMessage() for r in caplog.records] == [f"{live} had mode 777, changed to 700"]


async def test_a_file_system_without_permissions_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live = tmp_path / "a.db.live"
    live.mkdir()
    live.chmod(0o777)
    monkeypatch.setattr(os, "chmod", lambda *args, **options: None)  # as exFAT, or a mount of Windows
    with caplog.at_level(logging.INFO, "agent_runtime_core"):
        await used(tmp_path / "a.db")
    assert not caplog.records


OPEN = """
import os, sys
from agent_runtime_core._engines.sqlite.engine import SQLiteEngine

path, user, umask, stays = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "stays"
os.umask(umask)
if user:  # only now: the modules may be out of its reach
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
engine = SQLiteEngine.open(path)
engine.listen("things", print)
print(engine._liveness.fifo is not None, flush=True)
if stays:
    sys.stdin.read()
engine.close_now()
"""
APP = 65534  # the user id of an application


def command(db: Path, user: int, umask: int = 0o022, stays: str = "") -> list[str]:
    return [sys.executable, "-c", OPEN, *map(str, (db, user, umask, stays))]


def open_as(user: int, db: Path, umask: int = 0o022) -> tuple[str, str]:
    """Open the database in a process of that user; whether it had a FIFO, and the errors."""
    done = subprocess.run(command(db, user, umask), capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip(), done.stderr


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that another user may enter; pytest closes its own to all but one user, whenever it starts."""
    with tempfile.TemporaryDirectory() as where:
        os.chmod(where, 0o755)
        yield Path(where)


@pytest.mark.parametrize("umask", [0o277, 0o777, 0o077, 0], ids=oct)
def test_every_umask_leaves_a_directory_that_its_user_can_use(shared: Path, umask: int) -> None:
    user = APP if os.geteuid() == 0 else 0
    if user:
        os.chown(shared, user, user)
    for _ in range(2):
        assert open_as(user, shared / "a.db", umask) == ("True", "")
    assert stat.S_IMODE((shared / "a.db.live").stat().st_mode) == 0o700
    assert stat.S_IMODE((shared / "a.db").stat().st_mode) == 0o600


@needs_root
@pytest.mark.parametrize("end", ["kill", "stay"])
@pytest.mark.parametrize("first", ["root", "app"])
def test_a_process_of_root_keeps_no_process_of_the_app_from_its_file(shared: Path, first: str, end: str) -> None:
    os.chown(shared, APP, APP)
    db = shared / "a.db"
    if first == "app":
        assert open_as(APP, db) == ("True", "")
    else:  # only the database is there, as restored
        db.touch()
        os.chown(db, APP, APP)
    stays = command(db, 0, stays="stays")
    with subprocess.Popen(stays, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as root:
        assert root.stdout is not None
        assert root.stdout.readline() == "True\n"
        if end == "kill":
            root.kill()
            root.wait()
        assert open_as(APP, db) == ("True", "")
        root.kill()
    assert open_as(APP, db) == ("True", "")
    assert [each.name for each in Path(f"{db}.live").iterdir()] == ["commit.lock"]


@needs_root
def test_a_lock_of_root_that_was_left_there_counts_as_alive(shared: Path) -> None:
    os.chown(shared, APP, APP)
    assert open_as(APP, shared / "a.db") == ("True", "")
    lock = shared / "a.db.live" / f"{PEER}.lock"
    lock.touch(0o600)  # as an earlier version has left it
    assert open_as(APP, shared / "a.db") == ("True", "")
    assert lock.exists()


@needs_root
def test_a_directory_of_another_user_is_refused(shared: Path) -> None:
    shared.chmod(0o1777)
    live = shared / "a.db.live"
    live.mkdir()
    live.chmod(0o777)
    os.chown(live, APP - 1, APP - 1)
    _, errors = open_as(APP, shared / "a.db")
    assert "StorageError" in errors
    assert "a.db.live must belong to the user of this process or of " in errors
    assert f"got user id {APP - 1}" in errors
    assert not (shared / "a.db").exists()


def test_a_listing_that_fails_rings_those_who_are_known(
    tmp_path: Path, peer: ProcessLiveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock()
    other = ProcessLiveness(peer.directory, f"{PEER[:-1]}0", clock)
    other.notify(["a"])
    assert peer.wait(5) == "a"
    clock.advance(2 * RESCAN)
    Failing(monkeypatch, os, "listdir", errno.EMFILE, 1)
    other.notify(["b"])
    assert peer.wait(5) == "b"
    other.close()
