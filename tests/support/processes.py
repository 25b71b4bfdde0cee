"""Processes that tests start, stop and kill, and what can be read of a database file they left behind."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds a child may take for anything


class Child:
    """`python -m tests.fault.jobs.<job>`, talked to line by line; it does not outlive the block.

    A fork of a process that has imported the library: the imports of a new one take longer than most jobs. Of the jobs
    that heed it, `life` is after how many seconds of being ready they are killed.
    """

    package = "tests.fault.jobs."
    #: What the process that is forked has imported; no module that reads the environment when it is imported.
    imports: tuple[str, ...] = (
        *(f"agent_runtime_core.{each}" for each in (
            "agents", "cli.inspect", "cli.main", "cli.worker", "persistence", "planning", "steps", "testing", "turns",
        )),
        *(["agent_runtime_core._engines.redis.engine"] if find_spec("redis") else []),
        "tests.fault.jobs.agents", "tests.fault.jobs.effects",
    )  # fmt: skip

    def __init__(self, job: str, *args: object, life: float | None = None) -> None:
        environment = {} if life is None else {"LIFE": str(life)}
        self.process = self._started(f"{self.package}{job}", *map(str, args), **environment)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        self._unread = b""

    def _started(self, module: str, *args: str, **environment: str) -> subprocess.Popen[bytes]:
        from tests.support.warm import warm  # which is a command itself

        return warm(*self.imports).fork(module, *args, **environment)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        self._stdin.close()
        self._stdout.close()

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll_line(self, seconds: float) -> str | None:
        """The next line it says within that time; None for silence, and for the end of what it says."""
        until = time.monotonic() + seconds
        while b"\n" not in self._unread:
            # What it has said is read, also when the time is over.
            if not select.select([self._stdout], [], [], max(until - time.monotonic(), 0.0))[0]:
                return None
            more = os.read(self._stdout.fileno(), 65536)
            if not more:
                return None
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def line(self) -> str:
        said = self.poll_line(PATIENCE)
        assert said is not None, f"the child said nothing; exit code {self.process.poll()}"
        return said

    def expect(self, word: str) -> str:
        """What follows `word` in the next line, which begins with it."""
        line = self.line()
        assert line.startswith(word), f"wanted {word!r}, heard {line!r}"
        return line[len(word) :].strip()

    def tell(self, line: str) -> None:
        self._stdin.write(line.encode() + b"\n")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def stop_between_commits(self, *places: str | Path) -> None:
        """SIGSTOP while it holds no commit lock of these files: others can write to them meanwhile."""
        self.stop()
        while committing(places):
            self.send(signal.SIGCONT)
            self.stop()

    def kill(self) -> bool:
        """SIGKILL; False if it had ended by itself."""
        self.send(signal.SIGKILL)
        return self.ended() == -signal.SIGKILL

    def hurry(self) -> int:
        """A second SIGTERM, and how it ended: to a process that stood still two are one, and it takes a third."""
        for _ in range(3):
            self.send(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self.process.wait(PATIENCE / 3)
        raise AssertionError(f"told to hurry, it did not end within {PATIENCE:g} s")

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    async def aline(self) -> str:
        """`line` for a test with a loop to keep turning."""
        return await asyncio.to_thread(self.line)

    async def aended(self) -> int:
        return await asyncio.to_thread(self.ended)


class Command(Child):
    """`python -m <module>` with these arguments."""

    package = ""


def until(true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Look until something another process does is seen."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.005)


async def becomes(true: Callable[[], Awaitable[bool]], what: str, seconds: float = PATIENCE) -> None:
    """The same for a question that has to be awaited."""
    end = time.monotonic() + seconds
    while not await true():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        await asyncio.to_thread(time.sleep, 0.01)


def committing(places: Iterable[str | Path]) -> bool:
    """Whether somebody holds a commit lock of these files."""
    for place in {str(place) for place in places if not str(place).startswith("redis://")}:
        fd = os.open(f"{place}.live/commit.lock", os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
    return False


def lines(path: Path) -> list[list[str]]:
    """The words of each whole line of a file of effects."""
    return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def image(db: Path) -> sqlite3.Connection:
    """A copy of what a dead process left behind, so that looking changes nothing of it; found intact."""
    copy = db.with_name(f"{db.name}.image")
    for suffix in ("", "-wal"):
        source, target = Path(f"{db}{suffix}"), Path(f"{copy}{suffix}")
        if source.exists():
            shutil.copyfile(source, target)
        else:
            target.unlink(missing_ok=True)
    conn = sqlite3.connect(copy)
    found = conn.execute("PRAGMA integrity_check").fetchall()
    assert found == [("ok",)], found
    return conn


#: The records of one run in `arc_journal`.
OF_RUN = (
    "id >> 32 = (SELECT coalesce((SELECT number FROM arc_journal_numbers j WHERE j.run_id = r.id),"
    " (SELECT n + (1 << 30) FROM arc_runs a WHERE a.run_id = r.id)) FROM (SELECT ? AS id) r)"
)


def recorded(conn: sqlite3.Connection, run_id: str) -> set[str]:
    """The names of the steps of a run that have a record."""
    if not conn.execute("SELECT 1 FROM sqlite_master WHERE name = 'arc_journal'").fetchone():
        return set()
    return {row[0] for row in conn.execute(f"SELECT name FROM arc_journal WHERE kind = 'done' AND {OF_RUN}", (run_id,))}
