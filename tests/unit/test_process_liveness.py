"""Proof of life, the commit lock and the doorbell beside a database file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agent_runtime_core._engines.sqlite.liveness import RESCAN, CommitLock, FifoNotifier, ProcessLiveness
from agent_runtime_core.testing import VirtualClock

fcntl = pytest.importorskip("fcntl")

ONE, TWO, CHILD, FIRST, A, B, C = (f"01ARZ3NDEKTSV4RRFFQ69G5F{n:02}" for n in range(7))

pytestmark = pytest.mark.skipif(os.name == "nt", reason="locks and FIFOs are POSIX's")


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def one(tmp_path: Path, clock: VirtualClock) -> Iterator[ProcessLiveness]:
    presence = ProcessLiveness(tmp_path, ONE, clock)
    yield presence
    presence.close()


@pytest.fixture
def two(tmp_path: Path, clock: VirtualClock) -> Iterator[ProcessLiveness]:
    presence = ProcessLiveness(tmp_path, TWO, clock)
    yield presence
    presence.close()


def test_a_living_holder_is_not_dead(one: ProcessLiveness, two: ProcessLiveness) -> None:
    assert one.dead([ONE, TWO, ""]) == ()
    assert one.dead(["gone"]) == ("gone",)


def test_nobody_sees_a_lock_file_that_is_not_locked_yet(
    tmp_path: Path, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, rename = [], os.rename

    def naming(hidden: Path, name: Path) -> None:
        assert not name.exists()
        fd = os.open(hidden, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        named.append(name.name)
        rename(hidden, name)

    monkeypatch.setattr(os, "rename", naming)
    ProcessLiveness(tmp_path, ONE, clock).close()
    assert named == [f"{ONE}.lock"]


def test_one_that_let_go_is_dead_and_leaves_no_files(one: ProcessLiveness, two: ProcessLiveness) -> None:
    two.open_fifo()
    two.close()
    assert one.dead([TWO]) == (TWO,)
    assert [each.name for each in one.directory.iterdir()] == [f"{ONE}.lock"]


def test_a_killed_process_is_dead_at_once_and_is_cleared_away(one: ProcessLiveness) -> None:
    code = (
        "import os, sys, pathlib; from agent_runtime_core._engines.sqlite.liveness import ProcessLiveness;"
        "from agent_runtime_core._core.clock import SYSTEM;"
        "p = ProcessLiveness(pathlib.Path(sys.argv[1]), sys.argv[2], SYSTEM); p.open_fifo(); print('up', flush=True);"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(one.directory), CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdin is not None
    with child.stdin, child.stdout:
        assert child.stdout.readline() == "up\n"
        assert one.dead([CHILD]) == ()
        child.kill()
        child.wait()
    assert one.dead([CHILD]) == (CHILD,)
    assert not (one.directory / f"{CHILD}.lock").exists()
    assert not (one.directory / f"{CHILD}.bell").exists()


def test_ringing_reaches_all_others_and_not_oneself(one: ProcessLiveness, two: ProcessLiveness) -> None:
    assert one.open_fifo()
    assert two.open_fifo()
    assert one.open_fifo()
    one.notify(["work", "events"])
    assert two.wait(5) == "ew"
    assert two.wait(0) == ""
    assert one.wait(0) == ""


def test_a_bell_hung_later_is_found_after_a_while(
    one: ProcessLiveness, two: ProcessLiveness, clock: VirtualClock
) -> None:
    one.notify("a")
    two.open_fifo()
    one.notify("b")
    assert two.wait(0) == ""
    clock.advance(RESCAN)
    one.notify("c")
    assert two.wait(5) == "c"


def test_whoever_made_the_directory_looks_for_others_after_a_while(
    tmp_path: Path, clock: VirtualClock, two: ProcessLiveness
) -> None:
    first = ProcessLiveness(tmp_path, FIRST, clock, is_new=True)
    two.open_fifo()  # it looks by itself for so long
    first.notify("a")
    assert two.wait(0) == ""
    clock.advance(RESCAN)
    first.notify("b")
    assert two.wait(5) == "b"
    first.close()


def test_a_bell_that_is_full_rings_already(one: ProcessLiveness, two: ProcessLiveness) -> None:
    two.open_fifo()
    for _ in range(70_000):
        one.notify("x")
    assert two.wait(0) == "x" * 4096


def test_a_bell_without_a_process_is_let_go(one: ProcessLiveness, two: ProcessLiveness, clock: VirtualClock) -> None:
    two.open_fifo()
    one.notify("a")
    assert len(one._peers) == 1
    bell, two.fifo = two.fifo, None
    assert bell is not None
    os.close(bell)
    one.notify("b")
    assert one._peers == {}
    # Its file is still there, with nobody to read it.
    clock.advance(RESCAN)
    one.notify("c")
    assert one._peers == {}


def left_by_the_dead(directory: Path, name: str, *suffixes: str) -> None:
    """Files as a killed process leaves them."""
    for suffix in suffixes:
        path = directory / f"{name}.{suffix}"
        os.mkfifo(path) if suffix == "bell" else path.touch()


def test_what_the_dead_left_is_cleared_away_by_the_next_who_comes(one: ProcessLiveness, clock: VirtualClock) -> None:
    left_by_the_dead(one.directory, A, "lock", "bell")
    left_by_the_dead(one.directory, B, "lock")
    CommitLock(one.directory).close()
    ProcessLiveness(one.directory, C, clock).close()
    assert {path.name for path in one.directory.iterdir()} == {f"{ONE}.lock", "commit.lock"}


def test_a_bell_that_nobody_reads_any_more_is_cleared_away_if_its_process_is_gone(
    one: ProcessLiveness, two: ProcessLiveness, clock: VirtualClock
) -> None:
    left_by_the_dead(one.directory, A, "lock", "bell")
    left_by_the_dead(one.directory, B, "bell")
    left_by_the_dead(one.directory, two.holder, "bell")  # it lives, and is about to open it
    clock.advance(RESCAN * 2)
    one.notify(["work"])
    left = {path.name for path in one.directory.iterdir() if path.suffix}
    assert left == {f"{one.holder}.lock", f"{two.holder}.lock", f"{two.holder}.bell"}


def test_a_bell_that_was_taken_down_is_forgotten(
    one: ProcessLiveness, two: ProcessLiveness, clock: VirtualClock
) -> None:
    two.open_fifo()
    one.notify("a")
    two.close()
    clock.advance(RESCAN)
    one.notify("b")
    assert one._peers == {}


def test_a_directory_that_is_gone_rings_nobody(tmp_path: Path, clock: VirtualClock) -> None:
    directory = tmp_path / "live"
    directory.mkdir()
    presence = ProcessLiveness(directory, ONE, clock)
    presence.open_fifo()
    for each in directory.iterdir():
        each.unlink()
    directory.rmdir()
    presence.notify("a")
    presence.close()


def test_who_listed_the_bells_before_this_one_hung_is_heard_although_others_ring_on() -> None:
    class Ringing:
        """A bell that is rung for another topic all the time, and so never leaves a moment to look at the file."""

        fifo = 1
        now = 0.0
        waits: ClassVar[list[float]] = []

        def open_fifo(self) -> bool:
            return True

        def boot(self) -> float:
            return self.now

        def wait(self, seconds: float) -> str:
            self.waits.append(seconds)
            self.now += RESCAN
            heard.wait(0.001)
            return "e"

    def connect() -> Any:
        raise AssertionError("there was no time")

    heard, ringing = threading.Event(), Ringing()
    bell = FifoNotifier(ringing, ringing, connect, lambda conn: None)  # type: ignore[arg-type]
    bell.listen("work", heard.set)
    assert heard.wait(10)
    bell.close(lambda: None, 10)
    assert ringing.waits[:2] == [2 * RESCAN] * 2


def test_one_may_wake_oneself(one: ProcessLiveness) -> None:
    one.notify_self()
    one.open_fifo()
    one.notify_self()
    assert one.wait(5) == "!"


def test_without_fifos_there_is_no_bell(one: ProcessLiveness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "mkfifo")
    assert not one.open_fifo()


def test_what_is_done_beside_commits_keeps_those_of_this_process_out_too(tmp_path: Path) -> None:
    lock = CommitLock(tmp_path)
    with lock.exclude_others(5.0) as had:
        assert had
        assert not lock.try_acquire()
    with lock, lock.exclude_others(0.01) as had:
        assert not had, "there is a commit"
    assert lock.try_acquire(), "a wait that was given up keeps nothing"
    lock.release()
    with lock:
        timer = threading.Timer(0.05, lock.release)
        timer.start()
        with lock.exclude_others(5.0) as had:
            assert had
            assert not lock.try_acquire()
        timer.join()
    assert lock._exclusive_fds == set()
    lock.close()


def test_the_commit_lock_lets_one_in_at_a_time(tmp_path: Path) -> None:
    first, second = CommitLock(tmp_path), CommitLock(tmp_path)
    entered = threading.Event()

    def enter() -> None:
        with second:
            entered.set()

    with first:
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    assert entered.wait(5)
    thread.join()
    first.close()
    first.close()
    second.close()


def test_a_forked_copy_leaves_the_files_alone(one: ProcessLiveness, tmp_path: Path) -> None:
    one.open_fifo()
    lock_fd = os.dup(one._lock_fd)
    one.close(forked=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"{ONE}.bell", f"{ONE}.lock"]
    os.close(lock_fd)
